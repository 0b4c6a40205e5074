//! Bytes that all send queues of a device may have in flight together.
//!
//! A QP's own window ([`Window`](super::Window)) keeps what waits for that QP in the device short. But when several QPs have more to send than
//! the device sends, all their windows are full, and each completion opens the window of the QP whose piece was sent: the scheduler
//! has no choice, and the QPs share the device in proportion to their windows, whatever their weights. So the device has a window, too, which
//! is shut before theirs are, and the scheduler decides whose piece takes the place of one that has completed.
//!
//! It is rate x longest round trip + two pieces: the rate is that of all completions together, and the round trip that of the farthest
//! QP that sends, since a window for nearer ones would starve that one. A round trip is seen only when nothing else is in the device. So now and
//! then a few pieces are posted alone.
//!
//! A peer that does not answer keeps pieces in flight for as long as it likes, and must not shut the device for others. Pieces count for two
//! *generations* at most, of some round trips each, and only those of a QP whose last completion came in such a time.

use super::piece::PIECE_BYTES_MIN;
use super::window::{EPOCH_NS, EPOCH_ROUND_TRIPS, RoundTrip};
use crate::time::Time;

/// Length of a generation: in round trips, and at least. The latter is for devices whose processor also does other things.
const GENERATION_ROUND_TRIPS: f64 = 16.0;
const GENERATION_NS: u64 = 500_000;
/// Pieces that are posted alone at the beginning of an epoch: of so many QPs the round trips are measured.
const ALONE: u32 = 8;

/// Bounds of the window of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Smallest window in bytes. A piece may always be sent when nothing is in flight.
    pub bytes_min: u32,
    /// Largest window in bytes, which also holds before anything is measured. If it is the smallest one, nothing is.
    pub bytes_max: u32,
    /// Rate of the device in bits per second; 0 if it is not known: then it is measured.
    pub device_bps: u64,
}

impl Default for DeviceLimits {
    fn default() -> DeviceLimits {
        DeviceLimits {
            bytes_min: 2 * PIECE_BYTES_MIN,
            bytes_max: 64 << 20,
            device_bps: 0,
        }
    }
}

impl DeviceLimits {
    /// Pieces of an epoch that are posted alone: none if there is nothing to find out.
    fn alone(&self) -> u32 {
        if self.bytes_min < self.bytes_max { ALONE } else { 0 }
    }
}

/// A piece in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "every piece ends with `DeviceWindow::completed` or `DeviceWindow::lost`"]
pub struct DeviceFlight {
    bytes: u32,
    counts: bool,
    generation: u32,
    posted: Time,
    /// Bytes that had completed then.
    completed: u64,
    /// Set if the window was full then.
    limited: bool,
    /// Set if nothing else was in flight then, nor is posted until it completes.
    alone: bool,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct DeviceWindow {
    limits: DeviceLimits,
    /// Bytes in flight of this generation and the one before, by the parity of their numbers.
    in_flight: [u64; 2],
    generation: u32,
    generation_began: Time,
    completed: u64,
    /// Highest rate, in bytes per nanosecond, in this epoch and the one before.
    rate: [f64; 2],
    /// Longest round trip of a QP in this epoch and the one before.
    longest: [Option<RoundTrip>; 2],
    epoch_began: Time,
    /// Pieces of this epoch that are still to be posted alone.
    alone: u32,
}

impl DeviceWindow {
    /// Returns a window with nothing in flight.
    pub fn new(now: Time, limits: DeviceLimits) -> DeviceWindow {
        DeviceWindow {
            limits,
            in_flight: [0; 2],
            generation: 0,
            generation_began: now,
            completed: 0,
            rate: [0.0; 2],
            longest: [None; 2],
            epoch_began: now,
            alone: limits.alone(),
        }
    }

    /// Returns the window in bytes for pieces of `piece_bytes`.
    pub fn bytes(&self, piece_bytes: u32) -> u64 {
        let rate = self.rate();
        let bytes = match self.longest() {
            Some(longest) if rate > 0.0 => {
                let path = (rate * longest.ns - longest.bytes).max(0.0);
                path + 2.0 * f64::from(piece_bytes)
            }
            _ => self.limits.bytes_max.into(),
        };
        (bytes as u64).clamp(self.limits.bytes_min.into(), self.limits.bytes_max.into())
    }

