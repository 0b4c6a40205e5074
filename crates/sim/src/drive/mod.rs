//! A model of an NVMe drive, behind the same trait as drives of the system: the shipped driver runs on it.
//!
//! Begin with [`Drive`]. It has registers, queues, a CMB and a PMR, media whose cache a power cut loses, and faults. It moves when [`Drive::step`] is called, at the time that
//! [`Drive::set_now`] has set, and draws the order of what it does from its seed. It checks what a driver does:
//!
//! 1. each access of the drive meets memory that was made for it and not dropped;
//! 2. a buffer's pages ([`Drive::lend`]) are accessed only while the drive has them, and not when they were given to somebody else since;
//! 3. doorbells, queues, command ids and lists of pages are used as the specification has them;
//! 4. each byte that the drive moves is booked, whatever the driver says ([`Drive::entries`]).

mod admin;
mod bus;
mod controller;
mod io;
mod media;
mod registers;
mod report;
mod run;
#[cfg(test)]
mod tests;

use std::io as std_io;
use std::sync::Arc;

use rdmux_drive::{Bar, DmaMemory, Function};
use rdmux_rnic::HeapMemory;
use rdmux_rnic::ledger::Entries;
use rdmux_rnic::sync::{Mutex, MutexGuard};
use rdmux_wire::nvme::CmbLayout;

use crate::dice::Dice;
use bus::DriveMemory;
use controller::{Controller, Health};
pub use media::{Bytes, Media};
pub use report::{Report, Settings, Tallies, Trouble};
pub use run::run;

/// The BARs with the memory of the drive, as QEMU's drive has them, and their addresses on the bus.
const CMB_BAR: u8 = 2;
const PMR_BAR: u8 = 4;
const CMB_BAR_ADDRESS: u64 = 0xfd00_0000;
const PMR_BAR_ADDRESS: u64 = 0x40_0000_0000;

/// The CMB of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cmb {
    /// Its place and what it takes. Its BAR is 2.
    pub layout: CmbLayout,
    /// It is there without a request of the host, as before version 1.4.
    pub is_legacy: bool,
}

/// Properties of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Most entries of a queue.
    pub queue_entries: u32,
    /// Most I/O queues of each kind.
    pub queues: u16,
    /// Bytes between doorbells.
    pub doorbell_stride: u32,
    /// Most bytes of a command, as a power of two of pages; 0 is no limit.
    pub mdts: u8,
    /// Longest time to become ready, in 500 ms.
    pub timeout: u8,
    /// Writes are volatile before a Flush.
    pub has_cache: bool,
    /// Its CMB.
    pub cmb: Option<Cmb>,
    /// Bytes of its PMR; 0 is none.
    pub pmr_bytes: u64,
}

impl Default for Shape {
    /// Returns a drive with a cache, and with a CMB and a PMR of 1 MiB each.
    fn default() -> Shape {
        Shape {
            queue_entries: 256,
            queues: 8,
            doorbell_stride: 4,
            mdts: 5,
            timeout: 4,
            has_cache: true,
            cmb: Some(Cmb {
                layout: CmbLayout {
                    bar: CMB_BAR,
                    offset: 0,
                    bytes: 1 << 20,
                    submission_queues: true,
                    completion_queues: false,
                    lists: true,
                    reads: true,
                    writes: true,
                },
                is_legacy: false,
            }),
            pmr_bytes: 1 << 20,
        }
    }
}

/// What goes wrong in a drive: each in one of so many commands; 0 is never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Longest time from one thing that it does for a command to the next, without a fault.
    pub latency_ns: u64,
    /// A command fails.
    pub fails: u64,
    /// A command is late, by no more than `late_ns`.
    pub late: u64,
    /// How late commands are at most.
    pub late_ns: u64,
    /// A command never completes; some of its data may move.
    pub never: u64,
    /// A completion names another command, another queue or a place beyond its queue.
    pub hostile: u64,
    /// The controller does not stop when it is disabled, for longer than it says.
    pub sticks: bool,
}

