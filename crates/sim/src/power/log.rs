//! The replicated log of `rdmux_log` over a server whose power is cut: its real writer, on one replica, and its real
//! reader, on what is left.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rdmux_log::{Action, AppendError, View, What, Writer, WriterEvent, scan};
use rdmux_rnic::Placement;
use strum::{IntoStaticStr, VariantArray};

use super::bed::{Ask, Bed, BedSettings, Done, Ended, MappedConnection};
use super::platform::{Defect, Domain, Method, Platform, Verdict};
use super::shadow::{LINE, Passed};
use super::{Counted, Settings};
use crate::dice::Dice;

/// Bytes before the ring, and of a frame before its record, as `push/src/log/format.rs` has them.
const RING_AT: u64 = 8192;
const FRAME: usize = 48;
/// Maximum number of steps; a run that takes more is a violation.
const STEPS_MAX: u64 = 400_000;
/// Maximum lengths of records: short ones, and the longest that the smallest ring takes.
const RECORD_BYTES_MAX: [u64; 3] = [30, 200, 900];

/// Defect of a log, or of its reader, that power cuts must reveal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum LogDefect {
    /// A WRITE counts as durable once it is answered.
    Unflushed,
    /// A flush ends one line short.
    FlushShort,
    /// The reader accepts a frame as whole without its checksum.
    ChecksumIgnored,
}

impl LogDefect {
    /// Its name.
    pub fn name(self) -> &'static str {
        self.into()
    }
}

impl FromStr for LogDefect {
    type Err = String;

    fn from_str(text: &str) -> Result<LogDefect, String> {
        crate::named(LogDefect::VARIANTS, LogDefect::name, text)
    }
}

/// Result of a run. The same settings give the same result.
#[derive(Clone, Debug, PartialEq)]
pub struct LogReport {
    /// Settings of the run.
    pub settings: Settings,
    /// The log's defect.
    pub defect: Option<LogDefect>,
    /// First violation found.
    pub violation: Option<String>,
    /// Power cuts.
    pub cuts: u64,
    /// Kills of the server's process.
    pub kills: u64,
    /// Records appended.
    pub appended: u64,
    /// Records acknowledged.
    pub acknowledged: u64,
    /// Records that were in flight at a stop and were there whole afterwards.
    pub survived: u64,
    /// Records that were in flight at a stop and were not.
    pub vanished: u64,
    /// Of these, records that began where the log ended and were torn.
    pub torn: u64,
    /// Times that the log has wrapped around the ring.
    pub wraps: u64,
    /// Counts of the memory.
    pub passed: Passed,
    /// Packets sent.
    pub packets: u64,
    /// Packets lost.
    pub lost: u64,
    /// Events.
    pub steps: u64,
}

impl LogReport {
    fn new(settings: &Settings, defect: Option<LogDefect>) -> LogReport {
        LogReport {
            settings: *settings,
            defect,
            violation: None,
            cuts: 0,
            kills: 0,
            appended: 0,
            acknowledged: 0,
            survived: 0,
            vanished: 0,
            torn: 0,
            wraps: 0,
            passed: Passed::default(),
            packets: 0,
            lost: 0,
            steps: 0,
        }
    }

    /// Returns the counts by name.
    pub fn counts(&self) -> Counted {
        vec![
            ("power cuts", self.cuts),
            ("kills", self.kills),
            ("records", self.appended),
            ("acknowledged", self.acknowledged),
            ("survived", self.survived),
            ("vanished", self.vanished),
            ("torn tails", self.torn),
            ("wraps", self.wraps),
            ("drained lines", self.passed.drained),
            ("evicted lines", self.passed.evicted),
            ("torn lines", self.passed.torn),
            ("packets", self.packets),
            ("lost packets", self.lost),
            ("steps", self.steps),
        ]
    }

    /// Returns the command that repeats the run.
    pub fn replay(&self) -> String {
        let s = &self.settings;
        let (seed, platform) = (s.seed, s.platform.name());
        let mut command = format!("rdmux sim --power --log --seed {seed} --platform {platform}");
        if let Some(method) = s.rely {
            command += &format!(" --rely {}", method.name());
        }
        let of_server = s.defect.map(Defect::name);
        if let Some(defect) = self.defect.map(LogDefect::name).or(of_server) {
            command += &format!(" --defect {defect}");
        }
        command
    }
}

impl fmt::Display for LogReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.settings.show(f)?;
        if let Some(defect) = self.defect {
            writeln!(f, "{:<18} {}", "defect", defect.name())?;
        }
        for (name, count) in self.counts() {
            writeln!(f, "{name:<18} {count:>10}")?;
        }
        match &self.violation {
            None => writeln!(
                f,
                "\nEvery acknowledged record was there after every cut, and no torn one."
            ),
            Some(what) => writeln!(f, "\nVIOLATION: {what}"),
        }
    }
}

