//! Persistent memory, of which this host has none: a file in memory stands in for it, declared to survive. It is mapped and leased
//! in the same way. `lab/tests/dax` tests the real ones.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../skip.rs"]
mod skip;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_memory::{DaxError, DaxMemory, FileMemory, PersistenceDomain, Wanted};
use rdmux_rnic::{Atomic, Fault, Memory, Placement};
use skip::skip;

const PATIENCE: Duration = Duration::from_secs(60);

/// A file that is removed with the value.
struct Temporary(PathBuf);

impl Temporary {
    fn new(folder: &Path, name: &str) -> Temporary {
        Temporary(folder.join(format!("rdmux-dax-{name}-{}", std::process::id())))
    }

    fn open(&self, size: u64) -> Arc<FileMemory> {
        Arc::new(FileMemory::open(&self.0, Some(size), false).unwrap())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn in_memory(name: &str) -> Temporary {
    Temporary::new(Path::new("/dev/shm"), name)
}

fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    // A thread of the library changes whether a file is mapped, and notifies nobody: only looking again shows it.
    while !done() {
        assert!(Instant::now() < deadline, "waited for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Makes another process shorten or lengthen a file. That process must not have to wait for the system to take the lease away (45
/// s, unless that is set).
fn truncate(file: &Path, size: &str) {
    let start = Instant::now();
    // The shell's open waits for the lease; that of truncate would not.
    let script = r#"exec 3>>"$1" && truncate --size="$2" "$1""#;
    let output = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(file)
        .arg(size)
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(start.elapsed() < PATIENCE, "it waited {:?}", start.elapsed());
}

#[test]
fn map__a_file_whose_file_system_cannot_map_synchronously_is_refused() {
    // The folder of the build is on a disk. Without MAP_SYNC the mapping would succeed.
    let file = Temporary::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "disk");
    let memory = file.open(1 << 20);
    if memory.domain() == PersistenceDomain::None {
        return skip("the folder of the build is on a file system in memory");
    }
    for declared in [None, Some(PersistenceDomain::Adr)] {
        let refused = DaxMemory::map(memory.clone(), declared);
        assert!(matches!(refused, Err(DaxError::NotDax)), "{refused:?}");
    }
}

#[test]
fn map__says_why_not() {
    let file = in_memory("why");
    let memory = file.open(8192);
    let refused = DaxMemory::map(memory.clone(), None);
    assert!(matches!(refused, Err(DaxError::NotDax)), "{refused:?}");

    let other = File::open(&file.0).unwrap();
    let refused = DaxMemory::map(memory.clone(), Some(PersistenceDomain::Adr));
    assert!(matches!(refused, Err(DaxError::InUse)), "{refused:?}");
    drop(other);
    drop(memory);

    let read_only = Arc::new(FileMemory::open(&file.0, None, true).unwrap());
    let refused = DaxMemory::map(read_only, Some(PersistenceDomain::Adr));
    assert!(matches!(refused, Err(DaxError::ReadOnly)), "{refused:?}");

    let device = DaxMemory::device(Path::new("/dev/null"), None);
    assert!(device.unwrap_err().to_string().contains("not a DAX device"));
}

#[test]
fn dax_memory__keeps_what_is_written_inside_of_its_bounds() {
    for domain in [
        PersistenceDomain::Adr,
        PersistenceDomain::Eadr,
        PersistenceDomain::WholeSystem,
    ] {
        let file = in_memory("bounds");
        let memory = DaxMemory::map(file.open(10_000), Some(domain)).unwrap();
        assert_eq!((memory.len(), memory.domain()), (10_000, domain));
        assert!(memory.is_mapped());
        // The last page is mapped whole, but bytes beyond the length cannot be reached.
        memory.write(9_900, &[7; 100]).unwrap();
        assert_eq!(memory.write(9_901, &[7; 100]), Err(Fault::Unmapped));
        assert_eq!(memory.write(u64::MAX, &[7; 100]), Err(Fault::Unmapped));
        let mut bytes = [0; 100];
        memory.read(9_900, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 100]);
        assert_eq!(memory.read(9_901, &mut bytes), Err(Fault::Unmapped));

        assert_eq!(memory.atomic(8, Atomic::FetchAdd(3)), Ok(0));
        let swap = Atomic::CompareSwap { compare: 3, swap: 9 };
        assert_eq!(memory.atomic(8, swap), Ok(3));
        assert_eq!(memory.atomic(12, Atomic::FetchAdd(1)), Err(Fault::NotSupported));
        assert_eq!(memory.atomic(9_993, Atomic::FetchAdd(1)), Err(Fault::Unmapped));

        let all = Placement::GLOBAL | Placement::PERSISTENT;
        assert_eq!(memory.placement(), all);
        assert!(memory.flush_is_immediate(all));
        assert_eq!(memory.flush(0, 10_000, all), Ok(()));
        assert_eq!(memory.flush(1, 10_000, all), Err(Fault::Unmapped));
        drop(memory);
        let seen = fs::read(&file.0).unwrap();
        assert_eq!(seen[9_900..], [7; 100]);
        assert_eq!(seen[8..16], 9u64.to_ne_bytes());
    }
}

#[test]
fn dax_memory__domain_none_refuses_a_persistent_flush() {
    let file = in_memory("none");
    let memory = DaxMemory::map(file.open(4096), Some(PersistenceDomain::None)).unwrap();
    assert_eq!(memory.placement(), Placement::GLOBAL);
    assert_eq!(
        memory.flush(0, 4096, Placement::PERSISTENT),
        Err(Fault::NotSupported)
    );
}

#[test]
fn dax_memory__truncated_by_another_process() {
    let file = in_memory("truncated");
    let memory = DaxMemory::map(file.open(1 << 20), Some(PersistenceDomain::Adr)).unwrap();
    memory.write(0, &[1; 4096]).unwrap();
    truncate(&file.0, "4096");
    // A mapping would raise a signal here, and end this process.
    assert_eq!(memory.write(8192, &[1; 100]), Err(Fault::Unmapped));
    assert_eq!(memory.read(8192, &mut [0; 100]), Err(Fault::Unmapped));
    assert_eq!(memory.atomic(8192, Atomic::FetchAdd(1)), Err(Fault::Unmapped));
    assert_eq!(
        memory.flush(0, 1 << 20, Placement::PERSISTENT),
        Err(Fault::Unmapped)
    );
    // After it has grown again the file is not what it was. The test needs time to pass, in which the lease is asked for again,
    // twice.
    truncate(&file.0, "1M");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(memory.write(8192, &[1; 100]), Err(Fault::Unmapped));
    assert!(!memory.is_mapped());
}

#[test]
fn dax_memory__while_another_process_has_the_file_the_kernel_copies() {
    let file = in_memory("shared");
    let memory = DaxMemory::map(file.open(65536), Some(PersistenceDomain::Adr)).unwrap();
    memory.write(100, &[1; 5000]).unwrap();
    let other = File::open(&file.0).unwrap();
    assert!(!memory.is_mapped());
    let mut bytes = [0; 5000];
    memory.read(100, &mut bytes).unwrap();
    assert_eq!(bytes, [1; 5000], "what was written before is there");
    memory.write(100, &[2; 5000]).unwrap();
    assert_eq!(memory.atomic(8, Atomic::FetchAdd(5)), Ok(0));
    assert!(!memory.flush_is_immediate(Placement::PERSISTENT));
    drop(other);

    wait_until("the mapping to be used again", || memory.is_mapped());
    assert_eq!(memory.atomic(8, Atomic::FetchAdd(1)), Ok(5));
    // The kernel flushes what was written through it, once.
    assert!(!memory.flush_is_immediate(Placement::PERSISTENT));
    assert_eq!(memory.flush(0, 65536, Placement::PERSISTENT), Ok(()));
    assert!(memory.flush_is_immediate(Placement::PERSISTENT));
    memory.read(100, &mut bytes).unwrap();
    assert_eq!(bytes, [2; 5000]);
}

#[test]
fn dax_memory__a_read_behind_what_the_kernel_wrote_brings_it_to_the_medium() {
    let file = in_memory("read-behind");
    let memory = DaxMemory::map(file.open(65536), Some(PersistenceDomain::Adr)).unwrap();
    let other = File::open(&file.0).unwrap();
    assert!(!memory.is_mapped());
    memory.write(100, &[2; 5000]).unwrap();
    drop(other);
    wait_until("the mapping to be used again", || memory.is_mapped());
    assert!(!memory.flush_is_immediate(Placement::PERSISTENT));
    memory.read(100, &mut [0; 8]).unwrap();
    assert!(memory.flush_is_immediate(Placement::PERSISTENT));
}

#[test]
fn dax_memory__who_watches_is_told_first_and_lets_go() {
    let file = in_memory("watched");
    let memory = DaxMemory::map(file.open(65536), Some(PersistenceDomain::Adr)).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let watch = memory.watch(move |wanted| tell.send(wanted).unwrap()).unwrap();
    assert!(watch.is_alone());
    let path = file.0.clone();
    let opener = std::thread::spawn(move || File::options().write(true).open(path).unwrap());
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Wanted::Write));
    assert!(!memory.is_mapped() && !watch.is_alone());
    // The test needs time to pass, in which the lease would be taken again, or given up.
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!opener.is_finished(), "who watches has not let go");
    memory.write(0, &[3; 100]).unwrap();
    watch.let_go();
    let other = opener.join().unwrap();
    assert!(!watch.is_alone());
    memory.write(100, &[4; 100]).unwrap();
    drop(other);
    assert_eq!(told.recv_timeout(PATIENCE), Ok(Wanted::Nothing));
    assert!(memory.is_mapped() && watch.is_alone());

    // Without a watch the lease is given up at once.
    drop(watch);
    drop(File::open(&file.0).unwrap());
    assert!(!memory.is_mapped());
}

