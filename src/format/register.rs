//! What a number in a file means: the .hfq register (`qt`) and ggml's type ids, each mapped to a
//! format or to a refusal that names what it is. A number never changes meaning, and nothing here falls
//! back: an unknown number is an error.

use super::Format;

/// Why a number is not a format that bitlane reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// A weight format of this name that bitlane does not implement.
    NotSupported(&'static str),
    /// An id that was withdrawn and is never to be used again.
    Retired,
    /// An id that was given up before it meant anything.
    Burned,
    /// Specified once and never shipped: no file can rightly hold it.
    NeverShipped,
    /// Two producers use the number for different things.
    Ambiguous,
    /// No weight at all (an index, a lookup table).
    NotAWeight(&'static str),
    /// In no register known to this version.
    Unknown,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::NotSupported(name) => write!(f, "{name}: not supported"),
            Refusal::Retired => f.write_str("retired id"),
            Refusal::Burned => f.write_str("burned id, never assigned"),
            Refusal::NeverShipped => f.write_str("specified but never shipped"),
            Refusal::Ambiguous => f.write_str("ambiguous: two producers use this number for different formats"),
            Refusal::NotAWeight(name) => write!(f, "{name}: not a weight"),
            Refusal::Unknown => f.write_str("unknown"),
        }
    }
}

/// The format of a .hfq `qt` number.
///
/// # Errors
/// The refusal; print it as `qt {qt} {refusal}`, see [`qt_refusal`].
pub fn from_qt(qt: u8) -> Result<Format, Refusal> {
    if let Some(f) = Format::ALL.iter().find(|f| f.spec().qt == Some(qt)) {
        return Ok(*f);
    }
    Err(REFUSED_QT.iter().find(|(n, _)| *n == qt).map_or(Refusal::Unknown, |(_, r)| *r))
}

use Refusal::{Ambiguous, Burned, NeverShipped, NotAWeight, NotSupported, Retired};

/// Register entries that are no format here. A number that becomes one moves out of this table.
static REFUSED_QT: &[(u8, Refusal)] = &[
    (0, NotSupported("Q4F16G64")),
    (4, NotSupported("Q4K")),
    (5, NotSupported("Q8HFQ")),
    (6, NotSupported("HFQ4G256")),
    (7, NotSupported("HFQ4G128")),
    (8, NotSupported("HFQ6G256")),
    (9, NotSupported("HFQ2G256")),
    (10, NotSupported("HFQ2G128")),
    (11, NotSupported("HFQ3G256")),
    (12, NotSupported("HFQ3G128")),
    (14, NotSupported("MQ8G256")),
    (19, NotSupported("MQ2G256Lloyd")),
    (20, NotSupported("MQ3G256Lloyd")),
    (21, NotSupported("HFP4G32")),
    (22, NotAWeight("index")),
    (23, Burned),
    (24, NotSupported("MFP4G32")),
    (25, Burned),
    (26, Burned),
    (27, Burned),
    (28, NotSupported("PARO4")),
    (29, NotSupported("PARO4")),
    (30, NotSupported("MQ4G256Lloyd")),
    (32, NotSupported("an MFP variant")),
    (33, NotSupported("an MFP variant")),
    (34, NotSupported("an MFP variant")),
    (35, NotSupported("an MFP variant")),
    (36, NotSupported("an MFP variant")),
    (37, NotSupported("an MFP variant")),
    (38, NotSupported("MQ2GL")),
    (39, NotSupported("MQ3GL")),
    (40, NotSupported("TQ2G128")),
    (41, NotSupported("BQ1G128")),
    (43, Retired),
    (46, NeverShipped),
    (51, NotSupported("MQ2LloydU")),
    (52, Ambiguous),
    (53, NotSupported("MQ4G128V2")),
];

/// "qt 20 MQ3G256Lloyd: not supported", "qt 43: retired id".
pub fn qt_refusal(qt: u8, refusal: Refusal) -> String {
    id_refusal("qt", u32::from(qt), refusal)
}

