//! The server on sockets: a host that is a few lines of this file.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod serve;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rdmux_nvmf::backend::{Backend, FileBackend, MemoryBackend};
use rdmux_nvmf::server::Handle;
use rdmux_nvmf::target::{Hosts, Listener, Subsystem, Terms};
use rdmux_wire::nvme::{
    CONNECT_DATA_LEN, Cid, Configuration, Connect, ConnectData, Cqe, FabricsType, HostId, Nqn, NsId, Opcode,
    Property, Register, Rw, Sgl, Sqe, Status, TransportKind,
};
use rdmux_wire::nvme_tcp::{COMMON_LEN, Common, DataLayout, Digests, Flags, Header, Initialize};

use serve::serve;

/// No answer takes so long.
const LONG: Duration = Duration::from_secs(60);
const SUBSYSTEM: &str = "nqn.2014-08.org.example:server";

struct Running {
    address: SocketAddr,
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(reactors: usize, backend: Arc<dyn Backend>) -> Running {
        let subsystem = Subsystem::new(nqn(SUBSYSTEM), "serial", Hosts::any(Terms::default()));
        let listener = Listener {
            transport: TransportKind::Tcp,
            address: "127.0.0.1:0".parse().unwrap(),
        };
        let (_, address, handle, thread) = serve(subsystem, (backend, 1), listener, reactors);
        Running {
            address,
            handle,
            thread: Some(thread),
        }
    }

    fn memory(reactors: usize) -> Running {
        Running::start(reactors, Arc::new(MemoryBackend::new(16 << 20).unwrap()))
    }

    /// Returns an admin queue whose controller is ready, and the controller's id.
    fn admin(&self) -> (Host, u16) {
        let mut host = Host::new(self.address);
        let cntlid = host.connect(0, ConnectData::ANY_CONTROLLER).result as u16;
        let mut property = Property {
            register: Register::CONFIGURATION,
            is_wide: false,
            value: Configuration::enabled().0.into(),
        };
        assert!(
            host.run(property.command(FabricsType::PROPERTY_SET, Cid(1)), &[], 0)
                .0
                .status
                .is_success()
        );
        property.register = Register::STATUS;
        while host
            .run(property.command(FabricsType::PROPERTY_GET, Cid(1)), &[], 0)
            .0
            .result
            & 1
            == 0
        {}
        (host, cntlid)
    }

    fn io(&self, cntlid: u16, qid: u16) -> Host {
        let mut host = Host::new(self.address);
        assert_eq!(host.connect(qid, cntlid).status, Status::SUCCESS);
        host
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.handle.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || matches!(ended, Some(Ok(()))));
    }
}

struct Host {
    socket: TcpStream,
}

fn nqn(name: &str) -> Nqn {
    Nqn::new(name).unwrap()
}

impl Host {
    fn new(address: SocketAddr) -> Host {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        let mut host = Host { socket };
        let request = Initialize {
            alignment: 4,
            digests: Digests::empty(),
            limit: 1,
        };
        host.send(&Header::IcReq(request), &[]);
        assert!(matches!(host.receive(), Some((Header::IcResp(_), _))));
        host
    }

    fn send(&mut self, header: &Header, data: &[u8]) {
        let layout = DataLayout {
            len: data.len(),
            ..DataLayout::default()
        };
        let mut bytes = vec![0; 256];
        let common = header.emit(Flags::empty(), layout, &mut bytes);
        bytes.truncate(common.data_offset);
        bytes.extend_from_slice(data);
        self.socket.write_all(&bytes).unwrap();
    }

