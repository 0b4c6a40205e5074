//! Multicast groups: the GID of a group is its address.

use std::ffi::c_int;
use std::net::IpAddr;

use rdmux_verbs::{AttachError, McastError};

use crate::address::address_of;
use crate::queue_pair::QpObject;
use crate::{abi, status};

fn errno_of(error: &McastError) -> c_int {
    match error {
        McastError::TooManyGroups | McastError::TooManyQps => libc::ENOMEM,
        _ => libc::EINVAL,
    }
}

/// Attaches a queue pair to a group. `EINVAL`: the queue pair is not a datagram one, or the address is not a group's.
pub(crate) fn attach(pair: &QpObject, group: IpAddr) -> Result<(), c_int> {
    pair.pair.attach_mcast(group).map_err(|error| match error {
        AttachError::Refused(error) => errno_of(&error),
        AttachError::Join { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
    })
}

/// Detaches a queue pair from a group.
pub(crate) fn detach(pair: &QpObject, group: IpAddr) -> Result<(), c_int> {
    pair.pair.detach_mcast(group).map_err(|error| errno_of(&error))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_attach_mcast(pair: *mut abi::Qp, gid: *const abi::AlignedGid, _: u16) -> c_int {
    // SAFETY: a queue pair that was made, and a GID of the caller's.
    let (pair, gid) = unsafe { (QpObject::of(pair), gid.cast::<abi::Gid>().read_unaligned()) };
    status(attach(pair, address_of(gid)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_detach_mcast(pair: *mut abi::Qp, gid: *const abi::AlignedGid, _: u16) -> c_int {
    // SAFETY: a queue pair that was made, and a GID of the caller's.
    let (pair, gid) = unsafe { (QpObject::of(pair), gid.cast::<abi::Gid>().read_unaligned()) };
    status(detach(pair, address_of(gid)))
}
