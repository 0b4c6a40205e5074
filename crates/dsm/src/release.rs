//! The coherence protocol of a region with release consistency, as a state machine without I/O or clock.
//!
//! [`Node`] is one node's part. Several nodes may write a unit at the same time, each in a copy of its own. A node sees the writes of another one
//! when a thread of the one has *released*, a thread of the other has *acquired* after that, and the program knows that it was after that: by a lock,
//! a barrier, a condition or a word, which release before and acquire behind. For programs without data races this is sequential consistency.
//!
//! # Protocol
//!
//! Each unit has a home ([`Homes`]), whose frame has the writes of all that have released. There is no directory: nobody knows who has copies.
//! As in [`protocol`](crate::protocol), nobody writes into the frame of another node, since a node that was stopped in the middle of a copy finishes
//! it when it goes on.
//!
//! 1. A node whose program reads a unit reads it from the home's frame into its own. The home does nothing for that.
//! 2. A node whose program writes a unit keeps a second copy of it, the *twin*, which has the contents of before. The home needs none.
//! 3. A *release* protects all units that the node's threads have written, and sends *Flush* to their homes. A home reads unit and twin
//!    from the node, stores the bytes that differ into its own frame, and answers *Flushed*. When all homes have answered, the node adds the units
//!    to its *log*, which others read. Threads that write such a unit meanwhile wait for Flushed.
//! 4. An *acquire* reads what the logs of all others have got since this node's last look, and takes those units away from the program. The next
//!    touch reads them from the home.
//!
//! The log has a notice after the home has the writes, and before the releasing thread goes on. So who acquires after the release finds it. A notice may
//! come to nodes that have no business with it: that costs them a read of the unit, and saves the messages of locks and barriers all notices, and nodes
//! all vector clocks.
//!
//! Threads of one node share its copies: the release of one releases the writes of all, and the acquire of one is that of all.
//!
//! ## States of a unit at a node
//!
//! | state | event | next | output |
//! |---|---|---|---|
//! | absent | fault | Pulling; at the home Clean or Dirty | Pull; Protect |
//! | Pulling | the contents have landed | Clean; Dirty if a write waits | Protect; Copy, Protect |
//! | Pulling | the same, and it was noticed since | Pulling | Pull |
//! | Clean | fault to write | Dirty | Copy but at the home, Protect |
//! | Clean | it is noticed | absent | Protect |
//! | Dirty | release | Flushing; at the home Clean | Protect, Flush |
//! | Dirty, Flushing | it is noticed | as before, and stale: a release begins | |
//! | Flushing | fault to write | as before: the write waits | |
//! | Flushing | Flushed | Clean; absent if it is stale; as after a fault if a write waits | Protect |
//!
//! Notices about units whose home is this node mean nothing: its frame has the writes already.
//!
//! Releases are carried out one after the other, and so are acquires. A thread whose release begins while one is carried out waits for the next one,
//! which it shares with all that have come meanwhile.
//!
//! ## Nodes that leave
//!
//! All is as in [`protocol`](crate::protocol) but for the following.
//!
//! - The writes that a node has not released are lost; those that its flushes have brought home may stay.
//! - Nobody can read the log of a node that is gone. So the next acquire takes all copies away.
//! - Units whose *home* is gone are poisoned at their next fault. Copies stay as they are until the next acquire. A release that has such units to flush
//!   poisons them, and fails with the name of the home.
//!
//! A member can spoil contents by what it logs and what it lets others read, and wait with its answers until it is expelled ([`Node::waits`]).
//!
//! ## Memory
//!
//! A node stores the units that its program has and those of them that are written, and at most one flush of each unit and node whose home it is.

pub(crate) mod diff;
pub mod log;
mod rounds;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use rdmux_wire::dsm::notice::Run;

use self::rounds::Rounds;
use crate::Access;
use crate::peers::{Ahead, Peers};
use crate::protocol::{Body, Homes, Message, NodeId, Right, Settings, Violation, Wait};

/// Number of a release of nothing.
const NOTHING: u64 = 0;