/// "ggml type 35 TQ2_0: not supported".
pub fn ggml_refusal(id: u32, refusal: Refusal) -> String {
    id_refusal("ggml type", id, refusal)
}

fn id_refusal(register: &str, id: u32, refusal: Refusal) -> String {
    match refusal {
        Refusal::NotSupported(_) | Refusal::NotAWeight(_) => format!("{register} {id} {refusal}"),
        _ => format!("{register} {id}: {refusal}"),
    }
}

/// A ggml block type that GGUF files use for their weights and that bitlane decodes, but does not write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are ggml's own
pub enum GgmlBlock {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

impl GgmlBlock {
    /// Weights and bytes of a block.
    pub const fn block(self) -> (usize, usize) {
        match self {
            GgmlBlock::Q4_0 => (32, 18),
            GgmlBlock::Q4_1 => (32, 20),
            GgmlBlock::Q5_0 => (32, 22),
            GgmlBlock::Q5_1 => (32, 24),
            GgmlBlock::Q2K => (256, 84),
            GgmlBlock::Q3K => (256, 110),
            GgmlBlock::Q4K => (256, 144),
            GgmlBlock::Q5K => (256, 176),
            GgmlBlock::Q6K => (256, 210),
        }
    }
}

/// What a ggml type id stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgmlKind {
    /// One of bitlane's own formats.
    Format(Format),
    /// Decoded to f32 on reading.
    Block(GgmlBlock),
    /// Named and refused.
    Refused(Refusal),
}

/// One row of ggml's type table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GgmlType {
    /// Type id in a GGUF file.
    pub id: u32,
    /// ggml's name.
    pub name: &'static str,
    /// Weights in a block.
    pub block: usize,
    /// Bytes of a block; 0 where a type has no fixed block.
    pub bytes: usize,
    /// What bitlane does with it.
    pub kind: GgmlKind,
}

const fn own(id: u32, name: &'static str, format: Format, block: usize, bytes: usize) -> GgmlType {
    GgmlType { id, name, block, bytes, kind: GgmlKind::Format(format) }
}

const fn read(id: u32, name: &'static str, kind: GgmlBlock) -> GgmlType {
    let (block, bytes) = kind.block();
    GgmlType { id, name, block, bytes, kind: GgmlKind::Block(kind) }
}

const fn no(id: u32, name: &'static str, block: usize, bytes: usize) -> GgmlType {
    GgmlType { id, name, block, bytes, kind: GgmlKind::Refused(Refusal::NotSupported(name)) }
}

const fn gone(id: u32, name: &'static str) -> GgmlType {
    GgmlType { id, name, block: 1, bytes: 0, kind: GgmlKind::Refused(Refusal::Retired) }
}

