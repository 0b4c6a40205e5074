//! Both sides of each example as processes, and what they print.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../crates/skip.rs"]
mod skip;

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use rdmux_verbs::{ConnectParams, Device, QpOptions};
use skip::skip;

const LONG: Duration = Duration::from_secs(60);

/// Returns the program of an example.
fn example(name: &str) -> &'static str {
    match name {
        "ping_pong" => env!("CARGO_BIN_EXE_ping_pong"),
        "key_value" => env!("CARGO_BIN_EXE_key_value"),
        "datagrams" => env!("CARGO_BIN_EXE_datagrams"),
        "async_wait" => env!("CARGO_BIN_EXE_async_wait"),
        _ => panic!("{name} is no example"),
    }
}

/// The server's side of an example. Dropping it kills the process.
struct Server {
    child: Child,
    lines: Receiver<String>,
}

impl Server {
    /// Starts a server and waits until it listens.
    fn start(name: &str, own: &str, arguments: &[&str]) -> Server {
        let mut command = Command::new(example(name));
        command.args(["serve", own]).args(arguments);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (tx, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = tx.send(line);
            }
        });
        let server = Server { child, lines };
        assert_eq!(server.line(), format!("listening on {own}"));
        server
    }

    fn line(&self) -> String {
        self.lines.recv_timeout(LONG).expect("a line of the server")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn client(name: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(example(name));
    // Errors would have backtraces.
    command.args(arguments).env("RUST_LIB_BACKTRACE", "0");
    command.output().unwrap()
}

/// Returns the lines that a client prints, which must succeed.
fn lines(output: Output) -> Vec<String> {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn ping_pong__prints_the_median() {
    let own = "127.0.35.1";
    let server = Server::start("ping_pong", own, &[]);
    let lines = lines(client("ping_pong", &["ping", own, own]));
    let [line] = &lines[..] else { panic!("{lines:?}") };
    let median = line
        .strip_prefix("10000 round trips, answer pong, median ")
        .expect(line);
    assert!(median.ends_with('s') && median != "0ns", "{line}");
    assert_eq!(server.line(), "answered 10000 messages");
}

#[test]
fn key_value__finds_what_is_there_and_nothing_else() {
    let own = "127.0.35.2";
    let mut pairs: Vec<String> = (0..500).map(|n| format!("key {n}=value {n}")).collect();
    pairs.push(format!("{}={}", "k".repeat(32), "v".repeat(32)));
    let pairs: Vec<&str> = pairs.iter().map(String::as_str).collect();
    let _server = Server::start("key_value", own, &pairs);
    let long = "k".repeat(32);
    let keys: Vec<String> = (0..500).map(|n| format!("key {n}")).collect();
    let mut arguments = vec!["get", own, own, &long, "key"];
    arguments.extend(keys.iter().map(String::as_str));
    let mut expected = vec![
        format!("{long}: {}", "v".repeat(32)),
        "key: (not there)".to_owned(),
    ];
    expected.extend((0..500).map(|n| format!("key {n}: value {n}")));
    assert_eq!(lines(client("key_value", &arguments)), expected);
}

#[test]
fn datagrams__each_is_answered() {
    let own = "127.0.35.3";
    let _server = Server::start("datagrams", own, &[]);
    for texts in [["hello", "world"], ["Zz", ""]] {
        let answers = lines(client("datagrams", &["ask", own, own, texts[0], texts[1]]));
        assert_eq!(answers, texts.map(str::to_uppercase));
    }
}

#[test]
fn datagrams__over_ipv6() {
    let own = "::1";
    if UdpSocket::bind((own, 0)).is_err() {
        return skip("this host has no IPv6 loopback");
    }
    let _server = Server::start("datagrams", own, &[]);
    assert_eq!(lines(client("datagrams", &["ask", own, own, "hello"])), ["HELLO"]);
}

#[test]
fn async_wait__serves_a_client_beside_an_idle_one() {
    let own = "127.0.35.4";
    let _server = Server::start("async_wait", own, &[]);
    let address: IpAddr = own.parse().unwrap();
    rdmux_soft::register();
    let device = Device::open(address).unwrap();
    let cq = device.create_cq(1).unwrap();
    let qp = device
        .alloc_pd()
        .unwrap()
        .create_qp(&QpOptions::new(&cq))
        .unwrap();
    let peer = SocketAddr::new(address, 7178);
    let _idle = device.connect(&qp, peer, &ConnectParams::default(), &[]).unwrap();
    for _ in 0..2 {
        let answers = lines(client("async_wait", &["ask", own, own, "7", "65535"]));
        assert_eq!(answers, ["7: 49", "65535: 4294836225"]);
    }
}

/// Checks that wrong arguments, and a server that is not there, are errors of one line and no panics.
#[test]
fn examples__wrong_use_is_an_error() {
    let own = "127.0.35.5";
    for (name, arguments, message) in [
        ("ping_pong", &[][..], "usage"),
        ("ping_pong", &["ping", own, "here"], "invalid IP address"),
        ("ping_pong", &["ping", own, "::1"], "one is IPv4, the other IPv6"),
        ("ping_pong", &["ping", own, own], "127.0.35.5:7175: "),
        ("key_value", &["serve", own, "nothing"], "KEY=VALUE"),
        ("key_value", &["serve", own, "=x"], "1 to 32 bytes"),
        (
            "ping_pong",
            &["ping", own, own],
            "first start `ping_pong serve 127.0.35.5`",
        ),
        (
            "key_value",
            &["get", own, own],
            "first start `key_value serve 127.0.35.5`",
        ),
        (
            "datagrams",
            &["ask", own, own],
            "first start `datagrams serve 127.0.35.5`",
        ),
        (
            "async_wait",
            &["ask", own, own],
            "first start `async_wait serve 127.0.35.5`",
        ),
    ] {
        let output = client(name, arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name} {arguments:?}: {error}");
        assert!(error.contains(message), "{name} {arguments:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{name} {arguments:?}: {error}");
    }
}
