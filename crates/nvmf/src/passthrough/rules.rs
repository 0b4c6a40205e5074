//! Commands that reach a drive's controller, those that the target answers itself, and those that are refused. All of it is decided by the command alone.
//!
//! The drive is given memory of the target, of a length that the host has chosen: a command that moves more than that would have the drive read or write
//! what is behind it. So each command has a length that follows from its fields, and the host has to have named the same.

use std::time::Duration;

use rdmux_wire::nvme::{
    Cns, Copy, CopyFormat, CopyRange, DatasetRange, IDENTIFY_LEN, LogId, Opcode, Rw, Sqe, Status,
};

use super::{Allow, Geometry};

/// As that of Linux for I/O commands.
const IO_TIMEOUT: Duration = Duration::from_secs(30);
/// As that of Linux for admin commands.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(60);
/// A format of a whole drive takes minutes.
const FORMAT_TIMEOUT: Duration = Duration::from_secs(600);

/// Admin opcodes that pass only where they are allowed. 5.
pub(super) mod opcode {
    use super::Opcode;

    pub(in crate::passthrough) const FIRMWARE_COMMIT: Opcode = Opcode(0x10);
    pub(in crate::passthrough) const FIRMWARE_DOWNLOAD: Opcode = Opcode(0x11);
    pub(in crate::passthrough) const FORMAT: Opcode = Opcode(0x80);
    pub(in crate::passthrough) const SANITIZE: Opcode = Opcode(0x84);
    /// The first of a vendor's admin commands.
    pub(super) const VENDOR_ADMIN: u8 = 0xc0;
    /// The first of a vendor's I/O commands.
    pub(super) const VENDOR_IO: u8 = 0x80;
}

/// The direction of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// It has none.
    None,
    /// From the host to the drive.
    ToController,
    /// From the drive to the host.
    ToHost,
}

impl Transfer {
    /// Returns that of an opcode: bits 1:0. 3.3.3.1.
    fn of(opcode: Opcode) -> Result<Transfer, Status> {
        match opcode.0 & 3 {
            0 => Ok(Transfer::None),
            1 => Ok(Transfer::ToController),
            2 => Ok(Transfer::ToHost),
            _ => Err(Status::INVALID_OPCODE.do_not_retry()),
        }
    }
}

/// The part that the target has in a command of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// None.
    Plain,
    /// Fields of the fabric are the target's in what the drive tells of its controller.
    IdentifyController,
    /// In what it tells of a namespace.
    IdentifyNamespace,
    /// In what it tells of a namespace whatever its command set.
    IndependentNamespace,
    /// Commands that are refused are left out of the log, which begins at this offset.
    Effects(u64),
    /// Namespaces have other blocks afterwards.
    Format,
}

/// A command that a drive's controller carries out, as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    /// The direction of the data that the host has, if it has some.
    pub transfer: Transfer,
    /// It may change blocks.
    pub changes: bool,
    pub(crate) kind: Kind,
    /// The length of its data is known to the drive alone: it is given a buffer of the longest that it moves.
    pub(super) is_padded: bool,
    pub(super) timeout: Duration,
}

impl Pass {
    const fn admin(transfer: Transfer) -> Pass {
        Pass {
            transfer,
            changes: false,
            kind: Kind::Plain,
            is_padded: false,
            timeout: ADMIN_TIMEOUT,
        }
    }
}

/// The properties of a drive that rules depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) allow: Allow,
    /// Vendor's admin commands have the number of dwords of their data in dword 10 (AVSCC).
    pub(super) has_admin_lengths: bool,
    /// Vendor's I/O commands do (ICSVSCC).
    pub(super) has_io_lengths: bool,
    /// A buffer of the target holds all that the drive may move by one command (MDTS).
    pub(super) holds_all: bool,
}

/// A feature that hosts get from the drive.
struct Feature {
    id: u8,
    /// Bytes of its data.
    bytes: u32,
    /// Hosts may set it.
    is_settable: bool,
}

