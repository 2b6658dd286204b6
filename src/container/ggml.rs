//! ggml's block types, decoded to f32 by the crate `rlx-gguf`; our tests hold it to vectors made by an
//! independent implementation.

use super::{Bytes, TensorInfo};
use crate::error::{Error, Result};
use crate::format::register::GgmlBlock;

/// Decodes whole blocks: `out` holds as many weights as `bytes` has.
#[cfg(feature = "ggml-quants")]
pub(crate) fn decode(kind: GgmlBlock, bytes: &[u8], out: &mut [f32]) {
    fn each<const N: usize>(size: usize, bytes: &[u8], out: &mut [f32], f: impl Fn(&[u8], &mut [f32; N])) {
        for (b, o) in bytes.chunks_exact(size).zip(out.as_chunks_mut::<N>().0) {
            f(b, o);
        }
    }
    let size = kind.block().1;
    match kind {
        GgmlBlock::Q4_0 => each::<32>(size, bytes, out, |b, o| rlx_gguf::dequant_q4_0_block(b, o)),
        GgmlBlock::Q4_1 => each::<32>(size, bytes, out, |b, o| rlx_gguf::dequant_q4_1_block(b, o)),
        GgmlBlock::Q5_0 => each::<32>(size, bytes, out, |b, o| rlx_gguf::dequant_q5_0_block(b, o)),
        GgmlBlock::Q5_1 => each::<32>(size, bytes, out, |b, o| rlx_gguf::dequant_q5_1_block(b, o)),
        GgmlBlock::Q2K => each::<256>(size, bytes, out, rlx_gguf::dequant_q2_k_block),
        GgmlBlock::Q3K => each::<256>(size, bytes, out, rlx_gguf::dequant_q3_k_block),
        GgmlBlock::Q4K => each::<256>(size, bytes, out, rlx_gguf::dequant_q4_k_block),
        GgmlBlock::Q5K => each::<256>(size, bytes, out, rlx_gguf::dequant_q5_k_block),
        GgmlBlock::Q6K => each::<256>(size, bytes, out, rlx_gguf::dequant_q6_k_block),
    }
}

#[cfg(not(feature = "ggml-quants"))]
pub(crate) fn decode(_kind: GgmlBlock, _bytes: &[u8], _out: &mut [f32]) {}

/// Whether this build decodes ggml's block types.
pub(crate) fn check(file: &Bytes, tensor: &TensorInfo) -> Result<()> {
    if cfg!(feature = "ggml-quants") {
        return Ok(());
    }
    Err(Error::UnsupportedTensor {
        file: file.name().into(),
        tensor: tensor.name.clone(),
        what: format!("{} needs bitlane built with the feature ggml-quants", tensor.type_name),
    })
}
