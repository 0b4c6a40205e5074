//! The events of one connection, listener or attempt.

use std::collections::VecDeque;
use std::time::Duration;

use crate::event_queue::{EventQueue, Registration};
use rdmux_rnic::sync::{Condvar, Mutex, MutexGuard};

/// Number of changes of an [`Inbox`] at some moment: whoever remembers it misses no later change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen(u64);

/// Events of one connection, listener or attempt, until its owner takes them.
#[derive(Debug)]
pub struct Inbox<E> {
    state: Mutex<InboxState<E>>,
    changed: Condvar,
}

#[derive(Debug)]
struct InboxState<E> {
    events: VecDeque<E>,
    changes: u64,
    /// A descriptor of its own, and that of a queue that its owner chose.
    own: Option<Registration>,
    chosen: Option<Registration>,
}

impl<E> Default for Inbox<E> {
    fn default() -> Inbox<E> {
        Inbox::new()
    }
}

impl<E> Inbox<E> {
    /// Makes an inbox that opens no descriptor.
    pub fn new() -> Inbox<E> {
        Inbox::reporting(None)
    }

    /// Makes an inbox that reports to a queue of its own: its descriptor is readable until [`Inbox::poll`] finds nothing.
    pub fn with_events(events: &EventQueue) -> Inbox<E> {
        Inbox::reporting(Some(Registration::new(events, 0)))
    }

    fn reporting(own: Option<Registration>) -> Inbox<E> {
        Inbox {
            state: Mutex::new(InboxState {
                events: VecDeque::new(),
                changes: 0,
                own,
                chosen: None,
            }),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, InboxState<E>> {
        self.state.lock()
    }

    /// Adds an event and wakes the owner.
    pub fn push(&self, event: E) {
        self.push_below(usize::MAX, event);
    }

    /// Does the same if there are fewer than `max` events. Otherwise drops the event, when nothing is locked.
    pub fn push_below(&self, max: usize, event: E) {
        let mut state = self.state();
        if state.events.len() < max {
            state.events.push_back(event);
            self.change(&mut state);
        } else {
            drop(state);
        }
    }

    /// Wakes the owner, who asks for something else than events.
    pub fn wake(&self) {
        self.change(&mut self.state());
    }

    fn change(&self, state: &mut InboxState<E>) {
        state.changes += 1;
        for registration in [&state.own, &state.chosen].into_iter().flatten() {
            registration.announce();
        }
        self.changed.notify_all();
    }

    /// Takes the oldest event.
    pub fn poll(&self) -> Option<E> {
        let mut state = self.state();
        let event = state.events.pop_front();
        if let (None, Some(own)) = (&event, &state.own) {
            own.forget();
        }
        event
    }

    /// Keeps only events that are still wanted.
    pub fn retain(&self, wanted: impl FnMut(&E) -> bool) {
        self.state().events.retain(wanted);
    }

    /// Returns the moment from which on [`Inbox::wait`] sees changes. A thread that waits takes it before it looks at what it waits for,
    /// because another thread may take the event.
    pub fn seen(&self) -> Seen {
        Seen(self.state().changes)
    }

    /// Sleeps until something has changed since a moment. Returns false if the time is over first.
    pub fn wait(&self, since: Seen, timeout: Option<Duration>) -> bool {
        let unchanged = |state: &mut InboxState<E>| state.changes == since.0;
        let state = self.state();
        let Some(timeout) = timeout else {
            drop(self.changed.wait_while(state, unchanged));
            return true;
        };
        self.changed.wait_timeout_while(state, timeout, unchanged).1
    }

    /// Reports changes to a queue under a token, and at once those that there were before.
    pub fn notify(&self, events: &EventQueue, token: u64) {
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

    #[test]
    fn notify__reports_what_has_happened_before_and_nothing_else() {
        let events = EventQueue::new().unwrap();
        let inbox = Inbox::new();
        inbox.notify(&events, 1);
        assert_eq!(events.poll(), None);
        inbox.push(1);
        inbox.notify(&events, 2);
        assert_eq!((events.poll(), inbox.poll()), (Some(2), Some(1)));
    }

    #[test]
    fn notify__again_replaces_the_queue_and_the_token() {
        let [first, second] = [(); 2].map(|()| EventQueue::new().unwrap());
        let inbox = Inbox::<()>::new();
        inbox.notify(&first, 1);
        inbox.wake();
        inbox.notify(&second, 2);
        assert_eq!((first.poll(), second.poll()), (None, Some(2)));
        inbox.wake();
        assert_eq!((first.poll(), second.poll()), (None, Some(2)));
    }

    #[test]
    fn push_below__keeps_no_more() {
        let inbox = Inbox::new();
        (0..3).for_each(|n| inbox.push_below(2, n));
        assert_eq!(
            [inbox.poll(), inbox.poll(), inbox.poll()],
            [Some(0), Some(1), None]
        );
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
    fn with_events__has_the_token_until_nothing_is_found() {
        let events = EventQueue::new().unwrap();
        let inbox = Inbox::with_events(&events);
        inbox.push(());
        assert_eq!(inbox.poll(), Some(()));
        inbox.push(());
        assert_eq!((inbox.poll(), inbox.poll()), (Some(()), None));
        assert_eq!(events.poll(), None);
    }
}
