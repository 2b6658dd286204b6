//! Properties that hold for all inputs: error bounds, inverses, independence of threads and of padding, and errors
//! that name the place.
//!
//! Inputs are a few numbers that expand to weights, so a failure prints as one line (`minimal failing input: …`)
//! that can be pasted into a test. The seed is fixed: running the test again replays the failure, and
//! `PROPTEST_RNG_SEED=n` tries other inputs. `PROPTEST_CASES=2560` makes every test ten times as thorough.

use std::sync::{Arc, OnceLock};

use bitlane::format::{Basis, Fault, bitstream, rotation};
use bitlane::{Awq, EncodeOptions, Error, Format, QuantTensor, ScaleRounding};
use half::f16;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed};

const ROUNDINGS: [ScaleRounding; 2] = [ScaleRounding::NearestEven, ScaleRounding::TowardZero];
const V2: [(Format, u32); 5] =
    [(Format::Mq2V2, 2), (Format::Mq3V2, 3), (Format::Mq4V2, 4), (Format::Mq5V2, 5), (Format::Mq6V2, 6)];
const V1: [(Format, u32); 5] =
    [(Format::Mq2V1, 2), (Format::Mq3V1, 3), (Format::Mq4V1, 4), (Format::Mq5V1, 5), (Format::Mq6V1, 6)];
/// Relative error of one f32 rounding.
const U: f64 = 1.0 / 16_777_216.0;
/// More than any underflow of a few operations can add, and less than anything that matters.
const TINY: f64 = 64.0 * f32::MIN_POSITIVE as f64;

/// `cases` runs at proptest's default of 256, in proportion otherwise; a fixed seed unless one is given; no files.
fn config(cases: u32) -> Config {
    let default = Config::default();
    Config {
        cases: (u64::from(cases) * u64::from(default.cases) / 256) as u32,
        rng_seed: if default.rng_seed == RngSeed::Random { RngSeed::Fixed(0x6269_746c) } else { default.rng_seed },
        failure_persistence: None,
        ..default
    }
}

// ---- inputs ----

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Uniform in ±a.
    Uniform,
    /// Bell-shaped, about a wide.
    Bell,
    /// All equal to a.
    Constant,
    /// All a, then all −b: two flat halves.
    ConstantHalves,
    /// Halves of 128 whose ranges do not meet: (a/2..a), (−b..−b/2).
    DisjointHalves,
    /// Uniform in ±b, one value of a.
    Spike,
    /// Every magnitude from a to b on a logarithmic scale, both signs.
    Mixed,
    /// a and its next few floats: a range of some units in the last place.
    Narrow,
    /// Far from zero: a plus uniform in ±b, at most 60000 in all.
    Offset,
    /// Nothing but zeros of both signs.
    Zero,
}

/// Weights in a few numbers.
#[derive(Debug, Clone, Copy)]
struct Weights {
    kind: Kind,
    a: f32,
    b: f32,
    seed: u32,
}

struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
    /// In 0..1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 7) as f32 / 16_777_216.0
    }
    /// In −1..1.
    fn signed(&mut self) -> f32 {
        2.0 * self.unit() - 1.0
    }
}

impl Weights {
    fn make(&self, n: usize) -> Vec<f32> {
        let mut g = Lcg(u64::from(self.seed) << 20 | 0x9e37);
        let spike = g.next() as usize % n;
        let (a, b) = (self.a, self.b);
        let one = |i: usize| match self.kind {
            Kind::Uniform => a * g.signed(),
            Kind::Bell => a * (g.signed() + g.signed() + g.signed()) / 3.0,
            Kind::Constant => a,
            Kind::ConstantHalves => [a, -b][i / 128 % 2],
            Kind::DisjointHalves => [a, -b][i / 128 % 2] * (0.5 + 0.5 * g.unit()),
            Kind::Spike if i == spike => a,
            Kind::Spike => b * g.signed(),
            Kind::Mixed => a * (b / a).powf(g.unit()) * if g.next() & 1 == 0 { 1.0 } else { -1.0 },
            Kind::Narrow => f32::from_bits(a.to_bits() + g.next() % 8),
            Kind::Offset => (a + b * g.signed()).clamp(-6e4, 6e4),
            Kind::Zero => 0.0 * g.signed(),
        };
        (0..n).map(one).collect()
    }
}

