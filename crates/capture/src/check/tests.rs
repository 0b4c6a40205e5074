use super::*;
use crate::pcapng::{write_interface, write_ip_udp, write_packet, write_section};
use Operation::*;
use rdmux_wire::RKey;
use rdmux_wire::cm::{MAD_LEN, PrivateData, Rep, Req, Rtu, ServiceId, to_gid};
use rdmux_wire::roce::icrc::Flow;
use rdmux_wire::roce::{Aeth, Deth, Feth, NakCode, Placement, Selectivity};

/// A requester at .1 (QPN 0x11) and a responder at .2 (QPN 0x22), and a checker of the packets captured between them.
struct Wire {
    checker: Checker,
    v6: bool,
    ip_id: u16,
}

impl Wire {
    fn new() -> Wire {
        Wire {
            checker: Checker::new(),
            v6: false,
            ip_id: 0,
        }
    }

    fn flow(&self, forth: bool) -> Flow {
        let (a, b) = if self.v6 {
            ("fd00::1", "fd00::2")
        } else {
            ("10.9.0.1", "10.9.0.2")
        };
        let (src, dst) = if forth { (a, b) } else { (b, a) };
        Flow {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            src_port: 0xc001,
            dst_port: UDP_PORT,
        }
    }

    fn feed(&mut self, forth: bool, payload: &[u8]) {
        let mut ip = Vec::new();
        write_ip_udp(&mut ip, &self.flow(forth), self.ip_id, 0, payload);
        self.checker.packet(LinkType::RAW, &ip);
    }

    /// Returns a packet with its ICRC, as sent with IPv4 identification `id`.
    fn build(&self, forth: bool, bth: Bth, ext: &[u8], payload: &[u8], id: u16) -> Vec<u8> {
        let mut bytes = vec![0; Bth::LEN];
        let pad = payload.len().next_multiple_of(4) - payload.len();
        Bth {
            pad: pad as u8,
            ..bth
        }
        .emit(&mut bytes);
        bytes.extend_from_slice(ext);
        bytes.extend_from_slice(payload);
        bytes.resize(bytes.len() + pad, 0);
        let icrc = self.flow(forth).icrc(&bytes, id);
        bytes.extend_from_slice(&icrc.to_le_bytes());
        bytes
    }

    fn send(&mut self, operation: Operation, psn: u32, ext: &[u8], len: usize) {
        let packet = self.build(true, bth(operation, psn), ext, &vec![7; len], self.ip_id);
        self.feed(true, &packet);
    }

    fn answer(&mut self, operation: Operation, psn: u32, syndrome: Option<Syndrome>, len: usize) {
        let bth = Bth::new(Opcode::rc(operation), Qpn::new(0x11), Psn::new(psn));
        let mut ext = vec![0; if syndrome.is_some() { 4 } else { 0 }];
        if let Some(syndrome) = syndrome {
            Aeth { syndrome, msn: 1 }.emit(&mut ext);
        }
        let packet = self.build(false, bth, &ext, &vec![9; len], self.ip_id);
        self.feed(false, &packet);
    }

    fn ack(&mut self, psn: u32) {
        self.answer(Acknowledge, psn, Some(Syndrome::ACK), 0);
    }

    fn mad(&mut self, forth: bool, message: &CmMessage, qkey: u32) {
        let mut mad = [0; MAD_LEN];
        message.emit(1, &mut mad);
        let mut deth = [0; 8];
        Deth {
            qkey,
            src_qpn: Qpn::GSI,
        }
        .emit(&mut deth);
        let packet = self.build(forth, gsi(), &deth, &mad, 0);
        self.feed(forth, &packet);
    }

    /// Asserts that the capture has no error.
    fn good(&self) -> &Report {
        let report = self.checker.report();
        assert!(report.passed(), "{report}");
        report
    }

    /// Asserts that there is exactly one error, and that it contains `reason`.
    fn bad(&self, reason: &str) {
        let report = self.checker.report();
        assert!(
            report.errors.len() == 1 && report.errors[0].reason.contains(reason),
            "{reason}?\n{report}"
        );
    }

