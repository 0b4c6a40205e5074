//! Datagrams: over UD between sockets that know each other's queue pair, and until then over UDP, with a header that names the
//! queue pair.
//!
//! A socket has a UDP socket, whose port is its own, and a queue pair on each device that peers are reached from.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, RawFd};

use rdmux_verbs::{
    Access, Arm, CompletionQueue, Device, Memory, Operation, QpOptions, QpType, QueuePair, RDMA_UDP_QKEY,
    RecvRequest, SendFlags, SendRequest, Status, Target, WorkCompletion,
};
use rdmux_wire::rsocket::{DatagramHeader, UdpHeader};

use super::buffers::Buffers;
use super::open::device_towards;
use super::options::SocketOptions;
use super::resources::{LibraryMemory, RECEIVE, create_errno};
use crate::udp::Udp;

/// Bytes of a datagram with its header: the size of rdma-core's buffers.
const DATAGRAM_MAX: usize = 2_048;
/// Bytes of the global route header before a received datagram.
const GRH: usize = 40;
/// Bytes of a receive buffer for a datagram.
const SLOT: u64 = (GRH + DATAGRAM_MAX) as u64;
/// Maximum number of known peers; beyond that, all are forgotten and asked again.
const PEERS_MAX: usize = 4_096;
/// Maximum number of datagrams taken at a time, so that peers that never pause do not keep a caller.
const BATCH: usize = 256;

/// A queue pair on a device.
struct DatagramQp {
    device: Device,
    qp: QueuePair,
    cq: CompletionQueue,
    send: LibraryMemory,
    receive: LibraryMemory,
    /// Free slots in the send buffer.
    free: Vec<u64>,
    sends: usize,
}

impl DatagramQp {
    fn new(device: Device, options: &SocketOptions) -> Result<DatagramQp, c_int> {
        let errno = |error| create_errno(&error);
        let slots = |bytes: u32, queue: u16| (bytes / DATAGRAM_MAX as u32).clamp(1, queue.into());
        let sends = slots(options.send_bytes, options.sq_size);
        let receives = slots(options.receive_bytes, options.rq_size);
        let pd = device.alloc_pd().map_err(errno)?;
        let cq = device.create_cq(sends + receives).map_err(errno)?;
        let mut of_qp = QpOptions::new(&cq);
        of_qp.qp_type = QpType::Ud;
        (of_qp.max_send_wr, of_qp.max_recv_wr) = (sends, receives);
        let qp = pd.create_qp(&of_qp).map_err(errno)?;
        let bytes = u64::from(sends) * DATAGRAM_MAX as u64;
        let port = DatagramQp {
            send: LibraryMemory::new(&pd, bytes, Access::LOCAL_WRITE)?,
            receive: LibraryMemory::new(&pd, u64::from(receives) * SLOT, Access::LOCAL_WRITE)?,
            free: (0..u64::from(sends)).collect(),
            sends: sends as usize,
            device,
            qp,
            cq,
        };
        port.qp.ready_datagram(RDMA_UDP_QKEY).map_err(|_| libc::ENOBUFS)?;
        (0..u64::from(receives)).try_for_each(|slot| port.post_receive(slot))?;
        Ok(port)
    }

    fn post_receive(&self, slot: u64) -> Result<(), c_int> {
        let request = RecvRequest {
            wr_id: RECEIVE | slot,
            sges: self.receive.mr.sge(slot * SLOT, SLOT as u32).into(),
        };
        self.qp.post_recv(request).map_err(|_| libc::ENOBUFS)
    }

    /// Handles a completion. Returns the datagram that it brought.
    fn take(&mut self, wc: &WorkCompletion) -> Option<(SocketAddr, Vec<u8>)> {
        if wc.wr_id & RECEIVE == 0 {
            self.free.push(wc.wr_id);
            return None;
        }
        let slot = wc.wr_id & !RECEIVE;
        let length = (wc.byte_len as usize).checked_sub(GRH);
        let mut found = None;
        if let Some(length) = length.filter(|length| wc.status == Status::Success && *length <= DATAGRAM_MAX)
        {
            let mut bytes = vec![0; length];
            let read = self.receive.memory.read(slot * SLOT + GRH as u64, &mut bytes);
            if let (Ok(()), Ok(header)) = (read, DatagramHeader::parse(&bytes)) {
                bytes.drain(..header.bytes());
                found = Some((header.source, bytes));
            }
        }
        let _ = self.post_receive(slot);
        found
    }
}

