//! The rings between an application and the node, as two processes on CPU 0 and CPU 1. `cargo bench -p rdmux-share --bench ring`; with the
//! name of one figure it prints that alone.
//!
//! The program starts itself as the node, which completes each request that it takes.

use std::error::Error;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rdmux_share::ring::{
    ApplicationEnd, Consumer, Files, Layout, NodeEnd, Producer, ReadyArea, ReadySet, RingArea, Tell,
    WorkBytes,
};
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_wire::LKey;
use rdmux_wire::node::{
    Completion, CompletionOpcode, CompletionStatus, DESCRIPTOR_BYTES, Element, QueueId, Work, WorkData,
    WorkFlags, WorkOperation,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::thread::{CpuSet, sched_setaffinity};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A figure that can be measured.
#[derive(Clone, Copy)]
struct Figure {
    name: &'static str,
    /// Requests that are on their way at most.
    window: u64,
    /// Requests that are published together.
    batch: u64,
    /// Bytes inline; a list of one element if 0.
    inline: u16,
    waits: Waits,
    /// CPU of the node.
    far_cpu: usize,
}

/// How both sides wait.
#[derive(Clone, Copy, PartialEq)]
enum Waits {
    Polling,
    Sleeping,
}

const POLLING: Figure = Figure {
    name: "",
    window: 1,
    batch: 1,
    inline: 0,
    waits: Waits::Polling,
    far_cpu: 1,
};

const FIGURES: [Figure; 8] = [
    Figure {
        name: "round-trip",
        ..POLLING
    },
    Figure {
        name: "stream-1",
        window: 128,
        ..POLLING
    },
    Figure {
        name: "stream-16",
        window: 128,
        batch: 16,
        ..POLLING
    },
    Figure {
        name: "stream-16-inline-32",
        window: 128,
        batch: 16,
        inline: 32,
        ..POLLING
    },
    Figure {
        name: "stream-16-inline-224",
        window: 32,
        batch: 16,
        inline: 224,
        ..POLLING
    },
    Figure {
        name: "round-trip-asleep",
        waits: Waits::Sleeping,
        ..POLLING
    },
    Figure {
        name: "round-trip-asleep-1-cpu",
        waits: Waits::Sleeping,
        far_cpu: 0,
        ..POLLING
    },
    Figure {
        name: "stream-16-asleep",
        window: 128,
        batch: 16,
        waits: Waits::Sleeping,
        ..POLLING
    },
];

/// Slots of both rings.
const SLOTS: u32 = 256;
/// Looks at a ring between two looks at the clock, or whether the other process is alive.
const LOOKS: u32 = 1 << 16;
const RUN: Duration = Duration::from_millis(500);
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let named = |name: &str| {
        FIGURES
            .into_iter()
            .find(|figure| figure.name == name)
            .ok_or("no such figure")
    };
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["far", name] => far(named(name)?),
        [name] if !name.starts_with('-') => {
            println!("{:.0}", measure(named(name)?)?);
            Ok(())
        }
        // cargo passes a flag of its own.
        _ => {
            scan()?;
            for figure in FIGURES {
                println!("{:26} {:9.0} ns", figure.name, measure(figure)?);
            }
            Ok(())
        }
    }
}

/// Prints the time of a look at the set of so many rings in which one is announced, with the announcement.
fn scan() -> Outcome<()> {
    for rings in [16, 1024, 10_000] {
        let layout = Layout::new(rings, 32, 1, 32)?;
        let (node, files) = NodeEnd::create(layout)?;
        let application = ApplicationEnd::attach(layout, files)?;
        let mut ready = node.ready();
        const ROUNDS: u32 = 100_000;
        let begin = Instant::now();
        for round in 0..ROUNDS {
            application.tell(round * 7 % rings, Tell::Ring);
            let mut found = 0;
            ready.take(|_| found += 1)?;
            assert_eq!(found, 1);
        }
        let ns = begin.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
        println!("{:26} {ns:9.0} ns", format!("ready-of-{rings}"));
    }
    Ok(())
}

fn layout() -> Outcome<Layout> {
    Ok(Layout::new(1, SLOTS, 1, SLOTS)?)
}

/// The application's side, which measures: time of a request from its submission to its completion, divided by the number of those
/// that are on their way together.
fn measure(figure: Figure) -> Outcome<f64> {
    pin(0)?;
    let (socket, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["far", figure.name]).stdin(Stdio::from(theirs));
    let _far = Far(command.spawn()?);
    poll(&mut [PollFd::new(&socket, PollFlags::IN)], None)?;
    let (_, fds) = receive_with_descriptors(&socket, &mut [0; 8])?;
    let files = Files::from_fds(fds.try_into().map_err(|_| "other descriptors")?);
    let end = ApplicationEnd::attach(layout()?, files)?;
    let mut requests = Requests {
        submissions: end.submission(0),
        completions: end.completion(0),
        ready: end.ready(),
        end,
        figure,
        submitted: 0,
        completed: 0,
    };
    requests.run_for(RUN / 10)?;
    let (begin, before) = (Instant::now(), requests.completed);
    requests.run_for(RUN)?;
    Ok(begin.elapsed().as_nanos() as f64 / (requests.completed - before) as f64)
}

