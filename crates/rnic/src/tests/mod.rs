//! The engine over a virtual link.

mod basic;
mod cm;
mod cm_table;
mod malformed;
mod operations;
mod rxe;
mod traffic;
mod util;
