//! The one place where a peer's request is checked and carried out: rights, bounds, memory, completion. Requests in packets from
//! the network and in rings in shared memory both end here, so there is no second responder. IBTA Vol 1, 9.7.4.

mod denial;
mod write;

use std::sync::Arc;

use rdmux_wire::roce::grh::GRH_LEN;
use rdmux_wire::roce::{AtomicEth, Feth, MESSAGE_BYTES_MAX, Packet, Placement, Position, Reth, Selectivity};
use rdmux_wire::{Qpn, RKey};

use crate::access::{AccessId, What};
use crate::cq::{Cqn, Status, WcOpcode, WorkCompletion};
use crate::memory::{Access, Atomic, Fault, Medium, Memory, PeerFault};
use crate::qp::message::{Payload, gathers, place, scatter};
use crate::qp::{Env, Event, Head, QpState, QpType, bare_completion};
use crate::queue::ReceiveQueue;
use crate::region::{Pd, Regions};
use crate::srq::Srqn;
use crate::work::{PostError, RecvRequest};

pub(crate) use write::WritePacket;

/// Most bytes that are placed or read at once.
pub(crate) const GATHER_BYTES: usize = 64 << 10;
/// Bytes of a packet that are placed by themselves: another copy would cost more than another call.
const ENOUGH_BYTES: usize = 16 << 10;

/// Objects on whose behalf a request is carried out: those of the QP, or on XRC those of the shared receive queue that the packet
/// names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope {
    /// Protection domain of the keys that the peer names.
    pub(crate) pd: Pd,
    /// Protection domain of the receives' memory: the shared receive queue's, if there is one. IBTA Vol 1, 10.2.9.
    pub(crate) recv_pd: Pd,
    pub(crate) qpn: Qpn,
    pub(crate) recv_cq: Cqn,
    pub(crate) srq: Option<Srqn>,
}

impl Scope {
    /// Returns the scope of a request that came in on a QP; `named`: the shared receive queue in its XRC header. IBTA Vol 1, A14.
    pub(crate) fn of(env: &Env<'_>, head: &Head, named: Option<u32>) -> Result<Scope, Refusal> {
        let init = &head.init;
        if init.qp_type != QpType::XrcRecv {
            let shared = init.srq.and_then(|srqn| env.srqs.get(&srqn.0));
            return Ok(Scope {
                pd: init.pd,
                recv_pd: shared.map_or(init.pd, |srq| srq.init.pd),
                qpn: head.qpn,
                recv_cq: init.recv_cq,
                srq: init.srq,
            });
        }
        let mut srqn = named.ok_or(Refusal::InvalidRequest)?;
        if mutant!(XrcSrqIgnored) {
            srqn = lowest_xrc_srq(env).unwrap_or(srqn);
        }
        let srq = env.srqs.get(&srqn).ok_or(Refusal::InvalidRequest)?;
        match srq.init.xrc {
            Some((xrcd, recv_cq)) if Some(xrcd) == init.xrcd => Ok(Scope {
                pd: srq.init.pd,
                recv_pd: srq.init.pd,
                qpn: head.qpn,
                recv_cq,
                srq: Some(Srqn(srqn)),
            }),
            _ => Err(Refusal::InvalidRequest),
        }
    }
}

/// A deliberate defect: returns a shared receive queue of XRC without regard to the packet.
fn lowest_xrc_srq(env: &Env<'_>) -> Option<u32> {
    let of_xrc = env.srqs.iter().filter(|(_, srq)| srq.init.xrc.is_some());
    of_xrc.map(|(srqn, _)| *srqn).min()
}

/// A request, or the part of one that a packet carries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Request<'a> {
    Send {
        position: Position,
        payload: Payload<'a>,
        imm: Option<u32>,
        invalidate: Option<RKey>,
        solicited: bool,
    },
    /// A SEND of UD: the GRH is placed at the beginning of the receive.
    Datagram {
        grh: [u8; GRH_LEN],
        payload: &'a [u8],
        imm: Option<u32>,
        src_qpn: Qpn,
        solicited: bool,
    },
    Write(WritePacket<'a>),
    Read {
        reth: Reth,
    },
    Atomic {
        eth: AtomicEth,
        /// True to add, false to compare and swap.
        add: bool,
    },
    AtomicWrite {
        reth: Reth,
        payload: &'a [u8],
    },
    Flush {
        reth: Reth,
        feth: Feth,
    },
}

