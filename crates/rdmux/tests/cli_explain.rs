//! `rdmux explain` and `rdmux trace`: the tests provoke each cause for real, in a process of its own, and check the explanation while that
//! process lives and after it was killed.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{AS_NOBODY, text};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::*;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde_json::Value;
use skip::skip;
use tempfile::TempDir;

const RDMUX: &str = env!("CARGO_BIN_EXE_rdmux");
const LONG: Duration = Duration::from_secs(60);
/// Variable with the scene that a process of this binary is to play.
const SCENE: &str = "RDMUX_EXPLAIN_SCENE";
/// Variable with the network of the scene, so that scenes do not meet.
const NET: &str = "RDMUX_EXPLAIN_NET";
const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::FLUSH_PERSISTENT);

// Scenes. Each prints the number of the queue pair to be explained, and stays until it is ended.

struct SceneEnd {
    device: Device,
    pd: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
    mr: MemoryRegion,
    memory: Arc<dyn Memory>,
}

impl SceneEnd {
    fn of_type(host: u8, qp_type: QpType) -> SceneEnd {
        let end = SceneEnd::new(host);
        let options = QpOptions {
            qp_type,
            ..QpOptions::new(&end.cq)
        };
        let qp = end.pd.create_qp(&options).unwrap();
        SceneEnd { qp, ..end }
    }

    fn with(
        host: u8,
        options: Options,
        cq_depth: u32,
        memory: Arc<dyn Memory>,
        iova: u64,
        access: Access,
    ) -> SceneEnd {
        let net: u8 = std::env::var(NET).unwrap().parse().unwrap();
        rdmux_soft::register();
        let device = Device::open_with(IpAddr::from([127, 0, net, host]), options).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(cq_depth).unwrap());
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let mr = pd.reg_mr_all(memory.clone(), iova, access).unwrap();
        SceneEnd {
            device,
            pd,
            cq,
            qp,
            mr,
            memory,
        }
    }

    /// Creates one more queue pair of the same device and protection domain.
    fn another(&self) -> SceneEnd {
        let memory = self.memory.clone();
        let mr = self.pd.reg_mr_all(memory.clone(), 0, server_access()).unwrap();
        SceneEnd {
            device: self.device.clone(),
            pd: self.pd.clone(),
            cq: self.cq.clone(),
            qp: self.pd.create_qp(&QpOptions::new(&self.cq)).unwrap(),
            mr,
            memory,
        }
    }

    fn new(host: u8) -> SceneEnd {
        SceneEnd::with_options(host, Options::default())
    }

    fn with_options(host: u8, options: Options) -> SceneEnd {
        let memory = Arc::new(AnonymousMemory::shareable(4096).unwrap());
        let iova = memory.address();
        let access = server_access();
        SceneEnd::with(host, options, 64, memory, iova, access)
    }

    fn post(&self, operation: Operation, sges: SgeList) {
        let request = SendRequest {
            wr_id: 77,
            operation,
            sges,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        self.qp.post_send(request).unwrap();
    }

    /// Waits for a completion with this status.
    fn ends(&self, status: Status) {
        loop {
            let found = self.cq.wait(LONG).unwrap().expect("a completion").status;
            if found == status {
                return;
            }
        }
    }

    /// Waits until the queue pair is in error.
    fn is_broken(&self) {
        let deadline = Instant::now() + LONG;
        while self.qp.query().unwrap().state != QpState::Error {
            assert!(Instant::now() < deadline, "{:?}", self.qp.query());
            thread::yield_now();
        }
    }
}

/// Connects two ends, both with the same parameters.
fn connect(client: &SceneEnd, server: &SceneEnd, params: &ConnectParams) -> [Connection; 2] {
    let listener = server.device.listen_for(7174, &[QpType::Rc, QpType::Uc]).unwrap();
    thread::scope(|scope| {
        let accepting = scope.spawn(|| {
            let request = listener.accept(LONG).expect("a request");
            let connection = request.accept(&server.qp, params, b"").unwrap();
            assert!(connection.wait_established());
            connection
        });
        let peer = SocketAddr::new(server.device.address(), 7174);
        let connection = client.device.connect(&client.qp, peer, params, b"").unwrap();
        [connection, accepting.join().unwrap()]
    })
}

/// Takes an end to RTS, as programs do that exchange their numbers themselves.
fn connect_by_hand(end: &SceneEnd, peer: &SceneEnd, path_mtu: u32) {
    let init = QpAttributes {
        access: Some(server_access()),
        ..QpAttributes::default()
    };
    let rtr = QpAttributes {
        path: Some(Path {
            src: end.device.address(),
            dst: peer.device.address(),
            src_port: end.device.source_port(end.qp.qpn()).unwrap(),
            traffic_class: 0,
        }),
        path_mtu: Some(path_mtu),
        dest_qpn: Some(peer.qp.qpn()),
        rq_psn: Some(Psn::new(0)),
        max_dest_rd_atomic: Some(1),
        min_rnr_timer: Some(1),
        ..QpAttributes::default()
    };
    let rts = QpAttributes {
        sq_psn: Some(Psn::new(0)),
        timeout: Some(14),
        retry_count: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(1),
        ..QpAttributes::default()
    };
    for (to, attributes) in [(QpState::Init, init), (QpState::Rtr, rtr), (QpState::Rts, rts)] {
        end.qp.modify(to, &attributes).unwrap();
    }
}

