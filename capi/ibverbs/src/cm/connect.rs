//! Queue pairs of ids, and their connections.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr;
use std::slice;
use std::sync::{Arc, Weak};

use rdmux_verbs::{
    CONNECT_DATA_MAX, ConnectError, ConnectPair, ConnectParams, Connecting, Connection, Device, Endpoint,
    EventQueue, ExternalPair, QpAttributes, QpState, Qpn, QueuePair, RESOLVE_DATA_MAX, RejReason,
};

use super::ask::{Question, asking};
use super::bring_up::{attributes, show};
use super::channel::{CmEventObject, Happened, Source};
use super::datagram;
use super::id::{CmIdObject, IdShared, IncomingRequest, Stage};
use super::listen::errno_of_io;
use crate::queue_pair::Owner;
use crate::{abi, channel, context, minus_one, queue_pair, warn};

/// Capacity of a completion queue that the library makes for an id that has no requests of that kind.
const DEPTH_MIN: u32 = 1;

/// Makes the queues that the program left out, each with a channel of its own; the queue's context is the id.
pub(super) unsafe fn queue_of(
    id: *mut abi::CmId,
    verbs: *mut abi::Context,
    wr: u32,
) -> Result<(*mut abi::CompChannel, *mut abi::Cq), c_int> {
    let channel = channel::create_channel(verbs)?;
    // SAFETY: a context that is open, and a channel just made.
    let made = unsafe { channel::create_cq(verbs, wr.max(DEPTH_MIN).cast_signed(), id.cast(), channel, 0) };
    match made {
        Ok(queue) => Ok((channel, queue)),
        Err(errno) => {
            // SAFETY: just made, and used by nobody.
            unsafe { channel::ibv_destroy_comp_channel(channel) };
            Err(errno)
        }
    }
}

/// Makes an id's queue pair.
///
/// # Safety
/// The objects given were made, and are not destroyed.
pub(super) unsafe fn create_qp(
    id: *mut abi::CmId,
    pd: *mut abi::Pd,
    init: &mut abi::QpInitAttr,
    operations: Option<u64>,
) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    let made = unsafe { create_qp_with(id, pd, init, operations) };
    // SAFETY: as the caller says.
    if made.is_err() && unsafe { (*id).qp.is_null() } {
        // Destroys what was made for the queue pair, too.
        // SAFETY: as the caller says.
        unsafe { rdma_destroy_qp(id) };
    }
    made
}

/// Makes an id's queue pair, but leaves behind what it made when it fails.
///
/// # Safety
/// As above.
unsafe fn create_qp_with(
    id: *mut abi::CmId,
    pd: *mut abi::Pd,
    init: &mut abi::QpInitAttr,
    operations: Option<u64>,
) -> Result<(), c_int> {
    // SAFETY: an id that was made, which one thread uses at a time, says the caller.
    let own = unsafe { &mut *id.cast::<CmIdObject>() };
    if own.shown.verbs.is_null() || !own.shown.qp.is_null() {
        return Err(libc::EINVAL);
    }
    let pd = if pd.is_null() { own.shown.pd } else { pd };
    // SAFETY: null, or a domain that was made, says the caller.
    if pd.is_null() || unsafe { (*pd).context } != own.shown.verbs {
        return Err(libc::EINVAL);
    }
    if init.srq.is_null() {
        init.srq = own.shown.srq;
    }
    let unused = init.qp_type == abi::qp_type::XRC_RECV;
    if init.send_cq.is_null() {
        init.send_cq = own.shown.send_cq;
    }
    if init.recv_cq.is_null() {
        init.recv_cq = own.shown.recv_cq;
    }
    if init.send_cq.is_null() && !unused {
        // SAFETY: a context that is open.
        (own.shown.send_cq_channel, own.shown.send_cq) =
            unsafe { queue_of(id, own.shown.verbs, init.cap.max_send_wr) }?;
        init.send_cq = own.shown.send_cq;
    }
    if init.recv_cq.is_null() && !unused && init.qp_type != abi::qp_type::XRC_SEND {
        // SAFETY: a context that is open.
        (own.shown.recv_cq_channel, own.shown.recv_cq) =
            unsafe { queue_of(id, own.shown.verbs, init.cap.max_recv_wr) }?;
        init.recv_cq = own.shown.recv_cq;
    }
    let owner = if unused {
        Owner::Xrc(context::shared_xrcd(own.shown.verbs)?)
    } else {
        Owner::Domain(pd)
    };
    // SAFETY: what it names was made, says the caller.
    let qp = unsafe { queue_pair::create(owner, init, operations) }?;
    // SAFETY: just made.
    if let Err(errno) = unsafe { bring_up(own, qp) } {
        // SAFETY: just made, and used by nobody.
        unsafe { queue_pair::ibv_destroy_qp(qp) };
        return Err(errno);
    }
    (own.shown.qp, own.shown.pd) = (qp, pd);
    Ok(())
}

