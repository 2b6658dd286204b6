//! `bitlane compare IN`: codec error per format on a model's own weights, v1 against V2.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use bitlane::container::{Encoding, TensorInfo};
use bitlane::quantize::Role;
use bitlane::report::codec::{CodecError, GENERATIONS, Summary, generation_changes, tensor_error};
use bitlane::report::plot::codec_chart;
use bitlane::{Container, EncodeOptions, Error, Format, Result, ScaleRounding};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use wildmatch::WildMatch;

use crate::output;

#[derive(clap::Args)]
#[command(
    after_help = "Errors are measured in each format's own basis (rotated for MQ), over the stored weights; the tail is \
                        the largest 1 % of each tensor by magnitude there. Relative RMS is measured on the model's own \
                        weights, after rotating back. Codec error is no proxy for what a model loses."
)]
pub struct Args {
    /// GGUF, safetensors (file, folder or index) or .hfq
    pub input: PathBuf,
    /// Formats to measure, comma separated [default: every MQ format, v1 and V2]
    #[arg(long, value_delimiter = ',', value_parser = crate::format)]
    formats: Vec<Format>,
    /// Measure only matrices whose name matches a pattern with * and ?; may be repeated
    #[arg(long, value_name = "PATTERN")]
    tensor: Vec<String>,
    /// Also print every tensor's own figures
    #[arg(long)]
    per_tensor: bool,
    /// Draw a chart
    #[arg(long, value_name = "PNG")]
    plot: Option<PathBuf>,
    /// Truncate scales and zeros toward zero instead of rounding to nearest
    #[arg(long)]
    toward_zero: bool,
    /// Threads, at most 1024 (0: one per core)
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(..=1024))]
    threads: u16,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The matrices to measure, and why others are not.
fn select<'a>(source: &'a Container, patterns: &[String]) -> Result<(Vec<&'a TensorInfo>, Vec<String>)> {
    let matches = |t: &TensorInfo| patterns.is_empty() || patterns.iter().any(|p| WildMatch::new(p).matches(&t.name));
    let matrices = source.tensors().iter().filter(|t| Role::of(&t.name, &t.logical_shape) != Role::Small && matches(t));
    let (decodable, refused): (Vec<_>, Vec<_>) = matrices.partition(|t| !matches!(t.encoding, Encoding::Refused(_)));
    if decodable.is_empty() {
        return Err(Error::Usage(format!(
            "{}: no matrix to measure (of {} tensors)",
            source.name(),
            source.tensors().len()
        )));
    }
    let why = |t: &&TensorInfo| match &t.encoding {
        Encoding::Refused(what) => format!("{} is left out: {what}", t.name),
        _ => String::new(),
    };
    Ok((decodable, refused.iter().map(why).collect()))
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let source = Container::open(&args.input)?;
    let formats = if args.formats.is_empty() {
        let mut all: Vec<Format> = GENERATIONS.iter().flat_map(|(v1, v2)| [*v1, *v2]).collect();
        all.push(Format::Mq4C);
        all
    } else {
        args.formats.clone()
    };
    let (matrices, left_out) = select(&source, &args.tensor)?;
    for why in &left_out {
        eprintln!("bitlane: warning: {}", output::visible(why));
    }
    // Before any weight is read: shapes that a format refuses.
    for t in &matrices {
        let (m, k) = t.matrix();
        for f in &formats {
            let fits = f.stored_k(k).and_then(|stored| f.blob_len(m, stored));
            fits.map_err(|why| Error::Shape { tensor: t.name.clone(), format: *f, rows: m, cols: k, why })?;
        }
    }
    let rounding = if args.toward_zero { ScaleRounding::TowardZero } else { ScaleRounding::NearestEven };
    let options = EncodeOptions { rounding, awq: None };
    let total = matrices.iter().map(|t| t.weights()).sum::<u64>() * formats.len() as u64;
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(total) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3}% {msg}") {
        bar.set_style(style);
    }
    let mut summary = Summary::new();
    let mut tensors: Vec<(&str, Vec<CodecError>)> = Vec::new();
    crate::on_threads(args.threads, || {
        for t in &matrices {
            bar.set_message(t.name.clone());
            let weights = source.rows(t)?.read_all()?;
            let (m, k) = t.matrix();
            let mut rows = Vec::new();
            for f in &formats {
                let e = tensor_error(&t.name, m, k, &weights, *f, &options)?;
                summary.add(&e);
                rows.push(e);
                bar.inc(t.weights());
            }
            tensors.push((&t.name, rows));
        }
        Ok(())
    })?;
    bar.finish_and_clear();

    let rows = summary.rows();
    let changes = generation_changes(&rows);
    if let Some(path) = &args.plot {
        let name =
            args.input.file_name().map_or_else(|| args.input.display().to_string(), |n| n.to_string_lossy().into());
        codec_chart(path, &format!("Codec error on {name}"), &name, &rows)?;
    }
    if args.json {
        let per_tensor: Vec<_> = tensors
            .iter()
            .map(|(name, rows)| json!({ "name": name, "formats": rows, "changes": generation_changes(rows) }))
            .collect();
        output::print_json(&json!({
            "file": source.name(), "rounding": if args.toward_zero { "toward-zero" } else { "nearest-even" },
            "formats": rows, "changes": changes, "tensors": per_tensor, "left_out": left_out,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!(
        "{}: {} matrices, {} weights\n\n",
        source.name(),
        matrices.len(),
        matrices.iter().map(|t| t.weights()).sum::<u64>()
    );
    let line = |e: &CodecError| {
        vec![
            e.format.to_string(),
            format!("{:.3}", e.bits_per_weight),
            format!("{:.4e}", e.mse),
            format!("{:.4e}", e.tail_mse),
            format!("{:.3} %", 100.0 * e.rel_rms),
            if e.is_wire_only() { e.standing.into() } else { String::new() },
        ]
    };
    let header = ["format", ">stored bits/weight", ">MSE", ">MSE, largest 1 %", ">relative RMS", ""];
    text += &output::table(&header, rows.iter().map(line));
    let percent = |p: Option<f64>| p.map_or("-".into(), |p| format!("{p:+.2} %"));
    if !changes.is_empty() {
        text += "\nchange from v1 to V2:\n";
        let line = |c: &bitlane::report::codec::GenerationChange| {
            vec![c.bits.to_string(), percent(c.overall_percent), percent(c.tail_percent)]
        };
        text += &output::table(&[">bits", ">MSE", ">MSE, largest 1 %"], changes.iter().map(line));
    }
    if args.per_tensor {
        for (name, rows) in &tensors {
            text += &format!("\n{name}\n");
            text += &output::table(&header, rows.iter().map(line));
        }
    }
    if let Some(path) = &args.plot {
        text += &format!("\nchart: {}\n", path.display());
    }
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}
