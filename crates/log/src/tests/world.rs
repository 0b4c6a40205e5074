//! Virtual time, servers, links and writers, and the history of what was acknowledged.

use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use crate::format::{AREA_AT, Found, Frame, Header, Scan};
use crate::{Action, AppendError, Epoch, Over, Settings, What, Writer, WriterEvent};

type Failure = String;

/// Counts of events in simulations, so that a test that tests nothing is noticed.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    acknowledged: u64,
    recoveries: u64,
    fenced: u64,
    power_cuts: u64,
    units_lost: u64,
    wiped: u64,
    stalls: u64,
    partitions: u64,
    wraps: u64,
    dropped: u64,
}

impl Seen {
    pub(super) fn add(&mut self, other: &Seen) {
        self.acknowledged += other.acknowledged;
        self.recoveries += other.recoveries;
        self.fenced += other.fenced;
        self.power_cuts += other.power_cuts;
        self.units_lost += other.units_lost;
        self.wiped += other.wiped;
        self.stalls += other.stalls;
        self.partitions += other.partitions;
        self.wraps += other.wraps;
        self.dropped += other.dropped;
    }

    pub(super) fn assert_all_seen(&self) {
        let all = [
            self.acknowledged,
            self.recoveries,
            self.fenced,
            self.power_cuts,
            self.units_lost,
            self.wiped,
            self.stalls,
            self.partitions,
            self.wraps,
            self.dropped,
        ];
        assert!(
            all.iter().all(|count| *count > 0),
            "something never happened: {self:?}"
        );
    }
}

/// A server's region. Visible and durable contents differ, in units of 8 bytes, until a flush.
struct Server {
    visible: Vec<u8>,
    durable: Vec<u8>,
    /// All values written to a unit since it was last durable.
    pending: BTreeMap<usize, Vec<[u8; 8]>>,
    up: bool,
    /// The server answers nothing before this time.
    stalled_until: u64,
    /// Sessions that the server knows: writer, and the writer's session number.
    sessions: Vec<(usize, u64)>,
    /// The session that may write.
    holder: Option<(usize, u64)>,
}

impl Server {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.visible[offset..offset + bytes.len()].copy_from_slice(bytes);
        for unit in offset / 8..(offset + bytes.len()).div_ceil(8) {
            let now: [u8; 8] = self.visible[unit * 8..unit * 8 + 8].try_into().unwrap();
            self.pending.entry(unit).or_default().push(now);
        }
    }

    fn flush(&mut self, offset: usize, length: usize) {
        let units: Vec<usize> = self
            .pending
            .range(offset / 8..(offset + length).div_ceil(8))
            .map(|(unit, _)| *unit)
            .collect();
        for unit in units {
            self.pending.remove(&unit);
            self.durable[unit * 8..unit * 8 + 8].copy_from_slice(&self.visible[unit * 8..unit * 8 + 8]);
        }
    }

    /// Cuts the power: any version of each unit may survive. Returns the number of units that lost their last version.
    fn cut_power(&mut self, dice: &mut ChaCha8Rng) -> u64 {
        let mut lost = 0;
        // Chooses the two extremes often: a cache that wrote everything back, or nothing.
        let bias = dice.next_u64() % 4;
        for (unit, versions) in std::mem::take(&mut self.pending) {
            let survives = match bias {
                0 => 0,
                1 => versions.len(),
                _ => dice.next_u64() as usize % (versions.len() + 1),
            };
            lost += u64::from(survives < versions.len());
            if survives > 0 {
                self.durable[unit * 8..unit * 8 + 8].copy_from_slice(&versions[survives - 1]);
            }
        }
        self.visible.clone_from(&self.durable);
        lost
    }

    fn header(&self) -> Found {
        Header::find(&self.visible[..AREA_AT as usize])
    }

    /// Returns whether the replica has what was acknowledged before it joined, and keeps that over a loss of power. A log that
    /// is promised to nobody may come from an unfinished creation.
    fn has_say(&self) -> bool {
        let found = Header::find(&self.durable[..AREA_AT as usize]);
        matches!(found, Found::Log(header) if !header.joining && header.promise.term > 0)
    }

    /// Returns the frames of the log on the server.
    fn frames(&self) -> Vec<(Frame, Vec<u8>)> {
        let Found::Log(header) = self.header() else {
            return Vec::new();
        };
        let area = header.area as usize;
        let ring = &self.visible[AREA_AT as usize..AREA_AT as usize + area];
        let at = header.head.position as usize % area;
        let bytes: Vec<u8> = ring[at..].iter().chain(&ring[..at]).copied().collect();
        let (mut after, mut frames) = (header.head, Vec::new());
        loop {
            let at = (after.position - header.head.position) as usize;
            match Frame::scan(&after, &bytes[at..], (area - at) as u64) {
                Scan::Frame(frame) => {
                    after = frame.end;
                    let payload = bytes[at + 48..at + 48 + frame.length as usize].to_vec();
                    frames.push((frame, payload));
                }
                _ => return frames,
            }
        }
    }
}

