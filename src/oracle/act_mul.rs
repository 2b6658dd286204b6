//! act(gate)·up, between an MLP's gate and up projections and its down projection.

use crate::error::{Error, Result};

/// The activation function of a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Act {
    /// x / (1 + e⁻ˣ): SwiGLU, the llama family.
    Silu,
    /// 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))), the tanh form of GELU (Hendrycks and Gimpel 2016): gemma.
    GeluTanh,
}

impl Act {
    /// The function's value at `x`.
    pub fn apply(self, x: f64) -> f64 {
        match self {
            Act::Silu => x / (1.0 + (-x).exp()),
            Act::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            }
        }
    }
}

/// act(gate)·up, element by element, in the model's own basis: the result is rotated next.
///
/// # Errors
/// [`Error::Mismatch`] if `gate` and `up` differ in length.
pub fn act_mul(gate: &[f32], up: &[f32], act: Act) -> Result<Vec<f64>> {
    if gate.len() != up.len() {
        return Err(Error::Mismatch {
            what: "act_mul".into(),
            left_name: "values in gate",
            left: gate.len(),
            right_name: "values in up",
            right: up.len(),
        });
    }
    Ok(gate.iter().zip(up).map(|(g, u)| act.apply(f64::from(*g)) * f64::from(*u)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        // Computed to 40 digits with Python's decimal.
        close(Act::Silu.apply(1.0), 0.731_058_578_630_004_9);
        close(Act::GeluTanh.apply(1.0), 0.841_191_990_608_276_7);
        for act in [Act::Silu, Act::GeluTanh] {
            assert_eq!(act.apply(0.0), 0.0);
            assert_eq!(act.apply(1e4), 1e4);
            assert_eq!(act.apply(-1e4), 0.0);
            assert!(act.apply(f64::from(f32::MIN)).abs() == 0.0);
        }
        close(Act::GeluTanh.apply(1.0) - Act::GeluTanh.apply(-1.0), 1.0);
    }

    #[test]
    fn multiplies_pairs_and_refuses_unequal_lengths() {
        assert_eq!(act_mul(&[0.0, 1e3], &[5.0, -2.0], Act::Silu).unwrap(), [0.0, -2e3]);
        let e = act_mul(&[0.0; 3], &[0.0; 2], Act::Silu).unwrap_err();
        assert!(matches!(e, Error::Mismatch { left: 3, right: 2, .. }), "{e}");
    }
}
