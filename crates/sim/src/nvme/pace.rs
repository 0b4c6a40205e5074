//! Limits of hosts: what the target begins for a host, beside what it may.

use std::num::NonZeroU64;

use rdmux_nvmf::target::Rates;

use super::disk::BLOCK;
use super::run::BLOCKS;
use super::{MS, SECOND};
use crate::dice::Dice;

/// Time for which a host may save what it has not used, with what its queues book at once.
const SAVED_NS: u64 = 10 * MS + 8 * MS;
/// Time for commands that are refused, and may be sent again, and until it is seen that others may go on.
const REFUSED_NS: u64 = 5 * SECOND;
/// Commands beyond those in flight that begin early: one for each queue, and what a controller flushes by itself.
const EARLY: u64 = 6;

/// I/Os that the target has begun for a host.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    pub(super) rates: Rates,
    ios: Level,
    bytes: Level,
    /// Time at which a command was done, or refused, last.
    pub(super) done_at: u64,
}

/// The time that I/Os take up which have begun, as far as it has not passed.
#[derive(Clone, Copy, Debug, Default)]
struct Level {
    ns: u64,
    at: u64,
}

impl Level {
    fn add(&mut self, cost: u64, now: u64) -> u64 {
        self.ns = self.ns.saturating_sub(now - self.at) + cost;
        self.at = now;
        self.ns
    }
}

fn cost(units: u64, rate: Option<NonZeroU64>) -> u64 {
    rate.map_or(0, |rate| units * SECOND / rate.get())
}

/// Returns limits of a host. A Copy counts as the largest one until it has run, and also if it never does: with copies those of bytes let several
/// of that size pass in a second.
pub(super) fn drawn(dice: &mut Dice, with_copies: bool) -> Rates {
    let ios = dice.pick(&[0, 20, 100, 1000]);
    let bytes = match with_copies {
        true => dice.pick(&[0, 64 << 20]),
        false => dice.pick(&[0, 64 << 10, 1 << 20]),
    };
    Rates {
        ios: NonZeroU64::new(ios),
        bytes: NonZeroU64::new(bytes),
    }
}

impl Pace {
    pub(super) fn new(rates: Rates) -> Pace {
        Pace {
            rates,
            ..Pace::default()
        }
    }

    /// Returns the longest time that what a host has in flight may take up.
    fn in_flight_ns(&self, depth: usize) -> u64 {
        let commands = depth as u64 + EARLY;
        let bytes = commands * BLOCKS * BLOCK as u64;
        cost(commands, self.rates.ios).max(cost(bytes, self.rates.bytes))
    }

    /// The target begins an I/O. The error is what is wrong with it.
    pub(super) fn begin(&mut self, bytes: u64, depth: usize, now: u64) -> Result<(), String> {
        let ios = self.ios.add(cost(1, self.rates.ios), now);
        let bytes = self.bytes.add(cost(bytes, self.rates.bytes), now);
        // Data of commands that were taken before may have come together.
        let commands = depth as u64 + EARLY;
        let most = SAVED_NS + cost(commands, self.rates.ios);
        if self.rates.ios.is_some() && ios > most {
            return Err(format!(
                "{ios} ns of I/Os have begun, {most} may, {:?}",
                self.rates
            ));
        }
        let most = SAVED_NS + cost(commands * BLOCKS * BLOCK as u64, self.rates.bytes);
        if self.rates.bytes.is_some() && bytes > most {
            return Err(format!(
                "{bytes} ns of bytes have begun, {most} may, {:?}",
                self.rates
            ));
        }
        Ok(())
    }

    /// Commands are held up since a time. The error is what is wrong with that.
    pub(super) fn held(&self, since: u64, depth: usize, now: u64) -> Result<(), String> {
        let since = since.max(self.ios.at).max(self.done_at);
        let most = self.in_flight_ns(depth) + SAVED_NS + REFUSED_NS;
        match now > since + most {
            false => Ok(()),
            true => Err(format!(
                "nothing has begun, and none was done, since {since} ns, although commands wait, which may take {most} ns, {:?}",
                self.rates
            )),
        }
    }
}
