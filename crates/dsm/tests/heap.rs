//! Heaps on nodes as processes.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::alloc::Layout;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Instant;

use common::{LONG, MODES, in_threads, named, run, run_as_node, run_with, until};
use rdmux_dsm::{
    Access, Array, Consistency, Error, FaultMode, Heap, HeapOptions, Place, Region, RegionOptions, Session,
    Thread,
};

const PAGE: usize = 4096;

/// Bytes of each node for each size of objects.
const BYTES: usize = 24 * PAGE;

const BOTH: [Consistency; 2] = [Consistency::Sequential, Consistency::Release];

/// Sizes of small objects.
const SMALL: [usize; 6] = [64, 128, 256, 512, 1024, 2048];

#[test]
fn node() {
    run_as_node(&[
        ("objects", objects),
        ("placed", placed),
        ("wrong", wrong),
        ("storm", storm),
        ("dies", dies),
        ("neighbours", neighbours),
        ("stacks", stacks),
        ("reused", reused),
        ("unreleased", unreleased),
        ("unequal", unequal),
    ]);
}

/// Set to the consistency of the heaps of a node.
const CONSISTENCY: &str = "RDMUX_DSM_TEST_CONSISTENCY";

/// Runs nodes whose heaps have a consistency.
fn run_in(consistency: Consistency, part: &str, nodes: u32, mode: FaultMode) {
    run_with(part, nodes, mode, &[(CONSISTENCY, consistency.into())]);
}

fn heap(session: &Session) -> Heap<'_> {
    let named = std::env::var(CONSISTENCY).map(|it| it.parse().unwrap());
    heap_of(session, named.unwrap_or_default()).unwrap()
}

fn heap_of(session: &Session, consistency: Consistency) -> Result<Heap<'_>, Error> {
    let options = HeapOptions::new(BYTES as u64).unwrap();
    session.heap(&options.consistency(consistency))
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, 8).unwrap()
}

fn meet(session: &Session, thread: &mut Thread<'_>) {
    let parties = NonZeroU32::new(session.nodes()).unwrap();
    thread.barrier(0, parties).unwrap();
}

/// Makes a region with a page for each node, by which nodes tell each other addresses.
fn board(session: &Session) -> Region<'_> {
    let bytes = PAGE as u64 * u64::from(session.nodes());
    session.region(&RegionOptions::new(bytes).unwrap()).unwrap()
}

fn page_of<'a>(board: &'a Region<'a>, node: u32) -> Array<'a, u64> {
    board.array(u64::from(node) * PAGE as u64, PAGE / 8)
}

/// Each node fills objects of all sizes. The next one reads and frees them, and the first gets the same places again.
fn objects(session: &Session) {
    const SIZES: [usize; 10] = [1, 64, 65, 200, 512, 1000, 2048, 2049, PAGE, 3 * PAGE + 1];
    const EACH: usize = 3;
    let mut thread = session.thread(0).unwrap();
    let (heap, board) = (heap(session), board(session));
    let (own, nodes) = (session.node(), session.nodes());
    let sizes = || SIZES.iter().flat_map(|bytes| std::iter::repeat_n(*bytes, EACH));
    let value = |node: u32, at: usize, byte: usize| (node as usize * 91 + at * 7 + byte) as u8;
    let addresses = page_of(&board, own);
    let mut units = BTreeSet::new();
    for (at, bytes) in sizes().enumerate() {
        let address = heap.allocate(layout(bytes), Place::Here).unwrap();
        let unit = bytes.next_power_of_two().clamp(64, PAGE);
        assert!(address.is_multiple_of(unit as u64), "{bytes} at {address:#x}");
        for unit_at in (0..bytes).step_by(unit) {
            let is_new = units.insert(address + unit_at as u64);
            assert!(is_new, "{address:#x}");
        }
        let contents: Vec<u8> = (0..bytes).map(|byte| value(own, at, byte)).collect();
        heap.write(address, &contents).unwrap();
        addresses.set(at, address);
    }
    // Nodes write objects of their own without asking anybody.
    for region in heap.regions() {
        let stat = region.stat();
        assert_eq!([stat.fetches, stat.messages], [0; 2], "{stat:?}");
    }
    meet(session, &mut thread);
    let next = (own + 1) % nodes;
    let theirs = page_of(&board, next);
    for (at, bytes) in sizes().enumerate() {
        let address = theirs.get(at);
        let mut contents = vec![0; bytes];
        heap.read(address, &mut contents).unwrap();
        let expected: Vec<u8> = (0..bytes).map(|byte| value(next, at, byte)).collect();
        assert_eq!(contents, expected, "{bytes} bytes of node {next}");
        heap.free(address).unwrap();
    }
    let fetches: u64 = heap.regions().iter().map(|region| region.stat().fetches).sum();
    let moved: usize = sizes().map(|bytes| bytes.div_ceil(PAGE)).sum();
    assert_eq!(fetches, if nodes > 1 { moved as u64 } else { 0 });
    meet(session, &mut thread);
    for (at, bytes) in sizes().enumerate() {
        let address = heap.allocate(layout(bytes), Place::Here).unwrap();
        assert_eq!(address, addresses.get(at));
    }
    meet(session, &mut thread);
}

