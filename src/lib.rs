//! Low-bit LLM weights: byte-exact formats, a quantizer, file containers, and the CPU oracle that GPU
//! kernels are held to.
//!
//! ```
//! use bitlane::{Activation, EncodeOptions, Format, QuantTensor, Rotated, oracle};
//!
//! // W is [M][K], row-major; M output rows, K the reduction.
//! let (m, k) = (4, 512);
//! let weights: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.37).sin()).collect();
//! let w = QuantTensor::encode("demo", Format::Mq6V2, m, k, &weights, &EncodeOptions::default())?;
//! assert_eq!(w.bytes().len(), m * k / 256 * 200);
//!
//! // MQ weights live in a rotated basis, so activations are rotated once and then shared.
//! let x = Activation::new(vec![1.0; k], 1, k)?;
//! let y = oracle::gemv(&w.typed::<Rotated>()?, &oracle::rotate(&x, None)?, None)?;
//! let exact: f32 = weights[..k].iter().sum();
//! assert!((y.value[0] - f64::from(exact)).abs() < 1.0); // 512 weights, each off by up to half a step of about 0.03
//! # Ok::<(), bitlane::Error>(())
//! ```
#![warn(missing_docs)]
#![forbid(unsafe_code)]

pub mod container;
pub mod device;
pub mod error;
pub mod format;
pub mod oracle;
pub mod quantize;
pub mod report;
pub mod tensor;

pub use container::Container;
pub use error::{Error, Result};
pub use format::{Format, ScaleRounding};
pub use tensor::{Activation, Awq, EncodeOptions, Plain, QuantTensor, Rotated, Weights};

/// README's examples compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
