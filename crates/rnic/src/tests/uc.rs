//! Unreliable connections. IBTA Vol 1, 9.8.2.

use std::cell::RefCell;
use std::rc::Rc;

use super::util::*;
use crate::*;

/// Packet numbers, counted over all that goes to side 1, that are lost.
type Lost = Rc<RefCell<Vec<usize>>>;

struct Connection {
    pair: Pair,
    qpns: [Qpn; 2],
    lost: Lost,
}

fn byte(i: usize) -> u8 {
    (i * 7 + i / 251) as u8
}

impl Connection {
    fn new() -> Connection {
        let mut pair = Pair::new();
        pair.disable_trains();
        pair.sides[0].memory.with(|m| {
            m[..1 << 16]
                .iter_mut()
                .enumerate()
                .for_each(|(i, b)| *b = byte(i))
        });
        let qpns = pair.uc_qps();
        let lost = Lost::default();
        let (list, mut count) = (lost.clone(), 0);
        pair.deliver = Box::new(move |to, _| {
            count += usize::from(to == 1);
            to != 1 || !list.borrow().contains(&count)
        });
        Connection { pair, qpns, lost }
    }

    fn recv(&mut self, wr_id: u64, offset: u64, length: u32) {
        let side = &mut self.pair.sides[1];
        let sges = side.sge(offset, length);
        let request = RecvRequest { wr_id, sges };
        side.rnic.post_recv(self.pair.now, self.qpns[1], request).unwrap();
    }

