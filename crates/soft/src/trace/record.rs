//! Layout of a note in a file: 64 bytes, eight words in the host's byte order.
//!
//! | word | what |
//! |---|---|
//! | 0 | number, from 1, over both rings |
//! | 1 | time, ns since 1970 |
//! | 2 | kind (8 bits), QPN (24 bits), checksum of all other words (32 bits) |
//! | 3 to 7 | contents that depend on the kind |
//!
//! A reader may see a record half written, or a file that another program has written. The checksum detects the first; against the second
//! the reader checks every word before it uses it.

use std::net::{IpAddr, Ipv6Addr};

use rdmux_rnic::trace::{ConnectionNote, Denial, Injection, Note, Refused};
use rdmux_rnic::{Access, Cause, Cqn, Fault, Psn, QpState, QpType, Qpn, Status, WcOpcode};
use rdmux_wire::roce::{NakCode, Opcode};
use strum::VariantArray;

/// Bytes of a record.
pub(super) const RECORD_BYTES: usize = 8 * WORDS;
const WORDS: usize = 8;

/// A note with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEntry {
    /// Number among all notes of the device, from 1.
    pub number: u64,
    /// Nanoseconds since 1970, UTC.
    pub time_ns: u64,
    /// The queue pair; 0: the device.
    pub qpn: Qpn,
    /// The event.
    pub note: Note,
}

/// Word that stands for an absent number.
const NONE: u64 = u64::MAX;

/// Packs parts, each with its number of bits, into a word, the first lowest.
fn pack(parts: &[(u64, u32)]) -> u64 {
    let mut shift = 0;
    parts.iter().fold(0, |word, (part, bits)| {
        let placed = (part & (u64::MAX >> (64 - bits))) << shift;
        shift += bits;
        word | placed
    })
}

/// Returns the part of a word that has `bits` bits from bit `shift` on.
fn part(word: u64, shift: u32, bits: u32) -> u64 {
    word >> shift & (u64::MAX >> (64 - bits))
}

fn place<T: PartialEq>(all: &[T], one: &T) -> u64 {
    all.iter().position(|known| known == one).unwrap_or(all.len()) as u64
}

fn at<T: Copy>(all: &[T], place: u64) -> Option<T> {
    all.get(usize::try_from(place).ok()?).copied()
}

fn psn(word: u64) -> Option<Psn> {
    (word < 1 << 24).then(|| Psn::new(word as u32))
}

fn qpn(word: u64) -> Option<Qpn> {
    (word < 1 << 24).then(|| Qpn::new(word as u32))
}

fn flag(word: u64) -> Option<bool> {
    match word {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

/// Returns a checksum of the words that shows a change of any of them.
fn checksum(words: &[u64; WORDS]) -> u32 {
    let mut sum = 0x9e37_79b9_7f4a_7c15u64;
    for (i, word) in words.iter().enumerate() {
        let word = if i == 2 { word & 0xffff_ffff } else { *word };
        sum = (sum ^ word).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29);
    }
    (sum >> 32) as u32 ^ sum as u32
}

/// Sets the correct checksum in a record.
pub(super) fn seal(bytes: &mut [u8; RECORD_BYTES]) {
    let mut words = bytes_to_words(bytes);
    words[2] = words[2] & 0xffff_ffff | u64::from(checksum(&words)) << 32;
    *bytes = words_to_bytes(&words);
}

fn words_to_bytes(words: &[u64; WORDS]) -> [u8; RECORD_BYTES] {
    let mut bytes = [0; RECORD_BYTES];
    for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *place = word.to_ne_bytes();
    }
    bytes
}

fn bytes_to_words(bytes: &[u8; RECORD_BYTES]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, place) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*place);
    }
    words
}

impl TraceEntry {
    pub(super) fn encode(&self) -> [u8; RECORD_BYTES] {
        let (kind, more) = self.words();
        let mut words = [0; WORDS];
        words[0] = self.number;
        words[1] = self.time_ns;
        words[2] = pack(&[(kind, 8), (self.qpn.value().into(), 24)]);
        words[3..].copy_from_slice(&more);
        words[2] |= u64::from(checksum(&words)) << 32;
        words_to_bytes(&words)
    }