const fn feature(id: u8, bytes: u32, is_settable: bool) -> Feature {
    Feature {
        id,
        bytes,
        is_settable,
    }
}

/// 5.27.1. What is for the driver of the drive's queues is not among them: interrupts, number of queues, host memory, autonomous power states (which hosts
/// may look at).
const FEATURES: [Feature; 15] = [
    feature(0x01, 0, false), // arbitration
    feature(0x02, 0, true),  // power management
    feature(0x03, 4096, false),
    feature(0x04, 0, true), // temperature threshold
    feature(0x05, 0, true), // error recovery
    feature(0x06, 0, true), // volatile write cache
    feature(0x0a, 0, true), // write atomicity
    feature(0x0c, 256, false),
    feature(0x0e, 8, true), // timestamp
    feature(0x10, 0, true), // host controlled thermal management
    feature(0x11, 0, false),
    feature(0x12, 0, false),
    feature(0x13, 512, false),
    feature(0x14, 0, false),
    feature(0x17, 0, false),
];
/// Features that are the target's own: number of queues, asynchronous events, keep alive, host identifier.
const OWN_FEATURES: [u8; 4] = [0x07, 0x0b, 0x0f, 0x81];
/// Device Self-test. 5.16.1.7.
const SELF_TEST_LOG: LogId = LogId(0x06);
/// Sanitize Status. 5.16.1.25.
const SANITIZE_LOG: LogId = LogId(0x81);
/// The first log of a vendor.
const VENDOR_LOG: u8 = 0xc0;

fn refused<T>(status: Status) -> Result<T, Status> {
    Err(status.do_not_retry())
}

/// Returns how an admin command passes; `None`: the target answers it. `knows` is true for a namespace of the drive.
///
/// # Errors
/// The status with which it is refused.
pub(super) fn admin(sqe: &Sqe, data_len: u32, knows: bool, facts: &Facts) -> Result<Option<Pass>, Status> {
    let allow = facts.allow;
    let none = Pass::admin(Transfer::None);
    let pass = match sqe.opcode() {
        Opcode::ABORT | Opcode::ASYNC_EVENT_REQUEST | Opcode::KEEP_ALIVE => return Ok(None),
        Opcode::IDENTIFY => return identify(sqe, data_len, knows),
        Opcode::GET_LOG_PAGE => return log(sqe, data_len),
        Opcode::GET_FEATURES | Opcode::SET_FEATURES => return of_features(sqe, data_len),
        opcode::FORMAT if allow.format => Pass {
            kind: Kind::Format,
            changes: true,
            timeout: FORMAT_TIMEOUT,
            ..none
        },
        opcode::SANITIZE if allow.sanitize => Pass {
            changes: true,
            ..none
        },
        opcode::FIRMWARE_COMMIT if allow.firmware => none,
        opcode::FIRMWARE_DOWNLOAD if allow.firmware => {
            has_length(data_len, (u64::from(sqe.dword(10)) + 1) * 4)?;
            Pass::admin(Transfer::ToController)
        }
        Opcode(opcode::VENDOR_ADMIN..) => vendor(sqe, data_len, facts.has_admin_lengths, facts)?,
        _ => return refused(Status::INVALID_OPCODE),
    };
    Ok(Some(pass))
}

fn identify(sqe: &Sqe, data_len: u32, knows: bool) -> Result<Option<Pass>, Status> {
    let cns = Cns(sqe.dword(10) as u8);
    // The NVM command set alone.
    let command_set = sqe.dword(11) >> 24;
    let kind = match cns {
        Cns::CONTROLLER => Kind::IdentifyController,
        Cns::NAMESPACE if knows => Kind::IdentifyNamespace,
        Cns::INDEPENDENT_NAMESPACE if knows => Kind::IndependentNamespace,
        Cns::NAMESPACE_IDENTIFIERS if knows => Kind::Plain,
        Cns::COMMAND_SET_NAMESPACE if knows && command_set == 0 => Kind::Plain,
        Cns::COMMAND_SET_CONTROLLER if command_set == 0 => Kind::Plain,
        // The target answers for a namespace that is not there, and makes lists.
        _ => return Ok(None),
    };
    has_length(data_len, IDENTIFY_LEN as u64)?;
    Ok(Some(Pass {
        kind,
        ..Pass::admin(Transfer::ToHost)
    }))
}

