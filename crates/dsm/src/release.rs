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
//! 3. A *release* protects all units that the node's threads have written, compares them with their twins, and sends *Flush* to the homes of those
//!    that differ: a message for each *run*, some neighbours with the same home. A home gets what was written, as below, and answers *Flushed*. When
//!    all homes have answered, the node adds the units to its *log*, which others read. Threads that write such a unit meanwhile wait for Flushed.
//! 4. An *acquire* reads what the logs of all others have got since this node's last look, and takes those units away from the program. The next
//!    touch reads them from the home.
//!
//! The log has a notice after the home has the writes, and before the releasing thread goes on. So who acquires after the release finds it. A notice may
//! come to nodes that have no business with it: that costs them a read of the unit, and saves the messages of locks and barriers all notices, and nodes
//! all vector clocks.
//!
//! Threads of one node share its copies: the release of one releases the writes of all, and the acquire of one is that of all.
//!
//! ## Contents of a flush
//!
//! Nodes may write different bytes of a unit, even of a word, so a home must keep the bytes of its frame that others have written. It knows for each
//! unit whose twin has the contents of the frame:
//!
//! - Nobody has written the unit yet: then each twin has them.
//! - A node has flushed the unit, after which copy and frame were the same, and no other node has flushed it since, nor has the home's program
//!   written it. The node's next twin is that copy, or was read from that frame.
//!
//! A flush of such units *lands*: the home reads them straight into its own frames. The bytes that the node has not written get the value that they
//! have. No other flush of these units is carried out meanwhile, and the home's program gets no right to write them before the end. Flushes that wait for
//! that are overtaken by later ones, but not by those of the same units.
//!
//! For all other flushes the home reads units and twins into a slot, stores the bytes that differ into its frames, and compares frames and copies. So a
//! unit that another node writes from some time on lands again from the second flush on.
//!
//! A unit that does not differ from its twin needs neither flush nor notice: who reads it from the home reads what was written.
//!
//! ## States of a unit at a node
//!
//! | state | event | next | output |
//! |---|---|---|---|
//! | absent | fault | Pulling; at the home Clean or Dirty | Pull; Protect |
//! | the same, home not known | fault | Locating | Locate |
//! | Locating | Home | as an absent one after the fault | as there |
//! | Locating | the registrar is gone | poisoned | Poison |
//! | Pulling | the contents have landed | Clean; Dirty if a write waits | Protect; Copy, Protect |
//! | Pulling | the same, and it was noticed since | Pulling | Pull |
//! | Clean | fault to write | Dirty | Copy but at the home, Protect |
//! | Clean | it is noticed | absent | Protect |
//! | Dirty | release | Flushing; at the home Clean | Protect; but at the home Compare |
//! | Flushing | it differs from its twin | as before | Flush |
//! | Flushing | it does not | as after Flushed | |
//! | Dirty, Flushing | it is noticed | as before, and stale: a release begins | |
//! | Flushing | fault to write | as before: the write waits | |
//! | Flushing | Flushed | Clean; absent if it is stale; as after a fault if a write waits | Protect |
//! | absent, Clean, at the home | fault to write while a flush lands | Clean: the write waits | Protect |
//! | Clean, at the home | the flush has landed, a write waits | Dirty | Protect |
//!
//! Notices about units whose home is this node mean nothing: its frame has the writes already.
//!
//! Releases are carried out one after the other, and so are acquires. A thread whose release begins while one is carried out waits for the next one,
//! which it shares with all that have come meanwhile.
//!
//! ## Homes by first touch
//!
//! Registrars are as in [`protocol`](crate::protocol): a node that does not know the home of a unit sends *Locate* to the unit's registrar, which makes
//! the first one that sends it the home, for good, and answers all with *Home*. A node may hear of a home before that hears of itself. Such a node's
//! reads and flushes are carried out as any others: the program of the home has no right to the unit yet, so nothing else is done in its frame. A node
//! cannot tell whether a sender of Flush was misled about the home, or lies. So in such a region it carries out all of them, which spoils
//! contents at most.
//!
//! ## Nodes that leave
//!
//! All is as in [`protocol`](crate::protocol) but for the following.
//!
//! - The writes that a node has not released are lost; those that its flushes have brought home may stay, also of a part of a unit.
//! - Nobody can read the log of a node that is gone. So the next acquire takes all copies away.
//! - A home may still store a flush of the node when others know that it is gone. So each node that has heard of an epoch, and stores nothing more of
//!   nodes that are gone by then, tells this to all others (*Settled*), and acquires of an epoch wait for that of all members. Who has then got the lock
//!   of a node that is gone reads what stays of its writes, and no more of them comes after its own.
//! - A unit whose *registrar* is gone is poisoned at the nodes that it has not answered. One of them may be the home for others, which go on: its frame
//!   serves, and its own program cannot use the unit.
//! - Units whose *home* is gone are poisoned at their next fault. Copies stay as they are until the next acquire. A release that has such units to flush
//!   poisons them, and fails with the name of the home.
//!
//! A member can spoil contents by what it logs and what it lets others read, and wait with its answers until it is expelled ([`Node::waits`]).
//!
//! ## Memory
//!
//! A node stores the units that its program has and those of them that are written. Of the units whose home it is it stores those that were ever written, with
//! the last writer, and at most one flush of each unit and node. If the first touch makes the homes, it stores those that it knows: of units that it has
//! located, and of those whose registrar it is; and a member can make it store a last writer and a flush of each unit.

