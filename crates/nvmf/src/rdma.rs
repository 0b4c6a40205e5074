//! NVMe/RDMA: the controller's side of a connection, as a state machine without I/O.
//!
//! Each command has a place, that of its response, which the driver chooses: it passes a capsule with a free place
//! ([`Connection::handle_capsule`]), and the place is the command's until the driver has got its [`Response`], or [`Action::Release`]. It
//! carries out what [`Connection::poll`] returns, and says how that went ([`Connection::fetched`], [`Connection::complete`]). Commands with
//! data wait for buffers, which the driver gives in their order ([`Connection::wants_buffer`], [`Connection::granted`]). The driver asks for all
//! of these until there is none.

#[cfg(test)]
pub(crate) mod tests;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use rdmux_drive::{Action as DriveAction, MemoryKind};
use rdmux_runtime::{FileAccess, Pages};
use rdmux_wire::RKey;
use rdmux_wire::nvme::{
    Cid, Connect, Cqe, FabricsType, IdentifyController, NsId, Opcode, SQE_LEN, Sgl, Sqe, Status,
    TransportKind,
};
use rdmux_wire::nvme_rdma::{Reject, Request};

use crate::backend::drive::DriveBackend;
use crate::backend::peer::{PeerData, PeerToPeer};
use crate::target::{
    ADMIN_ENTRIES, Admitted, IO_QUEUES_MAX, Io, Listener, Operation, Port, Queue, Running, Step, Target,
};

/// Maximum bytes of a command's data, as a power of two of pages of 4 KiB: 1 MiB.
const MDTS: u8 = 8;

/// Returns the properties of NVMe/RDMA with so many bytes of data in the capsule of an I/O command, a multiple of 16.
pub const fn port(in_capsule_max: u32) -> Port {
    Port {
        entries_max: 128,
        mdts: MDTS,
        in_capsule_max,
        sgls: IdentifyController::SGLS | IdentifyController::SGLS_OFFSET | IdentifyController::SGLS_KEYED,
    }
}

/// Checks a host's request for a queue. `answers_reads`: its device answers RDMA READs.
///
/// # Errors
/// The status with which it is rejected.
pub fn check(request: &Request, answers_reads: bool, port: &Port) -> Result<(), Reject> {
    let entries_max = match request.qid {
        0 => ADMIN_ENTRIES,
        _ => port.entries_max,
    };
    if request.qid > IO_QUEUES_MAX {
        return Err(Reject::Qid);
    }
    // Its size is less 1.
    if request.sends == 0 || request.sends >= entries_max {
        return Err(Reject::Sends);
    }
    if request.receives == 0 {
        return Err(Reject::Receives);
    }
    // Data of commands are fetched so.
    if !answers_reads {
        return Err(Reject::ResponderResources);
    }
    Ok(())
}

/// Reason for which a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum End {
    /// The host has violated the protocol.
    #[error("the host sent {0}")]
    Violation(&'static str),
    /// The host was silent for its keep-alive time, or sent no command in time.
    #[error("the host was silent for too long")]
    Silent,
    /// Its controller is over.
    #[error("the controller is over")]
    ControllerOver,
}

/// Data in the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address at the host.
    pub address: u64,
    /// Key at the host.
    pub rkey: RKey,
}

/// Memory of a command, which the driver takes back.
#[derive(Debug, Default)]
pub enum Memory {
    /// None.
    #[default]
    None,
    /// The capsule.
    Capsule(Vec<u8>),
    /// The buffer of [`Connection::granted`].
    Buffer(Pages),
    /// Memory of a drive, of [`Connection::granted_peer`].
    Peer(PeerData),
}

