mod accelerators;
mod changes;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_runtime::Pages;
use rdmux_wire::nvme::*;

mod commands;
mod fused;
mod passed;
mod reservations;

use super::*;
use crate::auth::{Secret, Secrets};
use crate::backend::{FileBackend, MemoryBackend, NullBackend};

pub(crate) const SUBSYSTEM: &str = "nqn.2014-08.org.example:test";
pub(crate) const PORT: Port = crate::tcp::port(16 << 10);
const LOCAL: Listener = Listener {
    transport: TransportKind::Tcp,
    address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 4420),
};
pub(crate) const HOST: &str = "nqn.2014-08.org.example:host";

/// A target with namespace 1, of 1 MiB of memory in blocks of 512 bytes.
pub(crate) fn target() -> (Arc<Target>, Arc<Subsystem>) {
    let subsystem = Arc::new(Subsystem::new(
        Nqn::new(SUBSYSTEM).unwrap(),
        "serial",
        Hosts::any(Terms::default()),
    ));
    subsystem.add_namespace(memory(1, 1 << 20)).unwrap();
    let target = Target::default();
    target.add_subsystem(subsystem.clone()).unwrap();
    (Arc::new(target), subsystem)
}

pub(crate) fn memory(nsid: u32, bytes: u64) -> Namespace {
    Namespace {
        nsid: NsId(nsid),
        block_shift: 9,
        uuid: [nsid as u8; 16],
        is_protected: false,
        backend: Arc::new(MemoryBackend::new(bytes).unwrap()),
    }
}

/// Returns an I/O of no queue.
pub(crate) fn io_of(subsystem: &Subsystem, nsid: u32, operation: Operation, offset: u64, length: u32) -> Io {
    let (_, namespaces) = subsystem.namespaces();
    Io {
        namespace: Arc::new(Seat::new(namespaces[&NsId(nsid)].clone(), None)),
        operation,
        offset,
        length,
        cid: Cid(0),
        own: None,
        part: None,
    }
}

pub(crate) fn connect_data(subsystem: &str, cntlid: u16) -> ConnectData {
    ConnectData {
        host_id: HostId([1; 16]),
        cntlid,
        subsystem: Nqn::new(subsystem).unwrap(),
        host: Nqn::new(HOST).unwrap(),
    }
}

fn emitted(data: &ConnectData) -> Vec<u8> {
    let mut bytes = vec![0; CONNECT_DATA_LEN];
    data.emit(&mut bytes);
    bytes
}

fn connect(qid: u16) -> Connect {
    Connect {
        record_format: 0,
        qid,
        sq_size: 31,
        no_flow_control: false,
        keep_alive_ms: 5000,
    }
}

/// Runs a command that is no I/O.
fn run(queue: &mut Queue, sqe: &Sqe, data: &[u8], now: Instant) -> Step {
    match queue.admit(sqe, data.len() as u32, now) {
        Ok(Admitted::Command { receives }) => {
            assert_eq!(receives as usize, data.len());
            queue.execute(sqe, data, now)
        }
        Ok(Admitted::Io(io)) => panic!("{io:?}"),
        Err(cqe) => Step::Complete(cqe),
    }
}

fn completed(step: Step) -> Cqe {
    match step {
        Step::Complete(cqe) => cqe,
        other => panic!("{other:?}"),
    }
}

fn sent(step: Step) -> Vec<u8> {
    match step {
        Step::Send(data, cqe) => {
            assert!(cqe.status.is_success());
            data
        }
        other => panic!("{other:?}"),
    }
}

fn configure(queue: &mut Queue, value: u32, now: Instant) -> Status {
    let property = Property {
        register: Register::CONFIGURATION,
        is_wide: false,
        value: value.into(),
    };
    let sqe = property.command(FabricsType::PROPERTY_SET, Cid(1));
    completed(run(queue, &sqe, &[], now)).status
}

/// Returns an admin queue whose controller is ready, and the controller's id.
fn admin(target: &Arc<Target>, subsystem: &str, now: Instant) -> (Queue, u16) {
    let mut queue = Queue::new(target.clone(), PORT, LOCAL, now);
    let data = emitted(&connect_data(subsystem, ConnectData::ANY_CONTROLLER));
    let cqe = completed(run(&mut queue, &connect(0).command(Cid(0)), &data, now));
    assert_eq!(cqe.status, Status::SUCCESS);
    assert_eq!(
        configure(&mut queue, Configuration::enabled().0, now),
        Status::SUCCESS
    );
    (queue, cqe.result as u16)
}

fn io_queue(target: &Arc<Target>, cntlid: u16, qid: u16, now: Instant) -> (Queue, Cqe) {
    let mut queue = Queue::new(target.clone(), PORT, LOCAL, now);
    let data = emitted(&connect_data(SUBSYSTEM, cntlid));
    let cqe = completed(run(&mut queue, &connect(qid).command(Cid(0)), &data, now));
    (queue, cqe)
}

