//! Places of devices: the abstract Unix socket names under which tools, and engines of other processes, find the devices of an address.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with};

/// Slots of the soft devices of an address. Slot 0 carries connection management alone, so 127 processes can share an address.
pub const SLOTS: usize = 128;

/// Places of devices of RNICs, for which only tools look: no QPN of a soft device begins with these bytes.
const RNIC_SLOTS: RangeInclusive<u8> = 128..=255;

/// Prefix of all names.
const PREFIX: &str = "rdmux-4791-";

/// Returns a name of an address.
pub fn name(address: IpAddr, suffix: &str) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("{PREFIX}{address}{suffix}").as_bytes())
}

/// Returns what the name of a slot ends with.
pub fn slot_suffix(slot: u8) -> String {
    format!("-slot-{slot}")
}

/// Makes a Unix socket that never waits.
pub fn unix_socket(kind: SocketType) -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        kind,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Binds a socket to listen on for processes that connect to a slot of this process. Names of one kind of socket do not collide with
/// those of another.
pub fn bind_slot(address: IpAddr, slot: u8) -> Result<OwnedFd, Errno> {
    let fd = unix_socket(SocketType::SEQPACKET)?;
    bind(&fd, &name(address, &slot_suffix(slot))?)?;
    Ok(fd)
}

/// Does as [`bind_slot`] for a device of an RNIC, under the first free place.
pub fn bind_rnic_slot(address: IpAddr) -> Result<OwnedFd, Errno> {
    let bound = RNIC_SLOTS.map(|slot| bind_slot(address, slot));
    let mut bound = bound.skip_while(|bound| matches!(bound, Err(Errno::ADDRINUSE)));
    bound.next().unwrap_or(Err(Errno::ADDRINUSE))
}

/// Connects to the process of a slot of a local address, anywhere in this network namespace.
pub fn connect_slot(address: IpAddr, slot: u8) -> Result<OwnedFd, Errno> {
    let fd = unix_socket(SocketType::SEQPACKET)?;
    connect(&fd, &name(address, &slot_suffix(slot))?)?;
    Ok(fd)
}

/// Returns whether a slot is the place of a device of an RNIC.
pub(crate) fn is_rnic_slot(slot: u8) -> bool {
    RNIC_SLOTS.contains(&slot)
}

/// Returns the slots that have a process of any user in this network namespace, in the order of addresses, those of RNICs included; `None`
/// where the system does not tell.
pub(crate) fn slots_in_use() -> Option<BTreeSet<(IpAddr, u8)>> {
    let sockets = fs::read_to_string("/proc/net/unix").ok()?;
    Some(slots_of_sockets(&sockets))
}

/// Parses the system's list of Unix sockets: number, references, protocol, flags, type, state, inode, and a name if there is one.
fn slots_of_sockets(sockets: &str) -> BTreeSet<(IpAddr, u8)> {
    const SEQPACKET: &str = "0005";
    let slot = |line: &str| {
        let mut fields = line.split_whitespace();
        let kind = fields.nth(4)?;
        let name = fields.nth(2)?.strip_prefix('@')?;
        (kind == SEQPACKET).then(|| slot_of_name(name))?
    };
    sockets.lines().filter_map(slot).collect()
}

/// Returns the address and slot of an abstract name, if [`bind_slot`] binds such a name.
fn slot_of_name(name: &str) -> Option<(IpAddr, u8)> {
    let (addr, slot) = name.strip_prefix(PREFIX)?.rsplit_once("-slot-")?;
    let (addr, slot) = (addr.parse().ok()?, slot.parse().ok()?);
    // A name that is spelt differently belongs to somebody else.
    let ours = format!("{PREFIX}{addr}{}", slot_suffix(slot));
    let is_slot = (1..SLOTS as u8).contains(&slot) || RNIC_SLOTS.contains(&slot);
    (ours == name && is_slot).then_some((addr, slot))
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use super::*;

    #[test]
    fn slots_of_sockets__takes_the_names_of_slots_alone() {
        let sockets = "Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0005 01 20001 @rdmux-4791-127.0.0.1-slot-3
0000000000000000: 00000003 00000000 00000000 0005 03 20002 @rdmux-4791-127.0.0.1-slot-3
0000000000000000: 00000002 00000000 00000000 0002 01 20003 @rdmux-4791-127.0.0.1-slot-4
0000000000000000: 00000002 00000000 00010000 0005 01 20004 @rdmux-4791-fe80::1-slot-127
0000000000000000: 00000002 00000000 00010000 0005 01 20005 @rdmux-4791-127.0.0.1
0000000000000000: 00000002 00000000 00010000 0005 01 20006 @rdmux-4791-127.0.0.1-slot-256
0000000000000000: 00000002 00000000 00010000 0005 01 20007 @rdmux-4791-127.0.0.1-slot-0
0000000000000000: 00000002 00000000 00010000 0005 01 20008 @rdmux-4791-127.0.0.1-slot-+5
0000000000000000: 00000002 00000000 00010000 0005 01 20009 @rdmux-4791-here-slot-5
0000000000000000: 00000002 00000000 00010000 0005 01 20010 rdmux-4791-127.0.0.2-slot-5
0000000000000000: 00000002 00000000 00010000 0005 01 20011
garbage
";
        let found: Vec<_> = slots_of_sockets(sockets).into_iter().collect();
        assert_eq!(
            found,
            [
                (IpAddr::from([127, 0, 0, 1]), 3),
                ("fe80::1".parse().unwrap(), 127)
            ]
        );
    }
}
