//! The byte contracts: what every format's bytes mean. Pure: no I/O, no threads, no GPU.
//!
//! Every format is a grid of blocks: a block holds `block_rows` x `block_cols` weights in
//! `block_bytes` bytes, and blocks are stored row-major over the grid. Blocks of one row of the grid
//! (a *strip*: `block_rows` rows of W, all of K) are therefore contiguous in every format, and a strip
//! is the unit that codecs, row slices and streaming work on.
//!
//! Adding a format: one file with its [`Codec`], one row in the table of this file. The compiler then points at the
//! kernels that must say what they do with it.

pub mod bitstream;
pub mod mq;
pub mod plain;
pub mod register;
pub mod rotation;
pub mod t2;

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The basis in which a format's weights live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Basis {
    /// As the model has them.
    Plain,
    /// Rotated by FWHT-256 per group ([`rotation`]); activations must be rotated too.
    Rotated,
}

impl Basis {
    /// "plain" or "FWHT-rotated".
    pub fn name(self) -> &'static str {
        match self {
            Basis::Plain => "plain",
            Basis::Rotated => "FWHT-rotated",
        }
    }
}

/// What a format is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// For use.
    Product,
    /// An older generation, kept readable and for comparison.
    Predecessor,
    /// Specified and byte-exact, but measured and rejected for product quality.
    WireOnly,
}

impl Standing {
    /// The words to show wherever formats are listed.
    pub fn note(self) -> &'static str {
        match self {
            Standing::Product => "supported",
            Standing::Predecessor => "previous generation, for reading and comparison",
            Standing::WireOnly => "wire format only: measured and rejected for product quality",
        }
    }
}

/// How an f32 becomes a stored fp16 scale or zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ScaleRounding {
    /// To the nearest half, ties to even.
    #[default]
    NearestEven,
    /// Truncated toward zero, as the family's production encoder does: reproduces its files byte for byte.
    TowardZero,
}

impl ScaleRounding {
    /// Name on command lines and in files.
    pub fn name(self) -> &'static str {
        match self {
            ScaleRounding::NearestEven => "nearest-even",
            ScaleRounding::TowardZero => "toward-zero",
        }
    }

    /// Rounds `x` to a half.
    #[inline(always)]
    pub fn to_half(self, x: f32) -> half::f16 {
        let nearest = half::f16::from_f32(x);
        match self {
            ScaleRounding::NearestEven => nearest,
            // Magnitudes of halves are ordered like their bits, so one bit down is one half toward zero.
            ScaleRounding::TowardZero if nearest.to_f32().abs() > x.abs() => {
                half::f16::from_bits(nearest.to_bits() - 1)
            }
            ScaleRounding::TowardZero => nearest,
        }
    }
}

/// Why a strip cannot be encoded. Positions are indices into the strip, row-major.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// A weight is NaN or infinite.
    NonFinite {
        /// Index of the weight.
        index: usize,
    },
    /// A group's parameter or a weight does not fit the format.
    Range {
        /// Index of the group's first weight.
        index: usize,
        /// Weights in the group.
        len: usize,
        /// "zero", "step", "scale" or "value".
        what: &'static str,
        /// The magnitude that does not fit.
        value: f32,
        /// The largest magnitude that does.
        limit: f32,
    },
}

/// Encoder and decoder of one format, working on strips (see the module's head) in the format's own
/// basis: rotation is the caller's business. Lengths are the caller's promise too: `w` and `out` hold
/// `block_rows * k` weights, `bytes` exactly that strip, and `k` is a multiple of `block_cols`.
pub trait Codec: Sync {
    /// Encodes a strip of weights.
    fn encode(&self, w: &[f32], k: usize, rounding: ScaleRounding, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Decodes a strip, exactly as the format says: the value every backend is held to.
    fn decode(&self, bytes: &[u8], k: usize, out: &mut [f32]);

    /// Per weight, the magnitude that error bounds are built from: |q·scale| + |zero| for affine
    /// formats, (pattern + 1)·|scale| for t2, |w| for the rest. It allows kernels that factor the
    /// affine form into scale Σqx + zero Σx.
    fn magnitude(&self, bytes: &[u8], k: usize, out: &mut [f32]);
}

/// One row of the format table.
pub struct Spec {
    /// The format itself.
    pub format: Format,
    /// Name on command lines and in reports.
    pub name: &'static str,
    /// Other accepted names.
    pub aliases: &'static [&'static str],
    /// Name in the family's specifications.
    pub wire_name: &'static str,
    /// Number in the .hfq register, if it has one.
    pub qt: Option<u8>,
    /// Type number in GGUF, if it has one.
    pub ggml: Option<u32>,
    /// Rows of W in a block.
    pub block_rows: usize,
    /// Columns of W in a block.
    pub block_cols: usize,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// The `group size` field of a .hfq index: 0 for formats without groups.
    pub group_size: u32,
    /// Basis of the stored weights.
    pub basis: Basis,
    /// Whether K is padded with zero columns to a multiple of `block_cols`, or refused.
    pub pads_k: bool,
    /// What the format is for.
    pub standing: Standing,
    /// Encoder and decoder.
    pub codec: &'static dyn Codec,
}