/// Returns two ends, connected over shared memory or UDP as it happens.
fn pair() -> (SceneEnd, SceneEnd, [Connection; 2]) {
    let (client, server) = (SceneEnd::new(1), SceneEnd::new(2));
    let connections = connect(&client, &server, &ConnectParams::default());
    (client, server, connections)
}

/// Prints the number of the queue pair, and stays.
fn tell(end: &SceneEnd) {
    println!("explain {}", end.qp.qpn().value());
    std::io::stdout().flush().unwrap();
    // Standard input ends with the test, if not before.
    let _ = std::io::stdin().read_line(&mut String::new());
    std::process::exit(0);
}

fn server_access() -> Access {
    ALL.difference(Access::FLUSH_PERSISTENT)
}

fn write(va: u64, rkey: RKey) -> Operation {
    Operation::Write { va, rkey, imm: None }
}

/// Memory whose flush fails as on a failing disk.
#[derive(Debug)]
struct BadDisk {
    takes_writes: bool,
}

impl Memory for BadDisk {
    fn len(&self) -> u64 {
        4096
    }
    fn read(&self, _: u64, out: &mut [u8]) -> Result<(), Fault> {
        out.fill(0);
        Ok(())
    }
    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        if self.takes_writes {
            Ok(())
        } else {
            Err(Fault::NoSpace)
        }
    }
    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }
    fn placement(&self) -> Placement {
        Placement::GLOBAL | Placement::PERSISTENT
    }
    fn flush_is_immediate(&self, _: Placement) -> bool {
        false
    }
    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Err(Fault::Io(5))
    }
}

