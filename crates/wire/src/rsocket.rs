//! Sockets over RDMA in the protocol of `librdmacm` (rsocket(7)): the private data of a connection, the immediate data of messages, the
//! entries that peers write into each other's tables, and the headers of datagrams. That library is the only specification.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::bytes::{be16, be32, be64, need, put};
use crate::{Malformed, Qpn};

/// Byte order of a side's tables in memory; a peer that writes to them must use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The highest byte first.
    Big,
    /// The lowest byte first.
    Little,
}

impl Order {
    /// Byte order of this host.
    pub const NATIVE: Order = if cfg!(target_endian = "big") {
        Order::Big
    } else {
        Order::Little
    };

    fn u32(self, bytes: &[u8], at: usize) -> u32 {
        match self {
            Order::Big => be32(bytes, at),
            Order::Little => be32(bytes, at).swap_bytes(),
        }
    }

    fn u64(self, bytes: &[u8], at: usize) -> u64 {
        match self {
            Order::Big => be64(bytes, at),
            Order::Little => be64(bytes, at).swap_bytes(),
        }
    }

    fn put32(self, bytes: &mut [u8], at: usize, value: u32) {
        match self {
            Order::Big => put(bytes, at, &value.to_be_bytes()),
            Order::Little => put(bytes, at, &value.to_le_bytes()),
        }
    }

    fn put64(self, bytes: &mut [u8], at: usize, value: u64) {
        match self {
            Order::Big => put(bytes, at, &value.to_be_bytes()),
            Order::Little => put(bytes, at, &value.to_le_bytes()),
        }
    }
}

/// Memory that the peer may write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// Address of the first byte.
    pub addr: u64,
    /// Key for it.
    pub rkey: u32,
    /// Length in bytes; of a table, in entries.
    pub length: u32,
}

impl Target {
    /// Bytes that [`Target::emit`] writes: one entry of the table of buffers.
    pub const LEN: usize = 16;

    /// Reads a target.
    pub fn parse(bytes: &[u8], order: Order) -> Result<Target, Malformed> {
        need("rsocket target", bytes, Target::LEN)?;
        Ok(Target {
            addr: order.u64(bytes, 0),
            rkey: order.u32(bytes, 8),
            length: order.u32(bytes, 12),
        })
    }

    /// Writes the target.
    pub fn emit(&self, bytes: &mut [u8], order: Order) {
        order.put64(bytes, 0, self.addr);
        order.put32(bytes, 8, self.rkey);
        order.put32(bytes, 12, self.length);
    }
}

/// A program's buffer that the peer may write at an offset known to both: an entry of the table of mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Iomap {
    /// Offset that both sides use for its first byte.
    pub offset: u64,
    /// Memory of the buffer.
    pub target: Target,
}

impl Iomap {
    /// Bytes that [`Iomap::emit`] writes.
    pub const LEN: usize = 8 + Target::LEN;

    /// Reads an entry.
    pub fn parse(bytes: &[u8], order: Order) -> Result<Iomap, Malformed> {
        need("rsocket iomap", bytes, Iomap::LEN)?;
        Ok(Iomap {
            offset: order.u64(bytes, 0),
            target: Target::parse(&bytes[8..], order)?,
        })
    }

    /// Writes the entry.
    pub fn emit(&self, bytes: &mut [u8], order: Order) {
        order.put64(bytes, 0, self.offset);
        self.target.emit(&mut bytes[8..], order);
    }
}

/// Returns the number of mappings that a table offers for a requested size: the number that one byte can encode.
pub fn iomaps_offered(wanted: u16) -> u16 {
    iomaps_of(iomaps_code(wanted))
}

/// Encodes up to 128 exactly, more in steps of 256.
fn iomaps_code(count: u16) -> u8 {
    if count <= 0x80 {
        count as u8
    } else {
        0x80 | (count >> 8).min(0x7f) as u8
    }
}

fn iomaps_of(code: u8) -> u16 {
    if code <= 0x80 {
        code.into()
    } else {
        u16::from(code & 0x7f) << 8
    }
}

/// Private data of a stream side's CM message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnData {
    /// Byte order of the side's tables.
    pub order: Order,
    /// Messages that the side accepts before it grants more.
    pub credits: u16,
    /// The side's table of buffers, followed by its table of mappings.
    pub table: Target,
    /// Mappings for which the side has room; `None` if it does not support them.
    pub iomaps: Option<u16>,
    /// First buffer for data sent to the side.
    pub data: Target,
}