/// A host with queues of its own, by its identifier.
struct Host {
    id: u8,
    admin: Queue,
    io: Queue,
    cntlid: u16,
}

impl Host {
    fn new(target: &Arc<Target>, id: u8, now: Instant) -> Host {
        Host::at(target, id, LOCAL, now)
    }

    fn at(target: &Arc<Target>, id: u8, local: Listener, now: Instant) -> Host {
        let data = |cntlid| {
            emitted(&ConnectData {
                host_id: HostId([id; 16]),
                ..connect_data(SUBSYSTEM, cntlid)
            })
        };
        let mut admin = Queue::new(target.clone(), PORT, local, now);
        let any = data(ConnectData::ANY_CONTROLLER);
        let cqe = completed(run(&mut admin, &connect(0).command(Cid(0)), &any, now));
        let cntlid = cqe.result as u16;
        configure(&mut admin, Configuration::enabled().0, now);
        let mut io = Queue::new(target.clone(), PORT, local, now);
        let cqe = completed(run(&mut io, &connect(1).command(Cid(0)), &data(cntlid), now));
        assert!(cqe.status.is_success());
        Host {
            id,
            admin,
            io,
            cntlid,
        }
    }

    /// Runs an I/O command from its begin to its end. Data that the command returns take the place of `data`.
    fn run(&mut self, sqe: &Sqe, data: &mut Vec<u8>) -> Status {
        match self.io.admit(sqe, data.len() as u32, Instant::now()) {
            Ok(Admitted::Io(io)) => {
                let mut pages = Pages::new(data.len());
                pages.copy_from_slice(data);
                let status = io.execute(&mut pages);
                data.copy_from_slice(&pages);
                self.io.complete(sqe.cid(), status, 0).status
            }
            Ok(Admitted::Command { receives }) => {
                let received = data[..receives as usize].to_vec();
                match self.io.execute(sqe, &received, Instant::now()) {
                    Step::Complete(cqe) => cqe.status,
                    Step::Send(sent, cqe) => {
                        *data = sent;
                        cqe.status
                    }
                    Step::Wait => panic!("{sqe:?} waits"),
                }
            }
            Err(cqe) => cqe.status,
        }
    }

    /// Reads or writes blocks of 512 bytes.
    fn blocks(&mut self, opcode: Opcode, nsid: u32, slba: u64, data: &mut Vec<u8>) -> Status {
        self.run(&blocks(opcode, nsid, slba, (data.len() / 512) as u32), data)
    }

    fn read(&mut self, nsid: u32, slba: u64, number: usize) -> Vec<u8> {
        let mut data = vec![0xee; number * 512];
        assert_eq!(self.blocks(Opcode::READ, nsid, slba, &mut data), Status::SUCCESS);
        data
    }

    fn log(&mut self, log: LogId, nsid: NsId, bytes: u32) -> Vec<u8> {
        let mut sqe = Sqe::new(Opcode::GET_LOG_PAGE, Cid(2), nsid);
        sqe.set_dword(10, u32::from(log.0) | (bytes / 4 - 1) << 16);
        self.admin.admit(&sqe, bytes, Instant::now()).unwrap();
        sent(self.admin.execute(&sqe, &[], Instant::now()))
    }

    fn set_features(&mut self, feature: u8, nsid: NsId, value: u32, data: &[u8]) -> Step {
        let mut sqe = Sqe::new(Opcode::SET_FEATURES, Cid(3), nsid);
        sqe.set_dword(10, feature.into());
        sqe.set_dword(11, value);
        run(&mut self.admin, &sqe, data, Instant::now())
    }

    fn get_features(&mut self, feature: u8, nsid: NsId, value: u32) -> Step {
        let mut sqe = Sqe::new(Opcode::GET_FEATURES, Cid(3), nsid);
        sqe.set_dword(10, feature.into());
        sqe.set_dword(11, value);
        match self.admin.admit(&sqe, 4096, Instant::now()) {
            Ok(_) => self.admin.execute(&sqe, &[], Instant::now()),
            Err(cqe) => Step::Complete(cqe),
        }
    }

    fn request_event(&mut self, cid: u16) {
        let request = Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(cid), NsId::NONE);
        assert!(matches!(
            run(&mut self.admin, &request, &[], Instant::now()),
            Step::Wait
        ));
    }
}

fn blocks(opcode: Opcode, nsid: u32, slba: u64, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, Cid(7), NsId(nsid));
    let fua = false;
    Rw { slba, blocks, fua }.emit(&mut sqe);
    sqe
}

