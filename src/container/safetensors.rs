//! safetensors, single and sharded: positioned reads instead of a memory map, every name once, and no more memory
//! than a small multiple of the header. Of the `safetensors` crate we take the types and their sizes: its own reader
//! buffers the whole JSON (a list of numbers takes 49 times its text) and does not name the tensor at fault.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;

use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, IntoDeserializer, MapAccess, Visitor};

use super::bytes::{Bytes, Cursor, json_offset, malformed};
use super::{Encoding, TensorInfo};
use crate::error::{Error, Result};
use crate::format::Format;

const NAME: &str = "safetensors";
/// The crate's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// Whether the bytes can be a safetensors file: a plausible header length, then a JSON object.
pub(super) fn sniff(head: &[u8]) -> bool {
    head.len() >= 9
        && u64::from_le_bytes([head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7]]) <= MAX_HEADER
        && head[8] == b'{'
}

/// One entry of the header.
#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's tensors, each name once.
struct Table(BTreeMap<String, Entry>);

impl<'de> Deserialize<'de> for Table {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Table;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Table, A::Error> {
                let (mut table, mut metadata) = (BTreeMap::new(), false);
                while let Some(name) = map.next_key::<String>()? {
                    let twice = if name == "__metadata__" {
                        map.next_value::<HashMap<String, String>>()?;
                        std::mem::replace(&mut metadata, true)
                    } else {
                        let entry =
                            map.next_value::<Entry>().map_err(|e| A::Error::custom(format!("tensor {name}: {e}")))?;
                        table.insert(name.clone(), entry).is_some()
                    };
                    if twice {
                        return Err(A::Error::custom(format!("tensor {name} appears twice")));
                    }
                }
                Ok(Table(table))
            }
        }
        d.deserialize_map(Entries)
    }
}

/// Reads and checks one file's header.
pub(super) fn read(bytes: &Bytes, file: usize) -> Result<Vec<TensorInfo>> {
    let mut c = Cursor::new(bytes, NAME, 0);
    let n = c.u64("header length")?;
    if n > MAX_HEADER {
        return Err(c.malformed(0, format!("header of {n} bytes (at most {MAX_HEADER} are allowed)")));
    }
    let header = c.string(n, "header")?;
    let Table(table) = serde_json::from_str(&header)
        .map_err(|e| malformed(bytes, NAME, 8 + json_offset(&header, &e), e.to_string()))?;
    drop(header);
    let mut table: Vec<(String, Entry)> = table.into_iter().collect();
    table.sort_by_key(|(_, entry)| entry.data_offsets);
    let data = 8 + n;
    let mut next = 0;
    let mut infos = Vec::with_capacity(table.len());
    for (name, Entry { dtype, shape, data_offsets: (begin, end) }) in table {
        let fault = |what: String| malformed(bytes, NAME, 8, format!("tensor {name}: {what}"));
        if begin != next || end < begin {
            return Err(fault(format!("data offsets {begin}..{end} do not follow the tensor that ends at {next}")));
        }
        next = end;
        let Some(weights) = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)) else {
            return Err(fault(format!("shape {shape:?} overflows")));
        };
        // The crate knows the types; one that it does not know is no reason to refuse the whole file.
        let known = Dtype::deserialize(IntoDeserializer::<serde::de::value::Error>::into_deserializer(dtype.as_str()));
        if let Ok(known) = known {
            let len = end - begin;
            if len.checked_mul(8).is_none_or(|bits| weights.checked_mul(known.bitsize() as u64) != Some(bits)) {
                return Err(fault(format!("{len} bytes are not {dtype} {shape:?}")));
            }
        }
        let encoding = match known {
            Ok(Dtype::F32) => Encoding::Format(Format::F32),
            Ok(Dtype::F16) => Encoding::Format(Format::F16),
            Ok(Dtype::BF16) => Encoding::Format(Format::BF16),
            Ok(_) => Encoding::Refused(format!("safetensors type {dtype}: not supported")),
            Err(_) => Encoding::Refused(format!("safetensors type {dtype}: unknown")),
        };
        infos.push(TensorInfo {
            name,
            logical_shape: shape.clone(),
            stored_shape: shape,
            encoding,
            type_name: dtype,
            file,
            offset: data + begin,
            len: Some(end - begin),
        });
    }
    if data.checked_add(next) != Some(bytes.len()) {
        let what = format!("tensors take {next} bytes, but {} follow the header", bytes.len() - data);
        return Err(malformed(bytes, NAME, data, what));
    }
    Ok(infos)
}

/// Reads the shards that `model.safetensors.index.json` names.
pub(super) fn read_index(path: &Path) -> Result<(Vec<Bytes>, Vec<TensorInfo>)> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index = Bytes::open(path)?;
    if index.len() > MAX_HEADER {
        return Err(malformed(&index, NAME, 0, format!("index of {} bytes (at most {MAX_HEADER})", index.len())));
    }
    let text = Cursor::new(&index, NAME, 0).string(index.len(), "index")?;
    let parsed: Index =
        serde_json::from_str(&text).map_err(|e| malformed(&index, NAME, json_offset(&text, &e), e.to_string()))?;
    let shards: Vec<&String> =
        parsed.weight_map.values().collect::<std::collections::BTreeSet<_>>().into_iter().collect();
    let (mut files, mut infos) = (Vec::new(), Vec::new());
    for (i, shard) in shards.iter().enumerate() {
        // A file name, not a path: an index must not reach outside its folder.
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(malformed(&index, NAME, 0, format!("shard {shard:?} is not a plain file name")));
        }
        let bytes = Bytes::open(&path.with_file_name(shard))?;
        infos.extend(read(&bytes, i)?);
        files.push(bytes);
    }
    let mut found: BTreeMap<&str, usize> = BTreeMap::new();
    for t in &infos {
        if let Some(other) = found.insert(&t.name, t.file) {
            let what = format!("tensor {} is in both {} and {}", t.name, shards[other], shards[t.file]);
            return Err(malformed(&index, NAME, 0, what));
        }
    }
    for (name, shard) in &parsed.weight_map {
        if found.get(name.as_str()).map(|f| shards[*f]) != Some(shard) {
            return Err(Error::NoSuchTensor {
                file: path.with_file_name(shard).display().to_string(),
                tensor: name.clone(),
            });
        }
    }
    if let Some(extra) = infos.iter().find(|t| !parsed.weight_map.contains_key(&t.name)) {
        let what = format!("shard {} holds tensor {}, which the index does not list", shards[extra.file], extra.name);
        return Err(malformed(&index, NAME, 0, what));
    }
    Ok((files, infos))
}