macro_rules! formats {
    ($($(#[$doc:meta])* $variant:ident { $($field:ident: $value:expr),+ $(,)? })+) => {
        /// The closed set of weight formats. Equal strides never make two formats interchangeable.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Format { $($(#[$doc])* $variant,)+ }

        static TABLE: &[Spec] = &[$(Spec { format: Format::$variant, $($field: $value),+ },)+];

        impl Format {
            /// Every format, in the table's order.
            pub const ALL: &'static [Format] = &[$(Format::$variant,)+];
        }
    };
}

const MQ: (usize, u32, Basis) = (256, 256, Basis::Rotated);

formats! {
    /// MQ6G256V2: 6-bit codes, one fp16 scale/zero pair per half of 128.
    Mq6V2 { name: "mq6v2", aliases: &["mq6"], wire_name: "MQ6G256V2", qt: Some(47), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 200, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Product, codec: &mq::V2::<6> }
    /// MQ5G256V2: 5-bit codes, one fp16 scale/zero pair per half of 128.
    Mq5V2 { name: "mq5v2", aliases: &["mq5"], wire_name: "MQ5G256V2", qt: Some(48), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 168, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Product, codec: &mq::V2::<5> }
    /// MQ4G256V2: 4-bit codes, one fp16 scale/zero pair per half of 128.
    Mq4V2 { name: "mq4v2", aliases: &["mq4"], wire_name: "MQ4G256V2", qt: Some(44), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 136, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Product, codec: &mq::V2::<4> }
    /// MQ3G256V2: 3-bit codes, one fp16 scale/zero pair per half of 128.
    Mq3V2 { name: "mq3v2", aliases: &["mq3"], wire_name: "MQ3G256V2", qt: Some(49), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 104, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Product, codec: &mq::V2::<3> }
    /// MQ2G256V2: 2-bit codes. A wire format only: measured and rejected for product quality.
    Mq2V2 { name: "mq2v2", aliases: &["mq2"], wire_name: "MQ2G256V2", qt: Some(50), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 72, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::WireOnly, codec: &mq::V2::<2> }
    /// MQ4CG256: 4-bit codes, one fp16 scale/zero pair for all 256 weights.
    Mq4C { name: "mq4c", aliases: &[], wire_name: "MQ4CG256", qt: Some(45), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 136, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Product, codec: &mq::Mq4C }
    /// MQ6G256, version 1: one f32 scale/minimum pair.
    Mq6V1 { name: "mq6v1", aliases: &[], wire_name: "MQ6G256", qt: Some(15), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 200, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Predecessor, codec: &mq::V1::<6> }
    /// MQ5G256, version 1: one f32 scale/minimum pair.
    Mq5V1 { name: "mq5v1", aliases: &[], wire_name: "MQ5G256", qt: Some(31), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 168, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Predecessor, codec: &mq::V1::<5> }
    /// MQ4G256, version 1: one f32 scale/minimum pair.
    Mq4V1 { name: "mq4v1", aliases: &[], wire_name: "MQ4G256", qt: Some(13), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 136, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Predecessor, codec: &mq::V1::<4> }
    /// MQ3G256, version 1: one f32 scale/minimum pair.
    Mq3V1 { name: "mq3v1", aliases: &[], wire_name: "MQ3G256", qt: Some(17), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 104, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Predecessor, codec: &mq::V1::<3> }
    /// MQ2G256, version 1: one f32 scale/minimum pair.
    Mq2V1 { name: "mq2v1", aliases: &[], wire_name: "MQ2G256", qt: Some(18), ggml: None, block_rows: 1, block_cols: MQ.0,
        block_bytes: 72, group_size: MQ.1, basis: MQ.2, pads_k: true, standing: Standing::Predecessor, codec: &mq::V1::<2> }
    /// t2: ternary tiles of 32 x 256, one fp16 scale per 128 columns of a row. Unrotated.
    T2 { name: "t2", aliases: &[], wire_name: "t2", qt: None, ggml: None, block_rows: t2::TILE_ROWS, block_cols: t2::TILE_COLS,
        block_bytes: t2::TILE_BYTES, group_size: 128, basis: Basis::Plain, pads_k: false, standing: Standing::Product, codec: &t2::T2 }
    /// 32 weights as int8 with one fp16 scale: ggml's Q8_0, the register's Q8F16.
    Q8_0 { name: "q8_0", aliases: &["q8f16"], wire_name: "Q8F16", qt: Some(3), ggml: Some(8), block_rows: 1, block_cols: 32,
        block_bytes: 34, group_size: 32, basis: Basis::Plain, pads_k: true, standing: Standing::Product, codec: &plain::Q8_0 }
    /// IEEE binary16.
    F16 { name: "f16", aliases: &["fp16"], wire_name: "F16", qt: Some(1), ggml: Some(1), block_rows: 1, block_cols: 1,
        block_bytes: 2, group_size: 0, basis: Basis::Plain, pads_k: true, standing: Standing::Product, codec: &plain::F16 }
    /// The upper half of an f32.
    BF16 { name: "bf16", aliases: &[], wire_name: "BF16", qt: Some(16), ggml: Some(30), block_rows: 1, block_cols: 1,
        block_bytes: 2, group_size: 0, basis: Basis::Plain, pads_k: true, standing: Standing::Product, codec: &plain::BF16 }
    /// IEEE binary32.
    F32 { name: "f32", aliases: &["fp32"], wire_name: "F32", qt: Some(2), ggml: Some(0), block_rows: 1, block_cols: 1,
        block_bytes: 4, group_size: 0, basis: Basis::Plain, pads_k: true, standing: Standing::Product, codec: &plain::F32 }
}

impl Format {
    /// The format's row of the table.
    #[inline]
    pub fn spec(self) -> &'static Spec {
        &TABLE[self as usize]
    }

    /// Name on command lines and in reports, e.g. `mq4v2`.
    pub fn name(self) -> &'static str {
        self.spec().name
    }

    /// Basis of the stored weights.
    pub fn basis(self) -> Basis {
        self.spec().basis
    }

    /// Nominal bits per stored weight, headers included.
    pub fn bits_per_weight(self) -> f64 {
        let s = self.spec();
        (s.block_bytes * 8) as f64 / (s.block_rows * s.block_cols) as f64
    }

    /// K as it is stored: `k` rounded up to whole blocks where the format pads.
    ///
    /// # Errors
    /// The reason, where the format refuses shapes that do not tile, or on overflow.
    pub fn stored_k(self, k: usize) -> Result<usize, String> {
        let s = self.spec();
        if k == 0 {
            return Err("K is 0".into());
        }
        if k.is_multiple_of(s.block_cols) {
            return Ok(k);
        }
        if !s.pads_k {
            return Err(format!("K is no multiple of {}, and {} has no padding rule", s.block_cols, s.name));
        }
        k.checked_next_multiple_of(s.block_cols).ok_or_else(|| "K overflows when padded".into())
    }

    /// Bytes of a `rows` x `stored_k` tensor.
    ///
    /// # Errors
    /// The reason, where the shape does not tile or the length overflows.
    pub fn blob_len(self, rows: usize, stored_k: usize) -> Result<usize, String> {
        let s = self.spec();
        if rows == 0 || stored_k == 0 {
            return Err("a dimension is 0".into());
        }
        if !rows.is_multiple_of(s.block_rows) {
            return Err(format!("M is no multiple of {}", s.block_rows));
        }
        if !stored_k.is_multiple_of(s.block_cols) {
            return Err(format!("stored K is no multiple of {}", s.block_cols));
        }
        (rows / s.block_rows)
            .checked_mul(stored_k / s.block_cols)
            .and_then(|blocks| blocks.checked_mul(s.block_bytes))
            .ok_or_else(|| "length overflows".into())
    }

    /// Bytes of one strip of `block_rows` rows.
    pub(crate) fn strip_len(self, stored_k: usize) -> usize {
        let s = self.spec();
        stored_k / s.block_cols * s.block_bytes
    }

    /// All names, comma separated, for messages.
    pub fn known_names() -> String {
        let name = |f: &Format| match f.spec().standing {
            Standing::WireOnly => format!("{f} ({})", Standing::WireOnly.note()),
            _ => f.to_string(),
        };
        Self::ALL.iter().map(name).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let wanted = name.to_ascii_lowercase();
        TABLE
            .iter()
            .find(|s| s.name == wanted || s.aliases.contains(&&*wanted) || s.wire_name.eq_ignore_ascii_case(&wanted))
            .map(|s| s.format)
            .ok_or_else(|| Error::UnknownFormat { name: name.into(), known: Self::known_names() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn table_is_consistent() {
        for (i, s) in TABLE.iter().enumerate() {
            assert_eq!(s.format as usize, i);
            assert_eq!(Format::ALL[i], s.format);
            assert_eq!(s.name.parse::<Format>().unwrap(), s.format);
            assert_eq!(s.wire_name.parse::<Format>().unwrap(), s.format);
            for a in s.aliases {
                assert_eq!(a.parse::<Format>().unwrap(), s.format);
            }
            for t in &TABLE[..i] {
                assert!(t.name != s.name && t.wire_name != s.wire_name);
                assert!(s.qt.is_none() || t.qt != s.qt, "qt {:?} twice", s.qt);
                assert!(s.ggml.is_none() || t.ggml != s.ggml);
            }
        }
        assert_eq!(TABLE.len(), Format::ALL.len());
        assert!("mq7".parse::<Format>().unwrap_err().to_string().contains("mq4v2"));
    }

    #[test]
    fn published_sizes() {
        for (f, bytes, bits) in [
            (Format::Mq2V2, 72, 2.25),
            (Format::Mq3V2, 104, 3.25),
            (Format::Mq4V2, 136, 4.25),
            (Format::Mq5V2, 168, 5.25),
            (Format::Mq6V2, 200, 6.25),
            (Format::Mq4C, 136, 4.25),
        ] {
            assert_eq!(f.spec().block_bytes, bytes);
            assert_eq!(f.bits_per_weight(), bits);
            assert_eq!(f.blob_len(3, 512).unwrap(), 3 * 2 * bytes);
        }
        assert_eq!(Format::T2.bits_per_weight(), 2.125);
        for (k, n, bytes) in [
            (5120, 17408, 23_674_880),
            (10240, 5120, 13_926_400),
            (248_320, 5120, 337_715_200),
            (6912, 2560, 4_700_160),
        ] {
            assert_eq!(Format::T2.blob_len(n, k).unwrap_or(0), bytes);
        }
        assert_eq!(Format::Mq4V2.stored_k(576).unwrap(), 768);
        assert!(Format::T2.stored_k(576).is_err());
        assert!(Format::T2.blob_len(33, 256).is_err());
        assert!(Format::Mq4V2.blob_len(usize::MAX, 1 << 20).is_err());
        assert!(Format::Mq4V2.stored_k(usize::MAX).is_err());
    }

    #[test]
    fn toward_zero_never_grows_and_is_within_one_half() {
        let r = ScaleRounding::TowardZero;
        let mut state = 1u32;
        for _ in 0..20_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(0x3000_0000 + (state >> 4)) * if state & 1 == 0 { 1.0 } else { -1.0 };
            if x.abs() > 65504.0 {
                continue;
            }
            let h = r.to_half(x);
            assert!(h.to_f32().abs() <= x.abs());
            let up = f16::from_bits(h.to_bits() + 1);
            assert!(up.is_infinite() || up.to_f32().abs() > x.abs(), "{x} -> {h}");
        }
        assert_eq!(r.to_half(f32::from_bits(1)).to_bits(), 0);
        assert_eq!(r.to_half(65519.0).to_f32(), 65504.0);
        assert_eq!(r.to_half(65504.0).to_f32(), 65504.0);
    }
}
