//! Nodes on two hosts, which are network namespaces: one of them has a cluster file, and the link between them is down for a moment, and then for good.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../netns.rs"]
mod netns;
#[path = "../../skip.rs"]
mod skip;

use std::num::NonZeroU32;
use std::path::Path;
use std::time::{Duration, Instant};

use common::holds::leave;
use common::{LONG, MODES, Node, command, part, wait_for};
use rdmux_dsm::{Cluster, Error, RegionOptions, Session};
use rdmux_key::Key;

const PAGE: u64 = 4096;
const PAGES: u64 = 8;
const LEASE: Duration = Duration::from_secs(5);

const LINK: &str = "ip link set lo up && ip link add v0 type veth peer name v1 && ip addr add 10.33.0.1/24 dev v0 && ip link set v0 up";

const FILE: &str = "nodes = ['10.33.0.1:7180', '10.33.0.2:7180']\nlease = 5.0";

/// Joins a cluster, and uses its memory for some rounds, or until a node is missing. Returns the error then. Says when a round ends that began once a file
/// was there.
fn use_memory(cluster: Cluster, rounds: u64, sign: &Path) -> Result<(), Error> {
    let session = Session::join(cluster, LONG)?;
    let region = session.region(&RegionOptions::new(PAGES * PAGE)?)?;
    let mut thread = session.thread(0)?;
    let all = NonZeroU32::new(session.nodes()).unwrap();
    let mut is_seen = false;
    for round in 0..rounds {
        let is_first = !is_seen && sign.exists();
        is_seen |= is_first;
        for page in 0..PAGES {
            if page % u64::from(session.nodes()) == u64::from(session.node()) {
                region.write(page * PAGE, &round.to_ne_bytes())?;
            }
        }
        thread.barrier(0, all)?;
        for page in 0..PAGES {
            let mut bytes = [0; 8];
            region.read(page * PAGE, &mut bytes)?;
            assert_eq!(u64::from_ne_bytes(bytes), round);
        }
        thread.barrier(0, all)?;
        if round == 2 && session.nodes() > 1 {
            println!("@ begins");
        }
        if is_first {
            println!("@ goes on");
        }
    }
    Ok(())
}

#[test]
fn node() {
    if let Some(sign) = part() {
        leave(|cluster, rounds| use_memory(cluster, rounds, Path::new(&sign)));
    }
}

/// The part of the test below that is in a network namespace.
#[test]
fn namespace() {
    if !netns::is_inside() {
        return;
    }
    let second = netns::Second::with_link("v1", "10.33.0.2/24");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cluster.toml");
    std::fs::write(&file, FILE).unwrap();
    let key = Key::load_or_create_at(&folder.path().join("key")).unwrap();
    for mode in MODES {
        let sign = folder.path().join(mode.to_string());
        let start = |number: u32, before: &[&str]| {
            let cluster = Cluster::of_file(&file, number, &key).unwrap();
            Node::start(command(before, sign.to_str().unwrap(), &cluster, mode))
        };
        let mut nodes = [start(0, &[]), start(1, &second.before())];
        wait_for(&mut nodes, "@ begins");
        // Packets that are lost in a moment are sent again.
        netns::run(&["ip", "link", "set", "v0", "down"]);
        netns::run(&["ip", "link", "set", "v0", "up"]);
        std::fs::write(&sign, "").unwrap();
        wait_for(&mut nodes, "@ goes on");
        netns::run(&["ip", "link", "set", "v0", "down"]);
        let began = Instant::now();
        for (node, other) in nodes.iter_mut().zip(["@ misses 1: ", "@ misses 0: "]) {
            wait_for([&mut *node], other);
        }
        // Time is meant: that of the lease, with what a busy host takes.
        assert!(began.elapsed() < 2 * LEASE, "{:?}", began.elapsed());
        println!("{mode}: after {:?}", began.elapsed());
        for node in nodes {
            let text = node.succeed();
            println!("{}", text.lines().find(|line| line.contains("misses")).unwrap());
            assert!(text.contains("@ left"), "{text}");
        }
        netns::run(&["ip", "link", "set", "v0", "up"]);
    }
}

#[test]
fn nodes__of_hosts_whose_link_ends_for_a_moment_and_for_good() {
    netns::run_inside(LINK);
}