fn play(scene: &str) {
    let no_memory = Options {
        shared_memory: SharedMemory::Off,
        ..Options::default()
    };
    match scene {
        "healthy" => {
            let (client, server, _held) = pair();
            client.post(write(server.mr.iova(), server.mr.rkey()), SgeList::inline(b"x"));
            client.ends(Status::Success);
            tell(&client);
        }
        "remote-access" | "peer-access" => {
            let (client, server, _held) = pair();
            let beyond = server.mr.iova() + 4090;
            client.post(write(beyond, server.mr.rkey()), SgeList::inline(b"0123456789"));
            client.ends(Status::RemoteAccess);
            server.is_broken();
            tell(if scene == "peer-access" { &server } else { &client });
        }
        "no-key" => {
            let (client, server, _held) = pair();
            client.post(
                write(4096, RKey(server.mr.rkey().0 ^ 1 << 20)),
                SgeList::inline(b"x"),
            );
            client.ends(Status::RemoteAccess);
            server.is_broken();
            tell(&server);
        }
        "no-right" => {
            let (client, server, _held) = pair();
            let memory = Arc::new(AnonymousMemory::new(4096).unwrap());
            let read_only = server
                .pd
                .reg_mr_all(memory.clone(), memory.address(), Access::REMOTE_READ)
                .unwrap();
            client.post(write(read_only.iova(), read_only.rkey()), SgeList::inline(b"x"));
            client.ends(Status::RemoteAccess);
            server.is_broken();
            tell(&server);
        }
        "local-length" => {
            let (client, server, _held) = pair();
            // The message is longer than the receive that it finds.
            let sges = server.mr.sge(0, 4).into();
            server.qp.post_recv(RecvRequest { wr_id: 1, sges }).unwrap();
            client.post(Operation::Send { imm: None }, SgeList::inline(b"longer than 4"));
            client.ends(Status::RemoteInvalidRequest);
            server.is_broken();
            tell(&server);
        }
        "other-domain" => {
            let (client, server, _held) = pair();
            let memory = Arc::new(AnonymousMemory::new(4096).unwrap());
            let elsewhere = server.device.alloc_pd().unwrap();
            let region = elsewhere
                .reg_mr_all(memory.clone(), memory.address(), server_access())
                .unwrap();
            client.post(write(region.iova(), region.rkey()), SgeList::inline(b"x"));
            client.ends(Status::RemoteAccess);
            server.is_broken();
            tell(&server);
        }
        "no-right-on-qp" | "remote-invalid-request" => {
            let (client, server) = (SceneEnd::new(1), SceneEnd::new(2));
            let listener = server.device.listen(7174).unwrap();
            let peer = SocketAddr::new(server.device.address(), 7174);
            let _held = thread::scope(|scope| {
                let accepting = scope.spawn(|| {
                    let params = ConnectParams {
                        access: Access::REMOTE_READ,
                        ..ConnectParams::default()
                    };
                    let request = listener.accept(LONG).expect("a request");
                    request.accept(&server.qp, &params, b"").unwrap()
                });
                let asking = client
                    .device
                    .connect(&client.qp, peer, &ConnectParams::default(), b"");
                [asking.unwrap(), accepting.join().unwrap()]
            });
            client.post(write(server.mr.iova(), server.mr.rkey()), SgeList::inline(b"x"));
            client.ends(Status::RemoteInvalidRequest);
            server.is_broken();
            tell(if scene == "no-right-on-qp" {
                &server
            } else {
                &client
            });
        }
        "memory-failed" | "remote-operation" => {
            let client = SceneEnd::new(1);
            let full = Arc::new(BadDisk { takes_writes: false });
            let server = SceneEnd::with(2, Options::default(), 64, full, 4096, ALL);
            let _held = connect(&client, &server, &ConnectParams::default());
            client.post(write(server.mr.iova(), server.mr.rkey()), SgeList::inline(b"x"));
            client.ends(Status::RemoteOperation);
            server.is_broken();
            tell(if scene == "memory-failed" {
                &server
            } else {
                &client
            });
        }
        "receive-failed" => {
            let (client, server, _held) = pair();
            let wrong = Sge::new(server.mr.iova(), 64, LKey(server.mr.lkey().0 ^ 1 << 20));
            let receive = RecvRequest {
                wr_id: 1,
                sges: wrong.into(),
            };
            server.qp.post_recv(receive).unwrap();
            client.post(Operation::Send { imm: None }, SgeList::inline(b"x"));
            client.ends(Status::RemoteOperation);
            server.is_broken();
            tell(&server);
        }
        "memory-bind" => {
            let (client, _server, _held) = pair();
            let window = client.pd.alloc_mw(WindowType::Two).unwrap();
            let bind = Bind {
                window: window.rkey().next(),
                region: client.mr.lkey(),
                va: client.mr.iova(),
                length: 16,
                access: Access::REMOTE_WRITE,
            };
            client.post(Operation::Bind(bind), SgeList::EMPTY);
            client.ends(Status::MemoryBind);
            tell(&client);
        }
        "bad-response" => {
            // The ends do not agree on the path MTU: the server answers in longer packets than the client expects.
            let (client, server) = (
                SceneEnd::with_options(1, no_memory),
                SceneEnd::with_options(2, no_memory),
            );
            connect_by_hand(&client, &server, 1024);
            connect_by_hand(&server, &client, 4096);
            let read = Operation::Read {
                va: server.mr.iova(),
                rkey: server.mr.rkey(),
            };
            client.post(read, client.mr.sge(0, 2000).into());
            client.ends(Status::BadResponse);
            tell(&client);
        }
        "retrying" => {
            let (client, server) = (
                SceneEnd::with_options(1, no_memory),
                SceneEnd::with_options(2, no_memory),
            );
            // It takes some minutes to fail.
            let params = ConnectParams {
                ack_timeout: Some(17),
                retry_count: 7,
                ..ConnectParams::default()
            };
            let _held = connect(&client, &server, &params);
            server
                .qp
                .modify(QpState::Reset, &QpAttributes::default())
                .unwrap();
            client.post(write(server.mr.iova(), server.mr.rkey()), SgeList::inline(b"x"));
            while client.device.counters().local_ack_timeout_err == 0 {
                thread::yield_now();
            }
            tell(&client);
        }
        "other-window" => {
            // A queue pair binds the window, for its own peer alone.
            let (_client, server, _held) = pair();
            let (stranger, second) = (SceneEnd::new(3), server.another());
            let _connected = connect(&stranger, &second, &ConnectParams::default());
            let region = server
                .pd
                .reg_mr_all(server.memory.clone(), 4096, server_access() | Access::MW_BIND)
                .unwrap();
            let window = server.pd.alloc_mw(WindowType::Two).unwrap();
            let bind = Bind {
                window: window.rkey().next(),
                region: region.lkey(),
                va: region.iova(),
                length: 16,
                access: Access::REMOTE_WRITE,
            };
            server.post(Operation::Bind(bind), SgeList::EMPTY);
            server.ends(Status::Success);
            stranger.post(write(bind.va, bind.window), SgeList::inline(b"x"));
            stranger.ends(Status::RemoteAccess);
            second.is_broken();
            tell(&second);
        }
        "local-operation" => {
            let (client, _server, _held) = pair();
            let rkey = client.mr.rkey();
            client.post(Operation::LocalInvalidate { rkey }, SgeList::EMPTY);
            client.ends(Status::LocalQpOperation);
            tell(&client);
        }
        "send-queue" => {
            // A UC queue pair keeps receiving.
            let (client, server) = (SceneEnd::of_type(1, QpType::Uc), SceneEnd::of_type(2, QpType::Uc));
            let _held = connect(&client, &server, &ConnectParams::default());
            let wrong = Sge::new(client.mr.iova(), 64, LKey(client.mr.lkey().0 ^ 1 << 20));
            client.post(write(server.mr.iova(), server.mr.rkey()), wrong.into());
            client.ends(Status::LocalProtection);
            tell(&client);
        }
        "rnr-wait" => {
            let (client, _server, _held) = pair();
            client.post(
                Operation::Send { imm: None },
                SgeList::inline(b"it waits without end"),
            );
            while client.device.counters().rcvd_rnr_err == 0 {
                thread::yield_now();
            }
            tell(&client);
        }
        "not-ready" => tell(&SceneEnd::new(1)),
        "reset" => {
            let (client, _server, _held) = pair();
            client
                .qp
                .modify(QpState::Reset, &QpAttributes::default())
                .unwrap();
            tell(&client);
        }
        "destroyed" => {
            let (client, server, _held) = pair();
            client.post(write(1, server.mr.rkey()), SgeList::inline(b"x"));
            client.ends(Status::RemoteAccess);
            // As the drop-in library destroys a queue pair.
            client.qp.retire();
            tell(&client);
        }
        "fault-here" | "fault-there" => {
            let lossy = Options {
                faults: Some("loss=100%".parse().unwrap()),
                ..no_memory
            };
            let (here, there) = match scene {
                "fault-here" => (lossy, no_memory),
                _ => (no_memory, lossy),
            };
            let (client, server) = (SceneEnd::with_options(1, here), SceneEnd::with_options(2, there));
            connect_by_hand(&client, &server, 1024);
            connect_by_hand(&server, &client, 1024);
            client.post(write(server.mr.iova(), server.mr.rkey()), SgeList::inline(b"x"));
            client.ends(Status::RetryExceeded);
            tell(&client);
        }
        "rejected" | "unreachable" => {
            let client = SceneEnd::new(1);
            let net: u8 = std::env::var(NET).unwrap().parse().unwrap();
            let host = if scene == "rejected" { 1 } else { 9 };
            let at = SocketAddr::new(IpAddr::from([127, 0, net, host]), 7174);
            assert!(
                client
                    .device
                    .connect(&client.qp, at, &ConnectParams::default(), b"")
                    .is_err()
            );
            tell(&client);
        }
        "local-protection" => {
            let (client, server, _held) = pair();
            let wrong = Sge::new(client.mr.iova(), 64, LKey(client.mr.lkey().0 ^ 1 << 20));
            client.post(write(server.mr.iova(), server.mr.rkey()), wrong.into());
            client.ends(Status::LocalProtection);
            tell(&client);
        }
        "retry-exceeded" | "retry-silent" => {
            let (client, server) = (
                SceneEnd::with_options(1, no_memory),
                SceneEnd::with_options(2, no_memory),
            );
            let params = ConnectParams {
                retry_count: 3,
                ..ConnectParams::default()
            };
            let _held = connect(&client, &server, &params);
            let to = write(server.mr.iova(), server.mr.rkey());
            if scene == "retry-exceeded" {
                client.post(to.clone(), SgeList::inline(b"x"));
                client.ends(Status::Success);
            }
            // The server answers nothing after this.
            server
                .qp
                .modify(QpState::Reset, &QpAttributes::default())
                .unwrap();
            client.post(to, SgeList::inline(b"x"));
            client.ends(Status::RetryExceeded);
            tell(&client);
        }
        "rnr-retry-exceeded" => {
            let (client, server) = (SceneEnd::new(1), SceneEnd::new(2));
            let params = ConnectParams {
                rnr_retry: 1,
                ..ConnectParams::default()
            };
            let _held = connect(&client, &server, &params);
            client.post(
                Operation::Send { imm: None },
                SgeList::inline(b"nobody receives it"),
            );
            client.ends(Status::RnrRetryExceeded);
            tell(&client);
        }
        "flush-failed" | "remote-flush-failed" => {
            let client = SceneEnd::new(1);
            let disk = Arc::new(BadDisk { takes_writes: true });
            let server = SceneEnd::with(2, Options::default(), 64, disk, 4096, ALL);
            let _held = connect(&client, &server, &ConnectParams::default());
            let flush = Operation::Flush {
                va: server.mr.iova(),
                rkey: server.mr.rkey(),
                length: 64,
                placement: Placement::PERSISTENT,
                selectivity: Selectivity::Range,
            };
            client.post(flush, SgeList::EMPTY);
            client.ends(Status::RemoteOperation);
            server.is_broken();
            tell(if scene == "flush-failed" { &server } else { &client });
        }
        "cq-overrun" => {
            let memory = Arc::new(AnonymousMemory::shareable(4096).unwrap());
            let iova = memory.address();
            let access = server_access();
            let client = SceneEnd::with(1, Options::default(), 2, memory, iova, access);
            let server = SceneEnd::new(2);
            let _held = connect(&client, &server, &ConnectParams::default());
            for _ in 0..5 {
                client.post(write(server.mr.iova(), server.mr.rkey()), SgeList::inline(b"x"));
            }
            client.is_broken();
            tell(&client);
        }
        "injected" => {
            let faults = Some("qp-error=1".parse().unwrap());
            let (client, server) = (
                SceneEnd::new(1),
                SceneEnd::with_options(2, Options { faults, ..no_memory }),
            );
            let _held = connect(&client, &server, &ConnectParams::default());
            client.post(write(server.mr.iova(), server.mr.rkey()), SgeList::inline(b"x"));
            server.is_broken();
            tell(&server);
        }
        "disconnected" => {
            let (client, server, [asking, accepted]) = pair();
            accepted.disconnect();
            client.is_broken();
            drop((server, asking));
            tell(&client);
        }
        "own-move" => {
            let (client, _server, _held) = pair();
            client
                .qp
                .modify(QpState::Error, &QpAttributes::default())
                .unwrap();
            tell(&client);
        }
        "peer-gone" | "peer-stalled" => {
            // The peer is another process, which is killed or stopped.
            let client = SceneEnd::new(1);
            let mut peer = Running(start("peer", &std::env::var("XDG_RUNTIME_DIR").unwrap(), &[]));
            let mut lines = BufReader::new(peer.0.stdout.take().unwrap()).lines();
            while lines.next().unwrap().unwrap() != "listening" {}
            let net: u8 = std::env::var(NET).unwrap().parse().unwrap();
            let at = SocketAddr::new(IpAddr::from([127, 0, net, 2]), 7174);
            let _connection = client
                .device
                .connect(&client.qp, at, &ConnectParams::default(), b"")
                .unwrap();
            let deadline = Instant::now() + LONG;
            while client.qp.carrier() != Some(Carrier::SharedMemory) {
                assert!(Instant::now() < deadline);
                thread::yield_now();
            }
            if scene == "peer-stalled" {
                kill_process(Pid::from_child(&peer.0), Signal::STOP).unwrap();
                client.post(Operation::Send { imm: None }, SgeList::inline(b"x"));
                client.ends(Status::RetryExceeded);
            } else {
                drop(peer);
            }
            client.is_broken();
            tell(&client);
        }
        "peer" => {
            // The peer may be stopped when the scene's process is killed, and would stay behind.
            set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
            let server = SceneEnd::new(2);
            let listener = server.device.listen(7174).unwrap();
            println!("listening");
            let request = listener.accept(LONG).expect("a request");
            let _connection = request
                .accept(&server.qp, &ConnectParams::default(), b"")
                .unwrap();
            tell(&server);
        }
        other => panic!("no scene {other}"),
    }
}

