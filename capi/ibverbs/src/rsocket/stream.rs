//! A connected stream: bytes are written into the peer's buffer, in messages whose immediate data gives their number.
//!
//! The peer grants its buffer by halves, in a table here that it writes, and grants messages by number ([`ImmData::Credits`]).
//! The stream trusts the peer only as far as a lie hurts the peer alone: using more than it was granted ends the connection.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use rdmux_verbs::{
    Arm, CompletionQueue, Connection, INLINE_BYTES_MAX, Memory, Operation, QpState, RKey, SendFlags,
    SendRequest, SgeList, Status, Target as To, WcOpcode, WorkCompletion,
};
use rdmux_wire::rsocket::{ConnData, ImmData, Order, Target};

use super::buffers::Buffers;
use super::iomap::{Iomaps, Mapped};
use super::resources::{BUFFERS, CONTROLS, RECEIVE, Resources};

/// Maximum number of bytes of a message.
const MESSAGE_BYTES_MAX: u64 = 65_536;
/// Less room than this counts as none: messages would be small.
const ROOM_MIN: u64 = 2_048;
/// Maximum number of completions taken at a time, so that a peer that never pauses does not keep a caller.
const BATCH: usize = 256;

/// A request in flight.
enum Posted {
    /// Number of bytes that it occupies in the buffer.
    Data(u64),
    Control,
}

/// Outcome of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StreamEnd {
    /// Both sides said that they had no more data.
    Closed,
    /// The connection was lost.
    Reset,
}

pub(super) struct Stream {
    pub(super) own: Resources,
    pub(super) connection: Connection,
    pub(super) peer: ConnData,
    /// Set when the peer's last message of connecting has arrived: the queue pair can send.
    established: bool,
    end: Option<StreamEnd>,
    completions: VecDeque<WorkCompletion>,
    /// Set while a call waits at the completion queue: it alone takes completions.
    has_waiter: bool,

    posted: VecDeque<Posted>,
    controls: u32,
    /// Unused rest of the buffer that the peer granted, and index of the table entry for the next one.
    target: Target,
    next_target: u64,
    /// Number of messages sent, and number up to which the peer accepts them; both wrap.
    sent: u16,
    sent_max: u16,
    /// Numbers of bytes put into the send buffer, and taken out.
    send_in: u64,
    send_out: u64,
    /// Control messages that wait for their turn.
    owed: VecDeque<ImmData>,
    writable: bool,

    /// Numbers of bytes that the peer may write, that it has written, and that were read.
    granted: u64,
    received: u64,
    read: u64,
    /// By message: the number of bytes that were not read.
    messages: VecDeque<u32>,
    /// Number of messages read, and number at which to notify the peer; both wrap.
    taken: u16,
    tell_at: u16,
    /// Index of the entry in the peer's table for the next grant.
    grant_slot: u32,
    /// True while neither side has said that there is no more to read.
    readable: bool,

    pub(super) iomaps: Iomaps,
}

impl Stream {
    /// Makes the stream of a connection.
    pub(super) fn new(own: Resources, connection: Connection, peer: ConnData, established: bool) -> Stream {
        Stream {
            established,
            end: None,
            completions: VecDeque::new(),
            has_waiter: false,
            posted: VecDeque::new(),
            controls: 0,
            target: peer.data,
            next_target: 1,
            sent: 0,
            sent_max: peer.credits,
            send_in: 0,
            send_out: 0,
            owed: VecDeque::new(),
            writable: true,
            granted: own.half(),
            received: 0,
            read: 0,
            messages: VecDeque::new(),
            taken: 0,
            tell_at: own.rq_size / 2,
            grant_slot: 1 % peer.table.length.max(1),
            readable: true,
            iomaps: Iomaps::new(own.iomaps, peer.iomaps.unwrap_or(0)),
            own,
            connection,
            peer,
        }
    }

    /// Lets a call wait at the completion queue, without the socket's lock. Returns `None` while another call does.
    pub(super) fn start_wait(&mut self) -> Option<CompletionQueue> {
        let is_free = !std::mem::replace(&mut self.has_waiter, true);
        is_free.then(|| self.own.cq.clone())
    }

    /// Ends that wait, with the completion that the call took.
    pub(super) fn end_wait(&mut self, found: Option<WorkCompletion>) {
        self.has_waiter = false;
        if let Some(wc) = found {
            self.complete(&wc);
        }
    }

    /// Arms the completion queue, and adds its descriptor. While a call waits at the queue, that call notifies the others.
    pub(super) fn arm(&self, fds: &mut Vec<RawFd>) {
        if self.has_waiter {
            return;
        }
        self.own.cq.arm(Arm::Next);
        fds.push(self.own.cq.as_fd().as_raw_fd());
    }