fn identify(queue: &mut Queue, cns: Cns, nsid: u32, now: Instant) -> Step {
    let mut sqe = Sqe::new(Opcode::IDENTIFY, Cid(2), NsId(nsid));
    sqe.set_dword(10, cns.0.into());
    match queue.admit(&sqe, IDENTIFY_LEN as u32, now) {
        Ok(_) => queue.execute(&sqe, &[], now),
        Err(cqe) => Step::Complete(cqe),
    }
}

#[test]
fn connect__names_what_is_wrong() {
    let now = Instant::now();
    let (target, _) = target();
    let good = emitted(&connect_data(SUBSYSTEM, ConnectData::ANY_CONTROLLER));
    let with = |change: &dyn Fn(&mut Connect), data: &[u8]| {
        let mut queue = Queue::new(target.clone(), PORT, LOCAL, now);
        let mut connect = connect(0);
        change(&mut connect);
        let cqe = completed(run(&mut queue, &connect.command(Cid(7)), data, now));
        assert_eq!(cqe.cid, Cid(7));
        (cqe.status.code(), cqe.result)
    };
    let invalid = Status::CONNECT_INVALID.code();
    assert_eq!(
        with(&|connect| connect.record_format = 1, &good).0,
        Status::CONNECT_INCOMPATIBLE.code()
    );
    assert_eq!(with(&|connect| connect.sq_size = 0, &good), (invalid, 44));
    assert_eq!(with(&|connect| connect.sq_size = 32, &good), (invalid, 44));
    assert_eq!(with(&|connect| connect.qid = 129, &good), (invalid, 42));
    let unknown = emitted(&connect_data(
        "nqn.2014-08.org.example:none",
        ConnectData::ANY_CONTROLLER,
    ));
    assert_eq!(with(&|_| {}, &unknown), (invalid, 1 << 16 | 256));
    let fixed = emitted(&connect_data(SUBSYSTEM, 5));
    assert_eq!(with(&|_| {}, &fixed), (invalid, 1 << 16 | 16));
    let mut nameless = good.clone();
    nameless[512..].fill(0);
    assert_eq!(with(&|_| {}, &nameless), (invalid, 1 << 16 | 512));
    assert_eq!(with(&|_| {}, &good[..512]).0, Status::SGL_LENGTH_INVALID.code());
    assert_eq!(with(&|_| {}, &good).0, 0);
}

#[test]
fn admin__takes_nothing_before_connect_and_enable() {
    let now = Instant::now();
    let (target, _) = target();
    let mut queue = Queue::new(target.clone(), PORT, LOCAL, now);
    let step = identify(&mut queue, Cns::CONTROLLER, 0, now);
    assert!(completed(step).status.is(Status::COMMAND_SEQUENCE_ERROR));
    let data = emitted(&connect_data(SUBSYSTEM, ConnectData::ANY_CONTROLLER));
    completed(run(&mut queue, &connect(0).command(Cid(0)), &data, now));
    let step = identify(&mut queue, Cns::CONTROLLER, 0, now);
    assert!(completed(step).status.is(Status::COMMAND_SEQUENCE_ERROR));
    // Pages of 8 KiB.
    configure(&mut queue, Configuration::enabled().0 | 1 << 7, now);
    let step = identify(&mut queue, Cns::CONTROLLER, 0, now);
    assert!(completed(step).status.is(Status::COMMAND_SEQUENCE_ERROR));
    configure(&mut queue, 0, now);
    configure(&mut queue, Configuration::enabled().0, now);
    sent(identify(&mut queue, Cns::CONTROLLER, 0, now));
    // A second Connect.
    let step = run(&mut queue, &connect(0).command(Cid(0)), &data, now);
    assert!(completed(step).status.is(Status::COMMAND_SEQUENCE_ERROR));
}

#[test]
fn identify__says_what_linux_requires() {
    let now = Instant::now();
    let (target, _) = target();
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    let bytes = sent(identify(&mut queue, Cns::CONTROLLER, 0, now));
    let controller = IdentifyController::parse(&bytes).unwrap();
    assert_eq!(controller.cntlid, cntlid);
    assert_eq!(controller.kind, ControllerKind::Io);
    assert!(controller.keep_alive > 0 && controller.capsule_bytes == 64 + 16384);
    assert!(controller.sgls & 3 != 0);
    let list = sent(identify(&mut queue, Cns::ACTIVE_NAMESPACES, 0, now));
    assert_eq!(parse_namespace_list(&list).collect::<Vec<_>>(), [NsId(1)]);
    let bytes = sent(identify(&mut queue, Cns::NAMESPACE, 1, now));
    assert_eq!(IdentifyNamespace::parse(&bytes).unwrap().blocks, 2048);
    let ids = NamespaceIdentifiers::parse(&sent(identify(&mut queue, Cns::NAMESPACE_IDENTIFIERS, 1, now)));
    assert_eq!(ids.uuid, [1; 16]);
    assert_eq!(
        sent(identify(&mut queue, Cns::NAMESPACE, 2, now)),
        [0; IDENTIFY_LEN]
    );
    for (cns, nsid) in [
        (Cns::NAMESPACE, 0),
        (Cns::NAMESPACE_IDENTIFIERS, 2),
        (Cns(0x55), 0),
    ] {
        assert!(
            !completed(identify(&mut queue, cns, nsid, now))
                .status
                .is_success(),
            "{cns:?} {nsid}"
        );
    }
}