/// Plays the scene that the environment names; does nothing in a run of the tests.
#[test]
fn scene() {
    if let Ok(scene) = std::env::var(SCENE) {
        play(&scene);
    }
}

// The other side.

/// A child that is killed when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(scene: &str, folder: &str, environment: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "scene", "--nocapture"])
        .env(SCENE, scene)
        .env("XDG_RUNTIME_DIR", folder)
        .env_remove("RDMUX_TRACE")
        .envs(environment.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    command.spawn().unwrap()
}

/// A scene, played up to the point where there is something to explain.
struct Played {
    folder: TempDir,
    child: Running,
    qpn: String,
}

impl Played {
    fn new(net: u8, scene: &str) -> Played {
        Played::with(net, scene, &[])
    }

    fn with(net: u8, scene: &str, environment: &[(&str, &str)]) -> Played {
        let folder = tempfile::tempdir().unwrap();
        let net = net.to_string();
        let environment = [&[(NET, net.as_str())], environment].concat();
        let mut child = Running(start(scene, folder.path().to_str().unwrap(), &environment));
        let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
        let qpn = loop {
            let line = lines.next().expect("it tells its queue pair").unwrap();
            if let Some(qpn) = line.split("explain ").nth(1) {
                break qpn.to_owned();
            }
        };
        Played { folder, child, qpn }
    }

