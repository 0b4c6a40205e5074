//! `libibverbs.so.1` over rdmux: what programs call that are linked with the system's, with the same names, versions and structures
//! (rdma-core 44 to 65), on the RNIC in user space. Nothing of it is in the way of the system's library: it is found first only where
//! `rdmux run`, or `LD_LIBRARY_PATH`, says so.
//!
//! Each object that a program gets is the structure of `<infiniband/verbs.h>`, with what rdmux has behind it. A panic ends the program
//! at the edge: it never unwinds into C.
#![allow(unsafe_code, reason = "the C interface")]

mod address;
mod buffer;
mod channel;
mod cm;
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

/// What a call that makes something gives back: the object, or a null pointer and `errno`.
fn made<T>(result: Result<*mut T, c_int>) -> *mut T {
    result.unwrap_or_else(|errno| {
        set_errno(errno);
        std::ptr::null_mut()
    })
}

/// What a call gives back that tells errors by their number: 0 or that number.
fn status(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// What a call gives back that tells errors by -1 and `errno`.
fn minus_one(result: Result<(), c_int>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// Tells whoever reads the program's output, if that can be written to.
fn warn(text: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "rdmux: {text}");
}

/// Starts a thread of the library's, which takes none of the program's signals.
///
/// # Errors
/// `EAGAIN`, or what else the system refuses it with.
fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, c_int> {
    rdmux_verbs::thread::spawn(name, run).map_err(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))
}

/// A mark by which rdmux knows its own library where it looks for the system's.
#[unsafe(no_mangle)]
extern "C" fn rdmux_drop_in() -> c_int {
    1
}
