//! Codec error: how far weights are from what a format stores of them.
//!
//! Mean squared errors are taken in the format's *own* basis: rotated, scaled by AWQ and padded for MQ formats,
//! the model's for the others. That is where the codec works, and where published figures are measured. Zero
//! columns that pad K are encoded like any others, come out of the rotation as ordinary weights (or as zeros,
//! where a block is all padding), and count. [`CodecError::rel_rms`] is taken in the model's basis over logical
//! columns, so it compares formats of different bases.
//!
//! Per tensor, memory is three times the weights in the format's basis, beside the caller's weights and the bytes.
//! Sums are made per strip of rows and added in the strips' order: results do not depend on the number of threads.

use rayon::prelude::*;
use serde::{Serialize, Serializer};

use crate::error::Result;
use crate::format::{Format, Standing};
use crate::tensor::{EncodeOptions, QuantTensor, StripDecoder, StripEncoder};

/// The v1 and the V2 format of each width, by ascending bits.
pub const GENERATIONS: [(Format, Format); 5] = [
    (Format::Mq2V1, Format::Mq2V2),
    (Format::Mq3V1, Format::Mq3V2),
    (Format::Mq4V1, Format::Mq4V2),
    (Format::Mq5V1, Format::Mq5V2),
    (Format::Mq6V1, Format::Mq6V2),
];

/// Error of one format on one tensor, or on all tensors of a [`Summary`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CodecError {
    /// The format; its name in JSON.
    #[serde(serialize_with = "name")]
    pub format: Format,
    /// What the format is for, in words to show beside it.
    pub standing: &'static str,
    /// Tensors measured.
    pub tensors: u64,
    /// Weights as the model has them: M·logical K.
    pub logical_weights: u64,
    /// Weights in the format's own basis, which [`mse`](Self::mse) is the mean over: M·stored K, padding included.
    pub weights: u64,
    /// How many of them count as a tensor's largest 1 %: ⌈weights / 100⌉ per tensor.
    pub tail_weights: u64,
    /// Mean squared error in the format's own basis, in squared weight units.
    pub mse: f64,
    /// The same over each tensor's largest 1 % by magnitude in that basis; of equal magnitudes the first by index
    /// (row-major) are taken.
    pub tail_mse: f64,
    /// rms(w − decoded) / rms(w) in the model's basis, rotation and AWQ undone. 0 where there is no error, and
    /// infinite where only the weights are all 0.
    pub rel_rms: f64,
    /// Bits stored per logical weight, headers and padding included.
    pub bits_per_weight: f64,
    #[serde(skip)]
    sums: Sums,
}

fn name<S: Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(format.name())
}

/// What the figures of a [`CodecError`] are quotients of. Quotients cannot be added, these can.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Sums {
    tensors: u64,
    logical_weights: u64,
    weights: u64,
    tail_weights: u64,
    bytes: u64,
    /// Σ error² in the format's basis.
    error: f64,
    /// Σ error² of the largest 1 %.
    tail_error: f64,
    /// Σ error² in the model's basis.
    model_error: f64,
    /// Σ w² in the model's basis.
    model_power: f64,
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.tensors += other.tensors;
        self.logical_weights += other.logical_weights;
        self.weights += other.weights;
        self.tail_weights += other.tail_weights;
        self.bytes += other.bytes;
        self.error += other.error;
        self.tail_error += other.tail_error;
        self.model_error += other.model_error;
        self.model_power += other.model_power;
    }

    fn figures(self, format: Format) -> CodecError {
        let s = self;
        CodecError {
            format,
            standing: format.spec().standing.note(),
            tensors: s.tensors,
            logical_weights: s.logical_weights,
            weights: s.weights,
            tail_weights: s.tail_weights,
            mse: s.error / s.weights as f64,
            tail_mse: s.tail_error / s.tail_weights as f64,
            rel_rms: if s.model_error == 0.0 { 0.0 } else { (s.model_error / s.model_power).sqrt() },
            bits_per_weight: s.bytes as f64 * 8.0 / s.logical_weights as f64,
            sums: s,
        }
    }
}

