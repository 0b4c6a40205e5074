//! The discovery log: which subsystems there are, and where.

use std::net::IpAddr;

use rdmux_wire::nvme::{
    DISCOVERY_ENTRY_LEN, DISCOVERY_HEADER_LEN, DISCOVERY_NQN, DiscoveryEntry, DiscoveryHeader, Nqn,
    SubsystemKind,
};

use super::queue::ADMIN_ENTRIES;
use super::subsystem::Target;

/// Returns the log for a host that has reached the target at a local address: the discovery service itself and each subsystem that the host
/// may use, at each listener. A host that has not come by loopback would look for those of loopback on itself.
pub(super) fn log(target: &Target, host: &Nqn, local: IpAddr) -> Vec<u8> {
    let generation = target.generation();
    let own = Nqn::new(DISCOVERY_NQN).map(|nqn| (SubsystemKind::Discovery, nqn));
    let others = target
        .names(host)
        .into_iter()
        .map(|nqn| (SubsystemKind::Nvm, nqn));
    let subsystems: Vec<_> = own.into_iter().chain(others).collect();
    let mut listeners: Vec<_> = target.listeners().into_iter().zip(1..).collect();
    listeners.retain(|(listener, _)| local.is_loopback() || !listener.address.ip().is_loopback());
    let entries = listeners.iter().flat_map(|(listener, port)| {
        subsystems.iter().map(move |(kind, subsystem)| DiscoveryEntry {
            transport: listener.transport,
            kind: *kind,
            is_secure: false,
            port: *port,
            admin_queue_entries: ADMIN_ENTRIES,
            address: listener.address,
            subsystem: subsystem.clone(),
        })
    });
    let entries: Vec<_> = entries.collect();
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
