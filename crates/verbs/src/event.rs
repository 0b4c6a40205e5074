//! Asynchronous events: changes of objects that no completion of their own requests reports. IBTA Vol 1, 11.6.3.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;

use rdmux_rnic::{Cause, Cqn, Qpn, Srqn, Status};

use crate::waker::Waker;

/// An asynchronous event. The names are those of `enum ibv_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// A completion queue overran; its queue pairs are in error.
    CqError(Cqn),
    /// A queue pair went to error for a reason of its own device: its memory failed, its completion queue or its share of one
    /// overran, or the program asked for that fault ([`Options::faults`](crate::Options::faults)).
    QpFatal(Qpn),
    /// A queue pair went to error: its peer asked for something invalid.
    QpRequestError(Qpn),
    /// A queue pair went to error: its peer asked for memory that it may not reach.
    QpAccessError(Qpn),
    /// Data came in on a queue pair that is still in RTR.
    CommunicationEstablished(Qpn),
    /// The send queue of a queue pair in SQD has drained.
    SqDrained(Qpn),
    /// A queue pair in error consumes no further receives of its shared receive queue.
    LastWqeReached(Qpn),
    /// Fewer receives than the limit are left in a shared receive queue.
    SrqLimitReached(Srqn),
    /// The device has gone for good: all its queue pairs are in error, and no call succeeds any more.
    DeviceFatal,
    /// The network takes packets again.
    PortActive,
    /// The network takes no packets: the address or its interface has gone.
    PortError,
}

impl AsyncEvent {
    /// Returns the event of a queue pair that went to error; `None` if the completion of its own request reports everything.
    pub fn of_qp_error(qpn: Qpn, status: Status, cause: Cause) -> Option<AsyncEvent> {
        match (cause, status) {
            (Cause::OwnRequest, _) => None,
            (Cause::PeerRequest, Status::RemoteInvalidRequest) => Some(AsyncEvent::QpRequestError(qpn)),
            (Cause::PeerRequest, Status::RemoteAccess) => Some(AsyncEvent::QpAccessError(qpn)),
            (Cause::PeerRequest | Cause::QueueOverrun | Cause::ShareOverrun | Cause::Injected, _) => {
                Some(AsyncEvent::QpFatal(qpn))
            }
        }
    }
}

/// An object that has events.
#[derive(Clone, Copy, Debug)]
pub enum Object {
    /// A completion queue.
    Cq(Cqn),
    /// A queue pair.
    Qp(Qpn),
    /// A shared receive queue.
    Srq(Srqn),
}

impl Object {
    /// Returns all events that the object may have.
    fn events(self) -> Vec<AsyncEvent> {
        match self {
            Object::Cq(cqn) => vec![AsyncEvent::CqError(cqn)],
            Object::Qp(qpn) => vec![
                AsyncEvent::QpFatal(qpn),
                AsyncEvent::QpRequestError(qpn),
                AsyncEvent::QpAccessError(qpn),
                AsyncEvent::CommunicationEstablished(qpn),
                AsyncEvent::SqDrained(qpn),
                AsyncEvent::LastWqeReached(qpn),
            ],
            Object::Srq(srqn) => vec![AsyncEvent::SrqLimitReached(srqn)],
        }
    }
}

/// Events that the program has not taken yet. None is dropped while its object exists, and their number is bounded by that of the
/// objects: an event that occurs again before it was taken is kept once, as the youngest.
#[derive(Debug)]
pub struct AsyncEvents {
    by_age: BTreeMap<u64, AsyncEvent>,
    ages: HashMap<AsyncEvent, u64>,
    /// Number of the next event.
    next: u64,
    waker: Arc<Waker>,
}

impl AsyncEvents {
    /// Makes a queue without events.
    ///
    /// # Errors
    /// The system refuses a descriptor.
    pub fn new() -> io::Result<AsyncEvents> {
        Ok(AsyncEvents {
            by_age: BTreeMap::new(),
            ages: HashMap::new(),
            next: 0,
            waker: Arc::new(Waker::new()?),
        })
    }

