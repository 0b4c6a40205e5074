//! An application of two nodes that keeps to nothing: it knows the protocol well enough to get far, and then does what the dice say.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rdmux_memory::mapping::sealed_file;
use rdmux_memory::{AnonymousMemory, own_memory};
use rdmux_share::ring::{ApplicationEnd, Files, Layout};
use rdmux_verbs::provider::folder::own_path;
use rdmux_verbs::provider::seqpacket::{DESCRIPTORS_MAX, receive_with_descriptors, send_bytes};
use rdmux_wire::cm::ServiceId;
use rdmux_wire::node::control::{
    Attributes, ConnectParams, ErrorCode, Kind, MESSAGE_LEN_MAX, Message, Pages, PrivateData, QpState,
    QpType, VERSION,
};
use rdmux_wire::node::{
    Completion, DESCRIPTOR_BYTES, Descriptor, Element, QueueId, Work, WorkData, WorkFlags, WorkOperation,
};
use rdmux_wire::roce::PathMtu;
use rdmux_wire::{LKey, Qpn};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
    open,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, shutdown, socket_with,
    socketpair,
};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Signal, getpid, kill_process};

use crate::bystander::{Keys, Target};
use crate::hostile::{CLASS_4, Corpus, Dice, Vandal};

/// Time after which a node counts as hung.
const LONG: Duration = Duration::from_secs(30);
/// Bytes of the memory that it registers.
const BYTES: u64 = 64 << 10;
/// Actions of an application at most.
const ACTIONS_MAX: u64 = 600;
/// Descriptors that it keeps at most to spoil what is behind them.
const HELD_MAX: usize = 16;
/// Rights on its memory and its queue pairs: all but those of windows and FLUSH.
const ACCESS: u32 = 0b1111;
/// First address of its memory.
const IOVA: u64 = 0x10_0000;
/// Number of the requests whose answers it does not wait for.
const NUMBER: u32 = 0xa5ed_a5ed;

/// Counts of events, by name.
pub(crate) type Happened = BTreeMap<String, u64>;

/// Does what it likes to the nodes of both addresses, as some applications one after the other. Tells what has happened, as JSON, and then
/// ends, by SIGKILL in every other process.
pub(crate) fn run(socket: BorrowedFd<'_>, addresses: [IpAddr; 2], targets: &[Target], dice: Dice) {
    let mut hostile = Hostile {
        addresses,
        targets,
        corpus: Corpus::read(),
        dice,
        happened: Happened::new(),
    };
    let applications = 1 + hostile.dice.below(3);
    let dies = hostile.dice.below(2) == 0;
    for left in (0..applications).rev() {
        hostile.live(|happened| {
            if left == 0 {
                let text = serde_json::to_string(happened).unwrap();
                send_bytes(socket, text.as_bytes(), &[]).unwrap();
                if dies {
                    let _ = kill_process(getpid(), Signal::KILL);
                }
            }
        });
    }
}

struct Hostile<'a> {
    addresses: [IpAddr; 2],
    targets: &'a [Target],
    corpus: Corpus,
    dice: Dice,
    happened: Happened,
}

/// One attachment to a node.
struct Attached {
    socket: OwnedFd,
    end: ApplicationEnd,
    vandal: Vandal,
    /// Regions that the node has registered for it, and those of the other end.
    regions: Vec<Keys>,
    remote: Vec<Keys>,
    /// Its last queue pair for connections.
    qp: u32,
    /// Requests of peers that it may accept.
    requests: Vec<u32>,
    /// The node's words to it.
    told: Happened,
    /// Number of its last request whose answer it waited for.
    number: u32,
    /// Set once it reads nothing any more.
    is_deaf: bool,
    /// Set once the node has ended the connection.
    is_over: bool,
    /// Memory and rings that it has given to the node, and spoils.
    held: Vec<OwnedFd>,
    /// Memory of its process that it has offered.
    offered: Vec<Arc<AnonymousMemory>>,
}

