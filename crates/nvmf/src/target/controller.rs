//! A controller: registers, admin commands, keep-alive and events. Its admin queue owns it.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdmux_wire::nvme::{
    AsyncEvent, Capabilities, Cid, Cns, Configuration, ControllerKind, EffectsLog, FabricsType, IDENTIFY_LEN,
    IdentifyController, LogId, NsId, Opcode, Property, Register, SQE_LEN, Sqe, Status, VERSION_1_4,
    emit_namespace_list,
};

use super::discovery;
use super::io::{Io, Operation, SUPPORTED};
use super::queue::{Executed, Port};
use super::subsystem::{Association, NAMESPACES_MAX, Namespace, Namespaces, Subsystem, Target};

/// Requests for asynchronous events at a time.
const EVENT_REQUESTS_MAX: usize = 4;
/// Longest time to become ready, in 500 ms: hosts wait so long for CSTS.RDY.
const READY_TIMEOUT: u8 = 15;
/// Granularity of the keep-alive timer.
const KEEP_ALIVE_UNIT: Duration = Duration::from_millis(100);
/// A host's timeout begins when it sends: the controller waits this much longer.
const KEEP_ALIVE_GRACE: Duration = Duration::from_secs(1);
/// Keep-alive timeout of discovery controllers whose hosts name none, as that of Linux's target.
const DISCOVERY_KEEP_ALIVE: Duration = Duration::from_secs(120);
/// Data that an admin command takes at most.
const ADMIN_DATA_MAX: u32 = 128 << 10;

/// Features. 5.27.1.
mod feature {
    pub(super) const NUMBER_OF_QUEUES: u8 = 0x07;
    pub(super) const ASYNC_EVENTS: u8 = 0x0b;
    pub(super) const KEEP_ALIVE: u8 = 0x0f;
    pub(super) const HOST_ID: u8 = 0x81;
}

/// Controller status. 3.1.3.6.
mod status {
    pub(super) const READY: u64 = 1;
    pub(super) const FATAL: u64 = 1 << 1;
    pub(super) const SHUTDOWN_OCCURRING: u64 = 1 << 2;
    pub(super) const SHUTDOWN_COMPLETE: u64 = 2 << 2;
}

/// A controller of a subsystem.
#[derive(Debug)]
pub struct Controller {
    kind: ControllerKind,
    subsystem: Arc<Subsystem>,
    association: Arc<Association>,
    port: Port,
    configuration: Configuration,
    /// CSTS.
    state: u64,
    /// It is ready once no I/O runs that was sent before.
    is_enabling: bool,
    /// Its I/O queues are over, which the transport has not been told.
    was_reset: bool,
    /// Namespaces to be flushed before a shutdown is complete.
    to_flush: Vec<Arc<Namespace>>,
    /// Flushes that run.
    flushing: usize,
    keep_alive: Option<Duration>,
    heard: Instant,
    /// Requests for asynchronous events.
    requests: VecDeque<Cid>,
    /// Events that the host wants to hear about.
    events: u32,
    /// The namespaces of which the host knows, and their generation.
    known: (u64, Namespaces),
    /// Namespaces that have changed since the host has read the log of them.
    changed: Vec<NsId>,
    /// The host has not been told of an event, or has not read the log of the last one.
    is_event_masked: bool,
    discovery_generation: u64,
}

impl Controller {
    pub(super) fn new(
        kind: ControllerKind,
        subsystem: Arc<Subsystem>,
        association: Arc<Association>,
        port: Port,
        keep_alive_ms: u32,
        discovery_generation: u64,
        now: Instant,
    ) -> Controller {
        let known = subsystem.namespaces();
        Controller {
            kind,
            subsystem,
            association,
            port,
            configuration: Configuration::default(),
            state: 0,
            is_enabling: false,
            was_reset: false,
            to_flush: Vec::new(),
            flushing: 0,
            keep_alive: timeout(kind, keep_alive_ms),
            heard: now,
            requests: VecDeque::new(),
            events: 0,
            known,
            changed: Vec::new(),
            is_event_masked: false,
            discovery_generation,
        }
    }

