//! What an engine tells of its queue pairs to a process of its user that asks.
//!
//! The answer to [`Message::List`](super::message::Message::List) is one page: the first queue pairs behind the one named there, in
//! the order of their numbers. Who wants more asks again. So the engine keeps nothing for who asks, and what one question
//! costs is bounded.

use std::net::{IpAddr, Ipv6Addr};

use rdmux_rnic::{QpState, QpType, Qpn};

use super::message::{PAGE, VERSION};
use super::why::{NotDirect, Why};

/// Queue pairs of a page at most.
pub(super) const QPS_MAX: usize = 256;
/// Longer than any page, so that a longer one shows.
pub(in crate::soft) const PAGE_BYTES_MAX: usize = HEADER_BYTES + QPS_MAX * RECORD_BYTES + 1;

const HEADER_BYTES: usize = 16;
const RECORD_BYTES: usize = 45;

/// A page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::soft) struct Page {
    /// Queue pairs, memory regions and completion queues that the device has.
    pub(in crate::soft) counts: [u32; 3],
    /// There are more queue pairs behind these.
    pub(in crate::soft) more: bool,
    pub(in crate::soft) qps: Vec<QpReport>,
}

/// What is told of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct QpReport {
    pub(in crate::soft) qpn: Qpn,
    pub(in crate::soft) qp_type: QpType,
    pub(in crate::soft) state: QpState,
    /// Once it has one: its address and the number of its queue pair.
    pub(in crate::soft) peer: Option<(IpAddr, Qpn)>,
    /// Bytes.
    pub(in crate::soft) path_mtu: u32,
    pub(in crate::soft) carrier: Carried,
    /// Regions of the peer that are mapped.
    pub(in crate::soft) mapped: u16,
    /// Regions of the peer that are reached by calls into its process.
    pub(in crate::soft) by_calls: u16,
    /// The last reason why one was not reached.
    pub(in crate::soft) not_direct: Option<NotDirect>,
}

/// What carries packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Carried {
    /// There is no one peer.
    Nowhere,
    Shared,
    Udp(Why),
}

const TYPES: [QpType; 5] = [
    QpType::Rc,
    QpType::Uc,
    QpType::Ud,
    QpType::XrcSend,
    QpType::XrcRecv,
];
const STATES: [QpState; 7] = [
    QpState::Reset,
    QpState::Init,
    QpState::Rtr,
    QpState::Rts,
    QpState::Sqd,
    QpState::Sqe,
    QpState::Error,
];
const SHARED: u8 = 0;
const NOWHERE: u8 = 255;

impl Page {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEADER_BYTES + self.qps.len() * RECORD_BYTES);
        out.push(PAGE);
        out.extend(VERSION.to_ne_bytes());
        out.push(u8::from(self.more));
        out.extend(self.counts.iter().flat_map(|count| count.to_ne_bytes()));
        for qp in &self.qps {
            qp.emit(&mut out);
        }
        out
    }

    /// `None` for what no encoder makes.
    pub(in crate::soft) fn decode(packet: &[u8]) -> Option<Page> {
        let (header, rest) = packet.split_first_chunk::<HEADER_BYTES>()?;
        let [PAGE, low, high, more, counts @ ..] = header else {
            return None;
        };
        let (records, odd) = rest.as_chunks::<RECORD_BYTES>();
        let known = u16::from_ne_bytes([*low, *high]) == VERSION && *more <= 1;
        if !known || !odd.is_empty() || records.len() > QPS_MAX {
            return None;
        }
        let count = |i: usize| counts.as_chunks().0.get(i).map_or(0, |n| u32::from_ne_bytes(*n));
        let qps: Vec<QpReport> = records.iter().map(QpReport::parse).collect::<Option<_>>()?;
        let in_order = qps.is_sorted_by(|a, b| a.qpn.value() < b.qpn.value());
        in_order.then_some(Page {
            counts: [0, 1, 2].map(count),
            more: *more == 1,
            qps,
        })
    }
}

impl QpReport {
    fn emit(&self, out: &mut Vec<u8>) {
        let place = |found: Option<usize>| found.map_or(u8::MAX, |i| i as u8);
        let (family, octets, peer_qpn) = match self.peer {
            None => (0, [0; 16], 0),
            Some((IpAddr::V4(v4), qpn)) => (4, v4.to_ipv6_mapped().octets(), qpn.value()),
            Some((IpAddr::V6(v6), qpn)) => (6, v6.octets(), qpn.value()),
        };
        let carrier = match self.carrier {
            Carried::Shared => (SHARED, 0),
            Carried::Nowhere => (NOWHERE, 0),
            Carried::Udp(why) => why.to_code(),
        };
        let not_direct = self.not_direct.map_or((0, 0), NotDirect::to_code);
        out.extend(self.qpn.value().to_ne_bytes());
        out.extend(peer_qpn.to_ne_bytes());
        out.extend([
            place(TYPES.iter().position(|known| *known == self.qp_type)),
            place(STATES.iter().position(|known| *known == self.state)),
            family,
        ]);
        out.extend(octets);
        out.extend(self.path_mtu.to_ne_bytes());
        out.extend(self.mapped.to_ne_bytes());
        out.extend(self.by_calls.to_ne_bytes());
        for (kind, value) in [carrier, not_direct] {
            out.push(kind);
            out.extend(value.to_ne_bytes());
        }
    }

