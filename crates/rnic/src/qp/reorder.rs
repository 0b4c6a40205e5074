//! Packets that arrived ahead of a gap. They are kept whole until the missing packets have come, and are then handled like any
//! other, so that nothing is executed or placed out of order.

use std::collections::VecDeque;

use rdmux_wire::Psn;

/// A packet, and the PSNs for which it stands.
#[derive(Debug)]
struct Kept {
    psn: Psn,
    count: u32,
    packet: Box<[u8]>,
}

/// Packets by PSN, none of which stands for a PSN of another. The owner bounds the distance between their PSNs, and so their number.
#[derive(Debug, Default)]
pub(crate) struct Reorder {
    packets: VecDeque<Kept>,
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
        self.packets.iter().map(|kept| kept.psn)
    }

    /// Returns the first PSN that is kept.
    pub(crate) fn first(&self) -> Option<Psn> {
        self.packets.front().map(|kept| kept.psn)
    }

    /// Returns the first PSN that is kept and is not before `psn`.
    pub(crate) fn first_from(&self, psn: Psn) -> Option<Psn> {
        self.packets.get(self.place(psn)).map(|kept| kept.psn)
    }

    #[cfg(test)]
    fn holds(&self, psn: Psn) -> bool {
        self.first_from(psn) == Some(psn)
    }

    /// Keeps a packet that stands for `count` PSNs; returns false when one of them is kept already. Most packets come in order, so an
    /// insertion seldom moves others.
    pub(crate) fn keep(&mut self, psn: Psn, count: u32, copy: impl FnOnce() -> Box<[u8]>) -> bool {
        let at = self.place(psn);
        let overlaps_next = self
            .packets
            .get(at)
            .is_some_and(|next| next.psn.since(psn) < count as i32);
        let before = at.checked_sub(1).and_then(|before| self.packets.get(before));
        if overlaps_next || before.is_some_and(|kept| psn.since(kept.psn) < kept.count as i32) {
            return false;
        }
        let packet = copy();
        self.packets.insert(at, Kept { psn, count, packet });
        true
    }

    /// Takes the packet with this PSN, and forgets those before it.
    pub(crate) fn take(&mut self, psn: Psn) -> Option<Box<[u8]>> {
        while let Some(first) = self.packets.front() {
            match first.psn.since(psn) {
                1.. => break,
                0 => return self.packets.pop_front().map(|kept| kept.packet),
                _ => drop(self.packets.pop_front()),
            }
        }
        None
    }

    /// Returns the index at which a packet with this PSN is or would be.
    fn place(&self, psn: Psn) -> usize {
        match self.packets.back() {
            Some(last) if psn.since(last.psn) > 0 => self.packets.len(),
            _ => self.packets.partition_point(|kept| kept.psn.since(psn) < 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(psns: &[u32]) -> Reorder {
        let mut reorder = Reorder::default();
        for psn in psns {
            assert!(reorder.keep(Psn::new(*psn), 1, || psn.to_be_bytes().into()));
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
        assert!(!reorder.keep(Psn::new(5), 1, || b"other".as_slice().into()));
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

    #[test]
    fn keep__refuses_a_psn_of_a_packet_that_stands_for_several() {
        let mut reorder = Reorder::default();
        let mut keep = |psn, count| reorder.keep(Psn::new(psn), count, || Box::from([]));
        assert!(keep(10, 4) && keep(16, 1));
        for (psn, count) in [(10, 1), (12, 1), (13, 8), (9, 2), (14, 3), (5, 20)] {
            assert!(!keep(psn, count), "{count} from {psn} on");
        }
        assert!(keep(14, 2) && keep(8, 2) && keep(17, 1));
        let psns: Vec<u32> = reorder.psns().map(Psn::value).collect();
        assert_eq!(psns, [8, 10, 14, 16, 17]);
    }
}