impl ConnData {
    /// Bytes that [`ConnData::emit`] writes.
    pub const LEN: usize = 8 + 2 * Target::LEN;

    const VERSION: u8 = 1;
    const BIG: u8 = 1 << 0;
    const IOMAPS: u8 = 1 << 1;

    /// Reads a peer's private data.
    pub fn parse(bytes: &[u8]) -> Result<ConnData, Malformed> {
        need("rsocket connection data", bytes, ConnData::LEN)?;
        if bytes[0] != ConnData::VERSION {
            return Err(Malformed::Undefined {
                what: "rsocket version",
                value: bytes[0].into(),
            });
        }
        Ok(ConnData {
            order: if bytes[1] & ConnData::BIG != 0 {
                Order::Big
            } else {
                Order::Little
            },
            credits: be16(bytes, 2),
            iomaps: (bytes[1] & ConnData::IOMAPS != 0).then(|| iomaps_of(bytes[7])),
            table: Target::parse(&bytes[8..], Order::Big)?,
            data: Target::parse(&bytes[24..], Order::Big)?,
        })
    }

    /// Writes the private data.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..8].fill(0);
        bytes[0] = ConnData::VERSION;
        bytes[1] = if self.order == Order::Big {
            ConnData::BIG
        } else {
            0
        };
        put(bytes, 2, &self.credits.to_be_bytes());
        if let Some(iomaps) = self.iomaps {
            bytes[1] |= ConnData::IOMAPS;
            bytes[7] = iomaps_code(iomaps);
        }
        self.table.emit(&mut bytes[8..], Order::Big);
        self.data.emit(&mut bytes[24..], Order::Big);
    }
}

/// Immediate data of a message: its meaning besides the bytes that the message writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImmData {
    /// The buffer has this many more bytes of the stream.
    Data(u32),
    /// Messages may be sent up to this number; the table may have a new buffer.
    Credits(u16),
    /// A mapping was entered at this index.
    Iomap(u16),
    /// The sender sends and accepts nothing more.
    Disconnect,
    /// No content: the sender probes the connection.
    KeepAlive,
    /// The sender sends nothing more.
    Shutdown,
}

impl ImmData {
    /// Upper bound of the bytes that one message can write.
    pub const DATA_MAX: u32 = (1 << 29) - 1;

    const OP_DATA: u32 = 0;
    const OP_CREDITS: u32 = 4;
    const OP_IOMAP: u32 = 6;
    const OP_CONTROL: u32 = 7;

    /// Reads immediate data.
    pub fn parse(imm: u32) -> Result<ImmData, Malformed> {
        let value = imm & ImmData::DATA_MAX;
        match (imm >> 29, value) {
            (ImmData::OP_DATA, _) => Ok(ImmData::Data(value)),
            // The value has more than 16 bits, and the number wraps at 16.
            (ImmData::OP_CREDITS, _) => Ok(ImmData::Credits(value as u16)),
            (ImmData::OP_IOMAP, _) => Ok(ImmData::Iomap(value as u16)),
            (ImmData::OP_CONTROL, 0) => Ok(ImmData::Disconnect),
            (ImmData::OP_CONTROL, 1) => Ok(ImmData::KeepAlive),
            (ImmData::OP_CONTROL, 2) => Ok(ImmData::Shutdown),
            _ => Err(Malformed::Undefined {
                what: "rsocket message",
                value: imm.into(),
            }),
        }
    }

    /// Returns the immediate data.
    pub fn imm(self) -> u32 {
        let (op, value) = match self {
            ImmData::Data(bytes) => (ImmData::OP_DATA, bytes & ImmData::DATA_MAX),
            ImmData::Credits(number) => (ImmData::OP_CREDITS, number.into()),
            ImmData::Iomap(index) => (ImmData::OP_IOMAP, index.into()),
            ImmData::Disconnect => (ImmData::OP_CONTROL, 0),
            ImmData::KeepAlive => (ImmData::OP_CONTROL, 1),
            ImmData::Shutdown => (ImmData::OP_CONTROL, 2),
        };
        op << 29 | value
    }
}

/// Header of a datagram over RDMA: the sender's address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramHeader {
    /// Address and port of the sender.
    pub source: SocketAddr,
}

impl DatagramHeader {
    /// Bytes that [`DatagramHeader::emit`] writes at most.
    pub const LEN_MAX: usize = 24;

