//! Events at a server, for people to read.

use std::net::IpAddr;
use std::time::Duration;

use rdmux_wire::push;

use super::EndReason;
use super::id::{ClientId, MappingId};

/// An event, for people to read.
#[derive(Clone, Debug)]
pub enum ServerEvent {
    /// A client connected and has the key.
    Connected {
        /// Number of the client.
        client: ClientId,
        /// Address of the client.
        peer: IpAddr,
    },
    /// A request of a client failed.
    RequestRefused {
        /// Number of the client.
        client: ClientId,
        /// The reason, as the client gets it.
        why: String,
    },
    /// A client mapped a range.
    Mapped {
        /// Number of the client.
        client: ClientId,
        /// Number of the mapping.
        mapping: MappingId,
        /// The region.
        region: push::Name,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Access of the mapping.
        access: push::Access,
    },
    /// A client ended a mapping.
    Unmapped {
        /// Number of the client.
        client: ClientId,
        /// Number of the mapping.
        mapping: MappingId,
    },
    /// A mapping's lease is being broken, because somebody else needs its range.
    Breaking {
        /// Number of the client.
        client: ClientId,
        /// Number of the mapping.
        mapping: MappingId,
        /// Time for the client to release it.
        within: Duration,
    },
    /// A client released a mapping: it can be flushed, and nothing else.
    Released {
        /// Number of the client.
        client: ClientId,
        /// Number of the mapping.
        mapping: MappingId,
    },
    /// A mapping was revoked, because its client did not release it in time.
    Revoked {
        /// Number of the client.
        client: ClientId,
        /// Number of the mapping.
        mapping: MappingId,
    },
    /// A program of this host opens a region's file: the holders of conflicting leases have released them.
    Opened {
        /// The region.
        region: push::Name,
        /// Set if the program may write.
        write: bool,
    },
    /// All other programs have closed a region's file.
    Closed {
        /// The region.
        region: push::Name,
    },
    /// Programs of this host may change a region's file without being noticed.
    Unwatched {
        /// The region.
        region: push::Name,
        /// The reason.
        why: String,
    },
    /// A connection ended, and its mappings with it.
    Ended {
        /// Number of the client.
        client: ClientId,
        /// Address of the client.
        peer: IpAddr,
        /// The reason.
        reason: EndReason,
        /// Number of mappings that ended with it.
        mappings: usize,
    },
    /// A connection was refused.
    Refused {
        /// Address of the client.
        peer: IpAddr,
        /// The reason.
        why: String,
    },
}

impl std::fmt::Display for ServerEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ServerEvent::Connected { client, peer } => write!(f, "client {client} connected from {peer}"),
            ServerEvent::RequestRefused { client, why } => {
                write!(f, "a request of client {client} is refused: {why}")
            }
            ServerEvent::Mapped {
                client,
                mapping,
                region,
                offset,
                length,
                access,
            } => {
                let what = match (
                    access.contains(push::Access::READ),
                    access.contains(push::Access::WRITE),
                ) {
                    (true, true) => "read and write",
                    (false, true) => "write",
                    _ => "read",
                };
                write!(
                    f,
                    "client {client} maps {region}, {length} bytes at {offset}, to {what} (mapping {mapping})"
                )
            }
            ServerEvent::Unmapped { client, mapping } => {
                write!(f, "client {client} unmaps mapping {mapping}")
            }
            ServerEvent::Breaking {
                client,
                mapping,
                within,
            } => write!(
                f,
                "client {client} is asked to release mapping {mapping} within {} s: somebody else needs its range",
                within.as_secs_f32()
            ),
            ServerEvent::Opened { region, write } => {
                let what = if *write { "write" } else { "read" };
                write!(
                    f,
                    "a program of this host opens the file of region {region} to {what}"
                )
            }
            ServerEvent::Closed { region } => {
                write!(f, "no other program has the file of region {region} open")
            }
            ServerEvent::Unwatched { region, why } => write!(
                f,
                "region {region}: rdmux cannot detect programs of this host that change the file: {why}"
            ),
            ServerEvent::Released { client, mapping } => {
                write!(f, "client {client} releases mapping {mapping}")
            }
            ServerEvent::Revoked { client, mapping } => write!(
                f,
                "mapping {mapping} of client {client} is revoked: it was not released in time"
            ),
            ServerEvent::Ended {
                client,
                peer,
                reason,
                mappings,
            } => {
                write!(f, "client {client} from {peer} ended: {reason}")?;
                match mappings {
                    0 => Ok(()),
                    1 => f.write_str("; its mapping ended too"),
                    n => write!(f, "; its {n} mappings ended too"),
                }
            }
            ServerEvent::Refused { peer, why } => write!(f, "connection from {peer} refused: {why}"),
        }
    }
}
