#![no_main]
//! Any format, shape and bytes: construction must decide, and everything after it must hold.

use std::sync::Arc;

use bitlane::{Awq, Format, Plain, QuantTensor, Rotated};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((head, rest)) = data.split_first_chunk::<8>() else { return };
    let format = Format::ALL[head[0] as usize % Format::ALL.len()];
    let number = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
    let (mut rows, mut k) = (number(2), number(4));
    let mut bytes = rest.to_vec();
    match head[1] % 4 {
        // As given, mostly of the wrong length; with absurd shapes too.
        0 => {}
        1 => (rows, k) = (rows << head[6].min(48), k << head[7].min(48)),
        // Of the right length: rows are scaled down so that the bytes at hand go far.
        _ => {
            rows = (rows % 4 + 1) * format.spec().block_rows;
            let len = format.stored_k(k % 1024).and_then(|stored| format.blob_len(rows, stored));
            k %= 1024;
            bytes.resize(len.unwrap_or(0), 0xa5);
        }
    }
    let awq = (head[6] & 1 == 1).then(|| vec![half::f16::from_bits(u16::from(head[7]) << 8 | 1); k.min(1 << 16)]);
    let Ok(awq) = awq.map(|scales| Awq::new("fuzz", scales)).transpose() else { return };
    let made = QuantTensor::new("fuzz", format, rows, k, bytes, awq.map(Arc::new));
    let tensor = match made {
        Ok(tensor) => tensor,
        Err(e) => return assert!(e.to_string().contains("fuzz"), "{e}"),
    };
    let values = tensor.to_f32();
    assert_eq!(values.len(), rows * k);
    assert!(tensor.reserved_codes() <= values.len() as u64);
    let unit = format.spec().block_rows;
    if let Ok(slice) = tensor.rows(unit..rows) {
        let part = slice.to_f32();
        assert!(part.iter().map(|v| v.to_bits()).eq(values[unit * k..].iter().map(|v| v.to_bits())));
    }
    assert!(tensor.clone().typed::<Plain>().is_ok() != tensor.typed::<Rotated>().is_ok());
});