/// Effect of a request.
#[derive(Clone, Debug)]
pub(crate) enum Effect {
    /// The payload was placed; the message is not complete.
    Partial,
    /// The message is complete.
    Complete,
    /// The response carries the bytes of this memory.
    Read(Source),
    /// The operation was done; the response carries the memory's previous value.
    Atomic(u64),
    /// The operation was done; the response carries no data.
    AtomicWrite,
    /// The response follows when this flush has finished.
    Flush(FlushSpec),
}

/// Source of a READ's bytes. The region is looked up again for every packet, so that deregistration takes effect at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) va: u64,
    pub(crate) rkey: RKey,
    pub(crate) bytes: u32,
    pub(crate) pd: Pd,
}

/// Parameters of a flush that passed the checks.
#[derive(Clone, Debug)]
pub(crate) struct FlushSpec {
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) placement: Placement,
}

/// Reason for which a request was not carried out. All but the first three put the QP in error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NotReady,
    /// The request is carried out once this access has ended. Not a refusal: its peer learns nothing of it.
    Waits(AccessId),
    /// The memory that the request names can no longer be read. Not a refusal: its peer sends it again ([`crate::Taken::Again`]).
    SourceEnded,
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
    /// The message does not fit into its receive, which has not completed yet.
    TooLong,
    /// The message's receive completed with this status: its own memory failed.
    Receive(Status),
    /// All of a SEND was received but its key could not be invalidated: class J of IBTA Vol 1, 9.9.3, of which the peer is not
    /// notified.
    Invalidation,
}

impl From<PeerFault> for Refusal {
    fn from(fault: PeerFault) -> Refusal {
        match fault {
            PeerFault::Ended => Refusal::SourceEnded,
            PeerFault::Own(fault) => fault.into(),
        }
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        match fault {
            Fault::Unmapped => Refusal::RemoteAccess,
            Fault::NoSpace | Fault::Io(_) | Fault::NotSupported => Refusal::RemoteOperation,
        }
    }
}

/// Posted receives, and the message in progress.
#[derive(Debug)]
pub(crate) struct Execution {
    pub(crate) recv: ReceiveQueue,
    message: Option<Incoming>,
    gathered: Gathered,
    /// Set when accesses to memory on a medium are left to the driver.
    defers: bool,
    /// Access of the current packet, announced and perhaps started. What is answered later waits for it.
    announced: Option<(AccessId, Medium)>,
    /// The access for which the next request waits, if it has one of its own.
    awaited: Option<Awaited>,
}

/// An access that is a request of its own.
#[derive(Debug)]
struct Awaited {
    va: u64,
    rkey: RKey,
    /// The previous value of the memory for an atomic operation; `None` until the access has ended.
    result: Option<Result<u64, Fault>>,
}

impl Awaited {
    /// Takes the result of an access that has ended, if it was one to this address.
    fn result_of(awaited: &mut Option<Awaited>, va: u64, rkey: RKey) -> Option<Result<u64, Fault>> {
        let is_it = |awaited: &mut Awaited| (awaited.va, awaited.rkey) == (va, rkey);
        awaited.take_if(is_it)?.result
    }
}

/// Bytes of the message in progress that were received and are not placed yet. They are placed or discarded by the end of the
/// datagram that brought them, so no request is answered before its bytes are placed.
#[derive(Debug, Default)]
struct Gathered {
    place: Option<GatheredPlace>,
    bytes: Vec<u8>,
    /// The access that writes them, if their memory is on a medium.
    access: Option<(AccessId, Medium)>,
}

/// Place of the gathered bytes.
#[derive(Clone, Copy, Debug)]
enum GatheredPlace {
    Region {
        va: u64,
        rkey: RKey,
        pd: Pd,
    },
    /// The receive of the message in progress, from this byte on.
    Receive(u64),
}

impl Gathered {
    /// Adds bytes; returns true when there are enough to place them now.
    fn push(&mut self, place: GatheredPlace, payload: &[u8]) -> bool {
        self.place.get_or_insert(place);
        self.bytes.extend_from_slice(payload);
        self.bytes.len() >= GATHER_BYTES
    }

