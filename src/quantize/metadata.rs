//! What travels with the weights: configuration, tokenizer, provenance.

use std::path::Path;

use serde_json::value::RawValue;
use serde_json::{Map, Value as Json, json};

use crate::container::arch::{self, Arch};
use crate::container::gguf;
use crate::container::hfq::{self, Metadata, raw};
use crate::container::{Container, Details};
use crate::error::{Error, Result};
use crate::format::ScaleRounding;

/// The metadata of a file to be written.
pub(super) struct About {
    /// Architecture id.
    pub architecture: u32,
    /// What is carried along, as the source has it.
    pub carried: Metadata,
    /// bitlane's own part.
    pub ours: Map<String, Json>,
}

pub(super) fn of(source: &Container, arch: Option<(&Arch, &gguf::Header)>, rounding: ScaleRounding) -> Result<About> {
    let bad = |name: &str, e: serde_json::Error| Error::UnsupportedModel {
        file: source.name().into(),
        what: format!("its {name} is not JSON: {e}"),
    };
    // Texts are carried, not parsed and written again: a number that f64 cannot hold must not change.
    let text = |name: &str, text: String| RawValue::from_string(text).map_err(|e| bad(name, e));
    let string_of = |m: &Metadata, key: &str, field: Option<&str>| {
        let value: Json = serde_json::from_str(m.get(key)?.get()).ok()?;
        field.map_or(Some(&value), |f| value.get(f))?.as_str().map(str::to_string)
    };
    let mut m = Metadata::new();
    let (mut architecture, mut model_type) = (hfq::NO_ARCHITECTURE, String::from("unknown"));
    match source.details() {
        Details::Gguf(header) => {
            m.insert("source".into(), raw(&"gguf".into()));
            if let Some((arch, _)) = arch {
                let tensor = |name| source.tensors().iter().find(|t| t.name == name);
                let vocab = tensor("token_embd.weight").and_then(|t| t.logical_shape.first().copied());
                let config = arch.config(header, vocab, tensor("output.weight").is_none());
                (architecture, model_type) = (arch.hfq, arch.model_type.into());
                m.insert("config".into(), raw(&config));
            }
            let rope = format!("{}.rope.", header.architecture());
            for (key, prefixes) in [("gguf_meta", &["tokenizer.", "general."][..]), ("gguf_rope", &[rope.as_str()])] {
                let wanted = header.meta.iter().filter(|(k, _)| prefixes.iter().any(|p| k.starts_with(p)));
                let values: std::collections::BTreeMap<_, _> = wanted.collect();
                let json = serde_json::to_string(&values).map_err(|e| bad(key, e))?;
                m.insert(key.into(), text(key, json)?);
            }
        }
        Details::Safetensors(beside) => {
            m.insert("source".into(), raw(&"safetensors".into()));
            for (file, content) in beside {
                if *file == "tokenizer.json" {
                    m.insert("tokenizer".into(), raw(&content.as_str().into()));
                } else {
                    m.insert(file.trim_end_matches(".json").into(), text(file, content.clone())?);
                }
            }
            if let Some(t) = string_of(&m, "config", Some("model_type")) {
                (architecture, model_type) = (arch::hfq_id(&t), t);
            }
        }
        Details::Hfq(header) => {
            architecture = header.architecture;
            m = header.metadata.clone();
            if let Some(a) = string_of(&m, "architecture", None) {
                model_type = a;
            }
        }
    }
    m.insert("architecture".into(), raw(&model_type.as_str().into()));
    let mut ours = Map::new();
    ours.insert("version".into(), env!("CARGO_PKG_VERSION").into());
    ours.insert("source_file".into(), json!(Path::new(source.name()).file_name().map(|n| n.to_string_lossy())));
    ours.insert("source_bytes".into(), source.file_len().into());
    ours.insert("scale_rounding".into(), rounding.name().into());
    if architecture == hfq::NO_ARCHITECTURE {
        let note = format!("the .hfq register has no id for {model_type}: readers must refuse, not guess");
        ours.insert("architecture_id".into(), note.into());
    }
    Ok(About { architecture, carried: m, ours })
}
