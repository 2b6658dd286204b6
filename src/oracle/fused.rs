//! Several weights, one activation, one launch: QKV, QKVZA, gate and up.

use super::{Checked, check, gemv};
use crate::error::Result;
use crate::tensor::{Activation, BasisMarker, Weights};

/// One [`gemv`](super::gemv) per tensor of `ws`, all of the same `x`; each output `[N][M]` is a buffer of its
/// own, with its tensor's M as stride. Row counts and formats may differ, and no activation is applied.
///
/// # Errors
/// As [`gemv`](super::gemv), naming the first tensor that does not take `x` (another K or AWQ vector), before
/// anything is computed.
pub fn fused<B: BasisMarker>(ws: &[&Weights<B>], x: &Activation<B>) -> Result<Vec<Checked>> {
    ws.iter().try_for_each(|w| check("fused gemv", w, x, None))?;
    ws.iter().map(|w| gemv(w, x, None)).collect()
}
