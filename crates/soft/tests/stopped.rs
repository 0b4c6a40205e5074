//! A peer that is stopped, as by a debugger, a freezer or Ctrl-Z. If it is stopped while it writes to this process's memory without
//! packets: memory that the program gets back by deregistration is its own, and others are served meanwhile. If it is stopped while
//! this process sends to it: nothing is taken for lost.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../skip.rs"]
mod skip;

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::*;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use skip::skip;

const AREA_BYTES: u64 = 8 << 20;
const LONG: Duration = Duration::from_secs(60);
const PORT: u16 = 7174;
/// Number of WRITEs of which one should have been granted its memory.
const WRITES_UNTIL_GRANTED: usize = 200;

/// Number of SENDs to a peer that is stopped.
const SENDS: u64 = 40;

/// Environment variable of [`writer`] and [`receiver`].
const PEER: &str = "RDMUX_STOPPED_PEER";

fn end(device: &Device) -> (ProtectionDomain, CompletionQueue, QueuePair) {
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(256).unwrap();
    let mut options = QpOptions::new(&cq);
    options.max_send_wr = 64;
    let qp = pd.create_qp(&options).unwrap();
    (pd, cq, qp)
}

/// Returns the addresses of the process that is stopped and of its peer; `None` in any other process.
fn addresses() -> Option<(IpAddr, IpAddr)> {
    let peer: IpAddr = std::env::var(PEER).ok()?.parse().unwrap();
    let own: IpAddr = match peer {
        IpAddr::V4(v4) => (u32::from(v4) + 1).to_be_bytes().into(),
        IpAddr::V6(_) => panic!("an IPv4 address"),
    };
    Some((own, peer))
}

/// Body of the process that is stopped: receives what its peer sends.
#[test]
fn receiver() {
    let Some((own, peer)) = addresses() else { return };
    rdmux_soft::register();
    let device = Device::open(own).unwrap();
    let (_pd, cq, qp) = end(&device);
    let params = ConnectParams::default();
    let connection = device
        .connect(&qp, SocketAddr::new(peer, PORT), &params, b"")
        .unwrap();
    for wr_id in 0..SENDS {
        let sges = SgeList::EMPTY;
        qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    println!("@ ready");
    for wr_id in 0..SENDS {
        let wc = cq.wait(LONG).unwrap().unwrap();
        assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Success));
    }
    // The process runs until it is killed.
    cq.wait(LONG).unwrap();
    drop(connection);
}

/// Body of the process that is stopped: writes all of its peer's memory over and over, until that is refused.
#[test]
fn writer() {
    let Some((own, peer)) = addresses() else { return };
    rdmux_soft::register();
    let device = Device::open(own).unwrap();
    let (pd, cq, qp) = end(&device);
    let params = ConnectParams::default();
    let connection = device
        .connect(&qp, SocketAddr::new(peer, PORT), &params, b"")
        .unwrap();
    let said = connection.private_data();
    let rkey = RKey(u32::from_be_bytes(said[..4].try_into().unwrap()));
    let va = u64::from_be_bytes(said[4..12].try_into().unwrap());
    let source = Arc::new(AnonymousMemory::new(AREA_BYTES as usize).unwrap());
    source.write(0, &vec![0x55; AREA_BYTES as usize]).unwrap();
    let mr = pd
        .reg_mr_all(source.clone(), source.address(), Access::LOCAL_WRITE)
        .unwrap();
    let write = || {
        qp.post_send(SendRequest {
            wr_id: 1,
            operation: Operation::Write { va, rkey, imm: None },
            sges: mr.sge(0, AREA_BYTES as u32).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })
        .is_ok_and(|()| {
            cq.wait(LONG)
                .unwrap()
                .is_some_and(|wc| wc.status == Status::Success)
        })
    };
    // The first WRITE asks for the grant, which is answered while others go by packets.
    for _ in 0..WRITES_UNTIL_GRANTED {
        assert!(write());
        if device.counters().direct_requests > 0 {
            break;
        }
    }
    if device.counters().direct_requests == 0 {
        return println!("@ refused");
    }
    println!("@ ready");
    while write() {}
}

/// A running [`writer`] or [`receiver`].
struct Peer {
    child: Child,
    _output: BufReader<ChildStdout>,
}

