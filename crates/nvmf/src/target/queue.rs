//! A queue of a controller: its first command is Connect, which says which queue of which controller it is.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rdmux_runtime::Direction;
use rdmux_wire::nvme::{
    CONNECT_DATA_LEN, Cid, Cns, Connect, ConnectData, ControllerKind, Cqe, DISCOVERY_NQN, FabricsType, Fuse,
    LogId, Opcode, Sqe, Status, authentication_len, is_nvme_authentication,
};

use crate::auth::Authenticator;
use crate::tls::Proof;

use super::association::{Association, Session};
use super::controller::Controller;
use super::fused::Pairs;
use super::io::Io;
use super::limit::Share;
use super::namespace::{COPY_FORMATS, User};
use super::subsystem::{Listener, Target};
use super::tally::Counters;
use super::view::View;

/// Entries of an admin queue.
pub(crate) const ADMIN_ENTRIES: u16 = 32;
/// Maximum number of I/O queues of a controller.
pub(crate) const IO_QUEUES_MAX: u16 = 128;
/// Time between two looks at I/Os of a host's controllers that are over, of whose end no event tells.
const QUIET_LOOK: Duration = Duration::from_millis(1);
/// Time between two looks at a host's limits, of which a Copy gives back what it has not moved: no event tells of that.
const LIMIT_LOOK: Duration = Duration::from_millis(50);

/// Data of an Authentication Send or Receive.
const AUTH_DATA_MAX: u32 = 4096;
/// Result of Connect: the host has to authenticate itself. 6.3.
const AUTHENTICATION_REQUIRED: u64 = 1 << 17;
/// Result of Connect, in place of that: the host has to authenticate itself and to come back by TLS, with the key that follows from it.
const SECURE_CHANNEL_REQUIRED: u64 = 1 << 18;

/// Properties of a transport that its queues need to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Maximum number of entries of an I/O queue.
    pub entries_max: u16,
    /// Maximum bytes of a command's data, as a power of two of pages of 4 KiB.
    pub mdts: u8,
    /// Maximum bytes of data in the capsule of an I/O command.
    pub in_capsule_max: u32,
    /// SGLs that it takes, as Identify reports them.
    pub sgls: u32,
}

impl Port {
    /// Returns the maximum bytes of a command's data.
    pub const fn data_max(&self) -> u32 {
        4096 << self.mdts
    }
}

/// A command that was admitted.
#[derive(Debug)]
pub enum Admitted {
    /// The transport moves its data and has [`Io::execute`] carry it out, then calls [`Queue::complete`].
    Io(Io),
    /// The transport receives so many bytes for it, which may be none, then calls [`Queue::execute`].
    Command {
        /// Bytes from the host.
        receives: u32,
    },
}

/// Outcome of a command that a queue has carried out.
#[derive(Debug)]
pub enum Step {
    /// It is done.
    Complete(Cqe),
    /// It is done; the transport sends these data first, as many of them as the command has room for.
    Send(Vec<u8>, Cqe),
    /// It completes later, when an event has happened: [`Queue::poll_event`].
    Wait,
}

/// The controller's side of a queue.
#[derive(Debug)]
pub struct Queue {
    target: Arc<Target>,
    port: Port,
    local: Listener,
    role: Role,
    /// Set if its host has to be authenticated.
    authenticator: Option<Authenticator>,
    /// Its listener requires TLS.
    requires_tls: bool,
    /// Names and key that its host has proved to have by TLS.
    proof: Option<Proof>,
    /// Entries of the submission queue.
    entries: u16,
    sq_head: u16,
    has_flow_control: bool,
    /// The part of an I/O queue of what its host's limits allow.
    share: Share,
    /// End of the time for the first command, and for authentication.
    connects_until: Instant,
}

#[derive(Debug)]
enum Role {
    /// No command was carried out.
    New,
    Admin(Box<Controller>),
    Io {
        view: View,
        counters: Arc<Counters>,
        pairs: Pairs,
    },
}

impl Queue {
    /// Makes a queue whose host has not sent anything.
    ///
    /// `local` is the listener by which the host has come; the port counts for TCP alone.
    pub fn new(target: Arc<Target>, port: Port, local: Listener, now: Instant) -> Queue {
        Queue {
            connects_until: now + target.connect_timeout(),
            target,
            port,
            local,
            role: Role::New,
            authenticator: None,
            requires_tls: false,
            proof: None,
            entries: 2,
            sq_head: 0,
            has_flow_control: true,
            share: Share::default(),
        }
    }

