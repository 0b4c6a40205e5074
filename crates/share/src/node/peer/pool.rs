//! Decides which lines have a queue pair: at most a limit of them. No I/O and no clock.
//!
//! A queue pair is opened when it is wanted and there is none. At the limit, others are to be put away for it, one after the other: each is asked
//! whether it can go, and if not, comes again when all others have been asked, and not before [`AGAIN_TIME`]. So the pool knows no use of a queue pair, which would
//! cost something for each message; whoever is asked knows whether it was used since it was asked before. One that can go is put away after [`IDLE_TIME`] in
//! any case. Its line stays, and is wanted again as it was for the first time.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use super::{PeerId, SharedBy, SharedId};

/// Time after which a shared queue pair is asked whether it can go, although there is room.
pub(in crate::node) const IDLE_TIME: Duration = Duration::from_secs(30);
/// Time after which one that a peer had no room for is asked for again, and after which one that could not go is.
pub(in crate::node) const AGAIN_TIME: Duration = Duration::from_millis(20);

/// Actions for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::node) enum Step {
    /// Open a queue pair: [`Pool::opened`], [`Pool::later`] or [`Pool::ended`] follows.
    Open(SharedId, SharedBy),
    /// Put one away, if it can go at both ends: [`Pool::away`], [`Pool::ended`] or [`Pool::stays`] follows. `for_room`: another one is wanted in its
    /// place.
    Close { id: SharedId, for_room: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The line has no queue pair.
    Away,
    Opening,
    Open,
    /// Nobody sends on it. It may be open again, if the peer needs it.
    Closing,
}

#[derive(Debug)]
struct Entry {
    by: SharedBy,
    /// Set if this node has asked for it.
    is_asked: bool,
    state: State,
    /// Time at which it was opened, bound to, or asked whether it can go.
    seen: Instant,
}

/// The shared queue pairs of a node.
#[derive(Debug)]
pub(in crate::node) struct Pool {
    limit: usize,
    entries: BTreeMap<SharedId, Entry>,
    by: HashMap<SharedBy, SharedId>,
    /// Number of those that are not away.
    live: usize,
    /// Those that are open, in the order in which they are asked whether they can go.
    open: BTreeSet<(Instant, SharedId)>,
    /// Those that are wanted and wait for room, in their order.
    wanted: VecDeque<SharedBy>,
    /// All that are wanted: besides those, the ones that are still closing, and the ones of [`Pool::later`].
    is_wanted: HashSet<SharedBy>,
    /// Those that a peer had no room for, by the time at which they are wanted again.
    later: BTreeSet<(Instant, SharedBy)>,
    steps: VecDeque<Step>,
    closing: usize,
    /// Number of the next line, and how far the one after it is from that.
    numbers: (u64, u64),
}

impl Pool {
    /// Makes a pool for at most `limit` queue pairs.
    pub(in crate::node) fn new(limit: usize) -> Pool {
        Pool {
            limit: limit.max(1),
            entries: BTreeMap::new(),
            by: HashMap::new(),
            live: 0,
            open: BTreeSet::new(),
            wanted: VecDeque::new(),
            is_wanted: HashSet::new(),
            later: BTreeSet::new(),
            steps: VecDeque::new(),
            closing: 0,
            numbers: (1, 1),
        }
    }

    /// Returns the most queue pairs at a time.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Numbers the lines from a number on, each so far from the one before.
    pub(super) fn with_numbers(self, numbers: (u64, u64)) -> Pool {
        Pool { numbers, ..self }
    }

    /// Returns the queue pair to send on, if it is open. If not, it is opened, or waits for room.
    pub(in crate::node) fn want(&mut self, now: Instant, by: &SharedBy) -> Option<SharedId> {
        match self.find(by) {
            Some((id, State::Open)) => {
                self.touch(now, id);
                return Some(id);
            }
            Some((_, State::Opening)) => {}
            Some((_, State::Closing)) => {
                self.is_wanted.insert(by.clone());
            }
            Some((_, State::Away)) | None => {
                if self.is_wanted.insert(by.clone()) {
                    self.wanted.push_back(by.clone());
                    self.make_room(now);
                }
            }
        }
        None
    }

