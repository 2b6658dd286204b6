//! Y = X Wᵀ on the CPU, for one vector or a few.
//!
//! Affine formats use the factored form: per half of 128, scale·Σqx + zero·Σx, with Σx computed once and not
//! once per row. Codes come out of their bytes in the order that is cheapest (low nibbles, then high
//! nibbles), and x is put into the same order once. Formats without codes are decoded block by block.

use multiversion::multiversion;
use rayon::prelude::*;

use crate::error::Result;
use crate::format::mq::{HALF, HEADER, Header, group_bytes, half_at};
use crate::format::{Format, Spec, bitstream, t2};
use crate::oracle;
use crate::tensor::{Activation, BasisMarker, Weights};

/// Lanes of an accumulator: one 512-bit or two 256-bit registers.
const LANES: usize = 16;
/// Rows that a thread takes at a time.
const ROWS: usize = 32;

/// x in the order in which codes are unpacked, and its sum per half of 128.
struct Prepared {
    /// `[N][stored K / 128][128]`.
    x: Vec<[f32; HALF]>,
    /// `[N][stored K / 128]`.
    sums: Vec<f32>,
    halves: usize,
}

/// Codes per byte that unpack as planes: 2 for nibbles, 4 for pairs of bits, 1 for codes that straddle bytes.
fn planes(bits: usize) -> usize {
    match bits {
        4 => 2,
        2 => 4,
        _ => 1,
    }
}

impl Prepared {
    fn new(x: &[f32], width: usize, bits: usize) -> Self {
        let planes = planes(bits);
        let mut permuted = Vec::with_capacity(x.len() / HALF);
        let mut sums = Vec::with_capacity(x.len() / HALF);
        for half in x.chunks_exact(HALF) {
            let order = (0..planes).flat_map(|plane| (plane..HALF).step_by(planes));
            let mut p = [0f32; HALF];
            p.iter_mut().zip(order).for_each(|(p, i)| *p = half[i]);
            permuted.push(p);
            sums.push(half.iter().map(|v| f64::from(*v)).sum::<f64>() as f32);
        }
        Prepared { x: permuted, sums, halves: width / HALF }
    }
}

/// The codes of a half as f32, in [`Prepared`]'s order.
#[inline(always)]
fn codes<const BITS: usize>(bytes: &[u8], q: &mut [f32; HALF]) {
    match BITS {
        4 => {
            let (low, high) = q.split_at_mut(64);
            for ((b, l), h) in bytes.iter().zip(low).zip(high) {
                *l = f32::from(b & 15);
                *h = f32::from(b >> 4);
            }
        }
        2 => {
            for (plane, q) in q.chunks_exact_mut(32).enumerate() {
                for (b, q) in bytes.iter().zip(q) {
                    *q = f32::from((b >> (2 * plane)) & 3);
                }
            }
        }
        _ => {
            let mut c = [0u8; HALF];
            bitstream::unpack::<BITS>(bytes, &mut c);
            for (c, q) in c.iter().zip(q) {
                *q = f32::from(*c);
            }
        }
    }
}

/// Sums lanes pairwise, so that the order does not depend on the vector width.
#[inline(always)]
fn tree(mut acc: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for i in 0..n {
            acc[i] += acc[i + n];
        }
        n /= 2;
    }
    acc[0]
}

/// Vectors that one pass over the weights serves.
const VECTORS: usize = 8;

/// Sums of one row: lanes stay apart until the row ends, so that the loop over halves is vector code only.
#[derive(Clone, Copy)]
struct Sums {
    lanes: [f32; LANES],
    zeros: f32,
}

impl Sums {
    const ZERO: Sums = Sums { lanes: [0.0; LANES], zeros: 0.0 };

    /// Adds scale·Σqx + zero·Σx of one half.
    #[inline(always)]
    fn add(&mut self, q: &[f32; HALF], x: &[f32; HALF], sum: f32, scale: f32, zero: f32) {
        let mut s = [0f32; LANES];
        for (q, x) in q.as_chunks::<LANES>().0.iter().zip(x.as_chunks::<LANES>().0) {
            for ((s, q), x) in s.iter_mut().zip(q).zip(x) {
                *s += q * x;
            }
        }
        for (lane, s) in self.lanes.iter_mut().zip(s) {
            *lane += scale * s;
        }
        self.zeros += zero * sum;
    }

    #[inline(always)]
    fn total(&self) -> f32 {
        tree(self.lanes) + self.zeros
    }
}

