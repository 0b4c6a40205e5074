//! Completion queues. IBTA Vol 1, 10.8 and 11.4.2.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdmux_wire::{Qpn, RKey};

/// Handle of a completion queue of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cqn(pub u32);

/// How a work request ended. The names are those of `enum ibv_wc_status`; IBTA Vol 1, 11.6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Status {
    /// Done.
    #[error("success")]
    Success,
    /// A receive buffer too small, or a message longer than allowed.
    #[error("local length error")]
    LocalLength,
    /// The request's own memory keys or bounds are wrong.
    #[error("local protection error")]
    LocalProtection,
    /// The request's own memory failed while it was read or written.
    #[error("local QP operation error")]
    LocalQpOperation,
    /// Not done: the QP was in error.
    #[error("work request flushed error")]
    Flushed,
    /// The peer's answer does not fit the request.
    #[error("bad response error")]
    BadResponse,
    /// The peer found the request invalid: opcode, length, or a right missing on its QP.
    #[error("remote invalid request error")]
    RemoteInvalidRequest,
    /// The peer's memory key, bounds or rights did not allow it.
    #[error("remote access error")]
    RemoteAccess,
    /// The peer failed while doing it.
    #[error("remote operation error")]
    RemoteOperation,
    /// No answer within the retries.
    #[error("transport retry counter exceeded")]
    RetryExceeded,
    /// The peer had no receive posted within the retries.
    #[error("RNR retry counter exceeded")]
    RnrRetryExceeded,
    /// A memory window could not be bound: rights, bounds, or not one's own.
    #[error("memory window bind error")]
    MemoryBind,
}

impl Status {
    /// All of them.
    pub const ALL: [Status; 12] = [
        Status::Success,
        Status::LocalLength,
        Status::LocalProtection,
        Status::LocalQpOperation,
        Status::Flushed,
        Status::BadResponse,
        Status::RemoteInvalidRequest,
        Status::RemoteAccess,
        Status::RemoteOperation,
        Status::RetryExceeded,
        Status::RnrRetryExceeded,
        Status::MemoryBind,
    ];
}

/// What kind of work request completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are the verbs' own")]
pub enum WcOpcode {
    Send,
    Write,
    Read,
    CompareSwap,
    FetchAdd,
    AtomicWrite,
    Flush,
    BindWindow,
    Register,
    LocalInvalidate,
    Recv,
    RecvRdmaWithImm,
}

impl WcOpcode {
    /// All of them.
    pub const ALL: [WcOpcode; 12] = [
        WcOpcode::Send,
        WcOpcode::Write,
        WcOpcode::Read,
        WcOpcode::CompareSwap,
        WcOpcode::FetchAdd,
        WcOpcode::AtomicWrite,
        WcOpcode::Flush,
        WcOpcode::BindWindow,
        WcOpcode::Register,
        WcOpcode::LocalInvalidate,
        WcOpcode::Recv,
        WcOpcode::RecvRdmaWithImm,
    ];
}

/// A work completion. IBTA Vol 1, 11.4.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkCompletion {
    /// The request's own number.
    pub wr_id: u64,
    /// How it ended. With anything but success, only `wr_id`, `status` and `qpn` are meaningful.
    pub status: Status,
    /// What it was.
    pub opcode: WcOpcode,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Immediate data of a receive.
    pub imm: Option<u32>,
    /// The QP it was posted to, or that used it up.
    pub qpn: Qpn,
    /// Receives: the key that the message ended (SEND with invalidate).
    pub invalidated: Option<RKey>,
    /// Receives of UD: where the message came from; its first 40 bytes are the GRH.
    pub src_qpn: Option<Qpn>,
}

/// When an armed queue speaks up. IBTA Vol 1, 11.4.2.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// At the next completion.
    Next,
    /// At the next receive that was sent as solicited, or the next error.
    Solicited,
}

/// What a completion did to its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// Nobody is to be told.
    Quiet,
    /// An armed waiter is to be told.
    Tell,
    /// The queue had no room, or was in error for that already: the completion is lost.
    Overrun { first: bool },
}

/// A completion queue. The device and whoever polls share it and nothing else: polling waits for no lock that is held while
/// packets are handled.
#[derive(Clone, Debug)]
pub struct CompletionQueue(Arc<Mutex<Queue>>);

#[derive(Debug)]
struct Queue {
    completions: VecDeque<WorkCompletion>,
    depth: usize,
    armed: Option<Arm>,
    /// A driver sleeps and is to be told of the next completion that others take in.
    watched: bool,
    overrun: bool,
}

impl CompletionQueue {
    pub(crate) fn new(depth: usize) -> CompletionQueue {
        CompletionQueue(Arc::new(Mutex::new(Queue {
            completions: VecDeque::with_capacity(depth.min(1024)),
            depth,
            armed: None,
            watched: false,
            overrun: false,
        })))
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No invariant spans a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a completion.
    pub(crate) fn push(&self, wc: WorkCompletion, solicited: bool) -> Pushed {
        let mut queue = self.lock();
        if queue.overrun || queue.completions.len() == queue.depth {
            // IBTA Vol 1, 11.6.3.1: an overrun queue is in error for good.
            let first = !std::mem::replace(&mut queue.overrun, true);
            queue.armed = None;
            queue.watched = false;
            return Pushed::Overrun { first };
        }
        queue.completions.push_back(wc);
        let tell = match queue.armed {
            Some(Arm::Next) => true,
            Some(Arm::Solicited) => (solicited && !mutant!(SolicitedIgnored)) || wc.status != Status::Success,
            None => false,
        };
        if tell {
            queue.armed = None;
        }
        if std::mem::take(&mut queue.watched) || tell {
            Pushed::Tell
        } else {
            Pushed::Quiet
        }
    }

    /// Takes the oldest completion, also of a queue that overran. IBTA Vol 1, 11.4.2.1.
    #[inline]
    pub fn poll(&self) -> Option<WorkCompletion> {
        self.lock().completions.pop_front()
    }

    /// Takes the oldest completion, and says how many are left.
    #[inline]
    pub fn poll_and_count(&self) -> Option<(WorkCompletion, usize)> {
        let mut queue = self.lock();
        let wc = queue.completions.pop_front()?;
        Some((wc, queue.completions.len()))
    }

    /// Takes up to `max` completions, oldest first; returns how many.
    pub fn poll_many(&self, max: usize, into: &mut VecDeque<WorkCompletion>) -> usize {
        let mut queue = self.lock();
        let n = max.min(queue.completions.len());
        into.extend(queue.completions.drain(..n));
        n
    }

    /// Completions that wait, and whether the queue overran: then no more come.
    pub fn state(&self) -> (usize, bool) {
        let queue = self.lock();
        (queue.completions.len(), queue.overrun)
    }

    /// Completions that it holds.
    pub(crate) fn depth(&self) -> usize {
        self.lock().depth
    }

    /// Asks for an [`crate::Event::Completion`]. IBTA Vol 1, 11.4.2.2. A completion that is there already makes none: poll after
    /// arming.
    pub fn arm(&self, arm: Arm) {
        let mut queue = self.lock();
        // A request for any completion is the wider one and stays.
        if queue.armed != Some(Arm::Next) {
            queue.armed = Some(arm);
        }
    }

    /// Begins or ends to watch for the next completion, beside what it is armed for: for a driver that sleeps, and needs no event for
    /// what it takes in itself.
    pub fn watch(&self, watched: bool) {
        self.lock().watched = watched;
    }

    pub(crate) fn forget(&self, qpn: Qpn) {
        self.lock().completions.retain(|wc| wc.qpn != qpn);
    }
}
