//! Work requests by functions (`ibv_wr_*`): built one after another between start and complete, and posted together.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};

use rdmux_verbs::{
    INLINE_BYTES_MAX, LKey, Operation, Placement, RKey, SGE_MAX, Selectivity, SendFlags, SendRequest, Sge,
    SgeList, Srqn, Target,
};

use crate::address::AhObject;
use crate::queue_pair::{QpObject, errno_of_post, sges};
use crate::{abi, queue_pair};

/// Requests being built for a queue pair. From start to complete they belong to one thread; others wait.
#[derive(Default)]
pub(crate) struct Builder {
    taken: AtomicBool,
    batch: UnsafeCell<Batch>,
}

#[derive(Default)]
struct Batch {
    requests: Vec<SendRequest>,
    /// First error; then none of the batch is posted.
    failed: Option<c_int>,
}

// SAFETY: the batch is touched between `start` and its end alone, by the thread that took it.
unsafe impl Sync for Builder {}

/// Gives a queue pair that was made for them its functions.
pub(crate) fn give(qp: &mut abi::QpEx) {
    qp.wr_atomic_cmp_swp = cmp_swp as *const c_void;
    qp.wr_atomic_fetch_add = fetch_add as *const c_void;
    qp.wr_bind_mw = bind_mw as *const c_void;
    qp.wr_local_inv = local_inv as *const c_void;
    qp.wr_rdma_read = rdma_read as *const c_void;
    qp.wr_rdma_write = rdma_write as *const c_void;
    qp.wr_rdma_write_imm = rdma_write_imm as *const c_void;
    qp.wr_send = send as *const c_void;
    qp.wr_send_imm = send_imm as *const c_void;
    qp.wr_send_inv = send_inv as *const c_void;
    qp.wr_set_ud_addr = set_ud_addr as *const c_void;
    qp.wr_set_xrc_srqn = set_xrc_srqn as *const c_void;
    qp.wr_set_inline_data = set_inline_data as *const c_void;
    qp.wr_set_inline_data_list = set_inline_data_list as *const c_void;
    qp.wr_set_sge = set_sge as *const c_void;
    qp.wr_set_sge_list = set_sge_list as *const c_void;
    qp.wr_start = Some(start);
    qp.wr_complete = Some(complete);
    qp.wr_abort = Some(abort);
    qp.wr_atomic_write = Some(atomic_write);
    qp.wr_flush = Some(flush);
}

/// The operations that [`give`] has functions for, as bits of `enum ibv_qp_create_send_ops_flags`.
pub(crate) const OFFERED: u64 = {
    let (write, write_imm, send, send_imm, read, cmp_swp, fetch_add, local_inv) = (0, 1, 2, 3, 4, 5, 6, 7);
    let (bind_mw, send_inv) = (8, 9);
    1 << write
        | 1 << write_imm
        | 1 << send
        | 1 << send_imm
        | 1 << read
        | 1 << cmp_swp
        | 1 << fetch_add
        | 1 << local_inv
        | 1 << bind_mw
        | 1 << send_inv
        | abi::qp_ex::FLUSH
        | abi::qp_ex::ATOMIC_WRITE
};

/// Returns the batch of a queue pair.
///
/// # Safety
/// The caller is between start and complete, as the manual asks of a program.
unsafe fn batch<'a>(qp: *mut abi::QpEx) -> &'a mut Batch {
    // SAFETY: a queue pair that was made; the batch is this thread's.
    unsafe { &mut *QpObject::of(qp.cast()).builder.batch.get() }
}

/// Begins a request.
///
/// # Safety
/// As [`batch`].
unsafe fn begin(qp: *mut abi::QpEx, operation: Operation) {
    // SAFETY: as the caller says.
    let (batch, wr_id, wr_flags, all) = unsafe {
        (
            batch(qp),
            (*qp).wr_id,
            (*qp).wr_flags,
            QpObject::of(qp.cast()).signal_all,
        )
    };
    let mut flags = SendFlags::from_bits_truncate(wr_flags);
    flags.set(SendFlags::SIGNALED, all || flags.contains(SendFlags::SIGNALED));
    batch.requests.push(SendRequest {
        wr_id,
        operation,
        sges: SgeList::EMPTY,
        flags,
        to: Target::Connected,
    });
}

/// Changes the request that was begun last.
///
/// # Safety
/// As [`batch`].
unsafe fn set(qp: *mut abi::QpEx, set: impl FnOnce(&mut SendRequest) -> Result<(), c_int>) {
    // SAFETY: as the caller says.
    let batch = unsafe { batch(qp) };
    let done = match batch.requests.last_mut() {
        Some(request) => set(request),
        None => Err(libc::EINVAL),
    };
    batch.failed = batch.failed.or(done.err());
}

