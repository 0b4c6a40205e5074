//! The driver's state for one replica: the way to its server, then the requests in flight.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rdmux_push::client::{Buffer, MapRequest, Part, PendingClient, PendingMap};
use rdmux_push::{Access, Client, Domain, Error, Key, Mapping, Name, local_address_towards};
use rdmux_verbs::{Device, Memory};

use super::writer::What;

/// Bytes of the buffer for requests in flight.
const BUFFER: u64 = 4 << 20;
/// Identifies log writers to the servers: a mapping for writing ends the connection of the previous writer.
const WRITERS: u64 = u64::from_be_bytes(*b"rdmuxlog");

/// Devices by their own address: all clients on an address share its device.
#[derive(Debug, Default)]
pub(super) struct Devices(HashMap<IpAddr, Device>);

impl Devices {
    pub(super) fn towards(&mut self, peer: IpAddr, from: Option<IpAddr>) -> Result<Device, Error> {
        let route = match from {
            Some(from) => from,
            None => local_address_towards(peer)?,
        };
        if let Some(device) = self.0.get(&route) {
            return Ok(device.clone());
        }
        // If another user has the loopback address that the route takes, the server's own address may work.
        let device = match Device::open(route) {
            Err(_) if from.is_none() && peer.is_loopback() => Device::open(peer)?,
            device => device?,
        };
        self.0.insert(route, device.clone());
        Ok(device)
    }
}

/// Everything needed to reach the servers.
pub(super) struct Dial {
    pub(super) key: Key,
    pub(super) from: Option<IpAddr>,
    pub(super) devices: Devices,
}

impl Dial {
    fn start(&mut self, address: SocketAddr) -> Result<PendingClient, Error> {
        let options = rdmux_push::Options {
            device: Some(self.devices.towards(address.ip(), self.from)?),
            ..rdmux_push::Options::default()
        };
        Client::start_connect(address, &self.key, &options)
    }
}

/// A session with a replica, which begins with connecting to its server. Dropping it ends it at once.
pub(super) struct Session {
    pub(super) number: u64,
    step: Step,
}

enum Step {
    /// The name of the server is being resolved.
    Resolving,
    Connecting(Box<Attempt>),
    Linked(Box<ReplicaLink>),
}

/// News of a session.
pub(super) enum SessionEvent {
    /// The server has accepted the client.
    Accepted,
    /// The region is mapped for reading: its domain, and its size in bytes.
    Mapped(Domain, u64),
    /// The region is mapped for writing.
    Acquired,
    /// The oldest request is complete; the bytes if it was a read.
    Done(Option<Vec<u8>>),
}

impl Session {
    pub(super) fn new(number: u64) -> Session {
        Session {
            number,
            step: Step::Resolving,
        }
    }

    pub(super) fn is_resolving(&self) -> bool {
        matches!(self.step, Step::Resolving)
    }

    /// Connects to the server, which has these addresses.
    pub(super) fn connect(&mut self, addresses: Vec<SocketAddr>) {
        self.step = Step::Connecting(Box::new(Attempt::new(addresses)));
    }

    /// Returns what has happened next, without waiting.
    pub(super) fn poll(&mut self, dial: &mut Dial, region: &Name) -> Result<Option<SessionEvent>, Error> {
        match &mut self.step {
            Step::Resolving => Ok(None),
            Step::Connecting(attempt) => {
                let Some(client) = attempt.poll(dial)? else {
                    return Ok(None);
                };
                self.step = Step::Linked(Box::new(ReplicaLink::new(client, region)?));
                Ok(Some(SessionEvent::Accepted))
            }
            Step::Linked(link) => link.poll(),
        }
    }

    /// Accepts an action on the region.
    pub(super) fn take(&mut self, what: What) -> Result<(), Error> {
        match &mut self.step {
            Step::Linked(link) if what == What::Acquire => link.acquire(),
            Step::Linked(link) => link.take(what),
            Step::Resolving | Step::Connecting(_) => Ok(()),
        }
    }

    /// Returns whether the region is mapped, or was for reading.
    pub(super) fn is_connected(&self) -> bool {
        match &self.step {
            Step::Linked(link) => link.acquires || matches!(link.hold, Hold::Mapped(_)),
            Step::Resolving | Step::Connecting(_) => false,
        }
    }

    /// Makes the descriptor readable for what happens from now on. It is for what has not led to an event of [`Session::poll`].
    pub(super) fn arm(&mut self) -> Result<(), Error> {
        match &mut self.step {
            Step::Linked(link) => link.client.arm(),
            // Polling has armed that of an attempt.
            Step::Resolving | Step::Connecting(_) => Ok(()),
        }
    }

