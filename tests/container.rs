//! Whole models through `quantize`: what is written must be, byte for byte, the one-call encoding of the weights in
//! Hugging Face order, whatever container, row order and norm offset they came in.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bitlane::container::{Bytes, Details, hfq};
use bitlane::quantize::{self, Progress, Recipe};
use bitlane::{Awq, Container, EncodeOptions, Error, Format, QuantTensor, ScaleRounding};
use common::{Gguf, Hfq, Kv, Lcg};
use half::f16;
use serde_json::{Value as Json, json};

/// A weight as the model has it, and how a GGUF stores it.
#[derive(Clone)]
struct Weight {
    hf: String,
    gguf: String,
    shape: Vec<u64>,
    w: Vec<f32>,
    /// ggml type: 0 F32, 1 F16, 8 Q8_0.
    kind: u32,
    /// The blocks of a Q8_0 weight, from which `w` was decoded.
    q8: Vec<u8>,
}

impl Weight {
    fn mk(&self) -> (usize, usize) {
        let k = *self.shape.last().unwrap() as usize;
        (self.w.len() / k, k)
    }
}

struct Model {
    arch: &'static str,
    weights: Vec<Weight>,
    rng: Lcg,
}

/// K is no multiple of 256 on purpose: 320 is padded to 512, 96 to 256.
const HIDDEN: u64 = 320;
const FFN: u64 = 96;
const HEADS: u64 = 2;
const VOCAB: u64 = 40;

impl Model {
    fn add(&mut self, hf: &str, gguf: &str, shape: &[u64], kind: u32) {
        let n = shape.iter().product::<u64>() as usize;
        let (q8, w) = if kind == 8 { common::q8_0(&mut self.rng, n) } else { (Vec::new(), self.rng.weights(n)) };
        let both = |layer: &str| (format!("model.layers.0.{hf}"), format!("blk.0.{layer}"));
        let (hf, gguf) = match gguf.strip_prefix('.') {
            Some(layer) => both(layer),
            None => (hf.into(), gguf.into()),
        };
        self.weights.push(Weight { hf, gguf, shape: shape.into(), w, kind, q8 });
    }

    /// A model of one layer, with biases (qwen2; llama's may have them too) and the norms of its architecture.
    fn new(arch: &'static str, seed: u64) -> Model {
        let mut m = Model { arch, weights: Vec::new(), rng: Lcg::new(seed) };
        let (h, kv) = (HIDDEN, HIDDEN / HEADS);
        m.add("model.embed_tokens.weight", "token_embd.weight", &[VOCAB, h], 0);
        m.add("input_layernorm.weight", ".attn_norm.weight", &[h], 0);
        m.add("self_attn.q_proj.weight", ".attn_q.weight", &[h, h], 0);
        m.add("self_attn.k_proj.weight", ".attn_k.weight", &[kv, h], 1);
        m.add("self_attn.v_proj.weight", ".attn_v.weight", &[kv, h], 1);
        if !arch.starts_with("gemma") {
            m.add("self_attn.q_proj.bias", ".attn_q.bias", &[h], 0);
            m.add("self_attn.k_proj.bias", ".attn_k.bias", &[kv], 0);
            m.add("self_attn.v_proj.bias", ".attn_v.bias", &[kv], 0);
        }
        m.add("self_attn.o_proj.weight", ".attn_output.weight", &[h, h], 8);
        if arch == "gemma3" {
            m.add("self_attn.q_norm.weight", ".attn_q_norm.weight", &[kv], 0);
            m.add("self_attn.k_norm.weight", ".attn_k_norm.weight", &[kv], 0);
            m.add("post_attention_layernorm.weight", ".post_attention_norm.weight", &[h], 0);
            m.add("pre_feedforward_layernorm.weight", ".ffn_norm.weight", &[h], 0);
            m.add("post_feedforward_layernorm.weight", ".post_ffw_norm.weight", &[h], 0);
        } else {
            m.add("post_attention_layernorm.weight", ".ffn_norm.weight", &[h], 0);
        }
        m.add("mlp.gate_proj.weight", ".ffn_gate.weight", &[FFN, h], 8);
        m.add("mlp.up_proj.weight", ".ffn_up.weight", &[FFN, h], 0);
        m.add("mlp.down_proj.weight", ".ffn_down.weight", &[h, FFN], 0);
        m.add("model.norm.weight", "output_norm.weight", &[h], 0);
        if arch == "llama" {
            m.add("lm_head.weight", "output.weight", &[VOCAB, h], 0);
        }
        m
    }

    fn get(&mut self, hf: &str) -> &mut Weight {
        self.weights.iter_mut().find(|w| w.hf == hf).unwrap()
    }

