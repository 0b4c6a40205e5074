//! The byte ledger: the bytes that cross each link of a machine, booked where they move.
//!
//! An RNIC, a drive, DRAM and the processor meet at the root complex; an RNIC and a drive may also reach each other through a switch below it.
//! Whoever moves bytes books them by the [`Route`] that they take, and the ledger adds them to each link of that route. A part that
//! books has an `Option<Arc<Ledger>>`: without a ledger it looks at one pointer and does nothing. A static ledger would look at a pointer
//! too, but could not keep two targets of a process apart.
//!
//! Loads of the processor from DRAM and its stores there are not booked: its caches answer most of them, and no device moves the bytes.

mod booked;

use std::ops::Sub;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use strum::VariantArray;

pub use booked::Booked;

/// A link that bytes cross.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum Link {
    /// The network.
    Wire,
    /// PCIe between the RNIC and the root complex.
    NicRoot,
    /// The memory controllers: what devices read and write in DRAM.
    RootDram,
    /// PCIe between the drive and the root complex.
    RootDrive,
    /// PCIe between the RNIC and the drive, not through the root complex.
    NicDrive,
}

impl Link {
    /// Returns its name in metrics and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Link::Wire => "wire",
            Link::NicRoot => "nic-root",
            Link::RootDram => "root-dram",
            Link::RootDrive => "root-drive",
            Link::NicDrive => "nic-drive",
        }
    }
}

/// Purpose of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum Class {
    /// Bytes that users read and write, and those that Identify and its likes return.
    Data,
    /// Commands, lists of their pages, and capsules.
    Command,
    /// Completions.
    Completion,
    /// Writes of doorbell registers.
    Doorbell,
}

impl Class {
    /// Returns its name in metrics and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Class::Data => "data",
            Class::Command => "command",
            Class::Completion => "completion",
            Class::Doorbell => "doorbell",
        }
    }
}

/// Place of a memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Location {
    /// In the host's DRAM.
    #[default]
    Dram,
    /// In a drive: its CMB or PMR.
    Drive,
}

/// The way that bytes take from one part of a machine to another, in either direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The RNIC sends or receives.
    Wire,
    /// The RNIC accesses a memory.
    Nic(Location),
    /// The drive accesses a memory. Its own memory is behind no link.
    Drive(Location),
    /// The processor accesses a memory or a register of the drive.
    Processor,
}

impl Route {
    /// Returns the links that it crosses.
    pub const fn links(self) -> &'static [Link] {
        match self {
            Route::Wire => &[Link::Wire],
            Route::Nic(Location::Dram) => &[Link::NicRoot, Link::RootDram],
            Route::Nic(Location::Drive) => &[Link::NicDrive],
            Route::Drive(Location::Dram) => &[Link::RootDrive, Link::RootDram],
            Route::Drive(Location::Drive) => &[],
            Route::Processor => &[Link::RootDrive],
        }
    }
}

const LINKS: usize = Link::VARIANTS.len();
const CLASSES: usize = Class::VARIANTS.len();

/// Counts bytes by link and class. Any number of threads book at a time.
#[derive(Debug, Default)]
pub struct Ledger([[AtomicU64; CLASSES]; LINKS]);

impl Ledger {
    /// Books bytes that move.
    pub fn book(&self, route: Route, class: Class, bytes: u64) {
        for link in route.links() {
            self.0[*link as usize][class as usize].fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Returns what was booked so far. It is exact if nobody books meanwhile.
    pub fn entries(&self) -> Entries {
        let of_link =
            |link: &[AtomicU64; CLASSES]| link.each_ref().map(|bytes| bytes.load(Ordering::Relaxed));
        Entries(self.0.each_ref().map(of_link))
    }
}

/// Books bytes that move, if there is a ledger.
pub fn book(ledger: Option<&Arc<Ledger>>, route: Route, class: Class, bytes: u64) {
    if let Some(ledger) = ledger {
        ledger.book(route, class, bytes);
    }
}

/// Contents of a ledger at some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entries([[u64; CLASSES]; LINKS]);

impl Entries {
    /// Returns the bytes of a class that have crossed a link.
    pub fn get(&self, link: Link, class: Class) -> u64 {
        self.0[link as usize][class as usize]
    }

    /// Returns all bytes that have crossed a link.
    pub fn of_link(&self, link: Link) -> u64 {
        self.0[link as usize].iter().sum()
    }

    /// Returns all entries, in the order of links and classes.
    pub fn iter(&self) -> impl Iterator<Item = (Link, Class, u64)> + '_ {
        let of_link = move |link: &Link| {
            let link = *link;
            Class::VARIANTS
                .iter()
                .map(move |class| (link, *class, self.get(link, *class)))
        };
        Link::VARIANTS.iter().flat_map(of_link)
    }

    /// Returns them with all bytes that an RNIC has counted on the wire: what is no payload, as headers, acknowledgements and what was sent again, counts as
    /// commands.
    #[must_use]
    pub fn on_wire(mut self, counted: u64) -> Entries {
        let overhead = counted.saturating_sub(self.of_link(Link::Wire));
        self.0[Link::Wire as usize][Class::Command as usize] += overhead;
        self
    }

    /// Returns entries in which the two differ, each with both numbers.
    pub fn differences(&self, other: &Entries) -> Vec<(Link, Class, u64, u64)> {
        let both = self.iter().zip(other.iter());
        let both = both.map(|((link, class, one), (_, _, two))| (link, class, one, two));
        both.filter(|(_, _, one, two)| one != two).collect()
    }
}

impl Sub for Entries {
    type Output = Entries;

