//! A run: the shipped driver on the model, with faults, power cuts, restarts and a checker.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_drive::{
    Action, Buffer, Command, Completion, Drive as Driver, MemoryKind, Options, Outcome, PAGE, Pool,
    RefusedReason, State,
};
use rdmux_rnic::HeapMemory;
use rdmux_rnic::ledger::{Class, Route, book};
use rdmux_wire::nvme::{CmbLayout, NsId, Status};

use super::report::{Report, Settings, Tallies, Trouble};
use super::{CMB_BAR, Cmb, Counts, Drive, Faults, Shape};
use crate::dice::Dice;
use crate::nvme::checker::{Checker, Place, WriteId};
use crate::nvme::disk::{self, BLOCK, Disk, Ticks, Value};

const US: u64 = 1000;
const MS: u64 = 1000 * US;
const NSID: u32 = 1;
const STEPS_MAX: u64 = 2_000_000;
/// Time after which a drive that does not stop has stopped all the same.
const STICKS_NS: u64 = 100_000 * MS;
/// Steps of a drive in which its driver gets nothing to do.
const SILENCE_MAX: u64 = 100_000;

/// Runs the driver on the model.
pub fn run(settings: &Settings) -> Report {
    Run::new(settings).run()
}

/// A command in flight.
struct Operation {
    action: Action,
    slba: u64,
    blocks: u32,
    /// When it began, as the checker counts, and in time.
    begin: u64,
    begin_ns: u64,
    writes: Vec<WriteId>,
    pages: Vec<u64>,
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Operation {
            action, slba, blocks, ..
        } = self;
        write!(
            f,
            "{action:?} of {blocks} blocks from {slba} on, begun at {} us",
            self.begin_ns / US
        )
    }
}

#[derive(Debug)]
struct Run {
    settings: Settings,
    dice: Dice,
    began: Instant,
    now: u64,
    shape: Shape,
    options: Options,
    disk: Arc<Disk>,
    pmr: Arc<HeapMemory>,
    drive: Arc<Drive>,
    driver: Driver,
    faults: Faults,
    /// Set while the driver shuts its drive down, which ends what is in flight.
    is_stopping: bool,
    left: u32,
    in_flight: BTreeMap<u64, Operation>,
    last_token: u64,
    ticks: Arc<Ticks>,
    checker: Checker,
    tallies: Tallies,
    counts: Counts,
    violation: Option<String>,
}

/// Draws what a drive has.
fn shape(dice: &mut Dice) -> Shape {
    let layout = CmbLayout {
        bar: CMB_BAR,
        offset: dice.pick(&[0, 0, 64 << 10]),
        bytes: dice.pick(&[64, 128, 512]) << 10,
        submission_queues: dice.one_in(2),
        completion_queues: false,
        lists: dice.one_in(2),
        reads: !dice.one_in(8),
        writes: !dice.one_in(8),
    };
    let cmb = Cmb {
        layout,
        is_legacy: dice.one_in(3),
    };
    Shape {
        queue_entries: dice.pick(&[2, 8, 64, 1024]),
        queues: dice.between(1, 4) as u16,
        doorbell_stride: dice.pick(&[4, 4, 8, 64]),
        mdts: dice.between(0, 5) as u8,
        timeout: dice.between(1, 4) as u8,
        has_cache: !dice.one_in(4),
        cmb: (!dice.one_in(3)).then_some(cmb),
        pmr_bytes: if dice.one_in(2) { 128 << 10 } else { 0 },
    }
}

