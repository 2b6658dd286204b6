//! Golden vectors: bytes and numbers that were computed elsewhere (tests/vectors/README.md).

mod reference;

use bitlane::format::{mq, rotation, t2};
use bitlane::{Activation, EncodeOptions, Error, Format, Plain, QuantTensor, Rotated, ScaleRounding, oracle};
use half::f16;
use reference::Lcg;
use serde_json::Value;

const ROUNDINGS: [(&str, ScaleRounding); 2] =
    [("nearest_even", ScaleRounding::NearestEven), ("toward_zero", ScaleRounding::TowardZero)];

const WIDTHS: [(usize, Format, Format); 5] = [
    (2, Format::Mq2V2, Format::Mq2V1),
    (3, Format::Mq3V2, Format::Mq3V1),
    (4, Format::Mq4V2, Format::Mq4V1),
    (5, Format::Mq5V2, Format::Mq5V1),
    (6, Format::Mq6V2, Format::Mq6V1),
];

fn from_hex(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().filter_map(|c| c.to_digit(16)).map(|d| d as u8).collect();
    digits.chunks_exact(2).map(|d| d[0] << 4 | d[1]).collect()
}

fn golden() -> Value {
    serde_json::from_str(include_str!("vectors/mq_v2_golden.json")).unwrap()
}

/// The unrotated weights that a case's name describes.
fn weights(name: &str) -> Vec<f32> {
    match name.split(':').next().unwrap() {
        "affine37" => (0..256).map(|i| ((37 * i + 11) % 257 - 128) as f32 / 256.0).collect(),
        "ramp" => (0..256).map(|i| i as f32 / 256.0).collect(),
        "lcg7" => Lcg::new(7).units(256),
        "tiny" => Lcg::new(7).units(256).iter().map(|w| w / 16384.0).collect(),
        "degenerate" => {
            let mut w = Lcg::new(9).units(128);
            w.resize(256, 100.0);
            rotation::inverse(&mut w);
            w
        }
        _ => panic!("unknown case {name}"),
    }
}

/// A case and its weights, unrotated and rotated.
struct Case {
    name: String,
    json: Value,
    plain: Vec<f32>,
    rotated: Vec<f32>,
}

fn cases() -> Vec<Case> {
    let cases = golden()["cases"].as_array().unwrap().clone();
    assert_eq!(cases.len(), 5);
    let case = |json: Value| {
        let name = json["name"].as_str().unwrap().to_string();
        let plain = weights(&name);
        let mut rotated = plain.clone();
        rotation::forward(&mut rotated);
        Case { name, json, plain, rotated }
    };
    cases.into_iter().map(case).collect()
}

impl Case {
    /// `hex` is what `format` makes of the weights, by either entrance, and decodes as the specification says.
    fn check(&self, format: Format, rounding: ScaleRounding, hex: &Value) -> QuantTensor {
        let at = format!("{} {format} {rounding:?}", self.name);
        let expected = from_hex(hex.as_str().unwrap());
        let mut direct = vec![0xaa; expected.len()];
        format.spec().codec.encode(&self.rotated, 256, rounding, &mut direct).unwrap();
        assert_eq!(direct, expected, "{at}: codec");
        let options = EncodeOptions { rounding, awq: None };
        let tensor = QuantTensor::encode("golden", format, 1, 256, &self.plain, &options).unwrap();
        assert_eq!(tensor.bytes(), expected, "{at}: QuantTensor");
        let by_definition: Vec<f32> =
            reference::row(format, &expected, 0, 256).iter().flat_map(|s| s.weights().collect::<Vec<_>>()).collect();
        assert_eq!(oracle::dequant(&tensor), by_definition, "{at}: decoded");
        tensor
    }

    fn encoded(&self, format: Format) -> QuantTensor {
        QuantTensor::encode("golden", format, 1, 256, &self.plain, &EncodeOptions::default()).unwrap()
    }

    /// ‖decoded − rotated‖ / ‖rotated‖.
    fn relative_rms(&self, tensor: &QuantTensor) -> f64 {
        let square = |v: f64| v * v;
        let pairs = oracle::dequant(tensor).into_iter().zip(&self.rotated);
        let error: f64 = pairs.map(|(d, r)| square(f64::from(d) - f64::from(*r))).sum();
        (error / self.rotated.iter().map(|r| square(f64::from(*r))).sum::<f64>()).sqrt()
    }
}

