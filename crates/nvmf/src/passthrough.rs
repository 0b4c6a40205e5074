//! A drive's own controller behind the target: commands of hosts reach it as they are, by the kernel's driver, and its answers come back so.
//!
//! [`rules`] says which commands do; [`identify`] what the target changes in what the drive tells of itself. A host is trusted with the blocks of the drive, and with
//! nothing else: the drive moves data of its commands to and from a buffer of the target that is as long as the command says.

mod identify;
mod rules;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rdmux_drive::CommandPath;
use rdmux_runtime::{Direction, Pages};
use rdmux_wire::nvme::{
    Cid, Cns, Copy, CopyRange, DatasetRange, IDENTIFY_LEN, NamespaceIdentifiers, NsId, Opcode, Rw, Sqe,
    Status,
};

use crate::backend::{Backend, pause};
use crate::target::{COPY_BYTES_MAX, Fence, NAMESPACES_MAX};
use rules::Facts;
pub(crate) use rules::Kind;
pub use rules::{Pass, Transfer};

/// Time for a command that the target itself asks for.
const OWN_TIMEOUT: Duration = Duration::from_secs(60);

/// Commands that pass only where the user has named them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allow {
    /// Format NVM, which ends all data of a namespace.
    pub format: bool,
    /// Sanitize, which ends all data of the drive.
    pub sanitize: bool,
    /// Firmware Image Download and Firmware Commit.
    pub firmware: bool,
    /// Vendor's commands of which nothing tells how much they move.
    pub vendor: bool,
}

impl Allow {
    /// The words, in the order in which they are shown.
    fn words(&self) -> [(&'static str, bool); 4] {
        [
            ("format", self.format),
            ("sanitize", self.sanitize),
            ("firmware", self.firmware),
            ("vendor", self.vendor),
        ]
    }
}

impl FromStr for Allow {
    type Err = String;

    /// Parses words with a plus sign between them.
    fn from_str(text: &str) -> Result<Allow, String> {
        let mut allow = Allow::default();
        for word in text.split('+') {
            match word {
                "format" => allow.format = true,
                "sanitize" => allow.sanitize = true,
                "firmware" => allow.firmware = true,
                "vendor" => allow.vendor = true,
                _ => {
                    return Err(format!(
                        "'{word}' is nothing to allow: give format, sanitize, firmware or vendor, or several with + between them"
                    ));
                }
            }
        }
        Ok(allow)
    }
}

/// A drive's controller as a user names it: `/dev/nvme0`, and behind it `,allow=format+sanitize+firmware+vendor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerConfig {
    /// Its character device.
    pub path: PathBuf,
    /// Commands that pass besides the others.
    pub allow: Allow,
}

impl FromStr for ControllerConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<ControllerConfig, String> {
        let mut parts = text.split(',');
        let path = parts.next().filter(|path| !path.is_empty());
        let path = path.ok_or("no controller given: name one as /dev/nvme0")?;
        let mut allow = Allow::default();
        for option in parts {
            let words = option.strip_prefix("allow=");
            let words =
                words.ok_or_else(|| format!("'{option}' is not allow=format+sanitize+firmware+vendor"))?;
            allow = words.parse()?;
        }
        Ok(ControllerConfig {
            path: path.into(),
            allow,
        })
    }
}

impl fmt::Display for ControllerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path.display().fmt(f)?;
        let words = self.allow.words().into_iter();
        let words: Vec<_> = words
            .filter_map(|(word, is_allowed)| is_allowed.then_some(word))
            .collect();
        match words.is_empty() {
            true => Ok(()),
            false => write!(f, ",allow={}", words.join("+")),
        }
    }
}

/// Reason for which a controller's namespaces are not exported.
#[derive(Debug, thiserror::Error)]
pub enum PassthroughError {
    /// It does not tell of itself.
    #[error("the drive does not answer Identify: {0}")]
    Identify(Status),
    /// It has no namespace.
    #[error("it has no namespace")]
    Empty,
    /// The id of a namespace is too high.
    #[error("namespace {0} has an id above {NAMESPACES_MAX}")]
    Id(NsId),
    /// A namespace has metadata.
    #[error("namespace {0} has metadata in its blocks, which is not exported: format it without")]
    Metadata(NsId),
    /// A namespace has blocks of another size.
    #[error("namespace {0} has no blocks of 512 bytes to 64 KiB")]
    Blocks(NsId),
    /// A namespace is of another command set.
    #[error("namespace {0} is not of the NVM command set")]
    CommandSet(NsId),
}

