//! Y = X Wᵀ as matrix units compute it: f16 operands, f32 accumulation.

use super::{Checked, check, gamma, outputs};
use crate::error::Result;
use crate::tensor::{Activation, BasisMarker, Weights};

/// Unit roundoff of f16.
const UNIT_F16: f64 = 1.0 / 2048.0;
/// Half the spacing of f16's subnormals, 2⁻²⁵: what rounding loses below 2⁻¹⁴, however small the value.
const LOST: f64 = UNIT_F16 / 16384.0;

/// Y = X Wᵀ, or Y = y0 + X Wᵀ: the values of [`gemv`](super::gemv) with the bound of a kernel that rounds
/// both operands to f16 and accumulates in f32. W `[M][K]`, X `[N][K]`, `y0` and Y `[N][M]`.
///
/// The bound is the sum of
/// - 2⁻¹¹·Σ (magnitude + 2·|w|)·|x|: one f16 rounding of w, one of x, and one of q·scale where multiply and
///   add are separate. [`magnitude`](super::magnitude), which is |q·scale| + |zero|, stands for |q·scale|:
///   it is never smaller, and it admits the factored form too. Products of roundings (2⁻²²) are left out:
///   they would count only if every rounding of a row were the worst, with the same sign.
/// - γ_K·Σ|w·x| (K as stored): products of two halves are exact in f32, K sums are not.
/// - 2⁻²⁵·Σ (|x| + s·(|w| + 2⁻²⁵)), over terms where neither magnitude nor x is 0: what f16's subnormals
///   lose. Below 2⁻¹⁴ a half is off by up to 2⁻²⁵ whatever its size. A kernel may divide a token by a power of
///   two before rounding it, so that max|x| ≤ 1, or leave it alone; in x's own units the loss is at most
///   s·2⁻²⁵, where s is the least power of two ≥ max(|x| of the token, 1). Multiply out
///   (w ± 2⁻²⁵)(x ± s·2⁻²⁵). Zero is a half, so it loses nothing. A device that flushes subnormals loses up
///   to 2⁻¹⁴ instead, and fails.
/// - u·|y0|.
///
/// A token beyond 65504 that is not scaled becomes infinite, and so does a weight there: both fail, as
/// they should.
///
/// # Errors
/// As [`gemv`](super::gemv).
pub fn gemm<B: BasisMarker>(w: &Weights<B>, x: &Activation<B>, y0: Option<&[f32]>) -> Result<Checked> {
    check("gemm", w, x, y0)?;
    let roundings = gamma(w.stored_k());
    let scales: Vec<f64> = x.data().chunks_exact(x.width()).map(token_scale).collect();
    Ok(outputs(w, x, y0, |row, token, x| {
        let scale = scales[token];
        let (mut value, mut operands, mut sums, mut lost) = (0.0, 0.0, 0.0, 0.0);
        for (w, m, x) in row.terms(x) {
            value += w * x;
            operands += (m + 2.0 * w.abs()) * x.abs();
            sums += (w * x).abs();
            if m != 0.0 && x != 0.0 {
                lost += x.abs() + scale * (w.abs() + LOST);
            }
        }
        (value, UNIT_F16 * operands + roundings * sums + LOST * lost)
    }))
}

/// The least power of two that is at least 1 and at least every |x|.
fn token_scale(x: &[f32]) -> f64 {
    let max = x.iter().fold(1f64, |m, v| m.max(f64::from(v.abs())));
    let mut scale = 1.0;
    while scale < max && scale.is_finite() {
        scale *= 2.0;
    }
    scale
}

/// ‖got − value‖ / ‖value‖ over all outputs: at most 5e-4 for f16 operands and at least 4096 outputs.
/// Infinite if the lengths differ, if anything is not finite, or if the values are all 0 and `got` is not.
pub fn relative_rms(got: &[f32], y: &Checked) -> f64 {
    if got.len() != y.value.len() {
        return f64::INFINITY;
    }
    let square = |v: f64| v * v;
    let error: f64 = got.iter().zip(&y.value).map(|(g, v)| square(f64::from(*g) - v)).sum();
    let total: f64 = y.value.iter().map(|v| square(*v)).sum();
    if error == 0.0 { 0.0 } else { super::finite_or_infinity((error / total).sqrt()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_are_what_the_derivation_says() {
        assert_eq!(UNIT_F16, 2f64.powi(-11));
        assert_eq!(LOST, 2f64.powi(-25));
    }

    #[test]
    fn token_scale_is_a_power_of_two_above_the_token() {
        for (x, scale) in [(0.0, 1.0), (0.3, 1.0), (1.0, 1.0), (-1.5, 2.0), (2.0, 2.0), (-1e5, 131_072.0)] {
            assert_eq!(token_scale(&[0.0, x, 0.25]), scale);
        }
        assert_eq!(token_scale(&[f32::MAX]), 2f64.powi(128));
        assert!(token_scale(&[f32::INFINITY]).is_infinite());
    }

    #[test]
    fn relative_rms_lets_nothing_through() {
        let y = Checked { value: vec![3.0, 4.0], bound: vec![0.0; 2] };
        assert_eq!(relative_rms(&[3.0, 4.0], &y), 0.0);
        assert_eq!(relative_rms(&[3.0, 9.0], &y), 1.0);
        for got in [&[3.0][..], &[3.0, f32::NAN], &[3.0, f32::INFINITY]] {
            assert_eq!(relative_rms(got, &y), f64::INFINITY);
        }
        let zero = Checked { value: vec![0.0], bound: vec![0.0] };
        assert_eq!((relative_rms(&[0.0], &zero), relative_rms(&[1.0], &zero)), (0.0, f64::INFINITY));
    }
}
