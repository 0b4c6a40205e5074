//! A server and its clients in one process, over the soft NIC on loopback addresses.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::path::Path;
use std::time::{Duration, Instant};

use common::*;
use rdmux_memory::FileMemory;
use rdmux_push::client::{Handshake, Kind};
use rdmux_push::server::{EndReason, ServerEvent};
use rdmux_push::{Access, Client, Domain, Error, ErrorCode, Key, Options, Placement, Region, Server};
use rdmux_verbs::{ConnectParams, Device, Operation, QpOptions, Status};
use rdmux_wire::push::Message;
use skip::skip;

#[test]
fn write_flush_read__round_trip() {
    let server = Running::start("127.0.9.1:7174", vec![memory_region("m", 5 << 20)], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("m"), RW, 0, 0, 0).unwrap();
    assert_eq!(
        (mapping.region_bytes(), mapping.domain()),
        (5 << 20, Domain::None)
    );
    let bytes = pattern(3_000_001, 1);
    client.write(&mapping, 1_234_567, &bytes).unwrap();
    client
        .flush(&mapping, 1_234_567, bytes.len() as u64, Placement::GLOBAL)
        .unwrap();
    let mut back = vec![0; bytes.len()];
    client.read(&mapping, 1_234_567, &mut back).unwrap();
    assert!(back == bytes, "bytes differ");
    let there = client
        .checksum(&name("m"), 1_234_567, bytes.len() as u64)
        .unwrap();
    assert_eq!(there, crc(&bytes));
    client.unmap(mapping).unwrap();
    client.close();
    assert_eq!(server.end(), (EndReason::Goodbye, 0));
}

#[test]
fn post__a_buffer_may_be_dropped_before_its_requests_are_done() {
    for kind in [Kind::Read, Kind::Write] {
        let disk = Disk::new(true);
        let server = Running::start("127.0.9.24:7174", vec![disk.region()], LONG);
        let mut client = server.client();
        let mapping = client.map(&name("disk"), RW, 0, 0, 0).unwrap();
        // Answers come in order, so nothing more is done while the flush is held; and of so many bytes not all have left.
        client
            .post_flush(&mapping, 0, 8, Placement::PERSISTENT, 0)
            .unwrap();
        let bytes = 1 << 20;
        let buffer = client.buffer(bytes).unwrap();
        for token in 1..=64 {
            match kind {
                Kind::Read => client.post_read(&mapping, 0, &buffer, 0, bytes as u32, token),
                _ => client.post_write(&mapping, 0, &buffer, 0, bytes as u32, token),
            }
            .unwrap();
        }
        disk.wait_until_held();
        drop(buffer);
        disk.set(|gate| gate.shut = false);
        for token in 0..=64 {
            assert_eq!(
                client.next_done().map(|done| done.token).unwrap(),
                token,
                "{kind:?}"
            );
        }
        client.close();
        assert_eq!(server.end(), (EndReason::Goodbye, 1));
    }
}

#[test]
fn close__says_goodbye_behind_a_flush_that_takes_long() {
    let disk = Disk::new(true);
    let server = Running::start("127.0.9.25:7174", vec![disk.region()], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("disk"), RW, 0, 0, 0).unwrap();
    client
        .post_flush(&mapping, 0, 8, Placement::PERSISTENT, 1)
        .unwrap();
    // More bytes than leave before the flush is acknowledged, so that the goodbye has to wait.
    let bytes = 1 << 20;
    let buffer = client.buffer(bytes).unwrap();
    for token in 2..=9 {
        client
            .post_write(&mapping, 0, &buffer, 0, bytes as u32, token)
            .unwrap();
    }
    disk.wait_until_held();
    let closing = std::thread::spawn(|| client.close());
    // Time must pass here, more than all retries of the transport take: a client that gives up disconnects in it.
    std::thread::sleep(Duration::from_secs(4));
    disk.set(|gate| gate.shut = false);
    closing.join().unwrap();
    assert_eq!(server.end(), (EndReason::Goodbye, 1));
}

