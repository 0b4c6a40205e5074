//! Work queues that the device shares with the callers that post to them: a post that needs no decision of the device does not wait for
//! the thread that drives the device. IBTA Vol 1, 10.8.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::qp::{Head, QpInit, QpType, requester, unreliable};
use crate::sync::{Mutex, MutexGuard};
use crate::work::{PostError, RecvRequest, SendRequest};

/// Result of a post that the queue could not complete by itself.
#[derive(Debug)]
pub enum NotPosted<R> {
    /// The queue does not accept such a request.
    Refused(PostError),
    /// The outcome depends on the state of the queue pair: the caller must ask the device.
    Undecided(R),
}

/// A queue of receives, of one QP or shared. The device takes receives from it as messages consume them.
#[derive(Clone, Debug)]
pub struct ReceiveQueue(Arc<Mutex<Receives>>);

#[derive(Debug)]
struct Receives {
    requests: VecDeque<RecvRequest>,
    max: usize,
    /// Set while callers may post without the device.
    open: bool,
    /// Set while the device counts how many are left.
    counted: bool,
}

impl ReceiveQueue {
    pub(crate) fn new(max: u32, open: bool) -> ReceiveQueue {
        ReceiveQueue(Arc::new(Mutex::new(Receives {
            requests: VecDeque::new(),
            max: max as usize,
            open,
            counted: false,
        })))
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, Receives> {
        self.0.lock()
    }

    /// Posts a receive request if the post needs nothing from the device. IBTA Vol 1, 11.4.1.2.
    pub fn post(&self, request: RecvRequest) -> Result<(), NotPosted<RecvRequest>> {
        let mut receives = self.lock();
        if !receives.open {
            return Err(NotPosted::Undecided(request));
        }
        receives.push(request).map_err(NotPosted::Refused)
    }

    /// Posts on behalf of the device, which has checked that the QP accepts receives.
    pub(crate) fn push(&self, request: RecvRequest) -> Result<(), PostError> {
        self.lock().push(request)
    }

    /// Takes the oldest receive and returns it with the number of receives left.
    #[inline]
    pub(crate) fn take(&self) -> Option<(RecvRequest, usize)> {
        let mut receives = self.lock();
        let taken = receives.requests.pop_front()?;
        Some((taken, receives.requests.len()))
    }

    /// Takes the oldest receive without the device, unless that counts how many are left.
    #[inline]
    pub(crate) fn take_uncounted(&self) -> Option<RecvRequest> {
        let mut receives = self.lock();
        if receives.counted {
            return None;
        }
        receives.requests.pop_front()
    }

    /// Sets whether the device counts how many are left.
    pub(crate) fn count(&self, counted: bool) {
        self.lock().counted = counted;
    }

    /// Puts back a receive that no message consumed: it becomes the oldest again.
    pub(crate) fn put_back(&self, request: RecvRequest) {
        self.lock().requests.push_front(request);
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().requests.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lets callers post without the device from here on.
    pub(crate) fn open(&self) {
        self.lock().open = true;
    }

    /// Makes callers ask the device from here on, and returns the posted receives.
    pub(crate) fn close(&self) -> VecDeque<RecvRequest> {
        let mut receives = self.lock();
        receives.open = false;
        std::mem::take(&mut receives.requests)
    }

    pub(crate) fn max(&self) -> u32 {
        self.lock().max as u32
    }

    /// Changes the capacity; fails with the number of posted receives if they are more than `max`.
    pub(crate) fn resize(&self, max: u32) -> Result<(), usize> {
        let mut receives = self.lock();
        let posted = receives.requests.len();
        if posted > max as usize {
            return Err(posted);
        }
        receives.max = max as usize;
        Ok(())
    }
}

impl Receives {
    fn push(&mut self, request: RecvRequest) -> Result<(), PostError> {
        request.check()?;
        if self.requests.len() >= self.max {
            return Err(PostError::QueueFull);
        }
        self.requests.push_back(request);
        Ok(())
    }
}

/// A request's place in its send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The caller reserved the place before the device saw the request.
    Reserved,
    /// The request still needs a place.
    Wanted,
}

impl Place {
    /// Takes a place if none is reserved; returns whether the request has one.
    pub(crate) fn take(self, head: &Head) -> bool {
        self == Place::Reserved || head.sends.take_place()
    }

