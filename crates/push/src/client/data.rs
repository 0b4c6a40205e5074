//! Data requests: by RDMA through a mapping, or by message.

use std::sync::Arc;

use rdmux_runtime as runtime;
use rdmux_verbs::{Memory, Operation, Placement, PostError, Selectivity, SgeList};
use rdmux_wire::push::{Access, Conflict, DATA_LEN_MAX, Message, Name};

use super::lease::Path;
use super::{Asked, Buffer, Client, Error, Mapping, SCRATCH_BYTES, Way};

/// Maximum number of data requests in flight.
pub const DEPTH_MAX: usize = 256;

/// Kind of a data request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A write.
    Write,
    /// A read.
    Read,
    /// A flush.
    Flush,
}

/// A data request that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// The number that the caller gave it.
    pub token: u64,
    /// Its kind.
    pub kind: Kind,
}

/// Bytes to write to a region.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// Offset in the region.
    pub offset: u64,
    /// Where the bytes are.
    pub buffer: &'a Buffer,
    /// Offset in the buffer.
    pub from: u64,
    /// Number of bytes.
    pub length: u32,
}

/// A data request.
#[derive(Debug)]
pub(super) struct Entry {
    done: Done,
    state: EntryState,
}

#[derive(Debug)]
enum EntryState {
    /// An RDMA request, through the mapping of this number, and its buffer, which the device uses until the
    /// request is done: it reads a write's bytes when it sends them, and again when it repeats them.
    Posted(u64, Option<Arc<runtime::Buffer>>),
    /// A request by message, of which `left` messages have no answer.
    Told {
        left: usize,
        /// Set if the messages hold back RDMA requests and flushes.
        ordinary: bool,
        /// The first failure.
        failed: Option<Error>,
    },
    Done,
    Failed(Error),
}

/// The place for the bytes of an answer.
#[derive(Debug)]
pub(super) struct Received {
    buffer: Arc<runtime::Buffer>,
    at: u64,
    length: usize,
}

impl Entry {
    pub(super) fn is_done(&self) -> bool {
        matches!(self.state, EntryState::Done)
    }

    /// Returns whether the request is done or has failed.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, EntryState::Done | EntryState::Failed(_))
    }

    pub(super) fn token(&self) -> u64 {
        self.done.token
    }
}

impl Client {
    /// Returns the number of data requests that are not done, or not taken by [`Client::next_done`].
    pub fn in_flight(&self) -> usize {
        self.entries.len()
    }

    /// Writes `length` bytes of `buffer`, from `from` on, to `offset` of the region.
    pub fn post_write(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        buffer: &Buffer,
        from: u64,
        length: u32,
        token: u64,
    ) -> Result<(), Error> {
        mapping.needs(Access::WRITE, "write")?;
        let (va, rkey) = mapping.locate(offset, length.into())?;
        if self.path_after_messages(mapping)? == Path::Message {
            self.wait_over(mapping)?;
            let region = mapping.region.clone();
            return self.post_ordinary_write(
                &region,
                offset,
                buffer,
                from,
                length,
                Placement::empty(),
                token,
            );
        }
        let operation = Operation::Write { va, rkey, imm: None };
        let sges = buffer.0.sge(from, length).into();
        self.post(mapping, operation, sges, Some(buffer), token, Kind::Write)
    }

    /// Reads `length` bytes at `offset` of the region to `to` of `buffer`.
    pub fn post_read(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        buffer: &Buffer,
        to: u64,
        length: u32,
        token: u64,
    ) -> Result<(), Error> {
        mapping.needs(Access::READ, "read")?;
        let (va, rkey) = mapping.locate(offset, length.into())?;
        if self.path_after_messages(mapping)? == Path::Message {
            self.wait_over(mapping)?;
            let region = mapping.region.clone();
            return self.post_ordinary_read(&region, offset, buffer, to, length, token);
        }
        let operation = Operation::Read { va, rkey };
        let sges = buffer.0.sge(to, length).into();
        self.post(mapping, operation, sges, Some(buffer), token, Kind::Read)
    }

