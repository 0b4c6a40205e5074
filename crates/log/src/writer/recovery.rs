//! Takeover of replicas: reading what they hold, choosing the log, and deciding when a replica has a say.

use std::time::Duration;

use super::replica::{Copied, Op, Phase, Replica};
use super::{OUTRANKED_MAX, Over, RAISES_MAX, RESERVE, What, Writer, WriterEvent, WriterState, segment};
use crate::defect::defect;
use crate::format::{AREA_AT, AREA_MIN, Found, Header, Point, frame_len};
use crate::{Epoch, count_words};

impl Writer {
    pub(super) fn header_read(&mut self, at: usize, bytes: &[u8], now: Duration) {
        let found = Header::find(bytes);
        let header = match found {
            Found::Other => {
                let why = "the region holds other data or a damaged log: serve a new file or new memory";
                return self.unusable(at, why.into());
            }
            Found::Blank => None,
            Found::Log(header) => Some(header),
        };
        // A replica whose creation was not finished holds nothing: this writer can take it.
        let header = header.filter(|h| h.promise.term > 0 || self.log.is_none_or(|(log, _)| log == h.log));
        if let Some(h) = &header {
            if h.promise.term > 0 && !self.in_use {
                if self.log.is_some_and(|(log, _)| log != h.log) {
                    self.log = None;
                    self.replicas.iter_mut().for_each(|r| r.header = None);
                }
                self.in_use = true;
            }
            if let Err(why) = self.admit(at, h) {
                return self.unusable(at, why);
            }
            self.log.get_or_insert((h.log, h.area));
            self.term = self.term.max(h.promise.term);
            let chosen = self.state != WriterState::Opening;
            if chosen && h.promise > self.epoch && !defect!(PromiseIgnored) {
                return self.outranked(at, h.promise, now);
            }
        }
        let r = &mut self.replicas[at];
        r.header = header;
        r.outranked = 0;
        if r.header.is_none() {
            // The replica lost what it held.
            r.known = None;
        }
        let has_say = r.header.is_some_and(|h| !h.joining && h.promise.term > 0);
        r.may_join = !has_say && (r.may_join || !self.promised);
        if r.phase == Phase::Peeking && self.awaited == Some(at) {
            self.awaited = None;
        }
        match r.phase {
            Phase::Peeking if self.state == WriterState::Opening => r.phase = Phase::Peeked,
            Phase::Peeking => self.acquire(at),
            Phase::Settling => self.settle(at),
            _ => {}
        }
    }

    /// Checks that a replica can be part of this log.
    pub(super) fn admit(&self, at: usize, h: &Header) -> Result<(), String> {
        if usize::from(h.replicas) != self.replicas.len() {
            let (has, given) = (usize::from(h.replicas), self.replicas.len());
            return Err(format!("its log {}", count_words(has, given)));
        }
        if self.log.is_some_and(|log| log != (h.log, h.area)) {
            return Err("it holds a different log than the others".into());
        }
        if h.area > self.replicas[at].region_bytes - AREA_AT {
            return Err("the region is smaller than its log: it was truncated".into());
        }
        let same = |r: &Replica| r.header.is_some_and(|other| other.replica == h.replica);
        let twin = (0..self.replicas.len()).find(|other| *other != at && same(&self.replicas[*other]));
        match twin {
            Some(other) => Err(format!("it is the same region as replica {}", other + 1)),
            None => Ok(()),
        }
    }

    /// Handles the header of a replica that only this writer may write.
    pub(super) fn settle(&mut self, at: usize) {
        let (creating, epoch) = (
            self.state == WriterState::Recovering { creating: true },
            self.epoch,
        );
        let r = &mut self.replicas[at];
        match r.header {
            Some(h) if creating && h.promise.term > 0 => {
                // Another writer was faster.
                self.raise = true;
            }
            // The writer writes to no replica before it holds all: of two writers that create a log at once, one does.
            Some(_) | None if creating => r.phase = Phase::Held,
            Some(h) if h.joining && !defect!(JoiningHasSay) => {
                r.may_join |= h.promise == epoch;
                self.join(at);
            }
            Some(h) if h.promise == epoch && self.state == WriterState::Active && r.known.is_some() => {
                let known = r.known.unwrap_or_default();
                self.stream(at, Some(known));
            }
            Some(h) if h.promise == epoch => self.read_log(at),
            Some(h) => {
                self.promised = true;
                r.phase = Phase::Promising;
                let header = Header {
                    generation: h.generation + 1,
                    promise: epoch,
                    ..h
                };
                self.write_header(at, header);
            }
            None if defect!(BlankHasSay) && self.state != WriterState::Active => {
                let header = Header {
                    promise: epoch,
                    ..self.new_header(at)
                };
                self.replicas[at].phase = Phase::Promising;
                self.write_header(at, header);
            }
            None => self.join(at),
        }
    }

