//! Waiting for many connections at once, and the events of one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::cm::deadline_after;
#[cfg(doc)]
use crate::cm::{Connecting, Connection, Listener};

/// Reports which of many objects have news, by one descriptor for all of them, so that one thread serves any number of connections.
///
/// A listener, an attempt to connect, a connection or a resolution that was registered ([`Listener::notify`], [`Connecting::notify`],
/// [`Connection::notify`]) reports its token when something has happened to it, also before its registration. The token says no more
/// than that: the owner asks the object ([`Listener::accept`] with no timeout, [`Connecting::poll`], [`Connection::progress`]), which
/// may have nothing new. What happens before the owner has taken the token is reported by that one token. An object that is dropped
/// reports nothing more.
///
/// ```no_run
/// # use std::{os::fd::AsFd, time::Duration};
/// # use rdmux_verbs::{ConnectError, ConnectPair, ConnectParams, Connection, ConnectionEvents, Device, QueuePair};
/// # fn connect_all(device: &Device, qps: &[QueuePair], peer: std::net::SocketAddr) -> Result<(), Box<dyn std::error::Error>> {
/// let events = ConnectionEvents::new()?;
/// let mut attempts = Vec::new();
/// for (token, qp) in qps.iter().enumerate() {
///     let attempt = device.start_connect(ConnectPair::Own(qp), peer, &ConnectParams::default(), b"")?;
///     attempt.notify(&events, token as u64);
///     attempts.push(attempt);
/// }
/// // A program with descriptors of its own polls `events.as_fd()` beside them.
/// while let Some(token) = events.wait(Duration::from_secs(60)) {
///     match attempts[token as usize].poll() {
///         Some(Ok(connection)) => println!("{token}: connected to {}", connection.peer()),
///         Some(Err(error)) => println!("{token}: {error}"),
///         None => {}
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ConnectionEvents(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Readable while a token waits to be taken: both change together, under the lock.
    fd: OwnedFd,
    waiting: Mutex<Waiting>,
}

/// Tokens that wait to be taken, each object's once.
#[derive(Debug, Default)]
struct Waiting {
    by_age: BTreeMap<u64, (u64, u64)>,
    /// By the number of the registration.
    ages: HashMap<u64, u64>,
    next: u64,
}

impl ConnectionEvents {
    /// Makes a queue without registered objects.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn new() -> io::Result<ConnectionEvents> {
        Ok(ConnectionEvents(Arc::new(Shared {
            fd: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            waiting: Mutex::default(),
        })))
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the token that has waited longest.
    pub fn poll(&self) -> Option<u64> {
        let mut waiting = self.waiting();
        let (_, (number, token)) = waiting.by_age.pop_first()?;
        waiting.ages.remove(&number);
        self.reset_if_empty(&waiting);
        Some(token)
    }

    /// Takes the token that has waited longest; sleeps until there is one. Returns `None` if the timeout expires.
    pub fn wait(&self, timeout: Duration) -> Option<u64> {
        let deadline = deadline_after(timeout);
        loop {
            if let Some(token) = self.poll() {
                return Some(token);
            }
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return None;
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            // A signal ends the sleep, and not the wait.
            let _ = poll(&mut [PollFd::new(&self.0.fd, PollFlags::IN)], left.as_ref());
        }
    }

    fn announce(&self, number: u64, token: u64) {
        let mut waiting = self.waiting();
        let age = waiting.next;
        if waiting.ages.contains_key(&number) {
            return;
        }
        waiting.next += 1;
        waiting.ages.insert(number, age);
        waiting.by_age.insert(age, (number, token));
        if waiting.by_age.len() == 1 {
            let _ = rustix::io::write(&self.0.fd, &1u64.to_ne_bytes());
        }
    }

    fn forget(&self, number: u64) {
        let mut waiting = self.waiting();
        if let Some(age) = waiting.ages.remove(&number) {
            waiting.by_age.remove(&age);
            self.reset_if_empty(&waiting);
        }
    }

    fn reset_if_empty(&self, waiting: &Waiting) {
        if waiting.by_age.is_empty() {
            let _ = rustix::io::read(&self.0.fd, &mut [0u8; 8]);
        }
    }
}

impl AsFd for ConnectionEvents {
    /// Returns a descriptor that is readable while a token waits to be taken.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// An object's place in a [`ConnectionEvents`], until it is dropped.
#[derive(Debug)]
struct Registration {
    events: ConnectionEvents,
    number: u64,
    token: u64,
}

impl Registration {
    fn new(events: &ConnectionEvents, token: u64) -> Registration {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Registration {
            events: events.clone(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            token,
        }
    }

    fn announce(&self) {
        self.events.announce(self.number, self.token);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.events.forget(self.number);
    }
}

/// Number of changes of an [`Inbox`] at some moment: whoever remembers it misses no later change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen(u64);

/// Events of one connection, listener or attempt, until its owner takes them.
#[derive(Debug)]
pub(crate) struct Inbox<E> {
    state: Mutex<State<E>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<E> {
    events: VecDeque<E>,
    changes: u64,
    /// A descriptor of its own, and that of a queue that its owner chose.
    own: Option<Registration>,
    chosen: Option<Registration>,
}

impl<E> Inbox<E> {
    /// Makes an inbox that opens no descriptor.
    pub(crate) fn new() -> Inbox<E> {
        Inbox::reporting(None)
    }

    /// Makes an inbox that reports to a queue of its own: its descriptor is readable until [`Inbox::poll`] finds nothing.
    pub(crate) fn with_events(events: &ConnectionEvents) -> Inbox<E> {
        Inbox::reporting(Some(Registration::new(events, 0)))
    }

