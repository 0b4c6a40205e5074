//! A server of NVMe/RDMA, and two hosts for it: ours, and one on plain verbs, which may do what no host does.
#![allow(dead_code, reason = "not every test uses all of it")]

#[path = "../serve/mod.rs"]
mod serve;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_memory::AnonymousMemory;
use rdmux_nvmf::backend::{Backend, MemoryBackend};
use rdmux_nvmf::host::queue::{Command, Completion};
use rdmux_nvmf::host::{IoQueue, Options, Session, Transport};
use rdmux_nvmf::server::Handle;
use rdmux_nvmf::target::{Hosts, Listener, Subsystem, Target, Terms};
use rdmux_verbs::{
    Access as Rights, CompletionQueue, ConnectError, ConnectParams, Connection, Device, Memory, MemoryRegion,
    QpOptions, QueuePair, RKey, RecvRequest, SendRequest, Status as WorkStatus,
};
use rdmux_wire::nvme::{
    CONNECT_DATA_LEN, CQE_LEN, Cid, Configuration, Connect, ConnectData, Cqe, FabricsType, HostId, Nqn, NsId,
    Opcode, Property, Register, Rw, SQE_LEN, Sgl, Sqe, Status, TransportKind,
};
use rdmux_wire::nvme_rdma::Request;

use serve::{serve, serve_by};

/// No answer takes so long.
pub(crate) const LONG: Duration = Duration::from_secs(60);
pub(crate) const SUBSYSTEM: &str = "nqn.2014-08.org.example:server";
pub(crate) const PORT: u16 = 4420;
/// Commands that the host has outstanding at most, and their places in its memory.
pub(crate) const ENTRIES: usize = 32;
pub(crate) const ROOM: u64 = 1 << 20;
/// The host's memory: data of commands, behind them capsules, behind them responses.
pub(crate) const CAPSULES: u64 = ENTRIES as u64 * ROOM;
pub(crate) const CAPSULE_LEN: u64 = SQE_LEN as u64 + 4096;
pub(crate) const RESPONSES: u64 = CAPSULES + ENTRIES as u64 * CAPSULE_LEN;
pub(crate) const HOST_BYTES: u64 = RESPONSES + (ENTRIES * CQE_LEN) as u64;
/// Work requests that are receives of responses.
pub(crate) const RECEIVE: u64 = 1 << 32;

pub(crate) struct Running {
    pub(crate) subsystem: Arc<Subsystem>,
    pub(crate) address: SocketAddr,
    pub(crate) handle: Handle,
    pub(crate) thread: Option<JoinHandle<()>>,
}

/// Returns an address of loopback that no other test of this file uses.
pub(crate) fn address() -> std::net::IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    [127, 0, 31, NEXT.fetch_add(1, Ordering::Relaxed)].into()
}

pub(crate) fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

impl Running {
    pub(crate) fn start(reactors: usize, backend: Arc<dyn Backend>) -> Running {
        let listener = Listener {
            transport: TransportKind::Rdma,
            address: SocketAddr::new(address(), PORT),
        };
        Running::start_at(listener, reactors, backend)
    }

    pub(crate) fn start_at(listener: Listener, reactors: usize, backend: Arc<dyn Backend>) -> Running {
        Running::start_for(Hosts::any(Terms::default()), listener, reactors, backend)
    }

