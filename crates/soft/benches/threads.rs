//! WRITEs of 8 bytes to memory that a peer on this host granted: the rate of one thread, of several threads of a process with a queue pair
//! each, and of as many processes. `cargo bench -p rdmux-soft --bench threads`
//!
//! `threads post N [signaled]` posts N WRITEs from one thread, to count instructions: run it under callgrind with two numbers, and divide
//! the difference.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectParams, Connection, Device, MemoryRegion, Operation, QpOptions,
    QueuePair, RKey, SendFlags, SendRequest, Target,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const BYTES: usize = 4096;
const LONG: Duration = Duration::from_secs(600);
const TIME: Duration = Duration::from_secs(1);

/// A queue pair with a completion queue and a region of its own.
struct BenchEnd {
    cq: CompletionQueue,
    qp: QueuePair,
    mr: MemoryRegion,
}

impl BenchEnd {
    fn new(device: &Device) -> Result<BenchEnd> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(1024)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        let memory = Arc::new(AnonymousMemory::shareable(BYTES)?);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = pd.reg_mr_all(memory.clone(), memory.address(), access)?;
        Ok(BenchEnd { cq, qp, mr })
    }
}

/// Accepts connections, each to memory of its own, until the standard input ends.
fn serve() -> Result<()> {
    let device = Device::open("127.0.0.1".parse()?)?;
    // Several may run at a time.
    let port = (20_000..21_000).find_map(|port| Some((device.listen(port).ok()?, port)));
    let (listener, port) = port.ok_or("no port is free")?;
    println!("{port}");
    thread::spawn(move || {
        let mut held = Vec::new();
        while let Some(request) = listener.accept(LONG) {
            let end = BenchEnd::new(&device).expect("resources");
            let mut place = end.mr.iova().to_be_bytes().to_vec();
            place.extend(end.mr.rkey().0.to_be_bytes());
            let accepted = request.accept(&end.qp, &ConnectParams::default(), &place);
            held.push((end, accepted.expect("a connection")));
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The end that writes.
struct Writer {
    end: BenchEnd,
    request: SendRequest,
    _connection: Connection,
}

impl Writer {
    fn new(device: &Device, port: u16, signaled: bool) -> Result<Writer> {
        let end = BenchEnd::new(device)?;
        let peer = SocketAddr::new("127.0.0.1".parse()?, port);
        let connection = device.connect(&end.qp, peer, &ConnectParams::default(), &[])?;
        let place = connection.private_data().to_vec();
        let va = u64::from_be_bytes(place[..8].try_into()?);
        let rkey = RKey(u32::from_be_bytes(place[8..12].try_into()?));
        let request = SendRequest {
            wr_id: 1,
            operation: Operation::Write { va, rkey, imm: None },
            sges: end.mr.sge(0, 8).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        let mut writer = Writer {
            end,
            request,
            _connection: connection,
        };
        // By then the memory is granted.
        let direct = || device.counters().direct_requests;
        let (before, deadline) = (direct(), Instant::now() + LONG);
        while direct() < before + 2 {
            writer.write()?;
            if Instant::now() > deadline {
                return Err("the memory is not granted".into());
            }
        }
        if !signaled {
            writer.request.flags = SendFlags::empty();
        }
        Ok(writer)
    }

    #[inline]
    fn write(&self) -> Result<()> {
        self.end.qp.post_send(self.request.clone())?;
        if self.request.flags.contains(SendFlags::SIGNALED) {
            while self.end.cq.poll().is_none() {}
        }
        Ok(())
    }
}

/// Writes by so many threads for a while once the standard input has a line, and prints the rate in millions.
fn measure(port: u16, threads: usize, signaled: bool) -> Result<()> {
    let device = Device::open("127.0.0.1".parse()?)?;
    let (begin, stop, total) = (
        Barrier::new(threads + 1),
        AtomicBool::new(false),
        AtomicU64::new(0),
    );
    let writers = (0..threads).map(|_| Writer::new(&device, port, signaled));
    let writers: Vec<Writer> = writers.collect::<Result<_>>()?;
    let took = thread::scope(|scope| {
        for writer in &writers {
            let (begin, stop, total) = (&begin, &stop, &total);
            scope.spawn(move || {
                begin.wait();
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..64 {
                        writer.write().expect("a WRITE");
                    }
                    count += 64;
                }
                total.fetch_add(count, Ordering::Relaxed);
            });
        }
        println!("ready");
        let _ = std::io::stdin().read_line(&mut String::new());
        begin.wait();
        let began = Instant::now();
        thread::sleep(TIME);
        stop.store(true, Ordering::Relaxed);
        began.elapsed()
    });
    println!("{}", total.into_inner() as f64 / took.as_secs_f64() / 1e6);
    Ok(())
}

fn post(count: u64, signaled: bool) -> Result<()> {
    let server = Started::new(&["serve"])?;
    let device = Device::open("127.0.0.1".parse()?)?;
    let writer = Writer::new(&device, server.first.parse()?, signaled)?;
    for _ in 0..count {
        writer.write()?;
    }
    println!("{} WRITEs without packets", device.counters().direct_requests);
    Ok(())
}

/// This program in another process, and the first line that it printed.
struct Started {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<std::process::ChildStdout>,
    first: String,
}

impl Started {
    fn new(args: &[&str]) -> Result<Started> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take();
        let mut stdout = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut first = String::new();
        stdout.read_line(&mut first)?;
        Ok(Started {
            child,
            stdin,
            stdout,
            first: first.trim().into(),
        })
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.child.wait();
    }
}

/// Returns the rate of so many processes with so many threads each.
fn rate(port: &str, processes: usize, threads: usize, signaled: bool) -> Result<f64> {
    let mode = if signaled { "signaled" } else { "unsignaled" };
    let threads = threads.to_string();
    let start = |_| Started::new(&["measure", port, &threads, mode]);
    let mut started: Vec<Started> = (0..processes).map(start).collect::<Result<_>>()?;
    for process in &mut started {
        writeln!(process.stdin.as_mut().ok_or("no input")?)?;
    }
    let mut sum = 0.0;
    for process in &mut started {
        let mut line = String::new();
        process.stdout.read_line(&mut line)?;
        sum += line.trim().parse::<f64>()?;
    }
    Ok(sum)
}

fn main() -> Result<()> {
    rdmux_soft::register();
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve"] => return serve(),
        ["measure", port, threads, mode] => {
            return measure(port.parse()?, threads.parse()?, mode == "signaled");
        }
        ["post", count] => return post(count.parse()?, false),
        ["post", count, "signaled"] => return post(count.parse()?, true),
        _ => {}
    }
    let server = Started::new(&["serve"])?;
    let port = &server.first;
    for signaled in [false, true] {
        println!("{}", if signaled { "signaled" } else { "unsignaled" });
        for (name, processes, threads) in [("1 thread", 1, 1), ("2 threads", 1, 2), ("2 processes", 2, 1)] {
            let mut rates: Vec<f64> = (0..5)
                .map(|_| rate(port, processes, threads, signaled))
                .collect::<Result<_>>()?;
            rates.sort_unstable_by(f64::total_cmp);
            println!("  {name:<12} {:>6.2} million WRITEs/s", rates[rates.len() / 2]);
        }
    }
    Ok(())
}
