//! Log pages and asynchronous events. 5.16 and 5.2.

use std::net::{IpAddr, SocketAddr};

use super::{Nqn, NsId, Opcode, ReservationNotice, Status};
use crate::Malformed;
use crate::bytes::{le16, le32, le64, need, put};

/// A log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogId(pub u8);

impl LogId {
    /// Log pages that there are. 5.16.1.1.
    pub const SUPPORTED: LogId = LogId(0x00);
    /// Errors. 5.16.1.2.
    pub const ERROR: LogId = LogId(0x01);
    /// SMART and health. 5.16.1.3.
    pub const HEALTH: LogId = LogId(0x02);
    /// Firmware slots. 5.16.1.4.
    pub const FIRMWARE: LogId = LogId(0x03);
    /// Namespaces that have changed since it was read. 5.16.1.5.
    pub const CHANGED_NAMESPACES: LogId = LogId(0x04);
    /// Commands supported and their effects. 5.16.1.6.
    pub const EFFECTS: LogId = LogId(0x05);
    /// Asymmetric access to namespaces. 5.16.1.13.
    pub const ANA: LogId = LogId(0x0c);
    /// Features that there are, and their effects. 5.16.1.18.
    pub const FEATURES: LogId = LogId(0x12);
    /// Notifications of reservations. 5.16.1.24.
    pub const RESERVATIONS: LogId = LogId(0x80);
    /// Discovery. 5.16.1.23.
    pub const DISCOVERY: LogId = LogId(0x70);
}

/// Result of a request for asynchronous events. 5.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The attributes of namespaces have changed: [`LogId::CHANGED_NAMESPACES`].
    NamespacesChanged,
    /// The access to namespaces has changed: [`LogId::ANA`].
    AnaChanged,
    /// A reservation has changed: [`LogId::RESERVATIONS`].
    ReservationChanged,
    /// The discovery log has changed.
    DiscoveryChanged,
}

impl AsyncEvent {
    /// Returns dword 0 of the completion: type in bits 2:0, information in bits 15:8, log page in bits 23:16.
    pub const fn result(self) -> u32 {
        const NOTICE: u32 = 2;
        const OF_COMMAND_SET: u32 = 6;
        let (kind, information) = match self {
            AsyncEvent::NamespacesChanged => (NOTICE, 0x00),
            AsyncEvent::AnaChanged => (NOTICE, 0x03),
            AsyncEvent::ReservationChanged => (OF_COMMAND_SET, 0x00),
            AsyncEvent::DiscoveryChanged => (NOTICE, 0xf0),
        };
        kind | information << 8 | (self.log().0 as u32) << 16
    }

    /// Returns the log that tells more.
    pub const fn log(self) -> LogId {
        match self {
            AsyncEvent::NamespacesChanged => LogId::CHANGED_NAMESPACES,
            AsyncEvent::AnaChanged => LogId::ANA,
            AsyncEvent::ReservationChanged => LogId::RESERVATIONS,
            AsyncEvent::DiscoveryChanged => LogId::DISCOVERY,
        }
    }
}

/// Commands supported and their effects, 4,096 bytes. Commands have the scope of the controller or of a namespace.
#[derive(Clone, Copy, Debug)]
pub struct EffectsLog<'a> {
    /// Admin commands.
    pub admin: &'a [Opcode],
    /// I/O commands, and whether each may change blocks.
    pub io: &'a [(Opcode, bool)],
}

impl EffectsLog<'_> {
    const SUPPORTED: u32 = 1;
    const CHANGES_BLOCKS: u32 = 1 << 1;
    const OF_NAMESPACE: u32 = 1 << 20;
    const OF_CONTROLLER: u32 = 1 << 21;

    /// Writes 4,096 bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..4096].fill(0);
        for opcode in self.admin {
            let effects = EffectsLog::SUPPORTED | EffectsLog::OF_CONTROLLER;
            put(bytes, 4 * usize::from(opcode.0), &effects.to_le_bytes());
        }
        for (opcode, changes) in self.io {
            let effects = if *changes { EffectsLog::CHANGES_BLOCKS } else { 0 };
            let effects = EffectsLog::SUPPORTED | EffectsLog::OF_NAMESPACE | effects;
            put(bytes, 1024 + 4 * usize::from(opcode.0), &effects.to_le_bytes());
        }
    }
}

