//! A controller: one association with its admin queue, whose keep-alive a thread sees to.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_wire::Malformed;
use rdmux_wire::nvme::{
    AnaLog, Cns, Configuration, DISCOVERY_ENTRY_LEN, DISCOVERY_HEADER_LEN, DiscoveryEntry, DiscoveryHeader,
    IdentifyController, IdentifyNamespace, LogId, NamespaceIdentifiers, NsId, Register, parse_namespace_list,
};

use super::command::{event_request, identify, keep_alive, log_page, property_get, property_set};
use super::link::{Breaker, Link, QueueParams, Route, TICK, open_device};
use super::queue::{Command, Completion};
use super::setup::{ADMIN_ENTRIES, ControllerInfo, Setup};
use super::{HostError, Options, Transport};
use crate::tls::psk::Psk;
use crate::tls::{self, TlsError};

/// Entries of a discovery log, and namespaces of a controller, beyond which a host does not believe them.
const LIST_MAX: usize = 64 << 10;
/// Entries of the discovery log that are read at once.
const ENTRIES_AT_ONCE: u64 = 3;
/// Times that a discovery log is read again because it changes meanwhile.
const READS_MAX: u32 = 10;
/// Entries of a list of namespaces.
const NAMESPACES_AT_ONCE: usize = 1024;
/// Events that wait to be taken.
const EVENTS_MAX: usize = 64;
/// Time that a controller has to shut down.
const SHUTDOWN_MAX: Duration = Duration::from_secs(5);
/// Keep-alive times after which a controller that hears nothing from its host has ended, and with it what it was told to do: of one for which any
/// command counts, and of others. NVMe Base 2.1, 9.6.
const KEEP_ALIVES_TO_END: (u32, u32) = (3, 2);
/// Time by which a target may be late to end a controller.
const END_GRACE: Duration = Duration::from_secs(2);
/// Configuration: the host announces a normal shutdown. Status: it is complete.
const SHUTDOWN_NORMAL: u32 = 1 << 14;
const SHUTDOWN_COMPLETE: u64 = 2;
/// Age from which a key that was agreed on is not used any more: half its lifetime (NVMe/TCP 3.6.1.4).
const KEY_AGE_MAX: Duration = Duration::from_secs(300);
/// The admin queue.
const ADMIN: QueueParams = QueueParams {
    qid: 0,
    entries: ADMIN_ENTRIES,
    cntlid: 0,
    in_capsule_max: 0,
};

/// Something that a controller has reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Namespaces were added, removed or changed.
    NamespacesChanged,
    /// The discovery log has changed.
    DiscoveryChanged,
    /// The access to namespaces has changed.
    AccessChanged,
    /// Another: dword 0 of the completion.
    Other(u32),
}

impl Event {
    fn new(result: u64) -> Event {
        let log = (result >> 16) as u8;
        match (result & 7, LogId(log)) {
            (2, LogId::CHANGED_NAMESPACES) => Event::NamespacesChanged,
            (2, LogId::DISCOVERY) => Event::DiscoveryChanged,
            (2, LogId::ANA) => Event::AccessChanged,
            _ => Event::Other(result as u32),
        }
    }
}

/// A namespace, as Identify describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// Its number.
    pub nsid: NsId,
    /// Size in blocks.
    pub blocks: u64,
    /// Blocks in use.
    pub used_blocks: u64,
    /// Bytes of a block as a power of two.
    pub block_shift: u8,
    /// Bytes of metadata of a block: with some, [`Session`](super::Session) does not use it.
    pub metadata_bytes: u16,
    /// It takes no writes.
    pub is_protected: bool,
    /// Its identifiers; zero where it has none.
    pub ids: NamespaceIdentifiers,
    /// Identify Namespace, as it was received.
    pub identify_bytes: Vec<u8>,
}

