//! The CPU oracle: what every kernel on every device is held to, one file per kernel name.
//!
//! No two kernels agree to the last bit: they differ in the order of their sums, in fused or separate
//! multiply-adds, in f16 operands. One tolerance for all outputs would be too tight for long sums and
//! blind to a wrong half, row or tail in short ones. So the functions here sum in f64 over exactly decoded
//! weights and put beside every output element the largest error that a correct kernel's arithmetic can
//! make there ([`Checked`]). A kernel is right when no element leaves its own bound. The bounds are those
//! of ARCHITECTURE.md, "Numbers the tests hold".
//!
//! Letters: W is `[M][K]`, X `[N][K]`, Y `[N][M]`, all row-major; u = 2⁻²⁴ is f32's unit roundoff.
//! Written for reading: nothing here is fast.
//!
//! An activation reaches MQ weights only through [`rotate`]:
//!
//! ```
//! use bitlane::{Activation, EncodeOptions, Format, QuantTensor, Rotated, oracle};
//!
//! let values: Vec<f32> = (0..3 * 256).map(|i| (i % 13) as f32 - 6.0).collect();
//! let w = QuantTensor::encode("w", Format::Mq4V2, 3, 256, &values, &EncodeOptions::default())?;
//! let w = w.typed::<Rotated>()?;
//! let x = Activation::new(vec![0.5; 256], 1, 256)?;
//! let x = oracle::rotate(&x, None)?;
//! let y = oracle::gemv(&w, &x, None)?;
//!
//! let exact: Vec<f32> = y.value.iter().map(|v| *v as f32).collect();
//! assert!(y.worst(&exact).within());
//! assert!(!y.worst(&[0.0; 3]).within());
//! # Ok::<(), bitlane::Error>(())
//! ```
//!
//! Without that call the same program does not compile, because `Activation<Plain>` is another type:
//!
//! ```compile_fail,E0308
//! use bitlane::{Activation, EncodeOptions, Format, QuantTensor, Rotated, oracle};
//!
//! let values: Vec<f32> = (0..3 * 256).map(|i| (i % 13) as f32 - 6.0).collect();
//! let w = QuantTensor::encode("w", Format::Mq4V2, 3, 256, &values, &EncodeOptions::default())?;
//! let w = w.typed::<Rotated>()?;
//! let x = Activation::new(vec![0.5; 256], 1, 256)?;
//! let y = oracle::gemv(&w, &x, None)?;
//! # Ok::<(), bitlane::Error>(())
//! ```

mod act_mul;
mod dequant;
mod fused;
mod gemm;
mod gemv;
mod rotate;

pub use act_mul::{Act, act_mul};
pub use dequant::{dequant, magnitude};
pub use fused::fused;
pub use gemm::{gemm, relative_rms};
pub use gemv::gemv;
pub use rotate::{half_sums, rotate};

use std::fmt;
use std::sync::Arc;

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::format::Basis;
use crate::tensor::{Activation, Awq, BasisMarker, Weights};

/// u, the unit roundoff of f32: 2⁻²⁴.
pub const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// γ_n = n·u / (1 − n·u): the relative error that `n` f32 roundings in a row can add up to (Higham,
/// "Accuracy and Stability of Numerical Algorithms", lemma 3.1). Infinite where n·u ≥ 1 and nothing is left.
pub fn gamma(n: usize) -> f64 {
    let nu = n as f64 * UNIT;
    if nu < 1.0 { nu / (1.0 - nu) } else { f64::INFINITY }
}

/// Outputs Y `[N][M]`, row-major, with the error that each element may have. In the units of the product w·x.
///
/// The bounds count roundings, not f32 overflow or underflow: sums that leave f32's normal range are no
/// kernel's duty to get right.
#[derive(Debug, Clone, PartialEq)]
pub struct Checked {
    /// The result, summed in f64.
    pub value: Vec<f64>,
    /// The largest absolute error of a correct kernel, element by element. 0 demands equality.
    pub bound: Vec<f64>,
}

