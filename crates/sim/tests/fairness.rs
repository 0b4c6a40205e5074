//! Flows that share a bottleneck whose switch marks packets: DCQCN keeps the queue short and the shares equal.
#![allow(non_snake_case, reason = "tests are named function__case")]

use rdmux_sim::goodput::{Goodput, LinkProperties, Marking, Streams, measure};

/// The link of the DCQCN paper, 40 Gbit/s, with its marking thresholds.
const LINK: LinkProperties = LinkProperties {
    bits_per_second: 40_000_000_000,
    round_trip_ns: 10_000,
    loss_percent: 0.0,
    queue_bytes_max: 8 << 20,
    marking: Some(Marking {
        begin_bytes: 5_000,
        full_bytes: 200_000,
        percent_max: 1.0,
    }),
};
const FLOWS: u8 = 8;
const WINDOW_BYTES: u32 = 512 << 10;

/// Returns Jain's index, the share of the link, and the measurement.
fn flows(link: &LinkProperties, seed: u64) -> (f64, f64, Goodput) {
    let streams = Streams {
        seed,
        senders: FLOWS,
        message_bytes: 64 << 10,
        posted: 32,
        path_mtu: 1024,
        window_bytes: WINDOW_BYTES,
        selective: true,
        timeout: 14,
        warm_up_ns: 20_000_000,
        measured_ns: 100_000_000,
    };
    let goodput = measure(link, &streams);
    let (jain, share) = (goodput.fairness(), goodput.share_of(link, &streams));
    println!("seed {seed}: Jain {jain:.4}, share {share:.3}, {goodput:?}");
    (jain, share, goodput)
}

#[test]
fn marking_bottleneck__eight_flows_share_equally_over_a_short_queue() {
    for seed in 1..=3 {
        let (jain, share, goodput) = flows(&LINK, seed);
        assert!(jain >= 0.95 && share >= 0.85, "{jain}, {share}");
        // At first all flows send at the rate of the link, until the windows are full.
        let (before, after) = (goodput.before, goodput.switched);
        assert!(before.queue_bytes_max <= u64::from(FLOWS) * u64::from(WINDOW_BYTES) * 11 / 10);
        assert!(after.queue_bytes_max <= 400_000, "{after:?}");
        assert_eq!(before.dropped + after.dropped, 0);
    }
}

#[test]
fn bottleneck_without_marks__the_queue_is_as_long_as_the_windows() {
    // Shows the benefit of the marks.
    let unmarked = LinkProperties {
        marking: None,
        ..LINK
    };
    let (_, _, goodput) = flows(&unmarked, 1);
    assert!(goodput.switched.queue_bytes_max > 3_000_000);
}
