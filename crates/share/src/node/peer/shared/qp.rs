//! One end of a shared queue pair.

use std::cell::Cell;
use std::sync::Arc;

use rdmux_key::random_nonce;
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, Extensions, Fault, Memory, MemoryRegion, ModifyError, Path, PathMtu, PostError,
    ProtectionDomain, Psn, QpAttributes, QpOptions, QpState, QueuePair, RecvRequest, Remains,
};
use rdmux_wire::node::mux::SLOT_LEN;
use rdmux_wire::node::peer::SharedEnd;

use crate::node::peer::SharedBy;

/// Messages that a shared queue pair can receive before it has to take one.
pub(crate) const SLOTS: u16 = 64;
/// Requests that the send queue of a shared queue pair holds.
pub(crate) const SENDS: u32 = 1024;
/// READs, atomics and FLUSHes that a shared queue pair answers at a time.
const RD_ATOMIC: u8 = 16;
/// Marks the work request ids of receives. The other bits are the slot.
pub(crate) const RECEIVE: u64 = 1 << 63;

/// Local ACK timeout code, as connections have it that CM has made: 67 ms.
const ACK_TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;
const MIN_RNR_TIMER: u8 = 12;

/// One end of a shared queue pair.
// The queue pair ends before the memory that it receives into.
#[derive(Debug)]
pub(crate) struct SharedQp {
    qp: QueuePair,
    mr: MemoryRegion,
    memory: Arc<AnonymousMemory>,
    by: SharedBy,
    psn: Psn,
    far: Option<SharedEnd>,
    /// Slots that wait for a message.
    slots_out: Cell<u16>,
}

impl SharedQp {
    /// Makes an end that receives once it is brought up.
    pub(super) fn new(pd: &ProtectionDomain, cq: &CompletionQueue, by: &SharedBy) -> Option<SharedQp> {
        let options = QpOptions {
            max_send_wr: SENDS,
            max_recv_wr: SLOTS.into(),
            ..QpOptions::new(cq)
        };
        let qp = pd.create_qp(&options).ok()?;
        let memory = Arc::new(AnonymousMemory::new(usize::from(SLOTS) * SLOT_LEN).ok()?);
        let mr = pd.reg_mr_all(memory.clone(), 0, Access::LOCAL_WRITE).ok()?;
        let nonce = random_nonce().ok()?;
        let init = QpAttributes {
            access: Some(
                Access::LOCAL_WRITE
                    | Access::REMOTE_WRITE
                    | Access::REMOTE_READ
                    | Access::REMOTE_ATOMIC
                    | Access::FLUSH_GLOBAL
                    | Access::FLUSH_PERSISTENT,
            ),
            ..QpAttributes::default()
        };
        qp.modify(QpState::Init, &init).ok()?;
        let shared = SharedQp {
            qp,
            mr,
            memory,
            by: by.clone(),
            psn: Psn::new(u32::from_be_bytes([0, nonce[0], nonce[1], nonce[2]])),
            far: None,
            slots_out: Cell::new(0),
        };
        for slot in 0..SLOTS {
            shared.post_slot(slot).ok()?;
        }
        Some(shared)
    }

    /// Returns what the peer has to know. `mtu`: of the path to it.
    pub(super) fn end(&self, path_mtu: PathMtu) -> SharedEnd {
        SharedEnd {
            qpn: self.qp.qpn(),
            psn: self.psn,
            slots: SLOTS,
            rd_atomic: RD_ATOMIC,
            path_mtu,
        }
    }

    /// Brings the queue pair up towards the peer's end. `extensions`: those of the peer's device.
    pub(super) fn bring_up(
        &mut self,
        mine: PathMtu,
        far: SharedEnd,
        extensions: Option<Extensions>,
    ) -> Result<(), ModifyError> {
        let device = self.qp.pd().device();
        let path = Path {
            src: device.address(),
            dst: self.by.peer.address,
            src_port: device.source_port(far.qpn).unwrap_or(0xc000),
            traffic_class: self.by.class,
        };
        let receive = QpAttributes {
            path: Some(path),
            path_mtu: Some(mine.min(far.path_mtu).bytes()),
            dest_qpn: Some(far.qpn),
            rq_psn: Some(far.psn),
            max_dest_rd_atomic: Some(RD_ATOMIC),
            min_rnr_timer: Some(MIN_RNR_TIMER),
            ..QpAttributes::default()
        };
        // Both devices know of each other, by the control connection, what they can do beyond the specification.
        let receive = match extensions {
            Some(extensions) => QpAttributes {
                window_bytes: Some(1 << extensions.receive_window_log2.min(30)),
                peer_is_rdmux: Some(true),
                selective: Some(extensions.selective),
                carried_acks: Some(extensions.carried_acks),
                ..receive
            },
            None => receive,
        };
        self.qp.modify(QpState::Rtr, &receive)?;
        let send = QpAttributes {
            sq_psn: Some(self.psn),
            timeout: Some(ACK_TIMEOUT),
            retry_count: Some(RETRIES),
            rnr_retry: Some(7),
            max_rd_atomic: Some(far.rd_atomic.min(RD_ATOMIC)),
            ..QpAttributes::default()
        };
        self.qp.modify(QpState::Rts, &send)?;
        self.far = Some(far);
        Ok(())
    }

    /// Returns the queue pair.
    pub(crate) fn qp(&self) -> &QueuePair {
        &self.qp
    }

    /// Returns who uses it.
    pub(crate) fn by(&self) -> &SharedBy {
        &self.by
    }

    /// Returns the number of messages that the peer can receive before it tells that it has room again.
    pub(crate) fn slots_there(&self) -> u16 {
        self.far.map_or(0, |far| far.slots)
    }

    /// Returns the number of READs, atomics and FLUSHes that may be in flight.
    pub(crate) fn rd_atomic(&self) -> u8 {
        self.far.map_or(0, |far| far.rd_atomic.min(RD_ATOMIC))
    }

    /// Reads bytes that a slot has received, from an offset on.
    pub(crate) fn read_slot(&self, slot: u16, at: usize, into: &mut [u8]) -> Result<(), Fault> {
        let start = usize::from(slot) * SLOT_LEN + at;
        self.memory.read(start as u64, into)
    }

    /// Has a slot receive the next message. Its completion has the work request id [`RECEIVE`] with the slot, and is to be followed by
    /// [`SharedQp::slot_came`].
    pub(crate) fn post_slot(&self, slot: u16) -> Result<(), PostError> {
        let at = usize::from(slot) * SLOT_LEN;
        self.qp.post_recv(RecvRequest {
            wr_id: RECEIVE | u64::from(slot),
            sges: self.mr.sge(at as u64, SLOT_LEN as u32).into(),
        })?;
        self.slots_out.set(self.slots_out.get() + 1);
        Ok(())
    }

    /// Takes note of the completion of a slot, with a message or flushed.
    pub(crate) fn slot_came(&self) {
        self.slots_out.set(self.slots_out.get().saturating_sub(1));
    }

    /// Returns the number of slots whose completion has not come.
    pub(crate) fn slots_out(&self) -> u16 {
        self.slots_out.get()
    }

    /// Puts the queue pair in error, so that all completions come.
    pub(super) fn stop(&self) {
        // It is in error already if this is refused.
        let _ = self.qp.modify(QpState::Error, &QpAttributes::default());
    }

    /// Takes what is left of the queue pair in error.
    pub(super) fn take_remains(&self) -> Option<Remains> {
        self.qp.take_remains()
    }
}
