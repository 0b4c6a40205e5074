//! Queue pairs: requests go into the ring, everything else over the control connection.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rdmux_rnic::{
    Bind, McastError, ModifyError, Operation, PostError, Psn, QpAttributes, QpInfo, QpState, QpType, Qpn,
    RKey, RecvRequest, SendFlags, SendRequest, Sge, SgeList, Status, Target, WcOpcode, WorkCompletion,
};
use rdmux_verbs::provider::{self, Object, own};
use rdmux_verbs::sync::Mutex;
use rdmux_verbs::{AttachError, Carrier, CreateError, Features, PostListError, QpOptions};
use rdmux_wire::node::control::{Kind, Message};
use rdmux_wire::node::{
    Completion, Destination, Element, QueueId, Remote, Work, WorkData, WorkFlags, WorkOperation,
};

use super::client::{Client, no_answer};
use super::cq::{CompletionQueue, CqShared};
use super::device::{Device, ProtectionDomain};
use super::posted::{Posted, Request};
use super::rings::Data;
use super::srq::{SharedReceiveQueue, SrqShared};
use crate::control::convert::{
    attributes_to_wire, completion_of, create_error, path_of, qp_type_to_wire, state_of, state_to_wire,
};

/// The part of a queue pair that completions and events find.
#[derive(Debug)]
pub(super) struct QpShared {
    pub(super) id: u32,
    pub(super) qpn: Qpn,
    send_cq: Arc<CqShared>,
    recv_cq: Arc<CqShared>,
    sends: Mutex<Posted<WcOpcode>>,
    receives: Mutex<Posted<()>>,
    /// The queue from which it takes its receives, if it shares one.
    srq: Option<Arc<SrqShared>>,
    /// State as far as this process knows, as a code of messages.
    state: AtomicU8,
    error: Mutex<Option<Status>>,
}

impl QpShared {
    pub(super) fn state(&self) -> QpState {
        const STATES: [QpState; 7] = [
            QpState::Reset,
            QpState::Init,
            QpState::Rtr,
            QpState::Rts,
            QpState::Sqd,
            QpState::Sqe,
            QpState::Error,
        ];
        STATES[usize::from(self.state.load(Ordering::Acquire)).min(STATES.len() - 1)]
    }

    pub(super) fn set_state(&self, state: QpState) {
        self.state.store(state_to_wire(state) as u8, Ordering::Release);
    }

    /// Notes that it went to Error on its own.
    pub(super) fn fail(&self, status: Status) {
        self.set_state(QpState::Error);
        self.error.lock().get_or_insert(status);
    }

    /// Handles a completion from the ring.
    pub(super) fn complete(&self, client: &Client, completion: &Completion) {
        let mut wc = completion_of(completion, self.qpn);
        let is_receive = matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
        let failed = wc.status != Status::Success;
        if failed && wc.status != Status::Flushed {
            self.fail(wc.status);
        }
        let request = if is_receive && let Some(srq) = &self.srq {
            Some((srq.used_up(wc.wr_id), true))
        } else if is_receive {
            self.receives
                .lock()
                .complete(wc.wr_id)
                .map(|request| (request.wr_id, true))
        } else {
            let request = self.sends.lock().complete(wc.wr_id);
            request.map(|request| (request.wr_id, request.asked))
        };
        let Some((wr_id, asked)) = request else { return };
        if !asked && !failed {
            return;
        }
        wc.wr_id = wr_id;
        let cq = if is_receive { &self.recv_cq } else { &self.send_cq };
        self.deliver(client, cq, wc);
    }

    fn deliver(&self, client: &Client, cq: &CqShared, wc: WorkCompletion) {
        if !cq.deliver(client, wc) && self.state() != QpState::Error {
            // The queue pair has lost a completion.
            self.fail(Status::LocalQpOperation);
            client.raise(rdmux_verbs::AsyncEvent::QpFatal(self.qpn));
            client.send_only(&Message::Modify {
                qp: self.id,
                to: state_to_wire(QpState::Error),
                attributes: attributes_to_wire(&QpAttributes::default()),
            });
        }
    }

