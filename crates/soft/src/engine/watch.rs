//! A caller that watches for arrivals in the thread's place while it sleeps on descriptors of its own. A packet then wakes that caller, and
//! not the thread first. The thread's epoll set reports no arrivals meanwhile; the thread keeps the timers, which it wakes for.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rdmux_verbs::provider;
use rdmux_verbs::waiting::WaitMode;

use super::handover::{POLLER_LEASE_NS, Wake};
use super::{Core, Engine, RECEIVES_PER_PASS};
use crate::device::Device;

/// Wake-ups in a row by which other callers got something and this one nothing, after which it serves others more than itself.
const WAKE_UPS_FOR_OTHERS: u32 = 16;

/// The place of a device's engine among the sleepers; given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    device: Device,
    /// Sleeps that the caller began although a completion queue had been notified since the sleep before, and [`Core::told`] then.
    for_others: u32,
    told: u64,
}

impl Watch {
    /// Takes the place, unless another caller has it, or the thread never sleeps.
    pub(crate) fn begin(device: &Device) -> Option<Watch> {
        let engine: &Engine = device;
        let mut core = engine.lock();
        if engine.waiting == Some(WaitMode::Running) || core.is_watched || engine.hand_over.has_leader() {
            return None;
        }
        core.is_watched = true;
        Some(Watch {
            device: device.clone(),
            for_others: 0,
            told: engine.told.load(Ordering::Acquire),
        })
    }
}

impl provider::EngineWatch for Watch {
    fn prepare(&mut self) -> bool {
        let engine: &Engine = &self.device;
        let told = engine.told.load(Ordering::Acquire);
        self.for_others += u32::from(std::mem::replace(&mut self.told, told) != told);
        let mut core = engine.lock();
        let received = engine.end_sleep(&mut core);
        core.finish(engine.now(), true);
        engine.wake_early(&core);
        if received > 0 {
            return false;
        }
        core.watcher_asleep = true;
        let sleeps = engine.set_watch(&mut core);
        if !sleeps {
            core.watcher_asleep = false;
            core.receive_as_leader(engine.now(), false);
            core.finish(engine.now(), true);
            engine.wake_early(&core);
        }
        // The thread keeps the timers, but not while it rests since the caller has polled.
        let resting = match sleeps && engine.is_due_within(&core, POLLER_LEASE_NS) {
            true => engine.hand_over.hand_over(),
            false => Wake::Nobody,
        };
        drop(core);
        engine.wake(resting);
        sleeps
    }

    fn serves_others(&self) -> bool {
        self.for_others >= WAKE_UPS_FOR_OTHERS
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.device.watch.as_fd()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let engine: &Engine = &self.device;
        let mut core = engine.lock();
        engine.end_sleep(&mut core);
        core.is_watched = false;
        engine.leave_to_watch(&mut core);
    }
}

impl Engine {
    /// Ends the sleep of the caller that watches, if it sleeps, and processes what woke it. Returns how many datagrams and trains.
    fn end_sleep(&self, core: &mut Core) -> usize {
        if !std::mem::take(&mut core.watcher_asleep) {
            return 0;
        }
        self.watch_kick.reset_if_woken();
        self.set_watch(core);
        core.receive_as_leader(self.now(), true)
    }

    /// Leaves arrivals to the thread, or to the caller that watches, for a caller that drove until now: processes some that wait, and wakes
    /// the watcher for the rest, since a peer that keeps sending would keep this caller here for ever.
    pub(super) fn leave_to_watch(&self, core: &mut Core) {
        if !self.set_watch(core) {
            core.receive(self.now(), RECEIVES_PER_PASS);
        }
        core.finish(self.now(), true);
        self.wake_early(core);
        if !self.set_watch(core) {
            self.wake_watch(core);
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
