//! The device: objects, packets in, packets out, timers.

mod inspect;

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use rand_chacha::ChaCha12Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_wire::roce::cnp::Cnp;
use rdmux_wire::roce::coalesced;
use rdmux_wire::roce::icrc::{Flow, IdBasis};
use rdmux_wire::roce::{Bth, Deth, GSI_QKEY, ICRC_LEN, Opcode, Operation as Op, Packet, Transport, UDP_PORT};
use rdmux_wire::{LKey, Psn, Qpn, RKey};

use crate::access::{AccessId, AccessJob, Accessed, Accesses};
use crate::backlog::Backlog;
use crate::cm::Cm;
use crate::counters::Counters;
use crate::cq::{Arm, ArmedQueues, CompletionQueue, Cqn, Pushed, Status, WorkCompletion};
use crate::dcqcn::Parameters;
use crate::faults::{Line, Spec, Stream};
use crate::flush::{FlushId, FlushJob, Flushes};
use crate::histogram::Latencies;
use crate::lane::{Delivery, DirectLane, Lanes};
use crate::local::{NAMED_BYTES_MAX, NoRings, Rings};
use crate::mcast::{Groups, McastError};
use crate::memory::Memory;
use crate::probes::word24;
use crate::qp::remains::Remains;
use crate::qp::requester::direct::reaches;
use crate::qp::{Cause, Env, Event, ModifyError, Qp, QpAttributes, QpInit, QpState, QpType, Wants, earlier};
use crate::queue::{Place, ReceiveQueue, SendQueue};
use crate::region::{NumberMap, Pd, RegionSpec, Regions, RegisterError, WindowType};
use crate::retired::RetiredMemories;
use crate::sched::{CLASSES, Policy, QUANTUM_BYTES, Scheduler};
use crate::srq::{SharedReceiveQueue, SrqError, SrqInfo, SrqInit, Srqn, Xrcd};
use crate::time::Time;
use crate::trace::{Note, Tracer};
use crate::transmit::{ECN_MARKED, Path, TransmitBuf};
use crate::work::{Bind, Operation, PostError, RecvRequest, SendFlags, SendRequest, SgeList, Target};

pub use self::inspect::{
    CmDetail, CqDetail, Paged, PdDetail, QpDetail, RegionDetail, SRQ_QPS_MAX, SrqDetail,
};

/// IPv4 identification of segment 127 of a train: rdmux peers number segments from 0 and send no longer trains.
const RDMUX_IP_ID_MAX: u16 = 127;
/// Longest packet: BTH, the longest extension headers, 4,096 bytes of payload, pad, ICRC; rounded up.
const PACKET_BYTES_MAX: usize = 4_096 + 128;
/// Like it, for packets that come through memory of this host.
const LOCAL_BYTES_MAX: usize = NAMED_BYTES_MAX + 128;
/// Bytes at the beginning of a record that are read at once. The headers are shorter.
pub(crate) const RECORD_READ_BYTES: usize = 128;
/// Most pad bytes of a packet.
const PAD_MAX: usize = 3;

/// Maximum number of QPs of a device. The device chooses 16 bits of a QPN; half of these numbers stay free, so that a number stays
/// unused for a while after its QP was destroyed.
pub const QPS_MAX: usize = 1 << 15;
/// Maximum number of shared receive queues of a device.
pub const SRQS_MAX: usize = 1 << 15;
/// Random numbers tried for a QPN. At least half of all numbers belong to no QP, and connections whose QPs were destroyed hold few
/// of those.
const QPN_TRIES: u32 = 1_000;
/// Numbers of destroyed QPs that no new one gets.
const ENDED_QPNS: usize = 1_024;

/// Traffic class of congestion notifications: DSCP 48 (CS6).
const CNP_TRAFFIC_CLASS: u8 = 48 << 2;

/// Parameters of a new device.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Address of the device, which is its GID.
    pub address: IpAddr,
    /// Top byte of every QPN and of every CM communication id: processes that share an address use different top bytes.
    pub slot: u8,
    /// Seed of keys, QPNs, PSNs and communication ids. They are as unpredictable as this seed.
    pub seed: [u8; 32],
    /// GUID of the channel adapter in CM messages: a random one for each opening. QPNs and communication ids are unique within one
    /// opening of one process only. The peer takes a message with a known GUID and number for one of the same connection (a
    /// repeated REQ) or for its end (12.9.8.3.1, a stale connection). With a GUID that outlives the numbers, a chance match would
    /// end a connection of another process.
    pub guid: u64,
    /// UDP source port of packets to other general services QPs.
    pub gsi_src_port: u16,
    /// Bytes in flight per connection that this end can receive; rdmux announces it to rdmux peers.
    pub receive_window_bytes: u32,
    /// Scheduling and congestion control of the device's QPs.
    pub traffic: Traffic,
    /// Bytes of payload that a packet on the device's link carries: the longest message of UD. 256, 512, 1024, 2048 or 4096.
    pub mtu: u32,
}

/// Scheduling and congestion control of a device's QPs.
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    /// Transmission selection of each traffic class. A QP's class is that of its [`Path::traffic_class`].
    pub classes: [Policy; CLASSES],
    /// Congestion control of connections to other hosts; `None` switches it off.
    pub congestion: Option<Parameters>,
    /// True to apply congestion control to connections within this host too. Nothing marks their packets unless it is configured
    /// to.
    pub congestion_on_loopback: bool,
}

impl Default for Traffic {
    fn default() -> Traffic {
        Traffic {
            classes: Default::default(),
            congestion: Some(Parameters::default()),
            congestion_on_loopback: false,
        }
    }
}

/// Progress of a peer on this host in taking packets from the link to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkProgress {
    /// A number that changes whenever the peer takes a packet.
    pub taken: u32,
    /// True when the peer has taken all packets sent to it, and this end has taken all packets that the peer sent.
    pub all: bool,
}

/// Returns the progress of the link to a peer, given the peer's address and QPN; `None` when the way to the peer may lose packets.
pub type Links<'a> = dyn Fn(IpAddr, Qpn) -> Option<LinkProgress> + 'a;

/// A datagram that arrived on UDP port 4791: one packet, or several that the system received as one.
#[derive(Clone, Copy, Debug)]
pub struct Arrival<'a> {
    /// The sender's address.
    pub src: IpAddr,
    /// The sender's UDP port.
    pub src_port: u16,
    /// The destination address: the device's own, or that of a multicast group.
    pub dst: IpAddr,
    /// IPv4 TOS or IPv6 traffic class.
    pub traffic_class: u8,
    /// The UDP payloads, one after the other.
    pub bytes: &'a [u8],
    /// Bytes of each payload; the last one may be shorter.
    pub segment_bytes: usize,
    /// True when the datagram came through memory of this host: nothing can have changed it on its way, and the device does not
    /// check its ICRC.
    pub local: bool,
}

impl Arrival<'_> {
    /// Returns the addresses and ports that the ICRC covers.
    pub(crate) fn flow(&self) -> Flow {
        Flow {
            src: self.src,
            dst: self.dst,
            src_port: self.src_port,
            dst_port: UDP_PORT,
        }
    }
}

/// Attributes and fill levels of a QP.
#[derive(Clone, Copy, Debug)]
pub struct QpInfo {
    /// Transport service.
    pub qp_type: QpType,
    /// State.
    pub state: QpState,
    /// The peer's QPN.
    pub dest_qpn: Qpn,
    /// Addresses; `None` until they are set.
    pub path: Option<Path>,
    /// Path MTU in bytes.
    pub path_mtu: u32,
    /// UD: the Q_Key that incoming datagrams must carry.
    pub qkey: u32,
    /// Send requests that are posted and not complete.
    pub send_outstanding: usize,
    /// Receive requests that are posted and not used up.
    pub recv_posted: usize,
}