    /// Returns the line of its users, and the state of its queue pair.
    fn find(&self, by: &SharedBy) -> Option<(SharedId, State)> {
        let id = self.by.get(by)?;
        Some((*id, self.entries.get(id)?.state))
    }

    /// Returns whether its users are told of a queue pair: one that is open, that is being opened, or that waits for room or for the end of the one
    /// before.
    pub(in crate::node) fn is_coming(&self, by: &SharedBy) -> bool {
        self.is_wanted.contains(by) || self.find(by).is_some_and(|(_, state)| state != State::Away)
    }

    /// Forgets that a queue pair is wanted.
    pub(in crate::node) fn unwant(&mut self, by: &SharedBy) {
        if self.is_wanted.remove(by) {
            self.wanted.retain(|other| other != by);
            self.later.retain(|(_, other)| other != by);
        }
    }

    /// Forgets what is wanted of a peer, and returns it.
    pub(in crate::node) fn forget(&mut self, peer: PeerId) -> Vec<SharedBy> {
        let of_peer = |by: &&SharedBy| by.peer == peer;
        let wanted: Vec<SharedBy> = self.is_wanted.iter().filter(of_peer).cloned().collect();
        wanted.iter().for_each(|by| self.unwant(by));
        wanted
    }

    /// Has a line get the queue pair that a peer asks for, in place of one for which this node has asked if there is one. `None`: there is no
    /// room now.
    pub(in crate::node) fn accept(&mut self, now: Instant, by: &SharedBy) -> Option<SharedId> {
        if let Some(id) = self.asked_for(by) {
            self.entries.get_mut(&id)?.is_asked = false;
            return Some(id);
        }
        let is_away = self.find(by).is_none_or(|(_, state)| state == State::Away);
        if is_away && self.live >= self.limit && self.closing == 0 {
            self.evict(now);
        }
        if !is_away || self.live >= self.limit {
            return None;
        }
        self.unwant(by);
        Some(self.open(now, by, false))
    }

    /// Begins to open the queue pair of a line, which may be a new one.
    fn open(&mut self, now: Instant, by: &SharedBy, is_asked: bool) -> SharedId {
        let numbers = &mut self.numbers;
        let id = *self.by.entry(by.clone()).or_insert_with(|| {
            let id = SharedId(numbers.0);
            numbers.0 += numbers.1;
            id
        });
        let entry = Entry {
            by: by.clone(),
            is_asked,
            state: State::Opening,
            seen: now,
        };
        self.entries.insert(id, entry);
        self.live += 1;
        id
    }

    /// Returns the line for which this node is asking a peer.
    pub(in crate::node) fn asked_for(&self, by: &SharedBy) -> Option<SharedId> {
        let (id, state) = self.find(by)?;
        let is_asked = self.entries.get(&id)?.is_asked;
        (is_asked && state == State::Opening).then_some(id)
    }

    /// Opens what is wanted, as far as there is room, and puts away others to make room.
    fn make_room(&mut self, now: Instant) {
        while let Some(by) = self.wanted.front().cloned() {
            if self.live >= self.limit {
                while self.closing < self.wanted.len() && self.evict(now) {}
                return;
            }
            self.wanted.pop_front();
            self.is_wanted.remove(&by);
            let id = self.open(now, &by, true);
            self.steps.push_back(Step::Open(id, by));
        }
    }

    /// Begins to put away the queue pair that was not seen for longest.
    fn evict(&mut self, now: Instant) -> bool {
        let first = self.open.first().copied();
        let due = first.filter(|(seen, _)| *seen + AGAIN_TIME <= now);
        if let Some((_, id)) = due {
            self.ends(id);
            self.steps.push_back(Step::Close { id, for_room: true });
        }
        due.is_some()
    }

