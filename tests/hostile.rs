//! Hostile bytes: whatever a file says, opening and reading it must end in values or in an error that names the
//! file and the place: never in a panic, and never in more memory than a small multiple of the file.
//!
//! Memory is measured, not argued: this binary's allocator counts the bytes that the current thread holds.
#![cfg(feature = "ggml-quants")] // some of the tensors that must stay readable are ggml's blocks

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use bitlane::container::{Bytes, Encoding};
use bitlane::quantize::{self, Recipe};
use bitlane::{Container, Error, Format, QuantTensor};
use common::{Gguf, Hfq, Kv, Laid, Lcg};
use serde_json::json;

/// Counts what the current thread has allocated. Reading a container is single-threaded, so that tests that run
/// beside each other do not disturb the count.
struct Counting;

thread_local! {
    // No destructor and no lazy start: the allocator may be called at any time in a thread's life.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    LIVE.with(|live| {
        live.set(live.get() + bytes);
        PEAK.with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may be held at once while it is copied.
        count(size as isize);
        count(-(layout.size() as isize));
        unsafe { System.realloc(old, layout, size) }
    }
    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The most bytes that `f` held at a time beyond what was held before.
fn peak<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let value = f();
    (value, (PEAK.get() - before) as usize)
}

/// Opening may take this many bytes, and this many times the file's length. Measured at the worst files that we
/// know how to write, see `memory_is_bounded_by_the_size_of_the_file`.
const OPEN: (usize, usize) = (4 << 10, 24);
/// Reading a tensor may take this many bytes, and this many times the file's length: the raw bytes (1), f32 values of
/// mq2v2 (1024 bytes from 72: 14.3), and the same again before the inverse rotation where a tensor is one long row.
const READ: (usize, usize) = (4 << 10, 30);

fn within((fixed, times): (usize, usize), used: usize, len: usize, what: &str) {
    let bound = fixed + times * len;
    assert!(used <= bound, "{what}: {used} bytes held at once for a file of {len} bytes, more than {bound}");
}

/// Opens bytes under the memory bound.
fn open(name: &str, bytes: Vec<u8>) -> Result<Container, Error> {
    let len = bytes.len();
    let bytes = Bytes::memory(name, bytes);
    let (result, used) = peak(|| Container::from_bytes(bytes));
    within(OPEN, used, len, &format!("opening {name}"));
    result
}

/// Reads every tensor in both ways under the memory bound; gives how many could be read.
fn read_all(file: &Container) -> usize {
    let len = file.file_len() as usize;
    let mut read = 0;
    for t in file.tensors() {
        let (rows, used) = peak(|| file.rows(t).and_then(|r| r.read_all()));
        within(READ, used, len, &format!("reading tensor {}", t.name));
        let (loaded, used) = peak(|| file.load(&t.name));
        within(READ, used, len, &format!("loading tensor {}", t.name));
        match (&t.encoding, rows) {
            (Encoding::Refused(_), Ok(_)) => panic!("tensor {} was refused and read", t.name),
            (_, Ok(values)) => {
                assert_eq!(values.len() as u64, t.weights(), "{}", t.name);
                read += 1;
                if let Ok(loaded) = loaded {
                    // NaN is not equal to itself; bits are.
                    let same = loaded.to_f32().iter().map(|v| v.to_bits()).eq(values.iter().map(|v| v.to_bits()));
                    assert!(same, "tensor {}: rows() and load() differ", t.name);
                }
            }
            (_, Err(e)) => {
                // An AWQ sidecar at fault is named itself.
                let stem = t.name.strip_suffix(".weight").unwrap_or(&t.name);
                assert!(e.to_string().contains(stem), "{e}: does not name tensor {}", t.name);
            }
        }
    }
    read
}

/// The file must be refused, with an error that has every one of `words`, and the file's name.
#[track_caller]
fn refused(name: &str, bytes: Vec<u8>, words: &[&str]) {
    let text = match open(name, bytes) {
        Err(e) => e.to_string(),
        Ok(_) => panic!("{name} was accepted; expected an error with {words:?}"),
    };
    assert!(text.starts_with(&format!("{name}: ")), "{text}: does not begin with the file's name");
    for w in words {
        assert!(text.contains(w), "{text}: does not say {w:?}");
    }
}

/// As [`refused`], at this offset.
#[track_caller]
fn refused_at(name: &str, bytes: Vec<u8>, offset: usize, words: &[&str]) {
    let place = format!("at byte {offset}: ");
    refused(name, bytes, &[&[place.as_str()], words].concat());
}

/// A tensor is refused on reading, by name and number, while the file opens and the others can be read.
#[track_caller]
fn refused_on_reading(bytes: Vec<u8>, tensor: &str, words: &[&str]) {
    let file = open("file", bytes).unwrap();
    let t = file.find(tensor).unwrap();
    for e in [file.rows(t).err().unwrap(), file.load(tensor).err().unwrap()] {
        let text = e.to_string();
        assert!(text.starts_with(&format!("file: tensor {tensor}: ")), "{text}");
        for w in words {
            assert!(text.contains(w), "{text}: does not say {w:?}");
        }
    }
    assert_eq!(read_all(&file), file.tensors().len() - 1);
}

const BIG: [u64; 5] = [u64::MAX, 1 << 63, i64::MAX as u64, 1 << 32, 1 << 20];

// The small valid files that everything starts from: every kind of value and every kind of tensor.

fn gguf_model() -> Gguf {
    let mut rng = Lcg::new(1);
    let mut g = Gguf::new("test");
    g.key("general.alignment", 32)
        .key("test.int", Kv::I32(-5))
        .key("test.long", Kv::U64(1 << 40))
        .key("test.float", Kv::F32(0.5))
        .key("test.bool", Kv::Bool(true))
        .key("test.strings", Kv::Strs(vec!["a".into(), String::new(), "čau".into()]))
        .key("test.floats", Kv::F32s(vec![1.0, f32::NAN, -3.0]))
        .key("test.bytes", Kv::U8s(vec![1, 2, 3]));
    g.f32("f32", &[3, 4], &rng.weights(12));
    g.tensor("q2k", &[1, 256], 10, rng.bytes(84));
    g.tensor("q40", &[2, 32], 2, rng.bytes(36));
    g.tensor("q80", &[2, 64], 8, common::q8_0(&mut rng, 128).0);
    g.tensor("f16", &[5], 1, common::f16_bytes(&rng.weights(5)));
    g.tensor("scalar", &[], 0, vec![0, 0, 128, 63]);
    g.tensor("tq2", &[1, 256], 35, rng.bytes(66));
    g.tensor("last", &[2, 2, 3], 30, common::bf16_bytes(&rng.weights(12)));
    g
}

fn gguf() -> Laid {
    gguf_model().lay()
}

fn safetensors() -> Vec<u8> {
    let mut rng = Lcg::new(2);
    common::safetensors(&[
        ("f32", "F32", &[3, 4], common::f32_bytes(&rng.weights(12))),
        ("f16", "F16", &[5], common::f16_bytes(&rng.weights(5))),
        ("i64", "I64", &[2], rng.bytes(16)),
        ("empty", "F32", &[0, 7], vec![]),
        ("bf16", "BF16", &[2, 2, 3], common::bf16_bytes(&rng.weights(12))),
        ("scalar", "F32", &[], vec![0, 0, 128, 63]),
    ])
}

/// Awkward but legal JSON: braces and quotes in strings, escapes, nesting.
const JSON: &str =
    r#"{"a":"}{\"]","b":[{"c":"\\"},[[]]],"architecture":"test","bitlane":{"logical_k":{"pad.weight":200}}}"#;

