//! The threads of this node: the side that asks.

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::sync::{Body, Mode, Refusal};

use super::{Call, Failure, Outcome, Output, Post, Success, Violation};
use crate::peers::Peers;
use crate::protocol::Homes;

/// The threads, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Threads {
    threads: Vec<Thread>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Thread {
    /// The call that the home has not answered.
    wait: Option<(Call, Step)>,
    /// The call that begins when that one, which is [`Step::Posted`], is answered.
    next: Option<Call>,
    /// Locks that the thread has.
    held: Vec<(u64, Mode)>,
    /// Nodes of [`Peers::departed`] of which it was told that they have left.
    told: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    /// The home has not answered.
    Asked,
    /// The home has not answered, but the thread has gone on.
    Posted,
    /// The condition's home has not said that the thread is in the queue. It may already have been woken.
    Queueing(Option<Woken>),
    /// The lock's home has not taken the lock back. The thread may already have been woken.
    Releasing(Option<Woken>),
    /// The condition has not been signalled.
    Waiting,
    /// The lock's home has not given the lock again.
    Relocking(Woken),
}

/// End of the wait for a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Woken {
    gone: Option<NodeId>,
}

/// Result of an event for a thread's call.
enum Next {
    /// It goes on, with a request if there is one.
    Step(Step, Option<(u64, Body)>),
    Done(Outcome),
}

impl Thread {
    fn holds(&self, object: u64) -> Option<Mode> {
        self.held.iter().find(|it| it.0 == object).map(|it| it.1)
    }

    fn release(&mut self, object: u64) {
        self.held.retain(|it| it.0 != object);
    }

    /// Returns the request of a call, unless it is known to fail.
    fn request(&mut self, call: Call, homes: &Homes, peers: &Peers) -> Result<Body, Failure> {
        let is_lost = |node: &NodeId| !peers.is_member(*node);
        let lock = match call {
            Call::Wait { lock, .. } => lock,
            _ => call.object(),
        };
        let needed = [peers.own(), homes.of(call.object()), homes.of(lock)];
        if let Some(node) = needed.into_iter().find(is_lost) {
            return Err(Failure::Gone(node));
        }
        let held = self.holds(lock);
        let body = match call {
            Call::Barrier { parties, .. } => Body::Gather {
                operation: None,
                parties,
                value: 0,
            },
            Call::Reduce {
                parties,
                operation,
                value,
                ..
            } => Body::Gather {
                operation: Some(operation),
                parties,
                value,
            },
            Call::Lock { .. } if held.is_some() => return Err(Failure::AlreadyHeld),
            Call::Lock { mode, .. } => Body::Lock(mode),
            Call::Unlock { mode, .. } if held != Some(mode) => return Err(Failure::NotHeld),
            Call::Unlock { object, mode } => {
                self.release(object);
                Body::Unlock(mode)
            }
            Call::Wait { .. } if held != Some(Mode::Exclusive) => return Err(Failure::NotHeld),
            Call::Wait { .. } => {
                // The node may be the one to signal.
                match peers.departed().get(self.told) {
                    Some((_, node)) if !mutant!(DepartureNotTold) => return Err(Failure::Gone(*node)),
                    _ => Body::Wait,
                }
            }
            Call::Signal { .. } => Body::Signal,
            Call::Broadcast { .. } => Body::Broadcast,
            Call::FetchAdd { value, .. } => Body::FetchAdd(value),
            Call::CompareSwap { expected, new, .. } => Body::CompareSwap { expected, new },
            Call::Load { .. } => Body::FetchAdd(0),
        };
        Ok(body)
    }

    /// Takes an answer about an object.
    fn answer(&mut self, object: u64, body: Body, homes: &Homes, peers: &Peers) -> Result<Next, Violation> {
        let (call, step) = self.wait.ok_or(Violation::Unexpected)?;
        match call {
            _ if step == Step::Posted && body != Body::Done(0) => Err(Violation::Unexpected),
            Call::Wait { condition, lock } => self.step(step, (condition, lock), object, body, homes, peers),
            _ if object == call.object() => self.end(call, body).map(Next::Done),
            _ => Err(Violation::Unexpected),
        }
    }

