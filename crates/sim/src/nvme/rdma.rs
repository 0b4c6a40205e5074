//! Queue pairs: drive the shipped state machines of NVMe/RDMA as their drivers do, and check what the target does with a host's memory.
//!
//! A message is a frame in the streams that the connections of TCP have too. So it arrives whole and once, in order, or its connection is over: that
//! is what the engine makes of a lossy link, with its packets and retransmissions, of which other runs of this crate are
//! (`traffic`, `connections`); here a loss is a stall, and one that lasts a cut. The responses to READs and the refusals of keys are made here in place of a device.
//! The model has no shared receives, no limit of READs in flight, no messages of the connection manager, and no budget of
//! buffers that connections share.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::IoSlice;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use rdmux_nvmf::host::queue::{Command, Data};
use rdmux_nvmf::host::rdma::{Config, Connection as HostSide};
use rdmux_nvmf::rdma::{self, Action, Connection as TargetSide, Memory, Remote, Response, Work};
use rdmux_nvmf::target::{Port, Target};
use rdmux_runtime::Pages;
use rdmux_wire::RKey;
use rdmux_wire::nvme::{CQE_LEN, Cqe, Fuse, Sgl, Sqe, Status};
use rdmux_wire::nvme_rdma::Request;

use super::stream::Pipe;
use crate::dice::Dice;

/// Data of up to 4 KiB come in capsules.
const PORT: Port = rdma::port(4 << 10);
/// Bytes of memory that neither side has written.
const UNWRITTEN: u8 = 0xdd;
/// Address at which all memory of a host begins.
const ADDRESS: u64 = 0x10_0000;

/// Kinds of frames: those to the target, and those to the host.
const CAPSULE: u8 = 1;
const READ_RESPONSE: u8 = 2;
const REFUSAL: u8 = 3;
const RESPONSE: u8 = 4;
const READ: u8 = 5;
const WRITE: u8 = 6;

/// One end of a stream of frames: a kind, the length of the rest, and the rest.
#[derive(Debug, Default)]
struct Wire {
    unsent: VecDeque<u8>,
    arrived: VecDeque<u8>,
}

impl Wire {
    const HEADER: usize = 5;

    fn push(&mut self, kind: u8, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.unsent.push_back(kind);
        self.unsent.extend((length as u32).to_le_bytes());
        parts.iter().for_each(|part| self.unsent.extend(*part));
    }

    fn send(&mut self, pipe: &mut Pipe) -> usize {
        let (first, second) = self.unsent.as_slices();
        let sent = pipe.send(&[IoSlice::new(first), IoSlice::new(second)]);
        self.unsent.drain(..sent);
        sent
    }

    fn receive(&mut self, pipe: &mut Pipe, dice: &mut Dice) -> usize {
        let mut space = [0; 4096];
        let bytes = pipe.receive(&mut space, dice);
        self.arrived.extend(&space[..bytes]);
        bytes
    }

    /// Returns the next frame that is whole.
    fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        let header: Vec<u8> = self.arrived.iter().take(Wire::HEADER).copied().collect();
        let length = header.get(1..Wire::HEADER).map(word)? as usize;
        if self.arrived.len() < Wire::HEADER + length {
            return None;
        }
        self.arrived.drain(..Wire::HEADER);
        Some((header[0], self.arrived.drain(..length).collect()))
    }
}

/// Returns the number in the first four bytes.
fn word(bytes: &[u8]) -> u32 {
    bytes
        .iter()
        .take(4)
        .rev()
        .fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn emit_remote(remote: &Remote) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&remote.rkey.0.to_le_bytes());
    bytes[4..].copy_from_slice(&remote.address.to_le_bytes());
    bytes
}

fn parse_remote(bytes: &[u8]) -> Remote {
    Remote {
        rkey: RKey(word(bytes)),
        address: u64::from(word(&bytes[4..])) | u64::from(word(&bytes[8..])) << 32,
    }
}

/// Registered memory of a command.
#[derive(Debug)]
struct Region {
    bytes: Vec<u8>,
    /// The command sends data: the target reads them, and writes nothing.
    is_read: bool,
}

/// A host's end of a connection.
#[derive(Debug)]
pub(super) struct HostQp {
    connection: HostSide,
    wire: Wire,
    /// By the numbers of their keys.
    regions: BTreeMap<u32, Region>,
    /// Keys of the commands in flight, by their places, and whether one may stay although its command has asked for the contrary.
    keys: Vec<Option<(RKey, bool)>>,
    last_key: u32,
    /// Commands ask for their keys to be invalidated, as Linux's do.
    invalidates: bool,
    /// The error of the target in the use of memory or keys.
    fault: Option<String>,
}

impl HostQp {
    pub(super) fn new(config: Config, invalidates: bool) -> HostQp {
        HostQp {
            connection: HostSide::new(config),
            wire: Wire::default(),
            regions: BTreeMap::new(),
            keys: vec![None; config.entries.into()],
            last_key: 0,
            invalidates,
            fault: None,
        }
    }