#[test]
fn allocate__gives_objects_of_their_own_units_that_any_node_frees() {
    for consistency in BOTH {
        for mode in MODES {
            run_in(consistency, "objects", 2, mode);
        }
        for nodes in [1, 3] {
            run_in(consistency, "objects", nodes, MODES[0]);
        }
    }
}

/// Node 0 allocates objects at home at the other one, which writes them without asking anybody.
fn placed(session: &Session) {
    let mut thread = session.thread(0).unwrap();
    let (heap, board) = (heap(session), board(session));
    let addresses = page_of(&board, 0);
    let sizes = || SMALL.into_iter().chain([PAGE, 2 * PAGE]);
    if session.node() == 0 {
        for (at, bytes) in sizes().enumerate() {
            addresses.set(at, heap.allocate(layout(bytes), Place::Node(1)).unwrap());
        }
    }
    meet(session, &mut thread);
    if session.node() == 1 {
        for (at, bytes) in sizes().enumerate() {
            heap.write(addresses.get(at), &vec![1; bytes]).unwrap();
        }
        for region in heap.regions() {
            let stat = region.stat();
            assert_eq!([stat.fetches, stat.messages], [0; 2], "{stat:?}");
        }
    }
    meet(session, &mut thread);
    if session.node() == 0 {
        // Of objects in turn, each second one is at home here.
        let of_turn: Vec<u64> = (0..8)
            .map(|_| heap.allocate(layout(64), Place::InTurn).unwrap())
            .collect();
        for address in &of_turn {
            heap.write(*address, &[2; 64]).unwrap();
        }
        assert_eq!(heap.regions()[0].stat().fetches, 4);
        of_turn.iter().for_each(|address| heap.free(*address).unwrap());
    }
    meet(session, &mut thread);
}

#[test]
fn allocate__at_a_node_has_the_object_at_home_there() {
    for consistency in BOTH {
        for mode in MODES {
            run_in(consistency, "placed", 2, mode);
        }
    }
}

