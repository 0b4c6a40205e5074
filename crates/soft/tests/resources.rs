//! Queries for the objects of soft devices, from outside of their processes.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{LONG, open};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_verbs::resources::places::{bind_slot, connect_slot};
use rdmux_verbs::resources::report::{PAGE_BYTES_MAX, Page, Question};
use rdmux_verbs::resources::{
    AskError, Counts, DeviceAt, Item, Object, QpResource, Told, ask, devices, node_guid,
};
use rdmux_verbs::{
    Access, Carrier, Device, Operation, Path, Psn, QpAttributes, QpOptions, QpState, QpType, QueuePair, RKey,
    SendFlags, SendRequest, SgeList, Target,
};
use rustix::io::Errno;

fn at(device: &Device) -> DeviceAt {
    let address = device.address();
    let mine = |found: &DeviceAt| found.address == address;
    devices().into_iter().find(mine).expect("it is listed")
}

fn told(device: &Device, object: Object) -> Told {
    let (_, answer) = ask(&[at(device)], object, LONG).remove(0);
    answer.expect("an answer")
}

fn qps(device: &Device) -> Vec<QpResource> {
    let items = told(device, Object::Qp).items.into_iter();
    let qp = |item| match item {
        Item::Qp(qp) => qp,
        other => panic!("{other:?}"),
    };
    items.map(qp).collect()
}

fn counts(device: &Device) -> Counts {
    match &told(device, Object::Device).items[..] {
        [Item::Device(device)] => device.counts,
        other => panic!("{other:?}"),
    }
}

/// Listens under the name of a slot, and never accepts, like a stopped process.
fn listen_silently(at: DeviceAt) -> OwnedFd {
    let fd = bind_slot(at.address, at.slot).unwrap();
    rustix::net::listen(&fd, 1).unwrap();
    fd
}

fn raw_question(device: DeviceAt) -> OwnedFd {
    connect_slot(device.address, device.slot).unwrap()
}

/// Returns whether the engine ended the connection, after anything that it may have sent before.
fn is_ended(socket: &OwnedFd) -> bool {
    let deadline = Instant::now() + LONG;
    let mut buffer = vec![0; PAGE_BYTES_MAX];
    while Instant::now() < deadline {
        match receive_with_descriptors(socket, &mut buffer) {
            Ok((0, _)) | Err(Errno::CONNRESET) => return true,
            Ok(_) => {}
            Err(_) => std::thread::yield_now(),
        }
    }
    false
}

/// Returns a device with a queue pair each of the types UC, UD and XRC send, and `many` of type RC.
fn populated(address: [u8; 4], many: usize) -> (Device, Vec<QueuePair>) {
    let device = open(IpAddr::from(address)).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(16).unwrap();
    let kinds = [QpType::Uc, QpType::Ud, QpType::XrcSend];
    let kinds = kinds.into_iter().chain(std::iter::repeat_n(QpType::Rc, many));
    let make = |qp_type| {
        let options = QpOptions {
            qp_type,
            ..QpOptions::new(&cq)
        };
        pd.create_qp(&options).unwrap()
    };
    let qps = kinds.map(make).collect();
    (device, qps)
}

#[test]
fn node_guid__is_the_same_when_the_device_is_opened_again() {
    let address = IpAddr::from([127, 0, 6, 40]);
    for _ in 0..2 {
        let device = open(address).unwrap();
        let items = told(&device, Object::Device).items;
        assert!(matches!(&items[..], [Item::Device(one)] if one.guid == node_guid(address)));
    }
}

