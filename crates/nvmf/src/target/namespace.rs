//! A namespace: what it stores, what all queues share of it, and how one queue uses it.

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use rdmux_verbs::sync::Mutex;
use rdmux_wire::accel::Job;
use rdmux_wire::nvme::{
    Cid, CopyFormat, IdentifyNamespace, IndependentNamespace, NamespaceIdentifiers, NsId, Status,
};

use super::association::Session;
use super::fence::Fence;
use super::reservation::{Reservations, Verdict};
use super::subsystem::{Listener, NAMESPACES_MAX, NamespaceError, Subsystem};
use crate::accelerator::{Accelerator, Owner, WindowJob};
use crate::backend::Backend;

/// Bytes that one Copy moves at most: it holds up what waits for the same medium no longer than that.
pub(crate) const COPY_BYTES_MAX: u64 = 8 << 20;
/// Source ranges of one Copy.
pub(super) const COPY_RANGES_MAX: u16 = 128;
/// Bytes of a fused pair, unless one block has more: a pair keeps its data while it waits for the other command.
const FUSED_BYTES_MAX: u32 = 4096;
/// Formats of Copy's source ranges.
pub(super) const COPY_FORMATS: u16 = CopyFormat::Same.bit() | CopyFormat::Any.bit();

/// A namespace: blocks of a backend.
#[derive(Clone, Debug)]
pub struct Namespace {
    /// Its id in the subsystem.
    pub nsid: NsId,
    /// Bytes of a block as a power of two, 9 to 16.
    pub block_shift: u8,
    /// By which hosts know it over controllers and restarts.
    pub uuid: [u8; 16],
    /// It takes no writes.
    pub is_protected: bool,
    /// The storage of its blocks.
    pub backend: Arc<dyn Backend>,
}

impl Namespace {
    /// Returns the number of its blocks.
    pub fn blocks(&self) -> u64 {
        self.backend.bytes() >> self.block_shift
    }

    /// Checks that it can be in a subsystem.
    ///
    /// # Errors
    /// Its id is invalid, or it has no block.
    pub(crate) fn check(&self) -> Result<(), NamespaceError> {
        if !(1..=NAMESPACES_MAX).contains(&self.nsid.0) {
            return Err(NamespaceError::Id(self.nsid));
        }
        match self.blocks() {
            0 => Err(NamespaceError::Empty(1 << self.block_shift)),
            _ => Ok(()),
        }
    }

    /// Returns the offset in bytes of a range of blocks, which lies within the namespace, and its length.
    pub(super) fn range(&self, slba: u64, blocks: u32) -> Result<(u64, u64), Status> {
        let end = slba.checked_add(blocks.into());
        if end.is_none_or(|end| end > self.blocks()) {
            return Err(Status::LBA_OUT_OF_RANGE.do_not_retry());
        }
        Ok((slba << self.block_shift, u64::from(blocks) << self.block_shift))
    }

    /// Returns the most blocks of one Copy.
    pub(super) fn copy_blocks_max(&self) -> u32 {
        (COPY_BYTES_MAX >> self.block_shift) as u32
    }

    /// Returns the most bytes of a fused pair.
    pub(super) fn fused_bytes_max(&self) -> u32 {
        FUSED_BYTES_MAX.max(1 << self.block_shift)
    }

    pub(super) fn identifiers(&self) -> NamespaceIdentifiers {
        NamespaceIdentifiers {
            nguid: self.uuid,
            uuid: self.uuid,
        }
    }
}

/// A namespace, and what the queues of all reactors share of it.
#[derive(Debug)]
pub struct SharedNamespace {
    namespace: Namespace,
    state: Arc<State>,
}

/// The part that stays when a namespace changes its size, which makes it another object.
#[derive(Debug)]
struct State {
    /// Group whose state of access it has.
    ana_group: AtomicU32,
    medium: Arc<Medium>,
}

/// The part that namespaces of several subsystems share if they are the same storage: they keep out of each other's way, and reservations of one hold in all.
#[derive(Debug)]
pub(crate) struct Medium {
    fence: Fence,
    reservations: Reservations,
    /// Subsystems that may have such a namespace.
    subsystems: Mutex<Vec<Weak<Subsystem>>>,
}

impl Medium {
    pub(super) fn new(reservations: Reservations) -> Medium {
        Medium {
            fence: Fence::default(),
            reservations,
            subsystems: Mutex::default(),
        }
    }

