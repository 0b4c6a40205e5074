//! Users of a pool's queue that poll for themselves.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rdmux_rnic::sync::{Mutex, MutexGuard};
use rdmux_rnic::{Arm, Qpn, ShareId, WorkCompletion};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::{CqShare, Share};
use crate::cm::deadline_after;
use crate::device::CompletionQueue;
use crate::waker::Waker;

/// Inboxes of the users of a queue that poll for themselves.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    inboxes: HashMap<ShareId, Weak<Inbox>>,
    /// Number of inboxes that are armed for any completion.
    armed_next: usize,
}

/// Completions that others have taken out of the queue for a user. They go on counting against the user's share, so there are no more than
/// it reserves.
#[derive(Debug)]
struct Inbox {
    waiting: Mutex<Waiting>,
    /// Woken when another user fills an armed inbox.
    waker: Waker,
}

#[derive(Debug, Default)]
struct Waiting {
    completions: VecDeque<WorkCompletion>,
    armed: Option<Arm>,
}

/// A user of a share that polls for itself, where no thread polls for all users of the queue. Whoever polls takes the completions of all
/// out of the queue, and leaves each user its own. Clones are the same user.
///
/// A user that polls nothing harms nobody: its completions count against its share until it has taken them, and its queue pairs go to
/// Error when they exceed that. All queue pairs of a queue belong to such users, or to none; nobody polls the queue otherwise.
///
/// An armed user may be woken without a completion, when another user is, and one that is armed for solicited completions by any: it polls,
/// and arms again.
#[derive(Clone, Debug)]
pub struct PoolUser(Arc<User>);

#[derive(Debug)]
struct User {
    share: CqShare,
    inbox: Arc<Inbox>,
    /// The queue that counts completions, and the share's account.
    queue: rdmux_rnic::CompletionQueue,
    id: ShareId,
    /// Readable when the queue has raised an event, or the inbox was filled.
    ready: OwnedFd,
}

