//! Pages of a region, as the threads of this process see them.
//!
//! A region is a file in memory with two mappings. The *alias* has all of it, always: devices and the protocol read and write there. A
//! [`View`] is what the program sees: each page of it is in one of a few states ([`PageState`]), and a touch that the state does not allow is
//! a [`Fault`](userfault::Fault), which a thread reads. [`PageBatch`] collects changes of state of any group of pages and carries them out with
//! few system calls.
//!
//! [`userfault`] has the system calls. Where they are missing, `mprotect` serves, which is slower ([`Engine`]).

mod batch;
mod costs;
mod plan;
mod table;
pub mod userfault;
mod view;

#[cfg(test)]
mod tests;

pub use batch::{Applied, PageBatch};
pub use costs::{Costs, Price};
pub use plan::{Call, Changed, plan};
pub use table::PageState;
pub use view::{Change, Engine, View, Wanted};

pub use crate::Access;

use rdmux_memory::mapping::PlaceError;
use rustix::io::Errno;

/// Reason why pages of a region cannot be had, or not changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user may not use userfaultfd(2), or not for the faults of system calls.
    #[error(
        "this user may not catch page faults: open /dev/userfaultfd to it by a udev rule, or set vm.unprivileged_userfaultfd=1"
    )]
    NotPermitted,
    /// The kernel lacks a part of userfaultfd(2).
    #[error("this kernel lacks {0}")]
    Lacks(&'static str),
    /// Another userfaultfd has the addresses.
    #[error("page faults at {0:#x} are already caught by another userfaultfd")]
    Busy(u64),
    /// The file has no frame for the page at an address, so it cannot be installed.
    #[error("the page at {0:#x} has no frame in its file")]
    NoFrame(u64),
    /// A fault outside of the view.
    #[error("a fault at {0:#x}, which is outside of the region")]
    Outside(u64),
    /// The region has more pages than a view can have.
    #[error("the region is too large: it may have 2^32 - 1 pages")]
    TooLarge,
    /// The memory cannot be mapped.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The system refuses a call.
    #[error("{call} failed: {errno}")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// The system's reason.
        errno: Errno,
    },
}

impl Error {
    fn of(call: &'static str, error: &std::io::Error) -> Error {
        let errno = Errno::from_io_error(error).unwrap_or(Errno::INVAL);
        Error::Call { call, errno }
    }
}
