//! Operations of hosts: what is sent, and what their outcome has to agree with.

use rdmux_nvmf::host::queue::{Command, Completion, Data};
use rdmux_nvmf::host::{command, may_repeat};
use rdmux_wire::nvme::{
    Cid, Copy, CopyFormat, CopyRange, DatasetRange, NsId, Opcode, ReservationAction, ReservationCommand,
    ReservationKeys, ReservationType, Rw, Sqe, Status,
};

use super::MS;
use super::checker::{Place, WriteId};
use super::disk::{BLOCK, Value, fill, value};
use super::host::Phase;
use super::run::{BLOCKS, BLOCKS_MAX, COUNTERS, Event, NAMESPACES, Run};
use super::stream::LinkId;

/// Times that a command is sent again because its controller asks for that.
const TRIES_MAX: u8 = 5;

#[derive(Debug)]
pub(super) struct Operation {
    kind: Kind,
    nsid: u32,
    block: u64,
    blocks: u32,
    /// Writes of its blocks.
    pub(super) writes: Vec<WriteId>,
    /// Times of its first and its last sending, and the way of it.
    begin: u64,
    sent: u64,
    link: LinkId,
    /// It was sent more than once: an earlier time may have had an effect.
    is_repeated: bool,
    /// Writes that the disk had failed before.
    write_failures: u64,
}

#[derive(Clone, Debug)]
enum Kind {
    /// Reads; a counter is incremented then.
    Read {
        is_counter: bool,
    },
    Write {
        is_fua: bool,
    },
    /// Writes zeros, or deallocates.
    Zeroes {
        is_fua: bool,
    },
    /// Copies; the place of each block.
    Copy {
        sources: Vec<Place>,
        is_fua: bool,
    },
    Compare(Vec<Value>),
    Verify,
    Flush,
    /// Compare and Write, and the statuses of both.
    Pair {
        old: Vec<Value>,
        new: Vec<Value>,
        is_fua: bool,
        /// Its commands name different blocks.
        is_broken: bool,
        statuses: [Option<Status>; 2],
    },
    Reserve,
}

impl Operation {
    fn new(kind: Kind, nsid: u32, block: u64, blocks: u32) -> Operation {
        Operation {
            kind,
            nsid,
            block,
            blocks,
            writes: Vec::new(),
            begin: 0,
            sent: 0,
            link: 0,
            is_repeated: false,
            write_failures: 0,
        }
    }

    fn places(&self) -> impl Iterator<Item = Place> + use<> {
        let nsid = self.nsid;
        (self.block..self.block + u64::from(self.blocks)).map(move |block| (nsid, block))
    }

    /// Returns the places that it copies.
    fn sources(&self) -> impl Iterator<Item = Place> {
        let sources: &[Place] = match &self.kind {
            Kind::Copy { sources, .. } => sources,
            _ => &[],
        };
        sources.iter().copied()
    }

    /// Returns the namespaces that it reads or writes; some more than once.
    fn namespaces(&self) -> impl Iterator<Item = u32> {
        self.sources().map(|(nsid, _)| nsid).chain([self.nsid])
    }

    /// Returns whether it needs the right to write, or to read; `None` if neither.
    fn needs(&self) -> Option<bool> {
        match self.kind {
            Kind::Read { .. } | Kind::Compare(_) | Kind::Verify => Some(false),
            Kind::Write { .. }
            | Kind::Zeroes { .. }
            | Kind::Copy { .. }
            | Kind::Flush
            | Kind::Pair { .. } => Some(true),
            Kind::Reserve => None,
        }
    }
}

fn transfer(opcode: Opcode, operation: &Operation, is_fua: bool, data: Data, buffer: Vec<u8>) -> Command {
    let mut sqe = Sqe::new(opcode, Cid(0), NsId(operation.nsid));
    let rw = Rw {
        slba: operation.block,
        blocks: operation.blocks,
        fua: is_fua,
    };
    rw.emit(&mut sqe);
    Command {
        data,
        buffer,
        ..Command::new(sqe)
    }
}

