//! Leases: requests wait for the holders that they must wait for, and nothing is written through a mapping once it is revoked.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use common::*;
use rdmux_push::client::{Handshake, Next, OnBreak};
use rdmux_push::server::{Config, EndReason, ServerEvent};
use rdmux_push::{
    Access, Client, Conflict, Error, ErrorCode, MapRequest, Mapping, Options, Placement, Region,
};
use rdmux_verbs::{Memory, Status};
use rdmux_wire::push::{Change, ChangeKind, Message};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use skip::skip;

const SHORT: Duration = Duration::from_millis(300);

fn start(address: &str, break_timeout: Duration) -> Running {
    Running::start_with(Config {
        break_timeout,
        ..config(address, vec![memory_region("m", 65536)])
    })
}

fn byte(server: &Running, at: u64) -> u8 {
    let mut byte = [0];
    server.regions[0].memory().read(at, &mut byte).unwrap();
    byte[0]
}

/// Maps on a thread of its own, and hands the client back with the mapping.
fn map_beside(mut client: Client, request: MapRequest) -> mpsc::Receiver<(Client, Mapping)> {
    let (tx, rx) = mpsc::channel();
    thread::spawn(move || {
        let mapping = client.map_as(&name("m"), &request).unwrap();
        let _ = tx.send((client, mapping));
    });
    rx
}

/// Lets a client handle the server's notices until its lease is over.
fn hear_until_over(client: &mut Client, mapping: &Mapping) {
    let timeout = Timespec::try_from(LONG).unwrap();
    client.arm().unwrap();
    while client.is_held(mapping) {
        let heard = poll(&mut [PollFd::new(client, PollFlags::IN)], Some(&timeout));
        assert!(heard.is_ok_and(|n| n > 0), "no notice came");
        client.arm().unwrap();
    }
}

fn breaking(event: &ServerEvent) -> bool {
    matches!(event, ServerEvent::Breaking { .. })
}

#[test]
fn break__a_holder_that_hears_of_it_lets_go_and_can_still_flush() {
    let server = start("127.0.9.40:7174", LONG);
    let mut holder = server.client();
    let mapping = holder.map(&name("m"), RW, 0, 0, 5).unwrap();
    holder.write(&mapping, 0, &[1; 100]).unwrap();
    let next = map_beside(server.client(), MapRequest::new(RW));
    hear_until_over(&mut holder, &mapping);
    holder.release(&mapping).unwrap();
    let (mut next, theirs) = next.recv_timeout(LONG).unwrap();
    next.write(&theirs, 0, &[2; 50]).unwrap();
    let error = holder.write(&mapping, 0, &[3; 100]).unwrap_err();
    assert!(matches!(error, Error::LeaseBroken { .. }), "{error}");
    assert!(!error.to_string().is_empty());
    // This flush goes by message, since the mapping's keys are invalid.
    holder.flush(&mapping, 0, 100, Placement::GLOBAL).unwrap();
    assert_eq!((byte(&server, 0), byte(&server, 99)), (2, 1));
    holder.unmap(mapping).unwrap();
    let error = holder.stat(&name("m"), 5).unwrap();
    assert_eq!(error.durable, 0, "somebody else wrote there");
}

#[test]
fn break__waits_for_what_is_under_way() {
    let disk = Disk::new(true);
    let server = Running::start("127.0.9.41:7174", vec![disk.region()], LONG);
    let mut holder = server.client();
    let mapping = holder.map(&name("disk"), RW, 0, 0, 0).unwrap();
    let buffer = holder.buffer(4096).unwrap();
    holder.post_write(&mapping, 0, &buffer, 0, 4096, 1).unwrap();
    holder
        .post_flush(&mapping, 0, 4096, Placement::PERSISTENT, 2)
        .unwrap();
    disk.wait_until_held();
    let mut other = server.client();
    let (tx, granted) = mpsc::channel();
    thread::spawn(move || {
        let mapping = other.map(&name("disk"), RW, 0, 0, 0).unwrap();
        let _ = tx.send((other, mapping));
    });
    server.wait_for(breaking);
    hear_until_over(&mut holder, &mapping);
    assert_eq!(holder.broken().count(), 1, "heard, and not released yet");
    assert!(granted.try_recv().is_err(), "while a flush runs");
    disk.set(|gate| gate.shut = false);
    assert_eq!(holder.next_done().unwrap().token, 1);
    assert_eq!(
        holder.next_done().unwrap().token,
        2,
        "it was acknowledged, not cut off"
    );
    holder.release(&mapping).unwrap();
    granted.recv_timeout(LONG).unwrap();
}

