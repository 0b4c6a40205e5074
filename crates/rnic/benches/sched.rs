//! Cost of a turn of the schedulers: `cargo bench -p rdmux-rnic --bench sched`. Medians in ns of picking and ending a turn, by the number of
//! connections with something to send, which come in random order, as their state lies in memory.

use std::hint::black_box;
use std::io::{Write, stdout};
use std::num::NonZeroU16;
use std::time::Instant;

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_rnic::Time;
use rdmux_rnic::sched::{CLASSES, Entitlement, Hierarchy, Policy, Quanta, Scheduler};

const ROUNDS: usize = 101;
const TURNS: u32 = 10_000;
const ACTIVE: [usize; 3] = [16, 1024, 10_000];

/// Returns the median time of a turn in ns.
fn time(mut turn: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begin = Instant::now();
            (0..TURNS).for_each(|_| turn());
            begin.elapsed().as_nanos() as f64 / f64::from(TURNS)
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    times[ROUNDS / 2]
}

/// The device's scheduler.
fn senders(active: usize) -> f64 {
    let mut scheduler = Scheduler::new([Policy::default(); CLASSES]);
    (0..active).for_each(|id| scheduler.push(0, id as u32));
    time(|| {
        let quantum = scheduler.pick().expect("a sender");
        let sent = black_box(quantum.bytes as usize);
        scheduler.end(quantum, sent, true);
    })
}

/// Tenants with and without rates, connections of which send pieces of `piece_bytes`. With `sparse`, a connection has nothing more to send
/// after each piece, and another one has.
fn hierarchy(active: usize, tenants: usize, rate_bps: u64, piece_bytes: u32, sparse: bool) -> f64 {
    let mut hierarchy = Hierarchy::new(Quanta::default());
    let mut now = Time(1_000_000_000);
    let mut groups = Vec::new();
    for _ in 0..tenants {
        let tenant = hierarchy.add_tenant(&Entitlement {
            weight: NonZeroU16::MIN,
            rate_bps,
            ceiling_bps: (rate_bps > 0).then_some(1_000_000_000_000),
            ..Entitlement::default()
        });
        groups.extend(hierarchy.add_group(tenant, 0));
    }
    let mut connections: Vec<_> = (0..active)
        .filter_map(|at| hierarchy.add_connection(groups[at % groups.len()], at as u32))
        .collect();
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    for at in (1..connections.len()).rev() {
        connections.swap(at, rng.next_u32() as usize % (at + 1));
    }
    connections.iter().for_each(|one| hierarchy.wake(now, *one));
    let mut next = 0;
    time(|| {
        now = now + 1_310;
        let turn = hierarchy.pick(now).expect("a connection");
        hierarchy.end(now, black_box(turn), piece_bytes, !sparse);
        if sparse {
            hierarchy.wake(now, connections[next]);
            next = (next + 1) % connections.len();
            hierarchy.wake(now, turn.connection);
        }
    })
}

fn main() -> std::io::Result<()> {
    let mut out = stdout().lock();
    write!(out, "{:<44}", "connections with something to send")?;
    ACTIVE.iter().try_for_each(|active| write!(out, "{active:>10}"))?;
    writeln!(out)?;
    type Case = (&'static str, fn(usize) -> f64);
    let cases: [Case; 6] = [
        ("the device's senders", senders),
        ("1 tenant, pieces of 16 KiB", |active| {
            hierarchy(active, 1, 0, 16 << 10, false)
        }),
        ("1 tenant, pieces of 64 KiB", |active| {
            hierarchy(active, 1, 0, 64 << 10, false)
        }),
        ("1 tenant, each piece a message", |active| {
            hierarchy(active, 1, 0, 16 << 10, true)
        }),
        ("16 tenants, pieces of 16 KiB", |active| {
            hierarchy(active, 16, 0, 16 << 10, false)
        }),
        ("16 tenants with rates, pieces of 16 KiB", |active| {
            hierarchy(active, 16, 5_000_000_000, 16 << 10, false)
        }),
    ];
    for (name, case) in cases {
        write!(out, "{name:<44}")?;
        ACTIVE
            .iter()
            .try_for_each(|active| write!(out, "{:>10.1}", case(*active)))?;
        writeln!(out)?;
    }
    Ok(())
}
