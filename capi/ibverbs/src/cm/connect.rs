//! Queue pairs of ids, and their connections.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::ptr;
use std::slice;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rdmux_verbs::{
    ConnectError, ConnectParams, Connection, Device, Endpoint, QpAttributes, QpState, QueuePair, RejReason,
};

use super::channel::Event;
use super::id::{Id, Shared};
use crate::{abi, channel, memory, minus_one, queue_pair};

/// Completions of a queue that the library makes for an id, where it has no requests of that kind.
const DEPTH_MIN: u32 = 1;

/// How long somebody who is going to listen is waited for.
const LISTENS_SOON: Duration = Duration::from_millis(50);
const LISTENS_SOON_TRIES: u32 = 6;

/// IBV_QPS_RTS
const RTS: u32 = 3;

/// Makes the queues that the program left out, each with a channel of its own; the queue's context is the id.
unsafe fn queue_of(
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
/// What is given was made, and is not destroyed.
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
        // What was made for it goes too.
        // SAFETY: as the caller says.
        unsafe { rdma_destroy_qp(id) };
    }
    made
}

/// As above, leaving what it made where it fails.
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
    let own = unsafe { &mut *id.cast::<Id>() };
    if own.shown.verbs.is_null() || !own.shown.qp.is_null() {
        return Err(libc::EINVAL);
    }
    let mut pd = pd;
    if pd.is_null() {
        if own.shown.pd.is_null() {
            own.shown.pd = memory::alloc_pd(own.shown.verbs)?;
            own.own_pd = true;
        }
        pd = own.shown.pd;
    }
    if init.send_cq.is_null() {
        // SAFETY: a context that is open.
        (own.shown.send_cq_channel, own.shown.send_cq) =
            unsafe { queue_of(id, own.shown.verbs, init.cap.max_send_wr) }?;
        init.send_cq = own.shown.send_cq;
    }
    if init.recv_cq.is_null() {
        // SAFETY: a context that is open.
        (own.shown.recv_cq_channel, own.shown.recv_cq) =
            unsafe { queue_of(id, own.shown.verbs, init.cap.max_recv_wr) }?;
        init.recv_cq = own.shown.recv_cq;
    }
    // SAFETY: what it names was made, says the caller.
    let qp = unsafe { queue_pair::create(queue_pair::Owner::Domain(pd), init, operations) }?;
    let mut attr = abi::QpAttr {
        qp_state: 1,
        port_num: 1,
        ..abi::QpAttr::default()
    };
    attr.qp_access_flags = ConnectParams::default().access.bits();
    use abi::qp_attr::{ACCESS_FLAGS, PKEY_INDEX, PORT, STATE};
    // SAFETY: just made.
    unsafe {
        queue_pair::ibv_modify_qp(
            qp,
            &raw mut attr,
            (STATE | PKEY_INDEX | PORT | ACCESS_FLAGS).cast_signed(),
        )
    };
    (own.shown.qp, own.shown.pd, own.shown.srq) = (qp, pd, init.srq);
    (own.shown.send_cq, own.shown.recv_cq) = (init.send_cq, init.recv_cq);
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
    let own = unsafe { &mut *id.cast::<Id>() };
    let qp = std::mem::replace(&mut own.shown.qp, ptr::null_mut());
    if !qp.is_null() {
        // SAFETY: made for the id, and used no more, says the caller.
        unsafe { queue_pair::ibv_destroy_qp(qp) };
    }
    for (queue, channel) in [
        (&mut own.shown.send_cq, &mut own.shown.send_cq_channel),
        (&mut own.shown.recv_cq, &mut own.shown.recv_cq_channel),
    ] {
        // Those without a channel here are the program's.
        let channel = std::mem::replace(channel, ptr::null_mut());
        let queue = std::mem::replace(queue, ptr::null_mut());
        if !channel.is_null() {
            // SAFETY: made for the id in `create_qp`.
            unsafe {
                channel::ibv_destroy_cq(queue);
                channel::ibv_destroy_comp_channel(channel);
            }
        }
    }
    if std::mem::take(&mut own.own_pd) {
        let pd = std::mem::replace(&mut own.shown.pd, ptr::null_mut());
        // SAFETY: made for the id in `create_qp`.
        unsafe { memory::ibv_dealloc_pd(pd) };
    }
}

