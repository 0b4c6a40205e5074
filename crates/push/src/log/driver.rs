//! The log over connections: the state machine's actions done by clients, all on the caller's thread.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use rdmux_verbs::soft::group::GroupError;
use rdmux_verbs::{Device, OpenError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::link::{Came, Dial, Link, acquire};
use super::writer::{Action, AppendError, Event, Over, Settings, What, Writer};
use crate::key::random_nonce;
use crate::target::local_address_towards;
use crate::{Domain, Error, ErrorCode, Key, Target};

/// Looking again costs less than a wake-up for so long.
const SPIN: Duration = Duration::from_micros(40);

/// How a log is opened.
#[derive(Clone, Debug)]
pub struct Options {
    /// Own address; `None` takes the one from which packets to each server leave.
    pub from: Option<IpAddr>,
    /// Create the log where all replicas are blank.
    pub create: bool,
    /// When there is no room, drop the oldest records that are acknowledged.
    pub drop_oldest: bool,
    /// Drop the records below this sequence number: the last record's, plus one, at most.
    pub trim: Option<u64>,
    /// Spin while waiting: lowest latency, one CPU always busy.
    pub polled: bool,
    /// A majority must have come along within this time, and acknowledge within it later.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            from: None,
            create: false,
            drop_oldest: false,
            trim: None,
            polled: false,
            patience: Duration::from_secs(30),
        }
    }
}

