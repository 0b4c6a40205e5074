//! Data of Identify. 5.17.

use super::{Nqn, NsId};
use crate::Malformed;
use crate::accel::AcceleratorInfo;
use crate::bytes::{le16, le32, le64, need, put};

/// Bytes of every structure that Identify returns.
pub const IDENTIFY_LEN: usize = 4096;
/// Number of namespaces in a list.
const LIST_MAX: usize = IDENTIFY_LEN / 4;

/// Controller or Namespace Structure: what Identify asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cns(pub u8);

impl Cns {
    /// A namespace. NVM 4.1.5.1.
    pub const NAMESPACE: Cns = Cns(0x00);
    /// The controller. 5.17.2.1.
    pub const CONTROLLER: Cns = Cns(0x01);
    /// Active namespaces, in ascending order, behind the one named.
    pub const ACTIVE_NAMESPACES: Cns = Cns(0x02);
    /// Identifiers of a namespace. 5.17.2.3.
    pub const NAMESPACE_IDENTIFIERS: Cns = Cns(0x03);
    /// Properties of a namespace by its command set. 5.17.2.5.
    pub const COMMAND_SET_NAMESPACE: Cns = Cns(0x05);
    /// Properties of a controller by a command set. 5.17.2.6.
    pub const COMMAND_SET_CONTROLLER: Cns = Cns(0x06);
    /// Active namespaces of a command set. 5.17.2.7.
    pub const COMMAND_SET_ACTIVE: Cns = Cns(0x07);
    /// Properties of a namespace whatever its command set. 5.17.2.8.
    pub const INDEPENDENT_NAMESPACE: Cns = Cns(0x08);
    /// Combinations of command sets. 5.17.2.21.
    pub const COMMAND_SETS: Cns = Cns(0x1c);
}

/// Kind of a controller. 5.17.2.1, CNTRLTYPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ControllerKind {
    /// It has namespaces.
    Io = 1,
    /// It has the discovery log.
    Discovery = 2,
}

/// Limits of asymmetric access to namespaces (ANA). 5.17.2.1 and 8.1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnaLimits {
    /// Longest time that a change of state takes, in seconds (ANATT).
    pub transition_s: u8,
    /// States that are reported (ANACAP).
    pub capabilities: u8,
    /// Highest group id (ANAGRPMAX).
    pub group_max: u32,
    /// Number of groups (NANAGRPID).
    pub groups: u32,
    /// Most namespaces at a time (MNAN): hosts make room for the log by it.
    pub namespaces: u32,
}

impl AnaLimits {
    /// ANACAP: all five states are reported.
    pub const ALL_STATES: u8 = 0x1f;
}

/// A controller, as Identify describes it. Fields without a place here are zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentifyController {
    /// Serial number, at most 20 characters of ASCII.
    pub serial: String,
    /// Model, at most 40 characters of ASCII.
    pub model: String,
    /// Firmware revision, at most 8 characters of ASCII.
    pub firmware: String,
    /// The subsystem may have several ports and controllers, and reports asymmetric access (CMIC).
    pub multipath: u8,
    /// Most bytes of a command's data, as a power of two of pages of 4 KiB; 0 is no limit.
    pub mdts: u8,
    /// The controller.
    pub cntlid: u16,
    /// Version.
    pub version: u32,
    /// Asynchronous events that it reports (OAES).
    pub events: u32,
    /// Attributes (CTRATT).
    pub attributes: u32,
    /// Its kind.
    pub kind: ControllerKind,
    /// Aborts at a time.
    pub aborts: u8,
    /// Requests for asynchronous events at a time.
    pub event_requests: u8,
    /// Attributes of log pages (LPA).
    pub log_attributes: u8,
    /// Granularity of the keep-alive timer, in 100 ms.
    pub keep_alive: u16,
    /// Most commands at a time that a queue should hold; 0 is not told.
    pub commands: u16,
    /// Highest namespace id.
    pub namespaces: u32,
    /// Optional NVM commands (ONCS).
    pub optional_commands: u16,
    /// Fused operations (FUSES).
    pub fused: u16,
    /// There is a volatile write cache, which Flush makes durable (VWC).
    pub has_write_cache: bool,
    /// Formats of Copy (OCFS), a bit each.
    pub copy_formats: u16,
    /// SGLs that it takes (SGLS).
    pub sgls: u32,
    /// Asymmetric access; hosts look at it if [`IdentifyController::ASYMMETRIC_ACCESS`] is set.
    pub ana: AnaLimits,
    /// The subsystem's name.
    pub subsystem: Nqn,
    /// Bytes of a command with the data in its capsule.
    pub capsule_bytes: u32,
}

