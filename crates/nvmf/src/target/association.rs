//! A controller as all of its queues know it, whatever reactors they are with.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicUsize, Ordering};

use super::fence::{STRIPES, Stripe};
use super::limit::Limit;
use super::tally::{Counters, Tally};
use rdmux_verbs::sync::Mutex;
use rdmux_wire::nvme::{
    Cid, ConnectData, HealthLog, HostId, Nqn, NsId, ReservationNotice, ReservationNotification, Status,
};

/// Aborts at a time.
pub(super) const ABORTS_MAX: u8 = 4;
/// Notifications of reservations that wait to be read.
const NOTICES_MAX: usize = 255;

/// By so much an I/O that changes blocks counts in the number of those that run: more than the others of a stripe together.
const CHANGE: u32 = 1 << 20;

/// A controller as all of its queues know it.
#[derive(Debug)]
pub(super) struct Association {
    pub(super) cntlid: u16,
    pub(super) host: Nqn,
    pub(super) host_id: HostId,
    /// CSTS.RDY: I/O queues may take commands.
    pub(super) is_ready: AtomicBool,
    /// Its host may not use the subsystem any more.
    is_expelled: AtomicBool,
    /// Other controllers of its host are over, and changes of them may run: queues need no lock to know that none do.
    awaits_endings: AtomicBool,
    /// Maximum number of its I/O queues.
    pub(super) queues_max: u16,
    /// Limits of its host, for all of its controllers.
    pub(super) limit: Arc<Limit>,
    /// Number of resets: I/O queues end with the next one. Odd once the controller is over.
    epoch: AtomicU32,
    /// I/Os that run on media or change blocks, by queue: queues with different reactors share no counter, as long as they are few.
    running: [Stripe; STRIPES],
    queues: Mutex<BTreeSet<u16>>,
    /// Formats of Copy that the host has enabled (CDFE of feature 16h).
    pub(super) copy_formats: AtomicU16,
    /// Something has happened that queues with other reactors have to look at.
    tells: AtomicBool,
    /// Number of `aborts`, so that queues need no lock to know that there are none.
    aborts_asked: AtomicUsize,
    aborts: Mutex<Vec<Abort>>,
    tally: Tally,
    /// That of all controllers of the subsystem.
    subsystem_tally: Arc<Tally>,
    has_notices: AtomicBool,
    notices: Mutex<Notices>,
}

/// An Abort of a command of an I/O queue.
#[derive(Clone, Copy, Debug)]
struct Abort {
    qid: u16,
    cid: Cid,
    /// The Abort command.
    request: Cid,
    /// The queue knows of it.
    is_seen: bool,
    was_aborted: Option<bool>,
}

#[derive(Debug, Default)]
struct Notices {
    /// Notifications that the host does not want, by namespace (feature 82h).
    masks: BTreeMap<NsId, u32>,
    waiting: VecDeque<(u64, ReservationNotice, NsId)>,
    /// Number of notifications that there were.
    count: u64,
}

impl Association {
    pub(super) fn new(
        cntlid: u16,
        data: &ConnectData,
        queues_max: u16,
        limit: Arc<Limit>,
        subsystem_tally: Arc<Tally>,
    ) -> Association {
        Association {
            cntlid,
            host: data.host.clone(),
            host_id: data.host_id,
            is_ready: AtomicBool::new(false),
            is_expelled: AtomicBool::new(false),
            awaits_endings: AtomicBool::new(false),
            queues_max,
            limit,
            epoch: AtomicU32::new(0),
            running: Default::default(),
            queues: Mutex::default(),
            copy_formats: AtomicU16::new(0),
            tells: AtomicBool::new(false),
            aborts_asked: AtomicUsize::new(0),
            aborts: Mutex::default(),
            tally: Tally::default(),
            subsystem_tally,
            has_notices: AtomicBool::new(false),
            notices: Mutex::default(),
        }
    }

    /// Takes an I/O queue's id, and returns the counters of the queue. `None` if it is taken.
    pub(super) fn take(&self, qid: u16) -> Option<Arc<Counters>> {
        if !self.queues.lock().insert(qid) {
            return None;
        }
        let counters = Arc::new(Counters::default());
        self.tally.begin(counters.clone());
        self.subsystem_tally.begin(counters.clone());
        Some(counters)
    }