#[test]
fn mq_signs() {
    let signs = |s: &[f32; 256]| -> Vec<u8> {
        s.chunks(8).map(|c| c.iter().rev().fold(0, |byte, s| byte << 1 | u8::from(*s > 0.0))).collect()
    };
    assert_eq!(signs(&rotation::SIGNS1), from_hex(golden()["signs1_hex"].as_str().unwrap()));
    assert_eq!(signs(&rotation::SIGNS2), from_hex(golden()["signs2_hex"].as_str().unwrap()));
}

#[test]
fn mq_rotation() {
    for case in cases() {
        let first = case.json["rotated_first8"].as_array().unwrap().iter();
        // As f32: serde_json's f64 may be off in its last place.
        let first: Vec<f32> = first.map(|v| v.as_f64().unwrap() as f32).collect();
        assert_eq!(case.rotated[..8], first, "{}", case.name);
        let x = Activation::new(case.plain.clone(), 1, 256).unwrap();
        assert_eq!(oracle::rotate(&x, None).unwrap().data(), case.rotated, "{}: the oracle's rotate", case.name);
    }
}

#[test]
fn mq_v2_groups() {
    for case in cases() {
        for (bits, v2, _) in WIDTHS {
            for (key, rounding) in ROUNDINGS {
                let json = &case.json["bits"][bits.to_string()][key];
                let tensor = case.check(v2, rounding, &json["group_hex"]);
                // The golden file has no decoded values, but their distance from the source to 16 digits.
                let (got, expected) = (case.relative_rms(&tensor), json["rel_rms"].as_f64().unwrap());
                assert!((got / expected - 1.0).abs() < 1e-12, "{} {v2} {key}: {got} {expected}", case.name);
            }
        }
    }
}

#[test]
fn mq4c_groups() {
    for case in cases() {
        for (key, rounding) in ROUNDINGS {
            let tensor = case.check(Format::Mq4C, rounding, &case.json["mq4c"][key]);
            assert_eq!(tensor.bytes()[4..8], [0; 4]);
        }
    }
}

#[test]
fn mq_v1_groups() {
    for case in cases() {
        for (bits, _, v1) in WIDTHS {
            for (_, rounding) in ROUNDINGS {
                case.check(v1, rounding, &case.json["bits"][bits.to_string()]["v1_group_hex"]);
            }
        }
    }
}

#[test]
fn the_degenerate_case_is_degenerate() {
    let case = cases().pop().unwrap();
    for (_, v2, _) in WIDTHS {
        let segments = reference::row(v2, case.encoded(v2).bytes(), 0, 256);
        assert!(segments[1].scale == 0.0 && segments[1].q.iter().all(|q| *q == 0.0), "{v2}: {:?}", segments[1]);
        assert!(segments[1].weights().all(|w| w == 100.0), "{v2}");
        assert!(segments[0].scale > 0.0);
    }
}

/// The halves of a V2 group differ: exchanging their pairs changes every decoded weight of the lcg7 group.
#[test]
fn v2_halves_are_not_interchangeable() {
    let case = &cases()[2];
    for (_, v2, _) in WIDTHS {
        let tensor = case.encoded(v2);
        let mut swapped = tensor.bytes().to_vec();
        let (a, b) = swapped[..mq::HEADER].split_at_mut(4);
        a.swap_with_slice(b);
        let swapped = QuantTensor::new("swapped", v2, 1, 256, swapped, None).unwrap();
        let pairs = oracle::dequant(&tensor).into_iter().zip(oracle::dequant(&swapped));
        assert!(pairs.filter(|(a, b)| a == b).count() < 8, "{v2}");
    }
}