/// The signal of a break ends the process if it goes to another thread than the one that waits for it.
#[test]
fn watch__taken_again_is_still_told_of_by_its_own_thread() {
    const CHILD: &str = "RDMUX_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let name = "watch__taken_again_is_still_told_of_by_its_own_thread";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let output = child
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let file = in_memory("again");
    let memory = file.open(65536);
    let (tell, told) = std::sync::mpsc::channel();
    let watch = memory.watch(move |wanted| tell.send(wanted).unwrap()).unwrap();
    for _ in 0..3 {
        let path = file.0.clone();
        let opener = std::thread::spawn(move || File::options().write(true).open(path).unwrap());
        assert_eq!(told.recv_timeout(PATIENCE), Ok(Wanted::Write));
        assert!(!watch.is_alone());
        watch.let_go();
        drop(opener.join().unwrap());
        wait_until("the watch to go on", || watch.is_alone());
        assert_eq!(told.recv_timeout(PATIENCE), Ok(Wanted::Nothing));
    }
}

#[test]
fn dax_memory__random_accesses_while_others_come_and_go() {
    let seed = std::env::var("RDMUX_SEED").map_or(7, |seed| seed.parse().unwrap());
    println!("seed {seed} (RDMUX_SEED)");
    let mut state: u64 = seed;
    let mut random = |below: u64| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    const LEN: u64 = 20_000;
    let file = in_memory("random");
    let memory = DaxMemory::map(file.open(LEN), Some(PersistenceDomain::Adr)).unwrap();
    let mut model = vec![0u8; LEN as usize];
    let mut others = Vec::new();
    for round in 0..20_000 {
        let at = random(LEN);
        let len = random(1500).min(LEN - at) as usize;
        let range = at as usize..at as usize + len;
        match random(if round % 100 == 0 { 6 } else { 4 }) {
            0 | 1 => {
                let bytes: Vec<u8> = (0..len).map(|_| random(256) as u8).collect();
                memory.write(at, &bytes).unwrap();
                model[range].copy_from_slice(&bytes);
            }
            2 => {
                let mut bytes = vec![0; len];
                memory.read(at, &mut bytes).unwrap();
                assert_eq!(bytes, model[range], "round {round}: {at}+{len}");
            }
            3 => {
                let at = at.min(LEN - 8) & !7;
                let word = &mut model[at as usize..at as usize + 8];
                let before = u64::from_ne_bytes((&*word).try_into().unwrap());
                assert_eq!(memory.atomic(at, Atomic::FetchAdd(round)), Ok(before));
                word.copy_from_slice(&before.wrapping_add(round).to_ne_bytes());
                memory.flush(at, 8, Placement::PERSISTENT).unwrap();
            }
            4 => others.push(
                File::options()
                    .read(true)
                    .write(random(2) == 0)
                    .open(&file.0)
                    .unwrap(),
            ),
            _ => others.clear(),
        }
    }
    drop(memory);
    assert_eq!(fs::read(&file.0).unwrap(), model);
}
