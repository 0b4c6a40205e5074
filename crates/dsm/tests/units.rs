//! Units smaller and larger than a page, on nodes as processes.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;

use common::{MODES, in_threads, named, run, run_as_node};
use rdmux_dsm::{
    Access, Array, Consistency, Error, FaultMode, Placement, Region, RegionOptions, Session, Thread,
};
use skip::skip;

const PAGE: u64 = 4096;

#[test]
fn node() {
    run_as_node(&[
        ("small", small),
        ("large", large),
        ("copied", copied),
        ("contended", contended),
        ("released", released),
        ("alternating", alternating),
        ("dies", dies),
        ("wrong", wrong),
        ("unequal", unequal),
    ]);
}

fn region(session: &Session, bytes: u64, unit: u64) -> Region<'_> {
    let options = RegionOptions::new(bytes).unwrap();
    session.region(&RegionOptions { unit, ..options }).unwrap()
}

fn meet(session: &Session, thread: &mut Thread<'_>) {
    let parties = NonZeroU32::new(session.nodes()).unwrap();
    thread.barrier(0, parties).unwrap();
}

fn words<'a>(region: &'a Region<'a>, unit: u64) -> Array<'a, u64> {
    let bytes = region.unit_bytes();
    region.array(unit * bytes, bytes as usize / 8)
}

/// Each node writes the units at home there, which lie beside those of the other nodes, and then all nodes read all.
fn small(session: &Session) {
    const PAGES: u64 = 3;
    let mut thread = session.thread(0).unwrap();
    let (own, nodes) = (u64::from(session.node()), u64::from(session.nodes()));
    for unit_bytes in [64, 128, 512, 2048] {
        let region = region(session, PAGES * PAGE, unit_bytes);
        let units = PAGES * PAGE / unit_bytes;
        let value = |unit: u64, word: usize, round: u64| unit << 32 | (word as u64) << 8 | round;
        for round in 1..4 {
            let before = region.stat();
            let owns = |unit: &u64| unit % nodes == own;
            for unit in (0..units).filter(owns) {
                let words = words(&region, unit);
                (0..words.len()).for_each(|word| words.set(word, value(unit, word, round)));
            }
            let stat = region.stat().since(&before);
            assert_eq!(stat.fetches, 0, "{unit_bytes}: {stat:?}");
            if round == 1 {
                // Nobody else is asked for a unit, though others write beside it.
                let count = (0..units).filter(owns).count() as u64;
                assert_eq!(
                    [stat.messages, stat.write_faults],
                    [0, count],
                    "{unit_bytes}: {stat:?}"
                );
            }
            meet(session, &mut thread);
            for unit in 0..units {
                let words = words(&region, unit);
                for word in 0..words.len() {
                    assert_eq!(
                        words.get(word),
                        value(unit, word, round),
                        "unit {unit}, word {word}"
                    );
                }
            }
            let stat = region.stat().since(&before);
            let others = units - (0..units).filter(owns).count() as u64;
            assert_eq!(stat.fetches, others, "{unit_bytes}: {stat:?}");
            assert_eq!(stat.fetched_bytes, others * unit_bytes, "{unit_bytes}: {stat:?}");
            meet(session, &mut thread);
        }
    }
}

#[test]
fn region__of_small_units_moves_those_alone_that_are_used() {
    for mode in MODES {
        run("small", 2, mode);
    }
    run("small", 3, MODES[0]);
}

/// One node writes a word of each page, another one reads them, twice; and then a range of them.
fn large(session: &Session) {
    const UNITS: u64 = 5;
    let mut thread = session.thread(0).unwrap();
    for unit_bytes in [64 << 10, 2 << 20] {
        let region = region(session, UNITS * unit_bytes - 1, unit_bytes);
        let pages = UNITS * unit_bytes / PAGE;
        let words = region.array::<u64>(0, (pages * PAGE / 8) as usize);
        let at = |page: u64| (page * PAGE / 8 + page % 512) as usize;
        let homes_of_1 = UNITS / 2;
        let mut before = region.stat();
        for round in 1..4 {
            if session.node() == 0 {
                (0..pages).for_each(|page| words.set(at(page), page * round));
                let stat = region.stat().since(&before);
                let faults = stat.write_faults + stat.upgrade_faults;
                assert_eq!(faults, UNITS, "{unit_bytes}: {stat:?}");
                if round == 1 {
                    assert_eq!(stat.fetches, homes_of_1, "{unit_bytes}: {stat:?}");
                }
            }
            meet(session, &mut thread);
            if session.node() == 1 {
                if round == 3 {
                    region.acquire(0..pages * PAGE, Access::Read).unwrap();
                }
                (0..pages).for_each(|page| assert_eq!(words.get(at(page)), page * round, "page {page}"));
                let stat = region.stat().since(&before);
                assert_eq!(
                    [stat.read_faults, stat.fetches],
                    [UNITS; 2],
                    "{unit_bytes}: {stat:?}"
                );
                assert_eq!(stat.fetched_bytes, UNITS * unit_bytes, "{stat:?}");
                if round > 1 {
                    assert_eq!(stat.invalidations, UNITS, "{unit_bytes}: {stat:?}");
                }
            }
            // The other node takes units back after this.
            before = region.stat();
            meet(session, &mut thread);
        }
    }
}

