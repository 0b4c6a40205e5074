//! Writes captures: a thread takes what engines put into a bounded queue, makes whole packets of it and writes pcapng.

use std::fs::File;
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, SyncSender, TryRecvError, channel, sync_channel};
use std::time::{Duration, SystemTime};

use rdmux_capture::check::Checker;
use rdmux_capture::pcapng::{self, LinkType};
use rdmux_verbs::sync::Mutex;
use rdmux_wire::roce::icrc::{Flow, IdBasis};
use rdmux_wire::roce::{Bth, ICRC_LEN, NakCode, Packet, Syndrome, UDP_PORT, rnr_timer_ns};
use rustix::net::SendFlags;

/// Largest number of trains that wait to be written, and of their bytes: trains beyond that are dropped and counted.
const RECORDS_MAX: usize = 16 << 10;
const BYTES_MAX: usize = 64 << 20;
/// Number of bytes that are gathered before they are written.
const WRITE_BYTES: usize = 1 << 20;
/// Time that the end of a capture waits for the rest to be written.
const PATIENCE: Duration = Duration::from_secs(2);

/// Carrier of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carried {
    Udp,
    SharedMemory,
    /// None: the record is an event.
    Event,
}

/// A train of packets, or an event.
#[derive(Debug)]
pub(super) struct CaptureRecord {
    pub(super) at: SystemTime,
    pub(super) carried: Carried,
    /// Set when this side built it: packet `i` has identification `i`.
    pub(super) sent: bool,
    pub(super) flow: Flow,
    pub(super) traffic_class: u8,
    pub(super) segment_bytes: usize,
    pub(super) bytes: Box<[u8]>,
    /// Faults that were injected into it; for an event, its text.
    pub(super) note: Option<String>,
}

enum WriterMessage {
    Of(u32, CaptureRecord),
    /// Asks for all records before it to be in the file, with the counts.
    Sync(Sender<()>),
}

/// Counts of one device in a capture.
#[derive(Debug, Default)]
struct DeviceCounts {
    packets: AtomicU64,
    dropped: AtomicU64,
}

/// Devices of a capture, by their numbers in it: names and counts.
type Devices = Arc<Mutex<Vec<(String, Arc<DeviceCounts>)>>>;

/// Sending side of the queue to a capture's file. Each device holds one; the capture ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub(super) struct Writer {
    queue: SyncSender<WriterMessage>,
    /// Bytes in the queue.
    bytes: Arc<AtomicUsize>,
    devices: Devices,
}

/// Input of one device to a capture.
#[derive(Debug)]
pub(super) struct Input {
    writer: Writer,
    device: u32,
    counts: Arc<DeviceCounts>,
}

impl Writer {
    /// Starts the thread that writes the file. When all is written the thread sends the numbers of packets and of dropped packets to
    /// `done`, a socket, and closes it.
    pub(super) fn new(file: File, done: Option<OwnedFd>) -> io::Result<Writer> {
        let (queue, records) = sync_channel(RECORDS_MAX);
        let writer = Writer {
            queue,
            bytes: Arc::default(),
            devices: Devices::default(),
        };
        let mut out = Out {
            file,
            pending: Vec::new(),
            failed: false,
            bytes: writer.bytes.clone(),
            devices: writer.devices.clone(),
            written: Vec::new(),
            interfaces: 0,
        };
        pcapng::write_section(&mut out.pending);
        out.flush();
        if out.failed {
            return Err(io::Error::other("cannot write the capture file"));
        }
        rdmux_verbs::thread::spawn("rdmux-capture", move || {
            out.run(&records);
            if let Some(done) = done {
                let (packets, dropped) = out.counts();
                let counts = [packets.to_ne_bytes(), dropped.to_ne_bytes()].concat();
                // The process at the other end may have gone.
                let _ = rustix::net::send(&done, &counts, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            }
        })?;
        Ok(writer)
    }

    /// Adds a device to the capture.
    pub(super) fn input(&self, name: String) -> Input {
        let counts = Arc::new(DeviceCounts::default());
        let mut devices = self.devices.lock();
        devices.push((name, counts.clone()));
        Input {
            writer: self.clone(),
            device: devices.len() as u32 - 1,
            counts,
        }
    }
}

impl Input {
    /// Adds a record to the queue. Never waits: a record that finds no room is dropped and counted.
    pub(super) fn put(&self, record: CaptureRecord) {
        let packets = match record.carried {
            Carried::Event => 0,
            _ => record.bytes.len().div_ceil(record.segment_bytes.max(1)) as u64,
        };
        let bytes = record.bytes.len();
        self.counts.packets.fetch_add(packets, Relaxed);
        let writer = &self.writer;
        let fits = writer.bytes.fetch_add(bytes, Relaxed) + bytes <= BYTES_MAX;
        if !fits
            || writer
                .queue
                .try_send(WriterMessage::Of(self.device, record))
                .is_err()
        {
            writer.bytes.fetch_sub(bytes, Relaxed);
            self.counts.dropped.fetch_add(packets.max(1), Relaxed);
        }
    }

