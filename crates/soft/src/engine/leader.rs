//! Waiting for a completion, by the Leader/Followers pattern. One waiting caller at a time is the *leader* and takes the thread's place: it
//! looks or sleeps as the policy decides, and arriving packets wake it directly, not through the thread. Other callers that wait meanwhile
//! are *followers*: they sleep and rely on the leader.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use rdmux_rnic::{Arm, CompletionQueue, Time};
use rdmux_shm::NapWord;
use rdmux_shm::nap;
use rdmux_verbs::provider::{conditions, current_cpu};
use rdmux_verbs::waiting::{Conditions, Plan, Policy, WaitMode};
use rdmux_verbs::wake_cost_ns;
use rustix::event::{PollFd, PollFlags, poll};

use super::handover::Wake;
use super::sleep::timespec;
use super::{Core, Engine, RECEIVES_PER_PASS, SOCKET_RETRY_NS, Waker};

/// Way in which a driver waits: the leader, or the thread.
#[derive(Debug)]
pub(super) struct Waiter {
    policy: Policy,
}

/// Ways of waiting of the leader. The caller that holds the lock around this is the leader.
#[derive(Debug)]
pub(super) struct Leader {
    /// A leader that sleeps in the thread's place.
    leading: Waiter,
    /// The words of its nap.
    words: Vec<NapWord>,
    /// A leader that looks for a moment before it sleeps on descriptors.
    looking: Waiter,
}

impl Leader {
    pub(super) fn new(pinned: Option<WaitMode>) -> Leader {
        Leader {
            leading: Waiter::new(pinned),
            words: Vec::new(),
            // Two callers that sleep would wake each other for ever, if each looked no longer than the other takes to wake up.
            looking: Waiter::for_wake_ups(2, pinned),
        }
    }
}

impl Waiter {
    pub(super) fn new(pinned: Option<WaitMode>) -> Waiter {
        Waiter::for_wake_ups(1, pinned)
    }

    /// Returns one that looks for as long as so many wake-ups take.
    fn for_wake_ups(wake_ups: u64, pinned: Option<WaitMode>) -> Waiter {
        let mut policy = Policy::new(wake_ups * wake_cost_ns());
        policy.pin(pinned);
        Waiter { policy }
    }

    /// Records that something came `waited_ns` after the wait began.
    pub(super) fn ended(&mut self, waited_ns: u64, slept: bool) {
        if slept {
            self.policy.woke(waited_ns, None);
        } else {
            self.policy.came(waited_ns);
        }
    }

    /// Decides the next step while nothing has come, `elapsed_ns` after the wait began.
    pub(super) fn plan(&mut self, elapsed_ns: u64, now: Time, peer_cpu: Option<u32>) -> Plan {
        // Most calls end here, without looking at the conditions.
        if self.policy.plan(elapsed_ns, Conditions::default()) == Plan::Sleep {
            return Plan::Sleep;
        }
        let conditions = Conditions {
            shares_cpu: peer_cpu == Some(current_cpu()),
            ..conditions(now.0)
        };
        self.policy.plan(elapsed_ns, conditions)
    }
}

impl Engine {
    /// Wakes all who sleep in wait for arrivals after a link has come up: its peer rings the doorbell only for those that announce their
    /// sleep after that. Each of them may be awake already and leave without another sleep, so the others have to know of the link, too.
    pub(super) fn wake_sleepers(&self) {
        self.kick.wake();
        self.leader_kick.wake();
        self.watch_kick.wake();
    }

    pub(super) fn wake(&self, who: Wake) {
        match who {
            Wake::Nobody => {}
            Wake::Thread => self.kick.wake(),
        }
    }

    /// Hands the sockets to the thread for a caller that goes to sleep, or may do so since it has armed a completion queue. Sends the
    /// acknowledgements that the caller left pending.
    pub(crate) fn hand_over(&self) {
        let mut core = self.lock();
        let now = self.now();
        core.spinner.somebody_sleeps();
        core.finish(now, true);
        self.wake_early(&core);
        // A caller that relies on the thread relies on no caller that watches, which may be awake and busy.
        if core.is_watched && !self.set_watch(&mut core) {
            self.kick.wake();
        }
        drop(core);
        self.wake(self.hand_over.hand_over());
    }

    /// Sleeps until woken, while others drive. Returns false if the time is over first.
    pub(crate) fn sleep(&self, waker: &Waker, left: Option<Duration>) -> bool {
        self.sleep_while(|| waker.wait(left))
    }

    /// Sleeps as `sleep` does, while others drive.
    pub(crate) fn sleep_while<R>(&self, sleep: impl FnOnce() -> R) -> R {
        self.hand_over.rely();
        self.hand_over();
        let woken = sleep();
        self.hand_over.rely_no_more();
        woken
    }

