//! Communication management datagrams, with which two endpoints agree on a connection. IBTA Vol 1, chapter 12; annex A11 (RDMA IP CM
//! service); annex A16 and A17 (RoCE).
//!
//! Each message is a MAD of 256 bytes, sent as one UD SEND Only to QPN 1 with [`crate::roce::GSI_QKEY`]. Byte offsets in
//! this file count from the end of the 24-byte MAD header, as in the tables of chapter 12.
//!
//! ```text
//!  0  base version 1 | class 0x07     | class version 2 | method 0x03
//!  4  status 0                        | class specific 0
//!  8  transaction id (8 bytes); an answer repeats it
//! 16  attribute id: which message     | reserved
//! 20  attribute modifier: options of the enhanced connection establishment (REQ, REP), else 0
//! 24  message, 232 bytes, private data at its end
//! ```
//!
//! Private data has no length on the wire: each message has room for a fixed number of bytes, and the sender fills unused bytes with zero.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::bytes::{be16, be24, be32, be64, need, put, put24};
use crate::roce::{PathMtu, Transport};
use crate::{Malformed, Psn, Qpn};

/// Bytes of a MAD.
pub const MAD_LEN: usize = 256;
/// Management class of connection management. IBTA Vol 1, 13.4.4.
pub const CLASS: u8 = 0x07;

const HEADER_LEN: usize = 24;
const BASE_VERSION: u8 = 1;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 0x03;
const LID_PERMISSIVE: u16 = 0xffff;

/// Attribute ids. IBTA Vol 1, 12.6 and 16.7.3.
mod attribute {
    pub(super) const REQ: u16 = 0x10;
    pub(super) const MRA: u16 = 0x11;
    pub(super) const REJ: u16 = 0x12;
    pub(super) const REP: u16 = 0x13;
    pub(super) const RTU: u16 = 0x14;
    pub(super) const DREQ: u16 = 0x15;
    pub(super) const DREP: u16 = 0x16;
    pub(super) const SIDR_REQ: u16 = 0x17;
    pub(super) const SIDR_REP: u16 = 0x18;
    pub(super) const LAP: u16 = 0x19;
    pub(super) const APR: u16 = 0x1a;
}

/// Addressee of a message; enough to pass a MAD to the endpoint that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// A request for a service: REQ, SIDR_REQ.
    Service(ServiceId),
    /// Continues an exchange that the receiver began under this communication id (or SIDR request id).
    CommId(u32),
    /// A REJ of a sender that gave up before it knew the receiver's id: goes to whoever has the request. IBTA Vol 1, 12.6.7.2.
    Everyone,
}

/// Returns the destination of a MAD from its fixed fields, without parsing the rest. `None` if it is not a CM message.
pub fn destination(mad: &[u8]) -> Option<Destination> {
    if mad.len() < MAD_LEN || mad[1] != CLASS || mad[2] != CLASS_VERSION || mad[3] != METHOD_SEND {
        return None;
    }
    let body = &mad[HEADER_LEN..];
    match be16(mad, 16) {
        attribute::REQ | attribute::SIDR_REQ => Some(Destination::Service(ServiceId(be64(body, 8)))),
        attribute::SIDR_REP => Some(Destination::CommId(be32(body, 0))),
        attribute::REJ if be32(body, 4) == 0 => Some(Destination::Everyone),
        attribute::MRA
        | attribute::REJ
        | attribute::REP
        | attribute::RTU
        | attribute::DREQ
        | attribute::DREP
        | attribute::LAP
        | attribute::APR => Some(Destination::CommId(be32(body, 4))),
        _ => None,
    }
}

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

    fn parse(body: &[u8], at: usize) -> PrivateData<N> {
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
    fn from_fields(vendor: u32, options: u32) -> Option<Ece> {
        (vendor != 0).then_some(Ece { vendor, options })
    }
}

/// Options that rdmux endpoints exchange through ECE.
///
/// ```text
/// options  31..28 version   27..6 zero, ignored on receive   5 selective   4..0 log2 of the receive window in bytes
/// ```
///
/// A side treats a bit that it does not know as 0, so that a feature is used only when both sides set its bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extensions {
    /// Version of these extensions, 1 to 15.
    pub version: u8,
    /// Log2 of the bytes that may be in flight towards the sender of the message, 0 to 31.
    pub receive_window_log2: u8,
    /// Set when the sender of the message keeps packets behind a gap, and sends and understands [`crate::sack::Sack`].
    pub selective: bool,
}

