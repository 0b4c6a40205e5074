//! Requests in flight on a shared queue pair, in order.

use std::collections::VecDeque;

use rdmux_rnic::{Operation, SgeList, Status};
use rdmux_wire::LKey;
use rdmux_wire::node::mux::Header;

use super::ConnectionId;

/// A request of the shared queue pair, kept until it has ended: another queue pair may have to carry it out.
#[derive(Clone, Debug)]
pub(super) enum Request {
    /// None: there is nothing to bring to the peer.
    Nothing,
    /// An operation on an application's memory.
    Direct(Operation, SgeList),
    /// A message, in a send buffer. Its header says nothing of slots yet.
    Message(u16, Header, SgeList),
}

/// Progress of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The queue pair has it.
    Posted,
    /// The queue pair has failed, and has given it back with this status. Nothing follows from that yet.
    Back(Status),
    /// The next queue pair is to carry it out.
    Again,
    /// It waits for those before it, and ends with this status.
    Over(Status),
}

/// A request that was posted for a piece or is a message of the nodes, or a piece that needs none and only waits for those before it.
#[derive(Debug)]
pub(super) struct Piece {
    /// The connection; none for messages of the nodes.
    pub(super) connection: Option<ConnectionId>,
    pub(super) request: Request,
    pub(super) progress: Progress,
    /// Set if later requests with a fence wait for it.
    pub(super) is_fenced: bool,
    /// Set if what it writes means nothing to the peer until a message follows.
    pub(super) has_message: bool,
    /// Messages that were posted before it on the same queue pair, modulo 2^32.
    pub(super) ordinal: u32,
    /// The driver's name of the piece, if this is all or the last of it.
    pub(super) tag: Option<u64>,
}

/// The pieces in flight, each named by its number since the shared queue pair began: a number is never used again, also when the device's queue
/// pair is replaced.
#[derive(Debug, Default)]
pub(super) struct Flight {
    pieces: VecDeque<Piece>,
    /// Pieces before the first in flight.
    completed: u64,
}

impl Flight {
    /// Adds an entry, and returns its number.
    pub(super) fn push(&mut self, piece: Piece) -> u64 {
        self.pieces.push_back(piece);
        self.end() - 1
    }

    /// Returns the number of the next piece.
    pub(super) fn end(&self) -> u64 {
        self.completed + self.pieces.len() as u64
    }

    /// Returns the number of the first piece that has not completed.
    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    /// Returns a piece in flight.
    pub(super) fn get_mut(&mut self, number: u64) -> Option<&mut Piece> {
        let at = number.checked_sub(self.completed)?;
        self.pieces.get_mut(usize::try_from(at).ok()?)
    }

    /// Returns all pieces, with their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Piece)> {
        (self.completed..).zip(&self.pieces)
    }

    /// Returns all pieces, with their numbers.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut Piece)> {
        (self.completed..).zip(&mut self.pieces)
    }

    /// Returns whether a piece has an element with this key.
    pub(super) fn uses(&self, lkey: LKey) -> bool {
        self.pieces.iter().any(|piece| match &piece.request {
            Request::Nothing => false,
            Request::Direct(_, list) | Request::Message(_, _, list) => {
                list.as_slice().iter().any(|sge| sge.lkey == lkey.0)
            }
        })
    }

    /// Takes the first piece.
    pub(super) fn pop(&mut self) -> Option<Piece> {
        let piece = self.pieces.pop_front()?;
        self.completed += 1;
        Some(piece)
    }

    /// Takes the first piece if it is over, and its status.
    pub(super) fn pop_over(&mut self) -> Option<(Piece, Status)> {
        match self.pieces.front()?.progress {
            Progress::Over(status) => Some((self.pop()?, status)),
            _ => None,
        }
    }
}
