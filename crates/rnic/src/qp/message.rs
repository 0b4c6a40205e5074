//! Functions on messages that all transport services share: packets, access to local memory, operations without packets.

use std::sync::Arc;

use rdmux_wire::roce::{ICRC_LEN, Packet, Position};

use crate::cq::{Status, WcOpcode};
use crate::local::RingBytes;
use crate::memory::{Access, Fault, Memory};
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

    pub(crate) fn to_vec(self) -> Vec<u8> {
        match self {
            Payload::Packet(bytes) => bytes.to_vec(),
            Payload::Ring(ring, at, len) => {
                let mut bytes = vec![0; len];
                ring.read(at, &mut bytes);
                bytes
            }
        }
    }

    /// Writes all of it to a memory, as [`Memory::write`] does.
    pub(crate) fn write_to(self, memory: &dyn Memory, offset: u64) -> Result<(), Fault> {
        match self {
            Payload::Packet(bytes) => memory.write(offset, bytes),
            Payload::Ring(ring, at, len) => ring.read_to(at, memory, offset, len),
        }
    }
}

/// Returns the bytes of a packet whose payload is elsewhere, with its pad and without an ICRC.
pub(super) fn assemble(packet: &Packet<'_>, payload: Payload<'_>) -> Vec<u8> {
    let tail = usize::from(packet.bth.pad) + ICRC_LEN;
    let heads = packet.bytes().len() - packet.payload().len() - tail;
    let mut bytes = packet.bytes()[..heads].to_vec();
    bytes.extend(payload.to_vec());
    bytes.resize(bytes.len() + tail, 0);
    bytes
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
    let mtu = mtu as usize;
    let before_last = (packet.count() as usize - 1) * mtu;
    let all = before_last + mtu;
    match packet.bth.opcode.operation.position() {
        Position::First | Position::Middle => bytes == all && packet.bth.pad == 0,
        Position::Last => (before_last + 1..=all).contains(&bytes),
        Position::Only if before_last == 0 => bytes <= mtu,
        Position::Only => (before_last + 1..=all).contains(&bytes),
    }
}

/// Returns whether a packet has no more payload than the packets that it stands for can carry.
pub(super) fn is_within(packet: &Packet<'_>, mtu: u32) -> bool {
    packet.payload().len() <= packet.count() as usize * mtu as usize
}

/// Returns the parts of a list that hold bytes `[skip, skip + len)` of the message: `(element, offset in it, bytes)`.
fn pieces(sges: &SgeList, skip: u64, len: usize) -> impl Iterator<Item = (&Sge, u64, usize)> {
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
    (ring, at, len): (&dyn RingBytes, usize, usize),
) -> Result<(), Status> {
    if let Some(bytes) = sges.as_inline() {
        let from = skip as usize;
        let part = bytes.get(from..from + len).ok_or(Status::LocalLength)?;
        ring.write(at, part);
        return Ok(());
    }
    let mut done = 0;
    for (sge, from, n) in pieces(sges, skip, len) {
        let (memory, begin) = memory_of(env, pd, sge, Access::empty())?;
        let copied = ring.write_from(at + done, &**memory, begin + from, n);
        copied.map_err(|_| Status::LocalQpOperation)?;
        done += n;
    }
    Ok(())
}

/// Places a payload, a part of a message, into local memory.
pub(super) fn place(
    env: &Env<'_>,
    pd: Pd,
    sges: &SgeList,
    skip: u64,
    payload: Payload<'_>,
) -> Result<(), Status> {
    let (ring, at, len) = match payload {
        Payload::Packet(bytes) => return scatter(env, pd, sges, skip, bytes),
        Payload::Ring(ring, at, len) => (ring, at, len),
    };
    let mut done = 0;
    for (sge, to, n) in pieces(sges, skip, len) {
        let (memory, begin) = memory_of(env, pd, sge, Access::LOCAL_WRITE)?;
        let copied = ring.read_to(at + done, &**memory, begin + to, n);
        copied.map_err(|_| Status::LocalQpOperation)?;
        done += n;
    }
    if done < len {
        Err(Status::LocalLength)
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
