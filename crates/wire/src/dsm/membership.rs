//! Membership: how the nodes agree on who has left.
//!
//! Each epoch begins with one node leaving: epoch n is that after n have left. The member of the lowest number decides, the *coordinator*. These
//! messages have [`MESSAGE_LEN`] bytes, too:
//!
//! | bytes | field |
//! |---|---|
//! | 0 | kind |
//! | 1..4 | 0 |
//! | 4..8 | node: of Suspect and Expel |
//! | 8..16 | epoch: of Expel that which begins, of Takeover and Consent the last one of the sender; otherwise 0 |
//! | 16..48 | 0 |
//!
//! | kind | from | meaning |
//! |---|---|---|
//! | 24 Suspect | a member | its connection to the node has failed; from the coordinator: end the connection to the node |
//! | 25 Expel | the coordinator, or a member in answer to Takeover | the node has left |
//! | 26 Takeover | a member | its connections to all members below have failed: it wants to be the coordinator |
//! | 27 Consent | a member | the answer to Takeover: it has ended its connections to all members below the new coordinator |
//! | 28 Probe | a member | does the receiver take messages? |
//! | 29 Present | a member | the answer to Probe |

use super::{MESSAGE_LEN, NodeId, undefined};
use crate::Malformed;
use crate::bytes::{le32, le64, need, put};

/// A message about the membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Membership {
    /// The sender's connection to a node has failed.
    Suspect(NodeId),
    /// An epoch begins, as a node has left.
    Expel {
        /// The epoch.
        epoch: u64,
        /// The node.
        node: NodeId,
    },
    /// The sender wants to be the coordinator.
    Takeover {
        /// Its last epoch.
        epoch: u64,
    },
    /// The answer to [`Membership::Takeover`].
    Consent {
        /// The sender's last epoch.
        epoch: u64,
    },
    /// The sender wants to know whether the receiver takes messages.
    Probe,
    /// The answer to [`Membership::Probe`].
    Present,
}

impl Membership {
    /// Returns whether a message of this kind is about the membership.
    pub fn has_kind(kind: u8) -> bool {
        (24..=29).contains(&kind)
    }

    /// Reads a message.
    ///
    /// # Errors
    /// Another length than [`MESSAGE_LEN`], an undefined kind, or bytes that are not 0 where the kind has no field.
    pub fn parse(bytes: &[u8]) -> Result<Membership, Malformed> {
        need("message about the membership", bytes, MESSAGE_LEN)?;
        let epoch = le64(bytes, 8);
        let node = NodeId::new(le32(bytes, 4));
        let message = match (bytes[0], node) {
            (24, Some(node)) => Membership::Suspect(node),
            (25, Some(node)) => Membership::Expel { epoch, node },
            (26, _) => Membership::Takeover { epoch },
            (27, _) => Membership::Consent { epoch },
            (28, _) => Membership::Probe,
            (29, _) => Membership::Present,
            (kind, _) => return undefined("kind of a message about the membership", kind.into()),
        };
        match message.emit() == bytes {
            true => Ok(message),
            false => undefined(
                "reserved bytes of a message about the membership",
                bytes[0].into(),
            ),
        }
    }

    /// Writes the message.
    pub fn emit(&self) -> [u8; MESSAGE_LEN] {
        let (kind, epoch, node) = match *self {
            Membership::Suspect(node) => (24, 0, Some(node)),
            Membership::Expel { epoch, node } => (25, epoch, Some(node)),
            Membership::Takeover { epoch } => (26, epoch, None),
            Membership::Consent { epoch } => (27, epoch, None),
            Membership::Probe => (28, 0, None),
            Membership::Present => (29, 0, None),
        };
        let mut bytes = [0; MESSAGE_LEN];
        bytes[0] = kind;
        put(&mut bytes, 4, &node.map_or(0, NodeId::number).to_le_bytes());
        put(&mut bytes, 8, &epoch.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> [Membership; 6] {
        let node = NodeId::new(0x0102_0304).unwrap();
        let epoch = 0x1112_1314_1516_1718;
        [
            Membership::Suspect(node),
            Membership::Expel { epoch, node },
            Membership::Takeover { epoch },
            Membership::Consent { epoch },
            Membership::Probe,
            Membership::Present,
        ]
    }

    #[test]
    fn membership__is_read_as_it_was_written() {
        for message in messages() {
            let bytes = message.emit();
            assert!(Membership::has_kind(bytes[0]));
            assert_eq!(Membership::parse(&bytes), Ok(message));
        }
    }

    #[test]
    fn membership__has_one_way_to_be_written() {
        for message in messages() {
            for at in 0..MESSAGE_LEN {
                for value in 0..=u8::MAX {
                    let mut changed = message.emit();
                    changed[at] = value;
                    if let Ok(message) = Membership::parse(&changed) {
                        assert_eq!(message.emit(), changed);
                    }
                }
            }
        }
    }

    #[test]
    fn membership__of_another_length_is_refused() {
        let bytes = messages()[0].emit();
        assert!(Membership::parse(&bytes[1..]).is_err());
        assert!(Membership::parse(&[&bytes[..], &[0]].concat()).is_err());
    }
}
