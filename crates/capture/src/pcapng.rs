//! Captures: a pcapng writer, and a reader of pcapng and of classic pcap files, over byte slices.
//!
//! To write a capture, begin with [`write_section`], [`write_interface`] and [`write_packet`]; to read one, with [`Reader`] and
//! [`ip_udp`]. The formats are described in the Internet-Drafts draft-ietf-opsawg-pcapng and draft-ietf-opsawg-pcap.
//!
//! ```text
//! section header       0a0d0d0a | length | 1a2b3c4d | version 1.0 | section length (-1: not given) | length
//! interface            1 | length | link type u16, 0 | snap length | options: 2 name, 9 time resolution | length
//! statistics           5 | length | interface | time high | time low | options: 4 received, 5 dropped, u64 each | length
//! enhanced packet      6 | length | interface | time high | time low | captured | original | data | options: 1 comment | length
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rdmux_wire::Malformed;
use rdmux_wire::bytes::{be16, be32, need};
use rdmux_wire::roce::icrc::Flow;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const SIMPLE_PACKET: u32 = 3;
const STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const OPT_COMMENT: u16 = 1;
const OPT_NAME: u16 = 2;
const OPT_RECEIVED: u16 = 4;
const OPT_DROPPED: u16 = 5;
const OPT_TIME_RESOLUTION: u16 = 9;
const OPT_TIME_OFFSET: u16 = 14;
const NS_PER_S: u64 = 1_000_000_000;

/// Type of a captured packet's first header. The values are those of the tcpdump registry of link-layer header types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinkType(
    /// The value.
    pub u16,
);

impl LinkType {
    /// BSD loopback: four bytes of address family in the host's byte order.
    pub const NULL: LinkType = LinkType(0);
    /// Ethernet.
    pub const ETHERNET: LinkType = LinkType(1);
    /// IPv4 or IPv6, under the number that some systems use.
    pub const RAW_BSD: LinkType = LinkType(12);
    /// IPv4 or IPv6.
    pub const RAW: LinkType = LinkType(101);
    /// Linux "cooked": the format of `tcpdump -i any` before version 2.
    pub const LINUX_SLL: LinkType = LinkType(113);
    /// Data that no network carries: tags that name a Wireshark dissector, and the data for it.
    pub const UPPER_PDU: LinkType = LinkType(252);
    /// Linux "cooked", version 2.
    pub const LINUX_SLL2: LinkType = LinkType(276);
}

/// Begins a capture.
pub fn write_section(out: &mut Vec<u8>) {
    block(out, SECTION_HEADER, |out| {
        out.extend_from_slice(&BYTE_ORDER.to_le_bytes());
        out.extend_from_slice(&1u16.to_le_bytes());
        out.extend_from_slice(&0u16.to_le_bytes());
        out.extend_from_slice(&u64::MAX.to_le_bytes());
    });
}

/// Adds an interface to the section. Packets refer to interfaces by number, in the order of their addition, from 0.
pub fn write_interface(out: &mut Vec<u8>, link: LinkType, name: Option<&str>) {
    block(out, INTERFACE, |out| {
        out.extend_from_slice(&link.0.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&0u32.to_le_bytes()); // no snap length
        if let Some(name) = name {
            option(out, OPT_NAME, name.as_bytes());
        }
        option(out, OPT_TIME_RESOLUTION, &[9]);
        option(out, 0, &[]);
    });
}

/// Adds a packet. `original_len` is its length on the wire; `data` may be only its beginning.
pub fn write_packet(
    out: &mut Vec<u8>,
    interface: u32,
    timestamp_ns: u64,
    original_len: u32,
    data: &[u8],
    comment: Option<&str>,
) {
    block(out, ENHANCED_PACKET, |out| {
        out.extend_from_slice(&interface.to_le_bytes());
        out.extend_from_slice(&((timestamp_ns >> 32) as u32).to_le_bytes());
        out.extend_from_slice(&(timestamp_ns as u32).to_le_bytes());
        out.extend_from_slice(&(data.len() as u32).to_le_bytes());
        out.extend_from_slice(&original_len.to_le_bytes());
        out.extend_from_slice(data);
        pad(out);
        if let Some(comment) = comment {
            option(out, OPT_COMMENT, comment.as_bytes());
            option(out, 0, &[]);
        }
    });
}

