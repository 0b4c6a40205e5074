//! Reservations: which hosts may use a namespace. 7.2 to 7.5 and 8.19.

use super::{HostId, Sqe};
use crate::bytes::{le16, le32, le64, put};

/// Type of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReservationType {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 2,
    /// Only registrants write.
    WriteExclusiveRegistrants = 3,
    /// Only registrants read and write.
    ExclusiveAccessRegistrants = 4,
    /// Only registrants write, and all of them hold it.
    WriteExclusiveAll = 5,
    /// Only registrants read and write, and all of them hold it.
    ExclusiveAccessAll = 6,
}

impl ReservationType {
    /// All types.
    pub const ALL: [ReservationType; 6] = [
        ReservationType::WriteExclusive,
        ReservationType::ExclusiveAccess,
        ReservationType::WriteExclusiveRegistrants,
        ReservationType::ExclusiveAccessRegistrants,
        ReservationType::WriteExclusiveAll,
        ReservationType::ExclusiveAccessAll,
    ];

    /// Returns the type with a number.
    pub fn new(number: u8) -> Option<ReservationType> {
        ReservationType::ALL
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }

    /// Returns true if all registrants hold it.
    pub const fn is_of_all(self) -> bool {
        matches!(
            self,
            ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll
        )
    }

    /// Returns true if registrants that do not hold it have access.
    pub const fn is_for_registrants(self) -> bool {
        !matches!(
            self,
            ReservationType::WriteExclusive | ReservationType::ExclusiveAccess
        )
    }

    /// Returns true if every host may read.
    pub const fn lets_read(self) -> bool {
        matches!(
            self,
            ReservationType::WriteExclusive
                | ReservationType::WriteExclusiveRegistrants
                | ReservationType::WriteExclusiveAll
        )
    }
}

/// Action of a reservation command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationAction {
    /// Register: a host without a key gets one.
    Register,
    /// Register: a host gives its key up.
    Unregister,
    /// Register: a host has another key.
    Replace,
    /// Acquire.
    Acquire(ReservationType),
    /// Acquire: takes the registrations of a key, and a reservation held by it.
    Preempt {
        /// Type of the reservation taken.
        kind: ReservationType,
        /// The commands of who had it are over when the command is done.
        aborts: bool,
    },
    /// Release.
    Release(ReservationType),
    /// Release: ends the reservation and all registrations.
    Clear,
}

/// A reservation command, but for its keys, which are its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationCommand {
    /// The action.
    pub action: ReservationAction,
    /// The current key is not checked.
    pub ignores_key: bool,
    /// Register: whether the state shall outlast a loss of power; `None` leaves it as it is.
    pub persists: Option<bool>,
}

/// Keys of a reservation command: 16 bytes, of Release the first 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationKeys {
    /// The host's current key.
    pub current: u64,
    /// The new key of Register; the key that Acquire preempts.
    pub other: u64,
}

impl ReservationKeys {
    /// Bytes of the data.
    pub const LEN: usize = 16;
    /// Bytes of the data of Release.
    pub const RELEASE_LEN: usize = 8;

    /// Reads the keys; those that are missing are 0.
    pub fn parse(bytes: &[u8]) -> ReservationKeys {
        let key = |at| {
            if bytes.len() >= at + 8 { le64(bytes, at) } else { 0 }
        };
        ReservationKeys {
            current: key(0),
            other: key(8),
        }
    }

    /// Returns the data.
    pub fn emit(&self) -> [u8; ReservationKeys::LEN] {
        let mut bytes = [0; ReservationKeys::LEN];
        put(&mut bytes, 0, &self.current.to_le_bytes());
        put(&mut bytes, 8, &self.other.to_le_bytes());
        bytes
    }
}

impl ReservationCommand {
    const IGNORES_KEY: u32 = 1 << 3;

    /// Reads dword 10 of Register. `None` if it is not defined.
    pub fn register(sqe: &Sqe) -> Option<ReservationCommand> {
        let dword = sqe.dword(10);
        Some(ReservationCommand {
            action: match dword & 7 {
                0 => ReservationAction::Register,
                1 => ReservationAction::Unregister,
                2 => ReservationAction::Replace,
                _ => return None,
            },
            ignores_key: dword & ReservationCommand::IGNORES_KEY != 0,
            persists: match dword >> 30 {
                0 => None,
                2 => Some(false),
                3 => Some(true),
                _ => return None,
            },
        })
    }

    /// Reads dword 10 of Acquire. `None` if it is not defined: also with a key that is to be ignored, which only Register may ask for.
    pub fn acquire(sqe: &Sqe) -> Option<ReservationCommand> {
        let dword = sqe.dword(10);
        let kind = ReservationType::new((dword >> 8) as u8)?;
        ReservationCommand::of(
            sqe,
            match dword & 7 {
                0 => ReservationAction::Acquire(kind),
                1 => ReservationAction::Preempt { kind, aborts: false },
                2 => ReservationAction::Preempt { kind, aborts: true },
                _ => return None,
            },
        )
    }