    pub(super) fn connection(&self) -> &HostSide {
        &self.connection
    }

    pub(super) fn connection_mut(&mut self) -> &mut HostSide {
        &mut self.connection
    }

    pub(super) fn end(&self) -> Option<String> {
        let end = self.connection.end().map(|end| end.to_string());
        self.fault.clone().or(end)
    }

    pub(super) fn submit(&mut self, command: Command, deadline: Option<Instant>) {
        let memory = match self.connection.needs_memory(&command) {
            0 => None,
            bytes => Some(self.register(&command, bytes)),
        };
        // The target allows it for those of fused pairs, which are no matter of speed: a host then invalidates the key itself.
        let may_stay = command.sqe.fuse() != Fuse::None;
        let at = self.connection.submit(command, deadline, memory);
        self.keys[usize::from(at)] = memory.map(|memory| (memory.rkey, may_stay));
    }

    fn register(&mut self, command: &Command, bytes: usize) -> Remote {
        self.last_key += 1;
        let rkey = RKey(self.last_key);
        let is_read = matches!(command.data, Data::Out(_));
        let bytes = match is_read || self.connection.fills_memory() {
            true => command.buffer[..bytes].to_vec(),
            false => vec![UNWRITTEN; bytes],
        };
        self.regions.insert(rkey.0, Region { bytes, is_read });
        Remote {
            address: ADDRESS,
            rkey,
        }
    }

    pub(super) fn send(&mut self, pipe: &mut Pipe) -> usize {
        while let Some([sqe, data]) = self.connection.next_capsule() {
            let mut sqe = Sqe::parse(sqe).expect("it is as long as a command");
            if self.invalidates
                && let Ok(Sgl::Keyed {
                    address,
                    length,
                    rkey,
                    ..
                }) = sqe.sgl()
                && length > 0
            {
                sqe.set_sgl(Sgl::Keyed {
                    address,
                    length,
                    rkey,
                    invalidate: true,
                });
            }
            self.wire.push(CAPSULE, &[sqe.as_bytes(), data]);
        }
        self.wire.send(pipe)
    }

    pub(super) fn receive(&mut self, pipe: &mut Pipe, dice: &mut Dice) -> usize {
        let bytes = self.wire.receive(pipe, dice);
        while let Some((kind, frame)) = self.wire.next() {
            match kind {
                READ => self.answer(&frame),
                WRITE => self.write(&frame),
                _ => self.handle_response(&frame),
            }
        }
        bytes
    }

    /// Returns memory that a command of the target's may use.
    fn reach(&mut self, to: Remote, length: usize, reads: bool) -> Option<&mut [u8]> {
        let offset = to.address.wrapping_sub(ADDRESS) as usize;
        let region = self
            .regions
            .get_mut(&to.rkey.0)
            .filter(|region| region.is_read == reads);
        let reached = region.and_then(|region| region.bytes.get_mut(offset..)?.get_mut(..length));
        if reached.is_none() {
            let what = if reads { "reads from" } else { "writes to" };
            self.fault.get_or_insert(format!(
                "the target {what} memory of no command ({to:?}, {length})"
            ));
        }
        reached
    }

    fn answer(&mut self, frame: &[u8]) {
        let (place, rest) = frame.split_at(2);
        let (from, length) = (parse_remote(rest), word(&rest[12..]) as usize);
        match self.reach(from, length, true).map(|bytes| bytes.to_vec()) {
            Some(bytes) => self.wire.push(READ_RESPONSE, &[place, &bytes]),
            None => self.wire.push(REFUSAL, &[]),
        }
    }

    fn write(&mut self, frame: &[u8]) {
        let (to, bytes) = frame.split_at(12);
        match self.reach(parse_remote(to), bytes.len(), false) {
            Some(memory) => memory.copy_from_slice(bytes),
            None => self.wire.push(REFUSAL, &[]),
        }
    }

    fn handle_response(&mut self, frame: &[u8]) {
        let (invalidated, cqe) = frame.split_at(frame.len().saturating_sub(CQE_LEN));
        let invalidated = (!invalidated.is_empty()).then(|| RKey(word(invalidated)));
        let (keys, regions) = (&self.keys, &self.regions);
        let done = self.connection.handle_response(cqe, |at, data| {
            let region = keys[usize::from(at)].and_then(|(key, _)| regions.get(&key.0));
            if let Some(region) = region {
                data.copy_from_slice(&region.bytes[..data.len()]);
            }
        });
        let Some((key, may_stay)) = done.and_then(|at| self.keys[usize::from(at)].take()) else {
            if invalidated.is_some() {
                self.fault
                    .get_or_insert("a response invalidates a key, whose command has none".to_owned());
            }
            return;
        };
        // One that was aborted while limits held it up was not looked at.
        let status = Cqe::parse(cqe).map(|cqe| cqe.status);
        let may_stay = may_stay || status.is_ok_and(|status| status.is(Status::ABORT_REQUESTED));
        let asked = self.invalidates.then_some(key);
        if invalidated != asked && !(may_stay && invalidated.is_none()) {
            let shown = format!("the response to a command with {key:?} invalidates {invalidated:?}");
            self.fault.get_or_insert(shown);
        }
        // A host without that invalidates the key itself.
        self.regions.remove(&key.0);
    }
}