    /// Returns the descriptor to sleep on.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.step {
            Step::Resolving => None,
            Step::Connecting(attempt) => attempt.pending.as_ref().map(AsFd::as_fd),
            Step::Linked(link) => Some(link.client.as_fd()),
        }
    }

    /// Returns the time until which to sleep.
    pub(super) fn due(&self) -> Option<Instant> {
        match &self.step {
            Step::Resolving => None,
            Step::Connecting(attempt) => attempt.pending.as_ref()?.due(),
            Step::Linked(link) => Some(link.client.due()),
        }
    }

    /// Ends the session: with a goodbye if no request is in flight.
    pub(super) fn close(self) {
        // A goodbye would wait for a replica that is behind, and for ever for one whose disk hangs.
        if let Step::Linked(link) = self.step
            && matches!(link.hold, Hold::Mapped(_))
            && link.client.in_flight() == 0
        {
            link.client.close();
        }
    }
}

/// An attempt to connect to a replica's server, by one of its addresses after the other.
struct Attempt {
    addresses: std::vec::IntoIter<SocketAddr>,
    pending: Option<PendingClient>,
    /// The error at the first address.
    first: Option<Error>,
}

impl Attempt {
    fn new(addresses: Vec<SocketAddr>) -> Attempt {
        Attempt {
            addresses: addresses.into_iter(),
            pending: None,
            first: None,
        }
    }

    /// Moves the attempt on, without waiting.
    fn poll(&mut self, dial: &mut Dial) -> Result<Option<Client>, Error> {
        loop {
            let started = match &mut self.pending {
                Some(pending) => match pending.poll() {
                    None => return Ok(None),
                    Some(Ok(client)) => return Ok(Some(client)),
                    Some(Err(error)) => Err(error),
                },
                None => match self.addresses.next() {
                    Some(address) => dial.start(address),
                    None => {
                        let none = || Error::Io(std::io::ErrorKind::AddrNotAvailable.into());
                        return Err(self.first.take().unwrap_or_else(none));
                    }
                },
            };
            self.pending = match started {
                Ok(pending) => Some(pending),
                Err(error) => {
                    self.first.get_or_insert(error);
                    None
                }
            };
        }
    }
}

/// A request's part of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// First byte.
    at: u64,
    /// Bytes.
    length: u64,
    /// Bytes before it that stay unused as long as it is in use.
    lost: u64,
}

/// The part of the buffer that is in use: a ring, freed in the order of allocation.
#[derive(Debug, Default)]
struct Room {
    used: u64,
    next: u64,
}

impl Room {
    /// Returns the piece where `length` bytes fit, if there is any; [`Room::take`] allocates it.
    fn find(&self, length: u64) -> Option<Piece> {
        // A request's bytes do not wrap around the end of the buffer: it skips the bytes that remain there.
        let wraps = self.next + length > BUFFER;
        let lost = if wraps { BUFFER - self.next } else { 0 };
        let at = if wraps { 0 } else { self.next };
        (self.used + lost + length <= BUFFER).then_some(Piece { at, length, lost })
    }

    fn take(&mut self, piece: Piece) {
        self.next = piece.at + piece.length;
        self.used += piece.lost + piece.length;
    }

    fn give_back(&mut self, piece: Piece) {
        self.used -= piece.lost + piece.length;
    }
}

/// A request in flight.
struct Posted {
    piece: Piece,
    is_read: bool,
}

/// A connection to a replica's server, and the mapping of the region.
struct ReplicaLink {
    client: Client,
    region: Name,
    hold: Hold,
    /// Set once the region was asked for for writing.
    acquires: bool,
    buffer: Buffer,
    room: Room,
    posted: VecDeque<Posted>,
    waiting: VecDeque<What>,
}

enum Hold {
    Pending(PendingMap),
    Mapped(Mapping),
}

impl ReplicaLink {
    /// Asks for the region for reading, while others may write.
    fn new(mut client: Client, region: &Name) -> Result<ReplicaLink, Error> {
        let request = MapRequest {
            share: Access::READ | Access::WRITE,
            ..MapRequest::new(Access::READ)
        };
        Ok(ReplicaLink {
            hold: Hold::Pending(client.start_map(region, &request)?),
            acquires: false,
            buffer: client.buffer(BUFFER as usize)?,
            client,
            region: region.clone(),
            room: Room::default(),
            posted: VecDeque::new(),
            waiting: VecDeque::new(),
        })
    }

    /// Asks for the region for writing, and shares it with readers only.
    fn acquire(&mut self) -> Result<(), Error> {
        let request = MapRequest {
            share: Access::READ,
            transfer: WRITERS,
            ..MapRequest::new(Access::READ | Access::WRITE)
        };
        if let Hold::Mapped(reading) = &self.hold {
            self.client.start_unmap(reading.clone())?;
        }
        self.hold = Hold::Pending(self.client.start_map(&self.region, &request)?);
        self.acquires = true;
        Ok(())
    }

