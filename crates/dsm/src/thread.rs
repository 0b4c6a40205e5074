//! Threads of a node: their locks, barriers, conditions, words and reductions.

use std::mem::ManuallyDrop;
use std::num::NonZeroU32;
use std::time::Instant;

use crate::session::{Error, Session};
use crate::stat::NodeCounter;
use crate::sync::{Call, Failure, Mode, NodeId, Operation, Success};
use crate::trace::Event;

/// A thread of a node. All its calls may wait for others, and end with an error if a node has left without which they cannot end.
#[derive(Debug)]
pub struct Thread<'a> {
    session: &'a Session,
    number: u16,
}

impl<'a> Thread<'a> {
    pub(crate) fn new(session: &'a Session, number: u16) -> Thread<'a> {
        Thread { session, number }
    }

    /// Returns the number of the thread at its node.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Waits at barrier `object` until `parties` threads of all nodes have come.
    ///
    /// # Errors
    /// A node of one of the parties has left, or the threads name different numbers of parties.
    pub fn barrier(&mut self, object: u64, parties: NonZeroU32) -> Result<(), Error> {
        self.call(Call::Barrier { object, parties }).map(|_| ())
    }

    /// Waits at barrier `object` until `parties` threads of all nodes have come, and returns the sum of their values, added in the order of nodes
    /// and threads.
    ///
    /// # Errors
    /// As [`Thread::barrier`].
    pub fn sum(&mut self, object: u64, parties: NonZeroU32, value: f64) -> Result<f64, Error> {
        self.reduce(object, parties, Operation::SumF64, value.to_bits())
            .map(f64::from_bits)
    }

    /// Waits at barrier `object` until `parties` threads of all nodes have come, and reduces their values, which are 64 bits of the operation's type.
    ///
    /// # Errors
    /// As [`Thread::barrier`].
    pub fn reduce(
        &mut self,
        object: u64,
        parties: NonZeroU32,
        operation: Operation,
        value: u64,
    ) -> Result<u64, Error> {
        self.call_for_value(Call::Reduce {
            object,
            parties,
            operation,
            value,
        })
    }

    /// Waits for lock `object`. Dropping the guard gives it back, as [`LockGuard::unlock`] does.
    ///
    /// # Errors
    /// The lock's home has left, or the thread has the lock already.
    pub fn lock(&mut self, object: u64) -> Result<LockGuard<'_, 'a>, Error> {
        self.lock_as(object, Mode::Exclusive)
    }

    /// Waits for lock `object` together with others that share it. Dropping the guard gives it back.
    ///
    /// # Errors
    /// As [`Thread::lock`].
    pub fn lock_shared(&mut self, object: u64) -> Result<LockGuard<'_, 'a>, Error> {
        self.lock_as(object, Mode::Shared)
    }

    fn lock_as(&mut self, object: u64, mode: Mode) -> Result<LockGuard<'_, 'a>, Error> {
        let recovered = match self.call(Call::Lock { object, mode })? {
            Success::Locked { recovered } => recovered,
            _ => None,
        };
        Ok(LockGuard {
            thread: self,
            object,
            mode,
            recovered,
        })
    }

    /// Wakes the thread that has waited for condition `object` longest, if there is one.
    ///
    /// # Errors
    /// The condition's home has left.
    pub fn signal(&mut self, object: u64) -> Result<(), Error> {
        self.call(Call::Signal { condition: object }).map(|_| ())
    }

    /// Wakes all threads that wait for condition `object`.
    ///
    /// # Errors
    /// The condition's home has left.
    pub fn broadcast(&mut self, object: u64) -> Result<(), Error> {
        self.call(Call::Broadcast { condition: object }).map(|_| ())
    }

    /// Adds to word `object`, wrapping, and returns the value before.
    ///
    /// # Errors
    /// The word's home has left.
    pub fn fetch_add(&mut self, object: u64, value: u64) -> Result<u64, Error> {
        self.call_for_value(Call::FetchAdd { object, value })
    }

    /// Sets word `object` to `new` if it is `expected`, and returns the value before.
    ///
    /// # Errors
    /// The word's home has left.
    pub fn compare_swap(&mut self, object: u64, expected: u64, new: u64) -> Result<u64, Error> {
        self.call_for_value(Call::CompareSwap {
            object,
            expected,
            new,
        })
    }

    /// Returns word `object`.
    ///
    /// # Errors
    /// The word's home has left.
    pub fn load(&mut self, object: u64) -> Result<u64, Error> {
        self.call_for_value(Call::Load { object })
    }

    /// Releases what this node has written in regions with release consistency: threads of other nodes that acquire after that see it. Only programs
    /// that synchronise by other means than the calls of this type need it.
    ///
    /// # Errors
    /// The home of a page is gone: what was written there is lost.
    pub fn release(&mut self) -> Result<(), Error> {
        self.session.shared().release()
    }

    /// Acquires what other nodes have released before: see [`Thread::release`].
    ///
    /// # Errors
    /// The system has refused a change of pages.
    pub fn acquire(&mut self) -> Result<(), Error> {
        self.session.shared().acquire_released()
    }

    /// Names a point of the program in the node's [trace](crate::trace), if it has one. Replays tell the time at which each node comes to it.
    pub fn mark(&mut self, number: u32) {
        self.session.shared().record(|| Event::Mark(number));
    }

    fn call_for_value(&mut self, call: Call) -> Result<u64, Error> {
        match self.call(call)? {
            Success::Value(value) => Ok(value),
            // The state machine ends such calls with a value.
            _ => Ok(0),
        }
    }

    /// Carries out any call. The methods above are those that programs need; locks that are taken by a call have no guard.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn call(&mut self, call: Call) -> Result<Success, Error> {
        let shared = self.session.shared();
        let (releases, acquires) = order_of(&call);
        let released = match releases {
            true => shared.release(),
            false => Ok(()),
        };
        if !matches!(call, Call::Unlock { .. }) {
            released?;
            let success = self.carry_out(call)?;
            if acquires {
                shared.acquire_released()?;
            }
            return Ok(success);
        }
        // The others get the lock all the same.
        let success = self.carry_out(call)?;
        released.map(|()| success)
    }

