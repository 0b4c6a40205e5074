//! Simulation of the engine, and of the push service on it: two devices, a virtual clock, and links that lose, duplicate,
//! reorder, corrupt and delay packets. Everything is drawn from one seed, so a run that fails can be run again; nothing here
//! reads a clock or the system's random numbers, and no packet leaves the process.
//!
//! Begin with [`Settings`] and [`run`], which gives a [`Report`]. [`power`] cuts the power of a server, [`leases`] runs the push
//! service's state machines, [`nvme`] those of NVMe over Fabrics. [`dsm`]
//! replays recorded runs on the distributed shared memory.
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(non_snake_case, reason = "tests are named function__case"))]

mod connect;
mod dice;
pub mod drive;
pub mod dsm;
pub mod fuzz;
pub mod goodput;
pub mod leases;
mod machine;
mod memory;
mod network;
pub mod nvme;
mod pair;
pub mod power;
mod report;
mod seen;
pub mod sharing;
mod tap;
mod unreliable;
mod workload;
mod world;

pub use report::{Counted, KINDS, Report};
pub use seen::Seen;
use strum::VariantArray;

/// Event that ends something early in a run, at a random moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, VariantArray)]
pub enum Ending {
    /// Nothing: every operation succeeds.
    #[default]
    None,
    /// One host falls silent.
    PeerVanishes,
    /// The user moves a QP to Error.
    UserError,
    /// A region that is in use is deregistered.
    Deregister,
    /// A request reaches one byte out of its region.
    OutOfBounds,
    /// A request does what the region that it names does not allow.
    NoRight,
    /// A request names a key that was bound, registered or valid before and no longer is.
    EndedKey,
    /// A SEND is longer than the receive that it finds.
    ShortReceive,
    /// A SEND finds no receive within its retries.
    NoReceive,
    /// An atomic operation names an address that is not aligned.
    Misaligned,
    /// A request names own memory by a key that does not exist.
    BadLocalKey,
    /// A request binds a window beyond its region.
    BadBind,
    /// A SEND invalidates the key of a region that only a verb may end.
    BadInvalidate,
    /// A region's memory fails.
    MemoryFails,
    /// A QP is destroyed.
    DestroyQp,
    /// A host loses its state and comes back, and both make new connections.
    Restart,
    /// The links break for a while, maybe for longer than the retries last.
    LinkDown,
    /// A completion queue overruns.
    Overrun,
    /// A host sends a response that nothing asked for.
    FalseAnswer,
}

impl Ending {
    /// All endings but none.
    pub const ALL: &[Ending] = Ending::VARIANTS.split_at(1).1;
}

/// Returns the element of `all` that has this name.
fn named<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str, text: &str) -> Result<T, String> {
    let found = all.iter().find(|one| name(**one) == text);
    found.copied().ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|one| name(*one)).collect();
        format!("{text:?} is none of {}", names.join(", "))
    })
}

/// Settings of a run. Everything else (path MTU, windows, depths, address family, latency, starting PSNs, ...) is drawn from
/// the seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Seed of everything.
    pub seed: u64,
    /// Packets lost, in percent.
    pub loss_percent: f64,
    /// Packets that arrive twice, in percent.
    pub dup_percent: f64,
    /// Packets overtaken by later ones, in percent.
    pub reorder_percent: f64,
    /// Packets with changed bytes, in percent.
    pub corrupt_percent: f64,
    /// Operations, over all QPs and both directions.
    pub operations: u32,
    /// QPs between the two devices.
    pub qps: u32,
    /// Longest operation in bytes.
    pub bytes_max: u32,
    /// Event that ends something early.
    pub ending: Ending,
    /// Set when the path between the hosts changes now and then: its latency rises and falls, and it breaks for a moment.
    pub path_changes: bool,
    /// Set when connections become idle now and then and go on with PSNs up to a whole cycle further.
    pub psn_skips: bool,
    /// Set when the hosts are processes of one machine: packets go through memory, and each host grants the other memory of its
    /// own. Now and then the link between them breaks, and packets take the network.
    pub one_machine: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            seed: 1,
            loss_percent: 1.0,
            dup_percent: 0.0,
            reorder_percent: 0.0,
            corrupt_percent: 0.0,
            operations: 1000,
            qps: 4,
            bytes_max: 1 << 20,
            ending: Ending::None,
            path_changes: false,
            psn_skips: false,
            one_machine: false,
        }
    }
}

impl Settings {
    /// Returns settings for at least 200 operations over at least 4 QPs, with faults and sizes drawn from the seed.
    pub fn drawn(seed: u64) -> Settings {
        let mut dice = dice::Dice::new(seed, 2);
        let mut up_to = |max: f64| match dice.below(4) {
            0 => 0.0,
            1 => max,
            _ => max * dice.below(1000) as f64 / 1000.0,
        };
        let (loss, dup, reorder, corrupt) = (up_to(10.0), up_to(5.0), up_to(5.0), up_to(1.0));
        Settings {
            seed,
            loss_percent: loss,
            dup_percent: dup,
            reorder_percent: reorder,
            corrupt_percent: corrupt,
            operations: 200 + dice.below(40) as u32,
            qps: 4 + dice.below(5) as u32,
            bytes_max: match dice.below(40) {
                0..2 => 1 << 20,
                2..8 => 64 << 10,
                8..12 => 512,
                _ => 16 << 10,
            },
            ending: Ending::None,
            path_changes: dice.one_in(2),
            one_machine: dice.one_in(4),
            psn_skips: dice.one_in(2),
        }
    }
}

/// Runs the simulation.
pub fn run(settings: &Settings) -> Report {
    workload::Workload::new(settings).run()
}

/// Runs the simulation of connection management: `settings.operations` is the number of connections, made and ended between
/// two devices at random moments; QPs and sizes do not matter.
pub fn run_connections(settings: &Settings) -> Report {
    connect::run(settings)
}

/// Runs the simulation of UC and UD queue pairs and of multicast. Each message that arrives must be one that was sent, whole,
/// at a destination of that message; how many arrive is up to the links.
pub fn run_unreliable(settings: &Settings) -> Report {
    unreliable::run(settings)
}