/// What a program asks for, as the vocabulary has it.
fn parameters(own: &Id, asked: Option<&abi::ConnParam>) -> ConnectParams {
    let default = ConnectParams::default();
    let mut params = ConnectParams {
        traffic_class: own.traffic_class,
        ack_timeout: own.ack_timeout.unwrap_or(default.ack_timeout),
        ..default
    };
    if let Some(asked) = asked {
        params.responder_resources = asked.responder_resources.min(default.responder_resources);
        params.initiator_depth = asked.initiator_depth.min(default.initiator_depth);
        params.retry_count = asked.retry_count.min(7);
        params.rnr_retry = asked.rnr_retry_count.min(7);
    }
    params
}

/// What a program says to its peer's.
///
/// # Safety
/// As many bytes lie there as it says.
unsafe fn private_data(data: *const c_void, length: u8) -> Vec<u8> {
    if data.is_null() || length == 0 {
        return Vec::new();
    }
    // SAFETY: as the caller says.
    unsafe { slice::from_raw_parts(data.cast::<u8>(), length.into()) }.to_vec()
}

/// The peer's side of a connection, as an event tells it.
pub(super) fn told(remote: &Endpoint) -> abi::ConnParam {
    abi::ConnParam {
        private_data: ptr::null(),
        private_data_len: 0,
        // What the peer can ask for at a time is to be answered here, and the other way round.
        responder_resources: remote.initiator_depth,
        initiator_depth: remote.responder_resources,
        flow_control: 1,
        retry_count: remote.retry_count,
        rnr_retry_count: remote.rnr_retry_count,
        srq: remote.srq.into(),
        qp_num: remote.qpn.value(),
    }
}

/// Tells of a connection when it stands, and when it ends.
fn watch(shared: &Arc<Shared>, connection: &Arc<Connection>) {
    while !connection.wait_ended(Duration::from_secs(3_600)) {}
    shared.tell(|id, of| Event::new(id, of, abi::cm_event::DISCONNECTED, 0));
}

fn establish(shared: &Arc<Shared>, connection: &Arc<Connection>, private_data: &[u8]) {
    let conn = connection.remote().map(told);
    shared.tell(|id, of| {
        let event = Event::new(id, of, abi::cm_event::ESTABLISHED, 0);
        match conn {
            Some(conn) => event.with(conn, private_data),
            None => event,
        }
    });
}

unsafe fn connect(own: &mut Id, asked: Option<&abi::ConnParam>) -> Result<(), c_int> {
    let peer = own.remote.ok_or(libc::EINVAL)?;
    let (device, pair) = (own.device()?.clone(), own.pair()?);
    let params = parameters(own, asked);
    // SAFETY: as the caller says.
    let data = asked.map_or(Vec::new(), |asked| unsafe {
        private_data(asked.private_data, asked.private_data_len)
    });
    let (shared, verbs) = (own.shared.clone(), own.shown.verbs.expose_provenance());
    thread::spawn(move || match connect_soon(&device, &pair, peer, &params, &data) {
        Ok(connection) => {
            let connection = Arc::new(connection);
            if !shared.keep(&connection) {
                return;
            }
            queue_pair::tell_state(ptr::with_exposed_provenance_mut(verbs), pair.qpn(), RTS);
            establish(&shared, &connection, connection.private_data());
            watch(&shared, &connection);
        }
        Err(error) => {
            let (event, status, private_data) = refused(&error);
            // What was posted completes, as flushed.
            let _ = pair.modify(QpState::Error, &QpAttributes::default());
            if event == abi::cm_event::CONNECT_ERROR {
                eprintln!("rdmux: connecting to {peer}: {error}");
            }
            shared.tell(|id, of| {
                let told = Event::new(id, of, event, status);
                let conn = abi::ConnParam {
                    private_data: ptr::null(),
                    private_data_len: 0,
                    responder_resources: 0,
                    initiator_depth: 0,
                    flow_control: 0,
                    retry_count: 0,
                    rnr_retry_count: 0,
                    srq: 0,
                    qp_num: 0,
                };
                told.with(conn, private_data)
            });
        }
    });
    Ok(())
}

