//! Settings of a run, and its result.

use std::fmt;

use strum::VariantArray;

use super::Counts;
use crate::dice::Dice;

/// Settings of a run; everything else is drawn from the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Seed of everything.
    pub seed: u64,
    /// Operations.
    pub operations: u32,
    /// What goes wrong.
    pub trouble: Trouble,
}

/// What goes wrong in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum Trouble {
    /// Nothing.
    None,
    /// Commands fail.
    Failures,
    /// Commands are late, or never complete.
    Timeouts,
    /// The controller fails, and a reset helps or not, or it does not stop.
    Fatal,
    /// The drive is pulled, and comes back.
    Vanishes,
    /// The power is cut.
    PowerCuts,
    /// Completions are wrong.
    Hostile,
    /// All of it.
    All,
}

impl Settings {
    /// Returns settings drawn from the seed.
    pub fn drawn(seed: u64) -> Settings {
        let all = Trouble::VARIANTS;
        Settings {
            seed,
            operations: Dice::new(seed, 51).between(50, 250) as u32,
            trouble: all[(seed % all.len() as u64) as usize],
        }
    }

    /// Returns the command that repeats the run.
    pub fn replay(&self) -> String {
        format!(
            "RDMUX_SIM_FIRST={} RDMUX_SIM_RUNS=1 cargo test --release -p rdmux-sim --test runs drive::run__nothing",
            self.seed
        )
    }
}

macro_rules! tallies {
    ($($(#[doc = $doc:literal])+ $name:ident: $shown:literal,)+) => {
        /// Counts of what a run did.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Tallies {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Tallies {
            /// Returns the counts by name.
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$(($shown, self.$name)),+]
            }
        }
    };
}

tallies! {
    /// Operations that ended.
    operations: "operations",
    /// Blocks read whose values were checked.
    reads_checked: "blocks checked",
    /// Commands that the driver refused, as it must.
    refused: "commands refused",
    /// Commands whose drive was reset.
    reset: "commands that a reset ended",
    /// Commands whose drive was gone.
    gone: "commands of a drive that was gone",
    /// Commands that the driver aborted.
    aborted: "commands that were aborted",
    /// Commands whose buffers stay with the driver.
    held: "commands whose buffers are held",
    /// Times that a driver gave a drive up.
    given_up: "drives given up",
    /// Times that a driver was dropped with commands in flight.
    dropped: "drivers dropped",
    /// Times that a driver shut its drive down, and another one began.
    restarts: "restarts of a driver",
    /// Power cuts.
    power_cuts: "power cuts",
    /// Acknowledged writes that were not durable at a power cut.
    lost_writes: "blocks not durable at a cut",
    /// Operations on memory of the drive.
    peer_to_peer: "operations in the drive's memory",
    /// Runs whose ledgers were compared.
    ledgers: "ledgers compared",
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
    /// Counts of what the run did.
    pub tallies: Tallies,
    /// Counts of what happened to its drives.
    pub counts: Counts,
}

impl Report {
    /// Returns all counts by name.
    pub fn list(&self) -> Vec<(&'static str, u64)> {
        let mut all = self.tallies.list();
        all.extend(self.counts.list());
        all
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<34} {}, {:?}",
            "seed", self.settings.seed, self.settings.trouble
        )?;
        for (name, count) in self.list() {
            writeln!(f, "{name:<34} {count:>10}")?;
        }
        match &self.violation {
            None => writeln!(
                f,
                "\nNothing acknowledged was lost, and no buffer was used too soon."
            ),
            Some(what) => writeln!(f, "\nVIOLATION: {what}"),
        }
    }
}
