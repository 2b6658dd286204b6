//! FWHT-256: the rotation R = (1/16)·D2·H·D1 that weights get before encoding and activations at run
//! time, so that (R w)·(R x) = w·x.
//!
//! H is the natural-order Hadamard matrix of 256, D1 and D2 diagonal signs. The butterflies run with
//! stride 1, 2, 4, … 128 in plain f32, `(a, b) -> (a + b, a − b)`: the order a lane-xor GPU butterfly
//! uses, so both can agree bit for bit. The signs come from a 31-bit linear congruential generator; the
//! tables are computed at compile time and checked against the published bitmaps.

use multiversion::multiversion;

/// Weights in one rotation block, and in one MQ group.
pub const BLOCK: usize = 256;

/// Seed of the signs applied before the butterflies.
pub const SEED1: u32 = 42;
/// Seed of the signs applied after the butterflies.
pub const SEED2: u32 = 1042;

/// ±1 per position: the generator is advanced before each sign, and bit 16 set means plus.
const fn signs(seed: u32) -> [f32; BLOCK] {
    let mut out = [0.0; BLOCK];
    let mut state = seed;
    let mut i = 0;
    while i < BLOCK {
        state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345) & 0x7fff_ffff;
        out[i] = if (state >> 16) & 1 == 1 { 1.0 } else { -1.0 };
        i += 1;
    }
    out
}

/// Each sign times 1/16: the scale is a power of two, so folding it into the last product is exact.
const fn scaled(s: [f32; BLOCK]) -> [f32; BLOCK] {
    let mut out = s;
    let mut i = 0;
    while i < BLOCK {
        out[i] = 0.0625 * s[i];
        i += 1;
    }
    out
}

/// Signs applied to x before the butterflies of [`forward`].
pub static SIGNS1: [f32; BLOCK] = signs(SEED1);
/// Signs applied after the butterflies of [`forward`].
pub static SIGNS2: [f32; BLOCK] = signs(SEED2);
static SCALED1: [f32; BLOCK] = scaled(signs(SEED1));
static SCALED2: [f32; BLOCK] = scaled(signs(SEED2));

/// Rotates every block of 256 values in place. Trailing values short of a block are left alone:
/// callers pad to a multiple of [`BLOCK`] first.
pub fn forward(x: &mut [f32]) {
    rotate(x, &SIGNS1, &SCALED2);
}

/// The inverse of [`forward`]: the same with the two sign vectors swapped.
pub fn inverse(x: &mut [f32]) {
    rotate(x, &SIGNS2, &SCALED1);
}

// AVX-512's two-source permutes make this loop more than twice as fast; no other codec gains from them.
#[multiversion(targets("x86_64+avx512f", "x86_64+avx2+bmi2+f16c"))]
fn rotate(x: &mut [f32], before: &[f32; BLOCK], after: &[f32; BLOCK]) {
    for block in x.as_chunks_mut::<BLOCK>().0 {
        rotate_block(block, before, after);
    }
}

/// One block, out of place: each step pairs neighbours and puts sums into the lower half and differences into
/// the upper, so that the bit of the index it worked on moves to the top and the next one becomes the lowest.
/// After eight steps every bit is back in its place. Every step is the same loop over whole vectors, and no
/// value meets another partner, order or rounding than in the definition.
#[inline(always)]
fn rotate_block(x: &mut [f32; BLOCK], before: &[f32; BLOCK], after: &[f32; BLOCK]) {
    let (mut a, mut b) = ([0f32; BLOCK], [0f32; BLOCK]);
    for i in 0..BLOCK {
        a[i] = x[i] * before[i];
    }
    for _ in 0..4 {
        butterflies(&a, &mut b);
        butterflies(&b, &mut a);
    }
    for i in 0..BLOCK {
        x[i] = a[i] * after[i];
    }
}

#[inline(always)]
fn butterflies(from: &[f32; BLOCK], to: &mut [f32; BLOCK]) {
    let (sums, differences) = to.split_at_mut(BLOCK / 2);
    for ((&[a, b], s), d) in from.as_chunks::<2>().0.iter().zip(sums).zip(differences) {
        *s = a + b;
        *d = a - b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bitmap(signs: &[f32]) -> String {
        signs
            .chunks(8)
            .map(|c| c.iter().enumerate().fold(0u8, |b, (i, &s)| b | (u8::from(s > 0.0) << i)))
            .map(|b| format!("{b:02x}"))
            .collect()
    }

    #[test]
    fn signs_match_the_published_bitmaps() {
        assert_eq!(bitmap(&SIGNS1), "6f431f7edba4cc7df732616531ea6134acf88f3f38308757889d933fa3258e40");
        assert_eq!(bitmap(&SIGNS2), "61b35e61a484ab8e3bc0812461c61c51b819d43a93ecf3be71423aeee9af0f39");
    }

    #[test]
    fn published_first_outputs() {
        let mut e0 = [0f32; 256];
        e0[0] = 1.0;
        forward(&mut e0);
        assert_eq!(e0[..8], [1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 1.0, -1.0].map(|s: f32| s * 0.0625));
        let mut ramp: Vec<f32> = (0..256).map(|i| i as f32 / 256.0).collect();
        forward(&mut ramp);
        let first = [
            -0.2197265625,
            0.2099609375,
            -0.6220703125,
            -0.2451171875,
            -0.4111328125,
            0.9013671875,
            -0.4541015625,
            0.1083984375,
        ];
        assert_eq!(ramp[..8].iter().map(|v| f64::from(*v)).collect::<Vec<_>>(), first);
    }

    /// The definition, written the slow way: same butterflies, same order, one value at a time.
    fn by_definition(x: &[f32; 256], before: &[f32; 256], after: &[f32; 256]) -> Vec<f32> {
        let mut v: Vec<f32> = x.iter().zip(before).map(|(x, s)| x * s).collect();
        let mut stride = 1;
        while stride < 256 {
            for i in 0..256 {
                if i & stride == 0 {
                    let (a, b) = (v[i], v[i + stride]);
                    (v[i], v[i + stride]) = (a + b, a - b);
                }
            }
            stride *= 2;
        }
        v.iter().zip(after).map(|(v, s)| v * (0.0625 * s)).collect()
    }

    #[test]
    fn bit_equal_to_the_definition_both_ways() {
        let mut state = 7u32;
        let mut x = [0f32; 256];
        for round in 0..50 {
            for v in &mut x {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *v = ((state >> 8) as f32 / 8_388_608.0 - 1.0) * 10f32.powi(round % 7 - 3);
            }
            let mut y = x;
            forward(&mut y);
            assert_eq!(y.to_vec(), by_definition(&x, &SIGNS1, &SIGNS2));
            let mut z = y;
            inverse(&mut z);
            assert_eq!(z.to_vec(), by_definition(&y, &SIGNS2, &SIGNS1));
        }
    }

    #[test]
    fn a_short_tail_is_left_alone() {
        let mut x = vec![1.0f32; 300];
        forward(&mut x);
        assert!(x[256..].iter().all(|&v| v == 1.0));
        assert_ne!(x[..256], [1.0; 256]);
    }
}
