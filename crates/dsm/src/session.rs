//! A node's part in a cluster: its connections, its service thread, and the waits of the program's threads.

mod alarm;
mod error;
mod join;
mod modes;
mod service;
mod turns;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, LocalKey};
use std::time::{Duration, Instant};

use rdmux_key::random_nonce;
use rdmux_memory::mapping::PlaceError;
use rdmux_runtime::Waiting;
use rdmux_verbs::provider::Waker;
use rdmux_verbs::thread::shorten_slice;
use rdmux_verbs::waiting::WaitMode;
use rdmux_verbs::{Fault, ProtectionDomain};
use rdmux_wire::dsm::joining::{Joining, Step};
use rdmux_wire::dsm::{NodeId, heap as heap_message};

use self::alarm::Alarm;
pub use self::error::Error;
use self::turns::{Driving, Pause, Turns};
use crate::cluster::Cluster;
use crate::driver::{Answer, Driver, Making, Offer, Queues, REGIONS_MAX, Shadow};
use crate::geometry::Geometry;
use crate::heap::{self, Arena, Heap, HeapOptions};
use crate::memory::userfault::{Abilities, Delivery};
use crate::memory::{self, Access, Costs, View};
use crate::placement::{Digest, Placement};
use crate::protocol::{Homes, Settings};
use crate::region::{Pages, Region};
use crate::signal;
use crate::stat::Sheet;
use crate::sync::THREADS_MAX;
use crate::thread::Thread;
use crate::trace::{Event, Recorder, RegionMade};

/// The environment variable that pins how the program's threads wait for other nodes, with the values of `RDMUX_WAIT`. The service thread and the
/// device, which wait while the program computes, choose by themselves. A thread keeps the mode of the first session in which it waits.
pub const WAIT_VARIABLE: &str = "RDMUX_DSM_WAIT";

/// The environment variable that, if it is `off`, has a node change the rights to pages one by one and not together: for comparisons.
pub const BATCH_VARIABLE: &str = "RDMUX_DSM_BATCH";

/// Longest sleep of a waiting thread before it looks at the connections.
const LOOK: Duration = Duration::from_millis(100);

/// Wake-ups after which a node that sleeps answers: of the device's thread, and of the service thread. Then a thread of the program may follow.
const WAKES: u32 = 2;

/// Units that one thread asks for before it has had the first, and bytes of them. Of large units it asks for two.
const UNITS_AT_ONCE: u64 = 256;
const BYTES_AT_ONCE: u64 = 1 << 20;

/// Addresses of regions: below those of programs and libraries where addresses have 47 bits or more.
const ADDRESSES: Range<u64> = 1 << 44..5 << 44;
const ADDRESS_ALIGNMENT: u64 = 2 << 20;

/// Addresses that are tried for a region before it is given up.
const ATTEMPTS: u32 = 16;

/// Ways by which the faults of the program are answered.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "lowercase")]
pub enum FaultMode {
    /// A service thread answers them. System calls on the memory work where the system lets this user catch their faults.
    Thread,
    /// The thread that faults answers them itself, in a handler of `SIGBUS`, which is faster. System calls on pages that are away fail with `EFAULT`:
    /// [`Region::acquire`] first.
    Inline,
    /// The thread that faults answers them itself, in a handler of `SIGSEGV`, by mprotect(2): where userfaultfd(2) is missing.
    Mprotect,
}

impl FaultMode {
    /// The environment variable with the mode.
    pub const VARIABLE: &str = "RDMUX_DSM_FAULTS";

    /// Returns the mode of the environment, or [`FaultMode::best`] of what this host allows.
    ///
    /// # Errors
    /// The variable has another value than `thread`, `inline` or `mprotect`.
    pub fn of_environment() -> Result<FaultMode, Error> {
        match std::env::var(FaultMode::VARIABLE) {
            Ok(text) => text.parse().map_err(|_| Error::FaultMode(text)),
            Err(_) => Ok(FaultMode::best(&Abilities::probe())),
        }
    }
}

