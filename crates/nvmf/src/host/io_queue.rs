//! An I/O queue of a session: commands that are not done go on by another path, or by a new controller, when theirs is lost.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_wire::nvme::Status;

use super::HostError;
use super::controller::Controller;
use super::link::{Link, TICK};
use super::paths::Place;
use super::queue::{Command, Completion, Data, ENTRIES_MAX};
use super::session::Session;

/// Times that a command is sent again because its controller asks for that.
const TRIES_MAX: u8 = 5;
/// Time between two looks at commands that are held until the session is settled.
const HELD_LOOK: Duration = Duration::from_millis(10);

/// An I/O queue, for one thread.
#[derive(Debug)]
pub struct IoQueue {
    session: Arc<Session>,
    /// The connection, and where it leads.
    way: Option<(Place, Link)>,
    /// Commands that the next turn sends, unless there is no way, or the session is not settled.
    waiting: VecDeque<Command>,
    /// Completions from ways of before.
    done: VecDeque<Completion>,
    qid: u16,
    depth: u16,
    /// Next look at the deadlines of commands.
    looks_at: Instant,
    /// When the oldest command began to wait, or the caller that connects the queue: set where a way is missing or lost, until a command is done.
    lost_since: Option<Instant>,
    /// It had a way.
    was_connected: bool,
}

impl IoQueue {
    pub(super) fn new(session: Arc<Session>, qid: u16, depth: u16) -> Result<IoQueue, HostError> {
        let mut queue = IoQueue {
            session,
            way: None,
            waiting: VecDeque::with_capacity(depth.into()),
            done: VecDeque::new(),
            qid,
            depth: depth.max(1),
            looks_at: Instant::now() + TICK,
            lost_since: None,
            was_connected: false,
        };
        while queue.way.is_none() {
            queue.connect(TICK)?;
        }
        Ok(queue)
    }

    /// Returns the number of controllers that the session's I/O has gone to: another one, after a command is done, tells that it may have gone to a new one.
    pub fn generation(&self) -> u64 {
        self.session.generation()
    }

    /// Returns the number of commands that may be submitted now.
    pub fn room(&self) -> usize {
        usize::from(self.depth) - self.in_flight()
    }

    /// Returns the number of commands in flight.
    pub fn in_flight(&self) -> usize {
        let sent = self
            .way
            .as_ref()
            .map_or(0, |(_, link)| link.connection().in_flight());
        sent + self.waiting.len()
    }

    /// Submits an I/O, which [`IoQueue::wait`] sends. It has to be one that may be repeated.
    ///
    /// # Panics
    /// There is no [room](IoQueue::room), or the buffer is shorter than the data.
    pub fn submit(&mut self, command: Command) {
        assert!(self.room() > 0, "the caller has looked at the room");
        if self.in_flight() == 0 {
            self.lost_since = None;
        }
        self.waiting.push_back(command);
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
        self.follow()?;
        if !self.done.is_empty() {
            return Ok(true);
        }
        self.send();
        let Some((_, link)) = &mut self.way else {
            self.connect(longest)?;
            return Ok(false);
        };
        let longest = match self.waiting.is_empty() {
            true => longest,
            false => longest.min(HELD_LOOK),
        };
        if let Err(error) = link.connection_mut().wait(longest).and_then(|()| self.look()) {
            self.lose(error)?;
            return Ok(!self.done.is_empty());
        }
        let is_done = self
            .way
            .as_ref()
            .is_some_and(|(_, link)| link.connection().has_completions());
        if let (true, Some(_), Some((place, _))) = (is_done, self.lost_since, &self.way) {
            self.session.paths().recovered(place.path);
            self.lost_since = None;
        }
        if !self.waiting.is_empty() && self.waits_too_long() {
            return Err(self.session.paths().gave_up());
        }
        Ok(is_done)
    }