/// A response to be sent. The driver reposts the receive of its command before.
#[derive(Debug)]
pub struct Response {
    /// The place of its command. `None`: any that is free, since the command's was released.
    pub place: Option<u16>,
    /// The response.
    pub cqe: Cqe,
    /// So many bytes of the buffer or of the drive's memory, from its start, are written to the host first.
    pub write: Option<(Remote, u32)>,
    /// The host wants this key of its memory to be invalidated with the response.
    pub invalidate: Option<RKey>,
    /// The memory of the command, which it needs no more.
    pub memory: Memory,
}

/// A task of the driver.
#[derive(Debug)]
pub enum Action {
    /// Read data of a command from the host, then call [`Connection::fetched`], or [`Connection::fetched_peer`] if there is memory of a drive for them.
    Fetch {
        /// The command's place.
        place: u16,
        /// The place of the data.
        from: Remote,
        /// Bytes of them.
        length: u32,
        /// Memory of a drive that takes them.
        peer: Option<PeerData>,
    },
    /// Carry out an I/O, then call [`Connection::complete`].
    Run(Work),
    /// Send a response.
    Respond(Response),
    /// The command completes later, from another place: this one is free.
    Release(u16),
}

/// The controller's side of a connection, which is a queue.
#[derive(Debug)]
pub struct Connection {
    queue: Queue,
    port: Port,
    request: Request,
    /// By place, as far as places were used.
    slots: Vec<Slot>,
    places: usize,
    /// Commands that are not completed, but for requests for events.
    outstanding: u16,
    /// Commands that wait for a buffer.
    waiting: VecDeque<u16>,
    /// Commands, with their capsules, that the host's limits hold up.
    held: VecDeque<u16>,
    actions: VecDeque<Action>,
    end: Option<End>,
}

/// The data of a command.
#[derive(Debug, Default)]
enum Data {
    #[default]
    None,
    /// In the capsule.
    InCapsule,
    /// To be fetched into a buffer.
    Fetched(Remote),
    /// A buffer, which will be written to the host.
    Written(Remote),
}

/// A command that is not completed.
#[derive(Debug)]
struct Slot {
    is_used: bool,
    sqe: Sqe,
    io: Option<Io>,
    data: Data,
    /// Bytes of them.
    length: u32,
    invalidate: Option<RKey>,
    memory: Memory,
    /// The drive's memory is to take its data.
    takes_peer: bool,
    /// It must not be carried out.
    is_aborted: bool,
}

impl Default for Slot {
    fn default() -> Slot {
        Slot {
            is_used: false,
            sqe: Sqe::new(Opcode::FLUSH, Cid(0), NsId::NONE),
            io: None,
            data: Data::None,
            length: 0,
            invalidate: None,
            memory: Memory::None,
            takes_peer: false,
            is_aborted: false,
        }
    }
}

impl Connection {
    /// Makes the controller's side of a connection that a host has opened, with so many places for commands.
    ///
    /// `request` has passed [`check`]; `local` is the address at which the host has reached the target.
    pub fn new(
        target: Arc<Target>,
        port: Port,
        request: Request,
        places: usize,
        local: IpAddr,
        now: Instant,
    ) -> Connection {
        let listener = Listener {
            transport: TransportKind::Rdma,
            address: SocketAddr::new(local, 0),
        };
        Connection {
            queue: Queue::new(target, port, listener, now),
            port,
            request,
            slots: Vec::new(),
            places,
            outstanding: 0,
            waiting: VecDeque::new(),
            held: VecDeque::new(),
            actions: VecDeque::new(),
            end: None,
        }
    }

    /// Returns true if it is the admin queue of a controller that may have I/O queues, which end with it.
    pub fn has_io_queues(&self) -> bool {
        self.queue.has_io_queues()
    }

    /// Returns why the connection is over: the driver closes it.
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