/// A task of the driver, which carries all out in their order before it hands in the next event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message.
    Send {
        /// The receiver.
        to: NodeId,
        /// The message.
        message: Message,
    },
    /// Begin to read the unit from its home's frame into the own one, and call [`Node::handle_pulled`] at the end.
    Pull {
        /// The unit.
        unit: u64,
        /// Number of the task.
        task: u64,
    },
    /// Copy the own frame of the unit to its twin.
    Copy {
        /// The unit.
        unit: u64,
    },
    /// Protect the program's view of the unit, on all processors, and let threads go on that wait for it.
    Protect {
        /// The unit.
        unit: u64,
        /// The program's right from now on.
        right: Right,
    },
    /// Let the threads go on that wait for the unit. They may fault again.
    Wake {
        /// The unit.
        unit: u64,
    },
    /// End the waits for the unit, and all later uses of it, with an error that names a node.
    Poison {
        /// The unit.
        unit: u64,
        /// The node with which it was lost.
        node: NodeId,
    },
    /// Begin to read the unit and its twin from another node into a slot, and call [`Node::handle_fetched`] at the end.
    Fetch {
        /// The unit.
        unit: u64,
        /// The slot.
        slot: usize,
        /// The node.
        from: NodeId,
    },
    /// Store the bytes of the unit by which the two copies in a slot differ into the own frame.
    Apply {
        /// The unit.
        unit: u64,
        /// The slot.
        slot: usize,
    },
    /// Add units to the own log.
    Append {
        /// The units.
        run: Run,
    },
    /// Begin to read what is new in the log of another node, and call [`Node::handle_looked`] at the end.
    Look {
        /// The node.
        node: NodeId,
    },
    /// Releases or acquires have ended: let the threads look that wait for them.
    Ended,
    /// A node does not keep to the protocol: expel it.
    Accuse {
        /// The node.
        node: NodeId,
        /// The message that it sent.
        violation: Violation,
    },
}

/// Result of a look at a log.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Looked {
    /// These are all units since the last look.
    Runs(Vec<Run>),
    /// More were written than the log has room for, or it makes no sense.
    Lapped,
    /// It could not be read. The node, or this one, is about to leave.
    Failed,
}

/// State of a unit that the program may access or waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum State {
    /// The contents are being read.
    Pulling(u64),
    /// The program may read.
    Clean,
    /// The program may write.
    Dirty,
    /// The program may read, and the home reads the writes.
    Flushing,
    /// It was lost with a node.
    Poisoned(NodeId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Unit {
    state: State,
    /// An access that waits for the state to end.
    wanted: Option<Access>,
    /// The contents are older than a notice.
    is_stale: bool,
}

/// A flush that this node carries out as the home of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flush {
    from: NodeId,
    unit: u64,
    request: u64,
}

/// One node's part of a region.
///
/// Each `handle_` method takes an event; afterwards the driver carries out the actions of [`Node::poll_action`] until there is none. Nothing here
/// waits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    region: u32,
    number_of_units: u64,
    homes: Homes,
    peers: Peers,
    /// Units that are not absent.
    units: BTreeMap<u64, Unit>,
    /// Units that are Dirty.
    dirty: BTreeSet<u64>,
    /// Number of the next read.
    task: u64,
    releases: Rounds,
    /// Units of the release in progress, and how many of them are Flushing.
    released: BTreeSet<u64>,
    flushing: u64,
    /// The last release that has lost units, and the node with which.
    failure: Option<(u64, NodeId)>,
    acquires: Rounds,
    /// Nodes whose logs are being read.
    looking: BTreeSet<NodeId>,
    /// The notices that were found there.
    noticed: Vec<Run>,
    /// All copies may be older than a notice.
    all_noticed: bool,
    /// The release that the acquire in progress waits for.
    flushed_by: Option<u64>,
    /// Flushes whose copies are being read, by slot, and those that wait.
    slots: Vec<Option<Flush>>,
    queue: VecDeque<Flush>,
    /// Units of all these, with the nodes.
    fetching: BTreeSet<(u64, NodeId)>,
    actions: VecDeque<Action>,
}

