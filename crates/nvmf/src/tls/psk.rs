//! Pre-shared keys, in the form in which nvme-cli has them, and what TLS makes of them. NVMe/TCP 3.6.1.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rdmux_key::{KeyError, create_private, random_nonce, read_private};
use rdmux_wire::nvme::{HashId, Nqn};
use zeroize::Zeroize;

use crate::auth::chap::hmac;

/// Reason for which there is no key.
#[derive(Debug, thiserror::Error)]
pub enum PskError {
    /// It does not have the form.
    #[error("a key of TLS has the form NVMeTLSkey-1:0H:BASE64:, as `nvme gen-tls-key` prints it")]
    Malformed,
    /// The file does not hold one.
    #[error("{} holds no key of TLS: it needs one as `nvme gen-tls-key` prints it", .0.display())]
    NoKey(PathBuf),
    /// There is no such file.
    #[error(
        "file {} with the key of TLS does not exist: copy the target's to it, or make one with `(umask 077; nvme gen-tls-key > FILE)`",
        .0.display()
    )]
    Missing(PathBuf),
    /// The file cannot be read, or others can read it.
    #[error(transparent)]
    File(KeyError),
}

impl From<KeyError> for PskError {
    fn from(error: KeyError) -> PskError {
        match error {
            KeyError::Missing { path } => PskError::Missing(path),
            error => PskError::File(error),
        }
    }
}

/// The key of a host.
#[derive(Clone, PartialEq, Eq)]
pub struct Psk {
    /// The hash of all that is derived from it: SHA-256 or SHA-384.
    hash: HashId,
    kind: Kind,
    key: Vec<u8>,
}

/// The origin of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A file: the retained key follows from it and the host's name.
    Configured,
    /// A file, as it is.
    Retained,
    /// An authentication of host and controller. NVMe Base 2.0, 8.13.5.9.
    Generated,
}

impl Drop for Psk {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl fmt::Debug for Psk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Psk")
    }
}

/// The form of an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Only names: older hosts, and SPDK's.
    V0 = 0,
    /// Names and a digest that tells keys apart.
    V1 = 1,
}

/// The derivation of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Derivation {
    /// That of the specification.
    Standard,
    /// That of libnvme before 1.16, as Debian 13 has it. Only the digest of identities tells it from the other one.
    OldLibnvme,
}

/// An identity that a host offers, and the key behind it.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The identity.
    pub identity: String,
    /// The key of TLS.
    pub key: Vec<u8>,
    /// The hash of the cipher suite: SHA-256 or SHA-384.
    pub hash: HashId,
}

impl Drop for Credentials {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.identity)
    }
}

/// The parts of an identity that say whose key it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its form.
    pub version: Version,
    /// The host.
    pub host: Nqn,
    /// The subsystem.
    pub subsystem: Nqn,
}

impl Identity {
    /// Parses what a host offers. `None` if it is no identity, or the older form of one of a generated key, which cannot tell a host's keys apart.
    pub fn parse(identity: &[u8]) -> Option<Identity> {
        let mut parts = std::str::from_utf8(identity).ok()?.split(' ');
        let version = match parts.next()? {
            "NVMe0R01" | "NVMe0R02" => Version::V0,
            "NVMe1R01" | "NVMe1R02" | "NVMe1G01" | "NVMe1G02" => Version::V1,
            _ => return None,
        };
        let [host, subsystem] = [Nqn::new(parts.next()?)?, Nqn::new(parts.next()?)?];
        let has_digest = parts.next().is_some();
        let is_whole = has_digest == (version == Version::V1) && parts.next().is_none();
        is_whole.then_some(Identity {
            version,
            host,
            subsystem,
        })
    }
}

impl Psk {
    const PREFIX: &str = "NVMeTLSkey-1:";

    /// Makes a key of 32 bytes that is bound to the name of its host.
    pub fn new(key: [u8; 32]) -> Psk {
        Psk {
            hash: HashId::Sha256,
            kind: Kind::Configured,
            key: key.to_vec(),
        }
    }

    /// Makes the key that an authentication has led to. `None` if it is not one of a cipher suite's hash.
    pub(crate) fn generated(hash: HashId, key: Vec<u8>) -> Option<Psk> {
        let is_of_suite = hash != HashId::Sha512 && key.len() == hash.digest_len();
        is_of_suite.then_some(Psk {
            hash,
            kind: Kind::Generated,
            key,
        })
    }

    /// Returns true if an authentication has led to it.
    pub fn is_generated(&self) -> bool {
        self.kind == Kind::Generated
    }

