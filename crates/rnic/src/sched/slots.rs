//! Slots for READs and atomic operations: a QP has few in flight (IBTA Vol 1, 11.2.4.2, outstanding RDMA READs and atomic operations at the
//! destination), and one more stops all that is behind it. So a connection that finds no slot rests, and the next one that is free is
//! kept for it.

use super::connection::Slot;
use super::hierarchy::{ConnectionId, GroupId, Hierarchy};
use crate::time::Time;

impl<Id: Copy> Hierarchy<Id> {
    /// Adds free slots to a group, which begins without any.
    pub fn add_slots(&mut self, now: Time, group: GroupId, slots: u32) {
        (0..slots).for_each(|_| self.return_slot(now, group));
    }

    /// Takes a slot for a connection whose turn it is and whose next request is a READ or atomic operation. If there is none, the connection
    /// rests, whatever [`Hierarchy::wake`] is told, until it has one: then it waits for its turn, in which this function succeeds.
    pub fn take_slot(&mut self, now: Time, connection: ConnectionId) -> bool {
        let at = connection.0.index;
        let Some(taker) = self.connections.get(connection.0) else {
            return false;
        };
        let (group_at, slot) = (taker.group, taker.slot);
        let group = &mut self.groups[group_at];
        match slot {
            Slot::Kept => {
                self.connections[at].slot = Slot::None;
                true
            }
            Slot::Lacking => false,
            // Those that are free have no connection for which they would be kept.
            Slot::None if group.slots > 0 => {
                group.slots -= 1;
                true
            }
            Slot::None => {
                group.lacking.push_back(&mut self.connections, at);
                self.rest(now, connection);
                self.connections[at].slot = Slot::Lacking;
                false
            }
        }
    }

    /// Returns a slot whose request has completed. The connection that has lacked one for longest waits for its turn again.
    pub fn return_slot(&mut self, now: Time, group: GroupId) {
        if self.groups.get(group.0).is_none() {
            return;
        }
        let group = &mut self.groups[group.0.index];
        let Some(at) = group.lacking.head() else {
            group.slots += 1;
            return;
        };
        group.lacking.remove(&mut self.connections, at);
        self.connections[at].slot = Slot::Kept;
        let connection = ConnectionId(self.connections.key(at));
        self.wake(now, connection);
    }

    /// Has a connection that is being removed lack no slot, and keep none.
    pub(super) fn drop_slot(&mut self, now: Time, connection: ConnectionId) {
        let at = connection.0.index;
        let Some(removed) = self.connections.get(connection.0) else {
            return;
        };
        let (group_at, slot) = (removed.group, removed.slot);
        self.connections[at].slot = Slot::None;
        match slot {
            Slot::None => {}
            Slot::Lacking => self.groups[group_at].lacking.remove(&mut self.connections, at),
            Slot::Kept => self.return_slot(now, GroupId(self.groups.key(group_at))),
        }
    }
}
