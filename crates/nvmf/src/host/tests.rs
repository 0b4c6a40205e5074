//! The host's side against targets that misbehave, without sockets.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rdmux_wire::nvme::{
    Cid, Connect, ConnectData, Cqe, FabricsType, IDENTIFY_LEN, NsId, Opcode, Property, Register, Sgl, Sqe,
    Status,
};
use rdmux_wire::nvme_tcp::{
    COMMON_LEN, Common, DataLayout, Digests, Fatal, Flags, Header, Initialize, Transfer,
};

use super::command::{flush, read, write};
use super::queue::{Command, Completion, Data};
use super::setup::{Setup, Step};
use super::tcp::{Config, Connection, End};
use super::{HostError, Options};
use crate::tcp::inbox::check_header;
use crate::tcp::new_digest;
use crate::tcp::outbox::Outbox;

const BLOCK: usize = 4096;

/// A target that sends whatever the test says.
struct Peer {
    host: Connection,
    digests: Digests,
    /// Bytes that the host has sent and the peer has not looked at.
    heard: Vec<u8>,
    /// Bytes that the host gets at a time.
    step: usize,
}

impl Peer {
    fn new(digests: Digests) -> Peer {
        let host = Connection::new(Config {
            digests,
            entries: 5,
            in_capsule_max: 2 * BLOCK as u32,
            is_io: true,
        });
        let mut peer = Peer {
            host,
            digests: Digests::empty(),
            heard: Vec::new(),
            step: usize::MAX,
        };
        assert!(matches!(peer.next(), Some((Header::IcReq(request), _)) if request.digests == digests));
        peer
    }

    fn ready(digests: Digests) -> Peer {
        let mut peer = Peer::new(digests);
        assert_eq!(peer.host.room(), 0);
        let response = Initialize {
            alignment: 4,
            digests,
            limit: BLOCK as u32,
        };
        peer.say(&Header::IcResp(response), Flags::empty(), &[]);
        peer.digests = digests;
        assert_eq!((peer.host.is_ready(), peer.host.room()), (true, 4));
        peer
    }

    fn bytes(&self, header: &Header, flags: Flags, data: &[u8]) -> Vec<u8> {
        let mut outbox = Outbox::default();
        let layout = DataLayout {
            len: data.len(),
            digests: self.digests,
            alignment: 4,
        };
        outbox.push(header, flags, layout);
        let mut slices = [IoSlice::new(&[])];
        outbox.slices(|_| &[], &mut slices);
        let mut bytes = slices[0].to_vec();
        bytes.extend_from_slice(data);
        if self.digests.contains(Digests::DATA) && !data.is_empty() {
            let mut digest = new_digest();
            digest.update(data);
            bytes.extend_from_slice(&(digest.finalize() as u32).to_le_bytes());
        }
        bytes
    }

    fn say(&mut self, header: &Header, flags: Flags, data: &[u8]) {
        let bytes = self.bytes(header, flags, data);
        self.say_bytes(&bytes);
    }

