//! What every container target does: open, read everything, and hold the reader to its promises.

use bitlane::container::{Bytes, Encoding};
use bitlane::quantize::{self, Recipe};
use bitlane::{Container, Format};

/// Opens the bytes and reads every tensor. A refusal is fine, as long as it names the file; a panic, an endless loop or
/// an allocation that the file's length does not justify is a finding.
pub fn open_and_read(data: &[u8]) {
    let file = match Container::from_bytes(Bytes::memory("fuzz", data.to_vec())) {
        Ok(file) => file,
        Err(e) => {
            assert!(e.to_string().starts_with("fuzz: "), "{e}");
            return;
        }
    };
    for t in file.tensors() {
        let values = file.rows(t).and_then(|r| r.read_all());
        let loaded = file.load(&t.name);
        let refused = matches!(t.encoding, Encoding::Refused(_));
        assert!(!refused || (values.is_err() && loaded.is_err()), "{}", t.name);
        let Ok(values) = values else { continue };
        assert_eq!(values.len() as u64, t.weights());
        if let Ok(loaded) = loaded {
            let loaded = loaded.to_f32();
            assert!(loaded.iter().map(|v| v.to_bits()).eq(values.iter().map(|v| v.to_bits())), "{}", t.name);
        }
    }
    // Deciding reads all of the metadata.
    drop(quantize::plan(&file, &Recipe::new(Format::Mq4V2)));
}
