//! The objects whose home this node is: the side that decides.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::sync::{Body, Mode, Operation, Refusal};

use super::gathering::Gathering;
use super::lock::Lock;
use super::{BUDGET, Output, Post, THREADS_MAX, Violation};
use crate::peers::Peers;

/// A thread, by its node and its number there.
pub(super) type Party = (NodeId, u16);

/// The objects. One that is missing is as at the beginning.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Home {
    accounts: BTreeMap<NodeId, Account>,
    locks: BTreeMap<u64, Lock>,
    gatherings: BTreeMap<u64, Gathering>,
    /// Threads that wait, in the order of their arrival.
    conditions: BTreeMap<u64, VecDeque<Party>>,
    words: BTreeMap<u64, Word>,
}

/// Use that a node makes of this home.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Account {
    /// Objects, at most [`BUDGET`].
    objects: u32,
    /// By thread.
    waits: Vec<Waits>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Waits {
    /// It waits for the answer to its request.
    for_answer: bool,
    /// It is in the queue of a condition.
    for_signal: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Word {
    value: u64,
    /// The node in whose account it is.
    maker: NodeId,
}

impl Account {
    /// Takes note that a thread waits for an answer. It has one request at a time.
    fn begin(&mut self, thread: u16) -> Result<(), Violation> {
        if thread >= THREADS_MAX {
            return Err(Violation::NoSuchThread);
        }
        let place = usize::from(thread);
        if self.waits.len() <= place {
            self.waits.resize(place + 1, Waits::default());
        }
        match std::mem::replace(&mut self.waits[place].for_answer, true) {
            true => Err(Violation::Unexpected),
            false => Ok(()),
        }
    }

    /// Adds an object, and returns whether there is room.
    fn charge(&mut self) -> bool {
        let has_room = self.objects < BUDGET;
        self.objects += u32::from(has_room);
        has_room
    }
}

/// The way of answers, which end the waits of threads. Threads of a node that has left get none.
pub(super) struct Answers<'a> {
    accounts: &'a mut BTreeMap<NodeId, Account>,
    out: &'a mut Output,
}

impl Answers<'_> {
    /// Answers a request and ends it.
    pub(super) fn end(&mut self, party: Party, object: u64, body: Body) {
        self.post(party, object, body, |waits| waits.for_answer = false);
    }

    /// Ends the wait for a signal.
    fn wake(&mut self, party: Party, object: u64, gone: Option<NodeId>) {
        self.post(party, object, Body::Woken { gone }, |waits| {
            waits.for_signal = false
        });
    }

    fn post(&mut self, party: Party, object: u64, body: Body, end: impl FnOnce(&mut Waits)) {
        if let Some(waits) = self.waits(party) {
            end(waits);
            let (to, thread) = party;
            self.out.posts.push_back(Post {
                to,
                thread,
                object,
                body,
            });
        }
    }

    /// Returns the waits of a thread that has made a request, and whose node has not left.
    fn waits(&mut self, party: Party) -> Option<&mut Waits> {
        let account = self.accounts.get_mut(&party.0)?;
        account.waits.get_mut(usize::from(party.1))
    }

    /// Books an object in a node's account; otherwise the request is refused.
    fn charge(&mut self, party: Party, object: u64) -> bool {
        let has_room = self.accounts.get_mut(&party.0).is_some_and(Account::charge);
        if !has_room {
            self.end(party, object, Body::Refused(Refusal::NoRoom));
        }
        has_room
    }

    /// Takes an object from the account of a node, unless that has left.
    fn credit(&mut self, node: NodeId) {
        if let Some(account) = self.accounts.get_mut(&node) {
            account.objects -= 1;
        }
    }
}

impl Home {
    /// Takes a request of a thread whose node knew of an epoch.
    pub(super) fn request(
        &mut self,
        party: Party,
        epoch: u64,
        object: u64,
        body: Body,
        peers: &Peers,
        out: &mut Output,
    ) -> Result<(), Violation> {
        self.accounts.entry(party.0).or_default().begin(party.1)?;
        let taken = match body {
            Body::Lock(mode) => self.lock(party, object, mode, out),
            Body::Unlock(mode) => self.unlock(party, object, mode, out),
            Body::Gather {
                operation,
                parties,
                value,
            } => {
                self.gather(party, object, (operation, parties, value), peers, out);
                Ok(())
            }
            Body::Wait => self.wait(party, object, epoch, peers, out),
            Body::Signal => {
                self.wake(party, object, 1, out);
                Ok(())
            }
            Body::Broadcast => {
                self.wake(party, object, usize::MAX, out);
                Ok(())
            }
            Body::FetchAdd(number) => {
                self.word(party, object, |value| value.wrapping_add(number), out);
                Ok(())
            }
            Body::CompareSwap { expected, new } => {
                let update = |value| if value == expected { new } else { value };
                self.word(party, object, update, out);
                Ok(())
            }
            Body::Done(_) | Body::Granted { .. } | Body::Queued | Body::Woken { .. } | Body::Refused(_) => {
                Err(Violation::Unexpected)
            }
        };
        if taken.is_err()
            && let Some(waits) = answers(&mut self.accounts, out).waits(party)
        {
            waits.for_answer = false;
        }
        taken
    }

