//! Memberships in multicast groups. Each group has a socket of its own, bound to the group's address. The kernel gives every such socket a
//! copy of each datagram that is sent to the group, so the processes that share an address need not know of each other here.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rdmux_verbs::interface::interface_of;
use rustix::event::epoll;

use super::udp::RxSocket;

/// Largest number of sockets that one call of [`Memberships::ready`] returns.
const READY_MAX: usize = 16;

/// Multicast groups that a device belongs to.
#[derive(Debug)]
pub(crate) struct Memberships {
    epoll: OwnedFd,
    sockets: Vec<Membership>,
    next: u64,
}

#[derive(Debug)]
pub(crate) struct Membership {
    id: u64,
    pub(crate) group: IpAddr,
    pub(crate) socket: RxSocket,
}

impl Memberships {
    pub(crate) fn new() -> io::Result<Memberships> {
        Ok(Memberships {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            sockets: Vec::new(),
            next: 0,
        })
    }

    /// Joins a group on the interface that has the device's address. A second call for the same group has no effect.
    pub(crate) fn join(&mut self, device: IpAddr, group: IpAddr) -> io::Result<()> {
        if self.sockets.iter().any(|membership| membership.group == group) {
            return Ok(());
        }
        let socket = RxSocket::join(group, interface_of(device)?.index)?;
        let id = self.next;
        self.next += 1;
        epoll::add(
            &self.epoll,
            socket.as_fd(),
            epoll::EventData::new_u64(id),
            epoll::EventFlags::IN,
        )?;
        self.sockets.push(Membership { id, group, socket });
        Ok(())
    }

    /// Leaves the groups for which `wanted` returns false.
    pub(crate) fn leave(&mut self, wanted: impl Fn(IpAddr) -> bool) {
        // Closing a socket ends its membership and takes it out of the epoll set.
        self.sockets.retain(|membership| wanted(membership.group));
    }

    /// Returns whether the device is in no group.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.sockets.is_empty()
    }

    /// Returns the memberships that have something to receive, or some of them if there are many.
    pub(crate) fn ready(&self) -> impl Iterator<Item = &Membership> {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; READY_MAX];
        let n = if self.sockets.is_empty() {
            0
        } else {
            let now = rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            epoll::wait(&self.epoll, &mut events[..], Some(&now)).unwrap_or(0)
        };
        events.into_iter().take(n).filter_map(|event| {
            let id = event.data.u64();
            self.sockets.iter().find(|membership| membership.id == id)
        })
    }
}

impl AsFd for Memberships {
    /// Returns a descriptor that is readable when [`Memberships::ready`] returns any.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
