//! Allocation: how a node gets memory that is at home at another node, and gives it back.
//!
//! Each node hands out the units of a heap's regions that are at home there, and alone knows which are handed out. These messages have
//! [`MESSAGE_LEN`] bytes, too:
//!
//! | bytes | field |
//! |---|---|
//! | 0 | kind |
//! | 1 | outcome, of Outcome: 0 done, 1 no room, 2 not allocated; otherwise 0 |
//! | 2..4 | 0 |
//! | 4..8 | region |
//! | 8..16 | ticket: the number that the node which asks has given to its request, repeated by the answer |
//! | 16..24 | units: of Allocate |
//! | 24..32 | unit: of Free, and of Outcome the first unit that was allocated, or the one that was freed, if it is done; otherwise 0 |
//! | 32..48 | 0 |
//!
//! | kind | from | meaning |
//! |---|---|---|
//! | 21 Allocate | a node | it wants units in a row |
//! | 22 Free | a node | it gives back what begins at the unit |
//! | 23 Outcome | the home | the answer |

use super::{MESSAGE_LEN, undefined};
use crate::Malformed;
use crate::bytes::{le32, le64, need, put};

/// A message about the memory of a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Heap {
    /// Region.
    pub region: u32,
    /// Number of the request at the node that asks.
    pub ticket: u64,
    /// Kind and content.
    pub body: Body,
}

/// Kind of a [`Heap`], with its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Body {
    /// The sender wants so many units in a row.
    Allocate {
        /// Their number.
        units: u64,
    },
    /// The sender gives back what was allocated.
    Free {
        /// Its first unit.
        unit: u64,
    },
    /// The request is carried out.
    Done {
        /// The first unit that was allocated, or the one that was freed.
        unit: u64,
    },
    /// There are not so many free units in a row.
    NoRoom,
    /// Nothing is allocated that begins at the unit.
    NotAllocated,
}

impl Heap {
    /// Returns whether a message of this kind is about the memory of a heap.
    pub fn has_kind(kind: u8) -> bool {
        (21..=23).contains(&kind)
    }

    /// Reads a message.
    ///
    /// # Errors
    /// Another length than [`MESSAGE_LEN`], an undefined kind, or bytes that are not 0 where the kind has no field.
    pub fn parse(bytes: &[u8]) -> Result<Heap, Malformed> {
        need("message about a heap", bytes, MESSAGE_LEN)?;
        let (units, unit) = (le64(bytes, 16), le64(bytes, 24));
        let body = match (bytes[0], bytes[1]) {
            (21, 0) => Body::Allocate { units },
            (22, 0) => Body::Free { unit },
            (23, 0) => Body::Done { unit },
            (23, 1) => Body::NoRoom,
            (23, 2) => Body::NotAllocated,
            (kind, _) => return undefined("kind of a message about a heap", kind.into()),
        };
        let message = Heap {
            region: le32(bytes, 4),
            ticket: le64(bytes, 8),
            body,
        };
        match message.emit() == bytes {
            true => Ok(message),
            false => undefined("reserved bytes of a message about a heap", bytes[0].into()),
        }
    }

    /// Writes the message.
    pub fn emit(&self) -> [u8; MESSAGE_LEN] {
        let (kind, outcome, units, unit) = match self.body {
            Body::Allocate { units } => (21, 0, units, 0),
            Body::Free { unit } => (22, 0, 0, unit),
            Body::Done { unit } => (23, 0, 0, unit),
            Body::NoRoom => (23, 1, 0, 0),
            Body::NotAllocated => (23, 2, 0, 0),
        };
        let mut bytes = [0; MESSAGE_LEN];
        bytes[..2].copy_from_slice(&[kind, outcome]);
        put(&mut bytes, 4, &self.region.to_le_bytes());
        put(&mut bytes, 8, &self.ticket.to_le_bytes());
        put(&mut bytes, 16, &units.to_le_bytes());
        put(&mut bytes, 24, &unit.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> impl Iterator<Item = Heap> {
        let (units, unit) = (0x0102_0304_0506_0708, 0x1112_1314_1516_1718);
        let bodies = [
            Body::Allocate { units },
            Body::Free { unit },
            Body::Done { unit },
            Body::NoRoom,
            Body::NotAllocated,
        ];
        bodies.into_iter().map(|body| Heap {
            region: 0x2122_2324,
            ticket: 0x3132_3334_3536_3738,
            body,
        })
    }

    #[test]
    fn heap__is_read_as_it_was_written() {
        for message in messages() {
            let bytes = message.emit();
            assert!(Heap::has_kind(bytes[0]));
            assert_eq!(Heap::parse(&bytes), Ok(message));
        }
    }

    #[test]
    fn heap__has_one_way_to_be_written() {
        for message in messages() {
            for at in 0..MESSAGE_LEN {
                for value in 0..=u8::MAX {
                    let mut changed = message.emit();
                    changed[at] = value;
                    if let Ok(message) = Heap::parse(&changed) {
                        assert_eq!(message.emit(), changed);
                    }
                }
            }
        }
    }

    #[test]
    fn heap__of_another_length_is_refused() {
        let bytes = messages().next().unwrap().emit();
        assert!(Heap::parse(&bytes[1..]).is_err());
        assert!(Heap::parse(&[&bytes[..], &[0]].concat()).is_err());
    }
}
