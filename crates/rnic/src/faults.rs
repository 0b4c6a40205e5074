//! Injected network faults: the faults of a packet are a function of a seed and the packet's number. This module does no I/O and
//! reads no clock, so that the `soft` provider and the simulator inject the same faults.
//!
//! [`Spec`] describes the faults, [`Line`] decides on them for one direction of one port, and [`damage`] corrupts a packet.
//!
//! # Syntax
//! Items separated by commas, each kind at most once; `rdmux --fault` and the environment variable `RDMUX_FAULT` take the same syntax:
//!
//! ```text
//! loss=P        so many packets are lost                                     P: percent, as 1% or 0.05%
//! dup=P         so many arrive a second time, up to 1 ms later
//! reorder=P     so many are held back for up to 1 ms, and overtaken
//! corrupt=P     so many arrive with changed bytes, or cut
//! delay=T       every packet takes so much longer; delay=T..T draws between  T: number and unit: ns, us, ms or s
//! rate=R        a port sends and receives so fast                            R: number and unit: kbit, Mbit, Gbit or Tbit, a second
//! rnr=P         so many requests that need a receive get RNR NAK though one is there
//! down=T..T     the port is down from .. to, counted from when the device was opened; down=T.. for good
//! qp-error=P    so many packets that arrive put their queue pair in error
//! qp-error=N    the Nth packet that arrives for a queue pair puts that in error
//! only=cm       loss, dup, reorder, corrupt and delay are for CM messages    default: for all packets
//! seed=N        another sequence of decisions                                default: 1
//! ```

use std::fmt;
use std::str::FromStr;

use rdmux_wire::Qpn;

use crate::time::Time;

/// Longest time for which a packet is held back so that others overtake it, and longest delay of a second copy.
pub const LATE_NS_MAX: u64 = 1_000_000;

/// Bytes of a packet on the wire around the UDP payload, for [`Spec::rate_bps`]: Ethernet's preamble, header, checksum and gap, IPv4, UDP.
const WIRE_BYTES: u64 = 8 + 14 + 4 + 12 + 20 + 8;

/// Packets that put a queue pair in error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QpError {
    /// Each packet that arrives for a queue pair, with this probability in percent.
    Percent(f64),
    /// The packet with this number, counted from 1.
    At(u64),
}

/// The packets to which [`Spec::loss`], [`Spec::dup`], [`Spec::reorder`], [`Spec::corrupt`] and [`Spec::delay_ns`] apply. Others
/// pass, and have no number in the sequence of decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Only {
    /// All packets.
    #[default]
    All,
    /// Messages of connection management: packets for a general services QP. IBTA Vol 1, 13.4.
    Cm,
}

/// A specification of faults; the default is a network without any. Parsed from the syntax that the module's documentation shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spec {
    /// Seed of all decisions.
    pub seed: u64,
    /// Packets lost, in percent.
    pub loss: f64,
    /// Packets that arrive a second time, in percent.
    pub dup: f64,
    /// Packets held back, in percent.
    pub reorder: f64,
    /// Packets with changed bytes, in percent.
    pub corrupt: f64,
    /// Least and most additional delay of a packet, in ns.
    pub delay_ns: (u64, u64),
    /// Bits a second in each direction.
    pub rate_bps: Option<u64>,
    /// Requests that need a receive and are answered as if there were none, in percent.
    pub rnr: f64,
    /// Start and end of the time in which the port is down, in ns since the device was opened.
    pub down_ns: (u64, u64),
    /// Packets that put a queue pair in error.
    pub qp_error: Option<QpError>,
    /// Packets that may be lost, duplicated, held back, damaged and delayed.
    pub only: Only,
}

impl Spec {
    /// Returns whether the faults apply to a packet.
    pub fn concerns(&self, packet: &[u8]) -> bool {
        match self.only {
            Only::All => true,
            Only::Cm => dest_qpn(packet) == Some(Qpn::GSI),
        }
    }

    /// Returns whether the port is down so long after the device was opened.
    pub fn is_down(&self, elapsed_ns: u64) -> bool {
        let (from, to) = self.down_ns;
        (from..to).contains(&elapsed_ns)
    }
}

impl Default for Spec {
    fn default() -> Spec {
        Spec {
            seed: 1,
            loss: 0.0,
            dup: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay_ns: (0, 0),
            rate_bps: None,
            rnr: 0.0,
            down_ns: (0, 0),
            qp_error: None,
            only: Only::All,
        }
    }
}

