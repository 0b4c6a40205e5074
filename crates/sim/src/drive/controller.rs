//! The controller: queues, commands, and what moves when. NVMe Base 2.0, 3; NVMe over PCIe Transport 1.0 (PCIe).
//!
//! Whoever runs it calls [`Controller::step`], which does one thing, drawn from all that could be done: fetches a command, moves a page of its data, or
//! completes it. So commands begin and end in any order, and their data move while others do.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdmux_rnic::ledger::{Class, Ledger, Location, Route};
use rdmux_wire::nvme::{CQE_LEN, Cid, Cqe, Opcode, SQE_LEN, Sqe, Status};

use super::bus::{Bus, DriveMemory, PAGE, Place};
use super::media::Media;
use super::registers::Registers;
use super::{Counts, Faults, Shape};
use crate::dice::Dice;

pub(super) const NEVER: u64 = u64::MAX;
/// Requests for asynchronous events at a time.
pub(super) const EVENT_REQUESTS: usize = 4;
/// Data in the drive's memory where none may be, or partly there. 4.1.1 and Figure 96.
const INVALID_CMB_USE: Status = Status(0x012);
/// A PRP entry is no address of a page. Figure 96.
const INVALID_PRP_OFFSET: Status = Status(0x013);

/// A submission queue.
#[derive(Debug)]
pub(super) struct Submission {
    pub(super) address: u64,
    pub(super) entries: u32,
    pub(super) head: u32,
    pub(super) tail: u32,
    pub(super) cq: u16,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct Completion {
    pub(super) address: u64,
    pub(super) entries: u32,
    pub(super) tail: u32,
    pub(super) head: u32,
    pub(super) phase: bool,
}

/// Part of a command's data: no more than a page of it, at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    address: u64,
    len: usize,
    /// Turn of its page when the command was fetched; `None` if the page is of no buffer that is lent.
    turn: Option<u64>,
}

/// What moves for a command, once it runs.
#[derive(Debug)]
pub(super) enum Work {
    /// Nothing.
    None(Status, u64),
    ToHost(Vec<u8>),
    FromHost,
    /// Nothing happens until something else does.
    Waits,
}

#[derive(Debug)]
struct Command {
    sq: u16,
    sqe: Sqe,
    pieces: Result<Vec<Piece>, Status>,
    /// Pieces that have moved.
    moved: usize,
    bytes: Vec<u8>,
    work: Option<Work>,
    /// It goes on at this time.
    due: u64,
    /// It stops for ever once so many pieces have moved.
    stops_at: Option<usize>,
    /// It fails when all has moved.
    fails: Option<Status>,
    outcome: Option<(Status, u64)>,
}

/// Fatal or final state of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Health {
    Well,
    /// CSTS.CFS is set until a reset.
    Fatal,
    /// As `Fatal`, and no reset helps.
    Broken,
    /// It is no more on the bus.
    Gone,
}

#[derive(Debug)]
pub(super) struct Controller {
    pub(super) shape: Shape,
    pub(super) registers: Registers,
    pub(super) bus: Bus,
    pub(super) cmb: Option<Arc<DriveMemory>>,
    pub(super) pmr: Option<Arc<DriveMemory>>,
    pub(super) media: Arc<dyn Media>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) dice: Dice,
    pub(super) faults: Faults,
    pub(super) health: Health,
    pub(super) now: u64,
    pub(super) sqs: BTreeMap<u16, Submission>,
    pub(super) cqs: BTreeMap<u16, Completion>,
    commands: Vec<Command>,
    pub(super) write_cache: bool,
    pub(super) event_config: u32,
    pub(super) counts: Counts,
    pub(super) violation: Option<String>,
}

impl Controller {
    pub(super) fn new(shape: Shape, media: Arc<dyn Media>, dice: Dice) -> Controller {
        Controller {
            registers: Registers::default(),
            bus: Bus::default(),
            cmb: None,
            pmr: None,
            media,
            ledger: Arc::default(),
            dice,
            faults: Faults::default(),
            health: Health::Well,
            now: 0,
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            commands: Vec::new(),
            write_cache: shape.has_cache,
            event_config: 0,
            counts: Counts::default(),
            violation: None,
            shape,
        }
    }

    pub(super) fn violate(&mut self, what: impl Into<String>) {
        let what = what.into();
        self.violation.get_or_insert(what);
    }