/// Adds the statistics of an interface so far: packets seen, and the packets among them for which the capture had no room. The last
/// such block of an interface is the valid one.
pub fn write_statistics(out: &mut Vec<u8>, interface: u32, timestamp_ns: u64, received: u64, dropped: u64) {
    block(out, STATISTICS, |out| {
        out.extend_from_slice(&interface.to_le_bytes());
        out.extend_from_slice(&((timestamp_ns >> 32) as u32).to_le_bytes());
        out.extend_from_slice(&(timestamp_ns as u32).to_le_bytes());
        option(out, OPT_RECEIVED, &received.to_le_bytes());
        option(out, OPT_DROPPED, &dropped.to_le_bytes());
        option(out, 0, &[]);
    });
}

/// Appends an Ethernet header to `out`. Only the IP addresses are known, so the MAC addresses are locally administered ones made of the
/// last four bytes of these. With the output of [`write_ip_udp`] behind it, it is a packet of [`LinkType::ETHERNET`].
pub fn write_ethernet(out: &mut Vec<u8>, src: IpAddr, dst: IpAddr) {
    let mac = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.octets(),
        IpAddr::V6(v6) => {
            let [.., a, b, c, d] = v6.octets();
            [a, b, c, d]
        }
    };
    for address in [dst, src] {
        out.extend_from_slice(&[0x02, 0]);
        out.extend_from_slice(&mac(address));
    }
    out.extend_from_slice(if src.is_ipv4() {
        &[0x08, 0x00]
    } else {
        &[0x86, 0xdd]
    });
}

/// Appends a line of text to `out`: a packet of [`LinkType::UPPER_PDU`], for which Wireshark shows the text. It represents no packet of
/// a network.
pub fn write_text(out: &mut Vec<u8>, text: &str) {
    const DISSECTOR: &[u8; 16] = b"data-text-lines\0";
    out.extend_from_slice(&[0, 12, 0, DISSECTOR.len() as u8]);
    out.extend_from_slice(DISSECTOR);
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(text.as_bytes());
}

/// Appends an IP and UDP header for `flow` and `payload` to `out`, with DF set and all checksums: a packet of [`LinkType::RAW`].
/// `ip_id` is used for IPv4 only; `tos` is the TOS byte of IPv4 or the traffic class of IPv6.
pub fn write_ip_udp(out: &mut Vec<u8>, flow: &Flow, ip_id: u16, tos: u8, payload: &[u8]) {
    let start = out.len();
    let udp_len = (payload.len() + 8) as u16;
    let mut pseudo = u32::from(udp_len) + 17;
    let at = match (flow.src, flow.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            out.extend_from_slice(&[0x45, tos]);
            out.extend_from_slice(&(udp_len.wrapping_add(20)).to_be_bytes());
            out.extend_from_slice(&ip_id.to_be_bytes());
            out.extend_from_slice(&[0x40, 0, 64, 17, 0, 0]);
            out.extend_from_slice(&src.octets());
            out.extend_from_slice(&dst.octets());
            let checksum = !fold(sum(&out[start..]));
            out[start + 10..start + 12].copy_from_slice(&checksum.to_be_bytes());
            pseudo += sum(&out[start + 12..]);
            start + 20
        }
        (src, dst) => {
            out.extend_from_slice(&(6 << 28 | u32::from(tos) << 20).to_be_bytes());
            out.extend_from_slice(&udp_len.to_be_bytes());
            out.extend_from_slice(&[17, 64]);
            out.extend_from_slice(&rdmux_wire::cm::to_gid(src).octets());
            out.extend_from_slice(&rdmux_wire::cm::to_gid(dst).octets());
            pseudo += sum(&out[start + 8..]);
            start + 40
        }
    };
    out.extend_from_slice(&flow.src_port.to_be_bytes());
    out.extend_from_slice(&flow.dst_port.to_be_bytes());
    out.extend_from_slice(&udp_len.to_be_bytes());
    out.extend_from_slice(&[0; 2]);
    out.extend_from_slice(payload);
    // A computed 0 is sent as all ones, since 0 means that there is no checksum (RFC 768).
    let checksum = match !fold(pseudo + sum(&out[at..])) {
        0 => 0xffff,
        other => other,
    };
    out[at + 6..at + 8].copy_from_slice(&checksum.to_be_bytes());
}

