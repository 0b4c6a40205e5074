//! Pools of completion queues on a device that counts no completions, as those of an RNIC, and whose number of queues is limited.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rdmux_verbs::provider::{self, Provider};
use rdmux_verbs::{
    Arm, AsyncEvent, AttachError, Bind, Carrier, ConnectError, ConnectPair, ConnectParams, Counters, CqPool,
    Cqn, CreateError, Device, DeviceModeration, Features, GetError, Limits, ListenError, McastError, Memory,
    ModerationPolicy, ModifyError, OpenError, Options, PathMtu, PostError, PostListError, QpAttributes,
    QpInfo, QpOptions, QpState, QpType, Qpn, RKey, Reach, RecvRequest, RegionSpec, RegisterError,
    ResizeError, SendFlags, SendRequest, ServiceId, Status, WorkCompletion,
};

/// Completions of the longest queue.
const QUEUE_MAX: u32 = 100;
/// Queues that a device makes.
const QUEUES_MAX: usize = 5;

#[derive(Debug)]
struct Fake;

impl Provider for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn open(&self, _address: IpAddr, _options: &Options) -> Result<Box<dyn provider::Device>, OpenError> {
        let fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|_| OpenError::Unsupported("descriptors"))?;
        Ok(Box::new(FakeDevice {
            queues: Arc::default(),
            fd: Arc::new(fd),
        }))
    }

    fn addresses(&self) -> io::Result<Vec<IpAddr>> {
        Ok(Vec::new())
    }
}

#[derive(Debug)]
struct FakeDevice {
    /// Number of queues that exist.
    queues: Arc<AtomicUsize>,
    fd: Arc<OwnedFd>,
}

impl provider::Device for FakeDevice {
    fn limits(&self) -> Limits {
        Limits {
            completions: Some(QUEUE_MAX),
            ..Limits::ENGINE
        }
    }

    fn features(&self) -> Features {
        Features::empty()
    }

    fn moderation(&self) -> Arc<DeviceModeration> {
        Arc::new(DeviceModeration::new(ModerationPolicy::Off))
    }

    fn completion_vectors(&self) -> u32 {
        1
    }

    fn reach(&self, _memory: &dyn Memory) -> Reach {
        Reach::Direct
    }

    fn alloc_pd(&self) -> Result<Box<dyn provider::ProtectionDomain>, CreateError> {
        Ok(Box::new(FakePd))
    }

    fn create_cq(
        &self,
        _depth: u32,
        _vector: u32,
    ) -> Result<Box<dyn provider::CompletionQueue>, CreateError> {
        if self.queues.load(Ordering::Relaxed) == QUEUES_MAX {
            return Err(CreateError::NoRoom);
        }
        let (queues, fd) = (self.queues.clone(), self.fd.clone());
        let before = queues.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(FakeCq(Cqn(before as u32), queues, fd)))
    }

    fn listen(&self, _: ServiceId, _: &[QpType]) -> Result<Box<dyn provider::Listener>, ListenError> {
        Err(ListenError::Io(io::ErrorKind::Unsupported.into()))
    }

    fn start_connect(
        &self,
        _pair: ConnectPair<'_>,
        _peer: SocketAddr,
        _params: &ConnectParams,
        _private_data: &[u8],
    ) -> Result<Box<dyn provider::Connecting>, ConnectError> {
        Err(ConnectError::Over)
    }

    fn path_mtu_to(&self, _peer: IpAddr) -> io::Result<PathMtu> {
        Ok(self.active_mtu())
    }

    fn active_mtu(&self) -> PathMtu {
        PathMtu::Bytes1024
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }

    fn poll_async_event(&self) -> Option<AsyncEvent> {
        None
    }

    fn async_event_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn wait_async_event(&self, _timeout: Duration) -> Option<AsyncEvent> {
        None
    }

    fn is_active(&self) -> bool {
        true
    }

    fn object_counts(&self) -> (usize, usize, usize) {
        (0, 0, self.queues.load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
struct FakeCq(Cqn, Arc<AtomicUsize>, Arc<OwnedFd>);

impl Drop for FakeCq {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::Relaxed);
    }
}

impl provider::CompletionQueue for FakeCq {
    fn cqn(&self) -> Cqn {
        self.0
    }

    fn poll(&self) -> Option<WorkCompletion> {
        None
    }

    fn poll_many(&self, _max: usize, _into: &mut VecDeque<WorkCompletion>) -> usize {
        0
    }

    fn poll_into(&self, _into: &mut [WorkCompletion]) -> usize {
        0
    }

    fn arm(&self, _arm: Arm) {}

    fn take_event(&self) -> bool {
        false
    }

    fn wait(&self, _timeout: Duration) -> io::Result<Option<WorkCompletion>> {
        Ok(None)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.2.as_fd()
    }

    fn resize(&self, _depth: u32) -> Result<(), ResizeError> {
        Ok(())
    }
}

#[derive(Debug)]
struct FakePd;

impl provider::ProtectionDomain for FakePd {
    fn create_qp(&self, _options: &QpOptions) -> Result<Box<dyn provider::QueuePair>, CreateError> {
        Ok(Box::new(FakeQp))
    }

    fn reg_mr(&self, _spec: RegionSpec) -> Result<Box<dyn provider::MemoryRegion>, RegisterError> {
        Err(RegisterError::Unsupported("regions"))
    }
}

