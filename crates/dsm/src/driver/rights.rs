//! Rights of the program to the pages of its view.

use std::collections::BTreeSet;

use crate::memory::{Access, Change, Error, PageBatch, PageState, View};
use crate::protocol::Right;
use crate::stat::RegionCounter;

/// Gives rights to pages, together. Those of one page are carried out in their order, as a thread may wait for each of them. `batch` is empty before
/// and after that. Rights that are taken are counted.
///
/// # Errors
/// Those of [`View::apply`].
pub(super) fn change(
    view: &View,
    batch: &mut PageBatch,
    rights: impl ExactSizeIterator<Item = (u32, Right)> + Clone,
    count: impl Fn(RegionCounter),
) -> Result<(), Error> {
    let mut changed = Ok(());
    let is_single = rights.len() == 1;
    let may_repeat = !rights.clone().is_sorted_by(|one, next| one.0 < next.0);
    let mut seen = BTreeSet::new();
    for (page, right) in rights {
        if may_repeat && !seen.insert(page) {
            changed = changed.and(view.apply(batch).map(|_| ()));
            seen = BTreeSet::from([page]);
        }
        let change = match (view.state(page), right) {
            (PageState::Invalid, Right::Shared) => Change::Install(Access::Read),
            (PageState::Invalid, Right::Exclusive) => Change::Install(Access::Write),
            (PageState::Shared, Right::Exclusive) => Change::Unprotect,
            (PageState::Modified, Right::Shared) => Change::Protect,
            (PageState::Shared | PageState::Modified, Right::Invalid) => Change::Invalidate,
            _ => continue,
        };
        match change {
            Change::Invalidate => count(RegionCounter::Invalidations),
            Change::Protect => count(RegionCounter::Downgrades),
            Change::Unprotect | Change::Install(_) => {}
        }
        if is_single {
            return view.change(page, change).map(|_| ());
        }
        batch.add(page..page + 1, change);
    }
    match batch.is_empty() {
        true => changed,
        false => changed.and(view.apply(batch).map(|_| ())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "tests are named function__case")]

    use std::cell::Cell;
    use std::sync::Arc;

    use rdmux_memory::AnonymousMemory;

    use super::*;
    use crate::memory::{Costs, Engine};

    const RIGHTS: [Right; 3] = [Right::Invalid, Right::Shared, Right::Exclusive];

    fn state(right: Right) -> PageState {
        match right {
            Right::Invalid => PageState::Invalid,
            Right::Shared => PageState::Shared,
            Right::Exclusive => PageState::Modified,
        }
    }

    #[test]
    fn change__of_one_page_again_and_again_ends_with_the_last_right() {
        let page = rustix::param::page_size();
        let alias = Arc::new(AnonymousMemory::shareable(4 * page).unwrap());
        let view = View::new(alias, None, Engine::Mprotect, Costs::TYPICAL).unwrap();
        let mut batch = PageBatch::new();
        for first in RIGHTS {
            for second in RIGHTS {
                for third in RIGHTS {
                    let rights = [(2, first), (1, Right::Shared), (2, second), (2, third)];
                    let taken = Cell::new(0);
                    let count = |_| taken.set(taken.get() + 1);
                    change(&view, &mut batch, rights.into_iter(), count).unwrap();
                    let case = format!("{rights:?}");
                    assert_eq!(view.state(2), state(third), "{case}");
                    assert_eq!(view.state(1), PageState::Shared, "{case}");
                    let falls = [(first, second), (second, third)]
                        .iter()
                        .filter(|it| it.0 > it.1)
                        .count();
                    assert!(taken.get() >= falls, "{case}: {} taken", taken.get());
                    assert!(batch.is_empty());
                }
            }
        }
    }
}
