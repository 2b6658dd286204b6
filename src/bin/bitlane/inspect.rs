//! `bitlane inspect FILE`: tensors, shapes, formats by name and number, bits per weight, problems.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;

use bitlane::container::{Container, Details, Encoding, Scratch, TensorInfo, hfq};
use bitlane::format::{Format, Spec, Standing, t2};
use bitlane::quantize::{self, Recipe};
use bitlane::{Error, QuantTensor, Result};
use rayon::prelude::*;
use serde_json::{Value as Json, json};

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

/// One tensor, and what is wrong with it.
struct Row<'a> {
    tensor: &'a TensorInfo,
    problem: Option<String>,
}

impl Row<'_> {
    fn new<'a>(file: &Container, tensor: &'a TensorInfo, scan: bool) -> Result<Row<'a>> {
        let problem = match &tensor.encoding {
            Encoding::Refused(why) => Some(why.clone()),
            _ if scan => scan_tensor(file, tensor)?,
            _ => None,
        };
        Ok(Row { tensor, problem })
    }

    fn format(&self) -> Option<&'static Spec> {
        match &self.tensor.encoding {
            Encoding::Format(f) => Some(f.spec()),
            _ => None,
        }
    }

    /// The type for people: bitlane's name beside the file's, where they differ.
    fn kind(&self) -> String {
        let own = &self.tensor.type_name;
        match self.format() {
            Some(f) if !f.name.eq_ignore_ascii_case(own) => format!("{} ({own})", f.name),
            _ => own.clone(),
        }
    }

    fn bits_per_weight(&self) -> Option<f64> {
        self.tensor.len.map(|bytes| bits_per_weight(bytes, self.tensor.weights()))
    }

    fn cells(&self) -> Vec<String> {
        let t = self.tensor;
        vec![
            t.name.clone(),
            output::shape(&t.logical_shape),
            if t.stored_shape == t.logical_shape { String::new() } else { output::shape(&t.stored_shape) },
            self.kind(),
            t.len.map_or("-".into(), |n| n.to_string()),
            self.bits_per_weight().map_or("-".into(), |b| format!("{b:.3}")),
            self.problem.clone().unwrap_or_default(),
        ]
    }

    fn json(&self, file: &Container) -> Json {
        let (t, f) = (self.tensor, self.format());
        // A number that bitlane refuses is in the type's name only.
        let refused_qt = || {
            let number = t.type_name.strip_prefix("qt ").filter(|_| matches!(file.details(), Details::Hfq(_)))?;
            number.parse::<u8>().ok()
        };
        json!({
            "name": t.name, "shape": t.logical_shape, "stored_shape": t.stored_shape, "type": t.type_name,
            "format": f.map(|f| f.name), "qt": f.map_or_else(refused_qt, |f| f.qt), "wire_name": f.map(|f| f.wire_name),
            "shard": t.file, "offset": t.offset, "bytes": t.len, "weights": t.weights(),
            "bits_per_weight": self.bits_per_weight(), "problem": self.problem,
        })
    }
}

fn bits_per_weight(bytes: u64, weights: u64) -> f64 {
    bytes as f64 * 8.0 / weights.max(1) as f64
}

/// "2 problems:" and a line for each.
fn list(problems: &[String]) -> String {
    if problems.is_empty() {
        return "no problems found\n".into();
    }
    let lines: String = problems.iter().map(|p| format!("  {}\n", output::visible(p))).collect();
    format!("{}:\n{lines}", output::count(problems.len(), "problem", "problems"))
}

/// The header, for people and as data.
fn header(file: &Container) -> (String, Json) {
    match file.details() {
        Details::Gguf(h) => (
            format!("GGUF version {}, architecture {}, {} keys", h.version, h.architecture(), h.meta.len()),
            json!({ "version": h.version, "architecture": h.architecture(), "keys": h.meta.len(), "data_offset": h.data_offset }),
        ),
        Details::Safetensors(beside) => {
            let mut names: Vec<_> = beside.keys().copied().collect();
            names.sort_unstable();
            let text = if names.is_empty() { "nothing".into() } else { names.join(", ") };
            (format!("safetensors, beside it: {text}"), json!({ "sidecars": names }))
        }
        Details::Hfq(h) => {
            let keys: Vec<_> = h.metadata.keys().map(String::as_str).collect();
            let text = format!("hfq version 1, architecture id {:#x}, metadata: {}", h.architecture, keys.join(", "));
            let data = json!({
                "version": hfq::VERSION, "architecture_id": h.architecture, "metadata_keys": keys,
                "data_offset": h.data_offset, "trailing_bytes": h.trailing,
            });
            (text, data)
        }
    }
}

