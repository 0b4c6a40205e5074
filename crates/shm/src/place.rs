//! Places of one end of a link, by which its threads write to the other end's memory at the same time.
//!
//! A queue pair has a place of its own while it holds grants, because the user serializes only the requests of a queue pair. Those for
//! which none is free share the first place, and the user serializes all of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rdmux_rnic::Qpn;

use crate::segment::PLACES;

/// The place that queue pairs without their own share.
pub(crate) const COMMON: u32 = 0;

const _: () = assert!(PLACES == u64::BITS, "`taken` has a bit for each");

/// A place that a queue pair has taken; dropping it gives the place back.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) number: u32,
    taken: Arc<AtomicU64>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.taken.fetch_and(!(1 << self.number), Ordering::Release);
    }
}

/// The places of one end of a link.
#[derive(Debug)]
pub(crate) struct Places {
    taken: Arc<AtomicU64>,
    by_qp: Vec<(Qpn, Weak<Place>)>,
}

impl Default for Places {
    fn default() -> Places {
        Places {
            taken: Arc::new(AtomicU64::new(1 << COMMON)),
            by_qp: Vec::new(),
        }
    }
}

impl Places {
    /// Returns the place of a queue pair, which gets one if it has none yet. `None`: no place is free.
    pub(crate) fn of(&mut self, qpn: Qpn) -> Option<Arc<Place>> {
        self.by_qp.retain(|(_, place)| place.strong_count() > 0);
        let own = self.by_qp.iter().find(|(of, _)| *of == qpn);
        if let Some(place) = own.and_then(|(_, place)| place.upgrade()) {
            return Some(place);
        }
        // Only this end takes places; others give them back. The writes of the one who had it happened before.
        let number = self.taken.load(Ordering::Acquire).trailing_ones();
        if number >= PLACES {
            return None;
        }
        self.taken.fetch_or(1 << number, Ordering::Relaxed);
        let place = Arc::new(Place {
            number,
            taken: Arc::clone(&self.taken),
        });
        self.by_qp.push((qpn, Arc::downgrade(&place)));
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of__one_for_each_queue_pair_until_none_is_free() {
        let mut places = Places::default();
        let mut held: Vec<_> = (1..PLACES).map(|qpn| places.of(Qpn::new(qpn)).unwrap()).collect();
        let numbers: Vec<u32> = held.iter().map(|place| place.number).collect();
        assert_eq!(numbers, (1..PLACES).collect::<Vec<_>>());
        assert_eq!(places.of(Qpn::new(7)).unwrap().number, 7, "it has one already");
        assert!(places.of(Qpn::new(PLACES)).is_none());
        held.remove(6);
        assert_eq!(places.of(Qpn::new(PLACES)).unwrap().number, 7);
    }
}
