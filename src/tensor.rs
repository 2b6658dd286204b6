//! [`QuantTensor`]: a format, a shape and bytes, checked once, at construction. Past that point shapes
//! and lengths hold and kernels need no checks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use half::f16;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::format::{Basis, Fault, Format, ScaleRounding, rotation, t2};

/// Per-channel scales of activation-aware quantization: weights were multiplied by them before
/// encoding, so activations are divided by them. Stored as fp16, length logical K.
#[derive(Clone, PartialEq)]
pub struct Awq {
    scales: Vec<f16>,
    id: u64,
}

impl Awq {
    /// Takes the scales of `tensor`'s input channels.
    ///
    /// # Errors
    /// [`Error::AwqValue`] for a scale that is not positive and finite.
    pub fn new(tensor: &str, scales: Vec<f16>) -> Result<Self> {
        if let Some(channel) = scales.iter().position(|s| !(s.is_finite() && *s > f16::ZERO)) {
            return Err(Error::AwqValue { tensor: tensor.into(), channel, value: scales[channel].to_f32() });
        }
        // FNV-1a over the bytes: an identity for comparing, not a secret.
        let id = scales
            .iter()
            .flat_map(|s| s.to_le_bytes())
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        Ok(Awq { scales, id })
    }

    /// Scales from an importance vector (mean of x² per input channel, length K) and strength `alpha`
    /// (the family's default is 0.55): l = (α/2)·ln(clamp(v, 1e-12, 1e30)) with NaN counted as 1e-12,
    /// less its mean; s = clamp(exp(l), 0.01, 100), rounded to fp16 **before** use, so that the division
    /// at run time cancels exactly.
    ///
    /// # Errors
    /// [`Error::AwqValue`] if `alpha` is so wild that a scale is not finite.
    pub fn from_importance(tensor: &str, importance: &[f32], alpha: f32) -> Result<Self> {
        let l: Vec<f64> = importance
            .iter()
            .map(|&v| if v.is_nan() { 1e-12 } else { f64::from(v).clamp(1e-12, 1e30) })
            .map(|v| f64::from(alpha) / 2.0 * v.ln())
            .collect();
        let mean = l.iter().sum::<f64>() / l.len().max(1) as f64;
        Self::new(tensor, l.iter().map(|l| f16::from_f64((l - mean).exp().clamp(0.01, 100.0))).collect())
    }

    /// The scales, one per logical column.
    pub fn scales(&self) -> &[f16] {
        &self.scales
    }

    /// A number that two equal vectors share: what [`Error::AwqMismatch`] prints.
    pub fn id(&self) -> u64 {
        self.id
    }
}

impl fmt::Debug for Awq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Awq({} channels, {:016x})", self.scales.len(), self.id)
    }
}

/// How to encode weights.
#[derive(Debug, Clone, Default)]
pub struct EncodeOptions {
    /// How scales and zeros become halves.
    pub rounding: ScaleRounding,
    /// Multiply the columns by these scales first.
    pub awq: Option<Arc<Awq>>,
}

/// A weight matrix W `[M][K]` in one of the [`Format`]s. Cheap to clone; [`rows`](Self::rows) gives
/// views on the same bytes.
#[derive(Clone)]
pub struct QuantTensor {
    name: Arc<str>,
    format: Format,
    rows: usize,
    logical_k: usize,
    stored_k: usize,
    bytes: Arc<Vec<u8>>,
    window: Range<usize>,
    awq: Option<Arc<Awq>>,
}

impl fmt::Debug for QuantTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "QuantTensor({} {} [{}, {} stored as {}], {} bytes, awq {:?})",
            self.name,
            self.format,
            self.rows,
            self.logical_k,
            self.stored_k,
            self.window.len(),
            self.awq
        )
    }
}

impl QuantTensor {
    /// Wraps encoded bytes of a `rows` x `logical_k` matrix.
    ///
    /// # Errors
    /// [`Error::Shape`] if the shape does not fit the format, [`Error::Length`] if `bytes` is not exactly
    /// as long as the shape needs, [`Error::Mismatch`] if `awq` is not of length `logical_k`, and
    /// [`Error::WrongBasis`] if an unrotated format comes with an AWQ vector.
    pub fn new(
        name: &str,
        format: Format,
        rows: usize,
        logical_k: usize,
        bytes: Vec<u8>,
        awq: Option<Arc<Awq>>,
    ) -> Result<Self> {
        let (stored_k, expected) = geometry(name, format, rows, logical_k)?;
        if bytes.len() != expected {
            return Err(Error::Length {
                tensor: name.into(),
                what: "blob",
                unit: "bytes",
                format,
                rows,
                cols: stored_k,
                expected,
                got: bytes.len(),
            });
        }
        if let Some(awq) = &awq {
            check_awq(name, format, logical_k, awq)?;
        }
        let window = 0..bytes.len();
        Ok(QuantTensor { name: name.into(), format, rows, logical_k, stored_k, bytes: Arc::new(bytes), window, awq })
    }