    /// Bytes that [`DatagramHeader::emit`] writes.
    pub fn bytes(&self) -> usize {
        if self.source.is_ipv4() { 8 } else { Self::LEN_MAX }
    }

    /// Reads a header; the datagram's bytes follow at its length.
    pub fn parse(bytes: &[u8]) -> Result<DatagramHeader, Malformed> {
        need("rsocket datagram", bytes, 8)?;
        let address: IpAddr = match (bytes[0], bytes[1]) {
            (4, 8) => be32(bytes, 4).to_be_bytes().into(),
            (6, 24) => {
                need("rsocket datagram", bytes, 24)?;
                v6(&bytes[8..])
            }
            _ => return Err(undefined_version(bytes[0])),
        };
        Ok(DatagramHeader {
            source: SocketAddr::new(address, be16(bytes, 2)),
        })
    }

    /// Writes the header.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..self.bytes()].fill(0);
        bytes[0] = version(self.source.ip());
        bytes[1] = self.bytes() as u8;
        put(bytes, 2, &self.source.port().to_be_bytes());
        match self.source.ip() {
            IpAddr::V4(address) => put(bytes, 4, &address.octets()),
            IpAddr::V6(address) => put(bytes, 8, &address.octets()),
        }
    }
}

/// Header of a UDP packet between sockets that do not know each other's queue pairs yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpHeader {
    /// Set when a datagram follows; otherwise the packet only announces the queue pair.
    pub has_data: bool,
    /// Queue pair of the sender.
    pub qpn: Qpn,
    /// Address of the sender's device.
    pub address: IpAddr,
}

impl UdpHeader {
    /// Bytes that [`UdpHeader::emit`] writes at most.
    pub const LEN_MAX: usize = 28;

    const TAG: u32 = 0x5555_5555;

    /// Bytes that [`UdpHeader::emit`] writes.
    pub fn bytes(&self) -> usize {
        if self.address.is_ipv4() { 16 } else { Self::LEN_MAX }
    }

    /// Reads a header; a datagram follows at its length.
    pub fn parse(bytes: &[u8]) -> Result<UdpHeader, Malformed> {
        need("rsocket UDP", bytes, 16)?;
        let tag = be32(bytes, 0);
        if tag != UdpHeader::TAG {
            return Err(Malformed::Undefined {
                what: "rsocket UDP tag",
                value: tag.into(),
            });
        }
        let address = match (bytes[4], bytes[6]) {
            (4, 16) => be32(bytes, 12).to_be_bytes().into(),
            (6, 28) => {
                need("rsocket UDP", bytes, 28)?;
                v6(&bytes[12..])
            }
            _ => return Err(undefined_version(bytes[4])),
        };
        let has_data = match u32::from(bytes[5]) {
            ImmData::OP_DATA => true,
            ImmData::OP_CONTROL => false,
            op => {
                return Err(Malformed::Undefined {
                    what: "rsocket UDP operation",
                    value: op.into(),
                });
            }
        };
        Ok(UdpHeader {
            has_data,
            qpn: Qpn::new(be32(bytes, 8) & 0xff_ffff),
            address,
        })
    }

    /// Writes the header.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..self.bytes()].fill(0);
        put(bytes, 0, &UdpHeader::TAG.to_be_bytes());
        bytes[4] = version(self.address);
        let op = if self.has_data {
            ImmData::OP_DATA
        } else {
            ImmData::OP_CONTROL
        };
        bytes[5] = op as u8;
        bytes[6] = self.bytes() as u8;
        put(bytes, 8, &self.qpn.value().to_be_bytes());
        match self.address {
            IpAddr::V4(address) => put(bytes, 12, &address.octets()),
            IpAddr::V6(address) => put(bytes, 12, &address.octets()),
        }
    }
}

fn version(address: IpAddr) -> u8 {
    if address.is_ipv4() { 4 } else { 6 }
}

fn undefined_version(version: u8) -> Malformed {
    Malformed::Undefined {
        what: "rsocket address version",
        value: version.into(),
    }
}

