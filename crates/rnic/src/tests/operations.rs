//! Operations other than SEND, WRITE, READ and FLUSH, and the objects that they use.

use super::util::*;
use crate::*;

/// Posts a request at side 0 with a work request id and flags.
fn post(pair: &mut Pair, wr_id: u64, operation: Operation, sges: SgeList, flags: SendFlags) {
    let side = &mut pair.sides[0];
    let request = SendRequest {
        wr_id,
        operation,
        sges,
        flags,
        to: Target::Connected,
    };
    side.rnic.post_send(pair.now, side.qpn, request).unwrap();
}

fn word(pair: &Pair, side: usize, at: usize) -> u64 {
    pair.sides[side]
        .memory
        .with(|m| u64::from_ne_bytes(m[at..at + 8].try_into().unwrap()))
}

fn set_word(pair: &Pair, side: usize, at: usize, value: u64) {
    pair.sides[side]
        .memory
        .with(|m| m[at..at + 8].copy_from_slice(&value.to_ne_bytes()));
}

fn recv(pair: &mut Pair, length: u32) {
    pair.recv(1, 9, 0x8000, length);
}

/// Returns the only completion of side `i`.
fn one(pair: &mut Pair, i: usize) -> WorkCompletion {
    let all = pair.sides[i].completions();
    assert_eq!(all.len(), 1, "{all:?}");
    all[0]
}

fn events(pair: &mut Pair, i: usize) -> Vec<Event> {
    std::iter::from_fn(|| pair.sides[i].rnic.poll_event()).collect()
}

fn fetch_add(pair: &Pair, add: u64) -> Operation {
    Operation::FetchAdd {
        va: IOVA + 64,
        rkey: pair.sides[1].rkey,
        add,
    }
}

// Atomics. IBTA Vol 1, 9.4.5.

#[test]
fn fetch_add__adds_and_gives_back_what_was_there() {
    let mut pair = Pair::new();
    set_word(&pair, 1, 64, u64::MAX);
    let (operation, sges) = (fetch_add(&pair, 3), pair.sides[0].sge(8, 8));
    pair.post(0, operation, sges);
    pair.run();
    let wc = one(&mut pair, 0);
    assert_eq!((wc.status, wc.opcode), (Status::Success, WcOpcode::FetchAdd));
    assert_eq!(word(&pair, 0, 8), u64::MAX);
    assert_eq!(word(&pair, 1, 64), 2, "wraps");
}

#[test]
fn compare_swap__swaps_only_what_it_finds() {
    let mut pair = Pair::new();
    set_word(&pair, 1, 64, 5);
    for (compare, swap, original, after) in [(4, 9, 5, 5), (5, 9, 5, 9)] {
        let operation = Operation::CompareSwap {
            va: IOVA + 64,
            rkey: pair.sides[1].rkey,
            compare,
            swap,
        };
        let sges = pair.sides[0].sge(8, 8);
        pair.post(0, operation, sges);
        pair.run();
        assert_eq!(one(&mut pair, 0).status, Status::Success);
        assert_eq!((word(&pair, 0, 8), word(&pair, 1, 64)), (original, after));
    }
}

#[test]
fn atomic_write__places_eight_bytes_also_inline() {
    let mut pair = Pair::new();
    let operation = |pair: &Pair| Operation::AtomicWrite {
        va: IOVA + 64,
        rkey: pair.sides[1].rkey,
    };
    set_word(&pair, 0, 8, 77);
    let (aw, sges) = (operation(&pair), pair.sides[0].sge(8, 8));
    pair.post(0, aw, sges);
    pair.run();
    assert_eq!(one(&mut pair, 0).opcode, WcOpcode::AtomicWrite);
    assert_eq!(word(&pair, 1, 64), 77);
    let aw = operation(&pair);
    pair.post(0, aw, SgeList::inline(&78u64.to_ne_bytes()));
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::Success);
    assert_eq!(word(&pair, 1, 64), 78);
}

#[test]
fn atomic__whose_answer_is_lost_is_replayed_and_not_done_again() {
    for lose in 1..4u32 {
        let mut pair = Pair::new();
        pair.disable_trains();
        let mut lost = 0;
        pair.deliver = Box::new(move |to, _| {
            lost += u32::from(to == 0);
            to != 0 || lost > lose
        });
        for i in 0..4 {
            let (operation, sges) = (fetch_add(&pair, 1), pair.sides[0].sge(8 + i * 8, 8));
            pair.post(0, operation, sges);
        }
        pair.run();
        let all = pair.sides[0].completions();
        assert!(all.iter().all(|wc| wc.status == Status::Success), "{all:?}");
        assert_eq!(word(&pair, 1, 64), 4, "answers lost: {lose}");
        let seen: Vec<u64> = (0..4).map(|i| word(&pair, 0, 8 + i * 8)).collect();
        assert_eq!(seen, [0, 1, 2, 3]);
    }
}

#[test]
fn atomic__without_the_right_on_the_qp_or_the_region_is_refused() {
    // A right missing on the QP is an invalid request, one missing on the region a remote access error. 9.7.4.1.
    let no_atomics = ALL_ACCESS.difference(Access::REMOTE_ATOMIC);
    let mut pair = Pair::with(|rtr, _| rtr.access = Some(no_atomics));
    let (operation, sges) = (fetch_add(&pair, 1), pair.sides[0].sge(8, 8));
    pair.post(0, operation, sges);
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::RemoteInvalidRequest);

    let mut pair = Pair::new();
    let side = &mut pair.sides[1];
    side.rnic
        .rereg_mr(side.lkey, None, |spec| spec.access = no_atomics)
        .unwrap();
    let (operation, sges) = (fetch_add(&pair, 1), pair.sides[0].sge(8, 8));
    pair.post(0, operation, sges);
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::RemoteAccess);
    assert_eq!(word(&pair, 1, 64), 0);
}

