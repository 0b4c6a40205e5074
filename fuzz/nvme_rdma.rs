//! Messages of NVMe/RDMA from a peer that may do anything, as fuzz targets: for our host, and for our target. What a device does is done here: it
//! moves data between the two only where a key allows that, and otherwise ends the connection.
//!
//! Two programs share this file, as they do `targets.rs`: `fuzz_targets/nvme_host_rdma.rs` and `fuzz_targets/nvme_target_rdma.rs`, and
//! `crates/nvmf/tests/fuzz.rs`.
#![allow(dead_code, reason = "each coverage-guided target uses one of them")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_nvmf::backend::MemoryBackend;
use rdmux_nvmf::host::command::{flush, identify, read, write};
use rdmux_nvmf::host::queue::Data;
use rdmux_nvmf::host::rdma::{Config, Connection as HostSide};
use rdmux_nvmf::rdma::{self, Action, Connection as TargetSide, Memory, Remote, Work};
use rdmux_nvmf::target::{Hosts, Namespace, Port, Subsystem, Target, Terms};
use rdmux_runtime::Pages;
use rdmux_wire::RKey;
use rdmux_wire::nvme::{
    CONNECT_DATA_LEN, CQE_LEN, Cid, Cns, Configuration, Connect, ConnectData, Cqe, FabricsType, HostId, Nqn,
    NsId, Property, Register, SQE_LEN, Sgl, Sqe, Status,
};
use rdmux_wire::nvme_rdma::{Accept, Reject, Request};

/// Takes values off an input; zeros behind its end.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Registered memory of a command in flight.
struct Region {
    rkey: u8,
    bytes: Vec<u8>,
}

/// A byte of settings, the private data of the target's answer behind their length, then what the target sends and does: the host takes it,
/// whatever it is, or ends the connection; each command is done once or is left, with the data in its own memory.
///
/// Settings: 1 an I/O queue, 2 capsules carry data. Steps: 0 a response of any bytes; 1 one to a command in flight; 2 a WRITE; 3 a READ;
/// each of the latter two to a key, offset and length.
pub(crate) fn nvme_host_rdma(input: &[u8]) {
    let mut input = Input(input);
    let settings = input.byte();
    let length = input.byte();
    let private = input.bytes(length.into());
    let _ = (Accept::parse(private), Reject::parse(private));
    let is_io = settings & 1 != 0;
    let mut host = HostSide::new(Config {
        entries: 5,
        in_capsule_max: if is_io && settings & 2 != 0 { 4096 } else { 0 },
        is_io,
    });
    let mut regions: BTreeMap<u16, Region> = BTreeMap::new();
    let mut sent: Vec<Cid> = Vec::new();
    let (mut submitted, mut done, mut last_key) = (0, 0, 0u8);
    while !input.is_empty() && host.end().is_none() {
        while host.room() > 0 && submitted < 64 {
            let command = match submitted % 4 {
                0 => read(NsId(1), 0, 2, 8192, vec![0; 8192]),
                1 => write(NsId(1), 0, 1, 4096, vec![1; 4096]),
                2 => identify(Cns::CONTROLLER, NsId::NONE),
                _ => flush(NsId(1)),
            };
            submitted += 1;
            let bytes = host.needs_memory(&command);
            last_key = last_key.wrapping_add(1);
            let memory = (bytes > 0).then_some(Remote {
                address: 0,
                rkey: RKey(last_key.into()),
            });
            let region = match command.data {
                Data::Out(_) => command.buffer[..bytes].to_vec(),
                _ => vec![0xdd; bytes],
            };
            let at = host.submit(command, None, memory);
            regions.remove(&at);
            if bytes > 0 {
                let rkey = last_key;
                regions.insert(at, Region { rkey, bytes: region });
            }
        }
        // The last one may wait for a slot.
        while host.has_capsule() && host.in_flight() - sent.len() > usize::from(settings >> 7) {
            let [sqe, data] = host.next_capsule().expect("it has one");
            let sqe = Sqe::parse(sqe).expect("it is as long as a command");
            assert!(data.len() <= 4096);
            sent.push(sqe.cid());
        }
        let response = match input.byte() % 4 {
            0 => {
                let length = usize::from(input.byte() % 33);
                input.bytes(length).to_vec()
            }
            1 => {
                let (at, status) = (usize::from(input.byte()), input.byte());
                let Some(cid) = sent.get(at % sent.len().max(1)) else {
                    continue;
                };
                let cqe = Cqe {
                    result: input.u16().into(),
                    sq_head: u16::from(status >> 5),
                    cid: *cid,
                    status: if status & 1 == 0 {
                        Status::SUCCESS
                    } else {
                        Status::INTERNAL_ERROR
                    },
                };
                let mut bytes = [0; CQE_LEN];
                cqe.emit(&mut bytes);
                bytes.to_vec()
            }
            kind => {
                let (rkey, at, length) = (input.byte(), input.u16().into(), input.u16().into());
                let region = regions.values_mut().find(|region| region.rkey == rkey);
                let reached = region.and_then(|region| region.bytes.get_mut(at..)?.get_mut(..length));
                let Some(reached) = reached else {
                    // The device ends the connection.
                    break;
                };
                if kind == 2 {
                    reached.fill(input.byte());
                }
                continue;
            }
        };
        let copied = host.handle_response(&response, |at, data| {
            let region = regions.get(&at).expect("it has memory");
            data.copy_from_slice(&region.bytes);
        });
        while let Some(completion) = host.poll() {
            let at = copied.expect("one is done");
            if completion.received > 0 {
                assert_eq!(completion.received, completion.command.data.len());
                assert_eq!(completion.bytes(), regions[&at].bytes);
            }
            let known = sent.iter().position(|cid| *cid == completion.command.sqe.cid());
            sent.swap_remove(known.expect("it was sent, and is done once"));
            regions.remove(&at);
            done += 1;
        }
    }
    assert_eq!(done + host.in_flight(), submitted);
    assert_eq!(host.take_commands().len(), submitted - done);
}