/// An RDMA device.
///
/// # Calling contract
/// - *Verbs* (`alloc_pd` ... `post_recv`, `poll_cq`, and the methods of [`Rnic::cm`]) may be called at any time.
/// - *Input*: [`Rnic::handle_datagram`] for datagrams that arrive on UDP port 4791, [`Rnic::handle_timeout`] when the time that
///   [`Rnic::poll_timeout`] returned has come, [`Rnic::handle_flush`] when a flush job is done, [`Rnic::handle_access`] when an
///   access is. Input may be given in any order; `now` never runs backwards.
/// - After verbs or input, poll until nothing is left, in any order: [`Rnic::poll_transmit`] for packets, [`Rnic::poll_flush`] for
///   flushes and [`Rnic::poll_access`] for accesses to carry out, [`Rnic::poll_event`] for events to pass to the application,
///   [`Rnic::poll_ended_memories`] for memories to drop, and `cm().poll_event()`. [`Rnic::poll_timeout`] comes last, since all others
///   change it.
///
/// Datagrams that `poll_transmit` returned may be lost, duplicated, delayed or sent twice: the protocol recovers from that.
#[derive(Debug)]
pub struct Rnic {
    config: Config,
    rng: ChaCha12Rng,
    regions: Regions,
    cqs: NumberMap<CompletionQueue>,
    next_cqn: u32,
    armed_queues: ArmedQueues,
    srqs: NumberMap<SharedReceiveQueue>,
    xrcds: Vec<bool>,
    qps: NumberMap<Qp>,
    /// Numbers of the QPs that were destroyed last, the oldest first. A late packet to one of them must find no other QP.
    ended: VecDeque<Qpn>,
    groups: Groups,
    /// QPs that have packets to send.
    ready: Scheduler<Qpn>,
    /// QPs that have only an acknowledgement to send. It may wait until a call of [`Rnic::poll_transmit`] asks for all.
    ack_ready: VecDeque<Qpn>,
    /// QPs with a pending congestion notification.
    cnps: VecDeque<Qpn>,
    /// Deadlines of QPs: at most one entry for each, the one that its head names.
    timers: BTreeSet<(Time, u32)>,
    /// Completion queues with moderation, by the time at which the waiter is notified at the latest. An entry may be stale.
    moderated: BTreeSet<(Time, u32)>,
    /// Set when a completion queue needs the time of its completions.
    times_completions: bool,
    /// QPs that have not placed all bytes of the datagram being handled yet.
    gathering: Vec<Qpn>,
    flushes: Flushes,
    accesses: Accesses,
    events: VecDeque<Event>,
    /// Queues that overran during the current call, each with the QP whose completion was lost; `None`: only the QP's share of one did.
    overrun: Vec<(Option<Cqn>, Qpn)>,
    retired: RetiredMemories,
    lanes: Lanes,
    counters: Counters,
    latencies: Latencies,
    id_bases: Vec<Option<Box<IdBasis>>>,
    rxe_flush_basis: Option<Box<IdBasis>>,
    cm: Cm,
    gsi_psn: Psn,
    /// QPs whose peers' grants the driver has to revoke.
    revoked: Vec<Qpn>,
    rnr_faults: Option<Line>,
    tracer: Option<Box<dyn Tracer>>,
}

/// Borrows the parts of a device that a QP needs, field by field, so that the device's QPs stay free to borrow.
macro_rules! env_of {
    ($device:expr, $now:expr) => {
        Env {
            regions: &mut $device.regions,
            srqs: &mut $device.srqs,
            cqs: &mut $device.cqs,
            events: &mut $device.events,
            flushes: &mut $device.flushes,
            accesses: &mut $device.accesses,
            counters: &mut $device.counters,
            latencies: &mut $device.latencies,
            overrun: &mut $device.overrun,
            traffic: &$device.config.traffic,
            rnr_faults: &mut $device.rnr_faults,
            tracer: &mut $device.tracer,
            moderated: &mut $device.moderated,
            now: $now,
        }
    };
}

// Behind the macro, which it uses.
mod cqs;
mod host;

impl Rnic {
    /// Creates a device without objects.
    pub fn new(config: Config) -> Rnic {
        let mut rng = ChaCha12Rng::from_seed(config.seed);
        let cm = Cm::new(&config, ChaCha12Rng::from_rng(&mut rng));
        let gsi_psn = Psn::new(rng.next_u32());
        let retired = RetiredMemories::default();
        Rnic {
            config,
            rng,
            regions: Regions::new(retired.clone()),
            cqs: NumberMap::default(),
            next_cqn: 0,
            armed_queues: ArmedQueues::default(),
            srqs: NumberMap::default(),
            xrcds: Vec::new(),
            qps: NumberMap::default(),
            ended: VecDeque::new(),
            groups: Groups::default(),
            ready: Scheduler::new(config.traffic.classes),
            ack_ready: VecDeque::new(),
            cnps: VecDeque::new(),
            timers: BTreeSet::new(),
            moderated: BTreeSet::new(),
            times_completions: false,
            gathering: Vec::new(),
            flushes: Flushes::new(retired.clone()),
            accesses: Accesses::new(retired.clone()),
            events: VecDeque::new(),
            overrun: Vec::new(),
            retired,
            lanes: Lanes::default(),
            counters: Counters::default(),
            latencies: Latencies::default(),
            id_bases: vec![None; PACKET_BYTES_MAX],
            rxe_flush_basis: None,
            cm,
            gsi_psn,
            revoked: Vec::new(),
            rnr_faults: None,
            tracer: None,
        }
    }

    // Objects.

    /// Creates a protection domain. IBTA Vol 1, 11.2.1.5.
    pub fn alloc_pd(&mut self) -> Pd {
        self.regions.alloc_pd()
    }

    /// Destroys a protection domain and every region in it. Its QPs must have been destroyed. Returns the regions' memories: the
    /// caller drops them where the code that this runs does no harm.
    pub fn dealloc_pd(&mut self, pd: Pd) -> Vec<Arc<dyn Memory>> {
        self.regions.dealloc_pd(pd)
    }

    /// Registers memory. IBTA Vol 1, 11.2.8.2.
    pub fn reg_mr(&mut self, pd: Pd, spec: RegionSpec) -> Result<(LKey, RKey), RegisterError> {
        self.regions.register(&mut self.rng, pd, spec)
    }

    /// Creates a region without memory, for up to `length_max` bytes: work requests register memory in it and invalidate the
    /// registration. IBTA Vol 1, 11.2.8.1.
    pub fn alloc_mr(&mut self, pd: Pd, length_max: u64) -> Result<(LKey, RKey), RegisterError> {
        self.regions.alloc_region(&mut self.rng, pd, length_max)
    }

    /// Changes memory, rights or protection domain of a region that no windows are bound to; its keys stay. Returns the memory that
    /// it had. After an error the region is as it was. IBTA Vol 1, 11.2.8.5.
    pub fn rereg_mr(
        &mut self,
        lkey: LKey,
        pd: Option<Pd>,
        change: impl FnOnce(&mut RegionSpec),
    ) -> Result<Arc<dyn Memory>, RegisterError> {
        self.regions.reregister(lkey, pd, change)
    }

    /// Deregisters a region that no windows are bound to: once this returns, nothing reaches the memory through it. Returns the
    /// memory, if the region had any: the caller drops it where the code that this runs does no harm.
    pub fn dereg_mr(&mut self, lkey: LKey) -> Result<Option<Arc<dyn Memory>>, RegisterError> {
        self.regions.deregister(lkey)
    }