    /// Returns a command that is done, whatever its status.
    pub fn poll(&mut self) -> Option<Completion> {
        if let Some(completion) = self.done.pop_front() {
            return Some(completion);
        }
        loop {
            let (_, link) = self.way.as_mut()?;
            let completion = link.connection_mut().poll()?;
            if let Some(completion) = self.sort(completion) {
                return Some(completion);
            }
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

    /// Takes a command that is done back, if it is to be sent again.
    fn sort(&mut self, completion: Completion) -> Option<Completion> {
        let Completion {
            status, ref command, ..
        } = completion;
        if !may_repeat(status) || command.tries >= TRIES_MAX || self.room() == 0 {
            return Some(completion);
        }
        if let (true, Some((place, _))) = (is_of_access(status), &self.way) {
            self.session.paths().suspect(place.path, &place.controller);
        }
        self.submit(Command {
            tries: completion.command.tries + 1,
            ..completion.command
        });
        None
    }

    /// Sends what waits, as far as it may go.
    fn send(&mut self) {
        let Some((place, link)) = &mut self.way else {
            return;
        };
        let paths = self.session.paths();
        // Commands in flight are done before anything goes another way.
        if self.waiting.is_empty() || place.epoch != paths.epoch() {
            return;
        }
        let deadline = Instant::now() + paths.io_timeout();
        let mut at = 0;
        while let Some(command) = self.waiting.get(at)
            && link.connection().room() > 0
        {
            // A read changes nothing that a late write could undo.
            if !matches!(command.data, Data::In(_)) && !paths.is_settled() {
                at += 1;
            } else if let Some(command) = self.waiting.remove(at) {
                link.connection_mut().submit(command, Some(deadline));
            }
        }
    }

    /// Leaves the way for another one by which I/O is to go, once all that went by it are done.
    fn follow(&mut self) -> Result<(), HostError> {
        let paths = self.session.paths();
        let Some((place, link)) = &mut self.way else {
            return Ok(());
        };
        if place.epoch == paths.epoch() {
            return Ok(());
        }
        let since = self.lost_since.unwrap_or_else(Instant::now);
        match paths.place(Duration::ZERO, since)? {
            Some(next) if Arc::ptr_eq(&next.controller, &place.controller) => {
                place.epoch = next.epoch;
            }
            Some(_) if link.connection().in_flight() == 0 => {
                self.take_done();
                self.way = None;
            }
            Some(_) => {}
            None => {
                self.lost_since = Some(since);
            }
        }
        Ok(())
    }

    /// Keeps what is done when its way is left.
    fn take_done(&mut self) {
        while let Some((_, link)) = &mut self.way
            && let Some(completion) = link.connection_mut().poll()
        {
            let sorted = self.sort(completion);
            self.done.extend(sorted);
        }
    }

    /// Looks whether the controller is still there, and no command is late.
    fn look(&mut self) -> Result<(), HostError> {
        let Some((place, link)) = &self.way else {
            return Ok(());
        };
        if let Some(why) = place.controller.lost() {
            return Err(HostError::Lost(why.clone()));
        }
        let now = Instant::now();
        if now < self.looks_at {
            return Ok(());
        }
        self.looks_at = now + TICK;
        let within = self.session.paths().io_timeout();
        match link.connection().has_expired(now) {
            true => Err(HostError::TimedOut {
                what: "an I/O",
                within,
            }),
            false => Ok(()),
        }
    }

    /// The way is lost: what was not done waits for another one.
    fn lose(&mut self, cause: HostError) -> Result<(), HostError> {
        if !cause.is_of_path() {
            return Err(cause);
        }
        self.take_done();
        self.lost_since.get_or_insert_with(Instant::now);
        let Some((place, mut link)) = self.way.take() else {
            return Ok(());
        };
        self.session.paths().report(place.path, &place.controller, cause);
        link.connection_mut().end();
        let commands = link.connection_mut().take_commands();
        commands
            .into_iter()
            .rev()
            .for_each(|command| self.waiting.push_front(command));
        // A medium that hangs loses one way after the other.
        match self.waits_too_long() {
            true => Err(self.session.paths().gave_up()),
            false => Ok(()),
        }
    }

    /// Returns true if no command was done for as long as the session tries to connect again.
    fn waits_too_long(&self) -> bool {
        let within = self.session.paths().loss_timeout();
        self.lost_since.is_some_and(|since| since.elapsed() >= within)
    }

    /// Connects to the controller to which I/O goes; waits for one at most so long.
    fn connect(&mut self, longest: Duration) -> Result<(), HostError> {
        let paths = self.session.paths();
        let since = self.lost_since.unwrap_or_else(Instant::now);
        let Some(place) = paths.place(longest, since)? else {
            self.lost_since = Some(since);
            return Ok(());
        };
        match open(&place.controller, self.qid, self.depth) {
            Ok(link) => {
                paths.connected(&place.controller);
                self.way = Some((place, link));
                self.was_connected = true;
                Ok(())
            }
            Err(error) if error.is_of_path() => {
                self.lost_since.get_or_insert_with(Instant::now);
                paths.report(place.path, &place.controller, error);
                // Other queues may do well on controllers that refuse this one.
                match self.waits_too_long() {
                    true => Err(paths.gave_up()),
                    false => Ok(()),
                }
            }
            // The controller may not have seen the end of the last connection of this queue.
            Err(HostError::Refused { status, .. })
                if self.was_connected
                    && status.is(Status::COMMAND_SEQUENCE_ERROR)
                    && !self.waits_too_long() =>
            {
                self.lost_since.get_or_insert_with(Instant::now);
                std::thread::sleep(HELD_LOOK); // time is meant: the controller does not tell of that end
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}

fn open(controller: &Controller, qid: u16, depth: u16) -> Result<Link, HostError> {
    let most = controller.info().queue_entries.min(ENTRIES_MAX.into()) - 1;
    if u32::from(depth) > most {
        return Err(HostError::Inconsistent {
            what: "controller",
            why: format!("takes {most} commands of a queue at a time, not {depth}"),
        });
    }
    controller.io_queue(qid, depth + 1)
}

/// Returns true if a controller has refused a command because of the access that it gives to the namespace.
fn is_of_access(status: Status) -> bool {
    let access = [
        Status::ANA_TRANSITION,
        Status::ANA_INACCESSIBLE,
        Status::ANA_PERSISTENT_LOSS,
    ];
    access.iter().any(|one| status.is(*one))
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
    ];
    !status.is_final() && (is_of_access(status) || passing.iter().any(|one| status.is(*one)))
}