#[test]
fn connect__over_ipv6() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        return skip("this host has no IPv6");
    }
    let server = Running::start("[::1]:7981", vec![memory_region("m", 4096)], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("m"), RW, 0, 0, 0).unwrap();
    client.write(&mapping, 0, b"over IPv6").unwrap();
    let mut back = [0; 9];
    client.read(&mapping, 0, &mut back).unwrap();
    assert_eq!(&back, b"over IPv6");
}

#[test]
fn list_and_stat__tell_what_there_is() {
    let regions = vec![memory_region("a", 1000), memory_region("b", 2000)];
    let server = Running::start("127.0.9.2:7174", regions, LONG);
    let mut client = server.client();
    let (regions, total) = client.list().unwrap();
    let names: Vec<_> = regions.iter().map(|r| (r.name.as_str(), r.bytes)).collect();
    assert_eq!((names, total), (vec![("a", 1000), ("b", 2000)], 2));
    assert_eq!(client.stat(&name("b"), 0).unwrap().bytes, 2000);
    let error = client.stat(&name("c"), 0).unwrap_err();
    assert!(
        error.to_string().contains("no region 'c'; the server has a, b"),
        "{error}"
    );
}

#[test]
fn connect__with_another_key_is_refused() {
    let server = Running::start("127.0.9.3:7174", vec![memory_region("m", 10)], LONG);
    let options = Options {
        from: Some(server.address.ip()),
        ..Options::default()
    };
    let error = Client::connect(server.address, &Key::new([8; 32]), &options).unwrap_err();
    assert!(matches!(error, Error::WrongKey(_)), "{error}");
    server.client().stat(&name("m"), 0).unwrap();
}

#[test]
fn map__errors_leave_the_connection_usable() {
    let constant = memory_region("constant", 100);
    let constant = Region::new(name("constant"), constant.memory().clone(), Domain::None, true);
    let server = Running::start("127.0.9.4:7174", vec![memory_region("m", 100), constant], LONG);
    let mut client = server.client();
    for (region, access, offset, length, code) in [
        ("x", RW, 0, 1, ErrorCode::NoSuchRegion),
        ("constant", RW, 0, 1, ErrorCode::ReadOnly),
        ("m", RW, 50, 51, ErrorCode::OutOfRange),
        ("m", RW, u64::MAX, 1, ErrorCode::OutOfRange),
    ] {
        let error = client.map(&name(region), access, offset, length, 0).unwrap_err();
        assert!(
            matches!(&error, Error::Refused { code: c, .. } if *c == code),
            "{error}"
        );
    }
    let mapping = client.map(&name("constant"), Access::READ, 0, 0, 0).unwrap();
    let error = client.write(&mapping, 0, &[1]).unwrap_err();
    assert!(matches!(error, Error::NoRight { .. }), "{error}");
    let mapping = client.map(&name("m"), RW, 10, 20, 0).unwrap();
    for (offset, length) in [(9, 1), (10, 21), (30, 1), (29, 2)] {
        let error = client.write(&mapping, offset, &vec![1; length]).unwrap_err();
        assert!(
            matches!(error, Error::OutOfRange { .. }),
            "{offset} {length}: {error}"
        );
    }
    client.write(&mapping, 10, &[1; 20]).unwrap();
}

#[test]
fn map__two_of_one_client_are_independent() {
    let regions = vec![memory_region("a", 8192), memory_region("b", 8192)];
    let server = Running::start("127.0.9.5:7174", regions, LONG);
    let mut client = server.client();
    let a = client.map(&name("a"), RW, 0, 4096, 0).unwrap();
    let b = client.map(&name("b"), RW, 4096, 4096, 0).unwrap();
    client.write(&a, 0, &pattern(4096, 1)).unwrap();
    client.write(&b, 4096, &pattern(4096, 2)).unwrap();
    client.unmap(a).unwrap();
    client.write(&b, 4096, &pattern(4096, 3)).unwrap();
    let mut there = vec![0; 8192];
    server.regions[0].memory().read(0, &mut there).unwrap();
    assert!(there[..4096] == pattern(4096, 1) && there[4096..] == [0; 4096]);
    server.regions[1].memory().read(0, &mut there).unwrap();
    assert!(there[..4096] == [0; 4096] && there[4096..] == pattern(4096, 3));
}

