//! Latency of short messages beside long ones on a shared send queue, as a table that is compared with `sharing.txt` beside this file.
//! `RDMUX_SHARING_WRITE=1 cargo test --release -p rdmux-sim --test sharing` writes it anew.

#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fmt::Write;

use rdmux_rnic::sched::Quanta;
use rdmux_sim::sharing::{DEVICE, Flow, Flowed, Order, Posting, fairness, share};

const SEED: u64 = 1;
const WARM_UP_NS: u64 = 2_000_000;
const MEASURED_NS: u64 = 200_000_000;

const FIFO: Posting = Posting {
    order: Order::Whole,
    piece_bytes: None,
    window_bytes: None,
};

/// The scheduler with its defaults and the measured window.
fn ours() -> Posting {
    Posting {
        order: Order::Hierarchy(Quanta::default()),
        ..FIFO
    }
}

fn fixed(order: Order, piece_kib: u32, window_kib: u32) -> Posting {
    Posting {
        order,
        piece_bytes: Some(piece_kib << 10),
        window_bytes: Some(window_kib << 10),
    }
}

fn sparse(sparse_kib: u32) -> Order {
    Order::Hierarchy(Quanta {
        sparse_bytes: sparse_kib << 10,
        ..Quanta::default()
    })
}

const fn bulk(message_bytes: u32, outstanding: u32) -> Flow {
    Flow {
        message_bytes,
        per_second: None,
        outstanding,
        strict: false,
        qp: 0,
    }
}

#[derive(Clone, Copy)]
struct Mice {
    bytes: u32,
    per_second: u32,
    strict: bool,
}

const MICE_16: Mice = Mice {
    bytes: 16 << 10,
    per_second: 20_000,
    strict: false,
};
const MICE_49: Mice = Mice {
    bytes: 49_000,
    per_second: 10_000,
    strict: false,
};

fn strict(mice: Mice) -> Mice {
    Mice { strict: true, ..mice }
}

/// Result of a connection with short messages beside some with long ones.
struct Outcome {
    p50_us: f64,
    p99_us: f64,
    gbps: f64,
    jain: f64,
}

fn measure(posting: &Posting, elephants: usize, elephant_bytes: u32, mice: Mice) -> Outcome {
    measure_with(SEED, posting, elephants, elephant_bytes, mice)
}

fn measure_with(seed: u64, posting: &Posting, elephants: usize, elephant_bytes: u32, mice: Mice) -> Outcome {
    let mut flows = vec![Flow {
        message_bytes: mice.bytes,
        per_second: Some(mice.per_second),
        outstanding: 0,
        strict: mice.strict,
        qp: 0,
    }];
    flows.resize(1 + elephants, bulk(elephant_bytes, 1));
    let flowed = share(&DEVICE, posting, &flows, seed, WARM_UP_NS, MEASURED_NS);
    Outcome {
        p50_us: flowed[0].percentile_us(50),
        p99_us: flowed[0].percentile_us(99),
        gbps: flowed.iter().map(|flow| flow.gbps(MEASURED_NS)).sum(),
        jain: fairness(&flowed[1..]),
    }
}

const MIB: u32 = 1 << 20;

