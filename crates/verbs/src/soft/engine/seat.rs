//! Waiting for a completion. Whoever waits sits in the thread's place, one caller at a time: it looks or sleeps as the policy has
//! it, and what arrives wakes it, not a thread that then wakes it. Others who wait meanwhile sleep beside it, and rely on it.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rdmux_rnic::{Arm, CompletionQueue, Time};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Core, Engine, RECEIVES_PER_TURN, SOCKET_RETRY_NS, Waker};
use crate::soft::load::{Load, current_cpu};
use crate::waiting::{Conditions, Plan, Policy};

/// How the caller that waits and drives does so.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) policy: Policy,
    pub(super) load: Load,
}

impl Seat {
    /// What to do while nothing has come, so long after the wait began.
    fn plan(&mut self, elapsed_ns: u64, now: Time, peer_cpu: Option<u32>) -> Plan {
        // Without looking, most of the time.
        if self.policy.plan(elapsed_ns, Conditions::default()) == Plan::Sleep {
            return Plan::Sleep;
        }
        let conditions = Conditions {
            shares_cpu: peer_cpu == Some(current_cpu()),
            ..self.load.look(now.0)
        };
        self.policy.plan(elapsed_ns, conditions)
    }
}

/// Since when a caller polls that sleeps in the seat: always.
pub(super) const SEATED: u64 = u64::MAX;

impl Engine {
    /// Wakes whoever sleeps and is to drive: the caller in the seat, else the thread.
    pub(super) fn wake_driver(&self) {
        if self.polled_at_ns.load(Ordering::SeqCst) == SEATED {
            self.seat_kick.wake();
        } else {
            self.kick.wake();
        }
    }

    /// A caller goes to sleep: what it left owing is sent, and the thread has the socket from now on.
    pub(crate) fn hand_over(&self) {
        let mut core = self.lock();
        core.finish(self.now(), true);
        let early = self.is_due_early(&core);
        drop(core);
        if self.polled_at_ns.load(Ordering::SeqCst) == SEATED {
            // Another caller drives, and does so as long as somebody relies on it.
            if early {
                self.seat_kick.wake();
            }
            return;
        }
        // Either the thread sees that nobody polls, or this sees that it sleeps: both orders are sequentially consistent.
        self.polled_at_ns.store(0, Ordering::SeqCst);
        if early || self.leased.load(Ordering::SeqCst) {
            self.kick.wake();
        }
    }

    /// A caller waits by a descriptor: from now on somebody else always drives.
    pub(crate) fn hand_over_to_channel(&self) {
        self.has_channel.store(true, Ordering::SeqCst);
        self.hand_over();
    }

    /// Sleeps until woken or the time is over (false), while others drive.
    pub(crate) fn sleep(&self, waker: &Waker, left: Option<Duration>) -> bool {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        self.hand_over();
        let woken = waker.wait(left);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        woken
    }

    /// Waits until `look` finds something: looks again and again, or sleeps, as the policy has it. The caller drives meanwhile, if
    /// no other one does: so it is woken by what arrives, not by a thread that was. `waker` tells of completions of `cq` while
    /// that is armed. `None`: the time is over.
    pub(crate) fn wait<R>(
        &self,
        deadline: Option<Instant>,
        waker: &Waker,
        cq: &CompletionQueue,
        mut look: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let left = || left_until(deadline);
        if let Some(found) = self.poll(&mut look) {
            return Some(found);
        }
        let Ok(mut seat) = self.seat.try_lock() else {
            loop {
                cq.arm(Arm::Next);
                if let Some(found) = look() {
                    return Some(found);
                }
                let left = left();
                if is_over(left) || !self.sleep(waker, left) {
                    return look();
                }
            }
        };
        let found = self.wait_in_seat(&mut seat, deadline, waker, cq, look);
        drop(seat);
        // However it ended: others may have come to rely on who sat there.
        self.leave_seat();
        found
    }

