//! A drive that is ready: commands that end, and those that take too long.

use std::time::Instant;

use rdmux_verbs::ledger::{Class, Route, book};
use rdmux_wire::nvme::{Cid, Cqe, NsId, Opcode, Register, Sqe, Status};

use super::start::Admin;
use super::{Drive, DriveError, Io, LOOK, Phase, RESETS_MAX};
use crate::command::{Completion, Outcome};
use crate::queue::Outstanding;

impl Drive {
    pub(super) fn step_ready(&mut self, now: Instant) {
        self.take_io();
        self.take_admin(now);
        if !matches!(self.phase, Phase::Ready) {
            return;
        }
        let looks = self.looks(now, LOOK);
        if looks {
            self.check_status(now);
            self.check_deadlines(now);
            self.check_admin(now);
        }
    }

    /// Takes what was completed on the queues for I/O.
    pub(super) fn take_io(&mut self) {
        for at in 0..self.created {
            let Ok(completed) = self.queues[at].queue.complete(&*self.function) else {
                self.end(DriveError::Gone);
                return;
            };
            let ended = completed
                .into_iter()
                .map(|(command, cqe): (Outstanding<Io>, Cqe)| {
                    if cqe.status.is_success() {
                        let Io { bytes, at, .. } = command.token;
                        book(
                            self.options.ledger.as_ref(),
                            Route::Drive(at),
                            Class::Data,
                            bytes as u64,
                        );
                    }
                    let status = if mutant!(StatusIgnored) {
                        Status::SUCCESS
                    } else {
                        cqe.status
                    };
                    Completion {
                        token: command.token.token,
                        outcome: Outcome::Done(status),
                        data: command.data,
                    }
                });
            let before = self.completions.len();
            self.completions.extend(ended);
            if self.completions.len() > before {
                self.resets = 0;
            }
        }
    }

    /// Ends or resets a drive that is not as it was.
    pub(super) fn check_status(&mut self, now: Instant) {
        let status = self.status();
        if status.is_gone() {
            self.end(DriveError::Gone);
        } else if status.is_fatal() {
            self.reset(now, DriveError::Fatal);
        } else if !status.is_ready() {
            // Behind some bridges a function that has gone reads as zeros.
            match self.function.read_u32(Register::VERSION.0) {
                0 | u32::MAX => self.end(DriveError::Gone),
                _ => self.reset(now, DriveError::Fatal),
            }
        }
    }

    /// Aborts commands that have taken too long, or resets the drive.
    fn check_deadlines(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::Ready) {
            return;
        }
        let deadline = now + self.options.timeout;
        let mut free = usize::from(self.controller.aborts).saturating_sub(self.admin.outstanding().count());
        let mut late = Vec::new();
        let mut is_lost = false;
        for (at, queue) in self.queues.iter_mut().enumerate() {
            for command in queue.queue.outstanding_mut() {
                if now < command.deadline {
                    continue;
                }
                is_lost |= command.is_aborted;
                // Those beyond the drive's limit are looked at again after the first ones.
                if free > 0 && !command.is_aborted {
                    free -= 1;
                    command.is_aborted = true;
                    command.deadline = deadline;
                    late.push((at, command.cid()));
                }
            }
        }
        if mutant!(EndedAtTimeout) && !late.is_empty() {
            self.end_commands(Outcome::Reset);
            return;
        }
        if is_lost {
            self.reset(now, DriveError::NoAnswers(RESETS_MAX));
            return;
        }
        for (at, cid) in late {
            let mut sqe = Sqe::in_memory(Opcode::ABORT, Cid(0), NsId::NONE, [0; 2]);
            // Queues are counted from 1. 5.1.
            sqe.set_dword(10, (at as u32 + 1) | u32::from(cid.0) << 16);
            if self.submit_admin(now, sqe, Admin::Abort).is_none() {
                self.reset(now, DriveError::NoAnswers(RESETS_MAX));
                return;
            }
        }
    }
}