#[test]
fn map__up_to_the_limit() {
    let server = Running::start("127.0.9.6:7174", vec![memory_region("m", 10)], LONG);
    let mut client = server.client();
    let mut mappings = Vec::new();
    let error = loop {
        match client.map(&name("m"), Access::READ, 0, 0, 0) {
            Ok(mapping) => mappings.push(mapping),
            Err(error) => break error,
        }
    };
    assert_eq!(mappings.len(), 64);
    assert!(
        matches!(
            error,
            Error::Refused {
                code: ErrorCode::Busy,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn access__outside_of_a_mapping_ends_that_connection_only() {
    let server = Running::start("127.0.9.7:7174", vec![memory_region("m", 65536)], LONG);
    let mut other = server.client();
    let others = other.map_as(&name("m"), &shared()).unwrap();
    let cases = [
        ("one byte past its end", 4096, 1, true),
        ("over its end", 4000, 97, true),
        ("before its start", -1, 2, true),
        ("a READ past its end", 4096, 1, false),
    ];
    for (what, at, length, write) in cases {
        let raw = Raw::ready(server.address);
        let (_, va, rkey) = raw.map("m", RW, 4096, 4096);
        let va = va.wrapping_add_signed(at);
        let operation = if write {
            Operation::Write { va, rkey, imm: None }
        } else {
            Operation::Read { va, rkey }
        };
        raw.post(operation, raw.mr.sge(0, length).into());
        assert_eq!(raw.status(), Status::RemoteAccess, "{what}");
        let (reason, mappings) = server.end();
        assert!(
            matches!(&reason, EndReason::Failed(why) if why.contains("outside")),
            "{what}: {reason}"
        );
        assert_eq!(mappings, 1);
        other.write(&others, 0, &[1; 100]).unwrap();
    }
    let mut there = vec![0; 65536 - 100];
    server.regions[0].memory().read(100, &mut there).unwrap();
    assert!(there.iter().all(|b| *b == 0), "nothing was written outside");
}

#[test]
fn access__with_the_key_of_another_client_or_of_an_ended_mapping() {
    let server = Running::start("127.0.9.8:7174", vec![memory_region("m", 4096)], LONG);
    let owner = Raw::ready(server.address);
    let (mapping, va, rkey) = owner.map("m", RW, 0, 0);
    let thief = Raw::ready(server.address);
    thief.post(
        Operation::Write { va, rkey, imm: None },
        thief.mr.sge(0, 8).into(),
    );
    assert_eq!(thief.status(), Status::RemoteAccess);
    owner.post(
        Operation::Write { va, rkey, imm: None },
        owner.mr.sge(0, 8).into(),
    );
    assert_eq!(owner.status(), Status::Success);
    assert_eq!(owner.ask(&Message::Unmap { mapping }), Some(Message::Unmapped));
    owner.post(
        Operation::Write { va, rkey, imm: None },
        owner.mr.sge(0, 8).into(),
    );
    assert_eq!(owner.status(), Status::RemoteAccess);
}

#[test]
fn access__write_through_a_mapping_for_reading() {
    let server = Running::start("127.0.9.9:7174", vec![memory_region("m", 4096)], LONG);
    let raw = Raw::ready(server.address);
    let (_, va, rkey) = raw.map("m", Access::READ, 0, 0);
    raw.post(Operation::Write { va, rkey, imm: None }, raw.mr.sge(0, 8).into());
    assert_eq!(raw.status(), Status::RemoteAccess);
}

#[test]
fn write__to_a_file_that_another_process_truncates() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f");
    let region = Region::file(name("f"), &path, Some(1 << 20), false).unwrap();
    let server = Running::start("127.0.9.14:7174", vec![region, memory_region("m", 4096)], LONG);
    let mut other = server.client();
    let others = other.map(&name("m"), RW, 0, 0, 0).unwrap();
    for what in ["write", "read", "flush"] {
        let mut client = server.client();
        // A client that shared nothing would have been asked to release first.
        let mapping = client.map_as(&name("f"), &shared()).unwrap();
        client.write(&mapping, 0, &[1; 65536]).unwrap();
        std::fs::File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        let result = match what {
            "write" => client.write(&mapping, 65536, &[1; 65536]),
            "read" => client.read(&mapping, 65536, &mut [1; 65536]),
            _ => client.flush(&mapping, 0, 65536, mapping.strongest()),
        };
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Lost { .. }), "{what}: {error}");
        let (reason, _) = server.end();
        assert!(
            matches!(&reason, EndReason::Failed(why) if why.contains("truncated")),
            "{what}: {reason}"
        );
        other.write(&others, 0, &[1; 100]).unwrap();
        // Restores the file's size for the next round.
        drop(FileMemory::open(&path, Some(1 << 20), false).unwrap());
    }
}

#[test]
fn map__of_a_file_that_its_path_no_longer_leads_to_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (path, aside) = (folder.path().join("f"), folder.path().join("aside"));
    let region = Region::file(name("f"), &path, Some(65536), false).unwrap();
    let server = Running::start("127.0.9.28:7174", vec![region, memory_region("m", 4096)], LONG);
    let mut holder = server.client();
    let mapping = holder.map_as(&name("f"), &shared()).unwrap();
    let refused = |error: Error| {
        let is_io = matches!(&error, Error::Refused { code, .. } if *code == ErrorCode::Io);
        assert!(is_io && error.to_string().contains("/f"), "{error}");
        let event = server.wait_for(|event| matches!(event, ServerEvent::RequestRefused { .. }));
        assert!(event.to_string().contains("/f"), "{event}");
    };
    type Change = fn(&Path, &Path) -> std::io::Result<()>;
    let renamed: Change = |path, aside| std::fs::rename(path, aside);
    let copied: Change = |path, aside| std::fs::copy(aside, path).map(drop);
    let restored: Change = |path, aside| std::fs::rename(aside, path);
    let removed: Change = |path, _| std::fs::remove_file(path);
    for (change, leads_there) in [
        (renamed, false),
        (copied, false),
        (restored, true),
        (removed, false),
    ] {
        change(&path, &aside).unwrap();
        let mut client = server.client();
        if leads_there {
            client.map_as(&name("f"), &shared()).unwrap();
            client
                .ordinary_write(&name("f"), 0, &[1], Placement::GLOBAL)
                .unwrap();
        } else {
            refused(client.map_as(&name("f"), &shared()).unwrap_err());
            refused(
                client
                    .ordinary_write(&name("f"), 0, &[1], Placement::GLOBAL)
                    .unwrap_err(),
            );
            refused(client.ordinary_read(&name("f"), 0, &mut [1]).unwrap_err());
            refused(client.checksum(&name("f"), 0, 100).unwrap_err());
            client.map(&name("m"), RW, 0, 0, 0).unwrap();
        }
        // A mapping from before stays on the file that it was made for, in both ways.
        holder.write(&mapping, 0, &[7; 100]).unwrap();
        holder.flush(&mapping, 0, 100, mapping.strongest()).unwrap();
        holder
            .ordinary_write(&name("f"), 0, &[8; 100], Placement::GLOBAL)
            .unwrap();
    }
}