/// Frees of what is no object, and objects that cannot be.
fn wrong(session: &Session) {
    let mut thread = session.thread(0).unwrap();
    let (heap, board) = (heap(session), board(session));
    let (own, other) = (session.node(), (session.node() + 1) % session.nodes());
    let local = 7u64;
    let object = heap.allocate(layout(200), Place::Node(other)).unwrap();
    let large = heap.allocate(layout(3 * PAGE), Place::Here).unwrap();
    let class = &heap.regions()[2];
    let refused = |address: u64| {
        let error = heap.free(address).unwrap_err();
        assert!(
            matches!(error, Error::NotAllocated { address: at } if at == address),
            "{error}"
        );
        let begin = format!("no object begins at {address:#x}, or it was freed already: ");
        let text = error.to_string();
        assert!(text.starts_with(&begin) && !text.contains('\n'), "{text}");
    };
    let foreign = [
        0,
        1,
        u64::MAX,
        (&raw const local) as u64,
        board.address(),
        heap.regions()[0].address(),
        heap.regions()[6].address() + heap.regions()[6].bytes(),
        object + 1,
        object + 64,
        object + 256,
        // The unit by another view.
        if object >= class.address() + class.bytes() {
            object - class.bytes()
        } else {
            object + class.bytes()
        },
        large + 1,
        large + PAGE as u64,
        large + 2 * PAGE as u64,
    ];
    foreign.into_iter().for_each(refused);
    // Nothing has changed.
    heap.write(object, &[1; 200]).unwrap();
    for address in [object, large] {
        heap.free(address).unwrap();
        refused(address);
    }
    meet(session, &mut thread);

    let stranger = heap
        .allocate(layout(8), Place::Node(session.nodes()))
        .unwrap_err();
    let text = format!(
        "node {} cannot be a home: it is none of the nodes",
        session.nodes()
    );
    assert_eq!(stranger.to_string(), text);
    let aligned = Layout::from_size_align(8, 2 * PAGE).unwrap();
    let error = heap.allocate(aligned, Place::Here).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Object {
                bytes: 8,
                alignment: 8192
            }
        ),
        "{error}"
    );
    let outside = heap.acquire(object + 200, 64, Access::Read).unwrap_err();
    assert!(matches!(outside, Error::NotInHeap { bytes: 64, .. }), "{outside}");

    // Each node fills the next one, with objects and with a large one.
    let fill = |bytes: usize, expected: usize| {
        let place = Place::Node(other);
        let all: Vec<u64> = (0..expected)
            .map(|_| heap.allocate(layout(bytes), place).unwrap())
            .collect();
        let error = heap.allocate(layout(bytes), place).unwrap_err();
        let text = format!("node {other} has no room for an object of {bytes} bytes: ");
        assert!(error.to_string().starts_with(&text), "{error}");
        assert!(matches!(error, Error::NoRoom { node, .. } if node == other));
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), expected);
        all.into_iter().for_each(|address| heap.free(address).unwrap());
    };
    for bytes in SMALL {
        fill(bytes, BYTES / bytes);
    }
    fill(BYTES, 1);
    fill(BYTES / 2 - 1, 2);
    meet(session, &mut thread);
    let _ = own;
}

#[test]
fn free__of_what_is_not_allocated_is_an_error_and_changes_nothing() {
    for nodes in [1, 2] {
        run("wrong", nodes, MODES[0]);
    }
    run("wrong", 2, MODES[2]);
    run_in(Consistency::Release, "wrong", 2, MODES[1]);
}

