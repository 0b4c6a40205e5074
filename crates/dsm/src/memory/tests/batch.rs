//! Batches beside an engine that goes page by page, while threads touch the pages.

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use super::super::{Change, PageBatch};
use super::*;
use crate::memory::PageState::{Invalid, Modified, Shared};

const PAGES: u32 = 96;
const CHANGES: [Change; 5] = [
    Change::Protect,
    Change::Unprotect,
    Change::Invalidate,
    Change::Install(Access::Read),
    Change::Install(Access::Write),
];

fn below(random: &mut ChaCha8Rng, bound: u32) -> u32 {
    random.next_u32() % bound
}

/// Returns random changes: of some pages, or of most, such that spans of all kinds occur.
fn random_changes(random: &mut ChaCha8Rng, pages: impl Iterator<Item = u32>) -> Vec<(u32, Change)> {
    let (of, kinds) = (1 + below(random, 8), 1 + below(random, CHANGES.len() as u32));
    let first = below(random, CHANGES.len() as u32);
    let mut changes = Vec::new();
    for page in pages {
        if below(random, of) == 0 {
            let change = (first + below(random, kinds)) as usize % CHANGES.len();
            changes.push((page, CHANGES[change]));
        }
    }
    changes
}

/// Returns what threads may really do with the pages now.
fn rights(view: &View) -> Vec<PageState> {
    match view.userfault() {
        Some(_) => rights_of_pages(view),
        None => rights_of_mappings(view),
    }
}

/// Reads the entries of the kernel's page table (pagemap of proc(5)).
fn rights_of_pages(view: &View) -> Vec<PageState> {
    use std::os::unix::fs::FileExt;
    const PRESENT: u64 = 1 << 63;
    const PROTECTED: u64 = 1 << 57;
    let file = std::fs::File::open("/proc/self/pagemap").unwrap();
    let mut entries = vec![0; 8 * view.pages() as usize];
    let first = view.mapping().address() / page_bytes() as u64;
    file.read_exact_at(&mut entries, 8 * first).unwrap();
    let (entries, _) = entries.as_chunks::<8>();
    let states = entries.iter().map(|entry| match u64::from_ne_bytes(*entry) {
        entry if entry & PRESENT == 0 => Invalid,
        entry if entry & PROTECTED != 0 => Shared,
        _ => Modified,
    });
    states.collect()
}

/// Reads the kernel's list of mappings (maps of proc(5)).
fn rights_of_mappings(view: &View) -> Vec<PageState> {
    let start = view.mapping().address();
    let end = start + view.mapping().len() as u64;
    let mut states = vec![Invalid; view.pages() as usize];
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let (range, rest) = line.split_once(' ').unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let [from, to] = [from, to].map(|address| {
            let address = u64::from_str_radix(address, 16).unwrap();
            (address.clamp(start, end) - start) as usize / page_bytes()
        });
        states[from..to].fill(match &rest[..2] {
            "rw" => Modified,
            "r-" => Shared,
            _ => Invalid,
        });
    }
    states
}

fn states(view: &View) -> Vec<PageState> {
    (0..view.pages()).map(|page| view.state(page)).collect()
}

fn seeds(count: u64) -> impl Iterator<Item = u64> {
    let first = std::env::var("RDMUX_DSM_SEED").ok();
    let first = first.map_or(0, |seed| seed.parse().expect("RDMUX_DSM_SEED is a number"));
    first..first + count
}

/// The same changes give the same states, and the kernel's page table has them exactly.
#[test]
fn apply__gives_what_page_by_page_gives() {
    for engine in engines(Writes::Fault) {
        let costs = [Costs::TYPICAL, Costs::measure(engine).unwrap()];
        for (seed, costs) in seeds(40).zip(costs.into_iter().cycle()) {
            println!("seed {seed}");
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let [batched, single, unbatched] = [(); 3].map(|()| new_view(PAGES, engine, costs));
            let unbatched = Arc::into_inner(unbatched).unwrap().unbatched();
            let mut batch = PageBatch::new();
            for _ in 0..20 {
                let mut same = PageBatch::new();
                for (page, change) in random_changes(&mut random, 0..PAGES) {
                    batch.add(page..page + 1, change);
                    same.add(page..page + 1, change);
                    single.change(page, change).unwrap();
                }
                batched.apply(&mut batch).unwrap();
                assert!(batch.is_empty());
                let applied = unbatched.apply(&mut same).unwrap();
                assert!(same.is_empty());
                assert_eq!(applied.pages, applied.takes + applied.gives, "seed {seed}");
                assert_eq!(states(&batched), states(&single), "seed {seed}");
                assert_eq!(states(&unbatched), states(&single), "seed {seed}");
                assert_eq!(rights(&batched), states(&batched), "seed {seed}");
                assert_eq!(rights(&single), states(&single), "seed {seed}");
            }
        }
    }
}

