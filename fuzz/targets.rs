//! What is fuzzed: one function a parser. Each panics when something is wrong.
//!
//! Two programs share this file: the coverage-guided targets in `fuzz_targets/`, and `crates/capture/tests/fuzz.rs`, which runs
//! on stable Rust in every test run.
#![allow(dead_code, reason = "each coverage-guided target uses one of them")]

use std::net::IpAddr;

use rdmux_capture::check::Checker;
use rdmux_capture::pcapng::{self, LinkType, Reader};
use rdmux_wire::cm::{self, CmMessage, IpAddressing, MAD_LEN};
use rdmux_wire::dsm;
use rdmux_wire::node::{Completion, DESCRIPTOR_BYTES, Descriptor, Work, WorkData, control, mux, peer};
use rdmux_wire::nvme_tcp::{DataLayout, Digests, Flags};
use rdmux_wire::push;
use rdmux_wire::roce::icrc::{Flow, IdBasis};
use rdmux_wire::roce::sack::Sack;
use rdmux_wire::roce::{Bth, ICRC_LEN, Packet, carried};
use rdmux_wire::rsocket::{self, ConnData, DatagramHeader, UdpHeader};
use rdmux_wire::{nvme, nvme_rdma, nvme_tcp};

fn flow(v6: bool, forth: bool) -> Flow {
    let [a, b]: [IpAddr; 2] = if v6 {
        [
            [0xfd00, 0, 0, 0, 0, 0, 0, 1].into(),
            [0xfd00, 0, 0, 0, 0, 0, 0, 2].into(),
        ]
    } else {
        [[10, 9, 0, 1].into(), [10, 9, 0, 2].into()]
    };
    let (src, dst) = if forth { (a, b) } else { (b, a) };
    Flow {
        src,
        dst,
        src_port: 0xc001,
        dst_port: 4791,
    }
}

/// A UDP payload: accessors do not panic, agree with the opcode's headers, and what is emitted parses to the same.
pub(crate) fn roce(input: &[u8]) {
    let Ok(packet) = Packet::parse(input) else { return };
    let ext = packet.bth.opcode.ext();
    assert_eq!(
        Bth::LEN + ext.len() + packet.payload().len() + usize::from(packet.bth.pad) + ICRC_LEN,
        input.len()
    );
    let mut emitted = input.to_vec();
    packet.bth.emit(&mut emitted);
    let at = |offset: usize| Bth::LEN + offset;
    if let Some(deth) = packet.deth() {
        deth.emit(&mut emitted[at(0)..]);
    }
    if let Some(feth) = packet.feth() {
        let xrc = if packet.xrc_srqn().is_some() { 4 } else { 0 };
        feth.emit(&mut emitted[at(xrc)..]);
    }
    if let Some(reth) = packet.reth() {
        let before = 4 * (usize::from(packet.xrc_srqn().is_some()) + usize::from(packet.feth().is_some()));
        reth.emit(&mut emitted[at(before)..]);
    }
    if let Some(aeth) = packet.aeth() {
        aeth.emit(&mut emitted[at(0)..]);
    }
    if let Some(atomic) = packet.atomic() {
        let before = if packet.xrc_srqn().is_some() { 4 } else { 0 };
        atomic.emit(&mut emitted[at(before)..]);
    }
    let again = Packet::parse(&emitted).expect("what was emitted parses");
    assert_eq!(again.bth, packet.bth);
    assert_eq!(
        (again.reth(), again.deth(), again.aeth(), again.feth()),
        (packet.reth(), packet.deth(), packet.aeth(), packet.feth())
    );
    assert_eq!(
        (again.atomic(), again.atomic_ack(), again.imm()),
        (packet.atomic(), packet.atomic_ack(), packet.imm())
    );
    assert_eq!(
        (again.invalidate(), again.xrc_srqn(), again.icrc()),
        (packet.invalidate(), packet.xrc_srqn(), packet.icrc())
    );
    if let Some(Ok(sack)) = Sack::of(&packet) {
        let mut bytes = packet.payload().to_vec();
        Sack::emit((1..=sack.last()).filter(|n| sack.holds(*n)), &mut bytes);
        assert_eq!(
            (bytes.as_slice(), sack.count()),
            (
                packet.payload(),
                (1..=4096).filter(|n| sack.holds(*n)).count() as u32
            )
        );
    }
    let mut carrier = packet;
    if carrier.take_carried().is_ok()
        && let Some(psn) = carrier.carried()
    {
        let len = carrier.payload().len() + carried::LEN;
        assert_eq!(len, packet.payload().len());
        let mut bytes = input.to_vec();
        let end = bytes.len() - ICRC_LEN;
        bytes[end - carried::LEN..end].fill(0);
        carried::emit(&mut bytes[..end], psn);
        assert_eq!(bytes, input);
        let kept = carrier.to_local();
        let kept = Packet::parse_local(&kept).expect("what is kept parses");
        assert_eq!((kept.payload(), kept.carried()), (carrier.payload(), None));
    }
    if input.len() <= 65_507 {
        let body = &input[..input.len() - ICRC_LEN];
        let id = u16::from_be_bytes([input[10], input[11]]);
        let difference = flow(false, true).icrc(body, id) ^ flow(false, true).icrc(body, 0);
        assert_eq!(IdBasis::new(input.len()).solve(difference), Some(id));
    }
}