    pub(super) fn format(&mut self, at: usize) {
        let r = &mut self.replicas[at];
        if r.phase == Phase::Held {
            r.phase = Phase::Formatting;
            let generation = r.header.map_or(0, |h| h.generation) + 1;
            let header = Header {
                generation,
                promise: Epoch::default(),
                ..self.new_header(at)
            };
            self.write_header(at, header);
        }
    }

    pub(super) fn new_header(&self, at: usize) -> Header {
        let (log, area) = self.log.unwrap_or_default();
        Header {
            replicas: self.replicas.len() as u16,
            joining: false,
            log,
            replica: self.settings.replica_ids[at],
            generation: 1,
            promise: self.epoch,
            area,
            head: if self.state == WriterState::Active {
                self.head
            } else {
                Point::origin(log)
            },
            acknowledged: 0,
        }
    }

    /// Fills a replica that holds nothing, or not enough. It has no say until it has what was acknowledged before.
    ///
    /// Its promise is lost too: another writer may rely on this replica, and on no more than a minority besides. So a majority
    /// must be promised again after the replica was seen like this, which fences that writer.
    pub(super) fn join(&mut self, at: usize) {
        let joins = self.replicas[at].may_join || defect!(JoinsAnyTime);
        if self.state != WriterState::Active || !joins {
            self.replicas[at].phase = Phase::Waiting;
            if !joins {
                self.raise = true;
                self.awaited = Some(at);
            }
            return self.tell(at, "waiting: it lost its contents");
        }
        let tail = self.tail.position;
        let r = &mut self.replicas[at];
        r.joining = Some(tail);
        r.known = None;
        self.stream(at, None);
    }

    pub(super) fn write_header(&mut self, at: usize, header: Header) {
        let offset = if defect!(OneSlot) { 0 } else { header.offset() };
        self.replicas[at].header_busy = true;
        self.post(
            at,
            Op::Other,
            What::Write {
                offset,
                bytes: header.emit(),
            },
        );
        let length = AREA_AT;
        if defect!(PromiseNotFlushed) {
            return self.post(at, Op::HeaderDurable(header), What::Read { offset: 0, length: 8 });
        }
        self.post(at, Op::HeaderDurable(header), What::Flush { offset: 0, length });
    }

    pub(super) fn header_durable(&mut self, at: usize, header: Header) {
        let r = &mut self.replicas[at];
        r.header = Some(header);
        r.header_busy = false;
        r.may_join &= header.joining;
        match r.phase {
            Phase::Formatting => {
                r.phase = Phase::Formatted;
                r.asked = 0;
            }
            Phase::Promising => self.read_log(at),
            Phase::Streaming => {
                r.streams_from(header.head.position);
                if r.joining.is_some() && !header.joining {
                    r.joining = None;
                    r.known = Some(r.durable);
                    self.acknowledge();
                }
                self.caught_up(at);
                self.pump(at);
            }
            _ => {}
        }
    }

    /// Reads a replica's log, frame by frame.
    pub(super) fn read_log(&mut self, at: usize) {
        let r = &mut self.replicas[at];
        let Some(header) = r.header else { return };
        r.phase = Phase::Reading;
        r.copied = Some(Copied::new(&header));
        self.read_more(at);
    }

    pub(super) fn read_more(&mut self, at: usize) {
        let r = &mut self.replicas[at];
        let Some(copied) = &mut r.copied else { return };
        match copied.scan() {
            Some((position, length)) => {
                let (offset, length) = segment(copied.area(), position, length);
                self.post(at, Op::Log(length), What::Read { offset, length });
            }
            None => r.phase = Phase::Read,
        }
    }

