//! Options of sockets: those that have an effect here, and those that are only stored and returned.

use std::ffi::c_int;
use std::time::Duration;

use rdmux_wire::rsocket::iomaps_offered;

use super::{Role, Socket, SocketState};

/// `SOL_RDMA`, and its options; rsocket.h.
const SOL_RDMA: c_int = 0x10000;
const RDMA_SQSIZE: c_int = 0;
const RDMA_RQSIZE: c_int = 1;
const RDMA_INLINE: c_int = 2;
const RDMA_IOMAPSIZE: c_int = 3;
const RDMA_ROUTE: c_int = 4;

/// Minimum and maximum number of requests of a queue.
const QUEUE: std::ops::RangeInclusive<u32> = 16..=4_096;
/// Minimum and maximum number of bytes of a buffer.
const BUFFER: std::ops::RangeInclusive<u32> = 4_096..=1 << 30;
/// Segment size to report: that of the path MTU is not known before there is a path.
const SEGMENT: c_int = 2_048;

#[derive(Clone)]
pub(super) struct SocketOptions {
    pub(super) sq_size: u16,
    pub(super) rq_size: u16,
    pub(super) inline: u16,
    pub(super) iomaps: u16,
    pub(super) send_bytes: u32,
    pub(super) receive_bytes: u32,
    /// `SO_LINGER`; `None`: off.
    pub(super) linger: Option<Duration>,
    /// Options without effect here.
    noted: Vec<((c_int, c_int), c_int)>,
}

impl Default for SocketOptions {
    /// The values of rdma-core.
    fn default() -> SocketOptions {
        SocketOptions {
            sq_size: 384,
            rq_size: 384,
            inline: 64,
            iomaps: 0,
            send_bytes: 1 << 17,
            receive_bytes: 1 << 17,
            linger: None,
            noted: Vec::new(),
        }
    }
}

/// Returns whether an option is accepted because its effect is the case anyway, or does not matter to a stream of messages.
fn is_noted(level: c_int, name: c_int) -> bool {
    match level {
        libc::SOL_SOCKET => matches!(
            name,
            libc::SO_REUSEADDR | libc::SO_REUSEPORT | libc::SO_KEEPALIVE | libc::SO_OOBINLINE
        ),
        libc::IPPROTO_TCP => matches!(
            name,
            libc::TCP_NODELAY
                | libc::TCP_MAXSEG
                | libc::TCP_KEEPCNT
                | libc::TCP_KEEPIDLE
                | libc::TCP_KEEPINTVL
        ),
        libc::IPPROTO_IPV6 => name == libc::IPV6_V6ONLY,
        _ => false,
    }
}

/// Returns twice the size that the program asks for, as with any socket.
fn buffer(asked: c_int) -> u32 {
    let twice = u32::try_from(asked).unwrap_or(0).saturating_mul(2);
    twice.clamp(*BUFFER.start(), *BUFFER.end()).next_multiple_of(2)
}

fn queue(asked: c_int) -> u16 {
    let asked = u32::try_from(asked).unwrap_or(0);
    asked.clamp(*QUEUE.start(), *QUEUE.end()) as u16
}

fn int_of(value: &[u8]) -> Result<c_int, c_int> {
    let bytes = value.first_chunk().ok_or(libc::EINVAL)?;
    Ok(c_int::from_ne_bytes(*bytes))
}

impl SocketState {
    /// Returns whether the socket has its buffers and queues: then their sizes are fixed.
    fn is_open(&self) -> bool {
        matches!(self.role, Role::Opening(_) | Role::Stream(_))
            || matches!(&self.role, Role::Datagram(d) if d.is_open())
    }

