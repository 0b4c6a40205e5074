//! The driver's state for one replica: a session with its server, and the requests in flight.

use std::collections::VecDeque;
use std::sync::Arc;

use rdmux_runtime::Mailbox;
use rdmux_verbs::Memory;

use super::driver::Options;
use super::writer::What;
use rdmux_push::client::{Buffer, MapRequest};
use rdmux_push::{Access, Client, Error, Key, Mapping, Target};

/// Bytes of the buffer for requests in flight.
const BUFFER: u64 = 4 << 20;
/// Identifies log writers to the servers: a mapping for writing ends the connection of the previous writer.
const WRITERS: u64 = u64::from_be_bytes(*b"rdmuxlog");

/// Result of a connecting thread.
pub(super) struct Came {
    pub(super) replica: usize,
    pub(super) session: u64,
    pub(super) acquired: bool,
    pub(super) result: Result<(Client, Mapping), Error>,
}

/// Everything needed to reach the servers.
#[derive(Clone)]
pub(super) struct Dial {
    pub(super) key: Key,
    pub(super) options: Options,
    pub(super) devices: Arc<super::driver::Devices>,
    pub(super) came: Mailbox<Came>,
}

impl Dial {
    /// Connects and maps the region for reading, while others may write.
    pub(super) fn connect(&self, target: &Target) -> Result<(Client, Mapping), Error> {
        let mut first = None;
        for address in target.resolve()? {
            let device = self.devices.towards(address.ip(), self.options.from)?;
            let options = rdmux_push::Options {
                device: Some(device),
                ..rdmux_push::Options::default()
            };
            match Client::connect(address, &self.key, &options) {
                Ok(mut client) => {
                    let request = MapRequest {
                        share: Access::READ | Access::WRITE,
                        ..MapRequest::new(Access::READ)
                    };
                    let mapping = client.map_as(&target.region, &request)?;
                    return Ok((client, mapping));
                }
                Err(error) => {
                    first.get_or_insert(error);
                }
            }
        }
        Err(first.unwrap_or(Error::Io(std::io::ErrorKind::AddrNotAvailable.into())))
    }

    /// Runs `work` on a thread, which reports the result.
    pub(super) fn spawn(
        &self,
        (replica, session): (usize, u64),
        acquired: bool,
        work: impl FnOnce(&Dial) -> Result<(Client, Mapping), Error> + Send + 'static,
    ) -> std::io::Result<()> {
        let dial = self.clone();
        let run = move || {
            let result = work(&dial);
            // Nobody receives it if the log was closed meanwhile.
            dial.came.send(Came {
                replica,
                session,
                acquired,
                result,
            });
        };
        rdmux_verbs::thread::spawn("log-connect", run).map(drop)
    }
}

/// Maps the region for writing and shares it with readers only.
pub(super) fn acquire(mut client: Client, reading: Mapping) -> Result<(Client, Mapping), Error> {
    let request = MapRequest {
        share: Access::READ,
        transfer: WRITERS,
        ..MapRequest::new(Access::READ | Access::WRITE)
    };
    let region = reading.region().clone();
    client.unmap(reading)?;
    let mapping = client.map_as(&region, &request)?;
    Ok((client, mapping))
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
        let turns = self.next + length > BUFFER;
        let lost = if turns { BUFFER - self.next } else { 0 };
        let at = if turns { 0 } else { self.next };
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

/// A session with a replica.
pub(super) struct ReplicaLink {
    pub(super) client: Client,
    pub(super) mapping: Mapping,
    buffer: Buffer,
    room: Room,
    posted: VecDeque<Posted>,
    waiting: VecDeque<What>,
}

impl ReplicaLink {
    pub(super) fn new(client: Client, mapping: Mapping) -> Result<ReplicaLink, Error> {
        let buffer = client.buffer(BUFFER as usize)?;
        Ok(ReplicaLink {
            client,
            mapping,
            buffer,
            room: Room::default(),
            posted: VecDeque::new(),
            waiting: VecDeque::new(),
        })
    }

    /// Accepts a read, write or flush, and posts it once there is room.
    pub(super) fn take(&mut self, what: What) -> Result<(), Error> {
        self.waiting.push_back(what);
        self.post()
    }

    fn post(&mut self) -> Result<(), Error> {
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
            match what {
                What::Write { offset, bytes } => {
                    self.buffer.memory().write(at, bytes)?;
                    let length = bytes.len() as u32;
                    self.client
                        .post_write(&self.mapping, *offset, &self.buffer, at, length, 0)?;
                }
                What::Read { offset, length } => {
                    self.client
                        .post_read(&self.mapping, *offset, &self.buffer, at, *length as u32, 0)?;
                }
                What::Flush { offset, length } => {
                    let kind = self.mapping.strongest();
                    self.client.post_flush(&self.mapping, *offset, *length, kind, 0)?;
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

    /// Polls the oldest request: returns `None` until it is complete, then the bytes if it was a read.
    pub(super) fn poll(&mut self) -> Result<Option<Option<Vec<u8>>>, Error> {
        if self.client.poll_done()?.is_none() {
            if !self.client.is_held(&self.mapping) {
                return Err(Error::LeaseBroken {
                    region: self.mapping.region().clone(),
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
        Ok(Some(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room__a_piece_is_as_long_as_asked_for_and_overlaps_none_in_use() {
        let mut room = Room::default();
        let mut in_use: VecDeque<Piece> = VecDeque::new();
        let (mut turns, mut full) = (0, 0);
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
            turns += u64::from(piece.lost > 0);
            room.take(piece);
            in_use.push_back(piece);
        }
        assert!(turns > 10 && full > 10, "{turns} turns, full {full} times");
        in_use.into_iter().for_each(|piece| room.give_back(piece));
        assert_eq!(room.used, 0);
    }
}
