//! Messages of DH-HMAC-CHAP. NVMe Base 2.0, 8.13; they travel as the data of Authentication Send and Receive.
//!
//! ```text
//!  0  type u8: 0 common, 1 DH-HMAC-CHAP | id u8 | zero u16 | transaction u16
//!                       id
//! AUTH_Negotiate       0/00  secure channel u8, number of protocols u8, each [64]: id u8, zero u8, hashes u8, groups u8, hash ids [30], group ids [30]
//! Challenge            1/01  hash bytes u8, zero u8, hash u8, group u8, DH bytes u16, sequence u32, challenge [hash bytes], DH value
//! Reply                1/02  hash bytes u8, zero u8, has challenge u8, zero u8, DH bytes u16, sequence u32, response, challenge, DH value
//! Success1             1/03  hash bytes u8, zero u8, has response u8, zero [7], response
//! Success2             1/04  zero [10]
//! Failure2             0/f0  reason u8, explanation u8
//! Failure1             0/f1  the same
//! ```

use super::{Cid, FabricsType, Sqe};
use crate::Malformed;
use crate::bytes::{le16, le32, need, put};

/// Bytes of the longest message: that of the longest hash and the largest group.
pub const AUTH_LEN_MAX: usize = 16 + 2 * 64 + 1024;
/// Bytes of a protocol in AUTH_Negotiate.
const PROTOCOL_LEN: usize = 64;
/// Security protocol of NVMe authentication (SECP), and its specific field.
const SECURITY_PROTOCOL: u32 = 0xe9_01_01_00;

/// Hash function. 8.13.5.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum HashId {
    /// SHA-256.
    Sha256 = 1,
    /// SHA-384.
    Sha384 = 2,
    /// SHA-512.
    Sha512 = 3,
}

impl HashId {
    /// All, the strongest first.
    pub const ALL: [HashId; 3] = [HashId::Sha512, HashId::Sha384, HashId::Sha256];

    /// Returns the function of an id.
    pub fn new(id: u8) -> Option<HashId> {
        HashId::ALL.into_iter().find(|hash| *hash as u8 == id)
    }

    /// Returns the bytes of a hash.
    pub const fn digest_len(self) -> usize {
        match self {
            HashId::Sha256 => 32,
            HashId::Sha384 => 48,
            HashId::Sha512 => 64,
        }
    }
}

/// Diffie-Hellman group. 8.13.5.2; RFC 7919.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum DhGroup {
    /// None: the challenge goes as it is.
    Null = 0,
    /// ffdhe2048.
    Ffdhe2048 = 1,
    /// ffdhe3072.
    Ffdhe3072 = 2,
    /// ffdhe4096.
    Ffdhe4096 = 3,
    /// ffdhe6144.
    Ffdhe6144 = 4,
    /// ffdhe8192.
    Ffdhe8192 = 5,
}

impl DhGroup {
    /// All, in the order of their ids.
    pub const ALL: [DhGroup; 6] = [
        DhGroup::Null,
        DhGroup::Ffdhe2048,
        DhGroup::Ffdhe3072,
        DhGroup::Ffdhe4096,
        DhGroup::Ffdhe6144,
        DhGroup::Ffdhe8192,
    ];

    /// Returns the group of an id.
    pub fn new(id: u8) -> Option<DhGroup> {
        DhGroup::ALL.into_iter().find(|group| *group as u8 == id)
    }

    /// Returns the bytes of a value.
    pub const fn value_len(self) -> usize {
        match self {
            DhGroup::Null => 0,
            DhGroup::Ffdhe2048 => 256,
            DhGroup::Ffdhe3072 => 384,
            DhGroup::Ffdhe4096 => 512,
            DhGroup::Ffdhe6144 => 768,
            DhGroup::Ffdhe8192 => 1024,
        }
    }
}

/// Explanation of a failed authentication, whose reason is 1. 8.13.5.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum AuthFailure {
    /// The peer did not prove that it has the secret.
    #[error("wrong secret")]
    Failed = 1,
    /// No authentication protocol in common.
    #[error("no authentication protocol in common")]
    Protocol = 2,
    /// A secure channel is asked for that there is not.
    #[error("no secure channel concatenation")]
    Concatenation = 3,
    /// No hash function in common.
    #[error("no hash function in common")]
    Hash = 4,
    /// No DH group in common.
    #[error("no DH group in common")]
    Group = 5,
    /// A message is malformed.
    #[error("malformed authentication message")]
    Payload = 6,
    /// A message at the wrong time.
    #[error("unexpected authentication message")]
    Message = 7,
}

