//! Applications that keep to nothing, against the process of a node: they end nobody but themselves.
//!
//! `RDMUX_HOSTILE_PROCESSES` says how many, and `RDMUX_HOSTILE_SEED` seeds the first. The system decides how processes interleave, so a seed
//! replays what an application does until the node's answers differ.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "cli_hostile/application.rs"]
mod application;
#[path = "cli_hostile/bystander.rs"]
mod bystander;
mod common;
#[path = "../../share/tests/common/hostile.rs"]
mod hostile;
#[path = "../../share/tests/common/other.rs"]
mod other;
#[path = "../../share/tests/common/side.rs"]
mod side;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;

use application::Happened;
use bystander::Target;
use common::nodes::{Held, Host, LONG};
use hostile::Dice;
use other::{Other, number};
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rustix::event::{PollFd, PollFlags, poll};

/// Addresses of both nodes, and what is known of the bystander, in a child.
const ADDRESSES: &str = "RDMUX_HOSTILE_ADDRESSES";
const TARGETS: &str = "RDMUX_HOSTILE_TARGETS";

/// The other processes' part; nothing in a run of the tests.
#[test]
fn child() {
    let Some((role, seed)) = other::role() else { return };
    let variable = |name: &str| std::env::var(name).unwrap();
    let addresses: [IpAddr; 2] = serde_json::from_str(&variable(ADDRESSES)).unwrap();
    let stdin = std::io::stdin();
    match role.as_str() {
        "bystander" => bystander::run(stdin.as_fd(), addresses, seed),
        "hostile" => {
            let targets: Vec<Target> = serde_json::from_str(&variable(TARGETS)).unwrap();
            application::run(stdin.as_fd(), addresses, &targets, Dice(seed));
        }
        other => panic!("no role {other}"),
    }
}

/// Returns the next message of a child, `None` once it has ended.
fn told(by: &Other) -> Option<String> {
    let timeout = LONG.try_into().unwrap();
    let ready = poll(&mut [PollFd::new(&by.socket, PollFlags::IN)], Some(&timeout));
    assert_eq!(ready, Ok(1), "the other process is silent");
    let mut bytes = vec![0; 1 << 16];
    let (len, _) = receive_with_descriptors(&by.socket, &mut bytes).ok()?;
    bytes.truncate(len);
    (len > 0).then(|| String::from_utf8(bytes).unwrap())
}

/// Lets applications that keep to nothing do what they like to two nodes, beside one that moves bytes between them. `processes`: of such
/// applications, some in each, without the variable. `route`: that of the other one's connections. `kept`: mappings that a node keeps.
fn run(host: &Host, addresses: [&str; 2], processes: u64, (route, kept): (&str, usize)) {
    let mut nodes = addresses.map(|address| host.node(address));
    let start = |role: &str, seed, targets: &str| {
        Other::start_with(role, seed, |command| {
            command
                .env("XDG_RUNTIME_DIR", host.runtime.path())
                .env_remove("RDMUX_PROVIDER")
                .env(ADDRESSES, serde_json::to_string(&addresses).unwrap())
                .env(TARGETS, targets);
        })
    };
    let mut bystander = start("bystander", 1, "");
    let targets = told(&bystander).expect("the bystander begins");
    let mut operations = 0;
    let mut goes_on = |bystander: &Other| -> u64 {
        send_bytes(&bystander.socket, b"go on", &[]).unwrap();
        let so_far: u64 = told(bystander).expect("the bystander goes on").parse().unwrap();
        assert!(so_far > operations, "the bystander does nothing");
        operations = so_far;
        so_far
    };
    // By then it has used all that it has.
    while goes_on(&bystander) < 100 {}
    for address in addresses {
        let frame = host.frame(address, "1");
        let mut connections = frame["connections"].as_array().unwrap().iter();
        assert!(connections.any(|one| one["route"] == route), "{frame}");
    }
    let before = addresses.map(|address| host.objects(address));
    let held = [0, 1].map(|at| Held::by(&nodes[at]));
    let ours = addresses.map(|address| host.applications(address));

    let processes = number("RDMUX_HOSTILE_PROCESSES").unwrap_or(processes);
    let first = number("RDMUX_HOSTILE_SEED").unwrap_or(1);
    let mut happened = Happened::new();
    for seed in first..first + processes {
        println!("RDMUX_HOSTILE_SEED={seed}");
        let mut hostile = start("hostile", seed, &targets);
        let what = told(&hostile).expect("a hostile application tells what has happened");
        for (name, times) in serde_json::from_str::<Happened>(&what).unwrap() {
            *happened.entry(name).or_default() += times;
        }
        assert_eq!(told(&hostile), None);
        let status = hostile.process.wait().unwrap();
        assert!(status.success() || status.signal() == Some(9), "{status:?}");
        for node in &mut nodes {
            let status = node.0.try_wait().unwrap();
            assert!(status.is_none(), "a node has ended: {status:?}");
        }
        goes_on(&bystander);
    }
    println!("{happened:#?}");
    // They get far, and too far; one alone may not.
    for what in ["connected", "completed: Success", "Registered", "detached"] {
        assert!(processes < 5 || happened.contains_key(what), "{what}");
    }
    for (at, address) in addresses.into_iter().enumerate() {
        host.wait_for_objects(address, before[at]);
        let now = Held::by_at_most(&nodes[at], held[at].descriptors);
        println!("{address}: {:?}, then {now:?}", held[at]);
        assert!(now.mappings <= held[at].mappings + 8 + kept);
        assert_eq!(host.applications(address), ours[at]);
    }
    let operations = goes_on(&bystander);
    send_bytes(&bystander.socket, bystander::END, &[]).unwrap();
    assert_eq!(told(&bystander), None);
    assert!(bystander.process.wait().unwrap().success());
    println!("{operations} exact operations of the bystander");
    for node in nodes {
        node.stop();
        let (status, text) = node.end();
        assert_eq!(status, Some(0), "{text}");
        assert!(!text.contains("panicked"), "{text}");
    }
}

#[test]
fn node__applications_that_keep_to_nothing() {
    run(&Host::new(), ["127.0.68.1", "127.0.68.2"], 25, ("own", 0));
}

#[test]
fn node__applications_that_keep_to_nothing_beside_one_on_the_same_shared_queue_pair() {
    // Each of two shared queue pairs keeps what it knows of the peer's last 64 regions.
    run(
        &Host::sharing(),
        ["127.0.68.3", "127.0.68.4"],
        5,
        ("shared", 2 * 64),
    );
}
