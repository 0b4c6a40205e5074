//! The one place where a peer's request is checked and done: rights, bounds, memory, completion. Both ways by which requests
//! come in, packets and rings in shared memory, end here, so there is no second responder. IBTA Vol 1, 9.7.4.

use std::collections::VecDeque;
use std::sync::Arc;

use rdmux_wire::RKey;
use rdmux_wire::roce::{Feth, MESSAGE_BYTES_MAX, Placement, Position, Reth, Selectivity};

use crate::cq::{Status, WcOpcode, WorkCompletion};
use crate::memory::{Access, Fault, Memory};
use crate::qp::requester::scatter;
use crate::qp::{Env, Head, bare_completion};
use crate::work::RecvRequest;

/// Bytes that are placed or read together at most.
pub(crate) const GATHER_BYTES: usize = 64 << 10;

/// A request, or one packet's part of one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Request<'a> {
    Send {
        position: Position,
        payload: &'a [u8],
        imm: Option<u32>,
        solicited: bool,
    },
    Write {
        position: Position,
        reth: Option<Reth>,
        payload: &'a [u8],
        imm: Option<u32>,
        solicited: bool,
    },
    Read {
        reth: Reth,
    },
    Flush {
        reth: Reth,
        feth: Feth,
    },
}

/// What came of a request.
#[derive(Clone, Debug)]
pub(crate) enum Effect {
    /// Placed; the message goes on.
    Partial,
    /// The message is complete.
    Complete,
    /// To be answered with this memory's bytes.
    Read(Source),
    /// To be answered when this flush has finished.
    Flush(FlushSpec),
}

/// Where a READ's bytes come from. The region is looked up again for every packet, so that deregistration holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) va: u64,
    pub(crate) rkey: RKey,
    pub(crate) bytes: u32,
}

/// A flush that was allowed.
#[derive(Clone, Debug)]
pub(crate) struct FlushSpec {
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) placement: Placement,
}

/// Why a request was not done. All but the first put the QP in error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NotReady,
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        match fault {
            Fault::Unmapped => Refusal::RemoteAccess,
            Fault::NoSpace | Fault::Io(_) | Fault::NotSupported => Refusal::RemoteOperation,
        }
    }
}

/// Receives posted, and the message under way.
#[derive(Debug, Default)]
pub(crate) struct Execution {
    pub(crate) recv: VecDeque<RecvRequest>,
    message: Option<Message>,
    gathered: Gathered,
}

/// Bytes of the WRITE under way that were taken in and are not placed yet. They never outlive the datagram that brought
/// them, so nothing is answered before it is placed.
#[derive(Debug)]
struct Gathered {
    va: u64,
    rkey: RKey,
    bytes: Vec<u8>,
}

impl Default for Gathered {
    fn default() -> Gathered {
        Gathered {
            va: 0,
            rkey: RKey(0),
            bytes: Vec::new(),
        }
    }
}

impl Gathered {
    fn push(&mut self, va: u64, rkey: RKey, payload: &[u8]) {
        if self.bytes.is_empty() {
            (self.va, self.rkey) = (va, rkey);
        }
        self.bytes.extend_from_slice(payload);
    }

    fn place(&mut self, env: &Env<'_>, head: &Head) -> Result<(), Refusal> {
        let reth = Reth {
            va: self.va,
            rkey: self.rkey,
            length: self.bytes.len() as u32,
        };
        // Looked up again: the region may have gone since the packet came.
        let placed = region(env, head, reth, Access::REMOTE_WRITE)
            .and_then(|(memory, offset)| Ok(memory.write(offset, &self.bytes)?));
        self.bytes.clear();
        placed
    }
}

#[derive(Debug)]
enum Message {
    Send {
        recv: RecvRequest,
        received: u64,
    },
    Write {
        va: u64,
        rkey: RKey,
        left: u32,
        total: u32,
    },
}

