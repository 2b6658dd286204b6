//! Charts as PNG files, drawn with a font that the crate carries: no fontconfig, no display, the same picture on
//! every machine.
//!
//! A chart appears whole or not at all: it is drawn into a temporary file in the same folder, checked and renamed.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::OnceLock;

use plotters::prelude::*;
use plotters::style::register_font;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::codec::{CodecError, GenerationChange, generation_changes};
use crate::container::OutputFile;
use crate::error::{Error, Result};
use crate::format::Standing;

const SIZE: (u32, u32) = (1400, 900);
const FONT: &str = "sans-serif";
const INK: RGBColor = RGBColor(34, 40, 49);
const QUIET: RGBColor = RGBColor(96, 104, 115);
const GRID: RGBColor = RGBColor(226, 230, 235);
const OLD: RGBColor = RGBColor(140, 108, 60);
const NEW: RGBColor = RGBColor(24, 94, 180);
const OTHER: RGBColor = RGBColor(60, 140, 90);
const TAIL: RGBColor = RGBColor(226, 134, 44);
/// Bits per weight beyond which a format is only mentioned: it would squeeze the low-bit ones together.
const WIDEST: f64 = 10.0;

type Panel<'a> = DrawingArea<BitMapBackend<'a>, plotters::coord::Shift>;

/// Draws codec error of formats as a PNG of 1400 x 900 pixels at `path`, replacing what is there.
///
/// Left: mean squared error on a logarithmic axis against bits stored per weight, one series per generation. Right:
/// percent change from each v1 format to its V2 successor, over all weights and over each tensor's largest 1 %.
/// `source` says where the weights come from. Formats that are a wire format only carry an asterisk and a footnote.
///
/// # Errors
/// [`Error::Usage`] without rows; [`Error::Io`] if the file cannot be written, and then what was at `path` is
/// untouched. (The PNG encoder does not report a failure to write its last bytes, so the end of the file is read
/// back.)
pub fn codec_chart(path: &Path, title: &str, source: &str, rows: &[CodecError]) -> Result<()> {
    if rows.is_empty() {
        return Err(Error::Usage("nothing to chart: no format was measured".into()));
    }
    let io = |action| move |source| Error::Io { action, path: path.into(), source };
    let out = OutputFile::create(path, 0)?;
    draw(out.temp_path(), title, source, rows).map_err(std::io::Error::other).map_err(io("draw"))?;
    std::fs::File::open(out.temp_path()).and_then(|mut f| check_png(&mut f)).map_err(io("write"))?;
    out.commit()
}

/// Whether a PNG file has its last chunk.
fn check_png(file: &mut std::fs::File) -> std::io::Result<()> {
    const END: [u8; 12] = *b"\0\0\0\0IEND\xaeB`\x82";
    let mut end = [0; 12];
    file.seek(SeekFrom::End(-12))?;
    file.read_exact(&mut end)?;
    if end == END { Ok(()) } else { Err(std::io::Error::other("the PNG file is cut short")) }
}

/// Registers the font once per process; plotters keeps a table of its own.
fn font() -> Result<(), String> {
    static DONE: OnceLock<bool> = OnceLock::new();
    let done = DONE.get_or_init(|| {
        register_font(FONT, FontStyle::Normal, dejavu::sans::regular()).is_ok()
            && register_font(FONT, FontStyle::Bold, dejavu::sans::bold()).is_ok()
    });
    if *done { Ok(()) } else { Err("the built-in font is broken".into()) }
}

fn text<'a>(size: u32, color: RGBColor, h: HPos, v: VPos) -> TextStyle<'a> {
    (FONT, size).into_font().color(&color).pos(Pos::new(h, v))
}

/// At most `max` characters of a caller's text, so that it cannot run over the edge.
fn fit(text: &str, max: usize) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    if text.chars().count() <= max { clean.collect() } else { clean.take(max - 1).chain(['…']).collect() }
}

fn label(row: &CodecError) -> String {
    format!("{}{}", row.format, if row.is_wire_only() { "*" } else { "" })
}

