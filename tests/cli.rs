//! The `bitlane` command as a user meets it: exit codes, messages, JSON, and what is left on the disk when it is
//! interrupted or the disk is full.
#![cfg(feature = "cli")]

mod common;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{Gguf, Hfq, Lcg};
use serde_json::{Value as Json, json};

const BITLANE: &str = env!("CARGO_BIN_EXE_bitlane");

fn bitlane(args: &[&str]) -> Output {
    Command::new(BITLANE).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Runs, expects this exit code, and gives standard output and standard error.
#[track_caller]
fn expect(code: i32, args: &[&str]) -> (String, String) {
    let out = bitlane(args);
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(code), "{args:?}\n{stdout}\n{stderr}");
    (stdout, stderr)
}

#[track_caller]
fn has(text: &str, words: &[&str]) {
    for w in words {
        assert!(text.contains(w), "{w:?} is not in:\n{text}");
    }
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }
    fn path(&self) -> &Path {
        self.0.path()
    }
    fn at(&self, name: &str) -> String {
        self.path().join(name).display().to_string()
    }
    fn write(&self, name: &str, bytes: &[u8]) -> String {
        common::write(self.path(), name, bytes).display().to_string()
    }
}

/// A llama of two matrices, an embedding and a norm.
fn gguf() -> Gguf {
    let mut rng = Lcg::new(1);
    let mut g = Gguf::new("llama");
    g.key("llama.embedding_length", 64).key("llama.attention.head_count", 2).key("llama.block_count", 1);
    g.f32("token_embd.weight", &[10, 64], &rng.weights(640));
    g.f32("blk.0.attn_q.weight", &[64, 64], &rng.weights(4096));
    g.f32("blk.0.ffn_down.weight", &[64, 300], &rng.weights(64 * 300));
    g.f32("output_norm.weight", &[64], &rng.weights(64));
    g
}

#[test]
fn formats() {
    let (text, err) = expect(0, &["formats"]);
    assert!(err.is_empty());
    let line = |name: &str| {
        text.lines()
            .map(str::trim)
            .find(|l| l.starts_with(&format!("{name} ")))
            .unwrap_or_else(|| panic!("{name}:\n{text}"))
    };
    has(line("mq4v2"), &["MQ4G256V2", "44", "4.250", "FWHT-rotated", "supported"]);
    has(line("mq2v2"), &["50", "2.250", "wire format only", "rejected for product quality"]);
    has(line("t2"), &["2.125", "32x256", "plain"]);
    has(line("mq3v1"), &["17", "previous generation"]);
    assert_eq!(text.matches("rejected for product quality").count(), 1);

    let (text, _) = expect(0, &["formats", "--json"]);
    let rows: Vec<Json> = serde_json::from_str(&text).unwrap();
    let row = |name: &str| rows.iter().find(|r| r["name"] == name).unwrap();
    assert_eq!(row("mq6v2")["qt"], 47);
    assert_eq!((&row("t2")["qt"], &row("t2")["block"]), (&Json::Null, &json!([32, 256])));
    assert_eq!(row("q8_0")["ggml"], 8);
    has(row("mq2v2")["status"].as_str().unwrap(), &["rejected for product quality"]);
}

