//! What uses an object: it is not destroyed before, as the manual has it (`EBUSY`).

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How many use an object. A clone counts the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses(Arc<AtomicUsize>);

/// One that uses an object, until it is dropped.
#[derive(Debug)]
pub(crate) struct Use(Arc<AtomicUsize>);

impl Uses {
    pub(crate) fn begin(&self) -> Use {
        self.0.fetch_add(1, Ordering::Relaxed);
        Use(self.0.clone())
    }

    /// An error while the object is used.
    pub(crate) fn check_unused(&self) -> Result<(), c_int> {
        match self.0.load(Ordering::Acquire) {
            0 => Ok(()),
            _ => Err(libc::EBUSY),
        }
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}