    /// Ends a call other than [`Call::Wait`].
    fn end(&mut self, call: Call, body: Body) -> Result<Outcome, Violation> {
        match (call, body) {
            (Call::Lock { object, mode }, Body::Granted { recovered }) => {
                self.held.push((object, mode));
                Ok(Ok(Success::Locked { recovered }))
            }
            (Call::Lock { .. }, Body::Done(_)) => Err(Violation::Unexpected),
            (
                Call::Reduce { .. } | Call::FetchAdd { .. } | Call::CompareSwap { .. } | Call::Load { .. },
                Body::Done(value),
            ) => Ok(Ok(Success::Value(value))),
            (_, Body::Done(0)) => Ok(Ok(Success::Done)),
            (_, Body::Refused(refusal)) => Ok(Err(refusal.into())),
            _ => Err(Violation::Unexpected),
        }
    }

    /// Takes an answer to one of the requests of a [`Call::Wait`].
    fn step(
        &mut self,
        step: Step,
        (condition, lock): (u64, u64),
        object: u64,
        body: Body,
        homes: &Homes,
        peers: &Peers,
    ) -> Result<Next, Violation> {
        let is_about_lock = matches!(body, Body::Done(_) | Body::Granted { .. })
            || matches!((step, body), (Step::Relocking(_), Body::Refused(_)));
        if object != if is_about_lock { lock } else { condition } {
            return Err(Violation::Unexpected);
        }
        let next = match (step, body) {
            (Step::Queueing(None), Body::Refused(Refusal::Gone(node))) => {
                Next::Done(Err(Failure::Gone(node)))
            }
            (Step::Queueing(None), Body::Woken { .. }) if mutant!(EarlySignalLost) => Next::Step(step, None),
            (Step::Queueing(None), Body::Woken { gone }) => {
                Next::Step(Step::Queueing(Some(Woken { gone })), None)
            }
            // It has kept the lock.
            (Step::Queueing(Some(Woken { gone })), Body::Queued) => Next::Done(Ok(Success::Woken {
                gone,
                recovered: None,
            })),
            (Step::Queueing(None), Body::Queued) => {
                self.release(lock);
                match peers.is_member(homes.of(lock)) || mutant!(LostUnlockAwaited) {
                    true => Next::Step(Step::Releasing(None), Some((lock, Body::Unlock(Mode::Exclusive)))),
                    // As this is known, the condition's home wakes the thread.
                    false => Next::Step(Step::Waiting, None),
                }
            }
            (Step::Releasing(None), Body::Woken { gone }) => {
                Next::Step(Step::Releasing(Some(Woken { gone })), None)
            }
            (Step::Releasing(None), Body::Done(0)) => Next::Step(Step::Waiting, None),
            (Step::Releasing(Some(woken)), Body::Done(0)) => relock(woken, lock, homes, peers),
            (Step::Waiting, Body::Woken { gone }) => relock(Woken { gone }, lock, homes, peers),
            (Step::Relocking(Woken { gone }), Body::Granted { recovered }) => {
                self.held.push((lock, Mode::Exclusive));
                Next::Done(Ok(Success::Woken { gone, recovered }))
            }
            (Step::Relocking(_), Body::Refused(refusal)) => Next::Done(Err(refusal.into())),
            _ => return Err(Violation::Unexpected),
        };
        Ok(next)
    }

    /// Returns the next step of a call after nodes have left, if it does not go on as before.
    fn gone(&self, homes: &Homes, peers: &Peers) -> Option<Next> {
        let (call, step) = self.wait?;
        let lost = |object| {
            let home = Some(homes.of(object));
            home.filter(|it| !peers.is_member(*it) && !mutant!(LostHomeAwaited))
        };
        let fail = |node| Next::Done(Err(Failure::Gone(node)));
        if !peers.is_member(peers.own()) {
            return Some(fail(peers.own()));
        }
        let lost_home = lost(call.object());
        let Call::Wait { lock, .. } = call else {
            return lost_home.map(fail);
        };
        let woken = lost_home.map(|node| Woken { gone: Some(node) });
        match step {
            Step::Asked | Step::Posted | Step::Queueing(_) => lost_home.map(fail),
            Step::Releasing(before) => {
                let woken = before.or(woken);
                match (lost(lock), woken) {
                    (Some(node), Some(_)) => Some(fail(node)),
                    (Some(_), None) => Some(Next::Step(Step::Waiting, None)),
                    (None, _) => Some(Next::Step(Step::Releasing(woken), None)),
                }
            }
            Step::Waiting => woken.map(|it| relock(it, lock, homes, peers)),
            Step::Relocking(_) => lost(lock).map(fail),
        }
    }