impl Node {
    /// Makes the part of one node, `own`, that carries out so many flushes at a time. At the beginning no program has a right, and the frame of
    /// each unit's home has its contents. If the first touch makes the homes of a region, their registrars are the homes here.
    ///
    /// # Panics
    /// If there are no slots.
    pub fn new(own: NodeId, settings: &Settings, slots: usize) -> Node {
        assert!(slots > 0, "flushes need a slot");
        Node {
            region: settings.region,
            number_of_units: settings.units,
            homes: settings.homes.clone(),
            peers: Peers::new(own, settings.epoch, &settings.members),
            units: BTreeMap::new(),
            dirty: BTreeSet::new(),
            task: 0,
            releases: Rounds::default(),
            released: BTreeSet::new(),
            flushing: 0,
            failure: None,
            acquires: Rounds::default(),
            looking: BTreeSet::new(),
            noticed: Vec::new(),
            all_noticed: false,
            flushed_by: None,
            slots: vec![None; slots],
            queue: VecDeque::new(),
            fetching: BTreeSet::new(),
            actions: VecDeque::new(),
        }
    }

    /// Takes a fault of the program: an access for which the view lacks a right. The thread waits until an action about the unit has changed that.
    ///
    /// # Panics
    /// If the region has no such unit.
    pub fn handle_fault(&mut self, unit: u64, access: Access) {
        let all = self.number_of_units;
        assert!(unit < all, "unit {unit} of {all}");
        let Some(it) = self.units.get_mut(&unit) else {
            self.bring(unit, access);
            return;
        };
        match (it.state, access) {
            (State::Poisoned(node), _) => self.act(Action::Poison { unit, node }),
            (State::Pulling(_), _) | (State::Flushing, Access::Write) => {
                it.wanted = it.wanted.max(Some(access))
            }
            (State::Clean, Access::Write) => self.open(unit, access),
            (State::Clean | State::Flushing | State::Dirty, _) => self.act(Action::Wake { unit }),
        }
    }

    /// Takes a message of another node.
    ///
    /// # Errors
    /// The message has to wait, as [`protocol::Node::handle_message`](crate::protocol::Node::handle_message) describes.
    pub fn handle_message(&mut self, from: NodeId, message: &Message) -> Result<(), Ahead> {
        if self.peers.arrived(from, message.epoch, message.sequence)?
            && let Err(violation) = self.dispatch(from, message)
        {
            self.act(Action::Accuse {
                node: from,
                violation,
            });
        }
        Ok(())
    }

    /// Takes the end of [`Action::Pull`]: whether the contents have landed. The end of a task that is not in progress is ignored. Reads from
    /// a node that is a member fail only if one of the two nodes is about to leave.
    pub fn handle_pulled(&mut self, unit: u64, task: u64, has_landed: bool) {
        let Some(it) = self.units.get(&unit) else { return };
        if it.state != State::Pulling(task) || !has_landed {
            // The unit waits for the end of its home.
            return;
        }
        let access = it.wanted.unwrap_or(Access::Read);
        match it.is_stale && !mutant!(StaleTaken) {
            true => self.bring(unit, access),
            false => self.open(unit, access),
        }
    }

    /// Takes the end of [`Action::Fetch`]: whether both copies have landed. A read that has failed comes before the news that its source is gone.
    pub fn handle_fetched(&mut self, slot: usize, has_landed: bool) {
        let Some(Flush { from, unit, request }) = self.slots[slot].take() else {
            return;
        };
        self.fetching.remove(&(unit, from));
        if has_landed {
            self.act(Action::Apply { unit, slot });
            self.post(from, unit, request, Body::Flushed);
        }
        self.fetch();
    }

    /// Takes the end of [`Action::Look`]. One that nothing waits for is ignored.
    pub fn handle_looked(&mut self, node: NodeId, looked: Looked) {
        if looked == Looked::Failed || !self.looking.remove(&node) {
            // The acquire waits for the end of the node.
            return;
        }
        match looked {
            Looked::Runs(runs) => self.noticed.extend(runs),
            _ => self.all_noticed |= !mutant!(LapForgotten),
        }
        self.take_noticed();
    }

