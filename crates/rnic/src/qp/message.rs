//! Functions on messages that all transport services share: packets, access to local memory, operations without packets.

use std::sync::Arc;

use rdmux_wire::LKey;
use rdmux_wire::roce::{ICRC_LEN, Packet, Position};

use crate::cq::{Status, WcOpcode};
use crate::local::{PARTS_MAX, Part, RingBytes, Room};
use crate::memory::{Access, Memory, PeerFault};
use crate::qp::execute::Refusal;
use crate::qp::{Env, Head};
use crate::region::Pd;
use crate::trace::Note;
use crate::work::{Operation, SendRequest, Sge, SgeList};

/// Payload of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Payload<'a> {
    /// In its packet.
    Packet(&'a [u8]),
    /// In a record that the peer may change meanwhile: from this offset on, so many bytes.
    Ring(&'a dyn RingBytes, usize, usize),
}

impl Payload<'_> {
    pub(crate) fn len(self) -> usize {
        match self {
            Payload::Packet(bytes) => bytes.len(),
            Payload::Ring(_, _, len) => len,
        }
    }

    pub(crate) fn to_vec(self) -> Result<Vec<u8>, PeerFault> {
        match self {
            Payload::Packet(bytes) => Ok(bytes.to_vec()),
            Payload::Ring(record, at, len) => {
                let mut bytes = vec![0; len];
                record.read(at, &mut bytes)?;
                Ok(bytes)
            }
        }
    }

    /// Writes all of it to a memory, as [`Memory::write`] does.
    pub(crate) fn write_to(self, memory: &dyn Memory, offset: u64) -> Result<(), PeerFault> {
        match self {
            Payload::Packet(bytes) => memory.write(offset, bytes).map_err(PeerFault::Own),
            Payload::Ring(record, at, len) => copy_out(record, at, memory, offset, len),
        }
    }
}

/// Copies bytes of a record to a memory.
fn copy_out(
    record: &dyn RingBytes,
    at: usize,
    to: &dyn Memory,
    offset: u64,
    len: usize,
) -> Result<(), PeerFault> {
    match record.read_to(at, to, offset, len) {
        Err(PeerFault::Ended) if mutant!(EndedIsPlaced) => Ok(()),
        copied => copied,
    }
}

/// Returns the bytes of a packet with `len` bytes of payload, which are elsewhere, or zeros; with its pad and without an ICRC.
pub(super) fn assemble(
    packet: &Packet<'_>,
    len: usize,
    payload: Option<Payload<'_>>,
) -> Result<Vec<u8>, PeerFault> {
    let tail = usize::from(packet.bth.pad) + ICRC_LEN;
    let heads = packet.bytes().len() - packet.payload().len() - tail;
    let mut bytes = packet.bytes()[..heads].to_vec();
    if let Some(payload) = payload {
        bytes.extend(payload.to_vec()?);
    }
    bytes.resize(heads + len + tail, 0);
    Ok(bytes)
}

/// Returns the opcode of an operation's completion.
pub(crate) fn opcode_of(operation: &Operation) -> WcOpcode {
    match operation {
        Operation::Send { .. } | Operation::SendInvalidate { .. } => WcOpcode::Send,
        Operation::Write { .. } => WcOpcode::Write,
        Operation::Read { .. } => WcOpcode::Read,
        Operation::CompareSwap { .. } => WcOpcode::CompareSwap,
        Operation::FetchAdd { .. } => WcOpcode::FetchAdd,
        Operation::AtomicWrite { .. } => WcOpcode::AtomicWrite,
        Operation::Flush { .. } => WcOpcode::Flush,
        Operation::Bind(_) => WcOpcode::BindWindow,
        Operation::Register(_) => WcOpcode::Register,
        Operation::LocalInvalidate { .. } => WcOpcode::LocalInvalidate,
    }
}

/// Notes that a request ended in error, with the address and key that it names: the peer's, or those of its own memory if that
/// caused the error.
pub(super) fn note_failed(env: &mut Env<'_>, head: &Head, request: &SendRequest, bytes: u32, status: Status) {
    let named = request.operation.names();
    let first = request.sges.as_slice().first();
    let own = first.map(|sge| (sge.addr, sge.lkey));
    let is_own = matches!(
        status,
        Status::LocalProtection | Status::LocalQpOperation | Status::LocalLength
    );
    let (va, key) = if is_own { own } else { named }.or(named).unwrap_or((0, 0));
    let note = Note::RequestFailed {
        status,
        opcode: opcode_of(&request.operation),
        wr_id: request.wr_id,
        va,
        key,
        length: match request.operation {
            Operation::Flush { length, .. } => length,
            _ => bytes,
        },
    };
    env.note(head.qpn, note);
}

