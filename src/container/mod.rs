//! Files in and out: GGUF, safetensors (single and sharded) and .hfq. Hostile bytes stop here: past
//! [`Container::open`] every tensor lies inside its file, is as long as its shape and type say, and
//! has a name of its own.

pub mod arch;
pub mod bytes;
mod ggml;
pub mod gguf;
pub mod hfq;
mod output;
pub mod safetensors;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub use bytes::Bytes;
pub use output::OutputFile;

use crate::error::{Error, Result};
use crate::format::register::GgmlBlock;
use crate::format::{Basis, Format, rotation};
use crate::tensor::{Awq, QuantTensor, StripDecoder};

/// How a tensor's bytes are to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Encoding {
    /// One of bitlane's formats.
    Format(Format),
    /// A ggml block type, decoded to f32 on reading.
    Ggml(GgmlBlock),
    /// A type that bitlane does not decode; says which and why.
    Refused(String),
}

/// One tensor of a file.
#[derive(Debug, Clone)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Shape as the model has it, slowest dimension first; the last is K.
    pub logical_shape: Vec<u64>,
    /// Shape as it is stored: K may be padded.
    pub stored_shape: Vec<u64>,
    /// How the bytes are to be read.
    pub encoding: Encoding,
    /// The file's own name for the type.
    pub type_name: String,
    /// Which file of a sharded model.
    pub file: usize,
    /// Byte offset in that file.
    pub offset: u64,
    /// Byte length, where the type gives one.
    pub len: Option<u64>,
}

impl TensorInfo {
    /// The tensor as a matrix: M (the product of all dimensions but the last) and logical K.
    pub fn matrix(&self) -> (usize, usize) {
        // Checked when the file was opened.
        matrix(&self.logical_shape).unwrap_or((0, 0))
    }
    /// Stored K.
    pub fn stored_k(&self) -> usize {
        self.stored_shape.last().map_or(1, |k| *k as usize)
    }
    /// Number of weights as the model has them.
    pub fn weights(&self) -> u64 {
        self.logical_shape.iter().product()
    }
}

/// M and K of a shape; a vector is one row, a scalar one weight. `None` on overflow.
pub(crate) fn matrix(shape: &[u64]) -> Option<(usize, usize)> {
    let (k, leading) = match shape.split_last() {
        None => return Some((1, 1)),
        Some((k, leading)) => (usize::try_from(*k).ok()?, leading),
    };
    let m = leading.iter().try_fold(1usize, |m, d| m.checked_mul(usize::try_from(*d).ok()?))?;
    m.checked_mul(k)?;
    Some((m, k))
}

/// What only one kind of container has.
#[derive(Debug, Clone)]
pub enum Details {
    /// GGUF's header.
    Gguf(gguf::Header),
    /// safetensors: JSON files found beside the weights, by name.
    Safetensors(HashMap<&'static str, String>),
    /// .hfq's header.
    Hfq(hfq::Header),
}

/// The files beside a safetensors model that travel with its weights.
pub const SIDECARS: [&str; 4] = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"];

/// An opened and checked model file.
#[derive(Debug)]
pub struct Container {
    files: Vec<Bytes>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    details: Details,
}

impl Container {
    /// Opens a GGUF, .hfq or .safetensors file, a `.safetensors.index.json`, or a folder with one of the
    /// last two. What it is is told by its bytes, not by its name.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::UnknownContainer`], [`Error::Malformed`].
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_dir() {
            let found = ["model.safetensors.index.json", "model.safetensors"].map(|name| path.join(name));
            return match found.iter().find(|f| f.exists()) {
                Some(file) => Self::open(file),
                None => Err(Error::Usage(format!(
                    "{}: a folder without model.safetensors or model.safetensors.index.json; name the file",
                    path.display()
                ))),
            };
        }
        if path.extension().is_some_and(|e| e == "json") {
            let (files, tensors) = safetensors::read_index(path)?;
            return Ok(Self::assemble(files, tensors, Details::Safetensors(sidecars(path)?)));
        }
        let mut this = Self::from_bytes(Bytes::open(path)?)?;
        if let Details::Safetensors(beside) = &mut this.details {
            *beside = sidecars(path)?;
        }
        Ok(this)
    }