#[test]
pub(super) fn atomic__behind_a_flush_waits_until_it_has_finished() {
    let mut pair = Pair::new();
    let rkey = pair.slow_region(false, Ok(()));
    pair.flush(rkey);
    set_word(&pair, 0, 8, 1);
    let aw = Operation::AtomicWrite {
        va: IOVA + 64,
        rkey: pair.sides[1].rkey,
    };
    let sges = pair.sides[0].sge(8, 8);
    pair.post(0, aw, sges);
    pair.pass(5_000_000);
    assert_eq!(word(&pair, 1, 64), 0, "the FLUSH runs");
    let job = pair.sides[1].rnic.poll_flush().unwrap();
    pair.sides[1].rnic.handle_flush(pair.now, job.id, Ok(()));
    pair.run();
    assert_eq!(word(&pair, 1, 64), 1);
    let opcodes: Vec<_> = pair.sides[0]
        .completions()
        .iter()
        .map(|wc| (wc.opcode, wc.status))
        .collect();
    assert_eq!(
        opcodes,
        [
            (WcOpcode::Flush, Status::Success),
            (WcOpcode::AtomicWrite, Status::Success)
        ]
    );
}

#[test]
pub(super) fn fence__waits_for_atomics() {
    let mut pair = Pair::new();
    let (operation, sges) = (fetch_add(&pair, 1), pair.sides[0].sge(8, 8));
    pair.post(0, operation, sges);
    let write = Operation::Write {
        va: IOVA + 128,
        rkey: pair.sides[1].rkey,
        imm: None,
    };
    let sges = pair.sides[0].sge(8, 8);
    set_word(&pair, 1, 64, 41);
    post(&mut pair, 8, write, sges, SendFlags::SIGNALED | SendFlags::FENCE);
    pair.run();
    assert_eq!(word(&pair, 1, 128), 41, "the WRITE took what the atomic brought");
}

#[test]
fn post_send__refuses_what_does_not_fit() {
    let mut pair = Pair::new();
    let long = vec![0; INLINE_BYTES_MAX + 1];
    let many = vec![Sge::default(); SGE_MAX + 1];
    let (va, rkey) = (IOVA, pair.sides[1].rkey);
    let send = Operation::Send { imm: None };
    let cases = [
        (
            Operation::FetchAdd { va, rkey, add: 1 },
            pair.sides[0].sge(0, 4),
            PostError::Invalid,
        ),
        (
            Operation::AtomicWrite { va, rkey },
            pair.sides[0].sge(0, 16),
            PostError::Invalid,
        ),
        (
            Operation::Read { va, rkey },
            SgeList::inline(&[0; 8]),
            PostError::Invalid,
        ),
        (
            Operation::LocalInvalidate { rkey },
            pair.sides[0].sge(0, 8),
            PostError::Invalid,
        ),
        (send.clone(), SgeList::inline(&long), PostError::TooLong),
        (send.clone(), many.as_slice().into(), PostError::TooManySges),
    ];
    let (now, qpn) = (pair.now, pair.sides[0].qpn);
    for (operation, sges, error) in cases {
        let request = SendRequest {
            wr_id: 0,
            operation,
            sges,
            flags: SendFlags::empty(),
            to: Target::Connected,
        };
        assert_eq!(pair.sides[0].rnic.post_send(now, qpn, request), Err(error));
    }
    let request = SendRequest {
        wr_id: 0,
        operation: send,
        sges: SgeList::EMPTY,
        flags: SendFlags::empty(),
        to: Target::Srq(Srqn(1)),
    };
    assert_eq!(
        pair.sides[0].rnic.post_send(now, qpn, request),
        Err(PostError::Invalid)
    );
}

