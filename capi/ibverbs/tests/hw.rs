//! Provider `hw` with this library in the place of the system's: everything that the provider asks of `libibverbs` is then
//! available on every host. One process has a device of each kind; the provider under test opens the other at run time, as it
//! opens the system's.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path as FilePath, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rdmux_memory::{AnonymousMemory, FileMemory};
use rdmux_verbs::resources::{DeviceAt, Item, Object, Setting, ask, devices, rnics};
use rdmux_verbs::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Variable that names the folder of the provider's libraries.
const LIBRARIES: &str = "RDMUX_HW_LIBRARIES";
const ADDRESS: &str = "127.0.0.22";
const LONG: Duration = Duration::from_secs(60);

/// Returns the library of this profile. `cargo test` makes none, since no test can be linked to it; `cargo build` has to run
/// before.
fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let profile = own.parent().and_then(FilePath::parent).unwrap();
    let library = profile.join("libibverbs.so");
    let made = |file: &FilePath| fs::metadata(file).and_then(|meta| meta.modified());
    let build = format!("cargo build -p {} makes it", env!("CARGO_PKG_NAME"));
    let built = made(&library).unwrap_or_else(|error| panic!("{}: {error}: {build}", library.display()));
    // Beside it, Cargo lists its sources: "library: source source".
    let sources = fs::read_to_string(library.with_extension("d")).unwrap();
    for source in sources.lines().flat_map(|line| line.split(' ').skip(1)) {
        let newer = made(FilePath::new(source)).is_ok_and(|changed| changed > built);
        assert!(!newer, "{} is older than {source}: {build}", library.display());
    }
    library
}

