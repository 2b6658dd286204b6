//! Whole models: decide what becomes of every tensor, then read, encode and write in parallel.
//!
//! [`plan`] makes all decisions and finds all errors that can be found without reading weights. [`run`]
//! then streams: every worker reads a few rows, encodes them and writes them at their final place, so
//! that memory is a few megabytes per thread, whatever the size of the model.

mod metadata;

use std::path::Path;

use rayon::prelude::*;
use wildmatch::WildMatch;

use crate::container::arch::{self, Arch, Mapped, RowOrder};
use crate::container::{Container, Details, Encoding, OutputFile, RowReader, Scratch, TensorInfo, hfq};
use crate::error::{Error, Result};
use crate::format::{Format, ScaleRounding, Standing};
use crate::tensor::{EncodeOptions, StripEncoder, geometry};

/// What a tensor is for, told by its name and shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// A weight matrix that activations are multiplied with.
    Matrix,
    /// A table that rows are looked up in.
    Embedding,
    /// The vocabulary projection.
    Head,
    /// Norms, biases and everything else that is no matrix.
    Small,
}

impl Role {
    /// The role of a tensor with a Hugging Face name.
    pub fn of(name: &str, shape: &[u64]) -> Role {
        let matrix = shape.len() == 2 && shape.iter().all(|d| *d > 1) && name.ends_with("weight");
        let embedding = ["embed_tokens", "embeddings.", "wte.", "wpe.", "token_embd"].iter().any(|e| name.contains(e));
        match (matrix, embedding) {
            (false, _) => Role::Small,
            (true, true) => Role::Embedding,
            (true, false) if name.ends_with("lm_head.weight") => Role::Head,
            (true, false) => Role::Matrix,
        }
    }
}

/// Which format every tensor gets.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// Format of weight matrices and of the head.
    pub format: Format,
    /// Format of the token embedding (by convention Q8_0).
    pub embedding: Format,
    /// Format of the vocabulary projection; `None` is [`format`](Self::format).
    pub head: Option<Format>,
    /// Format of norms and biases (by convention F16).
    pub small: Format,
    /// Name patterns (`*` and `?`) with the format of what they match; the last match wins.
    pub overrides: Vec<(String, Format)>,
    /// Name patterns of tensors to leave out.
    pub skip: Vec<String>,
    /// How scales and zeros become halves.
    pub rounding: ScaleRounding,
}

impl Recipe {
    /// The documented defaults: matrices and head in `format`, embedding Q8_0, everything else F16.
    pub fn new(format: Format) -> Self {
        Recipe {
            format,
            embedding: Format::Q8_0,
            head: None,
            small: Format::F16,
            overrides: Vec::new(),
            skip: Vec::new(),
            rounding: ScaleRounding::default(),
        }
    }

    /// Every matrix in one format, embedding and head included.
    pub fn pure(format: Format) -> Self {
        Recipe { embedding: format, ..Recipe::new(format) }
    }

    /// What a tensor gets where no pattern says otherwise.
    fn by_role(&self, name: &str, shape: &[u64]) -> Format {
        match Role::of(name, shape) {
            Role::Matrix => self.format,
            Role::Embedding => self.embedding,
            Role::Head => self.head.unwrap_or(self.format),
            Role::Small => self.small,
        }
    }
}

/// What becomes of one tensor.
#[derive(Debug, Clone)]
pub struct Step {
    /// Index into [`Container::tensors`].
    pub source: usize,
    /// Name that is written.
    pub name: String,
    /// Format that is written.
    pub format: Format,
    /// Logical shape.
    pub shape: Vec<u64>,
    /// K as it is written: padded to whole blocks.
    pub stored_k: usize,
    /// Bytes of the blob.
    pub bytes: u64,
    rows: RowOrder,
    add: f32,
}

/// All decisions about one model.
#[derive(Debug)]
pub struct Plan<'a> {
    source: &'a Container,
    /// One step per tensor that is written, in the source's order.
    pub steps: Vec<Step>,
    /// What a person should know before trusting the result.
    pub warnings: Vec<String>,
    rounding: ScaleRounding,
    layout: hfq::Layout,
}