    pub(super) fn give_back(&self, qid: u16, counters: &Arc<Counters>) {
        self.queues.lock().remove(&qid);
        self.tally.end(counters);
        self.subsystem_tally.end(counters);
        let mut aborts = self.aborts.lock();
        for abort in aborts.iter_mut().filter(|abort| abort.qid == qid) {
            abort.was_aborted.get_or_insert(false);
        }
    }

    /// Returns what its queues have carried out.
    pub(super) fn health(&self) -> HealthLog {
        self.tally.sum()
    }

    /// Returns the number of its I/O queues.
    pub(super) fn queues(&self) -> usize {
        self.queues.lock().len()
    }

    /// Ends all I/O queues, whose I/Os that have not begun never run.
    pub(super) fn reset(&self) {
        self.is_ready.store(false, Ordering::Release);
        self.epoch.fetch_add(2, Ordering::SeqCst);
        self.aborts.lock().clear();
        self.aborts_asked.store(0, Ordering::Release);
    }

    /// Ends it, with its admin queue.
    pub(super) fn expel(&self) {
        self.is_expelled.store(true, Ordering::Release);
        self.reset();
    }

    /// Returns true if its host may not use the subsystem any more.
    pub(super) fn is_expelled(&self) -> bool {
        self.is_expelled.load(Ordering::Acquire)
    }

    /// Returns true if it is of this host.
    pub(super) fn is_of_host(&self, host: &Nqn, host_id: &HostId) -> bool {
        (&self.host, &self.host_id) == (host, host_id)
    }

    /// Another controller of its host is over, of which I/Os may run.
    pub(super) fn await_endings(&self) {
        self.awaits_endings.store(true, Ordering::Release);
    }

    /// Returns true if changes of such a controller may run: its subsystem knows.
    pub(super) fn awaits_endings(&self) -> bool {
        self.awaits_endings.load(Ordering::Acquire)
    }

    /// Nothing changes blocks any more for controllers of its host that are over. The caller has the lock under which they end.
    pub(super) fn found_still(&self) {
        self.awaits_endings.store(false, Ordering::Release);
    }