/// A request of the writer that is in flight, or was answered before an older one.
#[derive(Debug)]
struct UnderWay {
    operation: Option<u64>,
    answer: Option<Option<Vec<u8>>>,
}

/// A log, its writer, and what is known of it.
pub(super) struct LogRun {
    dice: Dice,
    bed: Bed,
    methods: Vec<Method>,
    defect: Option<LogDefect>,
    bytes: u64,
    record_bytes_max: u64,
    writer: Writer,
    now: Duration,
    link: Option<MappedConnection>,
    session: u64,
    /// Actions for which there is no room yet.
    backlog: VecDeque<What>,
    under_way: VecDeque<UnderWay>,
    /// Records by sequence number, as they were appended.
    history: BTreeMap<u64, Vec<u8>>,
    /// Number up to which all records are acknowledged.
    acknowledged: u64,
    /// First record that the writer has not dropped.
    first: u64,
    /// Set once the log was open.
    open: bool,
    report: LogReport,
}

impl LogRun {
    pub(super) fn new(settings: &Settings, defect: Option<LogDefect>) -> LogRun {
        let mut dice = Dice::new(settings.seed, 13);
        let bed_settings = BedSettings {
            seed: settings.seed,
            platform: settings.platform,
            defect: settings.defect,
            loss_percent: settings.loss_percent,
            dup_percent: settings.dup_percent,
            reorder_percent: settings.reorder_percent,
        };
        let bytes = RING_AT + 4096 + 8 * dice.below(512);
        let bed = Bed::new(&bed_settings, vec![0; bytes as usize]);
        let durable = |method: &Method| settings.platform.verdict(*method) == Verdict::Durable;
        let methods: Vec<Method> = match settings.rely {
            Some(method) => vec![method],
            None => Method::VARIANTS.iter().copied().filter(durable).collect(),
        };
        let record_bytes_max = dice.pick(&RECORD_BYTES_MAX);
        let writer = new_writer(&mut dice);
        LogRun {
            report: LogReport::new(settings, defect),
            dice,
            bed,
            methods,
            defect,
            bytes,
            record_bytes_max,
            writer,
            now: Duration::ZERO,
            link: None,
            session: 0,
            backlog: VecDeque::new(),
            under_way: VecDeque::new(),
            history: BTreeMap::new(),
            acknowledged: 0,
            first: 1,
            open: false,
        }
    }

    pub(super) fn run(mut self) -> LogReport {
        self.report.violation = self.lives().err();
        let carried = self.bed.carried();
        self.report.packets = carried.packets;
        self.report.lost = carried.lost;
        self.report.steps = self.bed.steps();
        self.report.passed = self.bed.shadow().passed();
        self.report
    }

    fn lives(&mut self) -> Result<(), String> {
        for _ in 0..self.report.settings.cuts {
            for _ in 0..self.dice.log_uniform(1024) {
                self.step()?;
            }
            let after = if self.dice.one_in(8) {
                self.bed.kill();
                self.report.kills += 1;
                "a kill"
            } else {
                self.bed.cut();
                self.report.cuts += 1;
                "a power cut"
            };
            self.restarted()
                .map_err(|what| format!("after {after}: {what}"))?;
        }
        // The bytes left are a log: it can be opened and continued.
        let end = self.report.acknowledged + 3;
        while self.report.acknowledged < end {
            self.step()?;
        }
        Ok(())
    }

    /// Continues with the memory that survived: the reader checks it, and a new writer begins.
    fn restarted(&mut self) -> Result<(), String> {
        let left = self.bed.shadow().visible();
        let last = self.look_at(&left)?;
        let under_way = self.history.keys().next_back().copied().unwrap_or(0);
        if let Some(last) = last {
            self.report.survived += last.saturating_sub(self.acknowledged);
            self.report.vanished += under_way.saturating_sub(last);
        }
        self.link = None;
        self.backlog.clear();
        self.under_way.clear();
        self.session = 0;
        self.writer = new_writer(&mut self.dice);
        Ok(())
    }