    fn forget(&mut self) {
        self.place = None;
        self.access = None;
        self.bytes.clear();
    }
}

#[derive(Debug)]
enum Incoming {
    Send {
        recv: RecvRequest,
        received: u64,
        scope: Scope,
    },
    Write {
        va: u64,
        rkey: RKey,
        left: u32,
        total: u32,
        scope: Scope,
    },
}

impl Execution {
    /// Creates the state without a message. With `defers` set, [`Execution::execute`] leaves accesses to memory on a medium to the
    /// driver.
    pub(crate) fn new(recv: ReceiveQueue, defers: bool) -> Execution {
        Execution {
            recv,
            message: None,
            gathered: Gathered::default(),
            defers,
            announced: None,
            awaited: None,
        }
    }

    /// Posts a receive request. In Error it completes at once, as flushed.
    pub(crate) fn post(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        request: RecvRequest,
    ) -> Result<(), PostError> {
        // An XRC initiator receives nothing, and an XRC target takes receives from the queues of its domain. A14.
        if matches!(head.init.qp_type, QpType::XrcSend | QpType::XrcRecv) {
            return Err(PostError::Invalid);
        }
        if head.state == QpState::Reset {
            return Err(PostError::WrongState);
        }
        if head.init.srq.is_some() {
            return Err(PostError::HasSrq);
        }
        self.recv.push(request)?;
        if head.state == QpState::Error {
            self.flush(env, head);
        }
        Ok(())
    }

    pub(crate) fn execute(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        scope: Scope,
        request: Request<'_>,
    ) -> Result<Effect, Refusal> {
        match request {
            Request::Send {
                position,
                payload,
                imm,
                invalidate,
                solicited,
            } => self.send(env, scope, position, payload, (imm, invalidate), solicited),
            Request::Datagram {
                grh,
                payload,
                imm,
                src_qpn,
                solicited,
            } => self.datagram(env, scope, &grh, payload, (imm, src_qpn), solicited),
            Request::Write(packet) => self.write(env, head, scope, packet),
            Request::Read { reth } => self.read(env, head, scope, reth),
            Request::Atomic { eth, add } => {
                self.begins(true)?;
                let atomic = if add {
                    Atomic::FetchAdd(eth.swap_or_add)
                } else {
                    Atomic::CompareSwap {
                        compare: eth.compare,
                        swap: eth.swap_or_add,
                    }
                };
                let at = (eth.va, eth.rkey);
                self.atomic(env, head, scope, at, Access::REMOTE_ATOMIC, atomic)
                    .map(Effect::Atomic)
            }
            Request::AtomicWrite { reth, payload } => self.atomic_write(env, head, scope, reth, payload),
            Request::Flush { reth, feth } => self.flush_spec(env, head, scope, reth, feth),
        }
    }

    /// Checks that the packet's place in a message is possible: a message begins only outside of another and continues only inside
    /// of one.
    fn begins(&self, begins: bool) -> Result<(), Refusal> {
        if begins == self.message.is_none() {
            Ok(())
        } else {
            Err(Refusal::InvalidRequest)
        }
    }

    /// Takes the receive for a message: the QP's own or one left over from a message that was given up, else one of its shared
    /// receive queue.
    fn take_recv(&mut self, env: &mut Env<'_>, srq: Option<Srqn>) -> Option<RecvRequest> {
        if let Some((own, _)) = self.recv.take() {
            return Some(own);
        }
        let srqn = srq?;
        let (taken, limit_reached) = env.srqs.get_mut(&srqn.0)?.take();
        if limit_reached {
            env.events.push_back(Event::SrqLimitReached(srqn));
        }
        taken
    }

    /// Returns whether a message finds a receive.
    fn has_recv(&self, env: &Env<'_>, srq: Option<Srqn>) -> bool {
        let shared = srq.and_then(|srqn| env.srqs.get(&srqn.0));
        !self.recv.is_empty() || shared.is_some_and(|srq| !srq.is_empty())
    }