impl CqShare {
    /// Returns a user of the share that polls for itself.
    ///
    /// # Errors
    /// The system refuses a descriptor; or the device does not count completions, as those of provider `hw`, or the share has such a user
    /// already ([`io::ErrorKind::Unsupported`], [`io::ErrorKind::AlreadyExists`]).
    pub fn user(&self) -> io::Result<PoolUser> {
        let account = self.share().and_then(|share| share.account.clone());
        let (queue, id) = account.ok_or(io::ErrorKind::Unsupported)?;
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let inbox = Arc::new(Inbox {
            waiting: Mutex::default(),
            waker: Waker::new()?,
        });
        for fd in [self.as_fd(), inbox.waker.fd().as_fd()] {
            epoll::add(&ready, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        let mut routes = self.routes().lock();
        if routes
            .inboxes
            .get(&id)
            .is_some_and(|inbox| inbox.strong_count() > 0)
        {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        routes.inboxes.insert(id, Arc::downgrade(&inbox));
        drop(routes);
        Ok(PoolUser(Arc::new(User {
            share: self.clone(),
            inbox,
            queue,
            id,
            ready,
        })))
    }
}

impl PoolUser {
    /// Returns its share.
    pub fn share(&self) -> &CqShare {
        &self.0.share
    }

    /// Takes its oldest completion. If there is none, moves those in the queue to their users, driving the device if the queue is empty.
    /// Never sleeps, and does not wait for another user that does the same.
    pub fn poll(&self) -> Option<WorkCompletion> {
        if let Some(wc) = self.0.take() {
            return Some(wc);
        }
        let route = || {
            let routes = self.0.share.routes().try_lock();
            routes.is_some_and(|routes| self.0.route(routes))
        };
        if !route() {
            self.0.share.device().progress();
            route();
        }
        self.0.take()
    }

    /// Requests a wake-up through [`PoolUser::as_fd`]. A completion that is there already causes none: poll after arming.
    pub fn arm(&self, arm: Arm) {
        let user = &*self.0;
        let mut routes = user.share.routes().lock();
        user.inbox.waker.reset_if_woken();
        let mut waiting = user.inbox.waiting.lock();
        // A request for any completion is the wider one and stays.
        if waiting.armed != Some(Arm::Next) {
            waiting.armed = Some(arm);
            routes.armed_next += usize::from(arm == Arm::Next);
        }
        drop(waiting);
        let widest = match routes.armed_next {
            0 => Arm::Solicited,
            _ => Arm::Next,
        };
        user.share.arm(widest);
        // Arming has reset the queue's event, which may have been for others.
        user.route(routes);
    }

    /// Takes its oldest completion; waits until there is one. Returns `None` if the timeout expires. A timeout of zero arms the user for any
    /// completion and polls once more: a later completion makes [`PoolUser::as_fd`] readable.
    pub fn wait(&self, timeout: Duration) -> io::Result<Option<WorkCompletion>> {
        let deadline = deadline_after(timeout);
        let device = self.0.share.device();
        loop {
            if let Some(wc) = device.look_before_sleep(|| self.poll()) {
                return Ok(Some(wc));
            }
            self.arm(Arm::Next);
            if let Some(wc) = self.poll() {
                return Ok(Some(wc));
            }
            let since = Instant::now();
            let left = deadline.map(|at| at.saturating_duration_since(since));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            // A signal ends the sleep, and not the wait.
            let _ = poll(&mut [PollFd::new(&self.0.ready, PollFlags::IN)], left.as_ref());
            device.slept(since);
        }
    }
}

impl AsFd for PoolUser {
    /// Returns a descriptor that is readable when the armed user may have a completion, until it is armed again.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.ready.as_fd()
    }
}

impl User {
    /// Takes the oldest completion of its inbox.
    fn take(&self) -> Option<WorkCompletion> {
        let wc = self.inbox.waiting.lock().completions.pop_front()?;
        self.queue.release(wc.qpn);
        Some(wc)
    }

    /// Moves the completions in the queue to their users. Returns whether there were any.
    fn route(&self, mut routes: MutexGuard<'_, Routes>) -> bool {
        let mut taken = 0;
        while let Some((wc, share)) = self.queue.poll_charged() {
            taken += 1;
            let inbox = share
                .and_then(|id| routes.inboxes.get(&id))
                .and_then(Weak::upgrade);
            match inbox {
                Some(inbox) => inbox.put(wc, &mut routes),
                // Its user is gone.
                None => drop(share.map(|_| self.queue.release(wc.qpn))),
            }
        }
        self.share.note(taken);
        taken > 0
    }
}

impl Inbox {
    fn put(&self, wc: WorkCompletion, routes: &mut Routes) {
        let mut waiting = self.waiting.lock();
        waiting.completions.push_back(wc);
        let armed = waiting.armed.take();
        drop(waiting);
        routes.armed_next -= usize::from(armed == Some(Arm::Next));
        if armed.is_some() {
            self.waker.wake();
        }
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut routes = self.share.routes().lock();
        routes.inboxes.remove(&self.id);
        let mut waiting = self.inbox.waiting.lock();
        routes.armed_next -= usize::from(waiting.armed == Some(Arm::Next));
        for wc in waiting.completions.drain(..) {
            self.queue.release(wc.qpn);
        }
    }
}

/// Discards the completions of a queue pair that was reset.
pub(super) fn forget(share: &Share, queue: &CompletionQueue, qpn: Qpn) {
    let Some((counting, id)) = &share.account else {
        return;
    };
    let inbox = queue.routes().lock().inboxes.get(id).and_then(Weak::upgrade);
    let Some(inbox) = inbox else {
        return;
    };
    inbox.waiting.lock().completions.retain(|wc| {
        let stays = wc.qpn != qpn;
        if !stays {
            counting.release(qpn);
        }
        stays
    });
}
