//! Ids of datagrams: they ask a peer, or are asked by one, for the queue pair that serves a port. There is no connection after
//! that.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::Arc;

use rdmux_verbs::{DatagramService, Device, EventQueue, QueuePair, ResolveError, Resolving, SidrStatus};

use super::ask::{Question, asking};
use super::channel::CmEventObject;
use super::id::{CmIdObject, IdShared};
use super::listen::errno_of_io;
use crate::address::vector_to;
use crate::{abi, queue_pair};

/// Returns the queue pair that answers a request: the id's, or the one that the program names.
pub(super) fn pair(own: &CmIdObject, asked: Option<&abi::ConnParam>) -> Result<QueuePair, c_int> {
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
    own: &CmIdObject,
    device: Device,
    peer: SocketAddr,
    private_data: Vec<u8>,
) -> Result<(), c_int> {
    let question = asking(ServiceQuestion {
        device,
        source_port: own.local.map_or(0, |local| local.port()),
        peer,
        traffic_class: own.traffic_class,
        private_data,
    });
    // Once the result is reported, another thread of the program may destroy the id.
    let shared = own.shared.clone();
    shared.ask(question)
}

struct ServiceQuestion {
    device: Device,
    source_port: u16,
    peer: SocketAddr,
    traffic_class: u8,
    private_data: Vec<u8>,
}

impl Question for ServiceQuestion {
    type Pending = Resolving;
    type Answer = DatagramService;
    type Error = ResolveError;

    fn ask(&self) -> Result<Resolving, ResolveError> {
        self.device
            .start_resolve(self.source_port, self.peer, &self.private_data)
    }

    fn notify(pending: &Resolving, events: &EventQueue, token: u64) {
        pending.notify(events, token);
    }

    fn poll(pending: &mut Resolving) -> Option<Result<DatagramService, ResolveError>> {
        pending.poll()
    }

    fn nobody_listens(error: &ResolveError) -> bool {
        matches!(error, ResolveError::Refused { status, .. } if *status == SidrStatus::UNSUPPORTED)
    }

    fn report(&self, shared: &Arc<IdShared>, found: Result<DatagramService, ResolveError>) {
        use abi::cm_event::{CONNECT_ERROR, ESTABLISHED, UNREACHABLE};
        let (event, status) = match &found {
            Ok(_) => (ESTABLISHED, 0),
            // When the peer refuses, the status of the event is that of its answer.
            Err(ResolveError::Refused { status, .. }) => (UNREACHABLE, c_int::from(status.0)),
            Err(ResolveError::Unreachable(_)) => (UNREACHABLE, -libc::ETIMEDOUT),
            Err(ResolveError::Io(error)) => (CONNECT_ERROR, -errno_of_io(error)),
            Err(_) => (CONNECT_ERROR, -libc::EINVAL),
        };
        shared.tell(|id, of| {
            let event = CmEventObject::new(id, of, event, status);
            // SAFETY: numbers and pointers, all of which may be zero.
            let nothing = || unsafe { std::mem::zeroed() };
            match &found {
                Ok(service) => event.with_ud(told(service, self.traffic_class), service.private_data()),
                Err(ResolveError::Refused { private_data, .. }) => event.with_ud(nothing(), private_data),
                Err(_) => event.with_ud(nothing(), &[]),
            }
        });
    }
}
