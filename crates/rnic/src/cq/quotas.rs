//! Quotas of a completion queue that several users share: none of them takes the room that another one has reserved.
//!
//! Each user has a *share*, of which the completions of the user's QPs take room until they are polled. A share may draw on another one
//! once it is full, as connections do that share their receives. The shares of a queue add up to no more than its depth, which whoever
//! makes them takes care of, so that the queue has room as long as every share has.

use rdmux_wire::Qpn;

use super::TooShort;
use crate::region::NumberMap;

/// A share of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ShareId(u32);

#[derive(Clone, Copy, Debug)]
struct Share {
    limit: usize,
    /// Its completions in the queue that take room of its own, and those that draw on `common`.
    count: usize,
    drawing: usize,
    common: Option<ShareId>,
    /// Completions of others that draw on it.
    drawn: usize,
    /// Completions in the queue of its QPs that are gone.
    gone: usize,
}

impl Share {
    fn has_room(&self) -> bool {
        self.count + self.drawn < self.limit
    }
}

#[derive(Clone, Copy, Debug)]
struct User {
    share: ShareId,
    /// Its completions in the queue.
    count: usize,
    /// Set once a completion was lost.
    lost: bool,
    /// Set once the QP is gone: its completions take room of the share until they are polled.
    is_gone: bool,
}

#[derive(Debug, Default)]
pub(super) struct Quotas {
    next: u32,
    shares: NumberMap<Share>,
    users: NumberMap<User>,
    /// Completions in the queue that count against no share: those of shares that are gone, and of QPs that never had one.
    left_over: usize,
}

/// Effect of a completion on its QP's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Charged {
    Yes,
    /// The share has no room, or a completion of the QP was lost already: this one is lost, too.
    Lost,
}

impl Quotas {
    pub(super) fn add_share(&mut self, limit: usize) -> ShareId {
        while self.shares.contains_key(&self.next) {
            self.next = self.next.wrapping_add(1);
        }
        let id = ShareId(self.next);
        // A number that was used comes again as late as possible.
        self.next = self.next.wrapping_add(1);
        self.shares.insert(
            id.0,
            Share {
                limit,
                count: 0,
                drawing: 0,
                common: None,
                drawn: 0,
                gone: 0,
            },
        );
        id
    }

    /// Ends a share. No QP has it any more, and none draws on it. What its QPs have left in the queue is nobody's from then on.
    pub(super) fn remove_share(&mut self, id: ShareId) {
        let has_gone = self.shares.get(&id.0).is_some_and(|share| share.gone > 0);
        if has_gone {
            let mut gone = Vec::new();
            for (qpn, user) in &self.users {
                gone.extend((user.share == id).then_some(Qpn::new(*qpn)));
            }
            gone.into_iter().for_each(|qpn| self.forget_gone(qpn));
        }
        self.shares.remove(&id.0);
    }

    /// Changes the room of a share, unless its completions need more.
    pub(super) fn set_limit(&mut self, id: ShareId, limit: usize) -> Result<(), TooShort> {
        if let Some(share) = self.shares.get_mut(&id.0) {
            if limit < share.limit && limit < share.count + share.drawn {
                return Err(TooShort);
            }
            share.limit = limit;
        }
        Ok(())
    }

    /// Has a share draw on another one once it is full, with all that it draws now.
    pub(super) fn draw_on(&mut self, id: ShareId, common: ShareId) {
        let Some(share) = self.shares.get_mut(&id.0) else {
            return;
        };
        let (drawing, before) = (share.drawing, share.common.replace(common));
        if let Some(before) = before.and_then(|before| self.shares.get_mut(&before.0)) {
            before.drawn = before.drawn.saturating_sub(drawing);
        }
        if let Some(common) = self.shares.get_mut(&common.0) {
            common.drawn += drawing;
        }
    }