/// Runs a test in a process of its own, whose system library is this one.
fn with_the_library(name: &str, test: impl FnOnce()) {
    if std::env::var_os(LIBRARIES).is_some() {
        return test();
    }
    let folder = tempfile::tempdir().unwrap();
    for system in ["libibverbs.so.1", "librdmacm.so.1"] {
        symlink(library(), folder.path().join(system)).unwrap();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(LIBRARIES, folder.path())
        .env("RDMUX_DEVICES", ADDRESS)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    // A name that no test has would succeed, too.
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}

fn device() -> Device {
    let address: IpAddr = ADDRESS.parse().unwrap();
    rdmux_hw::register();
    let options = Options {
        provider: Some("hw"),
        ..Options::default()
    };
    Device::open_with(address, options).unwrap()
}

/// A queue pair and the objects that it is made of.
struct HwEnd {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    buffer: Arc<AnonymousMemory>,
    mr: MemoryRegion,
}

impl HwEnd {
    fn new(device: &Device) -> HwEnd {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(256).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let buffer = Arc::new(AnonymousMemory::new(1 << 16).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::MW_BIND;
        let mr = pd.reg_mr_all(buffer.clone(), 0, access).unwrap();
        HwEnd {
            pd,
            cq,
            qp,
            buffer,
            mr,
        }
    }

    /// Brings it up, connected to another, by address.
    fn bring_up(&self, peer: &HwEnd) {
        let address: IpAddr = ADDRESS.parse().unwrap();
        let init = QpAttributes {
            access: Some(Access::REMOTE_WRITE | Access::REMOTE_READ),
            ..QpAttributes::default()
        };
        let rtr = QpAttributes {
            path: Some(Path {
                src: address,
                dst: address,
                src_port: 0,
                traffic_class: 0,
            }),
            path_mtu: Some(1024),
            dest_qpn: Some(peer.qp.qpn()),
            rq_psn: Some(Psn::new(7)),
            max_dest_rd_atomic: Some(4),
            min_rnr_timer: Some(12),
            ..QpAttributes::default()
        };
        let rts = QpAttributes {
            sq_psn: Some(Psn::new(7)),
            max_rd_atomic: Some(4),
            timeout: Some(14),
            retry_count: Some(7),
            rnr_retry: Some(7),
            ..QpAttributes::default()
        };
        self.qp.modify(QpState::Init, &init).unwrap();
        self.qp.modify(QpState::Rtr, &rtr).unwrap();
        self.qp.modify(QpState::Rts, &rts).unwrap();
    }

    fn write(&self, wr_id: u64, length: u32, va: u64, rkey: RKey) -> SendRequest {
        SendRequest {
            wr_id,
            operation: Operation::Write { va, rkey, imm: None },
            sges: self.mr.sge(0, length).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        }
    }

    fn next(&self) -> WorkCompletion {
        self.cq.wait(LONG).unwrap().expect("a completion")
    }
}

fn pair() -> (Device, HwEnd, HwEnd) {
    let device = device();
    let [a, b] = [HwEnd::new(&device), HwEnd::new(&device)];
    a.bring_up(&b);
    b.bring_up(&a);
    (device, a, b)
}

fn file_of(folder: &FilePath, bytes: u64) -> (PathBuf, Arc<FileMemory>) {
    let path = folder.join("file");
    let memory = FileMemory::open(&path, Some(bytes), false).unwrap();
    (path, Arc::new(memory))
}

#[test]
fn reg_mr__of_a_file_where_the_device_pages_on_demand() {
    with_the_library("reg_mr__of_a_file_where_the_device_pages_on_demand", || {
        let (device, a, b) = pair();
        assert!(device.features().contains(Features::ON_DEMAND));
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // Not whole pages.
        let (path, memory) = file_of(folder.path(), 9000);
        assert_eq!(device.reach(&*memory), Reach::OnDemand);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = b.pd.reg_mr_all(memory.clone(), 0, access).unwrap();
        a.buffer.write(0, b"over a page").unwrap();
        a.qp.post_send(a.write(1, 11, 4090, mr.rkey())).unwrap();
        assert_eq!(a.next().status, Status::Success);
        memory
            .flush(4090, 11, Placement::GLOBAL | Placement::PERSISTENT)
            .unwrap();
        assert_eq!(&fs::read(&path).unwrap()[4090..4101], b"over a page");
        // The device's own FLUSH would reach no further than the page cache.
        let persistent =
            b.pd.reg_mr_all(memory.clone(), 0, access | Access::FLUSH_PERSISTENT);
        assert!(persistent.is_err());

        // A shortened file: the request fails, and this process gets no signal.
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(0)
            .unwrap();
        a.qp.post_send(a.write(2, 11, 4090, mr.rkey())).unwrap();
        assert_ne!(a.next().status, Status::Success);
        assert!(memory.flush(4090, 11, Placement::PERSISTENT).is_err());
    });
}

#[test]
fn reg_mr__of_a_file_that_is_only_read() {
    with_the_library("reg_mr__of_a_file_that_is_only_read", || {
        let (_device, a, b) = pair();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "what stands there").unwrap();
        let memory = Arc::new(FileMemory::open(&path, None, true).unwrap());
        let mr = b.pd.reg_mr_all(memory, 0, Access::REMOTE_READ).unwrap();
        let read = SendRequest {
            operation: Operation::Read {
                va: 5,
                rkey: mr.rkey(),
            },
            ..a.write(1, 12, 0, mr.rkey())
        };
        a.qp.post_send(read).unwrap();
        assert_eq!(a.next().status, Status::Success);
        let mut found = [0; 12];
        a.buffer.read(0, &mut found).unwrap();
        assert_eq!(&found, b"stands there");
        a.qp.post_send(a.write(2, 1, 0, mr.rkey())).unwrap();
        assert_eq!(a.next().status, Status::RemoteAccess);
        assert_eq!(fs::read(&path).unwrap(), b"what stands there");
    });
}

#[test]
fn resize__of_a_completion_queue() {
    with_the_library("resize__of_a_completion_queue", || {
        let (device, a, b) = pair();
        for wr_id in 0..3 {
            a.cq.arm(Arm::Next);
            a.qp.post_send(a.write(wr_id, 1, 0, b.mr.rkey())).unwrap();
            let timeout = Timespec::try_from(LONG).unwrap();
            let mut told = [PollFd::new(&a.cq, PollFlags::IN)];
            assert_eq!(poll(&mut told, Some(&timeout)), Ok(1));
        }
        assert!(matches!(a.cq.resize(2), Err(ResizeError::TooShort)));
        a.cq.resize(3).unwrap();
        for wr_id in 0..3 {
            assert_eq!(a.next().wr_id, wr_id);
        }
        // The provider's feature flags leave out what it does not have.
        assert!(!device.features().contains(Features::CQ_TIMES));
        assert!(a.cq.keep_times().is_err());
    });
}

/// More completions than the provider takes from the library at a time.
#[test]
fn poll_into__fills_the_slice_in_order() {
    with_the_library("poll_into__fills_the_slice_in_order", || {
        let (_device, a, b) = pair();
        let remote = b.mr.remote(..8).unwrap();
        let local = a.mr.slice(..8).unwrap();
        for wr_id in 0..40 {
            let request = SendRequest::write(local, remote).wr_id(wr_id).signaled();
            a.qp.post_send(request).unwrap();
        }
        let begin = Instant::now();
        let mut taken = [WorkCompletion::default(); 35];
        let mut ids = Vec::new();
        while ids.len() < 40 {
            assert!(begin.elapsed() < LONG, "{ids:?}");
            let count = a.cq.poll_into(&mut taken);
            ids.extend(taken[..count].iter().map(|wc| (wc.wr_id, wc.status)));
        }
        let expected: Vec<_> = (0..40).map(|wr_id| (wr_id, Status::Success)).collect();
        assert_eq!(ids, expected);
    });
}

#[test]
fn limits__are_those_that_the_library_reports() {
    with_the_library("limits__are_those_that_the_library_reports", || {
        let limits = device().limits();
        assert_eq!(
            (limits.queue_pairs, limits.shared_receive_queues),
            (1 << 15, 1 << 15)
        );
        assert_eq!(
            (limits.work_requests, limits.completions),
            (Some(1 << 14), Some(1 << 20))
        );
        assert_eq!(
            (limits.sges, limits.inline_bytes),
            (SGE_MAX as u32, INLINE_BYTES_MAX as u32)
        );
        assert_eq!((limits.memory_regions, limits.message_bytes), (1 << 16, 1 << 31));
        assert_eq!(limits.mcast_groups as usize, MCAST_GROUPS_MAX);
        assert_eq!(limits.mcast_queue_pairs as usize, MCAST_QPS_MAX);
    });
}

#[test]
fn post_send_list__is_posted_up_to_the_first_that_is_refused() {
    with_the_library(
        "post_send_list__is_posted_up_to_the_first_that_is_refused",
        || {
            let (_device, a, b) = pair();
            let write = |wr_id| a.write(wr_id, 8, 64 * wr_id, b.mr.rkey());
            a.buffer.write(0, b"in order").unwrap();
            a.qp.post_send_list((0..40).map(write)).unwrap();
            for wr_id in 0..40 {
                let wc = a.next();
                assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Success));
                let mut found = [0; 8];
                b.buffer.read(64 * wr_id, &mut found).unwrap();
                assert_eq!(&found, b"in order");
            }

            // Lists with a request that is invalid by itself, and with one too many for the queue.
            let datagram = SendRequest {
                to: Target::Srq(Srqn(1)),
                ..write(3)
            };
            let refused =
                a.qp.post_send_list([write(0), write(1), write(2), datagram, write(4)]);
            assert_eq!(refused.unwrap_err().index, 3);
            for wr_id in 0..3 {
                assert_eq!(a.next().wr_id, wr_id);
            }
            let silent = |wr_id| SendRequest {
                operation: Operation::Send { imm: None },
                ..write(wr_id)
            };
            // The peer has no receive for them, so they stay in the queue.
            let full = a.qp.post_send_list((0..4096).map(silent)).unwrap_err();
            assert_eq!(full.source, PostError::QueueFull);
            assert!(full.index >= 100, "{full:?}");
            for wr_id in 0..full.index as u64 {
                let receive = RecvRequest {
                    wr_id,
                    sges: b.mr.sge(0, 64).into(),
                };
                b.qp.post_recv(receive).unwrap();
                assert_eq!((b.next().wr_id, a.next().wr_id), (wr_id, wr_id));
            }
            assert_eq!(a.cq.poll(), None);

            let idle = HwEnd::new(&device());
            let early = idle.qp.post_send_list([write(0)]).unwrap_err();
            assert_eq!((early.index, early.source), (0, PostError::WrongState));
        },
    );
}

