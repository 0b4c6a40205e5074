//! Ordinary reads and writes, by message: beside leases, and in order with RDMA requests.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::sync::mpsc;
use std::thread;

use common::*;
use rdmux_push::client::Fallback;
use rdmux_push::server::{Config, ServerEvent};
use rdmux_push::{Error, ErrorCode, MapRequest, Options, Placement, Region};
use rdmux_verbs::Memory;

#[test]
fn ordinary__round_trip_of_more_than_a_message_takes() {
    let folder = tempfile::tempdir().unwrap();
    let file = Region::file(name("f"), &folder.path().join("f"), Some(1 << 20), false).unwrap();
    let durable = file.placement().contains(Placement::PERSISTENT);
    let server = Running::start("127.0.9.60:7174", vec![memory_region("m", 1 << 20), file], LONG);
    let mut client = server.client();
    for (region, placement) in [
        ("m", Placement::empty()),
        ("m", Placement::GLOBAL),
        (
            "f",
            if durable {
                Placement::PERSISTENT
            } else {
                Placement::GLOBAL
            },
        ),
    ] {
        let bytes = pattern(300_001, placement.bits().into());
        client
            .ordinary_write(&name(region), 77, &bytes, placement)
            .unwrap();
        let mut back = vec![0; bytes.len()];
        client.ordinary_read(&name(region), 77, &mut back).unwrap();
        assert!(back == bytes, "{region} {placement:?}");
    }
    let error = client
        .ordinary_write(&name("m"), 0, &[1], Placement::PERSISTENT)
        .unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                code: ErrorCode::NotSupported,
                ..
            }
        ),
        "{error}"
    );
    // An error belongs to its request alone; the requests beside it are done.
    let buffer = client.buffer(1 << 17).unwrap();
    client
        .post_ordinary_write(
            &name("m"),
            (1 << 20) - 70_000,
            &buffer,
            0,
            70_001,
            Placement::empty(),
            1,
        )
        .unwrap();
    client
        .post_ordinary_read(&name("m"), 0, &buffer, 0, 1 << 17, 2)
        .unwrap();
    let error = client.next_done().unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Refused {
                code: ErrorCode::OutOfRange,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(client.next_done().unwrap().token, 2);
}

/// Keeps as many messages in flight as the server allows: each finds a receive, though the answers are acknowledged late.
#[test]
fn ordinary__message_finds_a_receive() {
    let server = Running::start("127.0.9.66:7174", vec![memory_region("m", 1 << 16)], LONG);
    let mut client = server.client();
    let buffer = client.buffer(4096).unwrap();
    for turn in 0..20_000 {
        while client.in_flight() >= 14 {
            client.next_done().unwrap();
        }
        client
            .post_ordinary_write(&name("m"), 0, &buffer, 0, 64, Placement::empty(), turn)
            .unwrap();
    }
    while client.in_flight() > 0 {
        client.next_done().unwrap();
    }
    assert_eq!(client.device().counters().rcvd_rnr_err, 0);
}

