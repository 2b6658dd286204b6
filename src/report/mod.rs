//! Measurements worth printing, as plain serializable values, and charts of them.
//!
//! Measuring and drawing are apart: [`codec`] knows no file, `plot` (with the feature of that name) knows no
//! weights. Codec error says how well a codec does its own job; it is no proxy for what a model loses.

pub mod codec;
#[cfg(feature = "plot")]
pub mod plot;