    /// Checks that what the reader finds is the log. Returns the last record.
    fn look_at(&mut self, left: &[u8]) -> Result<Option<u64>, String> {
        let mut read = |at: u64, bytes: &mut [u8]| {
            bytes.copy_from_slice(&left[at as usize..at as usize + bytes.len()]);
            Ok(())
        };
        let view =
            scan(self.bytes, rdmux_push::Domain::Adr, true, &mut read).map_err(|error| error.to_string())?;
        let Some(view) = view else {
            return match self.open {
                true => Err("the log no longer exists".to_owned()),
                false => Ok(None),
            };
        };
        self.check(view.first, view.last, &view.records)?;
        self.report.wraps = self.report.wraps.max(view.position / view.area);
        if view.acknowledged > self.acknowledged {
            return Err(format!(
                "the log says that {} is acknowledged, and {} is",
                view.acknowledged, self.acknowledged
            ));
        }
        let behind = LogRun::frame_behind(left, &view);
        if let Some((sequence, record)) = behind
            && self.history.get(&sequence) != Some(&record)
        {
            self.report.torn += 1;
            if self.defect == Some(LogDefect::ChecksumIgnored) {
                return Err(format!("record {sequence} is torn"));
            }
        }
        Ok(Some(view.last))
    }

    /// Returns the record that seems to be where the log ends, judged by all but its checksum; `None` where it crosses the
    /// ring's end.
    fn frame_behind(left: &[u8], view: &View) -> Option<(u64, Vec<u8>)> {
        let at = (RING_AT + (view.position + view.used) % view.area) as usize;
        let frame = left.get(at..at + FRAME)?;
        let length = u32::from_be_bytes(frame[4..8].try_into().ok()?) as usize;
        let sequence = u64::from_be_bytes(frame[8..16].try_into().ok()?);
        let follows = frame.starts_with(b"Rrec") && sequence == view.last + 1;
        let record = left.get(at + FRAME..at + FRAME + length)?;
        follows.then(|| (sequence, record.to_vec()))
    }

    fn check(&self, first: u64, last: u64, records: &[(u64, Vec<u8>)]) -> Result<(), String> {
        if last < self.acknowledged {
            return Err(format!(
                "record {} was acknowledged and is lost: the log ends at {last}",
                self.acknowledged
            ));
        }
        if first > self.first {
            return Err(format!(
                "the log begins at {first}, and {} was not dropped",
                self.first
            ));
        }
        let numbers = records.iter().map(|(sequence, _)| *sequence);
        if !numbers.eq(first..=last) {
            return Err(format!("the records from {first} to {last} have a gap"));
        }
        let wrong = records.iter().find(|(sequence, record)| {
            let known = self.history.get(sequence);
            known.map_or(*sequence >= self.first, |known| known != record)
        });
        wrong.map_or(Ok(()), |(sequence, _)| {
            Err(format!("record {sequence} is not what was appended"))
        })
    }

    pub(super) fn step(&mut self) -> Result<(), String> {
        if self.writer.is_ready() && self.dice.one_in(6) {
            self.append()?;
        }
        self.drive()?;
        let moved = self.bed.step()?;
        self.now = self.now.max(Duration::from_nanos(self.bed.now_ns()));
        while let Some(done) = self.bed.poll() {
            self.done(done);
        }
        if let Some(due) = self.writer.poll_timeout() {
            if !moved {
                self.now = self.now.max(due);
            }
            if due <= self.now {
                self.writer.handle_timeout(self.now);
            }
        }
        self.drive()?;
        if self.bed.steps() > STEPS_MAX {
            return Err("the log makes no progress".to_owned());
        }
        Ok(())
    }

