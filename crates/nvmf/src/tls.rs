//! TLS 1.3 with pre-shared keys on connections of TCP: [`psk`] makes keys and identities, a session is the cipher of a connection. NVMe/TCP 3.6.1.
//!
//! Sessions are s2n-tls's, and exist with the feature `tls` alone: without it nothing can make one, and whoever asks for one gets an
//! error of one line.

#[cfg(not(feature = "tls"))]
mod absent;
mod channel;
#[cfg(feature = "tls")]
mod hello;
pub mod psk;
#[cfg(feature = "tls")]
mod session;
#[cfg(all(test, feature = "tls"))]
mod tests;

use std::fmt;
use std::sync::Arc;

use rdmux_wire::nvme::Nqn;

#[cfg(not(feature = "tls"))]
pub(crate) use self::absent::{Server, Session};
pub(crate) use self::channel::Channel;
use self::psk::Psk;
#[cfg(feature = "tls")]
pub(crate) use self::session::{Server, Session};

/// Reason for which there are no sessions.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TlsError {
    /// The program was built so.
    #[error("this rdmux is built without TLS: take the .deb, or build it with `--features tls`")]
    Absent,
    /// The names are too long.
    #[error("the names of host and subsystem are too long for TLS")]
    Names,
    /// The library has refused something.
    #[error("cannot prepare TLS: {0}")]
    Library(String),
}

/// A host's proof, by a handshake, that it has the key for a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The host.
    pub host: Nqn,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The key.
    pub psk: Psk,
}

/// Returns the keys that a host may have for a subsystem.
type Find = dyn Fn(&Nqn, &Nqn) -> Vec<Psk> + Send + Sync;

/// Finds keys.
#[derive(Clone)]
#[cfg_attr(
    not(feature = "tls"),
    expect(dead_code, reason = "nobody asks without sessions")
)]
pub(crate) struct Keys(pub(crate) Arc<Find>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Keys")
    }
}

/// Returns true if this program can speak TLS.
pub const fn is_present() -> bool {
    cfg!(feature = "tls")
}
