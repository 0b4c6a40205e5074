//! The log over connections: clients perform the state machine's actions, all on the caller's thread.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rand_core::{OsRng, TryRngCore};
use rdmux_push::{Domain, Error, ErrorCode, Key, Target, TargetError};
use rdmux_runtime::{Inbox, Waiting, Workers, mailbox};
use rdmux_verbs::OpenError;
use rdmux_verbs::waiting::WaitMode;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::link::{Devices, Dial, Session, SessionEvent};
use super::writer::{Action, AppendError, Over, Settings, What, Writer, WriterEvent};

/// Settings for opening a log.
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
    /// Time within which a majority must be ready, and later must acknowledge.
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

/// Reason why a log cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The log is over for this writer.
    #[error(transparent)]
    Over(#[from] Over),
    /// The contents of a region cannot be part of this log.
    #[error("{target}: {why}")]
    Region {
        /// The region.
        target: Target,
        /// Reason, in words.
        why: String,
    },
    /// No majority of the replicas is available.
    #[error("no majority of the {replicas} replicas within {seconds} s: {states}")]
    NoMajority {
        /// Number of replicas.
        replicas: usize,
        /// Time waited, in seconds.
        seconds: f64,
        /// State of each replica.
        states: String,
    },
    /// No majority of the replicas is available, and waiting does not help: too many of the servers refuse.
    #[error("no majority of the {replicas} replicas is possible: {states}")]
    Refused {
        /// Number of replicas.
        replicas: usize,
        /// Errors of the servers that refuse.
        states: String,
    },
    /// The writer did not accept the record.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A replica's name to resolve.
struct Resolve {
    replica: usize,
    target: Target,
}

/// The addresses of a replica's server.
struct Resolved {
    replica: usize,
    result: Result<Vec<SocketAddr>, TargetError>,
}

fn resolve(jobs: Vec<Resolve>, report: &mut dyn FnMut(Resolved) -> bool) {
    for job in jobs {
        let resolved = Resolved {
            replica: job.replica,
            result: job.target.resolve(),
        };
        if !report(resolved) {
            return;
        }
    }
}

/// A log that is open for appending.
pub struct Log {
    writer: Writer,
    targets: Vec<Target>,
    /// The session with each replica, if there is one.
    sessions: Vec<Option<Session>>,
    dial: Dial,
    /// Resolves names: on a thread for each, so that none waits for the servers of another.
    resolver: Workers<usize, Resolve, Resolved>,
    resolved: Inbox<Resolved>,
    /// Set for each replica whose name is being resolved.
    resolving: Vec<bool>,
    waiting: Waiting,
    start: Instant,
    changes: Vec<(usize, String)>,
    /// Error of each replica whose server refused for good at the last attempt.
    refused: Vec<Option<String>>,
    domains: Vec<Option<Domain>>,
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
    /// Opens the log in these regions, which must be all of its regions: ends the previous writer, and brings a majority to one
    /// state.
    pub fn open(targets: &[Target], key: &Key, options: &Options) -> Result<Log, LogError> {
        let random = || OsRng.try_next_u64().map_err(io::Error::other);
        let settings = Settings {
            replicas: targets.len(),
            writer: random()?,
            log: random()?,
            replica_ids: targets.iter().map(|_| random()).collect::<io::Result<_>>()?,
            create: options.create,
            drop_oldest: options.drop_oldest,
            trim: options.trim,
        };
        let (mailbox, resolved) = mailbox()?;
        let mut log = Log {
            writer: Writer::new(settings),
            targets: targets.to_vec(),
            sessions: targets.iter().map(|_| None).collect(),
            dial: Dial {
                key: key.clone(),
                from: options.from,
                devices: Devices::default(),
            },
            resolver: Workers::new("log-resolve", 1, resolve, mailbox),
            resolving: vec![false; targets.len()],
            resolved,
            waiting: Waiting::new(options.polled.then_some(WaitMode::Running)),
            start: Instant::now(),
            changes: Vec::new(),
            refused: vec![None; targets.len()],
            domains: vec![None; targets.len()],
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
                    self.progress()?;
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

    /// Does all work that needs no waiting; returns the sequence number of the last acknowledged record.
    pub fn poll(&mut self) -> Result<u64, LogError> {
        self.progress()?;
        Ok(self.acknowledged())
    }

    /// Waits until the log makes progress, `fd` is readable, or `timeout` expires.
    pub fn sleep(&mut self, fd: Option<impl AsFd>, timeout: Duration) -> Result<(), LogError> {
        self.sleep_on(fd.as_ref().map(AsFd::as_fd), timeout)
    }

    /// Returns the sequence number of the last acknowledged record.
    pub fn acknowledged(&self) -> u64 {
        self.writer.acknowledged()
    }

    /// Returns the sequence number of the last appended record.
    pub fn last(&self) -> u64 {
        self.writer.last()
    }

    /// Returns the sequence number of the first record that is not dropped.
    pub fn first(&self) -> u64 {
        self.writer.first()
    }

    /// Returns the term of this writer.
    pub fn term(&self) -> u64 {
        self.writer.epoch().term
    }

    /// Returns the replicas' state changes since the last call: the replica's index and its state in words.
    pub fn take_changes(&mut self) -> Vec<(usize, String)> {
        std::mem::take(&mut self.changes)
    }

    /// Returns each replica's target, its state in words, and, once known, how much of its contents survives a loss of power.
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

    /// Waits until everything is acknowledged, records that in the replicas' headers, and ends the connections: with a goodbye
    /// where no request is in flight.
    pub fn close(mut self) -> Result<(), LogError> {
        self.wait(|log| !log.is_behind())?;
        self.writer.mark();
        self.settle()?;
        for session in self.sessions.drain(..).flatten() {
            session.close();
        }
        Ok(())
    }

    /// Waits, for a limited time, until the replicas that are in step have no request in flight.
    fn settle(&mut self) -> Result<(), LogError> {
        let end = Instant::now() + Duration::from_secs(2).min(self.options.patience);
        self.progress()?;
        while !self.writer.is_quiet() && Instant::now() < end {
            self.sleep_on(None, end.saturating_duration_since(Instant::now()))?;
        }
        Ok(())
    }

    fn is_behind(&self) -> bool {
        self.writer.acknowledged() < self.writer.last()
    }

    /// Waits until `done`. Fails when the replicas make no progress for too long, or when too many refuse for good.
    fn wait(&mut self, done: impl Fn(&Log) -> bool) -> Result<(), LogError> {
        let patience = self.options.patience;
        let mut deadline = Instant::now() + patience;
        let mut acknowledged = self.acknowledged();
        self.progress()?;
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
                let replicas = self.replicas().zip(&self.sessions);
                let states = replicas.map(|((target, state, _), session)| {
                    let connected = session.as_ref().is_some_and(Session::is_connected);
                    let state = match (connected, &*state) {
                        (true, _) if !self.writer.is_ready() => "connected, waiting for the others",
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

    /// Does all work that needs no waiting. Returns whether there was any.
    fn progress(&mut self) -> Result<bool, LogError> {
        let mut worked = false;
        loop {
            let mut busy = false;
            while let Some(resolved) = self.resolved.take() {
                busy = true;
                self.handle_resolved(resolved);
            }
            for at in 0..self.targets.len() {
                while self.advance(at) {
                    busy = true;
                }
            }
            if self.writer.poll_timeout().is_some_and(|due| due <= self.now()) {
                self.writer.handle_timeout(self.now());
                busy = true;
            }
            while let Some(action) = self.writer.poll_action() {
                busy = true;
                self.act(action);
            }
            while let Some(event) = self.writer.poll_event() {
                match event {
                    WriterEvent::Replica { replica, state } => self.changes.push((replica, state)),
                    WriterEvent::Over(over) => return Err(self.over(over)),
                    WriterEvent::Ready { .. } | WriterEvent::Acknowledged { .. } => {}
                }
            }
            if !busy {
                return Ok(worked);
            }
            worked = true;
        }
    }

    /// Takes the next event of a replica's session. Returns false if there is none.
    fn advance(&mut self, at: usize) -> bool {
        let Some(session) = &mut self.sessions[at] else {
            return false;
        };
        let number = session.number;
        let event = match session.poll(&mut self.dial, &self.targets[at].region) {
            Ok(None) => return false,
            Ok(Some(event)) => event,
            Err(error) => {
                self.lost(at, number, &error);
                return true;
            }
        };
        match event {
            SessionEvent::Accepted => {}
            SessionEvent::Mapped(domain, region_bytes) => {
                self.refused[at] = None;
                self.domains[at] = Some(domain);
                self.writer.handle_connected(at, number, region_bytes);
            }
            SessionEvent::Acquired => self.writer.handle_acquired(at, number),
            SessionEvent::Done(bytes) => self.writer.handle_done(at, number, bytes, self.start.elapsed()),
        }
        true
    }

    fn act(&mut self, action: Action) {
        let Action {
            replica,
            session,
            what,
        } = action;
        match what {
            What::Connect => self.connect(replica, session),
            // Dropping the session ends it at once.
            What::Disconnect => self.sessions[replica] = None,
            what => {
                if let Some(known) = self.session(replica, session)
                    && let Err(error) = known.take(what)
                {
                    self.lost(replica, session, &error);
                }
            }
        }
    }

    fn session(&mut self, replica: usize, number: u64) -> Option<&mut Session> {
        let session = self.sessions[replica].as_mut();
        session.filter(|session| session.number == number)
    }

    fn connect(&mut self, replica: usize, session: u64) {
        let target = self.targets[replica].clone();
        let address = target.address();
        let known = self.sessions[replica].insert(Session::new(session));
        if let Some(address) = address {
            return known.connect(vec![address]);
        }
        // An earlier session may have ended while its name was being resolved: the result serves this one.
        if std::mem::replace(&mut self.resolving[replica], true) {
            return;
        }
        if let Err((_, error)) = self.resolver.submit(replica, Resolve { replica, target }) {
            self.resolving[replica] = false;
            self.lost(replica, session, &io::Error::other(error).into());
        }
    }

    fn handle_resolved(&mut self, resolved: Resolved) {
        let Resolved { replica, result } = resolved;
        self.resolving[replica] = false;
        // Resolving may have taken longer than the session lasted.
        let Some(known) = self.sessions[replica]
            .as_mut()
            .filter(|known| known.is_resolving())
        else {
            return;
        };
        match result {
            Ok(addresses) => known.connect(addresses),
            Err(error) => {
                let session = known.number;
                self.lost(replica, session, &error.into());
            }
        }
    }

    fn lost(&mut self, replica: usize, session: u64, error: &Error) {
        self.sessions[replica] = None;
        self.refused[replica] = is_final(error).then(|| error.to_string());
        let now = self.now();
        self.writer.handle_lost(replica, session, &error.to_string(), now);
    }

    /// Arms the sessions' descriptors.
    fn arm(&mut self) {
        for at in 0..self.sessions.len() {
            if let Some(session) = &mut self.sessions[at]
                && let Err(error) = session.arm()
            {
                let number = session.number;
                self.lost(at, number, &error);
            }
        }
    }

    fn sleep_on(&mut self, fd: Option<BorrowedFd<'_>>, timeout: Duration) -> Result<(), LogError> {
        let before = self.state();
        self.progress()?;
        if self.state() != before {
            return Ok(());
        }
        let began = Instant::now();
        let end = began.checked_add(timeout);
        while self.waiting.pause(began) {
            self.progress()?;
            if self.state() != before {
                self.waiting.came(began);
                return Ok(());
            }
            let is_over = end.is_some_and(|end| Instant::now() >= end);
            if is_over || self.options.polled && fd.is_some_and(is_readable) {
                self.waiting.gave_up(began);
                return Ok(());
            }
        }
        loop {
            self.arm();
            // Handles completions from before the descriptors were armed, which may lead to more that are to be armed.
            let worked = self.progress()?;
            if self.state() != before {
                self.waiting.came(began);
                return Ok(());
            }
            if !worked {
                break;
            }
        }
        let sessions = self.sessions.iter().flatten();
        let writer_due = self.writer.poll_timeout().map(|due| self.start + due);
        let due = sessions.clone().filter_map(Session::due).chain(writer_due);
        let mut fds: Vec<_> = sessions.filter_map(Session::fd).collect();
        fds.extend(fd);
        let woken = match self.resolved.sleep(&fds, due.chain(end).min()) {
            Ok(ready) => ready.is_some(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
            Err(error) => return Err(error.into()),
        };
        self.waiting.slept(began, woken);
        self.progress().map(drop)
    }

    /// Returns what a caller that waits may wait for.
    fn state(&self) -> (u64, bool, bool) {
        (
            self.acknowledged(),
            self.writer.is_ready(),
            self.writer.is_quiet(),
        )
    }
}

/// Returns whether a repeated attempt fails in the same way until somebody changes how the server, or this side, is started.
fn is_final(error: &Error) -> bool {
    use ErrorCode::*;
    match error {
        Error::WrongKey(_) | Error::Open(OpenError::NotLocal(_)) => true,
        Error::Refused { code, .. } => {
            matches!(code, BadVersion | BadKey | NoSuchRegion | ReadOnly | NotSupported)
        }
        _ => false,
    }
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let none = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&none)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdmux_push::server::{BREAK_TIMEOUT_DEFAULT, Config};
    use rdmux_push::{Name, Region, Server};

    #[test]
    fn handle_resolved__too_late_leaves_the_session_as_it_is() {
        rdmux_soft::register();
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
        log.handle_resolved(Resolved {
            replica: 0,
            result: target.resolve(),
        });
        let record = log.append(b"record").unwrap();
        log.wait_for(record).unwrap();
        log.close().unwrap();
        stopper.stop();
        serving.join().unwrap().unwrap();
    }
}
