//! Responses to challenges, and the key that follows from them. NVMe Base 2.0, 8.13.5.4 to 8.13.5.6, and 8.13.5.9.

use hmac::{Hmac, Mac};
use rdmux_wire::nvme::{HashId, Nqn, SecureChannel};
use sha2::{Digest, Sha256, Sha384, Sha512};

use crate::tls::psk::Psk;

/// Returns the HMAC of the parts in a row.
pub(crate) fn hmac(hash: HashId, key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    fn of<M: Mac + hmac::digest::KeyInit>(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
        let mut mac = <M as Mac>::new_from_slice(key).expect("HMAC takes keys of any length");
        parts.iter().for_each(|part| mac.update(part));
        mac.finalize().into_bytes().to_vec()
    }
    match hash {
        HashId::Sha256 => of::<Hmac<Sha256>>(key, parts),
        HashId::Sha384 => of::<Hmac<Sha384>>(key, parts),
        HashId::Sha512 => of::<Hmac<Sha512>>(key, parts),
    }
}

/// Returns the session key (KS) of a Diffie-Hellman secret.
pub(super) fn session_key(hash: HashId, shared: &[u8]) -> Vec<u8> {
    match hash {
        HashId::Sha256 => Sha256::digest(shared).to_vec(),
        HashId::Sha384 => Sha384::digest(shared).to_vec(),
        HashId::Sha512 => Sha512::digest(shared).to_vec(),
    }
}

/// Returns the key for TLS that follows from the session key and the challenges of controller and host. `None` if TLS has no cipher suite with that
/// hash function.
pub(super) fn generated_psk(hash: HashId, session_key: &[u8], challenges: [&[u8]; 2]) -> Option<Psk> {
    Psk::generated(hash, hmac(hash, session_key, &challenges))
}

/// The side that responds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Host,
    Controller,
}

/// A challenge, and what both sides know about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Challenge<'a> {
    pub(super) hash: HashId,
    pub(super) challenge: &'a [u8],
    /// The Diffie-Hellman secret, if there is a group.
    pub(super) shared: Option<&'a [u8]>,
    pub(super) sequence: u32,
    pub(super) transaction: u16,
    pub(super) channel: SecureChannel,
    pub(super) host: &'a Nqn,
    pub(super) subsystem: &'a Nqn,
}

impl Challenge<'_> {
    /// Returns the response of a side, by its transformed key.
    pub(super) fn response(&self, side: Side, key: &[u8]) -> Vec<u8> {
        let augmented = match self.shared {
            Some(shared) => hmac(self.hash, &session_key(self.hash, shared), &[self.challenge]),
            None => self.challenge.to_vec(),
        };
        let (label, own, other): (&[u8], _, _) = match side {
            Side::Host => (b"HostHost", self.host, self.subsystem),
            Side::Controller => (b"Controller", self.subsystem, self.host),
        };
        let parts: [&[u8]; 8] = [
            &augmented,
            &self.sequence.to_le_bytes(),
            &self.transaction.to_le_bytes(),
            &[self.channel as u8],
            label,
            own.as_str().as_bytes(),
            &[0],
            other.as_str().as_bytes(),
        ];
        hmac(self.hash, key, &parts)
    }
}
