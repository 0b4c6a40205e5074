//! Bytes that a device may have in flight, by its kind.

use rdmux_rnic::sched::{DeviceLimits, PIECE_BYTES_MAX, Quanta, WindowLimits, burst_bytes};

use super::egress::Limits;

/// Fewest bytes that a device in software may have in flight. It sends when the system lets it run, and so needs more than its paths carry; and it
/// lets its queue pairs take turns by itself.
const SOFT_BYTES_MIN: u32 = 2 << 20;

/// Time of the node's thread for a request, from the ring to its completion.
const REQUEST_NS: u64 = 400;
/// Bytes for which a piece counts at most if it has fewer. If the rate of the device is not known, it counts for so many.
const PIECE_BYTES_MIN_MAX: u64 = 4 << 10;

/// Returns the bytes for which a piece counts at least: those that the device sends in the time that the node's thread needs for it. With
/// fewer, many short messages would take most of that time from those who send long ones, and fill the device with more than the thread
/// completes while a message of others waits.
fn piece_bytes_min(rate_bps: Option<u64>) -> u32 {
    let of_rate = rate_bps.map(|bps| u64::try_from(u128::from(bps) * u128::from(REQUEST_NS) / 8_000_000_000));
    let bytes = of_rate.map_or(PIECE_BYTES_MIN_MAX, |bytes| bytes.unwrap_or(u64::MAX));
    bytes.min(PIECE_BYTES_MIN_MAX) as u32
}

/// Returns the limits for devices of a provider, and of a node that keeps to a rate, if it does.
pub(super) fn of_device(provider: &str, quanta: Quanta, rate_bps: Option<u64>) -> Limits {
    let mut windows = WindowLimits {
        // The window of the device keeps short what waits for others.
        target_ns: u64::MAX,
        ..WindowLimits::default()
    };
    let mut device = DeviceLimits::default();
    let mut least = |bytes: u32| {
        let bytes = bytes.min(windows.bytes_max);
        windows.bytes_min = windows.bytes_min.max(bytes);
        windows.bytes_initial = windows.bytes_initial.max(bytes);
        device.bytes_min = device.bytes_min.max(bytes);
    };
    if provider != "hw" {
        least(SOFT_BYTES_MIN);
    }
    if let Some(rate_bps) = rate_bps {
        // If the node comes late, it catches up by a burst, which is for those whose turn it is: a window that one piece fills would leave
        // most of it to others.
        let burst_bytes = u32::try_from(burst_bytes(rate_bps)).unwrap_or(u32::MAX);
        least(burst_bytes.saturating_add(PIECE_BYTES_MAX));
    }
    Limits {
        quanta,
        windows,
        device,
        long_pieces: provider != "hw",
        piece_bytes_min: piece_bytes_min(rate_bps),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_device__a_piece_counts_for_the_work_that_it_costs() {
        let least = |rate_bps| of_device("soft", Quanta::default(), rate_bps).piece_bytes_min;
        assert_eq!(least(None), 4096);
        assert_eq!(least(Some(1_000_000_000)), 50);
        assert_eq!(least(Some(10_000_000_000)), 500);
        assert_eq!(least(Some(u64::MAX)), 4096);
    }

    #[test]
    fn of_device__by_kind_and_rate() {
        let least = |provider, rate_bps| {
            let limits = of_device(provider, Quanta::default(), rate_bps);
            assert!(limits.windows.bytes_min <= limits.windows.bytes_max);
            (limits.windows.bytes_min, limits.device.bytes_min)
        };
        let defaults = (
            WindowLimits::default().bytes_min,
            DeviceLimits::default().bytes_min,
        );
        assert_eq!(least("hw", None), defaults);
        assert_eq!(least("soft", None), (SOFT_BYTES_MIN, SOFT_BYTES_MIN));
        assert_eq!(least("soft", Some(1_000_000)), least("soft", None));
        let burst = PIECE_BYTES_MAX + 1_250_000;
        assert_eq!(least("hw", Some(100_000_000_000)), (burst, burst));
        let max = WindowLimits::default().bytes_max;
        assert_eq!(least("hw", Some(u64::MAX)), (max, max));
    }
}