impl Hostile<'_> {
    /// The life of an application of both nodes. `then` comes before it lets go of what it has.
    fn live(&mut self, then: impl FnOnce(&Happened)) {
        self.count("applications");
        (0..self.dice.below(4)).for_each(|_| self.stray());
        let mut ends = self.addresses.map(Attached::new);
        if self.dice.below(8) > 0 {
            self.begin_well(&mut ends);
        }
        // At first it keeps to the protocol, and is hostile by what it asks for.
        let actions = self.dice.below(ACTIONS_MAX);
        let wild_from = self.dice.below(ACTIONS_MAX);
        for action in 0..actions {
            let which = self.dice.below(2) as usize;
            self.act(&mut ends[which], action >= wild_from);
            if self.dice.below(32) == 0 {
                self.connect(&mut ends);
            }
            if ends.iter().all(|end| end.is_over) {
                break;
            }
        }
        for end in &mut ends {
            // Its memory stays its own after the node has detached it.
            if end.is_over {
                self.count("detached");
                (0..1000).for_each(|_| end.vandal.step(&mut self.dice));
            }
        }
        for (name, times) in ends.iter_mut().flat_map(|end| std::mem::take(&mut end.told)) {
            *self.happened.entry(name).or_default() += times;
        }
        then(&self.happened);
        for end in ends {
            // It does not need its rings to ask for something.
            let socket = end.socket;
            drop((end.end, end.vandal));
            let _ = send_message(&socket, NUMBER, &create_qp(QpType::Rc, 1, None), &[]);
        }
    }

    /// Connects to a node without what comes first.
    fn stray(&mut self) {
        let address = *self.dice.pick(&self.addresses);
        let socket = connected_to(address);
        let descriptors = self.descriptors(&socket);
        let descriptors: Vec<_> = descriptors.iter().map(|one| one.as_fd()).collect();
        let bytes = self.corpus.message(&mut self.dice, (address, 1).into());
        let _ = send_bytes(&socket, &bytes, &descriptors);
        if self.dice.below(2) == 0 {
            // It is refused, or attached, or neither.
            let _ = receive(&socket);
        }
    }

    fn count(&mut self, what: &str) {
        *self.happened.entry(what.to_owned()).or_default() += 1;
    }

    /// Makes what a program makes before it moves data, and connects both ends.
    fn begin_well(&mut self, ends: &mut [Attached; 2]) {
        for end in ends.iter_mut() {
            let file = sealed_file("hostile", BYTES).unwrap();
            let register = Message::Register {
                pd: 0,
                offset: 0,
                length: BYTES,
                iova: IOVA,
                access: ACCESS,
            };
            for (message, file) in [
                (Message::AllocPd {}, None),
                (register, Some(&file)),
                (create_qp(QpType::Ud, 64, None), None),
            ] {
                let answer = end.ask(&message, file).expect("it has done nothing bad");
                assert_ne!(answer.name(), "Error", "{message:?}: {answer:?}");
            }
        }
        let [near, far] = ends;
        near.remote.clone_from(&far.regions);
        far.remote.clone_from(&near.regions);
        assert!(self.connect(ends), "it has done nothing bad");
    }

    /// Connects both ends by new queue pairs, as a program does. Returns false if something that it has done prevents that.
    fn connect(&mut self, ends: &mut [Attached; 2]) -> bool {
        for end in ends.iter_mut() {
            match end.ask(&create_qp(QpType::Rc, 64, None), None) {
                Some(Message::QpMade { id, .. }) => end.qp = id,
                _ => return false,
            }
        }
        let port = 1024 + self.dice.below(60_000) as u16;
        let params = params(&mut self.dice);
        let [near, far] = ends;
        let listen = Message::Listen {
            service: ServiceId::tcp(port),
            unreliable: true,
        };
        let connect = Message::Connect {
            qp: near.qp,
            peer: SocketAddr::new(self.addresses[1], port),
            params,
            private_data: PrivateData::default(),
        };
        let Some(Message::Made { id: listener }) = far.ask(&listen, None) else {
            return false;
        };
        for end in [&mut *near, &mut *far] {
            let init = Message::Modify {
                qp: end.qp,
                to: QpState::Init,
                attributes: Attributes {
                    access: Some(ACCESS),
                    ..Attributes::default()
                },
            };
            end.ask(&init, None);
            let receive = Work {
                queue: QueueId(end.qp),
                wr_id: 0,
                flags: WorkFlags::empty(),
                operation: WorkOperation::Recv,
                data: WorkData::Elements(1),
            };
            let element = Element {
                addr: IOVA,
                lkey: LKey(end.regions.first().map_or(0, |own| own.lkey)),
                length: BYTES as u32,
            };
            let mut producer = end.end.submission(0);
            for _ in 0..16 {
                let _ = producer.push_work(&receive, |work, bytes| work.put_elements(bytes, &[element]));
            }
            end.end.tell(0, producer.publish());
        }
        let Some(Message::Made { id: attempt }) = near.ask(&connect, None) else {
            return false;
        };
        let is_connected = loop {
            let ends = [&mut *near, &mut *far];
            let Some((which, message)) = wait_for_either(ends) else {
                return false;
            };
            match (which, message) {
                (0, Message::Connected { connection, .. }) if connection == attempt => break true,
                (0, Message::Refused { connection, .. }) if connection == attempt => break false,
                (1, Message::Requested { request, .. }) => {
                    let accept = Message::Accept {
                        request,
                        qp: far.qp,
                        params,
                        private_data: PrivateData::default(),
                    };
                    let reject = Message::Reject {
                        request,
                        private_data: PrivateData::default(),
                    };
                    // If it does not answer its peer, that waits.
                    if !matches!(far.ask(&accept, None), Some(Message::Made { .. })) {
                        far.ask(&reject, None);
                    }
                }
                _ => {}
            }
        };
        let destroy = Message::Destroy {
            kind: Kind::Listener,
            id: listener,
        };
        far.ask(&destroy, None);
        self.count(if is_connected {
            "connected"
        } else {
            "not connected"
        });
        is_connected
    }

    fn act(&mut self, end: &mut Attached, is_wild: bool) {
        let peer = *self.dice.pick(&self.addresses);
        let peer = SocketAddr::new(peer, 1024 + self.dice.below(60_000) as u16);
        match self.dice.below(100) {
            0..35 => {
                let works = 1 + self.dice.below(4);
                for _ in 0..works {
                    self.submit(end, is_wild);
                }
            }
            35..55 => self.take(end),
            55..75 => {
                let (message, descriptors) = self.proper(end, peer);
                end.send_message(&message, &descriptors);
                end.hold(descriptors);
            }
            75..78 => end.spoil(&mut self.dice),
            // The node catches up.
            78..80 => drop(end.ask(&Message::CountObjects {}, None)),
            80..90 if is_wild => (0..self.dice.below(100)).for_each(|_| end.vandal.step(&mut self.dice)),
            80..98 => {
                let bytes = self.corpus.message(&mut self.dice, peer);
                let is_request = Message::parse(&bytes).is_ok_and(|(_, message)| is_request(&message));
                if is_wild || is_request {
                    let descriptors = self.descriptors(&end.socket);
                    end.send(&bytes, &descriptors);
                    end.hold(descriptors);
                }
            }
            _ if is_wild => self.break_off(end),
            _ => end.is_deaf = self.dice.below(16) == 0,
        }
        end.receive();
    }

    /// Submits a request: often one that could be carried out, or that would reach what is another's.
    fn submit(&mut self, end: &mut Attached, is_wild: bool) {
        let mut work = self.corpus.work(&mut self.dice);
        let bytes = work.as_flattened_mut();
        if !is_wild || self.dice.below(8) > 0 {
            // The first one is for datagrams.
            let queue = *self.dice.pick(&[0, end.qp, end.qp, end.qp, end.qp]);
            bytes[4..8].copy_from_slice(&queue.to_le_bytes());
            self.aim(end, bytes);
        }
        let parsed = Work::parse(bytes.first_chunk().unwrap());
        let is_proper = parsed.is_ok_and(|parsed| parsed.descriptors() == work.len());
        // After those a queue pair, or the application, is useless.
        let ends_much = parsed.is_ok_and(|parsed| {
            use WorkOperation::{Datagram, Flush, SendInvalidate, SharedRecv};
            matches!(
                parsed.operation,
                Datagram { .. } | Flush { .. } | SendInvalidate { .. } | SharedRecv
            )
        });
        if !is_wild && (!is_proper || ends_much && self.dice.below(16) > 0) {
            return;
        }
        let mut producer = end.end.submission(0);
        if producer.push(&work).is_ok() {
            let told = producer.publish();
            end.end.tell(0, told);
        }
    }

    /// Has a request name memory that there is: its own, the other end's, or the bystander's.
    fn aim(&mut self, end: &Attached, bytes: &mut [u8]) {
        let dice = &mut self.dice;
        let target = dice.pick(self.targets).keys;
        let offset = 8 * dice.below(BYTES / 8);
        let one_of = |dice: &mut Dice, keys: &[Keys]| match keys.is_empty() || dice.below(64) == 0 {
            true => target,
            false => *dice.pick(keys),
        };
        let remote = one_of(dice, &end.remote);
        bytes[16..24].copy_from_slice(&remote.va.wrapping_add(offset).to_le_bytes());
        bytes[24..28].copy_from_slice(&remote.rkey.to_le_bytes());
        let is_atomic = (7..10).contains(&bytes[0]);
        for element in bytes[Work::DATA_AT..].as_chunks_mut().0 {
            let own = one_of(dice, &end.regions);
            let length = match is_atomic {
                true => 8,
                false => *dice.pick(&[0, 8, 64, 64, 64, 512, 8192]),
            };
            let of_own = Element {
                addr: own.va.wrapping_add(offset),
                lkey: LKey(own.lkey),
                length,
            };
            of_own.emit(element);
            if is_atomic {
                break;
            }
        }
    }

    /// Takes completions.
    fn take(&mut self, end: &mut Attached) {
        let mut consumer = end.end.completion(0);
        let mut out: [Descriptor; 64] = [[0; DESCRIPTOR_BYTES]; 64];
        let Ok(count) = consumer.take(&mut out) else {
            return;
        };
        for found in &out[..count] {
            // It may have set its head to where nothing is.
            if let Ok(completion) = Completion::parse(found) {
                self.count(&format!("completed: {:?}", completion.status));
            }
        }
        let ring = end.end.layout().completion_ring(0);
        let told = consumer.release();
        end.end.tell(ring, told);
    }

    /// Returns a message that a program could send, with the descriptors that it needs or others.
    fn proper(&mut self, end: &mut Attached, peer: SocketAddr) -> (Message, Vec<OwnedFd>) {
        let dice = &mut self.dice;
        let id = dice.below(4) as u32;
        let iova = *dice.pick(&[IOVA, IOVA, IOVA, 0, u64::MAX - BYTES, u64::MAX]);
        let length = *dice.pick(&[0, 8, 4096, BYTES, BYTES, u64::MAX]);
        let private_data = PrivateData::default();
        let params = params(dice);
        let mut file = None;
        let message = match dice.below(16) {
            0 => Message::AllocPd {},
            1..4 => {
                file = Some(descriptor(dice, &end.socket));
                Message::Register {
                    pd: id / 3,
                    offset: *dice.pick(&[0, 0, 1, 4096, u64::MAX]),
                    length,
                    iova,
                    access: ACCESS,
                }
            }
            4 => {
                file = own_memory().ok();
                Message::OfferMemory {}
            }
            5..7 => {
                let memory = Arc::new(AnonymousMemory::new(BYTES as usize).unwrap());
                let address = memory.address();
                end.offered.push(memory);
                let pages = (dice.below(2) == 0).then_some(Pages { address, length });
                file = pages.map(|_| descriptor(dice, &end.socket));
                Message::RegisterOffered {
                    pd: id / 3,
                    address: *dice.pick(&[address, address, 0, u64::MAX - BYTES]),
                    length,
                    iova,
                    access: ACCESS,
                    pages,
                }
            }
            7 => {
                let qp_type = *dice.pick(&[QpType::Rc, QpType::Uc, QpType::Ud]);
                let max_send_wr = *dice.pick(&[0, 1, 64, 1000]);
                create_qp(qp_type, max_send_wr, (dice.below(4) == 0).then_some(0))
            }
            8 => Message::Destroy {
                kind: *dice.pick(&[
                    Kind::Pd,
                    Kind::Region,
                    Kind::Qp,
                    Kind::Listener,
                    Kind::Connection,
                    Kind::Srq,
                    Kind::AddressHandle,
                ]),
                id,
            },
            9..11 => Message::Connect {
                qp: id,
                peer,
                params,
                private_data,
            },
            11 => match end.requests.pop() {
                Some(request) if id == 0 => Message::Reject {
                    request,
                    private_data,
                },
                request => Message::Accept {
                    request: request.unwrap_or(id),
                    qp: id,
                    params,
                    private_data,
                },
            },
            12 => Message::Disconnect { connection: id },
            13 => Message::Retire { qp: id },
            14 => Message::CreateSrq {
                pd: id / 3,
                max_wr: 16,
            },
            _ => {
                // To the queue pair of another application, as if it was its peer.
                match Message::parse(&self.corpus.message(dice, peer)) {
                    Ok((
                        _,
                        Message::Modify {
                            to, mut attributes, ..
                        },
                    )) => {
                        attributes.dest_qpn = Some(Qpn::new(dice.pick(self.targets).qpn));
                        Message::Modify {
                            qp: 1,
                            to,
                            attributes,
                        }
                    }
                    _ => Message::CountObjects {},
                }
            }
        };
        (message, file.into_iter().collect())
    }

    /// Returns some descriptors that no message needs, or that one needs.
    fn descriptors(&mut self, own: &OwnedFd) -> Vec<OwnedFd> {
        let count = match self.dice.below(32) {
            0 => DESCRIPTORS_MAX as u64,
            1..4 => self.dice.below(4),
            4..16 => 1,
            _ => 0,
        };
        let dice = &mut self.dice;
        (0..count).map(|_| descriptor(dice, own)).collect()
    }

    /// Breaks the connection's rules, or ends it by halves.
    fn break_off(&mut self, end: &mut Attached) {
        match self.dice.below(8) {
            0 => drop(shutdown(&end.socket, Shutdown::Write)),
            1 => drop(shutdown(&end.socket, Shutdown::Read)),
            2 => drop(shutdown(&end.socket, Shutdown::Both)),
            3 => end.send_message(&attach(), &[]),
            4..7 => {
                let mut bytes = vec![0; self.dice.below(2 * MESSAGE_LEN_MAX as u64) as usize];
                self.dice.fill(&mut bytes);
                end.send(&bytes, &[]);
            }
            _ => {
                // More requests than the node answers to one that does not read.
                end.is_deaf = true;
                for _ in 0..1000 {
                    end.send_message(&Message::CountObjects {}, &[]);
                }
            }
        }
    }
}

