//! Throughput and latency of shared memory and futexes between two processes on CPU 0 and CPU 1: the floor of the path between
//! peers of one host. `cargo bench -p rdmux-shm --bench shm`; with the name of one figure it prints that alone, as `rdmux-bench`
//! needs it.
//!
//! The program starts itself as the other process, with the shared memory as its standard input.
#![allow(unsafe_code, reason = "memory that two processes write")]

use std::error::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::ptr::{NonNull, copy_nonoverlapping};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::thread::{CpuSet, futex, sched_setaffinity};

/// Bytes between words that different processes write, so that they share no cache line, nor one that is fetched along.
const STRIDE: usize = 128;
/// Offset of the messages, one slot for each direction.
const SLOTS_AT: usize = 4096;
const SLOT_BYTES: usize = 1 << 20;
const MAP_BYTES: usize = SLOTS_AT + 2 * SLOT_BYTES;
/// Time after which the other process counts as dead, or as never started.
const PATIENCE: Duration = Duration::from_secs(10);

/// Number of round trips timed together: reading the clock takes as long as a quarter of one.
const GROUP: u64 = 2;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A figure that can be measured.
#[derive(Clone, Copy)]
enum Figure {
    /// Half the round trip of a word and this many bytes beside it, which either side copies in and out, both spinning; ns.
    Exchange(usize),
    /// One process copies this many bytes into shared memory, again and again; bytes/s.
    Copy(usize),
    /// Half the round trip of a word whose reader sleeps in a futex, the other process on that CPU; ns.
    Futex { far_cpu: usize },
    /// One pair of several that share the CPUs, where the scheduler puts them, for [`CROWD`]: round trips per second.
    Crowd(Waits),
}

/// How a process waits for its turn.
#[derive(Clone, Copy)]
enum Waits {
    /// In a futex.
    Asleep,
    /// Looks, and yields the CPU between two looks.
    Yielding,
}

/// Run time of a pair in a crowd.
const CROWD: Duration = Duration::from_secs(2);
/// Round trips of such a pair between two looks at the clock.
const CROWD_GROUP: u64 = 64;

const FIGURES: [(&str, Figure); 8] = [
    ("flag", Figure::Exchange(0)),
    ("copy-64", Figure::Exchange(64)),
    ("copy-4096", Figure::Exchange(4096)),
    ("memcpy-1048576", Figure::Copy(SLOT_BYTES)),
    ("futex-2-cpus", Figure::Futex { far_cpu: 1 }),
    ("futex-1-cpu", Figure::Futex { far_cpu: 0 }),
    ("crowd-futex", Figure::Crowd(Waits::Asleep)),
    ("crowd-yield", Figure::Crowd(Waits::Yielding)),
];

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let named = |name: &str| {
        FIGURES
            .iter()
            .find(|(n, _)| n == &name)
            .map(|(_, figure)| *figure)
    };
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["far", name] => far(named(name).ok_or("no such figure")?),
        [name] if named(name).is_some() => {
            println!("{}", measure(name, named(name).ok_or("no such figure")?)?);
            Ok(())
        }
        // cargo passes a flag of its own.
        _ => {
            for (name, figure) in FIGURES {
                let unit = match figure {
                    Figure::Copy(_) => "B/s",
                    Figure::Crowd(_) => "1/s",
                    _ => "ns",
                };
                println!("{name:16} {:14.0} {unit}", measure(name, figure)?);
            }
            Ok(())
        }
    }
}

