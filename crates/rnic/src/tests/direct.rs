//! WRITEs and READs of memory that a peer on the same host granted: a program observes the same behaviour as with packets.

mod host;
mod lane;

use super::util::*;
use crate::*;
use Do::*;
use host::*;

/// Returns what a program observes besides memory: completions of each kind and events in their order, and the QPs' states.
fn outcome(host: &Host) -> (Vec<Vec<String>>, Vec<Option<QpState>>) {
    let class = |line: &String| {
        let kinds = ["opcode: Recv", "WorkCompletion"];
        let kind = kinds.iter().position(|kind| line.contains(kind));
        (line.as_bytes()[0], kind.unwrap_or(kinds.len()))
    };
    let of = |side, kind| {
        let lines = host.log.iter().filter(|line| class(line) == (side, kind));
        lines.cloned().collect::<Vec<_>>()
    };
    let sides = [b'0', b'1', b'n'].into_iter();
    let log = sides
        .flat_map(|side| (0..3).map(move |kind| of(side, kind)))
        .collect();
    let state = |side: &Side| side.rnic.query_qp(side.qpn).map(|info| info.state);
    (log, host.pair.sides.iter().map(state).collect())
}

/// Runs a program on one host, with all ways of posting, and on two hosts, and compares the outcomes. Returns the number of
/// requests that needed no packet although they were queued first.
fn run_both(name: &str, program: &[Do]) -> u64 {
    let run = |grants, posts_directly, posts_to_lane| {
        let mut host = Host::new(grants);
        (host.posts_directly, host.posts_to_lane) = (posts_directly, posts_to_lane);
        host.warm();
        let before = host.direct();
        program.iter().for_each(|step| host.perform(*step));
        host.rest();
        (host.direct() - before, host)
    };
    let packets = run(false, true, true);
    assert_eq!(packets.0, 0, "{name}");
    let ways = [(true, true), (true, false), (false, false)];
    let [by_lane, direct, queued] = ways.map(|(posts_directly, posts_to_lane)| {
        let direct = run(true, posts_directly, posts_to_lane);
        assert_eq!(outcome(&direct.1), outcome(&packets.1), "{name}");
        for i in 0..2 {
            let memory = |host: &Host| host.pair.sides[i].memory.with(|m| m.to_vec());
            assert!(
                memory(&direct.1) == memory(&packets.1),
                "{name}: memory of side {i} differs"
            );
        }
        direct.0
    });
    // A request that finds its grant ended before it is queued requests the grant anew.
    assert!(direct >= queued, "{name}");
    assert!(by_lane >= queued, "{name}");
    let completed = packets
        .1
        .log
        .iter()
        .filter(|line| line.contains("WorkCompletion"));
    assert!(completed.count() > 0, "{name}");
    queued
}

type OnHost = Box<dyn FnOnce(&mut Host)>;

/// Runs each program of a table and checks the number of requests that need no packet.
fn check(table: &[(&str, u64, &[Do])]) {
    for (name, expected, program) in table {
        assert_eq!(run_both(name, program), *expected, "{name}: direct requests");
    }
}

#[rustfmt::skip]
#[test]
fn direct__what_a_grant_covers_needs_no_packet() {
    check(&[
        ("a WRITE", 1, &[Post(write(8, 100))]),
        ("a READ", 1, &[Post(read(8, 100))]),
        ("of many packets", 2, &[Post(write(8, 0x8_0001)), Post(read(0, 0x9_0000))]),
        ("a burst", 5, &[
            Post(write(0, 9)), Post(read(0, 9)), Post(write(4, 9).fence()), Post(write(0, 1)),
            Post(read(0, 9)),
        ]),
        ("inline", 1, &[Post(write(3, 1024).own(Own::Inline))]),
        ("three elements", 2, &[
            Post(write(3, 100).own(Own::Pieces(3))), Post(read(3, 100).own(Own::Pieces(3))),
        ]),
        ("32 elements", 2, &[
            Post(write(3, 9000).own(Own::Pieces(32))), Post(read(3, 9000).own(Own::Pieces(32))),
        ]),
        ("elements without bytes", 1, &[Post(write(3, 5).own(Own::Pieces(32)))]),
        ("silent ones", 3, &[Post(write(8, 8).silent()), Post(read(8, 8).silent()), Post(write(64, 8))]),
        ("behind a fence", 2, &[Post(read(8, 8)), Post(write(8, 8).fence())]),
        ("up to its bounds", 2, &[
            Post(write(PART, PART_BYTES as u32).key(Key::Part)),
            Post(read(PART + PART_BYTES - 1, 1).key(Key::Part)),
        ]),
        ("addresses from 0", 2, &[
            Post(write(8, 8).key(Key::ZeroBased)), Post(read(8, 9).key(Key::ZeroBased)),
        ]),
        ("one right", 2, &[Post(write(8, 8).key(Key::WriteOnly)), Post(read(8, 8).key(Key::ReadOnly))]),
    ]);
}

