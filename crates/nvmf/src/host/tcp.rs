//! NVMe/TCP: the host's side of a connection, as a state machine without I/O.
//!
//! The driver receives into [`Connection::space`] and says so ([`Connection::received`]), sends [`Connection::slices`] and says how much of
//! them ([`Connection::sent`]), until there is nothing to send. Commands go in by [`Connection::submit`], once it is
//! [ready](Connection::is_ready), and come out of [`Connection::poll`]. All that a target sends is checked: what does not fit
//! ends the connection, with a [`End`] that says what it was.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::time::Instant;

use crc_fast::Digest;
use rdmux_wire::nvme::{Cqe, Opcode, Sgl, Status};
use rdmux_wire::nvme_tcp::{Common, DataLayout, Digests, Fatal, Flags, Header, Initialize, Transfer};

use super::queue::{Command, Completion, Data, Queue};
use crate::tcp::inbox::Inbox;
use crate::tcp::new_digest;
use crate::tcp::outbox::Outbox;

/// Bytes that are received at once where they are not data of a command alone: the answers to 32 reads of 4 KiB and more.
const RECEIVE_BYTES: usize = 256 << 10;
/// Data that are still missing go straight into their buffer if there are so many.
const DIRECT_MIN: usize = 16 << 10;

/// Maximum bytes of data in the capsule of a fabrics or admin command, on every queue: NVMe/TCP 3.3.2.2.
pub(super) const FABRICS_IN_CAPSULE_MAX: u32 = 8 << 10;

/// Properties of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Digests that the host asks for; a target that does not agree to exactly these is refused.
    pub digests: Digests,
    /// Entries of the queue.
    pub entries: u16,
    /// Maximum bytes of data in the capsule of a command that is none of fabrics.
    pub in_capsule_max: u32,
    /// It is an I/O queue: a command that succeeds has all its data.
    pub is_io: bool,
}

/// Reason for which a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The target has violated the protocol.
    #[error("the target sent {what} ({fatal}): the connection is over")]
    Violation {
        /// The PDU or field that it sent.
        what: &'static str,
        /// The code that it is told.
        fatal: Fatal,
    },
    /// The target has ended it, for this reason.
    #[error("the target ended the connection: {0}")]
    Terminated(Fatal),
}

/// State of a command in flight.
#[derive(Debug, Default)]
struct State {
    /// Bytes of data that have arrived.
    received: usize,
    /// Bytes of data that were sent or are to be sent.
    sent: usize,
    /// Ranges of its buffer among the bytes to be sent.
    unsent: u32,
    /// Data that have arrived had a wrong digest.
    is_damaged: bool,
    /// The controller has said that no further data come.
    is_last: bool,
    /// It is done once its buffer is free.
    cqe: Option<Cqe>,
}

/// The part of a PDU that the target sends next.
#[derive(Debug)]
enum Phase {
    Header,
    /// Data of a command; it is done behind them if so said.
    Data {
        slot: u16,
        missing: usize,
        digest: Option<Digest>,
        completes: bool,
    },
    /// The digest of data that are there.
    Digest {
        slot: u16,
        digest: Digest,
        completes: bool,
    },
}

/// The host's side of a connection, which is a queue.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    queue: Queue<State>,
    is_ready: bool,
    /// Digests that hold now: none before the target has answered.
    digests: Digests,
    /// Alignment of data that the target has asked for.
    alignment: usize,
    /// Bytes of an H2CData that the target takes.
    h2c_data_max: usize,
    phase: Phase,
    inbox: Inbox,
    outbox: Outbox,
    done: VecDeque<Completion>,
    end: Option<End>,
}

