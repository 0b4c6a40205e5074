//! Nodes, their threads and connections, of which a test chooses the next step. The rules that must hold are checked at each step.
#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod model;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use rdmux_dsm::protocol::Homes;
use rdmux_dsm::sync::{
    Action, Body, Call, Failure, Message, Mode, Node, NodeId, Operation, Outcome, Success,
};

pub(crate) use crate::network::Place;
use crate::network::{Network, Underway};

/// A step of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Act {
    /// Make the call.
    Call(Call),
    /// Set a flag that a lock protects.
    Set { flag: usize, lock: u64 },
    /// Wait for the condition until the flag is set, unless the thread is told that its own node has left, the one that sets the flag, or a home.
    Until {
        flag: usize,
        condition: u64,
        lock: u64,
        setter: Place,
    },
}

/// Events that may happen besides the protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Mishaps {
    /// Messages that come twice.
    pub(crate) duplicates: u8,
    /// Nodes that stop for ever.
    pub(crate) crashes: u8,
    /// Nodes that are expelled but go on until they are told.
    pub(crate) expulsions: u8,
    /// Messages of a pair of nodes overtake each other.
    pub(crate) reorders: bool,
    /// A node sends what it likes about objects from [`SPOILT`] on.
    pub(crate) hostile: Option<Place>,
}

/// The first of the objects that need not keep the rules if there is a hostile node.
pub(crate) const SPOILT: u64 = 1 << 32;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    sites: Vec<Site>,
    pub(crate) threads: Vec<Thread>,
    network: Network<Message>,
    homes: Homes,
    /// Flags of the programs' memory.
    flags: Vec<bool>,
    /// Arrivals so far, by barrier.
    arrivals: BTreeMap<u64, usize>,
    /// Additions begun, and the values before those that have ended, by word.
    additions: BTreeMap<u64, (u64, BTreeSet<u64>)>,
    /// Locks that a node had for itself when it stopped, until another one has it for itself.
    owed: BTreeSet<u64>,
    /// Messages that the hostile node has sent, by receiver.
    numbers: BTreeMap<Place, u64>,
    /// Nodes that have left, in the order of the epochs.
    gone: Vec<Place>,
    mishaps: Mishaps,
    /// The first rule that was broken.
    pub(crate) flaw: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Site {
    node: Node,
    is_running: bool,
}

/// A thread of a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Thread {
    at: Place,
    ticket: u64,
    program: Arc<[Act]>,
    /// Steps of the program that have ended.
    ended: usize,
    /// The call that has not ended.
    waits: Option<Call>,
    holds: Vec<(u64, Mode)>,
    /// Times that it has passed each barrier.
    passed: BTreeMap<u64, usize>,
    /// Nodes of which it was told that they have left.
    told: BTreeSet<Place>,
    /// Calls that were carried out.
    pub(crate) successes: usize,
}

/// The next event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A thread takes the next step of its program.
    Go(usize),
    Deliver(Underway),
    Duplicate(Underway),
    Crash(Place),
    Expel(Place),
    /// A node hears of an epoch, and of all who have left until then.
    Tell {
        at: Place,
        epoch: u64,
    },
}

const REGION: u32 = 7;

pub(crate) fn id(place: Place) -> NodeId {
    NodeId::new(place as u32).unwrap()
}

fn place(node: NodeId) -> Place {
    node.number() as Place
}

impl World {
    /// Makes a world of threads, each at a node. `homes` are those of the objects in turn.
    pub(crate) fn new(threads: &[(Place, Arc<[Act]>)], homes: &[Place], mishaps: Mishaps) -> World {
        let nodes = 1 + threads.iter().map(|it| it.0).max().unwrap();
        let homes = Homes::cyclic(homes.iter().map(|it| id(*it)).collect::<Vec<_>>(), 1).unwrap();
        let members: Vec<NodeId> = (0..nodes).map(id).collect();
        let site = |at: Place| Site {
            node: Node::new(id(at), REGION, 0, &members, homes.clone()),
            is_running: true,
        };
        let thread = |(index, (at, program)): (usize, &(Place, Arc<[Act]>))| Thread {
            at: *at,
            ticket: threads[..index].iter().filter(|it| it.0 == *at).count() as u64,
            program: program.clone(),
            ended: 0,
            waits: None,
            holds: vec![],
            passed: BTreeMap::new(),
            told: BTreeSet::new(),
            successes: 0,
        };
        let flags = threads.iter().flat_map(|it| it.1.iter()).map(|act| match act {
            Act::Set { flag, .. } => 1 + *flag,
            _ => 0,
        });
        World {
            sites: (0..nodes).map(site).collect(),
            threads: threads.iter().enumerate().map(thread).collect(),
            network: Network::new(mishaps.reorders),
            homes,
            flags: vec![false; flags.max().unwrap_or(0)],
            arrivals: BTreeMap::new(),
            additions: BTreeMap::new(),
            owed: BTreeSet::new(),
            numbers: BTreeMap::new(),
            gone: vec![],
            mishaps,
            flaw: None,
        }
    }

