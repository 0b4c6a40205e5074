//! The writer, without I/O and clock.

mod recovery;
mod replica;
mod ring;

use std::collections::VecDeque;
use std::time::Duration;

use self::replica::{Op, Phase, Replica};
use super::defect::defect;
use super::format::{AREA_AT, AREA_MIN, FRAME_LEN, Frame, Point, frame_len};
use super::{Epoch, RECORD_BYTES_MAX};

/// Bytes that records leave free, so that a full log can still be opened.
const RESERVE: u64 = 16 * FRAME_LEN as u64;
/// Bytes written between two flushes.
const BATCH: u64 = 256 << 10;
/// Requests under way with a replica.
const OPS_MAX: usize = 48;
/// Bytes read at a time.
const READ: u64 = 256 << 10;
/// Bytes that one FLUSH covers.
const FLUSH: u64 = 1 << 30;
/// A replica that failed is tried again after so long; twice that the next time, up to the maximum.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);
/// How often an opening may begin anew because another writer was seen.
const RAISES_MAX: u32 = 3;
/// How often a replica that is promised to a higher epoch is looked at before the writer raises its own.
const OUTRANKED_MAX: u32 = 3;

/// How a writer is made.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How many replicas hold the log.
    pub replicas: usize,
    /// A random number for the writer.
    pub writer: u64,
    /// A random number for the log, if it is created.
    pub log: u64,
    /// A random number for each replica, if it is created.
    pub replica_ids: Vec<u64>,
    /// Create the log where all replicas are blank.
    pub create: bool,
    /// When there is no room, drop the oldest records that are acknowledged.
    pub drop_oldest: bool,
    /// Drop the records below this sequence number when the log is opened: the last record's, plus one, at most.
    pub trim: Option<u64>,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Action {
    /// With which replica.
    pub replica: usize,
    /// On which of its sessions; what is reported of it names the same.
    pub session: u64,
    /// What.
    pub what: What,
}

/// What is to be done with a replica. Reads, writes and flushes are done in order, each reported by
/// [`Writer::handle_done`]; a session's failure by [`Writer::handle_lost`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Begin a session and map the region for reading; then [`Writer::handle_connected`].
    Connect,
    /// Map the region for writing, and end every other mapping for writing; then [`Writer::handle_acquired`].
    Acquire,
    /// Read these bytes of the region.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Write bytes to the region.
    Write {
        /// First byte.
        offset: u64,
        /// What.
        bytes: Vec<u8>,
    },
    /// Make these bytes of the region durable, as durable as it gets there.
    Flush {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// End the session. Nothing more is reported of it.
    Disconnect,
}

/// Why a writer is at its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Over {
    /// Another writer took over.
    #[error("another writer took over, with epoch {0}")]
    Fenced(Epoch),
    /// Nobody has created the log.
    #[error("no log there: all replicas are blank")]
    NoLog,
    /// What is to be a log cannot be one.
    #[error("{0}")]
    Unusable(String),
    /// The same, for what stands in a replica.
    #[error("replica {}: {why}", replica + 1)]
    Replica {
        /// Which.
        replica: usize,
        /// What is wrong with it.
        why: String,
    },
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The log is open: all that it holds is acknowledged.
    Ready {
        /// Sequence number of the first record that it still has.
        first: u64,
        /// Sequence number of the last record; `first - 1` when there is none.
        last: u64,
    },
    /// All records up to this one are acknowledged.
    Acknowledged {
        /// Its sequence number.
        sequence: u64,
    },
    /// A replica changed.
    Replica {
        /// Which.
        replica: usize,
        /// How it is, for people.
        state: String,
    },
    /// Nothing more can be done.
    Over(Over),
}

