//! Queue pairs. One half sends requests, the other executes them: [`requester`] and [`responder`] where delivery is reliable,
//! [`unreliable`] and [`uc`] or [`ud`] where it is not. Only [`execute`] carries out a peer's requests.

use std::sync::Arc;

use rdmux_wire::roce::sack::Sack;
use rdmux_wire::roce::{Opcode, Operation, Packet, Transport};
use rdmux_wire::{Psn, Qpn, RKey};

use crate::access::{AccessId, Accessed};
use crate::backlog::Backlog;
use crate::cq::{CompletionQueue, Cqn, Pushed, Status, WcOpcode, WorkCompletion};
use crate::dcqcn::Parameters;
use crate::device::{Arrival, Links, Traffic};
use crate::faults::Line;
use crate::lane::{DirectLane, LaneCounts};
use crate::local::{Lending, Rings, Taken, Ticket};
use crate::memory::{Access, Fault};
use crate::probes;
use crate::queue::{Place, ReceiveQueue, SendQueue};
use crate::region::{NumberMap, Pd, Regions};
use crate::sched::class_of;
use crate::srq::{SharedReceiveQueue, Srqn, Xrcd};
use crate::time::Time;
use crate::trace::{Note, Tracer};
use crate::transmit::{ECN_CAPABLE, ECN_MARKED, Path, TransmitBuf};
use crate::work::{PostError, RecvRequest, SendRequest};

pub(crate) mod execute;
pub(crate) mod flush_icrc;
pub(crate) mod message;
pub(crate) mod rate;
pub(crate) mod read_ahead;
pub(crate) mod remains;
pub(crate) mod reorder;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod state;
pub(crate) mod uc;
pub(crate) mod ud;
pub(crate) mod unreliable;

use execute::Execution;
use message::Payload;
use rate::Rate;
use remains::Remains;
use requester::direct::{ByPackets, Grant};
use requester::{Broken, Requester};
use responder::Responder;
pub use state::{AttrMask, ModifyError, QpState};
use strum::VariantArray;
use uc::UcReceiver;
use ud::UdReceiver;
use unreliable::Sender;

/// Transport services. IBTA Vol 1, 9.7 to 9.8 and A14; the names are those of `enum ibv_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
pub enum QpType {
    /// Reliable connected.
    Rc,
    /// Unreliable connected.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connected, initiator.
    XrcSend,
    /// Extended reliable connected, target.
    XrcRecv,
}

/// Packets in flight to a peer that did not announce its window: rxe's own limit.
pub(crate) const WINDOW_PACKETS_DEFAULT: u32 = 64;
/// Smallest window in packets, however often packets are lost.
pub(crate) const WINDOW_PACKETS_MIN: u32 = 4;
const WINDOW_PACKETS_MAX: u32 = 1 << 16;
/// Most windows that are kept out of order.
const REACH_WINDOWS: u32 = 4;

/// Parameters of a new QP.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// Transport service.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: Pd,
    /// Completion queue of send requests.
    pub send_cq: Cqn,
    /// Completion queue of receive requests.
    pub recv_cq: Cqn,
    /// Most send requests that it holds.
    pub max_send_wr: u32,
    /// Most receive requests that it holds; without meaning for a QP with a shared receive queue.
    pub max_recv_wr: u32,
    /// Shared receive queue from which the QP takes its receives. IBTA Vol 1, 10.2.9.
    pub srq: Option<Srqn>,
    /// XRC target: the domain whose shared receive queues peers may name.
    pub xrcd: Option<Xrcd>,
}

impl QpInit {
    /// Returns the parameters of an RC QP with one completion queue, 128 send and 128 receive requests, to be changed as needed.
    pub fn new(pd: Pd, cq: Cqn) -> QpInit {
        QpInit {
            qp_type: QpType::Rc,
            pd,
            send_cq: cq,
            recv_cq: cq,
            max_send_wr: 128,
            max_recv_wr: 128,
            srq: None,
            xrcd: None,
        }
    }
}

/// Attributes to set; `None` leaves one as it is. IBTA Vol 1, 11.2.4.2.
#[derive(Clone, Copy, Debug, Default)]
pub struct QpAttributes {
    /// Rights of peers on this QP.
    pub access: Option<Access>,
    /// Addresses.
    pub path: Option<Path>,
    /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096. It may exceed the MTU of the device's link if the path to the peer does not
    /// leave the host.
    pub path_mtu: Option<u32>,
    /// The peer's QPN.
    pub dest_qpn: Option<Qpn>,
    /// First PSN to be received.
    pub rq_psn: Option<Psn>,
    /// READs, atomics and FLUSHes of the peer that the responder can keep for replay; with 0 it refuses them.
    pub max_dest_rd_atomic: Option<u8>,
    /// RNR timer code that the responder sends when no receive is posted.
    pub min_rnr_timer: Option<u8>,
    /// First PSN to be sent.
    pub sq_psn: Option<Psn>,
    /// Local ACK timeout code, 4.096 us x 2^code; 0 for none.
    pub timeout: Option<u8>,
    /// Retries on timeout, 0 to 7.
    pub retry_count: Option<u8>,
    /// Retries on RNR NAK, 0 to 6; 7 retries without end. RNR NAKs by which an rdmux peer delays a request while a medium works do
    /// not count.
    pub rnr_retry: Option<u8>,
    /// READs, atomics and FLUSHes in flight; with 0 the requester does not take them.
    pub max_rd_atomic: Option<u8>,
    /// Bytes in flight that both ends can take; the ends exchanged their limits when they connected.
    pub window_bytes: Option<u32>,
    /// The peer numbers the IPv4 identification of a train from 0, so the ICRC check can be narrower. Its RNR NAKs distinguish a medium
    /// that works from a missing receive.
    pub peer_is_rdmux: Option<bool>,
    /// Highest sending rate in bits per second; 0 for none.
    pub rate_limit_bps: Option<u64>,
    /// UD: the Q_Key that incoming datagrams must carry. IBTA Vol 1, 10.2.5.
    pub qkey: Option<u32>,
    /// Set when both ends agreed to retransmit selectively: the responder keeps packets after a gap, and reports them by
    /// [`rdmux_wire::roce::sack::Sack`].
    pub selective: Option<bool>,
    /// Set when both ends agreed that a request carries an acknowledgement that is pending ([`rdmux_wire::roce::carried`]).
    pub carried_acks: Option<bool>,
}

