//! The start of a drive: it is told of its queues, asked what it has, and gets its queues for I/O. 3.5.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_verbs::ledger::{Class, Location, Route, book};
use rdmux_wire::nvme::{
    Cid, CmbControl, Cns, Configuration, Cqe, DriveController, IDENTIFY_LEN, NsId, Opcode, PMR_ENABLE,
    PMR_SPACE, Register, Sqe, parse_namespace_list,
};

use super::{Drive, DriveError, Phase, RESETS_MAX, Then};
use crate::command::Outcome;
use crate::memory::{Buffer, MemoryKind, PAGE};
use crate::namespace::{DriveNamespace, Unusable};

/// Most namespaces that are looked at.
const NAMESPACES_MAX: usize = 1024;
/// Set Features: number of queues. 5.27.1.5.
const NUMBER_OF_QUEUES: u32 = 0x07;

/// A command of the start.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Controller,
    QueueCount,
    CompletionQueue(u16),
    SubmissionQueue(u16),
    /// Namespaces behind the one named.
    Namespaces(NsId),
    Namespace(usize),
}

impl Step {
    /// Returns true if it is Identify, which has data.
    fn has_data(self) -> bool {
        matches!(self, Step::Controller | Step::Namespaces(_) | Step::Namespace(_))
    }

    fn what(self) -> &'static str {
        match self {
            Step::Controller => "Identify of the controller",
            Step::QueueCount => "Set Features for the number of queues",
            Step::CompletionQueue(_) => "to create a completion queue",
            Step::SubmissionQueue(_) => "to create a submission queue",
            Step::Namespaces(_) => "Identify of its namespaces",
            Step::Namespace(_) => "Identify of a namespace",
        }
    }
}

/// Purpose of a command on the admin queue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Admin {
    Step(Step),
    Abort,
}

impl Drive {
    /// Starts a drive that has stopped.
    pub(super) fn start(&mut self, now: Instant) {
        let emptied = self.admin.reset();
        let emptied = self
            .queues
            .iter_mut()
            .fold(emptied, |emptied, queue| emptied.and(queue.queue.reset()));
        if emptied.is_err() {
            self.end(DriveError::Gone);
            return;
        }
        if self.cmb.is_some()
            && self.capabilities.cmb
            && let Some(pool) = self.pool(MemoryKind::Cmb)
        {
            // Commands reach it by the address that it has on the bus.
            let control = CmbControl::at(pool.address());
            self.function.write_u64(Register::CMB_CONTROL.0, control.0);
            if self.function.read_u32(Register::CMB_STATUS.0) & 1 != 0 {
                let why = "the drive refuses its address on the bus";
                self.fail(DriveError::Memory {
                    kind: MemoryKind::Cmb,
                    why: Arc::new(io::Error::other(why)),
                });
                return;
            }
        }
        let Some((pmr, pool)) = self.pmr.zip(self.pool(MemoryKind::Pmr)) else {
            self.enable(now);
            return;
        };
        let address = pool.address();
        self.function
            .write_u32(Register::PMR_CONTROL_HIGH.0, (address >> 32) as u32);
        self.function
            .write_u32(Register::PMR_CONTROL_LOW.0, address as u32 | PMR_SPACE);
        self.function.write_u32(Register::PMR_CONTROL.0, PMR_ENABLE);
        let deadline = now + Duration::from_millis(pmr.timeout_ms.max(500).into());
        self.phase = Phase::EnablingPmr { deadline };
    }

    pub(super) fn enable(&mut self, now: Instant) {
        let entries = u32::from(self.admin.entries()) - 1;
        self.function
            .write_u32(Register::ADMIN_QUEUES.0, entries << 16 | entries);
        self.function
            .write_u64(Register::ADMIN_SUBMISSION.0, self.admin.submission.address(0));
        self.function
            .write_u64(Register::ADMIN_COMPLETION.0, self.admin.completion.address(0));
        self.function
            .write_u32(Register::CONFIGURATION.0, Configuration::enabled().0);
        let deadline = now + self.limit();
        self.phase = Phase::Enabling { deadline };
        self.next_look = now;
    }

    /// Begins a step of the start.
    pub(super) fn begin(&mut self, now: Instant, step: Step) {
        self.phase = Phase::SetUp;
        let page = self.page.address(0);
        let identify = |nsid, cns: Cns| {
            let mut sqe = Sqe::in_memory(Opcode::IDENTIFY, Cid(0), nsid, [page, 0]);
            sqe.set_dword(10, cns.0.into());
            sqe
        };
        let queue = |opcode, qid: u16, memory: &Buffer, entries: u16, flags: u32| {
            let mut sqe = Sqe::in_memory(opcode, Cid(0), NsId::NONE, [memory.address(0), 0]);
            sqe.set_dword(10, u32::from(qid) | u32::from(entries - 1) << 16);
            // Physically contiguous.
            sqe.set_dword(11, 1 | flags);
            sqe
        };
        let sqe = match step {
            Step::Controller => identify(NsId::NONE, Cns::CONTROLLER),
            Step::QueueCount => {
                let mut sqe = Sqe::in_memory(Opcode::SET_FEATURES, Cid(0), NsId::NONE, [0; 2]);
                let number = self.queues.len() as u32 - 1;
                sqe.set_dword(10, NUMBER_OF_QUEUES);
                sqe.set_dword(11, number << 16 | number);
                sqe
            }
            Step::CompletionQueue(qid) => {
                let own = &self.queues[usize::from(qid) - 1].queue;
                queue(
                    Opcode::CREATE_COMPLETION_QUEUE,
                    qid,
                    &own.completion,
                    own.entries(),
                    0,
                )
            }
            Step::SubmissionQueue(qid) => {
                let own = &self.queues[usize::from(qid) - 1].queue;
                let completion = u32::from(qid) << 16;
                queue(
                    Opcode::CREATE_SUBMISSION_QUEUE,
                    qid,
                    &own.submission,
                    own.entries(),
                    completion,
                )
            }
            Step::Namespaces(behind) => identify(behind, Cns::ACTIVE_NAMESPACES),
            Step::Namespace(at) => match self.listed.get(at) {
                Some(nsid) => identify(*nsid, Cns::NAMESPACE),
                None => {
                    self.phase = Phase::Ready;
                    self.next_look = now;
                    return;
                }
            },
        };
        if self.submit_admin(now, sqe, Admin::Step(step)).is_none() {
            self.end(DriveError::Gone);
        }
    }

