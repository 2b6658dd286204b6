//! What differs between a GGUF and the Hugging Face layout of the same model, as a table per
//! architecture: names, row order, norm offsets, and a synthesised `config`.
//!
//! Only architecture `llama` (Llama, Mistral, SmolLM2) stores the rows of q and k permuted for
//! interleaved RoPE; gemma files store norm weights + 1. Both are put back, and only there.

use serde_json::{Map, Value as Json, json};

use super::gguf::{Header, Value};
use super::hfq::NO_ARCHITECTURE;
use crate::error::{Error, Result};

/// One architecture.
#[derive(Debug)]
pub struct Arch {
    /// `general.architecture` in GGUF.
    pub gguf: &'static str,
    /// `model_type` in a Hugging Face config.
    pub model_type: &'static str,
    /// `architectures[0]` there.
    pub class: &'static str,
    /// Architecture id in .hfq.
    pub hfq: u32,
    /// Rows of q and k are permuted in GGUF.
    pub permuted_qk: bool,
    /// Norm weights are stored + 1 in GGUF.
    pub norms_plus_one: bool,
    /// Has norms after attention and feed-forward too, and names them its own way.
    pub sandwich_norms: bool,
}

const PLAIN: Arch = Arch {
    gguf: "",
    model_type: "",
    class: "",
    hfq: NO_ARCHITECTURE,
    permuted_qk: false,
    norms_plus_one: false,
    sandwich_norms: false,
};

/// Architectures whose row order and norms are known. Others are refused: a guess would be silent corruption.
pub static ARCHS: &[Arch] = &[
    Arch { gguf: "llama", model_type: "llama", class: "LlamaForCausalLM", hfq: 0, permuted_qk: true, ..PLAIN },
    Arch { gguf: "qwen2", model_type: "qwen2", class: "Qwen2ForCausalLM", hfq: 1, ..PLAIN },
    Arch { gguf: "qwen3", model_type: "qwen3", class: "Qwen3ForCausalLM", hfq: 1, ..PLAIN },
    Arch { gguf: "gemma", model_type: "gemma", class: "GemmaForCausalLM", norms_plus_one: true, ..PLAIN },
    Arch {
        gguf: "gemma2",
        model_type: "gemma2",
        class: "Gemma2ForCausalLM",
        norms_plus_one: true,
        sandwich_norms: true,
        ..PLAIN
    },
    Arch {
        gguf: "gemma3",
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        norms_plus_one: true,
        sandwich_norms: true,
        ..PLAIN
    },
];

/// Tensors without a Hugging Face name that are constants of the architecture, not weights: they are carried along
/// under their own name.
pub const CONSTANTS: [&str; 1] = ["rope_freqs.weight"];

/// Architecture id in .hfq of a Hugging Face `model_type`; none is [`NO_ARCHITECTURE`]. Beside those of [`ARCHS`], the
/// types that only safetensors models come in.
pub fn hfq_id(model_type: &str) -> u32 {
    if let Some(a) = ARCHS.iter().find(|a| a.model_type == model_type) {
        return a.hfq;
    }
    match model_type {
        "mistral" => 0,
        "qwen3_5" | "qwen3_5_text" => 5,
        "qwen3_5_moe" | "qwen3_5_moe_text" => 6,
        "gemma4" | "gemma4_text" => 13,
        _ => NO_ARCHITECTURE,
    }
}

/// Which row of a source tensor is row `r` of the tensor that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// The same.
    Same,
    /// GGUF's interleaving of each head of `head` rows, undone: row `h·head + j·head/2 + i` of the model
    /// is row `h·head + 2·i + j` of the file (j = 0, 1).
    Interleaved {
        /// Rows of a head.
        head: usize,
        /// Rows that the tensor must have: those of all its heads.
        rows: usize,
    },
}