impl QpAttributes {
    /// Checks that a QP of this type goes from one state to another with these attributes. IBTA Vol 1, 11.2.4.2.
    pub fn check(&self, qp_type: QpType, from: QpState, to: QpState) -> Result<(), ModifyError> {
        state::check(qp_type, from, to, self.mask())?;
        let within = |what, value: Option<u8>, max: u8| match value {
            Some(v) if v > max => Err(ModifyError::Value(what)),
            _ => Ok(()),
        };
        within("min_rnr_timer", self.min_rnr_timer, 31)?;
        within("timeout", self.timeout, 31)?;
        within("retry_count", self.retry_count, 7)?;
        within("rnr_retry", self.rnr_retry, 7)?;
        if self
            .path_mtu
            .is_some_and(|mtu| !matches!(mtu, 256 | 512 | 1024 | 2048 | 4096))
        {
            return Err(ModifyError::Value("path_mtu"));
        }
        if self.path.is_some_and(|p| p.src.is_ipv4() != p.dst.is_ipv4()) {
            return Err(ModifyError::Value("path"));
        }
        Ok(())
    }

    fn mask(&self) -> AttrMask {
        let mut mask = AttrMask::empty();
        mask.set(AttrMask::ACCESS, self.access.is_some());
        mask.set(AttrMask::PATH, self.path.is_some());
        mask.set(AttrMask::PATH_MTU, self.path_mtu.is_some());
        mask.set(AttrMask::DEST_QPN, self.dest_qpn.is_some());
        mask.set(AttrMask::RQ_PSN, self.rq_psn.is_some());
        mask.set(AttrMask::MAX_DEST_RD_ATOMIC, self.max_dest_rd_atomic.is_some());
        mask.set(AttrMask::MIN_RNR_TIMER, self.min_rnr_timer.is_some());
        mask.set(AttrMask::SQ_PSN, self.sq_psn.is_some());
        mask.set(AttrMask::TIMEOUT, self.timeout.is_some());
        mask.set(AttrMask::RETRY_COUNT, self.retry_count.is_some());
        mask.set(AttrMask::RNR_RETRY, self.rnr_retry.is_some());
        mask.set(AttrMask::MAX_RD_ATOMIC, self.max_rd_atomic.is_some());
        mask.set(AttrMask::WINDOW, self.window_bytes.is_some());
        mask.set(AttrMask::PEER_IS_RDMUX, self.peer_is_rdmux.is_some());
        mask.set(AttrMask::QKEY, self.qkey.is_some());
        mask.set(AttrMask::RATE_LIMIT, self.rate_limit_bps.is_some());
        mask.set(AttrMask::SELECTIVE, self.selective.is_some());
        mask.set(AttrMask::CARRIED_ACKS, self.carried_acks.is_some());
        mask
    }
}

/// Cause that put a QP in error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum Cause {
    /// A send request of its own, whose completion says so.
    OwnRequest,
    /// A request of its peer.
    PeerRequest,
    /// A completion queue that overran.
    QueueOverrun,
    /// An injected fault ([`crate::Rnic::fail_qp`]).
    Injected,
    /// Its share of a completion queue that overran ([`CompletionQueue::add_share`]).
    ShareOverrun,
}

/// An event for the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A completion queue that was armed has a completion.
    Completion(Cqn),
    /// A completion queue overran: it takes no more completions, and the QPs that complete to it go to error. Completions in it can
    /// still be polled. Asynchronous event of IBTA Vol 1, 11.6.3.
    CqError(Cqn),
    /// A QP went to error on its own. IBTA Vol 1, 11.6.3.1 if the cause is not a request of its own.
    QpError(Qpn, Status, Cause),
    /// A request came in on a QP in RTR: the connection is established although its last message is missing. 11.6.3.1.
    CommunicationEstablished(Qpn),
    /// The first request came in, in any state, on a QP for which the driver called [`crate::Rnic::tell_first_request`].
    FirstRequest(Qpn),
    /// The send queue of a QP in SQD has drained. 11.6.3.1.
    SqDrained(Qpn),
    /// A QP with a shared receive queue is in error and uses up no more of its receives. 11.6.3.1.
    LastWqeReached(Qpn),
    /// Fewer receives than the limit are left in a shared receive queue; the limit is disarmed. 11.6.3.1.
    SrqLimitReached(Srqn),
    /// A request of a QP whose peer is on this host is sent in packets, and would not be if the peer granted access to the memory
    /// of this key. The driver answers with [`crate::Rnic::set_grant`], or never.
    WantsGrant(Qpn, RKey),
}

/// The parts of the device that both halves of a QP use.
#[derive(Debug)]
pub(crate) struct Env<'a> {
    pub(crate) regions: &'a mut Regions,
    pub(crate) srqs: &'a mut NumberMap<SharedReceiveQueue>,
    pub(crate) cqs: &'a mut NumberMap<CompletionQueue>,
    pub(crate) events: &'a mut std::collections::VecDeque<Event>,
    pub(crate) flushes: &'a mut crate::flush::Flushes,
    pub(crate) accesses: &'a mut crate::access::Accesses,
    pub(crate) counters: &'a mut crate::Counters,
    pub(crate) latencies: &'a mut crate::Latencies,
    /// Queues that overran, each with the QP whose completion was lost. All QPs of such a queue have to fail, and so does that one,
    /// which on XRC completes to the queue of a shared receive queue. `None`: only the QP's share of a queue overran, and only it fails.
    pub(crate) overrun: &'a mut Vec<(Option<Cqn>, Qpn)>,
    pub(crate) traffic: &'a Traffic,
    /// Decides which requests are answered with an RNR NAK although there is a receive.
    pub(crate) rnr_faults: &'a mut Option<Line>,
    pub(crate) tracer: &'a mut Option<Box<dyn Tracer>>,
    /// Latest times at which waiters of moderated queues are notified.
    pub(crate) moderated: &'a mut std::collections::BTreeSet<(Time, u32)>,
    pub(crate) now: Time,
}

