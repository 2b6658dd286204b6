//! The formats once more, from their specifications and one weight at a time: what the crate's codecs are
//! compared with. Slow and separate on purpose; nothing here calls the crate's decoders.

use std::fmt;

use bitlane::Format;
use half::{bf16, f16};

/// The generator behind every random number in the tests and in the golden vectors.
pub struct Lcg(u32);

impl Lcg {
    pub fn new(seed: u32) -> Self {
        Lcg(seed)
    }

    /// Sixteen random bits.
    pub fn bits(&mut self) -> u16 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 16) as u16
    }

    /// A multiple of 2^-15 in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        f32::from(self.bits()) / 32768.0 - 1.0
    }

    pub fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// Columns of one row that share a scale and a zero: w = q·scale + zero.
#[derive(Clone)]
pub struct Segment {
    pub scale: f32,
    pub zero: f32,
    pub q: Vec<f32>,
}

impl Segment {
    /// Multiply, round, add, round.
    pub fn weights(&self) -> impl Iterator<Item = f32> {
        self.q.iter().map(|q| q * self.scale + self.zero)
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} weights, scale {:e}, zero {:e}", self.q.len(), self.scale, self.zero)
    }
}

/// Row `row` of a matrix with `k` stored columns, cut where the scale or the zero may change.
pub fn row(format: Format, bytes: &[u8], row: usize, k: usize) -> Vec<Segment> {
    match format {
        Format::Mq6V2 | Format::Mq5V2 | Format::Mq4V2 | Format::Mq3V2 | Format::Mq2V2 => {
            mq_row(format, bytes, row, k, |b| [(half(b, 0), half(b, 2)), (half(b, 4), half(b, 6))])
        }
        Format::Mq4C => mq_row(format, bytes, row, k, |b| [(half(b, 0), half(b, 2)); 2]),
        Format::Mq6V1 | Format::Mq5V1 | Format::Mq4V1 | Format::Mq3V1 | Format::Mq2V1 => {
            mq_row(format, bytes, row, k, |b| [(single(b, 0), single(b, 4)); 2])
        }
        Format::T2 => t2_row(bytes, row, k),
        Format::Q8_0 => {
            let blocks = bytes[row * k / 32 * 34..][..k / 32 * 34].chunks_exact(34);
            let q = |b: &[u8]| b[2..].iter().map(|q| f32::from(*q as i8)).collect();
            blocks.map(|b| Segment { scale: half(b, 0), zero: 0.0, q: q(b) }).collect()
        }
        Format::F16 => plain_row(bytes, row, k, 2, |b| half(b, 0)),
        Format::BF16 => plain_row(bytes, row, k, 2, |b| bf16::from_le_bytes([b[0], b[1]]).to_f32()),
        Format::F32 => plain_row(bytes, row, k, 4, |b| single(b, 0)),
    }
}

/// Bits per code of an MQ format.
pub fn bits(format: Format) -> usize {
    (format.spec().block_bytes - 8) / 32
}

fn mq_row(
    format: Format,
    bytes: &[u8],
    row: usize,
    k: usize,
    pairs: impl Fn(&[u8]) -> [(f32, f32); 2],
) -> Vec<Segment> {
    let bits = bits(format);
    let group = 8 + 32 * bits;
    bytes[row * (k / 256) * group..][..k / 256 * group]
        .chunks_exact(group)
        .flat_map(|b| {
            let segment = |h: usize| {
                let (scale, zero) = pairs(b)[h];
                let q = (128 * h..128 * (h + 1)).map(|i| code(&b[8..], bits, i)).collect();
                Segment { scale, zero, q }
            };
            [segment(0), segment(1)]
        })
        .collect()
}

/// Code `i` of an LSB-first stream, bit by bit.
fn code(payload: &[u8], bits: usize, i: usize) -> f32 {
    let bit = |at: usize| u8::from(payload[at / 8] >> (at % 8) & 1 == 1);
    f32::from((0..bits).fold(0u8, |code, b| code | bit(i * bits + b) << b))
}

/// Pattern p is (p − 1)·scale = p·scale − scale; the reserved pattern 3 is 0, as 1 is.
fn t2_row(bytes: &[u8], row: usize, k: usize) -> Vec<Segment> {
    let (m, r) = (row / 32, row % 32);
    (0..k / 128)
        .map(|block| {
            let (tile, g) = (block / 2, block % 2);
            let tile = &bytes[(m * (k / 256) + tile) * 2176..][..2176];
            let scale = half(tile, 2048 + 4 * r + 2 * g);
            let pattern = |c: usize| tile[64 * r + c / 4] >> (2 * (c % 4)) & 3;
            let q = (128 * g..128 * (g + 1)).map(|c| [0.0, 1.0, 2.0, 1.0][usize::from(pattern(c))]).collect();
            Segment { scale, zero: -scale, q }
        })
        .collect()
}

fn plain_row(bytes: &[u8], row: usize, k: usize, width: usize, value: impl Fn(&[u8]) -> f32) -> Vec<Segment> {
    let q = bytes[row * k * width..][..k * width].chunks_exact(width).map(value).collect();
    vec![Segment { scale: 1.0, zero: 0.0, q }]
}

fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

fn single(b: &[u8], at: usize) -> f32 {
    f32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}