#[test]
fn break__a_holder_that_does_not_answer_is_revoked_and_its_late_write_kills_its_qp() {
    let server = start("127.0.9.42:7174", SHORT);
    let holder = Raw::ready(server.address);
    let (mapping, va, rkey) = holder.map_sharing("m", RW, Access::empty(), 0, 0);
    assert_eq!(holder.write8(va, rkey), Status::Success);
    let mut other = server.client();
    let begun = Instant::now();
    let theirs = other.map(&name("m"), RW, 0, 0, 0).unwrap();
    assert!(begun.elapsed() >= SHORT, "{:?}", begun.elapsed());
    other.write(&theirs, 0, &[7; 8]).unwrap();
    server.wait_for(|event| matches!(event, ServerEvent::Revoked { .. }));
    assert_eq!(holder.write8(va, rkey), Status::RemoteAccess);
    assert_eq!(byte(&server, 0), 7, "nothing of the late write landed");
    let (reason, mappings) = server.end();
    assert!(
        matches!(&reason, EndReason::Failed(why) if why.contains("outside")),
        "{reason}"
    );
    assert_eq!(mappings, 0, "it had none left");
    // The server has sent the holder a notice of the break, and sends no more before the holder takes that one.
    let notice = holder.messages.borrow_mut().pop_front();
    let Some((1, Message::Notice { changes })) = notice else {
        panic!("{notice:?}")
    };
    assert!(
        matches!(changes[..], [Change { mapping: m, kind: ChangeKind::Break, ms }] if m == mapping && ms <= 300),
        "{changes:?}"
    );
}