impl Env<'_> {
    /// Passes a note to the tracer.
    #[cold]
    pub(crate) fn note(&mut self, qpn: Qpn, note: Note) {
        if let Some(tracer) = self.tracer.as_mut() {
            tracer.note(self.now, qpn, &note);
        }
    }

    /// Notifies the driver of the first request of a QP, if the driver asked for that or the QP is in RTR.
    pub(crate) fn tell_first_request(&mut self, head: &Head) {
        if head.tells_first_request {
            self.events.push_back(Event::FirstRequest(head.qpn));
        } else if head.state == QpState::Rtr {
            self.events.push_back(Event::CommunicationEstablished(head.qpn));
        }
    }

    /// Adds a completion to its queue, and notifies the queue's waiter if it is due.
    pub(crate) fn complete(&mut self, cq: Cqn, wc: WorkCompletion, solicited: bool) {
        let Some(queue) = self.cqs.get(&cq.0) else {
            return;
        };
        if wc.status != Status::Success {
            count_error(self.counters, &wc);
        }
        let pushed = queue.push(wc, solicited, || self.now);
        self.deliver(cq, wc.qpn, pushed);
    }

    /// Handles the effect of a QP's completion on its queue.
    #[inline]
    pub(crate) fn deliver(&mut self, cq: Cqn, qpn: Qpn, pushed: Pushed) {
        match pushed {
            Pushed::Quiet => {}
            Pushed::Later(at) => {
                self.moderated.insert((at, cq.0));
            }
            Pushed::Tell => self.events.push_back(Event::Completion(cq)),
            Pushed::Overrun { first } => {
                if first {
                    self.note(qpn, Note::Overrun { cqn: cq });
                    self.events.push_back(Event::CqError(cq));
                }
                // Also after the first loss: a QP may have been brought up again since.
                self.has_overrun(Some(cq), qpn);
            }
            Pushed::ShareOverrun => self.has_overrun(None, qpn),
        }
    }
}

impl Env<'_> {
    #[cold]
    fn has_overrun(&mut self, cq: Option<Cqn>, qpn: Qpn) {
        if !self.overrun.contains(&(cq, qpn)) {
            self.overrun.push((cq, qpn));
        }
    }
}

/// Counts a completion with an error, of a send or of a receive.
#[cold]
fn count_error(counters: &mut crate::Counters, wc: &WorkCompletion) {
    let received = matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
    let counter = match (received, wc.status == Status::Flushed) {
        (false, false) => &mut counters.req_cqe_error,
        (false, true) => &mut counters.req_cqe_flush_error,
        (true, false) => &mut counters.resp_cqe_error,
        (true, true) => &mut counters.resp_cqe_flush_error,
    };
    *counter += 1;
}

/// Attributes of a QP and its two halves.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) head: Head,
    halves: Halves,
}

/// The halves of a QP, by the guarantees of its transport service.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "most QPs are reliable, and a box would cost each of their packets a step"
)]
enum Halves {
    Reliable(Requester, Responder),
    Uc(Sender, UcReceiver),
    Ud(Sender, UdReceiver),
}

impl Halves {
    fn new(qp_type: QpType, receives: ReceiveQueue) -> Halves {
        let execution = Execution::new(receives, !matches!(qp_type, QpType::Uc | QpType::Ud));
        match qp_type {
            QpType::Rc | QpType::XrcSend | QpType::XrcRecv => {
                Halves::Reliable(Requester::new(), Responder::new(execution))
            }
            QpType::Uc => Halves::Uc(Sender::new(), UcReceiver::new(execution)),
            QpType::Ud => Halves::Ud(Sender::new(), UdReceiver { execution }),
        }
    }
}

/// Attributes that both halves of a QP read.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) qpn: Qpn,
    pub(crate) init: QpInit,
    pub(crate) state: QpState,
    pub(crate) access: Access,
    pub(crate) path: Option<Path>,
    pub(crate) mtu: u32,
    pub(crate) dest_qpn: Qpn,
    pub(crate) peer_is_rdmux: bool,
    pub(crate) qkey: u32,
    pub(crate) rate: Rate,
    /// Set when both ends retransmit selectively.
    pub(crate) selective: bool,
    /// Set when requests carry acknowledgements.
    pub(crate) carries_acks: bool,
    /// Packets in flight that both ends can take.
    pub(crate) window: u32,
    /// Set while the device's list of QPs that have something to send holds this one.
    pub(crate) listed: bool,
    /// Set while the device's list of QPs that have only an acknowledgement to send holds this one.
    pub(crate) ack_listed: bool,
    /// Time of this QP's entry in the device's timers.
    pub(crate) timer: Option<Time>,
    /// Set while the QP reaches its peer, which is on this host, through memory.
    pub(crate) local: bool,
    /// See [`Ticket::incarnation`].
    pub(crate) incarnation: u32,
    /// Set when regions were granted to the peer, for as long as this QP takes its requests.
    pub(crate) granted: bool,
    /// What the peer may read of the memory of requests.
    pub(crate) lending: Option<Arc<dyn Lending>>,
    /// Set when the driver waits for the first request.
    pub(crate) tells_first_request: bool,
    /// Set when the QP stays in Reset until it is destroyed.
    retired: bool,
    /// The send queue with its free places, and the QP's own receive queue: shared with the threads that post.
    pub(crate) sends: SendQueue,
    pub(crate) receives: ReceiveQueue,
}

impl Head {
    /// Makes sure that the peer takes no bytes of requests that are about to end although the peer has not taken them.
    pub(crate) fn end_lending(&self) {
        if let Some(lending) = &self.lending {
            lending.end();
        }
    }

