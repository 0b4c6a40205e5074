//! Event channels.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Weak};

use rdmux_verbs::Arrival;
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::id::CmIdObject;
use super::made::Made;
use crate::events::Given;
use crate::{abi, made, minus_one, wait};

/// Length of the longest private data of a message: that of a REP.
const PRIVATE_DATA_MAX: usize = 196;

/// Object behind a program's `struct rdma_cm_event` pointer.
#[repr(C)]
pub(super) struct CmEventObject {
    pub(super) shown: abi::CmEvent,
    /// Data that [`CmEventObject::shown`] points at: an event stays where it was made.
    private_data: [u8; PRIVATE_DATA_MAX],
    /// Count of unacknowledged events that this event belongs to: the id's, or the listening id's.
    of: Arc<Given>,
    /// Id of a request, until the program has it; otherwise null.
    asks: *mut CmIdObject,
}

impl Drop for CmEventObject {
    fn drop(&mut self) {
        if !self.asks.is_null() {
            // SAFETY: made by a Box in `CmIdObject::new`, and owned by this event alone. The request is refused with it.
            unsafe { Box::from_raw(self.asks) }.end();
        }
    }
}

// SAFETY: the pointers in it are the program's ids, which are not touched through it; and its own private data.
unsafe impl Send for CmEventObject {}

impl CmEventObject {
    /// Makes an event of an id.
    pub(super) fn new(id: *mut abi::CmId, of: &Arc<Given>, event: u32, status: c_int) -> Box<CmEventObject> {
        Box::new(CmEventObject {
            shown: abi::CmEvent {
                id,
                listen_id: ptr::null_mut(),
                event,
                status,
                param: abi::CmParam {
                    conn: abi::ConnParam {
                        private_data: ptr::null(),
                        private_data_len: 0,
                        responder_resources: 0,
                        initiator_depth: 0,
                        flow_control: 0,
                        retry_count: 0,
                        rnr_retry_count: 0,
                        srq: 0,
                        qp_num: 0,
                    },
                },
            },
            private_data: [0; PRIVATE_DATA_MAX],
            of: of.clone(),
            asks: ptr::null_mut(),
        })
    }

    /// Turns it into an event of a listening id, on which the request came in for which this id was made.
    pub(super) fn on(
        mut self: Box<CmEventObject>,
        listener: *mut abi::CmId,
        of: &Arc<Given>,
    ) -> Box<CmEventObject> {
        self.shown.listen_id = listener;
        self.asks = self.shown.id.cast();
        // The event belongs to the listening id: the new id can be destroyed before the event is acknowledged.
        self.of = of.clone();
        self
    }

    /// Adds the private data of the peer's user, and parameters of the connection.
    pub(super) fn with(
        mut self: Box<CmEventObject>,
        conn: abi::ConnParam,
        private_data: &[u8],
    ) -> Box<CmEventObject> {
        let length = private_data.len().min(PRIVATE_DATA_MAX);
        self.private_data[..length].copy_from_slice(&private_data[..length]);
        self.shown.param.conn = abi::ConnParam {
            private_data: if length == 0 {
                ptr::null()
            } else {
                self.private_data.as_ptr().cast()
            },
            private_data_len: length as u8,
            ..conn
        };
        self
    }

    /// Adds the private data of the peer's user, and the queue pair that serves datagrams.
    pub(super) fn with_ud(
        self: Box<CmEventObject>,
        ud: abi::UdParam,
        private_data: &[u8],
    ) -> Box<CmEventObject> {
        // SAFETY: numbers and pointers, all of which may be zero.
        let mut event = self.with(unsafe { std::mem::zeroed() }, private_data);
        // SAFETY: just written.
        let conn = unsafe { event.shown.param.conn };
        event.shown.param.ud = abi::UdParam {
            private_data: conn.private_data,
            private_data_len: conn.private_data_len,
            ..ud
        };
        event
    }
}

/// Something to report to a program, and the time at which it happened.
pub(super) struct Happened {
    pub(super) at: Arrival,
    pub(super) tell: Box<dyn FnOnce()>,
}

