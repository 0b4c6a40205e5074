//! An alarm of the service thread, for the time after the last thread of the program has left the turns.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

/// Time for which a thread that has left may come back before the service thread takes turns. It is about as long as the two wake-ups of a
/// sleeping node; shorter times wake the service thread between two waits of a program that synchronises.
const DELAY: Duration = Duration::from_micros(100);

/// The alarm.
#[derive(Debug)]
pub(crate) struct Alarm {
    timer: OwnedFd,
    /// It has been set, and was not taken since.
    is_set: AtomicBool,
    /// Times that the last poller has left.
    left: AtomicU64,
    /// `left` when the timer began.
    begun: AtomicU64,
}

impl Alarm {
    /// Makes an alarm.
    ///
    /// # Errors
    /// The system refuses a timer.
    pub(crate) fn new() -> io::Result<Alarm> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Alarm {
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            is_set: AtomicBool::new(false),
            left: AtomicU64::new(0),
            begun: AtomicU64::new(0),
        })
    }

    /// Notes that a thread has left, and has the descriptor become readable soon, unless it will anyhow: of several threads, the first makes a system
    /// call.
    pub(crate) fn set(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
        if !self.is_set.swap(true, Ordering::Relaxed) {
            self.begin();
        }
    }

    fn begin(&self) {
        self.begun
            .store(self.left.load(Ordering::Relaxed), Ordering::Relaxed);
        let time = |time: Duration| Timespec {
            tv_sec: time.as_secs() as i64,
            tv_nsec: time.subsec_nanos().into(),
        };
        let once = Itimerspec {
            it_interval: time(Duration::ZERO),
            it_value: time(DELAY),
        };
        // Fails for wrong times alone.
        let _ = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
    }

    /// Returns whether it is going to go off, or has and was not taken.
    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Relaxed)
    }

    /// Takes note of the alarm if it has gone off, or sets it again if threads have left since it was set. The caller locks the driver afterwards.
    /// Threads that found the alarm set held it when they left.
    pub(crate) fn take(&self) {
        if !self.is_set() || rustix::io::read(&self.timer, &mut [0; 8]).is_err() {
            return;
        }
        match self.left.load(Ordering::Relaxed) == self.begun.load(Ordering::Relaxed) {
            true => self.is_set.store(false, Ordering::Relaxed),
            false => self.begin(),
        }
    }

    /// Returns the descriptor that becomes readable.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn wait(alarm: &Alarm) {
        let limit = Timespec {
            tv_sec: 60,
            tv_nsec: 0,
        };
        let timer = alarm.fd();
        let ready = poll(
            &mut [PollFd::from_borrowed_fd(timer, PollFlags::IN)],
            Some(&limit),
        );
        assert_eq!(ready, Ok(1));
    }

    #[test]
    fn take__sets_it_again_for_threads_that_have_left_since() {
        let alarm = Alarm::new().unwrap();
        alarm.take();
        assert!(!alarm.is_set());
        for _ in 0..2 {
            alarm.set();
            alarm.set();
            wait(&alarm);
            alarm.take();
            assert!(alarm.is_set());
            wait(&alarm);
            alarm.take();
            assert!(!alarm.is_set());
        }
    }
}
