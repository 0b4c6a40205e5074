//! One end of a link, without I/O: the frames of both rings, and the rules by which a node wakes its peer.
//!
//! A node that has written a frame directly looks at the word of the reader; a reader that is about to sleep writes its word, and then looks at its ring
//! once more. A `SeqCst` fence stands between the two steps on both sides, so at least one of them sees the other: either the bell rings, or the
//! reader finds the frame. A reader that polls again, and has nothing to send, writes its word once more.

use std::sync::atomic::Ordering;

use rdmux_wire::dsm::MESSAGE_LEN;
use rdmux_wire::dsm::frame::{FRAME_LEN, Frame};

use super::LinkError;
use crate::window::{Slot, Window};

/// The ring that the peer writes, with the peer's word behind it. Tests implement it with other memory.
pub(super) trait Ring {
    /// Loads the count of the frame in a slot, which the peer writes last.
    fn count(&self, slot: u32, order: Ordering) -> u32;
    /// Loads the frame in a slot.
    fn frame(&self, slot: u32) -> [u8; FRAME_LEN];
    /// Loads the word that tells of the peer's sleep.
    fn word(&self) -> u32;
    /// Orders the accesses before it and after it.
    fn fence(&self, order: Ordering);
}

/// State of the word that tells the peer of this node's sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sleep {
    /// The peer rings the bell anyway.
    Unneeded,
    /// The peer may count on this node's polling.
    Awake,
    /// The word is being written.
    Writing,
    /// The peer rings the bell with its next frame.
    Told,
}

/// The end of this node.
#[derive(Debug)]
pub(super) struct End {
    window: Window,
    /// Frames posted, and those of them that are written, modulo 2^32.
    posted: u32,
    done: u32,
    /// The last frame was written when it was posted.
    is_direct: bool,
    /// The last frame was not.
    uses_packets: bool,
    /// Value of the peer's word for which the bell was rung, or from which the peer has woken.
    rung: u32,
    /// A frame was posted since the last look whether the bell is to be rung.
    owes_bell: bool,
    /// Value of this node's word at the peer: odd if it sleeps. At 0 the peer rings always.
    sleeps: u32,
    sleep: Sleep,
}

impl End {
    pub(super) fn new() -> End {
        End {
            window: Window::default(),
            posted: 0,
            done: 0,
            is_direct: false,
            uses_packets: false,
            rung: 0,
            owes_bell: false,
            sleeps: 0,
            sleep: Sleep::Unneeded,
        }
    }

    /// Takes the place of a frame with a message; `None` if it has to wait.
    pub(super) fn take(&mut self) -> Option<Slot> {
        self.window.take()
    }

    /// Takes the place of a frame without a message, if the peer is to be told of handled frames.
    pub(super) fn take_bare(&mut self) -> Option<Slot> {
        self.window.take_bare()
    }

    /// Returns the frame for a place. It is written next.
    pub(super) fn post(&mut self, slot: Slot, message: Option<[u8; MESSAGE_LEN]>) -> Frame {
        // A node that has the frame hears that this one is awake.
        self.wake();
        self.posted = slot.count;
        self.owes_bell = true;
        Frame {
            message,
            handled: slot.handled,
            sleeps: self.sleeps,
            is_direct: self.is_direct,
            count: slot.count,
        }
    }

    /// Notes that a frame is written, and those before it.
    pub(super) fn has_written(&mut self, count: u32) {
        self.done = count;
    }

    /// Takes the next frame, if it has come.
    pub(super) fn receive(&mut self, ring: &impl Ring) -> Result<Option<Frame>, LinkError> {
        let (slot, count) = self.window.next();
        // The count comes last, so all of the frame is there.
        if ring.count(slot, Ordering::Acquire) != count {
            return Ok(None);
        }
        let frame = Frame::parse(&ring.frame(slot))?;
        if !self.window.handle(frame.handled) {
            return Err(LinkError::Handled);
        }
        // The peer has woken from that sleep, and will tell before the next one.
        if frame.sleeps.wrapping_sub(self.rung).cast_signed() > 0 {
            self.rung = frame.sleeps;
        }
        if frame.is_direct && self.sleep == Sleep::Unneeded {
            self.sleep = Sleep::Awake;
        }
        Ok(Some(frame))
    }

    /// Returns whether frames were posted since the last [`End::must_ring`].
    pub(super) fn owes_bell(&self) -> bool {
        self.owes_bell
    }

    /// Returns whether to ring the bell before all frames are posted, as the peer sleeps: it wakes while this node prepares the next ones.
    /// [`End::must_ring`] then tells whether it may have gone to sleep again.
    pub(super) fn may_rouse(&mut self, ring: &impl Ring) -> bool {
        let word = ring.word();
        let rouses = self.owes_bell && self.is_direct && tells_sleep(word) && word != self.rung;
        if rouses {
            self.rung = word;
        }
        rouses
    }

    /// Returns whether the bell must be rung, as the peer may not see the frames that were posted: they are on their way, or it sleeps.
    pub(super) fn must_ring(&mut self, ring: &impl Ring) -> bool {
        if !std::mem::take(&mut self.owes_bell) {
            return false;
        }
        self.is_direct = self.done == self.posted;
        self.uses_packets = !self.is_direct;
        // Pairs with the fence of `driver::rest::rest`.
        ring.fence(Ordering::SeqCst);
        let word = ring.word();
        if self.is_direct && word != 0 && (word == self.rung || !tells_sleep(word)) {
            return false;
        }
        self.rung = word;
        true
    }

    /// Returns whether the last frames went by packets.
    pub(super) fn uses_packets(&self) -> bool {
        self.uses_packets
    }

    /// Takes a bell of the peer.
    pub(super) fn has_rung(&mut self) {
        self.wake();
    }

    /// Notes that the peer may count on this node's polling from now on.
    fn wake(&mut self) {
        if matches!(self.sleep, Sleep::Writing | Sleep::Told) {
            self.sleep = Sleep::Awake;
        }
    }

    /// Returns the word that is to be written at the peer before this node sleeps, unless the peer rings the bell anyway.
    pub(super) fn tell_sleep(&mut self) -> Option<u32> {
        if self.sleep != Sleep::Awake {
            return None;
        }
        self.sleep = Sleep::Writing;
        self.sleeps = self.sleeps.wrapping_add(1) | 1;
        Some(self.sleeps)
    }

    /// Returns the word that is to be written at a peer that would ring the bell, as this node polls again.
    pub(super) fn tell_awake(&mut self) -> Option<u32> {
        if self.sleep != Sleep::Told {
            return None;
        }
        self.sleep = Sleep::Awake;
        self.sleeps = self.sleeps.wrapping_add(1);
        Some(self.sleeps)
    }

    /// Notes that the word is written.
    pub(super) fn has_told_sleep(&mut self, word: u32) {
        if self.sleep == Sleep::Writing && word == self.sleeps {
            self.sleep = Sleep::Told;
        }
    }

    /// Returns whether the word is being written.
    pub(super) fn is_telling(&self) -> bool {
        self.sleep == Sleep::Writing
    }

    /// Returns whether the peer may count on this node's polling.
    pub(super) fn is_awake(&self) -> bool {
        self.sleep == Sleep::Awake
    }
}

/// Returns whether a word says that the node sleeps which has written it.
fn tells_sleep(word: u32) -> bool {
    word % 2 == 1
}

#[cfg(test)]
mod tests;
