//! Common parts of `dev`, `link`, `res` and `stat`: the devices that answer, filters, and the display of objects, with the words and JSON
//! keys of rdma(8).
//!
//! A device is a process's place on an address, and its name ADDRESS/SLOT: JSON has the address as `ifname` and the slot as `port`. Slots from
//! 128 on are devices of provider `hw`, and shown with that word.

use std::borrow::Cow;
use std::fs;
use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::ArgAction;
use clap::error::ErrorKind;
use rdmux_verbs::resources::{AskError, DeviceAt, Item, Object, ask, devices, rnics};
use serde_json::{Map, Value, json};

use crate::output::{self, Align};

/// Time that all devices together have for their answers.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// How objects are printed.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub(crate) struct Output {
    /// Print JSON with the keys of rdma(8): an array of objects.
    #[arg(short, long)]
    pub(crate) json: bool,
    /// With --json, print each value on a line of its own.
    #[arg(short, long)]
    pub(crate) pretty: bool,
}

/// The options of rdma(8), which may stand anywhere: also before the kind of object, as `rdmux -j res show`.
#[derive(clap::Args, Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    #[command(flatten)]
    output: Output,
    /// Show more of each object; JSON always has everything.
    #[arg(short, long, action = ArgAction::Count)]
    details: u8,
}

impl Options {
    /// Combines these options with those given in another place.
    pub(crate) fn and(self, other: Options) -> Options {
        Options {
            output: Output {
                json: self.output.json || other.output.json,
                pretty: self.output.pretty || other.output.pretty,
            },
            details: self.details.max(other.details),
        }
    }

    pub(crate) fn wants_details(self) -> bool {
        self.details > 0
    }

    /// Returns whether any option is given.
    pub(crate) fn is_any(self) -> bool {
        self.output.json || self.output.pretty || self.details > 0
    }
}

/// Devices that the user means: ADDRESS/SLOT, ADDRESS/- or ADDRESS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Named {
    All,
    /// All devices of an address.
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
            format!("{text:?} is not a device: give ADDRESS/SLOT or ADDRESS, as `rdmux dev show` prints it")
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

/// Answer of a device.
pub(crate) struct Answer {
    /// Index among all devices, by address and slot, at this moment.
    pub(crate) index: usize,
    pub(crate) at: DeviceAt,
    pub(crate) pid: Option<u32>,
    pub(crate) comm: Option<String>,
    pub(crate) items: Result<Vec<Item>, String>,
}

