//! Power cuts, flushes and revocations one by one, with every step tried.
#![allow(non_snake_case, reason = "tests are named function__case")]

use rdmux_rnic::{Placement, QpState, Status};
use rdmux_sim::power::{Ask, Bed, BedSettings, Done, Ended, Ledger, MappedConnection, Platform};

const MILLISECOND_NS: u64 = 1_000_000;

fn bed(seed: u64, platform: Platform) -> Bed {
    with_faults(seed, platform, [0.0; 3])
}

fn with_faults(seed: u64, platform: Platform, [loss, dup, reorder]: [f64; 3]) -> Bed {
    let settings = BedSettings {
        seed,
        platform,
        defect: None,
        loss_percent: loss,
        dup_percent: dup,
        reorder_percent: reorder,
    };
    Bed::new(&settings, vec![0; 4096])
}

fn write(at: u64, value: u8, len: usize) -> Ask {
    Ask::Write {
        at,
        bytes: vec![value; len],
    }
}

fn flush(at: u64, len: u64) -> Ask {
    Ask::Flush {
        at,
        len,
        placement: Placement::PERSISTENT,
        whole: false,
    }
}

/// Steps until all of these operations have ended.
fn until_done(bed: &mut Bed, operations: &[u64]) -> Vec<Done> {
    let mut all = Vec::new();
    while all.len() < operations.len() {
        assert!(bed.step().unwrap(), "something is left to happen");
        while let Some(done) = bed.poll() {
            assert!(operations.contains(&done.operation), "{done:?}");
            all.push(done);
        }
    }
    all.sort_by_key(|done| done.operation);
    all
}

fn ask_all(bed: &mut Bed, link: MappedConnection, asks: &[Ask]) -> Vec<u64> {
    let asked = asks.iter().map(|ask| bed.ask(link, ask).expect("there is room"));
    asked.collect()
}

fn ended(done: &[Done]) -> Vec<Ended> {
    done.iter().map(|done| done.ended).collect()
}

/// Posts two WRITEs over the same lines with flushes behind them: whenever power is cut and whichever of six lines survive, the server has
/// everything that it answered.
#[test]
fn cut__every_one_at_every_step() {
    let mut looked_at = 0;
    for seed in 0..150 {
        let platform = Platform::ALL[1 + seed as usize % (Platform::ALL.len() - 1)];
        let mut bed = with_faults(seed, platform, [5.0, 2.0, 2.0]);
        let range = 32..512;
        let link = bed.map(range.clone());
        let mut ledger: Ledger = bed.ledger(range.clone());
        let (first, second) = (write(40, 1, 150), write(100, 2, 220));
        let mtu = bed.mtu();
        let asked = ask_all(
            &mut bed,
            link,
            &[first.clone(), flush(40, 150), second.clone(), flush(100, 220)],
        );
        for (write, flush) in [(0, 1), (2, 3)] {
            let Ask::Write { at, bytes } = [&first, &second][write / 2] else {
                unreachable!()
            };
            ledger.posted_write(asked[write], *at, bytes, mtu);
            ledger.posted_flush(asked[flush], *at..*at + bytes.len() as u64, true);
        }
        let mut answered = 0;
        while answered < asked.len() {
            assert!(bed.step().unwrap());
            while let Some(done) = bed.poll() {
                assert_eq!(done.ended, Ended::Done, "seed {seed}");
                ledger.flushed(done.operation);
                answered += 1;
            }
            // Tear lines as well when that does not make too many cases.
            let shadow = bed.shadow();
            let all = shadow
                .all_left(true, 300)
                .or_else(|| shadow.all_left(false, 100_000));
            for left in all.expect("six lines and two versions of each") {
                let found = &left[range.start as usize..range.end as usize];
                let after = ledger.clone().recover(found);
                after.unwrap_or_else(|what| panic!("seed {seed}, {platform:?}: {what}"));
                looked_at += 1;
            }
        }
    }
    println!("{looked_at} memories");
    assert!(looked_at > 10_000, "{looked_at}");
}

