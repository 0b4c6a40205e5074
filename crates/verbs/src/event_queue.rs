//! Waiting for many objects at once.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdmux_rnic::sync::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::cm::deadline_after;
#[cfg(doc)]
use crate::{Connecting, Connection, Device, Listener};

/// Reports which of many objects have news, by one descriptor for all of them, so that one thread serves any number of connections.
///
/// A listener, an attempt to connect, a connection or a resolution that was registered ([`Listener::notify`], [`Connecting::notify`],
/// [`Connection::notify`]) reports its token when something has happened to it, also before its registration. The token says no more
/// than that: the owner asks the object ([`Listener::accept`] with no timeout, [`Connecting::poll`], [`Connection::progress`]), which
/// may have nothing new. What happens before the owner has taken the token is reported by that one token. An object that is dropped
/// reports nothing more. Completion queues report here too, if they were made for that ([`Device::create_cq_reporting`]).
///
/// ```no_run
/// # use std::{os::fd::AsFd, time::Duration};
/// # use rdmux_verbs::{ConnectError, ConnectPair, ConnectParams, Connection, EventQueue, Device, QueuePair};
/// # fn connect_all(device: &Device, qps: &[QueuePair], peer: std::net::SocketAddr) -> Result<(), Box<dyn std::error::Error>> {
/// let events = EventQueue::new()?;
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
pub struct EventQueue(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Readable while a token waits to be taken. Written after the token is added, without the lock: whoever is woken may run before the
    /// writer does again, and needs the lock.
    fd: OwnedFd,
    waiting: Mutex<Waiting>,
}

/// Tokens that wait to be taken.
#[derive(Debug, Default)]
struct Waiting {
    /// The number of the registration, and its token.
    by_age: BTreeMap<u64, (u64, u64)>,
    /// The number of the registration, and the age.
    by_number: BTreeSet<(u64, u64)>,
    next: u64,
    /// Number of writes to the descriptor, begun ones too, that were not read.
    unread: u64,
}

impl Waiting {
    fn add(&mut self, number: u64, token: u64) {
        let age = self.next;
        self.next += 1;
        self.unread += 1;
        self.by_age.insert(age, (number, token));
        self.by_number.insert((number, age));
    }

    fn first_of(&self, number: u64) -> Option<(u64, u64)> {
        self.by_number
            .range((number, 0)..=(number, u64::MAX))
            .next()
            .copied()
    }
}

impl EventQueue {
    /// Makes a queue without registered objects.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn new() -> io::Result<EventQueue> {
        Ok(EventQueue(Arc::new(Shared {
            fd: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            waiting: Mutex::default(),
        })))
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock()
    }

    /// Takes the token that has waited longest.
    pub fn poll(&self) -> Option<u64> {
        let mut waiting = self.waiting();
        let (age, (number, token)) = waiting.by_age.pop_first()?;
        waiting.by_number.remove(&(number, age));
        self.reset_if_empty(&mut waiting);
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

    /// Makes the descriptor readable for a token that was added: each time, since edge-triggered waiters are woken by each write.
    fn write(&self) {
        let _ = rustix::io::write(&self.0.fd, &1u64.to_ne_bytes());
    }

    fn forget(&self, number: u64) {
        let mut waiting = self.waiting();
        while let Some(entry) = waiting.first_of(number) {
            waiting.by_number.remove(&entry);
            waiting.by_age.remove(&entry.1);
            self.reset_if_empty(&mut waiting);
        }
    }

    /// Reads the descriptor once no token waits. Waits for a thread that has added a token and has yet to write: otherwise the
    /// descriptor would become readable without a token.
    fn reset_if_empty(&self, waiting: &mut Waiting) {
        while waiting.by_age.is_empty() && waiting.unread > 0 {
            let mut count = [0; 8];
            match rustix::io::read(&self.0.fd, &mut count) {
                Ok(_) => waiting.unread = waiting.unread.saturating_sub(u64::from_ne_bytes(count)),
                Err(_) => drop(poll(&mut [PollFd::new(&self.0.fd, PollFlags::IN)], None)),
            }
        }
    }
}