    /// Adds all that can happen next.
    pub(crate) fn steps(&self, steps: &mut Vec<Step>) {
        if self.flaw.is_some() {
            return;
        }
        for (index, thread) in self.threads.iter().enumerate() {
            let can_go = thread.waits.is_none() && thread.ended < thread.program.len();
            if can_go && self.sites[thread.at].is_running {
                steps.push(Step::Go(index));
            }
        }
        for (at, site) in self.sites.iter().enumerate().filter(|(_, it)| it.is_running) {
            if site.node.is_member(id(at)) {
                let epochs = site.node.epoch() + 1..=self.gone.len() as u64;
                steps.extend(epochs.map(|epoch| Step::Tell { at, epoch }));
            }
            if !self.has_left(at) && self.mishaps.crashes > 0 {
                steps.push(Step::Crash(at));
            }
            if !self.has_left(at) && self.mishaps.expulsions > 0 {
                steps.push(Step::Expel(at));
            }
        }
        steps.extend(self.network.ready().map(Step::Deliver));
        if self.mishaps.duplicates > 0 {
            steps.extend(self.network.all().map(Step::Duplicate));
        }
    }

    /// Returns the rule that is broken, if any.
    pub(crate) fn broken(&self) -> Option<String> {
        if self.flaw.is_some() || !self.network.is_empty() {
            return self.flaw.clone();
        }
        let mut steps = vec![];
        self.steps(&mut steps);
        let is_quiet = steps.iter().all(Step::is_mishap);
        if is_quiet { self.stuck() } else { None }
    }

    /// Returns the rule that is broken if nothing is left to happen and a thread waits.
    pub(crate) fn stuck(&self) -> Option<String> {
        let is_hostile = |it: &Thread| self.mishaps.hostile == Some(it.at);
        let waits = |it: &&Thread| it.waits.is_some() && self.sites[it.at].is_running && !is_hostile(it);
        let thread = self.threads.iter().find(waits)?;
        let (call, at) = (thread.waits?, thread.at);
        Some(format!("a thread of {at} waits for ever in {call:?}"))
    }

    /// Expels a node.
    pub(crate) fn expel(&mut self, at: Place) {
        self.gone.push(at);
    }

    /// Has the hostile node send a message.
    pub(crate) fn forge(&mut self, to: Place, thread: u16, object: u64, body: Body) {
        let from = self.mishaps.hostile.unwrap();
        let message = Message {
            region: REGION,
            epoch: self.sites[from].node.epoch(),
            sequence: 0,
            thread,
            object,
            body,
        };
        self.send(from, to, message);
    }

    fn send(&mut self, from: Place, to: Place, mut message: Message) {
        if self.mishaps.hostile == Some(from) {
            // Its own messages and the forged ones are numbered together.
            let number = self.numbers.entry(to).or_default();
            message.sequence = *number;
            *number += 1;
        }
        if self.sites[to].is_running {
            self.network.send(from, to, message.sequence, message);
        }
    }

    pub(crate) fn take(&mut self, step: Step) {
        match step {
            Step::Go(index) => self.go(index),
            Step::Deliver(underway) => {
                let Underway { from, to, .. } = underway;
                let message = self.network.get(underway);
                // Otherwise it waits where it is.
                if self.sites[to].node.handle_message(id(from), &message).is_ok() {
                    self.network.remove(underway);
                    self.carry_out(to);
                }
            }
            Step::Duplicate(underway) => {
                self.mishaps.duplicates -= 1;
                self.network.duplicate(underway);
            }
            Step::Crash(at) => {
                self.mishaps.crashes -= 1;
                let crashed = self.threads.iter().filter(|it| it.at == at);
                let held = crashed.flat_map(|it| it.holds.iter());
                self.owed
                    .extend(held.filter(|it| it.1 == Mode::Exclusive).map(|it| it.0));
                self.gone.push(at);
                self.sites[at].is_running = false;
                self.network.stop(at);
            }
            Step::Expel(at) => {
                self.mishaps.expulsions -= 1;
                self.expel(at);
            }
            Step::Tell { at, epoch } => {
                let node = &mut self.sites[at].node;
                let gone = &self.gone[node.epoch() as usize..epoch as usize];
                let gone: Vec<_> = gone.iter().map(|it| id(*it)).collect();
                node.handle_gone(epoch, &gone);
                self.carry_out(at);
            }
        }
    }

