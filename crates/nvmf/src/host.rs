//! The host's side: an initiator for every NVMe target.
//!
//! Without I/O and clock are [`queue`] (commands in flight), [`setup`] (all that makes a connected queue ready: Connect, authentication,
//! the controller's registers), and [`tcp`] and [`rdma`] (connections). [`Controller`] and [`Session`] drive them on sockets and queue pairs: a
//! controller is one association, a session makes a new one when it is lost and repeats what was not done. A thread for each [`IoQueue`] is all
//! that an application needs; nothing is allocated and no lock is taken for an I/O.
//!
//! ```no_run
//! use rdmux_nvmf::host::{HostError, Options, Session, command};
//! use rdmux_wire::nvme::{Nqn, NsId};
//!
//! # fn main() -> Result<(), HostError> {
//! let addresses = vec!["127.0.0.1:4420".parse().expect("an address")];
//! let subsystem = Nqn::new("nqn.2014-08.org.example:disk").expect("a name");
//! let session = Session::connect(Options::new(addresses, subsystem), 1)?;
//! let namespace = session.open_namespace(NsId(1))?;
//! let mut queue = session.queue(1, 32)?;
//! for block in 0..32 {
//!     let len = namespace.block_bytes() as u32;
//!     let mut read = command::read(namespace.nsid, block, 1, len, vec![0; len as usize]);
//!     read.token = block;
//!     queue.submit(read);
//! }
//! while queue.in_flight() > 0 {
//!     queue.wait()?;
//!     while let Some(done) = queue.poll() {
//!         println!("block {}: {}, {:?}", done.command.token, done.status, done.bytes().first());
//!     }
//! }
//! # Ok(())
//! # }
//! ```

pub mod command;
mod controller;
mod io_queue;
pub mod jobs;
mod link;
mod paths;
pub mod queue;
pub mod rdma;
mod session;
pub mod setup;
pub mod tcp;
#[cfg(test)]
mod tests;
mod url;

use std::error::Error;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rdmux_verbs::Device;
use rdmux_wire::Malformed;
use rdmux_wire::nvme::{AnaState, DISCOVERY_NQN, HostId, Nqn, Status};
use rdmux_wire::nvme_rdma::Reject;
use rdmux_wire::nvme_tcp::Digests;

use crate::auth::{AuthError, Offer, Random, Secrets};
use crate::tls::TlsError;
use crate::tls::psk::Psk;
pub use controller::{Controller, DiscoveryLog, Event, NamespaceInfo};
pub use io_queue::{IoQueue, may_repeat};
pub use paths::Loss;
pub use session::Session;
pub use setup::ControllerInfo;
pub use url::{Transport, Url, UrlError};

/// Settings of a host towards one subsystem.
#[derive(Clone, Debug)]
pub struct Options {
    /// The transport.
    pub transport: Transport,
    /// The local address of RDMA; `None`: that from which the route leads to the target.
    pub from: Option<IpAddr>,
    /// The device of RDMA, in place of that of the local address, which each controller opens.
    pub device: Option<Device>,
    /// Addresses at which the subsystem may be reached, tried in this order.
    pub addresses: Vec<SocketAddr>,
    /// The subsystem.
    pub subsystem: Nqn,
    /// This host.
    pub host: Nqn,
    /// This host's identifier.
    pub host_id: HostId,
    /// Secrets for targets that ask for them.
    pub secrets: Option<Secrets>,
    /// A target that does not ask for the secret is refused: another one may answer in its place.
    pub requires_authentication: bool,
    /// The key of TLS, with which connections of TCP begin then.
    pub psk: Option<Psk>,
    /// Each controller agrees with this host on a key of TLS, by their secrets, in place of that one (secure channel concatenation).
    pub concat: bool,
    /// Hash functions and DH groups that are offered.
    pub offer: Offer,
    /// Returns random bytes.
    pub random: Random,
    /// Digests of connections of TCP.
    pub digests: Digests,
    /// The flow control of I/O submission queues stays on: by TCP the target then sends a completion after the data of each read. By RDMA
    /// it is always on, since that costs nothing.
    pub flow_control: bool,
    /// Keep-alive time; zero is none.
    pub keep_alive: Duration,
    /// Time to connect.
    pub connect_timeout: Duration,
    /// Time for an admin command.
    pub admin_timeout: Duration,
    /// Time for an I/O.
    pub io_timeout: Duration,
    /// Time for which a session tries to connect again to a controller that it has lost.
    pub loss_timeout: Duration,
}

