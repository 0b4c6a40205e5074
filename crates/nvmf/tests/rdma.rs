//! The server over RDMA, with our host, and with one that does what no host does.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod rdma_host;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_nvmf::backend::FileBackend;
use rdmux_nvmf::host::command;
use rdmux_nvmf::host::queue::Command;
use rdmux_nvmf::target::{Rates, Terms};
use rdmux_verbs::{
    Access as Rights, ConnectError, ConnectParams, Device, Memory, Operation, Options, RKey, RegionSpec,
    Registration, SendRequest, SgeList,
};
use rdmux_wire::nvme::{Cid, ConnectData, DISCOVERY_NQN, Nqn, NsId, Opcode, Sgl, Sqe, Status};
use rdmux_wire::nvme_rdma::{Accept, Reject, Request};

use rdma_host::*;

#[test]
fn connect__has_as_many_receives_as_the_queue_has_entries() {
    let (server, device) = (Running::memory(1), device());
    let host = Host::open(&device, server.address, 0);
    let accept = Accept::parse(host.connection.private_data()).unwrap();
    assert_eq!(accept.receives, ENTRIES as u16);
}

#[test]
fn queue__of_many_commands_answers_all() {
    const COMMANDS: u64 = 30;
    let (server, device) = (Running::memory(2), device());
    let session = server.session(&device, 3);
    std::thread::scope(|scope| {
        for qid in 1..=3 {
            let session = &session;
            scope.spawn(move || {
                let mut queue = session.queue(qid, COMMANDS as u16).unwrap();
                let base = u64::from(qid) * 1000;
                for round in 0..50 {
                    let blocks = |at: u64| at as u32 % 3 + 1;
                    let value = |at: u64| (round + at) as u8;
                    // Those of one block are in the capsule.
                    let write = |at| {
                        let bytes = blocks(at) * 4096;
                        let data = vec![value(at); bytes as usize];
                        command::write(NsId(1), base + at * 3, blocks(at), bytes, data)
                    };
                    run_all(&mut queue, (0..COMMANDS).map(write));
                    let read = |at| {
                        let bytes = blocks(at) * 4096;
                        command::read(NsId(1), base + at * 3, blocks(at), bytes, vec![0; bytes as usize])
                    };
                    for (done, at) in run_all(&mut queue, (0..COMMANDS).map(read)).iter().zip(0..) {
                        assert!(done.bytes().iter().all(|byte| *byte == value(at)), "{at}");
                    }
                }
            });
        }
    });
}

#[test]
fn fused_pairs__of_a_full_queue_are_all_answered() {
    const PAIRS: u64 = 12;
    let (server, device) = (Running::memory(1), device());
    let session = server.session(&device, 1);
    let mut queue = session.queue(1, 2 * PAIRS as u16).unwrap();
    let half = |opcode: Opcode, fuse: u8, slba: u64, value: u8| {
        let mut command = command::write(NsId(1), slba, 1, 4096, vec![value; 4096]);
        let mut bytes = *command.sqe.as_bytes();
        bytes[0] = opcode.0;
        bytes[1] |= fuse;
        command.sqe = Sqe::parse(&bytes).unwrap();
        command
    };
    // More completions at a time than a connection has slots of its own for them.
    for round in 0..20 {
        let pair = |at: u64| {
            [
                half(Opcode::COMPARE, 1, at, round),
                half(Opcode::WRITE, 2, at, round + 1),
            ]
        };
        let done = run_all(&mut queue, (0..PAIRS).flat_map(pair));
        assert_eq!(done.len() as u64, 2 * PAIRS);
    }
}

#[test]
fn file__is_read_and_written() {
    const BYTES: u32 = 1 << 20;
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(16 << 20).unwrap();
    let (server, device) = (
        Running::start(1, Arc::new(FileBackend::open(file.path(), false, 4096).unwrap())),
        device(),
    );
    let session = server.session(&device, 1);
    let mut queue = session.queue(1, 15).unwrap();
    // More than the buffers of a connection, so that commands wait for them.
    let data = |at: u64| vec![at as u8 + 1; BYTES as usize];
    run_all(
        &mut queue,
        (0..15).map(|at| command::write(NsId(1), at * 256, 256, BYTES, data(at))),
    );
    let bytes = std::fs::read(file.path()).unwrap();
    assert!(
        bytes
            .chunks(1 << 20)
            .take(15)
            .zip(0..)
            .all(|(part, at)| part == data(at))
    );
    let reads = (0..15).map(|at| command::read(NsId(1), at * 256, 256, BYTES, vec![0; BYTES as usize]));
    for (done, at) in run_all(&mut queue, reads).iter().zip(0..) {
        assert!(done.bytes() == data(at));
    }
}