impl IdentifyController {
    /// SGLs are supported, without alignment.
    pub const SGLS: u32 = 1;
    /// Keyed descriptors are supported.
    pub const SGLS_KEYED: u32 = 1 << 2;
    /// The address of an SGL may be an offset within the capsule.
    pub const SGLS_OFFSET: u32 = 1 << 20;
    /// Transport SGL descriptors are supported.
    pub const SGLS_TRANSPORT: u32 = 1 << 21;
    /// ONCS: Compare.
    pub const COMPARE: u16 = 1;
    /// ONCS: Dataset Management.
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    /// ONCS: Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// ONCS: reservations.
    pub const RESERVATIONS: u16 = 1 << 5;
    /// ONCS: the timestamp feature.
    pub const TIMESTAMP: u16 = 1 << 6;
    /// ONCS: Verify.
    pub const VERIFY: u16 = 1 << 7;
    /// ONCS: Copy.
    pub const COPY: u16 = 1 << 8;
    /// FUSES: Compare and Write.
    pub const COMPARE_AND_WRITE: u16 = 1;
    /// CMIC: several ports.
    pub const MULTIPLE_PORTS: u8 = 1;
    /// CMIC: several controllers.
    pub const MULTIPLE_CONTROLLERS: u8 = 1 << 1;
    /// CMIC: the access to namespaces differs between controllers.
    pub const ASYMMETRIC_ACCESS: u8 = 1 << 3;
    /// OAES: the namespaces' attributes have changed.
    pub const NAMESPACE_EVENTS: u32 = 1 << 8;
    /// OAES: the access to namespaces has changed.
    pub const ANA_EVENTS: u32 = 1 << 11;
    /// OAES: the discovery log has changed.
    pub const DISCOVERY_EVENTS: u32 = 1 << 31;
    /// LPA: Commands Supported and Effects.
    pub const EFFECTS_LOG: u8 = 1 << 1;
    /// LPA: offsets of log pages.
    pub const EXTENDED_LOGS: u8 = 1 << 2;
    /// LPA: the logs of supported log pages and features, and the scope of commands.
    pub const SUPPORTED_LOGS: u8 = 1 << 5;
    /// CTRATT: host identifiers of 16 bytes.
    pub const WIDE_HOST_ID: u32 = 1;
    /// CTRATT: commands of any kind keep the controller alive.
    pub const TRAFFIC_KEEPS_ALIVE: u32 = 1 << 6;