    fn say_bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.host.end().is_none() {
            let space = self.host.space();
            let len = space.len().min(bytes.len()).min(self.step);
            space[..len].copy_from_slice(&bytes[..len]);
            self.host.received(len);
            bytes = &bytes[len..];
        }
    }

    /// Has the host send all that it has.
    fn hear(&mut self) {
        loop {
            let mut slices = [IoSlice::new(&[]); 8];
            let number = self.host.slices(&mut slices);
            if number == 0 {
                return;
            }
            let before = self.heard.len();
            slices[..number]
                .iter()
                .for_each(|slice| self.heard.extend_from_slice(slice));
            self.host.sent(self.heard.len() - before);
        }
    }

    /// Returns the next PDU of the host, and its data.
    fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        self.hear();
        if self.heard.len() < COMMON_LEN {
            return None;
        }
        let common = Common::parse(&self.heard, self.digests).unwrap();
        let header = check_header(&common, &self.heard).unwrap();
        let pdu: Vec<_> = self.heard.drain(..common.pdu_len).collect();
        Some((
            header,
            pdu[common.data_offset..common.data_offset + common.data_len].to_vec(),
        ))
    }

    /// Returns the id of the next command, and the data in its capsule.
    fn command(&mut self) -> (Sqe, Vec<u8>) {
        match self.next() {
            Some((Header::CapsuleCmd(sqe), data)) => (sqe, data),
            other => panic!("{other:?}"),
        }
    }

    fn respond(&mut self, cid: Cid, status: Status) {
        let cqe = Cqe {
            result: 0,
            sq_head: 0,
            cid,
            status,
        };
        self.say(&Header::CapsuleResp(cqe), Flags::empty(), &[]);
    }

    fn submit(&mut self, command: Command) -> Cid {
        self.host.submit(command, None);
        self.command().0.cid()
    }

    fn read(&mut self, blocks: u32) -> Cid {
        let len = blocks * BLOCK as u32;
        self.submit(read(NsId(1), 0, blocks, len, vec![0; len as usize]))
    }

    fn write(&mut self, blocks: u32) -> Cid {
        let len = blocks * BLOCK as u32;
        self.submit(write(NsId(1), 0, blocks, len, vec![7; len as usize]))
    }

    fn data(&mut self, cid: Cid, offset: usize, length: u32, flags: Flags, data: &[u8]) {
        let transfer = Transfer {
            cid,
            tag: 0,
            offset: offset as u32,
            length,
        };
        self.say(&Header::C2hData(transfer), flags, data);
    }

    fn r2t(&mut self, cid: Cid, offset: usize, length: usize) {
        let transfer = Transfer {
            cid,
            tag: 9,
            offset: offset as u32,
            length: length as u32,
        };
        self.say(&Header::R2t(transfer), Flags::empty(), &[]);
    }

    /// Checks that the connection is over for this reason, of which the target is told.
    fn violated(&mut self, part: &str) {
        let end = self.host.end();
        let Some(End::Violation { what, fatal }) = end else {
            panic!("{part}: {end:?}");
        };
        assert!(what.contains(part), "{part}: {what}");
        assert_eq!(self.host.room(), 0);
        self.heard.clear();
        self.digests = Digests::empty();
        assert_eq!(
            self.next(),
            Some((Header::H2cTermReq(fatal), Vec::new())),
            "{part}"
        );
    }
}

fn all_digests() -> [Digests; 4] {
    [0, 1, 2, 3].map(|bits| Digests::from_bits(bits).unwrap())
}

#[test]
fn read__takes_data_in_parts_of_any_length() {
    for digests in all_digests() {
        for step in [1, 3, 4096, 5000, usize::MAX] {
            let mut peer = Peer::ready(digests);
            peer.step = step;
            let cid = peer.read(8);
            let bytes: Vec<u8> = (0..8 * BLOCK).map(|at| (at / 3) as u8).collect();
            peer.data(cid, 0, BLOCK as u32, Flags::empty(), &bytes[..BLOCK]);
            peer.data(cid, BLOCK, 7 * BLOCK as u32, Flags::LAST, &bytes[BLOCK..]);
            assert!(peer.host.poll().is_none());
            peer.respond(cid, Status::SUCCESS);
            let done = peer.host.poll().unwrap();
            assert!(
                done.status.is_success() && done.bytes() == bytes,
                "{digests:?} {step}"
            );
            // The same by the flag, without a completion.
            let cid = peer.read(8);
            peer.data(cid, 0, 8 * BLOCK as u32, Flags::LAST | Flags::SUCCESS, &bytes);
            assert_eq!(peer.host.poll().unwrap().bytes(), bytes);
            assert_eq!(peer.host.in_flight(), 0);
        }
    }
}

#[test]
fn write__goes_in_the_capsule_or_as_it_is_asked_for() {
    for digests in all_digests() {
        let mut peer = Peer::ready(digests);
        let len = 2 * BLOCK;
        peer.host
            .submit(write(NsId(1), 0, 2, len as u32, vec![7; len]), None);
        let (sqe, data) = peer.command();
        assert_eq!(
            sqe.sgl(),
            Ok(Sgl::InCapsule {
                offset: 0,
                length: len as u32
            })
        );
        assert_eq!(data, vec![7; len]);
        peer.respond(sqe.cid(), Status::SUCCESS);
        assert!(peer.host.poll().unwrap().status.is_success());
        let cid = peer.write(3);
        for (offset, length, parts) in [(0, 2 * BLOCK, 2), (2 * BLOCK, BLOCK, 1)] {
            peer.r2t(cid, offset, length);
            for part in 0..parts {
                let Some((Header::H2cData(transfer), data)) = peer.next() else {
                    panic!("no data");
                };
                assert_eq!(
                    (transfer.tag, transfer.offset as usize),
                    (9, offset + part * BLOCK)
                );
                assert_eq!(data, vec![7; BLOCK]);
            }
            assert_eq!(peer.next(), None);
        }
        peer.respond(cid, Status::SUCCESS);
        assert!(peer.host.poll().unwrap().status.is_success());
    }
}

