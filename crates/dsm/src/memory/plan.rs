//! The choice of system calls for a group of changes: a function of pages, states and prices.
//!
//! A call that takes rights from threads interrupts every CPU on which another thread of the process runs, once a call and not once a page, and
//! that is most of its price. So it may pay to take the rights of pages in between, too, and to give them back: giving interrupts no CPU. A
//! thread that touches such a page meanwhile faults, and is given the page by the table of states.

use std::ops::Range;

use super::costs::{Costs, Price};
use super::{Access, PageState};

/// Part of the price of a call that pages in between may cost: a cold page costs several times what prices say, and a process in which no other
/// thread runs at the moment saves the call alone, without an interruption.
const MARGIN: u64 = 4;

/// Pages in between at most: what their absence costs the threads that touch them is in no price.
const GAP_MAX: u32 = 64;

/// A page whose state has changed in the table, and not yet for the threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Index of the page.
    pub page: u32,
    /// State that threads may still have.
    pub before: PageState,
    /// State in the table, another one.
    pub after: PageState,
}

/// A system call for pages that follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Makes them absent.
    Drop(Range<u32>),
    /// Takes the right to write.
    Protect(Range<u32>),
    /// Installs pages that are absent: all are in the state that belongs to the access.
    Install(Range<u32>, Access),
    /// Gives the right to write: all are `Modified`.
    Unprotect(Range<u32>),
}

/// Returns the calls, to be carried out in this order, that bring the threads' rights to the states of the table.
///
/// `changed` is in ascending order, a page at most once. `state` returns the table's state of any page between the first and the last of them,
/// with the changes. A state that another thread changes meanwhile makes a call needless, never wrong: the table is looked at again
/// before `Install` and `Unprotect`.
pub fn plan(changed: &[Changed], state: impl Fn(u32) -> PageState, costs: &Costs) -> Vec<Call> {
    let mut calls = Vec::new();

    let dropped = changed.iter().filter(|c| c.after == PageState::Invalid);
    // A poisoned page stays so: the mark would be gone.
    let is_poisoned = |page| state(page) == PageState::Poisoned;
    let drops = spans(dropped.map(|c| c.page), |gap| {
        !gap.clone().any(is_poisoned)
            && is_cheaper(gap, costs.drop, |page| match state(page) {
                PageState::Invalid => None,
                valid => Some((valid, costs.install)),
            })
    });
    let is_dropped = |page| is_within(&drops, page);

    let protected =
        |c: &&Changed| c.before == PageState::Modified && c.after == PageState::Shared && !is_dropped(c.page);
    let protects = spans(changed.iter().filter(protected).map(|c| c.page), |gap| {
        is_cheaper(gap, costs.protect, |page| match state(page) {
            PageState::Modified => Some((PageState::Modified, costs.unprotect)),
            _ => None,
        })
    });

    // Pages that were in the way, and new ones.
    let in_drops = drops
        .iter()
        .flat_map(Clone::clone)
        .map(|page| (page, state(page)));
    let installed = changed.iter().filter(|c| c.before == PageState::Invalid);
    let mut installs: Vec<(u32, PageState)> = in_drops
        .filter(|(_, state)| state.allows(Access::Read))
        .chain(installed.map(|c| (c.page, c.after)))
        .collect();
    let in_protects = protects.iter().flat_map(Clone::clone);
    let upgraded = changed
        .iter()
        .filter(|c| c.before == PageState::Shared && c.after == PageState::Modified);
    let mut unprotects: Vec<(u32, PageState)> = in_protects
        .filter(|page| state(*page) == PageState::Modified)
        .chain(upgraded.map(|c| c.page))
        .filter(|page| !is_dropped(*page))
        .map(|page| (page, PageState::Modified))
        .collect();

    calls.extend(drops.iter().cloned().map(Call::Drop));
    calls.extend(protects.into_iter().map(Call::Protect));
    calls.extend(runs(&mut installs).map(|(pages, state)| {
        let access = match state {
            PageState::Modified => Access::Write,
            _ => Access::Read,
        };
        Call::Install(pages, access)
    }));
    calls.extend(runs(&mut unprotects).map(|(pages, _)| Call::Unprotect(pages)));
    calls
}

/// Joins pages in ascending order that follow each other, or with a gap for which `bridges` returns true.
fn spans(pages: impl Iterator<Item = u32>, bridges: impl Fn(Range<u32>) -> bool) -> Vec<Range<u32>> {
    let mut spans: Vec<Range<u32>> = Vec::new();
    for page in pages {
        match spans.last_mut() {
            Some(last) if last.end == page || bridges(last.end..page) => last.end = page + 1,
            _ => spans.push(page..page + 1),
        }
    }
    spans
}