impl Attached {
    fn new(address: IpAddr) -> Attached {
        let socket = connected_to(address);
        send_message(&socket, NUMBER, &attach(), &[]).unwrap();
        let (_, message, files) = wait(&socket).expect("the node attaches who asks well");
        let Message::Attached {
            submission_slots,
            completion_slots,
            ..
        } = message
        else {
            panic!("{message:?}")
        };
        let files = Files::from_fds(files.try_into().unwrap());
        let layout = Layout::new(1, submission_slots, 1, completion_slots).unwrap();
        let vandal = Vandal::new(files.as_fds(), 1, layout.rings().into());
        Attached {
            socket,
            end: ApplicationEnd::attach(layout, files).unwrap(),
            vandal,
            regions: Vec::new(),
            remote: Vec::new(),
            qp: 0,
            requests: Vec::new(),
            told: Happened::new(),
            number: 0,
            is_deaf: false,
            is_over: false,
            held: Vec::new(),
            offered: Vec::new(),
        }
    }
    /// Makes a request, and waits for its answer; `None` if there will be none.
    fn ask(&mut self, message: &Message, file: Option<&OwnedFd>) -> Option<Message> {
        if self.is_deaf || self.is_over {
            return None;
        }
        self.number += 1;
        let number = self.number;
        let files: Vec<BorrowedFd<'_>> = file.iter().map(|file| file.as_fd()).collect();
        // Without room the node would not answer what it has got, either.
        while let Err(error) = send_message(&self.socket, number, message, &files) {
            if error != Errno::AGAIN || self.wait().is_none() {
                self.is_over = true;
                return None;
            }
        }
        loop {
            match self.wait() {
                Some((found, answer)) if found == number => return Some(answer),
                Some(_) => {}
                None => return None,
            }
        }
    }

