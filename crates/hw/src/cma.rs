//! The objects of `librdmacm`, as [`super::objects`] has those of `libibverbs`: an event channel, and ids on it whose queue pairs
//! the library knows by number only. Events are copied and acknowledged when they are taken, so that the destruction of an id never
//! waits for an event.
#![allow(unsafe_code, reason = "objects of a C library, and calls of it")]

use std::ffi::{c_int, c_void};
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut, without_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rdmux_rnic::QpState;
use rdmux_verbs::abi;
use rustix::io::Errno;

use super::library::Library;
use super::objects::{context_name, set_nonblocking};
use super::qp::state_number;

/// Returns the result of a function that sets `errno`.
fn done(result: c_int) -> Result<(), Errno> {
    match result {
        0 => Ok(()),
        _ => Err(last_error()),
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Returns an address as `struct sockaddr_in` or `struct sockaddr_in6`.
fn sock_addr(address: SocketAddr) -> abi::SockAddr {
    let mut bytes = [0; 28];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    let family = match address {
        SocketAddr::V4(v4) => {
            bytes[4..8].copy_from_slice(&v4.ip().octets());
            libc::AF_INET
        }
        SocketAddr::V6(v6) => {
            bytes[8..24].copy_from_slice(&v6.ip().octets());
            bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            libc::AF_INET6
        }
    };
    bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    abi::SockAddr(bytes)
}

/// Returns the address in a `struct sockaddr_storage`.
fn address_of(storage: &[u64; 16]) -> Option<IpAddr> {
    let mut bytes = [0u8; 128];
    for (to, word) in bytes.chunks_exact_mut(8).zip(storage) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    let family = c_int::from(u16::from_ne_bytes([bytes[0], bytes[1]]));
    let v4: [u8; 4] = bytes[4..8].try_into().ok()?;
    let v6: [u8; 16] = bytes[8..24].try_into().ok()?;
    match family {
        libc::AF_INET => Some(v4.into()),
        libc::AF_INET6 => Some(IpAddr::V6(Ipv6Addr::from(v6)).to_canonical()),
        _ => None,
    }
}

/// Returns the name of the device that has a local address, and its port.
pub(super) fn device_of(library: &'static Library, address: IpAddr) -> Result<(String, u8), Errno> {
    let channel = Arc::new(EventChannel::new(library)?);
    let id = RdmaCmId::new(&channel, abi::port_space::TCP)?;
    id.bind(SocketAddr::new(address, 0))?;
    // SAFETY: the id lives; the library sets its context when it is bound.
    let (context, port) = unsafe { ((*id.pointer.as_ptr()).verbs, (*id.pointer.as_ptr()).port_num) };
    let context = NonNull::new(context).ok_or(Errno::NODEV)?;
    // SAFETY: the library keeps the contexts that it opens.
    Ok((unsafe { context_name(context) }, port))
}

/// An event channel.
#[derive(Debug)]
pub(super) struct EventChannel {
    library: &'static Library,
    pointer: NonNull<abi::EventChannel>,
}

// SAFETY: the library's functions may be called by several threads at a time, and the value is the only owner of the channel.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

/// Data of the peer in an event.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub(super) private_data: Vec<u8>,
    /// Number of READs of the peer that this side is to answer, and of READs that this side may request.
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: bool,
    pub(super) qpn: u32,
    pub(super) qkey: u32,
}

/// An event that was taken and acknowledged.
#[derive(Debug)]
pub(crate) struct Taken {
    /// Number of the id that it belongs to ([`RdmaCmId::number`]); for a request, that of the listener.
    pub(super) of: usize,
    pub(super) kind: u32,
    pub(super) status: i32,
    pub(super) told: Told,
    /// For a request, the id that it came with.
    pub(super) request: Option<RdmaCmId>,
}

impl EventChannel {
    pub(super) fn new(library: &'static Library) -> Result<EventChannel, Errno> {
        // SAFETY: no arguments.
        let pointer =
            NonNull::new(unsafe { (library.rdma_create_event_channel)() }).ok_or_else(last_error)?;
        let channel = EventChannel { library, pointer };
        set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    /// Returns a descriptor that is readable when there is an event.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel.
        unsafe { BorrowedFd::borrow_raw((*self.pointer.as_ptr()).fd) }
    }

    /// Takes the oldest event; `None`: there is none.
    pub(super) fn take_event(self: &Arc<EventChannel>) -> Option<Taken> {
        let mut pointer = null_mut();
        // SAFETY: the channel lives, and its descriptor does not block.
        if unsafe { (self.library.rdma_get_cm_event)(self.pointer.as_ptr(), &mut pointer) } != 0 {
            return None;
        }
        let pointer = NonNull::new(pointer)?;
        // SAFETY: the event is the caller's until it is acknowledged, and its ids live that long: their destruction waits.
        let (event, port_space) = unsafe {
            let event = *pointer.as_ptr();
            (event, (*event.id).ps)
        };
        let copied = |data: *const c_void, length: u8| {
            if data.is_null() {
                return Vec::new();
            }
            // SAFETY: the event has so many bytes of private data until it is acknowledged.
            unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length.into()) }.to_vec()
        };
        let told = if port_space == abi::port_space::UDP {
            // SAFETY: events of ids of this port space have this part, numbers and a pointer.
            let ud = unsafe { event.param.ud };
            Told {
                private_data: copied(ud.private_data, ud.private_data_len),
                qpn: ud.qp_num,
                qkey: ud.qkey,
                ..Told::default()
            }
        } else {
            // SAFETY: as above.
            let conn = unsafe { event.param.conn };
            Told {
                private_data: copied(conn.private_data, conn.private_data_len),
                responder_resources: conn.responder_resources,
                initiator_depth: conn.initiator_depth,
                retry_count: conn.retry_count,
                rnr_retry_count: conn.rnr_retry_count,
                srq: conn.srq != 0,
                qpn: conn.qp_num,
                qkey: 0,
            }
        };
        let is_request = event.event == abi::cm_event::CONNECT_REQUEST;
        let of = if is_request { event.listen_id } else { event.id };
        // SAFETY: both ids live until the event is acknowledged, and the library never changes their contexts.
        let of = unsafe { (*of).context }.addr();
        let request = NonNull::new(event.id).filter(|_| is_request).map(|pointer| {
            let number = next_number();
            // SAFETY: as above; the id came with its listener's context, and nobody else knows of it yet.
            unsafe { (*pointer.as_ptr()).context = without_provenance_mut(number) };
            RdmaCmId {
                channel: self.clone(),
                pointer,
                number,
            }
        });
        // SAFETY: the event was taken by the call above, and is acknowledged once. The id of a request is the program's from then
        // on.
        unsafe { (self.library.rdma_ack_cm_event)(pointer.as_ptr()) };
        Some(Taken {
            of,
            kind: event.event,
            status: event.status,
            told,
            request,
        })
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: its ids hold it, so that none is left.
        unsafe { (self.library.rdma_destroy_event_channel)(self.pointer.as_ptr()) };
    }
}

