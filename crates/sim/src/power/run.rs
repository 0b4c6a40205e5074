//! Clients that write, flush and read mappings of a server whose power is cut at any moment.

use std::collections::BTreeMap;
use std::ops::Range;

use rdmux_rnic::{Placement, Status};
use strum::VariantArray;

use super::bed::{Ask, Bed, BedSettings, Done, Ended, MappedConnection};
use super::ledger::Ledger;
use super::platform::{Domain, Method, Verdict};
use super::shadow::UNIT;
use super::{Report, Settings};
use crate::dice::Dice;

/// Maximum number of steps; a run that takes more is a violation.
const STEPS_MAX: u64 = 400_000;
/// Operations at the end of a run, after the last power cut.
const LAST_OPERATIONS: u64 = 40;

type Checked = Result<(), String>;

/// A request of a client.
#[derive(Clone, Debug)]
struct Asked {
    mapping: usize,
    ask: Ask,
    /// Way to durability that the request is.
    method: Option<Method>,
    /// Set when it was posted after the mapping was no longer its link's.
    late: bool,
    /// Set when it fails, and its connection with it.
    fails: bool,
    /// Set when it asks for a durability that the server does not have.
    refused: bool,
    /// FETCH and ADD: the value that it will find.
    finds: Option<u64>,
}

/// A range of the server's memory that one client has at a time.
#[derive(Debug)]
struct Mapping {
    ledger: Ledger,
    link: MappedConnection,
    /// Set when the server ended it.
    revoked: bool,
    /// Set when the connection fails, or was reported to have failed.
    failing: bool,
    outstanding: u64,
    depth: u64,
    /// Range of the WRITEs since the last flush.
    written: Option<Range<u64>>,
    /// Set when the last operation posted was a FLUSH.
    flushed: bool,
    /// WRITEs that were answered: they outlive the server's process.
    acked: Vec<(u64, Range<u64>)>,
}

pub(super) struct Run<'a> {
    settings: &'a Settings,
    dice: Dice,
    bed: Bed,
    /// Bytes that are outside of all mappings at all times.
    initial: Vec<u8>,
    mappings: Vec<Mapping>,
    asked: BTreeMap<u64, Asked>,
    report: Report,
}

