//! The sockets of a group. Every process keeps all of them open, and reads that of its slot.
//!
//! A process that had a descriptor for each would have [`SLOTS`] of them. So one message with all sockets waits for ever in the
//! queue of a Unix socket: that one descriptor keeps them open, and a peek at the message makes descriptors of those that are needed.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::SLOTS;
use super::message::{peek_with_descriptors, send_bytes};
use crate::soft::udp::{self, ROCE_PORT, RxSocket};

#[derive(Debug)]
pub(super) enum Sockets {
    /// The Unix socket with the message.
    Queued(OwnedFd),
    /// All sockets by slot, where the system keeps no such message: it limits how many descriptors of a user are in queues.
    Open(Vec<OwnedFd>),
}

impl Sockets {
    /// Binds all sockets of a new group. The caller is the holder of the address.
    ///
    /// # Errors
    /// Those of [`RxSocket::bind`].
    pub(super) fn bind(addr: IpAddr) -> io::Result<Sockets> {
        let local = SocketAddr::new(addr, ROCE_PORT);
        // A socket that shares with nobody proves that nobody is there: neither the survivors of a holder that ended, whose
        // group must not grow, nor a program that would share and so shift all slots.
        drop(RxSocket::bind(local, false)?);
        let first = RxSocket::bind(local, true)?;
        udp::attach_qpn_filter(&first)?;
        let mut all = vec![first.into_fd()];
        while all.len() < SLOTS {
            all.push(RxSocket::bind(local, true)?.into_fd());
        }
        Ok(match queue(&all) {
            Ok(queued) => Sockets::Queued(queued),
            Err(_) => Sockets::Open(all),
        })
    }

    /// Takes what [`Sockets::descriptors`] of another process of the group has given; `None` for anything else.
    pub(super) fn from_descriptors(addr: IpAddr, mut descriptors: Vec<OwnedFd>) -> Option<Sockets> {
        let sockets = match descriptors.len() {
            1 => Sockets::Queued(descriptors.pop()?),
            _ => Sockets::Open(descriptors),
        };
        let all = sockets.all().ok()?;
        let is_ours =
            |fd| RxSocket::from_fd(fd).is_ok_and(|s| s.local_addr() == SocketAddr::new(addr, ROCE_PORT));
        (all.len() == SLOTS && all.into_iter().all(is_ours)).then_some(sockets)
    }

    /// The descriptors that a new process of the group is given.
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            Sockets::Queued(queued) => vec![queued.as_fd()],
            Sockets::Open(all) => all.iter().map(AsFd::as_fd).collect(),
        }
    }

    /// Opens the sockets of some slots.
    ///
    /// # Errors
    /// `EMFILE` when the process may not have [`SLOTS`] descriptors more for a moment.
    pub(super) fn open<const N: usize>(&self, slots: [u8; N]) -> io::Result<[RxSocket; N]> {
        let mut all: Vec<Option<OwnedFd>> = self.all()?.into_iter().map(Some).collect();
        let mut opened = Vec::with_capacity(N);
        for slot in slots {
            let fd = all.get_mut(usize::from(slot)).and_then(Option::take);
            opened.push(RxSocket::from_fd(fd.ok_or(Errno::BADF)?)?);
        }
        Ok(opened.try_into().expect("one socket a slot"))
    }

    fn all(&self) -> io::Result<Vec<OwnedFd>> {
        match self {
            Sockets::Queued(queued) => Ok(peek_with_descriptors(queued)?),
            Sockets::Open(all) => all.iter().map(OwnedFd::try_clone).collect(),
        }
    }
}

/// Puts a message with all sockets into the queue of a Unix socket.
fn queue(all: &[OwnedFd]) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (sender, queued) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let all: Vec<BorrowedFd<'_>> = all.iter().map(AsFd::as_fd).collect();
    send_bytes(&sender, &[0], &all)?;
    // Not every system that looks like Linux shows the descriptors of a message to those that peek.
    if peek_with_descriptors(&queued)?.len() != all.len() {
        return Err(io::ErrorKind::Unsupported.into());
    }
    Ok(queued)
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "tests are named function__case")]

    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::soft::udp::RxBatch;

    const ADDR: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 73));

    fn given(sockets: &Sockets) -> Vec<OwnedFd> {
        let descriptors = sockets.descriptors().into_iter();
        descriptors.map(|fd| fd.try_clone_to_owned().unwrap()).collect()
    }

    /// Sends a datagram whose destination QPN lies in a slot, and waits until the socket has it.
    fn expect_datagram(socket: &RxSocket, slot: u8) {
        let sender = UdpSocket::bind((ADDR, 0)).unwrap();
        let mut bytes = [0; 16];
        bytes[5] = slot;
        sender.send_to(&bytes, (ADDR, ROCE_PORT)).unwrap();
        let (mut batch, deadline) = (RxBatch::new(), Instant::now() + Duration::from_secs(60));
        while socket.recv_batch(&mut batch).unwrap() == 0 {
            assert!(Instant::now() < deadline, "slot {slot}");
        }
    }

    #[test]
    fn open__gives_the_sockets_of_the_slots_however_they_are_kept() {
        let queued = Sockets::bind(ADDR).unwrap();
        let open = Sockets::Open(queued.all().unwrap());
        for (sockets, count) in [(queued, 1), (open, SLOTS)] {
            assert_eq!(sockets.descriptors().len(), count);
            let taken = Sockets::from_descriptors(ADDR, given(&sockets)).unwrap();
            drop(sockets);
            let [last, first] = taken.open([SLOTS as u8 - 1, 0]).unwrap();
            expect_datagram(&last, SLOTS as u8 - 1);
            expect_datagram(&first, 0);
            // A slot can be opened again.
            let [again] = taken.open([SLOTS as u8 - 1]).unwrap();
            expect_datagram(&again, SLOTS as u8 - 1);
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
        let mut all = sockets.all().unwrap();
        all.pop();
        assert!(Sockets::from_descriptors(one, all).is_none(), "too few");
        let (_sender, empty) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .unwrap();
        assert!(
            Sockets::from_descriptors(one, vec![empty]).is_none(),
            "no message"
        );
        let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(Sockets::from_descriptors(one, vec![file]).is_none(), "no socket");
        assert!(Sockets::from_descriptors(one, Vec::new()).is_none(), "nothing");
    }
}