impl AsFd for EventQueue {
    /// Returns a descriptor that is readable while a token waits to be taken.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// An object's place in an [`EventQueue`], until it is dropped.
#[derive(Debug)]
pub struct Registration {
    queue: EventQueue,
    number: u64,
    token: u64,
}

impl Registration {
    /// Registers an object under a token.
    pub fn new(queue: &EventQueue, token: u64) -> Registration {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Registration {
            queue: queue.clone(),
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            token,
        }
    }

    /// The queue.
    pub fn queue(&self) -> &EventQueue {
        &self.queue
    }

    /// Adds the token, unless it waits already.
    pub fn announce(&self) {
        let mut waiting = self.queue.waiting();
        if waiting.first_of(self.number).is_some() {
            return;
        }
        waiting.add(self.number, self.token);
        drop(waiting);
        self.queue.write();
    }

    /// Adds the token once more.
    pub fn announce_again(&self) {
        self.queue.waiting().add(self.number, self.token);
        self.queue.write();
    }

    /// Takes the token back.
    pub fn forget(&self) {
        self.queue.forget(self.number);
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(events: &EventQueue) -> bool {
        let at_once = Timespec::default();
        poll(&mut [PollFd::new(events, PollFlags::IN)], Some(&at_once)).unwrap() == 1
    }

    #[test]
    fn poll__gives_each_object_once_the_oldest_first() {
        let events = EventQueue::new().unwrap();
        let [one, other] = [7, 8].map(|token| Registration::new(&events, token));
        assert!(!is_readable(&events));
        one.announce();
        other.announce();
        one.announce();
        assert!(is_readable(&events));
        assert_eq!(
            [events.poll(), events.poll(), events.poll()],
            [Some(7), Some(8), None]
        );
        assert!(!is_readable(&events));
        other.announce();
        one.announce();
        assert_eq!(
            [events.poll(), events.poll(), events.poll()],
            [Some(8), Some(7), None]
        );
    }

    #[test]
    fn announce_again__gives_it_as_often() {
        let events = EventQueue::new().unwrap();
        let [one, other] = [7, 8].map(|token| Registration::new(&events, token));
        one.announce_again();
        other.announce_again();
        one.announce_again();
        assert_eq!(
            [events.poll(), events.poll(), events.poll()],
            [Some(7), Some(8), Some(7)]
        );
        assert!(!is_readable(&events));
    }

    #[test]
    fn drop__of_an_object_takes_its_tokens_back() {
        let events = EventQueue::new().unwrap();
        let [gone, stays] = [1, 2].map(|token| Registration::new(&events, token));
        gone.announce_again();
        stays.announce();
        gone.announce_again();
        drop(gone);
        assert_eq!([events.poll(), events.poll()], [Some(2), None]);
        stays.announce();
        drop(stays);
        assert!(!is_readable(&events));
    }

    #[test]
    fn poll__of_several_threads_leaves_the_descriptor_as_the_tokens_are() {
        let events = EventQueue::new().unwrap();
        let taken = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for token in 0..2 {
                let one = Registration::new(&events, token);
                scope.spawn(move || {
                    (0..10_000).for_each(|_| one.announce_again());
                    // Dropped, it would take its tokens back.
                    std::mem::forget(one);
                });
                scope.spawn(|| {
                    while taken.load(Ordering::Relaxed) < 20_000 {
                        if events.poll().is_some() {
                            taken.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert!(!is_readable(&events));
    }

    #[test]
    fn wait__ends_at_its_time() {
        let events = EventQueue::new().unwrap();
        assert_eq!(events.wait(Duration::ZERO), None);
        assert_eq!(events.wait(Duration::from_nanos(1)), None);
    }
}
