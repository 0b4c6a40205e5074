//! The sockets of a group. The kernel numbers them in the order in which they were bound, and steers by the number, which is the slot. When
//! a socket is closed, the last one takes its number.
//!
//! Sockets exist in blocks. A process keeps those of its own slot's block and of all lower blocks open, and reads that of its slot. So the
//! numbers of a process's sockets do not change while it lives: below them nothing is closed, and what is closed above moves sockets
//! above. When the last process that has a block ends, that block and all higher ones are closed.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{BLOCK, names};
use crate::udp::{self, ROCE_PORT, RxBatch, RxSocket};

/// Time within which the sockets of a new block must have their numbers.
const GROWTH_TIME: Duration = Duration::from_secs(1);

/// The sockets by slot: the first blocks.
#[derive(Debug)]
pub(super) struct Sockets {
    addr: IpAddr,
    sockets: Vec<RxSocket>,
}

impl Sockets {
    /// Returns a place for the sockets of a group that exists.
    pub(super) fn new(addr: IpAddr) -> Sockets {
        let sockets = Vec::new();
        Sockets { addr, sockets }
    }

    /// Binds the first block of a new group. The caller is the holder of the address.
    ///
    /// # Errors
    /// Those of [`RxSocket::bind`].
    pub(super) fn bind(addr: IpAddr) -> io::Result<Sockets> {
        let local = SocketAddr::new(addr, ROCE_PORT);
        // A socket that shares with nobody proves that no other socket is bound: neither those of a former holder's survivors, nor one of a
        // program that would share the port and so shift all slots.
        drop(RxSocket::bind(local, false)?);
        let first = RxSocket::bind(local, true)?;
        udp::attach_qpn_filter(&first)?;
        let mut sockets = vec![first];
        while sockets.len() < BLOCK.into() {
            sockets.push(RxSocket::bind(local, true)?);
        }
        Ok(Sockets { addr, sockets })
    }

    /// Returns the number of blocks that this process has.
    pub(super) fn blocks(&self) -> u8 {
        (self.sockets.len() / usize::from(BLOCK)) as u8
    }

    /// Returns the descriptors of a block, for another process; `None` if this process does not have it.
    pub(super) fn block(&self, block: u8) -> Option<Vec<BorrowedFd<'_>>> {
        let sockets = self.sockets.chunks(BLOCK.into()).nth(block.into())?;
        Some(sockets.iter().map(AsFd::as_fd).collect())
    }

    /// Adds the next block, which another process of the group has given. Returns false for anything else.
    pub(super) fn add(&mut self, descriptors: Vec<OwnedFd>) -> bool {
        let block: io::Result<Vec<RxSocket>> = descriptors.into_iter().map(RxSocket::from_fd).collect();
        let is_ours = |socket: &RxSocket| socket.local_addr() == SocketAddr::new(self.addr, ROCE_PORT);
        let Ok(block) = block else { return false };
        let is_block = block.len() == BLOCK.into() && block.iter().all(is_ours);
        if is_block {
            self.sockets.extend(block);
        }
        is_block
    }

    /// Adds the next block, which this process has bound.
    pub(super) fn add_grown(&mut self, block: Vec<RxSocket>) {
        self.sockets.extend(block);
    }

    /// Binds the sockets of the next block.
    ///
    /// # Errors
    /// Those of [`RxSocket::bind`].
    pub(super) fn grow(&self) -> io::Result<Box<Growth>> {
        let local = SocketAddr::new(self.addr, ROCE_PORT);
        let sender = UdpSocket::bind((self.addr, 0))?;
        sender.set_nonblocking(true)?;
        let bound = (0..BLOCK).map(|_| RxSocket::bind(local, true));
        Ok(Box::new(Growth {
            local,
            sockets: bound.collect::<io::Result<_>>()?,
            first_slot: self.blocks() * BLOCK,
            places: [None; BLOCK as usize],
            sender,
            nonce: names::random(),
            deadline: Instant::now() + GROWTH_TIME,
        }))
    }

    /// Duplicates the socket of a slot. This process has the slot's block.
    ///
    /// # Errors
    /// Those of `fcntl(F_DUPFD_CLOEXEC)`.
    pub(super) fn of_slot(&self, slot: u8) -> io::Result<RxSocket> {
        self.sockets[usize::from(slot)].try_clone()
    }
}

