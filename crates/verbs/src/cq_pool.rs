//! Completion queues that many users share, with the semantics of the pool of Linux's `ib_core`.
//!
//! A thread that serves many users polls, arms and is woken by one queue, instead of one for each user. Each user reserves the number of
//! completions that it may have at a time, so that the queue has room for all of them: the first queue of the wanted vector with enough
//! room takes it, and the pool makes further queues when none has. It keeps them as long as it lives.
//!
//! *One user cannot harm the others.* What a queue pair completes counts against the share that it was made with. A queue of this process
//! (the soft device's) refuses a completion beyond that: the queue pair goes to Error, as on a queue that overran
//! ([`AsyncEvent::QpFatal`], [`QueuePair::error`]), and has no further completion until it is reset, while the queue works on for all other
//! queue pairs. An RNIC does not count: there, the lengths of a share's queue pairs must not exceed it, which
//! [`ProtectionDomain::create_qp`] checks; receives of a shared receive queue count for none of them, so their poster reserves room for them.
//!
//! *Users that share receives* ([`CqPool::with_common`]): any of them may take all of these. Each queue of the pool has room for them, on
//! which a user draws that has filled its own share.
//!
//! [`AsyncEvent::QpFatal`]: crate::AsyncEvent::QpFatal
//! [`QueuePair::error`]: crate::QueuePair::error
//! [`ProtectionDomain::create_qp`]: crate::ProtectionDomain::create_qp

mod shares;
mod user;

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use rdmux_rnic::sync::Mutex;
use rdmux_rnic::{Cqn, PoolUse, Qpn, ShareId, TooShort};

use crate::cq::ResizeError;
use crate::device::{CompletionQueue, CreateError, Device};
use shares::{Place, Shares, TooMany};
pub use user::PoolUser;
pub(crate) use user::Routes;

/// Why a pool gives no share.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    /// No queue of the device can hold so many completions.
    #[error("{nr} completions in one queue: the device's queues hold at most {max}")]
    TooMany {
        /// Completions that were to be reserved, with those that the users of a queue have in common.
        nr: u32,
        /// Completions that a queue can hold.
        max: u32,
    },
    /// The device made no further queue.
    #[error(transparent)]
    Create(#[from] CreateError),
}

/// A pool of completion queues. Clones are the same pool.
///
/// A *vector* stands for whoever polls its queues. With several engines of one device, each engine is a vector, since its objects cannot be
/// combined with those of others: the pool is made of these devices, in order. A device may also stand for several vectors, one for each
/// thread.
///
/// ```no_run
/// # use rdmux_verbs::{CqPool, Device, QpOptions};
/// # fn serve(device: Device) -> Result<(), Box<dyn std::error::Error>> {
/// let pool = CqPool::new(vec![device.open_engine()?, device], CqPool::QUEUE_SIZE_MIN);
/// let share = pool.get(256, Some(1))?;
/// let mut options = QpOptions::new(&share);
/// (options.max_send_wr, options.max_recv_wr) = (128, 128);
/// let qp = share.device().alloc_pd()?.create_qp(&options)?;
/// // One thread polls for all users of the vector.
/// for cq in pool.queues(1) {
///     while let Some(wc) = cq.poll() {
///         println!("a completion of queue pair {}", wc.qpn.value());
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CqPool(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    /// The device of each vector.
    devices: Vec<Device>,
    size_max: u32,
    /// Completions that the users of a queue have in common.
    common: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    shares: Shares,
    /// At their places.
    queues: Vec<CompletionQueue>,
    /// At their places: what the users of each queue have in common. Empty if they have nothing.
    commons: Vec<CqShare>,
}

/// State of a queue of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueUsage {
    /// Its number, on the device of its vector.
    pub cqn: Cqn,
    /// Its vector.
    pub vector: usize,
    /// Completions that its users have reserved.
    pub used: u32,
    /// Completions that it holds.
    pub size: u32,
    /// Number of its users; what they have in common counts as one more.
    pub users: u32,
}

impl CqPool {
    /// Least room of a queue that the pool of Linux's `ib_core` makes.
    pub const QUEUE_SIZE_MIN: u32 = 4096;

    /// Makes a pool without queues. Vector `v` has its queues on `vectors[v]`. The queues have room for `queue_size_min` completions or
    /// more, as far as the device has such queues.
    ///
    /// # Panics
    /// Panics if there is no vector.
    pub fn new(vectors: Vec<Device>, queue_size_min: u32) -> CqPool {
        CqPool::with_common(vectors, queue_size_min, 0)
    }

    /// Makes a pool as [`CqPool::new`] does, each of whose queues reserves `common` completions for all its users together: each share draws
    /// on these once it is full. They are for the receives that the users share. Since any of the users may take all of them, in
    /// whichever queue its completions arrive, every queue has room for all.
    ///
    /// # Panics
    /// Panics if there is no vector.
    pub fn with_common(vectors: Vec<Device>, queue_size_min: u32, common: u32) -> CqPool {
        assert!(!vectors.is_empty(), "a pool without vectors");
        let max = |device: &Device| device.limits().completions.unwrap_or(u32::MAX);
        let size_max = vectors.iter().map(max).min().unwrap_or(u32::MAX);
        CqPool(Arc::new(Pool {
            state: Mutex::new(State {
                shares: Shares::new(vectors.len(), queue_size_min, size_max),
                queues: Vec::new(),
                commons: Vec::new(),
            }),
            devices: vectors,
            size_max,
            common,
        }))
    }

