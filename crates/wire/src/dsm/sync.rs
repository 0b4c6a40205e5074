//! Messages of the synchronisation of a shared memory: locks, barriers, reductions, conditions and words.
//!
//! Each *object* has a number and a *home*, the node that decides about it. Messages go between the home and the node of a *thread*, which waits
//! for at most one answer at a time: so its number tells which request an answer belongs to. They have [`MESSAGE_LEN`] bytes, as the messages of
//! the [units](super) have, and kinds of their own, so that both may share a connection. Each sort has sequence numbers of its own. Numbers are
//! little-endian.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | kind |
//! | 1 | mode of kinds 32 and 33, operation of kind 34 (0 if it is a barrier), cause of kind 44; otherwise 0 |
//! | 2..4 | thread, among those of its node |
//! | 4..8 | region |
//! | 8..16 | epoch of the membership at the sender |
//! | 16..24 | sequence: number of messages of this sort from this sender to this receiver before this one |
//! | 24..32 | value, of kinds 34 (0 if it is a barrier), 38, 39 and 40; otherwise 0 |
//! | 32..40 | object |
//! | 40..44 | parties of kind 34; a node plus 1, of kinds 41, 43 (0 if there is none) and 44 (0 if the cause is no node); otherwise 0 |
//! | 44..48 | 0 |
//! | 40..48 | of kind 39: the value that is expected |
//!
//! | kind | from | meaning |
//! |---|---|---|
//! | 32 Lock | node | the thread wants the lock; the answer is Granted |
//! | 33 Unlock | node | the thread gives the lock back; the answer is Done |
//! | 34 Gather | node | the thread has come to a barrier or a reduction; the answer is Done with the result, when all have come |
//! | 35 Wait | node | the thread waits for the condition; the answers are Queued, and Woken when it is signalled |
//! | 36 Signal | node | wake the thread that has waited longest; the answer is Done |
//! | 37 Broadcast | node | wake all threads that wait; the answer is Done |
//! | 38 FetchAdd | node | add the value to the word; the answer is Done with the value before |
//! | 39 CompareSwap | node | set the word to the value if it is as expected; the answer is Done with the value before |
//! | 40 Done | home | the request has been carried out |
//! | 41 Granted | home | the thread has the lock; the node left while it had the lock for itself |
//! | 42 Queued | home | the thread waits for the condition |
//! | 43 Woken | home | the condition was signalled, or the node has left |
//! | 44 Refused | home | the request was not carried out |
//!
//! Bytes 44..48 of Unlock, Gather, Done and Granted have room for a number of write notices, which release consistency needs with them.

use std::num::NonZeroU32;

use strum::VariantArray;

use super::{MESSAGE_LEN, NodeId, undefined};
use crate::Malformed;
use crate::bytes::{le16, le32, le64, need, put};

/// The first kind of these messages. Those of units have kinds below.
pub const KIND_FIRST: u8 = 32;

/// Use of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, VariantArray)]
#[repr(u8)]
pub enum Mode {
    /// Together with others of this mode.
    Shared = 1,
    /// Alone.
    Exclusive = 2,
}

/// Operation of a reduction on values of 64 bits.
///
/// Integers wrap. The minimum and the maximum of floating-point numbers are those of IEEE 754-2019, 9.6: -0 is below +0, and any NaN gives NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, VariantArray)]
#[repr(u8)]
pub enum Operation {
    /// Sum of `i64`.
    SumI64 = 1,
    /// Minimum of `i64`.
    MinI64 = 2,
    /// Maximum of `i64`.
    MaxI64 = 3,
    /// Sum of `u64`.
    SumU64 = 4,
    /// Minimum of `u64`.
    MinU64 = 5,
    /// Maximum of `u64`.
    MaxU64 = 6,
    /// Sum of `f64`.
    SumF64 = 7,
    /// Minimum of `f64`.
    MinF64 = 8,
    /// Maximum of `f64`.
    MaxF64 = 9,
}

/// Cause for which a home does not carry out a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Refusal {
    /// A node has left without which the request cannot end.
    Gone(NodeId),
    /// Parties of a barrier or a reduction do not agree.
    Mismatch,
    /// The node uses too many objects of this home.
    NoRoom,
}