/// A MAD: parse, emit and parse again give the same message, and its destination agrees with it.
pub(crate) fn cm(input: &[u8]) {
    let destination = cm::destination(input);
    if let Ok((tid, message)) = CmMessage::parse(input) {
        assert!(destination.is_some());
        let mut mad = [0xee; MAD_LEN];
        message.emit(tid, &mut mad);
        assert_eq!(CmMessage::parse(&mad), Ok((tid, message)));
        assert_eq!(cm::destination(&mad), destination);
        let private: &[u8] = match &message {
            CmMessage::Req(req) => req.private_data.bytes(),
            CmMessage::SidrReq(req) => req.private_data.bytes(),
            _ => return,
        };
        if let Ok(addressing) = IpAddressing::parse(private) {
            let mut bytes = [0xee; IpAddressing::LEN];
            addressing.emit(&mut bytes);
            assert_eq!(IpAddressing::parse(&bytes), Ok(addressing));
        }
    }
}

/// PDUs, commands and data of NVMe hosts and controllers: a value that parses is emitted to the same.
pub(crate) fn nvme(input: &[u8]) {
    for digests in [Digests::empty(), Digests::HEADER, Digests::DATA, Digests::all()] {
        if input.len() >= nvme_tcp::COMMON_LEN
            && let Ok(common) = nvme_tcp::Common::parse(input, digests)
        {
            assert!(common.data_offset + common.data_len + common.digests.data_len() == common.pdu_len);
            assert!(common.data_offset <= 255 && common.data_offset >= common.kind.header_len());
            if input.len() >= common.data_offset
                && let Ok(header) = nvme_tcp::Header::parse(common.kind, input)
            {
                let mut emitted = [0; 256];
                header.emit(Flags::empty(), DataLayout::default(), &mut emitted);
                assert_eq!(nvme_tcp::Header::parse(common.kind, &emitted), Ok(header));
            }
        }
    }
    if let Ok(request) = nvme_rdma::Request::parse(input) {
        assert_eq!(nvme_rdma::Request::parse(&request.emit()), Ok(request));
    }
    if let Ok(accept) = nvme_rdma::Accept::parse(input) {
        assert_eq!(nvme_rdma::Accept::parse(&accept.emit()), Ok(accept));
    }
    if let Ok(reject) = nvme_rdma::Reject::parse(input) {
        assert_eq!(nvme_rdma::Reject::parse(&reject.emit()), Ok(reject));
    }
    if let Ok((transaction, message)) = nvme::AuthMessage::parse(input) {
        let emitted = message.emit(transaction);
        assert_eq!(nvme::AuthMessage::parse(&emitted), Ok((transaction, message)));
    }
    if let Ok(sqe) = nvme::Sqe::parse(input) {
        if let Ok(sgl) = sqe.sgl() {
            let mut emitted = [0; nvme::Sgl::LEN];
            sgl.emit(&mut emitted);
            assert_eq!(nvme::Sgl::parse(&emitted), Ok(sgl));
        }
        let _ = (
            nvme::Rw::parse(&sqe),
            nvme::Connect::parse(&sqe),
            nvme::Property::parse(&sqe),
        );
    }
    if let Ok(data) = nvme::ConnectData::parse(input) {
        let mut emitted = [0; nvme::CONNECT_DATA_LEN];
        data.emit(&mut emitted);
        assert_eq!(nvme::ConnectData::parse(&emitted), Ok(data));
    }
    if let Ok(entry) = nvme::DiscoveryEntry::parse(input) {
        let mut emitted = [0; nvme::DISCOVERY_ENTRY_LEN];
        entry.emit(&mut emitted);
        assert_eq!(nvme::DiscoveryEntry::parse(&emitted), Ok(entry));
    }
    let _ = nvme::IdentifyController::parse(input);
    let _ = nvme::IdentifyNamespace::parse(input);
    let _ = nvme::NamespaceIdentifiers::parse(input);
}