    /// Returns whether windows are bound to a region, which makes [`Rnic::dereg_mr`] fail.
    pub fn has_mws(&self, lkey: LKey) -> bool {
        self.regions.has_windows(lkey)
    }

    /// Unbinds all windows of a region, as if the owner of each had unbound it: for a region's owner who cannot wait for that.
    pub fn unbind_mws(&mut self, lkey: LKey) {
        self.regions.unbind_all(lkey);
    }

    /// Creates a memory window. IBTA Vol 1, 11.2.8.9.
    pub fn alloc_mw(&mut self, pd: Pd, window_type: WindowType) -> Result<RKey, RegisterError> {
        self.regions.alloc_window(&mut self.rng, pd, window_type)
    }

    /// Destroys a memory window, bound or not, named by any key that it ever had. Returns false if there is no such window.
    pub fn dealloc_mw(&mut self, window: RKey) -> bool {
        self.regions.dealloc_window(window)
    }

    /// Posts the binding of a type 1 window and returns its new key, by which peers reach it once the request has completed.
    /// `bind.window` is the window's previous key, whether or not the binding that assigned it has completed. IBTA Vol 1,
    /// 11.2.8.11.
    pub fn bind_mw(
        &mut self,
        now: Time,
        qpn: Qpn,
        wr_id: u64,
        bind: Bind,
        flags: SendFlags,
    ) -> Result<RKey, PostError> {
        let window = self
            .regions
            .next_window_key(bind.window)
            .ok_or(PostError::Invalid)?;
        let request = SendRequest {
            wr_id,
            operation: Operation::Bind(Bind { window, ..bind }),
            sges: SgeList::EMPTY,
            flags,
            to: Target::Connected,
        };
        self.post_send(now, qpn, request)?;
        self.regions.keep_window_key(window);
        Ok(window)
    }

    /// Creates an XRC domain. IBTA Vol 1, A14.
    pub fn alloc_xrcd(&mut self) -> Xrcd {
        let free = self.xrcds.iter().position(|used| !used).unwrap_or_else(|| {
            self.xrcds.push(false);
            self.xrcds.len() - 1
        });
        self.xrcds[free] = true;
        Xrcd(free as u32)
    }

    /// Destroys an XRC domain. Its queues and QPs must have been destroyed.
    pub fn dealloc_xrcd(&mut self, xrcd: Xrcd) {
        if let Some(used) = self.xrcds.get_mut(xrcd.0 as usize) {
            *used = false;
        }
    }

    fn has_xrcd(&self, xrcd: Xrcd) -> bool {
        self.xrcds.get(xrcd.0 as usize).copied().unwrap_or(false)
    }

    /// Creates a shared receive queue. Returns `None` when the PD, the XRC domain or its CQ does not exist, or when there are
    /// [`SRQS_MAX`] such queues already. IBTA Vol 1, 11.2.9.1.
    pub fn create_srq(&mut self, init: SrqInit) -> Option<Srqn> {
        let xrc_is_there = |(xrcd, cq): (Xrcd, Cqn)| self.has_xrcd(xrcd) && self.cqs.contains_key(&cq.0);
        let is_full = self.srqs.len() >= SRQS_MAX;
        if is_full || !self.regions.has_pd(init.pd) || !init.xrc.is_none_or(xrc_is_there) {
            return None;
        }
        let srqn = loop {
            let srqn = self.new_number();
            if srqn != 0 && !self.srqs.contains_key(&srqn) {
                break srqn;
            }
        };
        self.srqs.insert(srqn, SharedReceiveQueue::new(init));
        Some(Srqn(srqn))
    }

    /// Resizes a shared receive queue, or arms its limit (0 disarms). IBTA Vol 1, 11.2.9.3.
    pub fn modify_srq(
        &mut self,
        srqn: Srqn,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), SrqError> {
        let srq = self.srqs.get_mut(&srqn.0).ok_or(SrqError::NoSrq)?;
        srq.modify(max_wr, limit)
    }

    /// Returns the attributes of a shared receive queue.
    pub fn query_srq(&self, srqn: Srqn) -> Option<SrqInfo> {
        Some(self.srqs.get(&srqn.0)?.info())
    }

    /// Destroys a shared receive queue that no QP uses; its receives do not complete. IBTA Vol 1, 11.2.9.5.
    pub fn destroy_srq(&mut self, srqn: Srqn) -> Result<(), SrqError> {
        if self.qps.values().any(|qp| qp.head.init.srq == Some(srqn)) {
            return Err(SrqError::Busy);
        }
        let srq = self.srqs.remove(&srqn.0).ok_or(SrqError::NoSrq)?;
        srq.queue.close();
        Ok(())
    }

    /// Posts a receive request to a shared receive queue. IBTA Vol 1, 11.4.1.3.
    pub fn post_srq_recv(&mut self, srqn: Srqn, request: RecvRequest) -> Result<(), PostError> {
        let srq = self.srqs.get_mut(&srqn.0).ok_or(PostError::NoSrq)?;
        srq.post(request)
    }

    /// Returns a number of 24 bits: the slot, and 16 random bits.
    fn new_number(&mut self) -> u32 {
        if mutant!(NumbersBeginAgain) {
            let taken = self.qps.len() + self.srqs.len() + 16;
            return u32::from(self.config.slot) << 16 | taken as u32;
        }
        u32::from(self.config.slot) << 16 | self.rng.next_u32() & 0xffff
    }

    /// Creates a QP. Returns `None` when the PD, a CQ, the shared receive queue or the XRC domain does not exist or does not match
    /// the transport service, or when there are [`QPS_MAX`] QPs already. IBTA Vol 1, 11.2.4.1.
    pub fn create_qp(&mut self, init: QpInit) -> Option<Qpn> {
        let cqs = [init.send_cq, init.recv_cq];
        if !self.regions.has_pd(init.pd)
            || cqs.iter().any(|cq| !self.cqs.contains_key(&cq.0))
            || !self.receives_from_exist(&init)
            || self.qps.len() >= QPS_MAX
        {
            return None;
        }
        let qpn = (0..QPN_TRIES).find_map(|_| {
            let qpn = Qpn::new(self.new_number());
            let taken =
                self.qps.contains_key(&qpn.value()) || self.cm.has_qpn(qpn) || self.ended.contains(&qpn);
            (qpn.value() > 1 && !taken).then_some(qpn)
        })?;
        let mut qp = Qp::new(qpn, init, self.config.mtu);
        qp.head.incarnation = self.rng.next_u32();
        self.qps.insert(qpn.value(), qp);
        Some(qpn)
    }

    /// Returns whether the source of a QP's receives exists and matches the QP's transport service.
    fn receives_from_exist(&self, init: &QpInit) -> bool {
        let srq_fits = init.srq.is_none_or(|srqn| {
            let srq = self.srqs.get(&srqn.0);
            srq.is_some_and(|srq| srq.init.xrc.is_none())
        });
        match init.qp_type {
            QpType::Rc | QpType::Uc | QpType::Ud => srq_fits && init.xrcd.is_none(),
            QpType::XrcSend => init.srq.is_none() && init.xrcd.is_none(),
            QpType::XrcRecv => init.srq.is_none() && init.xrcd.is_some_and(|xrcd| self.has_xrcd(xrcd)),
        }
    }

    /// Repeats the last acknowledgement of a QP that its owner, not an error, is about to end: the next [`Rnic::poll_transmit`]
    /// with `all` sends it again. If the first one was lost, the peer would repeat its request, and nobody would answer. A
    /// requester ignores an acknowledgement that it knows. IBTA Vol 1, 9.7.5.1.
    pub fn repeat_last_ack(&mut self, now: Time, qpn: Qpn) {
        self.with_qp(now, qpn, |qp, _| qp.repeat_last());
    }