impl Extensions {
    /// The vendor id of rdmux: "RDM".
    pub const VENDOR: u32 = 0x52_44_4d;
    /// The version described here.
    pub const VERSION: u8 = 1;
    const SELECTIVE: u32 = 1 << 5;

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
        })
    }

    /// Returns the extensions as ECE.
    pub fn to_ece(self) -> Ece {
        let selective = if self.selective { Extensions::SELECTIVE } else { 0 };
        let options =
            u32::from(self.version & 0x0f) << 28 | selective | u32::from(self.receive_window_log2 & 0x1f);
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

fn gid(b: &[u8], at: usize) -> Ipv6Addr {
    let mut octets = [0; 16];
    octets.copy_from_slice(&b[at..at + 16]);
    octets.into()
}

/// Request for a connection. IBTA Vol 1, 12.6.5.
///
/// The fields of an alternate path, of reliable datagram and of LIDs are written as RoCE requires and not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req {
    /// Communication id of the sender.
    pub local_comm_id: u32,
    /// Vendor options.
    pub ece: Option<Ece>,
    /// Requested service.
    pub service_id: ServiceId,
    /// GUID of the sender's device; together with the QPN, or the communication id, it identifies the request.
    pub ca_guid: u64,
    /// Q_Key, meaningless for connected services.
    pub qkey: u32,
    /// QP of the sender.
    pub qpn: Qpn,
    /// READs and atomics that the sender can answer at a time; bounds the receiver's initiator depth.
    pub responder_resources: u8,
    /// READs and atomics that the sender wants to have outstanding.
    pub initiator_depth: u8,
    /// Time within which the receiver should answer, 4.096 µs * 2^n.
    pub remote_response_timeout: u8,
    /// RC, UC or XRC.
    pub transport: Transport,
    /// Set when the sender implements end-to-end flow control.
    pub flow_control: bool,
    /// PSN with which the *receiver* of this message shall begin to send.
    pub starting_psn: Psn,
    /// Time within which the sender answers, 4.096 µs * 2^n.
    pub local_response_timeout: u8,
    /// Retries after a timeout, 0 to 7.
    pub retry_count: u8,
    /// Partition key.
    pub pkey: u16,
    /// Path MTU.
    pub path_mtu: PathMtu,
    /// Retries after receiver-not-ready, 0 to 6; 7 without limit.
    pub rnr_retry_count: u8,
    /// Number of times that the sender repeats this message, 0 to 15.
    pub max_cm_retries: u8,
    /// Set when the sender's QP uses a shared receive queue.
    pub srq: bool,
    /// GID of the sender.
    pub src_gid: Ipv6Addr,
    /// GID of the receiver.
    pub dst_gid: Ipv6Addr,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Packet rate code, 6 bits.
    pub packet_rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// ACK timeout of the receiver's QP towards the sender, 4.096 µs * 2^n.
    pub local_ack_timeout: u8,
    /// Private data; begins with [`IpAddressing`] if the service is named by an IP port.
    pub private_data: PrivateData<92>,
}

impl Req {
    fn parse(b: &[u8], options: u32) -> Result<Req, Malformed> {
        let transport = match ((b[43] >> 1) & 3, b[51] & 7) {
            (0, _) => Transport::Rc,
            (1, _) => Transport::Uc,
            (3, 1) => Transport::Xrc,
            (kind, extended) => {
                let value = u64::from(kind) << 8 | u64::from(extended);
                return Err(Malformed::Undefined {
                    what: "REQ transport service type",
                    value,
                });
            }
        };
        let path_mtu = PathMtu::from_code(b[50] >> 4).ok_or_else(|| Malformed::Undefined {
            what: "REQ path MTU",
            value: u64::from(b[50] >> 4),
        })?;
        Ok(Req {
            local_comm_id: be32(b, 0),
            ece: Ece::from_fields(be24(b, 5), options),
            service_id: ServiceId(be64(b, 8)),
            ca_guid: be64(b, 16),
            qkey: be32(b, 28),
            qpn: Qpn::new(be24(b, 32)),
            responder_resources: b[35],
            initiator_depth: b[39],
            remote_response_timeout: b[43] >> 3,
            transport,
            flow_control: b[43] & 1 != 0,
            starting_psn: Psn::new(be24(b, 44)),
            local_response_timeout: b[47] >> 3,
            retry_count: b[47] & 7,
            pkey: be16(b, 48),
            path_mtu,
            rnr_retry_count: b[50] & 7,
            max_cm_retries: b[51] >> 4,
            srq: b[51] & 8 != 0,
            src_gid: gid(b, 56),
            dst_gid: gid(b, 72),
            flow_label: be24(b, 88) >> 4,
            packet_rate: b[91] & 0x3f,
            traffic_class: b[92],
            hop_limit: b[93],
            service_level: b[94] >> 4,
            local_ack_timeout: b[95] >> 3,
            private_data: PrivateData::parse(b, 140),
        })
    }

    fn emit(&self, b: &mut [u8]) {
        let (transport, extended) = match self.transport {
            Transport::Rc => (0, 0),
            Transport::Uc => (1, 0),
            Transport::Xrc => (3, 1),
            Transport::Ud => panic!("REQ is for connected services"),
        };
        // A path of one hop stays in its subnet and would identify its ends by LIDs, which RoCE does not have. IBTA Vol 1, 12.7.11.
        let (lid, subnet_local) = if self.hop_limit > 1 {
            (LID_PERMISSIVE, 0)
        } else {
            (0, 8)
        };
        put(b, 0, &self.local_comm_id.to_be_bytes());
        put24(b, 5, self.ece.map_or(0, |e| e.vendor));
        put(b, 8, &self.service_id.0.to_be_bytes());
        put(b, 16, &self.ca_guid.to_be_bytes());
        put(b, 28, &self.qkey.to_be_bytes());
        put24(b, 32, self.qpn.value());
        b[35] = self.responder_resources;
        b[39] = self.initiator_depth;
        b[43] = self.remote_response_timeout << 3 | transport << 1 | u8::from(self.flow_control);
        put24(b, 44, self.starting_psn.value());
        b[47] = self.local_response_timeout << 3 | self.retry_count & 7;
        put(b, 48, &self.pkey.to_be_bytes());
        b[50] = self.path_mtu.code() << 4 | self.rnr_retry_count & 7;
        b[51] = self.max_cm_retries << 4 | u8::from(self.srq) << 3 | extended;
        put(b, 52, &lid.to_be_bytes());
        put(b, 54, &lid.to_be_bytes());
        put(b, 56, &self.src_gid.octets());
        put(b, 72, &self.dst_gid.octets());
        put24(b, 88, self.flow_label << 4);
        b[91] = self.packet_rate & 0x3f;
        b[92] = self.traffic_class;
        b[93] = self.hop_limit;
        b[94] = self.service_level << 4 | subnet_local;
        b[95] = self.local_ack_timeout << 3;
        put(b, 140, self.private_data.bytes());
    }
}