/// Returns the log of supported log pages, 1,024 bytes: all of them take an offset in bytes.
pub fn supported_logs(logs: &[LogId]) -> Vec<u8> {
    let mut bytes = vec![0; 1024];
    for log in logs {
        bytes[4 * usize::from(log.0)] = 1;
    }
    bytes
}

/// A feature, as the log of features and their effects describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureEffects {
    /// Its number.
    pub feature: u8,
    /// It has a value for each namespace, else one for the controller.
    pub of_namespace: bool,
    /// It changes what the controller can do.
    pub changes_capabilities: bool,
}

/// Returns the log of features and their effects, 1,024 bytes. 5.16.1.18.
pub fn feature_effects(features: &[FeatureEffects]) -> Vec<u8> {
    let mut bytes = vec![0; 1024];
    for effects in features {
        let scope = if effects.of_namespace { 1 << 20 } else { 1 << 21 };
        let changes = u32::from(effects.changes_capabilities) << 4;
        put(
            &mut bytes,
            4 * usize::from(effects.feature),
            &(1u32 | changes | scope).to_le_bytes(),
        );
    }
    bytes
}

/// SMART and health of a controller that wears nothing out. 5.16.1.3. Fields without a place here are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HealthLog {
    /// Bytes read, of which the log counts thousands of 512.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Commands that read.
    pub reads: u64,
    /// Commands that wrote.
    pub writes: u64,
    /// Hours since the start.
    pub power_on_hours: u64,
    /// Commands that failed at the medium.
    pub media_errors: u64,
}

impl HealthLog {
    const UNIT: u64 = 512 * 1000;

    /// Returns the log, 512 bytes.
    pub fn emit(&self) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        // Available spare in percent, and its threshold.
        bytes[3] = 100;
        bytes[4] = 10;
        // Rounded up.
        put(
            &mut bytes,
            32,
            &self.read_bytes.div_ceil(HealthLog::UNIT).to_le_bytes(),
        );
        put(
            &mut bytes,
            48,
            &self.written_bytes.div_ceil(HealthLog::UNIT).to_le_bytes(),
        );
        put(&mut bytes, 64, &self.reads.to_le_bytes());
        put(&mut bytes, 80, &self.writes.to_le_bytes());
        put(&mut bytes, 128, &self.power_on_hours.to_le_bytes());
        put(&mut bytes, 160, &self.media_errors.to_le_bytes());
        bytes
    }
}

/// State of the access to the namespaces of a group by a controller. 8.1.3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AnaState {
    /// The best way to them.
    #[default]
    Optimized = 1,
    /// It works, and another way may be better.
    NonOptimized = 2,
    /// Commands fail: another way has to be taken.
    Inaccessible = 3,
    /// Commands fail, for ever.
    PersistentLoss = 4,
    /// The state is changing: commands fail, and are to be repeated.
    Change = 5,
}

impl AnaState {
    /// Returns the state with a number.
    pub fn new(number: u8) -> Option<AnaState> {
        [
            AnaState::Optimized,
            AnaState::NonOptimized,
            AnaState::Inaccessible,
            AnaState::PersistentLoss,
            AnaState::Change,
        ]
        .into_iter()
        .find(|state| *state as u8 == number)
    }

    /// Returns the status of commands that need the namespaces, unless they work.
    pub const fn refusal(self) -> Option<Status> {
        match self {
            AnaState::Optimized | AnaState::NonOptimized => None,
            AnaState::Inaccessible => Some(Status::ANA_INACCESSIBLE),
            AnaState::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
            AnaState::Change => Some(Status::ANA_TRANSITION),
        }
    }
}

/// A group of namespaces in the log of asymmetric access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaGroup {
    /// Its id, not 0.
    pub id: u32,
    /// Number of changes of the log when it changed last; 0 is not told.
    pub changes: u64,
    /// Its state.
    pub state: AnaState,
    /// Its namespaces, in ascending order.
    pub namespaces: Vec<NsId>,
}

/// The log of asymmetric access. 5.16.1.13.
///
/// ```text
///  0  number of changes u64 | number of groups u16
/// 16  each group: id u32 | number of namespaces u32 | changes u64 | state u8 @16; behind 32 bytes the ids of its namespaces, u32
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnaLog {
    /// Number of changes.
    pub changes: u64,
    /// The groups, in ascending order.
    pub groups: Vec<AnaGroup>,
}