#[test]
fn response__invalidates_the_key_that_the_host_names() {
    let (server, device) = (Running::memory(1), device());
    let (_admin, cntlid) = server.admin(&device);
    let mut io = server.io(&device, cntlid, 1);
    let region = io.qp.pd().alloc_mr(1 << 20).unwrap();
    let mut key = region.rkey();
    for round in 0..20u16 {
        key = key.next();
        let spec = RegionSpec {
            memory: io.memory.clone(),
            memory_offset: Host::room(Cid(round)),
            length: 8192,
            iova: 0x7000_0000,
            access: Rights::LOCAL_WRITE | Rights::REMOTE_READ | Rights::REMOTE_WRITE,
        };
        let register = Operation::Register(Box::new(Registration { key, spec }));
        io.qp
            .post_send(SendRequest::new(register, SgeList::EMPTY))
            .unwrap();
        let opcode = if round % 2 == 0 {
            Opcode::WRITE
        } else {
            Opcode::READ
        };
        let mut sqe = rw(opcode, round, 5, 2);
        if opcode == Opcode::WRITE {
            io.memory
                .write(Host::room(Cid(round)), &[round as u8 + 1; 8192])
                .unwrap();
        }
        sqe.set_sgl(Sgl::Keyed {
            address: 0x7000_0000,
            length: 8192,
            rkey: key,
            invalidate: true,
        });
        io.send(&sqe, &[]);
        let (cqe, invalidated) = io.try_completion(Cid(round)).unwrap();
        assert_eq!((cqe.status, invalidated), (Status::SUCCESS, Some(key)));
        if opcode == Opcode::READ {
            assert!(io.data(Cid(round), 8192) == [round as u8; 8192]);
        }
    }
    // A command that is refused gives the key back as well.
    key = key.next();
    let spec = RegionSpec {
        memory: io.memory.clone(),
        memory_offset: 0,
        length: 4096,
        iova: 0,
        access: Rights::LOCAL_WRITE,
    };
    let register = Operation::Register(Box::new(Registration { key, spec }));
    io.qp
        .post_send(SendRequest::new(register, SgeList::EMPTY))
        .unwrap();
    let mut sqe = rw(Opcode::READ, 3, u64::MAX, 1);
    sqe.set_sgl(Sgl::Keyed {
        address: 0,
        length: 4096,
        rkey: key,
        invalidate: true,
    });
    io.send(&sqe, &[]);
    let (cqe, invalidated) = io.try_completion(Cid(3)).unwrap();
    assert_eq!(cqe.status, Status::LBA_OUT_OF_RANGE.do_not_retry());
    assert_eq!(invalidated, Some(key));
}

#[test]
fn key__that_is_wrong_ends_that_queue_alone() {
    let (server, device) = (Running::memory(1), device());
    let (mut admin, cntlid) = server.admin(&device);
    let mut good = server.io(&device, cntlid, 1);
    for (opcode, change) in [
        (Opcode::READ, 1),
        (Opcode::WRITE, 1),
        (Opcode::READ, 0),
        (Opcode::WRITE, 0),
    ] {
        let mut bad = server.io(&device, cntlid, 2);
        let mut sqe = rw(opcode, 1, 0, 1);
        sqe.set_sgl(Sgl::Keyed {
            // With the right key, beyond the end of the memory.
            address: HOST_BYTES - 100,
            length: 4096,
            rkey: RKey(bad.mr.rkey().0 ^ change << 9),
            invalidate: false,
        });
        bad.send(&sqe, &[]);
        assert!(bad.try_completion(Cid(1)).is_err());
        bad.ends();
        assert!(is_written(&mut good, 0, &[0; 4096]));
    }
    let keep_alive = Sqe::new(Opcode::KEEP_ALIVE, Cid(1), NsId::NONE);
    assert_eq!(admin.run(keep_alive, &[], 0).0.status, Status::SUCCESS);
}