/// The message that an MRA or a REJ answers. IBTA Vol 1, 12.6.6 and 12.6.7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Answered {
    /// A REQ.
    Req = 0,
    /// A REP.
    Rep = 1,
    /// A LAP (in an MRA); no message in particular (in a REJ).
    Other = 2,
}

impl Answered {
    fn parse(bits: u8) -> Result<Answered, Malformed> {
        match bits {
            0 => Ok(Answered::Req),
            1 => Ok(Answered::Rep),
            2 => Ok(Answered::Other),
            _ => Err(Malformed::Undefined {
                what: "CM message answered",
                value: bits.into(),
            }),
        }
    }
}

/// Message receipt acknowledgement: the answer takes longer. IBTA Vol 1, 12.6.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mra {
    /// Communication id of the sender.
    pub local_comm_id: u32,
    /// Communication id of the receiver.
    pub remote_comm_id: u32,
    /// Message that was received.
    pub answered: Answered,
    /// Time until the answer, 4.096 µs * 2^n.
    pub service_timeout: u8,
    /// Private data.
    pub private_data: PrivateData<222>,
}

/// Reason of a rejection. IBTA Vol 1, 12.6.7.2.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RejReason(
    /// The code.
    pub u16,
);

/// Declares the reasons once: constant, code, text.
macro_rules! rej_reasons {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        impl RejReason {
            $(
                #[doc = concat!("The peer says: ", $text, ".")]
                pub const $name: RejReason = RejReason($code);
            )*

            const fn text(self) -> Option<(&'static str, &'static str)> {
                match self.0 {
                    $($code => Some((stringify!($name), $text)),)*
                    _ => None,
                }
            }
        }
    };
}

rej_reasons! {
    NO_QP = 1, "it has no queue pair left";
    NO_EEC = 2, "it has no end-to-end context left";
    NO_RESOURCES = 3, "it lacks resources for another connection";
    TIMEOUT = 4, "it waited too long for an answer";
    UNSUPPORTED = 5, "it does not support what was asked";
    INVALID_COMM_ID = 6, "it does not know this connection (communication id)";
    INVALID_COMM_INSTANCE = 7, "the communication ids do not belong to one connection";
    INVALID_SERVICE_ID = 8, "nothing listens on that port (service id)";
    INVALID_TRANSPORT = 9, "it does not offer this transport service";
    STALE_CONNECTION = 10, "it still has a connection with this queue pair; try again";
    RDC_NOT_EXIST = 11, "it has no reliable datagram channel";
    INVALID_GID = 12, "the address (GID) is not one of its own";
    INVALID_LID = 13, "the LID is not one of its own";
    INVALID_SL = 14, "it does not support the service level";
    INVALID_TRAFFIC_CLASS = 15, "it does not support the traffic class";
    INVALID_HOP_LIMIT = 16, "it does not support the hop limit";
    INVALID_PACKET_RATE = 17, "it does not support the packet rate";
    INVALID_ALT_GID = 18, "the alternate path's GID is not one of its own";
    INVALID_ALT_LID = 19, "the alternate path's LID is not one of its own";
    INVALID_ALT_SL = 20, "it does not support the alternate path's service level";
    INVALID_ALT_TRAFFIC_CLASS = 21, "it does not support the alternate path's traffic class";
    INVALID_ALT_HOP_LIMIT = 22, "it does not support the alternate path's hop limit";
    INVALID_ALT_PACKET_RATE = 23, "it does not support the alternate path's packet rate";
    PORT_AND_CM_REDIRECT = 24, "the service is at another port and connection manager";
    PORT_REDIRECT = 25, "the service is at another port";
    INVALID_PATH_MTU = 26, "it does not support the path MTU";
    INSUFFICIENT_RESOURCES = 27, "it has too few responder resources for the reads asked for";
    CONSUMER = 28, "the application refused the connection";
    INVALID_RNR_RETRY = 29, "it does not accept the receiver-not-ready retry count";
    DUPLICATE_COMM_ID = 30, "the communication id is already in use";
    INVALID_CLASS_VERSION = 31, "it does not support this version of connection management";
    INVALID_FLOW_LABEL = 32, "it does not support the flow label";
    INVALID_ALT_FLOW_LABEL = 33, "it does not support the alternate path's flow label";
    VENDOR_OPTION = 35, "it does not support the vendor options (ECE)";
}

impl fmt::Display for RejReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some((_, text)) => write!(f, "{text} (reason {})", self.0),
            None => write!(f, "connection refused, reason {}", self.0),
        }
    }
}

impl fmt::Debug for RejReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some((name, _)) => write!(f, "{name}"),
            None => write!(f, "RejReason({})", self.0),
        }
    }
}

/// Refusal. IBTA Vol 1, 12.6.7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rej {
    /// Communication id of the sender; 0 if it has assigned none.
    pub local_comm_id: u32,
    /// Communication id of the receiver; 0 if the sender does not know it.
    pub remote_comm_id: u32,
    /// Rejected message.
    pub answered: Answered,
    /// Reason of the rejection.
    pub reason: RejReason,
    /// Bytes of `ari` in use, 0 to 72.
    pub ari_len: u8,
    /// Additional reject information: values that the sender would accept instead.
    pub ari: [u8; 72],
    /// Private data.
    pub private_data: PrivateData<148>,
}

