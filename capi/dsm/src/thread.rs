//! Threads, and what they wait for.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, TryLockError};

use rdmux_dsm::Session;
use rdmux_dsm::sync::{self, Call, Mode, NodeId, Operation, Success};

use crate::failure::{Failure, keep, status};
use crate::objects::{find, give, remove};
use crate::session::outlived;

/// A thread, with a count of its session.
pub(crate) struct Thread {
    /// Held during a call.
    state: Mutex<State>,
    session: Arc<Session>,
}

struct State {
    /// Dropped before the session.
    inner: rdmux_dsm::Thread<'static>,
    /// Locks that it may have, and how it took them. Those whose home has left are among them until it unlocks them.
    locks: BTreeMap<u64, Mode>,
}

impl State {
    fn call(&mut self, call: Call) -> Result<Success, Failure> {
        Ok(self.inner.call(call)?)
    }

    fn lock(&mut self, object: u64, mode: Mode) -> Result<c_int, Failure> {
        let success = self.call(Call::Lock { object, mode })?;
        self.locks.insert(object, mode);
        Ok(match success {
            Success::Locked { recovered } => remark(recovered),
            _ => 0,
        })
    }

    fn unlock(&mut self, object: u64) -> Result<(), Failure> {
        let mode = self.locks.remove(&object);
        let mode = mode.ok_or_else(|| rdmux_dsm::Error::Call(sync::Failure::NotHeld))?;
        self.call(Call::Unlock { object, mode })?;
        Ok(())
    }
}

impl Drop for State {
    fn drop(&mut self) {
        while let Some((object, _)) = self.locks.first_key_value() {
            // If the lock's home has left, there is no lock.
            let _ = self.unlock(*object);
        }
    }
}

