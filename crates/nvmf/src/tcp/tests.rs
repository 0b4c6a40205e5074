use std::collections::HashMap;
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rdmux_wire::nvme::*;
use rdmux_wire::nvme_tcp::{COMMON_LEN, PduType};

use super::inbox::check_header;
use super::*;
use crate::target::tests::{PORT, SUBSYSTEM, connect_data, target};
use crate::target::{Hosts, Rates, Terms};

/// A host's side that sends any PDU, and keeps what the controller answers.
struct Host {
    connection: Connection,
    buffers: Buffers,
    digests: Digests,
    now: Instant,
    /// Bytes in which PDUs arrive.
    dice: ChaCha8Rng,
    responses: HashMap<Cid, Cqe>,
    requests: Vec<Transfer>,
    data: HashMap<Cid, Vec<u8>>,
    ended: Option<Fatal>,
    received: Vec<u8>,
}

impl Host {
    fn new(target: Arc<Target>, digests: Digests, seed: u64) -> Host {
        let now = Instant::now();
        let mut host = Host {
            connection: Connection::new(target, PORT, (std::net::Ipv4Addr::LOCALHOST, 4420).into(), now),
            buffers: Buffers::default(),
            digests: Digests::empty(),
            now,
            dice: ChaCha8Rng::seed_from_u64(seed),
            responses: HashMap::new(),
            requests: Vec::new(),
            data: HashMap::new(),
            ended: None,
            received: Vec::new(),
        };
        let request = Initialize {
            alignment: 4,
            digests,
            limit: 1,
        };
        host.send(&Header::IcReq(request), &[]);
        host.digests = digests;
        host
    }

    /// Returns a PDU.
    fn pdu(&self, header: &Header, data: &[u8]) -> Vec<u8> {
        let layout = DataLayout {
            len: data.len(),
            digests: self.digests,
            alignment: 4,
        };
        let mut bytes = vec![0; 256];
        let common = header.emit(Flags::LAST, layout, &mut bytes);
        let end = header.kind().header_len();
        if common.flags.contains(Flags::HEADER_DIGEST) {
            let mut digest = new_digest();
            digest.update(&bytes[..end]);
            bytes[end..end + 4].copy_from_slice(&(digest.finalize() as u32).to_le_bytes());
        }
        bytes.truncate(common.data_offset);
        bytes.extend_from_slice(data);
        if common.flags.contains(Flags::DATA_DIGEST) {
            let mut digest = new_digest();
            digest.update(data);
            bytes.extend_from_slice(&(digest.finalize() as u32).to_le_bytes());
        }
        bytes
    }

    fn send(&mut self, header: &Header, data: &[u8]) {
        let bytes = self.pdu(header, data);
        self.send_bytes(&bytes);
    }

