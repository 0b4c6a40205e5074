//! Two processes send messages to each other; the client prints the median round trip.
//!
//! ```text
//! cargo run --release -p rdmux-examples --bin ping_pong -- serve 127.0.0.1
//! cargo run --release -p rdmux-examples --bin ping_pong -- ping 127.0.0.1 127.0.0.1
//! ```
//!
//! The first address is the process's own, the second the server's.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectParams, Device, Memory, QpOptions, QueuePair, RecvRequest, SendRequest,
    Sge, Status, WcOpcode,
};

const PORT: u16 = 7175;
const BYTES: u64 = 64;
const ROUNDS: usize = 10_000;
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> Result<()> {
    rdmux_soft::register();
    rdmux_hw::register();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (own, server): (IpAddr, Option<IpAddr>) = match &arguments[..] {
        [verb, own] if verb == "serve" => (own.parse()?, None),
        [verb, own, server] if verb == "ping" => (own.parse()?, Some(server.parse()?)),
        _ => bail!("usage: ping_pong serve OWN | ping_pong ping OWN SERVER"),
    };
    let device = Device::open(own)?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(16)?;
    let qp = pd.create_qp(&QpOptions::new(&cq))?;
    let memory = Arc::new(AnonymousMemory::new(2 * BYTES as usize)?);
    let mr = pd.reg_mr_all(memory.clone(), memory.address(), Access::LOCAL_WRITE)?;
    let send = mr.slice(..BYTES).context("no such bytes")?;
    let receive = mr.slice(BYTES..2 * BYTES).context("no such bytes")?;

    // The receive is posted before there is a connection: the peer's first message finds it.
    qp.init()?;
    qp.post_recv(RecvRequest::new(0, receive))?;
    if let Some(server) = server {
        memory.write(0, b"ping")?;
        let peer = (server, PORT).into();
        let connected = device.connect(&qp, peer, &ConnectParams::default(), b"");
        let _connection =
            connected.map_err(|error| anyhow!("{peer}: {error}; first start `ping_pong serve {server}`"))?;
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            qp.post_send(SendRequest::send(send).signaled())?;
            if !receives(&cq, &qp, receive)? {
                bail!("the server has ended the connection");
            }
            times.push(begin.elapsed());
        }
        let mut answer = [0; 4];
        memory.read(BYTES, &mut answer)?;
        times.sort();
        let answer = String::from_utf8_lossy(&answer);
        println!(
            "{ROUNDS} round trips, answer {answer}, median {:?}",
            times[ROUNDS / 2]
        );
    } else {
        memory.write(0, b"pong")?;
        let listener = device.listen(PORT)?;
        println!("listening on {own}");
        let request = listener.accept(PATIENCE).context("no client came")?;
        let _connection = request.accept(&qp, &ConnectParams::default(), b"")?;
        let mut rounds = 0;
        while receives(&cq, &qp, receive)? {
            qp.post_send(SendRequest::send(send).signaled())?;
            rounds += 1;
        }
        println!("answered {rounds} messages");
    }
    Ok(())
}

/// Waits for the peer's next message and posts the receive for the one after it. Returns false if the connection has ended.
fn receives(cq: &CompletionQueue, qp: &QueuePair, receive: Sge) -> Result<bool> {
    loop {
        let completion = cq.wait(PATIENCE)?.context("the peer is silent")?;
        match completion.status {
            Status::Success if completion.opcode == WcOpcode::Recv => break,
            // An own message has arrived at the peer.
            Status::Success => {}
            Status::Flushed => return Ok(false),
            error => return Err(error.into()),
        }
    }
    qp.post_recv(RecvRequest::new(0, receive))?;
    Ok(true)
}