/// Returns the QPN that a packet is for, damaged or not. IBTA Vol 1, 9.2.
pub fn dest_qpn(packet: &[u8]) -> Option<Qpn> {
    let &[high, middle, low] = packet.get(5..8)? else {
        return None;
    };
    Some(Qpn::new(u32::from_be_bytes([0, high, middle, low])))
}

/// Error of parsing a [`Spec`]: the part that is wrong, and the values that are allowed there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SpecError(String);

/// All kinds, as an error lists them.
const KINDS: &str = "loss, dup, reorder, corrupt, delay, rate, rnr, down, qp-error, only and seed";

const TIMES: [(&str, f64); 4] = [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)];
const RATES: [(&str, f64); 4] = [("kbit", 1e3), ("Mbit", 1e6), ("Gbit", 1e9), ("Tbit", 1e12)];

impl FromStr for Spec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Spec, SpecError> {
        let mut spec = Spec::default();
        let mut seen: Vec<&str> = Vec::new();
        for item in text.split(',').map(str::trim) {
            let bad = |allowed: &str| SpecError(format!("'{item}': {allowed}"));
            let Some((kind, value)) = item.split_once('=') else {
                return Err(bad(&format!("give KIND=VALUE; kinds are {KINDS}")));
            };
            let (kind, value) = (kind.trim(), value.trim());
            if seen.contains(&kind) {
                return Err(bad(&format!("{kind} is given twice")));
            }
            let percent = || percent(value).ok_or_else(|| bad("give 0% to 100%, such as loss=0.5%"));
            match kind {
                "loss" => spec.loss = percent()?,
                "dup" => spec.dup = percent()?,
                "reorder" => spec.reorder = percent()?,
                "corrupt" => spec.corrupt = percent()?,
                "rnr" => spec.rnr = percent()?,
                "delay" => {
                    let delay = match value.split_once("..") {
                        Some((least, most)) => time(least).zip(time(most)),
                        None => time(value).map(|both| (both, both)),
                    };
                    let in_order = delay.filter(|(least, most)| least <= most);
                    spec.delay_ns =
                        in_order.ok_or_else(|| bad("give a time, or two: delay=5ms, delay=1ms..20ms"))?;
                }
                "rate" => {
                    spec.rate_bps =
                        Some(parse_rate(value).ok_or_else(|| {
                            bad("give bits per second, at least 1kbit, such as rate=100Mbit")
                        })?);
                }
                "down" => {
                    let window = value.split_once("..").and_then(|(from, to)| {
                        let to = if to.is_empty() { Some(u64::MAX) } else { time(to) };
                        Some((time(from)?, to?))
                    });
                    let window = window.filter(|(from, to)| from < to);
                    spec.down_ns = window
                        .ok_or_else(|| bad("give a period, such as down=2s..5s, or down=2s.. without end"))?;
                }
                "qp-error" => {
                    let error = if value.ends_with('%') {
                        self::percent(value).map(QpError::Percent)
                    } else {
                        value.parse().ok().filter(|n| *n > 0).map(QpError::At)
                    };
                    spec.qp_error = Some(error.ok_or_else(|| {
                        bad("give a packet number or a percentage, such as qp-error=1000 or qp-error=0.1%")
                    })?);
                }
                "only" => {
                    spec.only = match value {
                        "cm" => Only::Cm,
                        _ => return Err(bad("give only=cm, for only CM messages")),
                    }
                }
                "seed" => {
                    spec.seed = value
                        .parse()
                        .map_err(|_| bad("give a whole number, such as seed=7"))?
                }
                _ => return Err(bad(&format!("unknown kind; kinds are {KINDS}"))),
            }
            seen.push(kind);
        }
        Ok(spec)
    }
}

fn percent(text: &str) -> Option<f64> {
    let value: f64 = text.strip_suffix('%')?.trim_end().parse().ok()?;
    (0.0..=100.0).contains(&value).then_some(value)
}

fn time(text: &str) -> Option<u64> {
    number(text, &TIMES)
}

/// Parses a rate, such as `25Gbit`: a number with the unit kbit, Mbit, Gbit or Tbit, a second. Returns bits per second, at least 1,000.
pub fn parse_rate(text: &str) -> Option<u64> {
    number(text, &RATES).filter(|bps| *bps >= 1_000)
}

/// Parses a number with one of these units, and returns it in the smallest of them.
fn number(text: &str, units: &[(&str, f64)]) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (value, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    let value = value.trim_end().parse::<f64>().ok()? * factor;
    (0.0..1e18).contains(&value).then_some(value as u64)
}