    fn start_for(hosts: Hosts, listener: Listener, reactors: usize, backend: Arc<dyn Backend>) -> Running {
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "serial", hosts);
        let (subsystem, address, handle, thread) = serve(subsystem, (backend, 1), listener, reactors);
        Running {
            subsystem,
            address,
            handle,
            thread: Some(thread),
        }
    }

    /// Serves by a target of one's own, with an offload engine or without.
    pub(crate) fn by(target: Target, backend: Arc<dyn Backend>, offload: bool) -> Running {
        let listener = Listener {
            transport: TransportKind::Rdma,
            address: SocketAddr::new(address(), PORT),
        };
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "serial", Hosts::any(Terms::default()));
        let (subsystem, address, handle, thread) =
            serve_by(target, subsystem, (backend, 1), listener, (2, offload));
        Running {
            subsystem,
            address,
            handle,
            thread: Some(thread),
        }
    }

    pub(crate) fn memory(reactors: usize) -> Running {
        Running::start(reactors, Arc::new(MemoryBackend::new(16 << 20).unwrap()))
    }

    /// Serves these hosts, and all others without limits, with one reactor.
    pub(crate) fn with_named(named: impl IntoIterator<Item = (Nqn, Terms)>) -> Running {
        let hosts = Hosts {
            named: named.into_iter().collect(),
            ..Hosts::any(Terms::default())
        };
        let listener = Listener {
            transport: TransportKind::Rdma,
            address: SocketAddr::new(address(), PORT),
        };
        let backend = Arc::new(MemoryBackend::new(16 << 20).unwrap());
        Running::start_for(hosts, listener, 1, backend)
    }

    /// Returns the settings of our host.
    fn options(&self, device: &Device) -> Options {
        Options {
            transport: Transport::Rdma,
            device: Some(device.clone()),
            ..Options::new(vec![self.address], nqn(SUBSYSTEM))
        }
    }

    /// Returns a session of our host with so many I/O queues.
    pub(crate) fn session(&self, device: &Device, queues: u16) -> Arc<Session> {
        Session::connect(self.options(device), queues).unwrap()
    }

    /// As [`Running::session`], of a host of another name.
    pub(crate) fn session_of(&self, host: Nqn, device: &Device, queues: u16) -> Arc<Session> {
        let options = Options {
            host,
            host_id: HostId([9; 16]),
            ..self.options(device)
        };
        Session::connect(options, queues).unwrap()
    }

    pub(crate) fn stop(&mut self) {
        self.handle.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, None | Some(Ok(()))));
    }

    /// Returns an admin queue whose controller is ready, and the controller's id.
    pub(crate) fn admin(&self, device: &Device) -> (Host, u16) {
        let mut host = Host::open(device, self.address, 0);
        let connected = host.connect(0, ConnectData::ANY_CONTROLLER, SUBSYSTEM, 0);
        assert_eq!(connected.status, Status::SUCCESS);
        host.enable();
        (host, connected.result as u16)
    }

    pub(crate) fn io(&self, device: &Device, cntlid: u16, qid: u16) -> Host {
        let deadline = Instant::now() + LONG;
        loop {
            let mut host = Host::open(device, self.address, qid);
            let status = host.connect(qid, cntlid, SUBSYSTEM, 0).status;
            if status.is_success() {
                return host;
            }
            // The target may not have noticed yet that the last queue of this id is over.
            assert_eq!(status, Status::COMMAND_SEQUENCE_ERROR.do_not_retry());
            assert!(Instant::now() < deadline, "queue {qid} is never free");
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Runs commands at once, which must succeed, and returns their completions in this order.
pub(crate) fn run_all(queue: &mut IoQueue, commands: impl IntoIterator<Item = Command>) -> Vec<Completion> {
    for (token, mut command) in (0..).zip(commands) {
        command.token = token;
        queue.submit(command);
    }
    let mut all = Vec::new();
    loop {
        all.extend(std::iter::from_fn(|| queue.poll()));
        if queue.in_flight() == 0 {
            break;
        }
        queue.wait().unwrap();
    }
    assert!(all.iter().all(|done| done.status.is_success()), "{all:?}");
    all.sort_by_key(|done| done.command.token);
    all
}

/// A host's side of a queue.
// The fields are in the order in which they must be dropped.
pub(crate) struct Host {
    pub(crate) connection: Connection,
    pub(crate) qp: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) mr: MemoryRegion,
    pub(crate) memory: Arc<AnonymousMemory>,
    /// Responses that came before their commands' results were asked for.
    pub(crate) done: HashMap<Cid, (Cqe, Option<RKey>)>,
}

pub(crate) fn device() -> Device {
    rdmux_soft::register();
    Device::open(address()).unwrap()
}

impl Host {
    pub(crate) fn open(device: &Device, to: SocketAddr, qid: u16) -> Host {
        let request = Request {
            qid,
            receives: ENTRIES as u16,
            sends: ENTRIES as u16 - 1,
            cntlid: 0,
        };
        Host::try_open(device, to, &request.emit(), &ConnectParams::default()).unwrap()
    }

    pub(crate) fn try_open(
        device: &Device,
        to: SocketAddr,
        private_data: &[u8],
        params: &ConnectParams,
    ) -> Result<Host, ConnectError> {
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(1024).unwrap();
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        let memory = Arc::new(AnonymousMemory::new(HOST_BYTES as usize).unwrap());
        let rights = Rights::LOCAL_WRITE | Rights::REMOTE_READ | Rights::REMOTE_WRITE;
        let mr = pd.reg_mr_all(memory.clone(), 0, rights).unwrap();
        qp.init().unwrap();
        for at in 0..ENTRIES as u64 {
            qp.post_recv(receive(&mr, at)).unwrap();
        }
        let connection = device.connect(&qp, to, params, private_data)?;
        Ok(Host {
            connection,
            qp,
            cq,
            mr,
            memory,
            done: HashMap::new(),
        })
    }

    /// The data of a command in the host's memory.
    pub(crate) fn room(cid: Cid) -> u64 {
        u64::from(cid.0) % ENTRIES as u64 * ROOM
    }

    pub(crate) fn keyed(&self, cid: Cid, length: u32) -> Sgl {
        Sgl::Keyed {
            address: Host::room(cid),
            length,
            rkey: self.mr.rkey(),
            invalidate: false,
        }
    }

    /// Sends a capsule.
    pub(crate) fn send(&self, sqe: &Sqe, data: &[u8]) {
        let at = CAPSULES + u64::from(sqe.cid().0) % ENTRIES as u64 * CAPSULE_LEN;
        self.memory.write(at, sqe.as_bytes()).unwrap();
        self.memory.write(at + SQE_LEN as u64, data).unwrap();
        let sge = self.mr.sge(at, (SQE_LEN + data.len()) as u32);
        self.qp
            .post_send(SendRequest::send(sge).wr_id(0).signaled())
            .unwrap();
    }

    /// Sends a command with data of the host's memory: those given, or room for so many.
    pub(crate) fn command(&self, mut sqe: Sqe, data: &[u8], room: u32) {
        let cid = sqe.cid();
        self.memory.write(Host::room(cid), data).unwrap();
        sqe.set_sgl(self.keyed(cid, room.max(data.len() as u32)));
        self.send(&sqe, &[]);
    }

    pub(crate) fn in_capsule(&self, mut sqe: Sqe, data: &[u8]) {
        sqe.set_sgl(Sgl::InCapsule {
            offset: 0,
            length: data.len() as u32,
        });
        self.send(&sqe, data);
    }

    /// Waits for the response to a command. An error is that of the first request that has failed.
    pub(crate) fn try_completion(&mut self, cid: Cid) -> Result<(Cqe, Option<RKey>), WorkStatus> {
        let deadline = Instant::now() + LONG;
        loop {
            if let Some(done) = self.done.remove(&cid) {
                return Ok(done);
            }
            assert!(Instant::now() < deadline, "no response to command {}", cid.0);
            let Some(wc) = self.cq.wait(Duration::from_millis(100)).unwrap() else {
                if self.connection.is_ended() {
                    return Err(WorkStatus::Flushed);
                }
                continue;
            };
            if wc.status != WorkStatus::Success {
                return Err(self.qp.error().unwrap_or(wc.status));
            }
            if wc.wr_id & RECEIVE == 0 {
                continue;
            }
            assert_eq!(wc.byte_len as usize, CQE_LEN);
            let at = wc.wr_id & (RECEIVE - 1);
            let mut bytes = [0; CQE_LEN];
            self.memory
                .read(RESPONSES + at * CQE_LEN as u64, &mut bytes)
                .unwrap();
            let cqe = Cqe::parse(&bytes).unwrap();
            self.done.insert(cqe.cid, (cqe, wc.invalidated));
            self.qp.post_recv(receive(&self.mr, at)).unwrap();
        }
    }

    pub(crate) fn completion(&mut self, cid: Cid) -> Cqe {
        self.try_completion(cid).unwrap().0
    }

    pub(crate) fn data(&self, cid: Cid, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.read(Host::room(cid), &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn run(&mut self, sqe: Sqe, data: &[u8], room: u32) -> (Cqe, Vec<u8>) {
        self.command(sqe, data, room);
        let cqe = self.completion(sqe.cid());
        (cqe, self.data(sqe.cid(), room as usize))
    }

    pub(crate) fn connect(&mut self, qid: u16, cntlid: u16, subsystem: &str, keep_alive_ms: u32) -> Cqe {
        let connect = Connect {
            record_format: 0,
            qid,
            sq_size: ENTRIES as u16 - 1,
            no_flow_control: false,
            keep_alive_ms,
        };
        let data = ConnectData {
            host_id: HostId([1; 16]),
            cntlid,
            subsystem: nqn(subsystem),
            host: nqn("nqn.2014-08.org.example:host"),
        };
        let mut bytes = vec![0; CONNECT_DATA_LEN];
        data.emit(&mut bytes);
        self.run(connect.command(Cid(0)), &bytes, 0).0
    }

    pub(crate) fn set_configuration(&mut self, configuration: u32) {
        let property = Property {
            register: Register::CONFIGURATION,
            is_wide: false,
            value: configuration.into(),
        };
        let set = property.command(FabricsType::PROPERTY_SET, Cid(1));
        assert_eq!(self.run(set, &[], 0).0.status, Status::SUCCESS);
    }

    pub(crate) fn enable(&mut self) {
        self.set_configuration(Configuration::enabled().0);
        let property = Property {
            register: Register::STATUS,
            is_wide: false,
            value: 0,
        };
        let get = property.command(FabricsType::PROPERTY_GET, Cid(1));
        while self.run(get, &[], 0).0.result & 1 == 0 {}
    }

    /// Waits until the target has ended the connection.
    pub(crate) fn ends(&mut self) {
        assert!(self.connection.wait_ended(LONG));
    }
}

pub(crate) fn receive(mr: &MemoryRegion, at: u64) -> RecvRequest {
    RecvRequest {
        wr_id: RECEIVE | at,
        sges: mr.sge(RESPONSES + at * CQE_LEN as u64, CQE_LEN as u32).into(),
    }
}

pub(crate) fn rw(opcode: Opcode, cid: u16, slba: u64, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, Cid(cid), NsId(1));
    Rw {
        slba,
        blocks,
        fua: false,
    }
    .emit(&mut sqe);
    sqe
}

pub(crate) fn is_written(io: &mut Host, slba: u64, block: &[u8; 4096]) -> bool {
    let (cqe, data) = io.run(rw(Opcode::READ, 9, slba, 1), &[], 4096);
    assert_eq!(cqe.status, Status::SUCCESS);
    data == block
}