    /// Waits, for a limited time, until all records in the queue are in the file.
    pub(super) fn sync(&self) {
        let (done, wait) = channel();
        let mut message = WriterMessage::Sync(done);
        // The thread empties a full queue, unless the file takes nothing.
        for _ in 0..100 {
            match self.writer.queue.try_send(message) {
                Ok(()) => {
                    let _ = wait.recv_timeout(PATIENCE);
                    return;
                }
                Err(std::sync::mpsc::TrySendError::Full(back)) => message = back,
                Err(_) => return,
            }
            // A bounded channel does not notify the sender when it has room again.
            std::thread::sleep(PATIENCE / 100);
        }
    }
}

/// State of a device whose packets have been written.
struct Written {
    /// Interfaces of UDP, shared memory and events, once they exist.
    interfaces: [Option<u32>; 3],
    checker: Checker,
    bases: Vec<(usize, IdBasis)>,
}

/// State of the thread.
struct Out {
    file: File,
    pending: Vec<u8>,
    /// Set when the file can no longer be written; all further records are dropped.
    failed: bool,
    bytes: Arc<AtomicUsize>,
    devices: Devices,
    written: Vec<Written>,
    interfaces: u32,
}

impl Out {
    fn run(&mut self, records: &Receiver<WriterMessage>) {
        loop {
            let message = match records.try_recv() {
                Ok(message) => message,
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {
                    self.flush();
                    match records.recv() {
                        Ok(message) => message,
                        Err(_) => break,
                    }
                }
            };
            match message {
                WriterMessage::Of(device, record) => {
                    self.bytes.fetch_sub(record.bytes.len(), Relaxed);
                    self.write(device, &record);
                    if self.pending.len() >= WRITE_BYTES {
                        self.flush();
                    }
                }
                WriterMessage::Sync(done) => {
                    self.end();
                    let _ = done.send(());
                }
            }
        }
        self.end();
    }

    /// Writes the counts so far, and everything that is pending.
    fn end(&mut self) {
        let now = since_1970_ns(SystemTime::now());
        let devices = self.devices.lock();
        for (written, (_, counts)) in self.written.iter().zip(devices.iter()) {
            // Drops are counted for the device, not for its carriers.
            if let Some(interface) = written.interfaces.iter().flatten().next() {
                let (packets, dropped) = (counts.packets.load(Relaxed), counts.dropped.load(Relaxed));
                pcapng::write_statistics(&mut self.pending, *interface, now, packets, dropped);
            }
        }
        drop(devices);
        self.flush();
    }

    fn flush(&mut self) {
        if !self.failed && self.file.write_all(&self.pending).is_err() {
            self.failed = true;
        }
        self.pending.clear();
    }