    fn reasons(&self) -> Vec<&str> {
        self.checker
            .report()
            .errors
            .iter()
            .map(|e| e.reason.as_str())
            .collect()
    }
}

fn bth(operation: Operation, psn: u32) -> Bth {
    Bth::new(Opcode::rc(operation), Qpn::new(0x22), Psn::new(psn))
}

fn gsi() -> Bth {
    Bth::new(
        Opcode {
            transport: Transport::Ud,
            operation: SendOnly,
        },
        Qpn::GSI,
        Psn::new(0),
    )
}

fn reth(length: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    Reth {
        va: 0x1000,
        rkey: RKey(5),
        length,
    }
    .emit(&mut bytes);
    bytes
}

#[test]
fn requests__write_of_three_packets() {
    for v6 in [false, true] {
        let mut wire = Wire { v6, ..Wire::new() };
        wire.send(WriteFirst, 0xff_ffff, &reth(2053), 1024);
        wire.send(WriteMiddle, 0, &[], 1024);
        wire.send(WriteLast, 1, &[], 5);
        wire.ack(1);
        let report = wire.good();
        assert_eq!(
            (report.packets, report.roce, report.trains, report.retransmissions),
            (4, 4, 0, 0)
        );
        assert_eq!(report.opcodes[&0x06], 1);
    }
}

#[test]
fn icrc__wrong() {
    for at in [13, 20, 54] {
        let mut wire = Wire::new();
        let mut packet = wire.build(true, bth(SendOnly, 1), &[], &[7; 40], 0);
        packet[at] ^= 1;
        wire.feed(true, &packet);
        wire.bad("IPv4 identification 0");
    }
}

#[test]
fn icrc__identification_of_the_capture_counts() {
    let mut wire = Wire {
        ip_id: 0x1234,
        ..Wire::new()
    };
    wire.send(SendOnly, 1, &[], 8);
    wire.good();
    let packet = wire.build(true, bth(SendOnly, 2), &[], &[], 0x1235);
    wire.feed(true, &packet);
    wire.bad("ICRC");
}

#[test]
fn icrc__with_df_clear() {
    let mut wire = Wire::new();
    let mut packet = wire.build(true, bth(SendOnly, 1), &[], &[], 0);
    let end = packet.len() - ICRC_LEN;
    let icrc = wire.flow(true).icrc_as_captured(&packet[..end], 0, false);
    packet[end..].copy_from_slice(&icrc.to_le_bytes());
    let mut ip = Vec::new();
    write_ip_udp(&mut ip, &wire.flow(true), 0, 0, &packet);
    ip[6] = 0;
    wire.checker.packet(LinkType::RAW, &ip);
    wire.bad("DF is not set");
}

/// Returns WRITE Middles of `mtu` bytes and a shorter Last as one datagram, each with the identification that `id` returns.
fn train(wire: &Wire, count: u32, mtu: usize, id: impl Fn(u32) -> u16) -> Vec<u8> {
    let segment = |i: u32| {
        let (operation, len) = if i + 1 < count {
            (WriteMiddle, mtu)
        } else {
            (WriteLast, 100)
        };
        wire.build(true, bth(operation, 11 + i), &[], &vec![i as u8; len], id(i))
    };
    (0..count).flat_map(segment).collect()
}

#[test]
fn train__not_yet_split() {
    for (v6, count, mtu) in [
        (false, 3, 256),
        (false, 50, 1024),
        (true, 3, 256),
        (false, 14, 4096),
        (true, 14, 4096),
    ] {
        let mut wire = Wire { v6, ..Wire::new() };
        wire.send(WriteFirst, 10, &reth((mtu as u32) * count + 100), mtu);
        let bytes = train(&wire, count, mtu, |i| if v6 { 0 } else { i as u16 });
        wire.feed(true, &bytes);
        wire.ack(10 + count);
        let report = wire.good();
        assert_eq!(
            (report.packets, report.roce, report.trains),
            (3, 2 + u64::from(count), 1)
        );
    }
}

