//! The push service: files and memory that peers write and read by RDMA, and make durable by FLUSH, without server code in the
//! data path. Its messages are those of [`rdmux_wire::push`]; they say who may access which bytes, under which key, and how
//! durable a flush makes them. The bytes themselves travel as RDMA WRITE, READ and FLUSH.
//!
//! It is not a file system: regions have a fixed size and a name, and there is no cache and no lock.
//!
//! A [`Server`] offers [`Region`]s; a [`Client`] maps them. The protocol is in [`server::Session`] and
//! [`client::Handshake`], which do no I/O.
//!
//! ```no_run
//! use rdmux_push::{Access, Client, Key, Name, Options, Placement};
//!
//! let key = Key::load_or_create()?;
//! rdmux_soft::register();
//! let mut client = Client::connect("127.0.0.1:7174".parse()?, &key, &Options::default())?;
//! let region = Name::new("journal").ok_or("not a name")?;
//! let mapping = client.map(&region, Access::READ | Access::WRITE, 0, 4096, 0)?;
//! client.write(&mapping, 100, b"hello")?;
//! client.flush(&mapping, 100, 5, Placement::PERSISTENT)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

pub mod client;
mod crc;
mod proof;
mod region;
pub mod server;
mod target;

pub use client::{Client, Error, MapRequest, Mapping, Options, Way};
pub use crc::{Crc64, crc64_of, transfer_id};
pub use rdmux_key::{Key, KeyError, default_path as default_key_path};
pub use rdmux_verbs::Placement;
pub use rdmux_verbs::parse_size;
pub use rdmux_wire::push::{Access, Conflict, Domain, ErrorCode, Name, VERSION};
pub use region::{Mapped, Place, Region, RegionError, Sizing, Ways, file_system_of};
pub use server::Server;
pub use target::{DEFAULT_PORT, Target, TargetError, is_malformed_ipv4, local_address_towards, split_port};
