//! `bitlane quantize IN OUT --format mq4v2`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bitlane::format::Standing;
use bitlane::quantize::{self, Progress, Recipe, Step};
use bitlane::{Container, Error, Format, Result};
use indicatif::ProgressBar;
use serde_json::json;

use crate::{Common, Rounding, output};

#[derive(clap::Args)]
#[command(
    after_help = "Defaults: weight matrices and the head (lm_head) in --format; the token embedding in q8_0; norms, \
                        biases and other small tensors in f16. The output appears whole or not at all."
)]
pub struct Args {
    /// GGUF, safetensors (file, folder or index) or .hfq
    pub input: PathBuf,
    /// The .hfq file to write
    output: PathBuf,
    /// Format of weight matrices and of the head; `bitlane formats` lists them
    #[arg(long, default_value = "mq4v2", value_parser = crate::format)]
    format: Format,
    /// Format of tensors whose name (either the file's or the Hugging Face one) matches a pattern with * and ?; may be
    /// repeated, the last match wins
    #[arg(long, value_name = "PATTERN=FORMAT", value_parser = override_)]
    tensor_format: Vec<(String, Format)>,
    /// Put every matrix into --format, embedding included
    #[arg(long)]
    pure: bool,
    /// Leave out tensors whose name matches; may be repeated
    #[arg(long, value_name = "PATTERN")]
    skip: Vec<String>,
    /// How scales and zeros become fp16; `toward-zero` reproduces files of the family's own encoder
    #[arg(long, value_enum, default_value_t = Rounding::NearestEven)]
    rounding: Rounding,
    #[command(flatten)]
    common: Common,
}

fn override_(text: &str) -> Result<(String, Format), String> {
    let (pattern, format) =
        text.rsplit_once('=').ok_or("give PATTERN=FORMAT, for example '*.down_proj.weight=mq6v2'")?;
    Ok((pattern.into(), format.parse().map_err(|e: Error| e.to_string())?))
}

/// The shape in the file: K is padded to whole blocks.
fn stored_shape(step: &Step) -> Vec<u64> {
    let mut shape = step.shape.clone();
    if let Some(k) = shape.last_mut() {
        *k = step.stored_k as u64;
    }
    shape
}

struct Bar {
    bar: ProgressBar,
    cancelled: Arc<AtomicBool>,
}

impl Progress for Bar {
    fn advance(&self, weights: u64) {
        self.bar.inc(weights);
    }
    fn cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    // Before any work: an interrupt from here on leaves no partial file behind.
    let cancelled = Arc::new(AtomicBool::new(false));
    let flag = cancelled.clone();
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed))
        .map_err(|e| Error::Usage(format!("cannot handle interrupts: {e}")))?;

    let start = Instant::now();
    let source = Container::open(&args.input)?;
    let base = if args.pure { Recipe::pure(args.format) } else { Recipe::new(args.format) };
    let recipe = Recipe {
        overrides: args.tensor_format.clone(),
        skip: args.skip.clone(),
        rounding: args.rounding.into(),
        ..base
    };
    let plan = quantize::plan(&source, &recipe)?;
    for w in &plan.warnings {
        output::warn(w);
    }
    let bar = output::progress(plan.weights(), "{human_pos}/{human_len} weights, {eta} left");
    let progress = Bar { bar, cancelled };
    let result = crate::on_threads(args.common.threads, || quantize::run(&plan, &args.output, &progress));
    progress.bar.finish_and_clear();
    result?;
    let seconds = start.elapsed().as_secs_f64();

    let mut by_format: BTreeMap<Format, (u64, u64, u64)> = BTreeMap::new();
    for s in &plan.steps {
        let sum = by_format.entry(s.format).or_default();
        *sum = (sum.0 + 1, sum.1 + s.shape.iter().product::<u64>(), sum.2 + s.bytes);
    }
    let bits = |bytes: u64, weights: u64| bytes as f64 * 8.0 / weights.max(1) as f64;
    let total: u64 = plan.steps.iter().map(|s| s.bytes).sum();
    if args.common.json {
        let formats: Vec<_> = by_format
            .iter()
            .map(|(f, (n, w, b))| json!({ "format": f.name(), "tensors": n, "weights": w, "bytes": b, "bits_per_weight": bits(*b, *w) }))
            .collect();
        let tensors: Vec<_> = plan
            .steps
            .iter()
            .map(|s| {
                json!({
                    "name": s.name, "from": source.tensors()[s.source].name, "format": s.format.name(),
                    "qt": s.format.spec().qt, "shape": s.shape, "stored_shape": stored_shape(s), "bytes": s.bytes,
                })
            })
            .collect();
        output::print_json(&json!({
            "input": args.input, "output": args.output, "weights": plan.weights(), "file_bytes": plan.file_len(),
            "bits_per_weight": bits(total, plan.weights()), "seconds": seconds, "formats": formats, "tensors": tensors,
            "warnings": plan.warnings,
        }))?;
    } else {
        let rows = by_format.iter().map(|(f, (n, w, b))| {
            let standing = f.spec().standing;
            let note = if standing == Standing::Product { "" } else { standing.note() };
            let bits = format!("{:.3}", bits(*b, *w));
            vec![f.to_string(), n.to_string(), w.to_string(), b.to_string(), bits, note.into()]
        });
        let mut text = output::table(&["format", ">tensors", ">weights", ">bytes", ">bits/weight", ""], rows);
        text += &format!(
            "\n{}: {} weights in {} ({:.3} bits per weight), {seconds:.2} s, {:.0} million weights/s\n",
            output::visible(&args.output.display().to_string()),
            plan.weights(),
            output::bytes(plan.file_len()),
            bits(total, plan.weights()),
            plan.weights() as f64 / seconds / 1e6
        );
        output::print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}