    /// Writes [`IDENTIFY_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..IDENTIFY_LEN].fill(0);
        text(&mut bytes[4..24], &self.serial);
        text(&mut bytes[24..64], &self.model);
        text(&mut bytes[64..72], &self.firmware);
        bytes[76] = self.multipath;
        bytes[77] = self.mdts;
        put(bytes, 78, &self.cntlid.to_le_bytes());
        put(bytes, 80, &self.version.to_le_bytes());
        put(bytes, 92, &self.events.to_le_bytes());
        put(bytes, 96, &self.attributes.to_le_bytes());
        bytes[111] = self.kind as u8;
        // 0-based.
        bytes[258] = self.aborts - 1;
        bytes[259] = self.event_requests - 1;
        // One firmware slot, which is read only.
        bytes[260] = 3;
        bytes[261] = self.log_attributes;
        put(bytes, 320, &self.keep_alive.to_le_bytes());
        if self.kind == ControllerKind::Io {
            bytes[512] = 0x66;
            bytes[513] = 0x44;
        }
        put(bytes, 514, &self.commands.to_le_bytes());
        put(bytes, 516, &self.namespaces.to_le_bytes());
        put(bytes, 520, &self.optional_commands.to_le_bytes());
        put(bytes, 522, &self.fused.to_le_bytes());
        // A Flush of all namespaces is refused.
        bytes[525] = if self.has_write_cache { 1 | 2 << 1 } else { 0 };
        put(bytes, 534, &self.copy_formats.to_le_bytes());
        put(bytes, 536, &self.sgls.to_le_bytes());
        bytes[342] = self.ana.transition_s;
        bytes[343] = self.ana.capabilities;
        put(bytes, 344, &self.ana.group_max.to_le_bytes());
        put(bytes, 348, &self.ana.groups.to_le_bytes());
        put(bytes, 540, &self.ana.namespaces.to_le_bytes());
        self.subsystem.emit(&mut bytes[768..]);
        // In 16 bytes.
        put(bytes, 1792, &(self.capsule_bytes / 16).to_le_bytes());
        put(bytes, 1796, &1u32.to_le_bytes());
        bytes[1803] = 1;
    }

    /// Parses what Identify has returned.
    ///
    /// # Errors
    /// There are fewer than [`IDENTIFY_LEN`] bytes, the subsystem's name is invalid, or the kind of controller has no meaning here.
    pub fn parse(bytes: &[u8]) -> Result<IdentifyController, Malformed> {
        need("Identify Controller", bytes, IDENTIFY_LEN)?;
        Ok(IdentifyController {
            serial: parse_text(&bytes[4..24]),
            model: parse_text(&bytes[24..64]),
            firmware: parse_text(&bytes[64..72]),
            multipath: bytes[76],
            mdts: bytes[77],
            cntlid: le16(bytes, 78),
            version: le32(bytes, 80),
            events: le32(bytes, 92),
            attributes: le32(bytes, 96),
            kind: match bytes[111] {
                2 => ControllerKind::Discovery,
                // Before version 1.4 the field was reserved.
                0 | 1 => ControllerKind::Io,
                kind => {
                    return Err(Malformed::Undefined {
                        what: "kind of controller",
                        value: kind.into(),
                    });
                }
            },
            aborts: bytes[258].saturating_add(1),
            event_requests: bytes[259].saturating_add(1),
            log_attributes: bytes[261],
            keep_alive: le16(bytes, 320),
            commands: le16(bytes, 514),
            namespaces: le32(bytes, 516),
            optional_commands: le16(bytes, 520),
            fused: le16(bytes, 522),
            has_write_cache: bytes[525] & 1 != 0,
            copy_formats: le16(bytes, 534),
            sgls: le32(bytes, 536),
            ana: AnaLimits {
                transition_s: bytes[342],
                capabilities: bytes[343],
                group_max: le32(bytes, 344),
                groups: le32(bytes, 348),
                namespaces: le32(bytes, 540),
            },
            subsystem: Nqn::parse("name of a subsystem", &bytes[768..])?,
            capsule_bytes: le32(bytes, 1792).saturating_mul(16),
        })
    }
}

/// Writes ASCII, and spaces behind it. 1.4.2: ASCII strings are padded with spaces.
fn text(field: &mut [u8], text: &str) {
    field.fill(b' ');
    for (to, from) in field.iter_mut().zip(text.bytes()) {
        *to = if (b' '..=b'~').contains(&from) { from } else { b'?' };
    }
}

pub(super) fn parse_text(field: &[u8]) -> String {
    let shown = |byte: &u8| {
        if (b' '..=b'~').contains(byte) {
            char::from(*byte)
        } else {
            '?'
        }
    };
    let text: String = field.iter().map(shown).collect();
    text.trim_end().to_owned()
}

/// A namespace, as Identify describes it. Fields without a place here are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdentifyNamespace {
    /// Size in blocks. Its capacity and use are the same.
    pub blocks: u64,
    /// Bytes of a block as a power of two, 9 to 16.
    pub block_shift: u8,
    /// Deallocated blocks read as zeros (DLFEAT).
    pub zeroes: bool,
    /// Several controllers may have it at a time (NMIC).
    pub is_shared: bool,
    /// It takes no writes (NSATTR).
    pub is_protected: bool,
    /// Reservations (RESCAP): bit 0 persists through a loss of power, bits 6:1 the types, bit 7 keys are ignored as of version 1.3.
    pub reservations: u8,
    /// Group of namespaces that share a state of access; 0 is none (ANAGRPID).
    pub ana_group: u32,
    /// Most blocks of a source range of Copy (MSSRL), and of all ranges (MCL).
    pub copy_blocks: (u16, u32),
    /// Most source ranges of Copy, 1 to 256 (MSRC).
    pub copy_ranges: u16,
    /// Blocks that a fused Compare and Write changes at once, 1 to 65,536 (NACWU).
    pub fused_blocks: u32,
    /// Globally unique identifier (NGUID).
    pub nguid: [u8; 16],
    /// The accelerator that it is, in the vendor's part.
    pub accelerator: Option<AcceleratorInfo>,
}