    /// Opens bytes that hold a whole file.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn from_bytes(bytes: Bytes) -> Result<Self> {
        let mut head = vec![0u8; 9.min(bytes.len() as usize)];
        bytes.read_at(0, &mut head)?;
        let (tensors, details) = if head.starts_with(&gguf::MAGIC) {
            let (header, tensors) = gguf::read(&bytes)?;
            (tensors, Details::Gguf(header))
        } else if head.starts_with(&hfq::MAGIC) {
            let (header, tensors) = hfq::read(&bytes)?;
            (tensors, Details::Hfq(header))
        } else if safetensors::sniff(&head) {
            (safetensors::read(&bytes, 0)?, Details::Safetensors(HashMap::new()))
        } else {
            head.truncate(8);
            return Err(Error::UnknownContainer { file: bytes.name().into(), head });
        };
        Ok(Self::assemble(vec![bytes], tensors, details))
    }

    fn assemble(files: Vec<Bytes>, tensors: Vec<TensorInfo>, details: Details) -> Self {
        let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Container { files, tensors, by_name, details }
    }

    /// "GGUF", "safetensors" or "hfq".
    pub fn kind(&self) -> &'static str {
        match self.details {
            Details::Gguf(_) => "GGUF",
            Details::Safetensors(_) => "safetensors",
            Details::Hfq(_) => "hfq",
        }
    }
    /// Path of the first file.
    pub fn name(&self) -> &str {
        self.files.first().map_or("", Bytes::name)
    }
    /// Whether `path` is one of the files that this was opened from.
    pub fn reads_from(&self, path: &Path) -> bool {
        let real = |p: &Path| p.canonicalize().ok();
        real(path).is_some_and(|path| self.files.iter().any(|f| real(Path::new(f.name())).as_ref() == Some(&path)))
    }
    /// All tensors, in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }
    /// What only this kind of container has.
    pub fn details(&self) -> &Details {
        &self.details
    }
    /// Bytes of all files.
    pub fn file_len(&self) -> u64 {
        self.files.iter().map(Bytes::len).sum()
    }
    /// A tensor by name.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn find(&self, name: &str) -> Result<&TensorInfo> {
        let missing = || Error::NoSuchTensor { file: self.name().into(), tensor: name.into() };
        self.by_name.get(name).map(|i| &self.tensors[*i]).ok_or_else(missing)
    }

    /// A reader of a tensor's rows as f32.
    ///
    /// # Errors
    /// [`Error::UnsupportedTensor`] if bitlane does not decode its type.
    pub fn rows<'a>(&'a self, tensor: &'a TensorInfo) -> Result<RowReader<'a>> {
        let file = &self.files[tensor.file];
        // A tensor without weights has no rows, whatever its other dimension says (it may overflow a length).
        let (m, k) = Some(tensor.matrix()).filter(|(m, k)| m * k > 0).unwrap_or((0, 0));
        let source = match &tensor.encoding {
            Encoding::Refused(what) => {
                return Err(Error::UnsupportedTensor {
                    file: file.name().into(),
                    tensor: tensor.name.clone(),
                    what: what.clone(),
                });
            }
            Encoding::Ggml(kind) => {
                ggml::check(file, tensor)?;
                let (block, bytes) = kind.block();
                Source { rows: 1, bytes: (k / block * bytes) as u64, decode: Decode::Ggml(*kind) }
            }
            Encoding::Format(format) => {
                let stored_k = if k == 0 { 0 } else { tensor.stored_k() };
                let decoder = StripDecoder { format: *format, logical_k: k, stored_k, awq: self.awq(tensor)? };
                Source {
                    rows: format.spec().block_rows,
                    bytes: format.strip_len(stored_k) as u64,
                    decode: Decode::Format(decoder),
                }
            }
        };
        Ok(RowReader { file, tensor, m, k, source })
    }

    /// A tensor in one of bitlane's own formats, with its AWQ vector if the file has one.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`]; [`Error::UnsupportedTensor`] for types that are not formats.
    pub fn load(&self, name: &str) -> Result<QuantTensor> {
        let tensor = self.find(name)?;
        let file = &self.files[tensor.file];
        let (Encoding::Format(format), Some(len)) = (&tensor.encoding, tensor.len) else {
            let what = match &tensor.encoding {
                Encoding::Refused(what) => what.clone(),
                _ => format!("{} is no bitlane format: quantize it first", tensor.type_name),
            };
            return Err(Error::UnsupportedTensor { file: file.name().into(), tensor: name.into(), what });
        };
        let mut bytes = vec![0u8; len as usize];
        file.read_at(tensor.offset, &mut bytes)?;
        let (m, k) = tensor.matrix();
        QuantTensor::new(name, *format, m, k, bytes, self.awq(tensor)?)
    }

    /// Whether a tensor is the AWQ vector of another one in the file.
    pub fn is_awq_sidecar(&self, tensor: &TensorInfo) -> bool {
        let stem = tensor.name.strip_suffix(".awq_scale.weight").filter(|_| self.kind() == "hfq");
        stem.is_some_and(|stem| self.by_name.contains_key(&format!("{stem}.weight")))
    }

    /// The AWQ sidecar of a rotated tensor: `<stem>.awq_scale.weight`, fp16, length K.
    fn awq(&self, tensor: &TensorInfo) -> Result<Option<Arc<Awq>>> {
        let (Details::Hfq(_), Some(stem)) = (&self.details, tensor.name.strip_suffix(".weight")) else {
            return Ok(None);
        };
        let Some(i) = self.by_name.get(&format!("{stem}.awq_scale.weight")) else { return Ok(None) };
        let sidecar = &self.tensors[*i];
        if let Encoding::Format(f) = tensor.encoding
            && f.basis() != Basis::Rotated
        {
            let file = self.files[tensor.file].name().into();
            let what = format!("it is {f}, which is not rotated, but has the AWQ sidecar {}", sidecar.name);
            return Err(Error::UnsupportedTensor { file, tensor: tensor.name.clone(), what });
        }
        let k = tensor.matrix().1;
        if sidecar.encoding != Encoding::Format(Format::F16) || sidecar.weights() != k as u64 {
            let file = self.files[sidecar.file].name().into();
            let what = format!("AWQ sidecar is {} {:?}, not F16 [{k}]", sidecar.type_name, sidecar.logical_shape);
            return Err(Error::UnsupportedTensor { file, tensor: sidecar.name.clone(), what });
        }
        let mut raw = vec![0u8; 2 * k];
        self.files[sidecar.file].read_at(sidecar.offset, &mut raw)?;
        let scales = raw.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b)).collect();
        Ok(Some(Arc::new(Awq::new(&sidecar.name, scales)?)))
    }
}