    /// Destroys a QP; its requests do not complete. Type 2 windows that were bound through it are unbound.
    pub fn destroy_qp(&mut self, qpn: Qpn) {
        if let Some(mut qp) = self.qps.remove(&qpn.value()) {
            qp.recall(|| Time(0));
            if let Some(requester) = qp.requester() {
                requester.end_lane(&mut self.regions);
            }
            self.lanes.remove(qpn);
            count_lane(&mut self.counters, &qp);
            if qp.head.granted && !mutant!(GrantOutlivesQp) {
                self.revoked.push(qpn);
            }
            self.flushes.forget(qpn);
            self.accesses.forget(qpn);
            self.groups.forget(qpn);
            self.regions.forget_qp(qpn);
            if qp.head.listed {
                self.ready.forget(qpn);
            }
            if let Some(at) = qp.head.timer {
                self.timers.remove(&(at, qpn.value()));
            }
            if self.ended.len() == ENDED_QPNS {
                self.ended.pop_front();
            }
            self.ended.push_back(qpn);
        }
    }

    /// Changes attributes and state of a QP. IBTA Vol 1, 11.2.4.2.
    pub fn modify_qp(
        &mut self,
        now: Time,
        qpn: Qpn,
        to: QpState,
        attr: &QpAttributes,
    ) -> Result<(), ModifyError> {
        let result = self.with_qp(now, qpn, |qp, env| qp.modify(env, to, attr));
        result.unwrap_or(Err(ModifyError::NoQp))
    }

    /// Moves a QP to Reset for good: it exists and keeps its number until it is destroyed, but [`Rnic::modify_qp`] fails with
    /// [`ModifyError::NoQp`]. So code that still knows it, such as a connection establishment in progress, cannot bring it up.
    pub fn retire_qp(&mut self, now: Time, qpn: Qpn) {
        self.with_qp(now, qpn, |qp, env| qp.retire(env));
    }