impl IdentifyNamespace {
    /// NSFEAT: NACWU and its likes count, not the controller's.
    const OWN_ATOMIC_UNITS: u8 = 1 << 1;
    /// RESCAP: all types, and keys that are ignored as of version 1.3.
    pub const RESERVATION_TYPES: u8 = 0xfe;

    /// Writes [`IDENTIFY_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..IDENTIFY_LEN].fill(0);
        for at in [0, 8, 16] {
            put(bytes, at, &self.blocks.to_le_bytes());
        }
        bytes[24] = IdentifyNamespace::OWN_ATOMIC_UNITS;
        bytes[30] = self.is_shared.into();
        bytes[31] = self.reservations;
        // NACWU is 0-based, as MSRC is.
        put(
            bytes,
            38,
            &(self.fused_blocks.saturating_sub(1) as u16).to_le_bytes(),
        );
        put(bytes, 74, &self.copy_blocks.0.to_le_bytes());
        put(bytes, 76, &self.copy_blocks.1.to_le_bytes());
        bytes[80] = self.copy_ranges.saturating_sub(1) as u8;
        put(bytes, 92, &self.ana_group.to_le_bytes());
        // Reads of them return zeros, and Write Zeroes may deallocate.
        bytes[33] = if self.zeroes { 1 | 1 << 3 } else { 0 };
        bytes[99] = self.is_protected.into();
        put(bytes, 104, &self.nguid);
        bytes[130] = self.block_shift;
        if let Some(accelerator) = &self.accelerator {
            accelerator.emit(&mut bytes[AcceleratorInfo::OFFSET..]);
        }
    }

    /// Parses what Identify has returned.
    ///
    /// # Errors
    /// There are fewer than [`IDENTIFY_LEN`] bytes, blocks of another size than 512 bytes to 64 KiB, or an accelerator that cannot be.
    pub fn parse(bytes: &[u8]) -> Result<IdentifyNamespace, Malformed> {
        need("Identify Namespace", bytes, IDENTIFY_LEN)?;
        let format = 128 + 4 * usize::from(bytes[26] & 0xf);
        let block_shift = bytes[format + 2];
        let nguid: [u8; 16] = std::array::from_fn(|at| bytes[104 + at]);
        if !(9..=16).contains(&block_shift) {
            return Err(Malformed::Undefined {
                what: "size of a block as a power of two",
                value: block_shift.into(),
            });
        }
        Ok(IdentifyNamespace {
            blocks: le64(bytes, 0),
            block_shift,
            zeroes: bytes[33] & 7 == 1,
            is_shared: bytes[30] & 1 != 0,
            is_protected: bytes[99] & 1 != 0,
            reservations: bytes[31],
            ana_group: le32(bytes, 92),
            copy_blocks: (le16(bytes, 74), le32(bytes, 76)),
            copy_ranges: u16::from(bytes[80]) + 1,
            fused_blocks: match bytes[24] & IdentifyNamespace::OWN_ATOMIC_UNITS {
                0 => 1,
                _ => u32::from(le16(bytes, 38)) + 1,
            },
            nguid,
            accelerator: AcceleratorInfo::parse(&bytes[AcceleratorInfo::OFFSET..])?,
        })
    }
}

/// Identifiers of a namespace, of which hosts tell it over controllers and restarts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceIdentifiers {
    /// NGUID.
    pub nguid: [u8; 16],
    /// UUID.
    pub uuid: [u8; 16],
}

impl NamespaceIdentifiers {
    const NGUID: u8 = 2;
    const UUID: u8 = 3;
    /// The namespace's command set, 1 byte: hosts that enable all command sets want it. 0 is the NVM command set.
    const COMMAND_SET: u8 = 4;