/// Returns the operations that the responder must remember.
fn remembered(pair: &Pair) -> [(Operation, SgeList); 4] {
    let (va, rkey) = (IOVA, pair.sides[1].rkey);
    let sges = pair.sides[0].sge(0, 8);
    let flush = Operation::Flush {
        va,
        rkey,
        length: 8,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    [
        (Operation::Read { va, rkey }, sges.clone()),
        (fetch_add(pair, 1), sges.clone()),
        (Operation::AtomicWrite { va, rkey }, sges),
        (flush, SgeList::EMPTY),
    ]
}

#[test]
fn max_rd_atomic__of_none_takes_none() {
    let mut pair = Pair::with(|_, rts| rts.max_rd_atomic = Some(0));
    for (operation, sges) in remembered(&pair) {
        let request = SendRequest {
            wr_id: 1,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        let side = &mut pair.sides[0];
        let posted = side.rnic.post_send(pair.now, side.qpn, request);
        assert_eq!(posted, Err(PostError::Invalid));
    }
    pair.write(0, 0, 8);
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::Success);
}

#[test]
fn max_dest_rd_atomic__of_none_refuses_all() {
    for n in 0..4 {
        let mut pair = Pair::with(|rtr, _| rtr.max_dest_rd_atomic = Some(0));
        let [.., (operation, sges)] = &remembered(&pair)[..=n] else {
            unreachable!("n is less than 4");
        };
        pair.post(0, operation.clone(), sges.clone());
        pair.run();
        assert_eq!(one(&mut pair, 0).status, Status::RemoteInvalidRequest);
        assert_eq!(pair.sides[1].state(), QpState::Error);
    }
}

#[test]
fn post_recv__takes_no_more_bytes_than_a_message_may_have() {
    let (mut pair, srqn) = shared(0);
    let side = &mut pair.sides[0];
    for (last, accepted) in [(0, Ok(())), (1, Err(PostError::TooLong))] {
        let lengths = [1 << 30, 1 << 30, last];
        let sges: Vec<Sge> = lengths.iter().map(|n| Sge::new(IOVA, *n, side.lkey)).collect();
        let request = RecvRequest {
            wr_id: 1,
            sges: sges.as_slice().into(),
        };
        assert_eq!(side.rnic.post_recv(pair.now, side.qpn, request), accepted);
    }
    let too_long = [Sge::new(IOVA, u32::MAX, pair.sides[1].lkey)];
    let sges = too_long.as_slice().into();
    let posted = pair.sides[1]
        .rnic
        .post_srq_recv(srqn, RecvRequest { wr_id: 1, sges });
    assert_eq!(posted, Err(PostError::TooLong));
}

#[test]
fn send__of_32_elements_and_inline_arrives_whole() {
    let mut pair = Pair::new();
    pair.sides[0]
        .memory
        .with(|m| m[..4096].copy_from_slice(&pattern(4096)));
    let lkey = pair.sides[0].lkey;
    let list: Vec<Sge> = (0..32).map(|i| Sge::new(IOVA + i * 64, 33, lkey)).collect();
    recv(&mut pair, 4096);
    pair.post(0, Operation::Send { imm: None }, list.as_slice().into());
    pair.run();
    let expected: Vec<u8> = (0..32)
        .flat_map(|i| pattern(4096)[i * 64..i * 64 + 33].to_vec())
        .collect();
    assert_eq!(one(&mut pair, 1).byte_len, 32 * 33);
    pair.sides[1]
        .memory
        .with(|m| assert_eq!(m[0x8000..0x8000 + expected.len()], expected));
    recv(&mut pair, 4096);
    pair.post(0, Operation::Send { imm: Some(5) }, SgeList::inline(&[7; 1000]));
    pair.run();
    let wc = one(&mut pair, 1);
    assert_eq!((wc.byte_len, wc.imm, wc.opcode), (1000, Some(5), WcOpcode::Recv));
    pair.sides[1]
        .memory
        .with(|m| assert_eq!(m[0x8000..0x8000 + 1000], [7; 1000]));
}

// Regions that work requests register, windows, invalidation. IBTA Vol 1, 10.6.3.4 and 10.6.7.2.

fn spec_of(pair: &Pair, i: usize, access: Access) -> RegionSpec {
    RegionSpec {
        memory: pair.sides[i].memory.clone(),
        memory_offset: 0x1000,
        length: 0x1000,
        iova: 0x5_0000,
        access,
    }
}

/// Writes 8 bytes from side 0; returns the status of the request.
fn write_status(pair: &mut Pair, va: u64, rkey: RKey) -> Status {
    let sges = pair.sides[0].sge(0, 8);
    post(
        pair,
        1,
        Operation::Write { va, rkey, imm: None },
        sges,
        SendFlags::SIGNALED,
    );
    pair.run();
    let wc = pair.sides[0].completions().into_iter().find(|wc| wc.wr_id == 1);
    wc.unwrap().status
}

/// Executes an operation on side 1's own QP; returns its status.
fn at_peer(pair: &mut Pair, operation: Operation) -> Status {
    pair.post(1, operation, SgeList::EMPTY);
    pair.run();
    one(pair, 1).status
}

#[test]
fn register__gives_memory_until_it_is_invalidated() {
    let mut pair = Pair::new();
    let pd = pair.sides[1].pd;
    let (_, rkey) = pair.sides[1].rnic.alloc_mr(pd, 0x1000).unwrap();
    let key = rkey.next();
    let register = |key, pair: &Pair| {
        let spec = spec_of(pair, 1, ALL_ACCESS);
        Operation::Register(Box::new(Registration { key, spec }))
    };
    let operation = register(key, &pair);
    assert_eq!(at_peer(&mut pair, operation), Status::Success);
    assert_eq!(write_status(&mut pair, 0x5_0000, key), Status::Success);
    assert_eq!(
        at_peer(&mut pair, Operation::LocalInvalidate { rkey: key }),
        Status::Success
    );
    assert_eq!(write_status(&mut pair, 0x5_0000, key), Status::RemoteAccess);
    assert_eq!(pair.sides[1].state(), QpState::Error);

    // Registering twice is an error, and so is invalidating a key that never existed.
    let mut pair = Pair::new();
    let pd = pair.sides[1].pd;
    let (_, rkey) = pair.sides[1].rnic.alloc_mr(pd, 0x1000).unwrap();
    let operation = register(rkey, &pair);
    assert_eq!(at_peer(&mut pair, operation.clone()), Status::Success);
    assert_eq!(at_peer(&mut pair, operation), Status::LocalQpOperation);
    let mut pair = Pair::new();
    assert_eq!(
        at_peer(&mut pair, Operation::LocalInvalidate { rkey }),
        Status::LocalQpOperation
    );
}

#[test]
pub(super) fn send_invalidate__ends_the_key_before_its_receive_completes() {
    let mut pair = Pair::new();
    let pd = pair.sides[1].pd;
    let (_, rkey) = pair.sides[1].rnic.alloc_mr(pd, 0x1000).unwrap();
    let spec = spec_of(&pair, 1, ALL_ACCESS);
    let register = Operation::Register(Box::new(Registration { key: rkey, spec }));
    assert_eq!(at_peer(&mut pair, register), Status::Success);
    recv(&mut pair, 64);
    pair.post(0, Operation::SendInvalidate { rkey }, SgeList::inline(b"done"));
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::Success);
    let wc = one(&mut pair, 1);
    assert_eq!((wc.invalidated, wc.byte_len), (Some(rkey), 4));
    assert_eq!(write_status(&mut pair, 0x5_0000, rkey), Status::RemoteAccess);
}

#[test]
fn send_invalidate__of_a_key_that_cannot_be_ended_is_an_error_of_the_receiver() {
    // Class J of 9.9.3: the receive completes in error, and the sender gets no answer.
    let mut pair = Pair::new();
    let rkey = pair.sides[1].rkey;
    recv(&mut pair, 64);
    pair.post(0, Operation::SendInvalidate { rkey }, SgeList::EMPTY);
    pair.run();
    assert_eq!(one(&mut pair, 1).status, Status::RemoteInvalidRequest);
    assert_eq!(pair.sides[1].state(), QpState::Error);
    assert_eq!(one(&mut pair, 0).status, Status::RetryExceeded);
}

fn bind(pair: &Pair, window: RKey, length: u64, access: Access) -> Bind {
    Bind {
        window,
        region: pair.sides[1].lkey,
        va: IOVA + 0x100,
        length,
        access,
    }
}

#[test]
fn window__of_type_1_is_bound_rebound_and_unbound() {
    let mut pair = Pair::new();
    let (pd, qpn, now) = (pair.sides[1].pd, pair.sides[1].qpn, pair.now);
    let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::One).unwrap();
    let first = bind(&pair, window, 0x100, Access::REMOTE_WRITE);
    let key = pair.sides[1]
        .rnic
        .bind_mw(now, qpn, 3, first, SendFlags::SIGNALED)
        .unwrap();
    pair.run();
    assert_eq!(
        (one(&mut pair, 1).opcode, key),
        (WcOpcode::BindWindow, window.next())
    );
    assert_eq!(write_status(&mut pair, IOVA + 0x1f8, key), Status::Success);
    let second = bind(&pair, key, 0x80, Access::REMOTE_WRITE);
    let next = pair.sides[1]
        .rnic
        .bind_mw(now, qpn, 3, second, SendFlags::SIGNALED)
        .unwrap();
    pair.run();
    assert_eq!(one(&mut pair, 1).status, Status::Success);
    assert_eq!(write_status(&mut pair, IOVA + 0x178, next), Status::Success);
    assert_eq!(
        write_status(&mut pair, IOVA + 0x100, key),
        Status::RemoteAccess,
        "the key before"
    );
    assert!(pair.sides[1].rnic.dealloc_mw(next));
}

