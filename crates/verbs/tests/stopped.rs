//! A peer that is stopped while it writes to this process's memory without packets, as by a debugger, a freezer or Ctrl-Z: what the
//! program gets back by deregistration is its own, and others are served meanwhile.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rdmux_verbs::*;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const AREA_BYTES: u64 = 8 << 20;
const LONG: Duration = Duration::from_secs(60);
const PORT: u16 = 7174;

/// Of [`writer`], in its environment.
const PEER: &str = "RDMUX_STOPPED_PEER";

fn end(device: &Device) -> (ProtectionDomain, CompletionQueue, QueuePair) {
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(256).unwrap();
    let mut options = QpOptions::new(&cq);
    options.max_send_wr = 64;
    let qp = pd.create_qp(&options).unwrap();
    (pd, cq, qp)
}

/// The process that is stopped: writes all of its peer's memory over and over, until that is refused.
#[test]
fn writer() {
    let Ok(peer) = std::env::var(PEER) else { return };
    let peer: IpAddr = peer.parse().unwrap();
    let own: IpAddr = match peer {
        IpAddr::V4(v4) => (u32::from(v4) + 1).to_be_bytes().into(),
        IpAddr::V6(_) => panic!("an IPv4 address"),
    };
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
    while device.counters().direct_requests == 0 {
        assert!(write());
    }
    println!("@ writing");
    while write() {}
}

/// A running [`writer`].
struct Writer {
    child: Child,
    _output: BufReader<ChildStdout>,
}

impl Writer {
    fn of(child: Child) -> Writer {
        let mut child = child;
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("@ writing") {
            line.clear();
            assert!(output.read_line(&mut line).unwrap() > 0, "the writer ended");
        }
        Writer {
            child,
            _output: output,
        }
    }

    fn start(peer: IpAddr) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "writer", "--nocapture"])
            .env(PEER, peer.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stopped when this returns.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let status = waitpid(Some(Pid::from_child(&self.child)), WaitOptions::UNTRACED).unwrap();
        assert!(status.unwrap().1.stopped());
    }

    /// Goes on, and has ended when this returns.
    fn go_on_to_the_end(mut self) {
        self.signal(Signal::CONT);
        self.child.wait().unwrap();
    }
}

impl Drop for Writer {
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
    writer: Writer,
}

fn written(device: &Device, listener: &Listener, memory: AnonymousMemory) -> Written {
    let (pd, _, qp) = end(device);
    let memory = Arc::new(memory);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mr = pd.reg_mr_all(memory.clone(), memory.address(), access).unwrap();
    let child = Writer::start(device.address());
    let request = listener.accept(LONG).unwrap();
    let mut said = mr.rkey().0.to_be_bytes().to_vec();
    said.extend(memory.address().to_be_bytes());
    let params = ConnectParams {
        access: Access::REMOTE_WRITE,
        ..ConnectParams::default()
    };
    let connection = request.accept(&qp, &params, &said).unwrap();
    assert!(connection.wait_established());
    Written {
        memory,
        mr,
        qp,
        connection,
        writer: Writer::of(child),
    }
}

/// Memory that peers reach by calls into this process: however long the peer is stopped, deregistration returns, and nothing lands
/// behind it.
#[test]
fn dereg_mr__of_a_peer_stopped_in_its_write() {
    let device = Device::open("127.0.77.1".parse().unwrap()).unwrap();
    let listener = device.listen(PORT).unwrap();
    for round in 0..15 {
        let memory = AnonymousMemory::new(AREA_BYTES as usize).unwrap();
        let written = written(&device, &listener, memory);
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