    /// Returns the next PDU and its data; `None` if the target has closed the connection.
    fn receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let mut bytes = vec![0; COMMON_LEN];
        self.socket.read_exact(&mut bytes).ok()?;
        let common = Common::parse(&bytes, Digests::empty()).unwrap();
        bytes.resize(common.pdu_len, 0);
        self.socket.read_exact(&mut bytes[COMMON_LEN..]).ok()?;
        let header = Header::parse(common.kind, &bytes).unwrap();
        Some((header, bytes[common.data_offset..].to_vec()))
    }

    fn command(&mut self, mut sqe: Sqe, data: &[u8], room: u32) {
        match data.len() {
            0 => sqe.set_sgl(Sgl::Transport { length: room }),
            length => sqe.set_sgl(Sgl::InCapsule {
                offset: 0,
                length: length as u32,
            }),
        }
        self.send(&Header::CapsuleCmd(sqe), data);
    }

    /// Returns the next completion, and the data before it.
    fn completion(&mut self) -> (Cqe, Vec<u8>) {
        let mut all = Vec::new();
        loop {
            match self.receive().expect("the connection stays") {
                (Header::C2hData(_), data) => all.extend_from_slice(&data),
                (Header::CapsuleResp(cqe), _) => return (cqe, all),
                other => panic!("{other:?}"),
            }
        }
    }

    fn run(&mut self, sqe: Sqe, data: &[u8], room: u32) -> (Cqe, Vec<u8>) {
        self.command(sqe, data, room);
        self.completion()
    }

    fn connect(&mut self, qid: u16, cntlid: u16) -> Cqe {
        self.connect_for(qid, cntlid, 0)
    }

    /// Connects with a time for which the host may be silent.
    fn connect_for(&mut self, qid: u16, cntlid: u16, keep_alive_ms: u32) -> Cqe {
        let connect = Connect {
            record_format: 0,
            qid,
            sq_size: 31,
            no_flow_control: false,
            keep_alive_ms,
        };
        let data = ConnectData {
            host_id: HostId([1; 16]),
            cntlid,
            subsystem: nqn(SUBSYSTEM),
            host: nqn("nqn.2014-08.org.example:host"),
        };
        let mut bytes = vec![0; CONNECT_DATA_LEN];
        data.emit(&mut bytes);
        self.run(connect.command(Cid(0)), &bytes, 0).0
    }

    /// Waits for the target to close the connection.
    fn ends(&mut self) -> Option<Header> {
        let mut last = None;
        while let Some((header, _)) = self.receive() {
            last = Some(header);
        }
        last
    }
}

fn rw(opcode: Opcode, cid: u16, slba: u64, blocks: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, Cid(cid), NsId(1));
    Rw {
        slba,
        blocks,
        fua: false,
    }
    .emit(&mut sqe);
    sqe
}

#[test]
fn queues__of_several_reactors_share_a_controller() {
    let server = Running::memory(2);
    let (admin, cntlid) = server.admin();
    let mut queues: Vec<_> = (1..=4).map(|qid| server.io(cntlid, qid)).collect();
    for (at, queue) in queues.iter_mut().enumerate() {
        let (cqe, _) = queue.run(rw(Opcode::WRITE, 1, at as u64, 1), &[at as u8 + 1; 4096], 0);
        assert_eq!(cqe.status, Status::SUCCESS);
    }
    for queue in &mut queues {
        let (cqe, data) = queue.run(rw(Opcode::READ, 2, 0, 4), &[], 16384);
        assert_eq!(cqe.status, Status::SUCCESS);
        assert!(
            data.chunks(4096)
                .zip(1..)
                .all(|(block, value)| block.iter().all(|byte| *byte == value))
        );
    }
    // The controller ends with its admin queue, wherever the others are.
    drop(admin);
    for queue in &mut queues {
        assert_eq!(queue.ends(), None);
    }
    let (_admin, _) = server.admin();
}

#[test]
fn file__has_what_was_written() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let server = Running::start(1, Arc::new(FileBackend::open(file.path(), false, 512).unwrap()));
    let (_admin, cntlid) = server.admin();
    let mut io = server.io(cntlid, 1);
    for cid in 0..16 {
        io.command(rw(Opcode::WRITE, cid, cid.into(), 1), &[cid as u8; 4096], 0);
    }
    let mut done: Vec<_> = (0..16).map(|_| io.completion().0).collect();
    done.sort_by_key(|cqe| cqe.cid);
    assert!(
        done.iter()
            .zip(0..)
            .all(|(cqe, cid)| cqe.cid == Cid(cid) && cqe.status.is_success())
    );
    assert!(
        io.run(Sqe::new(Opcode::FLUSH, Cid(99), NsId(1)), &[], 0)
            .0
            .status
            .is_success()
    );
    let bytes = std::fs::read(file.path()).unwrap();
    assert!(
        bytes
            .chunks(4096)
            .take(16)
            .zip(0..)
            .all(|(block, value)| block.iter().all(|byte| *byte == value))
    );
    let (cqe, data) = io.run(rw(Opcode::READ, 1, 5, 2), &[], 8192);
    assert!(cqe.status.is_success() && data[..4096] == [5; 4096] && data[4096..] == [6; 4096]);
}

#[test]
fn file__that_has_become_shorter_fails_what_it_lost() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let server = Running::start(1, Arc::new(FileBackend::open(file.path(), false, 4096).unwrap()));
    let (_admin, cntlid) = server.admin();
    let mut io = server.io(cntlid, 1);
    file.as_file().set_len(16 * 4096 + 512).unwrap();
    for (block, status) in [
        (15, Status::SUCCESS),
        (16, Status::READ_ERROR),
        (17, Status::READ_ERROR),
    ] {
        assert_eq!(io.run(rw(Opcode::READ, 1, block, 1), &[], 4096).0.status, status);
    }
}

