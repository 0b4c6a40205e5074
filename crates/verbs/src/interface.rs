//! Network interfaces of this host, and their addresses.
#![allow(unsafe_code, reason = "getifaddrs, which rustix lacks")]

use std::ffi::{CStr, CString, c_int};
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// A network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its number.
    pub index: u32,
    /// Its MTU in bytes.
    pub mtu: u32,
}

/// Calls `call` with each address of each network interface, and the interface's name.
fn each_interface(mut call: impl FnMut(&libc::ifaddrs, &CStr)) -> io::Result<()> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the call writes the head of a list that it allocates, or fails; it is freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut at = list.cast_const();
    // SAFETY: `at` is null or an entry of the list, which is not freed yet.
    while let Some(entry) = unsafe { at.as_ref() } {
        // SAFETY: the name of an entry is a string that ends with 0, and lives as long as the list.
        call(entry, unsafe { CStr::from_ptr(entry.ifa_name) });
        at = entry.ifa_next;
    }
    // SAFETY: the list is one that getifaddrs made, and nothing refers to it any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(())
}

/// Returns the addresses of all network interfaces that are up, those that other hosts can reach first. IPv6 link-local
/// addresses, which mean nothing without their link, are left out.
pub fn local_addresses() -> io::Result<Vec<IpAddr>> {
    let mut found = Vec::new();
    each_interface(|entry, _| {
        let is_up = entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0;
        let address = interface_address(entry).filter(|_| is_up);
        found.extend(
            address.filter(|address| !matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())),
        );
    })?;
    found.sort_by_key(|address| (address.is_loopback(), address.is_ipv6(), *address));
    found.dedup();
    Ok(found)
}

/// Returns name and MTU of each network interface that is up and has its link, in the order of the names: those of this process's network
/// namespace, to which a `/sys` of another one has no access.
pub fn link_mtus() -> io::Result<Vec<(String, u32)>> {
    let mut names = Vec::new();
    each_interface(|entry, name| {
        let wanted = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_uint;
        if entry.ifa_flags & wanted == wanted {
            names.push(name.to_owned());
        }
    })?;
    names.sort();
    names.dedup();
    let fd = socket_for(Ipv4Addr::LOCALHOST.into())?;
    // An interface may have gone meanwhile.
    let mtu = |name: CString| {
        let mtu = interface_mtu(&fd, &name).ok()?;
        Some((name.to_string_lossy().into_owned(), mtu))
    };
    Ok(names.into_iter().filter_map(mtu).collect())
}

/// Returns the network interface that has a local address. All of 127.0.0.0/8 belongs to the loopback interface.
pub fn interface_of(address: IpAddr) -> io::Result<Interface> {
    let mut found = None;
    each_interface(|entry, name| {
        let on_loopback = address.is_ipv4() && address.is_loopback();
        let is_loopback = entry.ifa_flags & libc::IFF_LOOPBACK as libc::c_uint != 0;
        if (on_loopback && is_loopback) || interface_address(entry) == Some(address) {
            found.get_or_insert_with(|| name.to_owned());
        }
    })?;
    let name = found.ok_or_else(|| {
        let what = format!("no network interface has the address {address}");
        io::Error::new(io::ErrorKind::AddrNotAvailable, what)
    })?;
    let fd = socket_for(address)?;
    let index = rustix::net::netdevice::name_to_index(&fd, &name.to_string_lossy())?;
    let mtu = interface_mtu(&fd, &name)?;
    Ok(Interface { index, mtu })
}

/// Returns the name of the network interface with an index.
pub fn interface_name(index: u32) -> Option<String> {
    let fd = socket_for(Ipv4Addr::LOCALHOST.into()).ok()?;
    rustix::net::netdevice::index_to_name(&fd, index).ok()
}

/// Returns the address of an entry, if it is an IP address.
fn interface_address(entry: &libc::ifaddrs) -> Option<IpAddr> {
    // SAFETY: the address is null or a sockaddr, which has a family field whatever its kind.
    let family = unsafe { entry.ifa_addr.as_ref() }?.sa_family;
    match c_int::from(family) {
        libc::AF_INET => {
            // SAFETY: an address of this family is a sockaddr_in; the read needs no alignment.
            let v4 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family is a sockaddr_in6; the read needs no alignment.
            let v6 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

fn interface_mtu(fd: &OwnedFd, name: &CStr) -> io::Result<u32> {
    // SAFETY: an ifreq is integers, bytes and pointers; zero is a value of each.
    let mut request: libc::ifreq = unsafe { MaybeUninit::zeroed().assume_init() };
    let bytes = name.to_bytes();
    if bytes.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = *from as _;
    }
    // SAFETY: the request takes a name that ends with 0 and writes an int into the same ifreq, alive during the call.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut request) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call wrote this field.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    u32::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Returns a socket to ask about interfaces.
fn socket_for(address: IpAddr) -> io::Result<OwnedFd> {
    let family = match address {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    Ok(socket_with(
        family,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?)
}