    /// Takes note that its listener requires TLS. Without a proof its host may agree on a key for TLS with its controller, and no more.
    pub fn require_tls(&mut self) {
        self.requires_tls = true;
    }

    /// Returns true if others can read and change what its host sends, and must not where it came.
    fn is_exposed(&self) -> bool {
        self.requires_tls && self.proof.is_none()
    }

    /// Takes note of what the host has proved by TLS: it connects as that host alone, to that subsystem.
    pub fn set_proof(&mut self, proof: Proof) {
        self.proof = Some(proof);
    }

    /// Returns true if a host may connect to a subsystem as far as it has proved something by TLS. The key may have changed since.
    fn is_proved(&self, data: &ConnectData, now: Instant) -> bool {
        self.proof.as_ref().is_none_or(|proof| {
            let has_key = || {
                let keys = self.target.psks(&data.host, &data.subsystem, now);
                keys.contains(&proof.psk)
            };
            proof.host == data.host && proof.subsystem == data.subsystem && has_key()
        })
    }

    /// Returns the number of commands that the host may have outstanding.
    pub fn entries(&self) -> u16 {
        self.entries
    }

    /// Returns false if the host has turned the flow control of the submission queue off.
    pub fn has_flow_control(&self) -> bool {
        self.has_flow_control
    }

    /// Returns true if other queues have to look at what they share when this one ends ([`Queue::is_over`], [`Queue::poll_event`]): it is the admin
    /// queue of a controller that may have I/O queues, or an I/O queue of which commands were to be aborted.
    pub fn has_io_queues(&self) -> bool {
        match &self.role {
            Role::New => false,
            Role::Admin(controller) => controller.has_io_queues(),
            // The admin queue learns that commands which are to be aborted are no more.
            Role::Io { view, .. } => view.user().session.association.has_aborts(),
        }
    }

    /// Returns true if it takes I/O commands.
    pub fn is_io(&self) -> bool {
        matches!(self.role, Role::Io { .. })
    }

    /// Returns true if it takes fused pairs: I/O queues do, unless commands pass to a drive.
    fn takes_fused(&self) -> bool {
        match &self.role {
            Role::Io { view, .. } => view.user().subsystem.drive().is_none(),
            Role::New | Role::Admin(_) => false,
        }
    }

    /// Returns true if its controller was reset or is over: the transport ends its connection, without completions, since the host has
    /// to repeat its commands elsewhere.
    pub fn is_over(&self) -> bool {
        match &self.role {
            Role::New => false,
            Role::Admin(controller) => controller.is_expelled(),
            Role::Io { view, .. } => view.user().session.is_over(),
        }
    }

    /// Its connection is over. That of an admin queue ends the controller now, not when the transport drops it: the host may learn of it before that, and connect
    /// again.
    pub fn end(&mut self) {
        if let Role::Admin(controller) = &mut self.role {
            controller.end();
        }
    }

    /// Takes note of changes of its subsystem: a namespace that was removed lasts no longer than this.
    pub fn handle_change(&mut self) {
        match &mut self.role {
            Role::New => {}
            Role::Admin(controller) => controller.look_at_namespaces(),
            Role::Io { view, .. } => view.update(),
        }
    }

    /// Returns when the transport is to look again whether it takes a further I/O command; `None`: it does. Those before have used what the host's limits allow, or changes of blocks run
    /// that the host has asked a controller for that is over, as by a path that it has lost.
    pub fn held_until(&self, now: Instant) -> Option<Instant> {
        let Role::Io { view, .. } = &self.role else {
            return None;
        };
        let User {
            subsystem, session, ..
        } = view.user();
        let association = &session.association;
        match subsystem.is_still(association) || mutant!(ReadyTooEarly) {
            true => {
                let until = association.limit.held_until(&self.share, now)?;
                Some(until.min(now + LIMIT_LOOK))
            }
            false => Some(now + QUIET_LOOK),
        }
    }

    /// Checks a command of which the transport moves `data_len` bytes.
    ///
    /// # Errors
    /// The completion with which it is refused. Data in its capsule are dropped.
    pub fn admit(&mut self, sqe: &Sqe, data_len: u32, now: Instant) -> Result<Admitted, Cqe> {
        let admitted = self.try_admit(sqe, data_len, now);
        admitted.map_err(|status| self.complete(sqe.cid(), status, 0))
    }

