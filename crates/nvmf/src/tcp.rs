//! NVMe/TCP: the controller's side of a connection, as a state machine without I/O.
//!
//! The driver receives into [`Connection::space`], and says so ([`Connection::received`]); carries out [`Connection::poll_io`], and
//! says how that went ([`Connection::complete`]); sends [`Connection::slices`] and says how much of them ([`Connection::sent`]). Room that
//! becomes free as bytes are sent lets further I/Os be carried out: the driver asks for both until there is neither, or the socket takes no
//! more.

mod buffers;
pub(crate) mod inbox;
pub(crate) mod outbox;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use crc_fast::{CrcAlgorithm, Digest};
use rdmux_runtime::{FileAccess, Pages};
use rdmux_wire::nvme::{Cid, Cqe, IdentifyController, NsId, Opcode, Sgl, Sqe, Status, TransportKind};
use rdmux_wire::nvme_tcp::{
    Common, DataLayout, Digests, Fatal, Flags, Header, Initialize, PduType, Transfer,
};

pub use self::buffers::Buffers;
pub(crate) use self::buffers::Idle;
use self::inbox::Inbox;
use self::outbox::Outbox;
use crate::target::{Admitted, Io, Listener, Port, Queue, Running, Step, Target};
use crate::tls::Proof;

/// Maximum bytes of a command's data, as a power of two of pages of 4 KiB: 1 MiB.
const MDTS: u8 = 8;
/// Maximum bytes of data in the capsule of a fabrics or admin command: NVMe/TCP 3.3.2.2.
const ADMIN_IN_CAPSULE_MAX: u32 = 8 << 10;
/// Bytes of an H2CData that the target takes.
const H2C_DATA_MAX: u32 = 1 << 20;
/// Bytes of buffers that a connection's commands have at a time, beside data in capsules. A command whose data do not fit waits.
const BUFFERED_MAX: usize = 4 << 20;
/// Bytes that are received at once where they are not data of a command alone.
const RECEIVE_BYTES: usize = 64 << 10;
/// Data that are still missing go straight into their buffer if there are so many.
const DIRECT_MIN: usize = 4 << 10;
/// While more responses than that many bytes wait to be sent, nothing is received.
const UNSENT_MAX: usize = 64 << 10;

/// Returns the properties of NVMe/TCP with so many bytes of data in the capsule of an I/O command, a multiple of 16.
pub const fn port(in_capsule_max: u32) -> Port {
    Port {
        entries_max: 128,
        mdts: MDTS,
        in_capsule_max,
        sgls: IdentifyController::SGLS | IdentifyController::SGLS_OFFSET | IdentifyController::SGLS_TRANSPORT,
    }
}

/// Reason for which a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The host has violated the protocol.
    #[error("the host sent {0}")]
    Violation(Fatal),
    /// The host has ended it, for this reason.
    #[error("the host ended the connection: {0}")]
    Terminated(Fatal),
    /// The host was silent for its keep-alive time, or sent no command in time.
    #[error("the host was silent for too long")]
    Silent,
    /// Its controller is over.
    #[error("the controller is over")]
    ControllerOver,
}

/// The controller's side of a connection, which is a queue.
#[derive(Debug)]
pub struct Connection {
    queue: Queue,
    port: Port,
    is_initialized: bool,
    digests: Digests,
    /// Alignment of data that the host has asked for.
    alignment: usize,
    phase: Phase,
    inbox: Inbox,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Commands that wait for a buffer.
    waiting: VecDeque<u16>,
    /// Bytes of buffers in use, but for those of data in capsules.
    buffered: usize,
    /// I/Os to carry out.
    ready: VecDeque<u16>,
    outbox: Outbox,
    /// The host's limits have no further command taken.
    is_held: bool,
    end: Option<End>,
}

/// The part of a PDU that the host sends next.
#[derive(Debug)]
enum Phase {
    Header,
    /// Data of a command.
    Data {
        slot: u16,
        missing: usize,
        digest: Option<Digest>,
    },
    /// The digest of data that are there.
    Digest {
        slot: u16,
        digest: Digest,
    },
    /// Data that nobody wants, and their digest.
    Skip(usize),
}