pub(crate) mod diff;
mod flushes;
pub mod log;
mod rounds;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use rdmux_wire::dsm::notice::Run;

use self::flushes::{Begun, Flush, Flushes, Stage};
use self::rounds::Rounds;
use crate::Access;
use crate::peers::{Ahead, Peers};
use crate::protocol::{Body, Homes, Message, NodeId, Right, Settings, Violation, Wait};

/// Flushes of other nodes that the driver carries out at a time.
pub const SLOTS: usize = 8;

/// Flushes of a node that its homes have not answered, from which on it compares no more units. A link holds so many messages and more.
const FLUSHES_MAX: usize = 256;

/// Bytes of the units of a flush at most, if it has several.
const RUN_BYTES: u64 = 64 << 10;

/// Returns the units of a flush at most, by the bytes of a unit.
pub fn run_max(unit_bytes: u64) -> u32 {
    (RUN_BYTES / unit_bytes).max(1) as u32
}

/// Number of a release of nothing.
const NOTHING: u64 = 0;

/// Number of the requests for homes; those of flushes are the numbers of releases, from 1 on.
const LOCATE: u64 = 0;

/// A task of the driver, which carries all out in their order. Further events may come before it has carried out those of the last one.
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
        /// The home.
        from: NodeId,
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
    /// Compare units with their twins, and call [`Node::handle_compared`].
    Compare {
        /// The units.
        run: Run,
        /// Number of the task.
        task: u64,
    },
    /// Begin to read units and their twins from another node into a slot, and call [`Node::handle_fetched`] at the end.
    Fetch {
        /// The units.
        run: Run,
        /// The slot.
        slot: usize,
        /// The node.
        from: NodeId,
    },
    /// Begin to read units from another node into the own frames, and call [`Node::handle_fetched`] at the end.
    Land {
        /// The units.
        run: Run,
        /// The slot, whose memory is not used.
        slot: usize,
        /// The node.
        from: NodeId,
    },
    /// Store the bytes by which units in a slot differ from their twins there into the own frames, and call [`Node::handle_applied`].
    Apply {
        /// The units.
        run: Run,
        /// The slot.
        slot: usize,
        /// The program may write some of the frames meanwhile.
        is_shared: bool,
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
    /// Waits for the registrar to name the home.
    Locating,
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

/// One node's part of a region.
///
/// Each `handle_` method takes an event; afterwards the driver carries out the actions of [`Node::poll_action`] until there is none. Nothing here
/// waits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Node {
    region: u32,
    number_of_units: u64,
    homes: Homes,
    /// Homes by first touch: of the units that this node has located, and of those whose registrar it is.
    located: BTreeMap<u64, NodeId>,
    peers: Peers,
    /// Units that are not absent.
    units: BTreeMap<u64, Unit>,
    /// Units that are Locating.
    locating: BTreeSet<u64>,
    /// Units that are Dirty.
    dirty: BTreeSet<u64>,
    /// Number of the next read.
    task: u64,
    releases: Rounds,
    /// Units of the release in progress but those that have not changed, and how many of them are Flushing.
    released: BTreeSet<u64>,
    flushing: u64,
    /// The run of these that is being compared, with the number of the task.
    compared: Option<(u64, Run)>,
    /// Those that are compared next.
    comparing: VecDeque<Run>,
    /// Runs of which the home has been told: number of units by first unit.
    sent: BTreeMap<u64, u32>,
    /// Units of a run at most.
    run_max: u32,
    /// The last release that fails since units were lost, and the node with which: those that were asked for by then had to flush them.
    failure: Option<(u64, NodeId)>,
    /// The last release that a thread has asked for; acquires ask for others.
    of_thread: u64,
    /// The node with which units were lost of which no thread hears: the next release that one asks for fails.
    untold: Option<NodeId>,
    acquires: Rounds,
    /// Nodes whose logs are being read.
    looking: BTreeSet<NodeId>,
    /// The notices that were found there.
    noticed: Vec<Run>,
    /// All copies may be older than a notice.
    all_noticed: bool,
    /// Members that may still store what nodes have written that are gone; this one too.
    unsettled: BTreeSet<NodeId>,
    /// The release that the acquire in progress waits for.
    flushed_by: Option<u64>,
    /// Those of other nodes that this one carries out.
    flushes: Flushes,
    actions: VecDeque<Action>,
}