    /// Parses the form `NVMeTLSkey-1:0H:BASE64:`.
    ///
    /// # Errors
    /// It does not have that form, its checksum is wrong, or its length is not that of its hash.
    pub fn parse(text: &str) -> Result<Psk, PskError> {
        let parse = || {
            let (id, rest) = text.strip_prefix(Psk::PREFIX)?.split_once(':')?;
            let mut key = STANDARD.decode(rest.strip_suffix(':')?).ok()?;
            let checksum = key.split_off(key.len().checked_sub(4)?);
            let hash = match (id, key.len()) {
                ("00" | "01", 32) => HashId::Sha256,
                ("00" | "02", 48) => HashId::Sha384,
                _ => return None,
            };
            let is_right = checksum == crc32fast::hash(&key).to_le_bytes();
            is_right.then_some(Psk {
                hash,
                kind: if id == "00" {
                    Kind::Retained
                } else {
                    Kind::Configured
                },
                key,
            })
        };
        parse().ok_or(PskError::Malformed)
    }

    /// Returns the form that nvme-cli takes.
    pub fn text(&self) -> String {
        let mut bytes = self.key.clone();
        bytes.extend_from_slice(&crc32fast::hash(&self.key).to_le_bytes());
        let id = if self.kind == Kind::Configured {
            self.hash as u8
        } else {
            0
        };
        format!("{}{id:02}:{}:", Psk::PREFIX, STANDARD.encode(bytes))
    }

    /// Reads a file with a key in its first line.
    ///
    /// # Errors
    /// It is missing, not private, or holds something else.
    pub fn load(path: &Path) -> Result<Psk, PskError> {
        let text = read_private(path)?;
        let first = text.lines().next().unwrap_or_default();
        Psk::parse(first).map_err(|_| PskError::NoKey(path.to_owned()))
    }

    /// Reads a file; creates it with a new key if there is none.
    ///
    /// # Errors
    /// It is not private, holds something else, or cannot be made.
    pub fn load_or_create(path: &Path) -> Result<Psk, PskError> {
        match Psk::load(path) {
            Err(PskError::Missing(_)) => {}
            result => return result,
        }
        let create = || create_private(path, &format!("{}\n", Psk::new(random_nonce()?).text()));
        create().map_err(|source| KeyError::Io {
            path: path.into(),
            source,
        })?;
        Psk::load(path)
    }

    /// Returns the key of TLS between a host and a subsystem, and its identity. `None` if the names are too long for this form.
    pub fn credentials(
        &self,
        (version, derivation): (Version, Derivation),
        host: &Nqn,
        subsystem: &Nqn,
    ) -> Option<Credentials> {
        let (host, subsystem) = (host.as_str(), subsystem.as_str());
        let expand = |key: &[u8], label, context| self.expand(derivation, key, label, context);
        let retained = match self.kind {
            Kind::Configured => expand(&self.key, b"tls13 HostNQN", host.as_bytes())?,
            Kind::Retained | Kind::Generated => self.key.clone(),
        };
        let id = self.hash as u8;
        let letter = if self.is_generated() { 'G' } else { 'R' };
        let mut identity = format!("NVMe{}{letter}{id:02} {host} {subsystem}", version as u8);
        let context = match version {
            Version::V0 => identity.clone(),
            Version::V1 => {
                let names = format!("{host} {subsystem} NVMe-over-Fabrics");
                let digest = STANDARD.encode(hmac(self.hash, &retained, &[names.as_bytes()]));
                identity += &format!(" {digest}");
                format!("{id:02} {digest}")
            }
        };
        Some(Credentials {
            key: expand(&retained, b"tls13 nvme-tls-psk", context.as_bytes())?,
            identity,
            hash: self.hash,
        })
    }