#[test]
fn wait__of_two_where_one_takes_the_event_of_both() {
    with_the_library("wait__of_two_where_one_takes_the_event_of_both", || {
        let (_device, a, b) = pair();
        for round in 0..200 {
            thread::scope(|scope| {
                let waiting = [0, 1].map(|_| scope.spawn(|| a.next().wr_id));
                let write = |wr_id| a.write(wr_id, 8, 0, b.mr.rkey());
                a.qp.post_send_list([write(2 * round), write(2 * round + 1)])
                    .unwrap();
                let mut found = waiting.map(|thread| thread.join().unwrap());
                found.sort_unstable();
                assert_eq!(found, [2 * round, 2 * round + 1]);
            });
        }
    });
}

#[test]
fn drop__of_a_region_that_others_bind_windows_to() {
    with_the_library("drop__of_a_region_that_others_bind_windows_to", || {
        let (device, a, b) = pair();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::MW_BIND;
        for _ in 0..200 {
            let mr = a.pd.reg_mr_all(a.buffer.clone(), 0, access).unwrap();
            let window = a.pd.alloc_mw(WindowType::Two).unwrap();
            let bind = SendRequest {
                operation: Operation::Bind(Bind {
                    window: window.rkey().next(),
                    region: mr.lkey(),
                    va: 0,
                    length: 64,
                    access: Access::REMOTE_WRITE,
                }),
                sges: SgeList::EMPTY,
                ..a.write(1, 0, 0, b.mr.rkey())
            };
            let posted = thread::scope(|scope| {
                let binding = scope.spawn(|| a.qp.post_send(bind));
                drop(mr);
                binding.join().unwrap()
            });
            if posted.is_err() {
                // The region had ended; the queue pair goes on.
                assert_eq!(posted, Err(PostError::Invalid));
            } else if a.next().status != Status::Success {
                // The region ended in between: that ends the queue pair too, as with any request for a region that does not
                // exist.
                break;
            }
        }
        let (_, regions, _) = device.object_counts();
        assert_eq!(regions, 2);
    });
}