    /// Takes the news that an epoch has begun, with the nodes that have left since the one before which this node has heard of; maybe this one.
    /// An epoch that is not newer is ignored. The driver offers again the messages that wait ([`Ahead`]).
    pub fn handle_gone(&mut self, epoch: u64, gone: &[NodeId]) {
        if epoch <= self.peers.epoch() {
            return;
        }
        self.peers.remove(epoch, gone);
        self.queue.retain(|flush| !gone.contains(&flush.from));
        self.fetching.retain(|(_, from)| !gone.contains(from));
        let is_expelled = !self.peers.is_member(self.peers.own());
        let units: Vec<(u64, State)> = self.units.iter().map(|(unit, it)| (*unit, it.state)).collect();
        for (unit, state) in units {
            let is_waiting = matches!(state, State::Pulling(_) | State::Flushing);
            if let Some(node) = self.lost_with(unit)
                && (is_expelled || is_waiting)
            {
                self.lose(unit, node);
            }
        }
        self.all_noticed |= !mutant!(DepartureForgotten);
        let is_looking = !self.looking.is_empty();
        self.looking.retain(|node| !is_expelled && !gone.contains(node));
        if is_looking {
            self.take_noticed();
        }
        self.try_end_release();
    }

    /// Begins to release all that the program has written. Returns the number of the release, for [`Node::released`].
    pub fn handle_release(&mut self) -> u64 {
        if self.dirty.is_empty() && self.releases.is_idle() {
            return NOTHING;
        }
        let (round, begins) = self.releases.ask();
        if begins {
            self.begin_release();
        }
        round
    }

    /// Returns whether a release has ended: an error names a node with which units were lost that it, or a later one, had to flush.
    pub fn released(&self, round: u64) -> Option<Result<(), NodeId>> {
        let failure = self.failure.filter(|(of, _)| *of >= round && round != NOTHING);
        let outcome = failure.map_or(Ok(()), |(_, node)| Err(node));
        self.releases.has_ended(round).then_some(outcome)
    }

    /// Begins to acquire what others have released. Returns the number of the acquire, for [`Node::acquired`].
    pub fn handle_acquire(&mut self) -> u64 {
        let (round, begins) = self.acquires.ask();
        if begins {
            self.begin_acquire();
        }
        round
    }

    /// Returns whether an acquire has ended.
    pub fn acquired(&self, round: u64) -> bool {
        self.acquires.has_ended(round)
    }

    /// Returns the next task of the driver.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns the home of a unit.
    pub fn home(&self, unit: u64) -> NodeId {
        self.homes.of(unit)
    }

    /// Returns whether an access to the unit waits.
    pub fn is_awaited(&self, unit: u64) -> bool {
        self.units.get(&unit).is_some_and(|it| it.wanted.is_some())
    }

    /// Returns the homes that this node waits for, each with the unit. One that stays among them longer than the driver allows for is to be expelled.
    pub fn waits(&self) -> impl Iterator<Item = Wait> {
        let own = self.peers.own();
        let is_flushing = |unit: &&u64| {
            self.units
                .get(*unit)
                .is_some_and(|it| it.state == State::Flushing)
        };
        let flushing = self.released.iter().filter(is_flushing);
        flushing.map(move |unit| Wait {
            unit: *unit,
            request: (own, self.releases.begun()),
            node: self.homes.of(*unit),
        })
    }

    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    fn post(&mut self, to: NodeId, unit: u64, request: u64, body: Body) {
        if let Some(sequence) = self.peers.number(to) {
            let message = Message {
                region: self.region,
                epoch: self.peers.epoch(),
                sequence,
                request,
                unit,
                body,
            };
            self.act(Action::Send { to, message });
        }
    }

    fn dispatch(&mut self, from: NodeId, message: &Message) -> Result<(), Violation> {
        let Message { unit, request, .. } = *message;
        if message.region != self.region || unit >= self.number_of_units {
            return Err(Violation::NoSuchUnit);
        }
        let home = self.homes.of(unit);
        match message.body {
            Body::Flush if home == self.peers.own() => self.flush(Flush { from, unit, request }),
            Body::Flushed if home == from => self.flushed(unit, request),
            Body::Flush | Body::Flushed => Err(Violation::NotHome),
            _ => Err(Violation::Unexpected),
        }
    }