/// Reply: the connection is accepted. IBTA Vol 1, 12.6.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep {
    /// Communication id of the sender.
    pub local_comm_id: u32,
    /// Communication id of the receiver.
    pub remote_comm_id: u32,
    /// Vendor options.
    pub ece: Option<Ece>,
    /// Q_Key, meaningless for connected services.
    pub qkey: u32,
    /// QP of the sender.
    pub qpn: Qpn,
    /// End-to-end context; in XRC the QP that the receiver may target. 24 bits.
    pub eecn: u32,
    /// PSN with which the *receiver* of this message shall begin to send.
    pub starting_psn: Psn,
    /// READs and atomics that the sender can answer at a time.
    pub responder_resources: u8,
    /// READs and atomics that the sender wants to have outstanding.
    pub initiator_depth: u8,
    /// Time that the sender may take to acknowledge, 4.096 µs * 2^n.
    pub target_ack_delay: u8,
    /// Answer to an alternate path, 2 bits: 0 accepted, 1 not supported, 2 refused.
    pub failover: u8,
    /// Set when the sender implements end-to-end flow control.
    pub flow_control: bool,
    /// Retries after receiver-not-ready, 0 to 6; 7 without limit.
    pub rnr_retry_count: u8,
    /// Set when the sender's QP uses a shared receive queue.
    pub srq: bool,
    /// GUID of the sender's device.
    pub ca_guid: u64,
    /// Private data.
    pub private_data: PrivateData<196>,
}

/// Ready to use: the reply has arrived. IBTA Vol 1, 12.6.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rtu {
    /// Communication id of the sender.
    pub local_comm_id: u32,
    /// Communication id of the receiver.
    pub remote_comm_id: u32,
    /// Private data.
    pub private_data: PrivateData<224>,
}

/// Request to disconnect. IBTA Vol 1, 12.6.10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dreq {
    /// Communication id of the sender.
    pub local_comm_id: u32,
    /// Communication id of the receiver.
    pub remote_comm_id: u32,
    /// QP of the *receiver* of this message.
    pub remote_qpn: Qpn,
    /// Private data.
    pub private_data: PrivateData<220>,
}

/// Answer to a request to disconnect. IBTA Vol 1, 12.6.11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drep {
    /// Communication id of the sender.
    pub local_comm_id: u32,
    /// Communication id of the receiver.
    pub remote_comm_id: u32,
    /// Private data.
    pub private_data: PrivateData<224>,
}

/// Request for the QP of a datagram service. IBTA Vol 1, 12.11.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReq {
    /// Id of the request.
    pub request_id: u32,
    /// Partition key.
    pub pkey: u16,
    /// Requested service.
    pub service_id: ServiceId,
    /// Private data; begins with [`IpAddressing`] if the service is named by an IP port.
    pub private_data: PrivateData<216>,
}

/// Request to load an alternate path, which does not exist on RoCE: the fields of the path are written as zero and not read. IBTA Vol
/// 1, 12.8.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lap {
    /// Communication id of the sender.
    pub local_comm_id: u32,
    /// Communication id of the receiver.
    pub remote_comm_id: u32,
}

/// Outcome of the loading of an alternate path. IBTA Vol 1, 12.8.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AprStatus(
    /// The code.
    pub u8,
);

impl AprStatus {
    /// The communication id is unknown.
    pub const INVALID_COMM_ID: AprStatus = AprStatus(1);
    /// Alternate paths are not supported.
    pub const UNSUPPORTED: AprStatus = AprStatus(2);
}

/// Answer to a [`Lap`]. IBTA Vol 1, 12.8.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Apr {
    /// Communication id of the sender.
    pub local_comm_id: u32,
    /// Communication id of the receiver.
    pub remote_comm_id: u32,
    /// Outcome.
    pub status: AprStatus,
    /// Private data.
    pub private_data: PrivateData<148>,
}

/// Outcome of a service id resolution. IBTA Vol 1, 12.11.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SidrStatus(
    /// The code.
    pub u8,
);

impl SidrStatus {
    /// The QPN and Q_Key are valid.
    pub const VALID: SidrStatus = SidrStatus(0);
    /// No such service.
    pub const UNSUPPORTED: SidrStatus = SidrStatus(1);
    /// The application refused.
    pub const REJECT: SidrStatus = SidrStatus(2);
    /// No QP is available.
    pub const NO_QP: SidrStatus = SidrStatus(3);
    /// The service is elsewhere.
    pub const REDIRECT: SidrStatus = SidrStatus(4);
    /// The class version is not supported.
    pub const UNSUPPORTED_VERSION: SidrStatus = SidrStatus(5);
}

impl fmt::Display for SidrStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match *self {
            SidrStatus::VALID => "it is served",
            SidrStatus::UNSUPPORTED => "no such service",
            SidrStatus::REJECT => "its program refused",
            SidrStatus::NO_QP => "no queue pair is available",
            SidrStatus::REDIRECT => "the service is elsewhere",
            SidrStatus::UNSUPPORTED_VERSION => "another version of the message is wanted",
            SidrStatus(_) => "resolution refused",
        };
        write!(f, "{text} (status {})", self.0)
    }
}

/// Answer to a [`SidrReq`]. IBTA Vol 1, 12.11.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRep {
    /// Id of the answered request.
    pub request_id: u32,
    /// Outcome.
    pub status: SidrStatus,
    /// QP that serves the datagrams.
    pub qpn: Qpn,
    /// Requested service.
    pub service_id: ServiceId,
    /// Q_Key of the QP.
    pub qkey: u32,
    /// Private data.
    pub private_data: PrivateData<136>,
}