macro_rules! counts {
    ($($(#[doc = $doc:literal])+ $name:ident: $shown:literal,)+) => {
        /// Counts of what happened to a drive.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Counts {
            /// Returns the counts by name.
            pub fn list(&self) -> Vec<(&'static str, u64)> {
                vec![$(($shown, self.$name)),+]
            }

            /// Adds those of another drive.
            pub fn add(&mut self, other: &Counts) {
                $(self.$name += other.$name;)+
            }
        }
    };
}

counts! {
    /// Controllers that became ready.
    starts: "controllers started",
    /// Shutdowns that the host asked for.
    shutdowns: "shutdowns",
    /// Commands fetched.
    commands: "commands",
    /// Completions written.
    completions: "completions",
    /// Doorbells written.
    doorbells: "doorbells",
    /// Reads begun.
    reads: "reads",
    /// Writes done.
    writes: "writes",
    /// Flushes done.
    flushes: "flushes",
    /// Pages of data moved from and to the host's memory.
    pages_in_dram: "pages moved in DRAM",
    /// Pages of data moved within the drive.
    pages_in_drive: "pages moved in the drive",
    /// Submission queues in the CMB.
    queues_in_drive: "queues in the CMB",
    /// Commands that failed.
    failed: "commands that fail",
    /// Commands that were late.
    late: "commands that are late",
    /// Commands that never completed.
    hung: "commands that hang",
    /// Commands aborted.
    aborts: "commands aborted",
    /// Completions that are wrong.
    hostile: "false completions",
    /// Fatal failures of controllers.
    fatal: "fatal failures",
}

/// A drive. It may be stepped on one thread and driven from others.
#[derive(Debug)]
pub struct Drive {
    state: Mutex<Controller>,
    cmb: Option<Arc<DriveMemory>>,
    pmr: Option<Arc<DriveMemory>>,
}

impl Drive {
    /// Returns a drive whose power is on, with its media.
    pub fn new(shape: Shape, media: Arc<dyn Media>, seed: u64) -> Arc<Drive> {
        let pmr = Arc::new(HeapMemory::new(shape.pmr_bytes as usize));
        Drive::with_pmr(shape, media, pmr, seed)
    }

    /// As [`Drive::new`], with a PMR that has outlasted a power cut.
    pub fn with_pmr(shape: Shape, media: Arc<dyn Media>, pmr: Arc<HeapMemory>, seed: u64) -> Arc<Drive> {
        let mut controller = Controller::new(shape, media, Dice::new(seed, 50));
        let of_drive = |bytes: Arc<HeapMemory>| Arc::new(DriveMemory::new(bytes, controller.ledger.clone()));
        let cmb = shape.cmb.map(|cmb| {
            let bytes = cmb.layout.offset + cmb.layout.bytes;
            of_drive(Arc::new(HeapMemory::new(bytes as usize)))
        });
        let pmr = (shape.pmr_bytes > 0).then(|| of_drive(pmr));
        controller.cmb.clone_from(&cmb);
        controller.pmr.clone_from(&pmr);
        controller.power_on();
        Arc::new(Drive {
            state: Mutex::new(controller),
            cmb,
            pmr,
        })
    }

    fn state(&self) -> MutexGuard<'_, Controller> {
        self.state.lock()
    }

    /// Changes the faults.
    pub fn set_faults(&self, faults: Faults) {
        self.state().faults = faults;
    }

    /// Sets the time, which never goes back.
    pub fn set_now(&self, now_ns: u64) {
        let mut state = self.state();
        state.now = state.now.max(now_ns);
    }

    /// Does one thing. Returns false if there is nothing to do before [`Drive::next_due`].
    pub fn step(&self) -> bool {
        self.state().step()
    }

    /// Returns the earliest time at which something is due; `u64::MAX` is none.
    pub fn next_due(&self) -> u64 {
        self.state().next_due()
    }

    /// The controller fails: it fetches and completes nothing until it is reset.
    pub fn fail(&self) {
        self.state().fail();
    }

    /// As [`Drive::fail`], and no reset helps.
    pub fn break_down(&self) {
        let mut state = self.state();
        state.fail();
        state.health = Health::Broken;
    }

    /// The drive is pulled: registers and memory read as all ones, and it accesses nothing any more.
    pub fn vanish(&self) {
        let mut state = self.state();
        state.forget_commands();
        state.health = Health::Gone;
        for memory in self.cmb.iter().chain(&self.pmr) {
            memory.set_decoded(false);
        }
    }

    /// Returns true if it is not on the bus.
    pub fn is_gone(&self) -> bool {
        self.state().health == Health::Gone
    }

    /// Returns true if it was shut down since it started, and so has written its cache.
    pub fn is_shut_down(&self) -> bool {
        self.state().registers.was_shut_down
    }

    /// A page of a buffer belongs to the drive from now on, for a command that will be submitted. If it has it already, it was given to two commands, which is a
    /// violation.
    pub fn lend(&self, page: u64) {
        let mut state = self.state();
        if !state.bus.set_lent(page, true) {
            state.violate(format!(
                "page {page:#x} is given to a second command while the drive has it"
            ));
        }
    }

    /// A page of a buffer belongs to the drive no more: its command has ended for the host.
    ///
    /// # Panics
    /// The drive does not have it.
    pub fn take_back(&self, page: u64) {
        assert!(
            self.state().bus.set_lent(page, false),
            "page {page:#x} is not lent"
        );
    }

    /// Accesses the drive's memory as an RNIC does, not as the processor.
    pub fn as_nic<R>(&self, access: impl FnOnce() -> R) -> R {
        let set = |by_nic| {
            self.cmb
                .iter()
                .chain(&self.pmr)
                .for_each(|memory| memory.set_by_nic(by_nic))
        };
        set(true);
        let result = access();
        set(false);
        result
    }

    /// Returns what has crossed each link, by the drive or to it.
    pub fn entries(&self) -> Entries {
        self.state().ledger.entries()
    }

    /// Returns what happened.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    /// Returns the first thing that a driver has done wrong.
    pub fn violation(&self) -> Option<String> {
        self.state().violation.clone()
    }
}

