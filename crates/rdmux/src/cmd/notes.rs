//! Notes of devices in words: for `rdmux trace` and `rdmux explain`.

use rdmux_verbs::trace::{ConnectionNote, Denial, Injection, Note, Refused};
use rdmux_verbs::{Access, Fault, RejReason, Status, WcOpcode};
use rdmux_wire::roce::{NakCode, Opcode, Operation};

use super::res::{access_words, state_name, type_name};

/// Formats nanoseconds since 1970 as `2026-11-22T08:36:29.123456789Z`.
pub(crate) fn utc(time_ns: u64) -> String {
    let (seconds, ns) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Eras of 400 years that begin on the first of March, so that a leap day ends a year.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = 400 * era + year + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{ns:09}Z")
}

/// Formats nanoseconds with a fitting unit: `655 ms`, `3.4 s`.
pub(crate) fn duration(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{} us", ns / 1_000),
        1_000_000..1_000_000_000 => format!("{} ms", ns / 1_000_000),
        1_000_000_000..100_000_000_000 => format!("{:.1} s", ns as f64 / 1e9),
        _ => format!("{} s", ns / 1_000_000_000),
    }
}

/// Returns the name of an event, for programs.
pub(crate) fn name(note: &Note) -> &'static str {
    match note {
        Note::Moved { .. } => "moved",
        Note::Peer { .. } => "peer",
        Note::Failed { .. } => "failed",
        Note::RequestFailed { .. } => "request-failed",
        Note::TimedOut { .. } => "timed-out",
        Note::PeerStalled { .. } => "peer-stalled",
        Note::RetriesUsed { .. } => "retries-used",
        Note::RnrNak { .. } => "rnr-nak",
        Note::GapNak { .. } => "gap-nak",
        Note::FatalNak { .. } => "fatal-nak",
        Note::Refused(_) => "refused",
        Note::NotReady { .. } => "not-ready",
        Note::Missing { .. } => "missing",
        Note::FlushFailed { .. } => "flush-failed",
        Note::Overrun { .. } => "cq-overrun",
        Note::Connection { what, .. } => match what {
            ConnectionNote::Accepted => "accepted",
            ConnectionNote::Established => "established",
            ConnectionNote::Rejected => "rejected",
            ConnectionNote::Unreachable => "unreachable",
            ConnectionNote::Disconnected => "disconnected",
        },
        Note::PeerGone => "peer-gone",
        Note::Injected { .. } => "injected",
        Note::Port { active: true } => "port-active",
        Note::Port { active: false } => "port-down",
        Note::Skipped { .. } => "skipped",
        Note::Packet { .. } => "packet",
    }
}

