//! Provider `hw` with this library as the system's: what it asks of `libibverbs` is then to be had on every host. A device of both kinds
//! is in one process; the one that is tested opens the other at run time, as it opens the system's.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path as FilePath, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rdmux_verbs::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// What the provider takes its libraries from.
const LIBRARIES: &str = "RDMUX_HW_LIBRARIES";
const ADDRESS: &str = "127.0.0.22";
const LONG: Duration = Duration::from_secs(20);

/// The library as this build makes it: `cargo test` makes none, since no test can be linked to it.
fn library() -> &'static FilePath {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let own = std::env::current_exe().unwrap();
        let profile = own.parent().and_then(FilePath::parent).unwrap();
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "build",
            "--quiet",
            "--locked",
            "--offline",
            "-p",
            env!("CARGO_PKG_NAME"),
        ]);
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.arg("--target-dir").arg(profile.parent().unwrap());
        assert!(cargo.status().unwrap().success());
        profile.join("libibverbs.so")
    })
}

/// Runs a test in a process of its own, whose system has this library.
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
    // A name that no test has would succeed as well.
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}

fn device() -> Device {
    let address: IpAddr = ADDRESS.parse().unwrap();
    let options = Options {
        provider: Some(Provider::Hw),
        ..Options::default()
    };
    Device::open_with(address, options).unwrap()
}

/// A queue pair, and what it is made of.
struct End {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    buffer: Arc<AnonymousMemory>,
    mr: MemoryRegion,
}

impl End {
    fn new(device: &Device) -> End {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(256).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let buffer = Arc::new(AnonymousMemory::new(1 << 16).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::MW_BIND;
        let mr = pd.reg_mr_all(buffer.clone(), 0, access).unwrap();
        End {
            pd,
            cq,
            qp,
            buffer,
            mr,
        }
    }

    /// Brings it up towards another, by address.
    fn bring_up(&self, peer: &End) {
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

fn pair() -> (Device, End, End) {
    let device = device();
    let [a, b] = [End::new(&device), End::new(&device)];
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
        let folder = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
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
        // The device's own FLUSH would end in the page cache.
        let persistent =
            b.pd.reg_mr_all(memory.clone(), 0, access | Access::FLUSH_PERSISTENT);
        assert!(persistent.is_err());

        // Shortened: an error of the request, and no signal here.
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
        // What this provider does not have it says.
        for lacks in [Features::CQ_MODERATION, Features::CQ_TIMES] {
            assert!(!device.features().contains(lacks));
        }
        assert!(a.cq.moderate(None).is_err() && a.cq.keep_times().is_err());
    });
}