    /// The GGUF that llama.cpp's converter makes of the model: for llama it reshapes q and k to [heads, 2, head/2]
    /// and swaps the last two; for gemma it adds 1 to the norms.
    fn gguf(&self) -> Gguf {
        let arch = self.arch;
        let mut g = Gguf::new(arch);
        g.key("general.name", "a small model");
        for (key, v) in [
            ("embedding_length", HIDDEN),
            ("feed_forward_length", FFN),
            ("block_count", 1),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", 1),
            ("context_length", 128),
        ] {
            g.key(&format!("{arch}.{key}"), v as u32);
        }
        g.key(&format!("{arch}.attention.layer_norm_rms_epsilon"), Kv::F32(1e-5));
        g.key(&format!("{arch}.rope.freq_base"), Kv::F32(10_000.0));
        g.key(&format!("{arch}.rope.scaling.type"), "none");
        g.key("tokenizer.ggml.model", "gpt2");
        g.key("tokenizer.ggml.tokens", Kv::Strs((0..VOCAB).map(|t| format!("Ġ\"{t}\"\n")).collect()));
        g.key("tokenizer.ggml.scores", Kv::F32s((0..VOCAB).map(|t| -(t as f32) / 3.0).collect()));
        g.key("tokenizer.ggml.bos_token_id", 1).key("tokenizer.ggml.eos_token_id", 2);
        for weight in &self.weights {
            let mut w = weight.w.clone();
            if arch.starts_with("gemma") && weight.hf.ends_with("norm.weight") {
                w.iter_mut().for_each(|w| *w += 1.0);
            }
            if arch == "llama" && (weight.gguf.contains("attn_q.") || weight.gguf.contains("attn_k.")) {
                let (rows, k) = if weight.shape.len() == 1 { (w.len(), 1) } else { weight.mk() };
                let head = (HIDDEN / HEADS) as usize;
                for model_row in 0..rows {
                    let (h, j, i) = (model_row / head, model_row % head / (head / 2), model_row % (head / 2));
                    let file_row = h * head + 2 * i + j;
                    w[file_row * k..][..k].copy_from_slice(&weight.w[model_row * k..][..k]);
                }
            }
            let bytes = match weight.kind {
                0 => common::f32_bytes(&w),
                1 => common::f16_bytes(&w),
                _ => weight.q8.clone(),
            };
            g.tensor(&weight.gguf, &weight.shape, weight.kind, bytes);
        }
        g
    }

    fn safetensors(&self, which: impl Fn(usize) -> bool) -> Vec<u8> {
        let mut tensors: Vec<common::StTensor> = Vec::new();
        for (_, w) in self.weights.iter().enumerate().filter(|(i, _)| which(*i)) {
            let (dtype, bytes) =
                if w.kind == 1 { ("F16", common::f16_bytes(&w.w)) } else { ("F32", common::f32_bytes(&w.w)) };
            tensors.push((&w.hf, dtype, &w.shape, bytes));
        }
        common::safetensors(&tensors)
    }
}

fn memory(name: &str, bytes: Vec<u8>) -> Container {
    Container::from_bytes(Bytes::memory(name, bytes)).unwrap()
}

/// Quantizes and opens the result.
fn quantize(source: &Container, recipe: &Recipe, out: &Path) -> Container {
    quantize::run(&quantize::plan(source, recipe).unwrap(), out, &()).unwrap();
    Container::open(out).unwrap()
}

fn header(file: &Container) -> &hfq::Header {
    match file.details() {
        Details::Hfq(header) => header,
        _ => panic!("{} is no .hfq", file.name()),
    }
}

fn meta(file: &Container, key: &str) -> Json {
    header(file).metadata.get(key).map_or(Json::Null, |raw| serde_json::from_str(raw.get()).unwrap())
}

/// Every tensor of the model is in the file, in its order, with exactly the bytes of the one-call encoder.
fn check(file: &Container, weights: &[Weight], format_of: impl Fn(&Weight) -> Format, rounding: ScaleRounding) {
    let names: Vec<_> = file.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, weights.iter().map(|w| w.hf.as_str()).collect::<Vec<_>>());
    for weight in weights {
        let (m, k) = weight.mk();
        let format = format_of(weight);
        let options = EncodeOptions { rounding, awq: None };
        let expected = QuantTensor::encode(&weight.hf, format, m, k, &weight.w, &options).unwrap();
        let info = file.find(&weight.hf).unwrap();
        assert_eq!(info.logical_shape, weight.shape, "{}", weight.hf);
        assert_eq!(info.stored_shape.last(), Some(&(expected.stored_k() as u64)), "{}", weight.hf);
        let got = file.load(&weight.hf).unwrap();
        assert_eq!((got.format(), got.m(), got.logical_k()), (format, m, k), "{}", weight.hf);
        if let Some(at) = got.bytes().iter().zip(expected.bytes()).position(|(a, b)| a != b) {
            let row_bytes = expected.bytes().len() / m;
            panic!("{} as {format}: byte {at} (row {}) differs", weight.hf, at / row_bytes);
        }
        assert_eq!(got.bytes().len(), expected.bytes().len());
        let rows = file.rows(info).unwrap().read_all().unwrap();
        assert!(rows.iter().map(|v| v.to_bits()).eq(expected.to_f32().iter().map(|v| v.to_bits())), "{}", weight.hf);
    }
}

/// The documented defaults, told once more by hand.
fn defaults(matrix: Format) -> impl Fn(&Weight) -> Format {
    move |w| match &*w.hf {
        "model.embed_tokens.weight" => Format::Q8_0,
        _ if w.shape.len() == 1 => Format::F16,
        _ => matrix,
    }
}

fn storable() -> impl Iterator<Item = Format> {
    Format::ALL.iter().copied().filter(|f| f.spec().qt.is_some())
}

const EVEN: ScaleRounding = ScaleRounding::NearestEven;

#[test]
fn every_format_from_every_architecture() {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("out.hfq");
    for (arch, id) in [("llama", 0), ("qwen2", 1), ("gemma3", 0xffff_ffff)] {
        let model = Model::new(arch, 1);
        let path = common::write(temp.path(), "model.gguf", &model.gguf().bytes());
        let source = Container::open(&path).unwrap();
        for format in storable() {
            let file = quantize(&source, &Recipe::new(format), &out);
            check(&file, &model.weights, defaults(format), EVEN);
            assert_eq!(header(&file).architecture, id);
            assert_eq!(header(&file).data_offset % 4096, 0);
            assert_eq!(header(&file).trailing, 0);
        }
    }
    assert_eq!(common::files(temp.path()), ["model.gguf", "out.hfq"]);
}

