//! LSB-first codes of any width from 1 to 8 bits.
//!
//! One rule for every width: code `i` is bits `[i*BITS, (i+1)*BITS)` of the payload, bit 0 being the
//! least significant bit of byte 0. Eight codes are exactly `BITS` bytes, so both directions work on
//! eight codes in one `u64`: three halving steps close (or open) the gaps between bytes, which the
//! compiler turns into vector code.

/// Packs `codes` (each below `2^BITS`; higher bits are ignored) into `out`.
///
/// `codes.len()` is a multiple of 8 and `out.len() == codes.len() / 8 * BITS`.
#[inline(always)]
pub fn pack<const BITS: usize>(codes: &[u8], out: &mut [u8]) {
    debug_assert_eq!(codes.len() % 8, 0);
    debug_assert_eq!(out.len(), codes.len() / 8 * BITS);
    for (c, o) in codes.chunks_exact(8).zip(out.chunks_exact_mut(BITS)) {
        let word = u64::from_le_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]);
        o.copy_from_slice(&close::<BITS>(word).to_le_bytes()[..BITS]);
    }
}

/// Unpacks `bytes` into one code per byte: the inverse of [`pack`].
///
/// `codes.len()` is a multiple of 8 and `bytes.len() == codes.len() / 8 * BITS`.
#[inline(always)]
pub fn unpack<const BITS: usize>(bytes: &[u8], codes: &mut [u8]) {
    debug_assert_eq!(codes.len() % 8, 0);
    debug_assert_eq!(bytes.len(), codes.len() / 8 * BITS);
    for (b, c) in bytes.chunks_exact(BITS).zip(codes.chunks_exact_mut(8)) {
        let mut word = [0u8; 8];
        word[..BITS].copy_from_slice(b);
        c.copy_from_slice(&open::<BITS>(u64::from_le_bytes(word)).to_le_bytes());
    }
}

/// The low `n` bits of every `step`-bit field.
const fn fields(n: usize, step: usize) -> u64 {
    let ones = (1u64 << n) - 1;
    let mut mask = 0;
    let mut at = 0;
    while at < 64 {
        mask |= ones << at;
        at += step;
    }
    mask
}

/// In every lane of `2 * step` bits, the `n` low bits of the upper half move down to those of the lower.
#[inline(always)]
const fn close_step(x: u64, n: usize, step: usize) -> u64 {
    let low = fields(n, 2 * step);
    (x & low) | ((x >> (step - n)) & (low << n))
}

/// The inverse of [`close_step`].
#[inline(always)]
const fn open_step(x: u64, n: usize, step: usize) -> u64 {
    let low = fields(n, 2 * step);
    (x & low) | ((x << (step - n)) & (low << step))
}

#[inline(always)]
fn close<const BITS: usize>(x: u64) -> u64 {
    close_step(close_step(close_step(x, BITS, 8), 2 * BITS, 16), 4 * BITS, 32)
}

#[inline(always)]
fn open<const BITS: usize>(x: u64) -> u64 {
    open_step(open_step(open_step(x, 4 * BITS, 32), 2 * BITS, 16), BITS, 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule itself, one bit at a time.
    fn bit_by_bit(bits: usize, codes: &[u8]) -> Vec<u8> {
        let mut out = vec![0u8; codes.len() / 8 * bits];
        for (i, &c) in codes.iter().enumerate() {
            for b in 0..bits {
                let at = i * bits + b;
                out[at / 8] |= ((c >> b) & 1) << (at % 8);
            }
        }
        out
    }

    fn check<const BITS: usize>() {
        let codes: Vec<u8> = (0..256usize).map(|i| ((i * 73 + i / 7) & ((1 << BITS) - 1)) as u8).collect();
        let mut packed = vec![0xaa; 32 * BITS];
        pack::<BITS>(&codes, &mut packed);
        assert_eq!(packed, bit_by_bit(BITS, &codes), "{BITS} bits");
        let mut back = vec![0xaa; 256];
        unpack::<BITS>(&packed, &mut back);
        assert_eq!(back, codes, "{BITS} bits");
    }

    #[test]
    fn every_width_follows_the_rule() {
        check::<1>();
        check::<2>();
        check::<3>();
        check::<4>();
        check::<5>();
        check::<6>();
        check::<7>();
        check::<8>();
    }

    #[test]
    fn every_byte_value_in_every_position_round_trips() {
        fn bytes<const BITS: usize>() {
            for at in 0..BITS {
                for v in 0..=255u8 {
                    let mut b = vec![0u8; BITS];
                    b[at] = v;
                    let (mut c, mut back) = ([0u8; 8], vec![0u8; BITS]);
                    unpack::<BITS>(&b, &mut c);
                    assert!(c.iter().all(|&c| (c as usize) < 1 << BITS));
                    pack::<BITS>(&c, &mut back);
                    assert_eq!(back, b);
                }
            }
        }
        bytes::<2>();
        bytes::<3>();
        bytes::<4>();
        bytes::<5>();
        bytes::<6>();
    }
}
