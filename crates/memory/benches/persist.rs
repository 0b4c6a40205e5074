//! Cost of bringing bytes out of the processor's caches: `cargo bench -p rdmux-memory --bench persist`. It measures every way into
//! random slots of 256 MiB of memory, as a peer's WRITEs would come; medians in ns, with the fence that an answer to FLUSH waits
//! for (`sfence`), and after the slash until the bytes are out (`mfence`, `lfence`). Then it measures the same through the memory
//! kinds, with a file in memory in place of persistent memory.
#![allow(unsafe_code, reason = "instructions on memory of its own")]

use std::alloc::{Layout, alloc_zeroed};
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

#[allow(dead_code, reason = "the library uses all of it")]
#[path = "../src/persist.rs"]
mod persist;

use rdmux_memory::{AnonymousMemory, DaxMemory, FileMemory, PersistenceDomain};
use rdmux_rnic::{Atomic, Memory, Placement};

use persist::{Cpu, Stream, WriteBack, cpu, fence, place, place_cached, place_past, write_back};

const MEMORY: usize = 256 << 20;
const ROUNDS: usize = 2001;
const SIZES: [usize; 8] = [8, 64, 128, 256, 512, 1024, 4096, 65536];

/// A way to place bytes.
type Way = fn(Cpu, &[u8], *mut u8);

/// Places bytes in the cache alone.
fn cached(_: Cpu, from: &[u8], to: *mut u8) {
    // SAFETY: `measure` gives a slot of the memory that is as long as the source.
    unsafe { place_cached(from.as_ptr(), to, from.len()) };
}

/// Places bytes in the cache, then writes them back.
fn cached_and_back(cpu: Cpu, from: &[u8], to: *mut u8) {
    // SAFETY: as above.
    unsafe {
        place_cached(from.as_ptr(), to, from.len());
        write_back(cpu, to, from.len());
    }
}

/// Places bytes past the cache, except those that share their line with other bytes and those of the last line.
fn past(cpu: Cpu, from: &[u8], to: *mut u8) {
    if from.len() < 128 {
        return cached_and_back(cpu, from, to);
    }
    // SAFETY: as above.
    unsafe { place_past(cpu, from.as_ptr(), to, from.len()) };
}

/// Places bytes as the library does.
fn placed(cpu: Cpu, from: &[u8], to: *mut u8) {
    // SAFETY: as above.
    unsafe { place(cpu, from.as_ptr(), to, from.len()) };
}

/// Places bytes as the library does, in pieces, as packets come.
fn placed_in_packets(cpu: Cpu, from: &[u8], to: *mut u8) {
    for (piece, at) in from.chunks(4096).zip((0..).step_by(4096)) {
        // SAFETY: as above; the piece is inside of the slot.
        unsafe { place(cpu, piece.as_ptr(), to.add(at), piece.len()) };
    }
}

fn median(mut all: Vec<u64>) -> u64 {
    all.sort_unstable();
    all[all.len() / 2]
}

/// Returns the median with either fence.
fn measure(way: Way, cpu: Cpu, memory: *mut u8, size: usize, shift: usize) -> (u64, u64) {
    let source = vec![0x5a; size];
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut run = |wait: bool| {
        let times = (0..ROUNDS).map(|_| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let slot = (random >> 20) as usize % (MEMORY / 131_072) * 131_072 + shift;
            // SAFETY: a slot has 128 KiB, of which the largest size and shift leave some.
            let to = unsafe { memory.add(slot) };
            let start = Instant::now();
            way(cpu, &source, to);
            fence();
            if wait {
                // SAFETY: both are on every x86-64.
                #[cfg(target_arch = "x86_64")]
                unsafe {
                    std::arch::x86_64::_mm_mfence();
                    std::arch::x86_64::_mm_lfence();
                }
            }
            start.elapsed().as_nanos() as u64
        });
        median(times.collect())
    };
    (run(false), run(true))
}

/// Measures the accesses of a memory kind, and apart from it each with the flush behind it; ns.
fn memory_kind(name: &str, memory: &dyn Memory, placement: Placement) {
    let mut random = 7u64;
    let mut time = |work: &mut dyn FnMut(u64)| {
        let times = (0..ROUNDS).map(|_| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let offset = (random >> 20) % (memory.len() / 4096) * 4096;
            let start = Instant::now();
            work(offset);
            start.elapsed().as_nanos() as u64
        });
        median(times.collect())
    };
    let (small, page, mut out) = ([1; 64], [1; 4096], [0; 4096]);
    let _ = write!(stdout(), "{name:36}");
    // Errors show as figures that are too good; none is expected.
    for ns in [
        time(&mut |at| memory.write(at, &small).expect("write")),
        time(&mut |at| {
            memory.write(at, &small).expect("write");
            memory.flush(at, 64, placement).expect("flush");
        }),
        time(&mut |at| memory.write(at, &page).expect("write")),
        time(&mut |at| {
            memory.write(at, &page).expect("write");
            memory.flush(at, 4096, placement).expect("flush");
        }),
        time(&mut |at| memory.read(at, &mut out).expect("read")),
        time(&mut |at| memory.atomic(at, Atomic::FetchAdd(1)).map(drop).expect("atomic")),
    ] {
        let _ = write!(stdout(), "{ns:>16}");
    }
    let _ = writeln!(stdout());
}

