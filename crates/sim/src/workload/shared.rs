//! Shared receive queues: only its completion tells which receive a message took.

use std::collections::BTreeMap;
use std::ops::Range;

use rdmux_rnic::{RecvRequest, Rnic, SgeList, Srqn};

use super::Checked;
use super::side::{Piece, Reg};
use crate::dice::Dice;
use crate::memory::Space;

#[derive(Debug)]
pub(super) struct SharedQueue {
    pub(super) srqn: Srqn,
    /// Posted receives that have not completed.
    pub(super) recvs: BTreeMap<u64, Piece>,
    /// Bytes of each receive.
    pub(super) len: u64,
    space: Space,
    depth: u32,
    next_id: u64,
    /// Armed limit.
    armed: Option<u32>,
    /// Receives left at the last look.
    left: usize,
}

impl SharedQueue {
    pub(super) fn new(srqn: Srqn, depth: u32, range: Range<u64>, dice: &mut Dice) -> SharedQueue {
        let most = (range.end - range.start) / u64::from(4 * depth);
        SharedQueue {
            srqn,
            recvs: BTreeMap::new(),
            len: dice.log_uniform(most),
            space: Space::new(range),
            depth,
            next_id: 0,
            armed: None,
            left: 0,
        }
    }

    /// Posts receives up to a random number, and arms the limit. `tag` is in the upper bits of each number.
    pub(super) fn fill(&mut self, rnic: &mut Rnic, dice: &mut Dice, common: &Reg, tag: u64) -> Checked {
        if dice.one_in(8) {
            self.resize(rnic, dice)?;
        }
        let wanted = dice.between(1, self.depth.into()) as usize;
        while rnic.query_srq(self.srqn).is_some_and(|info| info.posted < wanted) {
            let Some(at) = self.space.take(self.len) else {
                break;
            };
            let piece = Piece { at, len: self.len };
            let request = RecvRequest {
                wr_id: tag | self.next_id,
                sges: SgeList::from(&common.sges(&[piece])[..]),
            };
            rnic.post_srq_recv(self.srqn, request)
                .map_err(|error| format!("post_srq_recv: {error}"))?;
            self.recvs.insert(self.next_id, piece);
            self.next_id += 1;
        }
        if self.armed.is_none() || dice.one_in(4) {
            let limit = dice.between(1, self.depth.into()) as u32;
            rnic.modify_srq(self.srqn, None, Some(limit))
                .map_err(|error| format!("modify_srq: {error}"))?;
            self.armed = Some(limit);
        }
        self.left = rnic.query_srq(self.srqn).map_or(0, |info| info.posted);
        Ok(())
    }

    fn resize(&mut self, rnic: &mut Rnic, dice: &mut Dice) -> Checked {
        let posted = rnic.query_srq(self.srqn).map_or(0, |info| info.posted);
        let depth = dice.between(2, 24) as u32;
        let done = rnic.modify_srq(self.srqn, Some(depth), None);
        if done.is_ok() != (depth as usize >= posted) {
            return Err(format!("resized to {depth} with {posted} posted: {done:?}"));
        }
        if done.is_ok() {
            self.depth = depth;
        }
        Ok(())
    }

    /// Removes a completed receive. Returns the location of its bytes.
    pub(super) fn take(&mut self, id: u64) -> Option<Piece> {
        self.recvs.remove(&id)
    }

    pub(super) fn is_empty(&self, rnic: &Rnic) -> bool {
        rnic.query_srq(self.srqn).is_none_or(|info| info.posted == 0)
    }

    pub(super) fn give(&mut self, piece: Piece) {
        self.space.give(piece.at, piece.len);
    }

    /// Checks an event that reports that the limit was reached.
    pub(super) fn limit_reached(&mut self, rnic: &Rnic) -> Checked {
        let left = rnic.query_srq(self.srqn).map_or(0, |info| info.posted);
        match self.armed.take() {
            Some(limit) if left < limit as usize => Ok(()),
            Some(limit) => Err(format!("{left} receives remain, and the limit is {limit}")),
            None => Err("event for a limit that is not armed".to_owned()),
        }
    }

    /// Checks that no limit was reached without an event.
    pub(super) fn look(&mut self, rnic: &Rnic) -> Checked {
        let left = rnic.query_srq(self.srqn).map_or(0, |info| info.posted);
        let before = std::mem::replace(&mut self.left, left);
        match self.armed {
            Some(limit) if left < before && left < limit as usize => Err(format!(
                "{left} receives remain below a limit of {limit}, without an event"
            )),
            _ => Ok(()),
        }
    }
}