#[test]
fn bind_mw__while_an_earlier_binding_waits_in_the_queue() {
    let mut pair = Pair::new();
    let (pd, qpn, now) = (pair.sides[1].pd, pair.sides[1].qpn, pair.now);
    let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::One).unwrap();
    let mut bind_mw = |window, length| {
        let bind = bind(&pair, window, length, Access::REMOTE_WRITE);
        let side = &mut pair.sides[1];
        side.rnic.bind_mw(now, qpn, 3, bind, SendFlags::SIGNALED)
    };
    let first = bind_mw(window, 0x100).unwrap();
    let second = bind_mw(first, 0x80).unwrap();
    let third = bind_mw(window, 0x40).unwrap();
    assert_eq!(
        [first, second, third],
        [1, 2, 3].map(|n| RKey(window.0 & !0xff | (window.0 + n) & 0xff))
    );
    assert_eq!(
        bind_mw(second, 0x100),
        Err(PostError::Invalid),
        "neither the oldest nor the youngest"
    );
    pair.run();
    let statuses: Vec<Status> = pair.sides[1].completions().iter().map(|wc| wc.status).collect();
    assert_eq!(statuses, [Status::Success; 3]);
    assert_eq!(write_status(&mut pair, IOVA + 0x138, third), Status::Success);
    assert_eq!(
        write_status(&mut pair, IOVA + 0x100, second),
        Status::RemoteAccess
    );
}

#[test]
fn window__grants_neither_more_bytes_nor_more_rights_than_it_was_bound_with() {
    for (at, zero_based, status) in [
        (IOVA + 0x1f8, false, Status::Success),
        (IOVA + 0x1f9, false, Status::RemoteAccess),
        (IOVA + 0xff, false, Status::RemoteAccess),
        (0xf8, true, Status::Success),
        (0xf9, true, Status::RemoteAccess),
        (IOVA + 0x100, true, Status::RemoteAccess),
    ] {
        let mut pair = Pair::new();
        let pd = pair.sides[1].pd;
        let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::Two).unwrap().next();
        let mut access = Access::REMOTE_WRITE;
        access.set(Access::ZERO_BASED, zero_based);
        let operation = Operation::Bind(bind(&pair, window, 0x100, access));
        assert_eq!(at_peer(&mut pair, operation), Status::Success);
        assert_eq!(
            write_status(&mut pair, at, window),
            status,
            "{at:#x}, zero based: {zero_based}"
        );
    }
    let mut pair = Pair::new();
    let pd = pair.sides[1].pd;
    let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::Two).unwrap().next();
    let operation = Operation::Bind(bind(&pair, window, 0x100, Access::REMOTE_READ));
    assert_eq!(at_peer(&mut pair, operation), Status::Success);
    assert_eq!(
        write_status(&mut pair, IOVA + 0x100, window),
        Status::RemoteAccess
    );
}

#[test]
pub(super) fn window__of_type_2_serves_only_the_qp_that_bound_it_and_ends_by_either_side() {
    let mut pair = Pair::new();
    let pd = pair.sides[1].pd;
    let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::Two).unwrap().next();
    let (mine, _) = pair.second_qps();
    let operation = Operation::Bind(bind(&pair, window, 0x100, Access::REMOTE_WRITE));
    assert_eq!(at_peer(&mut pair, operation), Status::Success);
    assert_eq!(write_status(&mut pair, IOVA + 0x100, window), Status::Success);
    let request = SendRequest {
        wr_id: 4,
        operation: Operation::Write {
            va: IOVA + 0x100,
            rkey: window,
            imm: None,
        },
        sges: pair.sides[0].sge(0, 8),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    pair.sides[0].rnic.post_send(pair.now, mine, request).unwrap();
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::RemoteAccess, "another QP");
    assert!(pair.sides[1].completions().is_empty());
    recv(&mut pair, 64);
    pair.post(0, Operation::SendInvalidate { rkey: window }, SgeList::EMPTY);
    pair.run();
    assert_eq!(one(&mut pair, 1).invalidated, Some(window));
    assert_eq!(one(&mut pair, 0).status, Status::Success);
    let again = window.next();
    let operation = Operation::Bind(bind(&pair, again, 0x100, Access::REMOTE_WRITE));
    assert_eq!(at_peer(&mut pair, operation), Status::Success);
    assert_eq!(
        at_peer(&mut pair, Operation::LocalInvalidate { rkey: again }),
        Status::Success
    );
    assert_eq!(write_status(&mut pair, IOVA + 0x100, again), Status::RemoteAccess);
}

#[test]
fn window__grants_the_flushes_of_its_region() {
    let flush_status = |pair: &mut Pair, rkey: RKey, va: u64, selectivity: Selectivity| {
        let operation = Operation::Flush {
            va,
            rkey,
            length: 8,
            placement: Placement::GLOBAL,
            selectivity,
        };
        pair.post(0, operation, SgeList::EMPTY);
        pair.run();
        one(pair, 0).status
    };
    for (access, at_end, beyond) in [
        (Access::FLUSH_GLOBAL, Status::Success, Status::RemoteAccess),
        (Access::REMOTE_WRITE, Status::RemoteAccess, Status::RemoteAccess),
    ] {
        for (va, selectivity, expected) in [
            (IOVA + 0x1f8, Selectivity::Range, at_end),
            (IOVA + 0x1f9, Selectivity::Range, beyond),
            (0, Selectivity::MemoryRegion, at_end),
        ] {
            let mut pair = Pair::new();
            let pd = pair.sides[1].pd;
            let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::Two).unwrap();
            let operation = Operation::Bind(bind(&pair, window.next(), 0x100, access));
            assert_eq!(at_peer(&mut pair, operation), Status::Success);
            let status = flush_status(&mut pair, window.next(), va, selectivity);
            assert_eq!(status, expected, "{access:?} {va:#x} {selectivity:?}");
        }
    }
    // The region's memory does not support persistence.
    let mut pair = Pair::new();
    let pd = pair.sides[1].pd;
    let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::Two).unwrap();
    let operation = Operation::Bind(bind(&pair, window.next(), 0x100, Access::FLUSH_PERSISTENT));
    assert_eq!(at_peer(&mut pair, operation), Status::MemoryBind);
}