#[test]
fn write__that_is_refused_early_keeps_its_buffer_until_it_is_sent() {
    let mut peer = Peer::ready(Digests::empty());
    let len = 2 * BLOCK;
    peer.host
        .submit(write(NsId(1), 0, 2, len as u32, vec![7; len]), None);
    // The header is sent, and half of the data.
    let mut slices = [IoSlice::new(&[]); 8];
    assert_eq!(peer.host.slices(&mut slices), 2);
    peer.host.sent(72 + BLOCK);
    peer.respond(Cid(0), Status::WRITE_FAULT);
    assert!(peer.host.poll().is_none());
    peer.host.sent(BLOCK);
    assert!(peer.host.poll().unwrap().status.is(Status::WRITE_FAULT));
    assert_eq!(peer.host.room(), 4);
}

#[test]
fn data__with_a_wrong_digest_are_asked_for_again() {
    let mut peer = Peer::ready(Digests::DATA);
    let cid = peer.read(1);
    let transfer = Transfer {
        cid,
        tag: 0,
        offset: 0,
        length: BLOCK as u32,
    };
    let mut bytes = peer.bytes(
        &Header::C2hData(transfer),
        Flags::LAST | Flags::SUCCESS,
        &[1; BLOCK],
    );
    *bytes.last_mut().unwrap() ^= 1;
    peer.say_bytes(&bytes);
    let done = peer.host.poll().unwrap();
    assert!(done.status.is(Status::TRANSIENT_TRANSPORT) && !done.status.is_final());
    assert_eq!(peer.host.end(), None);
}

