//! Moves memory beside threads, forks and system calls that use it.

use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::thread;

use rdmux_rnic::{Memory, Sharing};

use super::*;
use crate::ApplicationMemory;
use crate::skip::skip;

/// Makes private memory whose bytes tell their places.
fn pattern(pages: usize) -> Mapping {
    let memory = Mapping::anonymous(pages * 4096).unwrap();
    let bytes: Vec<u8> = (0..memory.len()).map(byte).collect();
    memory.write(0, &bytes).unwrap();
    memory
}

fn byte(i: usize) -> u8 {
    (i / 4096 * 7 + i % 251 + 1) as u8
}

fn has_pattern(memory: &Mapping) -> bool {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes.iter().enumerate().all(|(i, seen)| *seen == byte(i))
}

fn register(memory: &Mapping, offset: u64, len: u64) -> ApplicationMemory {
    // SAFETY: memory of this test's, to which there are no references.
    unsafe { ApplicationMemory::new(memory.address() + offset, len) }
}

/// Returns the error, or `None` once all pages are shared.
fn share(memory: &ApplicationMemory) -> Option<NotShared> {
    share_of(1, memory)
}

/// As [`share`], for a device that has so many memories of these bytes.
fn share_of(memories: usize, memory: &ApplicationMemory) -> Option<NotShared> {
    loop {
        match memory.share_some(memories) {
            Ok(Progress::Done) => return None,
            Ok(_) => {}
            Err(reason) => return Some(reason),
        }
    }
}

/// Runs a test as a process of its own: the other tests of this binary have threads and descriptors that would decide for it. Returns
/// false in the process that is to carry it out.
fn in_own_process(test: &str, mode: &str) -> bool {
    if std::env::var_os("RDMUX_TEST_CONVERT").is_some() {
        return false;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            &format!("convert::tests::{test}"),
            "--exact",
            "--nocapture",
            "--test-threads=1",
        ])
        .envs([("RDMUX_CONVERT", mode), ("RDMUX_TEST_CONVERT", "1")])
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    if text.contains("no userfaultfd") {
        skip("the system refuses userfaultfd(2)");
    }
    true
}

/// Returns whether this process can convert memory at all.
fn can() -> bool {
    let can = Userfault::new(Catches::Threads).is_ok();
    if !can {
        println!("no userfaultfd");
    }
    can
}

fn mappings_of(memory: &Mapping) -> Vec<maps::Vma> {
    let range = memory.address()..memory.address() + memory.len() as u64;
    let all = maps::all().unwrap();
    all.into_iter()
        .filter(|vma| overlap(&vma.addresses, &range))
        .collect()
}

fn is_private(memory: &Mapping) -> bool {
    mappings_of(memory)
        .iter()
        .all(|vma| vma.rights == *b"rw-p" && vma.file == FileId::NONE)
}

#[test]
fn share_some__whole_pages_move_and_move_back() {
    if in_own_process("share_some__whole_pages_move_and_move_back", "user-mode") || !can() {
        return;
    }
    let memory = pattern(1500);
    // Neither end is at a page.
    let region = register(&memory, 100, 1400 * 4096);
    assert_eq!(region.sharing(), Some(Sharing::NotYet));
    assert_eq!(share(&region), None);
    assert_eq!(region.sharing(), Some(Sharing::Shared));
    assert!(has_pattern(&memory));
    let shared = region.shared_pages().unwrap();
    let first = memory.address() + 4096;
    assert_eq!(*shared.addresses, first..memory.address() + 1400 * 4096);
    let peers = Mapping::of_sealed_file(shared.file, 0, 1399 * 4096, true).unwrap();
    peers.write(5, b"a peer").unwrap();
    let mut seen = [0; 6];
    memory.read(4096 + 5, &mut seen).unwrap();
    assert_eq!(&seen, b"a peer");
    // Over the edge of the whole pages, and inside.
    for offset in [4096 - 100 - 3, 4096 * 7] {
        region.write(offset, b"the device").unwrap();
        let (mut one, mut other) = ([0; 10], [0; 10]);
        memory.read(100 + offset, &mut one).unwrap();
        region.read(offset, &mut other).unwrap();
        assert_eq!((&one, &other), (b"the device", b"the device"));
        let before: Vec<u8> = (0..10).map(|i| byte((100 + offset) as usize + i)).collect();
        memory.write(100 + offset, &before).unwrap();
    }
    memory
        .write(4096 + 5, &(0..6).map(|i| byte(4096 + 5 + i)).collect::<Vec<u8>>())
        .unwrap();
    drop(region);
    assert!(is_private(&memory), "{:?}", mappings_of(&memory));
    assert!(has_pattern(&memory));
    peers.write(0, b"nobody sees it").unwrap();
    assert!(has_pattern(&memory));
}