impl NamespaceInfo {
    /// Returns its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes())
    }

    /// Returns the bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        1 << self.block_shift
    }

    fn parse(nsid: NsId, bytes: &[u8], ids: NamespaceIdentifiers) -> Result<NamespaceInfo, HostError> {
        // An inactive namespace is all zeros (NVM 4.1.5.1).
        if bytes.iter().all(|byte| *byte == 0) {
            return Err(HostError::Inconsistent {
                what: "subsystem",
                why: format!("has no namespace {nsid}: `rdmux nvme list` shows those that it has"),
            });
        }
        let namespace = IdentifyNamespace::parse(bytes)?;
        let format = 128 + 4 * usize::from(bytes[26] & 0xf);
        let metadata = u16::from_le_bytes([bytes[format], bytes[format + 1]]);
        let mut used = [0; 8];
        used.copy_from_slice(&bytes[16..24]);
        Ok(NamespaceInfo {
            nsid,
            blocks: namespace.blocks,
            used_blocks: u64::from_le_bytes(used),
            block_shift: namespace.block_shift,
            metadata_bytes: metadata,
            is_protected: namespace.is_protected,
            ids,
            identify_bytes: bytes.to_vec(),
        })
    }
}

/// The log of a discovery service.
#[derive(Clone, Debug)]
pub struct DiscoveryLog {
    /// Changes with the log.
    pub generation: u64,
    /// Its entries, as far as they have a meaning here.
    pub entries: Vec<Result<DiscoveryEntry, Malformed>>,
}

/// The admin queue, which one command at a time uses.
#[derive(Debug)]
struct Admin {
    link: Link,
    events: Vec<Event>,
}

/// State shared with the thread that keeps the controller alive.
#[derive(Debug)]
struct Shared {
    admin: Mutex<Admin>,
    /// Ends the waits of who has the admin queue.
    breaker: Arc<dyn Breaker>,
    lost: OnceLock<Arc<HostError>>,
    is_over: AtomicBool,
    admin_timeout: Duration,
}

/// A controller of a subsystem, as long as its admin queue holds. It ends, with its I/O queues, when it is dropped.
#[derive(Debug)]
pub struct Controller {
    shared: Arc<Shared>,
    /// Held as long as a queue is connected: the target knows a key no more once there is another one.
    settings: RwLock<Settings>,
    route: Route,
    info: ControllerInfo,
    /// The connections of its I/O queues.
    queues: Mutex<Vec<Weak<dyn Breaker>>>,
    keeper: Option<JoinHandle<()>>,
}

/// The key by which a host asks for a lost controller, if target and host agree on keys. A target has room for a few of a host alone, so that one asks again with
/// the same.
#[derive(Debug, Default)]
pub(super) struct Probe(Option<Psk>);

/// Settings of a controller's connections.
#[derive(Debug)]
struct Settings {
    options: Arc<Options>,
    /// Time at which their key was agreed on, if it was.
    keyed: Instant,
}

impl Settings {
    /// Returns those with which a controller is connected to: has target and host agree on a key if they are to.
    fn new(options: &Arc<Options>, route: &Route) -> Result<Settings, HostError> {
        let options = match options.concat {
            false => options.clone(),
            true if !tls::is_present() => return Err(TlsError::Absent.into()),
            true => {
                let mut options = Options::clone(options);
                options.psk = None;
                let mut link = Link::open(&options, route, &ADMIN)?;
                let mut setup = Setup::new_psk(&options);
                link.set_up(&mut setup, options.admin_timeout)?;
                let psk = setup.take_psk();
                link.connection_mut().end();
                Arc::new(with_key(&options, psk)?)
            }
        };
        Ok(Settings {
            options,
            keyed: Instant::now(),
        })
    }
}

/// Returns the options with a key that was agreed on.
fn with_key(options: &Options, psk: Option<Psk>) -> Result<Options, HostError> {
    // The authentication does not end well without one.
    let psk = Some(psk.ok_or(HostError::Closed(Some("the key of TLS")))?);
    Ok(Options {
        psk,
        ..options.clone()
    })
}