    fn parse(record: &[u8; RECORD_BYTES]) -> Option<QpReport> {
        let word = |at: usize| {
            record
                .get(at..)
                .and_then(<[u8]>::first_chunk)
                .map_or(0, |n| u32::from_ne_bytes(*n))
        };
        let half = |at: usize| u16::from_ne_bytes([record[at], record[at + 1]]);
        let qpn = |at| Some(word(at)).filter(|n| *n < 1 << 24).map(Qpn::new);
        let octets = record.get(11..).and_then(<[u8]>::first_chunk::<16>);
        let octets = Ipv6Addr::from(*octets?);
        let peer = match record[10] {
            0 => None,
            4 => Some((octets.to_ipv4_mapped()?.into(), qpn(4)?)),
            6 => Some((octets.into(), qpn(4)?)),
            _ => return None,
        };
        let carrier = match (record[35], word(36)) {
            (SHARED, _) => Carried::Shared,
            (NOWHERE, _) => Carried::Nowhere,
            code => Carried::Udp(Why::from_code(code)?),
        };
        let not_direct = match (record[40], word(41)) {
            (0, _) => None,
            code => Some(NotDirect::from_code(code)?),
        };
        Some(QpReport {
            qpn: qpn(0)?,
            qp_type: *TYPES.get(usize::from(record[8]))?,
            state: *STATES.get(usize::from(record[9]))?,
            peer,
            path_mtu: word(27),
            carrier,
            mapped: half(31),
            by_calls: half(33),
            not_direct,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use rustix::io::Errno;

    use super::super::message::Refusal;
    use super::*;

    fn page() -> Page {
        let qp = |n: u32, peer: Option<IpAddr>| QpReport {
            qpn: Qpn::new(n),
            qp_type: QpType::Rc,
            state: QpState::Rts,
            peer: peer.map(|address| (address, Qpn::new(0x03_0000 + n))),
            path_mtu: 4096,
            carrier: Carried::Shared,
            mapped: 2,
            by_calls: 1,
            not_direct: None,
        };
        let whys = [
            Why::NotHere,
            Why::OtherUser(1000),
            Why::UnknownUser,
            Why::Off,
            Why::NotYet,
            Why::GivenUp,
            Why::Refused(Refusal::Full),
            Why::System(Errno::NOMEM),
        ];
        let not_direct = [
            NotDirect::Denied(Refusal::NotShareable),
            NotDirect::OtherPidNamespace,
            NotDirect::Calls(Errno::PERM),
            NotDirect::Unmappable,
        ];
        let mut qps = vec![
            qp(1, None),
            qp(2, Some([127, 0, 0, 1].into())),
            qp(3, Some(Ipv6Addr::LOCALHOST.into())),
        ];
        qps[0].carrier = Carried::Nowhere;
        for why in whys {
            let carrier = Carried::Udp(why);
            let last = qps.last().map_or(0, |last| last.qpn.value());
            qps.push(QpReport {
                carrier,
                ..qp(last + 1, None)
            });
        }
        for why in not_direct {
            let last = qps.last().map_or(0, |last| last.qpn.value());
            qps.push(QpReport {
                not_direct: Some(why),
                ..qp(last + 1, None)
            });
        }
        for (qp, state) in qps.iter_mut().zip(STATES) {
            qp.state = state;
        }
        for (qp, qp_type) in qps.iter_mut().zip(TYPES) {
            qp.qp_type = qp_type;
        }
        Page {
            counts: [17, 4, 2],
            more: true,
            qps,
        }
    }

    #[test]
    fn decode__inverts_encode() {
        let bytes = page().encode();
        assert!(bytes.len() < PAGE_BYTES_MAX);
        assert_eq!(Page::decode(&bytes), Some(page()));
    }

    #[test]
    fn decode__any_byte_changed_or_cut() {
        let bytes = page().encode();
        for at in 0..bytes.len() {
            let _ = Page::decode(&bytes[..at]);
            for value in 0..=255 {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = Page::decode(&changed);
            }
        }
        assert_eq!(Page::decode(&bytes[..bytes.len() - 1]), None);
    }

    #[test]
    fn decode__numbers_out_of_order() {
        let mut page = page();
        page.qps.swap(0, 1);
        assert_eq!(Page::decode(&page.encode()), None);
    }

    #[test]
    fn decode__another_version() {
        let mut bytes = page().encode();
        bytes[1..3].copy_from_slice(&(VERSION + 1).to_ne_bytes());
        assert_eq!(Page::decode(&bytes), None);
    }
}