    /// Has the completions of a QP count against a share.
    pub(super) fn add_user(&mut self, qpn: Qpn, share: ShareId) {
        // The number may be that of a QP that is gone.
        self.forget_gone(qpn);
        let user = User {
            share,
            count: 0,
            lost: false,
            is_gone: false,
        };
        self.users.insert(qpn.value(), user);
    }

    /// Notes that a QP is gone. Its completions stay in the queue until they are polled, and take room of the share: otherwise a user that makes
    /// QP after QP could fill the queue.
    pub(super) fn remove_user(&mut self, qpn: Qpn) {
        let Some(user) = self.users.get_mut(&qpn.value()) else {
            return;
        };
        user.is_gone = true;
        let User { share, count, .. } = *user;
        if let Some(share) = self.shares.get_mut(&share.0) {
            share.gone += count;
        }
        if count == 0 {
            self.users.remove(&qpn.value());
        }
    }

    /// Gives back the room of the completions of a QP that is gone, which stay in the queue.
    fn forget_gone(&mut self, qpn: Qpn) {
        if let Some(user) = self.users.remove(&qpn.value()) {
            (0..user.count).for_each(|_| self.give_back(user.share));
            self.left_over += user.count;
            if let Some(share) = self.shares.get_mut(&user.share.0) {
                share.gone -= user.count;
            }
        }
    }

    /// Counts a completion of a QP, unless its share has no room. A QP that has lost one gets no other until it is reset, so that those
    /// that its owner polls are the first ones.
    pub(super) fn charge(&mut self, qpn: Qpn) -> Charged {
        let Some(user) = self.users.get_mut(&qpn.value()) else {
            self.left_over += 1;
            return Charged::Yes;
        };
        if user.lost {
            return Charged::Lost;
        }
        if !take(&mut self.shares, user.share) {
            user.lost = true;
            return Charged::Lost;
        }
        user.count += 1;
        Charged::Yes
    }

    /// Uncounts a completion that was polled, or is forgotten.
    pub(super) fn release(&mut self, qpn: Qpn) {
        match self.users.get_mut(&qpn.value()) {
            Some(user) if user.count > 0 => {
                user.count -= 1;
                let User {
                    share,
                    count,
                    is_gone,
                    ..
                } = *user;
                self.give_back(share);
                if is_gone && let Some(share) = self.shares.get_mut(&share.0) {
                    share.gone -= 1;
                }
                if is_gone && count == 0 {
                    self.users.remove(&qpn.value());
                }
            }
            _ => self.left_over = self.left_over.saturating_sub(1),
        }
    }

    /// Returns the share that a completion counts against that leaves the queue and goes on counting; uncounts it if there is none.
    pub(super) fn hold(&mut self, qpn: Qpn) -> Option<ShareId> {
        let user = self.users.get(&qpn.value());
        let share = user
            .filter(|user| user.count > 0 && !user.is_gone)
            .map(|user| user.share);
        if share.is_none() {
            self.release(qpn);
        }
        share
    }

    /// Notes that a QP is reset: it has no completion in the queue.
    pub(super) fn reset(&mut self, qpn: Qpn) {
        if let Some(user) = self.users.get_mut(&qpn.value()) {
            user.lost = false;
        }
    }

    /// Returns whether a completion of a QP was lost since it was reset.
    pub(super) fn has_lost(&self, qpn: Qpn) -> bool {
        self.users.get(&qpn.value()).is_some_and(|user| user.lost)
    }

    pub(super) fn left_over(&self) -> usize {
        self.left_over
    }

    fn give_back(&mut self, id: ShareId) {
        let Some(share) = self.shares.get_mut(&id.0) else {
            return;
        };
        if share.drawing == 0 {
            share.count = share.count.saturating_sub(1);
            return;
        }
        share.drawing -= 1;
        let common = share.common;
        if let Some(common) = common.and_then(|common| self.shares.get_mut(&common.0)) {
            common.drawn = common.drawn.saturating_sub(1);
        }
    }
}

