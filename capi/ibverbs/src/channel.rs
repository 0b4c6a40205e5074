//! Completion channels and completion queues.

use std::cell::UnsafeCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::iter;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{Arm, CompletionQueue, CreateError, EventQueue, Status, WcOpcode, WorkCompletion};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;

use crate::completions::Poller;
use crate::context::ContextObject;
use crate::events::Given;
use crate::query::CQE_MAX;
use crate::uses::Uses;
use crate::watch::Arrived;
use crate::{abi, made, minus_one, wait, watch};

/// Object behind a program's `struct ibv_comp_channel` pointer.
#[repr(C)]
struct CompChannelObject {
    shown: UnsafeCell<abi::CompChannel>,
    events: EventQueue,
    /// Its queues, by their tokens. The lock is held while events are given and while queues leave the channel: a queue that has
    /// given an event is not destroyed before the event is acknowledged.
    queues: Mutex<HashMap<u64, *mut CqObject>>,
}

impl CompChannelObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that [`create_channel`] gave out, and is not destroyed.
    unsafe fn of<'a>(channel: *mut abi::CompChannel) -> &'a CompChannelObject {
        // SAFETY: as the caller says.
        unsafe { &*channel.cast::<CompChannelObject>() }
    }

    /// Changes its queues, and shows the program how many there are.
    fn change(&self, change: impl FnOnce(&mut HashMap<u64, *mut CqObject>)) {
        let mut queues = self.queues.lock();
        change(&mut queues);
        // SAFETY: only the holder of the lock writes it.
        unsafe { (*self.shown.get()).refcnt = queues.len() as c_int };
    }
}

/// Object behind a program's `struct ibv_cq` pointer.
#[repr(C)]
pub(crate) struct CqObject {
    pub(crate) shown: UnsafeCell<abi::CqEx>,
    pub(crate) queue: CompletionQueue,
    /// Its token in its channel.
    token: u64,
    /// Meaning of a datagram's `sl`: see [`CqObject::shown`].
    packet_type: u8,
    /// State of polling one completion after another, for a queue made for that.
    pub(crate) poller: Poller,
    /// Completions on their way to the program.
    buffer: Mutex<VecDeque<WorkCompletion>>,
    /// Unacknowledged events of its channel, and asynchronous ones.
    given: Given,
    pub(crate) errors: Given,
    pub(crate) uses: Uses,
}

impl CqObject {
    /// Returns the object behind a program's pointer.
    ///
    /// # Safety
    /// The pointer is one that `ibv_create_cq` gave out, and is not destroyed.
    pub(crate) unsafe fn of<'a>(queue: *mut abi::Cq) -> &'a CqObject {
        // SAFETY: as the caller says.
        unsafe { &*queue.cast::<CqObject>() }
    }

    /// Takes the queue out of its channel, if it has one, so that the channel no longer reports it.
    fn leave_channel(&self, channel: *mut abi::CompChannel) {
        if channel.is_null() {
            return;
        }
        // SAFETY: the queue holds its channel.
        let channel = unsafe { CompChannelObject::of(channel) };
        channel.change(|queues| {
            queues.remove(&self.token);
        });
    }

    /// Returns a completion as programs read it. There is no service level on Ethernet: as with mlx5, `sl` says which headers a
    /// datagram came with, because UCX reads that there: 8 for RoCEv2, and 1 for IPv6 or 2 for IPv4.
    pub(crate) fn shown(&self, wc: &WorkCompletion) -> abi::Wc {
        let mut wc_flags = 0;
        let mut imm_data = 0;
        if let Some(imm) = wc.imm {
            wc_flags |= abi::wc_flags::WITH_IMM;
            imm_data = imm.to_be();
        }
        if let Some(rkey) = wc.invalidated {
            wc_flags |= abi::wc_flags::WITH_INV;
            imm_data = rkey.0;
        }
        let mut sl = 0;
        if wc.src_qpn.is_some() {
            wc_flags |= abi::wc_flags::GRH;
            sl = self.packet_type;
        }
        abi::Wc {
            wr_id: wc.wr_id,
            status: status_of(wc.status),
            opcode: opcode_of(wc.opcode),
            vendor_err: 0,
            byte_len: wc.byte_len,
            imm_data,
            qp_num: wc.qpn.value(),
            src_qp: wc.src_qpn.map_or(0, |qpn| qpn.value()),
            wc_flags,
            sl,
            ..abi::Wc::default()
        }
    }
}