fn magnitude() -> impl Strategy<Value = f32> {
    // 6e4 and its neighbourhood are within a half's range, so no group here is out of it.
    (-7.0f32..4.778).prop_map(|e| 10f32.powf(e).min(6e4))
}

fn weights() -> impl Strategy<Value = Weights> {
    use Kind::*;
    let kinds = vec![Uniform, Bell, Constant, ConstantHalves, DisjointHalves, Spike, Mixed, Narrow, Offset, Zero];
    (select(kinds), magnitude(), magnitude(), any::<u32>()).prop_map(|(kind, a, b, seed)| Weights { kind, a, b, seed })
}

/// A format, a small shape that fits it, and weights.
#[derive(Debug, Clone)]
struct Matrix {
    format: Format,
    m: usize,
    k: usize,
    weights: Weights,
}

impl Matrix {
    fn values(&self) -> Vec<f32> {
        self.weights.make(self.m * self.k)
    }
    fn encode(&self, w: &[f32]) -> bitlane::Result<QuantTensor> {
        QuantTensor::encode("t", self.format, self.m, self.k, w, &EncodeOptions::default())
    }
}

fn matrix(formats: &[Format]) -> impl Strategy<Value = Matrix> {
    let k = prop_oneof![2 => 1usize..800, 1 => Just(576usize), 1 => Just(256usize)];
    // The rotation adds up to 16 times the largest weight, so weights stay that far from a half's range.
    (select(formats.to_vec()), 1usize..6, k, weights()).prop_map(|(format, m, k, mut weights)| {
        (weights.a, weights.b) = (weights.a.min(2e3), weights.b.min(2e3));
        match format {
            Format::T2 => Matrix { format, m: 32 * m, k: 256 * (1 + k % 3), weights },
            _ => Matrix { format, m, k, weights },
        }
    })
}

// ---- codecs, on strips in their own basis ----

fn encode(format: Format, w: &[f32], rounding: ScaleRounding) -> Result<Vec<u8>, Fault> {
    let s = format.spec();
    let mut bytes = vec![0xaa; w.len() / (s.block_rows * s.block_cols) * s.block_bytes];
    s.codec.encode(w, w.len() / s.block_rows, rounding, &mut bytes).map(|()| bytes)
}

fn decode(format: Format, bytes: &[u8]) -> Vec<f32> {
    let s = format.spec();
    let mut out = vec![f32::NAN; bytes.len() / s.block_bytes * s.block_rows * s.block_cols];
    s.codec.decode(bytes, out.len() / s.block_rows, &mut out);
    out
}

fn half_at(bytes: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f64()
}

fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn span(w: &[f32]) -> (f64, f64) {
    let (lo, hi) = w.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), v| (lo.min(*v), hi.max(*v)));
    (f64::from(lo), f64::from(hi))
}

/// Whether the stored half `h` is `x` rounded as asked: within half a unit in the last place, or toward zero within
/// one. (2^-11 and 2^-25 are half a unit of a normal and of a subnormal half; `x` is itself within 2u of exact.)
fn is_rounded(h: f64, x: f64, rounding: ScaleRounding) -> bool {
    let unit = (x.abs() * 2f64.powi(-10)).max(2f64.powi(-24));
    match rounding {
        ScaleRounding::NearestEven => (h - x).abs() <= unit / 2.0 + 2.0 * U * x.abs(),
        ScaleRounding::TowardZero => h.abs() <= x.abs() * (1.0 + 2.0 * U) && (h - x).abs() <= unit * (1.0 + 2.0 * U),
    }
}

/// What f32 arithmetic may add to the error bound of an affine code; `s` and `z` are the stored scale and zero.
///
/// Write δ for relative errors of at most u = 2^-24 (one rounding each) and L = 2^bits − 1.
/// - Choosing: t = ((w − z)(1 + δ)·(1/s)(1 + δ)(1 + δ) + 0.5)(1 + δ). Where the code is not clamped by a wide margin,
///   |w − z|/s <= L + 1, so t is off by at most (3u + u)(L + 1) + 0.5u and a second-order term: less than
///   (4.1(L + 1) + 0.6)u. A code is then within 1/2 plus that much of the ideal one; times s it is the error.
///   Where clamping is by a wide margin, the sign of w − z and with it the side are exact.
/// - The step: fl(fl(hi − lo)/L) is within 2.01u of exact, so L·|step − exact| <= 2.01u(hi − lo).
/// - Decoding: q·s is exact where s is a half (6 + 11 bits fit 24), else off by uL·s; the sum is off by
///   u(|z| + L·s).
///
/// Together at most u(|z| + (4.1(L + 1) + 0.6 + 2L)s + 2.01(hi − lo)), rounded up below (as L + 1 >= 4, 0.6 is
/// at most 0.15(L + 1)), plus underflow.
fn slop(levels: f64, s: f64, z: f64, span: f64) -> f64 {
    U * (z.abs() + 6.3 * (levels + 1.0) * s + 2.1 * span) + TINY
}

