//! The driver without its thread: each test drives the engine itself.

use std::any::Any;
use std::cell::Cell;
use std::io::{Read, Seek};
use std::os::unix::net::UnixDatagram;
use std::sync::mpsc;

use rdmux_memory::FileMemory;
use rdmux_rnic::{
    Access, Arm, Atomic, Cause, HeapMemory, Memory, Operation, Path, Placement, Psn, QpAttributes, QpState,
    RecvRequest, RegionSpec, Registration, Selectivity, SendFlags, SendRequest, SgeList, Status, Target,
};
use rdmux_verbs::thread::{Policy, policy};
use rdmux_verbs::{CompletionQueue, Device, MemoryRegion, Options, QpOptions, QueuePair};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Advice, fadvise};

use super::*;
use crate::capture::{Capture, Filter};
use crate::skip::skip;
use crate::testing::{Inside, open, open_with};

thread_local! {
    /// Flushes and accesses that this thread drives get no thread.
    pub(super) static NO_THREADS: Cell<bool> = const { Cell::new(false) };
    /// For polls of this thread, more tasks run on the host than it has CPUs.
    pub(super) static OVERSUBSCRIBED: Cell<bool> = const { Cell::new(false) };
}

pub(super) const LONG: Duration = Duration::from_secs(60);

/// Two queue pairs of one device that are connected to each other.
struct Pair {
    device: Device,
    cqs: [CompletionQueue; 2],
    qps: [QueuePair; 2],
}

impl Pair {
    fn new(address: [u8; 4]) -> Pair {
        Pair::on(&open(IpAddr::from(address)).unwrap())
    }

    fn on(device: &Device) -> Pair {
        let cqs = [(); 2].map(|()| device.create_cq(64).unwrap());
        let pd = device.alloc_pd().unwrap();
        let qps = [0, 1].map(|i| pd.create_qp(&QpOptions::new(&cqs[i])).unwrap());
        for (qp, peer) in [(&qps[0], &qps[1]), (&qps[1], &qps[0])] {
            connect(device, qp, peer.qpn());
        }
        Pair {
            device: device.clone(),
            cqs,
            qps,
        }
    }

    fn engine(&self) -> &Engine {
        self.device.engine()
    }

    /// Keeps the engine's thread from the socket for good, as a polling caller does.
    fn take_over(&self) {
        self.engine().hand_over.lead();
        self.engine().kick.wake();
        while !self.engine().hand_over.is_leased() {
            thread::yield_now();
        }
    }

    /// Calls `drive` until it receives the sent packets. Nobody looks at the socket after that: pending acknowledgements stay pending.
    fn take_in(&self, drive: impl Fn()) {
        let deadline = Instant::now() + LONG;
        while self.device.counters().rcvd_pkts == 0 && Instant::now() < deadline {
            drive();
        }
    }

    /// Registers a memory that the first queue pair may ask its peer to flush.
    fn register(&self, memory: Arc<dyn Memory>) -> MemoryRegion {
        let pd = self.qps[1].pd();
        pd.reg_mr_all(memory, 0, Access::FLUSH_PERSISTENT).unwrap()
    }

    fn post_flush(&self, region: &MemoryRegion) {
        self.post(Operation::Flush {
            va: 0,
            rkey: region.rkey(),
            length: 8,
            placement: Placement::PERSISTENT,
            selectivity: Selectivity::Range,
        });
    }

    /// Posts a request to the first queue pair.
    fn post(&self, operation: Operation) {
        let request = SendRequest { operation, ..send() };
        self.qps[0].post_send(request).unwrap();
    }
}

pub(super) fn send() -> SendRequest {
    SendRequest {
        wr_id: 1,
        operation: Operation::Send { imm: None },
        sges: SgeList::EMPTY,
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    }
}

fn connect(device: &Device, qp: &QueuePair, peer: Qpn) {
    let (init, rtr, rts) = steps(device, peer);
    for (to, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
        qp.modify(to, &attr).unwrap();
    }
}

/// Returns the attributes that a queue pair gets on its way to RTS.
fn steps(device: &Device, peer: Qpn) -> (QpAttributes, QpAttributes, QpAttributes) {
    let address = device.address();
    let init = QpAttributes {
        access: Some(Access::FLUSH_PERSISTENT | Access::REMOTE_WRITE | Access::REMOTE_READ),
        ..Default::default()
    };
    let rtr = QpAttributes {
        path: Some(Path {
            src: address,
            dst: address,
            src_port: device.source_port(peer).unwrap(),
            traffic_class: 0,
        }),
        path_mtu: Some(1024),
        dest_qpn: Some(peer),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(1),
        ..Default::default()
    };
    let rts = QpAttributes {
        sq_psn: Some(Psn::new(0)),
        timeout: Some(14),
        retry_count: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(1),
        ..Default::default()
    };
    (init, rtr, rts)
}

/// Memory on a medium. `flush` and `end` are called when it is flushed and dropped.
struct Medium<F: Fn(), E: Fn()> {
    flush: F,
    end: E,
}

impl<F: Fn(), E: Fn()> std::fmt::Debug for Medium<F, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Medium")
    }
}