impl Controller {
    /// Connects to the first address that answers, and asks for so many I/O queues; 0 is none, of a controller that is only asked.
    ///
    /// # Errors
    /// No address leads to a controller that this host can use.
    pub fn connect(options: &Arc<Options>, queues: u16) -> Result<Controller, HostError> {
        let mut last = HostError::Closed(Some("no address"));
        for address in &options.addresses {
            match Controller::connect_at(options, *address, queues) {
                Ok(controller) => return Ok(controller),
                // The target may listen on another of its addresses.
                Err(
                    error @ (HostError::Connect { .. }
                    | HostError::Device { .. }
                    | HostError::NoTarget { .. }),
                ) => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    fn connect_at(options: &Arc<Options>, address: SocketAddr, queues: u16) -> Result<Controller, HostError> {
        let route = Route {
            address,
            device: match options.transport {
                Transport::Tcp => None,
                Transport::Rdma => Some(open_device(options, address)?),
            },
        };
        let settings = Settings::new(options, &route)?;
        let options = &settings.options;
        let mut link = Link::open(options, &route, &ADMIN)?;
        let mut setup = Setup::admin(options, queues);
        link.set_up(&mut setup, options.admin_timeout)?;
        let info = setup
            .controller()
            .ok_or(HostError::Closed(Some("Identify Controller")))?;
        let shared = Arc::new(Shared {
            breaker: link.breaker().clone(),
            admin: Mutex::new(Admin {
                link,
                events: Vec::new(),
            }),
            lost: OnceLock::new(),
            is_over: AtomicBool::new(false),
            admin_timeout: options.admin_timeout,
        });
        let mut keeper = None;
        if !options.keep_alive.is_zero() {
            let (shared, time) = (shared.clone(), options.keep_alive);
            let thread = std::thread::Builder::new().name("nvme-keep-alive".to_owned());
            keeper = Some(thread.spawn(move || shared.keep_alive(time))?);
        }
        Ok(Controller {
            shared,
            settings: RwLock::new(settings),
            route,
            info,
            queues: Mutex::default(),
            keeper,
        })
    }

    /// Returns what is known of it.
    pub fn info(&self) -> &ControllerInfo {
        &self.info
    }

    /// Returns the address at which it answers.
    pub fn address(&self) -> SocketAddr {
        self.route.address
    }

    /// Returns why it is lost, if it is.
    pub fn lost(&self) -> Option<&Arc<HostError>> {
        self.shared.lost.get()
    }

    /// Returns the events that it has reported since they were last taken.
    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.shared.admin().events)
    }

    /// Runs an admin command. `what` names it in errors.
    ///
    /// # Errors
    /// The controller has refused it, or is lost.
    pub fn run(&self, what: &'static str, command: Command) -> Result<Completion, HostError> {
        self.shared.run(what, command, self.shared.admin_timeout)
    }

    /// Returns a structure of Identify, 4,096 bytes.
    ///
    /// # Errors
    /// As [`Controller::run`], or the structure is shorter.
    pub fn identify(&self, cns: Cns, nsid: NsId) -> Result<Vec<u8>, HostError> {
        let completion = self.run("Identify", identify(cns, nsid))?;
        complete(completion, "Identify")
    }

    /// Returns a part of a log page, as [`log_page`] names it.
    ///
    /// # Errors
    /// As [`Controller::run`], or the part is shorter.
    pub fn log_page(
        &self,
        log: LogId,
        nsid: NsId,
        offset: u64,
        len: u32,
        retains_event: bool,
    ) -> Result<Vec<u8>, HostError> {
        let completion = self.run("Get Log Page", log_page(log, nsid, offset, len, retains_event))?;
        complete(completion, "Get Log Page")
    }

    /// Returns the namespaces that there are, in ascending order.
    ///
    /// # Errors
    /// As [`Controller::run`].
    pub fn namespaces(&self) -> Result<Vec<NsId>, HostError> {
        let mut all: Vec<NsId> = Vec::new();
        loop {
            let last = all.last().copied().unwrap_or(NsId::NONE);
            let bytes = self.identify(Cns::ACTIVE_NAMESPACES, last)?;
            let part: Vec<_> = parse_namespace_list(&bytes).collect();
            let is_ascending = [last].iter().chain(&part).is_sorted_by(|a, b| a < b);
            if !is_ascending || all.len() + part.len() > LIST_MAX {
                return Err(HostError::Inconsistent {
                    what: "list of namespaces",
                    why: "is not in ascending order, or too long".to_owned(),
                });
            }
            let is_last =
                part.len() < NAMESPACES_AT_ONCE || part.last().is_none_or(|nsid| nsid.0 >= NsId::ALL.0 - 1);
            all.extend(part);
            if is_last {
                return Ok(all);
            }
        }
    }

    /// Returns what is known of a namespace.
    ///
    /// # Errors
    /// As [`Controller::run`], or there is none, or it cannot be used.
    pub fn namespace(&self, nsid: NsId) -> Result<NamespaceInfo, HostError> {
        let bytes = self.identify(Cns::NAMESPACE, nsid)?;
        // Before version 1.3 there are no descriptors.
        let ids = match self.identify(Cns::NAMESPACE_IDENTIFIERS, nsid) {
            Ok(bytes) => NamespaceIdentifiers::parse(&bytes),
            Err(HostError::Refused { .. }) => NamespaceIdentifiers::parse(&[]),
            Err(error) => return Err(error),
        };
        NamespaceInfo::parse(nsid, &bytes, ids)
    }

    /// Returns the log of a discovery service, all of one generation.
    ///
    /// # Errors
    /// As [`Controller::run`], or the log changes all the time.
    pub fn discovery_log(&self) -> Result<DiscoveryLog, HostError> {
        let header = |retains| {
            let bytes = self.log_page(
                LogId::DISCOVERY,
                NsId::NONE,
                0,
                DISCOVERY_HEADER_LEN as u32,
                retains,
            )?;
            Ok::<_, HostError>(DiscoveryHeader::parse(&bytes)?)
        };
        let inconsistent = |why: &str| HostError::Inconsistent {
            what: "discovery log",
            why: why.to_owned(),
        };
        let mut before = header(true)?;
        for _ in 0..READS_MAX {
            if before.entries > LIST_MAX as u64 {
                return Err(inconsistent("has too many entries"));
            }
            let mut entries = Vec::new();
            while (entries.len() as u64) < before.entries {
                let number = (before.entries - entries.len() as u64).min(ENTRIES_AT_ONCE);
                let offset = DISCOVERY_HEADER_LEN + entries.len() * DISCOVERY_ENTRY_LEN;
                let len = number as u32 * DISCOVERY_ENTRY_LEN as u32;
                let bytes = self.log_page(LogId::DISCOVERY, NsId::NONE, offset as u64, len, true)?;
                entries.extend(bytes.chunks_exact(DISCOVERY_ENTRY_LEN).map(DiscoveryEntry::parse));
            }
            let after = header(false)?;
            if after.generation == before.generation {
                return Ok(DiscoveryLog {
                    generation: after.generation,
                    entries,
                });
            }
            before = after;
        }
        Err(inconsistent("changes each time it is read"))
    }

    /// Returns the log of the access to namespaces. `None`: there is one way of access, which all of them have.
    ///
    /// # Errors
    /// As [`Controller::run`], or the log is malformed.
    pub fn ana_log(&self) -> Result<Option<AnaLog>, HostError> {
        let identify = &self.info.identify;
        if identify.multipath & IdentifyController::ASYMMETRIC_ACCESS == 0 {
            return Ok(None);
        }
        // Before version 1.4 MNAN was not there.
        let namespaces = match identify.ana.namespaces {
            0 => identify.namespaces,
            most => most,
        };
        let len = 16 + 32 * u64::from(identify.ana.groups) + 4 * u64::from(namespaces);
        let len = len.min(self.info.transfer_max.into()) as u32 & !3;
        let read = log_page(LogId::ANA, NsId::ALL, 0, len, false);
        let completion = self.run("Get Log Page (ANA)", read)?;
        Ok(Some(AnaLog::parse(completion.bytes())?))
    }

    /// Connects an I/O queue of so many entries.
    pub(super) fn io_queue(&self, qid: u16, entries: u16) -> Result<Link, HostError> {
        if self.has_old_key() {
            self.renew_key()?;
        }
        let settings = self.settings.read().unwrap_or_else(PoisonError::into_inner);
        let options = &settings.options;
        let queue = QueueParams {
            qid,
            entries,
            cntlid: self.info.cntlid,
            in_capsule_max: self.info.in_capsule_max,
        };
        let mut link = Link::open(options, &self.route, &queue)?;
        let mut queues = self.queues();
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(link.breaker()));
        drop(queues);
        if let Some(why) = self.lost() {
            return Err(HostError::Lost(why.clone()));
        }
        let mut setup = Setup::io(options, qid, entries, self.info.cntlid);
        link.set_up(&mut setup, options.admin_timeout)?;
        Ok(link)
    }