#[rustfmt::skip]
#[test]
fn direct__what_no_grant_covers_goes_by_packets() {
    check(&[
        ("immediate data", 0, &[Recv(0), Post(ask(What::WriteImm, 8, 100)), Rest]),
        ("an atomic", 0, &[Post(ask(What::FetchAdd, 8, 8)), Rest]),
        ("an ATOMIC WRITE", 0, &[Post(ask(What::AtomicWrite, 8, 8)), Rest]),
        ("a window", 0, &[Post(write(8, 8).key(Key::Window)), Rest, Post(read(8, 8).key(Key::Window))]),
        ("filled by a request", 0, &[
            Post(write(8, 8).key(Key::Fast)), Rest, Post(read(8, 8).key(Key::Fast)),
        ]),
        ("no bytes", 0, &[Post(write(8, 0)), Post(read(8, 0)), Post(write(8, 0).own(Own::Inline))]),
        ("no bytes to a peer in error", 0, &[Modify(1, QpState::Error), Post(write(8, 0))]),
        ("one byte too far", 0, &[Post(write(PART + 1, PART_BYTES as u32).key(Key::Part))]),
        ("one byte too far, READ", 0, &[Post(read(PART + 1, PART_BYTES as u32).key(Key::Part))]),
        ("one byte too low", 0, &[Post(write(PART - 1, 1).key(Key::Part))]),
        ("far out", 0, &[Post(read(u64::MAX / 2, 1).key(Key::Part))]),
        ("around the address space", 0, &[Post(write(u64::MAX, 2).key(Key::ZeroBased))]),
        ("a READ without the right", 0, &[Post(read(8, 8).key(Key::WriteOnly))]),
        ("a WRITE without the right", 0, &[Post(write(8, 8).key(Key::ReadOnly))]),
    ]);
}

#[rustfmt::skip]
#[test]
fn direct__order_is_kept() {
    let big = 0x5000;
    check(&[
        ("behind a SEND", 0, &[Recv(99), Post(send(99)), Post(write(0, 8)), Post(read(0, 8))]),
        ("behind a SEND, long", 2, &[Recv(99), Post(send(99)), Post(write(0, big)), Post(read(0, big))]),
        ("before a SEND", 1, &[Recv(99), Post(write(0, 8)), Post(send(99)), Rest]),
        ("behind immediate data", 1, &[Recv(0), Post(ask(What::WriteImm, 4, 8)), Post(read(0, big))]),
        ("behind an atomic and a fence", 1, &[Post(ask(What::FetchAdd, 0, 8)), Post(read(0, big).fence())]),
        ("behind an atomic and a fence, short", 1, &[
            Post(ask(What::FetchAdd, 0, 8)), Post(read(0, 8).fence()),
        ]),
        ("behind an ATOMIC WRITE", 1, &[Post(ask(What::AtomicWrite, 0, 8)), Post(read(0, big))]),
        ("around a FLUSH", 2, &[Post(write(0, 8)), Post(ask(What::Flush, 0, 0)), Post(read(0, big))]),
        ("behind an own operation", 1, &[Post(ask(What::Bind, 0, 0)), Post(write(0, big))]),
        ("behind an own operation, short", 1, &[Post(ask(What::Bind, 0, 0)), Post(write(0, 8))]),
        ("before an own operation", 1, &[Post(write(0, 8)), Post(ask(What::Bind, 0, 0)), Rest]),
        ("between", 2, &[
            Post(ask(What::FetchAdd, 0, 8)), Post(write(0, big)), Post(ask(What::FetchAdd, 0, 8)),
            Post(read(0, big)),
        ]),
        ("silent ones behind a SEND", 3, &[
            Recv(9), Post(send(9).silent()), Post(write(0, big).silent()), Post(read(0, big).silent()),
            Post(read(0, 9)),
        ]),
        ("behind one that is refused", 0, &[
            Post(write(0, 8).key(Key::ReadOnly)), Post(write(0, big)), Post(read(0, 8)),
        ]),
    ]);
}

#[rustfmt::skip]
#[test]
fn direct__own_memory_that_fails_ends_as_by_packets() {
    for own in [Own::NoKey, Own::OutOfBounds, Own::Faults, Own::ReadOnly] {
        for bytes in [2, 3000] {
            for ask in [write(8, bytes).own(own), read(8, bytes).own(own)] {
                // It is unspecified how much of such a request is placed before it fails.
                let behind = [Post(write(0, 8)), Rest, Post(ask), Rest, Post(write(0, 8)), Rest];
                if own == Own::NoKey {
                    let [direct, packets] = [true, false].map(|grants| {
                        let mut host = Host::new(grants);
                        host.warm();
                        behind.iter().for_each(|step| host.perform(*step));
                        outcome(&host)
                    });
                    assert_eq!(direct, packets, "{own:?} {ask:?}");
                } else {
                    run_both(&format!("{own:?} {ask:?}"), &behind);
                }
            }
        }
    }
    check(&[
        ("read-only memory is written from", 1, &[Post(write(8, 8).own(Own::ReadOnly))]),
        ("read-only memory is not read to", 0, &[Post(read(8, 8).own(Own::ReadOnly))]),
        ("a key that is not looked at", 1, &[Post(write(8, 1).own(Own::Pieces(4)))]),
    ]);
}