/// Threads of all nodes allocate at all nodes, write a word of their own, and find it before they free the object.
fn storm(session: &Session) {
    const ROUNDS: u64 = 300;
    let heap = heap(session);
    let play = |number: u16| {
        let mut thread = session.thread(number).unwrap();
        let mut objects: Vec<(u64, u64)> = Vec::new();
        let mut random = u64::from(session.node()) * 64 + u64::from(number) + 1;
        let mut next = |bound: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % bound
        };
        let check = |(address, tag): (u64, u64)| {
            assert_eq!(heap.array::<u64>(address, 1).unwrap().get(0), tag, "{address:#x}");
            heap.free(address).unwrap();
        };
        for round in 0..ROUNDS {
            if objects.len() > next(12) {
                check(objects.swap_remove(next(objects.len())));
                continue;
            }
            let bytes = [8, 64, 300, 2048, PAGE, 5000][next(6)];
            let node = next(session.nodes() as usize) as u32;
            match heap.allocate(layout(bytes), Place::Node(node)) {
                Ok(address) => {
                    let tag = u64::from(session.node()) << 48 | u64::from(number) << 32 | round;
                    heap.array::<u64>(address, 1).unwrap().set(0, tag);
                    objects.push((address, tag));
                }
                Err(Error::NoRoom { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        objects.into_iter().for_each(check);
        let parties = NonZeroU32::new(2 * session.nodes()).unwrap();
        thread.barrier(1, parties).unwrap();
    };
    in_threads(1..3, play);
    // All is free again.
    let all = heap.allocate(layout(BYTES), Place::Here).unwrap();
    heap.free(all).unwrap();
    meet(session, &mut session.thread(0).unwrap());
}

#[test]
fn allocate__and_free_by_threads_of_all_nodes_keep_objects_apart() {
    for consistency in BOTH {
        for mode in MODES {
            run_in(consistency, "storm", 3, mode);
        }
    }
}

#[test]
fn packets__lost_and_delayed_change_no_object() {
    let network = [
        ("RDMUX_SHM", "off"),
        ("RDMUX_FAULT", "loss=1%,dup=1%,delay=100us..1ms,seed=3"),
    ];
    run_with("objects", 2, MODES[1], &network);
    run_with("storm", 2, MODES[0], &network);
    let released = [network[0], network[1], (CONSISTENCY, Consistency::Release.into())];
    run_with("storm", 2, MODES[1], &released);
}

/// Node 1 ends: what is at home at node 0 stays usable, whoever has allocated it, and no other call waits.
fn dies(session: &Session) {
    let mut thread = session.thread(0).unwrap();
    let (heap, board) = (heap(session), board(session));
    let (own, other) = (session.node(), 1 - session.node());
    let addresses = page_of(&board, 0);
    for (at, place) in [own, other].into_iter().enumerate() {
        let address = heap.allocate(layout(64), Place::Node(place)).unwrap();
        if own == 0 {
            addresses.set(at, address);
        } else if place == 0 {
            thread.fetch_add(3, address).unwrap();
        }
    }
    meet(session, &mut thread);
    let theirs = match own {
        // The word's home may end.
        0 => Some(thread.load(3).unwrap()),
        _ => None,
    };
    meet(session, &mut thread);
    if own == 1 {
        // Without leaving.
        std::process::exit(0);
    }
    let deadline = Instant::now() + LONG;
    let error = loop {
        match heap.allocate(layout(64), Place::Node(1)) {
            Err(error) => break error,
            Ok(_) => assert!(Instant::now() < deadline),
        }
    };
    assert_eq!(named(&error), 1);
    assert_eq!(named(&heap.free(addresses.get(1)).unwrap_err()), 1);
    let theirs = theirs.unwrap();
    heap.write(theirs, &[3; 64]).unwrap();
    for address in [addresses.get(0), theirs] {
        heap.free(address).unwrap();
        assert!(matches!(heap.free(address), Err(Error::NotAllocated { .. })));
    }
    let again = heap.allocate(layout(64), Place::Here).unwrap();
    assert_eq!(again, addresses.get(0).min(theirs));
}

#[test]
fn free__after_the_end_of_a_node_is_an_error_for_its_own_memory_alone() {
    for consistency in BOTH {
        for mode in MODES {
            run_in(consistency, "dies", 2, mode);
        }
    }
}

/// All nodes write small objects that node 0 has allocated beside each other, in turn, and read those of all.
fn neighbours(session: &Session) {
    const EACH: usize = 16;
    const ROUNDS: u8 = 10;
    let mut thread = session.thread(0).unwrap();
    let (heap, board) = (heap(session), board(session));
    let (own, nodes) = (session.node() as usize, session.nodes() as usize);
    let addresses = page_of(&board, 0);
    if own == 0 {
        for at in 0..EACH * nodes {
            addresses.set(at, heap.allocate(layout(64), Place::Here).unwrap());
        }
    }
    meet(session, &mut thread);
    for round in 1..=ROUNDS {
        for at in (own..EACH * nodes).step_by(nodes) {
            heap.write(addresses.get(at), &[round; 64]).unwrap();
        }
        meet(session, &mut thread);
        for at in 0..EACH * nodes {
            let mut bytes = [0; 64];
            heap.read(addresses.get(at), &mut bytes).unwrap();
            assert_eq!(bytes, [round; 64], "object {at} of round {round}");
        }
        meet(session, &mut thread);
    }
}

#[test]
fn write__of_neighbouring_objects_by_several_nodes_changes_no_others() {
    for consistency in BOTH {
        for mode in MODES {
            run_in(consistency, "neighbours", 2, mode);
        }
    }
}

/// Each node puts objects on a stack of its own under a lock, and takes, checks and frees those of the next node.
fn stacks(session: &Session) {
    const ROUNDS: u64 = 60;
    const SIZES: [usize; 4] = [64, 300, PAGE, 2 * PAGE];
    let mut thread = session.thread(0).unwrap();
    let (heap, board) = (heap(session), board(session));
    let (own, nodes) = (session.node(), session.nodes());
    let next = (own + 1) % nodes;
    let words = |address: u64, bytes: usize| heap.array::<u64>(address, bytes / 8).unwrap();
    page_of(&board, own).set(0, heap.allocate(layout(8), Place::Here).unwrap());
    meet(session, &mut thread);
    let top_of = |node: u32| words(page_of(&board, node).get(0), 8);
    let (mine, theirs) = (top_of(own), top_of(next));
    let tag = |node: u32, round: u64| u64::from(node) << 32 | round;
    for round in 1..=ROUNDS {
        let bytes = SIZES[(round % 4) as usize];
        let object = heap.allocate(layout(bytes), Place::InTurn).unwrap();
        let contents = words(object, bytes);
        (2..contents.len()).for_each(|at| contents.set(at, tag(own, round)));
        contents.set(0, bytes as u64);
        let guard = thread.lock(own.into()).unwrap();
        contents.set(1, mine.get(0));
        mine.set(0, object);
        drop(guard);
        thread.signal(own.into()).unwrap();

        let mut guard = thread.lock(next.into()).unwrap();
        while theirs.get(0) == 0 {
            guard.wait(next.into()).unwrap();
        }
        let object = theirs.get(0);
        theirs.set(0, words(object, 16).get(1));
        drop(guard);
        let contents = words(object, words(object, 8).get(0) as usize);
        let expected = contents.get(2);
        assert_eq!(expected >> 32, u64::from(next), "{object:#x}");
        for at in 2..contents.len() {
            assert_eq!(contents.get(at), expected, "word {at} of {object:#x}");
        }
        heap.free(object).unwrap();
    }
    meet(session, &mut thread);
}

#[test]
fn lock__gives_other_nodes_the_objects_that_were_written_under_it() {
    for consistency in BOTH {
        for mode in MODES {
            run_in(consistency, "stacks", 3, mode);
        }
    }
}

/// Node 0 writes and frees objects of which all have old copies. Node 1 allocates and writes the same memory, in part with the old values. No thread
/// synchronises between the two: they tell each other by words of a sequential region, which order nothing of the heap.
fn reused(session: &Session) {
    const SIZES: [usize; 3] = [64, 2048, 2 * PAGE];
    const OLD: u8 = 7;
    let mut thread = session.thread(0).unwrap();
    let (heap, board) = (heap(session), board(session));
    let own = session.node();
    let (writer, owner) = (page_of(&board, 0), page_of(&board, 1));
    let tell = |word: Array<'_, u64>, step: u64| word.set(0, step);
    let await_told = |word: Array<'_, u64>, step: u64| {
        until(|| match word.get(0) == step {
            true => Ok(()),
            false => Err(format!("no step {step}")),
        });
    };
    let check = |address: u64, expected: &[u8]| {
        let mut bytes = vec![0; expected.len()];
        heap.read(address, &mut bytes).unwrap();
        assert!(bytes == expected, "{bytes:?}");
    };
    let cases = (0..session.nodes()).flat_map(|home| SIZES.map(|bytes| (Place::Node(home), bytes)));
    for (step, (place, bytes)) in (1..).zip(cases) {
        if own == 0 {
            let address = heap.allocate(layout(bytes), place).unwrap();
            heap.write(address, &vec![OLD; bytes]).unwrap();
            writer.set(1, address);
        }
        meet(session, &mut thread);
        let address = writer.get(1);
        check(address, &vec![OLD; bytes]);
        meet(session, &mut thread);
        let mut contents = vec![OLD; bytes];
        contents[bytes / 2..].fill(9);
        match own {
            0 => {
                heap.write(address, &vec![5; bytes]).unwrap();
                heap.free(address).unwrap();
                tell(writer, step);
                await_told(owner, step);
            }
            1 => {
                await_told(writer, step);
                assert_eq!(heap.allocate(layout(bytes), place).unwrap(), address);
                heap.write(address, &contents).unwrap();
                thread.release().unwrap();
                tell(owner, step);
            }
            _ => {}
        }
        meet(session, &mut thread);
        check(address, &contents);
        meet(session, &mut thread);
        if own == 2 {
            heap.free(address).unwrap();
        }
        meet(session, &mut thread);
    }
}

#[test]
fn allocate__of_memory_that_another_node_has_freed_gives_the_writes_of_the_new_owner() {
    for consistency in BOTH {
        for mode in MODES {
            run_in(consistency, "reused", 3, mode);
        }
    }
}

/// Node 1 ends, when node 0 has written an object that is at home there, and one of its own.
fn unreleased(session: &Session) {
    let mut thread = session.thread(0).unwrap();
    let heap = heap_of(session, Consistency::Release).unwrap();
    let sequential = heap_of(session, Consistency::Sequential).unwrap();
    if session.node() == 1 {
        meet(session, &mut thread);
        // Without leaving.
        std::process::exit(0);
    }
    let mine = heap.allocate(layout(64), Place::Here).unwrap();
    let theirs = heap.allocate(layout(64), Place::Node(1)).unwrap();
    // A copy of before.
    heap.read(theirs, &mut [0; 8]).unwrap();
    meet(session, &mut thread);
    for address in [mine, theirs] {
        heap.write(address, &[4; 64]).unwrap();
    }
    // This neither releases nor acquires anything.
    until(|| match sequential.allocate(layout(64), Place::Node(1)) {
        Ok(_) => Err("node 1 is there".to_owned()),
        Err(gone) => {
            assert_eq!(named(&gone), 1, "{gone}");
            Ok(())
        }
    });
    let error = heap.free(mine).unwrap_err();
    assert!(matches!(error, Error::Unreleased { node: 1 }), "{error}");
    let mut bytes = [0; 64];
    heap.read(mine, &mut bytes).unwrap();
    assert_eq!(bytes, [4; 64]);
    heap.free(mine).unwrap();
    assert!(matches!(heap.free(mine), Err(Error::NotAllocated { .. })));
    assert!(matches!(heap.free(theirs), Err(Error::Gone { node: 1, .. })));
}

#[test]
fn free__of_an_object_beside_writes_that_are_lost_frees_it_at_the_second_call() {
    for mode in MODES {
        run("unreleased", 2, mode);
    }
}

/// The nodes want different consistencies.
fn unequal(session: &Session) {
    let consistency = BOTH[session.node() as usize];
    let error = heap_of(session, consistency).unwrap_err();
    match session.node() {
        0 => assert!(matches!(error, Error::Differs { node: 1, region: 0 }), "{error}"),
        _ => assert!(matches!(error, Error::OtherSettings { region: 0 }), "{error}"),
    }
    if session.node() == 1 {
        let text = error.to_string();
        let begin = "node 0 makes region 0 of another size, or with other units, homes or consistency: ";
        assert!(text.starts_with(begin) && !text.contains('\n'), "{text}");
    }
    meet(session, &mut session.thread(0).unwrap());
}

#[test]
fn heap__of_another_consistency_at_each_node_is_an_error() {
    run("unequal", 2, MODES[0]);
}
