//! The replicated log over real servers in this process.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use common::*;
use rdmux_push::Target;
use rdmux_push::log::{Log, Options, agree, look};

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