impl Function for Drive {
    fn address(&self) -> &str {
        "model"
    }

    /// Its doorbells lie at any offset.
    fn register_bytes(&self) -> u64 {
        u64::MAX
    }

    fn read_u32(&self, offset: u32) -> u32 {
        self.state().read(offset)
    }

    fn read_u64(&self, offset: u32) -> u64 {
        let mut state = self.state();
        u64::from(state.read(offset)) | u64::from(state.read(offset + 4)) << 32
    }

    fn write_u32(&self, offset: u32, value: u32) {
        self.state().write(offset, value);
    }

    fn write_u64(&self, offset: u32, value: u64) {
        let mut state = self.state();
        state.write(offset, value as u32);
        state.write(offset + 4, (value >> 32) as u32);
    }

    fn bar(&self, index: u8) -> std_io::Result<Bar> {
        let (memory, address) = match index {
            CMB_BAR => (&self.cmb, CMB_BAR_ADDRESS),
            PMR_BAR => (&self.pmr, PMR_BAR_ADDRESS),
            _ => (&None, 0),
        };
        let memory = memory.clone().ok_or(std_io::ErrorKind::NotFound)?;
        Ok(Bar { memory, address })
    }

    fn dma(&self, bytes: usize) -> std_io::Result<DmaMemory> {
        let mut state = self.state();
        let Controller { bus, dice, .. } = &mut *state;
        let (memory, pages) = bus.dma(bytes, dice);
        Ok(DmaMemory { memory, pages })
    }
}
