//! The system calls on UDP sockets: batches, GSO and GRO, ECN.
//!
//! Two types, because the two directions want opposite sockets. [`RxSocket`] owns a share of port 4791 and is read in
//! batches of merged datagrams. [`TxSocket`] is bound to the GID's address and a port of its own, and is *never
//! connected*: an unconnected socket with `IP_MTU_DISCOVER = DO` is the one kind whose IPv4 Identification is known
//! before sending (0, and `i` for segment `i` of a GSO train), and the ICRC covers that field.
//!
//! Neither type sleeps: every call returns at once, and the caller waits on their descriptors.
#![allow(
    unsafe_code,
    reason = "sendmmsg and recvmmsg with control messages, which rustix lacks"
)]

use std::fmt;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use libc::{c_int, c_void};
use rdmux_verbs::interface::interface_of;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// The UDP destination port of RoCEv2. IBTA Vol 1, Annex A17.
pub const ROCE_PORT: u16 = rdmux_wire::roce::UDP_PORT;

/// Largest number of segments in one GSO train: every kernel that has `UDP_SEGMENT` accepts it (newer ones take 128).
pub const GSO_SEGMENTS_MAX: usize = rdmux_rnic::TRAIN_PACKETS_MAX;

/// Largest number of bytes in one GSO train, and in one datagram: what fits an IPv4 packet.
pub const GSO_BYTES_MAX: usize = rdmux_rnic::TRAIN_BYTES_MAX;

/// Largest number of datagrams that one [`RxSocket::recv_batch`] returns.
pub const RX_BATCH: usize = 8;

/// Entries that one `sendmmsg` takes; longer slices are sent in several calls.
const TX_BATCH: usize = 16;

/// Bytes of one receive buffer: more than the largest datagram, merged or not.
const RX_BUFFER_BYTES: usize = 1 << 16;

/// Size that is requested for receive and send buffers; the kernel grants an ordinary user `net.core.{r,w}mem_max`.
pub const SOCKET_BUFFER_BYTES: usize = 8 << 20;

/// Hop limit of datagrams to a group: a group may reach as far as a host does.
const MULTICAST_HOPS: u32 = 64;

/// A socket that receives RoCEv2 datagrams.
#[derive(Debug)]
pub struct RxSocket {
    fd: OwnedFd,
    local: SocketAddr,
}