fn hfq_model() -> Hfq {
    let mut rng = Lcg::new(3);
    let mut h = Hfq::new(0, JSON);
    h.alignment = 64;
    h.tensor("norm.weight", 1, &[5], 0, common::f16_bytes(&rng.weights(5)));
    h.tensor("embed", 3, &[2, 64], 32, common::q8_0(&mut rng, 128).0);
    h.tensor("pad.weight", 50, &[2, 256], 256, rng.bytes(144));
    h.tensor("pad.awq_scale.weight", 1, &[200], 0, common::f16_bytes(&[1.5; 200]));
    h.tensor("lloyd", 20, &[2, 256], 256, rng.bytes(100));
    h.tensor("last.weight", 44, &[1, 256], 256, rng.bytes(136));
    h
}

fn hfq() -> Laid {
    hfq_model().lay()
}

#[test]
fn the_valid_files_are_valid() {
    let file = open("a", gguf().bytes).unwrap();
    assert_eq!((file.kind(), file.tensors().len(), read_all(&file)), ("GGUF", 8, 7));
    let file = open("b", safetensors()).unwrap();
    assert_eq!((file.kind(), file.tensors().len(), read_all(&file)), ("safetensors", 6, 5));
    let file = open("c", hfq().bytes).unwrap();
    assert_eq!((file.kind(), file.tensors().len(), read_all(&file)), ("hfq", 6, 5));
}

#[test]
fn every_truncation_is_refused() {
    for (name, bytes) in [("t.gguf", gguf().bytes), ("t.safetensors", safetensors()), ("t.hfq", hfq().bytes)] {
        for n in 0..bytes.len() {
            let place = if n < 9 { "" } else { "at byte " };
            refused(name, bytes[..n].to_vec(), &[place]);
        }
        open(name, bytes).unwrap();
    }
}

#[test]
fn other_files() {
    for head in [&b""[..], b"GGU", b"GGUX\x03\0\0\0", b"FUGG", b"HFQN", b"PK\x03\x04", b"{}", &[0; 64], &[255; 64]] {
        refused(
            "some.bin",
            head.to_vec(),
            &["neither GGUF, .hfq nor safetensors", &format!("{:02x?}", &head[..head.len().min(8)])],
        );
    }
    // A safetensors header that is absurdly long is not taken for one.
    let long = [&100_000_001u64.to_le_bytes()[..], b"{}"].concat();
    refused("some.bin", long, &["neither GGUF, .hfq nor safetensors"]);
}

#[test]
fn gguf_versions_and_counts() {
    let f = gguf();
    for (version, word) in
        [(0, "big-endian"), (1, "version 1 is not"), (4, "version 4"), (3 << 24, "big-endian"), (2 << 24, "big-endian")]
    {
        refused_at("v.gguf", f.with("version", &u32::to_le_bytes(version)), 4, &["GGUF", word]);
    }
    assert!(open("v.gguf", f.with("version", &2u32.to_le_bytes())).is_ok());
    for n in BIG {
        refused_at(
            "n.gguf",
            f.with("tensor count", &n.to_le_bytes()),
            8,
            &[&n.to_string(), "tensor infos", "cannot fit"],
        );
        refused_at(
            "n.gguf",
            f.with("key count", &n.to_le_bytes()),
            16,
            &[&n.to_string(), "key-value pairs", "cannot fit"],
        );
    }
    // One more than there are, and one less, shift everything after them.
    assert!(open("n.gguf", f.with("tensor count", &9u64.to_le_bytes())).is_err());
    assert!(open("n.gguf", f.with("key count", &8u64.to_le_bytes())).is_err());
    // Nothing at all is a valid file.
    let empty = [&b"GGUF\x03\0\0\0"[..], &[0; 16]].concat();
    assert_eq!(open("e.gguf", empty.clone()).unwrap().tensors().len(), 0);
    refused("e.gguf", empty[..23].to_vec(), &["at byte 16: ", "key count"]);
}

#[test]
fn gguf_keys_and_values() {
    let f = gguf();
    let at = |place: &str| f.at(place);
    for n in [0, 65_536, 1 << 20, 1 << 63, u64::MAX] {
        refused_at("k.gguf", f.with("test.int.len", &n.to_le_bytes()), at("test.int.len"), &["key of", &n.to_string()]);
    }
    refused_at(
        "k.gguf",
        f.with("test.int.len", &65_535u64.to_le_bytes()),
        at("test.int.key"),
        &["key takes 65535 bytes"],
    );
    refused_at("k.gguf", f.with("test.int.key", b"te\xff"), at("test.int.key") + 2, &["key is not UTF-8"]);
    for kind in [13u32, 99, u32::MAX] {
        let word = format!("value type {kind}");
        refused_at("k.gguf", f.with("test.int.type", &kind.to_le_bytes()), at("test.int.type"), &["test.int", &word]);
    }
    let name = "general.architecture";
    let value = at("general.architecture.value");
    for n in BIG {
        refused_at(
            "s.gguf",
            f.with("general.architecture.value", &n.to_le_bytes()),
            value + 8,
            &[name, &n.to_string()],
        );
    }
    refused_at(
        "s.gguf",
        f.with("general.architecture.value", &[4, 0, 0, 0, 0, 0, 0, 0, b't', 0xc0]),
        value + 9,
        &[name, "UTF-8"],
    );
    for (key, each) in [("test.floats", "4"), ("test.strings", "8"), ("test.bytes", "1")] {
        let place = format!("{key}.value");
        for n in BIG {
            let mut bytes = f.bytes.clone();
            bytes[at(&place) + 4..][..8].copy_from_slice(&n.to_le_bytes());
            let words = [&*n.to_string(), "cannot fit", &format!("at least {each} bytes")];
            refused_at("a.gguf", bytes, at(&format!("{key}.type")), &words);
        }
        // Arrays of arrays, and of types that there are not.
        for element in [9u32, 13, 77] {
            let words = [key, &format!("array of type {element}")];
            refused_at("a.gguf", f.with(&place, &element.to_le_bytes()), at(&format!("{key}.type")), &words);
        }
    }
    // The second string of an array, too long.
    let mut bytes = f.bytes.clone();
    let second = at("test.strings.value") + 12 + 9;
    bytes[second..][..8].copy_from_slice(&u64::MAX.to_le_bytes());
    refused_at("a.gguf", bytes, second + 8, &["test.strings"]);

    let mut g = gguf_model();
    g.key("test.int", 7);
    let twice = g.lay();
    refused_at("d.gguf", twice.bytes.clone(), twice.at("test.int.len"), &["key test.int appears twice"]);
}

#[test]
fn gguf_alignment() {
    for bad in [
        Kv::U32(0),
        Kv::U32(3),
        Kv::U32(u32::MAX),
        Kv::U64(1 << 60),
        Kv::U64(u64::MAX),
        Kv::I32(-32),
        "32".into(),
        Kv::U8s(vec![32]),
    ] {
        let mut g = gguf_model();
        g.keys.retain(|(k, _)| k != b"general.alignment");
        g.key("general.alignment", bad);
        let f = g.lay();
        refused_at("al.gguf", f.bytes.clone(), f.at("general.alignment.len"), &["general.alignment", "power of two"]);
    }
    for good in [1, 2, 8, 64, 4096] {
        let mut g = gguf_model();
        g.keys.retain(|(k, _)| k != b"general.alignment");
        g.key("general.alignment", good).alignment = good as usize;
        assert_eq!(read_all(&open("al.gguf", g.bytes()).unwrap()), 7, "alignment {good}");
    }
    // 2^30 is a power of two, but then no tensor can be in the file.
    let f = gguf();
    refused("al.gguf", f.with("general.alignment.value", &(1u32 << 30).to_le_bytes()), &["would begin at 1073741824"]);
}

