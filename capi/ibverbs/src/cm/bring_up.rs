//! Attributes with which programs bring up queue pairs by themselves.

use std::ffi::c_int;

use rdmux_verbs::{ConnectParams, PathMtu, QpAttributes, QpState, RDMA_UDP_QKEY};

use super::connect::{LINUX_MIN_RNR_TIMER, parameters};
use super::id::{CmIdObject, IncomingRequest};
use crate::address::vector_to;
use crate::{abi, minus_one, queue_pair};

/// Returns the attributes with which the queue pair of an id goes to a state, and the mask of `ibv_modify_qp(3)`.
pub(super) fn attributes(own: &CmIdObject, to: QpState) -> Result<(abi::QpAttr, u32), c_int> {
    use abi::qp_attr::*;
    let mut attr = abi::QpAttr {
        port_num: 1,
        ..abi::QpAttr::default()
    };
    let mask = match to {
        QpState::Init if own.is_datagram() => {
            attr.qkey = RDMA_UDP_QKEY;
            STATE | PKEY_INDEX | PORT | QKEY
        }
        QpState::Init => {
            attr.qp_access_flags = ConnectParams::default().access.bits();
            STATE | PKEY_INDEX | PORT | ACCESS_FLAGS
        }
        QpState::Rtr if own.is_datagram() => STATE,
        QpState::Rts if own.is_datagram() => STATE | SQ_PSN,
        QpState::Rtr | QpState::Rts => return Ok(show(&agreed(own, to)?, to)),
        _ => return Err(libc::EINVAL),
    };
    attr.qp_state = queue_pair::number_of(to);
    Ok((attr, mask))
}

/// Returns the attributes that both ends of a connection have agreed on.
fn agreed(own: &CmIdObject, to: QpState) -> Result<QpAttributes, c_int> {
    let agreed = match &own.request {
        Some(IncomingRequest::Connection(request)) => {
            let mut params = parameters(own, None);
            params.responder_resources = params.responder_resources.min(request.remote().initiator_depth);
            // How often the peer retries is only told when the program accepts.
            params.min_rnr_timer = LINUX_MIN_RNR_TIMER;
            request.attributes(to, &params).ok()
        }
        _ => own
            .shared
            .connection()
            .and_then(|connection| connection.attributes(to)),
    };
    agreed.ok_or(libc::EINVAL)
}

/// Converts the attributes of a transition of a queue pair into those that programs give and see.
pub(super) fn show(agreed: &QpAttributes, to: QpState) -> (abi::QpAttr, u32) {
    use abi::qp_attr::*;
    let mut shown = abi::QpAttr {
        qp_state: queue_pair::number_of(to),
        port_num: 1,
        ..abi::QpAttr::default()
    };
    let mut mask = STATE;
    macro_rules! fields {
        ($($bit:ident: $field:ident = $value:expr;)*) => {
            $(if let Some(value) = $value { shown.$field = value; mask |= $bit; })*
        };
    }
    fields! {
        AV: ah_attr = agreed.path.map(|path| vector_to(path.dst, path.traffic_class));
        PATH_MTU: path_mtu = agreed.path_mtu.and_then(PathMtu::from_bytes).map(|mtu| mtu.code().into());
        DEST_QPN: dest_qp_num = agreed.dest_qpn.map(|qpn| qpn.value());
        RQ_PSN: rq_psn = agreed.rq_psn.map(|psn| psn.value());
        SQ_PSN: sq_psn = agreed.sq_psn.map(|psn| psn.value());
        MAX_DEST_RD_ATOMIC: max_dest_rd_atomic = agreed.max_dest_rd_atomic;
        MAX_QP_RD_ATOMIC: max_rd_atomic = agreed.max_rd_atomic;
        MIN_RNR_TIMER: min_rnr_timer = agreed.min_rnr_timer;
        TIMEOUT: timeout = agreed.timeout;
        RETRY_CNT: retry_cnt = agreed.retry_count;
        RNR_RETRY: rnr_retry = agreed.rnr_retry;
    }
    (shown, mask)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut abi::CmId,
    attr: *mut abi::QpAttr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: an id that was made, and a structure of the caller's.
    let (own, to) = unsafe { (&*id.cast::<CmIdObject>(), (*attr).qp_state) };
    let to = match to {
        1 => QpState::Init,
        2 => QpState::Rtr,
        3 => QpState::Rts,
        _ => return minus_one(Err(libc::EINVAL)),
    };
    minus_one(attributes(own, to).map(|(found, bits)| {
        // SAFETY: places of the caller's.
        unsafe {
            *attr = found;
            *mask = bits.cast_signed();
        }
    }))
}

/// Tells the peer that the queue pair which the program brings up is ready.
#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_establish(id: *mut abi::CmId) -> c_int {
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &*id.cast::<CmIdObject>() };
    let connection = own.shared.connection().filter(|_| own.shown.qp.is_null());
    minus_one(
        connection
            .ok_or(libc::EINVAL)
            .map(|connection| connection.establish()),
    )
}

/// Takes note that a queue pair has received a message before the peer's last CM message came, which says as much. A program
/// need not call this for queue pairs that the library brings up.
#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_notify(id: *mut abi::CmId, event: u32) -> c_int {
    // SAFETY: an id that was made, says the caller.
    let own = unsafe { &*id.cast::<CmIdObject>() };
    if event == abi::event_type::COMM_EST
        && let Some(connection) = own.shared.connection()
    {
        connection.establish();
    }
    0
}