impl Plan<'_> {
    /// Weights that will be encoded, padding not counted.
    pub fn weights(&self) -> u64 {
        self.steps.iter().map(|s| s.shape.iter().product::<u64>()).sum()
    }
    /// Length of the file that will be written.
    pub fn file_len(&self) -> u64 {
        self.layout.len
    }
}

/// What a caller sees of a running [`run`]: called from several threads.
pub trait Progress: Sync {
    /// `weights` more weights are written.
    fn advance(&self, weights: u64);
    /// Whether to stop; asked before every chunk.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Reports nothing and never stops.
impl Progress for () {
    fn advance(&self, _weights: u64) {}
}

/// Decides what becomes of every tensor of `source`, for a .hfq file.
///
/// # Errors
/// [`Error::UnsupportedModel`] for models that cannot be converted, [`Error::UnsupportedTensor`] for types that
/// are not decoded, [`Error::Shape`] and [`Error::NotStorable`] for formats that do not fit, [`Error::Usage`] for a
/// pattern that matches nothing.
pub fn plan<'a>(source: &'a Container, recipe: &Recipe) -> Result<Plan<'a>> {
    let arch = match source.details() {
        Details::Gguf(header) => Some((Arch::of(source.name(), header)?, header)),
        _ => None,
    };
    let mut warnings = Vec::new();
    let mut unused: Vec<&str> =
        recipe.overrides.iter().map(|(p, _)| p.as_str()).chain(recipe.skip.iter().map(String::as_str)).collect();
    let mut steps = Vec::new();
    for (i, tensor) in source.tensors().iter().enumerate() {
        let mapped = arch.map_or_else(|| Some(Mapped::same(&tensor.name)), |(a, header)| a.map(header, &tensor.name));
        let name = mapped.as_ref().map_or(&tensor.name, |m| &m.name).clone();
        let matches = |p: &str| {
            let p = WildMatch::new(p);
            p.matches(&name) || p.matches(&tensor.name)
        };
        unused.retain(|p| !matches(p));
        if let Some(why) = left_out(source, tensor, recipe.skip.iter().any(|p| matches(p))) {
            warnings.push(format!("tensor {} is left out: {why}", tensor.name));
            continue;
        }
        let mapped = match mapped {
            Some(mapped) => mapped,
            None if arch::CONSTANTS.contains(&tensor.name.as_str()) => {
                warnings.push(format!(
                    "tensor {} has no Hugging Face name: it is carried along, config does not know it",
                    tensor.name
                ));
                Mapped::same(&tensor.name)
            }
            None => {
                let what = format!(
                    "tensor {}: architecture {} is not known to have it, so neither its row order nor its offset; skip it to convert the rest",
                    tensor.name,
                    arch.map_or("", |(a, _)| a.gguf)
                );
                return Err(Error::UnsupportedModel { file: source.name().into(), what });
            }
        };
        check(source, tensor, &mapped)?;
        let overridden = recipe.overrides.iter().rev().find(|(p, _)| matches(p)).map(|(_, f)| *f);
        let format = overridden.unwrap_or_else(|| recipe.by_role(&mapped.name, &tensor.logical_shape));
        hfq::qt(&mapped.name, format)?;
        let (m, k) = tensor.matrix();
        let (stored_k, bytes) = geometry(&mapped.name, format, m, k)?;
        steps.push(Step {
            source: i,
            name: mapped.name,
            format,
            shape: tensor.logical_shape.clone(),
            stored_k,
            bytes: bytes as u64,
            rows: mapped.rows,
            add: mapped.add,
        });
    }
    if let Some(p) = unused.first() {
        return Err(Error::Usage(format!("{}: pattern {p:?} matches no tensor", source.name())));
    }
    if steps.is_empty() {
        return Err(Error::UnsupportedModel { file: source.name().into(), what: "it has no tensors".into() });
    }
    warnings.extend(standing_warnings(&steps));
    let about = metadata::of(source, arch, recipe.rounding)?;
    let entries: Vec<hfq::Entry> =
        steps.iter().map(|s| hfq::Entry { name: s.name.clone(), format: s.format, shape: s.shape.clone() }).collect();
    let layout = hfq::layout(about.architecture, about.carried, about.ours, &entries)?;
    Ok(Plan { source, steps, warnings, rounding: recipe.rounding, layout })
}