/// A connection or a listener, of whose events the thread of all connections learns in any order.
pub(super) trait Source: Send + Sync {
    /// Takes everything that has happened and was not taken yet.
    fn take(self: Arc<Self>) -> Vec<Happened>;
}

/// Events that a channel holds for its program.
pub(super) struct Events {
    /// Number of events, so that a read waits for one.
    count: OwnedFd,
    list: Mutex<VecDeque<Box<CmEventObject>>>,
    sources: Mutex<Vec<Weak<dyn Source>>>,
}

impl Events {
    pub(super) fn new() -> Result<Arc<Events>, c_int> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE;
        Ok(Arc::new(Events {
            count: eventfd(0, flags).map_err(Errno::raw_os_error)?,
            list: Mutex::default(),
            sources: Mutex::default(),
        }))
    }

    fn list(&self) -> MutexGuard<'_, VecDeque<Box<CmEventObject>>> {
        self.list.lock()
    }

    /// Makes the channel report what happens at the source, until the source is dropped.
    pub(super) fn watch(&self, source: Weak<dyn Source>) {
        let mut sources = self.sources();
        if !sources.iter().any(|known| known.ptr_eq(&source)) {
            sources.push(source);
        }
    }

    /// Undoes [`Events::watch`]: nothing of the source is used after this.
    pub(super) fn forget(&self, source: &Weak<dyn Source>) {
        self.sources().retain(|known| !known.ptr_eq(source));
    }

    fn sources(&self) -> MutexGuard<'_, Vec<Weak<dyn Source>>> {
        self.sources.lock()
    }

    /// Reports what has happened at all sources, in the order in which it happened: their events are handled in any order.
    /// Calls `last` after that, before another thread reports what happens later.
    pub(super) fn tell_happened<T>(&self, last: impl FnOnce() -> T) -> T {
        let mut sources = self.sources();
        sources.retain(|source| source.strong_count() > 0);
        let live = sources.iter().filter_map(Weak::upgrade);
        let mut happened: Vec<Happened> = live.flat_map(Source::take).collect();
        happened.sort_by_key(|happened| happened.at);
        for happened in happened {
            (happened.tell)();
        }
        last()
    }

    /// Returns the number of requests that came in on an id and wait to be taken.
    pub(super) fn waiting(&self, listener: *mut abi::CmId) -> usize {
        let list = self.list();
        list.iter()
            .filter(|event| event.shown.listen_id == listener)
            .count()
    }

    pub(super) fn push(&self, event: Box<CmEventObject>) {
        let mut list = self.list();
        list.push_back(event);
        let _ = rustix::io::write(&self.count, &1u64.to_ne_bytes());
    }

    /// Waits for the next event. Events of an id that is gone, or that has moved to another channel, are no longer there.
    pub(super) fn next(&self) -> Result<Box<CmEventObject>, c_int> {
        loop {
            if let Some(event) = self.next_at_once() {
                return Ok(event);
            }
            match wait::poll(&mut [wait::entry(self.count.as_raw_fd(), libc::POLLIN)], None) {
                Err(errno) if errno != libc::EINTR || !wait::restarts() => return Err(errno),
                _ => {}
            }
        }
    }

    /// Returns the next event, if there is one.
    fn next_at_once(&self) -> Option<Box<CmEventObject>> {
        let mut list = self.list();
        let event = list.pop_front()?;
        self.count_down();
        Some(event)
    }

    /// Decrements the count. The caller holds the lock of the list.
    fn count_down(&self) {
        let mut count = [0; 8];
        let at_once = rustix::io::ReadWriteFlags::NOWAIT;
        let _ = rustix::io::preadv2(&self.count, &mut [IoSliceMut::new(&mut count)], u64::MAX, at_once);
    }

    /// Takes out the events of an id, and of the requests that came in on it.
    pub(super) fn take_of(&self, id: *mut abi::CmId) -> VecDeque<Box<CmEventObject>> {
        self.take(|event| event.shown.id == id || event.shown.listen_id == id)
    }

    /// Takes out the events that are acknowledged at `given`.
    pub(super) fn take_given(&self, given: &Arc<Given>) -> VecDeque<Box<CmEventObject>> {
        self.take(|event| Arc::ptr_eq(&event.of, given))
    }

    fn take(&self, which: impl Fn(&CmEventObject) -> bool) -> VecDeque<Box<CmEventObject>> {
        let mut list = self.list();
        let (of, rest): (VecDeque<_>, _) = list.drain(..).partition(|event| which(event));
        *list = rest;
        // They are no longer counted: otherwise a program that polls would learn of events that it cannot find.
        for _ in &of {
            self.count_down();
        }
        of
    }
}

