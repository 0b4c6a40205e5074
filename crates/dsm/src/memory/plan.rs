//! The choice of system calls for a group of changes: a function of pages, states and prices.
//!
//! A call that takes rights from threads interrupts every CPU on which another thread of the process runs, once a call and not once a page, and
//! that is most of its price. So it may pay to take the rights of pages in between, too, and to give them back: giving interrupts nobody. A
//! thread that touches such a page meanwhile faults, and is given the page by the table of states.

use std::ops::Range;

use super::costs::{Costs, Price};
use super::{Access, PageState};

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
/// with the changes. A state that another thread changes meanwhile makes a call needless, never wrong: whoever carries out `Install` or
/// `Unprotect` looks at the table again.
pub fn plan(changed: &[Changed], state: impl Fn(u32) -> PageState, costs: &Costs) -> Vec<Call> {
    let mut calls = Vec::new();

    let dropped = changed.iter().filter(|c| c.after == PageState::Invalid);
    let drops = spans(dropped.map(|c| c.page), |gap| {
        is_cheaper(gap, costs.drop, |page| match state(page) {
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

    // What was in the way, and what is new.
    let in_drops = drops
        .iter()
        .flat_map(Clone::clone)
        .map(|page| (page, state(page)));
    let installed = changed.iter().filter(|c| c.before == PageState::Invalid);
    let mut installs: Vec<(u32, PageState)> = in_drops
        .filter(|(_, state)| *state != PageState::Invalid)
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

/// Returns whether it costs less to take rights from the pages of a gap, too, and to put them back, than to call once more. `put_back` returns
/// the state and the price of what a page needs afterwards.
fn is_cheaper(
    mut gap: Range<u32>,
    taking: Price,
    put_back: impl Fn(u32) -> Option<(PageState, Price)>,
) -> bool {
    let mut left = u64::from(taking.call_ns);
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
