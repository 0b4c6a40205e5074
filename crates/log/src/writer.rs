//! The writer, without I/O or clock.

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
/// Maximum number of requests in flight with a replica.
const OPS_MAX: usize = 48;
/// Bytes read at a time.
const READ: u64 = 256 << 10;
/// Bytes that one FLUSH covers.
const FLUSH: u64 = 1 << 30;
/// Delay before a failed replica is tried again; each failure doubles it, up to the maximum.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(2);
/// Maximum number of restarts of an opening because another writer was seen.
const RAISES_MAX: u32 = 3;
/// Maximum number of looks at a replica that is promised to a higher epoch before the writer raises its own.
const OUTRANKED_MAX: u32 = 3;

/// Settings of a writer.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Number of replicas of the log.
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

/// An action for the caller to perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Action {
    /// Replica to act on.
    pub replica: usize,
    /// Session of the replica; the caller's report names the same session.
    pub session: u64,
    /// The action itself.
    pub what: What,
}

/// An action on a replica. The caller performs reads, writes and flushes in order, and reports each to [`Writer::handle_done`];
/// it reports a session's failure to [`Writer::handle_lost`].
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
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Make these bytes of the region as durable as the region allows.
    Flush {
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// End the session. The caller reports nothing more about it.
    Disconnect,
}

/// Reason why a writer has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Over {
    /// Another writer took over.
    #[error("another writer took over with epoch {0}")]
    Fenced(Epoch),
    /// Nobody has created the log.
    #[error("there is no log: all replicas are blank")]
    NoLog,
    /// The log cannot be opened with these settings.
    #[error("{0}")]
    Unusable(String),
    /// A replica cannot be part of the log, and too few others are left.
    #[error("replica {}: {why}", replica + 1)]
    Replica {
        /// Index of the replica.
        replica: usize,
        /// Reason, in words.
        why: String,
    },
}

/// An event for the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriterEvent {
    /// The log is open: all its records are acknowledged.
    Ready {
        /// Sequence number of the first record that is not dropped.
        first: u64,
        /// Sequence number of the last record; `first - 1` when there is none.
        last: u64,
    },
    /// All records up to this one are acknowledged.
    Acknowledged {
        /// Sequence number of this record.
        sequence: u64,
    },
    /// A replica's state changed.
    Replica {
        /// Index of the replica.
        replica: usize,
        /// Its state, in words for people.
        state: String,
    },
    /// The writer has ended.
    Over(Over),
}

/// Reason why the writer does not accept a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The log is not open yet, or being opened again.
    #[error("the log is not open yet")]
    NotReady,
    /// Records that are not acknowledged take all the room: wait for acknowledgements.
    #[error("the log has no room until more records are acknowledged")]
    Busy,
    /// The log has no room.
    #[error("the log is full: drop old records with `rdmux log trim`, or append with --drop-oldest")]
    Full,
    /// Too long for any log, or for this one.
    #[error("a record of {bytes} bytes is too long: the maximum of this log is {max}")]
    TooLong {
        /// Size of the record.
        bytes: usize,
        /// Largest size that the log takes.
        max: u64,
    },
    /// The writer has ended.
    #[error(transparent)]
    Over(Over),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum WriterState {
    /// The writer reads the replicas' headers.
    Opening,
    /// The writer takes the replicas over; `creating` if there is no log yet.
    Recovering {
        creating: bool,
    },
    /// The log is chosen.
    Active,
    Over(Over),
}

/// A writer. The caller performs and reports what [`Writer::poll_action`] returns, takes [`Writer::poll_event`]s, and calls
/// [`Writer::handle_timeout`] at [`Writer::poll_timeout`]. `now` counts from any fixed moment.
#[derive(Debug)]
pub struct Writer {
    settings: Settings,
    state: WriterState,
    replicas: Vec<Replica>,
    actions: VecDeque<Action>,
    events: VecDeque<WriterEvent>,
    /// The log's id and the size of its ring in bytes, from the first replica's header.
    log: Option<(u64, u64)>,
    /// Set if the log was promised to a writer before.
    in_use: bool,
    epoch: Epoch,
    /// The highest term seen.
    term: u64,
    raises: u32,
    /// Set to restart with a higher epoch once all records are acknowledged.
    raise: bool,
    /// End of the log when that restart began, all of it acknowledged: frames behind it come from another writer.
    own: Option<Point>,
    /// Set once a promise of this epoch was written to a replica.
    promised: bool,
    /// Number of rounds in which the replicas whose log was read were asked whether this writer still holds them.
    round: u64,
    /// The replica that made the writer raise its epoch: the writer must see its header first.
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
    /// Position before which everything is acknowledged, and the last record before it.
    acknowledged: (u64, u64),
}