/// Why a tensor is not converted, if it is not.
fn left_out(source: &Container, tensor: &TensorInfo, skipped: bool) -> Option<&'static str> {
    if skipped {
        return Some("as asked");
    }
    if source.is_awq_sidecar(tensor) {
        return Some("its scales are divided out of the weights again");
    }
    // An integer buffer that counts 0, 1, 2, …, which some encoders save with their weights.
    let counts = matches!(tensor.encoding, Encoding::Refused(_)) && tensor.name.ends_with("position_ids");
    counts.then_some("it is a buffer of integers, not a weight")
}

/// Refuses a tensor that cannot be read, or not in the model's row order.
fn check(source: &Container, tensor: &TensorInfo, mapped: &Mapped) -> Result<()> {
    let unsupported = |what: String| Err(Error::UnsupportedModel { file: source.name().into(), what });
    if mapped.name.contains(".experts.") || mapped.name.contains("_exps.") {
        return unsupported(format!("tensor {} belongs to a mixture of experts, which is not supported", tensor.name));
    }
    source.rows(tensor)?;
    if let RowOrder::Interleaved { head, rows } = mapped.rows {
        // A bias is a vector whose elements are the rows.
        let m = if tensor.logical_shape.len() == 1 { tensor.matrix().1 } else { tensor.matrix().0 };
        if m != rows {
            let heads = rows / head;
            return unsupported(format!("tensor {} has {m} rows, not those of {heads} heads of {head}", tensor.name));
        }
    }
    Ok(())
}

fn standing_warnings(steps: &[Step]) -> Vec<String> {
    let mut formats: Vec<Format> = steps.iter().map(|s| s.format).collect();
    formats.sort();
    formats.dedup();
    let notes = formats.iter().filter(|f| f.spec().standing != Standing::Product);
    notes.map(|f| format!("{f}: {}", f.spec().standing.note())).collect()
}

/// Weights that a worker encodes at a time: 1 MiB of f32, which stays in its cache.
const CHUNK: usize = 1 << 18;

/// Encodes every tensor of a plan into `out`, on the current rayon pool.
///
/// # Errors
/// [`Error::Cancelled`], [`Error::Io`], and what encoding finds ([`Error::NonFinite`], [`Error::OutOfRange`]). In
/// every case `out` is as it was before.
pub fn run(plan: &Plan, out: &Path, progress: &dyn Progress) -> Result<()> {
    if plan.source.reads_from(out) {
        return Err(Error::Usage(format!("{} is the model that is read: choose another output", out.display())));
    }
    let file = OutputFile::create(out, plan.layout.len)?;
    file.write_at(0, &plan.layout.header)?;
    let mut jobs = Vec::new();
    let mut workers = Vec::new();
    for (step, (offset, _)) in plan.steps.iter().zip(&plan.layout.blobs) {
        let worker = Worker::new(plan, step, *offset)?;
        let strips = worker.m / worker.unit;
        let per = (CHUNK / (worker.unit * worker.k).max(1)).max(1);
        jobs.extend((0..strips).step_by(per).map(|s| (workers.len(), s..(s + per).min(strips))));
        workers.push(worker);
    }
    jobs.par_iter().try_for_each_init(Buffers::default, |buffers, (w, strips)| {
        if progress.cancelled() {
            return Err(Error::Cancelled);
        }
        let worker = &workers[*w];
        worker.encode(strips.clone(), &file, buffers)?;
        progress.advance((strips.len() * worker.unit * worker.k) as u64);
        Ok(())
    })?;
    if progress.cancelled() {
        return Err(Error::Cancelled);
    }
    file.commit()
}

