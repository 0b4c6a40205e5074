//! Objects that a program has: their addresses.
//!
//! Some programs go on after an error, and pass what never was an object, or was one: perftest does when a service for datagrams is refused.
//! The calls with which programs begin and end ask here. An object at the address of one that was destroyed is taken for that one.

use std::collections::BTreeSet;

use rdmux_verbs::sync::Mutex;

/// The objects of a kind.
pub(super) struct Made(Mutex<BTreeSet<usize>>);

impl Made {
    pub(super) const fn new() -> Made {
        Made(Mutex::new(BTreeSet::new()))
    }

    pub(super) fn add<T>(&self, object: *mut T) {
        self.0.lock().insert(object.addr());
    }

    pub(super) fn has<T>(&self, object: *mut T) -> bool {
        self.0.lock().contains(&object.addr())
    }

    /// Removes an object, which is to be destroyed. Returns false if there is none.
    pub(super) fn remove<T>(&self, object: *mut T) -> bool {
        self.0.lock().remove(&object.addr())
    }
}
