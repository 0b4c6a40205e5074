//! Links between engines of one host, which share memory (`rdmux_shm`): who meets whom, and what they say to each other.

pub(crate) mod callers;
pub(crate) mod link;
pub(crate) mod message;