/// Why a log cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The log is over for this writer.
    #[error(transparent)]
    Over(#[from] Over),
    /// What a region holds cannot be this log.
    #[error("{target}: {why}")]
    Region {
        /// Which.
        target: Target,
        /// What is wrong with it.
        why: String,
    },
    /// No majority of the replicas.
    #[error("no majority of the {replicas} replicas within {seconds} s: {states}")]
    NoMajority {
        /// How many there are.
        replicas: usize,
        /// How long was waited.
        seconds: f64,
        /// How each is.
        states: String,
    },
    /// No majority of the replicas, and waiting changes nothing: too many of the servers refuse.
    #[error("no majority of the {replicas} replicas can be had: {states}")]
    Refused {
        /// How many there are.
        replicas: usize,
        /// What those that refuse say.
        states: String,
    },
    /// The record was not taken.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Wakes the log's thread.
#[derive(Debug)]
pub(super) struct Waker(OwnedFd);

impl Waker {
    pub(super) fn wake(&self) {
        // Fails only when it was woken 2^64 times without anybody looking.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// Devices by their own address: one serves all clients.
#[derive(Debug, Default)]
pub(super) struct Devices(Mutex<HashMap<IpAddr, Device>>);

impl Devices {
    pub(super) fn towards(&self, peer: IpAddr, from: Option<IpAddr>) -> Result<Device, Error> {
        let route = match from {
            Some(from) => from,
            None => local_address_towards(peer)?,
        };
        let mut devices = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get(&route) {
            return Ok(device.clone());
        }
        // Where another user has the loopback address that the route takes, the server's own may do.
        let device = match Device::open(route) {
            Err(_) if from.is_none() && peer.is_loopback() => Device::open(peer)?,
            device => device?,
        };
        devices.insert(route, device.clone());
        Ok(device)
    }
}

/// A log that is open for appending.
pub struct Log {
    writer: Writer,
    targets: Vec<Target>,
    /// The session with each replica that the writer asked for last, until it ends it.
    sessions: Vec<Option<u64>>,
    links: HashMap<usize, (u64, Link)>,
    dial: Dial,
    came: mpsc::Receiver<Came>,
    start: Instant,
    changes: Vec<(usize, String)>,
    /// The replicas whose server refused for good when it was asked last, and what it said.
    refused: Vec<Option<String>>,
    domains: Vec<Option<Domain>>,
    /// The replicas whose server is connected.
    connected: Vec<bool>,
    options: Options,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log")
            .field("targets", &self.targets)
            .finish_non_exhaustive()
    }
}

impl Log {
    /// Opens the log that these regions hold, all of them: ends the writer before, and brings a majority to one state.
    pub fn open(targets: &[Target], key: &Key, options: &Options) -> Result<Log, LogError> {
        let random = || -> io::Result<u64> {
            let [a, b, c, d, e, f, g, h, ..] = random_nonce()?;
            Ok(u64::from_be_bytes([a, b, c, d, e, f, g, h]))
        };
        let settings = Settings {
            replicas: targets.len(),
            writer: random()?,
            log: random()?,
            replica_ids: targets.iter().map(|_| random()).collect::<io::Result<_>>()?,
            create: options.create,
            drop_oldest: options.drop_oldest,
            trim: options.trim,
        };
        let (tx, came) = mpsc::channel();
        let waker =
            Waker(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(io::Error::from)?);
        let mut log = Log {
            writer: Writer::new(settings),
            targets: targets.to_vec(),
            sessions: vec![None; targets.len()],
            links: HashMap::new(),
            dial: Dial {
                key: key.clone(),
                options: options.clone(),
                devices: Arc::default(),
                came: tx,
                waker: Arc::new(waker),
            },
            came,
            start: Instant::now(),
            changes: Vec::new(),
            refused: vec![None; targets.len()],
            domains: vec![None; targets.len()],
            connected: vec![false; targets.len()],
            options: options.clone(),
        };
        log.wait(|log| log.writer.is_ready())?;
        Ok(log)
    }

    /// Appends a record; returns its sequence number. Waits for room, not for the acknowledgement.
    pub fn append(&mut self, record: &[u8]) -> Result<u64, LogError> {
        loop {
            match self.writer.append(record) {
                Ok(sequence) => {
                    self.turn()?;
                    return Ok(sequence);
                }
                Err(AppendError::Over(over)) => return Err(self.over(over)),
                Err(AppendError::Busy | AppendError::NotReady) => {
                    let acknowledged = self.acknowledged();
                    self.wait(|log| {
                        log.writer.is_ready() && (log.acknowledged() > acknowledged || !log.is_behind())
                    })?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until a record is acknowledged.
    pub fn wait_for(&mut self, sequence: u64) -> Result<(), LogError> {
        self.wait(|log| log.acknowledged() >= sequence)
    }

    /// Does what can be done without waiting; returns the last record that is acknowledged.
    pub fn poll(&mut self) -> Result<u64, LogError> {
        self.turn()?;
        Ok(self.acknowledged())
    }

    /// Waits until something happens, or `fd` is readable, or `timeout` is over.
    pub fn sleep(&mut self, fd: Option<impl AsFd>, timeout: Duration) -> Result<(), LogError> {
        self.sleep_on(fd.as_ref().map(AsFd::as_fd), timeout)
    }

    /// The last record that is acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.writer.acknowledged()
    }

    /// The last record that was appended.
    pub fn last(&self) -> u64 {
        self.writer.last()
    }

    /// The first record that is still there.
    pub fn first(&self) -> u64 {
        self.writer.first()
    }

    /// The term of this writer.
    pub fn term(&self) -> u64 {
        self.writer.epoch().term
    }

    /// What became of the replicas since this was asked last: which, and how it is.
    pub fn take_changes(&mut self) -> Vec<(usize, String)> {
        std::mem::take(&mut self.changes)
    }

    /// How each replica is, in words, and what of it survives a loss of power, as far as it is known.
    pub fn replicas(&self) -> impl Iterator<Item = (&Target, String, Option<Domain>)> {
        let states = (0..self.targets.len()).map(|at| self.writer.describe(at));
        self.targets
            .iter()
            .zip(states)
            .zip(&self.domains)
            .map(|((target, state), domain)| (target, state, *domain))
    }

    /// Drops the records below a sequence number; returns the first that is left.
    pub fn trim(&mut self, below: u64) -> Result<u64, LogError> {
        let first = self.writer.trim(below);
        self.settle()?;
        Ok(first)
    }

    /// Waits until everything is acknowledged, tells the replicas so, and ends the connections.
    pub fn close(mut self) -> Result<(), LogError> {
        self.wait(|log| !log.is_behind())?;
        self.writer.mark();
        self.settle()?;
        for (_, (_, link)) in self.links.drain() {
            link.client.close();
        }
        Ok(())
    }

    /// Lets the replicas that are in step finish, for a while.
    fn settle(&mut self) -> Result<(), LogError> {
        let end = Instant::now() + Duration::from_secs(2).min(self.options.patience);
        self.turn()?;
        while !self.writer.is_quiet() && Instant::now() < end {
            self.sleep_on(None, end.saturating_duration_since(Instant::now()))?;
        }
        Ok(())
    }

    fn is_behind(&self) -> bool {
        self.writer.acknowledged() < self.writer.last()
    }

    /// Waits until `done`. Replicas that do nothing for too long, or refuse for good, are not waited for.
    fn wait(&mut self, done: impl Fn(&Log) -> bool) -> Result<(), LogError> {
        let patience = self.options.patience;
        let mut deadline = Instant::now() + patience;
        let mut acknowledged = self.acknowledged();
        self.turn()?;
        while !done(self) {
            let refused = self.refused.iter().flatten().count();
            if refused >= self.targets.len().div_ceil(2) {
                let named = self.targets.iter().zip(&self.refused);
                let states = named.filter_map(|(target, why)| Some(format!("{target}: {}", why.as_ref()?)));
                return Err(LogError::Refused {
                    replicas: self.targets.len(),
                    states: states.collect::<Vec<_>>().join("; "),
                });
            }
            let now = Instant::now();
            if self.acknowledged() > acknowledged {
                acknowledged = self.acknowledged();
                deadline = now + patience;
            }
            if now >= deadline {
                let replicas = self.replicas().zip(&self.connected);
                let states = replicas.map(|((target, state, _), connected)| {
                    let state = match (connected, &*state) {
                        (true, _) if !self.writer.is_ready() => "connected, and waits for the others",
                        (true, "") => "connected",
                        (false, "") => "no answer",
                        (_, state) => state,
                    };
                    format!("{target}: {state}")
                });
                return Err(LogError::NoMajority {
                    replicas: self.targets.len(),
                    seconds: patience.as_secs_f64(),
                    states: states.collect::<Vec<_>>().join("; "),
                });
            }
            self.sleep_on(None, deadline - now)?;
        }
        Ok(())
    }

    fn over(&self, over: Over) -> LogError {
        match over {
            Over::Replica { replica, why } => LogError::Region {
                target: self.targets[replica].clone(),
                why,
            },
            over => over.into(),
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Does all that can be done at once.
    fn turn(&mut self) -> Result<(), LogError> {
        loop {
            let mut busy = false;
            while let Ok(came) = self.came.try_recv() {
                busy = true;
                self.arrived(came);
            }
            for at in 0..self.targets.len() {
                while let Some((session, link)) = self.links.get_mut(&at) {
                    let (session, now) = (*session, self.start.elapsed());
                    match link.poll() {
                        Ok(None) => break,
                        Ok(Some(bytes)) => self.writer.handle_done(at, session, bytes, now),
                        Err(error) => self.lost(at, session, &error),
                    }
                    busy = true;
                }
            }
            if self.writer.poll_timeout().is_some_and(|due| due <= self.now()) {
                self.writer.handle_timeout(self.now());
                busy = true;
            }
            while let Some(action) = self.writer.poll_action() {
                busy = true;
                self.act(action)?;
            }
            while let Some(event) = self.writer.poll_event() {
                match event {
                    Event::Replica { replica, state } => self.changes.push((replica, state)),
                    Event::Over(over) => return Err(self.over(over)),
                    Event::Ready { .. } | Event::Acknowledged { .. } => {}
                }
            }
            if !busy {
                return Ok(());
            }
        }
    }

    fn act(&mut self, action: Action) -> Result<(), LogError> {
        let Action {
            replica,
            session,
            what,
        } = action;
        match what {
            What::Connect => {
                self.sessions[replica] = Some(session);
                let target = self.targets[replica].clone();
                self.dial
                    .spawn((replica, session), false, move |dial| dial.connect(&target))?;
            }
            What::Acquire => {
                if let Some((_, link)) = self.links.remove(&replica) {
                    let Link { client, mapping, .. } = link;
                    self.dial
                        .spawn((replica, session), true, move |_| acquire(client, mapping))?;
                }
            }
            // Dropped, it ends at once.
            What::Disconnect => {
                self.sessions[replica] = None;
                self.connected[replica] = false;
                self.links.remove(&replica);
            }
            what => {
                if let Some((known, link)) = self.links.get_mut(&replica)
                    && *known == session
                    && let Err(error) = link.take(what)
                {
                    self.lost(replica, session, &error);
                }
            }
        }
        Ok(())
    }

    fn arrived(&mut self, came: Came) {
        let Came {
            replica,
            session,
            acquired,
            result,
        } = came;
        // It took longer than the writer waited: dropped, it ends at once.
        if self.sessions[replica] != Some(session) {
            return;
        }
        match result.and_then(|(client, mapping)| Link::new(client, mapping)) {
            Ok(link) => {
                self.refused[replica] = None;
                self.connected[replica] = true;
                let region_bytes = link.mapping.region_bytes();
                self.domains[replica] = Some(link.mapping.domain());
                self.links.insert(replica, (session, link));
                if acquired {
                    self.writer.handle_acquired(replica, session);
                } else {
                    self.writer.handle_connected(replica, session, region_bytes);
                }
            }
            Err(error) => self.lost(replica, session, &error),
        }
    }

    fn lost(&mut self, replica: usize, session: u64, error: &Error) {
        if self
            .links
            .get(&replica)
            .is_some_and(|(known, _)| *known == session)
        {
            self.links.remove(&replica);
        }
        self.connected[replica] = false;
        self.refused[replica] = is_final(error).then(|| error.to_string());
        let now = self.now();
        self.writer.handle_lost(replica, session, &error.to_string(), now);
    }

    fn sleep_on(&mut self, fd: Option<std::os::fd::BorrowedFd>, timeout: Duration) -> Result<(), LogError> {
        let before = (self.acknowledged(), self.writer.is_ready());
        let begin = Instant::now();
        loop {
            self.turn()?;
            let waited = begin.elapsed();
            if (self.acknowledged(), self.writer.is_ready()) != before || waited >= timeout {
                return Ok(());
            }
            if !self.options.polled && waited >= SPIN {
                break;
            }
            if self.options.polled && fd.is_some_and(is_readable) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let mut failed = Vec::new();
        for (replica, (session, link)) in &mut self.links {
            if let Err(error) = link.client.arm() {
                failed.push((*replica, *session, error));
            }
        }
        for (replica, session, error) in failed {
            self.lost(replica, session, &error);
        }
        // What came before it was armed is here.
        self.turn()?;
        if (self.acknowledged(), self.writer.is_ready()) != before {
            return Ok(());
        }
        let mut until = timeout.saturating_sub(begin.elapsed());
        if let Some(due) = self.writer.poll_timeout() {
            until = until.min(due.saturating_sub(self.now()));
        }
        let waker = self.dial.waker.clone();
        let mut fds = vec![PollFd::new(&waker.0, PollFlags::IN)];
        for (_, link) in self.links.values() {
            fds.push(PollFd::new(&link.client, PollFlags::IN));
        }
        if let Some(fd) = &fd {
            fds.push(PollFd::new(fd, PollFlags::IN));
        }
        let timeout = Timespec {
            tv_sec: until.as_secs().min(3600) as i64,
            tv_nsec: until.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if !fds[0].revents().is_empty() {
            // The clients' are reset when they are armed again.
            let _ = rustix::io::read(&waker.0, &mut [0u8; 8]);
        }
        drop(fds);
        self.turn()
    }
}

/// Whether a server that is asked again says the same, until somebody changes how it, or this side, was started.
fn is_final(error: &Error) -> bool {
    use ErrorCode::*;
    match error {
        Error::WrongKey(_) | Error::Open(OpenError::Group(GroupError::NotLocal { .. })) => true,
        Error::Refused { code, .. } => {
            matches!(code, BadVersion | BadKey | NoSuchRegion | ReadOnly | NotSupported)
        }
        _ => false,
    }
}

fn is_readable(fd: std::os::fd::BorrowedFd) -> bool {
    let none = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&none)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::{BREAK_TIMEOUT_DEFAULT, Config};
    use crate::{Name, Region, Server};

    #[test]
    fn arrived__a_session_that_is_over_does_not_take_the_place_of_the_newer() {
        let key = Key::new([7; 32]);
        let server = Server::bind(Config {
            listen: vec!["127.0.9.91:7174".parse().unwrap()],
            key: key.clone(),
            regions: vec![Region::anonymous(Name::new("log").unwrap(), 1 << 16).unwrap()],
            keepalive: Duration::from_secs(20),
            break_timeout: BREAK_TIMEOUT_DEFAULT,
            mappings_max: 64,
            device: rdmux_verbs::Options::default(),
        })
        .unwrap();
        let stopper = server.stopper();
        let serving = std::thread::spawn(move || server.run(|_| {}));
        let target: Target = "rdmux://127.0.9.91:7174/log".parse().unwrap();
        let options = Options {
            create: true,
            patience: Duration::from_secs(10),
            ..Options::default()
        };
        let mut log = Log::open(std::slice::from_ref(&target), &key, &options).unwrap();
        let result = log.dial.connect(&target);
        assert!(result.is_ok());
        log.arrived(Came {
            replica: 0,
            session: 0,
            acquired: false,
            result,
        });
        let record = log.append(b"record").unwrap();
        log.wait_for(record).unwrap();
        log.close().unwrap();
        stopper.stop();
        serving.join().unwrap().unwrap();
    }
}