impl Options {
    /// Returns the settings that fit most uses: TCP, no digests, no secrets, keep-alive of 5 s (a discovery service:
    /// none), 10 s for a command, 30 s for an I/O, 60 s to connect again.
    pub fn new(addresses: Vec<SocketAddr>, subsystem: Nqn) -> Options {
        let (host, host_id) = crate::identity::default_host();
        let is_discovery = subsystem.as_str() == DISCOVERY_NQN;
        Options {
            transport: Transport::Tcp,
            from: None,
            device: None,
            addresses,
            subsystem,
            host,
            host_id,
            secrets: None,
            requires_authentication: false,
            psk: None,
            concat: false,
            offer: Offer::default(),
            random: || rdmux_key::random_nonce().ok(),
            digests: Digests::empty(),
            flow_control: false,
            keep_alive: Duration::from_secs(if is_discovery { 0 } else { 5 }),
            connect_timeout: Duration::from_secs(10),
            admin_timeout: Duration::from_secs(10),
            io_timeout: Duration::from_secs(30),
            loss_timeout: Duration::from_secs(60),
        }
    }

    /// Returns true if the flow control of I/O submission queues is on.
    fn controls_flow(&self) -> bool {
        self.flow_control || self.transport == Transport::Rdma
    }

    /// Returns true if the subsystem is a discovery service.
    pub fn is_discovery(&self) -> bool {
        self.subsystem.as_str() == DISCOVERY_NQN
    }
}

