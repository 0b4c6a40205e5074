//! Reports of an engine's objects to clients: pages of records.
//!
//! The answer to a [`Question`] is one page: the first objects of a kind from the requested number on,
//! in the order of their numbers. A client that wants more asks again. So the engine keeps no state for clients, and the cost of one
//! request is bounded.
//!
//! A record is a number, a name (most records have none), and words whose meaning depends on the kind ([`super::Item`]).
//! All numbers have the host's byte order.

use strum::{FromRepr, VariantArray};

use crate::moderation::ModerationPolicy;

pub use super::items::{Carried, Reached, qp_record};

/// Version of the protocol, and of all messages between engines of a host; both ends must have the same.
pub const VERSION: u16 = 8;

/// Kinds of packets, among the kinds of messages between engines: those that clients send.
pub const LIST: u8 = 8;
const PAGE: u8 = 9;
/// See [`LIST`].
pub const SET: u8 = 13;
const ANSWER: u8 = 14;

/// Most records of a page.
pub const RECORDS_MAX: usize = 256;
/// Most words of a record.
pub(crate) const WORDS_MAX: usize = 48;
/// Most bytes of a record's name.
const NAME_BYTES_MAX: usize = 64;
/// Longer than any page, so that a longer one is noticed.
pub const PAGE_BYTES_MAX: usize = HEADER_BYTES + RECORDS_MAX * (10 + NAME_BYTES_MAX + 8 * WORDS_MAX) + 1;

const HEADER_BYTES: usize = 5;

/// Kinds of objects. The numbers are part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromRepr, VariantArray)]
#[repr(u8)]
pub enum Object {
    /// The device itself: always one record.
    Device = 1,
    /// Queue pairs.
    Qp = 2,
    /// Completion queues.
    Cq = 3,
    /// Memory regions and windows.
    Mr = 4,
    /// Protection domains.
    Pd = 5,
    /// Connections and listeners.
    CmId = 6,
    /// Shared receive queues.
    Srq = 7,
    /// Counters.
    Counter = 8,
}

/// Asks for the objects of a kind from a number on. Answered by a [`Page`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The kind.
    pub object: Object,
    /// Least number of an object of the answer.
    pub from: u64,
}

/// Longer than any question, so that a longer one is noticed.
pub const QUESTION_BYTES_MAX: usize = 13;

impl Question {
    /// Encodes the question.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![LIST];
        out.extend(VERSION.to_ne_bytes());
        out.push(self.object as u8);
        out.extend(self.from.to_ne_bytes());
        out
    }

    /// Returns `None` for bytes that no encoder produces.
    pub fn decode(packet: &[u8]) -> Option<Question> {
        let [LIST, low, high, object, from @ ..] = packet else {
            return None;
        };
        let is_ours = u16::from_ne_bytes([*low, *high]) == VERSION;
        is_ours.then_some(Question {
            object: Object::from_repr(*object)?,
            from: u64::from_ne_bytes(from.try_into().ok()?),
        })
    }
}

/// Asks for a change of the device. Answered by an [`Answer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// The policy of the completion queues that have none of their own.
    Moderation(ModerationPolicy),
}

/// Answer to a [`Setting`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromRepr, VariantArray)]
#[repr(u8)]
pub enum Answer {
    /// The device has changed.
    Done = 0,
    /// The device has no such property.
    NotOffered = 1,
}

impl Setting {
    /// Encodes the setting.
    pub fn encode(&self) -> Vec<u8> {
        let Setting::Moderation(policy) = self;
        let mut out = vec![SET];
        out.extend(VERSION.to_ne_bytes());
        out.extend(policy.to_word().to_ne_bytes());
        out
    }

    /// Returns `None` for bytes that no encoder produces.
    pub fn decode(packet: &[u8]) -> Option<Setting> {
        let [SET, low, high, policy @ ..] = packet else {
            return None;
        };
        let is_ours = u16::from_ne_bytes([*low, *high]) == VERSION;
        let word = u64::from_ne_bytes(policy.try_into().ok()?);
        let policy = ModerationPolicy::from_word(word)?;
        is_ours.then_some(Setting::Moderation(policy))
    }
}

impl Answer {
    /// Encodes the answer.
    pub fn encode(self) -> Vec<u8> {
        let [low, high] = VERSION.to_ne_bytes();
        vec![ANSWER, low, high, self as u8]
    }

    /// Returns `None` for bytes that no encoder produces.
    pub fn decode(packet: &[u8]) -> Option<Answer> {
        let [ANSWER, low, high, answer] = packet else {
            return None;
        };
        let is_ours = u16::from_ne_bytes([*low, *high]) == VERSION;
        Answer::from_repr(*answer).filter(|_| is_ours)
    }
}

/// A page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The kind of its objects.
    pub object: Object,
    /// Set when more objects follow.
    pub more: bool,
    /// The records, in the order of their numbers, each of which is there once.
    pub records: Vec<Record>,
}

/// Report of one object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Its number.
    pub number: u64,
    /// Its name, of visible ASCII characters.
    pub name: String,
    /// The rest, by the kind of the object.
    pub words: Vec<u64>,
}