/// A command that is not completed.
#[derive(Debug)]
struct Slot {
    is_used: bool,
    sqe: Sqe,
    io: Option<Io>,
    buffer: Option<Pages>,
    /// Bytes of its data.
    length: usize,
    /// Bytes of them that have arrived.
    received: usize,
    /// The host may send its data in PDUs of their own.
    awaits_data: bool,
    /// Data of it had a wrong digest.
    is_damaged: bool,
    /// It must not be carried out.
    is_aborted: bool,
    /// Bytes of its buffer that count among [`BUFFERED_MAX`]: 0 if its data were in the capsule.
    counted: usize,
}

impl Slot {
    fn new() -> Slot {
        Slot {
            is_used: false,
            sqe: Sqe::new(Opcode::FLUSH, Cid(0), NsId::NONE),
            io: None,
            buffer: None,
            length: 0,
            received: 0,
            awaits_data: false,
            is_damaged: false,
            is_aborted: false,
            counted: 0,
        }
    }
}

impl Connection {
    /// Makes the controller's side of a connection that a host has opened.
    ///
    /// `port` is [`port`], `local` the address at which the host has reached the target.
    pub fn new(target: Arc<Target>, port: Port, local: SocketAddr, now: Instant) -> Connection {
        let listener = Listener {
            transport: TransportKind::Tcp,
            address: local,
        };
        Connection {
            queue: Queue::new(target, port, listener, now),
            port,
            is_initialized: false,
            digests: Digests::empty(),
            alignment: 4,
            phase: Phase::Header,
            inbox: Inbox::new(RECEIVE_BYTES),
            slots: vec![Slot::new(), Slot::new()],
            free: vec![1, 0],
            waiting: VecDeque::new(),
            buffered: 0,
            ready: VecDeque::new(),
            outbox: Outbox::default(),
            is_held: false,
            end: None,
        }
    }

    /// Takes note that its listener requires TLS.
    pub fn require_tls(&mut self) {
        self.queue.require_tls();
    }

    /// Takes note of what the host has proved by TLS.
    pub fn set_proof(&mut self, proof: Proof) {
        self.queue.set_proof(proof);
    }

    /// Returns true if no command is in its hands, with a buffer of its own: those that wait for events are the queue's.
    pub fn is_idle(&self) -> bool {
        let is_empty = self.waiting.is_empty() && self.ready.is_empty() && self.buffered == 0;
        is_empty && self.free.len() == self.slots.len()
    }

    /// Returns true if it is the admin queue of a controller that may have I/O queues, which end with it.
    pub fn has_io_queues(&self) -> bool {
        self.queue.has_io_queues()
    }

    /// Returns why the connection is over: the driver sends what is left and closes it.
    pub fn end(&self) -> Option<End> {
        self.end
    }

    /// Returns true once after each reset of its controller: I/O queues of it may be with other reactors.
    pub fn take_reset(&mut self) -> bool {
        self.queue.take_reset()
    }

    /// Returns when to call [`Connection::handle_timeout`].
    pub fn deadline(&self) -> Option<Instant> {
        self.queue.deadline()
    }

    /// Returns true if a command is held up, which [`Connection::poll_io`] takes at the time of [`Connection::held_until`].
    pub fn is_held(&self) -> bool {
        self.is_held
    }

    /// Returns when that may be, if it is not now.
    pub fn held_until(&self, now: Instant) -> Option<Instant> {
        self.queue.held_until(now).filter(|_| self.is_held)
    }