impl Thread {
    fn begin(session: Arc<Session>, number: u16) -> Result<Thread, Failure> {
        // SAFETY: the thread is in this structure, whose count of the session is dropped after it.
        let inner = unsafe { outlived(&session) }.thread(number)?;
        let locks = BTreeMap::new();
        Ok(Thread {
            state: Mutex::new(State { inner, locks }),
            session,
        })
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

/// Returns what a call returns that has taken a lock.
fn remark(recovered: Option<NodeId>) -> c_int {
    recovered.map_or(0, |node| keep(Failure::recovered(node.number())))
}

/// Carries out a call of a thread.
fn with(thread: *mut Thread, call: impl FnOnce(&mut State) -> Result<c_int, Failure>) -> c_int {
    status(|| {
        let thread = find(thread)?;
        let mut state = match thread.state.try_lock() {
            Ok(state) => state,
            // The panic has ended a call; the state machine has the thread's state.
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let text = "another thread of the program is in a call of this one: begin a thread for each";
                return Err(Failure::new(libc::EBUSY, text));
            }
        };
        call(&mut state)
    })
}

/// Carries out a call that ends with a value, and gives it to the program unless it has no place for it.
///
/// # Safety
/// `result` is null, or the program may write through it.
unsafe fn with_value<R>(
    thread: *mut Thread,
    call: impl FnOnce() -> Result<Call, Failure>,
    result: *mut R,
    of_bits: impl FnOnce(u64) -> R,
) -> c_int {
    with(thread, |state| {
        if let (Success::Value(bits), false) = (state.call(call()?)?, result.is_null()) {
            // SAFETY: not null, so the program may write there, says the caller.
            unsafe { result.write(of_bits(bits)) };
        }
        Ok(0)
    })
}

/// Returns the number of the parties.
fn count(parties: u32) -> Result<NonZeroU32, Failure> {
    NonZeroU32::new(parties).ok_or_else(|| Failure::invalid("a barrier has at least one party"))
}

/// Returns a reduction, of an operation among those of the value's type: its sum, minimum and maximum.
fn reduction(
    object: u64,
    parties: u32,
    operation: c_uint,
    operations: [Operation; 3],
    value: u64,
) -> Result<Call, Failure> {
    let found = operation
        .checked_sub(1)
        .and_then(|at| operations.get(at as usize));
    let operation =
        found.ok_or_else(|| Failure::invalid(format!("{operation} is no enum rdmux_dsm_operation")));
    Ok(Call::Reduce {
        object,
        parties: count(parties)?,
        operation: *operation?,
        value,
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_thread_begin(
    session: *mut Session,
    number: u16,
    thread: *mut *mut Thread,
) -> c_int {
    let make = || Thread::begin(find(session)?, number);
    // SAFETY: the program gives a null pointer, or one for a pointer.
    status(|| unsafe { give(thread, make) }.map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_thread_end(thread: *mut Thread) -> c_int {
    status(|| {
        drop(remove(thread)?);
        Ok(0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_lock(thread: *mut Thread, lock: u64) -> c_int {
    with(thread, |state| state.lock(lock, Mode::Exclusive))
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_lock_shared(thread: *mut Thread, lock: u64) -> c_int {
    with(thread, |state| state.lock(lock, Mode::Shared))
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_unlock(thread: *mut Thread, lock: u64) -> c_int {
    with(thread, |state| state.unlock(lock).map(|()| 0))
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_wait(thread: *mut Thread, condition: u64, lock: u64) -> c_int {
    with(thread, |state| {
        match state.call(Call::Wait { condition, lock })? {
            Success::Woken { gone: Some(node), .. } => {
                Err(rdmux_dsm::Error::from(sync::Failure::Gone(node)).into())
            }
            Success::Woken { recovered, .. } => Ok(remark(recovered)),
            _ => Ok(0),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_signal(thread: *mut Thread, condition: u64) -> c_int {
    with(thread, |state| state.call(Call::Signal { condition }).map(|_| 0))
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_broadcast(thread: *mut Thread, condition: u64) -> c_int {
    with(thread, |state| {
        state.call(Call::Broadcast { condition }).map(|_| 0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_barrier(thread: *mut Thread, barrier: u64, parties: u32) -> c_int {
    with(thread, |state| {
        let parties = count(parties)?;
        let object = barrier;
        state.call(Call::Barrier { object, parties }).map(|_| 0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_reduce_f64(
    thread: *mut Thread,
    barrier: u64,
    parties: u32,
    operation: c_uint,
    value: f64,
    result: *mut f64,
) -> c_int {
    const OF_TYPE: [Operation; 3] = [Operation::SumF64, Operation::MinF64, Operation::MaxF64];
    let call = || reduction(barrier, parties, operation, OF_TYPE, value.to_bits());
    // SAFETY: the program gives a null pointer, or one for a number.
    unsafe { with_value(thread, call, result, f64::from_bits) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_reduce_u64(
    thread: *mut Thread,
    barrier: u64,
    parties: u32,
    operation: c_uint,
    value: u64,
    result: *mut u64,
) -> c_int {
    const OF_TYPE: [Operation; 3] = [Operation::SumU64, Operation::MinU64, Operation::MaxU64];
    let call = || reduction(barrier, parties, operation, OF_TYPE, value);
    // SAFETY: the program gives a null pointer, or one for a number.
    unsafe { with_value(thread, call, result, |bits| bits) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_reduce_i64(
    thread: *mut Thread,
    barrier: u64,
    parties: u32,
    operation: c_uint,
    value: i64,
    result: *mut i64,
) -> c_int {
    const OF_TYPE: [Operation; 3] = [Operation::SumI64, Operation::MinI64, Operation::MaxI64];
    let call = || reduction(barrier, parties, operation, OF_TYPE, value.cast_unsigned());
    // SAFETY: the program gives a null pointer, or one for a number.
    unsafe { with_value(thread, call, result, u64::cast_signed) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_fetch_add(
    thread: *mut Thread,
    word: u64,
    value: u64,
    before: *mut u64,
) -> c_int {
    let object = word;
    let call = || Ok(Call::FetchAdd { object, value });
    // SAFETY: the program gives a null pointer, or one for a number.
    unsafe { with_value(thread, call, before, |bits| bits) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_compare_swap(
    thread: *mut Thread,
    word: u64,
    expected: u64,
    value: u64,
    before: *mut u64,
) -> c_int {
    let (object, new) = (word, value);
    let call = || {
        Ok(Call::CompareSwap {
            object,
            expected,
            new,
        })
    };
    // SAFETY: the program gives a null pointer, or one for a number.
    unsafe { with_value(thread, call, before, |bits| bits) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_load(thread: *mut Thread, word: u64, value: *mut u64) -> c_int {
    let call = || Ok(Call::Load { object: word });
    // SAFETY: the program gives a null pointer, or one for a number.
    unsafe { with_value(thread, call, value, |bits| bits) }
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_release(thread: *mut Thread) -> c_int {
    with(thread, |state| {
        state.inner.release()?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_acquire(thread: *mut Thread) -> c_int {
    with(thread, |state| {
        state.inner.acquire()?;
        Ok(0)
    })
}