impl RxSocket {
    /// Binds a socket to `local`; with `reuse_port` it may join the `SO_REUSEPORT` group of that address.
    ///
    /// # Errors
    /// Those of `socket`, `setsockopt` and `bind`; `AddrInUse` where the port belongs to another socket.
    pub fn bind(local: SocketAddr, reuse_port: bool) -> io::Result<Self> {
        let fd = udp_socket(local.ip())?;
        sockopt::set_socket_reuseport(&fd, reuse_port)?;
        set_int(&fd, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        match local {
            SocketAddr::V4(_) => sockopt::set_ip_recvtos(&fd, true)?,
            SocketAddr::V6(_) => {
                sockopt::set_ipv6_recvtclass(&fd, true)?;
                // The kernel's rxe sends UDP checksum 0 over IPv6 too; the ICRC protects those packets.
                set_int(&fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
            }
        }
        ask_buffer(&fd, Buffer::Receive, SOCKET_BUFFER_BYTES)?;
        rustix::net::bind(&fd, &local)?;
        Self::from_fd(fd)
    }

    /// Binds a socket to a multicast group's address and joins the group on an interface. Any process may do the same: each
    /// socket gets a copy.
    ///
    /// # Errors
    /// Those of `socket`, `setsockopt` and `bind`; `AddrInUse` where the port belongs to a socket that shares nothing.
    pub fn join(group: IpAddr, interface: u32) -> io::Result<Self> {
        let fd = udp_socket(group)?;
        sockopt::set_socket_reuseaddr(&fd, true)?;
        set_int(&fd, libc::SOL_UDP, libc::UDP_GRO, 1)?;
        let local = match group {
            IpAddr::V4(group) => {
                sockopt::set_ip_recvtos(&fd, true)?;
                // Receive only what arrives on this interface, not what other sockets joined the group for.
                set_int(&fd, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
                SocketAddr::new(group.into(), ROCE_PORT)
            }
            IpAddr::V6(group) => {
                sockopt::set_ipv6_recvtclass(&fd, true)?;
                set_int(&fd, libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
                set_int(&fd, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL, 0)?;
                SocketAddrV6::new(group, ROCE_PORT, 0, interface).into()
            }
        };
        ask_buffer(&fd, Buffer::Receive, SOCKET_BUFFER_BYTES)?;
        rustix::net::bind(&fd, &local)?;
        match group {
            IpAddr::V4(group) => {
                let any = Ipv4Addr::UNSPECIFIED;
                sockopt::set_ip_add_membership_with_ifindex(&fd, &group, &any, interface)?;
            }
            IpAddr::V6(group) => sockopt::set_ipv6_add_membership(&fd, &group, interface)?,
        }
        Self::from_fd(fd)
    }

    /// Takes a bound, non-blocking UDP socket that [`RxSocket::bind`] set up here or in another process.
    ///
    /// # Errors
    /// `InvalidInput` when the descriptor is not a bound UDP socket.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let local = local_addr(&fd)?;
        if sockopt::socket_type(&fd)? != SocketType::DGRAM {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self { fd, local })
    }

    /// Returns a second handle to the same socket; both read from one queue.
    ///
    /// # Errors
    /// Those of `fcntl(F_DUPFD_CLOEXEC)`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            fd: self.fd.try_clone()?,
            local: self.local,
        })
    }

    /// Returns the address and port that the socket is bound to: the destination of everything it receives.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns the size of the receive buffer as the kernel accounts for it. The kernel charges a datagram with the
    /// memory that it occupies, headers and page rounding included, and not with its length: as a rule half of the
    /// buffer holds payload.
    ///
    /// # Errors
    /// Those of `getsockopt`.
    pub fn buffer_bytes(&self) -> io::Result<usize> {
        Ok(sockopt::socket_recv_buffer_size(&self.fd)?)
    }

    /// Asks for another receive buffer; the kernel doubles the figure, and limits it to `net.core.rmem_max` for a
    /// process without `CAP_NET_ADMIN`. Returns [`RxSocket::buffer_bytes`].
    ///
    /// # Errors
    /// Those of `setsockopt`.
    pub fn set_buffer_bytes(&self, bytes: usize) -> io::Result<usize> {
        ask_buffer(&self.fd, Buffer::Receive, bytes)?;
        self.buffer_bytes()
    }

    /// Receives the waiting datagrams, [`RX_BATCH`] at most, into `batch`, and returns how many; 0 when the queue is
    /// empty. The batch's former contents are lost either way.
    ///
    /// A return below [`RX_BATCH`] does not mean that the queue is empty: the call takes a single datagram when the
    /// last call found none, which is the cheapest way for a caller that spins.
    ///
    /// # Errors
    /// Those of `recvmsg`, `WouldBlock` and `Interrupted` excepted.
    pub fn recv_batch(&self, batch: &mut RxBatch) -> io::Result<usize> {
        batch.filled = 0;
        let received = match if batch.wide {
            self.recv_many(batch)
        } else {
            self.recv_one(batch)
        } {
            Ok(n) => n,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => 0,
            Err(e) => return Err(e),
        };
        batch.wide = received > 0;
        batch.filled = received;
        Ok(received)
    }