#[test]
fn io_queue__belongs_to_a_ready_controller_of_its_host() {
    let now = Instant::now();
    let (target, _) = target();
    let (mut first, cntlid) = admin(&target, SUBSYSTEM, now);
    let (queue, cqe) = io_queue(&target, cntlid, 1, now);
    assert_eq!((cqe.status, cqe.result), (Status::SUCCESS, cntlid.into()));
    assert!(
        io_queue(&target, cntlid, 1, now)
            .1
            .status
            .is(Status::COMMAND_SEQUENCE_ERROR),
        "a queue that exists"
    );
    assert!(
        io_queue(&target, cntlid + 1, 2, now)
            .1
            .status
            .is(Status::CONNECT_INVALID)
    );
    drop(queue);
    assert!(
        io_queue(&target, cntlid, 1, now).1.status.is_success(),
        "a queue that has gone"
    );
    let mut other = Queue::new(target.clone(), PORT, LOCAL, now);
    let mut data = connect_data(SUBSYSTEM, cntlid);
    data.host = Nqn::new("nqn.2014-08.org.example:other").unwrap();
    let cqe = completed(run(&mut other, &connect(3).command(Cid(0)), &emitted(&data), now));
    assert!(cqe.status.is(Status::CONNECT_INVALID));
    configure(&mut first, 0, now);
    assert!(
        io_queue(&target, cntlid, 4, now)
            .1
            .status
            .is(Status::COMMAND_SEQUENCE_ERROR)
    );
}

#[test]
fn io__is_checked_before_it_runs() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let protected = Namespace {
        is_protected: true,
        backend: Arc::new(NullBackend(1 << 40)),
        ..memory(2, 512)
    };
    subsystem.add_namespace(protected).unwrap();
    let (_admin, cntlid) = admin(&target, SUBSYSTEM, now);
    let (mut queue, _) = io_queue(&target, cntlid, 1, now);
    let mut status = |opcode: Opcode, nsid: u32, slba: u64, blocks: u32, data: u32| {
        let mut sqe = Sqe::new(opcode, Cid(1), NsId(nsid));
        Rw {
            slba,
            blocks,
            fua: false,
        }
        .emit(&mut sqe);
        match queue.admit(&sqe, data, now) {
            Ok(_) => Status::SUCCESS,
            Err(cqe) => Status(cqe.status.code()),
        }
    };
    assert_eq!(status(Opcode::READ, 1, 0, 2048, 1 << 20), Status::SUCCESS);
    assert_eq!(
        status(Opcode::READ, 1, 1, 2048, 1 << 20),
        Status::LBA_OUT_OF_RANGE
    );
    assert_eq!(
        status(Opcode::READ, 1, u64::MAX, 1, 512),
        Status::LBA_OUT_OF_RANGE
    );
    assert_eq!(status(Opcode::READ, 1, 0, 1, 1024), Status::SGL_LENGTH_INVALID);
    assert_eq!(status(Opcode::READ, 3, 0, 1, 512), Status::INVALID_NAMESPACE);
    assert_eq!(
        status(Opcode::READ, u32::MAX, 0, 1, 512),
        Status::INVALID_NAMESPACE
    );
    assert_eq!(status(Opcode::WRITE, 2, 0, 1, 512), Status::WRITE_PROTECTED);
    assert_eq!(status(Opcode::WRITE_ZEROES, 2, 0, 1, 0), Status::WRITE_PROTECTED);
    assert_eq!(status(Opcode::READ, 2, 1 << 30, 2048, 1 << 20), Status::SUCCESS);
    assert_eq!(
        status(Opcode::READ, 2, 0, 2049, 2049 * 512),
        Status::INVALID_FIELD,
        "beyond MDTS"
    );
    assert_eq!(status(Opcode(0x55), 1, 0, 1, 512), Status::INVALID_OPCODE);
}

