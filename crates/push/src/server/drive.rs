//! The server's thread: it handles what arrives, and waits for more, by polling for a while where that pays and otherwise
//! asleep.

use std::io;
use std::time::{Duration, Instant};

use rdmux_verbs::waiting::{Conditions, Plan, Policy, WaitMode};
use rdmux_verbs::{Load, wake_cost_ns};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::control::Local;
use super::work::thread_cpu_ns;
use super::{Done, Event, Server};

/// Polls for messages per poll for new connections: connections are rarer, and the poll for them takes a lock.
const ACCEPT_EVERY: u32 = 64;

/// Maximum number of events handled before the thread reads the clock.
const TURN: usize = 256;

/// Waiting policy of the thread.
#[derive(Debug)]
pub(super) struct Waiting {
    policy: Policy,
    load: Load,
    since: Instant,
}

impl Waiting {
    pub(super) fn new(pinned: Option<WaitMode>) -> Waiting {
        let mut policy = Policy::new(wake_cost_ns());
        policy.pin(pinned.or_else(WaitMode::of_environment));
        Waiting {
            policy,
            load: Load::default(),
            since: Instant::now(),
        }
    }

    fn plan(&mut self, elapsed_ns: u64) -> Plan {
        // Reading the machine's load costs something: only a thread that would poll reads it.
        if self.policy.plan(elapsed_ns, Conditions::default()) == Plan::Sleep {
            return Plan::Sleep;
        }
        let now_ns = self.since.elapsed().as_nanos() as u64;
        self.policy.plan(elapsed_ns, self.load.look(now_ns))
    }
}

impl Server {
    /// Serves until stopped. Passes each event to `log`.
    pub fn run(mut self, mut log: impl FnMut(&Event)) -> io::Result<()> {
        let metrics = self.metrics();
        let mut tell = |event: Event| {
            metrics.count(&event);
            log(&event);
        };
        self.booked_ns = thread_cpu_ns();
        loop {
            for at in 0..self.service.driver.endpoints.len() {
                self.accept(at);
            }
            let more = self.take_turn();
            let now = Instant::now();
            let next = self.handle_timers(now);
            self.service.poll_events().for_each(&mut tell);
            if self.stop {
                break;
            }
            if !more {
                self.wait(now, next.map(|next| next.saturating_duration_since(now)))?;
            }
        }
        self.service.shut_down(self.now());
        self.service.poll_events().for_each(&mut tell);
        Ok(())
    }

    /// Handles what has arrived, but not for ever: deadlines, new connections and the server's end also concern clients that
    /// send nothing. Returns whether there may be more.
    fn take_turn(&mut self) -> bool {
        for _ in 0..TURN {
            if !self.take_done() {
                break;
            }
        }
        (0..TURN).all(|_| self.take_one())
    }

    /// Handles one thing that has arrived; drives the devices if there is nothing.
    fn take_one(&mut self) -> bool {
        for _ in 0..self.service.driver.endpoints.len() {
            let at = self.next_endpoint % self.service.driver.endpoints.len();
            self.next_endpoint = at + 1;
            if let Some(wc) = self.service.driver.endpoints[at].cq.poll() {
                self.completed(at, &wc);
                return true;
            }
        }
        self.take_done()
    }

    /// Handles one message from another thread.
    fn take_done(&mut self) -> bool {
        let Ok(done) = self.done_rx.try_recv() else {
            return false;
        };
        let (now, service) = (self.began.elapsed(), &mut self.service);
        match done {
            Done::Stop => self.stop = true,
            Done::Finished(finished) => {
                let (by_message, cpu_ns) = (finished.by_message, finished.cpu_ns);
                service.finished(now, finished);
                self.book(by_message, cpu_ns);
            }
            Done::Local(Local::Begin {
                region,
                access,
                share,
                reply,
            }) => service.handle_local(now, &region, access, share, reply),
            Done::Local(Local::End(number)) => service.handle_local_end(now, number),
            Done::Local(Local::Wanted(number, wanted)) => service.handle_wanted(now, number, wanted),
        }
        true
    }

    /// Waits until something may have arrived, and handles what it finds meanwhile. With `None`, waits without a limit.
    fn wait(&mut self, began: Instant, timeout: Option<Duration>) -> io::Result<()> {
        let elapsed_ns = || began.elapsed().as_nanos() as u64;
        let timeout_ns = timeout.map_or(u64::MAX, |timeout| timeout.as_nanos() as u64);
        let (mut turns, clients) = (0u32, self.service.clients_so_far());
        loop {
            match self.waiting.plan(elapsed_ns()) {
                Plan::Sleep => break,
                Plan::Yield => std::thread::yield_now(),
                Plan::Spin { .. } => std::hint::spin_loop(),
            }
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(ACCEPT_EVERY) {
                (0..self.service.driver.endpoints.len()).for_each(|at| self.accept(at));
            }
            if self.take_one() || self.service.clients_so_far() != clients {
                self.waiting.policy.came(elapsed_ns());
                return Ok(());
            }
            if elapsed_ns() >= timeout_ns {
                self.waiting.policy.gave_up(elapsed_ns());
                return Ok(());
            }
        }
        for at in 0..self.service.driver.endpoints.len() {
            // A wait of zero time arms the queue and polls once more: no completion is missed.
            if let Some(wc) = self.service.driver.endpoints[at].cq.wait(Duration::ZERO)? {
                self.completed(at, &wc);
                self.waiting.policy.came(elapsed_ns());
                return Ok(());
            }
        }
        if self.sleep(timeout.map(|timeout| timeout.saturating_sub(began.elapsed())))? {
            self.waiting.policy.woke(elapsed_ns(), None);
        } else {
            self.waiting.policy.gave_up(elapsed_ns());
        }
        Ok(())
    }

    /// Sleeps; returns whether something woke the thread.
    fn sleep(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let mut fds = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        for endpoint in &self.service.driver.endpoints {
            fds.push(PollFd::new(&endpoint.cq, PollFlags::IN));
            fds.push(PollFd::new(&endpoint.listener, PollFlags::IN));
        }
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().min(3600) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let woken: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        if woken.first() == Some(&true) {
            // The other descriptors are reset when they are armed and polled again.
            let _ = rustix::io::read(&*self.wake, &mut [0u8; 8]);
        }
        Ok(woken.contains(&true))
    }
}
