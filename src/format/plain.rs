//! What models keep beside the low-bit formats: F32, F16, BF16 and Q8_0. Unrotated.
//!
//! F32, F16 and BF16 accept any value that they can store, NaN and infinity excepted: a weight that is
//! not finite is an error in every format, so that a broken source is found at conversion.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use multiversion::multiversion;

use super::mq::{not_finite, truncate};
use super::{Codec, Fault, ScaleRounding};

/// IEEE binary32.
pub struct F32;
/// IEEE binary16.
pub struct F16;
/// The upper half of an f32, rounded to nearest even.
pub struct BF16;
/// ggml's block of 32: fp16 d, then 32 int8 q; w = q·d.
pub struct Q8_0;

/// Weights in a Q8_0 block.
const Q8_BLOCK: usize = 32;

/// Values that halves are converted in at a time: a buffer on the stack, as blobs are not aligned.
const CHUNK: usize = 256;

/// The largest magnitude, or `None` if any value is not finite. Magnitudes are ordered like their bits, infinity
/// and NaN above all others, and an integer maximum has no order of its own: it becomes vector code.
#[inline(always)]
pub(super) fn peak(w: &[f32]) -> Option<f32> {
    let bits = w.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
    let max = f32::from_bits(bits);
    max.is_finite().then_some(max)
}

#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn peak_of_all(w: &[f32]) -> Option<f32> {
    peak(w)
}

/// Checks that all values are finite, and still are once `round` has brought them into a type with largest
/// value `limit`. `round` is monotone, so the largest magnitude answers for all.
fn fits(w: &[f32], limit: f32, round: impl Fn(f32) -> f32) -> Result<(), Fault> {
    let Some(max) = peak_of_all(w) else { return Err(not_finite(w, 0)) };
    if round(max).is_finite() {
        return Ok(());
    }
    let index = w.iter().position(|v| !round(*v).is_finite()).unwrap_or(0);
    Err(Fault::Range { index, len: 1, what: "value", value: w[index].abs(), limit })
}

fn abs_all(out: &mut [f32]) {
    out.iter_mut().for_each(|v| *v = v.abs());
}

impl Codec for F32 {
    fn encode(&self, w: &[f32], _k: usize, _rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        fits(w, f32::MAX, |v| v)?;
        for (w, b) in w.iter().zip(bytes.as_chunks_mut::<4>().0) {
            *b = w.to_le_bytes();
        }
        Ok(())
    }
    fn decode(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        for (b, o) in bytes.as_chunks::<4>().0.iter().zip(out) {
            *o = f32::from_le_bytes(*b);
        }
    }
    fn magnitude(&self, bytes: &[u8], k: usize, out: &mut [f32]) {
        self.decode(bytes, k, out);
        abs_all(out);
    }
}

impl Codec for F16 {
    fn encode(&self, w: &[f32], _k: usize, rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        // Truncation would turn any number into the largest half: what does not round to a half is refused.
        fits(w, f16::MAX.to_f32(), |v| f16::from_f32(v).to_f32())?;
        let mut halves = [f16::ZERO; CHUNK];
        for (w, b) in w.chunks(CHUNK).zip(bytes.chunks_mut(2 * CHUNK)) {
            let halves = &mut halves[..w.len()];
            halves.convert_from_f32_slice(w);
            if rounding != ScaleRounding::NearestEven {
                halves.iter_mut().zip(w).for_each(|(h, w)| *h = rounding.to_half(*w));
            }
            for (h, b) in halves.iter().zip(b.as_chunks_mut::<2>().0) {
                *b = h.to_le_bytes();
            }
        }
        Ok(())
    }
    fn decode(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        let mut halves = [f16::ZERO; CHUNK];
        for (b, o) in bytes.chunks(2 * CHUNK).zip(out.chunks_mut(CHUNK)) {
            let halves = &mut halves[..o.len()];
            for (h, b) in halves.iter_mut().zip(b.as_chunks::<2>().0) {
                *h = f16::from_le_bytes(*b);
            }
            halves.convert_to_f32_slice(o);
        }
    }
    fn magnitude(&self, bytes: &[u8], k: usize, out: &mut [f32]) {
        self.decode(bytes, k, out);
        abs_all(out);
    }
}

#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn encode_bf16(w: &[f32], bytes: &mut [u8]) {
    for (w, b) in w.iter().zip(bytes.as_chunks_mut::<2>().0) {
        // bf16::from_f32 less its care for NaN: half of the last place, or just less where that place is even.
        let w = w.to_bits();
        *b = (((w + 0x7fff + ((w >> 16) & 1)) >> 16) as u16).to_le_bytes();
    }
}

impl Codec for BF16 {
    fn encode(&self, w: &[f32], _k: usize, _rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        fits(w, bf16::MAX.to_f32(), |v| bf16::from_f32(v).to_f32())?;
        encode_bf16(w, bytes);
        Ok(())
    }
    fn decode(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        for (b, o) in bytes.as_chunks::<2>().0.iter().zip(out) {
            *o = bf16::from_le_bytes(*b).to_f32();
        }
    }
    fn magnitude(&self, bytes: &[u8], k: usize, out: &mut [f32]) {
        self.decode(bytes, k, out);
        abs_all(out);
    }
}

/// ggml's reference rule: d = max|w|/127, q = round(w/d) away from zero at ties, with the unrounded d.
#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn encode_q8_0(w: &[f32], rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
    for (n, (w, b)) in w.as_chunks::<Q8_BLOCK>().0.iter().zip(bytes.as_chunks_mut::<34>().0).enumerate() {
        let index = n * Q8_BLOCK;
        let Some(max) = peak(w) else { return Err(not_finite(w, index)) };
        let d = max / 127.0;
        if f16::from_f32(d).is_infinite() {
            let limit = f16::MAX.to_f32();
            return Err(Fault::Range { index, len: Q8_BLOCK, what: "scale", value: d, limit });
        }
        let half = rounding.to_half(d);
        let inv = if half.to_bits() != 0 { 1.0 / d } else { 0.0 };
        b[..2].copy_from_slice(&half.to_le_bytes());
        for (v, q) in w.iter().zip(&mut b[2..]) {
            let x = v * inv;
            // f32::round (half away from zero) in vector form: the addend is the float below one half, so that
            // 0.49999997 + 0.5 cannot round up to 1.
            let r = truncate(x.abs() + 0.49999997);
            *q = if x < 0.0 { r.wrapping_neg() } else { r };
        }
    }
    Ok(())
}

#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn decode_q8_0(bytes: &[u8], out: &mut [f32]) {
    for (b, o) in bytes.as_chunks::<34>().0.iter().zip(out.as_chunks_mut::<Q8_BLOCK>().0) {
        let d = f16::from_le_bytes([b[0], b[1]]).to_f32();
        for (q, o) in b[2..].iter().zip(o) {
            *o = f32::from(*q as i8) * d;
        }
    }
}

impl Codec for Q8_0 {
    fn encode(&self, w: &[f32], _k: usize, rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        encode_q8_0(w, rounding, bytes)
    }
    fn decode(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        decode_q8_0(bytes, out);
    }
    fn magnitude(&self, bytes: &[u8], k: usize, out: &mut [f32]) {
        self.decode(bytes, k, out);
        abs_all(out);
    }
}
