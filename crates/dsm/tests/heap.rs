//! Heaps on nodes as processes.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::alloc::Layout;
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Instant;

use common::{LONG, MODES, in_threads, named, run, run_as_node, run_with};
use rdmux_dsm::{Access, Array, Error, Heap, HeapOptions, Place, Region, RegionOptions, Session, Thread};

const PAGE: usize = 4096;

/// Bytes of each node for each size of objects.
const BYTES: usize = 24 * PAGE;

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
    ]);
}

fn heap(session: &Session) -> Heap<'_> {
    session.heap(&HeapOptions::new(BYTES as u64).unwrap()).unwrap()
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
    for mode in MODES {
        run("objects", 2, mode);
    }
    for nodes in [1, 3] {
        run("objects", nodes, MODES[0]);
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
    for mode in MODES {
        run("placed", 2, mode);
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
    for mode in MODES {
        run("storm", 3, mode);
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
    for mode in MODES {
        run("dies", 2, mode);
    }
}