/// Hands an event over to the program.
pub(super) fn give(mut event: Box<CmEventObject>) -> *mut abi::CmEvent {
    event.asks = ptr::null_mut();
    event.of.give();
    Box::into_raw(event).cast()
}

/// The channels of the program, without those that ids have of their own.
static CHANNELS: Made = Made::new();

/// Object behind a program's `struct rdma_event_channel` pointer.
#[repr(C)]
pub(super) struct EventChannelObject {
    shown: abi::EventChannel,
    pub(super) events: Arc<Events>,
}

impl EventChannelObject {
    pub(super) fn of(events: Arc<Events>) -> Box<EventChannelObject> {
        let shown = abi::EventChannel {
            fd: events.count.as_raw_fd(),
        };
        Box::new(EventChannelObject { shown, events })
    }
}

#[unsafe(no_mangle)]
extern "C" fn rdma_create_event_channel() -> *mut abi::EventChannel {
    made(Events::new().map(|events| {
        let channel = Box::into_raw(EventChannelObject::of(events));
        CHANNELS.add(channel);
        channel.cast()
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut abi::EventChannel) {
    if CHANNELS.remove(channel) {
        // SAFETY: made by a Box above, and not used any more, says the caller.
        drop(unsafe { Box::from_raw(channel.cast::<EventChannelObject>()) });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut abi::EventChannel,
    event: *mut *mut abi::CmEvent,
) -> c_int {
    // SAFETY: a channel that was made, says the caller.
    let own = unsafe { &*channel.cast::<EventChannelObject>() };
    loop {
        // SAFETY: there is nothing to drop here.
        if let Err(errno) = unsafe { wait::readable_or_cancelled(own.shown.fd) } {
            return minus_one(Err(errno));
        }
        if let Some(found) = own.events.next_at_once() {
            // SAFETY: a place of the caller's.
            unsafe { *event = give(found) };
            return 0;
        }
    }
}

/// Handles the program's acknowledgement of an event.
///
/// # Safety
/// It came from [`give`], and is not used any more.
pub(super) unsafe fn take_back(event: *mut abi::CmEvent) {
    // SAFETY: made by a Box in `CmEventObject::new`, and given out once, says the caller.
    let event = unsafe { Box::from_raw(event.cast::<CmEventObject>()) };
    event.of.acknowledge(1);
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_ack_cm_event(event: *mut abi::CmEvent) -> c_int {
    if event.is_null() {
        return minus_one(Err(libc::EINVAL));
    }
    // SAFETY: as the caller says.
    unsafe { take_back(event) };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_migrate_id(id: *mut abi::CmId, channel: *mut abi::EventChannel) -> c_int {
    // SAFETY: an id that was made, which one thread uses meanwhile, says the caller.
    let own = unsafe { &mut *id.cast::<CmIdObject>() };
    if channel.is_null() && own.waits() {
        return minus_one(Err(libc::EINVAL));
    }
    own.forget_event();
    let events = if channel.is_null() {
        match Events::new() {
            Ok(events) => events,
            Err(errno) => return minus_one(Err(errno)),
        }
    } else {
        // SAFETY: a channel that was made, says the caller.
        unsafe { &*channel.cast::<EventChannelObject>() }.events.clone()
    };
    own.migrate(events, channel);
    // A thread that took events of the previous channel has acknowledged those of this id after this.
    own.shared.given.wait_acknowledged();
    0
}

/// The context that a program gave for an id, unchanged.
pub(super) type UserContext = *mut c_void;
