//! Prices of the system calls that change pages, measured on the machine on which they are paid.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rdmux_memory::AnonymousMemory;

use super::view::{Engine, View};
use super::{Access, Error};

/// Pages of the range from which the price of a page is taken.
const PAGES: u32 = 64;
/// Rounds, whose median counts.
const ROUNDS: usize = 31;

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
    /// Measures them on pages of its own, while a thread of its own runs: some milliseconds.
    pub fn measure(engine: Engine) -> Result<Costs, Error> {
        let len = PAGES as usize * rustix::param::page_size();
        let memory = AnonymousMemory::shareable(len).map_err(|error| Error::of("memfd_create", &error))?;
        let view = View::new(Arc::new(memory), None, engine, Costs::TYPICAL)?;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (running, runs) = std::sync::mpsc::channel();
            let stop = &stop;
            scope.spawn(move || {
                let _ = running.send(());
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let _ = runs.recv();
            let measured = Costs::of(&view);
            stop.store(true, Ordering::Relaxed);
            measured
        })
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

    fn of(view: &View) -> Result<Costs, Error> {
        // For each of the four calls, the times of one page and of all.
        let mut times: [[Vec<u64>; 2]; 4] = Default::default();
        for _ in 0..ROUNDS {
            for (size, pages) in [0..1, 0..PAGES].into_iter().enumerate() {
                let calls: [&dyn Fn() -> Result<(), Error>; 4] = [
                    &|| view.install(pages.clone(), Access::Write),
                    &|| view.protect(pages.clone()),
                    &|| view.unprotect(pages.clone()),
                    &|| view.drop_pages(pages.clone()),
                ];
                for (call, times) in calls.iter().zip(&mut times) {
                    let start = Instant::now();
                    call()?;
                    times[size].push(start.elapsed().as_nanos() as u64);
                }
            }
        }
        let [install, protect, unprotect, drop] = times.map(|[one, all]| price(one, all));
        Ok(Costs {
            drop,
            protect,
            install,
            unprotect,
        })
    }
}

/// Returns a price by the times of one page and of [`PAGES`].
fn price(one: Vec<u64>, all: Vec<u64>) -> Price {
    let median = |mut times: Vec<u64>| {
        let middle = times.len() / 2;
        *times.select_nth_unstable(middle).1
    };
    let (one, all) = (median(one), median(all));
    let page = (all.saturating_sub(one) / u64::from(PAGES - 1)).max(1);
    let call = one.saturating_sub(page).max(1);
    let nanoseconds = |value| u32::try_from(value).unwrap_or(u32::MAX);
    Price {
        call_ns: nanoseconds(call),
        page_ns: nanoseconds(page),
    }
}
