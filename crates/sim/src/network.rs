//! Hosts around one switch. Every wire has a rate. Each port of the switch has a queue that drops packets that do not fit and,
//! where configured, marks packets that wait long (ECN, by the thresholds of RED).

use std::collections::BTreeMap;
use std::net::IpAddr;

use rdmux_rnic::dcqcn::Parameters;
use rdmux_rnic::{Arrival, Config, ECN_MARKED, Rnic, Time, Traffic, TransmitBuf};

use crate::dice::Dice;

/// Bytes of a packet on the wire around the UDP payload: Ethernet's preamble, header, checksum and gap, IPv4, UDP.
const WIRE_BYTES: u64 = 8 + 14 + 4 + 12 + 20 + 8;
/// Bytes that a host's network interface takes at once before it asks the host for more.
const INTERFACE_BYTES: usize = 32 << 10;

/// Properties of all wires and ports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkProperties {
    /// Rate of every wire.
    pub bits_per_second: u64,
    /// Round-trip time over idle wires, without the time that sending a packet takes.
    pub round_trip_ns: u64,
    /// Packets lost at random, in percent.
    pub loss_percent: f64,
    /// Bytes that a port of the switch holds.
    pub queue_bytes_max: u64,
    /// Thresholds at which ports mark packets, if they do.
    pub marking: Option<Marking>,
}

/// RED: ports mark no packet that finds less than `begin_bytes` before it, up to `percent_max` of the packets at `full_bytes`,
/// and all beyond that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Marking {
    /// Kmin.
    pub begin_bytes: u64,
    /// Kmax.
    pub full_bytes: u64,
    /// Pmax, in percent.
    pub percent_max: f64,
}

impl LinkProperties {
    fn wire_ns(&self, udp_payload_bytes: usize) -> u64 {
        (WIRE_BYTES + udp_payload_bytes as u64) * 8 * 1_000_000_000 / self.bits_per_second
    }
}

#[derive(Debug)]
struct Packet {
    from: usize,
    to: usize,
    src_port: u16,
    tos: u8,
    bytes: Vec<u8>,
}

#[derive(Debug)]
enum Happening {
    /// A host's interface has sent everything given to it.
    InterfaceFree(usize),
    /// A packet has arrived at the switch.
    Switch(Packet),
    Arrive(Packet),
}

/// A device and its wire.
pub(crate) struct Host {
    pub(crate) rnic: Rnic,
    pub(crate) address: IpAddr,
    /// Time at which its interface has sent everything given to it.
    interface_free: Time,
    /// Time at which the switch's port towards it has sent everything that it holds.
    port_free: Time,
}

/// Counts of the switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switched {
    /// Packets that came to it.
    pub packets: u64,
    /// Packets lost at random.
    pub lost: u64,
    /// Packets that found a full queue.
    pub dropped: u64,
    /// Packets marked.
    pub marked: u64,
    /// The longest queue of any port, in bytes.
    pub queue_bytes_max: u64,
}

pub(crate) struct Network {
    pub(crate) now: Time,
    pub(crate) hosts: Vec<Host>,
    pub(crate) switched: Switched,
    link: LinkProperties,
    agenda: BTreeMap<(Time, u64), Happening>,
    next: u64,
    dice: Dice,
    buf: TransmitBuf,
}

impl Network {
    pub(crate) fn new(seed: u64, link: LinkProperties, hosts: u8) -> Network {
        let mut dice = Dice::new(seed, 4);
        let traffic = Traffic {
            congestion: Some(Parameters {
                line_bps: link.bits_per_second,
                ..Parameters::default()
            }),
            ..Traffic::default()
        };
        let hosts = (1..=hosts).map(|n| {
            let address = IpAddr::from([10, 0, 0, n]);
            let mut seed = [0; 32];
            dice.fill(&mut seed);
            Host {
                rnic: Rnic::new(Config {
                    address,
                    slot: n,
                    seed,
                    guid: n.into(),
                    gsi_src_port: 0xc000,
                    receive_window_bytes: 1 << 20,
                    traffic,
                    mtu: 4096,
                }),
                address,
                interface_free: Time(0),
                port_free: Time(0),
            }
        });
        Network {
            now: Time(1),
            hosts: hosts.collect(),
            switched: Switched::default(),
            link,
            agenda: BTreeMap::new(),
            next: 0,
            dice,
            buf: TransmitBuf::new(INTERFACE_BYTES, true),
        }
    }

    /// Calls verbs of a host, and sends what they want to send.
    pub(crate) fn with<R>(&mut self, host: usize, f: impl FnOnce(&mut Rnic, Time) -> R) -> R {
        let result = f(&mut self.hosts[host].rnic, self.now);
        self.transmit(host);
        result
    }