    /// Returns the node with which a unit that is not here is lost.
    fn lost_with(&self, unit: u64) -> Option<NodeId> {
        let nodes = [self.peers.own(), self.homes.of(unit)];
        nodes.into_iter().find(|node| !self.peers.is_member(*node))
    }

    /// Gets the contents of a unit that the program may not access.
    fn bring(&mut self, unit: u64, access: Access) {
        if let Some(node) = self.lost_with(unit) {
            self.lose(unit, node);
        } else if self.homes.of(unit) == self.peers.own() {
            self.open(unit, access);
        } else {
            let task = self.task;
            self.task += 1;
            let wanted = Some(access);
            self.set(unit, State::Pulling(task), wanted);
            self.act(Action::Pull { unit, task });
        }
    }

    /// Lets the program access a unit whose contents are there.
    fn open(&mut self, unit: u64, access: Access) {
        let right = access.needs();
        if access == Access::Read {
            self.set(unit, State::Clean, None);
        } else {
            if self.homes.of(unit) != self.peers.own() && !mutant!(TwinForgotten) {
                self.act(Action::Copy { unit });
            }
            self.set(unit, State::Dirty, None);
            self.dirty.insert(unit);
        }
        self.act(Action::Protect { unit, right });
    }

    fn set(&mut self, unit: u64, state: State, wanted: Option<Access>) {
        let is_stale = false;
        self.units.insert(
            unit,
            Unit {
                state,
                wanted,
                is_stale,
            },
        );
    }

    /// Takes a unit away from the program.
    fn drop_unit(&mut self, unit: u64) {
        self.units.remove(&unit);
        let right = Right::Invalid;
        self.act(Action::Protect { unit, right });
    }

    /// Poisons a unit.
    fn lose(&mut self, unit: u64, node: NodeId) {
        let before = self.units.get(&unit).map(|it| it.state);
        if before == Some(State::Flushing) {
            self.flushing -= 1;
            self.failure = Some((self.releases.begun(), node));
        }
        self.dirty.remove(&unit);
        self.set(unit, State::Poisoned(node), None);
        self.act(Action::Poison { unit, node });
    }

    fn begin_release(&mut self) {
        let own = self.peers.own();
        let round = self.releases.begun();
        self.released = std::mem::take(&mut self.dirty);
        if mutant!(NoticedEarly) {
            self.append();
        }
        let released: Vec<u64> = self.released.iter().copied().collect();
        for unit in released.iter().copied() {
            let right = Right::Shared;
            if !(mutant!(HomeUnprotected) && self.homes.of(unit) == own) {
                self.act(Action::Protect { unit, right });
            }
        }
        for unit in released {
            if let Some(node) = self.lost_with(unit) {
                self.lose(unit, node);
                self.failure = Some((round, node));
                continue;
            }
            let home = self.homes.of(unit);
            let Some(it) = self.units.get_mut(&unit) else {
                continue;
            };
            if home == own {
                it.state = State::Clean;
            } else {
                it.state = State::Flushing;
                self.flushing += 1;
                self.post(home, unit, round, Body::Flush);
            }
        }
        self.try_end_release();
    }

    /// Ends releases that wait for no home.
    fn try_end_release(&mut self) {
        while !self.releases.is_idle() && self.flushing == 0 {
            if !mutant!(NoticedEarly) {
                self.append();
            }
            self.released.clear();
            let begins_next = self.releases.end();
            self.act(Action::Ended);
            self.try_end_acquire();
            if begins_next {
                self.begin_release();
                return;
            }
        }
    }

    /// Adds the units of the release to the log, but those that are lost.
    fn append(&mut self) {
        let mut runs: Vec<Run> = Vec::new();
        for unit in &self.released {
            let is_lost = |it: &Unit| matches!(it.state, State::Poisoned(_));
            let (Ok(first), false) = (u32::try_from(*unit), self.units.get(unit).is_some_and(is_lost)) else {
                continue;
            };
            match runs.last_mut() {
                Some(last) if last.first + last.count == first => last.count += 1,
                _ => runs.push(Run { first, count: 1 }),
            }
        }
        self.actions
            .extend(runs.into_iter().map(|run| Action::Append { run }));
    }