    pub(super) fn log_read(&mut self, at: usize, length: u64, bytes: &[u8], now: Duration) {
        // Bytes of another length would seem to end the log where it continues.
        if bytes.len() as u64 != length {
            let why = format!("{} bytes of its log arrived instead of {length}", bytes.len());
            return self.down(at, &why, now);
        }
        let r = &mut self.replicas[at];
        if let (Phase::Reading, Some(copied)) = (r.phase, &mut r.copied) {
            copied.add(bytes);
            self.read_more(at);
        }
    }

    /// Continues once enough replicas are ready.
    pub(super) fn advance(&mut self, now: Duration) {
        if self.raise && (self.state != WriterState::Active || self.acknowledged.0 == self.tail.position) {
            return self.raise_epoch(now);
        }
        match self.state {
            WriterState::Opening => self.open(),
            WriterState::Recovering { creating: true } => {
                let held = |r: &Replica| matches!(r.phase, Phase::Held | Phase::Formatted);
                if !self.replicas.iter().all(held) || self.confirm(held) < self.replicas.len() {
                    return;
                }
                if self.replicas.iter().all(|r| r.phase == Phase::Formatted) {
                    self.state = WriterState::Recovering { creating: false };
                    for at in 0..self.replicas.len() {
                        self.settle(at);
                    }
                    return;
                }
                for at in 0..self.replicas.len() {
                    self.format(at);
                }
            }
            WriterState::Recovering { creating: false } => self.choose(),
            WriterState::Active => {
                for at in 0..self.replicas.len() {
                    self.meet(at);
                }
            }
            WriterState::Over(_) => {}
        }
    }

    pub(super) fn majority(&self) -> usize {
        self.replicas.len() / 2 + 1
    }

    pub(super) fn open(&mut self) {
        if self.awaited.is_some() {
            return;
        }
        let peeked = |r: &&Replica| r.phase == Phase::Peeked;
        let seen = self.replicas.iter().filter(peeked).count();
        // Until the log is promised to a writer, its creation may be unfinished, and starts again.
        let in_use = self.in_use;
        let joined = |h: Header| !h.joining || defect!(JoiningHasSay);
        let has_say = |r: &&Replica| peeked(r) && in_use && r.header.is_some_and(joined);
        let voters = self.replicas.iter().filter(has_say).count();
        let all = seen == self.replicas.len();
        let needed = if defect!(MinorityRecovers) || defect!(BlankHasSay) {
            1
        } else {
            self.majority()
        };
        let mut creating = false;
        if voters < needed || seen < self.majority() && !defect!(MinorityRecovers) {
            let empty = |r: &Replica| r.header.is_none_or(|h| h.promise.term == 0);
            if !all || !self.replicas.iter().all(empty) {
                return;
            }
            if !self.settings.create {
                return self.end(Over::NoLog);
            }
            creating = true;
            let area = self
                .replicas
                .iter()
                .map(|r| (r.region_bytes - AREA_AT) & !7)
                .min();
            self.log
                .get_or_insert((self.settings.log, area.unwrap_or(AREA_MIN)));
        }
        self.epoch = Epoch {
            term: self.term + 1,
            writer: self.settings.writer,
        };
        self.state = WriterState::Recovering { creating };
        for at in 0..self.replicas.len() {
            if self.replicas[at].phase == Phase::Peeked {
                self.acquire(at);
            }
        }
    }

    pub(super) fn acquire(&mut self, at: usize) {
        self.replicas[at].phase = Phase::Acquiring;
        self.act(at, What::Acquire);
    }

    /// Asks the replicas that `which` selects, in one round, to confirm that this writer still holds them; returns how many
    /// did. Their earlier answers came at different times: a replica may have been lost since, with its promise, and another
    /// writer may rely on that.
    pub(super) fn confirm(&mut self, which: impl Fn(&Replica) -> bool) -> usize {
        if self.round == 0 || self.replicas.iter().any(|r| which(r) && r.asked < self.round) {
            self.round += 1;
            for at in 0..self.replicas.len() {
                if which(&self.replicas[at]) {
                    self.replicas[at].asked = self.round;
                    self.post(at, Op::Confirmed(self.round), What::Read { offset: 0, length: 8 });
                }
            }
        }
        self.replicas
            .iter()
            .filter(|r| which(r) && r.confirmed == self.round)
            .count()
    }