#[test]
fn region__of_large_units_moves_each_by_one_fault() {
    for mode in MODES {
        run("large", 2, mode);
    }
}

/// One node copies a slice into an array, and the other one, which has got the right to those elements, copies them out.
fn copied(session: &Session) {
    const START: usize = 100;
    const LEN: usize = 1000;
    let mut thread = session.thread(0).unwrap();
    let region = region(session, 4 * PAGE, PAGE);
    let numbers = region.array::<f64>(PAGE / 2, 1500);
    let values: Vec<f64> = (0..LEN).map(|at| 0.1 * (at + 1) as f64).collect();
    if session.node() == 0 {
        numbers.write(START, &values);
    }
    meet(session, &mut thread);
    if session.node() == 1 {
        numbers.prefetch(START..START + LEN, Access::Read);
        numbers.acquire(START..START + LEN, Access::Read).unwrap();
        let before = region.stat();
        let mut out = vec![0.0; LEN];
        numbers.read(START, &mut out);
        assert_eq!(out, values);
        let stat = region.stat().since(&before);
        assert_eq!([stat.read_faults, stat.fetches], [0; 2], "{stat:?}");
        let mut edges = [f64::NAN; 2];
        numbers.read(START - 1, &mut edges[..1]);
        numbers.read(START + LEN, &mut edges[1..]);
        assert_eq!(edges, [0.0; 2]);
    }
    let beyond = std::panic::catch_unwind(AssertUnwindSafe(|| numbers.write(1499, &[1.0; 2])));
    assert!(beyond.is_err());
    meet(session, &mut thread);
}

#[test]
fn array__is_copied_from_and_to_slices() {
    for mode in MODES {
        run("copied", 2, mode);
    }
}

/// Two threads of each node add to words of all units of one page, each unit at its own address, by the processor's instruction.
fn contended(session: &Session) {
    const ROUNDS: u64 = 60;
    for unit_bytes in [64, 1024, 64 << 10] {
        let region = region(session, PAGE, unit_bytes);
        let units = region.bytes() / unit_bytes;
        let word = |unit: u64| {
            let place = region.place(unit * unit_bytes + unit_bytes - 8);
            region.mapping().double_word(place as usize)
        };
        let add = |number: u16| {
            let mut thread = session.thread(number).unwrap();
            for round in 0..ROUNDS {
                word(round * 7 % units).fetch_add(1, Ordering::SeqCst);
            }
            let parties = NonZeroU32::new(2 * session.nodes()).unwrap();
            thread.barrier(1, parties).unwrap();
            let sum: u64 = (0..units).map(|unit| word(unit).load(Ordering::SeqCst)).sum();
            assert_eq!(sum, ROUNDS * 2 * u64::from(session.nodes()));
            thread.barrier(1, parties).unwrap();
        };
        in_threads(1..3, add);
    }
}

#[test]
fn double_word__at_its_place_is_one_atomic_of_all_nodes() {
    for mode in MODES {
        run("contended", 3, mode);
    }
}

/// All nodes write words of all units between two barriers, in regions with release consistency.
fn released(session: &Session) {
    let mut thread = session.thread(0).unwrap();
    let (own, nodes) = (session.node() as usize, session.nodes() as usize);
    for unit_bytes in [64, 1024, 64 << 10] {
        let options = RegionOptions {
            unit: unit_bytes,
            ..RegionOptions::new(2 * unit_bytes.max(PAGE)).unwrap()
        };
        let region = session
            .region(&options.consistency(Consistency::Release))
            .unwrap();
        let units = region.bytes() / unit_bytes;
        let value = |unit: u64, word: usize, round: u64| unit << 32 | (word as u64) << 16 | round;
        for round in 1..4 {
            for unit in 0..units {
                let words = words(&region, unit);
                for word in (own..words.len()).step_by(nodes) {
                    words.set(word, value(unit, word, round));
                }
            }
            meet(session, &mut thread);
            for unit in 0..units {
                let words = words(&region, unit);
                for word in 0..words.len() {
                    let expected = value(unit, word, round);
                    assert_eq!(
                        words.get(word),
                        expected,
                        "unit {unit} of {unit_bytes}, word {word}"
                    );
                }
            }
            meet(session, &mut thread);
        }
    }
}

#[test]
fn region__of_small_and_large_units_with_release_consistency_has_several_writers_of_each() {
    for mode in MODES {
        run("released", 2, mode);
    }
    run("released", 3, MODES[1]);
}

