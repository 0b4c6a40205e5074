//! Ids that join multicast groups.

use std::ffi::{c_int, c_void};
use std::net::IpAddr;
use std::sync::Arc;

use rdmux_verbs::{Qpn, RDMA_UDP_QKEY};

use super::channel::CmEventObject;
use super::id::CmIdObject;
use super::socket_address::read;
use crate::address::vector_to;
use crate::events::Given;
use crate::queue_pair::QpObject;
use crate::{abi, minus_one, multicast};

/// `struct rdma_cm_join_mc_attr_ex`.
#[repr(C)]
struct JoinAttr {
    comp_mask: u32,
    join_flags: u32,
    address: *mut libc::sockaddr,
}

/// Bits of `comp_mask`.
const ADDRESS: u32 = 1;
const JOIN_FLAGS: u32 = 1 << 1;

/// `enum rdma_cm_mc_join_flags`.
const FULL_MEMBER: u32 = 0;
const SEND_ONLY: u32 = 1;

/// A group that an id has joined.
pub(super) struct Membership {
    group: IpAddr,
    /// Set when the id also receives from the group.
    full: bool,
    /// Its events, which the program acknowledges before the membership ends.
    given: Arc<Given>,
}

impl Membership {
    /// Takes the id out of the group.
    pub(super) fn end(self, own: &CmIdObject) {
        let joined = |other: &Membership| other.full && other.group == self.group;
        if self.full && !own.shown.qp.is_null() && !own.memberships.iter().any(joined) {
            // If the queue pair was made after the id had joined, there is nothing to detach.
            // SAFETY: the id's queue pair.
            let _ = multicast::detach(unsafe { QpObject::of(own.shown.qp) }, self.group);
        }
        drop(own.shared.events().take_given(&self.given));
        self.given.wait_acknowledged();
    }
}

unsafe fn join(
    own: &mut CmIdObject,
    address: *mut libc::sockaddr,
    flags: u32,
    context: *mut c_void,
) -> Result<(), c_int> {
    // SAFETY: an address of the caller's.
    let group = unsafe { read(address) }?.ip();
    if own.shown.verbs.is_null() || !own.is_datagram() || !group.is_multicast() {
        return Err(libc::EINVAL);
    }
    let full = flags == FULL_MEMBER;
    let mut status = 0;
    if full && !own.shown.qp.is_null() {
        // SAFETY: the id's queue pair.
        status = multicast::attach(unsafe { QpObject::of(own.shown.qp) }, group)
            .err()
            .unwrap_or(0);
    }
    let ud = abi::UdParam {
        private_data: std::ptr::null(),
        private_data_len: 0,
        ah_attr: vector_to(group, own.traffic_class),
        qp_num: Qpn::MULTICAST.value(),
        qkey: RDMA_UDP_QKEY,
    };
    let event = match status {
        0 => abi::cm_event::MULTICAST_JOIN,
        _ => abi::cm_event::MULTICAST_ERROR,
    };
    let given = Arc::<Given>::default();
    own.memberships.push(Membership {
        group,
        full,
        given: given.clone(),
    });
    own.complete(abi::cm_event::MULTICAST_JOIN, |own| {
        own.shared.tell(|id, _| {
            let mut event = CmEventObject::new(id, &given, event, -status).with_ud(ud, &[]);
            // The program's context, unchanged.
            event.shown.param.ud.private_data = context;
            event
        });
        Ok(())
    })
}

fn leave(own: &mut CmIdObject, group: IpAddr) -> Result<(), c_int> {
    let joined = |membership: &Membership| membership.group == group;
    let at = own
        .memberships
        .iter()
        .rposition(joined)
        .ok_or(libc::EADDRNOTAVAIL)?;
    if own.waits() {
        own.forget_event();
    }
    let membership = own.memberships.remove(at);
    membership.end(own);
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_join_multicast(
    id: *mut abi::CmId,
    address: *mut libc::sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: an id that was made, and an address of the caller's.
    minus_one(unsafe { join(&mut *id.cast::<CmIdObject>(), address, FULL_MEMBER, context) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut abi::CmId,
    attr: *mut JoinAttr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a structure of the caller's.
    let attr = unsafe { &*attr };
    if attr.comp_mask & !(ADDRESS | JOIN_FLAGS) != 0 {
        return minus_one(Err(libc::ENOTSUP));
    }
    if attr.comp_mask != ADDRESS | JOIN_FLAGS || attr.join_flags > SEND_ONLY {
        return minus_one(Err(libc::EINVAL));
    }
    // SAFETY: an id that was made, and an address of the caller's.
    minus_one(unsafe {
        join(
            &mut *id.cast::<CmIdObject>(),
            attr.address,
            attr.join_flags,
            context,
        )
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_leave_multicast(id: *mut abi::CmId, address: *mut libc::sockaddr) -> c_int {
    // SAFETY: an id that was made, and an address of the caller's.
    let (own, address) = unsafe { (&mut *id.cast::<CmIdObject>(), read(address)) };
    minus_one(address.and_then(|address| leave(own, address.ip())))
}
