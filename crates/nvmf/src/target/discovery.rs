//! The discovery log: which subsystems there are, and where.

use std::fmt;
use std::net::IpAddr;

use rdmux_wire::nvme::{
    DISCOVERY_ENTRY_LEN, DISCOVERY_HEADER_LEN, DISCOVERY_NQN, DiscoveryEntry, DiscoveryHeader, Nqn,
    SubsystemKind,
};

use super::queue::ADMIN_ENTRIES;
use super::subsystem::{Listener, Target};

/// Another discovery service, to which hosts are referred.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Referral {
    /// The way to it.
    pub at: Listener,
    /// Its name.
    pub nqn: Nqn,
    /// Connections to it need TLS or another secure channel.
    pub is_secure: bool,
}

impl Referral {
    /// Returns true if it is to the same service, at the same place.
    pub fn is_to(&self, other: &Referral) -> bool {
        (self.at, &self.nqn) == (other.at, &other.nqn)
    }
}

impl fmt::Display for Referral {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.nqn.as_str() {
            DISCOVERY_NQN => self.at.fmt(f),
            other => write!(f, "{other} at {}", self.at),
        }
    }
}

/// Returns the log for a host that has reached the target at a local address: the discovery service itself and each subsystem that the host
/// may use, at each listener, and other discovery services. A host that has not come by loopback would look for those of loopback on itself.
pub(super) fn log(target: &Target, host: &Nqn, local: IpAddr) -> Vec<u8> {
    let generation = target.generation();
    let is_within_reach = |at: &Listener| local.is_loopback() || !at.address.ip().is_loopback();
    let own = Nqn::new(DISCOVERY_NQN).map(|nqn| (SubsystemKind::Discovery, nqn));
    let others = target
        .names(host)
        .into_iter()
        .map(|nqn| (SubsystemKind::Nvm, nqn));
    let subsystems: Vec<_> = own.into_iter().chain(others).collect();
    let mut listeners: Vec<_> = target.ways().into_iter().zip(1..).collect();
    listeners.retain(|((listener, _), _)| is_within_reach(listener));
    let entry = |at: &Listener, port, kind, subsystem: &Nqn| DiscoveryEntry {
        transport: at.transport,
        kind,
        is_secure: false,
        flags: match kind {
            // A host that comes by loopback is told of more.
            SubsystemKind::Discovery if at.address.ip().is_loopback() == local.is_loopback() => {
                DiscoveryEntry::SAME_LOG | DiscoveryEntry::PERSISTENT
            }
            SubsystemKind::Discovery => DiscoveryEntry::PERSISTENT,
            SubsystemKind::Nvm | SubsystemKind::Referral => 0,
        },
        port,
        admin_queue_entries: ADMIN_ENTRIES,
        address: at.address,
        subsystem: subsystem.clone(),
    };
    let mut entries = Vec::new();
    for ((listener, tls), port) in &listeners {
        let here = subsystems.iter();
        entries.extend(here.map(|(kind, subsystem)| DiscoveryEntry {
            is_secure: *tls,
            ..entry(listener, *port, *kind, subsystem)
        }));
    }
    let referrals = target.referrals();
    for referral in referrals.iter().filter(|referral| is_within_reach(&referral.at)) {
        entries.push(DiscoveryEntry {
            is_secure: referral.is_secure,
            ..entry(&referral.at, 0, SubsystemKind::Referral, &referral.nqn)
        });
    }
    let mut bytes = vec![0; DISCOVERY_HEADER_LEN + entries.len() * DISCOVERY_ENTRY_LEN];
    let header = DiscoveryHeader {
        generation,
        entries: entries.len() as u64,
    };
    header.emit(&mut bytes);
    for (bytes, entry) in bytes[DISCOVERY_HEADER_LEN..]
        .chunks_mut(DISCOVERY_ENTRY_LEN)
        .zip(&entries)
    {
        entry.emit(bytes);
    }
    bytes
}
