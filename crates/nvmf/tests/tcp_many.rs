//! Many hosts of NVMe/TCP, in a process of their own: what they leave behind is that process's.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod serve;

use std::sync::Arc;
use std::time::Duration;

use rdmux_nvmf::backend::MemoryBackend;
use rdmux_nvmf::host::command::{read, write};
use rdmux_nvmf::host::{Controller, Options, Session};
use rdmux_nvmf::target::{Hosts, Listener, Subsystem, Terms};
use rdmux_wire::nvme::{HostId, Nqn, NsId, TransportKind};

use serve::serve;

const BLOCK: u32 = 4096;

/// Returns the number of this process's descriptors, and its resident memory in pages.
fn usage() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let resident = statm.split(' ').nth(1).unwrap().parse().unwrap();
    (descriptors, resident)
}

/// Runs rounds of so many connections, and checks that not even a page of each is left. The memory that the allocator keeps differs from round to
/// round, and what leaks shows in each.
fn assert_leaves_nothing(connections: usize, mut round: impl FnMut()) {
    round();
    let mut all = vec![usage()];
    for _ in 0..4 {
        round();
        all.push(usage());
    }
    println!("after each round: {all:?} descriptors and pages");
    let least = |figure: fn(&(usize, usize)) -> usize| {
        let added = all
            .windows(2)
            .map(|pair| figure(&pair[1]).saturating_sub(figure(&pair[0])));
        added.min().unwrap()
    };
    assert!(least(|usage| usage.0) <= 2, "{all:?}");
    assert!(least(|usage| usage.1) <= connections * 4 / 5, "{all:?}");
}

#[test]
fn hosts__by_the_hundred_and_by_the_thousand_leave_nothing_behind() {
    let nqn = |name: &str| Nqn::new(&format!("nqn.2014-08.org.example:{name}")).unwrap();
    let subsystem = Subsystem::new(nqn("many"), "serial", Hosts::any(Terms::default()));
    let backend = Arc::new(MemoryBackend::new(16 << 20).unwrap());
    let listener = Listener {
        transport: TransportKind::Tcp,
        address: "127.0.0.1:0".parse().unwrap(),
    };
    let (subsystem, address, handle, thread) = serve(subsystem, (backend, 1), listener, 2);
    let options = |number: u16| Options {
        host: nqn(&format!("host-{number}")),
        host_id: HostId((u128::from(number) + 1).to_le_bytes()),
        // Without a thread for each.
        keep_alive: Duration::ZERO,
        ..Options::new(vec![address], nqn("many"))
    };

    let connect = || drop(Controller::connect(&Arc::new(options(0)), 0).unwrap());
    assert_leaves_nothing(1000, || (0..1000).for_each(|_| connect()));

    // 256 hosts, of which each has its block.
    assert_leaves_nothing(512, || {
        let sessions: Vec<_> = (0..256)
            .map(|number| Session::connect(options(number), 1).unwrap())
            .collect();
        let mut queues: Vec<_> = sessions
            .iter()
            .map(|session| session.queue(1, 8).unwrap())
            .collect();
        assert_eq!(subsystem.controllers().len(), 256);
        for (queue, number) in queues.iter_mut().zip(0..=u8::MAX) {
            let bytes = vec![number; BLOCK as usize];
            queue.submit(write(NsId(1), number.into(), 1, BLOCK, bytes));
        }
        for queue in &mut queues {
            queue.wait().unwrap();
            assert!(queue.poll().unwrap().status.is_success());
        }
        for (queue, number) in queues.iter_mut().zip(0..=u8::MAX) {
            let command = read(NsId(1), number.into(), 1, BLOCK, vec![0; BLOCK as usize]);
            let completion = queue.run("Read", command).unwrap();
            assert!(completion.bytes().iter().all(|byte| *byte == number));
        }
        drop(queues);
        sessions.into_iter().for_each(Session::close);
    });
    handle.stop();
    thread.join().unwrap();
}