    /// Adds an event and wakes who waits.
    pub fn push(&mut self, event: AsyncEvent) {
        if let Some(before) = self.ages.insert(event, self.next) {
            self.by_age.remove(&before);
        }
        self.by_age.insert(self.next, event);
        self.next += 1;
        self.waker.wake();
    }

    /// Takes the oldest event.
    pub fn take(&mut self) -> Option<AsyncEvent> {
        let (_, event) = self.by_age.pop_first()?;
        self.ages.remove(&event);
        Some(event)
    }

    /// Removes the events of an object that is destroyed, as `ibv_destroy_qp(3)` does.
    pub fn forget(&mut self, object: Object) {
        for event in object.events() {
            if let Some(age) = self.ages.remove(&event) {
                self.by_age.remove(&age);
            }
        }
        if self.by_age.is_empty() {
            self.waker.reset_if_woken();
        }
    }

    /// Takes the oldest event for a waiting thread. One wake-up can stand for several events: while there are more, this wakes the
    /// next waiting thread.
    pub fn take_and_pass_on(&mut self) -> Option<AsyncEvent> {
        let event = self.take();
        if !self.by_age.is_empty() {
            self.waker.wake();
        }
        event
    }

    /// Returns the waker of those who wait for events.
    pub fn waker(&self) -> Arc<Waker> {
        self.waker.clone()
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "tests are named function__case")]

    use std::time::Duration;

    use super::*;

    #[test]
    fn take_and_pass_on__wakes_the_next_while_there_are_more() {
        let mut events = AsyncEvents::new().unwrap();
        events.push(AsyncEvent::PortError);
        events.push(AsyncEvent::PortActive);
        let waker = events.waker();
        let is_woken = || waker.wait(Some(Duration::ZERO));
        assert!(is_woken() && !is_woken(), "both events are one wake-up");
        assert_eq!(events.take_and_pass_on(), Some(AsyncEvent::PortError));
        assert!(is_woken(), "one more is there");
        assert_eq!(events.take_and_pass_on(), Some(AsyncEvent::PortActive));
        assert!(!is_woken(), "none is there");
    }

    fn all(events: &mut AsyncEvents) -> Vec<AsyncEvent> {
        std::iter::from_fn(|| events.take()).collect()
    }

    #[test]
    fn push__keeps_the_events_of_any_number_of_objects() {
        let mut events = AsyncEvents::new().unwrap();
        let pushed: Vec<AsyncEvent> = (0..5000).map(|n| AsyncEvent::QpFatal(Qpn::new(n))).collect();
        pushed.iter().for_each(|event| events.push(*event));
        assert_eq!(all(&mut events), pushed);
    }

    #[test]
    fn push__again_keeps_it_once_as_the_youngest() {
        let mut events = AsyncEvents::new().unwrap();
        let (down, up) = (AsyncEvent::PortError, AsyncEvent::PortActive);
        for event in [down, up, down] {
            events.push(event);
        }
        assert_eq!(all(&mut events), [up, down]);
        events.push(up);
        assert_eq!(all(&mut events), [up]);
    }

    #[test]
    fn forget__takes_the_events_of_one_object() {
        let mut events = AsyncEvents::new().unwrap();
        let [one, other] = [1, 2].map(Qpn::new);
        events.push(AsyncEvent::QpFatal(one));
        events.push(AsyncEvent::LastWqeReached(other));
        events.push(AsyncEvent::LastWqeReached(one));
        events.push(AsyncEvent::CqError(Cqn(1)));
        events.forget(Object::Qp(one));
        assert_eq!(
            all(&mut events),
            [AsyncEvent::LastWqeReached(other), AsyncEvent::CqError(Cqn(1))]
        );
    }

    #[test]
    fn forget__of_the_last_event_leaves_nothing_to_wake_for() {
        let mut events = AsyncEvents::new().unwrap();
        let qpn = Qpn::new(1);
        events.push(AsyncEvent::QpFatal(qpn));
        events.forget(Object::Qp(qpn));
        assert!(!events.waker().wait(Some(Duration::ZERO)));
    }
}
