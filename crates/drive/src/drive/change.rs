//! Changes of a drive's state: it stops, is reset, fails or ends.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use rdmux_wire::nvme::{PMR_NOT_READY, Register};

use super::start::Step;
use super::{Drive, DriveError, Phase, RESETS_MAX, Then};
use crate::command::{Completion, Outcome};
use crate::memory::MemoryKind;

impl Drive {
    /// Looks if a drive has changed its state as it was told to.
    pub(super) fn step_change(&mut self, now: Instant) {
        let status = self.status();
        if status.is_gone() {
            self.end(DriveError::Gone);
            return;
        }
        match &self.phase {
            Phase::Disabling { deadline, then } => {
                if !status.is_ready() {
                    let then = then.clone();
                    self.disabled(now, then);
                } else if now >= *deadline {
                    self.hold();
                    self.fail(DriveError::NotStopped(self.limit()));
                }
            }
            Phase::EnablingPmr { deadline } => {
                let pmr = self.function.read_u32(Register::PMR_STATUS.0);
                if pmr & PMR_NOT_READY == 0 {
                    self.enable(now);
                } else if now >= *deadline {
                    let why = "it did not become ready within its own limit";
                    let error = DriveError::Memory {
                        kind: MemoryKind::Pmr,
                        why: Arc::new(io::Error::other(why)),
                    };
                    self.disable(now, Then::Fail(error));
                }
            }
            Phase::Enabling { deadline } => {
                if status.is_fatal() {
                    self.disable(now, Then::Fail(DriveError::Fatal));
                } else if status.is_ready() {
                    self.begin(now, Step::Controller);
                } else if now >= *deadline {
                    let error = DriveError::NotStarted(self.limit());
                    self.disable(now, Then::Fail(error));
                }
            }
            _ => {}
        }
    }

    /// Tells a drive to stop: it lets go of all memory when it is not ready any more.
    pub(super) fn disable(&mut self, now: Instant, then: Then) {
        self.function.write_u32(Register::CONFIGURATION.0, 0);
        if mutant!(ResetNotAwaited) {
            self.end_commands(Outcome::Reset);
        }
        let deadline = now + self.limit();
        self.phase = Phase::Disabling { deadline, then };
        self.next_look = now;
    }

    /// Goes on with a drive that has stopped.
    fn disabled(&mut self, now: Instant, then: Then) {
        self.created = 0;
        self.end_commands(Outcome::Reset);
        match then {
            Then::Start => self.start(now),
            Then::Off => self.phase = Phase::Off,
            Then::Fail(error) => self.fail(error),
        }
    }

    /// Ends all commands, of a drive that moves nothing any more.
    pub(super) fn end_commands(&mut self, outcome: Outcome) {
        self.admin.take_all();
        for queue in &mut self.queues {
            let ended = queue.queue.take_all().into_iter();
            self.completions.extend(ended.map(|command| Completion {
                token: command.token.token,
                outcome,
                data: command.data,
            }));
        }
    }

    /// Ends all commands of a drive that may still move their data.
    fn hold(&mut self) {
        let first = self.completions.len();
        self.end_commands(Outcome::Reset);
        if mutant!(HeldGivenBack) {
            return;
        }
        for completion in self.completions.range_mut(first..) {
            self.held.append(&mut completion.data);
        }
    }

    /// Ends a drive that is not there any more.
    pub(super) fn end(&mut self, error: DriveError) {
        self.end_commands(Outcome::Gone);
        // It moves nothing.
        self.held.clear();
        self.fail(error);
    }

    pub(super) fn fail(&mut self, error: DriveError) {
        self.created = 0;
        self.failure = Some(error);
        self.phase = Phase::Failed;
    }

    /// Stops a drive and starts it anew, unless that has not helped before.
    pub(super) fn reset(&mut self, now: Instant, error: DriveError) {
        self.resets += 1;
        let then = match self.resets > RESETS_MAX {
            true => Then::Fail(error),
            false => Then::Start,
        };
        self.disable(now, then);
    }
}