    /// Ends the connection if its host was silent for too long.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.queue.has_expired(now) {
            self.close(End::Silent);
        }
    }

    /// Looks at what all queues share: ends the connection if its controller is over, and reports events.
    pub fn handle_change(&mut self) {
        if self.queue.is_over() {
            self.close(End::ControllerOver);
            return;
        }
        self.queue.handle_change();
        while let Some(cid) = self.queue.poll_abort() {
            self.abort(cid);
        }
        self.poll_event();
    }

    fn close(&mut self, end: End) {
        self.end = self.end.or(Some(end));
        self.queue.end();
    }

    /// Has a command completed without being carried out, if it has not begun. One whose data are on their way completes when they are there.
    fn abort(&mut self, cid: Cid) {
        let found = self.slots.iter().zip(0..);
        let found = found.filter(|(slot, _)| slot.is_used && slot.sqe.cid() == cid);
        let Some(place) = found.map(|(_, place)| place).next() else {
            return self.queue.abort_missed(cid);
        };
        let slot = &mut self.slots[usize::from(place)];
        // One that a thread of a medium has may find out by itself that it is to be aborted; others are done soon.
        slot.is_aborted = slot.io.is_some();
        if slot.is_aborted
            && let Some(at) = self.waiting.iter().position(|waiting| *waiting == place)
        {
            self.waiting.remove(at);
            self.complete_aborted(place);
        } else if let Some(at) = self.held.iter().position(|held| *held == place) {
            self.held.remove(at);
            self.complete_aborted(place);
        } else if slot.is_aborted && mutant!(AbortedWhileFetched) {
            self.complete_aborted(place);
        }
    }

    fn complete_aborted(&mut self, place: u16) {
        let cid = self.slots[usize::from(place)].sqe.cid();
        let cqe = self.queue.complete(cid, Status::ABORT_REQUESTED, 0);
        self.respond(place, cqe);
    }

    /// Takes a capsule, and with it a free place for its command. Its memory is taken if the command's data are there.
    pub fn handle_capsule(&mut self, place: u16, capsule: &mut Vec<u8>, now: Instant) {
        if self.end.is_some() {
            return;
        }
        if self.queue.is_over() {
            self.close(End::ControllerOver);
            return;
        }
        let at = usize::from(place);
        assert!(at < self.places, "there is no place {place}");
        if at >= self.slots.len() {
            self.slots.resize_with(at + 1, Slot::default);
        }
        let slot = &mut self.slots[at];
        assert!(!slot.is_used, "place {place} is in use");
        let Ok(sqe) = Sqe::parse(capsule) else {
            self.close(End::Violation("a capsule that is shorter than a command"));
            return;
        };
        if self.outstanding >= self.queue.entries() {
            self.close(End::Violation("more commands than its queue has entries"));
            return;
        }
        self.outstanding += 1;
        *slot = Slot {
            is_used: true,
            sqe,
            ..Slot::default()
        };
        if !self.held.is_empty() || self.queue.held_until(now).is_some() {
            slot.memory = Memory::Capsule(std::mem::take(capsule));
            self.held.push_back(place);
            return;
        }
        self.begin(place, capsule, now);
    }

    /// Takes commands that were held up, once their time has come.
    pub fn resume(&mut self, now: Instant) {
        while self.end.is_none()
            && self.queue.held_until(now).is_none()
            && let Some(place) = self.held.pop_front()
        {
            if let Memory::Capsule(mut capsule) = std::mem::take(&mut self.slots[usize::from(place)].memory) {
                self.begin(place, &mut capsule, now);
            }
        }
    }

    /// Returns true if commands are held up, which [`Connection::resume`] takes from the time of [`Connection::held_until`] on.
    pub fn is_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// Returns when that may be, if it is not now.
    pub fn held_until(&self, now: Instant) -> Option<Instant> {
        self.queue.held_until(now).filter(|_| self.is_held())
    }

    fn begin(&mut self, place: u16, capsule: &mut Vec<u8>, now: Instant) {
        let sqe = self.slots[usize::from(place)].sqe;
        if let Err((status, result)) = self.try_begin(place, &sqe, capsule, now) {
            let cqe = self.queue.complete(sqe.cid(), status, result);
            self.respond(place, cqe);
        }
        // It may have failed the other command of its pair, whatever has become of itself.
        self.poll_event();
    }

    /// Admits a command, and takes its first step.
    fn try_begin(
        &mut self,
        place: u16,
        sqe: &Sqe,
        capsule: &mut Vec<u8>,
        now: Instant,
    ) -> Result<(), (Status, u64)> {
        let in_capsule = (capsule.len() - SQE_LEN) as u32;
        let refused = |status: Status| (status.do_not_retry(), 0);
        let sgl = sqe.sgl().map_err(|status| (status, 0))?;
        let remote = match sgl {
            Sgl::InCapsule { offset: 0, length }
                if length <= in_capsule && length <= self.port.in_capsule_max =>
            {
                None
            }
            Sgl::InCapsule { .. } => return Err(refused(Status::SGL_OFFSET_INVALID)),
            Sgl::Transport { .. } => return Err(refused(Status::SGL_TYPE_INVALID)),
            Sgl::Keyed {
                address,
                rkey,
                invalidate,
                length,
            } => {
                // Without data there is nothing to invalidate.
                let invalidate = (invalidate && length > 0).then_some(rkey);
                self.slots[usize::from(place)].invalidate = invalidate;
                Some(Remote { address, rkey })
            }
        };
        let length = sgl.length();
        self.check_connect(sqe)?;
        let admitted = match self.queue.admit(sqe, length, now) {
            Ok(admitted) => admitted,
            Err(cqe) => {
                self.respond(place, cqe);
                return Ok(());
            }
        };
        let (io, receives, has_data) = match admitted {
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
        let slot = &mut self.slots[usize::from(place)];
        // No command has more data: a host may have room for more than the controller makes.
        slot.length = length.min(self.port.data_max());
        slot.io = io;
        let peer = slot.io.as_ref().and_then(Io::peer);
        slot.takes_peer = peer.is_some();
        slot.data = match remote {
            // The host sends data that the command does not have.
            None if length > 0 && !receives => return Err(refused(Status::INVALID_FIELD)),
            None if length > 0 => {
                // They are in the target's memory already.
                if let Some(peer) = peer
                    && peer.p2p() == PeerToPeer::Require
                    && peer.pool().kind() != MemoryKind::Dram
                {
                    return Err(refused(Status::SGL_TYPE_INVALID));
                }
                slot.memory = Memory::Capsule(std::mem::take(capsule));
                Data::InCapsule
            }
            None => Data::None,
            Some(remote) if receives => Data::Fetched(remote),
            Some(remote) => Data::Written(remote),
        };
        match has_data && matches!(slot.data, Data::Fetched(_) | Data::Written(_)) {
            true => self.waiting.push_back(place),
            false => self.run(place, now),
        }
        Ok(())
    }

    /// Checks that a Connect asks for the queue that the request of the connection has asked for.
    fn check_connect(&self, sqe: &Sqe) -> Result<(), (Status, u64)> {
        if sqe.opcode() != Opcode::FABRICS || FabricsType::of(sqe) != FabricsType::CONNECT {
            return Ok(());
        }
        let connect = Connect::parse(sqe);
        // The result names the offset of what is invalid.
        let invalid = |at: u64| Err((Status::CONNECT_INVALID.do_not_retry(), at));
        match connect {
            _ if connect.qid != self.request.qid => invalid(42),
            _ if connect.sq_size > self.request.sends => invalid(44),
            _ => Ok(()),
        }
    }

    /// Returns the bytes of the buffer that the next command needs.
    pub fn wants_buffer(&self) -> Option<usize> {
        if self.end.is_some() {
            return None;
        }
        let slot = &self.slots[usize::from(*self.waiting.front()?)];
        Some(slot.length as usize)
    }

    /// Returns the drive whose memory is to take the data of that command.
    pub fn wants_peer(&self) -> Option<&DriveBackend> {
        let slot = &self.slots[usize::from(*self.waiting.front()?)];
        slot.io.as_ref().filter(|_| slot.takes_peer)?.peer()
    }

    /// Gives that command memory of the drive.
    pub fn granted_peer(&mut self, data: PeerData, now: Instant) {
        self.grant(Memory::Peer(data), now);
    }

    /// Has the data of that command go by a buffer after all.
    pub fn forgo_peer(&mut self) {
        if let Some(place) = self.waiting.front() {
            self.slots[usize::from(*place)].takes_peer = false;
        }
    }

    /// Fails that command, which is not carried out.
    pub fn refuse(&mut self, status: Status) {
        if let Some(place) = self.waiting.pop_front() {
            let cid = self.slots[usize::from(place)].sqe.cid();
            let cqe = self.queue.complete(cid, status, 0);
            self.respond(place, cqe);
            self.poll_event();
        }
    }

    /// Gives that command a buffer of at least so many bytes. Returns its place.
    pub fn granted(&mut self, buffer: Pages, now: Instant) -> Option<u16> {
        self.grant(Memory::Buffer(buffer), now)
    }

    fn grant(&mut self, memory: Memory, now: Instant) -> Option<u16> {
        let place = self.waiting.pop_front()?;
        let slot = &mut self.slots[usize::from(place)];
        let length = slot.length;
        slot.memory = memory;
        let Data::Fetched(from) = slot.data else {
            self.run(place, now);
            return Some(place);
        };
        let peer = match std::mem::take(&mut slot.memory) {
            Memory::Peer(data) => Some(data),
            memory => {
                slot.memory = memory;
                None
            }
        };
        self.actions.push_back(Action::Fetch {
            place,
            from,
            length,
            peer,
        });
        Some(place)
    }

    fn push_work(&mut self, place: u16) {
        let slot = &mut self.slots[usize::from(place)];
        let Some(io) = slot.io.take() else {
            return;
        };
        // A host may name data with a command that has none.
        let length = if io.operation.has_data() { slot.length } else { 0 };
        let memory = std::mem::take(&mut slot.memory);
        let counted = match &memory {
            Memory::Buffer(buffer) => buffer.len(),
            _ => 0,
        };
        let work = Work {
            place: Some(place),
            io,
            memory,
            counted: counted as u32,
            length,
            is_inline: false,
            running: None,
        };
        self.actions.push_back(Action::Run(work));
    }

    /// Takes the data of a command that were fetched: `copy` copies them into a buffer.
    pub fn fetched(&mut self, place: u16, copy: impl FnOnce(&mut [u8]), now: Instant) {
        let slot = &mut self.slots[usize::from(place)];
        if let Memory::Buffer(buffer) = &mut slot.memory {
            copy(&mut buffer[..slot.length as usize]);
            self.run(place, now);
        }
    }

    /// As [`Connection::fetched`], of data that are in the memory of the drive.
    pub fn fetched_peer(&mut self, place: u16, data: PeerData, now: Instant) {
        self.slots[usize::from(place)].memory = Memory::Peer(data);
        self.run(place, now);
    }

    /// Carries out a command that has all that it needs, or has the driver do it.
    fn run(&mut self, place: u16, now: Instant) {
        let slot = &mut self.slots[usize::from(place)];
        if slot.is_aborted {
            return self.complete_aborted(place);
        }
        if slot.io.is_some() {
            return self.push_work(place);
        }
        let length = slot.length as usize;
        let data = match (&slot.data, &slot.memory) {
            (Data::InCapsule, Memory::Capsule(capsule)) => &capsule[SQE_LEN..SQE_LEN + length],
            (Data::Fetched(_), Memory::Buffer(buffer)) => &buffer[..length],
            _ => &[],
        };
        match self.queue.execute(&slot.sqe, data, now) {
            Step::Complete(cqe) => self.respond(place, cqe),
            Step::Send(bytes, cqe) => match (&slot.data, &mut slot.memory) {
                (Data::Written(remote), Memory::Buffer(buffer)) => {
                    let (remote, length) = (*remote, length.min(bytes.len()));
                    buffer[..length].copy_from_slice(&bytes[..length]);
                    slot.length = length as u32;
                    self.finish(place, cqe, Some(remote));
                }
                _ => self.respond(place, cqe),
            },
            // The queue knows its id.
            Step::Wait => {
                *slot = Slot::default();
                self.outstanding -= 1;
                self.actions.push_back(Action::Release(place));
            }
        }
        self.poll_event();
    }

    fn poll_event(&mut self) {
        while let Some(cqe) = self.queue.poll_event() {
            self.actions.push_back(Action::Respond(Response {
                place: None,
                cqe,
                write: None,
                invalidate: None,
                memory: Memory::None,
            }));
        }
    }

    /// Returns what the driver is to do next: nothing once the connection is over.
    pub fn poll(&mut self) -> Option<Action> {
        if self.end.is_some() {
            return None;
        }
        if let Some(io) = self.queue.poll_flush() {
            return Some(Action::Run(Work {
                place: None,
                io,
                memory: Memory::None,
                counted: 0,
                length: 0,
                is_inline: false,
                running: None,
            }));
        }
        self.actions.pop_front()
    }

    /// Takes note of the result of an I/O.
    pub fn complete(&mut self, work: Work, status: Status) {
        let Some(place) = work.place else {
            self.queue.flushed(status);
            return self.poll_event();
        };
        let slot = &mut self.slots[usize::from(place)];
        slot.memory = work.memory;
        let to = match slot.data {
            Data::Written(to) if work.io.operation.is_to_host() && status.is_success() => Some(to),
            _ => None,
        };
        let cqe = self.queue.complete(slot.sqe.cid(), status, work.io.result());
        self.finish(place, cqe, to);
    }

    fn respond(&mut self, place: u16, cqe: Cqe) {
        self.finish(place, cqe, None);
    }

    /// Sends a command's data and its response.
    fn finish(&mut self, place: u16, cqe: Cqe, to: Option<Remote>) {
        let slot = std::mem::take(&mut self.slots[usize::from(place)]);
        self.outstanding -= 1;
        self.actions.push_back(Action::Respond(Response {
            place: Some(place),
            cqe,
            write: to.filter(|_| slot.length > 0).map(|to| (to, slot.length)),
            invalidate: slot.invalidate.filter(|_| !mutant!(KeyKept)),
            memory: slot.memory,
        }));
    }
}