#[test]
fn map__same_upload_takes_over_and_another_is_kept_out() {
    let server = Running::start("127.0.9.15:7174", vec![memory_region("m", 65536)], LONG);
    let mut first = server.client();
    let mapping = first.map(&name("m"), Access::WRITE, 0, 4096, 5).unwrap();
    first.write(&mapping, 0, &[1; 1000]).unwrap();
    first.flush(&mapping, 0, 1000, Placement::GLOBAL).unwrap();
    let mut second = server.client();
    let error = second.map(&name("m"), Access::WRITE, 4000, 4096, 6).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Refused {
                code: ErrorCode::Busy,
                ..
            }
        ),
        "{error}"
    );
    second.map(&name("m"), Access::WRITE, 4096, 4096, 6).unwrap();
    let taken = second.map(&name("m"), Access::WRITE, 0, 4096, 5).unwrap();
    assert_eq!(server.end().0, EndReason::TakenOver);
    assert_eq!(second.stat(&name("m"), 5).unwrap().durable, 1000);
    let error = first.write(&mapping, 0, &[2; 10]).unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    second.write(&taken, 1000, &[3; 10]).unwrap();
    let mut there = [0; 10];
    server.regions[0].memory().read(0, &mut there).unwrap();
    assert_eq!(there, [1; 10], "nothing of the first came through");
}

