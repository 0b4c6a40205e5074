//! Common parts of the tests: a server in a thread, a client that speaks verbs, a file whose flushes can be held.
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(missing_docs, reason = "nobody reads the pages of tests")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use rdmux_memory::AnonymousMemory;
use rdmux_push::client::{Handshake, Next};
use rdmux_push::server::{self, Config, Control, EndReason, ServerEvent, Stopper};
use rdmux_push::{
    Access, Client, Conflict, Crc64, Domain, Key, MapRequest, Name, Options, Placement, Region, Server,
};
use rdmux_runtime::{MessageConnection, Sizes};
use rdmux_verbs::{
    Atomic, CompletionQueue, ConnectParams, Connection, Device, Fault, Medium, Memory, MemoryRegion,
    Operation, QpOptions, QueuePair, RKey, RecvRequest, Selectivity, SendFlags, SendRequest, SgeList, Status,
    Target,
};
use rdmux_wire::push::{MESSAGE_LEN_MAX, Message};

pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn key() -> Key {
    Key::new([7; 32])
}

pub(crate) fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

pub(crate) fn memory_region(text: &str, bytes: u64) -> Region {
    Region::anonymous(name(text), bytes).unwrap()
}

pub(crate) fn config(address: &str, regions: Vec<Region>) -> Config {
    Config {
        listen: vec![address.parse().unwrap()],
        key: key(),
        regions,
        keepalive: LONG,
        break_timeout: server::BREAK_TIMEOUT_DEFAULT,
        mappings_max: 64,
        device: rdmux_verbs::Options::default(),
    }
}

/// A server on a thread of its own, which ends when this is dropped.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) stopper: Stopper,
    pub(crate) thread: Option<JoinHandle<()>>,
    pub(crate) events: mpsc::Receiver<ServerEvent>,
    pub(crate) regions: Vec<Arc<Region>>,
    pub(crate) control: Control,
}

impl Running {
    pub(crate) fn start(address: &str, regions: Vec<Region>, keepalive: Duration) -> Running {
        Running::start_with(Config {
            keepalive,
            ..config(address, regions)
        })
    }

    pub(crate) fn start_with(config: Config) -> Running {
        rdmux_soft::register();
        let address = config.listen[0];
        let server = Server::bind(config).unwrap();
        let (tx, events) = mpsc::channel();
        Running {
            address,
            stopper: server.stopper(),
            regions: server.regions().to_vec(),
            control: server.control(),
            thread: Some(std::thread::spawn(move || {
                server
                    .run(|event| {
                        let _ = tx.send(event.clone());
                    })
                    .unwrap();
            })),
            events,
        }
    }

    pub(crate) fn client(&self) -> Client {
        self.client_with(Options::default())
    }

    pub(crate) fn client_with(&self, options: Options) -> Client {
        let options = Options {
            from: Some(self.address.ip()),
            ..options
        };
        Client::connect(self.address, &key(), &options).unwrap()
    }

    /// Waits for an event.
    pub(crate) fn wait_for(&self, wanted: impl Fn(&ServerEvent) -> bool) -> ServerEvent {
        loop {
            let event = self.events.recv_timeout(LONG).expect("the event");
            if wanted(&event) {
                return event;
            }
        }
    }

