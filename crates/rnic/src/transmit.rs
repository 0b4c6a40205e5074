//! Outgoing packets, gathered into trains that one system call can send.
//!
//! A train is a sequence of packets to one destination that have the length of the first packet, except for the last, which may be
//! shorter: the form that UDP segmentation offload requires. The kernel numbers the IPv4 identification of its segments from 0, so the
//! ICRC of packet *i* of a train is computed with identification *i*.

use std::net::IpAddr;
use std::ops::Range;

use rdmux_wire::Psn;
use rdmux_wire::roce::icrc::Flow;
use rdmux_wire::roce::{Bth, ICRC_LEN, LINK_HEADERS, UDP_PORT};

use crate::probes::word24;
use crate::qp::read_ahead::ReadAhead;

/// Maximum packets of a train: the segment limit of older kernels.
pub const TRAIN_PACKETS_MAX: usize = 64;
/// Maximum bytes of a train: the largest UDP payload over IPv4.
pub const TRAIN_BYTES_MAX: usize = 65_507;

/// Bytes of BTH and the longest extension headers, rounded up.
const HEADERS_MAX: usize = 64;
/// Maximum pad bytes of a packet.
const PAD_MAX: usize = 3;

/// Path of a QP's packets: the address vector of IBTA Vol 1, 11.2.2.1, reduced to what RoCEv2 needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Path {
    /// Own address.
    pub src: IpAddr,
    /// The peer's address.
    pub dst: IpAddr,
    /// UDP source port; covered by the ICRC, otherwise arbitrary.
    pub src_port: u16,
    /// Traffic class (IPv6) or TOS (IPv4): DSCP and ECN. The DSCP chooses the QP's class here ([`crate::sched::class_of`]). The device
    /// sets ECN towards rdmux peers, and sends it unchanged towards other peers.
    pub traffic_class: u8,
}

/// ECN field of a packet whose sender reacts to marks: ECT(0). RFC 3168.
pub const ECN_CAPABLE: u8 = 0b10;
/// ECN field of a packet that was marked on its way: CE. RFC 3168.
pub const ECN_MARKED: u8 = 0b11;

impl Path {
    /// Returns whether packets on this path never leave the host.
    pub fn is_loopback(&self) -> bool {
        self.src == self.dst || self.src.is_loopback() || self.dst.is_loopback()
    }

    /// Returns whether a link that has this path MTU, and no more, carries a packet of `len` bytes before the ICRC.
    pub(crate) fn carries(&self, len: usize, mtu: u32) -> bool {
        let ip_and_udp = if self.dst.is_ipv4() { 20 + 8 } else { 40 + 8 };
        ip_and_udp + len + ICRC_LEN <= (mtu + LINK_HEADERS) as usize
    }

    /// Returns the fields of this path that the ICRC covers.
    pub fn flow(&self) -> Flow {
        Flow {
            src: self.src,
            dst: self.dst,
            src_port: self.src_port,
            dst_port: UDP_PORT,
        }
    }
}

/// A train inside of a [`TransmitBuf`].
#[derive(Clone, Debug)]
pub struct Train {
    /// Destination.
    pub path: Path,
    /// The train's bytes in [`TransmitBuf::bytes`].
    pub range: Range<usize>,
    /// Bytes of each packet but the last.
    pub segment_bytes: usize,
    /// Number of packets.
    pub packets: usize,
    /// Set for a train that goes through memory of this host and nowhere else: its packets have no ICRC.
    pub local: bool,
    closed: bool,
}

/// A buffer that the engine fills with trains.
#[derive(Debug)]
pub struct TransmitBuf {
    /// Grows to the largest size ever used and is not cleared between uses: most of a packet is overwritten anyway.
    bytes: Vec<u8>,
    used: usize,
    trains: Vec<Train>,
    limit_bytes: usize,
    /// Offset at which the current quantum ends.
    quantum_end: usize,
    /// Set until the buffer is cleared: see [`TransmitBuf::stop`].
    stopped: bool,
    /// Bytes of this quantum that did not come into the buffer, since a ring took them.
    charged: usize,
    /// Set while pushed packets go through memory of this host.
    local: bool,
    train_packets_max: usize,
    /// Bytes read ahead for later packets of this quantum.
    pub(crate) ahead: ReadAhead,
    /// Acknowledgement that the next suitable request packet of this quantum takes along ([`rdmux_wire::roce::carried`]).
    pub(crate) carried: Option<Psn>,
}

impl TransmitBuf {
    /// Returns a buffer for up to `limit_bytes`; with `gso` false every train is one packet.
    pub fn new(limit_bytes: usize, gso: bool) -> TransmitBuf {
        TransmitBuf {
            bytes: Vec::new(),
            used: 0,
            trains: Vec::with_capacity(64),
            limit_bytes,
            quantum_end: usize::MAX,
            stopped: false,
            charged: 0,
            local: false,
            train_packets_max: if gso { TRAIN_PACKETS_MAX } else { 1 },
            ahead: ReadAhead::default(),
            carried: None,
        }
    }