unsafe extern "C" fn start(qp: *mut abi::QpEx) {
    // SAFETY: a queue pair that was made, says the caller.
    let builder = unsafe { &QpObject::of(qp.cast()).builder };
    while builder.taken.swap(true, Ordering::Acquire) {
        std::thread::yield_now();
    }
}

/// Ends the batch.
///
/// # Safety
/// As [`batch`].
unsafe fn end(qp: *mut abi::QpEx) {
    // SAFETY: as the caller says.
    let batch = unsafe { batch(qp) };
    batch.requests.clear();
    batch.failed = None;
    // SAFETY: a queue pair that was made, says the caller.
    unsafe { &QpObject::of(qp.cast()).builder }
        .taken
        .store(false, Ordering::Release);
}

unsafe extern "C" fn abort(qp: *mut abi::QpEx) {
    // SAFETY: as the caller says.
    unsafe { end(qp) };
}

unsafe extern "C" fn complete(qp: *mut abi::QpEx) -> c_int {
    // SAFETY: as the caller says.
    let (batch, own) = unsafe { (batch(qp), QpObject::of(qp.cast())) };
    let posted = match batch.failed {
        Some(errno) => Err(errno),
        None => post(own, &mut batch.requests),
    };
    // SAFETY: as the caller says.
    unsafe { end(qp) };
    crate::status(posted)
}

fn post(own: &QpObject, requests: &mut Vec<SendRequest>) -> Result<(), c_int> {
    if requests.len() == 1
        && let Some(only) = requests.pop()
    {
        return own.pair.post_send(only).map_err(|error| errno_of_post(&error));
    }
    // Refuses a batch as a whole if the queue has no room for it. Another thread's `ibv_post_send` in between may still take
    // the room, and a request that is invalid by itself is found only as it is posted: then the requests before it are posted,
    // and this fails.
    let outstanding = own.pair.query().map_or(0, |info| info.send_outstanding);
    if outstanding + requests.len() > own.cap.max_send_wr as usize {
        return Err(libc::ENOMEM);
    }
    own.pair
        .post_send_list(requests.drain(..))
        .map_err(|error| errno_of_post(&error.source))
}

unsafe extern "C" fn send(qp: *mut abi::QpEx) {
    // SAFETY: as the caller says.
    unsafe { begin(qp, Operation::Send { imm: None }) };
}

unsafe extern "C" fn send_imm(qp: *mut abi::QpEx, imm: u32) {
    let imm = Some(u32::from_be(imm));
    // SAFETY: as the caller says.
    unsafe { begin(qp, Operation::Send { imm }) };
}

unsafe extern "C" fn send_inv(qp: *mut abi::QpEx, rkey: u32) {
    // SAFETY: as the caller says.
    unsafe { begin(qp, Operation::SendInvalidate { rkey: RKey(rkey) }) };
}

unsafe extern "C" fn local_inv(qp: *mut abi::QpEx, rkey: u32) {
    // SAFETY: as the caller says.
    unsafe { begin(qp, Operation::LocalInvalidate { rkey: RKey(rkey) }) };
}

unsafe extern "C" fn bind_mw(qp: *mut abi::QpEx, mw: *mut abi::Mw, rkey: u32, info: *const abi::MwBindInfo) {
    // SAFETY: as the caller says.
    let bound = unsafe {
        queue_pair::bind(&abi::BindMwWr {
            mw,
            rkey,
            bind_info: *info,
        })
    };
    let (operation, failed) = match bound {
        Ok(operation) => (operation, None),
        Err(errno) => (Operation::Send { imm: None }, Some(errno)),
    };
    // SAFETY: as the caller says.
    unsafe {
        begin(qp, operation);
        set(qp, |_| failed.map_or(Ok(()), Err));
    }
}

unsafe extern "C" fn rdma_write(qp: *mut abi::QpEx, rkey: u32, va: u64) {
    let (rkey, imm) = (RKey(rkey), None);
    // SAFETY: as the caller says.
    unsafe { begin(qp, Operation::Write { va, rkey, imm }) };
}

unsafe extern "C" fn rdma_write_imm(qp: *mut abi::QpEx, rkey: u32, va: u64, imm: u32) {
    let (rkey, imm) = (RKey(rkey), Some(u32::from_be(imm)));
    // SAFETY: as the caller says.
    unsafe { begin(qp, Operation::Write { va, rkey, imm }) };
}

unsafe extern "C" fn rdma_read(qp: *mut abi::QpEx, rkey: u32, va: u64) {
    let rkey = RKey(rkey);
    // SAFETY: as the caller says.
    unsafe { begin(qp, Operation::Read { va, rkey }) };
}