    /// Decodes a record. `None` for bytes that no encoder makes, and for an empty place.
    pub(super) fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<TraceEntry> {
        let words = bytes_to_words(bytes);
        let [number, time_ns, tag, ..] = words;
        if number == 0 || part(tag, 32, 32) != u64::from(checksum(&words)) {
            return None;
        }
        let more = [words[3], words[4], words[5], words[6], words[7]];
        Some(TraceEntry {
            number,
            time_ns,
            qpn: qpn(part(tag, 8, 24))?,
            note: note(part(tag, 0, 8), more)?,
        })
    }

    /// Returns kind and words of the note.
    fn words(&self) -> (u64, [u64; 5]) {
        match self.note {
            Note::Moved { qp_type, from, to } => {
                let states = [
                    place(QpType::VARIANTS, &qp_type),
                    place(QpState::VARIANTS, &from),
                    place(QpState::VARIANTS, &to),
                ];
                (1, [states[0], states[1], states[2], 0, 0])
            }
            Note::Peer { address, qpn, mtu } => {
                let (family, v6) = match address {
                    IpAddr::V4(v4) => (4, v4.to_ipv6_mapped()),
                    IpAddr::V6(v6) => (6, v6),
                };
                let bits = v6.to_bits();
                let high = (bits >> 64) as u64;
                (2, [family, high, bits as u64, qpn.value().into(), mtu.into()])
            }
            Note::Failed { status, cause, from } => {
                let from = place(QpState::VARIANTS, &from);
                (
                    3,
                    [
                        place(Status::VARIANTS, &status),
                        place(Cause::VARIANTS, &cause),
                        from,
                        0,
                        0,
                    ],
                )
            }
            Note::RequestFailed {
                status,
                opcode,
                wr_id,
                va,
                key,
                length,
            } => {
                let what = pack(&[
                    (place(Status::VARIANTS, &status), 8),
                    (place(WcOpcode::VARIANTS, &opcode), 8),
                ]);
                (4, [what, wr_id, va, key.into(), length.into()])
            }
            Note::TimedOut {
                psn,
                resends,
                retry_count,
            } => (5, [psn.value().into(), resends.into(), retry_count.into(), 0, 0]),
            Note::PeerStalled { psn } => (21, [psn.value().into(), 0, 0, 0, 0]),
            Note::RetriesUsed {
                psn,
                resends,
                retry_count,
                stuck_ns,
                heard_ns,
            } => {
                let heard = heard_ns.unwrap_or(NONE);
                (
                    6,
                    [
                        psn.value().into(),
                        resends.into(),
                        retry_count.into(),
                        stuck_ns,
                        heard,
                    ],
                )
            }
            Note::RnrNak {
                psn,
                wait_ns,
                tries,
                rnr_retry,
                is_last,
            } => {
                let tries = u64::from(tries);
                (
                    7,
                    [
                        psn.value().into(),
                        wait_ns,
                        tries,
                        rnr_retry.into(),
                        is_last.into(),
                    ],
                )
            }
            Note::GapNak { psn } => (8, [psn.value().into(), 0, 0, 0, 0]),
            Note::FatalNak { psn, code } => {
                (9, [psn.value().into(), place(NakCode::VARIANTS, &code), 0, 0, 0])
            }
            Note::Refused(refused) => (10, refused_words(&refused)),
            Note::NotReady { psn } => (11, [psn.value().into(), 0, 0, 0, 0]),
            Note::Missing { expected, psn } => (12, [expected.value().into(), psn.value().into(), 0, 0, 0]),
            Note::FlushFailed { psn, fault } => {
                let (kind, errno) = match fault {
                    Fault::Unmapped => (0, 0),
                    Fault::NoSpace => (1, 0),
                    Fault::Io(errno) => (2, errno.cast_unsigned()),
                    Fault::NotSupported => (3, 0),
                };
                (13, [psn.value().into(), kind, errno.into(), 0, 0])
            }
            Note::Overrun { cqn } => (14, [cqn.0.into(), 0, 0, 0, 0]),
            Note::Connection { id, what, reason } => (15, [id.into(), what as u64, reason.into(), 0, 0]),
            Note::PeerGone => (16, [0; 5]),
            Note::Injected { what, sent } => (17, [what as u64, sent.into(), 0, 0, 0]),
            Note::Port { active } => (18, [active.into(), 0, 0, 0, 0]),
            Note::Skipped { notes } => (19, [notes, 0, 0, 0, 0]),
            Note::Packet {
                sent,
                local,
                opcode,
                psn,
                bytes,
            } => {
                let way = pack(&[(sent.into(), 1), (local.into(), 1)]);
                (20, [way, opcode.into(), psn.value().into(), bytes.into(), 0])
            }
        }
    }
}