    /// Has the connection receive bytes, in parts of any length, and does what it asks for.
    fn send_bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.connection.end().is_none() {
            let space = self.connection.space();
            let part = 1 + self.dice.next_u32() as usize % bytes.len().min(space.len());
            space[..part].copy_from_slice(&bytes[..part]);
            bytes = &bytes[part..];
            self.connection.received(part, &mut self.buffers, self.now);
            self.receive();
        }
        self.receive();
    }

    /// Carries out I/Os and takes what is sent, until there is neither.
    fn receive(&mut self) {
        loop {
            while let Some(mut work) = self.connection.poll_io(&mut self.buffers, self.now) {
                let status = work.execute();
                self.connection.complete(work, status, &mut self.buffers);
            }
            let mut slices = [IoSlice::new(&[]); 3];
            let number = self.connection.slices(&mut slices);
            let all: Vec<u8> = slices[..number]
                .iter()
                .flat_map(|slice| slice.iter().copied())
                .collect();
            if all.is_empty() {
                break;
            }
            let part = 1 + self.dice.next_u32() as usize % all.len();
            self.received.extend_from_slice(&all[..part]);
            self.connection.sent(part, &mut self.buffers);
        }
        loop {
            let bytes = &self.received;
            if bytes.len() < COMMON_LEN {
                return;
            }
            // Before the response to its request, a connection has no digests.
            let is_initial = bytes[0] == PduType::IcResp as u8;
            let digests = if is_initial {
                Digests::empty()
            } else {
                self.digests
            };
            let common = Common::parse(bytes, digests).unwrap();
            let header = check_header(&common, bytes).unwrap();
            let data = bytes[common.data_offset..common.data_offset + common.data_len].to_vec();
            if common.flags.contains(Flags::DATA_DIGEST) {
                let mut digest = new_digest();
                digest.update(&data);
                let end = common.data_offset + common.data_len;
                assert_eq!(bytes[end..end + 4], (digest.finalize() as u32).to_le_bytes());
            }
            self.received.drain(..common.pdu_len);
            match header {
                Header::IcResp(response) => assert_eq!(response.alignment, 4),
                Header::CapsuleResp(cqe) => assert!(self.responses.insert(cqe.cid, cqe).is_none()),
                Header::R2t(transfer) => self.requests.push(transfer),
                Header::C2hData(transfer) => {
                    let all = self.data.entry(transfer.cid).or_default();
                    assert_eq!(transfer.offset as usize, all.len());
                    all.extend_from_slice(&data);
                    if common.flags.contains(Flags::SUCCESS) {
                        let cqe = Cqe {
                            result: 0,
                            sq_head: u16::MAX,
                            cid: transfer.cid,
                            status: Status::SUCCESS,
                        };
                        assert!(self.responses.insert(cqe.cid, cqe).is_none());
                    }
                }
                Header::C2hTermReq(fatal) => self.ended = Some(fatal),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Sends a command, and its data in the capsule or as they are asked for. Returns its completion and the data of it.
    fn run(&mut self, mut sqe: Sqe, data: &[u8], room: u32, is_in_capsule: bool) -> (Cqe, Vec<u8>) {
        let cid = sqe.cid();
        self.responses.remove(&cid);
        match is_in_capsule {
            true => {
                sqe.set_sgl(Sgl::InCapsule {
                    offset: 0,
                    length: data.len() as u32,
                });
                self.send(&Header::CapsuleCmd(sqe), data);
            }
            false => {
                sqe.set_sgl(Sgl::Transport {
                    length: room.max(data.len() as u32),
                });
                self.send(&Header::CapsuleCmd(sqe), &[]);
                for request in std::mem::take(&mut self.requests) {
                    let (at, end) = (
                        request.offset as usize,
                        (request.offset + request.length) as usize,
                    );
                    // In two parts.
                    let middle = at + (end - at) / 2;
                    for (at, end) in [(at, middle), (middle, end)] {
                        let transfer = Transfer {
                            offset: at as u32,
                            length: (end - at) as u32,
                            ..request
                        };
                        self.send(&Header::H2cData(transfer), &data[at..end]);
                    }
                }
            }
        }
        let cqe = self.responses[&cid];
        (cqe, self.data.remove(&cid).unwrap_or_default())
    }

    fn connect(&mut self, qid: u16, cntlid: u16, no_flow_control: bool) -> Cqe {
        let connect = Connect {
            record_format: 0,
            qid,
            sq_size: 31,
            no_flow_control,
            keep_alive_ms: 0,
        };
        let mut data = vec![0; CONNECT_DATA_LEN];
        connect_data(SUBSYSTEM, cntlid).emit(&mut data);
        self.run(connect.command(Cid(100)), &data, 0, true).0
    }
}

/// Returns a host's admin queue and an I/O queue of a controller that is ready.
fn hosts(digests: Digests, no_flow_control: bool, seed: u64) -> (Host, Host) {
    hosts_of(&target().0, digests, no_flow_control, seed)
}

fn hosts_of(target: &Arc<Target>, digests: Digests, no_flow_control: bool, seed: u64) -> (Host, Host) {
    let mut admin = Host::new(target.clone(), digests, seed);
    let cntlid = admin.connect(0, ConnectData::ANY_CONTROLLER, false).result as u16;
    let property = Property {
        register: Register::CONFIGURATION,
        is_wide: false,
        value: Configuration::enabled().0.into(),
    };
    let (cqe, _) = admin.run(property.command(FabricsType::PROPERTY_SET, Cid(1)), &[], 0, false);
    assert_eq!(cqe.status, Status::SUCCESS);
    let mut io = Host::new(target.clone(), digests, seed + 1);
    assert_eq!(io.connect(1, cntlid, no_flow_control).status, Status::SUCCESS);
    (admin, io)
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
fn end__of_an_admin_queue_ends_its_controller() {
    let (mut admin, io) = hosts(Digests::empty(), false, 1);
    assert!(!io.connection.queue.is_over());
    admin.send(&Header::H2cTermReq(Fatal::Sequence), &[]);
    assert_eq!(admin.connection.end(), Some(End::Terminated(Fatal::Sequence)));
    assert!(admin.connection.take_reset());
    assert!(io.connection.queue.is_over());
}

#[test]
fn io__returns_what_was_written() {
    let every = [Digests::empty(), Digests::HEADER, Digests::DATA, Digests::all()];
    for (seed, digests) in every.into_iter().enumerate() {
        for no_flow_control in [false, true] {
            let (_admin, mut io) = hosts(digests, no_flow_control, 10 * seed as u64);
            for (cid, blocks, is_in_capsule) in
                [(1, 1, true), (2, 32, true), (3, 32, false), (4, 2048, false)]
            {
                let data: Vec<u8> = (0..blocks * 512)
                    .map(|at| (at / 512 + at + u32::from(cid)) as u8)
                    .collect();
                let (cqe, _) = io.run(rw(Opcode::WRITE, cid, 0, blocks), &data, 0, is_in_capsule);
                assert_eq!(cqe.status, Status::SUCCESS, "{digests:?} {blocks}");
                let (cqe, read) = io.run(rw(Opcode::READ, cid, 0, blocks), &[], blocks * 512, false);
                assert_eq!(cqe.status, Status::SUCCESS, "{digests:?} {blocks}");
                assert!(read == data, "{digests:?} {blocks}");
            }
        }
    }
}

#[test]
fn capsule__has_no_more_data_than_its_listener_takes() {
    for (limit, bytes, is_fatal) in [(512, 512, false), (512, 1024, true), (0, 512, true)] {
        let (_admin, mut io) = hosts(Digests::empty(), false, 3);
        io.connection.port = port(limit);
        let mut sqe = rw(Opcode::WRITE, 1, 0, bytes / 512);
        sqe.set_sgl(Sgl::InCapsule {
            offset: 0,
            length: bytes,
        });
        io.send(&Header::CapsuleCmd(sqe), &vec![7; bytes as usize]);
        assert_eq!(io.ended, is_fatal.then_some(Fatal::Limit), "{limit} {bytes}");
        assert_eq!(io.responses.contains_key(&Cid(1)), !is_fatal);
    }
}

#[test]
fn admin__identifies_over_the_wire() {
    let (mut admin, _io) = hosts(Digests::all(), false, 1);
    let mut sqe = Sqe::new(Opcode::IDENTIFY, Cid(5), NsId::NONE);
    sqe.set_dword(10, Cns::CONTROLLER.0.into());
    let (cqe, data) = admin.run(sqe, &[], 4096, false);
    assert_eq!(cqe.status, Status::SUCCESS);
    assert_eq!(
        IdentifyController::parse(&data).unwrap().subsystem.as_str(),
        SUBSYSTEM
    );
    // No room: no data.
    let (cqe, data) = admin.run(sqe, &[], 0, false);
    assert_eq!((cqe.status, data.len()), (Status::SUCCESS, 0));
}

#[test]
fn refused__the_stream_goes_on_behind_its_data() {
    let (_admin, mut io) = hosts(Digests::all(), false, 2);
    let (cqe, _) = io.run(rw(Opcode::WRITE, 1, 5000, 8), &[7; 4096], 0, true);
    assert!(cqe.status.is(Status::LBA_OUT_OF_RANGE));
    let (cqe, _) = io.run(rw(Opcode::READ, 2, 0, 8), &[7; 4096], 0, true);
    assert!(
        cqe.status.is(Status::INVALID_FIELD),
        "data that the command does not take"
    );
    let mut keyed = rw(Opcode::READ, 3, 0, 8);
    keyed.set_sgl(Sgl::Keyed {
        address: 0,
        length: 4096,
        rkey: rdmux_wire::RKey(1),
        invalidate: false,
    });
    io.send(&Header::CapsuleCmd(keyed), &[]);
    assert!(io.responses[&Cid(3)].status.is(Status::SGL_TYPE_INVALID));
    let (cqe, _) = io.run(rw(Opcode::WRITE, 4, 0, 8), &[7; 4096], 0, true);
    assert_eq!(cqe.status, Status::SUCCESS);
}

#[test]
fn damaged_data__fail_the_command_alone() {
    let (_admin, mut io) = hosts(Digests::DATA, false, 3);
    let mut sqe = rw(Opcode::WRITE, 1, 0, 8);
    sqe.set_sgl(Sgl::InCapsule {
        offset: 0,
        length: 4096,
    });
    let mut bytes = io.pdu(&Header::CapsuleCmd(sqe), &[7; 4096]);
    bytes[100] ^= 1;
    io.send_bytes(&bytes);
    assert_eq!(io.responses[&Cid(1)].status, Status::TRANSIENT_TRANSPORT);
    let (_, data) = io.run(rw(Opcode::READ, 2, 0, 8), &[], 4096, false);
    assert_eq!(data, [0; 4096]);
}

#[test]
fn violation__ends_the_connection_with_its_reason() {
    let transfer = Transfer {
        cid: Cid(1),
        tag: 0,
        offset: 0,
        length: 4096,
    };
    let request = |io: &mut Host| {
        let mut sqe = rw(Opcode::WRITE, 1, 0, 16);
        sqe.set_sgl(Sgl::Transport { length: 8192 });
        io.send(&Header::CapsuleCmd(sqe), &[]);
        io.requests.pop().unwrap()
    };
    let end = |act: &dyn Fn(&mut Host)| {
        let (_admin, mut io) = hosts(Digests::HEADER, false, 4);
        act(&mut io);
        io.ended
    };
    assert_eq!(
        end(&|io| io.send(&Header::H2cData(transfer), &[0; 4096])),
        Some(Fatal::InvalidField(10))
    );
    let ahead = |io: &mut Host| {
        let asked = request(io);
        let ahead = Transfer {
            offset: 4096,
            length: 4096,
            ..asked
        };
        io.send(&Header::H2cData(ahead), &[0; 4096]);
    };
    assert_eq!(end(&ahead), Some(Fatal::OutOfRange));
    let long = |io: &mut Host| {
        let asked = request(io);
        let long = Transfer {
            length: 8196,
            ..asked
        };
        io.send(&Header::H2cData(long), &[0; 8196]);
    };
    assert_eq!(end(&long), Some(Fatal::OutOfRange));
    let false_length = |io: &mut Host| {
        let asked = request(io);
        io.send(&Header::H2cData(asked), &[0; 4096]);
    };
    assert_eq!(end(&false_length), Some(Fatal::InvalidField(16)));
    let again = Initialize {
        alignment: 4,
        digests: Digests::HEADER,
        limit: 1,
    };
    assert_eq!(
        end(&|io| io.send(&Header::IcReq(again), &[])),
        Some(Fatal::Sequence)
    );
    assert_eq!(
        end(&|io| io.send(&Header::R2t(transfer), &[])),
        Some(Fatal::Sequence)
    );
    let damaged = |io: &mut Host| {
        let mut bytes = io.pdu(&Header::CapsuleCmd(rw(Opcode::READ, 1, 0, 8)), &[]);
        bytes[40] ^= 1;
        io.send_bytes(&bytes);
    };
    assert_eq!(end(&damaged), Some(Fatal::HeaderDigest));
    let capsule = |io: &mut Host| {
        let mut sqe = rw(Opcode::WRITE, 1, 0, 64);
        sqe.set_sgl(Sgl::InCapsule {
            offset: 0,
            length: 32768,
        });
        io.send(&Header::CapsuleCmd(sqe), &[0; 32768]);
    };
    assert_eq!(end(&capsule), Some(Fatal::Limit));
    let overrun = |io: &mut Host| {
        for cid in 0..33 {
            let mut sqe = rw(Opcode::WRITE, cid, 0, 8);
            sqe.set_sgl(Sgl::Transport { length: 4096 });
            io.send(&Header::CapsuleCmd(sqe), &[]);
        }
    };
    assert_eq!(end(&overrun), Some(Fatal::Limit));
}

#[test]
fn large_data__wait_for_room_in_their_order() {
    let (_admin, mut io) = hosts(Digests::empty(), false, 5);
    for cid in 1..=8 {
        let mut sqe = rw(Opcode::WRITE, cid, 0, 2048);
        sqe.set_sgl(Sgl::Transport { length: 1 << 20 });
        io.send(&Header::CapsuleCmd(sqe), &[]);
    }
    let asked: Vec<_> = io.requests.iter().map(|request| request.cid.0).collect();
    assert_eq!(asked, [1, 2, 3, 4], "{BUFFERED_MAX} bytes");
    let first = io.requests.remove(0);
    io.send(&Header::H2cData(first), &vec![1; 1 << 20]);
    assert_eq!(io.responses[&Cid(1)].status, Status::SUCCESS);
    assert_eq!(io.requests.last().unwrap().cid, Cid(5));
}

#[test]
fn unread_responses__stop_the_receiving() {
    let (_admin, mut io) = hosts(Digests::empty(), false, 6);
    let bytes = io.pdu(&Header::CapsuleCmd(rw(Opcode(0x55), 1, 0, 8)), &[]);
    let mut commands = 0;
    while io.connection.wants_bytes() {
        let space = io.connection.space();
        space[..bytes.len()].copy_from_slice(&bytes);
        io.connection.received(bytes.len(), &mut io.buffers, io.now);
        commands += 1;
        assert!(commands < 10_000);
    }
    assert!(io.connection.end().is_none());
    let mut slices = [IoSlice::new(&[]); 64];
    io.connection.slices(&mut slices);
    let unsent: usize = slices.iter().map(|slice| slice.len()).sum();
    assert_eq!(unsent, 24 * commands);
    io.connection.sent(unsent, &mut io.buffers);
    assert!(io.connection.wants_bytes());
}

#[test]
fn many_large_reads__all_complete() {
    let (_admin, mut io) = hosts(Digests::empty(), true, 7);
    io.responses.clear();
    for cid in 1..=8 {
        let mut sqe = rw(Opcode::READ, cid, 0, 2048);
        sqe.set_sgl(Sgl::Transport { length: 1 << 20 });
        io.send(&Header::CapsuleCmd(sqe), &[]);
    }
    assert_eq!(io.responses.len(), 8, "more than {BUFFERED_MAX} bytes");
    assert!(io.data.values().all(|data| data.len() == 1 << 20));
}

#[test]
fn pdus_without_digests__have_none_on_a_connection_that_has_them() {
    let request = Initialize {
        alignment: 4,
        digests: Digests::empty(),
        limit: 1,
    };
    let headers = [
        Header::IcReq(request),
        Header::H2cTermReq(Fatal::Sequence),
        Header::C2hTermReq(Fatal::Sequence),
    ];
    for (header, end) in headers.into_iter().zip([
        End::Violation(Fatal::Sequence),
        End::Terminated(Fatal::Sequence),
        End::Violation(Fatal::Sequence),
    ]) {
        let (_admin, mut io) = hosts(Digests::all(), false, 8);
        let mut bytes = io.pdu(&header, &[]);
        // As if there were digests.
        bytes[1] = 3;
        assert_eq!(bytes.len(), header.kind().header_len());
        io.send_bytes(&bytes);
        assert_eq!(io.connection.end(), Some(end));
    }
    // A reason of a later version.
    let (_admin, mut io) = hosts(Digests::empty(), false, 9);
    let mut bytes = io.pdu(&Header::H2cTermReq(Fatal::Sequence), &[]);
    bytes[8] = 99;
    io.send_bytes(&bytes);
    assert_eq!(io.connection.end(), Some(End::Terminated(Fatal::Other(99))));
}

#[test]
fn ended_controller__takes_its_connections_along_without_a_completion() {
    let (admin, mut io) = hosts(Digests::empty(), false, 10);
    drop(admin);
    let mut sqe = rw(Opcode::READ, 1, 0, 8);
    sqe.set_sgl(Sgl::Transport { length: 4096 });
    io.responses.clear();
    io.send(&Header::CapsuleCmd(sqe), &[]);
    assert_eq!(io.connection.end(), Some(End::ControllerOver));
    assert!(io.responses.is_empty());
}

#[test]
fn hostile_bytes__end_in_a_status_or_an_end() {
    let transfer = Transfer {
        cid: Cid(0),
        tag: 0,
        offset: 0,
        length: 64,
    };
    let initialize = Initialize {
        alignment: 4,
        digests: Digests::empty(),
        limit: 1,
    };
    let (mut ended, mut completed) = (0, 0);
    for seed in 0..4000 {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let digests = Digests::from_bits_truncate(dice.next_u32() as u8);
        let (admin, io) = hosts(digests, seed % 2 == 0, seed);
        // The admin queue must outlive the other.
        let (mut host, _other) = if seed % 3 == 0 { (admin, io) } else { (io, admin) };
        for _ in 0..20 {
            let opcodes = [
                0x00, 0x01, 0x02, 0x05, 0x06, 0x08, 0x09, 0x0a, 0x0c, 0x0d, 0x0e, 0x11, 0x15, 0x19, 0x7f,
            ];
            let opcode = opcodes[dice.next_u32() as usize % opcodes.len()];
            let header = match dice.next_u32() % 8 {
                0 => Header::H2cData(transfer),
                1 if seed % 5 == 0 => Header::IcReq(initialize),
                2 if seed % 5 == 1 => Header::H2cTermReq(Fatal::Sequence),
                _ => Header::CapsuleCmd(rw(Opcode(opcode), dice.next_u32() as u16, 0, 8)),
            };
            let data = if header.kind().may_have_data() {
                &[0; 64][..]
            } else {
                &[]
            };
            let mut bytes = host.pdu(&header, data);
            for _ in 0..dice.next_u32() % 4 {
                let at = dice.next_u32() as usize % bytes.len();
                bytes[at] = dice.next_u32() as u8;
            }
            host.responses.clear();
            host.data.clear();
            host.send_bytes(&bytes);
            completed += host.responses.len();
            if host.connection.end().is_some() {
                ended += 1;
                break;
            }
        }
        let connection = &host.connection;
        let receiving = match connection.phase {
            Phase::Data { slot, .. } | Phase::Digest { slot, .. } => Some(slot),
            _ => None,
        };
        for (slot, at) in connection.slots.iter().zip(0..) {
            let is_free = connection.free.contains(&at);
            let waits = slot.awaits_data || connection.waiting.contains(&at) || receiving == Some(at);
            assert!(
                is_free != waits || connection.end.is_some(),
                "seed {seed}: slot {at} {slot:?}"
            );
        }
    }
    assert!(ended > 1000 && completed > 1000, "{ended} {completed}");
}

#[test]
fn fused_pair__completes_twice() {
    for is_in_capsule in [true, false] {
        let (_admin, mut io) = hosts(Digests::all(), false, 11);
        let with_fuse = |sqe: Sqe, fuse: u8| {
            let mut bytes = *sqe.as_bytes();
            bytes[1] |= fuse;
            Sqe::parse(&bytes).unwrap()
        };
        let send = |io: &mut Host, mut sqe: Sqe, data: &[u8]| {
            let length = data.len() as u32;
            match is_in_capsule {
                true => {
                    sqe.set_sgl(Sgl::InCapsule { offset: 0, length });
                    io.send(&Header::CapsuleCmd(sqe), data);
                }
                false => {
                    sqe.set_sgl(Sgl::Transport { length });
                    io.send(&Header::CapsuleCmd(sqe), &[]);
                }
            }
        };
        let (old, new) = ([0; 4096], [9; 4096]);
        send(&mut io, with_fuse(rw(Opcode::COMPARE, 1, 8, 8), 1), &old);
        send(&mut io, with_fuse(rw(Opcode::WRITE, 2, 8, 8), 2), &new);
        // The data of the second come first.
        for request in std::mem::take(&mut io.requests).into_iter().rev() {
            assert!(!io.responses.contains_key(&Cid(2)));
            let data = if request.cid == Cid(1) { old } else { new };
            io.send(&Header::H2cData(request), &data);
        }
        assert_eq!(io.responses[&Cid(1)].status, Status::SUCCESS);
        assert_eq!(io.responses[&Cid(2)].status, Status::SUCCESS);
        let (_, data) = io.run(rw(Opcode::READ, 3, 8, 8), &[], 4096, false);
        assert_eq!(data, new);
        assert_eq!(io.connection.free.len(), io.connection.slots.len());
    }
}

/// Nothing comes after the second command that would have the first one's completion sent with it.
#[test]
fn fused_pair__completes_its_first_command_when_the_second_fails() {
    let with_fuse = |sqe: Sqe, fuse: u8| {
        let mut bytes = *sqe.as_bytes();
        bytes[1] |= fuse;
        let mut sqe = Sqe::parse(&bytes).unwrap();
        let (offset, length) = (0, 4096);
        sqe.set_sgl(Sgl::InCapsule { offset, length });
        Header::CapsuleCmd(sqe)
    };
    let other_range = with_fuse(rw(Opcode::WRITE, 2, 16, 8), 2);
    let no_second = with_fuse(rw(Opcode::WRITE, 2, 8, 8), 0);
    for (second, first_status) in [
        (other_range, Status::FAILED_FUSED),
        (no_second, Status::MISSING_FUSED),
    ] {
        let (_admin, mut io) = hosts(Digests::empty(), false, 14);
        io.send(&with_fuse(rw(Opcode::COMPARE, 1, 8, 8), 1), &[0; 4096]);
        assert!(!io.responses.contains_key(&Cid(1)));
        io.send(&second, &[9; 4096]);
        assert_eq!(io.responses[&Cid(1)].status, first_status);
        assert!(io.responses.contains_key(&Cid(2)));
    }
}

#[test]
fn abort__reaches_commands_that_wait() {
    let (mut admin, mut io) = hosts(Digests::empty(), false, 12);
    // Four have all the buffers, and the fifth waits for one.
    for cid in 1..=5 {
        let mut sqe = rw(Opcode::WRITE, cid, 0, 2048);
        sqe.set_sgl(Sgl::Transport { length: 1 << 20 });
        io.send(&Header::CapsuleCmd(sqe), &[]);
    }
    assert_eq!(io.requests.len(), 4);
    let abort = |admin: &mut Host, cid: u32, own: u16| {
        let mut sqe = Sqe::new(Opcode::ABORT, Cid(own), NsId::NONE);
        sqe.set_dword(10, 1 | cid << 16);
        admin.send(&Header::CapsuleCmd(sqe), &[]);
        assert!(admin.connection.take_reset());
    };
    // As the driver does when it is told of a change.
    let tell = |host: &mut Host| {
        host.connection.handle_change();
        host.receive();
    };
    abort(&mut admin, 5, 50);
    abort(&mut admin, 2, 51);
    abort(&mut admin, 9, 52);
    tell(&mut io);
    tell(&mut admin);
    assert_eq!(io.responses[&Cid(5)].status, Status::ABORT_REQUESTED);
    assert!(!io.responses.contains_key(&Cid(2)), "its data are on their way");
    assert_eq!(admin.responses[&Cid(50)].result, 0);
    assert_eq!(admin.responses[&Cid(52)].result, 1, "there is no such command");
    assert!(!admin.responses.contains_key(&Cid(51)));
    for request in std::mem::take(&mut io.requests) {
        io.send(&Header::H2cData(request), &vec![request.cid.0 as u8; 1 << 20]);
    }
    assert_eq!(io.responses[&Cid(2)].status, Status::ABORT_REQUESTED);
    assert_eq!(io.responses[&Cid(4)].status, Status::SUCCESS);
    assert!(io.connection.take_reset(), "the admin queue has to hear of it");
    tell(&mut admin);
    assert_eq!(admin.responses[&Cid(51)].result, 0);
    assert_eq!(io.connection.free.len(), io.connection.slots.len());
    assert_eq!(io.connection.buffered, 0);
}

#[test]
fn data_of_admin_commands__wait_for_room() {
    let (mut admin, _io) = hosts(Digests::empty(), false, 91);
    for cid in 1..=8 {
        let mut sqe = Sqe::new(Opcode::IDENTIFY, Cid(cid), NsId::NONE);
        sqe.set_dword(10, u32::from(Cns::CONTROLLER.0));
        sqe.set_sgl(Sgl::Transport { length: 1 << 20 });
        let bytes = admin.pdu(&Header::CapsuleCmd(sqe), &[]);
        admin.connection.space()[..bytes.len()].copy_from_slice(&bytes);
        admin
            .connection
            .received(bytes.len(), &mut admin.buffers, admin.now);
    }
    assert!(admin.connection.poll_io(&mut admin.buffers, admin.now).is_none());
    let slots = admin.connection.slots.iter();
    assert_eq!(slots.filter(|slot| slot.buffer.is_some()).count(), 4);
    assert_eq!(admin.connection.buffered, BUFFERED_MAX);
    admin.responses.clear();
    admin.receive();
    assert!((1..=8).all(|cid| admin.responses[&Cid(cid)].status == Status::SUCCESS));
    assert!((1..=8).all(|cid| admin.data[&Cid(cid)].len() == IDENTIFY_LEN));
    assert_eq!(admin.connection.buffered, 0);
}

#[test]
fn limit__leaves_commands_with_the_host_until_it_allows_them() {
    let (target, subsystem) = target();
    let hosts = |ios| {
        let ios = std::num::NonZeroU64::new(ios);
        Hosts::any(Terms {
            rates: Rates { ios, bytes: None },
            ..Terms::default()
        })
    };
    let (mut admin, mut io) = hosts_of(&target, Digests::empty(), true, 7);
    target.set_hosts(subsystem.nqn(), hosts(1000)).unwrap();
    io.responses.clear();
    // Times are counted from when the controller began.
    io.now = admin.now;
    for cid in 0..20 {
        let mut sqe = rw(Opcode::WRITE, cid, cid.into(), 1);
        sqe.set_sgl(Sgl::InCapsule {
            offset: 0,
            length: 512,
        });
        io.send(&Header::CapsuleCmd(sqe), &[cid as u8; 512]);
    }
    // The second one has run ahead of its time.
    assert_eq!(io.responses.len(), 2);
    assert!(io.connection.is_held() && !io.connection.wants_bytes());
    assert_eq!(
        io.connection.held_until(io.now),
        Some(io.now + Duration::from_millis(1))
    );
    // The admin queue has no limit.
    let (cqe, _) = admin.run(Sqe::new(Opcode::KEEP_ALIVE, Cid(5), NsId::NONE), &[], 0, false);
    assert_eq!(cqe.status, Status::SUCCESS);
    for done in 3..=9 {
        io.now += Duration::from_millis(1);
        io.receive();
        assert_eq!(io.responses.len(), done);
    }
    // Another limit holds at once.
    target.set_hosts(subsystem.nqn(), hosts(0)).unwrap();
    io.receive();
    assert_eq!(io.responses.len(), 20);
    assert!(io.connection.wants_bytes() && !io.connection.is_held());
    let (_, data) = io.run(rw(Opcode::READ, 1, 19, 1), &[], 512, false);
    assert_eq!(data, [19; 512]);
}
