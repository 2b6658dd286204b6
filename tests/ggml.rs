//! ggml's block types, through the whole path (a GGUF file, its reader, the decoder), held bit for bit to what
//! PyPI's `gguf` decodes: `scripts/make_ggml_vectors.py` wrote the vectors.

mod common;

use bitlane::Container;
use bitlane::container::Bytes;
use common::Gguf;
use serde::Deserialize;

#[derive(Deserialize)]
struct Vectors {
    types: Vec<Type>,
}

#[derive(Deserialize)]
struct Type {
    name: String,
    id: u32,
    weights: u64,
    bytes: usize,
    blocks: Vec<String>,
    f32: Vec<String>,
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn vectors() -> Vec<Type> {
    serde_json::from_str::<Vectors>(include_str!("vectors/ggml_blocks.json")).unwrap().types
}

#[test]
fn every_type_of_the_table_is_covered() {
    let ids: Vec<u32> = vectors().iter().map(|t| t.id).collect();
    assert_eq!(ids, [2, 3, 6, 7, 8, 10, 11, 12, 13, 14]);
    let sizes: Vec<_> = vectors().iter().map(|t| (t.weights, t.bytes)).collect();
    assert_eq!(&sizes[..5], [(32, 18), (32, 20), (32, 22), (32, 24), (32, 34)]);
    assert_eq!(&sizes[5..], [(256, 84), (256, 110), (256, 144), (256, 176), (256, 210)]);
}

/// Two blocks to a row, so that the row stride counts too; a first tensor moves the data away from 0.
fn file() -> Container {
    let mut file = Gguf::new("test");
    file.f32("first", &[3], &[1.0, 2.0, 3.0]);
    for t in &vectors() {
        let data: Vec<u8> = t.blocks.iter().flat_map(|b| unhex(b)).collect();
        assert_eq!(data.len(), t.bytes * t.blocks.len());
        file.tensor(&t.name, &[t.blocks.len() as u64 / 2, 2 * t.weights], t.id, data);
    }
    Container::from_bytes(Bytes::memory("ggml.gguf", file.bytes())).unwrap()
}

/// A build without the decoder opens such files, and refuses the tensors by name.
#[cfg(not(feature = "ggml-quants"))]
#[test]
fn without_the_feature_they_are_refused_by_name() {
    let file = file();
    for t in vectors().iter().filter(|t| t.id != 8) {
        let e = file.rows(file.find(&t.name).unwrap()).err().unwrap().to_string();
        assert!(e.contains(&format!("tensor {}: {} needs", t.name, t.name)) && e.contains("ggml-quants"), "{e}");
    }
}

#[cfg(feature = "ggml-quants")]
#[test]
fn decodes_as_the_independent_implementation_does() {
    let file = file();
    for t in &vectors() {
        let reader = file.rows(file.find(&t.name).unwrap()).unwrap();
        let (m, k) = reader.shape();
        assert_eq!((m, k), (t.blocks.len() / 2, 2 * t.weights as usize));
        let expected: Vec<u8> = t.f32.iter().flat_map(|b| unhex(b)).collect();
        let expected: Vec<u32> = expected.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        assert_eq!(expected.len(), m * k);
        let all: Vec<u32> = reader.read_all().unwrap().iter().map(|v| v.to_bits()).collect();
        for (i, (a, e)) in all.iter().zip(&expected).enumerate() {
            let (a, e) = (f32::from_bits(*a), f32::from_bits(*e));
            assert_eq!(a.to_bits(), e.to_bits(), "{}: row {} column {}: {a:e}, not {e:e}", t.name, i / k, i % k);
        }
        // One row alone gives the same: readers are asked for any range.
        let mut row = vec![0f32; k];
        reader.read(m - 1..m, &mut Default::default(), &mut row).unwrap();
        assert!(row.iter().map(|v| v.to_bits()).eq(expected[(m - 1) * k..].iter().copied()), "{}", t.name);
    }
}