    fn send(
        &mut self,
        env: &mut Env<'_>,
        scope: Scope,
        position: Position,
        payload: Payload<'_>,
        (imm, invalidate): (Option<u32>, Option<RKey>),
        solicited: bool,
    ) -> Result<Effect, Refusal> {
        self.begins(position.begins())?;
        if position.begins() {
            let recv = self.take_recv(env, scope.srq).ok_or(Refusal::NotReady)?;
            self.message = Some(Incoming::Send {
                recv,
                received: 0,
                scope,
            });
        }
        let Some(Incoming::Send {
            recv,
            received,
            scope,
        }) = &mut self.message
        else {
            return Err(Refusal::InvalidRequest);
        };
        let Scope {
            pd,
            recv_pd,
            qpn,
            recv_cq,
            ..
        } = *scope;
        let end = *received + payload.len() as u64;
        if recv.sges.bytes() < end {
            return Err(Refusal::TooLong);
        }
        let at = std::mem::replace(received, end);
        let (wr_id, byte_len) = (recv.wr_id, end as u32);
        if mutant!(AckBeforePlacement) {
            // The data is acknowledged, but never placed.
        } else if let Payload::Packet(payload) = payload
            && (!self.gathered.bytes.is_empty()
                || (!position.ends() && payload.len() < ENOUGH_BYTES && gathers(env, recv_pd, &recv.sges)))
        {
            if self.gathered.push(GatheredPlace::Receive(at), payload) || position.ends() {
                self.place_gathered(env)?;
            }
        } else if let Err(refusal) = place(env, recv_pd, &recv.sges, at, payload) {
            *received = at;
            if let Refusal::Receive(status) = refusal {
                self.end_receive(env, status);
            }
            return Err(refusal);
        }
        if !position.ends() {
            return Ok(Effect::Partial);
        }
        self.message = None;
        if let Some(rkey) = invalidate
            && env.regions.invalidate(rkey, pd, qpn).is_err()
        {
            let wc = bare_completion(qpn, wr_id, Status::RemoteInvalidRequest, WcOpcode::Recv);
            env.complete(recv_cq, wc, true);
            return Err(Refusal::Invalidation);
        }
        let wc = WorkCompletion {
            byte_len,
            imm,
            invalidated: invalidate,
            ..bare_completion(qpn, wr_id, Status::Success, WcOpcode::Recv)
        };
        env.complete(recv_cq, wc, solicited);
        Ok(Effect::Complete)
    }

    fn datagram(
        &mut self,
        env: &mut Env<'_>,
        Scope {
            recv_pd,
            qpn,
            recv_cq,
            srq,
            ..
        }: Scope,
        grh: &[u8],
        payload: &[u8],
        (imm, src_qpn): (Option<u32>, Qpn),
        solicited: bool,
    ) -> Result<Effect, Refusal> {
        let recv = self.take_recv(env, srq).ok_or(Refusal::NotReady)?;
        if recv.sges.bytes() < (grh.len() + payload.len()) as u64 {
            self.recv.put_back(recv);
            return Err(Refusal::TooLong);
        }
        let grh = if mutant!(GrhLeftOut) { &[] } else { grh };
        let placed = scatter(env, recv_pd, &recv.sges, 0, grh)
            .and_then(|()| scatter(env, recv_pd, &recv.sges, grh.len() as u64, payload));
        if let Err(status) = placed {
            env.complete(
                recv_cq,
                bare_completion(qpn, recv.wr_id, status, WcOpcode::Recv),
                true,
            );
            return Err(Refusal::Receive(status));
        }
        let wc = WorkCompletion {
            byte_len: (GRH_LEN + payload.len()) as u32,
            imm,
            src_qpn: Some(src_qpn),
            ..bare_completion(qpn, recv.wr_id, Status::Success, WcOpcode::Recv)
        };
        env.complete(recv_cq, wc, solicited);
        Ok(Effect::Complete)
    }

    /// Returns whether a message has begun and not ended.
    pub(crate) fn is_inside_message(&self) -> bool {
        self.message.is_some()
    }

    /// Ends the message in progress: the receive of a SEND completes with this status.
    pub(crate) fn end_receive(&mut self, env: &mut Env<'_>, status: Status) {
        self.gathered.forget();
        if let Some(Incoming::Send { recv, scope, .. }) = self.message.take() {
            let wc = bare_completion(scope.qpn, recv.wr_id, status, WcOpcode::Recv);
            env.complete(scope.recv_cq, wc, true);
        }
    }

