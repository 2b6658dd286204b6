//! t2: ternary weights in tiles of 32 rows x 256 columns, 2176 bytes each.
//!
//! | bytes of a tile | content |
//! |---|---|
//! | 0..2048 | codes: (r, c) is bits `2·(c mod 4)` and the next of byte `64·r + c/4` |
//! | 2048..2176 | fp16 scale of (r, c/128) at `2048 + 4·r + 2·(c/128)` |
//!
//! Pattern 0 is −1, 1 is 0, 2 is +1, 3 is reserved; w = (pattern − 1)·scale, and patterns 1 and 3 are
//! +0.0 whatever the scale's sign or value: mapping 3 like the others would give +2·scale. Tiles are
//! row-major over `[M/32][K/256]`. There is no padding rule: shapes that do not tile are refused.

use half::f16;
use multiversion::multiversion;

use super::mq::not_finite;
use super::plain::peak;
use super::{Codec, Fault, ScaleRounding, bitstream};

/// Rows of W in a tile.
pub const TILE_ROWS: usize = 32;
/// Columns of W in a tile.
pub const TILE_COLS: usize = 256;
/// Bytes of a tile.
pub const TILE_BYTES: usize = 2176;
/// Columns that share a scale.
pub const SCALE_COLS: usize = 128;
/// Where a tile's scales begin.
const SCALES: usize = 2048;
/// Bytes of one row's codes in a tile.
const ROW_CODES: usize = 64;
/// The pattern no encoder emits.
pub const RESERVED: u8 = 3;

/// The t2 codec.
pub struct T2;

/// One tile's 2176 bytes, with accessors by row `r` (0..32), column `c` (0..256) and scale group
/// `g` (0..2).
#[derive(Clone, Copy)]
pub struct Tile<'a>(&'a [u8; TILE_BYTES]);

impl<'a> Tile<'a> {
    /// Views a tile.
    pub fn new(bytes: &'a [u8; TILE_BYTES]) -> Self {
        Tile(bytes)
    }

    /// The two bits of (r, c), 0..=3.
    pub fn pattern(&self, r: usize, c: usize) -> u8 {
        (self.0[r * ROW_CODES + c / 4] >> (2 * (c % 4))) & 3
    }

    /// The ternary digit of (r, c): −1, 0 or +1, and nothing for the reserved pattern.
    pub fn trit(&self, r: usize, c: usize) -> Option<i8> {
        match self.pattern(r, c) {
            RESERVED => None,
            p => Some(p as i8 - 1),
        }
    }

    /// The scale of row `r`, columns `128·g..128·(g + 1)`.
    pub fn scale(&self, r: usize, g: usize) -> f16 {
        let at = SCALES + 4 * r + 2 * g;
        f16::from_le_bytes([self.0[at], self.0[at + 1]])
    }

    /// The weight at (r, c).
    pub fn weight(&self, r: usize, c: usize) -> f32 {
        value(self.pattern(r, c), self.scale(r, c / SCALE_COLS).to_f32())
    }

    /// How many codes hold the reserved pattern.
    pub fn reserved(&self) -> u64 {
        self.0[..SCALES].iter().map(|b| u64::from((b & (b >> 1) & 0x55).count_ones())).sum()
    }

    /// How many scales are NaN or infinite.
    pub fn non_finite_scales(&self) -> u64 {
        let halves = self.0[SCALES..].chunks_exact(2);
        halves.filter(|h| !f16::from_le_bytes([h[0], h[1]]).is_finite()).count() as u64
    }
}

/// Builds a tile from row-major `trits` (−1, 0, +1) and `scales[2·r + g]`.
///
/// # Errors
/// The index of the first value that is no trit.
pub fn pack(trits: &[i8; TILE_ROWS * TILE_COLS], scales: &[f16; 2 * TILE_ROWS]) -> Result<[u8; TILE_BYTES], usize> {
    let mut tile = [0u8; TILE_BYTES];
    for (i, &t) in trits.iter().enumerate() {
        if !(-1..=1).contains(&t) {
            return Err(i);
        }
        tile[i / 4] |= ((t + 1) as u8) << (2 * (i % 4));
    }
    for (i, s) in scales.iter().enumerate() {
        tile[SCALES + 2 * i..][..2].copy_from_slice(&s.to_le_bytes());
    }
    Ok(tile)
}