    /// Returns the next end of a connection.
    pub(crate) fn end(&self) -> (EndReason, usize) {
        loop {
            match self.events.recv_timeout(LONG).expect("the end of a connection") {
                ServerEvent::Ended { reason, mappings, .. } => return (reason, mappings),
                _ => continue,
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stopper.stop();
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

/// A server that accepts connections and then says nothing.
pub(crate) struct Silent {
    accepted: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Silent {
    const SIZES: Sizes = Sizes {
        message_bytes: MESSAGE_LEN_MAX,
        sent_bytes: MESSAGE_LEN_MAX,
        receives: 4,
        answers: 0,
        own: 1,
        operations: 0,
    };

    pub(crate) fn start(address: &str) -> Silent {
        rdmux_soft::register();
        let device = Device::open(address.parse().unwrap()).unwrap();
        let listener = device.listen(7174).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(256).unwrap());
        let (accepted, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, is_over) = (accepted.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut connections = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let Some(request) = listener.accept(Duration::from_millis(20)) else {
                    continue;
                };
                let params = ConnectParams::default();
                let accepted = MessageConnection::accept(request, &pd, &cq, &params, &Silent::SIZES);
                connections.push(accepted.unwrap());
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Silent {
            accepted,
            stop,
            thread: Some(thread),
        }
    }

    /// Returns how many connections it has accepted.
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

pub(crate) fn pattern(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 7 + i / 255 + seed) as u8).collect()
}

pub(crate) fn crc(bytes: &[u8]) -> u64 {
    let mut crc = Crc64::default();
    crc.update(bytes);
    crc.value()
}

pub(crate) const RW: Access = Access::READ.union(Access::WRITE);

/// Returns a request for a whole region, to read and write beside others that do the same.
pub(crate) fn shared() -> MapRequest {
    MapRequest {
        share: RW,
        ..MapRequest::new(RW)
    }
}

/// A client that speaks verbs, so that it can do what [`Client`] does not.
pub(crate) struct Raw {
    pub(crate) connection: Connection,
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) memory: Arc<AnonymousMemory>,
    pub(crate) mr: MemoryRegion,
    /// Messages that came while the test waited for something else.
    pub(crate) messages: RefCell<VecDeque<(u64, Message)>>,
    pub(crate) statuses: RefCell<VecDeque<Status>>,
    /// The last bytes sent, and how many sends of them have not completed: all messages are sent from one place.
    pub(crate) sending: RefCell<(Vec<u8>, usize)>,
}

impl Raw {
    pub(crate) const RECEIVES: u64 = 32;
    pub(crate) const SEND: u64 = 1000;
    pub(crate) const DATA: u64 = 1001;

    pub(crate) fn connect(address: SocketAddr) -> Raw {
        let device = Device::open(address.ip()).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(256).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let memory = Arc::new(AnonymousMemory::new((Raw::RECEIVES as usize + 2) * MESSAGE_LEN_MAX).unwrap());
        let mr = pd
            .reg_mr_all(memory.clone(), 0, rdmux_verbs::Access::LOCAL_WRITE)
            .unwrap();
        let connection = device
            .connect(&qp, address, &ConnectParams::default(), &[])
            .unwrap();
        let raw = Raw {
            connection,
            qp,
            cq,
            memory,
            mr,
            messages: RefCell::default(),
            statuses: RefCell::default(),
            sending: RefCell::default(),
        };
        for slot in 0..Raw::RECEIVES {
            raw.post_receive(slot);
        }
        raw
    }

    fn post_receive(&self, slot: u64) {
        let sge = self.mr.sge(slot * MESSAGE_LEN_MAX as u64, MESSAGE_LEN_MAX as u32);
        let request = RecvRequest {
            wr_id: slot,
            sges: sge.into(),
        };
        self.qp.post_recv(request).unwrap();
    }

    pub(crate) fn ready(address: SocketAddr) -> Raw {
        Raw::ready_as(address, [0; 16])
    }

    /// Connects as the client of this name.
    pub(crate) fn ready_as(address: SocketAddr, client: [u8; 16]) -> Raw {
        let raw = Raw::connect(address);
        let mut handshake = Handshake::new(key(), [1; 32], client);
        let mut message = handshake.hello();
        while let Next::Send(next) = handshake.handle(raw.ask(&message).unwrap()).unwrap() {
            message = next;
        }
        raw
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8]) {
        while self.sending.borrow().1 > 0 && self.sending.borrow().0 != bytes {
            self.turn();
        }
        let (last, count) = &mut *self.sending.borrow_mut();
        *last = bytes.to_vec();
        *count += 1;
        let at = Raw::RECEIVES * MESSAGE_LEN_MAX as u64;
        self.memory.write(at, bytes).unwrap();
        let sges = self.mr.sge(at, bytes.len() as u32).into();
        self.post_as(Raw::SEND, Operation::Send { imm: None }, sges);
    }

    pub(crate) fn send(&self, message: &Message) {
        let mut bytes = Vec::new();
        message.emit(1, &mut bytes);
        self.send_bytes(&bytes);
    }

    pub(crate) fn post(&self, operation: Operation, sges: SgeList) {
        self.post_as(Raw::DATA, operation, sges);
    }

    fn post_as(&self, wr_id: u64, operation: Operation, sges: SgeList) {
        let request = SendRequest {
            wr_id,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.qp.post_send(request).unwrap();
    }

    /// Sends a message and waits for one; `None` when the connection ends instead.
    pub(crate) fn ask(&self, message: &Message) -> Option<Message> {
        self.send(message);
        self.receive()
    }

    /// Returns the next message; `None` if the connection ends instead.
    pub(crate) fn receive(&self) -> Option<Message> {
        loop {
            if let Some((_, message)) = self.messages.borrow_mut().pop_front() {
                return Some(message);
            }
            if !self.turn() {
                return None;
            }
        }
    }

    /// Waits until a data request is done.
    pub(crate) fn status(&self) -> Status {
        loop {
            if let Some(status) = self.statuses.borrow_mut().pop_front() {
                return status;
            }
            self.turn();
        }
    }

    /// Takes a completion; returns false if the connection has ended.
    fn turn(&self) -> bool {
        let wc = self.cq.wait(LONG).unwrap().expect("a completion");
        if wc.wr_id == Raw::SEND {
            self.sending.borrow_mut().1 -= 1;
        }
        if wc.wr_id == Raw::DATA {
            self.statuses.borrow_mut().push_back(wc.status);
        }
        if wc.status == Status::Success && wc.wr_id < Raw::RECEIVES {
            let mut bytes = vec![0; wc.byte_len as usize];
            self.memory
                .read(wc.wr_id * MESSAGE_LEN_MAX as u64, &mut bytes)
                .unwrap();
            self.post_receive(wc.wr_id);
            self.messages
                .borrow_mut()
                .push_back(Message::parse(&bytes).unwrap());
        }
        wc.status == Status::Success
    }

    pub(crate) fn map(&self, region: &str, access: Access, offset: u64, length: u64) -> (u64, u64, RKey) {
        self.map_sharing(region, access, RW, offset, length)
    }

    pub(crate) fn map_sharing(
        &self,
        region: &str,
        access: Access,
        share: Access,
        offset: u64,
        length: u64,
    ) -> (u64, u64, RKey) {
        let message = Message::Map {
            region: name(region),
            access,
            share,
            conflict: Conflict::Break,
            offset,
            length,
            transfer: 0,
        };
        match self.ask(&message) {
            Some(Message::Mapped { mapping, extents, .. }) => (mapping, extents[0].va, extents[0].rkey),
            other => panic!("{other:?}"),
        }
    }

    /// Writes 8 bytes by RDMA, and returns the status of the write.
    pub(crate) fn write8(&self, va: u64, rkey: RKey) -> Status {
        self.post(Operation::Write { va, rkey, imm: None }, self.mr.sge(0, 8).into());
        self.status()
    }
}

pub(crate) fn flush(va: u64, rkey: RKey, placement: Placement) -> Operation {
    Operation::Flush {
        va,
        rkey,
        length: 8,
        placement,
        selectivity: Selectivity::Range,
    }
}

/// A file whose accesses and flushes a test can hold and release, and whose flushes it can fail.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) memory: AnonymousMemory,
    pub(crate) gate: Mutex<Gate>,
    pub(crate) changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct Gate {
    pub(crate) shut: bool,
    /// Set while accesses are held.
    pub(crate) stalls: bool,
    pub(crate) fails: bool,
    /// Number of accesses and flushes that are held.
    pub(crate) waiting: usize,
    /// The ranges of the persistent flushes that were done, in their order.
    pub(crate) flushed: Vec<Range<u64>>,
}

impl Disk {
    pub(crate) fn new(shut: bool) -> Arc<Disk> {
        Arc::new(Disk {
            memory: AnonymousMemory::new(1 << 20).unwrap(),
            gate: Mutex::new(Gate {
                shut,
                ..Gate::default()
            }),
            changed: Condvar::new(),
        })
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Gate)) {
        change(&mut self.gate.lock().unwrap());
        self.changed.notify_all();
    }

    pub(crate) fn wait_until_held(&self) {
        let gate = self.gate.lock().unwrap();
        let (_gate, late) = self
            .changed
            .wait_timeout_while(gate, LONG, |gate| gate.waiting == 0)
            .unwrap();
        assert!(!late.timed_out(), "nothing came");
    }

    /// Waits while accesses are held.
    fn access(&self) {
        let mut gate = self.gate.lock().unwrap();
        if gate.stalls {
            gate.waiting += 1;
            self.changed.notify_all();
            gate = self.changed.wait_while(gate, |gate| gate.stalls).unwrap();
            gate.waiting -= 1;
        }
    }

    pub(crate) fn region(self: &Arc<Disk>) -> Region {
        self.region_of(Domain::File)
    }

    pub(crate) fn region_of(self: &Arc<Disk>, domain: Domain) -> Region {
        Region::new(name("disk"), self.clone(), domain, false)
    }

    pub(crate) fn flushes(&self) -> usize {
        self.gate.lock().unwrap().flushed.len()
    }
}

impl Memory for Disk {
    fn len(&self) -> u64 {
        self.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.access();
        self.memory.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.access();
        self.memory.write(offset, bytes)
    }

    fn atomic(&self, offset: u64, atomic: Atomic) -> Result<u64, Fault> {
        self.access();
        self.memory.atomic(offset, atomic)
    }

    fn medium(&self) -> Option<Medium> {
        Some(Medium(std::ptr::from_ref(self) as u64))
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL | Placement::PERSISTENT
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        !placement.contains(Placement::PERSISTENT)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        if !placement.contains(Placement::PERSISTENT) {
            return Ok(());
        }
        let mut gate = self.gate.lock().unwrap();
        gate.waiting += 1;
        self.changed.notify_all();
        let mut gate = self.changed.wait_while(gate, |gate| gate.shut).unwrap();
        gate.waiting -= 1;
        gate.flushed.push(offset..offset + length);
        if gate.fails { Err(Fault::Io(5)) } else { Ok(()) }
    }
}