#[test]
fn request__is_rejected_with_the_specified_status() {
    let (server, device) = (Running::memory(1), device());
    let good = Request {
        qid: 1,
        receives: 32,
        sends: 31,
        cntlid: 1,
    };
    let mut unknown = good.emit();
    unknown[0] = 1;
    let no_reads = ConnectParams {
        responder_resources: 0,
        ..ConnectParams::default()
    };
    let params = ConnectParams::default();
    let request = |change: fn(&mut Request)| {
        let mut request = good;
        change(&mut request);
        request.emit()
    };
    for (private_data, params, expected) in [
        (unknown, &params, Reject::RecordFormat),
        (request(|request| request.qid = 129), &params, Reject::Qid),
        (request(|request| request.sends = 0), &params, Reject::Sends),
        (request(|request| request.sends = 128), &params, Reject::Sends),
        (
            request(|request| (request.qid, request.sends) = (0, 32)),
            &params,
            Reject::Sends,
        ),
        (request(|request| request.receives = 0), &params, Reject::Receives),
        (good.emit(), &no_reads, Reject::ResponderResources),
    ] {
        match Host::try_open(&device, server.address, &private_data, params) {
            Err(ConnectError::Rejected { private_data, .. }) => {
                assert_eq!(Reject::parse(&private_data), Ok(expected));
            }
            other => panic!("{expected}: {:?}", other.err()),
        }
    }
    assert!(Host::try_open(&device, server.address, &good.emit(), &params).is_ok());
}

#[test]
fn connect__asks_for_the_queue_of_its_connection() {
    let (server, device) = (Running::memory(1), device());
    let mut host = Host::open(&device, server.address, 0);
    let cqe = host.connect(1, 1, SUBSYSTEM, 0);
    assert_eq!(
        (cqe.status, cqe.result),
        (Status::CONNECT_INVALID.do_not_retry(), 42)
    );
    let mut host = Host::open(&device, server.address, 0);
    let cqe = host.connect(0, ConnectData::ANY_CONTROLLER, "nqn.2014-08.org.example:other", 0);
    assert_eq!(
        (cqe.status, cqe.result),
        (Status::CONNECT_INVALID.do_not_retry(), 256 | 1 << 16)
    );
    // Before Connect there is nothing else.
    let mut host = Host::open(&device, server.address, 0);
    let identify = Sqe::new(Opcode::IDENTIFY, Cid(1), NsId::NONE);
    assert_eq!(
        host.run(identify, &[], 4096).0.status,
        Status::COMMAND_SEQUENCE_ERROR.do_not_retry()
    );
}

#[test]
fn sgl__that_is_none_of_rdma_is_refused() {
    let (server, device) = (Running::memory(1), device());
    let (_admin, cntlid) = server.admin(&device);
    let mut io = server.io(&device, cntlid, 1);
    for (sgl, data, expected) in [
        (Sgl::Transport { length: 4096 }, 0, Status::SGL_TYPE_INVALID),
        (
            Sgl::InCapsule {
                offset: 0,
                length: 4096,
            },
            0,
            Status::SGL_OFFSET_INVALID,
        ),
        (
            Sgl::InCapsule {
                offset: 0,
                length: 4096,
            },
            4095,
            Status::SGL_OFFSET_INVALID,
        ),
        (
            Sgl::InCapsule {
                offset: 4096,
                length: 4096,
            },
            4096,
            Status::SGL_OFFSET_INVALID,
        ),
        (
            Sgl::InCapsule {
                offset: 0,
                length: 512,
            },
            512,
            Status::SGL_LENGTH_INVALID,
        ),
        (io.keyed(Cid(1), 8192), 0, Status::SGL_LENGTH_INVALID),
        (io.keyed(Cid(1), 0), 0, Status::SGL_LENGTH_INVALID),
    ] {
        let mut sqe = rw(Opcode::WRITE, 1, 0, 1);
        sqe.set_sgl(sgl);
        io.send(&sqe, &vec![1; data]);
        assert_eq!(io.completion(Cid(1)).status, expected.do_not_retry(), "{sgl:?}");
    }
    // Data in the capsule of a command that returns data.
    io.in_capsule(rw(Opcode::READ, 1, 0, 1), &[1; 4096]);
    assert_eq!(io.completion(Cid(1)).status, Status::INVALID_FIELD.do_not_retry());
    assert!(is_written(&mut io, 0, &[0; 4096]));
}

#[test]
fn capsule__that_is_none_ends_the_connection() {
    let (server, device) = (Running::memory(1), device());
    let (_admin, cntlid) = server.admin(&device);
    let mut good = server.io(&device, cntlid, 1);
    // Shorter than a command, and longer than a capsule.
    for bytes in [0, 63, CAPSULE_LEN as u32 + 1] {
        let mut bad = server.io(&device, cntlid, 2);
        let sge = bad.mr.sge(0, bytes);
        bad.qp
            .post_send(SendRequest::send(sge).wr_id(0).signaled())
            .unwrap();
        bad.ends();
        assert!(is_written(&mut good, 0, &[0; 4096]));
    }
}