/// Returns the data of a command.
fn data(memory: &mut Memory, length: usize) -> &mut [u8] {
    match memory {
        Memory::Capsule(capsule) if length > 0 => &mut capsule[SQE_LEN..SQE_LEN + length],
        Memory::Buffer(buffer) => &mut buffer[..length],
        _ => &mut [],
    }
}

/// An I/O that the driver carries out.
#[derive(Debug)]
pub struct Work {
    /// Its command's place; `None` if the controller itself asks for it.
    place: Option<u16>,
    io: Io,
    memory: Memory,
    /// Bytes of the buffer of [`Connection::granted`] that it has.
    counted: u32,
    length: u32,
    is_inline: bool,
    /// Set while an io_uring or the offload engine carries it out.
    running: Option<Running>,
}

impl Work {
    /// Returns the I/O.
    pub fn io(&self) -> &Io {
        &self.io
    }

    /// Carries it out on a reactor's thread, if that is quick. `None`: [`Work::execute`] does what is left, on another thread.
    pub fn execute_quick(&mut self) -> Option<Status> {
        self.io
            .execute_quick(data(&mut self.memory, self.length as usize))
    }

    /// Carries it out.
    pub fn execute(&mut self) -> Status {
        match &mut self.memory {
            Memory::Peer(data) => self.io.execute_on_peer(data),
            memory => self.io.execute(data(memory, self.length as usize)),
        }
    }

