//! Flushes: the rights and ways to ask for each kind, and the durability that they give.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::time::{Duration, Instant};

use common::*;
use rdmux_push::client::{DEPTH_MAX, Kind, Part};
use rdmux_push::server::EndReason;
use rdmux_push::{Access, Client, Domain, Error, ErrorCode, Options, Placement, Region, Way};
use rdmux_verbs::{Memory, Operation, SgeList, Status};
use rdmux_wire::push::Message;
use skip::skip;

#[test]
fn flush__persistent_of_memory_is_refused() {
    let server = Running::start("127.0.9.10:7174", vec![memory_region("m", 4096)], LONG);
    let mut client = server.client();
    let mapping = client.map_as(&name("m"), &shared()).unwrap();
    assert_eq!(
        (mapping.placement(), mapping.strongest()),
        (Placement::GLOBAL, Placement::GLOBAL)
    );
    let error = client.flush(&mapping, 0, 8, Placement::PERSISTENT).unwrap_err();
    assert!(
        error.to_string().contains("does not survive a loss of power"),
        "{error}"
    );
    client.flush(&mapping, 0, 8, Placement::GLOBAL).unwrap();
    // A client that posts such a flush all the same loses its connection.
    let raw = Raw::ready(server.address);
    let (_, va, rkey) = raw.map("m", RW, 0, 0);
    raw.post(flush(va, rkey, Placement::PERSISTENT), SgeList::EMPTY);
    assert_eq!(raw.status(), Status::RemoteAccess);
}

#[test]
fn flush__persistent_of_a_file_in_memory_is_refused() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return skip("/dev/shm cannot be written");
    };
    let region = Region::file(name("f"), &folder.path().join("f"), Some(4096), false).unwrap();
    let server = Running::start("127.0.9.11:7174", vec![region], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("f"), RW, 0, 0, 0).unwrap();
    assert_eq!(mapping.domain(), Domain::None);
    let error = client.flush(&mapping, 0, 8, Placement::PERSISTENT).unwrap_err();
    assert!(matches!(error, Error::NotPersistent { .. }), "{error}");
}

#[test]
fn flush__is_held_as_long_as_the_disk_takes_and_others_go_on() {
    let disk = Disk::new(true);
    let server = Running::start(
        "127.0.9.12:7174",
        vec![disk.region(), memory_region("m", 4096)],
        LONG,
    );
    let mut client = server.client();
    let mapping = client.map(&name("disk"), RW, 0, 8192, 5).unwrap();
    client.write(&mapping, 0, &[1; 8192]).unwrap();
    let mut other = server.client();
    let others = other.map(&name("m"), RW, 0, 0, 0).unwrap();
    let held = Instant::now();
    std::thread::scope(|scope| {
        let flushing = scope.spawn(|| client.flush(&mapping, 0, 8192, Placement::PERSISTENT));
        disk.wait_until_held();
        // This lasts longer than all retries of the transport together: the client waits, and does not lose its connection.
        while held.elapsed() < Duration::from_secs(4) {
            other.write(&others, 0, &[1; 100]).unwrap();
            assert_eq!(
                other.stat(&name("disk"), 5).unwrap().durable,
                0,
                "not durable yet"
            );
            assert!(
                !flushing.is_finished(),
                "the flush was acknowledged before it was done"
            );
            // Time must pass here: a flush that waits for no disk would have ended in it.
            std::thread::sleep(Duration::from_millis(50));
        }
        disk.set(|gate| gate.shut = false);
        flushing.join().unwrap().unwrap();
    });
    assert_eq!(other.stat(&name("disk"), 5).unwrap().durable, 8192);
}

#[test]
fn access__to_a_disk_that_stalls_holds_up_no_other_client() {
    let disk = Disk::new(false);
    let regions = vec![disk.region(), memory_region("m", 4096)];
    let server = Running::start("127.0.9.190:7174", regions, LONG);
    for reads in [false, true] {
        let raw = Raw::ready(server.address);
        let (_, va, rkey) = raw.map("disk", RW, 0, 0);
        disk.set(|gate| gate.stalls = true);
        let sges = raw.mr.sge(0, 8).into();
        if reads {
            raw.post(Operation::Read { va, rkey }, sges);
        } else {
            raw.post(Operation::Write { va, rkey, imm: None }, sges);
        }
        disk.wait_until_held();
        let mut other = server.client();
        let mapping = other.map(&name("m"), RW, 0, 0, 0).unwrap();
        other.write(&mapping, 0, &[1; 100]).unwrap();
        let mut read = [0; 100];
        other.read(&mapping, 0, &mut read).unwrap();
        assert_eq!(read, [1; 100]);
        disk.set(|gate| gate.stalls = false);
        assert_eq!(raw.status(), Status::Success);
    }
}

