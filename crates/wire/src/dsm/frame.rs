//! Frames: 64 bytes in the receiver's ring, which the sender writes, with at most one message.
//!
//! A node has a *ring* of [`SLOTS`] frames for each other node, and behind it a word ([`SLEEPS_AT`]). Frame n, counted from 1, is in slot
//! (n - 1) % [`SLOTS`]; its count is written last, so a node that polls the ring sees whole frames. A slot is written again when its frame was
//! handled. A node that does not poll is woken by a *bell*, a SEND without bytes, behind a frame.
//!
//! A node that is about to sleep writes the next odd number, modulo 2^32, into the word of those that write its ring directly, without packets;
//! one that polls again and has no frame to send writes the next even one. These ring no bell for an even number, none for an odd one for which they have rung
//! one, and none for a number that a frame of the sleeper says it has woken from. For 0, and where a frame travels by packets, they always do.
//!
//! | bytes | field |
//! |---|---|
//! | 0..48 | message; all 0 if there is none |
//! | 48..52 | handled: frames of the receiver that the sender has handled so far, modulo 2^32 |
//! | 52..56 | sleeps: number that the sender wrote last into the receiver's word, modulo 2^32: it has woken since |
//! | 56 | 1 if the sender relies on its word and the frame before was written directly, otherwise 0 |
//! | 57..60 | 0 |
//! | 60..64 | count: frames up to this one, modulo 2^32 |

use super::{MESSAGE_LEN, undefined};
use crate::Malformed;
use crate::bytes::{le32, need, put};

/// Bytes of a frame.
pub const FRAME_LEN: usize = 64;

/// Frames of a ring.
pub const SLOTS: u32 = 64;

/// Offset of a ring's word, which has 4 bytes. All bytes of a ring's memory are 0 at first.
pub const SLEEPS_AT: usize = SLOTS as usize * FRAME_LEN;

/// Bytes of a ring's memory.
pub const RING_LEN: usize = SLEEPS_AT + FRAME_LEN;

/// A frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The message, as it was written; its first byte is not 0.
    pub message: Option<[u8; MESSAGE_LEN]>,
    /// Frames of the receiver that the sender has handled so far, modulo 2^32.
    pub handled: u32,
    /// Number that the sender wrote last into the receiver's word.
    pub sleeps: u32,
    /// The frame before was written directly.
    pub is_direct: bool,
    /// Frames up to this one, modulo 2^32.
    pub count: u32,
}

impl Frame {
    /// Reads a frame. The message is not read.
    ///
    /// # Errors
    /// Another length than [`FRAME_LEN`], an undefined flag, or reserved bytes that are not 0.
    pub fn parse(bytes: &[u8]) -> Result<Frame, Malformed> {
        need("frame of a shared memory", bytes, FRAME_LEN)?;
        let (message, rest) = bytes.split_at(MESSAGE_LEN);
        let message = message.try_into().unwrap_or([0; MESSAGE_LEN]);
        let frame = Frame {
            message: (message[0] != 0).then_some(message),
            handled: le32(rest, 0),
            sleeps: le32(rest, 4),
            is_direct: rest[8] == 1,
            count: le32(rest, 12),
        };
        match frame.emit() == bytes {
            true => Ok(frame),
            false => undefined("flag or reserved bytes of a frame", rest[8].into()),
        }
    }

    /// Writes the frame.
    pub fn emit(&self) -> [u8; FRAME_LEN] {
        let mut bytes = [0; FRAME_LEN];
        if let Some(message) = &self.message {
            put(&mut bytes, 0, message);
        }
        put(&mut bytes, 48, &self.handled.to_le_bytes());
        put(&mut bytes, 52, &self.sleeps.to_le_bytes());
        bytes[56] = self.is_direct.into();
        put(&mut bytes, 60, &self.count.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames() -> [Frame; 3] {
        let mut least = [0; MESSAGE_LEN];
        least[0] = 7;
        [None, Some([7; MESSAGE_LEN]), Some(least)].map(|message| Frame {
            message,
            handled: 0x0102_0304,
            sleeps: 0x1112_1314,
            is_direct: message.is_some(),
            count: 0x2122_2324,
        })
    }

    #[test]
    fn frame__is_read_as_it_was_written() {
        for frame in frames() {
            assert_eq!(Frame::parse(&frame.emit()), Ok(frame));
        }
    }

    #[test]
    fn frame__has_one_way_to_be_written() {
        for frame in frames() {
            for at in 0..FRAME_LEN {
                for value in 0..=u8::MAX {
                    let mut changed = frame.emit();
                    changed[at] = value;
                    if let Ok(frame) = Frame::parse(&changed) {
                        assert_eq!(frame.emit(), changed);
                    }
                }
            }
        }
    }

    #[test]
    fn frame__of_another_length_is_refused() {
        let bytes = frames()[0].emit();
        assert!(Frame::parse(&bytes[1..]).is_err());
        assert!(Frame::parse(&[&bytes[..], &[0]].concat()).is_err());
    }
}
