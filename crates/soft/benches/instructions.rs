//! The program whose instructions `cargo xtask instructions` has callgrind count: messages between two devices of one process, all posted and
//! polled by one thread. Nobody sleeps and nobody is waited for, so the count of a message is the same in each run, whatever else the machine does.
//!
//! `instructions ADDRESS MESSAGE STEP COUNT` sends so many messages. callgrind collects in [`counted`] alone, which runs the one chosen step
//! of each message.

use std::error::Error;
use std::hint::black_box;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, Carrier, CompletionQueue, ConnectParams, Connection, Device, MemoryRegion, Operation, Options,
    QpOptions, QueuePair, RecvRequest, SendFlags, SendRequest, SharedMemory, Target,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const MEMORY_BYTES: usize = 4096;
const PORT: u16 = 7174;
/// Messages before the first that counts: they bring grants and the first growth of each queue.
const WARM_UP: u32 = 200;
/// Messages after which a grant counts as refused.
const MESSAGES_MAX: u32 = 100_000;
/// Polls after which a completion counts as lost.
const POLLS_MAX: u32 = 1_000_000;

struct End {
    device: Device,
    cq: CompletionQueue,
    qp: QueuePair,
    mr: MemoryRegion,
}

impl End {
    fn open(address: IpAddr, shared_memory: SharedMemory) -> Outcome<End> {
        let options = Options {
            shared_memory,
            ..Options::default()
        };
        let device = Device::open_with(address, options)?;
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(1024)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let memory = Arc::new(AnonymousMemory::shareable(MEMORY_BYTES)?);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = pd.reg_mr_all(memory.clone(), memory.address(), access)?;
        Ok(End { device, cq, qp, mr })
    }

    fn receive(&self) -> RecvRequest {
        RecvRequest {
            wr_id: 2,
            sges: self.mr.sge(0, MEMORY_BYTES as u32).into(),
        }
    }
}

/// Two ends of one connection, and what the first sends.
struct Pair {
    a: End,
    b: End,
    message: Message,
    _connections: [Connection; 2],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Read,
    Send,
    /// No message, only a look for one.
    Poll,
}

#[derive(Clone, Copy)]
struct Message {
    kind: Kind,
    bytes: u32,
    is_signaled: bool,
    over_udp: bool,
}

impl Message {
    fn named(name: &str) -> Option<Message> {
        let (kind, bytes, is_signaled, over_udp) = match name {
            "write-8-unsignaled" => (Kind::Write, 8, false, false),
            "write-8" => (Kind::Write, 8, true, false),
            "read-8" => (Kind::Read, 8, true, false),
            "send-8" => (Kind::Send, 8, true, false),
            "send-4096" => (Kind::Send, 4096, true, false),
            "udp-write-8" => (Kind::Write, 8, true, true),
            "poll" => (Kind::Poll, 0, false, false),
            _ => return None,
        };
        Some(Message {
            kind,
            bytes,
            is_signaled,
            over_udp,
        })
    }
}

/// Runs a step of a message. callgrind knows this function by its name.
#[inline(never)]
fn counted<T>(step: impl FnOnce() -> T) -> T {
    black_box(step())
}

/// Chooses the step that counts; `all` is every step.
struct Meter<'a>(&'a str);

impl Meter<'_> {
    fn step<T>(&self, name: &str, step: impl FnOnce() -> T) -> T {
        if self.0 == name || self.0 == "all" {
            counted(step)
        } else {
            step()
        }
    }
}

impl Pair {
    fn connect(address: IpAddr, message: Message) -> Outcome<Pair> {
        let shared_memory = if message.over_udp {
            SharedMemory::Off
        } else {
            SharedMemory::Auto
        };
        let (a, b) = (
            End::open(address, shared_memory)?,
            End::open(address, shared_memory)?,
        );
        let listener = b.device.listen(PORT)?;
        let params = ConnectParams::default();
        let (connected, accepted) = thread::scope(|scope| {
            let accepting = scope.spawn(|| {
                let request = listener.accept(Duration::from_secs(60)).expect("a request");
                request.accept(&b.qp, &params, &[]).expect("accepted")
            });
            let connected = a
                .device
                .connect(&a.qp, SocketAddr::new(address, PORT), &params, &[]);
            (connected, accepting.join().expect("no panic"))
        });
        for _ in 0..8 {
            b.qp.post_recv(b.receive())?;
        }
        Ok(Pair {
            _connections: [connected?, accepted],
            a,
            b,
            message,
        })
    }

