//! Sheets of this process, and damaged ones.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::process::Command;

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use super::read::parse;
use super::*;

fn cluster(own: u32, session: u8) -> Cluster {
    let members = ["192.0.2.1:7180", "[2001:db8::1]:7181", "192.0.2.3:7182"];
    let members: Vec<SocketAddr> = members.iter().map(|it| it.parse().unwrap()).collect();
    Cluster::new(own, members, [session; 16]).unwrap()
}

/// Returns what is found of this process in sessions of one number.
fn found(session: u8) -> Vec<Node> {
    let nodes = nodes().into_iter().filter_map(Result::ok);
    nodes
        .filter(|node| node.pid == std::process::id() && node.session == [session; 16])
        .collect()
}

fn words_of(sheet: &Sheet) -> Vec<u8> {
    let words = (0..words(sheet.nodes)).map(|index| sheet.word(index).load(Ordering::Relaxed));
    words.flat_map(u64::to_ne_bytes).collect()
}

#[test]
fn nodes__have_what_was_counted() {
    let sheet = Sheet::new(&cluster(1, 1)).unwrap();
    sheet.count(NodeCounter::Stage2Events, 7);
    sheet.count_call(NodeCounter::LockWaits, Duration::from_nanos(30));
    sheet.count_call(NodeCounter::LockWaits, Duration::from_nanos(12));
    sheet.count_peer(2, PeerCounter::BellsReceived, 3);
    sheet.count_region(63, RegionCounter::Messages, 9);
    sheet.raise_region(63, RegionCounter::Acquires, 4);
    sheet.raise_region(63, RegionCounter::Acquires, 3);
    sheet.add_region(63, 8192, FaultMode::Inline, Consistency::Release);
    sheet.end_peer(0, 1);
    let all = found(1);
    let [node] = &all[..] else { panic!("{all:?}") };
    assert_eq!((node.number, node.epoch), (1, 1));
    assert_eq!(node.cluster(), "192.0.2.1:7180".parse().unwrap());
    assert_eq!(node.address(), "[2001:db8::1]:7181".parse().unwrap());
    assert!(node.age() < Duration::from_secs(600));
    let counts = NodeStat {
        stage_2_events: 7,
        lock_waits: 2,
        lock_wait_ns: 42,
        ..NodeStat::default()
    };
    assert_eq!(node.counts, counts);
    let gone: Vec<bool> = node.peers.iter().map(|peer| peer.is_gone).collect();
    assert_eq!(gone, [true, false, false]);
    assert_eq!(node.peers[2].counts.bells_received, 3);
    let region = Region {
        number: 63,
        bytes: 8192,
        mode: FaultMode::Inline,
        consistency: Consistency::Release,
        counts: sheet.region(63),
    };
    assert_eq!(node.regions, [region]);
    assert_eq!((region.counts.messages, region.counts.acquires), (9, 4));
}

#[test]
fn nodes__end_with_their_sheet() {
    let sheet = Sheet::new(&cluster(0, 2)).unwrap();
    assert_eq!(found(2).len(), 1);
    drop(sheet);
    assert_eq!(found(2), []);
}

/// A number out of range changes nothing.
#[test]
fn count__of_a_peer_or_region_that_cannot_be() {
    let sheet = Sheet::new(&cluster(0, 3)).unwrap();
    let before = words_of(&sheet);
    sheet.count_peer(3, PeerCounter::Fetches, 1);
    sheet.count_region(REGIONS_MAX as u32, RegionCounter::Fetches, 1);
    sheet.raise_region(REGIONS_MAX as u32, RegionCounter::Releases, 1);
    sheet.add_region(u32::MAX, 1, FaultMode::Thread, Consistency::Release);
    assert_eq!(words_of(&sheet), before);
    assert_eq!(sheet.region(u32::MAX), Stat::default());
}

#[test]
fn nodes__a_process_that_has_the_sheet_of_another_is_none() {
    let sheet = Sheet::new(&cluster(0, 4)).unwrap();
    let file = sheet.memory.file().unwrap().try_clone_to_owned().unwrap();
    // The child's standard input is the sheet.
    let mut child = Command::new("sleep").arg("60").stdin(file).spawn().unwrap();
    let with_it: Vec<u32> = nodes()
        .into_iter()
        .filter_map(Result::ok)
        .filter(|node| node.session == [4; 16])
        .map(|node| node.pid)
        .collect();
    child.kill().unwrap();
    child.wait().unwrap();
    // The second descriptor of this process is closed.
    assert_eq!(with_it, [std::process::id()]);
}

