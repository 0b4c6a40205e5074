//! The node's side: a thread that waits for programs, for the times at which they get a snapshot, and for room for it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_runtime::{Inbox, Mailbox, mailbox};
use rdmux_verbs::provider::folder::uid;
use rdmux_verbs::provider::user::{is_one_user, peer_credentials};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::{INTERVAL_MIN, REQUEST_MAX, Request};
use crate::node::snapshot::{Ended, Snapshot, Viewer};
use crate::place::Place;

/// Programs that watch a node.
const WATCHERS_MAX: usize = 64;
/// Programs of a user that watch a node.
const WATCHERS_OF_USER_MAX: usize = 8;
/// Time without accepting programs after the process ran out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Ends the thread.
#[derive(Debug)]
struct Stop;

/// The thread that serves programs which watch a node, until it is dropped.
#[derive(Debug)]
pub(crate) struct Watchers {
    stop: Mailbox<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Watchers {
    /// Starts it.
    pub(crate) fn start(place: Place, viewer: Viewer) -> io::Result<Watchers> {
        let (stop, stopped) = mailbox()?;
        let server = Server {
            place,
            viewer,
            stopped,
            began: Instant::now(),
            watchers: Vec::new(),
            accepts_from: None,
        };
        let thread = std::thread::Builder::new().name("rdmux-watch".into());
        let thread = Some(thread.spawn(move || server.run())?);
        Ok(Watchers { stop, thread })
    }
}

impl Drop for Watchers {
    fn drop(&mut self) {
        self.stop.send(Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Server {
    place: Place,
    viewer: Viewer,
    stopped: Inbox<Stop>,
    /// Snapshots are made a multiple of [`INTERVAL_MIN`] after this time, so that programs have them in common.
    began: Instant,
    watchers: Vec<Watcher>,
    /// Time from which it accepts programs again.
    accepts_from: Option<Instant>,
}

/// A program that watches the node.
#[derive(Debug)]
struct Watcher {
    socket: OwnedFd,
    uid: u32,
    state: State,
}

#[derive(Debug)]
enum State {
    /// The part of its request that has come.
    Asks(Vec<u8>),
    /// When it gets a snapshot, and the time to the next one.
    Waits(Instant, Duration),
    /// The bytes that it gets, how many of them it has, and as [`State::Waits`] the next snapshot.
    Gets(Arc<[u8]>, usize, (Instant, Duration)),
}

impl Server {
    fn run(mut self) {
        loop {
            let Ok(ready) = self.wait() else {
                // Only a lack of memory fails here, and no event reports the end of that.
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            if self.stopped.take().is_some() {
                return;
            }
            let mut ready = ready.into_iter();
            let accepts = ready.next() == Some(true);
            let mut advanced = std::mem::take(&mut self.watchers);
            advanced.retain_mut(|watcher| ready.next() != Some(true) || self.advance(watcher).is_some());
            self.watchers = advanced;
            if accepts {
                self.accept();
            }
            if self.show().is_err() {
                return;
            }
        }
    }

    /// Sleeps until something is to be done. Returns whether somebody comes, and for each program, whether it does something.
    fn wait(&mut self) -> Result<Vec<bool>, Errno> {
        let now = Instant::now();
        self.accepts_from = self.accepts_from.filter(|from| *from > now);
        let due = self.watchers.iter().filter_map(|watcher| match watcher.state {
            State::Waits(due, _) => Some(due),
            State::Asks(_) | State::Gets(..) => None,
        });
        let deadline = due.chain(self.accepts_from).min();
        let timeout = deadline.map(|at| at.saturating_duration_since(now));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let listens = match self.accepts_from {
            None => PollFlags::IN,
            Some(_) => PollFlags::empty(),
        };
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.place.socket.as_fd(), listens),
            PollFd::from_borrowed_fd(self.stopped.as_fd(), PollFlags::IN),
        ];
        fds.extend(self.watchers.iter().map(|watcher| {
            let flags = match watcher.state {
                State::Gets(..) => PollFlags::OUT,
                State::Asks(_) | State::Waits(..) => PollFlags::IN,
            };
            PollFd::from_borrowed_fd(watcher.socket.as_fd(), flags)
        }));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let mut ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        ready.remove(1);
        Ok(ready)
    }

    fn accept(&mut self) {
        for _ in 0..WATCHERS_MAX {
            let socket = match self.place.accept() {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(_) => {
                    self.accepts_from = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            // Several users may have a number that is not one user's.
            let Some(uid) = peer_credentials(&socket)
                .ok()
                .map(|(uid, _)| uid)
                .filter(|uid| is_one_user(*uid))
            else {
                continue;
            };
            let of_user = self.watchers.iter().filter(|watcher| watcher.uid == uid).count();
            if of_user < WATCHERS_OF_USER_MAX && self.watchers.len() < WATCHERS_MAX {
                self.watchers.push(Watcher {
                    socket,
                    uid,
                    state: State::Asks(Vec::new()),
                });
            }
        }
    }

    /// Goes on with a program. Returns `None` if it has gone, or has to.
    fn advance(&self, watcher: &mut Watcher) -> Option<()> {
        match &mut watcher.state {
            State::Asks(request) => {
                let mut bytes = [0; REQUEST_MAX];
                match recv(&watcher.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                    Ok((_, 0)) => return None,
                    Ok((_, count)) => request.extend_from_slice(&bytes[..count]),
                    Err(Errno::AGAIN | Errno::INTR) => return Some(()),
                    Err(_) => return None,
                }
                match request.strip_suffix(b"\n") {
                    Some(request) => {
                        let Request { interval_ms } = serde_json::from_slice(request).ok()?;
                        let steps = interval_ms.div_ceil(INTERVAL_MIN.as_millis() as u64);
                        // A time of years is as good as none.
                        let interval = INTERVAL_MIN * steps.clamp(1, 1 << 30) as u32;
                        watcher.state = State::Waits(self.next_step(), interval);
                    }
                    None if request.len() >= REQUEST_MAX => return None,
                    None => {}
                }
            }
            // It has closed its end, or sends what nobody has asked it for.
            State::Waits(..) => return None,
            State::Gets(line, sent, (due, interval)) => {
                match send(
                    &watcher.socket,
                    line.get(*sent..)?,
                    SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
                ) {
                    Ok(count) => *sent += count,
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(_) => return None,
                }
                if *sent == line.len() {
                    // Snapshots for which it was too slow are left out.
                    let due = (*due).max(self.next_step());
                    watcher.state = State::Waits(due, *interval);
                }
            }
        }
        Some(())
    }

    /// Returns the next time at which snapshots are made.
    fn next_step(&self) -> Instant {
        let steps = self.began.elapsed().as_nanos().div_ceil(INTERVAL_MIN.as_nanos());
        self.began + INTERVAL_MIN * u32::try_from(steps).unwrap_or(u32::MAX)
    }

    /// Makes a snapshot if one is due, and begins to send it to those who wait for it.
    fn show(&mut self) -> Result<(), Ended> {
        let now = Instant::now();
        let is_due = |watcher: &Watcher| matches!(watcher.state, State::Waits(due, _) if due <= now);
        if !self.watchers.iter().any(is_due) {
            return Ok(());
        }
        let snapshot = self.viewer.snapshot()?;
        // By user.
        let mut lines: Vec<(u32, Arc<[u8]>)> = Vec::new();
        for at in 0..self.watchers.len() {
            let watcher = &self.watchers[at];
            let State::Waits(due, interval) = watcher.state else {
                continue;
            };
            if due > now {
                continue;
            }
            let known = lines.iter().find(|(uid, _)| *uid == watcher.uid);
            let line = match known {
                Some((_, line)) => line.clone(),
                None => {
                    let line = line_of(&snapshot.visible_to(watcher.uid, uid()));
                    lines.push((watcher.uid, line.clone()));
                    line
                }
            };
            let next = due + interval;
            self.watchers[at].state = State::Gets(line, 0, (next, interval));
        }
        Ok(())
    }
}

fn line_of(snapshot: &Snapshot) -> Arc<[u8]> {
    // Nothing in a snapshot is what JSON has not.
    let mut line = serde_json::to_vec(snapshot).unwrap_or_default();
    line.push(b'\n');
    line.into()
}
