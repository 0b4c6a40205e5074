//! Messages between two engines besides packets, one message per packet of a `SOCK_SEQPACKET` connection.
//!
//! Both ends are processes of one user on one host, so numbers have the host's byte order; that does not mean that they are
//! trusted: a message that is not understood ends the link, and no call here waits.

use std::net::{IpAddr, Ipv6Addr};

use rdmux_rnic::{Access, Qpn, RKey};
use rdmux_shm::Offer;
use rdmux_verbs::provider::Refusal;
use rdmux_verbs::resources::report::{LIST, Question, SET, Setting};

use crate::capture::Filter;
pub(crate) use rdmux_verbs::resources::report::VERSION;

/// Longer than any message, so that a longer one is noticed.
pub(crate) const LEN_MAX: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkMessage {
    /// Asks for a link. Carries the segment and the doorbell.
    Hello { address: IpAddr, slot: u8 },
    /// The link is up.
    Welcome,
    /// The sender refuses a link.
    Refused(Refusal),
    /// The sender gives up the link, and lives on without it.
    Over,
    /// Asks for memory: its key, the QP that is to serve it, and the QP that asks.
    Ask { rkey: RKey, of: Qpn, by: Qpn },
    /// Grants the memory. Memory that can be mapped comes as a descriptor.
    Granted(Offer),
    /// Refuses to grant the memory.
    Denied { rkey: RKey, by: Qpn, reason: Refusal },
    /// Lends memory that requests to a QP may name. Its key says nothing to the receiver. Memory that can be mapped comes as a descriptor.
    Lend(Offer),
    /// Answers it, by the numbers of the offer: whether the sender can read the memory.
    Lent {
        index: u32,
        generation: u32,
        accepts: bool,
    },
    /// Asks for objects; the sender wants no link. Answered by a [`rdmux_verbs::resources::report::Page`].
    List(Question),
    /// Changes the device; the sender wants no link. Answered by a [`rdmux_verbs::resources::report::Answer`].
    Set(Setting),
    /// Captures the device as long as the connection lasts, to a file that comes with the message; the second descriptor is notified of
    /// the end. The sender wants no link. Answered by Welcome, or by Refused.
    Capture { filter: Filter },
}

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const REFUSED: u8 = 3;
const ASK: u8 = 4;
const GRANTED: u8 = 5;
const DENIED: u8 = 6;
const OVER: u8 = 7;
const CAPTURE: u8 = 10;
const LEND: u8 = 11;
const LENT: u8 = 12;

