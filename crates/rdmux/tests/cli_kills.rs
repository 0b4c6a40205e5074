//! SIGKILL of applications and of nodes while they send: clean errors, nothing left, and a new node in its place.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use common::nodes::{Held, Host, LONG, Running};

/// The shortest time after which a node finds out by probes that its peer does not answer.
const PROBES: Duration = Duration::from_secs(2);

/// Returns the names of what the nodes of a host have in its runtime folder.
fn names(host: &Host) -> BTreeSet<String> {
    let entries = fs::read_dir(host.runtime.path().join("rdmux")).unwrap();
    // The last trace of a killed process stays for whoever wants to know why.
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.ends_with(".trace"))
        .collect()
}

/// Returns a client, and its server, that send over four connections: to connect takes fewer packets.
fn under_load(host: &Host, test: &str, from: &str, to: &str) -> (Running, Running) {
    under_load_for(host, test, [from, to], "60")
}

fn under_load_for(host: &Host, test: &str, [from, to]: [&str; 2], seconds: &str) -> (Running, Running) {
    let server = host.server(test, to);
    let deadline = Instant::now() + LONG;
    loop {
        assert!(Instant::now() < deadline, "the client does not start");
        let mut client = Running(
            host.client(test, from, to, &["-D", seconds, "-q", "4"])
                .spawn()
                .unwrap(),
        );
        while client.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the client does not connect");
            // It sends once all of its connections are there.
            if host.sending(from) >= 4 {
                return (client, server);
            }
        }
    }
}

/// `kept`: objects that each node keeps for the other.
fn kill_applications(host: &Host, [from, to]: [&str; 2], kept: [u64; 3]) {
    let (near, far) = (host.node(from), host.node(to));
    let nodes = [&near, &far];
    assert_eq!(
        [from, to].map(|address| host.objects(address)[..2] == [0, 0]),
        [true; 2]
    );
    let mut held = Vec::new();
    for round in 0..8 {
        let test = ["write-bw", "send-bw", "read-bw"][round % 3];
        let (client, server) = under_load(host, test, from, to);
        let (killed, other) = match round % 2 {
            0 => (client, server),
            _ => (server, client),
        };
        drop(killed);
        let began = Instant::now();
        let (status, text) = other.end();
        println!(
            "{test}, round {round}: the peer has ended {:?} later, {status:?}",
            began.elapsed()
        );
        assert!(
            status.is_some() && !text.contains("panicked"),
            "{status:?} {text}"
        );
        for address in [from, to] {
            host.wait_for_objects_at_most(address, kept);
        }
        let most = held.get(1).map_or([usize::MAX; 2], |held: &[Held; 2]| {
            held.map(|one| one.descriptors)
        });
        held.push([0, 1].map(|at| Held::by_at_most(nodes[at], most[at])));
    }
    println!("{held:?}");
    // After the first rounds nothing grows: only what each round has anew would.
    for (early, late) in held[2].into_iter().zip(held[7]) {
        // A queue pair keeps what it knows of the peer's last 64 regions.
        assert!(late.mappings <= early.mappings + 8, "{held:?}");
        assert!(late.resident_kib <= early.resident_kib + 8192, "{held:?}");
    }
}

#[test]
fn killed_application__leaves_nothing_in_nodes() {
    kill_applications(&Host::new(), ["127.0.52.1", "127.0.52.2"], [0, 0, 0]);
}

#[test]
fn killed_application__leaves_nothing_in_nodes_that_share_queue_pairs() {
    // Two control connections and a shared queue pair, with their buffers.
    kill_applications(&Host::sharing(), ["127.0.52.3", "127.0.52.4"], [3, 4, 2]);
}

fn kill_peer(host: &Host, [from, to]: [&str; 2]) {
    let near = host.node(from);
    let mut far = host.node(to);
    let mut held = Vec::new();
    for round in 0..4 {
        let before = host.objects(from);
        let test = ["write-bw", "send-bw"][round % 2];
        let (client, server) = under_load(host, test, from, to);
        far.kill();
        let began = Instant::now();
        for application in [client, server] {
            let (status, text) = application.end();
            assert!(
                status.is_some() && !text.contains("panicked"),
                "{status:?} {text}"
            );
        }
        println!(
            "{test}: both have ended {:?} after their peer's node",
            began.elapsed()
        );
        host.wait_for_objects_at_most(from, before);
        held.push(Held::by(&near));
        far = host.node(to);
    }
    println!("{held:?}");
    // Connections to a new process may have other source ports, of which there are a few for each engine, each with a socket.
    let sockets = 4 * host.engines as usize;
    assert!(held[3].descriptors <= held[1].descriptors + sockets, "{held:?}");
    assert!(held[3].mappings <= held[1].mappings + 8, "{held:?}");
    // The peer's new node takes connections.
    let server = host.server("send-lat", to);
    let output = host.run_client("send-lat", from, to, &["-n", "100"]);
    assert!(output.status.success(), "{output:?}");
    server.end();
}