/// Order in which nodes see each other's accesses to a region.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(serialize_all = "lowercase")]
pub enum Consistency {
    /// All nodes see all accesses in one order: a node that writes a page is the only one that has it.
    #[default]
    Sequential,
    /// A node sees the writes of another one when it has synchronised with it by the calls of [`Thread`]. Several nodes may write a page at the same
    /// time. For programs without data races this is as [`Consistency::Sequential`].
    Release,
}

impl Consistency {
    /// Returns the consistency of a number, which is its place among all.
    pub(crate) fn of_number(number: u64) -> Option<Consistency> {
        let all = <Consistency as strum::VariantArray>::VARIANTS;
        all.get(usize::try_from(number).ok()?).copied()
    }
}

/// Settings of a region, the same on all nodes but for the mode.
#[derive(Clone, Debug)]
pub struct RegionOptions {
    /// Bytes, rounded up to whole pages and units.
    pub bytes: u64,
    /// Bytes of a unit, to which the nodes have rights as a whole: a power of two from [`UNIT_BYTES_MIN`](crate::UNIT_BYTES_MIN) to
    /// [`UNIT_BYTES_MAX`](crate::UNIT_BYTES_MAX). With units smaller than a page the program sees each of them at a [place](Region::place) of its own.
    pub unit: u64,
    /// Homes of the units.
    pub homes: Placement,
    /// The way by which faults are answered at this node.
    pub mode: FaultMode,
    /// The order of accesses of different nodes.
    pub consistency: Consistency,
}

impl RegionOptions {
    /// Describes a region whose units are pages with homes in turn, and whose faults are answered as the environment says.
    ///
    /// # Errors
    /// [`Error::FaultMode`].
    pub fn new(bytes: u64) -> Result<RegionOptions, Error> {
        Ok(RegionOptions::in_mode(bytes, FaultMode::of_environment()?))
    }

    /// Describes the same, with the faults answered in a given way.
    pub fn in_mode(bytes: u64, mode: FaultMode) -> RegionOptions {
        RegionOptions {
            bytes,
            unit: rustix::param::page_size() as u64,
            homes: Placement::InTurn(1),
            mode,
            consistency: Consistency::Sequential,
        }
    }

    /// Sets the order of accesses of different nodes.
    #[must_use]
    pub fn consistency(self, consistency: Consistency) -> RegionOptions {
        RegionOptions { consistency, ..self }
    }
}

/// A node's part in a cluster. Dropping it leaves the cluster: what the others need of this node is lost to them then. If a node is stopped in the middle
/// of writing to this one, a thread keeps the memory for its messages and the device until that node goes on or ends.
///
/// A thread of the program that waits for other nodes gets time slices of 0.1 ms, if it has the policy `SCHED_OTHER` (Linux 6.12), and keeps them; threads
/// and processes that it starts later have them too. Its part of a busy CPU stays the same, but when it is woken it runs at once beside threads of
/// longer slices.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    service: Option<JoinHandle<()>>,
    pd: ProtectionDomain,
    cluster: Cluster,
    regions: Mutex<u32>,
    /// Numbers of threads that are in use.
    threads: Mutex<BTreeSet<u16>>,
}

/// All that the threads of a node share.
#[derive(Debug)]
pub(crate) struct Shared {
    turns: Turns<Driver>,
    queues: Queues,
    /// A node that does not answer for so long has to leave.
    lease: Duration,
    /// Time that all nodes had to join.
    joining: Duration,
    /// There are regions with release consistency.
    has_release: AtomicBool,
    /// Regions whose faults the service thread reads.
    readers: Mutex<Vec<(u32, Pages)>>,
    trace: Option<Recorder>,
    /// How the program's threads wait; `None`: as costs least.
    wait_mode: Option<WaitMode>,
    /// Rights to several pages are changed together.
    has_batches: bool,
}

