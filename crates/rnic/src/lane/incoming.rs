//! SENDs of the peer that callers take out of its ring.
//!
//! While the lane has them, the responder's place in the sequence is the lane's. The device takes it back before it does anything with the QP.
//! A caller executes the next request of one record, into a receive of the QP's; every other request stays in the ring for the device.

use std::net::IpAddr;

use rdmux_wire::roce::{Bth, ICRC_LEN, Opcode, Operation, Transport, carried, coalesced};
use rdmux_wire::{Psn, Qpn};

use super::{Delivery, OwnKey, find_recent};
use crate::cq::{CompletionQueue, Cqn, Status, WcOpcode, WorkCompletion};
use crate::local::RingBytes;
use crate::memory::Access;
use crate::qp::bare_completion;
use crate::qp::message::{is_whole, pieces};
use crate::queue::ReceiveQueue;
use crate::time::Time;
use crate::work::RecvRequest;

/// Opcodes of a SEND that one packet holds, without and with immediate data.
const SEND_ONLY: u8 = code(Operation::SendOnly);
const SEND_ONLY_IMM: u8 = code(Operation::SendOnlyImm);

const fn code(operation: Operation) -> u8 {
    let transport = Transport::Rc;
    Opcode { transport, operation }.code()
}

/// Attributes of a QP with which its lane receives.
#[derive(Clone, Debug)]
pub(crate) struct Receiving {
    /// Address of the QP's peer.
    pub(crate) peer: IpAddr,
    /// Path MTU in bytes.
    pub(crate) mtu: u32,
    /// Those of the QP, or the shared ones that it uses.
    pub(crate) receives: ReceiveQueue,
}

/// A responder's place in the sequence of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// PSN of the next request.
    pub(crate) expected: Psn,
    pub(crate) msn: u32,
    /// Number of PSNs until the device has to look at the sequence: it compares PSNs with those of older requests.
    pub(crate) left: u32,
}

/// The receives of a lane, and while it has them, the responder's turn.
#[derive(Debug)]
pub(super) struct Incoming {
    cqn: Cqn,
    cq: CompletionQueue,
    lent: Option<(Receiving, Turn)>,
    pub(super) keys: Vec<OwnKey>,
    /// Key of a region that a receive needed, and the lane does not know.
    pub(super) wanted: Option<u32>,
    /// Packets received, and their bytes.
    pub(super) packets: u64,
    pub(super) bytes: u64,
}

impl Incoming {
    pub(super) fn new(cqn: Cqn, cq: CompletionQueue) -> Incoming {
        Incoming {
            cqn,
            cq,
            lent: None,
            keys: Vec::new(),
            wanted: None,
            packets: 0,
            bytes: 0,
        }
    }

    pub(super) fn lend(&mut self, receiving: Receiving, turn: Turn) {
        self.lent = Some((receiving, turn));
    }

    pub(super) fn take_back(&mut self) -> Option<Turn> {
        self.lent.take().map(|(_, turn)| turn)
    }

    pub(super) fn turn(&self) -> Option<&Turn> {
        self.lent.as_ref().map(|(_, turn)| turn)
    }

    /// Executes a request, if it is the next SEND of the QP's peer, a receive is there for it, and the lane knows its memory. Returns what
    /// the device has to know of, if that is anything; `None` if the device has to handle the request.
    #[inline]
    pub(super) fn take(
        &mut self,
        src: IpAddr,
        (record, head): (&dyn RingBytes, &[u8]),
        now: impl Fn() -> Time,
    ) -> Option<Option<Delivery>> {
        let (receiving, turn) = self.lent.as_mut()?;
        let (len, read) = (record.bytes(), head.len());
        let send = Send::parse(head, len)?;
        let is_next = send.psn == turn.expected && src == receiving.peer && send.packets <= turn.left;
        let bytes = len - send.heads;
        if !is_next || !is_whole(bytes, send.packets, receiving.mtu) {
            return None;
        }
        let receive = TakenReceive::from(&receiving.receives)?;
        let payload = (bytes <= read - send.heads).then(|| &head[send.heads..len]);
        if let Err(wanted) = place(
            &mut self.keys,
            receive.get()?,
            (record, send.heads, bytes),
            payload,
        ) {
            self.wanted = wanted;
            return None;
        }
        let receive = receive.consume()?;
        turn.expected = turn.expected.plus(send.packets);
        turn.msn = (turn.msn + 1) & 0xff_ffff;
        turn.left -= send.packets;
        self.packets += u64::from(send.packets);
        self.bytes += (len + send.tail) as u64;
        let wc = WorkCompletion {
            byte_len: bytes as u32,
            imm: send.imm,
            ..bare_completion(send.qpn, receive.wr_id, Status::Success, WcOpcode::Recv)
        };
        let pushed = self.cq.push(wc, send.solicited, now);
        Some(Delivery::of(self.cqn, send.qpn, pushed))
    }
}

