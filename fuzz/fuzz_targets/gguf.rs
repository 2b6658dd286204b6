#![no_main]
//! The magic is given, so that no run is wasted on files of other kinds.

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(data.get(4..).unwrap_or_default());
    bitlane_fuzz::open_and_read(&bytes);
});
