//! Addresses by name.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use crate::{abi, minus_one};

/// `struct rdma_addrinfo`.
#[repr(C)]
pub(super) struct AddressInfo {
    pub(super) flags: c_int,
    family: c_int,
    pub(super) qp_type: c_int,
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

/// Room for any IP address.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Storage([u8; size_of::<libc::sockaddr_in6>()]);

/// An address and its length.
type Address = (Storage, libc::socklen_t);

/// Addresses with what they point at.
#[repr(C)]
struct Found {
    shown: AddressInfo,
    addresses: [Storage; 2],
}

/// Copies an address.
///
/// # Safety
/// Null, or as many bytes as are said.
unsafe fn copy(address: *const libc::sockaddr, length: libc::socklen_t) -> Option<Address> {
    let bytes = length as usize;
    if address.is_null() || bytes == 0 || bytes > size_of::<Storage>() {
        return None;
    }
    let mut storage = Storage([0; size_of::<libc::sockaddr_in6>()]);
    // SAFETY: as the caller says, and there is room.
    unsafe { ptr::copy_nonoverlapping(address.cast::<u8>(), storage.0.as_mut_ptr(), bytes) };
    Some((storage, length))
}

/// Returns the type of the queue pairs that a program asks for, and their port space. A value that the program leaves open
/// follows from the other one; if both are open, they are RC and RDMA_PS_TCP.
fn kind(hints: &AddressInfo) -> (u32, u32) {
    use abi::port_space::{IPOIB, TCP, UDP};
    use abi::qp_type::{RC, UD};
    match (hints.qp_type.cast_unsigned(), hints.port_space.cast_unsigned()) {
        (0, 0) => (RC, TCP),
        (0, ports @ (UDP | IPOIB)) => (UD, ports),
        (0, ports) => (RC, ports),
        (UD, 0) => (UD, UDP),
        (qp_type, 0) => (qp_type, TCP),
        both => both,
    }
}

/// Looks up the address of a host or a service, or both, by name.
///
/// # Safety
/// Strings or null.
unsafe fn find(
    node: *const c_char,
    service: *const c_char,
    hints: &AddressInfo,
    is_datagram: bool,
) -> Result<(c_int, Address), c_int> {
    // SAFETY: numbers and pointers, all of which may be zero.
    let mut wanted: libc::addrinfo = unsafe { std::mem::zeroed() };
    wanted.ai_family = hints.family;
    wanted.ai_socktype = if is_datagram {
        libc::SOCK_DGRAM
    } else {
        libc::SOCK_STREAM
    };
    for (flag, of_system) in [(PASSIVE, libc::AI_PASSIVE), (NUMERIC_HOST, libc::AI_NUMERICHOST)] {
        if hints.flags & flag != 0 {
            wanted.ai_flags |= of_system;
        }
    }
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
    Ok((family, address.ok_or(libc::EAFNOSUPPORT)?))
}

unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&AddressInfo>,
) -> Result<*mut AddressInfo, c_int> {
    let is_named = !node.is_null() || !service.is_null();
    if !is_named && hints.is_none() {
        return Err(libc::EINVAL);
    }
    // SAFETY: numbers and pointers, all of which may be zero.
    let nothing: AddressInfo = unsafe { std::mem::zeroed() };
    let hints = hints.unwrap_or(&nothing);
    let (qp_type, port_space) = kind(hints);
    // SAFETY: null or addresses of the caller's.
    let (mut source, mut destination) = unsafe {
        (
            copy(hints.source, hints.source_length),
            copy(hints.destination, hints.destination_length),
        )
    };
    let mut family = hints.family;
    if is_named {
        let address;
        // SAFETY: as the caller says.
        (family, address) = unsafe { find(node, service, hints, qp_type == abi::qp_type::UD) }?;
        if hints.flags & PASSIVE != 0 {
            (source, destination) = (Some(address), None);
        } else {
            destination = Some(address);
        }
    }
    let none = (Storage([0; size_of::<libc::sockaddr_in6>()]), 0);
    let ((source, source_length), (destination, destination_length)) =
        (source.unwrap_or(none), destination.unwrap_or(none));
    let found = Box::leak(Box::new(Found {
        shown: AddressInfo {
            flags: hints.flags,
            family,
            qp_type: qp_type.cast_signed(),
            port_space: port_space.cast_signed(),
            source_length,
            destination_length,
            ..nothing
        },
        addresses: [source, destination],
    }));
    if source_length != 0 {
        found.shown.source = (&raw mut found.addresses[0]).cast();
    }
    if destination_length != 0 {
        found.shown.destination = (&raw mut found.addresses[1]).cast();
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
