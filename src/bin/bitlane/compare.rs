//! `bitlane compare IN`: codec error per format on a model's own weights, v1 against V2.

use std::path::PathBuf;
use std::process::ExitCode;

use bitlane::container::arch::Arch;
use bitlane::container::{Details, Encoding, TensorInfo};
use bitlane::format::rotation;
use bitlane::quantize::Role;
use bitlane::report::codec::{CodecError, GENERATIONS, GenerationChange, Summary, generation_changes, tensor_error};
use bitlane::report::plot::codec_chart;
use bitlane::tensor::geometry;
use bitlane::{Container, EncodeOptions, Error, Format, Result};
use serde_json::json;
use wildmatch::WildMatch;

use crate::{Common, Rounding, output};

/// Why a change over all matrices is not what it is where K is a multiple of 256.
const PADDING: &str = "Padding K to a multiple of 256 makes the two halves of a rotated group equal up to signs (where \
                       it fills half of the group or more), so V2's second scale gains less there.";

#[derive(clap::Args)]
#[command(after_help = format!(
    "Errors are measured in each format's own basis (rotated for MQ), over the stored weights; the tail is the largest \
     1 % of each tensor by magnitude there. Relative RMS is measured on the model's own weights, after rotating back. \
     Codec error is no proxy for what a model loses.\n\nThe change from v1 to V2 is given for all matrices and, where \
     that is not all of them, for those whose K is a multiple of 256. {PADDING}\n\nMemory: a few times the largest \
     tensor as f32."
))]
pub struct Args {
    /// GGUF, safetensors (file, folder or index) or .hfq
    pub input: PathBuf,
    /// Formats to measure, comma separated; `bitlane formats` lists them [default: every MQ format, v1 and V2]
    #[arg(long, value_delimiter = ',', value_parser = crate::format)]
    formats: Vec<Format>,
    /// Measure only matrices whose name (either the file's or the Hugging Face one) matches a pattern with * and ?; may
    /// be repeated
    #[arg(long, value_name = "PATTERN")]
    tensor: Vec<String>,
    /// Also print every tensor's own figures
    #[arg(long)]
    per_tensor: bool,
    /// Draw a chart
    #[arg(long, value_name = "PNG")]
    plot: Option<PathBuf>,
    /// How scales and zeros become fp16; `toward-zero` is what the family's own encoder does
    #[arg(long, value_enum, default_value_t = Rounding::NearestEven)]
    rounding: Rounding,
    #[command(flatten)]
    common: Common,
}

