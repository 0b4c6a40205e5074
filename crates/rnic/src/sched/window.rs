//! Bytes that a shared QP may have in flight: as many as its path carries, since whatever is posted beyond waits in the device, in front
//! of all that is picked later.
//!
//! The window is rate x minimum round trip + one piece, as measured from the QP's own completions (the model of BBR, Cardwell et al.,
//! "BBR: Congestion-Based Congestion Control", ACM Queue 2016). The piece lets the rate grow where the path carries more. Below
//! that, the window is halved when even the fastest piece of a round trip waited for longer than a target, because others use
//! the device as well, and increased by a piece otherwise.

use super::piece::{PIECE_BYTES_MAX, PIECE_BYTES_MIN};
use crate::time::Time;

/// Time for which a minimum or maximum counts at least; after twice that time it counts no more. Then the next piece is posted alone,
/// because a minimum is seen only when nothing waits.
pub(super) const EPOCH_NS: u64 = 100_000_000;
/// The same in round trips, for long paths: a piece that is posted alone costs up to three.
pub(super) const EPOCH_ROUND_TRIPS: f64 = 300.0;

/// Bounds of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLimits {
    /// Smallest window in bytes. A piece may always be sent when nothing is in flight.
    pub bytes_min: u32,
    /// Largest window in bytes.
    pub bytes_max: u32,
    /// Window before anything is measured.
    pub bytes_initial: u32,
    /// Time in nanoseconds that the fastest piece of a round trip may wait in the device for pieces of others.
    pub target_ns: u64,
    /// Rate of the device in bits per second; 0 if it is not known. QPs that share the device then count their share of the rate for it, and
    /// each lets the others wait for longer.
    pub device_bps: u64,
}

impl Default for WindowLimits {
    fn default() -> WindowLimits {
        WindowLimits {
            bytes_min: PIECE_BYTES_MIN,
            bytes_max: 16 << 20,
            bytes_initial: 2 * PIECE_BYTES_MAX,
            // That of Justitia (Zhang et al., NSDI 2022).
            target_ns: 2_000,
            device_bps: 0,
        }
    }
}

/// A piece in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "every piece ends with `Window::completed` or `Window::lost`"]
pub struct InFlight {
    bytes: u32,
    posted: Time,
    /// Bytes that had completed then, and the round trip.
    completed: u64,
    round: u64,
    /// Set when the window was full then, or filled since the piece before.
    limited: bool,
}

/// Round trip of a piece of so many bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundTrip {
    pub(super) ns: f64,
    pub(super) bytes: f64,
}

impl RoundTrip {
    /// Returns the round trip without the time in which the piece is sent. That may be negative if the rate is estimated too low; what
    /// counts is the difference between two pieces.
    pub(super) fn base_ns(&self, rate: f64) -> f64 {
        self.ns - self.bytes / rate
    }

    fn or_shorter(self, other: RoundTrip, rate: f64) -> RoundTrip {
        if other.base_ns(rate) < self.base_ns(rate) {
            other
        } else {
            self
        }
    }
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Window {
    limits: WindowLimits,
    in_flight: u64,
    completed: u64,
    /// Highest rate, in bytes per nanosecond, in this epoch and the one before.
    rate: [f64; 2],
    /// Shortest round trip in this epoch and the one before.
    shortest: [Option<RoundTrip>; 2],
    epoch: Time,
    round: u64,
    /// Shortest round trip in this round.
    of_round: Option<RoundTrip>,
    /// Set when the window was full in this round.
    limited: bool,
    /// Last round in which pieces are posted alone.
    alone_until: u64,
    /// Upper bound by the latency target, in bytes.
    target_bytes: f64,
}

impl Window {
    /// Returns a window with nothing in flight.
    pub fn new(now: Time, limits: WindowLimits) -> Window {
        Window {
            limits,
            in_flight: 0,
            completed: 0,
            rate: [0.0; 2],
            shortest: [None; 2],
            epoch: now,
            round: 1,
            of_round: None,
            limited: false,
            alone_until: 0,
            target_bytes: limits.bytes_max.into(),
        }
    }

    /// Returns the window in bytes for pieces of `piece_bytes`.
    pub fn bytes(&self, piece_bytes: u32) -> u32 {
        let bytes = match (self.rate(), self.shortest()) {
            (rate, Some(shortest)) if rate > 0.0 => {
                // Only the measured round trip without its own piece is the path's.
                let piece = f64::from(piece_bytes);
                let path = rate * shortest.ns - shortest.bytes + piece;
                (path + piece).min(self.target_bytes)
            }
            _ => self.limits.bytes_initial.into(),
        };
        (bytes as u32).clamp(self.limits.bytes_min, self.limits.bytes_max)
    }