/// Node 1 writes a unit, and ends. It takes along that unit alone of a page, or its large unit.
fn dies(session: &Session) {
    let mut thread = session.thread(0).unwrap();
    let regions = [64, 64 << 10].map(|unit| {
        let options = RegionOptions {
            unit,
            homes: Placement::Named(vec![(0, 0), (1, 1), (2, 0)]),
            ..RegionOptions::new(3 * unit).unwrap()
        };
        session.region(&options).unwrap()
    });
    for region in &regions {
        let unit = if session.node() == 0 { 0 } else { 1 };
        words(region, unit).set(7, 70 + unit);
    }
    meet(session, &mut thread);
    if session.node() == 1 {
        // Without leaving.
        std::process::exit(0);
    }
    // Ends with the node.
    let parties = NonZeroU32::new(2).unwrap();
    assert_eq!(named(&thread.barrier(1, parties).unwrap_err()), 1);
    for region in &regions {
        let bytes = region.unit_bytes();
        let error = region.acquire(bytes..2 * bytes, Access::Read).unwrap_err();
        assert_eq!(named(&error), 1);
        let address = region.address() + region.place(bytes);
        assert!(
            matches!(error, Error::Lost { address: at, .. } if at == address),
            "{error}"
        );
        let text = format!("the memory at {address:#x} was lost with node 1");
        assert_eq!(error.to_string(), text);
        assert_eq!(words(region, 0).get(7), 70);
        words(region, 2).set(0, 5);
        assert_eq!(words(region, 2).get(0), 5);
        let mut word = [0; 8];
        region.read(2 * bytes, &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), 5);
        assert!(region.read(bytes, &mut word).is_err());
    }
}

#[test]
fn region__loses_with_a_node_the_unit_alone_that_it_had() {
    for mode in MODES {
        run("dies", 2, mode);
    }
}

/// Returns a number of pages that is above that of the mappings a process may have.
fn more_than_mappings() -> u64 {
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    most.trim().parse::<u64>().unwrap() + 1000
}

/// Every second page can be read, and every fourth one written, too; the others are never touched.
fn alternating(session: &Session) {
    let pages = more_than_mappings();
    let region = region(session, pages * PAGE, PAGE);
    let word = |page: u64| region.array::<u64>(page * PAGE, 1);
    let value = |page: u64| if page.is_multiple_of(4) { page + 1 } else { 0 };
    for page in (0..pages).step_by(2) {
        match value(page) {
            0 => assert_eq!(word(page).get(0), 0),
            value => word(page).set(0, value),
        }
    }
    let mappings = std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .count() as u64;
    assert!(mappings < pages / 4, "{mappings} mappings");
    for page in (0..pages).step_by(2) {
        assert_eq!(word(page).get(0), value(page), "page {page}");
    }
}

/// By userfaultfd(2), rights take no mappings.
#[test]
fn region__with_more_ranges_of_rights_than_mappings_of_a_process() {
    const PAGES_MAX: u64 = 300_000;
    let pages = more_than_mappings();
    if pages > PAGES_MAX {
        return skip(format!(
            "vm.max_map_count is above {PAGES_MAX}: the pages would take too much memory"
        ));
    }
    for mode in [FaultMode::Thread, FaultMode::Inline] {
        run("alternating", 1, mode);
    }
}

fn wrong(session: &Session) {
    let small = region(session, PAGE, 256);
    let area = small.address();
    assert_eq!(small.bytes(), PAGE);
    assert_eq!(small.mapping().len() as u64, 16 * PAGE);
    // The program sees the second unit by the second view alone.
    assert_eq!(small.place(256), PAGE + 256);
    for (address, len, bytes) in [
        (area, 256, Some(0..256)),
        (area + PAGE + 256, 8, Some(256..264)),
        (area + 248, 16, None),
        (area + 256, 8, None),
        (area + PAGE, 8, None),
        (area - 1, 1, None),
        (area + 16 * PAGE, 0, None),
        (area + 16 * PAGE - 8, 8, Some(PAGE - 8..PAGE)),
        (u64::MAX, 2, None),
    ] {
        assert_eq!(
            small.bytes_at(address, len),
            bytes,
            "{:#x}",
            address.wrapping_sub(area)
        );
    }
    let array = || small.array::<u64>(248, 2).len();
    let refused = std::panic::catch_unwind(AssertUnwindSafe(array)).unwrap_err();
    let text = refused.downcast_ref::<String>().unwrap();
    assert_eq!(text, "2 numbers at 248 are in several units of 256 bytes");
    let error = session
        .region(&RegionOptions {
            unit: 96,
            ..RegionOptions::new(PAGE).unwrap()
        })
        .unwrap_err();
    let text = "a unit of 96 bytes cannot be had: give a power of two from 64 to 2097152";
    assert_eq!(error.to_string(), text);
}

#[test]
fn region__of_units_that_cannot_be_and_places_of_others() {
    run("wrong", 1, MODES[0]);
}

/// The nodes want units of different sizes.
fn unequal(session: &Session) {
    let options = RegionOptions {
        unit: 64 << session.node(),
        ..RegionOptions::new(PAGE).unwrap()
    };
    let error = session.region(&options).unwrap_err();
    match session.node() {
        0 => assert!(matches!(error, Error::Differs { node: 1, region: 0 }), "{error}"),
        _ => assert!(matches!(error, Error::OtherSettings { region: 0 }), "{error}"),
    }
    meet(session, &mut session.thread(0).unwrap());
}

#[test]
fn region__of_other_units_at_each_node_is_an_error() {
    run("unequal", 2, MODES[0]);
}
