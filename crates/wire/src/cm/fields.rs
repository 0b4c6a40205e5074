//! Fields that several messages have.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::Malformed;
use crate::bytes::{be16, be32, need, put};

/// Name of a listener's service. IBTA Vol 1, A3.2.3 and A11.2.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(
    /// The number.
    pub u64,
);

impl ServiceId {
    const TCP: u64 = 0x0106_0000;
    const UDP: u64 = 0x0111_0000;
    const IB: u64 = 0x013f_0000;

    /// Returns the id of a connected service on `port` (RDMA_PS_TCP in rdma_cm).
    pub const fn tcp(port: u16) -> ServiceId {
        ServiceId(ServiceId::TCP | port as u64)
    }

    /// Returns the id of a datagram service on `port` (RDMA_PS_UDP in rdma_cm).
    pub const fn udp(port: u16) -> ServiceId {
        ServiceId(ServiceId::UDP | port as u64)
    }

    /// Returns the id of a service on `port` whose queue pairs are of any type (RDMA_PS_IB in rdma_cm).
    pub const fn ib(port: u16) -> ServiceId {
        ServiceId(ServiceId::IB | port as u64)
    }

    /// Returns the port, if the id is one of those above.
    pub const fn port(self) -> Option<u16> {
        match self.0 & !0xffff {
            ServiceId::TCP | ServiceId::UDP | ServiceId::IB => Some(self.0 as u16),
            _ => None,
        }
    }
}

impl fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceId({:#018x})", self.0)
    }
}

/// Private data of a message: `N` bytes, zero where unused.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData<const N: usize>([u8; N]);

impl<const N: usize> PrivateData<N> {
    /// Capacity in bytes.
    pub const LEN: usize = N;

    /// Returns private data of `bytes`, padded with zeros. `None` if they do not fit.
    pub fn new(bytes: &[u8]) -> Option<PrivateData<N>> {
        let mut data = [0; N];
        data.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(PrivateData(data))
    }

    /// Returns all `N` bytes.
    pub fn bytes(&self) -> &[u8; N] {
        &self.0
    }

    pub(super) fn parse(body: &[u8], at: usize) -> PrivateData<N> {
        let mut data = [0; N];
        data.copy_from_slice(&body[at..at + N]);
        PrivateData(data)
    }
}

impl<const N: usize> Default for PrivateData<N> {
    fn default() -> Self {
        PrivateData([0; N])
    }
}

impl<const N: usize> fmt::Debug for PrivateData<N> {
    /// Prints the bytes without trailing zeros.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
        for byte in &self.0[..end] {
            write!(f, "{byte:02x}")?;
        }
        write!(f, "({end} of {N})")
    }
}

/// Enhanced connection establishment: vendor options in REQ and REP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ece {
    /// Vendor that defines `options`: 24 bits, not 0 (which means that there is no ECE).
    pub vendor: u32,
    /// Options, in the attribute modifier of the MAD header.
    pub options: u32,
}

impl Ece {
    /// Returns the ECE of the header fields; `None` for vendor 0.
    pub(super) fn from_fields(vendor: u32, options: u32) -> Option<Ece> {
        (vendor != 0).then_some(Ece { vendor, options })
    }
}

/// Options that rdmux endpoints exchange through ECE.
///
/// ```text
/// options  31..28 version   27..7 zero, ignored on receive   6 carried acknowledgements   5 selective
///          4..0 log2 of the receive window in bytes
/// ```
///
/// A side treats a bit that it does not know as 0, so that a feature is used only when both sides set its bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extensions {
    /// Version of these extensions, 1 to 15.
    pub version: u8,
    /// Log2 of the bytes that may be in flight towards the sender of the message, 0 to 31.
    pub receive_window_log2: u8,
    /// Set when the sender of the message keeps packets behind a gap, and sends and understands [`crate::roce::sack::Sack`].
    pub selective: bool,
    /// Set when the sender of the message sends and understands [`crate::roce::carried`] acknowledgements.
    pub carried_acks: bool,
}

