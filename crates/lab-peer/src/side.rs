//! One of two programs that carry out scenarios together, and its queue pairs: the peer of lab/peer/peer.c.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, Device, Memory, MemoryRegion, Operation, Path, PathMtu, ProtectionDomain, Psn,
    QpAttributes, QpOptions, QpState, QpType, Qpn, QueuePair, RKey, RecvRequest, SendFlags, SendRequest,
    SgeList, SharedReceiveQueue, Status, Target, WorkCompletion,
};

use super::{WAIT, expect, expect_status, pattern_bytes};

/// Bytes of a side's memory, and of its local memory.
pub(super) const MEMORY: u32 = 65536;
/// Bytes of a datagram's header in front of the received data.
pub(super) const GRH: u32 = 40;
const QKEY: u32 = 0x1111_1111;
const FIRST_PSN: u32 = 0x00ff_fff0;
const NAME: usize = 16;

pub(super) fn all_rights() -> Access {
    Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::MW_BIND
        | Access::FLUSH_GLOBAL
}

/// This program's half of the state that both programs share.
pub(super) struct Side {
    pub(super) asks: bool,
    /// Set when the link loses datagrams: those of UC and UD may be missing, all else must hold.
    pub(super) lossy: bool,
    /// Connection to the other side.
    control: TcpStream,
    /// Address of the answerer.
    pub(super) address: SocketAddr,
    pub(super) device: Device,
    pub(super) pd: ProtectionDomain,
    /// Memory that peers reach, with all rights; zeroed before each scenario.
    pub(super) memory: Arc<AnonymousMemory>,
    pub(super) memory_mr: MemoryRegion,
    /// Source of requests and target of receives.
    local: Arc<AnonymousMemory>,
    local_mr: MemoryRegion,
}

/// The names of scenarios, as the asker sends them.
pub(super) struct Names(TcpStream);