/// Takes room for one completion of a share, or of the one that it draws on.
fn take(shares: &mut NumberMap<Share>, id: ShareId) -> bool {
    let Some(share) = shares.get(&id.0) else {
        return false;
    };
    let draws = !share.has_room();
    if draws {
        let common = share.common.and_then(|common| shares.get_mut(&common.0));
        match common.filter(|common| common.has_room()) {
            Some(common) => common.drawn += 1,
            None => return false,
        }
    }
    if let Some(share) = shares.get_mut(&id.0) {
        share.count += usize::from(!draws);
        share.drawing += usize::from(draws);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const QPNS: [u32; 3] = [17, 18, 19];

    impl Quotas {
        /// Returns the number of a share's completions in the queue, with those that draw on it.
        fn count(&self, id: ShareId) -> usize {
            let of = |share: &Share| share.count + share.drawing + share.drawn;
            self.shares.get(&id.0).map_or(0, of)
        }
    }

    fn charge(quotas: &mut Quotas, qpn: u32) -> Charged {
        quotas.charge(Qpn::new(qpn))
    }

    #[test]
    fn charge__up_to_the_limit_and_none_after_a_loss() {
        let mut quotas = Quotas::default();
        let [one, other] = [2, 1].map(|limit| quotas.add_share(limit));
        quotas.add_user(Qpn::new(17), one);
        quotas.add_user(Qpn::new(18), other);
        assert_eq!([(); 2].map(|()| charge(&mut quotas, 17)), [Charged::Yes; 2]);
        assert_eq!(charge(&mut quotas, 17), Charged::Lost);
        quotas.release(Qpn::new(17));
        assert_eq!(charge(&mut quotas, 17), Charged::Lost, "though there is room");
        assert_eq!(charge(&mut quotas, 18), Charged::Yes, "of its own");
        quotas.release(Qpn::new(17));
        quotas.reset(Qpn::new(17));
        assert_eq!([(); 2].map(|()| charge(&mut quotas, 17)), [Charged::Yes; 2]);
        assert_eq!((quotas.count(one), quotas.count(other)), (2, 1));
    }

    #[test]
    fn charge__what_was_drawn_goes_back_after_the_shares_have_changed() {
        let mut quotas = Quotas::default();
        let share = quotas.add_share(1);
        let [common, other] = [2, 3].map(|limit| quotas.add_share(limit));
        quotas.draw_on(share, common);
        quotas.add_user(Qpn::new(17), share);
        assert_eq!([(); 3].map(|()| charge(&mut quotas, 17)), [Charged::Yes; 3]);
        assert_eq!(quotas.count(common), 2);
        quotas.set_limit(share, 3).unwrap();
        quotas.draw_on(share, other);
        assert_eq!((quotas.count(common), quotas.count(other)), (0, 2));
        (0..3).for_each(|_| quotas.release(Qpn::new(17)));
        assert_eq!([share, common, other].map(|id| quotas.count(id)), [0; 3]);
        assert_eq!([(); 6].map(|()| charge(&mut quotas, 17)), [Charged::Yes; 6]);
        assert_eq!(charge(&mut quotas, 17), Charged::Lost);
    }

    #[test]
    fn charge__several_queue_pairs_of_a_share() {
        let mut quotas = Quotas::default();
        let share = quotas.add_share(3);
        QPNS.iter().for_each(|qpn| quotas.add_user(Qpn::new(*qpn), share));
        assert_eq!(QPNS.map(|qpn| charge(&mut quotas, qpn)), [Charged::Yes; 3]);
        assert_eq!(charge(&mut quotas, 18), Charged::Lost);
        quotas.release(Qpn::new(17));
        assert_eq!(charge(&mut quotas, 19), Charged::Yes);
    }

    #[test]
    fn draw_on__what_goes_beyond_the_limit() {
        let mut quotas = Quotas::default();
        let common = quotas.add_share(2);
        let shares = QPNS.map(|qpn| {
            let share = quotas.add_share(1);
            quotas.draw_on(share, common);
            quotas.add_user(Qpn::new(qpn), share);
            share
        });
        assert_eq!(
            [17, 17, 17, 18].map(|qpn| charge(&mut quotas, qpn)),
            [Charged::Yes; 4]
        );
        assert_eq!((quotas.count(common), quotas.count(shares[0])), (2, 3));
        assert_eq!(charge(&mut quotas, 18), Charged::Lost);
        assert_eq!(charge(&mut quotas, 19), Charged::Yes, "its own room is its own");
        quotas.release(Qpn::new(17));
        assert_eq!(quotas.count(common), 1);
        assert_eq!(charge(&mut quotas, 19), Charged::Yes);
    }

    #[test]
    fn remove_user__leaves_its_completions_to_the_share() {
        let mut quotas = Quotas::default();
        let [common, share] = [1, 2].map(|limit| quotas.add_share(limit));
        quotas.draw_on(share, common);
        for qpn in [17, 18] {
            quotas.add_user(Qpn::new(qpn), share);
        }
        assert_eq!(
            [17, 17, 18].map(|qpn| charge(&mut quotas, qpn)),
            [Charged::Yes; 3]
        );
        quotas.remove_user(Qpn::new(17));
        assert_eq!((quotas.left_over(), quotas.count(common)), (0, 1));
        assert_eq!(charge(&mut quotas, 18), Charged::Lost, "they take room");
        quotas.reset(Qpn::new(18));
        quotas.release(Qpn::new(17));
        assert_eq!(charge(&mut quotas, 18), Charged::Yes);
        // The share's end leaves one of the queue pair that is gone before, and two of the other one.
        quotas.remove_user(Qpn::new(18));
        quotas.remove_share(share);
        assert_eq!((quotas.left_over(), quotas.count(common)), (3, 0));
        for qpn in [17, 18, 18] {
            quotas.release(Qpn::new(qpn));
        }
        assert_eq!(quotas.left_over(), 0);
        assert!(quotas.users.is_empty());
    }

    #[test]
    fn add_user__with_the_number_of_one_that_is_gone() {
        let mut quotas = Quotas::default();
        let share = quotas.add_share(2);
        quotas.add_user(Qpn::new(17), share);
        assert_eq!(charge(&mut quotas, 17), Charged::Yes);
        quotas.remove_user(Qpn::new(17));
        quotas.add_user(Qpn::new(17), share);
        assert_eq!((quotas.left_over(), quotas.count(share)), (1, 0));
        assert_eq!([(); 2].map(|()| charge(&mut quotas, 17)), [Charged::Yes; 2]);
    }

    #[test]
    fn set_limit__not_below_what_is_taken() {
        let mut quotas = Quotas::default();
        let [common, share] = [2, 1].map(|limit| quotas.add_share(limit));
        quotas.draw_on(share, common);
        quotas.add_user(Qpn::new(17), share);
        assert_eq!([(); 2].map(|()| charge(&mut quotas, 17)), [Charged::Yes; 2]);
        assert_eq!(quotas.set_limit(share, 0), Err(TooShort));
        assert_eq!(
            quotas.set_limit(share, 1),
            Ok(()),
            "the other is not of this share"
        );
        assert_eq!(quotas.set_limit(common, 0), Err(TooShort));
        assert_eq!(quotas.set_limit(common, 1), Ok(()));
    }

    #[test]
    fn charge__of_a_queue_pair_without_share_is_left_over() {
        let mut quotas = Quotas::default();
        assert_eq!(charge(&mut quotas, 5), Charged::Yes);
        assert_eq!(quotas.left_over(), 1);
        quotas.release(Qpn::new(5));
        quotas.release(Qpn::new(5));
        assert_eq!(quotas.left_over(), 0);
    }
}
