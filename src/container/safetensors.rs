//! safetensors, single and sharded: the header through the `safetensors` crate, from positioned reads
//! instead of a memory map, plus what the crate leaves open: duplicate names and the file's own length.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::bytes::{Bytes, Cursor, malformed};
use super::{Encoding, TensorInfo};
use crate::error::{Error, Result};
use crate::format::Format;

const NAME: &str = "safetensors";
/// The crate's own limit.
const MAX_HEADER: u64 = 100_000_000;

/// Whether the bytes can be a safetensors file: a plausible header length, then a JSON object.
pub(super) fn sniff(head: &[u8]) -> bool {
    head.len() >= 9 && u64::from_le_bytes([head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7]]) <= MAX_HEADER && head[8] == b'{'
}

/// The object keys of a JSON object, duplicates refused.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = UniqueKeys;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueKeys, A::Error> {
                let mut seen = HashSet::new();
                while let Some((key, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                    if seen.contains(&key) {
                        return Err(serde::de::Error::custom(format!("tensor {key} appears twice")));
                    }
                    seen.insert(key);
                }
                Ok(UniqueKeys)
            }
        }
        d.deserialize_map(Keys)
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
    let json = |e: serde_json::Error| malformed(bytes, NAME, 8 + column(&header, &e), e.to_string());
    serde_json::from_str::<UniqueKeys>(&header).map_err(json)?;
    // The crate checks that tensors follow each other without a hole and are as long as their shapes say.
    let metadata: Metadata = serde_json::from_str(&header).map_err(json)?;
    let data = 8 + n;
    if data + metadata.data_len() as u64 != bytes.len() {
        return Err(malformed(
            bytes,
            NAME,
            data,
            format!("tensors take {} bytes, but {} follow the header", metadata.data_len(), bytes.len() - data),
        ));
    }
    let infos = metadata.offset_keys().into_iter().filter_map(|name| {
        let info = metadata.info(&name)?;
        let (begin, end) = info.data_offsets;
        let encoding = match info.dtype {
            Dtype::F32 => Encoding::Format(Format::F32),
            Dtype::F16 => Encoding::Format(Format::F16),
            Dtype::BF16 => Encoding::Format(Format::BF16),
            other => Encoding::Refused(format!("safetensors type {other:?}: not supported")),
        };
        let shape: Vec<u64> = info.shape.iter().map(|d| *d as u64).collect();
        Some(TensorInfo {
            name,
            logical_shape: shape.clone(),
            stored_shape: shape,
            encoding,
            type_name: format!("{:?}", info.dtype),
            file,
            offset: data + begin as u64,
            len: Some((end - begin) as u64),
        })
    });
    Ok(infos.collect())
}

/// Byte position of a JSON error in `text`.
fn column(text: &str, e: &serde_json::Error) -> u64 {
    let line_start: usize = text.split_inclusive('\n').take(e.line().saturating_sub(1)).map(str::len).sum();
    (line_start + e.column()).min(text.len()) as u64
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
        serde_json::from_str(&text).map_err(|e| malformed(&index, NAME, column(&text, &e), e.to_string()))?;
    let shards: Vec<&String> = parsed.weight_map.values().collect::<std::collections::BTreeSet<_>>().into_iter().collect();
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
            return Err(Error::NoSuchTensor { file: path.with_file_name(shard).display().to_string(), tensor: name.clone() });
        }
    }
    if let Some(extra) = infos.iter().find(|t| !parsed.weight_map.contains_key(&t.name)) {
        let what = format!("shard {} holds tensor {}, which the index does not list", shards[extra.file], extra.name);
        return Err(malformed(&index, NAME, 0, what));
    }
    Ok((files, infos))
}
