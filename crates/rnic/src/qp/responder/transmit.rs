//! Packets of pending responses.

use std::convert::Infallible;

use rdmux_wire::Psn;
use rdmux_wire::roce::sack::Sack;
use rdmux_wire::roce::{Aeth, Bth, NakCode, Operation as Op, Reth, Syndrome};

use super::{ACK_WAITS_FOR, Answer, Fetch, FlushState, ReadAnswer, Responder, nak_of};
use crate::access::What;
use crate::cq::Status;
use crate::memory::{Access, Medium, Memory};
use crate::qp::execute::{GATHER_BYTES, Refusal, region};
use crate::qp::read_ahead::{Origin, ReadAhead};
use crate::qp::{Env, Head};
use crate::trace::{Note, Refused};
use crate::transmit::{Path, TransmitBuf};

/// Reason for which a READ response packet cannot be built.
enum Unread {
    Refused(Refusal),
    /// Its bytes have to be fetched from this medium.
    On(Medium),
}

impl From<Refusal> for Unread {
    fn from(refusal: Refusal) -> Unread {
        Unread::Refused(refusal)
    }
}

/// Reads bytes, unless they have to be fetched.
fn read_at_once(memory: &dyn Memory, offset: u64, out: &mut [u8]) -> Result<(), Unread> {
    match (memory.read_at_once(offset, out), memory.medium()) {
        (Some(read), _) => Ok(read.map_err(Refusal::from)?),
        (None, Some(medium)) => Err(Unread::On(medium)),
        (None, None) => Ok(memory.read(offset, out).map_err(Refusal::from)?),
    }
}

impl Responder {
    pub(crate) fn wants_transmit(&self, head: &Head) -> bool {
        match self.answers.front() {
            None => self.sack_owed,
            Some(Answer::Flush { state, .. }) => *state != FlushState::Runs,
            Some(
                Answer::Access { .. }
                | Answer::Read(ReadAnswer {
                    fetch: Fetch::Runs(..),
                    ..
                }),
            ) => false,
            Some(Answer::Read(_)) => head.rate.held_until.is_none(),
            Some(Answer::Ack { .. } | Answer::Atomic { .. }) => true,
        }
    }

    /// Returns whether only an acknowledgement is pending, which may wait a little to be combined with later ones.
    pub(crate) fn owes_only_ack(&self) -> bool {
        self.answers.len() == 1
            && !self.sack_owed
            && self.ack_covers < ACK_WAITS_FOR
            && matches!(
                self.answers.front(),
                Some(Answer::Ack {
                    syndrome: Syndrome::Ack { .. },
                    ..
                })
            )
    }

    /// Returns the PSN of the acknowledgement that is the next response, if it is one: a request may carry it.
    pub(crate) fn next_ack(&self) -> Option<Psn> {
        let next = if mutant!(CarriedPassesFlush) {
            self.answers.back()
        } else {
            self.answers.front()
        };
        match next {
            Some(Answer::Ack {
                psn,
                syndrome: Syndrome::ACK,
                ..
            }) => Some(*psn),
            _ => None,
        }
    }

    /// Notes that a request carries the acknowledgement that was the next response.
    pub(crate) fn ack_was_carried(&mut self) {
        if mutant!(CarriedPassesFlush) {
            self.answers.pop_back();
        } else {
            self.answers.pop_front();
        }
    }

