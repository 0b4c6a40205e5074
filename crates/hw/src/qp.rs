//! Queue pairs: translates requests for the library, and the library's errors for callers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Arc;

use rdmux_rnic::{
    Bind, McastError, ModifyError, Operation, Path, PostError, Psn, QpAttributes, QpInfo, QpState, QpType,
    Qpn, RKey, RecvRequest, SGE_MAX, SendFlags, SendRequest, Status, Target,
};
use rdmux_verbs::abi::{self, qp_attr, qp_type as types, wr_opcode};
use rdmux_verbs::provider::{self, CompletionQueue as _, SharedReceiveQueue as _, own};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{AttachError, Carrier, CreateError, Features, PostListError, QpOptions};
use rdmux_wire::cm::{from_gid, to_gid};
use rdmux_wire::roce::PathMtu;
use rustix::io::Errno;

use super::cq::CompletionQueue;
use super::device::{Device, Listed, ProtectionDomain, XrcDomain};
use super::objects::{Ah, BindRange, ExtendedRequest, Mr, Qp, QpInit, WorkRequest, WorkTarget};
use super::resources;
use super::srq::SharedReceiveQueue;

/// Sizes that a queue pair is asked to hold of one request, the largest first: elements, and bytes inline. Some devices have room
/// for many requests or for large ones only.
const SIZES: [(u32, u32); 6] = [(32, 1024), (16, 512), (8, 256), (4, 128), (2, 64), (1, 0)];
/// Least capacity for address handles.
const HANDLES_MIN: usize = 64;

#[derive(Debug)]
struct Inner {
    device: Device,
    pd: ProtectionDomain,
    qp: Arc<Qp>,
    qp_type: QpType,
    takes_from_srq: bool,
    /// Held while a request is posted, so that requests of the two interfaces do not mix.
    handles: Mutex<Handles<Ah>>,
    groups: Mutex<HashMap<IpAddr, UdpSocket>>,
    _listed: Listed,
}

/// Queue pair.
#[derive(Clone, Debug)]
pub(crate) struct QueuePair(Arc<Inner>);

/// Address handles that datagrams have used. A request names a [`Way`], but the library a handle, which must live until the request
/// is done.
#[derive(Debug)]
struct Handles<T> {
    /// Each with the number of its last use; 0 if no request has used it yet.
    by_way: HashMap<Way, (T, u64)>,
    /// More than the send queue holds: a handle that this many requests have not used belongs to none of the requests in the queue.
    capacity: usize,
    /// Number of requests that were posted.
    uses: u64,
}

/// An address, and the traffic class for it.
type Way = (IpAddr, u8);

impl<T> Handles<T> {
    /// Returns the handle of a way, for a request whose outcome the caller passes to [`Handles::tried`] next.
    fn of(&mut self, way: Way, make: impl FnOnce() -> Result<T, PostError>) -> Result<&T, PostError> {
        let entry = match self.by_way.entry(way) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert((make()?, 0)),
        };
        Ok(&entry.0)
    }

    /// Records that the request of a way was posted, or refused: only posted ones push others out of the send queue.
    fn tried(&mut self, way: Way, is_posted: bool) {
        let Some((_, used)) = self.by_way.get_mut(&way) else {
            return;
        };
        if is_posted {
            self.uses += 1;
            *used = self.uses;
        } else if *used == 0 {
            self.by_way.remove(&way);
        }
        if self.by_way.len() > self.capacity {
            let oldest = self.by_way.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(way, _)| *way) {
                self.by_way.remove(&oldest);
            }
        }
    }
}

/// Makes the handle of a way.
fn handle(pd: &ProtectionDomain, (dst, traffic_class): Way) -> Result<Ah, PostError> {
    let attr = pd.device().route_to(dst, traffic_class);
    let attr = attr.ok_or(PostError::Unsupported(Features::BY_ADDRESS.first_name()))?;
    Ah::new(pd.object(), attr).map_err(refused)
}

fn refused(error: Errno) -> PostError {
    match error {
        Errno::NOMEM | Errno::AGAIN | Errno::NOBUFS => PostError::QueueFull,
        Errno::INVAL => PostError::Invalid,
        other => PostError::Refused(other.raw_os_error()),
    }
}