const SUBSYSTEM: &str = "nqn.2014-08.org.example:fuzzed";
const HOST: &str = "nqn.2014-08.org.example:host";
const PORT: Port = rdma::port(4096);
const PLACES: u16 = 130;

/// A connection of a target, with what its driver knows.
struct Served {
    connection: TargetSide,
    used: BTreeSet<u16>,
    fetches: VecDeque<(u16, u32)>,
    works: VecDeque<Work>,
    responses: VecDeque<Cqe>,
}

impl Served {
    fn new(target: Arc<Target>, request: Request, now: Instant) -> Served {
        let local = Ipv4Addr::LOCALHOST.into();
        Served {
            connection: TargetSide::new(target, PORT, request, PLACES.into(), local, now),
            used: BTreeSet::new(),
            fetches: VecDeque::new(),
            works: VecDeque::new(),
            responses: VecDeque::new(),
        }
    }

    /// Does all that the connection asks for, but for I/Os and READs.
    fn pump(&mut self, now: Instant) {
        self.connection.resume(now);
        loop {
            while let Some(bytes) = self.connection.wants_buffer() {
                assert!(bytes <= 1 << 20);
                self.connection.granted(Pages::new(bytes), now);
            }
            match self.connection.poll() {
                None => return,
                Some(Action::Fetch { place, length, .. }) => self.fetches.push_back((place, length)),
                Some(Action::Run(work)) => self.works.push_back(work),
                Some(Action::Release(place)) => assert!(self.used.remove(&place)),
                Some(Action::Respond(response)) => {
                    if let Some(place) = response.place {
                        assert!(self.used.remove(&place), "one response for each command");
                    }
                    if let Some((_, length)) = response.write {
                        let Memory::Buffer(buffer) = &response.memory else {
                            panic!("it writes what is in no buffer");
                        };
                        assert!(length as usize <= buffer.len());
                    }
                    self.responses.push_back(response.cqe);
                }
            }
        }
    }

    fn capsule(&mut self, bytes: &[u8], now: Instant) {
        if let Some(place) = (0..PLACES).find(|place| !self.used.contains(place))
            && self.connection.end().is_none()
        {
            self.used.insert(place);
            self.connection.handle_capsule(place, &mut bytes.to_vec(), now);
            self.pump(now);
        }
    }

    fn fetched(&mut self, data: &[u8], now: Instant) {
        let Some((place, _)) = self.fetches.pop_front() else {
            return;
        };
        let copy = |bytes: &mut [u8]| {
            let len = bytes.len().min(data.len());
            bytes[..len].copy_from_slice(&data[..len]);
        };
        self.connection.fetched(place, copy, now);
        self.pump(now);
    }

    fn run(&mut self, now: Instant) {
        if let Some(mut work) = self.works.pop_front() {
            let status = work.execute();
            self.connection.complete(work, status);
            self.pump(now);
        }
    }