fn refused_words(refused: &Refused) -> [u64; 5] {
    let opcode = refused.operation as u64;
    let (why, more) = match refused.why {
        Denial::NoKey => (0, [0; 2]),
        Denial::OtherDomain => (1, [0; 2]),
        Denial::NoRight { needs, has } => (2, [needs.bits().into(), has.bits().into()]),
        Denial::OutOfRange { begin, length } => (3, [begin, length]),
        Denial::OtherWindow => (4, [0; 2]),
        Denial::NoRightOnQp { needs, has } => (5, [needs.bits().into(), has.bits().into()]),
        Denial::Memory => (6, [0; 2]),
        Denial::TooLong => (7, [0; 2]),
        Denial::Receive(status) => (8, [place(Status::VARIANTS, &status), 0]),
        Denial::Invalidation => (9, [0; 2]),
        Denial::Invalid => (10, [0; 2]),
    };
    let what = pack(&[(refused.psn.value().into(), 24), (opcode, 8), (why, 8)]);
    let key = pack(&[(refused.key.into(), 32), (refused.length.into(), 32)]);
    [what, refused.va, key, more[0], more[1]]
}

fn refused(words: [u64; 5]) -> Option<Refused> {
    let [what, va, key, first, second] = words;
    let access = |word| Access::from_bits(u32::try_from(word).ok()?);
    let why = match part(what, 32, 8) {
        0 => Denial::NoKey,
        1 => Denial::OtherDomain,
        2 => Denial::NoRight {
            needs: access(first)?,
            has: access(second)?,
        },
        3 => Denial::OutOfRange {
            begin: first,
            length: second,
        },
        4 => Denial::OtherWindow,
        5 => Denial::NoRightOnQp {
            needs: access(first)?,
            has: access(second)?,
        },
        6 => Denial::Memory,
        7 => Denial::TooLong,
        8 => Denial::Receive(at(Status::VARIANTS, first)?),
        9 => Denial::Invalidation,
        10 => Denial::Invalid,
        _ => return None,
    };
    Some(Refused {
        psn: psn(part(what, 0, 24))?,
        operation: Opcode::from_code(part(what, 24, 8) as u8)?.operation,
        key: part(key, 0, 32) as u32,
        va,
        length: part(key, 32, 32) as u32,
        why,
    })
}