/// Checks one V2 or MQ4C grid, `w` with what was decoded, against
/// |w − ŵ| <= s/2 + |z − lo| + L·|s − step| + slop: a code that is not clamped is within half a step; one clamped at
/// 0 is off by z − w <= z − lo; one clamped at L by w − (z + L·s) <= (hi − lo − L·s) + (lo − z). Between the
/// grid's ends half a step is all.
fn check_half_grid(
    w: &[f32],
    got: &[f32],
    bits: u32,
    (s, z): (f64, f64),
    rounding: ScaleRounding,
) -> Result<(), TestCaseError> {
    let levels = f64::from((1u32 << bits) - 1);
    let (lo, hi) = span(w);
    let step = (hi - lo) / levels;
    prop_assert!(is_rounded(s, step, rounding), "scale {s:e} of step {step:e}");
    prop_assert!(is_rounded(z, lo, rounding), "zero {z:e} of minimum {lo:e}");
    let slop = slop(levels, s, z, hi - lo);
    for (i, (w, got)) in w.iter().zip(got).enumerate() {
        let (w, got) = (f64::from(*w), f64::from(*got));
        let inside = z <= w && w <= z + levels * s;
        let outside = if inside { 0.0 } else { (z - lo).abs() + levels * (s - step).abs() };
        let bound = s / 2.0 + outside + slop;
        prop_assert!((w - got).abs() <= bound, "weight {i}: {w:e} decodes to {got:e}, bound {bound:e}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(1500))]

    #[test]
    fn v2_and_mq4c_stay_within_their_bound(weights in weights()) {
        let w = weights.make(512);
        for rounding in ROUNDINGS {
            for (format, bits) in V2 {
                let bytes = encode(format, &w, rounding).unwrap();
                let got = decode(format, &bytes);
                for h in 0..4 {
                    let (at, i) = (h / 2 * format.spec().block_bytes + h % 2 * 4, h * 128);
                    let grid = (half_at(&bytes, at), half_at(&bytes, at + 2));
                    check_half_grid(&w[i..i + 128], &got[i..i + 128], bits, grid, rounding)?;
                }
            }
            let bytes = encode(Format::Mq4C, &w, rounding).unwrap();
            let got = decode(Format::Mq4C, &bytes);
            for g in 0..2 {
                let grid = (half_at(&bytes, 136 * g), half_at(&bytes, 136 * g + 2));
                prop_assert_eq!(&bytes[136 * g + 4..136 * g + 8], &[0; 4]);
                check_half_grid(&w[256 * g..][..256], &got[256 * g..][..256], 4, grid, rounding)?;
            }
        }
    }

    #[test]
    fn v1_stays_within_its_bound(weights in weights(), shrink in select(vec![1.0f32, 1e-32, 1e-38])) {
        // Also scales below the normal f32: the header is f32, so v1 has no other floor.
        let w: Vec<f32> = weights.make(512).iter().map(|w| w * shrink).collect();
        for (format, bits) in V1 {
            let levels = f64::from((1u32 << bits) - 1);
            let bytes = encode(format, &w, ScaleRounding::NearestEven).unwrap();
            let truncated = encode(format, &w, ScaleRounding::TowardZero).unwrap();
            prop_assert_eq!(&bytes, &truncated, "nothing is rounded to halves");
            let got = decode(format, &bytes);
            for g in 0..2 {
                let at = g * format.spec().block_bytes;
                let (w, got) = (&w[256 * g..][..256], &got[256 * g..][..256]);
                let (lo, hi) = span(w);
                let (s, z) = (f32_at(&bytes, at), f32_at(&bytes, at + 4));
                prop_assert_eq!(f64::from(z), lo);
                prop_assert_eq!(s, if hi > lo { (hi as f32 - lo as f32) / levels as f32 } else { 1.0 });
                // A flat group stores scale 1, but every code is 0.
                let s = if hi > lo { f64::from(s) } else { 0.0 };
                // The grid's upper end is hi but for rounding, which slop has; nothing else is clamped.
                let bound = s / 2.0 + slop(levels, s, lo, hi - lo);
                for (w, got) in w.iter().zip(got) {
                    let off = (f64::from(*w) - f64::from(*got)).abs();
                    prop_assert!(off <= bound, "{format}: {w:e} decodes to {got:e}, bound {bound:e}");
                }
            }
        }
    }

    #[test]
    fn q8_0_stays_within_its_bound(weights in weights()) {
        let w = weights.make(256);
        for rounding in ROUNDINGS {
            let bytes = encode(Format::Q8_0, &w, rounding).unwrap();
            let got = decode(Format::Q8_0, &bytes);
            for (b, (w, got)) in w.chunks(32).zip(got.chunks(32)).enumerate() {
                let stored = half_at(&bytes, 34 * b);
                let d = w.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
                prop_assert!(is_rounded(stored, f64::from(d), rounding));
                // Codes are rounded on the grid of d and read on that of the stored half: d/2, and 127 times their
                // difference. w·(1/d) is within 2.01u·127 of w/d, the addition of 0.49999997 within u/2 + 128u:
                // 384u·d in all. |code|·stored is exact, 7 + 11 bits. Where the half is 0 every code is 0 and
                // |w| <= 127·d is the second term.
                let d64 = f64::from(d);
                let bound = d64 / 2.0 + 127.0 * (d64 - stored).abs() + 400.0 * U * d64 + TINY;
                for (i, (w, got)) in w.iter().zip(got).enumerate() {
                    let off = (f64::from(*w) - f64::from(*got)).abs();
                    prop_assert!(off <= bound, "{w:e} decodes to {got:e}, bound {bound:e}");
                    // ggml's rule, by the library's own rounding.
                    let want = if stored == 0.0 { 0 } else { (w * (1.0 / d)).round() as i8 };
                    prop_assert_eq!(bytes[34 * b + 2 + i] as i8, want);
                }
            }
        }
    }

    #[test]
    fn plain_floats_stay_within_half_a_unit_or_one(weights in weights()) {
        let w = weights.make(300);
        for rounding in ROUNDINGS {
            let bytes = encode(Format::F16, &w, rounding).unwrap();
            for (w, got) in w.iter().zip(decode(Format::F16, &bytes)) {
                prop_assert!(is_rounded(f64::from(got), f64::from(*w), rounding), "f16 {w:e} {got:e}");
            }
            let bytes = encode(Format::BF16, &w, rounding).unwrap();
            for (w, got) in w.iter().zip(decode(Format::BF16, &bytes)) {
                prop_assert!((w - got).abs() <= w.abs() * 2f32.powi(-8), "bf16 {w:e} {got:e}");
                prop_assert_eq!(got.to_bits(), half::bf16::from_f32(*w).to_f32().to_bits());
            }
            let bytes = encode(Format::F32, &w, rounding).unwrap();
            prop_assert_eq!(&decode(Format::F32, &bytes), &w);
        }
    }

    /// Also where a codec is given its own basis, as a rotation would spread the value over the whole group.
    #[test]
    fn codecs_name_the_weight_that_is_not_finite(
        weights in weights(),
        format in select(Format::ALL),
        at in any::<prop::sample::Index>(),
        bad in select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
    ) {
        let mut w = weights.make(format.spec().block_rows * 512);
        let index = at.index(w.len());
        w[index] = bad;
        prop_assert_eq!(encode(format, &w, ScaleRounding::NearestEven), Err(Fault::NonFinite { index }));
    }

    /// What kernels' error bounds are built from is never less than the weight itself.
    #[test]
    fn magnitudes_bound_decoded_weights(weights in weights(), format in select(Format::ALL)) {
        let s = format.spec();
        let w = weights.make(s.block_rows * 512);
        let bytes = encode(format, &w, ScaleRounding::NearestEven).unwrap();
        let mut magnitude = vec![f32::NAN; w.len()];
        s.codec.magnitude(&bytes, 512, &mut magnitude);
        for (m, got) in magnitude.iter().zip(decode(format, &bytes)) {
            prop_assert!(*m >= got.abs(), "{format}: {m:e} < |{got:e}|");
        }
    }
}

// ---- inverses ----

fn pack_round_trip<const BITS: usize>(bytes: &[u8]) -> Result<(), TestCaseError> {
    // Any bytes are codes with stray high bits, and (a multiple of BITS of them) a payload.
    let codes = &bytes[..bytes.len() / 8 * 8];
    let low: Vec<u8> = codes.iter().map(|c| c & (0xff >> (8 - BITS))).collect();
    let mut packed = vec![0xaa; codes.len() / 8 * BITS];
    bitstream::pack::<BITS>(codes, &mut packed);
    let mut back = vec![0xaa; codes.len()];
    bitstream::unpack::<BITS>(&packed, &mut back);
    prop_assert_eq!(&back, &low, "unpack(pack) of {} bits", BITS);
    for (i, code) in low.iter().enumerate() {
        for bit in 0..BITS {
            let at = i * BITS + bit;
            prop_assert_eq!(packed[at / 8] >> (at % 8) & 1, code >> bit & 1, "{} bits, code {}, bit {}", BITS, i, bit);
        }
    }
    let payload = &bytes[..bytes.len() / BITS * BITS];
    let mut codes = vec![0xaa; payload.len() / BITS * 8];
    bitstream::unpack::<BITS>(payload, &mut codes);
    let mut again = vec![0xaa; payload.len()];
    bitstream::pack::<BITS>(&codes, &mut again);
    prop_assert_eq!(&again, payload, "pack(unpack) of {} bits", BITS);
    Ok(())
}

fn norm(x: &[f32]) -> f64 {
    dot(x, x).sqrt()
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum()
}

proptest! {
    #![proptest_config(config(256))]

    #[test]
    fn packing_is_invertible_at_every_width(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        pack_round_trip::<1>(&bytes)?;
        pack_round_trip::<2>(&bytes)?;
        pack_round_trip::<3>(&bytes)?;
        pack_round_trip::<4>(&bytes)?;
        pack_round_trip::<5>(&bytes)?;
        pack_round_trip::<6>(&bytes)?;
        pack_round_trip::<7>(&bytes)?;
        pack_round_trip::<8>(&bytes)?;
    }

    /// Each of the eight steps is off by at most u relative to the norm, so one rotation is within 8u = 4.8e-7 of
    /// an orthogonal map, two within 9.6e-7.
    #[test]
    fn the_rotation_is_orthogonal(a in weights(), b in weights(), blocks in 1usize..4) {
        let (x, y) = (a.make(256 * blocks), b.make(256 * blocks));
        let (mut rx, mut ry) = (x.clone(), y.clone());
        rotation::forward(&mut rx);
        rotation::forward(&mut ry);
        prop_assert!((norm(&rx) - norm(&x)).abs() <= 1e-6 * norm(&x));
        prop_assert!((dot(&rx, &ry) - dot(&x, &y)).abs() <= 1e-6 * norm(&x) * norm(&y));
        let mut back = rx.clone();
        rotation::inverse(&mut back);
        let mut forth = x.clone();
        rotation::inverse(&mut forth);
        prop_assert!((norm(&forth) - norm(&x)).abs() <= 1e-6 * norm(&x));
        rotation::forward(&mut forth);
        for again in [back, forth] {
            let off: Vec<f32> = again.iter().zip(&x).map(|(a, b)| a - b).collect();
            prop_assert!(norm(&off) <= 1e-6 * norm(&x));
        }
    }

    #[test]
    fn ternary_weights_survive_t2_exactly(m in 1usize..3, k in 1usize..3, seed in any::<u64>(), density in 0u32..=100) {
        let (m, k) = (32 * m, 256 * k);
        let mut g = Lcg(seed);
        let mut w = Vec::new();
        for _ in 0..m * k / 128 {
            let scale = f16::from_bits(1 + (g.next() % 0x7bff) as u16).to_f32();
            w.extend((0..128).map(|_| match g.next() % 100 < density {
                true => scale * [1.0, -1.0][g.next() as usize % 2],
                false => 0.0,
            }));
        }
        for rounding in ROUNDINGS {
            let t = QuantTensor::encode("t", Format::T2, m, k, &w, &EncodeOptions { rounding, awq: None }).unwrap();
            let got = t.to_f32();
            prop_assert!(got.iter().zip(&w).all(|(a, b)| a.to_bits() == b.to_bits()));
            prop_assert_eq!(t.reserved_codes(), 0);
        }
    }
}

// ---- whole tensors ----

/// Pools of 1, 2 and 5 threads, made once.
fn pools() -> &'static [rayon::ThreadPool] {
    static POOLS: OnceLock<Vec<rayon::ThreadPool>> = OnceLock::new();
    POOLS.get_or_init(|| {
        [1, 2, 5].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap()).into_iter().collect()
    })
}

