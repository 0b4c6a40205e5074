//! Many connects of a host of NVMe/RDMA, in a process of their own: what they leave behind is that process's.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod rdma_host;

use rdma_host::{Host, Running, SUBSYSTEM, device};
use rdmux_wire::nvme::{ConnectData, Status};

/// Returns the number of this process's descriptors, and its resident memory in pages.
fn usage() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let resident = statm.split(' ').nth(1).unwrap().parse().unwrap();
    (descriptors, resident)
}

#[test]
fn connect__a_thousand_times_leaves_nothing_behind() {
    let (server, device) = (Running::memory(1), device());
    let connect = || {
        let mut host = Host::open(&device, server.address, 0);
        let connected = host.connect(0, ConnectData::ANY_CONTROLLER, SUBSYSTEM, 0);
        assert_eq!(connected.status, Status::SUCCESS);
    };
    (0..1000).for_each(|_| connect());
    let before = usage();
    (0..1000).for_each(|_| connect());
    let after = usage();
    println!("before {before:?}, after {after:?}: descriptors and pages");
    // A few may not have ended yet. One page that stays of each shows.
    assert!(after.0 <= before.0 + 20, "{before:?} {after:?}");
    assert!(after.1 <= before.1 + 800, "{before:?} {after:?}");
}