    /// Gives a reserved place back: the request needs none.
    pub(crate) fn give_back(self, head: &Head) {
        if self == Place::Reserved {
            head.sends.give_back(1);
        }
    }
}

/// The room in a QP's send queue. A caller that cannot lock the device reserves a place for a request and leaves the request where the
/// device's driver finds it; the driver then calls [`crate::Rnic::post_reserved`].
#[derive(Clone, Debug)]
pub struct SendQueue(Arc<Room>);

#[derive(Debug)]
struct Room {
    qp_type: QpType,
    max: u32,
    /// Requests that are posted or have a reserved place, and are not complete.
    outstanding: AtomicU32,
    /// Reserved places whose requests the device has not executed or queued.
    left: AtomicU32,
    /// Path MTU in bytes while the QP's state takes requests, else 0.
    mtu: AtomicU32,
    /// Set when the QP may have READs and atomics in flight.
    has_resources: AtomicBool,
}

impl SendQueue {
    pub(crate) fn new(init: &QpInit) -> SendQueue {
        SendQueue(Arc::new(Room {
            qp_type: init.qp_type,
            max: init.max_send_wr,
            outstanding: AtomicU32::new(0),
            left: AtomicU32::new(0),
            mtu: AtomicU32::new(0),
            has_resources: AtomicBool::new(false),
        }))
    }

    /// Reserves a place for a request that the device is certain to accept. Returns false if only the device can decide on the request.
    pub fn reserve(&self, request: &SendRequest) -> bool {
        // The QP may change right after this. The request then counts as posted before the change.
        let reserves = self.takes(request) && self.take_place();
        if reserves {
            self.0.left.fetch_add(1, Ordering::Relaxed);
        }
        reserves
    }

    /// Notes that the device has executed or queued a request whose place was reserved.
    pub(crate) fn has_seen(&self) {
        self.0.left.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns whether a place is reserved for a request that the device has not executed or queued.
    #[inline]
    pub fn has_left(&self) -> bool {
        self.0.left.load(Ordering::Relaxed) > 0
    }

    /// Returns whether the QP accepts such a request in its current state.
    pub(crate) fn takes(&self, request: &SendRequest) -> bool {
        let room = &*self.0;
        let mtu = room.mtu.load(Ordering::Acquire);
        let Ok(bytes) = request.check() else { return false };
        let fits = match room.qp_type {
            QpType::Rc | QpType::XrcSend | QpType::XrcRecv => requester::takes(room.qp_type, request),
            QpType::Uc => unreliable::takes(room.qp_type, request),
            QpType::Ud => unreliable::takes(room.qp_type, request) && bytes <= mtu,
        };
        let has_resources = || room.has_resources.load(Ordering::Relaxed);
        mtu > 0 && fits && (!requester::takes_resource(&request.operation) || has_resources())
    }

    /// Takes a place if there is one; returns whether it did.
    pub(crate) fn take_place(&self) -> bool {
        let more = |taken| (taken < self.0.max).then_some(taken + 1);
        let outstanding = &self.0.outstanding;
        outstanding
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .is_ok()
    }

    /// Gives places back. Must happen before the completions of these requests become visible.
    pub(crate) fn give_back(&self, places: usize) {
        self.0.outstanding.fetch_sub(places as u32, Ordering::Release);
    }

    /// Returns whether no place is taken. What the device did before it gave the last one back has happened before.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.0.outstanding.load(Ordering::Acquire) == 0
    }

    /// Returns the number of places that are taken.
    #[inline]
    pub(crate) fn outstanding(&self) -> usize {
        self.0.outstanding.load(Ordering::Acquire) as usize
    }

    pub(crate) fn open(&self, mtu: u32, has_resources: bool) {
        self.0.has_resources.store(has_resources, Ordering::Relaxed);
        self.0.mtu.store(mtu, Ordering::Release);
    }

    pub(crate) fn close(&self) {
        self.0.mtu.store(0, Ordering::Release);
    }
}