    /// Returns the numbers of packets that were captured, and of those that are not in the file.
    fn counts(&self) -> (u64, u64) {
        let devices = self.devices.lock();
        let sum = |count: fn(&DeviceCounts) -> &AtomicU64| {
            devices.iter().map(|(_, c)| count(c).load(Relaxed)).sum()
        };
        let (packets, dropped): (u64, u64) = (sum(|c| &c.packets), sum(|c| &c.dropped));
        if self.failed {
            (packets, packets)
        } else {
            (packets, dropped)
        }
    }

    fn interface(&mut self, device: u32, carried: Carried) -> u32 {
        let devices = self.devices.lock();
        while self.written.len() <= device as usize {
            self.written.push(Written {
                interfaces: [None; 3],
                checker: Checker::new(),
                bases: Vec::new(),
            });
        }
        let slot = &mut self.written[device as usize].interfaces[carried as usize];
        if let Some(known) = *slot {
            return known;
        }
        let name = devices.get(device as usize).map_or("", |(name, _)| name);
        let (link, what) = match carried {
            Carried::Udp => (LinkType::ETHERNET, "udp"),
            Carried::SharedMemory => (LinkType::ETHERNET, "shm"),
            Carried::Event => (LinkType::UPPER_PDU, "events"),
        };
        pcapng::write_interface(&mut self.pending, link, Some(&format!("{name} {what}")));
        *slot = Some(self.interfaces);
        self.interfaces += 1;
        self.interfaces - 1
    }