impl fmt::Display for Spec {
    /// Writes the specification in the syntax that it is parsed from; leaves out defaults, but not the seed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (kind, percent) in [
            ("loss", self.loss),
            ("dup", self.dup),
            ("reorder", self.reorder),
            ("corrupt", self.corrupt),
            ("rnr", self.rnr),
        ] {
            if percent > 0.0 {
                write!(f, "{kind}={percent}%,")?;
            }
        }
        match self.delay_ns {
            (0, 0) => {}
            (least, most) if least == most => write!(f, "delay={least}ns,")?,
            (least, most) => write!(f, "delay={least}ns..{most}ns,")?,
        }
        if let Some(bps) = self.rate_bps {
            write!(f, "rate={}kbit,", bps as f64 / 1e3)?;
        }
        match self.down_ns {
            (from, to) if from >= to => {}
            (from, u64::MAX) => write!(f, "down={from}ns..,")?,
            (from, to) => write!(f, "down={from}ns..{to}ns,")?,
        }
        match self.qp_error {
            None => {}
            Some(QpError::Percent(percent)) => write!(f, "qp-error={percent}%,")?,
            Some(QpError::At(number)) => write!(f, "qp-error={number},")?,
        }
        match self.only {
            Only::All => {}
            Only::Cm => write!(f, "only=cm,")?,
        }
        write!(f, "seed={}", self.seed)
    }
}

/// Faults of one packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// True when the packet is lost; the other fields mean nothing then.
    pub lost: bool,
    /// Argument of [`damage`] when the packet arrives damaged.
    pub corrupted: Option<u64>,
    /// Additional delay of a second copy, in 2^-64 of the longest ([`late_ns`]), when the packet arrives twice.
    pub duplicated: Option<u64>,
    /// Additional delay, in 2^-64 of the longest ([`late_ns`]), when other packets overtake the packet.
    pub reordered: Option<u64>,
    /// Additional delay by [`Spec::delay_ns`], in ns.
    pub delay_ns: u64,
}

/// Returns the additional delay that `part`, [`Fate::duplicated`] or [`Fate::reordered`], stands for: that many 2^-64 of
/// `late_ns_max`.
pub fn late_ns(part: u64, late_ns_max: u64) -> u64 {
    below(part, late_ns_max.saturating_add(1))
}

/// Independent decisions about a packet: a higher share of one kind must not change the decisions of the others.
#[derive(Clone, Copy)]
enum What {
    Loss,
    Dup,
    Late,
    Reorder,
    Corrupt,
    Damage,
    Delay,
    Rnr,
    QpError,
}

/// The directions of a port, and other packets that are counted apart: each stream has a sequence of decisions of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Packets that are sent.
    Sent,
    /// Packets that arrive.
    Received,
    /// Requests that need a receive.
    Receives,
    /// Packets that arrive for queue pairs.
    ForQueuePairs,
}

/// Decides on the faults of the packets of one direction, one after the other.
#[derive(Clone, Debug)]
pub struct Line {
    spec: Spec,
    stream: Stream,
    /// Number of packets so far.
    number: u64,
    /// Time at which the packets so far have been sent, at the rate.
    free: Time,
}

impl Line {
    /// Creates a line that has carried no packet.
    pub fn new(spec: Spec, stream: Stream) -> Line {
        Line {
            spec,
            stream,
            number: 0,
            free: Time(0),
        }
    }

