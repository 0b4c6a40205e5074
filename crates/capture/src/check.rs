//! Checks a capture of RoCEv2, packet by packet: it names the errors for which a peer would silently drop a packet.
//!
//! Pass the packets to a [`Checker`] in order and read its [`Report`]. It verifies of each packet its opcode, headers, pad and ICRC
//! (exactly, since a capture shows the IPv4 identification), and of each connection that
//! - First and Middle packets carry exactly one path MTU, Last 1 byte to one, Only at most one. The path MTU is the payload of
//!   the first First or Middle seen;
//! - a message is First, Middles, Last of one kind, and a WRITE has as many bytes as its RETH says;
//! - the PSNs of requests advance by one, or for a READ by the number of its responses. A lower PSN is a retransmission, a gap is
//!   an error;
//! - the PSN of a response lies within those requested, and the response has the kind that the request requires.
//!
//! A request that carries an acknowledgement ([`carried`]) is checked as both. Only rdmux endpoints send such requests: where the
//! capture holds the CM messages, they must have agreed to it.
//!
//! It learns from the CM messages in the capture which two directions form a connection, or otherwise from the PSNs.
//!
//! A capture from a virtual link can show a GSO train that was not split yet, as one long UDP datagram. The capture does not hold its
//! segment size: the checker searches for the length at which the first segment's ICRC is correct.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::mem;
use std::net::IpAddr;

use crate::pcapng::{Captured, LinkType, NoUdp, Reader, UdpDatagram, ip_udp};
use rdmux_wire::cm::{CmMessage, Ece, Extensions};
use rdmux_wire::roce::cnp::Cnp;
use rdmux_wire::roce::sack::Sack;
use rdmux_wire::roce::{
    Bth, GSI_QKEY, ICRC_LEN, Opcode, Operation, Packet, PathMtu, Position, Reth, Syndrome, Transport,
    UDP_PORT, carried,
};
use rdmux_wire::{Malformed, Psn, Qpn};

/// Maximum length of a packet: the largest path MTU, and the maximum of headers, pad and ICRC.
const PACKET_LEN_MAX: usize = 4096 + 100;
const PACKET_LEN_MIN: usize = Bth::LEN + ICRC_LEN;
/// Maximum number of errors that a report names; further errors are only counted.
const ERRORS_KEPT: usize = 1_000;
/// Maximum number of requests with a pending response that are remembered for each direction.
const OWED_MAX: usize = 1_024;

/// An error in a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Number of the packet, from 1, as in Wireshark.
    pub packet: u64,
    /// Description of the error.
    pub reason: String,
}

/// Contents of a capture.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Packets of any kind.
    pub packets: u64,
    /// RoCEv2 packets.
    pub roce: u64,
    /// Captured packets that were GSO trains of several RoCEv2 packets.
    pub trains: u64,
    /// IP fragments, of any protocol.
    pub fragments: u64,
    /// RoCEv2 packets by opcode.
    pub opcodes: BTreeMap<u8, u64>,
    /// Retransmitted requests.
    pub retransmissions: u64,
    /// Negative acknowledgements, without receiver-not-ready.
    pub naks: u64,
    /// Receiver-not-ready NAKs.
    pub rnr_naks: u64,
    /// FLUSHes with the ICRC that rxe gives them ([`Flow::rxe_flush_icrc`]) instead of the specification's.
    ///
    /// [`Flow::rxe_flush_icrc`]: rdmux_wire::roce::icrc::Flow::rxe_flush_icrc
    pub rxe_flushes: u64,
    /// Acknowledgements that requests carry, between rdmux endpoints.
    pub carried_acks: u64,
    /// Responses to requests that are not in the capture, for example because it begins in the middle of a connection.
    pub unmatched: u64,
    /// Number of errors.
    pub errors_total: u64,
    /// The first thousand errors.
    pub errors: Vec<Error>,
}

