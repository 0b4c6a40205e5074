//! Power cuts: whatever a client was told is durable must be there when the server is back.
//!
//! A [`Shadow`] is a server's memory with everything between a WRITE and the media: I/O buffers, caches, write pending queue.
//! The engines of a client and of the server run over links that lose, duplicate and reorder packets. A scheduler drains
//! buffers and evicts lines at random moments. Power is cut at any step, and what is left is any of all that may be left.
//! [`run`] does that for clients that write, flush and read, and compares what is left with what they were told.
//!
//! Other programs can run over the same parts: make a [`Bed`], map ranges of its memory ([`Bed::map`]), post requests
//! ([`Bed::ask`]), let time pass ([`Bed::step`]), take requests that have ended ([`Bed::poll`]), cut the power ([`Bed::cut`])
//! and look at what is left ([`Shadow::visible`] of [`Bed::shadow`]). [`Ledger`] says which values each byte may have then; a
//! program whose recovery reads its own format needs none.
//!
//! ```
//! use rdmux_rnic::Placement;
//! use rdmux_sim::power::{Ask, Bed, BedSettings, Ended, Platform};
//!
//! let settings = BedSettings {
//!     seed: 7,
//!     platform: Platform::ADR_CACHED,
//!     defect: None,
//!     loss_percent: 5.0,
//!     dup_percent: 0.0,
//!     reorder_percent: 0.0,
//! };
//! let mut bed = Bed::new(&settings, vec![0; 4096]);
//! let link = bed.map(0..4096);
//! let flush = Ask::Flush { at: 100, len: 5, placement: Placement::PERSISTENT, whole: false };
//! bed.ask(link, &Ask::Write { at: 100, bytes: b"hello".to_vec() });
//! bed.ask(link, &flush);
//! let mut answered = 0;
//! while answered < 2 {
//!     bed.step().unwrap();
//!     while let Some(done) = bed.poll() {
//!         assert_eq!(done.ended, Ended::Done);
//!         answered += 1;
//!     }
//! }
//! bed.cut();
//! assert_eq!(&bed.shadow().visible()[100..105], b"hello");
//! ```

mod bed;
mod choice;
mod ledger;
mod log;
mod platform;
mod run;
mod shadow;
#[cfg(test)]
mod tests;

use strum::VariantArray;

use std::fmt;

pub use bed::{Ask, Bed, BedSettings, Done, Ended, MappedConnection, REQUEST_BYTES_MAX};
pub use ledger::Ledger;
pub use log::{LogDefect, LogReport};
pub use platform::{Defect, Domain, Inbound, Method, Platform, Verdict};
pub use shadow::{LINE, Lane, Passed, Shadow, UNIT};

use crate::dice::Dice;

/// Counts by name.
pub type Counted = Vec<(&'static str, u64)>;

/// Settings of a run; everything else is drawn from the seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Seed of everything.
    pub seed: u64,
    /// The server.
    pub platform: Platform,
    /// Method that clients also rely on, whatever the table says of it; they use no other.
    pub rely: Option<Method>,
    /// A defect of the server.
    pub defect: Option<Defect>,
    /// Number of times that the server stops, by a power cut or now and then by a kill of its process.
    pub cuts: u32,
    /// Packets lost, in percent.
    pub loss_percent: f64,
    /// Packets that arrive twice, in percent.
    pub dup_percent: f64,
    /// Packets overtaken by later ones, in percent.
    pub reorder_percent: f64,
}

impl Settings {
    /// Returns settings with a server and faults drawn from the seed.
    pub fn drawn(seed: u64) -> Settings {
        let mut dice = Dice::new(seed, 9);
        let mut up_to = |max: f64| match dice.below(3) {
            0 => 0.0,
            _ => max * dice.below(1000) as f64 / 1000.0,
        };
        let (loss, dup, reorder) = (up_to(10.0), up_to(5.0), up_to(5.0));
        Settings {
            seed,
            platform: dice.pick(&Platform::ALL),
            rely: None,
            defect: None,
            cuts: 4,
            loss_percent: loss,
            dup_percent: dup,
            reorder_percent: reorder,
        }
    }