#[test]
fn quantize_and_inspect() {
    let f = Folder::new();
    let (input, out) = (f.write("model.gguf", &gguf().bytes()), f.at("model.hfq"));
    let (text, err) = expect(0, &["quantize", &input, &out]);
    has(&text, &["mq4v2", "q8_0", "f16", &out, "24000 weights"]);
    assert!(err.is_empty(), "{err}");
    assert_eq!(common::files(f.path()), ["model.gguf", "model.hfq"]);

    let (text, _) = expect(0, &["inspect", &out]);
    has(
        &text,
        &[
            "hfq version 1",
            "architecture id 0x0",
            "model.layers.0.self_attn.q_proj.weight",
            "[64, 300]",
            "[64, 512]",
            "no problems found",
        ],
    );
    let (text, _) = expect(0, &["inspect", &out, "--json", "--scan"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    assert_eq!((&j["container"], &j["weights"], &j["problems"]), (&json!("hfq"), &json!(24_000), &json!([])));
    assert_eq!(j["file_bytes"], std::fs::metadata(&out).unwrap().len());
    let q =
        j["tensors"].as_array().unwrap().iter().find(|t| t["name"] == "model.layers.0.mlp.down_proj.weight").unwrap();
    assert_eq!(
        (&q["shape"], &q["stored_shape"], &q["bytes"]),
        (&json!([64, 300]), &json!([64, 512]), &json!(64 * 2 * 136))
    );
    assert_eq!(
        (&q["type"], &q["format"], &q["qt"], &q["wire_name"]),
        (&json!("qt 44 MQ4G256V2"), &json!("mq4v2"), &json!(44), &json!("MQ4G256V2"))
    );
    assert_eq!((&q["weights"], &q["problem"], &q["shard"]), (&json!(64 * 300), &Json::Null, &json!(0)));
    assert_eq!(q["bits_per_weight"], (64 * 2 * 136 * 8) as f64 / (64 * 300) as f64);
    assert!(j.get("reserved_codes").is_none());
    // Blobs lie one after the other from the data offset on, to the end of the file.
    let h = &j["header"];
    assert_eq!(
        (&h["version"], &h["architecture_id"], &h["trailing_bytes"], &h["data_offset"]),
        (&json!(1), &json!(0), &json!(0), &j["tensors"][0]["offset"])
    );
    assert!(h["metadata_keys"].as_array().unwrap().contains(&json!("config")), "{h}");
    let mut at = h["data_offset"].as_u64().unwrap();
    for t in j["tensors"].as_array().unwrap() {
        assert_eq!(t["offset"], at, "{t}");
        at += t["bytes"].as_u64().unwrap();
    }
    assert_eq!(j["file_bytes"], at);

    let args = [
        "quantize",
        &input,
        &out,
        "--format",
        "mq3v2",
        "--pure",
        "--tensor-format",
        "*down_proj*=mq6v2",
        "--threads",
        "2",
    ];
    let (text, _) =
        expect(0, &[&args[..], &["--rounding", "toward-zero", "--skip", "output_norm.weight", "--json"]].concat());
    let j: Json = serde_json::from_str(&text).unwrap();
    let formats: Vec<_> = j["tensors"].as_array().unwrap().iter().map(|t| t["format"].as_str().unwrap()).collect();
    assert_eq!(formats, ["mq3v2", "mq3v2", "mq6v2"]);
    assert_eq!(j["tensors"][1]["from"], "blk.0.attn_q.weight");
    let down = &j["tensors"][2];
    assert_eq!(
        (&down["qt"], &down["shape"], &down["stored_shape"]),
        (&json!(47), &json!([64, 300]), &json!([64, 512])),
        "{down}"
    );
    assert_eq!(j["file_bytes"], std::fs::metadata(&out).unwrap().len());
    has(j["warnings"][0].as_str().unwrap(), &["output_norm.weight is left out"]);

    // GGUF and safetensors can be looked at too, also as a folder.
    let (text, _) = expect(0, &["inspect", &input]);
    has(&text, &["GGUF version 3", "architecture llama", "blk.0.attn_q.weight", "F32", "32.000", "no problems found"]);
    assert!(!text.contains("note:"), "{text}");
    let (text, _) = expect(0, &["inspect", &input, "--json"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    let h = &j["header"];
    assert_eq!((&h["version"], &h["architecture"], &h["keys"]), (&json!(3), &json!("llama"), &json!(4)), "{h}");
    let t = &j["tensors"][0];
    assert_eq!((&t["type"], &t["format"], &t["bytes"]), (&json!("F32"), &json!("f32"), &json!(2560)));
    assert_eq!((&t["shape"], &t["stored_shape"]), (&json!([10, 64]), &json!([10, 64])));
    let folder = f.path().join("hf");
    std::fs::create_dir(&folder).unwrap();
    let bytes = common::safetensors(&[("a.weight", "BF16", &[2, 4], vec![0; 16])]);
    common::write(&folder, "model.safetensors", &bytes);
    common::write(&folder, "config.json", b"{}");
    let (text, _) = expect(0, &["inspect", &folder.display().to_string()]);
    has(&text, &["safetensors, beside it: config.json", "a.weight", "BF16"]);
    let (text, _) = expect(0, &["inspect", &folder.display().to_string(), "--json"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    assert_eq!(j["header"], json!({ "sidecars": ["config.json"] }));
}

/// MQ2V2 exists as bytes only; whoever meets it is told.
#[test]
fn mq2v2_is_never_presented_as_usable() {
    let f = Folder::new();
    let (input, out) = (f.write("model.gguf", &gguf().bytes()), f.at("model.hfq"));
    let (text, err) = expect(0, &["quantize", &input, &out, "--format", "mq2v2"]);
    let line = |name: &str| text.lines().find(|l| l.trim().starts_with(name)).unwrap();
    assert!(line("mq2v2").ends_with("wire format only: measured and rejected for product quality"), "{text}");
    assert!(line("f16").ends_with("16.000"), "{text}");
    has(&err, &["bitlane: warning: mq2v2: wire format only: measured and rejected for product quality"]);
    let (text, _) = expect(0, &["quantize", &input, &out, "--format", "MQ2G256V2", "--json"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    has(&j["warnings"].to_string(), &["mq2v2", "rejected for product quality"]);
    let (text, _) = expect(0, &["inspect", &out]);
    has(&text, &["note: mq2v2: wire format only", "rejected for product quality"]);
}

#[test]
fn problems_are_exit_code_3() {
    let f = Folder::new();
    let mut g = gguf();
    g.tensor("tq2", &[1, 256], 35, vec![0; 66]);
    let (text, _) = expect(3, &["inspect", &f.write("t.gguf", &g.bytes())]);
    has(&text, &["1 problem:\n  tq2: ggml type 35 TQ2_0: not supported\n"]);
    has(&text, &["note: quantize would refuse it: ", "tensor tq2: "]);
    // Of some types not even the size is known.
    g.tensor("tq3", &[1, 256], 36, vec![0; 66]);
    let path = f.write("t.gguf", &g.bytes());
    let (text, _) = expect(3, &["inspect", &path]);
    has(&text, &["2 problems:\n  tq2: ", "\n  tq3: "]);
    let (text, _) = expect(3, &["inspect", &path, "--json"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    let t = |name: &str| j["tensors"].as_array().unwrap().iter().find(|t| t["name"] == name).unwrap();
    assert_eq!((&t("tq2")["type"], &t("tq2")["bytes"]), (&json!("TQ2_0"), &json!(66)));
    assert_eq!((&t("tq2")["format"], &t("tq2")["qt"], &t("tq2")["wire_name"]), (&Json::Null, &Json::Null, &Json::Null));
    assert_eq!((&t("tq3")["bytes"], &t("tq3")["bits_per_weight"]), (&Json::Null, &Json::Null));
    has(t("tq3")["problem"].as_str().unwrap(), &["ggml type 36"]);

    let mut h = Hfq::new(0, "{}");
    h.tensor("lloyd", 20, &[1, 256], 256, vec![0; 10]).tensor("ok", 1, &[2], 0, vec![0; 4]);
    let (text, _) = expect(3, &["inspect", &f.write("t.hfq", &h.bytes()), "--json"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    assert_eq!(j["problems"], json!(["lloyd: qt 20 MQ3G256Lloyd: not supported"]));
    let t = &j["tensors"][0];
    assert_eq!(
        (&t["qt"], &t["format"], &t["problem"]),
        (&json!(20), &Json::Null, &json!("qt 20 MQ3G256Lloyd: not supported"))
    );

    // A model that cannot be converted can be looked at.
    let path = f.write("other.gguf", &Gguf::new("mamba").f32("a", &[1], &[0.0]).bytes());
    let (text, _) = expect(0, &["inspect", &path]);
    has(&text, &["note: quantize would refuse it: ", "mamba", "no problems found"]);

    // Legal, but worth knowing; and what only a scan can see.
    let mut h = Hfq::new(0, "{}");
    h.tensor("ok", 1, &[3], 0, common::f16_bytes(&[1.0, f32::NAN, f32::INFINITY]));
    let path = f.write("t.hfq", &[&h.bytes()[..], b"more"].concat());
    let (text, _) = expect(0, &["inspect", &path]);
    has(&text, &["note: 4 bytes after the last blob", "no problems found"]);
    let (text, _) = expect(0, &["inspect", &path, "--json"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    assert_eq!((&j["header"]["trailing_bytes"], &j["problems"]), (&json!(4), &json!([])));
    let path = f.write("t.hfq", &h.bytes());
    expect(0, &["inspect", &path]);
    let (text, _) = expect(3, &["inspect", &path, "--scan"]);
    has(&text, &["ok: 2 weights are not finite"]);

    // A raw t2 stream: one tile, then a tile with a reserved code and an infinite scale.
    let mut tile = vec![0x55u8; 2048];
    tile.extend(half::f16::from_f32(0.5).to_le_bytes().repeat(64));
    let path = f.write("t.t2", &tile);
    let (text, _) = expect(0, &["inspect", &path, "--t2", "32x256"]);
    has(&text, &["t2 [32, 256], 1 tile, 2.125 bits per weight, 0 reserved codes"]);
    tile[5] |= 3;
    tile[2049] = 0x7c;
    tile[2048] = 0;
    let (text, _) = expect(3, &["inspect", &f.write("t.t2", &tile), "--t2", "32x256", "--json"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    assert_eq!((&j["reserved_codes"], &j["non_finite_scales"]), (&json!(1), &json!(1)));
    let (_, err) = expect(1, &["inspect", &path, "--t2", "64x256"]);
    has(&err, &[&format!("bitlane: {path}: tensor t.t2: "), "2176", "4352"]);
}

/// Four matrices of a llama, of which one has whole groups; a norm; and a matrix of a type that is not read.
fn mixed() -> Gguf {
    let mut g = gguf();
    let mut rng = Lcg::new(2);
    g.f32("blk.0.attn_output.weight", &[64, 256], &rng.weights(64 * 256));
    g.tensor("blk.0.ffn_up.weight", &[2, 256], 34, vec![0; 108]);
    g
}

#[test]
fn compare() {
    let f = Folder::new();
    let input = f.write("model.gguf", &mixed().bytes());
    let (text, err) = expect(0, &["compare", &input]);
    has(&text, &["4 matrices, 40320 weights", "mq2v2", "rejected for product quality", "mq6v1", "mq4c"]);
    has(&text, &["change from v1 to V2, all 4 matrices:", "the 1 matrix whose K is a multiple of 256:"]);
    has(&text, &["equal up to signs", "V2's second scale gains less"]);
    assert_eq!(text.matches("MSE, largest 1 %").count(), 3, "{text}");
    has(&err, &["bitlane: warning: blk.0.ffn_up.weight is left out: ggml type 34 TQ1_0"]);

    let json = |args: &[&str]| -> Json {
        serde_json::from_str(&expect(0, &[&["compare", &input, "--json"], args].concat()).0).unwrap()
    };
    let all = json(&[]);
    assert_eq!(
        (&all["matrices"], &all["matrices_unpadded"], &all["rounding"]),
        (&json!(4), &json!(1), &json!("nearest-even"))
    );
    assert_eq!((all["changes"].as_array().unwrap().len(), all["changes_unpadded"].as_array().unwrap().len()), (5, 5));
    assert_ne!(all["changes"], all["changes_unpadded"]);

    // A pattern finds the file's name and the model's; the matrix without padding has one table.
    for pattern in ["blk.0.attn_output*", "*.self_attn.o_proj.weight"] {
        let one = json(&["--tensor", pattern]);
        assert_eq!((&one["matrices"], &one["tensors"][0]["name"]), (&json!(1), &json!("blk.0.attn_output.weight")));
        assert_eq!((&one["changes"], &one["changes"]), (&all["changes_unpadded"], &one["changes_unpadded"]));
    }
    let (text, _) = expect(0, &["compare", &input, "--tensor", "*o_proj*"]);
    has(&text, &["1 matrix, 16384 weights", "change from v1 to V2:\n"]);
    assert!(!text.contains("equal up to signs"), "{text}");
    let (text, _) = expect(0, &["compare", &input, "--tensor", "*q_proj*"]);
    has(&text, &["all 1 matrix:", "no matrix has a K that is a multiple of 256", "equal up to signs"]);
    let truncated = json(&["--rounding", "toward-zero", "--tensor", "*o_proj*"]);
    assert_eq!(truncated["rounding"], "toward-zero");
    assert_ne!(truncated["formats"], json(&["--tensor", "*o_proj*"])["formats"]);

    // Patterns that measure nothing.
    let usage = |args: &[&str]| expect(2, &[&["compare", &input], args].concat()).1;
    has(
        &usage(&["--tensor", "*o_proj*", "--tensor", "*nothing*"]),
        &[&input, "pattern \"*nothing*\" matches no tensor"],
    );
    has(&usage(&["--tensor", "output_norm*"]), &["pattern \"output_norm*\" matches no matrix"]);
    has(&usage(&["--tensor", "*up_proj*"]), &["no matrix to measure", "\"*up_proj*\"", "ggml type 34 TQ1_0"]);
    usage(&["--toward-zero"]);
    // Of an architecture that is not known, names are the file's only.
    let mut g = Gguf::new("mamba");
    let other = f.write("other.gguf", &g.f32("a.weight", &[2, 256], &[0.5; 512]).bytes());
    expect(0, &["compare", &other, "--tensor", "a.*"]);

    let (text, _) = expect(0, &["compare", "--help"]);
    has(
        &text.split_whitespace().collect::<Vec<_>>().join(" "),
        &["equal up to signs", "a few times the largest tensor as f32", "`bitlane formats`"],
    );
    let (text, _) = expect(0, &["quantize", "--help"]);
    has(&text, &["`bitlane formats`"]);
}

/// Whatever a file calls its tensors, its text stays on its line and sends nothing to the terminal; JSON has it as it is.
#[test]
fn control_characters_stay_in_the_file() {
    let f = Folder::new();
    let name = "evil\n\u{1b}[31m\u{9b}weight";
    let mut g = gguf();
    g.tensor(name, &[2, 256], 35, vec![0; 132]);
    let input = f.write("t.gguf", &g.bytes());
    let shown = "evil\u{fffd}\u{fffd}[31m\u{fffd}weight";
    let clean = |text: &str| assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    let (text, _) = expect(3, &["inspect", &input]);
    clean(&text);
    has(&text, &[&format!("\n  {shown}: ggml type 35"), &format!("tensor {shown}: ")]);
    assert_eq!(text.lines().filter(|l| l.contains(shown)).count(), 3, "{text}");
    let (text, _) = expect(3, &["inspect", &input, "--json"]);
    let j: Json = serde_json::from_str(&text).unwrap();
    assert!(j["tensors"].as_array().unwrap().iter().any(|t| t["name"] == name));

    let (_, err) = expect(1, &["quantize", &input, &f.at("out.hfq")]);
    clean(&err);
    assert_eq!(err.lines().count(), 1);
    has(&err, &[shown]);
    let (_, err) = expect(0, &["quantize", &input, &f.at("out.hfq"), "--skip", "evil*"]);
    clean(&err);
    has(&err, &[&format!("bitlane: warning: tensor {shown} is left out")]);
    let (_, err) = expect(0, &["compare", &input]);
    clean(&err);
    has(&err, &[&format!("bitlane: warning: {shown} is left out")]);
}

/// The result is on the disk, complete; only saying so failed.
#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_output_is_an_error_but_the_file_is_whole() {
    let f = Folder::new();
    let (input, out) = (f.write("model.gguf", &gguf().bytes()), f.at("out.hfq"));
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = Command::new(BITLANE).args(["quantize", &input, &out]).stdout(full).output().unwrap();
    let err = String::from_utf8(run.stderr).unwrap();
    assert_eq!(run.status.code(), Some(1), "{err}");
    has(&err, &["bitlane: cannot write standard output: "]);
    assert!(!err.contains("nothing was written"), "{err}");
    expect(0, &["inspect", &out, "--scan"]);
}

/// An empty tensor's other dimension may be anything: a scan must not walk it.
#[test]
fn scanning_empty_tensors_takes_no_time() {
    let f = Folder::new();
    let mut g = gguf();
    g.tensor("a", &[1 << 62, 0], 0, vec![]).tensor("b", &[0, 1 << 62], 0, vec![]);
    expect(0, &["inspect", &f.write("t.gguf", &g.bytes()), "--scan"]);
}

#[test]
fn errors_name_file_and_tensor() {
    let f = Folder::new();
    let out = f.at("out.hfq");
    let good = f.write("good.gguf", &gguf().bytes());

    // 1: something is wrong with the files.
    let missing = f.at("missing.gguf");
    let (_, err) = expect(1, &["inspect", &missing]);
    has(&err, &["bitlane: cannot open ", &missing]);
    assert_eq!(err.matches(&missing).count(), 1, "{err}");
    expect(1, &["quantize", &missing, &out]);
    let junk = f.write("junk.bin", b"not a model at all");
    for args in [&["inspect", &junk][..], &["quantize", &junk, &out]] {
        let (_, err) = expect(1, args);
        has(&err, &[&junk, "neither GGUF, .hfq nor safetensors"]);
    }
    let mut bytes = gguf().bytes();
    bytes.truncate(1000);
    let short = f.write("short.gguf", &bytes);
    let (_, err) = expect(1, &["inspect", &short]);
    has(&err, &[&short, "not a valid GGUF file: at byte ", "past the end"]);
    let mut g = gguf();
    let mut w = vec![0.5f32; 64 * 64];
    w[3 * 64 + 9] = f32::NAN;
    g.f32("blk.0.attn_v.weight", &[64, 64], &w);
    let nan = f.write("nan.gguf", &g.bytes());
    let (_, err) = expect(1, &["quantize", &nan, &out]);
    let wanted = "tensor blk.0.attn_v.weight: value NaN at row 3, column 9";
    has(&err, &[&format!("bitlane: {nan}: {wanted}")]);
    let (_, err) = expect(1, &["compare", &nan, "--formats", "mq4"]);
    has(&err, &[&format!("bitlane: {nan}: tensor blk.0.attn_v.weight: value NaN at row 3, column 9")]);
    // Also where the file's name happens to be in the message anyway.
    std::fs::copy(&nan, f.at("row")).unwrap();
    let run = Command::new(BITLANE).current_dir(f.path()).args(["quantize", "row", "out.hfq"]).output().unwrap();
    assert_eq!(String::from_utf8(run.stderr).unwrap().trim_end(), format!("bitlane: row: {wanted} is not finite"));
    let mut g = gguf();
    g.tensor("blk.0.ffn_up.weight", &[1, 256], 34, vec![0; 54]);
    let tq1 = f.write("tq1.gguf", &g.bytes());
    let (_, err) = expect(1, &["quantize", &tq1, &out]);
    has(&err, &[&tq1, "blk.0.ffn_up.weight", "ggml type 34 TQ1_0"]);
    let other = f.write("other.gguf", &Gguf::new("mamba").f32("a", &[1], &[0.0]).bytes());
    let (_, err) = expect(1, &["quantize", &other, &out]);
    has(&err, &[&other, "mamba"]);
    let (_, err) = expect(1, &["quantize", &good, &out, "--format", "t2"]);
    has(&err, &[&format!("bitlane: {good}: tensor "), "t2"]);
    let (_, err) = expect(1, &["quantize", &good, &f.at("no folder/out.hfq")]);
    has(&err, &["no folder/out.hfq"]);
    assert!(err.starts_with("bitlane: cannot ") && !err.contains(&good), "{err}");

    // 2: the command line makes no sense.
    let (_, err) = expect(2, &["quantize", &good, &out, "--format", "mq7"]);
    has(&err, &["mq7", "mq4v2"]);
    let (_, err) = expect(2, &["quantize", &good, &out, "--skip", "*nothing*"]);
    has(&err, &[&good, "\"*nothing*\" matches no tensor"]);
    let (_, err) = expect(2, &["quantize", &good, &out, "--tensor-format", "*q_proj*"]);
    has(&err, &["PATTERN=FORMAT"]);
    let (_, err) = expect(2, &["quantize", &good, &out, "--tensor-format", "*q_proj*=mq9"]);
    has(&err, &["mq9"]);
    let (_, err) = expect(2, &["inspect", &good, "--t2", "32"]);
    has(&err, &["MxK"]);
    for args in
        [&[][..], &["quantize"], &["quantize", &good], &["inspect"], &["frobnicate"], &["inspect", &good, "--nope"]]
    {
        expect(2, args);
    }
    for args in [["--help", ""], ["--version", ""], ["help", "quantize"]] {
        expect(0, &args[..if args[1].is_empty() { 1 } else { 2 }]);
    }
    assert!(
        common::files(f.path()).iter().all(|n| n != "out.hfq" && !n.starts_with(".bitlane-")),
        "{:?}",
        common::files(f.path())
    );
}

/// Nothing of a run that did not succeed may be visible: the folder is as it was, byte for byte.
#[cfg(unix)]
struct Before {
    folder: Folder,
    out: std::path::PathBuf,
}

#[cfg(unix)]
impl Before {
    fn new() -> Before {
        let folder = Folder::new();
        let out = folder.path().join("out.hfq");
        std::fs::write(&out, b"what was there before").unwrap();
        Before { folder, out }
    }
    #[track_caller]
    fn unchanged(&self) {
        let names = common::files(self.folder.path());
        assert!(names.iter().all(|n| n == "out.hfq" || n == "big.safetensors"), "left over: {names:?}");
        assert_eq!(std::fs::read(&self.out).unwrap(), b"what was there before");
    }
}

/// A safetensors file of zeros that takes no room on the disk.
#[cfg(unix)]
fn sparse(folder: &Path, rows: u64) -> String {
    let header =
        format!(r#"{{"a.weight":{{"dtype":"F32","shape":[{rows},1024],"data_offsets":[0,{}]}}}}"#, rows * 4096);
    let path = common::write(folder, "big.safetensors", &common::safetensors_raw(header.as_bytes(), &[]));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + rows * 4096).unwrap();
    path.display().to_string()
}

#[cfg(unix)]
#[test]
fn an_interrupt_leaves_nothing_behind() {
    use std::os::unix::process::ExitStatusExt;
    use std::time::{Duration, Instant};

    for signal in ["INT", "TERM"] {
        let before = Before::new();
        // 2 GB of zeros: seconds of work, of which a fraction is done before the signal arrives.
        let input = sparse(before.folder.path(), 1 << 19);
        let mut child = Command::new(BITLANE)
            .args(["quantize", &input, before.out.to_str().unwrap(), "--format", "mq6v2", "--threads", "1"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Its work has begun when its temporary file is there.
        let start = Instant::now();
        while !common::files(before.folder.path()).iter().any(|n| n.starts_with(".bitlane-") && n.contains(".partial"))
        {
            assert!(start.elapsed() < Duration::from_secs(60), "no temporary file");
            assert!(child.try_wait().unwrap().is_none(), "it ended before it began");
            std::thread::sleep(Duration::from_millis(1));
        }
        let sent = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let out = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&out.stderr);
        assert_eq!((out.status.code(), out.status.signal()), (Some(130), None), "{signal}: {err}");
        has(&err, &["cancelled; nothing was written"]);
        before.unchanged();
    }
}

/// A limit on file sizes stands for the full disk: the system refuses to make the file as long as it must be.
#[cfg(unix)]
#[test]
fn a_file_that_cannot_grow_leaves_nothing_behind() {
    let before = Before::new();
    let input = sparse(before.folder.path(), 512);
    // 512-byte blocks: far less than the 278,528 bytes of mq4v2.
    let script = r#"trap '' XFSZ; ulimit -f 64; exec "$0" quantize "$1" "$2""#;
    let out = Command::new("sh").args(["-c", script, BITLANE, &input]).arg(&before.out).output().unwrap();
    let err = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{err}");
    has(&err, &["out.hfq", "cannot ", "large"]);
    before.unchanged();
}

/// A disk that is really full: a small tmpfs in a mount namespace of our own, where the system allows one. There the
/// file gets its length and it is a later write that fails.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_nothing_behind() {
    let f = Folder::new();
    let input = sparse(f.path(), 512);
    let disk = f.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let script = r#"
        mount -t tmpfs -o size=128k none "$2" || exit 77
        printf 'what was there before' > "$2/out.hfq"
        "$0" quantize "$1" "$2/out.hfq"
        code=$?
        ls -A "$2"
        cat "$2/out.hfq"
        exit $code"#;
    let unshare = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script, BITLANE, &input])
        .arg(&disk)
        .output();
    let Some(out) = unshare
        .ok()
        .filter(|o| !matches!(o.status.code(), Some(77 | 126 | 127)))
        .filter(|o| !o.stderr.starts_with(b"unshare"))
    else {
        println!("skipped: no mount namespaces here");
        return;
    };
    let (text, err) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert_eq!(out.status.code(), Some(1), "{text}{err}");
    has(&err, &["out.hfq", "cannot write", "No space left"]);
    assert_eq!(text, "out.hfq\nwhat was there before");
}

/// `bitlane inspect … | head -1`: the reader goes away while there is still much to say.
#[cfg(unix)]
#[test]
fn a_closed_pipe_is_no_error() {
    use std::io::Read;

    let f = Folder::new();
    let mut g = gguf();
    for i in 0..5000 {
        g.f32(&format!("a tensor with a rather long name, number {i}"), &[1], &[0.0]);
    }
    let input = f.write("many.gguf", &g.bytes());
    for extra in [&[][..], &["--json"]] {
        let mut child = Command::new(BITLANE)
            .args([&["inspect", &input], extra].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // One byte, then close: far more than a pipe holds is still to come.
        child.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let out = child.wait_with_output().unwrap();
        assert_eq!((out.status.code(), String::from_utf8_lossy(&out.stderr).as_ref()), (Some(0), ""));
    }
}