impl AnaLog {
    /// Returns the log, without the namespaces if the host has asked only for groups (RGO).
    pub fn emit(&self, groups_only: bool) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        put(&mut bytes, 0, &self.changes.to_le_bytes());
        put(&mut bytes, 8, &(self.groups.len() as u16).to_le_bytes());
        for group in &self.groups {
            let namespaces = if groups_only { &[][..] } else { &group.namespaces };
            let at = bytes.len();
            bytes.resize(at + 32, 0);
            put(&mut bytes, at, &group.id.to_le_bytes());
            put(&mut bytes, at + 4, &(namespaces.len() as u32).to_le_bytes());
            put(&mut bytes, at + 8, &group.changes.to_le_bytes());
            bytes[at + 16] = group.state as u8;
            bytes.extend(namespaces.iter().flat_map(|nsid| nsid.0.to_le_bytes()));
        }
        bytes
    }

    /// Parses a log.
    ///
    /// # Errors
    /// It is shorter than its groups, or a state has no meaning.
    pub fn parse(bytes: &[u8]) -> Result<AnaLog, Malformed> {
        const WHAT: &str = "log of asymmetric access";
        need(WHAT, bytes, 16)?;
        let mut rest = &bytes[16..];
        let mut groups = Vec::new();
        for _ in 0..le16(bytes, 8) {
            need(WHAT, rest, 32)?;
            let (header, behind) = rest.split_at(32);
            let number = le32(header, 4) as usize;
            need(WHAT, behind, number.saturating_mul(4))?;
            let (ids, behind) = behind.split_at(4 * number);
            let state = AnaState::new(header[16] & 0xf).ok_or(Malformed::Undefined {
                what: "state of asymmetric access",
                value: header[16].into(),
            })?;
            groups.push(AnaGroup {
                id: le32(header, 0),
                changes: le64(header, 8),
                state,
                namespaces: ids.chunks_exact(4).map(|id| NsId(le32(id, 0))).collect(),
            });
            rest = behind;
        }
        Ok(AnaLog {
            changes: le64(bytes, 0),
            groups,
        })
    }
}

/// An entry of the log of reservation notifications, 64 bytes. 5.16.1.24.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationNotification {
    /// Number of the entry, from 1 on; 0 if there is none.
    pub count: u64,
    /// The notification.
    pub notice: Option<ReservationNotice>,
    /// Entries behind this one.
    pub available: u8,
    /// The namespace.
    pub nsid: NsId,
}

impl ReservationNotification {
    /// Returns the log.
    pub fn emit(&self) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        put(&mut bytes, 0, &self.count.to_le_bytes());
        bytes[8] = self.notice.map_or(0, |notice| notice as u8);
        bytes[9] = self.available;
        put(&mut bytes, 12, &self.nsid.0.to_le_bytes());
        bytes
    }
}

/// Bytes of the discovery log before its entries.
pub const DISCOVERY_HEADER_LEN: usize = 1024;
/// Bytes of an entry of the discovery log.
pub const DISCOVERY_ENTRY_LEN: usize = 1024;

/// Beginning of the discovery log. 5.16.1.23.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscoveryHeader {
    /// Changes with the log, so that who reads it in parts notices.
    pub generation: u64,
    /// Number of entries.
    pub entries: u64,
}

impl DiscoveryHeader {
    /// Parses the beginning of a log.
    ///
    /// # Errors
    /// It is too short.
    pub fn parse(bytes: &[u8]) -> Result<DiscoveryHeader, Malformed> {
        need("discovery log", bytes, 18)?;
        Ok(DiscoveryHeader {
            generation: le64(bytes, 0),
            entries: le64(bytes, 8),
        })
    }

    /// Writes [`DISCOVERY_HEADER_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..DISCOVERY_HEADER_LEN].fill(0);
        put(bytes, 0, &self.generation.to_le_bytes());
        put(bytes, 8, &self.entries.to_le_bytes());
    }
}

/// Transport of an entry (TRTYPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum TransportKind {
    /// RDMA.
    Rdma = 1,
    /// TCP.
    Tcp = 3,
}

/// Kind of the subsystem of an entry (SUBTYPE).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SubsystemKind {
    /// Another discovery service.
    Referral = 1,
    /// A subsystem with namespaces.
    Nvm = 2,
    /// The discovery service that is asked.
    Discovery = 3,
}