    /// Waits for a message; `None` if the connection has ended.
    fn wait(&mut self) -> Option<(u32, Message)> {
        let received = wait(&self.socket);
        self.is_over |= received.is_none();
        let (number, message, _) = received?;
        self.learn(&message);
        Some((number, message))
    }

    fn learn(&mut self, message: &Message) {
        let name = match &message {
            // Why it is detached, without what differs each time.
            Message::Error {
                code: ErrorCode::Protocol,
                text,
                ..
            } => text.replace(|c: char| c.is_ascii_digit(), ""),
            Message::Error { code, .. } => format!("refused: {code:?}"),
            other => other.name().to_owned(),
        };
        *self.told.entry(name).or_default() += 1;
        match message {
            Message::Registered { lkey, rkey, .. } => self.regions.push(Keys {
                va: IOVA,
                lkey: lkey.0,
                rkey: rkey.0,
            }),
            Message::Requested { request, .. } => self.requests.push(*request),
            _ => {}
        }
    }

    /// Reads what there is, unless it reads nothing any more.
    fn receive(&mut self) {
        if self.is_deaf || self.is_over {
            return;
        }
        loop {
            match receive(&self.socket) {
                Ok(Some((_, message, _))) => self.learn(&message),
                Ok(None) => return,
                Err(_) => {
                    self.is_over = true;
                    return;
                }
            }
        }
    }

