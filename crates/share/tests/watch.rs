//! Programs that watch a node.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::{LONG, Served, open};
use rdmux_share::node::snapshot::Snapshot;
use rdmux_share::watch::{INTERVAL_MIN, Watch, WatchError, Watched, watched};
use rdmux_verbs::Device;
use rdmux_verbs::provider::folder::own_path;

fn watched_at(address: IpAddr) -> Option<Watched> {
    watched().into_iter().find(|node| node.address == address)
}

fn next(watch: &mut Watch) -> Snapshot {
    next_or_end(watch).unwrap()
}

fn next_or_end(watch: &mut Watch) -> Result<Snapshot, WatchError> {
    Ok(watch.next(LONG)?.expect("a snapshot"))
}

/// Connects to the socket of a node as a program that keeps to nothing.
fn connect(address: IpAddr) -> UnixStream {
    let namespace = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
    let path = own_path().join(format!("watch-{namespace}-{address}"));
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// Returns what the node sends until it ends the connection.
fn rest(mut stream: UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

#[test]
fn watch__a_snapshot_each_interval_until_the_node_ends() {
    let address = IpAddr::from([127, 0, 55, 1]);
    assert_eq!(watched_at(address), None);
    let served = Served::at(address, None);
    let node = watched_at(address).expect("a node");
    let mut watch = node.watch(Duration::ZERO).unwrap();
    let mut rare = node.watch(Duration::from_secs(3600)).unwrap();
    assert_eq!(next(&mut rare).applications.len(), 0);
    let first = next(&mut watch);
    assert!(first.node.is_whole && first.node.address == address);
    // One of them may be late.
    let fifth = (0..5).map(|_| next(&mut watch)).last().unwrap();
    let step = INTERVAL_MIN.as_nanos() as u64;
    assert!(fifth.node.time_ns - first.node.time_ns > 2 * step);
    let _device: Device = open(address, "shared");
    while next(&mut watch).applications.is_empty() {}
    // The hour is not over.
    assert_eq!(rare.next(Duration::ZERO).unwrap(), None);
    drop(served);
    loop {
        match watch.next(LONG) {
            Ok(snapshot) => assert!(snapshot.is_some()),
            Err(error) => break assert!(matches!(error, WatchError::Ended), "{error}"),
        }
    }
    assert_eq!(watched_at(address), None);
    assert!(node.watch(Duration::ZERO).is_err());
}

#[test]
fn watch__programs_that_keep_to_nothing() {
    let address = IpAddr::from([127, 0, 55, 2]);
    let _served = Served::at(address, None);
    for request in [
        &b"\n"[..],
        b"{}\n",
        b"{\"interval_ms\":-1}\n",
        b"{\"interval_ms\":1,\"more\":1}\n",
        b"\xff\xff\n",
        &[b' '; 4096],
    ] {
        let mut stream = connect(address);
        let _ = stream.write_all(request);
        assert_eq!(rest(stream), b"", "{request:?}");
    }
    // More than the request.
    let mut stream = connect(address);
    stream
        .write_all(b"{\"interval_ms\":18446744073709551615}\n")
        .unwrap();
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    stream.write_all(b"more\n").unwrap();
    assert_eq!(rest(stream).last(), Some(&b'\n'));
}

/// Those who do not read have their lines wait in the node, one each, and nobody waits for them.
#[test]
fn watch__programs_that_do_not_read_hold_up_nobody() {
    let address = IpAddr::from([127, 0, 55, 3]);
    let served = Served::at(address, None);
    let node = watched_at(address).unwrap();
    let silent: Vec<UnixStream> = (0..7)
        .map(|_| {
            let mut stream = connect(address);
            stream.write_all(b"{\"interval_ms\":0}\n").unwrap();
            stream
        })
        .collect();
    // One that is refused may notice when it asks already.
    let come_in = || {
        let mut watch = node.watch(Duration::ZERO)?;
        next_or_end(&mut watch).map(|_| watch)
    };
    // Those who only looked for the node may still be there.
    let mut watch = loop {
        if let Ok(watch) = come_in() {
            break watch;
        }
    };
    for _ in 0..20 {
        next(&mut watch);
    }
    // A user has eight; the ninth is refused, and comes in once another has left.
    assert!(matches!(come_in(), Err(WatchError::Ended)));
    drop(silent);
    while come_in().is_err() {}
    assert!(served.viewer.snapshot().is_ok());
}