    fn rdmux(&self, args: &[&str]) -> Output {
        let mut command = Command::new(RDMUX);
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", self.folder.path())
            .stdin(Stdio::null());
        command.output().unwrap()
    }

    fn say(&self, args: &[&str]) -> String {
        let output = self.rdmux(args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    }

    fn explained(&self) -> Value {
        let said = self.say(&["explain", "qp", &self.qpn, "--json"]);
        // A queue pair of a process that has ended may have had the same number.
        let mut list: Vec<Value> = serde_json::from_str(&said).unwrap();
        list.retain(|explained| explained["pid"] == self.child.0.id());
        assert_eq!(list.len(), 1, "{said}");
        list.remove(0)
    }

    fn kill(&mut self) {
        self.child.0.kill().unwrap();
        self.child.0.wait().unwrap();
    }
}

/// Plays a scene, and checks its cause and the words of its explanation, before and after its process is killed.
fn explains(net: u8, scene: &str, state: &str, cause: &str, words: &[&str]) -> Value {
    let mut played = Played::new(net, scene);
    let mut last = Value::Null;
    for alive in [true, false] {
        if !alive {
            played.kill();
        }
        let found = played.explained();
        assert_eq!(found["cause"], cause, "{found:#}");
        assert_eq!(found["state"], state, "{found:#}");
        assert_eq!(found["alive"], alive, "{found:#}");
        assert_eq!(found["lqpn"].to_string(), played.qpn);
        assert_eq!(found["pid"], played.child.0.id(), "{found:#}");
        // The queue pair is in RESET since it was made, which no note records.
        assert!(
            state == "RESET" || found["since"].as_str().is_some_and(|since| since.ends_with('Z')),
            "{found:#}"
        );
        let said = played.say(&["explain", "qp", &played.qpn]);
        let why = found["why"].as_str().unwrap();
        assert!(said.contains(why), "{said}");
        assert_eq!(said.contains("which has ended"), !alive, "{said}");
        for word in words {
            assert!(said.contains(word), "{word:?} is not in: {said}");
        }
        assert!(cause == "own-move" || said.contains("\nnext   "), "{said}");
        last = found;
    }
    last
}

#[test]
fn explain__remote_access_at_both_ends() {
    // The requester knows its request, and the peer's device knows why it was refused.
    let found = explains(
        40,
        "remote-access",
        "ERR",
        "remote-access",
        &[
            "remote access error",
            "WRITE of 10 bytes",
            "peer says",
            "lies outside the key's range",
            "(4096 bytes)",
        ],
    );
    assert_eq!(
        (&found["peer"], found["events"].as_array().map(Vec::is_empty)),
        (&"127.0.40.2".into(), Some(false))
    );
    explains(
        41,
        "peer-access",
        "ERR",
        "peer-access",
        &[
            "WRITE of 10 bytes",
            "rkey 0x",
            "lies outside the key's range",
            "(4096 bytes)",
        ],
    );
    explains(
        42,
        "no-key",
        "ERR",
        "peer-access",
        &["no memory region or window has that key"],
    );
    explains(
        43,
        "no-right",
        "ERR",
        "peer-access",
        &["does not grant remote-write, only remote-read"],
    );
    explains(
        44,
        "local-length",
        "ERR",
        "local-length",
        &[
            "local length error",
            "SEND of 13 bytes",
            "posted receive is shorter",
        ],
    );
}

#[test]
fn explain__local_protection() {
    explains(
        45,
        "local-protection",
        "ERR",
        "local-protection",
        &["WRITE of 64 bytes with local memory", "lkey 0x", "wr_id 77"],
    );
}

#[test]
fn explain__retries_that_got_no_answer() {
    explains(
        46,
        "retry-exceeded",
        "ERR",
        "retry-exceeded",
        &[
            "transport retry counter exceeded",
            "towards 127.0.46.2 qp",
            "no response to PSN",
            "after 6 retransmissions (retry_count 3 allows 6, two for each retry)",
            "last response to this queue pair",
        ],
    );
    explains(
        47,
        "retry-silent",
        "ERR",
        "retry-exceeded",
        &["no request of this queue pair ever got a response"],
    );
    explains(
        48,
        "rnr-retry-exceeded",
        "ERR",
        "rnr-retry-exceeded",
        &[
            "RNR retry counter exceeded",
            "the peer (127.0.48.2 qp",
            "had no receive posted for PSN",
            "post enough receives",
        ],
    );
}

#[test]
fn explain__losses_by_configured_faults() {
    for (net, scene) in [(84, "fault-here"), (85, "fault-there")] {
        let words = ["injected faults dropped", "lower loss=", "RDMUX_FAULT"];
        let found = explains(net, scene, "ERR", "retry-exceeded", &words);
        assert!(!found["next"].to_string().contains("firewall"), "{found:#}");
    }
}

#[test]
fn explain__flush_that_failed_at_both_ends() {
    explains(
        49,
        "flush-failed",
        "ERR",
        "flush-failed",
        &["a flush failed", "Input/output error", "os error 5"],
    );
    explains(
        50,
        "remote-flush-failed",
        "ERR",
        "remote-flush-failed",
        &[
            "FLUSH of 64 bytes",
            "not durable",
            "peer says: a flush failed: Input/output error",
        ],
    );
}

#[test]
fn explain__its_own_device() {
    explains(51, "cq-overrun", "ERR", "cq-overrun", &["overran", "deeper"]);
    explains(
        52,
        "injected",
        "ERR",
        "injected",
        &["an injected fault", "qp-error"],
    );
}

#[test]
fn explain__end_of_a_connection() {
    explains(
        53,
        "disconnected",
        "ERR",
        "disconnected",
        &["the peer disconnected (DREQ)"],
    );
    explains(
        54,
        "own-move",
        "ERR",
        "own-move",
        &["the local program moved the queue pair"],
    );
    explains(
        55,
        "peer-gone",
        "ERR",
        "peer-gone",
        &["the peer's process, on this host, ended"],
    );
    explains(
        83,
        "peer-stalled",
        "ERR",
        "peer-stalled",
        &[
            "transport retry counter exceeded",
            "no packet was lost",
            "did not receive the packets",
        ],
    );
}

#[test]
fn explain__what_the_peers_request_met() {
    let both = |net, own: (&str, &str, &[&str]), peer: (&str, &str, &[&str])| {
        explains(net, own.0, "ERR", own.1, own.2);
        explains(net + 1, peer.0, "ERR", peer.1, peer.2);
    };
    explains(
        63,
        "other-domain",
        "ERR",
        "peer-access",
        &["another protection domain"],
    );
    both(
        64,
        (
            "no-right-on-qp",
            "peer-invalid-request",
            &["does not allow remote-write, only remote-read"],
        ),
        (
            "remote-invalid-request",
            "remote-invalid-request",
            &["WRITE of 1 bytes", "peer says", "does not allow remote-write"],
        ),
    );
    both(
        66,
        (
            "memory-failed",
            "memory-failed",
            &["the memory of the key failed"],
        ),
        (
            "remote-operation",
            "remote-operation",
            &["failed to execute the WRITE of 1 bytes", "peer says"],
        ),
    );
    explains(
        68,
        "receive-failed",
        "ERR",
        "receive-failed",
        &["SEND of 1 bytes", "local protection error"],
    );
}

#[test]
fn explain__own_requests() {
    explains(
        69,
        "memory-bind",
        "ERR",
        "memory-bind",
        &["window binding", "MW_BIND"],
    );
    explains(
        70,
        "local-operation",
        "ERR",
        "local-operation",
        &["local invalidation"],
    );
    explains(
        71,
        "send-queue",
        "SQE",
        "local-protection",
        &["WRITE of 64 bytes with local memory"],
    );
}

#[test]
fn explain__answer_that_does_not_fit() {
    explains(
        77,
        "bad-response",
        "ERR",
        "bad-response",
        &["bad response error", "READ of 2000 bytes", "path MTU"],
    );
}

#[test]
fn explain__window_of_another_queue_pair() {
    explains(
        78,
        "other-window",
        "ERR",
        "peer-access",
        &[
            "WRITE of 1 bytes",
            "window",
            "the queue pair that bound the window",
        ],
    );
}

#[test]
fn explain__retries_that_go_on() {
    let mut played = Played::new(79, "retrying");
    let found = played.explained();
    assert_eq!(
        (&found["cause"], &found["state"]),
        (&"retrying".into(), &"RTS".into()),
        "{found:#}"
    );
    assert!(
        found["why"].as_str().unwrap().contains("no response after"),
        "{found:#}"
    );
    // A process that has ended does not retry.
    played.kill();
    assert_eq!(played.explained()["cause"], "process-ended");
}

#[test]
fn explain__process_with_another_runtime_folder() {
    let played = Played::new(80, "local-protection");
    let elsewhere = tempfile::tempdir().unwrap();
    let said = |args: &[&str]| {
        let mut command = Command::new(RDMUX);
        command.args(args).env("XDG_RUNTIME_DIR", elsewhere.path());
        let output = command.output().unwrap();
        text(&output.stdout) + &text(&output.stderr)
    };
    // The process reports the state; the output names the folder in which notes were looked for.
    let looked = format!("{}/rdmux", elsewhere.path().display());
    let live = said(&["explain", "qp", &played.qpn]);
    assert!(
        live.contains("ERR") && live.contains(&looked) && live.contains("XDG_RUNTIME_DIR"),
        "{live}"
    );
    let pid = played.child.0.id().to_string();
    for args in [&["trace", "dump", &pid][..], &["explain", "qp", "1048575"]] {
        let none = said(args);
        assert!(
            none.contains(&looked) && none.contains("XDG_RUNTIME_DIR"),
            "{none}"
        );
    }
}

#[test]
fn explain__connection_that_does_not_come_about() {
    explains(
        72,
        "rejected",
        "RESET",
        "rejected",
        &["nothing listens on that port"],
    );
    explains(
        73,
        "unreachable",
        "RESET",
        "unreachable",
        &["did not answer the connection request"],
    );
}

#[test]
fn explain__what_is_waited_for() {
    let waiting = Played::new(74, "rnr-wait").explained();
    assert_eq!(
        (&waiting["cause"], &waiting["state"]),
        (&"rnr-wait".into(), &"RTS".into()),
        "{waiting:#}"
    );
    let fresh = Played::new(75, "not-ready").explained();
    assert_eq!(
        (&fresh["cause"], &fresh["state"]),
        (&"not-ready".into(), &"RESET".into()),
        "{fresh:#}"
    );
}

#[test]
fn explain__state_is_reset_after_its_owner_reset_or_destroyed_it() {
    let mut played = Played::new(86, "reset");
    for cause in ["not-ready", "reset"] {
        let found = played.explained();
        assert_eq!(
            (&found["cause"], &found["state"]),
            (&cause.into(), &"RESET".into()),
            "{found:#}"
        );
        let since = found["since"].as_str().is_some_and(|since| since.ends_with('Z'));
        assert!(since || found["alive"] == true, "{found:#}");
        played.kill();
    }
    // The cause of an earlier error remains.
    let mut played = Played::new(87, "destroyed");
    played.kill();
    let found = played.explained();
    assert_eq!(
        (&found["cause"], &found["state"]),
        (&"remote-access".into(), &"RESET".into()),
        "{found:#}"
    );
}

#[test]
fn explain__nothing_is_wrong_until_its_process_ends() {
    let mut played = Played::new(56, "healthy");
    let found = played.explained();
    assert_eq!(
        (&found["cause"], &found["state"]),
        (&"none".into(), &"RTS".into()),
        "{found:#}"
    );
    played.kill();
    let found = played.explained();
    assert_eq!(
        (&found["cause"], &found["state"]),
        (&"process-ended".into(), &"RTS".into()),
        "{found:#}"
    );
}

#[test]
fn explain__without_notes() {
    let played = Played::with(57, "local-protection", &[("RDMUX_TRACE", "off")]);
    let found = played.explained();
    // The process reports that the queue pair is in error, but not why.
    assert_eq!(
        (&found["cause"], &found["state"]),
        (&"unknown".into(), &"ERR".into()),
        "{found:#}"
    );
    assert!(
        found["why"].as_str().unwrap().contains("RDMUX_TRACE=off"),
        "{found:#}"
    );
    assert_eq!(
        fs::read_dir(played.folder.path()).unwrap().count(),
        0,
        "nothing is left"
    );
}

#[test]
fn trace__dump_of_packets() {
    let played = Played::with(58, "healthy", &[("RDMUX_TRACE", "packets")]);
    let pid = played.child.0.id().to_string();
    let said = played.say(&["trace", "dump", &pid, "--json"]);
    let list: Vec<Value> = serde_json::from_str(&said).unwrap();
    assert_eq!(list.len(), 2, "two devices: {said}");
    for device in &list {
        assert_eq!(
            (&device["alive"], device["pid"].to_string()),
            (&true.into(), pid.clone())
        );
        let events = device["events"].as_array().unwrap();
        let times: Vec<u64> = events
            .iter()
            .map(|event| event["time_ns"].as_u64().unwrap())
            .collect();
        assert!(times.is_sorted(), "newest last");
        let now = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        let age = now.as_nanos() as u64 - times[0];
        assert!(age < 10 * LONG.as_nanos() as u64, "UTC");
        let named = |name: &str| events.iter().filter(|event| event["event"] == name).count();
        assert_eq!(named("moved"), 3, "INIT, RTR, RTS: {events:?}");
        assert_eq!(
            (named("peer"), named("established") + named("accepted")),
            (1, 1),
            "{events:?}"
        );
        assert!(named("packet") > 3, "{events:?}");
    }
    let device = format!("{}/{}", list[0]["ifname"].as_str().unwrap(), list[0]["port"]);
    let shown = played.say(&["trace", "dump", &device]);
    assert!(
        shown.starts_with(&format!("{device} of process {pid} (")),
        "{shown}"
    );
    assert!(shown.contains("RC RTR to RTS"), "{shown}");
    // Without packets, the trace has only the other events.
    let played = Played::new(59, "healthy");
    assert!(!played.say(&["trace", "dump", "--json"]).contains("\"packet\""));
}

#[test]
fn trace__dump_leaves_out_devices_without_events() {
    let played = Played::new(88, "not-ready");
    let pid = played.child.0.id().to_string();
    let all = played.say(&["trace", "dump"]);
    let process = format!("of process {pid} (");
    assert!(!all.contains(&process), "{all}");
    let asked = played.say(&["trace", "dump", &pid]);
    assert!(asked.contains(&process) && asked.contains("no events"), "{asked}");
}

#[test]
fn trace__folder_that_others_may_enter_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let rdmux = folder.path().join("rdmux");
    fs::create_dir(&rdmux).unwrap();
    fs::set_permissions(&rdmux, fs::Permissions::from_mode(0o755)).unwrap();
    let path = folder.path().to_str().unwrap();
    let mut child = Running(start("healthy", path, &[(NET, "60")]));
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    while !lines
        .next()
        .expect("it works without")
        .unwrap()
        .contains("explain ")
    {}
    assert_eq!(fs::read_dir(&rdmux).unwrap().count(), 0);
}

