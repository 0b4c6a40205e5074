//! Moves work requests from an application's ring to the device, and completions from the device to its ring.
//!
//! [`Application::post`] is the one place where requests reach queue pairs of the device.

use rdmux_rnic::{Operation, QpState, RecvRequest, SendFlags, SendRequest, Sge, SgeList, Status};
use rdmux_rnic::{PostError, QpAttributes, Target, WcOpcode, WorkCompletion};
use rdmux_verbs::Arm;
use rdmux_wire::node::{DESCRIPTOR_BYTES, Descriptor, QueueId, Work, WorkFlags, WorkOperation};

use super::application::{Application, Detached};
use crate::control::convert::completion_to_wire;
use crate::ring::{
    Consumer, Corrupt, NodeEnd, Producer, PushError, ReadyArea, ReadySet, RingArea, Tell, WorkBytes,
};

/// Requests that an application has posted in a row before others have their turn, and completions that are taken at once.
const BATCH: usize = 64;

/// Completions in hand beyond which no requests are taken.
const KEPT_MAX: usize = 2 * BATCH;

/// The ring of requests, and that of completions.
const SUBMISSIONS: u32 = 0;
const COMPLETIONS: u32 = 0;

/// The node's end of the rings of an application.
#[derive(Debug)]
pub(super) struct Rings {
    end: NodeEnd,
    submissions: Consumer<RingArea>,
    completions: Producer<RingArea>,
    ready: ReadySet<ReadyArea>,
    /// Set while the completions in hand wait for room.
    is_full: bool,
    /// Set while the application wakes the node.
    sleeps: bool,
}

impl Rings {
    pub(super) fn new(end: NodeEnd) -> Rings {
        Rings {
            submissions: end.submission(SUBMISSIONS),
            completions: end.completion(COMPLETIONS),
            ready: end.ready(),
            end,
            is_full: false,
            sleeps: false,
        }
    }

    fn tell_of_submissions(&self, tell: Tell) {
        self.end.tell(SUBMISSIONS, tell);
    }

    fn tell_of_completions(&self, tell: Tell) {
        self.end
            .tell(self.end.layout().completion_ring(COMPLETIONS), tell);
    }
}

impl From<Corrupt> for Detached {
    fn from(corrupt: Corrupt) -> Detached {
        Detached::Protocol(corrupt.to_string())
    }
}

impl Application {
    /// Moves requests and completions. Returns whether there were any.
    pub(super) fn move_work(&mut self, bytes: &mut WorkBytes) -> Result<bool, Detached> {
        if self.rings.is_none() {
            return Ok(false);
        }
        let taken = self.take_work(bytes)?;
        Ok(self.put_completions()? || taken)
    }

    /// Takes requests out of the ring and posts them. Returns whether there were any.
    pub(super) fn take_work(&mut self, bytes: &mut WorkBytes) -> Result<bool, Detached> {
        let mut taken = 0;
        // Each refused request leaves a completion here.
        while taken < BATCH && self.kept.len() < KEPT_MAX {
            let Some(rings) = &mut self.rings else { break };
            let Some(work) = rings.submissions.take_work(bytes)? else {
                break;
            };
            taken += 1;
            self.post(&work, bytes.bytes())?;
        }
        if let Some(rings) = &mut self.rings {
            let tell = rings.submissions.release();
            rings.tell_of_submissions(tell);
        }
        Ok(taken > 0)
    }

    /// Posts a request to its queue pair. The engine checks its keys and ranges against the queue pair's protection domain. A request that the
    /// device refuses puts its queue pair in error, as one that an RNIC finds malformed does.
    fn post(&mut self, work: &Work, bytes: &[u8]) -> Result<(), Detached> {
        let Some(qp) = self.qps.get(work.queue.0) else {
            return Err(Detached::Protocol(format!(
                "a request for queue pair {}, which it does not have",
                work.queue.0
            )));
        };
        let (opcode, posted) = match operation_of(&work.operation) {
            Some((opcode, operation)) => {
                let request = SendRequest {
                    wr_id: work.wr_id,
                    operation,
                    sges: list_of(work, bytes),
                    flags: flags_of(work.flags),
                    to: Target::Connected,
                };
                (opcode, qp.qp.post_send(request))
            }
            None if work.operation == WorkOperation::Recv => {
                let request = RecvRequest {
                    wr_id: work.wr_id,
                    sges: list_of(work, bytes),
                };
                (WcOpcode::Recv, qp.qp.post_recv(request))
            }
            None => (WcOpcode::Recv, Err(PostError::NoSrq)),
        };
        if posted.is_err() {
            let _ = qp.qp.modify(QpState::Error, &QpAttributes::default());
            self.kept.push_back(WorkCompletion {
                wr_id: work.wr_id,
                status: Status::LocalQpOperation,
                opcode,
                qpn: qp.qp.qpn(),
                ..WorkCompletion::default()
            });
        }
        Ok(())
    }

