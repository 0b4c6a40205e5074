//! Messages of the distributed shared memory: how the nodes of a region agree on who may access which unit.
//!
//! A *unit* is what nodes share as a whole: a page, or a group of pages. Each unit has a *home*, the node that decides about it. Messages go
//! between the home, or the node that knows it (the *registrar*), and another node, but for one that goes to all; the contents of a unit travel as
//! RDMA READ, and have no message. Each message has [`MESSAGE_LEN`] bytes. Numbers are little-endian. [`frame`] has what a message is sent in, and [`joining`] the
//! messages before any of these.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | kind; 0 is none |
//! | 1 | right, of kinds 1, 2 and 4; otherwise 0 |
//! | 2..4 | 0 |
//! | 4..8 | region |
//! | 8..16 | epoch of the membership at the sender |
//! | 16..24 | sequence: number of messages from this sender to this receiver before this one |
//! | 24..32 | request: the number that the node which asks has given to its Ask; all messages that it causes repeat it; of kind 12 0 |
//! | 32..40 | unit; of kinds 10 and 11 the first one, of kind 12 0 |
//! | 40..44 | a node plus 1, of kind 4 (0 if there is none), 7 and 9; otherwise 0 |
//! | 44..48 | number of units in a row, of kinds 10 and 11, not 0; otherwise 0 |
//!
//! | kind | from | meaning |
//! |---|---|---|
//! | 1 Ask | node | it wants the right |
//! | 2 Recall | home | keep at most the right, then answer Yielded |
//! | 3 Yielded | node | the answer to Recall |
//! | 4 Grant | home | read the unit from the node, if one is named, then take the right and answer Installed, or Failed |
//! | 5 Installed | node | the answer to Grant: it has the right |
//! | 6 Failed | node | the answer to Grant: the unit could not be read from the node |
//! | 7 Refuse | home | the unit was lost with the node |
//! | 8 Locate | node | it wants to know the home, and to be it if there is none (to the unit's registrar, of regions with homes by first touch) |
//! | 9 Home | registrar | the answer to Locate: the node is the home |
//! | 10 Flush | node | read what it has written of the units, and answer Flushed (of regions with release consistency) |
//! | 11 Flushed | home | the answer to Flush: who reads the units from the home has the receiver's writes |
//! | 12 Settled | each node, to all | the sender stores no more from nodes that are gone by the message's epoch |
//!
//! Regions with release consistency have kinds 10 to 12 and no other ones. [`notice`] has what their nodes read from each other besides contents.
//!
//! [`heap`] has kinds 21 to 23, and [`sync`] those from 32 on; their messages are as long.

pub mod sync;

pub mod frame;
pub mod heap;
pub mod joining;
pub mod membership;
pub mod notice;

use strum::VariantArray;

use crate::Malformed;
use crate::bytes::{le16, le32, le64, need, put};

/// Bytes of a message.
pub const MESSAGE_LEN: usize = 48;

/// A node of a region. A node that has left never comes back under its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    /// Node 0, which offers the addresses of regions.
    pub const FIRST: NodeId = NodeId(0);

    /// Returns the node of a number below 2^32 - 1.
    pub const fn new(number: u32) -> Option<NodeId> {
        match number {
            u32::MAX => None,
            _ => Some(NodeId(number)),
        }
    }

    /// Returns the number.
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// Permission of a node to use its copy of a unit. Greater rights include smaller ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, VariantArray)]
#[repr(u8)]
pub enum Right {
    /// Nothing.
    #[default]
    Invalid = 0,
    /// Read, as other nodes may.
    Shared = 1,
    /// Read and write; no other node has a right.
    Exclusive = 2,
}

/// Kind of a message, with its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Body {
    /// The sender wants this right, which is not [`Right::Invalid`].
    Ask(Right),
    /// The receiver must keep at most this right, which is not [`Right::Exclusive`], and answer [`Body::Yielded`].
    Recall(Right),
    /// The sender has at most the right of the [`Body::Recall`].
    Yielded,
    /// The receiver gets a right, once it has the contents.
    Grant {
        /// The right, which is not [`Right::Invalid`].
        right: Right,
        /// Node from whose memory the receiver reads the contents; `None` if it has them.
        source: Option<NodeId>,
    },
    /// The sender has the right of the [`Body::Grant`].
    Installed,
    /// The sender could not read the contents from the source of the [`Body::Grant`].
    Failed,
    /// The contents were lost with this node.
    Refuse(NodeId),
    /// The sender wants to know the unit's home, and is it from now on if there is none.
    Locate,
    /// The unit's home is this node.
    Home(NodeId),
    /// The receiver must read from the sender what that has written of some units, the message's and those behind it, and answer [`Body::Flushed`].
    Flush {
        /// Number of the units, not 0.
        units: u32,
    },
    /// The receiver's writes of the [`Body::Flush`] are in the sender's memory.
    Flushed {
        /// Number of the units, as in the [`Body::Flush`].
        units: u32,
    },
    /// The sender has heard of the message's epoch, and stores no more of what nodes have written that are gone by then.
    Settled,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// Region.
    pub region: u32,
    /// Epoch of the membership that the sender knew.
    pub epoch: u64,
    /// Messages from this sender to this receiver before this one.
    pub sequence: u64,
    /// Number of the request which the message belongs to, at the node that asked.
    pub request: u64,
    /// Unit of the region, the first one if the message is about several.
    pub unit: u64,
    /// Kind and content.
    pub body: Body,
}

