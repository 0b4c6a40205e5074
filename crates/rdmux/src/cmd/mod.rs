//! The commands, one module each: `Args` for the command line, `run` for the work.

pub(crate) mod accel;
pub(crate) mod capture;
pub(crate) mod ddio;
pub(crate) mod demo;
pub(crate) mod dev;
pub(crate) mod device;
pub(crate) mod doctor;
pub(crate) mod dsm;
pub(crate) mod explain;
pub(crate) mod generate;
pub(crate) mod log;
pub(crate) mod node;
pub(crate) mod notes;
pub(crate) mod nvme;
pub(crate) mod objects;
pub(crate) mod perf;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod res;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod sim;
pub(crate) mod top;
pub(crate) mod trace;