#[test]
fn ask__tells_of_every_queue_pair_in_pages() {
    let (device, made) = populated([127, 0, 6, 1], 600);
    assert_eq!(told(&device, Object::Device).pid, Some(std::process::id()));
    let expected = Counts {
        qps: 603,
        cqs: 1,
        pds: 1,
        ..Counts::default()
    };
    assert_eq!(counts(&device), expected);
    let found = qps(&device);
    let mut expected: Vec<_> = made.iter().map(|qp| (qp.qpn().value(), qp.qp_type())).collect();
    expected.sort_unstable_by_key(|(qpn, _)| *qpn);
    let told: Vec<_> = found.iter().map(|qp| (qp.qpn.value(), qp.qp_type)).collect();
    assert_eq!(told, expected);
    for qp in &found {
        assert_eq!((qp.state, qp.peer, &qp.carrier), (QpState::Reset, None, &None));
    }
}

#[test]
fn ask__each_kind_of_object() {
    let (device, made) = populated([127, 0, 6, 9], 2);
    let pd = made[0].pd().clone();
    let memory = Arc::new(AnonymousMemory::new(8192).unwrap());
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let regions: Vec<_> = (0..300)
        .map(|_| pd.reg_mr_all(memory.clone(), memory.address(), access).unwrap())
        .collect();
    let srq = pd.create_srq(32).unwrap();
    let _listener = device.listen(7174).unwrap();
    let items = |object| told(&device, object).items;
    assert_eq!(items(Object::Mr).len(), 300);
    let region = &regions[7];
    let mine = |item: &&Item| matches!(item, Item::Mr(mr) if mr.rkey == region.rkey().0);
    let Some(Item::Mr(mr)) = items(Object::Mr).iter().find(mine).cloned() else {
        panic!("it is not told of");
    };
    assert_eq!((mr.iova, mr.length, mr.access), (region.iova(), 8192, access));
    let [Item::Cq(cq)] = items(Object::Cq)[..] else {
        panic!("one queue")
    };
    assert_eq!((cq.depth, cq.users, cq.overrun), (16, 5, false));
    let [Item::Pd(domain)] = items(Object::Pd)[..] else {
        panic!("one domain")
    };
    assert_eq!((domain.pd, domain.users), (mr.pd, 5 + 300 + 1));
    let queues = items(Object::Srq);
    let [Item::Srq(queue)] = &queues[..] else {
        panic!("one queue")
    };
    assert_eq!((queue.srqn, queue.info.max_wr, queue.users), (srq.srqn(), 32, 0));
    let [Item::CmId(listener)] = items(Object::CmId)[..] else {
        panic!("one listener")
    };
    assert_eq!((listener.service.port(), listener.peer), (Some(7174), None));
    let counter = |name: &str| {
        let named = items(Object::Counter).into_iter().find_map(|item| match item {
            Item::Counter(counter) if counter.name == name => Some(counter.value),
            _ => None,
        });
        named.expect("a counter")
    };
    assert_eq!(counter("malformed"), device.counters().malformed);
    assert_eq!(items(Object::Counter).len(), device.counters().iter().count());
}

#[test]
fn ask__process_that_does_not_answer() {
    // The socket is bound and listens, but never accepts, like that of a stopped process.
    let silent = DeviceAt {
        address: IpAddr::from([127, 0, 6, 3]),
        slot: 7,
    };
    let _listener = listen_silently(silent);
    let (device, _qps) = populated([127, 0, 6, 4], 1);
    let since = Instant::now();
    let mut answers = ask(&[silent, at(&device)], Object::Qp, Duration::from_millis(200));
    assert!(since.elapsed() < LONG);
    assert!(answers.remove(1).1.is_ok());
    let pid = Some(std::process::id());
    assert!(matches!(answers[0].1, Err(AskError::NoAnswer { pid: p }) if p == pid));
}