impl CodecError {
    /// Whether every listing must mark the format as a wire format only.
    pub fn is_wire_only(&self) -> bool {
        self.format.spec().standing == Standing::WireOnly
    }
}

/// Encodes `weights`, row-major `[rows][k]` in the model's basis, and measures what the format makes of them.
///
/// # Errors
/// As [`QuantTensor::encode`]: a shape or length that does not fit, a weight that is not finite or out of range.
pub fn tensor_error(
    name: &str,
    rows: usize,
    k: usize,
    weights: &[f32],
    format: Format,
    options: &EncodeOptions,
) -> Result<CodecError> {
    let tensor = QuantTensor::encode(name, format, rows, k, weights, options)?;
    let stored_k = tensor.stored_k();
    let strip_rows = format.spec().block_rows;
    let encoder = StripEncoder::new(name, format, k, options)?;
    let decoder = StripDecoder { format, logical_k: k, stored_k, awq: options.awq.clone() };

    let mut wanted = vec![0f32; rows * stored_k];
    let mut got = vec![0f32; rows * stored_k];
    let strips: Vec<[f64; 3]> = tensor
        .strips()
        .zip(weights.par_chunks_exact(strip_rows * k))
        .zip(wanted.par_chunks_exact_mut(strip_rows * stored_k))
        .zip(got.par_chunks_exact_mut(strip_rows * stored_k))
        .map_init(
            || (Vec::new(), Vec::new(), vec![0f32; strip_rows * k]),
            |(prepared, scratch, model), (((bytes, w), wanted), got)| {
                encoder.prepare(w, prepared);
                wanted.copy_from_slice(prepared);
                format.spec().codec.decode(bytes, stored_k, got);
                decoder.decode(bytes, scratch, model);
                let power = w.iter().map(|w| f64::from(*w).powi(2)).sum();
                [squared_error(wanted, got), squared_error(w, model), power]
            },
        )
        .collect();

    let mut sums = Sums {
        tensors: 1,
        logical_weights: weights.len() as u64,
        weights: wanted.len() as u64,
        bytes: tensor.bytes().len() as u64,
        ..Sums::default()
    };
    for [error, model_error, model_power] in strips {
        sums.error += error;
        sums.model_error += model_error;
        sums.model_power += model_power;
    }
    (sums.tail_weights, sums.tail_error) = tail(&wanted, &got);
    Ok(sums.figures(format))
}

fn squared_error(wanted: &[f32], got: &[f32]) -> f64 {
    wanted.iter().zip(got).map(|(w, g)| (f64::from(*w) - f64::from(*g)).powi(2)).sum()
}

/// How many weights are the largest 1 %, rounded up, and the sum of their squared errors.
fn tail(wanted: &[f32], got: &[f32]) -> (u64, f64) {
    let count = wanted.len().div_ceil(100);
    // Magnitudes are ordered like their bits, and integers select faster.
    let bits = |w: &f32| w.abs().to_bits();
    let mut magnitudes: Vec<u32> = wanted.iter().map(bits).collect();
    let smallest = wanted.len() - count;
    let (_, &mut threshold, above) = magnitudes.select_nth_unstable(smallest);
    // Some of those that equal the threshold may have to stay out.
    let mut ties = count - above.iter().filter(|m| **m > threshold).count();
    let mut sum = 0.0;
    for (w, g) in wanted.iter().zip(got) {
        let m = bits(w);
        if m > threshold || (m == threshold && ties > 0) {
            ties -= usize::from(m == threshold);
            sum += (f64::from(*w) - f64::from(*g)).powi(2);
        }
    }
    (count as u64, sum)
}

/// Adds tensors up to one row per format: total squared error over total weights, likewise on the tails (each
/// tensor's own largest 1 %), and relative error from the total sums. The order of [`add`](Self::add) calls is the
/// order of summation.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    formats: Vec<(Format, Sums)>,
}