impl AuthFailure {
    fn new(explanation: u8) -> AuthFailure {
        use AuthFailure::*;
        let all = [Failed, Protocol, Concatenation, Hash, Group, Payload, Message];
        all.into_iter()
            .find(|failure| *failure as u8 == explanation)
            .unwrap_or(Failed)
    }
}

/// Secure channel concatenation (SC_C) that a host wants with an authentication. 8.13.5.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SecureChannel {
    /// None.
    None = 0,
    /// A key for connections by TLS, agreed on over one without.
    NewTlsPsk = 2,
    /// A key in place of the one with which this connection by TLS was set up.
    ReplaceTlsPsk = 3,
}

impl SecureChannel {
    /// Returns that of a code. 1 is obsolete.
    pub fn new(code: u8) -> Option<SecureChannel> {
        use SecureChannel::*;
        let mut all = [None, NewTlsPsk, ReplaceTlsPsk].into_iter();
        all.find(|channel| *channel as u8 == code)
    }
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthMessage {
    /// The host says what it can.
    Negotiate {
        /// Secure channel concatenation that it wants: the code of a [`SecureChannel`], or one without a meaning.
        secure_channel: u8,
        /// Hash functions, the ids that have a meaning.
        hashes: Vec<HashId>,
        /// DH groups, the ids that have a meaning.
        groups: Vec<DhGroup>,
    },
    /// The controller challenges the host.
    Challenge {
        /// Hash function.
        hash: HashId,
        /// DH group.
        group: DhGroup,
        /// Sequence number.
        sequence: u32,
        /// Challenge, as long as the hash.
        challenge: Vec<u8>,
        /// The controller's DH value, as long as the group's.
        dh_value: Vec<u8>,
    },
    /// The host responds, and may challenge the controller.
    Reply {
        /// Sequence number of its challenge.
        sequence: u32,
        /// Response, as long as the hash.
        response: Vec<u8>,
        /// Its challenge to the controller.
        challenge: Option<Vec<u8>>,
        /// The host's DH value.
        dh_value: Vec<u8>,
    },
    /// The host is authenticated. The controller responds, if it was challenged.
    Success1 {
        /// Bytes of the hash.
        hash: HashId,
        /// Response to the host's challenge.
        response: Option<Vec<u8>>,
    },
    /// The controller is authenticated.
    Success2,
    /// The controller refuses the host.
    Failure1(AuthFailure),
    /// The host refuses the controller.
    Failure2(AuthFailure),
}

impl AuthMessage {
    /// Parses a message, and returns its transaction.
    ///
    /// # Errors
    /// It is no message, or its lengths do not agree.
    pub fn parse(bytes: &[u8]) -> Result<(u16, AuthMessage), Malformed> {
        need("authentication message", bytes, 8)?;
        let undefined = |what, value: u8| Malformed::Undefined {
            what,
            value: value.into(),
        };
        let take = |at: usize, len: usize| {
            need("authentication message", bytes, at + len)?;
            Ok::<_, Malformed>(bytes[at..at + len].to_vec())
        };
        let message = match (bytes[0], bytes[1]) {
            (0, 0x00) => {
                let protocols = bytes[8..].chunks_exact(PROTOCOL_LEN).take(bytes[7].into());
                let mut chap = protocols.filter(|protocol| protocol[0] == 1);
                let protocol = chap
                    .next()
                    .ok_or(undefined("authentication protocol", bytes[7]))?;
                let ids =
                    |at: usize, number: u8| protocol[at..at + usize::from(number).min(30)].iter().copied();
                AuthMessage::Negotiate {
                    secure_channel: bytes[6],
                    hashes: ids(4, protocol[2]).filter_map(HashId::new).collect(),
                    groups: ids(34, protocol[3]).filter_map(DhGroup::new).collect(),
                }
            }
            (1, 0x01) => {
                need("challenge", bytes, 16)?;
                let hash = HashId::new(bytes[8]).ok_or(undefined("hash function", bytes[8]))?;
                let group = DhGroup::new(bytes[9]).ok_or(undefined("DH group", bytes[9]))?;
                let (hash_len, dh_len) = (usize::from(bytes[6]), usize::from(le16(bytes, 10)));
                if hash_len != hash.digest_len() || dh_len != group.value_len() {
                    return Err(undefined("length of a challenge", bytes[6]));
                }
                AuthMessage::Challenge {
                    hash,
                    group,
                    sequence: le32(bytes, 12),
                    challenge: take(16, hash_len)?,
                    dh_value: take(16 + hash_len, dh_len)?,
                }
            }
            (1, 0x02) => {
                need("reply", bytes, 16)?;
                let (hash_len, dh_len) = (usize::from(bytes[6]), usize::from(le16(bytes, 10)));
                AuthMessage::Reply {
                    sequence: le32(bytes, 12),
                    response: take(16, hash_len)?,
                    challenge: match bytes[8] & 1 {
                        0 => None,
                        _ => Some(take(16 + hash_len, hash_len)?),
                    },
                    dh_value: take(16 + 2 * hash_len, dh_len)?,
                }
            }
            (1, 0x03) => {
                need("success", bytes, 16)?;
                let known = HashId::ALL
                    .into_iter()
                    .find(|hash| hash.digest_len() == usize::from(bytes[6]));
                let hash = known.ok_or(undefined("length of a hash", bytes[6]))?;
                AuthMessage::Success1 {
                    hash,
                    response: match bytes[8] & 1 {
                        0 => None,
                        _ => Some(take(16, hash.digest_len())?),
                    },
                }
            }
            (1, 0x04) => AuthMessage::Success2,
            (0, 0xf0) => AuthMessage::Failure2(AuthFailure::new(bytes[7])),
            (0, 0xf1) => AuthMessage::Failure1(AuthFailure::new(bytes[7])),
            (_, id) => return Err(undefined("authentication message", id)),
        };
        Ok((le16(bytes, 4), message))
    }