    /// Brings earlier writes to where `placement` says, by the way of [`super::Options::way`] or the best that the mapping
    /// offers. A mapping whose lease is over is flushed by message.
    pub fn post_flush(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        length: u64,
        placement: Placement,
        token: u64,
    ) -> Result<(), Error> {
        self.post_flush_by(mapping, offset, length, placement, self.options.way, token)
    }

    /// Like [`Client::post_flush`], but by `way`.
    pub fn post_flush_by(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        length: u64,
        placement: Placement,
        way: Option<Way>,
        token: u64,
    ) -> Result<(), Error> {
        mapping.needs(Access::WRITE, "write")?;
        let way = mapping.way(placement, way)?;
        // The flush also covers writes by message.
        self.settle()?;
        let by_rdma = if matches!(self.path(mapping), Ok(Path::Rdma)) {
            self.rdma_flush(mapping, offset, length, placement, way)?
        } else {
            None
        };
        if let Some((operation, sges)) = by_rdma {
            return self.post(mapping, operation, sges, None, token, Kind::Flush);
        }
        mapping.extent(offset, length)?;
        if mapping.connection != self.connection {
            return self.path(mapping).map(drop);
        }
        let message = Message::Flush {
            mapping: mapping.id,
            offset,
            length,
            placement,
        };
        let entry = self.begin(token, Kind::Flush, 1, false)?;
        self.tell(message, Asked::Entry(entry, None))
    }

    /// Writes as [`Client::post_write`] does, and then flushes the range (offset, length) as [`Client::post_flush_by`] does, or by the
    /// way of [`super::Options::way`]. Where both go by RDMA they leave together, in one datagram if they fit, and one response answers both. Each completes with its
    /// token, the write first.
    pub fn post_write_and_flush(
        &mut self,
        mapping: &Mapping,
        part: Part<'_>,
        (offset, length): (u64, u64),
        placement: Placement,
        way: Option<Way>,
        tokens: [u64; 2],
    ) -> Result<(), Error> {
        mapping.needs(Access::WRITE, "write")?;
        let way = way.or(self.options.way);
        let chosen = mapping.way(placement, way)?;
        let by_rdma = if self.path_after_messages(mapping)? == Path::Rdma {
            self.rdma_flush(mapping, offset, length, placement, chosen)?
        } else {
            None
        };
        let Some(flush) = by_rdma else {
            let Part { buffer, from, .. } = part;
            self.post_write(mapping, part.offset, buffer, from, part.length, tokens[0])?;
            return self.post_flush_by(mapping, offset, length, placement, way, tokens[1]);
        };
        if self.entries.len() + 2 > DEPTH_MAX {
            return Err(PostError::QueueFull.into());
        }
        let (va, rkey) = mapping.locate(part.offset, part.length.into())?;
        let write = Operation::Write { va, rkey, imm: None };
        let sges = part.buffer.0.sge(part.from, part.length).into();
        let number = self.first_entry + self.entries.len() as u64 + 1;
        self.link.connection.post_pair((write, sges), number, flush)?;
        let buffer = Some(part.buffer.0.clone());
        self.enter_posted(mapping, buffer, tokens[0], Kind::Write)?;
        self.enter_posted(mapping, None, tokens[1], Kind::Flush)
    }