impl Names {
    /// Returns the next name; `None` when the asker is done.
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        let mut name = [0; NAME];
        match self.0.read_exact(&mut name) {
            Ok(()) => Ok(Some(String::from_utf8_lossy(&name).trim_end_matches('\0').into())),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Side {
    /// Waits for the asker.
    pub(super) fn answer(listener: &TcpListener) -> Result<(Side, Names)> {
        let (control, _) = listener.accept()?;
        let mut names = Names(control.try_clone()?);
        let link = names.next()?.context("the asker said nothing")?;
        let address = listener.local_addr()?;
        let side = Side::new(false, link == "lossy", control, address, address.ip())?;
        Ok((side, names))
    }

    /// Connects to the answerer.
    pub(super) fn ask(address: SocketAddr, own: IpAddr, lossy: bool) -> Result<Side> {
        let control = TcpStream::connect(address)?;
        let side = Side::new(true, lossy, control, address, own)?;
        side.ask_for(if lossy { "lossy" } else { "whole" })?;
        Ok(side)
    }

    fn new(asks: bool, lossy: bool, control: TcpStream, address: SocketAddr, own: IpAddr) -> Result<Side> {
        control.set_nodelay(true)?;
        control.set_read_timeout(Some(2 * WAIT))?;
        let device = Device::open(own)?;
        let pd = device.alloc_pd()?;
        let memory = Arc::new(AnonymousMemory::new(MEMORY as usize)?);
        let memory_mr = pd.reg_mr_all(memory.clone(), memory.address(), all_rights())?;
        let local = Arc::new(AnonymousMemory::new(MEMORY as usize)?);
        let local_mr = pd.reg_mr_all(local.clone(), local.address(), Access::LOCAL_WRITE)?;
        Ok(Side {
            asks,
            lossy,
            control,
            address,
            device,
            pd,
            memory,
            memory_mr,
            local,
            local_mr,
        })
    }

    pub(super) fn path_to(&self, peer: IpAddr, qpn: Qpn) -> Result<Path> {
        Ok(Path {
            src: self.device.address(),
            dst: peer,
            src_port: self.device.source_port(qpn)?,
            traffic_class: 0,
        })
    }

    pub(super) fn ask_for(&self, name: &str) -> Result<()> {
        let mut padded = [0; NAME];
        padded[..name.len()].copy_from_slice(name.as_bytes());
        Ok((&self.control).write_all(&padded)?)
    }

    /// Sends eight values to the other side and receives its eight.
    pub(super) fn swap(&self, mine: [u64; 8]) -> Result<[u64; 8]> {
        let mut bytes = [0; 64];
        for (to, value) in bytes.chunks_exact_mut(8).zip(mine) {
            to.copy_from_slice(&value.to_be_bytes());
        }
        (&self.control).write_all(&bytes)?;
        (&self.control)
            .read_exact(&mut bytes)
            .context("the other side went away")?;
        let mut theirs = [0; 8];
        for (value, from) in theirs.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *value = u64::from_be_bytes(*from);
        }
        Ok(theirs)
    }

    pub(super) fn barrier(&self) -> Result<()> {
        self.swap([0; 8]).map(drop)
    }

    /// Sends a key to the other side and receives its key; 0 stands for none.
    pub(super) fn swap_key(&self, mine: RKey) -> Result<RKey> {
        let theirs = self.swap([mine.0.into(), 0, 0, 0, 0, 0, 0, 0])?[0];
        Ok(RKey(theirs as u32))
    }

    /// Returns the number of RNR NAKs sent so far.
    pub(super) fn rnr_naks(&self) -> u64 {
        self.device.counters().resources_rnr_nak
    }

    /// Waits until a SEND has found no receive since the count was `before`.
    pub(super) fn await_rnr_nak(&self, before: u64) -> Result<()> {
        let deadline = Instant::now() + WAIT;
        while self.rnr_naks() == before {
            ensure!(Instant::now() < deadline, "no SEND came without a receive");
            yield_now();
        }
        Ok(())
    }

    /// Zeroes both memories.
    pub(super) fn clear(&self) -> Result<()> {
        let zeroes = vec![0; MEMORY as usize];
        self.memory.write(0, &zeroes)?;
        Ok(self.local.write(0, &zeroes)?)
    }

    /// Returns bytes of the memory that peers reach.
    pub(super) fn memory(&self, at: u32, length: u32) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length as usize];
        self.memory.read(at.into(), &mut bytes)?;
        Ok(bytes)
    }

    /// Returns the number in 8 bytes of that memory.
    pub(super) fn word(&self, at: u32) -> Result<u64> {
        let mut bytes = [0; 8];
        self.memory.read(at.into(), &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Returns bytes of the local memory.
    pub(super) fn local(&self, at: u32, length: u32) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length as usize];
        self.local.read(at.into(), &mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn local_word(&self, at: u32) -> Result<u64> {
        let mut bytes = [0; 8];
        self.local.read(at.into(), &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Writes the pattern, from its beginning, to a place in the local memory.
    pub(super) fn put_pattern(&self, at: u32, length: u32) -> Result<()> {
        Ok(self.local.write(at.into(), &pattern_bytes(0, length))?)
    }

    /// Returns a receive into the local memory.
    pub(super) fn receive(&self, wr_id: u64, to: u32, length: u32) -> RecvRequest {
        let sges = self.local_sges(to, length);
        RecvRequest { wr_id, sges }
    }

    fn local_sges(&self, at: u32, length: u32) -> SgeList {
        match length {
            0 => SgeList::EMPTY,
            _ => self.local_mr.sge(at.into(), length).into(),
        }
    }
}

/// Address and memory of the peer's end.
struct There {
    path: Path,
    qpn: Qpn,
    va: u64,
    rkey: RKey,
    is_rdmux: bool,
}

/// A queue pair that is connected by hand.
pub(super) struct ManualQp<'a> {
    side: &'a Side,
    pub(super) cq: CompletionQueue,
    pub(super) qp: QueuePair,
    qp_type: QpType,
    there: Option<There>,
}

impl<'a> ManualQp<'a> {
    pub(super) fn new(side: &'a Side, qp_type: QpType, rights: Access) -> Result<ManualQp<'a>> {
        ManualQp::with_srq(side, qp_type, rights, None)
    }

    pub(super) fn with_srq(
        side: &'a Side,
        qp_type: QpType,
        rights: Access,
        srq: Option<SharedReceiveQueue>,
    ) -> Result<ManualQp<'a>> {
        let cq = side.device.create_cq(64)?;
        let qp = side.pd.create_qp(&QpOptions {
            qp_type,
            max_send_wr: 24,
            max_recv_wr: 16,
            srq,
            ..QpOptions::new(&cq)
        })?;
        let datagrams = qp_type == QpType::Ud;
        let init = QpAttributes {
            access: (!datagrams).then_some(rights),
            qkey: datagrams.then_some(QKEY),
            ..Default::default()
        };
        qp.modify(QpState::Init, &init)?;
        Ok(ManualQp {
            side,
            cq,
            qp,
            qp_type,
            there: None,
        })
    }

    /// Connects to the other side's end and waits until that is ready too. The peer may reach `memory`.
    pub(super) fn join(&mut self, memory: &MemoryRegion) -> Result<()> {
        let side = self.side;
        let gid = match side.device.address() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let gid = u128::from(gid);
        let mtu = side.device.path_mtu_to(side.control.peer_addr()?.ip())?;
        let told = side.swap([
            self.qp.qpn().value().into(),
            FIRST_PSN.into(),
            (gid >> 64) as u64,
            gid as u64,
            mtu.code().into(),
            memory.iova(),
            memory.rkey().0.into(),
            u64::from(side.device.provider() == "soft"),
        ])?;
        let address = Ipv6Addr::from(u128::from(told[2]) << 64 | u128::from(told[3])).to_canonical();
        let qpn = Qpn::new(told[0] as u32);
        let there = There {
            path: side.path_to(address, qpn)?,
            qpn,
            va: told[5],
            rkey: RKey(told[6] as u32),
            is_rdmux: told[7] == 1,
        };
        let theirs = PathMtu::from_code(told[4] as u8).context("the peer's path MTU")?;
        self.ready(&there, Psn::new(told[1] as u32), mtu.min(theirs))?;
        self.there = Some(there);
        side.barrier()
    }

    fn ready(&self, there: &There, rq_psn: Psn, mtu: PathMtu) -> Result<()> {
        let connected = self.qp_type != QpType::Ud;
        let reliable = self.qp_type == QpType::Rc;
        let rtr = QpAttributes {
            path: connected.then_some(there.path),
            path_mtu: connected.then_some(mtu.bytes()),
            dest_qpn: connected.then_some(there.qpn),
            rq_psn: connected.then_some(rq_psn),
            max_dest_rd_atomic: reliable.then_some(4),
            min_rnr_timer: reliable.then_some(12),
            ..Default::default()
        };
        self.qp.modify(QpState::Rtr, &rtr)?;
        let rts = QpAttributes {
            sq_psn: Some(Psn::new(FIRST_PSN)),
            timeout: reliable.then_some(14),
            retry_count: reliable.then_some(6),
            rnr_retry: reliable.then_some(7),
            max_rd_atomic: reliable.then_some(4),
            ..Default::default()
        };
        Ok(self.qp.modify(QpState::Rts, &rts)?)
    }

    /// Keeps the QP until both sides are done: the peer may still request a lost acknowledgement again.
    pub(super) fn close(self) -> Result<()> {
        self.side.barrier()
    }

    fn there(&self) -> &There {
        self.there.as_ref().expect("joined")
    }

    pub(super) fn peer_address(&self) -> IpAddr {
        self.there().path.dst
    }

    pub(super) fn peer_qpn(&self) -> Qpn {
        self.there().qpn
    }

    pub(super) fn peer_is_rdmux(&self) -> bool {
        self.there().is_rdmux
    }

    /// Returns the key of the peer's memory.
    pub(super) fn rkey(&self) -> RKey {
        self.there().rkey
    }

    /// Returns the address at an offset of the peer's memory.
    pub(super) fn va(&self, at: u32) -> u64 {
        self.there().va + u64::from(at)
    }

    /// Returns a request whose bytes come from, or go to, the local memory.
    pub(super) fn request(&self, operation: Operation, local: u32, length: u32) -> SendRequest {
        let to = match self.qp_type {
            QpType::Ud => Target::Datagram {
                path: self.there().path,
                qpn: self.there().qpn,
                qkey: QKEY,
            },
            _ => Target::Connected,
        };
        SendRequest {
            wr_id: 0,
            operation,
            sges: self.side.local_sges(local, length),
            flags: SendFlags::SIGNALED,
            to,
        }
    }

    pub(super) fn send(&self, local: u32, length: u32) -> SendRequest {
        self.request(Operation::Send { imm: None }, local, length)
    }

    pub(super) fn send_imm(&self, local: u32, length: u32, imm: u32) -> SendRequest {
        self.request(Operation::Send { imm: Some(imm) }, local, length)
    }

    pub(super) fn send_to_group(&self, group: IpAddr, local: u32, length: u32) -> Result<SendRequest> {
        let to = self.side.device.create_ah(group, 0).to_group(QKEY)?;
        Ok(SendRequest {
            to,
            ..self.send(local, length)
        })
    }

    pub(super) fn write(&self, rkey: RKey, at: u32, local: u32, length: u32) -> SendRequest {
        let (va, imm) = (self.va(at), None);
        self.request(Operation::Write { va, rkey, imm }, local, length)
    }

    pub(super) fn write_imm(&self, at: u32, local: u32, length: u32, imm: u32) -> SendRequest {
        let (va, rkey, imm) = (self.va(at), self.rkey(), Some(imm));
        self.request(Operation::Write { va, rkey, imm }, local, length)
    }

    pub(super) fn read(&self, rkey: RKey, at: u32, local: u32, length: u32) -> SendRequest {
        let va = self.va(at);
        self.request(Operation::Read { va, rkey }, local, length)
    }

    pub(super) fn fetch_add(&self, rkey: RKey, at: u32, local: u32, add: u64) -> SendRequest {
        let va = self.va(at);
        self.request(Operation::FetchAdd { va, rkey, add }, local, 8)
    }

    pub(super) fn compare_swap(
        &self,
        rkey: RKey,
        at: u32,
        local: u32,
        compare: u64,
        swap: u64,
    ) -> SendRequest {
        let va = self.va(at);
        let operation = Operation::CompareSwap {
            va,
            rkey,
            compare,
            swap,
        };
        self.request(operation, local, 8)
    }

    pub(super) fn atomic_write(&self, rkey: RKey, at: u32, value: u64) -> SendRequest {
        let va = self.va(at);
        SendRequest {
            sges: SgeList::inline(&value.to_ne_bytes()),
            ..self.request(Operation::AtomicWrite { va, rkey }, 0, 0)
        }
    }

    /// Posts requests in one call, numbered from 0.
    pub(super) fn post(&self, list: Vec<SendRequest>) -> Result<()> {
        let numbered = list
            .into_iter()
            .zip(0..)
            .map(|(request, wr_id)| SendRequest { wr_id, ..request });
        Ok(self.qp.post_send_list(numbered)?)
    }

    pub(super) fn completion(&self) -> Result<WorkCompletion> {
        self.cq.wait(WAIT)?.context("no completion")
    }

    /// Posts requests in one call and waits until all succeed, in order.
    pub(super) fn run(&self, what: &str, list: Vec<SendRequest>) -> Result<()> {
        let n = list.len() as u64;
        self.post(list)?;
        for i in 0..n {
            let wc = self.completion()?;
            expect_status(what, &wc, Status::Success)?;
            expect("number of the completed request", wc.wr_id, i)?;
        }
        Ok(())
    }

    pub(super) fn fails(&self, what: &str, request: SendRequest, wanted: Status) -> Result<()> {
        self.qp.post_send(request)?;
        self.expect_refusal(what, &self.completion()?, wanted)
    }

    /// Checks for a refusal. A responder in error repeats no NAK: where the link can lose the NAK, the request may end with retries
    /// exceeded.
    pub(super) fn expect_refusal(&self, what: &str, wc: &WorkCompletion, wanted: Status) -> Result<()> {
        match wc.status {
            Status::RetryExceeded if self.side.lossy => Ok(()),
            _ => expect_status(what, wc, wanted),
        }
    }

    pub(super) fn post_receive(&self, wr_id: u64, to: u32, length: u32) -> Result<()> {
        Ok(self.qp.post_recv(self.side.receive(wr_id, to, length))?)
    }

    pub(super) fn received(&self, wr_id: u64, length: u32) -> Result<WorkCompletion> {
        let wc = self.completion()?;
        expect_status("receive", &wc, Status::Success)?;
        expect("number of the receive", wc.wr_id, wr_id)?;
        expect("bytes received", wc.byte_len, length)?;
        Ok(wc)
    }
}

pub(super) fn expect_imm(wc: &WorkCompletion, imm: u32) -> Result<()> {
    ensure!(wc.imm.is_some(), "the receive has no immediate data");
    expect("immediate data", wc.imm.unwrap_or_default(), imm)
}

/// Time after which a sent datagram has arrived or never will: on a link that may lose it, nothing else tells.
pub(super) const SETTLE: Duration = Duration::from_millis(200);