/// Runs the side that measures.
fn measure(name: &str, figure: Figure) -> Outcome<f64> {
    if !matches!(figure, Figure::Crowd(_)) {
        pin(0)?;
    }
    let memory = memfd_create("rdmux-bench", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, MAP_BYTES as u64)?;
    let shared = Shared::map(&memory)?;
    if let Figure::Copy(bytes) = figure {
        return Ok(copy_rate(&shared, bytes));
    }
    let _far = Far::start(name, memory)?;
    if let Figure::Crowd(waits) = figure {
        return crowd_rate(&shared, waits);
    }
    let mut samples = match figure {
        Figure::Futex { .. } => hand_over(&shared, 10_000, 0)?,
        Figure::Exchange(bytes) => exchange(&shared, 100_000, bytes, 0)?,
        Figure::Copy(_) | Figure::Crowd(_) => Vec::new(),
    };
    // The first samples include the start of the other process.
    samples.drain(..samples.len() / 10);
    samples.sort_unstable();
    Ok(samples[samples.len() / 2] as f64 / 2.0)
}

/// Runs the side that answers, until it is ended.
fn far(figure: Figure) -> Outcome<()> {
    let shared = Shared::map(std::io::stdin())?;
    match figure {
        Figure::Exchange(bytes) => {
            pin(1)?;
            exchange(&shared, u64::MAX, bytes, 1)?;
        }
        Figure::Futex { far_cpu } => {
            pin(far_cpu)?;
            hand_over(&shared, u64::MAX, 1)?;
        }
        Figure::Crowd(waits) => {
            take_turns(&shared, u64::MAX, 1, waits)?;
        }
        Figure::Copy(_) => {}
    }
    Ok(())
}

/// Returns the rate of round trips during [`CROWD`].
fn crowd_rate(shared: &Shared, waits: Waits) -> Outcome<f64> {
    // The first includes the start of the other process.
    take_turns(shared, 1, 0, waits)?;
    let (begin, mut round_trips) = (Instant::now(), 0);
    while begin.elapsed() < CROWD {
        take_turns(shared, CROWD_GROUP, 0, waits)?;
        round_trips += CROWD_GROUP;
    }
    Ok(round_trips as f64 / begin.elapsed().as_secs_f64())
}

fn take_turns(shared: &Shared, rounds: u64, side: u32, waits: Waits) -> Outcome<()> {
    if let Waits::Asleep = waits {
        return hand_over(shared, rounds, side).map(drop);
    }
    let turn = shared.turn();
    for _ in 0..rounds {
        if side == 0 {
            turn.store(1, Ordering::Release);
        }
        while turn.load(Ordering::Acquire) != side {
            std::thread::yield_now();
        }
        if side == 1 {
            turn.store(0, Ordering::Release);
        }
    }
    Ok(())
}

/// Returns the times of round trips, in nanoseconds; side 0 begins.
fn exchange(shared: &Shared, rounds: u64, bytes: usize, side: usize) -> Outcome<Vec<u64>> {
    let (mut from, mut to) = (vec![0u8; bytes], vec![1u8; bytes]);
    let (mine, theirs) = (shared.word(side), shared.word(1 - side));
    let mut samples = Vec::with_capacity(if side == 0 { rounds as usize } else { 0 });
    let mut begin = Instant::now();
    for round in 1..=rounds {
        if side == 0 {
            shared.put(0, &to);
            mine.store(round, Ordering::Release);
        }
        spin_until(|| theirs.load(Ordering::Acquire) == round)?;
        shared.get(1 - side, &mut from);
        if side == 1 {
            shared.put(1, &to);
            mine.store(round, Ordering::Release);
        }
        std::mem::swap(&mut from, &mut to);
        if side == 0 && round.is_multiple_of(GROUP) {
            let end = Instant::now();
            samples.push((end - begin).as_nanos() as u64 / GROUP);
            begin = end;
        }
    }
    Ok(samples)
}