    /// Takes a flush of another node's unit, whose home is this node.
    fn flush(&mut self, flush: Flush) -> Result<(), Violation> {
        if !self.fetching.insert((flush.unit, flush.from)) {
            return Err(Violation::Unexpected);
        }
        self.queue.push_back(flush);
        self.fetch();
        Ok(())
    }

    /// Begins the next flushes.
    fn fetch(&mut self) {
        let free = |it: &Option<Flush>| it.is_none();
        while let Some(slot) = self.slots.iter().position(free)
            && let Some(flush) = self.queue.pop_front()
        {
            let Flush { from, unit, .. } = flush;
            self.slots[slot] = Some(flush);
            self.act(Action::Fetch { unit, slot, from });
        }
    }

    /// Takes the home's answer.
    fn flushed(&mut self, unit: u64, request: u64) -> Result<(), Violation> {
        let round = self.releases.begun();
        let Some(it) = self.units.get_mut(&unit) else {
            return Err(Violation::Unexpected);
        };
        if it.state != State::Flushing || request != round {
            return Err(Violation::Unexpected);
        }
        self.flushing -= 1;
        let Unit { wanted, is_stale, .. } = *it;
        it.state = State::Clean;
        if is_stale {
            self.drop_unit(unit);
        }
        match wanted {
            Some(access) if is_stale => self.bring(unit, access),
            Some(access) => self.open(unit, access),
            None => {}
        }
        self.try_end_release();
        Ok(())
    }

    fn begin_acquire(&mut self) {
        let own = self.peers.own();
        self.looking = self.peers.members().filter(|node| *node != own).collect();
        for node in self.looking.clone() {
            self.act(Action::Look { node });
        }
        self.take_noticed();
    }

    /// Takes all units away that were noticed, when all logs are read.
    fn take_noticed(&mut self) {
        if !self.looking.is_empty() || self.acquires.is_idle() || self.flushed_by.is_some() {
            return;
        }
        let noticed = std::mem::take(&mut self.noticed);
        let units: BTreeSet<u64> = match std::mem::take(&mut self.all_noticed) {
            true => self.units.keys().copied().collect(),
            false => {
                let range = |run: &Run| run.first.into()..u64::from(run.first) + u64::from(run.count);
                let cached = noticed.iter().flat_map(|run| self.units.range(range(run)));
                cached.map(|(unit, _)| *unit).collect()
            }
        };
        let own = self.peers.own();
        // The release in progress, or the next one.
        let mut flushed_by = None;
        for unit in units {
            let Some(it) = self.units.get_mut(&unit) else {
                continue;
            };
            if self.homes.of(unit) == own {
                continue;
            }
            match it.state {
                State::Clean => self.drop_unit(unit),
                State::Pulling(_) => it.is_stale = true,
                State::Dirty if mutant!(DirtyDropped) => {
                    self.dirty.remove(&unit);
                    self.drop_unit(unit);
                }
                State::Dirty | State::Flushing => {
                    it.is_stale = true;
                    let is_flushing = it.state == State::Flushing;
                    flushed_by = flushed_by.max(Some(match is_flushing {
                        true => self.releases.begun(),
                        false => self.releases.begun() + 1,
                    }));
                }
                State::Poisoned(_) => {}
            }
        }
        self.flushed_by = flushed_by;
        if flushed_by > Some(self.releases.begun()) {
            self.handle_release();
        }
        self.try_end_acquire();
    }

    /// Ends acquires that wait for nothing.
    fn try_end_acquire(&mut self) {
        let is_flushed = self.flushed_by.is_none_or(|it| self.releases.has_ended(it));
        if self.acquires.is_idle() || !self.looking.is_empty() || !is_flushed {
            return;
        }
        self.flushed_by = None;
        let begins_next = self.acquires.end();
        self.act(Action::Ended);
        if begins_next {
            self.begin_acquire();
        }
    }
}