/// Carries out an operation that needs no packet.
pub(super) fn perform_local(env: &mut Env<'_>, head: &Head, operation: &Operation) -> Result<(), Status> {
    let (pd, qpn) = (head.init.pd, head.qpn);
    match operation {
        Operation::Bind(bind) => env.regions.bind(bind, pd, qpn).map_err(|_| Status::MemoryBind),
        Operation::Register(registration) => {
            let done = env.regions.fill(registration, pd);
            done.map_err(|_| Status::LocalQpOperation)
        }
        Operation::LocalInvalidate { rkey } => {
            let done = env.regions.invalidate(*rkey, pd, qpn);
            done.map_err(|_| Status::LocalQpOperation)
        }
        _ => Ok(()),
    }
}

/// Returns the number of packets of a request of `bytes`: none for an operation that the device carries out alone, one for a
/// message without bytes.
pub(super) fn packets_of(operation: &Operation, bytes: u32, mtu: u32) -> u32 {
    if operation.is_local() {
        0
    } else {
        bytes.div_ceil(mtu).max(1)
    }
}

/// Returns whether a packet has as many bytes of payload as its position in the message requires, and the number of packets that it
/// stands for. IBTA Vol 1, 9.7.4.1.6.
pub(super) fn fits(packet: &Packet<'_>, bytes: usize, mtu: u32) -> bool {
    let all = packet.count() as usize * mtu as usize;
    match packet.bth.opcode.operation.position() {
        Position::First | Position::Middle => bytes == all && packet.bth.pad == 0,
        Position::Last => bytes > 0 && is_whole(bytes, packet.count(), mtu),
        Position::Only => is_whole(bytes, packet.count(), mtu),
    }
}

/// Returns whether so many packets, and not fewer, carry these bytes, the last of a message.
#[inline]
pub(crate) fn is_whole(bytes: usize, packets: u32, mtu: u32) -> bool {
    let all = packets as usize * mtu as usize;
    bytes <= all && (packets == 1 || bytes + mtu as usize > all)
}

/// Returns whether a packet has no more payload than the packets that it stands for can carry.
pub(super) fn is_within(packet: &Packet<'_>, mtu: u32) -> bool {
    packet.payload().len() <= packet.count() as usize * mtu as usize
}

/// Returns the parts of a list that hold bytes `[skip, skip + len)` of the message: `(element, offset in it, bytes)`.
pub(crate) fn pieces(sges: &SgeList, skip: u64, len: usize) -> impl Iterator<Item = (&Sge, u64, usize)> {
    let (mut skip, mut left) = (skip, len);
    sges.as_slice().iter().filter_map(move |sge| {
        let length = u64::from(sge.length);
        if skip >= length {
            skip -= length;
            return None;
        }
        let n = (length - skip).min(left as u64) as usize;
        let at = std::mem::take(&mut skip);
        left -= n;
        (n > 0).then_some((sge, at, n))
    })
}

/// Returns the memory of an element, and the offset in it at which the element begins.
pub(super) fn memory_of<'a>(
    env: &'a Env<'_>,
    pd: Pd,
    sge: &Sge,
    access: Access,
) -> Result<(&'a Arc<dyn Memory>, u64), Status> {
    let region = env.regions.local(sge.lkey, pd, access);
    let region = region.ok_or(Status::LocalProtection)?;
    let offset = region.offset_of(sge.addr, u64::from(sge.length));
    Ok((region.memory, offset.ok_or(Status::LocalProtection)?))
}

/// Returns whether the memory of a list is accessed more cheaply at once than packet by packet.
pub(super) fn gathers(env: &Env<'_>, pd: Pd, sges: &SgeList) -> bool {
    let first = sges.as_slice().first();
    first
        .is_some_and(|sge| memory_of(env, pd, sge, Access::empty()).is_ok_and(|(memory, _)| memory.gathers()))
}

