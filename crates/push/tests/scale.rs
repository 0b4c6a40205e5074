//! Many mappings, and large ones.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::time::Instant;

use common::*;
use rdmux_push::server::Config;
use rdmux_push::{Access, MapRequest, Placement, Region};
use skip::skip;

/// Returns the bytes of this process's memory that are in use.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Prints figures: `RDMUX_PUSH_MAPPINGS=10000 cargo test --release -p rdmux-push --test scale -- --nocapture`.
#[test]
fn map__thousands_of_one_client_and_each_works() {
    let count: u64 = std::env::var("RDMUX_PUSH_MAPPINGS").map_or(2_000, |n| n.parse().unwrap());
    let server = Running::start_with(Config {
        mappings_max: count as u32,
        ..config("127.0.9.80:7174", vec![memory_region("m", count * 4096)])
    });
    let mut client = server.client();
    let before = resident_bytes();
    let mut slowest = std::time::Duration::ZERO;
    let begun = Instant::now();
    let mappings: Vec<_> = (0..count)
        .map(|at| {
            let begun = Instant::now();
            let mapping = client.map(&name("m"), RW, at * 4096, 4096, 0).unwrap();
            slowest = slowest.max(begun.elapsed());
            mapping
        })
        .collect();
    let took = begun.elapsed();
    let bytes = resident_bytes().saturating_sub(before);
    println!(
        "{count} mappings: {:.1} us each, the slowest {:.1} us; {} bytes each at both ends together",
        took.as_secs_f64() * 1e6 / count as f64,
        slowest.as_secs_f64() * 1e6,
        bytes / count
    );
    // One more mapping is refused, because of the number of mappings.
    assert!(
        client
            .map(&name("m"), RW, 0, 4096, 0)
            .unwrap_err()
            .to_string()
            .contains("mappings")
    );
    let begun = Instant::now();
    for (at, mapping) in mappings.iter().enumerate() {
        client
            .write(mapping, at as u64 * 4096, &(at as u64).to_be_bytes())
            .unwrap();
    }
    println!(
        "a write through each: {:.1} us",
        begun.elapsed().as_secs_f64() * 1e6 / count as f64
    );
    let mut there = [0; 8];
    for at in 0..count {
        server.regions[0].memory().read(at * 4096, &mut there).unwrap();
        assert_eq!(u64::from_be_bytes(there), at);
    }
    // A client that needs the whole region has all mappings broken, in a few notices.
    let begun = Instant::now();
    let mut other = server.client();
    let granted = std::thread::spawn(move || other.map(&name("m"), RW, 0, 0, 0).map(|_| ()));
    while !granted.is_finished() {
        client.handle_notices().unwrap();
        std::thread::yield_now();
    }
    granted.join().unwrap().unwrap();
    println!(
        "all broken and released: {:.1} ms",
        begun.elapsed().as_secs_f64() * 1e3
    );
    assert!(mappings.iter().all(|mapping| !client.is_held(mapping)));
    let begun = Instant::now();
    for mapping in mappings {
        client.unmap(mapping).unwrap();
    }
    println!(
        "unmapped: {:.1} us each",
        begun.elapsed().as_secs_f64() * 1e6 / count as f64
    );
}

#[test]
fn map__hundreds_of_gigabytes() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
        return skip("/dev/shm cannot be written");
    };
    // The file has no blocks here: a file that is served for reading and writing has them allocated first.
    let (bytes, path) = (400u64 << 30, folder.path().join("f"));
    let file = std::fs::File::create_new(&path).unwrap();
    file.set_len(bytes).unwrap();
    drop(file);
    let region = Region::file(name("f"), &path, None, true).unwrap();
    let server = Running::start("127.0.9.81:7174", vec![region, memory_region("m", 4096)], LONG);
    let mut client = server.client();
    let begun = Instant::now();
    let mapping = client.map(&name("f"), Access::READ, 0, 0, 0).unwrap();
    println!("{} GiB mapped in {:?}", bytes >> 30, begun.elapsed());
    assert_eq!(
        (mapping.region_bytes(), mapping.extents()[0].length),
        (bytes, bytes)
    );
    let mut there = [1; 4096];
    for offset in [0, (4 << 30) - 100, bytes - 4096] {
        there.fill(1);
        client.read(&mapping, offset, &mut there).unwrap();
        assert_eq!(there, [0; 4096], "{offset}");
    }
    let error = client.read(&mapping, bytes - 4095, &mut there).unwrap_err();
    assert!(error.to_string().contains("outside"), "{error}");
}

/// Maps memory of hundreds of gigabytes, of which only a few pages are present.
#[test]
fn map__hundreds_of_gigabytes_to_write() {
    let bytes = 300u64 << 30;
    let region = match Region::anonymous(name("m"), bytes) {
        Ok(region) => region,
        Err(error) => return skip(format!("this system does not promise so much memory: {error}")),
    };
    let server = Running::start("127.0.9.82:7174", vec![region], LONG);
    let mut client = server.client();
    let mapping = client.map_as(&name("m"), &MapRequest::new(RW)).unwrap();
    for offset in [0, (4 << 30) - 50, (200 << 30) + 1, bytes - 100] {
        client.write(&mapping, offset, &pattern(100, 9)).unwrap();
        client.flush(&mapping, offset, 100, Placement::GLOBAL).unwrap();
        let mut there = [0; 100];
        server.regions[0].memory().read(offset, &mut there).unwrap();
        assert_eq!(there[..], pattern(100, 9)[..], "{offset}");
    }
    // A flush by message may cover the whole region.
    let way = Some(rdmux_push::Way::SoftwareFlush);
    client
        .post_flush_by(&mapping, 0, bytes, Placement::GLOBAL, way, 1)
        .unwrap();
    client.next_done().unwrap();
}