    /// Returns true if it may access memory: it is on the bus, and was not reset.
    fn is_running(&self) -> bool {
        self.health != Health::Gone && self.registers.is_ready
    }

    /// Does one thing. Returns false if there is nothing to do before a later time.
    pub(super) fn step(&mut self) -> bool {
        if self.health == Health::Gone {
            return false;
        }
        if self.settle() {
            return true;
        }
        if !self.is_running() {
            return false;
        }
        // A controller that has failed fetches nothing and completes nothing; what moves goes on moving.
        let is_well = self.health == Health::Well;
        let is_enabled = self.registers.configuration.is_enabled();
        let fetches = self.sqs.iter().filter(|(_, sq)| sq.head != sq.tail);
        let fetches: Vec<u16> = fetches
            .map(|(id, _)| *id)
            .filter(|_| is_well && is_enabled)
            .collect();
        let goes: Vec<usize> = (0..self.commands.len())
            .filter(|at| self.goes(&self.commands[*at], is_well))
            .collect();
        let drawn = self.dice.below((fetches.len() + goes.len()) as u64) as usize;
        match fetches.get(drawn) {
            Some(sq) => self.fetch(*sq),
            None if goes.is_empty() => return false,
            None => self.go(goes[drawn - fetches.len()]),
        }
        true
    }

    /// Returns the next time from which on a call of [`Controller::step`] may do more than it does already.
    pub(super) fn next_due(&self) -> u64 {
        let commands = self.commands.iter().map(|command| command.due);
        let all = commands.chain([self.registers.due]);
        all.filter(|due| *due > self.now).min().unwrap_or(NEVER)
    }

    fn goes(&self, command: &Command, is_well: bool) -> bool {
        if command.due > self.now {
            return false;
        }
        match command.outcome {
            None => !matches!(command.work, Some(Work::Waits)),
            Some(_) => is_well && self.has_room(command.sq),
        }
    }

    fn has_room(&self, sq: u16) -> bool {
        let cq = self.sqs.get(&sq).and_then(|sq| self.cqs.get(&sq.cq));
        cq.is_some_and(|cq| (cq.tail + 1) % cq.entries != cq.head)
    }

    /// Finds what is at an address where a driver has told that something is.
    fn place(&mut self, address: u64, why: &str) -> Option<Place> {
        let place = self.bus.find(address);
        if place.is_none() {
            self.violate(format!(
                "the drive accesses {address:#x}, where no memory is, {why}"
            ));
        }
        place
    }

    fn fetch(&mut self, id: u16) {
        let sq = &self.sqs[&id];
        let address = sq.address + u64::from(sq.head) * SQE_LEN as u64;
        let Some(place) = self.place(address, "for a command") else {
            return self.fail();
        };
        let mut bytes = [0; SQE_LEN];
        place.read(&mut bytes).expect("a page is whole");
        self.ledger
            .book(Route::Drive(place.location()), Class::Command, SQE_LEN as u64);
        if let Some(sq) = self.sqs.get_mut(&id) {
            sq.head = (sq.head + 1) % sq.entries;
        }
        let sqe = Sqe::parse(&bytes).expect("it has all bytes");
        let is_taken = |command: &Command| command.sq == id && command.sqe.cid() == sqe.cid();
        if self.commands.iter().any(is_taken) {
            self.violate(format!(
                "queue {id} has a second command with id {} while the first one is in flight",
                sqe.cid().0
            ));
        }
        self.counts.commands += 1;
        let pieces = self.walk(&sqe, self.data_len(id, &sqe), true);
        let mut command = Command {
            sq: id,
            sqe,
            pieces,
            moved: 0,
            bytes: Vec::new(),
            work: None,
            due: self.now + self.dice.below(self.faults.latency_ns.max(1)),
            stops_at: None,
            fails: None,
            outcome: None,
        };
        self.draw_fate(&mut command);
        self.commands.push(command);
    }

    /// Decides what becomes of a command.
    fn draw_fate(&mut self, command: &mut Command) {
        let is_io = command.sq != 0;
        let Faults {
            fails,
            late,
            late_ns,
            never,
            ..
        } = self.faults;
        let dice = &mut self.dice;
        if dice.one_in_or_never(never) && (is_io || dice.one_in(4)) {
            let pieces = command.pieces.as_ref().map_or(0, Vec::len) as u64;
            command.stops_at = Some(dice.below(pieces + 1) as usize);
            self.counts.hung += 1;
        } else if dice.one_in_or_never(late) {
            command.due = self.now + dice.below(late_ns);
            self.counts.late += 1;
        } else if is_io && dice.one_in_or_never(fails) {
            let status = match command.sqe.opcode() {
                Opcode::READ => Status::READ_ERROR,
                Opcode::WRITE | Opcode::WRITE_ZEROES | Opcode::FLUSH => Status::WRITE_FAULT,
                _ => Status::INTERNAL_ERROR,
            };
            command.fails = Some(status);
            self.counts.failed += 1;
        }
    }

