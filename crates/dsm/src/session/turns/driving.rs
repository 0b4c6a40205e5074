//! The driver as threads hold it and leave it.

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

use super::sync::{
    Alarm, AtomicBool, Condvar, Mutex, MutexGuard, Ordering, Pollers, RESTS, Sleepers, TURNS, Waker,
    spin_loop, wait_while,
};
use crate::stat::NodeCounter;

/// A driver, at which threads take turns. Tests implement it with another device.
pub(crate) trait Drive {
    /// Takes all that has come, and returns whether there was anything. Without `thoroughly` it takes what costs little to notice.
    fn turn(&mut self, thoroughly: bool) -> bool;
    /// Returns whether only thorough turns take what comes.
    fn uses_packets(&self) -> bool;
    /// Prepares for a time in which nobody takes turns, but all that comes wakes the service thread. Returns false if that is not so
    /// yet: try again.
    fn rest(&mut self) -> bool;
    /// Has the others ring no bell, as a thread polls without yielding its CPU.
    fn tell_awake(&mut self);
    /// Ends a change by a thread that handles the events of a stage.
    fn settle(&mut self, stage: NodeCounter);
    /// Returns a number that has grown if a thread that waits should look again.
    fn changes(&self) -> u64;
}

/// Moment at which a thread that waits stops polling.
pub(crate) trait Pause {
    /// Notes what a look has found.
    fn saw(&mut self, has_come: bool);
    /// Pauses before another look. Returns false once the thread should sleep.
    fn pause(&mut self) -> bool;
    /// Returns whether the last pause has yielded the CPU to nobody, so that the next look follows at once.
    fn keeps_cpu(&self) -> bool;
}

/// The service thread.
pub(crate) trait Service: Pause {
    /// Takes all that has come, and returns whether there was anything.
    fn turn(&mut self) -> bool;
    /// Returns whether it has asked others for something since its last sleep, for a thread that waits in the kernel.
    fn has_asked(&self) -> bool;
    /// Sleeps until something has come, the waker is woken, or the alarm goes off.
    fn sleep(&mut self);
    /// Prepares for the next turn. Another thread has polled meanwhile, or not.
    fn awake(&mut self, was_polled: bool);
}

/// The driver, and the threads that take turns at it.
#[derive(Debug)]
pub(crate) struct Turns<D> {
    driver: Mutex<D>,
    /// Threads of the program that take turns. It grows at any time, and falls with the driver held.
    pollers: Pollers,
    /// Notified when [`Drive::changes`] has grown, if threads sleep.
    changed: Condvar,
    /// Threads that sleep until then. It changes with the driver held. Without any, a notification would be a system call for nobody.
    sleepers: Sleepers,
    /// Ends the sleep of the service thread.
    waker: Waker,
    /// Ends it a little after threads of the program have left.
    alarm: Alarm,
    stops: AtomicBool,
}

impl<D: Drive> Turns<D> {
    pub(crate) fn new(driver: D, waker: Waker, alarm: Alarm) -> Turns<D> {
        Turns {
            driver: Mutex::new(driver),
            pollers: Pollers::new(0),
            changed: Condvar::new(),
            sleepers: Sleepers::new(0),
            waker,
            alarm,
            stops: AtomicBool::new(false),
        }
    }

    /// Returns what ends the sleep of the service thread.
    pub(crate) fn waker(&self) -> &Waker {
        &self.waker
    }

    /// Returns what ends the sleep of the service thread a little after threads of the program have left.
    pub(crate) fn alarm(&self) -> &Alarm {
        &self.alarm
    }

