//! Builders of model files, byte by byte, and the generator behind every random number. The readers under test
//! must not be fed by the writers that belong to them, so nothing here calls the crate.

#![allow(dead_code)] // every test binary uses another part of it

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Knuth's 64-bit linear congruential generator; only its upper half is used.
#[derive(Clone)]
pub struct Lcg(u64);

impl Lcg {
    pub fn new(seed: u64) -> Self {
        let mut this = Lcg(seed);
        this.u32();
        this
    }

    pub fn u32(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    pub fn u64(&mut self) -> u64 {
        u64::from(self.u32()) << 32 | u64::from(self.u32())
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.u32() as usize % n.max(1)
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.u32() as u8).collect()
    }

    /// A multiple of 2^-10 in (-1, 1): exact as f32 and f16, and still exact after adding 1.
    pub fn weight(&mut self) -> f32 {
        (self.u32() % 2047) as f32 / 1024.0 - 1023.0 / 1024.0
    }

    pub fn weights(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.weight()).collect()
    }
}

pub fn f32_bytes(w: &[f32]) -> Vec<u8> {
    w.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn f16_bytes(w: &[f32]) -> Vec<u8> {
    w.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect()
}

pub fn bf16_bytes(w: &[f32]) -> Vec<u8> {
    w.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
}

/// A laid-out file whose fields have names, so that a test can damage exactly one of them and knows the offset
/// that the error has to give.
#[derive(Clone, Default)]
pub struct Laid {
    pub bytes: Vec<u8>,
    places: BTreeMap<String, usize>,
}

impl Laid {
    fn put(&mut self, place: impl Into<String>, bytes: &[u8]) {
        self.places.insert(place.into(), self.bytes.len());
        self.bytes.extend(bytes);
    }

    fn pad(&mut self, alignment: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(alignment), 0);
    }

    /// Offset of a field.
    pub fn at(&self, place: &str) -> usize {
        *self.places.get(place).unwrap_or_else(|| panic!("no field {place:?} in {:?}", self.places.keys()))
    }

    /// The file with other bytes in a field.
    pub fn with(&self, place: &str, bytes: &[u8]) -> Vec<u8> {
        let mut copy = self.bytes.clone();
        copy[self.at(place)..][..bytes.len()].copy_from_slice(bytes);
        copy
    }
}

/// A metadata value of a GGUF file.
#[derive(Clone)]
pub enum Kv {
    U32(u32),
    U64(u64),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Strs(Vec<String>),
    F32s(Vec<f32>),
    U8s(Vec<u8>),
    /// Type number and bytes.
    Raw(u32, Vec<u8>),
}

impl From<&str> for Kv {
    fn from(s: &str) -> Kv {
        Kv::Str(s.into())
    }
}

impl From<u32> for Kv {
    fn from(v: u32) -> Kv {
        Kv::U32(v)
    }
}

fn gguf_string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes(), s].concat()
}

impl Kv {
    fn array<T>(kind: u32, items: &[T], bytes: impl Fn(&T) -> Vec<u8>) -> Vec<u8> {
        let mut out = kind.to_le_bytes().to_vec();
        out.extend((items.len() as u64).to_le_bytes());
        out.extend(items.iter().flat_map(bytes));
        out
    }

    fn encode(&self) -> (u32, Vec<u8>) {
        match self {
            Kv::U32(v) => (4, v.to_le_bytes().into()),
            Kv::U64(v) => (10, v.to_le_bytes().into()),
            Kv::I32(v) => (5, v.to_le_bytes().into()),
            Kv::F32(v) => (6, v.to_le_bytes().into()),
            Kv::Bool(v) => (7, vec![u8::from(*v)]),
            Kv::Str(s) => (8, gguf_string(s.as_bytes())),
            Kv::Strs(s) => (9, Self::array(8, s, |s| gguf_string(s.as_bytes()))),
            Kv::F32s(v) => (9, Self::array(6, v, |v| v.to_le_bytes().into())),
            Kv::U8s(v) => (9, Self::array(0, v, |v| vec![*v])),
            Kv::Raw(kind, bytes) => (*kind, bytes.clone()),
        }
    }
}

