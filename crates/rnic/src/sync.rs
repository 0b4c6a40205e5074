//! Locks that a panic does not poison, for state that is whole after each statement.
//!
//! They are those of the standard library: one that no thread had at a fork works in the child. Those of `parking_lot` keep the waiters of all
//! locks in one table, which another thread may have had at the fork.

use std::sync::{LockResult, PoisonError, TryLockError};
use std::time::Duration;

pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

/// Mutual exclusion.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// Makes one that is not locked.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    /// Returns the value.
    pub fn into_inner(self) -> T {
        unpoisoned(self.0.into_inner())
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Returns the value, which no other thread can have.
    pub fn get_mut(&mut self) -> &mut T {
        unpoisoned(self.0.get_mut())
    }

    /// Waits until no other thread has it, and locks it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        unpoisoned(self.0.lock())
    }

    /// Locks it, unless another thread has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A lock that many readers or one writer have.
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    /// Makes one that is not locked.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock(std::sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits until no writer has it, and locks it for a reader.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        unpoisoned(self.0.read())
    }

    /// Waits until no other thread has it, and locks it for a writer.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        unpoisoned(self.0.write())
    }

    /// Locks it for a writer, unless another thread has it.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        match self.0.try_write() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Lets threads wait until the value behind a [`Mutex`] has changed.
#[derive(Debug, Default)]
pub struct Condvar(std::sync::Condvar);

impl Condvar {
    /// Makes one that nobody waits for.
    pub const fn new() -> Condvar {
        Condvar(std::sync::Condvar::new())
    }

    /// Waits as long as `condition` holds, which is looked at whenever a notification comes.
    pub fn wait_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        unpoisoned(self.0.wait_while(guard, condition))
    }

    /// Waits for so long at most. Returns whether the condition ended the wait.
    pub fn wait_timeout_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> (MutexGuard<'a, T>, bool) {
        let (guard, waited) = unpoisoned(self.0.wait_timeout_while(guard, timeout, condition));
        (guard, !waited.timed_out())
    }

    /// Wakes one thread that waits.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all threads that wait.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}