    /// Returns the bytes that a command's PRP entries describe.
    fn data_len(&self, sq: u16, sqe: &Sqe) -> usize {
        match sq {
            0 => super::admin::data_len(sqe),
            _ => self.io_data_len(sqe),
        }
    }

    /// Follows the PRP entries of a command. 4.1.1.
    fn walk(&mut self, sqe: &Sqe, len: usize, books: bool) -> Result<Vec<Piece>, Status> {
        let mut pieces: Vec<Piece> = Vec::new();
        if len == 0 {
            return Ok(pieces);
        }
        let [first, second] = sqe.prps();
        let offset = first % PAGE;
        if !offset.is_multiple_of(4) {
            return Err(INVALID_PRP_OFFSET);
        }
        let mut left = len;
        let mut add = |bus: &Bus, address: u64, left: &mut usize| {
            let len = (*left).min((PAGE - address % PAGE) as usize);
            *left -= len;
            pieces.push(Piece {
                address,
                len,
                turn: bus.turn(address),
            });
        };
        add(&self.bus, first, &mut left);
        if left > 0 && left <= PAGE as usize {
            if !second.is_multiple_of(PAGE) {
                return Err(INVALID_PRP_OFFSET);
            }
            add(&self.bus, second, &mut left);
        }
        let mut list = second;
        while left > 0 {
            if !list.is_multiple_of(8) {
                return Err(INVALID_PRP_OFFSET);
            }
            let in_page = ((PAGE - list % PAGE) / 8) as usize;
            let needed = left.div_ceil(PAGE as usize);
            let entries = needed.min(in_page);
            let Some(place) = self.place(list, "for a list of pages") else {
                return Err(Status::DATA_TRANSFER_ERROR);
            };
            let mut bytes = vec![0; entries * 8];
            place.read(&mut bytes).expect("a page is whole");
            if books {
                self.ledger
                    .book(Route::Drive(place.location()), Class::Command, bytes.len() as u64);
            }
            let links = needed > in_page;
            let (chunks, _) = bytes.as_chunks::<8>();
            for (at, entry) in chunks.iter().enumerate() {
                let address = u64::from_le_bytes(*entry);
                if !address.is_multiple_of(PAGE) {
                    return Err(INVALID_PRP_OFFSET);
                }
                // The last entry of a page is the address of the next list.
                if links && at + 1 == entries {
                    list = address;
                } else {
                    add(&self.bus, address, &mut left);
                }
            }
        }
        self.check_kinds(sqe, &pieces)?;
        Ok(pieces)
    }

    /// Checks that the data of a command are in one kind of memory, which takes them.
    fn check_kinds(&mut self, sqe: &Sqe, pieces: &[Piece]) -> Result<(), Status> {
        let invalid = INVALID_CMB_USE.do_not_retry();
        let mut first = None;
        for piece in pieces {
            let Some(place) = self.bus.find(piece.address) else {
                continue;
            };
            let of_drive = match &place {
                Place::Dram(..) => None,
                Place::Own(memory, _) => Some(Arc::as_ptr(memory)),
            };
            if *first.get_or_insert(of_drive) != of_drive {
                return Err(invalid);
            }
            if let (Place::Own(memory, _), Some(cmb)) = (&place, &self.cmb)
                && Arc::ptr_eq(memory, cmb)
                && let Some(layout) = self.shape.cmb
            {
                let takes = match sqe.is_to_controller() {
                    true => layout.layout.writes,
                    false => layout.layout.reads,
                };
                if !takes {
                    return Err(invalid);
                }
            }
        }
        Ok(())
    }