#[test]
fn train__two_joined_by_the_receiver() {
    let mut wire = Wire::new();
    wire.send(WriteFirst, 10, &reth(256 * 6 + 100), 256);
    let bytes = train(&wire, 6, 256, |i| (i % 3) as u16);
    wire.feed(true, &bytes);
    assert_eq!(wire.good().trains, 1);
}

#[test]
fn train__one_segment_corrupt() {
    let mut wire = Wire::new();
    wire.send(WriteFirst, 10, &reth(256 * 4 + 100), 256);
    let mut bytes = train(&wire, 4, 256, |i| i as u16);
    bytes[(12 + 256 + 4) + 30] ^= 0x10;
    wire.feed(true, &bytes);
    let reasons = wire.reasons();
    assert!(
        reasons[0].starts_with("segment 1 of a train: wrong ICRC"),
        "{reasons:?}"
    );
    assert!(
        reasons.len() == 2 && reasons[1].contains("PSN gap of 1"),
        "{reasons:?}"
    );
}

#[test]
fn train__of_nothing_known() {
    let mut wire = Wire::new();
    wire.feed(true, &[0x55; 9_000]);
    wire.bad("neither a packet nor a train");
}

#[test]
fn requests__retransmission() {
    let mut wire = Wire::new();
    for psn in [5, 6, 7, 6, 7, 8] {
        wire.send(SendOnly, psn, &[], 16);
    }
    assert_eq!(wire.good().retransmissions, 2);
}

#[test]
fn requests__gap() {
    let mut wire = Wire::new();
    wire.send(SendOnly, 5, &[], 16);
    wire.send(SendMiddle, 7, &[], 256);
    wire.send(SendLast, 8, &[], 16);
    wire.bad("PSN gap of 1");
}

#[test]
fn requests__capture_begins_within_a_message() {
    let mut wire = Wire::new();
    wire.send(WriteMiddle, 5, &[], 256);
    wire.send(WriteLast, 6, &[], 16);
    wire.send(WriteOnly, 4, &reth(3), 3);
    assert_eq!(wire.good().retransmissions, 1);
}

/// Sends an empty message with PSN 0, then `packets`, and expects one error.
fn rejects(packets: &[(Operation, &[u8], usize)], reason: &str) {
    let mut wire = Wire::new();
    wire.send(SendOnly, 0, &[], 0);
    for (psn, (operation, ext, len)) in (1..).zip(packets) {
        wire.send(*operation, psn, ext, *len);
    }
    wire.bad(reason);
}

#[test]
fn payload_len__rules() {
    let flush = [[0, 0, 0, 1].as_slice(), &reth(812)].concat();
    rejects(&[(SendFirst, &[], 300)], "no path MTU");
    rejects(
        &[(SendFirst, &[], 256), (SendMiddle, &[], 512)],
        "exactly the path MTU, 256",
    );
    rejects(
        &[(SendFirst, &[], 256), (SendLast, &[], 0)],
        "1 byte to the path MTU, 256",
    );
    rejects(
        &[(SendFirst, &[], 256), (SendLast, &[], 257)],
        "1 byte to the path MTU, 256",
    );
    rejects(
        &[(SendFirst, &[], 256), (SendLast, &[], 1), (SendOnly, &[], 260)],
        "at most the path MTU, 256",
    );
    rejects(
        &[(SendOnly, &[], 260), (SendFirst, &[], 256)],
        "a packet before had 260",
    );
    rejects(&[(SendOnly, &[], 4097)], "at most the path MTU, 4096");
    rejects(&[(Flush, &flush, 4)], "payload of 4 bytes, not 0");
    rejects(&[(AtomicWrite, &reth(8), 4)], "payload of 4 bytes, not 8");
}

#[test]
fn message__rules() {
    rejects(&[(SendMiddle, &[], 256)], "no First");
    rejects(&[(WriteFirst, &reth(300), 256), (SendLast, &[], 44)], "no First");
    rejects(&[(SendFirst, &[], 256), (SendOnly, &[], 4)], "no end");
    rejects(
        &[(WriteFirst, &reth(300), 256), (WriteLast, &[], 45)],
        "message of 300 bytes after 301",
    );
    rejects(&[(WriteOnly, &reth(300), 299)], "299 bytes of a message of 300");
}