    /// Flushes what is in flight, after the node has gone.
    pub(super) fn flush(&self, client: &Client) {
        self.set_state(QpState::Error);
        let sends = {
            let mut sends = self.sends.lock();
            sends.flush()
        };
        for Request { wr_id, kind, .. } in sends {
            self.deliver(client, &self.send_cq, self.flushed(wr_id, kind));
        }
        let receives = {
            let mut receives = self.receives.lock();
            receives.flush()
        };
        for Request { wr_id, .. } in receives {
            self.deliver(client, &self.recv_cq, self.flushed(wr_id, WcOpcode::Recv));
        }
    }

    fn flushed(&self, wr_id: u64, opcode: WcOpcode) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            status: Status::Flushed,
            opcode,
            qpn: self.qpn,
            ..WorkCompletion::default()
        }
    }

    /// Forgets what is in flight and its completions: the queue pair was reset, or is gone.
    fn forget(&self) {
        self.sends.lock().flush();
        self.receives.lock().flush();
        self.send_cq.queue.forget(self.qpn);
        self.recv_cq.queue.forget(self.qpn);
        *self.error.lock() = None;
    }
}

#[derive(Debug)]
pub(super) struct QueuePair {
    device: Device,
    pub(super) shared: Arc<QpShared>,
    qp_type: QpType,
    max_sges: usize,
}

impl QueuePair {
    pub(super) fn new(pd: &ProtectionDomain, options: &QpOptions) -> Result<QueuePair, CreateError> {
        let unsupported = |what| CreateError::Io(std::io::Error::new(std::io::ErrorKind::Unsupported, what));
        let qp_type = qp_type_to_wire(options.qp_type)
            .ok_or_else(|| unsupported("a node offers no queue pairs of XRC"))?;
        let srq = match &options.srq {
            None => None,
            Some(srq) => {
                let srq = own::<SharedReceiveQueue>(srq).ok_or(CreateError::OtherDevice)?;
                Some(srq.shared.clone())
            }
        };
        let cq = |cq| own::<CompletionQueue>(cq).map(|cq| cq.shared.clone());
        let send_cq = cq(&options.send_cq).ok_or(CreateError::OtherDevice)?;
        let recv_cq = cq(&options.recv_cq).ok_or(CreateError::OtherDevice)?;
        let client = pd.device.client();
        let answer = client.request(&Message::CreateQp {
            pd: pd.id,
            qp_type,
            max_send_wr: options.max_send_wr,
            max_recv_wr: options.max_recv_wr,
            srq: srq.as_ref().map(|srq| srq.id),
            replays_writes: pd.device.replays_writes(),
        });
        let answer = answer.map_err(|refusal| create_error(&refusal))?;
        let Message::QpMade { id, qpn } = answer else {
            return Err(no_answer().into());
        };
        let shared = Arc::new(QpShared {
            id,
            qpn,
            send_cq,
            recv_cq,
            sends: Mutex::new(Posted::new(options.max_send_wr)),
            receives: Mutex::new(Posted::new(options.max_recv_wr)),
            srq,
            state: AtomicU8::new(state_to_wire(QpState::Reset) as u8),
            error: Mutex::new(None),
        });
        client.rings.add_qp(shared.clone());
        Ok(QueuePair {
            device: pd.device.clone(),
            shared,
            qp_type: options.qp_type,
            max_sges: client.welcome.limits.sges as usize,
        })
    }

    fn client(&self) -> &Client {
        self.device.client()
    }