fn table() -> String {
    let mut text = String::from(
        "Latency of short messages on a shared send queue, p50 / p99 in us, and all bytes in Gbit/s, beside 1, 4 and 7 connections with one\n\
         message of 1 MiB outstanding each. 100 Gbit/s, completion after 4 us, 150 ns for each piece. KiB of a piece / of the window.\n\n",
    );
    let rows: [(&str, Posting); 13] = [
        ("FIFO, whole messages", FIFO),
        ("FIFO 16/64", fixed(Order::Fifo, 16, 64)),
        ("round robin 16/64", fixed(Order::RoundRobin, 16, 64)),
        ("round robin 16/128", fixed(Order::RoundRobin, 16, 128)),
        ("DRR 16/64, no advance", fixed(sparse(0), 16, 64)),
        ("DRR 16/64, advance 16", fixed(sparse(16), 16, 64)),
        ("ours 16/32", fixed(sparse(64), 16, 32)),
        ("ours 16/64", fixed(sparse(64), 16, 64)),
        ("ours 16/80", fixed(sparse(64), 16, 80)),
        ("ours 16/128", fixed(sparse(64), 16, 128)),
        ("ours 16/256", fixed(sparse(64), 16, 256)),
        ("ours 64/128", fixed(sparse(64), 64, 128)),
        ("ours", ours()),
    ];
    for (name, mice) in [
        ("16 KiB, 20,000 a second, same class", MICE_16),
        ("16 KiB, 20,000 a second, strict class", strict(MICE_16)),
        ("49 KB, 10,000 a second, same class", MICE_49),
        ("49 KB, 10,000 a second, strict class", strict(MICE_49)),
    ] {
        let _ = writeln!(text, "{name}");
        for (row, posting) in &rows {
            if mice.strict && !matches!(posting.order, Order::Hierarchy(_)) {
                continue;
            }
            let _ = write!(text, "  {row:<22}");
            for elephants in [1, 4, 7] {
                let Outcome {
                    p50_us, p99_us, gbps, ..
                } = measure(posting, elephants, MIB, mice);
                let _ = write!(text, "{p50_us:>9.1} / {p99_us:>7.1} {gbps:>6.1}");
            }
            text.push('\n');
        }
    }
    text
}

#[test]
fn share__by_order_piece_and_window() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sharing.txt");
    let table = table();
    println!("{table}");
    if std::env::var_os("RDMUX_SHARING_WRITE").is_some() {
        std::fs::write(path, &table).expect("sharing.txt is written");
    }
    let expected = std::fs::read_to_string(path).expect("sharing.txt is there");
    assert_eq!(
        table, expected,
        "the table has changed; see the first lines of this file"
    );
}

/// Asserts how many times lower the latency is than with whole messages first in, first out.
#[track_caller]
fn assert_lower(elephants: usize, elephant_bytes: u32, mice: Mice, p50: f64, p99: f64) {
    for seed in 1..=3 {
        let measure = |posting: &Posting| measure_with(seed, posting, elephants, elephant_bytes, mice);
        let (fifo, ours) = (measure(&FIFO), measure(&ours()));
        let (lower_p50, lower_p99) = (fifo.p50_us / ours.p50_us, fifo.p99_us / ours.p99_us);
        println!(
            "seed {seed}, {elephants} x {elephant_bytes} bytes, mice of {} bytes, strict {}: p50 {:.1} -> {:.1} us, {lower_p50:.1} times \
             lower; p99 {:.1} -> {:.1} us, {lower_p99:.1} times lower; {:.1} -> {:.1} Gbit/s; Jain {:.4}",
            mice.bytes,
            mice.strict,
            fifo.p50_us,
            ours.p50_us,
            fifo.p99_us,
            ours.p99_us,
            fifo.gbps,
            ours.gbps,
            ours.jain
        );
        assert!(lower_p50 >= p50 && lower_p99 >= p99, "{lower_p50} {lower_p99}");
        // First in, first out, short messages fill the time in which a single long one waits for its completion.
        let least = if elephants == 1 { 0.97 } else { 0.99 };
        assert!(ours.gbps >= least * fifo.gbps && ours.jain >= 0.99);
    }
}

#[test]
fn share__short_messages_beside_seven_elephants() {
    assert_lower(7, MIB, MICE_16, 20.0, 20.0);
    assert_lower(7, MIB, strict(MICE_16), 20.0, 20.0);
    assert_lower(7, MIB, MICE_49, 20.0, 8.0);
    assert_lower(7, MIB, strict(MICE_49), 20.0, 20.0);
    assert_lower(7, 16 * MIB, MICE_16, 20.0, 20.0);
}

#[test]
fn share__short_messages_beside_fewer_elephants() {
    assert_lower(4, MIB, MICE_16, 10.0, 10.0);
    assert_lower(1, MIB, MICE_16, 4.0, 4.0);
    assert_lower(1, MIB, strict(MICE_16), 4.0, 4.0);
}