/// Threads write to all pages, and wait where they may not, while two threads change pages that alternate: each batch has pages of the other in
/// between. Once rights are taken, no thread writes until they are given again.
#[test]
fn apply__takes_rights_from_threads_that_touch_meanwhile() {
    for engine in engines(Writes::Fault) {
        for seed in seeds(6) {
            println!("seed {seed}");
            let view = new_view(PAGES, engine, Costs::TYPICAL);
            let handlers = [(); 2].map(|()| Handler::new(&view));
            let stop = AtomicBool::new(false);
            let touched = AtomicU32::new(0);
            std::thread::scope(|scope| {
                let touchers = [1, 2, 3].map(|toucher| {
                    let (view, stop, touched) = (&view, &stop, &touched);
                    scope.spawn(move || {
                        let mut random = ChaCha8Rng::seed_from_u64(seed << 8 | toucher);
                        while !stop.load(Ordering::Relaxed) {
                            let page = word(view, below(&mut random, PAGES));
                            match below(&mut random, 3) {
                                0 => page.fetch_add(1, Ordering::AcqRel),
                                _ => page.load(Ordering::Acquire),
                            };
                            touched.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                });
                let changers = [0, 1].map(|odd| {
                    let view = &view;
                    scope.spawn(move || change_alternating(view, seed, odd))
                });
                let results = changers.map(|changer| changer.join());
                // Threads that wait go on.
                stop.store(true, Ordering::Relaxed);
                let mut batch = PageBatch::new();
                batch.install(0..PAGES, Access::Write);
                view.apply(&mut batch).unwrap();
                batch.unprotect(0..PAGES);
                view.apply(&mut batch).unwrap();
                for result in touchers.map(|toucher| toucher.join()).into_iter().chain(results) {
                    result.unwrap();
                }
            });
            assert!(states(&view).iter().all(|state| *state == Modified));
            assert!(touched.into_inner() > 0);
            drop(handlers);
        }
    }
}

/// Changes every second page, and checks that none is written while threads may not.
fn change_alternating(view: &View, seed: u64, odd: u32) {
    let mut random = ChaCha8Rng::seed_from_u64(seed << 8 | 0x80 | u64::from(odd));
    let pages = || (odd..PAGES).step_by(2);
    let mut batch = PageBatch::new();
    for round in 0..300 {
        for (page, change) in random_changes(&mut random, pages()) {
            batch.add(page..page + 1, change);
        }
        view.apply(&mut batch).unwrap();
        let value = |page| alias_word(view, page).load(Ordering::Acquire);
        let taken: Vec<(u32, u32)> = pages()
            .filter(|page| view.state(*page) != Modified)
            .map(|page| (page, value(page)))
            .collect();
        let rights = rights(view);
        for page in pages() {
            let state = view.state(page);
            let has = rights[page as usize];
            assert!(
                has <= state,
                "seed {seed} round {round} page {page}: {has:?}, not {state:?}"
            );
        }
        std::thread::yield_now();
        for (page, then) in taken {
            assert_eq!(value(page), then, "seed {seed} round {round} page {page}");
        }
    }
}

/// A system call that touches a page in between fails where it cannot wait.
#[test]
fn apply__takes_no_page_in_between_where_system_calls_cannot_wait() {
    let mut all = vec![Engine::Mprotect];
    for engine in engines(Writes::Fault) {
        let Engine::Userfault(options) = engine else {
            continue;
        };
        let delivery = Delivery::Signal;
        all.push(Engine::Userfault(Options { delivery, ..options }));
        if options.catches == Catches::Threads {
            all.push(engine);
        }
    }
    for engine in all {
        let view = new_view(9, engine, Costs::TYPICAL);
        let mut batch = PageBatch::new();
        batch.install(0..9, Access::Write);
        view.apply(&mut batch).unwrap();
        for change in [Change::Protect, Change::Invalidate] {
            (0..9)
                .step_by(3)
                .for_each(|page| batch.add(page..page + 1, change));
            let applied = view.apply(&mut batch).unwrap();
            assert_eq!((applied.pages, applied.takes), (3, 3), "{engine:?}");
        }
    }
}

/// A thread that runs over valid pages never waits for another, whatever is taken around it.
#[test]
fn apply__leaves_no_page_of_others_unanswered() {
    for engine in engines(Writes::Fault) {
        let takes = if engine == options(Catches::All, Writes::Fault) {
            1
        } else {
            32
        };
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        let handler = Handler::new(&view);
        let mut batch = PageBatch::new();
        batch.install(0..PAGES, Access::Write);
        view.apply(&mut batch).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let toucher = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for page in (0..PAGES).filter(|page| page % 3 != 0) {
                        word(&view, page).fetch_add(1, Ordering::AcqRel);
                    }
                }
            });
            for _ in 0..200 {
                (0..PAGES)
                    .step_by(3)
                    .for_each(|page| batch.invalidate(page..page + 1));
                let applied = view.apply(&mut batch).unwrap();
                assert_eq!((applied.pages, applied.takes), (32, takes));
                (0..PAGES)
                    .step_by(3)
                    .for_each(|page| batch.install(page..page + 1, Access::Write));
                assert_eq!(view.apply(&mut batch).unwrap().takes, 0);
                (0..PAGES)
                    .step_by(3)
                    .for_each(|page| batch.protect(page..page + 1));
                assert_eq!(view.apply(&mut batch).unwrap().takes, takes);
                (0..PAGES)
                    .step_by(3)
                    .for_each(|page| batch.unprotect(page..page + 1));
                assert_eq!(view.apply(&mut batch).unwrap().takes, 0);
            }
            stop.store(true, Ordering::Relaxed);
            toucher.join().unwrap();
        });
        assert!(handler.wanted.try_recv().is_err());
    }
}