impl Report {
    /// Returns whether there were RoCEv2 packets and no errors.
    pub fn passed(&self) -> bool {
        self.roce > 0 && self.errors_total == 0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, count: u64| writeln!(f, "{name:<32} {count:>12}");
        line("packets captured", self.packets)?;
        line("RoCEv2 packets", self.roce)?;
        line("trains not yet split", self.trains)?;
        for (code, count) in &self.opcodes {
            match Opcode::from_code(*code) {
                Some(opcode) => line(&format!("  {opcode}"), *count)?,
                None => line("  CNP", *count)?,
            }
        }
        line("retransmissions", self.retransmissions)?;
        line("NAKs", self.naks)?;
        line("receiver-not-ready NAKs", self.rnr_naks)?;
        for (name, count) in [
            ("FLUSHes with the ICRC of rxe", self.rxe_flushes),
            ("acknowledgements in requests", self.carried_acks),
            ("unmatched responses", self.unmatched),
            ("IP fragments", self.fragments),
        ] {
            if count > 0 {
                line(name, count)?;
            }
        }
        line("errors", self.errors_total)?;
        for error in &self.errors {
            writeln!(f, "  packet {}: {}", error.packet, error.reason)?;
        }
        let left_out = self.errors_total - self.errors.len() as u64;
        if left_out > 0 {
            writeln!(f, "  and {left_out} more")?;
        }
        Ok(())
    }
}

/// One direction of a connection: sender, receiver and the receiver's QP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Direction {
    src: IpAddr,
    dst: IpAddr,
    qpn: Qpn,
}

/// A request whose response is more than an acknowledgement.
#[derive(Clone, Copy, Debug)]
struct Owed {
    psn: Psn,
    operation: Operation,
    /// Bytes that a READ requests.
    length: u32,
}

/// A message whose First was seen but not its Last.
#[derive(Clone, Copy, Debug)]
struct Open {
    /// Set for a WRITE, clear for a SEND or READ response.
    write: bool,
    bytes: u64,
    /// Length in a WRITE's RETH.
    length: Option<u32>,
}

/// Requests of one direction.
#[derive(Clone, Debug)]
struct Requests {
    first: Psn,
    /// Set when `first` comes from the CM; otherwise it is the first PSN in the capture.
    told: bool,
    /// PSN of the next new request; `None` while the last was a READ whose number of responses is not known yet.
    next: Option<Psn>,
    /// The last READ, whose number of responses is unknown if `next` is `None`.
    last_read: Owed,
    open: Option<Open>,
    /// Set when packets before the next one may be missing, and with them the beginning of its message.
    incomplete: bool,
    owed: VecDeque<Owed>,
}

impl Requests {
    fn new(first: Psn, told: bool) -> Requests {
        let last_read = Owed {
            psn: first,
            operation: Operation::ReadRequest,
            length: 0,
        };
        Requests {
            first,
            told,
            next: Some(first),
            last_read,
            open: None,
            incomplete: !told,
            owed: VecDeque::new(),
        }
    }

    /// Returns the PSN after the last request, or if that is unknown the highest PSN that it can be.
    fn end(&self) -> Psn {
        self.next.unwrap_or_else(|| {
            self.last_read
                .psn
                .plus(responses(self.last_read.length, PathMtu::ALL[0].bytes()))
        })
    }

    /// Returns whether a response may carry `psn`.
    fn cover(&self, psn: Psn) -> bool {
        psn.since(self.first) >= 0 && psn.since(self.end()) < 0
    }
}

/// A REQ, as far as its REP needs it.
#[derive(Clone, Copy, Debug)]
struct Asking {
    qpn: Qpn,
    psn: Psn,
    carries_acks: bool,
}

/// Returns whether an endpoint announces that its requests carry acknowledgements.
fn carries_acks(ece: Option<Ece>) -> bool {
    ece.and_then(Extensions::from_ece)
        .is_some_and(|extensions| extensions.carried_acks)
}

/// Returns the number of response packets to a READ of `length` bytes.
fn responses(length: u32, mtu: u32) -> u32 {
    length.div_ceil(mtu).max(1)
}

/// Checks the packets of a capture in their order.
#[derive(Clone, Debug, Default)]
pub struct Checker {
    report: Report,
    requests: HashMap<Direction, Requests>,
    /// Path MTUs by direction.
    mtus: HashMap<Direction, u32>,
    /// Length of the longest Only or Last packet by direction, until the path MTU is known.
    longest: HashMap<Direction, u32>,
    /// Opposite direction of each direction.
    opposite: HashMap<Direction, Direction>,
    /// REQs by sender and communication id, waiting for their REP.
    connecting: HashMap<(IpAddr, IpAddr, u32), Asking>,
    /// Directions whose ends did not agree on requests that carry acknowledgements: for them the bit means nothing.
    plain: HashSet<Direction>,
    /// Segment length of the last train, which the next one is likely to share.
    segment_hint: usize,
}