#[test]
fn trace__stays_its_users() {
    let nobody = AS_NOBODY;
    let as_nobody = |folder: &str, args: &[&str]| {
        let mut command = Command::new(nobody[0]);
        command
            .args(&nobody[1..])
            .arg(RDMUX)
            .args(args)
            .env("XDG_RUNTIME_DIR", folder);
        command.output().unwrap()
    };
    if !as_nobody("/tmp", &["--version"]).status.success() {
        return skip(format!(
            "this user may not be another one, or another user may not run {RDMUX}"
        ));
    }
    let played = Played::new(61, "local-protection");
    let folder = played.folder.path().to_str().unwrap();
    // They may not read it even if the way to it is open.
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let qpn = &played.qpn;
    for args in [
        &["trace", "dump"][..],
        &["trace", "dump", "127.0.61.1"],
        &["explain", "qp", qpn],
    ] {
        let output = as_nobody(folder, args);
        let said = text(&output.stdout);
        assert!(
            !said.contains("127.0.61.1") && !said.contains("LocalProtection"),
            "{args:?}: {said}"
        );
    }
    assert!(!as_nobody(folder, &["explain", "qp", qpn]).status.success());
    assert_eq!(played.explained()["cause"], "local-protection");
}

#[test]
fn explain__root_asks_about_anothers() {
    let own = std::env::current_exe().unwrap();
    let runner = AS_NOBODY;
    let mut command = Command::new(runner[0]);
    command
        .args(&runner[1..])
        .arg(&own)
        .args(["--exact", "scene", "--nocapture"])
        .envs([(SCENE, "local-protection"), (NET, "76")])
        .env_remove("XDG_RUNTIME_DIR")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    let is_possible = Command::new(runner[0])
        .args(&runner[1..])
        .arg(&own)
        .arg("--list")
        .output()
        .is_ok_and(|output| output.status.success());
    if !is_possible {
        return skip(format!(
            "this user may not be another one, or another user may not run {own:?}"
        ));
    }
    let mut child = Running(command.spawn().unwrap());
    let pid = child.0.id();
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let qpn = loop {
        let line = lines.next().expect("it tells its queue pair").unwrap();
        if let Some(qpn) = line.split("explain ").nth(1) {
            break qpn.to_owned();
        }
    };
    for alive in [true, false] {
        if !alive {
            child.0.kill().unwrap();
            child.0.wait().unwrap();
        }
        let output = Command::new(RDMUX)
            .args(["explain", "qp", &qpn, "--json"])
            .output()
            .unwrap();
        let said: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        let found = said
            .iter()
            .find(|found| found["pid"] == pid)
            .expect("it is shown");
        assert_eq!(
            (&found["cause"], &found["alive"]),
            (&"local-protection".into(), &alive.into())
        );
    }
    // If this test runs often, it leaves more traces than are kept.
    let folder = "/tmp/rdmux-65534";
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry
            .file_name()
            .to_string_lossy()
            .ends_with(&format!("-{pid}.trace"))
        {
            fs::remove_file(entry.path()).unwrap();
        }
    }
}

#[test]
fn usage__what_is_wrong_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(RDMUX);
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", folder.path())
            .output()
            .unwrap()
    };
    for args in [
        &["explain", "qp"][..],
        &["explain", "qp", "x"],
        &["explain", "cq", "3"],
        &["trace", "dump", "eth0"],
    ] {
        assert_eq!(run(args).status.code(), Some(2), "{args:?}");
    }
    for (args, expected) in [
        (&["explain", "qp", "17"][..], "rdmux res show qp"),
        (&["trace", "dump", "127.9.9.9/3"], "RDMUX_TRACE"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let said = text(&output.stderr);
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
    let misspelt = Command::new(RDMUX)
        .args(["perf", "read-lat", "--bind", "127.0.62.1"])
        .env("RDMUX_TRACE", "all")
        .output()
        .unwrap();
    let said = text(&misspelt.stderr);
    assert!(
        said.contains("RDMUX_TRACE=all: it takes off, events or packets"),
        "{said}"
    );
}
