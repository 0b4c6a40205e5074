//! The sending half of a connection: cuts a request into pieces, and decides when each may go.

use std::collections::VecDeque;

use rdmux_rnic::{Access, Operation, Selectivity, SendFlags, SendRequest, Sge, SgeList, Status};
use rdmux_wire::node::CompletionStatus;
use rdmux_wire::node::mux::{BODY_LEN_MAX, Extra, Kind, Receive};
use rdmux_wire::{LKey, RKey};

use super::super::cut::list_of_part;
use super::keys::{Keys, PeerKey};
use super::{Bound, Violation};

/// Most receives of a connection that a peer may tell: those of a queue pair.
const RECEIVES_MAX: usize = super::super::application::WORK_REQUESTS_MAX as usize;

/// Reason why a connection cannot go on yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) enum Wait {
    /// A receive of the peer.
    Receive,
    /// A slot of the peer's node.
    Slot,
    /// The peer's node's answer about a key.
    Key,
    /// The end of earlier READs and atomic operations.
    Fence,
    /// Another queue pair, as the one that was shared has ended.
    Shared,
    /// Nothing: it has failed.
    Failed,
}

/// Why a request does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Wait(Wait),
    /// The request fails with the first status; the peer is told the second.
    Refuse(Status, CompletionStatus),
}

/// A message for the peer's node.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) extra: Extra,
    pub(super) sequence: u32,
    pub(super) length: u32,
    pub(super) body: SgeList,
}

/// A piece on the shared queue pair: nothing, an operation, a message, or an operation and then a message.
#[derive(Debug, Default)]
pub(super) struct Cut {
    pub(super) direct: Option<(Operation, SgeList)>,
    pub(super) message: Option<Message>,
}

/// The sending half of a connection.
#[derive(Debug, Default)]
pub(super) struct Sender {
    /// Receives of the peer that no message has taken.
    receives: VecDeque<Receive>,
    /// Messages that took a receive.
    sequence: u32,
    /// The receive of the request that is being sent.
    taken: Option<Receive>,
    /// Requests in flight that a fence waits for.
    pub(super) fenced: u32,
}

impl Sender {
    /// Returns the number of the next receive.
    pub(super) fn sequence(&self) -> u32 {
        self.sequence
    }

    /// Adds receives of the peer.
    pub(super) fn add_receives(&mut self, receives: Vec<Receive>) -> Result<(), Violation> {
        if self.receives.len() + receives.len() > RECEIVES_MAX {
            return Err(Violation("more receives than a queue pair can have"));
        }
        self.receives.extend(receives);
        Ok(())
    }

    /// Decides whether the next piece of a request, which begins at `offset`, may be sent, and returns how many bytes it may have. `has_slot`: a
    /// message may be sent.
    pub(super) fn admit(
        &mut self,
        bound: &Bound,
        request: &SendRequest,
        offset: u32,
        has_slot: bool,
        keys: &mut dyn Keys,
    ) -> Result<u32, Stop> {
        if offset == 0 && request.flags.contains(SendFlags::FENCE) && self.fenced > 0 {
            return Err(Stop::Wait(Wait::Fence));
        }
        let operation = &request.operation;
        let bytes = request.check().ok().filter(|_| !operation.is_local());
        let bytes = bytes.ok_or(refuse(Status::LocalQpOperation))?;
        let rest = bytes.saturating_sub(offset);
        part(bound, &request.sges, (offset, rest), own_access(operation), keys)?;
        check_remote(bound, operation, (offset, rest), keys)?;
        if takes_receive(operation) {
            self.take_receive(operation, bytes)?;
            if !has_slot {
                return Err(Stop::Wait(Wait::Slot));
            }
        }
        if !is_placed(operation, bytes) {
            return Ok(u32::MAX);
        }
        let place = self.taken.as_ref().and_then(|receive| place(receive, offset));
        let (_, _, room) = place.ok_or(refuse(Status::RemoteOperation))?;
        Ok(room)
    }

    /// Takes the receive of a request, unless it has that, and checks that the request fits.
    fn take_receive(&mut self, operation: &Operation, bytes: u32) -> Result<(), Stop> {
        if self.taken.is_none() {
            self.taken = self.receives.pop_front();
        }
        let taken = self.taken.as_ref().ok_or(Stop::Wait(Wait::Receive))?;
        if !matches!(operation, Operation::Write { .. }) {
            if bytes > taken.capacity {
                let told = CompletionStatus::LocalLength;
                return Err(Stop::Refuse(Status::RemoteInvalidRequest, told));
            }
            let cannot_be_written = is_placed(operation, bytes) && taken.elements.is_empty();
            if bytes > 0 && taken.is_faulty || cannot_be_written {
                let told = CompletionStatus::LocalProtection;
                return Err(Stop::Refuse(Status::RemoteOperation, told));
            }
        }
        Ok(())
    }