/// A message of connection management. IBTA Vol 1, 12.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is documented at its type")]
pub enum Message {
    Req(Req),
    Mra(Mra),
    Rej(Rej),
    Rep(Rep),
    Rtu(Rtu),
    Dreq(Dreq),
    Drep(Drep),
    SidrReq(SidrReq),
    SidrRep(SidrRep),
    Lap(Lap),
    Apr(Apr),
}

impl Message {
    /// Reads a MAD: returns its transaction id and the message. Ignores bytes after the 256th.
    pub fn parse(mad: &[u8]) -> Result<(u64, Message), Malformed> {
        need("MAD", mad, MAD_LEN)?;
        for (what, value, expected) in [
            ("MAD base version", mad[0], BASE_VERSION),
            ("MAD management class", mad[1], CLASS),
            ("MAD class version", mad[2], CLASS_VERSION),
            ("MAD method", mad[3], METHOD_SEND),
        ] {
            if value != expected {
                return Err(Malformed::Undefined {
                    what,
                    value: value.into(),
                });
            }
        }
        let options = be32(mad, 20);
        let b = &mad[HEADER_LEN..MAD_LEN];
        let (local_comm_id, remote_comm_id) = (be32(b, 0), be32(b, 4));
        let message = match be16(mad, 16) {
            attribute::REQ => Message::Req(Req::parse(b, options)?),
            attribute::MRA => Message::Mra(Mra {
                local_comm_id,
                remote_comm_id,
                answered: Answered::parse(b[8] >> 6)?,
                service_timeout: b[9] >> 3,
                private_data: PrivateData::parse(b, 10),
            }),
            attribute::REJ => {
                let mut ari = [0; 72];
                ari.copy_from_slice(&b[12..84]);
                Message::Rej(Rej {
                    local_comm_id,
                    remote_comm_id,
                    answered: Answered::parse(b[8] >> 6)?,
                    reason: RejReason(be16(b, 10)),
                    ari_len: (b[9] >> 1).min(72),
                    ari,
                    private_data: PrivateData::parse(b, 84),
                })
            }
            attribute::REP => Message::Rep(Rep {
                local_comm_id,
                remote_comm_id,
                ece: Ece::from_fields(u32::from_be_bytes([0, b[23], b[19], b[15]]), options),
                qkey: be32(b, 8),
                qpn: Qpn::new(be24(b, 12)),
                eecn: be24(b, 16),
                starting_psn: Psn::new(be24(b, 20)),
                responder_resources: b[24],
                initiator_depth: b[25],
                target_ack_delay: b[26] >> 3,
                failover: (b[26] >> 1) & 3,
                flow_control: b[26] & 1 != 0,
                rnr_retry_count: b[27] >> 5,
                srq: b[27] & 0x10 != 0,
                ca_guid: be64(b, 28),
                private_data: PrivateData::parse(b, 36),
            }),
            attribute::RTU => Message::Rtu(Rtu {
                local_comm_id,
                remote_comm_id,
                private_data: PrivateData::parse(b, 8),
            }),
            attribute::DREQ => Message::Dreq(Dreq {
                local_comm_id,
                remote_comm_id,
                remote_qpn: Qpn::new(be24(b, 8)),
                private_data: PrivateData::parse(b, 12),
            }),
            attribute::DREP => Message::Drep(Drep {
                local_comm_id,
                remote_comm_id,
                private_data: PrivateData::parse(b, 8),
            }),
            attribute::SIDR_REQ => Message::SidrReq(SidrReq {
                request_id: local_comm_id,
                pkey: be16(b, 4),
                service_id: ServiceId(be64(b, 8)),
                private_data: PrivateData::parse(b, 16),
            }),
            attribute::SIDR_REP => Message::SidrRep(SidrRep {
                request_id: local_comm_id,
                status: SidrStatus(b[4]),
                qpn: Qpn::new(be24(b, 8)),
                service_id: ServiceId(be64(b, 12)),
                qkey: be32(b, 20),
                private_data: PrivateData::parse(b, 96),
            }),
            attribute::LAP => Message::Lap(Lap {
                local_comm_id,
                remote_comm_id,
            }),
            attribute::APR => Message::Apr(Apr {
                local_comm_id,
                remote_comm_id,
                status: AprStatus(b[9]),
                private_data: PrivateData::parse(b, 84),
            }),
            other => {
                return Err(Malformed::Undefined {
                    what: "CM attribute",
                    value: other.into(),
                });
            }
        };
        Ok((be64(mad, 8), message))
    }

