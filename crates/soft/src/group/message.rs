//! Messages between holder and members, one per packet of the `SOCK_SEQPACKET` connection.
//!
//! Both ends are processes of one user on one host, so numbers have the host's byte order; that does not mean that they
//! are trusted: a message that is not understood ends the connection, and no call here waits.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rdmux_verbs::provider::seqpacket::send_bytes;
use rdmux_wire::cm::ServiceId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::{BLOCKS, SERVICES_MAX, SLOTS};

/// Version of the protocol; both ends must have the same.
pub(crate) const VERSION: u16 = 4;

/// A datagram of connection management is shorter: BTH, DETH, 256 bytes, ICRC.
pub(super) const MAD_BYTES_MAX: usize = 512;

/// Bytes of the longest message, and of one byte more, by which a longer one is noticed.
pub(super) const LEN_MAX: usize = 2 + 8 * SERVICES_MAX + 1;

/// Error numbers of Linux.
const ERRNOS: RangeInclusive<i32> = 1..=4095;

const WELCOME: u8 = 1;
const ANNOUNCE: u8 = 2;
const NEXT_SLOT: u8 = 3;
const MAD: u8 = 4;
const WANT: u8 = 5;
const BLOCK_OF_SOCKETS: u8 = 6;
const NO_BLOCK: u8 = 7;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum GroupMessage<'a> {
    /// Holder to new connection. Carries the group's ledger.
    Welcome { version: u16, next_slot: u8 },
    /// Member to holder: its slot and its services; sent again at each change.
    Announce { slot: u8, services: Vec<ServiceId> },
    /// Holder to members: start of the search for a free slot, in case they become holder.
    NextSlot(u8),
    /// Holder to member: a datagram for it.
    Mad { src: SocketAddr, bytes: &'a [u8] },
    /// A joining process to the holder, or the holder to a member: its slot, and the block whose sockets it asks for.
    Want { slot: u8, block: u8 },
    /// The answer. Carries the sockets.
    Block(u8),
    /// The other answer: they cannot be had, with the system's error number.
    NoBlock(i32),
}

impl<'a> GroupMessage<'a> {
    fn encode(&self) -> Vec<u8> {
        match self {
            GroupMessage::Welcome { version, next_slot } => {
                let version = version.to_ne_bytes();
                vec![WELCOME, *next_slot, version[0], version[1]]
            }
            GroupMessage::Announce { slot, services } => {
                let mut out = vec![ANNOUNCE, *slot];
                out.extend(services.iter().flat_map(|s| s.0.to_ne_bytes()));
                out
            }
            GroupMessage::NextSlot(slot) => vec![NEXT_SLOT, *slot],
            GroupMessage::Mad { src, bytes } => {
                let (family, ip, scope) = match src {
                    SocketAddr::V4(a) => (4, a.ip().to_ipv6_mapped(), 0),
                    SocketAddr::V6(a) => (6, *a.ip(), a.scope_id()),
                };
                let mut out = vec![MAD, family];
                out.extend(src.port().to_ne_bytes());
                out.extend(scope.to_ne_bytes());
                out.extend(ip.octets());
                out.extend(*bytes);
                out
            }
            GroupMessage::Want { slot, block } => vec![WANT, *slot, *block],
            GroupMessage::Block(block) => vec![BLOCK_OF_SOCKETS, *block],
            GroupMessage::NoBlock(errno) => {
                let mut out = vec![NO_BLOCK];
                out.extend(errno.to_ne_bytes());
                out
            }
        }
    }

    /// Returns `None` for bytes that no encoder produces.
    pub(super) fn decode(packet: &'a [u8]) -> Option<Self> {
        let slot_of = |slot: u8| (1..SLOTS as u8).contains(&slot).then_some(slot);
        let block_of = |rest: &[u8]| match rest {
            [block] if *block < BLOCKS => Some(*block),
            _ => None,
        };
        let (&kind, rest) = packet.split_first()?;
        match kind {
            WELCOME => {
                // The version comes first: everything else may depend on it.
                let version = u16::from_ne_bytes(*rest.get(1..)?.first_chunk()?);
                if version != VERSION {
                    return Some(GroupMessage::Welcome {
                        version,
                        next_slot: 1,
                    });
                }
                Some(GroupMessage::Welcome {
                    version,
                    next_slot: slot_of(rest[0]).filter(|_| rest.len() == 3)?,
                })
            }
            ANNOUNCE => {
                let (&slot, services) = rest.split_first()?;
                let (services, []) = services.as_chunks::<8>() else {
                    return None;
                };
                if services.len() > SERVICES_MAX {
                    return None;
                }
                let services = services
                    .iter()
                    .map(|s| ServiceId(u64::from_ne_bytes(*s)))
                    .collect();
                Some(GroupMessage::Announce {
                    slot: slot_of(slot)?,
                    services,
                })
            }
            NEXT_SLOT => {
                let [slot] = rest else { return None };
                Some(GroupMessage::NextSlot(slot_of(*slot)?))
            }
            MAD => {
                let (&family, rest) = rest.split_first()?;
                let (port, rest) = rest.split_first_chunk()?;
                let (scope, rest) = rest.split_first_chunk()?;
                let (ip, bytes) = rest.split_first_chunk::<16>()?;
                let (port, ip) = (u16::from_ne_bytes(*port), Ipv6Addr::from(*ip));
                let src = match family {
                    4 => SocketAddr::new(IpAddr::from(ip.to_ipv4_mapped()?), port),
                    6 => SocketAddrV6::new(ip, port, 0, u32::from_ne_bytes(*scope)).into(),
                    _ => return None,
                };
                (bytes.len() <= MAD_BYTES_MAX).then_some(GroupMessage::Mad { src, bytes })
            }
            WANT => {
                let (&slot, rest) = rest.split_first()?;
                Some(GroupMessage::Want {
                    slot: slot_of(slot)?,
                    block: block_of(rest)?,
                })
            }
            BLOCK_OF_SOCKETS => block_of(rest).map(GroupMessage::Block),
            NO_BLOCK => {
                let errno = i32::from_ne_bytes(rest.try_into().ok()?);
                ERRNOS.contains(&errno).then_some(GroupMessage::NoBlock(errno))
            }
            _ => None,
        }
    }
}

