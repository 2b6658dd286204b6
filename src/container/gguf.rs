//! GGUF, versions 2 and 3: header, metadata and tensor table.
//!
//! Our own reader rather than a crate: it must name the types it refuses, keep the offset of every
//! fault, and allocate no more than a small multiple of the file whatever the file says. Block types
//! are decoded by `container/ggml.rs`.

use std::collections::{BTreeMap, HashSet};

use super::bytes::{Bytes, Cursor, malformed};
use super::{Encoding, TensorInfo};
use crate::error::Result;
use crate::format::register::{self, GgmlKind};

const NAME: &str = "GGUF";
/// The file's first four bytes.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Longest key that ggml accepts.
const MAX_KEY: u64 = 65_535;
/// Most dimensions that ggml has.
const MAX_DIMS: u32 = 4;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the variants are GGUF's value types
pub enum Value {
    Uint(u64),
    Int(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    /// Numbers and booleans of one type, as they are in the file.
    Numbers(Numbers),
}

/// An array of fixed-size values, kept in the file's own bytes so that it costs no more than they do.
#[derive(Debug, Clone, PartialEq)]
pub struct Numbers {
    kind: u32,
    raw: Vec<u8>,
}

impl Numbers {
    /// The values, widened.
    pub fn iter(&self) -> impl Iterator<Item = Value> + '_ {
        self.raw.chunks_exact(width(self.kind).unwrap_or(1)).map(|b| scalar(self.kind, b))
    }
    /// How many values.
    pub fn len(&self) -> usize {
        self.raw.len() / width(self.kind).unwrap_or(1)
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.raw.is_empty()
    }
}

impl Value {
    /// An integer of any width that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Uint(v) => Some(v),
            Value::Int(v) => u64::try_from(v).ok(),
            _ => None,
        }
    }
    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(s) => Some(s),
            _ => None,
        }
    }
    /// The value as JSON. An f32 becomes the shortest decimal that reads back as the same f32.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::to_string(self).and_then(|text| serde_json::from_str(&text)).unwrap_or_default()
    }
}

impl serde::Serialize for Value {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self {
            Value::Uint(v) => s.serialize_u64(*v),
            Value::Int(v) => s.serialize_i64(*v),
            Value::F32(v) => s.serialize_f32(*v),
            Value::F64(v) => s.serialize_f64(*v),
            Value::Bool(v) => s.serialize_bool(*v),
            Value::String(v) => s.serialize_str(v),
            Value::Strings(v) => s.collect_seq(v),
            Value::Numbers(v) => s.collect_seq(v.iter()),
        }
    }
}

/// Bytes of a fixed-size value type.
fn width(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// Decodes a fixed-size value; `b` is exactly as long as its type.
fn scalar(kind: u32, b: &[u8]) -> Value {
    let mut wide = [0u8; 8];
    wide[..b.len()].copy_from_slice(b);
    let bits = u64::from_le_bytes(wide);
    let shift = 64 - 8 * b.len() as u32;
    match kind {
        1 | 3 | 5 | 11 => Value::Int((bits << shift) as i64 >> shift),
        6 => Value::F32(f32::from_bits(bits as u32)),
        7 => Value::Bool(bits != 0),
        12 => Value::F64(f64::from_bits(bits)),
        _ => Value::Uint(bits),
    }
}

/// The header of a GGUF file.
#[derive(Debug, Clone)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Key-value metadata.
    pub meta: BTreeMap<String, Value>,
    /// Where tensor data begins.
    pub data_offset: u64,
}

impl Header {
    /// `general.architecture`, or "" if the file does not say.
    pub fn architecture(&self) -> &str {
        self.meta.get("general.architecture").and_then(Value::as_str).unwrap_or("")
    }
    /// `{architecture}.{key}`.
    pub fn arch(&self, key: &str) -> Option<&Value> {
        self.meta.get(&format!("{}.{key}", self.architecture()))
    }
}

fn string(c: &mut Cursor, what: &str) -> Result<String> {
    let n = c.u64(what)?;
    c.string(n, what)
}

fn value(c: &mut Cursor, key: &str) -> Result<Value> {
    let at = c.pos();
    let kind = c.u32("value type")?;
    match kind {
        8 => Ok(Value::String(string(c, key)?)),
        9 => {
            let element = c.u32("array type")?;
            let count = c.u64("array length")?;
            match width(element) {
                Some(w) => {
                    c.plausible(at, count, w as u64, "array elements")?;
                    Ok(Value::Numbers(Numbers { kind: element, raw: c.take(count * w as u64, key)? }))
                }
                None if element == 8 => {
                    c.plausible(at, count, 8, "strings")?;
                    Ok(Value::Strings((0..count).map(|_| string(c, key)).collect::<Result<_>>()?))
                }
                None => Err(c.malformed(at, format!("key {key}: array of type {element}, which GGUF does not have"))),
            }
        }
        _ => match width(kind) {
            Some(w) => Ok(scalar(kind, &c.take(w as u64, key)?)),
            None => Err(c.malformed(at, format!("key {key}: value type {kind}, which GGUF does not have"))),
        },
    }
}