#[test]
fn compare__finds_a_difference_in_any_part() {
    let (_, subsystem) = target();
    let io = |operation| io_of(&subsystem, 1, operation, 4096, 200 << 10);
    let mut data: Vec<u8> = (0..200 << 10).map(|at| at as u8).collect();
    assert_eq!(
        io(Operation::Write { fua: true }).execute(&mut data),
        Status::SUCCESS
    );
    assert_eq!(io(Operation::Compare).execute(&mut data), Status::SUCCESS);
    data[199 << 10] ^= 1;
    assert!(
        io(Operation::Compare)
            .execute(&mut data)
            .is(Status::COMPARE_FAILURE)
    );
    assert_eq!(
        io(Operation::WriteZeroes { fua: false }).execute(&mut []),
        Status::SUCCESS
    );
    assert_eq!(io(Operation::Read).execute(&mut data), Status::SUCCESS);
    assert!(data.iter().all(|byte| *byte == 0));
}

#[test]
fn keep_alive__ends_a_silent_host_alone() {
    let now = Instant::now();
    let (target, _) = target();
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    let (io, _) = io_queue(&target, cntlid, 1, now);
    let (other, _) = admin(&target, SUBSYSTEM, now + Duration::from_secs(4));
    let later = now + Duration::from_secs(7);
    assert!(queue.has_expired(later) && !other.has_expired(later));
    run(
        &mut queue,
        &Sqe::new(Opcode::KEEP_ALIVE, Cid(1), NsId::NONE),
        &[],
        now + Duration::from_secs(4),
    );
    assert!(!queue.has_expired(later) && !io.is_over());
    drop(queue);
    assert!(io.is_over() && !other.is_over());
}

#[test]
fn events__tell_of_namespaces_once_until_the_log_is_read() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let (mut queue, _) = admin(&target, SUBSYSTEM, now);
    let mut features = Sqe::new(Opcode::SET_FEATURES, Cid(1), NsId::NONE);
    features.set_dword(10, 0x0b);
    features.set_dword(11, IdentifyController::NAMESPACE_EVENTS);
    assert!(
        completed(run(&mut queue, &features, &[], now))
            .status
            .is_success()
    );
    for cid in 10..14 {
        let request = Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(cid), NsId::NONE);
        assert!(matches!(run(&mut queue, &request, &[], now), Step::Wait));
    }
    let beyond = Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(14), NsId::NONE);
    assert!(
        completed(run(&mut queue, &beyond, &[], now))
            .status
            .is(Status::EVENT_LIMIT)
    );
    assert_eq!(queue.poll_event(), None);
    subsystem.add_namespace(memory(3, 4096)).unwrap();
    let cqe = queue.poll_event().unwrap();
    assert_eq!(
        (cqe.cid, cqe.result),
        (Cid(10), AsyncEvent::NamespacesChanged.result().into())
    );
    subsystem.add_namespace(memory(4, 4096)).unwrap();
    assert_eq!(queue.poll_event(), None, "the host has not read the log");
    let mut log = Sqe::new(Opcode::GET_LOG_PAGE, Cid(2), NsId::ALL);
    log.set_dword(10, u32::from(LogId::CHANGED_NAMESPACES.0) | 1023 << 16);
    queue.admit(&log, 4096, now).unwrap();
    let changed = sent(queue.execute(&log, &[], now));
    assert_eq!(
        parse_namespace_list(&changed).collect::<Vec<_>>(),
        [NsId(3), NsId(4)]
    );
    subsystem.add_namespace(memory(5, 4096)).unwrap();
    assert_eq!(queue.poll_event().unwrap().cid, Cid(11));
}

#[test]
fn discovery__reports_each_way_to_each_subsystem() {
    let now = Instant::now();
    let (target, _) = target();
    for address in ["127.0.0.1:4420", "[::1]:4420"] {
        let listener = Listener {
            transport: TransportKind::Tcp,
            address: address.parse().unwrap(),
        };
        target.add_listener(listener);
    }
    let (mut queue, _) = admin(&target, DISCOVERY_NQN, now);
    let mut log = |offset: u64, bytes: u32| {
        let mut sqe = Sqe::new(Opcode::GET_LOG_PAGE, Cid(2), NsId::NONE);
        sqe.set_dword(10, u32::from(LogId::DISCOVERY.0) | (bytes / 4 - 1) << 16);
        sqe.set_dword(12, offset as u32);
        queue.admit(&sqe, bytes, now).unwrap();
        queue.execute(&sqe, &[], now)
    };
    let header = DiscoveryHeader::parse(&sent(log(0, 1024))).unwrap();
    assert_eq!(header.entries, 4);
    let bytes = sent(log(1024, 4096));
    let entries: Vec<_> = bytes
        .chunks(1024)
        .map(|bytes| DiscoveryEntry::parse(bytes).unwrap())
        .collect();
    let kinds = entries
        .iter()
        .map(|entry| (entry.kind, entry.address.is_ipv4(), entry.port));
    let expected = [
        (SubsystemKind::Discovery, true, 1),
        (SubsystemKind::Nvm, true, 1),
        (SubsystemKind::Discovery, false, 2),
        (SubsystemKind::Nvm, false, 2),
    ];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    assert_eq!(entries[1].subsystem.as_str(), SUBSYSTEM);
    assert!(completed(log(8192, 1024)).status.is(Status::INVALID_FIELD));
    let (mut queue, _) = admin(&target, SUBSYSTEM, now);
    let mut sqe = Sqe::new(Opcode::GET_LOG_PAGE, Cid(2), NsId::NONE);
    sqe.set_dword(10, u32::from(LogId::DISCOVERY.0));
    queue.admit(&sqe, 4, now).unwrap();
    assert!(
        completed(queue.execute(&sqe, &[], now))
            .status
            .is(Status::INVALID_LOG)
    );
}