    /// Returns what was booked between an earlier moment and this one.
    fn sub(mut self, earlier: Entries) -> Entries {
        let pairs = self.0.as_flattened_mut().iter_mut().zip(earlier.0.as_flattened());
        pairs.for_each(|(now, then)| *now = now.saturating_sub(*then));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the data bytes on each link, in the order of [`Link`].
    fn data(entries: &Entries) -> [u64; LINKS] {
        std::array::from_fn(|link| entries.get(Link::VARIANTS[link], Class::Data))
    }

    #[test]
    fn book__gives_the_table_of_a_write_by_each_path() {
        let vanilla = Ledger::default();
        for route in [
            Route::Wire,
            Route::Nic(Location::Dram),
            Route::Drive(Location::Dram),
        ] {
            vanilla.book(route, Class::Data, 4096);
        }
        assert_eq!(data(&vanilla.entries()), [4096, 4096, 8192, 4096, 0]);
        let peer_to_peer = Ledger::default();
        for route in [
            Route::Wire,
            Route::Nic(Location::Drive),
            Route::Drive(Location::Drive),
        ] {
            peer_to_peer.book(route, Class::Data, 4096);
        }
        assert_eq!(data(&peer_to_peer.entries()), [4096, 0, 0, 0, 4096]);
    }

    #[test]
    fn book__keeps_classes_apart() {
        let ledger = Ledger::default();
        ledger.book(Route::Drive(Location::Dram), Class::Command, 64);
        ledger.book(Route::Drive(Location::Dram), Class::Completion, 16);
        ledger.book(Route::Processor, Class::Doorbell, 4);
        let entries = ledger.entries();
        assert_eq!(entries.get(Link::RootDrive, Class::Command), 64);
        assert_eq!(entries.get(Link::RootDram, Class::Completion), 16);
        assert_eq!(entries.get(Link::RootDram, Class::Doorbell), 0);
        assert_eq!(entries.of_link(Link::RootDrive), 84);
        assert_eq!(entries.iter().map(|(_, _, bytes)| bytes).sum::<u64>(), 164);
    }

    #[test]
    fn book__loses_nothing_of_several_threads() {
        let ledger = Arc::new(Ledger::default());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| book(Some(&ledger), Route::Wire, Class::Data, 3)));
            }
        });
        let entries = ledger.entries();
        assert_eq!(entries.get(Link::Wire, Class::Data), 12_000);
        book(None, Route::Wire, Class::Data, 3);
    }

    #[test]
    fn entries__of_two_moments_give_what_was_booked_between() {
        let ledger = Ledger::default();
        ledger.book(Route::Wire, Class::Data, 10);
        let before = ledger.entries();
        ledger.book(Route::Wire, Class::Data, 5);
        let after = ledger.entries();
        assert_eq!((after - before).of_link(Link::Wire), 5);
        assert_eq!(before.differences(&after), [(Link::Wire, Class::Data, 10, 15)]);
        assert_eq!(after.differences(&after), []);
    }

    #[test]
    fn names__are_those_of_metrics() {
        let links = Link::VARIANTS.iter().map(|link| link.name());
        assert_eq!(
            links.collect::<Vec<_>>(),
            ["wire", "nic-root", "root-dram", "root-drive", "nic-drive"]
        );
        let classes = Class::VARIANTS.iter().map(|class| class.name());
        assert_eq!(
            classes.collect::<Vec<_>>(),
            ["data", "command", "completion", "doorbell"]
        );
    }
}