#[test]
fn violation__ends_the_connection_and_says_which() {
    type Violation = fn(&mut Peer);
    let cases: [(&str, Violation); 26] = [
        ("a completion of no command", |peer| {
            peer.respond(Cid(0), Status::SUCCESS)
        }),
        ("a completion of no command", |peer| {
            peer.respond(Cid(u16::MAX), Status::SUCCESS)
        }),
        ("a completion of no command", |peer| {
            // A second one of the same command.
            let cid = peer.submit(flush(NsId(1)));
            peer.respond(cid, Status::SUCCESS);
            peer.respond(cid, Status::SUCCESS);
        }),
        ("a completion of no command", |peer| {
            // One of the command that had the slot before.
            let cid = peer.submit(flush(NsId(1)));
            peer.respond(cid, Status::SUCCESS);
            assert_ne!(peer.submit(flush(NsId(1))), cid);
            peer.respond(cid, Status::SUCCESS);
        }),
        ("without all its data", |peer| {
            let cid = peer.read(1);
            peer.respond(cid, Status::SUCCESS);
        }),
        ("without all its data", |peer| {
            let cid = peer.read(2);
            peer.data(cid, 0, BLOCK as u32, Flags::LAST | Flags::SUCCESS, &[0; BLOCK]);
        }),
        ("whose data it has not taken", |peer| {
            let cid = peer.write(3);
            peer.respond(cid, Status::SUCCESS);
        }),
        ("whose data it has not taken", |peer| {
            let cid = peer.write(3);
            peer.r2t(cid, 0, 3 * BLOCK);
            peer.respond(cid, Status::SUCCESS);
        }),
        ("data of no command", |peer| {
            peer.data(Cid(3), 0, 8, Flags::LAST, &[0; 8])
        }),
        ("data of a command that receives none", |peer| {
            let cid = peer.write(3);
            peer.data(cid, 0, 8, Flags::LAST, &[0; 8]);
        }),
        ("more data than", |peer| {
            let cid = peer.read(1);
            peer.data(cid, 0, 2 * BLOCK as u32, Flags::LAST, &[0; 2 * BLOCK]);
        }),
        ("more data than", |peer| {
            let cid = peer.read(1);
            peer.data(cid, 0, BLOCK as u32, Flags::empty(), &[0; BLOCK]);
            peer.data(cid, BLOCK, 4, Flags::LAST, &[0; 4]);
        }),
        ("behind the last", |peer| {
            let cid = peer.read(2);
            peer.data(cid, 0, BLOCK as u32, Flags::LAST, &[0; BLOCK]);
            peer.data(cid, BLOCK, 4, Flags::LAST, &[0; 4]);
        }),
        ("do not follow", |peer| {
            let cid = peer.read(2);
            peer.data(cid, 4, 8, Flags::LAST, &[0; 8]);
        }),
        ("do not follow", |peer| {
            let cid = peer.read(2);
            peer.data(cid, u32::MAX as usize, 8, Flags::LAST, &[0; 8]);
        }),
        ("another length", |peer| {
            let cid = peer.read(1);
            peer.data(cid, 0, 16, Flags::LAST, &[0; 8]);
        }),
        ("another length", |peer| {
            let cid = peer.read(1);
            peer.data(cid, 0, 0, Flags::LAST, &[]);
        }),
        ("success before the last", |peer| {
            let cid = peer.read(1);
            peer.data(cid, 0, 8, Flags::SUCCESS, &[0; 8]);
        }),
        ("a request for data of no command", |peer| peer.r2t(Cid(1), 0, 8)),
        ("a request for data of a command that sends none", |peer| {
            let cid = peer.read(1);
            peer.r2t(cid, 0, 8);
        }),
        ("a request for data outside", |peer| {
            let cid = peer.write(3);
            peer.r2t(cid, 0, 3 * BLOCK + 1);
        }),
        ("a request for data outside", |peer| {
            let cid = peer.write(3);
            peer.r2t(cid, 0, 0);
        }),
        ("a request for data outside", |peer| {
            let cid = peer.write(3);
            peer.r2t(cid, u32::MAX as usize, 1);
        }),
        ("a second request", |peer| {
            let cid = peer.write(3);
            peer.r2t(cid, 0, BLOCK);
            peer.r2t(cid, BLOCK, BLOCK);
        }),
        ("at the wrong time", |peer| {
            let request = Initialize {
                alignment: 4,
                digests: Digests::empty(),
                limit: 4096,
            };
            peer.digests = Digests::empty();
            peer.say(&Header::IcResp(request), Flags::empty(), &[]);
        }),
        ("an invalid header", |peer| peer.say_bytes(&[0xff; 24])),
    ];
    for digests in [Digests::empty(), Digests::all()] {
        for (part, violate) in cases {
            let mut peer = Peer::ready(digests);
            violate(&mut peer);
            peer.violated(part);
            // The commands come back, to be repeated elsewhere.
            let _ = peer.host.take_commands();
            assert_eq!(peer.host.in_flight(), 0);
        }
    }
}

#[test]
fn initialization__takes_only_what_was_asked_for() {
    let response = Initialize {
        alignment: 4,
        digests: Digests::HEADER,
        limit: 4096,
    };
    let mut peer = Peer::new(Digests::all());
    peer.say(&Header::IcResp(response), Flags::empty(), &[]);
    peer.violated("other digests");
    // A target that takes no data.
    let mut peer = Peer::new(Digests::HEADER);
    peer.say(
        &Header::IcResp(Initialize { limit: 0, ..response }),
        Flags::empty(),
        &[],
    );
    peer.violated("an invalid header");
    let mut peer = Peer::new(Digests::empty());
    peer.respond(Cid(0), Status::SUCCESS);
    peer.violated("at the wrong time");
    let mut peer = Peer::new(Digests::empty());
    peer.say(&Header::C2hTermReq(Fatal::Sequence), Flags::empty(), &[]);
    assert_eq!(peer.host.end(), Some(End::Terminated(Fatal::Sequence)));
}

#[test]
fn wrong_header_digest__ends_the_connection() {
    let mut peer = Peer::ready(Digests::HEADER);
    let cid = peer.submit(flush(NsId(1)));
    let cqe = Cqe {
        result: 0,
        sq_head: 0,
        cid,
        status: Status::SUCCESS,
    };
    let mut bytes = peer.bytes(&Header::CapsuleResp(cqe), Flags::empty(), &[]);
    bytes[24] ^= 1;
    peer.say_bytes(&bytes);
    peer.violated("an invalid header");
}