    /// Lets the next event happen, and returns the host that it happened to; `None` when nothing happens before `end`.
    pub(crate) fn step(&mut self, end: Time) -> Option<usize> {
        let timers = self.hosts.iter().map(|host| host.rnic.poll_timeout());
        let timers = timers.enumerate().filter_map(|(host, at)| Some((at?, host)));
        let timer = timers.min().filter(|(at, _)| *at < end);
        let planned = self.agenda.first_key_value().map(|(key, _)| key.0);
        let planned = planned.filter(|at| *at < end);
        if let Some((at, host)) = timer
            && planned.is_none_or(|planned| at < planned)
        {
            self.now = self.now.max(at);
            self.hosts[host].rnic.handle_timeout(self.now);
            self.transmit(host);
            return Some(host);
        }
        planned?;
        let ((at, _), happening) = self.agenda.pop_first()?;
        self.now = at;
        let host = match happening {
            Happening::InterfaceFree(host) => host,
            Happening::Switch(packet) => {
                let from = packet.from;
                self.switch(packet);
                return Some(from);
            }
            Happening::Arrive(packet) => {
                let arrival = Arrival {
                    src: self.hosts[packet.from].address,
                    src_port: packet.src_port,
                    dst: self.hosts[packet.to].address,
                    traffic_class: packet.tos,
                    bytes: &packet.bytes,
                    segment_bytes: packet.bytes.len(),
                    local: false,
                };
                self.hosts[packet.to].rnic.handle_arrival(self.now, &arrival);
                packet.to
            }
        };
        self.transmit(host);
        Some(host)
    }

    fn plan(&mut self, at: Time, happening: Happening) {
        self.next += 1;
        self.agenda.insert((at, self.next), happening);
    }

    /// Gives a host's interface the packets that the host wants to send, once the interface has sent all earlier ones.
    fn transmit(&mut self, from: usize) {
        if self.hosts[from].interface_free > self.now {
            return;
        }
        let mut buf = std::mem::replace(&mut self.buf, TransmitBuf::new(0, false));
        buf.clear();
        self.hosts[from].rnic.poll_transmit(self.now, &mut buf, true);
        let mut free = self.now;
        for train in buf.trains() {
            let to = self.hosts.iter().position(|host| host.address == train.path.dst);
            for bytes in buf.bytes()[train.range.clone()].chunks(train.segment_bytes) {
                free = free + self.link.wire_ns(bytes.len());
                let Some(to) = to else { continue };
                let packet = Packet {
                    from,
                    to,
                    src_port: train.path.src_port,
                    tos: train.path.traffic_class,
                    bytes: bytes.to_vec(),
                };
                self.plan(free + self.link.round_trip_ns / 4, Happening::Switch(packet));
            }
        }
        if free > self.now {
            self.hosts[from].interface_free = free;
            self.plan(free, Happening::InterfaceFree(from));
        }
        self.buf = buf;
    }

    fn switch(&mut self, mut packet: Packet) {
        self.switched.packets += 1;
        if self.dice.percent(self.link.loss_percent) {
            self.switched.lost += 1;
            return;
        }
        let free = self.hosts[packet.to].port_free.max(self.now);
        let waits_ns = free.since_ns(self.now);
        let waiting = (u128::from(waits_ns) * u128::from(self.link.bits_per_second) / 8_000_000_000) as u64;
        let with_this = waiting + WIRE_BYTES + packet.bytes.len() as u64;
        if with_this > self.link.queue_bytes_max {
            self.switched.dropped += 1;
            return;
        }
        self.switched.queue_bytes_max = self.switched.queue_bytes_max.max(with_this);
        if packet.tos & ECN_MARKED != 0 && self.marks(waiting) {
            packet.tos |= ECN_MARKED;
            self.switched.marked += 1;
        }
        let sent = free + self.link.wire_ns(packet.bytes.len());
        self.hosts[packet.to].port_free = sent;
        self.plan(sent + self.link.round_trip_ns / 4, Happening::Arrive(packet));
    }

    fn marks(&mut self, waiting_bytes: u64) -> bool {
        let Some(marking) = self.link.marking else {
            return false;
        };
        if waiting_bytes >= marking.full_bytes {
            return true;
        }
        let above = waiting_bytes.saturating_sub(marking.begin_bytes) as f64;
        let span = (marking.full_bytes - marking.begin_bytes) as f64;
        above > 0.0 && self.dice.percent(marking.percent_max * above / span)
    }
}