pub(crate) fn create_channel(context: *mut abi::Context) -> Result<*mut abi::CompChannel, c_int> {
    let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EMFILE);
    let events = EventQueue::new().map_err(errno)?;
    // Programs expect a call that blocks, unless they say otherwise.
    fcntl_setfl(&events, OFlags::empty()).map_err(Errno::raw_os_error)?;
    let channel = Box::new(CompChannelObject {
        shown: UnsafeCell::new(abi::CompChannel {
            context,
            fd: events.as_fd().as_raw_fd(),
            refcnt: 0,
        }),
        events,
        queues: Mutex::default(),
    });
    Ok(Box::into_raw(channel).cast())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut abi::Context) -> *mut abi::CompChannel {
    made(create_channel(context))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut abi::CompChannel) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*channel).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: a channel that was made, says the caller.
    let own = unsafe { CompChannelObject::of(channel) };
    if !own.queues.lock().is_empty() {
        return libc::EBUSY;
    }
    // SAFETY: made by a Box in `create_channel`; no queue uses it, and the caller does not any more.
    drop(unsafe { Box::from_raw(channel.cast::<CompChannelObject>()) });
    0
}

/// The shortest completion queue. Drivers of RNICs round up what a program asks for, and programs rely on it: `ib_send_lat -e` leaves completions of a
/// queue for one in it where the event of another queue comes first.
const CQE_MIN: c_int = 16;

/// Makes a completion queue.
///
/// # Safety
/// The objects given were made, and are not destroyed.
pub(crate) unsafe fn create_cq(
    context: *mut abi::Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut abi::CompChannel,
    vector: c_int,
) -> Result<*mut abi::Cq, c_int> {
    // SAFETY: as the caller says.
    unsafe { create_cq_with(context, cqe, cq_context, channel, vector, Poller::default()) }
}

/// Makes a completion queue, with a way to poll completions one after another.
///
/// # Safety
/// As [`create_cq`].
pub(crate) unsafe fn create_cq_with(
    context: *mut abi::Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut abi::CompChannel,
    vector: c_int,
    poller: Poller,
) -> Result<*mut abi::Cq, c_int> {
    if !(1..=CQE_MAX).contains(&cqe) {
        return Err(libc::EINVAL);
    }
    let cqe = cqe.max(CQE_MIN);
    let vector = u32::try_from(vector).map_err(|_| libc::EINVAL)?;
    // SAFETY: an open context, says the caller.
    let device = unsafe { &ContextObject::of(context).device };
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let token = NEXT.fetch_add(1, Ordering::Relaxed);
    // SAFETY: null, or a channel that was made, says the caller.
    let of = (!channel.is_null()).then(|| unsafe { CompChannelObject::of(channel) });
    let queue = match of {
        Some(channel) => device.create_cq_reporting_on(cqe as u32, vector, &channel.events, token),
        None => device.create_cq_on(cqe as u32, vector),
    };
    let queue = queue.map_err(|error| errno_of(&error))?;
    let packet_type = if device.address().is_ipv4() { 0xa } else { 0x9 };
    // SAFETY: all of it may be zero: numbers, null pointers, and functions that are none.
    let mut shown: abi::CqEx = unsafe { std::mem::zeroed() };
    let cq = &mut shown.cq;
    (cq.context, cq.channel, cq.cq_context) = (context, channel, cq_context);
    (cq.handle, cq.cqe) = (queue.cqn().0, cqe);
    poller.prepare(&queue, &mut shown)?;
    let made = Box::into_raw(Box::new(CqObject {
        shown: UnsafeCell::new(shown),
        queue,
        token,
        packet_type,
        poller,
        buffer: Mutex::default(),
        given: Given::default(),
        errors: Given::default(),
        uses: Uses::default(),
    }));
    if let Some(channel) = of {
        channel.change(|queues| {
            queues.insert(token, made);
        });
    }
    // SAFETY: just made; an open context, says the caller.
    unsafe {
        ContextObject::of(context)
            .objects()
            .completions
            .insert((*made).queue.cqn().0, made.cast())
    };
    Ok(made.cast())
}