/// The element that is furthest outside (or least far inside) its bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worst {
    /// Index into the `[N][M]` outputs.
    pub index: usize,
    /// |got − value| there; infinite if either is not finite.
    pub error: f64,
    /// The bound there.
    pub bound: f64,
    /// error / bound: at most 1 for a correct kernel, infinite if the bound is 0 and the error is not.
    pub ratio: f64,
}

impl Worst {
    /// Whether every element keeps its bound.
    pub fn within(&self) -> bool {
        self.ratio <= 1.0
    }
}

impl fmt::Display for Worst {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "element {}: error {:e}, bound {:e}, ratio {:.4}", self.index, self.error, self.bound, self.ratio)
    }
}

impl Checked {
    /// Compares a kernel's outputs `[N][M]` with the reference and returns the worst element, the first
    /// of equals.
    ///
    /// NaN and infinity are infinitely wrong, on either side: a reference that is not finite (a NaN scale
    /// in the weights) can approve nothing. So is a missing or a surplus element, reported at the index
    /// where one side ends.
    pub fn worst(&self, got: &[f32]) -> Worst {
        let bound = |index: usize| self.bound.get(index).copied().unwrap_or(0.0);
        if got.len() != self.value.len() {
            let index = got.len().min(self.value.len());
            return Worst { index, error: f64::INFINITY, bound: bound(index), ratio: f64::INFINITY };
        }
        let mut worst = Worst { index: 0, error: 0.0, bound: bound(0), ratio: 0.0 };
        for (index, ((&value, &bound), &got)) in self.value.iter().zip(&self.bound).zip(got).enumerate() {
            let error = finite_or_infinity((f64::from(got) - value).abs());
            let ratio = if error == 0.0 { 0.0 } else { finite_or_infinity(error / bound) };
            if ratio > worst.ratio {
                worst = Worst { index, error, bound, ratio };
            }
        }
        worst
    }
}

/// NaN becomes infinite too, so that no comparison lets it through.
fn finite_or_infinity(v: f64) -> f64 {
    if v.is_finite() { v } else { f64::INFINITY }
}

/// One row of W as stored: decoded weights, and the magnitudes that bounds are built from.
struct Row<'a> {
    weights: &'a [f32],
    magnitudes: &'a [f32],
}

impl Row<'_> {
    /// (w, magnitude, x) of every column that x has, as f64: a padded column of unrotated weights has no x.
    fn terms(&self, x: &[f32]) -> impl Iterator<Item = (f64, f64, f64)> {
        let columns = self.weights.iter().zip(self.magnitudes).zip(x);
        columns.map(|((&w, &m), &x)| (f64::from(w), f64::from(m), f64::from(x)))
    }
}

