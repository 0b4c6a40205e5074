//! Diffie-Hellman over the groups of RFC 7919.

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd};
use rdmux_wire::nvme::DhGroup;

/// Bytes of a private exponent: more than twice the bits of strength of the largest group (RFC 7919, 5.2 and appendix A).
pub(super) const EXPONENT_LEN: usize = 64;

/// A private exponent and its public value.
pub(super) struct KeyPair {
    prime: Vec<u8>,
    params: BoxedMontyParams,
    exponent: BoxedUint,
    public: Vec<u8>,
}

impl KeyPair {
    /// Makes a pair from random bytes; `None` for the null group.
    pub(super) fn new(group: DhGroup, random: &[u8]) -> Option<KeyPair> {
        let prime = prime(group)?;
        let bits = 8 * prime.len() as u32;
        let modulus = BoxedUint::from_be_slice(&prime, bits).ok()?;
        let params = BoxedMontyParams::new(Odd::new(modulus).into_option()?);
        let exponent = BoxedUint::from_be_slice(random.get(..EXPONENT_LEN)?, 8 * EXPONENT_LEN as u32).ok()?;
        let mut two = vec![0; prime.len()];
        *two.last_mut()? = 2;
        let mut pair = KeyPair {
            prime,
            params,
            exponent,
            public: Vec::new(),
        };
        pair.public = pair.power(&two)?;
        Some(pair)
    }

    fn power(&self, base: &[u8]) -> Option<Vec<u8>> {
        let base = BoxedUint::from_be_slice(base, 8 * self.prime.len() as u32).ok()?;
        let power = BoxedMontyForm::new(base, &self.params).pow(&self.exponent);
        Some(power.retrieve().to_be_bytes().to_vec())
    }

    /// Returns the public value, as long as the group's.
    pub(super) fn public(&self) -> &[u8] {
        &self.public
    }

    /// Returns the secret in common with a peer; `None` if its value is not between 1 and the prime less 1, whose powers are known to
    /// everybody.
    pub(super) fn agree(&self, peer: &[u8]) -> Option<Vec<u8>> {
        let mut one = vec![0; self.prime.len()];
        *one.last_mut()? = 1;
        let mut last = self.prime.clone();
        *last.last_mut()? -= 1;
        let is_valid = peer.len() == self.prime.len() && *peer > *one && *peer < *last;
        is_valid.then(|| self.power(peer)).flatten()
    }
}

/// Returns the prime of a group, big endian: 2^n - 2^(n-64) + (floor(2^(n-130) e) + x) 2^64 - 1 (RFC 7919, appendix A).
fn prime(group: DhGroup) -> Option<Vec<u8>> {
    let x: u64 = match group {
        DhGroup::Null => return None,
        DhGroup::Ffdhe2048 => 560_316,
        DhGroup::Ffdhe3072 => 2_625_351,
        DhGroup::Ffdhe4096 => 5_736_041,
        DhGroup::Ffdhe6144 => 15_705_020,
        DhGroup::Ffdhe8192 => 10_965_728,
    };
    let words = group.value_len() / 8 - 2;
    let mut middle = e(words);
    // The last 1 is taken from the lowest word, which is all ones then.
    let mut carry = x - 1;
    for word in middle.iter_mut().rev() {
        let (sum, overflows) = word.overflowing_add(carry);
        (*word, carry) = (sum, overflows.into());
    }
    let ones = [u8::MAX; 8];
    let middle = middle.iter().flat_map(|word| word.to_be_bytes());
    Some(ones.into_iter().chain(middle).chain(ones).collect())
}

/// Returns the first bits of Euler's number in so many words, the highest first: the series of 1/k!, with two words more than are returned.
fn e(words: usize) -> Vec<u64> {
    let mut term = vec![0u64; words + 2];
    // 1, with two bits before the point.
    term[0] = 1 << 62;
    let mut sum = vec![0u64; words + 2];
    for k in 1.. {
        let mut carry = false;
        for (sum, term) in sum.iter_mut().zip(&term).rev() {
            let (partial, first) = sum.overflowing_add(*term);
            let (total, second) = partial.overflowing_add(carry.into());
            (*sum, carry) = (total, first || second);
        }
        let mut rest = 0u128;
        for word in &mut term {
            let dividend = rest << 64 | u128::from(*word);
            (*word, rest) = ((dividend / k) as u64, dividend % k);
        }
        if term.iter().all(|word| *word == 0) {
            break;
        }
    }
    sum.truncate(words);
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prime__begins_and_ends_as_in_rfc_7919() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02X}")).collect::<String>();
        let first = "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1";
        let last = [
            (DhGroup::Ffdhe2048, "886B423861285C97FFFFFFFFFFFFFFFF"),
            (DhGroup::Ffdhe3072, "25E41D2B66C62E37FFFFFFFFFFFFFFFF"),
            (DhGroup::Ffdhe4096, "C68A007E5E655F6AFFFFFFFFFFFFFFFF"),
            (
                DhGroup::Ffdhe6144,
                "A41D570D7938DAD4A40E329CD0E40E65FFFFFFFFFFFFFFFF",
            ),
            (DhGroup::Ffdhe8192, "D68C8BB7C5C6424CFFFFFFFFFFFFFFFF"),
        ];
        for (group, last) in last {
            let prime = hex(&prime(group).unwrap());
            assert!(prime.starts_with(first), "{group:?} {prime}");
            assert!(prime.ends_with(last), "{group:?} {}", &prime[prime.len() - 48..]);
            assert_eq!(prime.len(), 2 * group.value_len());
        }
    }

    #[test]
    fn agree__both_sides_have_the_same() {
        for group in DhGroup::ALL.into_iter().skip(1) {
            let a = KeyPair::new(group, &[0x5a; EXPONENT_LEN]).unwrap();
            let b = KeyPair::new(group, &[0x33; EXPONENT_LEN]).unwrap();
            assert_eq!(a.agree(b.public()), b.agree(a.public()));
            assert_eq!(a.agree(b.public()).unwrap().len(), group.value_len());
            // Values of which every power is known.
            let mut one = vec![0; group.value_len()];
            assert_eq!(a.agree(&one), None);
            one[group.value_len() - 1] = 1;
            assert_eq!(a.agree(&one), None);
            let mut last = prime(group).unwrap();
            last[group.value_len() - 1] -= 1;
            assert_eq!(a.agree(&last), None);
            assert_eq!(a.agree(&b.public()[1..]), None);
        }
    }
}