#[test]
fn flush__answer_lost_is_answered_again_without_a_second_flush() {
    for seed in 0..20 {
        let mut bed = bed(seed, Platform::ADR_CACHED);
        let link = bed.map(0..1024);
        bed.lose_answers(20 * MILLISECOND_NS);
        let asked = ask_all(&mut bed, link, &[write(0, 7, 200), flush(0, 200)]);
        let done = until_done(&mut bed, &asked);
        assert_eq!(ended(&done), [Ended::Done, Ended::Done], "seed {seed}");
        assert!(bed.duplicates() > 0, "seed {seed}: it was asked for again");
        assert_eq!(bed.shadow().passed().flushes, 1, "seed {seed}");
        bed.cut();
        assert_eq!(bed.shadow().visible()[..200], [7; 200], "seed {seed}");
    }
}

#[test]
fn write__that_comes_again_is_not_placed_again() {
    let (mut duplicates, mut seen) = (0, 0);
    for seed in 0..100 {
        let mut bed = with_faults(seed, Platform::ADR_CACHED, [10.0, 30.0, 10.0]);
        let link = bed.map(0..1024);
        let mut bytes = 0;
        for value in 1..6 {
            let asked = ask_all(&mut bed, link, &[write(0, value, 1000), flush(0, 1000)]);
            bytes += 1000;
            until_done(&mut bed, &asked);
            assert_eq!(bed.shadow().passed().placed_bytes, bytes, "seed {seed}");
        }
        // The late copies arrive.
        while bed.step().unwrap() {}
        seen += bed.steps();
        duplicates += bed.duplicates();
        assert_eq!(bed.shadow().passed().placed_bytes, bytes, "seed {seed}");
        bed.cut();
        assert_eq!(bed.shadow().visible()[..1000], [5; 1000], "seed {seed}");
    }
    assert!(duplicates > 100, "{duplicates} duplicates in {seen} steps");
}

#[test]
fn flush__of_the_whole_region_covers_all_of_it_and_no_more() {
    for seed in 0..20 {
        let mut bed = bed(seed, Platform::ADR_CACHED);
        let (link, other) = (bed.map(128..1024), bed.map(2048..4096));
        let before = ask_all(&mut bed, other, &[write(2048, 9, 64)]);
        until_done(&mut bed, &before);
        let whole = Ask::Flush {
            at: 128,
            len: 0,
            placement: Placement::PERSISTENT,
            whole: true,
        };
        let asked = ask_all(
            &mut bed,
            link,
            &[write(128, 1, 8), write(1000, 2, 24), whole.clone()],
        );
        until_done(&mut bed, &asked);
        let all = bed.shadow().all_left(false, 1000).unwrap();
        let unflushed = all.iter().filter(|left| left[2048] != 9).count();
        // A single possible outcome means that the cache had evicted the line.
        assert!(
            unflushed > 0 || all.len() == 1,
            "seed {seed}: the other mapping was flushed"
        );
        for left in all {
            assert_eq!((left[128], left[1023]), (1, 2), "seed {seed}");
        }
    }
}

#[test]
fn flush__across_the_end_of_a_mapping_ends_the_connection_and_flushes_nothing() {
    for (at, len) in [(1000, 25), (1024, 8), (1020, 1 << 31), (64, 8)] {
        let mut bed = bed(1, Platform::ADR_CACHED);
        let link = bed.map(128..1024);
        let asked = ask_all(&mut bed, link, &[flush(at, len)]);
        let done = until_done(&mut bed, &asked);
        assert_eq!(ended(&done), [Ended::Failed(Status::RemoteAccess)], "{at}+{len}");
        assert_eq!(bed.shadow().passed().flushes, 0, "{at}+{len}");
        assert_eq!(bed.server_state(link), Some(QpState::Error), "{at}+{len}");
        assert!(!bed.is_up(link));
    }
}