/// Sends without waiting; fails with `AGAIN` when the other side does not read.
pub(super) fn send(fd: impl AsFd, message: &GroupMessage<'_>) -> Result<(), Errno> {
    rustix::net::send(fd, &message.encode(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Sends a message with `descriptors`.
pub(super) fn send_with_descriptors(
    fd: impl AsFd,
    message: &GroupMessage<'_>,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    send_bytes(fd, &message.encode(), descriptors)
}

/// Receives one message without waiting; 0 bytes at the end of the connection. Closes descriptors that come with it.
pub(super) fn receive(fd: impl AsFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match rustix::net::recv(&fd, &mut *buffer, RecvFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
            Ok((_, len)) => return Ok(len.min(buffer.len())),
        }
    }
}

/// Waits until `fd` is readable, or has ended; returns false if `deadline` comes first.
pub(super) fn wait_readable(fd: BorrowedFd<'_>, deadline: Instant) -> Result<bool, Errno> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)) {
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
            Ok(ready) => return Ok(ready > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use std::net::Ipv4Addr;

    use super::*;

    fn all() -> Vec<GroupMessage<'static>> {
        let v4 = SocketAddr::from((Ipv4Addr::new(10, 0, 0, 1), 49_152));
        let v6 = SocketAddr::from(SocketAddrV6::new(Ipv6Addr::LOCALHOST, 1, 0, 7));
        vec![
            GroupMessage::Welcome {
                version: VERSION,
                next_slot: 15,
            },
            GroupMessage::Announce {
                slot: 1,
                services: vec![],
            },
            GroupMessage::Announce {
                slot: 2,
                services: (0..SERVICES_MAX as u64).map(ServiceId).collect(),
            },
            GroupMessage::NextSlot(3),
            GroupMessage::Mad {
                src: v4,
                bytes: &[1; 280],
            },
            GroupMessage::Mad {
                src: v6,
                bytes: &[2; MAD_BYTES_MAX],
            },
            GroupMessage::Want { slot: 1, block: 0 },
            GroupMessage::Block(BLOCKS - 1),
            GroupMessage::NoBlock(24),
        ]
    }

    #[test]
    fn decode__inverts_encode() {
        for message in all() {
            let bytes = message.encode();
            assert!(bytes.len() < LEN_MAX);
            assert_eq!(GroupMessage::decode(&bytes), Some(message));
        }
    }

    #[test]
    fn decode__cut_or_extended_is_refused_or_another_message() {
        for message in all() {
            let mut bytes = message.encode();
            for len in 0..bytes.len() {
                assert_ne!(GroupMessage::decode(&bytes[..len]), Some(message.clone()));
            }
            bytes.extend([0; LEN_MAX]);
            assert_eq!(GroupMessage::decode(&bytes), None);
        }
    }

    #[test]
    fn decode__slot_outside_the_group() {
        for slot in [0, SLOTS as u8, 255] {
            assert_eq!(GroupMessage::decode(&[NEXT_SLOT, slot]), None);
            assert_eq!(GroupMessage::decode(&[ANNOUNCE, slot]), None);
        }
        assert_eq!(GroupMessage::decode(&[WANT, 1, BLOCKS]), None);
        assert_eq!(GroupMessage::decode(&[WANT, 0, 1]), None);
        assert_eq!(GroupMessage::decode(&[BLOCK_OF_SOCKETS, BLOCKS]), None);
    }

    #[test]
    fn decode__number_of_no_error() {
        for errno in [i32::MIN, -1, 0, 4096, i32::MAX] {
            assert_eq!(GroupMessage::decode(&GroupMessage::NoBlock(errno).encode()), None);
        }
    }

    #[test]
    fn decode__welcome_of_another_version_shows_it() {
        let later = (VERSION + 1).to_ne_bytes();
        let welcome = [WELCOME, 200, later[0], later[1], 9, 9, 9];
        let decoded = GroupMessage::decode(&welcome);
        assert!(matches!(decoded, Some(GroupMessage::Welcome { version, .. }) if version == VERSION + 1));
    }
}
