//! Joining: how two nodes learn who they are when they connect, and how all nodes agree on a region.
//!
//! A node connects to each one of a lower number, with a [`Hello`] as private data of the REQ, which the other answers with its own in the REP.
//! Little-endian:
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | `RDMUXDSM` |
//! | 8..10 | version |
//! | 10..12 | 0 in this version; otherwise it is no greeting |
//! | 12..16 | number of the sender |
//! | 16..20 | number of nodes |
//! | 20..24 | bytes of a page |
//! | 24..40 | session: the same for all nodes, and for no others |
//! | 40..44 | ring: the R_Key by which the receiver writes its [frames](super::frame); they begin at address 0 |
//!
//! A region is made by all nodes, in the same order. Node 0 maps it and sends Propose; each node maps it at that address and sends Mapped to all,
//! or Taken. When node 0 has all answers, it tries another address if this one is in use at any node, or sends Agreed to all; who has that and the
//! Mapped of all others may use the region. Nodes that have all answers wait for its word for a limited time. These messages have [`MESSAGE_LEN`] bytes as well:
//!
//! | bytes | field |
//! |---|---|
//! | 0 | kind |
//! | 1..4 | 0 |
//! | 4..8 | region |
//! | 8..12 | attempt: Propose messages of the region before |
//! | 12..16 | key: of Mapped, the R_Key by which the sender's frames are read; otherwise 0 |
//! | 16..24 | address: of Propose; otherwise 0 |
//! | 24..32 | pages: of Propose; otherwise 0 |
//! | 32..40 | digest: of Propose, a checksum of the region's other settings; otherwise 0 |
//! | 40..44 | shadow: of Mapped in a region with release consistency, the R_Key by which the sender's twins and log are read; otherwise 0 |
//! | 44..48 | 0 |
//!
//! | kind | from | meaning |
//! |---|---|---|
//! | 16 Propose | node 0 | map the region at the address |
//! | 17 Mapped | each node, to all | it is mapped |
//! | 18 Taken | each node but node 0, to all | the address is in use there |
//! | 19 Differs | a node, to all | it cannot make the region, or its program wants one of other settings |
//! | 20 Agreed | node 0 | all have mapped it |

use super::{MESSAGE_LEN, undefined};
use crate::Malformed;
use crate::bytes::{le16, le32, le64, need, put};

/// Bytes of a [`Hello`].
pub const HELLO_LEN: usize = 44;

/// Version of the messages of the shared memory.
pub const VERSION: u16 = 6;

const MAGIC: &[u8; 8] = b"RDMUXDSM";

/// The greeting of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Version of the sender.
    pub version: u16,
    /// Number of the sender.
    pub node: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Bytes of a page of memory.
    pub page_bytes: u32,
    /// Session: all nodes have the same.
    pub session: [u8; 16],
    /// R_Key of the ring that the receiver writes; 0 in an answer that refuses.
    pub ring: u32,
}

impl Hello {
    /// Reads a greeting. Private data of a connection may be followed by zeros.
    ///
    /// # Errors
    /// It is no greeting of a node.
    pub fn parse(bytes: &[u8]) -> Result<Hello, Malformed> {
        need("greeting of a node", bytes, HELLO_LEN)?;
        if &bytes[..8] != MAGIC {
            return undefined("magic of a greeting", le64(bytes, 0));
        }
        // Other versions may use them.
        let (version, reserved) = (le16(bytes, 8), le16(bytes, 10));
        if version == VERSION && reserved != 0 {
            return undefined("reserved bytes of a greeting", reserved.into());
        }
        Ok(Hello {
            version,
            node: le32(bytes, 12),
            nodes: le32(bytes, 16),
            page_bytes: le32(bytes, 20),
            session: *bytes[24..].first_chunk().unwrap_or(&[0; 16]),
            ring: le32(bytes, 40),
        })
    }

    /// Writes the greeting.
    pub fn emit(&self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, 8, &self.version.to_le_bytes());
        put(&mut bytes, 12, &self.node.to_le_bytes());
        put(&mut bytes, 16, &self.nodes.to_le_bytes());
        put(&mut bytes, 20, &self.page_bytes.to_le_bytes());
        put(&mut bytes, 24, &self.session);
        put(&mut bytes, 40, &self.ring.to_le_bytes());
        bytes
    }
}

/// A message about a region that is being made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joining {
    /// Region.
    pub region: u32,
    /// Propose messages of the region before.
    pub attempt: u32,
    /// Kind and content.
    pub step: Step,
}

/// Kind of a [`Joining`], with its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Map the region.
    Propose {
        /// Address of its view.
        address: u64,
        /// Its pages.
        pages: u64,
        /// Checksum of its other settings.
        digest: u64,
    },
    /// The sender has mapped it.
    Mapped {
        /// R_Key by which the sender's frames are read; they begin at address 0.
        key: u32,
        /// R_Key by which the sender's twins and log are read; 0 if there are none.
        shadow: u32,
    },
    /// The address is in use at the sender.
    Taken,
    /// The sender cannot make the region, or its program wants one of other settings.
    Differs,
    /// All have mapped it.
    Agreed,
}

impl Joining {
    /// Returns whether a message of this kind is about joining.
    pub fn has_kind(kind: u8) -> bool {
        (16..=20).contains(&kind)
    }