/// Posts thousands of pushes and ordinary writes to the same bytes without waiting: the bytes posted last are there.
#[test]
fn ordinary__and_pushes_take_effect_in_the_order_of_posting() {
    let folder = tempfile::tempdir().unwrap();
    let file = Region::file(name("f"), &folder.path().join("f"), Some(1 << 16), false).unwrap();
    let server = Running::start("127.0.9.61:7174", vec![memory_region("m", 1 << 16), file], LONG);
    for region in ["m", "f"] {
        let mut client = server.client();
        let mapping = client.map(&name(region), RW, 0, 0, 0).unwrap();
        let buffer = client.buffer(1 << 16).unwrap();
        let (seed, mut random) = (7u64, 7u64);
        let mut expected = vec![0; 4096];
        let mut slot = 0;
        for turn in 0..2_000u64 {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let (what, at) = (random >> 60, (random >> 40) % 3000);
            let length = 1 + (random >> 20) % 1000;
            while client.in_flight() > 40 {
                client.next_done().unwrap();
            }
            // Each request in flight has its own piece of the buffer.
            slot = (slot + 1) % 64;
            let from = slot * 1024;
            let bytes = vec![turn as u8; length as usize];
            buffer.memory().write(from, &bytes).unwrap();
            let length = length as u32;
            match what {
                0..=9 => client
                    .post_write(&mapping, at, &buffer, from, length, turn)
                    .unwrap(),
                10..=13 => client
                    .post_ordinary_write(&name(region), at, &buffer, from, length, Placement::empty(), turn)
                    .unwrap(),
                14 => {
                    client
                        .post_flush(&mapping, 0, 4096, Placement::GLOBAL, turn)
                        .unwrap();
                    continue;
                }
                _ => {
                    // A read sees all requests before it, by either path.
                    client.drain().unwrap();
                    let mut there = vec![0; 4096];
                    if turn % 2 == 0 {
                        client.read(&mapping, 0, &mut there).unwrap();
                    } else {
                        client.ordinary_read(&name(region), 0, &mut there).unwrap();
                    }
                    assert!(there == expected, "{region}, seed {seed}, turn {turn}");
                    continue;
                }
            }
            expected[at as usize..][..length as usize].copy_from_slice(&bytes);
        }
        client.drain().unwrap();
        let mut there = vec![0; 4096];
        client.read(&mapping, 0, &mut there).unwrap();
        assert!(there == expected, "{region}, seed {seed}");
    }
}

#[test]
fn ordinary__breaks_the_lease_of_another_and_not_ones_own() {
    let server = Running::start_with(Config {
        break_timeout: std::time::Duration::from_millis(200),
        ..config("127.0.9.62:7174", vec![memory_region("m", 4096)])
    });
    let mut holder = server.client();
    let mapping = holder.map(&name("m"), RW, 0, 0, 0).unwrap();
    holder.write(&mapping, 0, &[1; 8]).unwrap();
    holder
        .ordinary_write(&name("m"), 4, &[2; 4], Placement::empty())
        .unwrap();
    assert!(holder.is_held(&mapping));
    let mut other = server.client();
    let mut there = [0; 8];
    other.ordinary_read(&name("m"), 0, &mut there).unwrap();
    assert_eq!(there, [1, 1, 1, 1, 2, 2, 2, 2]);
    // The holder handled no notices: the server revoked its mapping for the reader.
    server.wait_for(|event| matches!(event, ServerEvent::Revoked { .. }));
    holder.handle_notices().unwrap();
    assert!(!holder.is_held(&mapping));
}

