//! MQ groups of 256 rotated weights: V2 (two fp16 scale/zero pairs), MQ4C (one fp16 pair) and v1 (one
//! f32 pair), 2 to 6 bits.
//!
//! | generation | header (8 bytes) | weight |
//! |---|---|---|
//! | V2 | fp16 scale, zero of weights 0..128; fp16 scale, zero of weights 128..256 | q·scale\[h\] + zero\[h\], h = i ≥ 128 |
//! | MQ4C | fp16 scale, zero; four zero bytes | q·scale + zero |
//! | v1 | f32 scale, f32 minimum | q·scale + minimum |
//!
//! then `32·bits` bytes of LSB-first codes ([`bitstream`]). A V2 group read through a v1 header decodes
//! every weight to about 1e-14 and looks healthy, which is why the generations are formats of their own.
//!
//! V2 and MQ4C codes are chosen against the *stored* (rounded) halves with three separate f32 roundings:
//! `floor((w − z)·(1/st) + 0.5)`. Rust never contracts a multiply and an add, so what is written below is
//! what runs.

use half::f16;
use multiversion::multiversion;

use super::rotation::BLOCK as GROUP;
use super::{Codec, Fault, ScaleRounding, bitstream};

/// Weights that share a scale/zero pair in V2.
pub const HALF: usize = 128;
/// Bytes before a group's codes, in every generation.
pub const HEADER: usize = 8;
/// Largest finite half.
const MAX_HALF: f32 = 65504.0;

/// Bytes of a group of 256 `BITS`-bit codes.
pub const fn group_bytes(bits: usize) -> usize {
    HEADER + 32 * bits
}

/// The V2 codec.
pub struct V2<const BITS: usize>;
/// The MQ4C codec: V2's rules with one grid over the 256 weights.
pub struct Mq4C;
/// The v1 codec.
pub struct V1<const BITS: usize>;

const LANES: usize = 16;

/// Smallest and largest value, or `None` if any is not finite.
#[inline(always)]
fn range(w: &[f32]) -> Option<(f32, f32)> {
    let mut lo = [f32::INFINITY; LANES];
    let mut hi = [f32::NEG_INFINITY; LANES];
    let mut poison = [0f32; LANES];
    for chunk in w.as_chunks::<LANES>().0 {
        for i in 0..LANES {
            lo[i] = if chunk[i] < lo[i] { chunk[i] } else { lo[i] };
            hi[i] = if chunk[i] > hi[i] { chunk[i] } else { hi[i] };
            poison[i] += chunk[i] * 0.0; // NaN as soon as one value is NaN or infinite
        }
    }
    // Halving keeps the lanes in one vector, where a fold would be sixteen dependent steps.
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            lo[i] = if lo[i + n] < lo[i] { lo[i + n] } else { lo[i] };
            hi[i] = if hi[i + n] > hi[i] { hi[i + n] } else { hi[i] };
            poison[i] += poison[i + n];
        }
        n /= 2;
    }
    (poison[0] == 0.0).then_some((lo[0], hi[0]))
}

#[cold]
#[inline(never)]
pub(super) fn not_finite(w: &[f32], base: usize) -> Fault {
    Fault::NonFinite { index: base + w.iter().position(|v| !v.is_finite()).unwrap_or(0) }
}

/// A scale/zero pair as it is stored, and the two numbers codes are chosen with.
struct Grid {
    scale: f16,
    zero: f16,
    /// f32 of the stored zero.
    z: f32,
    /// 1 / f32 of the stored scale; 0 marks a degenerate grid, whose codes are all 0.
    inv: f32,
}

