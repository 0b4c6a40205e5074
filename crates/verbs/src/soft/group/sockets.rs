//! The sockets of a group. Every process keeps all of them open, and reads that of its slot.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::SLOTS;
use crate::soft::udp::{self, ROCE_PORT, RxSocket};

/// The sockets by slot.
#[derive(Debug)]
pub(super) struct Sockets(Vec<RxSocket>);

impl Sockets {
    /// Binds all sockets of a new group. The caller is the holder of the address.
    ///
    /// # Errors
    /// Those of [`RxSocket::bind`].
    pub(super) fn bind(addr: IpAddr) -> io::Result<Sockets> {
        let local = SocketAddr::new(addr, ROCE_PORT);
        // A socket that shares with nobody proves that no other socket is bound: neither those of a former holder's survivors, whose group
        // must not grow, nor one of a program that would share the port and so shift all slots.
        drop(RxSocket::bind(local, false)?);
        let first = RxSocket::bind(local, true)?;
        udp::attach_qpn_filter(&first)?;
        let mut all = vec![first];
        while all.len() < SLOTS {
            all.push(RxSocket::bind(local, true)?);
        }
        Ok(Sockets(all))
    }

    /// Takes what [`Sockets::descriptors`] of another process of the group has given; `None` for anything else.
    pub(super) fn from_descriptors(addr: IpAddr, descriptors: Vec<OwnedFd>) -> Option<Sockets> {
        let all: io::Result<Vec<RxSocket>> = descriptors.into_iter().map(RxSocket::from_fd).collect();
        let is_ours = |socket: &RxSocket| socket.local_addr() == SocketAddr::new(addr, ROCE_PORT);
        let all = all.ok()?;
        (all.len() == SLOTS && all.iter().all(is_ours)).then_some(Sockets(all))
    }

    /// The descriptors that a new process of the group is given.
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd).collect()
    }

    /// Duplicates the socket of a slot.
    ///
    /// # Errors
    /// Those of `fcntl(F_DUPFD_CLOEXEC)`.
    pub(super) fn of_slot(&self, slot: u8) -> io::Result<RxSocket> {
        self.0[usize::from(slot)].try_clone()
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "tests are named function__case")]

    use std::net::{Ipv4Addr, UdpSocket};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::soft::udp::RxBatch;

    const ADDR: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 73));

    fn given(sockets: &Sockets) -> Vec<OwnedFd> {
        let descriptors = sockets.descriptors().into_iter();
        descriptors.map(|fd| fd.try_clone_to_owned().unwrap()).collect()
    }

    #[test]
    fn from_descriptors__gives_each_slot_its_socket() {
        let bound = Sockets::bind(ADDR).unwrap();
        let taken = Sockets::from_descriptors(ADDR, given(&bound)).unwrap();
        drop(bound);
        let sender = UdpSocket::bind((ADDR, 0)).unwrap();
        for slot in 0..SLOTS as u8 {
            let socket = taken.of_slot(slot).unwrap();
            // The QPN of the destination begins with byte 5.
            let mut bytes = [0; 16];
            bytes[5] = slot;
            sender.send_to(&bytes, (ADDR, ROCE_PORT)).unwrap();
            let (mut batch, deadline) = (RxBatch::new(), Instant::now() + Duration::from_secs(60));
            while socket.recv_batch(&mut batch).unwrap() == 0 {
                assert!(Instant::now() < deadline, "slot {slot}");
            }
        }
    }

    #[test]
    fn from_descriptors__of_anything_else() {
        let [one, other] = [74, 75].map(|host| IpAddr::from([127, 0, 0, host]));
        let sockets = Sockets::bind(one).unwrap();
        assert!(
            Sockets::from_descriptors(other, given(&sockets)).is_none(),
            "another address"
        );
        let mut all = given(&sockets);
        let last = all.pop().unwrap();
        assert!(Sockets::from_descriptors(one, all).is_none(), "too few");
        let mut all = given(&sockets);
        all.push(last);
        assert!(Sockets::from_descriptors(one, all).is_none(), "too many");
        let mut all = given(&sockets);
        all[1] = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(Sockets::from_descriptors(one, all).is_none(), "no socket");
    }
}