#[test]
fn flush__that_fails_ends_the_connection_and_writing_for_good() {
    let disk = Disk::new(false);
    let server = Running::start(
        "127.0.9.13:7174",
        vec![disk.region(), memory_region("m", 4096)],
        LONG,
    );
    let mut other = server.client();
    let mut client = server.client();
    let mapping = client.map(&name("disk"), RW, 0, 8192, 5).unwrap();
    client.write(&mapping, 0, &[1; 8192]).unwrap();
    disk.set(|gate| gate.fails = true);
    let error = client
        .flush(&mapping, 0, 8192, Placement::PERSISTENT)
        .unwrap_err();
    assert!(error.to_string().contains("file failed"), "{error}");
    let (reason, _) = server.end();
    assert!(
        matches!(&reason, EndReason::Failed(why) if why.contains("errno 5")),
        "{reason}"
    );
    assert_eq!(other.stat(&name("disk"), 5).unwrap().durable, 0);
    // A later success would hide what was lost.
    disk.set(|gate| gate.fails = false);
    let error = other.map(&name("disk"), RW, 0, 0, 0).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                code: ErrorCode::Io,
                ..
            }
        ),
        "{error}"
    );
    other.map(&name("disk"), Access::READ, 0, 0, 0).unwrap();
    other.map(&name("m"), RW, 0, 0, 0).unwrap();
}

const PERSISTENT: Placement = Placement::PERSISTENT;

#[test]
fn flush__by_each_way_that_the_region_offers_and_by_no_other() {
    // Domain, placed straight into it; which of FLUSH, software flush, READ after WRITE are durable.
    let table = [
        (Domain::File, false, [true, true, false]),
        (Domain::Adr, false, [true, true, false]),
        (Domain::Adr, true, [true, true, true]),
        (Domain::Eadr, true, [true, true, true]),
        (Domain::WholeSystem, true, [true, true, true]),
        (Domain::None, true, [false, false, false]),
    ];
    let ways = [Way::Flush, Way::SoftwareFlush, Way::ReadAfterWrite];
    for (domain, placed, expected) in table {
        let disk = Disk::new(false);
        let mut region = disk.region_of(domain);
        if placed {
            region = region.placed_in_domain();
        }
        let server = Running::start("127.0.9.30:7174", vec![region], LONG);
        let mut client = server.client();
        let mapping = client.map(&name("disk"), RW, 0, 0, 0).unwrap();
        for (way, offered) in ways.into_iter().zip(expected) {
            client.write(&mapping, 0, &pattern(100_000, 1)).unwrap();
            let before = disk.flushes();
            let posted = client.post_flush_by(&mapping, 0, 100_000, PERSISTENT, Some(way), 7);
            if !offered {
                let error = posted.unwrap_err();
                assert!(
                    matches!(error, Error::NoWay { .. }),
                    "{domain:?} {placed} {way}: {error}"
                );
                continue;
            }
            assert_eq!(client.next_done().unwrap().token, 7, "{domain:?} {placed} {way}");
            let flushed = disk.flushes() - before;
            assert_eq!(
                flushed,
                usize::from(way != Way::ReadAfterWrite),
                "{domain:?} {placed} {way}"
            );
        }
        let chosen = mapping.way(PERSISTENT, None);
        assert_eq!(chosen.is_ok(), expected[0], "{domain:?} {placed}");
    }
}

#[test]
fn flush__read_after_write_needs_the_right_to_read() {
    let region = Disk::new(false).region_of(Domain::Adr).placed_in_domain();
    let server = Running::start("127.0.9.31:7174", vec![region], LONG);
    let mut client = server.client_with(Options {
        way: Some(Way::ReadAfterWrite),
        ..Options::default()
    });
    let mapping = client.map(&name("disk"), Access::WRITE, 0, 0, 0).unwrap();
    let error = client.flush(&mapping, 0, 8, PERSISTENT).unwrap_err();
    assert!(
        error.to_string().contains("use one of FLUSH, software flush"),
        "{error}"
    );
    let mapping = client.map(&name("disk"), RW, 0, 0, 0).unwrap();
    client.flush(&mapping, 0, 8, PERSISTENT).unwrap();
    // Flushes the last bytes too: nothing past the mapping is read.
    client
        .flush(&mapping, mapping.region_bytes() - 3, 3, PERSISTENT)
        .unwrap();
}