impl Run {
    fn new(settings: &Settings) -> Run {
        let mut dice = Dice::new(settings.seed, 52);
        let shape = shape(&mut dice);
        let options = Options {
            queues: dice.between(1, 4) as u16,
            entries: dice.pick(&[2, 3, 8, 64]),
            dram_bytes: dice.pick(&[16, 64, 256]) * PAGE,
            cmb: shape.cmb.is_some() && !dice.one_in(4),
            pmr: shape.pmr_bytes > 0 && !dice.one_in(4),
            timeout: Duration::from_millis(dice.pick(&[20, 100, 500])),
            staging_bytes: dice.pick(&[0, 64]) * PAGE,
            ledger: Some(Arc::default()),
        };
        let ticks = Arc::new(Ticks::default());
        let of_disk = disk::Shape {
            nsid: NSID,
            may_wait: true,
            has_cache: shape.has_cache,
            has_file: false,
        };
        let blocks = dice.between(40, 400);
        let disk = Disk::new(of_disk, blocks, blocks, ticks.clone(), Dice::new(dice.next(), 0));
        let disk = Arc::new(disk);
        let pmr = Arc::new(HeapMemory::new(shape.pmr_bytes as usize));
        let drive = Drive::with_pmr(shape, disk.clone(), pmr.clone(), dice.next());
        let began = Instant::now();
        let driver = Driver::new(drive.clone(), options.clone(), began).expect("the drive answers");
        let faults = faults(settings.trouble, &options, &mut dice);
        drive.set_faults(faults);
        Run {
            settings: *settings,
            dice,
            began,
            now: 0,
            shape,
            options,
            disk,
            pmr,
            drive,
            driver,
            faults,
            is_stopping: false,
            left: settings.operations,
            in_flight: BTreeMap::new(),
            last_token: 0,
            ticks,
            checker: Checker::default(),
            tallies: Tallies::default(),
            counts: Counts::default(),
            violation: None,
        }
    }

    /// The driver wants an instant; only its distance from the first one counts.
    fn instant(&self) -> Instant {
        self.began + Duration::from_nanos(self.now)
    }

    fn violate(&mut self, what: impl Into<String>) {
        let (us, what) = (self.now / US, what.into());
        self.violation.get_or_insert(format!("at {us} us: {what}"));
    }

    fn troubles(&self, trouble: Trouble) -> bool {
        [trouble, Trouble::All].contains(&self.settings.trouble)
    }

    fn run(mut self) -> Report {
        while self.violation.is_none() && (self.left > 0 || !self.in_flight.is_empty()) {
            self.step();
        }
        if self.violation.is_none() {
            self.finish();
        }
        self.counts.add(&self.drive.counts());
        self.tallies.reads_checked = self.checker.reads_checked;
        self.tallies.lost_writes = self.checker.lost_writes;
        Report {
            settings: self.settings,
            violation: self.violation,
            tallies: self.tallies,
            counts: self.counts,
        }
    }

    fn step(&mut self) {
        self.tallies.steps += 1;
        if self.tallies.steps > STEPS_MAX {
            return self.violate(format!("it takes more than {STEPS_MAX} steps"));
        }
        match self.dice.below(8) {
            0 | 1 if self.left > 0 => self.submit(),
            2 => self.trouble(),
            3 | 4 => _ = self.poll(),
            _ => {
                if !self.drive.step() {
                    self.pass_time();
                }
            }
        }
        self.look_at_drive();
    }

    fn look_at_drive(&mut self) {
        let found = self.drive.violation().or_else(|| self.disk.violation());
        if let Some(what) = found {
            self.violate(what);
        }
        let limit = self.limit_ns();
        let late = self
            .in_flight
            .values()
            .find(|operation| self.now > operation.begin_ns + limit);
        if let Some(operation) = late {
            let what = format!("{operation:?} has not ended within {} ms", limit / MS);
            self.violate(what);
        }
    }

    /// Returns the longest time that a command takes: it is aborted, then the drive is reset.
    fn limit_ns(&self) -> u64 {
        2 * self.options.timeout.as_nanos() as u64 + u64::from(self.shape.timeout) * 500 * MS + 200 * MS
    }

