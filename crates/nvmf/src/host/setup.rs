//! The steps that make a connected queue ready, without I/O and clock: Connect, authentication, and of an admin queue the controller's registers and what
//! Identify says of it. NVMe Base 2.0, 3.5.

use std::time::Duration;

use rdmux_wire::nvme::{
    CONNECT_DATA_LEN, Capabilities, Cns, Configuration, Connect, ConnectData, CopyFormat, FabricsType,
    IdentifyController, NsId, Register, SQE_LEN, SecureChannel, Status, authentication,
};

use super::command::{
    ANY, event_request, identify, property_get, property_set, queues_of, set_behavior, set_events, set_queues,
};
use super::queue::{Command, Completion};
use super::{HostError, Options, Transport};
use crate::auth::{HostAuthenticator, HostStep, Parties};
use crate::tls::psk::Psk;

/// Entries of the admin queue.
pub(super) const ADMIN_ENTRIES: u16 = 32;
/// Bytes of an Authentication Receive.
const AUTH_RECEIVE_LEN: u32 = 4096;
/// Messages of an authentication, beyond which there is none left to send.
const AUTH_STEPS_MAX: u32 = 8;
/// Result of Connect: the host has to authenticate itself. 6.3.
const AUTHENTICATION_REQUIRED: u64 = 1 << 17;
/// Result of Connect: authentication and a secure channel from its key.
const SECURE_CHANNEL_REQUIRED: u64 = 1 << 18;
/// Controller status: ready, and fatal. 3.1.3.6.
const READY: u64 = 1;
const FATAL: u64 = 1 << 1;
/// Time between two looks at the controller's status, at first and later.
const LOOK_AFTER: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));
/// Unit of the time that a controller says it needs.
const TIMEOUT_UNIT: Duration = Duration::from_millis(500);
/// Maximum bytes of a command's data, whatever the controller takes.
pub const TRANSFER_MAX: u32 = 1 << 20;

/// A controller that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// Its id.
    pub cntlid: u16,
    /// Maximum number of entries of a queue.
    pub queue_entries: u32,
    /// Version, as the register has it.
    pub version: u32,
    /// The answer to Identify.
    pub identify: IdentifyController,
    /// The same, as it was received.
    pub identify_bytes: Vec<u8>,
    /// Maximum bytes of a command's data.
    pub transfer_max: u32,
    /// Maximum bytes of data in the capsule of an I/O command.
    pub in_capsule_max: u32,
    /// I/O queues that it allows: 0 if none were asked for.
    pub queues: u32,
    /// It reports events.
    pub has_events: bool,
}

/// Next part of a setup.
#[derive(Debug)]
pub enum Step {
    /// This command, whose completion goes to [`Setup::handle`].
    Submit(&'static str, Box<Command>),
    /// This command, which completes when the controller has an event to report: the caller does not wait for it.
    Post(Box<Command>),
    /// So much time.
    Wait(Duration),
    /// The queue is ready.
    Done,
}

/// The setup of one queue. The caller carries out [`Setup::next`] until that is [`Step::Done`].
#[derive(Debug)]
pub struct Setup<'a> {
    options: &'a Options,
    qid: u16,
    sq_size: u16,
    cntlid: u16,
    /// I/O queues to ask for.
    queues: u16,
    /// Secure channel for which host and controller agree on a key, and no more.
    channel: SecureChannel,
    state: State,
    authentication: Option<HostAuthenticator>,
    steps: u32,
    capabilities: Capabilities,
    /// Time that is left for the controller to become ready or to stop, and the time to the next look.
    patience: Duration,
    look_after: Duration,
    version: u32,
    identify: Option<(IdentifyController, Vec<u8>)>,
    allowed: u32,
    has_events: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Connect,
    Authenticate,
    GetCapabilities,
    GetConfiguration,
    Disable,
    AwaitStopped,
    Enable,
    AwaitReady,
    GetVersion,
    Identify,
    SetBehavior,
    SetQueues,
    SetEvents,
    RequestEvent,
    Done,
}