#[test]
fn slow_reader__holds_up_nobody_and_gets_all() {
    let server = Running::memory(1);
    let (_admin, cntlid) = server.admin();
    let (mut slow, mut other) = (server.io(cntlid, 1), server.io(cntlid, 2));
    // More than the sockets and the target's buffers take.
    for cid in 0..31 {
        slow.command(rw(Opcode::READ, cid, 0, 256), &[], 1 << 20);
    }
    for cid in 0..100 {
        assert!(
            other
                .run(rw(Opcode::READ, cid, 0, 1), &[], 4096)
                .0
                .status
                .is_success()
        );
    }
    for _ in 0..31 {
        let (cqe, data) = slow.completion();
        assert!(cqe.status.is_success() && data.len() == 1 << 20);
    }
}

#[test]
fn violation__is_answered_before_the_end() {
    let server = Running::memory(1);
    let (_admin, cntlid) = server.admin();
    let mut io = server.io(cntlid, 1);
    // A type that there is not, with more bytes behind it than the target reads.
    io.socket.write_all(&[0xff; 100_000]).unwrap();
    assert!(matches!(io.ends(), Some(Header::C2hTermReq(_))));
    // A host that ends in the middle of a PDU.
    let mut io = server.io(cntlid, 2);
    io.socket.write_all(&[4, 0, 72]).unwrap();
    drop(io);
    let mut io = server.io(cntlid, 3);
    assert!(io.run(rw(Opcode::READ, 1, 0, 1), &[], 4096).0.status.is_success());
}

#[test]
fn keep_alive__ends_a_silent_host_alone() {
    let server = Running::memory(2);
    let (mut other, cntlid) = server.admin();
    let mut io = server.io(cntlid, 1);
    let mut silent = Host::new(server.address);
    let connected = silent.connect_for(0, ConnectData::ANY_CONTROLLER, 300);
    assert_eq!(connected.status, Status::SUCCESS);
    assert_eq!(silent.ends(), None);
    let keep_alive = Sqe::new(Opcode::KEEP_ALIVE, Cid(7), NsId::NONE);
    assert_eq!(other.run(keep_alive, &[], 0).0.status, Status::SUCCESS);
    let (cqe, _) = io.run(rw(Opcode::READ, 8, 0, 1), &[], 4096);
    assert_eq!(cqe.status, Status::SUCCESS);
}

#[test]
fn reset__ends_the_io_queues_and_frees_their_ids() {
    let server = Running::memory(2);
    let (mut admin, cntlid) = server.admin();
    let mut queues: Vec<_> = (1..=3).map(|qid| server.io(cntlid, qid)).collect();
    let mut property = Property {
        register: Register::CONFIGURATION,
        is_wide: false,
        value: 0,
    };
    for value in [0, Configuration::enabled().0] {
        property.value = value.into();
        assert!(
            admin
                .run(property.command(FabricsType::PROPERTY_SET, Cid(1)), &[], 0)
                .0
                .status
                .is_success()
        );
        queues.iter_mut().for_each(|queue| assert_eq!(queue.ends(), None));
        queues.clear();
    }
    // A queue's id is free once the target has noticed that the host closed the old one.
    for qid in 1..=3 {
        while !Host::new(server.address).connect(qid, cntlid).status.is_success() {}
    }
}

#[test]
fn handle__listens_elsewhere_and_no_more_without_a_host_noticing() {
    let server = Running::memory(2);
    let (mut admin, cntlid) = server.admin();
    let mut io = server.io(cntlid, 1);
    let wanted = Listener {
        transport: TransportKind::Tcp,
        address: "127.0.0.1:0".parse().unwrap(),
    };
    let other = server.handle.listen(wanted.into()).unwrap();
    let taken = server.handle.listen(other.into()).unwrap_err().to_string();
    assert!(
        taken.contains(&format!("cannot listen on {}", other.address)),
        "{taken}"
    );
    let mut second = Host::new(other.address);
    assert_eq!(second.connect(2, cntlid).status, Status::SUCCESS);
    let first = Listener {
        address: server.address,
        ..wanted
    };
    assert!(server.handle.stop_listening(&first));
    assert!(!server.handle.stop_listening(&first));
    assert!(TcpStream::connect(server.address).is_err());
    for queue in [&mut io, &mut second] {
        assert!(
            queue
                .run(rw(Opcode::READ, 1, 0, 1), &[], 4096)
                .0
                .status
                .is_success()
        );
    }
    let keep_alive = Sqe::new(Opcode::KEEP_ALIVE, Cid(1), NsId::NONE);
    assert!(admin.run(keep_alive, &[], 0).0.status.is_success());
}
