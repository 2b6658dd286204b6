//! What models keep beside the low-bit formats: F32, F16, BF16 and Q8_0. Unrotated.
//!
//! F32, F16 and BF16 accept any value that they can store, NaN and infinity excepted: a weight that is
//! not finite is an error in every format, so that a broken source is found at conversion.

use half::{bf16, f16};
use multiversion::multiversion;

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

fn finite(w: &[f32]) -> Result<(), Fault> {
    match w.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(Fault::NonFinite { index }),
        None => Ok(()),
    }
}

/// A finite weight that became infinite.
fn overflow(index: usize, value: f32, limit: f32) -> Fault {
    Fault::Range { index, len: 1, what: "value", value: value.abs(), limit }
}

fn abs_all(out: &mut [f32]) {
    out.iter_mut().for_each(|v| *v = v.abs());
}

impl Codec for F32 {
    fn encode(&self, w: &[f32], _k: usize, _rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        finite(w)?;
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
        finite(w)?;
        for (i, (w, b)) in w.iter().zip(bytes.as_chunks_mut::<2>().0).enumerate() {
            let h = rounding.to_half(*w);
            if h.is_infinite() {
                return Err(overflow(i, *w, f16::MAX.to_f32()));
            }
            *b = h.to_le_bytes();
        }
        Ok(())
    }
    fn decode(&self, bytes: &[u8], _k: usize, out: &mut [f32]) {
        for (b, o) in bytes.as_chunks::<2>().0.iter().zip(out) {
            *o = f16::from_le_bytes(*b).to_f32();
        }
    }
    fn magnitude(&self, bytes: &[u8], k: usize, out: &mut [f32]) {
        self.decode(bytes, k, out);
        abs_all(out);
    }
}

impl Codec for BF16 {
    fn encode(&self, w: &[f32], _k: usize, _rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        finite(w)?;
        for (i, (w, b)) in w.iter().zip(bytes.as_chunks_mut::<2>().0).enumerate() {
            let h = bf16::from_f32(*w);
            if h.is_infinite() {
                return Err(overflow(i, *w, bf16::MAX.to_f32()));
            }
            *b = h.to_le_bytes();
        }
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
        let (mut max, mut poison) = (0f32, 0f32);
        for v in w {
            let a = v.abs();
            max = if a > max { a } else { max };
            poison += v * 0.0;
        }
        if poison != 0.0 {
            finite(w).map_err(|_| Fault::NonFinite {
                index: index + w.iter().position(|v| !v.is_finite()).unwrap_or(0),
            })?;
        }
        let d = max / 127.0;
        let half = rounding.to_half(d);
        if half.is_infinite() {
            let limit = f16::MAX.to_f32();
            return Err(Fault::Range { index, len: Q8_BLOCK, what: "scale", value: d, limit });
        }
        let inv = if half.to_bits() != 0 { 1.0 / d } else { 0.0 };
        b[..2].copy_from_slice(&half.to_le_bytes());
        for (v, q) in w.iter().zip(&mut b[2..]) {
            let x = v * inv;
            // f32::round (half away from zero) in vector form: the addend is the float below one half, so that
            // 0.49999997 + 0.5 cannot round up to 1.
            let r = (x.abs() + 0.49999997) as i32;
            *q = (if x < 0.0 { -r } else { r }) as i8 as u8;
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
