//! Clients as processes of their own, stopped at the worst moment and continued when another client has taken over.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "common/process.rs"]
mod process;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::*;
use process::Process;
use rdmux_push::server::{Config, EndReason, ServerEvent};
use rdmux_push::{Client, Options};
use rdmux_verbs::Memory;
use rustix::process::Signal;

const BYTES: usize = 1 << 20;
const BREAK_TIMEOUT: Duration = Duration::from_millis(400);

/// The client process: its environment holds its plan, and its standard input says when to go on.
#[test]
fn stopped__part_of_the_client() {
    let Ok(plan) = std::env::var("PUSH_STOPPED_CLIENT") else {
        return;
    };
    let mut words = plan.split(' ');
    let mut word = || words.next().unwrap();
    let server: SocketAddr = word().parse().unwrap();
    let options = Options {
        from: Some(word().parse().unwrap()),
        client: Some([word().parse().unwrap(); 16]),
        ..Options::default()
    };
    let flood = word() == "flood";
    rdmux_soft::register();
    let mut client = Client::connect(server, &key(), &options).unwrap();
    let mapping = client.map(&name("m"), RW, 0, 0, 0).unwrap();
    let buffer = client.buffer(1 << 16).unwrap();
    buffer.memory().write(0, &[0x11; 1 << 16]).unwrap();
    client.post_write(&mapping, 0, &buffer, 0, 8, 0).unwrap();
    client.next_done().unwrap();
    println!("@mapped");
    let mut line = String::new();
    if !flood {
        std::io::stdin().read_line(&mut line).unwrap();
        let _ = client.post_write(&mapping, 0, &buffer, 0, 1 << 16, 0);
        println!(
            "@{:?}",
            client.next_done().map(drop).map_err(|error| error.to_string())
        );
        return;
    }
    // It writes all over the region without a pause, and hears of nothing: its completions alone are taken.
    let mut at = 0u64;
    let error = loop {
        at = (at + (1 << 16)) % BYTES as u64;
        if let Err(error) = client.post_write(&mapping, at, &buffer, 0, 1 << 16, at) {
            break error;
        }
        if client.in_flight() > 32
            && let Err(error) = client.next_done()
        {
            break error;
        }
    };
    println!("@{error}");
}

/// Starts a client process, which maps the region and writes `once`, when it is told to go on, or in a `flood`.
fn start_client(server: SocketAddr, from: &str, id: u8, what: &str, shared_memory: bool) -> Process {
    let plan = format!("{server} {from} {id} {what}");
    let mut environment = vec![("PUSH_STOPPED_CLIENT", &*plan)];
    if !shared_memory {
        environment.push(("RDMUX_SHM", "off"));
    }
    let mut process = Process::start("stopped__part_of_the_client", &environment);
    assert_eq!(process.line(), "mapped");
    process
}

fn go_on(process: &mut Process) {
    process.signal(Signal::CONT);
    process.say("");
}

fn start(address: &str, keepalive: Duration) -> Running {
    Running::start_with(Config {
        break_timeout: BREAK_TIMEOUT,
        keepalive,
        ..config(address, vec![memory_region("m", BYTES as u64)])
    })
}

/// Returns whether every byte of the region is `byte`.
fn holds(server: &Running, byte: u8) -> bool {
    let mut there = vec![0; BYTES];
    server.regions[0].memory().read(0, &mut there).unwrap();
    there.iter().all(|b| *b == byte)
}

/// Maps the region, and fills it.
fn take_over(server: &Running, client: &mut Client, byte: u8) {
    let mapping = client.map(&name("m"), RW, 0, 0, 0).unwrap();
    client.write(&mapping, 0, &vec![byte; BYTES]).unwrap();
    assert!(holds(server, byte));
}

#[test]
fn stopped__while_it_holds_the_lease_and_posts_when_it_goes_on() {
    for (round, shared_memory) in [true, false].into_iter().enumerate() {
        let server = start("127.0.9.70:7174", Duration::from_secs(60));
        let from = format!("127.0.9.{}", 200 + round);
        let mut stopped = start_client(server.address, &from, 1, "once", shared_memory);
        stopped.signal(Signal::STOP);
        let mut other = server.client();
        let begun = Instant::now();
        take_over(&server, &mut other, 0x22);
        assert!(begun.elapsed() >= BREAK_TIMEOUT, "{:?}", begun.elapsed());
        server.wait_for(|event| matches!(event, ServerEvent::Revoked { .. }));
        go_on(&mut stopped);
        let said = stopped.line();
        assert!(said.contains("the server refused an access"), "{said}");
        let (reason, _) = server.end();
        assert!(
            matches!(&reason, EndReason::Failed(why) if why.contains("outside")),
            "{reason}"
        );
        assert!(holds(&server, 0x22), "nothing of the late write landed");
        other.stat(&name("m"), 0).unwrap();
    }
}

#[test]
fn stopped__amid_a_flood_of_writes_again_and_again() {
    for round in 0..12u64 {
        let shared_memory = round % 2 == 0;
        let server = start("127.0.9.71:7174", Duration::from_secs(60));
        let from = format!("127.0.9.{}", 210 + round);
        let mut stopped = start_client(server.address, &from, 1, "flood", shared_memory);
        // The client stops at any moment of its flood.
        std::thread::sleep(Duration::from_micros(1 + round * round * 700));
        stopped.signal(Signal::STOP);
        let mut other = server.client();
        take_over(&server, &mut other, 0x22);
        stopped.signal(Signal::CONT);
        // The client learns of the break only after the fact: the server refuses its requests in flight, or it releases by
        // itself.
        let said = stopped.line();
        println!("round {round}: {said}");
        assert!(
            said.contains("the server") || said.contains("somebody else needed the range"),
            "round {round}: {said}"
        );
        assert!(holds(&server, 0x22), "round {round}: something late landed");
        other.stat(&name("m"), 0).unwrap();
    }
}

#[test]
fn stopped__and_replaced_by_itself_on_another_connection() {
    let server = start("127.0.9.72:7174", Duration::from_secs(60));
    let mut stopped = start_client(server.address, "127.0.9.230", 9, "once", false);
    stopped.signal(Signal::STOP);
    // The same client, started again elsewhere, waits for no lease.
    let mut again = server.client_with(Options {
        client: Some([9; 16]),
        ..Options::default()
    });
    assert_eq!(server.end(), (EndReason::ConnectedAgain, 1));
    take_over(&server, &mut again, 0x33);
    go_on(&mut stopped);
    let said = stopped.line();
    assert!(said.contains("Err"), "{said}");
    assert!(holds(&server, 0x33), "nothing of before landed");
}

#[test]
fn stopped__for_longer_than_the_keep_alive_time() {
    let server = start("127.0.9.73:7174", Duration::from_secs(1));
    let mut stopped = start_client(server.address, "127.0.9.231", 1, "once", false);
    stopped.signal(Signal::STOP);
    assert_eq!(server.end(), (EndReason::Dead, 1));
    let mut other = server.client();
    take_over(&server, &mut other, 0x44);
    go_on(&mut stopped);
    let said = stopped.line();
    assert!(said.contains("Err"), "{said}");
    assert!(holds(&server, 0x44), "nothing of before landed");
}