    /// Returns the parameters of this QP's congestion control, if it has any: nothing marks packets on loopback.
    pub(crate) fn congestion<'a>(&self, traffic: &'a Traffic) -> Option<&'a Parameters> {
        let leaves = |path: Path| traffic.congestion_on_loopback || !path.is_loopback();
        let has = self.init.qp_type != QpType::Ud && self.path.is_some_and(leaves);
        traffic.congestion.as_ref().filter(|_| has)
    }

    /// Applies the attributes that are given.
    fn set(&mut self, attr: &QpAttributes, traffic: &Traffic) {
        self.access = attr.access.unwrap_or(self.access);
        if self.path.is_none() || !mutant!(PathStays) {
            self.path = attr.path.or(self.path);
        }
        self.mtu = attr.path_mtu.unwrap_or(self.mtu);
        self.dest_qpn = attr.dest_qpn.unwrap_or(self.dest_qpn);
        self.qkey = attr.qkey.unwrap_or(self.qkey);
        self.peer_is_rdmux = attr.peer_is_rdmux.unwrap_or(self.peer_is_rdmux);
        self.rate.limit_bps = attr.rate_limit_bps.unwrap_or(self.rate.limit_bps);
        self.set_ecn(traffic);
        self.selective = attr.selective.unwrap_or(self.selective);
        self.carries_acks = attr.carried_acks.unwrap_or(self.carries_acks);
        if let Some(bytes) = attr.window_bytes {
            self.window = (bytes / self.mtu).clamp(WINDOW_PACKETS_MIN, WINDOW_PACKETS_MAX);
        }
    }

    /// Sets the ECN field of the QP's packets. For a peer that is not known to answer marks, only the user sets ECN bits.
    fn set_ecn(&mut self, traffic: &Traffic) {
        let capable = self.congestion(traffic).is_some();
        let Some(path) = &mut self.path else { return };
        if !capable {
            path.traffic_class &= !ECN_MARKED;
        } else if self.peer_is_rdmux {
            path.traffic_class = path.traffic_class & !ECN_MARKED | ECN_CAPABLE;
        }
    }

    /// Updates the rate.
    pub(crate) fn look_at_rate(&mut self, env: &Env<'_>) {
        if !self.rate.is_free() {
            let with = self.congestion(env.traffic);
            self.rate.look(env.now, with, self.mtu);
        }
    }

    /// Returns the opcode of an operation on this QP's transport.
    pub(crate) fn opcode(&self, operation: Operation) -> Opcode {
        let transport = match self.init.qp_type {
            QpType::Rc => Transport::Rc,
            QpType::Uc => Transport::Uc,
            QpType::Ud => Transport::Ud,
            QpType::XrcSend | QpType::XrcRecv => Transport::Xrc,
        };
        Opcode { transport, operation }
    }

    /// Returns whether packets of this opcode may be for this QP: they have its transport, and it has the half that handles them.
    pub(crate) fn takes(&self, opcode: Opcode) -> bool {
        let response = opcode.operation.is_response();
        let half = match self.init.qp_type {
            QpType::Rc => true,
            QpType::XrcSend => response,
            QpType::Uc | QpType::Ud | QpType::XrcRecv => !response,
        };
        half && opcode == self.opcode(opcode.operation)
    }

    /// Returns whether the QP's state allows packets of this opcode. 10.3.1.
    pub(crate) fn takes_now(&self, opcode: Opcode) -> bool {
        match self.state {
            QpState::Rts | QpState::Sqd | QpState::Sqe => true,
            QpState::Rtr => !opcode.operation.is_response(),
            QpState::Reset | QpState::Init | QpState::Error => false,
        }
    }

    /// Returns whether packets from this address may be for this QP: only UD has no peer.
    pub(crate) fn is_from_peer(&self, src: std::net::IpAddr) -> bool {
        self.init.qp_type == QpType::Ud || self.path.is_some_and(|path| path.dst == src)
    }
}

impl Qp {
    /// Creates a QP. `mtu`: bytes of payload that a packet on the device's link carries.
    pub(crate) fn new(qpn: Qpn, init: QpInit, mtu: u32) -> Qp {
        let queues = (SendQueue::new(&init), ReceiveQueue::new(init.max_recv_wr, false));
        Qp::with_queues(qpn, init, mtu, queues)
    }

    fn with_queues(qpn: Qpn, init: QpInit, mtu: u32, (sends, receives): (SendQueue, ReceiveQueue)) -> Qp {
        let halves = Halves::new(init.qp_type, receives.clone());
        let head = Head {
            qpn,
            init,
            state: QpState::Reset,
            access: Access::empty(),
            path: None,
            mtu,
            dest_qpn: Qpn::new(0),
            peer_is_rdmux: false,
            qkey: 0,
            rate: Rate::default(),
            selective: false,
            carries_acks: false,
            window: WINDOW_PACKETS_DEFAULT,
            listed: false,
            ack_listed: false,
            timer: None,
            local: false,
            incarnation: 0,
            lending: None,
            granted: false,
            tells_first_request: false,
            retired: false,
            sends,
            receives,
        };
        Qp { head, halves }
    }

    /// Moves the QP to Reset for good.
    pub(crate) fn retire(&mut self, env: &mut Env<'_>) {
        let _ = self.modify(env, QpState::Reset, &QpAttributes::default());
        self.head.retired = true;
    }

    pub(crate) fn modify(
        &mut self,
        env: &mut Env<'_>,
        to: QpState,
        attr: &QpAttributes,
    ) -> Result<(), ModifyError> {
        if self.head.retired {
            return Err(ModifyError::NoQp);
        }
        let (qp_type, from) = (self.head.init.qp_type, self.head.state);
        attr.check(qp_type, from, to)?;
        self.close_lane();
        self.head.set(attr, env.traffic);
        match &mut self.halves {
            Halves::Reliable(requester, responder) => {
                responder.set(attr);
                requester.set(attr, &self.head);
            }
            Halves::Uc(sender, receiver) => {
                sender.set(attr);
                receiver.set(attr);
            }
            Halves::Ud(sender, _) => sender.set(attr),
        }
        probe!(
            qp_state,
            self.head.qpn.value(),
            probes::state(self.head.state),
            probes::state(to),
        );
        env.note(self.head.qpn, Note::Moved { qp_type, from, to });
        if let (Some(path), QpState::Rtr) = (self.head.path, to) {
            let (address, qpn, mtu) = (path.dst, self.head.dest_qpn, self.head.mtu);
            env.note(self.head.qpn, Note::Peer { address, qpn, mtu });
        }
        match to {
            QpState::Error => self.fail(env, None),
            QpState::Sqd => self.drain(env),
            QpState::Reset => self.reset(env),
            _ => self.head.state = to,
        }
        self.open_queues();
        Ok(())
    }

    /// Moves the QP to SQD: it begins no request any more, and reports when those that it has begun are complete.
    fn drain(&mut self, env: &mut Env<'_>) {
        let begins = self.head.state == QpState::Rts;
        self.head.state = QpState::Sqd;
        match &mut self.halves {
            Halves::Reliable(requester, _) => {
                if begins {
                    requester.drain();
                }
                requester.tell_drained(env, &self.head);
            }
            Halves::Uc(sender, _) | Halves::Ud(sender, _) => {
                if begins {
                    sender.drain();
                }
                sender.tell_drained(env, &self.head);
            }
        }
    }