/// The matrices to measure, and why others are not.
fn select<'a>(source: &'a Container, patterns: &[String]) -> Result<(Vec<&'a TensorInfo>, Vec<String>)> {
    let arch = match source.details() {
        Details::Gguf(header) => Arch::of(source.name(), header).ok().map(|arch| (arch, header)),
        _ => None,
    };
    let matches = |pattern: &str, t: &TensorInfo| {
        let pattern = WildMatch::new(pattern);
        let mapped = arch.and_then(|(arch, header)| arch.map(header, &t.name));
        pattern.matches(&t.name) || mapped.is_some_and(|m| pattern.matches(&m.name))
    };
    let matrices = || source.tensors().iter().filter(|t| Role::of(&t.name, &t.logical_shape) != Role::Small);
    if let Some(p) = patterns.iter().find(|p| !matrices().any(|t| matches(p, t))) {
        let what = if source.tensors().iter().any(|t| matches(p, t)) { "matrix" } else { "tensor" };
        return Err(Error::Usage(format!("{}: pattern {p:?} matches no {what}", source.name())));
    }
    let wanted = matrices().filter(|t| patterns.is_empty() || patterns.iter().any(|p| matches(p, t)));
    let (decodable, refused): (Vec<_>, Vec<_>) = wanted.partition(|t| !matches!(t.encoding, Encoding::Refused(_)));
    if decodable.is_empty() {
        let of = output::count(source.tensors().len(), "tensor", "tensors");
        let mut text = format!("{}: no matrix to measure (of {of})", source.name());
        if !patterns.is_empty() {
            text += &format!(
                " that matches {}",
                patterns.iter().map(|p| format!("{p:?}")).collect::<Vec<_>>().join(" or ")
            );
        }
        if let Some(TensorInfo { name, encoding: Encoding::Refused(what), .. }) = refused.first() {
            text += &format!("; {name} is {what}");
        }
        return Err(Error::Usage(text));
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
        output::warn(why);
    }
    // Before any weight is read: shapes that a format refuses.
    for t in &matrices {
        let (m, k) = t.matrix();
        for f in &formats {
            geometry(&t.name, *f, m, k)?;
        }
    }
    let options = EncodeOptions { rounding: args.rounding.into(), awq: None };
    let total = matrices.iter().map(|t| t.weights()).sum::<u64>() * formats.len() as u64;
    let bar = output::progress(total, "{msg}");
    // Over all matrices, and over those whose groups hold no padding.
    let (mut summary, mut unpadded) = (Summary::new(), Summary::new());
    let is_unpadded = |k: usize| k.is_multiple_of(rotation::BLOCK);
    let mut tensors: Vec<(&str, Vec<CodecError>)> = Vec::new();
    crate::on_threads(args.common.threads, || {
        for t in &matrices {
            bar.set_message(output::visible(&t.name));
            let weights = source.rows(t)?.read_all()?;
            let (m, k) = t.matrix();
            let mut rows = Vec::new();
            for f in &formats {
                let e = tensor_error(&t.name, m, k, &weights, *f, &options)?;
                summary.add(&e);
                if is_unpadded(k) {
                    unpadded.add(&e);
                }
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
    let changes_unpadded = generation_changes(&unpadded.rows());
    let count_unpadded = matrices.iter().filter(|t| is_unpadded(t.matrix().1)).count();
    if let Some(path) = &args.plot {
        let name =
            args.input.file_name().map_or_else(|| args.input.display().to_string(), |n| n.to_string_lossy().into());
        codec_chart(path, &format!("Codec error on {name}"), &name, &rows)?;
    }
    if args.common.json {
        let per_tensor: Vec<_> = tensors
            .iter()
            .map(|(name, rows)| json!({ "name": name, "formats": rows, "changes": generation_changes(rows) }))
            .collect();
        output::print_json(&json!({
            "file": source.name(), "rounding": options.rounding.name(), "matrices": matrices.len(),
            "matrices_unpadded": count_unpadded, "formats": rows, "changes": changes,
            "changes_unpadded": changes_unpadded, "tensors": per_tensor, "left_out": left_out,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = format!(
        "{}: {}, {} weights\n\n",
        output::visible(source.name()),
        output::count(matrices.len(), "matrix", "matrices"),
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
    if !changes.is_empty() {
        text += &change_tables(&changes, matrices.len(), &changes_unpadded, count_unpadded);
    }
    if args.per_tensor {
        for (name, rows) in &tensors {
            text += &format!("\n{}\n", output::visible(name));
            text += &output::table(&header, rows.iter().map(line));
        }
    }
    if let Some(path) = &args.plot {
        text += &format!("\nchart: {}\n", output::visible(&path.display().to_string()));
    }
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// What V2 changed: over all matrices, and over those without padding where that makes a difference.
fn change_tables(all: &[GenerationChange], n: usize, unpadded: &[GenerationChange], n_unpadded: usize) -> String {
    let percent = |p: Option<f64>| p.map_or("-".into(), |p| format!("{p:+.2} %"));
    let table = |changes: &[GenerationChange]| {
        let line = |c: &GenerationChange| vec![c.bits.to_string(), percent(c.overall_percent), percent(c.tail_percent)];
        output::table(&[">bits", ">MSE", ">MSE, largest 1 %"], changes.iter().map(line))
    };
    if n_unpadded == n {
        return format!("\nchange from v1 to V2:\n{}", table(all));
    }
    let mut text = format!("\nchange from v1 to V2, all {}:\n{}", output::count(n, "matrix", "matrices"), table(all));
    if n_unpadded == 0 {
        text += "\nno matrix has a K that is a multiple of 256\n";
    } else {
        let which = output::count(n_unpadded, "matrix", "matrices");
        text += &format!("\nchange from v1 to V2, the {which} whose K is a multiple of 256:\n{}", table(unpadded));
    }
    text + "\n" + PADDING + "\n"
}
