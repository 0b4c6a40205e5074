//! Fault injection: a device whose port misbehaves as [`rdmux_rnic::faults`] specifies. Each direction decides on its packets one by one,
//! independently of the other; packets that are held back wait here as copies.

use std::collections::BTreeMap;
use std::net::IpAddr;

use rdmux_rnic::faults::{Fate, LATE_NS_MAX, Line, Spec, Stream, damage, dest_qpn, late_ns};
use rdmux_rnic::{Arrival, Path, Qpn, Time};
use rdmux_verbs::{AsyncEvent, FaultCounts};
use rdmux_wire::roce::icrc::Flow;
use rdmux_wire::roce::{Bth, ICRC_LEN};

use super::udp::ROCE_PORT;

/// Largest number of bytes that are held back in each direction; further packets are lost, as in a switch whose queue is full.
const HELD_BYTES_MAX: usize = 16 << 20;

/// A packet on its way out.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) path: Path,
    /// Set when it has no ICRC: it goes through memory of this host, or not at all.
    pub(super) local: bool,
    /// Set when its bytes were changed: it is not sent through memory of this host, where no ICRC would show the damage.
    pub(super) damaged: bool,
    pub(super) bytes: Vec<u8>,
}

/// A packet on its way in.
#[derive(Debug)]
pub(super) struct Arriving {
    src: IpAddr,
    src_port: u16,
    dst: IpAddr,
    traffic_class: u8,
    local: bool,
    bytes: Vec<u8>,
}

impl Arriving {
    fn of(arrival: &Arrival<'_>) -> Arriving {
        Arriving {
            src: arrival.src,
            src_port: arrival.src_port,
            dst: arrival.dst,
            traffic_class: arrival.traffic_class,
            local: arrival.local,
            bytes: arrival.bytes.to_vec(),
        }
    }

    pub(super) fn arrival(&self) -> Arrival<'_> {
        Arrival {
            src: self.src,
            src_port: self.src_port,
            dst: self.dst,
            traffic_class: self.traffic_class,
            bytes: &self.bytes,
            segment_bytes: self.bytes.len(),
            local: self.local,
        }
    }

    /// Damages the packet. One that came through memory has no ICRC: it gets the right one first, so that the damage shows.
    fn damage(&mut self, draw: u64) {
        if let Some(end) = self.bytes.len().checked_sub(ICRC_LEN)
            && self.local
            && end >= Bth::LEN
        {
            let flow = Flow {
                src: self.src,
                dst: self.dst,
                src_port: self.src_port,
                dst_port: ROCE_PORT,
            };
            let icrc = flow.icrc(&self.bytes[..end], 0);
            self.bytes[end..].copy_from_slice(&icrc.to_le_bytes());
        }
        self.local = false;
        damage(&mut self.bytes, draw);
    }
}

/// Packets that are held back, by the time at which they go on.
#[derive(Debug)]
struct Held<T> {
    /// Each with its number of bytes; those of equal time in the order in which they came.
    packets: BTreeMap<(Time, u64), (usize, T)>,
    next: u64,
    bytes: usize,
}

impl<T> Held<T> {
    fn new() -> Held<T> {
        Held {
            packets: BTreeMap::new(),
            next: 0,
            bytes: 0,
        }
    }

    /// Holds a packet back until `at`. Returns false if there is no room.
    fn put(&mut self, at: Time, bytes: usize, packet: T) -> bool {
        if self.bytes + bytes > HELD_BYTES_MAX {
            return false;
        }
        self.bytes += bytes;
        self.next += 1;
        self.packets.insert((at, self.next), (bytes, packet));
        true
    }

    fn due(&self) -> Option<Time> {
        self.packets.first_key_value().map(|((at, _), _)| *at)
    }

    fn take(&mut self, now: Time) -> Option<T> {
        let first = self.packets.first_entry().filter(|first| first.key().0 <= now)?;
        let (bytes, packet) = first.remove();
        self.bytes -= bytes;
        Some(packet)
    }
}

/// The port of a device that misbehaves.
#[derive(Debug)]
pub(super) struct Faults {
    spec: Spec,
    opened: Time,
    out: Line,
    into: Line,
    for_queue_pairs: Line,
    leaving: Held<Leaving>,
    arriving: Held<Arriving>,
    /// Time when the port next goes down or up.
    change: Option<Time>,
    is_down: bool,
    pub(super) counts: FaultCounts,
}

impl Faults {
    pub(super) fn new(spec: Spec, opened: Time) -> Faults {
        let (from, to) = spec.down_ns;
        Faults {
            spec,
            opened,
            change: (from < to).then(|| opened + from),
            out: Line::new(spec, Stream::Sent),
            into: Line::new(spec, Stream::Received),
            for_queue_pairs: Line::new(spec, Stream::ForQueuePairs),
            leaving: Held::new(),
            arriving: Held::new(),
            is_down: false,
            counts: FaultCounts::default(),
        }
    }