fn type_number(qp_type: QpType) -> u32 {
    match qp_type {
        QpType::Rc => types::RC,
        QpType::Uc => types::UC,
        QpType::Ud => types::UD,
        QpType::XrcSend => types::XRC_SEND,
        QpType::XrcRecv => types::XRC_RECV,
    }
}

pub(super) fn state_number(state: QpState) -> u32 {
    match state {
        QpState::Reset => 0,
        QpState::Init => 1,
        QpState::Rtr => 2,
        QpState::Rts => 3,
        QpState::Sqd => 4,
        QpState::Sqe => 5,
        QpState::Error => 6,
    }
}

pub(super) fn state_of(number: u32) -> QpState {
    match number {
        0 => QpState::Reset,
        1 => QpState::Init,
        2 => QpState::Rtr,
        3 => QpState::Rts,
        4 => QpState::Sqd,
        5 => QpState::Sqe,
        _ => QpState::Error,
    }
}

impl QueuePair {
    /// Makes a queue pair in a protection domain.
    pub(super) fn new(pd: &ProtectionDomain, options: &QpOptions) -> Result<QueuePair, CreateError> {
        let device = pd.device();
        let qp_type = options.qp_type;
        let feature = match qp_type {
            QpType::Rc => Features::empty(),
            QpType::Uc => Features::UC,
            QpType::Ud => Features::UD,
            QpType::XrcSend | QpType::XrcRecv => Features::XRC,
        };
        if !device.features().contains(feature) {
            return Err(CreateError::Io(device.lacks(feature).into()));
        }
        let send_cq = own::<CompletionQueue>(&options.send_cq).ok_or(CreateError::OtherDevice)?;
        let recv_cq = own::<CompletionQueue>(&options.recv_cq).ok_or(CreateError::OtherDevice)?;
        let srq = options.srq.as_ref().and_then(own::<SharedReceiveQueue>);
        let xrcd = options.xrcd.as_ref().and_then(own::<XrcDomain>);
        let reliable = matches!(qp_type, QpType::Rc | QpType::XrcSend);
        let sges_max = u32::try_from(device.0.attr.orig_attr.max_sge)
            .unwrap_or(1)
            .clamp(1, SGE_MAX as u32);
        let mut made = Err(Errno::INVAL);
        for (sges, inline) in SIZES {
            let sges = sges.min(sges_max);
            let has_srq = srq.is_some();
            let init = QpInit {
                qp_type: type_number(qp_type),
                send_cq: send_cq.object().clone(),
                recv_cq: recv_cq.object().clone(),
                srq: srq.map(|srq| srq.object().clone()),
                xrcd: xrcd.map(|xrcd| xrcd.object().clone()),
                cap: abi::QpCap {
                    max_send_wr: options.max_send_wr.max(1),
                    max_recv_wr: if has_srq { 0 } else { options.max_recv_wr.max(1) },
                    max_send_sge: sges,
                    max_recv_sge: if has_srq { 0 } else { sges },
                    max_inline_data: inline,
                },
                extended: if reliable { device.extended_operations() } else { 0 },
            };
            made = Qp::new(pd.object(), init);
            // A device refuses sizes that it has no room for as invalid or as too much memory.
            if !matches!(made, Err(Errno::INVAL | Errno::NOMEM | Errno::TOOBIG)) {
                break;
            }
        }
        let qp = made.map_err(|error| match error {
            Errno::INVAL => CreateError::NoRoom,
            other => device.create_error(other, feature),
        })?;
        // A number that is used again begins without the error that was recorded for it.
        device.forget_error(qp.number());
        let qp = Arc::new(qp);
        let entry = resources::ObjectEntry::Qp {
            number: qp.number(),
            qp: Arc::downgrade(&qp),
            qp_type,
            pdn: pd.number(),
            send_cqn: send_cq.cqn().0,
            recv_cqn: recv_cq.cqn().0,
            srqn: srq.map(|srq| srq.srqn().0),
        };
        let capacity = (qp.cap().max_send_wr as usize + 1).max(HANDLES_MIN);
        Ok(QueuePair(Arc::new(Inner {
            device: device.clone(),
            pd: pd.clone(),
            qp,
            qp_type,
            takes_from_srq: srq.is_some() || qp_type == QpType::XrcRecv,
            handles: Mutex::new(Handles {
                by_way: HashMap::new(),
                capacity,
                uses: 0,
            }),
            groups: Mutex::default(),
            _listed: Listed::new(device, entry),
        })))
    }