/// Returns the sum of the 16-bit words of `bytes`; an odd last byte is padded with zero. RFC 1071.
fn sum(bytes: &[u8]) -> u32 {
    bytes
        .chunks(2)
        .map(|c| u32::from(c[0]) << 8 | u32::from(*c.get(1).unwrap_or(&0)))
        .sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    body(out);
    let len = (out.len() - start + 4) as u32;
    out[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
    out.extend_from_slice(&len.to_le_bytes());
}

/// Appends an option; text that exceeds its 16-bit length is cut.
fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out);
}

/// Pads to a multiple of four: every earlier part of a capture is such a multiple.
fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

/// A packet of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Captured<'a> {
    /// Type of the first header in `data`.
    pub link: LinkType,
    /// Time in nanoseconds since 1970.
    pub timestamp_ns: u64,
    /// Length of the original packet; `data` may be only its beginning.
    pub original_len: u32,
    /// The packet.
    pub data: &'a [u8],
    /// Comment of the packet, if it has one that is UTF-8.
    pub comment: Option<&'a str>,
}

/// Reads a capture, packet by packet. After an error it yields nothing more.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    big_endian: bool,
    format: Format,
}

#[derive(Clone, Debug)]
enum Format {
    Pcap { link: LinkType, nanoseconds: bool },
    Pcapng { interfaces: Vec<Interface> },
}

#[derive(Clone, Copy, Debug)]
struct Interface {
    link: LinkType,
    snap_len: u32,
    /// Resolution as in option 9: a power of ten, or of two when the highest bit is set.
    resolution: u8,
    offset_s: i64,
}

impl Interface {
    fn timestamp_ns(&self, ticks: u64) -> u64 {
        let exponent = u32::from(self.resolution & 0x7f);
        let ns = if self.resolution & 0x80 != 0 {
            (u128::from(ticks) * u128::from(NS_PER_S)) >> exponent
        } else if exponent <= 9 {
            u128::from(ticks) * 10u128.pow(9 - exponent)
        } else {
            10u128
                .checked_pow(exponent - 9)
                .map_or(0, |divisor| u128::from(ticks) / divisor)
        };
        let offset = i128::from(self.offset_s) * i128::from(NS_PER_S);
        let ns = i128::try_from(ns).unwrap_or(i128::MAX).saturating_add(offset);
        u64::try_from(ns.max(0)).unwrap_or(u64::MAX)
    }
}

impl<'a> Reader<'a> {
    /// Detects the file's format and byte order from its first bytes.
    pub fn new(bytes: &'a [u8]) -> Result<Reader<'a>, Malformed> {
        need("capture", bytes, 4)?;
        let magic = be32(bytes, 0);
        if magic == SECTION_HEADER {
            let format = Format::Pcapng {
                interfaces: Vec::new(),
            };
            return Ok(Reader {
                bytes,
                at: 0,
                big_endian: false,
                format,
            });
        }
        let (big_endian, nanoseconds) = match magic {
            0xa1b2_c3d4 => (true, false),
            0xa1b2_3c4d => (true, true),
            0xd4c3_b2a1 => (false, false),
            0x4d3c_b2a1 => (false, true),
            other => {
                return Err(Malformed::Undefined {
                    what: "capture magic",
                    value: other.into(),
                });
            }
        };
        need("pcap header", bytes, 24)?;
        let mut reader = Reader {
            bytes,
            at: 24,
            big_endian,
            format: Format::Pcap {
                link: LinkType::NULL,
                nanoseconds,
            },
        };
        let link = LinkType(reader.u32(20) as u16); // the upper half tells of a frame check sequence
        reader.format = Format::Pcap { link, nanoseconds };
        Ok(reader)
    }

    fn u16(&self, at: usize) -> u16 {
        if self.big_endian {
            be16(self.bytes, at)
        } else {
            be16(self.bytes, at).swap_bytes()
        }
    }

    fn u32(&self, at: usize) -> u32 {
        if self.big_endian {
            be32(self.bytes, at)
        } else {
            be32(self.bytes, at).swap_bytes()
        }
    }

    /// Checks that `len` bytes follow position `at`.
    fn room(&self, what: &'static str, at: usize, len: usize) -> Result<(), Malformed> {
        need(what, &self.bytes[at..], len)
    }

    fn next_pcap(&mut self, link: LinkType, nanoseconds: bool) -> Result<Captured<'a>, Malformed> {
        let at = self.at;
        self.room("pcap record", at, 16)?;
        let (seconds, fraction) = (u64::from(self.u32(at)), u64::from(self.u32(at + 4)));
        let len = self.u32(at + 8) as usize;
        self.room("pcap record", at, len.saturating_add(16))?;
        self.at = at + 16 + len;
        Ok(Captured {
            link,
            timestamp_ns: seconds * NS_PER_S + fraction * if nanoseconds { 1 } else { 1_000 },
            original_len: self.u32(at + 12),
            data: &self.bytes[at + 16..self.at],
            comment: None,
        })
    }

