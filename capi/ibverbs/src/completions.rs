//! Extended completion queues (`ibv_cq_ex`): a program takes completions one after another between start and end, and reads
//! each in parts, with the time at which it came. Also the properties that can be changed of any completion queue.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rdmux_verbs::{CompletionQueue, Moderation, ModerationPolicy, ResizeError};

use crate::channel::{self, CqObject};
use crate::memory::PdObject;
use crate::query::CQE_MAX;
use crate::{abi, made, status};

/// The device's clock: `CLOCK_MONOTONIC`, in nanoseconds.
pub(crate) const CLOCK_KHZ: u64 = 1_000_000;

/// State of a queue that is polled by `ibv_start_poll` and `ibv_next_poll`.
#[derive(Default)]
pub(crate) struct Poller {
    /// Fields of completions to be read, as given to `ibv_create_cq_ex`; `None` for a queue that is not extended.
    wc_flags: Option<u64>,
    /// Set when the program ensures that one thread polls at a time.
    single_threaded: bool,
    /// True while a thread is between start and end.
    taken: AtomicBool,
    current: UnsafeCell<Option<(abi::Wc, Instant)>>,
}

// SAFETY: the completion that is being read is touched between start and end alone, by the thread that took the queue, or that
// the program lets.
unsafe impl Sync for Poller {}

impl Poller {
    /// Gives a queue its functions, and makes it keep the times that they return.
    pub(crate) fn prepare(&self, queue: &CompletionQueue, shown: &mut abi::CqEx) -> Result<(), c_int> {
        use abi::cq_ex::{WITH_COMPLETION_TIMESTAMP, WITH_COMPLETION_TIMESTAMP_WALLCLOCK};
        let Some(wanted) = self.wc_flags else {
            return Ok(());
        };
        shown.start_poll = Some(start_poll);
        shown.next_poll = Some(next_poll);
        shown.end_poll = Some(end_poll);
        shown.read_opcode = Some(read_opcode);
        shown.read_vendor_err = Some(read_vendor_err);
        shown.read_byte_len = Some(read_byte_len);
        shown.read_imm_data = Some(read_imm_data);
        shown.read_qp_num = Some(read_qp_num);
        shown.read_src_qp = Some(read_src_qp);
        shown.read_wc_flags = Some(read_wc_flags);
        shown.read_slid = Some(read_slid);
        shown.read_sl = Some(read_sl);
        shown.read_dlid_path_bits = Some(read_dlid_path_bits);
        if wanted & (WITH_COMPLETION_TIMESTAMP | WITH_COMPLETION_TIMESTAMP_WALLCLOCK) != 0 {
            queue.keep_times().map_err(|_| libc::EOPNOTSUPP)?;
            shown.read_completion_ts = Some(read_completion_ts);
            shown.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
        }
        Ok(())
    }
}

unsafe fn create(context: *mut abi::Context, init: &abi::CqInitAttrEx) -> Result<*mut abi::CqEx, c_int> {
    use abi::cq_ex::*;
    let readable = WITH_STANDARD | WITH_COMPLETION_TIMESTAMP | WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    let flags = if init.comp_mask & INIT_FLAGS != 0 {
        init.flags
    } else {
        0
    };
    if init.wc_flags & !readable != 0
        || init.comp_mask & !(INIT_FLAGS | INIT_PD) != 0
        || flags & !SINGLE_THREADED != 0
    {
        return Err(libc::EOPNOTSUPP);
    }
    let asks = init.comp_mask & INIT_PD != 0;
    // SAFETY: a domain that was made, says the caller.
    let is_parent = || unsafe { PdObject::of(init.parent_domain) }.parent_of.is_some();
    if asks && (init.parent_domain.is_null() || !is_parent()) {
        return Err(libc::EINVAL);
    }
    let number = |number: u32| c_int::try_from(number).map_err(|_| libc::EINVAL);
    let (cqe, vector) = (number(init.cqe)?, number(init.comp_vector)?);
    let poller = Poller {
        wc_flags: Some(init.wc_flags),
        single_threaded: flags & SINGLE_THREADED != 0,
        ..Poller::default()
    };
    // SAFETY: as the caller says.
    let made =
        unsafe { channel::create_cq_with(context, cqe, init.cq_context, init.channel, vector, poller) }?;
    Ok(made.cast())
}

pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut abi::Context,
    init: *mut abi::CqInitAttrEx,
) -> *mut abi::CqEx {
    // SAFETY: as the caller says.
    made(unsafe { create(context, &*init) })
}

/// Takes the next completion, to be read in parts.
///
/// # Safety
/// A queue that was made for that, by the thread that is between start and end.
unsafe fn take(queue: *mut abi::CqEx) -> c_int {
    // SAFETY: as the caller says.
    let own = unsafe { CqObject::of(queue.cast()) };
    let Some((wc, came)) = own.queue.poll_with_time() else {
        return libc::ENOENT;
    };
    let wc = own.shown(&wc);
    // SAFETY: the program's own structure, whose two fields only the polling thread writes; and the completion is this
    // thread's.
    unsafe {
        (*queue).wr_id = wc.wr_id;
        (*queue).status = wc.status;
        *own.poller.current.get() = Some((wc, came));
    }
    0
}

unsafe extern "C" fn start_poll(queue: *mut abi::CqEx, attr: *const abi::PollCqAttr) -> c_int {
    // SAFETY: null or a structure of the caller's.
    if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    // SAFETY: a queue that was made, says the caller.
    let poller = unsafe { &CqObject::of(queue.cast()).poller };
    while !poller.single_threaded && poller.taken.swap(true, Ordering::Acquire) {
        std::thread::yield_now();
    }
    // SAFETY: as the caller says.
    let taken = unsafe { take(queue) };
    if taken != 0 {
        // Without a completion there is nothing to end.
        // SAFETY: as the caller says.
        unsafe { end_poll(queue) };
    }
    taken
}