    /// Lets time pass up to the next thing that is due, or not as far.
    fn pass_time(&mut self) {
        let look = self.driver.next_look();
        let look = look.map_or(u64::MAX, |at| (at - self.began).as_nanos() as u64);
        let due = self.drive.next_due().min(look);
        let due = if due == u64::MAX { self.now + MS } else { due };
        let ahead = due.saturating_sub(self.now);
        self.now += match self.dice.below(3) {
            0 => self.dice.below(ahead + 1),
            _ => ahead,
        };
        // A driver that is late.
        if self.dice.one_in(8) {
            self.now += self.dice.below(20 * US);
        }
        self.drive.set_now(self.now);
        // Time passes only where the driver was asked until it had nothing.
        while self.poll() && self.violation.is_none() {}
    }

    /// Returns true if there may be more.
    fn poll(&mut self) -> bool {
        let completion = self.driver.poll(self.instant());
        let is_some = completion.is_some();
        if let Some(completion) = completion {
            self.complete(completion);
        } else if self.driver.state() == State::Failed {
            self.give_up();
        }
        is_some
    }

    /// Something may go wrong.
    fn trouble(&mut self) {
        let every = 40 + u64::from(self.settings.operations);
        if !self.dice.one_in(every) {
            return;
        }
        match self.dice.below(6) {
            0 if self.troubles(Trouble::Fatal) => self.drive.fail(),
            1 if self.troubles(Trouble::Fatal) && self.dice.one_in(3) => self.drive.break_down(),
            1 if self.troubles(Trouble::Fatal) => {
                self.faults.sticks = true;
                self.drive.set_faults(self.faults);
                self.drive.fail();
            }
            2 if self.troubles(Trouble::Vanishes) => self.drive.vanish(),
            3 if self.troubles(Trouble::PowerCuts) => self.cut_power(),
            4 if self.settings.trouble != Trouble::None => self.drop_driver(),
            5 => self.restart(),
            _ => {}
        }
    }

    /// Draws and submits a command.
    fn submit(&mut self) {
        if self.driver.state() != State::Ready {
            return;
        }
        let blocks_max = (self.driver.data_bytes_max() / BLOCK) as u64;
        let total = self.disk.blocks();
        let action = self.dice.pick(&[
            Action::Read,
            Action::Read,
            Action::Read,
            Action::Write,
            Action::Write,
            Action::Write,
            Action::Flush,
            Action::WriteZeroes,
            Action::Deallocate,
        ]);
        let blocks = self.dice.log_uniform(blocks_max.min(total));
        let slba = self.dice.below(total - blocks + 1);
        let queue = self.dice.below(self.driver.queues() as u64) as usize;
        let has_data = matches!(action, Action::Read | Action::Write);
        let command = Command {
            action,
            nsid: NsId(NSID),
            slba,
            blocks: blocks as u32,
        };
        if self.dice.one_in(16) {
            return self.submit_wrong(command, queue);
        }
        if self.driver.outstanding(queue) == self.driver.commands_max() {
            if !has_data && self.dice.one_in(8) {
                self.refused(command, queue, Vec::new(), RefusedReason::Full);
            }
            return;
        }
        let Some(data) = self.buffers(if has_data { blocks as usize * BLOCK } else { 0 }, action) else {
            return;
        };
        let begin = self.ticks.next();
        let mut operation = Operation {
            action,
            slba,
            blocks: blocks as u32,
            begin,
            begin_ns: self.now,
            writes: Vec::new(),
            pages: pages(&data),
        };
        self.begin(&mut operation, &data);
        operation.pages.iter().for_each(|page| self.drive.lend(*page));
        self.tallies.peer_to_peer += u64::from(
            data.first()
                .is_some_and(|buffer| buffer.kind() != MemoryKind::Dram),
        );
        self.last_token += 1;
        let (now, token) = (self.instant(), self.last_token);
        self.left -= 1;
        match self.driver.submit(now, queue, command, data, token) {
            Ok(()) => {
                self.in_flight.insert(token, operation);
            }
            // The drive has gone, and nobody has noticed.
            Err(refused) if refused.reason == RefusedReason::NotReady => {
                self.give_back(&operation);
                let now = self.ticks.next();
                self.close(&operation, now);
            }
            Err(refused) => self.violate(format!("{command:?} is refused: {}", refused.reason)),
        }
    }