/// Ends the mapping at every moment of a WRITE and its flush. An answer that comes nevertheless is true.
#[test]
fn revoke__while_a_flush_is_under_way() {
    let (mut done, mut failed) = (0, 0);
    for seed in 0..12 {
        for steps in 0..40 {
            let mut bed = bed(seed, Platform::ADR_CACHED);
            let link = bed.map(0..1024);
            let asked = ask_all(&mut bed, link, &[write(0, 3, 300), flush(0, 300)]);
            let mut all = Vec::new();
            for step in 0.. {
                if step == steps {
                    bed.revoke(link);
                    assert!(!bed.is_draining(link), "nothing comes after the revocation");
                }
                let moved = bed.step().unwrap();
                while let Some(done) = bed.poll() {
                    all.push(done);
                }
                if !moved && step >= steps {
                    break;
                }
            }
            assert_eq!(all.len(), asked.len(), "seed {seed}: all is answered");
            let flushed = all.iter().find(|done| done.operation == asked[1]).unwrap();
            bed.cut();
            if flushed.ended == Ended::Done {
                done += 1;
                assert_eq!(
                    bed.shadow().visible()[..300],
                    [3; 300],
                    "seed {seed}, {steps} steps"
                );
            } else {
                failed += 1;
            }
        }
    }
    assert!(done > 0 && failed > 0, "{done} done, {failed} failed");
}

#[test]
fn revoke__what_comes_late_changes_nothing_and_ends_the_connection() {
    let mut told = 0;
    for seed in 0..20 {
        let mut bed = with_faults(seed, Platform::ADR_CACHED, [5.0, 5.0, 5.0]);
        let link = bed.map(0..1024);
        let first = ask_all(&mut bed, link, &[write(0, 1, 500)]);
        until_done(&mut bed, &first);
        bed.revoke(link);
        let visible = bed.shadow().visible();
        assert_eq!(visible[..500], [1; 500], "what was accepted is there");
        let late = ask_all(&mut bed, link, &[write(0, 2, 500), write(600, 2, 8)]);
        let ends = ended(&until_done(&mut bed, &late));
        // The NAK is sent once and may be lost: a queue pair in error sends no other.
        let refused = ends[0] == Ended::Failed(Status::RemoteAccess);
        told += u32::from(refused);
        assert!(
            refused || ends[0] == Ended::Failed(Status::RetryExceeded),
            "seed {seed}: {ends:?}"
        );
        assert_eq!(ends[1], Ended::Failed(Status::Flushed), "seed {seed}");
        assert_eq!(bed.server_state(link), Some(QpState::Error), "seed {seed}");
        assert_eq!(bed.shadow().visible(), visible, "seed {seed}");
    }
    assert!(told >= 15, "{told} of 20 were told why");
}

#[test]
fn flush__persistent_is_refused_where_nothing_persists() {
    let none: Platform = "none".parse().unwrap();
    let mut bed = bed(1, none);
    let link = bed.map(0..1024);
    let message = Ask::SoftwareFlush { at: 0, len: 8 };
    let asked = ask_all(&mut bed, link, &[write(0, 1, 8), message, write(0, 2, 8)]);
    let done = until_done(&mut bed, &asked);
    assert_eq!(
        ended(&done),
        [Ended::Done, Ended::Refused, Ended::Done],
        "and it goes on"
    );
    let asked = ask_all(&mut bed, link, &[flush(0, 8)]);
    let done = until_done(&mut bed, &asked);
    assert_eq!(ended(&done), [Ended::Failed(Status::RemoteAccess)]);
    assert_eq!(bed.shadow().passed().flushes, 0);
}

#[test]
fn cut__packets_of_before_do_nothing_afterwards() {
    for seed in 0..20 {
        let mut bed = with_faults(seed, Platform::ADR_CACHED, [0.0, 10.0, 10.0]);
        let old = bed.map(0..1024);
        ask_all(&mut bed, old, &[write(0, 1, 1000), write(0, 2, 1000)]);
        bed.cut();
        let new = bed.map(0..1024);
        let asked = ask_all(&mut bed, new, &[write(0, 3, 1000), flush(0, 1000)]);
        until_done(&mut bed, &asked);
        while bed.step().unwrap() {}
        bed.drain();
        assert!(bed.strangers() > 0, "seed {seed}: old packets came");
        assert_eq!(bed.shadow().visible()[..1000], [3; 1000], "seed {seed}");
    }
}

#[test]
fn kill__a_file_keeps_what_its_server_had_acknowledged() {
    let file: Platform = "file".parse().unwrap();
    let mut bed = bed(3, file);
    let link = bed.map(0..1024);
    let asked = ask_all(&mut bed, link, &[write(0, 1, 1000)]);
    until_done(&mut bed, &asked);
    bed.kill();
    assert_eq!(bed.shadow().visible()[..1000], [1; 1000]);
}