    fn go(&mut self, index: usize) {
        let thread = &mut self.threads[index];
        match thread.program[thread.ended] {
            Act::Call(call) => self.call(index, call),
            Act::Set { flag, lock } => {
                // Without the lock it must not.
                self.flags[flag] |= thread.holds.contains(&(lock, Mode::Exclusive));
                thread.ended += 1;
            }
            Act::Until {
                flag,
                condition,
                lock,
                setter,
            } => {
                let needed = [
                    thread.at,
                    setter,
                    place(self.homes.of(condition)),
                    place(self.homes.of(lock)),
                ];
                if self.flags[flag] || needed.iter().any(|it| thread.told.contains(it)) {
                    thread.ended += 1;
                } else {
                    self.call(index, Call::Wait { condition, lock });
                }
            }
        }
    }

    fn call(&mut self, index: usize, call: Call) {
        let thread = &mut self.threads[index];
        thread.waits = Some(call);
        match call {
            Call::Unlock { object, .. } | Call::Wait { lock: object, .. } => {
                thread.holds.retain(|it| it.0 != object);
            }
            Call::Barrier { object, .. } | Call::Reduce { object, .. } => {
                *self.arrivals.entry(object).or_default() += 1;
            }
            Call::FetchAdd { object, .. } => self.additions.entry(object).or_default().0 += 1,
            _ => {}
        }
        let (at, ticket) = (thread.at, thread.ticket);
        self.sites[at].node.handle_call(call, ticket);
        self.carry_out(at);
    }

    /// Does what a node's driver does.
    fn carry_out(&mut self, at: Place) {
        while let Some(action) = self.sites[at].node.poll_action() {
            match action {
                Action::Send { to, message } => self.send(at, place(to), message),
                Action::Done { ticket, outcome } => {
                    let is_meant = |it: &Thread| it.at == at && it.ticket == ticket;
                    let index = self.threads.iter().position(is_meant).unwrap();
                    if let Some(flaw) = self.end(index, outcome) {
                        let thread = &self.threads[index];
                        let calls = &thread.program[..thread.ended];
                        let what = format!("{flaw}: {outcome:?} at {at}, after {calls:?}");
                        self.flaw.get_or_insert(what);
                    }
                }
                Action::Accuse { node, violation } => {
                    let hostile = self.mishaps.hostile;
                    if hostile != Some(at) && hostile != Some(place(node)) {
                        let flaw = format!("{node:?} is accused by {at}: {violation}");
                        self.flaw.get_or_insert(flaw);
                    }
                }
            }
        }
    }

