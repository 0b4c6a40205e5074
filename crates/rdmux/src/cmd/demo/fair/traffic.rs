//! Programs of the demo: one that sends, a bulk transfer or a heartbeat, and one that both send to. They do not know whether there is a node.
//!
//! Everything is a WRITE whose completion shows that the peer's device has placed it. A program that sends prints a [`Report`] as a line of
//! JSON every [`PERIOD`].

use std::collections::VecDeque;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, CompletionQueue, ConnectParams, Connection, Device, MemoryRegion, Operation, ProtectionDomain,
    QpOptions, QueuePair, RKey, SendFlags, SendRequest, Status, Target,
};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use crate::cmd::device::DeviceArgs;
use crate::output;

/// Port of the program that both send to.
pub(super) const PORT: u16 = 18516;
/// Time between two reports.
pub(super) const PERIOD: Duration = Duration::from_millis(100);
/// Local ACK timeout code: 4.3 s.
const ACK_TIMEOUT: u8 = 20;
/// Most connections of the program that both send to.
const CONNECTIONS_MAX: usize = 64;
/// Time for which that program waits for each further connection.
const PATIENCE: Duration = Duration::from_secs(3600);

#[derive(clap::Args, Debug)]
pub(in super::super) struct SinkArgs {
    #[arg(long)]
    listen: IpAddr,
    /// Bytes of the longest WRITE.
    #[arg(long)]
    bytes: u32,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(clap::Args, Debug)]
pub(in super::super) struct Args {
    #[arg(long)]
    bind: IpAddr,
    #[arg(long)]
    to: SocketAddr,
    #[arg(long)]
    connections: usize,
    /// Bytes of a WRITE.
    #[arg(long)]
    bytes: u32,
    /// Most WRITEs of a connection that are not complete.
    #[arg(long)]
    depth: u32,
    /// Post one WRITE at each such time, whatever has completed, instead of as many as the depth allows for.
    #[arg(long)]
    every_us: Option<u64>,
    /// Traffic class: the upper three bits of the DSCP.
    #[arg(long, default_value_t = 0)]
    class: u8,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Work of a program since its report before.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Report {
    /// Bytes of WRITEs that have completed.
    pub(super) bytes: u64,
    /// Times from when each WRITE of a heartbeat was to be posted to its completion, in ns.
    pub(super) latencies_ns: Vec<u64>,
}

/// Accepts connections, until it is killed; its device does the rest.
pub(in super::super) fn sink(args: &SinkArgs) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    args.device.apply()?;
    let device = Device::open(args.listen)?;
    let listener = device.listen(PORT)?;
    let pd = device.alloc_pd()?;
    let cq = device.create_cq(1)?;
    let region = region(&pd, args.bytes)?;
    let mut answer = [0; 12];
    answer[..8].copy_from_slice(&region.iova().to_be_bytes());
    answer[8..].copy_from_slice(&region.rkey().0.to_be_bytes());
    output::say("ready");
    let mut connected = Vec::new();
    while connected.len() < CONNECTIONS_MAX {
        let Some(connecting) = listener.accept(PATIENCE) else {
            continue;
        };
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        // A client that has given up is no reason to end.
        if let Ok(connection) = connecting.accept(&qp, &ConnectParams::default(), &answer) {
            connected.push((qp, connection));
        }
    }
    loop {
        std::thread::park();
    }
}

fn region(pd: &ProtectionDomain, bytes: u32) -> Result<MemoryRegion> {
    let memory = Arc::new(AnonymousMemory::shareable(bytes as usize).context("allocating the buffer")?);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    Ok(pd.reg_mr_all(memory.clone(), memory.address(), access)?)
}

/// Sends and reports until nobody reads the reports.
pub(in super::super) fn run(args: &Args) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    args.device.apply()?;
    let device = Device::open(args.bind)?;
    let mut sender = Sender::connect(&device, args)?;
    let mut report = Report::default();
    let mut reports_at = Instant::now() + PERIOD;
    loop {
        let waits_until = sender.post()?.unwrap_or(reports_at).min(reports_at);
        let left = waits_until.saturating_duration_since(Instant::now());
        sender.complete(left, &mut report)?;
        if Instant::now() < reports_at {
            continue;
        }
        reports_at += PERIOD;
        let mut line = serde_json::to_string(&std::mem::take(&mut report))?;
        line.push('\n');
        if std::io::stdout().write_all(line.as_bytes()).is_err() {
            return Ok(());
        }
    }
}

