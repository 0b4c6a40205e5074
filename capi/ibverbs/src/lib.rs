//! `libibverbs.so.1` over rdmux: the calls of programs that are linked with the system's library, with the same names, versions
//! and structures (rdma-core 44 to 65), on the RNIC in user space. It does not get in the way of the system's library: programs
//! find it first only where `rdmux run`, or `LD_LIBRARY_PATH`, says so.
//!
//! Each object that a program gets is the structure of `<infiniband/verbs.h>`, with rdmux's own state behind it. A panic ends
//! the program at the C boundary: it never unwinds into C.
#![allow(unsafe_code, reason = "the C interface")]

mod address;
mod buffer;
mod channel;
mod cm;
mod cm_thread;
mod completions;
mod context;
mod device;
mod device_memory;
mod domains;
mod events;
mod memory;
mod multicast;
mod private;
mod query;
mod queue_pair;
mod rsocket;
mod srq;
mod text;
mod udp;
mod unsupported;
mod uses;
mod versions;
mod wait;
mod watch;
mod wr;
mod xrc;

use std::ffi::c_int;
use std::io::Write;
use std::thread::JoinHandle;

use rdmux_verbs::abi;

/// Sets `errno`.
fn set_errno(errno: c_int) {
    // SAFETY: the location is this thread's own.
    unsafe { *libc::__errno_location() = errno };
}

fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

/// Returns the value of a call that makes something: the object, or a null pointer and `errno`.
fn made<T>(result: Result<*mut T, c_int>) -> *mut T {
    result.unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null_mut()
    })
}

/// Returns the value of a call that reports errors by their number: 0 or that number.
fn status(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// Returns the value of a call that reports errors by -1 and `errno`.
fn minus_one(result: Result<(), c_int>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Writes a warning to the program's standard error, if that can be written to.
fn warn(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "rdmux: {text}");
}

/// Starts a thread of the library, which takes none of the program's signals.
///
/// # Errors
/// `EAGAIN`, or any other error with which the system refuses it.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, c_int> {
    rdmux_verbs::thread::spawn(name, run).map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))
}

/// Mark by which rdmux recognises its own library where it looks for the system's.
#[unsafe(no_mangle)]
extern "C" fn rdmux_drop_in() -> c_int {
    1
}
