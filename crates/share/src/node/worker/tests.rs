//! A worker whose passes the test takes, in its own thread.

use std::net::SocketAddr;

use rdmux_verbs::{ConnectPair, ConnectParams, Options, QpOptions, QpType, QueuePair, ServiceId};
use rdmux_wire::node::control::EventKind;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::node::identity::Identity;
use crate::node::tenants::Capacity;

/// A worker with an application, and the other end of the application's channel.
struct Driven {
    worker: Worker,
    application: Channel,
    /// Descriptors of the application's rings, in the order of [`crate::ring::Files`].
    rings: Vec<OwnedFd>,
    _orders: (Mailbox<Order>, Inbox<super::super::Order>),
}

fn device(number: u8) -> Device {
    rdmux_soft::register();
    let options = Options {
        provider: Some("soft"),
        ..Options::default()
    };
    Device::open_with([127, 0, 57, number].into(), options).unwrap()
}

fn listen(port: u16) -> Message {
    Message::Listen {
        service: ServiceId::tcp(port),
        unreliable: false,
    }
}

impl Driven {
    fn new(number: u8) -> Driven {
        let device = device(number);
        let capacity = Capacity::new(device.limits().queue_pairs.into());
        let tenants = Arc::new(Mutex::new(Tenants::new(None, capacity, 1)));
        let (front, inbox) = mailbox().unwrap();
        let parts = (None, &Services::default());
        let (mut worker, orders) = Worker::new(0, device, &tenants, parts, front).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let identity = Identity::of(&ours).unwrap();
        let account = tenants.lock().account_of(&identity).unwrap().clone();
        let seat = account.seat().unwrap();
        let belonging = Belonging {
            number: 1,
            identity,
            account,
            seat,
            charge: None,
        };
        worker.serve((Channel::new(ours), belonging));
        let mut driven = Driven {
            worker,
            application: Channel::new(theirs),
            rings: Vec::new(),
            _orders: (orders, inbox),
        };
        let attached = driven.ask(&Message::Attach {
            version_min: VERSION,
            version_max: VERSION,
            name: "driven".into(),
        });
        driven.rings = attached.descriptors;
        driven
    }

    /// Does what the worker does before it sleeps.
    fn work(&mut self) {
        loop {
            while self.worker.pass() {}
            if !self.worker.look().unwrap() {
                return;
            }
        }
    }

    fn ask(&mut self, message: &Message) -> Received {
        self.application.send(7, message).unwrap();
        self.work();
        self.application.receive().unwrap().expect("an answer")
    }

    fn made(&mut self, message: &Message) -> u32 {
        match self.ask(message).message {
            Message::Made { id } | Message::QpMade { id, .. } => id,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn tell__an_application_that_only_reads_gets_every_event() {
    const EVENTS: u32 = 1000;
    let mut driven = Driven::new(1);
    let event = |object| Message::Event {
        kind: EventKind::QpFatal,
        object,
    };
    let application = driven.worker.applications[0].as_mut().unwrap();
    (0..EVENTS).for_each(|object| application.tell(&event(object)).unwrap());
    assert!(application.channel.has_waiting());
    let mut read = 0;
    // Nobody reads while the worker works, so each round empties the socket and fills it again.
    for _ in 0..EVENTS {
        driven.work();
        while let Some(received) = driven.application.receive().unwrap() {
            assert_eq!(received.message, event(read));
            read += 1;
        }
    }
    assert_eq!(read, EVENTS);
}

/// The application keeps the descriptor, and with it the entry in the epoll set.
#[test]
fn detach__bell_of_an_application_that_has_gone_wakes_nobody() {
    let mut driven = Driven::new(2);
    let woken = |driven: &Driven| {
        rustix::io::write(&driven.rings[2], &1_u64.to_ne_bytes()).unwrap();
        let mut found = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 8];
        let count = epoll::wait(&driven.worker.epoll, &mut found, Some(&Timespec::default())).unwrap();
        let mut sources = found[..count]
            .iter()
            .map(|event| Source::of_word(event.data.u64()));
        sources.any(|source| source == Some(Source::Work(0)))
    };
    assert!(woken(&driven));
    driven.worker.detach(0, &Detached::Ended(Ended::Gone));
    assert!(!woken(&driven));
    driven.work();
    assert!(driven.worker.leaving.is_empty() && !woken(&driven));
}

#[test]
fn leave__others_may_listen_at_once() {
    let mut driven = Driven::new(3);
    let pd = driven.made(&Message::AllocPd {});
    for _ in 0..8 {
        driven.made(&super::super::tests::create_qp(pd));
    }
    driven.made(&listen(7));
    driven.worker.detach(0, &Detached::Ended(Ended::Gone));
    driven.worker.destroy_one(now());
    let (shared, service) = (&driven.worker.shared, ServiceId::tcp(7));
    assert!(!driven.worker.leaving.is_empty());
    shared.services.claim(service).unwrap();
    shared.device.listen_service(service, &[QpType::Rc]).unwrap();
}

#[test]
fn happened__more_requests_of_peers_than_are_passed_on_at_once() {
    // As many as the device keeps.
    const REQUESTS: usize = 128;
    let mut driven = Driven::new(4);
    driven.made(&listen(7));
    let to = SocketAddr::new(driven.worker.shared.device.address(), 7);
    let peer = device(104);
    let (pd, cq) = (peer.alloc_pd().unwrap(), peer.create_cq(1).unwrap());
    let qps: Vec<QueuePair> = (0..REQUESTS)
        .map(|_| pd.create_qp(&QpOptions::new(&cq)).unwrap())
        .collect();
    let attempts = qps.iter().map(|qp| {
        let attempt = peer.start_connect(ConnectPair::Own(qp), to, &ConnectParams::default(), b"");
        attempt.unwrap()
    });
    let _attempts: Vec<_> = attempts.collect();
    let mut requests = 0;
    let deadline = Instant::now() + Duration::from_secs(30);
    while requests < REQUESTS {
        assert!(Instant::now() < deadline, "{requests}");
        driven.work();
        while let Some(received) = driven.application.receive().unwrap() {
            requests += usize::from(received.message.name() == "Requested");
        }
    }
}