impl<F: Fn(), E: Fn()> Drop for Medium<F, E> {
    fn drop(&mut self) {
        (self.end)();
    }
}

impl<F: Fn() + Send + Sync, E: Fn() + Send + Sync> Memory for Medium<F, E> {
    fn len(&self) -> u64 {
        4096
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn placement(&self) -> Placement {
        Placement::PERSISTENT
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        false
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        (self.flush)();
        Ok(())
    }
}

#[test]
fn handle_mad__acknowledges_the_data_that_it_takes_in() {
    let pair = Pair::new([127, 0, 14, 2]);
    let sges = SgeList::EMPTY;
    pair.qps[1].post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
    pair.take_over();
    until(pair.engine(), |core| {
        core.links.reach((pair.device.address(), core.rnic.config().slot))
    });
    pair.post(Operation::Send { imm: None });
    let empty = MadDatagram {
        src: SocketAddr::new(pair.device.address(), ROCE_PORT),
        bytes: Vec::new(),
    };
    pair.take_in(|| pair.engine().handle_mad(&empty));
    // Taken out of the ring, the request is acknowledged: its sender sees the end without another packet.
    let wc = pair.cqs[0].poll().expect("a completion");
    assert_eq!(
        (wc.status, pair.device.counters().sent_pkts),
        (Status::Success, 1)
    );
}

#[test]
fn finish__refuses_a_flush_for_which_there_is_no_thread() {
    let pair = Pair::new([127, 0, 14, 3]);
    let region = pair.register(unflushed(|| {}));
    pair.take_over();
    pair.post_flush(&region);
    NO_THREADS.set(true);
    pair.take_in(|| pair.device.progress());
    assert_eq!(pair.device.counters().sent_pkts, 2, "the request and its NAK");
    let wc = pair.cqs[0].wait(LONG).unwrap().expect("a completion");
    assert_eq!(wc.status, Status::RemoteOperation);
}

#[test]
fn flush__that_panics_has_failed() {
    let device = open(IpAddr::from([127, 0, 14, 4])).unwrap();
    let memory = Arc::new(Medium {
        flush: || panic!("no such medium"),
        end: || {},
    });
    // The second flush uses the thread of the first, since both are of one memory.
    for _ in 0..2 {
        let pair = Pair::on(&device);
        let region = pair.register(memory.clone());
        pair.post_flush(&region);
        let wc = pair.cqs[0].wait(LONG).unwrap().expect("a completion");
        assert_eq!(wc.status, Status::RemoteOperation);
    }
}

/// Memory whose writes wait until a test lets them go on, or panic.
#[derive(Debug)]
struct Stalling {
    begun: mpsc::SyncSender<()>,
    go_on: Mutex<mpsc::Receiver<()>>,
    written: AtomicUsize,
}

impl Stalling {
    /// Returns the memory, a receiver of the beginnings of writes, and a sender that lets one go on; without it they panic.
    fn new() -> (Arc<Stalling>, mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((begun, begins), (go, go_on)) = (mpsc::sync_channel(16), mpsc::channel());
        let memory = Stalling {
            begun,
            go_on: Mutex::new(go_on),
            written: AtomicUsize::new(0),
        };
        (Arc::new(memory), begins, go)
    }
}

impl Memory for Stalling {
    fn len(&self) -> u64 {
        4096
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        let _ = self.begun.send(());
        self.go_on.lock().recv().expect("no such medium");
        self.written.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn medium(&self) -> Option<rdmux_rnic::Medium> {
        Some(rdmux_rnic::Medium(std::ptr::from_ref(self) as u64))
    }

    fn placement(&self) -> Placement {
        Placement::empty()
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Ok(())
    }
}

impl Pair {
    /// Registers memory that the first queue pair may write to, and writes 8 bytes to it.
    fn write_to(&self, memory: Arc<dyn Memory>) -> MemoryRegion {
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let region = self.qps[1].pd().reg_mr_all(memory, 0, rights).unwrap();
        let (va, rkey) = (0, region.rkey());
        let request = SendRequest {
            operation: Operation::Write { va, rkey, imm: None },
            sges: SgeList::inline(&[7; 8]),
            ..send()
        };
        self.qps[0].post_send(request).unwrap();
        region
    }
}

#[test]
fn access__that_a_medium_holds_up_holds_up_nobody_else() {
    let stalled = Pair::new([127, 0, 14, 40]);
    let other = Pair::on(&stalled.device);
    let ((memory, begins, go), (free, _begins, goes)) = (Stalling::new(), Stalling::new());
    let _region = stalled.write_to(memory.clone());
    begins.recv_timeout(LONG).unwrap();
    goes.send(()).unwrap();
    let _other = other.write_to(free);
    let wc = other.cqs[0].wait(LONG).unwrap().expect("a completion");
    assert_eq!(wc.status, Status::Success);
    assert!(stalled.cqs[0].poll().is_none());
    go.send(()).unwrap();
    let wc = stalled.cqs[0].wait(LONG).unwrap().expect("a completion");
    assert_eq!(
        (wc.status, memory.written.load(Ordering::SeqCst)),
        (Status::Success, 1)
    );
}

#[test]
fn access__in_progress_ends_before_its_region_does() {
    let pair = Pair::new([127, 0, 14, 41]);
    let (memory, begins, go) = Stalling::new();
    let region = pair.write_to(memory.clone());
    begins.recv_timeout(LONG).unwrap();
    let (gone, is_gone) = mpsc::channel();
    let dropping = thread::spawn(move || {
        drop(region);
        let _ = gone.send(());
    });
    // The key is invalid from the beginning, and the engine goes on.
    while pair.device.object_counts().1 > 0 {
        thread::yield_now();
    }
    assert!(
        is_gone.try_recv().is_err(),
        "the region has ended before the access"
    );
    go.send(()).unwrap();
    dropping.join().unwrap();
    assert_eq!(memory.written.load(Ordering::SeqCst), 1);
}

#[test]
fn access__of_a_queue_pair_that_ends_does_not_begin() {
    let pair = Pair::new([127, 0, 14, 44]);
    let (memory, begins, go) = Stalling::new();
    let _first = pair.write_to(memory.clone());
    begins.recv_timeout(LONG).unwrap();
    let _second = pair.write_to(memory.clone());
    let device = pair.device.clone();
    let waits = |count| {
        let deadline = Instant::now() + LONG;
        while device.engine().lock().media.waiting() != count {
            assert!(Instant::now() < deadline, "{count} accesses should wait");
            thread::yield_now();
        }
    };
    waits(1);
    let [requester, responder] = pair.qps;
    let (gone, is_gone) = mpsc::channel();
    let dropping = thread::spawn(move || {
        drop(responder);
        let _ = gone.send(());
    });
    waits(0);
    assert!(
        is_gone.try_recv().is_err(),
        "the queue pair has ended before its access"
    );
    go.send(()).unwrap();
    dropping.join().unwrap();
    assert_eq!(memory.written.load(Ordering::SeqCst), 1);
    assert!(begins.try_recv().is_err(), "the second write has begun");
    drop(requester);
}

#[test]
fn access__that_panics_has_failed() {
    let device = Device::open(IpAddr::from([127, 0, 14, 42])).unwrap();
    let (memory, _begins, go) = Stalling::new();
    drop(go);
    // The second access uses the thread of the first.
    for _ in 0..2 {
        let pair = Pair::on(&device);
        let _region = pair.write_to(memory.clone());
        let wc = pair.cqs[0].wait(LONG).unwrap().expect("a completion");
        assert_eq!(wc.status, Status::RemoteOperation);
    }
}

#[test]
fn access__without_a_thread_is_carried_out_at_once() {
    let pair = Pair::new([127, 0, 14, 43]);
    let (memory, _begins, go) = Stalling::new();
    go.send(()).unwrap();
    pair.take_over();
    let _region = pair.write_to(memory.clone());
    NO_THREADS.set(true);
    pair.take_in(|| pair.device.progress());
    let wc = pair.cqs[0].wait(LONG).unwrap().expect("a completion");
    assert_eq!(
        (wc.status, memory.written.load(Ordering::SeqCst)),
        (Status::Success, 1)
    );
}

/// A file of which nothing is in the page cache. It counts the reads that do not go through the kernel's ring.
#[derive(Debug)]
struct Uncached {
    file: FileMemory,
    reads: AtomicUsize,
}

impl Uncached {
    const BYTES: u64 = 1 << 20;

