//! Leases over a wire: clients that push, break, connect again, stop and die, a server that restarts, and links that lose,
//! duplicate, reorder and break.
//!
//! The engines of both sides and the push service's own state machines ([`rdmux_push::server::Service`]) run. The simulation
//! replaces the machine: the network, the path from the device to the memory, on which accepted bytes may wait, and the
//! clients. A checker observes the memory: it knows from outside which party was notified of what, and checks each byte that
//! lands.
//!
//! Invariants:
//!
//! - no byte lands through a mapping after its revocation point: after the operation that it blocked went on, its end was
//!   acknowledged, its client was welcome on another connection, or the server ended;
//! - what was acknowledged before that point is there, once;
//! - a request waits at most the break timeout for each request made before it.

mod checker;
mod client;
mod driver;
mod run;

use strum::{IntoStaticStr, VariantArray};

use std::fmt;
use std::str::FromStr;

use crate::dice::Dice;

/// A deliberate defect in carrying out the service's decisions, which runs must reveal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Defect {
    /// The operation goes on before what the device had accepted has landed.
    NotDrained,
    /// The keys of a mapping become invalid a moment after the operation went on.
    InvalidatedLate,
    /// The keys of a mapping stay valid.
    NeverInvalidated,
    /// A break is taken for acknowledged, and the keys for given up, as soon as it is sent.
    AcknowledgementAssumed,
    /// A connection that has a successor lives on, with its mappings.
    OldConnectionLives,
    /// An ordinary write is reported done before it is.
    WriteReportedEarly,
    /// Nobody checks whether the time of a break is up.
    TimeNeverUp,
}

impl Defect {
    /// Its name.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl FromStr for Defect {
    type Err = String;

    fn from_str(text: &str) -> Result<Defect, String> {
        crate::named(Defect::VARIANTS, Defect::name, text)
    }
}

/// Settings of a run; everything else is drawn from the seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Seed of everything.
    pub seed: u64,
    /// A defect.
    pub defect: Option<Defect>,
    /// Number of actions of each client.
    pub acts: u32,
    /// Packets lost, in percent.
    pub loss_percent: f64,
    /// Packets that arrive twice, in percent.
    pub dup_percent: f64,
    /// Packets overtaken by later ones, in percent.
    pub reorder_percent: f64,
}

impl Settings {
    /// Returns settings with faults drawn from the seed.
    pub fn drawn(seed: u64) -> Settings {
        let mut dice = Dice::new(seed, 12);
        let mut up_to = |max: f64| match dice.below(3) {
            0 => 0.0,
            _ => max * dice.below(1000) as f64 / 1000.0,
        };
        let (loss, dup, reorder) = (up_to(10.0), up_to(5.0), up_to(5.0));
        Settings {
            seed,
            defect: None,
            acts: 80,
            loss_percent: loss,
            dup_percent: dup,
            reorder_percent: reorder,
        }
    }

    /// Returns the command that repeats the run.
    pub fn replay(&self) -> String {
        let mut command = format!("rdmux sim --leases --seed {}", self.seed);
        if let Some(defect) = self.defect {
            command += &format!(" --defect {}", defect.name());
        }
        command
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
    /// Clients that were welcome.
    welcomes: "welcomes",
    /// Of these, clients that had been connected before.
    reconnects: "reconnects",
    /// Mappings made.
    mappings: "mappings",
    /// WRITEs posted through mappings.
    pushes: "pushes",
    /// Of these, acknowledged.
    acknowledged: "acknowledged pushes",
    /// FLUSHes answered.
    flushes: "flushes",
    /// Ordinary writes and reads answered.
    ordinary: "ordinary operations",
    /// Operations of the server's own that went on.
    local: "local operations",
    /// Requests that had to wait for another party.
    waited: "requests that waited",
    /// Breaks that holders were notified of.
    breaks: "breaks",
    /// Mappings released.
    released: "released",
    /// Mappings revoked when their time was up.
    revoked: "revoked",
    /// Writes that were on their way when their mapping ended, and landed then.
    drained: "drained at the end",
    /// Requests refused because their key had ended, and their connection with them.
    refused: "refused late requests",
    /// Packets for queue pairs that had gone.
    strangers: "packets of old connections",
    /// Server restarts.
    restarts: "server restarts",
    /// Connections cut off for a while.
    cut: "connections cut off",
    /// Times that the links between both hosts broke or got worse.
    faults: "link faults",
    /// Clients that stopped for a while.
    stopped: "stopped clients",
    /// Clients that died.
    died: "dead clients",
    /// Packets sent.
    packets: "packets",
    /// Packets lost.
    lost: "lost packets",
    /// Packets that arrived twice.
    duplicated: "duplicated packets",
    /// Packets overtaken.
    reordered: "reordered packets",
    /// Events.
    steps: "steps",
}

/// Result of a run. The same settings give the same result.
#[derive(Clone, Debug, PartialEq)]
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
        let s = &self.settings;
        writeln!(f, "{:<28} {}", "seed", s.seed)?;
        writeln!(
            f,
            "{:<28} loss {} %, duplication {} %, reordering {} %",
            "faults", s.loss_percent, s.dup_percent, s.reorder_percent
        )?;
        if let Some(defect) = s.defect {
            writeln!(f, "{:<28} {}", "defect", defect.name())?;
        }
        for (name, count) in self.counts.list() {
            writeln!(f, "{name:<28} {count:>10}")?;
        }
        match &self.violation {
            None => writeln!(f, "\nNothing was written after a revocation point."),
            Some(what) => writeln!(f, "\nVIOLATION: {what}"),
        }
    }
}

/// Runs clients against a service that revokes leases.
pub fn run(settings: &Settings) -> Report {
    run::Run::new(settings).run()
}