    /// Reads a message.
    ///
    /// # Errors
    /// Another length than [`MESSAGE_LEN`], an undefined kind, or bytes that are not 0 where the kind has no field.
    pub fn parse(bytes: &[u8]) -> Result<Joining, Malformed> {
        need("message about a region", bytes, MESSAGE_LEN)?;
        let message = Joining {
            region: le32(bytes, 4),
            attempt: le32(bytes, 8),
            step: match bytes[0] {
                16 => Step::Propose {
                    address: le64(bytes, 16),
                    pages: le64(bytes, 24),
                    digest: le64(bytes, 32),
                },
                17 => Step::Mapped {
                    key: le32(bytes, 12),
                    shadow: le32(bytes, 40),
                },
                18 => Step::Taken,
                19 => Step::Differs,
                20 => Step::Agreed,
                kind => return undefined("kind of a message about a region", kind.into()),
            },
        };
        match message.emit() == bytes {
            true => Ok(message),
            false => undefined("reserved bytes of a message about a region", bytes[0].into()),
        }
    }

    /// Writes the message.
    pub fn emit(&self) -> [u8; MESSAGE_LEN] {
        let mut bytes = [0; MESSAGE_LEN];
        bytes[0] = match self.step {
            Step::Propose { .. } => 16,
            Step::Mapped { .. } => 17,
            Step::Taken => 18,
            Step::Differs => 19,
            Step::Agreed => 20,
        };
        put(&mut bytes, 4, &self.region.to_le_bytes());
        put(&mut bytes, 8, &self.attempt.to_le_bytes());
        match self.step {
            Step::Propose {
                address,
                pages,
                digest,
            } => {
                put(&mut bytes, 16, &address.to_le_bytes());
                put(&mut bytes, 24, &pages.to_le_bytes());
                put(&mut bytes, 32, &digest.to_le_bytes());
            }
            Step::Mapped { key, shadow } => {
                put(&mut bytes, 12, &key.to_le_bytes());
                put(&mut bytes, 40, &shadow.to_le_bytes());
            }
            Step::Taken | Step::Differs | Step::Agreed => {}
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEPS: [Step; 5] = [
        Step::Propose {
            address: 0x0102_0304_0506_0708,
            pages: 0x1112_1314_1516_1718,
            digest: 0x2122_2324_2526_2728,
        },
        Step::Mapped {
            key: 0x3132_3334,
            shadow: 0x4142_4344,
        },
        Step::Taken,
        Step::Differs,
        Step::Agreed,
    ];

    fn emitted(step: Step) -> (Joining, [u8; MESSAGE_LEN]) {
        let message = Joining {
            region: 0x0a0b_0c0d,
            attempt: 0x1a1b_1c1d,
            step,
        };
        (message, message.emit())
    }

    #[test]
    fn joining__is_read_as_it_was_written() {
        for step in STEPS {
            let (message, bytes) = emitted(step);
            assert!(Joining::has_kind(bytes[0]));
            assert_eq!(Joining::parse(&bytes), Ok(message));
        }
    }

    #[test]
    fn joining__has_one_way_to_be_written() {
        for step in STEPS {
            let (_, bytes) = emitted(step);
            for at in 0..MESSAGE_LEN {
                for value in 0..=u8::MAX {
                    let mut changed = bytes;
                    changed[at] = value;
                    if let Ok(message) = Joining::parse(&changed) {
                        assert_eq!(message.emit(), changed);
                    }
                }
            }
        }
    }

    #[test]
    fn joining__of_another_length_is_refused() {
        let (_, bytes) = emitted(Step::Agreed);
        assert!(Joining::parse(&bytes[1..]).is_err());
        assert!(Joining::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    const HELLO: Hello = Hello {
        version: 0x0102,
        node: 0x0304_0506,
        nodes: 0x0708_090a,
        page_bytes: 0x0b0c_0d0e,
        session: *b"sixteen bytes...",
        ring: 0x1112_1314,
    };

    #[test]
    fn hello__is_read_as_it_was_written_with_zeros_behind() {
        let bytes = [&HELLO.emit()[..], &[0; 12]].concat();
        assert_eq!(Hello::parse(&bytes), Ok(HELLO));
        assert!(Hello::parse(&bytes[..HELLO_LEN - 1]).is_err());
        assert!(Hello::parse(&[0; 56]).is_err());
    }

    /// Tries all values of each byte: one of the magic makes it no greeting, so does a reserved one, and any other one is written again. Reserved bytes
    /// of another version are not read.
    #[test]
    fn hello__with_another_byte_is_another_one_or_none() {
        for version in [VERSION, VERSION + 1] {
            with_another_byte(Hello { version, ..HELLO });
        }
    }

    fn with_another_byte(first: Hello) {
        let bytes = first.emit();
        for (at, byte) in bytes.into_iter().enumerate() {
            for value in (0..=u8::MAX).filter(|it| *it != byte) {
                let mut changed = bytes;
                changed[at] = value;
                let hello = Hello::parse(&changed);
                match at {
                    0..8 => assert!(hello.is_err(), "byte {at}"),
                    10..12 if first.version == VERSION => assert!(hello.is_err(), "byte {at}"),
                    10..12 => assert_eq!(hello, Ok(first)),
                    _ => assert_eq!(hello.map(|it| it.emit()), Ok(changed)),
                }
            }
        }
    }
}