/// Y = X Wᵀ (+ y0): `element(row of W, token, x)` gives each value and its bound; y0 adds u·|y0| for the
/// one rounding that its addition costs.
fn outputs<B: BasisMarker>(
    w: &Weights<B>,
    x: &Activation<B>,
    y0: Option<&[f32]>,
    element: impl Fn(&Row<'_>, usize, &[f32]) -> (f64, f64) + Sync,
) -> Checked {
    let (m, k, n) = (w.m(), w.stored_k(), x.n());
    let spec = w.format().spec();
    let by_row: Vec<(f64, f64)> = w
        .strips()
        .flat_map_iter(|bytes| {
            let mut weights = vec![0f32; spec.block_rows * k];
            let mut magnitudes = weights.clone();
            spec.codec.decode(bytes, k, &mut weights);
            spec.codec.magnitude(bytes, k, &mut magnitudes);
            let mut out = Vec::with_capacity(spec.block_rows * n);
            for (weights, magnitudes) in weights.chunks_exact(k).zip(magnitudes.chunks_exact(k)) {
                let row = Row { weights, magnitudes };
                out.extend(x.data().chunks_exact(x.width()).enumerate().map(|(token, x)| element(&row, token, x)));
            }
            out
        })
        .collect();
    let mut y = Checked { value: Vec::with_capacity(n * m), bound: Vec::with_capacity(n * m) };
    for token in 0..n {
        for row in 0..m {
            let (value, bound) = by_row[row * n + token];
            let start = y0.map_or(0.0, |y0| f64::from(y0[token * m + row]));
            y.value.push(start + value);
            y.bound.push(bound + UNIT * start.abs());
        }
    }
    y
}

/// Whether `w` takes `x`, and `y0` is one value per output.
pub(crate) fn check<B: BasisMarker>(op: &str, w: &Weights<B>, x: &Activation<B>, y0: Option<&[f32]>) -> Result<()> {
    let name = w.name();
    let equal = |left_name, left, right_name, right| {
        if left == right {
            return Ok(());
        }
        Err(Error::Mismatch { what: format!("{op} with tensor {name}"), left_name, left, right_name, right })
    };
    equal("K of the weights", w.logical_k(), "K of the activation", x.logical_k())?;
    match B::BASIS {
        Basis::Rotated => equal("stored K of the weights", w.stored_k(), "stored K of the activation", x.width())?,
        Basis::Plain => equal("K of the weights", w.logical_k(), "width of the activation", x.width())?,
    }
    if w.awq() != x.awq() {
        return Err(Error::AwqMismatch { tensor: name.into(), weights: awq_id(w.awq()), activation: awq_id(x.awq()) });
    }
    y0.map_or(Ok(()), |y0| equal("N*M", x.n() * w.m(), "values in y0", y0.len()))
}

fn awq_id(awq: Option<&Arc<Awq>>) -> String {
    awq.map_or_else(|| "none".into(), |a| format!("{:016x}", a.id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gamma_grows_and_ends() {
        assert_eq!(gamma(0), 0.0);
        assert_eq!(gamma(1), UNIT / (1.0 - UNIT));
        assert_eq!(gamma(1 << 23), 1.0);
        assert_eq!(gamma(1 << 24), f64::INFINITY);
        assert_eq!(gamma(usize::MAX), f64::INFINITY);
    }

    #[test]
    fn worst_takes_the_largest_ratio_not_the_largest_error() {
        let y = Checked { value: vec![1.0, 100.0, 0.0], bound: vec![0.5, 50.0, 0.0] };
        let w = y.worst(&[1.25, 110.0, 0.0]);
        assert_eq!(w, Worst { index: 0, error: 0.25, bound: 0.5, ratio: 0.5 });
        assert!(w.within());
        assert!(y.worst(&[1.5, 100.0, -0.0]).within());
        assert_eq!(y.worst(&[1.0, 160.0, 0.0]).index, 1);
    }

    #[test]
    fn worst_lets_nothing_through() {
        let y = Checked { value: vec![1.0, 100.0, 0.0], bound: vec![0.5, 50.0, 0.0] };
        for (got, index) in [
            ([1.0, f32::NAN, 0.0], 1),
            ([1.0, f32::INFINITY, 0.0], 1),
            ([f32::NEG_INFINITY, 100.0, 0.0], 0),
            ([1.0, 100.0, f32::from_bits(1)], 2),
        ] {
            let w = y.worst(&got);
            assert_eq!((w.index, w.ratio), (index, f64::INFINITY));
            assert!(!w.within());
        }
        assert_eq!(y.worst(&[1.0, 100.0]).index, 2);
        assert!(!y.worst(&[1.0, 100.0]).within());
        assert!(!y.worst(&[1.0, 100.0, 0.0, 0.0]).within());
        for bad in [f64::NAN, f64::INFINITY] {
            let y = Checked { value: vec![bad], bound: vec![bad] };
            assert!(!y.worst(&[bad as f32]).within() && !y.worst(&[0.0]).within());
        }
    }
}
