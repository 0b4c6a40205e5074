//! The key that both ends of a connection share, its file, and the proofs that they have it. The key itself is never sent.
//!
//! A protocol's proof covers all that its two ends have said, and a label of its own, so that a proof of one protocol or role is none of another.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hmac::{Hmac, Mac};
use rand_core::{OsRng, TryRngCore};
use rustix::fs::OFlags;
use sha2::Sha256;
use subtle::ConstantTimeEq;

/// Bytes of a key.
const KEY_LEN: usize = 32;
/// Maximum number of bytes read of a key file, more than it holds.
const FILE_LEN_MAX: u64 = 4096;

/// Reason why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read or made.
    #[error("key file {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file does not exist, and was named explicitly.
    #[error(
        "key file {} does not exist: copy the server's key file to it, or create a new one for both ends with `(umask 077; openssl rand \
         -hex 32 > FILE)`",
        path.display()
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// Other users could have read the file.
    #[error(
        "key file {} can be read by others (mode {mode:03o}): create a new one, or run `chmod 600` on it if nobody has read it",
        path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file belongs to another user.
    #[error("key file {} belongs to uid {owner}, not to you (uid {user})", path.display())]
    Owner {
        /// The file.
        path: PathBuf,
        /// User id of the file's owner.
        owner: u32,
        /// User id of the caller.
        user: u32,
    },
    /// The file does not hold 64 hexadecimal digits.
    #[error("key file {} does not contain a key: it needs 64 hexadecimal digits (32 random bytes)", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// There is no home folder to keep it in.
    #[error("no folder for the key file: set HOME or XDG_CONFIG_HOME, or give a file with --key FILE")]
    NoHome,
}

/// A shared secret of 32 bytes.
#[derive(Clone)]
pub struct Key([u8; KEY_LEN]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// Creates the key with these bytes.
    pub fn new(bytes: [u8; KEY_LEN]) -> Key {
        Key(bytes)
    }

    /// Reads a key file. It must belong to the caller and be closed to everybody else.
    pub fn load(path: &Path) -> Result<Key, KeyError> {
        let malformed = || KeyError::Malformed { path: path.into() };
        let text = read_private(path).map_err(|error| match error {
            KeyError::Io { source, .. } if source.kind() == io::ErrorKind::InvalidData => malformed(),
            error => error,
        })?;
        parse(text.trim_end()).ok_or_else(malformed)
    }

    /// Loads the user's own key file; creates it with a new key if there is none.
    pub fn load_or_create() -> Result<Key, KeyError> {
        Key::load_or_create_at(&default_path().ok_or(KeyError::NoHome)?)
    }

    /// Loads a key file; creates it with a new key if there is none. Several processes that create it at once get the same key.
    pub fn load_or_create_at(path: &Path) -> Result<Key, KeyError> {
        match Key::load(path) {
            Err(KeyError::Missing { .. }) => {}
            result => return result,
        }
        let create = || {
            let mut text: String = random_nonce()?.iter().map(|byte| format!("{byte:02x}")).collect();
            text.push('\n');
            create_private(path, &text)
        };
        create().map_err(|source| KeyError::Io {
            path: path.into(),
            source,
        })?;
        Key::load(path)
    }

    /// Returns the proof, for the other end, that this one has the key: of all parts in a row. The caller's parts have fixed lengths, and the first one
    /// is a label of protocol and role.
    pub fn proof(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        parts.iter().for_each(|part| mac.update(part));
        mac.finalize().into_bytes().into()
    }

    /// Returns whether a proof is right, in a time that does not reveal where it is wrong.
    pub fn verify(&self, parts: &[&[u8]], proof: &[u8; 32]) -> bool {
        self.proof(parts).ct_eq(proof).into()
    }
}

/// Reads a file with a secret. It must belong to the caller and be closed to everybody else.
///
/// # Errors
/// It is missing, not private, or no text; an error of kind `InvalidData` says that.
pub fn read_private(path: &Path) -> Result<String, KeyError> {
    let io = |source| KeyError::Io {
        path: path.into(),
        source,
    };
    // A pipe would have the open wait for its other end.
    let mut options = File::options();
    options.read(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => KeyError::Missing { path: path.into() },
        _ => io(error),
    })?;
    // Checks the open file, so that nobody can exchange it between check and read.
    let meta = file.metadata().map_err(io)?;
    if !meta.is_file() {
        return Err(io(io::Error::new(
            io::ErrorKind::InvalidData,
            "it is not a regular file",
        )));
    }
    let user = rustix::process::geteuid().as_raw();
    if meta.uid() != user {
        return Err(KeyError::Owner {
            path: path.into(),
            owner: meta.uid(),
            user,
        });
    }
    if meta.mode() & 0o077 != 0 {
        return Err(KeyError::Open {
            path: path.into(),
            mode: meta.mode() & 0o777,
        });
    }
    let mut text = String::new();
    file.take(FILE_LEN_MAX).read_to_string(&mut text).map_err(io)?;
    Ok(text)
}