    /// Returns whether the thread has made a call that has not ended.
    fn is_waiting(&self) -> bool {
        self.next.is_some() || self.wait.is_some_and(|it| it.1 != Step::Posted)
    }

    /// Begins the next call, unless the home has to answer one before.
    fn begin(&mut self, number: u16, homes: &Homes, peers: &Peers, out: &mut Output) {
        let Some(call) = self.next.take_if(|_| self.wait.is_none()) else {
            return;
        };
        match self.request(call, homes, peers) {
            Err(failure) => self.done(number, Err(failure), peers, out),
            Ok(body) => {
                let step = match call {
                    Call::Wait { .. } => Step::Queueing(None),
                    Call::Unlock { .. } | Call::Signal { .. } | Call::Broadcast { .. } => {
                        self.done(number, Ok(Success::Done), peers, out);
                        Step::Posted
                    }
                    _ => Step::Asked,
                };
                let next = Next::Step(step, Some((call.object(), body)));
                self.go_on(number, call, next, homes, peers, out);
            }
        }
    }

    /// Ends a call, and takes note of what that tells the thread.
    fn done(&mut self, number: u16, outcome: Outcome, peers: &Peers, out: &mut Output) {
        if let Err(Failure::Gone(gone)) | Ok(Success::Woken { gone: Some(gone), .. }) = outcome
            && let Some((_, node)) = peers.departed().get(self.told)
        {
            self.told += usize::from(*node == gone);
        }
        out.done(number, outcome);
    }

    /// Takes the result of an event for the call that the home had not answered.
    fn go_on(&mut self, number: u16, call: Call, next: Next, homes: &Homes, peers: &Peers, out: &mut Output) {
        match next {
            Next::Done(outcome) => {
                let wait = self.wait.take();
                if wait.is_some_and(|it| it.1 != Step::Posted) {
                    self.done(number, outcome, peers, out);
                }
            }
            Next::Step(step, request) => {
                self.wait = Some((call, step));
                if let Some((object, body)) = request {
                    out.posts.push_back(Post {
                        to: homes.of(object),
                        thread: number,
                        object,
                        body,
                    });
                }
            }
        }
    }
}

/// Asks for the lock again after a wait.
fn relock(woken: Woken, lock: u64, homes: &Homes, peers: &Peers) -> Next {
    let home = homes.of(lock);
    match peers.is_member(home) {
        true => Next::Step(Step::Relocking(woken), Some((lock, Body::Lock(Mode::Exclusive)))),
        false => Next::Done(Err(Failure::Gone(home))),
    }
}

impl Threads {
    pub(super) fn call(&mut self, number: u16, call: Call, homes: &Homes, peers: &Peers, out: &mut Output) {
        let place = usize::from(number);
        if self.threads.len() <= place {
            self.threads.resize_with(place + 1, Thread::default);
        }
        let thread = &mut self.threads[place];
        assert!(!thread.is_waiting(), "thread {number} waits already");
        thread.next = Some(call);
        thread.begin(number, homes, peers, out);
    }

    pub(super) fn answer(
        &mut self,
        number: u16,
        object: u64,
        body: Body,
        homes: &Homes,
        peers: &Peers,
        out: &mut Output,
    ) -> Result<(), Violation> {
        let thread = self.threads.get_mut(usize::from(number));
        let thread = thread.ok_or(Violation::Unexpected)?;
        let next = thread.answer(object, body, homes, peers)?;
        if let Some((call, _)) = thread.wait {
            thread.go_on(number, call, next, homes, peers, out);
            thread.begin(number, homes, peers, out);
        }
        Ok(())
    }

    /// Ends the calls that nobody answers any more. Locks whose home is gone are lost.
    pub(super) fn gone(&mut self, homes: &Homes, peers: &Peers, out: &mut Output) {
        for (number, thread) in (0..).zip(&mut self.threads) {
            thread.held.retain(|it| peers.is_member(homes.of(it.0)));
            if let Some((call, _)) = thread.wait
                && let Some(next) = thread.gone(homes, peers)
            {
                thread.go_on(number, call, next, homes, peers, out);
                thread.begin(number, homes, peers, out);
            }
        }
    }

    pub(super) fn is_waiting(&self, ticket: u64) -> bool {
        let place = usize::try_from(ticket).unwrap_or(usize::MAX);
        self.threads.get(place).is_some_and(Thread::is_waiting)
    }
}