    /// Returns the number of vectors.
    pub fn vectors(&self) -> usize {
        self.0.devices.len()
    }

    /// Reserves room for `nr` completions in a queue of the vector `hint`, modulo the number of vectors; of each in turn without a hint.
    /// Makes a queue for each vector if none has room.
    ///
    /// # Errors
    /// No queue of the device can hold so many, or the device makes no further queue: then the pool has those that it had.
    pub fn get(&self, nr: u32, hint: Option<u32>) -> Result<CqShare, GetError> {
        let pool = &*self.0;
        let mut state = pool.state.lock();
        let vector = state.shares.vector(hint);
        let place = loop {
            let State { shares, queues, .. } = &mut *state;
            if let Some(place) = shares.take(nr, vector, |place| queues[place.0].left_over()) {
                break place;
            }
            let needed = nr.checked_add(pool.common).ok_or(TooMany);
            let size = needed.and_then(|needed| shares.size_for(needed));
            let size = size.map_err(|TooMany| GetError::TooMany {
                nr: nr.saturating_add(pool.common),
                max: pool.size_max,
            })?;
            // Those that were made are destroyed if another cannot be.
            let vectors = (0..).zip(&pool.devices);
            let array = vectors.map(|(vector, device)| device.create_pooled_cq(size, vector));
            let array = array.collect::<Result<Vec<_>, _>>()?;
            let places = queues.len()..queues.len() + array.len();
            queues.extend(array);
            shares.grow(size);
            if pool.common > 0 {
                for place in places.map(Place) {
                    let fits = state.shares.take_at(place, pool.common, 0);
                    debug_assert!(fits, "a new queue has room");
                    let common = self.share(&state, place, pool.common, None);
                    state.commons.push(common);
                }
            }
        };
        let common = state.commons.get(place.0).cloned();
        Ok(self.share(&state, place, nr, common))
    }

    /// Makes a share of `nr` completions that are reserved in a queue, which draws on another one of this queue once it is full.
    fn share(&self, state: &State, place: Place, nr: u32, common: Option<CqShare>) -> CqShare {
        let queue = state.queues[place.0].clone();
        state.show(place);
        let counting = queue.counting();
        let account = counting.map(|queue| (queue.clone(), queue.add_share(nr as usize)));
        let of_common = common
            .as_ref()
            .and_then(|common| common.share()?.account.as_ref());
        if let (Some((queue, id)), Some((_, common))) = (&account, of_common) {
            queue.draw_on(*id, *common);
        }
        let share = Arc::new(Share {
            pool: Arc::downgrade(&self.0),
            place,
            vector: state.shares.vector_of(place),
            nr: AtomicU32::new(nr),
            account,
            _common: common,
            posted: AtomicU32::new(0),
        });
        CqShare(queue.shared(share))
    }

    /// Returns the queues of a vector, in which all its users' completions arrive: for the thread that polls and arms them. They cannot be
    /// used for queue pairs, which need a share.
    pub fn queues(&self, vector: usize) -> Vec<CompletionQueue> {
        let state = self.0.state.lock();
        let places = state.shares.places(vector % self.vectors());
        places.map(|place| state.queues[place.0].clone()).collect()
    }

    /// Returns the state of all queues, the oldest first.
    pub fn usage(&self) -> Vec<QueueUsage> {
        let state = self.0.state.lock();
        let of = |(at, queue): (usize, &CompletionQueue)| state.usage(Place(at), queue);
        state.queues.iter().enumerate().filter_map(of).collect()
    }
}

impl State {
    fn usage(&self, place: Place, queue: &CompletionQueue) -> Option<QueueUsage> {
        let account = self.shares.account(place)?;
        Some(QueueUsage {
            cqn: queue.cqn(),
            vector: self.shares.vector_of(place),
            used: account.used,
            size: account.size,
            users: account.users,
        })
    }

    /// Shows the state of a queue to those who inspect the device.
    fn show(&self, place: Place) {
        let queue = self.queues.get(place.0).and_then(CompletionQueue::counting);
        if let (Some(queue), Some(account)) = (queue, self.shares.account(place)) {
            queue.set_pool(PoolUse {
                vector: self.shares.vector_of(place) as u32,
                used: account.used,
                users: account.users,
            });
        }
    }
}

/// Reservation of a user; [`CqShare`] has the queue beside it.
#[derive(Debug)]
pub(crate) struct Share {
    pool: Weak<Pool>,
    place: Place,
    vector: usize,
    nr: AtomicU32,
    /// Its account in the queue, if that counts completions.
    account: Option<(rdmux_rnic::CompletionQueue, ShareId)>,
    /// The share of all users of the queue, on which it draws as long as it lives.
    _common: Option<CqShare>,
    /// Requests that its queue pairs hold at most, if the queue does not count.
    posted: AtomicU32,
}

