//! Nodes that are only busy, that hang, and that are stopped while they copy pages.
#![allow(non_snake_case, reason = "tests are named function__case")]
#![allow(unsafe_code, reason = "ptrace(2) stops one thread of a process")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::io;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use common::{MODES, Node, named, rounds, run_as_node, start, stay, wait_for};
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};
use rdmux_dsm::{Error, Region, RegionOptions, Session, Thread};
use rustix::process::Signal;
use skip::skip;

const PAGE: usize = 4096;
const PAGES: usize = 30;
const LEASE: Duration = Duration::from_secs(6);

#[test]
fn node() {
    run_as_node(&[("computing", computing), ("parked", parked), ("copying", copying)]);
}

fn region(session: &Session) -> Region<'_> {
    let bytes = (PAGES * PAGE) as u64;
    session.region(&RegionOptions::new(bytes).unwrap()).unwrap()
}

/// Node 1 uses no page and makes no call for longer than a lease, while the others want its pages.
fn computing(session: &Session) {
    let region = region(session);
    let words = region.array::<u64>(0, PAGES * PAGE / 8);
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    thread.barrier(0, all).unwrap();
    if session.node() == 1 {
        let began = Instant::now();
        while began.elapsed() < LEASE * 3 / 2 {
            std::hint::spin_loop();
        }
    } else {
        for page in (session.node() as usize..PAGES).step_by(3) {
            words.set(page * PAGE / 8, page as u64);
        }
    }
    thread.barrier(0, all).unwrap();
    for page in (0..PAGES).filter(|page| page % 3 != 1) {
        assert_eq!(words.get(page * PAGE / 8), page as u64);
    }
    thread.barrier(0, all).unwrap();
}

#[test]
fn lease__does_not_end_for_a_node_that_computes() {
    for mode in MODES {
        let nodes = start("computing", 3, mode, LEASE);
        nodes.into_iter().for_each(|node| drop(node.succeed()));
    }
}

/// Node 1 has threads that sleep; the others want pages and locks of all nodes, until one is gone.
fn parked(session: &Session) {
    let region = region(session);
    let mut thread = session.thread(0).unwrap();
    thread
        .barrier(0, NonZeroU32::new(session.nodes()).unwrap())
        .unwrap();
    println!("@ begins");
    if session.node() == 1 {
        stay();
    }
    let step = |thread: &mut Thread<'_>, page: usize| -> Result<(), Error> {
        let _guard = thread.lock(page as u64)?;
        region.write((page * PAGE) as u64, &[1; 8])
    };
    for page in (0..PAGES).cycle() {
        if let Err(error) = step(&mut thread, page) {
            println!("@ misses {}: {error}", named(&error));
            stay();
        }
    }
}

/// A thread of another process that does not run until this is dropped.
struct Held(i32);

impl Held {
    fn new(thread: i32) -> io::Result<Held> {
        for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
            // SAFETY: these requests use no address.
            if unsafe { libc::ptrace(request, thread, 0, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        let held = Held(thread);
        let mut status = 0;
        // SAFETY: the status is written to a number that lives here.
        let stopped = unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) };
        assert_eq!(stopped, thread, "{}", io::Error::last_os_error());
        Ok(held)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, 0, 0) };
    }
}

/// Returns the threads of a node that have a name.
fn threads(node: &Node, name: &str) -> Vec<i32> {
    let all = std::fs::read_dir(format!("/proc/{}/task", node.pid())).unwrap();
    let thread = |entry: io::Result<std::fs::DirEntry>| {
        let path = entry.ok()?.path();
        let is_it = std::fs::read_to_string(path.join("comm")).ok()?.trim_end() == name;
        is_it.then(|| path.file_name()?.to_str()?.parse().ok()).flatten()
    };
    all.filter_map(thread).collect()
}