    /// Puts completions into the ring, as far as there is room: the others stay in the device's queue, which has room for all that may come.
    /// Returns whether there were any.
    fn put_completions(&mut self) -> Result<bool, Detached> {
        let Some(rings) = &mut self.rings else {
            return Ok(false);
        };
        let mut put = 0;
        rings.is_full = false;
        'batches: loop {
            if self.kept.is_empty() && self.cq.poll_many(BATCH, &mut self.kept) == 0 {
                break;
            }
            while let Some(wc) = self.kept.front() {
                // Completions of a queue pair that is gone concern nobody.
                if let Some(qp) = self.by_qpn.get(&wc.qpn) {
                    let mut descriptor: Descriptor = [0; DESCRIPTOR_BYTES];
                    completion_to_wire(QueueId(*qp), wc).emit(&mut descriptor);
                    match rings.completions.push(&[descriptor]) {
                        Ok(()) => put += 1,
                        Err(PushError::Full) => {
                            rings.is_full = true;
                            break 'batches;
                        }
                        Err(PushError::Corrupt(corrupt)) => return Err(corrupt.into()),
                    }
                }
                self.kept.pop_front();
            }
            if put >= BATCH {
                break;
            }
        }
        let tell = rings.completions.publish();
        rings.tell_of_completions(tell);
        Ok(put > 0)
    }

    /// Prepares a sleep until the application or the device has something, after [`Application::move_work`] has found nothing. Returns
    /// false if one of them has something now. [`Application::awake`] ends the sleep in either case.
    pub(super) fn prepare_sleep(&mut self) -> Result<bool, Detached> {
        let Some(rings) = &mut self.rings else {
            return Ok(true);
        };
        rings.sleeps = true;
        // An application that lets so many completions wait has to make room for them before its requests are taken.
        let takes = self.kept.len() < KEPT_MAX;
        let mut sleeps = !takes || rings.submissions.prepare_sleep()?;
        if rings.is_full {
            sleeps &= rings.completions.wants_room()?;
        } else {
            self.cq.arm(Arm::Next);
        }
        sleeps &= rings.ready.prepare_sleep();
        // A completion that came before the queue was armed raises no event.
        Ok(sleeps && !self.put_completions()?)
    }

    /// Ends a sleep.
    pub(super) fn awake(&mut self) {
        let Some(rings) = self.rings.as_mut().filter(|rings| rings.sleeps) else {
            return;
        };
        rings.sleeps = false;
        rings.ready.awake();
        // A bit for a ring that does not exist changes nothing: both rings are looked at in each pass.
        let _ = rings.ready.take(|_| {});
        rings.submissions.awake();
        rings.completions.no_longer_waits();
    }
}

/// Returns the operation of a request on a send queue.
fn operation_of(operation: &WorkOperation) -> Option<(WcOpcode, Operation)> {
    Some(match *operation {
        WorkOperation::Send { imm } => (WcOpcode::Send, Operation::Send { imm }),
        WorkOperation::SendInvalidate { rkey } => (WcOpcode::Send, Operation::SendInvalidate { rkey }),
        WorkOperation::Write { remote, imm } => {
            let (va, rkey) = (remote.va, remote.rkey);
            (WcOpcode::Write, Operation::Write { va, rkey, imm })
        }
        WorkOperation::Read { remote } => {
            let (va, rkey) = (remote.va, remote.rkey);
            (WcOpcode::Read, Operation::Read { va, rkey })
        }
        WorkOperation::CompareSwap {
            remote,
            compare,
            swap,
        } => {
            let operation = Operation::CompareSwap {
                va: remote.va,
                rkey: remote.rkey,
                compare,
                swap,
            };
            (WcOpcode::CompareSwap, operation)
        }
        WorkOperation::FetchAdd { remote, add } => {
            let (va, rkey) = (remote.va, remote.rkey);
            (WcOpcode::FetchAdd, Operation::FetchAdd { va, rkey, add })
        }
        WorkOperation::AtomicWrite { remote } => {
            let (va, rkey) = (remote.va, remote.rkey);
            (WcOpcode::AtomicWrite, Operation::AtomicWrite { va, rkey })
        }
        WorkOperation::Flush {
            remote,
            length,
            placement,
            selectivity,
        } => {
            let operation = Operation::Flush {
                va: remote.va,
                rkey: remote.rkey,
                length,
                placement,
                selectivity,
            };
            (WcOpcode::Flush, operation)
        }
        WorkOperation::Recv | WorkOperation::SharedRecv => return None,
    })
}

fn list_of(work: &Work, bytes: &[u8]) -> SgeList {
    let inline = work.inline(bytes);
    if !inline.is_empty() {
        return SgeList::inline(inline);
    }
    let sge = |element: rdmux_wire::node::Element| Sge::new(element.addr, element.length, element.lkey);
    let mut elements = work.elements(bytes);
    match (elements.next(), elements.next()) {
        (None, _) => SgeList::EMPTY,
        (Some(only), None) => sge(only).into(),
        (Some(first), Some(second)) => {
            let all: Vec<Sge> = [first, second].into_iter().chain(elements).map(sge).collect();
            all.as_slice().into()
        }
    }
}

fn flags_of(flags: WorkFlags) -> SendFlags {
    SendFlags::from_bits_truncate(flags.bits().into())
}