    /// Builds the packets of pending responses, until the buffer is full for this quantum. `Some`: memory failed under a READ, and the
    /// caller fails the QP with this status.
    pub(crate) fn transmit(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        buf: &mut TransmitBuf,
    ) -> Option<Status> {
        buf.ahead.forget();
        while !buf.is_full() && self.wants_transmit(head) {
            let path = head.path?;
            if self.answers.is_empty() {
                self.transmit_sack(env, head, &path, buf);
                continue;
            }
            let (op, psn, msn, syndrome, original) = match *self.answers.front()? {
                Answer::Ack { psn, msn, syndrome } => (Op::Acknowledge, psn, msn, syndrome, None),
                Answer::Flush { psn, msn, state } => match state {
                    FlushState::Failed => {
                        let failed = Syndrome::Nak(NakCode::RemoteOperation);
                        (Op::Acknowledge, psn, msn, failed, None)
                    }
                    _ => (Op::ReadResponseOnly, psn, msn, Syndrome::ACK, None),
                },
                Answer::Atomic { psn, msn, original } => {
                    (Op::AtomicAcknowledge, psn, msn, Syndrome::ACK, Some(original))
                }
                Answer::Access { .. } => return None,
                Answer::Read(_) => match self.transmit_read(env, head, &path, buf) {
                    None => continue,
                    failed => return failed,
                },
            };
            self.answers.pop_front();
            env.counters.sent_pkts += 1;
            if !matches!(syndrome, Syndrome::Ack { .. }) {
                probe!(nak_out, head.qpn.value(), psn.value(), syndrome.code());
            }
            let bth = Bth::new(head.opcode(op), head.dest_qpn, psn);
            let aeth = Some(Aeth { syndrome, msn });
            // AtomicAckETH stands in the place of a payload. 9.3.5.
            let original = original.map(u64::to_be_bytes);
            let payload = original.as_ref().map_or(&[][..], |bytes| bytes);
            let Ok(()) = emit(buf, &path, bth, aeth, payload.len(), |out| {
                out.copy_from_slice(payload);
                Ok::<_, Infallible>(())
            });
        }
        None
    }

    /// Builds the next packet of the READ response in front, or has its bytes fetched. `Some`: as for `transmit`.
    fn transmit_read(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        path: &Path,
        buf: &mut TransmitBuf,
    ) -> Option<Status> {
        let Some(Answer::Read(read)) = self.answers.front_mut() else {
            return None;
        };
        let refusal = match read.emit_next(env, head, path, buf) {
            Ok(()) => {
                if read.source.bytes == 0 {
                    self.answers.pop_front();
                }
                return None;
            }
            Err(Unread::Refused(refusal)) => refusal,
            Err(Unread::On(medium)) => match read.start_fetch(env, head, medium) {
                Ok(()) => return None,
                Err(refusal) => refusal,
            },
        };
        if read.is_replay {
            self.answers.pop_front();
            return None;
        }
        // The memory was there when the READ was accepted and is gone now.
        let (psn, msn, reth) = (read.psn, read.msn, read.first(read.source.bytes.min(head.mtu)));
        let (code, status) = nak_of(refusal);
        env.counters.sent_naks += 1;
        env.note(
            head.qpn,
            Note::Refused(Refused::of_memory(psn, Op::ReadRequest, Some(reth))),
        );
        self.note_end(Some((psn, status)));
        self.answers.clear();
        self.placing = 0;
        self.answers.push_back(Answer::Ack {
            psn,
            msn,
            syndrome: Syndrome::Nak(code),
        });
        Some(status)
    }

    /// Builds the selective NAK, which reports the missing request and those kept. All responses that were pending before it have
    /// left.
    fn transmit_sack(&mut self, env: &mut Env<'_>, head: &Head, path: &Path, buf: &mut TransmitBuf) {
        self.sack_owed = false;
        let expected = self.expected;
        let last = self.early.psns().next_back();
        let bytes = Sack::len_for(last.map_or(0, |last| last.since(expected) as u32));
        let bth = Bth::new(head.opcode(Op::Acknowledge), head.dest_qpn, expected);
        let aeth = Aeth {
            syndrome: Syndrome::Nak(NakCode::PsnSequence),
            msn: self.msn,
        };
        env.counters.sent_pkts += 1;
        probe!(nak_out, head.qpn.value(), expected.value(), aeth.syndrome.code());
        let late = u32::from(mutant!(SackBeginsLate));
        let offsets = self.early.psns().map(|psn| psn.since(expected) as u32 + late);
        let Ok(()) = emit(buf, path, bth, Some(aeth), bytes, |out| {
            Sack::emit(offsets, out);
            Ok::<_, Infallible>(())
        });
    }
}