    /// Takes buffers of one kind of memory, of so many bytes, in some parts. `None` if there are none.
    fn buffers(&mut self, bytes: usize, action: Action) -> Option<Vec<Buffer>> {
        let kind = self
            .dice
            .pick(&[MemoryKind::Dram, MemoryKind::Cmb, MemoryKind::Pmr]);
        let pool = self.driver.pool(kind).filter(|pool| pool.takes(action)).cloned();
        let staging = self
            .driver
            .staging()
            .filter(|_| kind == MemoryKind::Dram)
            .cloned();
        let staging = staging.filter(|_| self.dice.one_in(2));
        let pool = staging.or(pool);
        let pool: Arc<Pool> = pool.or_else(|| self.driver.pool(MemoryKind::Dram).cloned())?;
        let mut left = bytes.div_ceil(PAGE);
        let mut data = Vec::new();
        while left > 0 {
            let part = self.dice.between(1, left as u64) as usize;
            data.push(pool.allocate(part * PAGE)?);
            left -= part;
        }
        Some(data)
    }

    /// Tells the checker what begins, and fills the buffers of a write.
    fn begin(&mut self, operation: &mut Operation, data: &[Buffer]) {
        let begin = operation.begin;
        let places = (operation.slba..)
            .take(operation.blocks as usize)
            .map(|block| (NSID, block));
        let places: Vec<Place> = places.collect();
        let values: Vec<Value> = match operation.action {
            Action::Read | Action::Flush => return,
            Action::Write => places.iter().map(|_| self.checker.value()).collect(),
            Action::WriteZeroes | Action::Deallocate => vec![0; places.len()],
        };
        let writes = places.iter().zip(&values);
        operation.writes = writes
            .map(|(place, value)| self.checker.begin(0, *place, *value, begin))
            .collect();
        if operation.action == Action::Write {
            let mut bytes = vec![0; values.len() * BLOCK];
            for (block, value) in bytes.chunks_exact_mut(BLOCK).zip(&values) {
                disk::fill(*value, block);
            }
            self.access(data, bytes.len(), |buffer, range| {
                buffer.write(0, &bytes[range]).expect("it fits");
            });
        }
    }

    /// Accesses the bytes at the beginning of buffers as an RNIC does.
    fn access(&self, data: &[Buffer], bytes: usize, mut access: impl FnMut(&Buffer, std::ops::Range<usize>)) {
        let mut at = 0;
        for buffer in data {
            let end = bytes.min(at + buffer.bytes());
            self.drive.as_nic(|| access(buffer, at..end));
            // As the RNIC would; what it moves in the host's memory is no matter of the drive.
            if buffer.kind() != MemoryKind::Dram {
                let route = Route::Nic(buffer.kind().location());
                book(
                    self.options.ledger.as_ref(),
                    route,
                    Class::Data,
                    (end - at) as u64,
                );
            }
            at = end;
        }
    }

    /// Submits a command that the driver must refuse.
    fn submit_wrong(&mut self, mut command: Command, queue: usize) {
        let dram = self.driver.pool(MemoryKind::Dram).cloned();
        let kinds = [MemoryKind::Cmb, MemoryKind::Pmr];
        let own = kinds.iter().find_map(|kind| self.driver.pool(*kind).cloned());
        let page = |pool: Option<Arc<Pool>>| pool.and_then(|pool| pool.allocate(PAGE));
        match self.dice.below(4) {
            0 if command.action != Action::Flush => {
                command.slba = self.disk.blocks() - u64::from(command.blocks) + 1;
                self.refused(command, queue, Vec::new(), RefusedReason::Range);
            }
            1 => {
                command.nsid = NsId(2);
                self.refused(command, queue, Vec::new(), RefusedReason::NoNamespace);
            }
            2 => {
                if let (Some(one), Some(two)) = (page(dram), page(own)) {
                    command.action = Action::Write;
                    command.slba = 0;
                    command.blocks = 2 * (PAGE / BLOCK) as u32;
                    self.refused(command, queue, vec![one, two], RefusedReason::MixedKinds);
                }
            }
            _ => {
                command.action = Action::Read;
                self.refused(command, queue, Vec::new(), RefusedReason::Short);
            }
        }
    }