#[test]
fn gguf_tensor_table() {
    let f = gguf();
    let at = |place: &str| f.at(place);
    for n in BIG {
        refused_at(
            "t.gguf",
            f.with("q2k.len", &n.to_le_bytes()),
            at("q2k.name"),
            &["tensor name takes", &n.to_string()],
        );
    }
    refused_at("t.gguf", f.with("q2k.name", b"q\xfek"), at("q2k.name") + 1, &["tensor name is not UTF-8"]);
    for n in [5, 255, 1 << 31, u32::MAX] {
        refused_at(
            "t.gguf",
            f.with("q2k.dims", &n.to_le_bytes()),
            at("q2k.len"),
            &["tensor q2k", &format!("{n} dimensions")],
        );
    }
    let ne = |tensor: &str, ne: &[u64]| {
        f.with(&format!("{tensor}.ne"), &ne.iter().flat_map(|d| d.to_le_bytes()).collect::<Vec<_>>())
    };
    for dims in [[1 << 33, 1 << 33], [u64::MAX, 2], [1 << 63, 2]] {
        refused_at("t.gguf", ne("f32", &dims), at("f32.len"), &["tensor f32", "overflows"]);
    }
    // The number of weights fits 64 bits, the number of bytes does not.
    refused_at("t.gguf", ne("f32", &[1 << 62, 1]), at("f32.len"), &["tensor f32", "size overflows"]);
    // Both fit, but the end of the tensor does not, or the file is shorter.
    for dims in [[(1 << 62) - 8, 1], [1 << 40, 1], [100, 100], [4, 1000]] {
        refused_at("t.gguf", ne("f32", &dims), at("f32.len"), &["tensor f32", "past the end of the file"]);
    }
    for (tensor, k, block) in
        [("q2k", 255, "256"), ("q2k", 1, "256"), ("q40", 33, "32"), ("q80", 63, "32"), ("tq2", 128, "256")]
    {
        let words = [&format!("tensor {tensor}"), &format!("K = {k} is no multiple"), block].map(|s| s.to_string());
        refused_at("t.gguf", ne(tensor, &[k]), at(&format!("{tensor}.len")), &[&words[0], &words[1], &words[2]]);
    }
    for offset in [1u64, 16, 33, u64::MAX] {
        refused_at(
            "t.gguf",
            f.with("q40.offset", &offset.to_le_bytes()),
            at("q40.len"),
            &["tensor q40", &format!("offset {offset} is no multiple of the alignment 32")],
        );
    }
    for offset in [u64::MAX - 31, 1 << 63, 1 << 32, 4096] {
        refused_at(
            "t.gguf",
            f.with("q40.offset", &offset.to_le_bytes()),
            at("q40.len"),
            &["tensor q40", &offset.to_string(), "past the end"],
        );
    }
    // The same bytes twice, all of them or some.
    let offset = |n: usize| f.with("q40.offset", &(n as u64).to_le_bytes());
    let q2k = at("q2k.data") - at("data");
    refused_at("o.gguf", offset(q2k), at("q2k.data"), &["q2k", "q40", "overlap"]);
    refused_at("o.gguf", offset(q2k + 64), at("q2k.data") + 64, &["tensors q2k and q40 overlap"]);
    refused("o.gguf", ne("q2k", &[512]), &["tensors q2k and q40 overlap"]);

    let mut g = gguf_model();
    g.f32("q2k", &[1], &[0.0]);
    let twice = g.lay();
    refused_at("d.gguf", twice.bytes.clone(), twice.at("q2k.len"), &["tensor q2k appears twice"]);
}

/// A type that is not decoded is a property of one tensor; the file is not corrupt.
#[test]
fn gguf_types_are_refused_by_name() {
    let f = gguf();
    let file = open("file", f.bytes.clone()).unwrap();
    assert_eq!(read_all(&file), 7);
    refused_on_reading(f.bytes.clone(), "tq2", &["ggml type 35 TQ2_0", "not supported"]);
    let kind = |n: u32| f.with("tq2.type", &n.to_le_bytes());
    for (n, words) in [
        (4, ["ggml type 4", "retired"]),
        (9, ["ggml type 9 Q8_1", "not supported"]),
        (20, ["ggml type 20 IQ4_NL", "not supported"]),
        (26, ["ggml type 26 I32", "not supported"]),
        (34, ["ggml type 34 TQ1_0", "not supported"]),
        (36, ["ggml type 36", "ambiguous"]),
        (38, ["ggml type 38", "retired"]),
        (42, ["ggml type 42", "ambiguous"]),
        (43, ["ggml type 43", "unknown"]),
        (200, ["ggml type 200", "unknown"]),
        (u32::MAX, ["ggml type 4294967295", "unknown"]),
    ] {
        // Some of these are larger than the 66 bytes that are there: a size is checked where the type gives one.
        let mut g = gguf_model();
        let at = g.tensors.iter().position(|t| t.name == b"tq2").unwrap();
        g.tensors[at].kind = n;
        g.tensors[at].data = vec![0; 1024];
        refused_on_reading(g.bytes(), "tq2", &words);
    }
    // A block type that is known is measured even though it is not decoded.
    refused("x.gguf", kind(18), &["tensors tq2 and last overlap"]);
    // Where the size is unknown, an absurd shape is no reason to allocate.
    let mut g = gguf_model();
    let at = g.tensors.iter().position(|t| t.name == b"tq2").unwrap();
    (g.tensors[at].kind, g.tensors[at].ne) = (200, vec![1 << 40, 1 << 20]);
    refused_on_reading(g.bytes(), "tq2", &["ggml type 200"]);
    g.tensors[at].ne = vec![1 << 40, 1 << 24];
    refused("x.gguf", g.bytes(), &["tensor tq2", "overflows"]);
}

/// Tensors without weights: some frameworks write them. Their other dimension can be anything.
#[test]
fn empty_tensors_cost_nothing() {
    for ne in [[0, 7], [7 * 256, 0], [0, 1 << 63], [1 << 63, 0], [0, u64::MAX], [u64::MAX - 255, 0], [0, 0]] {
        for kind in [0, 1, 2, 8, 10, 30] {
            let mut g = gguf_model();
            g.tensor("empty", &[ne[1], ne[0]], kind, vec![]);
            let file = open("empty.gguf", g.bytes()).unwrap();
            assert_eq!(read_all(&file), 8);
            let reader = file.rows(file.find("empty").unwrap()).unwrap();
            let (m, k) = reader.shape();
            assert_eq!(m * k, 0);
            assert!(reader.read_all().unwrap().is_empty());
            assert!(file.load("empty").is_err());
            let e = quantize::plan(&file, &Recipe::new(Format::F16)).unwrap_err();
            assert!(e.to_string().contains("empty.gguf"), "{e}");
        }
    }
    for shape in [[0, u64::MAX >> 1], [u64::MAX >> 1, 0]] {
        let bytes = common::safetensors(&[("empty", "F32", &shape, vec![])]);
        let file = open("empty.safetensors", bytes).unwrap();
        assert_eq!(read_all(&file), 1);
        let e = quantize::plan(&file, &Recipe::new(Format::F16)).unwrap_err().to_string();
        assert!(e.contains("empty"), "{e}");
    }
}