    fn send_message(&mut self, message: &Message, descriptors: &[OwnedFd]) {
        let mut bytes = Vec::new();
        message.emit(NUMBER, &mut bytes);
        self.send(&bytes, descriptors);
    }

    /// Sends bytes, if the node reads them.
    fn send(&mut self, bytes: &[u8], descriptors: &[OwnedFd]) {
        let descriptors: Vec<_> = descriptors.iter().map(|one| one.as_fd()).collect();
        match send_bytes(&self.socket, bytes, &descriptors) {
            Ok(()) | Err(Errno::AGAIN | Errno::MSGSIZE | Errno::TOOMANYREFS) => {}
            Err(_) => self.is_over = true,
        }
    }

    /// Keeps descriptors that the node has, too.
    fn hold(&mut self, descriptors: Vec<OwnedFd>) {
        self.held.extend(descriptors);
        let surplus = self.held.len().saturating_sub(HELD_MAX);
        self.held.drain(..surplus);
    }

    /// Does something to what it has given to the node.
    fn spoil(&mut self, dice: &mut Dice) {
        if dice.below(2) == 0 {
            self.offered.clear();
        }
        if self.held.is_empty() {
            return;
        }
        let file = dice.pick(&self.held);
        match dice.below(4) {
            0 => drop(ftruncate(file, *dice.pick(&[0, 1, 4096, 1 << 20]))),
            1 => {
                let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(file, holes, 0, BYTES);
            }
            2 => drop(fcntl_add_seals(file, SealFlags::FUTURE_WRITE | SealFlags::SEAL)),
            _ => self.held.clear(),
        }
    }
}