    fn refused(&mut self, command: Command, queue: usize, data: Vec<Buffer>, reason: RefusedReason) {
        match self.driver.submit(self.instant(), queue, command, data, 0) {
            Err(refused) if refused.reason == reason => self.tallies.refused += 1,
            other => self.violate(format!(
                "{command:?} is not refused as it must be ({reason}): {other:?}"
            )),
        }
    }

    fn complete(&mut self, completion: Completion) {
        let Some(operation) = self.in_flight.remove(&completion.token) else {
            return self.violate(format!("{completion:?} ends a command that is not in flight"));
        };
        self.tallies.operations += 1;
        let now = self.ticks.next();
        if completion.data.is_empty() && !operation.pages.is_empty() {
            // The drive did not stop: it may access them for ever.
            self.tallies.held += 1;
        } else {
            self.give_back(&operation);
        }
        match completion.outcome {
            Outcome::Done(Status::SUCCESS) => self.succeed(&operation, &completion.data, now),
            outcome => self.fail(&operation, outcome, now),
        }
    }

    fn succeed(&mut self, operation: &Operation, data: &[Buffer], now: u64) {
        match operation.action {
            Action::Read => {
                let mut bytes = vec![0; operation.blocks as usize * BLOCK];
                self.access(data, bytes.len(), |buffer, range| {
                    buffer.read(0, &mut bytes[range]).expect("it is there");
                });
                // The memory of a drive that has gone reads as ones.
                let is_there = data[0].kind() == MemoryKind::Dram || !self.drive.is_gone();
                if is_there {
                    self.check_read(operation, &bytes, now);
                }
            }
            Action::Flush => self.checker.flushed(NSID, operation.begin, 0),
            Action::Write | Action::WriteZeroes | Action::Deallocate => {
                let is_durable = !self.shape.has_cache;
                for write in &operation.writes {
                    self.checker.done(*write, is_durable, operation.begin, now);
                }
            }
        }
    }

    fn check_read(&mut self, operation: &Operation, bytes: &[u8], now: u64) {
        for (block, bytes) in (operation.slba..).zip(bytes.chunks_exact(BLOCK)) {
            let checked = match disk::value(bytes) {
                Some(value) => self.checker.read((NSID, block), value, operation.begin, now),
                None => Err(format!("block {block} was read, and its bytes are of no write")),
            };
            if let Err(what) = checked {
                return self.violate(what);
            }
        }
    }

    fn fail(&mut self, operation: &Operation, outcome: Outcome, now: u64) {
        let may_be_reset = [
            Trouble::Timeouts,
            Trouble::Fatal,
            Trouble::Vanishes,
            Trouble::Hostile,
        ];
        let may_be_reset = may_be_reset.iter().any(|trouble| self.troubles(*trouble));
        let is_expected = match outcome {
            Outcome::Done(status) if status.is(Status::ABORT_REQUESTED) => {
                self.tallies.aborted += 1;
                may_be_reset
            }
            Outcome::Done(_) => self.troubles(Trouble::Failures),
            Outcome::Reset => {
                self.tallies.reset += 1;
                may_be_reset || self.is_stopping
            }
            Outcome::Gone => {
                self.tallies.gone += 1;
                self.troubles(Trouble::Vanishes)
            }
        };
        if !is_expected {
            self.violate(format!("{operation:?} ends with {outcome:?}"));
        }
        self.close(operation, now);
    }