/// Registers a region by a work request and binds a type 2 window to it, both at side 1: returns the region's keys and the window's.
fn bound(pair: &mut Pair) -> (LKey, RKey, RKey) {
    let pd = pair.sides[1].pd;
    let (lkey, rkey) = pair.sides[1].rnic.alloc_mr(pd, 0x1000).unwrap();
    let operation = register_at(pair, rkey);
    assert_eq!(at_peer(pair, operation), Status::Success);
    let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::Two).unwrap();
    let operation = bind_to(lkey, window.next());
    assert_eq!(at_peer(pair, operation), Status::Success);
    (lkey, rkey, window.next())
}

fn register_at(pair: &Pair, key: RKey) -> Operation {
    let spec = spec_of(pair, 1, ALL_ACCESS);
    Operation::Register(Box::new(Registration { key, spec }))
}

fn bind_to(region: LKey, window: RKey) -> Operation {
    Operation::Bind(Bind {
        window,
        region,
        va: 0x5_0000,
        length: 64,
        access: Access::REMOTE_WRITE,
    })
}

#[test]
fn window__keeps_its_region_from_being_invalidated() {
    // The owner tries to invalidate the region.
    let mut pair = Pair::new();
    let (_, rkey, _) = bound(&mut pair);
    let invalidate = Operation::LocalInvalidate { rkey };
    assert_eq!(at_peer(&mut pair, invalidate), Status::LocalQpOperation);

    // The peer tries to invalidate the region.
    let mut pair = Pair::new();
    let (_, rkey, _) = bound(&mut pair);
    recv(&mut pair, 64);
    pair.post(0, Operation::SendInvalidate { rkey }, SgeList::EMPTY);
    pair.run();
    assert_eq!(one(&mut pair, 1).status, Status::RemoteInvalidRequest);

    // The region can be invalidated after its window, and the old window key does not reach the region's next memory.
    let mut pair = Pair::new();
    let (lkey, rkey, window) = bound(&mut pair);
    for rkey in [window, rkey] {
        let invalidate = Operation::LocalInvalidate { rkey };
        assert_eq!(at_peer(&mut pair, invalidate), Status::Success);
    }
    let operation = register_at(&pair, rkey);
    assert_eq!(at_peer(&mut pair, operation), Status::Success);
    assert_eq!(at_peer(&mut pair, bind_to(lkey, window.next())), Status::Success);
    assert_eq!(write_status(&mut pair, 0x5_0000, window), Status::RemoteAccess);
}

#[test]
fn window__keeps_its_region_from_being_changed_and_deregistered() {
    let mut pair = Pair::new();
    let (pd, lkey) = (pair.sides[1].pd, pair.sides[1].lkey);
    let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::One).unwrap();
    let mut key = window;
    for length in [64, 32, 0, 64] {
        let (qpn, now) = (pair.sides[1].qpn, pair.now);
        let bind = bind(&pair, key, length, Access::REMOTE_WRITE);
        let rnic = &mut pair.sides[1].rnic;
        key = rnic.bind_mw(now, qpn, 1, bind, SendFlags::SIGNALED).unwrap();
        pair.run();
        assert_eq!(one(&mut pair, 1).status, Status::Success);
        let changed = pair.sides[1].rnic.rereg_mr(lkey, None, |_| {}).map(drop);
        let expected = match length {
            0 => Ok(()),
            _ => Err(RegisterError::WindowsBound),
        };
        assert_eq!(changed, expected, "bound to {length} bytes");
    }
    let rnic = &mut pair.sides[1].rnic;
    assert_eq!(rnic.dereg_mr(lkey).unwrap_err(), RegisterError::WindowsBound);
    assert_eq!(
        write_status(&mut pair, IOVA + 0x100, key),
        Status::Success,
        "as it was"
    );
    let rnic = &mut pair.sides[1].rnic;
    assert!(rnic.dealloc_mw(key));
    assert!(rnic.dereg_mr(lkey).is_ok());
}

#[test]
fn unbind_mws__ends_all_windows_of_a_region_and_no_other() {
    let mut pair = Pair::new();
    let (lkey, _, window) = bound(&mut pair);
    let (_, _, other) = bound(&mut pair);
    let rnic = &mut pair.sides[1].rnic;
    rnic.unbind_mws(lkey);
    assert!(rnic.dereg_mr(lkey).is_ok());
    assert_eq!(write_status(&mut pair, 0x5_0000, other), Status::Success);
    assert_eq!(write_status(&mut pair, 0x5_0000, window), Status::RemoteAccess);
}

#[test]
fn destroy_qp__ends_the_windows_that_it_alone_served() {
    let mut pair = Pair::new();
    let (lkey, ..) = bound(&mut pair);
    let side = &mut pair.sides[1];
    assert_eq!(side.rnic.dereg_mr(lkey).unwrap_err(), RegisterError::WindowsBound);
    side.rnic.destroy_qp(side.qpn);
    assert!(side.rnic.dereg_mr(lkey).is_ok());
}

#[test]
fn bind__of_what_may_not_be_bound_is_a_bind_error() {
    type Change = fn(&mut Bind, &mut Pair);
    let changes: [(&str, Change); 8] = [
        ("past the region", |bind, _| bind.length = 1 << 40),
        ("no such region", |bind, _| {
            bind.region = LKey(bind.region.0 ^ 0x100)
        }),
        ("no such window", |bind, _| {
            bind.window = RKey(bind.window.0 ^ 0x100)
        }),
        ("local rights", |bind, _| bind.access = Access::LOCAL_WRITE),
        ("unbind of type 2", |bind, _| bind.length = 0),
        ("the key that it had", |bind, _| {
            bind.window = RKey(bind.window.0.wrapping_sub(1))
        }),
        ("a region that takes no windows", |bind, pair| {
            let (pd, spec) = (
                pair.sides[1].pd,
                spec_of(pair, 1, ALL_ACCESS.difference(Access::MW_BIND)),
            );
            let (lkey, _) = pair.sides[1].rnic.reg_mr(pd, spec).unwrap();
            (bind.region, bind.va) = (lkey, 0x5_0000);
        }),
        ("writes to a region without local write", |bind, pair| {
            let (pd, spec) = (
                pair.sides[1].pd,
                spec_of(pair, 1, Access::MW_BIND | Access::REMOTE_READ),
            );
            let (lkey, _) = pair.sides[1].rnic.reg_mr(pd, spec).unwrap();
            (bind.region, bind.va) = (lkey, 0x5_0000);
        }),
    ];
    for (what, change) in changes {
        let mut pair = Pair::new();
        let pd = pair.sides[1].pd;
        let window = loop {
            let window = pair.sides[1].rnic.alloc_mw(pd, WindowType::Two).unwrap();
            if window.0 & 0xff < 0xff {
                break window.next();
            }
        };
        let mut wrong = bind(&pair, window, 0x100, Access::REMOTE_WRITE);
        change(&mut wrong, &mut pair);
        assert_eq!(
            at_peer(&mut pair, Operation::Bind(wrong)),
            Status::MemoryBind,
            "{what}"
        );
        assert_eq!(pair.sides[1].state(), QpState::Error);
    }
}