    fn recv_one(&self, batch: &mut RxBatch) -> io::Result<usize> {
        batch.prepare(1);
        let header = &mut batch.headers.messages[0];
        // SAFETY: `prepare` pointed the header's name, buffer and control space at memory that `batch` owns, with its
        // sizes, and `batch` is exclusively borrowed and not moved until the call returns.
        let n = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut header.msg_hdr, libc::MSG_DONTWAIT) };
        header.msg_len = u32::try_from(n).map_err(|_| io::Error::last_os_error())?;
        Ok(1)
    }

    fn recv_many(&self, batch: &mut RxBatch) -> io::Result<usize> {
        batch.prepare(RX_BATCH);
        // SAFETY: as in `recv_one`, for each of the RX_BATCH headers; the kernel writes no more than that many.
        let n = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                batch.headers.messages.as_mut_ptr(),
                RX_BATCH as _,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

impl AsFd for RxSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<RxSocket> for OwnedFd {
    fn from(socket: RxSocket) -> Self {
        socket.fd
    }
}

/// The buffers of [`RxSocket::recv_batch`]: allocated once, touched by the kernel only as far as datagrams reach.
pub struct RxBatch {
    buffers: Box<[u8]>,
    headers: Box<RxHeaders>,
    filled: usize,
    wide: bool,
}

struct RxHeaders {
    messages: [libc::mmsghdr; RX_BATCH],
    iovecs: [libc::iovec; RX_BATCH],
    names: [libc::sockaddr_storage; RX_BATCH],
    controls: [Control; RX_BATCH],
}

// SAFETY: the pointers in the headers are written by `prepare` at the start of each call, point at memory that the batch
// itself owns, and are used by that call alone; none is shared with another value.
unsafe impl Send for RxBatch {}

impl Default for RxBatch {
    fn default() -> Self {
        Self::new()
    }
}

impl RxBatch {
    /// Allocates the buffers.
    #[must_use]
    pub fn new() -> Self {
        Self {
            buffers: vec![0; RX_BATCH * RX_BUFFER_BYTES].into_boxed_slice(),
            // SAFETY: all fields are C structures of integers and pointers, or bytes; zero is a value of each.
            headers: unsafe { Box::new(MaybeUninit::<RxHeaders>::zeroed().assume_init()) },
            filled: 0,
            wide: false,
        }
    }

    /// Returns the datagrams of the last [`RxSocket::recv_batch`], in their order of arrival.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Datagram<'_>> {
        (0..self.filled).map(|i| self.datagram(i))
    }

    /// Points the first `count` headers at their buffers. Each call does so, since the kernel overwrites the lengths.
    fn prepare(&mut self, count: usize) {
        let headers = &mut *self.headers;
        for (i, buffer) in self
            .buffers
            .chunks_exact_mut(RX_BUFFER_BYTES)
            .take(count)
            .enumerate()
        {
            headers.iovecs[i] = libc::iovec {
                iov_base: buffer.as_mut_ptr().cast(),
                iov_len: buffer.len(),
            };
            let header = &mut headers.messages[i].msg_hdr;
            header.msg_name = (&raw mut headers.names[i]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
            header.msg_iov = &raw mut headers.iovecs[i];
            header.msg_iovlen = 1;
            header.msg_control = headers.controls[i].0.as_mut_ptr().cast();
            header.msg_controllen = CONTROL_BYTES as _;
        }
    }

    fn datagram(&self, i: usize) -> Datagram<'_> {
        let message = &self.headers.messages[i];
        let len = (message.msg_len as usize).min(RX_BUFFER_BYTES);
        let bytes = &self.buffers[i * RX_BUFFER_BYTES..][..len];
        let mut datagram = Datagram {
            src: socket_addr(&self.headers.names[i]),
            tos: 0,
            segment_size: len.max(1),
            bytes,
        };
        #[allow(clippy::unnecessary_cast, reason = "its type differs between C libraries")]
        let control_bytes = (message.msg_hdr.msg_controllen as usize).min(CONTROL_BYTES);
        self.headers.controls[i].for_each(control_bytes, |level, kind, data| match (level, kind) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                if let Some(size) = int_of(data).filter(|&size| size > 0) {
                    datagram.segment_size = size as usize;
                }
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => datagram.tos = data.first().copied().unwrap_or(0),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => datagram.tos = int_of(data).unwrap_or(0) as u8,
            _ => {}
        });
        datagram
    }
}

