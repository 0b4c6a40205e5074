//! The peer of lab/peer/cm.c, scenario by scenario.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail, ensure};
use rdmux_verbs::{
    CompletionQueue, ConnectError, ConnectParams, Connection, DatagramListener, Listener, Operation,
    QpOptions, QpType, QueuePair, RDMA_UDP_QKEY, RecvRequest, RejReason, ResolveError, SendFlags,
    SendRequest, SgeList, SidrStatus, Status, Target,
};

use super::side::{GRH, Side};
use super::{Scenario, WAIT, expect, expect_pattern, expect_status, pattern_bytes};

const REQ_DATA: u32 = 56;
const REP_DATA: u32 = 196;
const REJ_DATA: u32 = 148;

const SIDR_REQ_DATA: u32 = 180;
const SIDR_REP_DATA: u32 = 136;

pub(super) const SCENARIOS: &[Scenario] = &[
    ("cm-connect", connect),
    ("cm-reject", reject),
    ("cm-datagram", datagram),
];

struct Call<'a> {
    side: &'a Side,
    listener: Option<Listener>,
}

/// A connection with its queue pair and completion queue.
struct Line {
    cq: CompletionQueue,
    qp: QueuePair,
    connection: Connection,
}

fn make_call(side: &Side) -> Result<Call<'_>> {
    let listener = match side.asks {
        true => None,
        false => Some(side.device.listen(side.address.port())?),
    };
    side.barrier()?;
    Ok(Call { side, listener })
}

impl Call<'_> {
    fn qp(&self) -> Result<(CompletionQueue, QueuePair)> {
        make_qp(self.side, QpType::Rc)
    }

    fn connect_once(&self) -> Result<Line> {
        let (cq, qp) = self.qp()?;
        let connection = match &self.listener {
            None => {
                let data = pattern_bytes(100, REQ_DATA);
                let connection =
                    self.side
                        .device
                        .connect(&qp, self.side.address, &ConnectParams::default(), &data)?;
                expect_data(connection.private_data(), 200, REP_DATA)?;
                qp.post_recv(nothing())?;
                connection
            }
            Some(listener) => {
                let mut request = listener.accept(WAIT).context("no request came")?;
                expect_data(request.private_data(), 100, REQ_DATA)?;
                let data = pattern_bytes(200, REP_DATA);
                let prepare = || {
                    qp.post_recv(nothing())
                        .map_err(|e| std::io::Error::other(e).into())
                };
                let connection = request.accept_after(&qp, &ConnectParams::default(), &data, prepare)?;
                ensure!(
                    connection.wait_established(),
                    "the connection was not established"
                );
                connection
            }
        };
        qp.post_send(send_nothing(Target::Connected))?;
        for _ in 0..2 {
            let wc = cq.wait(WAIT)?.context("no completion")?;
            expect_status("SEND or receive", &wc, Status::Success)?;
        }
        Ok(Line { cq, qp, connection })
    }
}

fn make_qp(side: &Side, qp_type: QpType) -> Result<(CompletionQueue, QueuePair)> {
    let cq = side.device.create_cq(8)?;
    let qp = side.pd.create_qp(&QpOptions {
        qp_type,
        max_send_wr: 2,
        max_recv_wr: 2,
        ..QpOptions::new(&cq)
    })?;
    Ok((cq, qp))
}

fn send_nothing(to: Target) -> SendRequest {
    SendRequest {
        wr_id: 1,
        operation: Operation::Send { imm: None },
        sges: SgeList::EMPTY,
        flags: SendFlags::SIGNALED,
        to,
    }
}

fn nothing() -> RecvRequest {
    RecvRequest {
        wr_id: 0,
        sges: SgeList::EMPTY,
    }
}

fn expect_data(data: &[u8], from: u32, length: u32) -> Result<()> {
    let data = data
        .get(..length as usize)
        .with_context(|| format!("{} bytes of private data, not {length}", data.len()))?;
    expect_pattern("private data", data, from)
}