    /// Encodes `weights`, row-major `[rows][logical_k]` in the model's own basis: AWQ scales are applied,
    /// K is padded with zero columns, blocks are rotated if the format is, in parallel over strips.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::NonFinite`] and [`Error::OutOfRange`] name the row and column.
    pub fn encode(
        name: &str,
        format: Format,
        rows: usize,
        logical_k: usize,
        weights: &[f32],
        options: &EncodeOptions,
    ) -> Result<Self> {
        let (stored_k, len) = geometry(name, format, rows, logical_k)?;
        let encoder = StripEncoder::new(name, format, logical_k, options)?;
        if rows.checked_mul(logical_k) != Some(weights.len()) {
            return Err(Error::Length {
                tensor: name.into(),
                what: "weights",
                unit: "values",
                format,
                rows,
                cols: logical_k,
                expected: rows.saturating_mul(logical_k),
                got: weights.len(),
            });
        }
        let mut bytes = vec![0u8; len];
        let strip_rows = format.spec().block_rows;
        bytes
            .par_chunks_exact_mut(format.strip_len(stored_k))
            .zip(weights.par_chunks_exact(strip_rows * logical_k))
            .enumerate()
            .try_for_each_init(Vec::new, |scratch, (s, (b, w))| encoder.encode(s * strip_rows, w, scratch, b))?;
        Self::new(name, format, rows, logical_k, bytes, options.awq.clone())
    }

    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Its format.
    pub fn format(&self) -> Format {
        self.format
    }
    /// M, rows of W.
    pub fn m(&self) -> usize {
        self.rows
    }
    /// K as the model has it.
    pub fn logical_k(&self) -> usize {
        self.logical_k
    }
    /// K as it is stored: padded with zero columns to whole blocks.
    pub fn stored_k(&self) -> usize {
        self.stored_k
    }
    /// The encoded bytes of all rows.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.window.clone()]
    }
    /// The AWQ vector that the weights were multiplied by.
    pub fn awq(&self) -> Option<&Arc<Awq>> {
        self.awq.as_ref()
    }

    /// A view of some rows, on the same bytes. t2 slices by whole tiles of 32 rows.
    ///
    /// # Errors
    /// [`Error::RowRange`] for a range that is empty, outside the tensor, or not of whole strips.
    pub fn rows(&self, range: Range<usize>) -> Result<QuantTensor> {
        let unit = self.format.spec().block_rows;
        let why = if range.start >= range.end {
            "the range is empty"
        } else if range.end > self.rows {
            "the range ends past the last row"
        } else if !range.start.is_multiple_of(unit) || !range.end.is_multiple_of(unit) {
            "the format slices by whole tiles of 32 rows"
        } else {
            let strip = self.format.strip_len(self.stored_k);
            let at = |row: usize| self.window.start + row / unit * strip;
            return Ok(QuantTensor { rows: range.len(), window: at(range.start)..at(range.end), ..self.clone() });
        };
        Err(Error::RowRange { tensor: self.name.to_string(), start: range.start, end: range.end, rows: self.rows, why })
    }

    /// Strips: their first row and their bytes.
    pub(crate) fn strips(&self) -> impl IndexedParallelIterator<Item = &[u8]> {
        self.bytes().par_chunks_exact(self.format.strip_len(self.stored_k))
    }

    /// The weights in the model's own basis, `[M][logical K]`: decoded, rotated back, unpadded, AWQ undone.
    pub fn to_f32(&self) -> Vec<f32> {
        let strip_rows = self.format.spec().block_rows;
        let mut out = vec![0f32; self.rows * self.logical_k];
        let decoder = StripDecoder {
            format: self.format,
            logical_k: self.logical_k,
            stored_k: self.stored_k,
            awq: self.awq.clone(),
        };
        self.strips()
            .zip(out.par_chunks_exact_mut(strip_rows * self.logical_k))
            .for_each_init(Vec::new, |scratch, (bytes, out)| decoder.decode(bytes, scratch, out));
        out
    }

    /// How many t2 codes hold the reserved pattern; 0 for every other format. A loader may refuse them.
    pub fn reserved_codes(&self) -> u64 {
        match self.format {
            Format::T2 => t2::tiles(self.bytes()).map(|t| t.reserved()).sum(),
            _ => 0,
        }
    }

    /// The tensor as weights in a known basis, for operations.
    ///
    /// # Errors
    /// [`Error::WrongBasis`] if the format's basis is another.
    pub fn typed<B: BasisMarker>(self) -> Result<Weights<B>> {
        if self.format.basis() == B::BASIS {
            return Ok(Weights { tensor: self, basis: std::marker::PhantomData });
        }
        Err(Error::WrongBasis {
            tensor: self.name.to_string(),
            format: self.format,
            is: self.format.basis().name(),
            wants: B::BASIS.name(),
        })
    }
}