    /// Returns whether a piece may be posted: the last one may exceed the window.
    pub fn is_open(&self, piece_bytes: u32) -> bool {
        let in_flight = self.in_flight();
        in_flight == 0 || self.alone == 0 && in_flight < self.bytes(piece_bytes)
    }

    /// Bytes in flight that count.
    pub fn in_flight(&self) -> u64 {
        self.in_flight[0] + self.in_flight[1]
    }

    /// Has pieces that have been in flight for too long count no more. To be called before [`DeviceWindow::is_open`].
    #[inline]
    pub fn advance(&mut self, now: Time) {
        if now >= self.next_time() {
            self.begin_generation(now);
        }
    }

    /// Returns when the window may open although nothing completes.
    pub fn next_time(&self) -> Time {
        self.generation_began + self.generation_ns()
    }

    /// Accounts for a piece that is posted. `is_prompt`: the last completion of its QP came in time ([`DeviceWindow::completed`]); a new
    /// QP's has not.
    pub fn posted(&mut self, now: Time, bytes: u32, is_prompt: bool, piece_bytes: u32) -> DeviceFlight {
        let alone = self.alone > 0 && self.in_flight() == 0 && is_prompt;
        self.alone = self.alone.saturating_sub(1);
        if is_prompt {
            self.in_flight[self.generation as usize % 2] += u64::from(bytes);
        }
        DeviceFlight {
            bytes,
            counts: is_prompt,
            generation: self.generation,
            posted: now,
            completed: self.completed,
            limited: !self.is_open(piece_bytes),
            alone,
        }
    }

    /// Accounts for a piece that will not complete.
    pub fn lost(&mut self, piece: DeviceFlight) {
        if piece.counts && self.generation.wrapping_sub(piece.generation) < 2 {
            self.in_flight[piece.generation as usize % 2] -= u64::from(piece.bytes);
        }
    }

    /// Accounts for a piece whose completion was polled. Returns whether it came in time.
    pub fn completed(&mut self, now: Time, piece: DeviceFlight) -> bool {
        self.lost(piece);
        self.completed += u64::from(piece.bytes);
        let ns = now.since_ns(piece.posted).max(1);
        let rate = (self.completed - piece.completed) as f64 / ns as f64;
        // While there is little to send, completions show nothing of the rate, unless they show that it is higher.
        if piece.limited || rate > self.rate() {
            self.rate[0] = self.rate[0].max(rate);
        }
        if piece.alone {
            let seen = RoundTrip {
                ns: ns as f64,
                bytes: piece.bytes.into(),
            };
            self.longest[0] = longer(self.longest[0], Some(seen), self.rate());
        }
        let since_ns = now.since_ns(self.epoch_began);
        if since_ns >= EPOCH_NS && since_ns as f64 >= EPOCH_ROUND_TRIPS * self.longest_ns() {
            self.begin_epoch(now);
        }
        ns <= self.generation_ns()
    }

    fn rate(&self) -> f64 {
        match self.limits.device_bps {
            0 => self.rate[0].max(self.rate[1]),
            bps => bps as f64 / 8e9,
        }
    }

    fn longest(&self) -> Option<RoundTrip> {
        longer(self.longest[0], self.longest[1], self.rate())
    }

    fn longest_ns(&self) -> f64 {
        self.longest().map_or(0.0, |longest| longest.ns)
    }

    fn generation_ns(&self) -> u64 {
        GENERATION_NS + (GENERATION_ROUND_TRIPS * self.longest_ns()) as u64
    }

    fn begin_generation(&mut self, now: Time) {
        // After two, nothing of either counts.
        let passed = match now.since_ns(self.generation_began) < 2 * self.generation_ns() {
            true => 1,
            false => 2,
        };
        for _ in 0..passed {
            self.generation = self.generation.wrapping_add(1);
            self.in_flight[self.generation as usize % 2] = 0;
        }
        self.generation_began = now;
    }