#[test]
fn ask__what_is_reached_directly_and_why_not() {
    let server = open(IpAddr::from([127, 0, 6, 5])).unwrap();
    let client = open(IpAddr::from([127, 0, 6, 6])).unwrap();
    let [asking, asked] = [&client, &server].map(|device| {
        let cq = device.create_cq(16).unwrap();
        device
            .alloc_pd()
            .unwrap()
            .create_qp(&QpOptions::new(&cq))
            .unwrap()
    });
    bring_up(&asking, &asked);
    bring_up(&asked, &asking);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let shared = Arc::new(AnonymousMemory::shareable(4096).unwrap());
    let private = Arc::new(AnonymousMemory::new(4096).unwrap());
    let regions = [&shared, &private].map(|memory| {
        let memory = Arc::clone(memory);
        let iova = memory.address();
        asked.pd().reg_mr_all(memory, iova, access).unwrap()
    });
    let write = |va, rkey| {
        let request = SendRequest {
            wr_id: 1,
            operation: Operation::Write { va, rkey, imm: None },
            sges: SgeList::inline(b"something"),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        asking.post_send(request).unwrap();
    };
    let until = |enough: &dyn Fn(&QpResource) -> bool| {
        let deadline = Instant::now() + LONG;
        loop {
            let found = qps(&client).remove(0);
            if enough(&found) {
                return;
            }
            assert!(Instant::now() < deadline, "{found:?}");
        }
    };
    until(&|found| found.carrier == Some(Carrier::SharedMemory));
    write(regions[0].iova(), regions[0].rkey());
    until(&|found| found.direct.mapped == 1);
    write(regions[1].iova(), regions[1].rkey());
    // If the system refuses the calls, the device reports that.
    until(&|found| found.direct.by_calls == 1 || found.direct.why_not.is_some());
    let [shared_region, _private_region] = regions;
    drop(shared_region);
    until(&|found| found.direct.mapped == 0);
    write(0, RKey(0));
    until(&|found| found.direct.why_not.as_deref() == Some("not granted by the peer"));
}

/// Moves a queue pair to RTS, connected to `peer`.
fn bring_up(qp: &QueuePair, peer: &QueuePair) {
    let access = Access::REMOTE_WRITE;
    let init = QpAttributes {
        access: Some(access),
        ..QpAttributes::default()
    };
    let rtr = QpAttributes {
        path: Some(Path {
            src: qp.pd().device().address(),
            dst: peer.pd().device().address(),
            src_port: qp.pd().device().source_port(peer.qpn()).unwrap(),
            traffic_class: 0,
        }),
        path_mtu: Some(1024),
        dest_qpn: Some(peer.qpn()),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(1),
        ..QpAttributes::default()
    };
    let rts = QpAttributes {
        sq_psn: Some(Psn::new(0)),
        timeout: Some(14),
        retry_count: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(1),
        ..QpAttributes::default()
    };
    for (to, attributes) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
        qp.modify(to, &attributes).unwrap();
    }
}

#[test]
fn ask__engine_that_is_asked_nonsense_goes_on() {
    let (device, _qps) = populated([127, 0, 6, 7], 300);
    let place = at(&device);
    let page = Page {
        object: Object::Qp,
        more: true,
        records: Vec::new(),
    };
    let (welcome, page) = (vec![2, 3, 0], page.encode());
    for nonsense in [&b"nonsense"[..], &[], &[0; 4096], &welcome, &page] {
        let socket = raw_question(place);
        let _ = send_bytes(&socket, nonsense, &[]);
        assert!(is_ended(&socket), "{nonsense:?}");
    }
    assert_eq!(counts(&device).qps, 303);
}

#[test]
fn ask__who_does_not_read_is_dropped() {
    let (device, _qps) = populated([127, 0, 6, 8], 300);
    let place = at(&device);
    let deaf = raw_question(place);
    let object = Object::Qp;
    let question = Question { object, from: 0 }.encode();
    // Send until the engine's side is full: then the engine ends the connection.
    let deadline = Instant::now() + LONG;
    loop {
        match send_bytes(&deaf, &question, &[]) {
            Ok(()) => {}
            Err(Errno::AGAIN) => std::thread::yield_now(),
            Err(_) => break,
        }
        assert!(Instant::now() < deadline);
    }
    // Clients that never ask keep no others out.
    let idle: Vec<_> = (0..200)
        .filter_map(|_| connect_slot(place.address, place.slot).ok())
        .collect();
    assert!(idle.len() >= 64);
    assert_eq!(counts(&device).qps, 303);
}