#[test]
fn fallback__goes_on_by_message_behind_what_was_pushed() {
    let server = Running::start("127.0.9.63:7174", vec![memory_region("m", 1 << 20)], LONG);
    let mut first = server.client_with(Options {
        fallback: Fallback::Automatic,
        ..Options::default()
    });
    let mapping = first.map(&name("m"), RW, 0, 0, 5).unwrap();
    let buffer = first.buffer(1 << 18).unwrap();
    let bytes = pattern(1 << 18, 5);
    buffer.memory().write(0, &bytes).unwrap();
    // Another client writes there again and again: each client that needs the range gets it in turn.
    let (stop, stopped) = mpsc::channel::<()>();
    let mut other = server.client();
    let thread = thread::spawn(move || {
        let mut turns = 0;
        while stopped.try_recv().is_err() {
            let theirs = other.map_as(&name("m"), &MapRequest::new(RW)).unwrap();
            match other.write(&theirs, 1 << 19, &[7; 1000]) {
                Ok(()) => turns += 1,
                Err(Error::LeaseBroken { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            other.unmap(theirs).unwrap();
        }
        turns
    });
    for turn in 0..200u64 {
        // The other client takes the lease somewhere in the first half, with writes in flight.
        while turn == 100 && first.is_held(&mapping) {
            first.handle_notices().unwrap();
            thread::yield_now();
        }
        let at = turn * 1000;
        first.post_write(&mapping, at, &buffer, at, 1000, turn).unwrap();
        if turn % 10 == 9 {
            first
                .post_flush(&mapping, 0, at + 1000, Placement::GLOBAL, 1000 + turn)
                .unwrap();
        }
        while first.in_flight() > 8 {
            first.next_done().unwrap();
        }
    }
    first.drain().unwrap();
    assert!(!first.is_held(&mapping), "the other took it");
    let mut there = vec![0; 200_000];
    first.read(&mapping, 0, &mut there).unwrap();
    assert!(there == bytes[..200_000], "bytes differ");
    stop.send(()).unwrap();
    assert!(thread.join().unwrap() > 0);
}

#[test]
fn fallback__left_to_the_application_is_an_error() {
    let server = Running::start("127.0.9.64:7174", vec![memory_region("m", 4096)], LONG);
    let mut first = server.client();
    let mapping = first.map(&name("m"), RW, 0, 0, 0).unwrap();
    first.release(&mapping).unwrap();
    for result in [first.write(&mapping, 0, &[1]), first.read(&mapping, 0, &mut [0])] {
        assert!(matches!(result, Err(Error::LeaseBroken { .. })), "{result:?}");
    }
    first
        .ordinary_write(&name("m"), 0, &[1], Placement::empty())
        .unwrap();
    let again = first.map(&name("m"), RW, 0, 0, 0).unwrap();
    first.write(&again, 0, &[2]).unwrap();
}

#[test]
fn fallback__of_a_push_whose_lease_ends_while_it_waits_for_a_message() {
    let disk = Disk::new(true);
    let server = Running::start(
        "127.0.9.65:7174",
        vec![disk.region(), memory_region("m", 4096)],
        LONG,
    );
    let mut first = server.client_with(Options {
        fallback: Fallback::Automatic,
        ..Options::default()
    });
    let mapping = first.map(&name("m"), RW, 0, 0, 0).unwrap();
    let buffer = first.buffer(4096).unwrap();
    buffer.memory().write(0, &[5; 8]).unwrap();
    // This message takes long, so that the push behind it is held back.
    first
        .post_ordinary_write(&name("disk"), 0, &buffer, 0, 8, Placement::PERSISTENT, 1)
        .unwrap();
    disk.wait_until_held();
    let mut other = server.client();
    let thread = thread::spawn(move || {
        let theirs = other.map(&name("m"), RW, 0, 0, 0).unwrap();
        other.write(&theirs, 0, &[6; 16]).unwrap();
        disk.set(|gate| gate.shut = false);
        other.release(&theirs).unwrap();
    });
    first.post_write(&mapping, 0, &buffer, 0, 8, 2).unwrap();
    first.drain().unwrap();
    thread.join().unwrap();
    assert!(!first.is_held(&mapping));
    let mut there = [0; 16];
    server.regions[1].memory().read(0, &mut there).unwrap();
    assert_eq!(there, [5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6]);
}

/// Checks that a full queue refuses an ordinary write, and that no request waits for it afterwards.
#[test]
fn ordinary__that_a_full_queue_refuses_holds_nothing_up() {
    let server = Running::start("127.0.9.67:7174", vec![memory_region("m", 1 << 16)], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("m"), RW, 0, 0, 0).unwrap();
    let buffer = client.buffer(1 << 12).unwrap();
    let mut posted = 0;
    while client.post_write(&mapping, 0, &buffer, 0, 8, posted).is_ok() {
        posted += 1;
        assert!(posted < 1 << 20, "the queue is never full");
    }
    let refused = client.post_ordinary_write(&name("m"), 0, &buffer, 0, 8, Placement::empty(), posted);
    assert!(refused.is_err());
    for token in 0..posted {
        assert_eq!(client.next_done().unwrap().token, token);
    }
    client.post_write(&mapping, 0, &buffer, 0, 8, posted).unwrap();
    assert_eq!(client.next_done().unwrap().token, posted);
}
