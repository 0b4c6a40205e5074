//! Bound of the frames in flight between two nodes.

use rdmux_wire::dsm::frame::SLOTS;

/// Slots that only frames without a message may take: they tell of handled frames when all others are in use.
const RESERVED: u32 = 2;

/// Counts of frames, each modulo 2^32. No slot of the peer's ring is written before the peer has handled the frame in it, so a sender needs no
/// completion to use the memory of a frame again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Window {
    sent: u32,
    /// Frames of those that the peer has handled, as it has said.
    taken: u32,
    handled: u32,
    /// Value of `handled` that the peer has been told.
    told: u32,
}

/// The next frame that may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Index of its slot.
    pub index: u32,
    /// Number of frames up to this one.
    pub count: u32,
    /// Frames handled, to be told with it.
    pub handled: u32,
}

impl Window {
    /// Takes the place of a frame with a message; `None` if it has to wait.
    pub(crate) fn take(&mut self) -> Option<Slot> {
        self.take_below(SLOTS - RESERVED)
    }

    /// Takes the place of a frame without a message, if the peer is to be told of handled frames.
    pub(crate) fn take_bare(&mut self) -> Option<Slot> {
        match self.handled.wrapping_sub(self.told) >= SLOTS / 2 {
            true => self.take_below(SLOTS),
            false => None,
        }
    }

    fn take_below(&mut self, max: u32) -> Option<Slot> {
        if self.sent.wrapping_sub(self.taken) >= max {
            return None;
        }
        let index = self.sent % SLOTS;
        self.sent = self.sent.wrapping_add(1);
        self.told = self.handled;
        Some(Slot {
            index,
            count: self.sent,
            handled: self.handled,
        })
    }

    /// Returns the slot of the peer's next frame, and its count.
    pub(crate) fn next(&self) -> (u32, u32) {
        (self.handled % SLOTS, self.handled.wrapping_add(1))
    }

    /// Takes the peer's next frame, with the number of frames that the peer has handled. Returns false if that is not possible.
    #[must_use]
    pub(crate) fn handle(&mut self, taken: u32) -> bool {
        let unhandled = self.sent.wrapping_sub(self.taken);
        if taken.wrapping_sub(self.taken) > unhandled {
            return false;
        }
        self.taken = taken;
        self.handled = self.handled.wrapping_add(1);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use rand_chacha::ChaCha8Rng;
    use rand_core::{RngCore, SeedableRng};

    use super::*;

    /// Two windows that send as much as they may, in any order of sending and handling.
    #[test]
    fn window__never_sends_more_than_the_peer_has_slots_and_never_stops() {
        for seed in 0..50 {
            println!("seed {seed}");
            let mut dice = ChaCha8Rng::seed_from_u64(seed);
            // Close to where the counts begin anew.
            let start = u32::MAX - 500;
            let new = || Window {
                sent: start,
                taken: start,
                handled: start,
                told: start,
            };
            let mut windows = [new(), new()];
            let mut flight: [VecDeque<Slot>; 2] = Default::default();
            let mut wanted = [2000, 2000];
            while wanted != [0, 0] {
                let side = (dice.next_u32() % 2) as usize;
                match dice.next_u32() % 2 {
                    0 => {
                        let mut slot = None;
                        if wanted[side] > 0 {
                            slot = windows[side].take();
                            wanted[side] -= u32::from(slot.is_some());
                        }
                        if let Some(slot) = slot.or_else(|| windows[side].take_bare()) {
                            flight[side].push_back(slot);
                            assert!(flight[side].len() <= SLOTS as usize);
                        }
                    }
                    _ => {
                        if let Some(slot) = flight[side].pop_front() {
                            assert_eq!((slot.index, slot.count), windows[1 - side].next());
                            assert!(windows[1 - side].handle(slot.handled));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn handle__of_more_than_was_sent_is_refused() {
        let mut window = Window::default();
        assert!(!window.handle(1));
        assert!(window.take().is_some() && window.handle(1));
        assert!(!window.handle(0));
    }
}
