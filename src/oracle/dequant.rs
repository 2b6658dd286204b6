//! Weights as the format defines them, in the stored basis.

use rayon::prelude::*;

use crate::format::Codec;
use crate::tensor::QuantTensor;

/// The decoded weights `[M][stored K]`, in the stored basis (MQ: still rotated; see
/// [`QuantTensor::to_f32`] for the model's own basis).
///
/// Kernels must be bit-equal for formats whose q·scale is exact in f32 (V2, MQ4C, t2, Q8_0 and the plain
/// ones); for v1, whose scale is f32, a fused multiply-add may differ in the last bit.
pub fn dequant(w: &QuantTensor) -> Vec<f32> {
    per_strip(w, |codec, bytes, k, out| codec.decode(bytes, k, out))
}

/// Per weight `[M][stored K]`, what the bounds of [`gemv`](super::gemv) and [`gemm`](super::gemm) are built
/// from: |q·scale| + |zero| for MQ formats, (pattern + 1)·|scale| for t2, |w| for the rest. Kernels may factor
/// Σ(q·scale + zero)·x into scale·Σqx + zero·Σx, whose roundings are relative to these and not to |w|.
pub fn magnitude(w: &QuantTensor) -> Vec<f32> {
    per_strip(w, |codec, bytes, k, out| codec.magnitude(bytes, k, out))
}

fn per_strip(w: &QuantTensor, read: impl Fn(&dyn Codec, &[u8], usize, &mut [f32]) + Sync) -> Vec<f32> {
    let (spec, k) = (w.format().spec(), w.stored_k());
    let mut out = vec![0f32; w.m() * k];
    let strips = out.par_chunks_exact_mut(spec.block_rows * k);
    w.strips().zip(strips).for_each(|(bytes, out)| read(spec.codec, bytes, k, out));
    out
}