impl Checker {
    /// Returns a checker that has seen no packets.
    pub fn new() -> Checker {
        Checker::default()
    }

    /// Checks a whole pcap or pcapng file.
    pub fn file(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        for captured in Reader::new(bytes)? {
            self.captured(&captured?);
        }
        Ok(())
    }

    /// Checks the next packet of a capture.
    pub fn captured(&mut self, captured: &Captured<'_>) {
        self.packet(captured.link, captured.data);
    }

    /// Checks the next packet, whose first header has type `link`.
    pub fn packet(&mut self, link: LinkType, data: &[u8]) {
        self.report.packets += 1;
        match ip_udp(link, data) {
            Ok(datagram) if datagram.flow.dst_port == UDP_PORT => self.datagram(&datagram),
            Ok(_) | Err(NoUdp::Other) => {}
            Err(NoUdp::Fragment) => self.report.fragments += 1,
            Err(NoUdp::Truncated) => {
                self.error("captured only in part; capture with a snap length of 0".to_owned());
            }
        }
    }

    /// Returns the report so far.
    pub fn report(&self) -> &Report {
        &self.report
    }

    fn error(&mut self, reason: String) {
        self.report.errors_total += 1;
        if self.report.errors.len() < ERRORS_KEPT {
            self.report.errors.push(Error {
                packet: self.report.packets,
                reason,
            });
        }
    }

    fn datagram(&mut self, datagram: &UdpDatagram<'_>) {
        let payload = datagram.payload;
        if payload.len() < PACKET_LEN_MIN {
            self.error(format!(
                "{} bytes are too short for a RoCEv2 packet",
                payload.len()
            ));
            return;
        }
        if payload.len() <= PACKET_LEN_MAX && icrc_fits(datagram, payload, datagram.ip_id) {
            self.roce(datagram, payload, datagram.ip_id);
            return;
        }
        let Some(segment_len) = self.segment_len(datagram) else {
            self.report.roce += u64::from(payload.len() <= PACKET_LEN_MAX);
            self.error(if payload.len() <= PACKET_LEN_MAX {
                let (packet, icrc) = payload.split_at(payload.len() - ICRC_LEN);
                let expected = icrc_of(datagram, packet, datagram.ip_id).to_le_bytes();
                let v4 = datagram.flow.src.is_ipv4();
                let id = if v4 {
                    format!(", IPv4 identification {}", datagram.ip_id)
                } else {
                    String::new()
                };
                format!("ICRC {} should be {}{id}", hex(icrc), hex(&expected))
            } else {
                format!(
                    "{} bytes are neither a packet nor a train of packets with correct ICRCs",
                    payload.len()
                )
            });
            return;
        };
        self.segment_hint = segment_len;
        self.report.trains += 1;
        let mut id = datagram.ip_id;
        for (index, segment) in payload.chunks(segment_len).enumerate() {
            if segment.len() < PACKET_LEN_MIN {
                self.error(format!(
                    "segment {index} of a train: {} bytes are too short",
                    segment.len()
                ));
                return;
            }
            // A datagram that the receiver's GRO joined may contain several trains, each numbered from 0.
            if !icrc_fits(datagram, segment, id) && icrc_fits(datagram, segment, 0) {
                id = 0;
            }
            if icrc_fits(datagram, segment, id) {
                self.roce(datagram, segment, id);
            } else {
                self.report.roce += 1;
                self.error(format!(
                    "segment {index} of a train: wrong ICRC, taking IPv4 identification {id}"
                ));
            }
            id = id.wrapping_add(1);
        }
    }

    /// Returns the segment length of a train: the length at which the first segment has a correct ICRC.
    fn segment_len(&self, datagram: &UdpDatagram<'_>) -> Option<usize> {
        let payload = datagram.payload;
        let longest = PACKET_LEN_MAX.min(payload.len() - 1);
        let fits = |len: &usize| {
            let Some(segment) = payload.get(..*len) else {
                return false;
            };
            segment.len() >= PACKET_LEN_MIN
                && len.is_multiple_of(4)
                && icrc_fits(datagram, segment, datagram.ip_id)
        };
        std::iter::once(self.segment_hint)
            .filter(|hint| *hint <= longest)
            .chain((PACKET_LEN_MIN..=longest).step_by(4))
            .find(fits)
    }