#[test]
fn rereg__other_memory_in_another_domain() {
    with_the_library("rereg__other_memory_in_another_domain", || {
        let (device, one, mut other) = pair();
        let (before, write) = (other.mr.rkey(), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let elsewhere = device.alloc_pd().unwrap();
        let memory = Arc::new(AnonymousMemory::new(1 << 16).unwrap());
        // A region with windows cannot be changed.
        let window = other.pd.alloc_mw(WindowType::One).unwrap();
        let bound = other.qp.bind_mw(
            7,
            &window,
            &other.mr,
            0..4096,
            Access::REMOTE_WRITE,
            SendFlags::SIGNALED,
        );
        bound.unwrap();
        assert_eq!(other.next().status, Status::Success);
        let bound = other.mr.rereg_in(&elsewhere, memory.clone(), 0, 4096, 0, write);
        assert!(matches!(bound, Err(RegisterError::WindowsBound)), "{bound:?}");
        drop(window);
        other.mr.rereg(memory.clone(), 0, 4096, 0, write).unwrap();
        // The previous key no longer reaches the region, and the current one reaches its current memory.
        one.buffer.write(0, b"anew").unwrap();
        one.qp.post_send(one.write(1, 4, 0, other.mr.rkey())).unwrap();
        assert_eq!(one.next().status, Status::Success);
        let mut found = [0; 4];
        memory.read(0, &mut found).unwrap();
        assert_eq!(&found, b"anew");
        assert_ne!(other.mr.rkey(), before);
        one.qp.post_send(one.write(2, 4, 0, before)).unwrap();
        assert_eq!(one.next().status, Status::RemoteAccess);
        // In another domain than its queue pair's, the region is out of reach.
        other.mr.rereg_in(&elsewhere, memory, 0, 4096, 0, write).unwrap();
        assert_eq!(other.mr.length(), 4096);
    });
}

/// One thread has both ends.
#[test]
fn start_connect__is_reported_by_events() {
    with_the_library("start_connect__is_reported_by_events", || {
        const LISTENER: u64 = 1;
        const CONNECTING: u64 = 2;
        const ACCEPTED: u64 = 3;
        const LONG: Duration = Duration::from_secs(60);
        let device = device();
        let [asking, asked] = [(); 2].map(|()| HwEnd::new(&device));
        let events = EventQueue::new().unwrap();
        let listener = device.listen(7174).unwrap();
        listener.notify(&events, LISTENER);
        let peer = (ADDRESS.parse::<IpAddr>().unwrap(), 7174).into();
        let start = || {
            let pair = ConnectPair::Own(&asking.qp);
            let connecting = device.start_connect(pair, peer, &ConnectParams::default(), b"hello");
            let connecting = connecting.unwrap();
            connecting.notify(&events, CONNECTING);
            connecting
        };
        // The events of the way to the peer are those of the attempt, which moves on only when it is asked.
        let until_request = |connecting: &mut Connecting| loop {
            match events.wait(LONG).unwrap() {
                LISTENER => match listener.accept(Duration::ZERO) {
                    Some(request) => return request,
                    None => continue,
                },
                token => assert_eq!(token, CONNECTING),
            }
            assert!(connecting.poll().is_none());
        };
        let result_of = |mut connecting: Connecting| loop {
            if let Some(result) = connecting.poll() {
                return result;
            }
            events.wait(LONG).unwrap();
        };

        let mut refused = start();
        until_request(&mut refused).reject(b"no");
        let refused = result_of(refused);
        assert!(
            matches!(&refused, Err(ConnectError::Rejected { private_data, .. }) if private_data.starts_with(b"no")),
            "{refused:?}"
        );

        let mut connecting = start();
        let request = until_request(&mut connecting);
        assert!(request.private_data().starts_with(b"hello"));
        let accepted = request
            .accept(&asked.qp, &ConnectParams::default(), b"yes")
            .unwrap();
        accepted.notify(&events, ACCEPTED);
        let connection = result_of(connecting).unwrap();
        assert!(connection.private_data().starts_with(b"yes"));
        while accepted.progress().established.is_none() {
            events.wait(LONG).unwrap();
        }
        connection.disconnect();
        while !(accepted.is_ended() && connection.is_ended()) {
            events.wait(LONG).unwrap();
        }

        // Nobody serves datagrams there.
        let mut resolving = device.start_resolve(0, peer, b"").unwrap();
        resolving.notify(&events, CONNECTING);
        let found = loop {
            if let Some(found) = resolving.poll() {
                break found;
            }
            events.wait(LONG).unwrap();
        };
        assert!(matches!(found, Err(ResolveError::Refused { .. })), "{found:?}");
    });
}

#[test]
fn what_the_system_does_not_have__is_said_before_it_is_used() {
    with_the_library("what_the_system_does_not_have__is_said_before_it_is_used", || {
        let device = device();
        assert!(!device.features().contains(Features::CONNECT_ANY));
        let said = device
            .listen_for(7174, &[QpType::Rc, QpType::Uc])
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("does not offer connections of UC and XRC by address"),
            "{said}"
        );
        let end = HwEnd::new(&device);
        let uc = QpOptions {
            qp_type: QpType::Uc,
            ..QpOptions::new(&end.cq)
        };
        let uc = end.pd.create_qp(&uc).unwrap();
        let peer = (ADDRESS.parse::<IpAddr>().unwrap(), 7174).into();
        let said = device
            .connect(&uc, peer, &ConnectParams::default(), &[])
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("does not offer connections of UC and XRC by address"),
            "{said}"
        );
    });
}

