//! What the subcommands share: printing that survives a closed pipe, tables, and numbers for people.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use bitlane::{Error, Result};
use comfy_table::{Cell, CellAlignment, Table, presets};

/// Writes to standard output. A closed pipe (`bitlane inspect … | head`) is no error.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(visible(text).as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Io { action: "write", path: PathBuf::from("standard output"), source: e })
        }
        _ => Ok(()),
    }
}

/// Names come from files: control characters in them must not reach a terminal.
pub fn visible(text: &str) -> String {
    text.replace(|c: char| c.is_control() && c != '\n', "\u{fffd}")
}

/// Writes a value as JSON.
pub fn print_json(value: &serde_json::Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}

/// A plain table; columns whose header starts with `>` are right-aligned.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut t = Table::new();
    t.load_preset(presets::NOTHING);
    t.set_header(header.iter().map(|h| Cell::new(h.trim_start_matches('>'))));
    for row in rows {
        t.add_row(row);
    }
    for (i, h) in header.iter().enumerate() {
        if let Some(c) = t.column_mut(i).filter(|_| h.starts_with('>')) {
            c.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines: Vec<String> = t.lines().map(|l| l.trim_end().to_string() + "\n").collect();
    lines.concat()
}

/// "1.23 MB".
pub fn bytes(n: u64) -> String {
    match n {
        0..1_000 => format!("{n} B"),
        1_000..1_000_000 => format!("{:.1} kB", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", n as f64 / 1e6),
        _ => format!("{:.2} GB", n as f64 / 1e9),
    }
}

/// "[576, 49152]".
pub fn shape(dims: &[u64]) -> String {
    format!("{dims:?}")
}
