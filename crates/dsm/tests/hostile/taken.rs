//! Addresses of regions that are taken at a node: the making goes on with another one.

use rdmux_memory::AnonymousMemory;

use super::first::{FIRST, changed, offer};
use super::played::step_at;
use super::*;

/// The address of an [`offer`], and another one.
const TAKEN: u64 = 3 << 44;
const FREE: u64 = 4 << 44;
/// Attempts whose address is taken at a node that says so.
const ATTEMPTS: u32 = 3;

/// Has the address of the first offer taken at node 1, and follows the first node.
pub(super) fn crowded(session: &Session) {
    let memory = AnonymousMemory::shareable(PAGE as usize).unwrap();
    let _taken = (session.node() == 1).then(|| memory.map_again(Some(TAKEN + PAGE)).unwrap());
    follower(session);
}

#[test]
fn region__whose_address_is_taken_at_a_node_is_offered_at_another() {
    for mode in MODES {
        println!("{mode}");
        let clusters = clusters(NODES, LEASE);
        let start = |number: usize| Node::start(command(&[], "bystander", &clusters[number], mode));
        let mut nodes = vec![start(0), start(1)];
        let mut last = Played::join(&clusters[HOSTILE as usize]);
        let mut offered = last.make_after(ATTEMPTS);
        offered.sort_unstable();
        // The first node has the earlier ones still.
        offered.dedup();
        assert_eq!(offered.len(), ATTEMPTS as usize + 1, "{offered:#x?}");
        go_on(&mut nodes);
        assert!(nodes.iter_mut().all(|node| !node.printed().contains("misses")));
        drop(last);
        wait_for(&mut nodes, "@ misses 2: node 2 is gone: ");
        go_on(&mut nodes);
    }
}

#[test]
fn region__is_made_at_another_address_than_one_that_a_node_has_taken() {
    let offer = offer("follower");
    for mode in MODES {
        println!("{mode}");
        let clusters = clusters(NODES, LEASE);
        let start = |cluster| Node::start(command(&[], "crowded", cluster, mode));
        let mut nodes: Vec<Node> = clusters[1..].iter().map(start).collect();
        let mut first = Played::join(&clusters[FIRST as usize]);
        let at = |address| changed(offer, |[at, ..]| *at = address);
        first.tell_all(0, at(TAKEN));
        let others = first.others();
        let answer = |node| first.receive(node, |message| step_at(message, 0, 0));
        let answers: Vec<Option<Step>> = others.into_iter().map(answer).collect();
        assert!(
            matches!(answers[..], [Some(Step::Taken), Some(Step::Mapped { .. })]),
            "{answers:?}"
        );
        first.lead_in(1, 0, at(FREE));
        wait_for(&mut nodes, "@ begins");
        go_on(&mut nodes);
        assert!(nodes.iter_mut().all(|node| !node.printed().contains("misses")));
        drop(first);
        wait_for(&mut nodes, "@ misses 0: node 0 is gone: ");
        go_on(&mut nodes);
    }
}