#[test]
fn nodes__damaged_ones_have_one_line() {
    let own = std::process::id();
    let sheet = |bytes: &[u8]| {
        let mut file = File::from(sealed_file(NAME, bytes.len() as u64).unwrap());
        file.write_all(bytes).unwrap();
        file
    };
    let errors = || {
        let of_this = nodes().into_iter().filter_map(Result::err);
        let texts: Vec<String> = of_this.map(|error| error.to_string()).collect();
        texts
    };
    let empty = sheet(&[]);
    let begun = sheet(&[0; 4096]);
    let mine = format!("process {own}: ");
    assert!(errors().iter().all(|text| !text.starts_with(&mine)));
    drop((empty, begun));
    let other = sheet(b"something else");
    let told = errors();
    let told: Vec<&String> = told.iter().filter(|text| text.starts_with(&mine)).collect();
    let [one] = told[..] else { panic!("{told:?}") };
    assert!(one.contains("damaged") && !one.contains('\n'), "{one}");
    drop(other);
}

#[test]
fn parse__says_which_part_is_wrong() {
    let sheet = Sheet::new(&cluster(1, 5)).unwrap();
    sheet.add_region(0, 4096, FaultMode::Thread, Consistency::Sequential);
    let whole = words_of(&sheet);
    let own = std::process::id();
    let parsed = |bytes: &[u8]| parse(own, bytes, || own);
    assert!(parsed(&whole).unwrap().is_some());
    let with = |index: usize, value: u64| {
        let mut bytes = whole.clone();
        bytes[index * 8..index * 8 + 8].copy_from_slice(&value.to_ne_bytes());
        bytes
    };
    for (bytes, word) in [
        (with(VERSION_AT, 1), "version 1"),
        (with(VERSION_AT, VERSION + 1), "version 3"),
        (with(NODES_AT, 0), "number of nodes"),
        (with(NODES_AT, u64::MAX), "number of nodes"),
        (with(NODE_AT, 3), "number of the node"),
        (with(NODES_AT, 4), "length"),
        (whole[..whole.len() - 8].to_vec(), "length"),
        (with(peer_at(2) + PORT_AT, 65536), "port"),
        (with(peer_at(0) + GONE_AT, 2), "state"),
        (with(region_at(3, 0) + MODE_AT, 3), "mode of faults"),
        (with(region_at(3, 0) + CONSISTENCY_AT, 2), "consistency"),
        (with(0, 7), "beginning"),
    ] {
        let error = parsed(&bytes).unwrap_err().to_string();
        assert!(
            error.contains(word) && error.contains(&own.to_string()),
            "{error}"
        );
    }
    assert_eq!(parsed(&with(PROCESS_AT, 1 << 40)), Ok(None));
    assert_eq!(parsed(&with(0, 0)), Ok(None));
}

/// Any content gives a node, nothing, or an error.
#[test]
fn parse__of_anything() {
    let sheet = Sheet::new(&cluster(1, 6)).unwrap();
    let whole = words_of(&sheet);
    let mut random = ChaCha8Rng::seed_from_u64(24);
    for _ in 0..20_000 {
        let mut bytes = whole.clone();
        for _ in 0..1 + random.next_u32() % 4 {
            // Mostly the words that mean something.
            let word = random.next_u32() as usize % (peer_at(3) + REGION_WORDS);
            let value = match random.next_u32() % 3 {
                0 => random.next_u64(),
                1 => u64::from(random.next_u32() % 5),
                _ => u64::MAX,
            };
            bytes[word * 8..word * 8 + 8].copy_from_slice(&value.to_ne_bytes());
        }
        bytes.truncate(random.next_u32() as usize % (bytes.len() * 2));
        if let Ok(Some(node)) = parse(1, &bytes, std::process::id) {
            let _ = (node.cluster(), node.address(), node.age());
        }
    }
}