/// The target's end of a connection.
#[derive(Debug)]
pub(super) struct TargetQp {
    connection: TargetSide,
    wire: Wire,
    /// Places of commands.
    used: BTreeSet<u16>,
    places: u16,
    /// Bytes of the READs in flight, by the places of their commands.
    reads: BTreeMap<u16, u32>,
    /// The error of the state machine, or of the host.
    fault: Option<String>,
}

impl TargetQp {
    /// Accepts a connection.
    ///
    /// # Panics
    /// The target rejects it.
    pub(super) fn new(target: Arc<Target>, request: &Request, local: IpAddr, now: Instant) -> TargetQp {
        let request = Request::parse(&request.emit()).expect("a request");
        rdma::check(&request, true, &PORT).expect("the target takes the queue");
        let places = request.sends + 1;
        TargetQp {
            connection: TargetSide::new(target, PORT, request, places.into(), local, now),
            wire: Wire::default(),
            used: BTreeSet::new(),
            places,
            reads: BTreeMap::new(),
            fault: None,
        }
    }

    pub(super) fn connection(&self) -> &TargetSide {
        &self.connection
    }

    pub(super) fn connection_mut(&mut self) -> &mut TargetSide {
        &mut self.connection
    }

    pub(super) fn fault(&self) -> Option<&String> {
        self.fault.as_ref()
    }

    /// Returns true if it has no command in its hands.
    pub(super) fn is_idle(&self) -> bool {
        self.used.is_empty()
    }

    pub(super) fn send(&mut self, pipe: &mut Pipe) -> usize {
        self.wire.send(pipe)
    }

    pub(super) fn receive(&mut self, pipe: &mut Pipe, dice: &mut Dice, now: Instant) -> usize {
        let bytes = self.wire.receive(pipe, dice);
        while let Some((kind, mut frame)) = self.wire.next() {
            match kind {
                CAPSULE => {
                    let Some(place) = (0..self.places).find(|place| !self.used.contains(place)) else {
                        self.fail("a command has no place");
                        break;
                    };
                    self.used.insert(place);
                    self.connection.handle_capsule(place, &mut frame, now);
                }
                READ_RESPONSE => {
                    let (place, data) = frame.split_at(2);
                    let place = word(place) as u16;
                    match self.reads.remove(&place) {
                        Some(length) if length as usize == data.len() => {
                            let copy = |bytes: &mut [u8]| bytes.copy_from_slice(data);
                            self.connection.fetched(place, copy, now);
                        }
                        _ => self.fail("data arrive that were not asked for"),
                    }
                }
                _ => self.fail("the host refuses a key"),
            }
        }
        bytes
    }

    fn fail(&mut self, what: &str) {
        self.fault.get_or_insert(what.to_owned());
    }

    /// Returns the next I/O, and does what is to be done before.
    pub(super) fn poll(&mut self, now: Instant) -> Option<Work> {
        self.connection.resume(now);
        loop {
            while let Some(bytes) = self.connection.wants_buffer() {
                self.connection.granted(Pages::new(bytes), now);
            }
            match self.connection.poll()? {
                Action::Run(mut work) => {
                    if work.io().may_wait() && work.in_capsule() > 0 {
                        work.leave_capsule(Pages::new(work.in_capsule()));
                    }
                    return Some(work);
                }
                Action::Fetch {
                    place, from, length, ..
                } => {
                    let (at, length_bytes) = (place.to_le_bytes(), length.to_le_bytes());
                    self.wire.push(READ, &[&at, &emit_remote(&from), &length_bytes]);
                    self.reads.insert(place, length);
                }
                Action::Respond(response) => self.respond(&response),
                Action::Release(place) => self.free(place),
            }
        }
    }

    fn free(&mut self, place: u16) {
        if !self.used.remove(&place) {
            self.fail("a place is given back that no command has");
        }
        if self.reads.contains_key(&place) {
            self.fail("a place is given back while the data of its command are on their way");
        }
    }

    fn respond(&mut self, response: &Response) {
        if let Some(place) = response.place {
            self.free(place);
        }
        if let (Some((to, length)), Memory::Buffer(buffer)) = (response.write, &response.memory) {
            self.wire
                .push(WRITE, &[&emit_remote(&to), &buffer[..length as usize]]);
        }
        let mut cqe = [0; CQE_LEN];
        response.cqe.emit(&mut cqe);
        let key = response.invalidate.map(|key| key.0.to_le_bytes());
        self.wire
            .push(RESPONSE, &[key.as_ref().map_or(&[], |key| key.as_slice()), &cqe]);
    }
}