/// The V2 grid of `w` with `levels` steps; `base` is the index of `w[0]` in the strip.
#[inline(always)]
fn grid(w: &[f32], levels: f32, rounding: ScaleRounding, base: usize) -> Result<Grid, Fault> {
    let Some((lo, hi)) = range(w) else { return Err(not_finite(w, base)) };
    let step = if hi > lo { (hi - lo) / levels } else { 0.0 };
    for (what, value) in [("zero", lo.abs()), ("step", step)] {
        if value > MAX_HALF {
            return Err(Fault::Range { index: base, len: w.len(), what, value, limit: MAX_HALF });
        }
    }
    let (scale, zero) = (rounding.to_half(step), rounding.to_half(lo));
    let (st, z) = (scale.to_f32(), zero.to_f32());
    Ok(Grid { scale, zero, z, inv: if st == 0.0 { 0.0 } else { 1.0 / st } })
}

/// Codes of `w` on a grid.
#[inline(always)]
fn choose(w: &[f32], g: &Grid, levels: f32, codes: &mut [u8]) {
    // A degenerate grid has inv = 0, so every value below is 0.5 and every code 0.
    for (w, c) in w.iter().zip(codes) {
        let v = (w - g.z) * g.inv + 0.5;
        // Clamping first and truncating equals flooring and then clamping, as the lower bound is 0.
        let v = if v > 0.0 { v } else { 0.0 };
        let v = if v < levels { v } else { levels };
        *c = truncate(v);
    }
}

/// The whole part of `v`, 0 <= `v` < 256. A cast saturates, which no vector instruction does; adding 2^23 rounds
/// to an integer in the low bits instead, and is put right where it rounded up.
#[inline(always)]
pub(super) fn truncate(v: f32) -> u8 {
    const MAGIC: f32 = 8_388_608.0;
    let rounded = v + MAGIC;
    (rounded.to_bits() as u8).wrapping_sub(u8::from(rounded - MAGIC > v))
}

#[inline(always)]
fn levels(bits: usize) -> f32 {
    ((1u32 << bits) - 1) as f32
}

#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn encode_v2<const BITS: usize>(w: &[f32], rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
    for (n, (w, b)) in w.chunks_exact(GROUP).zip(bytes.chunks_exact_mut(group_bytes(BITS))).enumerate() {
        let (header, payload) = b.split_at_mut(HEADER);
        let mut codes = [0u8; GROUP];
        for h in 0..2 {
            let w = &w[h * HALF..][..HALF];
            let g = grid(w, levels(BITS), rounding, n * GROUP + h * HALF)?;
            choose(w, &g, levels(BITS), &mut codes[h * HALF..][..HALF]);
            header[4 * h..][..2].copy_from_slice(&g.scale.to_le_bytes());
            header[4 * h + 2..][..2].copy_from_slice(&g.zero.to_le_bytes());
        }
        bitstream::pack::<BITS>(&codes, payload);
    }
    Ok(())
}

#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn encode_mq4c(w: &[f32], rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
    for (n, (w, b)) in w.chunks_exact(GROUP).zip(bytes.chunks_exact_mut(group_bytes(4))).enumerate() {
        let (header, payload) = b.split_at_mut(HEADER);
        let mut codes = [0u8; GROUP];
        let g = grid(w, levels(4), rounding, n * GROUP)?;
        choose(w, &g, levels(4), &mut codes);
        header[..2].copy_from_slice(&g.scale.to_le_bytes());
        header[2..4].copy_from_slice(&g.zero.to_le_bytes());
        header[4..].fill(0);
        bitstream::pack::<4>(&codes, payload);
    }
    Ok(())
}

