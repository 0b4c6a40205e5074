//! What `dev`, `link`, `res` and `stat` have in common: the devices that answer, filters, and how objects are shown, with the words
//! and JSON keys of rdma(8).
//!
//! A device is a process's place on an address, and its name ADDRESS/SLOT: JSON has the address as `ifname` and the slot as `port`.

use std::borrow::Cow;
use std::fs;
use std::io::IsTerminal;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::error::ErrorKind;
use rdmux_verbs::soft::resources::{AskError, DeviceAt, Item, Object, ask, devices};
use serde_json::{Map, Value, json};

use crate::output::{self, Align};

/// How long all devices together have for their answers.
const PATIENCE: Duration = Duration::from_secs(2);

/// How objects are printed.
#[derive(clap::Args, Clone, Copy, Debug)]
pub(crate) struct Output {
    /// Print JSON, with the keys of rdma(8): an array of objects.
    #[arg(short, long)]
    pub(crate) json: bool,
    /// Print JSON with a line for each value.
    #[arg(short, long, requires = "json")]
    pub(crate) pretty: bool,
}

/// Which devices are meant: ADDRESS/SLOT, ADDRESS/- or ADDRESS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    All,
    /// All of an address.
    Of(IpAddr),
    One(DeviceAt),
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Named, String> {
        let address = text.strip_suffix("/-").unwrap_or(text);
        if let Ok(address) = address.parse() {
            return Ok(Named::Of(address));
        }
        text.parse().map(Named::One).map_err(|_| {
            format!("{text:?} names no device: give ADDRESS/SLOT or ADDRESS, as `rdmux dev show` prints it")
        })
    }
}

impl Named {
    fn is_it(self, device: DeviceAt) -> bool {
        match self {
            Named::All => true,
            Named::Of(address) => device.address == address,
            Named::One(one) => device == one,
        }
    }

    fn words(self) -> String {
        match self {
            Named::All => "any".into(),
            Named::Of(address) => address.to_string(),
            Named::One(one) => one.to_string(),
        }
    }
}

/// What a device answered.
pub(crate) struct Answer {
    /// Its place among all devices, by address and slot, at this moment.
    pub(crate) index: usize,
    pub(crate) at: DeviceAt,
    pub(crate) pid: Option<u32>,
    pub(crate) comm: Option<String>,
    pub(crate) items: Result<Vec<Item>, String>,
}

/// What devices answered, and a note for each that keeps to itself what it has.
pub(crate) fn answers(named: Named, object: Object) -> Result<(Vec<Answer>, Vec<anyhow::Error>)> {
    let all = devices();
    let chosen: Vec<DeviceAt> = all.iter().copied().filter(|at| named.is_it(*at)).collect();
    let (mut found, mut hidden) = (Vec::new(), Vec::new());
    for (at, answer) in ask(&chosen, object, PATIENCE) {
        let (pid, items) = match answer {
            Ok(told) => (told.pid, Ok(told.items)),
            Err(AskError::NotThere) => continue,
            Err(error @ (AskError::OtherUser { .. } | AskError::UnknownUser)) => {
                hidden.push(anyhow::Error::new(error).context(format!("{at} is not shown")));
                continue;
            }
            Err(error @ (AskError::NoAnswer { pid } | AskError::Ended { pid })) => {
                (pid, Err(error.to_string()))
            }
            Err(error) => (None, Err(error.to_string())),
        };
        found.push(Answer {
            index: all.iter().position(|one| *one == at).unwrap_or(0),
            at,
            pid,
            comm: pid.and_then(comm),
            items,
        });
    }
    if found.is_empty() && hidden.is_empty() && named != Named::All {
        bail!(
            "there is no device {} in this network namespace: `rdmux dev show` lists them",
            named.words()
        );
    }
    Ok((found, hidden))
}

/// The name of a process.
fn comm(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    // A process names itself as it likes.
    Some(
        name.trim_end()
            .replace(|c: char| c.is_control() || c.is_whitespace(), "?"),
    )
}