    fn append(&mut self) -> Result<(), String> {
        let mut record = vec![0; self.dice.below(self.record_bytes_max + 1) as usize];
        self.dice.fill(&mut record);
        match self.writer.append(&record) {
            Ok(sequence) => {
                self.report.appended += 1;
                self.history.insert(sequence, record);
                if self.writer.first() > self.first {
                    self.first = self.writer.first();
                    if self.first > self.acknowledged + 1 {
                        return Err(format!(
                            "record {} is dropped before it is acknowledged",
                            self.first - 1
                        ));
                    }
                }
                Ok(())
            }
            Err(AppendError::Busy | AppendError::NotReady) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Carries out the actions of the writer, and handles its events.
    fn drive(&mut self) -> Result<(), String> {
        while let Some(Action { session, what, .. }) = self.writer.poll_action() {
            match what {
                What::Connect => {
                    if let Some(link) = self.link.take() {
                        self.bed.revoke(link);
                    }
                    self.session = session;
                    self.backlog.clear();
                    self.under_way.clear();
                    self.link = Some(self.bed.map(0..self.bytes));
                    self.writer.handle_connected(0, session, self.bytes);
                }
                What::Acquire => self.writer.handle_acquired(0, session),
                What::Disconnect => {}
                other => self.backlog.push_back(other),
            }
        }
        while let Some(what) = self.backlog.front() {
            let Some(under_way) = self.post(&what.clone()) else {
                break;
            };
            self.backlog.pop_front();
            self.under_way.push_back(under_way);
        }
        self.report_done();
        // To open a log that is full, the writer drops the oldest records, which are acknowledged by then.
        self.first = self.first.max(self.writer.first());
        while let Some(event) = self.writer.poll_event() {
            self.heard(&event)?;
        }
        Ok(())
    }

    fn post(&mut self, what: &What) -> Option<UnderWay> {
        let link = self.link?;
        let ask = match what {
            What::Read { offset, length } => Ask::Read {
                at: *offset,
                len: *length,
            },
            What::Write { offset, bytes } => Ask::Write {
                at: *offset,
                bytes: bytes.clone(),
            },
            What::Flush { offset, length } => match self.flush(*offset, *length) {
                Some(ask) => ask,
                None => {
                    let answer = self.under_way.is_empty();
                    return answer.then_some(UnderWay {
                        operation: None,
                        answer: Some(None),
                    });
                }
            },
            _ => return None,
        };
        let operation = self.bed.ask(link, &ask)?;
        Some(UnderWay {
            operation: Some(operation),
            answer: None,
        })
    }

    /// Returns the request that stands in for a flush; `None` when the WRITEs' own answers do.
    fn flush(&mut self, at: u64, len: u64) -> Option<Ask> {
        let method = self.dice.pick(&self.methods);
        let len = match self.defect {
            Some(LogDefect::Unflushed) => return None,
            Some(LogDefect::FlushShort) => len.saturating_sub(LINE as u64),
            _ => len,
        };
        let placement = match method {
            Method::Write => return None,
            Method::Read => return Some(Ask::Read { at, len: len.min(8) }),
            Method::SoftwareFlush => return Some(Ask::SoftwareFlush { at, len }),
            Method::FlushGlobal => Placement::GLOBAL,
            Method::FlushPersistent => Placement::PERSISTENT,
        };
        Some(Ask::Flush {
            at,
            len,
            placement,
            whole: false,
        })
    }

    fn done(&mut self, done: Done) {
        if done.ended != Ended::Done {
            self.backlog.clear();
            self.under_way.clear();
            return self
                .writer
                .handle_lost(0, self.session, "the connection failed", self.now);
        }
        let mut under_way = self.under_way.iter_mut();
        if let Some(one) = under_way.find(|one| one.operation == Some(done.operation)) {
            one.answer = Some((!done.bytes.is_empty()).then_some(done.bytes));
        }
        self.report_done();
    }

    /// Reports completed requests to the writer, oldest first.
    fn report_done(&mut self) {
        while let Some(UnderWay { answer: Some(_), .. }) = self.under_way.front()
            && let Some(UnderWay { answer, .. }) = self.under_way.pop_front()
        {
            self.writer
                .handle_done(0, self.session, answer.flatten(), self.now);
        }
    }

    fn heard(&mut self, event: &WriterEvent) -> Result<(), String> {
        match event {
            WriterEvent::Ready { first, last } => {
                let records: Vec<_> = self.writer.records().filter(|(n, _)| n <= last).collect();
                self.check(*first, *last, &records)
                    .map_err(|what| format!("the log is opened: {what}"))?;
                self.open = true;
                self.acknowledged = *last;
                self.history.retain(|sequence, _| sequence <= last);
            }
            WriterEvent::Acknowledged { sequence } => {
                self.report.acknowledged += sequence - self.acknowledged;
                self.acknowledged = *sequence;
            }
            WriterEvent::Over(over) => {
                return Err(format!("the log cannot be opened: {over}"));
            }
            WriterEvent::Replica { .. } => {}
        }
        Ok(())
    }

    /// Appends so many records. At every step the reader checks every memory that a cut may leave, as long as there are no more
    /// than `max`. Returns how many it checked.
    pub(super) fn run_everywhere(mut self, records: u64, max: usize) -> Result<u64, String> {
        let mut looked_at = 0;
        while self.acknowledged < records {
            self.step()?;
            for left in self.bed.shadow().all_left(true, max).unwrap_or_default() {
                looked_at += 1;
                self.look_at(&left)?;
            }
        }
        Ok(looked_at)
    }
}

fn new_writer(dice: &mut Dice) -> Writer {
    Writer::new(rdmux_log::Settings {
        replicas: 1,
        writer: dice.next(),
        log: dice.next(),
        replica_ids: vec![dice.next()],
        create: true,
        drop_oldest: true,
        trim: None,
    })
}

impl Settings {
    /// Returns settings for a run of a log. The server, one on which something survives, and the faults are drawn from the
    /// seed.
    pub fn drawn_for_log(seed: u64) -> Settings {
        let drawn = Settings::drawn(seed);
        let mut dice = Dice::new(seed, 14);
        let keeps: Vec<Platform> = Platform::ALL
            .into_iter()
            .filter(|platform| platform.domain != Domain::None)
            .collect();
        Settings {
            platform: dice.pick(&keeps),
            ..drawn
        }
    }
}
