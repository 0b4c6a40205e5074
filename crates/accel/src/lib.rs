//! Accelerators: [`Core`], which does the work, and [`Window`], through which a host gives it data and takes results.
//!
//! A window is a range of a namespace's blocks: a host writes a header ([`rdmux_wire::accel::Header`]) and data into it, in parts and in any order,
//! and reads the result at the same place. Nothing here has I/O, a clock, or threads: a target asks windows for jobs, and runs them on a core's thread.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod core;
mod frames;
#[cfg(test)]
mod tests;
mod window;

pub use self::core::{Core, level_range};
pub use self::frames::frame_len;
pub use self::window::{JobNumber, Ran, Refusal, Started, Window};