#[test]
fn register__other_memory_in_the_place_of_some_that_moved() {
    if in_own_process(
        "register__other_memory_in_the_place_of_some_that_moved",
        "user-mode",
    ) || !can()
    {
        return;
    }
    let memory = pattern(4);
    let region = register(&memory, 0, memory.len() as u64);
    assert_eq!(share(&region), None);
    let again = register(&memory, 0, memory.len() as u64);
    assert_eq!(again.sharing(), Some(Sharing::Shared));
    // SAFETY: memory of this test's, to which there are no references.
    unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let place = pointer(memory.address());
        rustix::mm::mmap_anonymous(place, memory.len(), rights, flags).unwrap();
    }
    let other = register(&memory, 0, memory.len() as u64);
    assert_eq!(other.sharing(), Some(Sharing::NotYet));
    other.write(5, b"a peer").unwrap();
    let mut seen = [0; 6];
    memory.read(5, &mut seen).unwrap();
    assert_eq!(&seen, b"a peer");
    // Two regions of different bytes have the pages now.
    assert_eq!(share(&other), Some(NotShared::Overlaps));
    drop((region, again));
    let last = register(&memory, 0, memory.len() as u64);
    assert_eq!(share_of(2, &last), None);
    assert_eq!(other.sharing(), Some(Sharing::Shared));
    memory.read(5, &mut seen).unwrap();
    assert_eq!(&seen, b"a peer");
}