#[test]
fn post_write_and_flush__completes_as_both_do_by_each_way() {
    let disk = Disk::new(false);
    let region = disk.region_of(Domain::Adr).placed_in_domain();
    let server = Running::start("127.0.9.36:7174", vec![region], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("disk"), RW, 0, 1 << 20, 5).unwrap();
    let buffer = client.buffer(1 << 20).unwrap();
    let bytes = pattern(1 << 20, 4);
    buffer.memory().write(0, &bytes).unwrap();
    let part = |at: u64, length| Part {
        offset: at,
        buffer: &buffer,
        from: at,
        length,
    };
    let ways = [Way::Flush, Way::SoftwareFlush, Way::ReadAfterWrite];
    for (turn, at) in (0..64u64).map(|turn| (turn, turn << 14)) {
        let way = Some(ways[turn as usize % 3]);
        let tokens = [2 * turn, 2 * turn + 1];
        client
            .post_write_and_flush(
                &mapping,
                part(at, 1 << 14),
                (at, 1 << 14),
                PERSISTENT,
                way,
                tokens,
            )
            .unwrap();
    }
    for token in 0..128 {
        let done = client.next_done().unwrap();
        let kind = [Kind::Write, Kind::Flush][token as usize % 2];
        assert_eq!((done.token, done.kind), (token, kind));
    }
    assert_eq!(client.in_flight(), 0);
    let there = client.checksum(&name("disk"), 0, 1 << 20).unwrap();
    assert_eq!(there, crc(&bytes));
    // Neither is posted where one of them may not be.
    let outside = mapping.region_bytes();
    for (part, range) in [(part(outside, 8), (0, 8)), (part(0, 8), (outside, 8))] {
        let refused = client.post_write_and_flush(&mapping, part, range, PERSISTENT, None, [0; 2]);
        assert!(refused.is_err());
        assert_eq!(client.in_flight(), 0);
    }
    // There is room for both or for none.
    let mut posted = 0;
    while client
        .post_write_and_flush(&mapping, part(0, 8), (0, 8), PERSISTENT, None, [0; 2])
        .is_ok()
    {
        posted += 2;
    }
    assert_eq!((posted, client.in_flight()), (DEPTH_MAX, DEPTH_MAX));
    client.drain().unwrap();
}

#[test]
fn software_flush__pipelined_behind_writes_covers_them_all() {
    let server = Running::start("127.0.9.32:7174", vec![Disk::new(false).region()], LONG);
    let mut client = server.client_with(Options {
        way: Some(Way::SoftwareFlush),
        ..Options::default()
    });
    let mapping = client.map(&name("disk"), RW, 0, 1 << 20, 5).unwrap();
    let buffer = client.buffer(1 << 20).unwrap();
    let bytes = pattern(1 << 20, 3);
    buffer.memory().write(0, &bytes).unwrap();
    // Posts more flushes than the server takes at a time, each behind its write, without waiting for any.
    for at in 0..64u64 {
        let offset = at << 14;
        client
            .post_write(&mapping, offset, &buffer, offset, 1 << 14, 2 * at)
            .unwrap();
        client
            .post_flush(&mapping, offset, 1 << 14, PERSISTENT, 2 * at + 1)
            .unwrap();
    }
    for token in 0..128 {
        assert_eq!(
            client.next_done().unwrap().token,
            token,
            "in the order of posting"
        );
    }
    assert_eq!(client.stat(&name("disk"), 5).unwrap().durable, 1 << 20);
    let there = client.checksum(&name("disk"), 0, 1 << 20).unwrap();
    assert_eq!(there, crc(&bytes));
}

#[test]
fn software_flush__is_held_as_long_as_the_disk_takes_and_others_go_on() {
    let disk = Disk::new(true);
    let regions = vec![disk.region(), memory_region("m", 4096)];
    let server = Running::start("127.0.9.33:7174", regions, LONG);
    let mut client = server.client();
    let mapping = client.map(&name("disk"), RW, 0, 8192, 5).unwrap();
    client.write(&mapping, 0, &[1; 8192]).unwrap();
    let way = Some(Way::SoftwareFlush);
    client
        .post_flush_by(&mapping, 0, 8192, PERSISTENT, way, 1)
        .unwrap();
    disk.wait_until_held();
    let mut other = server.client();
    let others = other.map(&name("m"), RW, 0, 0, 0).unwrap();
    for _ in 0..20 {
        other.write(&others, 0, &[1; 100]).unwrap();
        assert_eq!(
            other.stat(&name("disk"), 5).unwrap().durable,
            0,
            "not durable yet"
        );
    }
    // The same client's other requests complete too.
    assert_eq!(client.stat(&name("m"), 0).unwrap().bytes, 4096);
    client.handle_notices().unwrap();
    assert_eq!(client.in_flight(), 1);
    disk.set(|gate| gate.shut = false);
    assert_eq!(client.next_done().unwrap().token, 1);
    assert_eq!(other.stat(&name("disk"), 5).unwrap().durable, 8192);
}

