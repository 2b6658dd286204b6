//! `bitlane inspect FILE`: tensors, shapes, formats by name and number, bits per weight, problems.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use bitlane::container::{Container, Details, Encoding, Scratch, TensorInfo};
use bitlane::format::{Format, Standing, t2};
use bitlane::{Error, QuantTensor, Result};
use rayon::prelude::*;
use serde_json::json;

use crate::output;

#[derive(clap::Args)]
pub struct Args {
    /// GGUF, safetensors (file, folder or index) or .hfq; with --t2 a raw t2 stream
    pub file: PathBuf,
    /// Read the file as a raw stream of t2 tiles of this shape
    #[arg(long, value_name = "MxK", value_parser = dims)]
    t2: Option<(usize, usize)>,
    /// Decode every weight and count those that are not finite
    #[arg(long)]
    scan: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn dims(text: &str) -> std::result::Result<(usize, usize), String> {
    let (m, k) = text.split_once('x').ok_or("give the shape as MxK, for example 17408x5120")?;
    Ok((m.parse().map_err(|e| format!("M: {e}"))?, k.parse().map_err(|e| format!("K: {e}"))?))
}

pub fn run(args: &Args) -> Result<ExitCode> {
    match args.t2 {
        Some((m, k)) => raw_t2(args, m, k),
        None => container(args, &Container::open(&args.file)?),
    }
}

/// One line of the table.
struct Row {
    name: String,
    shape: String,
    stored: String,
    kind: String,
    bytes: u64,
    bits: f64,
    problem: Option<String>,
}

impl Row {
    fn json(&self) -> serde_json::Value {
        json!({ "name": self.name, "shape": self.shape, "stored": self.stored, "type": self.kind, "bytes": self.bytes,
                "bits_per_weight": self.bits, "problem": self.problem })
    }
}

fn row(file: &Container, t: &TensorInfo, scan: bool) -> Result<Row> {
    let problem = match &t.encoding {
        Encoding::Refused(why) => Some(why.clone()),
        _ if scan => scan_tensor(file, t)?,
        _ => None,
    };
    let kind = match &t.encoding {
        Encoding::Format(f) if f.spec().name.eq_ignore_ascii_case(&t.type_name) => t.type_name.clone(),
        Encoding::Format(f) => format!("{f} ({})", t.type_name),
        _ => t.type_name.clone(),
    };
    let bytes = t.len.unwrap_or(0);
    let stored = if t.stored_shape == t.logical_shape { String::new() } else { output::shape(&t.stored_shape) };
    let bits = bytes as f64 * 8.0 / t.weights().max(1) as f64;
    Ok(Row { name: t.name.clone(), shape: output::shape(&t.logical_shape), stored, kind, bytes, bits, problem })
}

/// Decodes a tensor and says how many of its weights are not finite.
fn scan_tensor(file: &Container, t: &TensorInfo) -> Result<Option<String>> {
    let reader = file.rows(t)?;
    let (m, k) = reader.shape();
    let per = ((1 << 18) / k.max(1)).next_multiple_of(reader.unit()).max(reader.unit());
    let starts: Vec<usize> = (0..m).step_by(per).collect();
    let counts = starts.par_iter().map_init(Default::default, |(scratch, out): &mut (Scratch, Vec<f32>), &start| {
        let rows = start..(start + per).min(m);
        out.resize(rows.len() * k, 0.0);
        reader.read(rows, scratch, out)?;
        Ok(out.iter().filter(|v| !v.is_finite()).count())
    });
    let bad = counts.try_reduce(|| 0, |a, b| Ok::<_, Error>(a + b))?;
    Ok((bad > 0).then(|| format!("{bad} weights are not finite")))
}

fn container(args: &Args, file: &Container) -> Result<ExitCode> {
    let rows = file.tensors().iter().map(|t| row(file, t, args.scan)).collect::<Result<Vec<_>>>()?;
    let mut problems: Vec<String> =
        rows.iter().filter_map(|r| Some(format!("{}: {}", r.name, r.problem.as_ref()?))).collect();
    let header = match file.details() {
        Details::Gguf(h) => {
            format!("GGUF version {}, architecture {}, {} keys", h.version, h.architecture(), h.meta.len())
        }
        Details::Safetensors(beside) => {
            let mut names: Vec<_> = beside.keys().copied().collect();
            names.sort_unstable();
            format!("safetensors, beside it: {}", if names.is_empty() { "nothing".into() } else { names.join(", ") })
        }
        Details::Hfq(h) => {
            if h.trailing > 0 {
                problems.push(format!("{} bytes after the last blob (legal, ignored)", h.trailing));
            }
            let keys: Vec<_> = h.metadata.keys().map(String::as_str).collect();
            format!("hfq version 1, architecture id {:#x}, metadata: {}", h.architecture, keys.join(", "))
        }
    };
    // Bytes and weights by type, in the order in which types first appear.
    let mut order = Vec::new();
    let mut by_type: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
    for (r, t) in rows.iter().zip(file.tensors()) {
        let sum = by_type.entry(&r.kind).or_insert_with(|| {
            order.push(r.kind.as_str());
            (0, 0, 0)
        });
        *sum = (sum.0 + 1, sum.1 + r.bytes, sum.2.saturating_add(t.weights()));
    }
    let weights: u64 = by_type.values().map(|s| s.2).fold(0, u64::saturating_add);
    let bytes: u64 = by_type.values().map(|s| s.1).sum();
    let notes: Vec<String> = Format::ALL
        .iter()
        .filter(|f| f.spec().standing == Standing::WireOnly)
        .filter(|f| file.tensors().iter().any(|t| t.encoding == Encoding::Format(**f)))
        .map(|f| format!("{f}: {}", f.spec().standing.note()))
        .collect();
    if args.json {
        output::print_json(&json!({
            "file": file.name(), "container": file.kind(), "header": header, "file_bytes": file.file_len(),
            "weights": weights, "tensor_bytes": bytes, "bits_per_weight": bytes as f64 * 8.0 / weights.max(1) as f64,
            "reserved_codes": 0, "tensors": rows.iter().map(Row::json).collect::<Vec<_>>(), "notes": notes, "problems": problems,
        }))?;
    } else {
        let mut text = format!("{}: {header}\n\n", file.name());
        text += &output::table(
            &["tensor", "shape", "stored as", "type", ">bytes", ">bits/weight", "problem"],
            rows.iter().map(|r| {
                let problem = r.problem.clone().unwrap_or_default();
                vec![
                    r.name.clone(),
                    r.shape.clone(),
                    r.stored.clone(),
                    r.kind.clone(),
                    r.bytes.to_string(),
                    format!("{:.3}", r.bits),
                    problem,
                ]
            }),
        );
        text.push('\n');
        text += &output::table(
            &["type", ">tensors", ">weights", ">bytes", ">bits/weight"],
            order.iter().map(|kind| {
                let (n, b, w) = by_type[kind];
                vec![
                    (*kind).into(),
                    n.to_string(),
                    w.to_string(),
                    b.to_string(),
                    format!("{:.3}", b as f64 * 8.0 / w.max(1) as f64),
                ]
            }),
        );
        text += &format!(
            "\n{} tensors, {weights} weights in {} ({:.3} bits per weight); file {}\n",
            rows.len(),
            output::bytes(bytes),
            bytes as f64 * 8.0 / weights.max(1) as f64,
            output::bytes(file.file_len())
        );
        for n in &notes {
            text += &format!("note: {n}\n");
        }
        text += &match problems.len() {
            0 => "no problems found\n".to_string(),
            n => format!("{n} problems:\n  {}\n", problems.join("\n  ")),
        };
        output::print(&text)?;
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(3) })
}

