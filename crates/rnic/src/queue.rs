//! Work queues, as whoever posts to them shares them with the device: a post that needs no decision of the device's waits for
//! nobody who drives it. IBTA Vol 1, 10.8.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::qp::{Head, QpInit, QpType, requester, unreliable};
use crate::work::{PostError, RecvRequest, SendRequest};

/// Why a queue did not take a request by itself.
#[derive(Debug)]
pub enum NotPosted<R> {
    /// It takes none such.
    Refused(PostError),
    /// The queue pair's state has a say: the device is to be asked.
    Undecided(R),
}

/// A queue of receives: of one QP, or shared. The device takes from it what messages use up.
#[derive(Clone, Debug)]
pub struct ReceiveQueue(Arc<Mutex<Receives>>);

#[derive(Debug)]
struct Receives {
    requests: VecDeque<RecvRequest>,
    max: usize,
    /// Receives are posted here without the device.
    open: bool,
}

impl ReceiveQueue {
    pub(crate) fn new(max: u32, open: bool) -> ReceiveQueue {
        ReceiveQueue(Arc::new(Mutex::new(Receives {
            requests: VecDeque::new(),
            max: max as usize,
            open,
        })))
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, Receives> {
        // No invariant spans a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a receive request, where that is all there is to do. IBTA Vol 1, 11.4.1.2.
    pub fn post(&self, request: RecvRequest) -> Result<(), NotPosted<RecvRequest>> {
        let mut receives = self.lock();
        if !receives.open {
            return Err(NotPosted::Undecided(request));
        }
        receives.push(request).map_err(NotPosted::Refused)
    }

    /// Posts on behalf of the device, which knows that the QP takes receives.
    pub(crate) fn push(&self, request: RecvRequest) -> Result<(), PostError> {
        self.lock().push(request)
    }

    /// Takes the oldest, and says how many are left.
    #[inline]
    pub(crate) fn take(&self) -> Option<(RecvRequest, usize)> {
        let mut receives = self.lock();
        let taken = receives.requests.pop_front()?;
        Some((taken, receives.requests.len()))
    }

    /// Puts one back that no message used up: it is the oldest again.
    pub(crate) fn put_back(&self, request: RecvRequest) {
        self.lock().requests.push_front(request);
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().requests.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// From now on receives are posted without the device.
    pub(crate) fn open(&self) {
        self.lock().open = true;
    }

    /// From now on the device decides; what was posted comes back.
    pub(crate) fn close(&self) -> VecDeque<RecvRequest> {
        let mut receives = self.lock();
        receives.open = false;
        std::mem::take(&mut receives.requests)
    }

    pub(crate) fn max(&self) -> u32 {
        self.lock().max as u32
    }

    /// Makes it hold so many; fails with how many are posted when these are more.
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
    /// Reserved before the device heard of it.
    Reserved,
    /// Still to be taken.
    Wanted,
}

impl Place {
    /// Whether the request has its place now.
    pub(crate) fn take(self, head: &Head) -> bool {
        self == Place::Reserved || head.sends.take_place()
    }

    /// The request needs none.
    pub(crate) fn give_back(self, head: &Head) {
        if self == Place::Reserved {
            head.sends.give_back(1);
        }
    }
}

/// The room in a QP's send queue. Whoever cannot have the device now reserves a place for a request, leaves the request where the
/// device will find it, and it is handed in by [`crate::Rnic::post_reserved`].
#[derive(Clone, Debug)]
pub struct SendQueue(Arc<Room>);

#[derive(Debug)]
struct Room {
    qp_type: QpType,
    max: u32,
    /// Requests posted, or reserved for, and not complete.
    outstanding: AtomicU32,
    /// Path MTU in bytes while the QP's state takes requests, else 0.
    mtu: AtomicU32,
    /// The QP may have READs and atomics under way.
    has_resources: AtomicBool,
}

impl SendQueue {
    pub(crate) fn new(init: &QpInit) -> SendQueue {
        SendQueue(Arc::new(Room {
            qp_type: init.qp_type,
            max: init.max_send_wr,
            outstanding: AtomicU32::new(0),
            mtu: AtomicU32::new(0),
            has_resources: AtomicBool::new(false),
        }))
    }

    /// Reserves a place for a request that the device is sure to take. False: only the device can say what becomes of it.
    pub fn reserve(&self, request: &SendRequest) -> bool {
        // The QP may change at once. Then the request is one of those that were posted before the change.
        self.takes(request) && self.take_place()
    }

    /// Whether the QP takes such a request now.
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

    /// Takes a place if there is one.
    pub(crate) fn take_place(&self) -> bool {
        let more = |taken| (taken < self.0.max).then_some(taken + 1);
        let outstanding = &self.0.outstanding;
        outstanding
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .is_ok()
    }

    /// Gives places back, before the requests' completions can be seen.
    pub(crate) fn give_back(&self, places: usize) {
        self.0.outstanding.fetch_sub(places as u32, Ordering::Relaxed);
    }

    pub(crate) fn open(&self, mtu: u32, has_resources: bool) {
        self.0.has_resources.store(has_resources, Ordering::Relaxed);
        self.0.mtu.store(mtu, Ordering::Release);
    }

    pub(crate) fn close(&self) {
        self.0.mtu.store(0, Ordering::Release);
    }
}
