//! Connections inside a class: byte-exact deficit round robin, with a list of new connections that come first, as Linux's sch_fq_codel.
//!
//! A connection that begins to send is *new*: it may send [`Quanta::sparse_bytes`] before the others, an advance that it pays back. When it
//! has used them up or has nothing more to send it moves to the end of the *old* list, whose turns pay the advance; an old connection
//! without anything to send leaves the list when its turn comes and the advance is paid, and only then can it be new again. So being new
//! changes when a connection sends, never how much. One that begins to send before it has paid may use another advance at its turn, as
//! long as it owes no more than [`ADVANCES_MAX`]. One whose last burst did not fit into the advance is *bulk*, and begins as an old one until a burst fits.

use super::Quanta;
use super::list::{Linked, Links, List, Slab};

/// Advances that a connection may owe. With one, a short message that closely follows another one would wait for several turns of everybody.
const ADVANCES_MAX: i64 = 2;

/// Lists of a group: the new or the old connections, of which a connection is in one at most, and those that lack a slot.
pub(super) const TURNS: usize = 0;
pub(super) const LACKING: usize = 1;
/// Lists of a class: groups with new connections, and groups with old ones.
pub(super) const NEW: usize = 0;
pub(super) const OLD: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Out,
    New,
    Old,
}

/// State of a connection's claim to a slot for a READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    None,
    /// It rests until there is one.
    Lacking,
    /// One is kept for its next turn.
    Kept,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Connection<Id> {
    pub(super) id: Id,
    pub(super) group: u32,
    links: [Links; 2],
    pub(super) slot: Slot,
    place: Place,
    /// Set when it has something to send and may send it.
    pub(super) waiting: bool,
    bulk: bool,
    /// Bytes that it may send in this turn; negative when its last piece exceeded them, or it has to pay an advance.
    credit: i64,
    /// Part of the advance that an old connection may use.
    overdraft: i64,
    /// Bytes that it has sent since it began to wait.
    burst: i64,
}

impl<Id> Connection<Id> {
    pub(super) fn new(id: Id, group: u32) -> Connection<Id> {
        Connection {
            id,
            group,
            links: Default::default(),
            slot: Slot::None,
            place: Place::Out,
            waiting: false,
            bulk: false,
            credit: 0,
            overdraft: 0,
            burst: 0,
        }
    }

    /// Bytes that it may send in this turn, if that is more than 0.
    pub(super) fn bytes(&self) -> i64 {
        self.credit + self.overdraft
    }

    /// Returns whether its last burst did not fit into the advance, or this one does not.
    pub(super) fn is_bulk(&self, quanta: &Quanta) -> bool {
        self.bulk || self.exceeds_advance(quanta)
    }

    fn exceeds_advance(&self, quanta: &Quanta) -> bool {
        self.burst > ADVANCES_MAX * i64::from(quanta.sparse_bytes)
    }
}

impl<Id> Linked for Connection<Id> {
    fn links(&mut self, list: usize) -> &mut Links {
        &mut self.links[list]
    }
}

/// Connections that may send or may not send together: those of one shared QP.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) tenant: u32,
    pub(super) class: usize,
    links: [Links; 2],
    /// Set for each list of the class that has the group.
    pub(super) listed: [bool; 2],
    /// Set when its connections may send.
    pub(super) open: bool,
    pub(super) connections: u32,
    /// Connections that wait.
    pub(super) waiting: u32,
    pub(super) new: List<TURNS>,
    pub(super) old: List<TURNS>,
    /// Slots that are free, and connections that lack one: there are never both.
    pub(super) slots: u32,
    pub(super) lacking: List<LACKING>,
    /// Turns of old connections until it is another group's turn.
    pub(super) turns: u32,
}

impl Linked for Group {
    fn links(&mut self, list: usize) -> &mut Links {
        &mut self.links[list]
    }
}

impl Group {
    pub(super) fn new(tenant: u32, class: usize) -> Group {
        Group {
            tenant,
            class,
            links: Default::default(),
            listed: [false; 2],
            open: true,
            connections: 0,
            waiting: 0,
            new: List::default(),
            old: List::default(),
            slots: 0,
            lacking: List::default(),
            turns: 0,
        }
    }

