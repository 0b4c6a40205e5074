//! Messages that open, move and end a connection.

use std::fmt;
use std::net::Ipv6Addr;

use crate::bytes::{be16, be24, be32, be64, put, put24};
use crate::roce::{PathMtu, Transport};
use crate::{Malformed, Psn, Qpn};

use super::LID_PERMISSIVE;
use super::fields::{Ece, PrivateData, ServiceId, gid};

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
    /// Private data; begins with [`IpAddressing`](super::IpAddressing) if the service is named by an IP port.
    pub private_data: PrivateData<92>,
}

impl Req {
    pub(super) fn parse(b: &[u8], options: u32) -> Result<Req, Malformed> {
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

    pub(super) fn emit(&self, b: &mut [u8]) {
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
    pub(super) fn parse(bits: u8) -> Result<Answered, Malformed> {
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
