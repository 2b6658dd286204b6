//! Low-bit LLM weights: byte-exact formats, a quantizer, and the CPU oracle that GPU kernels are held to.
#![warn(missing_docs)]
#![forbid(unsafe_code)]

pub mod container;
pub mod error;
pub mod format;
pub mod oracle;
pub mod quantize;
pub mod tensor;

pub use container::Container;
pub use error::{Error, Result};
pub use format::{Format, ScaleRounding};
pub use tensor::{Activation, Awq, EncodeOptions, Plain, QuantTensor, Rotated, Weights};
