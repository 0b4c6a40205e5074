//! Prices of the system calls that change pages: typical ones, which sessions count with, or measured on the machine on which they are paid.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use rdmux_memory::AnonymousMemory;
use rustix::thread::{sched_getaffinity, sched_getcpu, sched_setaffinity};

use super::view::{Engine, View};
use super::{Access, Error};

/// Pages of the range from which the price of a page is taken.
const PAGES: u32 = 64;
/// Measurements of each call, whose median counts.
const ROUNDS: usize = 61;
/// Parts of the typical price of a page, one of which is the lowest price of a page.
const PAGE_PART_MAX: u32 = 4;
/// Samples beside the other thread that suffice.
const BESIDE_MIN: usize = 9;

/// Price of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    /// Nanoseconds of a call, with the interruption of one other CPU if it causes that.
    pub call_ns: u32,
    /// Nanoseconds of each page.
    pub page_ns: u32,
}

/// Prices of the calls, while another thread of the process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// [`Call::Drop`](super::Call::Drop).
    pub drop: Price,
    /// [`Call::Protect`](super::Call::Protect).
    pub protect: Price,
    /// [`Call::Install`](super::Call::Install).
    pub install: Price,
    /// [`Call::Unprotect`](super::Call::Unprotect).
    pub unprotect: Price,
}

impl Costs {
    /// Measures them on pages of its own, while a thread of its own runs: some milliseconds. Returns [`Costs::TYPICAL`] if the system has no thread.
    pub fn measure(engine: Engine) -> Result<Costs, Error> {
        let len = PAGES as usize * rustix::param::page_size();
        let memory = AnonymousMemory::shareable(len).map_err(|error| Error::of("memfd_create", &error))?;
        let view = View::new(Arc::new(memory), None, engine, Costs::TYPICAL)?;
        let (stop, turns) = (AtomicBool::new(false), AtomicU64::new(0));
        let here = sched_getcpu();
        let run = || {
            keep_off(here);
            while !stop.load(Ordering::Relaxed) {
                turns.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            if std::thread::Builder::new().spawn_scoped(scope, run).is_err() {
                return Ok(Costs::TYPICAL);
            }
            while turns.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            let measured = Costs::of(&view, &turns);
            stop.store(true, Ordering::Relaxed);
            measured
        })
    }

    /// Returns the prices for pages that are so many of the system's each.
    pub(super) fn of_pages(self, count: u64) -> Costs {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let of = |price: Price| Price {
            page_ns: price.page_ns.saturating_mul(count),
            ..price
        };
        Costs {
            drop: of(self.drop),
            protect: of(self.protect),
            install: of(self.install),
            unprotect: of(self.unprotect),
        }
    }

    /// Prices of a virtual machine, until others are measured.
    pub const TYPICAL: Costs = Costs {
        drop: Price {
            call_ns: 18_000,
            page_ns: 60,
        },
        protect: Price {
            call_ns: 18_000,
            page_ns: 25,
        },
        install: Price {
            call_ns: 400,
            page_ns: 90,
        },
        unprotect: Price {
            call_ns: 350,
            page_ns: 25,
        },
    };

    fn of(view: &View, turns: &AtomicU64) -> Result<Costs, Error> {
        // For each of the four calls, the times of one page and of all.
        let mut times: [[Vec<Sample>; 2]; 4] = Default::default();
        for _ in 0..ROUNDS {
            for (size, pages) in [0..1, 0..PAGES].into_iter().enumerate() {
                let calls: [&dyn Fn() -> Result<(), Error>; 4] = [
                    &|| view.install(pages.clone(), Access::Write),
                    &|| view.protect(pages.clone()),
                    &|| view.unprotect(pages.clone()),
                    &|| view.drop_pages(pages.clone()),
                ];
                for (call, times) in calls.iter().zip(&mut times) {
                    let before = turns.load(Ordering::Relaxed);
                    let start = Instant::now();
                    call()?;
                    times[size].push(Sample {
                        ns: start.elapsed().as_nanos() as u64,
                        is_beside_other: turns.load(Ordering::Relaxed) != before,
                    });
                }
            }
        }
        let times = times.map(|sizes| sizes.map(|samples| median(&samples)));
        let [install, protect, unprotect, drop] = times;
        Ok(Costs {
            drop: price(drop, Costs::TYPICAL.drop),
            protect: price(protect, Costs::TYPICAL.protect),
            install: price(install, Costs::TYPICAL.install),
            unprotect: price(unprotect, Costs::TYPICAL.unprotect),
        })
    }
}

/// A measurement.
struct Sample {
    ns: u64,
    /// The other thread has run meanwhile, so it has a CPU of its own.
    is_beside_other: bool,
}

/// Keeps the calling thread from a CPU, if it may run on others.
fn keep_off(cpu: usize) {
    if let Ok(mut cpus) = sched_getaffinity(None)
        && cpus.count() > 1
    {
        cpus.unset(cpu);
        // Without it the scheduler moves the thread, a little later.
        let _ = sched_setaffinity(None, &cpus);
    }
}

/// Returns the median of the samples beside the other thread; of all if that seldom had a CPU.
fn median(samples: &[Sample]) -> u64 {
    let all = || samples.iter().map(|sample| sample.ns);
    let beside = samples.iter().filter(|sample| sample.is_beside_other);
    let mut times: Vec<u64> = beside.map(|sample| sample.ns).collect();
    if times.len() < BESIDE_MIN {
        times = all().collect();
    }
    let middle = times.len() / 2;
    *times.select_nth_unstable(middle).1
}

/// Returns a price by the nanoseconds of one page and of [`PAGES`]; the typical one if they contradict each other.
fn price([one, all]: [u64; 2], typical: Price) -> Price {
    let page = all.checked_sub(one).map(|more| more / u64::from(PAGES - 1));
    // The measured pages are in the caches; those of a program seldom are.
    let page = page.map(|page| page.max(u64::from(typical.page_ns / PAGE_PART_MAX)));
    let Some(page) = page.filter(|page| *page < one) else {
        return typical;
    };
    let nanoseconds = |value| u32::try_from(value).unwrap_or(u32::MAX);
    Price {
        call_ns: nanoseconds(one - page),
        page_ns: nanoseconds(page),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn price__by_the_times_of_one_page_and_of_all() {
        let typical = Price {
            call_ns: 18_000,
            page_ns: 60,
        };
        let expect = |times, call_ns, page_ns| {
            let expected = Price { call_ns, page_ns };
            assert_eq!(price(times, typical), expected, "{times:?}");
        };
        expect([1_000, 1_000 + 63 * 100], 900, 100);
        // A page costs a quarter of the typical price at least.
        expect([1_000, 1_000 + 63 * 2], 985, 15);
        expect([1_000, 1_000], 985, 15);
        // All pages cost less than one, or one less than a page.
        expect([1_000, 999], 18_000, 60);
        expect([100, 100 + 63 * 100], 18_000, 60);
        expect([0, 0], 18_000, 60);
        expect([u64::MAX - 1, u64::MAX], u32::MAX, 15);
    }
}