/// QPs to different peers share the device as the scheduler decides, because the window of the device is full before theirs are.
#[test]
fn share__short_messages_beside_other_queue_pairs() {
    for qps in [1, 2, 4, 7] {
        let mut flows = vec![Flow {
            message_bytes: MICE_16.bytes,
            per_second: Some(MICE_16.per_second),
            outstanding: 0,
            strict: false,
            qp: 0,
        }];
        flows.extend((0..7).map(|at| Flow {
            qp: 1 + at % qps,
            ..bulk(MIB, 1)
        }));
        let flowed = share(&DEVICE, &ours(), &flows, SEED, WARM_UP_NS, MEASURED_NS);
        let (p50_us, p99_us) = (flowed[0].percentile_us(50), flowed[0].percentile_us(99));
        let gbps: f64 = flowed.iter().map(|flow| flow.gbps(MEASURED_NS)).sum();
        let jain = fairness(&flowed[1..]);
        println!("{qps} other QPs: p50 {p50_us:.1} us, p99 {p99_us:.1} us, {gbps:.1} Gbit/s, Jain {jain:.4}");
        assert!(p50_us <= 10.0 && p99_us <= 20.0 && gbps >= 99.0 && jain >= 0.999);
    }
}

/// Finding 1: the window decides, by these two formulas.
#[test]
fn share__rate_and_latency_follow_from_the_window() {
    let round_trip_ns = (DEVICE.completion_ns + DEVICE.post_ns) as f64;
    for piece_kib in [4, 16] {
        for window_kib in [32, 48, 64, 80, 128, 256] {
            let outcome = measure(&fixed(sparse(64), piece_kib, window_kib), 7, MIB, strict(MICE_16));
            let window = f64::from(window_kib << 10);
            let piece_ns = f64::from(piece_kib << 10) / 12.5;
            let gbps = 8.0 * (window / (round_trip_ns + piece_ns)).min(12.5);
            let p50_us = (4000.0 + 16384.0 / 12.5 + (window / 12.5 - round_trip_ns).max(0.0)) / 1000.0;
            println!(
                "{piece_kib}/{window_kib}: {:.1} of {gbps:.1} Gbit/s, {:.1} of {p50_us:.1} us",
                outcome.gbps, outcome.p50_us
            );
            assert!((outcome.gbps / gbps - 1.0).abs() < 0.04);
            // A short message of several pieces waits for a window that is shorter than the path.
            assert!(window < 12.5 * round_trip_ns + 16384.0 || (outcome.p50_us - p50_us).abs() <= 0.5);
        }
    }
}

/// Finding 3: without an advance, deficit round robin is no better for short messages than round robin by small pieces.
#[test]
fn share__deficit_round_robin_needs_the_advance() {
    let p50 = |order| measure(&fixed(order, 16, 64), 7, MIB, MICE_16).p50_us;
    let (round_robin, without, with) = (p50(Order::RoundRobin), p50(sparse(0)), p50(sparse(64)));
    assert!(
        without >= 0.95 * round_robin && with < 0.5 * round_robin,
        "{round_robin} {without} {with}"
    );
}

/// Finding 4: the advance covers a whole message, and is not the length of a piece.
#[test]
fn share__the_advance_covers_a_message() {
    let p50 = |sparse_kib| measure(&fixed(sparse(sparse_kib), 16, 128), 7, MIB, MICE_49).p50_us;
    let (piece, message) = (p50(16), p50(64));
    assert!(message < 0.6 * piece, "{message} {piece}");
}

/// Finding 5: a piece for each gives shares by the length of messages, a deficit equal ones.
#[test]
fn share__equal_bytes_whatever_the_messages() {
    let mut flows = vec![bulk(2 << 10, 256); 4];
    flows.resize(7, bulk(MIB, 4));
    let run =
        |posting: &Posting| -> Vec<Flowed> { share(&DEVICE, posting, &flows, SEED, WARM_UP_NS, MEASURED_NS) };
    for posting in [fixed(sparse(64), 16, 128), ours()] {
        let flowed = run(&posting);
        let rates: Vec<f64> = flowed.iter().map(|flow| flow.gbps(MEASURED_NS)).collect();
        println!("{rates:.1?}, Jain {:.5}", fairness(&flowed));
        assert!(fairness(&flowed) >= 0.99 && rates.iter().sum::<f64>() > 90.0);
    }
    let round_robin = run(&fixed(Order::RoundRobin, 16, 128));
    println!("round robin: Jain {:.2}", fairness(&round_robin));
    assert!(fairness(&round_robin) < 0.6);
    assert!(fairness(&run(&FIFO)) < 0.6);
}