    /// Moves the QP to Reset. Nothing completes: posted requests are discarded, and so are completions that are not polled yet. 10.3.1.
    fn reset(&mut self, env: &mut Env<'_>) {
        for cq in [self.head.init.send_cq, self.head.init.recv_cq] {
            if let Some(queue) = env.cqs.get(&cq.0) {
                queue.forget(self.head.qpn);
            }
        }
        env.flushes.forget(self.head.qpn);
        env.accesses.forget(self.head.qpn);
        self.head.sends.give_back(self.send_outstanding());
        let Head { qpn, init, mtu, .. } = self.head;
        let queues = (self.head.sends.clone(), self.head.receives.clone());
        let mut fresh = Qp::with_queues(qpn, init, mtu, queues);
        fresh.head.listed = self.head.listed;
        fresh.head.ack_listed = self.head.ack_listed;
        fresh.head.timer = self.head.timer;
        fresh.head.granted = self.head.granted;
        fresh.head.incarnation = self.head.incarnation.wrapping_add(1);
        if let (Some(before), Some(after)) = (self.requester(), fresh.requester()) {
            before.end_lane(env.regions);
            after.set_lane(before.lane().cloned());
        }
        *self = fresh;
    }

    /// Returns the lane of callers that do without the device. Only an RC QP has one.
    pub(crate) fn lane(&mut self, cqs: &NumberMap<CompletionQueue>) -> Option<DirectLane> {
        let (qpn, init, sends) = (self.head.qpn, self.head.init, self.head.sends.clone());
        let cq = |cqn: Cqn| Some((cqn, cqs.get(&cqn.0)?.clone()));
        if init.qp_type != QpType::Rc {
            return None;
        }
        let requester = self.requester()?;
        if requester.lane().is_none() {
            let lane = DirectLane::new(qpn, cq(init.send_cq)?, cq(init.recv_cq)?, sends);
            requester.set_lane(Some(lane));
        }
        requester.lane().cloned()
    }

    /// Takes back what the lane has of the QP's state. Comes before anything that looks at that state.
    #[inline]
    pub(crate) fn recall(&mut self, now: impl FnOnce() -> Time) {
        self.recall_receives();
        if let Halves::Reliable(requester, _) = &mut self.halves
            && requester.lane_with_sends().is_some()
        {
            requester.recall(now());
        }
    }

    /// Takes back the responder's turn.
    #[inline]
    pub(crate) fn recall_receives(&mut self) {
        if let Halves::Reliable(requester, responder) = &mut self.halves
            && let Some(lane) = requester.lane().filter(|lane| lane.has_receives())
        {
            responder.recall(lane);
        }
    }

    /// Lends the lane the requests that are not done, if callers can go on without the device. `rings`: those to peers on this host.
    pub(crate) fn lend_sends(&mut self, env: &mut Env<'_>, rings: &mut dyn Rings) {
        if let Halves::Reliable(requester, _) = &mut self.halves {
            requester.lend(env, &self.head, rings);
            if requester.lane_with_sends().is_none() {
                // The device completes the request, behind which no WRITE by the lane may complete first.
                requester.close_lane_soon();
            }
        }
    }

    /// Lends the lane the responder's turn, if callers can go on without the device.
    pub(crate) fn lend_receives(&mut self, srqs: &NumberMap<SharedReceiveQueue>) {
        if let Halves::Reliable(requester, responder) = &mut self.halves
            && let Some(lane) = requester.lane()
        {
            let shared = self.head.init.srq.and_then(|srqn| srqs.get(&srqn.0));
            responder.lend(&self.head, lane, shared.map(|srq| &srq.queue));
        }
    }

    /// Returns the lane, if it has the QP's SENDs.
    pub(crate) fn lane_with_sends(&self) -> Option<&DirectLane> {
        match &self.halves {
            Halves::Reliable(requester, _) => requester.lane_with_sends(),
            Halves::Uc(..) | Halves::Ud(..) => None,
        }
    }

    /// Returns the lane, if it has the responder's turn.
    pub(crate) fn lane_with_receives(&self) -> Option<&DirectLane> {
        match &self.halves {
            Halves::Reliable(requester, _) => requester.lane().filter(|lane| lane.has_receives()),
            Halves::Uc(..) | Halves::Ud(..) => None,
        }
    }

    /// Makes callers post to the device.
    pub(crate) fn close_lane_soon(&self) {
        if let Halves::Reliable(requester, _) = &self.halves {
            requester.close_lane_soon();
        }
    }

    /// Makes callers post to the device, and waits until none is inside of a request.
    fn close_lane(&self) {
        if let Halves::Reliable(requester, _) = &self.halves
            && let Some(lane) = requester.lane()
        {
            lane.close();
        }
    }

    /// Returns the numbers of what callers did without the device.
    pub(crate) fn lane_counts(&self) -> LaneCounts {
        match &self.halves {
            Halves::Reliable(requester, _) => requester.lane().map(DirectLane::counts).unwrap_or_default(),
            Halves::Uc(..) | Halves::Ud(..) => LaneCounts::default(),
        }
    }

    /// Lets callers post without the device while the QP's state takes requests, and closes the queues otherwise.
    fn open_queues(&self) {
        let Head { state, init, mtu, .. } = &self.head;
        if matches!(state, QpState::Rts | QpState::Sqd) {
            let has_resources = match &self.halves {
                Halves::Reliable(requester, _) => requester.has_resources(),
                Halves::Uc(..) | Halves::Ud(..) => false,
            };
            self.head.sends.open(*mtu, has_resources);
        } else {
            self.head.sends.close();
        }
        let receives = !matches!(init.qp_type, QpType::XrcSend | QpType::XrcRecv) && init.srq.is_none();
        match state {
            QpState::Reset => drop(self.head.receives.close()),
            // The flush of the receives closes the queue.
            QpState::Error => {}
            _ if receives => self.head.receives.open(),
            _ => {}
        }
    }

    /// Moves the QP to Error: every posted request completes as flushed. The driver receives `cause`, if any, in an asynchronous
    /// event.
    pub(crate) fn fail(&mut self, env: &mut Env<'_>, cause: Option<(Status, Cause)>) {
        if self.head.state == QpState::Error {
            return;
        }
        if let Some((status, cause)) = cause {
            let (qpn, from) = (self.head.qpn.value(), probes::state(self.head.state));
            probe!(qp_state, qpn, from, probes::state(QpState::Error));
            probe!(qp_error, qpn, probes::status(status), cause as u32);
        }
        self.close_lane();
        if let Halves::Reliable(_, responder) = &mut self.halves {
            // The peer may learn that the packets before this one in its datagram were executed, so their bytes have to be there.
            let _ = responder.place_gathered(env, &self.head);
        }
        let from = std::mem::replace(&mut self.head.state, QpState::Error);
        if let Some((status, cause)) = cause {
            env.note(self.head.qpn, Note::Failed { status, cause, from });
        }
        self.open_queues();
        match &mut self.halves {
            Halves::Reliable(requester, responder) => {
                requester.flush(env, &self.head);
                responder.flush(env, &self.head);
            }
            Halves::Uc(sender, UcReceiver { execution, .. })
            | Halves::Ud(sender, UdReceiver { execution }) => {
                sender.flush(env, &self.head);
                execution.flush(env, &self.head);
            }
        }
        if self.head.init.srq.is_some() && !mutant!(LastWqeUntold) {
            env.events.push_back(Event::LastWqeReached(self.head.qpn));
        }
        if let Some((status, cause)) = cause
            && !mutant!(QpErrorUntold)
        {
            env.events.push_back(Event::QpError(self.head.qpn, status, cause));
        }
    }