    fn reporting(own: Option<Registration>) -> Inbox<E> {
        Inbox {
            state: Mutex::new(State {
                events: VecDeque::new(),
                changes: 0,
                own,
                chosen: None,
            }),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an event and wakes the owner.
    pub(crate) fn push(&self, event: E) {
        self.push_below(usize::MAX, event);
    }

    /// Does the same if there are fewer than `max` events. Otherwise drops the event, when nothing is locked.
    pub(crate) fn push_below(&self, max: usize, event: E) {
        let mut state = self.state();
        if state.events.len() < max {
            state.events.push_back(event);
            self.change(&mut state);
        } else {
            drop(state);
        }
    }

    /// Wakes the owner, who asks for something else than events.
    pub(crate) fn wake(&self) {
        self.change(&mut self.state());
    }

    fn change(&self, state: &mut State<E>) {
        state.changes += 1;
        for registration in [&state.own, &state.chosen].into_iter().flatten() {
            registration.announce();
        }
        self.changed.notify_all();
    }

    /// Takes the oldest event.
    pub(crate) fn poll(&self) -> Option<E> {
        let mut state = self.state();
        let event = state.events.pop_front();
        if let (None, Some(own)) = (&event, &state.own) {
            own.events.forget(own.number);
        }
        event
    }

    /// Keeps only events that are still wanted.
    pub(crate) fn retain(&self, wanted: impl FnMut(&E) -> bool) {
        self.state().events.retain(wanted);
    }

    /// Returns the moment from which on [`Inbox::wait`] sees changes. A thread that waits takes it before it looks at what it waits for,
    /// because another thread may take the event.
    pub(crate) fn seen(&self) -> Seen {
        Seen(self.state().changes)
    }

    /// Sleeps until something has changed since a moment. Returns false if the time is over first.
    pub(crate) fn wait(&self, since: Seen, timeout: Option<Duration>) -> bool {
        let unchanged = |state: &mut State<E>| state.changes == since.0;
        let state = self.state();
        let Some(timeout) = timeout else {
            drop(self.changed.wait_while(state, unchanged));
            return true;
        };
        let waited = self.changed.wait_timeout_while(state, timeout, unchanged);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Reports changes to a queue under a token, and at once those that there were before.
    pub(crate) fn notify(&self, events: &ConnectionEvents, token: u64) {
        let registration = Registration::new(events, token);
        let mut state = self.state();
        if state.changes > 0 {
            registration.announce();
        }
        state.chosen = Some(registration);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(events: &ConnectionEvents) -> bool {
        let at_once = Timespec::default();
        poll(&mut [PollFd::new(events, PollFlags::IN)], Some(&at_once)).unwrap() == 1
    }

    #[test]
    fn poll__gives_each_object_once_the_oldest_first() {
        let events = ConnectionEvents::new().unwrap();
        let [one, other] = [Inbox::new(), Inbox::new()];
        assert!(!is_readable(&events));
        one.notify(&events, 7);
        other.notify(&events, 8);
        assert!(!is_readable(&events));
        one.push(());
        other.push(());
        one.push(());
        assert!(is_readable(&events));
        assert_eq!(
            [events.poll(), events.poll(), events.poll()],
            [Some(7), Some(8), None]
        );
        assert!(!is_readable(&events));
        other.push(());
        one.push(());
        assert_eq!(
            [events.poll(), events.poll(), events.poll()],
            [Some(8), Some(7), None]
        );
    }

    #[test]
    fn notify__reports_what_has_happened_before() {
        let events = ConnectionEvents::new().unwrap();
        let inbox = Inbox::new();
        inbox.push(1);
        inbox.notify(&events, 1);
        assert_eq!((events.poll(), inbox.poll()), (Some(1), Some(1)));
    }

    #[test]
    fn notify__again_replaces_the_queue_and_the_token() {
        let [first, second] = [(); 2].map(|()| ConnectionEvents::new().unwrap());
        let inbox = Inbox::<()>::new();
        inbox.notify(&first, 1);
        inbox.wake();
        inbox.notify(&second, 2);
        assert!(!is_readable(&first));
        assert_eq!((first.poll(), second.poll()), (None, Some(2)));
        inbox.wake();
        assert_eq!((first.poll(), second.poll()), (None, Some(2)));
    }

    #[test]
    fn drop__of_an_object_takes_its_token_back() {
        let events = ConnectionEvents::new().unwrap();
        let [gone, stays] = [Inbox::<()>::new(), Inbox::new()];
        gone.notify(&events, 1);
        stays.notify(&events, 2);
        gone.wake();
        stays.wake();
        drop(gone);
        assert_eq!([events.poll(), events.poll()], [Some(2), None]);
        stays.wake();
        drop(stays);
        assert!(!is_readable(&events));
    }

    #[test]
    fn wait__sees_a_change_whose_event_another_thread_took() {
        let inbox = Inbox::new();
        let seen = inbox.seen();
        inbox.push(());
        assert_eq!(inbox.poll(), Some(()));
        assert!(inbox.wait(seen, None));
        assert!(!inbox.wait(inbox.seen(), Some(Duration::ZERO)));
    }

    #[test]
    fn with_events__is_readable_until_nothing_is_found() {
        let events = ConnectionEvents::new().unwrap();
        let inbox = Inbox::with_events(&events);
        inbox.push(());
        assert_eq!(inbox.poll(), Some(()));
        assert!(is_readable(&events));
        assert_eq!(inbox.poll(), None);
        assert!(!is_readable(&events));
    }
}