/// Outcome of a check.
type Checked<T> = Result<T, (&'static str, Fatal)>;

impl Connection {
    /// Makes the host's side of a connection that was opened to a target, with the request to initialize it among the bytes to be sent.
    pub fn new(config: Config) -> Connection {
        let request = Initialize {
            alignment: 4,
            digests: config.digests,
            limit: 1,
        };
        let mut outbox = Outbox::default();
        outbox.push(&Header::IcReq(request), Flags::empty(), DataLayout::default());
        Connection {
            config,
            queue: Queue::new(config.entries),
            is_ready: false,
            digests: Digests::empty(),
            alignment: 4,
            h2c_data_max: 0,
            phase: Phase::Header,
            inbox: Inbox::new(RECEIVE_BYTES),
            outbox,
            done: VecDeque::with_capacity(config.entries.into()),
            end: None,
        }
    }

    /// Returns true once the target has answered the request to initialize the connection.
    pub fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Returns why the connection is over: the driver sends what is left and closes it.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns the number of commands that may be submitted now; 0 before the connection is ready.
    pub fn room(&self) -> usize {
        match self.is_ready && self.end.is_none() {
            true => self.queue.room(),
            false => 0,
        }
    }

    /// Returns the number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Returns true if a command was to be done before now.
    pub fn has_expired(&self, now: Instant) -> bool {
        self.queue.has_expired(now)
    }

    /// Takes the commands that are not done, when the connection is over.
    pub fn take_commands(&mut self) -> Vec<Command> {
        self.outbox = Outbox::default();
        self.phase = Phase::Header;
        self.queue.take_all()
    }

    /// Sends a command, which is to be done before the deadline, if there is one.
    ///
    /// # Panics
    /// There is no [room](Connection::room), or the buffer is shorter than the data.
    pub fn submit(&mut self, mut command: Command, deadline: Option<Instant>) {
        assert!(self.room() > 0, "the caller has looked at the room");
        let length = command.data.len() as u32;
        let in_capsule_max = match command.sqe.opcode() {
            Opcode::FABRICS => FABRICS_IN_CAPSULE_MAX,
            _ => self.config.in_capsule_max,
        };
        let is_in_capsule = matches!(command.data, Data::Out(_)) && (1..=in_capsule_max).contains(&length);
        command.sqe.set_sgl(match is_in_capsule {
            true => Sgl::InCapsule { offset: 0, length },
            false => Sgl::Transport { length },
        });
        let at = self.queue.begin(command, deadline, State::default());
        let Some(in_flight) = self.queue.get_mut(at) else {
            return;
        };
        let layout = DataLayout {
            len: if is_in_capsule { length as usize } else { 0 },
            digests: self.digests,
            alignment: self.alignment,
        };
        self.outbox
            .push(&Header::CapsuleCmd(in_flight.command.sqe), Flags::empty(), layout);
        if is_in_capsule {
            self.push_data(at, 0, length as usize);
        }
    }

    /// Has a range of a command's data sent, with its digest.
    fn push_data(&mut self, at: u16, offset: usize, length: usize) {
        let Some(in_flight) = self.queue.get_mut(at) else {
            return;
        };
        in_flight.transport.sent += length;
        in_flight.transport.unsent += 1;
        self.outbox.push_data(at, offset..offset + length);
        if self.digests.contains(Digests::DATA) {
            let mut digest = new_digest();
            digest.update(&in_flight.command.buffer[offset..offset + length]);
            self.outbox.push_bytes(&(digest.finalize() as u32).to_le_bytes());
        }
    }

    /// Returns a command that is done.
    pub fn poll(&mut self) -> Option<Completion> {
        self.done.pop_front()
    }

    /// Returns true if a command is done.
    pub fn has_completions(&self) -> bool {
        !self.done.is_empty()
    }

    /// Returns the place for the next bytes from the target, which is never empty.
    pub fn space(&mut self) -> &mut [u8] {
        if let Phase::Data { slot, missing, .. } = self.phase
            && self.inbox.is_empty()
            && missing >= DIRECT_MIN
            && let Some(in_flight) = self.queue.get_mut(slot)
        {
            let at = in_flight.transport.received;
            return &mut in_flight.command.buffer[at..at + missing];
        }
        self.inbox.space()
    }

    /// Takes note of bytes that the driver has received into [`Connection::space`].
    pub fn received(&mut self, bytes: usize) {
        match self.phase {
            Phase::Data { slot, missing, .. } if self.inbox.is_empty() && missing >= DIRECT_MIN => {
                self.data_arrived(slot, bytes);
            }
            _ => self.inbox.received(bytes),
        }
        while self.end.is_none() {
            match self.advance() {
                Ok(true) => {}
                Ok(false) => return,
                Err((what, fatal)) => self.fail(what, fatal),
            }
        }
    }

    fn fail(&mut self, what: &'static str, fatal: Fatal) {
        self.end = Some(End::Violation { what, fatal });
        // Commands whose data wait to be sent are not sent any more.
        self.outbox = Outbox::default();
        self.outbox
            .push(&Header::H2cTermReq(fatal), Flags::empty(), DataLayout::default());
    }

    /// Takes one step. Returns false if that needs further bytes.
    fn advance(&mut self) -> Checked<bool> {
        match &mut self.phase {
            Phase::Header => {
                let taken = self.inbox.take_header(self.digests);
                let taken = taken.map_err(|fatal| ("a PDU with an invalid header", fatal))?;
                let Some((common, header)) = taken else {
                    return Ok(false);
                };
                self.handle_header(&common, header)?;
                Ok(true)
            }
            Phase::Data { slot, missing, .. } => {
                let slot = *slot;
                if *missing > 0 {
                    let part = self.inbox.take(*missing);
                    let bytes = part.len();
                    if let Some(to) = self.queue.get_mut(slot) {
                        let at = to.transport.received;
                        to.command.buffer[at..at + bytes].copy_from_slice(part);
                    }
                    self.data_arrived(slot, bytes);
                    return Ok(bytes > 0);
                }
                match std::mem::replace(&mut self.phase, Phase::Header) {
                    Phase::Data {
                        digest: Some(digest),
                        completes,
                        ..
                    } => {
                        self.phase = Phase::Digest {
                            slot,
                            digest,
                            completes,
                        }
                    }
                    Phase::Data { completes: true, .. } => self.succeed(slot)?,
                    _ => {}
                }
                Ok(true)
            }
            Phase::Digest {
                slot,
                digest,
                completes,
            } => {
                let Some(is_right) = self.inbox.take_digest(digest) else {
                    return Ok(false);
                };
                let (slot, completes) = (*slot, *completes);
                self.phase = Phase::Header;
                if let Some(in_flight) = self.queue.get_mut(slot) {
                    in_flight.transport.is_damaged |= !is_right;
                }
                if completes {
                    self.succeed(slot)?;
                }
                Ok(true)
            }
        }
    }

    fn handle_header(&mut self, common: &Common, header: Header) -> Checked<()> {
        match header {
            Header::IcResp(response) if !self.is_ready => {
                if response.digests != self.config.digests {
                    let what = "other digests than this host asked for";
                    return Err((what, Fatal::Unsupported(11)));
                }
                self.is_ready = true;
                self.digests = response.digests;
                self.alignment = response.alignment;
                // Parts of data stay aligned.
                self.h2c_data_max = (response.limit & !3) as usize;
                Ok(())
            }
            Header::C2hTermReq(fatal) => {
                self.end = Some(End::Terminated(fatal));
                Ok(())
            }
            Header::CapsuleResp(cqe) if self.is_ready => {
                let unknown = ("a completion of no command in flight", Fatal::InvalidField(20));
                let at = self.queue.find(cqe.cid).ok_or(unknown)?;
                self.complete(at, cqe)
            }
            Header::C2hData(transfer) if self.is_ready => self.handle_data(common, &transfer),
            Header::R2t(transfer) if self.is_ready => self.handle_r2t(&transfer),
            _ => Err(("a PDU at the wrong time", Fatal::Sequence)),
        }
    }

    /// Checks data of a command, which come next.
    fn handle_data(&mut self, common: &Common, transfer: &Transfer) -> Checked<()> {
        let unknown = ("data of no command in flight", Fatal::InvalidField(8));
        let at = self.queue.find(transfer.cid).ok_or(unknown)?;
        let in_flight = self.queue.get_mut(at).ok_or(unknown)?;
        let state = &mut in_flight.transport;
        let Data::In(len) = in_flight.command.data else {
            return Err(("data of a command that receives none", Fatal::InvalidField(8)));
        };
        if state.is_last || state.cqe.is_some() {
            return Err(("data behind the last of their command", Fatal::Sequence));
        }
        if transfer.length as usize != common.data_len || common.data_len == 0 {
            return Err((
                "data of another length than their header says",
                Fatal::InvalidField(16),
            ));
        }
        if transfer.offset as usize != state.received {
            return Err(("data that do not follow those before", Fatal::OutOfRange));
        }
        if common.data_len > len as usize - state.received {
            return Err(("more data than the command asked for", Fatal::OutOfRange));
        }
        let completes = common.flags.contains(Flags::SUCCESS);
        state.is_last = common.flags.contains(Flags::LAST);
        if completes && !state.is_last {
            return Err(("success before the last data", Fatal::InvalidField(1)));
        }
        self.phase = Phase::Data {
            slot: at,
            missing: common.data_len,
            digest: self.digests.contains(Digests::DATA).then(new_digest),
            completes,
        };
        Ok(())
    }

    /// Takes note of data in a command's buffer.
    fn data_arrived(&mut self, at: u16, bytes: usize) {
        let Some(in_flight) = self.queue.get_mut(at) else {
            return;
        };
        let begin = in_flight.transport.received;
        if let Phase::Data { missing, digest, .. } = &mut self.phase {
            *missing -= bytes;
            if let Some(digest) = digest {
                digest.update(&in_flight.command.buffer[begin..begin + bytes]);
            }
        }
        in_flight.transport.received += bytes;
    }

    /// Has the data sent that the target asks for.
    fn handle_r2t(&mut self, transfer: &Transfer) -> Checked<()> {
        let unknown = (
            "a request for data of no command in flight",
            Fatal::InvalidField(8),
        );
        let at = self.queue.find(transfer.cid).ok_or(unknown)?;
        let in_flight = self.queue.get(at).ok_or(unknown)?;
        let state = &in_flight.transport;
        let Data::Out(len) = in_flight.command.data else {
            let what = "a request for data of a command that sends none";
            return Err((what, Fatal::InvalidField(8)));
        };
        if state.cqe.is_some() {
            return Err(("a request for data of a command that is done", Fatal::Sequence));
        }
        if state.unsent > 0 {
            return Err(("a second request for data at a time", Fatal::Limit));
        }
        let (length, offset) = (transfer.length as usize, transfer.offset as usize);
        if length == 0 || offset != state.sent || length > len as usize - offset {
            return Err(("a request for data outside of the command's", Fatal::OutOfRange));
        }
        let mut at_byte = offset;
        while at_byte < offset + length {
            let part = (offset + length - at_byte).min(self.h2c_data_max);
            let is_last = at_byte + part == offset + length;
            let header = Header::H2cData(Transfer {
                cid: transfer.cid,
                tag: transfer.tag,
                offset: at_byte as u32,
                length: part as u32,
            });
            let layout = DataLayout {
                len: part,
                digests: self.digests,
                alignment: self.alignment,
            };
            let flags = if is_last { Flags::LAST } else { Flags::empty() };
            self.outbox.push(&header, flags, layout);
            self.push_data(at, at_byte, part);
            at_byte += part;
        }
        Ok(())
    }

    /// The data that have arrived were all, and the command has succeeded.
    fn succeed(&mut self, at: u16) -> Checked<()> {
        let cqe = Cqe {
            result: 0,
            sq_head: u16::MAX,
            cid: rdmux_wire::nvme::Cid(0),
            status: Status::SUCCESS,
        };
        self.complete(at, cqe)
    }

    fn complete(&mut self, at: u16, mut cqe: Cqe) -> Checked<()> {
        let Some(in_flight) = self.queue.get_mut(at) else {
            return Ok(());
        };
        let state = &mut in_flight.transport;
        if state.cqe.is_some() {
            return Err(("a second completion of a command", Fatal::InvalidField(20)));
        }
        if cqe.status.is_success() {
            match in_flight.command.data {
                Data::Out(len) if state.sent < len as usize || state.unsent > 0 => {
                    return Err((
                        "success of a command whose data it has not taken",
                        Fatal::Sequence,
                    ));
                }
                Data::In(len) if self.config.is_io && state.received < len as usize => {
                    return Err(("success of a command without all its data", Fatal::Sequence));
                }
                _ => {}
            }
            if state.is_damaged {
                cqe.status = Status::TRANSIENT_TRANSPORT;
            }
        }
        state.cqe = Some(cqe);
        if state.unsent == 0 {
            self.finish(at);
        }
        Ok(())
    }

    fn finish(&mut self, at: u16) {
        let Some((cqe, received)) = self
            .queue
            .get(at)
            .and_then(|in_flight| Some((in_flight.transport.cqe?, in_flight.transport.received)))
        else {
            return;
        };
        self.done.extend(self.queue.finish(at, &cqe, received));
    }

    /// Fills in what is to be sent next, and returns the number of slices; 0 if nothing waits.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let data = |slot: u16| match self.queue.get(slot) {
            Some(in_flight) => in_flight.command.buffer.as_slice(),
            None => &[],
        };
        self.outbox.slices(data, slices)
    }

    /// Takes note of bytes that the driver has sent.
    pub fn sent(&mut self, bytes: usize) {
        let mut left = bytes;
        while let Some(at) = self.outbox.sent(&mut left) {
            let Some(in_flight) = self.queue.get_mut(at) else {
                continue;
            };
            in_flight.transport.unsent -= 1;
            // The target may refuse a command before it has taken its data.
            if in_flight.transport.unsent == 0 && in_flight.transport.cqe.is_some() {
                self.finish(at);
            }
        }
    }
}