    /// `None` if the queue is full, or its memory has gone.
    pub(super) fn submit_admin(&mut self, now: Instant, mut sqe: Sqe, purpose: Admin) -> Option<()> {
        let slot = self.admin.free_slot()?;
        sqe.set_cid(self.admin.next_cid(slot));
        let deadline = now + self.options.timeout;
        let submitted = self
            .admin
            .submit(&*self.function, slot, &sqe, (purpose, Vec::new(), deadline));
        submitted.ok()
    }

    /// Takes what was completed on the admin queue.
    pub(super) fn take_admin(&mut self, now: Instant) {
        let Ok(completed) = self.admin.complete(&*self.function) else {
            self.end(DriveError::Gone);
            return;
        };
        for (command, cqe) in completed {
            if mutant!(AbortTrusted) && matches!(command.token, Admin::Abort) {
                self.end_commands(Outcome::Reset);
            }
            if let Admin::Step(step) = command.token
                && matches!(self.phase, Phase::SetUp)
            {
                self.end_step(now, step, cqe);
            }
        }
    }

    /// Resets a drive that does not answer a command of the admin queue.
    pub(super) fn check_admin(&mut self, now: Instant) {
        if !matches!(self.phase, Phase::SetUp | Phase::Ready) {
            return;
        }
        let is_late = self.admin.outstanding().any(|command| now >= command.deadline);
        if is_late {
            self.reset(now, DriveError::NoAnswers(RESETS_MAX));
        }
    }

    fn end_step(&mut self, now: Instant, step: Step, cqe: Cqe) {
        // A namespace that was listed may have gone since.
        let may_fail = matches!(step, Step::Namespace(_));
        if !cqe.status.is_success() && !may_fail {
            let error = DriveError::Refused {
                what: step.what(),
                status: cqe.status,
            };
            self.disable(now, Then::Fail(error));
            return;
        }
        if cqe.status.is_success() && step.has_data() {
            let route = Route::Drive(Location::Dram);
            book(
                self.options.ledger.as_ref(),
                route,
                Class::Data,
                IDENTIFY_LEN as u64,
            );
        }
        let mut bytes = vec![0; PAGE];
        if self.page.read(0, &mut bytes).is_err() {
            self.end(DriveError::Gone);
            return;
        }
        let next = match step {
            Step::Controller => {
                // There are as many bytes as it needs.
                self.controller = DriveController::parse(&bytes).unwrap_or_default();
                if !self.controller.has_usual_entries() {
                    self.disable(now, Then::Fail(DriveError::Lacks("entries of the usual size")));
                    return;
                }
                Step::QueueCount
            }
            Step::QueueCount => {
                let submission = (cqe.result & 0xffff) as usize + 1;
                let completion = (cqe.result >> 16 & 0xffff) as usize + 1;
                self.created = self.queues.len().min(submission).min(completion);
                Step::CompletionQueue(1)
            }
            Step::CompletionQueue(qid) if usize::from(qid) < self.created => Step::CompletionQueue(qid + 1),
            Step::CompletionQueue(_) => Step::SubmissionQueue(1),
            Step::SubmissionQueue(qid) if usize::from(qid) < self.created => Step::SubmissionQueue(qid + 1),
            Step::SubmissionQueue(_) => {
                self.listed.clear();
                self.namespaces.clear();
                self.unusable.clear();
                Step::Namespaces(NsId::NONE)
            }
            Step::Namespaces(behind) => {
                let room = NAMESPACES_MAX - self.listed.len();
                // In ascending order, so that a drive which repeats itself comes to an end.
                let mut last = behind;
                for nsid in parse_namespace_list(&bytes).take(room) {
                    if nsid > last && nsid != NsId::ALL {
                        self.listed.push(nsid);
                        last = nsid;
                    }
                }
                let is_full = parse_namespace_list(&bytes).count() == PAGE / 4;
                match is_full && last > behind && self.listed.len() < NAMESPACES_MAX {
                    true => Step::Namespaces(last),
                    false => Step::Namespace(0),
                }
            }
            Step::Namespace(at) => {
                let nsid = self.listed[at];
                let namespace = match cqe.status.is_success() {
                    true => DriveNamespace::parse(nsid, &bytes),
                    false => Err(Unusable::Refused(cqe.status)),
                };
                match namespace {
                    Ok(namespace) => self.namespaces.push(namespace),
                    Err(error) => self.unusable.push((nsid, error)),
                }
                Step::Namespace(at + 1)
            }
        };
        self.begin(now, next);
    }
}