    /// Has connection `at`, which did not wait, wait. Returns whether it is a new one.
    pub(super) fn wake<Id>(&mut self, slab: &mut Slab<Connection<Id>>, at: u32, quanta: &Quanta) -> bool {
        self.waiting += 1;
        let connection = &mut slab[at];
        connection.waiting = true;
        connection.burst = 0;
        connection.overdraft = 0;
        if connection.place != Place::Out {
            if !connection.bulk {
                connection.overdraft = ADVANCES_MAX * i64::from(quanta.sparse_bytes);
            }
            return false;
        }
        let new = !connection.bulk && quanta.sparse_bytes > 0;
        if new {
            (connection.place, connection.credit) = (Place::New, i64::from(quanta.sparse_bytes));
            self.new.push_back(slab, at);
        } else {
            self.append(slab, at, 0, quanta);
        }
        new
    }

    /// Has connection `at`, which waited, wait no more.
    pub(super) fn rest<Id>(&mut self, slab: &mut Slab<Connection<Id>>, at: u32, quanta: &Quanta) {
        self.waiting -= 1;
        let connection = &mut slab[at];
        connection.waiting = false;
        connection.bulk = connection.exceeds_advance(quanta);
        if connection.place == Place::New {
            self.leave_new(slab, at, quanta);
        }
        // It saves up no credit.
        slab[at].credit = slab[at].credit.min(0);
    }

    /// Takes connection `at` out of the group's lists.
    pub(super) fn remove<Id>(&mut self, slab: &mut Slab<Connection<Id>>, at: u32) {
        match slab[at].place {
            Place::Out => {}
            Place::New => self.new.remove(slab, at),
            Place::Old => {
                self.old.remove(slab, at);
                self.turns = self.turns.saturating_sub(1);
            }
        }
        slab[at].place = Place::Out;
    }

    /// Accounts for `sent` bytes of connection `at`, which still waits or not.
    pub(super) fn charge<Id>(
        &mut self,
        slab: &mut Slab<Connection<Id>>,
        at: u32,
        sent: i64,
        more: bool,
        quanta: &Quanta,
    ) {
        let connection = &mut slab[at];
        connection.credit -= sent;
        connection.burst += sent;
        let place = connection.place;
        if connection.waiting && !more {
            self.rest(slab, at, quanta);
            // Its turn ends here, so it need not wait for the next one to leave.
            if place == Place::Old && slab[at].credit >= 0 {
                self.remove(slab, at);
            }
        } else if connection.bytes() <= 0 || sent == 0 {
            match place {
                Place::Out => {}
                Place::New => self.leave_new(slab, at, quanta),
                Place::Old => self.rotate(slab, at, quanta),
            }
        }
    }

    /// Returns the first old connection that waits and has credit, or `None` if the group's turn ends before.
    pub(super) fn first_old<Id>(&mut self, slab: &mut Slab<Connection<Id>>, quanta: &Quanta) -> Option<u32> {
        while self.turns > 0
            && let Some(at) = self.old.head()
        {
            let connection = &mut slab[at];
            if connection.waiting && connection.bytes() > 0 {
                return Some(at);
            }
            if !connection.waiting && connection.credit >= 0 {
                self.remove(slab, at);
            } else {
                self.rotate(slab, at, quanta);
            }
        }
        None
    }

    /// Takes out all old connections, none of which waits: what they owe is owed to nobody.
    pub(super) fn clear<Id>(&mut self, slab: &mut Slab<Connection<Id>>) {
        while let Some(at) = self.old.head() {
            self.remove(slab, at);
        }
    }

    fn leave_new<Id>(&mut self, slab: &mut Slab<Connection<Id>>, at: u32, quanta: &Quanta) {
        self.new.remove(slab, at);
        let left = slab[at].credit - i64::from(quanta.sparse_bytes);
        self.append(slab, at, left, quanta);
    }

    fn append<Id>(&mut self, slab: &mut Slab<Connection<Id>>, at: u32, credit: i64, quanta: &Quanta) {
        let connection = &mut slab[at];
        connection.place = Place::Old;
        connection.credit = credit + i64::from(quanta.quantum_bytes);
        self.old.push_back(slab, at);
    }

    /// Ends the turn of old connection `at`.
    fn rotate<Id>(&mut self, slab: &mut Slab<Connection<Id>>, at: u32, quanta: &Quanta) {
        let quantum = i64::from(quanta.quantum_bytes);
        slab[at].credit = (slab[at].credit + quantum).min(quantum);
        self.old.move_back(slab, at);
        self.turns = self.turns.saturating_sub(1);
    }
}
