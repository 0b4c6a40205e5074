//! The receiving half of a connection: the receives that its application has posted, and the messages that take them, in order.

use std::collections::VecDeque;

use rdmux_rnic::{Access, PostError, RecvRequest, Sge, Status, WcOpcode, WorkCompletion};
use rdmux_wire::node::mux::{BODY_LEN_MAX, Extra, Header, Kind, Receive, ReceiveElement};
use rdmux_wire::{LKey, Qpn};

use super::Violation;
use super::keys::Keys;

/// A part of a message's body, and where it goes: a range of an own region that has been checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) struct CopyTo {
    /// First byte of the body.
    pub(in crate::node) from: usize,
    /// The destination, by the application's key.
    pub(in crate::node) to: Sge,
}

/// A receive that a message has taken.
#[derive(Debug)]
pub(in crate::node) struct Taken {
    /// Its completion, to be told once the bytes are copied.
    pub(in crate::node) completion: WorkCompletion,
    /// Bytes to copy.
    pub(in crate::node) copies: Vec<CopyTo>,
    /// Set if the completion wakes a receiver that waits for such messages alone.
    pub(in crate::node) is_solicited: bool,
}

/// The receives of a connection.
#[derive(Debug)]
pub(in crate::node) struct Receiver {
    posted: VecDeque<RecvRequest>,
    max: usize,
    /// The first so many of which the peer's node knows.
    told: usize,
    /// Messages that took a receive.
    sequence: u32,
}

impl Receiver {
    /// Returns a queue of at most `max` receives.
    pub(in crate::node) fn new(max: u32) -> Receiver {
        Receiver {
            posted: VecDeque::new(),
            max: max as usize,
            told: 0,
            sequence: 0,
        }
    }

    /// Adds a receive.
    pub(in crate::node) fn post(&mut self, receive: RecvRequest) -> Result<(), PostError> {
        receive.check()?;
        if self.posted.len() >= self.max {
            return Err(PostError::QueueFull);
        }
        self.posted.push_back(receive);
        Ok(())
    }

    /// Takes the first receive, of which no message makes use any more.
    pub(in crate::node) fn pop(&mut self) -> Option<RecvRequest> {
        self.told = self.told.saturating_sub(1);
        self.posted.pop_front()
    }

    /// Returns whether the peer's node knows of receives that it may write into the region of a key.
    pub(super) fn has_told(&self, lkey: LKey) -> bool {
        let told = self.posted.iter().take(self.told);
        let mut written = told.filter(|receive| receive.sges.bytes() > BODY_LEN_MAX as u64);
        written.any(|receive| receive.sges.as_slice().iter().any(|sge| sge.lkey == lkey.0))
    }

    /// Returns whether the peer's node should learn of more receives: not of each, but before it is out of them.
    pub(super) fn has_news(&self) -> bool {
        let untold = self.posted.len() - self.told;
        untold > 0 && untold >= self.told
    }

    /// Returns the next receives for the peer's node, as many as `room` bytes hold.
    pub(super) fn tell(&mut self, domain: u64, keys: &mut dyn Keys, mut room: usize) -> Vec<Receive> {
        let mut told = Vec::new();
        while let Some(receive) = self.posted.get(self.told) {
            let receive = described(receive, domain, keys);
            let Some(left) = room.checked_sub(receive.emitted_len()) else {
                break;
            };
            room = left;
            self.told += 1;
            told.push(receive);
        }
        told
    }

    /// Takes the receive of a message.
    ///
    /// # Errors
    /// No node sends such a message: it is not the next one, or not for a receive that was told.
    pub(super) fn take(
        &mut self,
        qpn: Qpn,
        header: &Header,
        domain: u64,
        keys: &mut dyn Keys,
    ) -> Result<Taken, Violation> {
        if header.sequence != self.sequence || self.told == 0 {
            return Err(Violation("a message without a receive"));
        }
        let Some(receive) = self.pop() else {
            return Err(Violation("a message without a receive"));
        };
        self.sequence = self.sequence.wrapping_add(1);
        let is_write = header.kind == Kind::WriteImm;
        if !is_write && u64::from(header.length) > receive.sges.bytes() {
            return Err(Violation("a message longer than its receive"));
        }
        let (imm, invalidated) = match header.extra {
            Extra::Imm(imm) => (Some(imm), None),
            Extra::Invalidate(key) => (None, Some(key)),
            _ => (None, None),
        };
        let copies = match header.kind {
            Kind::Send => copies(receive.sges.as_slice(), header.length, domain, keys),
            _ => Some(Vec::new()),
        };
        let status = match (&copies, invalidated) {
            (None, _) => Status::LocalProtection,
            // No region of an application can be invalidated by a peer.
            (_, Some(_)) => Status::RemoteInvalidRequest,
            _ => Status::Success,
        };
        let completion = WorkCompletion {
            wr_id: receive.wr_id,
            status,
            opcode: if is_write {
                WcOpcode::RecvRdmaWithImm
            } else {
                WcOpcode::Recv
            },
            byte_len: header.length,
            imm,
            qpn,
            ..WorkCompletion::default()
        };
        Ok(Taken {
            completion,
            copies: copies.unwrap_or_default(),
            is_solicited: header.is_solicited,
        })
    }
}

/// Describes a receive for the peer's node.
fn described(receive: &RecvRequest, domain: u64, keys: &mut dyn Keys) -> Receive {
    let capacity = receive.sges.bytes().try_into().unwrap_or(u32::MAX);
    let mut elements = Vec::new();
    let mut is_faulty = false;
    for sge in receive.sges.as_slice().iter().filter(|sge| sge.length > 0) {
        let range = (sge.addr, sge.length.into());
        match keys.own(domain, LKey(sge.lkey), range, Access::LOCAL_WRITE) {
            Some((_, rkey)) => elements.push(ReceiveElement {
                va: sge.addr,
                rkey,
                length: sge.length,
            }),
            None => is_faulty = true,
        }
    }
    if is_faulty || capacity as usize <= BODY_LEN_MAX {
        elements.clear();
    }
    Receive {
        capacity,
        is_faulty,
        elements,
    }
}

/// Returns where the first `length` bytes of a message go; `None` if a receive's memory is not what its application said.
fn copies(list: &[Sge], length: u32, domain: u64, keys: &mut dyn Keys) -> Option<Vec<CopyTo>> {
    let mut copies = Vec::new();
    let mut from = 0;
    for sge in list {
        let length = sge.length.min(length - from);
        if length == 0 {
            continue;
        }
        let range = (sge.addr, length.into());
        keys.own(domain, LKey(sge.lkey), range, Access::LOCAL_WRITE)?;
        copies.push(CopyTo {
            from: from as usize,
            to: Sge { length, ..*sge },
        });
        from += length;
    }
    Some(copies)
}