impl Message {
    /// Reads a message.
    ///
    /// # Errors
    /// Another length than [`MESSAGE_LEN`], an undefined kind, a right, a node, a number of units, a request or a unit that the kind cannot have, or
    /// reserved bytes that are not 0.
    pub fn parse(bytes: &[u8]) -> Result<Message, Malformed> {
        need("message of a shared memory", bytes, MESSAGE_LEN)?;
        if bytes.len() > MESSAGE_LEN {
            return undefined("length of a message", bytes.len() as u64);
        }
        let reserved = le16(bytes, 2);
        if reserved != 0 {
            return undefined("reserved bytes of a message", reserved.into());
        }
        let message = Message {
            region: le32(bytes, 4),
            epoch: le64(bytes, 8),
            sequence: le64(bytes, 16),
            request: le64(bytes, 24),
            unit: le64(bytes, 32),
            body: Body::parse(bytes[0], bytes[1], le32(bytes, 40), le32(bytes, 44))?,
        };
        let number = message.request | message.unit;
        match message.body {
            Body::Settled if number != 0 => undefined("request or unit of a message about none", number),
            _ => Ok(message),
        }
    }

    /// Writes the message.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_LEN]) {
        let (kind, right, node) = self.body.fields();
        let units = match self.body {
            Body::Flush { units } | Body::Flushed { units } => units,
            _ => 0,
        };
        bytes.fill(0);
        bytes[0] = kind;
        bytes[1] = right as u8;
        put(bytes, 4, &self.region.to_le_bytes());
        put(bytes, 8, &self.epoch.to_le_bytes());
        put(bytes, 16, &self.sequence.to_le_bytes());
        put(bytes, 24, &self.request.to_le_bytes());
        put(bytes, 32, &self.unit.to_le_bytes());
        put(bytes, 40, &node.map_or(0, |node| node.0 + 1).to_le_bytes());
        put(bytes, 44, &units.to_le_bytes());
    }
}

impl Body {
    fn parse(kind: u8, right: u8, node: u32, units: u32) -> Result<Body, Malformed> {
        let Some(&right) = Right::VARIANTS.iter().find(|it| **it as u8 == right) else {
            return undefined("right of a message", right.into());
        };
        let node = node.checked_sub(1).map(NodeId);
        let body = match (kind, right, node, units) {
            (1, Right::Shared | Right::Exclusive, None, 0) => Body::Ask(right),
            (2, Right::Invalid | Right::Shared, None, 0) => Body::Recall(right),
            (3, Right::Invalid, None, 0) => Body::Yielded,
            (4, Right::Shared | Right::Exclusive, source, 0) => Body::Grant { right, source },
            (5, Right::Invalid, None, 0) => Body::Installed,
            (6, Right::Invalid, None, 0) => Body::Failed,
            (7, Right::Invalid, Some(node), 0) => Body::Refuse(node),
            (8, Right::Invalid, None, 0) => Body::Locate,
            (9, Right::Invalid, Some(node), 0) => Body::Home(node),
            (10, Right::Invalid, None, 1..) => Body::Flush { units },
            (11, Right::Invalid, None, 1..) => Body::Flushed { units },
            (12, Right::Invalid, None, 0) => Body::Settled,
            _ => return undefined("kind, right, node and units of a message", kind.into()),
        };
        Ok(body)
    }

    fn fields(self) -> (u8, Right, Option<NodeId>) {
        match self {
            Body::Ask(right) => (1, right, None),
            Body::Recall(right) => (2, right, None),
            Body::Yielded => (3, Right::Invalid, None),
            Body::Grant { right, source } => (4, right, source),
            Body::Installed => (5, Right::Invalid, None),
            Body::Failed => (6, Right::Invalid, None),
            Body::Refuse(node) => (7, Right::Invalid, Some(node)),
            Body::Locate => (8, Right::Invalid, None),
            Body::Home(node) => (9, Right::Invalid, Some(node)),
            Body::Flush { .. } => (10, Right::Invalid, None),
            Body::Flushed { .. } => (11, Right::Invalid, None),
            Body::Settled => (12, Right::Invalid, None),
        }
    }
}

