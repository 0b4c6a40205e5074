//! A program on distributed shared memory, with nodes on two hosts, which are network namespaces.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../crates/netns.rs"]
mod netns;
#[path = "../../crates/skip.rs"]
mod skip;

use std::process::{Child, Command, Stdio};

use rdmux_dsm::{Cluster, FaultMode};
use rdmux_key::Key;
use serde_json::Value;

const LINK: &str = "ip link set lo up && ip link add v0 type veth peer name v1 && ip addr add 10.33.0.1/24 dev v0 && ip link set v0 up";

/// A busy host does not decide the outcome.
const LEASE: &str = "lease = 60.0";

/// Starts SOR as a node, behind the words of another command.
fn start(before: &[&str], cluster: &Cluster, mode: FaultMode) -> Child {
    let words = [before, &[env!("CARGO_BIN_EXE_dsm_sor"), "--json", "126", "10"]].concat();
    Command::new(words[0])
        .args(&words[1..])
        .envs(cluster.environment())
        .env(FaultMode::VARIABLE, mode.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Returns the sum of a run, which compares its results with those of a run alone.
fn sum(node: Child) -> Value {
    let output = node.wait_with_output().unwrap();
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    report["sum"].clone()
}

/// The part of the test below that is in a network namespace.
#[test]
fn namespace() {
    if !netns::is_inside() {
        return;
    }
    let second = netns::Second::with_link("v1", "10.33.0.2/24");
    let folder = tempfile::tempdir().unwrap();
    let key = Key::load_or_create_at(&folder.path().join("key")).unwrap();
    let cluster = |nodes: &str, number| {
        let file = folder.path().join("cluster.toml");
        std::fs::write(&file, format!("nodes = [{nodes}]\n{LEASE}")).unwrap();
        Cluster::of_file(&file, number, &key).unwrap()
    };
    let both = "'10.33.0.1:7180', '10.33.0.2:7180'";
    for mode in [FaultMode::Thread, FaultMode::Inline, FaultMode::Mprotect] {
        let alone = sum(start(&[], &cluster("'10.33.0.1:7180'", 0), mode));
        let nodes = [
            start(&[], &cluster(both, 0), mode),
            start(&second.before(), &cluster(both, 1), mode),
        ];
        for node in nodes {
            assert_eq!(sum(node), alone, "{mode}");
        }
    }
}

#[test]
fn sor__of_two_hosts_has_the_sum_of_one() {
    netns::run_inside(LINK);
}
