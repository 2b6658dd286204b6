//! `bitlane formats`: the table of formats, from the library's own.

use std::process::ExitCode;

use bitlane::{Format, Result};
use serde_json::json;

use crate::output;

#[derive(clap::Args)]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let specs = Format::ALL.iter().map(|f| f.spec());
    if args.json {
        let rows: Vec<_> = specs
            .map(|s| {
                json!({
                    "name": s.name, "wire_name": s.wire_name, "qt": s.qt, "ggml": s.ggml,
                    "bits_per_weight": s.format.bits_per_weight(), "block": [s.block_rows, s.block_cols],
                    "block_bytes": s.block_bytes, "basis": s.basis.name(), "status": s.standing.note(),
                })
            })
            .collect();
        output::print_json(&json!(rows))?;
    } else {
        let rows = specs.map(|s| {
            vec![
                s.name.into(),
                s.wire_name.into(),
                s.qt.map_or("-".into(), |q| q.to_string()),
                format!("{:.3}", s.format.bits_per_weight()),
                format!("{}x{}", s.block_rows, s.block_cols),
                s.basis.name().into(),
                s.standing.note().into(),
            ]
        });
        output::print(&output::table(
            &["format", "wire name", ">qt", ">bits/weight", ">block", "basis", "status"],
            rows,
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