/// Returns whether it costs so much less to take rights from the pages of a gap, too, and to put them back, than to call once more, as
/// [`MARGIN`] says. `put_back` returns the state and the price of what a page needs afterwards.
fn is_cheaper(
    mut gap: Range<u32>,
    taking: Price,
    put_back: impl Fn(u32) -> Option<(PageState, Price)>,
) -> bool {
    if gap.end - gap.start > GAP_MAX {
        return false;
    }
    let mut left = u64::from(taking.call_ns) / MARGIN;
    let mut run = None;
    gap.all(|page| {
        let back = put_back(page);
        let mut cost = u64::from(taking.page_ns.max(1));
        if let Some((state, price)) = back {
            cost += u64::from(price.page_ns);
            if run != Some(state) {
                cost += u64::from(price.call_ns);
            }
        }
        run = back.map(|(state, _)| state);
        let pays = cost < left;
        left = left.saturating_sub(cost);
        pays
    })
}

/// Returns whether one of the ranges, in ascending order, has the page.
fn is_within(ranges: &[Range<u32>], page: u32) -> bool {
    let after = ranges.partition_point(|range| range.end <= page);
    ranges.get(after).is_some_and(|range| range.contains(&page))
}

/// Sorts pages, and joins those of one state that follow each other.
fn runs(pages: &mut Vec<(u32, PageState)>) -> impl Iterator<Item = (Range<u32>, PageState)> {
    pages.sort_unstable();
    pages.dedup();
    pages
        .chunk_by(|left, right| left.0 + 1 == right.0 && left.1 == right.1)
        .map(|run| (run[0].0..run[run.len() - 1].0 + 1, run[0].1))
}

#[cfg(test)]
mod tests {
    use rand_chacha::ChaCha8Rng;
    use rand_core::{RngCore, SeedableRng};

    use super::PageState::{Invalid, Modified, Shared};
    use super::*;

    /// Prices with which pages in between may cost 1,000.
    const COSTS: Costs = Costs {
        drop: price(MARGIN as u32 * 1000, 10),
        protect: price(MARGIN as u32 * 1000, 10),
        install: price(80, 10),
        unprotect: price(80, 10),
    };

    const fn price(call_ns: u32, page_ns: u32) -> Price {
        Price { call_ns, page_ns }
    }

    fn changed(before: PageState, after: PageState, pages: impl IntoIterator<Item = u32>) -> Vec<Changed> {
        let pages = pages.into_iter();
        pages.map(|page| Changed { page, before, after }).collect()
    }

    /// Plans changes among pages that are all in one state.
    fn plan_among(others: PageState, changed: &[Changed]) -> Vec<Call> {
        let state = |page| {
            let found = changed.iter().find(|c| c.page == page);
            found.map_or(others, |c| c.after)
        };
        plan(changed, state, &COSTS)
    }

    #[test]
    fn plan__joins_neighbours() {
        let rows = [
            (Modified, Invalid, Call::Drop(1..4)),
            (Modified, Shared, Call::Protect(1..4)),
            (Invalid, Shared, Call::Install(1..4, Access::Read)),
            (Invalid, Modified, Call::Install(1..4, Access::Write)),
            (Shared, Modified, Call::Unprotect(1..4)),
        ];
        for (before, after, call) in rows {
            assert_eq!(plan_among(Modified, &changed(before, after, 1..4)), [call]);
        }
        assert_eq!(plan_among(Modified, &[]), []);
    }

    /// Rights are given to no page in between.
    #[test]
    fn plan__gives_to_the_pages_alone() {
        let pages = || [1, 3];
        let single = |call: fn(Range<u32>) -> Call| [call(1..2), call(3..4)];
        for (before, after, calls) in [
            (
                Invalid,
                Shared,
                single(|pages| Call::Install(pages, Access::Read)),
            ),
            (
                Invalid,
                Modified,
                single(|pages| Call::Install(pages, Access::Write)),
            ),
            (Shared, Modified, single(Call::Unprotect)),
        ] {
            assert_eq!(plan_among(Invalid, &changed(before, after, pages())), calls);
        }
    }

    #[test]
    fn plan__drops_a_span_and_puts_back() {
        let every_third = changed(Modified, Invalid, (0..9).step_by(3));
        let expected = [
            Call::Drop(0..7),
            Call::Install(1..3, Access::Write),
            Call::Install(4..6, Access::Write),
        ];
        assert_eq!(plan_among(Modified, &every_third), expected);
        let expected = [
            Call::Drop(0..7),
            Call::Install(1..3, Access::Read),
            Call::Install(4..6, Access::Read),
        ];
        assert_eq!(plan_among(Shared, &every_third), expected);
        // Pages that are absent anyway cost nothing afterwards.
        assert_eq!(plan_among(Invalid, &every_third), [Call::Drop(0..7)]);
    }

    #[test]
    fn plan__drops_no_page_that_is_poisoned() {
        let ends = changed(Modified, Invalid, [0, 2]);
        let expected = [Call::Drop(0..1), Call::Drop(2..3)];
        assert_eq!(plan_among(PageState::Poisoned, &ends), expected);
    }