    /// Returns the command that repeats the run.
    pub fn replay(&self) -> String {
        let mut command = format!("rdmux sim --power --seed {}", self.seed);
        let drawn = Settings::drawn(self.seed);
        if self.platform != drawn.platform {
            command += &format!(" --platform {}", self.platform.name());
        }
        if let Some(method) = self.rely {
            command += &format!(" --rely {}", method.name());
        }
        if let Some(defect) = self.defect {
            command += &format!(" --defect {}", defect.name());
        }
        command
    }

    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<18} {}", "seed", self.seed)?;
        writeln!(f, "{:<18} {}", "platform", self.platform.name())?;
        writeln!(
            f,
            "{:<18} loss {} %, duplication {} %, reordering {} %",
            "faults", self.loss_percent, self.dup_percent, self.reorder_percent
        )?;
        if let Some(method) = self.rely {
            writeln!(f, "{:<18} {}", "relied on", method.name())?;
        }
        if let Some(defect) = self.defect {
            writeln!(f, "{:<18} {}", "defect", defect.name())?;
        }
        Ok(())
    }
}

/// Result of a run. The same settings give the same result.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Settings of the run.
    pub settings: Settings,
    /// First violation found.
    pub violation: Option<String>,
    /// Power cuts.
    pub cuts: u64,
    /// Kills of the server's process.
    pub kills: u64,
    /// Mappings revoked.
    pub revoked: u64,
    /// Operations posted.
    pub operations: u64,
    /// Operations done.
    pub done: u64,
    /// Flushes that the server refused, as it had to.
    pub refused: u64,
    /// Answers by each of [`Method::VARIANTS`]; none for the WRITEs themselves.
    pub answers: [u64; 5],
    /// Counts of the memory.
    pub passed: Passed,
    /// Packets sent.
    pub packets: u64,
    /// Packets lost.
    pub lost: u64,
    /// Events.
    pub steps: u64,
}

impl Report {
    fn new(settings: &Settings) -> Report {
        Report {
            settings: *settings,
            violation: None,
            cuts: 0,
            kills: 0,
            revoked: 0,
            operations: 0,
            done: 0,
            refused: 0,
            answers: [0; 5],
            passed: Passed::default(),
            packets: 0,
            lost: 0,
            steps: 0,
        }
    }

    /// Returns the counts by name.
    pub fn counts(&self) -> Counted {
        let mut counts = vec![
            ("power cuts", self.cuts),
            ("kills", self.kills),
            ("revoked", self.revoked),
            ("operations", self.operations),
            ("done", self.done),
            ("refused", self.refused),
        ];
        let answers = Method::VARIANTS.iter().zip(self.answers).skip(1);
        counts.extend(answers.map(|(method, count)| (method.name(), count)));
        counts.extend([
            ("drained lines", self.passed.drained),
            ("evicted lines", self.passed.evicted),
            ("torn lines", self.passed.torn),
            ("packets", self.packets),
            ("lost packets", self.lost),
            ("steps", self.steps),
        ]);
        counts
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.show(f)?;
        for (name, count) in self.counts() {
            writeln!(f, "{name:<18} {count:>10}")?;
        }
        match &self.violation {
            None => writeln!(
                f,
                "\nWhat clients were told to be durable was there after every cut."
            ),
            Some(what) => writeln!(f, "\nVIOLATION: {what}"),
        }
    }
}

/// Runs clients against a server whose power is cut.
pub fn run(settings: &Settings) -> Report {
    run::Run::new(settings).run()
}

/// Runs the writer and the reader of a log of one replica against a server whose power is cut, with a defect of the log or
/// none. Take the settings from [`Settings::drawn_for_log`]: without [`Settings::rely`], the log is flushed by any method that
/// the table says is durable on the platform, which must have one.
pub fn run_log(settings: &Settings, defect: Option<LogDefect>) -> LogReport {
    log::LogRun::new(settings, defect).run()
}

/// Appends records to a log. At every step its reader checks every memory that a cut may leave, with torn lines, wherever there
/// are no more than `max`. Returns how many it checked.
///
/// # Errors
/// Describes the first violation found.
pub fn run_log_everywhere(settings: &Settings, records: u64, max: usize) -> Result<u64, String> {
    log::LogRun::new(settings, None).run_everywhere(records, max)
}