    /// Has no message be written into receives with an element of this key, from now on: they are faulty.
    pub(super) fn withdraw(&mut self, key: RKey) {
        for receive in self.receives.iter_mut().chain(&mut self.taken) {
            if receive.elements.iter().any(|element| element.rkey == key) {
                receive.is_faulty = true;
                receive.elements.clear();
            }
        }
    }

    /// Cuts a piece that was admitted: `length` bytes at `offset`, the last ones if `is_last`.
    pub(super) fn cut(
        &mut self,
        bound: &Bound,
        request: &SendRequest,
        (offset, length): (u32, u32),
        is_last: bool,
        keys: &mut dyn Keys,
    ) -> Result<Cut, Stop> {
        let operation = &request.operation;
        let bytes: u32 = request.sges.bytes().try_into().unwrap_or(u32::MAX);
        let list = part(
            bound,
            &request.sges,
            (offset, length),
            own_access(operation),
            keys,
        )?;
        let (mut direct, mut message) = (None, None);
        match operation {
            Operation::Send { .. } | Operation::SendInvalidate { .. } => {
                let extra = match operation {
                    Operation::Send { imm: Some(imm) } => Extra::Imm(*imm),
                    Operation::SendInvalidate { rkey } => Extra::Invalidate(*rkey),
                    _ => Extra::None,
                };
                if is_placed(operation, bytes) {
                    let place = self.taken.as_ref().and_then(|receive| place(receive, offset));
                    let (va, rkey, room) = place.ok_or(refuse(Status::RemoteOperation))?;
                    if length > room {
                        return Err(refuse(Status::LocalQpOperation));
                    }
                    direct = Some((Operation::Write { va, rkey, imm: None }, list));
                    message = is_last.then(|| self.message(Kind::Placed, extra, bytes, SgeList::EMPTY));
                } else {
                    message = Some(self.message(Kind::Send, extra, bytes, list));
                }
            }
            _ => {
                // An access of no bytes needs no key, and does nothing.
                let is_empty =
                    length == 0 && matches!(operation, Operation::Write { .. } | Operation::Read { .. });
                if !is_empty {
                    direct = Some((with_key(bound, operation, (offset, length), keys)?, list));
                }
                if let Operation::Write { imm: Some(imm), .. } = operation
                    && is_last
                {
                    message = Some(self.message(Kind::WriteImm, Extra::Imm(*imm), bytes, SgeList::EMPTY));
                }
            }
        }
        if is_last {
            self.taken = None;
        }
        Ok(Cut { direct, message })
    }

    /// Returns the message that ends a request which takes a receive.
    fn message(&mut self, kind: Kind, extra: Extra, length: u32, body: SgeList) -> Message {
        let sequence = self.sequence;
        self.sequence = self.sequence.wrapping_add(1);
        Message {
            kind,
            extra,
            sequence,
            length,
            body,
        }
    }
}

/// Returns whether a request takes a receive of the peer, and needs a message.
pub(super) fn takes_receive(operation: &Operation) -> bool {
    match operation {
        Operation::Send { .. } | Operation::SendInvalidate { .. } => true,
        Operation::Write { imm, .. } => imm.is_some(),
        _ => false,
    }
}

/// Returns whether a message is written into its receive.
fn is_placed(operation: &Operation, bytes: u32) -> bool {
    let is_send = matches!(
        operation,
        Operation::Send { .. } | Operation::SendInvalidate { .. }
    );
    is_send && bytes as usize > BODY_LEN_MAX
}

/// Returns whether a request may be sent in pieces, on a shared queue pair.
pub(in crate::node) fn may_cut(request: &SendRequest) -> bool {
    match request.operation {
        Operation::Write { .. } | Operation::Read { .. } => true,
        Operation::Send { .. } | Operation::SendInvalidate { .. } => {
            request.sges.bytes() > BODY_LEN_MAX as u64
        }
        _ => false,
    }
}

fn own_access(operation: &Operation) -> Access {
    match operation.takes_answer() {
        true => Access::LOCAL_WRITE,
        false => Access::empty(),
    }
}

/// Refuses a request for a reason that the peer of a private queue pair would not learn.
pub(super) fn refuse(status: Status) -> Stop {
    Stop::Refuse(status, CompletionStatus::RetryExceeded)
}

/// Memory of the peer that an operation accesses.
#[derive(Clone, Copy, Debug)]
struct Accessed {
    rkey: RKey,
    range: (u64, u64),
    access: Access,
    is_aligned: bool,
    /// Set if no bytes need no key.
    may_be_empty: bool,
}