#[test]
fn local_operations__keep_their_place_among_the_others() {
    let mut pair = Pair::new();
    let pd = pair.sides[0].pd;
    let (_, rkey) = pair.sides[0].rnic.alloc_mr(pd, 0x1000).unwrap();
    let spec = spec_of(&pair, 0, ALL_ACCESS);
    let (va, peer) = (IOVA, pair.sides[1].rkey);
    let sges = pair.sides[0].sge(0, 8000);
    post(
        &mut pair,
        1,
        Operation::Read { va, rkey: peer },
        sges,
        SendFlags::SIGNALED,
    );
    let register = Operation::Register(Box::new(Registration { key: rkey, spec }));
    post(&mut pair, 2, register, SgeList::EMPTY, SendFlags::SIGNALED);
    // The WRITE uses the key of the registration before it.
    let sges = Sge::new(0x5_0000, 64, LKey(rkey.0)).into();
    post(
        &mut pair,
        3,
        Operation::Write {
            va,
            rkey: peer,
            imm: None,
        },
        sges,
        SendFlags::SIGNALED,
    );
    let flags = SendFlags::SIGNALED | SendFlags::FENCE;
    post(
        &mut pair,
        4,
        Operation::LocalInvalidate { rkey },
        SgeList::EMPTY,
        flags,
    );
    let mut n = 1u32;
    pair.deliver = Box::new(move |_, _| {
        n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        !(n >> 16).is_multiple_of(3)
    });
    pair.run();
    let ok = Status::Success;
    assert_eq!(pair.sides[0].completed(), [(1, ok), (2, ok), (3, ok), (4, ok)]);
}

#[test]
fn rereg_mr__changes_rights_and_memory_and_keeps_the_keys() {
    let mut pair = Pair::new();
    let (lkey, rkey) = (pair.sides[1].lkey, pair.sides[1].rkey);
    let too_long = pair.sides[1]
        .rnic
        .rereg_mr(lkey, None, |spec| spec.length = 1 << 60);
    assert_eq!(too_long.unwrap_err(), RegisterError::OutOfRange);
    assert_eq!(write_status(&mut pair, IOVA, rkey), Status::Success, "as it was");
    pair.sides[1]
        .rnic
        .rereg_mr(lkey, None, |spec| spec.iova = 0x7000)
        .unwrap();
    assert_eq!(write_status(&mut pair, 0x7000, rkey), Status::Success);
    assert_eq!(write_status(&mut pair, IOVA, rkey), Status::RemoteAccess);
}

// SQD. IBTA Vol 1, 10.3.1.5.

#[test]
pub(super) fn sqd__ends_what_was_begun_tells_and_begins_the_rest_later() {
    let mut pair = Pair::with(|rtr, _| rtr.window_bytes = Some(4096));
    pair.write(0, 0, 16 << 10);
    pair.step();
    pair.write(0, 0x1_0000, 64);
    let (qpn, none) = (pair.sides[0].qpn, QpAttributes::default());
    pair.modify(0, QpState::Sqd, &none);
    assert_eq!(events(&mut pair, 0), [], "half of the WRITE is still to go");
    pair.run();
    assert_eq!(pair.sides[0].completions().len(), 1);
    assert_eq!(events(&mut pair, 0), [Event::SqDrained(qpn)]);
    assert_eq!(pair.sides[0].state(), QpState::Sqd);
    pair.modify(0, QpState::Rts, &none);
    pair.run();
    assert_eq!(pair.sides[0].completions().len(), 1);
}

#[test]
fn sqd__of_an_idle_queue_has_drained_at_once_and_answers_go_on() {
    let mut pair = Pair::new();
    let qpn = pair.sides[1].qpn;
    pair.modify(1, QpState::Sqd, &QpAttributes::default());
    assert_eq!(events(&mut pair, 1), [Event::SqDrained(qpn)]);
    let rkey = pair.sides[1].rkey;
    assert_eq!(write_status(&mut pair, IOVA, rkey), Status::Success);
    assert_eq!(events(&mut pair, 1), []);
}

// Shared receive queues. IBTA Vol 1, 10.2.9.

/// Returns a pair whose side 1 takes its receives from a shared receive queue of 8.
fn shared(posted: u64) -> (Pair, Srqn) {
    let mut pair = Pair::new();
    let side = &mut pair.sides[1];
    let init = SrqInit {
        pd: side.pd,
        max_wr: 8,
        xrc: None,
    };
    let srqn = side.rnic.create_srq(init).unwrap();
    let init = QpInit {
        srq: Some(srqn),
        ..QpInit::new(side.pd, side.cq)
    };
    pair.replace_qps(QpType::Rc, init);
    for wr_id in 0..posted {
        let sges = pair.sides[1].sge(0x8000 + wr_id * 64, 64);
        pair.sides[1]
            .rnic
            .post_srq_recv(srqn, RecvRequest { wr_id, sges })
            .unwrap();
    }
    (pair, srqn)
}

fn send(pair: &mut Pair) {
    pair.post(0, Operation::Send { imm: None }, SgeList::inline(b"message"));
}