/// Describes an event in words.
pub(crate) fn words(note: &Note) -> String {
    match note {
        Note::Moved { qp_type, from, to } => {
            format!(
                "{} {} to {}",
                type_name(*qp_type),
                state_name(*from),
                state_name(*to)
            )
        }
        Note::Peer { address, qpn, mtu } => format!("{address} qp {}, path MTU {mtu}", qpn.value()),
        Note::Failed { status, cause, from } => {
            use rdmux_verbs::Cause;
            let whose = match cause {
                Cause::OwnRequest => "a local request",
                Cause::PeerRequest => "a request of the peer",
                Cause::QueueOverrun => "its completion queue",
                Cause::ShareOverrun => "its share of a completion queue",
                Cause::Injected => "an injected fault",
            };
            format!("{} to ERR by {whose}: {status}", state_name(*from))
        }
        Note::RequestFailed {
            status,
            opcode,
            wr_id,
            va,
            key,
            length,
        } => {
            let what = request(*opcode, *va, *key, *length, status.is_local());
            format!("{what}, wr_id {wr_id}: {status}")
        }
        Note::TimedOut {
            psn,
            resends,
            retry_count,
        } => format!(
            "no response to PSN {} before the timeout; retransmitted {resends} of {} times so far",
            psn.value(),
            2 * u32::from(*retry_count)
        ),
        Note::PeerStalled { psn } => format!(
            "the peer's process, on this host, has not received PSN {} yet: the process is not running, so nothing was retransmitted",
            psn.value()
        ),
        Note::RetriesUsed {
            psn,
            resends,
            stuck_ns,
            heard_ns,
            ..
        } => format!(
            "PSN {} was retransmitted {resends} times over {}; {}",
            psn.value(),
            duration(*stuck_ns),
            heard(*heard_ns)
        ),
        Note::RnrNak {
            psn,
            wait_ns,
            tries,
            rnr_retry,
            is_last,
        } => {
            let of = if *rnr_retry == 7 {
                "unlimited".to_owned()
            } else {
                format!("of {rnr_retry}")
            };
            let then = if *is_last {
                "no retries are left".to_owned()
            } else {
                format!("retry in {}", duration(*wait_ns))
            };
            format!(
                "the peer had no receive for PSN {} (RNR NAK): {then} ({tries} tries {of})",
                psn.value()
            )
        }
        Note::GapNak { psn } => format!("the peer reports a missing packet: NAK for PSN {}", psn.value()),
        Note::FatalNak { psn, code } => {
            let why = match code {
                NakCode::PsnSequence => "PSN sequence error",
                NakCode::InvalidRequest => "invalid request",
                NakCode::RemoteAccess => "remote access error",
                NakCode::RemoteOperation => "remote operational error",
            };
            format!("the peer refused PSN {}: {why}", psn.value())
        }
        Note::Refused(refused) => format!("{}, PSN {}", denied(refused), refused.psn.value()),
        Note::NotReady { psn } => format!("no receive for the peer's PSN {}: RNR NAK", psn.value()),
        Note::Missing { expected, psn } => {
            format!(
                "PSN {} from the peer is missing: PSN {} arrived",
                expected.value(),
                psn.value()
            )
        }
        Note::FlushFailed { fault, .. } => fault_words(*fault),
        Note::Overrun { cqn } => format!("completion queue {} overran", cqn.0),
        Note::Connection { id, what, reason } => match what {
            ConnectionNote::Rejected => format!("connection {id:#010x}: {}", RejReason(*reason)),
            _ => format!("connection {id:#010x}"),
        },
        Note::PeerGone => "the peer's process on this host has ended".into(),
        Note::Injected { what, sent } => {
            let what = match what {
                Injection::Lost => "lost",
                Injection::Corrupted => "damaged",
                Injection::Duplicated => "duplicated",
                Injection::Reordered => "reordered",
                Injection::QpError => "moved its queue pair to the error state",
            };
            format!("a packet {}: {what}", if *sent { "sent" } else { "received" })
        }
        Note::Port { active: true } => "the network accepts packets again".into(),
        Note::Port { active: false } => "the network accepts no packets".into(),
        Note::Skipped { notes } => format!("{notes} events were dropped: too many at a time"),
        Note::Packet {
            sent,
            local,
            opcode,
            psn,
            bytes,
        } => {
            let opcode = Opcode::from_code(*opcode)
                .map_or_else(|| format!("opcode {opcode:#04x}"), |opcode| format!("{opcode:?}"));
            format!(
                "{} {opcode} PSN {} of {bytes} bytes{}",
                if *sent { "sent" } else { "received" },
                psn.value(),
                if *local { " by shared memory" } else { "" }
            )
        }
    }
}

/// Says when the last packet came from the peer.
pub(crate) fn heard(heard_ns: Option<u64>) -> String {
    match heard_ns {
        Some(ns) => format!(
            "its last response to this queue pair came {} earlier",
            duration(ns)
        ),
        None => "no request of this queue pair ever got a response".into(),
    }
}

/// Describes a request, such as `WRITE of 8 bytes to 0x7f.. with rkey 0x..`.
pub(crate) fn request(opcode: WcOpcode, va: u64, key: u32, length: u32, own: bool) -> String {
    let name = match opcode {
        WcOpcode::Send => "SEND",
        WcOpcode::Write => "WRITE",
        WcOpcode::Read => "READ",
        WcOpcode::CompareSwap => "COMPARE AND SWAP",
        WcOpcode::FetchAdd => "FETCH AND ADD",
        WcOpcode::AtomicWrite => "ATOMIC WRITE",
        WcOpcode::Flush => "FLUSH",
        WcOpcode::BindWindow => "window binding",
        WcOpcode::Register => "fast registration",
        WcOpcode::LocalInvalidate => "local invalidation",
        WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => "receive",
    };
    let at = match (own, key) {
        (_, 0) => String::new(),
        (true, _) => format!(" with local memory at {va:#x}, lkey {key:#010x}"),
        (false, _) => format!(" at {va:#x}, rkey {key:#010x}"),
    };
    format!("{name} of {length} bytes{at}")
}