    pub(crate) fn qp_type(&self) -> QpType {
        self.0.qp_type
    }

    pub(crate) fn has_srq(&self) -> bool {
        self.0.takes_from_srq
    }

    pub(super) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(super) fn object(&self) -> &Arc<Qp> {
        &self.0.qp
    }

    fn handles(&self) -> MutexGuard<'_, Handles<Ah>> {
        self.0.handles.lock()
    }

    /// Adds the state to the library's error, which does not say which rule was broken: programs can do something about a wrong
    /// state.
    fn by_state(&self, error: PostError) -> PostError {
        if error == PostError::Invalid && !self.sends() {
            return PostError::WrongState;
        }
        error
    }

    /// Checks what can be checked of a request without the device.
    fn check(&self, request: &SendRequest) -> Result<(), PostError> {
        request.check()?;
        let cap = self.0.qp.cap();
        if request.sges.as_slice().len() > cap.max_send_sge as usize {
            return Err(PostError::TooManySges);
        }
        let inline_max = match request.operation {
            // Its bytes are part of the request on every device.
            Operation::AtomicWrite { .. } => 8,
            _ => cap.max_inline_data as usize,
        };
        if request
            .sges
            .as_inline()
            .is_some_and(|bytes| bytes.len() > inline_max)
        {
            return Err(PostError::TooLong);
        }
        self.check_target(request)
    }

    fn sends(&self) -> bool {
        let state = self
            .0
            .qp
            .query(qp_attr::STATE)
            .map(|attr| state_of(attr.qp_state));
        matches!(
            state,
            Ok(QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Error)
        )
    }

    fn check_target(&self, request: &SendRequest) -> Result<(), PostError> {
        let fits = match request.to {
            Target::Connected => {
                matches!(self.0.qp_type, QpType::Rc | QpType::Uc) || request.operation.is_local()
            }
            Target::Datagram { .. } => self.0.qp_type == QpType::Ud,
            Target::Srq(_) => self.0.qp_type == QpType::XrcSend,
        };
        let reliable = matches!(self.0.qp_type, QpType::Rc | QpType::XrcSend);
        let carries = match request.operation {
            Operation::Send { .. } => true,
            Operation::Write { .. } => self.0.qp_type != QpType::Ud,
            Operation::Bind(_) | Operation::LocalInvalidate { .. } | Operation::Register(_) => {
                self.0.qp_type != QpType::Ud
            }
            _ => reliable,
        };
        if fits && carries && self.0.qp_type != QpType::XrcRecv {
            Ok(())
        } else {
            Err(PostError::Invalid)
        }
    }

    /// Returns a self-contained request in the library's form; `None`: it is not self-contained.
    fn plain<'a>(&self, request: &'a SendRequest) -> Result<Option<WorkRequest<'a>>, PostError> {
        let srqn = match &request.to {
            Target::Connected => 0,
            Target::Srq(number) => number.0,
            Target::Datagram { .. } => return Ok(None),
        };
        let translated = self.translate(&request.operation)?;
        Ok(translated.map(|(opcode, imm, work)| WorkRequest {
            wr_id: request.wr_id,
            opcode,
            flags: request.flags.bits(),
            imm,
            sges: &request.sges,
            work,
            srqn,
        }))
    }

    /// Returns the library's number for an operation, its immediate data or key, and its subject; `None`: the operation names a
    /// window, or belongs to the extended interface.
    fn translate(&self, operation: &Operation) -> Result<Option<(u32, u32, WorkTarget<'static>)>, PostError> {
        Ok(Some(match operation {
            Operation::Send { imm: None } => (wr_opcode::SEND, 0, WorkTarget::List),
            Operation::Send { imm: Some(imm) } => (wr_opcode::SEND_WITH_IMM, imm.to_be(), WorkTarget::List),
            Operation::SendInvalidate { rkey } => (wr_opcode::SEND_WITH_INV, rkey.0, WorkTarget::List),
            Operation::Write { va, rkey, imm: None } => (wr_opcode::RDMA_WRITE, 0, rdma(*va, *rkey)),
            Operation::Write {
                va,
                rkey,
                imm: Some(imm),
            } => (wr_opcode::RDMA_WRITE_WITH_IMM, imm.to_be(), rdma(*va, *rkey)),
            Operation::Read { va, rkey } => (wr_opcode::RDMA_READ, 0, rdma(*va, *rkey)),
            Operation::CompareSwap {
                va,
                rkey,
                compare,
                swap,
            } => {
                self.needs(Features::ATOMIC)?;
                let work = WorkTarget::Atomic {
                    va: *va,
                    rkey: rkey.0,
                    compare_add: *compare,
                    swap: *swap,
                };
                (wr_opcode::ATOMIC_CMP_AND_SWP, 0, work)
            }
            Operation::FetchAdd { va, rkey, add } => {
                self.needs(Features::ATOMIC)?;
                let work = WorkTarget::Atomic {
                    va: *va,
                    rkey: rkey.0,
                    compare_add: *add,
                    swap: 0,
                };
                (wr_opcode::ATOMIC_FETCH_AND_ADD, 0, work)
            }
            Operation::LocalInvalidate { rkey } => (wr_opcode::LOCAL_INV, rkey.0, WorkTarget::List),
            Operation::Register(_) => {
                return Err(PostError::Unsupported(Features::FAST_REGISTER.first_name()));
            }
            Operation::AtomicWrite { .. } | Operation::Flush { .. } | Operation::Bind(_) => return Ok(None),
        }))
    }

    fn post_locked(&self, handles: &mut Handles<Ah>, request: &SendRequest) -> Result<(), PostError> {
        if let Some(plain) = self.plain(request)? {
            return self.0.qp.post_send(&plain).map_err(refused);
        }
        let registry = &self.0.pd.registry;
        let (wr_id, flags) = (request.wr_id, request.flags.bits());
        let post = |opcode: u32, imm: u32, work: WorkTarget<'_>| {
            let request = WorkRequest {
                wr_id,
                opcode,
                flags,
                imm,
                sges: &request.sges,
                work,
                srqn: 0,
            };
            self.0.qp.post_send(&request).map_err(refused)
        };
        match &request.operation {
            Operation::AtomicWrite { va, rkey } => {
                self.needs(Features::ATOMIC_WRITE)?;
                let extended = ExtendedRequest::AtomicWrite {
                    va: *va,
                    rkey: rkey.0,
                    bytes: registry.eight_bytes(&request.sges)?,
                };
                self.0.qp.post_extended(wr_id, flags, extended).map_err(refused)
            }
            Operation::Flush {
                va,
                rkey,
                length,
                placement,
                selectivity,
            } => {
                for kind in [rdmux_rnic::Placement::GLOBAL, rdmux_rnic::Placement::PERSISTENT] {
                    if placement.contains(kind) {
                        self.needs(flush_feature(kind))?;
                    }
                }
                let extended = ExtendedRequest::Flush {
                    va: *va,
                    rkey: rkey.0,
                    length: *length,
                    placement: placement.bits(),
                    selectivity: *selectivity as u8,
                };
                self.0.qp.post_extended(wr_id, flags, extended).map_err(refused)
            }
            Operation::Bind(bind) => {
                self.needs(Features::MW_TYPE_2)?;
                registry.bind(bind, |window, region| {
                    let work = WorkTarget::Bind {
                        window,
                        rkey: bind.window.0,
                        range: range_of(bind, region),
                    };
                    post(wr_opcode::BIND_MW, 0, work)
                })
            }
            // The remaining requests go to the targets that they name.
            operation => {
                let Target::Datagram { path, qpn, qkey } = &request.to else {
                    return Err(PostError::Invalid);
                };
                let Some((opcode, imm, _)) = self.translate(operation)? else {
                    return Err(PostError::Invalid);
                };
                let way = (path.dst, path.traffic_class);
                let work = WorkTarget::Datagram {
                    ah: handles.of(way, || handle(&self.0.pd, way))?,
                    qpn: qpn.value(),
                    qkey: *qkey,
                };
                let posted = post(opcode, imm, work);
                handles.tried(way, posted.is_ok());
                posted
            }
        }
    }

    fn needs(&self, feature: Features) -> Result<(), PostError> {
        let has = self.0.device.features().contains(feature);
        has.then_some(())
            .ok_or(PostError::Unsupported(feature.first_name()))
    }

    /// Returns the attributes in the library's form. Those that only two ends that are both rdmux agree on have no meaning here.
    fn attributes(
        &self,
        from: QpState,
        to: QpState,
        given: &QpAttributes,
    ) -> Result<(abi::QpAttr, u32), ModifyError> {
        let mut attr = abi::QpAttr {
            qp_state: state_number(to),
            ..Default::default()
        };
        let mut mask = qp_attr::STATE;
        if (from, to) == (QpState::Reset, QpState::Init) {
            attr.port_num = self.0.device.0.port;
            mask |= qp_attr::PORT | qp_attr::PKEY_INDEX;
        }
        macro_rules! set {
            ($($value:expr => $field:ident, $bit:ident;)*) => {$(
                if let Some(value) = $value {
                    attr.$field = value;
                    mask |= qp_attr::$bit;
                }
            )*};
        }
        set! {
            given.access.map(|access| self.0.device.rights(access).bits()) => qp_access_flags, ACCESS_FLAGS;
            given.qkey => qkey, QKEY;
            given.path_mtu.and_then(PathMtu::from_bytes).map(|mtu| mtu.code().into()) => path_mtu, PATH_MTU;
            given.dest_qpn.map(Qpn::value) => dest_qp_num, DEST_QPN;
            given.rq_psn.map(Psn::value) => rq_psn, RQ_PSN;
            given.sq_psn.map(Psn::value) => sq_psn, SQ_PSN;
            given.max_dest_rd_atomic => max_dest_rd_atomic, MAX_DEST_RD_ATOMIC;
            given.max_rd_atomic => max_rd_atomic, MAX_QP_RD_ATOMIC;
            given.min_rnr_timer => min_rnr_timer, MIN_RNR_TIMER;
            given.timeout => timeout, TIMEOUT;
            given.retry_count => retry_cnt, RETRY_CNT;
            given.rnr_retry => rnr_retry, RNR_RETRY;
        }
        if let Some(path) = given.path {
            let route = self.0.device.route_to(path.dst, path.traffic_class);
            attr.ah_attr = route.ok_or(ModifyError::Value("path"))?;
            mask |= qp_attr::AV;
        }
        Ok((attr, mask))
    }

    /// Moves it to Error, whatever state it is in.
    pub(super) fn fail(qp: &Qp) {
        let attr = abi::QpAttr {
            qp_state: state_number(QpState::Error),
            ..Default::default()
        };
        // The library refuses this only for a queue pair that has ended already.
        let _ = qp.modify(attr, qp_attr::STATE);
    }

    fn groups(&self) -> MutexGuard<'_, HashMap<IpAddr, UdpSocket>> {
        self.0.groups.lock()
    }
}