/// ggml's types up to 42, and the fork ids 142 and 143.
static GGML: &[GgmlType] = &[
    own(0, "F32", Format::F32, 1, 4),
    own(1, "F16", Format::F16, 1, 2),
    read(2, "Q4_0", GgmlBlock::Q4_0),
    read(3, "Q4_1", GgmlBlock::Q4_1),
    gone(4, "Q4_2"),
    gone(5, "Q4_3"),
    read(6, "Q5_0", GgmlBlock::Q5_0),
    read(7, "Q5_1", GgmlBlock::Q5_1),
    own(8, "Q8_0", Format::Q8_0, 32, 34),
    no(9, "Q8_1", 32, 36),
    read(10, "Q2_K", GgmlBlock::Q2K),
    read(11, "Q3_K", GgmlBlock::Q3K),
    read(12, "Q4_K", GgmlBlock::Q4K),
    read(13, "Q5_K", GgmlBlock::Q5K),
    read(14, "Q6_K", GgmlBlock::Q6K),
    no(15, "Q8_K", 256, 292),
    no(16, "IQ2_XXS", 256, 66),
    no(17, "IQ2_XS", 256, 74),
    no(18, "IQ3_XXS", 256, 98),
    no(19, "IQ1_S", 256, 50),
    no(20, "IQ4_NL", 32, 18),
    no(21, "IQ3_S", 256, 110),
    no(22, "IQ2_S", 256, 82),
    no(23, "IQ4_XS", 256, 136),
    no(24, "I8", 1, 1),
    no(25, "I16", 1, 2),
    no(26, "I32", 1, 4),
    no(27, "I64", 1, 8),
    no(28, "F64", 1, 8),
    no(29, "IQ1_M", 256, 56),
    own(30, "BF16", Format::BF16, 1, 2),
    gone(31, "Q4_0_4_4"),
    gone(32, "Q4_0_4_8"),
    gone(33, "Q4_0_8_8"),
    no(34, "TQ1_0", 256, 54),
    no(35, "TQ2_0", 256, 66),
    // Withdrawn upstream as IQ4_NL_4_4; a fork reuses the number for I2_S, whose size is per tensor.
    GgmlType { id: 36, name: "36", block: 1, bytes: 0, kind: GgmlKind::Refused(Refusal::Ambiguous) },
    gone(37, "IQ4_NL_4_8"),
    gone(38, "IQ4_NL_8_8"),
    no(39, "MXFP4", 32, 17),
    no(40, "NVFP4", 64, 36),
    no(41, "Q1_0", 128, 18),
    // Three incompatible layouts share this number in the wild, so its size is not known from the id.
    GgmlType { id: 42, name: "Q2_0", block: 64, bytes: 0, kind: GgmlKind::Refused(Refusal::Ambiguous) },
    no(142, "PQ2_0", 128, 34),
    no(143, "PTQ1_0", 128, 28),
];

/// The row of a ggml type id, if the id is known.
pub fn ggml_type(id: u32) -> Option<&'static GgmlType> {
    GGML.iter().find(|t| t.id == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_qt_is_a_format_or_a_named_refusal() {
        for (i, (qt, _)) in REFUSED_QT.iter().enumerate() {
            assert!(REFUSED_QT[..i].iter().all(|(other, _)| other < qt), "numbers ascend");
            assert!(Format::ALL.iter().all(|f| f.spec().qt != Some(*qt)), "qt {qt} is a format now");
        }
        for qt in 0..=255u8 {
            match from_qt(qt) {
                Ok(f) => assert_eq!(f.spec().qt, Some(qt)),
                Err(Refusal::Unknown) => assert!(qt == 42 || qt > 53, "qt {qt} is in the register"),
                Err(r) => assert!(qt_refusal(qt, r).starts_with(&format!("qt {qt}"))),
            }
        }
        let of = |qt| qt_refusal(qt, from_qt(qt).unwrap_err());
        assert_eq!(of(20), "qt 20 MQ3G256Lloyd: not supported");
        assert_eq!(of(43), "qt 43: retired id");
        assert_eq!(of(22), "qt 22 index: not a weight");
        assert_eq!(of(200), "qt 200: unknown");
        for (qt, f) in
            [(44, Format::Mq4V2), (45, Format::Mq4C), (13, Format::Mq4V1), (3, Format::Q8_0), (50, Format::Mq2V2)]
        {
            assert_eq!(from_qt(qt), Ok(f));
        }
    }

    #[test]
    fn ggml_table_is_consistent_with_the_formats() {
        for (i, t) in GGML.iter().enumerate() {
            assert!(GGML[..i].iter().all(|u| u.id < t.id), "ids ascend");
            if let GgmlKind::Format(f) = t.kind {
                let s = f.spec();
                assert_eq!((s.ggml, s.block_cols, s.block_bytes), (Some(t.id), t.block, t.bytes), "{}", t.name);
            }
        }
        for f in Format::ALL {
            if let Some(id) = f.spec().ggml {
                assert_eq!(ggml_type(id).unwrap().kind, GgmlKind::Format(*f));
            }
        }
        for id in 0..=42 {
            assert!(ggml_type(id).is_some(), "id {id}");
        }
        assert!(ggml_type(43).is_none());
        let t = ggml_type(35).unwrap();
        let GgmlKind::Refused(r) = t.kind else { panic!() };
        assert_eq!(ggml_refusal(35, r), "ggml type 35 TQ2_0: not supported");
    }
}