fn log(sqe: &Sqe, data_len: u32) -> Result<Option<Pass>, Status> {
    let log = LogId(sqe.dword(10) as u8);
    let offset = u64::from(sqe.dword(12)) | u64::from(sqe.dword(13)) << 32;
    let kind = match log {
        LogId::CHANGED_NAMESPACES | LogId::ANA => return Ok(None),
        // Of the NVM command set alone.
        LogId::EFFECTS if sqe.dword(14) >> 24 != 0 => return refused(Status::INVALID_FIELD),
        LogId::EFFECTS => Kind::Effects(offset),
        LogId::ERROR | LogId::HEALTH | LogId::FIRMWARE | SELF_TEST_LOG | SANITIZE_LOG => Kind::Plain,
        LogId(VENDOR_LOG..) => Kind::Plain,
        _ => return refused(Status::INVALID_LOG),
    };
    let dwords = u64::from(sqe.dword(10) >> 16) | u64::from(sqe.dword(11) & 0xffff) << 16;
    has_length(data_len, (dwords + 1) * 4)?;
    Ok(Some(Pass {
        kind,
        ..Pass::admin(Transfer::ToHost)
    }))
}

fn of_features(sqe: &Sqe, data_len: u32) -> Result<Option<Pass>, Status> {
    let id = sqe.dword(10) as u8;
    if OWN_FEATURES.contains(&id) {
        return Ok(None);
    }
    let feature = FEATURES.iter().find(|feature| feature.id == id);
    let feature = feature.ok_or(Status::INVALID_FIELD.do_not_retry())?;
    let sets = sqe.opcode() == Opcode::SET_FEATURES;
    if sets && !feature.is_settable {
        return refused(Status::FEATURE_NOT_CHANGEABLE);
    }
    let transfer = match (feature.bytes, sets) {
        (0, _) => Transfer::None,
        (bytes, true) => {
            has_length(data_len, bytes.into())?;
            Transfer::ToController
        }
        // There may be room for more.
        (bytes, false) if data_len >= bytes => Transfer::ToHost,
        (_, false) => return refused(Status::SGL_LENGTH_INVALID),
    };
    Ok(Some(Pass::admin(transfer)))
}

/// Returns how a vendor's command passes.
fn vendor(sqe: &Sqe, data_len: u32, has_lengths: bool, facts: &Facts) -> Result<Pass, Status> {
    let direction = Transfer::of(sqe.opcode())?;
    let pass = Pass {
        changes: true,
        ..Pass::admin(direction)
    };
    if direction == Transfer::None {
        return Ok(pass);
    }
    if has_lengths {
        has_length(data_len, u64::from(sqe.dword(10)) * 4)?;
    } else if !facts.holds_all && !facts.allow.vendor {
        return refused(Status::INVALID_OPCODE);
    }
    Ok(Pass {
        transfer: if data_len > 0 { direction } else { Transfer::None },
        is_padded: !has_lengths,
        ..pass
    })
}