/// One row of halves: `half(i)` gives the scale, the zero and the code bytes of half i; `out` is one value per
/// vector.
#[inline(always)]
fn row<'a, const BITS: usize>(p: &Prepared, out: &mut [f32], half: impl Fn(usize) -> (f32, f32, &'a [u8])) {
    for (block, out) in out.chunks_mut(VECTORS).enumerate() {
        let mut sums = [Sums::ZERO; VECTORS];
        for i in 0..p.halves {
            let (scale, zero, bytes) = half(i);
            let mut q = [0f32; HALF];
            codes::<BITS>(bytes, &mut q);
            for (v, s) in sums[..out.len()].iter_mut().enumerate() {
                let at = (block * VECTORS + v) * p.halves + i;
                s.add(&q, &p.x[at], p.sums[at], scale, zero);
            }
        }
        for (o, s) in out.iter_mut().zip(&sums) {
            *o = s.total();
        }
    }
}

/// Rows of MQ groups: `out` is `[rows][n]`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2+fma+f16c"))]
fn mq_rows<const BITS: usize>(header: Header, bytes: &[u8], row_len: usize, p: &Prepared, n: usize, out: &mut [f32]) {
    for (groups, out) in bytes.chunks_exact(row_len).zip(out.chunks_exact_mut(n)) {
        row::<BITS>(p, out, |i| {
            let (b, h) = (&groups[i / 2 * group_bytes(BITS)..][..group_bytes(BITS)], i % 2);
            let (scale, zero) = header.pair(b, h);
            (scale, zero, &b[HEADER + 16 * BITS * h..][..16 * BITS])
        });
    }
}

/// A strip of t2 tiles: `out` is `[32][n]`. w = (p − 1)·scale, so zero is −scale; the reserved pattern becomes
/// pattern 1, which is 0.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2+fma+f16c"))]
fn t2_rows(bytes: &[u8], p: &Prepared, n: usize, out: &mut [f32]) {
    for first in (0..n).step_by(VECTORS) {
        let vectors = VECTORS.min(n - first);
        // Tiles one after the other, so that their bytes are read in order; 32 rows of sums fit in the first cache.
        let mut sums = [[Sums::ZERO; VECTORS]; t2::TILE_ROWS];
        for (t, tile) in bytes.chunks_exact(t2::TILE_BYTES).enumerate() {
            for (r, sums) in sums.iter_mut().enumerate() {
                for g in 0..2 {
                    let scale = half_at(tile, 2048 + 4 * r + 2 * g);
                    let mut sane = [0u8; 32];
                    for (s, b) in sane.iter_mut().zip(&tile[64 * r + 32 * g..][..32]) {
                        *s = b & !((b & 0x55) << 1);
                    }
                    let mut q = [0f32; HALF];
                    codes::<2>(&sane, &mut q);
                    for (v, s) in sums[..vectors].iter_mut().enumerate() {
                        let at = (first + v) * p.halves + 2 * t + g;
                        s.add(&q, &p.x[at], p.sums[at], scale, -scale);
                    }
                }
            }
        }
        for (out, sums) in out.chunks_exact_mut(n).zip(&sums) {
            out[first..].iter_mut().zip(&sums[..vectors]).for_each(|(o, s)| *o = s.total());
        }
    }
}

/// Columns that are decoded at a time: they stay in the first cache until every vector has used them.
const COLUMNS: usize = 1024;

/// Adds w·x into lanes that stay apart; four registers of them, so that additions need not wait for each other.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2+fma+f16c"))]
fn add_dense(w: &[f32], x: &[f32], lanes: &mut [[f32; LANES]; 4]) {
    let (w4, w) = w.as_chunks::<{ 4 * LANES }>();
    let (x4, x) = x.as_chunks::<{ 4 * LANES }>();
    for (w, x) in w4.iter().zip(x4) {
        for ((lanes, w), x) in lanes.iter_mut().zip(w.as_chunks::<LANES>().0).zip(x.as_chunks::<LANES>().0) {
            for ((lane, w), x) in lanes.iter_mut().zip(w).zip(x) {
                *lane += w * x;
            }
        }
    }
    for ((lane, w), x) in lanes.as_flattened_mut().iter_mut().zip(w).zip(x) {
        *lane += w * x;
    }
}

