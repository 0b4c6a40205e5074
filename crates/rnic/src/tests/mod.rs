//! Tests of the engine over a virtual link.

mod answered;
mod basic;
mod carried;
mod cm;
mod cm_placement;
mod cm_table;
mod counted;
mod cq;
mod direct;
mod ended;
mod local;
mod malformed;
mod medium;
mod operations;
mod psn;
mod qp_table;
mod queue;
mod region;
mod ring;
mod rxe;
mod selective;
mod table;
mod traffic;
mod uc;
mod ud;
mod util;
