use std::collections::{BTreeSet, HashMap};
use std::net::Ipv4Addr;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rdmux_wire::nvme::*;

use super::*;
use crate::target::tests::{SUBSYSTEM, connect_data, target};
use crate::target::{Hosts, Rates, Terms};

const PORT: Port = port(4096);
const PLACES: usize = 40;
const REMOTE: Remote = Remote {
    address: 0x1000,
    rkey: RKey(0x77),
};

/// A host and the driver of the target: the host's memory has what it sends, by command.
struct Host {
    connection: Connection,
    now: Instant,
    free: BTreeSet<u16>,
    /// Data that the target fetches, by place.
    sends: HashMap<u16, Vec<u8>>,
    fetching: Vec<(u16, u32)>,
    running: Vec<Work>,
    responses: HashMap<Cid, Response>,
    events: Vec<Cqe>,
    /// Bytes that were written to the host, by command.
    written: HashMap<Cid, Vec<u8>>,
    /// Buffers that it may give, and those that it has given.
    buffers_max: usize,
    buffers: usize,
}

impl Host {
    fn new(target: Arc<Target>, qid: u16) -> Host {
        let now = Instant::now();
        let request = Request {
            qid,
            receives: 32,
            sends: 31,
            cntlid: 0,
        };
        assert_eq!(check(&request, true, &PORT), Ok(()));
        let local = Ipv4Addr::LOCALHOST.into();
        Host {
            connection: Connection::new(target, PORT, request, PLACES, local, now),
            now,
            free: (0..PLACES as u16).collect(),
            sends: HashMap::new(),
            fetching: Vec::new(),
            running: Vec::new(),
            responses: HashMap::new(),
            events: Vec::new(),
            written: HashMap::new(),
            buffers_max: usize::MAX,
            buffers: 0,
        }
    }

    /// Sends a capsule. `data` are those that the target will fetch.
    fn send(&mut self, sqe: &Sqe, in_capsule: &[u8], data: &[u8]) {
        let mut capsule = sqe.as_bytes().to_vec();
        capsule.extend_from_slice(in_capsule);
        let place = self.free.pop_first().unwrap();
        self.sends.insert(place, data.to_vec());
        self.connection.handle_capsule(place, &mut capsule, self.now);
    }

    /// Takes what the connection asks for, without doing it.
    fn take(&mut self) {
        loop {
            if self.buffers < self.buffers_max
                && let Some(bytes) = self.connection.wants_buffer()
            {
                self.buffers += 1;
                assert!(self.connection.granted(Pages::new(bytes), self.now).is_some());
            }
            match self.connection.poll() {
                Some(Action::Fetch {
                    place, from, length, ..
                }) => {
                    assert_eq!(from, REMOTE);
                    self.fetching.push((place, length));
                }
                Some(Action::Run(work)) => self.running.push(work),
                Some(Action::Release(place)) => assert!(self.free.insert(place)),
                Some(Action::Respond(response)) => self.respond(response),
                None if self.buffers < self.buffers_max && self.connection.wants_buffer().is_some() => {}
                None => return,
            }
        }
    }

    fn respond(&mut self, response: Response) {
        let Some(place) = response.place else {
            self.events.push(response.cqe);
            return;
        };
        assert!(self.free.insert(place), "one response for each command");
        if let Memory::Buffer(buffer) = &response.memory {
            self.buffers -= 1;
            if let Some((to, length)) = response.write {
                assert_eq!(to, REMOTE);
                let bytes = buffer[..length as usize].to_vec();
                self.written.insert(response.cqe.cid, bytes);
            }
        } else {
            assert!(response.write.is_none());
        }
        self.responses.insert(response.cqe.cid, response);
    }

    fn fetched(&mut self, at: usize) {
        let (place, length) = self.fetching.swap_remove(at);
        let data = self.sends.remove(&place).unwrap();
        let copy = |bytes: &mut [u8]| {
            assert_eq!(bytes.len(), length as usize);
            let part = data.len().min(bytes.len());
            bytes[..part].copy_from_slice(&data[..part]);
        };
        self.connection.fetched(place, copy, self.now);
    }