/// A push message: there is one way to write each, so emitting gives back the input.
pub(crate) fn push(input: &[u8]) {
    push_message(input);
    if input.len() >= push::HEADER_LEN {
        // With a length that is right, so that a changed body is looked at.
        let mut input = input.to_vec();
        let length = input.len() as u32;
        input[4..8].copy_from_slice(&length.to_be_bytes());
        push_message(&input);
    }
}

fn push_message(input: &[u8]) {
    if let Ok((request, message)) = push::Message::parse(input) {
        let mut bytes = Vec::new();
        message.emit(request, &mut bytes);
        assert_eq!(bytes, input);
    }
}

/// A message between a node and an application: there is one way to write each, so emitting gives back the input.
pub(crate) fn node_control(input: &[u8]) {
    if let Ok((request, message)) = control::Message::parse(input) {
        let mut bytes = Vec::new();
        message.emit(request, &mut bytes);
        assert_eq!(bytes, input);
    }
}

/// A message of a shared queue pair: there is one way to write each, so emitting gives back the input.
pub(crate) fn node_mux(input: &[u8]) {
    let Ok((header, body)) = mux::Header::parse(input) else {
        return;
    };
    let mut emitted = [0xee; mux::HEADER_LEN];
    header.emit(&mut emitted);
    assert_eq!(emitted, input[..mux::HEADER_LEN]);
    if header.kind == mux::Kind::Receives
        && let Ok(receives) = mux::Receive::parse_all(header.length, body)
    {
        let mut emitted = Vec::new();
        receives.iter().for_each(|receive| receive.emit(&mut emitted));
        assert_eq!(emitted, body);
    }
}

/// What the nodes of a distributed shared memory send and read: messages of all kinds but those of synchronisation, a greeting, a frame, and the
/// counts and runs of a log. There is one way to write each, so emitting gives back the input.
pub(crate) fn dsm(input: &[u8]) {
    if let Ok(message) = dsm::Message::parse(input) {
        let mut bytes = [0xee; dsm::MESSAGE_LEN];
        message.emit(&mut bytes);
        assert_eq!(bytes, input);
    }
    if let Ok(message) = dsm::heap::Heap::parse(input) {
        assert!(dsm::heap::Heap::has_kind(input[0]));
        assert_eq!(message.emit(), input);
    }
    if let Ok(message) = dsm::joining::Joining::parse(input) {
        assert!(dsm::joining::Joining::has_kind(input[0]));
        assert_eq!(message.emit(), input);
    }
    if let Ok(message) = dsm::membership::Membership::parse(input) {
        assert!(dsm::membership::Membership::has_kind(input[0]));
        assert_eq!(message.emit(), input);
    }
    if let Ok(hello) = dsm::joining::Hello::parse(input) {
        let bytes = hello.emit();
        assert_eq!(dsm::joining::Hello::parse(&bytes), Ok(hello));
        // The reserved bytes behind another version are not read.
        if hello.version == dsm::joining::VERSION {
            assert_eq!(bytes, input[..dsm::joining::HELLO_LEN]);
        }
        assert_eq!(bytes[..10], input[..10]);
        assert_eq!(bytes[12..], input[12..dsm::joining::HELLO_LEN]);
    }
    if let Ok(frame) = dsm::frame::Frame::parse(input) {
        assert_eq!(frame.emit(), input);
        assert!(frame.message.is_none_or(|message| message[0] != 0));
    }
    if let Ok(header) = dsm::notice::Header::parse(input) {
        let counts = [header.begun, header.ended].map(u64::to_le_bytes).concat();
        assert_eq!(counts, input[..dsm::notice::HEADER_LEN]);
    }
    if let Some(bytes) = input.first_chunk()
        && let Ok(run) = dsm::notice::Run::parse(*bytes)
    {
        assert_eq!(run.emit(), *bytes);
    }
}

/// A message between two nodes: there is one way to write each, so emitting gives back the input.
pub(crate) fn node_peer(input: &[u8]) {
    if let Ok((request, message)) = peer::Message::parse(input) {
        let mut bytes = Vec::new();
        message.emit(request, &mut bytes);
        assert_eq!(bytes, input);
    }
}