impl Node {
    /// Makes the part of one node, `own`, that carries out so many flushes at a time, each of at most `run_max` units, the same number at all nodes. At
    /// the beginning no program has a right, and the frames of all nodes have the same contents.
    ///
    /// # Panics
    /// If there are no slots, runs have no units, or the region has 2^32 units or more.
    pub fn new(own: NodeId, settings: &Settings, slots: usize, run_max: u32) -> Node {
        assert!(slots > 0 && run_max > 0, "flushes need slots and units");
        assert!(u32::try_from(settings.units).is_ok(), "{} units", settings.units);
        Node {
            region: settings.region,
            number_of_units: settings.units,
            homes: settings.homes.clone(),
            located: BTreeMap::new(),
            peers: Peers::new(own, settings.epoch, &settings.members),
            units: BTreeMap::new(),
            locating: BTreeSet::new(),
            dirty: BTreeSet::new(),
            task: 0,
            releases: Rounds::default(),
            released: BTreeSet::new(),
            flushing: 0,
            comparing: VecDeque::new(),
            compared: None,
            sent: BTreeMap::new(),
            run_max,
            failure: None,
            of_thread: NOTHING,
            untold: None,
            acquires: Rounds::default(),
            looking: BTreeSet::new(),
            noticed: Vec::new(),
            all_noticed: false,
            unsettled: BTreeSet::new(),
            flushed_by: None,
            flushes: Flushes::new(slots),
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
            (State::Locating | State::Pulling(_), _) | (State::Flushing, Access::Write) => {
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

    /// Takes the end of [`Action::Compare`]: which of the units differ from their twins. The end of one that is not in progress is ignored.
    pub fn handle_compared(&mut self, task: u64, differ: &[bool]) {
        let Some((_, run)) = self.compared.take_if(|it| it.0 == task) else {
            return;
        };
        let mut changed = Vec::new();
        for (unit, differs) in run.units().zip(differ) {
            if *differs && !mutant!(ChangeForgotten) {
                changed.push(unit);
            } else {
                self.released.remove(&unit);
                self.end_flush(unit);
            }
        }
        let round = self.releases.begun();
        changed.retain(|unit| self.is_flushing(*unit));
        for run in runs(changed, u32::MAX, |_, _| true) {
            let first = u64::from(run.first);
            self.sent.insert(first, run.count);
            let units = run.count;
            if let Some(home) = self.home(first) {
                self.post(home, first, round, Body::Flush { units });
            }
        }
        // The homes read what they have been told of while the next units are compared.
        self.compare();
        self.try_end_release();
    }

    /// Takes the end of [`Action::Fetch`] or [`Action::Land`]: whether all has landed. A read that has failed comes before the news that its source is
    /// gone.
    pub fn handle_fetched(&mut self, slot: usize, has_landed: bool) {
        let Some(Begun { flush, stage }) = self.flushes.in_slot(slot) else {
            return;
        };
        let run = flush.run;
        match stage {
            Stage::Stores => {}
            Stage::Fetches if has_landed => {
                // It stays in its slot: nothing lands in these frames before they have the bytes.
                self.flushes.store(slot);
                if mutant!(AnsweredEarly) {
                    self.answer(flush);
                }
                let is_dirty = |it: &Unit| it.state == State::Dirty;
                let mut is_shared = false;
                for unit in run.units() {
                    // If the program writes the frame until it is compared with the copy, the comparison means nothing.
                    let is_written = self.units.get(&unit).is_some_and(is_dirty);
                    self.flushes.note(unit, (!is_written).then_some(flush.from));
                    is_shared |= is_written;
                }
                self.act(Action::Apply { run, slot, is_shared });
            }
            Stage::Fetches => self.end_fetch(slot, false),
            Stage::Lands => {
                self.end_fetch(slot, has_landed);
                self.open_awaited(run);
            }
        }
    }

    /// Takes the end of [`Action::Apply`]: which frames have the contents of the copies now. It means nothing of those that the program may write.
    pub fn handle_applied(&mut self, slot: usize, are_same: &[bool]) {
        let Some(Begun {
            flush,
            stage: Stage::Stores,
        }) = self.flushes.in_slot(slot)
        else {
            return;
        };
        let are_same = are_same.iter().copied().chain(std::iter::repeat(false));
        for (unit, is_same) in flush.run.units().zip(are_same) {
            if !is_same && !mutant!(DifferenceForgotten) {
                self.flushes.note(unit, None);
            }
        }
        self.end_fetch(slot, true);
    }

    /// Ends the flush in a slot, whose writer hears of it if the frames have what it has written.
    fn end_fetch(&mut self, slot: usize, has_landed: bool) {
        let Some(Begun { flush, stage }) = self.flushes.end(slot) else {
            return;
        };
        if has_landed && !(stage == Stage::Stores && mutant!(AnsweredEarly)) {
            self.answer(flush);
        }
        self.try_settle();
        self.fetch();
    }

    /// Tells the others, once, when this node stores nothing more of nodes that are gone.
    fn try_settle(&mut self) {
        let own = self.peers.own();
        let are_members = self.flushes.writers().all(|node| self.peers.is_member(node));
        if !are_members || !self.unsettled.remove(&own) {
            return;
        }
        let members: Vec<NodeId> = self.peers.members().filter(|node| *node != own).collect();
        for node in members {
            self.post(node, 0, 0, Body::Settled);
        }
        self.take_noticed();
    }

    /// Takes the news that a node stores nothing more of nodes that are gone by an epoch.
    fn settled(&mut self, node: NodeId, epoch: u64) {
        // Of an earlier one it may come late. One that nobody waits for is of a region that cannot be made any more.
        if epoch == self.peers.epoch() && self.unsettled.remove(&node) {
            self.take_noticed();
        }
    }

    /// Tells the writer of a flush that its home has what was written.
    fn answer(&mut self, flush: Flush) {
        let Flush { from, run, request } = flush;
        let units = run.count;
        self.post(from, run.first.into(), request, Body::Flushed { units });
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
        self.flushes.forget(gone);
        let sent = std::mem::take(&mut self.sent).into_iter();
        self.sent = sent.filter(|(unit, _)| self.lost_with(*unit).is_none()).collect();
        let is_expelled = !self.peers.is_member(self.peers.own());
        let units: Vec<(u64, State)> = self.units.iter().map(|(unit, it)| (*unit, it.state)).collect();
        for (unit, state) in units {
            let is_waiting = matches!(state, State::Pulling(_) | State::Flushing)
                || state == State::Locating && !mutant!(RegistrarGoneAwaited);
            if let Some(node) = self.lost_with(unit)
                && (is_expelled || is_waiting)
            {
                self.lose(unit, node);
            }
        }
        self.all_noticed |= !mutant!(DepartureForgotten);
        self.looking.retain(|node| !is_expelled && !gone.contains(node));
        if !mutant!(LateStoreNotAwaited) {
            self.unsettled = self.peers.members().collect();
        }
        self.try_settle();
        self.take_noticed();
        self.compare();
        self.try_end_release();
    }

    /// Begins to release all that the program has written. Returns the number of the release, for [`Node::released`].
    pub fn handle_release(&mut self) -> u64 {
        if self.dirty.is_empty() && self.releases.is_idle() && self.untold.is_none() {
            return NOTHING;
        }
        let untold = self.untold.take();
        let (round, begins) = self.releases.ask();
        self.of_thread = round;
        if let Some(node) = untold {
            self.failure = Some((round, node));
        }
        if begins {
            self.begin_release();
        }
        round
    }

    /// Begins a release for the acquire in progress.
    fn release_for_acquire(&mut self) {
        let (_, begins) = self.releases.ask();
        if begins {
            self.begin_release();
        }
    }

    /// Notes that the release in progress loses units with a node. A thread that waits for the next one may have written them.
    fn fail_release(&mut self, node: NodeId) {
        self.failure = Some((self.releases.asked(), node));
        if self.of_thread < self.releases.begun() {
            self.untold = Some(node);
        }
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

    /// Returns the home of a unit, if this node knows it. If the first touch makes the home, it does when the registrar has answered.
    pub fn home(&self, unit: u64) -> Option<NodeId> {
        match self.homes.is_first_touch() {
            true => self.located.get(&unit).copied(),
            false => Some(self.homes.of(unit)),
        }
    }

    fn is_home(&self, unit: u64) -> bool {
        self.home(unit) == Some(self.peers.own())
    }

    /// Returns whether an access to the unit waits.
    pub fn is_awaited(&self, unit: u64) -> bool {
        self.units.get(&unit).is_some_and(|it| it.wanted.is_some())
    }

    /// Returns the homes that this node waits for, each with the first unit of a run, and the registrars. One that stays among them longer than the
    /// driver allows for is to be expelled.
    pub fn waits(&self) -> impl Iterator<Item = Wait> {
        let (own, round) = (self.peers.own(), self.releases.begun());
        let home = move |unit: &u64| Some((*unit, round, self.home(*unit)?));
        // They belong to no release: it is one wait for the driver, whatever begins and ends meanwhile.
        let registrar = |unit: &u64| (*unit, LOCATE, self.homes.of(*unit));
        let homes = self.sent.keys().filter_map(home);
        let waits = homes.chain(self.locating.iter().map(registrar));
        waits.map(move |(unit, number, node)| Wait {
            unit,
            request: (own, number),
            node,
        })
    }

    /// Returns the nodes that an acquire waits for, each with the epoch by which they have to have settled. The same goes for them.
    pub fn awaits_settled(&self) -> impl Iterator<Item = (u64, NodeId)> {
        let own = self.peers.own();
        let awaited = move |node: &&NodeId| **node != own && !self.acquires.is_idle();
        let epoch = self.peers.epoch();
        self.unsettled
            .iter()
            .filter(awaited)
            .map(move |node| (epoch, *node))
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
        match message.body {
            Body::Flush { units } => self.flush(from, unit, units, request),
            Body::Flushed { units } if self.home(unit) == Some(from) => self.flushed(unit, units, request),
            Body::Flushed { .. } => Err(Violation::NotHome),
            Body::Settled => {
                self.settled(from, message.epoch);
                Ok(())
            }
            Body::Locate | Body::Home(_) if !self.homes.is_first_touch() => Err(Violation::NotHome),
            Body::Locate => self.register(from, unit, request),
            Body::Home(home) => self.found(from, unit, home),
            _ => Err(Violation::Unexpected),
        }
    }

    /// Takes the request for the home of a unit whose registrar is this node.
    fn register(&mut self, from: NodeId, unit: u64, request: u64) -> Result<(), Violation> {
        if self.homes.of(unit) != self.peers.own() {
            return Err(Violation::NotHome);
        }
        let mut home = *self.located.entry(unit).or_insert(from);
        if mutant!(TouchForgotten) {
            home = from;
        }
        self.post(from, unit, request, Body::Home(home));
        Ok(())
    }

    /// Takes the registrar's answer.
    fn found(&mut self, from: NodeId, unit: u64, home: NodeId) -> Result<(), Violation> {
        if self.homes.of(unit) != from {
            return Err(Violation::NotHome);
        }
        if !self.peers.was_member(home) {
            return Err(Violation::WrongNode);
        }
        if !self.locating.remove(&unit) {
            return Err(Violation::Unexpected);
        }
        self.located.insert(unit, home);
        let wanted = self.units.remove(&unit).and_then(|it| it.wanted);
        self.bring(unit, wanted.unwrap_or(Access::Read));
        Ok(())
    }

    /// Returns the node with which a unit that is not here is lost: its registrar, if this node does not know the home.
    fn lost_with(&self, unit: u64) -> Option<NodeId> {
        let home = self.home(unit).unwrap_or_else(|| self.homes.of(unit));
        let nodes = [self.peers.own(), home];
        nodes.into_iter().find(|node| !self.peers.is_member(*node))
    }

    /// Gets the contents of a unit that the program may not access.
    fn bring(&mut self, unit: u64, access: Access) {
        if let Some(node) = self.lost_with(unit) {
            self.lose(unit, node);
            return;
        }
        match self.home(unit) {
            Some(home) if home == self.peers.own() => self.open(unit, access),
            Some(from) => {
                let task = self.task;
                self.task += 1;
                self.set(unit, State::Pulling(task), Some(access));
                self.act(Action::Pull { unit, task, from });
            }
            None => self.locate(unit, access),
        }
    }

    /// Asks the registrar for the home of a unit.
    fn locate(&mut self, unit: u64, access: Access) {
        let (own, registrar) = (self.peers.own(), self.homes.of(unit));
        if registrar == own || mutant!(TouchNotAgreed) {
            self.located.insert(unit, own);
            self.open(unit, access);
            return;
        }
        self.set(unit, State::Locating, Some(access));
        self.locating.insert(unit);
        self.post(registrar, unit, LOCATE, Body::Locate);
    }

    /// Lets the program access a unit whose contents are there.
    fn open(&mut self, unit: u64, access: Access) {
        let right = access.needs();
        let is_home = self.is_home(unit);
        if access == Access::Read {
            self.set(unit, State::Clean, None);
        } else if is_home && self.flushes.is_landing(unit) && !mutant!(LandingNotAwaited) {
            if !self.units.contains_key(&unit) {
                self.open(unit, Access::Read);
            }
            self.set(unit, State::Clean, Some(access));
            return;
        } else {
            if is_home {
                self.flushes.note(unit, None);
            } else if !mutant!(TwinForgotten) {
                self.act(Action::Copy { unit });
            }
            self.set(unit, State::Dirty, None);
            self.dirty.insert(unit);
        }
        self.act(Action::Protect { unit, right });
    }

    /// Lets the program write units for which it has waited while a flush landed.
    fn open_awaited(&mut self, run: Run) {
        let is_awaited = |it: &Unit| it.state == State::Clean && it.wanted.is_some();
        let awaited = self.units.range(run.units()).filter(|(_, it)| is_awaited(it));
        let awaited: Vec<u64> = awaited.map(|(unit, _)| *unit).collect();
        for unit in awaited {
            self.open(unit, Access::Write);
        }
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
            self.fail_release(node);
        }
        self.dirty.remove(&unit);
        self.locating.remove(&unit);
        self.set(unit, State::Poisoned(node), None);
        self.act(Action::Poison { unit, node });
    }

    fn begin_release(&mut self) {
        self.released = std::mem::take(&mut self.dirty);
        if mutant!(NoticedEarly) {
            self.append();
        }
        let released: Vec<u64> = self.released.iter().copied().collect();
        if !mutant!(ComparedEarly) {
            self.protect(&released);
        }
        for unit in released.iter().copied() {
            if let Some(node) = self.lost_with(unit) {
                self.lose(unit, node);
                self.fail_release(node);
                continue;
            }
            let is_home = self.is_home(unit);
            let Some(it) = self.units.get_mut(&unit) else {
                continue;
            };
            if is_home {
                it.state = State::Clean;
            } else {
                it.state = State::Flushing;
                self.flushing += 1;
            }
        }
        let flushing = self
            .released
            .iter()
            .copied()
            .filter(|unit| self.is_flushing(*unit));
        let have_one_home = |a, b| self.home(a) == self.home(b) || mutant!(HomesMixed);
        self.comparing = runs(flushing, self.run_max, have_one_home).into();
        self.compare();
        if mutant!(ComparedEarly) {
            self.protect(&released);
        }
        self.try_end_release();
    }

    /// Protects units that the program may write.
    fn protect(&mut self, units: &[u64]) {
        let right = Right::Shared;
        for unit in units.iter().copied() {
            if !(mutant!(HomeUnprotected) && self.is_home(unit)) {
                self.act(Action::Protect { unit, right });
            }
        }
    }

    /// Begins to compare the next units of the release, unless it does so, or the homes have much to do.
    fn compare(&mut self) {
        if self.compared.is_none()
            && self.sent.len() < FLUSHES_MAX
            && let Some(run) = self.comparing.pop_front()
        {
            let task = self.task;
            self.task += 1;
            self.compared = Some((task, run));
            self.act(Action::Compare { run, task });
        }
    }

    fn is_flushing(&self, unit: u64) -> bool {
        self.units
            .get(&unit)
            .is_some_and(|it| it.state == State::Flushing)
    }

    /// Ends releases that wait for no home.
    fn try_end_release(&mut self) {
        while !self.releases.is_idle() && self.flushing == 0 {
            if !mutant!(NoticedEarly) {
                self.append();
            }
            self.released.clear();
            self.comparing.clear();
            self.compared = None;
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
        let is_lost = |it: &Unit| matches!(it.state, State::Poisoned(_));
        let is_here = |unit: &u64| !self.units.get(unit).is_some_and(is_lost);
        let units = self.released.iter().copied().filter(is_here);
        let runs = runs(units, u32::MAX, |_, _| true);
        self.actions
            .extend(runs.into_iter().map(|run| Action::Append { run }));
    }

    /// Takes a flush of another node's units, whose home is this node.
    fn flush(&mut self, from: NodeId, unit: u64, units: u32, request: u64) -> Result<(), Violation> {
        let own = self.peers.own();
        let end = unit + u64::from(units);
        if units == 0 || end > self.number_of_units {
            return Err(Violation::NoSuchUnit);
        }
        if units > self.run_max {
            return Err(Violation::TooMany);
        }
        if !self.homes.is_first_touch() && (unit..end).any(|unit| self.homes.of(unit) != own) {
            return Err(Violation::NotHome);
        }
        let run = Run {
            first: unit as u32,
            count: units,
        };
        self.flushes.take(Flush { from, run, request })?;
        self.fetch();
        Ok(())
    }

    /// Begins the next flushes.
    fn fetch(&mut self) {
        while let Some((slot, Begun { flush, stage })) = self.flushes.begin() {
            let Flush { from, run, .. } = flush;
            self.act(match stage {
                Stage::Lands => Action::Land { run, slot, from },
                _ => Action::Fetch { run, slot, from },
            });
        }
    }

    /// Takes the home's answer.
    fn flushed(&mut self, unit: u64, units: u32, request: u64) -> Result<(), Violation> {
        if self.sent.get(&unit) != Some(&units) || request != self.releases.begun() {
            return Err(Violation::Unexpected);
        }
        self.sent.remove(&unit);
        for unit in unit..unit + u64::from(units) {
            self.end_flush(unit);
        }
        self.compare();
        self.try_end_release();
        Ok(())
    }

    /// Ends the flush of a unit: its home has what was written.
    fn end_flush(&mut self, unit: u64) {
        let Some(it) = self.units.get_mut(&unit) else {
            return;
        };
        if it.state != State::Flushing {
            return;
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
    }

    fn begin_acquire(&mut self) {
        let own = self.peers.own();
        self.looking = self.peers.members().filter(|node| *node != own).collect();
        for node in self.looking.clone() {
            self.act(Action::Look { node });
        }
        self.take_noticed();
    }

    /// Takes noticed units away once all logs are read and all members have settled.
    fn take_noticed(&mut self) {
        if self.acquires.is_idle() || !self.knows_all() {
            return;
        }
        if self.flushed_by.is_none() {
            self.take_units();
        }
        self.try_end_acquire();
    }

    /// Returns whether all logs are read, and nobody stores what a node has written that is gone.
    fn knows_all(&self) -> bool {
        self.looking.is_empty() && self.unsettled.is_empty()
    }

    fn take_units(&mut self) {
        let noticed = std::mem::take(&mut self.noticed);
        let units: BTreeSet<u64> = match std::mem::take(&mut self.all_noticed) {
            true => self.units.keys().copied().collect(),
            false => {
                let cached = noticed.iter().flat_map(|run| self.units.range(run.units()));
                cached.map(|(unit, _)| *unit).collect()
            }
        };
        // The release in progress, or the next one.
        let mut flushed_by = None;
        for unit in units {
            if self.is_home(unit) {
                continue;
            }
            let Some(it) = self.units.get_mut(&unit) else {
                continue;
            };
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
                State::Locating | State::Poisoned(_) => {}
            }
        }
        self.flushed_by = flushed_by;
        if flushed_by > Some(self.releases.begun()) {
            self.release_for_acquire();
        }
    }

    /// Ends acquires that wait for nothing.
    fn try_end_acquire(&mut self) {
        let is_flushed = self.flushed_by.is_none_or(|it| self.releases.has_ended(it));
        if self.acquires.is_idle() || !self.knows_all() || !is_flushed {
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

/// Groups units, which ascend, into runs of at most so many. A function returns whether two units may be in the same run.
fn runs(units: impl IntoIterator<Item = u64>, max: u32, may_join: impl Fn(u64, u64) -> bool) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for unit in units {
        match runs.last_mut() {
            Some(last)
                if last.units().end == unit && last.count < max && may_join(last.first.into(), unit) =>
            {
                last.count += 1;
            }
            _ => runs.push(Run {
                first: unit as u32,
                count: 1,
            }),
        }
    }
    runs
}