/// A destination.
struct Peer {
    /// Index of the port that reaches it.
    port: usize,
    /// Its queue pair, once the peer has named it.
    target: Option<Target>,
    /// Maximum number of bytes of a datagram to it.
    mtu: usize,
}

pub(super) struct Datagram {
    udp: Option<Udp>,
    ports: Vec<DatagramQp>,
    peers: HashMap<SocketAddr, Peer>,
    pub(super) connected: Option<SocketAddr>,
    queue: VecDeque<(SocketAddr, Vec<u8>)>,
    options: SocketOptions,
}

fn errno(error: &std::io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl Datagram {
    pub(super) fn new() -> Datagram {
        Datagram {
            udp: None,
            ports: Vec::new(),
            peers: HashMap::new(),
            connected: None,
            queue: VecDeque::new(),
            options: SocketOptions::default(),
        }
    }

    /// Returns whether buffers and queues have been made.
    pub(super) fn is_open(&self) -> bool {
        !self.ports.is_empty()
    }

    /// Binds a port; 0: any.
    pub(super) fn bind(&mut self, address: SocketAddr, options: &SocketOptions) -> Result<(), c_int> {
        if self.udp.is_some() {
            return Err(libc::EINVAL);
        }
        self.options = options.clone();
        self.udp = Some(Udp::new(address)?);
        Ok(())
    }

    /// Returns the socket's address as peers on the way to `peer` know it.
    fn local(&self, port: usize) -> Result<SocketAddr, c_int> {
        let bound = self.name().ok_or(libc::EINVAL)?;
        Ok(SocketAddr::new(self.ports[port].device.address(), bound.port()))
    }

    /// Returns a peer, which is known from now on.
    fn peer(&mut self, address: SocketAddr) -> Result<&mut Peer, c_int> {
        if !self.peers.contains_key(&address) {
            if self.peers.len() >= PEERS_MAX {
                self.peers.clear();
            }
            let device = device_towards(address, self.name())?;
            let mtu = device.path_mtu_to(address.ip()).map_err(|error| errno(&error))?;
            let at = |port: &DatagramQp| port.device.address() == device.address();
            let port = match self.ports.iter().position(at) {
                Some(port) => port,
                None => {
                    self.ports.push(DatagramQp::new(device, &self.options)?);
                    self.ports.len() - 1
                }
            };
            let (target, mtu) = (None, mtu.bytes() as usize);
            self.peers.insert(address, Peer { port, target, mtu });
        }
        self.peers.get_mut(&address).ok_or(libc::ENOBUFS)
    }

    /// Arms the completion queues, and adds the descriptors that new datagrams make readable.
    pub(super) fn arm(&self, fds: &mut Vec<RawFd>) {
        for port in &self.ports {
            port.cq.arm(Arm::Next);
            fds.push(port.cq.as_fd().as_raw_fd());
        }
        fds.extend(self.udp.as_ref().map(Udp::fd));
    }

    /// Takes in what has arrived. Returns whether anything has.
    pub(super) fn progress(&mut self) -> bool {
        let mut came = false;
        let mut completions = VecDeque::new();
        let mut found = Vec::new();
        for port in &mut self.ports {
            came |= port.cq.poll_many(BATCH, &mut completions) > 0;
            found.extend(completions.drain(..).filter_map(|wc| port.take(&wc)));
        }
        for (from, bytes) in found {
            self.queue(from, bytes);
        }
        let mut bytes = [0; DATAGRAM_MAX];
        for _ in 0..BATCH {
            let Some((length, from)) = self.udp.as_ref().and_then(|udp| udp.receive(&mut bytes)) else {
                break;
            };
            came = true;
            // Ignores datagrams that it does not understand, like everything else that comes by UDP.
            let _ = self.hear(from, &bytes[..length]);
        }
        came
    }

    fn hear(&mut self, from: SocketAddr, bytes: &[u8]) -> Result<(), c_int> {
        let header = UdpHeader::parse(bytes).map_err(|_| libc::EPROTO)?;
        let port = self.peer(from)?.port;
        // Of several addresses of the peer's host, the header has that of its device.
        let handle = self.ports[port].device.create_ah(header.address, 0);
        let target = handle
            .to(header.qpn, RDMA_UDP_QKEY)
            .map_err(|error| errno(&error))?;
        self.peer(from)?.target = Some(target);
        if header.has_data {
            self.queue(from, bytes[header.bytes()..].to_vec());
            self.send_udp(from, None)?;
        }
        Ok(())
    }

    /// Keeps a peer's datagram while there is room: otherwise it is lost, as datagrams are.
    fn queue(&mut self, from: SocketAddr, bytes: Vec<u8>) {
        let is_wanted = self.connected.is_none_or(|peer| peer == from);
        if is_wanted && self.queue.len() < 2 * usize::from(self.options.rq_size) {
            self.queue.push_back((from, bytes));
        }
    }

    /// Sends by UDP: a datagram, or only the header that names this queue pair.
    fn send_udp(&mut self, to: SocketAddr, data: Option<&mut Buffers<'_>>) -> Result<(), c_int> {
        let port = self.peer(to)?.port;
        let header = UdpHeader {
            has_data: data.is_some(),
            qpn: self.ports[port].qp.qpn(),
            address: self.ports[port].device.address(),
        };
        let mut bytes = [0; DATAGRAM_MAX];
        header.emit(&mut bytes);
        let mut length = header.bytes();
        if let Some(data) = data {
            let (start, left) = (length, data.left());
            if start + left > DATAGRAM_MAX {
                return Err(libc::EMSGSIZE);
            }
            data.take(left, |at, piece| {
                bytes[start + at..][..piece.len()].copy_from_slice(piece)
            });
            length += left;
        }
        self.udp.as_ref().ok_or(libc::EINVAL)?.send(&bytes[..length], to)
    }

    /// Sends a datagram. Returns `None` when there is no room now.
    pub(super) fn send(
        &mut self,
        to: SocketAddr,
        data: &mut Buffers<'_>,
        options: &SocketOptions,
    ) -> Option<Result<(), c_int>> {
        self.try_send(to, data, options).transpose()
    }

    fn try_send(
        &mut self,
        to: SocketAddr,
        data: &mut Buffers<'_>,
        options: &SocketOptions,
    ) -> Result<Option<()>, c_int> {
        if self.udp.is_none() {
            // The program has not bound a port.
            self.options = options.clone();
            self.udp = Some(Udp::towards(to)?);
        }
        let &mut Peer { port, target, mtu } = self.peer(to)?;
        let header = DatagramHeader {
            source: self.local(port)?,
        };
        let bytes = header.bytes() + data.left();
        let Some(target) = target.filter(|_| bytes <= mtu.min(DATAGRAM_MAX)) else {
            return self.send_udp(to, Some(data)).map(Some);
        };
        let port = &mut self.ports[port];
        let Some(slot) = port.free.pop() else {
            return Ok(None);
        };
        let at = slot * DATAGRAM_MAX as u64;
        let mut head = [0; DatagramHeader::LEN_MAX];
        header.emit(&mut head);
        let (head, memory) = (&head[..header.bytes()], &port.send.memory);
        memory.write(at, head).expect("inside of the buffer");
        data.take(bytes, |offset, piece| {
            let at = at + (head.len() + offset) as u64;
            memory.write(at, piece).expect("inside of the buffer");
        });
        let request = SendRequest {
            wr_id: slot,
            operation: Operation::Send { imm: None },
            sges: port.send.mr.sge(at, bytes as u32).into(),
            flags: SendFlags::SIGNALED,
            to: target,
        };
        if port.qp.post_send(request).is_err() {
            port.free.push(slot);
            return Err(libc::ENOBUFS);
        }
        Ok(Some(()))
    }

    /// Takes the oldest datagram, or only looks at it. Returns its sender, the number of bytes copied, and its length.
    pub(super) fn receive(
        &mut self,
        into: &mut Buffers<'_>,
        peek: bool,
    ) -> Option<(SocketAddr, usize, usize)> {
        let (from, bytes) = self.queue.front()?;
        let (from, length) = (*from, bytes.len());
        let taken = length.min(into.left());
        into.take(taken, |at, piece| {
            piece.copy_from_slice(&bytes[at..at + piece.len()])
        });
        if !peek {
            self.queue.pop_front();
        }
        Some((from, taken, length))
    }

    /// Returns whether all sent datagrams are on their way.
    pub(super) fn is_flushed(&self) -> bool {
        self.ports.iter().all(|port| port.free.len() == port.sends)
    }

    /// Returns the state of `POLLIN` and `POLLOUT`.
    pub(super) fn events(&self) -> i16 {
        let mut events = if self.queue.is_empty() { 0 } else { libc::POLLIN };
        if self.ports.iter().all(|port| !port.free.is_empty()) {
            events |= libc::POLLOUT;
        }
        events
    }

    /// Returns the socket's address, once it is known.
    pub(super) fn name(&self) -> Option<SocketAddr> {
        let local = self.udp.as_ref()?.local().ok()?;
        Some(SocketAddr::new(local.ip().to_canonical(), local.port()))
    }
}