/// Blocks of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Geometry {
    blocks: u64,
    /// Bytes of a block as a power of two, 9 to 16; 0 if no host can use the blocks.
    block_shift: u8,
}

/// A format of blocks: bytes as a power of two, and bytes of metadata.
type BlockFormat = (u8, u16);

/// Returns a format of what Identify tells of a namespace. NVM 4.1.5.1.
fn block_format(bytes: &[u8], index: usize) -> BlockFormat {
    let at = 128 + 4 * (index & 0x3f);
    (bytes[at + 2], u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// A namespace of the controller, which only it and the target use.
#[derive(Debug)]
pub(crate) struct PassedNamespace {
    path: Arc<dyn CommandPath>,
    nsid: NsId,
    /// Blocks in bits 63:8, which NVMe allows to be fewer than 2^56, shift in bits 7:0.
    geometry: AtomicU64,
    /// Keeps commands of blocks apart from a Format: one that was checked against another size of the blocks would move more than its buffer. All
    /// namespaces have it in common, since a drive may format all where one is named (FNA).
    formatting: Arc<Fence>,
}

/// A command of blocks, whose size stays as it is until this is dropped.
struct Begun<'a>(&'a Fence);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.0.leave(0);
    }
}

impl PassedNamespace {
    fn new(
        path: Arc<dyn CommandPath>,
        nsid: NsId,
        formatting: Arc<Fence>,
    ) -> Result<PassedNamespace, PassthroughError> {
        let namespace = PassedNamespace {
            path,
            nsid,
            geometry: AtomicU64::new(0),
            formatting,
        };
        let bytes = namespace.identify(Cns::NAMESPACE_IDENTIFIERS);
        // Before version 1.3 there is no such list.
        if bytes.is_ok_and(|bytes| NamespaceIdentifiers::command_set(&bytes) != 0) {
            return Err(PassthroughError::CommandSet(nsid));
        }
        namespace.measure()?;
        Ok(namespace)
    }

    fn identify(&self, cns: Cns) -> Result<Vec<u8>, Status> {
        identify(&*self.path, cns, self.nsid)
    }

    /// Learns the size and the number of its blocks. If hosts cannot use them, none can from then on.
    fn measure(&self) -> Result<(), PassthroughError> {
        let measured = self.identify(Cns::NAMESPACE).map_err(PassthroughError::Identify);
        let geometry = measured.and_then(|bytes| {
            // FLBAS: bits 3:0, and above these 6:5.
            let index = usize::from(bytes[26] & 0xf | bytes[26] >> 1 & 0x30);
            match block_format(&bytes, index) {
                (9..=16, 1..) => Err(PassthroughError::Metadata(self.nsid)),
                (block_shift @ 9..=16, 0) => Ok(Geometry {
                    blocks: u64::from_le_bytes(std::array::from_fn(|at| bytes[at])),
                    block_shift,
                }),
                _ => Err(PassthroughError::Blocks(self.nsid)),
            }
        });
        let now = geometry.as_ref().copied().unwrap_or_default();
        let packed = now.blocks << 8 | u64::from(now.block_shift);
        self.geometry.store(packed, Ordering::Release);
        geometry.map(drop)
    }

    pub(crate) fn geometry(&self) -> Result<Geometry, Status> {
        let packed = self.geometry.load(Ordering::Acquire);
        let geometry = Geometry {
            blocks: packed >> 8,
            block_shift: packed as u8,
        };
        match geometry.block_shift {
            0 => Err(Status::NAMESPACE_NOT_READY.do_not_retry()),
            _ => Ok(geometry),
        }
    }