    fn execute(&mut self, at: usize) {
        let mut work = self.running.swap_remove(at);
        let status = work.execute();
        self.connection.complete(work, status);
    }

    /// Does all that the connection asks for.
    fn settle(&mut self) {
        loop {
            self.take();
            if !self.fetching.is_empty() {
                self.fetched(0);
            } else if !self.running.is_empty() {
                self.execute(0);
            } else {
                return;
            }
        }
    }

    /// Runs a command with data in the host's memory: those given, or room for so many.
    fn run(&mut self, mut sqe: Sqe, data: &[u8], room: u32) -> Cqe {
        sqe.set_sgl(keyed(room.max(data.len() as u32)));
        self.send(&sqe, &[], data);
        self.settle();
        self.responses.remove(&sqe.cid()).unwrap().cqe
    }

    fn connect(&mut self, qid: u16, cntlid: u16, sq_size: u16) -> Cqe {
        let connect = Connect {
            record_format: 0,
            qid,
            sq_size,
            no_flow_control: false,
            keep_alive_ms: 0,
        };
        let mut bytes = vec![0; CONNECT_DATA_LEN];
        connect_data(SUBSYSTEM, cntlid).emit(&mut bytes);
        self.run(connect.command(Cid(0)), &bytes, 0)
    }

    fn admin(target: &Arc<Target>) -> (Host, u16) {
        let mut host = Host::new(target.clone(), 0);
        let cqe = host.connect(0, ConnectData::ANY_CONTROLLER, 31);
        assert_eq!(cqe.status, Status::SUCCESS);
        let property = Property {
            register: Register::CONFIGURATION,
            is_wide: false,
            value: Configuration::enabled().0.into(),
        };
        let set = property.command(FabricsType::PROPERTY_SET, Cid(1));
        assert_eq!(host.run(set, &[], 0).status, Status::SUCCESS);
        (host, cqe.result as u16)
    }

    fn io(target: &Arc<Target>, cntlid: u16) -> Host {
        let mut host = Host::new(target.clone(), 1);
        assert_eq!(host.connect(1, cntlid, 31).status, Status::SUCCESS);
        host
    }
}

fn keyed(length: u32) -> Sgl {
    Sgl::Keyed {
        address: REMOTE.address,
        length,
        rkey: REMOTE.rkey,
        invalidate: false,
    }
}

fn rw(opcode: Opcode, cid: u16, slba: u64, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, Cid(cid), NsId(1));
    Rw {
        slba,
        blocks,
        fua: false,
    }
    .emit(&mut sqe);
    sqe
}

#[test]
fn check__names_what_is_wrong() {
    let good = Request {
        qid: 1,
        receives: 128,
        sends: 127,
        cntlid: 1,
    };
    let admin = Request {
        qid: 0,
        sends: 31,
        ..good
    };
    assert_eq!(check(&good, true, &PORT), Ok(()));
    assert_eq!(check(&admin, true, &PORT), Ok(()));
    assert_eq!(check(&good, false, &PORT), Err(Reject::ResponderResources));
    for (request, expected) in [
        (Request { qid: 129, ..good }, Reject::Qid),
        (Request { sends: 0, ..good }, Reject::Sends),
        (Request { sends: 128, ..good }, Reject::Sends),
        (
            Request {
                sends: u16::MAX,
                ..good
            },
            Reject::Sends,
        ),
        (Request { sends: 32, ..admin }, Reject::Sends),
        (Request { receives: 0, ..good }, Reject::Receives),
    ] {
        assert_eq!(check(&request, true, &PORT), Err(expected), "{request:?}");
    }
}

