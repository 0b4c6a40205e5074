//! A flow: the requests of a queue pair of an application.

use std::collections::VecDeque;

use rdmux_rnic::Time;
use rdmux_rnic::sched::ConnectionId;

use super::{GroupId, Owner, Request};
use crate::node::snapshot::Counts;

/// A request that is not complete.
#[derive(Debug)]
pub(super) struct Entry<B> {
    pub(super) request: Request,
    /// The caller's part, until all of it is posted.
    pub(super) body: Option<B>,
    /// Bytes of which pieces have been taken.
    pub(super) posted_bytes: u32,
    pub(super) submitted: Time,
}

/// Where the pieces of a flow go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    pub(super) group: GroupId,
    pub(super) connection: ConnectionId,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Flow<B> {
    pub(super) owner: Owner,
    pub(super) requests_max: u32,
    pub(super) entries: VecDeque<Entry<B>>,
    /// Place of the first of them, modulo 2^32.
    pub(super) first: u32,
    /// How many of them are posted completely.
    pub(super) posted: u32,
    /// Pieces that have been taken and have not come back.
    pub(super) in_flight: u32,
    pub(super) bound: Option<Bound>,
    /// Set while its queue pair begins nothing: SQD.
    pub(super) paused: bool,
    /// Set while it lacks what its next request needs.
    pub(super) held: bool,
    /// Set once a request of it has failed, or its queue pair has.
    pub(super) failed: bool,
    /// Set once it is gone for its owner, while pieces of it are in flight.
    pub(super) is_removed: bool,
    pub(super) counts: Counts,
}

impl<B> Flow<B> {
    pub(super) fn new(owner: Owner, requests_max: u32) -> Flow<B> {
        Flow {
            owner,
            requests_max,
            entries: VecDeque::new(),
            first: 0,
            posted: 0,
            in_flight: 0,
            bound: None,
            paused: false,
            held: false,
            failed: false,
            is_removed: false,
            counts: Counts::default(),
        }
    }

    /// Returns whether it has something to send, and may send it as far as it is concerned.
    pub(super) fn may_send(&self) -> bool {
        !self.paused && !self.held && !self.failed && (self.posted as usize) < self.entries.len()
    }

    /// Returns the request at a place, unless it is over.
    pub(super) fn entry(&self, place: u32) -> Option<&Entry<B>> {
        self.entries.get(place.wrapping_sub(self.first) as usize)
    }

    /// Returns the request at a place, unless it is over.
    pub(super) fn entry_mut(&mut self, place: u32) -> Option<&mut Entry<B>> {
        self.entries.get_mut(place.wrapping_sub(self.first) as usize)
    }

    /// Removes the first request.
    pub(super) fn pop(&mut self) -> Option<Entry<B>> {
        let entry = self.entries.pop_front()?;
        self.first = self.first.wrapping_add(1);
        self.posted = self.posted.saturating_sub(1);
        Some(entry)
    }
}