    /// The host has sent something.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        Some(self.heard + self.keep_alive? + KEEP_ALIVE_GRACE)
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
            // Set Features takes no data but for features that are not supported, so they are dropped.
            true if data_len <= ADMIN_DATA_MAX => Ok(data_len),
            true => Err(Status::SGL_LENGTH_INVALID.do_not_retry()),
            false => Ok(0),
        }
    }

    pub(super) fn execute(
        &mut self,
        sqe: &Sqe,
        target: &Target,
        local: IpAddr,
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
            Opcode::GET_LOG_PAGE => self.log_page(sqe, target, local),
            Opcode::SET_FEATURES => self.set_features(sqe, now),
            Opcode::GET_FEATURES => self.get_features(sqe),
            Opcode::ASYNC_EVENT_REQUEST => match self.requests.len() < EVENT_REQUESTS_MAX {
                true => {
                    self.requests.push_back(sqe.cid());
                    Ok(Executed::Wait)
                }
                false => Err(Status::EVENT_LIMIT),
            },
            // Bit 0: the command was not aborted. It runs on another queue, or is done soon.
            Opcode::ABORT => Ok(Executed::Done(1)),
            _ => Err(Status::INVALID_OPCODE),
        };
        executed.map_err(|status| (status.do_not_retry(), 0))
    }

    fn property_get(&mut self, property: Property) -> Result<Executed, Status> {
        self.look_at_readiness();
        let value = match (property.register, property.is_wide) {
            (Register::CAPABILITIES, true) => Capabilities {
                queue_entries: self.port.entries_max.into(),
                timeout: READY_TIMEOUT,
            }
            .register(),
            (Register::VERSION, false) => VERSION_1_4.into(),
            (Register::CONFIGURATION, false) => self.configuration.0.into(),
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
            self.state = if is_supported { 0 } else { status::FATAL };
        }
        if !new.is_enabled() && old.is_enabled() {
            self.reset();
        }
        if new.is_shutting_down() && !old.is_shutting_down() {
            self.reset();
            self.state = status::SHUTDOWN_OCCURRING;
            let all = self.subsystem.list().into_iter();
            self.to_flush = all
                .filter(|namespace| namespace.backend.has_write_cache())
                .collect();
            self.look_at_shutdown();
        }
        self.look_at_readiness();
        Ok(Executed::Done(0))
    }

    fn reset(&mut self) {
        self.state = 0;
        self.is_enabling = false;
        self.events = 0;
        self.requests.clear();
        self.changed.clear();
        self.is_event_masked = false;
        self.association.reset();
        self.was_reset = true;
    }

    pub(super) fn take_reset(&mut self) -> bool {
        std::mem::take(&mut self.was_reset)
    }

    fn look_at_readiness(&mut self) {
        let is_quiet = || self.association.is_quiet() && self.subsystem.is_quiet(&self.association.host_id);
        if self.is_enabling && is_quiet() {
            self.is_enabling = false;
            self.state = status::READY;
            self.association.is_ready.store(true, Ordering::Release);
        }
    }

    pub(super) fn poll_flush(&mut self) -> Option<Io> {
        let namespace = self.to_flush.pop()?;
        self.flushing += 1;
        Some(Io {
            namespace,
            operation: Operation::Flush,
            offset: 0,
            length: 0,
            session: None,
        })
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
        if is_occurring && self.to_flush.is_empty() && self.flushing == 0 {
            self.state ^= status::SHUTDOWN_OCCURRING | status::SHUTDOWN_COMPLETE;
        }
    }

    fn identify(&mut self, sqe: &Sqe) -> Result<Executed, Status> {
        let mut bytes = vec![0; IDENTIFY_LEN];
        let cns = Cns(sqe.dword(10) as u8);
        let nsid = sqe.nsid();
        self.look_at_namespaces();
        let (_, namespaces) = &self.known;
        match (cns, self.kind) {
            (Cns::CONTROLLER, _) => self.identify_controller().emit(&mut bytes),
            (Cns::NAMESPACE, ControllerKind::Io) => match namespaces.get(&nsid) {
                Some(namespace) => namespace.identify().emit(&mut bytes),
                // An inactive namespace is all zeros (NVM 4.1.5.1).
                None if (1..=NAMESPACES_MAX).contains(&nsid.0) => {}
                None => return Err(Status::INVALID_NAMESPACE),
            },
            (Cns::ACTIVE_NAMESPACES, ControllerKind::Io) => {
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
            model: "rdmux".to_owned(),
            firmware: env!("CARGO_PKG_VERSION").to_owned(),
            multipath: match is_io {
                true => IdentifyController::MULTIPLE_PORTS | IdentifyController::MULTIPLE_CONTROLLERS,
                false => 0,
            },
            mdts: self.port.mdts,
            cntlid: self.association.cntlid,
            version: VERSION_1_4,
            events: events(self.kind),
            attributes: IdentifyController::WIDE_HOST_ID,
            kind: self.kind,
            aborts: 4,
            event_requests: EVENT_REQUESTS_MAX as u8,
            log_attributes: match is_io {
                true => IdentifyController::EFFECTS_LOG | IdentifyController::EXTENDED_LOGS,
                false => IdentifyController::EXTENDED_LOGS,
            },
            keep_alive: (KEEP_ALIVE_UNIT.as_millis() / 100) as u16,
            commands: self.port.entries_max,
            namespaces: if is_io { NAMESPACES_MAX } else { 0 },
            optional_commands: match is_io {
                true => {
                    IdentifyController::COMPARE
                        | IdentifyController::WRITE_ZEROES
                        | IdentifyController::VERIFY
                }
                false => 0,
            },
            fused: 0,
            has_write_cache: self
                .known
                .1
                .values()
                .any(|namespace| namespace.backend.has_write_cache()),
            sgls: self.port.sgls,
            subsystem: self.subsystem.nqn().clone(),
            capsule_bytes: SQE_LEN as u32 + if is_io { self.port.in_capsule_max } else { 0 },
        }
    }

    fn log_page(&mut self, sqe: &Sqe, target: &Target, local: IpAddr) -> Result<Executed, Status> {
        let log = LogId(sqe.dword(10) as u8);
        // Retain Asynchronous Event.
        let retains = sqe.dword(10) & 1 << 15 != 0;
        let dwords = u64::from(sqe.dword(10) >> 16) | u64::from(sqe.dword(11) & 0xffff) << 16;
        let length = (dwords + 1) * 4;
        let offset = u64::from(sqe.dword(12)) | u64::from(sqe.dword(13)) << 32;
        let discovery_generation = target.generation();
        let page = match (log, self.kind) {
            (LogId::DISCOVERY, ControllerKind::Discovery) => {
                discovery::log(target, &self.association.host, local)
            }
            (LogId::ERROR, _) => vec![0; 64],
            (LogId::HEALTH, ControllerKind::Io) => health(),
            (LogId::FIRMWARE, ControllerKind::Io) => firmware(),
            (LogId::EFFECTS, ControllerKind::Io) => effects(),
            (LogId::CHANGED_NAMESPACES, ControllerKind::Io) => {
                let mut bytes = vec![0; IDENTIFY_LEN];
                emit_namespace_list(self.changed.iter().copied(), &mut bytes);
                bytes
            }
            _ => return Err(Status::INVALID_LOG),
        };
        if length > self.port.data_max().into() || offset % 4 != 0 || offset > page.len() as u64 {
            return Err(Status::INVALID_FIELD);
        }
        if !retains {
            match log {
                LogId::DISCOVERY => self.discovery_generation = discovery_generation,
                LogId::CHANGED_NAMESPACES => self.changed.clear(),
                _ => {}
            }
            self.is_event_masked &= !matches!(log, LogId::DISCOVERY | LogId::CHANGED_NAMESPACES);
        }
        let mut part = page[offset as usize..].to_vec();
        part.resize(length as usize, 0);
        Ok(Executed::Send(part))
    }

    fn set_features(&mut self, sqe: &Sqe, now: Instant) -> Result<Executed, Status> {
        let (feature, saves) = (sqe.dword(10) as u8, sqe.dword(10) >> 31 != 0);
        if saves {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        let value = sqe.dword(11);
        match (feature, self.kind) {
            (feature::NUMBER_OF_QUEUES, ControllerKind::Io) => {
                let (submission, completion) = (value & 0xffff, value >> 16);
                if submission == 0xffff || completion == 0xffff {
                    return Err(Status::INVALID_FIELD);
                }
                let most = u32::from(self.association.queues_max) - 1;
                let queues = submission.min(completion).min(most);
                Ok(Executed::Done((queues | queues << 16).into()))
            }
            (feature::ASYNC_EVENTS, kind) => {
                if value & !events(kind) != 0 {
                    return Err(Status::INVALID_FIELD);
                }
                self.events = value;
                Ok(Executed::Done(0))
            }
            (feature::KEEP_ALIVE, _) => {
                self.keep_alive = timeout(self.kind, value);
                self.heard = now;
                Ok(Executed::Done(0))
            }
            // It is Connect's.
            (feature::HOST_ID, _) => Err(Status::COMMAND_SEQUENCE_ERROR),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    fn get_features(&self, sqe: &Sqe) -> Result<Executed, Status> {
        let (feature, select) = (sqe.dword(10) as u8, sqe.dword(10) >> 8 & 7);
        // The current value only: nothing is saved.
        if select != 0 {
            return Err(Status::INVALID_FIELD);
        }
        let value = match (feature, self.kind) {
            (feature::NUMBER_OF_QUEUES, ControllerKind::Io) => {
                let queues = u64::from(self.association.queues_max) - 1;
                queues | queues << 16
            }
            (feature::ASYNC_EVENTS, _) => self.events.into(),
            (feature::KEEP_ALIVE, _) => self.keep_alive.map_or(0, |time| time.as_millis() as u64),
            (feature::HOST_ID, _) => return Ok(Executed::Send(self.association.host_id.0.to_vec())),
            _ => return Err(Status::INVALID_FIELD),
        };
        Ok(Executed::Done(value))
    }

    /// Returns the request that an event completes, and the event.
    pub(super) fn poll_event(&mut self, target: &Target) -> Option<(Cid, AsyncEvent)> {
        if !self.is_ready() {
            return None;
        }
        let event = match self.kind {
            ControllerKind::Io => {
                self.look_at_namespaces();
                (!self.changed.is_empty()).then_some(AsyncEvent::NamespacesChanged)
            }
            ControllerKind::Discovery => {
                (self.discovery_generation != target.generation()).then_some(AsyncEvent::DiscoveryChanged)
            }
        }?;
        if self.is_event_masked || self.events & events(self.kind) == 0 {
            return None;
        }
        let cid = self.requests.pop_front()?;
        self.is_event_masked = true;
        Some((cid, event))
    }

    /// Takes note of namespaces that have changed.
    fn look_at_namespaces(&mut self) {
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
        self.subsystem.dissociate(&self.association);
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
        ControllerKind::Io => IdentifyController::NAMESPACE_EVENTS,
        ControllerKind::Discovery => IdentifyController::DISCOVERY_EVENTS,
    }
}

/// SMART and health: nothing is wrong, and nothing is measured.
fn health() -> Vec<u8> {
    let mut bytes = vec![0; 512];
    // Available spare in percent, and its threshold.
    bytes[3] = 100;
    bytes[4] = 10;
    bytes
}

/// Firmware slots: the first runs.
fn firmware() -> Vec<u8> {
    let mut bytes = vec![0; 512];
    bytes[0] = 1;
    let revision = env!("CARGO_PKG_VERSION").as_bytes();
    let len = revision.len().min(8);
    bytes[8..16].fill(b' ');
    bytes[8..8 + len].copy_from_slice(&revision[..len]);
    bytes
}

fn effects() -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    EffectsLog {
        admin: &[
            Opcode::GET_LOG_PAGE,
            Opcode::IDENTIFY,
            Opcode::ABORT,
            Opcode::SET_FEATURES,
            Opcode::GET_FEATURES,
            Opcode::ASYNC_EVENT_REQUEST,
            Opcode::KEEP_ALIVE,
        ],
        io: &SUPPORTED,
    }
    .emit(&mut bytes);
    bytes
}