/// Returns the error number that a program gets.
pub(crate) fn errno_of(error: &CreateError) -> c_int {
    match error {
        CreateError::NoRoom | CreateError::Limit(_) => libc::ENOMEM,
        CreateError::OtherDevice
        | CreateError::NoVector { .. }
        | CreateError::NoShare
        | CreateError::TwoShares
        | CreateError::BeyondShare { .. } => libc::EINVAL,
        CreateError::Io(error) => error.raw_os_error().unwrap_or(libc::EIO),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut abi::Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut abi::CompChannel,
    vector: c_int,
) -> *mut abi::Cq {
    // SAFETY: as the caller says.
    made(unsafe { create_cq(context, cqe, cq_context, channel, vector) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_destroy_cq(queue: *mut abi::Cq) -> c_int {
    // SAFETY: of a context that is open as long, says the caller.
    if unsafe { ContextObject::of((*queue).context) }.is_inherited() {
        return 0;
    }
    // SAFETY: a queue that was made, says the caller.
    let (context, channel) = unsafe { ((*queue).context, (*queue).channel) };
    // SAFETY: as above.
    if let Err(errno) = unsafe { CqObject::of(queue) }.uses.check_unused() {
        return errno;
    }
    {
        // SAFETY: as above.
        let own = unsafe { CqObject::of(queue) };
        own.leave_channel(channel);
        // SAFETY: an open context, which lives as long as its objects.
        unsafe { ContextObject::of(context) }.take_out(queue.cast(), |objects| {
            objects.completions.remove(&own.queue.cqn().0);
        });
        own.given.wait_acknowledged();
        own.errors.wait_acknowledged();
    }
    // SAFETY: made by a Box in `create_cq`; the caller does not use it any more, and nobody else has it.
    drop(unsafe { Box::from_raw(queue.cast::<CqObject>()) });
    0
}

/// Ends a queue whose context is closed.
///
/// # Safety
/// It was made, has left the objects, and is not used any more.
pub(crate) unsafe fn end(queue: *mut abi::Cq) {
    // SAFETY: as the caller says.
    let (own, channel) = unsafe { (CqObject::of(queue), (*queue).channel) };
    if own.uses.check_unused().is_ok() {
        own.leave_channel(channel);
        // SAFETY: made by a Box in `create_cq`; the rest as the caller says.
        drop(unsafe { Box::from_raw(queue.cast::<CqObject>()) });
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut abi::CompChannel,
    queue: *mut *mut abi::Cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a channel that was made, of a context that is open as long, says the caller.
    let (context, channel) = unsafe {
        (
            ContextObject::of((*channel).context),
            CompChannelObject::of(channel),
        )
    };
    let device = &context.device;
    let fd = channel.events.as_fd().as_raw_fd();
    let blocks = wait::is_blocking(fd);
    let look = || next_event(channel);
    let found = match blocks {
        Ok(true) => wait::uncancelled(|| device.look_before_sleep(look)),
        _ => look(),
    };
    let found = match found {
        Some(found) => Ok(found),
        // SAFETY: there is nothing to drop here.
        None => blocks.and_then(|blocks| unsafe { sleep_until_event(context, channel, blocks) }),
    };
    let found = match found {
        Ok(found) => found,
        Err(errno) => return minus_one(Err(errno)),
    };
    // SAFETY: the queue has given an event, so that it is not destroyed; places of the caller's.
    unsafe {
        *queue = found.cast();
        *cq_context = (*(*found).shown.get()).cq.cq_context;
    }
    0
}

/// Sleeps until a queue has an event, in the place of the device's engine if no other thread is there.
///
/// # Safety
/// As [`wait::readable_or_cancelled`].
unsafe fn sleep_until_event(
    context: &ContextObject,
    channel: &CompChannelObject,
    blocks: bool,
) -> Result<*mut CqObject, c_int> {
    let since = Instant::now();
    let fd = channel.events.as_fd().as_raw_fd();
    // A signal handler may have left an earlier call by `longjmp`.
    wait::uncancelled(watch::end);
    let found = loop {
        let prepared = match blocks {
            true => wait::uncancelled(|| watch::prepare(context)),
            false => Ok(None),
        };
        let ready = match prepared {
            // SAFETY: as the caller says.
            Ok(place) => unsafe { wait::one_readable_or_cancelled([Some(fd), place], blocks) },
            // Only looks, as a cancellation point: a peer may send for ever without an event.
            // SAFETY: as the caller says.
            Err(Arrived) => match unsafe { wait::one_readable_or_cancelled([Some(fd), None], false) } {
                Err(libc::EAGAIN) => Ok(()),
                looked => looked,
            },
        };
        match (ready, next_event(channel)) {
            (_, Some(found)) => break Ok(found),
            (Err(errno), None) => break Err(errno),
            (Ok(()), None) => {}
        }
    };
    wait::uncancelled(watch::end);
    if found.is_ok() {
        context.device.slept(since);
    }
    found
}

/// Returns the queue that has an event. The event has been given when this returns.
fn next_event(channel: &CompChannelObject) -> Option<*mut CqObject> {
    let queues = channel.queues.lock();
    // A queue that has left the channel may have reported after that.
    let queue = iter::from_fn(|| channel.events.poll()).find_map(|token| queues.get(&token).copied())?;
    // SAFETY: a queue of the channel, which it leaves under the lock.
    let own = unsafe { &*queue };
    own.queue.take_event();
    own.given.give();
    Some(queue)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(queue: *mut abi::Cq, count: u32) {
    // SAFETY: a queue that was made, says the caller.
    unsafe { CqObject::of(queue) }.given.acknowledge(count);
}

pub(crate) unsafe extern "C" fn req_notify_cq(queue: *mut abi::Cq, solicited_only: c_int) -> c_int {
    // SAFETY: a queue that was made, says the caller.
    let own = unsafe { CqObject::of(queue) };
    let arm = if solicited_only != 0 {
        Arm::Solicited
    } else {
        Arm::Next
    };
    own.queue.arm(arm);
    0
}

pub(crate) unsafe extern "C" fn poll_cq(queue: *mut abi::Cq, wanted: c_int, into: *mut abi::Wc) -> c_int {
    // SAFETY: a queue that was made, says the caller.
    let own = unsafe { CqObject::of(queue) };
    if wanted == 1 {
        let Some(wc) = own.queue.poll() else { return 0 };
        // SAFETY: room for one, says the caller.
        unsafe { *into = own.shown(&wc) };
        return 1;
    }
    let mut buffer = own.buffer.lock();
    let n = own.queue.poll_many(wanted.max(0) as usize, &mut buffer);
    for (i, wc) in buffer.drain(..).enumerate() {
        // SAFETY: room for as many as were wanted, says the caller, and no more were taken.
        unsafe { *into.add(i) = own.shown(&wc) };
    }
    n as c_int
}

fn status_of(status: Status) -> u32 {
    use abi::wc_status::*;
    match status {
        Status::Success => SUCCESS,
        Status::LocalLength => LOC_LEN_ERR,
        Status::LocalProtection => LOC_PROT_ERR,
        Status::LocalQpOperation => LOC_QP_OP_ERR,
        Status::Flushed => WR_FLUSH_ERR,
        Status::BadResponse => BAD_RESP_ERR,
        Status::RemoteInvalidRequest => REM_INV_REQ_ERR,
        Status::RemoteAccess => REM_ACCESS_ERR,
        Status::RemoteOperation => REM_OP_ERR,
        Status::RetryExceeded => RETRY_EXC_ERR,
        Status::RnrRetryExceeded => RNR_RETRY_EXC_ERR,
        Status::MemoryBind => MW_BIND_ERR,
    }
}

fn opcode_of(opcode: WcOpcode) -> u32 {
    use abi::wc_opcode::*;
    match opcode {
        WcOpcode::Send => SEND,
        WcOpcode::Write => RDMA_WRITE,
        WcOpcode::Read => RDMA_READ,
        WcOpcode::CompareSwap => COMP_SWAP,
        WcOpcode::FetchAdd => FETCH_ADD,
        WcOpcode::AtomicWrite => ATOMIC_WRITE,
        WcOpcode::Flush => FLUSH,
        WcOpcode::BindWindow => BIND_MW,
        WcOpcode::Register | WcOpcode::LocalInvalidate => LOCAL_INV,
        WcOpcode::Recv => RECV,
        WcOpcode::RecvRdmaWithImm => RECV_RDMA_WITH_IMM,
    }
}
