//! Abstract Unix socket names under which the kernel keeps the group's state.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::IpAddr;
use std::os::fd::OwnedFd;

use rdmux_verbs::resources::places::{name, slot_suffix, unix_socket};
use rdmux_wire::cm::ServiceId;
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType, bind, connect};

use super::{BLOCK, CM_SLOT, SLOTS};

/// Slots of a small group: all of these are used before others.
const SMALL: u8 = 2 * BLOCK;

/// The names of one address.
#[derive(Clone, Debug)]
pub(super) struct Names {
    addr: IpAddr,
}

impl Names {
    pub(super) fn new(addr: IpAddr) -> Self {
        Self { addr }
    }

    pub(super) fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Claims the name of the holder; returns a socket to listen on. `ADDRINUSE` when there is a holder.
    pub(super) fn claim_holder(&self) -> Result<OwnedFd, Errno> {
        let fd = unix_socket(SocketType::SEQPACKET)?;
        bind(&fd, &self.name("")?)?;
        Ok(fd)
    }

    /// Connects to the holder.
    pub(super) fn connect_holder(&self) -> Result<OwnedFd, Errno> {
        let fd = unix_socket(SocketType::SEQPACKET)?;
        connect(&fd, &self.name("")?)?;
        Ok(fd)
    }

    /// Takes a free slot of the lowest block that has one; `None` if there is none. Within a block the search begins after the place of
    /// `first` and goes round. A slot for which `rests` is true is taken only to keep a small group small, or if no other is free.
    pub(super) fn claim_a_slot(
        &self,
        first: u8,
        rests: impl Fn(u8) -> bool,
    ) -> Result<Option<(u8, OwnedFd)>, Errno> {
        let slot_at = |i: u8| i / BLOCK * BLOCK + first.wrapping_add(i) % BLOCK;
        for range in [0..SMALL, SMALL..SLOTS as u8] {
            for resting in [false, true] {
                let slots = range.clone().map(slot_at).filter(|slot| *slot != CM_SLOT);
                for slot in slots.filter(|slot| rests(*slot) == resting) {
                    match self.claim_slot(slot) {
                        Ok(claim) => return Ok(Some((slot, claim))),
                        Err(Errno::ADDRINUSE) => {}
                        Err(e) => return Err(e),
                    }
                }
            }
        }
        Ok(None)
    }

    /// Takes a slot. `ADDRINUSE` when a process has it.
    pub(super) fn claim_slot(&self, slot: u8) -> Result<OwnedFd, Errno> {
        self.claim(&slot_suffix(slot))
    }

    /// Reserves `service`. `ADDRINUSE` when a process offers it.
    pub(super) fn claim_service(&self, service: ServiceId) -> Result<OwnedFd, Errno> {
        self.claim(&service_suffix(service))
    }

    /// Returns whether a process has `slot`.
    pub(super) fn is_slot_claimed(&self, slot: u8) -> bool {
        self.is_claimed(&slot_suffix(slot))
    }

    /// Returns whether a process offers `service`.
    pub(super) fn is_service_claimed(&self, service: ServiceId) -> bool {
        self.is_claimed(&service_suffix(service))
    }

    fn claim(&self, suffix: &str) -> Result<OwnedFd, Errno> {
        let fd = unix_socket(SocketType::DGRAM)?;
        bind(&fd, &self.name(suffix)?)?;
        Ok(fd)
    }

    /// Returns whether a name is bound: a datagram socket connects to a bound name at once, without its owner's help. In doubt the answer
    /// is yes: then a message is dropped and repeated, where a no would refuse an existing service.
    fn is_claimed(&self, suffix: &str) -> bool {
        let connected = unix_socket(SocketType::DGRAM).and_then(|fd| connect(&fd, &self.name(suffix)?));
        connected != Err(Errno::CONNREFUSED)
    }

    fn name(&self, suffix: &str) -> Result<SocketAddrUnix, Errno> {
        name(self.addr, suffix)
    }
}

fn service_suffix(service: ServiceId) -> String {
    format!("-service-{:016x}", service.0)
}

/// Returns a number that differs from process to process; not secret.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