/// Makes a command one of a fused pair.
fn fused(mut command: Command, position: u8) -> Command {
    let mut bytes = *command.sqe.as_bytes();
    bytes[1] |= position;
    command.sqe = Sqe::parse(&bytes).expect("it is as long as a command");
    command
}

fn bytes_of(values: &[Value]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * BLOCK];
    for (value, block) in values.iter().zip(bytes.chunks_exact_mut(BLOCK)) {
        fill(*value, block);
    }
    bytes
}

impl Run<'_> {
    pub(super) fn issue_later(&mut self, nr: usize) {
        let think = match self.dice.below(4) {
            0 | 1 => self.dice.below(self.pace),
            2 => self.dice.below(self.pace.min(20 * MS)),
            _ => self.dice.below(MS),
        };
        let generation = self.hosts[nr].generation;
        self.schedule(self.now + think, Event::Issue(nr, generation));
    }

    /// A host sends its next operations.
    pub(super) fn issue(&mut self, nr: usize) {
        if !self.has_turn(nr) {
            return;
        }
        self.take_repeats(nr);
        let budget = self.first_path(nr);
        for _ in 0..self.hosts[nr].depth {
            let host = &self.hosts[nr];
            let is_full = host.operations.len() >= host.depth;
            if host.phase != Phase::Ready || self.hosts[budget].left == 0 || is_full {
                return;
            }
            self.hosts[budget].left -= 1;
            self.issue_one(nr);
        }
    }

    fn issue_one(&mut self, nr: usize) {
        let nsid = self.dice.between(1, u64::from(NAMESPACES)) as u32;
        let (block, blocks) = self.range();
        let new = |kind| Operation::new(kind, nsid, block, blocks);
        let is_fua = self.dice.one_in(3);
        let drawn = match self.is_settled(nr) {
            true => self.dice.below(100),
            // Nothing but reads.
            false => 0,
        };
        match drawn {
            0..24 => self.read(nr, new(Kind::Read { is_counter: false })),
            24..44 => {
                let block = self.dice.below(COUNTERS);
                let kind = Kind::Read { is_counter: true };
                self.read(nr, Operation::new(kind, nsid, block, 1));
            }
            44..52 if self.with_copies => self.copy(nr, nsid),
            44..66 => {
                let values: Vec<_> = (0..blocks).map(|_| self.checker.value()).collect();
                let operation = new(Kind::Write { is_fua });
                let data = Data::Out(blocks * BLOCK as u32);
                let command = transfer(Opcode::WRITE, &operation, is_fua, data, bytes_of(&values));
                self.write(nr, operation, &values, vec![command]);
            }
            66..71 => {
                let blocks = blocks.min(16);
                let operation = Operation::new(Kind::Zeroes { is_fua }, nsid, block, blocks);
                let command = transfer(Opcode::WRITE_ZEROES, &operation, is_fua, Data::None, Vec::new());
                self.write(nr, operation, &vec![0; blocks as usize], vec![command]);
            }
            71..73 => {
                let operation = Operation::new(Kind::Zeroes { is_fua: false }, nsid, block, blocks);
                let mut sqe = Sqe::new(Opcode::DATASET_MANAGEMENT, Cid(0), NsId(nsid));
                sqe.set_dword(11, DatasetRange::DEALLOCATE);
                let mut range = vec![0; DatasetRange::LEN];
                range[4..8].copy_from_slice(&blocks.to_le_bytes());
                range[8..16].copy_from_slice(&block.to_le_bytes());
                let command = Command::sending(sqe, range);
                self.write(nr, operation, &vec![0; blocks as usize], vec![command]);
            }
            73..77 if self.dice.one_in(2) => {
                let blocks = blocks.min(8);
                let disk = &self.disks[&nsid];
                let old = (block..).take(blocks as usize).map(|block| disk.block(block));
                let old = old.collect();
                self.pair(nr, (nsid, block), old);
            }
            73..77 => {
                // The blocks as they are, or nearly.
                let disk = &self.disks[&nsid];
                let values: Vec<_> = (block..)
                    .take(blocks as usize)
                    .map(|block| disk.block(block))
                    .collect();
                let operation = new(Kind::Compare(values.clone()));
                let data = Data::Out(blocks * BLOCK as u32);
                let command = transfer(Opcode::COMPARE, &operation, false, data, bytes_of(&values));
                self.submit(nr, operation, vec![command]);
            }
            77..79 => {
                let operation = new(Kind::Verify);
                let command = transfer(Opcode::VERIFY, &operation, false, Data::None, Vec::new());
                self.submit(nr, operation, vec![command]);
            }
            79..89 => {
                let operation = Operation::new(Kind::Flush, nsid, 0, 0);
                self.submit(nr, operation, vec![command::flush(NsId(nsid))]);
            }
            89..99 if !self.hosts[nr].reserves && self.with_reservations => self.reserve(nr, nsid),
            _ => {
                self.abort(nr);
                self.issue_later(nr);
            }
        }
    }

    /// Returns a range of blocks that are no counters.
    fn range(&mut self) -> (u64, u32) {
        let blocks = match self.dice.below(12) {
            0 => self.dice.between(9, BLOCKS - COUNTERS),
            1..4 => self.dice.between(2, 8),
            _ => 1,
        };
        // Few places, so that hosts meet; now and then one that may be behind the end.
        let last = match self.dice.below(20) {
            0 => BLOCKS_MAX - blocks,
            _ => (BLOCKS - blocks).min(COUNTERS + 7),
        };
        (self.dice.between(COUNTERS, last.max(COUNTERS)), blocks as u32)
    }

    fn read(&mut self, nr: usize, operation: Operation) {
        let bytes = operation.blocks * BLOCK as u32;
        let (block, blocks) = (operation.block, operation.blocks);
        let buffer = vec![0xee; bytes as usize];
        let command = command::read(NsId(operation.nsid), block, blocks, bytes, buffer);
        self.submit(nr, operation, vec![command]);
    }

    fn write(&mut self, nr: usize, mut operation: Operation, values: &[Value], commands: Vec<Command>) {
        let begin = self.ticks.next();
        let (places, host) = (operation.places().zip(values), self.host_of(nr));
        operation.writes = places
            .map(|(place, value)| self.checker.begin(host, place, *value, begin))
            .collect();
        self.submit(nr, operation, commands);
    }

    /// Copies ranges of blocks, now and then of several namespaces.
    fn copy(&mut self, nr: usize, nsid: u32) {
        let of_any = self.dice.one_in(2);
        let (mut list, mut sources) = (Vec::new(), Vec::new());
        for _ in 0..self.dice.between(1, 3) {
            let (block, blocks) = self.range();
            let blocks = blocks.min(6);
            let of = match of_any {
                true => self.dice.between(1, u64::from(NAMESPACES)) as u32,
                false => nsid,
            };
            let range = CopyRange {
                nsid: NsId(of),
                slba: block,
                blocks,
                fast_only: false,
            };
            let mut bytes = [0; CopyRange::LEN];
            range.emit(&mut bytes);
            list.extend(bytes);
            sources.extend((block..).take(blocks as usize).map(|block| (of, block)));
        }
        let ranges = (list.len() / CopyRange::LEN) as u16;
        let blocks = sources.len() as u32;
        let block = self.dice.between(COUNTERS, BLOCKS - u64::from(blocks));
        let to = block..block + u64::from(blocks);
        if sources
            .iter()
            .any(|(of, block)| *of == nsid && to.contains(block))
        {
            return self.issue_later(nr);
        }
        let is_fua = self.dice.one_in(3);
        let copy = Copy {
            slba: block,
            ranges,
            format: if of_any { CopyFormat::Any } else { CopyFormat::Same } as u8,
            fua: is_fua,
        };
        let mut sqe = Sqe::new(Opcode::COPY, Cid(0), NsId(nsid));
        copy.emit(&mut sqe);
        let begin = self.ticks.next();
        let kind = Kind::Copy {
            sources: sources.clone(),
            is_fua,
        };
        let mut operation = Operation::new(kind, nsid, block, blocks);
        let (places, host) = (operation.places().zip(sources), self.host_of(nr));
        operation.writes = places
            .map(|(place, source)| self.checker.begin_copy(host, place, source, begin))
            .collect();
        self.submit(nr, operation, vec![Command::sending(sqe, list)]);
    }

    /// Replaces values by new ones.
    fn pair(&mut self, nr: usize, (nsid, block): Place, old: Vec<Value>) {
        let new: Vec<Value> = old.iter().map(|_| self.checker.value()).collect();
        for (old, new) in old.iter().zip(&new) {
            self.checker.pair_begins(*old, *new);
        }
        let is_fua = self.dice.one_in(3);
        let is_broken = self.dice.one_in(12);
        let (compared, written) = (bytes_of(&old), bytes_of(&new));
        let kind = Kind::Pair {
            old,
            new: new.clone(),
            is_fua,
            is_broken,
            statuses: [None; 2],
        };
        let operation = Operation::new(kind, nsid, block, new.len() as u32);
        let second = Operation::new(Kind::Verify, nsid, block + u64::from(is_broken), new.len() as u32);
        let data = Data::Out(written.len() as u32);
        let compare = transfer(Opcode::COMPARE, &operation, false, data, compared);
        let write = transfer(Opcode::WRITE, &second, is_fua, data, written);
        self.write(nr, operation, &new, vec![fused(compare, 1), fused(write, 2)]);
    }

    fn reserve(&mut self, nr: usize, nsid: u32) {
        let model = self.disks[&nsid].reservations();
        let kind = match model.kind().filter(|_| !self.dice.one_in(4)) {
            Some(kind) => kind,
            None => self.dice.pick(&ReservationType::ALL),
        };
        let fresh = self.dice.between(1, 6);
        let other = model.other_key(nr).unwrap_or(fresh);
        let own = model.key(nr).filter(|_| !self.dice.one_in(12));
        let aborts = self.dice.one_in(2);
        let action = match self.dice.below(if own.is_some() { 16 } else { 4 }) {
            0..3 => ReservationAction::Register,
            3 => ReservationAction::Preempt { kind, aborts },
            4 => ReservationAction::Unregister,
            5 => ReservationAction::Replace,
            6..10 => ReservationAction::Acquire(kind),
            10..12 => ReservationAction::Preempt { kind, aborts },
            12..15 => ReservationAction::Release(kind),
            _ => ReservationAction::Clear,
        };
        let other = match action {
            ReservationAction::Preempt { .. } if self.dice.one_in(4) => 0,
            ReservationAction::Preempt { .. } => other,
            _ => fresh,
        };
        let is_register = matches!(
            action,
            ReservationAction::Register | ReservationAction::Unregister | ReservationAction::Replace
        );
        let command = ReservationCommand {
            action,
            ignores_key: is_register && self.dice.one_in(4),
            persists: match self.dice.below(4) {
                0 if is_register => Some(false),
                1 if is_register => Some(true),
                _ => None,
            },
        };
        let (opcode, bytes) = match action {
            ReservationAction::Acquire(_) | ReservationAction::Preempt { .. } => {
                (Opcode::RESERVATION_ACQUIRE, ReservationKeys::LEN)
            }
            ReservationAction::Release(_) | ReservationAction::Clear => {
                (Opcode::RESERVATION_RELEASE, ReservationKeys::RELEASE_LEN)
            }
            _ => (Opcode::RESERVATION_REGISTER, ReservationKeys::LEN),
        };
        let mut keys = ReservationKeys {
            current: own.unwrap_or(fresh),
            other,
        };
        let mut sqe = Sqe::new(opcode, Cid(0), NsId(nsid));
        sqe.set_dword(10, command.dword());
        let data = keys.emit()[..bytes].to_vec();
        keys = ReservationKeys::parse(&data);
        if self.has_faults && self.dice.one_in(12) {
            self.store.fail_next();
        }
        self.hosts[nr].reserves = true;
        let operation = Operation::new(Kind::Reserve, nsid, 0, 0);
        if let Some(link) = self.submit(nr, operation, vec![Command::sending(sqe, data)]) {
            self.executed.remove(&link);
            self.reserving.insert(link, keys);
        }
    }

    /// Sends the commands of an operation. Returns the connection, if there is room on one.
    fn submit(&mut self, nr: usize, mut operation: Operation, commands: Vec<Command>) -> Option<LinkId> {
        let now = self.ticks.next();
        let deadline = Some(self.instant() + super::run::IO_TIMEOUT);
        let queue = self.dice.below(self.hosts[nr].queues.len() as u64) as usize;
        let queue = &mut self.hosts[nr].queues[queue];
        let id = queue.id;
        if queue.connection.room() < commands.len() {
            for write in &operation.writes {
                self.checker.close(*write, now);
            }
            self.hosts[nr].reserves &= !matches!(operation.kind, Kind::Reserve);
            self.issue_later(nr);
            return None;
        }
        self.last_operation += 1;
        for (half, mut command) in commands.into_iter().enumerate() {
            command.token = self.last_operation << 1 | half as u64;
            queue.connection.submit(command, deadline);
        }
        (operation.begin, operation.sent, operation.link) = (now, now, id);
        (_, operation.write_failures) = self.disks[&operation.nsid].failures();
        self.hosts[nr].operations.insert(self.last_operation, operation);
        self.send_from_host(id);
        Some(id)
    }

    /// Sends a command again.
    pub(super) fn submit_again(&mut self, nr: usize, mut command: Command) {
        let now = self.ticks.next();
        let deadline = Some(self.instant() + super::run::IO_TIMEOUT);
        let host = &mut self.hosts[nr];
        let Some(operation) = host.operations.get_mut(&(command.token >> 1)) else {
            return;
        };
        let mut queues = host.queues.iter_mut();
        let Some(queue) = queues.find(|queue| queue.connection.room() > 0) else {
            return self.violate(format!("host {nr} has no room for a command that it had before"));
        };
        for write in &operation.writes {
            self.checker.reopen(*write);
        }
        command.tries += 1;
        (operation.sent, operation.link, operation.is_repeated) = (now, queue.id, true);
        let id = queue.id;
        queue.connection.submit(command, deadline);
        self.send_from_host(id);
    }

    /// Returns true if an operation only reads.
    pub(super) fn only_reads(&self, nr: usize, command: &Command) -> bool {
        let operation = self.hosts[nr].operations.get(&(command.token >> 1));
        operation.is_some_and(|operation| operation.needs() == Some(false))
    }

    /// The controller of a command is lost. Returns the command if it is to be sent again.
    pub(super) fn operation_lost(&mut self, nr: usize, command: Command) -> Option<Command> {
        let number = command.token >> 1;
        let operation = self.hosts[nr].operations.get(&number)?;
        if !matches!(operation.kind, Kind::Pair { .. } | Kind::Reserve) {
            return Some(command);
        }
        self.give_up(nr, &command);
        None
    }

    /// A host gives a command up, of which it does not know what has become of it.
    pub(super) fn give_up(&mut self, nr: usize, command: &Command) {
        if let Some(operation) = self.hosts[nr].operations.remove(&(command.token >> 1)) {
            self.leave_open(nr, &operation.writes);
            self.hosts[nr].reserves &= !matches!(operation.kind, Kind::Reserve);
            self.counts.operations += 1;
        }
    }

    /// A command of an operation is done.
    pub(super) fn operation_done(&mut self, nr: usize, link: LinkId, completion: Completion) {
        let end = self.ticks.next();
        let number = completion.command.token >> 1;
        let Some(operation) = self.hosts[nr].operations.get_mut(&number) else {
            return;
        };
        let status = completion.status;
        self.paces[nr].done_at = self.now;
        let sent = operation.sent;
        self.goes_on(nr, sent);
        let moves = completion.command.tries < TRIES_MAX && self.changes_path(nr, status);
        let Some(operation) = self.hosts[nr].operations.get_mut(&number) else {
            return;
        };
        if let Kind::Pair { statuses, .. } = &mut operation.kind {
            statuses[(completion.command.token & 1) as usize] = Some(status);
            if statuses.contains(&None) {
                return;
            }
        } else if moves && !matches!(operation.kind, Kind::Reserve) {
            return self.move_to_other(nr, completion.command);
        } else if !matches!(operation.kind, Kind::Reserve)
            && may_repeat(status)
            && completion.command.tries < TRIES_MAX
            && self.hosts[nr].phase == Phase::Ready
            && self.hosts[nr]
                .queues
                .iter()
                .any(|queue| queue.connection.room() > 0)
        {
            return self.submit_again(nr, completion.command);
        }
        let Some(operation) = self.hosts[nr].operations.remove(&number) else {
            return;
        };
        self.counts.operations += 1;
        let outcome = match operation.kind {
            Kind::Pair { .. } => self.pair_done(nr, &operation, end),
            Kind::Reserve => self.reserve_done(nr, link, status),
            _ => self.plain_done(nr, &operation, &completion, end),
        };
        if let Err(why) = outcome {
            self.violate(format!("host {nr}: {why} ({operation:?}, {status})"));
        }
        self.issue_later(nr);
    }

    /// Checks that a status other than success has its cause.
    fn check_status(
        &mut self,
        nr: usize,
        operation: &Operation,
        status: Status,
        end: u64,
    ) -> Result<(), String> {
        let disk = &self.disks[&operation.nsid];
        let is_right = match status {
            _ if status.is(Status::RESERVATION_CONFLICT) => {
                self.counts.conflicts += 1;
                let needs = operation.needs();
                needs.is_some_and(|writes| {
                    disk.kept_out(nr, writes, operation.begin, end)
                        // Compare of a pair reads.
                        || matches!(operation.kind, Kind::Pair { .. }) && disk.kept_out(nr, false, operation.begin, end)
                        || operation.sources().any(|(nsid, _)| {
                            self.disks[&nsid].kept_out(nr, false, operation.begin, end)
                        })
                })
            }
            _ if [
                Status::ANA_INACCESSIBLE,
                Status::ANA_TRANSITION,
                Status::ANA_PERSISTENT_LOSS,
            ]
            .iter()
            .any(|of_ana| status.is(*of_ana)) =>
            {
                self.counts.inaccessible += 1;
                let local = self.links[&operation.link].local;
                !self.was_accessible(local, operation.sent, end).1
            }
            _ if status.is(Status::INVALID_NAMESPACE) => {
                self.counts.removed += 1;
                let mut all = operation.namespaces();
                all.any(|nsid| !self.was_there(nsid, operation.sent, end).1)
            }
            _ if status.is(Status::LBA_OUT_OF_RANGE) => {
                // The second command of a broken pair names the next block too.
                let is_broken = matches!(operation.kind, Kind::Pair { is_broken: true, .. });
                operation.block + u64::from(operation.blocks) + u64::from(is_broken) > BLOCKS
                    || operation.sources().any(|(_, block)| block >= BLOCKS)
            }
            _ if status.is(Status::WRITE_FAULT) => {
                let (flushes, writes) = disk.failures();
                let writes_or_flushes = operation.needs() == Some(true);
                writes_or_flushes && flushes + writes > 0
            }
            // A controller that is reset forgets that its host takes copies across namespaces.
            _ if status.is(Status::INVALID_FIELD) => {
                let admin = self.links[&operation.link].admin;
                matches!(operation.kind, Kind::Copy { .. }) && self.reset_links.contains(&admin)
            }
            _ => may_repeat(status) || status.is(Status::COMPARE_FAILURE),
        };
        match is_right {
            true => Ok(()),
            false => Err(format!("{status} has no cause")),
        }
    }

    /// Checks a success, which its namespace was there for.
    fn check_success(&self, operation: &Operation, is_durable: bool, end: u64) -> Result<(), String> {
        let local = self.links[&operation.link].local;
        if !self.was_accessible(local, operation.sent, end).0 {
            return Err("it was carried out although the namespace was not accessible".to_owned());
        }
        let mut all = operation.namespaces();
        if all.any(|nsid| !self.was_there(nsid, operation.sent, end).0) {
            return Err("it was carried out although the namespace was gone".to_owned());
        }
        let (failed, _) = self.disks[&operation.nsid].failed_at();
        let is_of_now =
            self.server.as_ref().map(|server| server.life) == Some(self.links[&operation.link].life);
        if is_durable && is_of_now && failed.is_some_and(|failed| failed < operation.sent) {
            return Err("it succeeded although a flush had failed before".to_owned());
        }
        Ok(())
    }

    fn plain_done(
        &mut self,
        nr: usize,
        operation: &Operation,
        completion: &Completion,
        end: u64,
    ) -> Result<(), String> {
        let status = completion.status;
        let has_cache = self.disks[&operation.nsid].shape.has_cache;
        if !status.is_success() {
            let differs = matches!(operation.kind, Kind::Compare(_)) && status.is(Status::COMPARE_FAILURE);
            if !differs {
                return self.failed(nr, operation, status, end);
            }
        }
        match &operation.kind {
            Kind::Read { is_counter } => {
                self.check_success(operation, false, end)?;
                for (place, bytes) in operation.places().zip(completion.bytes().chunks_exact(BLOCK)) {
                    let value = value(bytes).ok_or("a block that was read is garbled")?;
                    self.checker.read(place, value, operation.begin, end)?;
                    if *is_counter && self.hosts[nr].phase == Phase::Ready && self.is_settled(nr) {
                        self.pair(nr, place, vec![value]);
                    }
                }
            }
            Kind::Write { is_fua } | Kind::Zeroes { is_fua } | Kind::Copy { is_fua, .. } => {
                self.counts.copies += u64::from(matches!(operation.kind, Kind::Copy { .. }));
                let is_durable = *is_fua || !has_cache;
                self.check_success(operation, is_durable, end)?;
                for write in &operation.writes {
                    self.checker.done(*write, is_durable, operation.sent, end);
                }
            }
            Kind::Compare(values) => {
                let all = operation.places().zip(values.clone());
                if status.is_success() {
                    self.check_success(operation, false, end)?;
                    for (place, value) in all {
                        self.checker.read(place, value, operation.begin, end)?;
                    }
                } else {
                    let mut all = all;
                    let begin = operation.begin;
                    if !all.any(|(place, value)| self.checker.may_differ(place, value, begin, end)) {
                        return Err("Compare failed, although the blocks were as given".to_owned());
                    }
                }
            }
            Kind::Flush => {
                self.check_success(operation, has_cache, end)?;
                self.counts.flushes += 1;
                self.flushed(operation.nsid, operation.sent);
            }
            Kind::Verify => self.check_success(operation, false, end)?,
            Kind::Pair { .. } | Kind::Reserve => {}
        }
        Ok(())
    }

    /// An operation has failed.
    fn failed(&mut self, nr: usize, operation: &Operation, status: Status, end: u64) -> Result<(), String> {
        // One that was sent before may have had an effect then, and one that has failed at the medium, where it is tried again.
        let (_, write_failures) = self.disks[&operation.nsid].failures();
        let has_failed = write_failures > operation.write_failures || status.is(Status::WRITE_FAULT);
        let is_refused = !operation.is_repeated && !has_failed;
        for write in &operation.writes {
            if !is_refused {
                self.checker.close(*write, end);
            } else if let Some(why) = self.checker.refused(*write, end) {
                return Err(why);
            }
        }
        self.check_status(nr, operation, status, end)
    }

    fn pair_done(&mut self, nr: usize, operation: &Operation, end: u64) -> Result<(), String> {
        let Kind::Pair {
            old,
            new,
            is_fua,
            is_broken,
            statuses: [Some(first), Some(second)],
        } = &operation.kind
        else {
            return Ok(());
        };
        let (first, second) = (*first, *second);
        if *is_broken && (first.is_success() || second.is_success()) {
            return Err("a pair of different blocks was carried out".to_owned());
        }
        if first.is_success() && second.is_success() {
            let is_durable = *is_fua || !self.disks[&operation.nsid].shape.has_cache;
            self.check_success(operation, is_durable, end)?;
            self.counts.pairs += 1;
            let values = old.iter().zip(new).zip(&operation.writes);
            for (place, ((old, new), write)) in operation.places().zip(values) {
                self.checker.read(place, *old, operation.begin, end)?;
                self.checker.done(*write, is_durable, operation.sent, end);
                // Other blocks are also written by what is no pair, and may be sent again.
                if place.1 < COUNTERS {
                    self.checker.pair_done(nr, (place, *old), *new, *write)?;
                }
            }
            return Ok(());
        }
        for write in &operation.writes {
            match first.is_success() {
                true => self.checker.close(*write, end),
                false => self.checker.refused(*write, end).map_or(Ok(()), Err)?,
            }
        }
        if first.is_success() {
            return self.check_status(nr, operation, second, end);
        }
        if first.is(Status::COMPARE_FAILURE) {
            self.counts.pairs_failed += 1;
            let mut values = operation.places().zip(old);
            let begin = operation.begin;
            return match values.any(|(place, old)| self.checker.may_differ(place, *old, begin, end)) {
                true => Ok(()),
                false => Err("Compare of a pair failed, although the blocks were as given".to_owned()),
            };
        }
        // The first of a pair whose second was refused has failed for that.
        let cause = if first.is(Status::FAILED_FUSED) {
            second
        } else {
            first
        };
        match cause.is(Status::MISSING_FUSED) || (*is_broken && cause.is(Status::INVALID_FIELD)) {
            true => Ok(()),
            false => self.check_status(nr, operation, cause, end),
        }
    }

    fn reserve_done(&mut self, nr: usize, link: LinkId, status: Status) -> Result<(), String> {
        self.hosts[nr].reserves = false;
        match self.executed.remove(&link) {
            Some(executed) if executed.is(status) => Ok(()),
            Some(executed) => Err(format!("it gave {executed}")),
            None if status.is_success() => Err("it was never carried out".to_owned()),
            None => Ok(()),
        }
    }

    /// A flush that began at a time is acknowledged.
    fn flushed(&mut self, nsid: u32, begin: u64) {
        let (_, failed_last) = self.disks[&nsid].failed_at();
        self.checker.flushed(nsid, begin, failed_last);
    }

    /// A controller has flushed all namespaces.
    pub(super) fn flushed_all(&mut self, begin: u64) {
        let now = self.ticks.next();
        for nsid in 1..=NAMESPACES {
            if self.was_there(nsid, begin, now).1 {
                self.flushed(nsid, begin);
            }
        }
    }
}
