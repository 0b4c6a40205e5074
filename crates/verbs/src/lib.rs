//! The RDMA vocabulary of rdmux and its providers.

pub mod soft;
