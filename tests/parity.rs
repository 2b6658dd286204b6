//! The parity table: operation x format x shape, every device against the oracle, element by element, within the
//! oracle's own bounds. Today's device is the CPU; others join as further columns.

mod common;

use bitlane::device::cpu;
use bitlane::format::Basis;
use bitlane::{Activation, Awq, EncodeOptions, Error, Format, Plain, QuantTensor, Rotated, Weights, oracle};
use common::Lcg;
use half::f16;
use std::sync::Arc;

/// Uniform in [lo, hi).
fn uniform(rng: &mut Lcg, lo: f32, hi: f32) -> f32 {
    lo + (hi - lo) * (rng.u32() >> 8) as f32 / 16_777_216.0
}

/// Weights whose stored halves lie in [−1, 1] and [96, 160]: a kernel that takes the other half's scale is far off.
/// Encoded through the codec, because rotation would mix the halves.
fn disjoint(format: Format, m: usize, k: usize, seed: u64) -> QuantTensor {
    let mut rng = Lcg::new(seed);
    let stored = format.stored_k(k).unwrap();
    let s = format.spec();
    let mut bytes = vec![0u8; format.blob_len(m, stored).unwrap()];
    let strip = stored / s.block_cols * s.block_bytes;
    for b in bytes.chunks_exact_mut(strip) {
        let w: Vec<f32> = (0..s.block_rows * stored)
            .map(|i| if i % stored % 256 < 128 { uniform(&mut rng, -1.0, 1.0) } else { uniform(&mut rng, 96.0, 160.0) })
            .collect();
        s.codec.encode(&w, stored, Default::default(), b).unwrap();
    }
    QuantTensor::new("disjoint", format, m, k, bytes, None).unwrap()
}

fn activation(n: usize, k: usize, seed: u64) -> Activation<Plain> {
    let mut rng = Lcg::new(seed);
    Activation::new((0..n * k).map(|_| uniform(&mut rng, -1.0, 1.0)).collect(), n, k).unwrap()
}

enum Pair {
    Rotated(Weights<Rotated>, Activation<Rotated>),
    Plain(Weights<Plain>, Activation<Plain>),
}

impl Pair {
    fn new(w: QuantTensor, x: Activation<Plain>) -> Self {
        match w.format().basis() {
            Basis::Rotated => Pair::Rotated(w.typed().unwrap(), oracle::rotate(&x, None).unwrap()),
            Basis::Plain => Pair::Plain(w.typed().unwrap(), x),
        }
    }
    fn oracle(&self, y0: Option<&[f32]>) -> oracle::Checked {
        match self {
            Pair::Rotated(w, x) => oracle::gemv(w, x, y0),
            Pair::Plain(w, x) => oracle::gemv(w, x, y0),
        }
        .unwrap()
    }
    fn cpu(&self, y: &mut [f32], accumulate: bool) -> bitlane::Result<()> {
        match self {
            Pair::Rotated(w, x) => cpu::gemv(w, x, y, accumulate),
            Pair::Plain(w, x) => cpu::gemv(w, x, y, accumulate),
        }
    }
    fn inputs(&self) -> (Vec<u8>, Vec<f32>) {
        match self {
            Pair::Rotated(w, x) => (w.bytes().to_vec(), x.data().to_vec()),
            Pair::Plain(w, x) => (w.bytes().to_vec(), x.data().to_vec()),
        }
    }
}

const GUARD: usize = 8;
const GUARD_BITS: u32 = 0x7fc0_beef;

/// Runs one case, plain and `+=`, and returns the worst error over its bound.
fn case(pair: &Pair, m: usize, n: usize, replay: &str) -> f64 {
    let before = pair.inputs();
    let mut rng = Lcg::new(77);
    let y0: Vec<f32> = (0..n * m).map(|_| uniform(&mut rng, -50.0, 50.0)).collect();
    let mut worst = 0f64;
    for accumulate in [false, true] {
        // NaN in what must be overwritten, guards around everything.
        let mut y = vec![f32::from_bits(GUARD_BITS); n * m + 2 * GUARD];
        if accumulate {
            y[GUARD..GUARD + n * m].copy_from_slice(&y0);
        }
        pair.cpu(&mut y[GUARD..GUARD + n * m], accumulate).unwrap();
        let expected = pair.oracle(accumulate.then_some(&y0[..]));
        let w = expected.worst(&y[GUARD..GUARD + n * m]);
        assert!(w.within(), "{replay} accumulate={accumulate}: {w}");
        worst = worst.max(w.ratio);
        let guards = y[..GUARD].iter().chain(&y[GUARD + n * m..]);
        assert!(guards.into_iter().all(|g| g.to_bits() == GUARD_BITS), "{replay}: wrote outside");
        let mut again = vec![0f32; n * m];
        if accumulate {
            again.copy_from_slice(&y0);
        }
        pair.cpu(&mut again, accumulate).unwrap();
        let same = again.iter().zip(&y[GUARD..]).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{replay}: two runs differ");
    }
    assert!(before == pair.inputs(), "{replay}: inputs changed");
    worst
}

#[test]
fn cpu_gemv_every_format_and_tail() {
    for format in Format::ALL {
        let rows: &[usize] = if *format == Format::T2 { &[32, 64, 96, 160] } else { &[1, 7, 31, 33, 40, 53] };
        let mut worst = 0f64;
        for (i, m) in rows.iter().enumerate() {
            for k in [256, 512, 768, 5120] {
                let n = 1 + (i * 4 + k / 256) % 8;
                let seed = (m * 31 + k) as u64;
                let replay = format!("cpu gemv {format} [{m}, {k}] n={n} seed={seed}");
                worst = worst.max(case(
                    &Pair::new(disjoint(*format, *m, k, seed), activation(n, k, seed + 1)),
                    *m,
                    n,
                    &replay,
                ));
            }
        }
        println!("cpu gemv {format}: PASS, largest error {worst:.4} of its bound");
    }
}