#[test]
fn commands__move_data_by_what_their_sgl_names() {
    let (target, _) = target();
    let (_admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    assert_eq!(
        io.run(rw(Opcode::WRITE, 1, 0, 8), &[1; 4096], 0).status,
        Status::SUCCESS
    );
    let mut sqe = rw(Opcode::WRITE, 2, 8, 8);
    sqe.set_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    // Bytes behind the data are none of them.
    let mut capsule = vec![2; 4096];
    capsule.push(9);
    io.send(&sqe, &capsule, &[]);
    assert!(
        io.connection.wants_buffer().is_none(),
        "its data are in the capsule"
    );
    io.settle();
    let response = &io.responses[&Cid(2)];
    assert_eq!(response.cqe.status, Status::SUCCESS);
    assert!(matches!(response.memory, Memory::Capsule(_)), "it comes back");
    assert_eq!(
        io.run(rw(Opcode::READ, 3, 0, 16), &[], 8192).status,
        Status::SUCCESS
    );
    let written = &io.written[&Cid(3)];
    assert!(written[..4096] == [1; 4096] && written[4096..] == [2; 4096]);
    assert_eq!(io.buffers, 0);
}

#[test]
fn identify__writes_no_more_than_there_is_room() {
    let (target, _) = target();
    let (mut admin, _) = Host::admin(&target);
    let mut identify = Sqe::new(Opcode::IDENTIFY, Cid(5), NsId::NONE);
    identify.set_dword(10, Cns::CONTROLLER.0.into());
    for (room, expected) in [(4096, 4096), (0xff_ffff, 4096), (100, 100)] {
        assert_eq!(admin.run(identify, &[], room).status, Status::SUCCESS);
        assert_eq!(admin.written[&Cid(5)].len(), expected);
    }
    admin.written.clear();
    assert_eq!(admin.run(identify, &[], 0).status, Status::SUCCESS);
    assert!(admin.written.is_empty());
}

#[test]
fn invalidate__is_what_the_command_has_asked_for() {
    let (target, _) = target();
    let (_admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    let sgl = |length| Sgl::Keyed {
        address: REMOTE.address,
        length,
        rkey: REMOTE.rkey,
        invalidate: true,
    };
    for (mut sqe, length, expected) in [
        (rw(Opcode::READ, 1, 0, 1), 512, Some(REMOTE.rkey)),
        // Refused.
        (rw(Opcode::READ, 1, u64::MAX, 1), 512, Some(REMOTE.rkey)),
        (rw(Opcode::READ, 1, 0, 1), 1024, Some(REMOTE.rkey)),
        // Without data the host has registered nothing.
        (Sqe::new(Opcode::FLUSH, Cid(1), NsId(1)), 0, None),
    ] {
        sqe.set_sgl(sgl(length));
        io.send(&sqe, &[], &[]);
        io.settle();
        assert_eq!(io.responses[&Cid(1)].invalidate, expected, "{sqe:?}");
    }
    let mut sqe = rw(Opcode::READ, 1, 0, 1);
    sqe.set_sgl(keyed(512));
    io.send(&sqe, &[], &[]);
    io.settle();
    assert_eq!(io.responses[&Cid(1)].invalidate, None);
}

#[test]
fn buffers__are_given_in_the_order_of_commands() {
    let (target, _) = target();
    let (_admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    io.buffers_max = 2;
    for cid in 0..20 {
        let mut sqe = rw(
            if cid % 2 == 0 { Opcode::WRITE } else { Opcode::READ },
            cid,
            cid.into(),
            1,
        );
        sqe.set_sgl(keyed(512));
        io.send(&sqe, &[], &[cid as u8; 512]);
    }
    io.take();
    assert_eq!((io.fetching.len(), io.running.len(), io.buffers), (1, 1, 2));
    // Commands without data, and those with data in their capsules, do not wait behind them.
    let mut flush = Sqe::new(Opcode::FLUSH, Cid(99), NsId(1));
    flush.set_sgl(keyed(0));
    io.send(&flush, &[], &[]);
    io.take();
    let at = io.running.len() - 1;
    io.execute(at);
    io.take();
    assert_eq!(io.responses[&Cid(99)].cqe.status, Status::SUCCESS);
    io.settle();
    assert_eq!((io.responses.len(), io.buffers), (21, 0));
    assert!(
        io.responses
            .values()
            .all(|response| response.cqe.status.is_success())
    );
}

#[test]
fn handle_capsule__ends_with_a_host_that_breaks_the_rules() {
    let (target, _) = target();
    let (_admin, cntlid) = Host::admin(&target);
    for length in [0, 1, 63] {
        let mut io = Host::new(target.clone(), 1);
        io.connection.handle_capsule(0, &mut vec![0; length], io.now);
        assert!(matches!(io.connection.end(), Some(End::Violation(_))));
        assert!(io.connection.poll().is_none() && io.connection.wants_buffer().is_none());
    }
    // More commands than the queue has entries.
    let mut io = Host::io(&target, cntlid);
    io.buffers_max = 0;
    for cid in 0..32 {
        let mut sqe = rw(Opcode::READ, cid, 0, 1);
        sqe.set_sgl(keyed(512));
        io.send(&sqe, &[], &[]);
        io.take();
        assert_eq!(io.connection.end(), None);
    }
    let mut sqe = rw(Opcode::READ, 32, 0, 1);
    sqe.set_sgl(keyed(512));
    io.send(&sqe, &[], &[]);
    assert!(matches!(io.connection.end(), Some(End::Violation(_))));
}

#[test]
fn handle_timeout__ends_a_host_that_sends_no_connect() {
    let (target, _) = target();
    let mut host = Host::new(target, 0);
    let deadline = host.connection.deadline().unwrap();
    host.connection
        .handle_timeout(deadline - Duration::from_millis(1));
    assert_eq!(host.connection.end(), None);
    host.connection.handle_timeout(deadline);
    assert_eq!(host.connection.end(), Some(End::Silent));
}

#[test]
fn connect__must_fit_the_request_of_the_connection() {
    let (target, _) = target();
    for (qid, sq_size, at) in [(1, 31, 42), (0, 32, 44), (0, 0, 44)] {
        let cqe = Host::new(target.clone(), 0).connect(qid, ConnectData::ANY_CONTROLLER, sq_size);
        assert_eq!(
            (cqe.status, cqe.result),
            (Status::CONNECT_INVALID.do_not_retry(), at)
        );
    }
}

#[test]
fn reset__ends_the_io_queues_without_responses() {
    let (target, _) = target();
    let (mut admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    let mut sqe = rw(Opcode::READ, 1, 0, 1);
    sqe.set_sgl(keyed(512));
    io.send(&sqe, &[], &[]);
    io.take();
    let property = Property {
        register: Register::CONFIGURATION,
        is_wide: false,
        value: 0,
    };
    let set = property.command(FabricsType::PROPERTY_SET, Cid(1));
    assert_eq!(admin.run(set, &[], 0).status, Status::SUCCESS);
    assert!(admin.connection.take_reset() && !admin.connection.take_reset());
    io.connection.handle_change();
    assert_eq!(io.connection.end(), Some(End::ControllerOver));
    io.settle();
    assert!(!io.responses.contains_key(&Cid(1)));
}

/// Capsules of any content, and what the driver does in any order: each command gets one response, and each buffer comes back.
#[test]
fn handle_capsule__survives_any_bytes() {
    for seed in 0..300 {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let (target, _) = target();
        let (admin, cntlid) = Host::admin(&target);
        let is_io = seed % 3 != 0;
        let mut host = if is_io { Host::io(&target, cntlid) } else { admin };
        host.buffers_max = 1 + dice.next_u32() as usize % 4;
        let mut sent = 0;
        for _ in 0..400 {
            let outstanding = PLACES - host.free.len();
            match dice.next_u32() % 4 {
                0 | 1 if outstanding < 30 => {
                    let mut bytes = [0; SQE_LEN];
                    dice.fill_bytes(&mut bytes);
                    let mut sqe = Sqe::parse(&bytes).unwrap();
                    if dice.next_u32() % 4 > 0 {
                        let opcodes = [
                            Opcode::READ,
                            Opcode::WRITE,
                            Opcode::FLUSH,
                            Opcode::COMPARE,
                            Opcode::VERIFY,
                        ];
                        let opcode = opcodes[dice.next_u32() as usize % opcodes.len()];
                        let blocks = 1 + dice.next_u32() % 16;
                        sqe = rw(opcode, sent, u64::from(dice.next_u32() % 2100), blocks);
                        let length = match dice.next_u32() % 4 {
                            0 => dice.next_u32() % 10_000,
                            _ => blocks * 512,
                        };
                        sqe.set_sgl(match dice.next_u32() % 4 {
                            0 => Sgl::InCapsule { offset: 0, length },
                            _ => keyed(length),
                        });
                    } else if let Ok(Sgl::Keyed { length, .. }) = sqe.sgl() {
                        sqe.set_sgl(keyed(length));
                    }
                    let mut in_capsule = vec![0; dice.next_u32() as usize % 9000];
                    dice.fill_bytes(&mut in_capsule);
                    sent = sent.wrapping_add(1);
                    host.send(&sqe, &in_capsule, &[5; 8192]);
                }
                2 if !host.fetching.is_empty() => {
                    let at = dice.next_u32() as usize % host.fetching.len();
                    host.fetched(at);
                }
                3 if !host.running.is_empty() => {
                    let at = dice.next_u32() as usize % host.running.len();
                    host.execute(at);
                }
                _ => host.take(),
            }
        }
        host.settle();
        if host.connection.end().is_none() {
            assert_eq!((host.free.len(), host.buffers), (PLACES, 0), "seed {seed}");
        }
    }
}

/// Returns an I/O that has a buffer.
pub(crate) fn read_into_a_buffer() -> Work {
    let (target, _) = target();
    let (_admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    let mut sqe = rw(Opcode::READ, 1, 0, 8);
    sqe.set_sgl(keyed(4096));
    io.send(&sqe, &[], &[]);
    io.take();
    io.running.pop().unwrap()
}

#[test]
fn write__that_begins_after_a_reset_changes_nothing() {
    let (target, _) = target();
    let (mut admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    let mut sqe = rw(Opcode::WRITE, 1, 0, 8);
    sqe.set_sgl(keyed(4096));
    io.send(&sqe, &[], &[7; 4096]);
    io.take();
    io.fetched(0);
    io.take();
    let property = Property {
        register: Register::CONFIGURATION,
        is_wide: false,
        value: 0,
    };
    let set = property.command(FabricsType::PROPERTY_SET, Cid(1));
    assert_eq!(admin.run(set, &[], 0).status, Status::SUCCESS);
    let mut late = io.running.pop().unwrap();
    assert!(!late.io().may_wait());
    assert_eq!(late.execute(), Status::SQ_DELETED);
    let (_admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    assert_eq!(
        io.run(rw(Opcode::READ, 1, 0, 8), &[], 4096).status,
        Status::SUCCESS
    );
    assert_eq!(io.written[&Cid(1)], [0; 4096]);
}

#[test]
fn data_of_admin_commands__are_made_in_a_buffer_that_was_given() {
    let (target, _) = target();
    let (mut admin, _) = Host::admin(&target);
    admin.buffers_max = 0;
    let mut identify = Sqe::new(Opcode::IDENTIFY, Cid(1), NsId::NONE);
    identify.set_dword(10, u32::from(Cns::CONTROLLER.0));
    // Room for more than any command has.
    identify.set_sgl(keyed(u32::MAX >> 8));
    admin.send(&identify, &[], &[]);
    admin.settle();
    assert_eq!(admin.connection.wants_buffer(), Some(1 << 20));
    assert!(admin.responses.is_empty());
    admin.buffers_max = 1;
    admin.settle();
    assert_eq!(admin.responses[&Cid(1)].cqe.status, Status::SUCCESS);
    assert_eq!(admin.written[&Cid(1)].len(), IDENTIFY_LEN);
    assert_eq!(admin.buffers, 0);
}

#[test]
fn limit__holds_commands_up_without_buffers() {
    let (target, subsystem) = target();
    let (admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    // Times are counted from when the controller began.
    io.now = admin.now;
    let ios = std::num::NonZeroU64::new(1000);
    let terms = Terms {
        rates: Rates { ios, bytes: None },
        ..Terms::default()
    };
    target.set_hosts(subsystem.nqn(), Hosts::any(terms)).unwrap();
    for cid in 1..=10 {
        let mut sqe = rw(Opcode::WRITE, cid, cid.into(), 1);
        if cid % 2 == 0 {
            sqe.set_sgl(Sgl::InCapsule {
                offset: 0,
                length: 512,
            });
            io.send(&sqe, &[cid as u8; 512], &[]);
        } else {
            sqe.set_sgl(keyed(512));
            io.send(&sqe, &[], &[cid as u8; 512]);
        }
    }
    io.settle();
    assert_eq!((io.responses.len(), io.buffers), (2, 0));
    assert!(io.connection.is_held() && io.connection.wants_buffer().is_none());
    for done in 3..=10 {
        let until = io.connection.held_until(io.now).unwrap();
        assert_eq!(until, io.now + Duration::from_millis(1));
        io.now += Duration::from_micros(500);
        io.connection.resume(io.now);
        io.settle();
        assert!(io.responses.len() < done);
        io.now = until;
        io.connection.resume(io.now);
        io.settle();
        assert_eq!(io.responses.len(), done);
    }
    assert!(!io.connection.is_held());
    io.now += Duration::from_secs(1);
    assert_eq!(
        io.run(rw(Opcode::READ, 20, 1, 10), &[], 5120).status,
        Status::SUCCESS
    );
    let expected: Vec<u8> = (1..=10).flat_map(|cid| [cid; 512]).collect();
    assert!(io.written[&Cid(20)] == expected);
}

#[test]
fn fused_pair__completes_twice_and_keeps_no_buffer() {
    for is_in_capsule in [true, false] {
        let (target, _) = target();
        let (_admin, cntlid) = Host::admin(&target);
        let mut io = Host::io(&target, cntlid);
        let send = |io: &mut Host, sqe: Sqe, fuse: u8, data: [u8; 4096]| {
            let mut bytes = *sqe.as_bytes();
            bytes[1] |= fuse;
            let mut sqe = Sqe::parse(&bytes).unwrap();
            sqe.set_sgl(match is_in_capsule {
                true => Sgl::InCapsule {
                    offset: 0,
                    length: 4096,
                },
                false => keyed(4096),
            });
            match is_in_capsule {
                true => io.send(&sqe, &data, &[]),
                false => io.send(&sqe, &[], &data),
            }
        };
        for (old, statuses) in [
            (0, [Status::SUCCESS, Status::SUCCESS]),
            (0, [Status::COMPARE_FAILURE, Status::FAILED_FUSED]),
        ] {
            send(&mut io, rw(Opcode::COMPARE, 1, 8, 8), 1, [old; 4096]);
            send(&mut io, rw(Opcode::WRITE, 2, 8, 8), 2, [9; 4096]);
            io.take();
            if !is_in_capsule {
                // The data of the second come first.
                io.fetched(1);
                io.take();
                assert!(io.events.is_empty());
            }
            // Buffers of commands that wait are not those of the driver.
            io.buffers = 0;
            io.settle();
            let events: Vec<_> = io.events.drain(..).collect();
            assert_eq!(events.len(), 2);
            assert!(
                events
                    .iter()
                    .zip(statuses)
                    .all(|(cqe, status)| cqe.status.is(status))
            );
        }
        assert_eq!(io.free.len(), PLACES);
        io.buffers = 0;
        assert_eq!(
            io.run(rw(Opcode::READ, 3, 8, 8), &[], 4096).status,
            Status::SUCCESS
        );
        assert_eq!(io.written[&Cid(3)], [9; 4096]);
    }
}

/// Nothing comes after the second command that would have the first one's completion sent with it.
#[test]
fn fused_pair__completes_its_first_command_when_the_second_fails() {
    let (target, _) = target();
    let (_admin, cntlid) = Host::admin(&target);
    let mut io = Host::io(&target, cntlid);
    let send = |io: &mut Host, sqe: Sqe, fuse: u8| {
        let mut bytes = *sqe.as_bytes();
        bytes[1] |= fuse;
        let mut sqe = Sqe::parse(&bytes).unwrap();
        let (offset, length) = (0, 4096);
        sqe.set_sgl(Sgl::InCapsule { offset, length });
        io.send(&sqe, &[0; 4096], &[]);
        io.take();
    };
    send(&mut io, rw(Opcode::COMPARE, 1, 8, 8), 1);
    assert!(io.events.is_empty());
    send(&mut io, rw(Opcode::WRITE, 2, 16, 8), 2);
    let first = io.events.pop().unwrap();
    assert_eq!((first.cid, first.status), (Cid(1), Status::FAILED_FUSED));
}