#[test]
fn noise__never_panics_and_ends() {
    let seed = 0x0123_4567_89ab_cdef;
    println!("seed {seed:#x}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for round in 0..4_000 {
        let mut peer = Peer::ready(all_digests()[round % 4]);
        peer.step = 1 + random.next_u32() as usize % 300;
        let (reads, writes) = (peer.read(4), peer.write(3));
        // Valid PDUs, of which one byte is another.
        for _ in 0..6 {
            let cid = if random.next_u32() % 2 == 0 { reads } else { writes };
            let transfer = Transfer {
                cid,
                tag: 0,
                offset: random.next_u32() % 3 * BLOCK as u32,
                length: BLOCK as u32,
            };
            let mut bytes = match random.next_u32() % 3 {
                0 => peer.bytes(&Header::R2t(transfer), Flags::empty(), &[]),
                1 => peer.bytes(&Header::C2hData(transfer), Flags::LAST, &[1; BLOCK]),
                _ => {
                    let cqe = Cqe {
                        result: 0,
                        sq_head: 0,
                        cid,
                        status: Status(random.next_u32() as u16),
                    };
                    peer.bytes(&Header::CapsuleResp(cqe), Flags::empty(), &[])
                }
            };
            if random.next_u32() % 2 == 0 {
                let at = random.next_u32() as usize % bytes.len().min(32);
                bytes[at] ^= 1 << (random.next_u32() % 8);
            }
            peer.say_bytes(&bytes);
            if random.next_u32() % 2 == 0 {
                peer.hear();
            }
            while peer.host.poll().is_some() {}
        }
        peer.hear();
        let left = peer.host.take_commands().len();
        assert!(left <= 2);
    }
}

#[test]
fn deadline__of_the_earliest_command_counts() {
    let mut peer = Peer::ready(Digests::empty());
    let now = Instant::now();
    peer.host.submit(flush(NsId(1)), None);
    assert!(!peer.host.has_expired(now + Duration::from_secs(1000)));
    peer.host
        .submit(flush(NsId(1)), Some(now + Duration::from_secs(1)));
    assert!(!peer.host.has_expired(now));
    assert!(peer.host.has_expired(now + Duration::from_secs(1)));
}

fn options() -> Options {
    let nqn = rdmux_wire::nvme::Nqn::new("nqn.2014-08.org.example:t").unwrap();
    Options::new(Vec::new(), nqn)
}

/// Status, result and data of a controller's answer.
type Answer = (Status, u64, Vec<u8>);

/// Plays a controller of which each answer is a function of the command, and returns how the setup ends.
fn set_up(options: &Options, answer: &mut dyn FnMut(&Sqe) -> Answer) -> Result<u32, HostError> {
    let mut setup = Setup::admin(options, 2);
    let mut waited = Duration::ZERO;
    for _ in 0..10_000 {
        match setup.next()? {
            Step::Submit(what, mut command) => {
                let (status, result, bytes) = answer(&command.sqe);
                let received = match command.data {
                    Data::In(len) => bytes.len().min(len as usize),
                    _ => 0,
                };
                command.buffer[..received].copy_from_slice(&bytes[..received]);
                let completion = Completion {
                    command: *command,
                    status,
                    result,
                    received,
                };
                setup.handle(what, &completion)?;
            }
            Step::Post(_) => {}
            Step::Wait(time) => waited += time,
            Step::Done => {
                assert!(waited < Duration::from_secs(2));
                return Ok(setup.controller().unwrap().transfer_max);
            }
        }
    }
    panic!("the setup has no end");
}

/// Answers as a controller does, with the bytes of Identify changed.
fn controller(sqe: &Sqe, change: &dyn Fn(&mut [u8])) -> Answer {
    let result = match (sqe.opcode(), FabricsType::of(sqe)) {
        (Opcode::FABRICS, FabricsType::CONNECT) => {
            assert_eq!(Connect::parse(sqe).qid, 0);
            5
        }
        (Opcode::FABRICS, FabricsType::PROPERTY_GET) => match Property::parse(sqe).register {
            Register::CAPABILITIES => 127 | 1 << 24,
            Register::STATUS => 1,
            Register::VERSION => 0x1_0300,
            _ => 0,
        },
        (Opcode::SET_FEATURES, _) => 7 | 7 << 16,
        _ => 0,
    };
    let mut bytes = Vec::new();
    if sqe.opcode() == Opcode::IDENTIFY {
        bytes = vec![0; IDENTIFY_LEN];
        bytes[78] = 5;
        bytes[111] = 1;
        bytes[320] = 10;
        bytes[536] = 1;
        bytes[768..772].copy_from_slice(b"nqn.");
        bytes[1792] = 4;
        change(&mut bytes);
    }
    (Status::SUCCESS, result, bytes)
}