#[test]
fn pad__rules() {
    let mut wire = Wire::new();
    for (psn, payload, tail) in [(0, 8, 0u8), (1, 3, 1)] {
        let mut bytes = vec![0; Bth::LEN];
        Bth {
            pad: 1,
            ..bth(SendOnly, psn)
        }
        .emit(&mut bytes);
        bytes.extend_from_slice(&vec![7; payload]);
        bytes.push(tail);
        let icrc = wire.flow(true).icrc(&bytes, 0);
        bytes.extend_from_slice(&icrc.to_le_bytes());
        wire.feed(true, &bytes);
    }
    assert_eq!(
        wire.reasons(),
        ["payload of 8 bytes with 1 bytes of pad", "pad is not zero"]
    );
}

#[test]
fn responses__read_takes_as_many_psns() {
    let mut wire = Wire::new();
    wire.send(ReadRequest, 10, &reth(2500), 0);
    wire.answer(ReadResponseFirst, 10, Some(Syndrome::ACK), 1024);
    wire.answer(ReadResponseMiddle, 11, None, 1024);
    wire.answer(ReadResponseLast, 12, Some(Syndrome::ACK), 452);
    wire.send(SendOnly, 13, &[], 0);
    wire.ack(13);
    wire.good();
}

#[test]
fn responses__reads_before_the_path_mtu_is_known() {
    let mut wire = Wire::new();
    wire.send(ReadRequest, 10, &reth(2500), 0);
    wire.send(ReadRequest, 13, &reth(1), 0); // as many responses as with 1,024 bytes
    wire.send(ReadRequest, 13, &reth(1), 0);
    wire.send(SendOnly, 14, &[], 0);
    assert_eq!(wire.good().retransmissions, 1);
    let mut wire = Wire::new();
    wire.send(ReadRequest, 10, &reth(2500), 0);
    wire.send(SendOnly, 14, &[], 0);
    wire.bad("PSN gap of 3");
}

#[test]
fn responses__read_of_wrong_length() {
    let mut wire = Wire::new();
    wire.send(ReadRequest, 10, &reth(2500), 0);
    wire.answer(ReadResponseFirst, 10, Some(Syndrome::ACK), 1024);
    wire.answer(ReadResponseLast, 12, Some(Syndrome::ACK), 456);
    wire.bad("456 bytes at psn 0x00000c, 452 were asked for");
}

#[test]
fn responses__flush_atomic_write_and_atomic() {
    let mut wire = Wire::new();
    let mut feth = [0; 4];
    Feth {
        placement: Placement::PERSISTENT,
        selectivity: Selectivity::Range,
    }
    .emit(&mut feth);
    wire.send(Flush, 1, &[feth.as_slice(), &reth(64)].concat(), 0);
    wire.send(AtomicWrite, 2, &reth(8), 8);
    wire.send(FetchAdd, 3, &[0; 28], 0);
    wire.answer(ReadResponseOnly, 1, Some(Syndrome::ACK), 0);
    wire.answer(ReadResponseOnly, 2, Some(Syndrome::ACK), 0);
    let answer = Bth::new(Opcode::rc(AtomicAcknowledge), Qpn::new(0x11), Psn::new(3));
    let packet = wire.build(false, answer, &[0x1f, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 9], &[], 0);
    wire.feed(false, &packet);
    wire.good();
    wire.answer(ReadResponseOnly, 3, Some(Syndrome::ACK), 0);
    wire.bad("answers a FetchAdd");
}

#[test]
fn responses__outside_of_the_requests() {
    let mut wire = Wire::new();
    wire.send(SendOnly, 5, &[], 0);
    wire.ack(6);
    wire.bad("which no request carried");
    let mut wire = Wire::new();
    wire.send(SendOnly, 5, &[], 0);
    wire.ack(5);
    wire.ack(6);
    wire.bad("outside of the requests");
    let mut wire = Wire::new();
    wire.send(SendOnly, 5, &[], 0);
    wire.answer(ReadResponseOnly, 5, Some(Syndrome::ACK), 4);
    wire.bad("nothing asked for it");
}