impl Run<'_> {
    pub(super) fn new(settings: &Settings) -> Run<'_> {
        let mut dice = Dice::new(settings.seed, 7);
        let mut ranges = Vec::new();
        let mut end = 8 * dice.between(1, 16);
        for _ in 0..dice.between(1, 3) {
            let len = 8 * dice.between(4, 256);
            ranges.push(end..end + len);
            // Sometimes two mappings share a line.
            end += len + 8 * dice.between(1, 16);
        }
        let mut initial = vec![0; (end as usize).next_multiple_of(64)];
        // Lost bytes become zeros.
        if settings.platform.domain != Domain::None {
            dice.fill(&mut initial);
        }
        let bed_settings = BedSettings {
            seed: settings.seed,
            platform: settings.platform,
            defect: settings.defect,
            loss_percent: settings.loss_percent,
            dup_percent: settings.dup_percent,
            reorder_percent: settings.reorder_percent,
        };
        let mut bed = Bed::new(&bed_settings, initial.clone());
        let mappings = ranges.into_iter().map(|range| Mapping {
            ledger: bed.ledger(range.clone()),
            link: bed.map(range),
            revoked: false,
            failing: false,
            outstanding: 0,
            depth: 1,
            written: None,
            flushed: false,
            acked: Vec::new(),
        });
        let mappings = mappings.collect();
        Run {
            settings,
            dice,
            bed,
            initial,
            mappings,
            asked: BTreeMap::new(),
            report: Report::new(settings),
        }
    }

    pub(super) fn run(mut self) -> Report {
        self.report.violation = self.lives().err();
        let carried = self.bed.carried();
        let report = &mut self.report;
        report.packets = carried.packets;
        report.lost = carried.lost;
        report.steps = self.bed.steps();
        report.passed = self.bed.shadow().passed();
        self.report
    }

    fn lives(&mut self) -> Checked {
        for _ in 0..self.settings.cuts {
            self.draw_depths();
            let steps = self.dice.log_uniform(512);
            for _ in 0..steps {
                self.post_some();
                self.step()?;
            }
            if self.dice.one_in(8) {
                self.kill()?;
            } else {
                self.bed.cut();
                self.report.cuts += 1;
                self.recover("a power cut")?;
            }
        }
        self.last_life()
    }

    fn draw_depths(&mut self) {
        for mapping in &mut self.mappings {
            mapping.depth = self.dice.log_uniform(16);
        }
    }

    /// Runs until everything asked for is answered and everything written is visible.
    fn last_life(&mut self) -> Checked {
        let end = self.bed.next_operation() + LAST_OPERATIONS;
        while self.bed.next_operation() < end {
            self.post_some();
            self.step()?;
        }
        while self.step()? {}
        self.bed.drain();
        if let Some(asked) = self.asked.values().next() {
            return Err(format!("{asked:?} is never answered"));
        }
        for n in 0..self.mappings.len() {
            let visible = self.visible(n);
            self.mappings[n].ledger.check_last(&visible)?;
        }
        self.check_outside("at the end")
    }

    fn step(&mut self) -> Result<bool, String> {
        let moved = self.bed.step()?;
        while let Some(done) = self.bed.poll() {
            self.done(&done)?;
        }
        if moved && self.dice.one_in(300) {
            let n = self.dice.below(self.mappings.len() as u64) as usize;
            self.revoke(n)?;
        }
        for n in 0..self.mappings.len() {
            let mapping = &self.mappings[n];
            let over = mapping.revoked || mapping.failing;
            if over && (!moved || self.dice.one_in(30)) {
                self.map_again(n)?;
            }
        }
        if self.bed.steps() > STEPS_MAX {
            return Err("operations do not complete".to_owned());
        }
        Ok(moved)
    }

    fn visible(&self, n: usize) -> Vec<u8> {
        let range = self.mappings[n].ledger.range();
        self.bed.shadow().visible()[range.start as usize..range.end as usize].to_vec()
    }

    // The server.

    fn revoke(&mut self, n: usize) -> Checked {
        if self.mappings[n].revoked {
            return Ok(());
        }
        self.report.revoked += 1;
        self.bed.revoke(self.mappings[n].link);
        let visible = self.visible(n);
        let mapping = &mut self.mappings[n];
        mapping.revoked = true;
        mapping
            .ledger
            .revoked(&visible)
            .map_err(|what| format!("at revocation: {what}"))
    }

    /// Maps the range of a client whose mapping ended again, once the old mapping is surely revoked.
    fn map_again(&mut self, n: usize) -> Checked {
        self.revoke(n)?;
        let visible = self.visible(n);
        let mapping = &mut self.mappings[n];
        mapping
            .ledger
            .check_last(&visible)
            .map_err(|what| format!("after revocation: {what}"))?;
        mapping.link = self.bed.map(mapping.ledger.range());
        (mapping.revoked, mapping.failing) = (false, false);
        (mapping.outstanding, mapping.written) = (0, None);
        Ok(())
    }

    fn kill(&mut self) -> Checked {
        self.bed.kill();
        self.report.kills += 1;
        if self.settings.platform.domain != Domain::None {
            for mapping in &mut self.mappings {
                for (operation, range) in mapping.acked.drain(..) {
                    mapping.ledger.durable(operation + 1, &range);
                }
            }
        }
        self.recover("a kill")
    }

    /// Checks, when the server is back, that it holds only what it may hold.
    fn recover(&mut self, after: &str) -> Checked {
        self.asked.clear();
        for n in 0..self.mappings.len() {
            let visible = self.visible(n);
            let mapping = &mut self.mappings[n];
            mapping.acked.clear();
            mapping
                .ledger
                .recover(&visible)
                .map_err(|what| format!("after {after}: {what}"))?;
        }
        self.check_outside(&format!("after {after}"))?;
        for mapping in &mut self.mappings {
            mapping.link = self.bed.map(mapping.ledger.range());
            (mapping.revoked, mapping.failing) = (false, false);
            (mapping.outstanding, mapping.written) = (0, None);
        }
        Ok(())
    }

    fn check_outside(&self, when: &str) -> Checked {
        let visible = self.bed.shadow().visible();
        let is_mapped = |at: usize| {
            let mut ranges = self.mappings.iter().map(|mapping| mapping.ledger.range());
            ranges.any(|range| range.contains(&(at as u64)))
        };
        let bytes = visible.iter().zip(&self.initial).enumerate();
        let changed = bytes.filter(|(_, (is, was))| is != was).map(|(at, _)| at);
        match changed.into_iter().find(|at| !is_mapped(*at)) {
            None => Ok(()),
            Some(at) => Err(format!("{when}: byte {at} changed, which no client has mapped")),
        }
    }

    // The clients.

    fn post_some(&mut self) {
        for n in 0..self.mappings.len() {
            let mapping = &self.mappings[n];
            if mapping.outstanding < mapping.depth && self.dice.one_in(3) {
                self.post(n);
            }
        }
    }

    fn relies_on(&self, method: Method) -> bool {
        self.settings.rely == Some(method) || self.settings.platform.verdict(method) == Verdict::Durable
    }

    fn draw_range(&mut self, mapping: &Range<u64>) -> Range<u64> {
        let whole = mapping.end - mapping.start;
        let len = match self.dice.below(16) {
            0 => 0,
            1 => whole,
            2..6 => 8,
            _ => self.dice.log_uniform(whole.min(600)),
        };
        // Often at the beginning, so that writes overlap.
        let room = whole - len;
        let at = if self.dice.one_in(2) {
            self.dice.below(room.min(200) + 1)
        } else {
            self.dice.below(room + 1)
        };
        mapping.start + at..mapping.start + at + len
    }

    fn draw_unit(&mut self, mapping: &Range<u64>) -> u64 {
        let units = (mapping.end - mapping.start) / UNIT as u64;
        mapping.start + UNIT as u64 * self.dice.below(units.min(12))
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        self.dice.fill(&mut bytes);
        bytes
    }

    /// Draws an operation, with the way to durability that it is.
    fn draw_ask(&mut self, n: usize) -> (Ask, Option<Method>) {
        let range = self.mappings[n].ledger.range();
        let flushes = self.mappings[n].written.is_some() && self.dice.one_in(2) || self.dice.one_in(12);
        let publishes = std::mem::take(&mut self.mappings[n].flushed) && self.dice.one_in(2);
        if publishes || !flushes {
            // An ATOMIC WRITE publishes the FLUSH in front of it.
            let what = if publishes { 0 } else { self.dice.below(16) };
            return match what {
                0 => {
                    let (at, bytes) = (self.draw_unit(&range), self.dice.next().to_le_bytes());
                    (Ask::AtomicWrite { at, bytes }, None)
                }
                1 => {
                    let (at, add) = (self.draw_unit(&range), self.dice.next());
                    (Ask::FetchAdd { at, add }, None)
                }
                _ => {
                    let range = self.draw_range(&range);
                    let bytes = self.bytes(range.end - range.start);
                    (
                        Ask::Write {
                            at: range.start,
                            bytes,
                        },
                        None,
                    )
                }
            };
        }
        let written = self.mappings[n].written.clone();
        let covered = match written {
            Some(written) if !self.dice.one_in(5) => written,
            _ => self.draw_range(&range),
        };
        let (at, len) = (covered.start, covered.end - covered.start);
        let method = match self.settings.rely {
            Some(method) if method != Method::Write && self.dice.one_in(2) => method,
            Some(_) => Method::Write,
            // A refused request ends its connection.
            None => match self.dice.below(40) {
                0..8 => Method::Read,
                8..14 => Method::FlushGlobal,
                14..26 => Method::SoftwareFlush,
                26..38 if self.settings.platform.domain == Domain::None => Method::FlushGlobal,
                _ => Method::FlushPersistent,
            },
        };
        let ask = match method {
            Method::Write => {
                let bytes = self.bytes(len);
                return (Ask::Write { at, bytes }, None);
            }
            Method::Read => Ask::Read { at, len },
            Method::SoftwareFlush => Ask::SoftwareFlush { at, len },
            Method::FlushGlobal | Method::FlushPersistent => Ask::Flush {
                at,
                len,
                placement: match method {
                    Method::FlushGlobal => Placement::GLOBAL,
                    _ if self.dice.one_in(2) => Placement::PERSISTENT,
                    _ => Placement::PERSISTENT | Placement::GLOBAL,
                },
                whole: self.dice.one_in(8),
            },
        };
        (ask, Some(method))
    }

    /// Makes a request reach out of its mapping.
    fn misplace(&mut self, ask: &mut Ask, range: &Range<u64>) {
        let beyond = self.dice.log_uniform(64);
        match ask {
            Ask::Write { at, bytes } if !bytes.is_empty() => *at = range.end - bytes.len() as u64 + beyond,
            Ask::Read { at, len } if *len > 0 => *at = range.end - *len + beyond,
            Ask::Flush { at, len, whole, .. } if *len > 0 && !*whole => *at = range.end - *len + beyond,
            Ask::SoftwareFlush { at, len } if *len > 0 => *at = range.end - *len + beyond,
            _ => {}
        }
    }

    fn post(&mut self, n: usize) {
        let range = self.mappings[n].ledger.range();
        let (mut ask, method) = self.draw_ask(n);
        if self.dice.one_in(150) {
            self.misplace(&mut ask, &range);
        }
        let covered = ask.range(&range);
        let inside = covered.is_empty() || covered.start >= range.start && covered.end <= range.end;
        let platform = self.settings.platform;
        let refused = method.is_some_and(|method| platform.verdict(method) == Verdict::Refused);
        let message = matches!(ask, Ask::SoftwareFlush { .. });
        let Some(operation) = self.bed.ask(self.mappings[n].link, &ask) else {
            return;
        };
        let mtu = self.bed.mtu();
        let relied = method.is_some_and(|method| self.relies_on(method));
        let mapping = &mut self.mappings[n];
        let late = mapping.revoked;
        let fails = (refused || !inside) && !message;
        let mut finds = None;
        if !late && !mapping.failing && !fails {
            match &ask {
                Ask::Write { at, bytes } => {
                    mapping.ledger.posted_write(operation, *at, bytes, mtu);
                    if !covered.is_empty() {
                        let written = mapping.written.get_or_insert(covered.clone());
                        *written = written.start.min(covered.start)..written.end.max(covered.end);
                    }
                }
                Ask::AtomicWrite { at, bytes } => mapping.ledger.posted_atomic_write(operation, *at, *bytes),
                Ask::FetchAdd { at, add } => {
                    finds = Some(mapping.ledger.posted_fetch_add(operation, *at, *add));
                }
                Ask::Read { .. } | Ask::Flush { .. } | Ask::SoftwareFlush { .. } if relied && inside => {
                    let orders = matches!(ask, Ask::Flush { .. });
                    mapping.ledger.posted_flush(operation, covered.clone(), orders);
                    mapping.written = None;
                }
                _ => {}
            }
        }
        mapping.flushed = matches!(ask, Ask::Flush { .. });
        mapping.outstanding += 1;
        self.report.operations += 1;
        let asked = Asked {
            mapping: n,
            ask,
            method,
            late: late || mapping.failing,
            fails,
            refused,
            finds,
        };
        // A request behind one that fails is never done.
        mapping.failing |= fails;
        self.asked.insert(operation, asked);
    }

    fn done(&mut self, done: &Done) -> Checked {
        let asked = self.asked.remove(&done.operation);
        let asked = asked.ok_or_else(|| format!("{done:?} was not asked for"))?;
        self.check_done(&asked, done)
            .map_err(|what| format!("operation {}: {what} ({asked:?})", done.operation))
    }

    fn check_done(&mut self, asked: &Asked, done: &Done) -> Checked {
        let relies_on_write = self.relies_on(Method::Write);
        let mapping = &mut self.mappings[asked.mapping];
        let current = mapping.link == done.link;
        if current {
            mapping.outstanding -= 1;
        }
        let range = mapping.ledger.range();
        let covered = asked.ask.range(&range);
        match done.ended {
            Ended::Refused => {
                let inside = covered.start >= range.start && covered.end <= range.end;
                let may = asked.late || mapping.revoked || !current || !inside || asked.refused;
                self.report.refused += u64::from(asked.refused);
                return if may {
                    Ok(())
                } else {
                    Err("refused without need".to_owned())
                };
            }
            Ended::Failed(status) => {
                let expected = !current || mapping.revoked || mapping.failing;
                if !expected {
                    return Err(format!("failed: {status}"));
                }
                self.report.refused += u64::from(asked.refused && status == Status::RemoteAccess);
                if current {
                    mapping.failing = true;
                }
                return Ok(());
            }
            Ended::Done => {}
        }
        if asked.fails || asked.refused {
            return Err("done, though it is not allowed".to_owned());
        }
        if asked.late && !covered.is_empty() && !matches!(asked.ask, Ask::SoftwareFlush { .. }) {
            return Err("done, though its mapping had been revoked".to_owned());
        }
        self.report.done += 1;
        match &asked.ask {
            Ask::Write { .. } | Ask::AtomicWrite { .. } | Ask::FetchAdd { .. } => {
                if let Some(finds) = asked.finds
                    && done.bytes != finds.to_le_bytes()
                {
                    return Err(format!("found {:02x?} instead of {finds:016x}", done.bytes));
                }
                if relies_on_write {
                    mapping.ledger.durable(done.operation + 1, &covered);
                }
                mapping.acked.push((done.operation, covered));
            }
            Ask::Read { at, .. } => {
                // The packets of a response are read one after the other.
                let mtu = self.bed.mtu();
                for (n, packet) in done.bytes.chunks(mtu).enumerate().filter(|_| current) {
                    let at = at + (n * mtu) as u64;
                    mapping.ledger.check_read(done.operation, at, packet)?;
                }
            }
            Ask::Flush { .. } | Ask::SoftwareFlush { .. } => {}
        }
        if let Some(method) = asked.method {
            mapping.ledger.flushed(done.operation);
            let of = Method::VARIANTS.iter().position(|other| *other == method);
            self.report.answers[of.unwrap_or_default()] += 1;
        }
        Ok(())
    }
}

impl Ask {
    /// Returns the bytes of the server's memory that the request concerns, in a mapping of this range.
    fn range(&self, mapping: &Range<u64>) -> Range<u64> {
        match self {
            Ask::Write { at, bytes } => *at..*at + bytes.len() as u64,
            Ask::AtomicWrite { at, .. } | Ask::FetchAdd { at, .. } => *at..*at + UNIT as u64,
            Ask::Flush { whole: true, .. } => mapping.clone(),
            Ask::Read { at, len } | Ask::Flush { at, len, .. } | Ask::SoftwareFlush { at, len } => {
                *at..*at + *len
            }
        }
    }
}