#[test]
fn cpu_gemv_every_vector_count() {
    for format in Format::ALL {
        for n in 1..=17 {
            let replay = format!("cpu gemv {format} [32, 512] n={n} seed=5");
            case(&Pair::new(disjoint(*format, 32, 512, 5), activation(n, 512, 6)), 32, n, &replay);
        }
    }
}

#[test]
fn cpu_gemv_long_rows_and_padding() {
    for format in Format::ALL {
        let pads = *format != Format::T2;
        for k in [17408, 576, 640, 600].into_iter().filter(|k| pads || k % 256 == 0) {
            let replay = format!("cpu gemv {format} [32, {k}] n=3 seed={k}");
            case(&Pair::new(disjoint(*format, 32, k, k as u64), activation(3, k, 8)), 32, 3, &replay);
        }
    }
}

/// All byte values in every payload position, with denormal, zero, maximal and negative scales.
#[test]
fn cpu_gemv_every_byte_value_and_odd_scales() {
    for format in [Format::Mq2V2, Format::Mq3V2, Format::Mq4V2, Format::Mq5V2, Format::Mq6V2, Format::Mq4C, Format::T2]
    {
        let s = format.spec();
        let scales = [0x0001u16, 0x03ff, 0x0000, 0x8000, 0x7bff, 0xbc00, 0x3c00, 0x2e67];
        let m = 256usize.next_multiple_of(s.block_rows);
        let mut bytes = vec![0u8; format.blob_len(m, 256).unwrap()];
        for (r, block) in bytes.chunks_exact_mut(s.block_bytes).enumerate() {
            for (i, b) in block.iter_mut().enumerate() {
                *b = (r + i * 7) as u8; // over 256 rows every position has every value
            }
            let halves: Vec<usize> = match format {
                Format::T2 => (2048..2176).step_by(2).collect(),
                Format::Mq4C => vec![0, 2],
                _ => vec![0, 2, 4, 6],
            };
            for (j, at) in halves.into_iter().enumerate() {
                block[at..at + 2].copy_from_slice(&scales[(r + 3 * j) % scales.len()].to_le_bytes());
            }
        }
        let w = QuantTensor::new("bytes", format, m, 256, bytes, None).unwrap();
        case(&Pair::new(w, activation(2, 256, 3)), m, 2, &format!("cpu gemv {format}, all bytes"));
    }
}

/// The table can fail: a wrong half, and x not rotated, are far outside the bound.
#[test]
fn negative_controls_fail() {
    for format in [Format::Mq2V2, Format::Mq3V2, Format::Mq4V2, Format::Mq5V2, Format::Mq6V2] {
        let w = disjoint(format, 8, 512, 1);
        let x = activation(1, 512, 2);
        let expected = Pair::new(w.clone(), x.clone()).oracle(None);
        let mut bytes = w.bytes().to_vec();
        for g in bytes.chunks_exact_mut(format.spec().block_bytes) {
            let (first, second) = g[..8].split_at_mut(4);
            first.swap_with_slice(second);
        }
        let mut y = vec![0f32; 8];
        Pair::new(QuantTensor::new("w", format, 8, 512, bytes, None).unwrap(), x.clone()).cpu(&mut y, false).unwrap();
        assert!(expected.worst(&y).ratio > 10.0, "{format}: halves swapped: {}", expected.worst(&y));
        Pair::new(w.clone(), activation(1, 512, 3)).cpu(&mut y, false).unwrap();
        assert!(!expected.worst(&y).within(), "{format}: another x");
    }
}

#[test]
fn refusals_leave_the_output_alone() {
    let w = disjoint(Format::Mq4V2, 4, 512, 1).typed::<Rotated>().unwrap();
    let mut y = [7f32; 4];
    let short = oracle::rotate(&activation(1, 256, 2), None).unwrap();
    assert!(matches!(cpu::gemv(&w, &short, &mut y, false), Err(Error::Mismatch { .. })));
    let awq = Arc::new(Awq::new("w", vec![f16::from_f32(2.0); 512]).unwrap());
    let divided = oracle::rotate(&activation(1, 512, 2), Some(&awq)).unwrap();
    assert!(matches!(cpu::gemv(&w, &divided, &mut y, false), Err(Error::AwqMismatch { .. })));
    let right = oracle::rotate(&activation(1, 512, 2), None).unwrap();
    assert!(matches!(cpu::gemv(&w, &right, &mut y[..3], false), Err(Error::Mismatch { .. })));
    assert_eq!(y, [7.0; 4]);
    // Row slices are weights like any other.
    let slice = w.rows(1..3).unwrap().typed::<Rotated>().unwrap();
    let (mut all, mut part) = ([0f32; 4], [0f32; 2]);
    cpu::gemv(&w, &right, &mut all, false).unwrap();
    cpu::gemv(&slice, &right, &mut part, false).unwrap();
    assert_eq!(all[1..3], part);
    let options = EncodeOptions { awq: Some(awq), ..EncodeOptions::default() };
    let scaled = QuantTensor::encode("w", Format::Mq4V2, 4, 512, &vec![0.5; 4 * 512], &options).unwrap();
    cpu::gemv(&scaled.typed::<Rotated>().unwrap(), &divided, &mut y, false).unwrap();
}