/// Returns `${XDG_CONFIG_HOME:-~/.config}/rdmux/key`.
pub fn default_path() -> Option<PathBuf> {
    config_path("key")
}

/// Returns the path of a file in `${XDG_CONFIG_HOME:-~/.config}/rdmux`.
pub fn config_path(name: &str) -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let config = set("XDG_CONFIG_HOME")
        .filter(|path| path.is_absolute())
        .or_else(|| set("HOME").map(|home| home.join(".config")))?;
    Some(config.join("rdmux").join(name))
}

/// Returns 32 random bytes from the operating system.
///
/// # Errors
/// The system has none.
pub fn random_nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    OsRng.try_fill_bytes(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

fn parse(text: &str) -> Option<Key> {
    let digits: Vec<u8> = text
        .chars()
        .map(|c| c.to_digit(16).map(|d| d as u8))
        .collect::<Option<_>>()?;
    if digits.len() != 2 * KEY_LEN {
        return None;
    }
    let mut key = [0; KEY_LEN];
    for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    Some(Key(key))
}

/// Creates a file with a secret, which is complete as soon as it has its name. An existing file stays.
///
/// # Errors
/// The system refuses it.
pub fn create_private(path: &Path, text: &str) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or_else(|| Path::new("."));
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let temporary = {
        let name = random_nonce()?;
        folder.join(format!(
            ".key.{:016x}",
            u64::from_ne_bytes(name[..8].try_into().unwrap_or_default())
        ))
    };
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)?;
    // A link, unlike a rename, fails if another process was faster; then that process's key counts.
    let result = file
        .write_all(text.as_bytes())
        .and_then(|()| file.sync_all())
        .and_then(|()| match std::fs::hard_link(&temporary, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            result => result,
        });
    let _ = std::fs::remove_file(&temporary);
    result?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn load_or_create_at__makes_a_private_file_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/key");
        let key = Key::load_or_create_at(&path).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!((meta.mode() & 0o777, meta.len()), (0o600, 65));
        assert_eq!(Key::load_or_create_at(&path).unwrap().0, key.0);
        let entries = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
        assert_eq!(entries, 1, "no temporary file stays");
    }

    #[test]
    fn load_or_create_at__of_many_at_a_time_agree() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        let keys: Vec<Key> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| Key::load_or_create_at(&path).unwrap()))
                .collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| key.0 == keys[0].0));
    }

    #[test]
    fn load__refuses_what_is_no_private_key_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        assert!(matches!(Key::load(&path), Err(KeyError::Missing { .. })));
        let good = "0123456789abcdefABCDEF00".repeat(3)[..64].to_owned();
        for (text, mode, fits) in [
            (good.clone() + "\n", 0o600, true),
            (good.clone(), 0o400, true),
            (good.clone(), 0o640, false),
            (good.clone(), 0o604, false),
            (good[..63].to_owned(), 0o600, false),
            (good.clone() + "0", 0o600, false),
            (good.replace('1', "g"), 0o600, false),
            (String::new(), 0o600, false),
            ("\u{661}".repeat(64), 0o600, false),
        ] {
            let _ = std::fs::remove_file(&path);
            std::fs::write(&path, &text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(Key::load(&path).is_ok(), fits, "{text:?} with mode {mode:o}");
        }
    }

    #[test]
    fn verify__depends_on_key_and_parts() {
        let key = Key::new([1; 32]);
        let proof = key.proof(&[b"label", &[3; 32]]);
        assert!(key.verify(&[b"label", &[3; 32]], &proof));
        assert!(!key.verify(&[b"Label", &[3; 32]], &proof));
        assert!(!key.verify(&[b"label", &[3; 31]], &proof));
        assert!(!Key::new([2; 32]).verify(&[b"label", &[3; 32]], &proof));
    }
}
