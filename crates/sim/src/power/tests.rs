//! Tests of everything that a cut may leave.

use std::collections::BTreeSet;
use std::sync::Arc;

use rdmux_rnic::{Memory, Placement};

use super::{Domain, Inbound, LINE, Platform, Shadow, UNIT};

const ADR_DIRECT: Platform = Platform {
    inbound: Inbound::Queue,
    ..Platform::ADR_CACHED
};
const ADR_STORES: Platform = Platform {
    inbound: Inbound::Stores,
    ..Platform::ADR_CACHED
};
const BATTERY: Platform = Platform {
    domain: Domain::WholeSystem,
    ..Platform::ADR_CACHED
};

fn shadow(platform: Platform, lines: usize) -> Arc<Shadow> {
    Arc::new(Shadow::new(platform, None, vec![0; lines * LINE], (true, false)))
}

fn left(shadow: &Shadow, tears: bool) -> BTreeSet<Vec<u8>> {
    let all = shadow.all_left(tears, 100_000);
    all.expect("not too many").into_iter().collect()
}

#[test]
fn all_left__six_lines_in_the_cache_are_there_in_every_combination() {
    let shadow = shadow(Platform::ADR_CACHED, 6);
    let lane = shadow.lane();
    lane.write(0, &[1; 6 * LINE]).unwrap();
    shadow.drain();
    let all = left(&shadow, false);
    assert_eq!(all.len(), 64);
    for bytes in all {
        let whole = |line: &[u8]| line.iter().all(|byte| *byte == line[0]);
        assert!(bytes.chunks(LINE).all(whole), "lines are whole");
    }
}

#[test]
fn all_left__a_line_is_torn_in_units_of_8() {
    let shadow = shadow(Platform::ADR_CACHED, 1);
    let lane = shadow.lane();
    lane.write(0, &[1; LINE]).unwrap();
    shadow.drain();
    let all = left(&shadow, true);
    assert_eq!(all.len(), 256);
    for bytes in all {
        let whole = |unit: &[u8]| unit.iter().all(|byte| *byte == unit[0]);
        assert!(bytes.chunks(UNIT).all(whole), "units are whole");
    }
}

#[test]
fn all_left__a_later_version_of_a_line_is_not_there_without_the_earlier() {
    let shadow = shadow(Platform::ADR_CACHED, 1);
    let lane = shadow.lane();
    lane.write(0, &[1; 2 * UNIT]).unwrap();
    lane.write(8, &[2; 2 * UNIT]).unwrap();
    shadow.drain();
    let all = left(&shadow, true);
    // Any units of the first version; with all of the first, any units of the second.
    assert_eq!(all.len(), 4 + 4 - 1);
    for bytes in all {
        let second = bytes[8..24].contains(&2);
        assert!(!second || bytes[0] == 1, "{:?}", &bytes[..24]);
    }
}

#[test]
fn all_left__a_buffer_drains_in_order() {
    let shadow = shadow(ADR_DIRECT, 3);
    let lane = shadow.lane();
    lane.write(0, &[1; 3 * LINE]).unwrap();
    // Lines that have left the buffer are in the write pending queue, which survives.
    let all = left(&shadow, false);
    let lines = |bytes: &Vec<u8>| [0, 1, 2].map(|line| bytes[line * LINE]);
    let seen: BTreeSet<[u8; 3]> = all.iter().map(lines).collect();
    assert_eq!(
        seen,
        [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]].into_iter().collect()
    );
}

#[test]
fn all_left__stores_are_in_any_order_until_a_fence() {
    let shadow = shadow(ADR_STORES, 3);
    let lane = shadow.lane();
    lane.write(0, &[1; 3 * LINE]).unwrap();
    assert_eq!(left(&shadow, false).len(), 8);
    lane.read(0, &mut [0; 8]).unwrap();
    assert_eq!(left(&shadow, true).len(), 1, "a READ has a fence in front");
}

#[test]
fn all_left__after_a_flush_there_is_one_possibility() {
    for (platform, placement) in [
        (Platform::ADR_CACHED, Placement::PERSISTENT),
        (ADR_DIRECT, Placement::GLOBAL),
        (ADR_STORES, Placement::GLOBAL),
    ] {
        let shadow = shadow(platform, 2);
        let lane = shadow.lane();
        lane.write(10, &[1; 100]).unwrap();
        lane.flush(10, 100, placement).unwrap();
        let all = left(&shadow, true);
        assert_eq!(all.len(), 1, "{platform:?}");
        assert_eq!(all.first().unwrap()[10..110], [1; 100]);
    }
}

#[test]
fn all_left__a_battery_keeps_what_the_host_accepted() {
    let shadow = shadow(BATTERY, 2);
    let lane = shadow.lane();
    lane.write(0, &[1; 100]).unwrap();
    assert_eq!(left(&shadow, true).len(), 1);
}

#[test]
fn all_left__what_was_acknowledged_early_is_in_the_rnic() {
    let early = Platform {
        acks_early: true,
        ..BATTERY
    };
    let shadow = shadow(early, 2);
    let lane = shadow.lane();
    lane.write(0, &[1; 100]).unwrap();
    let all = left(&shadow, true);
    assert_eq!(all, BTreeSet::from([vec![0; 2 * LINE]]));
    lane.read(0, &mut [0; 8]).unwrap();
    assert_eq!(left(&shadow, true).first().unwrap()[..100], [1; 100]);
}

#[test]
fn completed__drains_what_was_written_before_the_message() {
    let shadow = shadow(Platform::ADR_CACHED, 3);
    let lane = shadow.lane();
    let mailbox = lane.mailbox(2, 8);
    lane.write(0, &[1; 8]).unwrap();
    mailbox.write(8, &[9; 8]).unwrap();
    lane.write(64, &[2; 8]).unwrap();
    lane.completed(1);
    assert_eq!(shadow.visible()[0], 1, "before the message");
    assert_eq!(shadow.visible()[64], 0, "behind it");
    assert!(lane.waits());
    // A second notification of the same message drains nothing more.
    lane.completed(1);
    assert_eq!(shadow.visible()[64], 0);
}
