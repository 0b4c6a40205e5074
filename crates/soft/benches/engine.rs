//! Cost to the caller of each call for a message between two devices of one process: the engine without waiting for anybody. `cargo
//! bench -p rdmux-soft --bench engine`

use std::error::Error;
use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, Carrier, CompletionQueue, ConnectParams, Device, MemoryRegion, Operation, QpOptions, QueuePair,
    RecvRequest, SendFlags, SendRequest, Target,
};

const BYTES: usize = 4096;
const ROUNDS: u32 = 200_000;

struct BenchEnd {
    device: Device,
    cq: CompletionQueue,
    qp: QueuePair,
    mr: MemoryRegion,
}

fn end() -> Result<BenchEnd, Box<dyn Error>> {
    rdmux_soft::register();
    let device = Device::open("127.0.0.1".parse()?)?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(1024)?;
    let qp = pd.create_qp(&QpOptions::new(&cq))?;
    let memory = Arc::new(AnonymousMemory::shareable(BYTES)?);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let mr = pd.reg_mr_all(memory.clone(), memory.address(), access)?;
    Ok(BenchEnd { device, cq, qp, mr })
}

/// Prints the median time of a call, in ns.
fn time(name: &str, mut times: Vec<u32>) {
    times.sort_unstable();
    println!("{name:<24} {:>6} ns", times[times.len() / 2]);
}

fn main() -> Result<(), Box<dyn Error>> {
    let (a, b) = (end()?, end()?);
    let listener = b.device.listen(7174)?;
    let (connected, accepted) = thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.accept(Duration::from_secs(5)).expect("a request");
            request
                .accept(&b.qp, &ConnectParams::default(), &[])
                .expect("accepted")
        });
        let peer: SocketAddr = "127.0.0.1:7174".parse().expect("an address");
        let connected = a.device.connect(&a.qp, peer, &ConnectParams::default(), &[]);
        (connected, accepting.join().expect("no panic"))
    });
    let (_connected, _accepted) = (connected?, accepted);
    let send = |operation, flags| SendRequest {
        wr_id: 1,
        operation,
        sges: a.mr.sge(0, 8).into(),
        flags,
        to: Target::Connected,
    };
    let receive = || RecvRequest {
        wr_id: 2,
        sges: b.mr.sge(0, 64).into(),
    };
    for _ in 0..8 {
        b.qp.post_recv(receive())?;
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while a.qp.carrier() != Some(Carrier::SharedMemory) {
        if Instant::now() > deadline {
            return Err(format!("the devices share no memory: {:?}", a.qp.carrier()).into());
        }
        thread::yield_now();
    }
    let lap = |since: &mut Instant| {
        let now = Instant::now();
        let ns = now.duration_since(*since).as_nanos() as u32;
        *since = now;
        ns
    };
    let mut clock = Vec::new();
    let mut times: [Vec<u32>; 6] = Default::default();
    for _ in 0..ROUNDS {
        let mut at = Instant::now();
        clock.push(lap(&mut at));
        black_box(a.cq.poll());
        times[0].push(lap(&mut at));
        a.qp.post_send(send(Operation::Send { imm: None }, SendFlags::SIGNALED))?;
        times[1].push(lap(&mut at));
        let found = b.cq.poll().is_some();
        let took = lap(&mut at);
        if found {
            times[2].push(took);
        }
        let mut received = found;
        while !received {
            received = b.cq.poll().is_some();
        }
        let mut at = Instant::now();
        b.qp.post_recv(receive())?;
        times[3].push(lap(&mut at));
        black_box(b.cq.poll());
        times[4].push(lap(&mut at));
        let mut done = a.cq.poll().is_some();
        let took = lap(&mut at);
        if done {
            times[5].push(took);
        }
        while !done {
            done = a.cq.poll().is_some();
            if !done {
                black_box(b.cq.poll());
            }
        }
    }
    time("the clock itself", clock);
    let names = [
        "poll, nothing there",
        "post SEND 8 B",
        "poll, it is received",
        "post receive",
        "poll, acknowledges",
        "poll, it is complete",
    ];
    for (name, times) in names.into_iter().zip(times) {
        time(name, times);
    }
    let write = Operation::Write {
        va: b.mr.iova(),
        rkey: b.mr.rkey(),
        imm: None,
    };
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let mut at = Instant::now();
        a.qp.post_send(send(write.clone(), SendFlags::empty()))?;
        times.push(lap(&mut at));
        black_box(b.cq.poll());
        black_box(a.cq.poll());
    }
    time("post WRITE 8 B", times);
    println!("{} WRITEs directly", a.device.counters().direct_requests);
    Ok(())
}