    /// Ends the connection if its host was silent for too long.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.queue.has_expired(now) {
            self.close(End::Silent);
        }
    }

    /// Looks at what all queues share: ends the connection if its controller is over, aborts commands, and reports events.
    pub fn handle_change(&mut self) {
        if self.queue.is_over() {
            self.close(End::ControllerOver);
            return;
        }
        self.queue.handle_change();
        while let Some(cid) = self.queue.poll_abort() {
            self.abort(cid);
        }
        self.respond_events();
    }

    fn close(&mut self, end: End) {
        self.end = self.end.or(Some(end));
        self.queue.end();
    }

    fn respond_events(&mut self) {
        while let Some(cqe) = self.queue.poll_event() {
            self.respond(cqe);
        }
    }

    /// Has a command completed without being carried out, if it has not begun. One whose data are on their way completes when they are there: the
    /// host may not forget it before.
    fn abort(&mut self, cid: Cid) {
        let at = self
            .slots
            .iter()
            .position(|slot| slot.is_used && slot.sqe.cid() == cid);
        let Some(at) = at else {
            return self.queue.abort_missed(cid);
        };
        let slot = &mut self.slots[at];
        // One that a thread of a medium has may find out by itself that it is to be aborted; others are done soon.
        slot.is_aborted = slot.io.is_some();
        let at = at as u16;
        if slot.is_aborted
            && let Some(place) = self.waiting.iter().position(|waiting| *waiting == at)
        {
            self.waiting.remove(place);
            self.ready.push_back(at);
        }
    }

    /// Returns true if the driver should receive: the host takes what was sent.
    pub fn wants_bytes(&self) -> bool {
        self.end.is_none() && !self.is_held && self.outbox.unsent_bytes() < UNSENT_MAX
    }

    /// Returns the place for the next bytes from the host, which is never empty.
    pub fn space(&mut self) -> &mut [u8] {
        if let Phase::Data { slot, missing, .. } = self.phase
            && self.inbox.is_empty()
            && missing >= DIRECT_MIN
        {
            let slot = &mut self.slots[usize::from(slot)];
            if let Some(buffer) = &mut slot.buffer {
                return &mut buffer[slot.received..slot.received + missing];
            }
        }
        self.inbox.space()
    }

    /// Takes note of bytes that the driver has received into [`Connection::space`].
    pub fn received(&mut self, bytes: usize, buffers: &mut Buffers, now: Instant) {
        match self.phase {
            Phase::Data { slot, missing, .. } if self.inbox.is_empty() && missing >= DIRECT_MIN => {
                self.data_arrived(slot, bytes);
            }
            _ => self.inbox.received(bytes),
        }
        self.look(buffers, now);
    }

    /// Looks at what was received.
    fn look(&mut self, buffers: &mut Buffers, now: Instant) {
        while self.end.is_none() {
            match self.advance(buffers, now) {
                Ok(true) => {}
                Ok(false) => return,
                Err(fatal) => self.fail(fatal),
            }
        }
    }

    fn fail(&mut self, fatal: Fatal) {
        self.close(End::Violation(fatal));
        self.outbox
            .push(&Header::C2hTermReq(fatal), Flags::empty(), DataLayout::default());
    }

    /// Takes one step. Returns false if that needs further bytes.
    fn advance(&mut self, buffers: &mut Buffers, now: Instant) -> Result<bool, Fatal> {
        match &mut self.phase {
            Phase::Header => {
                if self.inbox.is_empty() {
                    return Ok(false);
                }
                // A command that is not taken stays in the socket: others have the target's buffers.
                self.is_held =
                    self.inbox.begins_with(PduType::CapsuleCmd) && self.queue.held_until(now).is_some();
                if self.is_held {
                    return Ok(false);
                }
                let Some((common, header)) = self.inbox.take_header(self.digests)? else {
                    return Ok(false);
                };
                self.handle_header(&common, header, buffers, now)?;
                Ok(true)
            }
            Phase::Data { slot, missing, .. } => {
                let slot = *slot;
                if *missing > 0 {
                    let part = self.inbox.take(*missing);
                    let (to, bytes) = (&mut self.slots[usize::from(slot)], part.len());
                    if let Some(buffer) = &mut to.buffer {
                        buffer[to.received..to.received + bytes].copy_from_slice(part);
                    }
                    self.data_arrived(slot, bytes);
                    return Ok(bytes > 0);
                }
                match std::mem::replace(&mut self.phase, Phase::Header) {
                    Phase::Data {
                        slot,
                        digest: Some(digest),
                        ..
                    } => self.phase = Phase::Digest { slot, digest },
                    _ => self.data_complete(slot, true, buffers, now),
                }
                Ok(true)
            }
            Phase::Digest { slot, digest } => {
                let Some(is_right) = self.inbox.take_digest(digest) else {
                    return Ok(false);
                };
                let slot = *slot;
                self.phase = Phase::Header;
                self.data_complete(slot, is_right, buffers, now);
                Ok(true)
            }
            Phase::Skip(left) => {
                let part = self.inbox.take(*left).len();
                *left -= part;
                if *left == 0 {
                    self.phase = Phase::Header;
                }
                Ok(part > 0)
            }
        }
    }

    fn handle_header(
        &mut self,
        common: &Common,
        header: Header,
        buffers: &mut Buffers,
        now: Instant,
    ) -> Result<(), Fatal> {
        match header {
            Header::IcReq(request) if !self.is_initialized => {
                self.is_initialized = true;
                self.alignment = request.alignment;
                let response = Initialize {
                    alignment: 4,
                    digests: request.digests,
                    limit: H2C_DATA_MAX,
                };
                self.outbox
                    .push(&Header::IcResp(response), Flags::empty(), DataLayout::default());
                self.digests = request.digests;
                Ok(())
            }
            Header::CapsuleCmd(sqe) if self.is_initialized => {
                self.handle_command(common, sqe, buffers, now)?;
                // It may have failed the other command of its pair, whatever has become of itself.
                if !mutant!(PairHalfForgotten) {
                    self.respond_events();
                }
                Ok(())
            }
            Header::H2cData(transfer) if self.is_initialized => self.handle_data(common, &transfer),
            Header::H2cTermReq(fatal) => {
                self.close(End::Terminated(fatal));
                Ok(())
            }
            _ => Err(Fatal::Sequence),
        }
    }

    fn handle_command(
        &mut self,
        common: &Common,
        sqe: Sqe,
        buffers: &mut Buffers,
        now: Instant,
    ) -> Result<(), Fatal> {
        if self.queue.is_over() {
            self.close(End::ControllerOver);
            return Ok(());
        }
        let in_capsule_max = match self.queue.is_io() {
            true => self.port.in_capsule_max,
            false => ADMIN_IN_CAPSULE_MAX,
        };
        if common.data_len > in_capsule_max as usize {
            return Err(Fatal::Limit);
        }
        // Data in the capsule come next, whatever becomes of the command.
        let behind = common.pdu_len - common.data_offset;
        self.phase = if behind > 0 {
            Phase::Skip(behind)
        } else {
            Phase::Header
        };
        let sgl = match sqe.sgl() {
            Ok(sgl) => sgl,
            Err(status) => {
                let cqe = self.queue.complete(sqe.cid(), status, 0);
                self.respond(cqe);
                return Ok(());
            }
        };
        let (length, is_in_capsule) = match sgl {
            Sgl::InCapsule { offset: 0, length } if length as usize == common.data_len => {
                (length, length > 0)
            }
            Sgl::Transport { length } if common.data_len == 0 => (length, false),
            _ => {
                let status = match sgl {
                    Sgl::InCapsule { .. } => Status::SGL_OFFSET_INVALID,
                    Sgl::Transport { .. } => Status::SGL_LENGTH_INVALID,
                    Sgl::Keyed { .. } => Status::SGL_TYPE_INVALID,
                };
                let cqe = self.queue.complete(sqe.cid(), status.do_not_retry(), 0);
                self.respond(cqe);
                return Ok(());
            }
        };
        let admitted = match self.queue.admit(&sqe, length, now) {
            Ok(admitted) => admitted,
            Err(cqe) => {
                self.respond(cqe);
                return Ok(());
            }
        };
        // A host has no more commands outstanding than the queue has entries.
        let at = self.free.pop().ok_or(Fatal::Limit)?;
        let (io, receives, needs_buffer) = match admitted {
            Admitted::Io(io) => {
                let (has_data, receives) = (io.operation.has_data(), io.operation.is_to_controller());
                (Some(io), receives, has_data)
            }
            // One that sends data makes them once there is a counted buffer for them.
            Admitted::Command { receives } => {
                let sends = length > 0 && sqe.is_to_host();
                (None, receives > 0, receives > 0 || sends)
            }
        };
        let slot = &mut self.slots[usize::from(at)];
        *slot = Slot {
            is_used: true,
            sqe,
            io,
            // No command has more data: a host may have room for more than the controller makes.
            length: length.min(self.port.data_max()) as usize,
            ..Slot::new()
        };
        if receives && is_in_capsule {
            slot.buffer = Some(buffers.take(slot.length));
            self.phase = Phase::Data {
                slot: at,
                missing: slot.length,
                digest: self.digests.contains(Digests::DATA).then(new_digest),
            };
        } else if is_in_capsule {
            // The host sends data that the command does not have.
            self.release(at, buffers);
            let cqe = self
                .queue
                .complete(sqe.cid(), Status::INVALID_FIELD.do_not_retry(), 0);
            self.respond(cqe);
        } else if needs_buffer {
            self.waiting.push_back(at);
            self.grant(buffers);
        } else {
            self.run(at, buffers, now);
        }
        Ok(())
    }

    /// Gives buffers to the commands that wait for one, in their order, as far as they fit.
    fn grant(&mut self, buffers: &mut Buffers) {
        while let Some(&at) = self.waiting.front() {
            let slot = &mut self.slots[usize::from(at)];
            let size = Buffers::size(slot.length);
            if self.buffered > 0 && self.buffered + size > BUFFERED_MAX {
                return;
            }
            self.waiting.pop_front();
            self.buffered += size;
            slot.counted = size;
            slot.buffer = Some(buffers.take(slot.length));
            let receives = match &slot.io {
                Some(io) => io.operation.is_to_controller(),
                None => slot.sqe.is_to_controller(),
            };
            if receives {
                slot.awaits_data = true;
                let transfer = Transfer {
                    cid: slot.sqe.cid(),
                    tag: at,
                    offset: 0,
                    length: slot.length as u32,
                };
                let layout = DataLayout {
                    digests: self.digests,
                    ..DataLayout::default()
                };
                self.outbox.push(&Header::R2t(transfer), Flags::empty(), layout);
            } else {
                self.ready.push_back(at);
            }
        }
    }

    fn handle_data(&mut self, common: &Common, transfer: &Transfer) -> Result<(), Fatal> {
        let slot = self.slots.get(usize::from(transfer.tag));
        let slot = slot.filter(|slot| slot.awaits_data);
        let slot = slot
            .filter(|slot| slot.sqe.cid() == transfer.cid)
            .ok_or(Fatal::InvalidField(10))?;
        if transfer.length as usize != common.data_len || common.data_len == 0 {
            return Err(Fatal::InvalidField(16));
        }
        if transfer.length > H2C_DATA_MAX {
            return Err(Fatal::Limit);
        }
        if transfer.offset as usize != slot.received || common.data_len > slot.length - slot.received {
            return Err(Fatal::OutOfRange);
        }
        self.phase = Phase::Data {
            slot: transfer.tag,
            missing: common.data_len,
            digest: self.digests.contains(Digests::DATA).then(new_digest),
        };
        Ok(())
    }

    /// Takes note of data in a command's buffer.
    fn data_arrived(&mut self, at: u16, bytes: usize) {
        let slot = &mut self.slots[usize::from(at)];
        if let Phase::Data { missing, digest, .. } = &mut self.phase {
            *missing -= bytes;
            if let (Some(digest), Some(buffer)) = (digest, &slot.buffer) {
                digest.update(&buffer[slot.received..slot.received + bytes]);
            }
        }
        slot.received += bytes;
    }

    /// The data of a PDU have arrived. One with a wrong digest fails its command once all data are there (NVMe/TCP 3.3.1.1.2).
    fn data_complete(&mut self, at: u16, is_right: bool, buffers: &mut Buffers, now: Instant) {
        let slot = &mut self.slots[usize::from(at)];
        slot.is_damaged |= !is_right;
        if slot.received < slot.length {
            return;
        }
        slot.awaits_data = false;
        if slot.is_damaged {
            let cqe = self
                .queue
                .complete(slot.sqe.cid(), Status::TRANSIENT_TRANSPORT, 0);
            self.respond(cqe);
            self.release(at, buffers);
            return self.respond_events();
        }
        self.run(at, buffers, now);
    }

    /// Carries out a command that has all that it needs, or has the driver do it.
    fn run(&mut self, at: u16, buffers: &mut Buffers, now: Instant) {
        let slot = &mut self.slots[usize::from(at)];
        if slot.io.is_some() {
            self.ready.push_back(at);
            return;
        }
        // The buffer of a command that sends data has any bytes.
        let data = match &slot.buffer {
            Some(buffer) if slot.sqe.is_to_controller() => &buffer[..slot.length],
            _ => &[],
        };
        match self.queue.execute(&slot.sqe, data, now) {
            Step::Complete(cqe) => {
                self.respond(cqe);
                self.release(at, buffers);
            }
            Step::Send(data, cqe) => match &mut slot.buffer {
                Some(buffer) => {
                    slot.length = slot.length.min(data.len());
                    buffer[..slot.length].copy_from_slice(&data[..slot.length]);
                    self.send_data(at, cqe);
                }
                None => {
                    self.respond(cqe);
                    self.release(at, buffers);
                }
            },
            // The queue knows its id.
            Step::Wait if mutant!(PlaceKept) => {}
            Step::Wait => self.release(at, buffers),
        }
        // Connect has said how many commands the host may have outstanding.
        for at in self.slots.len()..usize::from(self.queue.entries()) {
            self.slots.push(Slot::new());
            self.free.push(at as u16);
        }
        self.respond_events();
    }

    /// Returns an I/O to carry out; then [`Connection::complete`] is to be called. Carries out other commands that have waited for a buffer,
    /// and takes commands that the host's limits have held up.
    pub fn poll_io(&mut self, buffers: &mut Buffers, now: Instant) -> Option<Work> {
        if self.is_held && self.queue.held_until(now).is_none() {
            self.look(buffers, now);
        }
        if let Some(io) = self.queue.poll_flush() {
            return Some(Work {
                slot: None,
                io,
                buffer: Pages::default(),
                length: 0,
                running: None,
                is_aborted: false,
            });
        }
        let at = loop {
            let at = self.ready.pop_front()?;
            match self.slots[usize::from(at)].io {
                Some(_) => break at,
                None => self.run(at, buffers, now),
            }
        };
        let slot = &mut self.slots[usize::from(at)];
        let io = slot.io.take()?;
        // A host may name data with a command that has none.
        let length = if io.operation.has_data() { slot.length } else { 0 };
        Some(Work {
            slot: Some(at),
            io,
            buffer: slot.buffer.take().unwrap_or_default(),
            length,
            running: None,
            is_aborted: slot.is_aborted,
        })
    }

    /// Takes note of the result of an I/O.
    pub fn complete(&mut self, work: Work, status: Status, buffers: &mut Buffers) {
        let Some(at) = work.slot else {
            self.queue.flushed(status);
            return self.respond_events();
        };
        let slot = &mut self.slots[usize::from(at)];
        let cqe = self.queue.complete(slot.sqe.cid(), status, work.io.result());
        slot.buffer = Some(work.buffer);
        if work.io.operation.is_to_host() && status.is_success() {
            self.send_data(at, cqe);
        } else {
            self.respond(cqe);
            self.release(at, buffers);
        }
    }

    /// Sends a command's data and its completion.
    fn send_data(&mut self, at: u16, cqe: Cqe) {
        let slot = &mut self.slots[usize::from(at)];
        // The completion of a success says no more than this flag, where the host does not need the head of the queue.
        let is_complete = !self.queue.has_flow_control() && cqe.status == Status::SUCCESS && cqe.result == 0;
        let transfer = Transfer {
            cid: cqe.cid,
            tag: 0,
            offset: 0,
            length: slot.length as u32,
        };
        let flags = if is_complete {
            Flags::LAST | Flags::SUCCESS
        } else {
            Flags::LAST
        };
        let layout = DataLayout {
            len: slot.length,
            digests: self.digests,
            alignment: self.alignment,
        };
        self.outbox.push(&Header::C2hData(transfer), flags, layout);
        self.outbox.push_data(at, 0..slot.length);
        if self.digests.contains(Digests::DATA) {
            let mut digest = new_digest();
            digest.update(
                slot.buffer
                    .as_ref()
                    .map_or(&[][..], |buffer| &buffer[..slot.length]),
            );
            self.outbox.push_bytes(&(digest.finalize() as u32).to_le_bytes());
        }
        if !is_complete {
            self.respond(cqe);
        }
    }

    fn respond(&mut self, cqe: Cqe) {
        let layout = DataLayout {
            digests: self.digests,
            ..DataLayout::default()
        };
        self.outbox
            .push(&Header::CapsuleResp(cqe), Flags::empty(), layout);
    }

    /// Frees a command's place.
    fn release(&mut self, at: u16, buffers: &mut Buffers) {
        let slot = &mut self.slots[usize::from(at)];
        if let Some(buffer) = slot.buffer.take() {
            buffers.give(buffer);
        }
        self.buffered -= slot.counted;
        *slot = Slot::new();
        self.free.push(at);
        self.grant(buffers);
    }

    /// Fills in what is to be sent next, and returns the number of slices; 0 if nothing waits.
    pub fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let data = |slot: u16| {
            self.slots[usize::from(slot)]
                .buffer
                .as_deref()
                .unwrap_or_default()
        };
        self.outbox.slices(data, slices)
    }

    /// Takes note of bytes that the driver has sent.
    pub fn sent(&mut self, bytes: usize, buffers: &mut Buffers) {
        let mut left = bytes;
        while let Some(slot) = self.outbox.sent(&mut left) {
            self.release(slot, buffers);
        }
    }
}