/// Returns the times of round trips, in nanoseconds, of a word that says whose turn it is; side 0 begins.
fn hand_over(shared: &Shared, rounds: u64, side: u32) -> Outcome<Vec<u64>> {
    let turn = shared.turn();
    let timeout = futex::Timespec {
        tv_sec: PATIENCE.as_secs() as i64,
        tv_nsec: 0,
    };
    let mut samples = Vec::with_capacity(if side == 0 { rounds as usize } else { 0 });
    for _ in 0..rounds {
        let begin = (side == 0).then(Instant::now);
        if side == 0 {
            give(turn, 1)?;
        }
        while turn.load(Ordering::Acquire) != side {
            match futex::wait(turn, futex::Flags::empty(), 1 - side, Some(&timeout)) {
                Ok(()) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if side == 1 {
            give(turn, 0)?;
        }
        samples.extend(begin.map(|begin| begin.elapsed().as_nanos() as u64));
    }
    Ok(samples)
}

fn give(turn: &AtomicU32, to: u32) -> Outcome<()> {
    turn.store(to, Ordering::Release);
    futex::wake(turn, futex::Flags::empty(), 1)?;
    Ok(())
}

/// Returns the rate of copies, in bytes per second.
fn copy_rate(shared: &Shared, bytes: usize) -> f64 {
    const WARM_UP: u32 = 20;
    const ROUNDS: u32 = 1_000;
    let from = vec![1u8; bytes];
    let mut begin = Instant::now();
    for round in 0..WARM_UP + ROUNDS {
        if round == WARM_UP {
            begin = Instant::now();
        }
        shared.put(0, std::hint::black_box(&from));
    }
    f64::from(ROUNDS) * bytes as f64 / begin.elapsed().as_secs_f64()
}

fn spin_until(mut done: impl FnMut() -> bool) -> Outcome<()> {
    let mut deadline = None;
    loop {
        for _ in 0..1 << 16 {
            if done() {
                return Ok(());
            }
        }
        if Instant::now() > *deadline.get_or_insert_with(|| Instant::now() + PATIENCE) {
            return Err("the other process is silent".into());
        }
    }
}

/// Two words, a turn and two slots that both processes see.
struct Shared(NonNull<u8>);

impl Shared {
    fn map(memory: impl AsFd) -> Outcome<Shared> {
        // SAFETY: a new mapping at an address that the kernel chooses affects no memory that exists; it stays until the process
        // ends. The file has `MAP_BYTES` bytes and nobody shortens it.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                MAP_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                memory,
                0,
            )
        }?;
        Ok(Shared(NonNull::new(base.cast()).ok_or("mapped at 0")?))
    }

    /// Returns the word that a side writes.
    fn word(&self, side: usize) -> &AtomicU64 {
        // SAFETY: aligned and inside of the mapping, which is never unmapped.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().add(side * STRIDE).cast()) }
    }

    fn turn(&self) -> &AtomicU32 {
        // SAFETY: as for `word`.
        unsafe { AtomicU32::from_ptr(self.0.as_ptr().add(2 * STRIDE).cast()) }
    }

    fn slot(&self, side: usize, bytes: usize) -> *mut u8 {
        assert!(side < 2 && bytes <= SLOT_BYTES);
        // SAFETY: inside of the mapping.
        unsafe { self.0.as_ptr().add(SLOTS_AT + side * SLOT_BYTES) }
    }

    fn put(&self, side: usize, bytes: &[u8]) {
        // SAFETY: `slot` has room for them. The other process reads them only after the word that follows.
        unsafe { copy_nonoverlapping(bytes.as_ptr(), self.slot(side, bytes.len()), bytes.len()) };
    }

    fn get(&self, side: usize, bytes: &mut [u8]) {
        // SAFETY: as for `put`: the other process writes again only after the next word of this one.
        unsafe { copy_nonoverlapping(self.slot(side, bytes.len()), bytes.as_mut_ptr(), bytes.len()) };
    }
}

/// The other process. It ends with the value.
struct Far(Child);

impl Far {
    fn start(name: &str, memory: OwnedFd) -> Outcome<Far> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["far", name])
            .stdin(Stdio::from(memory))
            .stdout(Stdio::null());
        Ok(Far(command.stderr(Stdio::null()).spawn()?))
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pin(cpu: usize) -> Outcome<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}
