//! NVMe over Fabrics: hosts and a target over byte streams and queue pairs that stall and are cut, while the target restarts, the power fails, disks fail,
//! and the access to namespaces changes.
//!
//! The state machines of both sides are those of `rdmux-nvmf`; sockets, threads, media and clock are the simulation's. Hosts
//! read, write, flush, count by fused pairs and take reservations from each other. A run checks that
//!
//! 1. each block read holds what was written last, as far as that is certain ([`checker`]): nothing acknowledged is lost while the power stays, and with
//!    a power cut nothing that was flushed or written with FUA;
//! 2. counters that several hosts increment by Compare and Write lose no increment;
//! 3. no block is written or read against a reservation, and a command is refused only for one ([`reserve`]);
//! 4. a failed flush is final;
//! 5. every command ends, and nothing is left of ended connections;
//! 6. what a controller had does not act any more once its host knows that it is gone;
//! 7. what a host writes by another path comes after what it wrote by one that it knows to be gone ([`paths`]);
//! 8. a host with limits is held to them, and no longer than they tell ([`pace`]);
//! 9. by RDMA the target reaches memory of a host only for a command in flight, and invalidates the keys that it was asked to, and no others ([`rdma`]).

pub(crate) mod checker;
pub(crate) mod disk;
mod host;
mod media;
mod operation;
mod pace;
mod paths;
mod rdma;
mod reserve;
mod run;
mod server;
mod stream;
mod transport;

use std::fmt;

use crate::dice::Dice;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
/// Longest time for which bytes are on their way that were sent before their connection was closed.
const SLACK_NS: u64 = 2 * SECOND;
/// Keep-alive time of the hosts.
const KEEP_ALIVE_NS: u64 = 5 * SECOND;

/// Settings of a run; everything else is drawn from the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Seed of everything.
    pub seed: u64,
    /// Number of hosts.
    pub hosts: u32,
    /// Operations of each host.
    pub operations: u32,
}

impl Settings {
    /// Returns settings drawn from the seed.
    pub fn drawn(seed: u64) -> Settings {
        let mut dice = Dice::new(seed, 40);
        Settings {
            seed,
            hosts: dice.between(2, 4) as u32,
            operations: dice.between(30, 90) as u32,
        }
    }

    /// Returns the command that repeats the run.
    pub fn replay(&self) -> String {
        format!(
            "RDMUX_SIM_FIRST={} RDMUX_SIM_RUNS=1 cargo test --release -p rdmux-sim --test runs nvme::run__nothing",
            self.seed
        )
    }
}

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident: $shown:literal,)+) => {
        /// Counts of what happened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counts {
            /// Returns the counts by name.
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$(($shown, self.$name)),+]
            }
        }
    };
}

counts! {
    /// Operations of hosts that ended.
    operations: "operations",
    /// Blocks read whose values were checked.
    reads_checked: "blocks checked",
    /// Copies that were acknowledged.
    copies: "copies",
    /// Fused pairs that were acknowledged.
    pairs: "fused pairs",
    /// Fused pairs whose Compare failed.
    pairs_failed: "fused pairs that differed",
    /// Flushes that were acknowledged.
    flushes: "flushes",
    /// Flushes that failed.
    flush_failures: "failed flushes",
    /// Writes that failed at the medium.
    write_failures: "failed writes",
    /// Reservation commands that were carried out.
    reservations: "reservation changes",
    /// Commands refused because of a reservation.
    conflicts: "reservation conflicts",
    /// Commands refused because the namespace was not accessible.
    inaccessible: "commands without access",
    /// Commands refused because the namespace was gone.
    removed: "commands without namespace",
    /// Controllers that were ready.
    controllers: "controllers",
    /// Of these, those that were lost.
    losses: "lost controllers",
    /// Controllers that hosts reset or shut down.
    resets: "resets and shutdowns",
    /// Times that a new controller was not ready at once.
    held_back: "controllers that waited",
    /// Commands sent again on another controller.
    repeats: "repeated commands",
    /// Times that I/O went to the other path.
    failovers: "changes of path",
    /// Of the controllers, those by RDMA.
    by_rdma: "controllers by RDMA",
    /// Times that a host's limits held commands up.
    held_up: "held up by limits",
    /// Connections cut.
    cuts: "cut connections",
    /// Streams that stalled.
    stalls: "stalled streams",
    /// Controllers whose hosts were silent.
    expired: "keep-alives expired",
    /// Hosts that died.
    deaths: "dead hosts",
    /// Times that the target was killed.
    kills: "target killed",
    /// Power cuts.
    power_cuts: "power cuts",
    /// Acknowledged writes that were not durable at a power cut.
    lost_writes: "blocks not durable at a cut",
    /// I/Os that started or ended within another.
    nested: "I/Os within others",
    /// Looks of somebody who waited for writes to end.
    waits: "waits at the fence",
    /// Changes of the access to namespaces.
    ana_changes: "ANA changes",
    /// Namespaces removed or resized.
    namespace_changes: "namespace changes",
    /// Events that hosts were told of.
    events: "events reported",
    /// Steps.
    steps: "steps",
}

/// Result of a run. The same settings give the same result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Settings of the run.
    pub settings: Settings,
    /// First violation found.
    pub violation: Option<String>,
    /// Counts of what happened.
    pub counts: Counts,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Settings {
            seed,
            hosts,
            operations,
        } = self.settings;
        writeln!(f, "{:<28} {seed}", "seed")?;
        writeln!(f, "{:<28} {hosts}, {operations} operations each", "hosts")?;
        for (name, count) in self.counts.list() {
            writeln!(f, "{name:<28} {count:>10}")?;
        }
        match &self.violation {
            None => writeln!(
                f,
                "\nNothing acknowledged was lost, and nobody wrote without the right."
            ),
            Some(what) => writeln!(f, "\nVIOLATION: {what}"),
        }
    }
}

/// Runs hosts against a target.
pub fn run(settings: &Settings) -> Report {
    run::run(settings)
}
