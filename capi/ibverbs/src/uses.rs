//! Users of an object: it is not destroyed before they are gone, as the manual prescribes (`EBUSY`).

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of users of an object. A clone has the same count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses(Arc<AtomicUsize>);

/// One use of an object, until it is dropped.
#[derive(Debug)]
pub(crate) struct Use(Arc<AtomicUsize>);

impl Uses {
    pub(crate) fn begin(&self) -> Use {
        self.0.fetch_add(1, Ordering::Relaxed);
        Use(self.0.clone())
    }

    /// Returns an error while the object is used.
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
