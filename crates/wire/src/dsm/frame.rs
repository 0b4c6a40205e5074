//! Frames: one SEND between two nodes each, with at most one message and the news of how many frames were handled.
//!
//! | bytes | field |
//! |---|---|
//! | 0..48 | message; all 0 if there is none |
//! | 48..52 | frames of the receiver that the sender has handled so far, modulo 2^32 |
//! | 52..64 | 0 |

use super::MESSAGE_LEN;
use crate::Malformed;
use crate::bytes::{le32, need};

/// Bytes of a frame.
pub const FRAME_LEN: usize = 64;

/// A frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The message, as it was written; its first byte is not 0.
    pub message: Option<[u8; MESSAGE_LEN]>,
    /// Frames of the receiver that the sender has handled so far, modulo 2^32.
    pub handled: u32,
}

impl Frame {
    /// Reads a frame. The message is not read.
    ///
    /// # Errors
    /// Another length than [`FRAME_LEN`], or reserved bytes that are not 0.
    pub fn parse(bytes: &[u8]) -> Result<Frame, Malformed> {
        need("frame of a shared memory", bytes, FRAME_LEN)?;
        let (message, rest) = bytes.split_at(MESSAGE_LEN);
        let message: [u8; MESSAGE_LEN] = message.try_into().unwrap_or([0; MESSAGE_LEN]);
        let is_empty = message[0] == 0;
        let reserved = rest[4..].iter().chain(message.iter().filter(|_| is_empty));
        if let Some(&value) = { reserved }.find(|byte| **byte != 0) {
            let what = "reserved bytes of a frame";
            let value = value.into();
            return Err(Malformed::Undefined { what, value });
        }
        if bytes.len() > FRAME_LEN {
            let what = "length of a frame";
            let value = bytes.len() as u64;
            return Err(Malformed::Undefined { what, value });
        }
        Ok(Frame {
            message: (!is_empty).then_some(message),
            handled: le32(rest, 0),
        })
    }

    /// Writes the frame.
    pub fn emit(&self) -> [u8; FRAME_LEN] {
        let mut bytes = [0; FRAME_LEN];
        if let Some(message) = &self.message {
            bytes[..MESSAGE_LEN].copy_from_slice(message);
        }
        bytes[MESSAGE_LEN..MESSAGE_LEN + 4].copy_from_slice(&self.handled.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame__is_read_as_it_was_written() {
        let mut message = [7; MESSAGE_LEN];
        for message in [None, Some(message), {
            message[1..].fill(0);
            Some(message)
        }] {
            let handled = 0x0102_0304;
            let frame = Frame { message, handled };
            assert_eq!(Frame::parse(&frame.emit()), Ok(frame));
        }
    }

    #[test]
    fn frame__has_one_way_to_be_written() {
        let handled = 0;
        let frames = [None, Some([1; MESSAGE_LEN])].map(|message| Frame { message, handled }.emit());
        for bytes in frames {
            for at in 0..FRAME_LEN {
                for value in 0..=u8::MAX {
                    let mut changed = bytes;
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
        let handled = 0;
        let message = None;
        let bytes = Frame { message, handled }.emit();
        assert!(Frame::parse(&bytes[1..]).is_err());
        assert!(Frame::parse(&[&bytes[..], &[0]].concat()).is_err());
    }
}