/// The test's own permutation is not the identity, and only llama has it: a guard against tests that agree on nothing.
#[test]
fn row_order_and_offsets_are_really_there() {
    for (arch, permuted, shifted) in [("llama", true, false), ("qwen2", false, false), ("gemma3", false, true)] {
        let mut model = Model::new(arch, 2);
        let file = memory("m.gguf", model.gguf().bytes());
        let stored = |name: &str| file.rows(file.find(name).unwrap()).unwrap().read_all().unwrap();
        assert_eq!(stored("blk.0.attn_q.weight") != model.get("model.layers.0.self_attn.q_proj.weight").w, permuted);
        assert_eq!(stored("blk.0.attn_k.weight") != model.get("model.layers.0.self_attn.k_proj.weight").w, permuted);
        assert_eq!(stored("blk.0.attn_v.weight"), model.get("model.layers.0.self_attn.v_proj.weight").w);
        if arch != "gemma3" {
            assert_eq!(stored("blk.0.attn_q.bias") != model.get("model.layers.0.self_attn.q_proj.bias").w, permuted);
            assert_eq!(stored("blk.0.attn_v.bias"), model.get("model.layers.0.self_attn.v_proj.bias").w);
        }
        assert_eq!(stored("output_norm.weight") != model.get("model.norm.weight").w, shifted);
        assert_eq!(stored("blk.0.attn_norm.weight") != model.get("model.layers.0.input_layernorm.weight").w, shifted);
    }
}

#[test]
fn metadata_of_a_gguf() {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("out.hfq");
    let model = Model::new("llama", 3);
    let path = common::write(temp.path(), "m.gguf", &model.gguf().bytes());
    let file = quantize(&Container::open(&path).unwrap(), &Recipe::new(Format::Mq4V2), &out);
    assert_eq!(meta(&file, "architecture"), "llama");
    assert_eq!(meta(&file, "source"), "gguf");
    assert_eq!(
        meta(&file, "config"),
        json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 320, "intermediate_size": 96,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "max_position_embeddings": 128, "head_dim": 160, "vocab_size": 40, "bos_token_id": 1,
            "eos_token_id": 2, "tie_word_embeddings": false,
        })
    );
    let tokens: Vec<String> = (0..VOCAB).map(|t| format!("Ġ\"{t}\"\n")).collect();
    let meta_of_gguf = meta(&file, "gguf_meta");
    assert_eq!(meta_of_gguf["tokenizer.ggml.tokens"], json!(tokens));
    assert_eq!(meta_of_gguf["tokenizer.ggml.model"], "gpt2");
    assert_eq!(meta_of_gguf["general.name"], "a small model");
    let scores = meta_of_gguf["tokenizer.ggml.scores"].as_array().unwrap();
    let same = scores.iter().enumerate().all(|(i, s)| s.as_f64().unwrap() as f32 == -(i as f32) / 3.0);
    assert!(same && scores.len() == 40, "f32 values must survive JSON");
    assert_eq!(meta(&file, "gguf_rope")["llama.rope.scaling.type"], "none");
    let ours = meta(&file, "bitlane");
    assert_eq!((&ours["source_file"], &ours["scale_rounding"]), (&json!("m.gguf"), &json!("nearest-even")));
    assert_eq!(ours["architecture_id"], Json::Null);
    // Only what was padded has a logical K: not the embedding (320 is ten blocks of Q8_0), not F16.
    let logical = ours["logical_k"].as_object().unwrap();
    let expected: Vec<_> =
        model.weights.iter().filter(|w| w.shape.len() == 2 && w.gguf != "token_embd.weight").collect();
    assert_eq!(logical.len(), expected.len());
    assert!(expected.iter().all(|w| logical[&w.hf] == *w.shape.last().unwrap()));

    // gemma3 has no number in the register: the file says so instead of borrowing another's.
    let path = common::write(temp.path(), "g.gguf", &Model::new("gemma3", 3).gguf().bytes());
    let file = quantize(&Container::open(&path).unwrap(), &Recipe::new(Format::Mq4V2), &out);
    assert_eq!(header(&file).architecture, hfq::NO_ARCHITECTURE);
    assert_eq!(meta(&file, "architecture"), "gemma3_text");
    let note = meta(&file, "bitlane")["architecture_id"].to_string();
    assert!(note.contains("no id for gemma3_text") && note.contains("refuse"), "{note}");
    assert_eq!(meta(&file, "config")["tie_word_embeddings"], true);
    assert_eq!(meta(&file, "config")["architectures"], json!(["Gemma3ForCausalLM"]));
}