    /// Returns the RDMA request by which a range is flushed in a way; `None` for a way by message.
    fn rdma_flush(
        &self,
        mapping: &Mapping,
        offset: u64,
        length: u64,
        placement: Placement,
        way: Way,
    ) -> Result<Option<(Operation, SgeList)>, Error> {
        match way {
            Way::Flush => {
                let (va, rkey) = mapping.locate(offset, length)?;
                let operation = Operation::Flush {
                    va,
                    rkey,
                    length: length as u32,
                    placement,
                    selectivity: Selectivity::Range,
                };
                Ok(Some((operation, SgeList::EMPTY)))
            }
            // Any bytes will do: the READ is answered after everything before it was placed.
            Way::ReadAfterWrite => {
                mapping.extent(offset, length)?;
                let bytes = length.min(SCRATCH_BYTES as u64) as u32;
                let (va, rkey) = mapping.locate(offset, bytes.into())?;
                let sges = self.scratch.sge(0, bytes).into();
                Ok(Some((Operation::Read { va, rkey }, sges)))
            }
            Way::SoftwareFlush => Ok(None),
        }
    }

    /// Writes by message: without a mapping, through the server's processor. With a `placement`, the bytes are there when the
    /// request is done. Breaks conflicting leases of others.
    #[expect(
        clippy::too_many_arguments,
        reason = "those of a write, and what becomes of it"
    )]
    pub fn post_ordinary_write(
        &mut self,
        region: &Name,
        offset: u64,
        buffer: &Buffer,
        from: u64,
        length: u32,
        placement: Placement,
        token: u64,
    ) -> Result<(), Error> {
        let pieces = pieces(offset, length);
        let mut messages = Vec::with_capacity(pieces.len());
        for (at, bytes) in pieces {
            let mut data = vec![0; bytes];
            buffer.memory().read(from + (at - offset), &mut data)?;
            messages.push(Message::Write {
                region: region.clone(),
                offset: at,
                placement,
                conflict: Conflict::Break,
                bytes: data,
            });
        }
        let entry = self.begin(token, Kind::Write, messages.len(), true)?;
        for message in messages {
            self.tell(message, Asked::Entry(entry, None))?;
        }
        Ok(())
    }

    /// Reads by message: without a mapping. Breaks conflicting leases of others.
    pub fn post_ordinary_read(
        &mut self,
        region: &Name,
        offset: u64,
        buffer: &Buffer,
        to: u64,
        length: u32,
        token: u64,
    ) -> Result<(), Error> {
        let pieces = pieces(offset, length);
        let entry = self.begin(token, Kind::Read, pieces.len(), true)?;
        for (at, bytes) in pieces {
            let message = Message::Read {
                region: region.clone(),
                offset: at,
                length: bytes as u32,
                conflict: Conflict::Break,
            };
            let received = Received {
                buffer: buffer.0.clone(),
                at: to + (at - offset),
                length: bytes,
            };
            self.tell(message, Asked::Entry(entry, Some(received)))?;
        }
        Ok(())
    }

    /// Waits until a mapping's keys are known to be invalid: then no request posted before can take effect after later ones.
    fn wait_over(&mut self, mapping: &Mapping) -> Result<(), Error> {
        while mapping.direct && !self.is_over(mapping) {
            self.handle_next()?;
        }
        Ok(())
    }

    /// Waits for the ordinary reads and writes: the server's processor acts on a message some time after its arrival, and later
    /// requests would overtake it.
    fn settle(&mut self) -> Result<(), Error> {
        while self.ordinary > 0 {
            self.handle_next()?;
        }
        Ok(())
    }

    /// Returns the path of a request that may be posted: the lease may end while this waits for earlier messages.
    fn path_after_messages(&mut self, mapping: &Mapping) -> Result<Path, Error> {
        if self.path(mapping)? == Path::Rdma {
            self.settle()?;
        }
        self.path(mapping)
    }

    /// Waits for a completion and handles it.
    pub(super) fn handle_next(&mut self) -> Result<(), Error> {
        if let Some(wc) = self.poll()? {
            self.handle(&wc)?;
        }
        Ok(())
    }

    /// Begins a data request that takes `left` messages.
    fn begin(&mut self, token: u64, kind: Kind, left: usize, ordinary: bool) -> Result<u64, Error> {
        let state = match left {
            0 => EntryState::Done,
            left => EntryState::Told {
                left,
                ordinary,
                failed: None,
            },
        };
        let entered = self.enter(token, kind, state)?;
        self.ordinary += usize::from(ordinary && left > 0);
        Ok(entered)
    }

    fn enter(&mut self, token: u64, kind: Kind, state: EntryState) -> Result<u64, Error> {
        if self.entries.len() >= DEPTH_MAX {
            return Err(PostError::QueueFull.into());
        }
        let done = Done { token, kind };
        self.entries.push_back(Entry { done, state });
        Ok(self.first_entry + self.entries.len() as u64 - 1)
    }

    fn post(
        &mut self,
        mapping: &Mapping,
        operation: Operation,
        sges: SgeList,
        buffer: Option<&Buffer>,
        token: u64,
        kind: Kind,
    ) -> Result<(), Error> {
        self.settle()?;
        if self.path(mapping)? != Path::Rdma {
            // The lease ended during this wait.
            return Err(Error::LeaseBroken {
                region: mapping.region.clone(),
            });
        }
        if self.entries.len() >= DEPTH_MAX {
            return Err(PostError::QueueFull.into());
        }
        let number = self.first_entry + self.entries.len() as u64;
        self.link.connection.post(number, operation, sges)?;
        self.enter_posted(mapping, buffer.map(|buffer| buffer.0.clone()), token, kind)
    }

    /// Enters a request that was posted.
    fn enter_posted(
        &mut self,
        mapping: &Mapping,
        buffer: Option<Arc<runtime::Buffer>>,
        token: u64,
        kind: Kind,
    ) -> Result<(), Error> {
        self.enter(token, kind, EntryState::Posted(mapping.id, buffer))?;
        if let Some(leased) = self.leased.get_mut(&mapping.id) {
            leased.in_flight += 1;
        }
        Ok(())
    }

    fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let at = number.checked_sub(self.first_entry)?;
        self.entries.get_mut(at as usize)
    }

    /// Handles the completion of an RDMA request, which also stands for the write before a flush ([`Client::post_write_and_flush`]).
    pub(super) fn entry_done(&mut self, number: u64) -> Result<(), Error> {
        if let Some(before) = number.checked_sub(1) {
            self.posted_done(before)?;
        }
        self.posted_done(number)
    }

    /// Notes that a request is done, if it is an RDMA request.
    fn posted_done(&mut self, number: u64) -> Result<(), Error> {
        let Some(entry) = self.entry(number) else {
            return Ok(());
        };
        if let EntryState::Posted(mapping, buffer) = std::mem::replace(&mut entry.state, EntryState::Done) {
            drop(buffer);
            self.one_less(mapping)?;
        }
        Ok(())
    }

    /// Handles the answer to a message of a data request.
    pub(super) fn entry_answered(
        &mut self,
        number: u64,
        received: Option<Received>,
        message: Message,
    ) -> Result<(), Error> {
        let unexpected = self.protocol("the answer does not match the request");
        let Some(entry) = self.entry(number) else {
            return Ok(());
        };
        let kind = entry.done.kind;
        let failure = match message {
            Message::Error { code, text } => Some(Error::Refused { code, text }),
            Message::Flushed if kind == Kind::Flush => None,
            Message::Written if kind == Kind::Write => None,
            Message::Bytes { bytes } if received.as_ref().is_some_and(|r| r.length == bytes.len()) => {
                if let Some(received) = received {
                    received.buffer.memory().write(received.at, &bytes)?;
                }
                None
            }
            _ => return Err(unexpected),
        };
        let EntryState::Told {
            left,
            ordinary,
            failed,
        } = &mut entry.state
        else {
            return Err(unexpected);
        };
        *failed = failed.take().or(failure);
        *left -= 1;
        if *left > 0 {
            return Ok(());
        }
        let was_ordinary = *ordinary;
        entry.state = match failed.take() {
            Some(error) => EntryState::Failed(error),
            None => EntryState::Done,
        };
        self.ordinary -= usize::from(was_ordinary);
        Ok(())
    }

    /// Waits for the oldest data request. An error that does not end the connection is that request's.
    pub fn next_done(&mut self) -> Result<Done, Error> {
        loop {
            if self
                .entries
                .front()
                .is_some_and(|entry| matches!(entry.state, EntryState::Done | EntryState::Failed(_)))
                && let Some(entry) = self.entries.pop_front()
            {
                self.first_entry += 1;
                return match entry.state {
                    EntryState::Failed(error) => Err(error),
                    _ => Ok(entry.done),
                };
            }
            self.handle_next()?;
        }
    }

    /// Waits until no data request is in flight.
    pub fn drain(&mut self) -> Result<(), Error> {
        while !self.entries.is_empty() {
            self.next_done()?;
        }
        Ok(())
    }

    /// Writes bytes and waits until they are visible. For speed, post requests instead.
    pub fn write(&mut self, mapping: &Mapping, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.drain()?;
        let buffer = self.pooled(bytes.len())?;
        buffer.memory().write(0, bytes)?;
        let length = length_u32(mapping, offset, bytes.len())?;
        self.post_write(mapping, offset, &buffer, 0, length, 0)?;
        self.next_done().map(drop)
    }

    /// Reads bytes. For speed, post requests instead.
    pub fn read(&mut self, mapping: &Mapping, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.drain()?;
        let buffer = self.pooled(out.len())?;
        let length = length_u32(mapping, offset, out.len())?;
        self.post_read(mapping, offset, &buffer, 0, length, 0)?;
        self.next_done()?;
        Ok(buffer.memory().read(0, out)?)
    }

    /// Flushes and waits until it is done.
    pub fn flush(
        &mut self,
        mapping: &Mapping,
        offset: u64,
        length: u64,
        placement: Placement,
    ) -> Result<(), Error> {
        self.drain()?;
        self.post_flush(mapping, offset, length, placement, 0)?;
        self.next_done().map(drop)
    }

    /// Writes bytes by message, and waits until they are where `placement` says.
    pub fn ordinary_write(
        &mut self,
        region: &Name,
        offset: u64,
        bytes: &[u8],
        placement: Placement,
    ) -> Result<(), Error> {
        self.drain()?;
        for (at, piece) in (offset..).step_by(DATA_LEN_MAX).zip(bytes.chunks(DATA_LEN_MAX)) {
            let message = Message::Write {
                region: region.clone(),
                offset: at,
                placement,
                conflict: Conflict::Break,
                bytes: piece.to_vec(),
            };
            let entry = self.begin(0, Kind::Write, 1, true)?;
            self.tell(message, Asked::Entry(entry, None))?;
            self.next_done()?;
        }
        Ok(())
    }

    /// Reads bytes by message.
    pub fn ordinary_read(&mut self, region: &Name, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        self.drain()?;
        let buffer = self.pooled(out.len())?;
        let mut at = 0;
        for piece in out.chunks_mut(DATA_LEN_MAX) {
            self.post_ordinary_read(region, offset + at, &buffer, at, piece.len() as u32, 0)?;
            self.next_done()?;
            buffer.memory().read(at, piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }
}

/// Splits a range into pieces that fit a message.
fn pieces(offset: u64, length: u32) -> Vec<(u64, usize)> {
    let end = offset.saturating_add(length.into());
    (offset..end)
        .step_by(DATA_LEN_MAX)
        .map(|at| (at, (end - at).min(DATA_LEN_MAX as u64) as usize))
        .collect()
}

fn length_u32(mapping: &Mapping, offset: u64, length: usize) -> Result<u32, Error> {
    u32::try_from(length).map_err(|_| mapping.out_of_range(offset, length as u64))
}