    fn options(&self) -> Arc<Options> {
        let settings = self.settings.read().unwrap_or_else(PoisonError::into_inner);
        settings.options.clone()
    }

    fn has_old_key(&self) -> bool {
        let settings = self.settings.read().unwrap_or_else(PoisonError::into_inner);
        settings.options.concat && settings.keyed.elapsed() >= KEY_AGE_MAX
    }

    /// Has target and host agree on another key of TLS, if they have agreed on one: the next I/O queues are connected with it.
    ///
    /// # Errors
    /// The controller is lost.
    pub fn renew_key(&self) -> Result<(), HostError> {
        let mut settings = self.settings.write().unwrap_or_else(PoisonError::into_inner);
        if !settings.options.concat {
            return Ok(());
        }
        let options = settings.options.clone();
        let mut setup = Setup::replace_psk(&options)?;
        let mut admin = self.shared.admin();
        if let Some(why) = self.lost() {
            return Err(HostError::Lost(why.clone()));
        }
        let agreed = admin.link.set_up(&mut setup, options.admin_timeout);
        let keyed = agreed.and_then(|()| with_key(&options, setup.take_psk()));
        *settings = Settings {
            options: Arc::new(keyed.inspect_err(|error| {
                // A target takes nothing else from a host that does not prove its secret.
                let _ = self.shared.lost.set(Arc::new(error.clone()));
                admin.link.connection_mut().end();
            })?),
            keyed: Instant::now(),
        };
        Ok(())
    }