#[test]
fn lease__ends_for_a_node_whose_service_thread_hangs() {
    for mode in MODES {
        let mut nodes = start("parked", 3, mode, LEASE);
        wait_for(&mut nodes, "@ begins");
        let hung = nodes.remove(1);
        let service = threads(&hung, "dsm");
        assert_eq!(service.len(), 1);
        let held = match Held::new(service[0]) {
            Ok(held) => held,
            Err(error) => return skip(format!("ptrace(2): {error}")),
        };
        let began = Instant::now();
        wait_for(&mut nodes, "@ misses 1: ");
        // Time is meant: that of the lease, with what a busy host takes.
        assert!(began.elapsed() < 2 * LEASE, "{:?}", began.elapsed());
        println!(
            "all have noticed after {:?}: {}",
            began.elapsed(),
            nodes[0].printed()
        );
        drop(held);
        // It is told that it is out, and goes on without the others.
        assert!(!hung.printed().contains("panicked"), "{}", hung.printed());
    }
}

/// Whole pages, of which each node adds to a word of its own, under locks. Node 1 does so until it misses another one; the others go on without it.
fn copying(session: &Session) {
    let region = region(session);
    let mut thread = session.thread(0).unwrap();
    let mut dice = ChaCha8Rng::seed_from_u64(session.node().into());
    let own = session.node() as usize;
    let mut counts = [0u64; PAGES];
    let mut step = |thread: &mut Thread<'_>, page: usize| -> Result<(), Error> {
        let _guard = thread.lock(page as u64)?;
        let at = (page * PAGE) as u64;
        let mut bytes = [0; PAGE];
        region.read(at, &mut bytes)?;
        let mut words: Vec<u64> = bytes
            .as_chunks()
            .0
            .iter()
            .map(|it| u64::from_ne_bytes(*it))
            .collect();
        let sum: u64 = words[..3].iter().sum();
        assert!(
            words[3..].iter().all(|it| *it == sum),
            "page {page} is torn: {words:?}"
        );
        assert_eq!(
            words[own], counts[page],
            "page {page} lacks what this node has written"
        );
        words[own] += 1;
        words[3..].fill(sum + 1);
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_ne_bytes).collect();
        region.write(at, &bytes)?;
        counts[page] += 1;
        Ok(())
    };
    println!("@ begins");
    let mut lost = [false; PAGES];
    let mut told = Instant::now();
    for round in 0.. {
        for _ in 0..PAGES {
            let page = dice.next_u32() as usize % PAGES;
            match step(&mut thread, page) {
                _ if lost[page] => {}
                Ok(()) => {}
                Err(error) => {
                    lost[page] = true;
                    println!("@ misses {}: {error}", named(&error));
                    if own == 1 {
                        stay();
                    }
                }
            }
        }
        let usable = lost.iter().filter(|it| !**it).count();
        assert!(usable > 0);
        if told.elapsed() > Duration::from_millis(50) {
            told = Instant::now();
            println!("@ round {round}, {usable} pages");
        }
    }
}

#[test]
fn expelled__node_that_was_stopped_while_it_copied_spoils_nothing_when_it_goes_on() {
    for (seed, mode) in (0..).zip(MODES) {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let mut nodes = start("copying", 3, mode, LEASE);
        wait_for(&mut nodes, "@ begins");
        let mut stopped = nodes.remove(1);
        for _ in 0..200 {
            stopped.signal(Signal::STOP);
            // Time is meant: the node is stopped at many points of its work.
            std::thread::sleep(Duration::from_micros(u64::from(dice.next_u32() % 2000)));
            stopped.signal(Signal::CONT);
            // Time is meant: it works for a while between two stops.
            std::thread::sleep(Duration::from_micros(u64::from(dice.next_u32() % 2000)));
        }
        stopped.signal(Signal::STOP);
        wait_for(&mut nodes, "@ misses 1: ");
        stopped.signal(Signal::CONT);
        wait_for([&mut stopped], "@ misses ");
        let before: Vec<usize> = nodes.iter_mut().map(rounds).collect();
        let deadline = Instant::now() + common::LONG;
        for (node, before) in nodes.iter_mut().zip(before) {
            while rounds(node) < before + 3 {
                assert!(Instant::now() < deadline, "{}", node.printed());
                // A look at the condition again and again, as in `wait_for`.
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        println!("{mode}: {}", stopped.printed());
    }
}
