//! `rdmux node` and its applications: `rdmux perf` over the provider `shared`.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::io::BufRead;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::Output;
use std::time::Instant;

use common::nodes::{Host, LONG, Running};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};
use rustix::process::Pid;
use serde_json::Value;

const TESTS: [&str; 4] = ["write-lat", "send-lat", "read-lat", "write-bw"];

fn assert_measured(test: &str, output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test}: {text}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let row = &value["results"][0];
    assert_eq!(row["n_iterations"], 100, "{test}");
    let key = if test.ends_with("lat") {
        "t_typical"
    } else {
        "BW_average"
    };
    assert!(row[key].as_f64().unwrap() > 0.0, "{test}: {row}");
}

#[test]
fn node__two_applications_of_one() {
    let host = Host::new();
    let _node = host.node("127.0.51.1");
    for test in TESTS {
        let server = host.server(test, "127.0.51.1");
        let output = host.run_client(test, "127.0.51.1", "127.0.51.1", &["-n", "100"]);
        assert_measured(test, &output);
        assert_eq!(server.end().0, Some(0), "{test}");
    }
    host.wait_for_objects("127.0.51.1", [0, 0, 0]);
}

#[test]
fn node__applications_of_two() {
    let host = Host::new();
    let _nodes = ["127.0.51.2", "127.0.51.3"].map(|address| host.node(address));
    for test in TESTS.into_iter().chain(["send-bw", "flush-lat"]) {
        let server = host.server(test, "127.0.51.3");
        let output = host.run_client(test, "127.0.51.2", "127.0.51.3", &["-n", "100", "-s", "4000"]);
        assert_measured(test, &output);
        assert_eq!(server.end().0, Some(0), "{test}");
    }
}

/// A client ends its connections one after the other, and a server that has lost some of them so far has not failed.
#[test]
fn node__server_of_many_connections_ends_well_with_its_client() {
    let host = Host::sharing().over_udp();
    let [from, to] = ["127.0.51.42", "127.0.51.43"];
    let _nodes = [from, to].map(|address| host.node(address));
    for test in ["write-bw", "read-bw", "send-bw", "write-bw"] {
        let server = host.server(test, to);
        let output = host.run_client(test, from, to, &["-n", "10", "-q", "64"]);
        assert!(output.status.success(), "{test}: {output:?}");
        assert_eq!(server.end(), (Some(0), String::new()), "{test}");
    }
}

/// Two pairs of applications on different engines of nodes that share queue pairs.
#[test]
fn node__engines_that_share_queue_pairs() {
    let mut host = Host::sharing();
    host.engines = 2;
    let [from, to] = ["127.0.51.40", "127.0.51.41"];
    let _nodes = [from, to].map(|address| host.node(address));
    let server = host.server("send-bw", to);
    let forever = |from| host.client("send-bw", from, to, &["-D", "60"]).spawn();
    let deadline = Instant::now() + LONG;
    let mut client = Running(forever(from).unwrap());
    while host.sending(from) == 0 {
        assert!(Instant::now() < deadline, "the client does not send");
        if client.0.try_wait().unwrap().is_some() {
            client = Running(forever(from).unwrap());
        }
    }
    let mut other = host.rdmux(&["perf", "write-lat", "--bind", to, "--port", "18999"]);
    let other = Running(other.env("RDMUX_PROVIDER", "shared").spawn().unwrap());
    let output = host.run_client("write-lat", from, to, &["-n", "100", "--port", "18999"]);
    assert_measured("write-lat", &output);
    assert_eq!(other.end().0, Some(0));
    // Each pair of engines has its own, also that whose applications have ended.
    let top = host.frame(from, "2");
    assert_eq!(top["shared_qps"].as_array().unwrap().len(), 2, "{top}");
    for connection in top["connections"].as_array().unwrap() {
        assert_eq!(connection["route"], "shared", "{top}");
    }
    for shared in top["shared_qps"].as_array().unwrap() {
        assert_eq!(
            [&shared["tenant"], &shared["peer_tenant"]],
            ["default"; 2],
            "{top}"
        );
    }
    // A SEND of 64 KiB is copied in the pass that takes it, which takes longer than this.
    let deadline = Instant::now() + LONG;
    let p50_ns = loop {
        let frame = host.frame(from, "2");
        if let Some(p50_ns) = frame["tenants"][0]["p50_ns"].as_u64() {
            break p50_ns;
        }
        assert!(Instant::now() < deadline, "{frame}");
    };
    assert!(p50_ns >= 1000, "{p50_ns} ns");
    drop((client, server));
}

