//! Addresses as programs give and read them.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::udp::Udp;

/// Reads a socket address that a program gave.
///
/// # Safety
/// Null, or a socket address of the size that its family has.
pub(crate) unsafe fn read(address: *const libc::sockaddr) -> Result<SocketAddr, c_int> {
    // SAFETY: null or a socket address, says the caller.
    let family = unsafe { address.as_ref() }.ok_or(libc::EINVAL)?.sa_family;
    match c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: of this family.
            let v4 = unsafe { &*address.cast::<libc::sockaddr_in>() };
            let address = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Ok(SocketAddr::new(address.into(), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: of this family.
            let v6 = unsafe { &*address.cast::<libc::sockaddr_in6>() };
            let address = IpAddr::from(Ipv6Addr::from(v6.sin6_addr.s6_addr)).to_canonical();
            Ok(SocketAddr::new(address, u16::from_be(v6.sin6_port)))
        }
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// Returns the words of a `struct sockaddr_storage` with an address.
pub(super) fn storage(address: SocketAddr) -> [u64; 16] {
    let mut bytes = [0u8; 128];
    let family = match address.ip() {
        IpAddr::V4(v4) => {
            bytes[4..8].copy_from_slice(&v4.octets());
            libc::AF_INET
        }
        IpAddr::V6(v6) => {
            bytes[8..24].copy_from_slice(&v6.octets());
            libc::AF_INET6
        }
    };
    bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    let mut words = [0; 16];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*bytes);
    }
    words
}

/// Writes an address as a socket of a family has it, truncated if there is too little room, and its whole length.
///
/// # Safety
/// As much room as `length` says.
pub(crate) unsafe fn write(
    address: SocketAddr,
    family: c_int,
    into: *mut libc::sockaddr,
    length: *mut libc::socklen_t,
) {
    let mut bytes = [0u8; size_of::<libc::sockaddr_in6>()];
    bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    let whole = match (address.ip(), family) {
        (IpAddr::V4(v4), libc::AF_INET) => {
            bytes[4..8].copy_from_slice(&v4.octets());
            size_of::<libc::sockaddr_in>()
        }
        (IpAddr::V4(v4), _) => {
            bytes[8..24].copy_from_slice(&v4.to_ipv6_mapped().octets());
            bytes.len()
        }
        (IpAddr::V6(v6), _) => {
            bytes[8..24].copy_from_slice(&v6.octets());
            bytes.len()
        }
    };
    // SAFETY: as much room as the caller says, and no more bytes than there are.
    unsafe {
        let room = (*length as usize).min(whole);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), into.cast(), room);
        *length = whole as libc::socklen_t;
    }
}

/// Returns the local address from which a peer is reached.
pub(crate) fn route(peer: SocketAddr) -> Result<IpAddr, c_int> {
    Ok(Udp::route(peer)?.ip())
}