/// Connections, and what is posted on them.
struct Sender {
    qps: Vec<Peer>,
    _connections: Vec<Connection>,
    cq: CompletionQueue,
    region: MemoryRegion,
    bytes: u32,
    depth: usize,
    /// Of a heartbeat: the time of its next WRITE, and the time between two.
    next: Option<(Instant, Duration)>,
}

struct Peer {
    qp: QueuePair,
    va: u64,
    rkey: RKey,
    /// Times at which the WRITEs that have not completed were to be posted.
    posted: VecDeque<Instant>,
}

impl Sender {
    fn connect(device: &Device, args: &Args) -> Result<Sender> {
        let pd = device.alloc_pd()?;
        let entries = u32::try_from(args.connections)? * args.depth;
        let cq = device.create_cq(entries)?;
        let region = region(&pd, args.bytes)?;
        let params = ConnectParams {
            traffic_class: args.class << 5,
            // More than the bottleneck's queue takes.
            ack_timeout: Some(ACK_TIMEOUT),
            ..ConnectParams::default()
        };
        let options = QpOptions {
            max_send_wr: args.depth,
            ..QpOptions::new(&cq)
        };
        let (mut qps, mut connections) = (Vec::new(), Vec::new());
        for _ in 0..args.connections {
            let qp = pd.create_qp(&options)?;
            let connection = device.connect(&qp, args.to, &params, b"")?;
            let answer = connection.private_data();
            let short = "the answer is too short";
            let va = u64::from_be_bytes(*answer.first_chunk().context(short)?);
            let rkey = answer.get(8..).and_then(<[u8]>::first_chunk).context(short)?;
            qps.push(Peer {
                qp,
                va,
                rkey: RKey(u32::from_be_bytes(*rkey)),
                posted: VecDeque::new(),
            });
            connections.push(connection);
        }
        let every = args.every_us.map(Duration::from_micros);
        Ok(Sender {
            qps,
            _connections: connections,
            cq,
            region,
            bytes: args.bytes,
            depth: args.depth as usize,
            next: every.map(|every| (Instant::now(), every)),
        })
    }

    /// Posts what is to be posted now; returns when there will be more, unless that depends on completions.
    fn post(&mut self) -> Result<Option<Instant>> {
        for (number, peer) in self.qps.iter_mut().enumerate() {
            while peer.posted.len() < self.depth {
                let now = Instant::now();
                let at = match &mut self.next {
                    Some((next, _)) if *next > now => return Ok(Some(*next)),
                    Some((next, every)) => {
                        let at = *next;
                        *next += *every;
                        at
                    }
                    None => now,
                };
                peer.qp.post_send(SendRequest {
                    wr_id: number as u64,
                    operation: Operation::Write {
                        va: peer.va,
                        rkey: peer.rkey,
                        imm: None,
                    },
                    sges: self.region.sge(0, self.bytes).into(),
                    flags: SendFlags::SIGNALED,
                    to: Target::Connected,
                })?;
                peer.posted.push_back(at);
            }
        }
        Ok(None)
    }

    /// Waits for a completion, and takes all that there are.
    fn complete(&mut self, patience: Duration, report: &mut Report) -> Result<()> {
        let mut next = self.cq.wait(patience)?;
        while let Some(completion) = next {
            ensure!(
                completion.status == Status::Success,
                "the connection failed: {}",
                completion.status
            );
            let peer = self.qps.get_mut(completion.wr_id as usize);
            let at = peer.and_then(|peer| peer.posted.pop_front());
            let at = at.context("a completion of what was not posted")?;
            report.bytes += u64::from(self.bytes);
            if self.next.is_some() {
                report.latencies_ns.push(at.elapsed().as_nanos() as u64);
            }
            next = self.cq.poll();
        }
        Ok(())
    }
}
