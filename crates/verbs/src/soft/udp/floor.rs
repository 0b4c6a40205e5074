//! What UDP itself costs on this host: the floor that the `soft` provider is measured against.
//!
//! The kind of socket is the one that RoCEv2 must use (unconnected, DF set), both sides spin, and each side is pinned
//! to a CPU of its own.

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags};
use rustix::thread::CpuSet;

use super::{GSO_BYTES_MAX, GSO_SEGMENTS_MAX, Outgoing, RxBatch, RxSocket, SendError, TxSocket};

/// Half round trips.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Latency {
    /// The median.
    pub p50_ns: u64,
    /// The 99th percentile.
    pub p99_ns: u64,
}

/// A one-way stream under a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Bytes of UDP payload that arrived, per second.
    pub bytes_per_s: f64,
    /// Bytes that were sent and did not arrive.
    pub lost_bytes: u64,
    /// Bytes that a receive returned on average.
    pub bytes_per_receive: u64,
}

/// Which calls carry the ping-pong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// `sendto` and `recvfrom`, nothing else: the floor.
    Plain,
    /// [`TxSocket::send_batch`] and [`RxSocket::recv_batch`], one datagram at a time.
    Batch,
}

/// The half round trip of `bytes`-byte datagrams between two spinning threads on `cpus`, over `rounds` round trips.
///
/// # Errors
/// Those of the sockets; `TimedOut` when a datagram gets lost.
pub fn raw_udp_latency(
    ip: IpAddr,
    cpus: [usize; 2],
    bytes: usize,
    rounds: usize,
    calls: Calls,
) -> io::Result<Latency> {
    let near = End::new(ip, calls)?;
    let far = End::new(ip, calls)?;
    let (near_addr, far_addr) = (near.rx.local_addr(), far.rx.local_addr());
    let warm_up = rounds / 10 + 1;
    let mut half_ns = thread::scope(|scope| {
        let echo = scope.spawn(move || -> io::Result<()> {
            pin(cpus[1])?;
            let mut far = far;
            for _ in 0..rounds + warm_up {
                far.receive()?;
                far.send(near_addr, bytes)?;
            }
            Ok(())
        });
        let measure = scope.spawn(move || -> io::Result<Vec<u64>> {
            pin(cpus[0])?;
            let mut near = near;
            let mut half_ns = Vec::with_capacity(rounds);
            for round in 0..rounds + warm_up {
                let start = Instant::now();
                near.send(far_addr, bytes)?;
                near.receive()?;
                if round >= warm_up {
                    half_ns.push(start.elapsed().as_nanos() as u64 / 2);
                }
            }
            Ok(half_ns)
        });
        let half_ns = join(measure);
        join(echo)?;
        half_ns
    })?;
    half_ns.sort_unstable();
    let at = |percent: usize| half_ns.get(half_ns.len() * percent / 100).copied().unwrap_or(0);
    Ok(Latency {
        p50_ns: at(50),
        p99_ns: at(99),
    })
}

/// One side of a ping-pong.
struct End {
    rx: RxSocket,
    tx: TxSocket,
    batch: RxBatch,
    buffer: Vec<u8>,
    calls: Calls,
}

impl End {
    fn new(ip: IpAddr, calls: Calls) -> io::Result<Self> {
        Ok(Self {
            rx: RxSocket::bind(SocketAddr::new(ip, 0), false)?,
            tx: TxSocket::bind(ip)?,
            batch: RxBatch::new(),
            buffer: vec![0; GSO_BYTES_MAX],
            calls,
        })
    }