    /// Checks one RoCEv2 packet, whose ICRC is correct with the identification `id`.
    fn roce(&mut self, datagram: &UdpDatagram<'_>, bytes: &[u8], id: u16) {
        self.report.roce += 1;
        self.report.rxe_flushes += u64::from(is_flush_of_rxe(datagram, bytes, id));
        *self.report.opcodes.entry(bytes[0]).or_default() += 1;
        if Cnp::is_cnp(bytes) {
            if let Err(error) = Cnp::parse(bytes) {
                self.error(error.to_string());
            }
            return;
        }
        let mut packet = match Packet::parse(bytes) {
            Ok(packet) => packet,
            Err(error) => return self.error(error.to_string()),
        };
        if !datagram.dont_fragment {
            self.error("DF is not set".to_owned());
        }
        let direction = Direction {
            src: datagram.flow.src,
            dst: datagram.flow.dst,
            qpn: packet.bth.dest_qpn,
        };
        if carried::may_be_in(packet.bth.opcode)
            && !self.plain.contains(&direction)
            && let Err(error) = packet.take_carried()
        {
            self.error(error.to_string());
        }
        self.pad(&packet);
        if let Err(reason) = self.payload_len(direction, &packet) {
            self.error(format!("{}: {reason}", packet.bth.opcode));
        }
        match packet.bth.opcode.transport {
            Transport::Ud => self.datagram_service(direction, &packet),
            _ if packet.bth.opcode.operation.is_response() => self.response(direction, &packet),
            _ => self.request(direction, &packet),
        }
    }

    /// Checks the pad: as many zero bytes as make the payload a multiple of four. IBTA Vol 1, 9.2.6.
    fn pad(&mut self, packet: &Packet<'_>) {
        let pad = usize::from(packet.bth.pad);
        if !(packet.payload().len() + pad).is_multiple_of(4) {
            self.error(format!(
                "payload of {} bytes with {pad} bytes of pad",
                packet.payload().len()
            ));
        }
        let carried = packet.carried().map_or(0, |_| carried::LEN);
        let end = packet.bytes().len() - ICRC_LEN - carried;
        if packet.bytes()[end - pad..end].iter().any(|b| *b != 0) {
            self.error("pad is not zero".to_owned());
        }
    }

    /// Checks the payload length by opcode and path MTU. IBTA Vol 1, 9.7.4.1.5 and 9.8.2.2.6.
    fn payload_len(&mut self, direction: Direction, packet: &Packet<'_>) -> Result<(), String> {
        use Operation::*;
        let len = packet.payload().len() as u32;
        // A report about a gap between rdmux endpoints.
        if let Some(sack) = Sack::of(packet) {
            return sack.map(|_| ()).map_err(|error| error.to_string());
        }
        let fixed = match packet.bth.opcode.operation {
            ReadRequest | Acknowledge | AtomicAcknowledge | CompareSwap | FetchAdd | Flush => Some(0),
            AtomicWrite => Some(8),
            _ => None,
        };
        if let Some(fixed) = fixed {
            return if len == fixed {
                Ok(())
            } else {
                Err(format!("payload of {len} bytes, not {fixed}"))
            };
        }
        let position = packet.bth.opcode.operation.position();
        if matches!(position, Position::First | Position::Middle) && !self.mtus.contains_key(&direction) {
            if PathMtu::from_bytes(len).is_none() {
                return Err(format!("payload of {len} bytes is no path MTU"));
            }
            self.mtus.insert(direction, len);
            if let Some(longest) = self.longest.remove(&direction).filter(|longest| *longest > len) {
                return Err(format!(
                    "path MTU is {len} bytes, but a packet before had {longest}"
                ));
            }
        }
        let known = self.mtus.get(&direction).copied();
        let mtu = known.unwrap_or(4096);
        let (fits, rule) = match position {
            Position::First | Position::Middle => (len == mtu, "exactly"),
            Position::Last => ((1..=mtu).contains(&len), "1 byte to"),
            Position::Only => (len <= mtu, "at most"),
        };
        if !fits {
            return Err(format!(
                "payload of {len} bytes, should be {rule} the path MTU, {mtu}"
            ));
        }
        if known.is_none() {
            let longest = self.longest.entry(direction).or_default();
            *longest = len.max(*longest);
        }
        Ok(())
    }