/// Why a record is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The log is not open yet, or being opened again.
    #[error("the log is not open yet")]
    NotReady,
    /// All room is taken by records that are not acknowledged: wait for acknowledgements.
    #[error("the log has no room until more is acknowledged")]
    Busy,
    /// No room.
    #[error("the log is full: drop old records with `rdmux log trim`, or append with --drop-oldest")]
    Full,
    /// Too long for any log, or for this one.
    #[error("a record of {bytes} bytes is too long: this log takes {max}")]
    TooLong {
        /// The record's.
        bytes: usize,
        /// What the log takes.
        max: u64,
    },
    /// The writer is at its end.
    #[error(transparent)]
    Over(Over),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Looking at the replicas' headers.
    Opening,
    /// Taking them over; `creating` a log where there is none.
    Recovering {
        creating: bool,
    },
    /// The log is chosen.
    Active,
    Over(Over),
}

/// A writer. Do what [`Writer::poll_action`] says and report it; take [`Writer::poll_event`]s; call
/// [`Writer::handle_timeout`] at [`Writer::poll_timeout`]. `now` counts from any moment.
#[derive(Debug)]
pub struct Writer {
    settings: Settings,
    state: State,
    replicas: Vec<Replica>,
    actions: VecDeque<Action>,
    events: VecDeque<Event>,
    /// The log's id and the bytes of its ring, as the first replica says.
    log: Option<(u64, u64)>,
    /// A writer was promised that log before.
    in_use: bool,
    epoch: Epoch,
    /// The highest term seen.
    term: u64,
    raises: u32,
    /// Begin anew with a higher epoch, once all is acknowledged.
    raise: bool,
    /// The log's end when that began, all of it acknowledged: what stands behind it then is another writer's.
    own: Option<Point>,
    /// A promise of this epoch was written somewhere.
    promised: bool,
    /// Counts how often those whose log was read were asked whether they still are ours.
    round: u64,
    /// The replica for whose sake the epoch is raised: its header is to be seen first.
    awaited: Option<usize>,
    /// The bytes from head to tail.
    copy: VecDeque<u8>,
    head: Point,
    tail: Point,
    /// The frames from head to tail.
    frames: VecDeque<Frame>,
    /// Position behind the frame that starts this epoch.
    epoch_start: u64,
    ready: bool,
    /// Everything before this position is acknowledged, and the last record before it.
    acknowledged: (u64, u64),
}

impl Writer {
    /// A writer that begins now.
    pub fn new(settings: Settings) -> Writer {
        let replicas = (0..settings.replicas).map(|_| Replica::new()).collect();
        let mut writer = Writer {
            settings,
            state: State::Opening,
            replicas,
            actions: VecDeque::new(),
            events: VecDeque::new(),
            log: None,
            in_use: false,
            epoch: Epoch::default(),
            term: 0,
            raises: 0,
            raise: false,
            own: None,
            promised: false,
            round: 0,
            awaited: None,
            copy: VecDeque::new(),
            head: Point::default(),
            tail: Point::default(),
            frames: VecDeque::new(),
            epoch_start: 0,
            ready: false,
            acknowledged: (0, 0),
        };
        for at in 0..writer.replicas.len() {
            writer.connect(at);
        }
        writer
    }

    /// A session began; the region has so many bytes.
    pub fn handle_connected(&mut self, replica: usize, session: u64, region_bytes: u64) {
        let Some(r) = self.current(replica, session) else {
            return;
        };
        if r.phase != Phase::Connecting {
            return;
        }
        r.region_bytes = region_bytes;
        r.phase = Phase::Peeking;
        if region_bytes < AREA_AT + AREA_MIN {
            let why = format!(
                "a region of {region_bytes} bytes is too small for a log: {} at least",
                AREA_AT + AREA_MIN
            );
            return self.unusable(replica, why);
        }
        self.post(
            replica,
            Op::Header,
            What::Read {
                offset: 0,
                length: AREA_AT,
            },
        );
    }

