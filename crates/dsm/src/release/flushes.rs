//! Flushes that a node carries out as the home of their units.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::notice::Run;

use crate::protocol::Violation;

/// Flushes at the front of the queue among which the next one is looked for: each message costs the same, however many wait.
const LOOKED_AT: usize = 1024;

/// A flush of units of another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Flush {
    pub(super) from: NodeId,
    pub(super) run: Run,
    pub(super) request: u64,
}

/// Progress of a flush that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Stage {
    /// The units are being read straight into the frames.
    Lands,
    /// Units and twins are being read into the slot.
    Fetches,
    /// What was written is about to be stored into the frames.
    Stores,
}

/// A flush that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Begun {
    pub(super) flush: Flush,
    pub(super) stage: Stage,
}

/// All of them, at most one of each unit and node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Flushes {
    /// Those that have begun.
    slots: Vec<Option<Begun>>,
    /// Those that wait.
    queue: VecDeque<Flush>,
    /// Number of units of each, by node and first unit.
    pending: BTreeMap<(NodeId, u32), u32>,
    /// Units that were written, each with the node whose twin has the contents of the frame, if there is one.
    twins: BTreeMap<u64, Option<NodeId>>,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Flushes {
    pub(super) fn new(slots: usize) -> Flushes {
        Flushes {
            slots: vec![None; slots],
            queue: VecDeque::new(),
            pending: BTreeMap::new(),
            twins: BTreeMap::new(),
        }
    }

    /// Takes a flush of units that the region has.
    ///
    /// # Errors
    /// The node flushes one of the units already.
    pub(super) fn take(&mut self, flush: Flush) -> Result<(), Violation> {
        let Flush { from, run, .. } = flush;
        // Those of one node do not overlap, so no earlier one reaches further than the last one that begins before the end.
        let before = self
            .pending
            .range((from, 0)..(from, run.first + run.count))
            .next_back();
        if before.is_some_and(|((_, first), count)| first + count > run.first) {
            return Err(Violation::Unexpected);
        }
        self.pending.insert((from, run.first), run.count);
        self.queue.push_back(flush);
        Ok(())
    }

    /// Begins the next flush that can begin now. Returns its slot.
    pub(super) fn begin(&mut self) -> Option<(usize, Begun)> {
        let slot = self.slots.iter().position(Option::is_none)?;
        let flush = self.take_next()?;
        let Flush { from, run, .. } = flush;
        let is_twin = |twin: &Option<NodeId>| *twin == Some(from) || mutant!(OthersOverwritten);
        let mut begun = self.slots.iter().flatten();
        let is_alone = !begun.any(|it| {
            let is_overtaken = it.stage != Stage::Lands && mutant!(StoreOvertaken);
            overlap(&it.flush.run.units(), &run.units()) && !is_overtaken
        });
        let lands = is_alone && self.twins.range(run.units()).all(|(_, it)| is_twin(it));
        let is_noted = lands && self.twins.range(run.units()).count() == run.count as usize;
        if !is_noted {
            let twins = run.units().map(|unit| (unit, lands.then_some(from)));
            self.twins.extend(twins);
        }
        let stage = match lands {
            true => Stage::Lands,
            false => Stage::Fetches,
        };
        let begun = Begun { flush, stage };
        self.slots[slot] = Some(begun);
        Some((slot, begun))
    }

    /// Takes the first flush that can begin out of the queue: it shares no unit with one that lands, nor with an earlier one that waits. So flushes of
    /// the same units begin in their order, and none waits for a later one.
    fn take_next(&mut self) -> Option<Flush> {
        let landing = self.slots.iter().flatten().filter(|it| it.stage == Stage::Lands);
        // Units that land, a range for each slot, which grows by the flushes that wait for it. So each flush of the queue is compared with as many
        // ranges as there are slots.
        let mut barred: Vec<Range<u64>> = landing.map(|it| it.flush.run.units()).collect();
        if mutant!(LandingOvertaken) {
            barred.clear();
        }
        let can_begin = |flush: &Flush| {
            let units = flush.run.units();
            let Some(range) = barred.iter_mut().find(|range| overlap(range, &units)) else {
                return true;
            };
            *range = range.start.min(units.start)..range.end.max(units.end);
            false
        };
        let place = self.queue.iter().take(LOOKED_AT).position(can_begin)?;
        self.queue.remove(place)
    }

    /// Returns the nodes whose flushes have begun.
    pub(super) fn writers(&self) -> impl Iterator<Item = NodeId> {
        self.slots.iter().flatten().map(|begun| begun.flush.from)
    }

    /// Returns the flush in a slot.
    pub(super) fn in_slot(&self, slot: usize) -> Option<Begun> {
        *self.slots.get(slot)?
    }

    /// Notes that what was written is about to be stored, of a flush that was read into its slot.
    pub(super) fn store(&mut self, slot: usize) {
        if let Some(Some(begun)) = self.slots.get_mut(slot) {
            begun.stage = Stage::Stores;
        }
    }

    /// Ends the flush in a slot.
    pub(super) fn end(&mut self, slot: usize) -> Option<Begun> {
        let begun = self.slots.get_mut(slot)?.take()?;
        let Flush { from, run, .. } = begun.flush;
        self.pending.remove(&(from, run.first));
        Some(begun)
    }

    /// Returns whether a flush writes into the frame of the unit.
    pub(super) fn is_landing(&self, unit: u64) -> bool {
        let mut begun = self.slots.iter().flatten();
        begun.any(|it| it.stage == Stage::Lands && it.flush.run.units().contains(&unit))
    }

    /// Notes the node whose twin has the contents of a unit's frame from now on, if there is one.
    pub(super) fn note(&mut self, unit: u64, twin: Option<NodeId>) {
        self.twins.insert(unit, twin);
    }

    /// Forgets the flushes of nodes that are gone, but those that are being read.
    pub(super) fn forget(&mut self, gone: &[NodeId]) {
        self.queue.retain(|flush| !gone.contains(&flush.from));
        self.pending.retain(|(from, _), _| !gone.contains(from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NodeId = NodeId::new(1).unwrap();
    const TWO: NodeId = NodeId::new(2).unwrap();

    fn flush(from: NodeId, first: u32, count: u32) -> Flush {
        Flush {
            from,
            run: Run { first, count },
            request: 1,
        }
    }

    /// Carries out a flush, and returns whether it landed in the frames.
    fn lands(flushes: &mut Flushes, flush: Flush) -> bool {
        flushes.take(flush).unwrap();
        let (slot, begun) = flushes.begin().unwrap();
        assert_eq!(flushes.end(slot), Some(begun));
        begun.stage == Stage::Lands
    }

    #[test]
    fn take__of_a_unit_that_the_node_flushes_already_is_refused() {
        let mut flushes = Flushes::new(1);
        flushes.take(flush(ONE, 4, 4)).unwrap();
        for (first, count) in [(4, 4), (0, 5), (7, 1), (5, 2), (3, 9)] {
            assert_eq!(
                flushes.take(flush(ONE, first, count)),
                Err(Violation::Unexpected),
                "{count} from {first} on"
            );
        }
        flushes.take(flush(ONE, 8, 1)).unwrap();
        flushes.take(flush(ONE, 2, 2)).unwrap();
        flushes.take(flush(TWO, 0, 20)).unwrap();
    }

    #[test]
    fn begin__lands_where_nobody_but_the_node_has_written_since_its_twin() {
        let mut flushes = Flushes::new(2);
        assert!(lands(&mut flushes, flush(ONE, 0, 2)));
        assert!(lands(&mut flushes, flush(ONE, 0, 4)));
        assert!(lands(&mut flushes, flush(TWO, 4, 1)));
        assert!(!lands(&mut flushes, flush(TWO, 3, 2)));
        assert!(!lands(&mut flushes, flush(ONE, 2, 2)));
        assert!(lands(&mut flushes, flush(ONE, 0, 2)));
        flushes.note(3, Some(TWO));
        flushes.note(4, Some(TWO));
        assert!(lands(&mut flushes, flush(TWO, 3, 2)));
        // The program of the home writes.
        flushes.note(4, None);
        assert!(!lands(&mut flushes, flush(TWO, 3, 2)));
    }

    #[test]
    fn begin__of_units_that_land_waits_and_beside_others_nothing_lands() {
        let mut flushes = Flushes::new(3);
        flushes.take(flush(ONE, 0, 4)).unwrap();
        flushes.take(flush(TWO, 3, 1)).unwrap();
        let (slot, begun) = flushes.begin().unwrap();
        assert!(begun.stage == Stage::Lands && flushes.is_landing(3) && !flushes.is_landing(4));
        assert_eq!(flushes.begin(), None);
        flushes.end(slot).unwrap();
        let (_, begun) = flushes.begin().unwrap();
        assert_eq!((begun.flush.from, begun.stage), (TWO, Stage::Fetches));
        // The copy of node 1 is that of the frame, but node 2's bytes are about to be stored.
        flushes.note(3, Some(ONE));
        flushes.take(flush(ONE, 2, 2)).unwrap();
        assert_eq!(flushes.begin().unwrap().1.stage, Stage::Fetches);
    }

    /// Begins flushes until none can begin, and returns the first unit of each.
    fn begin_all(flushes: &mut Flushes) -> Vec<u32> {
        let begun = std::iter::from_fn(|| flushes.begin());
        begun.map(|(_, begun)| begun.flush.run.first).collect()
    }

    #[test]
    fn begin__of_other_units_overtakes_flushes_that_wait_for_those_that_land() {
        let mut flushes = Flushes::new(4);
        flushes.take(flush(ONE, 8, 4)).unwrap();
        let (slot, _) = flushes.begin().unwrap();
        // The first and the last one wait for the one that lands, each other one for the one before it.
        flushes.take(flush(TWO, 6, 4)).unwrap();
        flushes.take(flush(ONE, 4, 4)).unwrap();
        flushes.take(flush(TWO, 2, 3)).unwrap();
        flushes.take(flush(TWO, 11, 2)).unwrap();
        assert!(begin_all(&mut flushes).is_empty());
        flushes.take(flush(ONE, 13, 1)).unwrap();
        flushes.take(flush(TWO, 0, 2)).unwrap();
        assert_eq!(begin_all(&mut flushes), [13, 0]);
        flushes.end(slot).unwrap();
        assert_eq!(begin_all(&mut flushes), [6, 4]);
    }
}
