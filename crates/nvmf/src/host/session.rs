//! Controllers over time: when one is lost, the next takes over what was not done.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdmux_wire::nvme::{NsId, Status};

use super::controller::{Controller, NamespaceInfo};
use super::link::{Link, TICK};
use super::queue::{Command, Completion, ENTRIES_MAX};
use super::{HostError, Options};

/// Pause before the second try to connect again, which doubles with each further one, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Times that a command is sent again because its controller asks for that.
const TRIES_MAX: u8 = 5;

/// A host's way to a subsystem, which survives the loss of a controller: a queue that loses its connection gets one of a new controller,
/// and repeats on it the commands that were not done, as Linux's multipath does. Reads, writes and flushes may be repeated.
#[derive(Debug)]
pub struct Session {
    options: Arc<Options>,
    queues: u16,
    state: Mutex<State>,
    /// Number of controllers that there were.
    generation: AtomicU64,
}

#[derive(Debug)]
struct State {
    controller: Arc<Controller>,
    /// Namespaces in use, which a new controller has to have.
    namespaces: Vec<NamespaceInfo>,
    /// Set from the loss of a controller until a command of the next one is done.
    lost_since: Option<Instant>,
    pause: Duration,
    /// The session is over.
    failed: Option<HostError>,
}

impl Session {
    /// Connects, and asks for so many I/O queues.
    ///
    /// # Errors
    /// As [`Controller::connect`]: the first connection is not tried again.
    pub fn connect(options: Options, queues: u16) -> Result<Arc<Session>, HostError> {
        let options = Arc::new(options);
        let controller = connect(&options, queues)?;
        Ok(Arc::new(Session {
            options,
            queues,
            state: Mutex::new(State {
                controller: Arc::new(controller),
                namespaces: Vec::new(),
                lost_since: None,
                pause: Duration::ZERO,
                failed: None,
            }),
            generation: AtomicU64::new(1),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the controller of this time.
    pub fn controller(&self) -> Arc<Controller> {
        self.state().controller.clone()
    }

    fn current(&self) -> (u64, Arc<Controller>) {
        let state = self.state();
        (self.generation(), state.controller.clone())
    }

    /// Returns the number of controllers that there were: what the last one held and had not flushed may be lost when it changes.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Looks a namespace up for use: a later controller has to have the same.
    ///
    /// # Errors
    /// As [`Controller::namespace`], or its blocks have metadata.
    pub fn open_namespace(&self, nsid: NsId) -> Result<NamespaceInfo, HostError> {
        let mut state = self.state();
        let namespace = state.controller.namespace(nsid)?;
        if namespace.metadata_bytes > 0 {
            return Err(HostError::Inconsistent {
                what: "namespace",
                why: format!(
                    "{nsid} has {} bytes of metadata with each block, which this host does not support",
                    namespace.metadata_bytes
                ),
            });
        }
        state.namespaces.push(namespace.clone());
        Ok(namespace)
    }

    /// Connects an I/O queue, 1 to the number asked for, on which so many commands may be in flight.
    ///
    /// # Errors
    /// The controller refuses it, or does not take so many commands.
    pub fn queue(self: &Arc<Session>, qid: u16, depth: u16) -> Result<IoQueue, HostError> {
        let (generation, controller, link) = self.connect_queue(qid, depth, None)?;
        Ok(IoQueue {
            session: self.clone(),
            generation,
            controller,
            link,
            qid,
            depth,
            repeated: Vec::new(),
            looks_at: Instant::now() + TICK,
            is_recovering: false,
        })
    }

    /// Connects an I/O queue of the controller, or of a later one than that which was lost with the queue.
    fn connect_queue(
        &self,
        qid: u16,
        depth: u16,
        mut lost: Option<(u64, HostError)>,
    ) -> Result<(u64, Arc<Controller>, Link), HostError> {
        let (began, within) = (Instant::now(), self.options.loss_timeout);
        loop {
            let (generation, controller) = match lost.take() {
                // Other queues may do well on controllers that refuse this one.
                Some((_, cause)) if began.elapsed() > within => {
                    let cause = Arc::new(cause);
                    return Err(HostError::GaveUp { within, cause });
                }
                Some((generation, cause)) => self.renew(generation, cause)?,
                None => self.current(),
            };
            match open_queue(&controller, qid, depth) {
                Ok(link) => return Ok((generation, controller, link)),
                Err(error) if error.is_of_path() => lost = Some((generation, error)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Shuts the controller down, so that it makes durable what it has. Its I/O queues are to be dropped before.
    pub fn close(self: Arc<Session>) {
        if let Some(session) = Arc::into_inner(self) {
            let state = session.state.into_inner().unwrap_or_else(PoisonError::into_inner);
            if let Some(controller) = Arc::into_inner(state.controller) {
                controller.close();
            }
        }
    }

    /// Returns a controller later than that of a generation, which is lost. All queues wait here for the first that has noticed.
    fn renew(&self, seen: u64, cause: HostError) -> Result<(u64, Arc<Controller>), HostError> {
        let mut state = self.state();
        let generation = self.generation();
        if let Some(failed) = &state.failed {
            return Err(failed.clone());
        }
        if generation != seen && state.controller.lost().is_none() {
            return Ok((generation, state.controller.clone()));
        }
        let mut cause = Arc::new(cause);
        state.controller.abandon(&cause);
        let since = *state.lost_since.get_or_insert_with(Instant::now);
        // What the lost controller was told to write must not come after what is written next.
        let lost = state.controller.clone();
        let mut ends_at = Some(Instant::now() + lost.ends_within());
        loop {
            let within = self.options.loss_timeout;
            if since.elapsed() >= within {
                let failed = HostError::GaveUp { within, cause };
                state.failed = Some(failed.clone());
                return Err(failed);
            }
            // Time is meant: the backoff, which spares a target that comes up.
            let left = within.saturating_sub(since.elapsed());
            let to_end = ends_at.map(|at| at.saturating_duration_since(Instant::now()));
            std::thread::sleep(state.pause.min(left).min(to_end.unwrap_or(left)));
            state.pause = (state.pause * 2).clamp(PAUSE.0, PAUSE.1);
            if let Some(at) = ends_at {
                let left = at.saturating_duration_since(Instant::now());
                match left.is_zero()
                    || lost.is_gone(left).unwrap_or_else(|error| {
                        cause = Arc::new(error);
                        false
                    }) {
                    true => ends_at = None,
                    false => continue,
                }
            }
            let connected = connect(&self.options, self.queues).and_then(|controller| {
                state
                    .namespaces
                    .iter()
                    .try_for_each(|known| has_same(&controller, known))
                    .map(|()| controller)
            });
            match connected {
                Ok(controller) => {
                    state.controller = Arc::new(controller);
                    self.generation.store(generation + 1, Ordering::Release);
                    return Ok((generation + 1, state.controller.clone()));
                }
                Err(error) if error.is_of_path() => cause = Arc::new(error),
                Err(error) => {
                    state.failed = Some(error.clone());
                    return Err(error);
                }
            }
        }
    }

    /// A command of a new controller is done.
    fn recovered(&self) {
        let mut state = self.state();
        state.lost_since = None;
        state.pause = Duration::ZERO;
    }
}

fn connect(options: &Arc<Options>, queues: u16) -> Result<Controller, HostError> {
    let controller = Controller::connect(options, queues)?;
    let allowed = controller.info().queues;
    match allowed < queues.into() {
        true => Err(HostError::Inconsistent {
            what: "controller",
            why: format!("allows {allowed} I/O queues, not {queues}"),
        }),
        false => Ok(controller),
    }
}

fn open_queue(controller: &Controller, qid: u16, depth: u16) -> Result<Link, HostError> {
    let most = controller.info().queue_entries.min(ENTRIES_MAX.into()) - 1;
    if u32::from(depth) > most {
        return Err(HostError::Inconsistent {
            what: "controller",
            why: format!("takes {most} commands of a queue at a time, not {depth}"),
        });
    }
    controller.io_queue(qid, depth.max(1) + 1)
}

/// Checks that a controller has a namespace whose blocks are the same: a target that lost them has a new one of that number.
fn has_same(controller: &Controller, known: &NamespaceInfo) -> Result<(), HostError> {
    let now = controller.namespace(known.nsid)?;
    let is_same = (now.ids, now.block_shift) == (known.ids, known.block_shift) && now.blocks >= known.blocks;
    match is_same {
        true => Ok(()),
        false => Err(HostError::Inconsistent {
            what: "subsystem",
            why: format!(
                "has another namespace {} than before the connection was lost: its blocks are gone",
                known.nsid
            ),
        }),
    }
}

/// An I/O queue, for one thread.
#[derive(Debug)]
pub struct IoQueue {
    session: Arc<Session>,
    controller: Arc<Controller>,
    generation: u64,
    link: Link,
    qid: u16,
    depth: u16,
    /// Completions from before a loss.
    repeated: Vec<Completion>,
    /// Next look at the deadlines of commands.
    looks_at: Instant,
    /// No command is done since the last loss.
    is_recovering: bool,
}

impl IoQueue {
    /// Returns the number of commands that may be submitted now.
    pub fn room(&self) -> usize {
        self.link.connection().room()
    }

    /// Returns the number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.link.connection().in_flight()
    }

    /// Submits an I/O, which [`IoQueue::wait`] sends. It has to be one that may be repeated.
    ///
    /// # Panics
    /// There is no [room](IoQueue::room), or the buffer is shorter than the data.
    pub fn submit(&mut self, command: Command) {
        let deadline = Instant::now() + self.session.options.io_timeout;
        self.link.connection_mut().submit(command, Some(deadline));
    }

    /// Sends what was submitted, and sleeps until a command is done. With none in flight it returns at once.
    ///
    /// # Errors
    /// The controller is lost, and no other one took over in time.
    pub fn wait(&mut self) -> Result<(), HostError> {
        while self.in_flight() > 0 && !self.turn(TICK)? {}
        Ok(())
    }

    /// Sends what was submitted, and sleeps until a command is done or the time has come, also if none is in flight.
    ///
    /// # Errors
    /// As [`IoQueue::wait`].
    pub fn wait_until(&mut self, time: Instant) -> Result<(), HostError> {
        loop {
            let left = time.saturating_duration_since(Instant::now());
            if self.turn(left.min(TICK))? || left.is_zero() {
                return Ok(());
            }
        }
    }

    /// Sends, and sleeps once. Returns true if a command is done.
    fn turn(&mut self, longest: Duration) -> Result<bool, HostError> {
        if !self.repeated.is_empty() {
            return Ok(true);
        }
        let waited = self.link.connection_mut().wait(longest);
        if let Err(error) = waited.and_then(|()| self.look()) {
            self.recover(error)?;
            return Ok(!self.repeated.is_empty());
        }
        let is_done = self.link.connection().has_completions();
        if is_done && self.is_recovering {
            self.is_recovering = false;
            self.session.recovered();
        }
        Ok(is_done)
    }

    /// Returns a command that is done, whatever its status.
    pub fn poll(&mut self) -> Option<Completion> {
        if let Some(completion) = self.repeated.pop() {
            return Some(completion);
        }
        loop {
            let completion = self.link.connection_mut().poll()?;
            let again = may_repeat(completion.status) && completion.command.tries < TRIES_MAX;
            if !again || self.room() == 0 {
                return Some(completion);
            }
            self.submit(Command {
                tries: completion.command.tries + 1,
                ..completion.command
            });
        }
    }

    /// Runs one I/O.
    ///
    /// # Errors
    /// As [`IoQueue::wait`], or the controller has refused it.
    ///
    /// # Panics
    /// Others are in flight.
    pub fn run(&mut self, what: &'static str, command: Command) -> Result<Completion, HostError> {
        assert_eq!(
            self.in_flight(),
            0,
            "it would take the completion of another command"
        );
        self.submit(command);
        loop {
            self.wait()?;
            if let Some(completion) = self.poll() {
                return match completion.status.is_success() {
                    true => Ok(completion),
                    false => Err(HostError::Refused {
                        what,
                        status: completion.status,
                        hint: "",
                    }),
                };
            }
        }
    }

    /// Looks whether the controller is still there, and no command is late.
    fn look(&mut self) -> Result<(), HostError> {
        if let Some(why) = self.controller.lost() {
            return Err(HostError::Lost(why.clone()));
        }
        let now = Instant::now();
        if now < self.looks_at {
            return Ok(());
        }
        self.looks_at = now + TICK;
        match self.link.connection().has_expired(now) {
            true => Err(HostError::TimedOut {
                what: "an I/O",
                within: self.session.options.io_timeout,
            }),
            false => Ok(()),
        }
    }

    /// Gets a connection of a new controller, and repeats on it what was not done.
    fn recover(&mut self, cause: HostError) -> Result<(), HostError> {
        if !cause.is_of_path() {
            return Err(cause);
        }
        while let Some(completion) = self.link.connection_mut().poll() {
            self.repeated.push(completion);
        }
        self.link.connection_mut().end();
        let commands = self.link.connection_mut().take_commands();
        let lost = Some((self.generation, cause));
        (self.generation, self.controller, self.link) =
            self.session.connect_queue(self.qid, self.depth, lost)?;
        self.is_recovering = true;
        commands.into_iter().for_each(|command| self.submit(command));
        Ok(())
    }
}

/// Returns true if a controller asks for a command again: it does not know what has become of it, or could not carry it out at this time.
pub fn may_repeat(status: Status) -> bool {
    let passing = [
        Status::ABORT_REQUESTED,
        Status::SQ_DELETED,
        Status::NAMESPACE_NOT_READY,
        Status::INTERRUPTED,
        Status::TRANSIENT_TRANSPORT,
        Status::HOST_ABORTED,
        Status::ANA_TRANSITION,
        Status::ANA_INACCESSIBLE,
    ];
    !status.is_final() && passing.iter().any(|one| status.is(*one))
}