#[test]
fn handshake__not_finished_in_time_ends() {
    let server = Running::start("127.0.9.16:7174", vec![memory_region("m", 10)], LONG);
    let begun = Instant::now();
    let raw = Raw::connect(server.address);
    assert!(matches!(
        raw.ask(&Handshake::new(key(), [1; 32], [0; 16]).hello()),
        Some(Message::Challenge { .. })
    ));
    assert_eq!(server.end().0, EndReason::HandshakeTimeout);
    let took = begun.elapsed();
    assert!((4.5..9.0).contains(&took.as_secs_f64()), "{took:?}");
    assert_eq!(raw.receive(), None);
}

#[test]
fn handshake__more_half_open_clients_than_allowed() {
    let server = Running::start("127.0.9.17:7174", vec![memory_region("m", 10)], LONG);
    let device = Device::open(server.address.ip()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(4096).unwrap();
    let mut open = Vec::new();
    for at in 0..65 {
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let connection = device.connect(&qp, server.address, &ConnectParams::default(), &[]);
        assert_eq!(connection.is_ok(), at < 64, "{at}");
        open.push((connection, qp));
    }
    let options = Options {
        from: Some(server.address.ip()),
        ..Options::default()
    };
    let error = Client::connect(server.address, &key(), &options).unwrap_err();
    assert!(error.to_string().contains("refused the connection"), "{error}");
    drop(open);
    server.end();
    server.client();
}

#[test]
fn handshake__garbage_or_a_request_before_welcome() {
    let server = Running::start("127.0.9.18:7174", vec![memory_region("m", 10)], LONG);
    let raw = Raw::connect(server.address);
    raw.send_bytes(&[0xff; 100]);
    assert_eq!(raw.receive(), None);
    assert!(matches!(server.end().0, EndReason::Protocol(_)));
    let raw = Raw::connect(server.address);
    let answer = raw.ask(&Message::List);
    assert!(
        matches!(
            answer,
            Some(Message::Error {
                code: ErrorCode::Protocol,
                ..
            })
        ),
        "{answer:?}"
    );
    assert!(matches!(server.end().0, EndReason::Protocol(_)));
}

#[test]
fn request__more_at_a_time_than_the_server_has_slots() {
    let server = Running::start("127.0.9.19:7174", vec![memory_region("m", 1 << 20)], LONG);
    let raw = Raw::ready(server.address);
    let mut bytes = Vec::new();
    let checksum = Message::Checksum {
        region: name("m"),
        offset: 0,
        length: 1 << 20,
    };
    checksum.emit(1, &mut bytes);
    // The server takes sixteen, and delays the others until it has answered.
    for _ in 0..24 {
        raw.send_bytes(&bytes);
    }
    for _ in 0..24 {
        let answer = raw.receive();
        assert!(matches!(answer, Some(Message::Checksummed { .. })), "{answer:?}");
    }
}

#[test]
fn stop__tells_the_clients() {
    let server = Running::start("127.0.9.20:7174", vec![memory_region("m", 10)], LONG);
    let mut client = server.client();
    drop(server);
    let error = client.stat(&name("m"), 0).unwrap_err();
    assert!(matches!(error, Error::Lost { .. } | Error::Post(_)), "{error}");
}

#[test]
fn bind__port_in_use_or_names_that_collide() {
    let _server = Running::start("127.0.9.21:7174", vec![memory_region("m", 10)], LONG);
    let config = |regions| config("127.0.9.21:7174", regions);
    let error = Server::bind(config(vec![memory_region("m", 10)])).unwrap_err();
    assert!(error.to_string().contains("127.0.9.21:7174"), "{error}");
    let error = Server::bind(config(vec![memory_region("m", 10), memory_region("m", 10)])).unwrap_err();
    assert!(error.to_string().contains("named m"), "{error}");
}

#[test]
fn run__a_server_that_only_looks_takes_connections_and_messages() {
    let server = Running::start_with(rdmux_push::server::Config {
        device: rdmux_verbs::Options {
            waiting: Some(rdmux_verbs::waiting::WaitMode::Running),
            ..rdmux_verbs::Options::default()
        },
        ..config("127.0.9.22:7174", vec![memory_region("m", 4096)])
    });
    for _ in 0..3 {
        let mut client = server.client();
        client
            .ordinary_write(&name("m"), 0, b"looked", Placement::empty())
            .unwrap();
        client.close();
    }
}

/// Sends messages that this client library never sends, and too many of those that it does.
#[test]
fn request__hostile_ones_end_their_own_connection_at_most() {
    let server = Running::start("127.0.9.23:7174", vec![memory_region("m", 4096)], LONG);
    let mut other = server.client();
    let raw = Raw::ready(server.address);
    // Receipts for notices that were never sent, more than the server has receives.
    for _ in 0..100 {
        raw.send(&Message::Noticed);
    }
    for message in [
        Message::Release { mapping: 0 },
        Message::Release { mapping: u64::MAX },
        Message::Unmap { mapping: 1 },
    ] {
        let answer = raw.ask(&message);
        assert!(
            matches!(
                answer,
                Some(Message::Error {
                    code: ErrorCode::Protocol,
                    ..
                })
            ),
            "{message:?}: {answer:?}"
        );
    }
    // Messages that only a server sends.
    for message in [
        Message::Flushed,
        Message::Written,
        Message::Released,
        Message::Bytes { bytes: vec![1] },
        Message::Notice { changes: Vec::new() },
    ] {
        let raw = Raw::ready(server.address);
        let answer = raw.ask(&message);
        assert!(
            matches!(
                answer,
                Some(Message::Error {
                    code: ErrorCode::Protocol,
                    ..
                })
            ),
            "{message:?}: {answer:?}"
        );
        assert!(matches!(server.end().0, EndReason::Protocol(_)), "{message:?}");
    }
    // A mapping that waits is released and unmapped by its number before it is there: it never comes to be.
    let holder = other.map(&name("m"), RW, 0, 0, 0).unwrap();
    let waiting = Message::Map {
        region: name("m"),
        access: RW,
        share: Access::empty(),
        conflict: rdmux_push::Conflict::Break,
        offset: 0,
        length: 0,
        transfer: 0,
    };
    raw.send(&waiting);
    assert!(matches!(
        raw.ask(&Message::Unmap { mapping: 1 }),
        Some(Message::Unmapped)
    ));
    other.release(&holder).unwrap();
    let answer = raw.receive();
    assert!(
        matches!(
            answer,
            Some(Message::Error {
                code: ErrorCode::Revoked,
                ..
            })
        ),
        "{answer:?}"
    );
    other.map(&name("m"), RW, 0, 0, 0).unwrap();
    // The longest possible message, cut short.
    let write = Message::Write {
        region: name("m"),
        offset: 0,
        placement: Placement::empty(),
        conflict: rdmux_push::Conflict::Fail,
        bytes: vec![1; 65536],
    };
    let mut bytes = Vec::new();
    write.emit(1, &mut bytes);
    raw.send_bytes(&bytes[..bytes.len() - 1]);
    assert_eq!(raw.receive(), None);
    other.stat(&name("m"), 0).unwrap();
}
