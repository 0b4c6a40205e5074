//! Optional features of devices.

use std::fmt;

use bitflags::bitflags;

bitflags! {
    /// Features of a device besides RC, SEND, WRITE and READ. A request for a feature that the device lacks is an error.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u32 {
        /// Queue pairs of UC.
        const UC = 1 << 0;
        /// Queue pairs of UD, and address handles.
        const UD = 1 << 1;
        /// Queue pairs and shared receive queues of XRC. IBTA Vol 1, A14.
        const XRC = 1 << 2;
        /// Shared receive queues.
        const SRQ = 1 << 3;
        /// Compare-and-swap and fetch-and-add.
        const ATOMIC = 1 << 4;
        /// Memory windows of type 1.
        const MW_TYPE_1 = 1 << 5;
        /// Memory windows of type 2.
        const MW_TYPE_2 = 1 << 6;
        /// FLUSH to global visibility. IBTA Vol 1, A19.
        const FLUSH_GLOBAL = 1 << 7;
        /// FLUSH to persistence.
        const FLUSH_PERSISTENT = 1 << 8;
        /// ATOMIC WRITE.
        const ATOMIC_WRITE = 1 << 9;
        /// Regions over memory whose pages come and go, such as files.
        const ON_DEMAND = 1 << 10;
        /// Multicast groups.
        const MULTICAST = 1 << 11;
        /// Regions that are registered by work requests, and registered anew.
        const FAST_REGISTER = 1 << 12;
        /// Connections of UC and XRC by address and port.
        const CONNECT_ANY = 1 << 13;
        /// Queue pairs that are brought up by hand, by the peer's address.
        const BY_ADDRESS = 1 << 14;
        /// Completion queues with moderation: several completions cause one event.
        const CQ_MODERATION = 1 << 15;
        /// Completion queues that record the time at which each completion arrived.
        const CQ_TIMES = 1 << 16;
        /// Shared receive queues for connections of several protection domains: receives are checked against the domain of their queue
        /// (rxe checks them against that of the queue pair), and a connection reports that its queue pair has failed
        /// ([`Connection::notify`](crate::Connection::notify)), which no flushed receive tells.
        const SHARED_RECEIVES = 1 << 17;
        /// SEND with invalidate. A device may declare it and still fail such a request when it executes it (bnxt_re does): a service that can
        /// do without it goes on with SEND.
        const SEND_INVALIDATE = 1 << 18;
    }
}

/// Each feature with its name, as users read it.
const NAMES: [(Features, &str); 19] = [
    (Features::UC, "UC"),
    (Features::UD, "UD"),
    (Features::XRC, "XRC"),
    (Features::SRQ, "shared receive queues"),
    (Features::ATOMIC, "atomics"),
    (Features::MW_TYPE_1, "memory windows of type 1"),
    (Features::MW_TYPE_2, "memory windows of type 2"),
    (Features::FLUSH_GLOBAL, "FLUSH"),
    (Features::FLUSH_PERSISTENT, "FLUSH to persistence"),
    (Features::ATOMIC_WRITE, "ATOMIC WRITE"),
    (Features::ON_DEMAND, "on-demand paging"),
    (Features::MULTICAST, "multicast"),
    (Features::FAST_REGISTER, "registration by work requests"),
    (Features::CONNECT_ANY, "connections of UC and XRC by address"),
    (Features::BY_ADDRESS, "queue pairs brought up by address"),
    (Features::CQ_MODERATION, "moderation of completion queues"),
    (Features::CQ_TIMES, "times of completions"),
    (Features::SHARED_RECEIVES, "receives shared by protection domains"),
    (Features::SEND_INVALIDATE, "SEND with invalidate"),
];

impl Features {
    /// Returns the names of the features in the set, in the order of their bits.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        NAMES
            .into_iter()
            .filter(move |(feature, _)| self.contains(*feature))
            .map(|(_, name)| name)
    }

    /// Returns the name of the first feature in the set.
    pub fn first_name(self) -> &'static str {
        let mut names = NAMES.into_iter();
        names
            .find(|(feature, _)| self.contains(*feature))
            .map_or("nothing", |(_, name)| name)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, name) in self.names().enumerate() {
            write!(f, "{}{name}", if n == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

/// The device lacks a feature that was requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device {device} does not offer {}", .feature.first_name())]
pub struct Unsupported {
    /// Feature that the device lacks.
    pub feature: Features,
    /// Name of the device.
    pub device: String,
}

impl From<Unsupported> for std::io::Error {
    fn from(error: Unsupported) -> std::io::Error {
        std::io::Error::new(std::io::ErrorKind::Unsupported, error)
    }
}
