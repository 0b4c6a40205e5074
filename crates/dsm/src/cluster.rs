//! The nodes that share memory, as each of them is told.

mod file;

use std::env;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use rdmux_key::random_nonce;
use rdmux_verbs::{Device, Listener, OpenError};
use rdmux_wire::dsm::NodeId;

pub use self::file::FileError;

/// Number of this node.
const NODE: &str = "RDMUX_DSM_NODE";
/// Addresses of all nodes in the order of their numbers, separated by commas.
const MEMBERS: &str = "RDMUX_DSM_MEMBERS";
/// Session, in 32 hexadecimal digits.
const SESSION: &str = "RDMUX_DSM_SESSION";
/// Lease in seconds.
const LEASE: &str = "RDMUX_DSM_LEASE";

/// Ports of nodes that are all on one host.
const PORTS: Range<u16> = 20000..60000;

/// Most nodes of a cluster. Each has a connection to each other one.
pub const NODES_MAX: usize = 1024;

/// The nodes that share memory, and which of them this process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    own: NodeId,
    members: Vec<SocketAddr>,
    /// The same for all nodes, and for no others.
    pub session: [u8; 16],
    /// A node that does not answer for so long has to leave.
    pub lease: Duration,
}

/// There is no cluster that this process could join.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// A variable is not set.
    #[error("{0} is not set: start the program by `rdmux dsm run`")]
    NotSet(&'static str),
    /// A variable has a wrong value.
    #[error("{variable}={value}: {problem}")]
    Wrong {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// The problem.
        problem: &'static str,
    },
    /// There are no nodes or too many, or this one is none of them.
    #[error("node {own} of {nodes}: nodes are numbered from 0 on, and there are at most {NODES_MAX}")]
    Nodes {
        /// Number of this node.
        own: u32,
        /// Number of nodes.
        nodes: usize,
    },
}

/// This host cannot have all nodes of a cluster.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The device cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The system has no random bytes.
    #[error("random bytes for the session: {0}")]
    Random(std::io::Error),
    /// There are too few free ports.
    #[error("{address} has no free ports for {nodes} nodes")]
    NoPorts {
        /// The address.
        address: IpAddr,
        /// Number of nodes.
        nodes: u32,
    },
    /// There are no nodes or too many.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

impl Cluster {
    /// Lease where none is given.
    pub const LEASE: Duration = Duration::from_secs(5);

    /// Describes a cluster: this process is number `own` of `members`.
    ///
    /// # Errors
    /// [`ClusterError::Nodes`].
    pub fn new(own: u32, members: Vec<SocketAddr>, session: [u8; 16]) -> Result<Cluster, ClusterError> {
        let nodes = members.len();
        let wrong = ClusterError::Nodes { own, nodes };
        let is_member = (own as usize) < nodes && nodes <= NODES_MAX;
        let own = NodeId::new(own).filter(|_| is_member).ok_or(wrong)?;
        Ok(Cluster {
            own,
            members,
            session,
            lease: Cluster::LEASE,
        })
    }

    /// Describes a cluster whose nodes are all on this host, at an address of it: that of each node, in their order. Their ports are free now.
    ///
    /// # Errors
    /// There are too many nodes, the device cannot be opened, or it has no free ports.
    pub fn on_this_host(address: IpAddr, nodes: u32) -> Result<Vec<Cluster>, HostError> {
        let device = Device::open(address)?;
        let nonce = random_nonce().map_err(HostError::Random)?;
        let start = u16::from_le_bytes([nonce[0], nonce[1]]) % PORTS.len() as u16;
        let ports = (0..PORTS.len() as u16).map(|n| PORTS.start + (start + n) % PORTS.len() as u16);
        // All of them are held until all are found.
        let listen = |port| Some((SocketAddr::new(address, port), device.listen(port).ok()?));
        let found: Vec<(SocketAddr, Listener)> = ports.filter_map(listen).take(nodes as usize).collect();
        if found.len() < nodes as usize {
            return Err(HostError::NoPorts { address, nodes });
        }
        let members: Vec<SocketAddr> = found.into_iter().map(|(address, _)| address).collect();
        let session = *nonce.last_chunk().unwrap_or(&[0; 16]);
        let cluster = |node| Ok(Cluster::new(node, members.clone(), session)?);
        (0..nodes).map(cluster).collect()
    }

    /// Returns the cluster of the environment, as `rdmux dsm run` sets it.
    ///
    /// # Errors
    /// A variable is missing or has a wrong value.
    pub fn of_environment() -> Result<Cluster, ClusterError> {
        Cluster::parse(|name| env::var(name).ok())
    }