/// Codes are `floor((w - z)·(1/st) + 0.5)` in three separate roundings: weights within a few ulps of where the
/// code changes tell that from a fused multiply-add, and from a division.
#[test]
fn v2_codes_are_chosen_with_three_roundings() {
    let mut lcg = Lcg::new(201);
    let (mut fused, mut divided) = (0, 0);
    for round in 0..200 {
        let (lo, hi) = (lcg.unit() - 1.0, lcg.unit() + 1.0);
        let step = (hi - lo) / 15.0;
        let (st, z) = (f16::from_f32(step).to_f32(), f16::from_f32(lo).to_f32());
        let near = |i: usize| {
            let edge = z + ((i % 15) as f32 + 0.5) * st;
            f32::from_bits(edge.to_bits().wrapping_add_signed(i as i32 / 15 - 4))
        };
        let mut w: Vec<f32> = (0..128).map(near).map(|w| w.clamp(lo, hi)).collect();
        (w[126], w[127]) = (lo, hi);
        let bytes = {
            let group = [&w[..], &w[..]].concat();
            let mut bytes = vec![0; 136];
            Format::Mq4V2.spec().codec.encode(&group, 256, ScaleRounding::NearestEven, &mut bytes).unwrap();
            bytes
        };
        let codes = reference::row(Format::Mq4V2, &bytes, 0, 256).swap_remove(0).q;
        let inv = 1.0 / st;
        for (w, code) in w.iter().zip(codes) {
            let q = |v: f32| v.floor().clamp(0.0, 15.0);
            assert_eq!(code, q((w - z) * inv + 0.5), "seed 201, round {round}, weight {w:e}");
            fused += usize::from(q((w - z).mul_add(inv, 0.5)) != code);
            divided += usize::from(q((w - z) / st + 0.5) != code);
        }
    }
    assert!(fused > 0 && divided > 0, "the test cannot tell: {fused} {divided}");
}

fn file(name: &str) -> Vec<u8> {
    from_hex(match name {
        "tile" => include_str!("vectors/t2_tile_lcg1.hex"),
        "edge" => include_str!("vectors/t2_tile_edge.hex"),
        _ => include_str!("vectors/t2_matrix_64x512_lcg2.hex"),
    })
}

fn t2_tensor(m: usize, k: usize, bytes: Vec<u8>) -> QuantTensor {
    QuantTensor::new("t2", Format::T2, m, k, bytes, None).unwrap()
}

/// Trits and scales of a matrix as its generator drew them, `[M][K]` and `[M][K/128]`.
fn drawn(seed: u32, m: usize, k: usize) -> (Vec<i8>, Vec<f16>) {
    let mut lcg = Lcg::new(seed);
    let trits = (0..m * k).map(|_| (lcg.bits() % 3) as i8 - 1).collect();
    let scales = (0..m * k / 128).map(|_| f16::from_bits(0x2000 + (lcg.bits() & 0x1fff))).collect();
    (trits, scales)
}

/// Packs a matrix tile by tile.
fn packed(trits: &[i8], scales: &[f16], m: usize, k: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for m0 in (0..m).step_by(32) {
        for k0 in (0..k).step_by(256) {
            let mut tile = [0i8; 8192];
            let mut tile_scales = [f16::ZERO; 64];
            for r in 0..32 {
                tile[256 * r..][..256].copy_from_slice(&trits[(m0 + r) * k + k0..][..256]);
                tile_scales[2 * r..][..2].copy_from_slice(&scales[((m0 + r) * k + k0) / 128..][..2]);
            }
            bytes.extend(t2::pack(&tile, &tile_scales).unwrap());
        }
    }
    bytes
}

fn check_gemv(w: QuantTensor, x: Vec<f32>, expected: &str) -> Vec<f64> {
    let k = x.len();
    let w = w.typed::<Plain>().unwrap();
    let y = oracle::gemv(&w, &Activation::new(x, 1, k).unwrap(), None).unwrap();
    let expected: Vec<f64> = expected.lines().map(|l| l.parse().unwrap()).collect();
    assert_eq!(y.value, expected);
    y.value
}

/// (k mod `period`) − period/2.
fn ramp(k: usize, period: usize) -> Vec<f32> {
    (0..k).map(|k| (k % period) as f32 - (period / 2) as f32).collect()
}