#[rustfmt::skip]
#[test]
fn direct__states_of_the_asking_side() {
    check(&[
        ("SQD begins nothing", 1, &[
            Modify(0, QpState::Sqd), Post(write(8, 8)), Rest, Modify(0, QpState::Rts), Rest,
        ]),
        ("SQD is told at once when nothing is under way", 2, &[
            Post(write(8, 8)), Modify(0, QpState::Sqd), Post(read(8, 8)), Rest, Modify(0, QpState::Rts),
        ]),
        ("SQD ends what was begun", 1, &[
            Recv(9), Post(send(9)), Post(write(0, 0x5000)), Modify(0, QpState::Sqd), Rest,
            Modify(0, QpState::Rts), Rest,
        ]),
        ("error flushes", 0, &[
            Post(send(9)), Post(write(0, 0x5000)), Post(read(0, 8)), Modify(0, QpState::Error),
            Post(write(8, 8)), Rest,
        ]),
        ("reset forgets", 1, &[Post(write(8, 8)), Rest, Modify(0, QpState::Reset), Post(write(8, 8)), Rest]),
        ("a rate limits", 0, &[RateLimit(1_000_000_000), Post(write(8, 8)), Post(read(8, 5000)), Rest]),
        ("a rate that is no more", 1, &[
            RateLimit(1_000_000_000), Post(write(8, 8)), Rest, RateLimit(0), Rest, Post(read(8, 8)), Rest,
        ]),
        ("no depth, no READ", 1, &[
            Modify(0, QpState::Sqd), MaxRdAtomic(0), Modify(0, QpState::Rts), Post(read(8, 8)),
            Post(write(8, 8)), Rest,
        ]),
        ("a depth again", 1, &[
            Modify(0, QpState::Sqd), MaxRdAtomic(0), MaxRdAtomic(1), Modify(0, QpState::Rts),
            Post(read(8, 8)), Rest,
        ]),
    ]);
}

#[test]
fn direct__begins_nothing_in_sqd() {
    for posts_directly in [true, false] {
        let mut host = Host::new(true);
        host.posts_directly = posts_directly;
        host.warm();
        let before = host.direct();
        host.perform(Modify(0, QpState::Sqd));
        host.perform(Post(write(8, 8)));
        host.rest();
        assert_eq!(host.direct(), before);
        host.perform(Modify(0, QpState::Rts));
        host.rest();
        assert_eq!(host.direct(), before + 1);
    }
}

#[rustfmt::skip]
#[test]
fn direct__a_grant_ends_with_what_it_stands_for() {
    let less = ALL_ACCESS.difference(Access::REMOTE_WRITE);
    let flush = ALL_ACCESS.difference(Access::REMOTE_READ);
    check(&[
        ("error of the owner's QP", 0, &[Modify(1, QpState::Error), Post(write(8, 8)), Rest]),
        ("error of the owner's QP, READ", 0, &[Modify(1, QpState::Error), Post(read(8, 8)), Rest]),
        ("reset", 0, &[Modify(1, QpState::Reset), Post(write(8, 8)), Rest]),
        ("the QP's end", 0, &[Destroy(1), Post(write(8, 8)), Rest]),
        ("a right that the QP loses", 0, &[Rights(less), Post(write(8, 8)), Rest]),
        ("another that it loses", 0, &[Rights(flush), Post(read(8, 8)), Rest]),
        ("the other right stays", 1, &[
            Rights(less), Post(read(8, 8)), Rest, Post(read(8, 9)), Rest, Post(read(8, 10)), Rest,
        ]),
        ("rights that come back", 1, &[
            Rights(less), Rights(ALL_ACCESS), Post(write(8, 8)), Rest, Post(read(8, 8)), Rest,
            Post(write(8, 9)), Rest,
        ]),
        ("no READs to be remembered", 0, &[
            Modify(1, QpState::Sqd), MaxDestRdAtomic(0), Modify(1, QpState::Rts), Post(read(8, 8)), Rest,
        ]),
        ("SQD of the owner's QP ends nothing", 2, &[
            Modify(1, QpState::Sqd), Post(read(8, 8)), Post(write(64, 8)), Rest,
        ]),
        ("deregistration", 0, &[Dereg(Key::Part), Post(write(PART, 8).key(Key::Part)), Rest]),
        ("deregistration of another", 1, &[Dereg(Key::Part), Post(write(PART, 8)), Rest]),
        ("new memory, and a new grant", 1, &[
            Rereg(Key::ReadOnly), Post(read(8, 8).key(Key::ReadOnly)), Rest,
            Post(read(8, 9).key(Key::ReadOnly)), Rest, Post(read(8, 10).key(Key::ReadOnly)), Rest,
        ]),
        ("taken back while nothing is under way", 1, &[
            TakeBack, Post(write(8, 8)), Rest, Post(read(8, 8)), Rest, Post(write(9, 8)), Rest,
        ]),
        ("taken back half-way", 0, &[EndsAfter(150), Post(write(8, 5000)), Rest]),
        ("taken back half-way, READ", 0, &[EndsAfter(150), Post(read(8, 5000)), Rest]),
        ("taken back half-way, between elements", 0, &[
            EndsAfter(1000), Post(write(8, 2000).own(Own::Pieces(2))), Rest,
        ]),
        ("taken back under a queue of others", 1, &[
            EndsAfter(100), Post(read(8, 100)), Post(write(0x5000, 5000)), Post(read(0x5000, 5000)),
            Post(write(0x8000, 1)), Rest,
        ]),
        ("taken back behind a SEND", 0, &[
            Recv(9), Post(send(9)), Post(write(0, 0x5000)), Post(read(0, 0x5000)), TakeBack, Rest,
        ]),
    ]);
}

