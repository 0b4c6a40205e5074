//! Requests in flight on a shared queue pair, in order.

use std::collections::VecDeque;

use super::ConnectionId;

/// A request that was posted for a piece or is a message of the nodes, or a piece that needs none and only waits for those before it.
#[derive(Debug)]
pub(super) struct Piece {
    /// The connection; none for messages of the nodes.
    pub(super) connection: Option<ConnectionId>,
    /// Set if it was posted.
    pub(super) is_posted: bool,
    /// The send buffer of its message.
    pub(super) buffer: Option<u16>,
    /// Set if later requests with a fence wait for it.
    pub(super) is_fenced: bool,
    /// The driver's name of the piece, if this is all or the last of it.
    pub(super) tag: Option<u64>,
}

/// The pieces in flight, each named by its number since the queue pair began: a number is never used again.
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

    /// Returns whether a piece is posted and in flight.
    pub(super) fn has(&self, number: u64) -> bool {
        let at = number.checked_sub(self.completed);
        let piece = at.and_then(|at| self.pieces.get(usize::try_from(at).ok()?));
        piece.is_some_and(|piece| piece.is_posted)
    }

    /// Takes the first piece.
    pub(super) fn pop(&mut self) -> Option<Piece> {
        let piece = self.pieces.pop_front()?;
        self.completed += 1;
        Some(piece)
    }

    /// Takes the first piece if it was not posted.
    pub(super) fn pop_unposted(&mut self) -> Option<Piece> {
        self.pieces.front().filter(|piece| !piece.is_posted)?;
        self.pop()
    }
}