    /// Looks for a completion, and drives, on behalf of a caller that is about to sleep on descriptors until a completion queue notifies
    /// it. Does so for as long as the policy expects that to cost less than a wake-up. The thread sleeps meanwhile, and peers need not
    /// wake it.
    ///
    /// `None`: the caller should sleep, and then report how long it slept ([`Engine::slept`]).
    pub(crate) fn look_before_sleep<R>(&self, mut look: impl FnMut() -> Option<R>) -> Option<R> {
        let mut told = self.told.load(Ordering::Acquire);
        if let Some(found) = look() {
            return Some(found);
        }
        // In this mode the thread always looks, and signals must be able to wake callers.
        if self.waiting == Some(WaitMode::Running) {
            return None;
        }
        let mut leader = self.leader.try_lock()?;
        let waiter = &mut leader.looking;
        let began = self.now();
        let mut looks = None;
        loop {
            let now = self.now();
            let peer_cpu = looks.as_ref().and_then(|looks: &LooksOut<'_>| looks.peer_cpu);
            match waiter.plan(now.since_ns(began), now, peer_cpu) {
                Plan::Sleep => break,
                Plan::Yield => thread::yield_now(),
                Plan::Spin { .. } => std::hint::spin_loop(),
            }
            let looks = looks.get_or_insert_with(|| LooksOut::begin(self));
            if let Some(mut core) = self.try_lock() {
                let now = self.now();
                let received = core.receive_polled(now);
                core.finish(now, received == 0);
                self.wake_early(&core);
            }
            let told_now = self.told.load(Ordering::Acquire);
            if std::mem::replace(&mut told, told_now) != told_now
                && let Some(found) = look()
            {
                waiter.policy.came(self.now().since_ns(began));
                looks.found = true;
                return Some(found);
            }
        }
        self.lock().standby.caller_sleeps();
        None
    }

    /// Records that a caller slept on descriptors from `since` until something came.
    pub(crate) fn slept(&self, since: Instant) {
        if let Some(mut leader) = self.leader.try_lock() {
            let slept_ns = since.elapsed().as_nanos() as u64;
            leader.looking.policy.woke(slept_ns, None);
        }
    }

    /// Waits until `look` finds something: looks again and again, or sleeps, as the policy decides. The caller drives meanwhile, if no
    /// other caller does: so arriving packets wake it directly, not through a thread that they woke. `waker` signals completions of `cq`
    /// while that is armed. `None`: the time is over.
    pub(crate) fn wait<R>(
        &self,
        deadline: Option<Instant>,
        waker: &Waker,
        cq: &CompletionQueue,
        mut look: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let left = || left_until(deadline);
        if let Some(found) = look() {
            return Some(found);
        }
        let Some(mut leader) = self.leader.try_lock() else {
            if let Some(found) = self.drive_and_look(1, &mut look) {
                return Some(found);
            }
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
        // Stops leading, however this wait ends, before anybody else can lead: followers may rely on this caller.
        let _leads = Leads(self);
        self.wait_as_leader(&mut leader, deadline, waker, cq, look)
    }

    /// Part of [`Engine::wait`] of the leader.
    fn wait_as_leader<R>(
        &self,
        leader: &mut Leader,
        deadline: Option<Instant>,
        waker: &Waker,
        cq: &CompletionQueue,
        mut look: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let Leader {
            leading: waiter,
            words,
            ..
        } = leader;
        let began = self.now();
        // A caller that is to sleep at once looks on its way there. What the first look finds was no wait.
        let mut has_looked = waiter.plan(0, began, None) != Plan::Sleep;
        if has_looked {
            if let Some(found) = self.drive_and_look(1, &mut look) {
                return Some(found);
            }
            let peer_cpu = {
                let mut core = self.lock();
                core.links.tell_cpu(current_cpu());
                core.links.peer_cpu()
            };
            loop {
                let now = self.now();
                match waiter.plan(now.since_ns(began), now, peer_cpu) {
                    Plan::Sleep => break,
                    Plan::Yield => thread::yield_now(),
                    Plan::Spin { .. } => std::hint::spin_loop(),
                }
                if let Some(found) = self.poll(&mut look) {
                    waiter.policy.came(self.now().since_ns(began));
                    return Some(found);
                }
                if is_over(left_until(deadline)) {
                    waiter.policy.gave_up(self.now().since_ns(began));
                    return None;
                }
            }
        }
        self.hand_over.lead();
        let mut core = self.lock();
        let mut woken = false;
        loop {
            let now = self.now();
            core.links.tell_cpu(current_cpu());
            core.receive_as_leader(now, woken);
            core.finish(now, true);
            self.wake_early(&core);
            // Only completions that others bring from here on need to notify this caller. Lanes bring them without the engine's lock, so the
            // last look comes after this.
            cq.watch(true);
            if let Some(found) = look() {
                cq.watch(false);
                if has_looked {
                    waiter.policy.woke(now.since_ns(began), None);
                }
                return Some(found);
            }
            has_looked = true;
            let left = deadline.map(|at| at.saturating_duration_since(self.instant(now)));
            if is_over(left) {
                cq.watch(false);
                waiter.policy.gave_up(now.since_ns(began));
                return None;
            }
            let Some(naps) = core.begin_sleep(now, &self.nap, words) else {
                cq.watch(false);
                continue;
            };
            let due = core.rnic.poll_timeout();
            let blocked = core.blocked.is_some().then_some(SOCKET_RETRY_NS);
            core.sleeps.leader_ns = due.map_or(u64::MAX, |at| at.0);
            drop(core);
            let due_ns = due.map(|at| at.since_ns(now));
            let timeout_ns = [left.map(|left| left.as_nanos() as u64), due_ns, blocked];
            let timeout_ns = timeout_ns.into_iter().flatten().min();
            let supported = if naps {
                self.nap_as_leader(waker, words, timeout_ns)
            } else {
                self.sleep_as_leader(waker, timeout_ns);
                true
            };
            // A caller that polls may have taken the place meanwhile.
            self.hand_over.lead();
            core = self.lock();
            core.sleeps.leader_ns = 0;
            core.leader_slept = true;
            core.naps &= supported;
            core.end_sleep(naps, &self.nap);
            // They would keep the memory of links that end.
            words.clear();
            cq.watch(false);
            // Beside a napper the thread reads the sockets.
            woken = !naps;
        }
    }

    /// Naps until a peer puts a packet into its ring, somebody wakes this caller, or the time is over. Returns false if the system does not
    /// support naps.
    fn nap_as_leader(&self, waker: &Waker, words: &[NapWord], timeout_ns: Option<u64>) -> bool {
        // Others may have left something before this nap was announced.
        let is_woken = self.leader_kick.is_woken() || waker.is_woken();
        let napped = match is_woken {
            true => Ok(()),
            false => nap::wait(&self.nap, words, timeout_ns.map(Duration::from_nanos)),
        };
        self.leader_kick.reset_if_woken();
        waker.reset_if_woken();
        napped.is_ok()
    }

    /// Sleeps until something arrives, somebody wakes this caller, or the time is over.
    fn sleep_as_leader(&self, waker: &Waker, timeout_ns: Option<u64>) {
        let timeout = timeout_ns.map(timespec);
        let mut fds = [
            PollFd::new(&self.arrivals, PollFlags::IN),
            PollFd::new(self.leader_kick.fd(), PollFlags::IN),
            PollFd::new(waker.fd(), PollFlags::IN),
        ];
        if poll(&mut fds, timeout.as_ref()).is_ok_and(|n| n > 0) {
            self.leader_kick.reset_if_woken();
            if !fds[2].revents().is_empty() {
                waker.reset();
            }
        }
    }
}

/// Stops leading when it is dropped, also while a panic of a caller's memory unwinds.
struct Leads<'a>(&'a Engine);

impl Drop for Leads<'_> {
    fn drop(&mut self) {
        let Leads(engine) = self;
        let is_any_armed = || engine.armed_queues.any();
        engine.wake(engine.hand_over.stop_leading(engine.now().0, is_any_armed));
    }
}