fn sidecars(path: &Path) -> Result<HashMap<&'static str, String>> {
    let mut found = HashMap::new();
    for name in SIDECARS {
        let file = path.with_file_name(name);
        match std::fs::read_to_string(&file) {
            Ok(text) => drop(found.insert(name, text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(Error::Io { action: "read", path: file, source }),
        }
    }
    Ok(found)
}

/// Refuses tables whose tensors share bytes of the file.
fn no_overlap(bytes: &Bytes, container: &'static str, tensors: &[TensorInfo]) -> Result<()> {
    let mut order: Vec<&TensorInfo> = tensors.iter().filter(|t| t.len.is_some_and(|l| l > 0)).collect();
    order.sort_by_key(|t| t.offset);
    for pair in order.windows(2) {
        let end = pair[0].offset + pair[0].len.unwrap_or(0);
        if end > pair[1].offset {
            let what = format!("tensors {} and {} overlap: the first ends at {end}", pair[0].name, pair[1].name);
            return Err(bytes::malformed(bytes, container, pair[1].offset, what));
        }
    }
    Ok(())
}

enum Decode {
    Format(StripDecoder),
    Ggml(GgmlBlock),
}

/// A strip of the file: how many rows and bytes, and how to decode it.
struct Source {
    rows: usize,
    bytes: u64,
    decode: Decode,
}

/// Buffers that a [`RowReader`] reuses from call to call; one per thread.
#[derive(Debug, Default)]
pub struct Scratch {
    raw: Vec<u8>,
    stored: Vec<f32>,
}

/// Reads rows of one tensor as f32 in the model's own basis. Safe to share between threads.
pub struct RowReader<'a> {
    file: &'a Bytes,
    tensor: &'a TensorInfo,
    m: usize,
    k: usize,
    source: Source,
}

impl RowReader<'_> {
    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.tensor.name
    }

    /// M and logical K.
    pub fn shape(&self) -> (usize, usize) {
        (self.m, self.k)
    }

    /// How many rows are decoded together (t2: 32); ranges must start and end on multiples.
    pub fn unit(&self) -> usize {
        self.source.rows
    }

    /// Decodes `rows` into `out`, `[rows][K]`.
    ///
    /// # Errors
    /// [`Error::RowRange`] for a range outside the tensor, [`Error::Length`] for a wrong `out`, [`Error::Io`].
    pub fn read(&self, rows: Range<usize>, scratch: &mut Scratch, out: &mut [f32]) -> Result<()> {
        let unit = self.source.rows;
        if rows.start > rows.end
            || rows.end > self.m
            || !rows.start.is_multiple_of(unit)
            || !rows.end.is_multiple_of(unit)
        {
            let why = "the range must lie in the tensor and be of whole tiles";
            return Err(Error::RowRange {
                tensor: self.tensor.name.clone(),
                start: rows.start,
                end: rows.end,
                rows: self.m,
                why,
            });
        }
        if out.len() != rows.len() * self.k {
            return Err(Error::Mismatch {
                what: format!("rows of tensor {}", self.tensor.name),
                left_name: "values wanted",
                left: rows.len() * self.k,
                right_name: "room for",
                right: out.len(),
            });
        }
        let strips = rows.len() / unit;
        scratch.raw.resize(strips * self.source.bytes as usize, 0);
        self.file.read_at(self.tensor.offset + (rows.start / unit) as u64 * self.source.bytes, &mut scratch.raw)?;
        if self.k == 0 || scratch.raw.is_empty() {
            return Ok(());
        }
        match &self.source.decode {
            Decode::Ggml(kind) => ggml::decode(*kind, &scratch.raw, out),
            Decode::Format(decoder) => {
                let raw = scratch.raw.chunks_exact(self.source.bytes as usize);
                for (raw, out) in raw.zip(out.chunks_exact_mut(unit * self.k)) {
                    decoder.decode(raw, &mut scratch.stored, out);
                }
            }
        }
        Ok(())
    }

    /// All rows.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_all(&self) -> Result<Vec<f32>> {
        let mut out = vec![0f32; self.m * self.k];
        self.read(0..self.m, &mut Scratch::default(), &mut out)?;
        Ok(out)
    }
}

// A group of MQ is a rotation block: StripDecoder relies on it.
const _: () = assert!(rotation::BLOCK == 256);