    fn try_admit(&mut self, sqe: &Sqe, data_len: u32, now: Instant) -> Result<Admitted, Status> {
        if !sqe.has_sgl() || (sqe.fuse() != Fuse::None && !self.takes_fused()) {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        if is_authentication(sqe) {
            return self.admit_authentication(sqe, data_len);
        }
        let is_refused = self.is_exposed() && matches!(self.role, Role::Admin(_)) && !makes_ready(sqe);
        if self.needs_authentication() || is_refused {
            return Err(Status::AUTHENTICATION_REQUIRED.do_not_retry());
        }
        let of_fabrics = (sqe.opcode() == Opcode::FABRICS).then(|| FabricsType::of(sqe));
        let receives = match (&mut self.role, of_fabrics) {
            (Role::New, Some(FabricsType::CONNECT)) => {
                if data_len as usize != CONNECT_DATA_LEN {
                    return Err(Status::SGL_LENGTH_INVALID.do_not_retry());
                }
                data_len
            }
            (Role::New, _) => return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
            (_, Some(FabricsType::CONNECT)) => return Err(Status::COMMAND_SEQUENCE_ERROR.do_not_retry()),
            (Role::Admin(controller), of_fabrics) => {
                controller.heard(now);
                let receives = controller.admit(sqe, of_fabrics, data_len)?;
                if let Some(io) = controller.check_passed(sqe, of_fabrics, data_len)? {
                    return Ok(Admitted::Io(io));
                }
                receives
            }
            (Role::Io { .. }, Some(_)) => return Err(Status::INVALID_FIELD.do_not_retry()),
            (
                Role::Io {
                    view,
                    counters,
                    pairs,
                },
                None,
            ) => {
                view.update();
                let association = &view.user().session.association;
                let drive = view.user().subsystem.drive();
                let is_report = sqe.opcode() == Opcode::RESERVATION_REPORT && drive.is_none();
                if is_report && sqe.fuse() == Fuse::None {
                    pairs.admit(sqe, Err(Status::INVALID_FIELD), 0)?;
                    view.seat(sqe.nsid())?;
                    return Ok(Admitted::Command { receives: 0 });
                }
                let copy_formats = match sqe.opcode() {
                    // Linux's kernel lets no program enable them, and results are there to be copied.
                    Opcode::COPY if view.user().subsystem.is_accelerator() => COPY_FORMATS,
                    Opcode::COPY => association.copy_formats.load(Ordering::Acquire),
                    _ => 0,
                };
                let data_max = self.port.data_max();
                let checked = match drive {
                    Some(drive) => Io::check_passed(view, drive, sqe, data_len, data_max),
                    None => Io::check(view, sqe, data_len, data_max, copy_formats),
                };
                let bytes = checked.as_ref().map_or(0, Io::moves);
                association.limit.spend(&mut self.share, bytes, now);
                if let Ok(io) = &checked {
                    match io.counts() {
                        Some(Direction::Read) => counters.read(io.length),
                        Some(Direction::Write) => counters.wrote(io.length),
                        None => {}
                    }
                }
                if sqe.fuse() != Fuse::None || !pairs.is_empty() {
                    let receives = pairs.admit(sqe, checked.clone(), data_len)?;
                    if let Some(receives) = receives {
                        return Ok(Admitted::Command { receives });
                    }
                }
                let io = checked?;
                return Ok(Admitted::Io(io));
            }
        };
        Ok(Admitted::Command { receives })
    }

    fn needs_authentication(&self) -> bool {
        self.authenticator
            .as_ref()
            .is_some_and(|authenticator| !authenticator.is_authenticated())
    }

    fn admit_authentication(&self, sqe: &Sqe, data_len: u32) -> Result<Admitted, Status> {
        if self.authenticator.is_none() || !is_nvme_authentication(sqe) {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        if authentication_len(sqe) != data_len || data_len > AUTH_DATA_MAX {
            return Err(Status::SGL_LENGTH_INVALID.do_not_retry());
        }
        Ok(Admitted::Command {
            receives: if sqe.is_to_controller() { data_len } else { 0 },
        })
    }

    fn authenticate(&mut self, sqe: &Sqe, data: &[u8], now: Instant) -> Result<Executed, (Status, u64)> {
        let authenticator = self
            .authenticator
            .as_mut()
            .ok_or((Status::INVALID_FIELD.do_not_retry(), 0))?;
        if sqe.is_to_controller() {
            authenticator.handle(data);
            if let (Some(psk), Role::Admin(controller)) = (authenticator.take_psk(), &self.role) {
                controller.keep_key(psk, now);
            }
            return Ok(Executed::Done(0));
        }
        let message = authenticator.poll();
        let mut message = message.ok_or((Status::COMMAND_SEQUENCE_ERROR.do_not_retry(), 0))?;
        message.resize(authentication_len(sqe) as usize, 0);
        Ok(Executed::Send(message))
    }

    /// Carries out a command other than I/O, with the data that it has received.
    pub fn execute(&mut self, sqe: &Sqe, data: &[u8], now: Instant) -> Step {
        let executed = match &mut self.role {
            _ if is_authentication(sqe) => self.authenticate(sqe, data, now),
            Role::New => self.connect(sqe, data, now),
            Role::Admin(controller) => controller.execute(sqe, data, &self.target, now),
            Role::Io { view, .. } if sqe.opcode() == Opcode::RESERVATION_REPORT => report(view, sqe),
            Role::Io { pairs, .. } => match pairs.received(sqe.cid(), data) {
                None => Ok(Executed::Wait),
                Some(status) => Err((status, 0)),
            },
        };
        match executed {
            Ok(Executed::Done(result)) => Step::Complete(self.complete(sqe.cid(), Status::SUCCESS, result)),
            Ok(Executed::Send(data)) => Step::Send(data, self.complete(sqe.cid(), Status::SUCCESS, 0)),
            Ok(Executed::Wait) => Step::Wait,
            Err((status, result)) => Step::Complete(self.complete(sqe.cid(), status, result)),
        }
    }

    /// Returns the completion of a command, which may have failed at the transport.
    pub fn complete(&mut self, cid: Cid, status: Status, result: u64) -> Cqe {
        if let Role::Io {
            view,
            counters,
            pairs,
            ..
        } = &mut self.role
        {
            let user = view.user();
            if user.session.association.has_aborts() {
                let was_aborted = status.is(Status::ABORT_REQUESTED);
                user.session.association.ended(user.qid, cid, was_aborted);
            }
            if !status.is_success() {
                if matches!(status.code(), 0x280..=0x284) {
                    counters.media_error();
                }
                pairs.failed(cid);
            }
        }
        let sq_head = match self.has_flow_control {
            true => {
                self.sq_head = (self.sq_head + 1) % self.entries;
                self.sq_head
            }
            false => u16::MAX,
        };
        Cqe {
            result,
            sq_head,
            cid,
            status,
        }
    }

    fn connect(&mut self, sqe: &Sqe, data: &[u8], now: Instant) -> Result<Executed, (Status, u64)> {
        // The result names the offset of what is invalid, with bit 16 if that is in the data.
        let invalid = |at: u16| (Status::CONNECT_INVALID.do_not_retry(), u64::from(at));
        let invalid_data = |at: u16| (Status::CONNECT_INVALID.do_not_retry(), u64::from(at) | 1 << 16);
        let connect = Connect::parse(sqe);
        if connect.record_format != 0 {
            return Err((Status::CONNECT_INCOMPATIBLE.do_not_retry(), 0));
        }
        let data = ConnectData::parse(data).map_err(|(_, at)| invalid_data(at))?;
        let subsystem = self.target.subsystem(&data.subsystem);
        let subsystem = subsystem.ok_or(invalid_data(ConnectData::SUBSYSTEM_AT))?;
        let entries_max = if connect.qid == 0 {
            ADMIN_ENTRIES
        } else {
            self.port.entries_max
        };
        if connect.sq_size == 0 || connect.sq_size >= entries_max {
            return Err(invalid(44));
        }
        let terms = subsystem.terms(&data.host);
        let terms = terms.filter(|_| self.is_proved(&data, now));
        let terms = terms.ok_or((Status::CONNECT_INVALID_HOST.do_not_retry(), 0))?;
        let queues_max = terms.queues.unwrap_or(IO_QUEUES_MAX).clamp(1, IO_QUEUES_MAX);
        if connect.qid > queues_max {
            return Err(invalid(42));
        }
        let is_exposed = self.is_exposed();
        let generated = self.proof.as_ref().map(|proof| &proof.psk);
        let generated = generated.filter(|psk| psk.is_generated());
        let authenticator = subsystem.authenticator(&data.host, &terms);
        let authenticator = authenticator.map(|authenticator| match generated {
            None if is_exposed => authenticator.with_new_psk(),
            None => authenticator,
            Some(_) => authenticator.with_psk(connect.qid),
        });
        // Admin queues alone agree on keys, with hosts that have a secret for it.
        let may_agree = connect.qid == 0 && terms.concat && authenticator.is_some();
        if is_exposed && !may_agree {
            return Err((Status::CONNECT_INVALID_HOST.do_not_retry(), 0));
        }
        let may_use_key = |association: &Association| {
            generated.is_none_or(|psk| subsystem.use_key(association, psk, connect.qid))
        };
        let (cntlid, role) = match connect.qid {
            0 => {
                if data.cntlid != ConnectData::ANY_CONTROLLER {
                    return Err(invalid_data(ConnectData::CNTLID_AT));
                }
                let kind = match data.subsystem.as_str() {
                    DISCOVERY_NQN => ControllerKind::Discovery,
                    _ => ControllerKind::Io,
                };
                let association = subsystem.associate(&data, &terms, queues_max, now);
                let association = association.map_err(|status| (status, 0))?;
                if !may_use_key(&association) {
                    subsystem.dissociate(&association);
                    return Err((Status::CONNECT_INVALID_HOST.do_not_retry(), 0));
                }
                let cntlid = association.cntlid;
                let keep_alive_ms = connect.keep_alive_ms;
                let generation = self.target.generation();
                let controller = Controller::new(
                    kind,
                    subsystem,
                    association,
                    (self.port, self.local),
                    keep_alive_ms,
                    generation,
                    now,
                );
                (cntlid, Role::Admin(Box::new(controller)))
            }
            qid => {
                let association = subsystem.association(data.cntlid);
                let association = association.filter(|known| known.is_of_host(&data.host, &data.host_id));
                // A host that has lost a controller learns so when it is over, with all that it was told to do.
                if association.is_none() && subsystem.is_ending(data.cntlid, &data.host, &data.host_id) {
                    return Err((Status::CONNECT_BUSY, 0));
                }
                let association = association.ok_or(invalid_data(ConnectData::CNTLID_AT))?;
                if !may_use_key(&association) {
                    return Err((Status::CONNECT_INVALID_HOST.do_not_retry(), 0));
                }
                // Begun first, so that a reset after the look at readiness ends it.
                let session = Session::new(association, qid);
                let is_ready = session.association.is_ready.load(Ordering::Acquire);
                if !is_ready || data.subsystem.as_str() == DISCOVERY_NQN {
                    return Err((Status::COMMAND_SEQUENCE_ERROR.do_not_retry(), 0));
                }
                let counters = session.association.take(qid);
                let counters = counters.ok_or((Status::COMMAND_SEQUENCE_ERROR.do_not_retry(), 0))?;
                let user = User {
                    subsystem,
                    session,
                    qid,
                    local: self.local,
                };
                let role = Role::Io {
                    view: View::new(user),
                    counters,
                    pairs: Pairs::default(),
                };
                (data.cntlid, role)
            }
        };
        self.role = role;
        self.authenticator = authenticator;
        let requires = match self.needs_authentication() {
            true if is_exposed => SECURE_CHANNEL_REQUIRED,
            true => AUTHENTICATION_REQUIRED,
            false => 0,
        };
        self.entries = connect.sq_size + 1;
        self.has_flow_control = !connect.no_flow_control;
        Ok(Executed::Done(u64::from(cntlid) | requires))
    }

    /// Returns the completion of a command that has waited: a request for asynchronous events once one has happened, an Abort, or one of a fused pair.
    /// The transport asks until there is none: after each command, after [`Queue::flushed`], and when a driver tells of a change.
    pub fn poll_event(&mut self) -> Option<Cqe> {
        let (cid, status, result) = match &mut self.role {
            Role::New => return None,
            Role::Admin(controller) => controller.poll_event(&self.target)?,
            Role::Io { pairs, .. } => {
                let (cid, status) = pairs.poll_done()?;
                (cid, status, 0)
            }
        };
        Some(self.complete(cid, status, result))
    }

    /// Returns an I/O that the queue itself asks for, without data, which is to be carried out; then [`Queue::flushed`] is to be called.
    pub fn poll_flush(&mut self) -> Option<Io> {
        match &mut self.role {
            Role::New => None,
            Role::Admin(controller) => controller.poll_flush(),
            Role::Io { pairs, .. } => pairs.poll(),
        }
    }

    /// Returns a command that is to be aborted: the transport completes it with [`Status::ABORT_REQUESTED`] instead of carrying it out, if it has not begun.
    /// If there is no such command, it calls [`Queue::abort_missed`]. Asked for when a driver tells of a change.
    pub fn poll_abort(&mut self) -> Option<Cid> {
        let Role::Io { view, .. } = &self.role else {
            return None;
        };
        let user = view.user();
        user.session.association.poll_abort(user.qid)
    }

    /// There is no command that is to be aborted.
    pub fn abort_missed(&mut self, cid: Cid) {
        if let Role::Io { view, .. } = &self.role {
            let user = view.user();
            user.session.association.ended(user.qid, cid, false);
        }
    }

    /// Takes note of the result of [`Queue::poll_flush`].
    pub fn flushed(&mut self, status: Status) {
        if let Role::Admin(controller) = &mut self.role {
            controller.flushed(status);
        }
    }

    /// Returns true once after something has happened that queues with other threads have to look at: a reset of the controller, whose I/O queues are
    /// over, an Abort and its end, or a change of a reservation of which other hosts want to hear.
    pub fn take_reset(&mut self) -> bool {
        match &mut self.role {
            Role::New => false,
            Role::Admin(controller) => controller.take_reset(),
            Role::Io { view, .. } => view.user().session.association.take_tells(),
        }
    }

    /// Returns when to look at [`Queue::has_expired`].
    pub fn deadline(&self) -> Option<Instant> {
        match &self.role {
            _ if self.needs_authentication() || self.is_exposed() => Some(self.connects_until),
            Role::New => Some(self.connects_until),
            Role::Admin(controller) => controller.deadline(),
            Role::Io { .. } => None,
        }
    }

    /// Returns true if the host has been silent for too long: the transport ends the connection.
    pub fn has_expired(&self, now: Instant) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= now)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if let Role::Io { view, counters, .. } = &self.role {
            let user = view.user();
            user.session.association.give_back(user.qid, counters);
        }
    }
}