impl LinkMessage {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let with_version = |kind: u8| {
            let version = VERSION.to_ne_bytes();
            vec![kind, version[0], version[1]]
        };
        match self {
            LinkMessage::Hello { address, slot } => {
                let mut out = with_version(HELLO);
                let (family, octets) = match address {
                    IpAddr::V4(v4) => (4, v4.to_ipv6_mapped().octets()),
                    IpAddr::V6(v6) => (6, v6.octets()),
                };
                out.extend([*slot, family]);
                out.extend(octets);
                out
            }
            LinkMessage::Welcome => with_version(WELCOME),
            LinkMessage::Over => with_version(OVER),
            LinkMessage::List(question) => question.encode(),
            LinkMessage::Set(setting) => setting.encode(),
            LinkMessage::Capture { filter } => {
                let mut out = with_version(CAPTURE);
                let filter = filter.to_string();
                out.push(filter.len() as u8);
                out.extend(filter.into_bytes());
                out
            }
            LinkMessage::Refused(refusal) => {
                let mut out = with_version(REFUSED);
                out.push(*refusal as u8);
                out
            }
            LinkMessage::Ask { rkey, of, by } => words(ASK, &[rkey.0, of.value(), by.value()]),
            LinkMessage::Granted(offer) => encode_offer(GRANTED, offer),
            LinkMessage::Lend(offer) => encode_offer(LEND, offer),
            LinkMessage::Lent {
                index,
                generation,
                accepts,
            } => words(LENT, &[*index, *generation, u32::from(*accepts)]),
            LinkMessage::Denied { rkey, by, reason } => words(DENIED, &[rkey.0, by.value(), *reason as u32]),
        }
    }

    /// Returns `None` for bytes that no encoder produces.
    pub(crate) fn decode(packet: &[u8]) -> Option<LinkMessage> {
        let (&kind, rest) = packet.split_first()?;
        if let HELLO | WELCOME | REFUSED | OVER | LIST | SET | CAPTURE = kind {
            // The version comes first: everything else may depend on it.
            let (version, rest) = rest.split_first_chunk()?;
            if u16::from_ne_bytes(*version) != VERSION {
                return Some(LinkMessage::Refused(Refusal::Version));
            }
            return match (kind, rest) {
                (HELLO, [slot, family, octets @ ..]) => {
                    let octets = Ipv6Addr::from(<[u8; 16]>::try_from(octets).ok()?);
                    let address = match family {
                        4 => IpAddr::V4(octets.to_ipv4_mapped()?),
                        6 => IpAddr::V6(octets),
                        _ => return None,
                    };
                    let slot = *slot;
                    Some(LinkMessage::Hello { address, slot })
                }
                (WELCOME, []) => Some(LinkMessage::Welcome),
                (OVER, []) => Some(LinkMessage::Over),
                (LIST, _) => Question::decode(packet).map(LinkMessage::List),
                (SET, _) => Setting::decode(packet).map(LinkMessage::Set),
                (CAPTURE, [len, text @ ..]) if usize::from(*len) == text.len() => {
                    let text = str::from_utf8(text).ok()?;
                    let filter: Filter = text.parse().ok()?;
                    (filter.to_string() == text).then_some(LinkMessage::Capture { filter })
                }
                (REFUSED, [refusal]) => Refusal::from_repr(*refusal).map(LinkMessage::Refused),
                _ => None,
            };
        }
        let (words, rest) = match kind {
            ASK | DENIED | LENT => rest.split_at_checked(12)?,
            GRANTED | LEND => rest.split_at_checked(20)?,
            _ => return None,
        };
        let word = |i: usize| words.as_chunks().0.get(i).map_or(0, |w| u32::from_ne_bytes(*w));
        let qpn = |i| Some(word(i)).filter(|n| *n < 1 << 24).map(Qpn::new);
        let (numbers, odd) = rest.as_chunks();
        let number = |i: usize| numbers.get(i).map_or(0, |n| u64::from_ne_bytes(*n));
        match (kind, numbers.len(), odd) {
            (ASK, 0, []) => Some(LinkMessage::Ask {
                rkey: RKey(word(0)),
                of: qpn(1)?,
                by: qpn(2)?,
            }),
            (DENIED, 0, []) => Some(LinkMessage::Denied {
                rkey: RKey(word(0)),
                by: qpn(1)?,
                reason: u8::try_from(word(2)).ok().and_then(Refusal::from_repr)?,
            }),
            (LENT, 0, []) => Some(LinkMessage::Lent {
                index: word(0),
                generation: word(1),
                accepts: match word(2) {
                    0 => false,
                    1 => true,
                    _ => return None,
                },
            }),
            (GRANTED | LEND, 8, []) => {
                let offer = Offer {
                    rkey: RKey(word(0)),
                    by: qpn(1)?,
                    index: word(2),
                    generation: word(3),
                    access: Access::from_bits(word(4))?,
                    iova: number(0),
                    length: number(1),
                    offset: number(2),
                    gate: number(3),
                    left: number(4),
                    pages: (number(5), number(6)),
                    calls: number(7),
                };
                Some(match kind {
                    LEND => LinkMessage::Lend(offer),
                    _ => LinkMessage::Granted(offer),
                })
            }
            _ => None,
        }
    }
}

fn encode_offer(kind: u8, offer: &Offer) -> Vec<u8> {
    let mut out = words(
        kind,
        &[
            offer.rkey.0,
            offer.by.value(),
            offer.index,
            offer.generation,
            offer.access.bits(),
        ],
    );
    for number in [
        offer.iova,
        offer.length,
        offer.offset,
        offer.gate,
        offer.left,
        offer.pages.0,
        offer.pages.1,
        offer.calls,
    ] {
        out.extend(number.to_ne_bytes());
    }
    out
}