impl Peer {
    /// Returns the peer once it is ready; `None`: the system refuses it calls into this process.
    fn of(child: Child) -> Option<Peer> {
        let mut child = child;
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("@ ") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "the peer ended");
        }
        let peer = Peer {
            child,
            _output: output,
        };
        line.contains("@ ready").then_some(peer)
    }

    fn start(name: &str, peer: IpAddr) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(PEER, peer.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops the peer; it is stopped when this returns.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let status = waitpid(Some(Pid::from_child(&self.child)), WaitOptions::UNTRACED).unwrap();
        assert!(status.unwrap().1.stopped());
    }

    /// Lets the peer go on; it has ended when this returns.
    fn go_on_to_the_end(mut self) {
        self.signal(Signal::CONT);
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Memory that a writer writes to.
struct Written {
    memory: Arc<AnonymousMemory>,
    mr: MemoryRegion,
    qp: QueuePair,
    connection: Connection,
    writer: Peer,
}

fn written(device: &Device, listener: &Listener, memory: AnonymousMemory) -> Option<Written> {
    let (pd, _, qp) = end(device);
    let memory = Arc::new(memory);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mr = pd.reg_mr_all(memory.clone(), memory.address(), access).unwrap();
    let child = Peer::start("writer", device.address());
    let request = listener.accept(LONG).unwrap();
    let mut said = mr.rkey().0.to_be_bytes().to_vec();
    said.extend(memory.address().to_be_bytes());
    let params = ConnectParams {
        access: Access::REMOTE_WRITE,
        ..ConnectParams::default()
    };
    let connection = request.accept(&qp, &params, &said).unwrap();
    assert!(connection.wait_established());
    Some(Written {
        memory,
        mr,
        qp,
        connection,
        writer: Peer::of(child)?,
    })
}

/// Memory that peers reach by calls into this process: however long the peer is stopped, deregistration returns, and nothing is
/// written after it.
#[test]
fn dereg_mr__of_a_peer_stopped_in_its_write() {
    rdmux_soft::register();
    let device = Device::open("127.0.77.1".parse().unwrap()).unwrap();
    let listener = device.listen(PORT).unwrap();
    for round in 0..15 {
        let memory = AnonymousMemory::new(AREA_BYTES as usize).unwrap();
        let Some(written) = written(&device, &listener, memory) else {
            return skip("the system refuses a child calls into its parent");
        };
        assert_eq!(written.qp.carrier(), Some(Carrier::SharedMemory));
        written.writer.stop();
        drop(written.mr);
        let own = vec![0xaa; AREA_BYTES as usize];
        written.memory.write(0, &own).unwrap();
        written.writer.go_on_to_the_end();
        let mut found = vec![0; AREA_BYTES as usize];
        written.memory.read(0, &mut found).unwrap();
        assert!(found == own, "round {round}: written after deregistration");
        drop(written.connection);
    }
}

/// Checks that a peer that does not run does not count as lossy: nothing is sent to it again, and the queue pair still ends after
/// its retries.
#[test]
fn send__to_a_peer_that_is_stopped() {
    rdmux_soft::register();
    let device = Device::open("127.0.77.5".parse().unwrap()).unwrap();
    let listener = device.listen(PORT).unwrap();
    let (_pd, cq, qp) = end(&device);
    let child = Peer::start("receiver", device.address());
    let request = listener.accept(LONG).unwrap();
    let connection = request.accept(&qp, &ConnectParams::default(), b"").unwrap();
    assert!(connection.wait_established());
    let receiver = Peer::of(child).unwrap();
    assert_eq!(qp.carrier(), Some(Carrier::SharedMemory));
    let send = |wr_id| {
        let request = SendRequest {
            wr_id,
            operation: Operation::Send { imm: None },
            sges: SgeList::EMPTY,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        qp.post_send(request).unwrap();
    };
    // Counters that rise when packets are lost.
    let losses = || {
        let counters = device.counters();
        let timeouts = counters.local_ack_timeout_err;
        (timeouts, counters.retransmitted_packets, counters.tail_probes)
    };
    assert_eq!(losses(), (0, 0, 0));

    receiver.stop();
    (0..SENDS).for_each(send);
    let begin = Instant::now();
    while device.counters().local_stalls == 0 {
        assert!(begin.elapsed() < LONG);
        assert!(cq.wait(Duration::from_millis(10)).unwrap().is_none());
    }
    // This check comes before SIGCONT: requests are sent again to a peer that takes all, and loses its CPU before it answers.
    assert_eq!(losses(), (0, 0, 0));
    receiver.signal(Signal::CONT);
    for wr_id in 0..SENDS {
        let wc = cq.wait(LONG).unwrap().unwrap();
        assert_eq!((wc.wr_id, wc.status), (wr_id, Status::Success));
    }

    receiver.stop();
    let before = (losses(), device.counters().local_stalls);
    send(SENDS);
    let wc = cq.wait(LONG).unwrap().unwrap();
    assert_eq!((wc.wr_id, wc.status), (SENDS, Status::RetryExceeded));
    assert_eq!(losses(), before.0);
    assert!(device.counters().local_stalls > before.1);
    drop(connection);
}
