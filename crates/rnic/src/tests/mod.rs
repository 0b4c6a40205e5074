//! The engine over a virtual network.

mod basic;
mod malformed;
mod util;