#[test]
fn killed_peer__is_an_error_for_applications_of_the_other_node() {
    kill_peer(&Host::new(), ["127.0.52.5", "127.0.52.6"]);
}

#[test]
fn killed_peer__is_an_error_for_applications_that_share_its_queue_pairs() {
    kill_peer(&Host::sharing(), ["127.0.52.7", "127.0.52.8"]);
}

/// Nodes that have no memory in common, as those of several hosts. Nobody tells a node that its peer was killed. It finds that out as nothing arrives, and
/// does not wait until probes, one each two seconds, are not answered.
fn kill_peer_over_udp([from, to]: [&str; 2], is_started_at_once: bool) {
    let host = Host::sharing().over_udp();
    let _near = host.node(from);
    let mut far = Some(host.node(to));
    let mut shortest = Duration::MAX;
    for test in ["write-bw", "send-bw", "read-bw"] {
        let (client, server) = under_load(&host, test, from, to);
        let began = Instant::now();
        drop(far.take());
        far = is_started_at_once.then(|| host.node(to));
        for application in [client, server] {
            let (status, text) = application.end();
            assert!(
                status.is_some() && !text.contains("panicked"),
                "{status:?} {text}"
            );
        }
        let took = began.elapsed();
        println!("{test}: both have ended {took:?} after their peer's node");
        shortest = shortest.min(took);
        far = far.or_else(|| Some(host.node(to)));
    }
    // By probes, each of them takes longer. Otherwise some may, on a busy host.
    assert!(shortest < PROBES, "{shortest:?}");
}

#[test]
fn killed_peer__its_next_run_shows_that() {
    kill_peer_over_udp(["127.0.52.11", "127.0.52.12"], true);
}

#[test]
fn killed_peer__its_host_says_so() {
    kill_peer_over_udp(["127.0.52.13", "127.0.52.14"], false);
}

/// Returns whether a socket is connected to the port of a device, as is one that is to show whether the port is there.
fn is_asked(device: Ipv4Addr) -> bool {
    // proc_pid_net(5): the third field is the remote address, whose bytes are in the order of the network.
    let remote = format!("{:08X}:12B7", u32::from_ne_bytes(device.octets()));
    let sockets = fs::read_to_string("/proc/self/net/udp").unwrap();
    sockets
        .lines()
        .any(|line| line.split_whitespace().nth(2) == Some(&remote))
}

/// A node that is stopped for some time is no other one afterwards: whoever asks in the meantime ends nothing.
#[test]
fn stopped_peer__goes_on() {
    let (host, [from, to]) = (Host::sharing().over_udp(), ["127.0.52.15", "127.0.52.16"]);
    let (_near, far) = (host.node(from), host.node(to));
    let (client, server) = under_load_for(&host, "write-bw", [from, to], "3");
    let pid = Pid::from_child(&far.0);
    kill_process(pid, Signal::STOP).unwrap();
    let deadline = Instant::now() + LONG;
    while !is_asked(to.parse().unwrap()) {
        assert!(Instant::now() < deadline, "nobody asks");
    }
    kill_process(pid, Signal::CONT).unwrap();
    for application in [client, server] {
        let (status, text) = application.end();
        assert_eq!(status, Some(0), "{text}");
    }
}

#[test]
fn killed_peer__is_an_error_for_applications_on_several_engines() {
    let mut host = Host::sharing();
    host.engines = 2;
    kill_peer(&host, ["127.0.52.20", "127.0.52.21"]);
}

/// The files of a killed node never hinder the next one, which serves applications at once.
#[test]
fn killed_node__its_successor_takes_work() {
    let (host, address) = (Host::new(), "127.0.52.9");
    let mut node = host.node(address);
    let fresh = names(&host);
    for _ in 0..5 {
        let (client, server) = under_load(&host, "write-bw", address, address);
        node.kill();
        for application in [client, server] {
            let (status, text) = application.end();
            assert!(
                status.is_some() && !text.contains("panicked"),
                "{status:?} {text}"
            );
        }
        let began = Instant::now();
        node = host.node(address);
        let ready = began.elapsed();
        let server = host.server("write-lat", address);
        let output = host.run_client("write-lat", address, address, &["-n", "1"]);
        println!(
            "the next node was ready after {ready:?}, and two new applications were done after {:?}",
            began.elapsed()
        );
        assert!(output.status.success(), "{output:?}");
        server.end();
        assert_eq!(names(&host), fresh);
    }
}