#[test]
fn sq_head__advances_with_completions_unless_turned_off() {
    let now = Instant::now();
    let (target, _) = target();
    let (mut queue, _) = admin(&target, SUBSYSTEM, now);
    // Connect and Property Set were the first two.
    let heads: Vec<_> = (0..31)
        .map(|_| queue.complete(Cid(0), Status::SUCCESS, 0).sq_head)
        .collect();
    assert_eq!((heads[0], heads[28], heads[29]), (3, 31, 0));
    let mut quiet = Queue::new(target, PORT, LOCAL, now);
    let mut connect = connect(0);
    connect.no_flow_control = true;
    let data = emitted(&connect_data(SUBSYSTEM, ConnectData::ANY_CONTROLLER));
    assert_eq!(
        completed(run(&mut quiet, &connect.command(Cid(0)), &data, now)).sq_head,
        u16::MAX
    );
}

#[test]
fn authentication__comes_before_everything_else() {
    let now = Instant::now();
    let secrets = Secrets {
        host: Secret::new([1; 32]),
        controller: None,
    };
    let proof = Authentication {
        secrets,
        random: || Some([3; 32]),
    };
    let access = Hosts::any(Terms {
        authentication: Some(proof),
        ..Terms::default()
    });
    let subsystem = Subsystem::new(Nqn::new(SUBSYSTEM).unwrap(), "serial", access);
    let target = Target::default();
    target.add_subsystem(Arc::new(subsystem)).unwrap();
    let mut queue = Queue::new(Arc::new(target), PORT, LOCAL, now);
    let data = emitted(&connect_data(SUBSYSTEM, ConnectData::ANY_CONTROLLER));
    let cqe = completed(run(&mut queue, &connect(0).command(Cid(0)), &data, now));
    assert_eq!((cqe.status, cqe.result >> 16), (Status::SUCCESS, 2));
    assert!(configure(&mut queue, Configuration::enabled().0, now).is(Status::AUTHENTICATION_REQUIRED));
    // Nothing to receive before anything was sent.
    let receive = authentication(FabricsType::AUTHENTICATION_RECEIVE, Cid(1), 4096);
    queue.admit(&receive, 4096, now).unwrap();
    assert!(
        completed(queue.execute(&receive, &[], now))
            .status
            .is(Status::COMMAND_SEQUENCE_ERROR)
    );
    let negotiate = AuthMessage::Negotiate {
        secure_channel: 0,
        hashes: vec![HashId::Sha256],
        groups: vec![DhGroup::Null],
    }
    .emit(1);
    let send = authentication(FabricsType::AUTHENTICATION_SEND, Cid(1), negotiate.len() as u32);
    assert!(
        completed(run(&mut queue, &send, &negotiate, now))
            .status
            .is_success()
    );
    queue.admit(&receive, 4096, now).unwrap();
    let challenge = sent(queue.execute(&receive, &[], now));
    assert_eq!(challenge.len(), 4096);
    assert!(matches!(
        AuthMessage::parse(&challenge),
        Ok((1, AuthMessage::Challenge { .. }))
    ));
    assert!(configure(&mut queue, Configuration::enabled().0, now).is(Status::AUTHENTICATION_REQUIRED));
    assert!(queue.has_expired(now + Duration::from_secs(10)));
    let long = authentication(FabricsType::AUTHENTICATION_SEND, Cid(1), 8192);
    assert!(queue.admit(&long, 8192, now).is_err());
}

