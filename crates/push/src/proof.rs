//! The bytes that the proofs of the key cover.

use rdmux_key::Key;

/// The end that a proof comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Server,
    Client,
}

impl Role {
    const fn label(self) -> &'static [u8] {
        match self {
            Role::Server => b"rdmux push: proof of the server\0",
            Role::Client => b"rdmux push: proof of the client\0",
        }
    }
}

/// Handshake data that both ends know. The proofs cover all of it, so that nobody in between can change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transcript {
    pub(crate) version_min: u16,
    pub(crate) version_max: u16,
    pub(crate) version: u16,
    pub(crate) client_nonce: [u8; 32],
    pub(crate) server_nonce: [u8; 32],
    /// The name that the client gives; zeros in the server's proof, which comes before that.
    pub(crate) client: [u8; 16],
}

impl Transcript {
    fn parts<R>(&self, role: Role, f: impl FnOnce(&[&[u8]]) -> R) -> R {
        let [min, max, version] =
            [self.version_min, self.version_max, self.version].map(|version| version.to_be_bytes());
        f(&[
            role.label(),
            &min,
            &max,
            &version,
            &self.client_nonce,
            &self.server_nonce,
            &self.client,
        ])
    }

    /// Returns the proof that `role` has the key, for the other end.
    pub(crate) fn proof(&self, key: &Key, role: Role) -> [u8; 32] {
        self.parts(role, |parts| key.proof(parts))
    }

    /// Returns whether a proof is right, in a time that does not reveal where it is wrong.
    pub(crate) fn verify(&self, key: &Key, role: Role, proof: &[u8; 32]) -> bool {
        self.parts(role, |parts| key.verify(parts, proof))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript() -> Transcript {
        Transcript {
            version_min: 1,
            version_max: 2,
            version: 1,
            client_nonce: [3; 32],
            server_nonce: [4; 32],
            client: [5; 16],
        }
    }

    #[test]
    fn verify__depends_on_key_role_and_all_that_was_said() {
        let key = Key::new([1; 32]);
        let proof = transcript().proof(&key, Role::Client);
        assert!(transcript().verify(&key, Role::Client, &proof));
        assert!(!transcript().verify(&key, Role::Server, &proof));
        assert!(!transcript().verify(&Key::new([2; 32]), Role::Client, &proof));
        for change in [
            Transcript {
                version_min: 0,
                ..transcript()
            },
            Transcript {
                version_max: 3,
                ..transcript()
            },
            Transcript {
                version: 2,
                ..transcript()
            },
            Transcript {
                client_nonce: [4; 32],
                ..transcript()
            },
            Transcript {
                client: [1; 16],
                ..transcript()
            },
            Transcript {
                server_nonce: [3; 32],
                ..transcript()
            },
        ] {
            assert!(!change.verify(&key, Role::Client, &proof), "{change:?}");
        }
    }
}