    pub(super) fn set_option(&mut self, level: c_int, name: c_int, value: &[u8]) -> Result<(), c_int> {
        let is_open = self.is_open();
        let own = &mut self.options;
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let seconds = int_of(value.get(4..).unwrap_or_default())?;
                let seconds = u64::try_from(seconds).map_err(|_| libc::EINVAL)?;
                own.linger = (int_of(value)? != 0).then(|| Duration::from_secs(seconds));
            }
            // The buffers of a connected socket stay as they are.
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) if is_open => {}
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => own.send_bytes = buffer(int_of(value)?),
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => own.receive_bytes = buffer(int_of(value)?),
            (SOL_RDMA, RDMA_SQSIZE..=RDMA_IOMAPSIZE) if is_open => return Err(libc::EINVAL),
            (SOL_RDMA, RDMA_SQSIZE) => own.sq_size = queue(int_of(value)?),
            (SOL_RDMA, RDMA_RQSIZE) => own.rq_size = queue(int_of(value)?),
            (SOL_RDMA, RDMA_INLINE) => own.inline = int_of(value)?.clamp(0, 0xfffe) as u16,
            (SOL_RDMA, RDMA_IOMAPSIZE) => own.iomaps = iomaps_offered(int_of(value)?.clamp(0, 0xffff) as u16),
            // A path is the same as the address.
            (SOL_RDMA, RDMA_ROUTE) => {}
            _ if is_noted(level, name) => {
                let given = int_of(value)?;
                own.noted.retain(|(known, _)| *known != (level, name));
                own.noted.push(((level, name), given));
            }
            _ => return Err(libc::ENOPROTOOPT),
        }
        Ok(())
    }

    /// Returns an option's value.
    fn option(&mut self, socket: &Socket, level: c_int, name: c_int) -> Result<Vec<c_int>, c_int> {
        let own = &self.options;
        let is_stream = !matches!(self.role, Role::Datagram(_));
        let one = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let seconds = own.linger.map_or(0, |linger| linger.as_secs() as c_int);
                return Ok(vec![own.linger.is_some().into(), seconds]);
            }
            (libc::SOL_SOCKET, libc::SO_ERROR) => match &self.role {
                Role::Stream(stream) if stream.is_reset() => libc::ECONNRESET,
                _ => std::mem::take(&mut self.error),
            },
            (libc::SOL_SOCKET, libc::SO_TYPE) => {
                if is_stream {
                    libc::SOCK_STREAM
                } else {
                    libc::SOCK_DGRAM
                }
            }
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => socket.domain,
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => {
                if is_stream {
                    libc::IPPROTO_TCP
                } else {
                    libc::IPPROTO_UDP
                }
            }
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                matches!(&self.role, Role::Bound(listening) if listening.accepts).into()
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => own.send_bytes.cast_signed(),
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => own.receive_bytes.cast_signed(),
            (SOL_RDMA, RDMA_SQSIZE) => own.sq_size.into(),
            (SOL_RDMA, RDMA_RQSIZE) => own.rq_size.into(),
            (SOL_RDMA, RDMA_INLINE) => own.inline.into(),
            (SOL_RDMA, RDMA_IOMAPSIZE) => own.iomaps.into(),
            // There is no route but the address.
            (SOL_RDMA, RDMA_ROUTE) => return Err(libc::ENODATA),
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => SEGMENT,
            _ if is_noted(level, name) => {
                let known = own.noted.iter().find(|(known, _)| *known == (level, name));
                known.map_or(0, |(_, value)| *value)
            }
            _ => return Err(libc::ENOPROTOOPT),
        };
        Ok(vec![one])
    }

    /// Writes as much of an option's value as fits. Returns how much that was.
    pub(super) fn get_option(
        &mut self,
        socket: &Socket,
        level: c_int,
        name: c_int,
        into: &mut [u8],
    ) -> Result<usize, c_int> {
        let value = self.option(socket, level, name)?;
        let bytes: Vec<u8> = value.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let n = bytes.len().min(into.len());
        into[..n].copy_from_slice(&bytes[..n]);
        Ok(n)
    }
}