impl Session {
    /// Joins a cluster: connects to all other nodes, and waits until they have connected.
    ///
    /// # Errors
    /// The device cannot be opened, or a node does not join within `timeout`, or is another one; or the trace that the environment asks for
    /// ([`trace::VARIABLE`](crate::trace::VARIABLE)) cannot be written; or [`WAIT_VARIABLE`] has another value than `blocked`, `interrupted` or `running`, or
    /// [`BATCH_VARIABLE`] than `on` or `off`.
    pub fn join(cluster: Cluster, timeout: Duration) -> Result<Session, Error> {
        let wait_mode = wait_mode_of_environment()?;
        let has_batches = has_batches_by_environment()?;
        let trace = Recorder::of_environment(&cluster)?;
        let joined = join::join(&cluster, timeout)?;
        let homes = Homes::hash(cluster.nodes().collect::<Vec<_>>())?;
        let sheet = Sheet::new(&cluster)?;
        let driver = Driver::new(cluster.own(), joined.queues.clone(), joined.links, homes, sheet);
        let shared = Arc::new(Shared {
            turns: Turns::new(driver, Waker::new()?, Alarm::new()?),
            queues: joined.queues,
            lease: cluster.lease,
            joining: timeout,
            has_release: AtomicBool::new(false),
            readers: Mutex::default(),
            trace,
            wait_mode,
            has_batches,
        });
        let service = {
            let shared = shared.clone();
            rdmux_verbs::thread::spawn("dsm", move || service::serve(&shared))?
        };
        Ok(Session {
            shared,
            service: Some(service),
            pd: joined.pd,
            cluster,
            regions: Mutex::new(0),
            threads: Mutex::default(),
        })
    }

    /// Makes a thread of this node known under a number below [`THREADS_MAX`](crate::sync::THREADS_MAX), which no other thread of it has.
    ///
    /// # Errors
    /// The number is in use, or too high.
    pub fn thread(&self, number: u16) -> Result<Thread<'_>, Error> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        match number < THREADS_MAX && threads.insert(number) {
            true => {
                self.shared.record(|| Event::Begin { thread: number });
                Ok(Thread::new(self, number))
            }
            false => Err(Error::ThreadNumber(number)),
        }
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Takes back the number of a thread.
    pub(crate) fn end_thread(&self, number: u16) {
        // Writes that cannot be released are lost, as the next touch says.
        let _ = self.shared.release();
        self.shared.record(|| Event::End { thread: number });
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.remove(&number);
    }

    /// Returns the number of this node.
    pub fn node(&self) -> u32 {
        self.cluster.own().number()
    }

    /// Returns the number of nodes at the beginning.
    pub fn nodes(&self) -> u32 {
        self.cluster.nodes().count() as u32
    }

    /// Makes a region. All nodes call it, in the same order with the same settings; it returns when all have.
    ///
    /// # Errors
    /// The nodes do not agree, a node is gone, or this one lacks memory or rights.
    pub fn region(&self, options: &RegionOptions) -> Result<Region<'_>, Error> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        self.make(&mut regions, options, None)
    }

    /// Makes a heap. All nodes call it, in the order of regions and heaps, with the same settings; it returns when all have. It has as many regions as
    /// there are sizes of objects.
    ///
    /// # Errors
    /// As [`Session::region`].
    pub fn heap(&self, options: &HeapOptions) -> Result<Heap<'_>, Error> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = heap::Plan::new(options, self.node(), self.nodes())?;
        let planned = plan.regions.into_iter();
        let made = planned.map(|(options, units)| self.make(&mut regions, &options, Some(units)));
        let made = made.collect::<Result<_, Error>>()?;
        Ok(Heap::new(self, options.consistency, made))
    }

    /// Makes a region of the next number, of which this node hands out some units.
    fn make(
        &self,
        regions: &mut u32,
        options: &RegionOptions,
        units: Option<Range<u32>>,
    ) -> Result<Region<'_>, Error> {
        let number = *regions;
        if number as usize >= REGIONS_MAX {
            return Err(Error::TooManyRegions);
        }
        let agreement = Agreement {
            session: self,
            number,
            options,
            arena: units.map(Arena::new),
        };
        let geometry = Geometry::new(options.bytes, options.unit);
        let made = |geometry: Geometry| RegionMade {
            number,
            units: geometry.units(),
            unit_bytes: geometry.unit_bytes(),
            homes: options.homes.clone(),
            consistency: options.consistency,
        };
        let region = geometry.and_then(|geometry| {
            let event = || Event::Region(made(geometry));
            self.shared.recorded(event, || agreement.reach(geometry))
        });
        *regions += 1;
        let refusal = region.is_err().then(|| agreement.joining(0, Step::Differs));
        self.shared.turns.act(|driver| {
            driver.end_making(number);
            // The others wait for this node.
            refusal.iter().for_each(|it| driver.tell_all(it));
        });
        region
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Writes that cannot be released are lost, as all that other nodes had here.
        let _ = self.shared.release();
        let deadline = Instant::now() + self.cluster.lease;
        let sent = |driver: &mut Driver| driver.has_sent_all() || Instant::now() >= deadline;
        // A node that waits for something of this one's last messages gets it.
        let _ = self
            .shared
            .wait(|driver| Ok::<_, Infallible>(sent(driver).then_some(())));
        self.shared.turns.stop();
        if let Some(service) = self.service.take() {
            // It panics only with a defect, of which the panic has told.
            let _ = service.join();
        }
        self.shared.lock().end_links();
        if let Some(trace) = &self.shared.trace {
            trace.write();
        }
    }
}

