//! .hfq ("HFQM", version 1): read and written as the family's specification lays it out.
//!
//! | offset | field |
//! |---|---|
//! | 0 | magic `HFQM`, u32 version, u32 architecture id, u32 tensor count n, u64 metadata offset, u64 data offset |
//! | 32 | one JSON object with no length field: its end is found by matching braces |
//! | next byte | index: u32 n again, then per tensor u16 name length, name, u8 qt, u8 ndim, ndim × u32, u32 group size, u64 length |
//! | data offset | blobs in index order, no padding between them |
//!
//! The index holds *stored* shapes, so that strict readers' length check passes; where K was padded the
//! JSON has the logical one, under `bitlane.logical_k`.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::value::RawValue;

use super::bytes::{Bytes, Cursor, json_offset, malformed};
use super::{Encoding, TensorInfo};
use crate::error::{Error, Result};
use crate::format::{Basis, Format, register};

const NAME: &str = "hfq";
/// The file's first four bytes.
pub const MAGIC: [u8; 4] = *b"HFQM";
/// The version read and written.
pub const VERSION: u32 = 1;
/// Architecture id of a model that the register has no number for. Readers must refuse to guess.
pub const NO_ARCHITECTURE: u32 = 0xffff_ffff;
const HEADER: u64 = 32;
/// Writers align the data offset to this.
const ALIGN: u64 = 4096;
/// Bytes of an index entry beside its name and dimensions.
const ENTRY: u64 = 2 + 1 + 1 + 4 + 8;

/// The header of a .hfq file.
#[derive(Debug, Clone)]
pub struct Header {
    /// Architecture id: 0 llama, 1 qwen2/qwen3, … or [`NO_ARCHITECTURE`].
    pub architecture: u32,
    /// The JSON's top-level keys, each value as text.
    pub metadata: Metadata,
    /// Where blobs begin.
    pub data_offset: u64,
    /// Bytes after the last blob; legal, and ignored.
    pub trailing: u64,
}

/// bitlane's own part of the metadata.
#[derive(Debug, Default, serde::Deserialize)]
struct Ours {
    #[serde(default)]
    logical_k: HashMap<String, u64>,
}

/// Length of the JSON object that starts at `start`, strings and escapes respected.
fn json_len(bytes: &Bytes, start: u64, limit: u64) -> Result<u64> {
    let (mut depth, mut in_string, mut escaped) = (0u64, false, false);
    let mut window = vec![0u8; (1 << 16).min((limit - start) as usize)];
    let mut pos = start;
    while pos < limit {
        let n = window.len().min((limit - pos) as usize);
        bytes.read_at(pos, &mut window[..n])?;
        for (i, b) in window[..n].iter().enumerate() {
            match b {
                _ if escaped => escaped = false,
                b'\\' if in_string => escaped = true,
                b'"' => in_string = !in_string,
                _ if in_string => {}
                b'{' | b'[' => depth += 1,
                b'}' | b']' => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        return Ok(pos + i as u64 + 1 - start);
                    }
                }
                _ if depth == 0 => return Err(malformed(bytes, NAME, pos + i as u64, "metadata is no JSON object")),
                _ => {}
            }
        }
        pos += n as u64;
    }
    Err(malformed(bytes, NAME, start, format!("the JSON object that begins here does not end before byte {limit}")))
}