/// Returns a descriptor of any kind.
fn descriptor(dice: &mut Dice, own: &OwnedFd) -> OwnedFd {
    let memory = |seals: Option<SealFlags>| {
        let file = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, BYTES).unwrap();
        if let Some(seals) = seals {
            fcntl_add_seals(&file, seals).unwrap();
        }
        file
    };
    let opened = |path: &str, flags| open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
    match dice.below(20) {
        0..7 => sealed_file("hostile", BYTES).unwrap(),
        7 => sealed_file("hostile", 0).unwrap(),
        8 => memory(None),
        9 => memory(Some(SealFlags::GROW)),
        10 => memory(Some(SealFlags::SHRINK)),
        11 => memory(Some(SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)),
        12 => pipe_with(PipeFlags::CLOEXEC).unwrap().0,
        13 => pipe_with(PipeFlags::CLOEXEC).unwrap().1,
        14 => own.try_clone().unwrap(),
        15 => {
            let flags = SocketFlags::CLOEXEC;
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .unwrap()
                .0
        }
        16 => opened("/dev/null", OFlags::RDWR),
        17 => opened("/", OFlags::RDONLY | OFlags::DIRECTORY),
        18 => opened("/", OFlags::PATH),
        _ => own_memory().unwrap(),
    }
}

