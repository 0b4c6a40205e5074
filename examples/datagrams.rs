//! A datagram service: the server answers each datagram with its text in capitals. Clients ask for the server's queue pair by a port
//! (SIDR); there is no connection.
//!
//! ```text
//! cargo run -p rdmux-examples --bin datagrams -- serve 127.0.0.1
//! cargo run -p rdmux-examples --bin datagrams -- ask 127.0.0.1 127.0.0.1 hello world
//! ```
//!
//! The first address is the process's own, the second the server's.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, Device, GRH_LEN, Memory, QpOptions, QpType, RDMA_UDP_QKEY, RecvRequest, SendRequest, SgeList,
    Status, WcOpcode, WorkCompletion,
};

const PORT: u16 = 7177;
/// Number of receives, and bytes of each: the header that comes before the text, and the largest path MTU.
const RECEIVES: u64 = 16;
const BYTES: u64 = GRH_LEN as u64 + 4096;

fn main() -> Result<()> {
    rdmux_soft::register();
    rdmux_hw::register();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (own, questions) = match &arguments[..] {
        [verb, own] if verb == "serve" => (own, None),
        [verb, own, server, texts @ ..] if verb == "ask" => (own, Some((server, texts))),
        _ => bail!("usage: datagrams serve OWN | datagrams ask OWN SERVER TEXT ..."),
    };
    let device = Device::open(own.parse()?)?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(256)?;
    let mut options = QpOptions::new(&cq);
    options.qp_type = QpType::Ud;
    let qp = pd.create_qp(&options)?;
    qp.ready_datagram(RDMA_UDP_QKEY)?;
    let memory = Arc::new(AnonymousMemory::new((RECEIVES * BYTES) as usize)?);
    let mr = pd.reg_mr_all(memory.clone(), memory.address(), Access::LOCAL_WRITE)?;
    let post = |n: u64| -> Result<()> {
        let place = mr.slice(n * BYTES..(n + 1) * BYTES).context("no such receive")?;
        Ok(qp.post_recv(RecvRequest::new(n, place))?)
    };
    (0..RECEIVES).try_for_each(post)?;

    // Waits for a datagram and posts its receive again. Returns `None` if the timeout expires.
    let next = |timeout| -> Result<Option<(WorkCompletion, Vec<u8>)>> {
        while let Some(completion) = cq.wait(timeout)? {
            if completion.status != Status::Success {
                return Err(completion.status.into());
            }
            if completion.opcode == WcOpcode::Recv {
                let mut bytes = vec![0; completion.byte_len as usize];
                memory.read(completion.wr_id * BYTES, &mut bytes)?;
                post(completion.wr_id)?;
                return Ok(Some((completion, bytes)));
            }
        }
        Ok(None)
    };

    if let Some((server, texts)) = questions {
        let server: IpAddr = server.parse()?;
        let peer = (server, PORT).into();
        let service = device
            .resolve(peer, b"")
            .map_err(|error| anyhow!("{peer}: {error}; first start `datagrams serve {server}`"))?
            .target(0)?;
        for text in texts {
            let question = SgeList::inline(text.as_bytes());
            qp.post_send(SendRequest::send(question).to(service).signaled())?;
            let lost = "no answer: the datagram or its answer was lost, as datagrams may be";
            let (_, bytes) = next(Duration::from_secs(10))?.context(lost)?;
            let text = bytes.get(GRH_LEN..).unwrap_or_default();
            println!("{}", String::from_utf8_lossy(text));
        }
        return Ok(());
    }
    let listener = device.listen_datagram(PORT)?;
    println!("listening on {own}");
    let service = qp.clone();
    std::thread::spawn(move || {
        loop {
            if let Some(mut request) = listener.accept(Duration::from_secs(60)) {
                // A client whose request has expired sends it again.
                let _ = request.accept(&service, b"");
            }
        }
    });
    loop {
        let Some((completion, bytes)) = next(Duration::from_secs(60))? else {
            continue;
        };
        let (header, text) = bytes.split_first_chunk().context("a datagram without a header")?;
        let sender = device.create_ah_from_grh(header).zip(completion.src_qpn);
        let (from, qpn) = sender.context("a datagram without a sender")?;
        let answer = SendRequest::send(SgeList::inline(&text.to_ascii_uppercase()));
        // An answer that is too long, or finds the queue full, is lost.
        let _ = qp.post_send(answer.to(from.to(qpn, RDMA_UDP_QKEY)?).signaled());
    }
}