    /// Ends a thread's call, and returns the rule that the end breaks.
    fn end(&mut self, index: usize, outcome: Outcome) -> Option<&'static str> {
        let thread = &mut self.threads[index];
        let Some(call) = thread.waits.take() else {
            return Some("a call has ended twice");
        };
        // The next step decides whether to wait again.
        thread.ended += usize::from(!matches!(call, Call::Wait { .. }));
        thread.successes += usize::from(outcome.is_ok());
        if let Err(Failure::Gone(node)) | Ok(Success::Woken { gone: Some(node), .. }) = outcome {
            thread.told.insert(place(node));
        }
        if call.object() >= SPOILT || self.mishaps.hostile == Some(thread.at) {
            return None;
        }
        let left = |node: NodeId| self.gone.contains(&place(node));
        match (call, outcome) {
            (_, Err(Failure::Gone(node))) => {
                if let Call::Wait { lock, .. } = call
                    && self.sites[thread.at].node.is_member(self.homes.of(lock))
                {
                    thread.holds.push((lock, Mode::Exclusive));
                }
                (!left(node)).then_some("a node counts as gone that has not left")
            }
            (Call::Lock { object, mode }, Ok(Success::Locked { recovered })) => {
                thread.holds.push((object, mode));
                self.locked(index, object, mode, recovered)
            }
            (Call::Wait { lock, .. }, Ok(Success::Woken { gone, recovered })) => {
                thread.holds.push((lock, Mode::Exclusive));
                if gone.is_some_and(|it| !left(it)) {
                    return Some("a node counts as gone that has not left");
                }
                self.locked(index, lock, Mode::Exclusive, recovered)
            }
            (Call::Barrier { object, parties }, Ok(Success::Done)) => self.passed(index, object, parties),
            (
                Call::Reduce {
                    object,
                    parties,
                    operation,
                    ..
                },
                Ok(Success::Value(value)),
            ) => {
                let round = thread.passed.get(&object).copied().unwrap_or(0);
                let is_right = value == self.reduced(object, operation, round);
                let early = self.passed(index, object, parties);
                early.or((!is_right).then_some("a reduction has a wrong result"))
            }
            (Call::FetchAdd { object, .. }, Ok(Success::Value(value))) => {
                let (begun, ended) = self.additions.entry(object).or_default();
                let is_right = value < *begun && ended.insert(value);
                (!is_right).then_some("an addition has a wrong result")
            }
            (Call::CompareSwap { .. } | Call::Load { .. }, Ok(Success::Value(_)))
            | (Call::Unlock { .. } | Call::Signal { .. } | Call::Broadcast { .. }, Ok(Success::Done)) => None,
            _ => Some("a call has an end that it cannot have"),
        }
    }

    fn locked(
        &mut self,
        index: usize,
        object: u64,
        mode: Mode,
        recovered: Option<NodeId>,
    ) -> Option<&'static str> {
        if recovered.is_some_and(|it| !self.has_left(place(it))) {
            return Some("a lock is recovered from a member");
        }
        let is_unmarked = self.owed.contains(&object) && recovered.is_none();
        // A node that is expelled may get the mark, and give the lock back, before the lock's home hears of that.
        if mode == Mode::Exclusive {
            self.owed.remove(&object);
        }
        if self.has_left(self.threads[index].at) {
            return None;
        }
        if is_unmarked {
            return Some("a lock is recovered without a mark");
        }
        let members = self.threads.iter().filter(|it| !self.has_left(it.at));
        let holds = members.flat_map(|it| it.holds.iter()).filter(|it| it.0 == object);
        let (mut all, mut alone) = (0, 0);
        for (_, mode) in holds {
            all += 1;
            alone += usize::from(*mode == Mode::Exclusive);
        }
        (all > 1 && alone > 0).then_some("a lock has two holders of which one has it for itself")
    }

    fn passed(&mut self, index: usize, object: u64, parties: NonZeroU32) -> Option<&'static str> {
        let passed = self.threads[index].passed.entry(object).or_default();
        *passed += 1;
        let needed = *passed * parties.get() as usize;
        (self.arrivals[&object] < needed).then_some("a barrier is passed early")
    }

    /// Returns the right result of a round of a reduction.
    fn reduced(&self, object: u64, operation: Operation, round: usize) -> u64 {
        let mut parties: Vec<_> = self.threads.iter().collect();
        parties.sort_by_key(|it| (it.at, it.ticket));
        let values = parties.into_iter().filter_map(|thread| {
            let own = thread.program.iter().filter_map(|act| match act {
                Act::Call(Call::Barrier { object: of, .. }) if *of == object => Some(0),
                Act::Call(Call::Reduce {
                    object: of, value, ..
                }) if *of == object => Some(*value),
                _ => None,
            });
            own.into_iter().nth(round)
        });
        values
            .reduce(|sum, it| match operation {
                Operation::SumF64 => (f64::from_bits(sum) + f64::from_bits(it)).to_bits(),
                Operation::SumU64 => sum.wrapping_add(it),
                other => panic!("{other:?} is not part of these programs"),
            })
            .unwrap_or(0)
    }

    fn has_left(&self, at: Place) -> bool {
        self.gone.contains(&at)
    }
}

impl Step {
    /// Returns whether the step is none of the protocol, so that a run may end before it.
    pub(crate) fn is_mishap(&self) -> bool {
        matches!(self, Step::Crash(_) | Step::Expel(_) | Step::Duplicate(_))
    }
}
