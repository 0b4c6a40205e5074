//! The replicated log over real servers in this process.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../push/tests/common/mod.rs"]
mod common;

use std::os::fd::OwnedFd;
use std::time::Duration;

use common::*;
use rdmux_log::{Log, Options, agree, look};
use rdmux_push::Target;

/// Returns a record whose bytes depend on its number.
fn record(number: u64) -> Vec<u8> {
    pattern(60_001, number as usize * 131)
}

#[test]
fn open__finds_all_of_a_log_larger_than_the_buffer_of_requests() {
    let server = Running::start("127.0.9.90:7174", vec![memory_region("log", 24 << 20)], LONG);
    let target: Target = format!("rdmux://{}/log", server.address).parse().unwrap();
    let targets = [target];
    let options = Options {
        create: true,
        ..Options::default()
    };
    let mut log = Log::open(&targets, &key(), &options).unwrap();
    // These take more than 9 MiB.
    let records = 160;
    for number in 1..=records {
        assert_eq!(log.append(&record(number)).unwrap(), number);
    }
    log.close().unwrap();

    let mut log = Log::open(&targets, &key(), &Options::default()).unwrap();
    assert_eq!((log.first(), log.last()), (1, records));
    let next = log.append(&record(records + 1)).unwrap();
    assert_eq!(next, records + 1);
    log.wait_for(next).unwrap();
    log.close().unwrap();

    let view = look(&targets[0], &key(), true).unwrap().unwrap();
    let read = agree(&[view]).unwrap();
    assert!(read.complete);
    assert_eq!(read.acknowledged, records + 1);
    assert_eq!(read.records.len() as u64, records + 1);
    for (number, bytes) in &read.records {
        assert!(*bytes == record(*number), "record {number}");
    }
}

#[test]
fn open__a_server_by_name() {
    let server = Running::start("127.0.9.95:7174", vec![memory_region("log", 1 << 20)], LONG);
    // The resolver knows what this name is, and it is no address: 9 * 256 + 95.
    let target: Target = "rdmux://127.0.2399/log".parse().unwrap();
    assert_eq!(target.address(), None);
    assert_eq!(target.resolve().unwrap(), [server.address]);
    let options = Options {
        create: true,
        ..Options::default()
    };
    let mut log = Log::open(std::slice::from_ref(&target), &key(), &options).unwrap();
    let next = log.append(b"record").unwrap();
    log.wait_for(next).unwrap();
    log.close().unwrap();
    let nowhere: Target = "rdmux://host.invalid/log".parse().unwrap();
    let options = Options {
        patience: Duration::from_millis(300),
        ..options
    };
    let error = Log::open(&[nowhere], &key(), &options).unwrap_err();
    assert!(
        error.to_string().contains("no majority of the 1 replicas"),
        "{error}"
    );
}

#[test]
fn close__does_not_wait_for_a_replica_whose_disk_hangs() {
    let disk = Disk::new(false);
    let servers = [
        Running::start("127.0.9.92:7174", vec![memory_region("disk", 1 << 20)], LONG),
        Running::start("127.0.9.93:7174", vec![memory_region("disk", 1 << 20)], LONG),
        Running::start("127.0.9.94:7174", vec![disk.region()], LONG),
    ];
    let targets = servers
        .each_ref()
        .map(|server| format!("rdmux://{}/disk", server.address).parse().unwrap());
    let options = Options {
        create: true,
        drop_oldest: true,
        ..Options::default()
    };
    let mut log = Log::open(&targets, &key(), &options).unwrap();
    disk.set(|gate| gate.shut = true);
    // A majority is enough to open the log: the third replica may join later.
    while disk.gate.lock().unwrap().waiting == 0 {
        let next = log.append(&record(1)).unwrap();
        log.wait_for(next).unwrap();
        log.sleep(None::<OwnedFd>, Duration::from_millis(10)).unwrap();
    }
    for _ in 0..4 {
        let next = log.append(&record(1)).unwrap();
        log.wait_for(next).unwrap();
    }
    // The disk hangs until this has returned.
    log.close().unwrap();
    disk.set(|gate| gate.shut = false);
}
