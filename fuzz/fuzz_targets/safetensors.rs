#![no_main]
//! For every other input the header length is put right: JSON is what there is to break.

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut bytes = data.to_vec();
    if data.len() > 9 && data[0] & 1 == 1 {
        let end = data.iter().rposition(|b| *b == b'}').map_or(data.len(), |at| at + 1).max(9);
        bytes[..8].copy_from_slice(&(end as u64 - 8).to_le_bytes());
        bytes[8] = b'{';
    }
    bitlane_fuzz::open_and_read(&bytes);
});