impl fmt::Debug for RxBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RxBatch")
            .field("filled", &self.filled)
            .finish_non_exhaustive()
    }
}

/// Result of one receive: a datagram, or several of one sender that GRO merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The sender.
    pub src: SocketAddr,
    /// IPv4 TOS or IPv6 traffic class; the low two bits are ECN.
    pub tos: u8,
    /// Bytes of each datagram in `bytes`, the last of which may be shorter; at least 1.
    pub segment_size: usize,
    /// The UDP payloads, one after the other.
    pub bytes: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Returns the UDP payload of each datagram.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        self.bytes.chunks(self.segment_size)
    }
}

/// One entry of [`TxSocket::send_batch`]: a datagram, or a train of them to one destination.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Destination.
    pub dst: SocketAddr,
    /// Cuts the bytes into datagrams of this size, the last one shorter or equal: at most [`GSO_SEGMENTS_MAX`] of them.
    pub segment_size: Option<u16>,
    /// IPv4 TOS or IPv6 traffic class.
    pub tos: u8,
    /// The bytes, in pieces; [`GSO_BYTES_MAX`] at most.
    pub parts: &'a [IoSlice<'a>],
}

impl Outgoing<'_> {
    fn len(&self) -> usize {
        self.parts.iter().map(|p| p.len()).sum()
    }

    /// Returns the segment size if there is more than one segment.
    fn train(&self) -> Option<u16> {
        self.segment_size.filter(|&size| self.len() > usize::from(size))
    }
}

/// Reason why [`TxSocket::send_batch`] stopped.
#[derive(Debug, thiserror::Error)]
#[error("datagram {index}: {source}")]
pub struct SendError {
    /// The entry that failed; all before it were sent, and those after it were not tried.
    pub index: usize,
    /// `EMSGSIZE` when a datagram does not fit the MTU of the path; `ENETUNREACH` and similar errors.
    pub source: io::Error,
}

impl SendError {
    /// Returns whether the datagram was too large for the path. Others may still fit.
    #[must_use]
    pub fn is_too_large(&self) -> bool {
        self.source.raw_os_error() == Some(libc::EMSGSIZE)
    }
}

/// A socket that sends RoCEv2 datagrams whose IPv4 Identification is known.
///
/// The receiver's kernel may merge datagrams of one source port before it chooses the socket of the `SO_REUSEPORT`
/// group, so a caller keeps one `TxSocket` for each (destination address, top byte of the destination QPN).
#[derive(Debug)]
pub struct TxSocket {
    fd: OwnedFd,
    local: SocketAddr,
    gso: AtomicBool,
    gso_refused: AtomicU64,
}

impl TxSocket {
    /// Binds a socket to `local` and a port that the kernel chooses.
    ///
    /// # Errors
    /// Those of `socket`, `setsockopt` and `bind`.
    pub fn bind(local: IpAddr) -> io::Result<Self> {
        let fd = udp_socket(local)?;
        match local {
            IpAddr::V4(_) => sockopt::set_ip_mtu_discover(&fd, sockopt::Ipv4PathMtuDiscovery::DO)?,
            IpAddr::V6(_) => {
                sockopt::set_ipv6_mtu_discover(&fd, sockopt::Ipv6PathMtuDiscovery::DO)?;
                set_int(&fd, libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1)?;
            }
        }
        ask_buffer(&fd, Buffer::Send, SOCKET_BUFFER_BYTES)?;
        // Nothing reads this socket: datagrams that others send to it must not take memory.
        sockopt::set_socket_recv_buffer_size(&fd, 1)?;
        rustix::net::bind(&fd, &SocketAddr::new(local, 0))?;
        send_multicast_by(&fd, local)?;
        let local = local_addr(&fd)?;
        Ok(Self {
            fd,
            local,
            gso: AtomicBool::new(true),
            gso_refused: AtomicU64::new(0),
        })
    }