#[test]
fn ask__what_this_process_has_on_an_rnic() {
    with_the_library("ask__what_this_process_has_on_an_rnic", || {
        let (_device, a, b) = pair();
        let address: IpAddr = ADDRESS.parse().unwrap();
        match &told(Object::Device)[..] {
            [Item::Device(device)] => {
                let counts = device.counts;
                assert_eq!((counts.pds, counts.cqs, counts.mrs, counts.qps), (2, 2, 2, 2));
                assert!(device.active);
            }
            other => panic!("{other:?}"),
        }
        let qps = told(Object::Qp);
        for (own, peer) in [(&a, &b), (&b, &a)] {
            let is_it = |item: &&Item| matches!(item, Item::Qp(qp) if qp.qpn == own.qp.qpn());
            let Some(Item::Qp(qp)) = qps.iter().find(is_it) else {
                panic!("{qps:?}");
            };
            assert_eq!(
                (qp.qp_type, qp.state, qp.path_mtu),
                (QpType::Rc, QpState::Rts, 1024)
            );
            assert_eq!(
                (qp.peer, &qp.carrier),
                (Some((address, peer.qp.qpn())), &Some(Carrier::Rnic))
            );
            assert_eq!((qp.send_cqn, qp.recv_cqn), (own.cq.cqn().0, own.cq.cqn().0));
        }
        let keys: Vec<u32> = told(Object::Mr)
            .iter()
            .map(|item| match item {
                Item::Mr(mr) => mr.rkey,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(
            keys.contains(&a.mr.rkey().0) && keys.contains(&b.mr.rkey().0),
            "{keys:x?}"
        );
        drop(a);
        assert_eq!(
            (
                told(Object::Qp).len(),
                told(Object::Mr).len(),
                told(Object::Cq).len()
            ),
            (1, 1, 1)
        );
        assert_eq!((told(Object::Pd).len(), told(Object::Srq).len()), (1, 0));
    });
}

/// Returns what processes that ask learn of this process's device, without other devices of this host.
fn told(object: Object) -> Vec<Item> {
    told_at(object).1
}

/// Asks for what this process has; other tests' processes use the same address.
fn told_at(object: Object) -> (DeviceAt, Vec<Item>) {
    let address: IpAddr = ADDRESS.parse().unwrap();
    let places: Vec<DeviceAt> = rnics().into_iter().filter(|at| at.address == address).collect();
    let own = |told: &resources::Told| told.pid == Some(std::process::id());
    let told = ask(&places, object, LONG).into_iter();
    let mut told = told.filter_map(|(at, told)| Some((at, told.ok().filter(own)?)));
    let (at, told) = told.next().expect("an answer");
    (at, told.items)
}

#[test]
fn create_cq_on__a_vector_of_the_library() {
    with_the_library("create_cq_on__a_vector_of_the_library", || {
        let device = device();
        let count = device.completion_vectors();
        let cq = device.create_cq_on(4, count - 1).unwrap();
        let refused = device.create_cq_on(4, count).map(drop);
        assert!(
            matches!(refused, Err(CreateError::NoVector { .. })),
            "{refused:?}"
        );
        match &told(Object::Cq)[..] {
            [Item::Cq(shown)] => assert_eq!((shown.cqn, shown.vector), (cq.cqn(), count - 1)),
            other => panic!("{other:?}"),
        }
        let below = queues_below();
        assert!(below.iter().any(|cq| cq.vector == count - 1), "{below:?}");
    });
}

/// Returns the completion queues of the soft device of this process below its library.
fn queues_below() -> Vec<CqDetail> {
    let address: IpAddr = ADDRESS.parse().unwrap();
    let below: Vec<DeviceAt> = devices().into_iter().filter(|at| at.address == address).collect();
    let answers = ask(&below, Object::Cq, LONG).into_iter();
    let own = answers.filter_map(|(_, told)| told.ok().filter(|told| told.pid == Some(std::process::id())));
    let queues = own.flat_map(|told| told.items).map(|item| match item {
        Item::Cq(cq) => cq,
        other => panic!("{other:?}"),
    });
    queues.collect()
}

#[test]
fn moderate__is_passed_to_the_library() {
    with_the_library("moderate__is_passed_to_the_library", || {
        let (device, a, b) = pair();
        assert!(device.features().contains(Features::CQ_MODERATION));
        let moderation = Moderation {
            count: 3,
            period_us: u16::MAX,
        };
        a.cq.moderate(ModerationPolicy::Fixed(moderation)).unwrap();
        let below = queues_below();
        let has_it = |cq: &CqDetail| cq.moderation.moderation == Some(moderation);
        assert_eq!(below.iter().filter(|cq| has_it(cq)).count(), 1, "{below:?}");
        let shown = |cqn: Cqn| {
            let cqs = told(Object::Cq).into_iter().find_map(|item| match item {
                Item::Cq(cq) if cq.cqn == cqn => Some(cq.moderation),
                _ => None,
            });
            cqs.unwrap()
        };
        let is_told = || {
            let timeout = Timespec::try_from(LONG).unwrap();
            poll(&mut [PollFd::new(&a.cq, PollFlags::IN)], Some(&timeout)) == Ok(1)
        };
        for round in 1..=3 {
            a.cq.arm(Arm::Next);
            for wr_id in 0..3 {
                a.qp.post_send(a.write(wr_id, 1, 0, b.mr.rkey())).unwrap();
            }
            assert!(is_told());
            for wr_id in 0..3 {
                assert_eq!(a.next().wr_id, wr_id);
            }
            assert!(a.cq.take_event());
            let expected = CqModeration {
                kind: ModerationKind::Fixed,
                moderation: Some(moderation),
                changes: 0,
                events: round,
                taken: 3 * round,
            };
            assert_eq!(shown(a.cq.cqn()), expected);
        }
        a.cq.moderate(ModerationPolicy::Off).unwrap();
        assert!(!queues_below().iter().any(has_it));

        // The other queue has its device's policy, which others change.
        let (at, _) = told_at(Object::Device);
        resources::set(at, Setting::Moderation(ModerationPolicy::ADAPTIVE), LONG).unwrap();
        match &told(Object::Device)[..] {
            [Item::Device(device)] => assert_eq!(device.moderation, Some(ModerationPolicy::ADAPTIVE)),
            other => panic!("{other:?}"),
        }
        b.cq.arm(Arm::Next);
        a.cq.arm(Arm::Next);
        assert_eq!(b.cq.moderation().0, ModerationPolicy::ADAPTIVE);
        assert_eq!(a.cq.moderation().0, ModerationPolicy::Off);
        assert_eq!(shown(b.cq.cqn()).kind, ModerationPolicy::ADAPTIVE.kind());
    });
}

#[test]
fn ask__more_than_a_page_has_room_for() {
    with_the_library("ask__more_than_a_page_has_room_for", || {
        let device = device();
        let cq = device.create_cq(16).unwrap();
        let pds: Vec<ProtectionDomain> = (0..600).map(|_| device.alloc_pd().unwrap()).collect();
        let qps: Vec<QueuePair> = pds
            .iter()
            .take(300)
            .map(|pd| pd.create_qp(&QpOptions::new(&cq)).unwrap())
            .collect();
        let users = told(Object::Pd).into_iter().map(|item| match item {
            Item::Pd(pd) => pd.users,
            other => panic!("{other:?}"),
        });
        let users: Vec<u32> = users.collect();
        assert_eq!((users.len(), users.iter().sum::<u32>()), (600, 300));
        let found = told(Object::Qp).into_iter().map(|item| match item {
            Item::Qp(qp) => qp.qpn,
            other => panic!("{other:?}"),
        });
        let mut expected: Vec<Qpn> = qps.iter().map(QueuePair::qpn).collect();
        expected.sort_by_key(|qpn| qpn.value());
        assert_eq!(found.collect::<Vec<_>>(), expected);
        match &told(Object::Cq)[..] {
            [Item::Cq(cq)] => assert_eq!(cq.users, 300),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn ask__process_without_a_descriptor_left() {
    with_the_library("ask__process_without_a_descriptor_left", || {
        let _device = device();
        let deadline = Instant::now() + LONG;
        // A thread names itself once it runs.
        let answering = loop {
            let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
            let named = |thread: &PathBuf| {
                fs::read_to_string(thread.join("comm")).is_ok_and(|name| name.trim() == "rdmux-res")
            };
            if let Some(thread) = threads.map(|thread| thread.path()).find(named) {
                break thread;
            }
            assert!(Instant::now() < deadline, "nobody answers");
        };
        let state = File::open(answering.join("stat")).unwrap();
        let (at, _) = told_at(Object::Device);
        let name = format!("rdmux-4791-{}-slot-{}", at.address, at.slot);
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let before = getrlimit(Resource::Nofile);
        let few = Rlimit {
            current: Some(128),
            ..before
        };
        setrlimit(Resource::Nofile, few).unwrap();
        let filling: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        connect(&socket, &name).unwrap();
        // The thread was woken, and sleeps again although a client waits to be accepted.
        let is_asleep = || {
            let mut text = [0; 512];
            let len = state.read_at(&mut text, 0).unwrap();
            String::from_utf8_lossy(&text[..len]).contains("(rdmux-res) S")
        };
        while !is_asleep() {
            assert!(Instant::now() < deadline, "it never sleeps");
        }
        drop(filling);
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(matches!(told(Object::Device)[..], [Item::Device(_)]));
    });
}
