//! Homes of pages as the program chooses them, on nodes as processes.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::num::NonZeroU32;

use common::{MODES, run, run_as_node};
use rdmux_dsm::protocol::{Homes, NodeId};
use rdmux_dsm::{Consistency, Error, Placement, RegionOptions, Session};

const PAGE: usize = 4096;
const PAGES: usize = 24;

#[test]
fn node() {
    run_as_node(&[("placed", placed), ("unequal", unequal), ("stranger", stranger)]);
}

fn options(homes: Placement) -> RegionOptions {
    RegionOptions {
        homes,
        ..RegionOptions::new((PAGES * PAGE) as u64).unwrap()
    }
}

/// In a region of each placement and consistency, each node writes the pages that are at home there, and node 0 reads all.
fn placed(session: &Session) {
    let nodes: Vec<NodeId> = (0..session.nodes()).filter_map(NodeId::new).collect();
    let in_turn = |row: usize| move |page: usize, nodes: u32| (page / row) as u32 % nodes;
    let hash = Homes::hash(nodes).unwrap();
    let last = session.nodes() - 1;
    let named = vec![(0, last), (5, 0), (7, last)];
    type HomeOf<'a> = Box<dyn Fn(usize, u32) -> u32 + 'a>;
    let all: [(Placement, HomeOf<'_>); 6] = [
        (Placement::InTurn(1), Box::new(in_turn(1))),
        (Placement::InTurn(5), Box::new(in_turn(5))),
        (Placement::Hash, Box::new(|page, _| hash.of(page as u64).number())),
        (Placement::node(last), Box::new(|_, nodes| nodes - 1)),
        (
            Placement::Named(named),
            Box::new(|page, nodes| if (5..7).contains(&page) { 0 } else { nodes - 1 }),
        ),
        // They are at home where they are written.
        (Placement::FirstTouch, Box::new(in_turn(3))),
    ];
    let mut thread = session.thread(0).unwrap();
    let parties = NonZeroU32::new(session.nodes()).unwrap();
    let kinds = [Consistency::Sequential, Consistency::Release];
    for (kind, (placement, home_of)) in kinds
        .iter()
        .flat_map(|kind| all.iter().map(move |it| (*kind, it)))
    {
        let region = session
            .region(&options(placement.clone()).consistency(kind))
            .unwrap();
        let words = region.array::<u64>(0, PAGES * PAGE / 8);
        let is_own = |page: &usize| home_of(*page, session.nodes()) == session.node();
        let own: Vec<usize> = (0..PAGES).filter(is_own).collect();
        for page in &own {
            words.set(page * PAGE / 8, *page as u64 + 1);
        }
        let stat = region.stat();
        assert_eq!(stat.fetches, 0, "{placement:?} {stat:?}");
        assert_eq!(stat.write_faults, own.len() as u64, "{placement:?} {stat:?}");
        if *placement != Placement::FirstTouch {
            assert_eq!(stat.messages, 0, "{placement:?} {stat:?}");
        }
        thread.barrier(0, parties).unwrap();
        if session.node() == 0 {
            for page in 0..PAGES {
                assert_eq!(words.get(page * PAGE / 8), page as u64 + 1, "{placement:?}");
            }
            let stat = region.stat();
            assert_eq!(stat.fetches, (PAGES - own.len()) as u64, "{placement:?} {stat:?}");
            assert_eq!(stat.fetched_bytes, stat.fetches * PAGE as u64, "{stat:?}");
        }
        thread.barrier(0, parties).unwrap();
    }
}

#[test]
fn region__has_its_pages_at_home_where_the_placement_says() {
    for mode in MODES {
        run("placed", 2, mode);
    }
    run("placed", 3, MODES[0]);
}

/// The nodes want different placements.
fn unequal(session: &Session) {
    let placement = match session.node() {
        0 => Placement::Hash,
        _ => Placement::FirstTouch,
    };
    let error = session.region(&options(placement)).unwrap_err();
    match session.node() {
        0 => assert!(matches!(error, Error::Differs { node: 1, region: 0 }), "{error}"),
        _ => assert!(matches!(error, Error::OtherSettings { region: 0 }), "{error}"),
    }
    stay_until_all_have_come(session);
}

fn stay_until_all_have_come(session: &Session) {
    let mut thread = session.thread(0).unwrap();
    thread
        .barrier(0, NonZeroU32::new(session.nodes()).unwrap())
        .unwrap();
}

#[test]
fn region__of_other_homes_at_each_node_is_an_error() {
    run("unequal", 2, MODES[0]);
}

/// All nodes name a node that does not exist.
fn stranger(session: &Session) {
    let error = session.region(&options(Placement::node(2))).unwrap_err();
    let text = error.to_string();
    let own = "node 2 cannot be a home: it is none of the nodes";
    assert!(text == own || matches!(error, Error::Differs { .. }), "{text}");
    stay_until_all_have_come(session);
}

#[test]
fn region__at_home_at_a_node_that_is_not_there_is_an_error() {
    run("stranger", 2, MODES[0]);
}