/// Copies a part of a message out of local memory.
pub(super) fn gather(env: &Env<'_>, pd: Pd, sges: &SgeList, skip: u64, out: &mut [u8]) -> Result<(), Status> {
    if let Some(bytes) = sges.as_inline() {
        let at = skip as usize;
        let part = bytes.get(at..at + out.len()).ok_or(Status::LocalLength)?;
        out.copy_from_slice(part);
        return Ok(());
    }
    let mut done = 0;
    for (sge, at, n) in pieces(sges, skip, out.len()) {
        let (memory, begin) = memory_of(env, pd, sge, Access::empty())?;
        let read = memory.read(begin + at, &mut out[done..done + n]);
        read.map_err(|_| Status::LocalQpOperation)?;
        done += n;
    }
    Ok(())
}

/// Copies a part of a message out of local memory, into a record at an offset.
pub(super) fn gather_into(
    env: &Env<'_>,
    pd: Pd,
    sges: &SgeList,
    skip: u64,
    (room, at, len): (&dyn Room, usize, usize),
) -> Result<(), Status> {
    if let Some(bytes) = sges.as_inline() {
        let from = skip as usize;
        let part = bytes.get(from..from + len).ok_or(Status::LocalLength)?;
        room.write(at, part);
        return Ok(());
    }
    let mut done = 0;
    for (sge, from, n) in pieces(sges, skip, len) {
        let (memory, begin) = memory_of(env, pd, sge, Access::empty())?;
        let copied = room.write_from(at + done, &**memory, begin + from, n);
        copied.map_err(|_| Status::LocalQpOperation)?;
        done += n;
    }
    Ok(())
}

/// Returns the parts of the QP's memory that hold a part of a message, and their number; `None` if they are too many, or inline.
pub(super) fn parts(
    env: &Env<'_>,
    pd: Pd,
    sges: &SgeList,
    skip: u64,
    len: usize,
) -> Result<Option<([Part; PARTS_MAX], usize)>, Status> {
    let none = Part {
        lkey: LKey(0),
        offset: 0,
        len: 0,
    };
    let (mut parts, mut count) = ([none; PARTS_MAX], 0);
    if sges.as_inline().is_some() {
        return Ok(None);
    }
    for (sge, at, n) in pieces(sges, skip, len) {
        let region = env.regions.local(sge.lkey, pd, Access::empty());
        let region = region.ok_or(Status::LocalProtection)?;
        let begin = region.offset_of(sge.addr, u64::from(sge.length));
        let begin = begin.ok_or(Status::LocalProtection)? - region.memory_offset;
        let Some(part) = parts.get_mut(count) else {
            return Ok(None);
        };
        *part = Part {
            lkey: LKey(sge.lkey),
            offset: begin + at,
            len: n as u32,
        };
        count += 1;
    }
    Ok(Some((parts, count)))
}

/// Places a payload, a part of a message, into local memory.
pub(super) fn place(
    env: &Env<'_>,
    pd: Pd,
    sges: &SgeList,
    skip: u64,
    payload: Payload<'_>,
) -> Result<(), Refusal> {
    let (record, at, len) = match payload {
        Payload::Packet(bytes) => return scatter(env, pd, sges, skip, bytes).map_err(Refusal::Receive),
        Payload::Ring(record, at, len) => (record, at, len),
    };
    let mut done = 0;
    for (sge, to, n) in pieces(sges, skip, len) {
        let found = memory_of(env, pd, sge, Access::LOCAL_WRITE);
        let (memory, begin) = found.map_err(Refusal::Receive)?;
        let copied = copy_out(record, at + done, &**memory, begin + to, n);
        copied.map_err(|fault| match fault {
            PeerFault::Ended => Refusal::SourceEnded,
            PeerFault::Own(_) => Refusal::Receive(Status::LocalQpOperation),
        })?;
        done += n;
    }
    if done < len {
        Err(Refusal::Receive(Status::LocalLength))
    } else {
        Ok(())
    }
}

/// Places a part of a message into local memory.
pub(super) fn scatter(env: &Env<'_>, pd: Pd, sges: &SgeList, skip: u64, bytes: &[u8]) -> Result<(), Status> {
    let mut done = 0;
    for (sge, at, n) in pieces(sges, skip, bytes.len()) {
        let (memory, begin) = memory_of(env, pd, sge, Access::LOCAL_WRITE)?;
        let written = memory.write_in_any_order(begin + at, &bytes[done..done + n]);
        written.map_err(|_| Status::LocalQpOperation)?;
        done += n;
    }
    if done < bytes.len() {
        Err(Status::LocalLength)
    } else {
        Ok(())
    }
}