    /// A command goes on.
    fn go(&mut self, at: usize) {
        let mut command = self.commands.swap_remove(at);
        if let Some((status, result)) = command.outcome {
            self.complete(command.sq, command.sqe.cid(), status, result);
            return;
        }
        if command.stops_at.is_some_and(|pieces| command.moved >= pieces) {
            command.due = NEVER;
            return self.commands.push(command);
        }
        if command.work.is_none() {
            let begun = match (&command.pieces, command.fails) {
                (Err(status), _) => Work::None(*status, 0),
                (Ok(pieces), Some(status)) if pieces.is_empty() => Work::None(status, 0),
                (Ok(_), _) => self.begin(command.sq, &command.sqe),
            };
            command.work = Some(begun);
            // The list must still be what it was: the command is in flight.
            let len = self.data_len(command.sq, &command.sqe);
            let again = self.walk(&command.sqe, len, false);
            let addresses = |pieces: &Result<Vec<Piece>, Status>| match pieces {
                Ok(pieces) => pieces.iter().map(|piece| piece.address).collect(),
                Err(_) => Vec::new(),
            };
            if addresses(&again) != addresses(&command.pieces) {
                self.violate("a list of pages changes while its command is in flight");
            }
        }
        let pieces = command.pieces.as_ref().map_or(0, Vec::len);
        match &command.work {
            Some(Work::None(status, result)) => command.outcome = Some((*status, *result)),
            Some(Work::ToHost(_) | Work::FromHost) if command.moved < pieces => self.transfer(&mut command),
            Some(Work::ToHost(_)) => command.outcome = Some((command.fails.unwrap_or(Status::SUCCESS), 0)),
            Some(Work::FromHost) => command.outcome = Some((self.finish(&command), 0)),
            Some(Work::Waits) | None => {}
        }
        if command.outcome.is_none() && self.dice.one_in(4) {
            command.due = self.now + self.dice.below(self.faults.latency_ns.max(1));
        }
        self.commands.push(command);
    }

    /// Carries out a command whose data are here.
    fn finish(&mut self, command: &Command) -> Status {
        match (command.fails, command.sq) {
            (Some(status), _) => {
                // Some of it may have been written.
                self.tear(command);
                status
            }
            (None, 0) => Status::SUCCESS,
            (None, _) => self.finish_io(&command.sqe, &command.bytes),
        }
    }

    /// Moves one piece of data.
    fn transfer(&mut self, command: &mut Command) {
        let Ok(pieces) = &command.pieces else {
            return;
        };
        let piece = pieces[command.moved];
        let begin: usize = pieces[..command.moved].iter().map(|piece| piece.len).sum();
        let name = format!("{:?} of queue {}", command.sqe, command.sq);
        // A page that was lent when the command came, and is not any more or again, is another's.
        let turn = self.bus.turn(piece.address);
        if command.sq != 0 && (turn != piece.turn || turn.is_some_and(|turn| turn.is_multiple_of(2))) {
            self.violate(format!(
                "a buffer is used again too soon: the drive accesses page {:#x} for {name}, which has ended for the host",
                piece.address
            ));
        }
        let Some(place) = self.place(piece.address, &format!("for the data of {name}")) else {
            command.outcome = Some((Status::DATA_TRANSFER_ERROR, 0));
            return;
        };
        if let Some(Work::ToHost(bytes)) = &command.work {
            place
                .write(&bytes[begin..begin + piece.len])
                .expect("a page is whole");
        } else {
            command.bytes.resize(begin + piece.len, 0);
            place.read(&mut command.bytes[begin..]).expect("a page is whole");
        }
        self.ledger
            .book(Route::Drive(place.location()), Class::Data, piece.len as u64);
        match place.location() {
            Location::Dram => self.counts.pages_in_dram += 1,
            Location::Drive => self.counts.pages_in_drive += 1,
        }
        command.moved += 1;
    }

    /// Begins a command of a queue; its data move afterwards.
    fn begin(&mut self, sq: u16, sqe: &Sqe) -> Work {
        match sq {
            0 => self.begin_admin(sqe),
            _ => self.begin_io(sqe),
        }
    }

    /// Writes a completion.
    pub(super) fn complete(&mut self, sq: u16, cid: Cid, status: Status, result: u64) {
        let hostile = self.dice.one_in_or_never(self.faults.hostile) && sq != 0;
        let head = self.sqs.get(&sq).map_or(0, |sq| sq.head);
        let mut cqe = Cqe {
            result,
            sq_head: head as u16,
            cid,
            status,
        };
        let mut of_sq = sq;
        if hostile {
            self.counts.hostile += 1;
            match self.dice.below(3) {
                0 => cqe.cid = self.free_cid(sq),
                1 => cqe.sq_head = 0xffff,
                _ => of_sq = sq.wrapping_add(self.dice.between(1, 0xfffe) as u16),
            }
        }
        self.write_completion(sq, &cqe, of_sq);
    }

