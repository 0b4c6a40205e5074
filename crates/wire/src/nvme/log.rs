//! Log pages and asynchronous events. 5.16 and 5.2.

use std::net::{IpAddr, SocketAddr};

use super::{Nqn, Opcode};
use crate::Malformed;
use crate::bytes::{le16, le64, need, put};

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
    /// Discovery. 5.16.1.23.
    pub const DISCOVERY: LogId = LogId(0x70);
}

/// Result of a request for asynchronous events. 5.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The attributes of namespaces have changed: [`LogId::CHANGED_NAMESPACES`].
    NamespacesChanged,
    /// The discovery log has changed.
    DiscoveryChanged,
}

impl AsyncEvent {
    /// Returns dword 0 of the completion: type in bits 2:0, information in bits 15:8, log page in bits 23:16.
    pub const fn result(self) -> u32 {
        const NOTICE: u32 = 2;
        let (information, log) = match self {
            AsyncEvent::NamespacesChanged => (0x00, LogId::CHANGED_NAMESPACES),
            AsyncEvent::DiscoveryChanged => (0xf0, LogId::DISCOVERY),
        };
        NOTICE | information << 8 | (log.0 as u32) << 16
    }
}

/// Commands supported and their effects, 4,096 bytes.
#[derive(Clone, Copy, Debug)]
pub struct EffectsLog<'a> {
    /// Admin commands.
    pub admin: &'a [Opcode],
    /// I/O commands, and whether each may change blocks.
    pub io: &'a [(Opcode, bool)],
}

impl EffectsLog<'_> {
    const SUPPORTED: u8 = 1;
    const CHANGES_BLOCKS: u8 = 1 << 1;

    /// Writes 4,096 bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..4096].fill(0);
        for opcode in self.admin {
            bytes[4 * usize::from(opcode.0)] = EffectsLog::SUPPORTED;
        }
        for (opcode, changes) in self.io {
            let effects = if *changes { EffectsLog::CHANGES_BLOCKS } else { 0 };
            bytes[1024 + 4 * usize::from(opcode.0)] = EffectsLog::SUPPORTED | effects;
        }
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
    const ANY_CONTROLLER: u16 = 0xffff;
    /// Its connections may stay: their hosts are told of changes.
    const PERSISTENT: u16 = 1 << 1;

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
        if self.kind == SubsystemKind::Discovery {
            put(bytes, 10, &DiscoveryEntry::PERSISTENT.to_le_bytes());
        }
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
            is_secure: bytes[3] & 3 == 1,
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
