//! A log reaches all its replicas on its own thread, whatever some of them do.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../push/tests/common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use common::*;
use rdmux_log::{Log, Options};
use rdmux_push::Target;

/// Returns the number of this process's threads, by name.
fn threads() -> BTreeMap<String, usize> {
    let mut threads = BTreeMap::new();
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        // A thread may end meanwhile.
        if let Ok(name) = std::fs::read_to_string(task.unwrap().path().join("comm")) {
            *threads.entry(name.trim_end().to_owned()).or_default() += 1;
        }
    }
    threads
}

/// Waits until there are no more threads than before: devices start some for a moment, when they meet.
fn no_more_threads_than(before: &BTreeMap<String, usize>, limit: Duration) {
    let deadline = Instant::now() + limit;
    while threads().values().sum::<usize>() > before.values().sum() {
        assert!(Instant::now() < deadline, "{:?} instead of {before:?}", threads());
        std::thread::yield_now();
    }
}

#[test]
fn open__takes_no_thread_for_a_replica_and_waits_for_none_that_is_silent() {
    let hosts = [100, 101, 102, 103, 104].map(|last| format!("127.0.9.{last}"));
    let target = |host: &String, region| format!("rdmux://{host}/{region}").parse::<Target>().unwrap();
    let all = hosts.each_ref().map(|host| target(host, "all"));
    let serve = |host: &String| {
        let regions = ["one", "all"].map(|name| memory_region(name, 1 << 20));
        Running::start(&format!("{host}:7174"), regions.into(), LONG)
    };
    let (first, others) = hosts.split_at(2);
    let (leaving, _staying): (Vec<_>, Vec<_>) = (
        first.iter().map(serve).collect(),
        others.iter().map(serve).collect(),
    );
    let options = Options {
        create: true,
        ..Options::default()
    };
    Log::open(&all, &key(), &options).unwrap().close().unwrap();
    drop(leaving);
    let silent = [&hosts[0], &hosts[1]].map(|host| Silent::start(host));

    let mut log = Log::open(&[target(&hosts[2], "one")], &key(), &options).unwrap();
    let next = log.append(b"one").unwrap();
    log.wait_for(next).unwrap();
    let with_one = threads();
    log.close().unwrap();

    let mut log = Log::open(&all, &key(), &options).unwrap();
    let next = log.append(b"all").unwrap();
    log.wait_for(next).unwrap();
    // An attempt lasts 10 s without an answer.
    assert!(silent.iter().all(|silent| silent.accepted() < 2));
    no_more_threads_than(&with_one, Duration::from_secs(5));

    // It wakes by itself when the time is over.
    let deadline = Instant::now() + LONG;
    let gave_up = |log: &Log| {
        let mut states = log.replicas().take(2).map(|(_, state, _)| state);
        states.all(|state| state.contains("no answer within the timeout"))
    };
    while !gave_up(&log) {
        assert!(Instant::now() < deadline, "it waits for ever");
        log.sleep(None::<OwnedFd>, LONG).unwrap();
    }
    while silent.iter().any(|silent| silent.accepted() < 2) {
        assert!(Instant::now() < deadline, "a silent replica is not tried again");
        log.sleep(None::<OwnedFd>, Duration::from_millis(20)).unwrap();
    }
    let next = log.append(b"again").unwrap();
    log.wait_for(next).unwrap();
    no_more_threads_than(&with_one, Duration::from_secs(5));
    log.close().unwrap();
}
