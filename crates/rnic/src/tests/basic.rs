//! Operations between two devices, without and with loss.

use rdmux_wire::roce::{Aeth, Bth, NakCode, Opcode, Operation as Op, Reth, Syndrome};

use super::util::*;
use crate::*;

fn ok(pair: &mut Pair, side: usize) -> Vec<WorkCompletion> {
    let completions = pair.sides[side].completions();
    for wc in &completions {
        assert_eq!(wc.status, Status::Success, "{wc:?}");
    }
    completions
}

#[test]
fn write__of_every_interesting_length_lands_where_it_should() {
    for length in [0usize, 1, 3, 8, 1023, 1024, 1025, 2048, 100_000, 1 << 20] {
        let mut pair = Pair::new();
        pair.sides[0]
            .memory
            .with(|m| m[..length].copy_from_slice(&pattern(length)));
        pair.write(0, 4096, length as u32);
        pair.run();
        assert_eq!(ok(&mut pair, 0).len(), 1, "length {length}");
        pair.sides[1].memory.with(|m| {
            assert_eq!(&m[4096..4096 + length], pattern(length), "length {length}");
            assert!(
                m[..4096].iter().chain(&m[4096 + length..]).all(|b| *b == 0),
                "only there, length {length}"
            );
        });
    }
}

#[test]
fn read__of_every_interesting_length_brings_the_bytes() {
    for length in [0usize, 1, 8, 1024, 1025, 100_000, 1 << 20] {
        let mut pair = Pair::new();
        pair.sides[1]
            .memory
            .with(|m| m[64..64 + length].copy_from_slice(&pattern(length)));
        let operation = Operation::Read {
            va: IOVA + 64,
            rkey: pair.sides[1].rkey,
        };
        let sges = pair.sides[0].sge(128, length as u32);
        pair.post(0, operation, sges);
        pair.run();
        assert_eq!(ok(&mut pair, 0)[0].byte_len as usize, length);
        pair.sides[0]
            .memory
            .with(|m| assert_eq!(&m[128..128 + length], pattern(length), "length {length}"));
    }
}

#[test]
fn send__fills_the_receive_and_carries_immediate_data() {
    let mut pair = Pair::new();
    pair.sides[0]
        .memory
        .with(|m| m[..5000].copy_from_slice(&pattern(5000)));
    let sges = pair.sides[1].sge(0, 6000);
    let (now, qpn) = (pair.now, pair.sides[1].qpn);
    pair.sides[1]
        .rnic
        .post_recv(now, qpn, RecvRequest { wr_id: 9, sges })
        .unwrap();
    let sges = pair.sides[0].sge(0, 5000);
    pair.post(0, Operation::Send { imm: Some(0xabcd) }, sges);
    pair.run();
    assert_eq!(ok(&mut pair, 0).len(), 1);
    let received = ok(&mut pair, 1);
    assert_eq!(received.len(), 1);
    assert_eq!(
        (received[0].wr_id, received[0].byte_len, received[0].imm),
        (9, 5000, Some(0xabcd))
    );
    pair.sides[1]
        .memory
        .with(|m| assert_eq!(&m[..5000], pattern(5000)));
}

#[test]
fn send__without_receive_waits_and_then_arrives() {
    let mut pair = Pair::new();
    let sges = pair.sides[0].sge(0, 3000);
    pair.post(0, Operation::Send { imm: None }, sges);
    for _ in 0..20 {
        pair.step();
    }
    assert!(pair.sides[0].rnic.counters().rcvd_rnr_err > 0);
    assert!(pair.sides[0].completions().is_empty());
    let sges = pair.sides[1].sge(0, 3000);
    let (now, qpn) = (pair.now, pair.sides[1].qpn);
    pair.sides[1]
        .rnic
        .post_recv(now, qpn, RecvRequest { wr_id: 9, sges })
        .unwrap();
    pair.run();
    assert_eq!(ok(&mut pair, 0).len(), 1);
    assert_eq!(ok(&mut pair, 1).len(), 1);
}