    /// Chooses the log that every later writer would have to choose, too.
    pub(super) fn choose(&mut self) {
        let read = |r: &Replica| r.phase == Phase::Read;
        let needed = if defect!(MinorityRecovers) {
            1
        } else {
            self.majority()
        };
        if self.replicas.iter().filter(|r| read(r)).count() < needed {
            return;
        }
        self.confirm(read);
        let read: Vec<usize> = (0..self.replicas.len())
            .filter(|at| read(&self.replicas[*at]))
            .filter(|at| self.replicas[*at].confirmed == self.round || defect!(NotConfirmed))
            .collect();
        if read.len() < needed {
            return;
        }
        let rank = |at: &&usize| {
            let end = self.replicas[**at]
                .copied
                .as_ref()
                .map_or_else(Point::default, |copied| copied.end);
            (end.epoch, end.position)
        };
        let best = if defect!(ShortestChosen) {
            read.iter().min_by_key(|at| rank(at).1)
        } else if defect!(LongestChosen) {
            read.iter().max_by_key(|at| rank(at).1)
        } else {
            read.iter().max_by_key(rank)
        };
        let Some(&best) = best else { return };
        let Some(copied) = self.replicas[best].copied.clone() else {
            return;
        };
        if self.own.is_some_and(|own| own != copied.end) && !defect!(FollowedUnnoticed) {
            return self.end(Over::Fenced(copied.end.epoch));
        }
        let area = self.area();
        self.head = copied.head;
        self.tail = copied.end;
        self.copy = copied.bytes().iter().copied().collect();
        let told = copied.frames.iter().map(|frame| frame.acknowledged).max();
        self.frames = copied.frames.into();
        self.acknowledged = (
            self.head.position,
            told.unwrap_or_default().max(self.head.sequence),
        );
        self.state = WriterState::Active;
        if let Some(below) = self.settings.trim {
            let last = self.tail.sequence;
            if below > last + 1 {
                return self.end(Over::Unusable(format!(
                    "cannot drop records below {below}: the last is {last}; {} drops all",
                    last + 1
                )));
            }
            self.drop_frames(|_, frame| frame.end.sequence < below);
        }
        if self.settings.drop_oldest && self.room() < RESERVE {
            let until = (self.tail.position + RESERVE.max(area / 8)).saturating_sub(area);
            self.drop_frames(|begin, _| begin < until);
        }
        if self.room() < frame_len(0) {
            return self.end(Over::Unusable(
                "the log is full: open it with records dropped".into(),
            ));
        }
        self.push(None);
        self.epoch_start = if defect!(OldEpochAcked) {
            0
        } else {
            self.tail.position
        };
        for at in 0..self.replicas.len() {
            self.meet(at);
        }
        if self.settings.trim.is_some() {
            self.mark();
        }
        self.acknowledge();
    }

    /// Sends what it lacks to a replica whose log was read, or that waited for the choice.
    pub(super) fn meet(&mut self, at: usize) {
        match self.replicas[at].phase {
            Phase::Read => {
                let Some(copied) = self.replicas[at].copied.take() else {
                    return;
                };
                let common = self.common(&copied);
                self.stream(at, common);
            }
            Phase::Waiting => self.settle(at),
            _ => {}
        }
    }

    /// Returns the last position up to which a replica's log equals this one.
    pub(super) fn common(&self, copied: &Copied) -> Option<u64> {
        let ours = |point: &Point| {
            if point.position == self.head.position {
                return point.chain == self.head.chain;
            }
            let found = self
                .frames
                .binary_search_by_key(&point.position, |frame| frame.end.position);
            found.is_ok_and(|found| self.frames[found].end.chain == point.chain)
        };
        let ends = copied.frames.iter().rev().map(|frame| &frame.end);
        ends.chain([&copied.head])
            .find(|point| ours(point))
            .map(|point| point.position)
    }

    /// Starts to keep a replica in step; the replica has everything up to `from`, if that is given.
    pub(super) fn stream(&mut self, at: usize, from: Option<u64>) {
        let head = self.head.position;
        let tail = self.tail.position;
        let r = &mut self.replicas[at];
        r.phase = Phase::Streaming;
        r.retry = Duration::ZERO;
        let from = if defect!(GapLeft) && r.joining.is_none() {
            Some(tail)
        } else {
            from
        };
        let from = from.filter(|from| *from >= head);
        r.sent = from.unwrap_or(head);
        r.durable = from.unwrap_or(0);
        if r.joining.is_none() {
            r.known = from;
        }
        // Without a common position, the replica's header must first say where the log begins.
        r.room_from = from.and(r.header.map(|h| h.head.position));
        let state = if r.joining.is_some() {
            "joining: receives all records"
        } else {
            "catching up"
        };
        self.tell(at, state);
        self.pump(at);
    }