    /// Returns whether a piece may be posted: the last one may exceed the window.
    pub fn is_open(&self, piece_bytes: u32) -> bool {
        let alone = self.round <= self.alone_until;
        self.in_flight == 0 || (!alone && self.in_flight < u64::from(self.bytes(piece_bytes)))
    }

    /// Bytes in flight.
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Accounts for a piece that is posted.
    pub fn posted(&mut self, now: Time, bytes: u32, piece_bytes: u32) -> InFlight {
        self.in_flight += u64::from(bytes);
        self.limited |= !self.is_open(piece_bytes);
        InFlight {
            bytes,
            posted: now,
            completed: self.completed,
            round: self.round,
            limited: self.limited,
        }
    }

    /// Accounts for a piece that will not complete, because its QP has failed. It tells nothing about the path.
    pub fn lost(&mut self, piece: InFlight) {
        self.in_flight -= u64::from(piece.bytes);
    }

    /// Accounts for a piece whose completion was polled.
    pub fn completed(&mut self, now: Time, piece: InFlight, piece_bytes: u32) {
        self.in_flight -= u64::from(piece.bytes);
        self.completed += u64::from(piece.bytes);
        let ns = now.since_ns(piece.posted).max(1) as f64;
        let rate = (self.completed - piece.completed) as f64 / ns;
        // A QP that has little to send shows nothing of the rate of its path, unless it shows that this is higher.
        let grows = rate > self.rate();
        if grows || piece.limited {
            self.rate[0] = self.rate[0].max(rate);
        }
        let round_trip = RoundTrip {
            ns,
            bytes: piece.bytes.into(),
        };
        let rate = self.rate();
        let shorter = |one: &mut Option<RoundTrip>| {
            *one = Some(one.map_or(round_trip, |one| one.or_shorter(round_trip, rate)));
        };
        shorter(&mut self.shortest[0]);
        shorter(&mut self.of_round);
        if piece.round == self.round {
            self.end_round(piece_bytes);
        }
        let since_ns = now.since_ns(self.epoch);
        if since_ns >= EPOCH_NS && since_ns as f64 >= EPOCH_ROUND_TRIPS * ns {
            self.begin_epoch(now);
        }
    }

    fn rate(&self) -> f64 {
        self.rate[0].max(self.rate[1])
    }

    fn shortest(&self) -> Option<RoundTrip> {
        match self.shortest {
            [Some(now), Some(before)] => Some(now.or_shorter(before, self.rate())),
            [now, before] => now.or(before),
        }
    }

    /// Ends a round trip: a piece that was posted in it has completed.
    fn end_round(&mut self, piece_bytes: u32) {
        let rate = self.rate();
        if let (Some(shortest), Some(fastest)) = (self.shortest(), self.of_round) {
            let waited_ns = fastest.base_ns(rate) - shortest.base_ns(rate);
            let piece = f64::from(piece_bytes);
            // The window is a piece longer than the path, and the last piece may exceed it: that much waits without any others.
            let device = rate.max(self.limits.device_bps as f64 / 8e9);
            if waited_ns > self.limits.target_ns as f64 + 2.0 * piece / device {
                let bytes = f64::from(self.bytes(piece_bytes));
                self.target_bytes = (bytes * 0.5).max(self.limits.bytes_min.into());
            } else if self.limited {
                self.target_bytes = (self.target_bytes + piece).min(self.limits.bytes_max.into());
            }
        }
        self.of_round = None;
        self.limited = false;
        self.round += 1;
    }