#[test]
fn software_flush__those_that_wait_together_are_all_covered() {
    const GLOBAL: Placement = Placement::GLOBAL;
    // Among flushes that wait together, the first is a visible or a persistent one, before or behind the others' ranges.
    let table = [
        [(GLOBAL, 0), (PERSISTENT, 8192)],
        [(GLOBAL, 8192), (PERSISTENT, 0)],
        [(PERSISTENT, 0), (GLOBAL, 8192)],
        [(PERSISTENT, 8192), (PERSISTENT, 0)],
        [(PERSISTENT, 0), (PERSISTENT, 8192)],
    ];
    for waiting in table {
        let disk = Disk::new(true);
        let server = Running::start("127.0.9.35:7174", vec![disk.region()], LONG);
        let mut client = server.client();
        let mapping = client.map(&name("disk"), RW, 0, 0, 0).unwrap();
        let post = |client: &mut Client, offset, placement, token| {
            let way = Some(Way::SoftwareFlush);
            let posted = client.post_flush_by(&mapping, offset, 4096, placement, way, token);
            posted.unwrap();
        };
        // While this flush is held, the others wait for its thread.
        post(&mut client, 65536, PERSISTENT, 0);
        disk.wait_until_held();
        for (token, (placement, offset)) in (1..).zip(waiting) {
            post(&mut client, offset, placement, token);
        }
        // The answer comes after the server has taken all earlier requests.
        client.stat(&name("disk"), 0).unwrap();
        disk.set(|gate| gate.shut = false);
        for token in 0..=waiting.len() as u64 {
            assert_eq!(client.next_done().unwrap().token, token);
        }
        let flushed = &disk.gate.lock().unwrap().flushed[1..];
        for (_, offset) in waiting.iter().filter(|(placement, _)| *placement == PERSISTENT) {
            assert!(
                flushed
                    .iter()
                    .any(|range| range.start <= *offset && offset + 4096 <= range.end),
                "{waiting:?}: {offset} was answered, the medium got {flushed:?}"
            );
        }
    }
}

#[test]
fn software_flush__errors_are_answers_and_the_connection_goes_on() {
    let disk = Disk::new(false);
    let regions = vec![disk.region(), memory_region("m", 4096)];
    let server = Running::start("127.0.9.34:7174", regions, LONG);
    let raw = Raw::ready(server.address);
    let (on_disk, ..) = raw.map("disk", RW, 4096, 4096);
    let (in_memory, ..) = raw.map("m", RW, 0, 0);
    let flush = |mapping, offset, length, placement| Message::Flush {
        mapping,
        offset,
        length,
        placement,
    };
    for (message, code) in [
        (flush(on_disk, 4095, 2, PERSISTENT), ErrorCode::OutOfRange),
        (flush(on_disk, 8191, 2, PERSISTENT), ErrorCode::OutOfRange),
        (flush(in_memory, 0, 1, PERSISTENT), ErrorCode::NotSupported),
        (flush(9, 0, 1, PERSISTENT), ErrorCode::Protocol),
    ] {
        let answer = raw.ask(&message);
        assert!(
            matches!(answer, Some(Message::Error { code: c, .. }) if c == code),
            "{message:?}: {answer:?}"
        );
    }
    assert_eq!(
        raw.ask(&flush(on_disk, 4096, 4096, PERSISTENT)),
        Some(Message::Flushed)
    );
    // The server reports a medium that fails, and accepts no more writes to it.
    disk.set(|gate| gate.fails = true);
    let answer = raw.ask(&flush(on_disk, 4096, 4096, PERSISTENT));
    assert!(
        matches!(
            answer,
            Some(Message::Error {
                code: ErrorCode::Io,
                ..
            })
        ),
        "{answer:?}"
    );
    let error = server.client().map(&name("disk"), RW, 0, 0, 0).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                code: ErrorCode::Io,
                ..
            }
        ),
        "{error}"
    );
}
