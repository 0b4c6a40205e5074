//! Commands that a host sends. Ids and places of data are the queue's and the transport's.

use rdmux_wire::nvme::{
    Cid, Cns, Copy, CopyFormat, CopyRange, FabricsType, LogId, NsId, Opcode, Property, Register, Rw, Sqe,
};

use super::queue::{Command, Data};

/// Feature: number of queues. 5.27.1.5.
const NUMBER_OF_QUEUES: u8 = 0x07;
/// Feature: asynchronous events. 5.27.1.8.
const ASYNC_EVENTS: u8 = 0x0b;
/// Feature: host behavior support. 5.27.1.18.
const HOST_BEHAVIOR: u8 = 0x16;
/// Bytes of its data.
const HOST_BEHAVIOR_LEN: usize = 512;

/// Any id: the queue replaces it.
pub(super) const ANY: Cid = Cid(0);

/// Returns a command that reads a register.
pub(super) fn property_get(register: Register, is_wide: bool) -> Command {
    let property = Property {
        register,
        is_wide,
        value: 0,
    };
    Command::new(property.command(FabricsType::PROPERTY_GET, ANY))
}

/// Returns a command that writes a register of 4 bytes.
pub(super) fn property_set(register: Register, value: u32) -> Command {
    let property = Property {
        register,
        is_wide: false,
        value: value.into(),
    };
    Command::new(property.command(FabricsType::PROPERTY_SET, ANY))
}

/// Returns Identify, with room for its data.
pub fn identify(cns: Cns, nsid: NsId) -> Command {
    let mut sqe = Sqe::new(Opcode::IDENTIFY, ANY, nsid);
    sqe.set_dword(10, cns.0.into());
    Command::receiving(sqe, rdmux_wire::nvme::IDENTIFY_LEN as u32)
}

/// Returns Get Log Page of a part of a page, whose offset and length are multiples of 4 bytes. An event that names the page is not sent again
/// before it was read without `retains_event`.
///
/// # Panics
/// The length is 0 or no multiple of 4.
pub fn log_page(log: LogId, nsid: NsId, offset: u64, len: u32, retains_event: bool) -> Command {
    assert!(len > 0 && len.is_multiple_of(4), "a part of {len} bytes");
    let dwords = len / 4 - 1;
    let mut sqe = Sqe::new(Opcode::GET_LOG_PAGE, ANY, nsid);
    sqe.set_dword(
        10,
        u32::from(log.0) | u32::from(retains_event) << 15 | (dwords & 0xffff) << 16,
    );
    sqe.set_dword(11, dwords >> 16);
    sqe.set_dword(12, offset as u32);
    sqe.set_dword(13, (offset >> 32) as u32);
    Command::receiving(sqe, len)
}

fn set_features(feature: u8, value: u32) -> Command {
    let mut sqe = Sqe::new(Opcode::SET_FEATURES, ANY, NsId::NONE);
    sqe.set_dword(10, feature.into());
    sqe.set_dword(11, value);
    Command::new(sqe)
}

/// Returns Set Features that asks for so many I/O queues, 1 to 65,535.
pub(super) fn set_queues(queues: u16) -> Command {
    let queues = u32::from(queues.max(1) - 1);
    set_features(NUMBER_OF_QUEUES, queues | queues << 16)
}

/// Returns the number of I/O queues of the result of [`set_queues`].
pub(super) fn queues_of(result: u64) -> u32 {
    ((result & 0xffff).min(result >> 16 & 0xffff) + 1) as u32
}

/// Returns Set Features that asks for events.
pub(super) fn set_events(events: u32) -> Command {
    set_features(ASYNC_EVENTS, events)
}

/// Returns Set Features that enables formats of Copy (CDFE), a bit each.
pub(super) fn set_behavior(copy_formats: u16) -> Command {
    let mut sqe = Sqe::new(Opcode::SET_FEATURES, ANY, NsId::NONE);
    sqe.set_dword(10, HOST_BEHAVIOR.into());
    let mut bytes = vec![0; HOST_BEHAVIOR_LEN];
    bytes[4..6].copy_from_slice(&copy_formats.to_le_bytes());
    Command::sending(sqe, bytes)
}

/// Returns Keep Alive.
pub(super) fn keep_alive() -> Command {
    Command::new(Sqe::new(Opcode::KEEP_ALIVE, ANY, NsId::NONE))
}

/// Returns a request for an asynchronous event.
pub(super) fn event_request() -> Command {
    Command::new(Sqe::new(Opcode::ASYNC_EVENT_REQUEST, ANY, NsId::NONE))
}

/// Returns Flush.
pub fn flush(nsid: NsId) -> Command {
    Command::new(Sqe::new(Opcode::FLUSH, ANY, nsid))
}

/// Returns Read of blocks into a buffer. `bytes` is their length, at most that of the buffer.
pub fn read(nsid: NsId, slba: u64, blocks: u32, bytes: u32, buffer: Vec<u8>) -> Command {
    transfer(Opcode::READ, nsid, (slba, blocks), Data::In(bytes), buffer)
}

/// Returns Write of blocks from a buffer. `bytes` is their length, at most that of the buffer.
pub fn write(nsid: NsId, slba: u64, blocks: u32, bytes: u32, buffer: Vec<u8>) -> Command {
    transfer(Opcode::WRITE, nsid, (slba, blocks), Data::Out(bytes), buffer)
}

/// Returns Copy of blocks of another namespace of the subsystem: `blocks` from `slba` of `from` on, to `to_slba` of `nsid` on.
///
/// # Panics
/// There are no blocks, or more than 65,536.
pub fn copy(nsid: NsId, to_slba: u64, from: NsId, slba: u64, blocks: u32) -> Command {
    let mut sqe = Sqe::new(Opcode::COPY, ANY, nsid);
    let copy = Copy {
        slba: to_slba,
        ranges: 1,
        format: CopyFormat::Any as u8,
        fua: false,
    };
    copy.emit(&mut sqe);
    let mut bytes = vec![0; CopyRange::LEN];
    let range = CopyRange {
        nsid: from,
        slba,
        blocks,
        fast_only: false,
    };
    range.emit(&mut bytes);
    Command::sending(sqe, bytes)
}

fn transfer(opcode: Opcode, nsid: NsId, (slba, blocks): (u64, u32), data: Data, buffer: Vec<u8>) -> Command {
    let mut sqe = Sqe::new(opcode, ANY, nsid);
    let rw = Rw {
        slba,
        blocks,
        fua: false,
    };
    rw.emit(&mut sqe);
    Command {
        data,
        buffer,
        ..Command::new(sqe)
    }
}