    /// Begins a command of blocks unless a Format runs.
    fn begin(&self) -> Result<Begun<'_>, Status> {
        match self.formatting.try_enter(0) {
            true => Ok(Begun(&self.formatting)),
            false => Err(Status::FORMAT_IN_PROGRESS),
        }
    }

    fn run(&self, sqe: &Sqe, data: &mut [u8]) -> Result<(), Status> {
        let _begun = self.begin()?;
        self.path.io(sqe, data, OWN_TIMEOUT).map(drop)
    }

    fn blocks(&self, opcode: Opcode, offset: u64, length: u64) -> Result<Sqe, Status> {
        let shift = self.geometry()?.block_shift;
        let mut sqe = Sqe::new(opcode, Cid(0), self.nsid);
        let (slba, blocks) = (offset >> shift, (length >> shift) as u32);
        let fua = false;
        Rw { slba, blocks, fua }.emit(&mut sqe);
        Ok(sqe)
    }
}

/// For commands that the target itself asks for, as a Flush before a shutdown; those of hosts pass.
impl Backend for PassedNamespace {
    fn bytes(&self) -> u64 {
        let geometry = self.geometry();
        geometry.map_or(0, |geometry| geometry.blocks << geometry.block_shift)
    }

    fn block_shift(&self) -> Option<u8> {
        self.geometry().ok().map(|geometry| geometry.block_shift)
    }

    fn may_wait(&self) -> bool {
        true
    }

    fn file(&self, _: Direction) -> Option<&Arc<File>> {
        self.path.file(self.nsid)
    }

