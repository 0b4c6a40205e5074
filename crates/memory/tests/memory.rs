//! Memory kinds: bytes, faults and flushes of a file on a disk, a file on tmpfs and anonymous pages.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../skip.rs"]
mod skip;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rdmux_memory::{AnonymousMemory, FileMemory, PersistenceDomain, shared_file};
use rdmux_rnic::{Fault, Memory, Placement};
use skip::skip;

/// A folder that is removed with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(below: &Path, name: &str) -> Folder {
        let path = below.join(format!("rdmux-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn on_disk(name: &str) -> Folder {
    Folder::new(&std::env::temp_dir(), name)
}

#[test]
fn file_memory__keeps_what_is_written_inside_of_its_bounds() {
    let folder = on_disk("bounds");
    let path = folder.0.join("f");
    let memory = FileMemory::open(&path, Some(10_000), false).unwrap();
    assert_eq!(memory.len(), 10_000);
    memory.write(9_990, &[7; 10]).unwrap();
    assert_eq!(memory.write(9_991, &[7; 10]), Err(Fault::Unmapped));
    assert_eq!(memory.write(u64::MAX, &[7; 10]), Err(Fault::Unmapped));
    let mut bytes = [0; 10];
    memory.read(9_990, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 10]);
    assert_eq!(memory.read(9_991, &mut bytes), Err(Fault::Unmapped));
    assert_eq!(fs::read(&path).unwrap()[9_990..], [7; 10]);
}

#[test]
fn file_memory__allocates_every_block_when_it_is_opened() {
    use std::os::unix::fs::MetadataExt;
    let folder = on_disk("blocks");
    let path = folder.0.join("f");
    FileMemory::open(&path, Some(3 << 20), false).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(meta.len(), 3 << 20);
    assert!(meta.blocks() * 512 >= 3 << 20, "{} blocks", meta.blocks());
}

#[test]
fn file_memory__grows_a_file_and_never_shortens_it() {
    let folder = on_disk("grow");
    let path = folder.0.join("f");
    fs::write(&path, b"hello").unwrap();
    assert_eq!(FileMemory::open(&path, Some(3), false).unwrap().len(), 5);
    assert_eq!(FileMemory::open(&path, Some(4096), false).unwrap().len(), 4096);
    assert_eq!(&fs::read(&path).unwrap()[..5], b"hello");
}

#[test]
fn file_memory__read_only_takes_no_writes() {
    let folder = on_disk("ro");
    let path = folder.0.join("f");
    fs::write(&path, b"hello").unwrap();
    let memory = FileMemory::open(&path, None, true).unwrap();
    assert_eq!(memory.write(0, b"J"), Err(Fault::NotSupported));
    assert!(FileMemory::open(&path, Some(100), true).is_err());
    assert_eq!(fs::read(&path).unwrap(), b"hello");
}

#[test]
fn file_memory__truncated_by_another_faults_and_stays_alive() {
    let folder = on_disk("truncate");
    let path = folder.0.join("f");
    let memory = FileMemory::open(&path, Some(1 << 20), false).unwrap();
    memory.write(0, &[1; 4096]).unwrap();
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(8192)
        .unwrap();
    assert_eq!(memory.write(1 << 19, &[1; 4096]), Err(Fault::Unmapped));
    assert_eq!(memory.read(1 << 19, &mut [0; 16]), Err(Fault::Unmapped));
    assert_eq!(
        memory.flush(0, 1 << 20, Placement::PERSISTENT),
        Err(Fault::Unmapped)
    );
    assert_eq!(
        fs::metadata(&path).unwrap().len(),
        8192,
        "a fault must not bring the file back"
    );
}

#[test]
fn file_memory__on_tmpfs_is_volatile_and_refuses_persistence() {
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() {
        return skip("no /dev/shm on this host");
    }
    let folder = Folder::new(shm, "tmpfs");
    let memory = FileMemory::open(&folder.0.join("f"), Some(4096), false).unwrap();
    assert_eq!(memory.domain(), PersistenceDomain::None);
    assert_eq!(memory.placement(), Placement::GLOBAL);
    assert_eq!(memory.flush(0, 4096, Placement::GLOBAL), Ok(()));
    assert_eq!(
        memory.flush(0, 4096, Placement::PERSISTENT),
        Err(Fault::NotSupported)
    );
}

#[test]
fn file_memory__refuses_what_is_no_file_with_bytes() {
    let folder = on_disk("odd");
    assert!(FileMemory::open(&folder.0, None, true).is_err(), "a folder");
    assert!(
        FileMemory::open(&folder.0.join("missing"), None, false).is_err(),
        "a missing file without a size"
    );
    fs::write(folder.0.join("empty"), b"").unwrap();
    assert!(
        FileMemory::open(&folder.0.join("empty"), None, false).is_err(),
        "an empty file without a size"
    );
}

#[test]
fn anonymous_memory__of_more_pages_than_there_are_addresses() {
    assert!(AnonymousMemory::new(usize::MAX).is_err());
    assert!(AnonymousMemory::shareable(usize::MAX).is_err());
}

#[test]
fn anonymous_memory__places_every_length_at_every_alignment() {
    let memory = AnonymousMemory::new(4096).unwrap();
    for at in 0..24u64 {
        for len in 0..40usize {
            let bytes: Vec<u8> = (0..len).map(|i| (i + len + 1) as u8).collect();
            memory.write(0, &[0; 128]).unwrap();
            memory.write(at, &bytes).unwrap();
            let mut there = [0; 128];
            memory.read(0, &mut there).unwrap();
            let end = at as usize + len;
            assert_eq!(there[at as usize..end], bytes[..]);
            assert!(
                there[..at as usize].iter().chain(&there[end..]).all(|b| *b == 0),
                "at {at} len {len}"
            );
        }
    }
    assert_eq!(memory.write(4095, &[0; 2]), Err(Fault::Unmapped));
    assert_eq!(memory.read(u64::MAX - 1, &mut [0; 2]), Err(Fault::Unmapped));
    assert_eq!(
        memory.flush(0, 10, Placement::PERSISTENT),
        Err(Fault::NotSupported)
    );
}

#[test]
fn of_file__has_the_bytes_of_the_process_that_made_it() {
    let ours = AnonymousMemory::shareable(8192).unwrap();
    let file = shared_file(&ours).expect("a file");
    let theirs = AnonymousMemory::of_file(file.try_clone_to_owned().unwrap(), 8192).unwrap();
    assert_eq!(theirs.len(), ours.len());
    ours.write(5000, b"bytes").unwrap();
    let mut bytes = [0; 5];
    theirs.read(5000, &mut bytes).unwrap();
    assert_eq!(&bytes, b"bytes");
    assert!(shared_file(&theirs).is_some());
    assert!(shared_file(&AnonymousMemory::new(8192).unwrap()).is_none());
}

#[test]
fn of_file__what_could_raise_a_signal() {
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, 4096).unwrap();
    let empty = rdmux_memory::mapping::sealed_file("empty", 0).unwrap();
    for file in [unsealed, empty] {
        let refused = AnonymousMemory::of_file(file, 4096).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::InvalidData);
    }
}