/// Type-level [`Basis`].
pub trait BasisMarker: Copy + Send + Sync + 'static {
    /// The basis as a value.
    const BASIS: Basis;
}
/// FWHT-rotated weights or activations.
#[derive(Debug, Clone, Copy)]
pub enum Rotated {}
/// Weights or activations as the model has them.
#[derive(Debug, Clone, Copy)]
pub enum Plain {}
impl BasisMarker for Rotated {
    const BASIS: Basis = Basis::Rotated;
}
impl BasisMarker for Plain {
    const BASIS: Basis = Basis::Plain;
}

/// A [`QuantTensor`] whose basis is part of its type, so that an unrotated activation cannot reach a
/// rotated weight: see [`Activation`].
#[derive(Debug, Clone)]
pub struct Weights<B> {
    tensor: QuantTensor,
    basis: std::marker::PhantomData<B>,
}

impl<B> std::ops::Deref for Weights<B> {
    type Target = QuantTensor;
    fn deref(&self) -> &QuantTensor {
        &self.tensor
    }
}

/// N activation vectors X `[N][K]` in a basis. Plain ones are made here; rotated ones only by
/// [`oracle::rotate`](crate::oracle::rotate) (or a device's rotate).
#[derive(Debug, Clone)]
pub struct Activation<B> {
    data: Vec<f32>,
    n: usize,
    logical_k: usize,
    width: usize,
    awq: Option<Arc<Awq>>,
    basis: std::marker::PhantomData<B>,
}

impl Activation<Plain> {
    /// Takes `n` vectors of length `k`, row-major.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if `data` is not `n * k` long, or either is 0.
    pub fn new(data: Vec<f32>, n: usize, k: usize) -> Result<Self> {
        let expected = n.checked_mul(k).filter(|e| *e > 0);
        if expected != Some(data.len()) {
            return Err(Error::Mismatch {
                what: format!("activation of {n} vectors of {k}"),
                left_name: "N*K",
                left: n.saturating_mul(k),
                right_name: "values given",
                right: data.len(),
            });
        }
        Ok(Activation { data, n, logical_k: k, width: k, awq: None, basis: std::marker::PhantomData })
    }
}

impl Activation<Rotated> {
    /// What `rotate` made: `data` is `[n][stored k]`.
    pub(crate) fn rotated(data: Vec<f32>, n: usize, logical_k: usize, awq: Option<Arc<Awq>>) -> Self {
        let width = data.len() / n;
        Activation { data, n, logical_k, width, awq, basis: std::marker::PhantomData }
    }
}

impl<B> Activation<B> {
    /// N, how many vectors.
    pub fn n(&self) -> usize {
        self.n
    }
    /// K as the model has it.
    pub fn logical_k(&self) -> usize {
        self.logical_k
    }
    /// Values per vector in [`data`](Self::data): stored K once rotated, else logical K.
    pub fn width(&self) -> usize {
        self.width
    }
    /// The values, `[N][width]`.
    pub fn data(&self) -> &[f32] {
        &self.data
    }
    /// The AWQ vector that these activations were divided by.
    pub fn awq(&self) -> Option<&Arc<Awq>> {
        self.awq.as_ref()
    }
}

/// Stored K and blob length in bytes of a `rows` x `logical_k` matrix.
///
/// # Errors
/// [`Error::Shape`], which names what does not fit.
pub fn geometry(name: &str, format: Format, rows: usize, logical_k: usize) -> Result<(usize, usize)> {
    let stored_k = format.stored_k(logical_k);
    let fits = stored_k.and_then(|k| format.blob_len(rows, k).map(|len| (k, len)));
    fits.map_err(|why| Error::Shape { tensor: name.into(), format, rows, cols: logical_k, why })
}

fn check_awq(name: &str, format: Format, logical_k: usize, awq: &Awq) -> Result<()> {
    if format.basis() != Basis::Rotated {
        return Err(Error::WrongBasis {
            tensor: name.into(),
            format,
            is: format.basis().name(),
            wants: Basis::Rotated.name(),
        });
    }
    if awq.scales.len() != logical_k {
        return Err(Error::Mismatch {
            what: format!("AWQ vector of tensor {name}"),
            left_name: "its length",
            left: awq.scales.len(),
            right_name: "K",
            right: logical_k,
        });
    }
    Ok(())
}