impl Page {
    /// Encodes the page. Omits whatever exceeds the limits of a page or a record.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![PAGE];
        out.extend(VERSION.to_ne_bytes());
        out.extend([self.object as u8, u8::from(self.more)]);
        for record in self.records.iter().take(RECORDS_MAX) {
            let name = record.name.get(..record.name.len().min(NAME_BYTES_MAX));
            let name = name.unwrap_or_default();
            let words = &record.words[..record.words.len().min(WORDS_MAX)];
            out.extend(record.number.to_ne_bytes());
            out.extend([name.len() as u8, words.len() as u8]);
            out.extend(name.bytes());
            out.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        }
        out
    }

    /// Returns `None` for bytes that no encoder produces.
    pub fn decode(packet: &[u8]) -> Option<Page> {
        let (header, mut rest) = packet.split_first_chunk::<HEADER_BYTES>()?;
        let [PAGE, low, high, object, more] = *header else {
            return None;
        };
        let object = Object::from_repr(object)?;
        if u16::from_ne_bytes([low, high]) != VERSION || more > 1 {
            return None;
        }
        let mut records: Vec<Record> = Vec::new();
        while !rest.is_empty() {
            let (record, left) = Record::parse(rest)?;
            let in_order = records.last().is_none_or(|last| last.number < record.number);
            if !in_order || records.len() == RECORDS_MAX {
                return None;
            }
            records.push(record);
            rest = left;
        }
        Some(Page {
            object,
            more: more == 1,
            records,
        })
    }
}

impl Record {
    /// Parses one record from the front of `bytes`.
    fn parse(bytes: &[u8]) -> Option<(Record, &[u8])> {
        let (number, rest) = bytes.split_first_chunk()?;
        let ([name_len, n_words], rest) = rest.split_first_chunk()?;
        let (name_len, n_words) = (usize::from(*name_len), usize::from(*n_words));
        if name_len > NAME_BYTES_MAX || n_words > WORDS_MAX {
            return None;
        }
        let (name, rest) = rest.split_at_checked(name_len)?;
        let (words, rest) = rest.split_at_checked(8 * n_words)?;
        // Names are shown to people.
        let name = str::from_utf8(name).ok()?;
        if !name.chars().all(|c| c.is_ascii_graphic()) {
            return None;
        }
        let record = Record {
            number: u64::from_ne_bytes(*number),
            name: name.to_owned(),
            words: words
                .as_chunks()
                .0
                .iter()
                .map(|word| u64::from_ne_bytes(*word))
                .collect(),
        };
        Some((record, rest))
    }

    /// Returns a word, or 0 beyond the last.
    pub(crate) fn word(&self, at: usize) -> u64 {
        self.words.get(at).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use super::*;

    fn page() -> Page {
        let record = |number, name: &str, words: &[u64]| Record {
            number,
            name: name.into(),
            words: words.into(),
        };
        Page {
            object: Object::Cq,
            more: true,
            records: vec![
                record(0, "", &[]),
                record(7, "sent_pkts", &[1]),
                record(u64::MAX, "", &[u64::MAX; WORDS_MAX]),
            ],
        }
    }

    #[test]
    fn decode__inverts_encode() {
        for &object in Object::VARIANTS {
            let page = Page { object, ..page() };
            let bytes = page.encode();
            assert!(bytes.len() < PAGE_BYTES_MAX);
            assert_eq!(Page::decode(&bytes), Some(page));
        }
        let full = Page {
            records: (0..RECORDS_MAX as u64)
                .map(|number| Record {
                    number,
                    name: "x".repeat(NAME_BYTES_MAX),
                    words: vec![number; WORDS_MAX],
                })
                .collect(),
            ..page()
        };
        assert_eq!(full.encode().len(), PAGE_BYTES_MAX - 1);
        assert_eq!(Page::decode(&full.encode()), Some(full));
    }

    #[test]
    fn decode__inverts_encode_of_settings() {
        for policy in ["off", "dim", "rate", "16,32us"] {
            let setting = Setting::Moderation(policy.parse().unwrap());
            let bytes = setting.encode();
            assert!(bytes.len() < QUESTION_BYTES_MAX);
            assert_eq!(Setting::decode(&bytes), Some(setting));
            assert_eq!(Setting::decode(&bytes[1..]), None);
            assert_eq!(Setting::decode(&[&bytes[..], &[0]].concat()), None);
        }
        for answer in Answer::VARIANTS {
            assert_eq!(Answer::decode(&answer.encode()), Some(*answer));
        }
        assert_eq!(Answer::decode(&[ANSWER, 0, 0, 0]), None);
    }

    #[test]
    fn decode__any_byte_changed_or_cut() {
        let bytes = page().encode();
        for at in 0..bytes.len() {
            let _ = Page::decode(&bytes[..at]);
            for value in 0..=255 {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = Page::decode(&changed);
            }
        }
        assert_eq!(Page::decode(&bytes[..bytes.len() - 1]), None);
    }

    #[test]
    fn decode__numbers_out_of_order() {
        let mut page = page();
        page.records.swap(0, 1);
        assert_eq!(Page::decode(&page.encode()), None);
    }

    #[test]
    fn decode__name_that_moves_a_terminals_cursor() {
        let mut page = page();
        page.records[1].name = "\u{1b}[2J".into();
        assert_eq!(Page::decode(&page.encode()), None);
    }

    #[test]
    fn decode__another_version() {
        let mut bytes = page().encode();
        bytes[1..3].copy_from_slice(&(VERSION + 1).to_ne_bytes());
        assert_eq!(Page::decode(&bytes), None);
    }
}