impl Execution {
    pub(crate) fn execute(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        request: Request<'_>,
    ) -> Result<Effect, Refusal> {
        match request {
            Request::Send {
                position,
                payload,
                imm,
                solicited,
            } => self.send(env, head, position, payload, imm, solicited),
            Request::Write {
                position,
                reth,
                payload,
                imm,
                solicited,
            } => self.write(env, head, position, reth, payload, imm, solicited),
            Request::Read { reth } => {
                self.begins(true)?;
                if !head.access.contains(Access::REMOTE_READ) || reth.length > MESSAGE_BYTES_MAX {
                    return Err(Refusal::InvalidRequest);
                }
                // A READ of nothing names no memory: neither key nor address is looked at. 9.7.4.1.5.
                if reth.length > 0 {
                    region(env, head, reth, Access::REMOTE_READ)?;
                }
                Ok(Effect::Read(Source {
                    va: reth.va,
                    rkey: reth.rkey,
                    bytes: reth.length,
                }))
            }
            Request::Flush { reth, feth } => {
                self.begins(true)?;
                let needs = Access::for_flush(feth.placement);
                if !head.access.contains(needs) {
                    return Err(Refusal::InvalidRequest);
                }
                let region = env
                    .regions
                    .get(reth.rkey.0, head.init.pd, needs)
                    .ok_or(Refusal::RemoteAccess)?;
                let spec = &region.spec;
                let (offset, length) = match feth.selectivity {
                    Selectivity::MemoryRegion => (spec.memory_offset, spec.length),
                    Selectivity::Range => {
                        let length = u64::from(reth.length);
                        (
                            region.offset_of(reth.va, length).ok_or(Refusal::RemoteAccess)?,
                            length,
                        )
                    }
                };
                let memory = spec.memory.clone();
                Ok(Effect::Flush(FlushSpec {
                    memory,
                    offset,
                    length,
                    placement: feth.placement,
                }))
            }
        }
    }

    /// Whether a message begins where one may: not inside of another.
    fn begins(&self, begins: bool) -> Result<(), Refusal> {
        if begins == self.message.is_none() {
            Ok(())
        } else {
            Err(Refusal::InvalidRequest)
        }
    }