impl RowOrder {
    /// The source's row for a row of the model.
    pub fn source(self, r: usize) -> usize {
        match self {
            RowOrder::Same => r,
            RowOrder::Interleaved { head, .. } => {
                let (h, in_head) = (r / head, r % head);
                h * head + 2 * (in_head % (head / 2)) + in_head / (head / 2)
            }
        }
    }
}

/// What becomes of one GGUF tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Mapped {
    /// Hugging Face name.
    pub name: String,
    /// Row order to undo.
    pub rows: RowOrder,
    /// Number to add to every weight.
    pub add: f32,
}

impl Mapped {
    /// A tensor that stays as it is.
    pub fn same(name: &str) -> Self {
        Mapped { name: name.into(), rows: RowOrder::Same, add: 0.0 }
    }
}

impl Arch {
    /// The row of a GGUF file's architecture, or the refusal that names what it is.
    ///
    /// # Errors
    /// [`Error::UnsupportedModel`] for unknown architectures, mixtures of experts, split files, and
    /// weights in a rotated basis of their own.
    pub fn of(file: &str, header: &Header) -> Result<&'static Arch> {
        let refuse = |what: String| Error::UnsupportedModel { file: file.into(), what };
        let name = header.architecture();
        if let Some(key) = header.meta.keys().find(|k| k.starts_with("prism.hadamard.")) {
            return Err(refuse(format!(
                "its weights are in a rotated basis of their own ({key}), which is not supported"
            )));
        }
        if header.arch("expert_count").and_then(Value::as_u64).is_some_and(|n| n > 0) {
            return Err(refuse(format!("architecture {name} with experts (mixture of experts) is not supported")));
        }
        if let Some(n) = header.meta.get("split.count").and_then(Value::as_u64).filter(|n| *n > 1) {
            return Err(refuse(format!("it is one of {n} parts of a split GGUF: merge them first")));
        }
        let arch = ARCHS.iter().find(|a| a.gguf == name).ok_or_else(|| {
            let known: Vec<_> = ARCHS.iter().map(|a| a.gguf).collect();
            refuse(format!(
                "architecture {name:?}: its row order and norm offsets are not known (known: {})",
                known.join(", ")
            ))
        })?;
        if arch.permuted_qk && (arch.even_head_dim(header).is_none() || arch.heads(header, "attn_q").is_none()) {
            return Err(refuse(format!(
                "the head size of {name} is not known: rows of q and k cannot be put back in order"
            )));
        }
        Ok(arch)
    }

    /// Name, row order and offset of one tensor; `None` for a name that the table does not have.
    pub fn map(&self, header: &Header, tensor: &str) -> Option<Mapped> {
        let plain = |name: &str| Mapped { name: name.into(), rows: RowOrder::Same, add: 0.0 };
        match tensor {
            "token_embd.weight" => return Some(plain("model.embed_tokens.weight")),
            "output.weight" => return Some(plain("lm_head.weight")),
            "output_norm.weight" => return Some(Mapped { add: self.norm_add(), ..plain("model.norm.weight") }),
            _ => {}
        }
        let (layer, rest) = tensor.strip_prefix("blk.")?.split_once('.')?;
        let layer: u32 = layer.parse().ok()?;
        let (stem, suffix) = rest.rsplit_once('.').filter(|(_, s)| matches!(*s, "weight" | "bias"))?;
        let (name, norm) = match stem {
            "attn_norm" => ("input_layernorm", true),
            "ffn_norm" if self.sandwich_norms => ("pre_feedforward_layernorm", true),
            "ffn_norm" => ("post_attention_layernorm", true),
            "post_attention_norm" if self.sandwich_norms => ("post_attention_layernorm", true),
            "post_ffw_norm" if self.sandwich_norms => ("post_feedforward_layernorm", true),
            "attn_q_norm" => ("self_attn.q_norm", true),
            "attn_k_norm" => ("self_attn.k_norm", true),
            "attn_q" => ("self_attn.q_proj", false),
            "attn_k" => ("self_attn.k_proj", false),
            "attn_v" => ("self_attn.v_proj", false),
            "attn_output" => ("self_attn.o_proj", false),
            "ffn_gate" => ("mlp.gate_proj", false),
            "ffn_up" => ("mlp.up_proj", false),
            "ffn_down" => ("mlp.down_proj", false),
            _ => return None,
        };
        let rows = match (self.permuted_qk && matches!(stem, "attn_q" | "attn_k"), self.even_head_dim(header)) {
            (true, Some(head)) => RowOrder::Interleaved { head, rows: head * self.heads(header, stem)? },
            (true, None) => return None,
            (false, _) => RowOrder::Same,
        };
        let add = if norm { self.norm_add() } else { 0.0 };
        Some(Mapped { name: format!("model.layers.{layer}.{name}.{suffix}"), rows, add })
    }

    fn norm_add(&self) -> f32 {
        if self.norms_plus_one { -1.0 } else { 0.0 }
    }

    /// Heads of q or of k and v, by GGUF's stem.
    pub fn heads(&self, header: &Header, stem: &str) -> Option<usize> {
        let number = |key| header.arch(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        let q = number("attention.head_count");
        if stem == "attn_q" { q } else { number("attention.head_count_kv").or(q) }
    }

    /// The head size that rows of q and k can be permuted by.
    fn even_head_dim(&self, header: &Header) -> Option<usize> {
        self.head_dim(header).filter(|d| *d >= 2 && d.is_multiple_of(2))
    }

    fn head_dim(&self, header: &Header) -> Option<usize> {
        let number = |key| header.arch(key).and_then(Value::as_u64);
        let heads = number("attention.head_count").filter(|h| *h > 0);
        let dim = number("attention.key_length").or_else(|| Some(number("embedding_length")? / heads?))?;
        usize::try_from(dim).ok()
    }

    /// A Hugging Face style config, from a GGUF header.
    pub fn config(&self, header: &Header, vocab: Option<u64>, tied: bool) -> Json {
        let mut c = Map::new();
        c.insert("architectures".into(), json!([self.class]));
        c.insert("model_type".into(), self.model_type.into());
        let copy = |into: &mut Map<String, Json>, keys: &[(&str, &str)]| {
            for (hf, gguf) in keys {
                if let Some(v) = header.arch(gguf) {
                    into.insert((*hf).into(), v.to_json());
                }
            }
        };
        let keys = [
            ("hidden_size", "embedding_length"),
            ("intermediate_size", "feed_forward_length"),
            ("num_hidden_layers", "block_count"),
            ("num_attention_heads", "attention.head_count"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("rope_theta", "rope.freq_base"),
            ("max_position_embeddings", "context_length"),
            ("sliding_window", "attention.sliding_window"),
        ];
        copy(&mut c, &keys);
        if let Some(d) = self.head_dim(header) {
            c.insert("head_dim".into(), d.into());
        }
        if let Some(v) = vocab {
            c.insert("vocab_size".into(), v.into());
        }
        for (hf, gguf) in
            [("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id"), ("pad_token_id", "padding_token_id")]
        {
            if let Some(v) = header.meta.get(&format!("tokenizer.ggml.{gguf}")) {
                c.insert(hf.into(), v.to_json());
            }
        }
        c.insert("tie_word_embeddings".into(), tied.into());
        if let Some(scaling) = header.arch("rope.scaling.type").and_then(Value::as_str).filter(|t| *t != "none") {
            let mut r = Map::new();
            r.insert("rope_type".into(), scaling.into());
            let keys = [
                ("factor", "rope.scaling.factor"),
                ("original_max_position_embeddings", "rope.scaling.original_context_length"),
                ("attention_factor", "rope.scaling.attn_factor"),
                ("beta_fast", "rope.scaling.yarn_beta_fast"),
                ("beta_slow", "rope.scaling.yarn_beta_slow"),
            ];
            copy(&mut r, &keys);
            c.insert("rope_scaling".into(), r.into());
        }
        if self.norms_plus_one {
            c.insert("hidden_activation".into(), "gelu_pytorch_tanh".into());
        }
        if self.gguf == "gemma3" {
            // Constants of the architecture that GGUF leaves to the reader.
            c.insert("rope_local_base_freq".into(), 10_000.0.into());
            c.insert("sliding_window_pattern".into(), 6.into());
        }
        Json::Object(c)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn header(arch: &str) -> Header {
        let u = |v| Value::Uint(v);
        let mut meta = BTreeMap::new();
        meta.insert("general.architecture".to_string(), Value::String(arch.into()));
        meta.insert(format!("{arch}.embedding_length"), u(64));
        meta.insert(format!("{arch}.attention.head_count"), u(8));
        Header { version: 3, meta, data_offset: 0 }
    }

    /// How converters permute: reshape [heads, 2, head/2] and swap the last two.
    fn permute(rows: usize, head: usize) -> Vec<usize> {
        let mut out = vec![0; rows];
        for (r, o) in out.iter_mut().enumerate() {
            let (h, x) = (r / head, r % head);
            *o = h * head + (x % 2) * (head / 2) + x / 2; // row r of the file is row *o of the model
        }
        out
    }

    #[test]
    fn only_llama_is_permuted_and_the_order_is_the_inverse() {
        for arch in ARCHS {
            let h = header(arch.gguf);
            for stem in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up"] {
                let m = arch.map(&h, &format!("blk.3.{stem}.weight")).unwrap();
                let permuted = arch.gguf == "llama" && matches!(stem, "attn_q" | "attn_k");
                assert_eq!(m.rows != RowOrder::Same, permuted, "{} {stem}", arch.gguf);
                let file = if permuted { permute(32, 8) } else { (0..32).collect() };
                for r in 0..32 {
                    assert_eq!(file[m.rows.source(r)], r);
                }
            }
        }
    }

    #[test]
    fn only_gemma_norms_are_shifted() {
        for arch in ARCHS {
            let h = header(arch.gguf);
            let gemma = arch.gguf.starts_with("gemma");
            for norm in
                ["output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "blk.0.attn_q_norm.weight"]
            {
                assert_eq!(arch.map(&h, norm).unwrap().add, if gemma { -1.0 } else { 0.0 }, "{} {norm}", arch.gguf);
            }
            assert_eq!(arch.map(&h, "blk.0.ffn_down.weight").unwrap().add, 0.0);
        }
    }

    #[test]
    fn names() {
        let name = |arch: &str, t: &str| {
            let a = ARCHS.iter().find(|a| a.gguf == arch).unwrap();
            a.map(&header(arch), t).map(|m| m.name)
        };
        assert_eq!(name("llama", "blk.12.attn_q.bias").unwrap(), "model.layers.12.self_attn.q_proj.bias");
        assert_eq!(name("llama", "blk.0.ffn_norm.weight").unwrap(), "model.layers.0.post_attention_layernorm.weight");
        assert_eq!(name("gemma3", "blk.0.ffn_norm.weight").unwrap(), "model.layers.0.pre_feedforward_layernorm.weight");
        assert_eq!(
            name("gemma3", "blk.0.post_ffw_norm.weight").unwrap(),
            "model.layers.0.post_feedforward_layernorm.weight"
        );
        assert_eq!(name("llama", "output.weight").unwrap(), "lm_head.weight");
        assert_eq!(name("llama", "rope_freqs.weight"), None);
        assert_eq!(name("llama", "blk.x.attn_q.weight"), None);
    }

    #[test]
    fn refusals_name_what_it_is() {
        let mut h = header("llama");
        h.meta.insert("llama.expert_count".into(), Value::Uint(8));
        assert!(Arch::of("f", &h).unwrap_err().to_string().contains("experts"));
        let mut h = header("qwen35");
        assert!(Arch::of("f", &h).unwrap_err().to_string().contains("qwen35"));
        h.meta.insert("prism.hadamard.version".into(), Value::Uint(1));
        assert!(Arch::of("f", &h).unwrap_err().to_string().contains("prism.hadamard.version"));
    }
}