    /// Derives a key as long as the hash: HKDF without salt (RFC 5869), with the label of TLS 1.3 (RFC 8446, 7.1). `None` if the context is too long.
    fn expand(&self, derivation: Derivation, key: &[u8], label: &[u8], context: &[u8]) -> Option<Vec<u8>> {
        let extracted = hmac(self.hash, &[], &[key]);
        let length = extracted.len() as u16;
        let sizes = [label.len() as u8, u8::try_from(context.len()).ok()?];
        // The number of the block, which is as long as the key, ends it.
        let info: [&[u8]; 6] = match derivation {
            Derivation::Standard => [
                &length.to_be_bytes(),
                &sizes[..1],
                label,
                &sizes[1..],
                context,
                &[1],
            ],
            Derivation::OldLibnvme => [&length.to_le_bytes(), &[], label, &[], context, &[1]],
        };
        Some(hmac(self.hash, &extracted, &info))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key of 32 bytes, and one of 48, as libnvme's tests have them.
    const KEYS: [&str; 2] = [
        "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:",
        "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:",
    ];

    const V0: (Version, Derivation) = (Version::V0, Derivation::Standard);
    const V1: (Version, Derivation) = (Version::V1, Derivation::Standard);
    const OLD: (Version, Derivation) = (Version::V1, Derivation::OldLibnvme);

    fn names() -> [Nqn; 2] {
        ["nqn.psk-test-host", "nqn.psk-test-subsys"].map(|nqn| Nqn::new(nqn).unwrap())
    }

    #[test]
    fn parse__takes_what_nvme_cli_prints_and_nothing_else() {
        let retained = KEYS[0].replace(":01:", ":00:");
        for text in [KEYS[0], KEYS[1], &retained] {
            assert_eq!(Psk::parse(text).unwrap().text(), text);
        }
        let wrong = [
            KEYS[0].replace("-1:", "-2:"),
            KEYS[0].replace(":01:", ":02:"),
            KEYS[1].replace(":02:", ":01:"),
            KEYS[0].replace(":01:", ":03:"),
            KEYS[0].replace(":VR", ":WR"),
            KEYS[0].replace("VRLb", "!!!!"),
            KEYS[0].trim_end_matches(':').to_owned(),
            format!("{}:", KEYS[0]),
            "NVMeTLSkey-1:01:AAAA:".to_owned(),
            "NVMeTLSkey-1:01::".to_owned(),
            String::new(),
        ];
        for text in wrong {
            assert!(Psk::parse(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn credentials__are_those_of_libnvme() {
        let [host, subsystem] = names();
        let expected = [
            (V1, "iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU="),
            (
                V1,
                "QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
            ),
            (OLD, "66GuqV08TsAGII39teWUfwQwizjv06Jy8jOcX3NAAzM="),
            (
                OLD,
                "RsKmYJ3nAn1ApjjMloJFbAkLPivONDAX/xW327YBUsn2eGShXSjCZvBaOxscLqmz",
            ),
        ];
        for (at, (form, digest)) in expected.into_iter().enumerate() {
            let (text, hash, len) = [(KEYS[0], 1, 32), (KEYS[1], 2, 48)][at % 2];
            let psk = Psk::parse(text).unwrap();
            let credentials = psk.credentials(form, &host, &subsystem).unwrap();
            let names = format!("R{hash:02} nqn.psk-test-host nqn.psk-test-subsys");
            assert_eq!(credentials.identity, format!("NVMe1{names} {digest}"));
            assert_eq!(credentials.key.len(), len);
            let v0 = psk.credentials(V0, &host, &subsystem).unwrap();
            assert_eq!(v0.identity, format!("NVMe0{names}"));
            assert_ne!(v0.key, credentials.key);
        }
    }

    #[test]
    fn credentials__differ_with_host_subsystem_and_key() {
        let [host, subsystem] = names();
        let psk = Psk::parse(KEYS[0]).unwrap();
        let retained = Psk::parse(&KEYS[0].replace(":01:", ":00:")).unwrap();
        for version in [V0, V1, OLD] {
            let all = [
                psk.credentials(version, &host, &subsystem),
                psk.credentials(version, &subsystem, &host),
                psk.credentials(version, &host, &host),
                retained.credentials(version, &host, &subsystem),
                Psk::new([7; 32]).credentials(version, &host, &subsystem),
            ];
            for (at, one) in all.iter().enumerate() {
                let key = |credentials: &Option<Credentials>| credentials.as_ref().unwrap().key.clone();
                assert!(all[..at].iter().all(|other| key(other) != key(one)), "{at}");
            }
        }
    }

    #[test]
    fn credentials__of_long_names_have_the_newer_form_alone() {
        let long = |letter: &str| Nqn::new(&letter.repeat(Nqn::LEN_MAX)).unwrap();
        let psk = Psk::new([7; 32]);
        assert_eq!(psk.credentials(V0, &long("a"), &long("b")), None);
        assert!(psk.credentials(V1, &long("a"), &long("b")).is_some());
    }

    #[test]
    fn identity__says_whose_key_it_is() {
        let [host, subsystem] = names();
        for (key, version) in KEYS.into_iter().zip([V0, V1]) {
            let credentials = Psk::parse(key).unwrap().credentials(version, &host, &subsystem);
            let identity = Identity {
                version: version.0,
                host: host.clone(),
                subsystem: subsystem.clone(),
            };
            assert_eq!(
                Identity::parse(credentials.unwrap().identity.as_bytes()),
                Some(identity)
            );
        }
        for wrong in [
            "",
            "NVMe0R01",
            "NVMe0R01 a",
            "NVMe0R01 a ",
            "NVMe0R01 a b c",
            "NVMe1R01 a b",
            "NVMe1R01 a b c d",
            "NVMe0R03 a b",
            "NVMe0G01 a b",
            "NVMe1G03 a b c",
            "NVMe2R01 a b c",
        ] {
            assert_eq!(Identity::parse(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(Identity::parse(b"NVMe0R01 \xff b"), None);
        let generated = Psk::generated(HashId::Sha384, vec![7; 48]).unwrap();
        let credentials = generated.credentials(V1, &host, &subsystem).unwrap();
        let identity = Identity::parse(credentials.identity.as_bytes()).unwrap();
        assert_eq!((identity.host, identity.subsystem), (host, subsystem));
    }

    #[test]
    fn load_or_create__makes_a_private_key_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sub/nvme-psk");
        let made = Psk::load_or_create(&path).unwrap();
        assert_eq!(Psk::load_or_create(&path).unwrap(), made);
        assert_eq!(Psk::load(&path).unwrap(), made);
        let other = folder.path().join("other");
        create_private(&other, "DHHC-1:01:x:\n").unwrap();
        assert!(matches!(Psk::load(&other), Err(PskError::NoKey(_))));
    }
}