impl provider::QueuePair for QueuePair {
    fn qpn(&self) -> Qpn {
        Qpn::new(self.0.qp.number())
    }

    fn post_send(&self, request: SendRequest) -> Result<(), PostError> {
        self.check(&request)?;
        let mut handles = self.handles();
        self.post_locked(&mut handles, &request)
            .map_err(|error| self.by_state(error))
    }

    fn post_send_list(&self, requests: Vec<SendRequest>) -> Result<(), PostListError> {
        let mut handles = self.handles();
        let mut at = 0;
        while at < requests.len() {
            // Requests that one call takes. Those that name windows or handles, or belong to the extended interface, are posted one
            // by one.
            let chained = |request| self.check(request).and_then(|()| self.plain(request));
            let chain = requests[at..].iter().map(chained);
            let chain: Vec<WorkRequest<'_>> = chain.map_while(|request| request.ok().flatten()).collect();
            let (taken, posted) = if chain.is_empty() {
                let request = &requests[at];
                let posted = self.check(request);
                (
                    1,
                    posted
                        .and_then(|()| self.post_locked(&mut handles, request))
                        .map_err(|why| (0, why)),
                )
            } else {
                let posted = self.0.qp.post_send_chain(&chain);
                (
                    chain.len(),
                    posted.map_err(|(place, error)| (place, refused(error))),
                )
            };
            posted.map_err(|(place, why)| PostListError {
                index: at + place,
                source: self.by_state(why),
            })?;
            at += taken;
        }
        Ok(())
    }

