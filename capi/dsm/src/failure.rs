//! Failures of calls, as the program sees them: a negative number, and a line of the thread that called.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use rdmux_dsm::sync::{self, THREADS_MAX};
use rdmux_dsm::{ClusterError, Error, FileError, memory};
use rdmux_key::KeyError;

/// A node has left. No error of the system means just that.
const GONE: c_int = libc::EHOSTDOWN;

/// Reason for which a call was not carried out.
#[derive(Debug)]
pub(crate) struct Failure {
    errno: c_int,
    /// The node that it is about.
    node: Option<u32>,
    text: String,
}

impl Failure {
    /// Makes a failure that is about no node.
    pub(crate) fn new(errno: c_int, text: impl Into<String>) -> Failure {
        Failure {
            errno,
            node: None,
            text: text.into(),
        }
    }

    /// Makes the failure of an argument.
    pub(crate) fn invalid(text: impl Into<String>) -> Failure {
        Failure::new(libc::EINVAL, text)
    }

    /// Makes the remark of a lock that a node had when it left.
    pub(crate) fn recovered(node: u32) -> Failure {
        Failure {
            errno: libc::EOWNERDEAD,
            node: Some(node),
            text: format!(
                "node {node} left while it had the lock: what the lock protects may be half-changed"
            ),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure {
            errno: errno_of(&error),
            node: node_of(&error),
            text: error.to_string(),
        }
    }
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Failure {
        let errno = match error {
            ClusterError::NotSet(_) => libc::ENOENT,
            ClusterError::Wrong { .. } | ClusterError::Nodes { .. } => libc::EINVAL,
        };
        Failure::new(errno, error.to_string())
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Failure {
        Failure::invalid(error.to_string())
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Failure {
        Failure::new(libc::EACCES, error.to_string())
    }
}

fn errno_of(error: &Error) -> c_int {
    match error {
        Error::Open(_) => libc::ENODEV,
        Error::Listen { .. } | Error::NoAddress { .. } => libc::EADDRNOTAVAIL,
        Error::Create(_) | Error::Register(_) | Error::Prepare(_) | Error::NoMemory { .. } => libc::ENOMEM,
        Error::Absent { .. } | Error::Missing { .. } => libc::ETIMEDOUT,
        Error::Version { .. }
        | Error::PageSize { .. }
        | Error::Differs { .. }
        | Error::OtherSettings { .. } => libc::EPROTO,
        Error::Stranger { .. } => libc::EACCES,
        Error::Gone { .. }
        | Error::Lost { .. }
        | Error::Unreleased { .. }
        | Error::Call(sync::Failure::Gone(_)) => GONE,
        Error::NoRoom { .. } => libc::ENOMEM,
        Error::Object { .. } | Error::NotAllocated { .. } | Error::NotInHeap { .. } => libc::EINVAL,
        Error::TooManyRegions | Error::Call(sync::Failure::NoRoom) => libc::ENOSPC,
        Error::FaultMode(_)
        | Error::WaitMode(_)
        | Error::Batch(_)
        | Error::Size(_)
        | Error::Unit(_)
        | Error::Homes(_)
        | Error::Untraced => libc::EINVAL,
        Error::ThreadNumber(number) if *number < THREADS_MAX => libc::EBUSY,
        Error::ThreadNumber(_) => libc::EINVAL,
        Error::Memory(memory::Error::NotPermitted) => libc::EPERM,
        Error::Memory(memory::Error::Lacks(_)) => libc::EOPNOTSUPP,
        Error::Memory(memory::Error::Call { errno, .. }) => errno.raw_os_error(),
        Error::Memory(_) => libc::ENOMEM,
        Error::Failed(_) | Error::Trace(_) => libc::EIO,
        Error::Call(sync::Failure::NotHeld) => libc::EPERM,
        Error::Call(sync::Failure::AlreadyHeld) => libc::EDEADLK,
        Error::Call(sync::Failure::Mismatch) => libc::EPROTO,
        Error::Io(error) => error.raw_os_error().unwrap_or(libc::EIO),
    }
}

fn node_of(error: &Error) -> Option<u32> {
    match error {
        Error::Absent { node, .. }
        | Error::Version { node, .. }
        | Error::Stranger { node, .. }
        | Error::PageSize { node, .. }
        | Error::Gone { node, .. }
        | Error::Differs { node, .. }
        | Error::NoRoom { node, .. }
        | Error::Unreleased { node }
        | Error::Lost { node, .. } => Some(*node),
        Error::Call(sync::Failure::Gone(node)) => Some(node.number()),
        Error::OtherSettings { .. } => Some(0),
        _ => None,
    }
}

/// The last failure of a thread.
struct Last {
    node: Option<u32>,
    text: CString,
}

thread_local! {
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Keeps a failure for the thread, and returns its number.
pub(crate) fn keep(failure: Failure) -> c_int {
    let Failure { errno, node, text } = failure;
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // In a thread that ends, there is nobody who could ask for it.
    let _ = LAST.try_with(|last| last.replace(Some(Last { node, text })));
    errno
}

/// Returns what a function of C returns for the outcome of a call: 0 or a positive remark; or the negative number of its failure, which is kept.
pub(crate) fn status(call: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    match caught(call) {
        Ok(remark) => remark,
        Err(failure) => -keep(failure),
    }
}

/// Returns the outcome of a call. A panic is a failure.
pub(crate) fn caught<R>(call: impl FnOnce() -> Result<R, Failure>) -> Result<R, Failure> {
    // Objects are behind locks that go on after a panic, and nothing else of a call is used after one.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = format!("a defect of rdmux, please report it: {}", text_of(&*panic));
        Err(Failure::new(libc::ENOTRECOVERABLE, text))
    })
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let of_format = panic.downcast_ref::<String>().map(String::as_str);
    let literal = panic.downcast_ref::<&str>().copied();
    of_format.or(literal).unwrap_or("a panic")
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_error() -> *const c_char {
    // The string stays where it is until it is replaced.
    let text = LAST.try_with(|last| last.borrow().as_ref().map(|last| last.text.as_ptr()));
    text.ok().flatten().unwrap_or(c"".as_ptr())
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_error_node() -> c_int {
    let node = LAST.try_with(|last| last.borrow().as_ref()?.node);
    node.ok()
        .flatten()
        .and_then(|node| c_int::try_from(node).ok())
        .unwrap_or(-1)
}
