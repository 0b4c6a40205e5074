//! The place of a device's engine, for a thread that sleeps in a call: packets wake that thread itself. A cancelled thread runs no
//! destructors of the call's values, but those of its thread-local ones: so the place is one of these.

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::{mem, process};

use rdmux_verbs::EngineWatch;

use crate::context::ContextObject;

/// The place, and the process of the thread that has it.
struct Place {
    watch: Option<EngineWatch>,
    process: u32,
}

impl Drop for Place {
    fn drop(&mut self) {
        // The child of a fork, in a signal handler of the thread, has a copy of what belongs to its parent.
        if self.watch.is_some() && self.process != process::id() {
            mem::forget(self.watch.take());
        }
    }
}

thread_local! {
    /// A thread sleeps in one call at a time. A signal handler that leaves the call by `longjmp` leaves the place here, and the device
    /// without a watcher, until the thread sleeps again or ends.
    static PLACE: RefCell<Option<Place>> = const { RefCell::new(None) };
}

/// Something has arrived: the caller looks instead of sleeping.
pub(crate) struct Arrived;

/// Prepares a sleep in the place of a device's engine: returns the descriptor to sleep on beside the caller's own, or none if another
/// thread has the place. [`end`] gives the place back.
pub(crate) fn prepare(context: &ContextObject) -> Result<Option<RawFd>, Arrived> {
    let had = take();
    let watch = match had {
        Some(watch) if watch.serves_others() => None,
        Some(watch) => Some(watch),
        None if context.is_inherited() => None,
        None => context.device.watch(),
    };
    let Some(mut watch) = watch else { return Ok(None) };
    let sleeps = watch.prepare();
    let fd = watch.as_fd().as_raw_fd();
    let place = Place {
        watch: Some(watch),
        process: context.process(),
    };
    // A thread that has no more thread-local values, since it ends, sleeps without the place, which is dropped here.
    let kept = PLACE.try_with(|own| *own.borrow_mut() = Some(place)).is_ok();
    match sleeps {
        true => Ok(kept.then_some(fd)),
        false => Err(Arrived),
    }
}

/// Gives the place back.
pub(crate) fn end() {
    drop(take());
}

/// Takes the place out of the thread's values, if this process has it.
fn take() -> Option<EngineWatch> {
    let mut place = PLACE.try_with(|own| own.borrow_mut().take()).ok()??;
    // Dropping the place of another process forgets it.
    if place.process != process::id() {
        return None;
    }
    place.watch.take()
}