    /// Reports a replica that has caught up, and gives it a say if it was joining.
    pub(super) fn caught_up(&mut self, at: usize) {
        let acknowledged = self.acknowledged.0;
        let r = &mut self.replicas[at];
        if r.joining.is_none() && self.ready && r.durable >= acknowledged {
            self.tell(at, "in step");
        }
        let r = &mut self.replicas[at];
        if r.joining.is_some_and(|target| r.durable >= target) && r.header.is_some_and(|h| h.joining) {
            r.header_wanted = true;
            self.pump(at);
        }
    }

    /// Advances the acknowledged position to what is durable on a majority.
    pub(super) fn acknowledge(&mut self) {
        if self.state != WriterState::Active {
            return;
        }
        let mut durable: Vec<u64> = (self.replicas.iter())
            .map(|r| {
                if defect!(AckBeforeFlush) && r.phase == Phase::Streaming {
                    r.sent
                } else {
                    r.counts()
                }
            })
            .collect();
        durable.sort_unstable_by(|a, b| b.cmp(a));
        let position = durable[self.majority() - 1 - usize::from(defect!(AckBeforeQuorum))];
        if position < self.epoch_start || position <= self.acknowledged.0 && self.ready {
            return;
        }
        let whole = self
            .frames
            .partition_point(|frame| frame.end.position <= position);
        let point = whole
            .checked_sub(1)
            .map_or(self.head, |last| self.frames[last].end);
        let before = self.acknowledged.1;
        self.acknowledged = (point.position, point.sequence);
        if !self.ready {
            self.ready = true;
            self.raises = 0;
            self.events.push_back(WriterEvent::Ready {
                first: self.head.sequence + 1,
                last: point.sequence,
            });
        } else if point.sequence > before {
            self.events.push_back(WriterEvent::Acknowledged {
                sequence: point.sequence,
            });
        }
    }

    /// Handles a replica that is promised to another writer.
    pub(super) fn outranked(&mut self, at: usize, by: Epoch, now: Duration) {
        if self.state != WriterState::Active {
            self.raises += 1;
            if self.raises > RAISES_MAX {
                return self.end(Over::Fenced(by));
            }
            self.down(at, "promised to another writer", now);
            self.raise = true;
            return;
        }
        let held = self
            .replicas
            .iter()
            .filter(|r| r.phase == Phase::Streaming)
            .count();
        if held < self.majority() {
            return self.end(Over::Fenced(by));
        }
        // While this writer holds a majority, the other writer has none: it is gone, or takes this writer's replicas at any
        // moment.
        let outranked = self.replicas[at].outranked + 1;
        self.down(at, "promised to another writer, which has no majority", now);
        self.replicas[at].outranked = outranked;
        self.raise |= outranked > OUTRANKED_MAX;
    }

    /// Restarts with an epoch above all epochs seen.
    pub(super) fn raise_epoch(&mut self, now: Duration) {
        let awaited = self.awaited;
        if self.state == WriterState::Active {
            self.own = Some(self.tail);
        }
        self.raise = false;
        self.promised = false;
        self.state = WriterState::Opening;
        self.log = None;
        self.in_use = false;
        self.ready = false;
        for at in 0..self.replicas.len() {
            let r = &mut self.replicas[at];
            r.known = None;
            r.joining = None;
            r.may_join = false;
            // Different delays keep two writers that collided from colliding again.
            let wait = Duration::from_millis(1 + self.settings.writer % 64) * self.raises;
            match r.phase {
                Phase::Unusable => {}
                _ => {
                    self.down(at, "reading it again", now);
                    self.replicas[at].phase = Phase::Down { until: now + wait };
                }
            }
        }
        self.awaited = awaited;
    }

    pub(super) fn end(&mut self, over: Over) {
        for at in 0..self.replicas.len() {
            if self.replicas[at].has_session() {
                self.act(at, What::Disconnect);
            }
            self.replicas[at].ops.clear();
        }
        self.ready = false;
        self.state = WriterState::Over(over.clone());
        self.events.push_back(WriterEvent::Over(over));
    }
}