/// Connects; where nobody listens, tries again for a moment. Programs that begin together count on resolving an address taking longer than
/// listening, as it does where it asks the network; here it does not.
fn connect_soon(
    device: &Device,
    pair: &QueuePair,
    peer: SocketAddr,
    params: &ConnectParams,
    private_data: &[u8],
) -> Result<Connection, ConnectError> {
    for _ in 0..LISTENS_SOON_TRIES {
        match device.connect(pair, peer, params, private_data) {
            Err(ConnectError::Rejected { reason, .. }) if reason == RejReason::INVALID_SERVICE_ID => {
                // Nothing tells that somebody listens.
                thread::sleep(LISTENS_SOON);
            }
            connected => return connected,
        }
    }
    device.connect(pair, peer, params, private_data)
}

/// The event of a connection that did not come about.
fn refused(error: &ConnectError) -> (u32, c_int, &[u8]) {
    match error {
        // What the peer's user refused, or nobody listens for, is told by the reason's number.
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
        ConnectError::Io(error) => (
            abi::cm_event::CONNECT_ERROR,
            -error.raw_os_error().unwrap_or(libc::EIO),
            &[],
        ),
        _ => (abi::cm_event::CONNECT_ERROR, -libc::EINVAL, &[]),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_connect(id: *mut abi::CmId, asked: *mut abi::ConnParam) -> c_int {
    // SAFETY: an id that was made, and a structure of the caller's or none.
    let (own, asked) = unsafe { (&mut *id.cast::<Id>(), asked.as_ref()) };
    // SAFETY: as the caller says.
    minus_one(unsafe { connect(own, asked) }.and_then(|()| own.complete(abi::cm_event::ESTABLISHED)))
}

unsafe fn accept(own: &mut Id, asked: Option<&abi::ConnParam>) -> Result<(), c_int> {
    let mut request = own.request.take().ok_or(libc::EINVAL)?;
    let pair = own.pair()?;
    let mut params = parameters(own, asked);
    params.ack_timeout = request.remote().ack_timeout.max(1);
    // SAFETY: as the caller says.
    let data = asked.map_or(Vec::new(), |asked| unsafe {
        private_data(asked.private_data, asked.private_data_len)
    });
    let accepted = request.accept_after(&pair, &params, &data, || Ok(()));
    let connection = Arc::new(accepted.map_err(|_| libc::EINVAL)?);
    // It is there: who calls this has it.
    let _ = own.shared.keep(&connection);
    let (shared, verbs) = (own.shared.clone(), own.shown.verbs.expose_provenance());
    thread::spawn(move || {
        if connection.wait_established() {
            queue_pair::tell_state(ptr::with_exposed_provenance_mut(verbs), pair.qpn(), RTS);
            establish(&shared, &connection, &[]);
            watch(&shared, &connection);
        } else {
            // It may have been, and ended, and only the message was lost that said so.
            shared.tell(|id, of| Event::new(id, of, abi::cm_event::DISCONNECTED, 0));
        }
    });
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_accept(id: *mut abi::CmId, asked: *mut abi::ConnParam) -> c_int {
    // SAFETY: an id that was made, and a structure of the caller's or none.
    let (own, asked) = unsafe { (&mut *id.cast::<Id>(), asked.as_ref()) };
    // SAFETY: as the caller says.
    minus_one(unsafe { accept(own, asked) }.and_then(|()| own.complete(abi::cm_event::ESTABLISHED)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_reject(id: *mut abi::CmId, data: *const c_void, length: u8) -> c_int {
    // SAFETY: an id that was made, and bytes of the caller's.
    let (own, data) = unsafe { (&mut *id.cast::<Id>(), private_data(data, length)) };
    minus_one(
        own.request
            .take()
            .ok_or(libc::EINVAL)
            .map(|request| request.reject(&data)),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_disconnect(id: *mut abi::CmId) -> c_int {
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &mut *id.cast::<Id>() };
    let Some(connection) = own.shared.connection().filter(|_| !own.disconnected) else {
        return minus_one(Err(libc::EINVAL));
    };
    own.disconnected = true;
    connection.disconnect();
    minus_one(own.complete(abi::cm_event::DISCONNECTED))
}

/// Its end tells what there is to tell.
#[unsafe(no_mangle)]
extern "C" fn rdma_notify(_: *mut abi::CmId, _: u32) -> c_int {
    0
}