    pub(super) fn reservations(&self) -> &Reservations {
        &self.reservations
    }

    /// Takes note of a subsystem that is to have such a namespace.
    pub(crate) fn add_subsystem(&self, subsystem: &Arc<Subsystem>) {
        let mut subsystems = self.subsystems.lock();
        subsystems.retain(|known| known.strong_count() > 0);
        if !subsystems
            .iter()
            .any(|known| known.as_ptr() == Arc::as_ptr(subsystem))
        {
            subsystems.push(Arc::downgrade(subsystem));
        }
    }

    /// Returns the subsystems that were noted.
    pub(super) fn subsystems(&self) -> Vec<Arc<Subsystem>> {
        self.subsystems.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

impl Deref for SharedNamespace {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.namespace
    }
}

impl SharedNamespace {
    pub(super) fn new(namespace: Namespace, medium: Arc<Medium>, ana_group: u32) -> SharedNamespace {
        SharedNamespace {
            namespace,
            state: Arc::new(State {
                ana_group: AtomicU32::new(ana_group),
                medium,
            }),
        }
    }

    pub(crate) fn medium(&self) -> &Arc<Medium> {
        &self.state.medium
    }

    /// Returns the same namespace as another object.
    pub(super) fn again(&self) -> SharedNamespace {
        let mut namespace = self.namespace.clone();
        namespace.block_shift = namespace.backend.block_shift().unwrap_or(namespace.block_shift);
        SharedNamespace {
            namespace,
            state: self.state.clone(),
        }
    }

    /// Returns what keeps writes apart from what must not be interrupted.
    pub(super) fn fence(&self) -> &Fence {
        &self.state.medium.fence
    }

    /// Runs something while no write of it does.
    pub(super) fn alone<T>(&self, run: impl FnOnce() -> T) -> T {
        self.fence().alone(|| self.backend.pause(), run)
    }

    pub(super) fn reservations(&self) -> &Reservations {
        &self.state.medium.reservations
    }

    /// Returns a number that no other namespace of this process has at the same time.
    pub fn key(&self) -> usize {
        Arc::as_ptr(&self.state).addr()
    }

    /// Returns the group whose state of access it has.
    pub fn ana_group(&self) -> u32 {
        self.state.ana_group.load(Ordering::Relaxed)
    }

    pub(super) fn set_ana_group(&self, group: u32) {
        self.state.ana_group.store(group, Ordering::Relaxed);
    }

    pub(super) fn identify(&self) -> IdentifyNamespace {
        let copy_blocks = self.copy_blocks_max();
        IdentifyNamespace {
            blocks: self.blocks(),
            block_shift: self.block_shift,
            zeroes: true,
            is_shared: true,
            is_protected: self.is_protected,
            reservations: self.reservations().capabilities(),
            ana_group: self.ana_group(),
            copy_blocks: (u16::try_from(copy_blocks).unwrap_or(u16::MAX), copy_blocks),
            copy_ranges: COPY_RANGES_MAX,
            fused_blocks: self.fused_bytes_max() >> self.block_shift,
            nguid: self.uuid,
            accelerator: self.backend.accelerator().map(Accelerator::info),
        }
    }

    pub(super) fn identify_independent(&self) -> IndependentNamespace {
        IndependentNamespace {
            is_shared: true,
            reservations: self.reservations().capabilities(),
            ana_group: self.ana_group(),
            is_protected: self.is_protected,
            is_ready: true,
        }
    }
}

/// A namespace as one queue uses it. Each I/O refers to it, so its count of references stays with the queue's processor.
#[derive(Debug)]
pub struct Seat {
    shared: Arc<SharedNamespace>,
    /// The queue; `None` if the controller itself asks for an I/O.
    user: Option<User>,
    /// The host's rights by reservations, as they were looked up last.
    verdict: Verdict,
}

/// A queue that uses a namespace.
#[derive(Clone, Debug)]
pub(super) struct User {
    pub(super) subsystem: Arc<Subsystem>,
    pub(super) session: Session,
    pub(super) qid: u16,
    /// The listener by which the host has come.
    pub(super) local: Listener,
}

impl Deref for Seat {
    type Target = SharedNamespace;

    fn deref(&self) -> &SharedNamespace {
        &self.shared
    }
}

impl Seat {
    pub(super) fn new(shared: Arc<SharedNamespace>, user: Option<User>) -> Seat {
        Seat {
            shared,
            user,
            verdict: Verdict::default(),
        }
    }