/// What is no problem, but worth knowing.
fn notes(file: &Container) -> Vec<String> {
    let wire_only = Format::ALL
        .iter()
        .filter(|f| f.spec().standing == Standing::WireOnly)
        .filter(|f| file.tensors().iter().any(|t| t.encoding == Encoding::Format(**f)));
    let mut notes: Vec<String> = wire_only.map(|f| format!("{f}: {}", f.spec().standing.note())).collect();
    match file.details() {
        Details::Hfq(h) if h.trailing > 0 => {
            notes.push(format!(
                "{} after the last blob (legal, ignored)",
                output::count(h.trailing as usize, "byte", "bytes")
            ));
        }
        Details::Hfq(_) => {}
        Details::Gguf(_) | Details::Safetensors(_) => {
            if let Err(why) = quantize::plan(file, &Recipe::new(Format::Mq4V2)) {
                notes.push(format!("quantize would refuse it: {why}"));
            }
        }
    }
    notes
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
    let rows = file.tensors().iter().map(|t| Row::new(file, t, args.scan)).collect::<Result<Vec<_>>>()?;
    let problems: Vec<String> =
        rows.iter().filter_map(|r| Some(format!("{}: {}", r.tensor.name, r.problem.as_ref()?))).collect();
    let notes = notes(file);
    let (header, header_data) = header(file);
    // Bytes and weights by type, in the order in which types first appear.
    let mut types: Vec<(String, u64, u64, u64)> = Vec::new();
    let mut index: HashMap<String, usize> = HashMap::new();
    for r in &rows {
        let i = *index.entry(r.kind()).or_insert_with_key(|kind| {
            types.push((kind.clone(), 0, 0, 0));
            types.len() - 1
        });
        let (_, n, b, w) = &mut types[i];
        *n += 1;
        *b += r.tensor.len.unwrap_or(0);
        *w = w.saturating_add(r.tensor.weights());
    }
    let bytes: u64 = types.iter().map(|t| t.2).sum();
    let weights: u64 = types.iter().map(|t| t.3).fold(0, u64::saturating_add);
    if args.json {
        output::print_json(&json!({
            "file": file.name(), "container": file.kind(), "header": header_data, "file_bytes": file.file_len(),
            "weights": weights, "tensor_bytes": bytes, "bits_per_weight": bits_per_weight(bytes, weights),
            "tensors": rows.iter().map(|r| r.json(file)).collect::<Vec<_>>(), "notes": notes, "problems": problems,
        }))?;
    } else {
        let mut text = output::visible(&format!("{}: {header}", file.name())) + "\n\n";
        let columns = ["tensor", "shape", "stored as", "type", ">bytes", ">bits/weight", "problem"];
        text += &output::table(&columns, rows.iter().map(Row::cells));
        text.push('\n');
        text += &output::table(
            &["type", ">tensors", ">weights", ">bytes", ">bits/weight"],
            types.iter().map(|(kind, n, b, w)| {
                let bits = format!("{:.3}", bits_per_weight(*b, *w));
                vec![kind.clone(), n.to_string(), w.to_string(), b.to_string(), bits]
            }),
        );
        text += &format!(
            "\n{}, {weights} weights in {} ({:.3} bits per weight); file {}\n",
            output::count(rows.len(), "tensor", "tensors"),
            output::bytes(bytes),
            bits_per_weight(bytes, weights),
            output::bytes(file.file_len())
        );
        for n in &notes {
            text += &format!("note: {}\n", output::visible(n));
        }
        text += &list(&problems);
        output::print(&text)?;
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(3) })
}

/// A headerless t2 stream: its shape comes from the command line, its length must agree.
fn raw_t2(args: &Args, m: usize, k: usize) -> Result<ExitCode> {
    let bytes =
        std::fs::read(&args.file).map_err(|source| Error::Io { action: "read", path: args.file.clone(), source })?;
    let name = args.file.file_name().unwrap_or(args.file.as_os_str()).to_string_lossy();
    let tensor = QuantTensor::new(&name, Format::T2, m, k, bytes, None)?;
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
            "file": args.file.display().to_string(), "container": "raw t2", "shape": [m, k], "bytes": tensor.bytes().len(),
            "bits_per_weight": Format::T2.bits_per_weight(), "reserved_codes": reserved,
            "non_finite_scales": bad_scales, "problems": problems,
        }))?;
    } else {
        let tiles = output::count(tensor.bytes().len() / t2::TILE_BYTES, "tile", "tiles");
        let text = format!(
            "{}: t2 [{m}, {k}], {tiles}, {:.3} bits per weight, {}\n{}",
            output::visible(&args.file.display().to_string()),
            Format::T2.bits_per_weight(),
            output::count(reserved as usize, "reserved code", "reserved codes"),
            list(&problems)
        );
        output::print(&text)?;
    }
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(3) })
}