/// A receive that a message is being placed in. It becomes the oldest again if it is dropped, also while a panic of its memory unwinds.
struct TakenReceive<'a>(&'a ReceiveQueue, Option<RecvRequest>);

impl TakenReceive<'_> {
    #[inline]
    fn from(queue: &ReceiveQueue) -> Option<TakenReceive<'_>> {
        let receive = queue.take_uncounted()?;
        Some(TakenReceive(queue, Some(receive)))
    }

    #[inline]
    fn get(&self) -> Option<&RecvRequest> {
        self.1.as_ref()
    }

    #[inline]
    fn consume(mut self) -> Option<RecvRequest> {
        self.1.take()
    }
}

impl Drop for TakenReceive<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(receive) = self.1.take() {
            self.0.put_back(receive);
        }
    }
}

/// Headers of a SEND that one packet holds.
struct Send {
    qpn: Qpn,
    psn: Psn,
    /// Number of packets that it stands for.
    packets: u32,
    /// Bytes of the headers, and of the pad and the ICRC that no ring carries.
    heads: usize,
    tail: usize,
    imm: Option<u32>,
    solicited: bool,
}

impl Send {
    /// Parses the headers of a record of `len` bytes. Returns `None` for any other packet, and for one that no sender of ours builds.
    #[inline]
    fn parse(head: &[u8], len: usize) -> Option<Send> {
        let (bth, rest) = head.split_first_chunk::<{ Bth::LEN }>()?;
        let (heads, imm) = match bth[0] {
            SEND_ONLY => (Bth::LEN, None),
            SEND_ONLY_IMM => (Bth::LEN + 4, Some(u32::from_be_bytes(*rest.first_chunk()?))),
            _ => return None,
        };
        let word = |at: usize| u32::from_be_bytes([bth[at], bth[at + 1], bth[at + 2], bth[at + 3]]);
        let pad = (4 - (len - heads) % 4) % 4;
        // Version, pad, P_Key, and reserved bits as our senders have them; the device looks at any other packet.
        let is_plain =
            word(0) & 0x003f_ffff == (pad as u32) << 20 | 0xffff && bth[4] == 0 && !carried::is_in(bth);
        is_plain.then(|| Send {
            qpn: Qpn::new(word(4)),
            psn: Psn::new(word(8) & 0xff_ffff),
            packets: coalesced::count(bth),
            heads,
            tail: pad + ICRC_LEN,
            imm,
            solicited: bth[1] & 0x80 != 0,
        })
    }
}

/// Places the payload of a record, which begins at an offset in it, into a receive: from `payload` if that has all of it. Fails with the key
/// that the lane does not know, if that is the reason. Bytes may be in place then.
#[inline]
fn place(
    keys: &mut [OwnKey],
    receive: &RecvRequest,
    (record, at, len): (&dyn RingBytes, usize, usize),
    payload: Option<&[u8]>,
) -> Result<(), Option<u32>> {
    if receive.sges.bytes() < len as u64 {
        return Err(None);
    }
    let mut done = 0;
    for (sge, skip, n) in pieces(&receive.sges, 0, len) {
        let key = find_recent(keys, |key| key.lkey == sge.lkey).ok_or(Some(sge.lkey))?;
        let begin = key.view().offset_of(sge.addr, sge.length.into()).ok_or(None)?;
        if !key.access.contains(Access::LOCAL_WRITE) {
            return Err(None);
        }
        let begin = begin + skip;
        let placed = match payload {
            Some(payload) => key
                .memory
                .write_in_any_order(begin, &payload[done..done + n])
                .is_ok(),
            None => record.read_to(at + done, &*key.memory, begin, n).is_ok(),
        };
        if !placed {
            return Err(None);
        }
        done += n;
    }
    Ok(())
}