    /// Returns the event that the port has gone down, or up: once each.
    pub(super) fn port_event(&mut self, now: Time) -> Option<AsyncEvent> {
        self.change.filter(|at| *at <= now)?;
        self.is_down = !self.is_down;
        let (_, to) = self.spec.down_ns;
        self.change = (self.is_down && to < u64::MAX).then(|| self.opened + to);
        Some(if self.is_down {
            AsyncEvent::PortError
        } else {
            AsyncEvent::PortActive
        })
    }

    pub(super) fn is_down(&self) -> bool {
        self.is_down
    }

    /// Returns the time when the next packet goes on or the port changes.
    pub(super) fn due(&self) -> Option<Time> {
        let times = [self.leaving.due(), self.arriving.due(), self.change];
        times.into_iter().flatten().min()
    }

    pub(super) fn has_leaving(&self) -> bool {
        self.leaving.due().is_some()
    }

    /// Takes a packet that the engine sends; returns its fate.
    pub(super) fn leave(&mut self, now: Time, path: &Path, local: bool, packet: &[u8]) -> Fate {
        let is_down = self.spec.is_down(now.since_ns(self.opened));
        let fate = decide(&mut self.out, &mut self.counts, is_down, packet);
        if fate.lost {
            return fate;
        }
        let mut leaving = Leaving {
            path: *path,
            local,
            damaged: false,
            bytes: packet.to_vec(),
        };
        if let Some(draw) = fate.corrupted {
            damage(&mut leaving.bytes, draw);
            leaving.damaged = true;
        }
        let at = self.out.passes(now, packet.len()) + fate.delay_ns;
        if let Some(part) = fate.duplicated {
            let copy = Leaving {
                bytes: leaving.bytes.clone(),
                ..leaving
            };
            self.leaving
                .put(at + late_ns(part, LATE_NS_MAX), packet.len(), copy);
        }
        let at = at + fate.reordered.map_or(0, |part| late_ns(part, LATE_NS_MAX));
        self.put(fate, |faults| faults.leaving.put(at, packet.len(), leaving))
    }

    /// Returns a packet that may go out now.
    pub(super) fn next_leaving(&mut self, now: Time) -> Option<Leaving> {
        self.leaving.take(now)
    }

    /// Takes a packet that arrives; returns its fate.
    pub(super) fn arrive(&mut self, now: Time, arrival: &Arrival<'_>) -> Fate {
        let is_down = self.spec.is_down(now.since_ns(self.opened));
        let fate = decide(&mut self.into, &mut self.counts, is_down, arrival.bytes);
        if fate.lost {
            return fate;
        }
        let len = arrival.bytes.len();
        let mut arriving = Arriving::of(arrival);
        if let Some(draw) = fate.corrupted {
            arriving.damage(draw);
        }
        let at = self.into.passes(now, len) + fate.delay_ns;
        if let Some(part) = fate.duplicated {
            let copy = Arriving::of(&arriving.arrival());
            self.arriving.put(at + late_ns(part, LATE_NS_MAX), len, copy);
        }
        let at = at + fate.reordered.map_or(0, |part| late_ns(part, LATE_NS_MAX));
        self.put(fate, |faults| faults.arriving.put(at, len, arriving))
    }

    /// Returns a packet that may come in now.
    pub(super) fn next_arriving(&mut self, now: Time) -> Option<Arriving> {
        self.arriving.take(now)
    }

    /// Returns the queue pair that an arriving packet puts in error, if it does so.
    pub(super) fn fails(&mut self, packet: &[u8]) -> Option<Qpn> {
        self.spec.qp_error?;
        let qpn = dest_qpn(packet)?;
        let fails = qpn != Qpn::GSI && qpn != Qpn::MULTICAST && self.for_queue_pairs.next_qp_error();
        self.counts.qp_errors += u64::from(fails);
        fails.then_some(qpn)
    }

    /// Holds a packet back; one that finds no room is lost.
    fn put(&mut self, fate: Fate, put: impl FnOnce(&mut Faults) -> bool) -> Fate {
        if put(self) {
            return fate;
        }
        self.counts.lost += 1;
        Fate {
            lost: true,
            ..Fate::default()
        }
    }
}

/// Draws the fate of a packet. A packet at a port that is down gets a number too.
fn decide(line: &mut Line, counts: &mut FaultCounts, is_down: bool, packet: &[u8]) -> Fate {
    let mut fate = Fate::default();
    if line.spec().concerns(packet) {
        fate = line.next_fate();
    }
    if is_down {
        fate = Fate {
            lost: true,
            ..Fate::default()
        };
    }
    counts.packets += 1;
    counts.lost += u64::from(fate.lost);
    counts.corrupted += u64::from(fate.corrupted.is_some());
    counts.duplicated += u64::from(fate.duplicated.is_some());
    counts.reordered += u64::from(fate.reordered.is_some());
    fate
}