    /// Returns the bytes of the buffer of [`Connection::granted`] that it has: they are in use until it is dropped, also if the connection is over.
    pub fn counted(&self) -> usize {
        self.counted as usize
    }

    /// Returns the bytes of its data in the capsule, 0 if they are elsewhere.
    pub fn in_capsule(&self) -> usize {
        match self.memory {
            Memory::Capsule(_) => self.length as usize,
            _ => 0,
        }
    }

    /// Copies data in the capsule into a buffer, by which an io_uring can move them. Returns the capsule.
    pub fn leave_capsule(&mut self, mut buffer: Pages) -> Option<Vec<u8>> {
        let Memory::Capsule(capsule) = &mut self.memory else {
            return None;
        };
        buffer[..self.length as usize].copy_from_slice(&capsule[SQE_LEN..SQE_LEN + self.length as usize]);
        let capsule = std::mem::take(capsule);
        self.memory = Memory::Buffer(buffer);
        Some(capsule)
    }

    /// Copies data in the capsule into memory that a drive reaches, if an offload engine is to write them from there and there is room. Returns the capsule.
    pub(crate) fn stage(&mut self, has_engine: bool) -> Option<Vec<u8>> {
        let Memory::Capsule(capsule) = &mut self.memory else {
            return None;
        };
        let drive = self.io.peer()?;
        let bytes = &capsule[SQE_LEN..SQE_LEN + self.length as usize];
        let staged = match has_engine && drive.offload().is_some() {
            true => drive.stage(bytes),
            false => None,
        };
        let Some(staged) = staged else {
            drive.peers().count_copied();
            return None;
        };
        let capsule = std::mem::take(capsule);
        self.memory = Memory::Peer(staged);
        self.is_inline = true;
        Some(capsule)
    }

