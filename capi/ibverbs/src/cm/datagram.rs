//! Ids of datagrams: they ask a peer, or are asked by one, for the queue pair that serves a port. There is no connection after
//! that.

use std::ffi::c_int;
use std::net::SocketAddr;

use rdmux_verbs::{DatagramService, Device, QueuePair, ResolveError, SidrStatus};

use super::channel::Event;
use super::connect::soon;
use super::id::Id;
use crate::address::vector_to;
use crate::{abi, queue_pair};

/// Returns the queue pair that answers a request: the id's, or the one that the program names.
pub(super) fn pair(own: &Id, asked: Option<&abi::ConnParam>) -> Result<QueuePair, c_int> {
    if !own.shown.qp.is_null() {
        return own.pair();
    }
    let asked = asked.filter(|_| !own.shown.verbs.is_null()).ok_or(libc::EINVAL)?;
    // SAFETY: a context of `context::shared`, which is never closed.
    unsafe { queue_pair::numbered(own.shown.verbs, asked.qp_num) }.ok_or(libc::EINVAL)
}

/// Returns the part of a service that an event reports.
fn told(service: &DatagramService, traffic_class: u8) -> abi::UdParam {
    abi::UdParam {
        private_data: std::ptr::null(),
        private_data_len: 0,
        ah_attr: vector_to(service.address(), traffic_class),
        qp_num: service.qpn().value(),
        qkey: service.qkey(),
    }
}

/// Asks a peer for the queue pair that serves, and reports the answer.
pub(super) fn connect(
    own: &Id,
    device: Device,
    peer: SocketAddr,
    private_data: Vec<u8>,
) -> Result<(), c_int> {
    use abi::cm_event::{CONNECT_ERROR, ESTABLISHED, UNREACHABLE};
    let (shared, traffic_class) = (own.shared.clone(), own.traffic_class);
    let source_port = own.local.map_or(0, |local| local.port());
    let thread = crate::spawn("rdmux-resolve", move || {
        let nobody = |error: &ResolveError| matches!(error, ResolveError::Refused { status, .. } if *status == SidrStatus::UNSUPPORTED);
        let ask = || device.resolve_from(source_port, peer, &private_data, &shared.gone);
        let found = soon(&shared, ask, nobody);
        let (event, status) = match &found {
            Ok(_) => (ESTABLISHED, 0),
            // When the peer refuses, the status of the event is that of its answer.
            Err(ResolveError::Refused { status, .. }) => (UNREACHABLE, c_int::from(status.0)),
            Err(ResolveError::Unreachable(_)) => (UNREACHABLE, -libc::ETIMEDOUT),
            Err(ResolveError::Io(error)) => (CONNECT_ERROR, -error.raw_os_error().unwrap_or(libc::EIO)),
            Err(_) => (CONNECT_ERROR, -libc::EINVAL),
        };
        shared.tell(|id, of| {
            let event = Event::new(id, of, event, status);
            // SAFETY: numbers and pointers, all of which may be zero.
            let nothing = || unsafe { std::mem::zeroed() };
            match &found {
                Ok(service) => event.with_ud(told(service, traffic_class), service.private_data()),
                Err(ResolveError::Refused { private_data, .. }) => event.with_ud(nothing(), private_data),
                Err(_) => event.with_ud(nothing(), &[]),
            }
        });
    });
    thread.map(drop)
}