/// One row of a format without codes; `out` is one value per vector. A padded column has no x, and adds nothing.
fn dense_row(spec: &Spec, bytes: &[u8], x: &[f32], width: usize, out: &mut [f32]) {
    let mut scratch = [0f32; COLUMNS];
    for (block, out) in out.chunks_mut(VECTORS).enumerate() {
        let mut lanes = [[[0f32; LANES]; 4]; VECTORS];
        for (c, bytes) in bytes.chunks(COLUMNS / spec.block_cols * spec.block_bytes).enumerate() {
            let w = &mut scratch[..bytes.len() / spec.block_bytes * spec.block_cols];
            spec.codec.decode(bytes, w.len(), w);
            for (v, lanes) in lanes[..out.len()].iter_mut().enumerate() {
                let x = &x[(block * VECTORS + v) * width..][..width];
                let x = &x[c * COLUMNS..width.min(c * COLUMNS + w.len())];
                add_dense(&w[..x.len()], x, lanes);
            }
        }
        for (o, l) in out.iter_mut().zip(&lanes) {
            let mut sum = [0f32; LANES];
            for (i, s) in sum.iter_mut().enumerate() {
                *s = (l[0][i] + l[1][i]) + (l[2][i] + l[3][i]);
            }
            *o = tree(sum);
        }
    }
}

/// The loop that a format takes. No default arm: a format is never decoded by another one's kernel.
enum Kernel {
    Mq(Header, usize),
    T2,
    Dense,
}

fn kernel(format: Format) -> Kernel {
    match format {
        Format::Mq2V2 => Kernel::Mq(Header::V2, 2),
        Format::Mq3V2 => Kernel::Mq(Header::V2, 3),
        Format::Mq4V2 => Kernel::Mq(Header::V2, 4),
        Format::Mq5V2 => Kernel::Mq(Header::V2, 5),
        Format::Mq6V2 => Kernel::Mq(Header::V2, 6),
        Format::Mq4C => Kernel::Mq(Header::C, 4),
        Format::Mq2V1 => Kernel::Mq(Header::V1, 2),
        Format::Mq3V1 => Kernel::Mq(Header::V1, 3),
        Format::Mq4V1 => Kernel::Mq(Header::V1, 4),
        Format::Mq5V1 => Kernel::Mq(Header::V1, 5),
        Format::Mq6V1 => Kernel::Mq(Header::V1, 6),
        Format::T2 => Kernel::T2,
        Format::Q8_0 | Format::F16 | Format::BF16 | Format::F32 => Kernel::Dense,
    }
}

/// Y = X Wᵀ (`accumulate`: Y += X Wᵀ) in f32: W `[M][K]`, X `[N][K]`, `y` `[N][M]`. Runs on the current rayon pool; the
/// result does not depend on its size. Within the bound of [`oracle::gemv`].
///
/// # Errors
/// As [`oracle::gemv`]; `y` is untouched then.
pub fn gemv<B: BasisMarker>(w: &Weights<B>, x: &Activation<B>, y: &mut [f32], accumulate: bool) -> Result<()> {
    oracle::check("gemv", w, x, Some(y))?;
    let (m, n, k) = (w.m(), x.n(), w.stored_k());
    let format = w.format();
    let spec = format.spec();
    let strip = format.strip_len(k);
    // Whole strips per task: 32 rows, or one strip where a strip has that many.
    let strips = (ROWS / spec.block_rows).max(1);
    let mut by_row = vec![0f32; m * n];
    let tasks = w.bytes().par_chunks(strips * strip).zip(by_row.par_chunks_mut(strips * spec.block_rows * n));
    match kernel(format) {
        Kernel::Mq(header, bits) => {
            let p = Prepared::new(x.data(), k, bits);
            tasks.for_each(|(b, o)| match bits {
                2 => mq_rows::<2>(header, b, strip, &p, n, o),
                3 => mq_rows::<3>(header, b, strip, &p, n, o),
                4 => mq_rows::<4>(header, b, strip, &p, n, o),
                5 => mq_rows::<5>(header, b, strip, &p, n, o),
                _ => mq_rows::<6>(header, b, strip, &p, n, o),
            });
        }
        Kernel::T2 => {
            let p = Prepared::new(x.data(), k, 2);
            tasks.for_each(|(b, o)| t2_rows(b, &p, n, o));
        }
        Kernel::Dense => tasks.for_each(|(bytes, out)| {
            for (b, o) in bytes.chunks_exact(strip).zip(out.chunks_exact_mut(n)) {
                dense_row(spec, b, x.data(), x.width(), o);
            }
        }),
    }
    for (r, row) in by_row.chunks_exact(n).enumerate() {
        for (token, v) in row.iter().enumerate() {
            let y = &mut y[token * m + r];
            *y = if accumulate { *y + v } else { *v };
        }
    }
    Ok(())
}
