//! Events at a server, for people to read.

use std::net::IpAddr;
use std::time::Duration;

use rdmux_wire::push;

use super::EndReason;
use super::id::{ClientId, MappingId};

/// Most events of refused requests that one client causes in [`REFUSALS_TIME`], so that it cannot fill the log.
const REFUSALS_MAX: u32 = 8;
const REFUSALS_TIME: Duration = Duration::from_secs(10);

/// The refused requests of one client.
#[derive(Clone, Debug, Default)]
pub(super) struct Refusals {
    /// Time of the first event that counts.
    since: Duration,
    reported: u32,
    unreported: u64,
}

impl Refusals {
    /// Counts a refused request. If it is to be reported, returns the number of those before it that were not.
    pub(super) fn count(&mut self, now: Duration) -> Option<u64> {
        if self.reported == 0 || now >= self.since + REFUSALS_TIME {
            (self.since, self.reported) = (now, 0);
        }
        if self.reported == REFUSALS_MAX {
            self.unreported += 1;
            return None;
        }
        self.reported += 1;
        Some(std::mem::take(&mut self.unreported))
    }
}

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
    /// A request of a client failed. A client whose requests keep failing has few of these events (8 in 10 s).
    RequestRefused {
        /// Number of the client.
        client: ClientId,
        /// The reason, as the client gets it.
        why: String,
        /// Number of its requests that failed before this one and have no event.
        unreported: u64,
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
            ServerEvent::RequestRefused {
                client,
                why,
                unreported,
            } => {
                write!(f, "a request of client {client} is refused: {why}")?;
                match unreported {
                    0 => Ok(()),
                    1 => f.write_str("; another one before it is not listed"),
                    n => write!(f, "; {n} others before it are not listed"),
                }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count__a_client_whose_requests_keep_failing_has_few_events() {
        let mut refusals = Refusals::default();
        let began = Duration::from_secs(100);
        for ms in 0..9_999 {
            let reported = refusals.count(began + Duration::from_millis(ms));
            assert_eq!(reported, (ms < 8).then_some(0), "{ms} ms");
        }
        assert_eq!(refusals.count(began + REFUSALS_TIME), Some(9_991));
        assert_eq!(refusals.count(began + REFUSALS_TIME), Some(0));
    }
}