    /// Sends the last acknowledgement again if a peer may wait for it.
    pub(crate) fn repeat_last(&mut self) {
        let takes = matches!(self.head.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        if let Halves::Reliable(_, responder) = &mut self.halves
            && takes
        {
            responder.repeat_last();
        }
    }

    /// Returns the numbers of requests that were sent in packets although the peer is on this host.
    pub(crate) fn by_packets(&self) -> ByPackets {
        match &self.halves {
            Halves::Reliable(requester, _) => requester.by_packets(),
            _ => ByPackets::default(),
        }
    }

    /// Returns the rights that the peer may be granted on regions that allow them; `None` when the QP is not reliable or takes no
    /// requests.
    pub(crate) fn grants(&self) -> Option<Access> {
        let takes = matches!(self.head.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        let Halves::Reliable(_, responder) = &self.halves else {
            return None;
        };
        let mut access = self.head.access & (Access::REMOTE_WRITE | Access::REMOTE_READ);
        access.set(
            Access::REMOTE_READ,
            access.contains(Access::REMOTE_READ) && responder.takes_reads(),
        );
        (takes && self.head.init.qp_type == QpType::Rc).then_some(access)
    }

    /// Makes the QP keep what is left of it when it fails; returns false if it cannot.
    pub(crate) fn keep_remains(&mut self) -> bool {
        let works = self.head.init.qp_type == QpType::Rc && self.head.state != QpState::Error;
        match &mut self.halves {
            Halves::Reliable(requester, responder) if works => {
                requester.keep_remains();
                responder.keep_remains();
                true
            }
            _ => false,
        }
    }

    /// Takes what is left of a QP that has failed.
    pub(crate) fn take_remains(&mut self) -> Option<Remains> {
        match &mut self.halves {
            Halves::Reliable(requester, responder) if self.head.state == QpState::Error => Some(Remains {
                mtu: self.head.mtu,
                sent: requester.take_ended()?,
                done: responder.take_done()?,
            }),
            _ => None,
        }
    }

    /// Returns the requester, if delivery is reliable.
    pub(crate) fn requester(&mut self) -> Option<&mut Requester> {
        match &mut self.halves {
            Halves::Reliable(requester, _) => Some(requester),
            Halves::Uc(..) | Halves::Ud(..) => None,
        }
    }

    /// Returns the grants of the peer.
    pub(crate) fn held_grants(&self) -> impl Iterator<Item = &Grant> {
        let requester = match &self.halves {
            Halves::Reliable(requester, _) => Some(requester),
            Halves::Uc(..) | Halves::Ud(..) => None,
        };
        requester.into_iter().flat_map(|requester| requester.grants())
    }

    // Work.

    pub(crate) fn post_send(
        &mut self,
        env: &mut Env<'_>,
        request: SendRequest,
        place: Place,
    ) -> Result<(), PostError> {
        let opcode = message::opcode_of(&request.operation);
        probe!(
            post_send,
            self.head.qpn.value(),
            request.wr_id,
            probes::opcode(opcode),
            request.sges.bytes(),
        );
        match &mut self.halves {
            Halves::Reliable(requester, _) => requester.post(env, &self.head, request, place),
            Halves::Uc(sender, _) | Halves::Ud(sender, _) => sender.post(env, &self.head, request, place),
        }
    }

    /// Ends a request that has a place in the queue but cannot be carried out any longer: it completes with an error, after the
    /// requests before it.
    pub(crate) fn end_reserved(&mut self, env: &mut Env<'_>, request: &SendRequest) {
        let status = Status::LocalQpOperation;
        self.fail(env, Some((status, Cause::OwnRequest)));
        let opcode = message::opcode_of(&request.operation);
        self.head.sends.give_back(1);
        env.complete(
            self.head.init.send_cq,
            bare_completion(self.head.qpn, request.wr_id, status, opcode),
            false,
        );
    }

    /// Posts a SEND by putting it into the ring, and takes `request`, if that is possible.
    pub(crate) fn post_by_ring(
        &mut self,
        env: &mut Env<'_>,
        request: &mut Option<SendRequest>,
        rings: &mut dyn Rings,
    ) {
        if let Halves::Reliable(requester, _) = &mut self.halves {
            requester.post_by_ring(env, &self.head, request, rings);
        }
    }

    /// Carries out a send request that needs no packets; returns false if the caller must post it instead.
    #[inline]
    pub(crate) fn post_directly(&mut self, env: &mut Env<'_>, request: &SendRequest) -> bool {
        match &mut self.halves {
            Halves::Reliable(requester, _) => {
                let done = requester.post_directly(env, &self.head, request);
                if done {
                    requester.open_lane(env, &self.head, request);
                }
                done
            }
            Halves::Uc(..) | Halves::Ud(..) => false,
        }
    }

    /// Posts a receive request. In Error it completes at once, as flushed.
    pub(crate) fn post_recv(&mut self, env: &mut Env<'_>, request: RecvRequest) -> Result<(), PostError> {
        match &mut self.halves {
            Halves::Reliable(_, responder) => responder.post(env, &self.head, request),
            Halves::Uc(_, UcReceiver { execution, .. }) | Halves::Ud(_, UdReceiver { execution }) => {
                execution.post(env, &self.head, request)
            }
        }
    }

    /// Returns the number of send requests that are posted and not complete.
    pub(crate) fn send_outstanding(&self) -> usize {
        match &self.halves {
            Halves::Reliable(requester, _) => requester.outstanding(),
            Halves::Uc(sender, _) | Halves::Ud(sender, _) => sender.outstanding(),
        }
    }

    /// Returns the number of receive requests that are posted and not used up.
    pub(crate) fn recv_posted(&self) -> usize {
        match &self.halves {
            Halves::Reliable(_, responder) => responder.posted(),
            Halves::Uc(_, UcReceiver { execution, .. }) | Halves::Ud(_, UdReceiver { execution }) => {
                execution.recv.len()
            }
        }
    }

    /// Adds the amount of state that the QP keeps because of its peer.
    pub(crate) fn add_backlog(&self, backlog: &mut Backlog) {
        if let Halves::Reliable(requester, responder) = &self.halves {
            let (kept, answers) = responder.backlog();
            backlog.kept_packets += kept + requester.kept();
            backlog.answers += answers;
        }
    }

    /// Returns the PSN of the next send request, and the PSN that the responder expects next; 0 for a half that does not exist or
    /// does not count PSNs.
    pub(crate) fn next_psns(&self) -> (Psn, Psn) {
        match &self.halves {
            Halves::Reliable(requester, responder) => {
                let lent = self.lane_with_receives().and_then(DirectLane::expected);
                let expected = lent.unwrap_or_else(|| responder.expected_psn());
                (requester.next_psn(), expected)
            }
            Halves::Uc(sender, receiver) => (sender.next_psn(), receiver.expected_psn()),
            Halves::Ud(sender, _) => (sender.next_psn(), Psn::new(0)),
        }
    }

    /// Advances the PSNs of its halves, the requester's by `sent` and the responder's by `received`; returns false unless both are
    /// idle.
    pub(crate) fn skip_psns(&mut self, env: &Env<'_>, sent: u32, received: u32) -> bool {
        let Halves::Reliable(requester, responder) = &mut self.halves else {
            return false;
        };
        let rests = requester.outstanding() == 0 && responder.rests();
        if rests {
            requester.skip(env, sent);
            responder.skip(received);
        }
        rests
    }

    // Input.

    /// Handles a packet that the device has found to be for this QP.
    pub(crate) fn handle_packet(&mut self, env: &mut Env<'_>, arrival: &Arrival<'_>, packet: &Packet<'_>) {
        let head = &self.head;
        let failed = match &mut self.halves {
            Halves::Reliable(requester, _) if packet.bth.opcode.operation.is_response() => {
                let answered = requester.handle_response(env, head, packet);
                return self.end_if_broken(env, answered);
            }
            Halves::Reliable(requester, responder) => {
                if let Some(psn) = packet.carried()
                    && let Err(broken) = requester.handle_carried(env, head, psn)
                {
                    return self.end_if_broken(env, Err(broken));
                }
                responder.handle_request(env, head, packet)
            }
            Halves::Uc(_, receiver) => receiver.handle_request(env, head, packet),
            Halves::Ud(_, receiver) => receiver.handle_request(env, head, arrival, packet),
        };
        if let Some(status) = failed {
            self.fail(env, Some((status, Cause::PeerRequest)));
        }
    }

    /// Handles a request that came in a ring: [`Responder::take_request`].
    pub(crate) fn take_request(
        &mut self,
        env: &mut Env<'_>,
        packet: &Packet<'_>,
        payload: Payload<'_>,
    ) -> (Option<Taken>, Option<Status>) {
        match &mut self.halves {
            Halves::Reliable(_, responder) => responder.take_request(env, &self.head, packet, payload),
            Halves::Uc(..) | Halves::Ud(..) => (None, None),
        }
    }

    /// Handles the news of how the peer has taken a request out of a ring.
    pub(crate) fn handle_taken(&mut self, env: &mut Env<'_>, ticket: Ticket, taken: Taken) {
        let answers = matches!(self.head.state, QpState::Rts | QpState::Sqd | QpState::Sqe);
        if let Halves::Reliable(requester, _) = &mut self.halves
            && answers
            && ticket.incarnation == self.head.incarnation
        {
            let done = requester.handle_taken(env, &self.head, ticket.end, taken);
            self.end_if_broken(env, done);
        }
    }

    /// Notes that the peer sent a FLUSH with the ICRC of rxe: the requester sends its own with the same.
    pub(crate) fn settle_flush_icrc(&mut self) {
        if let Halves::Reliable(requester, _) = &mut self.halves {
            requester.flush_icrc.settle(true);
        }
    }

    /// Returns whether bytes wait to be placed at the end of their datagram.
    pub(crate) fn has_gathered(&self) -> bool {
        match &self.halves {
            Halves::Reliable(_, responder) => responder.has_gathered(),
            Halves::Uc(_, receiver) => receiver.execution.has_gathered(),
            Halves::Ud(..) => false,
        }
    }

    /// Places the bytes that wait for the end of their datagram.
    pub(crate) fn place_gathered(&mut self, env: &mut Env<'_>) {
        match &mut self.halves {
            Halves::Reliable(_, responder) => {
                if let Some(status) = responder.place_gathered(env, &self.head) {
                    self.fail(env, Some((status, Cause::PeerRequest)));
                }
            }
            Halves::Uc(_, receiver) => receiver.place_gathered(env),
            Halves::Ud(..) => {}
        }
    }

    /// Handles the end of the flush that began with this PSN.
    pub(crate) fn handle_flush(&mut self, env: &mut Env<'_>, psn: Psn, done: bool) {
        if let Halves::Reliable(_, responder) = &mut self.halves
            && responder.handle_flush(psn, done)
        {
            env.counters.sent_naks += 1;
            self.fail(env, Some((Status::RemoteOperation, Cause::PeerRequest)));
        }
    }

    /// Handles the end of an access to memory.
    pub(crate) fn handle_access(&mut self, env: &mut Env<'_>, id: AccessId, result: Result<Accessed, Fault>) {
        if let Halves::Reliable(_, responder) = &mut self.halves
            && let Some(status) = responder.handle_access(env, &self.head, id, result)
        {
            self.fail(env, Some((status, Cause::PeerRequest)));
        }
        // Requests that waited for it may have been carried out.
        if self.has_gathered() {
            self.place_gathered(env);
        }
    }

    pub(crate) fn handle_timeout(&mut self, env: &mut Env<'_>, links: &Links<'_>) {
        self.head.timer = None;
        if let Halves::Reliable(requester, _) = &mut self.halves {
            let peer = self.head.path.filter(|_| self.head.local);
            let link = peer.and_then(|path| links(path.dst, self.head.dest_qpn));
            let result = requester.handle_timeout(env, &self.head, link);
            self.end_if_broken(env, result);
        }
    }

    fn end_if_broken(&mut self, env: &mut Env<'_>, result: Result<(), Broken>) {
        if let Halves::Reliable(requester, _) = &mut self.halves
            && let Err(broken) = result
        {
            requester.end_broken(env, &self.head, broken);
            self.fail(env, Some((broken.status, Cause::OwnRequest)));
        }
    }

    /// Sets whether the QP reaches its peer through memory of this host.
    pub(crate) fn set_local(&mut self, local: bool) {
        let was_local = self.head.local;
        self.head.local = local || was_local && mutant!(LinkOutlived);
        if !local {
            self.head.lending = None;
        }
        if let Halves::Reliable(requester, _) = &mut self.halves
            && !local
        {
            if was_local {
                requester.lost();
            }
            requester.forget_grants();
        }
    }

    /// Returns the time at which [`Qp::handle_timeout`] is due, or at which the rate lets the QP send again.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let answer = match &self.halves {
            Halves::Reliable(requester, _) => requester.deadline(self.head.local),
            Halves::Uc(..) | Halves::Ud(..) => None,
        };
        earlier(answer, self.head.rate.held_until)
    }