    #[test]
    fn plan__protects_a_span_and_puts_back() {
        let every_third = changed(Modified, Shared, (0..9).step_by(3));
        let expected = [Call::Protect(0..7), Call::Unprotect(1..3), Call::Unprotect(4..6)];
        assert_eq!(plan_among(Modified, &every_third), expected);
        for others in [Shared, Invalid] {
            assert_eq!(plan_among(others, &every_third), [Call::Protect(0..7)]);
        }
    }

    #[test]
    fn plan__calls_once_more_where_that_is_cheaper() {
        // 45 pages at 20 and a call at 80 are less than 1,000; with one more they are not. 64 at 10 are the most.
        for (others, gap) in [(Invalid, GAP_MAX), (Modified, 45)] {
            for over in [0, 1] {
                let ends = changed(Modified, Invalid, [0, gap + over + 1]);
                let drops = plan_among(others, &ends)
                    .iter()
                    .filter(|call| matches!(call, Call::Drop(_)))
                    .count();
                assert_eq!(drops, 1 + over as usize, "{others:?}");
            }
        }
        // Never if a call costs nothing.
        let free = Costs {
            drop: price(0, 10),
            ..COSTS
        };
        let ends = changed(Modified, Invalid, [0, 2]);
        assert_eq!(
            plan(&ends, |_| Invalid, &free),
            [Call::Drop(0..1), Call::Drop(2..3)]
        );
    }

    /// Pages of a batch that lie among those that are dropped need no call of their own.
    #[test]
    fn plan__puts_back_pages_of_the_batch_with_their_new_rights() {
        let mut all = changed(Modified, Invalid, [0, 6]);
        all.extend(changed(Modified, Shared, [1]));
        all.extend(changed(Shared, Modified, [2, 3]));
        all.extend(changed(Invalid, Shared, [5]));
        all.sort_by_key(|c| c.page);
        let expected = [
            Call::Drop(0..7),
            Call::Install(1..2, Access::Read),
            Call::Install(2..5, Access::Write),
            Call::Install(5..6, Access::Read),
        ];
        assert_eq!(plan_among(Modified, &all), expected);
    }

    /// Carries calls out on rights of pages, as the kernel does. No call gives more than the table says.
    fn carry_out(calls: &[Call], table: &[PageState], rights: &mut [PageState]) -> u64 {
        let mut price = 0;
        for call in calls {
            let (pages, cost) = match call {
                Call::Drop(pages) => (pages, COSTS.drop),
                Call::Protect(pages) => (pages, COSTS.protect),
                Call::Install(pages, _) => (pages, COSTS.install),
                Call::Unprotect(pages) => (pages, COSTS.unprotect),
            };
            price += u64::from(cost.call_ns) + u64::from(cost.page_ns) * pages.len() as u64;
            for page in pages.clone().map(|page| page as usize) {
                let has = &mut rights[page];
                match call {
                    Call::Drop(_) => *has = Invalid,
                    Call::Protect(_) => *has = (*has).min(Shared),
                    Call::Install(_, access) => {
                        assert_eq!(*has, Invalid, "page {page} is installed twice");
                        *has = if *access == Access::Write {
                            Modified
                        } else {
                            Shared
                        };
                        assert_eq!(*has, table[page]);
                    }
                    Call::Unprotect(_) => {
                        assert_eq!(table[page], Modified);
                        if *has == Shared {
                            *has = Modified;
                        }
                    }
                }
            }
        }
        price
    }

    /// From any rights to any states: the rights are the states afterwards, for no more than the price of a call for each page.
    #[test]
    fn plan__brings_rights_to_the_table() {
        const STATES: [PageState; 3] = [Invalid, Shared, Modified];
        for seed in 0..5000 {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut next = |bound: u32| random.next_u32() % bound;
            let pages = 1 + next(40);
            let of = 1 + next(5);
            let mut rights: Vec<PageState> = (0..pages).map(|_| STATES[next(3) as usize]).collect();
            let table: Vec<PageState> = rights
                .iter()
                .map(|has| {
                    if next(of) == 0 {
                        STATES[next(3) as usize]
                    } else {
                        *has
                    }
                })
                .collect();
            let both = rights.iter().zip(&table).zip(0..);
            let changed: Vec<Changed> = both
                .filter(|((before, after), _)| before != after)
                .map(|((before, after), page)| Changed {
                    page,
                    before: *before,
                    after: *after,
                })
                .collect();
            let calls = plan(&changed, |page| table[page as usize], &COSTS);
            let single: u64 = changed
                .iter()
                .map(|c| {
                    let cost = match (c.before, c.after) {
                        (_, Invalid) => COSTS.drop,
                        (Modified, _) => COSTS.protect,
                        (Invalid, _) => COSTS.install,
                        _ => COSTS.unprotect,
                    };
                    u64::from(cost.call_ns + cost.page_ns)
                })
                .sum();
            let price = carry_out(&calls, &table, &mut rights);
            assert_eq!(rights, table, "seed {seed}: {changed:?} {calls:?}");
            assert!(price <= single, "seed {seed}: {price} over {single}");
        }
    }
}