    pub(super) fn is_of(&self, shared: &Arc<SharedNamespace>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    pub(super) fn user(&self) -> Option<&User> {
        self.user.as_ref()
    }

    /// Returns the accelerator that the namespace is, and its user as the owner of windows there; `None` if the controller itself asks.
    pub(super) fn accelerator(&self) -> Option<(&Accelerator, Option<Owner<'_>>)> {
        let accelerator = self.shared.backend.accelerator()?;
        let owner = self.user.as_ref().map(|user| {
            let association = &user.session.association;
            (&association.host, &association.host_id)
        });
        Some((accelerator, owner))
    }

    /// Reads what its user sees.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Status> {
        match self.accelerator() {
            Some((accelerator, Some(owner))) => {
                accelerator.read_of(owner, offset, out);
                Ok(())
            }
            _ => self.shared.backend.read(offset, out),
        }
    }

    /// Writes. Returns the job of an accelerator that the bytes complete.
    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<Option<WindowJob>, Status> {
        match self.accelerator() {
            Some((accelerator, Some(owner))) => {
                let job = accelerator.write_of(owner, offset, bytes);
                self.forget_if_over();
                job
            }
            _ => self.shared.backend.write(offset, bytes).map(|()| None),
        }
    }

    /// Takes a part of a job's data by a vendor's command. Returns the job if it is complete.
    pub(super) fn submit(
        &self,
        place: (u32, u32),
        job: Job,
        bytes: &[u8],
    ) -> Result<Option<WindowJob>, Status> {
        let Some((accelerator, Some(owner))) = self.accelerator() else {
            return Err(Status::INVALID_OPCODE.do_not_retry());
        };
        let job = accelerator.submit_of(owner, place, job, bytes);
        self.forget_if_over();
        job
    }

    /// Gets a part of a result by a vendor's command. Returns the bytes of the whole.
    pub(super) fn fetch(&self, place: (u32, u32), out: &mut [u8]) -> Result<u32, Status> {
        match self.accelerator() {
            Some((accelerator, Some(owner))) => accelerator.fetch_of(owner, place, out),
            _ => Err(Status::INVALID_OPCODE.do_not_retry()),
        }
    }

    /// Forgets the windows of a host that is over: they may have come after they were forgotten.
    fn forget_if_over(&self) {
        if let Some(user) = self.user.as_ref().filter(|user| user.session.is_over()) {
            user.subsystem.forget_windows(&user.session.association);
        }
    }

    /// Writes zeros, or gives the room of bytes back.
    pub(super) fn clear(&self, offset: u64, length: u64, deallocates: bool) -> Result<(), Status> {
        match self.accelerator() {
            Some((accelerator, Some(owner))) => {
                accelerator.clear_of(owner, offset, length);
                Ok(())
            }
            _ if deallocates => self.shared.backend.deallocate(offset, length),
            _ => self.shared.backend.write_zeroes(offset, length),
        }
    }

    /// Runs a job of the accelerator that the namespace is.
    pub(super) fn run(&self, job: &WindowJob) -> Result<(), Status> {
        match self.accelerator() {
            Some((accelerator, _)) => accelerator.run(job),
            None => Err(Status::INTERNAL_ERROR),
        }
    }

    /// Returns the place of its writes in the namespace's fence.
    pub(super) fn stripe(&self) -> usize {
        let user = self.user.as_ref();
        user.map_or(0, |user| {
            usize::from(user.session.association.cntlid) + usize::from(user.qid)
        })
    }

    /// Checks that reservations let the host read or write.
    pub(super) fn check_reservation(&self, writes: bool) -> Result<(), Status> {
        let Some(user) = &self.user else {
            return Ok(());
        };
        let host = &user.session.association.host_id;
        match self.verdict.lets(self.shared.reservations(), host, writes) {
            true => Ok(()),
            false => Err(Status::RESERVATION_CONFLICT.do_not_retry()),
        }
    }

    /// Checks that the controller is not over and that nobody has asked for a command to be aborted, on a thread of a medium.
    pub(super) fn check_wanted(&self, cid: Cid) -> Result<(), Status> {
        let Some(user) = &self.user else {
            return Ok(());
        };
        match user.session.association.is_to_be_aborted(user.qid, cid) {
            true => Err(Status::ABORT_REQUESTED),
            false => Ok(()),
        }
    }
}
