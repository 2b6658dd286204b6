//! The `bitlane` command: look into model files, quantize them, compare formats.
//!
//! Exit codes: 0 done; 1 an error, no partial output: an output file is either complete (the error was in saying so on
//! standard output) or as it was before; 2 a command line that makes no sense; 3 `inspect` found problems;
//! 130 interrupted, nothing was written.

mod compare;
mod formats;
mod inspect;
mod output;
mod quantize;

use std::process::ExitCode;

use bitlane::{Error, Result, ScaleRounding};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "bitlane", version, about = "Low-bit LLM weights: inspect, quantize, compare")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the weight formats
    Formats(formats::Args),
    /// Show what a model file holds: tensors, shapes, formats, bits per weight, problems
    Inspect(inspect::Args),
    /// Quantize a GGUF, safetensors or .hfq model to a .hfq file
    Quantize(quantize::Args),
    /// Measure codec error per format on a model's own weights
    Compare(compare::Args),
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    let input = match &command {
        Command::Formats(_) => None,
        Command::Inspect(args) => Some(&args.file),
        Command::Quantize(args) => Some(&args.input),
        Command::Compare(args) => Some(&args.input),
    };
    let input = input.map(|path| path.display().to_string());
    let result = match command {
        Command::Formats(args) => formats::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Compare(args) => compare::run(&args),
    };
    result.unwrap_or_else(|error| {
        let file = input.filter(|_| !says_its_file(&error)).map(|i| i + ": ").unwrap_or_default();
        eprintln!("bitlane: {}", output::visible(&format!("{file}{error}")));
        ExitCode::from(match error {
            Error::Usage(_) | Error::UnknownFormat { .. } => 2,
            Error::Cancelled => 130,
            _ => 1,
        })
    })
}

/// Whether an error names the file that it is about, or is about none. The others are about a tensor's weights or
/// shape: which file it is in, the command knows.
fn says_its_file(error: &Error) -> bool {
    matches!(
        error,
        Error::Io { .. }
            | Error::Malformed { .. }
            | Error::UnknownContainer { .. }
            | Error::UnsupportedTensor { .. }
            | Error::UnsupportedModel { .. }
            | Error::NoSuchTensor { .. }
            | Error::UnknownFormat { .. }
            | Error::Usage(_)
            | Error::Cancelled
    )
}

/// Options of the subcommands that compute.
#[derive(clap::Args)]
struct Common {
    /// Threads, at most 1024 (0: one per core)
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(..=1024))]
    threads: u16,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The value of an option that is a format.
fn format(name: &str) -> Result<bitlane::Format> {
    name.parse()
}

/// The value of `--rounding`.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Rounding {
    NearestEven,
    TowardZero,
}

impl From<Rounding> for ScaleRounding {
    fn from(rounding: Rounding) -> Self {
        match rounding {
            Rounding::NearestEven => ScaleRounding::NearestEven,
            Rounding::TowardZero => ScaleRounding::TowardZero,
        }
    }
}

/// Runs `f` on a pool of `threads` threads (0: one per core).
fn on_threads<T: Send>(threads: u16, f: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build();
    pool.map_err(|e| Error::Usage(format!("cannot start {threads} threads: {e}")))?.install(f)
}