    /// Returns the bytes of the message in a transaction.
    pub fn emit(&self, transaction: u16) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        put(&mut bytes, 4, &transaction.to_le_bytes());
        match self {
            AuthMessage::Negotiate {
                secure_channel,
                hashes,
                groups,
            } => {
                bytes.resize(8 + PROTOCOL_LEN, 0);
                put(
                    &mut bytes,
                    6,
                    &[*secure_channel, 1, 1, 0, hashes.len() as u8, groups.len() as u8],
                );
                for (at, hash) in hashes.iter().enumerate() {
                    bytes[12 + at] = *hash as u8;
                }
                for (at, group) in groups.iter().enumerate() {
                    bytes[42 + at] = *group as u8;
                }
            }
            AuthMessage::Challenge {
                hash,
                group,
                sequence,
                challenge,
                dh_value,
            } => {
                put(&mut bytes, 0, &[1, 0x01]);
                put(
                    &mut bytes,
                    6,
                    &[hash.digest_len() as u8, 0, *hash as u8, *group as u8],
                );
                put(&mut bytes, 10, &(dh_value.len() as u16).to_le_bytes());
                put(&mut bytes, 12, &sequence.to_le_bytes());
                bytes.extend_from_slice(challenge);
                bytes.extend_from_slice(dh_value);
            }
            AuthMessage::Reply {
                sequence,
                response,
                challenge,
                dh_value,
            } => {
                put(&mut bytes, 0, &[1, 0x02]);
                put(
                    &mut bytes,
                    6,
                    &[response.len() as u8, 0, challenge.is_some().into()],
                );
                put(&mut bytes, 10, &(dh_value.len() as u16).to_le_bytes());
                put(&mut bytes, 12, &sequence.to_le_bytes());
                bytes.extend_from_slice(response);
                match challenge {
                    Some(challenge) => bytes.extend_from_slice(challenge),
                    None => bytes.resize(16 + 2 * response.len(), 0),
                }
                bytes.extend_from_slice(dh_value);
            }
            AuthMessage::Success1 { hash, response } => {
                put(&mut bytes, 0, &[1, 0x03]);
                put(
                    &mut bytes,
                    6,
                    &[hash.digest_len() as u8, 0, response.is_some().into()],
                );
                bytes.extend_from_slice(response.as_deref().unwrap_or(&[]));
            }
            AuthMessage::Success2 => put(&mut bytes, 0, &[1, 0x04]),
            AuthMessage::Failure1(failure) | AuthMessage::Failure2(failure) => {
                let id = if matches!(self, AuthMessage::Failure1(_)) {
                    0xf1
                } else {
                    0xf0
                };
                put(&mut bytes, 0, &[0, id]);
                put(&mut bytes, 6, &[1, *failure as u8]);
            }
        }
        bytes
    }
}

/// Returns true if an Authentication Send or Receive is of NVMe's security protocol.
pub fn is_nvme_authentication(sqe: &Sqe) -> bool {
    sqe.dword(10) & !0xff == SECURITY_PROTOCOL
}

/// Returns the length that an Authentication Send transfers, or an Authentication Receive has room for.
pub fn authentication_len(sqe: &Sqe) -> u32 {
    sqe.dword(11)
}

/// Returns Authentication Send or Receive of so many bytes.
pub fn authentication(kind: FabricsType, cid: Cid, len: u32) -> Sqe {
    let mut sqe = kind.command(cid);
    sqe.set_dword(10, SECURITY_PROTOCOL);
    sqe.set_dword(11, len);
    sqe
}