/// Describes a refused request and the reason.
pub(crate) fn denied(refused: &Refused) -> String {
    use Operation as Op;
    let name = match refused.operation {
        Op::WriteFirst
        | Op::WriteMiddle
        | Op::WriteLast
        | Op::WriteLastImm
        | Op::WriteOnly
        | Op::WriteOnlyImm => "WRITE",
        Op::ReadRequest => "READ",
        Op::CompareSwap => "COMPARE AND SWAP",
        Op::FetchAdd => "FETCH AND ADD",
        Op::AtomicWrite => "ATOMIC WRITE",
        Op::Flush => "FLUSH",
        operation if operation.is_send() => "SEND",
        _ => "packet",
    };
    let at = if refused.key == 0 {
        String::new()
    } else {
        format!(" at {:#x}, rkey {:#010x}", refused.va, refused.key)
    };
    let rights = |access: Access| access_words(access).join(", ");
    let why = match refused.why {
        Denial::NoKey => "no memory region or window has that key, or it no longer exists".into(),
        Denial::OtherDomain => "the key belongs to another protection domain than the queue pair".into(),
        Denial::NoRight { needs, has } => {
            format!(
                "the key does not grant {}, only {}",
                rights(needs),
                or_nothing(rights(has))
            )
        }
        Denial::OutOfRange { begin, length } => {
            let end = begin.saturating_add(length);
            format!("the range lies outside the key's range {begin:#x} to {end:#x} ({length} bytes)")
        }
        Denial::OtherWindow => "the window was bound by another queue pair".into(),
        Denial::NoRightOnQp { needs, has } => format!(
            "the queue pair does not allow {}, only {}",
            rights(needs),
            or_nothing(rights(has))
        ),
        Denial::Memory => "the memory of the key failed or no longer exists".into(),
        Denial::TooLong => "the posted receive is shorter".into(),
        Denial::Receive(status) => format!("the posted receive failed: {status}"),
        Denial::Invalidation => "the key to invalidate cannot be invalidated".into(),
        Denial::Invalid => {
            "invalid opcode, order, length or alignment, or more READs, atomics and FLUSHes than were agreed"
                .into()
        }
    };
    format!("{name} of {} bytes{at}: {why}", refused.length)
}

fn or_nothing(words: String) -> String {
    if words.is_empty() { "nothing".into() } else { words }
}

pub(crate) fn fault_words(fault: Fault) -> String {
    match fault {
        Fault::Io(errno) => format!("a flush failed: {}", std::io::Error::from_raw_os_error(errno)),
        fault => format!("a flush failed: {fault}"),
    }
}

/// Tells errors of one's own memory from errors of the peer's.
trait IsLocal {
    fn is_local(&self) -> bool;
}

impl IsLocal for Status {
    fn is_local(&self) -> bool {
        matches!(
            self,
            Status::LocalLength | Status::LocalProtection | Status::LocalQpOperation | Status::MemoryBind
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utc__days_of_all_kinds() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00"),
            (951_782_399, "2000-02-28T23:59:59"),
            (951_782_400, "2000-02-29T00:00:00"),
            (951_868_800, "2000-03-01T00:00:00"),
            (1_735_689_599, "2024-12-31T23:59:59"),
            (4_107_542_400, "2100-03-01T00:00:00"),
        ] {
            assert_eq!(utc(seconds * 1_000_000_000 + 7), format!("{expected}.000000007Z"));
        }
        // The largest value has its time too.
        assert!(utc(u64::MAX).starts_with("2554-07-21T23:34:33.709551615"));
    }

    #[test]
    fn duration__units() {
        let all = [999, 65_000, 655_360_000, 3_400_000_000, 100_000_000_000].map(duration);
        assert_eq!(all, ["999 ns", "65 us", "655 ms", "3.4 s", "100 s"]);
    }
}