    fn carrier(&self) -> Option<Carrier> {
        self.query()?.path.map(|_| Carrier::Rnic)
    }

    /// Posts the binding of a type 1 window; returns the key by which peers reach the range.
    fn bind_mw(&self, wr_id: u64, bind: Bind, flags: SendFlags) -> Result<RKey, PostError> {
        self.needs(Features::MW_TYPE_1)?;
        let registry = &self.0.pd.registry;
        let _one_at_a_time = self.handles();
        let key = registry.bind(&bind, |window, region| {
            let bound = self
                .0
                .qp
                .bind_mw(wr_id, flags.bits(), window, range_of(&bind, region));
            bound.map_err(refused)
        })?;
        registry.rekey_window(bind.window.0, key);
        Ok(RKey(key))
    }

    fn post_recv(&self, request: RecvRequest) -> Result<(), PostError> {
        request.check()?;
        if self.0.takes_from_srq {
            return Err(PostError::HasSrq);
        }
        if request.sges.as_slice().len() > self.0.qp.cap().max_recv_sge as usize {
            return Err(PostError::TooManySges);
        }
        let posted = self.0.qp.post_recv(request.wr_id, &request.sges).map_err(refused);
        if posted == Err(PostError::Invalid) && self.query().is_some_and(|info| info.state == QpState::Reset)
        {
            return Err(PostError::WrongState);
        }
        posted
    }