    /// Puts a request into the ring, behind those before it. The caller publishes it. Waits for room if there is none.
    fn push_send(&self, request: &SendRequest) -> Result<(), PostError> {
        request.check()?;
        if request.sges.as_slice().len() > self.max_sges {
            return Err(PostError::TooManySges);
        }
        match self.shared.state() {
            QpState::Reset | QpState::Init | QpState::Rtr => return Err(PostError::WrongState),
            QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Error => {}
        }
        let (opcode, operation) = match (request.to, self.qp_type == QpType::Ud) {
            (Target::Connected, false) => self.operation(&request.operation)?,
            (Target::Datagram { path, qpn, qkey }, true) => {
                let Operation::Send { imm } = request.operation else {
                    return Err(PostError::Invalid);
                };
                if request.sges.bytes() > u64::from(self.client().welcome.active_mtu.bytes()) {
                    return Err(PostError::TooLong);
                }
                return self.client().rings.with_room(self.client(), || {
                    // Held until the request is in the ring, so that no other thread has the handle destroyed before.
                    let mut handles = self.client().handles.lock();
                    let handle = handles.get(self.client(), path.dst, path.traffic_class);
                    let handle = handle.map_err(|refusal| PostError::Refused(refusal.number()))?;
                    let to = Destination { handle, qpn, qkey };
                    self.try_push_send(request, WcOpcode::Send, WorkOperation::Datagram { to, imm })
                });
            }
            _ => return Err(PostError::Invalid),
        };
        self.client()
            .rings
            .with_room(self.client(), || self.try_push_send(request, opcode, operation))
    }

    /// Puts a request of a kind into the ring; returns false if there is no room.
    fn try_push_send(
        &self,
        request: &SendRequest,
        opcode: WcOpcode,
        operation: WorkOperation,
    ) -> Result<bool, PostError> {
        let mut sends = self.shared.sends.lock();
        let asked = request.flags.contains(SendFlags::SIGNALED);
        let place = sends.push(Request {
            wr_id: request.wr_id,
            asked,
            kind: opcode,
        });
        let place = place.ok_or(PostError::QueueFull)?;
        if self.client().has_ended() {
            sends.take_back();
            drop(sends);
            let wc = self.shared.flushed(request.wr_id, opcode);
            self.shared.deliver(self.client(), &self.shared.send_cq, wc);
            return Ok(true);
        }
        let mut flags = WorkFlags::from_bits_truncate(request.flags.bits() as u8);
        flags.set(WorkFlags::SIGNALED, place.asks);
        let pushed = self.push(operation, place.number, flags, &request.sges);
        if pushed != Ok(true) {
            sends.take_back();
        }
        pushed
    }

    /// Puts a receive into the ring. Waits for room if there is none.
    fn push_recv(&self, request: &RecvRequest) -> Result<(), PostError> {
        request.check()?;
        if request.sges.as_slice().len() > self.max_sges {
            return Err(PostError::TooManySges);
        }
        if self.shared.srq.is_some() {
            return Err(PostError::HasSrq);
        }
        if self.shared.state() == QpState::Reset {
            return Err(PostError::WrongState);
        }
        let client = self.client();
        client.rings.with_room(client, || self.try_push_recv(request))
    }

    /// Puts a receive into the ring; returns false if there is no room.
    fn try_push_recv(&self, request: &RecvRequest) -> Result<bool, PostError> {
        let mut receives = self.shared.receives.lock();
        let place = receives.push(Request {
            wr_id: request.wr_id,
            asked: true,
            kind: (),
        });
        let place = place.ok_or(PostError::QueueFull)?;
        if self.client().has_ended() {
            receives.take_back();
            drop(receives);
            let wc = self.shared.flushed(request.wr_id, WcOpcode::Recv);
            self.shared.deliver(self.client(), &self.shared.recv_cq, wc);
            return Ok(true);
        }
        let (number, flags) = (place.number, WorkFlags::empty());
        let pushed = self.push(WorkOperation::Recv, number, flags, &request.sges);
        if pushed != Ok(true) {
            receives.take_back();
        }
        pushed
    }

    fn push(
        &self,
        operation: WorkOperation,
        number: u64,
        flags: WorkFlags,
        sges: &SgeList,
    ) -> Result<bool, PostError> {
        push(self.client(), self.shared.id, operation, number, flags, sges)
    }