fn note(kind: u64, words: [u64; 5]) -> Option<Note> {
    let byte = |i: usize| u8::try_from(words[i]).ok();
    let short = |i: usize| u32::try_from(words[i]).ok();
    Some(match kind {
        1 => Note::Moved {
            qp_type: at(QpType::VARIANTS, words[0])?,
            from: at(QpState::VARIANTS, words[1])?,
            to: at(QpState::VARIANTS, words[2])?,
        },
        2 => {
            let v6 = Ipv6Addr::from_bits(u128::from(words[1]) << 64 | u128::from(words[2]));
            let address = match words[0] {
                4 => v6.to_ipv4_mapped()?.into(),
                6 => v6.into(),
                _ => return None,
            };
            Note::Peer {
                address,
                qpn: qpn(words[3])?,
                mtu: short(4)?,
            }
        }
        3 => Note::Failed {
            status: at(Status::VARIANTS, words[0])?,
            cause: at(Cause::VARIANTS, words[1])?,
            from: at(QpState::VARIANTS, words[2])?,
        },
        4 => Note::RequestFailed {
            status: at(Status::VARIANTS, part(words[0], 0, 8))?,
            opcode: at(WcOpcode::VARIANTS, part(words[0], 8, 8))?,
            wr_id: words[1],
            va: words[2],
            key: short(3)?,
            length: short(4)?,
        },
        5 => Note::TimedOut {
            psn: psn(words[0])?,
            resends: byte(1)?,
            retry_count: byte(2)?,
        },
        6 => Note::RetriesUsed {
            psn: psn(words[0])?,
            resends: byte(1)?,
            retry_count: byte(2)?,
            stuck_ns: words[3],
            heard_ns: Some(words[4]).filter(|ns| *ns != NONE),
        },
        7 => Note::RnrNak {
            psn: psn(words[0])?,
            wait_ns: words[1],
            tries: byte(2)?,
            rnr_retry: byte(3)?,
            is_last: flag(words[4])?,
        },
        8 => Note::GapNak { psn: psn(words[0])? },
        9 => Note::FatalNak {
            psn: psn(words[0])?,
            code: at(NakCode::VARIANTS, words[1])?,
        },
        10 => Note::Refused(refused(words)?),
        11 => Note::NotReady { psn: psn(words[0])? },
        12 => Note::Missing {
            expected: psn(words[0])?,
            psn: psn(words[1])?,
        },
        13 => Note::FlushFailed {
            psn: psn(words[0])?,
            fault: match words[1] {
                0 => Fault::Unmapped,
                1 => Fault::NoSpace,
                2 => Fault::Io(short(2)?.cast_signed()),
                3 => Fault::NotSupported,
                _ => return None,
            },
        },
        14 => Note::Overrun { cqn: Cqn(short(0)?) },
        15 => Note::Connection {
            id: short(0)?,
            what: ConnectionNote::from_repr(u8::try_from(words[1]).ok()?)?,
            reason: u16::try_from(words[2]).ok()?,
        },
        16 => Note::PeerGone,
        17 => Note::Injected {
            what: Injection::from_repr(u8::try_from(words[0]).ok()?)?,
            sent: flag(words[1])?,
        },
        18 => Note::Port {
            active: flag(words[0])?,
        },
        19 => Note::Skipped { notes: words[0] },
        20 => Note::Packet {
            sent: part(words[0], 0, 1) == 1,
            local: part(words[0], 1, 1) == 1,
            opcode: byte(1)?,
            psn: psn(words[2])?,
            bytes: short(3)?,
        },
        21 => Note::PeerStalled { psn: psn(words[0])? },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use rdmux_wire::roce::Operation;

    use super::*;

    pub(crate) fn all_notes() -> Vec<Note> {
        let psn = Psn::new(0xff_fffe);
        let mut notes = vec![
            Note::Peer {
                address: [10, 0, 0, 2].into(),
                qpn: Qpn::new(0xff_ffff),
                mtu: 4096,
            },
            Note::Peer {
                address: Ipv6Addr::LOCALHOST.into(),
                qpn: Qpn::new(2),
                mtu: 256,
            },
            Note::TimedOut {
                psn,
                resends: 3,
                retry_count: 7,
            },
            Note::PeerStalled { psn },
            Note::GapNak { psn },
            Note::NotReady { psn },
            Note::Missing {
                expected: psn,
                psn: Psn::new(0),
            },
            Note::Overrun { cqn: Cqn(u32::MAX) },
            Note::PeerGone,
            Note::Port { active: false },
            Note::Port { active: true },
            Note::Skipped { notes: u64::MAX },
            Note::Packet {
                sent: true,
                local: false,
                opcode: 0x11,
                psn,
                bytes: 4_200,
            },
        ];
        for (&from, &to) in QpState::VARIANTS.iter().zip(QpState::VARIANTS.iter().rev()) {
            notes.extend(
                QpType::VARIANTS
                    .iter()
                    .map(|&qp_type| Note::Moved { qp_type, from, to }),
            );
        }
        for &status in Status::VARIANTS {
            notes.extend(Cause::VARIANTS.iter().map(|&cause| Note::Failed {
                status,
                cause,
                from: QpState::Rts,
            }));
            notes.extend(WcOpcode::VARIANTS.iter().map(|&opcode| Note::RequestFailed {
                status,
                opcode,
                wr_id: u64::MAX,
                va: 1 << 63,
                key: u32::MAX,
                length: 1 << 31,
            }));
        }
        for heard_ns in [None, Some(0), Some(u64::MAX - 1)] {
            notes.push(Note::RetriesUsed {
                psn,
                resends: 14,
                retry_count: 7,
                stuck_ns: 3_400_000_000,
                heard_ns,
            });
        }
        for is_last in [false, true] {
            notes.push(Note::RnrNak {
                psn,
                wait_ns: 655_360_000,
                tries: 6,
                rnr_retry: 6,
                is_last,
            });
        }
        notes.extend(NakCode::VARIANTS.iter().map(|&code| Note::FatalNak { psn, code }));
        let faults = [Fault::Unmapped, Fault::NoSpace, Fault::Io(5), Fault::NotSupported];
        notes.extend(faults.map(|fault| Note::FlushFailed { psn, fault }));
        notes.extend(ConnectionNote::VARIANTS.iter().map(|&what| Note::Connection {
            id: 0xff00_0001,
            what,
            reason: 28,
        }));
        notes.extend(
            Injection::VARIANTS
                .iter()
                .map(|&what| Note::Injected { what, sent: true }),
        );
        let (needs, has) = (Access::REMOTE_WRITE, Access::LOCAL_WRITE | Access::REMOTE_READ);
        let denials = [
            Denial::NoKey,
            Denial::OtherDomain,
            Denial::NoRight { needs, has },
            Denial::OutOfRange {
                begin: 1 << 40,
                length: 4096,
            },
            Denial::OtherWindow,
            Denial::NoRightOnQp { needs, has },
            Denial::Memory,
            Denial::TooLong,
            Denial::Receive(Status::LocalProtection),
            Denial::Invalidation,
            Denial::Invalid,
        ];
        let operations = [
            Operation::WriteOnly,
            Operation::ReadRequest,
            Operation::Flush,
            Operation::FetchAdd,
        ];
        for (why, operation) in denials.into_iter().zip(operations.into_iter().cycle()) {
            notes.push(Note::Refused(Refused {
                psn,
                operation,
                key: 0xdead_beef,
                va: u64::MAX,
                length: u32::MAX,
                why,
            }));
        }
        notes
    }

    fn entries() -> impl Iterator<Item = TraceEntry> {
        all_notes().into_iter().enumerate().map(|(i, note)| TraceEntry {
            number: i as u64 + 1,
            time_ns: u64::MAX - i as u64,
            qpn: Qpn::new(0xff_ffff),
            note,
        })
    }

    #[test]
    fn decode__inverts_encode() {
        for entry in entries() {
            assert_eq!(TraceEntry::decode(&entry.encode()), Some(entry));
        }
    }

    #[test]
    fn decode__any_bit_changed() {
        for entry in entries() {
            let bytes = entry.encode();
            for bit in 0..8 * RECORD_BYTES {
                let mut changed = bytes;
                changed[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(TraceEntry::decode(&changed), None, "{entry:?}, bit {bit}");
            }
        }
        assert_eq!(TraceEntry::decode(&[0; RECORD_BYTES]), None);
    }

    #[test]
    fn note__any_words_are_refused_or_understood() {
        let mut state = 11u64;
        let mut next = move || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            state >> 20
        };
        let mut understood = 0;
        for _ in 0..300_000 {
            let kind = next() % 24;
            let words = [(); 5].map(|()| next() >> (next() % 44));
            let Some(note) = note(kind, words) else { continue };
            understood += 1;
            let entry = TraceEntry {
                number: 1,
                time_ns: 2,
                qpn: Qpn::new(3),
                note,
            };
            assert_eq!(TraceEntry::decode(&entry.encode()), Some(entry));
        }
        assert!(understood > 10_000);
    }
}
