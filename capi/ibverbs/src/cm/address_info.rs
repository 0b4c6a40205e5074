//! Addresses by name.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use crate::{abi, minus_one};

/// `struct rdma_addrinfo`.
#[repr(C)]
pub(super) struct AddressInfo {
    pub(super) flags: c_int,
    family: c_int,
    qp_type: c_int,
    pub(super) port_space: c_int,
    source_length: libc::socklen_t,
    destination_length: libc::socklen_t,
    pub(super) source: *mut libc::sockaddr,
    pub(super) destination: *mut libc::sockaddr,
    source_name: *mut c_char,
    destination_name: *mut c_char,
    route_length: usize,
    route: *mut c_void,
    connect_length: usize,
    connect: *mut c_void,
    next: *mut AddressInfo,
}

const _: () = assert!(size_of::<AddressInfo>() == 96);

const PASSIVE: c_int = 1;
const NUMERIC_HOST: c_int = 2;

/// Room for any address of IP.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Storage([u8; size_of::<libc::sockaddr_in6>()]);

/// Addresses with what they point at.
#[repr(C)]
struct Found {
    shown: AddressInfo,
    addresses: [Storage; 2],
}

/// A copy of an address.
///
/// # Safety
/// Null, or as many bytes as are said.
unsafe fn copy(address: *const libc::sockaddr, length: libc::socklen_t) -> Option<Storage> {
    let length = length as usize;
    if address.is_null() || length == 0 || length > size_of::<Storage>() {
        return None;
    }
    let mut storage = Storage([0; size_of::<libc::sockaddr_in6>()]);
    // SAFETY: as the caller says, and there is room.
    unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), storage.0.as_mut_ptr(), length) };
    Some(storage)
}

unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&AddressInfo>,
) -> Result<*mut AddressInfo, c_int> {
    let flags = hints.map_or(0, |hints| hints.flags);
    let port_space = match hints.map_or(0, |hints| hints.port_space) {
        0 => abi::port_space::TCP.cast_signed(),
        given => given,
    };
    let is_passive = flags & PASSIVE != 0;
    // SAFETY: numbers and pointers, all of which may be zero.
    let mut wanted: libc::addrinfo = unsafe { std::mem::zeroed() };
    wanted.ai_family = hints.map_or(libc::AF_UNSPEC, |hints| hints.family);
    wanted.ai_socktype = libc::SOCK_STREAM;
    wanted.ai_flags = if is_passive { libc::AI_PASSIVE } else { 0 }
        | if flags & NUMERIC_HOST != 0 {
            libc::AI_NUMERICHOST
        } else {
            0
        };
    let mut list = ptr::null_mut();
    // SAFETY: strings of the caller's or none, and a place of this function's.
    let status = unsafe { libc::getaddrinfo(node, service, &raw const wanted, &raw mut list) };
    if status != 0 {
        return Err(match status {
            libc::EAI_MEMORY => libc::ENOMEM,
            libc::EAI_SYSTEM => std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
            libc::EAI_FAMILY => libc::EAFNOSUPPORT,
            libc::EAI_NONAME => libc::ENODATA,
            _ => libc::EINVAL,
        });
    }
    // SAFETY: the list has an entry, since it was found.
    let (family, address) = unsafe { ((*list).ai_family, copy((*list).ai_addr, (*list).ai_addrlen)) };
    // SAFETY: made above, and not used any more.
    unsafe { libc::freeaddrinfo(list) };
    let address = address.ok_or(libc::EAFNOSUPPORT)?;
    // SAFETY: null or an address of the caller's.
    let source = hints.and_then(|hints| unsafe { copy(hints.source, hints.source_length) });
    let length = match family {
        libc::AF_INET => size_of::<libc::sockaddr_in>(),
        _ => size_of::<libc::sockaddr_in6>(),
    } as libc::socklen_t;
    let (source, destination) = if is_passive {
        (Some(address), None)
    } else {
        (source, Some(address))
    };
    let none = Storage([0; size_of::<libc::sockaddr_in6>()]);
    let found = Box::leak(Box::new(Found {
        shown: AddressInfo {
            flags,
            family,
            qp_type: hints.map_or(0, |hints| hints.qp_type),
            port_space,
            source_length: 0,
            destination_length: 0,
            source: ptr::null_mut(),
            destination: ptr::null_mut(),
            source_name: ptr::null_mut(),
            destination_name: ptr::null_mut(),
            route_length: 0,
            route: ptr::null_mut(),
            connect_length: 0,
            connect: ptr::null_mut(),
            next: ptr::null_mut(),
        },
        addresses: [source.unwrap_or(none), destination.unwrap_or(none)],
    }));
    if found.shown.qp_type == 0 {
        found.shown.qp_type = abi::qp_type::RC.cast_signed();
    }
    if source.is_some() {
        found.shown.source = (&raw mut found.addresses[0]).cast();
        found.shown.source_length = length;
    }
    if destination.is_some() {
        found.shown.destination = (&raw mut found.addresses[1]).cast();
        found.shown.destination_length = length;
    }
    Ok(&raw mut found.shown)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const AddressInfo,
    info: *mut *mut AddressInfo,
) -> c_int {
    // SAFETY: as the caller says.
    minus_one(unsafe { look_up(node, service, hints.as_ref()) }.map(|found| {
        // SAFETY: a place of the caller's.
        unsafe { *info = found };
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdma_freeaddrinfo(info: *mut AddressInfo) {
    if !info.is_null() {
        // SAFETY: made by a Box in `look_up`, and not used any more, says the caller.
        drop(unsafe { Box::from_raw(info.cast::<Found>()) });
    }
}