impl Share {
    pub(crate) fn nr(&self) -> u32 {
        self.nr.load(Ordering::Relaxed)
    }

    /// Notes that a queue pair was reset: its completions are discarded.
    pub(crate) fn forget(&self, queue: &CompletionQueue, qpn: Qpn) {
        user::forget(self, queue, qpn);
    }

    /// Reserves completions for a queue pair that holds so many requests. Of a queue that counts completions, a queue pair may have any.
    fn hold(&self, requests: u32) -> Result<(), CreateError> {
        let nr = self.nr();
        let fits = |held: u32| held.checked_add(requests).filter(|after| *after <= nr);
        let held = match self.account {
            Some(_) => Ok(0),
            None => self
                .posted
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits),
        };
        let beyond = |held| CreateError::BeyondShare { requests, held, nr };
        held.map(drop).map_err(beyond)
    }
}

/// The completions of a queue pair count against a share until this is dropped, which comes after the end of the queue pair.
#[derive(Debug)]
pub(crate) struct Attached {
    share: Arc<Share>,
    requests: u32,
    qpn: Option<Qpn>,
}

impl Attached {
    /// Reserves completions for a queue pair that holds so many requests.
    pub(crate) fn new(cq: &CompletionQueue, requests: u32) -> Result<Option<Attached>, CreateError> {
        let Some(share) = cq.share() else {
            return Ok(None);
        };
        share.hold(requests)?;
        Ok(Some(Attached {
            share: share.clone(),
            requests,
            qpn: None,
        }))
    }

    /// Counts the completions of a new queue pair.
    pub(crate) fn begin(&mut self, qpn: Qpn) {
        if let Some((queue, id)) = &self.share.account {
            queue.add_user(qpn, *id);
        }
        self.qpn = Some(qpn);
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        match (&self.share.account, self.qpn) {
            (Some((queue, _)), Some(qpn)) => queue.remove_user(qpn),
            (Some(_), None) => {}
            (None, _) => drop(self.share.posted.fetch_sub(self.requests, Ordering::Relaxed)),
        }
    }
}

impl Share {
    /// Changes the number of completions that it reserves.
    pub(crate) fn resize(&self, queue: &CompletionQueue, nr: u32) -> Result<(), ResizeError> {
        let Some(pool) = self.pool.upgrade() else {
            return Err(ResizeError::NoRoom);
        };
        let mut state = pool.state.lock();
        let before = self.nr();
        if self.account.is_none() && nr < before && nr < self.posted.load(Ordering::Relaxed) {
            return Err(ResizeError::TooShort);
        }
        // A share takes more room only after the pool has reserved it, and gives some back before the pool does.
        let set = |nr| match &self.account {
            Some((queue, id)) => queue
                .set_share(*id, nr as usize)
                .map_err(|TooShort| ResizeError::TooShort),
            None => Ok(()),
        };
        if nr < before {
            set(nr)?;
        }
        let resized = state.shares.resize(self.place, before, nr, queue.left_over());
        resized.map_err(|TooMany| ResizeError::NoRoom)?;
        if nr > before {
            set(nr)?;
        }
        self.nr.store(nr, Ordering::Relaxed);
        state.show(self.place);
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if let Some((queue, id)) = &self.account {
            queue.remove_share(*id);
        }
        let Some(pool) = self.pool.upgrade() else {
            return;
        };
        let mut state = pool.state.lock();
        let put = state.shares.put(self.place, self.nr());
        debug_assert!(put.is_ok(), "{self:?} was reserved");
        state.show(self.place);
    }
}

/// A user's share of a completion queue of a [`CqPool`]. It is the queue for the user's queue pairs ([`QpOptions::new`]), which keep the
/// share alive; it ends with the last of its clones, and also outlives the pool. Polling, arming and moderating it concerns the queue, with
/// the completions of all users; resizing it concerns the share ([`CompletionQueue::resize`]).
///
/// [`QpOptions::new`]: crate::QpOptions::new
#[derive(Clone, Debug)]
pub struct CqShare(CompletionQueue);

impl Deref for CqShare {
    type Target = CompletionQueue;

    fn deref(&self) -> &CompletionQueue {
        &self.0
    }
}

impl CqShare {
    fn share(&self) -> Option<&Arc<Share>> {
        self.0.share()
    }

    /// Returns the number of completions that it reserves.
    pub fn nr(&self) -> u32 {
        self.share().map_or(0, |share| share.nr())
    }

    /// Returns the queue with this share, as [`QpOptions`] have it.
    ///
    /// [`QpOptions`]: crate::QpOptions
    pub fn queue(&self) -> CompletionQueue {
        self.0.clone()
    }

    /// Returns the queue without the share, for whoever polls it for all users.
    pub fn pool_queue(&self) -> CompletionQueue {
        self.0.without_share()
    }

    /// Returns the vector of its queue.
    pub fn vector(&self) -> usize {
        self.share().map_or(0, |share| share.vector)
    }
}