/// An entry of the discovery log: a way to a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// The transport.
    pub transport: TransportKind,
    /// The kind of subsystem.
    pub kind: SubsystemKind,
    /// Connections need TLS or another secure channel (TREQ).
    pub is_secure: bool,
    /// Its properties (EFLAGS): [`DiscoveryEntry::SAME_LOG`], [`DiscoveryEntry::PERSISTENT`].
    pub flags: u16,
    /// The port's number in the subsystem.
    pub port: u16,
    /// Entries of an admin submission queue.
    pub admin_queue_entries: u16,
    /// The address.
    pub address: SocketAddr,
    /// The subsystem.
    pub subsystem: Nqn,
}

impl DiscoveryEntry {
    /// Whoever asks there gets the same log as by all other entries with this flag (DUPRETINFO).
    pub const SAME_LOG: u16 = 1 << 0;
    /// Connections to the discovery service may stay: their hosts are told of changes (EPCSD).
    pub const PERSISTENT: u16 = 1 << 1;
    const ANY_CONTROLLER: u16 = 0xffff;

    /// Writes [`DISCOVERY_ENTRY_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..DISCOVERY_ENTRY_LEN].fill(0);
        bytes[0] = self.transport as u8;
        bytes[1] = match self.address {
            SocketAddr::V4(_) => 1,
            SocketAddr::V6(_) => 2,
        };
        bytes[2] = self.kind as u8;
        // Bits 1:0: 1 required, 2 not required; bit 2: the flow control of submission queues may be off.
        bytes[3] = 1 << 2 | if self.is_secure { 1 } else { 2 };
        put(bytes, 4, &self.port.to_le_bytes());
        put(bytes, 6, &DiscoveryEntry::ANY_CONTROLLER.to_le_bytes());
        put(bytes, 8, &self.admin_queue_entries.to_le_bytes());
        put(bytes, 10, &self.flags.to_le_bytes());
        field(&mut bytes[32..64], &self.address.port().to_string());
        self.subsystem.emit(&mut bytes[256..]);
        field(&mut bytes[512..768], &self.address.ip().to_string());
        match self.transport {
            // Reliable connected, RoCEv2, RDMA_CM.
            TransportKind::Rdma => put(bytes, 768, &[1, 4, 1]),
            TransportKind::Tcp => bytes[768] = u8::from(self.is_secure) * 2,
        }
    }

    /// Parses an entry.
    ///
    /// # Errors
    /// It is too short, has a transport or kind without a meaning here, an invalid address or an invalid name.
    pub fn parse(bytes: &[u8]) -> Result<DiscoveryEntry, Malformed> {
        need("entry of the discovery log", bytes, DISCOVERY_ENTRY_LEN)?;
        let undefined = |what, value: u8| Malformed::Undefined {
            what,
            value: value.into(),
        };
        let text = |at: usize, len: usize| {
            let field = &bytes[at..at + len];
            let end = field.iter().rposition(|byte| !matches!(byte, 0 | b' '));
            std::str::from_utf8(&field[..end.map_or(0, |end| end + 1)]).unwrap_or("")
        };
        let ip: IpAddr = text(512, 256)
            .parse()
            .map_err(|_| undefined("address", bytes[512]))?;
        let port: u16 = text(32, 32).parse().map_err(|_| undefined("port", bytes[32]))?;
        Ok(DiscoveryEntry {
            transport: match bytes[0] {
                1 => TransportKind::Rdma,
                3 => TransportKind::Tcp,
                other => return Err(undefined("transport", other)),
            },
            kind: match bytes[2] {
                1 => SubsystemKind::Referral,
                2 => SubsystemKind::Nvm,
                3 => SubsystemKind::Discovery,
                other => return Err(undefined("kind of subsystem", other)),
            },
            // Some targets say it in one of both alone: TREQ, and the security type of TCP (NVMe/TCP 3.6.1.2).
            is_secure: bytes[3] & 3 == 1 || (bytes[0] == TransportKind::Tcp as u8 && bytes[768] == 2),
            flags: le16(bytes, 10),
            port: le16(bytes, 4),
            admin_queue_entries: le16(bytes, 8),
            address: SocketAddr::new(ip, port),
            subsystem: Nqn::parse("name of a subsystem", &bytes[256..])?,
        })
    }
}

/// Writes ASCII, and zeros behind it.
fn field(bytes: &mut [u8], text: &str) {
    bytes[..text.len()].copy_from_slice(text.as_bytes());
}