    /// Returns the source address and port; the ICRC covers both.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Returns whether trains are sent whole. Once it is false every datagram is sent on its own with IPv4
    /// Identification 0, so the caller must build trains of one segment for the ICRC to be right. It never becomes true
    /// again.
    #[must_use]
    pub fn gso(&self) -> bool {
        self.gso.load(Relaxed)
    }

    /// Returns how many trains the kernel refused and the socket sent in pieces.
    #[must_use]
    pub fn gso_refused(&self) -> u64 {
        self.gso_refused.load(Relaxed)
    }

    /// Stops the use of GSO, for links whose hardware numbers segments in its own way.
    pub fn disable_gso(&self) {
        self.gso.store(false, Relaxed);
    }

    /// Sends a train to a socket on the same address and checks that it arrives. Turns GSO off when it does not.
    ///
    /// # Errors
    /// Those of making and reading the second socket; a refused train is no error.
    pub fn self_test(&self) -> io::Result<bool> {
        const SEGMENT: usize = 100;
        let mut bytes = [0; 3 * SEGMENT + 17];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = i as u8 ^ 0x5a;
        }
        let rx = RxSocket::bind(SocketAddr::new(self.local.ip(), 0), false)?;
        let parts = [IoSlice::new(&bytes)];
        let train = Outgoing {
            dst: rx.local_addr(),
            segment_size: Some(SEGMENT as u16),
            tos: 0,
            parts: &parts,
        };
        let sent = self.send_batch(&[train]).is_ok_and(|n| n == 1);