#[test]
fn break__notices_come_one_at_a_time() {
    let server = start("127.0.9.43:7174", SHORT);
    let holder = Raw::ready(server.address);
    let (first, ..) = holder.map_sharing("m", RW, Access::empty(), 0, 4096);
    let (second, ..) = holder.map_sharing("m", RW, Access::empty(), 4096, 4096);
    let mut other = server.client();
    for offset in [0, 4096] {
        other.map(&name("m"), RW, offset, 4096, 0).unwrap();
    }
    let kinds = |notice: Option<Message>| match notice {
        Some(Message::Notice { changes }) => changes.iter().map(|c| (c.mapping, c.kind)).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    assert_eq!(kinds(holder.receive()), [(first, ChangeKind::Break)]);
    // The next notice has all later changes, but only the last one of each mapping.
    holder.send(&Message::Noticed);
    assert_eq!(
        kinds(holder.receive()),
        [(first, ChangeKind::Revoked), (second, ChangeKind::Revoked)]
    );
    // A second receipt for a notice does no harm.
    holder.send(&Message::Noticed);
    assert_eq!(
        holder.ask(&Message::Release { mapping: first }),
        Some(Message::Released)
    );
    assert_eq!(
        holder.ask(&Message::Unmap { mapping: first }),
        Some(Message::Unmapped)
    );
}

#[test]
fn break__an_application_that_wants_to_be_told_decides_when() {
    let server = start("127.0.9.44:7174", LONG);
    let mut holder = server.client_with(Options {
        on_break: OnBreak::Tell,
        ..Options::default()
    });
    let mapping = holder.map(&name("m"), RW, 0, 0, 0).unwrap();
    let next = map_beside(server.client(), MapRequest::new(Access::READ));
    server.wait_for(breaking);
    let deadline = Instant::now() + LONG;
    while holder.broken().count() == 0 {
        holder.handle_notices().unwrap();
        assert!(Instant::now() < deadline);
    }
    let broken = holder.broken().next().unwrap();
    assert_eq!(broken.mapping, mapping.id());
    assert!(broken.until > Instant::now());
    holder.write(&mapping, 0, &[9; 10]).unwrap();
    holder.flush(&mapping, 0, 10, Placement::GLOBAL).unwrap();
    assert!(next.try_recv().is_err(), "not before it is released");
    holder.release(&mapping).unwrap();
    let (mut next, theirs) = next.recv_timeout(LONG).unwrap();
    let mut there = [0; 10];
    next.read(&theirs, 0, &mut there).unwrap();
    assert_eq!(there, [9; 10]);
    let error = holder.write(&mapping, 0, &[1]).unwrap_err();
    assert!(matches!(error, Error::LeaseBroken { .. }), "{error}");
}

#[test]
fn map__several_readers_one_writer_and_those_who_share() {
    let server = start("127.0.9.45:7174", SHORT);
    let mut clients: Vec<Client> = (0..3).map(|_| server.client()).collect();
    let fail = |access, share| MapRequest {
        share,
        conflict: Conflict::Fail,
        ..MapRequest::new(access)
    };
    let busy = |client: &mut Client, request| {
        let error = client.map_as(&name("m"), &request).unwrap_err();
        let code = matches!(
            &error,
            Error::Refused {
                code: ErrorCode::Busy,
                ..
            }
        );
        assert!(
            code && error.to_string().contains("another client (client 1)"),
            "{error}"
        );
    };
    let reader = fail(Access::READ, Access::READ);
    let first = clients[0].map_as(&name("m"), &reader).unwrap();
    let second = clients[1].map_as(&name("m"), &reader).unwrap();
    busy(&mut clients[2], fail(RW, Access::empty()));
    busy(&mut clients[2], fail(Access::WRITE, RW));
    clients[0].unmap(first).unwrap();
    clients[1].unmap(second).unwrap();
    let first = clients[0]
        .map_as(&name("m"), &fail(Access::WRITE, Access::READ))
        .unwrap();
    busy(&mut clients[1], reader);
    let second = clients[1].map_as(&name("m"), &fail(Access::READ, RW)).unwrap();
    // A client's own leases never conflict with each other.
    clients[0].map_as(&name("m"), &fail(RW, Access::READ)).unwrap();
    clients[0].write(&first, 0, &[4]).unwrap();
    let mut there = [0];
    clients[1].read(&second, 0, &mut there).unwrap();
    assert_eq!(there, [4]);
}

#[test]
fn connect__again_under_the_same_name_revokes_before_it_is_welcome() {
    let server = start("127.0.9.46:7174", LONG);
    let before = Raw::ready_as(server.address, [5; 16]);
    let (_, va, rkey) = before.map_sharing("m", RW, Access::empty(), 0, 0);
    assert_eq!(before.write8(va, rkey), Status::Success);
    let other = Raw::ready_as(server.address, [6; 16]);
    let mut again = server.client_with(Options {
        client: Some([5; 16]),
        ..Options::default()
    });
    assert_eq!(server.end(), (EndReason::ConnectedAgain, 1));
    // No lease needs to be broken: it ended with the connection.
    let mapping = again.map(&name("m"), RW, 0, 0, 0).unwrap();
    again.write(&mapping, 0, &[8; 8]).unwrap();
    assert_ne!(before.write8(va, rkey), Status::Success);
    assert_eq!(byte(&server, 0), 8, "nothing late landed");
    assert!(
        matches!(other.ask(&Message::List), Some(Message::Regions { .. })),
        "others go on"
    );
}

#[test]
fn connect__again_waits_for_ordinary_writes_of_before() {
    let disk = Disk::new(true);
    let server = Running::start("127.0.9.47:7174", vec![disk.region()], LONG);
    let before = Raw::ready_as(server.address, [5; 16]);
    before.send(&Message::Write {
        region: name("disk"),
        offset: 0,
        placement: Placement::PERSISTENT,
        conflict: Conflict::Break,
        bytes: vec![1; 8],
    });
    disk.wait_until_held();
    // A client that does not wait for its welcome is not welcome.
    let hasty = Raw::connect(server.address);
    let mut handshake = Handshake::new(key(), [1; 32], [5; 16]);
    let challenge = hasty.ask(&handshake.hello()).unwrap();
    let Ok(Next::Send(proof)) = handshake.handle(challenge) else {
        panic!()
    };
    hasty.send(&proof);
    server.wait_for(|event| {
        matches!(
            event,
            ServerEvent::Ended {
                reason: EndReason::ConnectedAgain,
                ..
            }
        )
    });
    // The old connection has ended; its write is not done yet.
    hasty.send(&Message::List);
    server.wait_for(|event| {
        matches!(
            event,
            ServerEvent::Ended {
                reason: EndReason::Protocol(_),
                ..
            }
        )
    });
    let address = server.address;
    let (tx, welcome) = mpsc::channel();
    thread::spawn(move || {
        let raw = Raw::ready_as(address, [5; 16]);
        let _ = tx.send(());
        raw.ask(&Message::List)
    });
    assert!(
        welcome.recv_timeout(SHORT).is_err(),
        "welcome before the write was done"
    );
    // Another client is welcome meanwhile.
    server.client();
    disk.set(|gate| gate.shut = false);
    welcome.recv_timeout(LONG).unwrap();
}

#[test]
fn reconnect__says_what_was_not_done() {
    let disk = Disk::new(true);
    let server = Running::start("127.0.9.48:7174", vec![disk.region()], LONG);
    let mut client = server.client();
    let mapping = client.map(&name("disk"), RW, 0, 8192, 5).unwrap();
    let buffer = client.buffer(8192).unwrap();
    buffer.memory().write(0, &[3; 8192]).unwrap();
    client.post_write(&mapping, 0, &buffer, 0, 4096, 1).unwrap();
    client
        .post_flush(&mapping, 0, 4096, Placement::PERSISTENT, 2)
        .unwrap();
    client.post_write(&mapping, 4096, &buffer, 4096, 4096, 3).unwrap();
    assert_eq!(client.next_done().unwrap().token, 1);
    disk.wait_until_held();
    let unfinished = client.reconnect().unwrap();
    assert_eq!(unfinished, [2, 3]);
    assert_eq!(client.in_flight(), 0);
    disk.set(|gate| gate.shut = false);
    let error = client.write(&mapping, 0, &[1]).unwrap_err();
    assert!(matches!(error, Error::MappingEnded { .. }), "{error}");
    // All of it again, in order, through a mapping of its own.
    let mapping = client.map(&name("disk"), RW, 0, 8192, 5).unwrap();
    client.post_write(&mapping, 4096, &buffer, 4096, 4096, 3).unwrap();
    client
        .post_flush(&mapping, 0, 8192, Placement::PERSISTENT, 2)
        .unwrap();
    client.drain().unwrap();
    let there = client.checksum(&name("disk"), 0, 8192).unwrap();
    assert_eq!(there, crc(&[3; 8192]));
}

#[test]
fn exclusive__a_program_at_the_server_waits_like_everybody() {
    let server = start("127.0.9.49:7174", SHORT);
    let raw = Raw::ready(server.address);
    let (_, va, rkey) = raw.map("m", RW, 0, 0);
    let begun = Instant::now();
    let alone = server
        .control
        .exclusive(&name("m"), Access::WRITE, Access::empty())
        .unwrap();
    assert!(begun.elapsed() >= SHORT);
    server.regions[0].memory().write(0, &[6; 8]).unwrap();
    let next = map_beside(server.client(), MapRequest::new(RW));
    assert_eq!(raw.write8(va, rkey), Status::RemoteAccess);
    assert_eq!(byte(&server, 0), 6);
    assert!(next.try_recv().is_err());
    drop(alone);
    next.recv_timeout(LONG).unwrap();
    let error = server
        .control
        .exclusive(&name("x"), Access::WRITE, Access::empty())
        .unwrap_err();
    assert!(error.to_string().contains("no region of that name"));
}

/// Starts a server with a file, and returns the file's path too. Returns `None` if the file system has no leases.
fn start_with_file(
    address: &str,
    break_timeout: Duration,
) -> Option<(Running, std::path::PathBuf, tempfile::TempDir)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m");
    let region = Region::file(name("m"), &path, Some(65536), false).unwrap();
    let server = Running::start_with(Config {
        break_timeout,
        ..config(address, vec![region])
    });
    // The server reports unwatched regions before any client.
    server.client().close();
    match server.wait_for(|event| matches!(event, ServerEvent::Unwatched { .. } | ServerEvent::Ended { .. }))
    {
        ServerEvent::Unwatched { why, .. } => {
            skip(why);
            None
        }
        _ => Some((server, path, folder)),
    }
}