/// Returns the address in the first 16 bytes; the caller guarantees that there are so many.
fn v6(bytes: &[u8]) -> IpAddr {
    let mut octets = [0; 16];
    octets.copy_from_slice(&bytes[..16]);
    Ipv6Addr::from(octets).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATA: ConnData = ConnData {
        order: Order::Little,
        credits: 384,
        table: Target {
            addr: 0x1122_3344_5566_7788,
            rkey: 0x99aa_bbcc,
            length: 2,
        },
        iomaps: Some(3),
        data: Target {
            addr: 0x7000_0000_0000,
            rkey: 0x0102_0304,
            length: 65_536,
        },
    };

    /// The bytes of rdma-core's `struct rs_conn_data` in memory.
    const DATA_BYTES: [u8; 40] = [
        1, 2, 0x01, 0x80, 0, 0, 0, 3, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc,
        0, 0, 0, 2, 0, 0, 0x70, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0, 1, 0, 0,
    ];

    #[test]
    fn conn_data__parse_and_emit() {
        let mut bytes = [0xff; ConnData::LEN];
        DATA.emit(&mut bytes);
        assert_eq!(bytes, DATA_BYTES);
        // The private data of a CM message is longer.
        assert_eq!(ConnData::parse(&[&DATA_BYTES[..], &[0; 16]].concat()), Ok(DATA));
        let mut other = DATA_BYTES;
        other[0] = 2;
        assert!(ConnData::parse(&other).is_err());
        assert!(ConnData::parse(&DATA_BYTES[..39]).is_err());
        let none = ConnData {
            iomaps: None,
            order: Order::Big,
            ..DATA
        };
        none.emit(&mut bytes);
        assert_eq!(ConnData::parse(&bytes), Ok(none));
    }

    #[test]
    fn iomaps__are_what_one_byte_can_say() {
        for (wanted, offered) in [
            (0, 0),
            (1, 1),
            (128, 128),
            (129, 128),
            (256, 256),
            (1000, 768),
            (0xffff, 0x7f00),
        ] {
            // 129 to 255 encode only the flag, with zero steps of 256; this decodes as 128.
            assert_eq!(iomaps_offered(wanted), offered, "{wanted}");
        }
    }

    #[test]
    fn target__in_the_order_of_its_owner() {
        let mut bytes = [0; Target::LEN];
        DATA.table.emit(&mut bytes, Order::Little);
        assert_eq!(bytes[..8], 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!(Target::parse(&bytes, Order::Little), Ok(DATA.table));
        assert_ne!(Target::parse(&bytes, Order::Big), Ok(DATA.table));
        let iomap = Iomap {
            offset: 4096,
            target: DATA.data,
        };
        let mut bytes = [0; Iomap::LEN];
        iomap.emit(&mut bytes, Order::Big);
        assert_eq!(Iomap::parse(&bytes, Order::Big), Ok(iomap));
    }

    #[test]
    fn message__imm() {
        let known = [
            (ImmData::Data(65_536), 0x0001_0000),
            (ImmData::Credits(400), 0x8000_0190),
            (ImmData::Iomap(7), 0xc000_0007),
            (ImmData::Disconnect, 0xe000_0000),
            (ImmData::KeepAlive, 0xe000_0001),
            (ImmData::Shutdown, 0xe000_0002),
        ];
        for (message, imm) in known {
            assert_eq!(message.imm(), imm);
            assert_eq!(ImmData::parse(imm), Ok(message));
        }
        // A value with more than 16 bits.
        assert_eq!(ImmData::parse(0x8001_0190), Ok(ImmData::Credits(400)));
        for imm in [0x2000_0000, 0x4000_0000, 0x6000_0000, 0xa000_0000, 0xe000_0003] {
            assert!(ImmData::parse(imm).is_err(), "{imm:#x}");
        }
    }

    #[test]
    fn datagrams__parse_and_emit() {
        for source in ["10.9.0.1:7174", "[fd00::1]:7174"] {
            let source: SocketAddr = source.parse().unwrap();
            let header = DatagramHeader { source };
            let mut bytes = [0xff; DatagramHeader::LEN_MAX];
            header.emit(&mut bytes);
            assert_eq!(DatagramHeader::parse(&bytes[..header.bytes()]), Ok(header));
            assert!(DatagramHeader::parse(&bytes[..header.bytes() - 1]).is_err());
            for has_data in [false, true] {
                let qpn = Qpn::new(0x12_3456);
                let address = source.ip();
                let header = UdpHeader {
                    has_data,
                    qpn,
                    address,
                };
                let mut bytes = [0xff; UdpHeader::LEN_MAX];
                header.emit(&mut bytes);
                assert_eq!(UdpHeader::parse(&bytes[..header.bytes()]), Ok(header));
                assert!(UdpHeader::parse(&bytes[..header.bytes() - 1]).is_err());
                bytes[0] ^= 1;
                assert!(UdpHeader::parse(&bytes).is_err());
            }
        }
    }
}