/// "3.5 million weights".
fn count(n: u64, what: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    match n {
        0..100_000 => format!("{n} {what}{s}"),
        100_000..1_000_000_000 => format!("{:.1} million {what}s", n as f64 / 1e6),
        _ => format!("{:.2} billion {what}s", n as f64 / 1e9),
    }
}

/// What was measured: formats that do not fit every shape may have seen fewer tensors than others.
fn extent(rows: &[CodecError]) -> String {
    let most = |f: fn(&CodecError) -> u64| rows.iter().map(f).max().unwrap_or(0);
    let (tensors, weights) = (most(|r| r.tensors), most(|r| r.logical_weights));
    let all = rows.iter().all(|r| (r.tensors, r.logical_weights) == (tensors, weights));
    let note = if all { "" } else { " (fewer for some formats)" };
    format!("{}, {}{note}", count(tensors, "tensor"), count(weights, "weight"))
}

fn draw(path: &Path, title: &str, source: &str, rows: &[CodecError]) -> Result<(), String> {
    font()?;
    let said = |e: DrawingAreaErrorKind<_>| e.to_string();
    let root = BitMapBackend::new(path, SIZE).into_drawing_area();
    root.fill(&WHITE).map_err(said)?;
    let (head, rest) = root.split_vertically(104);
    let (body, foot) = rest.split_vertically(SIZE.1 - 104 - 92);
    let (left, right) = body.split_horizontally(800);

    let bold = (FONT, 28, FontStyle::Bold).into_font().color(&INK);
    head.draw_text(&fit(title, 70), &bold, (36, 24)).map_err(said)?;
    let subtitle = fit(&format!("{source}: {}", extent(rows)), 130);
    head.draw_text(&subtitle, &text(19, QUIET, HPos::Left, VPos::Top), (36, 68)).map_err(said)?;

    let visible = |r: &&CodecError| r.mse > 0.0 && r.mse.is_finite();
    let mut drawn: Vec<&CodecError> = rows.iter().filter(visible).filter(|r| r.bits_per_weight <= WIDEST).collect();
    if drawn.is_empty() {
        drawn = rows.iter().filter(visible).collect();
    }
    errors(&root, &left, &drawn)?;
    changes(&right, &generation_changes(rows))?;

    let mut notes = vec![
        "Codec error is measured on the weights, in each format's own basis; it is not a proxy for what a model loses."
            .to_string(),
    ];
    let absent: Vec<String> = rows
        .iter()
        .filter(|r| !drawn.iter().any(|d| std::ptr::eq(*d, *r)))
        .map(|r| match r.mse {
            0.0 => format!("{} ({} bits, exact)", label(r), short(r.bits_per_weight)),
            mse => format!("{} ({} bits, {mse:.2e})", label(r), short(r.bits_per_weight)),
        })
        .collect();
    if !absent.is_empty() {
        notes.push(fit(&format!("Not drawn: {}.", absent.join(", ")), 150));
    }
    if rows.iter().any(CodecError::is_wire_only) {
        notes.push(format!("* {}.", Standing::WireOnly.note()));
    }
    for (i, note) in notes.iter().enumerate() {
        let at = (36, 8 + 25 * i as i32);
        foot.draw_text(note, &text(16, QUIET, HPos::Left, VPos::Top), at).map_err(said)?;
    }
    root.present().map_err(said)
}