impl Extensions {
    /// The vendor id of rdmux: "RDM".
    pub const VENDOR: u32 = 0x52_44_4d;
    /// The version described here.
    pub const VERSION: u8 = 1;
    const SELECTIVE: u32 = 1 << 5;
    const CARRIED_ACKS: u32 = 1 << 6;

    /// Returns the extensions in `ece`; `None` if it is another vendor's.
    pub fn from_ece(ece: Ece) -> Option<Extensions> {
        let version = (ece.options >> 28) as u8;
        if ece.vendor != Extensions::VENDOR || version == 0 {
            return None;
        }
        Some(Extensions {
            version,
            receive_window_log2: (ece.options & 0x1f) as u8,
            selective: ece.options & Extensions::SELECTIVE != 0,
            carried_acks: ece.options & Extensions::CARRIED_ACKS != 0,
        })
    }

    /// Returns the extensions as ECE.
    pub fn to_ece(self) -> Ece {
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        let options = u32::from(self.version & 0x0f) << 28
            | flag(self.carried_acks, Extensions::CARRIED_ACKS)
            | flag(self.selective, Extensions::SELECTIVE)
            | u32::from(self.receive_window_log2 & 0x1f);
        Ece {
            vendor: Extensions::VENDOR,
            options,
        }
    }
}

/// The header at the beginning of the private data of REQ and SIDR_REQ if the service is named by an IP port: the addresses of both
/// sides. IBTA Vol 1, A11.3.
///
/// ```text
///  0  version 0 | IP version (high nibble) | source port
///  4  source address, 16 bytes (IPv4 in the last four)
/// 20  destination address, 16 bytes
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpAddressing {
    /// Port of the connecting side.
    pub src_port: u16,
    /// Address of the connecting side.
    pub src: IpAddr,
    /// Address of the listening side, of the same family.
    pub dst: IpAddr,
}

impl IpAddressing {
    /// Bytes of the header.
    pub const LEN: usize = 36;

    /// Reads the header at the start of private data.
    pub fn parse(b: &[u8]) -> Result<IpAddressing, Malformed> {
        need("RDMA IP CM header", b, IpAddressing::LEN)?;
        if b[0] != 0 {
            return Err(Malformed::Undefined {
                what: "RDMA IP CM version",
                value: b[0].into(),
            });
        }
        let v4 = match b[1] >> 4 {
            4 => true,
            6 => false,
            other => {
                return Err(Malformed::Undefined {
                    what: "RDMA IP CM IP version",
                    value: other.into(),
                });
            }
        };
        let address = |at: usize| -> IpAddr {
            if v4 {
                Ipv4Addr::from_bits(be32(b, at + 12)).into()
            } else {
                gid(b, at).into()
            }
        };
        Ok(IpAddressing {
            src_port: be16(b, 2),
            src: address(4),
            dst: address(20),
        })
    }

    /// Writes the header to the first 36 bytes of `b`. If the families of the addresses differ, writes both as IPv6.
    pub fn emit(&self, b: &mut [u8]) {
        b[..IpAddressing::LEN].fill(0);
        put(b, 2, &self.src_port.to_be_bytes());
        if let (IpAddr::V4(src), IpAddr::V4(dst)) = (self.src, self.dst) {
            b[1] = 4 << 4;
            put(b, 16, &src.octets());
            put(b, 32, &dst.octets());
        } else {
            b[1] = 6 << 4;
            put(b, 4, &to_gid(self.src).octets());
            put(b, 20, &to_gid(self.dst).octets());
        }
    }
}

/// Returns the GID of an address: IPv6 unchanged, IPv4 as an IPv4-mapped address. IBTA Vol 1, A17.4.
pub fn to_gid(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(a) => a.to_ipv6_mapped(),
        IpAddr::V6(a) => a,
    }
}

/// Returns the address of a GID.
pub fn from_gid(gid: Ipv6Addr) -> IpAddr {
    gid.to_canonical()
}

pub(super) fn gid(b: &[u8], at: usize) -> Ipv6Addr {
    let mut octets = [0; 16];
    octets.copy_from_slice(&b[at..at + 16]);
    octets.into()
}