#[test]
fn register__by_a_child_is_its_own() {
    if in_own_process("register__by_a_child_is_its_own", "user-mode") || !can() {
        return;
    }
    let memory = pattern(4);
    let region = register(&memory, 0, memory.len() as u64);
    assert_eq!(share(&region), None);
    // SAFETY: the child calls nothing that a thread of the parent may have locked.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let own = register(&memory, 0, memory.len() as u64);
        let is_new = own.sharing() == Some(Sharing::NotYet) && own.write(0, b"a child").is_ok();
        let mut seen = [0; 7];
        let is_own = memory.read(0, &mut seen).is_ok() && &seen == b"a child";
        // SAFETY: ends the child.
        unsafe { libc::_exit(if is_new && is_own { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a child of this test's.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert!(has_pattern(&memory));
}

#[test]
fn share_some__regions_of_the_same_bytes_move_together() {
    if in_own_process("share_some__regions_of_the_same_bytes_move_together", "user-mode") || !can() {
        return;
    }
    let memory = pattern(16);
    let (one, other) = (register(&memory, 0, 16 * 4096), register(&memory, 0, 16 * 4096));
    let inside = register(&memory, 4096, 4096);
    assert!(one.is_same(&other) && !one.is_same(&inside));
    // A device that has one of two.
    assert_eq!(one.share_some(1), Ok(Progress::Elsewhere));
    assert_eq!(one.sharing(), Some(Sharing::NotYet));
    drop(inside);
    assert_eq!(one.share_some(2), Ok(Progress::Done));
    assert_eq!(other.sharing(), Some(Sharing::Shared));
    assert_eq!(other.share_some(1), Ok(Progress::Done));
    let (ours, theirs) = (one.shared_pages().unwrap(), other.shared_pages().unwrap());
    assert_eq!(ours.file.as_raw_fd(), theirs.file.as_raw_fd());
    drop(one);
    assert!(!is_private(&memory), "the other region has the pages");
    // One that comes later finds them.
    let later = register(&memory, 0, 16 * 4096);
    assert_eq!(later.sharing(), Some(Sharing::Shared));
    drop(other);
    assert!(!is_private(&memory));
    drop(later);
    assert!(is_private(&memory) && has_pattern(&memory));
}

#[test]
fn share_some__zeros_stay_without_memory() {
    if in_own_process("share_some__zeros_stay_without_memory", "user-mode") || !can() {
        return;
    }
    let memory = Mapping::anonymous(64 << 20).unwrap();
    memory.write(32 << 20, b"one page").unwrap();
    let region = register(&memory, 0, 64 << 20);
    assert_eq!(share(&region), None);
    let blocks = rustix::fs::fstat(region.shared_pages().unwrap().file)
        .unwrap()
        .st_blocks;
    assert_eq!(blocks * 512, 4096);
    let mut seen = [0; 8];
    memory.read(32 << 20, &mut seen).unwrap();
    assert_eq!(&seen, b"one page");
}

#[test]
fn share_some__refused_memory() {
    if in_own_process("share_some__refused_memory", "user-mode") || !can() {
        return;
    }
    let memory = pattern(16);
    assert_eq!(share(&register(&memory, 1, 4096)), Some(NotShared::NoWholePage));
    assert_eq!(
        share(&register(&memory, 0, 17 * 4096)),
        Some(NotShared::NotPrivate)
    );
    let shared = AnonymousFile::new();
    assert_eq!(share(&register(&shared.0, 0, 4096)), Some(NotShared::NotPrivate));
    let (one, other) = (register(&memory, 0, 8192), register(&memory, 4096 + 9, 8));
    assert_eq!(share(&one), Some(NotShared::Overlaps));
    assert_eq!(one.sharing(), Some(Sharing::Refused(NotShared::Overlaps)));
    drop((one, other));
    // SAFETY: changes no byte.
    unsafe { rustix::mm::mlock(pointer(memory.address()), 4096) }.unwrap();
    assert_eq!(share(&register(&memory, 0, 16 * 4096)), Some(NotShared::Special));
    assert!(is_private(&memory) && has_pattern(&memory));
}

struct AnonymousFile(Mapping);

impl AnonymousFile {
    fn new() -> AnonymousFile {
        let file = sealed_file("rdmux-test", 4096).unwrap();
        AnonymousFile(Mapping::of_file(&file, 0, 4096, true).unwrap())
    }
}

#[test]
fn share_some__off() {
    if in_own_process("share_some__off", "off") {
        return;
    }
    let memory = pattern(4);
    assert_eq!(share(&register(&memory, 0, 16384)), Some(NotShared::Off));
    assert!(is_private(&memory));
}

/// A region that has pages of another one keeps them in the file.
#[test]
fn give_back__pages_of_two_regions() {
    if in_own_process("give_back__pages_of_two_regions", "user-mode") || !can() {
        return;
    }
    let memory = pattern(8);
    let first = register(&memory, 0, 8 * 4096);
    assert_eq!(share(&first), None);
    let second = register(&memory, 4096, 4096);
    first.give_back();
    assert!(!is_private(&memory));
    second.write(0, b"x").unwrap();
    second.write(0, &[byte(4096)]).unwrap();
    second.give_back();
    assert!(is_private(&memory) && has_pattern(&memory));
}

/// Memory for large pages, as UCX has it for its messages: it keeps the advice in the file and after it.
#[test]
fn share_some__memory_with_advice() {
    if in_own_process("share_some__memory_with_advice", "user-mode") || !can() {
        return;
    }
    let given = [
        ("hg", Advice::LinuxHugepage),
        ("nh", Advice::LinuxNoHugepage),
        ("dd", Advice::LinuxDontDump),
    ];
    for (flag, advice) in given {
        let memory = pattern(1100);
        // SAFETY: changes no byte.
        let advised = unsafe { madvise(pointer(memory.address()), memory.len(), advice) };
        if advised.is_err() {
            // A kernel without large pages.
            continue;
        }
        let range = memory.address()..memory.address() + memory.len() as u64;
        let has_advice = || {
            let (vmas, _) = maps::described(&range).unwrap();
            vmas.iter().all(|vma| vma.flags.iter().any(|has| has == flag))
        };
        let region = register(&memory, 0, memory.len() as u64);
        assert_eq!(share(&region), None, "{flag}");
        assert!(
            !is_private(&memory) && has_pattern(&memory) && has_advice(),
            "{flag}"
        );
        drop(region);
        assert!(
            is_private(&memory) && has_pattern(&memory) && has_advice(),
            "{flag}"
        );
    }
}

/// What the program does with the addresses while the pages are in the file.
#[test]
fn give_back__after_calls_of_the_program() {
    if in_own_process("give_back__after_calls_of_the_program", "user-mode") || !can() {
        return;
    }
    let memory = pattern(12);
    let region = register(&memory, 0, 12 * 4096);
    assert_eq!(share(&region), None);
    let at = |page: u64| pointer(memory.address() + page * 4096);
    // SAFETY: pages of this test's, to which there are no references.
    unsafe {
        mprotect(at(1), 4096, MprotectFlags::READ).unwrap();
        madvise(at(2), 4096, Advice::LinuxDontFork).unwrap();
        // Removed, and replaced.
        mmap_private(at(4), 4096);
        mmap_private(at(5), 4096);
        rustix::mm::munmap(at(5), 4096).unwrap();
    }
    // Moved elsewhere.
    let elsewhere = Mapping::anonymous(4096).unwrap();
    // SAFETY: as above, and a page of this test's.
    unsafe {
        mremap_fixed(
            at(7),
            4096,
            4096,
            MremapFlags::MAYMOVE,
            pointer(elsewhere.address()),
        )
    }
    .unwrap();
    // Moved and enlarged.
    let larger = Mapping::anonymous(8 * 4096).unwrap();
    let flags = MremapFlags::MAYMOVE;
    // SAFETY: as above.
    unsafe { mremap_fixed(at(10), 8192, 8 * 4096, flags, pointer(larger.address())) }.unwrap();
    larger.write(7 * 4096, &[9]).unwrap();
    region.give_back();
    let vmas = mappings_of(&memory);
    let of = |page: u64| vmas.iter().find(|vma| vma.addresses.contains(&(at(page) as u64)));
    assert_eq!(of(1).map(|vma| vma.rights), Some(*b"r--p"));
    assert_eq!(of(4).map(|vma| vma.rights), Some(*b"rw-p"));
    assert_eq!((of(5), of(7)), (None, None));
    assert!(vmas.iter().all(|vma| vma.file == FileId::NONE), "{vmas:?}");
    let mut seen = vec![0; 4096];
    elsewhere.read(0, &mut seen).unwrap();
    assert!(
        seen.iter()
            .enumerate()
            .all(|(i, seen)| *seen == byte(7 * 4096 + i))
    );
    let mut all = vec![0; 8 * 4096];
    larger.read(0, &mut all).unwrap();
    let expected = |i: usize| match i {
        0..8192 => byte(10 * 4096 + i),
        28672 => 9,
        _ => 0,
    };
    assert!(all.iter().enumerate().all(|(i, seen)| *seen == expected(i)));
    assert!(is_private(&larger) && is_private(&elsewhere));
    // Private, as an allocator relies on.
    // SAFETY: as above.
    unsafe { madvise(at(8), 4096, Advice::LinuxDontNeed) }.unwrap();
    memory.read(8 * 4096, &mut seen).unwrap();
    assert!(seen.iter().all(|byte| *byte == 0));
    memory.read(4 * 4096, &mut seen).unwrap();
    assert!(seen.iter().all(|byte| *byte == 0));
}

/// # Safety
/// As for `MAP_FIXED`.
unsafe fn mmap_private(at: *mut std::ffi::c_void, len: usize) {
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: as the caller says.
    unsafe { rustix::mm::mmap_anonymous(at, len, rights, MapFlags::PRIVATE | MapFlags::FIXED) }.unwrap();
}

/// Threads that increment words while their pages move there and back lose none.
#[test]
fn share_some__beside_threads() {
    if in_own_process("share_some__beside_threads", "user-mode") || !can() {
        return;
    }
    const PAGES: usize = 64;
    const ROUNDS: usize = 300;
    let memory = Mapping::anonymous(PAGES * 4096).unwrap();
    let stop = AtomicBool::new(false);
    let counts: Vec<u64> = thread::scope(|threads| {
        let add = |seed: u64| {
            let (memory, stop) = (&memory, &stop);
            move || {
                let (mut x, mut n) = (seed * 7919 + 1, 0);
                while !stop.load(Ordering::Relaxed) {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    let word = x as usize % (PAGES * 1024) * 4;
                    memory.word(word).fetch_add(1, Ordering::Relaxed);
                    n += 1;
                }
                n
            }
        };
        let adding: Vec<_> = (1..4).map(|seed| threads.spawn(add(seed))).collect();
        for _ in 0..ROUNDS {
            let region = register(&memory, 0, (PAGES * 4096) as u64);
            assert_eq!(share(&region), None);
            assert!(!is_private(&memory));
            drop(region);
            assert!(is_private(&memory));
        }
        stop.store(true, Ordering::Relaxed);
        adding.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let sum: u64 = (0..PAGES * 1024)
        .map(|i| u64::from(memory.word(i * 4).load(Ordering::Relaxed)))
        .sum();
    assert_eq!(sum, counts.iter().sum::<u64>());
    assert!(sum > 100_000, "{sum}");
}

/// A thread's system calls on the pages do not fail, or the pages do not move.
#[test]
fn share_some__beside_system_calls() {
    if in_own_process("share_some__beside_system_calls", "on") || !can() {
        return;
    }
    let permitted = Userfault::new(Catches::All).is_ok();
    let memory = pattern(256);
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let stop = AtomicBool::new(false);
    thread::scope(|threads| {
        let reading = threads.spawn(|| {
            let mut pages = (0..256).cycle();
            while !stop.load(Ordering::Relaxed) {
                let at = pointer(memory.address() + pages.next().unwrap() * 4096);
                // SAFETY: pages of this test's, to which there are no references.
                let read = unsafe { libc::pread(file.as_raw_fd(), at.cast(), 4096, 0) };
                assert_eq!(read, 4096, "{}", std::io::Error::last_os_error());
            }
        });
        for _ in 0..100 {
            let region = register(&memory, 0, 256 * 4096);
            assert_eq!(share(&region), (!permitted).then_some(NotShared::Threads));
        }
        stop.store(true, Ordering::Relaxed);
        reading.join().unwrap();
    });
}

/// A child has copies: neither process sees what the other writes.
#[test]
fn fork__child_has_copies() {
    if in_own_process("fork__child_has_copies", "user-mode") || !can() {
        return;
    }
    let memory = pattern(600);
    let region = register(&memory, 0, 600 * 4096);
    assert_eq!(share(&region), None);
    for round in 0..20 {
        // SAFETY: the child makes system calls and copies memory, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let own = is_private(&memory) && has_pattern(&memory);
            memory.write(0, &[0xee; 8192]).unwrap();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!own)) };
        }
        assert!(child > 0);
        memory.write(9, &[round; 8]).unwrap();
        memory.write(9, &(9..17).map(byte).collect::<Vec<u8>>()).unwrap();
        let mut status = 0;
        // SAFETY: waits for the child of this test.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "round {round}");
        assert!(has_pattern(&memory), "round {round}");
    }
    drop(region);
    assert!(is_private(&memory) && has_pattern(&memory));
}

/// Forks of one thread while another converts memory there and back.
#[test]
fn fork__while_pages_move() {
    if in_own_process("fork__while_pages_move", "user-mode") || !can() {
        return;
    }
    let memory = pattern(64);
    let stop = AtomicBool::new(false);
    thread::scope(|threads| {
        let converting = threads.spawn(|| {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                let region = register(&memory, 0, 64 * 4096);
                assert_eq!(share(&region), None);
                n += 1;
            }
            n
        });
        for round in 0..200 {
            // SAFETY: the child copies memory without allocating, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let mut bytes = [0; 4096];
                let right = (0..64).all(|page| {
                    memory.read(page * 4096, &mut bytes).unwrap();
                    bytes
                        .iter()
                        .enumerate()
                        .all(|(i, seen)| *seen == byte(page as usize * 4096 + i))
                });
                memory.write(0, &[0xee; 4096]).unwrap();
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(!right)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child of this test.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "round {round}");
        }
        stop.store(true, Ordering::Relaxed);
        assert!(converting.join().unwrap() > 10);
    });
    assert!(is_private(&memory) && has_pattern(&memory));
}