/// A writer and its user's knowledge.
struct User {
    writer: Writer,
    alive: bool,
    /// The user does nothing before this time.
    paused_until: u64,
    appended: HashMap<u64, Vec<u8>>,
    acknowledged: u64,
    was_ready: bool,
    /// Number of records acknowledged to this user.
    own: u64,
    full: bool,
    /// Actions in flight to each server, in order, and the arrival time of the last; then the same for the answers.
    sent: Vec<VecDeque<Action>>,
    sent_until: Vec<u64>,
    back: Vec<VecDeque<Answer>>,
    back_until: Vec<u64>,
    /// Set for each server that the user cannot reach.
    cut: Vec<bool>,
}

/// A server's answer.
#[derive(Debug)]
enum Answer {
    Done(Action, Option<Vec<u8>>),
    Lost(u64),
}

#[derive(Debug, PartialEq, Eq)]
enum Happening {
    /// The oldest action on the way from a writer reaches the server.
    Arrives(usize, usize),
    /// The oldest answer on the way back reaches the writer.
    Answers(usize, usize),
    /// The writer's timer expires.
    Timer(usize),
    /// A user appends.
    Appends(usize),
    /// A random fault begins.
    Fault,
    Restart(usize),
    Heal(usize, usize),
}

#[derive(Debug, PartialEq, Eq)]
struct Scheduled(u64, u64, Happening);

impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> std::cmp::Ordering {
        (other.0, other.1).cmp(&(self.0, self.1))
    }
}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

pub(super) struct World {
    dice: ChaCha8Rng,
    now: u64,
    tie: u64,
    queue: BinaryHeap<Scheduled>,
    servers: Vec<Server>,
    users: Vec<User>,
    /// Acknowledged records by sequence number, each with the first epoch in which it was acknowledged; a record never changes.
    history: BTreeMap<u64, (Epoch, Vec<u8>)>,
    /// The last record that a writer dropped.
    dropped: u64,
    drop_oldest: bool,
    faults: bool,
    payloads: u64,
    tracing: bool,
    seen: Seen,
}

/// In microseconds.
const MS: u64 = 1_000;
const SECOND: u64 = 1_000 * MS;