    /// Checks a UD packet: only connection management has something to check.
    fn datagram_service(&mut self, direction: Direction, packet: &Packet<'_>) {
        if packet.bth.dest_qpn != Qpn::GSI {
            return;
        }
        if let Some(deth) = packet.deth().filter(|deth| deth.qkey != GSI_QKEY) {
            self.error(format!(
                "Q_Key of QP 1 is {:#x}, should be {GSI_QKEY:#x}",
                deth.qkey
            ));
        }
        let (src, dst) = (direction.src, direction.dst);
        match CmMessage::parse(packet.payload()) {
            Ok((_, CmMessage::Req(req))) => {
                let asking = Asking {
                    qpn: req.qpn,
                    psn: req.starting_psn,
                    carries_acks: carries_acks(req.ece),
                };
                self.connecting.insert((src, dst, req.local_comm_id), asking);
            }
            Ok((_, CmMessage::Rep(rep))) => {
                // A repeated REP finds no REQ, and leaves the connection unchanged.
                if let Some(asking) = self.connecting.remove(&(dst, src, rep.remote_comm_id)) {
                    let Asking { qpn, psn, .. } = asking;
                    let forth = Direction {
                        src: dst,
                        dst: src,
                        qpn: rep.qpn,
                    };
                    let back = Direction { src, dst, qpn };
                    // Each side announces the PSN with which the other begins. IBTA Vol 1, 12.7.31.
                    self.connect(forth, back);
                    let agreed = asking.carries_acks && carries_acks(rep.ece);
                    for direction in [forth, back] {
                        if agreed {
                            self.plain.remove(&direction);
                        } else {
                            self.plain.insert(direction);
                        }
                    }
                    self.requests.insert(forth, Requests::new(rep.starting_psn, true));
                    self.requests.insert(back, Requests::new(psn, true));
                }
            }
            Ok(_) => {}
            // Path changes and other management classes are not checked.
            Err(Malformed::Undefined {
                what: "CM attribute" | "MAD management class",
                ..
            }) => {}
            Err(error) => self.error(error.to_string()),
        }
    }

    /// Records that two directions form one connection, and forgets an earlier connection of the same QPs.
    fn connect(&mut self, forth: Direction, back: Direction) {
        for direction in [forth, back] {
            self.mtus.remove(&direction);
            self.longest.remove(&direction);
        }
        self.opposite.insert(forth, back);
        self.opposite.insert(back, forth);
    }

    fn request(&mut self, direction: Direction, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        let mtu = self.mtu_of_connection(direction);
        let mut requests = self
            .requests
            .remove(&direction)
            .unwrap_or_else(|| Requests::new(psn, false));
        if let Err(reason) = self.request_psn(&mut requests, mtu, packet) {
            self.error(format!("{}: {reason}", packet.bth.opcode));
        }
        self.requests.insert(direction, requests);
        let Some(acked) = packet.carried() else { return };
        self.report.carried_acks += 1;
        if let Some(asked) = self.asked_by(direction, acked)
            && let Some(requests) = self.requests.get(&asked)
            && !requests.cover(acked)
        {
            let opcode = packet.bth.opcode;
            self.error(format!(
                "{opcode}: carries an acknowledgement of {acked:?}, which no request has"
            ));
        }
    }

    /// Returns the path MTU of a connection, which both directions share.
    fn mtu_of_connection(&self, direction: Direction) -> Option<u32> {
        let opposite = self
            .opposite
            .get(&direction)
            .and_then(|opposite| self.mtus.get(opposite));
        self.mtus.get(&direction).or(opposite).copied()
    }