fn attach() -> Message {
    Message::Attach {
        version_min: VERSION,
        version_max: VERSION,
        name: "hostile".into(),
    }
}

fn create_qp(qp_type: QpType, max_send_wr: u32, srq: Option<u32>) -> Message {
    Message::CreateQp {
        pd: 0,
        qp_type,
        max_send_wr,
        max_recv_wr: 64,
        srq,
        replays_writes: false,
    }
}

fn params(dice: &mut Dice) -> ConnectParams {
    ConnectParams {
        access: ACCESS,
        initiator_depth: 4,
        responder_resources: 4,
        ack_timeout: None,
        retry_count: 7,
        rnr_retry: *dice.pick(&[0, 7]),
        min_rnr_timer: 12,
        path_mtu_max: PathMtu::Bytes4096,
        traffic_class: *dice.pick(&[0, CLASS_4]),
        service: None,
        source_port: 0,
    }
}

/// Returns whether an application may send a message, after the first.
fn is_request(message: &Message) -> bool {
    const REQUESTS: [&str; 21] = [
        "AllocPd",
        "Register",
        "CreateQp",
        "Modify",
        "Query",
        "Retire",
        "Destroy",
        "Listen",
        "Connect",
        "Accept",
        "Reject",
        "Disconnect",
        "Count",
        "AskMtu",
        "CountObjects",
        "OfferMemory",
        "RegisterOffered",
        "CreateSrq",
        "ModifySrq",
        "QuerySrq",
        "CreateAddressHandle",
    ];
    REQUESTS.contains(&message.name())
}

/// Connects to the node of an address.
fn connected_to(address: IpAddr) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    connect(&socket, &SocketAddrUnix::new(place_of(address)).unwrap()).unwrap();
    socket
}

/// Returns the socket of the node of an address.
fn place_of(address: IpAddr) -> PathBuf {
    let suffix = format!("-{address}");
    let entries = std::fs::read_dir(own_path()).unwrap();
    let mut paths = entries.map(|entry| entry.unwrap().path());
    let is_it = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("node-") && name.ends_with(&suffix)
    };
    paths.find(is_it).expect("the node is there")
}

fn send_message(
    socket: &OwnedFd,
    number: u32,
    message: &Message,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut bytes = Vec::new();
    message.emit(number, &mut bytes);
    send_bytes(socket, &bytes, descriptors)
}

/// The number of a request, the message, and its descriptors.
type Received = (u32, Message, Vec<OwnedFd>);

/// Receives a message of the node, if there is one.
fn receive(socket: &OwnedFd) -> Result<Option<Received>, Errno> {
    let mut bytes = [0; MESSAGE_LEN_MAX];
    match receive_with_descriptors(socket, &mut bytes) {
        Ok((0, _)) => Err(Errno::PIPE),
        Ok((len, descriptors)) => {
            let (number, message) = Message::parse(&bytes[..len]).expect("the node sends messages");
            Ok(Some((number, message, descriptors)))
        }
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Waits for a message; `None` if the connection has ended.
fn wait(socket: &OwnedFd) -> Option<Received> {
    loop {
        match receive(socket) {
            Ok(None) => {
                let timeout = LONG.try_into().unwrap();
                let ready = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
                assert_eq!(ready, Ok(1), "the node is silent");
            }
            other => return other.ok().flatten(),
        }
    }
}

/// Waits for a message of one of two nodes; `None` if a connection has ended.
fn wait_for_either(ends: [&mut Attached; 2]) -> Option<(usize, Message)> {
    let timeout = LONG.try_into().unwrap();
    let mut fds = ends.each_ref().map(|end| PollFd::new(&end.socket, PollFlags::IN));
    assert_ne!(poll(&mut fds, Some(&timeout)), Ok(0), "the nodes are silent");
    let which = usize::from(fds[0].revents().is_empty());
    let (_, message) = ends[which].wait()?;
    Some((which, message))
}