/// Returns what `length` bytes at `offset` of an operation access at the peer; `None` if it accesses nothing, or beyond all addresses.
fn accessed(operation: &Operation, (offset, length): (u32, u32)) -> Option<Accessed> {
    let range = |va: u64| Some((va.checked_add(offset.into())?, u64::from(length)));
    let (rkey, range, access) = match *operation {
        Operation::Write { va, rkey, .. } => (rkey, range(va)?, Access::REMOTE_WRITE),
        Operation::Read { va, rkey } => (rkey, range(va)?, Access::REMOTE_READ),
        Operation::CompareSwap { va, rkey, .. } | Operation::FetchAdd { va, rkey, .. } => {
            (rkey, (va, 8), Access::REMOTE_ATOMIC)
        }
        Operation::AtomicWrite { va, rkey } => (rkey, (va, 8), Access::REMOTE_WRITE),
        Operation::Flush {
            va,
            rkey,
            length,
            placement,
            selectivity,
        } => {
            let length = match selectivity {
                Selectivity::Range => length,
                Selectivity::MemoryRegion => 0,
            };
            (rkey, (va, length.into()), Access::for_flush(placement))
        }
        _ => return None,
    };
    let is_atomic = matches!(
        operation,
        Operation::CompareSwap { .. } | Operation::FetchAdd { .. } | Operation::AtomicWrite { .. }
    );
    Some(Accessed {
        rkey,
        range,
        access,
        is_aligned: !is_atomic || range.0.is_multiple_of(8),
        may_be_empty: matches!(operation, Operation::Write { .. } | Operation::Read { .. }),
    })
}

/// Checks what a part of a request wants to access at the peer.
fn check_remote(
    bound: &Bound,
    operation: &Operation,
    part: (u32, u32),
    keys: &mut dyn Keys,
) -> Result<(), Stop> {
    let Some(accessed) = accessed(operation, part) else {
        return match operation {
            Operation::Send { .. } | Operation::SendInvalidate { .. } => Ok(()),
            _ => Err(Stop::Refuse(Status::RemoteAccess, CompletionStatus::RemoteAccess)),
        };
    };
    let refused = CompletionStatus::RemoteInvalidRequest;
    if !accessed.is_aligned || !bound.peer_access.contains(accessed.access) {
        return Err(Stop::Refuse(Status::RemoteInvalidRequest, refused));
    }
    if accessed.range.1 > 0 || !accessed.may_be_empty {
        peer_key(bound, accessed, keys)?;
    }
    Ok(())
}

/// Returns the part of an operation, with the peer's key of shared queue pairs.
fn with_key(
    bound: &Bound,
    operation: &Operation,
    part: (u32, u32),
    keys: &mut dyn Keys,
) -> Result<Operation, Stop> {
    let Some(accessed) = accessed(operation, part) else {
        return Err(refuse(Status::LocalQpOperation));
    };
    let key = peer_key(bound, accessed, keys)?;
    let mut operation = operation.clone();
    match &mut operation {
        Operation::Write { va, rkey, imm } => (*va, *rkey, *imm) = (accessed.range.0, key, None),
        Operation::Read { va, rkey } => (*va, *rkey) = (accessed.range.0, key),
        Operation::CompareSwap { rkey, .. }
        | Operation::FetchAdd { rkey, .. }
        | Operation::AtomicWrite { rkey, .. }
        | Operation::Flush { rkey, .. } => *rkey = key,
        _ => return Err(refuse(Status::LocalQpOperation)),
    }
    Ok(operation)
}

fn peer_key(bound: &Bound, accessed: Accessed, keys: &mut dyn Keys) -> Result<RKey, Stop> {
    match keys.peer(bound.peer_domain, accessed.rkey, accessed.range, accessed.access) {
        PeerKey::Known(key) => Ok(key),
        PeerKey::Unknown => Err(Stop::Wait(Wait::Key)),
        PeerKey::Refused => Err(Stop::Refuse(Status::RemoteAccess, CompletionStatus::RemoteAccess)),
    }
}

/// Returns `length` bytes at `offset` of a list, with the keys of shared queue pairs.
fn part(
    bound: &Bound,
    list: &SgeList,
    (offset, length): (u32, u32),
    access: Access,
    keys: &mut dyn Keys,
) -> Result<SgeList, Stop> {
    if let Some(bytes) = list.as_inline() {
        let end = offset as usize + length as usize;
        return Ok(SgeList::inline(
            bytes.get(offset as usize..end).unwrap_or_default(),
        ));
    }
    let part = list_of_part(list.as_slice(), offset, length);
    let mut with_key = |sge: &Sge| {
        let range = (sge.addr, sge.length.into());
        let found = keys.own(bound.domain, LKey(sge.lkey), range, access);
        let (lkey, _) = found.ok_or(refuse(Status::LocalProtection))?;
        Ok(Sge::new(sge.addr, sge.length, lkey))
    };
    match part.as_slice() {
        [only] => Ok(with_key(only)?.into()),
        all => {
            let all: Vec<Sge> = all.iter().map(with_key).collect::<Result<_, Stop>>()?;
            Ok(all.as_slice().into())
        }
    }
}

/// Returns where the byte `at` of a message goes in a receive, and how many bytes fit there.
fn place(receive: &Receive, at: u32) -> Option<(u64, RKey, u32)> {
    let mut at = at;
    for element in &receive.elements {
        if at < element.length {
            let va = element.va.checked_add(at.into())?;
            return Some((va, element.rkey, element.length - at));
        }
        at -= element.length;
    }
    None
}