    /// The mapping for writing was made.
    pub fn handle_acquired(&mut self, replica: usize, session: u64) {
        let Some(r) = self.current(replica, session) else {
            return;
        };
        if r.phase != Phase::Acquiring {
            return;
        }
        r.phase = Phase::Settling;
        // What is read from here on can be relied on only when a loss of power does not take it back.
        if !defect!(OldNotFlushed) {
            let end = AREA_AT + self.log.map_or(0, |(_, area)| area);
            for at in (0..end).step_by(FLUSH as usize) {
                let length = FLUSH.min(end - at);
                self.post(replica, Op::Other, What::Flush { offset: at, length });
            }
        }
        self.post(
            replica,
            Op::Header,
            What::Read {
                offset: 0,
                length: AREA_AT,
            },
        );
    }

    /// The oldest read, write or flush of a session is done; `bytes` of a read.
    pub fn handle_done(&mut self, replica: usize, session: u64, bytes: Option<Vec<u8>>, now: Duration) {
        let Some(r) = self.current(replica, session) else {
            return;
        };
        let Some(op) = r.ops.pop_front() else { return };
        match op {
            Op::Other => {}
            Op::Header => self.header_read(replica, &bytes.unwrap_or_default(), now),
            Op::Confirmed(round) => r.confirmed = round,
            Op::Log(length) => self.log_read(replica, length, &bytes.unwrap_or_default(), now),
            Op::HeaderDurable(header) => self.header_durable(replica, header),
            Op::Durable(position) => {
                r.durable = r.durable.max(position);
                r.known = Some(r.durable);
                self.acknowledge();
                self.caught_up(replica);
                // What had to wait for its turn goes now: perhaps nothing more is appended.
                self.pump(replica);
            }
        }
        self.advance(now);
    }

    /// A session ended, or did not begin.
    pub fn handle_lost(&mut self, replica: usize, session: u64, why: &str, now: Duration) {
        if self.current(replica, session).is_some() {
            self.down(replica, why, now);
            self.advance(now);
        }
    }

    /// What is due now is done.
    pub fn handle_timeout(&mut self, now: Duration) {
        if matches!(self.state, State::Over(_)) {
            return;
        }
        for at in 0..self.replicas.len() {
            if matches!(self.replicas[at].phase, Phase::Down { until } if until <= now) {
                self.connect(at);
            }
        }
    }