unsafe extern "C" fn cmp_swp(qp: *mut abi::QpEx, rkey: u32, va: u64, compare: u64, swap: u64) {
    let rkey = RKey(rkey);
    let operation = Operation::CompareSwap {
        va,
        rkey,
        compare,
        swap,
    };
    // SAFETY: as the caller says.
    unsafe { begin(qp, operation) };
}

unsafe extern "C" fn fetch_add(qp: *mut abi::QpEx, rkey: u32, va: u64, add: u64) {
    let rkey = RKey(rkey);
    // SAFETY: as the caller says.
    unsafe { begin(qp, Operation::FetchAdd { va, rkey, add }) };
}

unsafe extern "C" fn atomic_write(qp: *mut abi::QpEx, rkey: u32, va: u64, bytes: *const c_void) {
    // SAFETY: eight bytes, says the manual, which are taken at once.
    let bytes: [u8; 8] = unsafe { bytes.cast::<[u8; 8]>().read_unaligned() };
    let rkey = RKey(rkey);
    // SAFETY: as the caller says.
    unsafe {
        begin(qp, Operation::AtomicWrite { va, rkey });
        set(qp, |request| {
            request.sges = SgeList::inline(&bytes);
            Ok(())
        });
    }
}

unsafe extern "C" fn flush(
    qp: *mut abi::QpEx,
    rkey: u32,
    va: u64,
    length: usize,
    placement: u8,
    selectivity: u8,
) {
    let selectivity = match selectivity {
        0 => Some(Selectivity::Range),
        1 => Some(Selectivity::MemoryRegion),
        _ => None,
    };
    // A FLUSH gives its length in 32 bits (IBTA Vol 1, 9.4.8): a longer one would promise more than it does.
    let length_of = u32::try_from(length).ok();
    let operation = Operation::Flush {
        va,
        rkey: RKey(rkey),
        length: length_of.unwrap_or(0),
        placement: Placement::from_bits_truncate(placement),
        selectivity: selectivity.unwrap_or(Selectivity::Range),
    };
    // SAFETY: as the caller says.
    unsafe {
        begin(qp, operation);
        set(qp, |_| selectivity.and(length_of).map(|_| ()).ok_or(libc::EINVAL));
    }
}

unsafe extern "C" fn set_sge(qp: *mut abi::QpEx, lkey: u32, address: u64, length: u32) {
    // SAFETY: as the caller says.
    unsafe {
        set(qp, |request| {
            request.sges = Sge::new(address, length, LKey(lkey)).into();
            Ok(())
        });
    }
}

unsafe extern "C" fn set_sge_list(qp: *mut abi::QpEx, count: usize, list: *const abi::Sge) {
    // SAFETY: as the caller says.
    unsafe {
        set(qp, |request| {
            if count > SGE_MAX {
                return Err(libc::EINVAL);
            }
            request.sges = if count == 0 {
                SgeList::EMPTY
            } else {
                sges(slice::from_raw_parts(list, count))
            };
            Ok(())
        });
    }
}

unsafe extern "C" fn set_inline_data(qp: *mut abi::QpEx, address: *const u8, length: usize) {
    // SAFETY: as the caller says.
    unsafe {
        set(qp, |request| {
            if length > INLINE_BYTES_MAX {
                return Err(libc::EINVAL);
            }
            request.sges = SgeList::inline(if length == 0 {
                &[]
            } else {
                slice::from_raw_parts(address, length)
            });
            Ok(())
        });
    }
}

unsafe extern "C" fn set_inline_data_list(qp: *mut abi::QpEx, count: usize, list: *const abi::DataBuf) {
    // SAFETY: as the caller says.
    unsafe {
        set(qp, |request| {
            let mut bytes = Vec::new();
            for i in 0..count {
                let piece = *list.add(i);
                if piece.length > INLINE_BYTES_MAX - bytes.len() {
                    return Err(libc::EINVAL);
                }
                if piece.length > 0 {
                    bytes.extend_from_slice(slice::from_raw_parts(piece.addr.cast::<u8>(), piece.length));
                }
            }
            request.sges = SgeList::inline(&bytes);
            Ok(())
        });
    }
}

unsafe extern "C" fn set_ud_addr(qp: *mut abi::QpEx, handle: *mut abi::Ah, qpn: u32, qkey: u32) {
    // SAFETY: as the caller says.
    unsafe {
        set(qp, |request| {
            request.to = AhObject::of(handle)?.target(qpn, qkey)?;
            Ok(())
        });
    }
}

unsafe extern "C" fn set_xrc_srqn(qp: *mut abi::QpEx, number: u32) {
    // SAFETY: as the caller says.
    unsafe {
        set(qp, |request| {
            request.to = Target::Srq(Srqn(number));
            Ok(())
        });
    }
}