    /// Gives up the message in progress: the next one takes its receive. IBTA Vol 1, 9.8.2.2.
    pub(crate) fn give_up_message(&mut self) {
        if let Some(Incoming::Send { recv, .. }) = self.message.take() {
            self.recv.put_back(recv);
        }
    }

    /// Returns whether bytes wait to be placed.
    pub(crate) fn has_gathered(&self) -> bool {
        !self.gathered.bytes.is_empty()
    }

    /// Places the gathered bytes at the end of the datagram.
    pub(crate) fn place_gathered(&mut self, env: &mut Env<'_>) -> Result<(), Refusal> {
        let access = self.gathered.access;
        let bytes = &mut self.gathered.bytes;
        let placed = match (self.gathered.place, &self.message) {
            (Some(GatheredPlace::Region { va, rkey, pd }), Some(Incoming::Write { scope, .. })) => {
                let length = bytes.len() as u32;
                let reth = Reth { va, rkey, length };
                // The region is looked up again: it may have been deregistered since the packet came.
                let found = region(env.regions, pd, scope.qpn, reth, Access::REMOTE_WRITE);
                match (found, access) {
                    (Err(refusal), _) => Err(refusal),
                    (Ok((memory, offset)), None) => memory.write(offset, bytes).map_err(Refusal::from),
                    (Ok((memory, offset)), Some((id, medium))) => {
                        let of = (memory.clone(), medium);
                        let what = What::Write(std::mem::take(bytes));
                        env.accesses.start(id, scope.qpn, of, offset, what);
                        Ok(())
                    }
                }
            }
            (Some(GatheredPlace::Receive(at)), Some(Incoming::Send { recv, scope, .. })) => {
                scatter(env, scope.recv_pd, &recv.sges, at, bytes).map_err(Refusal::Receive)
            }
            _ => Ok(()),
        };
        self.gathered.forget();
        if let Err(Refusal::Receive(status)) = placed {
            self.end_receive(env, status);
        }
        placed
    }

    /// Checks a READ; its bytes are read when its responses are sent.
    fn read(&self, env: &Env<'_>, head: &Head, scope: Scope, reth: Reth) -> Result<Effect, Refusal> {
        self.begins(true)?;
        if !head.access.contains(Access::REMOTE_READ) || reth.length > MESSAGE_BYTES_MAX {
            return Err(Refusal::InvalidRequest);
        }
        let Scope { pd, qpn, .. } = scope;
        // A READ of 0 bytes names no memory: neither key nor address is checked. 9.7.4.1.5.
        if reth.length > 0 {
            region(env.regions, pd, qpn, reth, Access::REMOTE_READ)?;
        }
        Ok(Effect::Read(Source {
            va: reth.va,
            rkey: reth.rkey,
            bytes: reth.length,
            pd,
        }))
    }

    fn atomic_write(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        scope: Scope,
        reth: Reth,
        payload: &[u8],
    ) -> Result<Effect, Refusal> {
        self.begins(true)?;
        let bytes = <[u8; 8]>::try_from(payload).map_err(|_| Refusal::InvalidRequest)?;
        if reth.length != 8 {
            return Err(Refusal::InvalidRequest);
        }
        let at = (reth.va, reth.rkey);
        // An ATOMIC WRITE needs the rights of a WRITE. A19.4.
        self.atomic(env, head, scope, at, Access::REMOTE_WRITE, Atomic::Write(bytes))?;
        Ok(Effect::AtomicWrite)
    }

    /// Checks a FLUSH, and finds what it flushes.
    fn flush_spec(
        &self,
        env: &Env<'_>,
        head: &Head,
        scope: Scope,
        reth: Reth,
        feth: Feth,
    ) -> Result<Effect, Refusal> {
        self.begins(true)?;
        let needs = Access::for_flush(feth.placement);
        if !head.access.contains(needs) {
            return Err(Refusal::InvalidRequest);
        }
        let region = env
            .regions
            .remote(reth.rkey.0, scope.pd, scope.qpn, needs)
            .ok_or(Refusal::RemoteAccess)?;
        let (offset, length) = match feth.selectivity {
            Selectivity::MemoryRegion => (region.memory_offset, region.length),
            Selectivity::Range => {
                let length = u64::from(reth.length);
                let offset = region.offset_of(reth.va, length);
                (offset.ok_or(Refusal::RemoteAccess)?, length)
            }
        };
        Ok(Effect::Flush(FlushSpec {
            memory: region.memory.clone(),
            offset,
            length,
            placement: feth.placement,
        }))
    }

