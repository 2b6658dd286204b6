//! The CPU device: the oracle's operations in f32, parallel, written as plain loops that the compiler
//! vectorizes. What runs where there is no GPU, and the first backend that the parity table holds.

mod gemv;

pub use gemv::gemv;