/// Brings a queue pair to Init, as connecting expects it, or a datagram queue pair to the state in which it can be used.
///
/// # Safety
/// It was just made.
unsafe fn bring_up(own: &CmIdObject, qp: *mut abi::Qp) -> Result<(), c_int> {
    let states: &[QpState] = match own.shown.qp_type {
        abi::qp_type::UD => &[QpState::Init, QpState::Rtr, QpState::Rts],
        _ => &[QpState::Init],
    };
    for state in states {
        let (mut attr, mask) = attributes(own, *state)?;
        // SAFETY: as the caller says.
        match unsafe { queue_pair::ibv_modify_qp(qp, &raw mut attr, mask.cast_signed()) } {
            0 => {}
            errno => return Err(errno),
        }
    }
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_create_qp(
    id: *mut abi::CmId,
    pd: *mut abi::Pd,
    init: *mut abi::QpInitAttr,
) -> c_int {
    // SAFETY: as the caller says.
    minus_one(unsafe { create_qp(id, pd, &mut *init, None) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_create_qp_ex(id: *mut abi::CmId, init: *mut abi::QpInitAttrEx) -> c_int {
    use abi::qp_init::{PD, SEND_OPS_FLAGS};
    // SAFETY: a structure of the caller's.
    let init = unsafe { &mut *init };
    if init.comp_mask & !(PD | SEND_OPS_FLAGS) != 0 {
        return minus_one(Err(libc::EOPNOTSUPP));
    }
    let pd = if init.comp_mask & PD != 0 {
        init.pd
    } else {
        ptr::null_mut()
    };
    let operations = (init.comp_mask & SEND_OPS_FLAGS != 0).then_some(init.send_ops_flags);
    let mut basic = queue_pair::basic(init);
    // SAFETY: as the caller says.
    let made = unsafe { create_qp(id, pd, &mut basic, operations) };
    init.cap = basic.cap;
    minus_one(made)
}

#[unsafe(no_mangle)]
pub(super) unsafe extern "C" fn rdma_destroy_qp(id: *mut abi::CmId) {
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &mut *id.cast::<CmIdObject>() };
    let qp = std::mem::replace(&mut own.shown.qp, ptr::null_mut());
    if !qp.is_null() {
        // SAFETY: made for the id, and used no more, says the caller.
        unsafe { queue_pair::ibv_destroy_qp(qp) };
    }
    // The completion queues of a shared receive queue are destroyed with it.
    if own.shown.srq.is_null() || own.shown.qp_type != abi::qp_type::XRC_RECV {
        destroy_queues(own);
    }
}

/// Destroys the completion queues that the library made for an id.
pub(super) fn destroy_queues(own: &mut CmIdObject) {
    let shown = &mut own.shown;
    destroy_queue(&mut shown.send_cq_channel, &mut shown.send_cq);
    destroy_queue(&mut shown.recv_cq_channel, &mut shown.recv_cq);
}

/// Destroys one completion queue. A queue without a channel here is the program's: it is only forgotten.
pub(super) fn destroy_queue(channel: &mut *mut abi::CompChannel, queue: &mut *mut abi::Cq) {
    let channel = std::mem::replace(channel, ptr::null_mut());
    let queue = std::mem::replace(queue, ptr::null_mut());
    if !channel.is_null() {
        // SAFETY: made for the id in `queue_of`.
        unsafe {
            channel::ibv_destroy_cq(queue);
            channel::ibv_destroy_comp_channel(channel);
        }
    }
}

/// RNR timer code that the RDMA CM of Linux gives every queue pair (`cm_init_qp_rtr_attr`): 655.36 ms. Programs choose their numbers
/// of RNR retries for it.
pub(super) const LINUX_MIN_RNR_TIMER: u8 = 0;

/// Converts the parameters that a program asks for into those of the vocabulary.
pub(super) fn parameters(own: &CmIdObject, asked: Option<&abi::ConnParam>) -> ConnectParams {
    let default = ConnectParams::default();
    let mut params = ConnectParams {
        traffic_class: own.traffic_class,
        ack_timeout: own.ack_timeout,
        service: own.remote.map(|peer| own.service(peer.port())),
        source_port: own.local.map_or(0, |local| local.port()),
        ..default
    };
    if let Some(asked) = asked {
        params.responder_resources = asked.responder_resources.min(default.responder_resources);
        params.initiator_depth = asked.initiator_depth.min(default.initiator_depth);
        params.retry_count = asked.retry_count.min(7);
        params.rnr_retry = asked.rnr_retry_count.min(7);
        // A peer that retries without limit is better served by the shorter time of the default.
        if params.rnr_retry < 7 {
            params.min_rnr_timer = LINUX_MIN_RNR_TIMER;
        }
    }
    params
}

/// Returns the private data that a program sends to its peer.
///
/// # Safety
/// As many bytes are there as `length` says.
pub(super) unsafe fn private_data(data: *const c_void, length: u8) -> Vec<u8> {
    if data.is_null() || length == 0 {
        return Vec::new();
    }
    // SAFETY: as the caller says.
    unsafe { slice::from_raw_parts(data.cast::<u8>(), length.into()) }.to_vec()
}

/// Returns the parameters of the peer's side of a connection, as an event reports them.
pub(super) fn told(remote: &Endpoint) -> abi::ConnParam {
    abi::ConnParam {
        private_data: ptr::null(),
        private_data_len: 0,
        // This side answers as many requests at a time as the peer can make, and the other way round.
        responder_resources: remote.initiator_depth,
        initiator_depth: remote.responder_resources,
        flow_control: 1,
        retry_count: remote.retry_count,
        rnr_retry_count: remote.rnr_retry_count,
        srq: remote.srq.into(),
        qp_num: remote.qpn.value(),
    }
}

impl Source for IdShared {
    fn take(self: Arc<Self>) -> Vec<Happened> {
        use abi::cm_event::{DISCONNECTED, ESTABLISHED};
        let Some((connection, new)) = self.take_progress() else {
            return Vec::new();
        };
        let mut happened = Vec::new();
        if let Some(at) = new.established {
            let shared = self.clone();
            let tell = Box::new(move || tell_connection(&shared, ESTABLISHED, &connection, &[]));
            happened.push(Happened { at, tell });
        }
        if let Some(at) = new.ended {
            let tell = Box::new(move || self.tell(|id, of| CmEventObject::new(id, of, DISCONNECTED, 0)));
            happened.push(Happened { at, tell });
        }
        happened
    }
}

/// Returns an id's connection as the source that its channel watches.
pub(super) fn source_of(shared: &Arc<IdShared>) -> Weak<dyn Source> {
    let source: Weak<IdShared> = Arc::downgrade(shared);
    source
}

fn tell_connection(shared: &Arc<IdShared>, event: u32, connection: &Arc<Connection>, private_data: &[u8]) {
    let conn = connection.remote().map(told);
    shared.tell(|id, of| {
        let event = CmEventObject::new(id, of, event, 0);
        match conn {
            Some(conn) => event.with(conn, private_data),
            None => event,
        }
    });
}

/// The queue pair of a connection.
enum OwnedConnectPair {
    /// A queue pair of the id: the library brings it up.
    Own(QueuePair),
    /// A queue pair of the program, which brings it up itself.
    External(ExternalPair),
}

impl OwnedConnectPair {
    fn of(own: &CmIdObject, asked: Option<&abi::ConnParam>) -> Result<OwnedConnectPair, c_int> {
        if !own.shown.qp.is_null() {
            return own.pair().map(OwnedConnectPair::Own);
        }
        let asked = asked.ok_or(libc::EINVAL)?;
        let pair = ExternalPair {
            qpn: Qpn::new(asked.qp_num),
            qp_type: own.qp_type(),
            srq: asked.srq != 0,
        };
        Ok(OwnedConnectPair::External(pair))
    }

    fn get(&self) -> ConnectPair<'_> {
        match self {
            OwnedConnectPair::Own(pair) => ConnectPair::Own(pair),
            OwnedConnectPair::External(pair) => ConnectPair::External(pair),
        }
    }
    /// Shows the program, in its queue pair, the state to which the connection has brought it.
    fn show(&self, verbs: usize, connection: &Connection, state: QpState) {
        if let OwnedConnectPair::Own(pair) = self
            && let Some(agreed) = connection.attributes(state)
        {
            let (attr, mask) = show(&agreed, state);
            queue_pair::tell(ptr::with_exposed_provenance_mut(verbs), pair.qpn(), &attr, mask);
        }
    }

    /// Flushes posted requests when there is no connection.
    fn fail(&self) {
        if let OwnedConnectPair::Own(pair) = self {
            let _ = pair.modify(QpState::Error, &QpAttributes::default());
        }
    }
}

unsafe fn connect(own: &mut CmIdObject, asked: Option<&abi::ConnParam>) -> Result<(), c_int> {
    let peer = own.remote.ok_or(libc::EINVAL)?;
    let device = own.device()?.clone();
    // SAFETY: as the caller says.
    let data = asked.map_or(Vec::new(), |asked| unsafe {
        private_data(asked.private_data, asked.private_data_len)
    });
    let room = if own.is_datagram() {
        RESOLVE_DATA_MAX
    } else {
        CONNECT_DATA_MAX
    };
    if data.len() > room {
        return Err(libc::EINVAL);
    }
    if own.is_datagram() {
        return datagram::connect(own, device, peer, data);
    }
    let question = asking(ConnectQuestion {
        pair: OwnedConnectPair::of(own, asked)?,
        params: parameters(own, asked),
        device,
        peer,
        data,
        verbs: own.shown.verbs.expose_provenance(),
    });
    // Once the result is reported, another thread of the program may destroy the id.
    let shared = own.shared.clone();
    shared.ask(question)
}

/// Asks a peer for a connection.
struct ConnectQuestion {
    device: Device,
    pair: OwnedConnectPair,
    peer: SocketAddr,
    params: ConnectParams,
    data: Vec<u8>,
    /// Address of the context of its device.
    verbs: usize,
}

impl Question for ConnectQuestion {
    type Pending = Connecting;
    type Answer = Connection;
    type Error = ConnectError;

    fn ask(&self) -> Result<Connecting, ConnectError> {
        self.device
            .start_connect(self.pair.get(), self.peer, &self.params, &self.data)
    }

    fn notify(pending: &Connecting, events: &EventQueue, token: u64) {
        pending.notify(events, token);
    }

    fn poll(pending: &mut Connecting) -> Option<Result<Connection, ConnectError>> {
        pending.poll()
    }

    fn nobody_listens(error: &ConnectError) -> bool {
        matches!(error, ConnectError::Rejected { reason, .. } if *reason == RejReason::INVALID_SERVICE_ID)
    }

    fn report(&self, shared: &Arc<IdShared>, result: Result<Connection, ConnectError>) {
        match result {
            Ok(connection) => self.tell_connected(shared, &Arc::new(connection)),
            Err(error) => {
                self.pair.fail();
                let (event, status, private_data) = refused(&error);
                shared.tell(|id, of| {
                    // SAFETY: numbers and pointers, all of which may be zero.
                    let conn = unsafe { std::mem::zeroed() };
                    CmEventObject::new(id, of, event, status).with(conn, private_data)
                });
                if event == abi::cm_event::CONNECT_ERROR {
                    warn(format_args!("connecting to {}: {error}", self.peer));
                }
            }
        }
    }

    fn withdrawn(&self) {
        self.pair.fail();
    }
}

impl ConnectQuestion {
    fn tell_connected(&self, shared: &Arc<IdShared>, connection: &Arc<Connection>) {
        if !shared.keep(connection) {
            return;
        }
        for state in [QpState::Rtr, QpState::Rts] {
            self.pair.show(self.verbs, connection, state);
        }
        let event = match self.pair {
            OwnedConnectPair::Own(_) => abi::cm_event::ESTABLISHED,
            OwnedConnectPair::External(_) => abi::cm_event::CONNECT_RESPONSE,
        };
        let events = shared.events();
        events.watch(source_of(shared));
        events.tell_happened(|| {
            tell_connection(shared, event, connection, connection.private_data());
            shared.follow(true);
        });
    }
}

/// Returns the event of a connection that was not established.
fn refused(error: &ConnectError) -> (u32, c_int, &[u8]) {
    match error {
        // When the peer's user refused, or nobody listens, the status is the number of the reason.
        ConnectError::Rejected { reason, private_data } => (
            abi::cm_event::REJECTED,
            c_int::from(reason.0),
            if *reason == RejReason::CONSUMER {
                private_data
            } else {
                &[]
            },
        ),
        ConnectError::Unreachable(_) => (abi::cm_event::UNREACHABLE, -libc::ETIMEDOUT, &[]),
        ConnectError::Io(error) => (abi::cm_event::CONNECT_ERROR, -errno_of_io(error), &[]),
        _ => (abi::cm_event::CONNECT_ERROR, -libc::EINVAL, &[]),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_connect(id: *mut abi::CmId, asked: *mut abi::ConnParam) -> c_int {
    // SAFETY: an id that was made, and a structure of the caller's or none.
    let (own, asked) = unsafe { (&mut *id.cast::<CmIdObject>(), asked.as_ref()) };
    let event = if own.shown.qp.is_null() && !own.is_datagram() {
        abi::cm_event::CONNECT_RESPONSE
    } else {
        abi::cm_event::ESTABLISHED
    };
    minus_one(own.complete(event, |own| {
        // SAFETY: as the caller says.
        own.advance(&[Stage::RouteResolved], Stage::Connect, |own| unsafe {
            connect(own, asked)
        })
    }))
}

unsafe fn accept(own: &mut CmIdObject, asked: Option<&abi::ConnParam>) -> Result<(), c_int> {
    // SAFETY: as the caller says.
    let data = asked.map_or(Vec::new(), |asked| unsafe {
        private_data(asked.private_data, asked.private_data_len)
    });
    if own.is_datagram() {
        // If this fails, the program can still refuse the request.
        let pair = datagram::pair(own, asked)?;
        let Some(IncomingRequest::Service(request)) = &mut own.request else {
            return Err(libc::EINVAL);
        };
        request.accept(&pair, &data).map_err(|_| libc::EINVAL)?;
        own.request = None;
        own.forget_event();
        return Ok(());
    }
    let pair = OwnedConnectPair::of(own, asked)?;
    let params = parameters(own, asked);
    let shared = own.shared.clone();
    // Without the thread nobody would learn how the connection goes on.
    let (queue, token) = shared.queue()?;
    let mut request = match own.request.take() {
        Some(IncomingRequest::Connection(request)) => request,
        other => {
            own.request = other;
            return Err(libc::EINVAL);
        }
    };
    let (events, verbs) = (shared.events(), own.shown.verbs.expose_provenance());
    events.watch(source_of(&shared));
    // The peer may answer, and send another request, before this returns: the answer is reported first. Once that is reported, another
    // thread of the program may destroy the id.
    let accepted = events.tell_happened(|| {
        let connection = Arc::new(request.accept_pair(pair.get(), &params, &data)?);
        // A program that gets ESTABLISHED finds the queue pair in RTS.
        for state in [QpState::Rtr, QpState::Rts] {
            pair.show(verbs, &connection, state);
        }
        // The id exists: the caller has it.
        let _ = shared.keep(&connection);
        shared.follow(false);
        connection.notify(queue, token);
        Ok(())
    });
    accepted.map_err(|error| {
        // The program can still accept the request otherwise, or refuse it.
        own.request = Some(IncomingRequest::Connection(request));
        match error {
            ConnectError::Rejected { .. } => libc::ECONNREFUSED,
            ConnectError::Io(error) => error.raw_os_error().unwrap_or(libc::EINVAL),
            _ => libc::EINVAL,
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_accept(id: *mut abi::CmId, asked: *mut abi::ConnParam) -> c_int {
    // SAFETY: an id that was made, and a structure of the caller's or none.
    let (own, asked) = unsafe { (&mut *id.cast::<CmIdObject>(), asked.as_ref()) };
    if own.is_datagram() {
        // SAFETY: as the caller says.
        return minus_one(unsafe { accept(own, asked) });
    }
    // SAFETY: as the caller says.
    minus_one(own.complete(abi::cm_event::ESTABLISHED, |own| unsafe { accept(own, asked) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_reject(id: *mut abi::CmId, data: *const c_void, length: u8) -> c_int {
    // SAFETY: an id that was made, and bytes of the caller's.
    let (own, data) = unsafe { (&mut *id.cast::<CmIdObject>(), private_data(data, length)) };
    minus_one(match own.request.take() {
        Some(IncomingRequest::Connection(request)) => {
            request.reject(&data);
            Ok(())
        }
        Some(IncomingRequest::Service(request)) => {
            request.reject(&data);
            Ok(())
        }
        None => Err(libc::EINVAL),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_disconnect(id: *mut abi::CmId) -> c_int {
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &mut *id.cast::<CmIdObject>() };
    minus_one(disconnect(own))
}

/// Ends a connection as the kernel's rdma_cm does: once an id has sent or received a request, no order of calls makes this an
/// error.
fn disconnect(own: &mut CmIdObject) -> Result<(), c_int> {
    match (own.stage, own.shared.connection()) {
        _ if own.is_inherited() => Err(libc::EINVAL),
        (Stage::Connect, Some(connection)) => own.complete(abi::cm_event::DISCONNECTED, |own| {
            own.advance(&[Stage::Connect], Stage::Disconnect, |_| {
                connection.disconnect();
                Ok(())
            })
        }),
        // Its queue pair no longer takes part in a connection. No event reports that.
        (Stage::Connect, None) => {
            if !own.shown.qp.is_null() {
                OwnedConnectPair::Own(own.pair()?).fail();
            }
            Ok(())
        }
        (Stage::Disconnect, _) => Ok(()),
        _ => Err(libc::EINVAL),
    }
}