impl Writer {
    /// Creates a writer.
    pub fn new(settings: Settings) -> Writer {
        let replicas = (0..settings.replicas).map(|_| Replica::new()).collect();
        let mut writer = Writer {
            settings,
            state: WriterState::Opening,
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

    /// Handles a new session; the region has `region_bytes` bytes.
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
                "a region of {region_bytes} bytes is too small for a log: it needs at least {}",
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

    /// Handles the new mapping for writing.
    pub fn handle_acquired(&mut self, replica: usize, session: u64) {
        let Some(r) = self.current(replica, session) else {
            return;
        };
        if r.phase != Phase::Acquiring {
            return;
        }
        r.phase = Phase::Settling;
        // Bytes read from here on are reliable only if a loss of power cannot revert them.
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

    /// Handles the completion of a session's oldest read, write or flush; `bytes` come from a read.
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
                // Frames that waited for a free request go out here: no append may follow to send them.
                self.pump(replica);
            }
        }
        self.advance(now);
    }

    /// Handles a session that ended or failed to begin.
    pub fn handle_lost(&mut self, replica: usize, session: u64, why: &str, now: Duration) {
        if self.current(replica, session).is_some() {
            self.down(replica, why, now);
            self.advance(now);
        }
    }

    /// Does the work that is due at `now`.
    pub fn handle_timeout(&mut self, now: Duration) {
        if matches!(self.state, WriterState::Over(_)) {
            return;
        }
        for at in 0..self.replicas.len() {
            if matches!(self.replicas[at].phase, Phase::Down { until } if until <= now) {
                self.connect(at);
            }
        }
    }

    /// Returns when the caller must call [`Writer::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Duration> {
        if matches!(self.state, WriterState::Over(_)) {
            return None;
        }
        let due = |r: &Replica| match r.phase {
            Phase::Down { until } => Some(until),
            _ => None,
        };
        self.replicas.iter().filter_map(due).min()
    }

    /// Returns the next action for the caller.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns the next event for the caller.
    pub fn poll_event(&mut self) -> Option<WriterEvent> {
        self.events.pop_front()
    }

    /// Appends a record; returns its sequence number. An event reports the acknowledgement.
    pub fn append(&mut self, record: &[u8]) -> Result<u64, AppendError> {
        if let WriterState::Over(over) = &self.state {
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
                // Drops several frames at once: each step costs the replicas a header.
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

    /// Drops acknowledged records below a sequence number; returns the sequence number of the first that is left.
    pub fn trim(&mut self, below: u64) -> u64 {
        self.drop_before(|_, frame| frame.end.sequence < below);
        self.mark();
        self.head.sequence + 1
    }

    /// Writes to the replicas' headers how far the log is acknowledged, so that readers need no later record to know.
    pub fn mark(&mut self) {
        for r in &mut self.replicas {
            r.header_wanted = true;
        }
        self.pump_all();
    }

    /// Returns whether no request is in flight with any replica that has all acknowledged records.
    pub fn is_quiet(&self) -> bool {
        let streaming = |r: &&Replica| r.phase == Phase::Streaming && r.durable >= self.acknowledged.0;
        self.replicas.iter().filter(streaming).all(|r| r.ops.is_empty())
    }

    /// Returns the writer's epoch.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the sequence number of the last acknowledged record.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.1
    }

    /// Returns the sequence number of the first record that is not dropped, which may be the next record.
    pub fn first(&self) -> u64 {
        self.head.sequence + 1
    }

    /// Returns the sequence number of the last appended record.
    pub fn last(&self) -> u64 {
        self.tail.sequence
    }

    /// Returns whether the writer accepts records.
    pub fn is_ready(&self) -> bool {
        self.ready
    }

    /// Returns a replica's state in words for people, as in the events.
    pub fn describe(&self, replica: usize) -> String {
        self.replicas[replica].state.clone()
    }

    /// Returns the records in the log, as `(sequence, payload)`.
    pub fn records(&self) -> impl Iterator<Item = (u64, Vec<u8>)> + '_ {
        self.frames.iter().filter(|frame| frame.is_record).map(|frame| {
            let at = frame.end.position - frame_len(frame.length as usize) + FRAME_LEN as u64;
            (frame.end.sequence, self.bytes(at, u64::from(frame.length)))
        })
    }

    fn current(&mut self, at: usize, session: u64) -> Option<&mut Replica> {
        let over = matches!(self.state, WriterState::Over(_));
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
        if self.state == (WriterState::Recovering { creating: false }) && !self.in_use {
            // As no writer was promised this log, another writer may be creating one: all headers are read again before any
            // promise.
            self.raise = true;
        }
        let r = &mut self.replicas[at];
        r.ops.clear();
        r.copied = None;
        r.asked = 0;
        r.confirmed = 0;
        r.header_busy = false;
        // Until the writer sees it again, the replica may belong to another writer and lose data that this other writer relies
        // on.
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
            self.events.push_back(WriterEvent::Replica {
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

/// Returns where in the region the byte at a position is, and how many of `length` bytes follow it before the ring wraps.
fn segment(area: u64, position: u64, length: u64) -> (u64, u64) {
    let at = position % area;
    (AREA_AT + at, length.min(area - at))
}