    fn has_write_cache(&self) -> bool {
        true
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        let sqe = self.blocks(Opcode::READ, offset, out.len() as u64)?;
        self.run(&sqe, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Status> {
        let sqe = self.blocks(Opcode::WRITE, offset, bytes.len() as u64)?;
        let mut pages = Pages::new(bytes.len());
        pages.copy_from_slice(bytes);
        self.run(&sqe, &mut pages)
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> Result<(), Status> {
        let sqe = self.blocks(Opcode::WRITE_ZEROES, offset, length)?;
        self.run(&sqe, &mut [])
    }

    fn flush(&self) -> Result<(), Status> {
        self.run(&Sqe::new(Opcode::FLUSH, Cid(0), self.nsid), &mut [])
    }
}

/// A drive's controller, with all of its namespaces.
#[derive(Debug)]
pub struct PassedController {
    path: Arc<dyn CommandPath>,
    facts: Facts,
    /// Version that it tells of itself.
    version: u32,
    serial: String,
    namespaces: BTreeMap<NsId, Arc<PassedNamespace>>,
    formatting: Arc<Fence>,
    data_max: u32,
}

/// Part of the target in the answer of a drive.
#[derive(Clone, Debug, Default)]
pub(crate) struct Own {
    /// The target's own answer to Identify Controller.
    pub(crate) controller: Option<Box<[u8]>>,
    /// Group of the namespace.
    pub(crate) ana_group: u32,
}

impl PassedController {
    /// Learns of a controller and its namespaces. No command has more data than `data_max`.
    ///
    /// # Errors
    /// It does not tell of itself, or a namespace is one that hosts of the target cannot use.
    pub fn new(
        path: Arc<dyn CommandPath>,
        namespaces: impl IntoIterator<Item = NsId>,
        data_max: u32,
        allow: Allow,
    ) -> Result<PassedController, PassthroughError> {
        let bytes = identify(&*path, Cns::CONTROLLER, NsId::NONE).map_err(PassthroughError::Identify)?;
        // MDTS, in pages of 4 KiB, which are the smallest of each drive that the kernel takes.
        let holds_all = match bytes[77] {
            mdts @ 1..=19 => 4096 << mdts <= data_max,
            _ => false,
        };
        let formatting = Arc::new(Fence::default());
        let mut known = BTreeMap::new();
        for nsid in namespaces {
            if !(1..=NAMESPACES_MAX).contains(&nsid.0) {
                return Err(PassthroughError::Id(nsid));
            }
            let namespace = PassedNamespace::new(path.clone(), nsid, formatting.clone())?;
            known.insert(nsid, Arc::new(namespace));
        }
        if known.is_empty() {
            return Err(PassthroughError::Empty);
        }
        let shown = |byte: &u8| match byte {
            b' '..=b'~' => char::from(*byte),
            _ => '?',
        };
        Ok(PassedController {
            facts: Facts {
                allow,
                has_admin_lengths: bytes[264] & 1 != 0,
                has_io_lengths: bytes[530] & 1 != 0,
                holds_all,
            },
            version: u32::from_le_bytes([bytes[80], bytes[81], bytes[82], bytes[83]]),
            serial: bytes[4..24].iter().map(shown).collect(),
            path,
            namespaces: known,
            formatting,
            data_max,
        })
    }

    /// Returns its serial number.
    pub fn serial(&self) -> &str {
        self.serial.trim_end()
    }

    /// Returns the version of NVMe that it tells of itself, as its register has it.
    pub(crate) fn version(&self) -> u32 {
        self.version
    }

    /// Returns the most bytes of one command's data.
    pub(crate) fn data_max(&self) -> u32 {
        self.data_max
    }

    pub(crate) fn namespaces(&self) -> impl Iterator<Item = (NsId, &Arc<PassedNamespace>)> {
        self.namespaces.iter().map(|(nsid, namespace)| (*nsid, namespace))
    }

    fn namespace(&self, nsid: NsId) -> Result<&PassedNamespace, Status> {
        let namespace = self.namespaces.get(&nsid);
        Ok(namespace.ok_or(Status::INVALID_NAMESPACE.do_not_retry())?)
    }

    /// Returns how an admin command passes; `None`: the target answers it.
    ///
    /// # Errors
    /// The status with which it is refused.
    pub(crate) fn check_admin(&self, sqe: &Sqe, data_len: u32) -> Result<Option<Pass>, Status> {
        let pass = rules::admin(
            sqe,
            data_len,
            self.namespaces.contains_key(&sqe.nsid()),
            &self.facts,
        )?;
        self.check_len(pass, data_len)
    }

    /// Returns how an I/O command passes, and the bytes of blocks that it is about.
    ///
    /// # Errors
    /// The status with which it is refused.
    pub(crate) fn check_io(&self, sqe: &Sqe, data_len: u32) -> Result<(Pass, u64), Status> {
        let geometry = self.namespace(sqe.nsid())?.geometry()?;
        let (pass, bytes) = rules::io(sqe, data_len, geometry, &self.facts)?;
        self.check_len(Some(pass), data_len)?;
        Ok((pass, bytes))
    }

    /// Returns true if a command is a read or a write that says no more than which blocks, at this offset in bytes: that of an io_uring to the block device is the same. It
    /// has to have begun.
    pub(crate) fn is_plain(&self, sqe: &Sqe, offset: u64, data_len: u32) -> bool {
        let is_access = matches!(sqe.opcode(), Opcode::READ | Opcode::WRITE);
        let has_more = sqe.dword(12) >> 16 != 0 || [2, 3, 13, 14, 15].iter().any(|nr| sqe.dword(*nr) != 0);
        let geometry = self.namespace(sqe.nsid()).and_then(PassedNamespace::geometry);
        let is_there = geometry.is_ok_and(|geometry| Rw::parse(sqe).slba << geometry.block_shift == offset);
        is_access && !has_more && is_there && self.check_io(sqe, data_len).is_ok()
    }

    /// Begins a command of an io_uring unless a Format runs. It ends with [`PassedController::end`].
    pub(crate) fn try_begin(&self, stripe: usize) -> bool {
        self.formatting.try_enter(stripe)
    }

    pub(crate) fn end(&self, stripe: usize) {
        self.formatting.leave(stripe);
    }

    fn check_len(&self, pass: Option<Pass>, data_len: u32) -> Result<Option<Pass>, Status> {
        match pass {
            Some(pass) if pass.transfer != Transfer::None && data_len > self.data_max => {
                Err(Status::INVALID_FIELD.do_not_retry())
            }
            pass => Ok(pass),
        }
    }

    /// Has the drive carry out an I/O command, once more as it has been checked.
    ///
    /// # Errors
    /// The drive's status, or that of a check that holds no more.
    pub(crate) fn io(&self, sqe: &Sqe, data: &mut [u8]) -> Result<u64, Status> {
        let namespace = self.namespace(sqe.nsid())?;
        let _begun = namespace.begin()?;
        // The namespace may have been formatted since.
        let (pass, _) = self.check_io(sqe, data.len() as u32)?;
        let ranges = match sqe.opcode() {
            Opcode::DATASET_MANAGEMENT => usize::from(DatasetRange::count(sqe)) * DatasetRange::LEN,
            Opcode::COPY => usize::from(Copy::parse(sqe).ranges) * CopyRange::LEN,
            _ => data.len(),
        };
        // All that the drive is to read, and no more.
        let data = data.get_mut(..ranges).ok_or(Status::SGL_LENGTH_INVALID)?;
        // A drive writes all blocks of a read, or fails.
        if pass.transfer == Transfer::ToHost && sqe.opcode() != Opcode::READ {
            data.fill(0);
        }
        self.run(pass, data, |data| namespace.path.io(sqe, data, pass.timeout))
    }

    /// Has the drive carry out an admin command. `own` is what the target puts into the answer.
    ///
    /// # Errors
    /// The drive's status.
    pub(crate) fn admin(&self, sqe: &Sqe, pass: Pass, data: &mut [u8], own: &Own) -> Result<u64, Status> {
        let run = |data: &mut [u8]| self.path.admin(sqe, data, pass.timeout);
        if pass.kind == Kind::Format {
            return self.format(sqe, || run(&mut []));
        }
        // The host does not see what others have left there.
        if pass.transfer == Transfer::ToHost {
            data.fill(0);
        }
        let result = self.run(pass, data, run)?;
        let allow = self.facts.allow;
        match (pass.kind, &own.controller) {
            (Kind::IdentifyController, Some(own)) => identify::controller(data, own, allow),
            (Kind::IdentifyController, None) => return Err(Status::INTERNAL_ERROR),
            (Kind::IdentifyNamespace, _) => {
                let geometry = self.namespace(sqe.nsid())?.geometry().unwrap_or_default();
                identify::namespace(data, own.ana_group, geometry, COPY_BYTES_MAX);
            }
            (Kind::IndependentNamespace, _) => identify::independent_namespace(data, own.ana_group),
            (Kind::Effects(offset), _) => identify::effects(data, offset, allow),
            (Kind::Plain | Kind::Format, _) => {}
        }
        Ok(result)
    }

    /// Runs a command with data of the host, or with a longer buffer of its own if the drive alone knows how much it moves.
    fn run(
        &self,
        pass: Pass,
        data: &mut [u8],
        run: impl FnOnce(&mut [u8]) -> Result<u64, Status>,
    ) -> Result<u64, Status> {
        if !pass.is_padded {
            return run(data);
        }
        let mut padded = Pages::new(self.data_max as usize);
        let both = padded.len().min(data.len());
        if pass.transfer == Transfer::ToController {
            padded[..both].copy_from_slice(&data[..both]);
        }
        let result = run(&mut padded)?;
        if pass.transfer == Transfer::ToHost {
            data[..both].copy_from_slice(&padded[..both]);
        }
        Ok(result)
    }

    /// Formats namespaces, while no command of any namespace runs.
    fn format(&self, sqe: &Sqe, run: impl FnOnce() -> Result<u64, Status>) -> Result<u64, Status> {
        let of = |namespace: &&Arc<PassedNamespace>| sqe.nsid() == NsId::ALL || namespace.nsid == sqe.nsid();
        // LBAFL in bits 3:0, LBAFU in bits 13:12.
        let index = (sqe.dword(10) & 0xf | sqe.dword(10) >> 8 & 0x30) as usize;
        for namespace in self.namespaces.values().filter(of) {
            let bytes = namespace.identify(Cns::NAMESPACE)?;
            if !matches!(block_format(&bytes, index), (9..=16, 0)) {
                return Err(Status::INVALID_FORMAT.do_not_retry());
            }
        }
        self.formatting.alone(pause, || {
            let result = run();
            for namespace in self.namespaces.values() {
                // One that cannot be used any more says so to its hosts.
                let _ = namespace.measure();
            }
            result
        })
    }
}

/// Returns what a drive tells.
fn identify(path: &dyn CommandPath, cns: Cns, nsid: NsId) -> Result<Vec<u8>, Status> {
    let mut bytes = vec![0; IDENTIFY_LEN];
    let mut sqe = Sqe::new(Opcode::IDENTIFY, Cid(0), nsid);
    sqe.set_dword(10, cns.0.into());
    path.admin(&sqe, &mut bytes, OWN_TIMEOUT)?;
    Ok(bytes)
}