    /// Ends it for ever.
    pub(super) fn end(&self) {
        self.is_ready.store(false, Ordering::Release);
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns true if no I/O of an earlier epoch runs.
    pub(super) fn is_quiet(&self) -> bool {
        self.runs_fewer_than(1)
    }

    /// Returns true if no I/O of an earlier epoch that changes blocks runs.
    pub(super) fn is_still(&self) -> bool {
        self.runs_fewer_than(CHANGE)
    }

    fn runs_fewer_than(&self, limit: u32) -> bool {
        let mut running = self.running.iter();
        running.all(|Stripe(running)| running.load(Ordering::SeqCst) < limit)
    }

    /// Has queues with other reactors look at what they share.
    pub(super) fn tell(&self) {
        self.tells.store(true, Ordering::Release);
    }

    pub(super) fn take_tells(&self) -> bool {
        self.tells.load(Ordering::Relaxed) && self.tells.swap(false, Ordering::AcqRel)
    }

    /// Asks for a command of an I/O queue to be aborted. Returns false if there is no such queue.
    pub(super) fn abort(&self, qid: u16, cid: Cid, request: Cid) -> Result<bool, Status> {
        let mut aborts = self.aborts.lock();
        if aborts.len() >= usize::from(ABORTS_MAX) {
            return Err(Status::ABORT_LIMIT);
        }
        if !self.queues.lock().contains(&qid) {
            return Ok(false);
        }
        aborts.push(Abort {
            qid,
            cid,
            request,
            is_seen: false,
            was_aborted: None,
        });
        self.aborts_asked.store(aborts.len(), Ordering::Release);
        Ok(true)
    }

    pub(super) fn has_aborts(&self) -> bool {
        self.aborts_asked.load(Ordering::Acquire) > 0
    }

    /// Returns a command that a queue is to abort, once.
    pub(super) fn poll_abort(&self, qid: u16) -> Option<Cid> {
        if !self.has_aborts() {
            return None;
        }
        let mut aborts = self.aborts.lock();
        let asked = aborts
            .iter_mut()
            .find(|abort| abort.qid == qid && !abort.is_seen)?;
        asked.is_seen = true;
        Some(asked.cid)
    }

    /// Returns true if a command that has not begun must not.
    pub(super) fn is_to_be_aborted(&self, qid: u16, cid: Cid) -> bool {
        self.has_aborts()
            && self
                .aborts
                .lock()
                .iter()
                .any(|abort| (abort.qid, abort.cid, abort.was_aborted) == (qid, cid, None))
    }

    /// A command that may have been asked to be aborted is over.
    pub(super) fn ended(&self, qid: u16, cid: Cid, was_aborted: bool) {
        let mut aborts = self.aborts.lock();
        for abort in aborts
            .iter_mut()
            .filter(|abort| (abort.qid, abort.cid) == (qid, cid))
        {
            abort.was_aborted.get_or_insert(was_aborted);
            self.tell();
        }
    }

    /// Returns an Abort that is done, and whether it has aborted its command.
    pub(super) fn poll_aborted(&self) -> Option<(Cid, bool)> {
        if !self.has_aborts() {
            return None;
        }
        let mut aborts = self.aborts.lock();
        let at = aborts.iter().position(|abort| abort.was_aborted.is_some())?;
        let abort = aborts.remove(at);
        self.aborts_asked.store(aborts.len(), Ordering::Release);
        Some((abort.request, abort.was_aborted == Some(true)))
    }

    /// Notifies the host of a change of a reservation, unless it does not want that.
    pub(super) fn notify(&self, nsid: NsId, notice: ReservationNotice) {
        let mut notices = self.notices.lock();
        let mask = notices.masks.get(&nsid).copied().unwrap_or(0);
        if mask & notice.mask() != 0 {
            return;
        }
        notices.count += 1;
        // The host sees by the number that it has missed some.
        if notices.waiting.len() < NOTICES_MAX {
            let count = notices.count;
            notices.waiting.push_back((count, notice, nsid));
        }
        self.has_notices.store(true, Ordering::Release);
    }

    pub(super) fn has_notices(&self) -> bool {
        self.has_notices.load(Ordering::Acquire)
    }

    /// Returns the oldest notification, or the empty one; removes it if the host asks so.
    pub(super) fn notice(&self, removes: bool) -> ReservationNotification {
        let mut notices = self.notices.lock();
        let Some((count, notice, nsid)) = notices.waiting.front().copied() else {
            self.has_notices.store(false, Ordering::Release);
            return ReservationNotification {
                count: 0,
                notice: None,
                available: 0,
                nsid: NsId::NONE,
            };
        };
        let available = (notices.waiting.len() - 1) as u8;
        if removes {
            notices.waiting.pop_front();
            self.has_notices
                .store(!notices.waiting.is_empty(), Ordering::Release);
        }
        ReservationNotification {
            count,
            notice: Some(notice),
            available,
            nsid,
        }
    }

    pub(super) fn notice_mask(&self, nsid: NsId) -> u32 {
        self.notices.lock().masks.get(&nsid).copied().unwrap_or(0)
    }

    pub(super) fn set_notice_mask(&self, nsid: NsId, mask: u32) {
        self.notices.lock().masks.insert(nsid, mask);
    }
}

/// The time of a controller from one reset to the next.
#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) association: Arc<Association>,
    epoch: u32,
    /// Its counter of I/Os.
    stripe: usize,
}

impl Session {
    /// Makes the session of an I/O queue, as it is now.
    pub(super) fn new(association: Arc<Association>, qid: u16) -> Session {
        let epoch = association.epoch.load(Ordering::SeqCst);
        Session {
            association,
            epoch,
            stripe: usize::from(qid) % STRIPES,
        }
    }

    fn running(&self) -> &AtomicU32 {
        &self.association.running[self.stripe].0
    }

    /// Returns true once the controller was reset or is over.
    pub(super) fn is_over(&self) -> bool {
        self.association.epoch.load(Ordering::SeqCst) != self.epoch
    }

    /// Begins an I/O on a medium, or one that changes blocks, which is running until the result is dropped. `None` if it must not run: its host may already have
    /// written the same blocks through another controller.
    pub(super) fn enter(&self, changes: bool) -> Option<Running<'_>> {
        self.begin(changes);
        let running = Running(self, changes);
        (!self.is_over() || mutant!(LateBegins)).then_some(running)
    }

    /// Counts an I/O as running, until [`Session::leave`].
    pub(super) fn begin(&self, changes: bool) {
        self.running().fetch_add(weight(changes), Ordering::SeqCst);
    }

    pub(super) fn leave(&self, changes: bool) {
        self.running().fetch_sub(weight(changes), Ordering::SeqCst);
    }
}

/// An I/O that is running.
#[derive(Debug)]
pub(super) struct Running<'a>(&'a Session, bool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

/// Returns by how much an I/O counts as running.
fn weight(changes: bool) -> u32 {
    if changes { CHANGE } else { 1 }
}