#[derive(Clone)]
pub struct GgufTensor {
    pub name: Vec<u8>,
    /// Fastest dimension first, as in the file.
    pub ne: Vec<u64>,
    pub kind: u32,
    pub data: Vec<u8>,
    /// Another offset than the one where the data is.
    pub offset: Option<u64>,
}

#[derive(Clone)]
pub struct Gguf {
    pub version: u32,
    /// Where data is put; `general.alignment` is a key like any other.
    pub alignment: usize,
    pub keys: Vec<(Vec<u8>, Kv)>,
    pub tensors: Vec<GgufTensor>,
}

impl Gguf {
    pub fn new(architecture: &str) -> Gguf {
        let mut this = Gguf { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() };
        this.key("general.architecture", architecture);
        this
    }

    pub fn key(&mut self, name: &str, value: impl Into<Kv>) -> &mut Gguf {
        self.keys.push((name.into(), value.into()));
        self
    }

    /// `shape` slowest dimension first, as everywhere but in GGUF.
    pub fn tensor(&mut self, name: &str, shape: &[u64], kind: u32, data: Vec<u8>) -> &mut Gguf {
        let ne = shape.iter().rev().copied().collect();
        self.tensors.push(GgufTensor { name: name.into(), ne, kind, data, offset: None });
        self
    }

    pub fn f32(&mut self, name: &str, shape: &[u64], w: &[f32]) -> &mut Gguf {
        self.tensor(name, shape, 0, f32_bytes(w))
    }

    /// Fields: `version`, `tensor count`, `key count`; per key `KEY.len`, `KEY.type`, `KEY.value`; per tensor
    /// `NAME.len`, `NAME.name`, `NAME.dims`, `NAME.ne`, `NAME.type`, `NAME.offset`, `NAME.data`; `data`.
    pub fn lay(&self) -> Laid {
        let mut f = Laid::default();
        f.put("magic", b"GGUF");
        f.put("version", &self.version.to_le_bytes());
        f.put("tensor count", &(self.tensors.len() as u64).to_le_bytes());
        f.put("key count", &(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            let (kind, bytes) = value.encode();
            let name = String::from_utf8_lossy(key).to_string();
            f.put(format!("{name}.len"), &(key.len() as u64).to_le_bytes());
            f.put(format!("{name}.key"), key);
            f.put(format!("{name}.type"), &kind.to_le_bytes());
            f.put(format!("{name}.value"), &bytes);
        }
        let mut offset = 0;
        for t in &self.tensors {
            let name = String::from_utf8_lossy(&t.name).to_string();
            f.put(format!("{name}.len"), &(t.name.len() as u64).to_le_bytes());
            f.put(format!("{name}.name"), &t.name);
            f.put(format!("{name}.dims"), &(t.ne.len() as u32).to_le_bytes());
            f.put(format!("{name}.ne"), &t.ne.iter().flat_map(|d| d.to_le_bytes()).collect::<Vec<_>>());
            f.put(format!("{name}.type"), &t.kind.to_le_bytes());
            f.put(format!("{name}.offset"), &t.offset.unwrap_or(offset as u64).to_le_bytes());
            offset = (offset + t.data.len()).next_multiple_of(self.alignment);
        }
        if !self.tensors.is_empty() {
            f.pad(self.alignment);
        }
        f.put("data", &[]);
        for t in &self.tensors {
            let start = f.at("data");
            let to = (f.bytes.len() - start).next_multiple_of(self.alignment);
            f.bytes.resize(start + to, 0);
            f.put(format!("{}.data", String::from_utf8_lossy(&t.name)), &t.data);
        }
        f
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.lay().bytes
    }
}

/// A safetensors file with this header text.
pub fn safetensors_raw(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// A tensor of a safetensors file: name, dtype, shape, bytes.
pub type StTensor<'a> = (&'a str, &'a str, &'a [u64], Vec<u8>);

pub fn safetensors(tensors: &[StTensor]) -> Vec<u8> {
    let (mut header, mut data) = (Vec::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let end = data.len() + bytes.len();
        header
            .push(format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{},{end}]}}"#, data.len()));
        data.extend(bytes);
    }
    safetensors_raw(format!("{{{}}}", header.join(",")).as_bytes(), &data)
}