#[test]
fn recipes() {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("out.hfq");
    let model = Model::new("llama", 4);
    let source = memory("m.gguf", model.gguf().bytes());
    let is_small = |w: &Weight| w.shape.len() == 1;

    let file = quantize(&source, &Recipe::pure(Format::Mq3V2), &out);
    check(&file, &model.weights, |w| if is_small(w) { Format::F16 } else { Format::Mq3V2 }, EVEN);

    let rounding = ScaleRounding::TowardZero;
    let recipe = Recipe { head: Some(Format::Mq6V2), small: Format::F32, rounding, ..Recipe::new(Format::Mq4V2) };
    let file = quantize(&source, &recipe, &out);
    let by_hand = |w: &Weight| match &*w.hf {
        "lm_head.weight" => Format::Mq6V2,
        "model.embed_tokens.weight" => Format::Q8_0,
        _ if is_small(w) => Format::F32,
        _ => Format::Mq4V2,
    };
    check(&file, &model.weights, by_hand, rounding);
    assert_eq!(meta(&file, "bitlane")["scale_rounding"], "toward-zero");

    // Patterns match either name; the last match wins; they reach what the roles would keep.
    let overrides: Vec<(String, Format)> = [
        ("*.down_proj.weight", Format::Mq6V2),
        ("blk.*.attn_?.weight", Format::Mq5V2),
        ("*.v_proj.*", Format::BF16),
        ("model.norm.weight", Format::F32),
        ("token_embd*", Format::Mq4C),
    ]
    .map(|(p, f)| (p.to_string(), f))
    .into();
    let skip = vec!["output.weight".to_string(), "*_proj.bias".into()];
    let file = quantize(&source, &Recipe { overrides, skip, ..Recipe::new(Format::Mq4V2) }, &out);
    let kept: Vec<_> =
        model.weights.iter().filter(|w| w.hf != "lm_head.weight" && !w.hf.ends_with("_proj.bias")).cloned().collect();
    assert_eq!(kept.len(), model.weights.len() - 4);
    let by_hand = |w: &Weight| match &*w.hf {
        "model.layers.0.mlp.down_proj.weight" => Format::Mq6V2,
        "model.layers.0.self_attn.v_proj.weight" => Format::BF16,
        "model.layers.0.self_attn.q_proj.weight" | "model.layers.0.self_attn.k_proj.weight" => Format::Mq5V2,
        "model.norm.weight" => Format::F32,
        "model.embed_tokens.weight" => Format::Mq4C,
        _ if is_small(w) => Format::F16,
        _ => Format::Mq4V2,
    };
    check(&file, &kept, by_hand, EVEN);
    // The model has a head, although it was left out here.
    assert_eq!(meta(&file, "config")["tie_word_embeddings"], false);
}

#[test]
fn warnings_say_what_a_person_should_know() {
    let source = memory("m.gguf", Model::new("llama", 5).gguf().bytes());
    let warnings = |recipe: &Recipe| quantize::plan(&source, recipe).unwrap().warnings;
    assert!(warnings(&Recipe::new(Format::Mq4V2)).is_empty());
    let w = warnings(&Recipe::new(Format::Mq2V2));
    assert!(w.len() == 1 && w[0].contains("mq2v2") && w[0].contains("rejected for product quality"), "{w:?}");
    let w = warnings(&Recipe::new(Format::Mq4V1));
    assert!(w.len() == 1 && w[0].contains("mq4v1: previous generation"), "{w:?}");
    let w = warnings(&Recipe { skip: vec!["output.weight".into()], ..Recipe::new(Format::Mq4V2) });
    assert!(w.len() == 1 && w[0].contains("output.weight is left out"), "{w:?}");
    let mut g = Model::new("llama", 5).gguf();
    g.f32("rope_freqs.weight", &[80], &[1.0; 80]);
    let source = memory("m.gguf", g.bytes());
    let plan = quantize::plan(&source, &Recipe::new(Format::Mq4V2)).unwrap();
    assert!(plan.warnings[0].contains("rope_freqs.weight has no Hugging Face name"), "{:?}", plan.warnings);
}

const TOKENIZER: &str = "{ \"version\": \"1.0\",\n \"model\": { \"vocab\": { \"\\u0120a\": 0, \"č\": 1 } } }\n";