#[test]
fn srq__feeds_its_qps_and_tells_once_when_its_limit_is_reached() {
    let (mut pair, srqn) = shared(4);
    pair.sides[1].rnic.modify_srq(srqn, None, Some(3)).unwrap();
    send(&mut pair);
    pair.run();
    assert_eq!(events(&mut pair, 1), [], "three are left, and the limit is three");
    send(&mut pair);
    send(&mut pair);
    pair.run();
    assert_eq!(events(&mut pair, 1), [Event::SrqLimitReached(srqn)]);
    let ids: Vec<u64> = pair.sides[1].completions().iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, [0, 1, 2]);
    let info = pair.sides[1].rnic.query_srq(srqn).unwrap();
    assert_eq!((info.posted, info.limit), (1, None));
}

#[test]
fn srq__limit_is_at_most_its_size_and_zero_disarms_it() {
    let (mut pair, srqn) = shared(2);
    let rnic = &mut pair.sides[1].rnic;
    rnic.modify_srq(srqn, None, Some(8)).unwrap();
    assert_eq!(rnic.query_srq(srqn).unwrap().limit, Some(8));
    rnic.modify_srq(srqn, None, Some(0)).unwrap();
    assert_eq!(rnic.query_srq(srqn).unwrap().limit, None);
    send(&mut pair);
    pair.run();
    assert_eq!(events(&mut pair, 1), []);
}

#[test]
fn srq__has_its_own_domain_for_the_memory_of_its_receives() {
    for (own, status) in [(true, Status::Success), (false, Status::RemoteOperation)] {
        let (mut pair, _) = shared(0);
        let spec = spec_of(&pair, 1, ALL_ACCESS);
        let side = &mut pair.sides[1];
        let (of_qp, of_queue) = (side.pd, side.rnic.alloc_pd());
        let registered_in = if own { of_queue } else { of_qp };
        let (lkey, _) = side.rnic.reg_mr(registered_in, spec).unwrap();
        let init = SrqInit {
            pd: of_queue,
            max_wr: 8,
            xrc: None,
        };
        let srqn = side.rnic.create_srq(init).unwrap();
        let init = QpInit {
            srq: Some(srqn),
            ..QpInit::new(of_qp, side.cq)
        };
        pair.replace_qps(QpType::Rc, init);
        let sges = Sge::new(0x5_0000, 64, lkey).into();
        let request = RecvRequest { wr_id: 3, sges };
        pair.sides[1].rnic.post_srq_recv(srqn, request).unwrap();
        send(&mut pair);
        pair.run();
        assert_eq!(one(&mut pair, 0).status, status);
    }
}

#[test]
fn srq__that_is_empty_makes_the_sender_wait() {
    let (mut pair, srqn) = shared(0);
    send(&mut pair);
    pair.pass(1_000_000);
    assert!(pair.sides[0].completions().is_empty());
    assert!(pair.sides[1].rnic.counters().resources_rnr_nak > 0);
    let sges = pair.sides[1].sge(0x8000, 64);
    pair.sides[1]
        .rnic
        .post_srq_recv(srqn, RecvRequest { wr_id: 1, sges })
        .unwrap();
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::Success);
    assert_eq!(one(&mut pair, 1).byte_len, 7);
}

#[test]
fn srq__serves_a_write_with_immediate_when_it_has_a_receive() {
    let (mut pair, srqn) = shared(0);
    let write = Operation::Write {
        va: IOVA,
        rkey: pair.sides[1].rkey,
        imm: Some(5),
    };
    pair.post(0, write, SgeList::inline(b"message"));
    pair.pass(1_000_000);
    assert!(pair.sides[0].completions().is_empty());
    let request = RecvRequest {
        wr_id: 1,
        sges: SgeList::EMPTY,
    };
    pair.sides[1].rnic.post_srq_recv(srqn, request).unwrap();
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::Success);
    let received = one(&mut pair, 1);
    assert_eq!((received.wr_id, received.imm), (1, Some(5)));
}

#[test]
fn srq__is_resized_within_what_is_posted_and_ends_after_its_qps() {
    let (mut pair, srqn) = shared(4);
    let side = &mut pair.sides[1];
    assert_eq!(
        side.rnic.modify_srq(srqn, Some(3), None),
        Err(SrqError::TooSmall { posted: 4 })
    );
    assert_eq!(
        side.rnic.modify_srq(srqn, None, Some(9)),
        Err(SrqError::LimitTooHigh)
    );
    side.rnic.modify_srq(srqn, Some(4), None).unwrap();
    let sges = side.sge(0, 8);
    let full = side.rnic.post_srq_recv(
        srqn,
        RecvRequest {
            wr_id: 9,
            sges: sges.clone(),
        },
    );
    assert_eq!(full, Err(PostError::QueueFull));
    let own = side
        .rnic
        .post_recv(pair.now, side.qpn, RecvRequest { wr_id: 9, sges });
    assert_eq!(own, Err(PostError::HasSrq));
    assert_eq!(side.rnic.destroy_srq(srqn), Err(SrqError::Busy));
    side.rnic.destroy_qp(side.qpn);
    assert_eq!(side.rnic.destroy_srq(srqn), Ok(()));
    assert_eq!(side.rnic.destroy_srq(srqn), Err(SrqError::NoSrq));
}

#[test]
fn srq__keeps_its_receives_when_a_qp_fails_and_the_last_one_is_told() {
    let (mut pair, srqn) = shared(4);
    let qpn = pair.sides[1].qpn;
    pair.modify(1, QpState::Error, &QpAttributes::default());
    assert_eq!(events(&mut pair, 1), [Event::LastWqeReached(qpn)]);
    assert!(pair.sides[1].completions().is_empty());
    assert_eq!(pair.sides[1].rnic.query_srq(srqn).unwrap().posted, 4);
}

// XRC. IBTA Vol 1, A14.

/// Returns a pair with an initiator at side 0, a target at side 1, and a shared receive queue at side 1.
fn xrc() -> (Pair, Srqn) {
    let mut pair = Pair::new();
    let side = &mut pair.sides[1];
    let xrcd = side.rnic.alloc_xrcd();
    let init = SrqInit {
        pd: side.pd,
        max_wr: 8,
        xrc: Some((xrcd, side.cq)),
    };
    let srqn = side.rnic.create_srq(init).unwrap();
    let init = QpInit {
        qp_type: QpType::XrcRecv,
        xrcd: Some(xrcd),
        ..QpInit::new(side.pd, side.cq)
    };
    pair.replace_qps(QpType::XrcSend, init);
    let sges = pair.sides[1].sge(0x8000, 64);
    pair.sides[1]
        .rnic
        .post_srq_recv(srqn, RecvRequest { wr_id: 3, sges })
        .unwrap();
    (pair, srqn)
}

