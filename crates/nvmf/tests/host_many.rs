//! Many sessions of our host over RDMA, each with a device of its own, in a process of their own: what they leave behind is that process's.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod rdma_host;

use rdma_host::{Running, SUBSYSTEM, nqn, run_all};
use rdmux_nvmf::host::{Options, Session, Transport, command};
use rdmux_wire::nvme::NsId;

/// Returns the number of this process's descriptors, of its threads, and its resident memory in pages.
fn usage() -> (usize, usize, usize) {
    let entries = |folder| std::fs::read_dir(folder).unwrap().count();
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let resident = statm.split(' ').nth(1).unwrap().parse().unwrap();
    (entries("/proc/self/fd"), entries("/proc/self/task"), resident)
}

#[test]
fn session__hundreds_of_times_leaves_nothing_behind() {
    let server = Running::memory(1);
    let run = |at: u64| {
        let mut options = Options::new(vec![server.address], nqn(SUBSYSTEM));
        options.transport = Transport::Rdma;
        let session = Session::connect(options, 1).unwrap();
        let mut queue = session.queue(1, 8).unwrap();
        // In the capsule, and in memory that is registered for them.
        let write = |blocks: u32, byte| {
            let bytes = blocks * 4096;
            command::write(NsId(1), at, blocks, bytes, vec![byte; bytes as usize])
        };
        run_all(&mut queue, [write(1, 1), write(8, 2)]);
        let done = run_all(&mut queue, [command::read(NsId(1), at, 1, 4096, vec![0; 4096])]);
        assert_eq!(done[0].received, 4096);
    };
    (0..200).for_each(run);
    let before = usage();
    (0..200).for_each(run);
    let after = usage();
    println!("before {before:?}, after {after:?}: descriptors, threads, pages");
    // A few may not have ended yet. One page that stays of each shows.
    assert!(after.0 <= before.0 + 30, "{before:?} {after:?}");
    assert!(after.1 <= before.1 + 3, "{before:?} {after:?}");
    assert!(after.2 <= before.2 + 180, "{before:?} {after:?}");
}