#[derive(Clone)]
pub struct HfqTensor {
    pub name: Vec<u8>,
    pub qt: u8,
    /// As stored.
    pub shape: Vec<u32>,
    pub group: u32,
    pub blob: Vec<u8>,
}

#[derive(Clone)]
pub struct Hfq {
    pub architecture: u32,
    pub json: Vec<u8>,
    /// Alignment of the data offset; writers use 4096, readers take any.
    pub alignment: usize,
    pub tensors: Vec<HfqTensor>,
}

impl Hfq {
    pub fn new(architecture: u32, json: &str) -> Hfq {
        Hfq { architecture, json: json.into(), alignment: 4096, tensors: Vec::new() }
    }

    pub fn tensor(&mut self, name: &str, qt: u8, shape: &[u32], group: u32, blob: Vec<u8>) -> &mut Hfq {
        self.tensors.push(HfqTensor { name: name.into(), qt, shape: shape.into(), group, blob });
        self
    }

    /// Fields: `version`, `architecture`, `count`, `metadata offset`, `data offset`, `json`, `index count`; per tensor
    /// `NAME.len`, `NAME.name`, `NAME.qt`, `NAME.ndim`, `NAME.dims`, `NAME.group`, `NAME.bytes`, `NAME.data`; `data`.
    pub fn lay(&self) -> Laid {
        let mut f = Laid::default();
        let count = self.tensors.len() as u32;
        f.put("magic", b"HFQM");
        f.put("version", &1u32.to_le_bytes());
        f.put("architecture", &self.architecture.to_le_bytes());
        f.put("count", &count.to_le_bytes());
        f.put("metadata offset", &32u64.to_le_bytes());
        f.put("data offset", &[0; 8]);
        f.put("json", &self.json);
        f.put("index count", &count.to_le_bytes());
        for t in &self.tensors {
            let name = String::from_utf8_lossy(&t.name).to_string();
            f.put(format!("{name}.len"), &(t.name.len() as u16).to_le_bytes());
            f.put(format!("{name}.name"), &t.name);
            f.put(format!("{name}.qt"), &[t.qt]);
            f.put(format!("{name}.ndim"), &[t.shape.len() as u8]);
            f.put(format!("{name}.dims"), &t.shape.iter().flat_map(|d| d.to_le_bytes()).collect::<Vec<_>>());
            f.put(format!("{name}.group"), &t.group.to_le_bytes());
            f.put(format!("{name}.bytes"), &(t.blob.len() as u64).to_le_bytes());
        }
        f.pad(self.alignment);
        f.put("data", &[]);
        let data = f.bytes.len() as u64;
        f.bytes[24..32].copy_from_slice(&data.to_le_bytes());
        for t in &self.tensors {
            f.put(format!("{}.data", String::from_utf8_lossy(&t.name)), &t.blob);
        }
        f
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.lay().bytes
    }
}

/// Q8_0 blocks with random codes, and the weights that they hold.
pub fn q8_0(rng: &mut Lcg, weights: usize) -> (Vec<u8>, Vec<f32>) {
    let (mut bytes, mut out) = (Vec::new(), Vec::new());
    for _ in 0..weights / 32 {
        let d = half::f16::from_f32((1 + rng.u32() % 100) as f32 / 4096.0);
        bytes.extend(d.to_le_bytes());
        for _ in 0..32 {
            let q = rng.u32() as i8;
            bytes.push(q as u8);
            out.push(f32::from(q) * d.to_f32());
        }
    }
    (bytes, out)
}

/// Writes a file into a folder and gives its path.
pub fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Names of the files in a folder, sorted.
pub fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().to_string()).collect();
    names.sort();
    names
}
