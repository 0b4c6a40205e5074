//! UDP sockets, by system calls. `librspreload.so` directs the C library's names for them to this library: the standard
//! library's sockets would be rsockets, which contain sockets.

use std::ffi::c_int;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect, getsockname, recvfrom,
    sendto, socket_with,
};

/// A bound, non-blocking socket.
pub(crate) struct Udp(OwnedFd);

impl Udp {
    /// Makes a socket with an address; port 0: any.
    pub(crate) fn new(address: SocketAddr) -> Result<Udp, c_int> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::DGRAM, flags, None).map_err(Errno::raw_os_error)?;
        bind(&socket, &address).map_err(Errno::raw_os_error)?;
        Ok(Udp(socket))
    }

    /// Makes a socket with any address and port, to reach a peer.
    pub(crate) fn towards(peer: SocketAddr) -> Result<Udp, c_int> {
        Udp::new(match peer {
            SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
        })
    }

    /// Returns its address, as the system has it.
    pub(crate) fn local(&self) -> Result<SocketAddr, c_int> {
        let local = getsockname(&self.0).and_then(SocketAddr::try_from);
        local.map_err(Errno::raw_os_error)
    }

    /// Returns the local address from which a peer is reached.
    pub(crate) fn route(peer: SocketAddr) -> Result<SocketAddr, c_int> {
        let socket = Udp::towards(peer)?;
        connect(&socket.0, &peer).map_err(Errno::raw_os_error)?;
        socket.local()
    }

    /// Returns the next datagram, truncated if it is longer than the buffer: the number of bytes, and the sender.
    pub(crate) fn receive(&self, into: &mut [u8]) -> Option<(usize, SocketAddr)> {
        let (length, _, from) = recvfrom(&self.0, into, RecvFlags::empty()).ok()?;
        let from = SocketAddr::try_from(from?).ok()?;
        Some((length, SocketAddr::new(from.ip().to_canonical(), from.port())))
    }

    /// Sends a datagram.
    pub(crate) fn send(&self, bytes: &[u8], to: SocketAddr) -> Result<(), c_int> {
        let to = match (to.ip(), self.local()?) {
            (std::net::IpAddr::V4(v4), SocketAddr::V6(_)) => {
                SocketAddr::new(v4.to_ipv6_mapped().into(), to.port())
            }
            _ => to,
        };
        let sent = sendto(&self.0, bytes, SendFlags::empty(), &to);
        sent.map(|_| ()).map_err(|errno| match errno {
            Errno::AGAIN => libc::ENOBUFS,
            other => other.raw_os_error(),
        })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