    /// Empties the buffer.
    pub fn clear(&mut self) {
        self.used = 0;
        self.stopped = false;
        self.trains.clear();
    }

    /// Returns the trains in the order in which they must be sent.
    pub fn trains(&self) -> &[Train] {
        &self.trains
    }

    /// Returns all bytes; the trains refer to ranges of them.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.used]
    }

    /// Returns whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.trains.is_empty()
    }

    /// Returns whether the buffer, or the current quantum, has reached its limit.
    pub fn is_full(&self) -> bool {
        self.stopped || self.used >= self.limit_bytes.min(self.quantum_end)
    }

    /// Returns the bytes left until the buffer is full.
    pub(crate) fn room(&self) -> usize {
        self.limit_bytes.min(self.quantum_end).saturating_sub(self.used)
    }

    /// Returns whether a packet of this many bytes fills the buffer.
    pub(crate) fn is_filled_by(&self, bytes: u32) -> bool {
        bytes as usize >= self.room()
    }

    /// Limits the buffer to another `bytes` until [`TransmitBuf::end_quantum`]. With `local` set, the packets of this quantum go through
    /// memory of this host.
    pub(crate) fn begin_quantum(&mut self, bytes: u32, local: bool) {
        self.quantum_end = self.used + bytes as usize;
        self.charged = 0;
        self.local = local;
    }

    /// Takes no more packets until the buffer is cleared: what follows goes by a ring, and must not overtake those in the buffer.
    pub(crate) fn stop(&mut self) {
        self.stopped = true;
    }

    /// Charges bytes that a ring took to the quantum.
    pub(crate) fn charge(&mut self, bytes: usize) {
        self.charged += bytes;
        self.quantum_end = self.quantum_end.saturating_sub(bytes);
    }

    /// Returns the bytes that were charged to the last quantum.
    pub(crate) fn charged(&self) -> usize {
        self.charged
    }

    /// Lifts the limit of the quantum.
    pub(crate) fn end_quantum(&mut self) {
        self.quantum_end = usize::MAX;
        self.local = false;
    }

    /// Returns whether a packet of `total` bytes, ICRC included, joins the last train.
    fn joins(&self, path: &Path, total: usize) -> bool {
        self.trains.last().is_some_and(|t| {
            !t.closed
                && t.local == self.local
                && t.path == *path
                && total <= t.segment_bytes
                && t.packets < self.train_packets_max
                && t.range.len() + total <= TRAIN_BYTES_MAX
        })
    }

    /// Returns whether a packet of `len` bytes before the ICRC stays in its train if it grows by `more`.
    pub(crate) fn may_grow(&self, path: &Path, len: usize, more: usize) -> bool {
        let total = len + ICRC_LEN;
        !self.joins(path, total) || self.joins(path, total + more)
    }

    /// Makes every later train one packet: the system cannot segment.
    pub fn disable_gso(&mut self) {
        self.train_packets_max = 1;
    }

    /// Adds a packet of `len` bytes before the ICRC. `fill` writes the packet, and this function adds the ICRC. If `fill` fails, no
    /// packet is added.
    pub(crate) fn push<E>(
        &mut self,
        path: &Path,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.push_with_icrc(path, len, Flow::icrc, fill)
    }

    /// Like [`TransmitBuf::push`], with a caller-supplied ICRC function of the packet and its IPv4 identification.
    pub(crate) fn push_with_icrc<E>(
        &mut self,
        path: &Path,
        len: usize,
        icrc: impl FnOnce(&Flow, &[u8], u16) -> u32,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let total = len + ICRC_LEN;
        let start = self.used;
        if self.bytes.len() < start + total {
            self.bytes.resize(start + total, 0);
        }
        let packet = &mut self.bytes[start..start + len];
        // Reserved header fields and the pad must be zero; `fill` writes the payload between them.
        let (headers, pad) = (len.min(HEADERS_MAX), len.saturating_sub(PAD_MAX));
        packet[..headers].fill(0);
        packet[pad..].fill(0);
        fill(packet)?;
        self.used = start + total;
        let joins = self.joins(path, total);
        let index = if joins {
            self.trains.last().map_or(0, |t| t.packets)
        } else {
            0
        };
        debug_assert!(len >= Bth::LEN);
        let icrc = if self.local {
            0
        } else {
            icrc(&path.flow(), &self.bytes[start..start + len], index as u16)
        };
        self.bytes[start + len..start + total].copy_from_slice(&icrc.to_le_bytes());
        let packet = &self.bytes[start..start + total];
        probe!(packet_out, word24(packet, 5), word24(packet, 9), packet[0], total);
        if joins && let Some(train) = self.trains.last_mut() {
            train.range.end = start + total;
            train.packets += 1;
            train.closed = total < train.segment_bytes;
        } else {
            let range = start..start + total;
            self.trains.push(Train {
                path: *path,
                range,
                segment_bytes: total,
                packets: 1,
                local: self.local,
                closed: false,
            });
        }
        Ok(())
    }
}