    /// Holds the driver, in a thread that does not serve.
    pub(crate) fn lock(&self) -> Driving<'_, D> {
        self.lock_in(NodeCounter::Stage1Events)
    }

    /// Holds the driver, in a thread that handles events of a stage.
    pub(crate) fn lock_in(&self, stage: NodeCounter) -> Driving<'_, D> {
        let driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        Driving {
            turns: self,
            changes: driver.changes(),
            driver: Some(driver),
            stage,
        }
    }

    /// Returns whether a thread of the program takes turns.
    pub(crate) fn is_polled(&self) -> bool {
        self.pollers.load(Ordering::Relaxed) > 0
    }

    /// Waits until `done` returns a result or an error, and drives meanwhile.
    pub(crate) fn wait<R, E>(
        &self,
        pause: &mut impl Pause,
        mut done: impl FnMut(&mut D) -> Result<Option<R>, E>,
    ) -> Result<R, E> {
        self.pollers.fetch_add(1, Ordering::Relaxed);
        loop {
            let mut changes = 0;
            for turn in 1..=TURNS {
                let mut driver = self.lock();
                let thoroughly = turn == TURNS || driver.uses_packets();
                let has_come = driver.turn(thoroughly);
                changes = driver.changes();
                let result = done(&mut driver).transpose();
                if result.is_some() {
                    self.leave(&mut driver);
                }
                drop(driver);
                pause.saw(has_come || result.is_some());
                if let Some(result) = result {
                    return result;
                }
                spin_loop();
            }
            if pause.pause() {
                if pause.keeps_cpu() {
                    self.lock().tell_awake();
                }
                continue;
            }
            let mut driver = self.lock();
            // The service thread drives now. All that has come since the last look at `done` counts.
            self.stop_polling(&mut driver);
            if let Some(driver) = driver.release() {
                self.sleepers.fetch_add(1, Ordering::Relaxed);
                let driver = wait_while(&self.changed, driver, |driver| driver.changes() == changes);
                self.sleepers.fetch_sub(1, Ordering::Relaxed);
                drop(driver);
            }
            self.pollers.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Changes the driver for a thread that does not wait for anything.
    pub(crate) fn act(&self, f: impl FnOnce(&mut D)) {
        self.pollers.fetch_add(1, Ordering::Relaxed);
        let mut driver = self.lock();
        f(&mut driver);
        // A frame that is sent after the word of the sleep takes the word back.
        driver.settle(NodeCounter::Stage1Events);
        self.leave(&mut driver);
    }

    /// Ends the turns of a thread that goes on with its program. It may be back soon: the others take this node for awake, and nobody is woken, until
    /// the alarm goes off. Unless a thread sleeps for which something may come, or the device has to be driven for the others.
    fn leave(&self, driver: &mut D) {
        if self.sleepers.load(Ordering::Relaxed) > 0 || driver.uses_packets() {
            self.stop_polling(driver);
        } else if self.pollers.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.alarm.set();
        }
    }

    /// Ends the turns of a thread. The service thread follows at once if it was the last one.
    fn stop_polling(&self, driver: &mut D) {
        if self.pollers.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        for _ in 0..RESTS {
            if driver.rest() {
                return;
            }
        }
        self.waker.wake();
    }

    /// Serves until [`Turns::stop`], while no thread of the program polls.
    pub(crate) fn serve(&self, stage: NodeCounter, service: &mut impl Service) {
        while !self.stops.load(Ordering::Acquire) {
            let has_come = service.turn();
            service.saw(has_come);
            let is_polled = self.is_polled();
            if !is_polled && (has_come || service.pause()) {
                continue;
            }
            if self.may_sleep(stage, service.has_asked()) {
                service.sleep();
            }
            service.awake(is_polled);
        }
    }

    /// Returns whether the service thread may sleep: another thread polls, or nobody waits for what comes before the alarm, or that wakes it.
    fn may_sleep(&self, stage: NodeCounter, has_asked: bool) -> bool {
        let mut driver = self.lock_in(stage);
        let is_awaited = has_asked || self.sleepers.load(Ordering::Relaxed) > 0;
        self.is_polled() || (self.alarm.is_set() && !is_awaited) || driver.rest()
    }

    /// Ends the service.
    pub(crate) fn stop(&self) {
        self.stops.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// The driver, held by this thread. At the end, its frames are on their way, and threads that sleep look at what has changed.
pub(crate) struct Driving<'a, D: Drive> {
    turns: &'a Turns<D>,
    /// `None` after [`Driving::release`].
    driver: Option<MutexGuard<'a, D>>,
    /// [`Drive::changes`] at the beginning.
    changes: u64,
    /// The stage of the events that this thread handles.
    stage: NodeCounter,
}

impl<'a, D: Drive> Driving<'a, D> {
    /// Ends the change of the driver, and returns it as it is held.
    fn release(mut self) -> Option<MutexGuard<'a, D>> {
        self.end();
        self.driver.take()
    }

    fn end(&mut self) {
        if let Some(driver) = &mut self.driver {
            driver.settle(self.stage);
            if driver.changes() != self.changes && self.turns.sleepers.load(Ordering::Relaxed) > 0 {
                self.turns.changed.notify_all();
            }
        }
    }
}

impl<D: Drive> Deref for Driving<'_, D> {
    type Target = D;

    fn deref(&self) -> &D {
        self.driver
            .as_ref()
            .expect("it is held until `release` or the end")
    }
}

impl<D: Drive> DerefMut for Driving<'_, D> {
    fn deref_mut(&mut self) -> &mut D {
        self.driver
            .as_mut()
            .expect("it is held until `release` or the end")
    }
}

impl<D: Drive> Drop for Driving<'_, D> {
    fn drop(&mut self) {
        self.end();
    }
}