impl<'a> Setup<'a> {
    /// Begins the setup of an admin queue, of a controller that is to have so many I/O queues.
    pub fn admin(options: &'a Options, queues: u16) -> Setup<'a> {
        Setup::new(options, 0, ADMIN_ENTRIES - 1, ConnectData::ANY_CONTROLLER, queues)
    }

    /// Begins the setup of an I/O queue of so many entries, 2 or more, of a controller.
    pub fn io(options: &'a Options, qid: u16, entries: u16, cntlid: u16) -> Setup<'a> {
        Setup::new(options, qid, entries - 1, cntlid, 0)
    }

    /// Begins on an admin queue without TLS, and has host and controller agree on a key for it.
    pub fn new_psk(options: &'a Options) -> Setup<'a> {
        Setup {
            channel: SecureChannel::NewTlsPsk,
            ..Setup::admin(options, 0)
        }
    }

    /// Begins on the admin queue of a controller, by TLS, and has both agree on another key.
    ///
    /// # Errors
    /// The host has no secret.
    pub fn replace_psk(options: &'a Options) -> Result<Setup<'a>, HostError> {
        let mut setup = Setup {
            channel: SecureChannel::ReplaceTlsPsk,
            ..Setup::admin(options, 0)
        };
        setup.begin_authentication()?;
        Ok(setup)
    }

    /// Returns once the key on which host and controller have agreed.
    pub fn take_psk(&mut self) -> Option<Psk> {
        self.authentication.as_mut()?.take_psk()
    }

    fn new(options: &'a Options, qid: u16, sq_size: u16, cntlid: u16, queues: u16) -> Setup<'a> {
        Setup {
            options,
            qid,
            sq_size,
            cntlid,
            queues,
            channel: SecureChannel::None,
            state: State::Connect,
            authentication: None,
            steps: 0,
            capabilities: Capabilities::parse(0),
            patience: Duration::ZERO,
            look_after: LOOK_AFTER.0,
            version: 0,
            identify: None,
            allowed: 0,
            has_events: false,
        }
    }

    /// Returns the next part.
    ///
    /// # Errors
    /// The queue does not become ready.
    #[expect(
        clippy::should_implement_trait,
        reason = "it is no iterator: the caller answers each step"
    )]
    pub fn next(&mut self) -> Result<Step, HostError> {
        let (what, command) = match self.state {
            State::Connect => ("Connect", self.connect()),
            State::Authenticate => return self.authenticate(),
            State::GetCapabilities => ("Property Get of CAP", property_get(Register::CAPABILITIES, true)),
            State::GetConfiguration => ("Property Get of CC", property_get(Register::CONFIGURATION, false)),
            State::Disable => ("Property Set of CC", property_set(Register::CONFIGURATION, 0)),
            State::Enable => {
                let enabled = Configuration::enabled();
                (
                    "Property Set of CC",
                    property_set(Register::CONFIGURATION, enabled.0),
                )
            }
            State::AwaitStopped | State::AwaitReady => {
                // Every other time it waits.
                if self.steps % 2 == 1 {
                    self.steps += 1;
                    return Ok(Step::Wait(self.look_after));
                }
                ("Property Get of CSTS", property_get(Register::STATUS, false))
            }
            State::GetVersion => ("Property Get of VS", property_get(Register::VERSION, false)),
            State::Identify => ("Identify Controller", identify(Cns::CONTROLLER, NsId::NONE)),
            State::SetBehavior => (
                "Set Features (host behavior support)",
                set_behavior(CopyFormat::Any.bit()),
            ),
            State::SetQueues => ("Set Features (number of queues)", set_queues(self.queues)),
            State::SetEvents => ("Set Features (asynchronous events)", set_events(self.events())),
            State::RequestEvent => {
                self.state = State::Done;
                return Ok(Step::Post(Box::new(event_request())));
            }
            State::Done => return Ok(Step::Done),
        };
        Ok(Step::Submit(what, Box::new(command)))
    }

    fn connect(&self) -> Command {
        let options = self.options;
        let connect = Connect {
            record_format: 0,
            qid: self.qid,
            sq_size: self.sq_size,
            no_flow_control: self.qid > 0 && !options.controls_flow(),
            keep_alive_ms: match self.qid {
                0 => u32::try_from(options.keep_alive.as_millis()).unwrap_or(u32::MAX),
                _ => 0,
            },
        };
        let data = ConnectData {
            host_id: options.host_id,
            cntlid: self.cntlid,
            subsystem: options.subsystem.clone(),
            host: options.host.clone(),
        };
        let mut bytes = vec![0; CONNECT_DATA_LEN];
        data.emit(&mut bytes);
        Command::sending(connect.command(ANY), bytes)
    }

    fn authenticate(&mut self) -> Result<Step, HostError> {
        let Some(exchange) = &mut self.authentication else {
            return Err(HostError::NoSecret);
        };
        let step = exchange.next()?;
        self.steps += 1;
        if self.steps > AUTH_STEPS_MAX {
            return Err(crate::auth::AuthError::Message.into());
        }
        Ok(match step {
            HostStep::Send(bytes) => {
                let sqe = authentication(FabricsType::AUTHENTICATION_SEND, ANY, bytes.len() as u32);
                Step::Submit("Authentication Send", Box::new(Command::sending(sqe, bytes)))
            }
            HostStep::Receive => {
                let sqe = authentication(FabricsType::AUTHENTICATION_RECEIVE, ANY, AUTH_RECEIVE_LEN);
                let command = Command::receiving(sqe, AUTH_RECEIVE_LEN);
                Step::Submit("Authentication Receive", Box::new(command))
            }
            HostStep::Done => {
                self.connected();
                return self.next();
            }
        })
    }

    /// The queue has its controller's confidence.
    fn connected(&mut self) {
        self.steps = 0;
        self.state = match (self.qid, self.channel) {
            (0, SecureChannel::None) => State::GetCapabilities,
            _ => State::Done,
        };
    }

    /// Takes the completion of a command.
    ///
    /// # Errors
    /// The queue does not become ready.
    pub fn handle(&mut self, what: &'static str, completion: &Completion) -> Result<(), HostError> {
        let result = completion.result;
        // Reporting events is an extra.
        if !completion.status.is_success() && self.state == State::SetEvents {
            self.state = State::Done;
            return Ok(());
        }
        // So is Copy between namespaces: who needs it learns then.
        if !completion.status.is_success() && self.state == State::SetBehavior {
            self.state = State::SetQueues;
            return Ok(());
        }
        if !completion.status.is_success() {
            const CONTROLLER: u64 = ConnectData::CNTLID_AT as u64 | 1 << 16;
            let names_controller =
                completion.status.is(Status::CONNECT_INVALID) && result & 0x1_ffff == CONTROLLER;
            if self.qid > 0 && self.state == State::Connect && names_controller {
                return Err(HostError::NoController { cntlid: self.cntlid });
            }
            let refused = HostError::Refused {
                what,
                status: completion.status,
                hint: hint(completion.status, result),
            };
            return Err(self.failed(refused));
        }
        match self.state {
            State::Connect => self.handle_connect(result)?,
            State::Authenticate => {
                if let (Some(authentication), false) = (
                    &mut self.authentication,
                    completion.command.sqe.is_to_controller(),
                ) {
                    authentication.handle(completion.bytes())?;
                }
            }
            State::GetCapabilities => {
                self.capabilities = Capabilities::parse(result);
                // Pages of 4 KiB have to be among those that it takes.
                if result >> 48 & 0xf != 0 {
                    return Err(HostError::Inconsistent {
                        what: "CAP",
                        why: "takes no pages of 4 KiB".to_owned(),
                    });
                }
                self.state = State::GetConfiguration;
            }
            State::GetConfiguration => {
                self.begin_waiting();
                self.state = match Configuration(result as u32).is_enabled() {
                    true => State::Disable,
                    false => State::Enable,
                };
            }
            State::Disable => {
                self.begin_waiting();
                self.state = State::AwaitStopped;
            }
            State::Enable => {
                self.begin_waiting();
                self.state = State::AwaitReady;
            }
            State::AwaitStopped => self.look(result, result & READY == 0, State::Enable)?,
            State::AwaitReady => self.look(result, result & READY != 0, State::GetVersion)?,
            State::GetVersion => {
                self.version = result as u32;
                self.state = State::Identify;
            }
            State::Identify => {
                let bytes = completion.bytes();
                let identify = IdentifyController::parse(bytes)?;
                self.check(&identify)?;
                let copies = identify.copy_formats & CopyFormat::Any.bit() != 0;
                self.identify = Some((identify, bytes.to_vec()));
                self.state = match self.queues {
                    // A connection to a discovery service that stays is for its events.
                    0 if self.options.is_discovery() && !self.options.keep_alive.is_zero() => {
                        self.to_events()
                    }
                    0 => State::Done,
                    _ if copies => State::SetBehavior,
                    _ => State::SetQueues,
                };
            }
            State::SetBehavior => self.state = State::SetQueues,
            State::SetQueues => {
                self.allowed = queues_of(result);
                self.state = self.to_events();
            }
            State::SetEvents => {
                self.has_events = true;
                self.state = State::RequestEvent;
            }
            State::RequestEvent | State::Done => {}
        }
        Ok(())
    }

    /// Returns why the setup has failed, when a command has: a controller that is told that its proof is wrong may refuse to hear it, or close the
    /// connection.
    pub fn failed(&mut self, error: HostError) -> HostError {
        match (self.state, &mut self.authentication) {
            (State::Authenticate, Some(authentication)) => match authentication.next() {
                Err(why) => why.into(),
                Ok(_) => error,
            },
            _ => error,
        }
    }

    fn handle_connect(&mut self, result: u64) -> Result<(), HostError> {
        let options = self.options;
        let cntlid = result as u16;
        if self.qid == 0 {
            self.cntlid = cntlid;
        }
        let agrees_on_key = self.channel != SecureChannel::None;
        if result & SECURE_CHANNEL_REQUIRED != 0 && !agrees_on_key {
            return Err(HostError::NoSecureChannel);
        }
        if result & AUTHENTICATION_REQUIRED == 0 && !agrees_on_key {
            // The exchange that has led to a key need not be repeated.
            let is_proved = options.psk.as_ref().is_some_and(Psk::is_generated);
            if options.requires_authentication && !is_proved {
                return Err(HostError::NotAuthenticated);
            }
            self.connected();
            return Ok(());
        }
        self.begin_authentication()
    }

    fn begin_authentication(&mut self) -> Result<(), HostError> {
        let options = self.options;
        let secrets = options.secrets.clone().ok_or(HostError::NoSecret)?;
        let parties = Parties {
            host: options.host.clone(),
            subsystem: options.subsystem.clone(),
            secrets,
        };
        // Queues of an association are set up at the same time.
        let transaction = self.qid.wrapping_add(1);
        let authentication =
            HostAuthenticator::new(parties, options.offer.clone(), options.random, transaction);
        self.authentication = Some(authentication.with_channel(self.channel));
        self.state = State::Authenticate;
        self.steps = 0;
        Ok(())
    }

    fn begin_waiting(&mut self) {
        self.patience = TIMEOUT_UNIT * u32::from(self.capabilities.timeout).max(1);
        self.look_after = LOOK_AFTER.0;
        self.steps = 0;
    }

    /// Looks at the controller's status, of which `is_there` says whether it is the one that is waited for.
    fn look(&mut self, status: u64, is_there: bool, then: State) -> Result<(), HostError> {
        if status & FATAL != 0 {
            return Err(HostError::Inconsistent {
                what: "controller",
                why: "has failed (CSTS.CFS)".to_owned(),
            });
        }
        if is_there {
            self.state = then;
            return Ok(());
        }
        if self.patience.is_zero() {
            return Err(HostError::TimedOut {
                what: "the enabling of its controller (CSTS.RDY)",
                within: TIMEOUT_UNIT * u32::from(self.capabilities.timeout).max(1),
            });
        }
        self.steps += 1;
        self.look_after = (self.look_after * 2).min(LOOK_AFTER.1).min(self.patience);
        self.patience -= self.look_after;
        Ok(())
    }

    fn check(&self, identify: &IdentifyController) -> Result<(), HostError> {
        let wrong = |why: String| HostError::Inconsistent {
            what: "Identify Controller",
            why,
        };
        if identify.cntlid != self.cntlid {
            return Err(wrong(format!(
                "names controller {}, but it connected to {}",
                identify.cntlid, self.cntlid
            )));
        }
        if self.options.is_discovery() {
            return Ok(());
        }
        if identify.capsule_bytes < SQE_LEN as u32 {
            return Err(wrong(format!(
                "says that capsules have {} bytes",
                identify.capsule_bytes
            )));
        }
        if identify.sgls & 3 == 0 {
            return Err(wrong("says that it takes no SGLs".to_owned()));
        }
        if self.options.transport == Transport::Rdma && identify.sgls & IdentifyController::SGLS_KEYED == 0 {
            return Err(wrong("says that it takes no keyed SGLs".to_owned()));
        }
        if identify.keep_alive == 0 && !self.options.keep_alive.is_zero() {
            return Err(wrong("says that it has no keep-alive timer".to_owned()));
        }
        Ok(())
    }

    /// Returns the events that the controller reports and this host reads.
    fn events(&self) -> u32 {
        let known = IdentifyController::NAMESPACE_EVENTS
            | IdentifyController::ANA_EVENTS
            | IdentifyController::DISCOVERY_EVENTS;
        self.identify
            .as_ref()
            .map_or(0, |(identify, _)| identify.events & known)
    }

    /// Returns the state in which the host asks for the events that it reads, if there are some.
    fn to_events(&self) -> State {
        match self.events() {
            0 => State::Done,
            _ => State::SetEvents,
        }
    }

    /// Returns the controller of an admin queue that is ready.
    pub fn controller(self) -> Option<ControllerInfo> {
        let (identify, identify_bytes) = self.identify?;
        let transfer_max = match identify.mdts {
            0 => TRANSFER_MAX,
            mdts => 4096u32
                .checked_shl(mdts.into())
                .map_or(TRANSFER_MAX, |max| max.clamp(4096, TRANSFER_MAX)),
        };
        // Data that do not begin right behind the command are not sent in capsules.
        let offset = u16::from_le_bytes([identify_bytes[1800], identify_bytes[1801]]);
        let takes_offset = match self.options.transport {
            Transport::Tcp => true,
            Transport::Rdma => identify.sgls & IdentifyController::SGLS_OFFSET != 0,
        };
        let in_capsule_max = match offset {
            0 if takes_offset => identify
                .capsule_bytes
                .saturating_sub(SQE_LEN as u32)
                .min(TRANSFER_MAX),
            _ => 0,
        };
        Some(ControllerInfo {
            cntlid: self.cntlid,
            queue_entries: self.capabilities.queue_entries,
            version: self.version,
            transfer_max,
            in_capsule_max,
            identify,
            identify_bytes,
            queues: self.allowed,
            has_events: self.has_events,
        })
    }
}

/// Returns what to do about a refused command.
fn hint(status: Status, result: u64) -> &'static str {
    const SUBSYSTEM: u64 = ConnectData::SUBSYSTEM_AT as u64 | 1 << 16;
    if status.is(Status::CONNECT_INVALID) && result & 0x1_ffff == SUBSYSTEM {
        "; it has no subsystem of this name: `rdmux nvme discover` lists them"
    } else if status.is(Status::CONNECT_INVALID_HOST) {
        "; it does not allow this host's name (--hostnqn), or not without TLS"
    } else if status.is(Status::AUTHENTICATION_REQUIRED) {
        "; give the file with its secret with --secret FILE"
    } else {
        ""
    }
}
