//! Bytes that a device may have in flight, by its kind.

use rdmux_rnic::sched::{DeviceLimits, PIECE_BYTES_MAX, Quanta, WindowLimits, burst_bytes};

use super::egress::Limits;

/// Fewest bytes that a device in software may have in flight. It sends when the system lets it run, and so needs more than its paths carry; and it
/// lets its queue pairs take turns by itself.
const SOFT_BYTES_MIN: u32 = 2 << 20;

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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