/// A region that is being agreed on.
struct Agreement<'a, 'o> {
    session: &'a Session,
    number: u32,
    options: &'o RegionOptions,
    arena: Option<Arena>,
}

impl<'a> Agreement<'a, '_> {
    fn reach(&self, geometry: Geometry) -> Result<Region<'a>, Error> {
        let own = self.session.cluster.own();
        let homes = self.options.homes.homes(self.session.cluster.nodes().collect())?;
        if let Some(trace) = &self.session.shared.trace
            && self.options.mode == FaultMode::Thread
        {
            trace.give_up();
            return Err(Error::Untraced);
        }
        // Earlier views stay mapped: the others may still read them.
        let mut earlier = Vec::new();
        for attempt in 0..ATTEMPTS {
            let view = if own.number() == 0 {
                self.map_anywhere(geometry)?
            } else {
                let offer = self.wait_for_offer(attempt)?;
                if offer.pages != system_pages(geometry) || offer.digest != self.digest() {
                    return Err(Error::OtherSettings { region: self.number });
                }
                match self.map(geometry, Some(offer.address)) {
                    Err(Error::Memory(memory::Error::Place(error))) => {
                        // Addresses that the system does not have look like a lack of memory.
                        if matches!(error, PlaceError::NoMemory(_)) {
                            drop(self.map(geometry, None)?);
                        }
                        let taken = self.joining(attempt, Step::Taken);
                        self.session.shared.turns.act(|driver| driver.tell_all(&taken));
                        continue;
                    }
                    view => view?,
                }
            };
            let pages = self.publish(attempt, view, geometry, homes.clone())?;
            if self.has_agreed(attempt)? {
                let region = Region::new(self.session, self.number, pages.clone());
                self.session.shared.read_faults(self.number, &pages);
                signal::catch(self.session.shared.clone(), self.number, &pages)?;
                return Ok(region);
            }
            earlier.push(pages);
        }
        let bytes = self.options.bytes;
        Err(Error::NoAddress { bytes })
    }

    /// Maps the region far from where the system maps libraries, which each node has elsewhere, or else where the system wishes.
    fn map_anywhere(&self, geometry: Geometry) -> Result<View, Error> {
        for _ in 0..ATTEMPTS {
            let nonce = random_nonce()?;
            let number = u64::from_le_bytes(*nonce.first_chunk().unwrap_or(&[0; 8]));
            let address = ADDRESSES.start + number % (ADDRESSES.end - ADDRESSES.start);
            match self.map(geometry, Some(address.next_multiple_of(ADDRESS_ALIGNMENT))) {
                Err(Error::Memory(memory::Error::Place(_))) => {}
                view => return view,
            }
        }
        self.map(geometry, None)
    }

    fn digest(&self) -> u64 {
        let is_release = self.options.consistency == Consistency::Release;
        let digest = Digest::NEW.add(self.options.unit).add(is_release.into());
        self.options.homes.digest(digest).value()
    }

    fn map(&self, geometry: Geometry, address: Option<u64>) -> Result<View, Error> {
        let bytes = geometry.bytes();
        let len = usize::try_from(bytes).map_err(|_| Error::Size(bytes))?;
        let alias = rdmux_memory::AnonymousMemory::shareable(len);
        let alias = alias.map_err(|error| Error::NoMemory { bytes, error })?;
        let engine = self.options.mode.engine(&Abilities::probe())?;
        let page_bytes = bytes / u64::from(geometry.pages());
        let alias = Arc::new(alias);
        let costs = Costs::TYPICAL;
        let view = View::repeated(alias, address, engine, costs, page_bytes, geometry.views())?;
        Ok(match self.session.shared.has_batches {
            true => view,
            false => view.unbatched(),
        })
    }

    /// Registers the pages, has the others read them, and tells all of it.
    fn publish(&self, attempt: u32, view: View, geometry: Geometry, homes: Homes) -> Result<Pages, Error> {
        let rights = rdmux_verbs::Access::LOCAL_WRITE | rdmux_verbs::Access::REMOTE_READ;
        let mr = self.session.pd.reg_mr_all(view.alias().clone(), 0, rights)?;
        let key = mr.rkey().0;
        let delivery = match self.options.mode {
            FaultMode::Thread => Delivery::Poll,
            FaultMode::Inline | FaultMode::Mprotect => Delivery::Signal,
        };
        let pages = Pages::new(view, delivery, geometry);
        let nodes = self.session.cluster.nodes().count() as u32;
        let shadow = match self.options.consistency {
            Consistency::Sequential => None,
            Consistency::Release => {
                let (bytes, unit) = (geometry.bytes(), geometry.unit_bytes());
                Some(Shadow::new(&self.session.pd, bytes, unit, nodes)?)
            }
        };
        let shadow_key = shadow.as_ref().map_or(0, Shadow::key);
        let mut driver = self.session.shared.lock();
        let settings = Settings {
            region: self.number,
            units: geometry.units().into(),
            homes,
            epoch: driver.epoch(),
            members: driver.members(),
        };
        if shadow.is_some() {
            self.session.shared.has_release.store(true, Ordering::Release);
        }
        driver.add(pages.clone(), mr, &settings, self.arena.clone(), shadow);
        let bytes = geometry.bytes();
        let (mode, consistency) = (self.options.mode, self.options.consistency);
        driver.sheet().add_region(self.number, bytes, mode, consistency);
        if driver.own().number() == 0 {
            let address = pages.addresses().start;
            let (pages, digest) = (system_pages(geometry), self.digest());
            driver.tell_all(&self.joining(
                attempt,
                Step::Propose {
                    address,
                    pages,
                    digest,
                },
            ));
        }
        let shadow = shadow_key;
        driver.tell_all(&self.joining(attempt, Step::Mapped { key, shadow }));
        Ok(pages)
    }

    /// Waits until all have mapped the region. Returns false if another address is to be tried.
    fn has_agreed(&self, attempt: u32) -> Result<bool, Error> {
        let shared = &self.session.shared;
        let own = self.session.cluster.own();
        let is_first = own.number() == 0;
        shared.wait(|driver| {
            let making = self.making(driver)?;
            if !is_first && making.offer.is_some_and(|offer| offer.attempt > attempt) {
                return Ok(Some(false));
            }
            let answers = || making.answers(attempt, own);
            if is_first && answers().all(|(_, it)| it.is_some()) {
                let is_agreed = answers().all(|(_, it)| it != Some(Answer::Taken));
                if is_agreed {
                    driver.tell_all(&self.joining(attempt, Step::Agreed));
                    driver.agreed(self.number);
                }
                return Ok(Some(is_agreed));
            }
            let all_mapped = answers().all(|(_, it)| matches!(it, Some(Answer::Mapped(_))));
            let is_agreed = making.agreed == Some(attempt) && all_mapped;
            if is_agreed {
                driver.agreed(self.number);
            }
            Ok(is_agreed.then_some(true))
        })
    }

    /// Returns what the others have said.
    ///
    /// # Errors
    /// A node is gone, or cannot make the region.
    fn making<'d>(&self, driver: &'d mut Driver) -> Result<&'d Making, Error> {
        check(driver)?;
        let region = self.number;
        let making = driver.making(region).ok_or(Error::TooManyRegions)?;
        match making.refused {
            Some(node) => Err(Error::Differs { node, region }),
            None => Ok(making),
        }
    }

    fn wait_for_offer(&self, attempt: u32) -> Result<Offer, Error> {
        self.session.shared.wait(|driver| {
            let making = self.making(driver)?;
            Ok(making.offer.filter(|offer| offer.attempt >= attempt))
        })
    }

    fn joining(&self, attempt: u32, step: Step) -> Joining {
        let region = self.number;
        Joining {
            region,
            attempt,
            step,
        }
    }
}

