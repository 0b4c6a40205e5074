//! Serves services with many connections: a [`Reactor`], which is the loop of one thread, and
//! [`MessageConnection`], which sends and receives messages beside RDMA operations. It knows no service's protocol.
//!
//! A service is a state machine without I/O. Its server's thread asks the reactor for the next [`ReactorEvent`], passes it to the state
//! machine, and carries out what that decides:
//!
//! ```no_run
//! use rdmux_runtime::{Completed, ReactorEvent, Limits, Queues, Reactor, Sizes};
//! use rdmux_verbs::{ConnectParams, Device};
//!
//! let sizes = Sizes { message_bytes: 4096, sent_bytes: 4096, receives: 16, answers: 48, own: 0, operations: 0 };
//! let limits = Limits {
//!     connections: 100,
//!     keepalive: std::time::Duration::from_secs(20),
//!     shared_receives: Some(64),
//!     queues: Queues::Pool,
//!     ledger: None,
//! };
//! let mut reactor = Reactor::<()>::new(sizes, limits, None)?;
//! rdmux_soft::register();
//! reactor.listen(&Device::open("127.0.0.1".parse()?)?, 7174)?;
//! loop {
//!     match reactor.next(None)? {
//!         Some(ReactorEvent::Request(request)) => drop(reactor.accept(request, &ConnectParams::default())),
//!         Some(ReactorEvent::Completed(id, Completed::Message { slot: Some(slot), bytes })) => {
//!             if let Some(connection) = reactor.connection(id) {
//!                 let _ = connection.send(slot, &bytes);
//!             }
//!         }
//!         Some(ReactorEvent::Ended(id, _)) => reactor.close(id, None),
//!         Some(_) | None => {}
//!     }
//! }
//! # #[allow(unreachable_code, reason = "the loop never ends")]
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod connection;
mod descriptors;
mod file_ring;
mod keepalive;
mod mailbox;
mod pages;
mod pool;
mod queues;
mod reactor;
mod receives;
#[cfg(test)]
#[path = "../../skip.rs"]
mod skip;
mod waiting;
mod work_id;
mod workers;

pub use connection::{
    Completed, EstablishError, MessageConnection, PendingConnection, SIGNAL_EVERY, SendError, SendSlot, Sizes,
};
pub use descriptors::{DescriptorId, Interest};
pub use file_ring::{Direction, FileAccess, FileRing};
pub use keepalive::KeepAlive;
pub use mailbox::{Inbox, Mailbox, mailbox};
pub use pages::Pages;
pub use pool::{Buffer, BufferError, BufferPool};
pub use queues::Queues;
pub use reactor::{
    AcceptOptions, ConnectionEnd, ConnectionError, ConnectionId, Limits, ListenAtError, PortId, PreparedPort,
    Reactor, ReactorEvent, Recipient, Request,
};
pub use waiting::{Waiting, set_timer_slack};
pub use work_id::WorkId;
pub use workers::{Run, SubmitError, Workers};