#[test]
fn file__opened_by_a_program_of_the_host_waits_for_the_holder() {
    let Some((server, path, _folder)) = start_with_file("127.0.9.50:7174", LONG) else {
        return;
    };
    let mut holder = server.client();
    let mapping = holder.map(&name("m"), RW, 0, 0, 0).unwrap();
    holder.write(&mapping, 0, &[1; 100]).unwrap();
    let (tx, opened) = mpsc::channel();
    let (close, closing) = mpsc::channel::<()>();
    thread::spawn(move || {
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        tx.send(()).unwrap();
        closing.recv().unwrap();
        drop(file);
    });
    server.wait_for(breaking);
    assert!(opened.try_recv().is_err(), "before the mapping was released");
    hear_until_over(&mut holder, &mapping);
    holder.release(&mapping).unwrap();
    opened.recv_timeout(LONG).unwrap();
    // As long as the file is open, nobody gets the region alone.
    let error = holder.map(&name("m"), RW, 0, 0, 0).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("a program of the server's host has the file"),
        "{error}"
    );
    let beside = holder.map_as(&name("m"), &shared()).unwrap();
    holder.write(&beside, 0, &[2; 100]).unwrap();
    holder.unmap(beside).unwrap();
    close.send(()).unwrap();
    server.wait_for(|event| matches!(event, ServerEvent::Closed { .. }));
    holder.map(&name("m"), RW, 0, 0, 0).unwrap();
}