fn wait_mode_of_environment() -> Result<Option<WaitMode>, Error> {
    match std::env::var(WAIT_VARIABLE) {
        Ok(text) => text.parse().map(Some).map_err(|_| Error::WaitMode(text)),
        Err(_) => Ok(None),
    }
}

fn has_batches_by_environment() -> Result<bool, Error> {
    match std::env::var(BATCH_VARIABLE).as_deref() {
        Ok("off") => Ok(false),
        Ok("on") | Err(_) => Ok(true),
        Ok(other) => Err(Error::Batch(other.to_owned())),
    }
}

/// Returns the number of the system's pages that a region has.
fn system_pages(geometry: Geometry) -> u64 {
    geometry.bytes() / rustix::param::page_size() as u64
}

/// Checks that all nodes are there.
fn check(driver: &Driver) -> Result<(), Error> {
    match driver.gone() {
        Some((node, reason)) => Err(Error::Gone {
            node: node.number(),
            reason,
        }),
        None => Ok(()),
    }
}

/// Checks that the system has refused nothing.
fn check_failure(driver: &Driver) -> Result<(), Error> {
    let failed = |error: &memory::Error| Err(Error::Failed(error.to_string()));
    driver.failure().map_or(Ok(()), failed)
}

/// Checks that a unit can be had.
fn check_unit(driver: &Driver, pages: &Pages, unit: u32) -> Result<(), Error> {
    check_failure(driver)?;
    match pages.lost(unit) {
        Some(node) => Err(Error::Lost {
            address: pages.address_of(unit),
            node: node.number(),
        }),
        None => Ok(()),
    }
}