fn connect(s: &Side) -> Result<()> {
    let call = make_call(s)?;
    for i in 0..2 {
        let line = call.connect_once()?;
        line.qp.post_recv(nothing())?;
        s.barrier()?;
        if s.asks == (i == 0) {
            line.connection.disconnect_and_wait(WAIT);
        } else {
            ensure!(line.connection.wait_ended(WAIT), "the peer did not disconnect");
        }
        let wc = line.cq.wait(WAIT)?.context("the receive did not end")?;
        expect_status("receive", &wc, Status::Flushed)?;
        s.barrier()?;
    }
    Ok(())
}

fn reject(s: &Side) -> Result<()> {
    let call = make_call(s)?;
    if let Some(listener) = &call.listener {
        let request = listener.accept(WAIT).context("no request came")?;
        expect_data(request.private_data(), 100, REQ_DATA)?;
        request.reject(&pattern_bytes(300, REJ_DATA));
        return s.barrier();
    }
    for i in 0..2 {
        let (_cq, qp) = call.qp()?;
        let to = SocketAddr::new(s.address.ip(), s.address.port() + i);
        let data = pattern_bytes(100, REQ_DATA);
        let wanted = [RejReason::CONSUMER, RejReason::INVALID_SERVICE_ID][usize::from(i)];
        match s.device.connect(&qp, to, &ConnectParams::default(), &data) {
            Err(ConnectError::Rejected { reason, private_data }) => {
                ensure!(reason == wanted, "rejected as {reason}, not {wanted}");
                if i == 0 {
                    expect_data(&private_data, 300, REJ_DATA)?;
                }
            }
            Err(error) => return Err(error.into()),
            Ok(_) => bail!("the request was accepted"),
        }
    }
    s.barrier()
}

fn datagram(s: &Side) -> Result<()> {
    if s.asks {
        s.barrier()?;
        ask_services(s)?;
        return s.barrier();
    }
    let listener = s.device.listen_datagram(s.address.port())?;
    s.barrier()?;
    serve_datagram(s, &listener)?;
    let request = listener.accept(WAIT).context("no request came")?;
    expect_data(request.private_data(), 400, SIDR_REQ_DATA)?;
    request.reject(&[]);
    // Wait until the asker is done: it repeats its request if an answer gets lost.
    s.barrier()
}

fn serve_datagram(s: &Side, listener: &DatagramListener) -> Result<()> {
    let (cq, qp) = make_qp(s, QpType::Ud)?;
    qp.ready_datagram(RDMA_UDP_QKEY)?;
    let mut request = listener.accept(WAIT).context("no request came")?;
    expect_data(request.private_data(), 400, SIDR_REQ_DATA)?;
    qp.post_recv(s.receive(0, 0, GRH))?;
    request.accept(&qp, &pattern_bytes(500, SIDR_REP_DATA))?;
    let wc = cq.wait(WAIT)?.context("no datagram came")?;
    expect_status("receive", &wc, Status::Success)?;
    expect("bytes received", wc.byte_len, GRH)?;
    s.barrier()
}

/// Resolves three services: one that answers, one that rejects, and one that nobody offers.
fn ask_services(s: &Side) -> Result<()> {
    let resolve = |port_offset| {
        let to = SocketAddr::new(s.address.ip(), s.address.port() + port_offset);
        s.device.resolve(to, &pattern_bytes(400, SIDR_REQ_DATA))
    };
    let service = resolve(0)?;
    expect_data(service.private_data(), 500, SIDR_REP_DATA)?;
    let (cq, qp) = make_qp(s, QpType::Ud)?;
    qp.ready_datagram(RDMA_UDP_QKEY)?;
    for _ in 0..if s.lossy { 16 } else { 1 } {
        qp.post_send(send_nothing(service.target(0)?))?;
        let wc = cq.wait(WAIT)?.context("no completion")?;
        expect_status("SEND", &wc, Status::Success)?;
    }
    s.barrier()?;
    for (port_offset, wanted) in [(0, SidrStatus::REJECT), (1, SidrStatus::UNSUPPORTED)] {
        match resolve(port_offset) {
            Err(ResolveError::Refused { status, .. }) => {
                ensure!(status == wanted, "refused: {status}, not {wanted}");
            }
            Err(error) => return Err(error.into()),
            Ok(_) => bail!("a service was found"),
        }
    }
    Ok(())
}