#[test]
fn file__truncated_by_a_program_of_the_host_when_the_holder_does_not_answer() {
    let Some((server, path, _folder)) = start_with_file("127.0.9.51:7174", SHORT) else {
        return;
    };
    let raw = Raw::ready(server.address);
    let (_, va, rkey) = raw.map_sharing("m", RW, Access::empty(), 0, 0);
    assert_eq!(raw.write8(va, rkey), Status::Success);
    let begun = Instant::now();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    assert!(begun.elapsed() >= SHORT, "{:?}", begun.elapsed());
    server.wait_for(|event| matches!(event, ServerEvent::Revoked { .. }));
    file.set_len(4096).unwrap();
    assert_eq!(
        raw.write8(va, rkey),
        Status::RemoteAccess,
        "its key was dead before"
    );
    server.wait_for(|event| matches!(event, ServerEvent::Ended { reason: EndReason::Failed(why), .. } if why.contains("outside")));
}

#[test]
fn file__opened_by_a_reader_lets_no_waiting_writer_in() {
    let Some((server, path, _folder)) = start_with_file("127.0.9.53:7174", LONG) else {
        return;
    };
    let (mut first, mut second) = (server.client(), server.client());
    let sharing = |share| MapRequest {
        offset: if share == Access::READ { 0 } else { 4096 },
        length: 4096,
        share,
        ..MapRequest::new(Access::READ)
    };
    let with_readers = first.map_as(&name("m"), &sharing(Access::READ)).unwrap();
    let with_writers = second.map_as(&name("m"), &sharing(Access::WRITE)).unwrap();
    let open = |write: bool| {
        let ((tx, opened), path) = (mpsc::channel(), path.clone());
        thread::spawn(move || {
            let file = std::fs::File::options()
                .read(true)
                .write(write)
                .open(path)
                .unwrap();
            let _ = tx.send(file);
        });
        opened
    };
    let reader = open(false);
    server.wait_for(breaking);
    let writer = open(true);
    server.wait_for(breaking);
    second.release(&with_writers).unwrap();
    // A time in which the server would let the writer in.
    assert!(
        writer.recv_timeout(SHORT).is_err(),
        "while another holds it without sharing that"
    );
    first.release(&with_readers).unwrap();
    reader.recv_timeout(LONG).unwrap();
    writer.recv_timeout(LONG).unwrap();
}

#[test]
fn file__read_by_a_program_of_the_host_disturbs_none_who_shares_that() {
    let Some((server, path, _folder)) = start_with_file("127.0.9.52:7174", LONG) else {
        return;
    };
    let mut holder = server.client();
    let request = MapRequest {
        share: Access::READ,
        ..MapRequest::new(Access::WRITE)
    };
    let mapping = holder.map_as(&name("m"), &request).unwrap();
    holder.write(&mapping, 0, b"there").unwrap();
    let there = std::fs::read(&path).unwrap();
    assert_eq!(&there[..5], b"there");
    holder.write(&mapping, 0, b"still").unwrap();
    assert!(holder.is_held(&mapping));
}