    /// The part of [`Engine::wait`] of who has the seat.
    fn wait_in_seat<R>(
        &self,
        seat: &mut Seat,
        deadline: Option<Instant>,
        waker: &Waker,
        cq: &CompletionQueue,
        mut look: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let left = || left_until(deadline);
        let began = self.now();
        let peer_cpu = {
            let mut core = self.lock();
            core.links.tell_cpu(current_cpu());
            core.links.peer_cpu()
        };
        loop {
            let now = self.now();
            match seat.plan(now.since_ns(began), now, peer_cpu) {
                Plan::Sleep => break,
                Plan::Yield => thread::yield_now(),
                Plan::Spin { .. } => std::hint::spin_loop(),
            }
            if let Some(found) = self.poll(&mut look) {
                seat.policy.came(self.now().since_ns(began));
                return Some(found);
            }
            if is_over(left()) {
                seat.policy.gave_up(self.now().since_ns(began));
                return None;
            }
        }
        let mut slept = false;
        loop {
            // Whoever wakes the driver finds that this is it, or this finds what it left.
            self.polled_at_ns.store(SEATED, Ordering::SeqCst);
            let mut core = self.lock();
            let now = self.now();
            core.receive_seated(now, slept);
            core.finish(now, true);
            if let Some(found) = look() {
                seat.policy.woke(now.since_ns(began), None);
                return Some(found);
            }
            let left = left();
            if is_over(left) {
                seat.policy.gave_up(now.since_ns(began));
                return None;
            }
            if !core.links.prepare_sleep() {
                continue;
            }
            // Only others who drive meanwhile need to tell.
            let armed = cq.set_armed(Some(Arm::Next));
            let due = core.rnic.poll_timeout();
            let blocked = core.blocked.is_some().then_some(SOCKET_RETRY_NS);
            self.sleeps_until_ns
                .store(due.map_or(u64::MAX, |at| at.0), Ordering::Relaxed);
            drop(core);
            let due_ns = due.map(|at| at.since_ns(now));
            let timeout_ns = [left.map(|left| left.as_nanos() as u64), due_ns, blocked];
            self.sleep_in_seat(waker, timeout_ns.into_iter().flatten().min());
            self.sleeps_until_ns.store(0, Ordering::Relaxed);
            let mut core = self.lock();
            core.links.awake();
            cq.set_armed(armed);
            slept = true;
        }
    }

    /// Sleeps until something arrives, somebody wakes this caller, or the time is over.
    fn sleep_in_seat(&self, waker: &Waker, timeout_ns: Option<u64>) {
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as _,
        });
        let mut fds = [
            PollFd::new(&self.watch, PollFlags::IN),
            PollFd::new(&self.seat_kick.0, PollFlags::IN),
            PollFd::new(&waker.0, PollFlags::IN),
        ];
        if poll(&mut fds, timeout.as_ref()).is_ok_and(|n| n > 0) {
            if !fds[1].revents().is_empty() {
                self.seat_kick.reset();
            }
            if !fds[2].revents().is_empty() {
                waker.reset();
            }
        }
    }

    /// The caller that waited and drove goes about its business, and will soon be back: until then nobody drives, unless others
    /// rely on it.
    fn leave_seat(&self) {
        self.polled_at_ns.store(self.now().0.max(1), Ordering::SeqCst);
        // Who comes to rely on it from now on sees that nobody sits here.
        if self.has_channel.load(Ordering::SeqCst) || self.sleepers.load(Ordering::SeqCst) > 0 {
            self.polled_at_ns.store(0, Ordering::SeqCst);
            if self.leased.load(Ordering::SeqCst) {
                self.kick.wake();
            }
        } else if self.parked.load(Ordering::SeqCst) {
            self.kick.wake();
        }
    }
}

/// The time that is left; `None`: there is no end.
fn left_until(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|at| at.saturating_duration_since(Instant::now()))
}

fn is_over(left: Option<Duration>) -> bool {
    left.is_some_and(|left| left.is_zero())
}

impl Core {
    /// Takes in what has arrived, for a caller that is about to sleep, or was woken: what is left in a socket wakes it again.
    fn receive_seated(&mut self, now: Time, woken: bool) {
        if self.links.receive(&mut self.rnic, now) == 0 && woken {
            self.receive(now, RECEIVES_PER_TURN);
        } else {
            self.after_receive(now);
        }
    }
}