    /// Runs a command with data that are fetched. Returns its result.
    fn command(&mut self, mut sqe: Sqe, data: &[u8], now: Instant) -> u64 {
        sqe.set_sgl(Sgl::Keyed {
            address: 0,
            length: data.len() as u32,
            rkey: RKey(1),
            invalidate: false,
        });
        self.capsule(sqe.as_bytes(), now);
        self.fetched(data, now);
        let cqe = self.responses.pop_front().expect("it is done");
        assert_eq!(cqe.status, Status::SUCCESS);
        cqe.result
    }

    fn connect(&mut self, qid: u16, cntlid: u16, now: Instant) -> u64 {
        let connect = Connect {
            record_format: 0,
            qid,
            sq_size: 31,
            no_flow_control: false,
            keep_alive_ms: 0,
        };
        let data = ConnectData {
            host_id: HostId([1; 16]),
            cntlid,
            subsystem: Nqn::new(SUBSYSTEM).expect("a name"),
            host: Nqn::new(HOST).expect("a name"),
        };
        let mut bytes = vec![0; CONNECT_DATA_LEN];
        data.emit(&mut bytes);
        self.command(connect.command(Cid(0)), &bytes, now)
    }
}

/// A byte of settings, the private data of a host's request behind their length, then what hosts send and do: the target answers
/// each capsule once, or ends the connection.
///
/// Settings: 1 there is a controller with an I/O queue already; otherwise there is a connection as the private data ask for. Steps: 0 a
/// capsule; 1 data that a READ has fetched; 2 an I/O is done; 3 a change; 4 time passes; 16 is added for the other queue.
pub(crate) fn nvme_target_rdma(input: &[u8]) {
    let mut input = Input(input);
    let settings = input.byte();
    let length = input.byte();
    let private = input.bytes(length.into());
    let mut now = Instant::now();
    let (target, nqn) = (Arc::new(Target::default()), Nqn::new(SUBSYSTEM).expect("a name"));
    let subsystem = Arc::new(Subsystem::new(nqn, "fuzzed", Hosts::any(Terms::default())));
    let namespace = Namespace {
        nsid: NsId(1),
        block_shift: 9,
        uuid: [1; 16],
        is_protected: false,
        backend: Arc::new(MemoryBackend::new(1 << 20).expect("memory")),
    };
    subsystem.add_namespace(namespace).expect("it is the first");
    target.add_subsystem(subsystem).expect("it is the first");
    let asked = |qid| Request {
        qid,
        receives: 32,
        sends: 31,
        cntlid: 0,
    };
    let mut queues = match settings & 1 {
        0 => {
            let Ok(request) = Request::parse(private) else {
                return;
            };
            if rdma::check(&request, settings & 2 != 0, &PORT).is_err() {
                return;
            }
            vec![Served::new(target.clone(), request, now)]
        }
        _ => {
            let mut admin = Served::new(target.clone(), asked(0), now);
            let cntlid = admin.connect(0, ConnectData::ANY_CONTROLLER, now) as u16;
            let enable = Property {
                register: Register::CONFIGURATION,
                is_wide: false,
                value: Configuration::enabled().0.into(),
            };
            admin.command(enable.command(FabricsType::PROPERTY_SET, Cid(1)), &[], now);
            let mut io = Served::new(target.clone(), asked(1), now);
            io.connect(1, cntlid, now);
            vec![io, admin]
        }
    };
    while !input.is_empty() {
        let step = input.byte();
        let at = usize::from(step >> 4) % queues.len();
        let queue = &mut queues[at];
        match step & 15 {
            0 => {
                let length = usize::from(input.u16()) % (SQE_LEN + 4097);
                queue.capsule(input.bytes(length), now);
            }
            1 => {
                let length = usize::from(input.u16());
                queue.fetched(input.bytes(length), now);
            }
            2 => queue.run(now),
            3 => {
                queue.connection.handle_change();
                queue.pump(now);
            }
            4 => {
                now += Duration::from_millis(100 * u64::from(input.byte()));
                queue.connection.handle_timeout(now);
                queue.pump(now);
            }
            _ => {}
        }
    }
    for mut queue in queues {
        // I/Os of a medium end, whatever the host has done.
        while !queue.works.is_empty() {
            queue.run(now);
        }
        if queue.connection.end().is_some() {
            assert!(queue.connection.poll().is_none() && queue.connection.wants_buffer().is_none());
        }
    }
}