fn xrc_post(pair: &mut Pair, to: Srqn, operation: Operation, sges: SgeList) {
    let request = SendRequest {
        wr_id: 1,
        operation,
        sges,
        flags: SendFlags::SIGNALED,
        to: Target::Srq(to),
    };
    let side = &mut pair.sides[0];
    side.rnic.post_send(pair.now, side.qpn, request).unwrap();
}

#[test]
fn xrc__every_operation_reaches_the_queue_and_the_memory_that_it_names() {
    let (mut pair, srqn) = xrc();
    pair.sides[0]
        .memory
        .with(|m| m[..4096].copy_from_slice(&pattern(4096)));
    let (va, rkey) = (IOVA + 64, pair.sides[1].rkey);
    let sges = |pair: &Pair, n| pair.sides[0].sge(0, n);
    let (three, eight) = (sges(&pair, 3000), sges(&pair, 8));
    xrc_post(
        &mut pair,
        srqn,
        Operation::Send { imm: Some(1) },
        SgeList::inline(b"hello"),
    );
    xrc_post(
        &mut pair,
        srqn,
        Operation::Write { va, rkey, imm: None },
        three.clone(),
    );
    xrc_post(&mut pair, srqn, Operation::Read { va, rkey }, three);
    xrc_post(
        &mut pair,
        srqn,
        Operation::FetchAdd { va, rkey, add: 1 },
        eight.clone(),
    );
    xrc_post(&mut pair, srqn, Operation::AtomicWrite { va, rkey }, eight);
    let flush = Operation::Flush {
        va,
        rkey,
        length: 8,
        placement: Placement::GLOBAL,
        selectivity: Selectivity::Range,
    };
    xrc_post(&mut pair, srqn, flush, SgeList::EMPTY);
    pair.run();
    let all = pair.sides[0].completions();
    assert_eq!(all.len(), 6);
    assert!(all.iter().all(|wc| wc.status == Status::Success), "{all:?}");
    let wc = one(&mut pair, 1);
    assert_eq!((wc.wr_id, wc.byte_len, wc.imm), (3, 5, Some(1)));
}

#[test]
fn xrc__a_queue_that_is_not_of_the_domain_is_an_invalid_request() {
    let (mut pair, _) = xrc();
    xrc_post(
        &mut pair,
        Srqn(0x77),
        Operation::Send { imm: None },
        SgeList::EMPTY,
    );
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::RemoteInvalidRequest);

    let (mut pair, _) = xrc();
    let side = &mut pair.sides[1];
    let other = side.rnic.alloc_xrcd();
    let init = SrqInit {
        pd: side.pd,
        max_wr: 8,
        xrc: Some((other, side.cq)),
    };
    let srqn = side.rnic.create_srq(init).unwrap();
    xrc_post(&mut pair, srqn, Operation::Send { imm: None }, SgeList::EMPTY);
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::RemoteInvalidRequest);
    assert_eq!(pair.sides[1].state(), QpState::Error);
}

#[test]
fn xrc__an_overrun_of_the_shared_queues_completions_ends_the_target() {
    let mut pair = Pair::new();
    let side = &mut pair.sides[1];
    let xrcd = side.rnic.alloc_xrcd();
    let small = side.rnic.create_cq(1);
    let init = SrqInit {
        pd: side.pd,
        max_wr: 8,
        xrc: Some((xrcd, small)),
    };
    let srqn = side.rnic.create_srq(init).unwrap();
    let init = QpInit {
        qp_type: QpType::XrcRecv,
        xrcd: Some(xrcd),
        ..QpInit::new(side.pd, side.cq)
    };
    pair.replace_qps(QpType::XrcSend, init);
    for wr_id in 0..3 {
        let sges = pair.sides[1].sge(0x8000, 64);
        let request = RecvRequest { wr_id, sges };
        pair.sides[1].rnic.post_srq_recv(srqn, request).unwrap();
        xrc_post(&mut pair, srqn, Operation::Send { imm: None }, SgeList::EMPTY);
        pair.run();
        let expected = if wr_id == 0 { QpState::Rts } else { QpState::Error };
        assert_eq!(pair.sides[1].state(), expected, "{wr_id}");
    }
    assert!(events(&mut pair, 1).contains(&Event::CqError(small)));
}

#[test]
fn xrc__an_initiator_carries_out_local_operations_which_name_no_queue() {
    let (mut pair, _) = xrc();
    let side = &mut pair.sides[0];
    let window = side.rnic.alloc_mw(side.pd, WindowType::One).unwrap();
    let bind = Bind {
        window,
        region: side.lkey,
        va: IOVA,
        length: 64,
        access: Access::REMOTE_READ,
    };
    side.rnic
        .bind_mw(pair.now, side.qpn, 1, bind, SendFlags::SIGNALED)
        .unwrap();
    pair.run();
    assert_eq!(one(&mut pair, 0).status, Status::Success);
}

#[test]
fn create_qp__gives_no_number_again_soon() {
    let mut pair = Pair::new();
    let side = &mut pair.sides[0];
    let init = QpInit::new(side.pd, side.cq);
    let mut last = std::collections::VecDeque::new();
    // Of so many random numbers of 16 bits, some would meet one of the last thousand.
    for _ in 0..2_000 {
        let qpn = side.rnic.create_qp(init).unwrap();
        assert!(!last.contains(&qpn), "{qpn} is given again");
        side.rnic.destroy_qp(qpn);
        last.push_back(qpn);
        if last.len() > 1_000 {
            last.pop_front();
        }
    }
}

#[test]
fn create_qp__refuses_what_does_not_go_together() {
    let (mut pair, srqn) = xrc();
    let side = &mut pair.sides[1];
    let init = QpInit::new(side.pd, side.cq);
    let xrcd = Some(Xrcd(99));
    for wrong in [
        QpInit {
            srq: Some(srqn),
            ..init
        },
        QpInit {
            srq: Some(Srqn(1)),
            ..init
        },
        QpInit {
            qp_type: QpType::XrcRecv,
            ..init
        },
        QpInit {
            qp_type: QpType::XrcRecv,
            xrcd,
            ..init
        },
        QpInit {
            qp_type: QpType::XrcSend,
            srq: Some(srqn),
            ..init
        },
    ] {
        assert_eq!(side.rnic.create_qp(wrong), None, "{wrong:?}");
    }
}