    fn send(&mut self, dst: SocketAddr, bytes: usize) -> io::Result<()> {
        match self.calls {
            Calls::Plain => {
                rustix::net::sendto(&self.tx, &self.buffer[..bytes], SendFlags::DONTWAIT, &dst)?;
            }
            Calls::Batch => {
                let parts = [IoSlice::new(&self.buffer[..bytes])];
                let one = Outgoing {
                    dst,
                    segment_size: None,
                    tos: 0,
                    parts: &parts,
                };
                self.tx.send_batch(&[one]).map_err(|e: SendError| e.source)?;
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            // The clock is looked at seldom: it costs a twentieth of a receive.
            for _ in 0..4096 {
                let received = match self.calls {
                    Calls::Plain => {
                        rustix::net::recvfrom(&self.rx, &mut self.buffer[..], RecvFlags::DONTWAIT).is_ok()
                    }
                    Calls::Batch => self.rx.recv_batch(&mut self.batch)? > 0,
                };
                if received {
                    return Ok(());
                }
            }
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }
}

/// A stream of GSO trains of `segment_bytes`-byte datagrams from a thread on `cpus[0]` to one on `cpus[1]`, for `time`,
/// with at most `window_bytes` unacknowledged (by default a quarter of the receiver's buffer).
///
/// # Errors
/// Those of the sockets.
pub fn raw_udp_bandwidth(
    ip: IpAddr,
    cpus: [usize; 2],
    segment_bytes: u16,
    window_bytes: Option<usize>,
    time: Duration,
) -> io::Result<Bandwidth> {
    /// The receiver acknowledges when this part of the window has arrived.
    const ACKS_PER_WINDOW: usize = 8;

    let segments = (GSO_BYTES_MAX / usize::from(segment_bytes).max(1)).clamp(1, GSO_SEGMENTS_MAX);
    let train_bytes = segments * usize::from(segment_bytes);
    let near = End::new(ip, Calls::Batch)?;
    let far = End::new(ip, Calls::Batch)?;
    let (near_addr, far_addr) = (near.rx.local_addr(), far.rx.local_addr());
    let window = window_bytes
        .unwrap_or(far.rx.buffer_bytes()? / 4)
        .max(train_bytes) as u64;
    let stop = AtomicBool::new(false);

    thread::scope(|scope| {
        let stop = &stop;
        let receiver = scope.spawn(move || -> io::Result<(u64, u64)> {
            pin(cpus[1])?;
            let mut far = far;
            let (mut received, mut receives) = (0, 0_u64);
            // Every train carries the stream's length up to its end, so a loss does not stall the window.
            let (mut acknowledged, mut end) = (0, 0);
            while !stop.load(Relaxed) {
                far.rx.recv_batch(&mut far.batch)?;
                for datagram in far.batch.iter() {
                    received += datagram.bytes.len() as u64;
                    receives += 1;
                    for head in datagram.segments().filter_map(|s| s.first_chunk()) {
                        end = end.max(u64::from_be_bytes(*head));
                    }
                }
                if end >= acknowledged + window / ACKS_PER_WINDOW as u64 {
                    acknowledged = end;
                    far.buffer[..8].copy_from_slice(&end.to_be_bytes());
                    far.send(near_addr, 8)?;
                }
            }
            Ok((received, receives))
        });
        let sender = scope.spawn(move || -> io::Result<(u64, Duration)> {
            pin(cpus[0])?;
            let mut near = near;
            let (mut sent, mut acknowledged) = (0, 0);
            let start = Instant::now();
            let mut last_ack = start;
            loop {
                let now = Instant::now();
                if now - start > time {
                    return Ok((sent, now - start));
                }
                if near.rx.recv_batch(&mut near.batch)? > 0 {
                    last_ack = now;
                    for head in near.batch.iter().filter_map(|d| d.bytes.first_chunk()) {
                        acknowledged = acknowledged.max(u64::from_be_bytes(*head));
                    }
                } else if now - last_ack > Duration::from_millis(20) {
                    (last_ack, acknowledged) = (now, sent);
                }
                if sent + train_bytes as u64 > acknowledged + window {
                    continue;
                }
                let end = sent + train_bytes as u64;
                for segment in near.buffer[..train_bytes].chunks_mut(usize::from(segment_bytes)) {
                    if let Some(head) = segment.first_chunk_mut() {
                        *head = end.to_be_bytes();
                    }
                }
                let parts = [IoSlice::new(&near.buffer[..train_bytes])];
                let train = Outgoing {
                    dst: far_addr,
                    segment_size: Some(segment_bytes),
                    tos: 0,
                    parts: &parts,
                };
                if near.tx.send_batch(&[train]).map_err(|e| e.source)? == 1 {
                    sent = end;
                }
            }
        });
        let outcome = join(sender);
        stop.store(true, Relaxed);
        let received = join(receiver)?;
        let (sent, elapsed) = outcome?;
        Ok(Bandwidth {
            bytes_per_s: received.0 as f64 / elapsed.as_secs_f64(),
            lost_bytes: sent.saturating_sub(received.0),
            bytes_per_receive: received.0 / received.1.max(1),
        })
    })
}

/// Pins the calling thread, which may not outlive the measurement: its affinity is not given back.
fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    Ok(())
}

fn join<T>(thread: thread::ScopedJoinHandle<'_, io::Result<T>>) -> io::Result<T> {
    thread
        .join()
        .map_err(|_| io::Error::other("a measuring thread panicked"))?
}