    fn request_psn(
        &mut self,
        requests: &mut Requests,
        mtu: Option<u32>,
        packet: &Packet<'_>,
    ) -> Result<(), String> {
        let (psn, operation) = (packet.bth.psn, packet.bth.opcode.operation);
        let read = requests.last_read;
        if let (None, Some(mtu)) = (requests.next, mtu) {
            requests.next = Some(read.psn.plus(responses(read.length, mtu)));
        }
        let next = requests.next.unwrap_or_else(|| {
            // Some path MTU may make this the packet after the READ. If none does, there is a gap, whose size assumes the fewest responses.
            let fits = |mtu: &PathMtu| read.psn.plus(responses(read.length, mtu.bytes())) == psn;
            if psn.since(read.psn) <= 0 {
                requests.end()
            } else if PathMtu::ALL.iter().any(fits) {
                psn
            } else {
                read.psn.plus(responses(read.length, 4096))
            }
        });
        let ahead = psn.since(next);
        let owed = Owed {
            psn,
            operation,
            length: packet.reth().map_or(0, |reth| reth.length),
        };
        if packet.bth.opcode.ext().intersects(rdmux_wire::roce::Ext::ATOMIC)
            || matches!(
                operation,
                Operation::ReadRequest | Operation::Flush | Operation::AtomicWrite
            )
        {
            if requests.owed.len() == OWED_MAX {
                requests.owed.pop_front();
            }
            requests.owed.push_back(owed);
        }
        if ahead < 0 {
            self.report.retransmissions += 1;
            if psn.since(requests.first) >= 0 {
                return Ok(());
            }
            if requests.told {
                return Err(format!(
                    "{psn:?} is before the connection's first, {:?}",
                    requests.first
                ));
            }
            requests.first = psn;
            return Ok(());
        }
        requests.next = Some(psn.plus(1));
        if operation == Operation::ReadRequest {
            let count = |mtu| responses(owed.length, mtu);
            requests.last_read = owed;
            requests.next = match mtu {
                Some(mtu) => Some(psn.plus(count(mtu))),
                None if count(256) == count(4096) => Some(psn.plus(1)),
                None => None,
            };
        }
        requests.incomplete |= ahead > 0;
        let message = message(requests, packet);
        if ahead > 0 {
            return Err(format!("PSN gap of {ahead}: {psn:?} after {:?}", next.minus(1)));
        }
        message
    }

    fn response(&mut self, direction: Direction, packet: &Packet<'_>) {
        match packet.aeth().map(|aeth| aeth.syndrome) {
            Some(Syndrome::Nak(_)) => self.report.naks += 1,
            Some(Syndrome::RnrNak { .. }) => self.report.rnr_naks += 1,
            Some(Syndrome::Ack { .. }) | None => {}
        }
        let psn = packet.bth.psn;
        let Some(asked) = self.asked_by(direction, psn) else {
            return;
        };
        let mtu = self.mtu_of_connection(direction);
        let Some(requests) = self.requests.get(&asked) else {
            return;
        };
        if let Err(reason) = answers(requests, mtu, packet) {
            self.error(format!("{}: {reason}", packet.bth.opcode));
        }
    }

    /// Returns the direction whose requests a response in `direction` answers.
    fn asked_by(&mut self, direction: Direction, psn: Psn) -> Option<Direction> {
        if let Some(known) = self.opposite.get(&direction) {
            return Some(*known);
        }
        let (mut any, mut found) = (false, Vec::new());
        for (asking, requests) in &self.requests {
            if (asking.src, asking.dst) == (direction.dst, direction.src) {
                any = true;
                if !self.opposite.contains_key(asking) && requests.cover(psn) {
                    found.push(*asking);
                }
            }
        }
        match found[..] {
            // The correct direction is always among those found, so a single one found is the correct one.
            [one] => {
                self.opposite.insert(direction, one);
                self.opposite.insert(one, direction);
                return Some(one);
            }
            [] if any => self.error(format!("response with {psn:?}, which no request carried")),
            [] => self.report.unmatched += 1,
            _ => {}
        }
        None
    }
}