    /// Reads one block; returns `None` if it holds no packet.
    fn next_block(&mut self) -> Result<Option<Captured<'a>>, Malformed> {
        let at = self.at;
        self.room("pcapng block", at, 12)?;
        let undefined = |what, value: u32| Malformed::Undefined {
            what,
            value: value.into(),
        };
        if be32(self.bytes, at) == SECTION_HEADER {
            // The byte order may change here, which affects how the length is read.
            self.big_endian = match be32(self.bytes, at + 8) {
                BYTE_ORDER => true,
                other if other.swap_bytes() == BYTE_ORDER => false,
                other => return Err(undefined("pcapng byte order", other)),
            };
        }
        let (kind, len) = (self.u32(at), self.u32(at + 4));
        if len < 12 || len % 4 != 0 {
            return Err(undefined("pcapng block length", len));
        }
        self.room("pcapng block", at, len as usize)?;
        self.at = at + len as usize;
        let (body, end) = (at + 8, self.at - 4);
        let fixed = |min: usize| need("pcapng block", &self.bytes[body..end], min);
        let Format::Pcapng { interfaces } = &self.format else {
            return Ok(None);
        };
        match kind {
            SECTION_HEADER => {
                self.format = Format::Pcapng {
                    interfaces: Vec::new(),
                }
            }
            INTERFACE => {
                fixed(8)?;
                let mut interface = Interface {
                    link: LinkType(self.u16(body)),
                    snap_len: self.u32(body + 4),
                    resolution: 6,
                    offset_s: 0,
                };
                self.options(body + 8, end, |code, value| match (code, value) {
                    (OPT_TIME_RESOLUTION, [resolution]) => interface.resolution = *resolution,
                    (OPT_TIME_OFFSET, value) => {
                        if let Ok(bytes) = value.try_into() {
                            let from = if self.big_endian {
                                i64::from_be_bytes
                            } else {
                                i64::from_le_bytes
                            };
                            interface.offset_s = from(bytes);
                        }
                    }
                    _ => {}
                });
                let Format::Pcapng { interfaces } = &mut self.format else {
                    return Ok(None);
                };
                interfaces.push(interface);
            }
            SIMPLE_PACKET => {
                fixed(4)?;
                let interface = interfaces
                    .first()
                    .ok_or_else(|| undefined("pcapng interface", 0))?;
                let original_len = self.u32(body);
                let mut len = (original_len as usize).min(end - body - 4);
                if interface.snap_len != 0 {
                    len = len.min(interface.snap_len as usize);
                }
                let data = &self.bytes[body + 4..body + 4 + len];
                return Ok(Some(Captured {
                    link: interface.link,
                    timestamp_ns: 0,
                    original_len,
                    data,
                    comment: None,
                }));
            }
            ENHANCED_PACKET => {
                fixed(20)?;
                let number = self.u32(body);
                let interface = interfaces
                    .get(number as usize)
                    .ok_or_else(|| undefined("pcapng interface", number))?;
                let ticks = u64::from(self.u32(body + 4)) << 32 | u64::from(self.u32(body + 8));
                let len = self.u32(body + 12) as usize;
                fixed(len.saturating_add(20))?;
                let data = &self.bytes[body + 20..body + 20 + len];
                let mut comment = None;
                self.options((body + 20 + len).next_multiple_of(4), end, |code, value| {
                    if code == OPT_COMMENT {
                        comment = str::from_utf8(value).ok();
                    }
                });
                return Ok(Some(Captured {
                    link: interface.link,
                    timestamp_ns: interface.timestamp_ns(ticks),
                    original_len: self.u32(body + 16),
                    data,
                    comment,
                }));
            }
            _ => {}
        }
        Ok(None)
    }

    /// Calls `each` with the options between `at` and `end`, until an option does not fit.
    fn options(&self, mut at: usize, end: usize, mut each: impl FnMut(u16, &'a [u8])) {
        while at + 4 <= end {
            let (code, len) = (self.u16(at), usize::from(self.u16(at + 2)));
            let value_end = at + 4 + len;
            if code == 0 || value_end > end {
                return;
            }
            each(code, &self.bytes[at + 4..value_end]);
            at = value_end.next_multiple_of(4);
        }
    }
}