    fn write(&mut self, device: u32, record: &CaptureRecord) {
        let interface = self.interface(device, record.carried);
        let at = since_1970_ns(record.at);
        let mut frame = Vec::new();
        if record.carried == Carried::Event {
            let text = record.note.as_deref().unwrap_or("");
            pcapng::write_text(&mut frame, text);
            let len = frame.len() as u32;
            return pcapng::write_packet(&mut self.pending, interface, at, len, &frame, Some(text));
        }
        let flow = &record.flow;
        for (i, bytes) in record.bytes.chunks(record.segment_bytes.max(1)).enumerate() {
            let mut packet = bytes.to_vec();
            let written = &mut self.written[device as usize];
            let mut notes: Vec<String> = record.note.iter().cloned().collect();
            let ip_id = match (record.carried, packet.len().checked_sub(ICRC_LEN)) {
                (_, None) => 0,
                (_, Some(end)) if end < Bth::LEN => 0,
                // A packet in shared memory has no ICRC.
                (Carried::SharedMemory, Some(end)) => {
                    let icrc = flow.icrc(&packet[..end], 0);
                    packet[end..].copy_from_slice(&icrc.to_le_bytes());
                    0
                }
                (_, Some(_)) if record.sent => i as u16,
                (_, Some(_)) => written.solve(flow, &packet).unwrap_or_else(|| {
                    notes.push("ICRC is wrong".into());
                    0
                }),
            };
            frame.clear();
            pcapng::write_ethernet(&mut frame, flow.src, flow.dst);
            pcapng::write_ip_udp(&mut frame, flow, ip_id, record.traffic_class, &packet);
            let before = written.checker.report().retransmissions;
            written.checker.packet(LinkType::ETHERNET, &frame);
            if written.checker.report().retransmissions > before {
                notes.push("retransmission".into());
            }
            notes.extend(refusal(&packet));
            let comment = notes.join("; ");
            let comment = (!comment.is_empty()).then_some(comment.as_str());
            let len = frame.len() as u32;
            pcapng::write_packet(&mut self.pending, interface, at, len, &frame, comment);
        }
    }
}

impl Written {
    /// Returns the IPv4 identification with which a packet was sent: no socket shows it, but the packet's ICRC covers it. Returns `None`
    /// when no identification explains the ICRC.
    fn solve(&mut self, flow: &Flow, packet: &[u8]) -> Option<u16> {
        let (covered, icrc) = packet.split_last_chunk::<ICRC_LEN>()?;
        let icrc = u32::from_le_bytes(*icrc);
        let difference = flow.icrc(covered, 0) ^ icrc;
        if difference == 0 {
            return Some(0);
        }
        if flow.src.is_ipv6() {
            return None;
        }
        if let Some((_, basis)) = self.bases.iter().find(|(len, _)| *len == packet.len())
            && let Some(id) = basis.solve(difference)
        {
            return Some(id);
        }
        let basis = IdBasis::new(packet.len());
        let id = basis.solve(difference);
        if self.bases.len() < 64 {
            self.bases.push((packet.len(), basis));
        }
        // The kernel's endpoint computes the ICRC of a FLUSH in its own way.
        id.or_else(|| {
            let difference = flow.rxe_flush_icrc(covered, 0) ^ icrc;
            IdBasis::of_rxe_flush(packet.len()).solve(difference)
        })
    }
}

/// Describes a NAK; returns `None` for any other packet.
fn refusal(packet: &[u8]) -> Option<String> {
    let packet = Packet::parse(packet).ok()?;
    let psn = packet.bth.psn.value();
    Some(match packet.aeth()?.syndrome {
        Syndrome::Ack { .. } => return None,
        Syndrome::RnrNak { timer } => {
            let us = rnr_timer_ns(timer) / 1_000;
            format!("RNR NAK: PSN {psn} found no receive, retry in {us} us")
        }
        Syndrome::Nak(NakCode::PsnSequence) => format!("NAK: PSN {psn} is missing"),
        Syndrome::Nak(NakCode::InvalidRequest) => format!("NAK: PSN {psn} is an invalid request"),
        Syndrome::Nak(NakCode::RemoteAccess) => {
            format!("NAK: PSN {psn} was denied: key, bounds or rights")
        }
        Syndrome::Nak(NakCode::RemoteOperation) => format!("NAK: PSN {psn} failed at the responder"),
    })
}

fn since_1970_ns(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}

/// Returns the addresses and ports of a packet to port 4791, as far as the ICRC covers them.
pub(super) fn flow(src: IpAddr, src_port: u16, dst: IpAddr) -> Flow {
    Flow {
        src,
        dst,
        src_port,
        dst_port: UDP_PORT,
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use std::io::Read;
    use std::time::Instant;

    use super::*;

    fn record(bytes: usize) -> CaptureRecord {
        CaptureRecord {
            at: SystemTime::now(),
            carried: Carried::SharedMemory,
            sent: true,
            flow: flow([10, 0, 0, 1].into(), 0xc001, [10, 0, 0, 2].into()),
            traffic_class: 0,
            segment_bytes: 1024,
            bytes: vec![0; bytes].into(),
            note: None,
        }
    }

    #[test]
    fn put__never_waits_and_counts_what_is_dropped() {
        // A file that nobody reads.
        let (mut reader, file) = io::pipe().unwrap();
        let (mut done, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let writer = Writer::new(OwnedFd::from(file).into(), Some(theirs.into())).unwrap();
        let input = writer.input("10.0.0.1/3".into());
        const RECORDS: u64 = 3000;
        let since = Instant::now();
        for _ in 0..RECORDS {
            input.put(record(32 << 10));
        }
        let took = since.elapsed();
        let dropped = input.counts.dropped.load(Relaxed);
        assert!(dropped > 32 * 900, "{dropped} dropped");
        println!("{took:?}");
        drop((input, writer));
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).unwrap();
        let mut counts = [0; 16];
        done.read_exact(&mut counts).unwrap();
        let told: Vec<u64> = counts
            .as_chunks::<8>()
            .0
            .iter()
            .map(|n| u64::from_ne_bytes(*n))
            .collect();
        assert_eq!(told, [RECORDS * 32, dropped]);
        let written = pcapng::Reader::new(&bytes).unwrap().filter(Result::is_ok).count() as u64;
        assert_eq!(written + dropped, RECORDS * 32);
        // The last block holds the number of packets, and how many of them are missing.
        let mut expected = Vec::new();
        pcapng::write_statistics(&mut expected, 0, 0, RECORDS * 32, dropped);
        assert_eq!(bytes[bytes.len() - expected.len() + 20..], expected[20..]);
    }
}
