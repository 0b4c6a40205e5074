//! Credits for the slots into which the peer's node receives.
//!
//! A slot is empty again as soon as its message has been looked at, which waits for no application. So slots come back, as long as the news of
//! it does: it travels in every header, and in messages of their own, which need slots too. Those alone may take the last slot, and a node
//! sends one only for half of the slots. Then the nodes cannot both be without:
//!
//! Assume that neither has a slot left, and that all messages have arrived. The last slot of each went to such a message. One of the two was
//! sent when its sender had looked at all that the other had sent before, or they crossed. In either case the later one, or each, told of half
//! of the slots after its receiver had taken its last one, so that the receiver has slots.

use super::Violation;

/// Slots that messages of applications leave to others.
const RESERVE: u32 = 4;

/// The credits of both directions of a shared queue pair.
#[derive(Debug)]
pub(super) struct Slots {
    /// Slots of each node.
    total: u32,
    /// Messages sent, and those of which the peer has told that their slots are empty.
    sent: u32,
    come_back: u32,
    /// Messages received, each of whose slots is empty at once, and those of which the peer knows.
    emptied: u32,
    told: u32,
}

impl Slots {
    /// # Panics
    /// If the slots do not suffice for the reserve and its like.
    pub(super) fn new(total: u32) -> Slots {
        assert!(total >= 2 * RESERVE, "{total} slots");
        Slots {
            total,
            sent: 0,
            come_back: 0,
            emptied: 0,
            told: 0,
        }
    }

    /// Begins anew, on a queue pair whose slots are all empty.
    pub(super) fn restart(&mut self) {
        *self = Slots::new(self.total);
    }

    fn left(&self) -> u32 {
        self.total - self.sent.wrapping_sub(self.come_back)
    }

    /// Returns whether so many messages at once may be sent that were sent on an earlier queue pair.
    pub(super) fn has_for_again(&self, count: usize) -> bool {
        count < self.left() as usize
    }

    /// Returns whether a message of an application may be sent.
    pub(super) fn has_for_application(&self) -> bool {
        self.left() > RESERVE
    }

    /// Returns whether a message of a node may be sent that is about a connection.
    pub(super) fn has_for_node(&self) -> bool {
        self.left() > 1
    }

    /// Returns whether a message that only tells of empty slots is due, and may be sent.
    pub(super) fn is_due(&self) -> bool {
        self.emptied.wrapping_sub(self.told) >= self.total / 2 && self.left() > 0
    }

    /// Takes a slot for a message, and returns what its header says of the own slots.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn take(&mut self) -> u32 {
        assert!(self.left() > 0, "{self:?}");
        self.sent = self.sent.wrapping_add(1);
        self.told = self.emptied;
        self.emptied
    }

    /// Notes a message of the peer, and what it says of the peer's slots.
    ///
    /// # Errors
    /// The peer has sent more messages than there are slots, or tells of slots that were not taken.
    pub(super) fn arrived(&mut self, emptied: u32) -> Result<(), Violation> {
        if self.emptied.wrapping_sub(self.told) >= self.total {
            return Err(Violation("more messages than slots"));
        }
        if emptied.wrapping_sub(self.come_back) > self.sent.wrapping_sub(self.come_back) {
            return Err(Violation("more slots than were taken"));
        }
        self.come_back = emptied;
        self.emptied = self.emptied.wrapping_add(1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn take__leaves_the_reserve() {
        let mut slots = Slots::new(16);
        (0..12).for_each(|_| _ = slots.take());
        assert!(!slots.has_for_application() && slots.has_for_node());
        (0..3).for_each(|_| _ = slots.take());
        assert!(!slots.has_for_node() && !slots.is_due());
        assert_eq!(slots.left(), 1);
    }

    #[test]
    fn is_due__after_half_of_the_slots() {
        let mut slots = Slots::new(16);
        for _ in 0..7 {
            slots.arrived(0).unwrap();
        }
        assert!(!slots.is_due());
        slots.arrived(0).unwrap();
        assert!(slots.is_due());
        assert_eq!(slots.take(), 8);
        assert!(!slots.is_due());
    }

    #[test]
    fn arrived__wraps() {
        let mut slots = Slots::new(16);
        slots.sent = u32::MAX;
        slots.come_back = u32::MAX - 1;
        slots.take();
        slots.take();
        slots.arrived(0).unwrap();
        assert_eq!(slots.left(), 15);
    }

    #[test]
    fn arrived__refuses_impossible_credits() {
        let mut slots = Slots::new(16);
        slots.take();
        assert!(slots.arrived(2).is_err());
        assert!(slots.arrived(u32::MAX).is_err());
        slots.arrived(1).unwrap();
        assert!(slots.arrived(0).is_err());
        for _ in 0..15 {
            slots.arrived(1).unwrap();
        }
        assert!(slots.arrived(1).is_err());
    }
}