    /// Returns true if I/O queues of it are open.
    pub(super) fn has_queues(&self) -> bool {
        self.queues().iter().any(|queue| queue.strong_count() > 0)
    }

    fn queues(&self) -> MutexGuard<'_, Vec<Weak<dyn Breaker>>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time after which a controller that was abandoned has ended, with all that it was told to do, also if it is not known to be
    /// gone. Without a keep-alive time nothing says that: it is the time for which the host waits for an I/O.
    pub(super) fn ends_within(&self) -> Duration {
        let options = self.options();
        let by_traffic = self.info.identify.attributes & IdentifyController::TRAFFIC_KEEPS_ALIVE != 0;
        match options.keep_alive.is_zero() {
            true => options.io_timeout,
            false if by_traffic => options.keep_alive * KEEP_ALIVES_TO_END.0 + END_GRACE,
            false => options.keep_alive * KEEP_ALIVES_TO_END.1 + END_GRACE,
        }
    }

    /// Looks whether a controller that was abandoned is gone, with all that it was told to do: asks the subsystem for a queue of it, by the way by which
    /// the host had reached it. Another target behind another way does not know.
    ///
    /// # Errors
    /// The target does not tell.
    pub(super) fn is_gone(&self, probe: &mut Probe, longest: Duration) -> Result<bool, HostError> {
        let mut options = Options::clone(&self.options());
        options.connect_timeout = options.connect_timeout.min(longest);
        options.admin_timeout = options.admin_timeout.min(longest);
        // The target forgets the key of one that is gone.
        let options = match &probe.0 {
            Some(psk) => Arc::new(Options {
                psk: Some(psk.clone()),
                ..options
            }),
            None => Settings::new(&Arc::new(options), &self.route)?.options,
        };
        probe.0 = options.psk.clone().filter(|_| options.concat);
        // The last queue: another process of this host may have begun to use the id for its own.
        let qid = u16::try_from(self.info.queues).unwrap_or(u16::MAX).max(1);
        let (entries, cntlid) = (2, self.info.cntlid);
        let queue = QueueParams {
            qid,
            entries,
            cntlid,
            in_capsule_max: 0,
        };
        let connected = Link::open(&options, &self.route, &queue).and_then(|mut link| {
            link.set_up(
                &mut Setup::io(&options, qid, entries, cntlid),
                options.admin_timeout,
            )
        });
        match connected {
            Err(HostError::NoController { .. }) => Ok(true),
            // It is there, and has that queue, or did not have it.
            Ok(()) | Err(HostError::Refused { .. }) => Ok(false),
            Err(error) => {
                probe.0 = None;
                Err(error)
            }
        }
    }