    /// Takes completions in, and sends what is pending. Returns whether anything arrived.
    pub(super) fn progress(&mut self) -> bool {
        self.send_pending();
        if self.has_waiter {
            return false;
        }
        let mut completions = std::mem::take(&mut self.completions);
        let came = self.own.cq.poll_many(BATCH, &mut completions) > 0;
        for wc in completions.drain(..) {
            self.complete(&wc);
        }
        self.completions = completions;
        if came {
            self.send_pending();
        }
        came
    }

    fn complete(&mut self, wc: &WorkCompletion) {
        if wc.wr_id & RECEIVE == 0 {
            match self.posted.pop_front() {
                Some(Posted::Data(bytes)) => self.send_out += bytes,
                Some(Posted::Control) => self.controls -= 1,
                None => {}
            }
        }
        if wc.status != Status::Success {
            self.lose(StreamEnd::Reset);
        } else if wc.wr_id & RECEIVE != 0 && self.end.is_none() {
            let message = match (wc.opcode, wc.imm) {
                (WcOpcode::RecvRdmaWithImm, Some(imm)) => ImmData::parse(imm).ok(),
                _ => None,
            };
            let taken = message.ok_or(()).and_then(|message| self.hear(message));
            if taken.is_err() || self.end.is_none() && self.own.post_receive().is_err() {
                self.lose(StreamEnd::Reset);
                self.connection.disconnect();
            }
        }
    }

    /// Handles a message of the peer.
    fn hear(&mut self, message: ImmData) -> Result<(), ()> {
        match message {
            ImmData::Data(bytes) => {
                let received = self.received + u64::from(bytes);
                if received > self.granted || self.messages.len() >= usize::from(self.own.rq_size) {
                    return Err(());
                }
                self.received = received;
                if bytes > 0 {
                    self.messages.push_back(bytes);
                } else {
                    self.taken = self.taken.wrapping_add(1);
                }
            }
            ImmData::Credits(number) => self.sent_max = number,
            // The mapping is in the table; the message used a credit.
            ImmData::Iomap(_) => self.taken = self.taken.wrapping_add(1),
            ImmData::KeepAlive => {}
            ImmData::Shutdown if self.writable => self.readable = false,
            ImmData::Shutdown | ImmData::Disconnect => self.lose(StreamEnd::Closed),
        }
        Ok(())
    }

    fn lose(&mut self, end: StreamEnd) {
        if self.end.is_none() {
            self.end = Some(end);
        }
        if end == StreamEnd::Closed {
            self.readable = false;
        }
    }

    /// Ends a connection that was never established.
    pub(super) fn fail(&mut self) {
        self.lose(StreamEnd::Reset);
    }

    fn is_established(&mut self) -> bool {
        if !self.established {
            let state = self.own.qp.query().map(|info| info.state);
            self.established = state.is_some_and(|state| state == QpState::Rts);
        }
        self.established
    }

    fn post(&mut self, operation: Operation, sges: SgeList, posted: Posted) {
        let request = SendRequest {
            wr_id: 0,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: To::Connected,
        };
        match self.own.qp.post_send(request) {
            Ok(()) => self.posted.push_back(posted),
            // The queue pair has gone to Error; that there is room was checked before.
            Err(_) => {
                // Behind all others: nothing is sent any more, so the order does not matter.
                match posted {
                    Posted::Data(bytes) => self.send_out += bytes,
                    Posted::Control => self.controls -= 1,
                }
                self.lose(StreamEnd::Reset);
            }
        }
    }

    /// Writes to a location that the peer granted, with a message.
    fn post_write(&mut self, to: Target, sges: SgeList, message: ImmData, posted: Posted) {
        let operation = Operation::Write {
            va: to.addr,
            rkey: RKey(to.rkey),
            imm: Some(message.imm()),
        };
        self.post(operation, sges, posted);
    }

    fn send_control(&mut self, to: Target, bytes: &[u8], message: ImmData) {
        self.controls += 1;
        let sges = if bytes.is_empty() {
            SgeList::EMPTY
        } else {
            SgeList::inline(bytes)
        };
        self.post_write(to, sges, message, Posted::Control);
    }

