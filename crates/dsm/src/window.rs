//! Bound of the frames in flight between two nodes.

/// Receives that a node posts for each peer, and send buffers that it has for it.
pub(crate) const RECEIVES: u32 = 64;

/// Receives that only frames without a message may take: they tell of handled frames when all others are in use.
const RESERVED: u32 = 2;

/// A frame has a completion at the latest after so many others, which frees the buffers of all before it.
const SIGNAL_EVERY: u32 = 8;

/// Counts of frames, each modulo 2^32. No frame is sent for which the peer has no receive posted, so no RNR NAK ever comes, and none for which
/// no buffer is free.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Window {
    sent: u32,
    /// Frames of those whose buffers are free again.
    acknowledged: u32,
    /// Frames of those that the peer has handled, as it has said.
    taken: u32,
    handled: u32,
    /// Value of `handled` that the peer has been told.
    told: u32,
}

/// The next frame that may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Index of its buffer.
    pub index: u32,
    /// Number of frames up to this one.
    pub count: u32,
    /// The frame is to have a completion, which is to be passed to [`Window::acknowledge`] with the count.
    pub is_signaled: bool,
    /// Frames handled, to be told with it.
    pub handled: u32,
}

impl Window {
    /// Takes the place of a frame with a message; `None` if it has to wait.
    pub(crate) fn take(&mut self) -> Option<Slot> {
        self.take_below(RECEIVES - RESERVED)
    }

    /// Takes the place of a frame without a message, if the peer is to be told of handled frames.
    pub(crate) fn take_bare(&mut self) -> Option<Slot> {
        match self.handled.wrapping_sub(self.told) >= RECEIVES / 2 {
            true => self.take_below(RECEIVES),
            false => None,
        }
    }

    fn take_below(&mut self, max: u32) -> Option<Slot> {
        let unhandled = self.sent.wrapping_sub(self.taken);
        let unacknowledged = self.sent.wrapping_sub(self.acknowledged);
        if unhandled >= max || unacknowledged >= RECEIVES {
            return None;
        }
        let index = self.sent % RECEIVES;
        self.sent = self.sent.wrapping_add(1);
        self.told = self.handled;
        Some(Slot {
            index,
            count: self.sent,
            is_signaled: self.sent.is_multiple_of(SIGNAL_EVERY),
            handled: self.handled,
        })
    }

    /// Takes the completion of a signaled frame.
    pub(crate) fn acknowledge(&mut self, count: u32) {
        self.acknowledged = count;
    }

    /// Takes a frame of the peer, whose receive is posted again, with the number of frames that the peer has handled. Returns false if that is not
    /// possible.
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

    /// Two windows that send as much as they may, in any order of sending, handling and acknowledging.
    #[test]
    fn window__never_sends_more_than_the_peer_has_receives_and_never_stops() {
        for seed in 0..50 {
            println!("seed {seed}");
            let mut dice = ChaCha8Rng::seed_from_u64(seed);
            // Close to where the counts begin anew.
            let start = u32::MAX - 500;
            let new = || Window {
                sent: start,
                acknowledged: start,
                taken: start,
                handled: start,
                told: start,
            };
            let mut windows = [new(), new()];
            let mut flight: [VecDeque<Slot>; 2] = Default::default();
            let mut unacknowledged: [VecDeque<Slot>; 2] = Default::default();
            let mut wanted = [2000, 2000];
            while wanted != [0, 0] {
                let side = (dice.next_u32() % 2) as usize;
                match dice.next_u32() % 3 {
                    0 => {
                        let mut slot = None;
                        if wanted[side] > 0 {
                            slot = windows[side].take();
                            wanted[side] -= u32::from(slot.is_some());
                        }
                        if let Some(slot) = slot.or_else(|| windows[side].take_bare()) {
                            flight[side].push_back(slot);
                            unacknowledged[side].push_back(slot);
                            assert!(flight[side].len() <= RECEIVES as usize);
                            assert!(unacknowledged[side].len() <= RECEIVES as usize);
                        }
                    }
                    1 => {
                        if let Some(slot) = flight[side].pop_front() {
                            assert!(windows[1 - side].handle(slot.handled));
                        }
                    }
                    _ => {
                        while let Some(slot) = unacknowledged[side].pop_front() {
                            if slot.is_signaled {
                                windows[side].acknowledge(slot.count);
                            }
                            if slot.is_signaled && dice.next_u32().is_multiple_of(2) {
                                break;
                            }
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