    /// Returns the specification.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    fn draw(&self, what: What) -> u64 {
        let parts = [self.spec.seed, self.stream as u64, self.number, what as u64];
        parts.into_iter().fold(0, |state, part| mix(state ^ part))
    }

    fn strikes(&self, what: What, percent: f64) -> bool {
        // The upper 53 bits, which a double has.
        percent > 0.0 && (self.draw(what) >> 11) as f64 * 100.0 < percent * (1u64 << 53) as f64
    }

    /// Decides on the faults of the next packet.
    pub fn next_fate(&mut self) -> Fate {
        let percent = self.spec.loss;
        self.next_fate_with_loss(percent)
    }

    /// As [`Line::next_fate`], with `percent` in place of [`Spec::loss`].
    pub fn next_fate_with_loss(&mut self, percent: f64) -> Fate {
        self.number += 1;
        if self.strikes(What::Loss, percent) {
            return Fate {
                lost: true,
                ..Fate::default()
            };
        }
        let spec = &self.spec;
        let drawn = |what, percent, amount| self.strikes(what, percent).then(|| self.draw(amount));
        let (least, most) = spec.delay_ns;
        Fate {
            lost: false,
            corrupted: drawn(What::Corrupt, spec.corrupt, What::Damage),
            duplicated: drawn(What::Dup, spec.dup, What::Late),
            reordered: drawn(What::Reorder, spec.reorder, What::Late),
            delay_ns: least + below(self.draw(What::Delay), (most - least).saturating_add(1)),
        }
    }

    /// Returns the time at which a packet of so many bytes (UDP payload) that comes now has passed, by the rate alone.
    pub fn passes(&mut self, now: Time, bytes: usize) -> Time {
        let Some(bps) = self.spec.rate_bps else { return now };
        let bits = (WIRE_BYTES + bytes as u64) * 8;
        let ns = u128::from(bits) * 1_000_000_000 / u128::from(bps);
        self.free = self.free.max(now) + ns as u64;
        self.free
    }

    /// Returns whether the next request that needs a receive is to be answered as if there were none.
    pub fn next_rnr(&mut self) -> bool {
        self.number += 1;
        self.strikes(What::Rnr, self.spec.rnr)
    }

    /// Returns whether the next packet for a queue pair puts that in error.
    pub fn next_qp_error(&mut self) -> bool {
        self.number += 1;
        match self.spec.qp_error {
            None => false,
            Some(QpError::At(number)) => number == self.number,
            Some(QpError::Percent(percent)) => self.strikes(What::QpError, percent),
        }
    }
}

/// Damages a packet as networks do: flips one bit or several, changes a run of bytes, or cuts off its end, as `draw` decides.
pub fn damage(packet: &mut Vec<u8>, draw: u64) {
    if packet.is_empty() {
        return;
    }
    let mut state = draw;
    let mut next = move || {
        state = mix(state);
        state
    };
    let bits = packet.len() as u64 * 8;
    match below(next(), 4) {
        kind @ (0 | 1) => {
            let first = below(next(), bits);
            flip(packet, first);
            // Flips bits other than the first one, so that the damaged packet differs from the original.
            for _ in 0..kind * below(next(), 8) {
                let other = (first + 1 + below(next(), bits - 1)) % bits;
                flip(packet, other);
            }
        }
        2 => {
            let at = below(next(), packet.len() as u64) as usize;
            let end = (at + 1 + below(next(), 32) as usize).min(packet.len());
            for byte in &mut packet[at..end] {
                *byte ^= 1 + below(next(), 255) as u8;
            }
        }
        _ => packet.truncate(below(next(), packet.len() as u64) as usize),
    }
}

fn flip(packet: &mut [u8], bit: u64) {
    packet[(bit / 8) as usize] ^= 1 << (bit % 8);
}

/// Maps a draw to `0..n`.
fn below(draw: u64, n: u64) -> u64 {
    ((u128::from(draw) * u128::from(n)) >> 64) as u64
}