    /// Sends credits and control messages that are due, as far as there is room.
    fn send_pending(&mut self) {
        while self.end.is_none() && self.controls < CONTROLS && self.is_established() {
            let half = self.own.half();
            let free = 2 * half - (self.granted - self.read);
            let is_due = self.taken.wrapping_sub(self.tell_at).cast_signed() >= 0;
            if self.readable && (free >= half || is_due) {
                self.tell_at = self.taken.wrapping_add(self.own.rq_size / 2);
                let message = ImmData::Credits(self.taken.wrapping_add(self.own.rq_size));
                if free < half {
                    self.send_control(Target::default(), &[], message);
                    continue;
                }
                let mut entry = [0; Target::LEN];
                let grant = self.own.receive.target(self.granted % (2 * half), half as u32);
                grant.emit(&mut entry, self.peer.order);
                let at = u64::from(self.grant_slot) * Target::LEN as u64;
                let to = Target {
                    addr: self.peer.table.addr.wrapping_add(at),
                    ..self.peer.table
                };
                self.grant_slot = (self.grant_slot + 1) % self.peer.table.length.max(1);
                self.granted += half;
                self.send_control(to, &entry, message);
            } else if let Some(message) = self.owed.pop_front() {
                self.send_control(Target::default(), &[], message);
                if message == ImmData::Disconnect {
                    self.lose(StreamEnd::Closed);
                }
            } else {
                break;
            }
        }
    }

    /// Returns the number of bytes that may be written now to the buffer that the peer granted.
    fn granted_by_peer(&mut self) -> u64 {
        if self.target.length == 0 {
            let at = self.next_target * Target::LEN as u64;
            let memory = &self.own.tables.memory;
            let mut entry = [0; Target::LEN];
            // The peer writes the length last: once the length is there, so is the rest.
            let length = memory.read(at + 12, &mut entry[..4]);
            if length.is_ok() && entry[..4] != [0; 4] && memory.read(at, &mut entry).is_ok() {
                if let Ok(target) = Target::parse(&entry, Order::NATIVE) {
                    self.target = target;
                }
                let _ = memory.write(at, &[0; Target::LEN]);
                self.next_target = (self.next_target + 1) % BUFFERS;
            }
        }
        self.target.length.into()
    }

    /// Returns the number of bytes that one more request with data can have now, whatever the peer accepts; 0: it has to wait.
    fn room(&mut self) -> u64 {
        let requests = self.posted.len() as u32 - self.controls;
        let size = self.own.send.length;
        let free = size - (self.send_in - self.send_out);
        let can = self.end.is_none()
            && self.writable
            && requests < self.own.sq_size - CONTROLS
            && free >= ROOM_MIN.min(size)
            && self.is_established();
        if can {
            free.min(size - self.send_in % size).min(MESSAGE_BYTES_MAX)
        } else {
            0
        }
    }

    /// Returns the number of bytes that the next message can have now; 0: it has to wait.
    fn message_room(&mut self) -> u64 {
        if self.sent == self.sent_max {
            0
        } else {
            self.room().min(self.granted_by_peer())
        }
    }

    /// Takes bytes of the program to be sent.
    fn stage(&mut self, from: &mut Buffers<'_>, length: u64) -> (SgeList, Posted) {
        let bytes = length as usize;
        let start = self.send_in % self.own.send.length;
        // The rest at the buffer's end is used up, however little it is: otherwise it would limit each message from then on.
        let is_end = start + length == self.own.send.length;
        if bytes <= self.own.inline.min(INLINE_BYTES_MAX) && !is_end {
            let mut inline = [0; INLINE_BYTES_MAX];
            from.take(bytes, |at, piece| {
                inline[at..at + piece.len()].copy_from_slice(piece)
            });
            return (SgeList::inline(&inline[..bytes]), Posted::Data(0));
        }
        let memory = &self.own.send.memory;
        from.take(bytes, |at, piece| {
            memory
                .write(start + at as u64, piece)
                .expect("inside of the buffer");
        });
        self.send_in += length;
        (
            self.own.send.mr.sge(start, length as u32).into(),
            Posted::Data(length),
        )
    }

    /// Returns the reason why nothing can be sent any more.
    fn send_error(&self) -> Option<c_int> {
        match self.end {
            None if self.writable => None,
            None => Some(libc::EPIPE),
            Some(StreamEnd::Closed) if !self.writable => Some(libc::EPIPE),
            Some(_) => Some(libc::ECONNRESET),
        }
    }

    /// Sends as much as is possible now.
    pub(super) fn send(&mut self, from: &mut Buffers<'_>) -> Result<(), c_int> {
        self.tell_iomaps();
        while from.left() > 0 && self.iomaps.are_told() {
            if let Some(errno) = self.send_error() {
                return Err(errno);
            }
            let length = self.message_room().min(from.left() as u64);
            if length == 0 {
                break;
            }
            let (sges, posted) = self.stage(from, length);
            let to = self.target;
            self.target.addr = to.addr.wrapping_add(length);
            self.target.length -= length as u32;
            self.sent = self.sent.wrapping_add(1);
            self.post_write(to, sges, ImmData::Data(length as u32), posted);
        }
        match self.send_error() {
            Some(errno) if from.left() > 0 => Err(errno),
            _ => Ok(()),
        }
    }