    fn operation(&self, operation: &Operation) -> Result<(WcOpcode, WorkOperation), PostError> {
        let needs = |feature: Features| {
            let has = self.client().welcome.features.contains(feature);
            has.then_some(())
                .ok_or(PostError::Unsupported(feature.first_name()))
        };
        let to = |va: u64, rkey: RKey| Remote { va, rkey };
        Ok(match *operation {
            Operation::Send { imm } => (WcOpcode::Send, WorkOperation::Send { imm }),
            Operation::SendInvalidate { rkey } => (WcOpcode::Send, WorkOperation::SendInvalidate { rkey }),
            Operation::Write { va, rkey, imm } => {
                let remote = to(va, rkey);
                (WcOpcode::Write, WorkOperation::Write { remote, imm })
            }
            Operation::Read { va, rkey } => {
                let remote = to(va, rkey);
                (WcOpcode::Read, WorkOperation::Read { remote })
            }
            Operation::CompareSwap {
                va,
                rkey,
                compare,
                swap,
            } => {
                needs(Features::ATOMIC)?;
                let operation = WorkOperation::CompareSwap {
                    remote: to(va, rkey),
                    compare,
                    swap,
                };
                (WcOpcode::CompareSwap, operation)
            }
            Operation::FetchAdd { va, rkey, add } => {
                needs(Features::ATOMIC)?;
                let remote = to(va, rkey);
                (WcOpcode::FetchAdd, WorkOperation::FetchAdd { remote, add })
            }
            Operation::AtomicWrite { va, rkey } => {
                needs(Features::ATOMIC_WRITE)?;
                let remote = to(va, rkey);
                (WcOpcode::AtomicWrite, WorkOperation::AtomicWrite { remote })
            }
            Operation::Flush {
                va,
                rkey,
                length,
                placement,
                selectivity,
            } => {
                needs(Features::FLUSH_GLOBAL)?;
                let operation = WorkOperation::Flush {
                    remote: to(va, rkey),
                    length,
                    placement,
                    selectivity,
                };
                (WcOpcode::Flush, operation)
            }
            Operation::Bind(_) => {
                needs(Features::MW_TYPE_2)?;
                return Err(PostError::Invalid);
            }
            Operation::Register(_) | Operation::LocalInvalidate { .. } => {
                needs(Features::FAST_REGISTER)?;
                return Err(PostError::Invalid);
            }
        })
    }

    fn publish(&self) {
        self.client().rings.publish();
    }
}

/// Puts a request for a queue into the ring; returns false if there is no room.
pub(super) fn push(
    client: &Client,
    queue: u32,
    operation: WorkOperation,
    number: u64,
    flags: WorkFlags,
    sges: &SgeList,
) -> Result<bool, PostError> {
    const NONE: Element = Element {
        addr: 0,
        lkey: rdmux_verbs::LKey(0),
        length: 0,
    };
    let mut elements = [NONE; Work::ELEMENTS_MAX];
    let (data, given) = match sges.as_inline() {
        Some(inline) => (Data::Inline(inline), WorkData::Inline(inline.len() as u16)),
        None => {
            let list = sges.as_slice();
            for (element, sge) in elements.iter_mut().zip(list) {
                *element = element_of(sge);
            }
            let count = list.len().min(Work::ELEMENTS_MAX);
            (
                Data::Elements(&elements[..count]),
                WorkData::Elements(count as u16),
            )
        }
    };
    let work = Work {
        queue: QueueId(queue),
        wr_id: number,
        flags,
        operation,
        data: given,
    };
    client.rings.push(&work, data)
}

fn element_of(sge: &Sge) -> Element {
    Element {
        addr: sge.addr,
        lkey: rdmux_verbs::LKey(sge.lkey),
        length: sge.length,
    }
}

impl provider::QueuePair for QueuePair {
    fn qpn(&self) -> Qpn {
        self.shared.qpn
    }