#[test]
fn t2_tile() {
    let bytes = file("tile");
    let (trits, scales) = drawn(1, 32, 256);
    assert_eq!([-1, 0, 1].map(|t| trits.iter().filter(|u| **u == t).count()), [2777, 2675, 2740]);
    assert_eq!(packed(&trits, &scales, 32, 256), bytes);
    let tile = t2::tiles(&bytes).next().unwrap();
    for r in 0..32 {
        for c in 0..256 {
            let (trit, scale) = (trits[256 * r + c], scales[2 * r + c / 128]);
            assert_eq!(tile.trit(r, c), Some(trit));
            assert_eq!(tile.scale(r, c / 128), scale);
            assert_eq!(tile.weight(r, c), f32::from(trit) * scale.to_f32());
        }
    }
    assert_eq!((tile.reserved(), tile.non_finite_scales()), (0, 0));
    let y = check_gemv(t2_tensor(32, 256, bytes), ramp(256, 7), include_str!("vectors/t2_tile_lcg1.gemv.txt"));
    assert_eq!((y[0], y[31]), (11.174896240234375, 5.6649169921875));
    assert_eq!(y.iter().sum::<f64>(), -166.2130889892578);
}

#[test]
fn t2_bytes_of_four() {
    for (codes, byte) in [([0, 1, 0, 0], 0x59), ([-1; 4], 0x00), ([0; 4], 0x55), ([1; 4], 0xaa)] {
        let mut trits = [0i8; 8192];
        trits[..4].copy_from_slice(&codes);
        assert_eq!(t2::pack(&trits, &[f16::ONE; 64]).unwrap()[0], byte);
    }
    let mut trits = [0i8; 8192];
    trits[300] = 2;
    assert_eq!(t2::pack(&trits, &[f16::ONE; 64]), Err(300));
}

/// Offsets worked out by hand in the format's description: tile, code byte and shift, scale byte.
#[test]
fn t2_matrix() {
    let bytes = file("matrix");
    let (m, k) = (64, 512);
    let tensor = t2_tensor(m, k, bytes.clone());
    let decoded = oracle::dequant(&tensor);
    for (row, col, tile, code, shift, scale, pattern, half, w) in [
        (0, 0, 0, 0, 0, 2048, 2, 0x28c6, 0.03729248046875),
        (0, 256, 1, 2176, 0, 4224, 2, 0x3277, 0.2020263671875),
        (32, 0, 2, 4352, 0, 6400, 2, 0x318e, 0.173583984375),
        (40, 300, 3, 7051, 0, 8608, 0, 0x39b7, -0.71435546875),
        (63, 511, 3, 8575, 6, 8702, 2, 0x3d58, 1.3359375),
    ] {
        assert_eq!(bytes[code] >> shift & 3, pattern, "({row}, {col})");
        assert_eq!(u16::from_le_bytes([bytes[scale], bytes[scale + 1]]), half, "({row}, {col})");
        assert_eq!(f64::from(decoded[row * k + col]), w, "({row}, {col})");
        let tile = t2::tiles(&bytes).nth(tile).unwrap();
        assert_eq!(tile.pattern(row % 32, col % 256), pattern);
        assert_eq!(tile.scale(row % 32, col % 256 / 128).to_bits(), half);
        assert_eq!(f64::from(tile.weight(row % 32, col % 256)), w);
    }
    let (trits, scales) = drawn(2, m, k);
    assert_eq!(packed(&trits, &scales, m, k), bytes);
    let expected: Vec<f32> = (0..m * k).map(|i| f32::from(trits[i]) * scales[i / 128].to_f32()).collect();
    assert_eq!(decoded, expected);
    assert_eq!(tensor.to_f32(), expected);
    check_gemv(tensor, ramp(k, 11), include_str!("vectors/t2_matrix_64x512_lcg2.gemv.txt"));
}

#[test]
fn t2_encodes_ternary_weights_exactly() {
    for (name, m, k) in [("tile", 32, 256), ("matrix", 64, 512)] {
        let weights = t2_tensor(m, k, file(name)).to_f32();
        for (_, rounding) in ROUNDINGS {
            let options = EncodeOptions { rounding, awq: None };
            let again = QuantTensor::encode(name, Format::T2, m, k, &weights, &options).unwrap();
            assert_eq!(again.bytes(), file(name), "{name}");
        }
    }
    // Negative scales, zero blocks and reserved codes have several spellings: the values survive, not the bytes.
    let weights = t2_tensor(32, 256, file("edge")).to_f32();
    let again = QuantTensor::encode("edge", Format::T2, 32, 256, &weights, &EncodeOptions::default()).unwrap();
    assert_ne!(again.bytes(), file("edge"));
    assert_eq!(again.to_f32(), weights);
    assert_eq!(again.reserved_codes(), 0);
}