    fn carry_out(&mut self, call: Call) -> Result<Success, Error> {
        let shared = self.session.shared();
        let number = self.number;
        let counter = counter_of(&call);
        let began = Instant::now();
        let event = || Event::Call { thread: number, call };
        let wait = || {
            shared.lock().call(number, call);
            shared.wait(|driver| {
                let outcome = driver.take_outcome(number);
                if let (Some(_), Some(counter)) = (&outcome, counter) {
                    driver.sheet().count_call(counter, began.elapsed());
                }
                Ok::<_, Failure>(outcome)
            })
        };
        let outcome = shared.recorded(event, wait)?;
        Ok(outcome?)
    }
}

impl Drop for Thread<'_> {
    fn drop(&mut self) {
        self.session.end_thread(self.number);
    }
}

/// Returns whether a call releases what this node has written before it, and acquires what others have released after it.
fn order_of(call: &Call) -> (bool, bool) {
    match call {
        Call::Lock { .. } | Call::Load { .. } => (false, true),
        Call::Unlock { .. } | Call::Signal { .. } | Call::Broadcast { .. } => (true, false),
        Call::Barrier { .. } | Call::Reduce { .. } | Call::Wait { .. } => (true, true),
        Call::FetchAdd { .. } | Call::CompareSwap { .. } => (true, true),
    }
}

/// Returns the counter of a call, if it may have to wait for others.
fn counter_of(call: &Call) -> Option<NodeCounter> {
    match call {
        Call::Lock { .. } => Some(NodeCounter::LockWaits),
        Call::Barrier { .. } | Call::Reduce { .. } => Some(NodeCounter::BarrierWaits),
        Call::Wait { .. } => Some(NodeCounter::ConditionWaits),
        Call::FetchAdd { .. } | Call::CompareSwap { .. } | Call::Load { .. } => Some(NodeCounter::WordCalls),
        Call::Unlock { .. } | Call::Signal { .. } | Call::Broadcast { .. } => None,
    }
}

/// A lock that a thread has, until this is dropped or [unlocked](LockGuard::unlock).
#[derive(Debug)]
pub struct LockGuard<'t, 'a> {
    thread: &'t mut Thread<'a>,
    object: u64,
    mode: Mode,
    recovered: Option<NodeId>,
}

impl LockGuard<'_, '_> {
    /// Returns the node that left while it had the lock for itself: the memory that the lock protects may be half-changed.
    pub fn recovered(&self) -> Option<u32> {
        self.recovered.map(NodeId::number)
    }

    /// Gives the lock back, waits until condition `object` is signalled, and takes the lock again.
    ///
    /// # Errors
    /// The lock is shared, a node has left that might have signalled, or the condition's home has.
    pub fn wait(&mut self, object: u64) -> Result<(), Error> {
        let lock = self.object;
        let condition = object;
        let woken = self.thread.call(Call::Wait { condition, lock })?;
        if let Success::Woken { gone, recovered } = woken {
            self.recovered = recovered;
            if let Some(node) = gone {
                return Err(Failure::Gone(node).into());
            }
        }
        Ok(())
    }

    /// Gives the lock back, and returns the error of that, of which a drop tells nothing. There is no guard any more in either case.
    ///
    /// # Errors
    /// [`Error::Unreleased`] if what this node has written in a region with release consistency is lost: the others get the lock all the same. Or the
    /// lock's home has left.
    pub fn unlock(self) -> Result<(), Error> {
        // A drop would give it back once more.
        ManuallyDrop::new(self).give_back()
    }

    fn give_back(&mut self) -> Result<(), Error> {
        let (object, mode) = (self.object, self.mode);
        self.thread.call(Call::Unlock { object, mode }).map(|_| ())
    }
}

impl Drop for LockGuard<'_, '_> {
    fn drop(&mut self) {
        // If the lock's home has left, there is no lock.
        let _ = self.give_back();
    }
}
