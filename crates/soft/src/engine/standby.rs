//! Scheduling policy of the engine's thread. Between two looks of a caller that looks before it sleeps, packets wake the thread, and a
//! woken thread of policy `SCHED_OTHER` takes the CPU from that caller when no other CPU is free: two context switches for a packet that
//! the caller would find in a microsecond. A thread of policy `SCHED_BATCH` waits until the caller leaves the CPU (sched(7)). So the thread
//! has that policy while callers look and find, and is only their standby. Once they sleep, it has `SCHED_OTHER` again: under
//! `SCHED_BATCH`, a busy CPU would let it wait for a time slice.

use rdmux_verbs::thread::{Policy, policy, set_policy};
use rustix::thread::{Pid, gettid};

/// The thread's policy, and what decides it. Protected by the engine's lock.
#[derive(Debug, Default)]
pub(super) struct Standby {
    /// `None` before the thread runs, and where the system or the program's own policy forbids a change.
    pub(super) thread: Option<Pid>,
    is_on: bool,
    /// Set when a caller has found something since the thread last woke.
    found: bool,
}

impl Standby {
    /// Records that the calling thread is the engine's. A thread of another policy than `SCHED_OTHER`, which a program's real-time threads
    /// pass on, keeps it.
    pub(super) fn started(&mut self) {
        let thread = gettid();
        self.thread = (policy(thread).ok() == Some(Policy::Other)).then_some(thread);
    }

    /// Records that a caller has looked and found something.
    pub(super) fn caller_found(&mut self) {
        self.found = true;
        self.set(true);
    }

    /// Records that a caller goes to sleep.
    pub(super) fn caller_sleeps(&mut self) {
        self.set(false);
    }

    /// Records that the thread has woken. The caller that it stands by for may have left for good.
    pub(super) fn woke(&mut self) {
        if !std::mem::take(&mut self.found) {
            self.set(false);
        }
    }

    fn set(&mut self, on: bool) {
        if self.is_on == on {
            return;
        }
        let Some(thread) = self.thread else { return };
        let (from, to) = match on {
            true => (Policy::Other, Policy::Batch),
            false => (Policy::Batch, Policy::Other),
        };
        // The program may have set a policy of its own since.
        let is_ours = policy(thread).is_ok_and(|policy| policy == from);
        if is_ours && set_policy(thread, to).is_ok() {
            self.is_on = on;
        } else {
            self.thread = None;
        }
    }
}