/// Reason for which a host has not got what it wanted.
#[derive(Clone, Debug, thiserror::Error)]
pub enum HostError {
    /// The address does not answer.
    #[error("cannot connect to {address}: {source}: does a target listen there?")]
    Connect {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: Arc<io::Error>,
    },
    /// There is no device by which the target is reached.
    #[error("cannot reach {target} by RDMA: {source}")]
    Device {
        /// The target's address.
        target: SocketAddr,
        /// The cause.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The target makes no such queue.
    #[error("the target at {address} refused a queue: {reject}")]
    Rejected {
        /// Its address.
        address: SocketAddr,
        /// The reason.
        reject: Reject,
    },
    /// Something else than an NVMe target has refused the connection.
    #[error(
        "what listens at {address} refused the connection, not in the way of NVMe/RDMA: does a target listen there?"
    )]
    NoTarget {
        /// The address.
        address: SocketAddr,
    },
    /// There is no registered memory for a command.
    #[error("no memory for the data of a command: {0}")]
    Memory(Arc<io::Error>),
    /// A system call, or a request to a device, failed.
    #[error("the connection failed: {0}")]
    Io(Arc<io::Error>),
    /// There is no TLS.
    #[error(transparent)]
    NoTls(#[from] TlsError),
    /// Host and target have not agreed on TLS, or what the target sent is not of it.
    #[error("TLS with {address} failed: {why}: does the target require TLS there, and is the key right?")]
    Tls {
        /// The target's address.
        address: SocketAddr,
        /// The error.
        why: String,
    },
    /// The target has closed the connection.
    #[error("the target closed the connection{}", closed_at(*.0))]
    Closed(Option<&'static str>),
    /// The connection is over.
    #[error(transparent)]
    Ended(#[from] tcp::End),
    /// The target has violated the protocol of NVMe/RDMA.
    #[error(transparent)]
    EndedRdma(#[from] rdma::End),
    /// The target did not answer in time.
    #[error("the target did not answer {what} within {} s", .within.as_secs_f64())]
    TimedOut {
        /// The command.
        what: &'static str,
        /// The time that it had.
        within: Duration,
    },
    /// The target has refused a command.
    #[error("the target refused {what}: {status}{hint}")]
    Refused {
        /// The command.
        what: &'static str,
        /// The status.
        status: Status,
        /// Advice for the user; may be empty.
        hint: &'static str,
    },
    /// The subsystem has no such controller of this host: it is over, and with it all that it was told to do.
    #[error("the target has no controller {cntlid} any more")]
    NoController {
        /// Its id.
        cntlid: u16,
    },
    /// By no path the subsystem gives access to the namespaces.
    #[error("the subsystem gives no access to the namespace ({0:?})")]
    NoAccess(AnaState),
    /// It gave none for as long as a session waits.
    #[error(
        "no path gives access to the namespace within {} s ({state:?}): `rdmux nvme ana list` at the target shows the states",
        .within.as_secs()
    )]
    Inaccessible {
        /// The time.
        within: Duration,
        /// The last state of access.
        state: AnaState,
    },
    /// Host and target did not authenticate each other.
    #[error("authentication failed: {0}")]
    Authentication(#[from] AuthError),
    /// The target asks for a secret, and there is none.
    #[error("the target asks for a secret: give the file that has it with --secret FILE")]
    NoSecret,
    /// The target has nobody connect without TLS, but to agree on a key.
    #[error("the target requires TLS there: give --concat, with its secret, or --tls, with its key")]
    NoSecureChannel,
    /// The target does not ask for the secret that was given.
    #[error("the target does not ask for the secret: it may be another one; leave --secret out to trust it")]
    NotAuthenticated,
    /// The target says something that cannot be.
    #[error("the target's {what} {why}")]
    Inconsistent {
        /// The bytes or fields that it sent.
        what: &'static str,
        /// The error in it.
        why: String,
    },
    /// A structure of the target is malformed.
    #[error("the target sent a malformed structure: {0}")]
    Malformed(#[from] Malformed),
    /// The controller is gone, as its keep-alive or another queue has found.
    #[error("the controller is lost: {0}")]
    Lost(Arc<HostError>),
    /// The time to connect again is over.
    #[error("the connection was lost, and could not be made again within {} s: {cause}", .within.as_secs())]
    GaveUp {
        /// The time.
        within: Duration,
        /// The last failure.
        cause: Arc<HostError>,
    },
}

/// Returns when a connection was closed, and what that may mean.
fn closed_at(what: Option<&'static str>) -> String {
    match what {
        // Linux's target may do so before what it says of a wrong secret has left it.
        Some(what) if what.starts_with("Authentication") => format!(" at {what}: is the secret right?"),
        Some(what) if what.ends_with("TLS") => format!(" at {what}: is the key right?"),
        Some(what) => format!(" at {what}"),
        None => String::new(),
    }
}

impl From<io::Error> for HostError {
    fn from(error: io::Error) -> HostError {
        HostError::Io(Arc::new(error))
    }
}

impl HostError {
    /// Returns true if another connection may help: the path or the controller has failed, not the request.
    pub fn is_of_path(&self) -> bool {
        match self {
            HostError::Connect { .. }
            | HostError::Device { .. }
            // A target that ends refuses requests so.
            | HostError::NoTarget { .. }
            | HostError::Io(_)
            // A target that ends does so in the middle of it.
            | HostError::Tls { .. }
            | HostError::Closed(_)
            | HostError::Ended(_)
            | HostError::EndedRdma(_)
            | HostError::TimedOut { .. }
            | HostError::NoController { .. }
            | HostError::Lost(_) => true,
            HostError::Refused { status, .. } => !status.is_final(),
            // Those of the last connection may not be free yet.
            HostError::Rejected { reject, .. } => *reject == Reject::Resources,
            _ => false,
        }
    }
}
