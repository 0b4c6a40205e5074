//! Cost of UDP itself on this host: the floor that rdmux is measured against.
//!
//! The kind of socket is the one that RoCEv2 must use (unconnected, DF set), both sides spin, and each side is pinned
//! to a CPU of its own.

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use rdmux_soft::udp::{GSO_BYTES_MAX, GSO_SEGMENTS_MAX, Outgoing, RxBatch, RxSocket, TxSocket};
use rustix::net::{RecvFlags, SendFlags, recvfrom, sendto};

use super::pin;

/// Number of acknowledgements that the receiver of a stream sends per window.
const ACKS_PER_WINDOW: u64 = 8;

/// Message that one side of a ping-pong sends.
#[derive(Clone, Copy)]
pub(super) enum Message {
    /// A datagram of so many bytes, by `sendto`.
    Datagram(usize),
    /// A GSO train of two datagrams of so many bytes, by `sendmsg`.
    Train([u16; 2]),
}

/// Returns the median half round trip, in nanoseconds, between two spinning threads on `cpus`, by one call to send and one to receive and
/// nothing else. One side sends the first message, the other answers with the second.
pub(super) fn raw_udp_latency(
    ip: IpAddr,
    cpus: [usize; 2],
    [request, answer]: [Message; 2],
    rounds: usize,
) -> Result<u64> {
    let (near, far) = (SocketPair::new(ip)?, SocketPair::new(ip)?);
    let (near_addr, far_addr) = (near.rx.local_addr(), far.rx.local_addr());
    let warm_up = rounds / 10 + 1;
    let mut half_ns = thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<()> {
            pin(cpus[1])?;
            let mut far = far;
            for _ in 0..rounds + warm_up {
                far.receive()?;
                far.send(near_addr, answer)?;
            }
            Ok(())
        });
        let measure = scope.spawn(move || -> Result<Vec<u64>> {
            pin(cpus[0])?;
            let mut near = near;
            let mut half_ns = Vec::with_capacity(rounds);
            for round in 0..rounds + warm_up {
                let start = Instant::now();
                near.send(far_addr, request)?;
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
    Ok(half_ns.get(half_ns.len() / 2).copied().unwrap_or(0))
}

/// Returns the bytes of UDP payload that arrive per second of a stream of GSO trains of `segment_bytes`-byte datagrams from a thread on
/// `cpus[0]` to one on `cpus[1]`, for `time`, with at most a quarter of the receiver's buffer unacknowledged.
pub(super) fn raw_udp_bandwidth(
    ip: IpAddr,
    cpus: [usize; 2],
    segment_bytes: u16,
    time: Duration,
) -> Result<f64> {
    let segments = (GSO_BYTES_MAX / usize::from(segment_bytes).max(1)).clamp(1, GSO_SEGMENTS_MAX);
    let train_bytes = segments * usize::from(segment_bytes);
    let (near, far) = (SocketPair::new(ip)?, SocketPair::new(ip)?);
    let (near_addr, far_addr) = (near.rx.local_addr(), far.rx.local_addr());
    let window = (far.rx.buffer_bytes()? / 4).max(train_bytes) as u64;
    let stop = AtomicBool::new(false);

    thread::scope(|scope| {
        let stop = &stop;
        let receiver = scope.spawn(move || -> Result<u64> {
            pin(cpus[1])?;
            let (mut far, mut batch) = (far, RxBatch::new());
            let mut received = 0;
            // Every train carries the stream's length up to its end, so a loss does not stall the window.
            let (mut acknowledged, mut end) = (0, 0);
            while !stop.load(Relaxed) {
                far.rx.recv_batch(&mut batch)?;
                for datagram in batch.iter() {
                    received += datagram.bytes.len() as u64;
                    for head in datagram.segments().filter_map(|s| s.first_chunk()) {
                        end = end.max(u64::from_be_bytes(*head));
                    }
                }
                if end >= acknowledged + window / ACKS_PER_WINDOW {
                    acknowledged = end;
                    far.buffer[..8].copy_from_slice(&end.to_be_bytes());
                    far.send(near_addr, Message::Datagram(8))?;
                }
            }
            Ok(received)
        });
        let sender = scope.spawn(move || -> Result<Duration> {
            pin(cpus[0])?;
            let (mut near, mut batch) = (near, RxBatch::new());
            let (mut sent, mut acknowledged) = (0, 0);
            let start = Instant::now();
            let mut last_ack = start;
            loop {
                let now = Instant::now();
                if now - start > time {
                    return Ok(now - start);
                }
                if near.rx.recv_batch(&mut batch)? > 0 {
                    last_ack = now;
                    for head in batch.iter().filter_map(|d| d.bytes.first_chunk()) {
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
        let elapsed = join(sender);
        stop.store(true, Relaxed);
        let received = join(receiver)?;
        Ok(received as f64 / elapsed?.as_secs_f64())
    })
}

/// One side of a measurement.
struct SocketPair {
    rx: RxSocket,
    tx: TxSocket,
    buffer: Vec<u8>,
}

impl SocketPair {
    fn new(ip: IpAddr) -> io::Result<SocketPair> {
        Ok(SocketPair {
            rx: RxSocket::bind(SocketAddr::new(ip, 0), false)?,
            tx: TxSocket::bind(ip)?,
            buffer: vec![0; GSO_BYTES_MAX],
        })
    }

    fn send(&mut self, dst: SocketAddr, message: Message) -> Result<()> {
        match message {
            Message::Datagram(bytes) => {
                sendto(&self.tx, &self.buffer[..bytes], SendFlags::DONTWAIT, &dst)?;
            }
            Message::Train([first, last]) => {
                let parts = [IoSlice::new(
                    &self.buffer[..usize::from(first) + usize::from(last)],
                )];
                let train = Outgoing {
                    dst,
                    segment_size: Some(first),
                    tos: 0,
                    parts: &parts,
                };
                self.tx.send_batch(&[train]).map_err(|e| e.source)?;
            }
        }
        Ok(())
    }

    fn receive(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            // Reads the clock seldom: a reading costs a twentieth of a receive.
            for _ in 0..4096 {
                if recvfrom(&self.rx, &mut self.buffer[..], RecvFlags::DONTWAIT).is_ok() {
                    return Ok(());
                }
            }
            if Instant::now() > deadline {
                bail!("a datagram was lost");
            }
        }
    }
}

fn join<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    match thread.join() {
        Ok(result) => result,
        Err(_) => bail!("a measuring thread panicked"),
    }
}
