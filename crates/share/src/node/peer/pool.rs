//! Which shared queue pairs there are: at most a limit of them, those in use and those that were used last. No I/O and no clock.
//!
//! A queue pair is opened when it is wanted and there is none. At the limit, the one that has been idle for longest is closed for it; while all of them
//! have something in flight, those that are wanted wait. One that nobody has used for [`IDLE_TIME`] is closed.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::{SharedBy, SharedId};

/// Time after which a shared queue pair that nobody uses is closed.
pub(super) const IDLE_TIME: Duration = Duration::from_secs(30);
/// Time after which one that a peer had no room for is asked for again.
pub(super) const AGAIN_TIME: Duration = Duration::from_millis(20);

/// Actions for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Open a queue pair: [`Pool::opened`] or [`Pool::ended`] follows.
    Open(SharedId, SharedBy),
    /// Close one: [`Pool::ended`] or [`Pool::stays`] follows.
    Close(SharedId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Opening,
    Open,
    Closing,
}

#[derive(Debug)]
struct Entry {
    by: SharedBy,
    /// Set if this node has asked for it.
    is_asked: bool,
    state: State,
    is_busy: bool,
    used: Instant,
}

/// The shared queue pairs of a node.
#[derive(Debug)]
pub(super) struct Pool {
    limit: usize,
    entries: BTreeMap<SharedId, Entry>,
    /// The one to send on.
    by: HashMap<SharedBy, SharedId>,
    /// Those that are open and have nothing in flight, by their last use.
    idle: BTreeSet<(Instant, SharedId)>,
    /// Those that are wanted and wait for room, in their order.
    wanted: VecDeque<SharedBy>,
    is_wanted: HashSet<SharedBy>,
    /// Those that a peer had no room for, by the time at which they are wanted again.
    later: BTreeSet<(Instant, SharedBy)>,
    steps: VecDeque<Step>,
    /// Time at which room is to be made once more.
    again: Option<Instant>,
    closing: usize,
    next: u64,
}

impl Pool {
    /// Makes a pool for at most `limit` queue pairs.
    pub(super) fn new(limit: usize) -> Pool {
        Pool {
            limit: limit.max(1),
            entries: BTreeMap::new(),
            by: HashMap::new(),
            idle: BTreeSet::new(),
            wanted: VecDeque::new(),
            is_wanted: HashSet::new(),
            later: BTreeSet::new(),
            steps: VecDeque::new(),
            again: None,
            closing: 0,
            next: 0,
        }
    }

    /// Returns the queue pair to send on, if it is open. If not, it is opened, or waits for room.
    pub(super) fn want(&mut self, now: Instant, by: &SharedBy) -> Option<SharedId> {
        if let Some(id) = self.by.get(by).copied() {
            let is_open = self
                .entries
                .get(&id)
                .is_some_and(|entry| entry.state == State::Open);
            if is_open {
                self.touch(now, id);
            }
            return is_open.then_some(id);
        }
        if self.is_wanted.insert(by.clone()) {
            self.wanted.push_back(by.clone());
            self.make_room(now);
        }
        None
    }

    /// Forgets that a queue pair is wanted.
    pub(super) fn unwant(&mut self, by: &SharedBy) {
        if self.is_wanted.remove(by) {
            self.wanted.retain(|other| other != by);
            self.later.retain(|(_, other)| other != by);
        }
    }

    /// Forgets what is wanted of a peer, and returns it.
    pub(super) fn forget(&mut self, peer: IpAddr) -> Vec<SharedBy> {
        let of_peer = |by: &&SharedBy| by.peer == peer;
        let wanted: Vec<SharedBy> = self.is_wanted.iter().filter(of_peer).cloned().collect();
        wanted.iter().for_each(|by| self.unwant(by));
        wanted
    }

    /// Adds a queue pair that a peer asks for; `instead`: in place of one that this node has asked for. `None`: there is no room now.
    pub(super) fn accept(
        &mut self,
        now: Instant,
        by: &SharedBy,
        instead: Option<SharedId>,
    ) -> Option<SharedId> {
        if let Some(id) = instead {
            self.entries.get_mut(&id)?.is_asked = false;
            return Some(id);
        }
        if self.entries.len() >= self.limit {
            if self.closing == 0 {
                self.evict();
            }
            return None;
        }
        self.unwant(by);
        let id = self.add(now, by, false);
        self.by.entry(by.clone()).or_insert(id);
        Some(id)
    }

    fn add(&mut self, now: Instant, by: &SharedBy, is_asked: bool) -> SharedId {
        self.next += 1;
        let id = SharedId(self.next);
        let entry = Entry {
            by: by.clone(),
            is_asked,
            state: State::Opening,
            is_busy: false,
            used: now,
        };
        self.entries.insert(id, entry);
        id
    }

    /// Returns the queue pair that this node is asking a peer for.
    pub(super) fn asked_for(&self, by: &SharedBy) -> Option<SharedId> {
        let id = self.by.get(by)?;
        let entry = self.entries.get(id)?;
        (entry.is_asked && entry.state == State::Opening).then_some(*id)
    }