/// One end of a connection, or a listener.
#[derive(Debug)]
pub(super) struct RdmaCmId {
    channel: Arc<EventChannel>,
    pointer: NonNull<abi::CmId>,
    /// Value of its context. Another id may get its address while events of this one are still pending.
    number: usize,
}

/// Returns a number that no id has had.
fn next_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

// SAFETY: the library's functions may be called by several threads at a time, and the value is the only owner of the id.
unsafe impl Send for RdmaCmId {}
// SAFETY: as above.
unsafe impl Sync for RdmaCmId {}

/// Data for the peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tell<'a> {
    pub(super) private_data: &'a [u8],
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: bool,
    pub(super) qpn: u32,
}

impl Tell<'_> {
    fn param(&self) -> abi::ConnParam {
        abi::ConnParam {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: self.private_data.len().min(255) as u8,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 0,
            retry_count: self.retry_count,
            rnr_retry_count: self.rnr_retry_count,
            srq: self.srq.into(),
            qp_num: self.qpn,
        }
    }
}

impl RdmaCmId {
    /// Makes an id of a port space.
    pub(super) fn new(channel: &Arc<EventChannel>, port_space: u32) -> Result<RdmaCmId, Errno> {
        let mut pointer = null_mut();
        let number = next_number();
        let context = without_provenance_mut(number);
        // SAFETY: the channel lives as long as the id; the library does not look at what the context points to.
        done(unsafe {
            (channel.library.rdma_create_id)(channel.pointer.as_ptr(), &mut pointer, context, port_space)
        })?;
        Ok(RdmaCmId {
            channel: channel.clone(),
            pointer: NonNull::new(pointer).ok_or(Errno::IO)?,
            number,
        })
    }