/// Reads and checks the header.
pub(super) fn read(bytes: &Bytes) -> Result<(Header, Vec<TensorInfo>)> {
    let mut c = Cursor::new(bytes, NAME, 0);
    if c.take(4, "magic")? != MAGIC {
        return Err(c.malformed(0, "wrong magic"));
    }
    let version = c.u32("version")?;
    if version != VERSION {
        return Err(c.malformed(4, format!("version {version} is not supported ({VERSION} is)")));
    }
    let architecture = c.u32("architecture id")?;
    let count = c.u32("tensor count")?;
    let metadata_offset = c.u64("metadata offset")?;
    let data_offset = c.u64("data offset")?;
    if metadata_offset < HEADER || metadata_offset > data_offset || data_offset > bytes.len() {
        return Err(c.malformed(
            16,
            format!(
                "metadata offset {metadata_offset} and data offset {data_offset} do not fit a file of {} bytes",
                bytes.len()
            ),
        ));
    }
    let json_len = json_len(bytes, metadata_offset, data_offset)?;
    let mut c = Cursor::new(bytes, NAME, metadata_offset);
    let text = c.string(json_len, "metadata")?;
    let metadata: Metadata = serde_json::from_str(&text)
        .map_err(|e| malformed(bytes, NAME, metadata_offset + json_offset(&text, &e), e.to_string()))?;
    drop(text);
    let ours: Ours = match metadata.get("bitlane") {
        Some(raw) => serde_json::from_str(raw.get())
            .map_err(|e| malformed(bytes, NAME, metadata_offset, format!("bitlane's own part of the JSON: {e}")))?,
        None => Ours::default(),
    };

    let at = c.pos();
    let again = c.u32("index count")?;
    if again != count {
        return Err(c.malformed(at, format!("the index counts {again} tensors, the header {count}")));
    }
    c.plausible(at, u64::from(count), ENTRY, "index entries")?;
    let mut names = HashSet::new();
    let mut infos = Vec::new();
    let mut offset = data_offset;
    for _ in 0..count {
        let at = c.pos();
        let n = c.u16("name length")?;
        let name = c.string(u64::from(n), "tensor name")?;
        let qt = c.u8("qt")?;
        let ndim = c.u8("dimension count")?;
        let shape = (0..ndim).map(|_| c.u32("dimension").map(u64::from)).collect::<Result<Vec<_>>>()?;
        let group_size = c.u32("group size")?;
        let len = c.u64("byte length")?;
        if !names.insert(name.clone()) {
            return Err(c.malformed(at, format!("tensor {name} appears twice")));
        }
        let Some(end) = offset.checked_add(len).filter(|end| *end <= bytes.len()) else {
            let what =
                format!("tensor {name}: {len} bytes at {offset} end past the end of the file at {}", bytes.len());
            return Err(c.malformed(at, what));
        };
        infos.push(tensor(bytes, at, name, qt, shape, group_size, offset, len, &ours)?);
        offset = end;
    }
    if c.pos() > data_offset {
        return Err(c.malformed(24, format!("the index ends at {}, after the data offset {data_offset}", c.pos())));
    }
    if let Some(name) = ours.logical_k.keys().find(|n| !names.contains(*n)) {
        return Err(
            c.malformed(metadata_offset, format!("logical_k names tensor {name}, which the index does not have"))
        );
    }
    Ok((Header { architecture, metadata, data_offset, trailing: bytes.len() - offset }, infos))
}

#[allow(clippy::too_many_arguments)] // one row of a file's table
fn tensor(
    bytes: &Bytes,
    at: u64,
    name: String,
    qt: u8,
    stored_shape: Vec<u64>,
    group_size: u32,
    offset: u64,
    len: u64,
    ours: &Ours,
) -> Result<TensorInfo> {
    let fault = |what: String| malformed(bytes, NAME, at, format!("tensor {name}: {what}"));
    let mut logical_shape = stored_shape.clone();
    if let Some(logical) = ours.logical_k.get(&name) {
        match logical_shape.last_mut() {
            Some(k) if (1..=*k).contains(logical) => *k = *logical,
            k => return Err(fault(format!("logical K {logical} beside a stored K of {k:?}"))),
        }
    }
    // Also for types that are refused: everybody who asks for the number of weights relies on it.
    let stored = super::matrix(&stored_shape).ok_or_else(|| fault(format!("shape {stored_shape:?} overflows")))?;
    let (encoding, type_name) = match register::from_qt(qt) {
        Err(refusal) => (Encoding::Refused(register::qt_refusal(qt, refusal)), format!("qt {qt}")),
        Ok(format) => {
            // Only G256 and G128 formats are known to have a fixed group size in every writer's files.
            if format.basis() == Basis::Rotated && group_size != format.spec().group_size {
                return Err(fault(format!(
                    "{format} with groups of {group_size} (it has {})",
                    format.spec().group_size
                )));
            }
            let expected = format
                .blob_len(stored.0, stored.1)
                .map_err(|why| fault(format!("{format} {stored_shape:?}: {why}")))?;
            if expected as u64 != len {
                return Err(fault(format!("{format} {stored_shape:?} takes {expected} bytes, the index says {len}")));
            }
            let k = logical_shape.last().map_or(1, |k| *k as usize);
            if format.stored_k(k) != Ok(stored.1) {
                return Err(fault(format!("logical K {k} is not stored as {} in {format}", stored.1)));
            }
            (Encoding::Format(format), format!("qt {qt} {}", format.spec().wire_name))
        }
    };
    Ok(TensorInfo { name, logical_shape, stored_shape, encoding, type_name, file: 0, offset, len: Some(len) })
}

/// A tensor to be written.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Name in the index.
    pub name: String,
    /// Format of the blob.
    pub format: Format,
    /// Shape, the last dimension being the logical K.
    pub shape: Vec<u64>,
}