    fn begin_epoch(&mut self, now: Time) {
        self.epoch_began = now;
        // Without a sample the rate remains.
        if self.rate[0] > 0.0 {
            self.rate = [0.0, self.rate[0]];
        }
        if self.longest[0].is_some() {
            self.longest = [None, self.longest[0]];
        }
        self.alone = self.limits.alone();
    }
}

/// Returns the longer one of two round trips, apart from the time in which the pieces themselves were sent.
fn longer(one: Option<RoundTrip>, other: Option<RoundTrip>, rate: f64) -> Option<RoundTrip> {
    match (one, other) {
        (Some(one), Some(other)) if other.base_ns(rate) > one.base_ns(rate) => Some(other),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::super::piece::PIECE_BYTES_MAX;
    use super::*;

    const PIECE: u32 = PIECE_BYTES_MAX;

    fn window() -> DeviceWindow {
        DeviceWindow::new(Time(0), DeviceLimits::default())
    }

    /// Posts and completes pieces at 12.5 bytes a nanosecond over a path of `path_ns`, as many as the window allows for.
    fn run(window: &mut DeviceWindow, mut now: Time, until: Time, path_ns: u64) -> (Time, u64) {
        let mut posted = std::collections::VecDeque::new();
        let (mut free, mut most) = (now, 0);
        while now < until {
            window.advance(now);
            while window.is_open(PIECE) {
                free = free.max(now) + (f64::from(PIECE) / 12.5) as u64;
                posted.push_back((free + path_ns, window.posted(now, PIECE, true, PIECE)));
            }
            most = most.max(window.in_flight());
            let (at, piece) = posted.pop_front().unwrap();
            now = at;
            assert!(window.completed(now, piece));
        }
        for (_, piece) in posted {
            window.lost(piece);
        }
        (now, most)
    }

    #[test]
    fn bytes__rate_and_longest_path_and_two_pieces() {
        for (path_ns, device_bps) in [(5_000, 0), (100_000, 0), (5_000, 100_000_000_000)] {
            let limits = DeviceLimits {
                device_bps,
                ..DeviceLimits::default()
            };
            let mut window = DeviceWindow::new(Time(0), limits);
            let (now, _) = run(&mut window, Time(0), Time(1_000_000_000), path_ns);
            let (_, most) = run(&mut window, now, now + 100_000_000, path_ns);
            let needed = (12.5 * path_ns as f64) as u64 + 2 * u64::from(PIECE);
            assert!(
                (needed * 98 / 100..=needed + 2 * u64::from(PIECE)).contains(&most),
                "{most} of {needed}"
            );
        }
    }

    #[test]
    fn bytes__of_a_far_queue_pair_as_long_as_it_sends() {
        let mut window = window();
        let far = run(&mut window, Time(0), Time(200_000_000), 100_000);
        let near = run(&mut window, far.0, far.0 + 50_000_000, 5_000);
        assert!(window.bytes(PIECE) > 1_200_000);
        run(&mut window, near.0, near.0 + 300_000_000, 5_000);
        assert!(window.bytes(PIECE) < 300_000);
    }

    #[test]
    fn is_open__pieces_that_nobody_answers_do_not_shut_it_for_long() {
        let mut window = window();
        let (now, _) = run(&mut window, Time(0), Time(10_000_000), 5_000);
        let mut stuck = Vec::new();
        while window.is_open(PIECE) {
            stuck.push(window.posted(now, PIECE, true, PIECE));
        }
        let at = window.next_time();
        window.advance(at);
        let at = at.max(window.next_time());
        window.advance(at);
        assert!(window.is_open(PIECE) && window.in_flight() == 0);
        assert!(at.since_ns(now) <= 2 * window.generation_ns());
        // They come after all, too late to count, and those that are posted meanwhile count by themselves.
        let piece = window.posted(at, PIECE, false, PIECE);
        assert_eq!(window.in_flight(), 0);
        for piece in stuck {
            assert!(!window.completed(at + 1, piece));
        }
        assert!(window.completed(at + 1, piece));
        assert_eq!(window.in_flight(), 0);
    }

    #[test]
    fn advance__after_a_long_time() {
        let mut window = window();
        let piece = window.posted(Time(1), PIECE, true, PIECE);
        window.advance(Time(10_000_000_000));
        assert_eq!(window.in_flight(), 0);
        window.lost(piece);
        assert_eq!(window.in_flight(), 0);
    }
}