/// A caller's short time of looking beside a thread that may sleep.
struct LooksOut<'a> {
    engine: &'a Engine,
    peer_cpu: Option<u32>,
    found: bool,
}

impl LooksOut<'_> {
    fn begin(engine: &Engine) -> LooksOut<'_> {
        let mut core = engine.lock();
        core.links.tell_cpu(current_cpu());
        core.caller_looks = true;
        engine.set_watch(&mut core);
        let peer_cpu = core.links.peer_cpu();
        LooksOut {
            engine,
            peer_cpu,
            found: false,
        }
    }
}

impl Drop for LooksOut<'_> {
    /// Lets arriving packets wake the watcher again, and processes those that arrived before.
    fn drop(&mut self) {
        let engine = self.engine;
        let mut core = engine.lock();
        core.caller_looks = false;
        if self.found {
            core.standby.caller_found();
        }
        engine.leave_to_watch(&mut core);
    }
}

/// Returns the remaining time; `None`: there is no deadline.
fn left_until(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|at| at.saturating_duration_since(Instant::now()))
}

fn is_over(left: Option<Duration>) -> bool {
    left.is_some_and(|left| left.is_zero())
}

impl Core {
    /// Processes arrived packets, for a caller that is about to sleep, or was woken: packets that remain in a socket wake it again. Returns
    /// how many datagrams and trains.
    pub(super) fn receive_as_leader(&mut self, now: Time, woken: bool) -> usize {
        let received = self.receive_linked(now);
        if received == 0 && woken {
            return self.receive(now, RECEIVES_PER_PASS);
        }
        self.after_receive(now);
        received
    }
}