    fn new(folder: &tempfile::TempDir) -> Arc<Uncached> {
        let file = FileMemory::open(&folder.path().join("file"), Some(Uncached::BYTES), false).unwrap();
        let bytes: Vec<_> = (0..Uncached::BYTES / 8).flat_map(u64::to_ne_bytes).collect();
        file.write(0, &bytes).unwrap();
        file.file().sync_all().unwrap();
        // A file in memory keeps its pages.
        let _ = fadvise(file.file(), 0, None, Advice::DontNeed);
        let reads = AtomicUsize::new(0);
        Arc::new(Uncached { file, reads })
    }
}

impl Memory for Uncached {
    fn len(&self) -> u64 {
        Uncached::BYTES
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.file.read(offset, out)
    }

    fn read_at_once(&self, _: u64, _: &mut [u8]) -> Option<Result<(), Fault>> {
        None
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Err(Fault::NotSupported)
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn medium(&self) -> Option<rdmux_rnic::Medium> {
        Some(rdmux_rnic::Medium(std::ptr::from_ref(self) as u64))
    }

    fn placement(&self) -> Placement {
        Placement::empty()
    }

    fn gathers(&self) -> bool {
        true
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Ok(())
    }

    fn pages(&self) -> Option<&dyn Any> {
        Some(&self.file)
    }
}

impl Pair {
    /// Posts a READ of a whole memory through its first queue pair; returns the memory that gets the bytes, and its region and the other.
    fn read_all(&self, memory: Arc<dyn Memory>) -> (Arc<HeapMemory>, [MemoryRegion; 2]) {
        let length = memory.len();
        let from = self.qps[1]
            .pd()
            .reg_mr_all(memory, 0, Access::REMOTE_READ)
            .unwrap();
        let bytes = Arc::new(HeapMemory::new(length as usize));
        let to = self.qps[0]
            .pd()
            .reg_mr_all(bytes.clone(), 0, Access::LOCAL_WRITE)
            .unwrap();
        let (va, rkey) = (0, from.rkey());
        let request = SendRequest {
            operation: Operation::Read { va, rkey },
            sges: to.sge(0, length as u32).into(),
            ..send()
        };
        self.qps[0].post_send(request).unwrap();
        (bytes, [from, to])
    }

