//! Children of fork(2), which get private copies of the memory that has moved into files.
#![allow(unsafe_code, reason = "handlers of pthread_atfork(3)")]

use std::cell::Cell;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rdmux_rnic::NotShared;
use rdmux_rnic::sync::MutexGuard;
use rustix::pipe::{PipeFlags, pipe_with};

use super::conditions::Guard;
use super::{REGISTRY, Registry};

/// What a thread that forks has from before to after: no pages move meanwhile.
struct Forking {
    registry: MutexGuard<'static, Registry>,
    /// The end that the parent reads, and the end that the child closes when it has its copies.
    pipe: Option<(OwnedFd, OwnedFd)>,
}

thread_local! {
    static FORKING: Cell<Option<Forking>> = const { Cell::new(None) };
}

/// Has children of this process get private copies from now on.
pub(super) fn follow() -> Result<(), NotShared> {
    static FOLLOWED: OnceLock<bool> = OnceLock::new();
    let followed = FOLLOWED.get_or_init(|| {
        // SAFETY: the handlers are functions of this module, and the C library forgets them when it unloads the library.
        unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) == 0 }
    });
    followed.then_some(()).ok_or(NotShared::NoResources)
}

extern "C" fn before() {
    let registry = REGISTRY.lock();
    let pipe = if registry.conversions.is_empty() {
        None
    } else {
        pipe_with(PipeFlags::CLOEXEC).ok()
    };
    FORKING.set(Some(Forking { registry, pipe }));
}

extern "C" fn parent() {
    let Some(Forking { registry, pipe }) = FORKING.take() else {
        return;
    };
    if let Some((read, write)) = pipe {
        drop(write);
        // The child has its copies, or has ended, or there is none.
        let _ = std::fs::File::from(read).read_to_end(&mut Vec::new());
    }
    drop(registry);
}

extern "C" fn child() {
    let Some(Forking { mut registry, pipe }) = FORKING.take() else {
        return;
    };
    for shared in registry.conversions.drain(..) {
        // A child that gets no memory for its copies shares the pages: fork(2) cannot fail any more.
        let _ = shared.move_out_all(Guard::Alone);
        // Its regions may still have it.
        std::mem::forget(shared);
    }
    // Memory that the child registers is its own. Nothing of the parent's is freed: a lock in it may be held by a thread that the child lacks.
    std::mem::forget(std::mem::take(&mut registry.registered));
    drop((registry, pipe));
}