/// Sockets that are bound, but may not have the numbers of the next block.
///
/// Between the last of the lower blocks and these there may be others: those of a holder that has just died while it did the same, of a
/// stopped process that has more blocks than this one, or of another program. When such sockets are closed, these take their numbers, in
/// another order. So this process sends a datagram to each slot of the block, and looks on which socket it arrives. A socket that has a
/// number of the block keeps it: only the last of all sockets moves, and as long as others are between, that one is above the block.
#[derive(Debug)]
pub(super) struct Growth {
    local: SocketAddr,
    sockets: Vec<RxSocket>,
    first_slot: u8,
    /// The index of each slot's socket, as far as it is known.
    places: [Option<usize>; BLOCK as usize],
    sender: UdpSocket,
    nonce: u64,
    deadline: Instant,
}

/// State of a growth.
#[derive(Debug)]
pub(super) enum Grown {
    /// The sockets of the block, by slot.
    Block(Vec<RxSocket>),
    NotYet(Box<Growth>),
}

impl Growth {
    /// The descriptors on which datagrams arrive.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sockets.iter().map(AsFd::as_fd)
    }

    /// Sends to the slots whose sockets are not known, and receives what has arrived.
    ///
    /// # Errors
    /// `AddrInUse` when the sockets do not have the numbers of the block in time; those of sending and receiving.
    pub(super) fn proceed(mut self: Box<Self>, batch: &mut RxBatch) -> io::Result<Grown> {
        for (slot, place) in (self.first_slot..).zip(&self.places) {
            if place.is_none() {
                match self.sender.send_to(&probe(slot, self.nonce), self.local) {
                    Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                    _ => {}
                }
            }
        }
        for (i, socket) in self.sockets.iter().enumerate() {
            socket.recv_batch(batch)?;
            for bytes in batch.iter().flat_map(|datagram| datagram.segments()) {
                for (slot, place) in (self.first_slot..).zip(&mut self.places) {
                    if bytes == probe(slot, self.nonce) {
                        *place = Some(i);
                    }
                }
            }
        }
        if self.places.iter().all(Option::is_some) {
            let mut sockets: Vec<Option<RxSocket>> = self.sockets.into_iter().map(Some).collect();
            let by_slot = self.places.iter().flatten().map(|i| sockets[*i].take());
            // A socket has one number.
            let by_slot: Option<Vec<RxSocket>> = by_slot.collect();
            return by_slot.map(Grown::Block).ok_or(Errno::ADDRINUSE.into());
        }
        if Instant::now() >= self.deadline {
            return Err(Errno::ADDRINUSE.into());
        }
        Ok(Grown::NotYet(self))
    }
}