/// A header around one tensor: everything that can be wrong with an entry.
fn entry(dtype: &str, shape: &str, offsets: &str, data: usize) -> Vec<u8> {
    let header = format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#);
    common::safetensors_raw(header.as_bytes(), &vec![0; data])
}

#[test]
fn safetensors_tables() {
    assert_eq!(read_all(&open("ok", entry("F32", "[2,2]", "[0,16]", 16)).unwrap()), 1);
    for (bytes, word) in [
        (entry("F32", "[2,2]", "[0,16]", 15), "but 15 follow"),
        (entry("F32", "[2,2]", "[0,16]", 17), "tensors take 16 bytes, but 17 follow"),
        (entry("F32", "[2,2]", "[4,20]", 20), "tensor w: data offsets 4..20"),
        (entry("F32", "[2,2]", "[16,0]", 16), "tensor w: data offsets 16..0"),
        (entry("F32", "[2,2]", "[0,12]", 12), "tensor w: 12 bytes"),
        (entry("F32", "[2,3]", "[0,16]", 16), "tensor w: 16 bytes"),
        (entry("F32", "[2,2]", "[0,18446744073709551615]", 16), "tensor w: 18446744073709551615 bytes"),
        (entry("F32", "[2,2]", "[0,18446744073709551616]", 16), "tensor w: "),
        (entry("F32", "[2,2]", "[0]", 16), "tensor w: "),
        (entry("F32", "[2,2]", "[0,16,16]", 16), "at byte 63: tensor w: trailing"),
        (entry("F32", "[2,2]", "[-1,16]", 16), "tensor w: "),
        (entry("F32", "[2,2]", "[0.0,16.0]", 16), "tensor w: "),
        (entry("F32", "[-2,-2]", "[0,16]", 16), "tensor w: "),
        (
            entry("F32", "[4294967296,4294967296,4294967296]", "[0,16]", 16),
            "tensor w: shape [4294967296, 4294967296, 4294967296] overflows",
        ),
        (entry("F32", "[4611686018427387904]", "[0,0]", 0), "tensor w: 0 bytes"),
        (entry("F32", "[4611686018427387904]", "[0,2305843009213693952]", 0), "tensor w: "),
        (entry("F32", "[4611686018427387904]", "[0,18446744073709551615]", 0), "tensor w: "),
        (entry("F32", "2", "[0,16]", 16), "tensor w: "),
        (entry("F4", "[3]", "[0,1]", 1), "tensor w: 1 bytes"),
        (entry("Q9", "[2,2]", "[0,16]", 15), "tensors take 16 bytes, but 15 follow"),
        (entry("Q9", "[4294967296,4294967296]", "[0,16]", 16), "tensor w: shape"),
        (
            common::safetensors_raw(br#"{"w":{"dtype":"F32","shape":[1]}}"#, &[0; 4]),
            "tensor w: missing field `data_offsets`",
        ),
        (
            common::safetensors_raw(
                br#"{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
                &[0; 4],
            ),
            "tensor w: duplicate field",
        ),
        (common::safetensors_raw(br#"{"w":3}"#, &[]), "tensor w: "),
        (common::safetensors_raw(br#"{"__metadata__":{"a":1}}"#, &[]), ""),
        (common::safetensors_raw(b"{", &[]), ""),
        (common::safetensors_raw(b"{}x", &[]), ""),
        (common::safetensors_raw(b"{},", &[]), ""),
        (common::safetensors_raw(br#"{"w":}"#, &[]), ""),
        (common::safetensors_raw(b"{\"\xff\":1}", &[]), "UTF-8"),
    ] {
        refused("t.safetensors", bytes, &["not a valid safetensors file: at byte ", word]);
    }
    // Offsets are counted in the file, not in the header.
    refused_at("t.safetensors", common::safetensors_raw(b"{\"a\xff\":1}", &[]), 8 + 3, &["UTF-8"]);
    refused_at("t.safetensors", common::safetensors_raw(b"{\n\n\"a\": ?}", &[]), 8 + 3 + 5, &["expected value"]);
    for n in [0u64, 1, 500, 100_000_000] {
        let mut bytes = entry("F32", "[2,2]", "[0,16]", 16);
        bytes[..8].copy_from_slice(&n.to_le_bytes());
        refused("h.safetensors", bytes, &["at byte 8"]);
    }
    // No tensors are no error; no header is.
    assert!(open("e.safetensors", common::safetensors_raw(b"{}", &[])).unwrap().tensors().is_empty());
}

#[test]
fn safetensors_names_and_overlaps() {
    let two = |a: &str, b: &str, first: &str, second: &str| {
        let tensor = |offsets: &str| format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#);
        let header = format!("{{{a}:{},{b}:{}}}", tensor(first), tensor(second));
        common::safetensors_raw(header.as_bytes(), &[0; 16])
    };
    assert!(open("ok", two(r#""a""#, r#""b""#, "[0,8]", "[8,16]")).is_ok());
    assert!(open("ok", two(r#""a""#, r#""b""#, "[8,16]", "[0,8]")).is_ok());
    let words = ["tensor a appears twice"];
    refused("d.safetensors", two(r#""a""#, r#""a""#, "[0,8]", "[8,16]"), &words);
    // The same name once more, spelled in another way.
    refused("d.safetensors", two(r#""a""#, r#""\u0061""#, "[0,8]", "[8,16]"), &words);
    for (first, second) in [("[0,8]", "[0,8]"), ("[0,8]", "[4,12]"), ("[0,8]", "[12,20]"), ("[4,12]", "[8,16]")] {
        refused("o.safetensors", two(r#""a""#, r#""b""#, first, second), &["at byte "]);
    }
    for dtype in ["I64", "U8", "BOOL", "F8_E4M3", "F64"] {
        let size = if dtype.ends_with("64") { 8 } else { 1 };
        let what = format!("safetensors type {dtype}: not supported");
        refused_on_reading(entry(dtype, "[1]", &format!("[0,{size}]"), size), "w", &[&what]);
    }
    // A type of the future.
    refused_on_reading(entry("Q9", "[2,2]", "[0,5]", 5), "w", &["safetensors type Q9: unknown"]);
}

/// JSON that never ends, or that is deeper than any stack.
#[test]
fn bottomless_json() {
    let deep = |open: &str, n: usize| open.repeat(n);
    let brackets = deep("[", 100_000);
    let objects = deep(r#"{"a":"#, 100_000);
    let closed = format!("{brackets}{}", deep("]", 100_000));
    for value in [&brackets, &objects, &closed] {
        refused(
            "deep.safetensors",
            common::safetensors_raw(format!(r#"{{"w":{value}"#).as_bytes(), &[]),
            &["at byte "],
        );
        refused(
            "deep.safetensors",
            common::safetensors_raw(format!(r#"{{"w":{value}}}"#).as_bytes(), &[]),
            &["at byte "],
        );
        let meta = format!(r#"{{"__metadata__":{value}}}"#);
        refused("deep.safetensors", common::safetensors_raw(meta.as_bytes(), &[]), &["at byte "]);
        let extra = format!(r#"{{"w":{{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":{value}}}}}"#);
        let bytes = common::safetensors_raw(extra.as_bytes(), &[0; 4]);
        if value == &closed {
            // A field that nobody reads may be as deep as it likes.
            assert_eq!(read_all(&open("deep.safetensors", bytes).unwrap()), 1);
        } else {
            refused("deep.safetensors", bytes, &["at byte "]);
        }
    }
    for endless in
        [&brackets, &objects, "{", r#"{"a"#, r#"{"a":"\""#, r#"{"a\"#, r#"{"a":{}"#, r#"{"a":"}"#, r#"{"}}}}"#]
    {
        refused_at("endless.hfq", Hfq::new(0, endless).bytes(), 32, &["does not end before byte"]);
    }
    // Deep but closed: fine where nobody looks inside (it is carried along as text), an error where somebody does.
    let bytes = |json: &str| Hfq::new(0, json).tensor("w", 2, &[1], 0, vec![0; 4]).bytes();
    let file = open("deep.hfq", bytes(&format!(r#"{{"x":{closed}}}"#))).unwrap();
    assert!(quantize::plan(&file, &Recipe::new(Format::F16)).is_ok());
    refused("deep.hfq", bytes(&format!(r#"{{"bitlane":{{"x":{closed},"logical_k":{closed}}}}}"#)), &["bitlane"]);
    refused("deep.hfq", bytes(&format!(r#"{{"bitlane":{closed}}}"#)), &["bitlane"]);
}

#[test]
fn hfq_headers() {
    let f = hfq();
    for version in [0u32, 2, 1 << 24, u32::MAX] {
        refused_at("v.hfq", f.with("version", &version.to_le_bytes()), 4, &[&format!("version {version} is not")]);
    }
    // Any architecture id may be in a file.
    for id in [0u32, 99, u32::MAX] {
        assert!(open("a.hfq", f.with("architecture", &id.to_le_bytes())).is_ok());
    }
    for n in [0u32, 5, 7, u32::MAX] {
        refused_at(
            "n.hfq",
            f.with("count", &n.to_le_bytes()),
            f.at("index count"),
            &["the index counts 6", &format!("the header {n}")],
        );
        refused_at(
            "n.hfq",
            f.with("index count", &n.to_le_bytes()),
            f.at("index count"),
            &[&format!("the index counts {n}"), "the header 6"],
        );
    }
    for n in [1u32 << 20, u32::MAX] {
        let mut bytes = f.with("count", &n.to_le_bytes());
        bytes[f.at("index count")..][..4].copy_from_slice(&n.to_le_bytes());
        refused_at("n.hfq", bytes, f.at("index count"), &[&n.to_string(), "index entries", "cannot fit"]);
    }
    let len = f.bytes.len() as u64;
    for offset in [0, 4, 31, f.at("data") as u64 + 1, len, len + 1, 1 << 63, u64::MAX] {
        refused_at(
            "m.hfq",
            f.with("metadata offset", &offset.to_le_bytes()),
            16,
            &["metadata offset", &offset.to_string()],
        );
    }
    for offset in [0, 31, len + 1, 1 << 63, u64::MAX] {
        refused_at("m.hfq", f.with("data offset", &offset.to_le_bytes()), 16, &["data offset", &offset.to_string()]);
    }
    // Blobs that begin inside the metadata or the index.
    refused_at("m.hfq", f.with("data offset", &32u64.to_le_bytes()), 32, &["does not end before byte 32"]);
    refused_at("m.hfq", f.with("data offset", &60u64.to_le_bytes()), 32, &["does not end before byte 60"]);
    let inside = (f.at("last.weight.bytes") + 7) as u64;
    refused_at(
        "m.hfq",
        f.with("data offset", &inside.to_le_bytes()),
        24,
        &["the index ends at", "after the data offset"],
    );
    // Metadata elsewhere is legal, as long as it is before the data.
    let mut moved = Hfq::new(0, &format!("        {JSON}"));
    moved.tensors = hfq_model().tensors;
    let mut moved = moved.lay();
    moved.bytes[16..24].copy_from_slice(&40u64.to_le_bytes());
    assert_eq!(read_all(&open("m.hfq", moved.bytes).unwrap()), 5);
    // Bytes after the last blob are legal.
    for extra in [1, 4096] {
        let file = open("x.hfq", [&f.bytes[..], &vec![7; extra]].concat()).unwrap();
        assert_eq!(read_all(&file), 5);
        let bitlane::container::Details::Hfq(h) = file.details() else { panic!() };
        assert_eq!(h.trailing, extra as u64);
    }
}

#[test]
fn hfq_metadata() {
    let with = |json: &str| {
        let mut h = hfq_model();
        h.json = json.into();
        h.bytes()
    };
    for (json, word) in [
        ("", ""),
        ("[1]", ""),
        ("7", "no JSON object"),
        ("\"a\"", ""),
        ("null", "no JSON object"),
        ("{]", ""),
        ("{\"a\":}", "expected value"),
        ("{\"a\":1,}", ""),
        ("{\"bitlane\":7}", "bitlane"),
        ("{\"bitlane\":{\"logical_k\":[]}}", "bitlane"),
        ("{\"bitlane\":{\"logical_k\":{\"pad.weight\":-1}}}", "bitlane"),
        ("{\"bitlane\":{\"logical_k\":{\"pad.weight\":1e300}}}", "bitlane"),
        ("{\"bitlane\":{\"logical_k\":{\"nobody\":200}}}", "logical_k names tensor nobody"),
    ] {
        refused("j.hfq", with(json), &["at byte ", word]);
    }
    let mut h = hfq_model();
    h.json = b"{\"a\":\"\xff\"}".into();
    refused_at("j.hfq", h.bytes(), 32 + 6, &["UTF-8"]);
    // Line breaks count.
    refused_at("j.hfq", with("{\n\n\"a\": ?}"), 32 + 3 + 5, &["expected value"]);
    // Stored K is 256 for pad.weight: only 1 to 256 are padded to that.
    for k in ["0", "257", "512", "18446744073709551615"] {
        let bytes = with(&format!(r#"{{"bitlane":{{"logical_k":{{"pad.weight":{k}}}}}}}"#));
        refused("k.hfq", bytes, &["tensor pad.weight", "logical K", k]);
    }
    // And where the format does not pad, or pads to less, it is a contradiction.
    for (name, k) in [("norm.weight", 4), ("embed", 32), ("last.weight", 0)] {
        let bytes = with(&format!(r#"{{"bitlane":{{"logical_k":{{"{name}":{k}}}}}}}"#));
        refused("k.hfq", bytes, &[&format!("tensor {name}"), "logical K"]);
    }
}

#[test]
fn hfq_index() {
    let f = hfq();
    let at = |place: &str| f.at(place);
    let t = "tensor last.weight";
    refused_at(
        "i.hfq",
        f.with("last.weight.len", &u16::MAX.to_le_bytes()),
        at("last.weight.name"),
        &["tensor name takes 65535 bytes"],
    );
    refused_at("i.hfq", f.with("last.weight.name", b"\xff"), at("last.weight.name"), &["tensor name is not UTF-8"]);
    assert!(open("i.hfq", f.with("last.weight.ndim", &[255])).is_err());
    for dims in [[2u32, 256], [1, 512], [1, u32::MAX], [u32::MAX, u32::MAX], [0, 256], [1, 0]] {
        let bytes = f.with("last.weight.dims", &dims.iter().flat_map(|d| d.to_le_bytes()).collect::<Vec<_>>());
        refused_at("i.hfq", bytes, at("last.weight.len"), &[t]);
    }
    refused_at(
        "i.hfq",
        f.with("last.weight.dims", &[1, 0, 0, 0, 255, 0, 0, 0]),
        at("last.weight.len"),
        &[t, "stored K is no multiple of 256"],
    );
    for len in [0u64, 135, 137, 1 << 63, u64::MAX] {
        refused_at(
            "i.hfq",
            f.with("last.weight.bytes", &len.to_le_bytes()),
            at("last.weight.len"),
            &[t, &len.to_string()],
        );
    }
    // A width that another format of the same stride has is still another format: nothing falls back.
    for (qt, format, len) in [(47, "mq6v2", 200), (50, "mq2v2", 72), (2, "f32", 1024)] {
        let what = format!("{t}: {format} [1, 256] takes {len} bytes, the index says 136");
        refused_at("i.hfq", f.with("last.weight.qt", &[qt]), at("last.weight.len"), &[&what]);
    }
    let mut h = hfq_model();
    h.tensor("embed", 2, &[1], 0, vec![0; 4]);
    let twice = h.lay();
    refused_at("d.hfq", twice.bytes.clone(), twice.at("embed.len"), &["tensor embed appears twice"]);
}

#[test]
fn hfq_types_are_refused_by_number() {
    refused_on_reading(hfq().bytes, "lloyd", &["qt 20 MQ3G256Lloyd: not supported"]);
    for (qt, word) in [
        (0, "qt 0 Q4F16G64"),
        (22, "qt 22 index: not a weight"),
        (25, "qt 25: burned"),
        (43, "qt 43: retired"),
        (46, "qt 46: specified but never shipped"),
        (52, "qt 52: ambiguous"),
        (54, "qt 54: unknown"),
        (255, "qt 255: unknown"),
    ] {
        refused_on_reading(hfq().with("lloyd.qt", &[qt]), "lloyd", &[word]);
    }
    // Even then the shape must be one.
    let mut h = hfq_model();
    let at = h.tensors.iter().position(|t| t.name == b"lloyd").unwrap();
    h.tensors[at].shape = vec![u32::MAX; 3];
    refused("s.hfq", h.bytes(), &["tensor lloyd", "overflows"]);
    h.tensors[at].shape = vec![u32::MAX; 2];
    refused_on_reading(h.bytes(), "lloyd", &["qt 20"]);
}

#[test]
fn hfq_awq_sidecars() {
    let mut h = hfq_model();
    let at = h.tensors.iter().position(|t| t.name == b"pad.awq_scale.weight").unwrap();
    let sidecar = |h: &Hfq, words: &[&str]| {
        let file = open("awq.hfq", h.bytes()).unwrap();
        let t = file.find("pad.weight").unwrap();
        for e in [file.rows(t).err().unwrap(), file.load("pad.weight").err().unwrap()] {
            let text = e.to_string();
            assert!(words.iter().all(|w| text.contains(w)), "{text}: {words:?}");
        }
        read_all(&file);
    };
    let sound = h.tensors[at].clone();
    // Of another length, of another type, and with values that nothing can be divided by.
    (h.tensors[at].shape, h.tensors[at].blob) = (vec![256], vec![0; 512]);
    sidecar(&h, &["pad.awq_scale.weight", "[256]", "[200]"]);
    (h.tensors[at].shape, h.tensors[at].qt, h.tensors[at].blob) = (vec![200], 2, vec![0; 800]);
    sidecar(&h, &["pad.awq_scale.weight", "F32", "F16"]);
    for bad in [0u16, 0x8000, 0xbc00, 0x7c00, 0x7e00] {
        h.tensors[at] = sound.clone();
        h.tensors[at].blob[2 * 77..][..2].copy_from_slice(&bad.to_le_bytes());
        sidecar(&h, &["pad.awq_scale.weight", "channel 77"]);
    }
    // Beside a tensor that is not rotated nobody knows what it would mean.
    let mut h = hfq_model();
    let at = h.tensors.iter().position(|t| t.name == b"pad.weight").unwrap();
    (h.tensors[at].qt, h.tensors[at].shape, h.tensors[at].blob) = (1, vec![1, 200], vec![0; 400]);
    h.json = b"{}".into();
    sidecar(&h, &["pad.weight", "AWQ"]);
}

// Sharded safetensors.

fn index(map: &[(&str, &str)]) -> Vec<u8> {
    let map: serde_json::Map<_, _> = map.iter().map(|(k, v)| (k.to_string(), json!(v))).collect();
    json!({ "metadata": {}, "weight_map": map }).to_string().into_bytes()
}

/// Two shards, `a` in the first and `b` in the second.
fn shards(folder: &Path) {
    let one = |name| common::safetensors(&[(name, "F32", &[2], vec![0; 8])]);
    common::write(folder, "1.safetensors", &one("a"));
    common::write(folder, "2.safetensors", &one("b"));
}

#[test]
fn shard_indexes() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    shards(&folder);
    // What an index must not reach.
    common::write(temp.path(), "x.safetensors", &common::safetensors(&[("b", "F32", &[2], vec![0; 8])]));
    let try_index = |bytes: &[u8]| {
        let path = common::write(&folder, "model.safetensors.index.json", bytes);
        Container::open(&path).map(|c| c.tensors().len()).map_err(|e| e.to_string())
    };
    assert_eq!(try_index(&index(&[("a", "1.safetensors"), ("b", "2.safetensors")])), Ok(2));
    assert_eq!(Container::open(&folder).unwrap().tensors().len(), 2);
    let absolute = temp.path().join("x.safetensors").display().to_string();
    let up = "../x.safetensors";
    for bad in [
        up,
        "./2.safetensors",
        "sub/2.safetensors",
        "../model/2.safetensors",
        "..",
        ".",
        "",
        "/",
        &absolute,
        "2.safetensors/",
    ] {
        let e = try_index(&index(&[("a", "1.safetensors"), ("b", bad)])).unwrap_err();
        assert!(e.contains("index.json") && e.contains(&format!("shard {bad:?} is not a plain file name")), "{e}");
    }
    for (map, words) in [
        (index(&[("a", "1.safetensors"), ("b", "3.safetensors")]), ["3.safetensors", "cannot open"]),
        (index(&[("a", "2.safetensors"), ("b", "1.safetensors")]), [".safetensors", "no tensor named a"]),
        (index(&[("a", "1.safetensors"), ("b", "1.safetensors")]), ["1.safetensors", "no tensor named b"]),
        (index(&[("a", "1.safetensors"), ("c", "2.safetensors")]), ["2.safetensors", "no tensor named c"]),
        (
            index(&[("a", "1.safetensors"), ("b", "2.safetensors"), ("c", "2.safetensors")]),
            ["2.safetensors", "no tensor named c"],
        ),
        (index(&[("b", "2.safetensors"), ("a", "index.json")]), ["index.json", "cannot open"]),
        (
            index(&[("b", "2.safetensors"), ("a", "model.safetensors.index.json")]),
            ["index.json", "not a valid safetensors"],
        ),
        (
            br#"{"weight_map":{"a":1}}"#.to_vec(),
            ["index.json: not a valid safetensors file: at byte ", "expected a string"],
        ),
        (br#"{"weight_map":[]}"#.to_vec(), ["index.json: not a valid safetensors file: at byte ", ""]),
        (br#"{}"#.to_vec(), ["index.json: not a valid safetensors file: at byte ", "weight_map"]),
        (b"".to_vec(), ["index.json: not a valid safetensors file: at byte ", "EOF"]),
        (b"\xff".to_vec(), ["index.json: not a valid safetensors file: at byte 0", "UTF-8"]),
        (format!(r#"{{"weight_map":{{}},"x":{}"#, "[".repeat(100_000)).into_bytes(), ["index.json: not a valid", ""]),
    ] {
        let e = try_index(&map).unwrap_err();
        assert!(words.iter().all(|w| e.contains(w)), "{e}: {words:?}");
    }
    // A tensor that the index does not list, and one that is in both shards: which one would be meant?
    let more: [common::StTensor; 2] = [("b", "F32", &[2], vec![0; 8]), ("a", "F32", &[2], vec![1; 8])];
    common::write(&folder, "2.safetensors", &common::safetensors(&more));
    for map in [[("a", "1.safetensors"), ("b", "2.safetensors")], [("b", "2.safetensors"), ("a", "1.safetensors")]] {
        let e = try_index(&index(&map)).unwrap_err();
        assert!(e.contains("tensor a") && e.contains("1.safetensors") && e.contains("2.safetensors"), "{e}");
    }
    let e = try_index(&index(&[("b", "2.safetensors")])).unwrap_err();
    assert!(e.contains("2.safetensors holds tensor a, which the index does not list"), "{e}");
    // A shard that is broken is named itself.
    common::write(&folder, "2.safetensors", b"short");
    let e = try_index(&index(&[("a", "1.safetensors"), ("b", "2.safetensors")])).unwrap_err();
    assert!(e.contains("2.safetensors: not a valid safetensors file: at byte 0"), "{e}");
}

// Mutations.

/// One mutant: one to four edits.
fn mutate(rng: &mut Lcg, seed: &[u8]) -> Vec<u8> {
    let mut b = seed.to_vec();
    for _ in 0..1 + rng.below(4) {
        if b.is_empty() {
            break;
        }
        // Half of the edits hit the first 512 bytes, where the header is.
        let reach = if rng.below(2) == 0 { b.len().min(512) } else { b.len() };
        let at = rng.below(reach);
        let n = 1 + rng.below(b.len() - at).min(rng.below(64));
        match rng.below(8) {
            0 => b[at] ^= 1 << rng.below(8),
            1 => b[at] = rng.u32() as u8,
            2 => b.truncate(at),
            3 => drop(b.drain(at..at + n)),
            4 => {
                let copy = b[at..at + n].to_vec();
                let to = rng.below(b.len());
                b.splice(to..to, copy);
            }
            5 => {
                let noise = rng.bytes(n);
                b.splice(at..at, noise);
            }
            kind => {
                // A field of 4 or 8 bytes, aligned or not, becomes a number that is often trouble.
                let width = 4 * (1 + rng.below(2));
                let at = if kind == 6 { at / width * width } else { at };
                let value = match rng.below(9) {
                    0 => 0,
                    1 => 1,
                    2 => u64::MAX,
                    3 => 1 << (rng.below(64)),
                    4 => (1 << (1 + rng.below(63))) - 1,
                    5 => b.len() as u64,
                    6 => u64::MAX - rng.below(64) as u64,
                    7 => rng.below(300) as u64,
                    _ => rng.u64(),
                };
                let end = (at + width).min(b.len());
                b[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
        }
    }
    b
}

/// Opens and reads mutants; gives how many opened, so that a test can see that it does not only reject.
fn mutants(name: &str, valid: &[u8], seed: u64, count: usize) -> usize {
    let mut rng = Lcg::new(seed);
    let mut opened = 0;
    for n in 0..count {
        let bytes = mutate(&mut rng, valid);
        let result = catch_unwind(AssertUnwindSafe(|| match open(name, bytes.clone()) {
            Ok(file) => {
                read_all(&file);
                true
            }
            Err(e) => {
                let text = e.to_string();
                let place = text.contains("at byte ") || text.contains("first bytes");
                assert!(text.starts_with(&format!("{name}: ")) && place, "{text}: neither file nor place");
                false
            }
        }));
        match result {
            Ok(true) => opened += 1,
            Ok(false) => {}
            Err(_) => {
                let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
                panic!("replay: {name}, seed {seed}, mutant {n}: {hex}");
            }
        }
    }
    opened
}

const MUTANTS: usize = 20_000;

#[test]
fn gguf_mutants() {
    let opened = mutants("mutant.gguf", &gguf().bytes, 0x6767_7566, MUTANTS);
    assert!((MUTANTS / 10..MUTANTS * 9 / 10).contains(&opened), "{opened} of {MUTANTS} open");
}

#[test]
fn safetensors_mutants() {
    let opened = mutants("mutant.safetensors", &safetensors(), 0x7361_6665, MUTANTS);
    assert!((MUTANTS / 50..MUTANTS * 9 / 10).contains(&opened), "{opened} of {MUTANTS} open");
}

#[test]
fn hfq_mutants() {
    let opened = mutants("mutant.hfq", &hfq().bytes, 0x6866_7121, MUTANTS);
    assert!((MUTANTS / 10..MUTANTS * 9 / 10).contains(&opened), "{opened} of {MUTANTS} open");
}

/// The worst that we know how to write: as many things per byte as each container allows.
#[test]
fn memory_is_bounded_by_the_size_of_the_file() {
    let short = |i: u64| {
        let digits = b"abcdefghijklmnopqrstuvwxyz0123456789";
        let (mut i, mut name) = (i, Vec::new());
        loop {
            name.push(digits[(i % 36) as usize]);
            i /= 36;
            if i == 0 {
                return name;
            }
        }
    };
    let n = 20_000;
    let mut worst = Vec::new();
    let mut case = |name: &str, bytes: Vec<u8>| {
        let len = bytes.len();
        let bytes = Bytes::memory(name, bytes);
        let (result, used) = peak(|| Container::from_bytes(bytes));
        let outcome = result.as_ref().map_or_else(|e| e.to_string(), |c| format!("{} tensors", c.tensors().len()));
        println!(
            "{name}: {len} bytes, {used} held, {:.2} times; {}",
            used as f64 / len as f64,
            &outcome[..outcome.len().min(80)]
        );
        worst.push((name.to_string(), used, len));
    };

    let table = |kind: u32, dims: u32| {
        let mut g = [&b"GGUF\x03\0\0\0"[..], &u64::to_le_bytes(n), &[0; 8]].concat();
        for i in 0..n {
            let name = short(i);
            g.extend((name.len() as u64).to_le_bytes());
            g.extend(name);
            g.extend(dims.to_le_bytes());
            g.extend(vec![0; 8 * dims as usize]);
            g.extend(kind.to_le_bytes());
            g.extend([0; 8]);
        }
        g.extend([0; 64]);
        g
    };
    case("tensors of an unknown type.gguf", table(200, 0));
    case("tensors of a refused type.gguf", table(24, 1));
    case("empty tensors.gguf", table(0, 1));
    case("empty tensors of four dimensions.gguf", table(0, 4));
    let mut keys = [&b"GGUF\x03\0\0\0"[..], &[0; 8], &u64::to_le_bytes(n)].concat();
    for i in 0..n {
        let name = short(i);
        keys.extend((name.len() as u64).to_le_bytes());
        keys.extend(name);
        keys.extend([7, 0, 0, 0, 1]);
    }
    case("keys.gguf", keys);
    let mut g = Gguf::new("");
    g.key("a", Kv::Strs(vec![String::new(); n as usize]));
    case("strings.gguf", g.bytes());
    let mut g = Gguf::new("");
    g.key("a", Kv::U8s(vec![0; 1 << 20]));
    case("one array.gguf", g.bytes());
    let mut g = Gguf::new("");
    g.f32(&"a".repeat(1 << 20), &[1], &[0.0]).f32("b", &[1 << 40], &[0.0]);
    case("one long name.gguf", g.bytes());

    let entries = |body: &str| {
        let list: Vec<String> =
            (0..n).map(|i| format!(r#""{}":{body}"#, String::from_utf8(short(i)).unwrap())).collect();
        list.join(",")
    };
    let empty = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    case("empty tensors.safetensors", common::safetensors_raw(format!("{{{}}}", entries(empty)).as_bytes(), &[]));
    let meta = format!(r#"{{"__metadata__":{{{}}}}}"#, entries(r#""""#));
    case("metadata.safetensors", common::safetensors_raw(meta.as_bytes(), &[]));
    let flat = format!("{{{}}}", entries("1"));
    case("not tensors.safetensors", common::safetensors_raw(flat.as_bytes(), &[]));
    let list = format!(r#"{{"w":[{}1]}}"#, "1,".repeat(1 << 19));
    case("a list of numbers.safetensors", common::safetensors_raw(list.as_bytes(), &[]));
    let list = format!(r#"{{"w":[{}[]]}}"#, "[],".repeat(1 << 19));
    case("a list of lists.safetensors", common::safetensors_raw(list.as_bytes(), &[]));
    let shape = format!(r#"{{"w":{{"dtype":"U8","shape":[{}0],"data_offsets":[0,0]}}}}"#, "1,".repeat(1 << 19));
    case("one long shape.safetensors", common::safetensors_raw(shape.as_bytes(), &[]));

    let mut h = Hfq::new(0, "{}");
    for i in 0..n {
        h.tensor(std::str::from_utf8(&short(i)).unwrap(), 255, &[], 0, vec![]);
    }
    case("tensors of an unknown type.hfq", h.bytes());
    let mut h = Hfq::new(0, "{}");
    h.alignment = 1;
    for i in 0..n {
        h.tensor(std::str::from_utf8(&short(i)).unwrap(), 20, &[1; 8], 0, vec![]);
    }
    case("tensors of a refused type.hfq", h.bytes());
    case("metadata.hfq", Hfq::new(0, &format!("{{{}}}", entries("1"))).bytes());
    let json = format!(r#"{{"bitlane":{{"logical_k":{{{}}}}}}}"#, entries("1"));
    case("logical shapes.hfq", Hfq::new(0, &json).bytes());
    case("one long string.hfq", Hfq::new(0, &format!(r#"{{"a":"{}"}}"#, "x".repeat(1 << 20))).bytes());

    let (name, used, len) = worst.iter().max_by_key(|(_, used, len)| used * 1000 / len).unwrap();
    println!("worst: {name}, {:.2} times", *used as f64 / *len as f64);
    for (name, used, len) in &worst {
        within(OPEN, *used, *len, name);
    }
}

/// Reading: the multiple is that of the densest format, and is reached.
#[test]
fn memory_of_reading_is_that_of_the_values() {
    let one = |qt: u8, shape: &[u32], group: u32, blob: usize| {
        let mut h = Hfq::new(0, "{}");
        h.alignment = 1;
        h.tensor("w", qt, shape, group, vec![1; blob]);
        open("w.hfq", h.bytes()).unwrap()
    };
    for (file, expected) in [
        (one(50, &[1, 256 * 1000], 256, 72_000), 1.0 + 2.0 * 1024.0 / 72.0),
        (one(50, &[1000, 256], 256, 72_000), 1.0 + 1024.0 / 72.0),
        (one(2, &[1, 20_000], 0, 80_000), 2.0),
        (one(1, &[20_000], 0, 40_000), 3.0),
    ] {
        let t = &file.tensors()[0];
        let (values, used) = peak(|| file.rows(t).unwrap().read_all().unwrap());
        let times = used as f64 / file.file_len() as f64;
        println!("{} {:?}: {times:.2} times the file for {} values", t.type_name, t.logical_shape, values.len());
        assert!((times / expected - 1.0).abs() < 0.05, "{times} is not {expected}");
        read_all(&file);
    }
}

/// A file that changes under our hands: an error, and the path in it.
#[test]
fn files_that_shrink() {
    let temp = tempfile::tempdir().unwrap();
    for (name, bytes) in [("s.gguf", gguf().bytes), ("s.safetensors", safetensors()), ("s.hfq", hfq().bytes)] {
        let path = common::write(temp.path(), name, &bytes);
        let file = Container::open(&path).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes.len() as u64 - 1).unwrap();
        let last = file.tensors().iter().max_by_key(|t| t.offset).unwrap();
        let e = file.rows(last).unwrap().read_all().unwrap_err();
        assert!(matches!(e, Error::Io { .. }) && e.to_string().contains(&format!("{}", path.display())), "{e}");
        assert!(matches!(file.load(&last.name), Err(Error::Io { .. })));
    }
}

// What the writer writes.

#[test]
fn the_writer_lays_files_out_as_by_hand() {
    let mut rng = Lcg::new(9);
    let norm = rng.weights(6);
    let small = rng.weights(2 * 300);
    let (embed, embed_values) = common::q8_0(&mut rng, 3 * 64);
    let source = common::safetensors(&[
        ("model.norm.weight", "F32", &[6], common::f32_bytes(&norm)),
        ("model.layers.0.mlp.up_proj.weight", "F32", &[2, 300], common::f32_bytes(&small)),
        ("model.embed_tokens.weight", "F32", &[3, 64], common::f32_bytes(&embed_values)),
    ]);
    let source_bytes = source.len();
    let source = open("somewhere/tiny.safetensors", source).unwrap();
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("tiny.hfq");
    let plan = quantize::plan(&source, &Recipe::new(Format::Mq4V2)).unwrap();
    quantize::run(&plan, &out, &()).unwrap();
    let written = std::fs::read(&out).unwrap();
    assert_eq!(written.len() as u64, plan.file_len());

    // The JSON's meaning is fixed, its spelling is not.
    let mut values = serde_json::Deserializer::from_slice(&written[32..]).into_iter::<serde_json::Value>();
    let json = values.next().unwrap().unwrap();
    let spelled = std::str::from_utf8(&written[32..][..values.byte_offset()]).unwrap();
    assert_eq!(
        json,
        json!({
            "architecture": "unknown", "source": "safetensors",
            "bitlane": {
                "version": env!("CARGO_PKG_VERSION"), "source_file": "tiny.safetensors", "source_bytes": source_bytes,
                "scale_rounding": "nearest-even",
                "architecture_id": "the .hfq register has no id for unknown: readers must refuse, not guess",
                "logical_k": { "model.layers.0.mlp.up_proj.weight": 300 },
            },
        })
    );
    let up = QuantTensor::encode("up", Format::Mq4V2, 2, 300, &small, &Default::default()).unwrap();
    let mut by_hand = Hfq::new(0xffff_ffff, spelled);
    by_hand.tensor("model.norm.weight", 1, &[6], 0, common::f16_bytes(&norm));
    by_hand.tensor("model.layers.0.mlp.up_proj.weight", 44, &[2, 512], 256, up.bytes().to_vec());
    by_hand.tensor("model.embed_tokens.weight", 3, &[3, 64], 32, {
        // The encoder finds the scale again only where a block uses ±127; the blob is checked by its values.
        let e = QuantTensor::encode("e", Format::Q8_0, 3, 64, &embed_values, &Default::default()).unwrap();
        assert_eq!(e.bytes().len(), embed.len());
        e.bytes().to_vec()
    });
    let by_hand = by_hand.bytes();
    let differ = by_hand.iter().zip(&written).position(|(a, b)| a != b);
    assert_eq!((differ, by_hand.len()), (None, written.len()));
    assert_eq!(written[24..32], u64::to_le_bytes(4096));
}

/// Seeds for `fuzz/`, made from the same files: `cargo test --test hostile -- --ignored write_fuzz_seeds`.
#[test]
#[ignore = "writes fuzz/corpus"]
fn write_fuzz_seeds() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for (target, bytes) in [("gguf", gguf().bytes), ("safetensors", safetensors()), ("hfq", hfq().bytes)] {
        let folder = corpus.join(target);
        std::fs::create_dir_all(&folder).unwrap();
        common::write(&folder, "valid", &bytes);
    }
}