    /// Returns true if its data came in the capsule, and are staged.
    pub(crate) fn is_inline(&self) -> bool {
        self.is_inline
    }

    /// Begins it for the offload engine. Returns the memory of its data, none for a Flush, with the drive's action; `None`: [`Work::execute`] carries it out, or
    /// tells why it must not run.
    pub(crate) fn begin_offloaded(&mut self) -> Option<(DriveAction, PeerData)> {
        let action = match (self.io.operation, &self.memory) {
            (Operation::Read, Memory::Peer(_)) => DriveAction::Read,
            (Operation::Write { .. }, Memory::Peer(_)) => DriveAction::Write,
            (Operation::Flush, _) => DriveAction::Flush,
            _ => return None,
        };
        self.running = Some(self.io.start_elsewhere(action == DriveAction::Write)?);
        let data = match &mut self.memory {
            Memory::Peer(data) => data.take(),
            _ => PeerData::default(),
        };
        Some((action, data))
    }

    /// Takes the memory of its data back from the offload engine.
    pub(crate) fn end_offloaded(&mut self, data: PeerData) {
        if let Memory::Peer(own) = &mut self.memory {
            *own = data;
        }
        self.running = None;
    }

    /// Turns it into an access of an io_uring, whose owner knows it by what `token` makes of it.
    ///
    /// # Errors
    /// The work, if it takes more than an access, or must not run any more: [`Work::execute`] tells.
    pub fn into_access<T>(mut self, token: impl FnOnce(Work) -> T) -> Result<FileAccess<T>, Work> {
        if !matches!(self.memory, Memory::Buffer(_)) {
            return Err(self);
        }
        let Some((file, direction, running)) = self.io.start() else {
            return Err(self);
        };
        let Memory::Buffer(buffer) = std::mem::take(&mut self.memory) else {
            return Err(self);
        };
        self.running = Some(running);
        Ok(FileAccess {
            file,
            direction,
            offset: self.io.offset,
            length: self.io.length,
            buffer,
            token: token(self),
        })
    }

    /// Takes its buffer back from an access.
    pub fn end_access(&mut self, buffer: Pages) {
        self.memory = Memory::Buffer(buffer);
        self.running = None;
    }
}