    /// Accepts a read, write or flush, and posts it once there is room.
    fn take(&mut self, what: What) -> Result<(), Error> {
        self.waiting.push_back(what);
        self.post()
    }

    fn post(&mut self) -> Result<(), Error> {
        let Hold::Mapped(mapping) = &self.hold else {
            return Ok(());
        };
        while let Some(what) = self.waiting.front() {
            let length = match what {
                What::Write { bytes, .. } => bytes.len() as u64,
                What::Read { length, .. } => *length,
                _ => 0,
            };
            let Some(piece) = self.room.find(length) else {
                return Ok(());
            };
            if self.client.in_flight() + 1 >= rdmux_push::client::DEPTH_MAX {
                return Ok(());
            }
            let at = piece.at;
            if let (What::Write { offset, bytes }, Some(What::Flush { offset: from, length })) =
                (what, self.waiting.get(1))
            {
                self.buffer.memory().write(at, bytes)?;
                let part = Part {
                    offset: *offset,
                    buffer: &self.buffer,
                    from: at,
                    length: bytes.len() as u32,
                };
                let (range, kind) = ((*from, *length), mapping.strongest());
                self.client
                    .post_write_and_flush(mapping, part, range, kind, None, [0; 2])?;
                self.room.take(piece);
                let of_flush = Piece {
                    at: 0,
                    length: 0,
                    lost: 0,
                };
                for piece in [piece, of_flush] {
                    self.posted.push_back(Posted {
                        piece,
                        is_read: false,
                    });
                    self.waiting.pop_front();
                }
                continue;
            }
            match what {
                What::Write { offset, bytes } => {
                    self.buffer.memory().write(at, bytes)?;
                    let length = bytes.len() as u32;
                    self.client
                        .post_write(mapping, *offset, &self.buffer, at, length, 0)?;
                }
                What::Read { offset, length } => {
                    self.client
                        .post_read(mapping, *offset, &self.buffer, at, *length as u32, 0)?;
                }
                What::Flush { offset, length } => {
                    let kind = mapping.strongest();
                    self.client.post_flush(mapping, *offset, *length, kind, 0)?;
                }
                What::Connect | What::Acquire | What::Disconnect => {}
            }
            let is_read = matches!(what, What::Read { .. });
            self.room.take(piece);
            self.posted.push_back(Posted { piece, is_read });
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// Returns what has happened next, without waiting.
    fn poll(&mut self) -> Result<Option<SessionEvent>, Error> {
        let mapping = match &self.hold {
            Hold::Mapped(mapping) => mapping,
            Hold::Pending(pending) => {
                let Some(mapping) = self.client.poll_map(pending)? else {
                    return Ok(None);
                };
                let event = match self.acquires {
                    true => SessionEvent::Acquired,
                    false => SessionEvent::Mapped(mapping.domain(), mapping.region_bytes()),
                };
                self.hold = Hold::Mapped(mapping);
                self.post()?;
                return Ok(Some(event));
            }
        };
        if self.client.poll_done()?.is_none() {
            if !self.client.is_held(mapping) {
                return Err(Error::LeaseBroken {
                    region: self.region.clone(),
                });
            }
            return Ok(None);
        }
        let Some(posted) = self.posted.pop_front() else {
            return Ok(None);
        };
        let mut bytes = None;
        if posted.is_read {
            let mut read = vec![0; posted.piece.length as usize];
            self.buffer.memory().read(posted.piece.at, &mut read)?;
            bytes = Some(read);
        }
        self.room.give_back(posted.piece);
        self.post()?;
        Ok(Some(SessionEvent::Done(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room__a_piece_is_as_long_as_asked_for_and_overlaps_none_in_use() {
        let mut room = Room::default();
        let mut in_use: VecDeque<Piece> = VecDeque::new();
        let (mut wraps, mut full) = (0, 0);
        for step in 0..2_000u64 {
            let length = [8192, 256 << 10, 0, 8, 200_001][step as usize % 5];
            while let Some(oldest) = in_use.front().copied()
                && (room.find(length).is_none() || in_use.len() > 48)
            {
                full += u64::from(in_use.len() <= 48);
                room.give_back(oldest);
                in_use.pop_front();
            }
            let piece = room.find(length).unwrap();
            assert_eq!(piece.length, length, "step {step}");
            assert!(piece.at + length <= BUFFER, "step {step}: {piece:?}");
            for other in &in_use {
                let apart = piece.at >= other.at + other.length || other.at >= piece.at + length;
                assert!(apart, "step {step}: {piece:?} and {other:?}");
            }
            wraps += u64::from(piece.lost > 0);
            room.take(piece);
            in_use.push_back(piece);
        }
        assert!(wraps > 10 && full > 10, "{wraps} wraps, full {full} times");
        in_use.into_iter().for_each(|piece| room.give_back(piece));
        assert_eq!(room.used, 0);
    }
}
