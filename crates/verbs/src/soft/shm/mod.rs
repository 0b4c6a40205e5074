//! The shared-memory path between two engines of one host.

#[cfg_attr(
    not(test),
    expect(dead_code, reason = "the link that uses the ring comes with the segment")
)]
pub(crate) mod ring;
