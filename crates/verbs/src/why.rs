//! Reasons why data does not take the shortest way, as text for people and as codes in reports.

use std::fmt;
use std::io;

use rustix::io::Errno;
use strum::{FromRepr, VariantArray};

/// Reason why two devices do not share memory. The numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromRepr, VariantArray)]
#[repr(u8)]
pub enum Refusal {
    /// The peer runs another version of rdmux.
    Version = 1,
    /// One of the two ends has shared memory switched off.
    Off = 2,
    /// The peer has as many links or grants as it can.
    Full = 3,
    /// The QP or the key does not exist, or may not be granted.
    NotGranted = 4,
    /// The memory is not shareable, and the peer may not access its process.
    NotShareable = 5,
    /// The peer's user may be another one: users without a number in this user namespace look alike.
    UnknownUser = 6,
}

/// Reason why there is no channel to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Nobody in this network namespace answers for the peer.
    NotHere,
    /// The peer belongs to this user.
    OtherUser(u32),
    /// The peer's user may be another one: users without a number in this user namespace look alike.
    UnknownUser,
    /// This side has shared memory switched off.
    Off,
    /// The peer has not answered yet.
    NotYet,
    /// There was a link, and one side gave it up.
    GivenUp,
    /// The peer refuses a link.
    Refused(Refusal),
    /// A system call failed.
    System(Errno),
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::NotHere => f.write_str(
                "no process of this network namespace answers for the peer: it runs elsewhere, or has ended",
            ),
            Why::OtherUser(uid) => write!(f, "the peer belongs to user {uid}"),
            Why::UnknownUser => {
                f.write_str("the peer's user is unknown in this user namespace and may be another one")
            }
            Why::Off => f.write_str("switched off"),
            Why::NotYet => f.write_str("the peer has not answered yet"),
            Why::GivenUp => f.write_str("the link failed"),
            Why::Refused(Refusal::Version) => f.write_str("the peer runs another version of rdmux"),
            Why::Refused(Refusal::Off) => f.write_str("switched off at the peer"),
            Why::Refused(Refusal::Full) => f.write_str("too many links"),
            Why::Refused(Refusal::UnknownUser) => {
                f.write_str("this user is unknown in the peer's user namespace and may be another one")
            }
            Why::Refused(Refusal::NotGranted | Refusal::NotShareable) => f.write_str("refused"),
            Why::System(errno) => write!(f, "{}", io::Error::from(*errno)),
        }
    }
}

impl Why {
    /// Encodes the reason as two numbers; 0 and 255 are left for other uses.
    pub fn to_code(self) -> (u8, u32) {
        match self {
            Why::NotHere => (1, 0),
            Why::OtherUser(uid) => (2, uid),
            Why::UnknownUser => (3, 0),
            Why::Off => (4, 0),
            Why::NotYet => (5, 0),
            Why::GivenUp => (6, 0),
            Why::Refused(refusal) => (7, refusal as u32),
            Why::System(errno) => (8, errno.raw_os_error().cast_unsigned()),
        }
    }

    /// Inverts [`Why::to_code`].
    pub fn from_code(code: (u8, u32)) -> Option<Why> {
        Some(match code {
            (1, 0) => Why::NotHere,
            (2, uid) => Why::OtherUser(uid),
            (3, 0) => Why::UnknownUser,
            (4, 0) => Why::Off,
            (5, 0) => Why::NotYet,
            (6, 0) => Why::GivenUp,
            (7, refusal) => Why::Refused(refusal_of(refusal)?),
            (8, errno) => Why::System(errno_of(errno)?),
            _ => return None,
        })
    }
}

/// Reason why a peer's memory is not reached without packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotDirect {
    /// The peer does not grant it.
    Denied(Refusal),
    /// Calls into the peer's process need its number, and the process has none in this PID namespace.
    OtherPidNamespace,
    /// The system refuses calls into its process.
    Calls(Errno),
    /// The granted memory cannot be mapped here.
    Unmappable,
    /// This device is restricted to packets.
    KeptToPackets,
}

impl fmt::Display for NotDirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotDirect::Denied(Refusal::NotShareable) => f.write_str("not shareable"),
            NotDirect::Denied(Refusal::Off) => f.write_str("the peer uses only packets"),
            NotDirect::Denied(Refusal::Full) => f.write_str("the peer grants no more regions"),
            NotDirect::Denied(_) => f.write_str("not granted by the peer"),
            NotDirect::OtherPidNamespace => {
                f.write_str("not shareable, and the peer is in another PID namespace")
            }
            NotDirect::Calls(Errno::PERM) => {
                f.write_str("not shareable, and the system denies process_vm calls (ptrace)")
            }
            NotDirect::Calls(errno) => {
                let error = io::Error::from(*errno);
                write!(f, "not shareable, and process_vm calls fail: {error}")
            }
            NotDirect::Unmappable => f.write_str("the peer's shared memory cannot be mapped"),
            NotDirect::KeptToPackets => f.write_str("kept to packets"),
        }
    }
}

impl NotDirect {
    /// Encodes the reason as two numbers; 0 is left for no reason.
    pub fn to_code(self) -> (u8, u32) {
        match self {
            NotDirect::Denied(refusal) => (1, refusal as u32),
            NotDirect::OtherPidNamespace => (2, 0),
            NotDirect::Calls(errno) => (3, errno.raw_os_error().cast_unsigned()),
            NotDirect::Unmappable => (4, 0),
            NotDirect::KeptToPackets => (5, 0),
        }
    }

    /// Inverts [`NotDirect::to_code`].
    pub fn from_code(code: (u8, u32)) -> Option<NotDirect> {
        Some(match code {
            (1, refusal) => NotDirect::Denied(refusal_of(refusal)?),
            (2, 0) => NotDirect::OtherPidNamespace,
            (3, errno) => NotDirect::Calls(errno_of(errno)?),
            (4, 0) => NotDirect::Unmappable,
            (5, 0) => NotDirect::KeptToPackets,
            _ => return None,
        })
    }
}

fn refusal_of(number: u32) -> Option<Refusal> {
    u8::try_from(number).ok().and_then(Refusal::from_repr)
}

fn errno_of(number: u32) -> Option<Errno> {
    // The range of the kernel's error numbers.
    let number = u16::try_from(number).ok().filter(|n| (1..4096).contains(n))?;
    Some(Errno::from_raw_os_error(number.into()))
}
