//! What the subcommands share: printing that survives a closed pipe, tables, progress, and numbers for people.

use std::io::{ErrorKind, IsTerminal, Write};
use std::path::PathBuf;

use bitlane::{Error, Result};
use comfy_table::{Cell, CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};

/// Writes to standard output. A closed pipe (`bitlane inspect … | head`) is no error. Any other failure is one, even
/// where a file was already written: that file is complete, see the exit codes at the head of `main.rs`.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Io { action: "write", path: PathBuf::from("standard output"), source: e })
        }
        _ => Ok(()),
    }
}

/// Names come from files: control characters in them must not reach a terminal, nor begin a line of their own.
pub fn visible(text: &str) -> String {
    text.replace(char::is_control, "\u{fffd}")
}

/// Writes a value as JSON, whose strings are the file's own.
pub fn print_json(value: &serde_json::Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}

/// A line on standard error.
pub fn warn(text: &str) {
    eprintln!("bitlane: warning: {}", visible(text));
}

/// A plain table; columns whose header starts with `>` are right-aligned.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut t = Table::new();
    t.load_preset(presets::NOTHING);
    t.set_header(header.iter().map(|h| Cell::new(h.trim_start_matches('>'))));
    for row in rows {
        t.add_row(row.iter().map(|cell| visible(cell)));
    }
    for (i, h) in header.iter().enumerate() {
        if let Some(c) = t.column_mut(i).filter(|_| h.starts_with('>')) {
            c.set_cell_alignment(CellAlignment::Right);
        }
    }
    let lines: Vec<String> = t.lines().map(|l| l.trim_end().to_string() + "\n").collect();
    lines.concat()
}

/// A progress bar over `total` steps, followed by `rest`; hidden where standard error is no terminal.
pub fn progress(total: u64, rest: &str) -> ProgressBar {
    let bar = if std::io::stderr().is_terminal() { ProgressBar::new(total) } else { ProgressBar::hidden() };
    match ProgressStyle::with_template(&format!("{{bar:40}} {{percent:>3}}% {rest}")) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
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

/// "1 problem", "2 problems".
pub fn count(n: usize, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// "[576, 49152]".
pub fn shape(dims: &[u64]) -> String {
    format!("{dims:?}")
}
