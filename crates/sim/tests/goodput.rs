//! Goodput under the virtual clock, as a table that is compared with `goodput.txt` beside this file.
//! `RDMUX_GOODPUT_WRITE=1 cargo test --release -p rdmux-sim --test goodput` writes it anew.

#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fmt::Write;

use rdmux_sim::goodput::{Goodput, LinkProperties, Streams, measure};

const LOSSES_PERCENT: [f64; 4] = [0.0, 0.1, 1.0, 5.0];
const ROUND_TRIPS_NS: [u64; 3] = [10_000, 100_000, 1_000_000];
const MESSAGES: [(u32, &str); 2] = [(4 << 10, "4 KiB"), (1 << 20, "1 MiB")];

fn link(loss_percent: f64, round_trip_ns: u64) -> LinkProperties {
    LinkProperties {
        bits_per_second: 10_000_000_000,
        round_trip_ns,
        loss_percent,
        queue_bytes_max: 1 << 20,
        marking: None,
    }
}

/// Returns the settings for one sender, with time enough for many losses.
fn stream(loss_percent: f64, message_bytes: u32, selective: bool) -> Streams {
    Streams {
        seed: 1,
        senders: 1,
        message_bytes,
        // Twice what a round trip of 1 ms holds, and half of it in flight at most.
        posted: ((4 << 20) / message_bytes).max(4),
        path_mtu: 1024,
        window_bytes: 2 << 20,
        selective,
        timeout: 14,
        warm_up_ns: 5_000_000,
        measured_ns: if loss_percent == 0.0 {
            20_000_000
        } else {
            100_000_000
        },
    }
}

fn measured(loss_percent: f64, round_trip_ns: u64, message_bytes: u32, selective: bool) -> (Goodput, f64) {
    let (link, streams) = (
        link(loss_percent, round_trip_ns),
        stream(loss_percent, message_bytes, selective),
    );
    let goodput = measure(&link, &streams);
    let share = goodput.share_of(&link, &streams);
    (goodput, share)
}

fn table() -> String {
    let mut text = String::from(
        "Payload of WRITEs that complete, as a share of a link of 10 Gbit/s; path MTU 1024, 4 MiB posted, timeout 14.\n\
         Headers leave 0.926.\n\n\
         resent     message  round trip    loss 0 %     0.1 %       1 %       5 %\n",
    );
    for (selective, resent) in [(true, "selective"), (false, "go back N")] {
        for (message_bytes, name) in MESSAGES {
            for round_trip_ns in ROUND_TRIPS_NS {
                let _ = write!(text, "{resent}  {name}    {:>7} us", round_trip_ns / 1000);
                let mut without_loss = 0.0;
                for loss_percent in LOSSES_PERCENT {
                    let (_, share) = measured(loss_percent, round_trip_ns, message_bytes, selective);
                    let _ = write!(text, "{share:>10.3}");
                    if loss_percent == 0.0 {
                        without_loss = share;
                    }
                    if selective && loss_percent <= 1.0 {
                        assert!(
                            share >= 0.9 * without_loss,
                            "{text} is less than 0.9 of {without_loss}"
                        );
                    }
                }
                text.push('\n');
            }
        }
    }
    text
}

#[test]
fn goodput__by_loss_round_trip_and_message() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/goodput.txt");
    let table = table();
    println!("{table}");
    if std::env::var_os("RDMUX_GOODPUT_WRITE").is_some() {
        std::fs::write(path, &table).expect("goodput.txt is written");
    }
    let expected = std::fs::read_to_string(path).expect("goodput.txt is there");
    assert_eq!(
        table, expected,
        "the table has changed; see the first lines of this file"
    );
}