impl Summary {
    /// Nothing measured yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds what was measured on a tensor, or on several.
    pub fn add(&mut self, measured: &CodecError) {
        match self.formats.iter_mut().find(|(f, _)| *f == measured.format) {
            Some((_, sums)) => sums.add(&measured.sums),
            None => self.formats.push((measured.format, measured.sums)),
        }
    }

    /// One row per format, in the order in which formats first came.
    pub fn rows(&self) -> Vec<CodecError> {
        self.formats.iter().map(|(format, sums)| sums.figures(*format)).collect()
    }
}

/// What a generation changed at one width.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GenerationChange {
    /// Bits per code.
    pub bits: u32,
    /// The older format.
    #[serde(serialize_with = "name")]
    pub v1: Format,
    /// The newer format.
    #[serde(serialize_with = "name")]
    pub v2: Format,
    /// Change of [`CodecError::mse`] in percent, negative where V2 is better; `None` if v1 made no error.
    pub overall_percent: Option<f64>,
    /// Change of [`CodecError::tail_mse`] in percent.
    pub tail_percent: Option<f64>,
}

/// The change from each v1 format to its V2 successor, for the pairs of [`GENERATIONS`] that `rows` holds (the first
/// row of a format counts). Rows of different tensors do not compare: give those of one tensor or one [`Summary`].
pub fn generation_changes(rows: &[CodecError]) -> Vec<GenerationChange> {
    let row = |format| rows.iter().find(|r| r.format == format);
    let percent = |from: f64, to: f64| (from > 0.0).then(|| 100.0 * (to / from - 1.0));
    GENERATIONS
        .iter()
        .filter_map(|&(v1, v2)| {
            let (a, b) = (row(v1)?, row(v2)?);
            Some(GenerationChange {
                bits: (v2.spec().block_bytes as u32 - 8) / 32,
                v1,
                v2,
                overall_percent: percent(a.mse, b.mse),
                tail_percent: percent(a.tail_mse, b.tail_mse),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::error::Error;
    use crate::format::{Basis, ScaleRounding, rotation};
    use crate::tensor::Awq;

    /// Normal values by Box and Muller over a fixed generator.
    fn gaussian(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 11) as f64 + 0.5) / (1u64 << 53) as f64
        };
        (0..n)
            .map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos() * 0.02) as f32)
            .collect()
    }

    /// The definitions, with a sort and no threads.
    fn by_definition(t: &QuantTensor, w: &[f32]) -> (f64, f64, f64) {
        let (m, k, stored_k) = (t.m(), t.logical_k(), t.stored_k());
        let mut own = vec![0f32; m * stored_k];
        for r in 0..m {
            for c in 0..k {
                let awq = t.awq().map_or(1.0, |a| a.scales()[c].to_f32());
                own[r * stored_k + c] = w[r * k + c] * awq;
            }
        }
        if t.format().basis() == Basis::Rotated {
            rotation::forward(&mut own);
        }
        let rows = t.format().spec().block_rows;
        let strip = t.bytes().len() / (m / rows);
        let mut decoded = vec![0f32; m * stored_k];
        for (b, o) in t.bytes().chunks(strip).zip(decoded.chunks_mut(rows * stored_k)) {
            t.format().spec().codec.decode(b, stored_k, o);
        }
        let error = |i: usize| (f64::from(own[i]) - f64::from(decoded[i])).powi(2);
        let mut order: Vec<usize> = (0..own.len()).collect();
        order.sort_by(|&a, &b| own[b].abs().total_cmp(&own[a].abs()).then(a.cmp(&b)));
        let n = own.len().div_ceil(100);
        let tail = order[..n].iter().map(|&i| error(i)).sum::<f64>() / n as f64;
        let mse = (0..own.len()).map(error).sum::<f64>() / own.len() as f64;
        let model = t.to_f32();
        let error: f64 = w.iter().zip(&model).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
        let power: f64 = w.iter().map(|a| f64::from(*a).powi(2)).sum();
        (mse, tail, if error == 0.0 { 0.0 } else { (error / power).sqrt() })
    }

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
    }

    #[test]
    fn every_format_measures_by_definition() {
        for &format in Format::ALL {
            let (m, k) = if format == Format::T2 { (64, 512) } else { (17, 576) };
            let w = gaussian(m * k, 3);
            let scales = (0..k).map(|i| half::f16::from_f32(0.5 + i as f32 / k as f32)).collect();
            let awq = Awq::new("t", scales).unwrap();
            for awq in [None, (format.basis() == Basis::Rotated).then(|| Arc::new(awq))] {
                let options = EncodeOptions { rounding: ScaleRounding::TowardZero, awq };
                let e = tensor_error("t", m, k, &w, format, &options).unwrap();
                let t = QuantTensor::encode("t", format, m, k, &w, &options).unwrap();
                let (mse, tail, rel) = by_definition(&t, &w);
                assert!(close(e.mse, mse) && close(e.tail_mse, tail) && close(e.rel_rms, rel), "{format}: {e:?}");
                assert_eq!((e.tensors, e.logical_weights), (1, (m * k) as u64));
                assert_eq!(e.weights, (m * t.stored_k()) as u64);
                assert_eq!(e.tail_weights, e.weights.div_ceil(100));
                assert!(close(e.bits_per_weight, t.bytes().len() as f64 * 8.0 / (m * k) as f64));
                assert!((e.mse == 0.0) == (format == Format::F32), "{format}");
            }
        }
        let e = tensor_error("t", 17, 576, &gaussian(17 * 576, 3), Format::Mq4V2, &EncodeOptions::default()).unwrap();
        assert!(close(e.bits_per_weight, 4.25 * 768.0 / 576.0));
    }

    #[test]
    fn the_number_of_threads_does_not_matter() {
        let w = gaussian(300 * 576, 9);
        let measure = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| tensor_error("t", 300, 576, &w, Format::Mq3V2, &EncodeOptions::default()).unwrap())
        };
        let one = measure(1);
        for threads in [2, 3, 8] {
            assert_eq!(measure(threads), one); // bit for bit
        }
    }

    #[test]
    fn equal_magnitudes_count_in_the_order_of_their_index() {
        // 300 weights, so 3 in the tail: the 9 and the first two of the ±2, which get errors of their own.
        let mut wanted = vec![1.0f32; 300];
        let mut got = wanted.clone();
        for (i, w, error) in [(50, 2.0, 0.5), (90, -2.0, 0.25), (91, 2.0, 8.0), (200, 9.0, 0.125)] {
            wanted[i] = w;
            got[i] = w + error;
        }
        assert_eq!(tail(&wanted, &got), (3, 0.25 + 0.0625 + 0.015625));
        assert_eq!(tail(&[0.0; 5], &[1.0, 2.0, 3.0, 4.0, 5.0]), (1, 1.0));
    }

    #[test]
    fn a_summary_weighs_tensors_by_their_size() {
        let options = EncodeOptions::default();
        let (a, b) = (gaussian(8 * 1024, 1), gaussian(64 * 512, 2).iter().map(|w| w * 3.0).collect::<Vec<_>>());
        let mut summary = Summary::new();
        let mut parts = Vec::new();
        for (w, m, k) in [(&a, 8, 1024), (&b, 64, 512)] {
            for format in [Format::Mq4V2, Format::Q8_0] {
                parts.push((format, tensor_error("t", m, k, w, format, &options).unwrap()));
                summary.add(&parts.last().unwrap().1);
            }
        }
        let rows = summary.rows();
        assert_eq!(rows.iter().map(|r| r.format).collect::<Vec<_>>(), [Format::Mq4V2, Format::Q8_0]);
        let power = |w: &[f32]| w.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>();
        for row in &rows {
            let of: Vec<&CodecError> = parts.iter().filter(|p| p.0 == row.format).map(|p| &p.1).collect();
            let mean = |f: fn(&CodecError) -> (f64, u64)| {
                let n: u64 = of.iter().map(|e| f(e).1).sum();
                of.iter().map(|e| f(e).0 * f(e).1 as f64).sum::<f64>() / n as f64
            };
            assert!(close(row.mse, mean(|e| (e.mse, e.weights))));
            assert!(close(row.tail_mse, mean(|e| (e.tail_mse, e.tail_weights))));
            let error = of[0].rel_rms.powi(2) * power(&a) + of[1].rel_rms.powi(2) * power(&b);
            assert!(close(row.rel_rms, (error / (power(&a) + power(&b))).sqrt()));
            assert_eq!((row.tensors, row.weights, row.tail_weights), (2, 8 * 1024 + 64 * 512, 82 + 328));
            assert_eq!(row.bits_per_weight, row.format.bits_per_weight());
        }
    }

    /// A numpy model of both codecs gives −16.2 % overall and −46 % on the tail for Gaussian data, at every width.
    #[test]
    fn generations_differ_by_the_published_figure() {
        let w = gaussian(256 * 4096, 5);
        let measure = |f| tensor_error("t", 256, 4096, &w, f, &EncodeOptions::default()).unwrap();
        let rows: Vec<CodecError> = GENERATIONS.iter().flat_map(|&(v1, v2)| [measure(v1), measure(v2)]).collect();
        let changes = generation_changes(&rows);
        assert_eq!(changes.iter().map(|c| c.bits).collect::<Vec<_>>(), [2, 3, 4, 5, 6]);
        for c in &changes {
            let (overall, tail) = (c.overall_percent.unwrap(), c.tail_percent.unwrap());
            assert!((overall + 16.2).abs() < 0.4, "{} bits: {overall:.2} %", c.bits);
            assert!((tail + 46.0).abs() < 4.0, "{} bits: {tail:.2} %", c.bits);
        }
        assert!(generation_changes(&rows[1..2]).is_empty());
    }

    #[test]
    fn zeros_are_no_error_and_errors_name_the_place() {
        let options = EncodeOptions::default();
        let zero = |f| tensor_error("t", 2, 256, &[0.0; 512], f, &options).unwrap();
        for f in [Format::Mq4V1, Format::Mq4V2, Format::Q8_0] {
            let e = zero(f);
            assert_eq!((e.mse, e.tail_mse, e.rel_rms), (0.0, 0.0, 0.0), "{f}");
        }
        let changes = generation_changes(&[zero(Format::Mq4V1), zero(Format::Mq4V2)]);
        assert_eq!((changes[0].overall_percent, changes[0].tail_percent), (None, None));
        let mut w = vec![0.5; 512];
        assert!(matches!(
            tensor_error("t", 2, 255, &w, Format::Mq4V2, &options),
            Err(Error::Length { expected: 510, got: 512, .. })
        ));
        assert!(matches!(tensor_error("t", 0, 256, &[], Format::Mq4V2, &options), Err(Error::Shape { .. })));
        w[300] = f32::NAN;
        let e = tensor_error("t", 2, 256, &w, Format::Mq4V2, &options);
        assert!(matches!(e, Err(Error::NonFinite { row: 1, col: 44, .. })));
    }

    #[test]
    fn json_names_the_format_and_its_standing() {
        let e = tensor_error("t", 1, 256, &gaussian(256, 1), Format::Mq2V2, &EncodeOptions::default()).unwrap();
        let json = serde_json::to_value(&e).unwrap();
        assert_eq!(json["format"], "mq2v2");
        assert!(json["standing"].as_str().unwrap().contains("rejected for product quality") && e.is_wire_only());
        assert_eq!(json["mse"], e.mse);
        assert!(json.get("sums").is_none());
        let json = serde_json::to_value(generation_changes(&[e.clone(), CodecError { format: Format::Mq2V1, ..e }]));
        assert_eq!(json.unwrap()[0]["v2"], "mq2v2");
    }
}