#[test]
fn node__application_that_sleeps_on_events() {
    let host = Host::new();
    let _node = host.node("127.0.51.4");
    for test in ["send-lat", "read-lat"] {
        let server = host.server(test, "127.0.51.4");
        let output = host.run_client(test, "127.0.51.4", "127.0.51.4", &["-n", "100", "-e"]);
        assert_measured(test, &output);
        assert_eq!(server.end().0, Some(0), "{test}");
    }
}

#[test]
fn node__peer_on_a_device_of_its_own() {
    let host = Host::new();
    let _node = host.node("127.0.51.5");
    let _server = Running(
        host.rdmux(&["perf", "send-lat", "--bind", "127.0.51.6"])
            .spawn()
            .unwrap(),
    );
    let output = host.run_client("send-lat", "127.0.51.5", "127.0.51.6", &["-n", "100"]);
    assert_measured("send-lat", &output);
}

#[test]
fn node__killed_application_leaves_nothing_and_its_peer_learns_it() {
    let host = Host::new();
    let _nodes = ["127.0.51.7", "127.0.51.8"].map(|address| host.node(address));
    let server = host.server("write-bw", "127.0.51.8");
    host.wait_for_objects("127.0.51.8", [0, 0, 0]);
    let mut client = loop {
        let more = ["-D", "60", "-q", "4"];
        let mut client = Running(
            host.client("write-bw", "127.0.51.7", "127.0.51.8", &more)
                .spawn()
                .unwrap(),
        );
        let deadline = Instant::now() + LONG;
        let started = loop {
            if client.0.try_wait().unwrap().is_some() {
                break false;
            }
            if ["127.0.51.7", "127.0.51.8"].map(|address| host.connected(address)) == [4, 4] {
                break true;
            }
            assert!(Instant::now() < deadline, "the client does not start");
        };
        if started {
            break client;
        }
    };
    client.kill();
    host.wait_for_objects("127.0.51.7", [0, 0, 0]);
    // The server's node is told by the client's, so the server ends as after a client that is done.
    let (status, text) = server.end();
    assert_eq!(status, Some(0), "{text}");
    host.wait_for_objects("127.0.51.8", [0, 0, 0]);
}

#[test]
fn node__killed_is_an_error_for_its_applications() {
    let host = Host::new();
    let mut node = host.node("127.0.51.9");
    let server = host.server("send-bw", "127.0.51.9");
    let mut clients = Vec::new();
    let deadline = Instant::now() + LONG;
    while host.connected("127.0.51.9") != 2 {
        assert!(Instant::now() < deadline, "the client does not start");
        let has_ended = |client: &mut Running| client.0.try_wait().unwrap().is_some();
        if clients.last_mut().is_none_or(has_ended) {
            let mut client = host.client("send-bw", "127.0.51.9", "127.0.51.9", &["-D", "60"]);
            clients.push(Running(client.spawn().unwrap()));
        }
    }
    node.kill();
    let (status, text) = clients.pop().unwrap().end();
    assert_eq!(status, Some(1), "{text}");
    assert_eq!(text, end_of_node("127.0.51.9"));
    assert_eq!(server.end(), (Some(1), end_of_node("127.0.51.9")));
}

/// Returns the error of `rdmux perf` whose node ends.
fn end_of_node(address: &str) -> String {
    format!(
        "rdmux: the node of {address} has ended: start `rdmux node --device {address}`, then this command again\n"
    )
}

#[test]
fn node__killed_is_an_error_for_servers_that_wait_for_clients() {
    let host = Host::new();
    let mut node = host.node("127.0.51.14");
    let mut server = host.server("write-lat", "127.0.51.14");
    // It says so once it listens.
    let said = server.lines().lines().map(Result::unwrap);
    assert!(said.into_iter().any(|line| line.contains("Waiting for client")));
    node.kill();
    assert_eq!(server.end(), (Some(1), end_of_node("127.0.51.14")));
}

#[test]
fn node__second_of_an_address_and_none() {
    let host = Host::new();
    let none = host
        .client("write-lat", "127.0.51.10", "127.0.51.10", &[])
        .output();
    let text = String::from_utf8_lossy(&none.unwrap().stderr).into_owned();
    assert!(text.contains("no node of this user serves 127.0.51.10"), "{text}");
    let mut unbound = host.rdmux(&["perf", "write-lat", "127.0.51.10"]);
    let unbound = unbound.env("RDMUX_PROVIDER", "shared").output().unwrap();
    let text = String::from_utf8_lossy(&unbound.stderr).into_owned();
    assert!(
        text.contains("no device at 127.0.0.1, the address used without --bind ADDRESS: no node"),
        "{text}"
    );

    let mut node = host.node("127.0.51.10");
    let second = host.rdmux(&["node", "--device", "127.0.51.10"]).output().unwrap();
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        text.contains("a node of this user serves 127.0.51.10 already"),
        "{text}"
    );
    // The place of one that was killed is free.
    node.kill();
    drop(host.node("127.0.51.10"));

    let mut own = host.rdmux(&["node", "--device", "127.0.51.10"]);
    let own = own.env("RDMUX_PROVIDER", "shared").output().unwrap();
    assert_eq!(own.status.code(), Some(1));
}

