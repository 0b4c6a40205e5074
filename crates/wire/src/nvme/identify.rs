//! Data of Identify. 5.17.

use super::{Nqn, NsId};
use crate::Malformed;
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
    /// SGLs that it takes (SGLS).
    pub sgls: u32,
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
    /// ONCS: Verify.
    pub const VERIFY: u16 = 1 << 7;
    /// CMIC: several ports.
    pub const MULTIPLE_PORTS: u8 = 1;
    /// CMIC: several controllers.
    pub const MULTIPLE_CONTROLLERS: u8 = 1 << 1;
    /// OAES: the namespaces' attributes have changed.
    pub const NAMESPACE_EVENTS: u32 = 1 << 8;
    /// OAES: the discovery log has changed.
    pub const DISCOVERY_EVENTS: u32 = 1 << 31;
    /// LPA: Commands Supported and Effects.
    pub const EFFECTS_LOG: u8 = 1 << 1;
    /// LPA: offsets of log pages.
    pub const EXTENDED_LOGS: u8 = 1 << 2;
    /// CTRATT: host identifiers of 16 bytes.
    pub const WIDE_HOST_ID: u32 = 1;

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
        put(bytes, 536, &self.sgls.to_le_bytes());
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
            sgls: le32(bytes, 536),
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

fn parse_text(field: &[u8]) -> String {
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
    /// Globally unique identifier (NGUID).
    pub nguid: [u8; 16],
}

impl IdentifyNamespace {
    /// Writes [`IDENTIFY_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..IDENTIFY_LEN].fill(0);
        for at in [0, 8, 16] {
            put(bytes, at, &self.blocks.to_le_bytes());
        }
        bytes[30] = self.is_shared.into();
        // Reads of them return zeros, and Write Zeroes may deallocate.
        bytes[33] = if self.zeroes { 1 | 1 << 3 } else { 0 };
        bytes[99] = self.is_protected.into();
        put(bytes, 104, &self.nguid);
        bytes[130] = self.block_shift;
    }

    /// Parses what Identify has returned.
    ///
    /// # Errors
    /// There are fewer than [`IDENTIFY_LEN`] bytes, or blocks of another size than 512 bytes to 64 KiB.
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
            nguid,
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
    }

    /// Parses the descriptors; an identifier that is missing is zero.
    pub fn parse(mut bytes: &[u8]) -> NamespaceIdentifiers {
        let mut ids = NamespaceIdentifiers {
            nguid: [0; 16],
            uuid: [0; 16],
        };
        while let [kind, length, _, _, rest @ ..] = bytes {
            let Some((id, rest)) = rest
                .split_at_checked(usize::from(*length))
                .filter(|_| *length > 0)
            else {
                break;
            };
            match (*kind, id.try_into()) {
                (NamespaceIdentifiers::NGUID, Ok(id)) => ids.nguid = id,
                (NamespaceIdentifiers::UUID, Ok(id)) => ids.uuid = id,
                _ => {}
            }
            bytes = rest;
        }
        ids
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
