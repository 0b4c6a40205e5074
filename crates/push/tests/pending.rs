//! Clients that wait for nothing: many connect and map on one thread, which sleeps until one of them has something.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "common/process.rs"]
mod process;

use std::io::Read;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use common::*;
use process::Process;
use rdmux_push::client::{OnBreak, PendingClient};
use rdmux_push::server::ServerEvent;
use rdmux_push::{Client, Error, Key, MapRequest, Options};
use rdmux_verbs::Device;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;

fn sleep_on(fds: &[BorrowedFd<'_>]) {
    let timeout = Timespec::try_from(LONG).unwrap();
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    assert!(
        poll(&mut fds, Some(&timeout)).unwrap() > 0,
        "nothing wakes the thread"
    );
}

fn start(server: SocketAddr, key: &Key) -> PendingClient {
    let options = Options {
        from: Some(server.ip()),
        ..Options::default()
    };
    Client::start_connect(server, key, &options).unwrap()
}

/// Polls the attempts until so many have a result; returns all results.
fn results(attempts: &mut [PendingClient], wanted: usize) -> Vec<Option<Result<Client, Error>>> {
    let mut results: Vec<_> = attempts.iter().map(|_| None).collect();
    loop {
        for (attempt, result) in attempts.iter_mut().zip(&mut results) {
            if let Some(came) = attempt.poll() {
                assert!(result.replace(came).is_none(), "a second result");
            }
        }
        if results.iter().flatten().count() >= wanted {
            return results;
        }
        let waiting = attempts
            .iter()
            .zip(&results)
            .filter(|(_, result)| result.is_none());
        let fds: Vec<_> = waiting.map(|(attempt, _)| attempt.as_fd()).collect();
        sleep_on(&fds);
    }
}

#[test]
fn start_connect__many_on_one_thread_and_one_to_a_silent_server() {
    let server = Running::start("127.0.9.110:7174", vec![memory_region("m", 10)], LONG);
    let silent = Silent::start("127.0.9.111");
    let mut attempts = vec![start("127.0.9.111:7174".parse().unwrap(), &key())];
    attempts.extend((0..8).map(|_| start(server.address, &key())));
    let mut results = results(&mut attempts, 8);
    assert!(results[0].is_none());
    for client in results.drain(1..) {
        client.unwrap().unwrap().stat(&name("m"), 0).unwrap();
    }
    // The attempt is over when the silence has lasted too long.
    while attempts[0].due().is_none() {
        assert!(attempts[0].poll().is_none());
        if attempts[0].due().is_none() {
            sleep_on(&[attempts[0].as_fd()]);
        }
    }
    assert_eq!(silent.accepted(), 1);
    assert!(attempts[0].due().unwrap() > Instant::now());
}

#[test]
fn start_connect__a_server_that_refuses() {
    let server = Running::start("127.0.9.112:7174", vec![memory_region("m", 10)], LONG);
    let nobody = SocketAddr::new(server.address.ip(), 7175);
    let mut attempts = [
        start(server.address, &Key::new([8; 32])),
        start(nobody, &key()),
        start(server.address, &key()),
    ];
    match &results(&mut attempts, 3)[..] {
        [
            Some(Err(Error::WrongKey(_))),
            Some(Err(Error::NobodyListens(_))),
            Some(Ok(_)),
        ] => {}
        other => panic!("{other:?}"),
    }
    assert!(attempts.iter_mut().all(|attempt| attempt.poll().is_none()));
}

#[test]
fn start_map__waits_for_a_lease_while_the_client_does_other_things() {
    let server = Running::start("127.0.9.113:7174", vec![memory_region("m", 4096)], LONG);
    let (mut holder, mut other) = (server.client(), server.client());
    let request = MapRequest::new(RW);
    let held = holder.map_as(&name("m"), &request).unwrap();
    holder.write(&held, 0, &[1; 8]).unwrap();
    let pending = other.start_map(&name("m"), &request).unwrap();
    server.wait_for(|event| matches!(event, ServerEvent::Breaking { .. }));
    assert!(other.poll_map(&pending).unwrap().is_none());
    assert_eq!(other.stat(&name("m"), 0).unwrap().bytes, 4096);
    assert!(other.poll_map(&pending).unwrap().is_none());
    holder.release(&held).unwrap();
    let mapping = loop {
        other.arm().unwrap();
        if let Some(mapping) = other.poll_map(&pending).unwrap() {
            break mapping;
        }
        sleep_on(&[other.as_fd()]);
    };
    assert!(other.poll_map(&pending).unwrap().is_none(), "a second mapping");
    let mut there = [0; 8];
    other.read(&mapping, 0, &mut there).unwrap();
    assert_eq!(there, [1; 8]);
    // The end of a mapping and a request behind it.
    other.start_unmap(mapping.clone()).unwrap();
    assert!(!other.is_held(&mapping));
    let again = other.start_map(&name("m"), &request).unwrap();
    other.reconnect().unwrap();
    let error = other.poll_map(&again).unwrap_err();
    assert!(matches!(error, Error::MappingEnded { .. }), "{error}");
}

#[test]
fn start_map__a_break_that_is_behind_the_answer_is_noticed() {
    let server = Running::start("127.0.9.114:7174", vec![memory_region("m", 4096)], LONG);
    let (mut first, mut second) = (server.client(), server.client());
    let request = MapRequest::new(RW);
    let mine = first.start_map(&name("m"), &request).unwrap();
    server.wait_for(|event| matches!(event, ServerEvent::Mapped { .. }));
    let theirs = second.start_map(&name("m"), &request).unwrap();
    server.wait_for(|event| matches!(event, ServerEvent::Breaking { .. }));
    // The client takes the answer and the notice at once, some time after both have arrived.
    let mut came = None;
    loop {
        first.arm().unwrap();
        second.arm().unwrap();
        if let Some(mapping) = first.poll_map(&mine).unwrap() {
            came = Some(mapping);
        }
        if second.poll_map(&theirs).unwrap().is_some() {
            break;
        }
        sleep_on(&[first.as_fd(), second.as_fd()]);
    }
    server.wait_for(|event| {
        let revoked = matches!(event, ServerEvent::Revoked { .. });
        assert!(!revoked, "the client did not hear of it");
        matches!(event, ServerEvent::Released { .. })
    });
    assert!(came.is_some_and(|mapping| !first.is_held(&mapping)));
}

/// The server process, which serves until it is killed.
#[test]
fn silent__part_of_the_server() {
    let Ok(address) = std::env::var("PUSH_PENDING_SERVER") else {
        return;
    };
    let keepalive = Duration::from_secs(1);
    let _server = Running::start(&address, vec![memory_region("m", 4096)], keepalive);
    println!("@serving");
    // Serves until it is killed, or whoever started it has ended.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

#[test]
fn start_map__a_server_that_dies_in_silence_is_noticed() {
    rdmux_soft::register();
    let address: SocketAddr = "127.0.9.115:7174".parse().unwrap();
    let environment = [("PUSH_PENDING_SERVER", &*address.to_string())];
    let mut server = Process::start("silent__part_of_the_server", &environment);
    assert_eq!(server.line(), "serving");

    let device = Device::open("127.0.9.116".parse().unwrap()).unwrap();
    let options = Options {
        device: Some(device),
        on_break: OnBreak::Tell,
        ..Options::default()
    };
    let connect = || Client::connect(address, &key(), &options).unwrap();
    let (mut holder, mut client) = (connect(), connect());
    let request = MapRequest::new(RW);
    let held = holder.map_as(&name("m"), &request).unwrap();
    let pending = client.start_map(&name("m"), &request).unwrap();
    // Once the server has broken the lease, it owes this client an answer, and has acknowledged everything.
    while holder.broken().count() == 0 {
        holder.arm().unwrap();
        if holder.broken().count() == 0 {
            sleep_on(&[holder.as_fd()]);
        }
    }
    assert!(holder.is_held(&held));
    server.signal(Signal::STOP);
    let deadline = Instant::now() + LONG;
    let error = loop {
        assert!(Instant::now() < deadline, "nobody notices");
        match client.arm().and_then(|()| client.poll_map(&pending)) {
            Ok(mapping) => assert!(mapping.is_none()),
            Err(error) => break error,
        }
        let left = client.due().saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap();
        poll(&mut [PollFd::new(&client, PollFlags::IN)], Some(&left)).unwrap();
    };
    assert!(
        error.to_string().contains("the server no longer answers"),
        "{error}"
    );
}
