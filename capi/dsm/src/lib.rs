//! `librdmux-dsm.so`: the distributed shared memory for programs in C, as `include/rdmux_dsm.h` declares it and the man pages describe it.
//!
//! It adds nothing to [`rdmux_dsm`]: each function finds the objects that the program names ([`objects`]), checks the other arguments, and
//! calls the method of the same name. A failure is a negative number of `errno.h`, and a line that the thread can ask for ([`failure`]). A panic,
//! which only a defect causes, ends the call in the same way: it never unwinds into C.
#![allow(unsafe_code, reason = "the C interface")]

mod failure;
mod heap;
mod objects;
mod region;
mod session;
mod thread;
