//! DH-HMAC-CHAP: hosts and controllers prove to each other that they have a secret. NVMe Base 2.0, 8.13.

pub(crate) mod chap;
mod controller;
mod dh;
mod host;
mod secret;
#[cfg(test)]
mod tests;

pub use controller::{Authenticator, Parties};
pub use host::{AuthError, HostAuthenticator, HostStep, Offer};
pub use secret::{Secret, SecretError, Secrets};

/// Returns 32 random bytes; `None` if the system has none.
pub type Random = fn() -> Option<[u8; 32]>;

/// Returns so many random bytes.
fn random_bytes(random: Random, len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(len.next_multiple_of(32));
    while bytes.len() < len {
        bytes.extend_from_slice(&random()?);
    }
    bytes.truncate(len);
    Some(bytes)
}