#[test]
fn admin_queue__ends_its_controller() {
    let (server, device) = (Running::memory(2), device());
    let (admin, cntlid) = server.admin(&device);
    let mut queues: Vec<_> = (1..=4).map(|qid| server.io(&device, cntlid, qid)).collect();
    drop(admin);
    queues.iter_mut().for_each(Host::ends);
    let (mut admin, cntlid) = server.admin(&device);
    let mut queues: Vec<_> = (1..=4).map(|qid| server.io(&device, cntlid, qid)).collect();
    admin.set_configuration(0);
    queues.iter_mut().for_each(Host::ends);
    admin.enable();
    server.io(&device, cntlid, 1);
}

#[test]
fn keep_alive__ends_a_silent_host() {
    let (server, device) = (Running::memory(1), device());
    let mut host = Host::open(&device, server.address, 0);
    let connected = host.connect(0, ConnectData::ANY_CONTROLLER, SUBSYSTEM, 100);
    assert_eq!(connected.status, Status::SUCCESS);
    host.ends();
}

#[test]
fn host__that_vanishes_leaves_nothing_behind() {
    let (mut server, device) = (Running::memory(1), device());
    let (_admin, cntlid) = server.admin(&device);
    let mut good = server.io(&device, cntlid, 1);
    // More than the buffers of a reactor.
    for round in 0..20 {
        let other = self::device();
        let (admin, cntlid) = server.admin(&other);
        let io = server.io(&other, cntlid, 1);
        (0..20).for_each(|cid| io.command(rw(Opcode::READ, cid, 0, 256), &[], 1 << 20));
        match round % 2 {
            0 => drop((io, admin)),
            _ => drop((admin, io)),
        }
        assert!(is_written(&mut good, 0, &[0; 4096]));
    }
    // A target that ends takes its hosts' connections along.
    server.stop();
    good.ends();
}

#[test]
fn hosts__without_receives_do_not_stop_others() {
    let (server, device) = (Running::memory(1), device());
    let (_admin, cntlid) = server.admin(&device);
    let mut good = server.io(&device, cntlid, 1);
    // Together they want all buffers of the reactor.
    let mut bad: Vec<_> = (0..16)
        .map(|_| {
            let mut host = Host::open(&device, server.address, 0);
            let connected = host.connect(0, ConnectData::ANY_CONTROLLER, DISCOVERY_NQN, 0);
            assert_eq!(connected.status, Status::SUCCESS);
            host.enable();
            for _ in 0..ENTRIES {
                host.command(Sqe::new(Opcode::KEEP_ALIVE, Cid(1), NsId::NONE), &[], 0);
                while host.cq.wait(LONG).unwrap().unwrap().wr_id & RECEIVE == 0 {}
            }
            host
        })
        .collect();
    for host in &bad {
        for cid in 0..ENTRIES as u16 - 1 {
            let mut log = Sqe::new(Opcode::GET_LOG_PAGE, Cid(cid), NsId::NONE);
            let dwords = (1u32 << 20) / 4 - 1;
            log.set_dword(10, 0x70 | dwords << 16);
            log.set_dword(11, dwords >> 16);
            host.command(log, &[], 1 << 20);
        }
    }
    for _ in 0..10 {
        assert!(is_written(&mut good, 0, &[0; 4096]));
    }
    bad.iter_mut().for_each(Host::ends);
    assert!(is_written(&mut good, 0, &[0; 4096]));
}

#[test]
fn hosts__at_once() {
    let server = Running::memory(2);
    let server = &server;
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(move || {
                let device = device();
                for _ in 0..4 {
                    let session = server.session(&device, 4);
                    for qid in 1..=4 {
                        let mut queue = session.queue(qid, 31).unwrap();
                        let read = command::read(NsId(1), 1, 1, 4096, vec![1; 4096]);
                        assert_eq!(run_all(&mut queue, [read])[0].bytes(), [0; 4096]);
                    }
                }
            });
        }
    });
}

fn limited(ios: u64, bytes: u64) -> (Nqn, Terms) {
    let rates = Rates {
        ios: NonZeroU64::new(ios),
        bytes: NonZeroU64::new(bytes),
    };
    let terms = Terms {
        rates,
        ..Terms::default()
    };
    (nqn("nqn.2014-08.org.example:limited"), terms)
}

fn read_block() -> Command {
    command::read(NsId(1), 1, 1, 4096, vec![1; 4096])
}

