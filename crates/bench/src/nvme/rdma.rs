//! A bare pair on verbs, for NVMe over RDMA: each I/O is a SEND of a command, a WRITE or READ of a block by the other side, and a SEND of a response.

use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectParams, Device, MemoryRegion, Operation, QpOptions, QueuePair, RKey,
    RecvRequest, SendRequest, Status, WorkCompletion,
};
use rustix::time::{ClockId, clock_gettime};

use super::super::LOOPBACK;
use super::super::child::say_ready;
use super::{BLOCK, Direction, SECONDS};

/// Bytes of a command and of a response.
const COMMAND: usize = 64;
const RESPONSE: usize = 16;
/// One SEND of so many has a completion, as in a connection of the runtime.
const SIGNAL_EVERY: u64 = 8;
/// Requests of a send queue. A side that goes on as soon as it sees a message may acknowledge many together.
const REQUESTS_MAX: u32 = 4096;
/// Kinds of work requests, above the number of the I/O's place.
const RECEIVE: u64 = 1 << 32;
const READ: u64 = 2 << 32;
const SEND: u64 = 3 << 32;
/// A side that hears nothing for so long gives up.
const SILENCE: Duration = Duration::from_secs(10);

/// One side's objects, with places for `depth` I/Os: blocks, then messages to send, then messages that are received.
// The fields are in the order in which they must be dropped.
struct End {
    qp: QueuePair,
    cq: CompletionQueue,
    mr: MemoryRegion,
    sent: u64,
    depth: u64,
    send_len: u32,
    receive_len: u32,
}

impl End {
    fn new(device: &Device, depth: u64, send_len: usize, receive_len: usize) -> Result<End> {
        let cq = device.create_cq(REQUESTS_MAX + depth as u32)?;
        let pd = device.alloc_pd()?;
        let mut options = QpOptions::new(&cq);
        (options.max_send_wr, options.max_recv_wr) = (REQUESTS_MAX, depth as u32);
        let qp = pd.create_qp(&options)?;
        let bytes = depth as usize * (BLOCK + send_len + receive_len);
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mr = pd.reg_mr_all(Arc::new(AnonymousMemory::new(bytes)?), 0, access)?;
        let end = End {
            qp,
            cq,
            mr,
            sent: 0,
            depth,
            send_len: send_len as u32,
            receive_len: receive_len as u32,
        };
        end.qp.init()?;
        (0..depth).try_for_each(|place| end.receive(place))?;
        Ok(end)
    }

    fn block(&self, place: u64) -> u64 {
        place * BLOCK as u64
    }

    fn receive(&self, place: u64) -> Result<()> {
        let messages = self.depth * (BLOCK as u64 + u64::from(self.send_len));
        let at = messages + place * u64::from(self.receive_len);
        Ok(self.qp.post_recv(RecvRequest {
            wr_id: RECEIVE | place,
            sges: self.mr.sge(at, self.receive_len).into(),
        })?)
    }

    fn send(&mut self, place: u64) -> SendRequest {
        let at = self.depth * BLOCK as u64 + place * u64::from(self.send_len);
        let request = SendRequest::send(self.mr.sge(at, self.send_len)).wr_id(SEND);
        self.sent += 1;
        match self.sent.is_multiple_of(SIGNAL_EVERY) {
            true => request.signaled(),
            false => request,
        }
    }

    /// Returns what is there, having slept until something was. `None`: the other side has ended the connection.
    fn wait(&self) -> Result<Option<WorkCompletion>> {
        let found = self.cq.wait(SILENCE)?;
        ensure!(found.is_some(), "the other side has stopped");
        self.check(found)
    }

    fn check(&self, found: Option<WorkCompletion>) -> Result<Option<WorkCompletion>> {
        let Some(wc) = found.filter(|wc| wc.status != Status::Flushed) else {
            return Ok(None);
        };
        ensure!(wc.status == Status::Success, "a request failed: {}", wc.status);
        Ok(Some(wc))
    }
}

/// Answers the commands of one connection until it ends. Returns this process's CPU time in nanoseconds.
pub(super) fn serve(way: Direction, port: u16, depth: usize) -> Result<u64> {
    rdmux_soft::register();
    let device = Device::open(LOOPBACK)?;
    let listener = device.listen(port)?;
    say_ready()?;
    let request = listener
        .accept(SILENCE)
        .ok_or_else(|| anyhow::anyhow!("no client comes"))?;
    let mut end = End::new(&device, depth as u64, RESPONSE, COMMAND)?;
    let mut key = [0; 4];
    key.copy_from_slice(&request.private_data()[..4]);
    let rkey = RKey(u32::from_be_bytes(key));
    let _connection = request.accept(&end.qp, &ConnectParams::default(), &[])?;
    let mut found = end.wait()?;
    while let Some(wc) = found {
        let place = wc.wr_id & (RECEIVE - 1);
        let va = end.block(place);
        match (wc.wr_id - place, way) {
            (RECEIVE, Direction::Read) => {
                end.receive(place)?;
                let write = Operation::Write { va, rkey, imm: None };
                let write = SendRequest::new(write, end.mr.sge(va, BLOCK as u32)).wr_id(SEND);
                let response = end.send(place);
                end.qp.post_send_list([write, response])?;
            }
            (RECEIVE, Direction::Write) => {
                let read = Operation::Read { va, rkey };
                let read = SendRequest::new(read, end.mr.sge(va, BLOCK as u32));
                end.qp.post_send(read.wr_id(READ | place).signaled())?;
            }
            (READ, _) => {
                end.receive(place)?;
                let response = end.send(place);
                end.qp.post_send(response)?;
            }
            _ => {}
        }
        found = match end.cq.poll() {
            None => end.wait()?,
            polled => end.check(polled)?,
        };
    }
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    Ok(cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64)
}

/// Keeps so many commands in flight for the time. Returns the number of responses.
pub(super) fn request(port: u16, depth: usize) -> Result<u64> {
    rdmux_soft::register();
    let device = Device::open(LOOPBACK)?;
    let mut end = End::new(&device, depth as u64, COMMAND, RESPONSE)?;
    let key = end.mr.rkey().0.to_be_bytes();
    let server = SocketAddr::new(LOOPBACK, port);
    let _connection = device.connect(&end.qp, server, &ConnectParams::default(), &key)?;
    say_ready()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    let until = Instant::now() + Duration::from_secs(SECONDS);
    for place in 0..depth as u64 {
        let command = end.send(place);
        end.qp.post_send(command)?;
    }
    let mut responses = 0;
    while Instant::now() < until {
        let mut found = end.wait()?;
        ensure!(found.is_some(), "the server has ended the connection");
        while let Some(wc) = found {
            let place = wc.wr_id & (RECEIVE - 1);
            if wc.wr_id - place == RECEIVE {
                responses += 1;
                end.receive(place)?;
                let command = end.send(place);
                end.qp.post_send(command)?;
            }
            found = end.check(end.cq.poll())?;
        }
    }
    Ok(responses)
}