/// How a value is shown to a person.
#[derive(Clone, Debug, PartialEq)]
enum Shown {
    /// As it is; not at all when there is none.
    Plain,
    /// With other words.
    As(String),
    /// In JSON alone.
    Hidden,
}

/// An object: names and values in the order in which they are shown.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// What a line begins with.
    pub(crate) head: String,
    pairs: Vec<(Cow<'static, str>, Value, Shown)>,
}

impl Row {
    /// An object of a device. `head` names it in a line.
    pub(crate) fn of(answer: &Answer, head: String) -> Row {
        let row = Row {
            head,
            pairs: Vec::new(),
        };
        row.hidden("ifname", json!(answer.at.address))
            .hidden("port", json!(answer.at.slot))
    }

    pub(crate) fn with(mut self, key: impl Into<Cow<'static, str>>, value: impl Into<Value>) -> Row {
        self.pairs.push((key.into(), value.into(), Shown::Plain));
        self
    }

    /// A value that a person reads with other words.
    pub(crate) fn shown_as(
        mut self,
        key: impl Into<Cow<'static, str>>,
        value: impl Into<Value>,
        words: String,
    ) -> Row {
        self.pairs.push((key.into(), value.into(), Shown::As(words)));
        self
    }

    pub(crate) fn hidden(mut self, key: impl Into<Cow<'static, str>>, value: impl Into<Value>) -> Row {
        self.pairs.push((key.into(), value.into(), Shown::Hidden));
        self
    }

    /// Its process.
    pub(crate) fn with_process(self, answer: &Answer) -> Row {
        self.with("pid", answer.pid).with("comm", answer.comm.clone())
    }

    /// What is shown of a device that gives no answer.
    pub(crate) fn error(answer: &Answer, head: String, why: &str) -> Row {
        Row::of(answer, head)
            .shown_as("error", why, String::new())
            .with_process(answer)
    }

    /// Whether there is such a value.
    #[cfg(test)]
    pub(crate) fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    fn value(&self, key: &str) -> Option<&Value> {
        let mut pairs = self.pairs.iter();
        pairs.find(|(name, ..)| *name == key).map(|(_, value, _)| value)
    }

    fn json(&self) -> Value {
        let pairs = self.pairs.iter();
        Value::Object(
            pairs
                .map(|(key, value, _)| (key.to_string(), value.clone()))
                .collect::<Map<_, _>>(),
        )
    }

    /// A value for a person; `None`: it has none.
    fn cell(&self, key: &str) -> Option<String> {
        let (_, value, shown) = self.pairs.iter().find(|(name, ..)| *name == key)?;
        match (shown, value) {
            (Shown::Hidden, _) | (Shown::Plain, Value::Null) => None,
            (Shown::As(words), _) => Some(words.clone()).filter(|words| !words.is_empty()),
            (Shown::Plain, Value::String(text)) => Some(text.clone()),
            (Shown::Plain, Value::Array(list)) => {
                let words = list
                    .iter()
                    .map(|one| one.as_str().map_or_else(|| one.to_string(), str::to_owned));
                Some(words.collect::<Vec<_>>().join(",")).filter(|words| !words.is_empty())
            }
            (Shown::Plain, value) => Some(value.to_string()),
        }
    }

    fn line(&self) -> String {
        let mut line = self.head.clone();
        if let Some(Value::String(why)) = self.value("error") {
            line += &format!(" ({why})");
        }
        for (key, ..) in &self.pairs {
            if let Some(cell) = self.cell(key) {
                line += &format!(" {key} {cell}");
            }
        }
        line
    }
}

/// Prints objects: JSON, a table on a terminal, where columns are named, else a line for each.
pub(crate) fn print(rows: &[Row], output: Output, columns: &[(&str, Align)], notes: Vec<anyhow::Error>) {
    let text = if output.json {
        let list = Value::Array(rows.iter().map(Row::json).collect());
        if output.pretty {
            format!("{list:#}")
        } else {
            list.to_string()
        }
    } else if !columns.is_empty() && std::io::stdout().is_terminal() {
        table(rows, columns)
    } else {
        rows.iter().map(Row::line).collect::<Vec<_>>().join("\n")
    };
    if !text.is_empty() {
        output::say(&text);
    }
    for note in notes {
        output::error(&note);
    }
}

