use std::time::{Duration, Instant};

use rdmux_verbs::{CompletionQueue, ProtectionDomain};

use super::*;
use crate::cmd::perf::storage::capsule::{COMMAND_LEN, TRANSFER_MAX};

const PORT: u16 = 18515;
const BYTES: u32 = 4096;
const LONG: Duration = Duration::from_secs(60);

/// A server on an address of its own; it ends with the test.
struct Bed {
    server: Server,
    at: SocketAddr,
}

impl Bed {
    fn new(last: u8, latency: Duration) -> Bed {
        rdmux_soft::register();
        let device = Device::open(IpAddr::from([127, 0, 4, last])).unwrap();
        let geometry = Geometry {
            drives: 2,
            drive_bytes: 1 << 20,
        };
        let identity = Identity {
            geometry,
            latency,
            depth: 2,
            queue: QUEUE_MAX as u32,
            reactors: 2,
            queues: "pool".into(),
            moderation: "off".into(),
        };
        let contents = AnonymousMemory::shareable(geometry.bytes() as usize).unwrap();
        Bed {
            server: Server::start(&device, PORT, identity, Queues::Pool, &[], contents).unwrap(),
            at: SocketAddr::new(device.address(), PORT),
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.server.stopper.stop();
        self.server
            .threads
            .drain(..)
            .for_each(|thread| thread.join().unwrap().unwrap());
    }
}

/// A client that sends what it likes.
struct Peer {
    link: rdmux_runtime::MessageConnection,
    memory: Arc<AnonymousMemory>,
    mr: MemoryRegion,
    cq: CompletionQueue,
    _pd: ProtectionDomain,
}

impl Peer {
    /// Connects from an address with these rights to its buffer.
    fn new(bed: &Bed, last: u8, access: Access) -> Peer {
        let device = Device::open(IpAddr::from([127, 0, 4, last])).unwrap();
        let sizes = Sizes {
            message_bytes: MESSAGE_LEN_MAX,
            sent_bytes: MESSAGE_LEN_MAX,
            receives: QUEUE_MAX,
            answers: 0,
            own: QUEUE_MAX + SIGNAL_EVERY,
            operations: 0,
        };
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(sizes.completions() as u32).unwrap();
        let memory = Arc::new(AnonymousMemory::shareable(BYTES as usize).unwrap());
        let mr = pd
            .reg_mr_all(memory.clone(), memory.address(), Access::LOCAL_WRITE | access)
            .unwrap();
        let params = ConnectParams::default();
        let link = rdmux_runtime::MessageConnection::connect(&pd, &cq, bed.at, &params, &sizes).unwrap();
        Peer {
            link,
            memory,
            mr,
            cq,
            _pd: pd,
        }
    }

    fn command(&self, id: u16, opcode: Opcode) -> Command {
        Command {
            drive: 1,
            lba: 8,
            bytes: BYTES,
            va: self.mr.iova(),
            rkey: self.mr.rkey().0,
            ..Command::of(id, opcode)
        }
    }

    fn send(&mut self, message: &[u8]) {
        let slot = self.link.take_slot().unwrap();
        self.link.send(slot, message).unwrap();
    }

    /// Returns the next response, or `None` if the connection is over.
    fn response(&mut self) -> Option<(Response, Vec<u8>)> {
        let began = Instant::now();
        loop {
            assert!(began.elapsed() < LONG, "neither a response nor an end");
            if let Some(wc) = self.cq.wait(Duration::from_millis(100)).unwrap() {
                match self.link.handle(&wc) {
                    Ok(Completed::Message { bytes, .. }) => {
                        let (response, more) = Response::parse(&bytes).unwrap();
                        return Some((response, more.to_vec()));
                    }
                    Ok(_) => {}
                    Err(_) => return None,
                }
            } else if self.link.end().is_some() {
                return None;
            }
        }
    }

    fn status_of(&mut self, message: &[u8]) -> Option<(u16, Status)> {
        self.send(message);
        self.response()
            .map(|(response, _)| (response.id, response.status))
    }