/// Returns the answers of devices, and a note for each device that hides its objects from this user.
pub(crate) fn answers(named: Named, object: Object) -> Result<(Vec<Answer>, Vec<anyhow::Error>)> {
    let all = all_devices();
    let chosen: Vec<DeviceAt> = all.iter().copied().filter(|at| named.is_it(*at)).collect();
    let (mut found, mut hidden) = (Vec::new(), Vec::new());
    for (at, answer) in ask(&chosen, object, PATIENCE) {
        let (pid, items) = match answer {
            Ok(told) => (told.pid, Ok(told.items)),
            Err(AskError::NotThere) => continue,
            Err(error @ (AskError::OtherUser { .. } | AskError::UnknownUser)) => {
                hidden.push(anyhow::Error::new(error).context(format!("cannot show {at}")));
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
        return Err(no_device(named));
    }
    Ok((found, hidden))
}

/// Returns all devices, by address and slot.
fn all_devices() -> Vec<DeviceAt> {
    let mut all = devices();
    all.extend(rnics());
    all.sort();
    all
}

fn no_device(named: Named) -> anyhow::Error {
    anyhow!(
        "there is no device {} in this network namespace: `rdmux dev show` lists them",
        named.words()
    )
}

/// Returns the devices that are meant, at least one.
pub(crate) fn devices_of(named: Named) -> Result<Vec<DeviceAt>> {
    let mut chosen = all_devices();
    chosen.retain(|at| named.is_it(*at));
    if chosen.is_empty() {
        return Err(no_device(named));
    }
    Ok(chosen)
}

/// Returns the name of a process.
pub(crate) fn comm(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    // A process may choose any name.
    Some(
        name.trim_end()
            .replace(|c: char| c.is_control() || c.is_whitespace(), "?"),
    )
}

/// Form in which a person sees a value.
#[derive(Clone, Debug, PartialEq)]
enum Shown {
    /// As it is; left out when there is none.
    Plain,
    /// In other words.
    As(String),
    /// Free text: between quotes in a line, and `-` where there is none.
    Quoted,
    /// Only in JSON.
    Hidden,
    /// In JSON, and for a user who asks for details.
    Detail,
}

/// An object: names and values in the order in which they are shown.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// Beginning of its line.
    pub(crate) head: String,
    pairs: Vec<(Cow<'static, str>, Value, Shown)>,
}

impl Row {
    /// Creates the row of an object of a device. `head` names it in a line.
    pub(crate) fn of(answer: &Answer, head: String) -> Row {
        let row = Row {
            head,
            pairs: Vec::new(),
        };
        let row = row
            .hidden("ifname", json!(answer.at.address))
            .hidden("port", json!(answer.at.slot));
        // An RNIC has a provider.
        match answer.at.is_rnic() {
            true => row.with("provider", "hw"),
            false => row,
        }
    }

    pub(crate) fn with(mut self, key: impl Into<Cow<'static, str>>, value: impl Into<Value>) -> Row {
        self.pairs.push((key.into(), value.into(), Shown::Plain));
        self
    }

    /// Adds a value that a person reads in other words.
    pub(crate) fn shown_as(
        mut self,
        key: impl Into<Cow<'static, str>>,
        value: impl Into<Value>,
        words: String,
    ) -> Row {
        self.pairs.push((key.into(), value.into(), Shown::As(words)));
        self
    }

    /// Adds a text that may have spaces.
    pub(crate) fn quoted(mut self, key: impl Into<Cow<'static, str>>, text: Option<String>) -> Row {
        self.pairs.push((key.into(), text.into(), Shown::Quoted));
        self
    }

    pub(crate) fn hidden(mut self, key: impl Into<Cow<'static, str>>, value: impl Into<Value>) -> Row {
        self.pairs.push((key.into(), value.into(), Shown::Hidden));
        self
    }

    pub(crate) fn detail(mut self, key: impl Into<Cow<'static, str>>, value: impl Into<Value>) -> Row {
        self.pairs.push((key.into(), value.into(), Shown::Detail));
        self
    }

    /// Adds the device's process.
    pub(crate) fn with_process(self, answer: &Answer) -> Row {
        self.with("pid", answer.pid).with("comm", answer.comm.clone())
    }

    /// Creates the row of a device that gives no answer.
    pub(crate) fn error(answer: &Answer, head: String, why: &str) -> Row {
        Row::of(answer, head)
            .shown_as("error", why, String::new())
            .with_process(answer)
    }

    /// Returns whether there is such a value.
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

    /// Returns the form of a value that a person sees; `None` where there is none.
    fn cell(&self, key: &str, details: bool) -> Option<String> {
        let (_, value, shown) = self.pairs.iter().find(|(name, ..)| *name == key)?;
        match (shown, value) {
            (Shown::Detail, _) if !details => None,
            (Shown::Hidden, _) | (_, Value::Null) => None,
            (Shown::As(words), _) => Some(words.clone()).filter(|words| !words.is_empty()),
            (_, Value::String(text)) => Some(text.clone()),
            (_, Value::Array(list)) => {
                let words = list
                    .iter()
                    .map(|one| one.as_str().map_or_else(|| one.to_string(), str::to_owned));
                Some(words.collect::<Vec<_>>().join(",")).filter(|words| !words.is_empty())
            }
            (_, value) => Some(value.to_string()),
        }
    }

    fn line(&self, details: bool) -> String {
        let mut line = self.head.clone();
        if let Some(Value::String(why)) = self.value("error") {
            line += &format!(" ({why})");
        }
        for (key, _, shown) in &self.pairs {
            match (self.cell(key, details), shown) {
                (Some(cell), Shown::Quoted) if cell.contains(' ') => line += &format!(" {key} {cell:?}"),
                (Some(cell), _) => line += &format!(" {key} {cell}"),
                (None, Shown::Quoted) => line += &format!(" {key} -"),
                (None, _) => {}
            }
        }
        line
    }
}

/// Prints objects: as JSON; as a table on a terminal, where columns are named; or else a line for each.
pub(crate) fn print(rows: &[Row], options: Options, columns: &[(&str, Align)], notes: Vec<anyhow::Error>) {
    let Options { output, .. } = options;
    let details = options.wants_details();
    let text = if output.json {
        let list = Value::Array(rows.iter().map(Row::json).collect());
        if output.pretty {
            format!("{list:#}")
        } else {
            list.to_string()
        }
    } else if !columns.is_empty() && !details && std::io::stdout().is_terminal() {
        table(rows, columns)
    } else {
        let lines = rows.iter().map(|row| row.line(details));
        lines.collect::<Vec<_>>().join("\n")
    };
    if !text.is_empty() {
        output::say(&text);
    } else if notes.is_empty() {
        // Standard output stays empty, as that of rdma(8); without a word a user could take that for a failure.
        output::error(&anyhow!(
            "nothing to show: no program of this user in this network namespace has such a device or object"
        ));
    }
    for note in notes {
        output::error(&note);
    }
}

/// Returns the objects under a header, each with its device in the first column.
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
                .map(|(key, _)| row.cell(key, false).unwrap_or_else(|| "-".into())),
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

/// Form of a filter's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Numbers: `7`, `3-9`, `1,5,0x8-0xc`.
    Number,
    /// Words: `perf`, `perf,serve`.
    Word,
    /// Some of these words.
    OneOf(&'static [&'static str]),
    /// Addresses, with a port or without.
    Address,
}