/// Returns how an I/O command passes, and the bytes of blocks that it is about.
///
/// # Errors
/// The status with which it is refused.
pub(super) fn io(sqe: &Sqe, data_len: u32, geometry: Geometry, facts: &Facts) -> Result<(Pass, u64), Status> {
    let pass = |transfer, changes| Pass {
        transfer,
        changes,
        timeout: IO_TIMEOUT,
        ..Pass::admin(transfer)
    };
    let blocks = || {
        let rw = Rw::parse(sqe);
        let end = rw.slba.checked_add(rw.blocks.into());
        match end.is_some_and(|end| end <= geometry.blocks) {
            true => Ok(u64::from(rw.blocks) << geometry.block_shift),
            false => refused(Status::LBA_OUT_OF_RANGE),
        }
    };
    let with_data = |transfer, changes| {
        let bytes = blocks()?;
        has_length(data_len, bytes)?;
        Ok((pass(transfer, changes), bytes))
    };
    match sqe.opcode() {
        Opcode::FLUSH => Ok((pass(Transfer::None, false), 0)),
        // Directives are the driver's.
        Opcode::WRITE if sqe.dword(12) & DIRECTIVE_TYPE != 0 => refused(Status::INVALID_FIELD),
        Opcode::WRITE => with_data(Transfer::ToController, true),
        Opcode::READ => with_data(Transfer::ToHost, false),
        Opcode::COMPARE => with_data(Transfer::ToController, false),
        Opcode::VERIFY => Ok((pass(Transfer::None, false), blocks()?)),
        Opcode::WRITE_ZEROES => {
            blocks()?;
            Ok((pass(Transfer::None, true), 0))
        }
        Opcode::DATASET_MANAGEMENT => {
            // The drive reads as many ranges as there are, of a buffer that may have more.
            let ranges = usize::from(DatasetRange::count(sqe));
            has_room(data_len, ranges * DatasetRange::LEN)?;
            Ok((pass(Transfer::ToController, true), 0))
        }
        Opcode::COPY => {
            let copy = Copy::parse(sqe);
            if copy.format != CopyFormat::Same as u8 || sqe.dword(12) & DIRECTIVE_TYPE != 0 {
                return refused(Status::INVALID_FIELD);
            }
            has_room(data_len, usize::from(copy.ranges) * CopyRange::LEN)?;
            Ok((pass(Transfer::ToController, true), 0))
        }
        Opcode(opcode::VENDOR_IO..) => {
            let pass = vendor(sqe, data_len, facts.has_io_lengths, facts)?;
            let timeout = IO_TIMEOUT;
            Ok((Pass { timeout, ..pass }, data_len.into()))
        }
        _ => refused(Status::INVALID_OPCODE),
    }
}

/// Dword 12 of Write and Copy: type of a directive (DTYPE).
const DIRECTIVE_TYPE: u32 = 0xf << 20;
/// Bytes that a list of ranges takes at most.
const RANGES_MAX: u32 = 8192;

/// Checks that the host has named as many bytes as a command moves.
fn has_length(data_len: u32, bytes: u64) -> Result<(), Status> {
    match u64::from(data_len) == bytes {
        true => Ok(()),
        false => refused(Status::SGL_LENGTH_INVALID),
    }
}

/// Checks that the host sends all of a list.
fn has_room(data_len: u32, bytes: usize) -> Result<(), Status> {
    match data_len as usize >= bytes && data_len <= RANGES_MAX {
        true => Ok(()),
        false => refused(Status::SGL_LENGTH_INVALID),
    }
}

/// Returns true if hosts may send an admin command of this opcode.
pub(super) fn offers_admin(opcode: Opcode, allow: Allow) -> bool {
    match opcode {
        Opcode::GET_LOG_PAGE
        | Opcode::IDENTIFY
        | Opcode::ABORT
        | Opcode::SET_FEATURES
        | Opcode::GET_FEATURES
        | Opcode::ASYNC_EVENT_REQUEST
        | Opcode::KEEP_ALIVE => true,
        opcode::FORMAT => allow.format,
        opcode::SANITIZE => allow.sanitize,
        opcode::FIRMWARE_COMMIT | opcode::FIRMWARE_DOWNLOAD => allow.firmware,
        Opcode(code) => code >= opcode::VENDOR_ADMIN,
    }
}

/// Returns true if hosts may send an I/O command of this opcode.
pub(super) fn offers_io(opcode: Opcode) -> bool {
    match opcode {
        Opcode::FLUSH
        | Opcode::WRITE
        | Opcode::READ
        | Opcode::COMPARE
        | Opcode::WRITE_ZEROES
        | Opcode::DATASET_MANAGEMENT
        | Opcode::VERIFY
        | Opcode::COPY => true,
        Opcode(code) => code >= opcode::VENDOR_IO,
    }
}