/// A capture file: what is read from it can be written and read again, and it can be checked.
pub(crate) fn capture(input: &[u8]) {
    let Ok(reader) = Reader::new(input) else { return };
    for captured in reader.flatten() {
        let _ = pcapng::ip_udp(captured.link, captured.data);
        let mut bytes = Vec::new();
        pcapng::write_section(&mut bytes);
        pcapng::write_interface(&mut bytes, captured.link, None);
        let pcapng::Captured {
            link,
            timestamp_ns,
            original_len,
            data,
            comment,
        } = captured;
        pcapng::write_packet(&mut bytes, 0, timestamp_ns, original_len, data, comment);
        let again = Reader::new(&bytes).expect("a capture").next();
        assert_eq!(
            again,
            Some(Ok(pcapng::Captured {
                link,
                timestamp_ns,
                original_len,
                data,
                comment
            }))
        );
    }
    let mut checker = Checker::new();
    let _ = checker.file(input);
    let _ = checker.report().to_string();
}

/// Packets between two hosts, each behind three bytes: flags and length. The ICRC is put right here, so that what lies behind
/// that check is reached.
///
/// Flags: 1 to the other host, 2 IPv6, 4 joined to the packet before into one datagram.
pub(crate) fn check(input: &[u8]) {
    let mut checker = Checker::new();
    let (mut rest, mut train, mut index) = (input, Vec::new(), 0);
    while let [flags, high, low, tail @ ..] = rest {
        let len = usize::from(u16::from_be_bytes([*high, *low]) % 5_000).min(tail.len());
        let (packet, behind) = tail.split_at(len);
        rest = behind;
        if flags & 4 == 0 || train.len() + len > 60_000 {
            train.clear();
            index = 0;
        }
        let flow = flow(flags & 2 != 0, flags & 1 == 0);
        train.extend_from_slice(packet);
        if packet.len() >= Bth::LEN {
            train.extend_from_slice(&flow.icrc(packet, index).to_le_bytes());
        }
        index += 1;
        let mut ip = Vec::new();
        pcapng::write_ip_udp(&mut ip, &flow, 0, 0, &train);
        checker.packet(LinkType::RAW, &ip);
    }
    let report = checker.report();
    assert!(report.errors.len() as u64 <= report.errors_total);
    let _ = report.to_string();
}

/// What an rsocket hears when it connects, and the headers of its datagrams: what is emitted parses to the same.
pub(crate) fn rsocket(input: &[u8]) {
    if let Ok(data) = ConnData::parse(input) {
        let mut emitted = [0; ConnData::LEN];
        data.emit(&mut emitted);
        assert_eq!(ConnData::parse(&emitted), Ok(data));
    }
    if let Ok(header) = DatagramHeader::parse(input) {
        assert!(header.bytes() <= input.len());
        let mut emitted = [0; DatagramHeader::LEN_MAX];
        header.emit(&mut emitted);
        assert_eq!(DatagramHeader::parse(&emitted), Ok(header));
    }
    if let Ok(header) = UdpHeader::parse(input) {
        assert!(header.bytes() <= input.len());
        let mut emitted = [0; UdpHeader::LEN_MAX];
        header.emit(&mut emitted);
        assert_eq!(UdpHeader::parse(&emitted), Ok(header));
    }
    if let Some(imm) = input.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
        && let Ok(message) = rsocket::ImmData::parse(imm)
    {
        assert_eq!(rsocket::ImmData::parse(message.imm()), Ok(message));
    }
}

/// Descriptors of the rings between an application and the node: what is emitted parses to the same, with the same data.
pub(crate) fn node(input: &[u8]) {
    let Some(first) = input.first_chunk::<DESCRIPTOR_BYTES>() else {
        return;
    };
    if let Ok(completion) = Completion::parse(first) {
        let mut emitted: Descriptor = [0xee; DESCRIPTOR_BYTES];
        completion.emit(&mut emitted);
        assert_eq!(Completion::parse(&emitted), Ok(completion));
    }
    let Ok(work) = Work::parse(first) else { return };
    // With too few bytes, there is no data and no panic.
    let _ = (work.elements(input).count(), work.inline(input).len());
    let mut bytes = input.to_vec();
    bytes.resize(work.descriptors() * DESCRIPTOR_BYTES, 0);
    let (elements, inline): (Vec<_>, _) = (work.elements(&bytes).collect(), work.inline(&bytes));
    let mut emitted = vec![0xee; bytes.len()];
    work.emit(emitted.first_chunk_mut().expect("a descriptor"));
    match work.data {
        WorkData::Elements(count) => {
            assert_eq!((elements.len(), inline), (usize::from(count), &[][..]));
            work.put_elements(&mut emitted, &elements);
        }
        WorkData::Inline(count) => {
            assert_eq!((inline.len(), elements.len()), (usize::from(count), 0));
            work.put_inline(&mut emitted, inline);
        }
    }
    let again = Work::parse(emitted.first_chunk().expect("a descriptor"));
    assert_eq!(again, Ok(work));
    assert!(work.elements(&emitted).eq(elements));
    assert_eq!(work.inline(&emitted), inline);
}