fn memory_kinds() -> std::io::Result<()> {
    let _ = write!(stdout(), "\n{:36}", "ns");
    for what in [
        "64 B",
        "64 B, flush",
        "4 KiB",
        "4 KiB, flush",
        "read 4 KiB",
        "fetch-add",
    ] {
        let _ = write!(stdout(), "{what:>16}");
    }
    let _ = writeln!(stdout());
    let path = PathBuf::from(format!("/dev/shm/rdmux-bench-{}", std::process::id()));
    const BYTES: u64 = 64 << 20;
    let anonymous = AnonymousMemory::new(BYTES as usize)?;
    for at in (0..BYTES).step_by(4096) {
        anonymous.write(at, &[1]).expect("write");
    }
    memory_kind("anonymous, visible", &anonymous, Placement::GLOBAL);
    let file = FileMemory::open(&path, Some(BYTES), false)?;
    memory_kind("through the kernel, visible", &file, Placement::GLOBAL);
    drop(file);
    for (name, domain) in [
        ("mapped, ADR, persistent", PersistenceDomain::Adr),
        ("mapped, eADR, persistent", PersistenceDomain::Eadr),
    ] {
        let file = Arc::new(FileMemory::open(&path, Some(BYTES), false)?);
        match DaxMemory::map(file, Some(domain)) {
            Ok(memory) => memory_kind(name, &memory, Placement::PERSISTENT),
            Err(error) => drop(writeln!(stdout(), "{name:36}{error}")),
        }
    }
    std::fs::remove_file(&path)
}

fn main() {
    let Some(best) = cpu() else {
        let _ = writeln!(stdout(), "this processor has no way that is known here");
        return;
    };
    let layout = Layout::from_size_align(MEMORY, 1 << 21).expect("a layout");
    // SAFETY: the layout has a size. The memory is the program's until its end.
    let memory = unsafe { alloc_zeroed(layout) };
    assert!(!memory.is_null(), "no memory");
    for at in (0..MEMORY).step_by(4096) {
        // SAFETY: inside of the memory. Every page is touched, so that none is made while the clock runs.
        unsafe { memory.add(at).write_volatile(1) };
    }
    let timer = median(
        (0..ROUNDS)
            .map(|_| Instant::now().elapsed().as_nanos() as u64)
            .collect(),
    );
    let _ = writeln!(
        stdout(),
        "best: {best:?}; the timer takes {timer} ns of each figure\n"
    );

    let mut rows: Vec<(String, Way, Cpu, usize)> = vec![("cache".into(), cached, best, 0)];
    for way in [WriteBack::Clwb, WriteBack::ClflushOpt, WriteBack::Clflush] {
        if way >= best.write_back {
            let cpu = Cpu {
                write_back: way,
                ..best
            };
            rows.push((format!("cache, {way:?}"), cached_and_back, cpu, 0));
        }
    }
    for way in [Stream::Sse2, Stream::Avx512] {
        if way >= best.stream {
            let cpu = Cpu { stream: way, ..best };
            rows.push((format!("past the cache, {way:?}"), past, cpu, 0));
            rows.push((format!("past the cache, {way:?}, 24 B off"), past, cpu, 24));
            rows.push((format!("as the library, {way:?}"), placed, cpu, 0));
            rows.push((
                format!("as the library, {way:?}, 4 KiB each"),
                placed_in_packets,
                cpu,
                0,
            ));
        }
    }
    let _ = write!(stdout(), "{:36}", "ns");
    for size in SIZES {
        let _ = write!(stdout(), "{size:>16}");
    }
    let _ = writeln!(stdout());
    for (name, way, cpu, shift) in rows {
        let _ = write!(stdout(), "{name:36}");
        for size in SIZES {
            let (fenced, out) = measure(way, cpu, memory, size, shift);
            let _ = write!(stdout(), "{:>16}", format!("{fenced} / {out}"));
        }
        let _ = writeln!(stdout());
    }
    if let Err(error) = memory_kinds() {
        let _ = writeln!(stdout(), "no file in memory: {error}");
    }
}