/// The engine of mprotect(2) notes the same states, and gives rights that suffice.
#[test]
fn apply__by_mprotect() {
    let seed = seeds(1).next().unwrap();
    println!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let view = new_view(PAGES, Engine::Mprotect, Costs::TYPICAL);
    let mut expected = vec![Invalid; PAGES as usize];
    let mut batch = PageBatch::new();
    for _ in 0..200 {
        for (page, change) in random_changes(&mut random, 0..PAGES) {
            batch.add(page..page + 1, change);
            let state = &mut expected[page as usize];
            *state = change.of(*state).unwrap_or(*state);
        }
        view.apply(&mut batch).unwrap();
        assert_eq!(states(&view), expected);
        assert_eq!(rights(&view), expected);
        for page in 0..PAGES {
            match view.state(page) {
                Invalid | PageState::Poisoned => {}
                Shared => drop(view.mapping().load(page as usize * page_bytes())),
                Modified => drop(word(&view, page).fetch_add(1, Ordering::AcqRel)),
            }
        }
    }
}

/// Two threads change pages that alternate, so that each range has pages of the other next to it.
#[test]
fn apply__by_mprotect_in_two_threads() {
    for seed in seeds(6) {
        println!("seed {seed}");
        let view = new_view(PAGES, Engine::Mprotect, Costs::TYPICAL);
        std::thread::scope(|scope| {
            for odd in [0, 1] {
                let view = &view;
                scope.spawn(move || change_alternating(view, seed, odd));
            }
        });
        assert_eq!(rights(&view), states(&view));
    }
}

/// Both orders of two changes of a page are right; more rights than the state has are not.
#[test]
fn apply__of_the_same_pages_in_two_threads() {
    for engine in engines(Writes::Fault).into_iter().chain([Engine::Mprotect]) {
        let seed = seeds(1).next().unwrap();
        println!("seed {seed}");
        let view = new_view(PAGES, engine, Costs::TYPICAL);
        for round in 0..500 {
            std::thread::scope(|scope| {
                for thread in [0, 1] {
                    let mut random = ChaCha8Rng::seed_from_u64(seed << 16 | round << 1 | thread);
                    let view = &view;
                    scope.spawn(move || {
                        let mut batch = PageBatch::new();
                        // As many as both threads have time for at once.
                        for _ in 0..20 {
                            for (page, change) in random_changes(&mut random, 0..8) {
                                batch.add(page..page + 1, change);
                            }
                            view.apply(&mut batch).unwrap();
                        }
                    });
                }
            });
            // Without pages in between each page has exactly its rights.
            if engine == Engine::Mprotect {
                assert_eq!(rights(&view), states(&view), "seed {seed} round {round}");
            }
            let both = rights(&view).into_iter().zip(states(&view)).zip(0..);
            for ((has, state), page) in both {
                assert!(
                    has <= state,
                    "seed {seed} round {round} page {page}: {has:?}, not {state:?}"
                );
            }
        }
    }
}

#[test]
fn measure__prices_no_page_far_below_the_typical_price() {
    for engine in engines(Writes::Fault) {
        let costs = Costs::measure(engine).unwrap();
        let pages = |costs: Costs| {
            let prices = [costs.drop, costs.protect, costs.install, costs.unprotect];
            prices.map(|price| price.page_ns)
        };
        for (page_ns, typical_ns) in pages(costs).into_iter().zip(pages(Costs::TYPICAL)) {
            assert!(page_ns >= typical_ns / 4, "{costs:?}");
        }
    }
}