    fn request(&self, message: Message) -> SendRequest {
        let (va, rkey) = (self.b.mr.iova(), self.b.mr.rkey());
        let operation = match message.kind {
            Kind::Write => Operation::Write { va, rkey, imm: None },
            Kind::Read => Operation::Read { va, rkey },
            Kind::Send | Kind::Poll => Operation::Send { imm: None },
        };
        SendRequest {
            wr_id: 1,
            operation,
            sges: self.a.mr.sge(0, message.bytes).into(),
            flags: if message.is_signaled {
                SendFlags::SIGNALED
            } else {
                SendFlags::empty()
            },
            to: Target::Connected,
        }
    }

    /// Sends one message, by as few polls as it takes.
    fn send(&self, message: Message, meter: &Meter<'_>) -> Outcome<()> {
        let (a, b) = (&self.a, &self.b);
        if message.kind == Kind::Poll {
            let found = meter.step("poll", || a.cq.poll());
            return found.map_or(Ok(()), |_| Err("a completion of nothing".into()));
        }
        meter.step("post", || a.qp.post_send(self.request(message)))?;
        if message.kind == Kind::Send {
            meter.step("receive", || next(&b.cq, || ()))?;
            meter.step("post-receive", || b.qp.post_recv(b.receive()))?;
            meter.step("acknowledge", || b.cq.poll());
        } else if message.over_udp {
            meter.step("respond", || b.cq.poll());
        }
        if message.is_signaled {
            meter.step("complete", || {
                next(&a.cq, || {
                    b.cq.poll();
                })
            })?;
        }
        Ok(())
    }

    /// Sends signaled messages until so many in turn have gone the way that is measured.
    fn warm_up(&self) -> Outcome<()> {
        let Message { kind, over_udp, .. } = self.message;
        if !over_udp {
            self.until("the devices share no memory", || {
                self.a.qp.carrier() == Some(Carrier::SharedMemory)
            })?;
        }
        let is_direct = matches!(kind, Kind::Write | Kind::Read) && !over_udp;
        let message = Message {
            kind: if kind == Kind::Poll { Kind::Send } else { kind },
            is_signaled: true,
            ..self.message
        };
        let mut in_turn = 0;
        for _ in 0..MESSAGES_MAX {
            let before = self.a.device.counters().direct_requests;
            self.send(message, &Meter(""))?;
            let went_directly = self.a.device.counters().direct_requests > before;
            in_turn = if went_directly == is_direct {
                in_turn + 1
            } else {
                0
            };
            if in_turn == WARM_UP {
                return Ok(());
            }
        }
        Err("the peer grants no access to its memory".into())
    }

    fn until(&self, otherwise: &str, holds: impl Fn() -> bool) -> Outcome<()> {
        for _ in 0..POLLS_MAX {
            if holds() {
                return Ok(());
            }
            thread::yield_now();
        }
        Err(otherwise.into())
    }
}

/// Returns the next completion, which must be a success; `meanwhile` lets the other side work.
fn next(cq: &CompletionQueue, meanwhile: impl Fn()) -> Outcome<()> {
    for _ in 0..POLLS_MAX {
        if let Some(completion) = cq.poll() {
            black_box(completion);
            return Ok(());
        }
        meanwhile();
    }
    Err("a completion is missing".into())
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, message, step, count] = &arguments[..] else {
        // `cargo bench` runs each bench without such arguments.
        println!("cargo xtask instructions runs this under valgrind");
        return Ok(());
    };
    let message = Message::named(message).ok_or("no such message")?;
    let count: u32 = count.parse()?;
    rdmux_soft::register();
    let pair = Pair::connect(address.parse()?, message)?;
    pair.warm_up()?;
    let meter = Meter(step);
    for _ in 0..count {
        pair.send(pair.message, &meter)?;
    }
    Ok(())
}