    fn post_send(&self, request: SendRequest) -> Result<(), PostError> {
        self.push_send(&request)?;
        self.publish();
        Ok(())
    }

    fn post_send_list(&self, requests: Vec<SendRequest>) -> Result<(), PostListError> {
        let mut posted = requests.iter().zip(0..).map(|(request, index)| {
            let sent = self.push_send(request);
            sent.map_err(|source| PostListError { index, source })
        });
        let result = posted.try_for_each(|posted| posted);
        self.publish();
        result
    }

    fn bind_mw(&self, _wr_id: u64, _bind: Bind, _flags: SendFlags) -> Result<RKey, PostError> {
        Err(PostError::Unsupported(Features::MW_TYPE_1.first_name()))
    }

    fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        self.push_recv(&request)?;
        self.publish();
        Ok(())
    }

    fn modify(&self, to: QpState, attributes: &QpAttributes) -> Result<(), ModifyError> {
        let from = self.query().map_or(QpState::Error, |info| info.state);
        attributes.check(self.qp_type, from, to)?;
        let answer = self.client().request(&Message::Modify {
            qp: self.shared.id,
            to: state_to_wire(to),
            attributes: attributes_to_wire(attributes),
        });
        answer.map_err(|refusal| ModifyError::Refused(refusal.number()))?;
        self.shared.set_state(to);
        if to == QpState::Reset {
            let _ = self.client().rings.take(self.client());
            self.shared.forget();
        }
        Ok(())
    }

    fn retire(&self) {
        let _ = self.client().request(&Message::Retire { qp: self.shared.id });
        let _ = self.client().rings.take(self.client());
        self.shared.set_state(QpState::Error);
        self.shared.forget();
    }

    fn query(&self) -> Option<QpInfo> {
        match self.client().request(&Message::Query { qp: self.shared.id }) {
            Ok(Message::QpInfo {
                state,
                dest_qpn,
                path,
                path_mtu,
                qkey,
                ..
            }) => Some(QpInfo {
                qp_type: self.qp_type,
                state: state_of(state),
                dest_qpn,
                path: path.as_ref().map(path_of),
                path_mtu,
                qkey,
                send_outstanding: self.shared.sends.lock().len(),
                recv_posted: self.shared.receives.lock().len(),
            }),
            _ => None,
        }
    }

    fn carrier(&self) -> Option<Carrier> {
        match self.client().request(&Message::Query { qp: self.shared.id }) {
            Ok(Message::QpInfo {
                carrier: Some(carrier),
                ..
            }) => Some(match carrier.as_str() {
                "shared memory" => Carrier::SharedMemory,
                "RNIC" => Carrier::Rnic,
                _ => Carrier::Udp(carrier),
            }),
            _ => None,
        }
    }

    fn error(&self) -> Option<Status> {
        *self.shared.error.lock()
    }

    fn ready_datagram(&self, qkey: u32) -> Result<(), ModifyError> {
        let init = QpAttributes {
            qkey: Some(qkey),
            ..QpAttributes::default()
        };
        let rts = QpAttributes {
            sq_psn: Some(Psn::new(RandomState::new().build_hasher().finish() as u32)),
            ..QpAttributes::default()
        };
        self.modify(QpState::Init, &init)?;
        self.modify(QpState::Rtr, &QpAttributes::default())?;
        self.modify(QpState::Rts, &rts)
    }

    fn attach_mcast(&self, group: IpAddr) -> Result<(), AttachError> {
        let source = rustix::io::Errno::OPNOTSUPP.into();
        Err(match self.qp_type {
            QpType::Ud => AttachError::Join { group, source },
            _ => McastError::NotUd.into(),
        })
    }

    fn detach_mcast(&self, _group: IpAddr) -> Result<(), McastError> {
        Err(McastError::NotAttached)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let client = self.client();
        client.destroy(Kind::Qp, self.shared.id);
        client.rings.remove_qp(client, &self.shared);
        client.forget_events(Object::Qp(self.shared.qpn));
    }
}
