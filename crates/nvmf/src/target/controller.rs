//! A controller: registers, admin commands, keep-alive and events. Its admin queue owns it.

mod features;
mod logs;
mod passed;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdmux_drive::MemoryKind;
use rdmux_wire::nvme::{
    AnaLimits, AsyncEvent, Capabilities, Cid, Cns, Configuration, ControllerKind, FabricsType, IDENTIFY_LEN,
    IdentifyController, NsId, Opcode, Property, Register, SQE_LEN, Sqe, Status, VERSION_2_0,
    emit_namespace_list,
};

use self::features::Features;
use super::ana::ANA_GROUP_MAX;
use super::association::{ABORTS_MAX, Association};
use super::fused::Own;
use super::io::{Io, Operation};
use super::namespace::{COPY_FORMATS, Seat, SharedNamespace};
use super::queue::{Executed, Port};
use super::subsystem::{Listener, NAMESPACES_MAX, Namespaces, Subsystem, Target};
use crate::backend::drive::DriveBackend;
use crate::tls::psk::Psk;

/// Requests for asynchronous events at a time.
const EVENT_REQUESTS_MAX: usize = 4;
/// Longest time to become ready, in 500 ms: hosts wait so long for CSTS.RDY.
const READY_TIMEOUT: u8 = 15;
/// Longest time that a change of the access to namespaces takes, in seconds.
const ANA_TRANSITION_S: u8 = 10;
/// Granularity of the keep-alive timer.
const KEEP_ALIVE_UNIT: Duration = Duration::from_millis(100);
/// A host's timeout begins when it sends: the controller waits this much longer.
const KEEP_ALIVE_GRACE: Duration = Duration::from_secs(1);
/// Keep-alive timeout of discovery controllers whose hosts name none, as that of Linux's target.
const DISCOVERY_KEEP_ALIVE: Duration = Duration::from_secs(120);
/// Data that an admin command takes at most.
const ADMIN_DATA_MAX: u32 = 128 << 10;

/// Controller status. 3.1.3.6.
mod status {
    pub(super) const READY: u64 = 1;
    pub(super) const FATAL: u64 = 1 << 1;
    pub(super) const SHUTDOWN_OCCURRING: u64 = 1 << 2;
    pub(super) const SHUTDOWN_COMPLETE: u64 = 2 << 2;
}

/// Model of controllers whose subsystem has accelerators.
const ACCELERATOR_MODEL: &str = "rdmux accelerator";

/// A controller of a subsystem.
#[derive(Debug)]
pub struct Controller {
    kind: ControllerKind,
    subsystem: Arc<Subsystem>,
    association: Arc<Association>,
    port: Port,
    /// The listener by which the host has come.
    local: Listener,
    began: Instant,
    configuration: Configuration,
    /// CSTS.
    state: u64,
    /// It is ready once no I/O runs that was sent before.
    is_enabling: bool,
    /// It was reset, which is over once no I/O runs that was sent before: until then the host sees it ready.
    is_stopping: bool,
    /// Its I/O queues are over, which the transport has not been told.
    was_reset: bool,
    /// Its subsystem has ended it.
    is_over: bool,
    /// Namespaces to be flushed before a shutdown is complete.
    to_flush: Vec<Arc<SharedNamespace>>,
    /// Flushes that run.
    flushing: usize,
    keep_alive: Option<Duration>,
    heard: Instant,
    /// Requests for asynchronous events.
    requests: VecDeque<Cid>,
    /// Completions of commands that have waited: command, status and result.
    done: VecDeque<(Cid, Status, u64)>,
    /// Commands that wait for an I/O that they have asked for, and whether that has begun.
    own: Vec<(Cid, Arc<Own>, Option<Io>)>,
    features: Features,
    /// The namespaces of which the host knows, and their generation.
    known: (u64, Namespaces),
    /// Namespaces that have changed since the host has read the log of them.
    changed: Vec<NsId>,
    /// Number of changes of the access to namespaces of which the host knows.
    ana_changes: u64,
    /// Events of which the host has been told, and whose logs it has not read.
    masked: Vec<AsyncEvent>,
    discovery_generation: u64,
}