#[test]
fn setup__asks_for_what_a_host_needs() {
    let mut options = options();
    assert_eq!(
        set_up(&options, &mut |sqe| controller(sqe, &|_| {})).unwrap(),
        1 << 20
    );
    // 2 pages a command, and more than there can be.
    assert_eq!(
        set_up(&options, &mut |sqe| controller(sqe, &|bytes| bytes[77] = 1)).unwrap(),
        8192
    );
    assert_eq!(
        set_up(&options, &mut |sqe| controller(sqe, &|bytes| bytes[77] = 255)).unwrap(),
        1 << 20
    );
    // The keep-alive timer is asked for by who wants one.
    let no_timer = |sqe: &Sqe| controller(sqe, &|bytes| bytes[320] = 0);
    assert!(set_up(&options, &mut |sqe| no_timer(sqe)).is_err());
    options.keep_alive = Duration::ZERO;
    assert!(set_up(&options, &mut |sqe| no_timer(sqe)).is_ok());
}

#[test]
fn setup__refuses_controllers_that_contradict_themselves() {
    type Change = fn(&mut [u8]);
    let changes: [(&str, Change); 5] = [
        ("names controller 6", |bytes| bytes[78] = 6),
        ("capsules have 48 bytes", |bytes| bytes[1792] = 3),
        ("takes no SGLs", |bytes| bytes[536] = 0),
        ("kind of controller", |bytes| bytes[111] = 9),
        ("name of a subsystem", |bytes| bytes[768] = 0),
    ];
    for (part, change) in changes {
        let error = set_up(&options(), &mut |sqe| controller(sqe, &change)).unwrap_err();
        assert!(error.to_string().contains(part), "{part}: {error}");
    }
    // A structure that ends early.
    let error = set_up(&options(), &mut |sqe| {
        let (status, result, mut bytes) = controller(sqe, &|_| {});
        bytes.truncate(1000);
        (status, result, bytes)
    });
    assert!(error.unwrap_err().to_string().contains("1000 bytes"));
}

#[test]
fn setup__ends_when_a_controller_does_not_become_ready() {
    for (status, part) in [(0, "CSTS.RDY"), (2, "CSTS.CFS"), (3, "CSTS.CFS")] {
        let error = set_up(&options(), &mut |sqe| {
            let (outcome, mut result, bytes) = controller(sqe, &|_| {});
            let is_status = sqe.opcode() == Opcode::FABRICS
                && FabricsType::of(sqe) == FabricsType::PROPERTY_GET
                && Property::parse(sqe).register == Register::STATUS;
            if is_status {
                result = status;
            }
            (outcome, result, bytes)
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn setup__says_why_connect_was_refused() {
    let refused = |status: Status, result: u64| {
        let error = set_up(&options(), &mut |_| (status, result, Vec::new())).unwrap_err();
        (error.to_string(), error.is_of_path())
    };
    let unknown = u64::from(ConnectData::SUBSYSTEM_AT) | 1 << 16;
    let (text, again) = refused(Status::CONNECT_INVALID.do_not_retry(), unknown);
    assert!(text.contains("no subsystem of this name") && !again, "{text}");
    assert!(
        refused(Status::CONNECT_INVALID_HOST.do_not_retry(), 0)
            .0
            .contains("--hostnqn")
    );
    // A controller that is busy is asked again.
    assert!(refused(Status::CONNECT_BUSY, 0).1);
    // Of a queue, and of its secure channel.
    let answered = |result| {
        let error = set_up(&options(), &mut |_| (Status::SUCCESS, result, Vec::new()));
        error.unwrap_err().to_string()
    };
    assert!(answered(1 << 17 | 1).contains("--secret"));
    assert!(answered(1 << 18 | 1).contains("TLS"));
}
