//! Y = X Wᵀ at f32 accuracy.

use super::{Checked, check, gamma, outputs};
use crate::error::Result;
use crate::tensor::{Activation, BasisMarker, Weights};

/// Y = X Wᵀ, or Y = y0 + X Wᵀ, for any number of vectors: W `[M][K]`, X `[N][K]`, `y0` and Y `[N][M]`.
///
/// The bound is γ_{K+4}·Σ magnitude·|x| (+ u·|y0|), K as stored, with [`magnitude`](super::magnitude) per
/// weight. It covers every order of summation, fused or not, and the factored form scale·Σqx + zero·Σx: per
/// term at most K roundings of products and sums, one of the scale, one of the zero's product, and the two
/// by which the decoded w itself may be rounded. A bound on Σ|w·x| would refuse the factored form.
///
/// # Errors
/// [`Error::Mismatch`](crate::Error::Mismatch) if K differs or `y0` is not N·M long,
/// [`Error::AwqMismatch`](crate::Error::AwqMismatch) if x was divided by another AWQ vector than W was
/// multiplied by.
pub fn gemv<B: BasisMarker>(w: &Weights<B>, x: &Activation<B>, y0: Option<&[f32]>) -> Result<Checked> {
    check("gemv", w, x, y0)?;
    let roundings = gamma(w.stored_k() + 4);
    Ok(outputs(w, x, y0, |row, _, x| {
        let (mut value, mut magnitude) = (0.0, 0.0);
        for (w, m, x) in row.terms(x) {
            value += w * x;
            magnitude += m * x.abs();
        }
        (value, roundings * magnitude)
    }))
}