    /// The drive has its buffers no more.
    fn give_back(&self, operation: &Operation) {
        for page in &operation.pages {
            self.drive.take_back(*page);
        }
    }

    /// Nothing of it acts any more; nobody knows if it has.
    fn close(&mut self, operation: &Operation, now: u64) {
        for write in &operation.writes {
            self.checker.close(*write, now);
        }
    }

    /// The driver says that its drive cannot be used any more.
    fn give_up(&mut self) {
        let calm = [Trouble::None, Trouble::Failures, Trouble::PowerCuts];
        if calm.contains(&self.settings.trouble) || !self.in_flight.is_empty() {
            let failure = self.driver.failure();
            return self.violate(format!(
                "the driver gives the drive up: {failure:?}, with {} commands in flight",
                self.in_flight.len()
            ));
        }
        self.tallies.given_up += 1;
        self.leave();
        self.power_cycle();
    }

    /// Drops the driver. The drive goes on for a while, and must still find all memory that it knows.
    fn leave(&mut self) {
        // Nobody has this drive: it holds the place until the next driver comes.
        let drive = Drive::new(Shape::default(), super::Bytes::new(1), 0);
        let options = Options {
            dram_bytes: PAGE,
            ..Options::default()
        };
        self.driver = Driver::new(drive, options, self.instant()).expect("the drive answers");
        for _ in 0..SILENCE_MAX {
            if self.drive.step() {
                continue;
            }
            let due = self.drive.next_due();
            if due > self.now + STICKS_NS {
                break;
            }
            self.now = self.now.max(due);
            self.drive.set_now(self.now);
        }
        self.look_at_drive();
    }

    /// The power is cut, of the host too.
    fn cut_power(&mut self) {
        self.tallies.power_cuts += 1;
        self.in_flight.clear();
        self.power_cycle();
    }

    /// The power goes, and comes back. Another drive has the media.
    fn power_cycle(&mut self) {
        self.drive.vanish();
        self.disk.cut_power();
        self.checker.target_died(true, self.ticks.next());
        self.look_at_drive();
        self.counts.add(&self.drive.counts());
        self.faults.sticks = false;
        let drive = Drive::with_pmr(self.shape, self.disk.clone(), self.pmr.clone(), self.dice.next());
        drive.set_faults(self.faults);
        drive.set_now(self.now);
        self.drive = drive;
        self.new_driver();
    }

    fn new_driver(&mut self) {
        match Driver::new(self.drive.clone(), self.options.clone(), self.instant()) {
            Ok(driver) => self.driver = driver,
            Err(error) => self.violate(format!("a drive that is there cannot be driven: {error}")),
        }
    }

    /// The driver is dropped with all that it has, and another one begins.
    fn drop_driver(&mut self) {
        if self.driver.state() == State::Failed {
            return;
        }
        self.tallies.dropped += 1;
        let ended = std::mem::take(&mut self.in_flight);
        self.leave();
        // The drive has stopped, so nothing of them acts any more.
        let now = self.ticks.next();
        for operation in ended.values() {
            self.give_back(operation);
            self.close(operation, now);
        }
        match self.drive.is_gone() || self.faults.sticks {
            true => self.power_cycle(),
            false => self.new_driver(),
        }
    }

    /// The driver shuts its drive down, and another one begins.
    fn restart(&mut self) {
        if self.driver.state() != State::Ready {
            return;
        }
        if self.shut_down() {
            self.tallies.restarts += 1;
            self.new_driver();
        }
    }

    /// Returns true if the drive is off.
    fn shut_down(&mut self) -> bool {
        self.is_stopping = true;
        let is_off = self.stop();
        self.is_stopping = false;
        is_off
    }

