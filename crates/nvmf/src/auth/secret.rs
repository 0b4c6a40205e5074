//! Secrets, in the form in which nvme-cli has them. NVMe Base 2.0, 8.13.5.8.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rdmux_key::{KeyError, create_private, random_nonce, read_private};
use rdmux_wire::nvme::{HashId, Nqn};
use zeroize::Zeroize;

use super::chap::hmac;

/// Reason for which there is no secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// It does not have the form.
    #[error("a secret has the form DHHC-1:0H:BASE64:, as `nvme gen-dhchap-key` prints it")]
    Malformed,
    /// The file does not hold one or two.
    #[error(
        "{} holds no secret: it needs the host's in its first line, as `nvme gen-dhchap-key` prints it (DHHC-1:0H:BASE64:), and may have the controller's in its second",
        .0.display()
    )]
    NoSecret(PathBuf),
    /// There is no such file.
    #[error(
        "secret file {} does not exist: copy the target's to it, or make one with `(umask 077; nvme gen-dhchap-key > FILE)`",
        .0.display()
    )]
    Missing(PathBuf),
    /// The file cannot be read, or others can read it.
    #[error(transparent)]
    File(KeyError),
}

impl From<KeyError> for SecretError {
    fn from(error: KeyError) -> SecretError {
        match error {
            KeyError::Missing { path } => SecretError::Missing(path),
            error => SecretError::File(error),
        }
    }
}

/// A secret of a host or of a controller.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    /// It is transformed with the name of its owner by this function.
    hash: Option<HashId>,
    key: Vec<u8>,
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    const PREFIX: &str = "DHHC-1:";

    /// Makes a secret of 32 bytes that is bound to the name of its owner.
    pub fn new(key: [u8; 32]) -> Secret {
        Secret {
            hash: Some(HashId::Sha256),
            key: key.to_vec(),
        }
    }

    /// Parses the form `DHHC-1:0H:BASE64:`.
    ///
    /// # Errors
    /// It does not have that form, or its checksum is wrong.
    pub fn parse(text: &str) -> Result<Secret, SecretError> {
        let parse = || {
            let (id, rest) = text.strip_prefix(Secret::PREFIX)?.split_once(':')?;
            let hash = match id {
                "00" => None,
                _ if id.len() == 2 => Some(HashId::new(id.parse().ok()?)?),
                _ => return None,
            };
            let mut key = STANDARD.decode(rest.strip_suffix(':')?).ok()?;
            let checksum = key.split_off(key.len().checked_sub(4)?);
            let is_right = checksum == crc32fast::hash(&key).to_le_bytes();
            (is_right && matches!(key.len(), 32 | 48 | 64)).then_some(Secret { hash, key })
        };
        parse().ok_or(SecretError::Malformed)
    }

    /// Returns the form that nvme-cli takes.
    pub fn text(&self) -> String {
        let mut bytes = self.key.clone();
        bytes.extend_from_slice(&crc32fast::hash(&self.key).to_le_bytes());
        let id = self.hash.map_or(0, |hash| hash as u8);
        format!("{}{id:02}:{}:", Secret::PREFIX, STANDARD.encode(bytes))
    }

    /// Returns the key of its owner's responses: Kt.
    pub(super) fn transformed(&self, owner: &Nqn) -> Vec<u8> {
        match self.hash {
            None => self.key.clone(),
            Some(hash) => hmac(
                hash,
                &self.key,
                &[owner.as_str().as_bytes(), b"NVMe-over-Fabrics"],
            ),
        }
    }
}

/// The secrets of a host and of the controllers that it connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secrets {
    /// The host proves that it has this one.
    pub host: Secret,
    /// The controller proves that it has this one, to a host that asks for it.
    pub controller: Option<Secret>,
}

impl Secrets {
    /// Reads a file: the host's secret in the first line, the controller's in the second.
    ///
    /// # Errors
    /// It is missing, not private, or holds something else.
    pub fn load(path: &Path) -> Result<Secrets, SecretError> {
        let text = read_private(path)?;
        let mut lines = text.lines();
        let mut next = || lines.next().map(Secret::parse).transpose();
        let no_secret = || SecretError::NoSecret(path.to_owned());
        let host = next().map_err(|_| no_secret())?.ok_or_else(no_secret)?;
        let controller = next().map_err(|_| no_secret())?;
        Ok(Secrets { host, controller })
    }

    /// Reads a file; creates it with new secrets if there is none.
    ///
    /// # Errors
    /// It is not private, holds something else, or cannot be made.
    pub fn load_or_create(path: &Path) -> Result<Secrets, SecretError> {
        match Secrets::load(path) {
            Err(SecretError::Missing(_)) => {}
            result => return result,
        }
        let create = || {
            let [host, controller] = [Secret::new(random_nonce()?), Secret::new(random_nonce()?)];
            create_private(path, &format!("{}\n{}\n", host.text(), controller.text()))
        };
        create().map_err(|source| KeyError::Io {
            path: path.into(),
            source,
        })?;
        Secrets::load(path)
    }
}