/// The objects under a header, each with its device in the first column.
pub(crate) fn table(rows: &[Row], columns: &[(&str, Align)]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let cells = |row: &Row| {
        let name = row.head.split_once(' ').map_or(&*row.head, |(_, name)| name);
        let error = row.value("error").and_then(Value::as_str);
        let mut cells = vec![name.to_owned()];
        cells.extend(
            columns
                .iter()
                .map(|(key, _)| row.cell(key).unwrap_or_else(|| "-".into())),
        );
        if let (Some(why), Some(last)) = (error, cells.last_mut()) {
            *last = format!("({why})");
        }
        cells
    };
    let kind = rows[0].head.split_once(' ').map_or("device", |(kind, _)| kind);
    let columns: Vec<(&str, Align)> = std::iter::once((kind, Align::Left))
        .chain(columns.iter().copied())
        .collect();
    output::table(&columns, &rows.iter().map(cells).collect::<Vec<_>>())
}

/// What a filter's value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Numbers: `7`, `3-9`, `1,5,8-12`.
    Number,
    /// Words: `RTS`, `RTR,RTS`.
    Word,
}

/// What is to be shown of all objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) named: Named,
    /// All of these must hold.
    tests: Vec<(&'static str, Test)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Numbers(Vec<(u64, u64)>),
    Words(Vec<String>),
}