    fn library(&self) -> &'static Library {
        self.channel.library
    }

    /// Returns its number, unique among all ids that the process has had.
    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Returns the peer's address, once known.
    pub(super) fn peer(&self) -> Option<IpAddr> {
        // SAFETY: the id lives; the library sets the address before the program knows of the peer.
        address_of(unsafe { &(*self.pointer.as_ptr()).dst_addr })
    }

    pub(super) fn bind(&self, address: SocketAddr) -> Result<(), Errno> {
        let mut address = sock_addr(address);
        // SAFETY: the id lives, and the address until the call returns.
        done(unsafe { (self.library().rdma_bind_addr)(self.pointer.as_ptr(), &mut address) })
    }

    /// Resolves the device and the address of a peer; an event reports the result.
    pub(super) fn resolve_addr(
        &self,
        own: SocketAddr,
        peer: SocketAddr,
        timeout_ms: c_int,
    ) -> Result<(), Errno> {
        let (mut own, mut peer) = (sock_addr(own), sock_addr(peer));
        // SAFETY: as above.
        done(unsafe {
            (self.library().rdma_resolve_addr)(self.pointer.as_ptr(), &mut own, &mut peer, timeout_ms)
        })
    }

    pub(super) fn resolve_route(&self, timeout_ms: c_int) -> Result<(), Errno> {
        // SAFETY: the id lives.
        done(unsafe { (self.library().rdma_resolve_route)(self.pointer.as_ptr(), timeout_ms) })
    }

    /// Sets an option whose value is one byte.
    pub(super) fn set_option(&self, name: c_int, mut value: u8) -> Result<(), Errno> {
        let value = (&raw mut value).cast::<c_void>();
        // SAFETY: the id lives, and the value until the call returns.
        done(unsafe {
            (self.library().rdma_set_option)(self.pointer.as_ptr(), abi::cm_option::LEVEL_ID, name, value, 1)
        })
    }

    /// Returns the attributes, and their mask, with which a queue pair goes to a state.
    pub(super) fn qp_attributes(&self, to: QpState) -> Result<(abi::QpAttr, u32), Errno> {
        let mut attr = abi::QpAttr {
            qp_state: state_number(to),
            ..Default::default()
        };
        let mut mask = 0;
        // SAFETY: the id lives, and the attributes until the call returns.
        done(unsafe { (self.library().rdma_init_qp_attr)(self.pointer.as_ptr(), &mut attr, &mut mask) })?;
        Ok((attr, mask as u32))
    }

    pub(super) fn connect(&self, tell: &Tell<'_>) -> Result<(), Errno> {
        let mut param = tell.param();
        // SAFETY: the id lives, and the parameters until the call returns.
        done(unsafe { (self.library().rdma_connect)(self.pointer.as_ptr(), &mut param) })
    }

    pub(super) fn accept(&self, tell: &Tell<'_>) -> Result<(), Errno> {
        let mut param = tell.param();
        // SAFETY: as above.
        done(unsafe { (self.library().rdma_accept)(self.pointer.as_ptr(), &mut param) })
    }

    pub(super) fn establish(&self) -> Result<(), Errno> {
        // SAFETY: the id lives.
        done(unsafe { (self.library().rdma_establish)(self.pointer.as_ptr()) })
    }

    pub(super) fn listen(&self, backlog: c_int) -> Result<(), Errno> {
        // SAFETY: the id lives.
        done(unsafe { (self.library().rdma_listen)(self.pointer.as_ptr(), backlog) })
    }

    pub(super) fn reject(&self, private_data: &[u8]) -> Result<(), Errno> {
        let length = private_data.len().min(255) as u8;
        // SAFETY: the id lives, and the bytes until the call returns.
        done(unsafe {
            (self.library().rdma_reject)(self.pointer.as_ptr(), private_data.as_ptr().cast(), length)
        })
    }

    pub(super) fn disconnect(&self) -> Result<(), Errno> {
        // SAFETY: the id lives.
        done(unsafe { (self.library().rdma_disconnect)(self.pointer.as_ptr()) })
    }
}

impl Drop for RdmaCmId {
    fn drop(&mut self) {
        // SAFETY: the value is the only owner; all its events that were taken are acknowledged, but for one that another thread is just
        // taking, which the call waits for.
        unsafe { (self.library().rdma_destroy_id)(self.pointer.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sock_addr__is_what_address_of_reads() {
        for text in ["10.9.0.1:7471", "[fd09::1]:7471"] {
            let address: SocketAddr = text.parse().unwrap();
            let mut storage = [0u64; 16];
            let bytes = sock_addr(address).0;
            for (word, from) in storage.iter_mut().zip(bytes.chunks(8)) {
                let mut padded = [0; 8];
                padded[..from.len()].copy_from_slice(from);
                *word = u64::from_ne_bytes(padded);
            }
            assert_eq!(bytes[2..4], 7471u16.to_be_bytes());
            assert_eq!(address_of(&storage), Some(address.ip()));
        }
    }
}