/// Kind of a message, with its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Body {
    /// The thread wants the lock.
    Lock(Mode),
    /// The thread gives the lock back.
    Unlock(Mode),
    /// The thread has come to a barrier or a reduction.
    Gather {
        /// Operation of a reduction; `None` for a barrier.
        operation: Option<Operation>,
        /// Threads that have to come.
        parties: NonZeroU32,
        /// The thread's part of a reduction; 0 for a barrier.
        value: u64,
    },
    /// The thread waits for the condition.
    Wait,
    /// Wake the thread that has waited longest.
    Signal,
    /// Wake all threads that wait.
    Broadcast,
    /// Add to the word.
    FetchAdd(u64),
    /// Set the word to a value if it has another one.
    CompareSwap {
        /// The value that the word must have.
        expected: u64,
        /// The value that it gets.
        new: u64,
    },
    /// The request has been carried out, with this result; 0 if there is none.
    Done(u64),
    /// The thread has the lock.
    Granted {
        /// Node that left while it had the lock for itself.
        recovered: Option<NodeId>,
    },
    /// The thread waits for the condition.
    Queued,
    /// The wait for the condition has ended.
    Woken {
        /// Node that has left; `None` if the condition was signalled.
        gone: Option<NodeId>,
    },
    /// The request was not carried out.
    Refused(Refusal),
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// Region.
    pub region: u32,
    /// Epoch of the membership that the sender knew.
    pub epoch: u64,
    /// Messages of synchronisation from this sender to this receiver before this one.
    pub sequence: u64,
    /// Number of the thread that asks, at its node.
    pub thread: u16,
    /// Object.
    pub object: u64,
    /// Kind and content.
    pub body: Body,
}

/// The fields of a message that depend on its kind.
#[derive(PartialEq)]
struct Fields {
    kind: u8,
    code: u8,
    value: u64,
    extra: u64,
}

impl Message {
    /// Reads a message.
    ///
    /// # Errors
    /// Another length than [`MESSAGE_LEN`], an undefined kind, a field that the kind cannot have, or reserved bytes that are not 0.
    pub fn parse(bytes: &[u8]) -> Result<Message, Malformed> {
        need("message of a shared memory", bytes, MESSAGE_LEN)?;
        if bytes.len() > MESSAGE_LEN {
            return undefined("length of a message", bytes.len() as u64);
        }
        let fields = Fields {
            kind: bytes[0],
            code: bytes[1],
            value: le64(bytes, 24),
            extra: le64(bytes, 40),
        };
        Ok(Message {
            region: le32(bytes, 4),
            epoch: le64(bytes, 8),
            sequence: le64(bytes, 16),
            thread: le16(bytes, 2),
            object: le64(bytes, 32),
            body: Body::parse(&fields)?,
        })
    }

    /// Writes the message.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_LEN]) {
        let fields = self.body.fields();
        bytes[0] = fields.kind;
        bytes[1] = fields.code;
        put(bytes, 2, &self.thread.to_le_bytes());
        put(bytes, 4, &self.region.to_le_bytes());
        put(bytes, 8, &self.epoch.to_le_bytes());
        put(bytes, 16, &self.sequence.to_le_bytes());
        put(bytes, 24, &fields.value.to_le_bytes());
        put(bytes, 32, &self.object.to_le_bytes());
        put(bytes, 40, &fields.extra.to_le_bytes());
    }
}

impl Body {
    fn parse(fields: &Fields) -> Result<Body, Malformed> {
        let Fields {
            kind,
            code,
            value,
            extra,
        } = *fields;
        let body = match kind {
            32 => mode(code).map(Body::Lock),
            33 => mode(code).map(Body::Unlock),
            34 => gather(code, value, extra),
            35 => Some(Body::Wait),
            36 => Some(Body::Signal),
            37 => Some(Body::Broadcast),
            38 => Some(Body::FetchAdd(value)),
            39 => Some(Body::CompareSwap {
                expected: extra,
                new: value,
            }),
            40 => Some(Body::Done(value)),
            41 => node(extra).map(|recovered| Body::Granted { recovered }),
            42 => Some(Body::Queued),
            43 => node(extra).map(|gone| Body::Woken { gone }),
            44 => refusal(code, extra).map(Body::Refused),
            _ => return undefined("kind of a message", kind.into()),
        };
        // Fields that a kind does not have are 0.
        let is_whole = |it: &Body| it.fields() == *fields;
        body.filter(is_whole).ok_or(Malformed::Undefined {
            what: "fields of a message of kind",
            value: kind.into(),
        })
    }

    fn fields(self) -> Fields {
        let (kind, code, value, extra) = match self {
            Body::Lock(mode) => (32, mode as u8, 0, 0),
            Body::Unlock(mode) => (33, mode as u8, 0, 0),
            Body::Gather {
                operation,
                parties,
                value,
            } => {
                let code = operation.map_or(0, |it| it as u8);
                (34, code, value, parties.get().into())
            }
            Body::Wait => (35, 0, 0, 0),
            Body::Signal => (36, 0, 0, 0),
            Body::Broadcast => (37, 0, 0, 0),
            Body::FetchAdd(value) => (38, 0, value, 0),
            Body::CompareSwap { expected, new } => (39, 0, new, expected),
            Body::Done(value) => (40, 0, value, 0),
            Body::Granted { recovered } => (41, 0, 0, node_field(recovered)),
            Body::Queued => (42, 0, 0, 0),
            Body::Woken { gone } => (43, 0, 0, node_field(gone)),
            Body::Refused(Refusal::Gone(node)) => (44, 1, 0, node_field(Some(node))),
            Body::Refused(Refusal::Mismatch) => (44, 2, 0, 0),
            Body::Refused(Refusal::NoRoom) => (44, 3, 0, 0),
        };
        Fields {
            kind,
            code,
            value,
            extra,
        }
    }
}