    // Output.

    /// Returns the traffic class of the next packet to send.
    pub(crate) fn class(&self) -> usize {
        let of_request = match &self.halves {
            Halves::Ud(sender, _) => sender.class(),
            Halves::Reliable(..) | Halves::Uc(..) => None,
        };
        let of_path = || self.head.path.map(|path| class_of(path.traffic_class));
        of_request.or_else(of_path).unwrap_or(0)
    }

    /// Returns whether it has more to send than an acknowledgement that may wait.
    pub(crate) fn wants_transmit(&self) -> bool {
        self.wants() == Wants::Transmit
    }

    /// Returns the kind of packets that it has to send.
    pub(crate) fn wants(&self) -> Wants {
        let (asks, answers) = match &self.halves {
            Halves::Reliable(requester, responder) => {
                let asks = requester.wants_transmit(&self.head);
                if !asks && responder.wants_transmit(&self.head) && responder.owes_only_ack() {
                    return Wants::Acknowledgement;
                }
                (asks, !asks && responder.wants_transmit(&self.head))
            }
            Halves::Uc(sender, _) | Halves::Ud(sender, _) => (sender.wants_transmit(&self.head), false),
        };
        if asks || answers {
            Wants::Transmit
        } else {
            Wants::Nothing
        }
    }