/// v1 stores f32 and chooses codes against them: `min(L, trunc((v − lo)·(1/scale) + 0.5))`, scale 1 for a flat group.
#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn encode_v1<const BITS: usize>(w: &[f32], bytes: &mut [u8]) -> Result<(), Fault> {
    for (n, (w, b)) in w.chunks_exact(GROUP).zip(bytes.chunks_exact_mut(group_bytes(BITS))).enumerate() {
        let (header, payload) = b.split_at_mut(HEADER);
        let Some((lo, hi)) = range(w) else { return Err(not_finite(w, n * GROUP)) };
        let spread = hi - lo;
        if spread > f32::MAX {
            return Err(Fault::Range { index: n * GROUP, len: GROUP, what: "range", value: spread, limit: f32::MAX });
        }
        let scale = if spread > 0.0 { spread / levels(BITS) } else { 1.0 };
        let mut inv = 1.0 / scale;
        if !inv.is_finite() {
            inv = 0.0; // a subnormal range: (v − lo)·∞ has no meaning, and every code is within the range anyway
        }
        let g = Grid { scale: f16::ZERO, zero: f16::ZERO, z: lo, inv };
        let mut codes = [0u8; GROUP];
        choose(w, &g, levels(BITS), &mut codes);
        header[..4].copy_from_slice(&scale.to_le_bytes());
        header[4..].copy_from_slice(&lo.to_le_bytes());
        bitstream::pack::<BITS>(&codes, payload);
    }
    Ok(())
}

/// How a generation's header gives the scale and zero of each half.
#[derive(Clone, Copy)]
pub(crate) enum Header {
    V2,
    C,
    V1,
}

impl Header {
    /// Scale and zero of half `h` of the group that begins at `b`.
    #[inline(always)]
    pub(crate) fn pair(self, b: &[u8], h: usize) -> (f32, f32) {
        match self {
            Header::V2 => (half_at(b, 4 * h), half_at(b, 4 * h + 2)),
            Header::C => (half_at(b, 0), half_at(b, 2)),
            Header::V1 => (f32::from_le_bytes([b[0], b[1], b[2], b[3]]), f32::from_le_bytes([b[4], b[5], b[6], b[7]])),
        }
    }
}

#[inline(always)]
pub(crate) fn half_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Decodes groups, or (`MAGNITUDE`) gives |q·scale| + |zero| per weight.
#[inline(always)]
fn decode_groups<const BITS: usize, const MAGNITUDE: bool>(header: Header, bytes: &[u8], out: &mut [f32]) {
    for (b, out) in bytes.chunks_exact(group_bytes(BITS)).zip(out.chunks_exact_mut(GROUP)) {
        let mut codes = [0u8; GROUP];
        bitstream::unpack::<BITS>(&b[HEADER..], &mut codes);
        for h in 0..2 {
            let (scale, zero) = header.pair(b, h);
            let (scale, zero) = if MAGNITUDE { (scale.abs(), zero.abs()) } else { (scale, zero) };
            for (q, o) in codes[h * HALF..][..HALF].iter().zip(&mut out[h * HALF..][..HALF]) {
                *o = f32::from(*q) * scale + zero;
            }
        }
    }
}

#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn decode<const BITS: usize>(header: Header, bytes: &[u8], out: &mut [f32]) {
    decode_groups::<BITS, false>(header, bytes, out);
}

impl<const BITS: usize> Codec for V2<BITS> {
    fn encode(&self, w: &[f32], _k: usize, rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        encode_v2::<BITS>(w, rounding, bytes)
    }
    fn decode(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        decode::<BITS>(Header::V2, bytes, out);
    }
    fn magnitude(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        decode_groups::<BITS, true>(Header::V2, bytes, out);
    }
}

impl Codec for Mq4C {
    fn encode(&self, w: &[f32], _k: usize, rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        encode_mq4c(w, rounding, bytes)
    }
    fn decode(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        decode::<4>(Header::C, bytes, out);
    }
    fn magnitude(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        decode_groups::<4, true>(Header::C, bytes, out);
    }
}

impl<const BITS: usize> Codec for V1<BITS> {
    fn encode(&self, w: &[f32], _k: usize, _rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        encode_v1::<BITS>(w, bytes)
    }
    fn decode(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        decode::<BITS>(Header::V1, bytes, out);
    }
    fn magnitude(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        decode_groups::<BITS, true>(Header::V1, bytes, out);
    }
}
