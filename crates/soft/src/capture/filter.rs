//! Filters for the packets that a capture takes.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use rdmux_rnic::{Qpn, Rnic};
use rdmux_wire::roce::cnp::Cnp;
use rdmux_wire::roce::{Opcode, Operation};

/// Filter for the packets that a capture takes: all items must hold. The default takes all packets.
///
/// ```text
/// qp=N          of this queue pair of the device, both ways; N decimal, or hexadecimal as 0x3001a
/// peer=ADDR     from or to this address
/// opcode=KIND   send, write, read, atomic, flush, ack, cm or cnp; answers go with their requests, NAKs with ack
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// A queue pair of the device.
    pub qp: Option<Qpn>,
    /// The other end's address.
    pub peer: Option<IpAddr>,
    /// A kind of packet.
    pub opcode: Option<PacketKind>,
}

/// A kind of packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ, and READ responses.
    Read,
    /// Atomic operations and ATOMIC WRITE, and their responses.
    Atomic,
    /// FLUSH. Its response looks like that of a READ.
    Flush,
    /// Acknowledgements and NAKs.
    Ack,
    /// Connection management.
    Cm,
    /// Congestion notifications.
    Cnp,
}

const KINDS: [(&str, PacketKind); 8] = [
    ("send", PacketKind::Send),
    ("write", PacketKind::Write),
    ("read", PacketKind::Read),
    ("atomic", PacketKind::Atomic),
    ("flush", PacketKind::Flush),
    ("ack", PacketKind::Ack),
    ("cm", PacketKind::Cm),
    ("cnp", PacketKind::Cnp),
];

/// Error for a text that is no [`Filter`]: the part, and what may be there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FilterError(String);

impl FromStr for Filter {
    type Err = FilterError;

    /// Parses items separated by commas or spaces, each once at most. Without items the filter takes all packets.
    fn from_str(text: &str) -> Result<Filter, FilterError> {
        let mut filter = Filter::default();
        for item in text.split([',', ' ']).filter(|item| !item.is_empty()) {
            let bad = |allowed: &str| FilterError(format!("'{item}': {allowed}"));
            let twice = || bad("it is given twice");
            match item.split_once('=') {
                Some(("qp", value)) => {
                    let number = match value.strip_prefix("0x") {
                        Some(digits) => u32::from_str_radix(digits, 16).ok(),
                        None => value.parse().ok(),
                    };
                    let qpn = number.filter(|n| *n < 1 << 24).map(Qpn::new);
                    let qpn =
                        qpn.ok_or_else(|| bad("give a queue pair number, such as qp=196634 or qp=0x3001a"))?;
                    if filter.qp.replace(qpn).is_some() {
                        return Err(twice());
                    }
                }
                Some(("peer", value)) => {
                    let peer = value
                        .parse()
                        .map_err(|_| bad("give an address, such as peer=10.0.0.2"))?;
                    if filter.peer.replace(peer).is_some() {
                        return Err(twice());
                    }
                }
                Some(("opcode", value)) => {
                    let kind = KINDS.iter().find(|(name, _)| *name == value);
                    let (_, kind) =
                        kind.ok_or_else(|| bad("give send, write, read, atomic, flush, ack, cm or cnp"))?;
                    if filter.opcode.replace(*kind).is_some() {
                        return Err(twice());
                    }
                }
                _ => return Err(bad("give qp=N, peer=ADDR or opcode=KIND")),
            }
        }
        Ok(filter)
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |kind| {
            KINDS
                .iter()
                .find(|(_, k)| *k == kind)
                .map_or("", |(name, _)| name)
        };
        let items = [
            self.qp.map(|qpn| format!("qp={}", qpn.value())),
            self.peer.map(|peer| format!("peer={peer}")),
            self.opcode.map(|kind| format!("opcode={}", name(kind))),
        ];
        f.write_str(&items.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

impl Filter {
    /// Returns whether the filter takes a packet between the device and `other`.
    pub(super) fn takes(&self, rnic: &Rnic, other: IpAddr, sent: bool, packet: &[u8]) -> bool {
        if *self == Filter::default() {
            return true;
        }
        let &[opcode, _, _, _, _, high, middle, low, ..] = packet else {
            return false;
        };
        let dest = Qpn::new(u32::from_be_bytes([0, high, middle, low]));
        let is_of = |qpn: Qpn| {
            if !sent {
                return dest == qpn;
            }
            let to_its_peer = |info: rdmux_rnic::QpInfo| {
                info.dest_qpn == dest && info.path.is_some_and(|path| path.dst == other)
            };
            rnic.query_qp(qpn).is_some_and(to_its_peer)
        };
        self.peer.is_none_or(|peer| peer == other)
            && self
                .opcode
                .is_none_or(|kind| kind_of(opcode, dest, packet) == Some(kind))
            && self.qp.is_none_or(is_of)
    }
}

fn kind_of(code: u8, dest: Qpn, packet: &[u8]) -> Option<PacketKind> {
    if Cnp::is_cnp(packet) {
        return Some(PacketKind::Cnp);
    }
    if dest == Qpn::GSI {
        return Some(PacketKind::Cm);
    }
    Some(match Opcode::from_code(code)?.operation {
        Operation::Acknowledge => PacketKind::Ack,
        Operation::AtomicAcknowledge => PacketKind::Atomic,
        Operation::ReadRequest => PacketKind::Read,
        Operation::Flush => PacketKind::Flush,
        operation if operation.is_send() => PacketKind::Send,
        operation if operation.is_write() => PacketKind::Write,
        operation if operation.is_atomic() => PacketKind::Atomic,
        _ => PacketKind::Read,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse__items_and_errors() {
        let filter: Filter = "qp=0x3001a,peer=10.0.0.2 opcode=write".parse().unwrap();
        let expected = Filter {
            qp: Some(Qpn::new(0x3001a)),
            peer: Some([10, 0, 0, 2].into()),
            opcode: Some(PacketKind::Write),
        };
        assert_eq!(filter, expected);
        assert_eq!(filter.to_string().parse(), Ok(filter));
        assert_eq!("".parse(), Ok(Filter::default()));
        for (text, line) in [
            ("qp", "'qp': give qp=N, peer=ADDR or opcode=KIND"),
            ("qp=0x1000000", "'qp=0x1000000': give a queue pair number"),
            ("peer=host", "'peer=host': give an address"),
            ("opcode=WRITE", "'opcode=WRITE': give send, write, read"),
            ("qp=1 qp=2", "'qp=2': it is given twice"),
        ] {
            let error = text.parse::<Filter>().unwrap_err().to_string();
            assert!(error.starts_with(line), "{error}");
        }
    }
}