#[test]
fn limit__of_ios_holds_its_host_to_them() {
    const COMMANDS: u32 = 120;
    const IOS: u32 = 500;
    let (name, terms) = limited(IOS.into(), 0);
    let (server, device) = (Running::with_named([(name.clone(), terms)]), device());
    let session = server.session_of(name, &device, 2);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for qid in 1..=2 {
            let mut queue = session.queue(qid, 31).unwrap();
            scope.spawn(move || {
                for _ in 0..COMMANDS / 2 / 30 {
                    run_all(&mut queue, (0..30).map(|_| read_block()));
                }
            });
        }
    });
    // It may have saved what 10 ms allow, and each queue is one command ahead. Time is meant: that of the limit.
    let ahead = IOS / 100 + 2;
    assert!(began.elapsed() >= Duration::from_secs(1) * (COMMANDS - ahead) / IOS);
}

#[test]
fn limit__holds_up_no_other_host() {
    // A byte a second: after two commands, the second of which is ahead of its time, the next one waits for more than an hour.
    let (name, terms) = limited(0, 1);
    let (server, device) = (Running::with_named([(name.clone(), terms)]), device());
    let session = server.session_of(name.clone(), &device, 1);
    let mut queue = session.queue(1, 8).unwrap();
    for _ in 0..8 {
        queue.submit(read_block());
    }
    queue.wait().unwrap();
    let other = server.session(&device, 1);
    let mut free = other.queue(1, 16).unwrap();
    for _ in 0..20 {
        run_all(&mut free, (0..16).map(|_| read_block()));
    }
    let reads = |host: &Nqn| {
        let controllers = server.subsystem.controllers();
        let own = controllers.iter().find(|controller| controller.host == *host);
        own.map(|controller| controller.counts.reads)
    };
    assert_eq!(reads(&name), Some(2));
}

#[test]
fn events__are_answered_after_other_commands() {
    let (server, device) = (Running::memory(1), device());
    let (mut admin, _) = server.admin(&device);
    // They keep no places: the queue goes on for longer than it has entries.
    for cid in 100..104 {
        admin.command(
            Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(cid), NsId::NONE),
            &[],
            0,
        );
    }
    for cid in 0..200 {
        let keep_alive = Sqe::new(Opcode::KEEP_ALIVE, Cid(cid % 30), NsId::NONE);
        assert_eq!(admin.run(keep_alive, &[], 0).0.status, Status::SUCCESS);
    }
    let over = Sqe::new(Opcode::ASYNC_EVENT_REQUEST, Cid(9), NsId::NONE);
    assert_eq!(
        admin.run(over, &[], 0).0.status,
        Status::EVENT_LIMIT.do_not_retry()
    );
}

/// Returns a device whose packets are lost, and which reaches others by packets alone.
fn faulty_device() -> Device {
    rdmux_soft::register();
    let options = Options {
        faults: Some("loss=2%,dup=1%,reorder=2%,seed=5".parse().unwrap()),
        ..Options::default()
    };
    Device::open_with(address(), options).unwrap()
}

#[test]
fn queue__over_a_link_that_loses_packets() {
    const BYTES: u32 = 64 << 10;
    let (server, device) = (Running::memory(1), faulty_device());
    let session = server.session(&device, 1);
    let mut queue = session.queue(1, 20).unwrap();
    for round in 0..10 {
        let data = |at: u64| vec![(round + at) as u8; BYTES as usize];
        run_all(
            &mut queue,
            (0..20).map(|at| command::write(NsId(1), at * 16, 16, BYTES, data(at))),
        );
        let reads = (0..20).map(|at| command::read(NsId(1), at * 16, 16, BYTES, vec![0; BYTES as usize]));
        for (done, at) in run_all(&mut queue, reads).iter().zip(0..) {
            assert!(done.bytes() == data(at), "{round} {at}");
        }
    }
}

#[test]
fn hosts__by_the_hundred_each_have_their_data() {
    let (server, device) = (Running::memory(2), device());
    let connect = || {
        let (admin, cntlid) = server.admin(&device);
        let io = server.io(&device, cntlid, 1);
        (admin, io)
    };
    let mut hosts: Vec<_> = (0..256).map(|_| connect()).collect();
    for (at, (_, io)) in (0u16..).zip(&hosts) {
        io.command(rw(Opcode::WRITE, 1, at.into(), 1), &[at as u8; 4096], 0);
    }
    for (at, (admin, io)) in (0u16..).zip(&mut hosts) {
        assert_eq!(io.completion(Cid(1)).status, Status::SUCCESS);
        assert!(is_written(io, at.into(), &[at as u8; 4096]));
        let keep_alive = Sqe::new(Opcode::KEEP_ALIVE, Cid(1), NsId::NONE);
        assert_eq!(admin.run(keep_alive, &[], 0).0.status, Status::SUCCESS);
    }
}
