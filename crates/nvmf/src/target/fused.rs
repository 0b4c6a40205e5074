//! Fused Compare and Write, and other I/Os that a queue itself asks for.
//!
//! The transport takes the two commands of a pair as commands that are no I/O: it receives their data and has [`super::Queue::execute`] carry
//! them out. The queue keeps the data until it has both, then asks for an I/O of its own ([`super::Queue::poll_flush`]), which compares and writes while it
//! is alone with the namespace, and completes both commands when that is done.

use std::collections::VecDeque;
use std::sync::Arc;

use rdmux_runtime::Pages;
use rdmux_verbs::sync::Mutex;
use rdmux_wire::nvme::{Cid, Fuse, Opcode, Rw, Sqe, Status};

use super::io::{Io, Operation};

/// Pairs at a time: hosts have no more commands outstanding than a queue has entries.
const PAIRS_MAX: usize = 64;

/// An I/O that a queue itself asks for.
#[derive(Debug)]
pub(super) enum Own {
    /// Both commands of a fused pair, once their data are there.
    Pair {
        compare: Pages,
        write: Pages,
        fua: bool,
        /// Statuses of the two, once they are done.
        statuses: Mutex<Option<(Status, Status)>>,
    },
    /// Reservations persist from now on, or no more.
    Persist {
        persists: bool,
        status: Mutex<Option<Status>>,
    },
}

impl Own {
    pub(super) fn execute(&self, io: &Io) {
        match self {
            Own::Pair {
                compare,
                write,
                fua,
                statuses,
            } => {
                let done = run_pair(io, compare, write, *fua);
                *statuses.lock() = Some(done);
            }
            Own::Persist { persists, status } => {
                let done = io.namespace.reservations().set_persists(*persists);
                *status.lock() = Some(done.err().unwrap_or(Status::SUCCESS));
            }
        }
    }
}

fn run_pair(io: &Io, compare: &[u8], write: &[u8], fua: bool) -> (Status, Status) {
    let namespace = &io.namespace;
    let pair = || -> Result<(), (Status, Status)> {
        let first = |status| (status, Status::FAILED_FUSED);
        let second = |status| (Status::SUCCESS, status);
        let _running = io.enter(true).map_err(|status| (status, status))?;
        let run = || {
            namespace.check_reservation(true).map_err(first)?;
            if !mutant!(PairNotCompared) {
                io.compare(compare).map_err(first)?;
            }
            namespace.write(io.offset, write).map(drop).map_err(second)
        };
        match mutant!(PairNotAlone) {
            true => run()?,
            false => namespace.alone(run)?,
        }
        match fua {
            true => namespace.backend.flush().map_err(second),
            false => Ok(()),
        }
    };
    pair().err().unwrap_or((Status::SUCCESS, Status::SUCCESS))
}

/// The fused pairs of a queue.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    /// In the order of their first commands.
    pairs: VecDeque<Pair>,
    /// The command before this one was a first one: it was refused, or is the last of `pairs`.
    last: Last,
    /// Completions of commands that have waited.
    done: VecDeque<(Cid, Status)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Last {
    #[default]
    Other,
    First,
    RefusedFirst,
}

#[derive(Debug)]
struct Pair {
    io: Io,
    first: Half,
    second: Option<Half>,
    fua: bool,
    own: Option<Arc<Own>>,
}

#[derive(Debug)]
struct Half {
    cid: Cid,
    state: HalfState,
}

#[derive(Debug)]
enum HalfState {
    /// Its data are on their way.
    Receives,
    /// Its data are here.
    Waits(Pages),
    /// Its data are with the I/O.
    Runs,
    /// Its completion is out.
    Completed,
    /// It completes with this status once its data are here.
    Fails(Status),
}

impl Half {
    fn new(cid: Cid) -> Half {
        Half {
            cid,
            state: HalfState::Receives,
        }
    }

    /// Has it fail: at once, if its data are here.
    fn fail(&mut self, status: Status, done: &mut VecDeque<(Cid, Status)>) {
        match self.state {
            HalfState::Receives => self.state = HalfState::Fails(status),
            HalfState::Waits(_) => {
                self.state = HalfState::Completed;
                done.push_back((self.cid, status));
            }
            _ => {}
        }
    }
}

impl Pairs {
    pub(super) fn is_empty(&self) -> bool {
        self.pairs.is_empty() && self.last == Last::Other && self.done.is_empty()
    }

