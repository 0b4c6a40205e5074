//! Packets that arrived ahead of a gap. They are kept whole until the missing packets have come, and are then handled like any
//! other, so that nothing is executed or placed out of order.

use std::collections::VecDeque;

use rdmux_wire::Psn;

/// Packets by PSN. The owner bounds the distance between their PSNs, and so their number.
#[derive(Debug, Default)]
pub(crate) struct Reorder {
    packets: VecDeque<(Psn, Box<[u8]>)>,
}

impl Reorder {
    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.packets.len()
    }

    pub(crate) fn clear(&mut self) {
        self.packets.clear();
    }

    /// Returns the PSNs of the packets kept, in order.
    pub(crate) fn psns(&self) -> impl DoubleEndedIterator<Item = Psn> {
        self.packets.iter().map(|(psn, _)| *psn)
    }

    /// Returns the first PSN that is kept.
    pub(crate) fn first(&self) -> Option<Psn> {
        self.packets.front().map(|(psn, _)| *psn)
    }

    /// Returns the first PSN that is kept and is not before `psn`.
    pub(crate) fn first_from(&self, psn: Psn) -> Option<Psn> {
        self.packets.get(self.place(psn)).map(|(psn, _)| *psn)
    }

    #[cfg(test)]
    fn holds(&self, psn: Psn) -> bool {
        self.first_from(psn) == Some(psn)
    }

    /// Keeps a packet; returns false when a packet with its PSN is kept already. Most packets come in order, so an insertion seldom
    /// moves others.
    pub(crate) fn keep(&mut self, psn: Psn, packet: &[u8]) -> bool {
        let at = self.place(psn);
        if self.packets.get(at).is_some_and(|(there, _)| *there == psn) {
            return false;
        }
        self.packets.insert(at, (psn, packet.into()));
        true
    }

    /// Takes the packet with this PSN, and forgets those before it.
    pub(crate) fn take(&mut self, psn: Psn) -> Option<Box<[u8]>> {
        while let Some((first, _)) = self.packets.front() {
            match first.since(psn) {
                1.. => break,
                0 => return self.packets.pop_front().map(|(_, packet)| packet),
                _ => drop(self.packets.pop_front()),
            }
        }
        None
    }

    /// Returns the index at which a packet with this PSN is or would be.
    fn place(&self, psn: Psn) -> usize {
        match self.packets.back() {
            Some((last, _)) if psn.since(*last) > 0 => self.packets.len(),
            _ => self.packets.partition_point(|(there, _)| there.since(psn) < 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(psns: &[u32]) -> Reorder {
        let mut reorder = Reorder::default();
        for psn in psns {
            assert!(reorder.keep(Psn::new(*psn), &psn.to_be_bytes()));
        }
        reorder
    }

    #[test]
    fn keep__sorts_across_the_wrap() {
        let reorder = kept(&[0xff_ffff, 2, 0xff_fffd, 0]);
        let psns: Vec<u32> = reorder.psns().map(Psn::value).collect();
        assert_eq!(psns, [0xff_fffd, 0xff_ffff, 0, 2]);
        assert!(reorder.holds(Psn::new(0)) && !reorder.holds(Psn::new(1)));
        assert_eq!(reorder.first_from(Psn::new(0xff_fffe)), Some(Psn::new(0xff_ffff)));
        assert_eq!(reorder.first_from(Psn::new(3)), None);
    }

    #[test]
    fn keep__once() {
        let mut reorder = kept(&[5, 7]);
        assert!(!reorder.keep(Psn::new(5), b"other"));
        assert_eq!(reorder.len(), 2);
        assert_eq!(
            reorder.take(Psn::new(5)).as_deref(),
            Some(&5u32.to_be_bytes()[..])
        );
    }

    #[test]
    fn take__forgets_what_is_before() {
        let mut reorder = kept(&[0xff_fffe, 0, 4]);
        assert!(reorder.take(Psn::new(1)).is_none());
        assert_eq!(reorder.first(), Some(Psn::new(4)));
        assert!(reorder.take(Psn::new(4)).is_some() && reorder.is_empty());
    }
}