impl<'a> Iterator for Reader<'a> {
    type Item = Result<Captured<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.at < self.bytes.len() {
            let next = match self.format {
                Format::Pcap { link, nanoseconds } => self.next_pcap(link, nanoseconds).map(Some),
                Format::Pcapng { .. } => self.next_block(),
            };
            match next {
                Ok(None) => {}
                Ok(Some(captured)) => return Some(Ok(captured)),
                Err(error) => {
                    self.at = self.bytes.len();
                    return Some(Err(error));
                }
            }
        }
        None
    }
}

/// A UDP datagram found in a captured packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpDatagram<'a> {
    /// Addresses and ports.
    pub flow: Flow,
    /// IPv4 identification; 0 in IPv6.
    pub ip_id: u16,
    /// Set when DF is set; always set in IPv6.
    pub dont_fragment: bool,
    /// UDP payload. Longer than a packet can be if the capture was taken before a GSO train was split.
    pub payload: &'a [u8],
}

/// Reason for which a packet contains no [`UdpDatagram`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoUdp {
    /// The packet is not UDP over IP.
    #[error("neither IPv4 nor IPv6 with UDP")]
    Other,
    /// The packet is an IP fragment.
    #[error("an IP fragment")]
    Fragment,
    /// The capture holds only the packet's beginning, or its lengths contradict each other.
    #[error("captured only in part")]
    Truncated,
}

/// Finds the UDP datagram in a packet whose first header has type `link`.
pub fn ip_udp(link: LinkType, data: &[u8]) -> Result<UdpDatagram<'_>, NoUdp> {
    let ip = match link {
        LinkType::NULL => data.get(4..),
        LinkType::RAW | LinkType::RAW_BSD => Some(data),
        LinkType::ETHERNET => after_ethertype(data, 12),
        LinkType::LINUX_SLL => after_ethertype(data, 14),
        LinkType::LINUX_SLL2 => match data.first_chunk() {
            Some([0x08, 0x00] | [0x86, 0xdd]) => data.get(20..),
            Some(_) => return Err(NoUdp::Other),
            None => None,
        },
        _ => return Err(NoUdp::Other),
    };
    let ip = ip.ok_or(NoUdp::Truncated)?;
    match ip.first().map(|b| b >> 4) {
        Some(4) => ipv4_udp(ip),
        Some(6) => ipv6_udp(ip),
        Some(_) => Err(NoUdp::Other),
        None => Err(NoUdp::Truncated),
    }
}

/// Returns the bytes behind the EtherType at `at` and any VLAN tags. For a packet that is not IP, returns a zero byte: the caller
/// checks the first nibble.
fn after_ethertype(data: &[u8], mut at: usize) -> Option<&[u8]> {
    while let [0x81, 0x00] | [0x88, 0xa8] = data.get(at..at + 2)? {
        at += 4;
    }
    match data.get(at..at + 2)? {
        [0x08, 0x00] | [0x86, 0xdd] => data.get(at + 2..),
        _ => Some(&[0]),
    }
}