    fn try_post(&mut self, operation: Operation, sges: SgeList) -> Result<(), PostError> {
        let request = SendRequest {
            wr_id: 7,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        let (now, qpn) = (self.pair.now, self.qpns[0]);
        self.pair.sides[0].rnic.post_send(now, qpn, request)
    }

    fn send(&mut self, offset: u64, length: u32) {
        let sges = self.pair.sides[0].sge(offset, length);
        self.try_post(Operation::Send { imm: None }, sges).unwrap();
        self.pair.run();
    }

    fn write(&mut self, to: u64, length: u32, imm: Option<u32>) {
        let rkey = self.pair.sides[1].rkey;
        let sges = self.pair.sides[0].sge(0, length);
        self.try_post(
            Operation::Write {
                va: IOVA + to,
                rkey,
                imm,
            },
            sges,
        )
        .unwrap();
        self.pair.run();
    }

    fn completed(&mut self, i: usize) -> Vec<(u64, Status)> {
        let all = self.pair.sides[i].completions();
        all.iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    fn state(&self, i: usize) -> QpState {
        self.pair.sides[i].rnic.query_qp(self.qpns[i]).unwrap().state
    }

    fn counters(&self) -> Counters {
        *self.pair.sides[1].rnic.counters()
    }

    fn received(&self, at: usize, from: usize, length: usize) {
        let expected: Vec<u8> = (from..from + length).map(byte).collect();
        self.pair.sides[1]
            .memory
            .with(|m| assert_eq!(m[at..at + length], expected));
    }

    /// Gives side 1 a packet: opcode, PSN counted from the first, what follows the BTH.
    fn inject(&mut self, opcode: u8, psn: u32, rest: &[u8]) {
        let pad = rest.len().wrapping_neg() & 3;
        let mut packet = vec![opcode, (pad as u8) << 4, 0xff, 0xff, 0];
        packet.extend_from_slice(&self.qpns[1].value().to_be_bytes()[1..]);
        packet.push(0);
        packet.extend_from_slice(&Psn::new(PSN).plus(psn).value().to_be_bytes()[1..]);
        packet.extend_from_slice(rest);
        packet.resize(packet.len() + pad, 0);
        let bytes = self.pair.craft(&packet);
        self.pair.inject(&bytes);
    }
}

const SEND_FIRST: u8 = 0x20;
const SEND_MIDDLE: u8 = 0x21;
const SEND_LAST: u8 = 0x22;
const SEND_ONLY: u8 = 0x24;
const WRITE_FIRST: u8 = 0x26;
const WRITE_MIDDLE: u8 = 0x27;
const WRITE_ONLY: u8 = 0x2a;

fn reth(va: u64, rkey: RKey, length: u32) -> Vec<u8> {
    let mut bytes = va.to_be_bytes().to_vec();
    bytes.extend_from_slice(&rkey.0.to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes
}

#[test]
fn send__of_every_interesting_length_arrives() {
    for length in [0, 1, 3, 1023, 1024, 1025, 2048, 50_000] {
        let mut net = Connection::new();
        net.recv(9, 4096, 1 << 16);
        let sges = net.pair.sides[0].sge(0, length);
        net.try_post(Operation::Send { imm: Some(3) }, sges).unwrap();
        net.pair.run();
        assert_eq!(net.completed(0), [(7, Status::Success)]);
        let received = net.pair.sides[1].completions();
        assert_eq!((received[0].byte_len, received[0].imm), (length, Some(3)));
        assert_eq!(received[0].src_qpn, None);
        net.received(4096, 0, length as usize);
    }
}

#[test]
fn send__needs_no_answer() {
    let mut net = Connection::new();
    net.lost.replace((1..100).collect());
    net.send(0, 5000);
    assert_eq!(net.completed(0), [(7, Status::Success)]);
    assert_eq!(net.pair.sides[0].rnic.poll_timeout(), None);
}

#[test]
fn write__with_and_without_immediate_data() {
    let mut net = Connection::new();
    net.recv(9, 0, 0);
    net.write(4096, 3000, None);
    net.received(4096, 0, 3000);
    assert_eq!(net.completed(1), []);
    net.write(8192, 3000, Some(5));
    let received = net.pair.sides[1].completions();
    assert_eq!(
        (received[0].opcode, received[0].byte_len, received[0].imm),
        (WcOpcode::RecvRdmaWithImm, 3000, Some(5))
    );
}

#[test]
fn window__is_bound_on_the_connection() {
    let mut net = Connection::new();
    let side = &mut net.pair.sides[0];
    let RKey(unbound) = side.rnic.alloc_mw(side.pd, WindowType::Two).unwrap();
    let window = RKey(unbound ^ 1);
    let region = side.lkey;
    let bind = Bind {
        window,
        region,
        va: IOVA,
        length: 64,
        access: Access::REMOTE_WRITE,
    };
    net.try_post(Operation::Bind(bind), SgeList::EMPTY).unwrap();
    net.try_post(Operation::LocalInvalidate { rkey: window }, SgeList::EMPTY)
        .unwrap();
    net.pair.run();
    assert_eq!(net.completed(0), [(7, Status::Success); 2]);
}

#[test]
fn gap__each_packet_of_a_message_drops_it_whole() {
    for lost in 1..=4 {
        let mut net = Connection::new();
        net.recv(1, 4096, 8192);
        net.recv(2, 1 << 15, 8192);
        net.lost.replace(vec![lost]);
        net.send(0, 4096);
        assert_eq!(net.completed(1), [], "packet {lost}");
        // Its receive is there for the next message.
        net.send(100, 3000);
        assert_eq!(net.completed(1), [(1, Status::Success)], "packet {lost}");
        net.received(4096, 100, 3000);
        net.send(200, 10);
        assert_eq!(net.completed(1), [(2, Status::Success)]);
        assert_eq!(net.state(1), QpState::Rts);
    }
}

#[test]
fn gap__between_messages_costs_only_what_was_lost() {
    let mut net = Connection::new();
    for n in 0..3 {
        net.recv(n, 4096 * n, 4096);
    }
    net.lost.replace(vec![2]);
    for n in 0..3 {
        net.send(n * 100, 100);
    }
    assert_eq!(net.completed(1), [(0, Status::Success), (1, Status::Success)]);
    net.received(0, 0, 100);
    net.received(4096, 200, 100);
    assert_eq!(net.counters().out_of_sequence, 1);
}

#[test]
fn gap__a_write_may_be_placed_in_part_and_says_nothing() {
    let mut net = Connection::new();
    net.recv(9, 0, 0);
    net.lost.replace(vec![2]);
    net.write(4096, 3000, Some(1));
    assert_eq!(net.completed(1), []);
    net.received(4096, 0, 1024);
    net.pair.sides[1]
        .memory
        .with(|m| assert!(m[5120..8192].iter().all(|b| *b == 0)));
    assert_eq!(net.counters().dropped_messages, 1);
}

#[test]
fn late__copies_and_stragglers_are_dropped() {
    let mut net = Connection::new();
    net.recv(1, 4096, 100);
    net.recv(2, 8192, 100);
    net.inject(SEND_ONLY, 1, b"second");
    net.inject(SEND_ONLY, 0, b"first");
    net.inject(SEND_ONLY, 1, b"second");
    assert_eq!(net.completed(1), [(1, Status::Success)]);
    assert_eq!(net.counters().duplicate_request, 2);
    // Far behind is far ahead: the sender went on through an outage.
    net.inject(SEND_ONLY, 0x80_0000, b"third");
    assert_eq!(net.completed(1), [(2, Status::Success)]);
}

#[test]
fn sequence__a_message_that_never_began_is_dropped() {
    for opcode in [SEND_MIDDLE, SEND_LAST, WRITE_MIDDLE, 0x28] {
        let mut net = Connection::new();
        net.recv(1, 4096, 4096);
        net.inject(opcode, 0, &[5; 1024]);
        assert_eq!(net.completed(1), [], "{opcode:#x}");
        net.inject(SEND_ONLY, 1, b"good");
        assert_eq!(net.completed(1), [(1, Status::Success)]);
    }
}

#[test]
fn sequence__a_message_inside_of_another_replaces_it() {
    for first in [SEND_FIRST, SEND_ONLY] {
        let mut net = Connection::new();
        net.recv(1, 4096, 4096);
        net.inject(SEND_FIRST, 0, &[1; 1024]);
        net.inject(first, 1, &[2; 1024]);
        if first == SEND_FIRST {
            net.inject(SEND_LAST, 2, &[3; 4]);
        }
        assert_eq!(net.completed(1), [(1, Status::Success)], "{first:#x}");
        net.pair.sides[1].memory.with(|m| assert_eq!(m[4096], 2));
        assert_eq!(net.counters().dropped_messages, 1);
    }
}

#[test]
fn sequence__the_rest_of_another_operation_drops_the_message() {
    let mut net = Connection::new();
    net.recv(1, 4096, 4096);
    net.inject(SEND_FIRST, 0, &[1; 1024]);
    net.inject(WRITE_MIDDLE, 1, &[2; 1024]);
    net.inject(SEND_LAST, 2, &[3; 4]);
    assert_eq!(net.completed(1), []);
    net.inject(SEND_ONLY, 3, b"good");
    assert_eq!(net.completed(1), [(1, Status::Success)]);
}

#[test]
fn length__that_does_not_fit_its_place_drops_the_message() {
    for (opcode, length) in [
        (SEND_FIRST, 1023),
        (SEND_FIRST, 1025),
        (SEND_ONLY, 1025),
        (SEND_FIRST, 0),
    ] {
        let mut net = Connection::new();
        net.recv(1, 4096, 4096);
        net.inject(opcode, 0, &vec![1; length]);
        net.inject(SEND_LAST, 1, &[2; 8]);
        assert_eq!(net.completed(1), [], "{opcode:#x} of {length}");
        assert_eq!((net.counters().dropped_messages, net.state(1)), (1, QpState::Rts));
    }
    // A last packet carries at least a byte.
    let mut net = Connection::new();
    net.recv(1, 4096, 4096);
    net.inject(SEND_FIRST, 0, &[1; 1024]);
    net.inject(SEND_LAST, 1, &[]);
    assert_eq!(net.completed(1), []);
}

#[test]
fn receive__none_posted_drops_the_whole_message() {
    let mut net = Connection::new();
    net.inject(SEND_FIRST, 0, &[1; 1024]);
    net.recv(1, 4096, 4096);
    net.inject(SEND_LAST, 1, &[1; 100]);
    assert_eq!(net.completed(1), []);
    assert_eq!(net.counters().resources_dropped, 1);
    net.inject(SEND_ONLY, 2, b"good");
    assert_eq!(net.completed(1), [(1, Status::Success)]);
}

#[test]
fn receive__none_posted_for_immediate_data_drops_that() {
    let mut net = Connection::new();
    net.write(4096, 2000, Some(1));
    assert_eq!(net.counters().resources_dropped, 1);
    net.recv(1, 0, 0);
    net.write(4096, 2000, Some(2));
    assert_eq!(net.pair.sides[1].completions()[0].imm, Some(2));
}

#[test]
fn receive__too_short_drops_the_message_and_is_kept() {
    let mut net = Connection::new();
    net.recv(1, 4096, 1500);
    net.send(0, 1501);
    assert_eq!((net.completed(1), net.state(1)), (vec![], QpState::Rts));
    assert_eq!(net.counters().dropped_messages, 1);
    net.send(0, 1500);
    assert_eq!(net.completed(1), [(1, Status::Success)]);
}

#[test]
fn receive__of_a_shared_queue_is_kept_for_the_next_message() {
    let mut net = Connection::new();
    let side = &mut net.pair.sides[1];
    let srq = side.rnic.create_srq(SrqInit {
        pd: side.pd,
        max_wr: 4,
        xrc: None,
    });
    let init = QpInit {
        qp_type: QpType::Uc,
        srq,
        ..QpInit::new(side.pd, side.cq)
    };
    let (qpn, sges) = (side.rnic.create_qp(init).unwrap(), side.sge(4096, 4096));
    side.rnic
        .post_srq_recv(srq.unwrap(), RecvRequest { wr_id: 5, sges })
        .unwrap();
    net.pair.connect_uc(1, qpn, net.qpns[0]);
    net.qpns[1] = qpn;
    net.inject(SEND_FIRST, 0, &[1; 1024]);
    net.inject(SEND_ONLY, 2, b"next");
    assert_eq!(net.completed(1), [(5, Status::Success)]);
}

#[test]
fn access__not_granted_drops_the_message_and_keeps_the_qp() {
    let mut net = Connection::new();
    let side = &net.pair.sides[1];
    let (good, end) = (side.rkey, IOVA + MEMORY as u64);
    for (n, head) in [
        reth(IOVA, RKey(good.0 ^ 0x100), 4),
        reth(end - 3, good, 4),
        reth(IOVA - 1, good, 4),
        reth(IOVA, good, 5),
    ]
    .into_iter()
    .enumerate()
    {
        let rest = [head, vec![9; 4]].concat();
        net.inject(WRITE_ONLY, n as u32, &rest);
        assert_eq!(net.counters().dropped_messages, n as u64 + 1);
    }
    // Nor is the rest of it taken.
    let rest = [reth(end - 3, good, 1028), vec![9; 1024]].concat();
    net.inject(WRITE_FIRST, 4, &rest);
    net.inject(0x28, 5, &[9; 4]);
    assert_eq!(net.state(1), QpState::Rts);
    net.pair.sides[1]
        .memory
        .with(|m| assert!(m.iter().all(|b| *b == 0)));
}

#[test]
fn access__not_granted_by_the_qp_drops_the_message() {
    let mut net = Connection::new();
    let none = QpAttributes {
        access: Some(Access::empty()),
        ..Default::default()
    };
    let (now, qpn) = (net.pair.now, net.qpns[1]);
    net.pair.sides[1]
        .rnic
        .modify_qp(now, qpn, QpState::Rts, &none)
        .unwrap();
    net.write(4096, 100, None);
    assert_eq!((net.counters().dropped_messages, net.state(1)), (1, QpState::Rts));
    net.pair.sides[1]
        .memory
        .with(|m| assert!(m.iter().all(|b| *b == 0)));
}

#[test]
fn packets__of_other_transports_and_addresses_are_dropped() {
    let mut net = Connection::new();
    net.recv(1, 4096, 4096);
    net.inject(0x04, 0, b"RC SEND");
    net.inject(0x11, 0, &[0; 4]);
    assert_eq!(net.counters().no_qp, 2);
    let mut packet = vec![SEND_ONLY, 0, 0xff, 0xff, 0];
    packet.extend_from_slice(&net.qpns[1].value().to_be_bytes()[1..]);
    packet.extend_from_slice(&[0, 0xff, 0xff, 0xf0, 1, 2, 3, 4]);
    let path = Path {
        src: [10, 0, 0, 9].into(),
        ..net.pair.path(0, net.pair.sides[1].address)
    };
    packet.extend_from_slice(&path.flow().icrc(&packet.clone(), 0).to_le_bytes());
    let (now, length) = (net.pair.now, packet.len());
    net.pair.sides[1]
        .rnic
        .handle_datagram(now, path.src, path.src_port, &packet, length);
    assert_eq!(net.counters().wrong_peer, 1);
    assert_eq!(net.completed(1), []);
}

#[test]
fn rtr__the_first_packet_tells_of_the_connection() {
    let mut net = Connection::new();
    let (now, qpn, none) = (net.pair.now, net.qpns[1], QpAttributes::default());
    let rnic = &mut net.pair.sides[1].rnic;
    rnic.modify_qp(now, qpn, QpState::Reset, &none).unwrap();
    let attr = QpAttributes {
        access: Some(ALL_ACCESS),
        ..Default::default()
    };
    rnic.modify_qp(now, qpn, QpState::Init, &attr).unwrap();
    let path = net.pair.path(1, net.pair.sides[0].address);
    let attr = QpAttributes {
        path: Some(path),
        path_mtu: Some(1024),
        dest_qpn: Some(net.qpns[0]),
        rq_psn: Some(Psn::new(PSN)),
        ..Default::default()
    };
    net.pair.sides[1]
        .rnic
        .modify_qp(now, qpn, QpState::Rtr, &attr)
        .unwrap();
    net.recv(1, 4096, 100);
    net.send(0, 10);
    assert_eq!(net.completed(1), [(1, Status::Success)]);
    let event = net.pair.sides[1].rnic.poll_event();
    assert_eq!(event, Some(Event::CommunicationEstablished(qpn)));
}

#[test]
fn post_send__refusals() {
    let mut net = Connection::new();
    let (rkey, va) = (net.pair.sides[1].rkey, IOVA);
    let sges = net.pair.sides[0].sge(0, 8);
    let flush = Operation::Flush {
        va,
        rkey,
        length: 8,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    for operation in [
        Operation::SendInvalidate { rkey },
        Operation::Read { va, rkey },
        Operation::CompareSwap {
            va,
            rkey,
            compare: 0,
            swap: 0,
        },
        Operation::FetchAdd { va, rkey, add: 1 },
        Operation::AtomicWrite { va, rkey },
        flush,
    ] {
        let refused = net.try_post(operation.clone(), sges.clone());
        assert_eq!(refused, Err(PostError::Invalid), "{operation:?}");
    }
    let none = QpAttributes::default();
    let (now, qpn) = (net.pair.now, net.qpns[0]);
    net.pair.sides[0]
        .rnic
        .modify_qp(now, qpn, QpState::Reset, &none)
        .unwrap();
    let refused = net.try_post(Operation::Send { imm: None }, sges);
    assert_eq!(refused, Err(PostError::WrongState));
}

#[test]
fn post_send__no_more_than_the_queue_holds() {
    let mut net = Connection::new();
    let sges = net.pair.sides[0].sge(0, 8);
    for n in 0..=128 {
        let result = net.try_post(Operation::Send { imm: None }, sges.clone());
        let expected = if n < 128 {
            Ok(())
        } else {
            Err(PostError::QueueFull)
        };
        assert_eq!(result, expected, "request {n}");
    }
}

#[test]
fn sqe__in_the_middle_of_a_message_drops_it_at_the_peer() {
    let mut net = Connection::new();
    net.recv(1, 4096, 8192);
    let side = &net.pair.sides[0];
    let half = [Sge::new(IOVA, 2048, side.lkey), Sge::new(IOVA, 2048, LKey(0x55))];
    let good = side.sge(0, 100);
    let send = Operation::Send { imm: None };
    net.try_post(send.clone(), SgeList::from(&half[..])).unwrap();
    net.try_post(send.clone(), good.clone()).unwrap();
    net.pair.run();
    assert_eq!(
        net.completed(0),
        [(7, Status::LocalProtection), (7, Status::Flushed)]
    );
    assert_eq!(net.state(0), QpState::Sqe);
    let (now, qpn) = (net.pair.now, net.qpns[0]);
    net.pair.sides[0]
        .rnic
        .modify_qp(now, qpn, QpState::Rts, &QpAttributes::default())
        .unwrap();
    net.try_post(send, good).unwrap();
    net.pair.run();
    assert_eq!(net.completed(1), [(1, Status::Success)]);
    net.received(4096, 0, 100);
}

#[test]
fn sqe__a_bind_that_fails_leads_there() {
    let mut net = Connection::new();
    let bind = Bind {
        window: RKey(0x1234_5600),
        region: net.pair.sides[0].lkey,
        va: IOVA,
        length: 8,
        access: Access::REMOTE_READ,
    };
    net.try_post(Operation::Bind(bind), SgeList::EMPTY).unwrap();
    net.pair.run();
    assert_eq!(net.completed(0), [(7, Status::MemoryBind)]);
    assert_eq!(net.state(0), QpState::Sqe);
}

#[test]
fn sqd__ends_the_message_under_way_then_tells() {
    let mut net = Connection::new();
    net.recv(1, 0, 1 << 20);
    net.recv(2, 0, 1 << 20);
    let side = &mut net.pair.sides[0];
    let long = side.sge(0, 200_000);
    let send = Operation::Send { imm: None };
    net.try_post(send.clone(), long.clone()).unwrap();
    net.try_post(send, long).unwrap();
    // One turn's worth leaves.
    let (now, qpn, none) = (net.pair.now, net.qpns[0], QpAttributes::default());
    let mut buf = TransmitBuf::new(10_000, true);
    let rnic = &mut net.pair.sides[0].rnic;
    assert!(rnic.poll_transmit(now, &mut buf, true));
    rnic.modify_qp(now, qpn, QpState::Sqd, &none).unwrap();
    assert_eq!(rnic.poll_event(), None);
    net.pair.run();
    let rnic = &mut net.pair.sides[0].rnic;
    assert_eq!(rnic.poll_event(), Some(Event::SqDrained(qpn)));
    assert_eq!(rnic.query_qp(qpn).unwrap().send_outstanding, 1);
    assert_eq!(net.completed(0), [(7, Status::Success)]);
}