    /// Puts the queue pair in Error for good.
    fn retire(&self) {
        // A connection cannot bring up a queue pair that is in Error.
        for state in [QpState::Reset, QpState::Error] {
            let _ = self.modify(state, &QpAttributes::default());
        }
    }

    fn modify(&self, to: QpState, attributes: &QpAttributes) -> Result<(), ModifyError> {
        let qp = &self.0.qp;
        let failed = |error: Errno| ModifyError::Refused(error.raw_os_error());
        let from = state_of(qp.query(qp_attr::STATE).map_err(failed)?.qp_state);
        attributes.check(self.0.qp_type, from, to)?;
        let (attr, mask) = self.attributes(from, to, attributes)?;
        qp.modify(attr, mask).map_err(failed)?;
        if let Some(bps) = attributes.rate_limit_bps {
            let rate = u32::try_from(bps.div_ceil(1000)).unwrap_or(u32::MAX);
            qp.limit_rate(rate).map_err(failed)?;
        }
        if to == QpState::Reset {
            self.0.device.forget_error(qp.number());
        }
        Ok(())
    }

    /// Returns what is known about it. Devices do not report how many requests are in flight.
    fn query(&self) -> Option<QpInfo> {
        let mask = qp_attr::STATE | qp_attr::DEST_QPN | qp_attr::AV | qp_attr::PATH_MTU | qp_attr::QKEY;
        let attr = self.0.qp.query(mask).ok()?;
        let state = state_of(attr.qp_state);
        let address = from_gid(attr.ah_attr.grh.dgid.0.into());
        let has_path = attr.ah_attr.is_global != 0 && attr.ah_attr.grh.dgid.0 != [0; 16];
        Some(QpInfo {
            qp_type: self.0.qp_type,
            state,
            dest_qpn: Qpn::new(attr.dest_qp_num),
            path: (has_path && self.0.qp_type != QpType::Ud).then_some(Path {
                src: self.0.device.address(),
                dst: address,
                src_port: 0,
                traffic_class: attr.ah_attr.grh.traffic_class,
            }),
            path_mtu: PathMtu::from_code(attr.path_mtu as u8).map_or(0, PathMtu::bytes),
            qkey: attr.qkey,
            send_outstanding: 0,
            recv_posted: 0,
        })
    }

    /// Returns why it went to Error on its own, as far as its completions reported it.
    fn error(&self) -> Option<Status> {
        self.0.device.error_of(self.0.qp.number())
    }