impl World {
    pub(super) fn new(seed: u64) -> World {
        let mut dice = ChaCha8Rng::seed_from_u64(seed);
        let servers = [3, 3, 3, 1, 2, 5][dice.next_u64() as usize % 6];
        let bytes = AREA_AT as usize + [4096, 6000, 16384][dice.next_u64() as usize % 3];
        let drop_oldest = !dice.next_u64().is_multiple_of(4);
        let server = || Server {
            visible: vec![0; bytes],
            durable: vec![0; bytes],
            pending: BTreeMap::new(),
            up: true,
            stalled_until: 0,
            sessions: Vec::new(),
            holder: None,
        };
        World {
            dice,
            now: 0,
            tie: 0,
            queue: BinaryHeap::new(),
            servers: (0..servers).map(|_| server()).collect(),
            users: Vec::new(),
            history: BTreeMap::new(),
            dropped: 0,
            drop_oldest,
            faults: true,
            payloads: 0,
            tracing: std::env::var_os("RDMUX_LOG_TRACE").is_some(),
            seen: Seen::default(),
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.dice.next_u64() % n
    }

    /// Returns a number below `often`, and one time in `n` a number below `seldom`.
    fn mostly(&mut self, often: u64, n: u64, seldom: u64) -> u64 {
        let below = if self.below(n) == 0 { seldom } else { often };
        self.below(below)
    }

    fn at(&mut self, time: u64, happening: Happening) {
        self.tie += 1;
        self.queue
            .push(Scheduled(time.max(self.now), self.tie, happening));
    }

    /// Runs until faults end, heals everything, and checks that all acknowledged records are there.
    pub(super) fn run(mut self) -> Result<Seen, Failure> {
        self.spawn();
        let span = 2 * SECOND + self.below(8) * SECOND;
        self.at(0, Happening::Fault);
        self.until(span)?;
        self.faults = false;
        // Runs new writers one after the other, and cuts the power of all servers in between: acknowledged records survive.
        for round in 0..2 {
            self.heal();
            for user in &mut self.users {
                user.alive = false;
            }
            self.dismiss();
            self.spawn();
            let mut user = self.users.len() - 1;
            self.trace(format_args!(
                "round {round}: writer {user}, {} events",
                self.queue.len()
            ));
            let end = self.now + 60 * SECOND;
            while self.now < end && !self.is_well(user) {
                // Requests that a process posted before it died may still end its successor.
                if !self.users[user].alive {
                    self.spawn();
                    user = self.users.len() - 1;
                }
                self.step()?;
            }
            if self.now >= end {
                let states: Vec<String> = (0..self.servers.len())
                    .map(|at| self.users[user].writer.describe(at))
                    .collect();
                return Err(format!(
                    "round {round}: the log does not come back, at {}: {states:?}",
                    self.now
                ));
            }
            if self.users[user].alive {
                self.check_replicas()?;
            }
            for server in &mut self.servers {
                server.up = false;
                server.sessions.clear();
                server.holder = None;
                server.cut_power(&mut self.dice);
            }
        }
        Ok(self.seen)
    }

    /// Returns whether all replicas are in step and records are acknowledged, as far as there is room.
    fn is_well(&self, at: usize) -> bool {
        let user = &self.users[at];
        let in_step = (0..self.servers.len()).all(|at| user.writer.describe(at) == "in step");
        // A full log cannot always be opened.
        let full = user.full || !user.alive && !self.drop_oldest;
        full && !user.alive || user.writer.is_ready() && in_step && (full || user.own > 3)
    }

    fn append(&mut self, user: usize) {
        let payload = self.payload();
        match self.users[user].writer.append(&payload) {
            Ok(sequence) => {
                self.users[user].appended.insert(sequence, payload);
            }
            Err(error) => self.users[user].full = error == AppendError::Full,
        }
    }

    /// Prints what happens, to help find the cause of a failure.
    fn trace(&self, what: std::fmt::Arguments) {
        if self.tracing {
            println!("{:>10} us: {what}", self.now);
        }
    }

    fn until(&mut self, time: u64) -> Result<(), Failure> {
        while self.now < time {
            self.step()?;
        }
        Ok(())
    }

    fn step(&mut self) -> Result<(), Failure> {
        let Some(Scheduled(time, _, happening)) = self.queue.pop() else {
            return Err("nothing is going to happen any more".into());
        };
        self.now = time;
        match happening {
            Happening::Arrives(user, at) => self.arrives(user, at),
            Happening::Answers(user, at) => {
                if let Some(wait) = self.waits(user) {
                    self.at(wait, Happening::Answers(user, at));
                    return Ok(());
                }
                let now = Duration::from_micros(self.now);
                let region_bytes = self.servers[at].visible.len() as u64;
                let answer = self.users[user].back[at].pop_front();
                let writer = &mut self.users[user].writer;
                match answer {
                    Some(Answer::Done(action, bytes)) => match action.what {
                        What::Connect => writer.handle_connected(at, action.session, region_bytes),
                        What::Acquire => writer.handle_acquired(at, action.session),
                        _ => writer.handle_done(at, action.session, bytes, now),
                    },
                    Some(Answer::Lost(session)) => writer.handle_lost(at, session, "lost", now),
                    None => {}
                }
                self.drive(user)?;
            }
            Happening::Timer(user) => {
                if let Some(wait) = self.waits(user) {
                    self.at(wait, Happening::Timer(user));
                    return Ok(());
                }
                let now = Duration::from_micros(self.now);
                self.users[user].writer.handle_timeout(now);
                self.drive(user)?;
            }
            Happening::Appends(user) => {
                if let Some(wait) = self.waits(user) {
                    self.at(wait, Happening::Appends(user));
                    return Ok(());
                }
                for _ in 0..1 + self.below(4) {
                    self.append(user);
                }
                if self.below(16) == 0 && self.users[user].writer.is_ready() {
                    self.users[user].writer.mark();
                }
                self.drive(user)?;
                let pause = 1 + self.below(20 * MS);
                if self.users[user].alive {
                    self.at(self.now + pause, Happening::Appends(user));
                }
            }
            Happening::Fault => self.fault(),
            Happening::Restart(at) => self.servers[at].up = true,
            Happening::Heal(user, at) => self.users[user].cut[at] = false,
        }
        Ok(())
    }

    /// Returns the time until which a user does nothing: for ever if it is dead, the end of its pause if it is paused.
    fn waits(&self, user: usize) -> Option<u64> {
        let user = &self.users[user];
        if !user.alive {
            return Some(u64::MAX / 2);
        }
        (user.paused_until > self.now).then_some(user.paused_until)
    }

    fn payload(&mut self) -> Vec<u8> {
        self.payloads += 1;
        let length = 8 + self.mostly(60, 8, 700) as usize;
        let mut payload = vec![0xa5; length];
        payload[..8].copy_from_slice(&self.payloads.to_le_bytes());
        payload
    }

    fn spawn(&mut self) {
        let replicas = self.servers.len();
        let settings = Settings {
            replicas,
            writer: self.dice.next_u64(),
            log: self.dice.next_u64(),
            replica_ids: (0..replicas).map(|_| self.dice.next_u64()).collect(),
            create: true,
            drop_oldest: self.drop_oldest,
            trim: None,
        };
        self.users.push(User {
            writer: Writer::new(settings),
            alive: true,
            paused_until: 0,
            appended: HashMap::new(),
            acknowledged: 0,
            was_ready: false,
            own: 0,
            full: false,
            sent: (0..replicas).map(|_| VecDeque::new()).collect(),
            sent_until: vec![0; replicas],
            back: (0..replicas).map(|_| VecDeque::new()).collect(),
            back_until: vec![0; replicas],
            cut: vec![false; replicas],
        });
        let user = self.users.len() - 1;
        self.at(self.now, Happening::Timer(user));
        self.at(self.now + 10 * MS, Happening::Appends(user));
    }

    /// Removes the events of dead users.
    fn dismiss(&mut self) {
        let queue = std::mem::take(&mut self.queue);
        self.queue = queue.into_iter().filter(|s| s.0 < u64::MAX / 4).collect();
    }

    /// Takes a writer's actions and events.
    fn drive(&mut self, user: usize) -> Result<(), Failure> {
        while let Some(action) = self.users[user].writer.poll_action() {
            let delay = 20 + self.mostly(300, 20, 30 * MS);
            let at = action.replica;
            let link = &mut self.users[user];
            let time = (self.now + delay).max(link.sent_until[at]);
            link.sent_until[at] = time;
            link.sent[at].push_back(action);
            self.at(time, Happening::Arrives(user, at));
        }
        while let Some(event) = self.users[user].writer.poll_event() {
            self.heard(user, &event)?;
        }
        if self.users[user].writer.is_ready() {
            self.note_dropped(self.users[user].writer.first())?;
        }
        if let Some(due) = self.users[user].writer.poll_timeout() {
            self.at(due.as_micros() as u64, Happening::Timer(user));
        }
        Ok(())
    }

    fn heard(&mut self, at: usize, event: &WriterEvent) -> Result<(), Failure> {
        self.trace(format_args!(
            "writer {at} {}: {event:?}",
            self.users[at].writer.epoch()
        ));
        match event {
            WriterEvent::Ready { first, last } => {
                self.seen.recoveries += 1;
                let records: Vec<(u64, Vec<u8>)> = self.users[at]
                    .writer
                    .records()
                    .filter(|(s, _)| s <= last)
                    .collect();
                // Opening a full log drops the oldest records, regardless of who knows of them.
                self.dropped = self.dropped.max(*first - 1);
                // A writer that learns late that its epoch began need not have the records of a later epoch.
                let epoch = self.users[at].writer.epoch();
                let before = self.history.iter().rev().find(|(_, (other, _))| *other < epoch);
                if let Some((acknowledged, _)) = before
                    && acknowledged > last
                {
                    return Err(format!(
                        "record {acknowledged} was acknowledged and is lost: the log ends at {last}"
                    ));
                }
                for (sequence, payload) in records {
                    self.remember(sequence, epoch, payload)?;
                }
                let user = &mut self.users[at];
                if std::mem::replace(&mut user.was_ready, true) && user.acknowledged != *last {
                    return Err(format!(
                        "a writer goes on behind record {last}, and {} was its own last one",
                        user.acknowledged
                    ));
                }
                user.acknowledged = *last;
            }
            WriterEvent::Acknowledged { sequence } => {
                let epoch = self.users[at].writer.epoch();
                for known in self.users[at].acknowledged + 1..=*sequence {
                    let mut held = self.users[at].writer.records();
                    let Some((_, payload)) = held.find(|(sequence, _)| *sequence == known) else {
                        return Err(format!("record {known} is acknowledged and dropped at once"));
                    };
                    drop(held);
                    if self.users[at]
                        .appended
                        .get(&known)
                        .is_some_and(|appended| *appended != payload)
                    {
                        return Err(format!(
                            "record {known} is acknowledged and is not what was appended"
                        ));
                    }
                    self.remember(known, epoch, payload)?;
                    self.seen.acknowledged += 1;
                    self.users[at].own += 1;
                }
                self.users[at].acknowledged = *sequence;
            }
            WriterEvent::Over(over) => {
                self.seen.fenced += u64::from(matches!(over, Over::Fenced(_)));
                let unusable = match over {
                    Over::Unusable(why) => !why.contains("full"),
                    over => matches!(over, Over::Replica { .. }),
                };
                if unusable {
                    return Err(format!("{over}"));
                }
                self.users[at].alive = false;
            }
            WriterEvent::Replica { .. } => {}
        }
        Ok(())
    }

    /// Checks that every dropped record was acknowledged.
    fn note_dropped(&mut self, first: u64) -> Result<(), Failure> {
        for sequence in self.dropped + 1..first {
            if !self.history.contains_key(&sequence) {
                return Err(format!(
                    "record {sequence} was dropped before it was acknowledged"
                ));
            }
            self.seen.dropped += 1;
        }
        self.dropped = self.dropped.max(first - 1);
        Ok(())
    }

    fn remember(&mut self, sequence: u64, epoch: Epoch, payload: Vec<u8>) -> Result<(), Failure> {
        match self.history.get(&sequence) {
            Some((_, known)) if *known != payload => Err(format!(
                "record {sequence} was acknowledged and is another one now"
            )),
            _ => {
                let entry = self.history.entry(sequence).or_insert((epoch, payload));
                entry.0 = entry.0.min(epoch);
                Ok(())
            }
        }
    }

    fn arrives(&mut self, user: usize, at: usize) {
        // Requests that a dead process posted may still arrive.
        let cut = self.users[user].cut[at];
        let server = &mut self.servers[at];
        if server.stalled_until > self.now && !cut {
            let until = server.stalled_until;
            return self.at(until, Happening::Arrives(user, at));
        }
        let Some(action) = self.users[user].sent[at].pop_front() else {
            return;
        };
        let key = (user, action.session);
        if cut || !server.up {
            server.sessions.retain(|known| *known != key);
            if server.holder == Some(key) {
                server.holder = None;
            }
            return self.lose(user, at, action.session);
        }
        let known = server.sessions.contains(&key);
        let holds = known && server.holder == Some(key);
        let allowed = match action.what {
            What::Connect => true,
            What::Acquire | What::Read { .. } | What::Disconnect => known,
            What::Write { .. } | What::Flush { .. } => holds,
        };
        if !allowed {
            return self.lose(user, at, action.session);
        }
        if self.tracing && !matches!(action.what, What::Read { .. }) {
            let text = format!("{:?}", action.what);
            println!(
                "{:>10} us: writer {user} at {at}: {}",
                self.now,
                &text[..text.len().min(60)]
            );
        }
        if self.tracing && action.what == What::Acquire {
            println!(
                "   holds {:?}, {:?}",
                self.servers[at].header(),
                self.servers[at].frames().last().map(|(frame, _)| frame.end)
            );
        }
        let server = &mut self.servers[at];
        let mut answer = None;
        let mut ended = None;
        match &action.what {
            What::Connect => server.sessions.push(key),
            What::Acquire => {
                let before = server.holder.replace(key);
                ended = before.filter(|before| *before != key);
                server.sessions.retain(|session| Some(*session) != ended);
            }
            What::Read { offset, length } => {
                answer = Some(server.visible[*offset as usize..(*offset + *length) as usize].to_vec());
            }
            What::Write { offset, bytes } => server.write(*offset as usize, bytes),
            What::Flush { offset, length } => server.flush(*offset as usize, *length as usize),
            What::Disconnect => {
                server.sessions.retain(|session| *session != key);
                if holds {
                    server.holder = None;
                }
                return;
            }
        }
        if let Some((other, session)) = ended {
            self.lose(other, at, session);
        }
        let delay = 20 + self.mostly(300, 20, 30 * MS);
        self.answer(user, at, delay, Answer::Done(action, answer));
    }

    fn answer(&mut self, user: usize, at: usize, delay: u64, answer: Answer) {
        let link = &mut self.users[user];
        let time = (self.now + delay).max(link.back_until[at]);
        link.back_until[at] = time;
        link.back[at].push_back(answer);
        self.at(time, Happening::Answers(user, at));
    }

    /// Reports to the writer, after some time, that a session is over.
    fn lose(&mut self, user: usize, at: usize, session: u64) {
        let delay = self.mostly(2 * MS, 4, 400 * MS);
        self.answer(user, at, delay, Answer::Lost(session));
    }

    fn fault(&mut self) {
        if !self.faults {
            return;
        }
        let at = self.below(self.servers.len() as u64) as usize;
        let some_time = 1 + self.mostly(40 * MS, 4, SECOND);
        let alive: Vec<usize> = (0..self.users.len())
            .filter(|user| self.users[*user].alive)
            .collect();
        let user = (!alive.is_empty()).then(|| alive[self.below(alive.len() as u64) as usize]);
        match self.below(12) {
            0 | 1 => {
                // The process dies; bytes written to it stay in the page cache.
                self.stop(at, some_time);
            }
            2..=4 => {
                self.seen.power_cuts += 1;
                let everyone = self.below(4) == 0;
                for each in 0..self.servers.len() {
                    if everyone || each == at {
                        self.stop(each, some_time);
                        self.trace(format_args!("power cut of {each} for {some_time}"));
                        self.seen.units_lost += self.servers[each].cut_power(&mut self.dice);
                    }
                }
            }
            5 => {
                // At any time only a minority may lose its contents for good, until it has everything again.
                let lacking = self.servers.iter().filter(|server| !server.has_say()).count();
                if self.servers[at].has_say() && 2 * (lacking + 1) < self.servers.len() {
                    self.seen.wiped += 1;
                    self.trace(format_args!("{at} loses all, for {some_time}"));
                    self.stop(at, some_time);
                    let server = &mut self.servers[at];
                    server.pending.clear();
                    server.visible.fill(0);
                    server.durable.fill(0);
                }
            }
            6 => {
                self.seen.stalls += 1;
                let until = self.servers[at].stalled_until;
                self.servers[at].stalled_until = until.max(self.now + some_time);
            }
            7 | 8 => {
                if let Some(user) = user {
                    self.seen.partitions += 1;
                    self.users[user].cut[at] = true;
                    self.at(self.now + some_time, Happening::Heal(user, at));
                }
            }
            9 => {
                if let Some(user) = user {
                    let until = self.users[user].paused_until;
                    self.users[user].paused_until = until.max(self.now + some_time);
                }
            }
            10 => {
                if let Some(user) = user {
                    self.users[user].alive = false;
                }
            }
            // Another writer starts while the first is alive.
            _ if alive.len() < 3 => self.spawn(),
            _ => {}
        }
        if self.users.iter().all(|user| !user.alive) {
            self.spawn();
        }
        let pause = 1 + self.mostly(30 * MS, 3, 300 * MS);
        self.at(self.now + pause, Happening::Fault);
    }

    fn stop(&mut self, at: usize, some_time: u64) {
        self.servers[at].up = false;
        self.servers[at].sessions.clear();
        self.servers[at].holder = None;
        self.at(self.now + some_time, Happening::Restart(at));
    }

    fn heal(&mut self) {
        for server in &mut self.servers {
            server.up = true;
            server.stalled_until = 0;
        }
    }

    /// Checks that all replicas hold the same log, and that it holds what was acknowledged.
    fn check_replicas(&mut self) -> Result<(), Failure> {
        for (at, server) in self.servers.iter().enumerate() {
            let Found::Log(header) = server.header() else {
                return Err(format!("replica {at} holds no log"));
            };
            if header.joining {
                return Err(format!("replica {at} still joins"));
            }
            self.seen.wraps += u64::from(header.head.position > header.area);
            let last = self.history.last_key_value().map_or(0, |(sequence, _)| *sequence);
            for (frame, payload) in server.frames() {
                if frame.acknowledged > last {
                    return Err(format!(
                        "replica {at} says that {} is acknowledged",
                        frame.acknowledged
                    ));
                }
                let known = self.history.get(&frame.end.sequence);
                if frame.is_record && known.is_some_and(|(_, known)| *known != payload) {
                    return Err(format!(
                        "replica {at} holds another record {}",
                        frame.end.sequence
                    ));
                }
            }
        }
        Ok(())
    }
}