    /// Builds the packets of a quantum of `bytes`, including acknowledgements that may wait if `all` is set.
    pub(crate) fn transmit(
        &mut self,
        env: &mut Env<'_>,
        buf: &mut TransmitBuf,
        rings: &mut dyn Rings,
        bytes: u32,
        all: bool,
    ) {
        let (before, held) = (buf.bytes().len(), self.head.rate.held_until.is_some());
        buf.begin_quantum(bytes.min(self.head.rate.burst_bytes), self.head.local);
        match &mut self.halves {
            Halves::Reliable(requester, responder) => {
                buf.carried = responder.next_ack().filter(|_| self.head.carries());
                let offered = buf.carried.is_some();
                let sent = requester.transmit(env, &self.head, buf, rings);
                if offered && buf.carried.take().is_none() {
                    responder.ack_was_carried();
                }
                self.end_if_broken(env, sent);
            }
            Halves::Uc(sender, _) | Halves::Ud(sender, _) => {
                if let Err(status) = sender.transmit(env, &self.head, buf) {
                    // The error leaves received messages as they are. 10.3.1.6.
                    if !mutant!(SqeNotEntered) {
                        let qpn = self.head.qpn.value();
                        probe!(
                            qp_state,
                            qpn,
                            probes::state(self.head.state),
                            probes::state(QpState::Sqe)
                        );
                        probe!(qp_error, qpn, probes::status(status), Cause::OwnRequest as u32);
                        let (qp_type, from) = (self.head.init.qp_type, self.head.state);
                        let to = QpState::Sqe;
                        self.head.state = to;
                        self.head.sends.close();
                        env.note(self.head.qpn, Note::Moved { qp_type, from, to });
                    }
                    sender.break_off(env, &self.head, status);
                    if mutant!(SqeIsError) {
                        self.fail(env, None);
                    }
                }
            }
        }
        // Acknowledgements follow the requests: an acknowledgement is short and ends the train. On a local link no system call
        // sends a train, but a packet costs as much work as any other: there an acknowledgement waits until the peer waits too.
        if let Halves::Reliable(_, responder) = &mut self.halves
            && (all || !self.head.local || !responder.owes_only_ack())
            && let Some(status) = responder.transmit(env, &self.head, buf)
        {
            self.fail(env, Some((status, Cause::PeerRequest)));
        }
        buf.end_quantum();
        // Acknowledgements do not wait for the rate and are not charged to it.
        if !held && !self.head.rate.is_free() {
            let sent = (buf.bytes().len() - before) as u64;
            let with = self.head.congestion(env.traffic);
            self.head.rate.charge(env.now, sent, with);
            self.head.look_at_rate(env);
        }
    }
}

/// Kind of packets that a QP has to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    Nothing,
    /// Only an acknowledgement, which may wait to be combined with later ones.
    Acknowledgement,
    Transmit,
}

impl Head {
    /// Returns whether requests carry acknowledgements now. Through memory of the host they do not: there an acknowledgement is no
    /// datagram, and waits until the peer waits too.
    fn carries(&self) -> bool {
        let agreed = self.carries_acks || self.init.qp_type == QpType::Rc && mutant!(CarriedUnagreed);
        agreed && !self.local
    }

    /// Returns the number of PSNs after the oldest missing one that are kept out of order: as many windows as let the sender
    /// continue while a packet is lost, and lost again.
    pub(crate) fn reach(&self) -> u32 {
        (REACH_WINDOWS * self.window).min(Sack::reach(self.mtu))
    }
}

/// Returns the earlier of two times, if there are any.
#[inline]
pub(crate) fn earlier(a: Option<Time>, b: Option<Time>) -> Option<Time> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, None) => a,
        (None, b) => b,
    }
}

/// Creates a completion without data.
pub(crate) fn bare_completion(qpn: Qpn, wr_id: u64, status: Status, opcode: WcOpcode) -> WorkCompletion {
    WorkCompletion {
        wr_id,
        status,
        opcode,
        byte_len: 0,
        imm: None,
        qpn,
        invalidated: None,
        src_qpn: None,
    }
}