#[test]
fn responses__naks_are_counted() {
    let mut wire = Wire::new();
    wire.send(SendOnly, 5, &[], 0);
    wire.answer(Acknowledge, 5, Some(Syndrome::RnrNak { timer: 1 }), 0);
    wire.answer(Acknowledge, 5, Some(Syndrome::Nak(NakCode::PsnSequence)), 0);
    let report = wire.good();
    assert_eq!((report.naks, report.rnr_naks), (1, 1));
}

#[test]
fn responses__selective_naks() {
    let nak = Syndrome::Nak(NakCode::PsnSequence);
    let answered = |syndrome, len| {
        let mut wire = Wire::new();
        wire.send(SendOnly, 5, &[], 0);
        wire.answer(Acknowledge, 5, Some(syndrome), len);
        wire
    };
    assert_eq!(answered(nak, 4).good().naks, 1);
    answered(nak, 516).bad("selective acknowledgement");
    answered(nak, 6).bad("selective acknowledgement");
    answered(Syndrome::ACK, 4).bad("payload of 4 bytes, not 0");
}

#[test]
fn responses__of_a_connection_begun_before() {
    let mut wire = Wire::new();
    wire.ack(5);
    assert_eq!(wire.good().unmatched, 1);
}

fn connect(wire: &mut Wire) {
    connect_with(wire, [None; 2]);
}

/// Connects; `ece`: that of the REQ and of the REP.
fn connect_with(wire: &mut Wire, ece: [Option<Ece>; 2]) {
    let gid = to_gid([10, 9, 0, 1].into());
    let req = Req {
        local_comm_id: 1,
        ece: ece[0],
        service_id: ServiceId::tcp(7174),
        ca_guid: 0,
        qkey: 0,
        qpn: Qpn::new(0x11),
        responder_resources: 1,
        initiator_depth: 1,
        remote_response_timeout: 20,
        transport: Transport::Rc,
        flow_control: false,
        starting_psn: Psn::new(500),
        local_response_timeout: 20,
        retry_count: 7,
        pkey: 0xffff,
        path_mtu: PathMtu::Bytes1024,
        rnr_retry_count: 7,
        max_cm_retries: 15,
        srq: false,
        src_gid: gid,
        dst_gid: gid,
        flow_label: 0,
        packet_rate: 0,
        traffic_class: 0,
        hop_limit: 64,
        service_level: 0,
        local_ack_timeout: 17,
        private_data: PrivateData::default(),
    };
    let rep = Rep {
        local_comm_id: 2,
        remote_comm_id: 1,
        ece: ece[1],
        qkey: 0,
        qpn: Qpn::new(0x22),
        eecn: 0,
        starting_psn: Psn::new(100),
        responder_resources: 1,
        initiator_depth: 1,
        target_ack_delay: 0,
        failover: 0,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        ca_guid: 0,
        private_data: PrivateData::default(),
    };
    wire.mad(true, &CmMessage::Req(req), GSI_QKEY);
    wire.mad(false, &CmMessage::Rep(rep), GSI_QKEY);
    wire.mad(false, &CmMessage::Rep(rep), GSI_QKEY);
}

/// Sends a SEND of `len` bytes that carries an acknowledgement.
fn send_carrier(wire: &mut Wire, forth: bool, psn: u32, len: usize, acked: u32) {
    let mut packet = vec![0; Bth::LEN];
    let qpn = if forth { 0x22 } else { 0x11 };
    let pad = len.next_multiple_of(4) - len;
    Bth {
        pad: pad as u8,
        ..Bth::new(Opcode::rc(SendOnly), Qpn::new(qpn), Psn::new(psn))
    }
    .emit(&mut packet);
    packet.resize(packet.len() + len, 7);
    packet.resize(packet.len() + pad + carried::LEN, 0);
    carried::emit(&mut packet, Psn::new(acked));
    let icrc = wire.flow(forth).icrc(&packet, 0);
    packet.extend_from_slice(&icrc.to_le_bytes());
    wire.feed(forth, &packet);
}

