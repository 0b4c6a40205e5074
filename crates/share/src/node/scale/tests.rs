//! Many nodes: fairness, limits, and the table of docs/node.md.

use super::*;

fn settings(nodes: u32, queue_pairs_max: usize) -> Settings {
    Settings {
        nodes,
        applications: 8,
        classes: 2,
        queue_pairs_max,
        virtual_ns: 50_000_000,
        seed: 1,
    }
}

#[test]
fn run__applications_share_their_links() {
    let report = run(&settings(30, 4096));
    println!("{report:?}");
    assert!(report.used > 0.95 && report.fairness.1 > 0.95, "{report:?}");
    // One for each peer and class, in both directions.
    assert!(report.queue_pairs.1 <= 2 * 29, "{report:?}");
}

#[test]
fn run__a_limit_below_the_working_set_holds() {
    let report = run(&settings(30, 24));
    println!("{report:?}");
    assert!(
        report.queue_pairs.1 <= 24 && report.closed_per_second > 0.0,
        "{report:?}"
    );
    assert_eq!(report.messages, run(&settings(30, 24)).messages);
}

/// Prints the table of docs/node.md: `RDMUX_SCALE_NODES=1000 cargo test --release -p rdmux-share --lib scale -- --nocapture`.
#[test]
fn run__table() {
    let nodes = std::env::var("RDMUX_SCALE_NODES").map_or(20, |nodes| nodes.parse().unwrap());
    println!(
        "| limit | queue pairs, mean / most | opened a second | buffers, MiB | messages | waited, p99 us | used | fairness, mean / least |"
    );
    for queue_pairs_max in [64, 128, 256, 4096] {
        let began = Instant::now();
        let report = run(&settings(nodes, queue_pairs_max));
        println!(
            "| {queue_pairs_max} | {:.0} / {} | {:.0} | {:.1} | {} | {:.1} %, {:.0} | {:.1} % | {:.3} / {:.3} | {:?}",
            report.queue_pairs.0,
            report.queue_pairs.1,
            report.opened_per_second,
            report.buffer_bytes / f64::from(1 << 20),
            report.messages,
            100.0 * report.waited,
            report.wait_p99_us,
            100.0 * report.used,
            report.fairness.0,
            report.fairness.1,
            began.elapsed()
        );
    }
}