fn ipv4_udp(ip: &[u8]) -> Result<UdpDatagram<'_>, NoUdp> {
    if ip.len() < 20 {
        return Err(NoUdp::Truncated);
    }
    if ip[9] != 17 {
        return Err(NoUdp::Other);
    }
    let header_len = usize::from(ip[0] & 0x0f) * 4;
    // A train longer than 64 KiB does not fit this length field (RFC 791); captures show 0.
    let total = match usize::from(be16(ip, 2)) {
        0 => ip.len(),
        total => total,
    };
    if header_len < 20 || total < header_len || ip.len() < total {
        return Err(NoUdp::Truncated);
    }
    if be16(ip, 6) & 0x3fff != 0 {
        return Err(NoUdp::Fragment);
    }
    let address = |at| IpAddr::V4(Ipv4Addr::from_bits(be32(ip, at)));
    let datagram = udp(&ip[header_len..total], address(12), address(16))?;
    Ok(UdpDatagram {
        ip_id: be16(ip, 4),
        dont_fragment: ip[6] & 0x40 != 0,
        ..datagram
    })
}

fn ipv6_udp(ip: &[u8]) -> Result<UdpDatagram<'_>, NoUdp> {
    if ip.len() < 40 {
        return Err(NoUdp::Truncated);
    }
    let end = match usize::from(be16(ip, 4)) {
        0 => ip.len(),
        len => 40 + len,
    };
    let bytes = ip.get(..end).ok_or(NoUdp::Truncated)?;
    let address = |at: usize| {
        let mut octets = [0; 16];
        octets.copy_from_slice(&ip[at..at + 16]);
        IpAddr::V6(Ipv6Addr::from(octets))
    };
    let (mut next, mut at) = (ip[6], 40);
    loop {
        match next {
            17 => return udp(bytes.get(at..).ok_or(NoUdp::Truncated)?, address(8), address(24)),
            44 => return Err(NoUdp::Fragment),
            // Hop-by-hop options, routing and destination options have their length in units of eight. RFC 8200, 4.
            0 | 43 | 60 => {
                let Some([following, len]) = bytes.get(at..at + 2) else {
                    return Err(NoUdp::Truncated);
                };
                next = *following;
                at += 8 + 8 * usize::from(*len);
            }
            _ => return Err(NoUdp::Other),
        }
    }
}