    fn stop(&mut self) -> bool {
        let begin = self.ticks.next();
        self.driver.shut_down(self.instant());
        for _ in 0..SILENCE_MAX {
            if self.violation.is_some() || !self.drive.step() {
                self.pass_time();
            }
            while let Some(completion) = self.driver.poll(self.instant()) {
                self.complete(completion);
            }
            match self.driver.state() {
                State::Stopping => {}
                State::Off => {
                    let shut_downs = self.drive.is_shut_down();
                    if shut_downs {
                        // It has written its cache.
                        self.checker.flushed(NSID, begin, 0);
                    } else if self.settings.trouble == Trouble::None {
                        self.violate("the driver takes a drive for shut down that is not");
                    }
                    self.look_at_drive();
                    return true;
                }
                // It has failed meanwhile, and maybe begun anew.
                _ => return false,
            }
            if self.violation.is_some() {
                return false;
            }
        }
        self.violate("the drive does not shut down");
        false
    }

    /// Ends a run: the drive is shut down, the power cut, and each block looked at.
    fn finish(&mut self) {
        self.faults = Faults {
            latency_ns: self.faults.latency_ns,
            ..Faults::default()
        };
        self.drive.set_faults(self.faults);
        let mut tries = 0;
        while self.violation.is_none() && self.driver.state() != State::Off {
            tries += 1;
            if tries > SILENCE_MAX {
                return self.violate("the driver does not become ready again");
            }
            match self.driver.state() {
                State::Ready => _ = self.shut_down(),
                _ if !self.drive.step() => self.pass_time(),
                _ => _ = self.poll(),
            }
            self.look_at_drive();
        }
        self.compare_ledgers();
        self.drive.vanish();
        self.disk.cut_power();
        let now = self.ticks.next();
        self.checker.target_died(true, now);
        for block in 0..self.disk.blocks() {
            let now = self.ticks.next();
            if let Err(what) = self
                .checker
                .read((NSID, block), self.disk.block(block), now, now + 1)
            {
                self.violate(format!("after the last power cut, {what}"));
            }
        }
    }

    /// Compares what the driver has booked with what the drive has moved.
    fn compare_ledgers(&mut self) {
        // What a command has moved that did not end well is unknown.
        if self.settings.trouble != Trouble::None || self.tallies.reset > 0 {
            return;
        }
        self.tallies.ledgers += 1;
        let ledger = self.options.ledger.as_ref();
        let believed = ledger.map(|ledger| ledger.entries()).unwrap_or_default();
        for (link, class, believed, moved) in believed.differences(&self.drive.entries()) {
            let (link, class) = (link.name(), class.name());
            self.violate(format!(
                "the driver has booked {believed} bytes of {class} on {link}, and {moved} have moved"
            ));
        }
    }
}

/// Returns the pages of buffers.
fn pages(data: &[Buffer]) -> Vec<u64> {
    let of = |buffer: &Buffer| {
        (0..buffer.bytes() / PAGE)
            .map(|page| buffer.address(page))
            .collect::<Vec<_>>()
    };
    data.iter().flat_map(of).collect()
}

/// Draws faults of commands.
fn faults(trouble: Trouble, options: &Options, dice: &mut Dice) -> Faults {
    let has = |one: Trouble| trouble == one || trouble == Trouble::All;
    let timeout_ns = options.timeout.as_nanos() as u64;
    let mut faults = Faults {
        latency_ns: dice.pick(&[2, 50, 500]) * US,
        ..Faults::default()
    };
    if has(Trouble::Failures) {
        faults.fails = dice.pick(&[4, 20]);
    }
    if has(Trouble::Timeouts) {
        faults.late = dice.pick(&[0, 10, 50]);
        faults.late_ns = dice.pick(&[1, 2, 4]) * timeout_ns;
        faults.never = dice.pick(&[20, 60]);
    }
    if has(Trouble::Hostile) {
        faults.hostile = dice.pick(&[5, 40]);
    }
    faults
}