/// Selection of the objects to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    pub(crate) named: Named,
    /// All of these must hold.
    tests: Vec<(&'static str, Test)>,
}

/// Accepted values: the object's value must be one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    Numbers(Vec<(u64, u64)>),
    Words(Vec<String>),
    Addresses(Vec<String>),
}

impl Test {
    fn parse(name: &str, kind: Kind, value: &str) -> Result<Test, String> {
        let words: Vec<String> = value.split(',').map(str::to_owned).collect();
        match kind {
            Kind::Number => {
                let ranges = value.split(',').map(range).collect::<Option<_>>();
                let why = || {
                    format!(
                        "filter {name} takes numbers, ranges and lists such as 1,4-9 or 0x2a, not {value:?}"
                    )
                };
                Ok(Test::Numbers(ranges.ok_or_else(why)?))
            }
            Kind::Word => Ok(Test::Words(words)),
            Kind::OneOf(all) => {
                let is_known = |word: &String| all.iter().any(|one| one.eq_ignore_ascii_case(word));
                match words.iter().find(|word| !is_known(word)) {
                    None => Ok(Test::Words(words)),
                    Some(word) => Err(format!(
                        "filter {name} takes {}, or a list of these, not {word:?}",
                        all.join(", ")
                    )),
                }
            }
            Kind::Address => Ok(Test::Addresses(words)),
        }
    }

    /// Adds the values of the same filter given again: either may match.
    fn or(&mut self, other: Test) {
        match (self, other) {
            (Test::Numbers(own), Test::Numbers(more)) => own.extend(more),
            (Test::Words(own), Test::Words(more)) | (Test::Addresses(own), Test::Addresses(more)) => {
                own.extend(more);
            }
            (own, other) => *own = other,
        }
    }

