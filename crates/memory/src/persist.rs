//! Brings bytes out of the processor's caches: with stores that bypass the caches, and with write-backs of cache lines. Both exist
//! here for x86-64 alone; elsewhere there is no [`Cpu`].
//!
//! Few bytes are placed in the cache and written back. Of more bytes, whole lines bypass the caches (`docs/persistence.md` has the
//! figures), all but the last line, since a reader must see its last word last. In neither case are the bytes in the persistence
//! domain before the next [`fence`]. Passing on a lock drains these stores as well, since that is a locked instruction: the fence
//! of the next holder covers what the previous one placed.
#![allow(unsafe_code, reason = "instructions on mapped memory")]

use std::ptr::copy_nonoverlapping;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Most bytes that go through the cache: for so few, the fence between the other lines and the last costs more than bypassing
/// saves.
const CACHED_MAX: usize = 1024;

/// Instruction that writes a line back, the best first. Only the last is on every x86-64, and it waits for each line.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "only `detect` makes them")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WriteBack {
    /// Keeps the line in the cache.
    Clwb,
    /// Evicts it.
    ClflushOpt,
    /// Evicts it, one line after the other.
    Clflush,
}

/// Stores that bypass the caches.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "only `detect` makes them")
)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stream {
    /// 64 bytes at once.
    Avx512,
    /// 16 bytes at once.
    Sse2,
}

/// Abilities of this processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cpu {
    pub(crate) write_back: WriteBack,
    pub(crate) stream: Stream,
}