    /// Reads dword 10 of Release. `None` if it is not defined: also with a key that is to be ignored.
    pub fn release(sqe: &Sqe) -> Option<ReservationCommand> {
        let dword = sqe.dword(10);
        let action = match dword & 7 {
            0 => ReservationAction::Release(ReservationType::new((dword >> 8) as u8)?),
            1 => ReservationAction::Clear,
            _ => return None,
        };
        ReservationCommand::of(sqe, action)
    }

    fn of(sqe: &Sqe, action: ReservationAction) -> Option<ReservationCommand> {
        let ignores_key = sqe.dword(10) & ReservationCommand::IGNORES_KEY != 0;
        (!ignores_key).then_some(ReservationCommand {
            action,
            ignores_key,
            persists: None,
        })
    }

    /// Returns dword 10.
    pub fn dword(&self) -> u32 {
        let (action, kind) = match self.action {
            ReservationAction::Register => (0, 0),
            ReservationAction::Unregister => (1, 0),
            ReservationAction::Replace => (2, 0),
            ReservationAction::Acquire(kind) => (0, kind as u32),
            ReservationAction::Preempt { kind, aborts } => (1 + u32::from(aborts), kind as u32),
            ReservationAction::Release(kind) => (0, kind as u32),
            ReservationAction::Clear => (1, 0),
        };
        let ignores_key = if self.ignores_key {
            ReservationCommand::IGNORES_KEY
        } else {
            0
        };
        let persists = match self.persists {
            None => 0,
            Some(false) => 2,
            Some(true) => 3,
        };
        action | ignores_key | kind << 8 | persists << 30
    }
}

/// A registrant, as Reservation Report describes it by one of its controllers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationController {
    /// The controller; 0xffff if the host has none.
    pub cntlid: u16,
    /// The host holds the reservation.
    pub is_holder: bool,
    /// The host's key.
    pub key: u64,
    /// The host.
    pub host: HostId,
}

/// Data of Reservation Report with host identifiers of 16 bytes (extended data structure). 7.5.
///
/// ```text
///  0  generation u32 | type u8 | number of controllers u16
///  9  persists through a loss of power u8
/// 64  each 64 bytes: controller u16 | status u8, bit 0 holds | key u64 @8 | host @16
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationReport {
    /// Changes with registrations.
    pub generation: u32,
    /// The reservation that is held.
    pub kind: Option<ReservationType>,
    /// It persists through a loss of power.
    pub persists: bool,
    /// Controllers of registrants.
    pub controllers: Vec<ReservationController>,
}

impl ReservationReport {
    const LEN: usize = 64;

    /// Returns the data.
    pub fn emit(&self) -> Vec<u8> {
        let mut bytes = vec![0; ReservationReport::LEN * (1 + self.controllers.len())];
        put(&mut bytes, 0, &self.generation.to_le_bytes());
        bytes[4] = self.kind.map_or(0, |kind| kind as u8);
        put(&mut bytes, 5, &(self.controllers.len() as u16).to_le_bytes());
        bytes[9] = self.persists.into();
        let entries = bytes[ReservationReport::LEN..].chunks_mut(ReservationReport::LEN);
        for (entry, controller) in entries.zip(&self.controllers) {
            put(entry, 0, &controller.cntlid.to_le_bytes());
            entry[2] = controller.is_holder.into();
            put(entry, 8, &controller.key.to_le_bytes());
            put(entry, 16, &controller.host.0);
        }
        bytes
    }

    /// Parses the data, of which the host may have had no room for the last controllers.
    pub fn parse(bytes: &[u8]) -> Option<ReservationReport> {
        if bytes.len() < ReservationReport::LEN {
            return None;
        }
        let number = usize::from(le16(bytes, 5));
        let entries = bytes[ReservationReport::LEN..].chunks_exact(ReservationReport::LEN);
        let controllers = entries.take(number).map(|entry| {
            let mut host = [0; 16];
            host.copy_from_slice(&entry[16..32]);
            ReservationController {
                cntlid: le16(entry, 0),
                is_holder: entry[2] & 1 != 0,
                key: le64(entry, 8),
                host: HostId(host),
            }
        });
        Some(ReservationReport {
            generation: le32(bytes, 0),
            kind: ReservationType::new(bytes[4]),
            persists: bytes[9] & 1 != 0,
            controllers: controllers.collect(),
        })
    }
}

/// Kind of an entry of the log of reservation notifications. 5.16.1.24.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReservationNotice {
    /// The host's registration was preempted.
    RegistrationPreempted = 1,
    /// The reservation was released.
    Released = 2,
    /// The reservation that the host held was preempted.
    Preempted = 3,
}

impl ReservationNotice {
    /// Returns the bit that masks it in feature 82h.
    pub const fn mask(self) -> u32 {
        1 << self as u32
    }
}