    fn parse(variable: impl Fn(&'static str) -> Option<String>) -> Result<Cluster, ClusterError> {
        let required = |name| variable(name).ok_or(ClusterError::NotSet(name));
        let wrong = |variable, value: &str, problem| ClusterError::Wrong {
            variable,
            value: value.to_owned(),
            problem,
        };
        let node = required(NODE)?;
        let own = node.parse().map_err(|_| wrong(NODE, &node, "not a number"))?;
        let text = required(MEMBERS)?;
        let members: Result<Vec<SocketAddr>, _> = text.split(',').map(str::parse).collect();
        let members = members.map_err(|_| wrong(MEMBERS, &text, "not a list of ADDRESS:PORT"))?;
        let text = required(SESSION)?;
        let is_number = text.len() == 32 && text.bytes().all(|it| it.is_ascii_hexdigit());
        let number = is_number.then(|| u128::from_str_radix(&text, 16).ok()).flatten();
        let number = number.ok_or_else(|| wrong(SESSION, &text, "not 32 hexadecimal digits"))?;
        let mut cluster = Cluster::new(own, members, number.to_be_bytes())?;
        if let Some(text) = variable(LEASE) {
            let lease = text
                .parse()
                .ok()
                .and_then(|it| Duration::try_from_secs_f64(it).ok());
            let lease = lease.filter(|it| (0.1..=3600.0).contains(&it.as_secs_f64()));
            cluster.lease = lease.ok_or_else(|| wrong(LEASE, &text, "not 0.1 to 3600 seconds"))?;
        }
        Ok(cluster)
    }

    /// Returns the variables from which [`Cluster::of_environment`] makes this cluster in a child.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        let members: Vec<String> = self.members.iter().map(SocketAddr::to_string).collect();
        [
            (NODE, self.own.number().to_string()),
            (MEMBERS, members.join(",")),
            (SESSION, format!("{:032x}", u128::from_be_bytes(self.session))),
            (LEASE, self.lease.as_secs_f64().to_string()),
        ]
    }

    /// Returns this node.
    pub fn own(&self) -> NodeId {
        self.own
    }

    /// Returns all nodes.
    pub fn nodes(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.members.len() as u32).filter_map(NodeId::new)
    }

    /// Returns the address of a node.
    pub fn address(&self, node: NodeId) -> Option<SocketAddr> {
        self.members.get(node.number() as usize).copied()
    }
}

/// Returns a lease of so many seconds, if it may be so long.
fn parse_lease(seconds: f64) -> Option<Duration> {
    let may_be = (0.1..=3600.0).contains(&seconds);
    may_be.then(|| Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> Cluster {
        let members = ["127.0.0.1:7001", "[::1]:7002"].map(|it| it.parse().unwrap());
        let mut cluster = Cluster::new(1, members.to_vec(), *b"sixteen bytes...").unwrap();
        cluster.lease = Duration::from_millis(1500);
        cluster
    }

    #[test]
    fn parse__of_the_variables_of_a_cluster() {
        let variables = cluster().environment();
        let value = |name| variables.iter().find(|it| it.0 == name).map(|it| it.1.clone());
        assert_eq!(Cluster::parse(value), Ok(cluster()));
    }

    #[test]
    fn parse__names_the_variable_that_is_wrong() {
        for (name, wrong) in [
            (NODE, "one"),
            (MEMBERS, "127.0.0.1"),
            (MEMBERS, ""),
            (SESSION, "12"),
            (SESSION, "+2345678123456781234567812345678"),
            (LEASE, "0"),
            (LEASE, "-1"),
            (LEASE, "1e30"),
        ] {
            let variables = cluster().environment();
            let value = |asked: &'static str| match asked == name {
                true => Some(wrong.to_owned()),
                false => variables.iter().find(|it| it.0 == asked).map(|it| it.1.clone()),
            };
            let error = Cluster::parse(value).unwrap_err();
            assert!(
                matches!(&error, ClusterError::Wrong { variable, .. } if *variable == name),
                "{error}"
            );
        }
        let missing = Cluster::parse(|_| None).unwrap_err();
        assert_eq!(missing, ClusterError::NotSet(NODE));
    }

    #[test]
    fn new__of_a_node_that_is_no_member_is_refused() {
        let members = vec!["127.0.0.1:7001".parse().unwrap()];
        assert!(Cluster::new(1, members, [0; 16]).is_err());
        assert!(Cluster::new(0, Vec::new(), [0; 16]).is_err());
    }
}