    fn lock(&mut self, party: Party, object: u64, mode: Mode, out: &mut Output) -> Result<(), Violation> {
        let answers = &mut answers(&mut self.accounts, out);
        if self.locks.get(&object).is_some_and(|it| it.is_held_by(party)) {
            return Err(Violation::Unexpected);
        }
        if answers.charge(party, object) {
            let lock = self.locks.entry(object).or_default();
            lock.ask(party, mode);
            lock.give(object, answers);
        }
        Ok(())
    }

    fn unlock(&mut self, party: Party, object: u64, mode: Mode, out: &mut Output) -> Result<(), Violation> {
        let answers = &mut answers(&mut self.accounts, out);
        let lock = self.locks.get_mut(&object).ok_or(Violation::Unexpected)?;
        if !lock.release(party, mode) {
            return Err(Violation::Unexpected);
        }
        answers.credit(party.0);
        answers.end(party, object, Body::Done(0));
        lock.give(object, answers);
        if lock.is_idle() {
            self.locks.remove(&object);
        }
        Ok(())
    }

    fn gather(
        &mut self,
        party: Party,
        object: u64,
        arrival: (Option<Operation>, NonZeroU32, u64),
        peers: &Peers,
        out: &mut Output,
    ) {
        let answers = &mut answers(&mut self.accounts, out);
        if let Some(gathering) = self.gatherings.get_mut(&object) {
            gathering.come(object, party, arrival, answers);
        } else if let Some((_, node)) = peers.departed().first()
            && !mutant!(LateBarrierAwaited)
        {
            // It may be a party.
            answers.end(party, object, Body::Refused(Refusal::Gone(*node)));
        } else if answers.charge(party, object) {
            let gathering = self.gatherings.entry(object);
            let gathering = gathering.or_insert_with(|| Gathering::new(arrival.1));
            gathering.come(object, party, arrival, answers);
        }
    }

    fn wait(
        &mut self,
        party: Party,
        object: u64,
        epoch: u64,
        peers: &Peers,
        out: &mut Output,
    ) -> Result<(), Violation> {
        let answers = &mut answers(&mut self.accounts, out);
        let unheard = peers.departed().iter().find(|it| it.0 > epoch);
        if let Some((_, node)) = unheard
            && !mutant!(LateWaitAwaited)
        {
            // Those that waited before were told.
            answers.end(party, object, Body::Refused(Refusal::Gone(*node)));
            return Ok(());
        }
        let waits = answers.waits(party).ok_or(Violation::Unexpected)?;
        if std::mem::replace(&mut waits.for_signal, true) {
            return Err(Violation::Unexpected);
        }
        self.conditions.entry(object).or_default().push_back(party);
        answers.end(party, object, Body::Queued);
        Ok(())
    }

    /// Wakes the first threads that wait for a condition.
    fn wake(&mut self, party: Party, object: u64, count: usize, out: &mut Output) {
        let answers = &mut answers(&mut self.accounts, out);
        if let Some(queue) = self.conditions.get_mut(&object) {
            for woken in queue.drain(..count.min(queue.len())) {
                answers.wake(woken, object, None);
            }
            if queue.is_empty() {
                self.conditions.remove(&object);
            }
        }
        answers.end(party, object, Body::Done(0));
    }

    fn word(&mut self, party: Party, object: u64, update: impl FnOnce(u64) -> u64, out: &mut Output) {
        let answers = &mut answers(&mut self.accounts, out);
        let before = self.words.get(&object).copied();
        let old = before.map_or(0, |it| it.value);
        let value = update(old);
        match before {
            None if value == 0 => {}
            None if !answers.charge(party, object) => return,
            Some(word) if value == 0 => {
                self.words.remove(&object);
                answers.credit(word.maker);
            }
            _ if mutant!(WordNotWritten) => {}
            _ => {
                let maker = before.map_or(party.0, |it| it.maker);
                self.words.insert(object, Word { value, maker });
            }
        }
        answers.end(party, object, Body::Done(old));
    }

    /// Ends what nodes that have left had, and the waits that depend on them.
    pub(super) fn gone(&mut self, gone: &[NodeId], out: &mut Output) {
        self.accounts.retain(|node, _| !gone.contains(node));
        let answers = &mut answers(&mut self.accounts, out);
        self.locks.retain(|object, lock| {
            lock.gone(gone);
            lock.give(*object, answers);
            !lock.is_idle()
        });
        for (object, gathering) in &mut self.gatherings {
            gathering.gone(*object, gone, answers);
        }
        let Some(node) = gone.last() else { return };
        if mutant!(GoneSignalAwaited) {
            return;
        }
        for (object, queue) in std::mem::take(&mut self.conditions) {
            for party in queue {
                answers.wake(party, object, Some(*node));
            }
        }
    }
}

fn answers<'a>(accounts: &'a mut BTreeMap<NodeId, Account>, out: &'a mut Output) -> Answers<'a> {
    Answers { accounts, out }
}