#[test]
fn safetensors_single_and_sharded_with_what_lies_beside_them() {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("out.hfq");
    let model = Model::new("qwen2", 6);
    let single = temp.path().join("single");
    let sharded = temp.path().join("sharded");
    for folder in [&single, &sharded] {
        std::fs::create_dir(folder).unwrap();
        common::write(folder, "config.json", br#"{"model_type":"qwen3","hidden_size":320,"rope_theta":1000000.0}"#);
        common::write(folder, "tokenizer.json", TOKENIZER.as_bytes());
        common::write(
            folder,
            "tokenizer_config.json",
            br#"{"chat_template":"{% for m in messages %}{{ m }}{% endfor %}"}"#,
        );
        common::write(folder, "generation_config.json", br#"{"temperature":0.7}"#);
        common::write(folder, "unrelated.json", b"not json");
    }
    common::write(&single, "model.safetensors", &model.safetensors(|_| true));
    let name = |i: usize| format!("model-0000{}-of-00002.safetensors", 1 + i % 2);
    common::write(&sharded, &name(0), &model.safetensors(|i| i % 2 == 0));
    common::write(&sharded, &name(1), &model.safetensors(|i| i % 2 == 1));
    let map: serde_json::Map<_, _> =
        model.weights.iter().enumerate().map(|(i, w)| (w.hf.clone(), name(i).into())).collect();
    let index =
        common::write(&sharded, "model.safetensors.index.json", json!({ "weight_map": map }).to_string().as_bytes());

    // In a sharded model the order of the files comes first.
    let interleaved: Vec<Weight> = (0..2).flat_map(|s| model.weights.iter().skip(s).step_by(2).cloned()).collect();
    for (path, weights) in [
        (single.clone(), &model.weights),
        (single.join("model.safetensors"), &model.weights),
        (sharded.clone(), &interleaved),
        (index, &interleaved),
    ] {
        let source = Container::open(&path).unwrap();
        let file = quantize(&source, &Recipe::new(Format::Mq5V2), &out);
        check(&file, weights, defaults(Format::Mq5V2), EVEN);
        assert_eq!(header(&file).architecture, 1);
        assert_eq!((meta(&file, "architecture"), meta(&file, "source")), (json!("qwen3"), json!("safetensors")));
        assert_eq!(
            meta(&file, "config"),
            json!({ "model_type": "qwen3", "hidden_size": 320, "rope_theta": 1000000.0 })
        );
        assert_eq!(meta(&file, "tokenizer"), TOKENIZER, "the tokenizer is a string, as it was");
        assert_eq!(meta(&file, "tokenizer_config")["chat_template"], "{% for m in messages %}{{ m }}{% endfor %}");
        assert_eq!(meta(&file, "generation_config"), json!({ "temperature": 0.7 }));
    }
    common::write(&single, "config.json", b"{ nonsense");
    let source = Container::open(&single).unwrap();
    let e = quantize::plan(&source, &Recipe::new(Format::F16)).unwrap_err().to_string();
    assert!(e.contains("model.safetensors: its config.json is not JSON"), "{e}");
}

#[test]
fn hfq_to_hfq() {
    let temp = tempfile::tempdir().unwrap();
    let model = Model::new("llama", 7);
    let source = memory("m.gguf", model.gguf().bytes());
    let first = quantize(&source, &Recipe::new(Format::Mq4V2), &temp.path().join("first.hfq"));
    let recipe = Recipe { small: Format::F32, ..Recipe::pure(Format::F32) };
    let second = quantize(&first, &recipe, &temp.path().join("second.hfq"));
    let decoded: Vec<Weight> =
        model.weights.iter().map(|w| Weight { w: first.load(&w.hf).unwrap().to_f32(), ..w.clone() }).collect();
    check(&second, &decoded, |_| Format::F32, EVEN);
    assert_eq!(header(&second).architecture, 0);
    for key in ["config", "gguf_meta", "gguf_rope", "architecture", "source"] {
        assert_eq!(meta(&second, key), meta(&first, key), "{key}");
        assert_ne!(meta(&second, key), Json::Null, "{key}");
    }
    assert_eq!(meta(&second, "bitlane")["source_file"], "first.hfq");
    assert_eq!(meta(&second, "bitlane")["logical_k"], Json::Null, "nothing is padded in f32");
    // A model is not replaced by its own quantization.
    let path = temp.path().join("second.hfq");
    let second = Container::open(&path).unwrap();
    let before = std::fs::read(&path).unwrap();
    let e = quantize::run(&quantize::plan(&second, &Recipe::new(Format::Mq6V2)).unwrap(), &path, &()).unwrap_err();
    assert!(matches!(e, Error::Usage(_)), "{e}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn awq_is_attached_divided_out_and_dropped() {
    let (m, k) = (3, 300);
    let mut rng = Lcg::new(8);
    let w = rng.weights(m * k);
    let scales: Vec<f16> = (0..k).map(|_| f16::from_f32(0.25 + (rng.u32() % 64) as f32 / 16.0)).collect();
    let awq = Arc::new(Awq::new("w", scales.clone()).unwrap());
    let multiplied: Vec<f32> = w.iter().enumerate().map(|(i, v)| v * scales[i % k].to_f32()).collect();
    // Encoding the multiplied weights without any AWQ is what a producer does.
    let blob = QuantTensor::encode("w", Format::Mq6V2, m, k, &multiplied, &Default::default()).unwrap();
    let mut h = Hfq::new(0, r#"{"architecture":"llama","bitlane":{"logical_k":{"a.b.weight":300}}}"#);
    h.tensor("a.b.awq_scale.weight", 1, &[k as u32], 0, scales.iter().flat_map(|s| s.to_le_bytes()).collect());
    h.tensor("a.b.weight", 47, &[m as u32, 512], 256, blob.bytes().to_vec());
    h.tensor("c.weight", 1, &[4], 0, common::f16_bytes(&[1.0; 4]));
    // A name like a sidecar's with nothing that it belongs to is a tensor like any other.
    h.tensor("d.awq_scale.weight", 1, &[4], 0, common::f16_bytes(&[2.0; 4]));
    let file = memory("awq.hfq", h.bytes());

    let loaded = file.load("a.b.weight").unwrap();
    assert_eq!(loaded.awq().unwrap().scales(), scales);
    assert_eq!(loaded.awq().unwrap().id(), awq.id());
    let by_encoder =
        QuantTensor::encode("w", Format::Mq6V2, m, k, &w, &EncodeOptions { awq: Some(awq), ..Default::default() });
    assert!(by_encoder.unwrap().bytes() == loaded.bytes());
    assert!(file.load("c.weight").unwrap().awq().is_none());

    let divided: Vec<f32> = blob.to_f32().iter().enumerate().map(|(i, v)| v / scales[i % k].to_f32()).collect();
    let rows = file.rows(file.find("a.b.weight").unwrap()).unwrap().read_all().unwrap();
    assert_eq!(rows, divided);
    assert_eq!(loaded.to_f32(), divided);
    let worst = rows.iter().zip(&w).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(worst < 0.5, "{worst}: division by the wrong scales");

    let temp = tempfile::tempdir().unwrap();
    let recipe = Recipe { small: Format::F32, ..Recipe::pure(Format::F32) };
    let plan = quantize::plan(&file, &recipe).unwrap();
    assert!(
        plan.warnings.len() == 1 && plan.warnings[0].contains("a.b.awq_scale.weight is left out"),
        "{:?}",
        plan.warnings
    );
    let again = quantize(&file, &recipe, &temp.path().join("again.hfq"));
    let names: Vec<_> = again.tensors().iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a.b.weight", "c.weight", "d.awq_scale.weight"]);
    assert_eq!(again.load("a.b.weight").unwrap().to_f32(), divided);
}

#[test]
fn what_makes_no_sense_is_refused_before_any_work() {
    let temp = tempfile::tempdir().unwrap();
    let model = Model::new("llama", 9);
    let plain = memory("m.gguf", model.gguf().bytes());
    let refuse = |source: &Container, recipe: &Recipe| quantize::plan(source, recipe).unwrap_err();
    let base = Recipe::new(Format::Mq4V2);

    // Patterns that match nothing, also when others match.
    for pattern in ["*.nothing.weight", "down_proj", "", "MODEL.*"] {
        let overrides = vec![("*".into(), Format::F16), (pattern.to_string(), Format::Mq6V2)];
        let e = refuse(&plain, &Recipe { overrides, ..base.clone() });
        assert!(
            matches!(e, Error::Usage(_)) && e.to_string().contains(&format!("{pattern:?} matches no tensor")),
            "{e}"
        );
        let e = refuse(&plain, &Recipe { skip: vec![pattern.to_string()], ..base.clone() });
        assert!(matches!(e, Error::Usage(_)), "{e}");
    }
    let e = refuse(&plain, &Recipe { skip: vec!["*".into()], ..base.clone() });
    assert!(e.to_string().contains("no tensors"), "{e}");

    // t2 has no number in .hfq, whether the shape fits or not.
    let fits = memory("t.safetensors", common::safetensors(&[("a.weight", "F32", &[32, 256], vec![0; 32 * 256 * 4])]));
    for (source, name) in [(&plain, "q_proj.weight"), (&fits, "a.weight")] {
        let e = refuse(source, &Recipe::new(Format::T2)).to_string();
        assert!(e.contains(name) && e.contains("t2"), "{e}");
    }
    let e = refuse(&fits, &Recipe::new(Format::T2)).to_string();
    assert!(e.contains(".hfq register has no number for t2"), "{e}");

    // Kinds of models.
    let with = |key: &str, value: Kv| {
        let mut g = model.gguf();
        g.key(key, value);
        memory("m.gguf", g.bytes())
    };
    for (source, word) in [
        (with("llama.expert_count", Kv::U32(8)), "mixture of experts"),
        (with("prism.hadamard.version", Kv::U32(1)), "prism.hadamard.version"),
        (with("prism.hadamard.block_size", Kv::U32(1024)), "rotated basis"),
        (with("split.count", Kv::Raw(2, vec![3, 0])), "one of 3 parts of a split GGUF"),
        (memory("m.gguf", Gguf::new("qwen35").f32("a", &[2], &[0.0; 2]).bytes()), "\"qwen35\""),
        (memory("m.gguf", Gguf::new("").f32("a", &[2], &[0.0; 2]).bytes()), "architecture \"\""),
        (
            memory("m.gguf", model.gguf().f32("blk.0.ffn_up_exps.weight", &[2, 2, 4], &[0.0; 16]).bytes()),
            "blk.0.ffn_up_exps.weight",
        ),
        (
            memory(
                "m.safetensors",
                common::safetensors(&[("model.layers.0.mlp.experts.0.up_proj.weight", "F32", &[2, 2], vec![0; 16])]),
            ),
            "experts.0.up_proj",
        ),
    ] {
        let e = refuse(&source, &base);
        assert!(matches!(e, Error::UnsupportedModel { .. }) && e.to_string().contains(word), "{e}");
        assert!(e.to_string().starts_with("m."), "{e}");
    }
    for (key, value) in [("llama.expert_count", Kv::U32(0)), ("split.count", Kv::Raw(2, vec![1, 0]))] {
        assert!(quantize::plan(&with(key, value), &base).is_ok());
    }
    // Rows that are not whole heads cannot be put back in order.
    let mut g = model.gguf();
    g.key("llama.attention.key_length", 48);
    let e = refuse(&memory("m.gguf", g.bytes()), &base).to_string();
    assert!(e.contains("blk.0.attn_q.weight has 320 rows, not those of 2 heads of 48"), "{e}");
    // Nor can they where the head size is unknown: the order in the file is then not the model's.
    g.keys.retain(|(k, _)| k != b"llama.attention.key_length" && k != b"llama.attention.head_count");
    let e = refuse(&memory("m.gguf", g.bytes()), &base).to_string();
    assert!(e.contains("m.gguf") && e.contains("head size of llama is not known"), "{e}");

    // Tensors that are no weights, and types that are not decoded.
    let ints =
        common::safetensors(&[("a.weight", "F32", &[2, 2], vec![0; 16]), ("a.counts", "I64", &[2], vec![0; 16])]);
    let ints = memory("i.safetensors", ints);
    let e = refuse(&ints, &base);
    assert!(matches!(e, Error::UnsupportedTensor { .. }), "{e}");
    assert!(e.to_string().contains("a.counts") && e.to_string().contains("I64"), "{e}");
    let file = quantize(&ints, &Recipe { skip: vec!["*.counts".into()], ..base.clone() }, &temp.path().join("i.hfq"));
    assert_eq!(file.tensors().len(), 1);
    let mut g = model.gguf();
    g.tensor("blk.9.ffn_up.weight", &[1, 256], 35, vec![0; 66]);
    let e = refuse(&memory("m.gguf", g.bytes()), &base).to_string();
    assert!(e.contains("blk.9.ffn_up.weight") && e.contains("ggml type 35 TQ2_0"), "{e}");
    // A tensor that the architecture is not known to have: its row order would be a guess.
    let mut g = model.gguf();
    g.f32("blk.0.attn_sub_norm.weight", &[4], &[0.0; 4]);
    let source = memory("m.gguf", g.bytes());
    let e = refuse(&source, &base).to_string();
    assert!(e.contains("blk.0.attn_sub_norm.weight") && e.contains("not known to have it"), "{e}");
    assert!(quantize::plan(&source, &Recipe { skip: vec!["*sub_norm*".into()], ..base.clone() }).is_ok());
    // Constants are carried along; counting buffers are left out; both are said.
    let mut g = model.gguf();
    g.f32("rope_freqs.weight", &[4], &[1.0; 4]);
    let source = memory("m.gguf", g.bytes());
    let plan = quantize::plan(&source, &base).unwrap();
    assert!(plan.warnings.iter().any(|w| w.contains("rope_freqs.weight")), "{:?}", plan.warnings);
    let counts =
        common::safetensors(&[("a.weight", "F32", &[2, 2], vec![0; 16]), ("e.position_ids", "I64", &[2], vec![0; 16])]);
    let source = memory("c.safetensors", counts);
    let plan = quantize::plan(&source, &base).unwrap();
    assert!(plan.steps.len() == 1 && plan.warnings[0].contains("e.position_ids is left out"), "{:?}", plan.warnings);
    // Two tensors that would get one name.
    let mut g = model.gguf();
    g.f32("blk.00.attn_norm.weight", &[4], &[0.0; 4]);
    let e = refuse(&memory("m.gguf", g.bytes()), &base).to_string();
    assert!(e.contains("model.layers.0.input_layernorm.weight") && e.contains("two tensors"), "{e}");
    assert_eq!(common::files(temp.path()), ["i.hfq"]);
}

/// A value that is not finite, or too large, ends the run; nothing is left, and what was there before stays.
#[test]
fn values_that_do_not_fit_leave_no_output() {
    for (tensor, row, col, value, format, words) in [
        ("self_attn.q_proj.weight", 171, 13, f32::NAN, Format::Mq4V2, "value NaN at row 182, column 13 is not finite"),
        ("self_attn.q_proj.bias", 0, 319, f32::INFINITY, Format::Mq4V2, "value inf at row 0, column 319"),
        ("self_attn.v_proj.weight", 159, 319, f32::NEG_INFINITY, Format::Mq3V2, "value -inf at row 159, column 319"),
        ("mlp.down_proj.weight", 2, 95, f32::NAN, Format::F32, "value NaN at row 2, column 95"),
        (
            "input_layernorm.weight",
            0,
            7,
            1e5,
            Format::Mq4V2,
            "f16 cannot hold row 0, columns 7..8: value 1e5 exceeds 65504",
        ),
        ("mlp.up_proj.weight", 5, 300, 1e9, Format::Mq4V2, "mq4v2 cannot hold row 5, columns 256..384"),
    ] {
        let mut model = Model::new("llama", 10);
        let name = format!("model.layers.0.{tensor}");
        let weight = model.get(&name);
        let gguf = weight.gguf.clone(); // errors name the tensor and the row of the source
        let k = weight.mk().1;
        weight.w[row * k + col] = value;
        let source = memory("m.gguf", model.gguf().bytes());
        let temp = tempfile::tempdir().unwrap();
        let out = temp.path().join("out.hfq");
        let plan = quantize::plan(&source, &Recipe::new(format)).unwrap();
        for before in [None, Some(&b"what was there"[..])] {
            if let Some(bytes) = before {
                std::fs::write(&out, bytes).unwrap();
            }
            let e = quantize::run(&plan, &out, &()).unwrap_err().to_string();
            assert!(e.contains(&format!("tensor {gguf}: ")) && e.contains(words), "{e}: {words}");
            assert_eq!(common::files(temp.path()).len(), usize::from(before.is_some()));
            assert_eq!(std::fs::read(&out).ok().as_deref(), before);
        }
    }
}

/// Tensors of several chunks, heads that lie across their borders, and tensors of one row.
fn large() -> Model {
    let mut m = Model { arch: "llama", weights: Vec::new(), rng: Lcg::new(11) };
    m.add("self_attn.q_proj.weight", ".attn_q.weight", &[320, 2000], 0);
    m.add("self_attn.k_proj.weight", ".attn_k.weight", &[160, 4100], 1);
    m.add("self_attn.q_proj.bias", ".attn_q.bias", &[320], 0);
    m.add("mlp.up_proj.weight", ".ffn_up.weight", &[1, 300_000], 0);
    m.add("mlp.down_proj.weight", ".ffn_down.weight", &[300_000, 1], 0);
    m.add("model.norm.weight", "output_norm.weight", &[32], 0);
    m
}

#[test]
fn the_number_of_threads_does_not_change_a_byte() {
    let temp = tempfile::tempdir().unwrap();
    let model = large();
    let source = memory("m.gguf", model.gguf().bytes());
    let recipe = Recipe { overrides: vec![("*down_proj*".into(), Format::Q8_0)], ..Recipe::new(Format::Mq4V2) };
    let plan = quantize::plan(&source, &recipe).unwrap();
    let mut first: Option<Vec<u8>> = None;
    for threads in [1, 2, 3, 8] {
        let out = temp.path().join(format!("{threads}.hfq"));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| quantize::run(&plan, &out, &())).unwrap();
        let bytes = std::fs::read(&out).unwrap();
        match &first {
            None => {
                let by_hand = |w: &Weight| match &*w.hf {
                    "model.layers.0.mlp.down_proj.weight" => Format::Q8_0,
                    _ if w.shape.len() == 1 || w.shape.contains(&1) => Format::F16,
                    _ => Format::Mq4V2,
                };
                check(&Container::open(&out).unwrap(), &model.weights, by_hand, EVEN);
                first = Some(bytes);
            }
            Some(first) => assert!(*first == bytes, "{threads} threads write another file"),
        }
    }
}

/// Stops once `limit` weights are written.
struct Stop {
    limit: u64,
    done: AtomicU64,
}

impl Progress for Stop {
    fn advance(&self, weights: u64) {
        self.done.fetch_add(weights, Ordering::Relaxed);
    }
    fn cancelled(&self) -> bool {
        self.done.load(Ordering::Relaxed) >= self.limit
    }
}

#[test]
fn cancelling_leaves_everything_as_it_was() {
    let model = large();
    let source = memory("m.gguf", model.gguf().bytes());
    let plan = quantize::plan(&source, &Recipe::new(Format::Mq4V2)).unwrap();
    let total = plan.weights();
    assert_eq!(total, model.weights.iter().map(|w| w.w.len() as u64).sum::<u64>());
    // At once, after the first chunk, half way, and when the last weight was written but the file has no name yet.
    for limit in [0, 1, total / 2, total] {
        for before in [None, Some(&b"what was there"[..])] {
            let temp = tempfile::tempdir().unwrap();
            let out = temp.path().join("out.hfq");
            if let Some(bytes) = before {
                std::fs::write(&out, bytes).unwrap();
            }
            let stop = Stop { limit, done: AtomicU64::new(0) };
            let e = quantize::run(&plan, &out, &stop).unwrap_err();
            assert!(matches!(e, Error::Cancelled), "{e}");
            assert_eq!(common::files(temp.path()).len(), usize::from(before.is_some()));
            assert_eq!(std::fs::read(&out).ok().as_deref(), before);
        }
    }
    let stop = Stop { limit: u64::MAX, done: AtomicU64::new(0) };
    let temp = tempfile::tempdir().unwrap();
    quantize::run(&plan, &temp.path().join("out.hfq"), &stop).unwrap();
    assert_eq!(stop.done.load(Ordering::Relaxed), total, "progress adds up to all weights");
}

#[test]
fn an_output_that_cannot_be_written_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let source = memory("m.gguf", Model::new("llama", 12).gguf().bytes());
    let plan = quantize::plan(&source, &Recipe::new(Format::Mq4V2)).unwrap();
    let folder = temp.path().join("a folder");
    std::fs::create_dir(&folder).unwrap();
    for out in [temp.path().join("missing/out.hfq"), folder] {
        let e = quantize::run(&plan, &out, &()).unwrap_err().to_string();
        assert!(e.contains(&*out.display().to_string()), "{e}");
    }
    assert_eq!(common::files(temp.path()), ["a folder"]);
}

/// A folder, a device or a pipe under the output's name is neither replaced nor written to; a link is followed.
#[cfg(unix)]
#[test]
fn outputs_that_are_no_regular_file() {
    let temp = tempfile::tempdir().unwrap();
    let source = memory("m.gguf", Model::new("llama", 3).gguf().bytes());
    let plan = quantize::plan(&source, &Recipe::new(Format::Mq4V2)).unwrap();
    for out in [temp.path(), Path::new("/dev/null")] {
        let e = quantize::run(&plan, out, &()).unwrap_err().to_string();
        assert!(e.contains("no regular file") && e.contains(&out.display().to_string()), "{e}");
    }
    let (real, link) = (temp.path().join("real.hfq"), temp.path().join("link.hfq"));
    std::fs::write(&real, b"old").unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    quantize::run(&plan, &link, &()).unwrap();
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(Container::open(&real).is_ok());
}

/// Numbers that f64 cannot hold, key order and spacing of carried JSON stay as they were; RoPE scaling reaches the config.
#[test]
fn carried_json_is_not_rewritten() {
    let temp = tempfile::tempdir().unwrap();
    let text = r#"{ "z": 1000000000000000019884624838656,  "a": 1e-05 }"#;
    common::write(temp.path(), "tokenizer_config.json", text.as_bytes());
    common::write(temp.path(), "model.safetensors", &common::safetensors(&[("a.weight", "F32", &[2, 2], vec![0; 16])]));
    let file = quantize(&Container::open(temp.path()).unwrap(), &Recipe::new(Format::F16), &temp.path().join("o.hfq"));
    assert_eq!(header(&file).metadata["tokenizer_config"].get(), text);

    let mut g = Model::new("llama", 3).gguf();
    g.keys.retain(|(k, _)| !k.starts_with(b"llama.rope.scaling"));
    g.key("llama.rope.scaling.factor", 4);
    g.keys.push((b"llama.rope.scaling.type".to_vec(), Kv::Str("yarn".into())));
    let file = quantize(&memory("m.gguf", g.bytes()), &Recipe::new(Format::F16), &temp.path().join("p.hfq"));
    assert_eq!(meta(&file, "config")["rope_scaling"], json!({ "rope_type": "yarn", "factor": 4 }));
}