/// Returns the number of units of some bytes that one thread asks for at a time.
///
/// # Panics
/// If a unit has no bytes.
pub fn units_at_once(unit_bytes: u64) -> u32 {
    let units = BYTES_AT_ONCE / unit_bytes;
    units.clamp(2, UNITS_AT_ONCE) as u32
}

fn at_once(pages: &Pages) -> u32 {
    units_at_once(pages.geometry().unit_bytes())
}

/// Returns the event of a thread that asks for rights to units.
fn pages_event(region: u32, wanted: &Range<u32>, access: Access, waits: bool) -> Event {
    Event::Pages {
        region,
        first: wanted.start,
        count: wanted.end.saturating_sub(wanted.start),
        access,
        waits,
    }
}

thread_local! {
    /// Waiting policy of this thread for pages, which come after an exchange of messages.
    static FOR_PAGES: RefCell<Option<Waiting>> = const { RefCell::new(None) };
    /// Its policy for other threads, which come when they want.
    static FOR_THREADS: RefCell<Option<Waiting>> = const { RefCell::new(None) };
}

/// A waiting policy, and the time in which nothing has come.
#[derive(Debug)]
struct Gaps {
    waiting: Waiting,
    /// `None`: the last look has found something.
    began: Option<Instant>,
    has_slept: bool,
}

impl Gaps {
    fn new(waiting: Waiting) -> Gaps {
        Gaps {
            waiting,
            began: None,
            has_slept: false,
        }
    }

    fn began(&mut self) -> Instant {
        *self.began.get_or_insert_with(Instant::now)
    }

    /// Forgets a gap of which the policy is not to hear.
    fn forget(&mut self) {
        self.began = None;
        self.has_slept = false;
    }
}