        let mut batch = RxBatch::new();
        let mut segments = Vec::new();
        let deadline = Instant::now() + Duration::from_millis(200);
        while sent && segments.len() < 4 && Instant::now() < deadline {
            rx.recv_batch(&mut batch)?;
            for datagram in batch.iter().filter(|d| d.src == self.local) {
                segments.extend(datagram.segments().map(<[u8]>::to_vec));
            }
        }
        if segments.len() != 4 || !segments.iter().zip(bytes.chunks(SEGMENT)).all(|(a, b)| a == b) {
            self.disable_gso();
        }
        Ok(self.gso())
    }

    /// Sends `outgoing` in order and returns how many entries went out: fewer than all when the socket's buffer is
    /// full.
    ///
    /// # Errors
    /// A [`SendError`] with the index of the entry that cannot be sent; the caller may continue after that entry.
    pub fn send_batch(&self, outgoing: &[Outgoing<'_>]) -> Result<usize, SendError> {
        let mut sent = 0;
        while sent < outgoing.len() {
            let rest = &outgoing[sent..];
            let result = match rest {
                [one] => self.send_one(one).map(|()| 1),
                many => self.send_many(&many[..many.len().min(TX_BATCH)]),
            };
            match result {
                Ok(n) => sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if self.refuses_gso(&rest[0], &e) => {
                    self.gso_refused.fetch_add(1, Relaxed);
                    self.disable_gso();
                }
                Err(source) => return Err(SendError { index: sent, source }),
            }
        }
        Ok(sent)
    }

    /// Returns whether `e` means that the device below cannot segment, rather than that the entry is wrong.
    fn refuses_gso(&self, entry: &Outgoing<'_>, e: &io::Error) -> bool {
        self.gso() && entry.train().is_some() && matches!(e.raw_os_error(), Some(libc::EIO | libc::EINVAL))
    }

    fn send_one(&self, entry: &Outgoing<'_>) -> io::Result<()> {
        check(entry)?;
        if entry.train().is_some() && !self.gso() {
            return self.send_segments(entry);
        }
        let mut name = SockAddr::new(entry.dst);
        let mut control = Control::new();
        let header = header(entry, &mut name, &mut control);
        // SAFETY: `header` points at `name`, `control` and the entry's parts, with their sizes; all three outlive the
        // call, and the kernel only reads them.
        let n = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const header, SEND_FLAGS) };
        if n < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Sends a prefix of `entries`, and returns its length; an error concerns the first entry.
    fn send_many(&self, entries: &[Outgoing<'_>]) -> io::Result<usize> {
        let gso = self.gso();
        // An entry that must not go to the kernel unchanged ends the batch; `send_one` handles it alone.
        let count = entries
            .iter()
            .take_while(|e| check(e).is_ok() && (gso || e.train().is_none()))
            .take(TX_BATCH)
            .count();
        if count <= 1 {
            return self.send_one(&entries[0]).map(|()| 1);
        }
        let mut names: [MaybeUninit<SockAddr>; TX_BATCH] = [const { MaybeUninit::uninit() }; TX_BATCH];
        let mut controls: [MaybeUninit<Control>; TX_BATCH] = [const { MaybeUninit::uninit() }; TX_BATCH];
        let mut messages: [MaybeUninit<libc::mmsghdr>; TX_BATCH] =
            [const { MaybeUninit::uninit() }; TX_BATCH];
        for (i, entry) in entries[..count].iter().enumerate() {
            let name = names[i].write(SockAddr::new(entry.dst));
            let control = controls[i].write(Control::new());
            messages[i].write(libc::mmsghdr {
                msg_hdr: header(entry, name, control),
                msg_len: 0,
            });
        }
        // SAFETY: the first `count` headers are initialised and point at names, controls and parts, with their sizes,
        // that outlive the call; the kernel writes nothing but `msg_len` of those headers.
        let n = unsafe {
            libc::sendmmsg(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr().cast(),
                count as _,
                SEND_FLAGS as _,
            )
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }

    /// Sends each segment of a train as a datagram of its own. When the socket's buffer fills up in the middle the rest
    /// is lost, as on any link, and the train counts as sent.
    fn send_segments(&self, entry: &Outgoing<'_>) -> io::Result<()> {
        let bytes: Vec<u8> = entry.parts.iter().flat_map(|p| p.iter().copied()).collect();
        let size = usize::from(entry.segment_size.unwrap_or(u16::MAX)).max(1);
        for (i, segment) in bytes.chunks(size).enumerate() {
            let parts = [IoSlice::new(segment)];
            match self.send_one(&Outgoing {
                segment_size: None,
                parts: &parts,
                ..*entry
            }) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && i > 0 => break,
                result => result?,
            }
        }
        Ok(())
    }
}

impl AsFd for TxSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