    /// When [`Writer::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Duration> {
        if matches!(self.state, State::Over(_)) {
            return None;
        }
        let due = |r: &Replica| match r.phase {
            Phase::Down { until } => Some(until),
            _ => None,
        };
        self.replicas.iter().filter_map(due).min()
    }

    /// What is to be done next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// What happened next.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Appends a record; returns its sequence number. It is acknowledged when an event says so.
    pub fn append(&mut self, record: &[u8]) -> Result<u64, AppendError> {
        if let State::Over(over) = &self.state {
            return Err(AppendError::Over(over.clone()));
        }
        if !self.ready {
            return Err(AppendError::NotReady);
        }
        if self.raise {
            return Err(AppendError::Busy);
        }
        let max = u64::from(RECORD_BYTES_MAX).min(self.area() / 2 - RESERVE);
        if record.len() as u64 > max {
            return Err(AppendError::TooLong {
                bytes: record.len(),
                max,
            });
        }
        let need = frame_len(record.len()) + RESERVE;
        if self.room() < need {
            if self.settings.drop_oldest {
                // Not one by one: each step costs the replicas a header.
                let aim = need.max(self.area() / 8);
                let until = self.tail.position + aim - self.area();
                self.drop_before(|begin, _| begin < until);
            }
            if self.room() < need {
                let acknowledged = self.acknowledged.0 == self.tail.position;
                return Err(if self.settings.drop_oldest && !acknowledged {
                    AppendError::Busy
                } else {
                    AppendError::Full
                });
            }
        }
        self.push(Some(record));
        self.pump_all();
        Ok(self.tail.sequence)
    }

    /// Drops the records below a sequence number, which must be acknowledged; returns the first that is left.
    pub fn trim(&mut self, below: u64) -> u64 {
        self.drop_before(|_, frame| frame.end.sequence < below);
        self.mark();
        self.head.sequence + 1
    }

    /// Tells the replicas in their headers what is acknowledged, so that readers need no later record to know.
    pub fn mark(&mut self) {
        for r in &mut self.replicas {
            r.header_wanted = true;
        }
        self.pump_all();
    }

    /// Whether nothing is under way with any replica that has all.
    pub fn is_quiet(&self) -> bool {
        let streaming = |r: &&Replica| r.phase == Phase::Streaming && r.durable >= self.acknowledged.0;
        self.replicas.iter().filter(streaming).all(|r| r.ops.is_empty())
    }

    /// The epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The last record that is acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.1
    }

    /// The first record that is not dropped, which may be the next one.
    pub fn first(&self) -> u64 {
        self.head.sequence + 1
    }

    /// The last record appended.
    pub fn last(&self) -> u64 {
        self.tail.sequence
    }

    /// Whether records can be appended.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// How a replica is, for people; the same words as in the events.
    pub fn describe(&self, replica: usize) -> String {
        self.replicas[replica].state.clone()
    }

    /// The records that are there, as `(sequence, payload)`.
    pub fn records(&self) -> impl Iterator<Item = (u64, Vec<u8>)> + '_ {
        self.frames.iter().filter(|frame| frame.is_record).map(|frame| {
            let at = frame.end.position - frame_len(frame.length as usize) + FRAME_LEN as u64;
            (frame.end.sequence, self.bytes(at, u64::from(frame.length)))
        })
    }

    fn current(&mut self, at: usize, session: u64) -> Option<&mut Replica> {
        let over = matches!(self.state, State::Over(_));
        let r = self.replicas.get_mut(at)?;
        (!over && r.session == session && r.has_session()).then_some(r)
    }

    fn connect(&mut self, at: usize) {
        let r = &mut self.replicas[at];
        r.session += 1;
        r.phase = Phase::Connecting;
        self.act(at, What::Connect);
    }

    fn down(&mut self, at: usize, why: &str, now: Duration) {
        if self.replicas[at].has_session() {
            self.act(at, What::Disconnect);
        }
        if self.awaited == Some(at) {
            self.awaited = None;
        }
        if self.state == (State::Recovering { creating: false }) && !self.in_use {
            // Another writer may be creating a log there, since nobody was promised this one: all are looked at again before any is.
            self.raise = true;
        }
        let r = &mut self.replicas[at];
        r.ops.clear();
        r.copied = None;
        r.asked = 0;
        r.confirmed = 0;
        r.header_busy = false;
        // Until it is seen again it may belong to another writer, and lose what that one counts on.
        r.may_join &= defect!(SeenBlankOnce);
        r.retry = (r.retry * 2).clamp(RETRY_MIN, RETRY_MAX);
        r.phase = Phase::Down { until: now + r.retry };
        self.tell(at, why);
    }

    fn unusable(&mut self, at: usize, why: String) {
        self.act(at, What::Disconnect);
        let r = &mut self.replicas[at];
        r.ops.clear();
        r.phase = Phase::Unusable;
        r.header = None;
        if self.awaited == Some(at) {
            self.awaited = None;
        }
        self.tell(at, &why);
        let usable = self
            .replicas
            .iter()
            .filter(|r| r.phase != Phase::Unusable)
            .count();
        if usable < self.majority() {
            self.end(Over::Replica { replica: at, why });
        }
    }

    fn tell(&mut self, at: usize, state: &str) {
        let r = &mut self.replicas[at];
        if r.state != state {
            r.state = state.into();
            self.events.push_back(Event::Replica {
                replica: at,
                state: state.into(),
            });
        }
    }

    fn act(&mut self, at: usize, what: What) {
        let session = self.replicas[at].session;
        self.actions.push_back(Action {
            replica: at,
            session,
            what,
        });
    }

    fn post(&mut self, at: usize, op: Op, what: What) {
        self.replicas[at].ops.push_back(op);
        self.act(at, what);
    }
}

/// Where the byte at a position stands in the region, and how many of `length` follow it without a turn of the ring.
fn segment(area: u64, position: u64, length: u64) -> (u64, u64) {
    let at = position % area;
    (AREA_AT + at, length.min(area - at))
}