    /// Opens what is wanted, as far as there is room, and closes what is idle to make room.
    fn make_room(&mut self, now: Instant) {
        while let Some(by) = self.wanted.front().cloned() {
            let is_there = self.by.contains_key(&by);
            if !is_there && self.entries.len() >= self.limit {
                while self.closing < self.wanted.len() && self.evict() {}
                return;
            }
            self.wanted.pop_front();
            self.is_wanted.remove(&by);
            if !is_there {
                let id = self.add(now, &by, true);
                self.by.insert(by.clone(), id);
                self.steps.push_back(Step::Open(id, by));
            }
        }
    }

    /// Begins to close the queue pair that has been idle for longest.
    fn evict(&mut self) -> bool {
        let first = self.idle.pop_first();
        if let Some((_, id)) = first {
            self.close(id);
        }
        first.is_some()
    }

    fn close(&mut self, id: SharedId) {
        let Some(entry) = self.entries.get_mut(&id) else {
            return;
        };
        self.idle.remove(&(entry.used, id));
        entry.state = State::Closing;
        self.closing += 1;
        // Nobody sends on it: who wants one gets another one.
        if self.by.get(&entry.by) == Some(&id) {
            self.by.remove(&entry.by);
        }
        self.steps.push_back(Step::Close(id));
    }

    /// Takes note that a queue pair is open.
    pub(super) fn opened(&mut self, now: Instant, id: SharedId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.state == State::Opening
        {
            entry.state = State::Open;
            self.touch(now, id);
        }
    }

    /// Takes note that a peer had no room for a queue pair: it is asked for again a little later.
    pub(super) fn later(&mut self, now: Instant, id: SharedId) {
        if let Some(by) = self.remove(id) {
            self.later.insert((now + AGAIN_TIME, by.clone()));
            self.is_wanted.insert(by);
        }
        self.make_room(now);
    }

    /// Takes note that there is no such queue pair any more.
    pub(super) fn ended(&mut self, now: Instant, id: SharedId) {
        self.remove(id);
        self.make_room(now);
    }

    fn remove(&mut self, id: SharedId) -> Option<SharedBy> {
        let entry = self.entries.remove(&id)?;
        self.idle.remove(&(entry.used, id));
        self.closing -= usize::from(entry.state == State::Closing);
        if self.by.get(&entry.by) == Some(&id) {
            self.by.remove(&entry.by);
        }
        Some(entry.by)
    }

    /// Takes note that the peer has something in flight on a queue pair that was to be closed.
    pub(super) fn stays(&mut self, now: Instant, id: SharedId) {
        if let Some(entry) = self.entries.get_mut(&id)
            && entry.state == State::Closing
        {
            entry.state = State::Open;
            self.closing -= 1;
            self.by.entry(entry.by.clone()).or_insert(id);
            self.touch(now, id);
        }
        // Room is made a little later: the peer would say the same at once.
        if !self.wanted.is_empty() {
            self.again = Some(now + AGAIN_TIME);
        }
    }

    /// Takes note that a queue pair has something in flight, or nothing more. Both count as a use.
    pub(super) fn set_busy(&mut self, now: Instant, id: SharedId, is_busy: bool) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.is_busy = is_busy;
            self.touch(now, id);
            if !is_busy {
                self.make_room(now);
            }
        }
    }

    fn touch(&mut self, now: Instant, id: SharedId) {
        if let Some(entry) = self.entries.get_mut(&id) {
            self.idle.remove(&(entry.used, id));
            entry.used = now;
            if !entry.is_busy && entry.state == State::Open {
                self.idle.insert((now, id));
            }
        }
    }

    /// Returns whether a queue pair may be closed: it has nothing in flight.
    pub(super) fn is_idle(&self, id: SharedId) -> bool {
        self.entries.get(&id).is_some_and(|entry| !entry.is_busy)
    }

    /// Returns when [`Pool::check_time`] is to be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let idle = self.idle.first().map(|(used, _)| *used + IDLE_TIME);
        let later = self.later.first().map(|(at, _)| *at);
        [idle, later, self.again].into_iter().flatten().min()
    }

    /// Closes what nobody has used for long, and asks again for what a peer had no room for.
    pub(super) fn check_time(&mut self, now: Instant) {
        while let Some((used, id)) = self.idle.first().copied()
            && used + IDLE_TIME <= now
        {
            self.close(id);
        }
        while let Some((at, _)) = self.later.first()
            && *at <= now
        {
            if let Some((_, by)) = self.later.pop_first() {
                self.wanted.push_back(by);
            }
        }
        self.again = self.again.filter(|again| *again > now);
        self.make_room(now);
    }

    /// Returns what is to be done next.
    pub(super) fn next_step(&mut self) -> Option<Step> {
        self.steps.pop_front()
    }

    /// Returns the number of queue pairs, those too that are being opened or closed.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests;