impl Pause for Gaps {
    /// Notes what a look has found. The policy hears of the gap at its end.
    fn saw(&mut self, has_come: bool) {
        if !has_come {
            self.began();
        } else if let Some(began) = self.began.take() {
            match std::mem::take(&mut self.has_slept) {
                true => self.waiting.slept(began, true),
                false => self.waiting.came(began),
            }
        }
    }

    fn pause(&mut self) -> bool {
        let began = self.began();
        let polls = self.waiting.pause(began);
        self.has_slept |= !polls;
        polls
    }

    fn keeps_cpu(&self) -> bool {
        self.waiting.keeps_cpu()
    }
}

/// Waiting policy of a kind of waits.
type Kind = LocalKey<RefCell<Option<Waiting>>>;

impl Shared {
    /// Holds the driver. A thread that does so touches no view.
    pub(crate) fn lock(&self) -> Driving<'_, Driver> {
        self.turns.lock()
    }

    /// Records an event that a thread does not wait for, if this node has a trace.
    pub(crate) fn record(&self, event: impl FnOnce() -> Event) {
        self.recorded(event, || ());
    }

    /// Carries out an event, and records it if this node has a trace.
    pub(crate) fn recorded<R>(&self, event: impl FnOnce() -> Event, f: impl FnOnce() -> R) -> R {
        match &self.trace {
            None => f(),
            Some(trace) => trace.around(event(), f),
        }
    }

    /// Waits until `done` returns a result or an error, and drives meanwhile.
    pub(crate) fn wait<R, E>(&self, done: impl FnMut(&mut Driver) -> Result<Option<R>, E>) -> Result<R, E> {
        self.wait_by(&FOR_THREADS, done)
    }

    fn wait_by<R, E>(
        &self,
        kind: &'static Kind,
        done: impl FnMut(&mut Driver) -> Result<Option<R>, E>,
    ) -> Result<R, E> {
        // In a thread that ends, there may be none any more.
        let waiting = kind.try_with(RefCell::take).ok().flatten();
        let waiting = waiting.unwrap_or_else(|| {
            // It is woken for each thing that comes, beside programs that compute.
            shorten_slice();
            Waiting::chained(self.wait_mode, WAKES + 1)
        });
        let mut gaps = Gaps::new(waiting);
        let result = self.turns.wait(&mut gaps, done);
        let _ = kind.try_with(|kept| kept.replace(Some(gaps.waiting)));
        result
    }

    /// Waits until this node has had a right to each of some units. Asks for many at a time.
    ///
    /// # Errors
    /// [`Error::Lost`] if a unit was lost with a node.
    pub(crate) fn acquire(
        &self,
        region: u32,
        pages: &Pages,
        wanted: Range<u32>,
        access: Access,
    ) -> Result<(), Error> {
        let at_once = at_once(pages);
        // Units before the one have been had, and those before the other been asked for.
        let (mut had, mut asked) = (wanted.start, wanted.start);
        let event = || pages_event(region, &wanted, access, true);
        let wait = || -> Result<(), Error> {
            self.wait_by(&FOR_PAGES, |driver| {
                loop {
                    let ahead = wanted.end.min(had.saturating_add(at_once));
                    for unit in asked..ahead {
                        driver.ask(region, pages, unit, access);
                    }
                    // A right that this node may give itself comes at once.
                    driver.carry_out();
                    asked = asked.max(ahead);
                    let before = had;
                    while had < wanted.end {
                        check_unit(driver, pages, had)?;
                        if !pages.allow(had, access) {
                            break;
                        }
                        had += 1;
                    }
                    if had == wanted.end {
                        return Ok(Some(()));
                    }
                    if had == before || asked == wanted.end {
                        // It may have been taken again before this thread has looked.
                        driver.ask(region, pages, had, access);
                        return Ok(None);
                    }
                }
            })
        };
        self.recorded(event, wait)
    }

    /// Asks for the first of some units to which this node has no right, without waiting.
    pub(crate) fn prefetch(&self, region: u32, pages: &Pages, wanted: Range<u32>, access: Access) {
        let is_away = |unit: &u32| !pages.allow(*unit, access) && pages.lost(*unit).is_none();
        let event = || pages_event(region, &wanted, access, false);
        let ask = || {
            self.turns.act(|driver| {
                for unit in wanted.clone().filter(is_away).take(at_once(pages) as usize) {
                    driver.ask(region, pages, unit, access);
                }
            });
        };
        self.recorded(event, ask);
    }

    /// Waits until this node has a right to a unit, and calls a function before any other node can take it.
    ///
    /// # Errors
    /// [`Error::Lost`] if the unit was lost with a node.
    pub(crate) fn access(
        &self,
        region: u32,
        pages: &Pages,
        unit: u32,
        access: Access,
        mut f: impl FnMut() -> Result<(), Fault>,
    ) -> Result<(), Error> {
        let mut wait = || {
            self.wait_by(&FOR_PAGES, |driver| {
                check_unit(driver, pages, unit)?;
                driver.ask(region, pages, unit, access);
                driver.carry_out();
                match pages.allow(unit, access) {
                    true => f().map(Some).map_err(|fault| Error::Failed(fault.to_string())),
                    false => Ok(None),
                }
            })
        };
        // A trace has waits alone: there may be a call for each word.
        if self.trace.is_none() || pages.allow(unit, access) {
            return wait();
        }
        self.recorded(|| pages_event(region, &(unit..unit + 1), access, true), wait)
    }

    /// Asks a node to allocate or free units of a region, and waits for the answer.
    ///
    /// # Errors
    /// [`Error::Gone`] if the node is.
    pub(crate) fn memory(
        &self,
        home: NodeId,
        region: u32,
        request: heap_message::Body,
    ) -> Result<heap_message::Body, Error> {
        let mut ticket = None;
        let event = || Event::Exchange { node: home.number() };
        let ask = || {
            self.wait(|driver| {
                let ticket = *ticket.get_or_insert_with(|| driver.ask_for_memory(home, region, request));
                if let Some(answer) = driver.take_memory(ticket) {
                    return Ok(Some(answer));
                }
                match driver.loss_of(home) {
                    Some(reason) => {
                        driver.give_up_memory(ticket);
                        let node = home.number();
                        Err(Error::Gone { node, reason })
                    }
                    None => Ok(None),
                }
            })
        };
        self.recorded(event, ask)
    }

    /// Releases all that the threads of this node have written.
    ///
    /// # Errors
    /// [`Error::Unreleased`]: what other nodes are the homes of is released all the same.
    pub(crate) fn release(&self) -> Result<(), Error> {
        if !self.has_release.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut rounds = None;
        let wait = || -> Result<(), Error> {
            self.wait_by(&FOR_PAGES, |driver| {
                check_failure(driver)?;
                let rounds = rounds.get_or_insert_with(|| driver.begin_release());
                let node = |it: NodeId| it.number();
                let released = driver.released(rounds).map_err(node);
                let released = released.map_err(|node| Error::Unreleased { node })?;
                Ok(released.then_some(()))
            })
        };
        self.recorded(|| Event::Release, wait)
    }

    /// Acquires what other nodes have released.
    ///
    /// # Errors
    /// The system has refused a change of pages.
    pub(crate) fn acquire_released(&self) -> Result<(), Error> {
        if !self.has_release.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut rounds = None;
        let wait = || -> Result<(), Error> {
            self.wait_by(&FOR_PAGES, |driver| {
                check_failure(driver)?;
                let rounds = rounds.get_or_insert_with(|| driver.begin_acquire());
                Ok(driver.acquired(rounds).then_some(()))
            })
        };
        self.recorded(|| Event::Acquire, wait)
    }

    /// Returns the regions whose faults the service thread reads.
    fn readers(&self) -> Vec<(u32, Pages)> {
        let readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        readers.clone()
    }

    /// Has the service thread read the faults of a region, unless they raise signals.
    fn read_faults(&self, region: u32, pages: &Pages) {
        if pages.delivery() != Delivery::Signal {
            let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
            readers.push((region, pages.clone()));
            self.turns.waker().wake();
        }
    }
}