    /// Writes mappings that the peer does not know into its table.
    fn tell_iomaps(&mut self) {
        while !self.iomaps.are_told() && self.sent != self.sent_max && self.room() > 0 {
            let Some((index, entry)) = self.iomaps.tell_next(self.peer.order) else {
                return;
            };
            let after = u64::from(self.peer.table.length) * Target::LEN as u64;
            let at = after + u64::from(index) * entry.len() as u64;
            let to = Target {
                addr: self.peer.table.addr.wrapping_add(at),
                ..self.peer.table
            };
            self.sent = self.sent.wrapping_add(1);
            self.post_write(
                to,
                SgeList::inline(&entry),
                ImmData::Iomap(index),
                Posted::Data(0),
            );
        }
    }

    /// Writes as much as is possible now into buffers that the peer has mapped. `offset` moves on.
    pub(super) fn write_mapped(&mut self, from: &mut Buffers<'_>, offset: &mut u64) -> Result<(), c_int> {
        while from.left() > 0 {
            if let Some(errno) = self.send_error() {
                return Err(errno);
            }
            let Mapped { addr, rkey, bytes } = self.iomaps.find(&self.own.tables.memory, *offset)?;
            let length = self.room().min(bytes).min(from.left() as u64);
            if length == 0 {
                break;
            }
            let (sges, posted) = self.stage(from, length);
            let operation = Operation::Write {
                va: addr,
                rkey: RKey(rkey),
                imm: None,
            };
            self.post(operation, sges, posted);
            *offset = offset.wrapping_add(length);
        }
        Ok(())
    }

    /// Reads the bytes that are there, with `peek` without taking them. Returns `None` when there are none yet.
    pub(super) fn receive(&mut self, into: &mut Buffers<'_>, peek: bool) -> Option<Result<usize, c_int>> {
        let length = (self.received - self.read).min(into.left() as u64);
        if length == 0 {
            return match self.end {
                _ if into.left() == 0 => Some(Ok(0)),
                Some(StreamEnd::Reset) if self.readable => Some(Err(libc::ECONNRESET)),
                None if self.readable => None,
                _ => Some(Ok(0)),
            };
        }
        let size = 2 * self.own.half();
        let (start, memory) = (self.read, &self.own.receive.memory);
        into.take(length as usize, |at, piece| {
            let from = (start + at as u64) % size;
            let (before, after) = piece.split_at_mut(piece.len().min((size - from) as usize));
            let read = memory.read(from, before).and_then(|()| memory.read(0, after));
            read.expect("inside of the buffer");
        });
        if !peek {
            self.forget(length);
        }
        Some(Ok(length as usize))
    }

    /// Accounts for `length` bytes that were read.
    fn forget(&mut self, length: u64) {
        self.read += length;
        let mut left = length as u32;
        while let Some(first) = self.messages.front_mut() {
            if left < *first {
                *first -= left;
                break;
            }
            left -= *first;
            self.messages.pop_front();
            self.taken = self.taken.wrapping_add(1);
        }
        self.send_pending();
    }

    /// Ends reading, or sending, or both: `SHUT_RD`, `SHUT_WR`, `SHUT_RDWR`.
    pub(super) fn shut(&mut self, how: c_int) {
        let before = (self.readable, self.writable);
        self.readable &= how == libc::SHUT_WR;
        self.writable &= how == libc::SHUT_RD;
        match (self.readable, self.writable) {
            _ if self.end.is_some() || before == (self.readable, self.writable) => {}
            (_, true) => {}
            (true, false) => self.owed.push_back(ImmData::Shutdown),
            (false, false) => self.owed.push_back(ImmData::Disconnect),
        }
        self.send_pending();
    }

    /// Returns whether the connection was lost.
    pub(super) fn is_reset(&self) -> bool {
        self.end == Some(StreamEnd::Reset)
    }

    /// Returns whether all sent bytes have arrived, or are lost.
    pub(super) fn is_flushed(&self) -> bool {
        self.is_reset() || self.posted.is_empty() && (self.owed.is_empty() || self.end.is_some())
    }

    /// Returns the state of `POLLIN` and `POLLOUT`, and the outcome once everything is read.
    pub(super) fn events(&mut self) -> i16 {
        let is_read = self.messages.is_empty();
        let mut events = match self.end {
            Some(StreamEnd::Closed) if is_read => libc::POLLIN | libc::POLLRDHUP | libc::POLLHUP,
            Some(StreamEnd::Reset) if is_read => {
                libc::POLLIN | libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR
            }
            _ if !self.readable => libc::POLLIN | libc::POLLRDHUP,
            _ if is_read => 0,
            _ => libc::POLLIN,
        };
        if self.end.is_some() || !self.writable || self.message_room() > 0 {
            events |= libc::POLLOUT;
        }
        events
    }
}