/// A headerless t2 stream: its shape comes from the command line, its length must agree.
fn raw_t2(args: &Args, m: usize, k: usize) -> Result<ExitCode> {
    let bytes =
        std::fs::read(&args.file).map_err(|source| Error::Io { action: "read", path: args.file.clone(), source })?;
    let tensor = QuantTensor::new(&args.file.display().to_string(), Format::T2, m, k, bytes, None)?;
    let reserved = tensor.reserved_codes();
    let bad_scales: u64 = t2::tiles(tensor.bytes()).map(|t| t.non_finite_scales()).sum();
    let mut problems = Vec::new();
    if reserved > 0 {
        problems.push(format!("{reserved} codes hold the reserved pattern (they decode to 0)"));
    }
    if bad_scales > 0 {
        problems.push(format!("{bad_scales} scales are not finite"));
    }
    if args.json {
        output::print_json(&json!({
            "file": tensor.name(), "container": "raw t2", "shape": [m, k], "bytes": tensor.bytes().len(),
            "bits_per_weight": Format::T2.bits_per_weight(), "reserved_codes": reserved,
            "non_finite_scales": bad_scales, "problems": problems,
        }))?;
    } else {
        let mut text = format!(
            "{}: t2 [{m}, {k}], {} tiles, {:.3} bits per weight, {reserved} reserved codes\n",
            tensor.name(),
            tensor.bytes().len() / t2::TILE_BYTES,
            Format::T2.bits_per_weight()
        );
        text += &match problems.len() {
            0 => "no problems found\n".to_string(),
            n => format!("{n} problems:\n  {}\n", problems.join("\n  ")),
        };
        output::print(&text)?;
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(3) })
}