    /// Carries out an atomic operation: checks rights, alignment (9.4.5: of the address as the peer names it) and bounds, and
    /// accesses the memory.
    fn atomic(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        scope: Scope,
        (va, rkey): (u64, RKey),
        access: Access,
        atomic: Atomic,
    ) -> Result<u64, Refusal> {
        if !head.access.contains(access) || !va.is_multiple_of(8) {
            return Err(Refusal::InvalidRequest);
        }
        let reth = Reth { va, rkey, length: 8 };
        let (memory, offset) = region(env.regions, scope.pd, scope.qpn, reth, access)?;
        if let Some(done) = Awaited::result_of(&mut self.awaited, va, rkey) {
            return Ok(done?);
        }
        match memory.medium() {
            None => Ok(memory.atomic(offset, atomic)?),
            Some(medium) => {
                let of = (memory.clone(), medium);
                let id = env.accesses.announce();
                env.accesses
                    .start(id, scope.qpn, of, offset, What::Atomic(atomic));
                self.awaits(va, rkey);
                Err(Refusal::Waits(id))
            }
        }
    }

    /// Takes the access that the last packet announced, if any.
    pub(crate) fn take_announced(&mut self) -> Option<(AccessId, Medium)> {
        self.announced.take()
    }

    /// Returns the announced access whose bytes are still being collected.
    pub(crate) fn collecting(&self) -> Option<AccessId> {
        self.gathered.access.map(|(id, _)| id)
    }

    /// Notes the result of the access for which the next request waits.
    pub(crate) fn done(&mut self, result: Result<u64, Fault>) {
        if let Some(awaited) = &mut self.awaited {
            awaited.result = Some(result);
        }
    }

    /// Forgets the access for which the next request waited: that request is done, or its next repetition begins anew.
    pub(crate) fn forget_awaited(&mut self) {
        self.awaited = None;
    }

    fn awaits(&mut self, va: u64, rkey: RKey) {
        let result = None;
        self.awaited = Some(Awaited { va, rkey, result });
    }

    /// Returns the medium to which a packet of a WRITE writes.
    pub(crate) fn medium_of(&self, env: &Env<'_>, head: &Head, packet: &Packet<'_>) -> Option<Medium> {
        let (va, rkey, scope) = if let Some(reth) = packet.reth() {
            let scope = Scope::of(env, head, packet.xrc_srqn()).ok()?;
            (reth.va, reth.rkey, scope)
        } else if let Some(Incoming::Write { va, rkey, scope, .. }) = &self.message {
            (*va, *rkey, *scope)
        } else {
            return None;
        };
        let length = packet.payload().len() as u32;
        let reth = Reth { va, rkey, length };
        let found = region(env.regions, scope.pd, scope.qpn, reth, Access::REMOTE_WRITE);
        found.ok()?.0.medium()
    }

    /// Completes every receive as flushed.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>, head: &Head) {
        self.gathered.forget();
        let mut recv_cq = head.init.recv_cq;
        if let Some(Incoming::Send { recv, scope, .. }) = self.message.take() {
            self.recv.put_back(recv);
            recv_cq = scope.recv_cq;
        }
        for recv in self.recv.close() {
            let wc = bare_completion(head.qpn, recv.wr_id, Status::Flushed, WcOpcode::Recv);
            env.complete(recv_cq, wc, false);
        }
    }
}

/// The memory that a header names, and the offset in it.
pub(crate) type Found<'a> = (&'a Arc<dyn Memory>, u64);

/// Returns the memory that a header names and the offset in it, if rights and bounds allow requests that come in on this QP to
/// access it.
pub(crate) fn region(
    regions: &Regions,
    pd: Pd,
    qpn: Qpn,
    reth: Reth,
    access: Access,
) -> Result<Found<'_>, Refusal> {
    let view = regions.remote(reth.rkey.0, pd, qpn, access);
    let view = view.ok_or(Refusal::RemoteAccess)?;
    let offset = view.offset_of(reth.va, u64::from(reth.length));
    Ok((view.memory, offset.ok_or(Refusal::RemoteAccess)?))
}