/// Carries Reservation Report out.
fn report(view: &View, sqe: &Sqe) -> Result<Executed, (Status, u64)> {
    const EXTENDED: u32 = 1;
    // All hosts have identifiers of 16 bytes over fabrics.
    if sqe.dword(11) & EXTENDED == 0 {
        return Err((Status::HOST_ID_FORMAT.do_not_retry(), 0));
    }
    let seat = view.seat(sqe.nsid()).map_err(|status| (status, 0))?;
    let mut bytes = view.user().subsystem.report(seat).emit();
    let length = (u64::from(sqe.dword(10)) + 1) * 4;
    bytes.truncate(usize::try_from(length).unwrap_or(usize::MAX));
    Ok(Executed::Send(bytes))
}

/// Returns true for a command of those by which a host makes a controller ready and learns what it can. Linux's host sends them before it comes back by
/// TLS: nothing in them or in their answers is about blocks, and they take no notice of events from a host.
fn makes_ready(sqe: &Sqe) -> bool {
    match sqe.opcode() {
        Opcode::FABRICS | Opcode::KEEP_ALIVE => true,
        Opcode::GET_LOG_PAGE => {
            let all = [
                LogId::SUPPORTED,
                LogId::HEALTH,
                LogId::EFFECTS,
                LogId::ANA,
                LogId::FEATURES,
            ];
            all.contains(&LogId(sqe.dword(10) as u8))
        }
        Opcode::IDENTIFY => {
            let cns = Cns(sqe.dword(10) as u8);
            cns == Cns::CONTROLLER || cns == Cns::COMMAND_SET_CONTROLLER
        }
        _ => false,
    }
}

fn is_authentication(sqe: &Sqe) -> bool {
    let of_fabrics = sqe.opcode() == Opcode::FABRICS;
    let kinds = [
        FabricsType::AUTHENTICATION_SEND,
        FabricsType::AUTHENTICATION_RECEIVE,
    ];
    of_fabrics && kinds.contains(&FabricsType::of(sqe))
}

/// Outcome of an admin or fabrics command.
#[derive(Debug)]
pub(super) enum Executed {
    /// It is done, with this result.
    Done(u64),
    /// It is done, and returns these data.
    Send(Vec<u8>),
    /// It completes when an event has happened.
    Wait,
}
