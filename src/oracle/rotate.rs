//! Activations on their way to MQ weights: AWQ division, padding, FWHT-256.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::{mq, rotation};
use crate::tensor::{Activation, Awq, Plain, Rotated};

/// x -> R·(x / awq): divides each channel by its AWQ scale in f32, pads K with zeros to a multiple of 256
/// and rotates every block ([`rotation`]), in the butterfly order that GPU kernels keep too. The result is
/// `[N][stored K]`; one is made per set of tensors that share it.
///
/// # Errors
/// [`Error::Mismatch`] if `awq` is not one scale per channel. [`Error::NonFinite`] if a value is not
/// finite, or its quotient or rotation overflows: its `row` is the vector, its `col` the channel (the
/// rotated channel for an overflow of the rotation).
pub fn rotate(x: &Activation<Plain>, awq: Option<&Arc<Awq>>) -> Result<Activation<Rotated>> {
    let k = x.logical_k();
    finite("activation", x.data(), k)?;
    let mut divided = x.data().to_vec();
    if let Some(awq) = awq {
        divide(&mut divided, k, awq)?;
    }
    let stored_k = k.next_multiple_of(rotation::BLOCK);
    let mut data = Vec::with_capacity(x.n() * stored_k);
    for vector in divided.chunks_exact(k) {
        data.extend_from_slice(vector);
        data.resize(data.len() + stored_k - k, 0.0);
    }
    rotation::forward(&mut data);
    finite("rotated activation", &data, stored_k)?;
    Ok(Activation::rotated(data, x.n(), k, awq.cloned()))
}

fn divide(x: &mut [f32], k: usize, awq: &Awq) -> Result<()> {
    let scales = awq.scales();
    if scales.len() != k {
        return Err(Error::Mismatch {
            what: "rotate".into(),
            left_name: "length of the AWQ vector",
            left: scales.len(),
            right_name: "K of the activation",
            right: k,
        });
    }
    for vector in x.chunks_exact_mut(k) {
        vector.iter_mut().zip(scales).for_each(|(x, s)| *x /= s.to_f32());
    }
    finite("activation divided by its AWQ scales", x, k)
}

fn finite(what: &str, x: &[f32], width: usize) -> Result<()> {
    match x.iter().position(|v| !v.is_finite()) {
        Some(i) => Err(Error::NonFinite { tensor: what.into(), row: i / width, col: i % width, value: x[i] }),
        None => Ok(()),
    }
}

/// Σx of every half of 128 rotated channels, `[N][stored K / 128]`: what the zero of a V2 half is
/// multiplied by in the factored form scale·Σqx + zero·Σx.
pub fn half_sums(x: &Activation<Rotated>) -> Vec<f64> {
    let halves = x.data().chunks_exact(mq::HALF);
    halves.map(|half| half.iter().map(|v| f64::from(*v)).sum()).collect()
}