#[test]
fn flush__global_completes_and_persistent_is_refused_on_volatile_memory() {
    let mut pair = Pair::new();
    let flush = |rkey, placement| Operation::Flush {
        va: IOVA,
        rkey,
        length: 4096,
        placement,
        selectivity: Selectivity::Range,
    };
    let rkey = pair.sides[1].rkey;
    pair.post(0, flush(rkey, Placement::GLOBAL), SgeList::EMPTY);
    pair.run();
    assert_eq!(ok(&mut pair, 0)[0].opcode, WcOpcode::Flush);
    pair.post(0, flush(rkey, Placement::PERSISTENT), SgeList::EMPTY);
    pair.run();
    assert_eq!(pair.sides[0].completions()[0].status, Status::RemoteAccess);
}

#[test]
fn completions__come_in_the_order_of_posting() {
    let mut pair = Pair::new();
    let rkey = pair.sides[1].rkey;
    for i in 0..50u64 {
        let operation = match i % 3 {
            0 => Operation::Write {
                va: IOVA + i * 5000,
                rkey,
                imm: None,
            },
            1 => Operation::Read {
                va: IOVA + i * 5000,
                rkey,
            },
            _ => Operation::Flush {
                va: IOVA,
                rkey,
                length: 10,
                placement: Placement::GLOBAL,
                selectivity: Selectivity::MemoryRegion,
            },
        };
        let sges = if i % 3 == 2 {
            SgeList::EMPTY
        } else {
            pair.sides[0].sge(i * 5000, 5000)
        };
        let request = SendRequest {
            wr_id: i,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        let (now, qpn) = (pair.now, pair.sides[0].qpn);
        pair.sides[0].rnic.post_send(now, qpn, request).unwrap();
    }
    pair.run();
    let order: Vec<u64> = ok(&mut pair, 0).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(order, (0..50).collect::<Vec<_>>());
}

#[test]
fn loss__of_a_sixth_of_all_datagrams_changes_nothing_but_the_time() {
    let mut pair = Pair::new();
    let mut n = 1u32;
    pair.deliver = Box::new(move |_, _| {
        n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        !(n >> 16).is_multiple_of(6)
    });
    let rkey = pair.sides[1].rkey;
    pair.sides[0]
        .memory
        .with(|m| m[..1 << 20].copy_from_slice(&pattern(1 << 20)));
    pair.write(0, 0, 1 << 20);
    let sges = pair.sides[0].sge(2 << 20, 1 << 20);
    pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
    pair.run();
    assert_eq!(ok(&mut pair, 0).len(), 2);
    assert!(pair.sides[0].rnic.counters().retransmitted_packets > 0);
    pair.sides[0]
        .memory
        .with(|m| assert_eq!(&m[2 << 20..3 << 20], pattern(1 << 20)));
}

#[test]
fn retry__ends_when_the_peer_is_silent_and_the_rest_is_flushed() {
    let mut pair = Pair::new();
    pair.deliver = Box::new(|_, _| false);
    pair.write(0, 0, 100);
    pair.write(0, 0, 100);
    pair.run();
    let completions = pair.sides[0].completions();
    let statuses: Vec<Status> = completions.iter().map(|wc| wc.status).collect();
    assert_eq!(statuses, [Status::RetryExceeded, Status::Flushed]);
    let qpn = pair.sides[0].qpn;
    assert_eq!(pair.sides[0].rnic.query_qp(qpn).unwrap().state, QpState::Error);
}

#[test]
fn repeat_last_ack__reaches_a_peer_that_lost_the_first() {
    let mut pair = Pair::new();
    pair.disable_trains();
    let mut answers = 0;
    pair.deliver = Box::new(move |to, _| {
        answers += usize::from(to == 0);
        to == 1 || answers == 3
    });
    pair.recv(1, 9, 0, 100);
    let sges = pair.sides[0].sge(0, 100);
    pair.post(0, Operation::Send { imm: None }, sges);
    while ok(&mut pair, 1).is_empty() {
        pair.step();
    }
    let (now, qpn) = (pair.now, pair.sides[1].qpn);
    pair.sides[1].rnic.repeat_last_ack(now, qpn);
    pair.step();
    pair.sides[1].rnic.destroy_qp(qpn);
    pair.run();
    assert_eq!(ok(&mut pair, 0).len(), 1);
}

#[test]
fn repeat_last_ack__says_nothing_where_no_message_has_ended() {
    let mut pair = Pair::new();
    let sges = pair.sides[0].sge(0, 100);
    pair.post(0, Operation::Send { imm: None }, sges);
    for _ in 0..4 {
        pair.step();
    }
    let (now, qpn) = (pair.now, pair.sides[1].qpn);
    pair.sides[1].rnic.repeat_last_ack(now, qpn);
    assert!(
        !pair.sides[1].rnic.has_transmit(true),
        "of a SEND that found no receive"
    );
}

#[test]
fn retire_qp__is_for_good() {
    let mut pair = Pair::new();
    let (now, qpn) = (pair.now, pair.sides[0].qpn);
    let rnic = &mut pair.sides[0].rnic;
    rnic.retire_qp(now, qpn);
    for to in [QpState::Reset, QpState::Init, QpState::Error] {
        let modified = rnic.modify_qp(now, qpn, to, &QpAttributes::default());
        assert_eq!(modified, Err(ModifyError::NoQp));
        assert_eq!(rnic.query_qp(qpn).unwrap().state, QpState::Reset);
    }
}

#[test]
fn repeat_last_ack__is_not_taken_for_the_data_of_a_read() {
    let mut pair = Pair::new();
    pair.deliver = Box::new(|to, _| to == 1);
    let operation = Operation::Read {
        va: IOVA,
        rkey: pair.sides[1].rkey,
    };
    let sges = pair.sides[0].sge(0, 3000);
    pair.post(0, operation, sges);
    for _ in 0..4 {
        pair.step();
    }
    let (now, qpn) = (pair.now, pair.sides[1].qpn);
    pair.deliver = Box::new(|_, _| true);
    pair.sides[1].rnic.repeat_last_ack(now, qpn);
    assert!(
        !pair.sides[1].rnic.has_transmit(true),
        "of what a READ was the last of"
    );
    pair.sides[1].rnic.destroy_qp(qpn);
    pair.run();
    let statuses: Vec<Status> = pair.sides[0].completions().iter().map(|wc| wc.status).collect();
    assert_eq!(statuses, [Status::RetryExceeded]);
}

#[test]
fn deregistration__stops_a_read_under_way() {
    let mut pair = Pair::new();
    let operation = Operation::Read {
        va: IOVA,
        rkey: pair.sides[1].rkey,
    };
    let sges = pair.sides[0].sge(0, 1 << 20);
    pair.post(0, operation, sges);
    pair.step();
    let lkey = pair.sides[1].lkey;
    let memory = pair.sides[1].rnic.dereg_mr(lkey).unwrap();
    assert_eq!(memory.map(|m| m.len()), Some(MEMORY as u64));
    let again = pair.sides[1].rnic.dereg_mr(lkey);
    assert_eq!(again.unwrap_err(), RegisterError::NoRegion);
    pair.run();
    assert_eq!(pair.sides[0].completions()[0].status, Status::RemoteAccess);
}

#[test]
fn dealloc_pd__returns_the_memories_of_its_own_regions() {
    let mut pair = Pair::new();
    let side = &mut pair.sides[0];
    let pd = side.rnic.alloc_pd();
    let memory: std::sync::Arc<dyn Memory> = std::sync::Arc::new(HeapMemory::new(64));
    let spec = RegionSpec {
        memory: memory.clone(),
        memory_offset: 0,
        length: 64,
        iova: 0,
        access: ALL_ACCESS,
    };
    side.rnic.reg_mr(pd, spec).unwrap();
    let returned = side.rnic.dealloc_pd(pd);
    assert_eq!(returned.len(), 1);
    assert!(std::sync::Arc::ptr_eq(&returned[0], &memory));
    assert_eq!(std::sync::Arc::strong_count(&memory), 2, "the device keeps none");
    assert_eq!(side.rnic.object_counts().1, 1, "the other domain's stays");
}

#[test]
fn overrun__of_a_completion_queue_fails_all_of_its_qps_and_no_other() {
    let mut pair = Pair::new();
    let (first, old_cq) = (pair.sides[0].qpn, pair.sides[0].cq);
    let cq = pair.sides[0].rnic.create_cq(2);
    pair.sides[0].cq = cq;
    let (busy, _) = pair.second_qps();
    let (idle, _) = pair.second_qps();
    let now = pair.now;
    for wr_id in 0..4 {
        let request = SendRequest {
            wr_id,
            operation: Operation::Write {
                va: IOVA,
                rkey: pair.sides[1].rkey,
                imm: None,
            },
            sges: pair.sides[0].sge(0, 8),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        pair.sides[0].rnic.post_send(now, busy, request).unwrap();
    }
    pair.sides[0].rnic.arm_cq(cq, Arm::Next);
    pair.run();
    let rnic = &mut pair.sides[0].rnic;
    let state = |rnic: &Rnic, qpn| rnic.query_qp(qpn).unwrap().state;
    assert_eq!(state(rnic, busy), QpState::Error);
    assert_eq!(state(rnic, idle), QpState::Error);
    assert_eq!(state(rnic, first), QpState::Rts);
    let events: Vec<Event> = std::iter::from_fn(|| rnic.poll_event()).collect();
    assert_eq!(events[..2], [Event::Completion(cq), Event::CqError(cq)]);
    assert_eq!(events.len(), 4, "{events:?}");
    for qpn in [busy, idle] {
        assert!(events.contains(&Event::QpError(
            qpn,
            Status::LocalQpOperation,
            Cause::QueueOverrun
        )));
    }
    assert_eq!(rnic.cq_state(cq), Some((2, true)));
    assert_eq!(rnic.cq_state(old_cq), Some((0, false)));
    let queued: Vec<u64> = std::iter::from_fn(|| rnic.poll_cq(cq))
        .map(|wc| wc.wr_id)
        .collect();
    assert_eq!(queued, [0, 1]);
    // The queue stays in error: later flushed completions are lost too.
    let request = RecvRequest {
        wr_id: 9,
        sges: SgeList::EMPTY,
    };
    rnic.post_recv(now, busy, request).unwrap();
    assert_eq!(rnic.poll_cq(cq), None);
    assert_eq!(rnic.poll_event(), None);
}

#[test]
fn overrun__by_the_flush_of_another_spreads_to_the_queue_that_it_fills() {
    // The QP's sends complete to a CQ of one entry; its receives complete to another CQ of one entry, which a second QP shares.
    let mut pair = Pair::new();
    let side = &mut pair.sides[0];
    let (sends, receives) = (side.rnic.create_cq(1), side.rnic.create_cq(1));
    let now = pair.now;
    let [a, b] = [sends, receives].map(|send_cq| {
        let init = QpInit {
            max_send_wr: 4,
            max_recv_wr: 4,
            recv_cq: receives,
            ..QpInit::new(side.pd, send_cq)
        };
        let qpn = side.rnic.create_qp(init).unwrap();
        let attr = QpAttributes {
            access: Some(ALL_ACCESS),
            ..Default::default()
        };
        side.rnic.modify_qp(now, qpn, QpState::Init, &attr).unwrap();
        qpn
    });
    for wr_id in 0..2 {
        let sges = SgeList::EMPTY;
        side.rnic.post_recv(now, a, RecvRequest { wr_id, sges }).unwrap();
    }
    let error = QpAttributes::default();
    side.rnic.modify_qp(now, a, QpState::Error, &error).unwrap();
    assert_eq!(side.rnic.query_qp(b).unwrap().state, QpState::Error);
    assert_eq!(side.rnic.poll_event(), Some(Event::CqError(receives)));
    assert_eq!(side.rnic.cq_state(sends), Some((0, false)));
}

#[test]
fn train__of_full_packets_is_one_and_a_longer_first_packet_ends_its_own() {
    let mut pair = Pair::new();
    pair.write(0, 0, 40 * 1024);
    let mut buf = TransmitBuf::new(1 << 18, true);
    let now = pair.now;
    pair.sides[0].rnic.poll_transmit(now, &mut buf, true);
    let shape: Vec<(usize, usize)> = buf
        .trains()
        .iter()
        .map(|t| (t.packets, t.segment_bytes))
        .collect();
    // WRITE First is longer than Middle by its RETH, so one Middle may follow it and ends the train. Last is as long as Middle.
    assert_eq!(shape, [(2, 12 + 16 + 1024 + 4), (38, 12 + 1024 + 4)]);
}

#[test]
fn read__resumes_in_its_middle_with_an_initiator_depth_of_one() {
    let mut pair = Pair::with(|rtr, rts| {
        rtr.max_dest_rd_atomic = Some(1);
        rts.max_rd_atomic = Some(1);
    });
    let mut answers = 0;
    pair.deliver = Box::new(move |to, _| {
        answers += usize::from(to == 0);
        to == 1 || answers != 3
    });
    let rkey = pair.sides[1].rkey;
    let sges = pair.sides[0].sge(0, 200_000);
    pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
    pair.run();
    assert_eq!(ok(&mut pair, 0).len(), 1);
}

#[test]
fn read__whose_answer_was_lost_is_replayed_before_a_flush_that_still_runs() {
    let mut pair = Pair::new();
    let rkey = pair.slow_region(false, Ok(()));
    let mut answers = 0;
    pair.deliver = Box::new(move |to, _| {
        answers += usize::from(to == 0);
        to == 1 || answers != 1
    });
    let sges = pair.sides[0].sge(0, 100);
    pair.post(0, Operation::Read { va: IOVA, rkey }, sges);
    pair.flush(rkey);
    // This is many times longer than all retries together.
    pair.pass(10_000_000_000);
    assert_eq!(ok(&mut pair, 0)[0].opcode, WcOpcode::Read);
    let job = pair.sides[1].rnic.poll_flush().unwrap();
    pair.sides[1].rnic.handle_flush(pair.now, job.id, Ok(()));
    pair.run();
    assert_eq!(ok(&mut pair, 0)[0].opcode, WcOpcode::Flush);
}

#[test]
fn write__whose_answer_was_lost_is_acknowledged_although_a_flush_behind_it_runs() {
    // The window is too small for a FLUSH behind the repeated WRITE.
    let mut pair = Pair::with(|rtr, _| rtr.window_bytes = Some(4 * 1024));
    pair.disable_trains();
    let rkey = pair.slow_region(false, Ok(()));
    let mut flush_came = false;
    pair.deliver = Box::new(move |to, bytes| {
        flush_came |= to == 1 && bytes[0] == 0x1c;
        // After the FLUSH has been taken no answer arrives; an earlier one opens the window for the FLUSH.
        to == 1 || !flush_came
    });
    let operation = Operation::Write {
        va: IOVA,
        rkey,
        imm: None,
    };
    let sges = pair.sides[0].sge(0, 3 * 1024);
    pair.post(0, operation, sges);
    pair.flush(rkey);
    pair.pass(20_000_000);
    pair.deliver = Box::new(|to, bytes| to == 0 || bytes[0] != 0x1c);
    pair.pass(10_000_000);
    assert_eq!(ok(&mut pair, 0)[0].opcode, WcOpcode::Write);
}

#[test]
fn poll_timeout__is_none_when_all_is_done_and_after_destruction() {
    let mut pair = Pair::new();
    pair.write(0, 0, 100);
    pair.run();
    assert_eq!(pair.sides[0].rnic.poll_timeout(), None);
    pair.deliver = Box::new(|_, _| false);
    pair.write(0, 0, 100);
    pair.step();
    assert!(pair.sides[0].rnic.poll_timeout().is_some());
    let qpn = pair.sides[0].qpn;
    pair.sides[0].rnic.destroy_qp(qpn);
    assert_eq!(pair.sides[0].rnic.poll_timeout(), None);
}

/// Memory that counts its accesses and asks for few of them.
#[derive(Debug)]
struct Counting(HeapMemory, std::sync::atomic::AtomicUsize);

impl Memory for Counting {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.0.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.0.write(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.0.atomic(offset, atomic)
    }

    fn placement(&self) -> Placement {
        self.0.placement()
    }

    fn gathers(&self) -> bool {
        true
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.0.flush_is_immediate(placement)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        self.0.flush(offset, length, placement)
    }
}

/// Registers 1 MiB of [`Counting`] memory at a side.
fn counting(pair: &mut Pair, side: usize) -> (std::sync::Arc<Counting>, LKey, RKey) {
    let memory = std::sync::Arc::new(Counting(HeapMemory::new(1 << 20), Default::default()));
    let spec = RegionSpec {
        memory: memory.clone(),
        memory_offset: 0,
        length: 1 << 20,
        iova: IOVA,
        access: ALL_ACCESS,
    };
    let pd = pair.sides[side].pd;
    let (lkey, rkey) = pair.sides[side].rnic.reg_mr(pd, spec).unwrap();
    (memory, lkey, rkey)
}

impl Counting {
    /// Returns the number of accesses since the last call.
    fn count(&self) -> usize {
        self.1.swap(0, std::sync::atomic::Ordering::Relaxed)
    }
}

#[test]
fn gathering_memory__is_reached_once_a_train_and_holds_the_same_bytes() {
    let mut pair = Pair::new();
    let (memory, _, rkey) = counting(&mut pair, 1);
    let length = 300_001;
    pair.sides[0]
        .memory
        .with(|m| m[..length].copy_from_slice(&pattern(length)));
    let sges = pair.sides[0].sge(0, length as u32);
    pair.post(
        0,
        Operation::Write {
            va: IOVA + 5,
            rkey,
            imm: None,
        },
        sges,
    );
    pair.run();
    ok(&mut pair, 0);
    memory.0.with(|m| assert_eq!(&m[5..5 + length], pattern(length)));
    let writes = memory.count();
    assert!(writes <= 20, "{writes} accesses for 293 packets");

    let sges = pair.sides[0].sge(1 << 20, length as u32);
    pair.post(0, Operation::Read { va: IOVA + 5, rkey }, sges);
    pair.run();
    ok(&mut pair, 0);
    pair.sides[0]
        .memory
        .with(|m| assert_eq!(&m[1 << 20..(1 << 20) + length], pattern(length)));
    let reads = memory.count();
    assert!(reads <= 20, "{reads} accesses for 293 packets");
}

#[test]
fn gathering_memory__is_read_and_filled_once_a_train_by_a_send() {
    let mut pair = Pair::new();
    let (from, from_lkey, _) = counting(&mut pair, 0);
    let (to, to_lkey, _) = counting(&mut pair, 1);
    let length = 300_001;
    from.0
        .with(|m| m[3..3 + length].copy_from_slice(&pattern(length)));
    // Two elements at either end, split at other offsets than the packets are.
    let list = |lkey, at: u64, first: u32| {
        let second = Sge::new(IOVA + at + u64::from(first), length as u32 - first, lkey);
        SgeList::from(&[Sge::new(IOVA + at, first, lkey), second][..])
    };
    let request = RecvRequest {
        wr_id: 9,
        sges: list(to_lkey, 8, 100_003),
    };
    let (now, qpn) = (pair.now, pair.sides[1].qpn);
    pair.sides[1].rnic.post_recv(now, qpn, request).unwrap();
    pair.post(0, Operation::Send { imm: None }, list(from_lkey, 3, 70_001));
    pair.run();
    ok(&mut pair, 0);
    assert_eq!(ok(&mut pair, 1)[0].byte_len, length as u32);
    to.0.with(|m| {
        assert_eq!(&m[8..8 + length], pattern(length));
        assert_eq!((m[7], m[8 + length]), (0, 0));
    });
    for (what, count) in [("reads", from.count()), ("writes", to.count())] {
        assert!(count <= 20, "{count} {what} for 293 packets");
    }
}

#[test]
fn gathering_memory__holds_what_came_before_the_datagram_ended_the_connection() {
    let mut pair = Pair::new();
    let (memory, _, rkey) = counting(&mut pair, 1);
    // A request of side 1, which the second packet of the datagram refuses.
    pair.post(1, Operation::Send { imm: None }, SgeList::EMPTY);
    pair.deliver = Box::new(|_, _| false);
    pair.step();
    let (qpn, now) = (pair.sides[1].qpn, pair.now);
    let packet = |op, ext: &[u8], payload: &[u8]| {
        let mut bytes = vec![0; Bth::LEN];
        Bth::new(Opcode::rc(op), qpn, Psn::new(PSN)).emit(&mut bytes);
        bytes.extend_from_slice(ext);
        bytes.extend_from_slice(payload);
        pair.craft(&bytes)
    };
    let (mut reth, mut aeth) = ([0; Reth::LEN], [0; Aeth::LEN]);
    let (va, length) = (IOVA, 3000);
    Reth { va, rkey, length }.emit(&mut reth);
    let syndrome = Syndrome::Nak(NakCode::RemoteOperation);
    Aeth { syndrome, msn: 0 }.emit(&mut aeth);
    let mut bytes = packet(Op::WriteFirst, &reth, &pattern(1024));
    let segment_bytes = bytes.len();
    bytes.extend_from_slice(&packet(Op::Acknowledge, &aeth, &[]));
    let src = pair.sides[0].address;
    let rnic = &mut pair.sides[1].rnic;
    rnic.handle_datagram(now, src, 0xc001, &bytes, segment_bytes);
    // The peer may learn that the first packet was executed.
    let detail = rnic.qp_detail(qpn).unwrap();
    assert_eq!(
        (detail.info.state, detail.rq_psn),
        (QpState::Error, Psn::new(PSN).plus(1))
    );
    memory.0.with(|m| assert_eq!(&m[..1024], pattern(1024)));
}