fn words(kind: u8, words: &[u32]) -> Vec<u8> {
    let mut out = vec![kind];
    out.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    out
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use strum::VariantArray;

    use super::*;

    fn all() -> Vec<LinkMessage> {
        let (rkey, by, of) = (RKey(0x1234_5678), Qpn::new(0x01_0002), Qpn::new(0x02_0003));
        let granted = Offer {
            rkey,
            by,
            index: 3,
            generation: 9,
            access: Access::REMOTE_WRITE,
            iova: 1 << 40,
            length: 4096,
            offset: 8192,
            gate: 1 << 47,
            left: 77,
            pages: (4096, 12288),
            calls: 32,
        };
        let mut all = vec![
            LinkMessage::Hello {
                address: IpAddr::from([127, 0, 0, 1]),
                slot: 15,
            },
            LinkMessage::Hello {
                address: IpAddr::V6(Ipv6Addr::LOCALHOST),
                slot: 1,
            },
            LinkMessage::Welcome,
            LinkMessage::Over,
            LinkMessage::Set(Setting::Moderation(rdmux_verbs::ModerationPolicy::Dim)),
            LinkMessage::List(Question {
                object: rdmux_verbs::resources::Object::Mr,
                from: 0x01_0203 << 32,
            }),
            LinkMessage::Capture {
                filter: Filter::default(),
            },
            LinkMessage::Capture {
                filter: Filter {
                    qp: Some(Qpn::new(0xff_ffff)),
                    peer: Some(Ipv6Addr::from([0xfe; 16]).into()),
                    opcode: Some(crate::capture::PacketKind::Atomic),
                },
            },
            LinkMessage::Ask { rkey, of, by },
            LinkMessage::Granted(granted),
            LinkMessage::Lend(granted),
            LinkMessage::Lent {
                index: 3,
                generation: 9,
                accepts: true,
            },
        ];
        all.extend(
            Refusal::VARIANTS
                .iter()
                .map(|&reason| LinkMessage::Refused(reason)),
        );
        all.extend(
            Refusal::VARIANTS
                .iter()
                .map(|&reason| LinkMessage::Denied { rkey, by, reason }),
        );
        all
    }

    #[test]
    fn decode__inverts_encode() {
        for message in all() {
            let bytes = message.encode();
            assert!(bytes.len() < LEN_MAX);
            assert_eq!(LinkMessage::decode(&bytes), Some(message));
        }
    }

    #[test]
    fn decode__cut_or_extended() {
        for message in all() {
            let mut bytes = message.encode();
            for len in 0..bytes.len() {
                assert_eq!(
                    LinkMessage::decode(&bytes[..len]),
                    None,
                    "{message:?} cut to {len}"
                );
            }
            bytes.push(0);
            assert_eq!(LinkMessage::decode(&bytes), None, "{message:?} and a byte");
        }
    }

    #[test]
    fn decode__another_version() {
        let mut hello = all()[0].encode();
        hello[1..3].copy_from_slice(&(VERSION + 1).to_ne_bytes());
        assert_eq!(
            LinkMessage::decode(&hello),
            Some(LinkMessage::Refused(Refusal::Version))
        );
    }

    #[test]
    fn decode__anything_is_refused_or_encodes_to_the_same() {
        let mut state = 1u64;
        let mut next = move || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) as usize
        };
        let mut understood = 0;
        for _ in 0..300_000 {
            let all = all();
            let mut bytes = all[next() % all.len()].encode();
            for _ in 0..next() % 4 {
                let at = next() % bytes.len();
                bytes[at] = next() as u8;
            }
            match next() % 8 {
                0 => bytes.truncate(next() % (bytes.len() + 1)),
                1 => bytes.resize_with(bytes.len() + next() % LEN_MAX, || next() as u8),
                _ => {}
            }
            match LinkMessage::decode(&bytes) {
                None | Some(LinkMessage::Refused(Refusal::Version)) => {}
                Some(message) => {
                    assert_eq!(message.encode(), bytes, "{message:?}");
                    understood += 1;
                }
            }
        }
        assert!(understood > 10_000);
    }
}
