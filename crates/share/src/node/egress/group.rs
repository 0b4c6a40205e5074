//! A group: a send queue of the device, and the pieces that are posted to it.

use std::collections::VecDeque;

use rdmux_rnic::Time;
use rdmux_rnic::sched::{
    DeviceFlight, DeviceWindow, GroupId as HierarchyGroup, InFlight, PIECE_BYTES_MIN, Window, WindowLimits,
};

use super::{FlowId, PLACE_BITS};

/// Bytes that may be posted without a completion being asked for: so many are not counted as in flight.
const QUIET_BYTES_MAX: u32 = PIECE_BYTES_MIN;

/// Properties of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::node) struct GroupOptions {
    /// The class, below [`rdmux_rnic::sched::CLASSES`].
    pub(in crate::node) class: usize,
    /// Path MTU of the send queue in bytes: the pieces of a long message are a multiple of it.
    pub(in crate::node) path_mtu: u32,
    /// Requests that the send queue holds.
    pub(in crate::node) depth: u32,
    /// READs and atomic operations that may be in flight, where flows share the send queue: one more would stop all of them. `None`: the
    /// device waits by itself.
    pub(in crate::node) slots: Option<u32>,
    /// Set if a piece whose request asks for no completion may complete only with a later one. Where flows share the send queue, the later
    /// one might be another flow's and come late.
    pub(in crate::node) may_be_quiet: bool,
}

/// Bytes in flight, for the window of the group and for that of the device.
pub(super) type Flight = (InFlight, DeviceFlight);

/// A piece that is posted.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) flow: FlowId,
    /// Place of its request in the flow.
    pub(super) entry: u32,
    pub(super) last: bool,
    /// Set if it has a slot of the group.
    pub(super) takes_slot: bool,
    /// The bytes that its completion accounts for; `None`: a later one does.
    pub(super) in_flight: Option<Flight>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) id: HierarchyGroup,
    window: Window,
    /// Set while completions come in time.
    is_prompt: bool,
    pub(super) path_mtu: u32,
    pub(super) has_slots: bool,
    pub(super) class: usize,
    may_be_quiet: bool,
    depth: usize,
    pub(super) posted: VecDeque<Posted>,
    /// Place of the first of them, modulo 2^31.
    first: u32,
    /// Pieces, and their bytes, that have been posted since the last one that is signaled. They are not in flight for the window, since nothing
    /// might tell when they are complete.
    quiet: (u32, u32),
}

const PLACE_MASK: u32 = (1 << PLACE_BITS) - 1;

impl Group {
    pub(super) fn new(now: Time, id: HierarchyGroup, options: &GroupOptions, limits: WindowLimits) -> Group {
        Group {
            id,
            window: Window::new(now, limits),
            is_prompt: false,
            path_mtu: options.path_mtu,
            has_slots: options.slots.is_some(),
            class: options.class,
            may_be_quiet: options.may_be_quiet,
            depth: options.depth.max(1) as usize,
            posted: VecDeque::new(),
            first: 0,
            quiet: (0, 0),
        }
    }

    /// Returns the bytes in flight, and the bytes that may be.
    pub(super) fn window(&self, piece_bytes: u32) -> (u64, u64) {
        (self.window.in_flight(), self.window.bytes(piece_bytes).into())
    }

    /// Returns whether a piece may be posted.
    pub(super) fn takes(&self, piece_bytes: u32) -> bool {
        self.posted.len() < self.depth && self.window.is_open(piece_bytes)
    }

    /// Adds a piece that counts for `bytes`. Returns its place, and whether the device is to complete it: because its request `asks` for it,
    /// or because the window, the slots or the queue's room would be unknown for too long.
    pub(super) fn post(
        &mut self,
        now: Time,
        mut piece: Posted,
        bytes: u32,
        asks: bool,
        piece_bytes: u32,
        device: &mut DeviceWindow,
    ) -> (u32, bool) {
        let (pieces, quiet_bytes) = (self.quiet.0 + 1, self.quiet.1 + bytes);
        let signaled = asks
            || !self.may_be_quiet
            || piece.takes_slot
            || quiet_bytes >= QUIET_BYTES_MAX
            || pieces as usize >= self.depth.div_ceil(2);
        if signaled {
            piece.in_flight = Some((
                self.window.posted(now, quiet_bytes, piece_bytes),
                device.posted(now, quiet_bytes, self.is_prompt, piece_bytes),
            ));
            self.quiet = (0, 0);
        } else {
            self.quiet = (pieces, quiet_bytes);
        }
        let place = self.first.wrapping_add(self.posted.len() as u32) & PLACE_MASK;
        self.posted.push_back(piece);
        (place, signaled)
    }

    /// Returns how many pieces there are up to the one at a place; `None` if that is not posted.
    pub(super) fn count_through(&self, place: u32) -> Option<usize> {
        let at = (place.wrapping_sub(self.first) & PLACE_MASK) as usize;
        (at < self.posted.len()).then_some(at + 1)
    }

    /// Removes the first piece.
    pub(super) fn take_first(&mut self) -> Option<Posted> {
        let piece = self.posted.pop_front()?;
        self.first = self.first.wrapping_add(1) & PLACE_MASK;
        if self.posted.is_empty() {
            self.quiet = (0, 0);
        }
        Some(piece)
    }

    /// Removes the piece at a place, if it is the last one: it was not posted.
    pub(super) fn take_back(&mut self, place: u32) -> Option<Posted> {
        if self.count_through(place) != Some(self.posted.len()) {
            return None;
        }
        self.posted.pop_back()
    }

    /// Accounts for bytes whose completion has come.
    pub(super) fn completed(
        &mut self,
        now: Time,
        (in_flight, of_device): Flight,
        piece_bytes: u32,
        device: &mut DeviceWindow,
    ) {
        self.window.completed(now, in_flight, piece_bytes);
        self.is_prompt = device.completed(now, of_device);
    }

    /// Accounts for bytes that will not complete, as the send queue has failed.
    pub(super) fn lost(&mut self, (in_flight, of_device): Flight, device: &mut DeviceWindow) {
        self.window.lost(in_flight);
        device.lost(of_device);
    }
}
