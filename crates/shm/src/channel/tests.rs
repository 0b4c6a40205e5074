use std::sync::atomic::AtomicBool;

use rdmux_memory::mapping::{Mapping, allows_calls_into_processes};
use rdmux_rnic::{Access, Memory, PeerFault, Qpn, RKey};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::SocketFlags;

use super::*;
use crate::grant::Mapped;
use crate::skip::skip;

fn doorbells() -> [OwnedFd; 2] {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    [a, b]
}

/// Returns a file of `bytes` bytes.
fn file(bytes: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("forged", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

#[test]
fn send__to_a_peer_that_takes_nothing() {
    let (segment, _file) = Segment::create().unwrap();
    let [doorbell, _theirs] = doorbells();
    let mut channel = Channel::new(segment, Side::Asking, doorbell, None, &Arc::default());
    let meta = Meta {
        segment_bytes: 1024,
        traffic_class: 0,
    };
    for bytes in [20, 1000, 60_000] {
        for _ in 0..2 * WAITING_BYTES_MAX / bytes {
            channel.send(meta, &vec![0; bytes]).unwrap();
        }
        let entry = size_of::<(Meta, Box<[u8]>)>();
        let held: usize = channel.ends.waiting().iter().map(|bytes| bytes + entry).sum();
        assert!(held <= WAITING_BYTES_MAX, "{held}");
        assert!(channel.prepare_sleep().unwrap(), "it is not waited for");
    }
}

#[test]
fn take__memory_that_cannot_be_relied_on() {
    let (segment, _file) = Segment::create().unwrap();
    let [doorbell, _theirs] = doorbells();
    let mut channel = Channel::new(segment, Side::Asking, doorbell, None, &Arc::default());
    let open = Arc::new(AtomicBool::new(true));
    let granted = |offset, length| Offer {
        rkey: RKey(1),
        by: Qpn::new(1),
        index: 0,
        generation: 1,
        access: Access::REMOTE_WRITE,
        iova: 0,
        length,
        offset,
        gate: 0,
        left: 0,
        pages: (0, 0),
        calls: 0,
    };
    let [own, _end] = doorbells();
    let process = Process::of(std::process::id() as i32, own.as_fd());
    let mut take = |granted, file: Option<&OwnedFd>| {
        let files = file.map(|file| file.try_clone().unwrap()).into_iter().collect();
        channel.take(&granted, files, &process, &open).ok()
    };
    let good = file(64 << 10, SealFlags::SHRINK);
    assert!(take(granted(0, 64 << 10), Some(&good)).is_some());
    assert!(take(granted(5000, 7), Some(&good)).is_some());
    for (offset, length) in [
        (0, 0),
        (0, (64 << 10) + 1),
        (64 << 10, 1),
        (u64::MAX, 1),
        (1, u64::MAX),
        (1 << 63, 1 << 62),
    ] {
        assert!(
            take(granted(offset, length), Some(&good)).is_none(),
            "{offset} {length}"
        );
    }
    let unsealed = file(64 << 10, SealFlags::GROW);
    assert!(take(granted(0, 4096), Some(&unsealed)).is_none());
    // Pages of such a file cause a signal where the system runs out of them.
    if let Ok(huge) = memfd_create(
        "forged",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB,
    ) && ftruncate(&huge, 2 << 20).is_ok()
    {
        fcntl_add_seals(&huge, SealFlags::SHRINK).unwrap();
        assert!(take(granted(0, 2 << 20), Some(&huge)).is_none());
    }
    // In the memory of a process: a region that ends beyond all addresses.
    let address = std::ptr::from_ref(&open).addr() as u64;
    assert!(take(granted(address, 8), None).is_some());
    assert!(take(granted(address, u64::MAX), None).is_none());
}

#[test]
fn of_file__so_many_and_no_more() {
    static COUNTED: Mapped = Mapped::new();
    let file = file(1 << 46, SealFlags::SHRINK);
    let map = || Window::of_file(&COUNTED, file.as_fd(), 0, 4096, true);
    for _ in 0..2 {
        let windows: Vec<Window> = (0..16_384).map(|_| map().unwrap()).collect();
        assert!(map().is_none());
        drop(windows);
    }
    let size = |log2: u32| Window::of_file(&COUNTED, file.as_fd(), 0, 1 << log2, false);
    assert!(size(46).is_none());
    let [first, second] = [size(44), size(44)];
    assert!(first.is_some() && second.is_some() && size(12).is_none());
    drop(first);
    assert!(size(12).is_some());
}

/// The kernel knows nothing of grants: where it copies, only this side keeps to the bounds and the rights.
#[test]
fn take__reaches_by_calls_what_was_granted_and_no_more() {
    if !allows_calls_into_processes() {
        return skip("calls into processes are refused");
    }
    let (segment, _file) = Segment::create().unwrap();
    let [doorbell, theirs] = doorbells();
    let process = Process::of(std::process::id() as i32, theirs.as_fd());
    let mut channel = Channel::new(
        Arc::clone(&segment),
        Side::Asking,
        doorbell,
        None,
        &Arc::default(),
    );
    let (pages, words) = (
        Mapping::anonymous(8192).unwrap(),
        Mapping::anonymous(4096).unwrap(),
    );
    let (begin, end) = (pages.address() + 100, pages.address() + 200);
    let mut take = |index, access| {
        segment.grant(Side::Answering, index).store(1, Ordering::SeqCst);
        let offer = Offer {
            rkey: RKey(1),
            by: Qpn::new(1),
            index,
            generation: 1,
            access,
            iova: 0,
            length: end - begin,
            offset: begin,
            gate: words.address(),
            left: words.address() + 8,
            pages: (0, 0),
            calls: 0,
        };
        let open = Arc::new(AtomicBool::new(true));
        channel.take(&offer, Vec::new(), &process, &open).unwrap().memory
    };
    let own = AnonymousMemory::new(4096).unwrap();
    own.write(0, &[7; 4096]).unwrap();
    let (writable, read_only) = (take(0, Access::REMOTE_WRITE), take(1, Access::REMOTE_READ));
    for (memory, at, len) in [
        (&writable, begin - 1, 8),
        (&writable, end - 7, 8),
        (&writable, end, 1),
        (&writable, begin, 101),
        (&writable, u64::MAX, 8),
        (&read_only, begin, 8),
    ] {
        assert_eq!(memory.write(at, &own, 0, len), Err(PeerFault::Ended));
        let bytes = vec![7; len as usize];
        assert_eq!(memory.write_bytes(at, &bytes), Err(PeerFault::Ended));
    }
    let seen = || {
        let mut bytes = [1; 8192];
        pages.read(0, &mut bytes).unwrap();
        bytes
    };
    assert!(seen() == [0; 8192]);
    assert_eq!(writable.write(begin, &own, 0, end - begin), Ok(()));
    assert!(seen()[100..200] == [7; 100] && seen()[..100] == [0; 100] && seen()[200..] == [0; 7992]);
    assert_eq!(read_only.read(begin, &own, 0, 100), Ok(()));
    assert_eq!(read_only.read(begin, &own, 0, 101), Err(PeerFault::Ended));
}
