//! Commands that pass to a drive's own controller: I/Os of the transports, on every queue, which threads of the media carry out.

use std::sync::Arc;

use rdmux_runtime::Direction;
use rdmux_wire::nvme::{CopyRange, NsId, Opcode, Rw, Sqe, Status};

use super::io::{Io, Operation, Part};
use super::namespace::{COPY_BYTES_MAX, Medium, Namespace, Seat, SharedNamespace};
use super::reservation::Reservations;
use super::view::View;
use crate::backend::Backend;
use crate::passthrough::{Kind, Own, Pass, PassedController};

/// A command as the host has sent it.
#[derive(Clone, Debug)]
pub(super) struct Passed {
    sqe: Sqe,
    pass: Pass,
    /// Part of the target in the answer of an admin command; `None`: it is a command of a namespace.
    own: Option<Own>,
}

/// The drive of a subsystem.
#[derive(Debug)]
pub(super) struct PassedDrive {
    pub(super) controller: PassedController,
    /// The place of commands of the controller among those of namespaces.
    pub(super) admin: Arc<SharedNamespace>,
}

impl PassedDrive {
    /// # Panics
    /// The controller has no namespace.
    pub(super) fn new(controller: PassedController) -> PassedDrive {
        let first = controller.namespaces().next();
        let (_, first) = first.expect("a controller with a namespace");
        let admin = Arc::new(shared(NsId::ALL, first.clone()));
        PassedDrive { controller, admin }
    }

    pub(super) fn namespaces(&self) -> Vec<SharedNamespace> {
        let namespaces = self.controller.namespaces();
        namespaces
            .map(|(nsid, namespace)| shared(nsid, namespace.clone()))
            .collect()
    }
}

/// Returns a namespace without a UUID of the target's.
fn shared(nsid: NsId, backend: Arc<dyn Backend>) -> SharedNamespace {
    let namespace = Namespace {
        nsid,
        block_shift: backend.block_shift().unwrap_or(9),
        uuid: [0; 16],
        is_protected: false,
        backend,
    };
    SharedNamespace::new(namespace, Arc::new(Medium::new(Reservations::default())), 1)
}

impl Io {
    pub(super) fn passed(seat: Arc<Seat>, pass: Pass, sqe: &Sqe, own: Option<Own>, length: u32) -> Io {
        Io {
            namespace: seat,
            operation: Operation::Pass {
                transfer: pass.transfer,
                changes: pass.changes,
            },
            offset: 0,
            length,
            cid: sqe.cid(),
            own: None,
            part: Some(Box::new(Part {
                passed: Some(Passed { sqe: *sqe, pass, own }),
                ..Part::default()
            })),
        }
    }

    /// Checks a command of a namespace that a drive has, of which the transport moves `data_len` bytes, `data_max` at most.
    pub(super) fn check_passed(
        view: &View,
        drive: &PassedDrive,
        sqe: &Sqe,
        data_len: u32,
        data_max: u32,
    ) -> Result<Io, Status> {
        let seat = view.seat(sqe.nsid())?.clone();
        let (pass, bytes) = drive.controller.check_io(sqe, data_len)?;
        let bytes = u32::try_from(bytes).map_err(|_| Status::INVALID_FIELD.do_not_retry())?;
        if data_len > data_max {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        // Of a command of another form it has no meaning.
        let offset = Rw::parse(sqe).slba << seat.block_shift;
        Ok(Io {
            offset,
            ..Io::passed(seat, pass, sqe, None, bytes)
        })
    }

    fn passed_command(&self) -> Option<&Passed> {
        self.part.as_ref()?.passed.as_ref()
    }

    /// Returns the bytes that count for the limit of its host. For a Copy, whose ranges are not there yet, the most that it may have.
    pub(super) fn passed_bytes(&self) -> u64 {
        match self.passed_command().map(|passed| passed.sqe.opcode()) {
            Some(Opcode::COPY) => COPY_BYTES_MAX,
            _ => self.length.into(),
        }
    }

    pub(super) fn passed_counts(&self) -> Option<Direction> {
        match self.passed_command()?.sqe.opcode() {
            Opcode::READ | Opcode::COMPARE | Opcode::VERIFY => Some(Direction::Read),
            Opcode::WRITE => Some(Direction::Write),
            _ => None,
        }
    }

    /// Returns true if it takes minutes: others must not wait for its thread.
    pub(crate) fn is_long(&self) -> bool {
        self.passed_command()
            .is_some_and(|passed| passed.pass.kind == Kind::Format)
    }

    /// Begins one that an io_uring carries out. Returns false if it cannot be one: [`Io::pass`] does it, or tells why not.
    pub(super) fn begin_passed(&self) -> bool {
        let drive = self.namespace.user().and_then(|user| user.subsystem.drive());
        let (Some(drive), Some(Passed { sqe, own: None, .. })) = (drive, self.passed_command()) else {
            return false;
        };
        let stripe = self.namespace.stripe();
        if !drive.controller.try_begin(stripe) {
            return false;
        }
        let is_plain = drive.controller.is_plain(sqe, self.offset, self.length);
        if !is_plain {
            drive.controller.end(stripe);
        }
        is_plain
    }

    /// Has the drive carry it out.
    pub(super) fn pass(&self, data: &mut [u8]) -> Result<(), Status> {
        let no_drive = Status::INTERNAL_ERROR.do_not_retry();
        let user = self.namespace.user().ok_or(no_drive)?;
        let drive = user.subsystem.drive().ok_or(no_drive)?;
        let Passed { sqe, pass, own } = self.passed_command().ok_or(no_drive)?;
        let result = match own {
            Some(own) => {
                let result = drive.controller.admin(sqe, *pass, data, own);
                if pass.kind == Kind::Format {
                    user.subsystem.renew_namespaces();
                    user.session.association.tell();
                }
                result?
            }
            None if sqe.opcode() == Opcode::COPY => {
                self.check_copied(sqe.dword(12) as u8, data)?;
                self.write(|| drive.controller.io(sqe, data))?
            }
            None if pass.changes => self.write(|| drive.controller.io(sqe, data))?,
            None => drive.controller.io(sqe, data)?,
        };
        if let Some(part) = &self.part {
            part.result.set(result);
        }
        Ok(())
    }

    /// Checks that a Copy of so many ranges, 0-based, moves no more than one may, and gives the rest back to the limit of its host.
    fn check_copied(&self, ranges: u8, data: &[u8]) -> Result<(), Status> {
        let ranges = CopyRange::parse(data).take(usize::from(ranges) + 1);
        let blocks: u64 = ranges.map(|range| u64::from(range.blocks)).sum();
        let bytes = blocks << self.namespace.block_shift;
        if let Some(user) = self.namespace.user() {
            let limit = &user.session.association.limit;
            limit.give_back(COPY_BYTES_MAX.saturating_sub(bytes));
        }
        match bytes <= COPY_BYTES_MAX {
            true => Ok(()),
            false => Err(Status::COPY_TOO_LONG.do_not_retry()),
        }
    }
}