#[derive(Debug)]
struct FakeQp;

impl provider::QueuePair for FakeQp {
    fn qpn(&self) -> Qpn {
        Qpn::new(17)
    }

    fn post_send(&self, _request: SendRequest) -> Result<(), PostError> {
        Ok(())
    }

    fn post_send_list(&self, _requests: Vec<SendRequest>) -> Result<(), PostListError> {
        Ok(())
    }

    fn bind_mw(&self, _wr_id: u64, _bind: Bind, _flags: SendFlags) -> Result<RKey, PostError> {
        Err(PostError::Invalid)
    }

    fn post_recv(&self, _request: RecvRequest) -> Result<(), PostError> {
        Ok(())
    }

    fn modify(&self, _to: QpState, _attributes: &QpAttributes) -> Result<(), ModifyError> {
        Ok(())
    }

    fn retire(&self) {}

    fn query(&self) -> Option<QpInfo> {
        None
    }

    fn carrier(&self) -> Option<Carrier> {
        None
    }

    fn error(&self) -> Option<Status> {
        None
    }

    fn ready_datagram(&self, _qkey: u32) -> Result<(), ModifyError> {
        Ok(())
    }

    fn attach_mcast(&self, _group: IpAddr) -> Result<(), AttachError> {
        Err(AttachError::Refused(McastError::NoQp))
    }

    fn detach_mcast(&self, _group: IpAddr) -> Result<(), McastError> {
        Ok(())
    }
}

fn device() -> Device {
    provider::register(&Fake);
    let options = Options {
        provider: Some("fake"),
        ..Options::default()
    };
    Device::open_with(IpAddr::from([127, 0, 0, 1]), options).unwrap()
}

#[test]
fn get__more_than_a_queue_can_hold_is_refused() {
    let device = device();
    let pool = CqPool::new(vec![device.clone()], CqPool::QUEUE_SIZE_MIN);
    let refused = pool.get(QUEUE_MAX + 1, None).map(drop).unwrap_err();
    assert!(matches!(
        refused,
        GetError::TooMany {
            nr: 101,
            max: QUEUE_MAX
        }
    ));
    assert_eq!(device.object_counts().2, 0, "no queue was made");
    assert_eq!(
        refused.to_string(),
        "101 completions in one queue: the device's queues hold at most 100"
    );
    let share = pool.get(QUEUE_MAX, None).unwrap();
    assert_eq!((share.nr(), pool.usage()[0].size), (QUEUE_MAX, QUEUE_MAX));
}

#[test]
fn with_common__takes_room_of_every_queue() {
    let device = device();
    let pool = CqPool::with_common(vec![device.clone()], 50, 40);
    for nr in [61, u32::MAX] {
        let refused = pool.get(nr, None).map(drop);
        assert!(matches!(refused, Err(GetError::TooMany { .. })));
    }
    assert_eq!(device.object_counts().2, 0, "no queue was made");
    let shares = [60, 10].map(|nr| pool.get(nr, None).unwrap());
    let usage = |at: usize| {
        let queue = pool.usage()[at];
        (queue.used, queue.size, queue.users)
    };
    assert_eq!([usage(0), usage(1)], [(100, 100, 2), (50, 50, 2)]);
    drop(shares);
    assert_eq!([usage(0), usage(1)], [(40, 100, 1), (40, 50, 1)]);
}

#[test]
fn get__an_array_that_cannot_be_made_as_a_whole_is_freed() {
    let device = device();
    let pool = CqPool::new(vec![device.clone(); 3], 10);
    let first = pool.get(10, Some(0)).unwrap();
    let before = pool.usage();
    for _ in 0..3 {
        // Two queues of the array can be made, and not the third one.
        let refused = pool.get(1, Some(0)).map(drop);
        assert!(matches!(refused, Err(GetError::Create(CreateError::NoRoom))));
        assert_eq!(device.object_counts().2, 3);
        assert_eq!(pool.usage(), before);
    }
    assert_eq!(pool.get(10, Some(1)).unwrap().vector(), 1, "the others have room");
    drop(first);
    pool.get(1, Some(0)).unwrap();
}

#[test]
fn create_qp__holds_no_more_requests_than_the_share_where_nobody_counts() {
    let device = device();
    let pool = CqPool::new(vec![device.clone()], 100);
    let share = pool.get(10, None).unwrap();
    let pd = device.alloc_pd().unwrap();
    let create = |sends, receives| {
        pd.create_qp(&QpOptions {
            max_send_wr: sends,
            max_recv_wr: receives,
            ..QpOptions::new(&share)
        })
    };
    let first = create(3, 3).unwrap();
    let refused = create(3, 2).map(drop).unwrap_err();
    let (requests, held, nr) = (2, 9, 10);
    let expected = CreateError::BeyondShare { requests, held, nr };
    assert_eq!(refused.to_string(), expected.to_string());
    let second = create(2, 2).unwrap();
    assert!(create(1, 0).is_err());
    assert!(matches!(share.resize(9), Err(ResizeError::TooShort)));
    share.resize(11).unwrap();
    let third = create(1, 0).unwrap();
    drop((first, third));
    create(7, 0).unwrap();
    drop(second);
    create(11, 0).unwrap();
    assert!(
        share
            .user()
            .is_err_and(|error| error.kind() == io::ErrorKind::Unsupported)
    );
}