unsafe extern "C" fn next_poll(queue: *mut abi::CqEx) -> c_int {
    // SAFETY: as the caller says.
    unsafe { take(queue) }
}

unsafe extern "C" fn end_poll(queue: *mut abi::CqEx) {
    // SAFETY: a queue that was made, says the caller.
    unsafe { CqObject::of(queue.cast()) }
        .poller
        .taken
        .store(false, Ordering::Release);
}

/// Returns a part of the completion that is being read; a default value if there is none.
///
/// # Safety
/// A queue that was made for that, by the thread that is between start and end.
unsafe fn read<T: Default>(queue: *mut abi::CqEx, part: impl FnOnce(&abi::Wc, Instant) -> T) -> T {
    // SAFETY: as the caller says.
    let current = unsafe { &*CqObject::of(queue.cast()).poller.current.get() };
    current
        .as_ref()
        .map_or_else(T::default, |(wc, came)| part(wc, *came))
}

macro_rules! readers {
    ($($name:ident -> $type:ty = $field:ident;)*) => {
        $(
            unsafe extern "C" fn $name(queue: *mut abi::CqEx) -> $type {
                // SAFETY: as the caller says.
                unsafe { read(queue, |wc, _| <$type>::from(wc.$field)) }
            }
        )*
    };
}

readers! {
    read_opcode -> u32 = opcode;
    read_vendor_err -> u32 = vendor_err;
    read_byte_len -> u32 = byte_len;
    read_imm_data -> u32 = imm_data;
    read_qp_num -> u32 = qp_num;
    read_src_qp -> u32 = src_qp;
    read_wc_flags -> u32 = wc_flags;
    read_slid -> u32 = slid;
    read_sl -> u8 = sl;
    read_dlid_path_bits -> u8 = dlid_path_bits;
}

unsafe extern "C" fn read_completion_ts(queue: *mut abi::CqEx) -> u64 {
    // SAFETY: as the caller says.
    unsafe { read(queue, |_, came| clock_at(libc::CLOCK_MONOTONIC, came)) }
}

unsafe extern "C" fn read_completion_wallclock_ns(queue: *mut abi::CqEx) -> u64 {
    // SAFETY: as the caller says.
    unsafe { read(queue, |_, came| clock_at(libc::CLOCK_REALTIME, came)) }
}

/// Returns the time of a system clock, in nanoseconds.
fn clock_ns(clock: libc::clockid_t) -> u64 {
    // SAFETY: numbers alone, all of which may be zero.
    let mut now: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: a place of this function's. It cannot fail: these clocks are always there.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Returns the time that a clock showed at a moment. The monotonic clock is read once, so that moments keep their order and
/// distance; the other one may be set, so its time is derived from now.
fn clock_at(clock: libc::clockid_t, moment: Instant) -> u64 {
    static MONOTONIC: OnceLock<(Instant, u64)> = OnceLock::new();
    let both = || (Instant::now(), clock_ns(clock));
    let (at, shown_ns) = match clock {
        libc::CLOCK_MONOTONIC => *MONOTONIC.get_or_init(both),
        _ => both(),
    };
    let ns = |later: Instant, earlier: Instant| later.saturating_duration_since(earlier).as_nanos() as u64;
    (shown_ns + ns(moment, at)).saturating_sub(ns(at, moment))
}

/// Returns the time of the device's clock.
pub(crate) unsafe extern "C" fn query_rt_values(_: *mut abi::Context, values: *mut abi::ValuesEx) -> c_int {
    // SAFETY: a structure of the caller's.
    let values = unsafe { &mut *values };
    let asked = std::mem::take(&mut values.comp_mask);
    if asked & !abi::cq_ex::RAW_CLOCK != 0 {
        return libc::EINVAL;
    }
    if asked & abi::cq_ex::RAW_CLOCK != 0 {
        // In ticks, as on other devices.
        values.raw_clock = [0, clock_at(libc::CLOCK_MONOTONIC, Instant::now()).cast_signed()];
        values.comp_mask = abi::cq_ex::RAW_CLOCK;
    }
    0
}

pub(crate) unsafe extern "C" fn modify_cq(queue: *mut abi::Cq, attr: *mut abi::ModifyCqAttr) -> c_int {
    // SAFETY: a queue that was made, and a structure of the caller's.
    let (own, attr) = unsafe { (CqObject::of(queue), &*attr) };
    if attr.attr_mask != abi::cq_ex::MODERATE {
        return libc::EINVAL;
    }
    let moderation = Moderation {
        count: attr.cq_count,
        period_us: attr.cq_period,
    };
    status(
        own.queue
            .moderate(ModerationPolicy::Fixed(moderation))
            .map_err(|_| libc::EOPNOTSUPP),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_resize_cq(queue: *mut abi::Cq, cqe: c_int) -> c_int {
    if !(1..=CQE_MAX).contains(&cqe) {
        return libc::EINVAL;
    }
    // SAFETY: a queue that was made, says the caller.
    let own = unsafe { CqObject::of(queue) };
    let resized = own
        .queue
        .resize(cqe.cast_unsigned())
        .map_err(|error| match error {
            ResizeError::TooShort | ResizeError::NoRoom | ResizeError::Pooled => libc::EINVAL,
            ResizeError::Io(error) => error.raw_os_error().unwrap_or(libc::EIO),
        });
    if resized.is_ok() {
        // SAFETY: the program's own structure, of which a program resizes one at a time.
        unsafe { (&raw mut (*queue).cqe).write(cqe) };
    }
    status(resized)
}