struct Requests {
    end: ApplicationEnd,
    submissions: Producer<RingArea>,
    completions: Consumer<RingArea>,
    ready: ReadySet<ReadyArea>,
    figure: Figure,
    submitted: u64,
    completed: u64,
}

impl Requests {
    fn run_for(&mut self, duration: Duration) -> Outcome<()> {
        let begin = Instant::now();
        while begin.elapsed() < duration {
            for _ in 0..64 {
                self.submit()?;
                self.complete()?;
            }
        }
        Ok(())
    }

    /// Submits a batch if the window has room for it.
    fn submit(&mut self) -> Outcome<()> {
        let Figure {
            window,
            batch,
            inline,
            ..
        } = self.figure;
        if self.submitted + batch > self.completed + window {
            return Ok(());
        }
        for _ in 0..batch {
            let work = Work {
                queue: QueueId(1),
                wr_id: self.submitted,
                flags: WorkFlags::SIGNALED,
                operation: WorkOperation::Send { imm: None },
                data: match inline {
                    0 => WorkData::Elements(1),
                    inline => WorkData::Inline(inline),
                },
            };
            let element = Element {
                addr: self.submitted,
                lkey: LKey(1),
                length: 64,
            };
            self.submissions.push_work(&work, |work, bytes| match inline {
                0 => work.put_elements(bytes, &[element]),
                inline => work.put_inline(bytes, &[7; 1024][..inline.into()]),
            })?;
            self.submitted += 1;
        }
        let told = self.submissions.publish();
        self.end.tell(0, told);
        Ok(())
    }

    /// Takes completions, at least one when the window is full.
    fn complete(&mut self) -> Outcome<()> {
        let (mut looks, mut deadline) = (0u32, None);
        loop {
            let mut out = [[0; DESCRIPTOR_BYTES]; 16];
            let count = self.completions.take(&mut out)?;
            for completion in &out[..count] {
                let completion = Completion::parse(completion)?;
                assert_eq!(completion.wr_id, self.completed);
                self.completed += 1;
            }
            let told = self.completions.release();
            self.end.tell(1, told);
            let is_full = self.submitted + self.figure.batch > self.completed + self.figure.window;
            if count > 0 || !is_full {
                return Ok(());
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
                if Instant::now() > deadline {
                    return Err("the other process is silent".into());
                }
            }
            if self.figure.waits == Waits::Sleeping {
                if self.completions.prepare_sleep()? {
                    if self.ready.prepare_sleep() && !self.end.waiter().wait(PATIENCE)? {
                        return Err("the other process is silent".into());
                    }
                    self.ready.awake();
                    self.ready.take(|_| {})?;
                }
                self.completions.awake();
            }
        }
    }
}

/// The node's side, until it is ended.
fn far(figure: Figure) -> Outcome<()> {
    pin(figure.far_cpu)?;
    let (end, files) = NodeEnd::create(layout()?)?;
    send_bytes(std::io::stdin().as_fd(), b"rings", &files.as_fds())?;
    let (mut submissions, mut completions, mut ready) = (end.submission(0), end.completion(0), end.ready());
    let mut bytes = WorkBytes::new();
    let mut looks = 0u32;
    loop {
        let mut count = 0;
        while count < 16 && completions.has_room(1)? {
            let Some(work) = submissions.take_work(&mut bytes)? else {
                break;
            };
            let sum: u32 = work.elements(bytes.bytes()).map(|element| element.length).sum();
            let completion = Completion {
                queue: work.queue,
                wr_id: work.wr_id,
                status: CompletionStatus::Success,
                opcode: CompletionOpcode::Send,
                bytes: sum + work.inline(bytes.bytes()).len() as u32,
                imm: None,
                invalidated: None,
                source: None,
                is_solicited: false,
            };
            let mut descriptor = [0; DESCRIPTOR_BYTES];
            completion.emit(&mut descriptor);
            completions.push(&[descriptor])?;
            count += 1;
        }
        let told = submissions.release();
        end.tell(0, told);
        let told = completions.publish();
        end.tell(1, told);
        if count > 0 {
            looks = 0;
            continue;
        }
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(LOOKS) {
            let stdin = std::io::stdin();
            if poll(
                &mut [PollFd::new(&stdin, PollFlags::empty())],
                Some(&Timespec::default()),
            )? > 0
            {
                return Ok(());
            }
        }
        if figure.waits == Waits::Sleeping {
            if submissions.prepare_sleep()? {
                if ready.prepare_sleep() && !end.waiter().wait(PATIENCE)? {
                    return Ok(());
                }
                ready.awake();
                ready.take(|_| {})?;
            }
            submissions.awake();
        }
    }
}

/// The other process. It ends with the value.
struct Far(Child);

impl Drop for Far {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pin(cpu: usize) -> Outcome<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}