/// An I/O that the driver carries out.
#[derive(Debug)]
pub struct Work {
    /// Its command; `None` if the controller itself asks for it.
    slot: Option<u16>,
    io: Io,
    buffer: Pages,
    length: usize,
    /// Set while an io_uring carries it out.
    running: Option<Running>,
    is_aborted: bool,
}

impl Work {
    /// Returns the I/O.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// Carries it out on a reactor's thread, if that is quick. `None`: [`Work::execute`] does what is left, on another thread.
    pub fn execute_quick(&mut self) -> Option<Status> {
        if self.is_aborted {
            return Some(Status::ABORT_REQUESTED);
        }
        self.io.execute_quick(&mut self.buffer[..self.length])
    }

    /// Carries it out.
    pub fn execute(&mut self) -> Status {
        if self.is_aborted {
            return Status::ABORT_REQUESTED;
        }
        self.io.execute(&mut self.buffer[..self.length])
    }

    /// Turns it into an access of an io_uring, whose owner knows it by what `token` makes of it.
    ///
    /// # Errors
    /// The work, if it takes more than an access, or must not run any more: [`Work::execute`] tells.
    pub fn into_access<T>(mut self, token: impl FnOnce(Work) -> T) -> Result<FileAccess<T>, Work> {
        let Some((file, direction, running)) = self.io.start() else {
            return Err(self);
        };
        self.running = Some(running);
        Ok(FileAccess {
            file,
            direction,
            offset: self.io.offset,
            length: self.io.length,
            buffer: std::mem::take(&mut self.buffer),
            token: token(self),
        })
    }

    /// Takes its buffer back from an access.
    pub fn end_access(&mut self, buffer: Pages) {
        self.buffer = buffer;
        self.running = None;
    }
}

/// CRC-32C. NVMe/TCP 3.3.1.1.
pub(crate) fn new_digest() -> Digest {
    Digest::new(CrcAlgorithm::Crc32Iscsi)
}