/// Where everything goes: computed before any weight is touched, so that workers can write blobs at
/// their places in any order.
#[derive(Debug)]
pub struct Layout {
    /// Everything before the first blob.
    pub header: Vec<u8>,
    /// Offset and length of each entry's blob.
    pub blobs: Vec<(u64, u64)>,
    /// Length of the file.
    pub len: u64,
}

/// Metadata of a file: top-level keys, each value as JSON text, so that what is carried along stays as it was.
pub type Metadata = BTreeMap<String, Box<RawValue>>;

/// The register's number for a tensor's format.
///
/// # Errors
/// [`Error::NotStorable`] if it has none.
pub fn qt(tensor: &str, format: Format) -> Result<u8> {
    format.spec().qt.ok_or_else(|| Error::NotStorable {
        tensor: tensor.into(),
        container: "the .hfq register",
        format,
        why: "choose another format for it",
    })
}

/// Lays out a file. `ours` becomes the metadata's key `bitlane`, with `logical_k` added where K is padded.
///
/// # Errors
/// [`Error::NotStorable`] for a format without a qt number; [`Error::Shape`] for a shape that the format
/// or the index cannot hold; [`Error::DuplicateTensor`].
pub fn layout(
    architecture: u32,
    mut metadata: Metadata,
    mut ours: serde_json::Map<String, serde_json::Value>,
    entries: &[Entry],
) -> Result<Layout> {
    let mut logical_k = serde_json::Map::new();
    let mut index = Vec::new();
    let mut sizes = Vec::new();
    let mut names = HashSet::new();
    index.extend((entries.len() as u32).to_le_bytes());
    for e in entries {
        let s = e.format.spec();
        let qt = qt(&e.name, e.format)?;
        let shape_error = |why: String| Error::Shape {
            tensor: e.name.clone(),
            format: e.format,
            rows: super::matrix(&e.shape).map_or(0, |m| m.0),
            cols: e.shape.last().map_or(0, |k| *k as usize),
            why,
        };
        if !names.insert(e.name.as_str()) {
            return Err(Error::DuplicateTensor { tensor: e.name.clone() });
        }
        let (rows, k) = super::matrix(&e.shape).ok_or_else(|| shape_error("the shape overflows".into()))?;
        let stored = e.format.stored_k(k).map_err(shape_error)?;
        let len = e.format.blob_len(rows, stored).map_err(shape_error)?;
        if stored != k {
            logical_k.insert(e.name.clone(), k.into());
        }
        let name_len =
            u16::try_from(e.name.len()).map_err(|_| shape_error("the name is longer than 65535 bytes".into()))?;
        let ndim = u8::try_from(e.shape.len()).map_err(|_| shape_error("more than 255 dimensions".into()))?;
        index.extend(name_len.to_le_bytes());
        index.extend(e.name.as_bytes());
        index.extend([qt, ndim]);
        for (i, d) in e.shape.iter().enumerate() {
            let d = if i + 1 == e.shape.len() { stored as u64 } else { *d };
            let d = u32::try_from(d).map_err(|_| shape_error(format!("dimension {d} does not fit 32 bits")))?;
            index.extend(d.to_le_bytes());
        }
        index.extend(s.group_size.to_le_bytes());
        index.extend((len as u64).to_le_bytes());
        sizes.push(len as u64);
    }
    if !logical_k.is_empty() {
        ours.insert("logical_k".into(), logical_k.into());
    }
    metadata.insert("bitlane".into(), raw(&ours.into()));
    // A map of strings and JSON texts cannot fail to serialize.
    let json = serde_json::to_string(&metadata).unwrap_or_default();
    let data_offset = (HEADER + json.len() as u64 + index.len() as u64).next_multiple_of(ALIGN);
    let mut header = Vec::with_capacity(data_offset as usize);
    header.extend(MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend(architecture.to_le_bytes());
    header.extend((entries.len() as u32).to_le_bytes());
    header.extend(HEADER.to_le_bytes());
    header.extend(data_offset.to_le_bytes());
    header.extend(json.as_bytes());
    header.extend(&index);
    header.resize(data_offset as usize, 0);
    let mut len = data_offset;
    let blobs = sizes
        .into_iter()
        .map(|size| {
            let at = len;
            len += size;
            (at, size)
        })
        .collect();
    Ok(Layout { header, blobs, len })
}

/// A value as JSON text.
pub fn raw(value: &serde_json::Value) -> Box<RawValue> {
    RawValue::from_string(value.to_string()).unwrap_or_default()
}