/// The step and the finalizer of SplitMix64.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> Spec {
        text.parse().unwrap()
    }

    #[test]
    fn parse__every_kind() {
        let found = spec(
            "loss=1%, dup=2%,reorder=0.5 %,corrupt=0%,delay=1ms..1.5ms,rate=100Mbit,rnr=5%,down=2s..,qp-error=7,only=cm,seed=9",
        );
        let expected = Spec {
            seed: 9,
            loss: 1.0,
            dup: 2.0,
            reorder: 0.5,
            corrupt: 0.0,
            delay_ns: (1_000_000, 1_500_000),
            rate_bps: Some(100_000_000),
            rnr: 5.0,
            down_ns: (2_000_000_000, u64::MAX),
            qp_error: Some(QpError::At(7)),
            only: Only::Cm,
        };
        assert_eq!(found, expected);
        assert_eq!(spec(&found.to_string()), found, "{found}");
        let other = spec("delay=5us,down=100ms..1s,qp-error=0.1%");
        assert_eq!(other.delay_ns, (5_000, 5_000));
        assert_eq!(spec(&other.to_string()), other, "{other}");
    }

    #[test]
    fn parse__errors_name_the_part_and_what_is_allowed() {
        for (text, part, allowed) in [
            ("", "''", "give KIND=VALUE; kinds are loss, dup"),
            ("loss", "'loss'", "give KIND=VALUE"),
            ("loss=1", "'loss=1'", "0% to 100%"),
            ("loss=101%", "'loss=101%'", "0% to 100%"),
            ("dup=nan%", "'dup=nan%'", "0% to 100%"),
            ("loss=1%,,seed=2", "''", "give KIND=VALUE"),
            ("loss=1%,loss=2%", "'loss=2%'", "loss is given twice"),
            ("seed=1,delay=5", "'delay=5'", "delay=5ms"),
            ("delay=5ms..1ms", "'delay=5ms..1ms'", "delay=1ms..20ms"),
            ("rate=10", "'rate=10'", "rate=100Mbit"),
            ("down=5s", "'down=5s'", "down=2s..5s"),
            ("down=5s..5s", "'down=5s..5s'", "down=2s..5s"),
            ("qp-error=0", "'qp-error=0'", "qp-error=1000"),
            ("only=rtu", "'only=rtu'", "only=cm"),
            ("seed=-1", "'seed=-1'", "a whole number"),
            ("lose=1%", "'lose=1%'", "unknown kind; kinds are loss"),
        ] {
            let error = text.parse::<Spec>().unwrap_err().to_string();
            assert!(
                error.starts_with(part) && error.contains(allowed),
                "{text}: {error}"
            );
            assert_eq!(error.lines().count(), 1);
        }
    }

    #[test]
    fn next_fate__of_the_seed_the_stream_and_the_number() {
        let text = "loss=10%,dup=10%,reorder=10%,corrupt=10%,delay=1us..9us";
        let fates = |text: &str, stream| {
            let mut line = Line::new(spec(text), stream);
            (0..1000).map(|_| line.next_fate()).collect::<Vec<_>>()
        };
        let sent = fates(text, Stream::Sent);
        assert_eq!(fates(text, Stream::Sent), sent);
        assert_ne!(fates(text, Stream::Received), sent);
        assert_ne!(fates(&format!("{text},seed=2"), Stream::Sent), sent);
        // A higher share of one kind leaves the other decisions as they were.
        let more = fates(
            "loss=10%,dup=90%,reorder=10%,corrupt=10%,delay=1us..9us",
            Stream::Sent,
        );
        for (more, less) in more.iter().zip(&sent) {
            let without = |fate: &Fate| Fate {
                duplicated: None,
                ..*fate
            };
            assert_eq!(without(more), without(less));
        }
    }

    #[test]
    fn next_fate__as_many_as_asked_for() {
        let mut line = Line::new(spec("loss=20%,dup=5%,reorder=50%,corrupt=1%"), Stream::Sent);
        let fates: Vec<Fate> = (0..100_000).map(|_| line.next_fate()).collect();
        let count = |is_it: &dyn Fn(&Fate) -> bool| fates.iter().filter(|fate| is_it(fate)).count();
        for (found, of_kept) in [
            (count(&|fate| fate.duplicated.is_some()), 0.05),
            (count(&|fate| fate.reordered.is_some()), 0.5),
            (count(&|fate| fate.corrupted.is_some()), 0.01),
            (count(&|fate| !fate.lost), 1.0),
        ] {
            let expected = 80_000.0 * of_kept;
            assert!(
                (found as f64 - expected).abs() < 0.1 * expected,
                "{found} {expected}"
            );
        }
    }

    #[test]
    fn concerns__packets_for_the_general_services_qp_where_cm_alone_is_asked_for() {
        let for_qp = |low| [0x64, 0, 0xff, 0xff, 0, 0, 0, low, 0, 0, 0, 0];
        for (text, cm, others) in [("loss=1%", true, true), ("loss=1%,only=cm", true, false)] {
            assert_eq!(spec(text).concerns(&for_qp(1)), cm, "{text}");
            assert_eq!(spec(text).concerns(&for_qp(2)), others, "{text}");
            assert_eq!(spec(text).concerns(&[0; 7]), others, "{text}");
        }
    }

    #[test]
    fn passes__at_the_rate() {
        let mut line = Line::new(spec("rate=1Mbit"), Stream::Sent);
        let bytes = 1250 - WIRE_BYTES as usize;
        assert_eq!(line.passes(Time(0), bytes), Time(10_000_000));
        assert_eq!(line.passes(Time(0), bytes), Time(20_000_000));
        assert_eq!(line.passes(Time(100_000_000), bytes), Time(110_000_000));
    }

    #[test]
    fn damage__changes_the_packet() {
        let packet: Vec<u8> = (0..200).collect();
        for draw in 0..10_000 {
            let mut damaged = packet.clone();
            damage(&mut damaged, draw);
            assert_ne!(damaged, packet, "draw {draw}");
            assert!(damaged.len() <= packet.len());
        }
    }
}
