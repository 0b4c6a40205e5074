//! The identities in a ClientHello. RFC 8446, 4.1.2 and 4.2.11.

/// Code of the extension that has them.
const PRE_SHARED_KEY: u16 = 41;
/// Identities that are looked at.
const IDENTITIES_MAX: usize = 8;

/// Returns the identities in a ClientHello, without its header; none if it is malformed.
pub(super) fn identities(hello: &[u8]) -> Vec<&[u8]> {
    find(hello).unwrap_or_default()
}

fn find(hello: &[u8]) -> Option<Vec<&[u8]>> {
    // Version and random bytes.
    let mut rest = hello.get(34..)?;
    // The session, the cipher suites, and the methods of compression.
    for size in [1, 2, 1] {
        take(&mut rest, size)?;
    }
    let mut extensions = take(&mut rest, 2)?;
    while !extensions.is_empty() {
        let (kind, behind) = extensions.split_first_chunk::<2>()?;
        extensions = behind;
        let mut extension = take(&mut extensions, 2)?;
        if u16::from_be_bytes(*kind) != PRE_SHARED_KEY {
            continue;
        }
        let mut all = take(&mut extension, 2)?;
        let mut found = Vec::new();
        while !all.is_empty() && found.len() < IDENTITIES_MAX {
            found.push(take(&mut all, 2)?);
            // The age of a ticket.
            all = all.get(4..)?;
        }
        return Some(found);
    }
    None
}

/// Takes a field that its length precedes, in so many bytes.
fn take<'a>(bytes: &mut &'a [u8], size: usize) -> Option<&'a [u8]> {
    let (length, rest) = bytes.split_at_checked(size)?;
    let length = length.iter().fold(0, |all, byte| all << 8 | usize::from(*byte));
    let (field, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    Some(field)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a ClientHello with an unknown extension and the identities.
    fn hello(identities: &[&[u8]]) -> Vec<u8> {
        let field = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes(), bytes].concat();
        let all = identities
            .iter()
            .map(|identity| [&field(identity)[..], &[0; 4]].concat());
        let keys = [field(&all.collect::<Vec<_>>().concat()), field(&[0; 33])].concat();
        let extensions = [&[0, 10][..], &field(&[1, 2, 3]), &[0, 41], &field(&keys)].concat();
        let fixed = [&[3; 34][..], &[0], &field(&[0x13, 1]), &[1, 0]].concat();
        [fixed, field(&extensions)].concat()
    }

    #[test]
    fn identities__are_found_and_cut_ones_are_not() {
        let whole = hello(&[b"one", b"two"]);
        assert_eq!(identities(&whole), [b"one", b"two"]);
        for len in 0..whole.len() {
            assert!(identities(&whole[..len]).is_empty(), "{len}");
        }
        assert!(identities(&hello(&[])).is_empty());
        let many = [&b"x"[..]; 100];
        assert_eq!(identities(&hello(&many)).len(), IDENTITIES_MAX);
    }

    #[test]
    fn identities__of_any_bytes_are_within_them() {
        let seed = fastseed();
        println!("seed {seed}");
        let mut state = seed;
        let base = hello(&[b"NVMe0R01 a b"]);
        for _ in 0..20_000 {
            let mut bytes = base.clone();
            for _ in 0..3 {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                let at = (state >> 33) as usize % bytes.len();
                bytes[at] = (state >> 24) as u8;
            }
            assert!(identities(&bytes).len() <= IDENTITIES_MAX);
        }
    }

    fn fastseed() -> u64 {
        let nonce = rdmux_key::random_nonce().unwrap();
        u64::from_le_bytes(nonce[..8].try_into().unwrap())
    }
}