    /// Returns an id that no command of a queue has.
    fn free_cid(&mut self, sq: u16) -> Cid {
        loop {
            let cid = Cid(self.dice.next() as u16);
            let mut of_queue = self.commands.iter().filter(|command| command.sq == sq);
            if of_queue.all(|command| command.sqe.cid() != cid) {
                return cid;
            }
        }
    }

    fn write_completion(&mut self, sq: u16, cqe: &Cqe, of_sq: u16) {
        let Some(id) = self.sqs.get(&sq).map(|sq| sq.cq) else {
            return;
        };
        let Some(cq) = self.cqs.get_mut(&id) else {
            return;
        };
        let mut bytes = [0; CQE_LEN];
        cqe.emit(&mut bytes);
        bytes[10..12].copy_from_slice(&of_sq.to_le_bytes());
        bytes[14] |= u8::from(cq.phase);
        let address = cq.address + u64::from(cq.tail) * CQE_LEN as u64;
        cq.tail = (cq.tail + 1) % cq.entries;
        cq.phase ^= cq.tail == 0;
        let Some(place) = self.place(address, "for a completion") else {
            return self.fail();
        };
        place.write(&bytes).expect("a page is whole");
        self.ledger
            .book(Route::Drive(place.location()), Class::Completion, CQE_LEN as u64);
        self.counts.completions += 1;
    }

    /// The controller fails, and tells so (CSTS.CFS).
    pub(super) fn fail(&mut self) {
        if self.health == Health::Well {
            self.health = Health::Fatal;
            self.counts.fatal += 1;
            // One that does not stop moves the data of some commands much later.
            let stuck_ns = self.stuck_ns();
            for command in self.commands.iter_mut().filter(|command| command.due != NEVER) {
                if stuck_ns > 0 && self.dice.one_in(2) {
                    command.due = self.now + self.dice.below(stuck_ns);
                }
            }
        }
    }

    /// Returns the time that it takes longer to stop.
    pub(super) fn stuck_ns(&self) -> u64 {
        match self.faults.sticks {
            true => 10 * 500_000_000 * u64::from(self.shape.timeout),
            false => 0,
        }
    }

    /// Ends a command for the host's Abort. Returns false if it goes on.
    pub(super) fn abort(&mut self, sq: u16, cid: Cid) -> bool {
        let mut all = self.commands.iter_mut();
        let found = all.find(|command| command.sq == sq && command.sqe.cid() == cid);
        let Some(command) = found.filter(|command| command.outcome.is_none()) else {
            return false;
        };
        if self.dice.one_in(3) {
            return false;
        }
        command.outcome = Some((Status::ABORT_REQUESTED, 0));
        command.due = self.now;
        true
    }

    /// Returns the number of requests for asynchronous events that wait.
    pub(super) fn event_requests(&self) -> usize {
        let waits =
            |command: &&Command| matches!(command.work, Some(Work::Waits)) && command.outcome.is_none();
        self.commands.iter().filter(waits).count()
    }

    /// Answers a request for asynchronous events, if there is one.
    pub(super) fn report_event(&mut self, result: u32) {
        let mut all = self.commands.iter_mut();
        let waits =
            |command: &&mut Command| matches!(command.work, Some(Work::Waits)) && command.outcome.is_none();
        if let Some(command) = all.find(waits) {
            command.outcome = Some((Status::SUCCESS, result.into()));
        }
    }

    /// Writes some of what a command was to write.
    fn tear(&mut self, command: &Command) {
        if command.sq != 0
            && let Some((block, bytes)) = self.to_write(&command.sqe, &command.bytes)
        {
            self.media.tear(block, &bytes);
        }
    }

    /// Forgets all commands: some of what they were to write may be written.
    pub(super) fn forget_commands(&mut self) {
        for command in std::mem::take(&mut self.commands) {
            if command.outcome.is_none() && matches!(command.work, Some(Work::FromHost)) {
                self.tear(&command);
            }
        }
    }

    /// Forgets the commands of a submission queue that is deleted.
    pub(super) fn forget_commands_of(&mut self, sq: u16) {
        self.commands.retain(|command| command.sq != sq);
    }
}