/// Checks that a new request continues the message before it or begins one, and that a WRITE has the length in its RETH. IBTA Vol 1,
/// 9.7.4.1.2.
fn message(requests: &mut Requests, packet: &Packet<'_>) -> Result<(), String> {
    let operation = packet.bth.opcode.operation;
    let len = packet.payload().len() as u64;
    let open = requests.open.take();
    let incomplete = mem::take(&mut requests.incomplete);
    if operation.position().begins() {
        let length = packet
            .reth()
            .filter(|_| operation.is_write())
            .map(|reth: Reth| reth.length);
        let begun = Open {
            write: operation.is_write(),
            bytes: len,
            length,
        };
        if operation.position() == Position::First {
            requests.open = Some(begun);
        } else if let Some(length) = length.filter(|length| u64::from(*length) != len) {
            return Err(format!("{len} bytes of a message of {length}"));
        }
        return if open.is_some() && !incomplete {
            Err("the message before has no end".into())
        } else {
            Ok(())
        };
    }
    let write = operation.is_write();
    let open = match open.filter(|open| open.write == write) {
        Some(open) if !incomplete => open,
        // Packets are missing, so the length cannot be checked.
        _ if incomplete => Open {
            write,
            bytes: 0,
            length: None,
        },
        _ => return Err("no First before it".into()),
    };
    let bytes = open.bytes + len;
    if !operation.position().ends() {
        requests.open = Some(Open { bytes, ..open });
        return Ok(());
    }
    match open.length.filter(|length| u64::from(*length) != bytes) {
        Some(length) => Err(format!("ends a message of {length} bytes after {bytes}")),
        None => Ok(()),
    }
}

/// Checks that a response has the kind and length that the request with its PSN requires.
fn answers(requests: &Requests, mtu: Option<u32>, packet: &Packet<'_>) -> Result<(), String> {
    let (psn, operation) = (packet.bth.psn, packet.bth.opcode.operation);
    if !requests.cover(psn) {
        let (first, last) = (requests.first, requests.end().minus(1));
        return Err(format!(
            "{psn:?} is outside of the requests, {first:?} to {last:?}"
        ));
    }
    if operation == Operation::Acknowledge {
        return Ok(());
    }
    let index_in = |owed: &Owed| {
        let count = match owed.operation {
            Operation::ReadRequest => responses(owed.length, mtu.unwrap_or(256)),
            _ => 1,
        };
        u32::try_from(psn.since(owed.psn))
            .ok()
            .filter(|index| *index < count)
    };
    let asked = requests
        .owed
        .iter()
        .rev()
        .find_map(|owed| Some((owed, index_in(owed)?)));
    let Some((owed, index)) = asked else {
        // The checker may have forgotten the request.
        let forgotten = requests.owed.len() == OWED_MAX;
        return if forgotten {
            Ok(())
        } else {
            Err(format!("nothing asked for it at {psn:?}"))
        };
    };
    let len = packet.payload().len() as u32;
    let expected = match (owed.operation, operation) {
        (Operation::CompareSwap | Operation::FetchAdd, Operation::AtomicAcknowledge) => return Ok(()),
        (Operation::Flush | Operation::AtomicWrite, Operation::ReadResponseOnly) => Some(0),
        (Operation::ReadRequest, _) if operation.is_read_response() => mtu
            .map(|mtu| (owed.length - index * mtu).min(mtu))
            .or_else(|| (operation == Operation::ReadResponseOnly).then_some(owed.length)),
        (asked, _) => return Err(format!("answers a {asked:?} at {psn:?}")),
    };
    match expected.filter(|expected| *expected != len) {
        Some(expected) => Err(format!("{len} bytes at {psn:?}, {expected} were asked for")),
        None => Ok(()),
    }
}

fn icrc_of(datagram: &UdpDatagram<'_>, packet: &[u8], id: u16) -> u32 {
    datagram.flow.icrc_as_captured(packet, id, datagram.dont_fragment)
}

/// Returns whether a packet ends with the correct ICRC. The packet has at least [`PACKET_LEN_MIN`] bytes.
fn icrc_fits(datagram: &UdpDatagram<'_>, whole: &[u8], id: u16) -> bool {
    let (packet, icrc) = whole.split_at(whole.len() - ICRC_LEN);
    icrc_of(datagram, packet, id).to_le_bytes() == icrc || is_flush_of_rxe(datagram, whole, id)
}

fn is_flush_of_rxe(datagram: &UdpDatagram<'_>, packet: &[u8], id: u16) -> bool {
    let (packet, icrc) = packet.split_at(packet.len() - ICRC_LEN);
    packet[0] == Opcode::rc(Operation::Flush).code()
        && datagram
            .flow
            .rxe_flush_icrc_as_captured(packet, id, datagram.dont_fragment)
            .to_le_bytes()
            == icrc
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests;