/// Returns a datagram to the QPNs of a slot, which no process takes for a packet.
fn probe(slot: u8, nonce: u64) -> [u8; 16] {
    let mut bytes = [0xff; 16];
    // The QPN of the destination begins with byte 5.
    bytes[5] = slot;
    bytes[8..].copy_from_slice(&nonce.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "tests are named function__case")]

    use std::collections::hash_map::RandomState;
    use std::hash::BuildHasher;
    use std::net::Ipv4Addr;

    use super::super::BLOCKS;
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    fn address(host: u8) -> IpAddr {
        Ipv4Addr::new(127, 0, 0, host).into()
    }

    fn given(sockets: &Sockets, block: u8) -> Vec<OwnedFd> {
        let descriptors = sockets.block(block).unwrap().into_iter();
        descriptors.map(|fd| fd.try_clone_to_owned().unwrap()).collect()
    }

    /// Lets a growth proceed to its end.
    fn finish(growth: Box<Growth>) -> io::Result<Vec<RxSocket>> {
        let (mut batch, mut growth) = (RxBatch::new(), growth);
        loop {
            match growth.proceed(&mut batch)? {
                Grown::Block(block) => return Ok(block),
                Grown::NotYet(more) => growth = more,
            }
        }
    }

    fn grow(sockets: &mut Sockets) {
        let block = finish(sockets.grow().unwrap()).unwrap();
        sockets.add_grown(block);
    }

    /// Checks that each slot's socket receives what is sent to the slot.
    fn check(sockets: &Sockets) {
        let addr = sockets.addr;
        let sender = UdpSocket::bind((addr, 0)).unwrap();
        for slot in 0..sockets.sockets.len() as u8 {
            let socket = sockets.of_slot(slot).unwrap();
            let sent = probe(slot, names::random());
            sender.send_to(&sent, (addr, ROCE_PORT)).unwrap();
            let (mut batch, deadline) = (RxBatch::new(), Instant::now() + DEADLINE);
            loop {
                socket.recv_batch(&mut batch).unwrap();
                if batch
                    .iter()
                    .any(|datagram| datagram.segments().any(|bytes| bytes == sent))
                {
                    break;
                }
                assert!(Instant::now() < deadline, "slot {slot}");
            }
        }
    }

    #[test]
    fn add__gives_each_slot_its_socket() {
        let addr = address(73);
        let mut bound = Sockets::bind(addr).unwrap();
        (1..BLOCKS).for_each(|_| grow(&mut bound));
        let mut taken = Sockets::new(addr);
        assert!((0..BLOCKS).all(|block| taken.add(given(&bound, block))));
        assert!(taken.block(BLOCKS).is_none());
        drop(bound);
        check(&taken);
    }

    #[test]
    fn add__of_anything_else() {
        let [one, other] = [74, 75].map(address);
        let sockets = Sockets::bind(one).unwrap();
        assert!(!Sockets::new(other).add(given(&sockets, 0)), "another address");
        let mut all = given(&sockets, 0);
        let last = all.pop().unwrap();
        assert!(!Sockets::new(one).add(all), "too few");
        let mut all = given(&sockets, 0);
        all.push(last);
        assert!(!Sockets::new(one).add(all), "too many");
        let mut all = given(&sockets, 0);
        all[1] = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(!Sockets::new(one).add(all), "no socket");
    }

    #[test]
    fn grow__beside_the_socket_of_another_program() {
        let mut sockets = Sockets::bind(address(76)).unwrap();
        let foreign = RxSocket::bind(SocketAddr::new(sockets.addr, ROCE_PORT), true).unwrap();
        let refused = finish(sockets.grow().unwrap()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        check(&sockets);
        // The sockets of a growth get their numbers when it ends.
        let growth = sockets.grow().unwrap();
        drop(foreign);
        sockets.add_grown(finish(growth).unwrap());
        check(&sockets);
        let _foreign = RxSocket::bind(SocketAddr::new(sockets.addr, ROCE_PORT), true).unwrap();
        check(&sockets);
    }

    /// A process that has more blocks than the others dies, perhaps while it binds one more. Its sockets are closed in any order while a
    /// survivor binds its own.
    #[test]
    fn grow__while_the_sockets_of_a_dead_process_are_closed() {
        let seed = RandomState::new().hash_one(0);
        println!("seed {seed}");
        let mut state = seed;
        let mut below = |bound: usize| {
            // Knuth's MMIX generator.
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % bound
        };
        // A child that another test starts has the sockets of the last round until it executes its program.
        let bind = || {
            let deadline = Instant::now() + DEADLINE;
            loop {
                match Sockets::bind(address(77)) {
                    Err(e) if e.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {}
                    bound => return bound.unwrap(),
                }
            }
        };
        for round in 0..100 {
            let mut sockets = bind();
            let local = SocketAddr::new(sockets.addr, ROCE_PORT);
            let mut dead: Vec<RxSocket> = (0..below(40))
                .map(|_| RxSocket::bind(local, true).unwrap())
                .collect();
            let close_some = |dead: &mut Vec<RxSocket>, below: &mut dyn FnMut(usize) -> usize| {
                for _ in 0..below(3).min(dead.len()) {
                    dead.swap_remove(below(dead.len()));
                }
            };
            let mut growth = sockets.grow().unwrap();
            let mut batch = RxBatch::new();
            let block = loop {
                growth = match growth.proceed(&mut batch) {
                    Ok(Grown::Block(block)) => break block,
                    Ok(Grown::NotYet(more)) => more,
                    Err(e) if e.kind() == io::ErrorKind::AddrInUse => sockets.grow().unwrap(),
                    Err(e) => panic!("round {round}: {e}"),
                };
                close_some(&mut dead, &mut below);
            };
            sockets.add_grown(block);
            check(&sockets);
            drop(dead);
            check(&sockets);
            grow(&mut sockets);
            check(&sockets);
        }
    }
}