    /// Writes the whole MAD. Fields narrower than their type are cut to their bits.
    ///
    /// # Panics
    ///
    /// For a REQ whose transport is UD.
    pub fn emit(&self, tid: u64, mad: &mut [u8; MAD_LEN]) {
        mad.fill(0);
        put(mad, 0, &[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        put(mad, 8, &tid.to_be_bytes());
        put(mad, 16, &self.attribute().to_be_bytes());
        if let Message::Req(Req { ece: Some(ece), .. }) | Message::Rep(Rep { ece: Some(ece), .. }) = self {
            put(mad, 20, &ece.options.to_be_bytes());
        }
        let b = &mut mad[HEADER_LEN..];
        let ids = |b: &mut [u8], local: u32, remote: u32| {
            put(b, 0, &local.to_be_bytes());
            put(b, 4, &remote.to_be_bytes());
        };
        match self {
            Message::Req(m) => m.emit(b),
            Message::Mra(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                b[8] = (m.answered as u8) << 6;
                b[9] = m.service_timeout << 3;
                put(b, 10, m.private_data.bytes());
            }
            Message::Rej(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                b[8] = (m.answered as u8) << 6;
                b[9] = m.ari_len.min(72) << 1;
                put(b, 10, &m.reason.0.to_be_bytes());
                put(b, 12, &m.ari);
                put(b, 84, m.private_data.bytes());
            }
            Message::Rep(m) => {
                let [_, high, middle, low] = m.ece.map_or(0, |e| e.vendor).to_be_bytes();
                ids(b, m.local_comm_id, m.remote_comm_id);
                put(b, 8, &m.qkey.to_be_bytes());
                put24(b, 12, m.qpn.value());
                b[15] = low;
                put24(b, 16, m.eecn);
                b[19] = middle;
                put24(b, 20, m.starting_psn.value());
                b[23] = high;
                b[24] = m.responder_resources;
                b[25] = m.initiator_depth;
                b[26] = m.target_ack_delay << 3 | (m.failover & 3) << 1 | u8::from(m.flow_control);
                b[27] = m.rnr_retry_count << 5 | u8::from(m.srq) << 4;
                put(b, 28, &m.ca_guid.to_be_bytes());
                put(b, 36, m.private_data.bytes());
            }
            Message::Rtu(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                put(b, 8, m.private_data.bytes());
            }
            Message::Dreq(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                put24(b, 8, m.remote_qpn.value());
                put(b, 12, m.private_data.bytes());
            }
            Message::Drep(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                put(b, 8, m.private_data.bytes());
            }
            Message::SidrReq(m) => {
                put(b, 0, &m.request_id.to_be_bytes());
                put(b, 4, &m.pkey.to_be_bytes());
                put(b, 8, &m.service_id.0.to_be_bytes());
                put(b, 16, m.private_data.bytes());
            }
            Message::SidrRep(m) => {
                put(b, 0, &m.request_id.to_be_bytes());
                b[4] = m.status.0;
                put24(b, 8, m.qpn.value());
                put(b, 12, &m.service_id.0.to_be_bytes());
                put(b, 20, &m.qkey.to_be_bytes());
                put(b, 96, m.private_data.bytes());
            }
            Message::Lap(m) => ids(b, m.local_comm_id, m.remote_comm_id),
            Message::Apr(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                b[9] = m.status.0;
                put(b, 84, m.private_data.bytes());
            }
        }
    }

    /// Returns the attribute id of the message.
    pub const fn attribute(&self) -> u16 {
        match self {
            Message::Req(_) => attribute::REQ,
            Message::Mra(_) => attribute::MRA,
            Message::Rej(_) => attribute::REJ,
            Message::Rep(_) => attribute::REP,
            Message::Rtu(_) => attribute::RTU,
            Message::Dreq(_) => attribute::DREQ,
            Message::Drep(_) => attribute::DREP,
            Message::SidrReq(_) => attribute::SIDR_REQ,
            Message::SidrRep(_) => attribute::SIDR_REP,
            Message::Lap(_) => attribute::LAP,
            Message::Apr(_) => attribute::APR,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn req() -> Req {
        let mut private = [0; IpAddressing::LEN + 3];
        addressing().emit(&mut private);
        private[IpAddressing::LEN..].copy_from_slice(b"abc");
        Req {
            local_comm_id: 0x0102_0304,
            ece: Some(Ece {
                vendor: 0xa1_b2c3,
                options: 0xd4e5_f607,
            }),
            service_id: ServiceId::tcp(7174),
            ca_guid: 0x1122_3344_5566_7788,
            qkey: 0x0bad_cafe,
            qpn: Qpn::new(0x45_6789),
            responder_resources: 16,
            initiator_depth: 17,
            remote_response_timeout: 20,
            transport: Transport::Rc,
            flow_control: true,
            starting_psn: Psn::new(0xfe_dcba),
            local_response_timeout: 21,
            retry_count: 7,
            pkey: 0xffff,
            path_mtu: PathMtu::Bytes4096,
            rnr_retry_count: 6,
            max_cm_retries: 15,
            srq: true,
            src_gid: to_gid([10, 9, 0, 1].into()),
            dst_gid: to_gid([10, 9, 0, 2].into()),
            flow_label: 0xa_bcde,
            packet_rate: 0x3f,
            traffic_class: 0x5a,
            hop_limit: 64,
            service_level: 9,
            local_ack_timeout: 17,
            private_data: PrivateData::new(&private).unwrap(),
        }
    }

    fn addressing() -> IpAddressing {
        IpAddressing {
            src_port: 0x8001,
            src: [10, 9, 0, 1].into(),
            dst: [10, 9, 0, 2].into(),
        }
    }

    fn private<const N: usize>() -> PrivateData<N> {
        let bytes: Vec<u8> = (1..=N).map(|i| i as u8).collect();
        PrivateData::new(&bytes).unwrap()
    }

    /// Returns one message of each kind, in which no two fields have the same value.
    fn each() -> Vec<Message> {
        let (local_comm_id, remote_comm_id) = (0x0102_0304, 0x0506_0708);
        vec![
            Message::Req(req()),
            Message::Req(Req {
                transport: Transport::Uc,
                ece: None,
                ..req()
            }),
            Message::Req(Req {
                transport: Transport::Xrc,
                hop_limit: 1,
                ..req()
            }),
            Message::Mra(Mra {
                local_comm_id,
                remote_comm_id,
                answered: Answered::Rep,
                service_timeout: 19,
                private_data: private(),
            }),
            Message::Rej(Rej {
                local_comm_id,
                remote_comm_id,
                answered: Answered::Other,
                reason: RejReason::CONSUMER,
                ari_len: 72,
                ari: *private::<72>().bytes(),
                private_data: private(),
            }),
            Message::Rep(Rep {
                local_comm_id,
                remote_comm_id,
                ece: Some(
                    Extensions {
                        version: 1,
                        receive_window_log2: 17,
                        selective: true,
                    }
                    .to_ece(),
                ),
                qkey: 0x0bad_cafe,
                qpn: Qpn::new(0x45_6789),
                eecn: 0x11_2233,
                starting_psn: Psn::new(0xfe_dcba),
                responder_resources: 16,
                initiator_depth: 17,
                target_ack_delay: 15,
                failover: 1,
                flow_control: true,
                rnr_retry_count: 7,
                srq: true,
                ca_guid: 0x1122_3344_5566_7788,
                private_data: private(),
            }),
            Message::Rtu(Rtu {
                local_comm_id,
                remote_comm_id,
                private_data: private(),
            }),
            Message::Dreq(Dreq {
                local_comm_id,
                remote_comm_id,
                remote_qpn: Qpn::new(0x45_6789),
                private_data: private(),
            }),
            Message::Drep(Drep {
                local_comm_id,
                remote_comm_id,
                private_data: private(),
            }),
            Message::SidrReq(SidrReq {
                request_id: local_comm_id,
                pkey: 0x8001,
                service_id: ServiceId::udp(9),
                private_data: private(),
            }),
            Message::SidrRep(SidrRep {
                request_id: local_comm_id,
                status: SidrStatus::REJECT,
                qpn: Qpn::new(0x45_6789),
                service_id: ServiceId::udp(9),
                qkey: 0x0123_4567,
                private_data: private(),
            }),
            Message::Lap(Lap {
                local_comm_id,
                remote_comm_id,
            }),
            Message::Apr(Apr {
                local_comm_id,
                remote_comm_id,
                status: AprStatus::UNSUPPORTED,
                private_data: private(),
            }),
        ]
    }

    fn emit(message: &Message) -> [u8; MAD_LEN] {
        let mut mad = [0xee; MAD_LEN];
        message.emit(0x1020_3040_5060_7080, &mut mad);
        mad
    }

    #[test]
    fn parse__inverts_emit() {
        for message in each() {
            assert_eq!(
                Message::parse(&emit(&message)),
                Ok((0x1020_3040_5060_7080, message))
            );
        }
    }

    #[test]
    fn emit__req_byte_by_byte() {
        let mad = emit(&Message::Req(req()));
        let at = |offset: usize, bytes: &[u8]| {
            assert_eq!(mad[offset..offset + bytes.len()], *bytes, "offset {offset}")
        };
        at(
            0,
            &[
                1, 7, 2, 3, 0, 0, 0, 0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80,
            ],
        );
        at(16, &[0x00, 0x10, 0, 0, 0xd4, 0xe5, 0xf6, 0x07]);
        at(
            24,
            &[
                1, 2, 3, 4, 0, 0xa1, 0xb2, 0xc3, 0, 0, 0, 0, 0x01, 0x06, 0x1c, 0x06,
            ],
        );
        at(
            40,
            &[
                0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0, 0, 0, 0, 0x0b, 0xad, 0xca, 0xfe,
            ],
        );
        at(56, &[0x45, 0x67, 0x89, 16, 0, 0, 0, 17, 0, 0, 0, 20 << 3 | 1]);
        at(
            68,
            &[
                0xfe,
                0xdc,
                0xba,
                21 << 3 | 7,
                0xff,
                0xff,
                5 << 4 | 6,
                15 << 4 | 8,
                0xff,
                0xff,
                0xff,
                0xff,
            ],
        );
        at(80, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1]);
        at(96, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 2]);
        at(112, &[0xab, 0xcd, 0xe0, 0x3f, 0x5a, 64, 9 << 4, 17 << 3]);
        at(120, &[0; 44]);
        at(164, &[0, 0x40, 0x80, 0x01]);
        at(180, &[10, 9, 0, 1]);
        at(196, &[10, 9, 0, 2, b'a', b'b', b'c', 0]);
    }

    #[test]
    fn emit__rep_spreads_the_vendor() {
        let ece = Some(Ece {
            vendor: 0xa1_b2c3,
            options: 5,
        });
        let Some(Message::Rep(rep)) = each().into_iter().find(|m| matches!(m, Message::Rep(_))) else {
            panic!()
        };
        let mad = emit(&Message::Rep(Rep { ece, ..rep }));
        assert_eq!((mad[24 + 15], mad[24 + 19], mad[24 + 23]), (0xc3, 0xb2, 0xa1));
        assert_eq!(mad[20..24], [0, 0, 0, 5]);
        let (_, Message::Rep(parsed)) = Message::parse(&mad).unwrap() else {
            panic!()
        };
        assert_eq!((parsed.ece, parsed.eecn), (ece, rep.eecn));
    }

    #[test]
    fn emit__req_of_one_hop_stays_in_its_subnet() {
        let mad = emit(&Message::Req(Req {
            hop_limit: 1,
            ..req()
        }));
        assert_eq!((be32(&mad, 24 + 52), mad[24 + 94] & 8), (0, 8));
    }

    #[test]
    fn parse__too_short() {
        for message in each() {
            let mad = emit(&message);
            for len in 0..MAD_LEN {
                assert!(matches!(
                    Message::parse(&mad[..len]),
                    Err(Malformed::Truncated { .. })
                ));
                assert_eq!(destination(&mad[..len]), None);
            }
        }
    }

    #[test]
    fn parse__values_not_defined() {
        let broken = |message: &Message, at: usize, value: u8| {
            let mut mad = emit(message);
            mad[at] = value;
            let error = Message::parse(&mad).unwrap_err();
            assert!(matches!(error, Malformed::Undefined { .. }), "{error}");
        };
        let req = Message::Req(req());
        for (at, value) in [(0, 2), (1, 4), (2, 1), (3, 0x81), (17, 0x0f), (17, 0x1b), (16, 1)] {
            broken(&req, at, value);
        }
        broken(&req, 24 + 43, 2 << 1); // transport: reliable datagram
        broken(&req, 24 + 43, 3 << 1); // extended transport of no kind
        broken(&req, 24 + 50, 0); // path MTU
        broken(&req, 24 + 50, 6 << 4);
        for message in each() {
            if matches!(message, Message::Mra(_) | Message::Rej(_)) {
                broken(&message, 24 + 8, 3 << 6);
            }
        }
    }

    #[test]
    fn parse__rej_claims_more_information_than_fits() {
        let Some(rej) = each().into_iter().find(|m| matches!(m, Message::Rej(_))) else {
            panic!()
        };
        let mut mad = emit(&rej);
        mad[24 + 9] = 0xff;
        let (_, Message::Rej(parsed)) = Message::parse(&mad).unwrap() else {
            panic!()
        };
        assert_eq!(parsed.ari_len, 72);
    }

    #[test]
    fn destination__by_message() {
        for message in each() {
            let expected = match &message {
                Message::Req(_) => Destination::Service(ServiceId::tcp(7174)),
                Message::SidrReq(_) => Destination::Service(ServiceId::udp(9)),
                Message::SidrRep(m) => Destination::CommId(m.request_id),
                _ => Destination::CommId(0x0506_0708),
            };
            assert_eq!(destination(&emit(&message)), Some(expected), "{message:?}");
        }
        for message in each() {
            let mut mad = emit(&message);
            mad[HEADER_LEN + 4..][..4].fill(0);
            let is_rej = matches!(message, Message::Rej(_));
            assert_eq!(destination(&mad) == Some(Destination::Everyone), is_rej);
        }
        let mut lap = emit(&each()[6]);
        lap[17] = 0x19;
        assert_eq!(destination(&lap), Some(Destination::CommId(0x0506_0708)));
        lap[17] = 0x1b;
        assert_eq!(destination(&lap), None);
        lap[1] = 4;
        assert_eq!(destination(&lap), None);
    }

    #[test]
    fn service_id__ports() {
        assert_eq!(ServiceId::tcp(7174).0, 0x0106_1c06);
        assert_eq!(ServiceId::udp(7174).0, 0x0111_1c06);
        assert_eq!(ServiceId::tcp(7174).port(), Some(7174));
        assert_eq!(ServiceId(0x1_0106_1c06).port(), None);
    }

    #[test]
    fn ip_addressing__both_families() {
        let v6 = IpAddressing {
            src_port: 1,
            src: "fd00::1".parse().unwrap(),
            dst: "fd00::2".parse().unwrap(),
        };
        for addressing in [addressing(), v6] {
            let mut bytes = [0xee; 40];
            addressing.emit(&mut bytes);
            assert_eq!(IpAddressing::parse(&bytes), Ok(addressing));
            assert_eq!(bytes[36..], [0xee; 4]);
            assert!(IpAddressing::parse(&bytes[..35]).is_err());
            for (at, value) in [(0, 1), (1, 5 << 4)] {
                let mut bad = bytes;
                bad[at] = value;
                assert!(IpAddressing::parse(&bad).is_err());
            }
        }
    }

    #[test]
    fn extensions__fields_and_foreign_vendors() {
        let ours = Extensions {
            version: 1,
            receive_window_log2: 17,
            selective: false,
        };
        assert_eq!(
            ours.to_ece(),
            Ece {
                vendor: 0x52_444d,
                options: 0x1000_0011
            }
        );
        assert_eq!(
            Extensions::from_ece(Ece {
                vendor: 0x52_444d,
                options: 0x1fff_ffd1
            }),
            Some(ours)
        );
        let selective = Extensions {
            selective: true,
            ..ours
        };
        assert_eq!(selective.to_ece().options, 0x1000_0031);
        assert_eq!(Extensions::from_ece(selective.to_ece()), Some(selective));
        assert_eq!(
            Extensions::from_ece(Ece {
                vendor: 0x15b3,
                options: 0x1000_0011
            }),
            None
        );
        assert_eq!(
            Extensions::from_ece(Ece {
                vendor: 0x52_444d,
                options: 0x11
            }),
            None
        );
    }

    #[test]
    fn private_data__limits() {
        assert!(PrivateData::<4>::new(b"abcde").is_none());
        let data = PrivateData::<4>::new(b"ab").unwrap();
        assert_eq!(
            (data.bytes(), format!("{data:?}").as_str()),
            (b"ab\0\0", "6162(2 of 4)")
        );
    }

    #[test]
    fn rej_reason__text() {
        assert_eq!(
            RejReason(8).to_string(),
            "nothing listens on that port (service id) (reason 8)"
        );
        assert_eq!(RejReason(34).to_string(), "connection refused, reason 34");
        assert_eq!(format!("{:?}", RejReason(10)), "STALE_CONNECTION");
    }
}