    fn writes_and_reads(&mut self) {
        let pattern = [0x5a; BYTES as usize];
        self.memory.write(0, &pattern).unwrap();
        let write = self.command(1, Opcode::Write).emit();
        assert_eq!(self.status_of(&write), Some((1, Status::Success)));
        self.memory.write(0, &[0; BYTES as usize]).unwrap();
        let read = self.command(2, Opcode::Read).emit();
        assert_eq!(self.status_of(&read), Some((2, Status::Success)));
        let mut found = [0; BYTES as usize];
        self.memory.read(0, &mut found).unwrap();
        assert_eq!(found, pattern);
    }
}

fn all() -> Access {
    Access::REMOTE_WRITE | Access::REMOTE_READ
}

#[test]
fn voluntary_switches__is_the_line_of_that_name() {
    let status = "Name:\tx\nvoluntary_ctxt_switches:\t57\nnonvoluntary_ctxt_switches:\t9\n";
    assert_eq!(voluntary_switches(status), 57);
    assert_eq!(voluntary_switches("nonvoluntary_ctxt_switches:\t9\n"), 0);
    assert_eq!(voluntary_switches("voluntary_ctxt_switches:\tx\n"), 0);
}

#[test]
fn command__moves_bytes_and_is_counted() {
    for (latency, last) in [(Duration::ZERO, 1), (Duration::from_micros(50), 2)] {
        let bed = Bed::new(last, latency);
        let mut peer = Peer::new(&bed, last + 100, all());
        peer.writes_and_reads();
        peer.send(&Command::of(3, Opcode::Statistics).emit());
        let statistics = Statistics::parse(&peer.response().unwrap().1).unwrap();
        assert_eq!(
            (statistics.reads, statistics.writes, statistics.refused),
            (1, 1, 0)
        );
        // Three messages, and an RDMA READ.
        assert!(statistics.completions >= 4, "{statistics:?}");
        assert!(statistics.cpu_ns > 0 && statistics.time_ns > 0);
        peer.send(&Command::of(4, Opcode::Identify).emit());
        let identity = Identity::parse(&peer.response().unwrap().1).unwrap();
        assert_eq!(identity, bed.server.shared.identity());
    }
}

#[test]
fn command__that_cannot_be_executed_gets_a_status() {
    let bed = Bed::new(3, Duration::ZERO);
    let mut peer = Peer::new(&bed, 103, all());
    let read = peer.command(7, Opcode::Read);
    let wrong = [
        (Command { drive: 2, ..read }, Status::NoDrive),
        (Command { lba: 2048, ..read }, Status::OutOfRange),
        (
            Command {
                lba: u64::MAX,
                ..read
            },
            Status::OutOfRange,
        ),
        (Command { bytes: 0, ..read }, Status::BadLength),
        (Command { bytes: 100, ..read }, Status::BadLength),
        (
            Command {
                bytes: TRANSFER_MAX + 512,
                ..read
            },
            Status::BadLength,
        ),
    ];
    for (command, status) in wrong {
        assert_eq!(peer.status_of(&command.emit()), Some((7, status)));
    }
    let mut other = read.emit();
    other[5] = 99;
    assert_eq!(peer.status_of(&other), Some((7, Status::UnknownOpcode)));
    let mut other = read.emit();
    other[4] = 99;
    assert_eq!(peer.status_of(&other), Some((7, Status::UnknownVersion)));
    // The connection goes on.
    peer.writes_and_reads();
}

#[test]
fn connection__a_violation_ends_it_and_no_other() {
    let bed = Bed::new(4, Duration::ZERO);
    let mut good = Peer::new(&bed, 104, all());
    good.writes_and_reads();
    let messages: [Vec<u8>; 4] = [
        vec![],
        vec![0; COMMAND_LEN],
        Command::of(1, Opcode::Identify).emit()[1..].to_vec(),
        vec![0xff; MESSAGE_LEN_MAX],
    ];
    for message in messages {
        let mut bad = Peer::new(&bed, 105, all());
        assert_eq!(bad.status_of(&message), None, "{message:?}");
        good.writes_and_reads();
    }
}

#[test]
fn connection__a_buffer_without_rights_ends_it_and_no_other() {
    let bed = Bed::new(6, Duration::ZERO);
    let mut good = Peer::new(&bed, 106, all());
    for opcode in [Opcode::Read, Opcode::Write] {
        let mut bad = Peer::new(&bed, 107, Access::empty());
        let command = bad.command(1, opcode).emit();
        assert_eq!(bad.status_of(&command), None, "{opcode:?}");
        let mut bad = Peer::new(&bed, 107, all());
        let mut command = bad.command(1, opcode);
        command.va += 1;
        assert_eq!(bad.status_of(&command.emit()), None, "{opcode:?} beyond the end");
        good.writes_and_reads();
    }
}

#[test]
fn connection__commands_of_one_that_is_gone_are_dropped() {
    let bed = Bed::new(8, Duration::from_millis(1));
    for _ in 0..3 {
        let mut gone = Peer::new(&bed, 108, all());
        for id in 0..8 {
            let command = gone.command(id, Opcode::Read).emit();
            gone.send(&command);
        }
        drop(gone);
        Peer::new(&bed, 109, all()).writes_and_reads();
    }
}
