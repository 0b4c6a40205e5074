//! The step to a time in which nobody takes turns.

use std::sync::atomic::{Ordering, fence};

use rdmux_verbs::Arm;

use super::Driver;
use crate::link::Link;

/// Steps of a node before it sleeps. Tests implement it with other links and queues.
pub(crate) trait Looks {
    /// Tells the nodes that count on this one's polling that it will sleep.
    fn tell_sleep(&mut self);
    /// Orders the accesses before it and after it.
    fn fence(&self, order: Ordering);
    /// Returns whether requests are in progress whose completions matter.
    fn is_busy(&self) -> bool;
    /// Returns whether the queue of bells is armed, and no turn has driven the device since.
    fn is_armed(&self) -> bool;
    /// Arms the queue of bells, and that of requests if it is busy.
    fn arm(&mut self, is_busy: bool);
    /// Takes what has come, as [`Driver::turn`] does.
    fn turn(&mut self, thoroughly: bool) -> bool;
    /// Notes whether the queue of bells is armed.
    fn set_armed(&mut self, is_armed: bool);
    /// Returns whether a node counts on this one's polling, and rings no bell.
    fn is_relied_on(&self) -> bool;
}

/// Prepares for a time in which nobody takes turns, but all that comes makes the descriptor of a queue readable. Returns false if that is not so
/// yet: try again.
pub(crate) fn rest(looks: &mut impl Looks) -> bool {
    looks.tell_sleep();
    // The nodes write frames, and then look whether this one sleeps: one of the two sees the other.
    looks.fence(Ordering::SeqCst);
    let is_busy = looks.is_busy();
    let is_quiet = if looks.is_armed() && !is_busy {
        !looks.turn(false) && looks.is_armed()
    } else {
        looks.arm(is_busy);
        let has_come = looks.turn(true);
        looks.set_armed(!has_come);
        !has_come
    };
    // The turn may have sent a frame. Its receiver then takes this node for awake, and rings no bell.
    is_quiet && !looks.is_relied_on()
}

impl Looks for Driver {
    fn tell_sleep(&mut self) {
        self.each_link(Link::tell_sleep);
        self.poll_work();
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }

    fn is_busy(&self) -> bool {
        self.links().any(Link::is_busy)
    }

    fn is_armed(&self) -> bool {
        self.is_armed
    }

    fn arm(&mut self, is_busy: bool) {
        self.queues.bells.arm(Arm::Next);
        if is_busy {
            self.queues.work.arm(Arm::Next);
        }
    }

    fn turn(&mut self, thoroughly: bool) -> bool {
        Driver::turn(self, thoroughly)
    }

    fn set_armed(&mut self, is_armed: bool) {
        self.is_armed = is_armed;
    }

    fn is_relied_on(&self) -> bool {
        self.links().any(Link::is_relied_on)
    }
}
