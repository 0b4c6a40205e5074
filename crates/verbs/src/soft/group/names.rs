//! Abstract Unix socket names under which the kernel keeps the group's state.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;

use rdmux_wire::cm::ServiceId;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with};

use super::{BLOCK, CM_SLOT, SLOTS};

/// Places of devices of RNICs, for which only tools look: no QPN of a soft device begins with these bytes.
pub(super) const RNIC_SLOTS: RangeInclusive<u8> = 128..=255;

/// Slots of a small group: all of these are used before others.
const SMALL: u8 = 2 * BLOCK;

/// Prefix of all names.
const PREFIX: &str = "rdmux-4791-";

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

    /// Binds a socket to listen on for processes that connect to this process's slot. Names of one kind of socket do not collide with
    /// those of another.
    pub(super) fn bind_slot(&self, slot: u8) -> Result<OwnedFd, Errno> {
        let fd = unix_socket(SocketType::SEQPACKET)?;
        bind(&fd, &self.name(&slot_suffix(slot))?)?;
        Ok(fd)
    }

    /// Does the same for a device of an RNIC, under the first free place.
    pub(super) fn bind_rnic_slot(&self) -> Result<OwnedFd, Errno> {
        let bound = RNIC_SLOTS.map(|slot| self.bind_slot(slot));
        let mut bound = bound.skip_while(|bound| matches!(bound, Err(Errno::ADDRINUSE)));
        bound.next().unwrap_or(Err(Errno::ADDRINUSE))
    }

    /// Connects to the process of a slot.
    pub(super) fn connect_slot(&self, slot: u8) -> Result<OwnedFd, Errno> {
        let fd = unix_socket(SocketType::SEQPACKET)?;
        connect(&fd, &self.name(&slot_suffix(slot))?)?;
        Ok(fd)
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
        SocketAddrUnix::new_abstract_name(format!("{PREFIX}{}{suffix}", self.addr).as_bytes())
    }
}

/// Returns the address and slot of an abstract name, if [`Names::bind_slot`] binds such a name.
pub(super) fn slot_of_name(name: &str) -> Option<(IpAddr, u8)> {
    let (addr, slot) = name.strip_prefix(PREFIX)?.rsplit_once("-slot-")?;
    let (addr, slot) = (addr.parse().ok()?, slot.parse().ok()?);
    // A name that is spelt differently belongs to somebody else.
    let ours = format!("{PREFIX}{addr}{}", slot_suffix(slot));
    let is_slot = (1..SLOTS as u8).contains(&slot) || RNIC_SLOTS.contains(&slot);
    (ours == name && is_slot).then_some((addr, slot))
}

fn slot_suffix(slot: u8) -> String {
    format!("-slot-{slot}")
}

fn service_suffix(service: ServiceId) -> String {
    format!("-service-{:016x}", service.0)
}

fn unix_socket(kind: SocketType) -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        kind,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Returns a number that differs from process to process; not secret.
pub(super) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