    fn ready_datagram(&self, qkey: u32) -> Result<(), ModifyError> {
        let init = QpAttributes {
            qkey: Some(qkey),
            ..Default::default()
        };
        let rts = QpAttributes {
            sq_psn: Some(Psn::new(0)),
            ..Default::default()
        };
        self.modify(QpState::Init, &init)?;
        self.modify(QpState::Rtr, &QpAttributes::default())?;
        self.modify(QpState::Rts, &rts)
    }

    /// Attaches it to a multicast group; the host joins it on the device's interface.
    fn attach_mcast(&self, group: IpAddr) -> Result<(), AttachError> {
        let address = self.0.device.address();
        if !group.is_multicast() || group.is_ipv4() != address.is_ipv4() {
            return Err(McastError::BadAddress.into());
        }
        if self.0.qp_type != QpType::Ud {
            return Err(McastError::NotUd.into());
        }
        let mut groups = self.groups();
        if groups.contains_key(&group) {
            return Ok(());
        }
        let failed = |source| AttachError::Join { group, source };
        if !self.0.device.features().contains(Features::MULTICAST) {
            return Err(failed(self.0.device.lacks(Features::MULTICAST).into()));
        }
        let socket = join(group, address).map_err(failed)?;
        let attached = self.0.qp.attach_mcast(to_gid(group).octets());
        attached.map_err(|error| failed(error.into()))?;
        groups.insert(group, socket);
        Ok(())
    }

    fn detach_mcast(&self, group: IpAddr) -> Result<(), McastError> {
        let socket = self.groups().remove(&group).ok_or(McastError::NotAttached)?;
        let detached = self.0.qp.detach_mcast(to_gid(group).octets());
        drop(socket);
        detached.map_err(|_| McastError::NotAttached)
    }
}

/// Joins a group on the interface that has an address, until the socket is closed.
fn join(group: IpAddr, own: IpAddr) -> std::io::Result<UdpSocket> {
    match (group, own) {
        (IpAddr::V4(group), IpAddr::V4(own)) => {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.join_multicast_v4(&group, &own)?;
            Ok(socket)
        }
        (IpAddr::V6(group), _) => {
            let index = rdmux_verbs::interface::interface_of(own)?.index;
            let socket = UdpSocket::bind((std::net::Ipv6Addr::UNSPECIFIED, 0))?;
            socket.join_multicast_v6(&group, index)?;
            Ok(socket)
        }
        _ => Err(std::io::ErrorKind::InvalidInput.into()),
    }
}

fn rdma<'a>(va: u64, rkey: RKey) -> WorkTarget<'a> {
    WorkTarget::Rdma { va, rkey: rkey.0 }
}

fn range_of<'a>(bind: &Bind, region: &'a Mr) -> BindRange<'a> {
    BindRange {
        region,
        va: bind.va,
        length: bind.length,
        access: bind.access.bits(),
    }
}

fn flush_feature(kind: rdmux_rnic::Placement) -> Features {
    match kind {
        rdmux_rnic::Placement::PERSISTENT => Features::FLUSH_PERSISTENT,
        _ => Features::FLUSH_GLOBAL,
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for group in self.groups.get_mut().keys() {
            let _ = self.qp.detach_mcast(to_gid(*group).octets());
        }
        self.device.forget_error(self.qp.number());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles__live_until_their_requests_have_left_the_send_queue() {
        let mut handles = Handles {
            by_way: HashMap::new(),
            capacity: 3,
            uses: 0,
        };
        let way = |number: u8| (IpAddr::V4(Ipv4Addr::new(10, 9, 0, number)), 0);
        let mut post = |number: u8, is_posted: bool| {
            handles.of(way(number), || Ok(number)).unwrap();
            handles.tried(way(number), is_posted);
            let mut kept: Vec<u8> = handles.by_way.values().map(|(number, _)| *number).collect();
            kept.sort_unstable();
            kept
        };
        assert_eq!([post(1, true), post(2, true)].concat(), [1, 1, 2]);
        // However many requests are refused, the handles of requests in flight stay, and no handle of a refused one is left.
        for number in 10..30 {
            assert_eq!(post(number, false), [1, 2]);
            assert_eq!(post(2, false), [1, 2]);
        }
        assert_eq!(post(3, true), [1, 2, 3]);
        assert_eq!(post(1, true), [1, 2, 3]);
        assert_eq!(post(4, true), [1, 3, 4]);
    }
}
