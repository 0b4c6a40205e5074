//! A node and applications that keep to nothing.

#[path = "../../tests/common/hostile.rs"]
mod hostile;

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hostile::{Corpus, Dice};
use rdmux_memory::mapping::sealed_file;
use rdmux_verbs::Options;
use rdmux_wire::node::control::{Attributes, Kind, Message, QpState, QpType, VERSION};
use rdmux_wire::node::{Completion, CompletionStatus, Element, QueueId, Work, WorkData, WorkFlags};
use rdmux_wire::node::{DESCRIPTOR_BYTES, WorkOperation};
use rustix::event::{PollFd, PollFlags, poll};

use super::worker::Source;
use super::*;
use crate::control::Received;
use crate::ring::{ApplicationEnd, Files, Layout};

const LONG: Duration = Duration::from_secs(30);

/// A node in a thread, until it is dropped.
pub(super) struct Served {
    pub(super) address: IpAddr,
    device: Device,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Served {
    fn new(number: u8) -> Served {
        Served::with(number, None)
    }

    /// Shares queue pairs with nodes that have a key.
    pub(super) fn with_key(number: u8, key: Key) -> Served {
        Served::serve(number, |device| {
            Node::open_with(
                device,
                NodeOptions {
                    key: Some(key),
                    ..NodeOptions::default()
                },
            )
        })
    }

    /// Serves the tenants of a configuration.
    fn with(number: u8, config: Option<Config>) -> Served {
        Served::serve(number, |device| {
            Node::open_with(
                device,
                NodeOptions {
                    config,
                    ..NodeOptions::default()
                },
            )
        })
    }

    fn serve(number: u8, open: impl FnOnce(Device) -> Result<Node, NodeError>) -> Served {
        rdmux_soft::register();
        let address = IpAddr::from([127, 0, 53, number]);
        let options = Options {
            provider: Some("soft"),
            ..Options::default()
        };
        let device = Device::open_with(address, options).unwrap();
        let node = open(device.clone()).unwrap();
        let stopper = node.stopper();
        let thread = thread::spawn(move || node.run().unwrap());
        Served {
            address,
            device,
            stopper,
            thread: Some(thread),
        }
    }

    fn connect(&self) -> Raw {
        Raw {
            channel: Channel::new(crate::place::attach(self.address).unwrap()),
            end: None,
        }
    }

    pub(super) fn attach(&self) -> Raw {
        let mut raw = self.connect();
        let attached = raw.ask_with(&attach(VERSION), None);
        let files = <[OwnedFd; Files::COUNT]>::try_from(attached.descriptors).unwrap();
        let Message::Attached {
            submission_slots,
            completion_slots,
            ..
        } = attached.message
        else {
            panic!("{:?}", attached.message);
        };
        let layout = Layout::new(1, submission_slots, 1, completion_slots).unwrap();
        raw.end = Some(ApplicationEnd::attach(layout, Files::from_fds(files)).unwrap());
        raw
    }

    fn wait_until_empty(&self) {
        let deadline = Instant::now() + LONG;
        while self.device.object_counts() != (0, 0, 0) {
            assert!(Instant::now() < deadline, "{:?}", self.device.object_counts());
            thread::yield_now();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn attach(version: u16) -> Message {
    Message::Attach {
        version_min: version,
        version_max: version,
        name: "raw".into(),
    }
}

/// An application that sends what it likes.
pub(super) struct Raw {
    pub(super) channel: Channel,
    end: Option<ApplicationEnd>,
}

impl Raw {
    pub(super) fn receive(&mut self) -> Option<Received> {
        loop {
            match self.channel.receive() {
                Ok(Some(received)) => return Some(received),
                Ok(None) => {
                    let mut fds = [PollFd::new(&self.channel, PollFlags::IN)];
                    let timeout = LONG.try_into().unwrap();
                    assert_eq!(poll(&mut fds, Some(&timeout)), Ok(1), "the node is silent");
                }
                Err(_) => return None,
            }
        }
    }

    pub(super) fn ask_with(&mut self, message: &Message, file: Option<&OwnedFd>) -> Received {
        let file: Vec<BorrowedFd<'_>> = file.iter().map(|file| file.as_fd()).collect();
        self.channel.send_with(7, message, &file).unwrap();
        loop {
            let received = self.receive().expect("an answer");
            if received.request == 7 {
                return received;
            }
        }
    }

    pub(super) fn ask(&mut self, message: &Message) -> Message {
        self.ask_with(message, None).message
    }

    pub(super) fn made(&mut self, message: &Message) -> u32 {
        match self.ask(message) {
            Message::Made { id } | Message::QpMade { id, .. } => id,
            other => panic!("{other:?}"),
        }
    }

    fn refused(&mut self, message: &Message) -> ErrorCode {
        match self.ask(message) {
            Message::Error { code, .. } => code,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the node has detached it; returns the reason.
    fn detached(&mut self) -> String {
        let mut why = String::new();
        while let Some(received) = self.receive() {
            if let Message::Error { text, .. } = received.message {
                why = text;
            }
        }
        why
    }

    fn qp(&mut self) -> u32 {
        let pd = self.made(&Message::AllocPd {});
        self.made(&create_qp(pd))
    }

    fn is_served(&mut self) {
        assert_eq!(
            self.ask(&Message::CountObjects {}).name(),
            "Objects",
            "another application is served as before"
        );
    }

    fn submit(&self, works: &[Work]) {
        let end = self.end.as_ref().unwrap();
        let mut producer = end.submission(0);
        for work in works {
            let element = Element {
                addr: 0,
                lkey: rdmux_verbs::LKey(0x1234_5678),
                length: 64,
            };
            producer
                .push_work(work, |work, bytes| work.put_elements(bytes, &[element]))
                .unwrap();
        }
        end.tell(0, producer.publish());
    }
}

pub(super) fn create_qp(pd: u32) -> Message {
    Message::CreateQp {
        pd,
        qp_type: QpType::Rc,
        max_send_wr: 16,
        max_recv_wr: 16,
        srq: None,
        replays_writes: false,
    }
}

fn work(qp: u32, operation: WorkOperation) -> Work {
    Work {
        queue: QueueId(qp),
        wr_id: 5,
        flags: WorkFlags::empty(),
        operation,
        data: WorkData::Elements(1),
    }
}

/// Returns a datagram by no address handle.
fn datagram(qp: u32) -> Work {
    let to = rdmux_wire::node::Destination {
        handle: u32::MAX,
        qpn: rdmux_verbs::Qpn::new(5),
        qkey: 7,
    };
    work(qp, WorkOperation::Datagram { to, imm: None })
}

/// Applications together cannot take the queue pairs of the device that the node needs for those that are shared.
#[test]
fn create_qp__leaves_some_to_the_node() {
    let node = Served::with_key(98, Key::new([1; 32]));
    let (device_max, shared_max) = (
        node.device.limits().queue_pairs as usize,
        NodeOptions::default().shared_queue_pairs,
    );
    let most = device_max - 2 * shared_max;
    let mut applications = Vec::new();
    let refused = 'full: loop {
        let mut raw = node.attach();
        let pd = raw.made(&Message::AllocPd {});
        for _ in 0..application::QPS_MAX {
            match raw.ask(&create_qp(pd)) {
                Message::QpMade { .. } => {}
                Message::Error { code, text, .. } => break 'full (code, text),
                other => panic!("{other:?}"),
            }
        }
        applications.push(raw);
        assert!(applications.len() * application::QPS_MAX <= most);
    };
    assert_eq!(refused.0, ErrorCode::Limit);
    assert!(refused.1.contains("shared"), "{}", refused.1);
    assert_eq!(applications.len(), most / application::QPS_MAX);
    // Those of one that leaves are free again.
    let before = node.device.object_counts().0;
    drop(applications.pop());
    let deadline = Instant::now() + LONG;
    while node.device.object_counts().0 + application::QPS_MAX > before {
        assert!(Instant::now() < deadline, "{:?}", node.device.object_counts());
        thread::yield_now();
    }
    node.attach().qp();
}

#[test]
fn control__what_is_no_message_detaches_its_sender_alone() {
    let served = Served::new(1);
    let (mut hostile, mut other) = (served.attach(), served.attach());
    hostile.qp();
    rdmux_verbs::provider::seqpacket::send_bytes(&hostile.channel, &[0xff; 40], &[]).unwrap();
    hostile.detached();
    other.is_served();
    // A message of a node is no request.
    let mut hostile = served.attach();
    hostile.channel.send(9, &Message::Done {}).unwrap();
    assert!(hostile.detached().contains("Done is no request"));
    other.is_served();
    drop(other);
    served.wait_until_empty();
}

#[test]
fn attach__first_message_and_version() {
    let served = Served::new(2);
    let mut early = served.connect();
    early.channel.send(1, &Message::AllocPd {}).unwrap();
    assert!(early.detached().contains("AllocPd before Attach"));
    let mut newer = served.connect();
    let refused = newer.refused(&attach(VERSION + 1));
    assert_eq!(refused, ErrorCode::Version);
    newer.detached();
    let mut twice = served.attach();
    twice.channel.send(1, &attach(VERSION)).unwrap();
    twice.detached();
    served.attach().is_served();
}

#[test]
fn objects__of_another_application_are_none() {
    let served = Served::new(3);
    let (mut owner, mut other) = (served.attach(), served.attach());
    let pd = owner.made(&Message::AllocPd {});
    let qp = owner.made(&create_qp(pd));
    let attributes = Attributes::default();
    let to = QpState::Error;
    for message in [
        create_qp(pd),
        Message::Modify { qp, to, attributes },
        Message::Query { qp },
        Message::Retire { qp },
        Message::Destroy {
            kind: Kind::Qp,
            id: qp,
        },
        Message::Disconnect { connection: 0 },
        Message::Reject {
            request: 0,
            private_data: Default::default(),
        },
    ] {
        assert_eq!(other.refused(&message), ErrorCode::NoObject, "{message:?}");
    }
    assert_eq!(owner.ask(&Message::Query { qp }).name(), "QpInfo");
    // The id of an object that was destroyed names no other one.
    let kind = Kind::Qp;
    assert_eq!(owner.ask(&Message::Destroy { kind, id: qp }), Message::Done {});
    let next = owner.made(&create_qp(pd));
    assert_ne!(next, qp);
    assert_eq!(owner.refused(&Message::Query { qp }), ErrorCode::NoObject);
}

#[test]
fn register__files_that_are_not_safe_to_map() {
    let served = Served::new(4);
    let mut raw = served.attach();
    let pd = raw.made(&Message::AllocPd {});
    let register = |length| Message::Register {
        pd,
        offset: 0,
        length,
        iova: 0,
        access: 1,
    };
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, 4096).unwrap();
    let file = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
    let empty = sealed_file("empty", 0).unwrap();
    for file in [None, Some(&unsealed), Some(&file)] {
        let answer = raw.ask_with(&register(4096), file).message;
        let Message::Error { code, .. } = answer else {
            panic!("{answer:?}");
        };
        assert_eq!(code, ErrorCode::Memory, "{file:?}");
    }
    let sealed = sealed_file("sealed", 4096).unwrap();
    for (length, file) in [(4097, &sealed), (4096, &empty), (u64::MAX, &sealed)] {
        let answer = raw.ask_with(&register(length), Some(file)).message;
        let Message::Error { code, .. } = answer else {
            panic!("{answer:?}");
        };
        assert!(
            matches!(code, ErrorCode::OutOfRange | ErrorCode::Memory),
            "{code:?}"
        );
    }
    let answer = raw.ask_with(&register(4096), Some(&sealed)).message;
    assert_eq!(answer.name(), "Registered");
}

#[test]
fn limits__are_per_application() {
    let served = Served::new(5);
    let (mut greedy, mut other) = (served.attach(), served.attach());
    let pds = (0..100_000).find(|_| matches!(greedy.ask(&Message::AllocPd {}), Message::Error { .. }));
    assert_eq!(pds, Some(256));
    assert_eq!(greedy.refused(&Message::AllocPd {}), ErrorCode::Limit);
    let qp = Message::CreateQp {
        pd: 0,
        qp_type: QpType::Rc,
        max_send_wr: u32::MAX,
        max_recv_wr: u32::MAX,
        srq: None,
        replays_writes: false,
    };
    assert_eq!(greedy.refused(&qp), ErrorCode::Limit);
    other.made(&Message::AllocPd {});
}

#[test]
fn work__for_no_queue_pair_detaches() {
    let served = Served::new(6);
    let (mut hostile, mut other) = (served.attach(), served.attach());
    let qp = hostile.qp();
    hostile.submit(&[work(qp ^ 0x0700_0000, WorkOperation::Recv)]);
    assert!(hostile.detached().contains("which it does not have"));
    other.is_served();
}

#[test]
fn work__that_the_device_refuses_fails_its_queue_pair_alone() {
    let served = Served::new(7);
    let mut raw = served.attach();
    let (qp, sound) = (raw.qp(), raw.qp());
    // A queue pair in Reset takes no receive, and none of RC a datagram, whatever the application's library would say.
    raw.submit(&[work(qp, WorkOperation::Recv), datagram(qp)]);
    let end = raw.end.as_ref().unwrap();
    let mut consumer = end.completion(0);
    let mut found = Vec::new();
    let deadline = Instant::now() + LONG;
    while found.len() < 2 {
        let mut batch = [[0; DESCRIPTOR_BYTES]; 2];
        let count = consumer.take(&mut batch).unwrap();
        let _ = consumer.release();
        found.extend(batch[..count].iter().map(|one| Completion::parse(one).unwrap()));
        assert!(Instant::now() < deadline);
    }
    for completion in found {
        let expected = (QueueId(qp), 5, CompletionStatus::LocalQpOperation);
        assert_eq!((completion.queue, completion.wr_id, completion.status), expected);
    }
    let state_of = |raw: &mut Raw, qp| match raw.ask(&Message::Query { qp }) {
        Message::QpInfo { state, .. } => state,
        other => panic!("{other:?}"),
    };
    assert_eq!(state_of(&mut raw, qp), QpState::Error);
    assert_eq!(state_of(&mut raw, sound), QpState::Reset);
}

#[test]
fn work__completions_that_nobody_takes_stop_the_application_alone() {
    let served = Served::new(8);
    let (mut hostile, mut other) = (served.attach(), served.attach());
    let qp = hostile.qp();
    let submitting = {
        let end = hostile.end.as_ref().unwrap();
        let mut producer = end.submission(0);
        let refused = datagram(qp);
        let mut submitted = 0;
        // Each of them completes, and the ring of completions has room for 4096 of them.
        let deadline = Instant::now() + LONG;
        while submitted < 8000 && Instant::now() < deadline {
            let element = Element {
                addr: 0,
                lkey: rdmux_verbs::LKey(1),
                length: 1,
            };
            let pushed = producer.push_work(&refused, |work, bytes| work.put_elements(bytes, &[element]));
            submitted += u32::from(pushed.is_ok());
            end.tell(0, producer.publish());
        }
        submitted
    };
    assert_eq!(submitting, 8000);
    other.is_served();
    hostile.is_served();
}

#[test]
fn work__for_no_shared_receive_queue_detaches() {
    let served = Served::new(10);
    let mut other = served.attach();
    for id in [0, 1, 1 << 16, u32::MAX] {
        let mut hostile = served.attach();
        hostile.qp();
        hostile.submit(&[work(id, WorkOperation::SharedRecv)]);
        assert!(hostile.detached().contains("no such shared receive queue"));
    }
    // One with more receives than its queue holds.
    let mut hostile = served.attach();
    let pd = hostile.made(&Message::AllocPd {});
    let Message::SrqMade { id, .. } = hostile.ask(&Message::CreateSrq { pd, max_wr: 2 }) else {
        panic!("no shared receive queue");
    };
    hostile.submit(&[work(id, WorkOperation::SharedRecv); 3]);
    assert!(hostile.detached().contains("full"));
    other.is_served();
}

#[test]
fn srq__sizes_and_ids_of_nonsense() {
    let served = Served::new(11);
    let mut raw = served.attach();
    let pd = raw.made(&Message::AllocPd {});
    for max_wr in [application::WORK_REQUESTS_MAX + 1, u32::MAX] {
        assert_eq!(raw.refused(&Message::CreateSrq { pd, max_wr }), ErrorCode::Limit);
    }
    let create = Message::CreateSrq {
        pd: pd + 1,
        max_wr: 4,
    };
    assert_eq!(raw.refused(&create), ErrorCode::NoObject);
    let Message::SrqMade { id: srq, .. } = raw.ask(&Message::CreateSrq { pd, max_wr: 4 }) else {
        panic!("no shared receive queue");
    };
    let modify = |srq, max_wr, limit| Message::ModifySrq { srq, max_wr, limit };
    assert_eq!(raw.refused(&modify(srq, Some(u32::MAX), None)), ErrorCode::Limit);
    assert_eq!(raw.refused(&modify(srq, None, Some(5))), ErrorCode::State);
    assert_eq!(
        raw.refused(&modify(srq ^ 1 << 16, None, None)),
        ErrorCode::NoObject
    );
    assert_eq!(raw.ask(&modify(srq, Some(64), Some(64))), Message::Done {});
    let with = |srq| match create_qp(pd) {
        Message::CreateQp {
            pd,
            qp_type,
            max_send_wr,
            max_recv_wr,
            ..
        } => Message::CreateQp {
            pd,
            qp_type,
            max_send_wr,
            max_recv_wr,
            srq: Some(srq),
            replays_writes: false,
        },
        other => other,
    };
    assert_eq!(raw.refused(&with(srq + 1)), ErrorCode::NoObject);
    let qp = raw.made(&with(srq));
    // The queue pair keeps its queue.
    let destroy = |kind, id| Message::Destroy { kind, id };
    assert_eq!(raw.ask(&destroy(Kind::Srq, srq)), Message::Done {});
    assert_eq!(raw.refused(&Message::QuerySrq { srq }), ErrorCode::NoObject);
    assert_eq!(raw.ask(&destroy(Kind::Qp, qp)), Message::Done {});
    let count = (0..100_000).find(|_| {
        let answer = raw.ask(&Message::CreateSrq { pd, max_wr: 1 });
        matches!(answer, Message::Error { .. })
    });
    assert_eq!(count, Some(SRQS_MAX));
}

#[test]
fn address_handles__nonsense_and_the_bound() {
    let served = Served::new(12);
    let mut raw = served.attach();
    let create = |address: &str| Message::CreateAddressHandle {
        address: address.parse().unwrap(),
        traffic_class: 0xff,
    };
    for address in ["fd00::1", "224.0.0.1", "ff02::1"] {
        assert_eq!(raw.refused(&create(address)), ErrorCode::Unsupported, "{address}");
    }
    let count = (0..100_000).find(|_| matches!(raw.ask(&create("127.0.0.1")), Message::Error { .. }));
    assert_eq!(count, Some(ADDRESS_HANDLES_MAX));
    // A datagram by no handle, on a queue pair that takes none, fails the queue pair alone.
    let qp = raw.qp();
    raw.submit(&[datagram(qp)]);
    let deadline = Instant::now() + LONG;
    loop {
        match raw.ask(&Message::Query { qp }) {
            Message::QpInfo {
                state: QpState::Error,
                ..
            } => break,
            Message::QpInfo { .. } => assert!(Instant::now() < deadline),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn offer_memory__of_something_else() {
    let served = Served::new(13);
    let mut raw = served.attach();
    let pd = raw.made(&Message::AllocPd {});
    let register = |address, length, pages| Message::RegisterOffered {
        pd,
        address,
        length,
        iova: address,
        access: 7,
        pages,
    };
    // Nothing is offered so far.
    assert_eq!(raw.refused(&register(4096, 4096, None)), ErrorCode::Memory);
    let file = OwnedFd::from(std::fs::File::open("/proc/self/maps").unwrap());
    for file in [None, Some(&file)] {
        let answer = raw.ask_with(&Message::OfferMemory {}, file).message;
        assert!(
            matches!(
                answer,
                Message::Error {
                    code: ErrorCode::Memory,
                    ..
                }
            ),
            "{answer:?}"
        );
    }
    let own = rdmux_memory::own_memory().unwrap();
    assert_eq!(
        raw.ask_with(&Message::OfferMemory {}, Some(&own)).message,
        Message::Done {}
    );
    let pages = |address, length| Some(rdmux_wire::node::control::Pages { address, length });
    let sealed = sealed_file("sealed", 4096).unwrap();
    for (message, file) in [
        (register(u64::MAX, 2, None), None),
        (register(8192, 8192, pages(8192, 4096)), None),
        (register(8192, 8192, pages(4096, 4096)), Some(&sealed)),
        (register(8192, 8192, pages(8192, 8192)), Some(&sealed)),
        (register(8192, 8192, pages(u64::MAX, 8192)), Some(&sealed)),
        (register(8192, 8192, pages(8192, 0)), Some(&sealed)),
    ] {
        let answer = raw.ask_with(&message, file).message;
        assert_eq!(answer.name(), "Error", "{message:?}");
    }
    let answer = raw.ask_with(&register(8192, 8192, pages(12288, 4096)), Some(&sealed));
    assert_eq!(answer.message.name(), "Registered");
    // Nothing has to be there: an access fails, and nothing else.
    assert_eq!(raw.ask(&register(0, u64::MAX, None)).name(), "Registered");
    raw.is_served();
}

#[test]
fn of_word__each_source() {
    for source in [
        Source::Orders,
        Source::Events,
        Source::Async,
        Source::Engine,
        Source::Peers,
        Source::Control(0),
        Source::Control(u32::MAX),
        Source::Work(7),
    ] {
        assert_eq!(Source::of_word(source.word()), Some(source));
    }
    assert_eq!(Source::of_word(u64::MAX), None);
}

/// Messages of every type, mutated, and work requests of every kind, mutated, from an application that keeps to nothing.
#[test]
fn anything__ends_its_sender_alone() {
    let served = Served::new(9);
    let mut other = served.attach();
    let pair = other.qp();
    let (corpus, mut dice) = (Corpus::read(), Dice(1));
    let peer = (served.address, 1).into();
    // Small ids are those of objects that it has.
    let attach = || {
        let mut raw = served.attach();
        raw.qp();
        raw
    };
    let mut hostile = attach();
    for round in 0..20_000 {
        let bytes = corpus.message(&mut dice, peer);
        let end = hostile.end.as_ref().unwrap();
        if round % 4 == 0 {
            let mut producer = end.submission(0);
            let _ = producer.push(&corpus.work(&mut dice));
            end.tell(0, producer.publish());
        }
        let sent = rdmux_verbs::provider::seqpacket::send_bytes(&hostile.channel, &bytes, &[]);
        while let Ok(Some(_)) = hostile.channel.receive() {}
        if sent.is_err() {
            drop(hostile);
            hostile = attach();
            other.is_served();
        }
    }
    assert_eq!(other.ask(&Message::Query { qp: pair }).name(), "QpInfo");
    drop((hostile, other));
    served.wait_until_empty();
}

/// Returns the configuration of a text, in which OWN is the uid of this process.
fn config(text: &str) -> Config {
    let text = text.replace("OWN", &folder::uid().to_string());
    Config::parse(std::path::Path::new("node.toml"), &text, &|_| Ok(None))
        .unwrap()
        .0
}

/// Returns why a request is refused.
fn why(raw: &mut Raw, message: &Message) -> String {
    match raw.ask(message) {
        Message::Error {
            code: ErrorCode::Limit,
            text,
            ..
        } => text,
        other => panic!("{other:?}"),
    }
}

fn register(pd: u32, length: u64) -> Message {
    Message::Register {
        pd,
        offset: 0,
        length,
        iova: 0,
        access: 1,
    }
}

#[test]
fn limits__of_a_tenant_are_those_of_all_its_applications() {
    let text = "[tenant.a]\nuid = [OWN]\n\
         limits = { applications = 2, queue_pairs = 2, requests = 80, regions = 2, bytes = \"8K\" }";
    let served = Served::with(31, Some(config(text)));
    let (mut one, mut other) = (served.attach(), served.attach());
    // A connection that only holds the node is no application.
    let mut third = served.connect();
    assert_eq!(
        why(&mut third, &attach(VERSION)),
        "the tenant a has 2 of at most 2 applications: raise limits.applications in [tenant.a] of node.toml"
    );
    let pds = [&mut one, &mut other].map(|raw| raw.made(&Message::AllocPd {}));
    let qp = one.made(&create_qp(pds[0]));
    other.made(&create_qp(pds[1]));
    assert_eq!(
        why(&mut other, &create_qp(pds[1])),
        "the tenant a has 2 of at most 2 queue pairs: raise limits.queue_pairs in [tenant.a] of node.toml"
    );
    one.ask(&Message::Destroy {
        kind: Kind::Qp,
        id: qp,
    });
    // Requests: 32 are there, and 2 times 30 are too many.
    let larger = Message::CreateQp {
        pd: pds[0],
        qp_type: QpType::Rc,
        max_send_wr: 30,
        max_recv_wr: 30,
        srq: None,
        replays_writes: false,
    };
    assert!(why(&mut one, &larger).contains("has 32 of at most 80 requests"));
    one.made(&create_qp(pds[0]));

    let file = sealed_file("memory", 1 << 16).unwrap();
    let registered =
        |raw: &mut Raw, pd, length| match raw.ask_with(&register(pd, length), Some(&file)).message {
            Message::Registered { id, .. } => Ok(id),
            Message::Error { text, .. } => Err(text),
            other => panic!("{other:?}"),
        };
    let region = registered(&mut one, pds[0], 4096).unwrap();
    assert_eq!(
        registered(&mut other, pds[1], 4097),
        Err("the tenant a has 4096 of at most 8192 bytes in memory regions: raise limits.bytes in [tenant.a] of node.toml".into())
    );
    registered(&mut other, pds[1], 4096).unwrap();
    assert!(
        registered(&mut one, pds[0], 0)
            .unwrap_err()
            .contains("2 of at most 2 memory regions")
    );
    one.ask(&Message::Destroy {
        kind: Kind::Region,
        id: region,
    });
    registered(&mut other, pds[1], 4096).unwrap();
    // All that an application had is free once it has gone.
    drop(other);
    let deadline = Instant::now() + LONG;
    while registered(&mut one, pds[0], 8192).is_err() {
        assert!(
            Instant::now() < deadline,
            "what an application had is charged for ever"
        );
    }
    let mut next = served.attach();
    next.qp();
}

#[test]
fn modify_srq__is_charged_for_its_new_size_alone() {
    let text = "[tenant.a]\nuid = [OWN]\nlimits.requests = 80";
    let served = Served::with(35, Some(config(text)));
    let mut raw = served.attach();
    let pd = raw.made(&Message::AllocPd {});
    let create = |max_wr| Message::CreateSrq { pd, max_wr };
    let Message::SrqMade { id: srq, .. } = raw.ask(&create(50)) else {
        panic!("no shared receive queue");
    };
    let resize = |max_wr| Message::ModifySrq {
        srq,
        max_wr: Some(max_wr),
        limit: None,
    };
    assert_eq!(raw.ask(&resize(80)), Message::Done {});
    assert!(why(&mut raw, &resize(81)).contains("has 80 of at most 80 requests"));
    // A queue that the device refuses to change keeps its charge.
    let impossible = Message::ModifySrq {
        srq,
        max_wr: Some(20),
        limit: Some(21),
    };
    assert_eq!(raw.refused(&impossible), ErrorCode::State);
    assert!(why(&mut raw, &create(1)).contains("has 80 of at most 80 requests"));
    assert_eq!(raw.ask(&resize(50)), Message::Done {});
    let Message::SrqMade { .. } = raw.ask(&create(30)) else {
        panic!("what a queue gives back is still charged");
    };
    assert!(why(&mut raw, &create(1)).contains("has 80 of at most 80 requests"));
}

#[test]
fn accept__process_that_is_refused_learns_why() {
    let served = Served::with(32, Some(config("[default]\nrefuse = true")));
    let own = folder::uid();
    for says_something in [false, true] {
        let mut refused = served.connect();
        if says_something {
            // The node may have ended the connection by now.
            let _ = refused.channel.send(1, &attach(VERSION));
        }
        let why = refused.detached();
        assert!(why.starts_with(&format!("this process, of uid {own}")), "{why}");
        assert!(
            why.ends_with("is in none of its tenants, and it refuses others"),
            "{why}"
        );
    }
}

#[test]
fn apply__tenants_and_limits_of_applications_that_stay() {
    let served = Served::with(
        33,
        Some(config("[tenant.a]\nuid = [OWN]\nlimits.queue_pairs = 1")),
    );
    let apply = |text: &str| served.stopper.apply(config(text));
    let mut raw = served.attach();
    let pd = raw.made(&Message::AllocPd {});
    raw.made(&create_qp(pd));
    assert!(why(&mut raw, &create_qp(pd)).contains("the tenant a has 1 of at most 1 queue pairs"));
    // A limit that is raised, lowered below what is there, and removed.
    apply("[tenant.a]\nuid = [OWN]\nlimits.queue_pairs = 2").unwrap();
    raw.made(&create_qp(pd));
    apply("[tenant.a]\nuid = [OWN]\nlimits.queue_pairs = 0").unwrap();
    assert!(why(&mut raw, &create_qp(pd)).contains("the tenant a has 2 of at most 0 queue pairs"));
    // An application keeps its tenant though a new process would be in another one.
    apply("[tenant.a]\nlimits.queue_pairs = 3\n[tenant.b]\nuid = [OWN]\nlimits.queue_pairs = 4").unwrap();
    raw.made(&create_qp(pd));
    assert!(why(&mut raw, &create_qp(pd)).contains("the tenant a has 3 of at most 3 queue pairs"));
    // Without its tenant it is where a new one would be, with all that it has.
    apply("[tenant.b]\nuid = [OWN]\nlimits.queue_pairs = 4").unwrap();
    raw.made(&create_qp(pd));
    assert!(why(&mut raw, &create_qp(pd)).contains("the tenant b has 4 of at most 4 queue pairs"));
    apply("").unwrap();
    raw.made(&create_qp(pd));
    // A configuration that needs another socket is refused, and the old one stays.
    let error = apply("[default]").unwrap_err();
    assert_eq!(
        error.to_string(),
        "it names other users than the node's, who cannot reach the node's socket: restart the node"
    );
    raw.is_served();
    apply("[default]\nrefuse = true").unwrap();
    assert!(raw.detached().contains("is in none of its tenants"));
    served.wait_until_empty();
}

#[test]
fn apply__node_that_has_ended() {
    let mut served = Served::new(34);
    served.stopper.stop();
    served.thread.take().unwrap().join().unwrap();
    assert_eq!(served.stopper.apply(config("")), Err(ApplyError::Ended));
}