#[derive(Default)]
struct Buffers {
    scratch: Scratch,
    weights: Vec<f32>,
    gather: Vec<f32>,
    stored: Vec<f32>,
    bytes: Vec<u8>,
}

/// Encodes strips of one tensor.
struct Worker<'a> {
    reader: RowReader<'a>,
    encoder: StripEncoder<'a>,
    rows: RowOrder,
    add: f32,
    m: usize,
    k: usize,
    /// Rows in a strip of the written format.
    unit: usize,
    strip_len: usize,
    offset: u64,
}

impl<'a> Worker<'a> {
    fn new(plan: &'a Plan, step: &'a Step, offset: u64) -> Result<Self> {
        let reader = plan.source.rows(&plan.source.tensors()[step.source])?;
        let (m, k) = reader.shape();
        let options = EncodeOptions { rounding: plan.rounding, awq: None };
        let encoder = StripEncoder::new(&step.name, step.format, k, &options)?;
        let strip_len = step.format.strip_len(step.stored_k);
        Ok(Worker {
            reader,
            encoder,
            rows: step.rows,
            add: step.add,
            m,
            k,
            unit: step.format.spec().block_rows,
            strip_len,
            offset,
        })
    }

    fn encode(&self, strips: std::ops::Range<usize>, file: &OutputFile, b: &mut Buffers) -> Result<()> {
        let rows = strips.start * self.unit..strips.end * self.unit;
        b.weights.resize(rows.len() * self.k, 0.0);
        self.read(rows.clone(), b)?;
        if self.add != 0.0 {
            b.weights.iter_mut().for_each(|w| *w += self.add);
        }
        b.bytes.resize(strips.len() * self.strip_len, 0);
        let sources = b.weights.chunks_exact(self.unit * self.k);
        for (i, (w, out)) in sources.zip(b.bytes.chunks_exact_mut(self.strip_len)).enumerate() {
            let encoded = self.encoder.encode(rows.start + i * self.unit, w, &mut b.stored, out);
            encoded.map_err(|e| self.in_source(e))?;
        }
        file.write_at(self.offset + (strips.start * self.strip_len) as u64, &b.bytes)
    }

    /// Says where in the source a weight is, which is what its owner can look up.
    fn in_source(&self, error: Error) -> Error {
        let tensor = self.reader.name().to_string();
        match error {
            Error::NonFinite { row, col, value, .. } if self.m == 1 => {
                Error::NonFinite { tensor, row, col: self.rows.source(col), value }
            }
            Error::NonFinite { row, col, value, .. } => {
                Error::NonFinite { tensor, row: self.rows.source(row), col, value }
            }
            Error::OutOfRange { format, row, col, col_end, what, value, limit, .. } => {
                let row = if self.m == 1 { row } else { self.rows.source(row) };
                Error::OutOfRange { tensor, format, row, col, col_end, what, value, limit }
            }
            other => other,
        }
    }

    /// Reads rows in the model's order.
    fn read(&self, rows: std::ops::Range<usize>, b: &mut Buffers) -> Result<()> {
        let RowOrder::Interleaved { head, .. } = self.rows else {
            return self.reader.read(rows, &mut b.scratch, &mut b.weights);
        };
        if self.m == 1 {
            // A bias: its elements are the rows.
            b.gather.resize(self.k, 0.0);
            self.reader.read(0..1, &mut b.scratch, &mut b.gather)?;
            for (i, w) in b.weights.iter_mut().enumerate() {
                *w = b.gather[self.rows.source(i)];
            }
            return Ok(());
        }
        // Rows move within a head only: read whole heads at once.
        let heads = rows.start / head * head..(rows.end.div_ceil(head) * head).min(self.m);
        b.gather.resize(heads.len() * self.k, 0.0);
        self.reader.read(heads.clone(), &mut b.scratch, &mut b.gather)?;
        for (r, w) in rows.zip(b.weights.chunks_exact_mut(self.k)) {
            w.copy_from_slice(&b.gather[(self.rows.source(r) - heads.start) * self.k..][..self.k]);
        }
        Ok(())
    }
}
