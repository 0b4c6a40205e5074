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

mod connection;
mod fields;
mod sidr;
#[cfg(test)]
mod tests;

use crate::bytes::{be16, be24, be32, be64, need, put, put24};
use crate::{Malformed, Psn, Qpn};

pub use self::connection::*;
pub use self::fields::*;
pub use self::sidr::*;

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

/// A message of connection management. IBTA Vol 1, 12.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each variant is documented at its type")]
pub enum CmMessage {
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

impl CmMessage {
    /// Reads a MAD: returns its transaction id and the message. Ignores bytes after the 256th.
    pub fn parse(mad: &[u8]) -> Result<(u64, CmMessage), Malformed> {
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
            attribute::REQ => CmMessage::Req(Req::parse(b, options)?),
            attribute::MRA => CmMessage::Mra(Mra {
                local_comm_id,
                remote_comm_id,
                answered: Answered::parse(b[8] >> 6)?,
                service_timeout: b[9] >> 3,
                private_data: PrivateData::parse(b, 10),
            }),
            attribute::REJ => {
                let mut ari = [0; 72];
                ari.copy_from_slice(&b[12..84]);
                CmMessage::Rej(Rej {
                    local_comm_id,
                    remote_comm_id,
                    answered: Answered::parse(b[8] >> 6)?,
                    reason: RejReason(be16(b, 10)),
                    ari_len: (b[9] >> 1).min(72),
                    ari,
                    private_data: PrivateData::parse(b, 84),
                })
            }
            attribute::REP => CmMessage::Rep(Rep {
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
            attribute::RTU => CmMessage::Rtu(Rtu {
                local_comm_id,
                remote_comm_id,
                private_data: PrivateData::parse(b, 8),
            }),
            attribute::DREQ => CmMessage::Dreq(Dreq {
                local_comm_id,
                remote_comm_id,
                remote_qpn: Qpn::new(be24(b, 8)),
                private_data: PrivateData::parse(b, 12),
            }),
            attribute::DREP => CmMessage::Drep(Drep {
                local_comm_id,
                remote_comm_id,
                private_data: PrivateData::parse(b, 8),
            }),
            attribute::SIDR_REQ => CmMessage::SidrReq(SidrReq {
                request_id: local_comm_id,
                pkey: be16(b, 4),
                service_id: ServiceId(be64(b, 8)),
                private_data: PrivateData::parse(b, 16),
            }),
            attribute::SIDR_REP => CmMessage::SidrRep(SidrRep {
                request_id: local_comm_id,
                status: SidrStatus(b[4]),
                qpn: Qpn::new(be24(b, 8)),
                service_id: ServiceId(be64(b, 12)),
                qkey: be32(b, 20),
                private_data: PrivateData::parse(b, 96),
            }),
            attribute::LAP => CmMessage::Lap(Lap {
                local_comm_id,
                remote_comm_id,
            }),
            attribute::APR => CmMessage::Apr(Apr {
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
        if let CmMessage::Req(Req { ece: Some(ece), .. }) | CmMessage::Rep(Rep { ece: Some(ece), .. }) = self
        {
            put(mad, 20, &ece.options.to_be_bytes());
        }
        let b = &mut mad[HEADER_LEN..];
        let ids = |b: &mut [u8], local: u32, remote: u32| {
            put(b, 0, &local.to_be_bytes());
            put(b, 4, &remote.to_be_bytes());
        };
        match self {
            CmMessage::Req(m) => m.emit(b),
            CmMessage::Mra(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                b[8] = (m.answered as u8) << 6;
                b[9] = m.service_timeout << 3;
                put(b, 10, m.private_data.bytes());
            }
            CmMessage::Rej(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                b[8] = (m.answered as u8) << 6;
                b[9] = m.ari_len.min(72) << 1;
                put(b, 10, &m.reason.0.to_be_bytes());
                put(b, 12, &m.ari);
                put(b, 84, m.private_data.bytes());
            }
            CmMessage::Rep(m) => {
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
            CmMessage::Rtu(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                put(b, 8, m.private_data.bytes());
            }
            CmMessage::Dreq(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                put24(b, 8, m.remote_qpn.value());
                put(b, 12, m.private_data.bytes());
            }
            CmMessage::Drep(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                put(b, 8, m.private_data.bytes());
            }
            CmMessage::SidrReq(m) => {
                put(b, 0, &m.request_id.to_be_bytes());
                put(b, 4, &m.pkey.to_be_bytes());
                put(b, 8, &m.service_id.0.to_be_bytes());
                put(b, 16, m.private_data.bytes());
            }
            CmMessage::SidrRep(m) => {
                put(b, 0, &m.request_id.to_be_bytes());
                b[4] = m.status.0;
                put24(b, 8, m.qpn.value());
                put(b, 12, &m.service_id.0.to_be_bytes());
                put(b, 20, &m.qkey.to_be_bytes());
                put(b, 96, m.private_data.bytes());
            }
            CmMessage::Lap(m) => ids(b, m.local_comm_id, m.remote_comm_id),
            CmMessage::Apr(m) => {
                ids(b, m.local_comm_id, m.remote_comm_id);
                b[9] = m.status.0;
                put(b, 84, m.private_data.bytes());
            }
        }
    }

    /// Returns the attribute id of the message.
    pub const fn attribute(&self) -> u16 {
        match self {
            CmMessage::Req(_) => attribute::REQ,
            CmMessage::Mra(_) => attribute::MRA,
            CmMessage::Rej(_) => attribute::REJ,
            CmMessage::Rep(_) => attribute::REP,
            CmMessage::Rtu(_) => attribute::RTU,
            CmMessage::Dreq(_) => attribute::DREQ,
            CmMessage::Drep(_) => attribute::DREP,
            CmMessage::SidrReq(_) => attribute::SIDR_REQ,
            CmMessage::SidrRep(_) => attribute::SIDR_REP,
            CmMessage::Lap(_) => attribute::LAP,
            CmMessage::Apr(_) => attribute::APR,
        }
    }
}