#[test]
fn discovery__tells_of_changes_and_of_loopback_to_loopback_alone() {
    let now = Instant::now();
    let (target, _) = target();
    for address in ["127.0.0.1:4420", "192.0.2.1:4420"] {
        let listener = Listener {
            transport: TransportKind::Tcp,
            address: address.parse().unwrap(),
        };
        target.add_listener(listener);
    }
    let entries = |local: &str| {
        let bytes = discovery::log(&target, &Nqn::new(HOST).unwrap(), local.parse().unwrap());
        DiscoveryHeader::parse(&bytes).unwrap().entries
    };
    assert_eq!((entries("127.0.0.1"), entries("192.0.2.1")), (4, 2));
    let log = |local: &str| {
        let bytes = discovery::log(&target, &Nqn::new(HOST).unwrap(), local.parse().unwrap());
        let entries = bytes[DISCOVERY_HEADER_LEN..].chunks(DISCOVERY_ENTRY_LEN);
        entries
            .map(|entry| DiscoveryEntry::parse(entry).unwrap())
            .collect::<Vec<_>>()
    };
    let flags = |local: &str| {
        let all = log(local).into_iter();
        let own = all.filter(|entry| entry.kind == SubsystemKind::Discovery);
        own.map(|entry| entry.flags).collect::<Vec<_>>()
    };
    let (same, stays) = (DiscoveryEntry::SAME_LOG, DiscoveryEntry::PERSISTENT);
    assert_eq!(
        flags("127.0.0.1"),
        [same | stays, stays],
        "the other way tells less"
    );
    assert_eq!(flags("192.0.2.1"), [same | stays]);
    for at in ["127.0.0.1:8009", "192.0.2.9:8009"] {
        target.add_referral(Referral {
            at: Listener {
                transport: TransportKind::Tcp,
                address: at.parse().unwrap(),
            },
            nqn: Nqn::new(DISCOVERY_NQN).unwrap(),
            is_secure: false,
        });
    }
    let referrals = |local: &str| {
        let all = log(local).into_iter();
        all.filter(|entry| entry.kind == SubsystemKind::Referral).count()
    };
    assert_eq!((referrals("127.0.0.1"), referrals("192.0.2.1")), (2, 1));
    let (mut queue, _) = admin(&target, DISCOVERY_NQN, now);
    let mut features = Sqe::new(Opcode::SET_FEATURES, Cid(1), NsId::NONE);
    features.set_dword(10, 0x0b);
    features.set_dword(11, 1);
    assert!(
        completed(run(&mut queue, &features, &[], now))
            .status
            .is(Status::INVALID_FIELD)
    );
    features.set_dword(11, IdentifyController::DISCOVERY_EVENTS);
    assert!(
        completed(run(&mut queue, &features, &[], now))
            .status
            .is_success()
    );
    let request = Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(9), NsId::NONE);
    assert!(matches!(run(&mut queue, &request, &[], now), Step::Wait));
    assert_eq!(queue.poll_event(), None, "nothing has changed");
    let listener = Listener {
        transport: TransportKind::Tcp,
        address: "192.0.2.2:4420".parse().unwrap(),
    };
    target.add_listener(listener);
    assert_eq!(
        queue.poll_event().unwrap().result,
        u64::from(AsyncEvent::DiscoveryChanged.result())
    );
    // A host that does not say how long it may be silent.
    let mut silent = Queue::new(target.clone(), PORT, LOCAL, now);
    let mut connect = connect(0);
    connect.keep_alive_ms = 0;
    let data = emitted(&connect_data(DISCOVERY_NQN, ConnectData::ANY_CONTROLLER));
    completed(run(&mut silent, &connect.command(Cid(0)), &data, now));
    assert!(
        silent.has_expired(now + Duration::from_secs(121))
            && !silent.has_expired(now + Duration::from_secs(119))
    );
}

#[test]
fn log_page__acknowledges_only_what_it_returns() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let (mut queue, _) = admin(&target, SUBSYSTEM, now);
    subsystem.add_namespace(memory(3, 4096)).unwrap();
    assert_eq!(queue.poll_event(), None);
    let mut log = |offset: u32, retains: bool| {
        let mut sqe = Sqe::new(Opcode::GET_LOG_PAGE, Cid(2), NsId::ALL);
        let retain = if retains { 1 << 15 } else { 0 };
        sqe.set_dword(10, u32::from(LogId::CHANGED_NAMESPACES.0) | retain | 1023 << 16);
        sqe.set_dword(12, offset);
        queue.admit(&sqe, 4096, now).unwrap();
        queue.execute(&sqe, &[], now)
    };
    assert!(completed(log(4100, false)).status.is(Status::INVALID_FIELD));
    for retains in [true, false] {
        assert_eq!(
            parse_namespace_list(&sent(log(0, retains))).collect::<Vec<_>>(),
            [NsId(3)]
        );
    }
    assert_eq!(parse_namespace_list(&sent(log(0, false))).count(), 0);
}

fn csts(queue: &mut Queue, now: Instant) -> u64 {
    let property = Property {
        register: Register::STATUS,
        is_wide: false,
        value: 0,
    };
    let sqe = property.command(FabricsType::PROPERTY_GET, Cid(1));
    completed(run(queue, &sqe, &[], now)).result
}