const CARRIES: Option<Ece> = Some(Ece {
    vendor: Extensions::VENDOR,
    options: 0x1000_0051,
});

#[test]
fn carried__is_a_request_and_an_acknowledgement() {
    for seen_from_the_beginning in [true, false] {
        let mut wire = Wire::new();
        if seen_from_the_beginning {
            connect_with(&mut wire, [CARRIES; 2]);
        }
        wire.send(SendOnly, 100, &[], 8);
        send_carrier(&mut wire, false, 500, 6, 100);
        send_carrier(&mut wire, true, 101, 5, 500);
        wire.ack(101);
        let report = wire.good();
        assert_eq!(report.carried_acks, 2);
        assert!(report.to_string().contains("acknowledgements in requests"));
    }
}

#[test]
fn carried__of_what_no_request_has() {
    let mut wire = Wire::new();
    connect_with(&mut wire, [CARRIES; 2]);
    wire.send(SendOnly, 100, &[], 8);
    send_carrier(&mut wire, false, 500, 8, 101);
    wire.bad("carries an acknowledgement of");
}

#[test]
fn carried__where_the_ends_did_not_agree_is_payload() {
    for ece in [[None, None], [CARRIES, None], [None, CARRIES]] {
        let mut wire = Wire::new();
        connect_with(&mut wire, ece);
        send_carrier(&mut wire, true, 100, 8, 1234);
        assert_eq!(wire.good().carried_acks, 0);
    }
}

#[test]
fn connection__starts_at_the_psn_of_the_rep() {
    let mut wire = Wire::new();
    connect(&mut wire);
    wire.send(SendOnly, 100, &[], 8);
    wire.ack(100);
    wire.good();
    connect(&mut wire); // the same QPs once more
    wire.send(SendOnly, 100, &[], 8);
    assert_eq!(wire.good().retransmissions, 0);
    let mut wire = Wire::new();
    connect(&mut wire);
    wire.send(SendOnly, 101, &[], 8);
    wire.bad("PSN gap of 1");
    let mut wire = Wire::new();
    connect(&mut wire);
    wire.send(SendOnly, 99, &[], 8);
    wire.bad("before the connection's first");
    let mut wire = Wire::new();
    connect(&mut wire);
    wire.ack(100);
    wire.bad("outside of the requests");
}

#[test]
fn connection__wrong_qkey_and_malformed_mad() {
    let mut wire = Wire::new();
    let rtu = Rtu {
        local_comm_id: 1,
        remote_comm_id: 2,
        private_data: PrivateData::default(),
    };
    wire.mad(true, &CmMessage::Rtu(rtu), 5);
    wire.bad("Q_Key of QP 1 is 0x5");
    let mut wire = Wire::new();
    let packet = wire.build(true, gsi(), &[0x80, 1, 0, 0, 0, 0, 0, 1], &[0; 255], 0);
    wire.feed(true, &packet);
    wire.bad("MAD: 255 bytes");
}

#[test]
fn connection__two_with_the_same_psns() {
    let mut wire = Wire::new();
    wire.send(SendOnly, 0, &[], 0);
    let packet = wire.build(
        true,
        Bth {
            dest_qpn: Qpn::new(0x44),
            ..bth(SendOnly, 0)
        },
        &[],
        &[],
        0,
    );
    wire.feed(true, &packet);
    wire.ack(0); // either could be meant
    wire.send(SendOnly, 1, &[], 0);
    wire.ack(1); // only the first
    wire.good();
    wire.ack(2);
    wire.bad("outside of the requests");
}