    /// Writes [`IDENTIFY_LEN`] bytes: a descriptor for each identifier.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..IDENTIFY_LEN].fill(0);
        let kinds = [
            (NamespaceIdentifiers::NGUID, self.nguid),
            (NamespaceIdentifiers::UUID, self.uuid),
        ];
        for (descriptor, (kind, id)) in bytes.chunks_mut(20).zip(kinds) {
            put(descriptor, 0, &[kind, 16]);
            put(descriptor, 4, &id);
        }
        put(bytes, 40, &[NamespaceIdentifiers::COMMAND_SET, 1, 0, 0, 0]);
    }

    /// Parses the descriptors; an identifier that is missing is zero.
    pub fn parse(bytes: &[u8]) -> NamespaceIdentifiers {
        let mut ids = NamespaceIdentifiers {
            nguid: [0; 16],
            uuid: [0; 16],
        };
        for (kind, id) in descriptors(bytes) {
            match (kind, id.try_into()) {
                (NamespaceIdentifiers::NGUID, Ok(id)) => ids.nguid = id,
                (NamespaceIdentifiers::UUID, Ok(id)) => ids.uuid = id,
                _ => {}
            }
        }
        ids
    }

    /// Returns the command set that the descriptors name, or else 0, the NVM command set.
    pub fn command_set(bytes: &[u8]) -> u8 {
        let mut named = descriptors(bytes).filter(|(kind, _)| *kind == NamespaceIdentifiers::COMMAND_SET);
        named
            .next()
            .and_then(|(_, set)| set.first().copied())
            .unwrap_or(0)
    }
}

/// Returns type and value of each descriptor of a namespace's identifiers.
fn descriptors(mut bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let [kind, length, _, _, rest @ ..] = bytes else {
            return None;
        };
        let (id, rest) = rest
            .split_at_checked(usize::from(*length))
            .filter(|_| *length > 0)?;
        bytes = rest;
        Some((*kind, id))
    })
}

/// A namespace whatever its command set, as Identify describes it ([`Cns::INDEPENDENT_NAMESPACE`]). Fields without a place here are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndependentNamespace {
    /// Several controllers may have it at a time (NMIC).
    pub is_shared: bool,
    /// As [`IdentifyNamespace::reservations`].
    pub reservations: u8,
    /// As [`IdentifyNamespace::ana_group`].
    pub ana_group: u32,
    /// It takes no writes (NSATTR).
    pub is_protected: bool,
    /// It is ready (NSTAT).
    pub is_ready: bool,
}

impl IndependentNamespace {
    /// Writes [`IDENTIFY_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..IDENTIFY_LEN].fill(0);
        bytes[1] = self.is_shared.into();
        bytes[2] = self.reservations;
        put(bytes, 4, &self.ana_group.to_le_bytes());
        bytes[8] = self.is_protected.into();
        bytes[14] = self.is_ready.into();
    }

    /// Parses what Identify has returned.
    ///
    /// # Errors
    /// There are fewer than [`IDENTIFY_LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<IndependentNamespace, Malformed> {
        need("Identify Namespace", bytes, IDENTIFY_LEN)?;
        Ok(IndependentNamespace {
            is_shared: bytes[1] & 1 != 0,
            reservations: bytes[2],
            ana_group: le32(bytes, 4),
            is_protected: bytes[8] & 1 != 0,
            is_ready: bytes[14] & 1 != 0,
        })
    }
}

/// Writes [`IDENTIFY_LEN`] bytes: the first namespaces of an ascending sequence.
pub fn emit_namespace_list(namespaces: impl Iterator<Item = NsId>, bytes: &mut [u8]) {
    bytes[..IDENTIFY_LEN].fill(0);
    for (at, nsid) in namespaces.take(LIST_MAX).enumerate() {
        put(bytes, 4 * at, &nsid.0.to_le_bytes());
    }
}

/// Returns the namespaces of a list.
pub fn parse_namespace_list(bytes: &[u8]) -> impl Iterator<Item = NsId> {
    let ids = bytes.chunks_exact(4).take(LIST_MAX).map(|id| NsId(le32(id, 0)));
    ids.take_while(|nsid| *nsid != NsId::NONE)
}