    fn send(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        position: Position,
        payload: &[u8],
        imm: Option<u32>,
        solicited: bool,
    ) -> Result<Effect, Refusal> {
        self.begins(position.begins())?;
        if position.begins() {
            let recv = self.recv.pop_front().ok_or(Refusal::NotReady)?;
            self.message = Some(Message::Send { recv, received: 0 });
        }
        let Some(Message::Send { recv, received }) = &mut self.message else {
            return Err(Refusal::InvalidRequest);
        };
        if !mutant!(AckBeforePlacement)
            && let Err(status) = scatter(env, head, &recv.sges, *received, payload)
        {
            let wc = bare_completion(head.qpn, recv.wr_id, status, WcOpcode::Recv);
            env.complete(head.init.recv_cq, wc, true);
            self.message = None;
            // 9.7.4.1.7 for a message that does not fit; 9.9.2.2 for memory of our own that failed.
            return Err(if status == Status::LocalLength {
                Refusal::InvalidRequest
            } else {
                Refusal::RemoteOperation
            });
        }
        *received += payload.len() as u64;
        if !position.ends() {
            return Ok(Effect::Partial);
        }
        let (wr_id, bytes) = (recv.wr_id, *received as u32);
        self.message = None;
        self.received(env, head, wr_id, bytes, imm, solicited);
        Ok(Effect::Complete)
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one request")]
    fn write(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        position: Position,
        reth: Option<Reth>,
        payload: &[u8],
        imm: Option<u32>,
        solicited: bool,
    ) -> Result<Effect, Refusal> {
        let mut found = None;
        if let Some(reth) = reth {
            self.begins(true)?;
            if !head.access.contains(Access::REMOTE_WRITE) || reth.length > MESSAGE_BYTES_MAX {
                return Err(Refusal::InvalidRequest);
            }
            if reth.length > 0 {
                found = Some(region(env, head, reth, Access::REMOTE_WRITE)?);
            }
            self.message = Some(Message::Write {
                va: reth.va,
                rkey: reth.rkey,
                left: reth.length,
                total: reth.length,
            });
        }
        let Some(Message::Write {
            va,
            rkey,
            left,
            total,
        }) = &mut self.message
        else {
            return Err(Refusal::InvalidRequest);
        };
        // The length announced is the length that comes: no more, and no less at the end. 9.7.4.1.6.
        let bytes = payload.len() as u32;
        if bytes > *left || (position.ends() && bytes != *left) {
            return Err(Refusal::InvalidRequest);
        }
        // A receive must be there before the last packet takes effect, for it is the packet that comes again.
        if imm.is_some() && self.recv.is_empty() {
            if position == Position::Only {
                self.message = None;
            }
            return Err(Refusal::NotReady);
        }
        if !payload.is_empty() && !mutant!(AckBeforePlacement) {
            let reth = Reth {
                va: *va,
                rkey: *rkey,
                length: bytes,
            };
            let (memory, offset) = match found {
                Some(found) => found,
                None => region(env, head, reth, Access::REMOTE_WRITE)?,
            };
            if memory.gathers() && (!position.ends() || !self.gathered.bytes.is_empty()) {
                self.gathered.push(*va, *rkey, payload);
                if position.ends() || self.gathered.bytes.len() >= GATHER_BYTES {
                    self.gathered.place(env, head)?;
                }
            } else {
                memory.write(offset, payload)?;
            }
        }
        *va = va.wrapping_add(u64::from(bytes));
        *left -= bytes;
        if !position.ends() {
            return Ok(Effect::Partial);
        }
        let total = *total;
        self.message = None;
        if imm.is_some()
            && let Some(recv) = self.recv.pop_front()
        {
            self.received(env, head, recv.wr_id, total, imm, solicited);
        }
        Ok(Effect::Complete)
    }

    fn received(
        &self,
        env: &mut Env<'_>,
        head: &Head,
        wr_id: u64,
        byte_len: u32,
        imm: Option<u32>,
        solicited: bool,
    ) {
        let opcode = if imm.is_some() {
            WcOpcode::RecvWithImm
        } else {
            WcOpcode::Recv
        };
        let wc = WorkCompletion {
            wr_id,
            status: Status::Success,
            opcode,
            byte_len,
            imm,
            qpn: head.qpn,
        };
        env.complete(head.init.recv_cq, wc, solicited);
    }

    /// Whether bytes wait to be placed.
    pub(crate) fn has_gathered(&self) -> bool {
        !self.gathered.bytes.is_empty()
    }

    /// Places what waits: the datagram has ended.
    pub(crate) fn place_gathered(&mut self, env: &Env<'_>, head: &Head) -> Result<(), Refusal> {
        if self.has_gathered() {
            self.gathered.place(env, head)
        } else {
            Ok(())
        }
    }

    /// Ends every receive as flushed.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>, head: &Head) {
        self.gathered.bytes.clear();
        if let Some(Message::Send { recv, .. }) = self.message.take() {
            self.recv.push_front(recv);
        }
        if mutant!(ReceivesForgotten) {
            self.recv.clear();
        }
        for recv in std::mem::take(&mut self.recv) {
            let wc = bare_completion(head.qpn, recv.wr_id, Status::Flushed, WcOpcode::Recv);
            env.complete(head.init.recv_cq, wc, false);
        }
    }
}

/// The memory that a header names, when rights and bounds allow it.
pub(crate) fn region<'a>(
    env: &Env<'a>,
    head: &Head,
    reth: Reth,
    access: Access,
) -> Result<(&'a Arc<dyn Memory>, u64), Refusal> {
    let region = env
        .regions
        .get(reth.rkey.0, head.init.pd, access)
        .ok_or(Refusal::RemoteAccess)?;
    let offset = region
        .offset_of(reth.va, u64::from(reth.length))
        .ok_or(Refusal::RemoteAccess)?;
    Ok((&region.spec.memory, offset))
}
