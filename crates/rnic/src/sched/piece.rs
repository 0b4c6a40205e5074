//! The length of the pieces into which long messages are cut.

use crate::time::Time;

/// Longest piece: each costs a completion, and packets that could go to the network together.
pub const PIECE_BYTES_MAX: u32 = 64 << 10;
/// Piece of a connection that sends much, while short messages are sent: they wait for the piece that is being sent.
pub const PIECE_BYTES_SHARED: u32 = 16 << 10;
/// Shortest piece.
pub const PIECE_BYTES_MIN: u32 = 4 << 10;
/// How long pieces are shorter after a connection that may have little to send.
const SPARSE_NS: u64 = 10_000_000;

/// Returns the length of the next piece: a multiple of `path_mtu`, so that no packet of it is short, and at least [`PIECE_BYTES_MIN`].
/// `sparse_seen` is [`Hierarchy::sparse_seen`](super::Hierarchy::sparse_seen).
pub fn piece_bytes(now: Time, sparse_seen: Option<Time>, path_mtu: u32) -> u32 {
    let shared = sparse_seen.is_some_and(|seen| now.since_ns(seen) < SPARSE_NS);
    let bytes = if shared {
        PIECE_BYTES_SHARED
    } else {
        PIECE_BYTES_MAX
    };
    let path_mtu = path_mtu.max(1);
    (bytes / path_mtu * path_mtu).max(PIECE_BYTES_MIN.next_multiple_of(path_mtu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn piece_bytes__short_for_ten_milliseconds() {
        let seen = Time(5_000_000);
        assert_eq!(piece_bytes(seen, None, 1024), 64 << 10);
        assert_eq!(piece_bytes(seen, Some(seen), 1024), 16 << 10);
        assert_eq!(piece_bytes(seen + 9_999_999, Some(seen), 4096), 16 << 10);
        assert_eq!(piece_bytes(seen + 10_000_000, Some(seen), 4096), 64 << 10);
    }

    #[test]
    fn piece_bytes__multiple_of_the_path_mtu() {
        for path_mtu in [256, 512, 1024, 1500, 2048, 4096, 9000, 100_000] {
            for seen in [None, Some(Time(0))] {
                let bytes = piece_bytes(Time(0), seen, path_mtu);
                assert_eq!(bytes % path_mtu, 0);
                assert!(bytes >= PIECE_BYTES_MIN);
            }
        }
    }
}
