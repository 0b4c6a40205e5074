//! The remains of an RC QP that has failed: the requests that had not completed, and how far it had executed those of its peer.
//!
//! From what both ends have left follows which requests took effect, so that another pair of QPs can go on where this one ended: all PSNs before
//! [`Done::expected`] were executed, and no other. Only a QP that was told to ([`Rnic::keep_remains`](crate::Rnic::keep_remains)) keeps this.

use rdmux_wire::Psn;

use super::requester::Wqe;
use crate::cq::Status;

/// Remains of a QP in Error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remains {
    /// Path MTU in bytes: the payload of each packet of a request but its last.
    pub mtu: u32,
    /// The requests that were in the send queue, from the oldest on. One that was posted later is not among them; it was never begun.
    pub sent: Vec<Unfinished>,
    /// Requests of its peer that the QP has executed.
    pub done: Done,
}

/// A request that ended with an error or flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// Its user's identifier.
    pub wr_id: u64,
    /// Its first PSN and the number of its PSNs; `None` if none of its packets was ever built.
    pub psns: Option<(Psn, u32)>,
}

/// How far a responder has executed the requests of its peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// All requests, and parts of requests, before this PSN were executed, and none from here on.
    pub expected: Psn,
    /// A PSN of the request for which it has failed, and the status with which the peer's request ends. It may lie before `expected`: memory
    /// may fail after a packet was counted as executed, and a READ's as late as when its response is sent.
    pub refused: Option<(Psn, Status)>,
    /// The newest requests that must not be executed again, although their response may not have arrived, by their PSNs.
    pub answers: Vec<(Psn, Answered)>,
}

/// The response to a request that must not be executed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// The value that an atomic operation found.
    Original(u64),
    /// A FLUSH or an ATOMIC WRITE that is done.
    Done,
    /// A FLUSH that failed.
    Failed,
}

/// The state of a responder at its end.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Set once no more is executed.
    pub(super) has_ended: bool,
    /// Requests that it has executed, unless it ended while a medium worked for it.
    pub(super) done: Option<Done>,
}

impl Unfinished {
    pub(super) fn of(wqe: &Wqe) -> Unfinished {
        Unfinished {
            wr_id: wqe.request.wr_id,
            psns: wqe.first.map(|first| (first, wqe.packets)),
        }
    }
}