#[test]
fn reset__ends_io_queues_and_waits_for_what_runs() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    let (io, _) = io_queue(&target, cntlid, 1, now);
    let session = association::Session::new(subsystem.association(cntlid).unwrap(), 1);
    let running = session.enter(true).unwrap();
    assert!(!queue.take_reset());
    configure(&mut queue, 0, now);
    assert!(queue.take_reset() && !queue.take_reset());
    assert!(io.is_over() && session.enter(true).is_none());
    assert_eq!(csts(&mut queue, now), 1, "a write of before may still come");
    configure(&mut queue, Configuration::enabled().0, now);
    assert_eq!(csts(&mut queue, now), 0, "nor is it ready again");
    drop(running);
    assert_eq!(csts(&mut queue, now), 1);
    drop(io);
    let session = association::Session::new(subsystem.association(cntlid).unwrap(), 1);
    let running = session.enter(true).unwrap();
    configure(&mut queue, 0, now);
    assert_eq!(csts(&mut queue, now), 1);
    drop(running);
    assert_eq!(csts(&mut queue, now), 0, "the reset is over");
    configure(&mut queue, Configuration::enabled().0, now);
    assert_eq!(csts(&mut queue, now), 1);
    let (io, cqe) = io_queue(&target, cntlid, 1, now);
    assert!(cqe.status.is_success() && !io.is_over());
    // The host's next controller waits in the same way.
    let session = association::Session::new(subsystem.association(cntlid).unwrap(), 1);
    let running = session.enter(true).unwrap();
    drop(queue);
    let (mut next, _) = admin(&target, SUBSYSTEM, now);
    assert_eq!(csts(&mut next, now), 0);
    drop(running);
    assert_eq!(csts(&mut next, now), 1);
}

#[test]
fn end__holds_the_hosts_other_controllers_until_what_runs_is_done() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let (mut lost, other, stranger) = (
        Host::new(&target, 1, now),
        Host::new(&target, 1, now),
        Host::new(&target, 2, now),
    );
    let session = association::Session::new(subsystem.association(lost.cntlid).unwrap(), 1);
    let running = session.enter(true).unwrap();
    assert_eq!(other.io.held_until(now), None);
    let cntlid = lost.cntlid;
    // Its transport may keep the queue until the host has closed its side.
    lost.admin.end();
    // A host that has lost one path writes by another one: what it writes must not be overwritten by what was written before.
    assert!(other.io.held_until(now).is_some_and(|until| until > now));
    assert_eq!(stranger.io.held_until(now), None);
    // A queue for the controller tells the host when it is over.
    let (_, cqe) = io_queue(&target, cntlid, 2, now);
    assert_eq!(cqe.status, Status::CONNECT_BUSY);
    drop(running);
    assert_eq!(other.io.held_until(now), None);
    let (_, cqe) = io_queue(&target, cntlid, 2, now);
    assert_eq!(cqe.status, Status::CONNECT_INVALID.do_not_retry());
    assert_eq!(cqe.result, u64::from(ConnectData::CNTLID_AT) | 1 << 16);
}

#[test]
fn end__frees_the_id_of_a_controller_once() {
    let now = Instant::now();
    let subsystem = Subsystem::new(
        Nqn::new(SUBSYSTEM).unwrap(),
        "serial",
        Hosts::any(Terms::default()),
    );
    let subsystem = Arc::new(subsystem.with_cntlids(7..=7));
    let target = Arc::new(Target::default());
    target.add_subsystem(subsystem.clone()).unwrap();
    let (mut lost, _) = admin(&target, SUBSYSTEM, now);
    lost.end();
    let (next, cntlid) = admin(&target, SUBSYSTEM, now);
    drop(lost);
    assert!(subsystem.association(cntlid).is_some());
    drop(next);
    assert!(subsystem.association(cntlid).is_none());
}

#[test]
fn shutdown__is_complete_when_all_is_flushed() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(4096).unwrap();
    let cached = Namespace {
        backend: Arc::new(FileBackend::open(file.path(), false, 512).unwrap()),
        ..memory(2, 512)
    };
    subsystem.add_namespace(cached).unwrap();
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    assert!(queue.poll_flush().is_none());
    let session = association::Session::new(subsystem.association(cntlid).unwrap(), 1);
    let running = session.enter(true).unwrap();
    configure(&mut queue, Configuration::enabled().0 | 1 << 14, now);
    assert_eq!(csts(&mut queue, now), 1 << 2, "it occurs");
    assert!(queue.poll_flush().is_none(), "a write of before may still come");
    drop(running);
    assert_eq!(csts(&mut queue, now), 1 << 2);
    let flush = queue.poll_flush().unwrap();
    assert_eq!(
        (flush.namespace.nsid, flush.operation),
        (NsId(2), Operation::Flush)
    );
    assert!(queue.poll_flush().is_none());
    assert_eq!(csts(&mut queue, now), 1 << 2);
    queue.flushed(Status::SUCCESS);
    assert_eq!(csts(&mut queue, now), 2 << 2);
}