fn udp(bytes: &[u8], src: IpAddr, dst: IpAddr) -> Result<UdpDatagram<'_>, NoUdp> {
    if bytes.len() < 8 {
        return Err(NoUdp::Truncated);
    }
    let len = match usize::from(be16(bytes, 4)) {
        0 => bytes.len(),
        len => len,
    };
    let payload = bytes.get(8..len).ok_or(NoUdp::Truncated)?;
    let flow = Flow {
        src,
        dst,
        src_port: be16(bytes, 0),
        dst_port: be16(bytes, 2),
    };
    Ok(UdpDatagram {
        flow,
        ip_id: 0,
        dont_fragment: true,
        payload,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(v6: bool) -> Flow {
        let (src, dst) = if v6 {
            ("fd00::1", "fd00::2")
        } else {
            ("10.9.0.1", "10.9.0.2")
        };
        Flow {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            src_port: 0xc001,
            dst_port: 4791,
        }
    }

    fn raw(v6: bool, payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        write_ip_udp(&mut out, &flow(v6), 7, 2, payload);
        out
    }

    fn capture() -> Vec<u8> {
        let mut out = Vec::new();
        write_section(&mut out);
        write_interface(&mut out, LinkType::RAW, Some("rdmux0"));
        write_interface(&mut out, LinkType::ETHERNET, None);
        write_packet(
            &mut out,
            0,
            1_700_000_000_123_456_789,
            5,
            b"abcde",
            Some("wrong rkey"),
        );
        write_packet(&mut out, 1, 5_000_000_001, 60, b"wxyz", None);
        out
    }

    #[test]
    fn reader__inverts_writer() {
        let bytes = capture();
        let mut reader = Reader::new(&bytes).unwrap();
        let first = Captured {
            link: LinkType::RAW,
            timestamp_ns: 1_700_000_000_123_456_789,
            original_len: 5,
            data: b"abcde",
            comment: Some("wrong rkey"),
        };
        assert_eq!(reader.next(), Some(Ok(first)));
        let second = Captured {
            link: LinkType::ETHERNET,
            timestamp_ns: 5_000_000_001,
            original_len: 60,
            data: b"wxyz",
            comment: None,
        };
        assert_eq!(reader.next(), Some(Ok(second)));
        assert_eq!(reader.next(), None);
    }

    #[test]
    fn writer__bytes_of_section_and_interface() {
        let bytes = capture();
        assert_eq!(
            bytes[..12],
            [0x0a, 0x0d, 0x0d, 0x0a, 28, 0, 0, 0, 0x4d, 0x3c, 0x2b, 0x1a]
        );
        assert_eq!(bytes[24..28], [28, 0, 0, 0]);
        assert_eq!(bytes[28..44], [1, 0, 0, 0, 44, 0, 0, 0, 101, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn reader__truncated_at_every_byte() {
        let bytes = capture();
        let whole = Reader::new(&bytes).unwrap().count();
        for len in 4..bytes.len() {
            let read: Vec<_> = Reader::new(&bytes[..len]).unwrap().collect();
            let good = read.iter().take_while(|r| r.is_ok()).count();
            assert!(good < whole && read.len() <= good + 1, "cut to {len}");
        }
    }

    #[test]
    fn reader__big_endian_section_with_microseconds() {
        let mut bytes = Vec::new();
        let mut block = |kind: u32, body: &[u8]| {
            let len = (body.len() as u32 + 12).to_be_bytes();
            bytes.extend_from_slice(&[&kind.to_be_bytes()[..], &len, body, &len].concat());
        };
        block(
            SECTION_HEADER,
            &[
                0x1a, 0x2b, 0x3c, 0x4d, 0, 1, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255,
            ],
        );
        block(INTERFACE, &[0, 1, 0, 0, 0, 0, 0, 3]);
        block(99, b"none");
        block(
            ENHANCED_PACKET,
            &[
                0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, b'x', 0, 0, 0,
            ],
        );
        block(SIMPLE_PACKET, &[0, 0, 0, 8, b'a', b'b', b'c', b'd']);
        let read: Vec<_> = Reader::new(&bytes).unwrap().map(Result::unwrap).collect();
        assert_eq!((read[0].timestamp_ns, read[0].data), (9_000, &b"x"[..]));
        assert_eq!((read[1].original_len, read[1].data), (8, &b"abc"[..]));
    }

    #[test]
    fn reader__classic_pcap_in_four_kinds() {
        for (magic, big, ns) in [
            (0xa1b2_c3d4u32, true, 1_000),
            (0xa1b2_c3d4, false, 1_000),
            (0xa1b2_3c4d, true, 1),
            (0xa1b2_3c4d, false, 1),
        ] {
            let word = |w: u32| if big { w.to_be_bytes() } else { w.to_le_bytes() };
            let words = [magic, 0x0002_0004, 0, 0, 65_535, 113, 3, 4, 2, 70];
            let mut bytes: Vec<u8> = words.into_iter().flat_map(word).collect();
            bytes.extend_from_slice(b"hi");
            let mut reader = Reader::new(&bytes).unwrap();
            let expected = Captured {
                link: LinkType::LINUX_SLL,
                timestamp_ns: 3 * NS_PER_S + 4 * ns,
                original_len: 70,
                data: b"hi",
                comment: None,
            };
            assert_eq!(reader.next(), Some(Ok(expected)));
            assert_eq!(reader.next(), None);
            assert!(
                Reader::new(&bytes[..bytes.len() - 1])
                    .unwrap()
                    .next()
                    .unwrap()
                    .is_err()
            );
        }
    }

    #[test]
    fn reader__not_a_capture() {
        assert!(Reader::new(b"PK\x03\x04....").is_err());
        assert!(Reader::new(b"").is_err());
    }

    #[test]
    fn interface__time_resolutions() {
        let at = |resolution, ticks| {
            Interface {
                link: LinkType::RAW,
                snap_len: 0,
                resolution,
                offset_s: 0,
            }
            .timestamp_ns(ticks)
        };
        assert_eq!(
            (at(6, 5), at(9, 5), at(12, 5_000), at(0, 2)),
            (5_000, 5, 5, 2 * NS_PER_S)
        );
        assert_eq!(
            (at(0x80 | 10, 1024), at(0xff, 5), at(0x7f, 5), at(0, u64::MAX)),
            (NS_PER_S, 0, 0, u64::MAX)
        );
    }

    #[test]
    fn ip_udp__every_link_type() {
        for v6 in [false, true] {
            let ip = raw(v6, b"payload");
            let ethertype: &[u8] = if v6 { &[0x86, 0xdd] } else { &[0x08, 0x00] };
            let frame = |parts: &[&[u8]]| [parts.concat(), ip.clone()].concat();
            for (link, data) in [
                (LinkType::RAW, ip.clone()),
                (LinkType::RAW_BSD, ip.clone()),
                (LinkType::NULL, frame(&[&[2, 0, 0, 0]])),
                (LinkType::ETHERNET, frame(&[&[0; 12], ethertype])),
                (
                    LinkType::ETHERNET,
                    frame(&[&[0; 12], &[0x81, 0, 0, 5], ethertype]),
                ),
                (LinkType::LINUX_SLL, frame(&[&[0; 14], ethertype])),
                (LinkType::LINUX_SLL2, frame(&[ethertype, &[0; 18]])),
            ] {
                let found = ip_udp(link, &data).unwrap();
                assert_eq!(
                    (found.flow, found.payload),
                    (flow(v6), &b"payload"[..]),
                    "{link:?}"
                );
                assert_eq!((found.ip_id, found.dont_fragment), (if v6 { 0 } else { 7 }, true));
                for len in 0..data.len() {
                    assert!(ip_udp(link, &data[..len]).is_err(), "{link:?} cut to {len}");
                }
                let padded = [data.as_slice(), &[0; 20]].concat();
                assert_eq!(
                    ip_udp(link, &padded).unwrap().payload,
                    b"payload",
                    "trailer of the frame"
                );
            }
        }
    }

    #[test]
    fn ip_udp__what_it_refuses() {
        let ip = raw(false, b"payload");
        let with = |at: usize, value: u8| {
            let mut bytes = ip.clone();
            bytes[at] = value;
            ip_udp(LinkType::RAW, &bytes).unwrap_err()
        };
        assert_eq!(with(6, 0x20), NoUdp::Fragment); // more fragments
        assert_eq!(with(7, 1), NoUdp::Fragment); // offset
        assert_eq!(with(9, 6), NoUdp::Other); // TCP
        assert_eq!(with(0, 0x55), NoUdp::Other);
        assert_eq!(with(0, 0x44), NoUdp::Truncated); // header length
        assert_eq!(with(25, 99), NoUdp::Truncated); // UDP length
        let mut v6 = raw(true, b"payload");
        v6[6] = 44;
        assert_eq!(ip_udp(LinkType::RAW, &v6), Err(NoUdp::Fragment));
        assert_eq!(ip_udp(LinkType(147), &ip), Err(NoUdp::Other));
        let arp = [&[0; 12][..], &[0x08, 0x06], &[0; 28]].concat();
        assert_eq!(ip_udp(LinkType::ETHERNET, &arp), Err(NoUdp::Other));
    }

    #[test]
    fn ip_udp__ipv6_extension_header() {
        let plain = raw(true, b"payload");
        let mut bytes = [&plain[..40], &[17, 0, 1, 4, 0, 0, 0, 0], &plain[40..]].concat();
        bytes[6] = 60;
        bytes[5] += 8;
        assert_eq!(ip_udp(LinkType::RAW, &bytes).unwrap().payload, b"payload");
    }

    #[test]
    fn write_ip_udp__checksums() {
        for v6 in [false, true] {
            for payload in [&b"even"[..], b"odd"] {
                let ip = raw(v6, payload);
                let (addresses, udp) = if v6 { (8..40, 40) } else { (12..20, 20) };
                if !v6 {
                    assert_eq!(fold(sum(&ip[..20])), 0xffff);
                }
                let pseudo = sum(&ip[addresses]) + 17 + payload.len() as u32 + 8;
                assert_eq!(fold(pseudo + sum(&ip[udp..])), 0xffff);
            }
        }
    }
}