#[test]
fn direct__waits_for_what_is_under_way() {
    let flush = |host: &mut Host| {
        let rkey = host.pair.slow_region(false, Ok(()));
        host.pair.flush(rkey);
    };
    type Step = fn(&mut Host);
    let lose: Step = |host| host.pair.deliver = Box::new(|to, _| to != 0);
    let post = |host: &mut Host, ask: Ask| host.post(ask).unwrap();
    let table: [(&str, OnHost, Step); 7] = [
        (
            "a SEND without receive",
            Box::new(move |host| post(host, send(8))),
            |host| host.perform(Recv(8)),
        ),
        (
            "immediate data without receive",
            Box::new(move |host| post(host, ask(What::WriteImm, 8, 8))),
            |host| host.perform(Recv(8)),
        ),
        (
            "a WRITE without answer",
            Box::new(move |host| {
                lose(host);
                post(host, write(8, 8).key(Key::Window));
            }),
            |host| host.pair.deliver = Box::new(|_, _| true),
        ),
        (
            "a READ without answer",
            Box::new(move |host| {
                lose(host);
                post(host, read(8, 8).key(Key::Window));
            }),
            |host| host.pair.deliver = Box::new(|_, _| true),
        ),
        (
            "an atomic without answer, a fence",
            Box::new(move |host| {
                lose(host);
                post(host, ask(What::FetchAdd, 8, 8));
                post(host, write(64, 8).fence());
            }),
            |host| host.pair.deliver = Box::new(|_, _| true),
        ),
        ("a FLUSH that takes its time", Box::new(flush), |host| {
            let job = host.pair.sides[1].rnic.poll_flush().unwrap();
            let now = host.pair.now;
            host.pair.sides[1].rnic.handle_flush(now, job.id, Ok(()));
        }),
        (
            "an own operation behind a SEND without receive",
            Box::new(move |host| {
                post(host, send(8));
                post(host, ask(What::Bind, 0, 0));
            }),
            |host| host.perform(Recv(8)),
        ),
    ];
    for (name, begin, release) in table {
        let mut host = Host::new(true);
        host.warm();
        let (calls, before) = (host.calls(), host.pair.sides[1].memory.with(|m| m.to_vec()));
        host.log.clear();
        begin(&mut host);
        post(&mut host, write(0x10_0000, 0x5000));
        post(&mut host, read(0x10_0000, 0x5000));
        host.pair.pass(50_000);
        host.serve();
        assert_eq!(host.calls(), calls, "{name}");
        assert_eq!(host.log, [""; 0], "{name}");
        let changed = host.pair.sides[1]
            .memory
            .with(|m| m[0x10_0000..] != before[0x10_0000..]);
        assert!(!changed, "{name}");
        release(&mut host);
        host.rest();
        assert!(host.calls() >= calls + 2, "{name}");
        let sent: Vec<&String> = host
            .log
            .iter()
            .filter(|line| line.starts_with("0: Work"))
            .collect();
        assert!(
            sent.iter().all(|line| line.contains("Success")),
            "{name}: {sent:?}"
        );
        assert!(
            sent[sent.len() - 1].contains("opcode: Read, byte_len: 20480"),
            "{name}"
        );
        assert!(
            sent[sent.len() - 2].contains("opcode: Write, byte_len: 20480"),
            "{name}"
        );
    }
}

#[test]
fn direct__without_a_packet_nothing_is_sent() {
    let mut host = Host::new(true);
    host.warm();
    let packets = |host: &Host| {
        host.pair
            .sides
            .each_ref()
            .map(|side| side.rnic.counters().sent_pkts)
    };
    let before = packets(&host);
    host.post(write(8, 100_000)).unwrap();
    assert_eq!(
        host.pair.sides[0].completions().len(),
        1,
        "done when it was posted"
    );
    host.rest();
    assert_eq!(packets(&host), before);
    let [asking, owner] = host.pair.sides.each_ref().map(|side| side.rnic.counters());
    assert_eq!((asking.direct_requests, asking.grants), (1, 0));
    assert_eq!(
        (owner.direct_requests, owner.grants),
        (0, 5),
        "the window and the last region are none"
    );
    assert_eq!(asking.rcvd_pkts, asking.rcvd_pkts_local);
    assert!(asking.rcvd_pkts > 0);
}

