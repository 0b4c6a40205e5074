//! Memory that peers are lent, because requests to them name it instead of holding its bytes (`rdmux_shm`, `lend.rs`).
//!
//! The first long request from a region makes this side offer the region; requests hold their bytes until the peer has accepted. A peer that
//! reaches the region by calls does so for some requests; then its memory moves into a file ([`super::share`]), and is lent anew.

use std::os::fd::AsFd;

use rdmux_rnic::{LKey, Memory, Qpn, Rnic, Sharing};

use super::share::application;
use super::{LinkMessage, LinkState, Links, say, slot_of};

/// Most regions that are remembered because they cannot be lent.
const REFUSED_MAX: usize = 64;

/// A region that requests of queue pair `of` to the peer's queue pair `by` may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) of: Qpn,
    pub(super) by: Qpn,
    pub(super) lkey: LKey,
}

/// Regions that are to be lent, and those that cannot be.
#[derive(Debug, Default)]
pub(super) struct Lendings {
    wanted: Vec<Wanted>,
    refused: Vec<Wanted>,
}

impl Lendings {
    #[inline]
    pub(super) fn are_due(&self) -> bool {
        !self.wanted.is_empty()
    }

    /// Notes that a region is to be lent.
    #[cold]
    pub(super) fn want(&mut self, wanted: Wanted) {
        if !self.wanted.contains(&wanted) && !self.refused.contains(&wanted) {
            self.wanted.push(wanted);
        }
    }

    fn refuse(&mut self, wanted: Wanted) {
        if self.refused.len() == REFUSED_MAX {
            self.refused.remove(0);
        }
        self.refused.push(wanted);
    }

    /// Forgets regions, which may be others by the time that requests name them again.
    pub(super) fn forget(&mut self, is_it: impl Fn(&Wanted) -> bool) {
        self.wanted.retain(|wanted| !is_it(wanted));
        self.refused.retain(|wanted| !is_it(wanted));
    }
}

impl Links {
    /// Offers the peers the regions that are to be lent.
    #[cold]
    pub(super) fn lend(&mut self, rnic: &mut Rnic) {
        for wanted in std::mem::take(&mut self.lendings.wanted) {
            if !self.lend_one(rnic, wanted) {
                self.lendings.refuse(wanted);
            }
        }
    }

    /// Returns false if a region cannot be lent.
    fn lend_one(&mut self, rnic: &mut Rnic, wanted: Wanted) -> bool {
        let Wanted { of, by, lkey } = wanted;
        let memory = rnic
            .memories()
            .find_map(|(key, memory)| (key == lkey).then_some(memory));
        if let Some(memory) = memory
            && application(&memory).is_some_and(|memory| self.sharings.moves(memory))
        {
            // Once the memory has moved, the next request asks again.
            self.begin_sharing(rnic, memory, lkey, None);
            return true;
        }
        let info = rnic
            .query_qp(of)
            .filter(|info| self.grants && info.dest_qpn == by);
        let path = info.and_then(|info| info.path);
        let Some(link) = path.and_then(|path| self.link_to((path.dst, slot_of(by)))) else {
            return true;
        };
        let LinkState::Up(channel) = &mut link.state else {
            return true;
        };
        let Ok(grantable) = rnic.lendable(of, lkey, channel.lending(of)) else {
            return false;
        };
        if channel.has_lent(of, lkey) {
            // By calls, and often enough.
            let sharing = application(&grantable.memory).and_then(|memory| memory.sharing());
            if sharing == Some(Sharing::NotYet) {
                self.begin_sharing(rnic, grantable.memory, lkey, None);
            }
            return true;
        }
        let Ok((offer, file)) = channel.lend(&grantable, of, by) else {
            return false;
        };
        let files: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        // A peer that does not read its messages accepts nothing.
        let _ = say(&link.socket, &LinkMessage::Lend(offer), &files);
        true
    }
}