fn mode(code: u8) -> Option<Mode> {
    Mode::VARIANTS.iter().copied().find(|it| *it as u8 == code)
}

fn gather(code: u8, value: u64, extra: u64) -> Option<Body> {
    let operation = Operation::VARIANTS.iter().copied().find(|it| *it as u8 == code);
    let is_barrier = operation.is_none() && value == 0;
    let parties = NonZeroU32::new(u32::try_from(extra).ok()?)?;
    (operation.is_some() || is_barrier).then_some(Body::Gather {
        operation,
        parties,
        value,
    })
}

/// Reads a node plus 1, or none.
fn node(extra: u64) -> Option<Option<NodeId>> {
    Some(u32::try_from(extra).ok()?.checked_sub(1).map(NodeId))
}

fn node_field(node: Option<NodeId>) -> u64 {
    node.map_or(0, |it| u64::from(it.0) + 1)
}

fn refusal(code: u8, extra: u64) -> Option<Refusal> {
    match code {
        1 => node(extra)?.map(Refusal::Gone),
        2 => Some(Refusal::Mismatch),
        3 => Some(Refusal::NoRoom),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(0x0a0b_0c0d);

    fn bodies() -> Vec<Body> {
        let parties = NonZeroU32::new(0x1a1b_1c1d).unwrap();
        let gather = |operation, value| Body::Gather {
            operation,
            parties,
            value,
        };
        let modes = Mode::VARIANTS.iter();
        let locks = modes.flat_map(|it| [Body::Lock(*it), Body::Unlock(*it)]);
        let reductions = Operation::VARIANTS.iter().map(|it| gather(Some(*it), u64::MAX));
        let rest = [
            gather(None, 0),
            Body::Wait,
            Body::Signal,
            Body::Broadcast,
            Body::FetchAdd(u64::MAX),
            Body::CompareSwap {
                expected: 5,
                new: u64::MAX,
            },
            Body::Done(7),
            Body::Granted { recovered: None },
            Body::Granted {
                recovered: Some(NODE),
            },
            Body::Queued,
            Body::Woken { gone: None },
            Body::Woken { gone: Some(NODE) },
            Body::Refused(Refusal::Gone(NODE)),
            Body::Refused(Refusal::Mismatch),
            Body::Refused(Refusal::NoRoom),
        ];
        locks.chain(reductions).chain(rest).collect()
    }

    fn emitted(body: Body) -> (Message, [u8; MESSAGE_LEN]) {
        let message = Message {
            region: 0x0102_0304,
            epoch: 0x1112_1314_1516_1718,
            sequence: u64::MAX,
            thread: 0x4142,
            object: 0x3132_3334_3536_3738,
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
            39, 0, 0x42, 0x41, 4, 3, 2, 1, 0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
            0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,
            0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, 0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51,
        ];
        let body = Body::CompareSwap {
            expected: 0x5152_5354_5556_5758,
            new: 0x2122_2324_2526_2728,
        };
        assert_eq!(emitted(body).1, expected);
    }

    #[test]
    fn message__is_read_as_it_was_written() {
        for body in bodies() {
            let (message, bytes) = emitted(body);
            assert_eq!(Message::parse(&bytes), Ok(message));
            assert!(bytes[0] >= KIND_FIRST);
        }
    }

    #[test]
    fn message__of_units_is_none_of_these() {
        let mut bytes = emitted(Body::Queued).1;
        for kind in 0..KIND_FIRST {
            bytes[0] = kind;
            assert!(Message::parse(&bytes).is_err());
        }
        assert!(super::super::Message::parse(&emitted(Body::Queued).1).is_err());
    }

    #[test]
    fn message__of_another_length_is_refused() {
        let (_, bytes) = emitted(Body::Queued);
        assert!(Message::parse(&bytes[1..]).is_err());
        assert!(Message::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    /// Tries all values of each byte that does not hold a plain number: what is read is written again as it was.
    #[test]
    fn message__has_one_way_to_be_written() {
        for body in bodies() {
            let (_, bytes) = emitted(body);
            for at in [0, 1].into_iter().chain(24..32).chain(40..MESSAGE_LEN) {
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