    /// Attaches a UD QP to a multicast group: it receives packets to the group's address too. IBTA Vol 1, 11.3.1.
    pub fn attach_mcast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), McastError> {
        let group = group.to_canonical();
        let qp = self.qps.get(&qpn.value()).ok_or(McastError::NoQp)?;
        if qp.head.init.qp_type != QpType::Ud {
            return Err(McastError::NotUd);
        }
        if !group.is_multicast() || group.is_ipv4() != self.config.address.is_ipv4() {
            return Err(McastError::BadAddress);
        }
        self.groups.attach(group, qpn)
    }

    /// Detaches a QP from a multicast group. IBTA Vol 1, 11.3.2.
    pub fn detach_mcast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), McastError> {
        self.groups.detach(group.to_canonical(), qpn)
    }

    /// Returns whether a QP is attached to a multicast group: the driver then passes in datagrams to the group.
    pub fn has_mcast_group(&self, group: IpAddr) -> bool {
        !self.groups.attached(group.to_canonical()).is_empty()
    }

    /// Returns the attributes and fill levels of a QP.
    pub fn query_qp(&self, qpn: Qpn) -> Option<QpInfo> {
        let qp = self.qps.get(&qpn.value())?;
        Some(QpInfo {
            qp_type: qp.head.init.qp_type,
            state: qp.head.state,
            dest_qpn: qp.head.dest_qpn,
            path: qp.head.path,
            path_mtu: qp.head.mtu,
            qkey: qp.head.qkey,
            send_outstanding: qp.send_outstanding(),
            recv_posted: qp.recv_posted(),
        })
    }

    /// Returns a random number from the device's own generator, for a starting PSN and the like.
    pub fn random(&mut self) -> u32 {
        self.rng.next_u32()
    }

    /// Returns the counters.
    pub fn counters(&self) -> Counters {
        let mut counters = self.counters;
        for qp in self.qps.values() {
            count_lane(&mut counters, qp);
        }
        for queue in self.cqs.values() {
            cqs::count_queue(&mut counters, queue);
        }
        counters
    }

    /// Returns the latencies of requests.
    pub fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    /// Returns the parameters that the device was created with.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the amount of state that the device keeps because of its peers.
    pub fn backlog(&self) -> Backlog {
        let mut backlog = self.cm.backlog();
        for qp in self.qps.values() {
            qp.add_backlog(&mut backlog);
        }
        backlog
    }

    /// Returns the numbers of all QPs, in no order.
    pub fn qpns(&self) -> impl Iterator<Item = Qpn> {
        self.qps.values().map(|qp| qp.head.qpn)
    }

    /// Returns the numbers of QPs, regions and completion queues.
    pub fn object_counts(&self) -> (usize, usize, usize) {
        (self.qps.len(), self.regions.len(), self.cqs.len())
    }

    // Work.

    /// Posts a send request. IBTA Vol 1, 11.4.1.1.
    pub fn post_send(&mut self, now: Time, qpn: Qpn, request: SendRequest) -> Result<(), PostError> {
        // If the request is refused or completes at once, its memory is retired here.
        let _memory = self.retired.hold(&request.operation);
        self.with_qp(now, qpn, |qp, env| qp.post_send(env, request, Place::Wanted))
            .unwrap_or(Err(PostError::NoQp))
    }

    /// Posts a send request whose place in the queue is reserved ([`SendQueue::reserve`]). If the QP does not take such a request
    /// any longer, the outcome is the same as if the request had been posted before the change of the QP.
    pub fn post_reserved(&mut self, now: Time, qpn: Qpn, request: SendRequest) {
        let _memory = self.retired.hold(&request.operation);
        let post = |qp: &mut Qp, env: &mut Env<'_>| {
            let begins = matches!(qp.head.state, QpState::Rts | QpState::Sqd);
            if begins && !qp.head.sends.takes(&request) {
                return qp.end_reserved(env, &request);
            }
            if qp.post_send(env, request, Place::Reserved).is_err() {
                // The QP is in Reset, which discards posted requests.
                qp.head.sends.give_back(1);
            }
        };
        self.with_qp(now, qpn, post);
        if let Some(qp) = self.qps.get(&qpn.value()) {
            qp.head.sends.has_seen();
        }
    }

    /// Returns the send queue of a QP, in which callers reserve places without locking the device.
    pub fn send_queue(&self, qpn: Qpn) -> Option<SendQueue> {
        Some(self.qps.get(&qpn.value())?.head.sends.clone())
    }

    /// Returns a QP's own receive queue, to which callers post without locking the device.
    pub fn receive_queue(&self, qpn: Qpn) -> Option<ReceiveQueue> {
        Some(self.qps.get(&qpn.value())?.head.receives.clone())
    }

    /// Returns the receives of a shared receive queue, to which callers post without locking the device.
    pub fn srq_receives(&self, srqn: Srqn) -> Option<ReceiveQueue> {
        Some(self.srqs.get(&srqn.0)?.queue.clone())
    }

    /// Returns the lane of an RC QP: callers post to it first, without locking the device.
    pub fn direct_lane(&mut self, qpn: Qpn) -> Option<DirectLane> {
        let lane = self.qps.get_mut(&qpn.value())?.lane(&self.cqs)?;
        self.lanes.insert(lane.clone());
        Some(lane)
    }

    /// Returns the lanes of all QPs, which stay up to date.
    pub fn lanes(&self) -> Lanes {
        self.lanes.clone()
    }

    /// Handles a completion that a lane has put into its queue ([`Directly::DoneAndTell`]).
    pub fn deliver(&mut self, now: Time, delivery: Delivery) {
        let Delivery { cqn, qpn, pushed } = delivery;
        env_of!(self, now).deliver(cqn, qpn, pushed);
        if !self.overrun.is_empty() {
            self.fail_overrun(now);
        }
    }

    /// Carries out a send request that needs no packets ([`Event::WantsGrant`]) if no request is queued before it. Returns false if
    /// the caller must post the request instead. Calls `now` only rarely.
    #[inline]
    pub fn post_directly(&mut self, now: impl Fn() -> Time, qpn: Qpn, request: &SendRequest) -> bool {
        let Some(qp) = self.qps.get_mut(&qpn.value()) else {
            return false;
        };
        if reaches(&request.operation, 1).is_none() {
            return false;
        }
        qp.recall(&now);
        if !qp
            .requester()
            .is_some_and(|requester| requester.may_go_directly())
        {
            return false;
        }
        let of_completion = if self.times_completions { now() } else { Time(0) };
        let mut env = env_of!(self, of_completion);
        let done = qp.post_directly(&mut env, request);
        if !self.overrun.is_empty() {
            self.fail_overrun(now());
        }
        done
    }

    /// Posts a send request as [`Rnic::post_send`] does, and builds its packets at once if no other QP has anything to send: then
    /// [`Rnic::poll_transmit`] would have no choice between QPs. If `buf` is not empty, no packet is built.
    pub fn post_send_into(
        &mut self,
        now: Time,
        qpn: Qpn,
        request: SendRequest,
        buf: &mut TransmitBuf,
        rings: &mut dyn Rings,
    ) -> Result<(), PostError> {
        let alone = buf.is_empty() && !self.has_urgent_transmit();
        let mut request = Some(request);
        if alone {
            self.post_by_ring(now, qpn, &mut request, rings);
        }
        let Some(request) = request else {
            return Ok(());
        };
        let _memory = self.retired.hold(&request.operation);
        let before = buf.bytes().len();
        let post = |qp: &mut Qp, env: &mut Env<'_>| {
            qp.post_send(env, request, Place::Wanted)?;
            if alone && qp.wants_transmit() {
                qp.transmit(env, buf, rings, QUANTUM_BYTES, false);
            }
            Ok(())
        };
        let posted = self.with_qp(now, qpn, post).unwrap_or(Err(PostError::NoQp));
        self.counters.sent_bytes += (buf.bytes().len() - before) as u64;
        posted
    }

    /// Posts a SEND and puts it into the ring to a peer on this host at once, if nothing is to be sent before it and one packet holds it. Takes
    /// `request` then; else the caller posts it in another way.
    #[inline]
    fn post_by_ring(
        &mut self,
        now: Time,
        qpn: Qpn,
        request: &mut Option<SendRequest>,
        rings: &mut dyn Rings,
    ) {
        let Some(qp) = self.qps.get_mut(&qpn.value()).filter(|qp| qp.head.local) else {
            return;
        };
        let mut env = env_of!(self, now);
        qp.recall(|| now);
        qp.post_by_ring(&mut env, request, rings);
        if request.is_none() {
            qp.lend_sends(&mut env, rings);
        }
        set_timer(qp, &mut self.timers);
    }

    /// Posts a receive request. IBTA Vol 1, 11.4.1.2.
    pub fn post_recv(&mut self, now: Time, qpn: Qpn, request: RecvRequest) -> Result<(), PostError> {
        self.with_qp(now, qpn, |qp, env| qp.post_recv(env, request))
            .unwrap_or(Err(PostError::NoQp))
    }

    /// Takes the oldest completion, also of a queue that overran. IBTA Vol 1, 11.4.2.1.
    pub fn poll_cq(&mut self, cq: Cqn) -> Option<WorkCompletion> {
        self.cqs.get(&cq.0)?.poll()
    }

    /// Asks for an [`Event::Completion`]. IBTA Vol 1, 11.4.2.2. A completion that is in the queue already causes none: poll after
    /// arming.
    pub fn arm_cq(&mut self, cq: Cqn, arm: Arm) {
        if let Some(queue) = self.cqs.get(&cq.0) {
            queue.arm(arm);
        }
    }

    /// Returns a completion queue, which callers poll and arm without locking the device.
    pub fn cq(&self, cq: Cqn) -> Option<CompletionQueue> {
        self.cqs.get(&cq.0).cloned()
    }

    /// Returns the number of completions in a queue, and whether the queue overran: then it receives no more.
    pub fn cq_state(&self, cq: Cqn) -> Option<(usize, bool)> {
        self.cqs.get(&cq.0).map(CompletionQueue::state)
    }

    /// Returns the connection manager. IBTA Vol 1, chapter 12.
    pub fn cm(&mut self) -> &mut Cm {
        &mut self.cm
    }

    /// Makes the device report the next first request of a QP as [`Event::FirstRequest`] instead of
    /// [`Event::CommunicationEstablished`]. To an end that has accepted a connection, this event means as much as the RTU, which
    /// may be late or lost. A reset of the QP cancels this. 12.9.6.
    pub fn tell_first_request(&mut self, qpn: Qpn) {
        if let Some(qp) = self.qps.get_mut(&qpn.value()) {
            qp.head.tells_first_request = true;
        }
    }

    /// Notes that the peer of an accepted connection has its QP in RTR: the RTU or a request came from it. The peer silently
    /// dropped packets that reached it earlier, so the requester sends them again at once, unless the peer has answered any. That
    /// uses up no retry.
    pub fn peer_is_ready(&mut self, now: Time, qpn: Qpn) {
        self.with_qp(now, qpn, |qp, env| {
            if let Some(requester) = qp.requester() {
                requester.peer_is_ready(env);
            }
        });
    }

    // Notes.

    /// Sets the tracer that receives notes from now on. Returns the previous tracer.
    pub fn set_tracer(&mut self, tracer: Option<Box<dyn Tracer>>) -> Option<Box<dyn Tracer>> {
        std::mem::replace(&mut self.tracer, tracer)
    }

    /// Passes a note of the driver to the tracer; QPN 0 stands for the device.
    pub fn note(&mut self, now: Time, qpn: Qpn, note: Note) {
        if let Some(tracer) = &mut self.tracer {
            tracer.note(now, qpn, &note);
        }
    }

    // Faults.

    /// Makes the device answer some requests that need a receive with an RNR NAK, as if there were none, at the rate of
    /// [`Spec::rnr`]. The driver injects the other faults.
    pub fn set_faults(&mut self, spec: &Spec) {
        let line = || Line::new(*spec, Stream::Receives);
        self.rnr_faults = (spec.rnr > 0.0).then(line);
    }

    /// Puts a QP in error, as if the device had failed: the asynchronous event is that of a local catastrophic error, IBTA Vol 1,
    /// 11.6.3.2.
    pub fn fail_qp(&mut self, now: Time, qpn: Qpn) {
        let fault = Some((Status::LocalQpOperation, Cause::Injected));
        self.with_qp(now, qpn, |qp, env| {
            if qp.head.state != QpState::Reset {
                qp.fail(env, fault);
            }
        });
    }

    /// Makes a QP keep what is left of it when it fails, until it is taken or the QP goes to Reset. Returns false for a QP that is in Error
    /// already, and for one that is not RC.
    pub fn keep_remains(&mut self, now: Time, qpn: Qpn) -> bool {
        self.with_qp(now, qpn, |qp, _| qp.keep_remains()) == Some(true)
    }

    /// Takes what is left of a QP in Error, once. Returns `None` if the QP does not keep it ([`Rnic::keep_remains`]), and if a medium was
    /// working for a request of its peer: then nobody knows whether that has been executed.
    pub fn take_remains(&mut self, now: Time, qpn: Qpn) -> Option<Remains> {
        self.with_qp(now, qpn, |qp, _| qp.take_remains())?
    }

    /// Advances the PSNs of a reliable QP as if it had sent and received requests of so many packets: in this way tests reach
    /// states that take a network millions of packets. The peer's QP must be advanced likewise. Returns false, and does nothing,
    /// while the QP has requests or responses pending, or for 2^23 PSNs and more.
    pub fn skip_psns(&mut self, now: Time, qpn: Qpn, sent: u32, received: u32) -> bool {
        let may = sent.max(received) < 1 << 23;
        may && self.with_qp(now, qpn, |qp, env| qp.skip_psns(env, sent, received)) == Some(true)
    }

    // Input.

    /// Handles a datagram that arrived on UDP port 4791 from `src`, sent to the device's own address in traffic class 0. The bytes
    /// are one packet, or several of `segment_bytes` each (the last may be shorter) that the system received as one.
    pub fn handle_datagram(
        &mut self,
        now: Time,
        src: IpAddr,
        src_port: u16,
        bytes: &[u8],
        segment_bytes: usize,
    ) {
        let arrival = Arrival {
            src,
            src_port,
            dst: self.config.address,
            traffic_class: 0,
            bytes,
            segment_bytes,
            local: false,
        };
        self.handle_arrival(now, &arrival);
    }

    /// Handles a datagram that arrived on UDP port 4791.
    pub fn handle_arrival(&mut self, now: Time, arrival: &Arrival<'_>) {
        if arrival.bytes.is_empty() || arrival.segment_bytes == 0 {
            self.counters.malformed += 1;
            return;
        }
        self.counters.rcvd_bytes += arrival.bytes.len() as u64;
        for segment in arrival.bytes.chunks(arrival.segment_bytes) {
            probe!(
                packet_in,
                word24(segment, 5),
                word24(segment, 9),
                segment[0],
                segment.len(),
            );
            let count = if arrival.local {
                u64::from(coalesced::count(segment))
            } else {
                1
            };
            self.counters.rcvd_pkts += count;
            self.counters.rcvd_pkts_local += count * u64::from(arrival.local);
            if Cnp::is_cnp(segment) {
                self.handle_cnp(now, &arrival.flow(), segment);
            } else {
                self.handle_packet(now, arrival, segment);
            }
        }
        while let Some(qpn) = self.gathering.pop() {
            self.with_qp(now, qpn, |qp, env| qp.place_gathered(env));
        }
    }

    /// Returns whether the ICRC is right; see `rdmux_wire::roce::icrc` for the IPv4 identification. `narrow`: the peer is known to be
    /// rdmux.
    fn icrc_is_right(&mut self, flow: &Flow, bytes: &[u8], icrc: u32, narrow: bool) -> bool {
        let difference = flow.icrc(&bytes[..bytes.len() - ICRC_LEN], 0) ^ icrc;
        if difference == 0 {
            return true;
        }
        if flow.src.is_ipv6() {
            return false;
        }
        let basis = self.id_bases[bytes.len()].get_or_insert_with(|| Box::new(IdBasis::new(bytes.len())));
        match basis.solve(difference) {
            Some(id) if id <= RDMUX_IP_ID_MAX => true,
            Some(_) if !narrow => {
                self.counters.icrc_residual_16 += 1;
                true
            }
            _ => false,
        }
    }

    /// Returns whether a packet is a FLUSH with the ICRC that rxe computes for it.
    fn is_flush_of_rxe(&mut self, flow: &Flow, packet: &Packet<'_>) -> bool {
        if packet.bth.opcode.operation != Op::Flush {
            return false;
        }
        let bytes = packet.bytes();
        let difference = flow.rxe_flush_icrc(&bytes[..bytes.len() - ICRC_LEN], 0) ^ packet.icrc();
        // All FLUSHes have the same length.
        let basis = self
            .rxe_flush_basis
            .get_or_insert_with(|| Box::new(IdBasis::of_rxe_flush(bytes.len())));
        let fits = difference == 0 || (flow.src.is_ipv4() && basis.solve(difference).is_some());
        self.counters.rxe_flush_icrc += u64::from(fits);
        fits
    }

    /// Checks a packet in the order of rxe and the specification (9.6.1), with the ICRC last but before anything takes effect, and
    /// passes it to its QP.
    fn handle_packet(&mut self, now: Time, arrival: &Arrival<'_>, bytes: &[u8]) {
        let (parsed, most) = if arrival.local {
            (Packet::parse_local(bytes), LOCAL_BYTES_MAX)
        } else {
            (Packet::parse(bytes), PACKET_BYTES_MAX)
        };
        let Ok(mut packet) = parsed else {
            self.counters.malformed += 1;
            return;
        };
        if bytes.len() >= most {
            self.counters.malformed += 1;
            return;
        }
        if packet.bth.pkey & 0x7fff != 0x7fff {
            self.counters.bad_pkey += 1;
            return;
        }
        let flow = arrival.flow();
        let qpn = packet.bth.dest_qpn;
        if qpn == Qpn::MULTICAST || flow.dst.is_multicast() {
            return self.handle_multicast(now, arrival, &packet);
        }
        if qpn == Qpn::GSI {
            return self.handle_gsi(now, &flow, &packet);
        }
        let Some(qp) = self
            .qps
            .get(&qpn.value())
            .filter(|qp| qp.head.takes(packet.bth.opcode))
        else {
            self.counters.no_qp += 1;
            return;
        };
        if !qp.head.takes_now(packet.bth.opcode) {
            self.counters.wrong_state += 1;
            return;
        }
        let (narrow, carries_acks) = (qp.head.peer_is_rdmux, qp.head.carries_acks);
        if !qp.head.is_from_peer(flow.src) {
            self.counters.wrong_peer += 1;
            return;
        }
        if !arrival.local && !self.icrc_is_right(&flow, bytes, packet.icrc(), narrow) {
            if narrow || !self.is_flush_of_rxe(&flow, &packet) {
                self.counters.rx_icrc_encapsulated += 1;
                return;
            }
            if let Some(qp) = self.qps.get_mut(&qpn.value()) {
                qp.settle_flush_icrc();
            }
        }
        if carries_acks && packet.take_carried().is_err() {
            self.counters.malformed += 1;
            return;
        }
        if arrival.traffic_class & ECN_MARKED == ECN_MARKED {
            self.handle_marked(now, qpn);
        }
        self.with_qp(now, qpn, |qp, env| qp.handle_packet(env, arrival, &packet));
        let waits = self.qps.get(&qpn.value()).is_some_and(Qp::has_gathered);
        if waits && self.gathering.last() != Some(&qpn) {
            self.gathering.push(qpn);
        }
    }

    /// Handles a packet for this QP that a switch marked. IBTA Vol 1, A17.9.3.
    fn handle_marked(&mut self, now: Time, qpn: Qpn) {
        let Some(qp) = self.qps.get_mut(&qpn.value()) else {
            return;
        };
        if let Some(with) = qp.head.congestion(&self.config.traffic) {
            self.counters.np_ecn_marked_roce_packets += 1;
            if qp.head.rate.handle_marked(now, with) {
                self.cnps.push_back(qpn);
            }
        }
    }

    /// Handles a congestion notification, with the checks of any other packet of a connection.
    fn handle_cnp(&mut self, now: Time, flow: &Flow, bytes: &[u8]) {
        let Ok((cnp, icrc)) = Cnp::parse(bytes) else {
            self.counters.malformed += 1;
            return;
        };
        if cnp.pkey & 0x7fff != 0x7fff {
            self.counters.bad_pkey += 1;
            return;
        }
        let Some(qp) = self.qps.get(&cnp.dest_qpn.value()) else {
            self.counters.no_qp += 1;
            return;
        };
        let narrow = qp.head.peer_is_rdmux;
        if matches!(qp.head.state, QpState::Reset | QpState::Init | QpState::Error) {
            self.counters.wrong_state += 1;
        } else if qp.head.path.is_none_or(|path| path.dst != flow.src) {
            self.counters.wrong_peer += 1;
        } else if !self.icrc_is_right(flow, bytes, icrc, narrow) {
            self.counters.rx_icrc_encapsulated += 1;
        } else {
            self.with_qp(now, cnp.dest_qpn, |qp, env| {
                if let Some(with) = qp.head.congestion(env.traffic) {
                    env.counters.rp_cnp_handled += 1;
                    qp.head.rate.handle_cnp(now, with);
                    // The device decides when a QP with a limited rate sends.
                    qp.close_lane_soon();
                }
            });
        }
    }

    /// Returns the QPs to which a datagram to a group is delivered.
    fn mcast_receivers(&self, group: IpAddr) -> Vec<Qpn> {
        if mutant!(McastToAll) {
            return self.qps.keys().map(|qpn| Qpn::new(*qpn)).collect();
        }
        let mut attached = self.groups.attached(group).to_vec();
        if mutant!(McastToFirst) {
            attached.truncate(1);
        }
        attached
    }

    /// Delivers a copy of a packet to every QP that is attached to the group, the sender's own included. IBTA Vol 1, 10.5.2.1.
    fn handle_multicast(&mut self, now: Time, arrival: &Arrival<'_>, packet: &Packet<'_>) {
        let flow = arrival.flow();
        let attached = self.mcast_receivers(flow.dst);
        // Both the address and the QPN of a packet to a group are those of a group.
        if packet.bth.dest_qpn != Qpn::MULTICAST || attached.is_empty() {
            self.counters.no_qp += 1;
            return;
        }
        if !self.icrc_is_right(&flow, packet.bytes(), packet.icrc(), false) {
            self.counters.rx_icrc_encapsulated += 1;
            return;
        }
        for qpn in attached {
            let takes = self.with_qp(now, qpn, |qp, env| {
                let takes = qp.head.takes(packet.bth.opcode) && qp.head.takes_now(packet.bth.opcode);
                if takes {
                    qp.handle_packet(env, arrival, packet);
                }
                takes
            });
            self.counters.wrong_state += u64::from(takes == Some(false));
        }
    }

    fn handle_gsi(&mut self, now: Time, flow: &Flow, packet: &Packet<'_>) {
        let good = packet.bth.opcode.transport == Transport::Ud
            && packet.deth().is_some_and(|deth| deth.qkey == GSI_QKEY)
            && packet.payload().len() == rdmux_wire::cm::MAD_LEN;
        if !good {
            self.counters.malformed += 1;
        } else if !self.icrc_is_right(flow, packet.bytes(), packet.icrc(), false) {
            self.counters.rx_icrc_encapsulated += 1;
        } else {
            self.cm.handle_mad(now, flow.src, packet.payload());
        }
    }

    /// Handles the end of a flush job; an error is final for the connection whose peer asked for the flush.
    pub fn handle_flush(&mut self, now: Time, id: FlushId, result: Result<(), crate::memory::Fault>) {
        let Some((qpn, psn)) = self.flushes.finish(id) else {
            return;
        };
        if let Err(fault) = result {
            self.note(now, qpn, Note::FlushFailed { psn, fault });
        }
        self.with_qp(now, qpn, |qp, env| qp.handle_flush(env, psn, result.is_ok()));
    }

    /// Handles the end of an access; a fault is final for the connection whose peer asked for it.
    pub fn handle_access(&mut self, now: Time, id: AccessId, result: Result<Accessed, crate::memory::Fault>) {
        if let Some(qpn) = self.accesses.finish(id) {
            self.with_qp(now, qpn, |qp, env| qp.handle_access(env, id, result));
        }
    }

    /// Handles due timers when the time of [`Rnic::poll_timeout`] has come, for a device without links to peers on its host.
    pub fn handle_timeout(&mut self, now: Time) {
        self.handle_timeout_with(now, &|_, _| None);
    }

    /// Handles due timers when the time of [`Rnic::poll_timeout`] has come. Calls `links` for the peers of QPs that are local.
    pub fn handle_timeout_with(&mut self, now: Time, links: &Links<'_>) {
        self.cm.handle_timeout(now);
        while let Some((at, qpn)) = self.timers.first().copied()
            && at <= now
        {
            self.timers.pop_first();
            self.with_qp(now, Qpn::new(qpn), |qp, env| qp.handle_timeout(env, links));
        }
        while let Some((at, cqn)) = self.moderated.first().copied()
            && at <= now
        {
            self.moderated.pop_first();
            match self.cqs.get(&cqn).map(|queue| queue.expire(at)) {
                Some(Pushed::Tell) => self.events.push_back(Event::Completion(Cqn(cqn))),
                Some(Pushed::Later(due)) => {
                    self.moderated.insert((due, cqn));
                }
                _ => {}
            }
        }
    }

    // Output.

    /// Fills `buf` with packets to send, for a device without rings to peers on its host.
    pub fn poll_transmit(&mut self, now: Time, buf: &mut TransmitBuf, all: bool) -> bool {
        self.poll_transmit_with(now, buf, &mut NoRings, all)
    }

    /// Fills `buf` with packets to send, and puts requests into `rings`. Leaves out acknowledgements that may wait to be combined with later ones unless `all` is
    /// set; set it when there is nothing else to do. Returns true while the caller must call again.
    pub fn poll_transmit_with(
        &mut self,
        now: Time,
        buf: &mut TransmitBuf,
        rings: &mut dyn Rings,
        all: bool,
    ) -> bool {
        let filled = buf.bytes().len();
        while !buf.is_full()
            && let Some((dst, src_port, mad)) = self.cm.poll_transmit()
        {
            self.push_mad(buf, dst, src_port, &mad[..]);
        }
        while !buf.is_full()
            && let Some(qpn) = self.cnps.pop_front()
        {
            self.push_cnp(buf, qpn);
        }
        if all {
            for qpn in self.ack_ready.drain(..) {
                if let Some(qp) = self.qps.get_mut(&qpn.value()) {
                    qp.head.ack_listed = false;
                    if !std::mem::replace(&mut qp.head.listed, true) {
                        self.ready.push(qp.class(), qpn);
                    }
                }
            }
        }
        while !buf.is_full()
            && let Some(quantum) = self.ready.pick()
        {
            let (qpn, before) = (quantum.id, buf.bytes().len());
            self.with_qp(now, qpn, |qp, env| {
                qp.transmit(env, buf, rings, quantum.bytes, all)
            });
            let sent = buf.bytes().len() - before + buf.charged();
            let qp = self.qps.get_mut(&qpn.value());
            let more = qp.as_ref().is_some_and(|qp| qp.wants_transmit());
            self.ready.end(quantum, sent, more);
            if let Some(qp) = qp
                && !more
            {
                qp.head.listed = false;
                list(qp, &mut self.ready, &mut self.ack_ready);
            }
        }
        self.counters.sent_bytes += (buf.bytes().len() - filled) as u64;
        self.has_urgent_transmit()
    }

    /// Returns whether [`Rnic::poll_transmit`] has anything to send, including acknowledgements that may wait if `all` is set.
    #[inline]
    pub fn has_transmit(&self, all: bool) -> bool {
        self.has_urgent_transmit() || (all && !self.ack_ready.is_empty())
    }

    /// Returns whether [`Rnic::poll_flush`], [`Rnic::poll_access`], [`Rnic::poll_event`], [`Rnic::poll_revoked`] and `cm().poll_event()`
    /// have nothing to return.
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.events.is_empty()
            && self.flushes.is_idle()
            && self.accesses.is_idle()
            && self.revoked.is_empty()
            && self.cm.is_quiet()
            // A request that completed within its post may have set a timer.
            && self.moderated.is_empty()
    }

    /// Returns whether [`Rnic::poll_transmit`] has more to send than acknowledgements that may wait.
    pub fn has_urgent_transmit(&self) -> bool {
        !self.ready.is_empty() || !self.cnps.is_empty() || self.cm.has_transmit()
    }

    /// Builds the pending congestion notification of a QP, in a traffic class of its own as NICs do (mlx5: DSCP 48).
    fn push_cnp(&mut self, buf: &mut TransmitBuf, qpn: Qpn) {
        let Some(qp) = self.qps.get_mut(&qpn.value()) else {
            return;
        };
        let (owed, path) = (std::mem::take(&mut qp.head.rate.cnp_owed), qp.head.path);
        let Some(path) = path.filter(|_| owed && qp.head.state != QpState::Error) else {
            return;
        };
        let path = Path {
            traffic_class: CNP_TRAFFIC_CLASS,
            ..path
        };
        let cnp = Cnp::new(qp.head.dest_qpn);
        let built = buf.push(&path, Cnp::LEN, |b| {
            cnp.emit(b);
            Ok::<_, std::convert::Infallible>(())
        });
        let Ok(()) = built;
        self.counters.sent_pkts += 1;
        self.counters.np_cnp_sent += 1;
    }

    fn push_mad(&mut self, buf: &mut TransmitBuf, dst: IpAddr, src_port: u16, mad: &[u8]) {
        let path = Path {
            src: self.config.address,
            dst,
            src_port,
            traffic_class: 0,
        };
        if path.src.is_ipv4() != path.dst.is_ipv4() {
            return;
        }
        let bth = Bth::new(
            Opcode {
                transport: Transport::Ud,
                operation: Op::SendOnly,
            },
            Qpn::GSI,
            self.gsi_psn,
        );
        self.gsi_psn = self.gsi_psn.plus(1);
        let built = buf.push(&path, Bth::LEN + Deth::LEN + mad.len(), |b| {
            bth.emit(b);
            Deth {
                qkey: GSI_QKEY,
                src_qpn: Qpn::GSI,
            }
            .emit(&mut b[Bth::LEN..]);
            b[Bth::LEN + Deth::LEN..].copy_from_slice(mad);
            Ok::<_, std::convert::Infallible>(())
        });
        let Ok(()) = built;
        self.counters.sent_pkts += 1;
    }

    /// Returns a flush that the driver carries out in a context that may block.
    pub fn poll_flush(&mut self) -> Option<FlushJob> {
        self.flushes.poll()
    }

    /// Returns an access that the driver carries out in a context that may block.
    pub fn poll_access(&mut self) -> Option<AccessJob> {
        self.accesses.poll()
    }

    /// Returns whether [`Rnic::poll_ended_memories`] or [`Cm::take_deferred`] may have something to return. A driver asks after every call.
    #[inline]
    pub fn has_remains(&self) -> bool {
        self.retired.any() || self.cm.has_deferred()
    }

    /// Returns memories that a work request, a packet or the destruction of a QP ended. The caller drops them where the code that
    /// this runs does no harm.
    pub fn poll_ended_memories(&mut self) -> Vec<Arc<dyn Memory>> {
        self.retired.take()
    }

    /// Returns the next event for the application.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns the time at which [`Rnic::handle_timeout`] is due next.
    pub fn poll_timeout(&self) -> Option<Time> {
        let first = |timers: &BTreeSet<(Time, u32)>| timers.first().map(|(at, _)| *at);
        let of_queues = earlier(first(&self.timers), first(&self.moderated));
        earlier(of_queues, self.cm.poll_timeout())
    }

    /// Calls `f` on a QP and the parts of the device that it needs, then puts QPs whose completion queue overran in error.
    fn with_qp<R>(&mut self, now: Time, qpn: Qpn, f: impl FnOnce(&mut Qp, &mut Env<'_>) -> R) -> Option<R> {
        let result = self.on_qp(now, qpn, f);
        if !self.overrun.is_empty() {
            self.fail_overrun(now);
        }
        result
    }

    /// Puts QPs whose completion queue overran in error.
    #[cold]
    fn fail_overrun(&mut self, now: Time) {
        // Each QP fails at most once, so this loop ends; the requests that a QP flushes may overrun the next queue.
        while let Some((cq, lost_of)) = self.overrun.pop() {
            let of_queue = |qp: &Qp| {
                let own = [qp.head.init.send_cq, qp.head.init.recv_cq];
                cq.is_some_and(|cq| own.contains(&cq))
            };
            let uses = |qp: &Qp| qp.head.qpn == lost_of || of_queue(qp);
            let cause = match cq {
                Some(_) => Cause::QueueOverrun,
                None => Cause::ShareOverrun,
            };
            let works = |qp: &Qp| !matches!(qp.head.state, QpState::Reset | QpState::Error);
            let failing = self.qps.iter().filter(|(_, qp)| uses(qp) && works(qp));
            let mut failing: Vec<u32> = failing.map(|(qpn, _)| *qpn).collect();
            failing.sort_unstable();
            for qpn in failing {
                self.on_qp(now, Qpn::new(qpn), |qp, env| {
                    qp.fail(env, Some((Status::LocalQpOperation, cause)));
                });
            }
        }
    }

    /// Calls `f` on a QP and the parts of the device that it needs, then lists the QP for sending and updates its timer.
    fn on_qp<R>(&mut self, now: Time, qpn: Qpn, f: impl FnOnce(&mut Qp, &mut Env<'_>) -> R) -> Option<R> {
        let qp = self.qps.get_mut(&qpn.value())?;
        let mut env = env_of!(self, now);
        qp.recall(|| now);
        qp.head.look_at_rate(&env);
        let before = qp.head.granted.then(|| qp.grants());
        let result = f(qp, &mut env);
        if before.is_some_and(|before| before != qp.grants()) {
            qp.head.granted = false;
            self.revoked.push(qpn);
        }
        list(qp, &mut self.ready, &mut self.ack_ready);
        set_timer(qp, &mut self.timers);
        Some(result)
    }
}

/// Adds what the lane of a QP did without the device.
fn count_lane(counters: &mut Counters, qp: &Qp) {
    let of_lane = qp.lane_counts();
    counters.direct_requests += of_lane.requests;
    counters.direct_bytes += of_lane.bytes;
    let (packets, bytes) = of_lane.sent;
    counters.sent_pkts += packets;
    counters.sent_bytes += bytes;
    let (packets, bytes) = of_lane.received;
    counters.rcvd_pkts += packets;
    counters.rcvd_pkts_local += packets;
    counters.rcvd_bytes += bytes;
}

/// Enters the deadline of a QP. An entry that is too early is corrected when it fires, so that progress costs nothing.
fn set_timer(qp: &mut Qp, timers: &mut BTreeSet<(Time, u32)>) {
    if let Some(deadline) = qp.deadline()
        && qp.head.timer.is_none_or(|timer| deadline < timer)
    {
        let qpn = qp.head.qpn.value();
        if let Some(later) = qp.head.timer.replace(deadline) {
            timers.remove(&(later, qpn));
        }
        timers.insert((deadline, qpn));
    }
}

/// Lists a QP that has something to send.
fn list(qp: &mut Qp, ready: &mut Scheduler<Qpn>, ack_ready: &mut VecDeque<Qpn>) {
    if qp.head.listed {
        return;
    }
    match qp.wants() {
        Wants::Nothing => {}
        Wants::Transmit => {
            qp.head.listed = true;
            ready.push(qp.class(), qp.head.qpn);
        }
        Wants::Acknowledgement if qp.head.ack_listed => {}
        Wants::Acknowledgement => {
            qp.head.ack_listed = true;
            ack_ready.push_back(qp.head.qpn);
        }
    }
}