const SEND_FLAGS: c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// Refuses an entry that the kernel would refuse with the same error number as missing GSO, or would cut in its own
/// way.
fn check(entry: &Outgoing<'_>) -> io::Result<()> {
    let len = entry.len();
    let segments = entry
        .segment_size
        .map_or(1, |size| len.div_ceil(usize::from(size).max(1)));
    if len > GSO_BYTES_MAX {
        return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
    }
    if segments > GSO_SEGMENTS_MAX
        || entry.segment_size == Some(0)
        || entry.parts.len() > libc::UIO_MAXIOV as usize
    {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(())
}

/// Returns the message header of `entry`. It points into all three arguments.
fn header(entry: &Outgoing<'_>, name: &mut SockAddr, control: &mut Control) -> libc::msghdr {
    let mut control_bytes = 0;
    if let Some(size) = entry.train() {
        control_bytes = control.push(
            control_bytes,
            libc::SOL_UDP,
            libc::UDP_SEGMENT,
            &size.to_ne_bytes(),
        );
    }
    if entry.tos != 0 {
        let (level, kind) = match entry.dst {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
        };
        control_bytes = control.push(control_bytes, level, kind, &c_int::from(entry.tos).to_ne_bytes());
    }
    // SAFETY: a msghdr is integers and pointers; zero is a value of each. (Some C libraries add private padding
    // fields, so it cannot be written as a struct expression.)
    let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    header.msg_name = (&raw mut *name).cast();
    header.msg_namelen = match entry.dst {
        SocketAddr::V4(_) => size_of::<libc::sockaddr_in>() as _,
        SocketAddr::V6(_) => size_of::<libc::sockaddr_in6>() as _,
    };
    // An IoSlice has the layout of an iovec; the kernel does not write through it when sending.
    header.msg_iov = entry.parts.as_ptr().cast_mut().cast();
    header.msg_iovlen = entry.parts.len() as _;
    if control_bytes > 0 {
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = control_bytes as _;
    }
    header
}

/// Attaches the filter by which the `SO_REUSEPORT` group of `socket` chooses a member: the top byte of the destination
/// QPN, which is byte 5 of the UDP payload. The filter applies to all sockets of the group.
pub(crate) fn attach_qpn_filter(socket: &RxSocket) -> io::Result<()> {
    const LOAD_WORD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
    const SHIFT_RIGHT: u16 = 0x74; // BPF_ALU | BPF_RSH | BPF_K
    const RETURN_A: u16 = 0x16; // BPF_RET | BPF_A
    let op = |code, k| libc::sock_filter {
        code,
        jt: 0,
        jf: 0,
        k,
    };
    // A datagram that ends before the word makes the load fail, which returns 0: slot 0 drops it as malformed.
    let mut program = [
        op(LOAD_WORD, 4),
        op(AND, 0x00ff_0000),
        op(SHIFT_RIGHT, 16),
        op(RETURN_A, 0),
    ];
    let fprog = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the option's value is a sock_fprog, whose pointer and length describe `program`, alive during the call;
    // the kernel copies the instructions.
    let rc = unsafe {
        libc::setsockopt(
            socket.fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            (&raw const fprog).cast(),
            size_of::<libc::sock_fprog>() as _,
        )
    };
    if rc < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

fn udp_socket(local: IpAddr) -> io::Result<OwnedFd> {
    let family = if local.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)?;
    if local.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    Ok(fd)
}

fn local_addr(fd: &OwnedFd) -> io::Result<SocketAddr> {
    let name = rustix::net::getsockname(fd)?;
    SocketAddr::try_from(name).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Makes a socket send datagrams to groups through the interface that has the address `local`, and to this host too.
fn send_multicast_by(fd: &OwnedFd, local: IpAddr) -> io::Result<()> {
    match local {
        IpAddr::V4(local) => {
            // This fails if no interface has the address; then the routes choose one.
            let _ = sockopt::set_ip_multicast_if(fd, &local);
            sockopt::set_ip_multicast_loop(fd, true)?;
            sockopt::set_ip_multicast_ttl(fd, MULTICAST_HOPS)?;
        }
        IpAddr::V6(_) => {
            if let Ok(interface) = interface_of(local) {
                sockopt::set_ipv6_multicast_if(fd, interface.index)?;
            }
            sockopt::set_ipv6_multicast_loop(fd, true)?;
            sockopt::set_ipv6_multicast_hops(fd, MULTICAST_HOPS)?;
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Buffer {
    Receive,
    Send,
}

/// Sets the size of a buffer, beyond the system's limit if the process may do that, else up to the limit.
fn ask_buffer(fd: &OwnedFd, which: Buffer, bytes: usize) -> io::Result<()> {
    match which {
        Buffer::Receive => sockopt::set_socket_recv_buffer_size_force(fd, bytes)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(fd, bytes))?,
        Buffer::Send => sockopt::set_socket_send_buffer_size_force(fd, bytes)
            .or_else(|_| sockopt::set_socket_send_buffer_size(fd, bytes))?,
    }
    Ok(())
}

fn set_int(fd: &OwnedFd, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    // SAFETY: the value is an int, alive during the call, and its size is given.
    let rc = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            option,
            (&raw const value).cast::<c_void>(),
            size_of::<c_int>() as _,
        )
    };
    if rc < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Bytes of ancillary data: room for three items of an int each.
const CONTROL_BYTES: usize = 72;

/// Ancillary data, read and written as bytes: length (a word), level, type, data, padding to a word.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

impl Control {
    const WORD: usize = size_of::<usize>();
    const HEADER: usize = Self::WORD + 8;

    fn new() -> Self {
        Self([0; CONTROL_BYTES])
    }

    /// Appends an item at `at` and returns where the next one goes. Panics when there is no room.
    fn push(&mut self, at: usize, level: c_int, kind: c_int, data: &[u8]) -> usize {
        let len = Self::HEADER + data.len();
        let item = &mut self.0[at..][..len.next_multiple_of(Self::WORD)];
        item[..Self::WORD].copy_from_slice(&len.to_ne_bytes());
        item[Self::WORD..][..4].copy_from_slice(&level.to_ne_bytes());
        item[Self::WORD + 4..][..4].copy_from_slice(&kind.to_ne_bytes());
        item[Self::HEADER..len].copy_from_slice(data);
        at + item.len()
    }

    /// Calls `f` with level, type and data of each item in the first `len` bytes; stops at one that does not fit.
    fn for_each(&self, len: usize, mut f: impl FnMut(c_int, c_int, &[u8])) {
        let mut rest = &self.0[..len];
        while let Some((header, _)) = rest.split_at_checked(Self::HEADER) {
            let (word, ints) = header.split_at(Self::WORD);
            let item_len = usize::from_ne_bytes(word.try_into().expect("a word"));
            let Some(data) = rest.get(Self::HEADER..item_len) else {
                return;
            };
            let (level, kind) = ints.split_at(4);
            f(
                int_of(level).expect("four bytes"),
                int_of(kind).expect("four bytes"),
                data,
            );
            let Some(next) = rest.get(item_len.next_multiple_of(Self::WORD)..) else {
                return;
            };
            rest = next;
        }
    }
}

fn int_of(bytes: &[u8]) -> Option<c_int> {
    Some(c_int::from_ne_bytes(*bytes.first_chunk()?))
}

/// A socket address as the kernel reads it.
#[repr(C)]
union SockAddr {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl SockAddr {
    fn new(addr: SocketAddr) -> Self {
        match addr {
            SocketAddr::V4(a) => Self {
                v4: libc::sockaddr_in {
                    sin_family: libc::AF_INET as _,
                    sin_port: a.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from_ne_bytes(a.ip().octets()),
                    },
                    sin_zero: [0; 8],
                },
            },
            SocketAddr::V6(a) => Self {
                v6: libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as _,
                    sin6_port: a.port().to_be(),
                    sin6_flowinfo: a.flowinfo(),
                    sin6_addr: libc::in6_addr {
                        s6_addr: a.ip().octets(),
                    },
                    sin6_scope_id: a.scope_id(),
                },
            },
        }
    }
}

/// Returns the address in a name that the kernel wrote; the unspecified address when it is of no IP family.
fn socket_addr(name: &libc::sockaddr_storage) -> SocketAddr {
    let name: *const libc::sockaddr_storage = name;
    // SAFETY: a sockaddr_storage is large and aligned enough for either structure; both hold integers only, for which
    // any bytes are a value; all its bytes are initialised, by zeroing and then by the kernel.
    let (v4, v6) = unsafe {
        (
            &*name.cast::<libc::sockaddr_in>(),
            &*name.cast::<libc::sockaddr_in6>(),
        )
    };
    match c_int::from(v4.sin_family) {
        libc::AF_INET => {
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into()
        }
        libc::AF_INET6 => {
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), v6.sin6_flowinfo, v6.sin6_scope_id).into()
        }
        _ => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
    }
}

#[cfg(test)]
mod tests;