impl Filter {
    /// Names and values in turn; a mistake ends the program as wrong usage.
    pub(crate) fn of_words(words: &[String], keys: &[(&'static str, Kind)]) -> Filter {
        Filter::parse(words, keys)
            .unwrap_or_else(|why| clap::Error::raw(ErrorKind::InvalidValue, format!("{why}\n")).exit())
    }

    fn parse(words: &[String], keys: &[(&'static str, Kind)]) -> Result<Filter, String> {
        let mut filter = Filter {
            named: Named::All,
            tests: Vec::new(),
        };
        for pair in words.chunks(2) {
            let (name, value) = match pair {
                [name, value] => (name.as_str(), value.as_str()),
                _ => return Err(format!("the filter {:?} has no value", pair[0])),
            };
            if let "link" | "dev" = name {
                filter.named = value.parse()?;
                continue;
            }
            let Some((key, kind)) = keys.iter().find(|(key, _)| *key == name) else {
                let all: Vec<&str> = ["link", "dev"]
                    .into_iter()
                    .chain(keys.iter().map(|(key, _)| *key))
                    .collect();
                return Err(format!(
                    "there is no filter {name:?}: there are {}",
                    all.join(", ")
                ));
            };
            let test = match kind {
                Kind::Word => Test::Words(value.split(',').map(str::to_owned).collect()),
                Kind::Number => {
                    let ranges = value.split(',').map(range).collect::<Option<_>>();
                    let why =
                        || format!("{name} takes numbers, ranges and lists such as 1,4-9: not {value:?}");
                    Test::Numbers(ranges.ok_or_else(why)?)
                }
            };
            filter.tests.push((key, test));
        }
        Ok(filter)
    }

    /// Whether an object is to be shown; one that could not be told of is, unless something is asked of it.
    pub(crate) fn takes(&self, row: &Row) -> bool {
        self.tests.iter().all(|(key, test)| match (test, row.value(key)) {
            (Test::Numbers(ranges), Some(value)) => {
                let all = value
                    .as_array()
                    .map_or(std::slice::from_ref(value), Vec::as_slice);
                let mut numbers = all.iter().filter_map(Value::as_u64);
                numbers.any(|n| ranges.iter().any(|(from, to)| (*from..=*to).contains(&n)))
            }
            (Test::Words(words), Some(Value::String(text))) => {
                words.iter().any(|word| word.eq_ignore_ascii_case(text))
            }
            _ => false,
        })
    }
}

/// `7` or `3-9`.
fn range(text: &str) -> Option<(u64, u64)> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let (from, to) = (from.parse().ok()?, to.parse().ok()?);
    (from <= to).then_some((from, to))
}

/// A GUID as rdma(8) prints it.
pub(crate) fn guid(guid: u64) -> String {
    let part = |shift: u32| (guid >> shift) & 0xffff;
    format!(
        "{:04x}:{:04x}:{:04x}:{:04x}",
        part(48),
        part(32),
        part(16),
        part(0)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [(&str, Kind); 3] = [
        ("lqpn", Kind::Number),
        ("state", Kind::Word),
        ("pid", Kind::Number),
    ];

    pub(crate) fn answer() -> Answer {
        Answer {
            index: 0,
            at: "127.0.0.1/3".parse().unwrap(),
            pid: Some(7),
            comm: Some("perf".into()),
            items: Ok(Vec::new()),
        }
    }

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn row(lqpn: u32, state: &str) -> Row {
        let row = Row::of(&answer(), "link 127.0.0.1/3".into());
        row.with("lqpn", lqpn)
            .with("state", state)
            .with_process(&answer())
    }

    #[test]
    fn takes__numbers_ranges_lists_and_words() {
        let takes = |text: &str, row: &Row| Filter::parse(&words(text), &KEYS).unwrap().takes(row);
        let row = row(17, "RTS");
        for text in [
            "",
            "lqpn 17",
            "lqpn 3,17",
            "lqpn 1-3,15-20",
            "state rts",
            "state RTR,RTS",
            "pid 7 lqpn 17",
        ] {
            assert!(takes(text, &row), "{text}");
        }
        for text in [
            "lqpn 18",
            "lqpn 1-16",
            "state RTR",
            "pid 7 lqpn 16",
            "lqpn 17 state ERR",
        ] {
            assert!(!takes(text, &row), "{text}");
        }
    }

    #[test]
    fn parse__devices() {
        let named = |text: &str| Filter::parse(&words(text), &KEYS).map(|filter| filter.named);
        let address: IpAddr = [127, 0, 0, 1].into();
        assert_eq!(named("link 127.0.0.1/3"), Ok(Named::One(answer().at)));
        assert_eq!(named("link 127.0.0.1/-"), Ok(Named::Of(address)));
        assert_eq!(named("dev 127.0.0.1"), Ok(Named::Of(address)));
        assert_eq!(named("pid 3"), Ok(Named::All));
    }

    #[test]
    fn parse__says_what_is_wrong() {
        for (text, expected) in [
            ("lqpn", "the filter \"lqpn\" has no value"),
            (
                "qpn 3",
                "there is no filter \"qpn\": there are link, dev, lqpn, state, pid",
            ),
            (
                "lqpn x",
                "lqpn takes numbers, ranges and lists such as 1,4-9: not \"x\"",
            ),
            (
                "lqpn 9-3",
                "lqpn takes numbers, ranges and lists such as 1,4-9: not \"9-3\"",
            ),
            (
                "lqpn -",
                "lqpn takes numbers, ranges and lists such as 1,4-9: not \"-\"",
            ),
            (
                "link eth0",
                "\"eth0\" names no device: give ADDRESS/SLOT or ADDRESS, as `rdmux dev show` prints it",
            ),
        ] {
            assert_eq!(Filter::parse(&words(text), &KEYS), Err(expected.into()), "{text}");
        }
    }

    #[test]
    fn line__names_and_values() {
        let row = row(17, "RTS").with("rqpn", Value::Null).hidden("x", 1);
        assert_eq!(row.line(), "link 127.0.0.1/3 lqpn 17 state RTS pid 7 comm perf");
        let silent = Row::error(&answer(), "link 127.0.0.1/3".into(), "it does not answer");
        assert_eq!(
            silent.line(),
            "link 127.0.0.1/3 (it does not answer) pid 7 comm perf"
        );
        assert_eq!(silent.json()["error"], "it does not answer");
        assert_eq!(silent.json()["ifname"], "127.0.0.1");
    }

    #[test]
    fn guid__as_rdma_prints_it() {
        assert_eq!(guid(0x0123_4567_89ab_cdef), "0123:4567:89ab:cdef");
    }
}