    fn holds(&self, value: &Value) -> bool {
        let text = value.as_str();
        match self {
            Test::Numbers(ranges) => {
                let all = value
                    .as_array()
                    .map_or(std::slice::from_ref(value), Vec::as_slice);
                let mut numbers = all
                    .iter()
                    .filter_map(|one| one.as_u64().or_else(|| one.as_str().and_then(number)));
                numbers.any(|n| ranges.iter().any(|(from, to)| (*from..=*to).contains(&n)))
            }
            Test::Words(words) => {
                text.is_some_and(|text| words.iter().any(|word| word.eq_ignore_ascii_case(text)))
            }
            Test::Addresses(words) => text.is_some_and(|text| {
                let bare = text.parse::<SocketAddr>().map(|at| at.ip().to_string());
                let bare = bare.as_deref().unwrap_or(text);
                words.iter().any(|word| word == text || word == bare)
            }),
        }
    }
}

impl Filter {
    /// Parses names and values in turn; a mistake ends the program as wrong usage.
    pub(crate) fn of_words(words: &[String], keys: &[(&'static str, Kind)]) -> Filter {
        Filter::parse(words, keys).unwrap_or_else(|why| wrong_usage(&why))
    }

    pub(crate) fn parse(words: &[String], keys: &[(&'static str, Kind)]) -> Result<Filter, String> {
        let mut filter = Filter {
            named: Named::All,
            tests: Vec::new(),
        };
        let mut words = words.iter();
        let mut devices = 0;
        while let Some(name) = words.next() {
            // A device can stand for itself, as `show mlx5_2` does in rdma(8).
            let device = name.parse::<Named>();
            let mut value = || {
                words
                    .next()
                    .ok_or_else(|| format!("the filter {name:?} has no value"))
            };
            if let (Ok(_), _) | (_, "link" | "dev") = (&device, name.as_str()) {
                devices += 1;
                if devices > 1 {
                    return Err("more than one device given: give one, or none for all".into());
                }
                filter.named = device.or_else(|_| value()?.parse())?;
                continue;
            }
            let Some((key, kind)) = keys.iter().find(|(key, _)| *key == name) else {
                return Err(format!("unknown filter {name:?}: filters are {}", names(keys)));
            };
            let test = Test::parse(name, *kind, value()?)?;
            match filter.tests.iter_mut().find(|(known, _)| known == key) {
                Some((_, known)) => known.or(test),
                None => filter.tests.push((key, test)),
            }
        }
        Ok(filter)
    }

    /// Returns whether to show an object. One that gave no answer is shown too, unless a filter asks for a value of it.
    pub(crate) fn takes(&self, row: &Row) -> bool {
        let mut tests = self.tests.iter();
        tests.all(|(key, test)| row.value(key).is_some_and(|value| test.holds(value)))
    }
}

/// Returns the names of filters.
pub(crate) fn names(keys: &[(&'static str, Kind)]) -> String {
    let all = ["link", "dev"]
        .into_iter()
        .chain(keys.iter().map(|(key, _)| *key));
    all.collect::<Vec<_>>().join(", ")
}

/// Ends the program as clap does after a wrong argument.
pub(crate) fn wrong_usage(why: &str) -> ! {
    clap::Error::raw(ErrorKind::InvalidValue, format!("{why}\n")).exit()
}

/// Parses `7` or `0x2a`.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) if digits.starts_with(|c: char| c.is_ascii_hexdigit()) => {
            u64::from_str_radix(digits, 16).ok()
        }
        Some(_) => None,
        None => text.parse().ok(),
    }
}

/// Parses `7` or `3-9`.
fn range(text: &str) -> Option<(u64, u64)> {
    let (from, to) = text.split_once('-').unwrap_or((text, text));
    let (from, to) = (number(from)?, number(to)?);
    (from <= to).then_some((from, to))
}

/// Formats a GUID as rdma(8) does.
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

    const KEYS: [(&str, Kind); 6] = [
        ("lqpn", Kind::Number),
        ("state", Kind::OneOf(&["RTS", "RTR", "ERR"])),
        ("pid", Kind::Number),
        ("rkey", Kind::Number),
        ("dst-addr", Kind::Address),
        ("comm", Kind::Word),
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
            .with("rkey", "0x0000002a")
            .with("dst-addr", "127.0.0.2:7174")
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
            "lqpn 3 lqpn 17",
            "lqpn 0x11",
            "lqpn 0x10-0X12",
            "state ERR state RTS comm perf",
            "rkey 42",
            "rkey 0x2a",
            "dst-addr 127.0.0.2",
            "dst-addr ::1 dst-addr 127.0.0.2:7174",
        ] {
            assert!(takes(text, &row), "{text}");
        }
        for text in [
            "lqpn 18",
            "lqpn 1-16",
            "state RTR",
            "pid 7 lqpn 16",
            "lqpn 17 state ERR",
            "lqpn 3 lqpn 16",
            "rkey 0x2b",
            "dst-addr 127.0.0.2:7175",
            "comm per",
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
        assert_eq!(named("127.0.0.1/3 pid 7"), Ok(Named::One(answer().at)));
        assert_eq!(named("pid 3"), Ok(Named::All));
    }

    #[test]
    fn parse__says_what_is_wrong() {
        for (text, expected) in [
            ("lqpn", "the filter \"lqpn\" has no value"),
            (
                "qpn 3",
                "unknown filter \"qpn\": filters are link, dev, lqpn, state, pid, rkey, dst-addr, comm",
            ),
            (
                "lqpn x",
                "filter lqpn takes numbers, ranges and lists such as 1,4-9 or 0x2a, not \"x\"",
            ),
            (
                "lqpn 9-3",
                "filter lqpn takes numbers, ranges and lists such as 1,4-9 or 0x2a, not \"9-3\"",
            ),
            (
                "lqpn -",
                "filter lqpn takes numbers, ranges and lists such as 1,4-9 or 0x2a, not \"-\"",
            ),
            (
                "lqpn 0x",
                "filter lqpn takes numbers, ranges and lists such as 1,4-9 or 0x2a, not \"0x\"",
            ),
            (
                "state RTS,FOO",
                "filter state takes RTS, RTR, ERR, or a list of these, not \"FOO\"",
            ),
            (
                "127.0.0.1 link 127.0.0.1/3",
                "more than one device given: give one, or none for all",
            ),
            (
                "link eth0",
                "\"eth0\" is not a device: give ADDRESS/SLOT or ADDRESS, as `rdmux dev show` prints it",
            ),
        ] {
            assert_eq!(Filter::parse(&words(text), &KEYS), Err(expected.into()), "{text}");
        }
    }

    #[test]
    fn line__names_and_values() {
        let row = Row::of(&answer(), "link 127.0.0.1/3".into()).with("lqpn", 17);
        let row = row.with("rqpn", Value::Null).hidden("x", 1).detail("y", 2);
        let row = row.with_process(&answer());
        assert_eq!(row.line(false), "link 127.0.0.1/3 lqpn 17 pid 7 comm perf");
        assert_eq!(row.line(true), "link 127.0.0.1/3 lqpn 17 y 2 pid 7 comm perf");
        let silent = Row::error(&answer(), "link 127.0.0.1/3".into(), "it does not answer");
        assert_eq!(
            silent.line(false),
            "link 127.0.0.1/3 (it does not answer) pid 7 comm perf"
        );
        let texts = Row::of(&answer(), "dev".into()).quoted("shared", Some("no: a, b".into()));
        let texts = texts.quoted("other", Some("yes".into())).quoted("none", None);
        assert_eq!(texts.line(false), "dev shared \"no: a, b\" other yes none -");
        assert_eq!(texts.json()["none"], Value::Null);
        assert_eq!(silent.json()["error"], "it does not answer");
        assert_eq!(silent.json()["ifname"], "127.0.0.1");
    }

    #[test]
    fn guid__as_rdma_prints_it() {
        assert_eq!(guid(0x0123_4567_89ab_cdef), "0123:4567:89ab:cdef");
    }
}