impl ReadAnswer {
    /// Returns where the first bytes of the response are.
    pub(super) fn first(&self, length: u32) -> Reth {
        Reth {
            va: self.source.va,
            rkey: self.source.rkey,
            length,
        }
    }

    /// Returns where the bytes are that are read at once.
    fn gathered(&self) -> Reth {
        self.first(self.source.bytes.min(GATHER_BYTES as u32))
    }

    /// Builds the next packet.
    fn emit_next(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        path: &Path,
        buf: &mut TransmitBuf,
    ) -> Result<(), Unread> {
        let bytes = self.source.bytes.min(head.mtu);
        let op = match (self.begun, self.source.bytes > bytes) {
            (false, true) => Op::ReadResponseFirst,
            (true, true) => Op::ReadResponseMiddle,
            (true, false) => Op::ReadResponseLast,
            (false, false) => Op::ReadResponseOnly,
        };
        let aeth = (op != Op::ReadResponseMiddle).then_some(Aeth {
            syndrome: Syndrome::ACK,
            msn: self.msn,
        });
        let bth = Bth::new(head.opcode(op), head.dest_qpn, self.psn);
        let mut ahead = std::mem::take(&mut buf.ahead);
        let emitted = emit(buf, path, bth, aeth, bytes as usize, |out| {
            self.read(env, head, &mut ahead, out)
        });
        buf.ahead = ahead;
        emitted?;
        env.counters.sent_pkts += 1;
        self.begun = true;
        self.psn = self.psn.plus(1);
        self.source.va = self.source.va.wrapping_add(bytes.into());
        self.source.bytes -= bytes;
        Ok(())
    }

    /// Reads the payload of the next packet.
    fn read(&self, env: &Env<'_>, head: &Head, ahead: &mut ReadAhead, out: &mut [u8]) -> Result<(), Unread> {
        if out.is_empty() {
            return Ok(());
        }
        let (pd, reth) = (self.source.pd, self.first(out.len() as u32));
        // Rights are checked for fetched bytes too: the region may have been deregistered since.
        let (memory, offset) = region(env.regions, pd, head.qpn, reth, Access::REMOTE_READ)?;
        if let Some(bytes) = self.fetch.bytes(reth.va, out.len()) {
            out.copy_from_slice(bytes);
            return Ok(());
        }
        let gathered = self.gathered();
        let here = ahead.bytes(
            Origin::Region(reth.rkey),
            reth.va,
            out.len(),
            gathered.length as usize,
            || memory.gathers(),
            |bytes| {
                let (memory, offset) = region(env.regions, pd, head.qpn, gathered, Access::REMOTE_READ)?;
                read_at_once(&**memory, offset, bytes)
            },
        )?;
        match here {
            Some(bytes) => out.copy_from_slice(bytes),
            None => read_at_once(&**memory, offset, out)?,
        }
        Ok(())
    }

    /// Has the next bytes fetched from their medium.
    fn start_fetch(&mut self, env: &mut Env<'_>, head: &Head, medium: Medium) -> Result<(), Refusal> {
        let gathered = self.gathered();
        let (memory, offset) = region(
            env.regions,
            self.source.pd,
            head.qpn,
            gathered,
            Access::REMOTE_READ,
        )?;
        let of = (memory.clone(), medium);
        let id = env.accesses.announce();
        let what = What::Read(gathered.length as usize);
        env.accesses.start(id, head.qpn, of, offset, what);
        self.fetch = Fetch::Runs(id, gathered.va);
        Ok(())
    }
}

fn emit<E>(
    buf: &mut TransmitBuf,
    path: &Path,
    mut bth: Bth,
    aeth: Option<Aeth>,
    bytes: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    bth.pad = ((4 - bytes % 4) % 4) as u8;
    let head = Bth::LEN + aeth.map_or(0, |_| Aeth::LEN);
    buf.push(path, head + bytes + usize::from(bth.pad), |b| {
        bth.emit(b);
        if let Some(aeth) = aeth {
            aeth.emit(&mut b[Bth::LEN..]);
        }
        fill(&mut b[head..head + bytes])
    })
}