    /// Takes note that nobody sends on a queue pair any more.
    pub(in crate::node) fn ends(&mut self, id: SharedId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.state != State::Closing
        {
            self.open.remove(&(entry.seen, id));
            entry.state = State::Closing;
            self.closing += 1;
        }
    }

    /// Takes note that a queue pair is open.
    pub(in crate::node) fn opened(&mut self, now: Instant, id: SharedId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.state == State::Opening
        {
            entry.state = State::Open;
            self.touch(now, id);
            self.make_room(now);
        }
    }

    /// Takes note that a peer had no room for a queue pair: it is asked for again a little later.
    pub(in crate::node) fn later(&mut self, now: Instant, id: SharedId) {
        if let Some(by) = self.put_away(id) {
            self.later.insert((now + AGAIN_TIME, by.clone()));
            self.is_wanted.insert(by);
        }
        self.make_room(now);
    }

    /// Takes note that a line has no queue pair any more.
    pub(in crate::node) fn away(&mut self, now: Instant, id: SharedId) {
        if let Some(by) = self.put_away(id)
            && self.is_wanted.contains(&by)
        {
            self.wanted.push_back(by);
        }
        self.make_room(now);
    }

    fn put_away(&mut self, id: SharedId) -> Option<SharedBy> {
        let entry = self.entries.get_mut(&id)?;
        let state = std::mem::replace(&mut entry.state, State::Away);
        self.open.remove(&(entry.seen, id));
        self.closing -= usize::from(state == State::Closing);
        self.live -= usize::from(state != State::Away);
        (state != State::Away).then(|| entry.by.clone())
    }

    /// Takes note that there is no such line any more. Who wants one gets another one.
    pub(in crate::node) fn ended(&mut self, now: Instant, id: SharedId) {
        let left = self.put_away(id);
        if let Some(entry) = self.entries.remove(&id) {
            self.by.remove(&entry.by);
        }
        self.wanted.extend(left.filter(|by| self.is_wanted.contains(by)));
        self.make_room(now);
    }

    /// Takes note that a queue pair that was to be put away cannot go now.
    pub(in crate::node) fn stays(&mut self, now: Instant, id: SharedId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.state == State::Closing
        {
            entry.state = State::Open;
            self.closing -= 1;
            let by = entry.by.clone();
            self.unwant(&by);
            self.touch(now, id);
            self.make_room(now);
        }
    }

    fn touch(&mut self, now: Instant, id: SharedId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.state == State::Open
        {
            self.open.remove(&(entry.seen, id));
            entry.seen = now;
            self.open.insert((now, id));
        }
    }

    /// Returns when [`Pool::check_time`] is to be called.
    pub(in crate::node) fn deadline(&self) -> Option<Instant> {
        let lacks_room = self.closing < self.wanted.len();
        let time = if lacks_room { AGAIN_TIME } else { IDLE_TIME };
        let open = self.open.first().map(|(seen, _)| *seen + time);
        let later = self.later.first().map(|(at, _)| *at);
        [open, later].into_iter().flatten().min()
    }

    /// Puts away what nobody has used for long, and asks again for what a peer had no room for.
    pub(in crate::node) fn check_time(&mut self, now: Instant) {
        while let Some((seen, id)) = self.open.first().copied()
            && seen + IDLE_TIME <= now
        {
            self.ends(id);
            self.steps.push_back(Step::Close { id, for_room: false });
        }
        while let Some((at, _)) = self.later.first()
            && *at <= now
        {
            if let Some((_, by)) = self.later.pop_first() {
                self.wanted.push_back(by);
            }
        }
        self.make_room(now);
    }

    /// Returns what is to be done next.
    pub(in crate::node) fn next_step(&mut self) -> Option<Step> {
        self.steps.pop_front()
    }

    /// Returns the number of queue pairs, those too that are being opened or put away.
    #[cfg(test)]
    pub(in crate::node) fn len(&self) -> usize {
        self.live
    }
}

#[cfg(test)]
mod tests;