/// Encodes strips of one tensor; shared by whole-tensor and streaming quantization.
pub(crate) struct StripEncoder<'a> {
    name: &'a str,
    format: Format,
    logical_k: usize,
    stored_k: usize,
    rounding: ScaleRounding,
    awq: Option<Vec<f32>>,
}

impl<'a> StripEncoder<'a> {
    pub(crate) fn new(name: &'a str, format: Format, logical_k: usize, options: &EncodeOptions) -> Result<Self> {
        if let Some(awq) = &options.awq {
            check_awq(name, format, logical_k, awq)?;
        }
        let (stored_k, _) = geometry(name, format, format.spec().block_rows, logical_k)?;
        let awq = options.awq.as_ref().map(|a| a.scales.iter().map(|s| s.to_f32()).collect());
        Ok(StripEncoder { name, format, logical_k, stored_k, rounding: options.rounding, awq })
    }

    /// Moves a strip of weights into the format's own basis: AWQ, zero columns, rotation.
    pub(crate) fn prepare(&self, w: &[f32], out: &mut Vec<f32>) {
        out.clear();
        for row in w.chunks_exact(self.logical_k) {
            let at = out.len();
            out.extend_from_slice(row);
            if let Some(awq) = &self.awq {
                out[at..].iter_mut().zip(awq).for_each(|(w, s)| *w *= s);
            }
            out.resize(at + self.stored_k, 0.0);
        }
        if self.format.basis() == Basis::Rotated {
            rotation::forward(out);
        }
    }

    /// Encodes the strip whose first row is `row`.
    pub(crate) fn encode(&self, row: usize, w: &[f32], scratch: &mut Vec<f32>, bytes: &mut [u8]) -> Result<()> {
        let direct = self.format.basis() == Basis::Plain && self.stored_k == self.logical_k && self.awq.is_none();
        let stored = if direct {
            w
        } else {
            self.prepare(w, scratch);
            scratch
        };
        self.format
            .spec()
            .codec
            .encode(stored, self.stored_k, self.rounding, bytes)
            .map_err(|fault| self.explain(fault, row, w))
    }

    /// Turns a position in a strip into the row and column of the source.
    #[cold]
    fn explain(&self, fault: Fault, row: usize, w: &[f32]) -> Error {
        // A rotated group is all NaN or infinite when one of its weights is: name the weight, not its image.
        if let Some(i) = w.iter().position(|v| !v.is_finite()) {
            return Error::NonFinite {
                tensor: self.name.into(),
                row: row + i / self.logical_k,
                col: i % self.logical_k,
                value: w[i],
            };
        }
        let (index, len, what, value, limit) = match fault {
            // The source is finite but its product with AWQ or its rotation is not.
            Fault::NonFinite { index } => (index / 256 * 256, 256, "rotated value", f32::INFINITY, f32::MAX),
            Fault::Range { index, len, what, value, limit } => (index, len, what, value, limit),
        };
        let col = index % self.stored_k;
        Error::OutOfRange {
            tensor: self.name.into(),
            format: self.format,
            row: row + index / self.stored_k,
            col,
            col_end: col + len,
            what,
            value,
            limit,
        }
    }
}

/// Decodes strips of one tensor to the model's own basis.
pub(crate) struct StripDecoder {
    pub(crate) format: Format,
    pub(crate) logical_k: usize,
    pub(crate) stored_k: usize,
    pub(crate) awq: Option<Arc<Awq>>,
}

impl StripDecoder {
    /// `out` holds `[strip rows][logical K]`.
    pub(crate) fn decode(&self, bytes: &[u8], scratch: &mut Vec<f32>, out: &mut [f32]) {
        let codec = self.format.spec().codec;
        if self.format.basis() == Basis::Plain && self.stored_k == self.logical_k {
            return codec.decode(bytes, self.stored_k, out);
        }
        scratch.resize(self.format.spec().block_rows * self.stored_k, 0.0);
        codec.decode(bytes, self.stored_k, scratch);
        if self.format.basis() == Basis::Rotated {
            rotation::inverse(scratch);
        }
        for (row, out) in scratch.chunks_exact(self.stored_k).zip(out.chunks_exact_mut(self.logical_k)) {
            out.copy_from_slice(&row[..self.logical_k]);
            if let Some(awq) = &self.awq {
                out.iter_mut().zip(&awq.scales).for_each(|(w, s)| *w /= s.to_f32());
            }
        }
    }
}