    /// Takes note of a command, which the queue has checked as if it were not fused, and returns the bytes that it receives. `None` if it is
    /// not fused.
    pub(super) fn admit(
        &mut self,
        sqe: &Sqe,
        checked: Result<Io, Status>,
        data_len: u32,
    ) -> Result<Option<u32>, Status> {
        const INVALID: Status = Status::INVALID_FIELD.do_not_retry();
        let last = std::mem::take(&mut self.last);
        if sqe.fuse() != Fuse::Second && last == Last::First {
            self.fail_last(Status::MISSING_FUSED);
        }
        match sqe.fuse() {
            Fuse::None => Ok(None),
            Fuse::Reserved => Err(INVALID),
            Fuse::First => {
                let io = checked.and_then(|io| match io.operation {
                    // Its blocks are not stored.
                    Operation::Compare if io.namespace.accelerator().is_some() => Err(INVALID),
                    Operation::Compare if io.length > io.namespace.fused_bytes_max() => {
                        Err(Status::ATOMIC_UNIT_EXCEEDED.do_not_retry())
                    }
                    Operation::Compare if self.pairs.len() >= PAIRS_MAX => Err(Status::INTERRUPTED),
                    Operation::Compare => Ok(io),
                    _ => Err(INVALID),
                });
                self.last = match io.is_ok() {
                    true => Last::First,
                    false => Last::RefusedFirst,
                };
                let io = io?;
                self.pairs.push_back(Pair {
                    first: Half::new(io.cid),
                    io,
                    second: None,
                    fua: false,
                    own: None,
                });
                Ok(Some(data_len))
            }
            Fuse::Second => {
                let pair = match last {
                    Last::Other => return Err(Status::MISSING_FUSED),
                    Last::RefusedFirst => return Err(Status::FAILED_FUSED),
                    Last::First => self.pairs.back_mut().ok_or(Status::FAILED_FUSED)?,
                };
                if !matches!(pair.first.state, HalfState::Receives | HalfState::Waits(_)) {
                    self.clean();
                    return Err(Status::FAILED_FUSED);
                }
                let is_write = sqe.opcode() == Opcode::WRITE;
                let matched = checked.and_then(|io| {
                    let is_same = io.offset == pair.io.offset
                        && io.length == pair.io.length
                        && io.namespace.key() == pair.io.namespace.key();
                    if is_write && is_same { Ok(io) } else { Err(INVALID) }
                });
                match matched {
                    Ok(io) => {
                        pair.second = Some(Half::new(io.cid));
                        pair.fua = Rw::parse(sqe).fua;
                        Ok(Some(data_len))
                    }
                    Err(status) => {
                        self.fail_last(Status::FAILED_FUSED);
                        Err(status)
                    }
                }
            }
        }
    }

    fn fail_last(&mut self, status: Status) {
        if let Some(pair) = self.pairs.back_mut() {
            pair.first.fail(status, &mut self.done);
        }
        self.clean();
    }

    /// Returns true if a command is of a pair that is not over.
    fn find(&mut self, cid: Cid) -> Option<(&mut Pair, bool)> {
        let has = |half: &Half| half.cid == cid && !matches!(half.state, HalfState::Completed);
        self.pairs.iter_mut().find_map(|pair| {
            if has(&pair.first) {
                Some((pair, true))
            } else if pair.second.as_ref().is_some_and(has) {
                Some((pair, false))
            } else {
                None
            }
        })
    }

    /// Takes the data of a command. `Some` if that completes it.
    pub(super) fn received(&mut self, cid: Cid, data: &[u8]) -> Option<Status> {
        let Some((pair, is_first)) = self.find(cid) else {
            return Some(Status::INVALID_FIELD.do_not_retry());
        };
        let half = match (is_first, &mut pair.second) {
            (false, Some(second)) => second,
            _ => &mut pair.first,
        };
        let fails = match half.state {
            HalfState::Fails(status) => Some(status),
            _ => None,
        };
        half.state = match fails {
            Some(_) => HalfState::Completed,
            None => {
                let mut pages = Pages::new(data.len());
                pages.copy_from_slice(data);
                HalfState::Waits(pages)
            }
        };
        self.clean();
        fails
    }

    /// A command of a pair has failed before its data were here.
    pub(super) fn failed(&mut self, cid: Cid) {
        let Pairs { pairs, done, .. } = self;
        for pair in pairs.iter_mut() {
            let is_of = |half: &Half| half.cid == cid && matches!(half.state, HalfState::Receives);
            if !is_of(&pair.first) && !pair.second.as_ref().is_some_and(is_of) {
                continue;
            }
            for half in [Some(&mut pair.first), pair.second.as_mut()]
                .into_iter()
                .flatten()
            {
                match is_of(half) {
                    true => half.state = HalfState::Completed,
                    false => half.fail(Status::FAILED_FUSED, done),
                }
            }
            break;
        }
        self.clean();
    }

    /// Returns the I/O of a pair that has all its data.
    pub(super) fn poll(&mut self) -> Option<Io> {
        self.pairs.iter_mut().find_map(|pair| {
            let second = pair.second.as_mut()?;
            let (HalfState::Waits(compare), HalfState::Waits(write)) =
                (&mut pair.first.state, &mut second.state)
            else {
                return None;
            };
            let own = Arc::new(Own::Pair {
                compare: std::mem::take(compare),
                write: std::mem::take(write),
                fua: pair.fua,
                statuses: Mutex::default(),
            });
            (pair.first.state, second.state) = (HalfState::Runs, HalfState::Runs);
            pair.own = Some(own.clone());
            Some(Io {
                operation: Operation::Own,
                own: Some(own),
                ..pair.io.clone()
            })
        })
    }

    /// Returns the completion of a command that has waited.
    pub(super) fn poll_done(&mut self) -> Option<(Cid, Status)> {
        let Pairs { pairs, done, .. } = self;
        for pair in pairs.iter_mut() {
            let statuses = match pair.own.as_deref() {
                Some(Own::Pair { statuses, .. }) => statuses.lock().take(),
                _ => None,
            };
            if let Some((first, second)) = statuses {
                pair.own = None;
                pair.first.state = HalfState::Completed;
                done.push_back((pair.first.cid, first));
                if let Some(half) = &mut pair.second {
                    half.state = HalfState::Completed;
                    done.push_back((half.cid, second));
                }
            }
        }
        self.clean();
        self.done.pop_front()
    }

    fn clean(&mut self) {
        let is_last_open = self.last == Last::First;
        let is_over = |half: &Half| matches!(half.state, HalfState::Completed);
        let last = self.pairs.len().saturating_sub(1);
        let mut at = 0;
        self.pairs.retain(|pair| {
            let is_kept_for_second = is_last_open && at == last;
            at += 1;
            is_kept_for_second
                || !is_over(&pair.first)
                || pair.second.as_ref().is_some_and(|half| !is_over(half))
        });
    }
}