#[test]
fn t2_edges() {
    let tensor = t2_tensor(32, 256, file("edge"));
    assert_eq!(tensor.reserved_codes(), 254);
    let bits: Vec<u32> = oracle::dequant(&tensor).iter().map(|w| w.to_bits()).collect();
    let row = |r: usize, left: f32, right: f32| {
        let expected = [[left.to_bits(); 128], [right.to_bits(); 128]].concat();
        assert_eq!(bits[256 * r..][..256], expected, "row {r}");
    };
    let ulp = 2f32.powi(-24);
    row(1, ulp, 1023.0 * ulp);
    row(2, -65504.0, 1.0);
    row(3, -(2f32.powi(-14)), -0.0);
    row(4, 17.0 * ulp, -0.0);
    (5..32).for_each(|r| row(r, 0.0, 0.0));
    let mut reserved = [0f32.to_bits(); 256];
    (reserved[1], reserved[255]) = (1f32.to_bits(), (-1.5f32).to_bits());
    assert_eq!(bits[..256], reserved, "row 0: reserved codes are +0.0");
    // Patterns 1 and 3 are +0.0 under every scale, whatever its sign.
    for byte in [0x55, 0xff] {
        for scale in [0x3c00u16, 0xbc00, 0x8000, 0xfbff, 0x8001, 0x7c00, 0x7e00] {
            let mut tile = vec![byte; 2176];
            tile[2048..].chunks_exact_mut(2).for_each(|b| b.copy_from_slice(&scale.to_le_bytes()));
            let decoded = oracle::dequant(&t2_tensor(32, 256, tile));
            assert!(decoded.iter().all(|w| w.to_bits() == 0), "{byte:02x} x {scale:04x}");
        }
    }
}

#[test]
fn t2_refuses_shapes_that_do_not_tile() {
    for (m, k) in [(31, 256), (33, 256), (16, 256), (32, 128), (32, 255), (32, 384), (0, 256), (32, 0)] {
        for bytes in [0, 1088, 2176, 4352] {
            let e = QuantTensor::new("t", Format::T2, m, k, vec![0; bytes], None).unwrap_err();
            assert!(matches!(e, Error::Shape { rows, cols, .. } if (rows, cols) == (m, k)), "{e}");
        }
        let e = QuantTensor::encode("t", Format::T2, m, k, &vec![0.0; m * k], &EncodeOptions::default()).unwrap_err();
        assert!(matches!(e, Error::Shape { .. }), "{e}");
    }
    let e = QuantTensor::new("t", Format::T2, 32, 256, vec![0; 2175], None).unwrap_err();
    assert!(matches!(e, Error::Length { expected: 2176, got: 2175, .. }), "{e}");
    let e = t2_tensor(32, 256, file("tile")).typed::<Rotated>().unwrap_err();
    assert!(matches!(e, Error::WrongBasis { .. }), "{e}");
}

#[test]
fn t2_row_slices_are_views_of_whole_tiles() {
    let tensor = t2_tensor(64, 512, file("matrix"));
    let all = oracle::dequant(&tensor);
    for start in [0, 32] {
        let slice = tensor.rows(start..start + 32).unwrap();
        let at = start / 32 * 2 * 2176;
        assert_eq!(slice.bytes().as_ptr(), tensor.bytes()[at..].as_ptr(), "a view, not a copy");
        assert_eq!((slice.m(), slice.bytes().len()), (32, 2 * 2176));
        assert_eq!(oracle::dequant(&slice), all[start * 512..][..32 * 512]);
    }
    for (start, end) in [(0, 16), (16, 48), (16, 32), (32, 48), (0, 96), (32, 32), (64, 96)] {
        let e = tensor.rows(start..end).unwrap_err();
        assert!(matches!(e, Error::RowRange { rows: 64, .. }), "{start}..{end}: {e}");
    }
}