fn rotated() -> Vec<Format> {
    Format::ALL.iter().copied().filter(|f| f.basis() == Basis::Rotated).collect()
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn row_slices_are_rows_of_the_whole(
        matrix in matrix(Format::ALL),
        from in 0usize..6,
        len in 1usize..6,
        inner in 0usize..6,
    ) {
        let t = matrix.encode(&matrix.values()).unwrap();
        let unit = matrix.format.spec().block_rows;
        let units = matrix.m / unit;
        let from = from % units;
        let end = (from + len).min(units);
        let slice = t.rows(from * unit..end * unit).unwrap();
        let whole = t.to_f32();
        prop_assert_eq!((slice.m(), slice.logical_k()), ((end - from) * unit, t.logical_k()));
        prop_assert_eq!(slice.stored_k(), t.stored_k());
        prop_assert_eq!(&slice.to_f32(), &whole[from * unit * matrix.k..end * unit * matrix.k]);
        // A slice of the slice counts from the slice's first row.
        let inner = inner % (end - from);
        let last = slice.rows(inner * unit..slice.m()).unwrap();
        prop_assert_eq!(&last.to_f32(), &whole[(from + inner) * unit * matrix.k..end * unit * matrix.k]);
        let per_row = t.bytes().len() / units;
        prop_assert_eq!(last.bytes(), &t.bytes()[(from + inner) * per_row..end * per_row]);
        prop_assert!(slice.rows(0..slice.m() + unit).is_err(), "a slice does not reach past its end");
        prop_assert!(unit == 1 || t.rows(1..matrix.m).is_err());
    }

    #[test]
    fn the_number_of_threads_does_not_matter(matrix in matrix(Format::ALL)) {
        let w = matrix.values();
        let made: Vec<(Vec<u8>, Vec<u32>)> = pools()
            .iter()
            .map(|pool| {
                pool.install(|| {
                    let t = matrix.encode(&w).unwrap();
                    (t.bytes().to_vec(), t.to_f32().iter().map(|v| v.to_bits()).collect())
                })
            })
            .collect();
        prop_assert_eq!(&made[0], &made[1]);
        prop_assert_eq!(&made[0], &made[2]);
    }

    /// Padding is zero columns and nothing else: explicit zeros give the same bytes, the logical columns the same
    /// values, and so the same products to the last bit.
    #[test]
    fn padding_is_exactly_zero_columns(matrix in matrix(&[rotated(), vec![Format::Q8_0]].concat()), x in weights()) {
        let (m, k) = (matrix.m, matrix.k);
        let w = matrix.values();
        let t = matrix.encode(&w).unwrap();
        let stored = t.stored_k();
        prop_assert_eq!(stored, k.next_multiple_of(matrix.format.spec().block_cols));
        let widen = |row: &[f32]| [row, &vec![0.0; stored - k]].concat();
        let wide: Vec<f32> = w.chunks(k).flat_map(widen).collect();
        let padded = QuantTensor::encode("t", matrix.format, m, stored, &wide, &EncodeOptions::default()).unwrap();
        prop_assert_eq!(t.bytes(), padded.bytes());
        let (narrow, wide) = (t.to_f32(), padded.to_f32());
        prop_assert_eq!((narrow.len(), wide.len()), (m * k, m * stored));
        let x = x.make(k);
        let x_wide = widen(&x);
        for (narrow, wide) in narrow.chunks(k).zip(wide.chunks(stored)) {
            prop_assert_eq!(narrow, &wide[..k]);
            prop_assert_eq!(dot(narrow, &x), dot(wide, &x_wide));
        }
    }

    #[test]
    fn a_weight_that_is_not_finite_is_named(
        matrix in matrix(Format::ALL),
        at in any::<prop::sample::Index>(),
        corner in prop::bool::weighted(0.3),
        bad in select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        awq in any::<bool>(),
    ) {
        let mut w = matrix.values();
        let i = if corner { w.len() - 1 } else { at.index(w.len()) };
        w[i] = bad;
        let scales = Awq::new("t", (0..matrix.k).map(|c| f16::from_f32(0.5 + c as f32 / 512.0)).collect()).unwrap();
        let awq = (awq && matrix.format.basis() == Basis::Rotated).then(|| Arc::new(scales));
        let options = EncodeOptions { awq, ..EncodeOptions::default() };
        match QuantTensor::encode("blk.weight", matrix.format, matrix.m, matrix.k, &w, &options) {
            Err(Error::NonFinite { tensor, row, col, value }) => {
                prop_assert_eq!((&*tensor, row, col), ("blk.weight", i / matrix.k, i % matrix.k));
                prop_assert_eq!(value.to_bits(), bad.to_bits());
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    /// One large weight spreads over its whole group: 1/16 of it everywhere.
    #[test]
    fn a_weight_too_large_for_a_group_is_named(
        matrix in matrix(&[rotated(), vec![Format::Q8_0, Format::F16, Format::T2]].concat()),
        at in any::<prop::sample::Index>(),
        corner in prop::bool::weighted(0.3),
        rounding in select(ROUNDINGS.to_vec()),
    ) {
        let mut w = vec![0f32; matrix.m * matrix.k];
        let i = if corner { w.len() - 1 } else { at.index(w.len()) };
        let (row, col) = (i / matrix.k, i % matrix.k);
        let options = EncodeOptions { rounding, awq: None };
        let mut put = |v: f32| {
            w[i] = v;
            QuantTensor::encode("t", matrix.format, matrix.m, matrix.k, &w, &options)
        };
        let (fits, too_large, first, len, limit) = match matrix.format {
            Format::F16 => (65_519.0, 65_521.0, col, 1, 65_504.0),
            Format::Q8_0 => (65_519.0 * 127.0, 65_521.0 * 127.0, col / 32 * 32, 32, 65_504.0),
            Format::T2 => (65_504.0, 65_505.0, col / 128 * 128, 128, 65_504.0),
            f if V1.iter().any(|v| v.0 == f) => (1.7e38, 3.4e38, col / 256 * 256, 256, f32::MAX),
            Format::Mq4C => (65_504.0 * 16.0, 65_505.0 * 16.0, col / 256 * 256, 256, 65_504.0),
            // The image's first half has both signs, so it is the one that is out of range.
            _ => (65_504.0 * 16.0, 65_505.0 * 16.0, col / 256 * 256, 128, 65_504.0),
        };
        prop_assert!(put(fits).is_ok());
        if limit == f32::MAX {
            // 3.4e38 / 16 is still no problem for an f32 header.
            prop_assert!(put(too_large).is_ok());
            return Ok(());
        }
        match put(too_large) {
            Err(Error::OutOfRange { format, row: r, col: c, col_end, limit: l, .. }) => {
                prop_assert_eq!((format, r, c, col_end, l), (matrix.format, row, first, first + len, limit));
            }
            other => prop_assert!(false, "{:?}", other),
        }
        prop_assert!(put(1e30).is_err(), "truncation is no licence to saturate");
    }
}

// ---- the places where ranges end ----

fn named(result: bitlane::Result<QuantTensor>) -> (usize, usize) {
    match result {
        Err(Error::NonFinite { row, col, .. }) => (row, col),
        other => panic!("{other:?}"),
    }
}

#[test]
fn corners_of_padded_tensors_are_named_exactly() {
    for &format in Format::ALL {
        let (m, k) = if format == Format::T2 { (64, 512) } else { (5, 576) };
        for (row, col) in [(0, 0), (0, k - 1), (m - 1, 0), (m - 1, k - 1), (m / 2, 255), (m / 2, 256), (1, 511)] {
            let mut w = vec![0.25f32; m * k];
            w[row * k + col] = f32::NAN;
            let got = named(QuantTensor::encode("t", format, m, k, &w, &EncodeOptions::default()));
            assert_eq!(got, (row, col), "{format}");
        }
    }
}

#[test]
fn groups_out_of_range_are_named_and_their_neighbours_are_not() {
    let group = |format: Format, values: &[(usize, f32)]| {
        let mut w = vec![0f32; 512];
        values.iter().for_each(|(i, v)| w[*i] = *v);
        encode(format, &w, ScaleRounding::NearestEven)
    };
    for (format, bits) in V2 {
        let levels = ((1u32 << bits) - 1) as f32;
        // Index, length and quantity of the fault, in the second half of the second group.
        let fault = |values: &[(usize, f32)]| match group(format, values) {
            Err(Fault::Range { index, len, what, value, limit }) => {
                assert!(value > limit && limit == 65_504.0, "{format}: {value} {limit}");
                (index, len, what)
            }
            other => panic!("{format}: {other:?}"),
        };
        assert_eq!(fault(&[(400, -65_505.0)]), (384, 128, "zero"));
        assert_eq!(fault(&[(400, 65_505.0 * levels)]), (384, 128, "step"));
        assert_eq!(fault(&[(400, 3e38), (401, -3e38)]).0, 384); // hi − lo overflows
        assert_eq!(fault(&[(130, -1e30)]), (128, 128, "zero"));
        // At the limit everything decodes to finite numbers, and the other half is not touched.
        let bytes = group(format, &[(400, 65_504.0 * levels), (0, -1.0)]).unwrap();
        let got = decode(format, &bytes);
        assert_eq!((got[400], got[399], got[0]), (65_504.0 * levels, 0.0, -1.0), "{format}");
        assert!(group(format, &[(400, -65_504.0)]).is_ok());
    }
    assert!(matches!(
        group(Format::Mq4C, &[(300, -65_505.0)]),
        Err(Fault::Range { index: 256, len: 256, what: "zero", .. })
    ));
    for (format, _) in V1 {
        assert!(matches!(
            group(format, &[(300, 2e38), (301, -2e38)]),
            Err(Fault::Range { index: 256, len: 256, what: "range", .. })
        ));
        let got = decode(format, &group(format, &[(300, 1e38), (301, -1e38)]).unwrap());
        assert!(got.iter().all(|v| v.is_finite()) && got[301] == -1e38, "{format}");
    }
    let bf16 = |v: f32| group(Format::BF16, &[(7, v)]);
    assert!(bf16(3.3895e38).is_ok());
    assert!(matches!(bf16(f32::MAX), Err(Fault::Range { index: 7, len: 1, what: "value", .. })));
    assert!(group(Format::F32, &[(7, f32::MAX)]).is_ok());
}

#[test]
fn a_finite_weight_whose_image_is_not_is_named_by_its_group() {
    let options = EncodeOptions::default();
    let mut w = vec![0f32; 2 * 768];
    w[768 + 300..768 + 400].fill(3e38); // their sum overflows in the butterflies
    let what = |options: &EncodeOptions, w: &[f32]| match QuantTensor::encode("t", Format::Mq4V1, 2, 768, w, options) {
        Err(Error::OutOfRange { row, col, col_end, what, .. }) => (row, col, col_end, what),
        other => panic!("{other:?}"),
    };
    assert_eq!(what(&options, &w), (1, 256, 512, "rotated value"));
    // Or its product with AWQ does.
    let mut w = vec![0f32; 2 * 768];
    w[700] = 3e37;
    let scales = vec![f16::from_f32(100.0); 768];
    let awq = Some(Arc::new(Awq::new("t", scales).unwrap()));
    assert_eq!(what(&EncodeOptions { awq, ..options }, &w), (0, 512, 768, "rotated value"));
}

#[test]
fn q8_0_rounds_ties_and_only_ties_away_from_zero() {
    // With a largest weight of 127, d is 1 and codes are the rounded weights.
    let mut w = vec![127.0f32];
    for n in 0..126u32 {
        let tie = n as f32 + 0.5;
        w.extend([tie.next_down(), tie, tie.next_up(), -tie.next_down(), -tie, -tie.next_up()]);
    }
    let want: Vec<f32> = w.iter().map(|w| w.round()).collect();
    for (w, want) in w[1..].chunks(24).zip(want[1..].chunks(24)) {
        let mut block = [0f32; 32];
        block[0] = 127.0;
        block[1..=w.len()].copy_from_slice(w);
        let got = decode(Format::Q8_0, &encode(Format::Q8_0, &block, ScaleRounding::NearestEven).unwrap());
        assert_eq!(&got[1..=w.len()], want);
    }
}