#[test]
fn direct__gives_a_reserved_place_back() {
    let mut host = Host::new(true);
    host.warm();
    let before = host.direct();
    let (rkey, va) = host.key(Key::Whole);
    let now = host.pair.now;
    let side = &mut host.pair.sides[0];
    let request = SendRequest {
        wr_id: 0,
        operation: Operation::Write { va, rkey, imm: None },
        sges: side.sge(0, 8),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    let sends = side.rnic.send_queue(side.qpn).unwrap();
    // One more than the queue has places.
    let posts = (1 << 12) + 1;
    for n in 0..posts {
        assert!(sends.reserve(&request), "{n}");
        side.rnic.post_reserved(now, side.qpn, request.clone());
    }
    assert_eq!(host.direct() - before, posts);
}

#[test]
fn by_packets__counts_each_request_by_its_reason() {
    let mut host = Host::new(true);
    host.warm();
    let counts = |host: &Host| {
        let side = &host.pair.sides[0];
        side.rnic.qp_detail(side.qpn).unwrap().by_packets
    };
    let before = counts(&host);
    assert_eq!(
        before.not_granted,
        KEYS.len() as u64,
        "the first of each key asks"
    );
    host.perform(Recv(4096));
    host.perform(Recv(4096));
    // While the SEND waits for its answer, small requests behind it go by packets.
    host.post(send(8)).unwrap();
    host.post(write(8, 8)).unwrap();
    host.post(read(8, 8)).unwrap();
    host.post(ask(What::WriteImm, 0, 8)).unwrap();
    // A request without bytes names no memory.
    host.post(write(8, 0)).unwrap();
    host.rest();
    host.post(write(0, 8).key(Key::Window)).unwrap();
    host.post(write(8, 8)).unwrap();
    host.rest();
    let expected = ByPackets {
        immediate: 1,
        rate_limited: 0,
        not_granted: before.not_granted + 1,
        behind_others: 3,
    };
    assert_eq!(counts(&host), expected);
    let all = host.pair.sides[0].rnic.counters();
    assert_eq!(
        (
            all.by_packets_immediate,
            all.by_packets_not_granted,
            all.by_packets_behind_others
        ),
        (1, expected.not_granted, 3)
    );
    // Requests to another host are not counted.
    host.set_local(false);
    host.post(write(8, 8)).unwrap();
    host.rest();
    assert_eq!(counts(&host), expected);
}

#[test]
fn direct__a_completion_queue_that_overruns() {
    let [direct, packets] = [true, false].map(|grants| {
        let mut host = Host::new(grants);
        let small = host.pair.sides[0].rnic.create_cq(2);
        let pd = host.pair.sides[0].pd;
        host.pair.sides[0].cq = small;
        host.pair.replace_qps(
            QpType::Rc,
            QpInit::new(host.pair.sides[1].pd, host.pair.sides[1].cq),
        );
        assert_eq!(pd, host.pair.sides[0].pd);
        host.keys
            .retain(|(key, ..)| *key != Key::Window && *key != Key::Fast);
        host.set_local(grants);
        host.post(write(8, 8)).unwrap();
        host.rest();
        host.rest();
        for _ in 0..4 {
            let _ = host.post(write(8, 8));
            host.pair.run();
        }
        host.rest();
        (outcome(&host), host.direct())
    });
    assert_eq!(direct.0, packets.0);
    assert_eq!((direct.1, packets.1), (3, 0), "the third overran it");
}

/// Returns the QPs whose grants the owner revokes when `f` acts on the owner.
fn revoked_by(f: impl FnOnce(&mut Host)) -> Vec<Qpn> {
    let mut host = Host::new(true);
    host.warm();
    f(&mut host);
    let rnic = &mut host.pair.sides[1].rnic;
    std::iter::from_fn(|| rnic.poll_revoked()).collect()
}

#[test]
fn poll_revoked__says_at_once_what_ended() {
    let none = QpAttributes::default();
    let of = |access| QpAttributes {
        access: Some(access),
        ..none
    };
    let to =
        move |state, attributes: QpAttributes| move |host: &mut Host| host.pair.modify(1, state, &attributes);
    let qpn = Host::new(true).pair.sides[1].qpn;
    let ends: [(&str, OnHost); 8] = [
        ("error", Box::new(to(QpState::Error, none))),
        ("reset", Box::new(to(QpState::Reset, none))),
        (
            "destroyed",
            Box::new(|host| {
                let side = &mut host.pair.sides[1];
                side.rnic.destroy_qp(side.qpn);
            }),
        ),
        ("less rights", Box::new(to(QpState::Rts, of(Access::REMOTE_READ)))),
        ("no rights", Box::new(to(QpState::Rts, of(Access::empty())))),
        (
            "no depth",
            Box::new(move |host| {
                host.pair.modify(1, QpState::Sqd, &none);
                let max_dest_rd_atomic = Some(0);
                host.pair.modify(
                    1,
                    QpState::Sqd,
                    &QpAttributes {
                        max_dest_rd_atomic,
                        ..none
                    },
                );
            }),
        ),
        (
            "a request that it refuses",
            Box::new(|host| {
                host.post(write(0, 8).key(Key::ReadOnly)).unwrap();
                host.pair.step();
            }),
        ),
        (
            "a queue that overruns",
            Box::new(move |host| {
                // Another QP fills the queue.
                let side = &mut host.pair.sides[1];
                let init = QpInit::new(side.pd, side.cq);
                let other = side.rnic.create_qp(init).unwrap();
                host.pair.modify(1, QpState::Rts, &none);
                host.pair.sides[1]
                    .rnic
                    .modify_qp(host.pair.now, other, QpState::Error, &none)
                    .unwrap();
                for wr_id in 0..=1 << 16 {
                    let request = RecvRequest {
                        wr_id,
                        sges: SgeList::EMPTY,
                    };
                    let side = &mut host.pair.sides[1];
                    side.rnic.post_recv(host.pair.now, other, request).unwrap();
                }
            }),
        ),
    ];
    for (name, f) in ends {
        assert_eq!(revoked_by(f), [qpn], "{name}");
    }
    let goes_on: [(&str, OnHost); 4] = [
        ("nothing", Box::new(|_| {})),
        ("SQD", Box::new(to(QpState::Sqd, none))),
        ("the same rights", Box::new(to(QpState::Rts, of(ALL_ACCESS)))),
        (
            "packets",
            Box::new(|host| {
                host.perform(Recv(8));
                host.post(send(8)).unwrap();
                host.pair.step();
            }),
        ),
    ];
    for (name, f) in goes_on {
        assert_eq!(revoked_by(f), [], "{name}");
    }
    // A second change revokes nothing more, and a QP without grants has nothing to revoke.
    let twice = revoked_by(|host| {
        host.pair.modify(1, QpState::Error, &none);
        host.pair.modify(1, QpState::Reset, &none);
    });
    assert_eq!(twice, [qpn]);
    let mut pair = Pair::new();
    pair.modify(1, QpState::Error, &none);
    assert_eq!(pair.sides[1].rnic.poll_revoked(), None);
}

// Requesting grants.

/// Registers another region at side 1.
fn another_region(host: &mut Host) -> RKey {
    let side = &mut host.pair.sides[1];
    let spec = region(side.memory.clone(), 0, MEMORY as u64, ALL_ACCESS);
    side.rnic.reg_mr(side.pd, spec).unwrap().1
}

fn post_to(host: &mut Host, rkey: RKey) {
    let sges = host.pair.sides[0].sge(0, 8);
    let operation = Operation::Write {
        va: IOVA,
        rkey,
        imm: None,
    };
    host.pair.post(0, operation, sges);
}

#[test]
fn wants_grant__once_for_each_key() {
    let mut host = Host::new(true);
    for ask in [
        write(8, 8),
        read(8, 8),
        write(8, 9),
        write(8, 8).key(Key::Part),
        read(8, 9),
    ] {
        let _ = host.post(ask);
    }
    host.serve();
    assert_eq!(host.asked, [host.key(Key::Whole).0, host.key(Key::Part).0]);
}

#[test]
fn wants_grant__not_of_what_no_grant_covers() {
    let mut host = Host::new(true);
    for ask in [
        write(8, 0),
        ask(What::WriteImm, 8, 8),
        ask(What::FetchAdd, 8, 8),
        ask(What::Flush, 8, 0),
        send(3),
    ] {
        host.post(ask).unwrap();
    }
    host.serve();
    assert_eq!(host.asked, []);
    host.set_local(false);
    host.post(write(8, 8)).unwrap();
    assert!(!host.serve());
}

#[test]
fn wants_grant__not_again_after_no_or_no_answer() {
    let mut host = Host::new(true);
    for key in [Key::Window, Key::Fast] {
        for _ in 0..3 {
            host.post(write(8, 8).key(key)).unwrap();
            host.rest();
        }
    }
    assert_eq!(host.asked.len(), 2, "denied");
    let rkey = another_region(&mut host);
    for _ in 0..3 {
        post_to(&mut host, rkey);
        host.pair.run();
    }
    let events = std::iter::from_fn(|| host.pair.sides[0].rnic.poll_event());
    let wanted: Vec<Event> = events.collect();
    assert_eq!(
        wanted,
        [Event::WantsGrant(host.pair.sides[0].qpn, rkey)],
        "unanswered"
    );
}

#[test]
fn wants_grant__again_when_a_grant_has_ended() {
    let mut host = Host::new(true);
    host.warm();
    host.asked.clear();
    host.perform(TakeBack);
    for done in [0, 0, 1, 2] {
        let before = host.direct();
        host.post(write(8, 8)).unwrap();
        host.rest();
        assert_eq!(host.direct() - before, u64::from(done > 0));
    }
    assert_eq!(
        host.asked,
        [host.key(Key::Whole).0],
        "by the first request that is posted after it"
    );
}

#[test]
fn wants_grant__of_64_keys_and_then_the_first_is_forgotten() {
    let mut host = Host::new(true);
    let rkeys: Vec<RKey> = (0..65).map(|_| another_region(&mut host)).collect();
    for rkey in &rkeys {
        post_to(&mut host, *rkey);
        host.rest();
    }
    assert_eq!(host.asked, rkeys);
    let direct = host.direct();
    post_to(&mut host, rkeys[1]);
    post_to(&mut host, rkeys[64]);
    assert_eq!(host.direct(), direct + 2);
    post_to(&mut host, rkeys[0]);
    host.rest();
    assert_eq!((host.direct(), host.asked.len()), (direct + 2, 66));
    post_to(&mut host, rkeys[0]);
    assert_eq!(host.direct(), direct + 3);
}

#[test]
fn set_grant__that_nobody_asked_for_or_that_comes_late_is_ignored() {
    let mut host = Host::new(true);
    let (qpn, rkey) = (host.pair.sides[0].qpn, host.key(Key::Whole).0);
    host.grant(qpn, rkey);
    host.post(write(8, 8)).unwrap();
    assert_eq!(host.direct(), 0);
    host.set_local(false);
    host.grant(qpn, rkey);
    host.grant(Qpn::new(0x77), rkey);
    host.rest();
    host.post(write(8, 8)).unwrap();
    assert_eq!(host.direct(), 0);
}

#[test]
fn set_local__false_forgets_and_what_waits_goes_by_packets() {
    let mut host = Host::new(true);
    host.warm();
    host.post(send(8)).unwrap();
    host.post(write(8, 0x5000)).unwrap();
    host.pair.pass(50_000);
    host.set_local(false);
    host.perform(Recv(8));
    let direct = host.direct();
    host.rest();
    assert_eq!(host.direct(), direct);
    let written = |line: &String| line.contains("Success, opcode: Write, byte_len: 20480");
    assert!(host.log.iter().any(written), "{:?}", host.log);
    host.set_local(true);
    host.asked.clear();
    for n in [0, 1] {
        host.post(write(8, 8)).unwrap();
        host.rest();
        assert_eq!((host.asked.len(), host.direct() - direct), (1, n));
    }
}

#[test]
fn set_grant__to_a_queue_that_waits_is_used() {
    let mut host = Host::new(true);
    // A window of 64 KiB holds the second request back until the first is answered; by then the grant has arrived.
    host.post(write(0, 0x4_0000)).unwrap();
    host.post(write(0, 0x4_0000)).unwrap();
    host.pair.step();
    host.rest();
    assert_eq!(host.direct(), 0, "both had begun");
    host.modify(0, QpState::Sqd, QpAttributes::default());
    host.perform(TakeBack);
    host.set_local(false);
    host.set_local(true);
    host.post(write(0, 0x4_0000)).unwrap();
    host.rest();
    host.modify(0, QpState::Rts, QpAttributes::default());
    host.rest();
    assert_eq!(host.direct(), 1);
}

#[test]
fn wants_grant__only_on_rc() {
    let ask = |pair: &mut Pair, to: Target| {
        for i in 0..2 {
            let side = &mut pair.sides[i];
            side.rnic.set_local(side.qpn, true);
        }
        let (va, rkey) = (IOVA, pair.sides[1].rkey);
        let (sges, imm) = (pair.sides[0].sge(0, 8), None);
        let _ = pair.try_post(0, to, Operation::Write { va, rkey, imm }, sges.clone());
        let _ = pair.try_post(0, to, Operation::Send { imm }, sges);
        pair.step();
        let events = std::iter::from_fn(|| pair.sides[0].rnic.poll_event());
        let wanted = events
            .filter(|event| matches!(event, Event::WantsGrant(..)))
            .count();
        let granted = pair.sides[1].rnic.grantable(pair.sides[1].qpn, rkey);
        (wanted, granted.map(|granted| granted.length))
    };
    let refused = (0, Err(NotGranted::NoQp));
    let mut pair = Pair::new();
    assert_eq!(ask(&mut pair, Target::Connected), (1, Ok(MEMORY as u64)));
    assert_eq!(ask(&mut Pair::uc(), Target::Connected), refused);
    let mut pair = Pair::new();
    let qpns = [0, 1].map(|i| pair.ud_qp(i, 7));
    let (path, qpn) = (pair.path(0, pair.sides[1].address), qpns[1]);
    for (side, qpn) in pair.sides.iter_mut().zip(qpns) {
        side.qpn = qpn;
    }
    assert_eq!(ask(&mut pair, Target::Datagram { path, qpn, qkey: 7 }), refused);
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
    assert_eq!(ask(&mut pair, Target::Srq(srqn)), refused);
}

#[test]
fn grantable__says_where_the_region_is_and_what_is_allowed() {
    let mut host = Host::new(false);
    let both = Access::REMOTE_WRITE | Access::REMOTE_READ;
    let table = [
        (Key::Whole, Some((0, IOVA, MEMORY as u64, both))),
        (
            Key::WriteOnly,
            Some((0, IOVA, MEMORY as u64, Access::REMOTE_WRITE)),
        ),
        (Key::ReadOnly, Some((0, IOVA, MEMORY as u64, Access::REMOTE_READ))),
        (Key::ZeroBased, Some((0, 0, MEMORY as u64, both))),
        (Key::Part, Some((PART, IOVA + PART, PART_BYTES, both))),
        (Key::Window, None),
        (Key::Fast, None),
    ];
    for (key, expected) in table {
        let (qpn, rkey) = (host.pair.sides[1].qpn, host.key(key).0);
        let got = host.pair.sides[1].rnic.grantable(qpn, rkey);
        if let Ok(granted) = &got {
            assert_eq!(granted.lkey, LKey(rkey.0), "{key:?}");
        }
        let got = got.map(|g| (g.memory_offset, g.iova, g.length, g.access));
        assert_eq!(got, expected.ok_or(NotGranted::NoRegion), "{key:?}");
    }
    let other_pd = host.pair.sides[1].rnic.alloc_pd();
    let spec = region(host.pair.sides[1].memory.clone(), 0, 8, ALL_ACCESS);
    let rnic = &mut host.pair.sides[1].rnic;
    let foreign = rnic.reg_mr(other_pd, spec).unwrap().1;
    let (qpn, whole) = (host.pair.sides[1].qpn, host.key(Key::Whole).0);
    let rnic = &mut host.pair.sides[1].rnic;
    for rkey in [foreign, RKey(0), RKey(whole.0 ^ 1)] {
        assert_eq!(
            rnic.grantable(qpn, rkey).err(),
            Some(NotGranted::NoRegion),
            "{rkey:?}"
        );
    }
    assert_eq!(rnic.grantable(Qpn::new(77), whole).err(), Some(NotGranted::NoQp));
    let of_qp = |host: &mut Host| {
        let granted = host.pair.sides[1].rnic.grantable(qpn, whole);
        granted.map(|granted| granted.access)
    };
    host.perform(Rights(Access::REMOTE_READ));
    assert_eq!(of_qp(&mut host), Ok(Access::REMOTE_READ));
    host.pair.modify(1, QpState::Error, &QpAttributes::default());
    assert_eq!(of_qp(&mut host), Err(NotGranted::NoQp));
    host.pair.modify(1, QpState::Reset, &QpAttributes::default());
    assert_eq!(of_qp(&mut host), Err(NotGranted::NoQp));
    host.pair.modify(
        1,
        QpState::Init,
        &host.pair.attributes(1, Qpn::new(1), QpState::Init),
    );
    assert_eq!(of_qp(&mut host), Err(NotGranted::NoQp));
    host.pair.back_to_rtr(1);
    assert_eq!(of_qp(&mut host), Ok(both));
}

#[test]
fn qps_to__names_the_connected_ones() {
    let mut pair = Pair::new();
    let (a, b) = pair.second_qps();
    let own = pair.sides[0].qpn;
    let (address, peers) = (pair.sides[1].address, [pair.sides[1].qpn, b]);
    let sorted = |mut qpns: Vec<Qpn>| {
        qpns.sort_unstable();
        qpns
    };
    let rnic = &pair.sides[0].rnic;
    assert_eq!(sorted(rnic.qps_to(address, |_| true)), sorted(vec![own, a]));
    assert_eq!(rnic.qps_to(address, |peer| peer == b), [a]);
    assert_eq!(rnic.qps_to(address, |peer| !peers.contains(&peer)), []);
    assert_eq!(rnic.qps_to(pair.sides[0].address, |_| true), []);
}

#[test]
fn local__packets_need_no_icrc() {
    let mut pair = Pair::new();
    pair.deliver = Box::new(|_, bytes| {
        let end = bytes.len();
        bytes[end - 4..].fill(1);
        true
    });
    let set_local = |pair: &mut Pair, local| {
        for side in &mut pair.sides {
            side.rnic.set_local(side.qpn, local);
        }
    };
    set_local(&mut pair, true);
    pair.write(0, 8, 8);
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(7, Status::Success)]);
    let counters = pair.sides[1].rnic.counters();
    assert_eq!((counters.rcvd_pkts, counters.rcvd_pkts_local), (1, 1));
    set_local(&mut pair, false);
    pair.write(0, 8, 8);
    pair.run();
    assert_eq!(pair.sides[0].completed(), [(7, Status::RetryExceeded)]);
    let counters = pair.sides[1].rnic.counters();
    assert_eq!(counters.rcvd_pkts_local, 1);
}