impl Controller {
    pub(super) fn new(
        kind: ControllerKind,
        subsystem: Arc<Subsystem>,
        association: Arc<Association>,
        (port, local): (Port, Listener),
        keep_alive_ms: u32,
        discovery_generation: u64,
        now: Instant,
    ) -> Controller {
        let known = subsystem.namespaces();
        let ana_changes = subsystem.ana_changes();
        Controller {
            kind,
            subsystem,
            association,
            port,
            local,
            began: now,
            configuration: Configuration::default(),
            state: 0,
            is_enabling: false,
            is_stopping: false,
            was_reset: false,
            is_over: false,
            to_flush: Vec::new(),
            flushing: 0,
            keep_alive: timeout(kind, keep_alive_ms),
            heard: now,
            requests: VecDeque::new(),
            done: VecDeque::new(),
            own: Vec::new(),
            features: Features::default(),
            known,
            changed: Vec::new(),
            ana_changes,
            masked: Vec::new(),
            discovery_generation,
        }
    }

    /// The host has sent something.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        let keep_alive = self.keep_alive.filter(|_| !mutant!(KeepAliveEndless))?;
        Some(self.heard + keep_alive + KEEP_ALIVE_GRACE)
    }

    /// Keeps the key of TLS that it and its host have agreed on.
    pub(super) fn keep_key(&self, psk: Psk, now: Instant) {
        self.subsystem.keep_key(&self.association, psk, now);
    }

    /// Returns true if its host may not use the subsystem any more.
    pub(super) fn is_expelled(&self) -> bool {
        self.association.is_expelled()
    }

    /// Returns true if it may have I/O queues: discovery controllers have none.
    pub(super) fn has_io_queues(&self) -> bool {
        self.kind == ControllerKind::Io
    }

    fn is_ready(&self) -> bool {
        self.state & status::READY != 0
    }

    /// Returns the bytes that a command receives.
    pub(super) fn admit(
        &self,
        sqe: &Sqe,
        of_fabrics: Option<FabricsType>,
        data_len: u32,
    ) -> Result<u32, Status> {
        if of_fabrics.is_none() && !self.is_ready() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
        }
        match sqe.is_to_controller() {
            true if data_len <= ADMIN_DATA_MAX => Ok(data_len),
            true => Err(Status::SGL_LENGTH_INVALID.do_not_retry()),
            false => Ok(0),
        }
    }

    pub(super) fn execute(
        &mut self,
        sqe: &Sqe,
        data: &[u8],
        target: &Target,
        now: Instant,
    ) -> Result<Executed, (Status, u64)> {
        let executed = match sqe.opcode() {
            Opcode::FABRICS => match FabricsType::of(sqe) {
                FabricsType::PROPERTY_GET => self.property_get(Property::parse(sqe)),
                FabricsType::PROPERTY_SET => self.property_set(Property::parse(sqe)),
                _ => Err(Status::INVALID_FIELD),
            },
            Opcode::KEEP_ALIVE => Ok(Executed::Done(0)),
            Opcode::IDENTIFY => self.identify(sqe),
            Opcode::GET_LOG_PAGE => self.log_page(sqe, target, now),
            Opcode::SET_FEATURES => self.set_features(sqe, data, now),
            Opcode::GET_FEATURES => self.get_features(sqe, now),
            Opcode::ASYNC_EVENT_REQUEST => match self.requests.len() < EVENT_REQUESTS_MAX {
                true => {
                    self.requests.push_back(sqe.cid());
                    Ok(Executed::Wait)
                }
                false => Err(Status::EVENT_LIMIT),
            },
            Opcode::ABORT => self.abort(sqe),
            _ => Err(Status::INVALID_OPCODE),
        };
        executed.map_err(|status| (status.do_not_retry(), 0))
    }

    fn abort(&mut self, sqe: &Sqe) -> Result<Executed, Status> {
        /// Bit 0 of the result: the command was not aborted.
        const NOT_ABORTED: u64 = 1;
        let (qid, cid) = (sqe.dword(10) as u16, Cid((sqe.dword(10) >> 16) as u16));
        if qid == 0 {
            // Commands of this queue are done at once, but for requests for events.
            let Some(at) = self.requests.iter().position(|request| *request == cid) else {
                return Ok(Executed::Done(NOT_ABORTED));
            };
            self.requests.remove(at);
            self.done.push_back((cid, Status::ABORT_REQUESTED, 0));
            self.done.push_back((sqe.cid(), Status::SUCCESS, 0));
            return Ok(Executed::Wait);
        }
        if !self.association.abort(qid, cid, sqe.cid())? {
            return Ok(Executed::Done(NOT_ABORTED));
        }
        self.was_reset = true;
        Ok(Executed::Wait)
    }

    fn property_get(&mut self, property: Property) -> Result<Executed, Status> {
        self.look_at_readiness();
        let value = match (property.register, property.is_wide) {
            (Register::CAPABILITIES, true) => Capabilities {
                queue_entries: self.port.entries_max.into(),
                timeout: READY_TIMEOUT,
            }
            .register(),
            (Register::VERSION, false) => self.version().into(),
            // In the same unit.
            (Register::READY_TIMEOUTS, false) => READY_TIMEOUT.into(),
            (Register::CONFIGURATION, false) => self.configuration.0.into(),
            (Register::STATUS, false) if self.is_stopping => self.state | status::READY,
            (Register::STATUS, false) => self.state,
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(Executed::Done(value))
    }

    fn property_set(&mut self, property: Property) -> Result<Executed, Status> {
        if property.register != Register::CONFIGURATION || property.is_wide {
            return Err(Status::INVALID_FIELD);
        }
        let (old, new) = (self.configuration, Configuration(property.value as u32));
        self.configuration = new;
        if new.is_enabled() && !old.is_enabled() {
            // Discovery controllers have no I/O queues, whose entries it says nothing about.
            let is_supported = new.is_supported() || self.kind == ControllerKind::Discovery;
            self.is_enabling = is_supported;
            self.is_stopping = false;
            self.state = if is_supported { 0 } else { status::FATAL };
        }
        if !new.is_enabled() && old.is_enabled() {
            self.is_stopping = self.is_ready() && !mutant!(ResetTooEarly);
            self.reset();
        }
        if new.is_shutting_down() && !old.is_shutting_down() {
            self.reset();
            self.state = status::SHUTDOWN_OCCURRING;
            let all = self.subsystem.list().into_iter();
            self.to_flush = all
                .filter(|namespace| namespace.backend.has_write_cache() && !mutant!(ShutdownNotFlushed))
                .collect();
        }
        self.look_at_readiness();
        Ok(Executed::Done(0))
    }

    fn reset(&mut self) {
        self.state = 0;
        self.is_enabling = false;
        self.requests.clear();
        self.done.clear();
        self.own.clear();
        self.features = Features::default();
        self.changed.clear();
        self.masked.clear();
        self.association.copy_formats.store(0, Ordering::Release);
        self.association.reset();
        self.was_reset = true;
    }

    /// Ends it, with its I/O queues, unless it is over.
    pub(super) fn end(&mut self) {
        if !self.is_over {
            self.is_over = true;
            self.was_reset = true;
            self.subsystem.dissociate(&self.association);
        }
    }

    pub(super) fn take_reset(&mut self) -> bool {
        std::mem::take(&mut self.was_reset) | self.association.take_tells()
    }

    fn look_at_readiness(&mut self) {
        self.is_stopping &= !self.association.is_quiet();
        self.look_at_shutdown();
        let is_quiet = || self.association.is_quiet() && self.subsystem.is_quiet(&self.association);
        if self.is_enabling && (is_quiet() || mutant!(ReadyTooEarly)) {
            self.is_enabling = false;
            self.state = status::READY;
            self.association.is_ready.store(true, Ordering::Release);
        }
    }

    pub(super) fn poll_flush(&mut self) -> Option<Io> {
        if let Some(io) = self.own.iter_mut().find_map(|(_, _, io)| io.take()) {
            self.flushing += 1;
            return Some(io);
        }
        // I/Os that run yet may write.
        if !self.association.is_quiet() {
            return None;
        }
        let namespace = self.to_flush.pop()?;
        self.flushing += 1;
        Some(own_io(namespace, Operation::Flush, None))
    }

    pub(super) fn flushed(&mut self, flushed: Status) {
        self.flushing -= 1;
        if !flushed.is_success() {
            self.state |= status::FATAL;
        }
        self.look_at_shutdown();
    }

    fn look_at_shutdown(&mut self) {
        let is_occurring = self.state & status::SHUTDOWN_OCCURRING != 0;
        let is_flushed = self.to_flush.is_empty() && self.flushing == 0;
        if is_occurring && is_flushed && self.association.is_quiet() {
            self.state ^= status::SHUTDOWN_OCCURRING | status::SHUTDOWN_COMPLETE;
        }
    }

    fn identify(&mut self, sqe: &Sqe) -> Result<Executed, Status> {
        let mut bytes = vec![0; IDENTIFY_LEN];
        let cns = Cns(sqe.dword(10) as u8);
        let nsid = sqe.nsid();
        self.look_at_namespaces();
        let (_, namespaces) = &self.known;
        // The NVM command set alone.
        let command_set = sqe.dword(11) >> 24;
        match (cns, self.kind) {
            (Cns::CONTROLLER, _) => self.identify_controller().emit(&mut bytes),
            (Cns::NAMESPACE, ControllerKind::Io) => match namespaces.get(&nsid) {
                Some(namespace) => namespace.identify().emit(&mut bytes),
                // An inactive namespace is all zeros (NVM 4.1.5.1).
                None if (1..=NAMESPACES_MAX).contains(&nsid.0) => {}
                None => return Err(Status::INVALID_NAMESPACE),
            },
            (
                Cns::COMMAND_SET_NAMESPACE | Cns::COMMAND_SET_CONTROLLER | Cns::COMMAND_SET_ACTIVE,
                ControllerKind::Io,
            ) if command_set != 0 => return Err(Status::INVALID_FIELD),
            // Nothing that it describes is there: protection information, and limits of commands.
            (Cns::COMMAND_SET_NAMESPACE, ControllerKind::Io) => {
                if !(1..=NAMESPACES_MAX).contains(&nsid.0) {
                    return Err(Status::INVALID_NAMESPACE);
                }
            }
            (Cns::COMMAND_SET_CONTROLLER, ControllerKind::Io) => {}
            (Cns::INDEPENDENT_NAMESPACE, ControllerKind::Io) => match namespaces.get(&nsid) {
                Some(namespace) => namespace.identify_independent().emit(&mut bytes),
                None if (1..=NAMESPACES_MAX).contains(&nsid.0) => {}
                None => return Err(Status::INVALID_NAMESPACE),
            },
            // The first combination: bit 0, the NVM command set. The controller named is this one.
            (Cns::COMMAND_SETS, ControllerKind::Io) => {
                let cntlid = (sqe.dword(10) >> 16) as u16;
                if cntlid != u16::MAX && cntlid != self.association.cntlid {
                    return Err(Status::INVALID_FIELD);
                }
                bytes[0] = 1;
            }
            (Cns::ACTIVE_NAMESPACES | Cns::COMMAND_SET_ACTIVE, ControllerKind::Io) => {
                if nsid.0 >= NsId::ALL.0 - 1 {
                    return Err(Status::INVALID_NAMESPACE);
                }
                emit_namespace_list(
                    namespaces.keys().copied().filter(|known| *known > nsid),
                    &mut bytes,
                );
            }
            (Cns::NAMESPACE_IDENTIFIERS, ControllerKind::Io) => {
                let namespace = namespaces.get(&nsid).ok_or(Status::INVALID_NAMESPACE)?;
                namespace.identifiers().emit(&mut bytes);
            }
            _ => return Err(Status::INVALID_FIELD),
        }
        Ok(Executed::Send(bytes))
    }

    fn identify_controller(&self) -> IdentifyController {
        let is_io = self.kind == ControllerKind::Io;
        IdentifyController {
            serial: self.subsystem.serial().to_owned(),
            model: match self.subsystem.is_accelerator() {
                true => ACCELERATOR_MODEL.to_owned(),
                false => "rdmux".to_owned(),
            },
            firmware: env!("CARGO_PKG_VERSION").to_owned(),
            multipath: match is_io {
                true => {
                    IdentifyController::MULTIPLE_PORTS
                        | IdentifyController::MULTIPLE_CONTROLLERS
                        | IdentifyController::ASYMMETRIC_ACCESS
                }
                false => 0,
            },
            mdts: self.mdts(),
            cntlid: self.association.cntlid,
            version: self.version(),
            events: events(self.kind),
            attributes: IdentifyController::WIDE_HOST_ID,
            kind: self.kind,
            aborts: ABORTS_MAX,
            event_requests: EVENT_REQUESTS_MAX as u8,
            log_attributes: match is_io {
                true => {
                    IdentifyController::EFFECTS_LOG
                        | IdentifyController::EXTENDED_LOGS
                        | IdentifyController::SUPPORTED_LOGS
                }
                false => IdentifyController::EXTENDED_LOGS | IdentifyController::SUPPORTED_LOGS,
            },
            keep_alive: (KEEP_ALIVE_UNIT.as_millis() / 100) as u16,
            commands: self.port.entries_max,
            namespaces: if is_io { NAMESPACES_MAX } else { 0 },
            optional_commands: match is_io {
                true => {
                    IdentifyController::COMPARE
                        | IdentifyController::DATASET_MANAGEMENT
                        | IdentifyController::WRITE_ZEROES
                        | IdentifyController::RESERVATIONS
                        | IdentifyController::TIMESTAMP
                        | IdentifyController::VERIFY
                        | IdentifyController::COPY
                }
                false => 0,
            },
            fused: match is_io {
                true => IdentifyController::COMPARE_AND_WRITE,
                false => 0,
            },
            // Whatever the namespaces are now: hosts take the answer for those that come later too, and would never flush them.
            has_write_cache: is_io,
            copy_formats: if is_io { COPY_FORMATS } else { 0 },
            sgls: self.port.sgls,
            ana: match is_io {
                true => AnaLimits {
                    transition_s: ANA_TRANSITION_S,
                    capabilities: AnaLimits::ALL_STATES,
                    group_max: ANA_GROUP_MAX,
                    groups: ANA_GROUP_MAX,
                    namespaces: NAMESPACES_MAX,
                },
                false => AnaLimits::default(),
            },
            subsystem: self.subsystem.nqn().clone(),
            capsule_bytes: SQE_LEN as u32 + if is_io { self.in_capsule_bytes() } else { 0 },
        }
    }

    /// Returns its version: that of the drive which commands pass to, if it has a later one than 1.2.1, the first with all that fabrics need.
    fn version(&self) -> u32 {
        const VERSION_1_2_1: u32 = 0x1_0201;
        let drive = self.subsystem.drive();
        drive.map_or(VERSION_2_0, |drive| drive.controller.version().max(VERSION_1_2_1))
    }

    /// Returns something of each drive that takes data by RDMA itself.
    fn of_peers<T>(&self, of: impl Fn(&DriveBackend) -> T) -> Vec<T> {
        if self.port.sgls & IdentifyController::SGLS_KEYED == 0 {
            return Vec::new();
        }
        let namespaces = self.subsystem.list();
        let peers = namespaces.iter().filter_map(|namespace| namespace.backend.peer());
        peers.map(of).collect()
    }

    /// Returns the maximum bytes of a command, as a power of two of pages. One of more than a drive takes would never have room there.
    fn mdts(&self) -> u8 {
        let bytes_max = self.of_peers(DriveBackend::peer_bytes_max).into_iter().min();
        let pages = bytes_max.map(|bytes| bytes / 4096);
        let peer = pages.and_then(usize::checked_ilog2);
        // 0 is no limit.
        let mdts = peer.map_or(self.port.mdts, |peer| self.port.mdts.min(peer.max(1) as u8));
        let drive = self
            .subsystem
            .drive()
            .map(|drive| drive.controller.data_max() / 4096);
        drive.map_or(mdts, |pages| mdts.min(pages.max(2).ilog2() as u8))
    }

    /// Returns the bytes of data that capsules of I/O commands may have. Data of RDMA in a capsule are in the target's memory already: there are none
    /// where the drive's own memory is to take them.
    fn in_capsule_bytes(&self) -> u32 {
        let kinds = self.of_peers(|drive| drive.pool().kind());
        match kinds.iter().all(|kind| *kind == MemoryKind::Dram) {
            true => self.port.in_capsule_max,
            false => 0,
        }
    }

    /// Returns the completion of a command that has waited.
    pub(super) fn poll_event(&mut self, target: &Target) -> Option<(Cid, Status, u64)> {
        if let Some(done) = self.done.pop_front() {
            return Some(done);
        }
        if let Some((cid, was_aborted)) = self.association.poll_aborted() {
            return Some((cid, Status::SUCCESS, u64::from(!was_aborted)));
        }
        if let Some(done) = self.poll_own() {
            return Some(done);
        }
        let event = self.event(target)?;
        let cid = self.requests.pop_front()?;
        self.masked.push(event);
        Some((cid, Status::SUCCESS, event.result().into()))
    }

    /// Returns the completion of a command whose I/O is done.
    fn poll_own(&mut self) -> Option<(Cid, Status, u64)> {
        let done = |own: &Own| match own {
            Own::Persist { status, .. } => *status.lock(),
            Own::Pair { .. } => None,
        };
        let (at, status) = self
            .own
            .iter()
            .enumerate()
            .find_map(|(at, (_, own, _))| done(own).map(|status| (at, status)))?;
        let (cid, ..) = self.own.remove(at);
        Some((cid, status, 0))
    }

    /// Returns an event of which the host has to be told.
    fn event(&mut self, target: &Target) -> Option<AsyncEvent> {
        if !self.is_ready() || self.requests.is_empty() {
            return None;
        }
        self.look_at_namespaces();
        let wants = |of: u32| self.features.events & of != 0;
        let happened = match self.kind {
            ControllerKind::Io => [
                (
                    AsyncEvent::NamespacesChanged,
                    wants(IdentifyController::NAMESPACE_EVENTS) && !self.changed.is_empty(),
                ),
                (
                    AsyncEvent::AnaChanged,
                    wants(IdentifyController::ANA_EVENTS) && self.ana_changes != self.subsystem.ana_changes(),
                ),
                // Feature 82h decides about these.
                (AsyncEvent::ReservationChanged, self.association.has_notices()),
            ],
            ControllerKind::Discovery => {
                [(
                    AsyncEvent::DiscoveryChanged,
                    wants(IdentifyController::DISCOVERY_EVENTS)
                        && self.discovery_generation != target.generation(),
                ); 3]
            }
        };
        let event = happened
            .into_iter()
            .find(|(event, happened)| *happened && !self.masked.contains(event));
        event.map(|(event, _)| event)
    }

    /// Takes note of namespaces that have changed.
    pub(super) fn look_at_namespaces(&mut self) {
        if self.known.0 == self.subsystem.generation() {
            return;
        }
        let new = self.subsystem.namespaces();
        let (old, now) = (&self.known.1, &new.1);
        let is_same = |nsid: &NsId| match (old.get(nsid), now.get(nsid)) {
            (Some(old), Some(now)) => Arc::ptr_eq(old, now),
            _ => false,
        };
        let changed = old.keys().chain(now.keys()).filter(|nsid| !is_same(nsid));
        self.changed.extend(changed);
        self.changed.sort_unstable();
        self.changed.dedup();
        self.known = new;
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns a host's keep-alive timeout, in whole units; 0 is none, but for discovery controllers, whose hosts often just vanish.
fn timeout(kind: ControllerKind, ms: u32) -> Option<Duration> {
    let unit = KEEP_ALIVE_UNIT.as_millis() as u32;
    match (ms, kind) {
        (0, ControllerKind::Io) => None,
        (0, ControllerKind::Discovery) => Some(DISCOVERY_KEEP_ALIVE),
        _ => Some(KEEP_ALIVE_UNIT * ms.div_ceil(unit)),
    }
}

/// Returns the events that a controller reports (OAES).
const fn events(kind: ControllerKind) -> u32 {
    match kind {
        ControllerKind::Io => IdentifyController::NAMESPACE_EVENTS | IdentifyController::ANA_EVENTS,
        ControllerKind::Discovery => IdentifyController::DISCOVERY_EVENTS,
    }
}

/// Returns an I/O that the controller itself asks for.
fn own_io(namespace: Arc<SharedNamespace>, operation: Operation, own: Option<Arc<Own>>) -> Io {
    Io {
        namespace: Arc::new(Seat::new(namespace, None)),
        operation,
        offset: 0,
        length: 0,
        cid: Cid(0),
        own,
        part: None,
    }
}