/// The tiles of a strip or a blob.
pub fn tiles(bytes: &[u8]) -> impl Iterator<Item = Tile<'_>> {
    bytes.as_chunks::<TILE_BYTES>().0.iter().map(Tile)
}

#[inline(always)]
fn value(pattern: u8, scale: f32) -> f32 {
    match pattern {
        0 => -scale,
        2 => scale,
        _ => 0.0,
    }
}

impl Codec for T2 {
    /// Scale = the largest magnitude of 128, code = the nearest of −1, 0, +1. Exact for weights that are
    /// ternary already (each 128-block has one magnitude and it is a half); lossy for anything else.
    fn encode(&self, w: &[f32], k: usize, rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
        encode(w, k, rounding, bytes)
    }

    fn decode(&self, bytes: &[u8], k: usize, out: &mut [f32]) {
        each(bytes, k, out, value);
    }

    fn magnitude(&self, bytes: &[u8], k: usize, out: &mut [f32]) {
        each(bytes, k, out, |pattern, scale| (f32::from(pattern) + 1.0) * scale.abs());
    }
}

#[multiversion(targets("x86_64+avx2+bmi2+f16c"))]
fn encode(w: &[f32], k: usize, rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault> {
    let limit = f16::MAX.to_f32();
    for (r, row) in w.chunks_exact(k).enumerate() {
        for (b, block) in row.as_chunks::<SCALE_COLS>().0.iter().enumerate() {
            let index = r * k + b * SCALE_COLS;
            let Some(max) = peak(block) else { return Err(not_finite(block, index)) };
            if max > limit {
                return Err(Fault::Range { index, len: SCALE_COLS, what: "scale", value: max, limit });
            }
            let mut patterns = [0u8; SCALE_COLS];
            for (v, p) in block.iter().zip(&mut patterns) {
                // ±max/2 rounds away from zero, as ggml's TQ2_0 encoder does. Doubling is exact, dividing by max
                // would not be; and in a block of zeros both comparisons hold, which is pattern 1 again.
                let v = v + v;
                *p = 1 + u8::from(v >= max) - u8::from(v <= -max);
            }
            let (tile, g) = (&mut bytes[b / 2 * TILE_BYTES..][..TILE_BYTES], b % 2);
            bitstream::pack::<2>(&patterns, &mut tile[r * ROW_CODES + 32 * g..][..32]);
            tile[SCALES + 4 * r + 2 * g..][..2].copy_from_slice(&rounding.to_half(max).to_le_bytes());
        }
    }
    Ok(())
}

/// Applies `f(pattern, scale)` to every weight of a strip of tiles.
#[inline(always)]
fn each(bytes: &[u8], k: usize, out: &mut [f32], f: impl Fn(u8, f32) -> f32) {
    for (t, tile) in bytes.as_chunks::<TILE_BYTES>().0.iter().enumerate() {
        for r in 0..TILE_ROWS {
            let row = &mut out[r * k + t * TILE_COLS..][..TILE_COLS];
            for (g, half) in row.chunks_exact_mut(SCALE_COLS).enumerate() {
                let scale = Tile(tile).scale(r, g).to_f32();
                let codes = &tile[r * ROW_CODES + 32 * g..][..32];
                let values = [f(0, scale), f(1, scale), f(2, scale), f(3, scale)];
                for (o, byte) in half.chunks_exact_mut(4).zip(codes) {
                    for (j, o) in o.iter_mut().enumerate() {
                        *o = values[usize::from((byte >> (2 * j)) & 3)];
                    }
                }
            }
        }
    }
}