/// Returns the abilities of this processor, if it can bring bytes out of its caches.
pub(crate) fn cpu() -> Option<Cpu> {
    static CPU: OnceLock<Option<Cpu>> = OnceLock::new();
    *CPU.get_or_init(detect)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Option<Cpu> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Leaf 7 exists where leaf 0 says so. Its EBX has clflushopt at 23 and clwb at 24; leaf 1 has clflush at EDX 19.
    let leaf7 = if __cpuid(0).eax >= 7 {
        __cpuid_count(7, 0).ebx
    } else {
        0
    };
    let write_back = match (leaf7 >> 24 & 1, leaf7 >> 23 & 1, __cpuid(1).edx >> 19 & 1) {
        (1, _, _) => WriteBack::Clwb,
        (_, 1, _) => WriteBack::ClflushOpt,
        (_, _, 1) => WriteBack::Clflush,
        _ => return None,
    };
    let stream = if is_x86_feature_detected!("avx512f") {
        Stream::Avx512
    } else {
        Stream::Sse2
    };
    Some(Cpu { write_back, stream })
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Option<Cpu> {
    None
}

/// Ensures that bytes placed or written back before are in the persistence domain of memory (ADR) when later operations are done.
#[inline]
pub(crate) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` is on every x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
}

/// Places bytes in ascending order, the last word with release semantics, so that they are out of the caches after the next
/// [`fence`].
///
/// # Safety
/// Both ranges are inside of mappings or references that live meanwhile, and do not overlap; the processor has the abilities in
/// `cpu`.
pub(crate) unsafe fn place(cpu: Cpu, from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller says.
    unsafe {
        if len <= CACHED_MAX {
            place_cached(from, to, len);
            write_back(cpu, to, len);
        } else {
            place_past(cpu, from, to, len);
        }
    }
}

/// Places bytes; the lines between the first and the last one bypass the caches.
///
/// # Safety
/// As for [`place`]; the range has at least two lines' bytes.
pub(crate) unsafe fn place_past(cpu: Cpu, from: *const u8, to: *mut u8, len: usize) {
    debug_assert!(len >= 2 * LINE);
    // Up to the first whole line.
    let head = to.addr().next_multiple_of(LINE) - to.addr();
    // Ordinary stores write the line of the last byte: it has the word that tells a reader that all bytes are there.
    let last = (to.addr() + len - 1) & !(LINE - 1);
    let body = last - (to.addr() + head);
    // SAFETY: `head + body` is less than `len`, so all ranges are inside of what the caller says; each line that is written back
    // holds a byte of the range.
    unsafe {
        copy_nonoverlapping(from, to, head);
        write_back(cpu, to, head);
        stream(cpu, from.add(head), to.add(head), body);
        // The reader must see the other lines before the last word.
        fence();
        place_cached(from.add(head + body), to.add(head + body), len - head - body);
        write_back(cpu, to.add(head + body), len - head - body);
    }
}

/// Copies into the cache, the last word with release semantics, in one piece where it is aligned.
///
/// # Safety
/// As for [`place`].
#[inline]
pub(crate) unsafe fn place_cached(from: *const u8, to: *mut u8, len: usize) {
    // Programs poll words, and this spares them two calls that copy few bytes.
    if len == 8 && to.addr().is_multiple_of(8) {
        // SAFETY: eight bytes of the source.
        let word = unsafe { from.cast::<u64>().read_unaligned() };
        // SAFETY: eight bytes of the range, aligned.
        return unsafe { AtomicU64::from_ptr(to.cast()) }.store(word, Ordering::Release);
    }
    let tail = len - len.min(8);
    // SAFETY: both ranges are as the caller says, and `tail` is at most `len`.
    let (last, to_last) = unsafe {
        copy_nonoverlapping(from, to, tail);
        (from.add(tail), to.add(tail))
    };
    let mut word = [0u8; 8];
    // SAFETY: `len - tail` is at most 8.
    unsafe { copy_nonoverlapping(last, word.as_mut_ptr(), len - tail) };
    if len - tail == 8 && to_last.addr().is_multiple_of(8) {
        // SAFETY: eight bytes of the range, aligned.
        unsafe { AtomicU64::from_ptr(to_last.cast()) }.store(u64::from_ne_bytes(word), Ordering::Release);
    } else {
        for (i, byte) in word[..len - tail].iter().enumerate() {
            // SAFETY: inside of the range: `i` is less than `len - tail`.
            unsafe { AtomicU8::from_ptr(to_last.add(i)) }.store(*byte, Ordering::Release);
        }
    }
}

/// Writes back every line that has a byte of the range. The bytes are in the persistence domain after the next [`fence`].
///
/// # Safety
/// The range is inside of a mapping that lives meanwhile, and the processor has the abilities in `cpu`.
pub(crate) unsafe fn write_back(cpu: Cpu, at: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    let start = at.addr() & !(LINE - 1);
    for line in (start..at.addr() + len).step_by(LINE) {
        let line = at.with_addr(line);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the line has a byte of the range, and pages hold whole lines; the processor has the instruction, as the caller
        // says. It changes no byte.
        unsafe {
            use std::arch::asm;
            match cpu.write_back {
                WriteBack::Clwb => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
                WriteBack::ClflushOpt => {
                    asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
                }
                WriteBack::Clflush => asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)),
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (cpu, line);
    }
}

/// Places whole lines with stores that bypass the caches.
///
/// # Safety
/// As for [`place`]; `to` is at the start of a line, and `len` a multiple of its bytes.
unsafe fn stream(cpu: Cpu, from: *const u8, to: *mut u8, len: usize) {
    debug_assert!(to.addr().is_multiple_of(LINE) && len.is_multiple_of(LINE));
    #[cfg(target_arch = "x86_64")]
    match cpu.stream {
        // SAFETY: as the caller says, and `detect` found the instructions.
        Stream::Avx512 => unsafe { stream_avx512(from, to, len) },
        // SAFETY: as the caller says; SSE2 is on every x86-64.
        Stream::Sse2 => unsafe { stream_sse2(from, to, len) },
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = cpu;
        // SAFETY: as the caller says.
        unsafe { copy_nonoverlapping(from, to, len) };
    }
}

/// # Safety
/// As for [`stream`].
#[cfg(target_arch = "x86_64")]
unsafe fn stream_sse2(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm_loadu_si128, _mm_stream_si128};
    for at in (0..len).step_by(LINE) {
        // SAFETY: 64 bytes from `at` are in both ranges; the destination is aligned to 16.
        unsafe {
            let (from, to) = (from.add(at).cast(), to.add(at).cast());
            let line = [
                _mm_loadu_si128(from),
                _mm_loadu_si128(from.add(1)),
                _mm_loadu_si128(from.add(2)),
                _mm_loadu_si128(from.add(3)),
            ];
            _mm_stream_si128(to, line[0]);
            _mm_stream_si128(to.add(1), line[1]);
            _mm_stream_si128(to.add(2), line[2]);
            _mm_stream_si128(to.add(3), line[3]);
        }
    }
}

/// # Safety
/// As for [`stream`]; the processor has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream_avx512(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    for at in (0..len).step_by(LINE) {
        // SAFETY: 64 bytes from `at` are in both ranges; the destination is aligned to 64.
        unsafe { _mm512_stream_si512(to.add(at).cast(), _mm512_loadu_si512(from.add(at).cast())) };
    }
}