/// A number without trailing zeros: "4.25", "16".
fn short(x: f64) -> String {
    let s = format!("{x:.2}");
    s.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// Which series a format belongs to.
#[derive(Clone, Copy, PartialEq)]
enum Series {
    V1,
    V2,
    Other,
}

fn series(row: &CodecError) -> Series {
    let pair = super::codec::GENERATIONS.iter();
    match pair.clone().any(|(_, v2)| *v2 == row.format) {
        true => Series::V2,
        false if pair.clone().any(|(v1, _)| *v1 == row.format) => Series::V1,
        false => Series::Other,
    }
}

/// The left panel. Labels go onto `root`, as they are placed in pixels.
fn errors(root: &Panel, panel: &Panel, rows: &[&CodecError]) -> Result<(), String> {
    let said = |e: DrawingAreaErrorKind<_>| e.to_string();
    if rows.is_empty() {
        let style = text(20, QUIET, HPos::Center, VPos::Center);
        return panel.draw_text("no format makes an error on these weights", &style, (400, 350)).map_err(said);
    }
    let range = |f: fn(&CodecError) -> f64| {
        rows.iter().map(|r| f(r)).fold((f64::INFINITY, 0f64), |(a, b), v| (a.min(v), b.max(v)))
    };
    let ((x0, x1), (y0, y1)) = (range(|r| r.bits_per_weight), range(|r| r.mse));
    let (x0, x1) = ((x0 - 0.9).floor().max(0.0), (x1 + 0.9).ceil());
    let decade = |y: f64| 10f64.powf(y);
    let y = decade((y0.log10() - 0.25).floor())..decade((y1.log10() + 0.25).ceil());
    let mut chart = ChartBuilder::on(panel)
        .margin(16)
        .margin_left(28)
        .caption("Mean squared error by bits per weight", text(22, INK, HPos::Left, VPos::Top))
        .x_label_area_size(58)
        .y_label_area_size(92)
        .build_cartesian_2d(x0..x1, y.log_scale())
        .map_err(said)?;
    chart
        .configure_mesh()
        .bold_line_style(GRID)
        .light_line_style(GRID.mix(0.45))
        .axis_style(QUIET)
        .x_labels(((x1 - x0) as usize + 1).min(12))
        .x_max_light_lines(1)
        .x_label_formatter(&|x| short(*x))
        .x_desc("stored bits per weight (headers and padding included)")
        .y_label_formatter(&|y| power_of_ten(*y))
        .y_desc("mean squared error (weight units squared)")
        .label_style(text(17, INK, HPos::Center, VPos::Center))
        .axis_desc_style(text(18, INK, HPos::Center, VPos::Center))
        .draw()
        .map_err(said)?;

    let points = |which: Series| {
        let mut p: Vec<(f64, f64)> =
            rows.iter().filter(|r| series(r) == which).map(|r| (r.bits_per_weight, r.mse)).collect();
        p.sort_by(|a, b| a.0.total_cmp(&b.0));
        p
    };
    let (v1, v2, other) = (points(Series::V1), points(Series::V2), points(Series::Other));
    let hollow = OLD.stroke_width(2);
    chart.draw_series(LineSeries::new(v1.clone(), OLD.mix(0.55).stroke_width(1))).map_err(said)?;
    chart.draw_series(LineSeries::new(v2.clone(), NEW.mix(0.55).stroke_width(1))).map_err(said)?;
    if !v1.is_empty() {
        chart
            .draw_series(v1.iter().map(|p| Circle::new(*p, 7, hollow)))
            .map_err(said)?
            .label("v1")
            .legend(move |(x, y)| Circle::new((x + 10, y), 7, hollow));
    }
    if !v2.is_empty() {
        chart
            .draw_series(v2.iter().map(|p| Circle::new(*p, 6, NEW.filled())))
            .map_err(said)?
            .label("V2")
            .legend(|(x, y)| Circle::new((x + 10, y), 6, NEW.filled()));
    }
    if !other.is_empty() {
        chart
            .draw_series(other.iter().map(|p| Cross::new(*p, 6, OTHER.stroke_width(3))))
            .map_err(said)?
            .label("other formats")
            .legend(|(x, y)| Cross::new((x + 10, y), 6, OTHER.stroke_width(3)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(14)
        .background_style(WHITE)
        .border_style(GRID)
        .label_font(text(18, INK, HPos::Left, VPos::Top))
        .draw()
        .map_err(said)?;

    // V2 names stand left of their points, below the falling line; the others right of theirs, above it. Where
    // points meet, names make room for each other.
    let mut taken: Vec<(std::ops::Range<i32>, i32)> = Vec::new();
    let mut order: Vec<&&CodecError> = rows.iter().collect();
    order.sort_by(|a, b| b.mse.total_cmp(&a.mse));
    for row in order {
        let (x, y) = chart.backend_coord(&(row.bits_per_weight, row.mse));
        let (color, left) = match series(row) {
            Series::V1 => (OLD, false),
            Series::V2 => (NEW, true),
            Series::Other => (OTHER, false),
        };
        let name = label(row);
        let width = 10 * name.len() as i32;
        let (span, mut y) = if left { (x - 12 - width..x - 12, y + 12) } else { (x + 13..x + 13 + width, y - 10) };
        while taken.iter().any(|(s, t)| (t - y).abs() < 18 && s.start < span.end && span.start < s.end) {
            y += if left { 1 } else { -1 };
        }
        let (at, h) = if left { (span.end, HPos::Right) } else { (span.start, HPos::Left) };
        taken.push((span, y));
        root.draw_text(&name, &text(16, color, h, VPos::Center), (at, y)).map_err(said)?;
    }
    Ok(())
}

/// "10⁻⁵" for powers of ten, which are the only labels of a logarithmic axis here.
fn power_of_ten(y: f64) -> String {
    const DIGITS: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    let e = y.log10().round();
    if (y / 10f64.powf(e) - 1.0).abs() > 1e-6 {
        return String::new();
    }
    let digits = format!("{e}");
    let up = digits.chars().map(|c| c.to_digit(10).map_or('⁻', |d| DIGITS[d as usize]));
    "10".chars().chain(up).collect()
}

/// The right panel.
fn changes(panel: &Panel, changes: &[GenerationChange]) -> Result<(), String> {
    let said = |e: DrawingAreaErrorKind<_>| e.to_string();
    let values =
        || changes.iter().flat_map(|c| [c.overall_percent, c.tail_percent]).flatten().filter(|v| v.is_finite());
    if values().next().is_none() {
        let style = text(20, QUIET, HPos::Center, VPos::Center);
        return panel.draw_text("no v1 and V2 format of one width measured", &style, (300, 350)).map_err(said);
    }
    // Room for the numbers at the bars' ends and, below, for the legend.
    let (lo, hi) = values().fold((0f64, 0f64), |(lo, hi), v| (lo.min(v), hi.max(v)));
    let room = (hi - lo).max(1.0);
    let y = lo - 0.24 * room..if hi > 0.0 { hi + 0.1 * room } else { 0.0 };
    let bottom = y.start;
    let mut chart = ChartBuilder::on(panel)
        .margin(16)
        .margin_right(30)
        .caption("Change from v1 to V2", text(22, INK, HPos::Left, VPos::Top))
        .x_label_area_size(58)
        .y_label_area_size(84)
        .build_cartesian_2d(0.0..changes.len() as f64, y)
        .map_err(said)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .bold_line_style(GRID)
        .light_line_style(WHITE)
        .axis_style(QUIET)
        .x_labels(0)
        .y_labels(8)
        .y_label_formatter(&|y| format!("{y:+.0} %").replace("+0 %", "0 %").replace('-', "−"))
        .x_desc("bits per code")
        .y_desc("change of mean squared error (percent)")
        .label_style(text(17, INK, HPos::Center, VPos::Center))
        .axis_desc_style(text(18, INK, HPos::Center, VPos::Center))
        .draw()
        .map_err(said)?;

    type Pick = fn(&GenerationChange) -> Option<f64>;
    let sets: [(&str, RGBColor, f64, Pick); 2] = [
        ("all weights", NEW, 0.07, |c| c.overall_percent),
        ("each tensor's largest 1 %", TAIL, 0.51, |c| c.tail_percent),
    ];
    for (name, color, at, pick) in sets {
        let bars: Vec<(f64, f64)> = changes
            .iter()
            .enumerate()
            .filter_map(|(i, c)| Some((i as f64 + at, pick(c).filter(|v| v.is_finite())?)))
            .collect();
        chart
            .draw_series(bars.iter().map(|&(x, v)| Rectangle::new([(x, 0.0), (x + 0.42, v)], color.filled())))
            .map_err(said)?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 7), (x + 16, y + 7)], color.filled()));
        let number = |&(x, v): &(f64, f64)| {
            let below = v < 0.0;
            let style = text(14, INK, HPos::Center, if below { VPos::Top } else { VPos::Bottom });
            let gap = if below { 5 } else { -5 };
            EmptyElement::at((x + 0.21, v)) + Text::new(format!("{v:.1}").replace('-', "−"), (0, gap), style)
        };
        chart.draw_series(bars.iter().map(number)).map_err(said)?;
    }
    chart
        .draw_series(changes.iter().enumerate().map(|(i, c)| {
            let star = if c.v2.spec().standing == Standing::WireOnly { "*" } else { "" };
            let style = text(17, INK, HPos::Center, VPos::Top);
            EmptyElement::at((i as f64 + 0.5, bottom)) + Text::new(format!("{}{star}", c.bits), (0, 10), style)
        }))
        .map_err(said)?;
    chart.draw_series(LineSeries::new([(0.0, 0.0), (changes.len() as f64, 0.0)], QUIET)).map_err(said)?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerMiddle)
        .margin(12)
        .background_style(WHITE)
        .border_style(GRID)
        .label_font(text(17, INK, HPos::Left, VPos::Top))
        .draw()
        .map_err(said)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Format;
    use crate::report::codec::{Summary, tensor_error};
    use crate::tensor::EncodeOptions;

    fn rows(formats: &[Format]) -> Vec<CodecError> {
        let w: Vec<f32> = (0..64 * 1024u32).map(|i| ((i * i % 7919) as f32 / 7919.0 - 0.5).powi(3)).collect();
        let mut summary = Summary::new();
        for f in formats {
            summary.add(&tensor_error("t", 64, 1024, &w, *f, &EncodeOptions::default()).unwrap());
        }
        summary.rows()
    }

    fn dimensions(path: &Path) -> (u32, u32) {
        let png = std::fs::read(path).unwrap();
        assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
        let at = |i: usize| u32::from_be_bytes(png[i..i + 4].try_into().unwrap());
        (at(16), at(20))
    }

    #[test]
    fn any_set_of_formats_gives_a_whole_png_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chart.png");
        let sets: [&[Format]; 6] = [
            Format::ALL,
            &[Format::F32],
            &[Format::F16],
            &[Format::Mq2V2],
            &[Format::T2, Format::Q8_0],
            &[Format::Mq4V1, Format::Mq4V2],
        ];
        for set in sets {
            codec_chart(&path, &"a long title ".repeat(40), "a\nsource", &rows(set)).unwrap();
            assert_eq!(dimensions(&path), SIZE);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        }
        assert!(matches!(codec_chart(&path, "t", "s", &[]), Err(Error::Usage(_))));
    }

    #[test]
    fn what_was_there_survives_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let rows = rows(&[Format::Mq4V1, Format::Mq4V2]);
        let missing = folder.path().join("no/such/folder/chart.png");
        assert!(matches!(codec_chart(&missing, "t", "s", &rows), Err(Error::Io { action: "create", .. })));
        // A folder in the way: the chart is drawn, but cannot get its name, and its temporary file goes.
        let taken = folder.path().join("taken.png");
        std::fs::create_dir(&taken).unwrap();
        std::fs::write(taken.join("inside"), "x").unwrap();
        assert!(matches!(codec_chart(&taken, "t", "s", &rows), Err(Error::Io { action: "create", .. })));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(taken.join("inside").exists());
    }

    #[test]
    fn a_cut_png_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chart.png");
        codec_chart(&path, "t", "s", &rows(&[Format::Mq4V2])).unwrap();
        let mut file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        check_png(&mut file).unwrap();
        let len = file.metadata().unwrap().len();
        for cut in [1, 12, len] {
            file.set_len(len - cut).unwrap();
            assert!(check_png(&mut file).is_err(), "{cut} bytes less");
        }
    }

    #[test]
    fn numbers_for_people() {
        assert_eq!((short(4.25), short(16.0), short(5.666)), ("4.25".into(), "16".into(), "5.67".into()));
        assert_eq!(power_of_ten(1e-5), "10⁻⁵");
        assert_eq!(power_of_ten(10.0), "10¹");
        assert_eq!(power_of_ten(2e-5), "");
        assert_eq!(count(1, "tensor"), "1 tensor");
        assert_eq!(count(3_538_944, "weight"), "3.5 million weights");
        assert_eq!(fit("abcdef", 4), "abc…");
        assert_eq!(fit("abcd", 4), "abcd");
    }
}
