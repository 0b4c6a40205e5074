//! Completions and connection requests awaited by their descriptors in an executor: a server that squares the numbers of many
//! clients on one thread, and a client with a timeout. The numbers are the immediate data of messages without bytes. The crates are
//! those of smol; any executor that can await a readable descriptor does.
//!
//! ```text
//! cargo run -p rdmux-examples --bin async_wait -- serve 127.0.0.1
//! cargo run -p rdmux-examples --bin async_wait -- ask 127.0.0.1 127.0.0.1 7 12
//! ```
//!
//! The first address is the process's own, the second the server's.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use async_executor::LocalExecutor;
use async_io::{Async, Timer, block_on};
use futures_lite::future::or;
use rdmux_verbs::{
    CompletionQueue, ConnectParams, ConnectionRequest, Device, ProtectionDomain, QpOptions, QueuePair,
    RecvRequest, SendRequest, SgeList, Status, WcOpcode,
};

const PORT: u16 = 7178;

fn main() -> Result<()> {
    rdmux_soft::register();
    rdmux_hw::register();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments[..] {
        [verb, own] if verb == "serve" => serve(own.parse()?),
        [verb, own, server, numbers @ ..] if verb == "ask" => {
            block_on(ask(own.parse()?, server.parse()?, numbers))
        }
        _ => bail!("usage: async_wait serve OWN | async_wait ask OWN SERVER NUMBER ..."),
    }
}

/// Makes a queue pair with a receive posted, and a completion queue for it.
fn queues(pd: &ProtectionDomain) -> Result<(QueuePair, Async<CompletionQueue>)> {
    let cq = pd.device().create_cq(256)?;
    let qp = pd.create_qp(&QpOptions::new(&cq))?;
    qp.init()?;
    qp.post_recv(RecvRequest::new(0, SgeList::EMPTY))?;
    Ok((qp, Async::new_nonblocking(cq)?))
}

/// Takes the number of the next message and posts the receive for the one after it. `None`: the connection has ended.
async fn receive(qp: &QueuePair, cq: &Async<CompletionQueue>) -> Result<Option<u32>> {
    loop {
        // A timeout of zero arms the queue and polls once more: a later completion makes the descriptor readable.
        let Some(completion) = cq.get_ref().wait(Duration::ZERO)? else {
            cq.readable().await?;
            continue;
        };
        match completion.status {
            Status::Success if completion.opcode == WcOpcode::Recv => {
                qp.post_recv(RecvRequest::new(0, SgeList::EMPTY))?;
                return Ok(Some(completion.imm.context("a message without a number")?));
            }
            // An own message has arrived at the peer.
            Status::Success => {}
            Status::Flushed => return Ok(None),
            error => return Err(error.into()),
        }
    }
}

fn serve(own: IpAddr) -> Result<()> {
    let device = Device::open(own)?;
    let pd = device.alloc_pd()?;
    let listener = Async::new_nonblocking(device.listen(PORT)?)?;
    println!("listening on {own}");
    let executor = LocalExecutor::new();
    block_on(executor.run(async {
        loop {
            match listener.get_ref().accept(Duration::ZERO) {
                Some(request) => executor.spawn(square(pd.clone(), request)).detach(),
                None => listener.readable().await?,
            }
        }
    }))
}

/// Serves one client.
async fn square(pd: ProtectionDomain, request: ConnectionRequest) -> Result<()> {
    let (qp, cq) = queues(&pd)?;
    let _connection = request.accept(&qp, &ConnectParams::default(), b"")?;
    while let Some(number) = receive(&qp, &cq).await? {
        let answer = SendRequest::send(SgeList::EMPTY).imm(number.wrapping_mul(number));
        qp.post_send(answer.signaled())?;
    }
    Ok(())
}

async fn ask(own: IpAddr, server: IpAddr, numbers: &[String]) -> Result<()> {
    let device = Device::open(own)?;
    let (qp, cq) = queues(&device.alloc_pd()?)?;
    // This call blocks the thread until the server has answered.
    let peer = (server, PORT).into();
    let _connection = device
        .connect(&qp, peer, &ConnectParams::default(), b"")
        .map_err(|error| anyhow!("{peer}: {error}; first start `async_wait serve {server}`"))?;
    for number in numbers {
        qp.post_send(SendRequest::send(SgeList::EMPTY).imm(number.parse()?).signaled())?;
        let expired = async {
            Timer::after(Duration::from_secs(30)).await;
            bail!("the server is silent")
        };
        let answer = or(receive(&qp, &cq), expired).await?;
        println!(
            "{number}: {}",
            answer.context("the server has ended the connection")?
        );
    }
    Ok(())
}