#[test]
fn packet__what_is_not_roce() {
    let mut wire = Wire::new();
    let mut ip = Vec::new();
    write_ip_udp(
        &mut ip,
        &Flow {
            dst_port: 53,
            ..wire.flow(true)
        },
        0,
        0,
        b"no ICRC",
    );
    wire.checker.packet(LinkType::RAW, &ip);
    wire.checker.packet(LinkType::ETHERNET, &[0; 60]);
    ip[6] = 0x20;
    wire.checker.packet(LinkType::RAW, &ip);
    let report = wire.checker.report();
    assert_eq!(
        (report.packets, report.roce, report.fragments, report.errors_total),
        (3, 0, 1, 0)
    );
    assert!(!report.passed(), "a capture without RoCEv2 shows nothing");
    wire.feed(true, &[4; 15]);
    wire.checker.packet(LinkType::RAW, &ip[..25]);
    let [short, cut] = wire.reasons()[..] else {
        panic!()
    };
    assert!(
        short.contains("too short") && cut.contains("snap length"),
        "{short}, {cut}"
    );
}

#[test]
fn packet__cnp_is_counted() {
    let mut wire = Wire::new();
    let mut bytes = vec![0; Cnp::LEN];
    Cnp::new(Qpn::new(7)).emit(&mut bytes);
    let icrc = wire.flow(true).icrc(&bytes, 0);
    bytes.extend_from_slice(&icrc.to_le_bytes());
    wire.feed(true, &bytes);
    assert_eq!(wire.good().opcodes[&Cnp::OPCODE], 1);
}

#[test]
fn file__of_scapy_packets() {
    let mut bytes = Vec::new();
    write_section(&mut bytes);
    write_interface(&mut bytes, LinkType::RAW, None);
    for vector in crate::vectors::all() {
        let mut ip = Vec::new();
        write_ip_udp(&mut ip, &vector.flow, vector.ip_id, 0, &vector.packet);
        write_packet(&mut bytes, 0, 0, ip.len() as u32, &ip, None);
    }
    let mut checker = Checker::new();
    checker.file(&bytes).unwrap();
    let report = checker.report();
    assert_eq!(report.roce, crate::vectors::all().len() as u64);
    // The packets form no valid conversation, but no ICRC is wrong.
    assert!(!report.to_string().contains("ICRC"), "{report}");
}

#[test]
fn report__as_shown() {
    let mut wire = Wire::new();
    wire.send(SendOnly, 5, &[], 0);
    wire.send(SendOnly, 7, &[], 0);
    wire.ack(7);
    let expected = "\
packets captured                            3
RoCEv2 packets                              3
trains not yet split                        0
  RC SendOnly                               2
  RC Acknowledge                            1
retransmissions                             0
NAKs                                        0
receiver-not-ready NAKs                     0
errors                                      1
  packet 2: RC SendOnly: PSN gap of 1: psn 0x000007 after psn 0x000005
";
    assert_eq!(wire.checker.report().to_string(), expected);
}

#[test]
fn icrc__of_rxe_is_taken_for_a_flush_and_counted() {
    for v6 in [false, true] {
        let mut wire = Wire {
            ip_id: if v6 { 0 } else { 0x4711 },
            v6,
            ..Wire::new()
        };
        let mut packet = wire.build(
            true,
            bth(Flush, 1),
            &[&[0, 0, 0, 1], reth(64).as_slice()].concat(),
            &[],
            wire.ip_id,
        );
        let end = packet.len() - 4;
        let icrc = wire.flow(true).rxe_flush_icrc(&packet[..end], wire.ip_id);
        packet[end..].copy_from_slice(&icrc.to_le_bytes());
        wire.feed(true, &packet);
        assert_eq!(wire.good().rxe_flushes, 1);
        packet[end] ^= 1;
        wire.feed(true, &packet);
        wire.bad("ICRC");
    }
    // This ICRC is wrong on any other packet.
    let mut wire = Wire::new();
    let mut packet = wire.build(true, bth(SendOnly, 1), &[], &[1; 20], 0);
    let end = packet.len() - 4;
    let icrc = wire.flow(true).rxe_flush_icrc(&packet[..end], 0);
    packet[end..].copy_from_slice(&icrc.to_le_bytes());
    wire.feed(true, &packet);
    wire.bad("ICRC");
}