    fn begin_epoch(&mut self, now: Time) {
        self.epoch = now;
        self.shortest = [None, self.shortest[0].or(self.shortest[1])];
        // Without a sample the rate remains.
        if self.rate[0] > 0.0 {
            self.rate = [0.0, self.rate[0]];
        }
        // The pieces in flight were posted behind others; the first one of the next round finds none.
        self.alone_until = self.round + 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A device that sends one piece after another.
    struct Path {
        bytes_per_ns: f64,
        round_trip_ns: u64,
        /// Time that each piece waits for those of others.
        others_ns: u64,
        now: Time,
        free: Time,
        pieces: VecDeque<(Time, InFlight)>,
        completed: u64,
    }

    impl Path {
        fn new(bytes_per_ns: f64, round_trip_ns: u64) -> Path {
            Path {
                bytes_per_ns,
                round_trip_ns,
                others_ns: 0,
                now: Time(1_000_000),
                free: Time(0),
                pieces: VecDeque::new(),
                completed: 0,
            }
        }

        /// Sends as much as the window allows for `ns`; returns the rate in bytes per nanosecond.
        fn run(&mut self, window: &mut Window, ns: u64, piece_bytes: u32) -> f64 {
            let (begin, before) = (self.now, self.completed);
            while self.now.since_ns(begin) < ns {
                while window.is_open(piece_bytes) {
                    let piece = window.posted(self.now, piece_bytes, piece_bytes);
                    let sent_ns = f64::from(piece_bytes) / self.bytes_per_ns;
                    self.free = self.free.max(self.now) + sent_ns as u64;
                    let at = self.free + self.round_trip_ns + self.others_ns;
                    self.pieces.push_back((at, piece));
                }
                let (at, piece) = self.pieces.pop_front().unwrap();
                self.now = at;
                self.completed += u64::from(piece.bytes);
                window.completed(at, piece, piece_bytes);
            }
            (self.completed - before) as f64 / self.now.since_ns(begin) as f64
        }
    }

    #[test]
    fn bytes__what_the_path_carries_and_a_piece() {
        for bytes_per_ns in [0.125, 1.25, 12.5] {
            for round_trip_ns in [4_000, 30_000, 200_000] {
                for piece_bytes in [4 << 10, 16 << 10, 64 << 10] {
                    let mut path = Path::new(bytes_per_ns, round_trip_ns);
                    let mut window = Window::new(path.now, WindowLimits::default());
                    let begun = 1_000 * round_trip_ns + 4_000_000;
                    path.run(&mut window, begun, piece_bytes);
                    let rate = path.run(&mut window, 3 * EPOCH_NS, piece_bytes);
                    let needed = bytes_per_ns * round_trip_ns as f64 + f64::from(piece_bytes);
                    let bytes = f64::from(window.bytes(piece_bytes));
                    assert!(rate >= 0.98 * bytes_per_ns, "{rate} of {bytes_per_ns}");
                    assert!(
                        bytes >= 0.98 * needed && bytes <= 1.05 * needed + f64::from(piece_bytes),
                        "{bytes_per_ns} {round_trip_ns} {piece_bytes}: {bytes}, needed {needed}"
                    );
                }
            }
        }
    }

    #[test]
    fn bytes__shorter_pieces_after_long_ones() {
        let mut path = Path::new(12.5, 4_000);
        let mut window = Window::new(path.now, WindowLimits::default());
        path.run(&mut window, 10_000_000, 64 << 10);
        assert!(window.bytes(64 << 10) <= 51_000 + 2 * (64 << 10));
        assert!(window.bytes(16 << 10) <= 50_000 + 3 * (16 << 10));
        assert!(path.run(&mut window, 10_000_000, 16 << 10) > 12.3);
    }

    #[test]
    fn bytes__less_while_others_use_the_device() {
        let mut path = Path::new(12.5, 4_000);
        let mut window = Window::new(path.now, WindowLimits::default());
        path.run(&mut window, 1_000_000, 16 << 10);
        let alone = window.bytes(16 << 10);
        path.others_ns = 50_000;
        path.run(&mut window, 10_000_000, 16 << 10);
        assert!(window.bytes(16 << 10) <= 16 << 10, "{}", window.bytes(16 << 10));
        path.others_ns = 0;
        path.run(&mut window, 10_000_000, 16 << 10);
        assert_eq!(window.bytes(16 << 10), alone);
    }

    #[test]
    fn bytes__a_longer_path_counts_after_two_epochs() {
        let mut path = Path::new(12.5, 4_000);
        let mut window = Window::new(path.now, WindowLimits::default());
        path.run(&mut window, 1_000_000, 16 << 10);
        path.round_trip_ns = 40_000;
        path.run(&mut window, 4 * EPOCH_NS, 16 << 10);
        assert!(path.run(&mut window, EPOCH_NS, 16 << 10) > 12.2);
    }

    #[test]
    fn bytes__a_slower_path_counts_after_two_epochs() {
        let mut path = Path::new(12.5, 4_000);
        let mut window = Window::new(path.now, WindowLimits::default());
        path.run(&mut window, 1_000_000, 16 << 10);
        path.bytes_per_ns = 1.25;
        path.run(&mut window, 4 * EPOCH_NS, 16 << 10);
        assert!(
            window.bytes(16 << 10) <= 5_000 + 3 * (16 << 10),
            "{}",
            window.bytes(16 << 10)
        );
    }

    #[test]
    fn is_open__always_for_one_piece() {
        let limits = WindowLimits {
            bytes_initial: 0,
            bytes_min: 0,
            ..WindowLimits::default()
        };
        let mut window = Window::new(Time(0), limits);
        assert!(window.is_open(16 << 10));
        let piece = window.posted(Time(0), 16 << 10, 16 << 10);
        assert!(!window.is_open(16 << 10));
        assert_eq!(window.in_flight(), 16 << 10);
        window.lost(piece);
        assert!(window.is_open(16 << 10));
    }
}
