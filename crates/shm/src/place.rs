//! Places of one end of a link, by which its threads write to the other end's memory at the same time.
//!
//! A queue pair has a place of its own while it holds grants, because the user serializes only the requests of a queue pair. Those for
//! which none is free share the first place, and the user serializes all of them. Threads that post to one queue pair side by side, by parts
//! of its lane, have a place for each part.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rdmux_rnic::Qpn;
use rdmux_verbs::sync::Mutex;

use crate::segment::PLACES;

/// The place that queue pairs without their own share.
pub(crate) const COMMON: u32 = 0;

const _: () = assert!(PLACES == u64::BITS, "`taken` has a bit for each");

/// Places that are never taken for parts: a queue pair without a place of its own has no lane.
const FOR_QUEUE_PAIRS: u32 = PLACES / 2;

/// A place that a queue pair has taken, or a part of its lane; dropping it gives the place back.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) number: u32,
    taken: Arc<AtomicU64>,
    /// Those of the parts of a queue pair's lane.
    parts: Mutex<Vec<Weak<Place>>>,
}

impl Place {
    /// Takes a place, if more than `left` are free.
    fn take(taken: &Arc<AtomicU64>, left: u32) -> Option<Arc<Place>> {
        let free = |taken: u64| (taken.count_zeros() > left).then(|| taken.trailing_ones());
        let one_more = |taken| Some(taken | 1 << free(taken)?);
        // The writes of the one who had it happened before.
        let before = taken.fetch_update(Ordering::Acquire, Ordering::Acquire, one_more);
        Some(Arc::new(Place {
            number: free(before.ok()?)?,
            taken: Arc::clone(taken),
            parts: Mutex::default(),
        }))
    }

    /// Returns the place of a part of the lane of this queue pair, which gets one if it has none yet.
    pub(crate) fn of_part(&self, part: usize) -> Option<Arc<Place>> {
        let mut parts = self.parts.lock();
        if parts.len() <= part {
            parts.resize_with(part + 1, Weak::new);
        }
        if let Some(place) = parts[part].upgrade() {
            return Some(place);
        }
        let place = Place::take(&self.taken, FOR_QUEUE_PAIRS)?;
        parts[part] = Arc::downgrade(&place);
        Some(place)
    }
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
        let place = Place::take(&self.taken, 0)?;
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

    #[test]
    fn of_part__one_for_each_while_half_of_all_are_free() {
        let mut places = Places::default();
        let own = places.of(Qpn::new(1)).unwrap();
        let first = own.of_part(0).unwrap();
        assert_ne!(first.number, own.number);
        assert_eq!(own.of_part(0).unwrap().number, first.number, "it has one already");
        let held: Vec<_> = (1..).map_while(|part| own.of_part(part)).collect();
        // Besides those of the queue pairs without their own, of this one, and of part 0.
        assert_eq!(held.len() as u32, PLACES - FOR_QUEUE_PAIRS - 3);
        assert!(places.of(Qpn::new(2)).is_some());
        drop((held, first));
        assert!(own.of_part(1).is_some());
    }
}