#[test]
fn node__url_makes_no_key_and_says_if_nobody_listens() {
    let host = Host::new();
    // Nobody can listen on a port that this test holds without listening.
    let held = socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    bind(&held, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = SocketAddrV4::try_from(getsockname(&held).unwrap())
        .unwrap()
        .to_string();
    let configuration = host.runtime.path().join("configuration");
    let url = |more: &[&str]| {
        let mut command = host.rdmux(&[&["node", "url", &address], more].concat());
        let output = command.env("XDG_CONFIG_HOME", &configuration).output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), out, err)
    };
    let (status, out, err) = url(&[]);
    assert_eq!((status, out.as_str()), (Some(1), ""), "{err}");
    assert!(err.starts_with("rdmux: there is no key "), "{err}");
    assert!(!configuration.exists());

    let host = Host::sharing();
    let key = host.runtime.path().join("key");
    let (status, out, err) = url(&["--key", key.to_str().unwrap()]);
    assert_eq!(status, Some(0), "{err}");
    assert!(out.starts_with(&format!("http://{address}/#")), "{out}");
    assert!(
        err.starts_with(&format!("rdmux: warning: no node has its page at {address}")),
        "{err}"
    );
}

#[test]
fn node__wrong_numbers_are_told_in_a_line() {
    let host = Host::new();
    for (args, line) in [
        (["node", "--engines", "0"], "give a number from 1 to 65535"),
        (["node", "--until-idle", "abc"], "give whole seconds, such as 10"),
        (
            ["node", "--pin", "1000"],
            "cannot run on CPU 1000: the host has none",
        ),
        (["top", "-n", "0"], "give a number from 1 on"),
    ] {
        let output = host.rdmux(&args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{args:?}");
        assert!(text.lines().next().unwrap().contains(line), "{text}");
    }
}

#[test]
fn node__memory_of_the_application_alone() {
    let host = Host::new();
    let _node = host.node("127.0.51.11");
    let server = host.server("write-lat", "127.0.51.11");
    let private = ["--memory", "private", "-n", "100"];
    let output = host.run_client("write-lat", "127.0.51.11", "127.0.51.11", &private);
    assert_measured("write-lat", &output);
    drop(server);
}

#[test]
fn node__more_engines_than_places() {
    let host = Host::new();
    let args = ["node", "--engines", "2000", "--device", "127.0.51.14"];
    let refused = host.rdmux(&args).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(text, "rdmux: --engines 2000: a device has at most 127 engines\n");
}

/// Returns the processes of nodes that have this runtime folder.
fn nodes_of(host: &Host) -> Vec<u32> {
    let runtime = host.runtime.path().to_string_lossy().into_owned();
    let variable = format!("XDG_RUNTIME_DIR={runtime}");
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_node = |pid: &u32| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        read("environ").split('\0').any(|one| one == variable) && read("cmdline").contains("\0node\0")
    };
    numbers.filter(is_node).collect()
}

#[test]
fn node__detached_until_it_is_idle() {
    let host = Host::new();
    let start = |address: &str| {
        let args = ["node", "--detach", "--until-idle", "0", "--device", address];
        host.rdmux(&args).output().unwrap()
    };
    let args = [
        "node",
        "--detach",
        "--until-idle",
        "1000",
        "--device",
        "127.0.51.12",
    ];
    let started = host.rdmux(&args).output().unwrap();
    assert!(started.status.success(), "{started:?}");
    assert_eq!(nodes_of(&host).len(), 1);
    // Its failure is told by the process that starts it.
    let second = start("127.0.51.12");
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        text.contains("a node of this user serves 127.0.51.12 already"),
        "{text}"
    );
    let [first] = nodes_of(&host)[..] else {
        panic!("{:?}", nodes_of(&host))
    };
    let first = Pid::from_raw(first.cast_signed()).unwrap();
    rustix::process::kill_process(first, rustix::process::Signal::TERM).unwrap();
    // One without applications ends at once, and leaves nothing by which others would find it.
    assert!(start("127.0.51.13").status.success());
    let deadline = Instant::now() + LONG;
    while !nodes_of(&host).is_empty() {
        assert!(Instant::now() < deadline, "{:?}", nodes_of(&host));
    }
    let left = std::fs::read_dir(host.runtime.path().join("rdmux")).unwrap();
    let left: Vec<String> = left
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("node-") && !name.ends_with(".log") && !name.ends_with(".lock"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}
