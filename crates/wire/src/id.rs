//! Identifiers of the transport. Each has its own type, so that a QPN cannot be used as a PSN.

use std::fmt;

/// Queue pair number, 24 bits. IBTA Vol 1, 3.5.10.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Qpn(u32);

impl Qpn {
    /// The general services QP: connection management. IBTA Vol 1, 3.5.10.
    pub const GSI: Qpn = Qpn(1);
    /// All QPs attached to a multicast group. IBTA Vol 1, 10.5.2.1.
    pub const MULTICAST: Qpn = Qpn(0xff_ffff);

    /// Returns the QPN of the low 24 bits of `value`.
    pub const fn new(value: u32) -> Qpn {
        Qpn(value & 0xff_ffff)
    }

    /// Returns the number.
    pub const fn value(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

/// Packet sequence number, 24 bits, compared modulo 2^24. IBTA Vol 1, 9.7.2.
///
/// It has no `Ord`: the order is only defined between numbers less than 2^23 apart, see [`Psn::since`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// Returns the PSN of the low 24 bits of `value`.
    pub const fn new(value: u32) -> Psn {
        Psn(value & 0xff_ffff)
    }

    /// Returns the number.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// Returns the PSN `n` packets later.
    #[must_use]
    pub const fn plus(self, n: u32) -> Psn {
        Psn(self.0.wrapping_add(n) & 0xff_ffff)
    }

    /// Returns the PSN `n` packets earlier.
    #[must_use]
    pub const fn minus(self, n: u32) -> Psn {
        Psn(self.0.wrapping_sub(n) & 0xff_ffff)
    }

    /// Returns by how many packets this PSN follows `other`; negative if it precedes `other`. The difference is a signed 24-bit number
    /// (IBTA Vol 1, 9.7.2), so it is meaningful for numbers less than 2^23 apart.
    pub const fn since(self, other: Psn) -> i32 {
        ((self.0.wrapping_sub(other.0) << 8) as i32) >> 8
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "psn {:#08x}", self.0)
    }
}

macro_rules! key {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name(pub u32);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#010x})"), self.0)
            }
        }
    };
}

key! {
    /// Local key: names a memory region to the device that registered it. IBTA Vol 1, 10.6.3.
    LKey
}
key! {
    /// Remote key: lets a peer access a memory region. IBTA Vol 1, 10.6.3.
    RKey
}

impl RKey {
    /// Returns the key with its low 8 bits, which belong to the key's user, incremented. Like `ibv_inc_rkey`.
    pub const fn next(self) -> RKey {
        RKey(self.0 & !0xff | self.0.wrapping_add(1) & 0xff)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_since__wraps_at_24_bits() {
        assert_eq!(Psn::new(0).since(Psn::new(0xff_ffff)), 1);
        assert_eq!(Psn::new(0xff_ffff).since(Psn::new(0)), -1);
        assert_eq!(Psn::new(0x7f_ffff).since(Psn::new(0)), 0x7f_ffff);
        assert_eq!(Psn::new(0x80_0000).since(Psn::new(0)), -0x80_0000);
        assert_eq!(Psn::new(0xff_fffe).plus(3), Psn::new(1));
        assert_eq!(Psn::new(1).minus(3), Psn::new(0xff_fffe));
    }
}
