//! One RDMA device for many processes: a node owns the device and serves applications that trust each other as little as the node trusts
//! them.
//!
//! So far the crate has the rings between an application and the node ([`ring`]): how descriptors cross them, how the sides wake each
//! other, and the memory. Begin with [`ring::NodeEnd`].
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

pub mod ring;