/// Reads and checks the header.
pub(super) fn read(bytes: &Bytes) -> Result<(Header, Vec<TensorInfo>)> {
    let mut c = Cursor::new(bytes, NAME, 0);
    if c.take(4, "magic")? != MAGIC {
        return Err(c.malformed(0, "wrong magic"));
    }
    let version = c.u32("version")?;
    if version & 0xffff == 0 {
        return Err(c.malformed(4, format!("version {version:#x}: the file is big-endian, which is not supported")));
    }
    if !(2..=3).contains(&version) {
        return Err(c.malformed(4, format!("version {version} is not supported (2 and 3 are)")));
    }
    let tensors = c.u64("tensor count")?;
    let keys = c.u64("key count")?;
    c.plausible(8, tensors, 8 + 4 + 4 + 8, "tensor infos")?;
    c.plausible(16, keys, 8 + 4 + 1, "key-value pairs")?;

    let mut meta = BTreeMap::new();
    let mut alignment_at = 0;
    for _ in 0..keys {
        let at = c.pos();
        let n = c.u64("key length")?;
        if n == 0 || n > MAX_KEY {
            return Err(c.malformed(at, format!("key of {n} bytes (1 to {MAX_KEY} are allowed)")));
        }
        let key = c.string(n, "key")?;
        let v = value(&mut c, &key)?;
        if key == "general.alignment" {
            alignment_at = at;
        }
        if meta.insert(key.clone(), v).is_some() {
            return Err(c.malformed(at, format!("key {key} appears twice")));
        }
    }
    let alignment = match meta.get("general.alignment") {
        None => 32,
        Some(v) => match v.as_u64() {
            Some(a) if a.is_power_of_two() && a <= 1 << 30 => a,
            _ => {
                return Err(
                    c.malformed(alignment_at, format!("general.alignment is {v:?}, not a power of two up to 2^30"))
                );
            }
        },
    };

    let mut raw = Vec::new();
    let mut names = HashSet::new();
    for _ in 0..tensors {
        let at = c.pos();
        let name = string(&mut c, "tensor name")?;
        let dims = c.u32("dimension count")?;
        if dims > MAX_DIMS {
            return Err(c.malformed(at, format!("tensor {name} has {dims} dimensions (at most {MAX_DIMS})")));
        }
        // ne[0] is the fastest dimension; ours are written slowest first, as Hugging Face does.
        let mut shape = (0..dims).map(|_| c.u64("dimension")).collect::<Result<Vec<_>>>()?;
        shape.reverse();
        let kind = c.u32("tensor type")?;
        let offset = c.u64("tensor offset")?;
        if !names.insert(name.clone()) {
            return Err(c.malformed(at, format!("tensor {name} appears twice")));
        }
        raw.push((at, name, shape, kind, offset));
    }
    let data_offset = c.pos().checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    if data_offset > bytes.len() && !raw.is_empty() {
        return Err(
            c.malformed(c.pos(), format!("tensor data would begin at {data_offset}, past the end at {}", bytes.len()))
        );
    }
    let infos = raw
        .into_iter()
        .map(|(at, name, shape, kind, offset)| tensor(bytes, at, name, shape, kind, offset, data_offset, alignment))
        .collect::<Result<Vec<_>>>()?;
    super::no_overlap(bytes, NAME, &infos)?;
    Ok((Header { version, meta, data_offset }, infos))
}

#[allow(clippy::too_many_arguments)] // one row of a file's table
fn tensor(
    bytes: &Bytes,
    at: u64,
    name: String,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
    data_offset: u64,
    alignment: u64,
) -> Result<TensorInfo> {
    let fault = |what: String| malformed(bytes, NAME, at, format!("tensor {name}: {what}"));
    let Some(elements) = shape.iter().try_fold(1u64, |a, d| a.checked_mul(*d)) else {
        return Err(fault(format!("shape {shape:?} overflows")));
    };
    if !offset.is_multiple_of(alignment) {
        return Err(fault(format!("offset {offset} is no multiple of the alignment {alignment}")));
    }
    let (encoding, type_name, len) = match register::ggml_type(kind) {
        None => {
            let r = register::Refusal::Unknown;
            (Encoding::Refused(register::ggml_refusal(kind, r)), format!("ggml type {kind}"), None)
        }
        Some(t) => {
            let encoding = match t.kind {
                GgmlKind::Format(f) => Encoding::Format(f),
                GgmlKind::Block(b) => Encoding::Ggml(b),
                GgmlKind::Refused(r) => Encoding::Refused(register::ggml_refusal(kind, r)),
            };
            let k = shape.last().copied().unwrap_or(1);
            if t.bytes > 0 && !k.is_multiple_of(t.block as u64) {
                return Err(fault(format!("K = {k} is no multiple of {}'s block of {}", t.name, t.block)));
            }
            // bytes = 0: the size does not follow from the type.
            let len = (t.bytes > 0).then(|| (elements / t.block as u64).checked_mul(t.bytes as u64));
            match len {
                Some(None) => return Err(fault("its size overflows".into())),
                Some(Some(len)) => (encoding, t.name.to_string(), Some(len)),
                None => (encoding, t.name.to_string(), None),
            }
        }
    };
    let start = data_offset.checked_add(offset);
    let end = start.and_then(|s| s.checked_add(len.unwrap_or(0)));
    match (start, end) {
        (Some(start), Some(end)) if end <= bytes.len() => Ok(TensorInfo {
            name,
            logical_shape: shape.clone(),
            stored_shape: shape,
            encoding,
            type_name,
            file: 0,
            offset: start,
            len,
        }),
        _ => Err(fault(format!(
            "{} bytes at data offset {offset} end past the end of the file at {}",
            len.unwrap_or(0),
            bytes.len()
        ))),
    }
}
