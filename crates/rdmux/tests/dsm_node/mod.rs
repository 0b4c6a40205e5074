//! A node of a shared memory, which the program of a test is when `rdmux dsm run` starts it with [`VARIABLE`].

use std::num::NonZeroU32;
use std::time::Duration;

use rdmux_dsm::{Cluster, Consistency, RegionOptions, Session};
use rustix::process::{Signal, set_parent_process_death_signal};

const VARIABLE: &str = "RDMUX_TEST_DSM_NODE";

/// Returns the program with its arguments that is a node, with a region of a consistency. It says READY and the address of node 0 once all nodes have shared a page, and stays until
/// it or the launcher is killed.
pub(crate) fn command(consistency: Consistency) -> Vec<String> {
    let program = std::env::current_exe().unwrap();
    let program = program.to_str().unwrap();
    let variable = format!("{VARIABLE}={consistency}");
    let words = ["env", &variable, program, "--exact", "node", "--nocapture"];
    words.map(str::to_owned).to_vec()
}

/// Is a node, if this process is to be one: called by the test `node`, which does nothing else.
pub(crate) fn run() {
    let Ok(consistency) = std::env::var(VARIABLE) else {
        return;
    };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    rdmux_soft::register();
    let cluster = Cluster::of_environment().unwrap();
    let first = cluster
        .nodes()
        .next()
        .and_then(|node| cluster.address(node))
        .unwrap();
    let session = Session::join(cluster, Duration::from_secs(60)).unwrap();
    let options = RegionOptions::new(1 << 16).unwrap();
    let region = session
        .region(&options.consistency(consistency.parse().unwrap()))
        .unwrap();
    let words = region.array::<u64>(0, 1);
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    if session.node() == 0 {
        words.set(0, 7);
    }
    thread.barrier(0, all).unwrap();
    assert_eq!(words.get(0), 7);
    thread.barrier(0, all).unwrap();
    if session.node() == 0 {
        println!("READY {first}");
    }
    loop {
        std::thread::park();
    }
}