    /// Ends the admin queue and the I/O queues, and with them the controller.
    pub(super) fn abandon(&self, why: &Arc<HostError>) {
        let _ = self.shared.lost.set(why.clone());
        self.shared.is_over.store(true, Ordering::Release);
        let queues = std::mem::take(&mut *self.queues());
        queues
            .iter()
            .filter_map(Weak::upgrade)
            .for_each(|queue| queue.break_off());
        // The holder of the admin queue gives it back then.
        self.shared.breaker.break_off();
        self.shared.admin().link.connection_mut().end();
    }

    /// Shuts the controller down, so that it makes durable what it has, and waits for that. A controller that is lost is left alone.
    pub fn close(self) {
        let deadline = Instant::now() + SHUTDOWN_MAX;
        let configuration = Configuration::enabled().0 | SHUTDOWN_NORMAL;
        let set = property_set(Register::CONFIGURATION, configuration);
        if self.run("Property Set of CC", set).is_err() {
            return;
        }
        let status = || self.run("Property Get of CSTS", property_get(Register::STATUS, false));
        while let Ok(completion) = status()
            && completion.result >> 2 & 3 != SHUTDOWN_COMPLETE
            && Instant::now() < deadline
        {
            // NVMe has no event for a change of CSTS: hosts ask for it in intervals.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.abandon(&Arc::new(HostError::Closed(None)));
        if let Some(keeper) = self.keeper.take() {
            keeper.thread().unpark();
            let _ = keeper.join();
        }
    }
}

/// Returns all bytes of a structure.
fn complete(completion: Completion, what: &'static str) -> Result<Vec<u8>, HostError> {
    let (received, asked) = (completion.received, completion.command.data.len());
    match received == asked {
        true => Ok(completion.command.buffer),
        false => Err(HostError::Inconsistent {
            what,
            why: format!("returned {received} of {asked} bytes"),
        }),
    }
}

impl Shared {
    fn admin(&self) -> MutexGuard<'_, Admin> {
        self.admin.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, what: &'static str, command: Command, timeout: Duration) -> Result<Completion, HostError> {
        let mut admin = self.admin();
        if let Some(why) = self.lost.get() {
            return Err(HostError::Lost(why.clone()));
        }
        let completion = admin.link.run(what, command, timeout).inspect_err(|error| {
            // Nobody learns how the controller ends a command that is not waited for.
            let _ = self.lost.set(Arc::new(error.clone()));
        });
        if completion.is_err() {
            admin.link.connection_mut().end();
        }
        let completion = completion?;
        match completion.status.is_success() {
            true => Ok(completion),
            false => Err(HostError::Refused {
                what,
                status: completion.status,
                hint: "",
            }),
        }
    }

    /// Sends Keep Alive twice in each keep-alive time, and takes events, until the controller is over.
    fn keep_alive(&self, time: Duration) {
        let mut next = Instant::now();
        while !self.is_over.load(Ordering::Acquire) && self.lost.get().is_none() {
            let now = Instant::now();
            if now < next {
                std::thread::park_timeout((next - now).max(TICK / 10));
                continue;
            }
            // A target without an answer in twice that time has let the controller end.
            if self
                .run("Keep Alive", keep_alive(), time)
                .is_err_and(|error| error.is_of_path())
            {
                return;
            }
            self.take_events();
            next = Instant::now() + time / 2;
        }
    }

    /// Reads the logs of events that have come, so that further ones can, and asks for the next.
    fn take_events(&self) {
        let completions = std::mem::take(&mut self.admin().link.events);
        for completion in completions {
            if !completion.status.is_success() {
                continue;
            }
            let event = Event::new(completion.result);
            let log = LogId((completion.result >> 16) as u8);
            // Reading it is what counts; its contents are read again by who wants them.
            let len = match event {
                Event::DiscoveryChanged => DISCOVERY_HEADER_LEN as u32,
                _ => 4096,
            };
            let _ = self.run(
                "Get Log Page",
                log_page(log, NsId::NONE, 0, len, false),
                self.admin_timeout,
            );
            let mut admin = self.admin();
            if admin.events.len() < EVENTS_MAX {
                admin.events.push(event);
            }
            admin.link.post(event_request());
        }
    }
}