    fn status(&self) -> Status {
        self.cqs[0].wait(LONG).unwrap().expect("a completion").status
    }
}

#[test]
fn read__of_a_file_goes_through_the_ring() {
    if !Media::has_ring() {
        return skip("the system allows no io_uring");
    }
    let folder = tempfile::tempdir().unwrap();
    let file = Uncached::new(&folder);
    let pair = Pair::new([127, 0, 14, 45]);
    let (bytes, _regions) = pair.read_all(file.clone());
    assert_eq!(pair.status(), Status::Success);
    bytes.with(|bytes| {
        let words = bytes.as_chunks::<8>().0;
        assert!(
            words
                .iter()
                .enumerate()
                .all(|(i, word)| u64::from_ne_bytes(*word) == i as u64)
        );
    });
    assert_eq!(file.reads.load(Ordering::SeqCst), 0);
}

#[test]
fn read__by_more_queue_pairs_than_the_ring_has_entries() {
    let folder = tempfile::tempdir().unwrap();
    let file = Uncached::new(&folder);
    let device = open(IpAddr::from([127, 0, 14, 48])).unwrap();
    let pairs: Vec<_> = (0..80).map(|_| Pair::on(&device)).collect();
    let reads: Vec<_> = pairs.iter().map(|pair| pair.read_all(file.clone())).collect();
    for (pair, (bytes, _regions)) in pairs.iter().zip(reads) {
        assert_eq!(pair.status(), Status::Success);
        bytes.with(|bytes| assert_eq!(bytes[bytes.len() - 8..], (Uncached::BYTES / 8 - 1).to_ne_bytes()));
    }
}

#[test]
fn read__of_a_file_without_a_ring_is_done_by_the_thread() {
    let folder = tempfile::tempdir().unwrap();
    let file = Uncached::new(&folder);
    let pair = Pair::new([127, 0, 14, 46]);
    pair.engine().lock().media.no_ring.store(true, Ordering::Relaxed);
    let (bytes, _regions) = pair.read_all(file.clone());
    assert_eq!(pair.status(), Status::Success);
    bytes.with(|bytes| assert_eq!(bytes[8], 1));
    assert_ne!(file.reads.load(Ordering::SeqCst), 0);
}

#[test]
fn read__of_a_truncated_file_fails() {
    let folder = tempfile::tempdir().unwrap();
    let file = Uncached::new(&folder);
    file.file.file().set_len(Uncached::BYTES / 2).unwrap();
    let pair = Pair::new([127, 0, 14, 47]);
    let _read = pair.read_all(file.clone());
    assert_eq!(pair.status(), Status::RemoteAccess);
    // The memory itself has read, and knows of the failure.
    assert_ne!(file.reads.load(Ordering::SeqCst), 0);
}

fn unflushed(end: impl Fn() + Send + Sync + 'static) -> Arc<dyn Memory> {
    Arc::new(Medium { flush: || {}, end })
}

/// Returns a destructor for a memory, and a receiver that gets whether the device still answers when the memory ends. The destructor asks
/// on another thread, so that the test ends even if the device does not answer.
fn asks_when_it_ends(device: &Device) -> (impl Fn() + Send + Sync + use<>, mpsc::Receiver<bool>) {
    let (device, (tell, told)) = (device.clone(), mpsc::sync_channel(1));
    let end = move || {
        let (device, (done, answered)) = (device.clone(), mpsc::channel());
        thread::spawn(move || {
            device.counters();
            let _ = done.send(());
        });
        let _ = tell.send(answered.recv_timeout(LONG).is_ok());
    };
    (end, told)
}

#[test]
fn memory__that_a_work_request_ends_is_dropped_when_the_engine_is_unlocked() {
    let pair = Pair::new([127, 0, 14, 9]);
    let pd = pair.qps[0].pd();
    let mr = pd.alloc_mr(4096).unwrap();
    let register = |end| {
        let memory = unflushed(end);
        Operation::Register(Box::new(Registration {
            key: mr.rkey(),
            spec: RegionSpec {
                memory,
                memory_offset: 0,
                length: 4096,
                iova: 0,
                access: Access::empty(),
            },
        }))
    };
    let (end, told) = asks_when_it_ends(&pair.device);
    pair.post(register(end));
    pair.post(Operation::LocalInvalidate { rkey: mr.rkey() });
    assert_eq!(told.recv_timeout(LONG), Ok(true), "invalidated");

    let (end, told) = asks_when_it_ends(&pair.device);
    pair.qps[0]
        .modify(QpState::Error, &QpAttributes::default())
        .unwrap();
    pair.post(register(end));
    assert_eq!(told.recv_timeout(LONG), Ok(true), "flushed");
}

#[test]
fn memory__that_is_refused_is_dropped_when_the_engine_is_unlocked() {
    let pair = Pair::new([127, 0, 14, 10]);
    let pd = pair.qps[0].pd();
    let (end, told) = asks_when_it_ends(&pair.device);
    let refused = pd.reg_mr(unflushed(end), 0, 8192, 0, Access::empty());
    assert!(refused.is_err());
    assert_eq!(told.recv_timeout(LONG), Ok(true), "reg_mr");

    let (end, told) = asks_when_it_ends(&pair.device);
    let mut mr = pd.reg_mr_all(unflushed(|| {}), 0, Access::empty());
    let refused = mr
        .as_mut()
        .unwrap()
        .rereg(unflushed(end), 0, 8192, 0, Access::empty());
    assert!(refused.is_err());
    assert_eq!(told.recv_timeout(LONG), Ok(true), "rereg");
}

#[test]
fn memory__whose_flush_outlives_its_region_is_dropped_when_the_engine_is_unlocked() {
    for forgotten in [false, true] {
        let pair = Pair::new([127, 0, 14, 11]);
        let (end, told) = asks_when_it_ends(&pair.device);
        let (begun, begins) = mpsc::sync_channel(1);
        let (go_on, goes_on) = mpsc::channel();
        let goes_on = Mutex::new(goes_on);
        let flush = move || {
            let _ = begun.send(());
            let _ = goes_on.lock().recv_timeout(LONG);
        };
        let region = pair.register(Arc::new(Medium { flush, end }));
        pair.post_flush(&region);
        begins.recv_timeout(LONG).unwrap();
        drop(region);
        if forgotten {
            // Nobody waits for the flush.
            pair.qps[1]
                .modify(QpState::Error, &QpAttributes::default())
                .unwrap();
        }
        go_on.send(()).unwrap();
        assert_eq!(told.recv_timeout(LONG), Ok(true));
    }
}

/// Two threads post while a third holds the engine's lock: neither waits for it. Once the lock is released, all their requests are sent,
/// in the order of each thread.
#[test]
fn post_send__leaves_the_request_to_the_holder_of_the_lock() {
    const EACH: u64 = 32;
    let pair = Pair::new([127, 0, 14, 12]);
    for wr_id in 0..2 * EACH {
        let sges = SgeList::EMPTY;
        pair.qps[1].post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    pair.take_over();
    let locked = pair.engine().lock();
    let sent_before = locked.rnic.counters().sent_pkts;
    thread::scope(|scope| {
        for thread in 0..2 {
            let qp = &pair.qps[0];
            scope.spawn(move || {
                for n in 0..EACH {
                    let request = SendRequest {
                        wr_id: thread << 32 | n,
                        operation: Operation::Send {
                            imm: Some((thread << 16 | n) as u32),
                        },
                        sges: SgeList::EMPTY,
                        flags: SendFlags::SIGNALED,
                        to: Target::Connected,
                    };
                    qp.post_send(request).unwrap();
                }
                // Posting a receive does not wait for the lock either.
                let sges = SgeList::EMPTY;
                qp.post_recv(RecvRequest { wr_id: 0, sges }).unwrap();
            });
        }
    });
    assert_eq!(locked.rnic.counters().sent_pkts, sent_before);
    drop(locked);
    // Takes the lock directly: `Engine::lock` would post the requests that were left.
    let sent = pair.engine().core.lock().rnic.counters().sent_pkts;
    assert_eq!(sent - sent_before, 2 * EACH);
    let mut next = [0; 2];
    for _ in 0..2 * EACH {
        let wc = pair.cqs[1].wait(LONG).unwrap().expect("a message");
        let imm = wc.imm.unwrap();
        let next = &mut next[(imm >> 16) as usize];
        assert_eq!(imm & 0xffff, *next);
        *next += 1;
    }
    for _ in 0..2 * EACH {
        let wc = pair.cqs[0].wait(LONG).unwrap().expect("a completion");
        assert_eq!(wc.status, Status::Success);
    }
}

/// Returns whether a descriptor becomes readable in time.
pub(super) fn is_told(cq: &CompletionQueue) -> bool {
    let timeout = Timespec {
        tv_sec: LONG.as_secs() as i64,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(cq, PollFlags::IN)], Some(&timeout)).is_ok_and(|n| n > 0)
}

/// Waits until the leader sleeps, or the thread.
fn until_asleep(engine: &Engine, who: impl Fn(Sleeps) -> u64) {
    let deadline = Instant::now() + LONG;
    while who(engine.core.lock().sleeps) == 0 {
        assert!(Instant::now() < deadline, "nobody sleeps");
        thread::yield_now();
    }
}

#[test]
fn wake_early__a_timer_after_a_wait_that_ended() {
    let device = open(IpAddr::from([127, 0, 14, 13])).unwrap();
    let cq = device.create_cq(64).unwrap();
    let qp = device
        .alloc_pd()
        .unwrap()
        .create_qp(&QpOptions::new(&cq))
        .unwrap();
    let (init, mut rtr, mut rts) = steps(&device, Qpn::new(0x01_0005));
    rtr.path = rtr.path.map(|path| Path {
        dst: IpAddr::from([127, 0, 14, 99]),
        ..path
    });
    (rts.timeout, rts.retry_count) = (Some(10), Some(1));
    for (to, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
        qp.modify(to, &attr).unwrap();
    }
    until_asleep(device.engine(), |sleeps| sleeps.thread_ns);
    assert_eq!(cq.wait(Duration::from_millis(20)).unwrap(), None);
    until_asleep(device.engine(), |sleeps| sleeps.thread_ns);
    qp.post_send(send()).unwrap();
    cq.arm(Arm::Next);
    assert!(is_told(&cq), "nobody answers, and nobody notices");
    assert_eq!(cq.poll().unwrap().status, Status::RetryExceeded);
}

#[test]
fn fmt__takes_no_lock() {
    let pair = Pair::new([127, 0, 14, 14]);
    let _locked = pair.engine().lock();
    let text = format!("{:?}", pair.qps[0]);
    assert!(text.contains("EngineLock") && !text.contains("locked"), "{text}");
}

#[test]
fn arm__while_another_waits_for_the_queue() {
    let pair = Pair::new([127, 0, 14, 15]);
    for wr_id in 0..3 {
        let sges = SgeList::EMPTY;
        pair.qps[1].post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    thread::scope(|scope| {
        let waiter = scope.spawn(|| pair.cqs[1].wait(LONG).unwrap().map(|wc| wc.wr_id));
        until_asleep(pair.engine(), |sleeps| sleeps.leader_ns);
        pair.cqs[1].arm(Arm::Next);
        pair.post(Operation::Send { imm: None });
        assert_eq!(waiter.join().unwrap(), Some(0));
    });
    // The notification may be for the first message, which the waiter took. Otherwise it is for the second.
    pair.post(Operation::Send { imm: None });
    let second = loop {
        assert!(is_told(&pair.cqs[1]));
        pair.cqs[1].arm(Arm::Next);
        if let Some(wc) = pair.cqs[1].poll() {
            break wc;
        }
    };
    assert_eq!(second.wr_id, 1);
}

/// A pending notification belongs to the user who armed the queue: a wait beside it leaves the descriptor readable.
#[test]
fn wait__leaves_the_notification_of_another_user() {
    let pair = Pair::new([127, 0, 14, 23]);
    let cq = &pair.cqs[1];
    let sges = SgeList::EMPTY;
    pair.qps[1].post_recv(RecvRequest { wr_id: 0, sges }).unwrap();
    cq.arm(Arm::Next);
    pair.post(Operation::Send { imm: None });
    assert!(is_told(cq));
    assert_eq!(cq.poll().unwrap().wr_id, 0);
    for _ in 0..3 {
        assert_eq!(cq.wait(Duration::from_millis(5)).unwrap(), None);
        assert!(is_told(cq), "the notification is gone");
    }
    assert!(cq.take_event());
    assert_eq!(cq.wait(Duration::from_millis(5)).unwrap(), None);
    assert!(!cq.take_event(), "it was taken before");
}

/// A program arms its queue, polls until the queue is empty, and sleeps on the descriptor: the engine's thread watches meanwhile, and
/// never sleeps for the time for which it trusts a polling caller.
#[test]
fn poll__of_an_armed_queue_takes_no_lease() {
    const ROUNDS: u64 = 200;
    let pair = Pair::new([127, 0, 14, 16]);
    let cq = &pair.cqs[1];
    for wr_id in 0..ROUNDS {
        let sges = SgeList::EMPTY;
        pair.qps[1].post_recv(RecvRequest { wr_id, sges }).unwrap();
        cq.arm(Arm::Next);
        assert_eq!(cq.poll(), None);
        pair.post(Operation::Send { imm: None });
        assert!(is_told(cq));
        assert_eq!(cq.poll().unwrap().wr_id, wr_id);
        while pair.cqs[0].poll().is_none() {
            pair.cqs[0].arm(Arm::Next);
            if pair.cqs[0].poll().is_some() {
                break;
            }
            assert!(is_told(&pair.cqs[0]));
        }
    }
    assert_eq!(pair.engine().overslept.load(Ordering::Relaxed), 0);
}

/// The same after many polls of another queue of the device that is not armed, before and after the queue is armed.
#[test]
fn poll__beside_an_armed_queue_takes_no_lease() {
    const ROUNDS: u64 = 20;
    let pair = Pair::new([127, 0, 14, 17]);
    for wr_id in 0..ROUNDS {
        let sges = SgeList::EMPTY;
        pair.qps[1].post_recv(RecvRequest { wr_id, sges }).unwrap();
        for _ in 0..4 * spinner::POLLS {
            pair.cqs[0].poll();
        }
        pair.cqs[1].arm(Arm::Next);
        for _ in 0..4 * spinner::POLLS {
            pair.cqs[0].poll();
        }
        pair.post(Operation::Send { imm: None });
        assert!(is_told(&pair.cqs[1]));
        assert_eq!(pair.cqs[1].poll().unwrap().wr_id, wr_id);
    }
    assert_eq!(pair.engine().overslept.load(Ordering::Relaxed), 0);
}

/// A queue that is armed for good does not keep the thread beside a caller that polls another; one that is armed after that does.
#[test]
fn poll__for_long_beside_an_armed_queue_takes_a_lease() {
    let pair = Pair::new([127, 0, 14, 90]);
    pair.cqs[1].arm(Arm::Next);
    let deadline = Instant::now() + LONG;
    while !pair.engine().hand_over.is_leased() {
        assert!(Instant::now() < deadline);
        assert_eq!(pair.cqs[0].poll(), None);
        pair.engine().kick.wake();
    }
    let sges = SgeList::EMPTY;
    pair.qps[1].post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
    pair.cqs[1].arm(Arm::Next);
    let is_trusted = {
        let mut core = pair.engine().lock();
        core.spinner.polls(pair.engine().now(), true)
    };
    assert!(!is_trusted);
    pair.post(Operation::Send { imm: None });
    assert!(is_told(&pair.cqs[1]));
}

#[test]
fn poll__looks_again_after_it_gave_up_the_cpu() {
    let pair = Pair::new([127, 0, 14, 18]);
    OVERSUBSCRIBED.set(true);
    let deadline = Instant::now() + LONG;
    // The first two looks precede the yield.
    let looks_thrice = || {
        let mut looks = 0;
        let found = pair.engine().poll(|| {
            looks += 1;
            (looks == 3).then_some(())
        });
        found.is_some()
    };
    while !looks_thrice() {
        assert!(
            Instant::now() < deadline,
            "a poll that gives up the CPU ends with a look"
        );
    }
}

#[test]
fn poll__of_an_idle_device_looks_at_the_sockets_seldom() {
    const POLLS: u64 = 100_000;
    let device = open(IpAddr::from([127, 0, 14, 21])).unwrap();
    let cq = device.create_cq(4).unwrap();
    let (before, began) = (device.engine().lock().looked, Instant::now());
    for _ in 0..POLLS {
        assert_eq!(cq.poll(), None);
    }
    let looked = device.engine().lock().looked - before;
    // The engine's thread looks too, each time it wakes up.
    let most = 2_000 + began.elapsed().as_micros() as u64 / 40;
    assert!(looked <= most, "{looked} looks, {most} at most");
}

/// A device with a completion queue and a queue pair.
pub(super) type EngineEnd = (Device, CompletionQueue, QueuePair);

/// Returns an end on each of two addresses.
fn ends(hosts: [u8; 2]) -> [EngineEnd; 2] {
    ends_with(hosts, Options::default)
}

pub(super) fn ends_with(hosts: [u8; 2], options: impl Fn() -> Options) -> [EngineEnd; 2] {
    hosts.map(|host| {
        let device = open_with(IpAddr::from([127, 0, 14, host]), options()).unwrap();
        let cq = device.create_cq(64).unwrap();
        let qp = device
            .alloc_pd()
            .unwrap()
            .create_qp(&QpOptions::new(&cq))
            .unwrap();
        (device, cq, qp)
    })
}

/// Brings up the queue pairs of two ends towards each other.
pub(super) fn bring_up(ends: &[EngineEnd; 2]) {
    for ((device, _, qp), (peer, _, peer_qp)) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
        let (init, mut rtr, rts) = steps(device, peer_qp.qpn());
        rtr.path = rtr.path.map(|path| Path {
            dst: peer.address(),
            ..path
        });
        for (to, attr) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
            qp.modify(to, &attr).unwrap();
        }
    }
}

/// Brings up two ends, and the link between their engines.
pub(super) fn link_up(ends: &[EngineEnd; 2]) {
    bring_up(ends);
    for (end, peer) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
        let slot = peer.0.engine().lock().rnic.config().slot;
        until(end.0.engine(), |core| core.links.reach((peer.0.address(), slot)));
    }
}

/// Waits until a condition on the engine's state holds.
pub(super) fn until(engine: &Engine, holds: impl Fn(&Core) -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds(&engine.lock()) {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}

/// A link comes up while the thread sleeps and a leader is there, which stops leading without sleeping. The thread must then know of the
/// link: its peer would not wake it.
#[test]
fn link__that_comes_up_beside_a_leader_wakes_the_thread_too() {
    let ends = ends([21, 22]);
    let engine = ends[0].0.engine();
    until(engine, |core| core.thread_asleep);
    engine.hand_over.lead();
    bring_up(&ends);
    let [own, peer] = [0, 1].map(|i| (ends[i].0.address(), ends[i].0.engine().lock().rnic.config().slot));
    until(engine, |core| core.links.reach(peer));
    until(ends[1].0.engine(), |core| core.links.reach(own));
    engine.wake(engine.hand_over.stop_leading(engine.now().0, || false));
    until(engine, |core| core.thread_asleep);
    let (_, cq, qp) = &ends[0];
    let sges = SgeList::EMPTY;
    qp.post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
    cq.arm(Arm::Next);
    ends[1].2.post_send(send()).unwrap();
    assert_eq!(ends[1].1.wait(LONG).unwrap().unwrap().status, Status::Success);
    assert!(is_told(cq));
}

/// While a caller looks, nobody wakes the thread; after its last look the caller is notified of every arrival.
#[test]
fn look_before_sleep__loses_no_wake_up() {
    loses_no_wake_up(&ends([19, 20]));
}

/// The same while another caller sleeps in the thread's place.
#[test]
fn look_before_sleep__beside_a_watch_loses_no_wake_up() {
    let ends = ends([51, 52]);
    let stops = [(); 2].map(|()| Waker::new().unwrap());
    thread::scope(|scope| {
        for (end, stop) in ends.iter().zip(&stops) {
            scope.spawn(|| watch::tests::watch_until(end, stop));
            until(end.0.engine(), |core| core.is_watched);
        }
        loses_no_wake_up(&ends);
        stops.iter().for_each(Waker::wake);
    });
}

fn loses_no_wake_up(ends: &[EngineEnd; 2]) {
    bring_up(ends);
    let look = |(device, cq, _): &EngineEnd, (): &mut ()| {
        let engine = device.engine();
        if engine
            .look_before_sleep(|| cq.take_event().then_some(()))
            .is_none()
        {
            let since = Instant::now();
            assert!(is_told(cq));
            engine.slept(since);
        }
    };
    exchange(ends, || (), look);
}

/// Lets each side answer the other, and wait for events of both requests: by `sleep` whenever it has found nothing since it armed its
/// queue, with a state of its own.
pub(super) fn exchange<S>(
    ends: &[EngineEnd; 2],
    state: impl Fn() -> S + Sync,
    sleep: impl Fn(&EngineEnd, &mut S) + Sync,
) {
    const MESSAGES: u64 = 2_000;
    let side = |end: &EngineEnd, first: bool| {
        let (_, cq, qp) = end;
        let receive = || {
            let sges = SgeList::EMPTY;
            qp.post_recv(RecvRequest { wr_id: 2, sges }).unwrap();
        };
        let (mut sent, mut received, mut state) = (0, 0, state());
        receive();
        if first {
            qp.post_send(send()).unwrap();
        }
        while sent < MESSAGES || received < MESSAGES {
            cq.arm(Arm::Next);
            let mut empty = true;
            while let Some(wc) = cq.poll() {
                assert_eq!(wc.status, Status::Success);
                empty = false;
                if wc.wr_id == 1 {
                    sent += 1;
                    continue;
                }
                received += 1;
                receive();
                if received + u64::from(first) <= MESSAGES {
                    qp.post_send(send()).unwrap();
                }
            }
            if empty {
                sleep(end, &mut state);
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| side(&ends[0], true));
        scope.spawn(|| side(&ends[1], false));
    });
}

/// The thread does not take the CPU from a caller that looks and finds, but takes it from anybody once the caller sleeps.
#[test]
fn look_before_sleep__thread_stands_by_while_callers_find() {
    let options = Options {
        waiting: Some(WaitMode::Interrupted),
        ..Options::default()
    };
    let device = open_with(IpAddr::from([127, 0, 14, 23]), options).unwrap();
    let engine = device.engine();
    until(engine, |core| core.thread_asleep);
    let thread = engine.lock().standby.thread.unwrap();
    let is_batch = || policy(thread).unwrap() == Policy::Batch;
    // A caller that loses its CPU may run out of time before its first look.
    let finds = || {
        let mut looks = 0;
        engine.look_before_sleep(|| {
            looks += 1;
            engine.told.fetch_add(1, Ordering::Relaxed);
            (looks > 1).then_some(())
        })
    };
    let find = || while finds().is_none() {};

    assert!(!is_batch());
    find();
    assert!(is_batch());
    assert_eq!(engine.look_before_sleep(|| None::<()>), None);
    assert!(!is_batch(), "the caller sleeps");

    // The caller does not come back.
    find();
    let deadline = Instant::now() + LONG;
    while is_batch() {
        assert!(Instant::now() < deadline);
        until(engine, |core| core.thread_asleep);
        engine.kick.wake();
    }
}

#[test]
fn acknowledge__completes_the_file_of_a_capture() {
    let pair = Pair::new([127, 0, 67, 9]);
    // A call does nothing while the device's thread is at work.
    pair.take_over();
    let mut file = tempfile::tempfile().unwrap();
    let (done, _told) = UnixDatagram::pair().unwrap();
    let copy = file.try_clone().unwrap().into();
    let capture = Capture::to(copy, done.into(), "device".into(), Filter::default()).unwrap();
    pair.engine().lock().rnic.capture(capture);
    for qpn in 1..=10_000 {
        let core = pair.engine().lock();
        core.rnic
            .show_failed(Qpn::new(qpn), Status::Flushed, Cause::OwnRequest);
    }
    pair.device.acknowledge();
    let mut captured = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut captured).unwrap();
    let last = b"queue pair 10000 ";
    assert!(
        captured.windows(last.len()).any(|text| text == last),
        "{} bytes",
        captured.len()
    );
}