fn undefined<T>(what: &'static str, value: u64) -> Result<T, Malformed> {
    Err(Malformed::Undefined { what, value })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(0x0a0b_0c0d);

    const BODIES: [Body; 18] = [
        Body::Ask(Right::Shared),
        Body::Ask(Right::Exclusive),
        Body::Recall(Right::Invalid),
        Body::Recall(Right::Shared),
        Body::Yielded,
        grant(Right::Shared, None),
        grant(Right::Shared, Some(NODE)),
        grant(Right::Exclusive, None),
        grant(Right::Exclusive, Some(NODE)),
        Body::Installed,
        Body::Failed,
        Body::Refuse(NODE),
        Body::Locate,
        Body::Home(NODE),
        Body::Flush { units: 1 },
        Body::Flush { units: 0x4142_4344 },
        Body::Flushed { units: u32::MAX },
        Body::Settled,
    ];

    const fn grant(right: Right, source: Option<NodeId>) -> Body {
        Body::Grant { right, source }
    }

    fn emitted(body: Body) -> (Message, [u8; MESSAGE_LEN]) {
        let is_about = u64::from(body != Body::Settled);
        let message = Message {
            region: 0x0102_0304,
            epoch: 0x1112_1314_1516_1718,
            sequence: u64::MAX,
            request: is_about * 0x2122_2324_2526_2728,
            unit: is_about * 0x3132_3334_3536_3738,
            body,
        };
        let mut bytes = [0xee; MESSAGE_LEN];
        message.emit(&mut bytes);
        (message, bytes)
    }

    #[test]
    fn message__bytes() {
        #[rustfmt::skip]
        let expected = [
            4, 2, 0, 0, 4, 3, 2, 1, 0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
            0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,
            0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, 0x0e, 0x0c, 0x0b, 0x0a, 0, 0, 0, 0,
        ];
        assert_eq!(emitted(grant(Right::Exclusive, Some(NODE))).1, expected);
        let flush = emitted(Body::Flush { units: 0x4142_4344 }).1;
        assert_eq!(flush[..4], [10, 0, 0, 0]);
        assert_eq!(flush[40..], [0, 0, 0, 0, 0x44, 0x43, 0x42, 0x41]);
    }

    #[test]
    fn message__is_read_as_it_was_written() {
        for body in BODIES {
            let (message, bytes) = emitted(body);
            assert_eq!(Message::parse(&bytes), Ok(message));
        }
    }

    #[test]
    fn message__of_another_length_is_refused() {
        let (_, bytes) = emitted(Body::Yielded);
        assert!(Message::parse(&bytes[1..]).is_err());
        assert!(Message::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn message__with_reserved_bytes_is_refused_with_their_value() {
        let (_, mut bytes) = emitted(Body::Yielded);
        bytes[2] = 9;
        let (what, value) = ("reserved bytes of a message", 9);
        assert_eq!(Message::parse(&bytes), Err(Malformed::Undefined { what, value }));
    }

    #[test]
    fn message__has_units_if_it_is_about_a_flush_and_no_other_time() {
        for body in BODIES {
            let (message, mut bytes) = emitted(body);
            let units = le32(&bytes, 44);
            let is_flush = matches!(body, Body::Flush { .. } | Body::Flushed { .. });
            assert_eq!(units > 0, is_flush, "{message:?}");
            bytes[44..].copy_from_slice(&u32::from(!is_flush).to_le_bytes());
            assert!(Message::parse(&bytes).is_err(), "{message:?}");
        }
    }

    #[test]
    fn message__about_no_unit_has_no_unit_and_no_request() {
        let (_, bytes) = emitted(Body::Settled);
        for at in 24..40 {
            let mut changed = bytes;
            changed[at] = 1;
            assert!(Message::parse(&changed).is_err(), "byte {at}");
        }
    }

    /// Tries all values of each byte that does not hold a plain number: what is read is written again as it was.
    #[test]
    fn message__has_one_way_to_be_written() {
        for body in BODIES {
            let (_, bytes) = emitted(body);
            for at in (0..4).chain(40..MESSAGE_LEN) {
                for value in 0..=u8::MAX {
                    let mut changed = bytes;
                    changed[at] = value;
                    if let Ok(message) = Message::parse(&changed) {
                        let mut again = [0xee; MESSAGE_LEN];
                        message.emit(&mut again);
                        assert_eq!(again, changed);
                    }
                }
            }
        }
    }
}
