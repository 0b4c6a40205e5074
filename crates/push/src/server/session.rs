//! One client's side of the server: what its messages mean. No I/O.

use std::collections::HashSet;
use std::sync::Arc;

use rdmux_wire::push::{Access, ErrorCode, Extent, Message, Name, VERSION};

use crate::key::{Key, Role, Transcript};
use crate::region::Region;

/// What all sessions of a server share.
#[derive(Debug)]
pub struct Shared {
    /// The key that clients need.
    pub key: Key,
    /// What is offered.
    pub regions: Vec<Arc<Region>>,
    /// A client that is silent for so long is taken for dead.
    pub keepalive_ms: u32,
    /// Mappings that one client may hold.
    pub mappings_max: u32,
}

impl Shared {
    fn region(&self, name: &Name) -> Option<&Arc<Region>> {
        self.regions.iter().find(|region| region.name() == name)
    }
}

/// What is to be done about a message.
#[derive(Debug)]
pub enum Action {
    /// Answer it.
    Send(Message),
    /// Register this, then call [`Session::mapped`] and answer with what it returns.
    Map(Map),
    /// End the mapping, then answer with [`Message::Unmapped`].
    Unmap(u64),
    /// Compute the checksum, then answer with [`Message::Checksummed`].
    Checksum {
        /// Of what.
        region: Arc<Region>,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Send this, if anything, and end the connection.
    End(Option<Message>, EndReason),
}

/// A mapping to make, checked.
#[derive(Debug)]
pub struct Map {
    /// Its number.
    pub mapping: u64,
    /// Of what.
    pub region: Arc<Region>,
    /// What for.
    pub access: Access,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The upload it serves, or 0.
    pub transfer: u64,
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The client said goodbye.
    Goodbye,
    /// The client left before it had shown that it has the key.
    LeftHandshake,
    /// The client has another key.
    WrongKey,
    /// The client's version does not fit.
    Version,
    /// A message that is malformed, or out of turn.
    Protocol(String),
    /// The handshake took too long.
    HandshakeTimeout,
    /// The client disconnected without a goodbye, or those who share its address did when it died.
    Disconnected,
    /// The client's NIC does not answer any more.
    Dead,
    /// The connection failed: an access outside of a mapping, or memory that failed.
    Failed(String),
    /// Another connection goes on with its upload.
    TakenOver,
    /// The server ends.
    Shutdown,
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EndReason::Goodbye => f.write_str("goodbye"),
            EndReason::LeftHandshake => f.write_str("it left during the handshake: it may have another key"),
            EndReason::WrongKey => f.write_str("wrong key"),
            EndReason::Version => f.write_str("no version in common"),
            EndReason::Protocol(why) => write!(f, "protocol error: {why}"),
            EndReason::HandshakeTimeout => f.write_str("handshake not finished in time"),
            EndReason::Disconnected => f.write_str("client disconnected without a goodbye, or died"),
            EndReason::Dead => f.write_str("client is dead: no answer within the keep-alive time"),
            EndReason::Failed(why) => f.write_str(why),
            EndReason::TakenOver => f.write_str("another connection goes on with its upload"),
            EndReason::Shutdown => f.write_str("server ends"),
        }
    }
}

#[derive(Debug)]
enum State {
    Start,
    Challenged(Transcript),
    Ready,
    Ended,
}

/// A client's session. Give each message to [`Session::handle`], in order, and do what it says. When an action takes time,
/// further messages may be handled meanwhile.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    nonce: [u8; 32],
    state: State,
    mappings: HashSet<u64>,
    next_mapping: u64,
}

impl Session {
    /// A session with a client of whom nothing is known; `nonce` is random.
    pub fn new(shared: Arc<Shared>, nonce: [u8; 32]) -> Session {
        Session {
            shared,
            nonce,
            state: State::Start,
            mappings: HashSet::new(),
            next_mapping: 1,
        }
    }

    /// Whether the client has shown that it has the key.
    pub fn is_ready(&self) -> bool {
        matches!(self.state, State::Ready)
    }

    /// Takes a message; returns its request id and what is to be done.
    pub fn handle(&mut self, bytes: &[u8]) -> (u64, Action) {
        let (request, message) = match Message::parse(bytes) {
            Ok(parsed) => parsed,
            Err(error) => {
                let why = error.to_string();
                self.state = State::Ended;
                return (0, Action::End(None, EndReason::Protocol(why)));
            }
        };
        let action = match &self.state {
            State::Start => self.hello(message),
            State::Challenged(transcript) => {
                let transcript = *transcript;
                self.proof(&transcript, message)
            }
            State::Ready => self.request(message),
            State::Ended => Action::End(None, EndReason::Goodbye),
        };
        if matches!(action, Action::End(..)) {
            self.state = State::Ended;
        }
        (request, action)
    }

    fn hello(&mut self, message: Message) -> Action {
        let Message::Hello {
            version_min,
            version_max,
            client_nonce,
        } = message
        else {
            return out_of_turn();
        };
        if !(version_min..=version_max).contains(&VERSION) {
            let text = format!("this server speaks version {VERSION} of the push protocol");
            return Action::End(Some(error(ErrorCode::BadVersion, text)), EndReason::Version);
        }
        let transcript = Transcript {
            version_min,
            version_max,
            version: VERSION,
            client_nonce,
            server_nonce: self.nonce,
        };
        self.state = State::Challenged(transcript);
        Action::Send(Message::Challenge {
            version: VERSION,
            server_nonce: self.nonce,
            server_proof: self.shared.key.proof(Role::Server, &transcript),
        })
    }

    fn proof(&mut self, transcript: &Transcript, message: Message) -> Action {
        let Message::Proof { client_proof } = message else {
            return out_of_turn();
        };
        if !self.shared.key.verify(Role::Client, transcript, &client_proof) {
            let text = "the keys differ".to_owned();
            return Action::End(Some(error(ErrorCode::BadKey, text)), EndReason::WrongKey);
        }
        self.state = State::Ready;
        Action::Send(Message::Welcome {
            keepalive_ms: self.shared.keepalive_ms,
            mappings_max: self.shared.mappings_max,
        })
    }

    fn request(&mut self, message: Message) -> Action {
        match message {
            Message::Map {
                region,
                access,
                offset,
                length,
                transfer,
            } => self
                .map(&region, access, offset, length, transfer)
                .unwrap_or_else(Action::Send),
            Message::Unmap { mapping } => {
                if self.mappings.remove(&mapping) {
                    Action::Unmap(mapping)
                } else {
                    Action::Send(error(ErrorCode::Protocol, format!("no mapping {mapping}")))
                }
            }
            Message::Stat { region, transfer } => Action::Send(match self.shared.region(&region) {
                Some(region) => Message::Region(region.describe(transfer)),
                None => self.no_such_region(&region),
            }),
            Message::List => Action::Send(Message::regions(
                self.shared.regions.iter().map(|region| region.describe(0)),
            )),
            Message::Checksum {
                region: name,
                offset,
                length,
            } => {
                let Some(region) = self.shared.region(&name) else {
                    return Action::Send(self.no_such_region(&name));
                };
                match range(region, offset, length) {
                    Ok(()) => Action::Checksum {
                        region: region.clone(),
                        offset,
                        length,
                    },
                    Err(error) => Action::Send(error),
                }
            }
            Message::Goodbye => Action::End(None, EndReason::Goodbye),
            _ => out_of_turn(),
        }
    }

    fn map(
        &mut self,
        name: &Name,
        access: Access,
        offset: u64,
        length: u64,
        transfer: u64,
    ) -> Result<Action, Message> {
        let region = self
            .shared
            .region(name)
            .ok_or_else(|| self.no_such_region(name))?;
        if access.is_empty() {
            return Err(error(ErrorCode::Protocol, "a mapping for nothing".into()));
        }
        if access.contains(Access::WRITE) {
            if region.read_only() {
                return Err(error(ErrorCode::ReadOnly, format!("region {name} is read-only")));
            }
            if let Some(fault) = region.failed() {
                let text = format!("region {name}: its file failed before and takes no more writes: {fault}");
                return Err(error(ErrorCode::Io, text));
            }
        }
        if self.mappings.len() >= self.shared.mappings_max as usize {
            let text = format!("no more than {} mappings for a client", self.shared.mappings_max);
            return Err(error(ErrorCode::Busy, text));
        }
        let length = match length {
            0 => region.bytes().saturating_sub(offset),
            length => length,
        };
        range(region, offset, length)?;
        if length == 0 {
            return Err(out_of_range(region, offset, length));
        }
        let mapping = self.next_mapping;
        self.next_mapping += 1;
        self.mappings.insert(mapping);
        Ok(Action::Map(Map {
            mapping,
            region: region.clone(),
            access,
            offset,
            length,
            transfer,
        }))
    }

    /// A mapping was made, as `extent`; or it was not.
    pub fn mapped(&mut self, map: &Map, made: Result<Extent, (ErrorCode, String)>) -> Message {
        match made {
            Ok(extent) => Message::Mapped {
                mapping: map.mapping,
                region_bytes: map.region.bytes(),
                domain: map.region.domain(),
                placement: map.region.placement(),
                extents: vec![extent],
            },
            Err((code, text)) => {
                self.mappings.remove(&map.mapping);
                error(code, text)
            }
        }
    }

    fn no_such_region(&self, name: &Name) -> Message {
        let mut text = format!("no region '{name}'; the server has ");
        for (at, region) in self.shared.regions.iter().enumerate() {
            if at == 8 {
                text.push_str(", ...");
                break;
            }
            text.push_str(if at == 0 { "" } else { ", " });
            text.push_str(region.name().as_str());
        }
        error(ErrorCode::NoSuchRegion, text)
    }
}

fn error(code: ErrorCode, text: String) -> Message {
    Message::Error { code, text }
}

fn out_of_turn() -> Action {
    let message = error(ErrorCode::Protocol, "message out of turn".into());
    Action::End(Some(message), EndReason::Protocol("message out of turn".into()))
}

fn range(region: &Region, offset: u64, length: u64) -> Result<(), Message> {
    let fits = offset
        .checked_add(length)
        .is_some_and(|end| end <= region.bytes());
    fits.then_some(())
        .ok_or_else(|| out_of_range(region, offset, length))
}

fn out_of_range(region: &Region, offset: u64, length: u64) -> Message {
    let text = format!(
        "{length} bytes at {offset} do not fit region {}, which has {}",
        region.name(),
        region.bytes()
    );
    error(ErrorCode::OutOfRange, text)
}

#[cfg(test)]
mod tests {
    use rdmux_wire::RKey;

    use super::*;

    fn shared() -> Arc<Shared> {
        let region = |name: &str| Arc::new(Region::anonymous(Name::new(name).unwrap(), 1000).unwrap());
        let constant = Region::anonymous(Name::new("constant").unwrap(), 10).unwrap();
        let constant = Region::new(
            constant.name().clone(),
            constant.memory().clone(),
            constant.domain(),
            true,
        );
        Arc::new(Shared {
            key: Key::new([1; 32]),
            regions: vec![region("a"), region("b"), Arc::new(constant)],
            keepalive_ms: 5_000,
            mappings_max: 2,
        })
    }

    fn bytes(message: &Message) -> Vec<u8> {
        let mut out = Vec::new();
        message.emit(9, &mut out);
        out
    }

    fn hello() -> Message {
        Message::Hello {
            version_min: 1,
            version_max: 1,
            client_nonce: [5; 32],
        }
    }

    fn proof(key: u8) -> Message {
        let transcript = Transcript {
            version_min: 1,
            version_max: 1,
            version: 1,
            client_nonce: [5; 32],
            server_nonce: [6; 32],
        };
        Message::Proof {
            client_proof: Key::new([key; 32]).proof(Role::Client, &transcript),
        }
    }

    fn ready() -> Session {
        let mut session = Session::new(shared(), [6; 32]);
        assert!(matches!(
            session.handle(&bytes(&hello())),
            (9, Action::Send(Message::Challenge { .. }))
        ));
        let (_, action) = session.handle(&bytes(&proof(1)));
        assert!(matches!(action, Action::Send(Message::Welcome { .. })));
        assert!(session.is_ready());
        session
    }

    fn map(region: &str, access: Access, offset: u64, length: u64) -> Message {
        Message::Map {
            region: Name::new(region).unwrap(),
            access,
            offset,
            length,
            transfer: 0,
        }
    }

    fn refused(session: &mut Session, message: &Message) -> ErrorCode {
        match session.handle(&bytes(message)).1 {
            Action::Send(Message::Error { code, .. }) => code,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn handle__nothing_but_the_handshake_before_welcome() {
        let all = [
            map("a", Access::READ, 0, 0),
            Message::Unmap { mapping: 1 },
            Message::Stat {
                region: Name::new("a").unwrap(),
                transfer: 0,
            },
            Message::List,
            Message::Checksum {
                region: Name::new("a").unwrap(),
                offset: 0,
                length: 1,
            },
            Message::Goodbye,
            Message::Unmapped,
        ];
        for greeted in [false, true] {
            for message in &all {
                let mut session = Session::new(shared(), [6; 32]);
                if greeted {
                    session.handle(&bytes(&hello()));
                }
                let (_, action) = session.handle(&bytes(message));
                assert!(
                    matches!(
                        action,
                        Action::End(
                            Some(Message::Error {
                                code: ErrorCode::Protocol,
                                ..
                            }),
                            _
                        )
                    ),
                    "{message:?}: {action:?}"
                );
                let (_, action) = session.handle(&bytes(&hello()));
                assert!(matches!(action, Action::End(None, _)), "it stays ended");
            }
        }
        let mut session = Session::new(shared(), [6; 32]);
        assert!(matches!(
            session.handle(&bytes(&proof(1))).1,
            Action::End(Some(_), _)
        ));
    }

    #[test]
    fn handle__wrong_proof_or_version_ends() {
        let mut session = Session::new(shared(), [6; 32]);
        session.handle(&bytes(&hello()));
        let (_, action) = session.handle(&bytes(&proof(2)));
        assert!(
            matches!(action, Action::End(Some(_), EndReason::WrongKey)),
            "{action:?}"
        );
        assert!(!session.is_ready());

        let mut session = Session::new(shared(), [6; 32]);
        let newer = Message::Hello {
            version_min: 2,
            version_max: 3,
            client_nonce: [0; 32],
        };
        let (_, action) = session.handle(&bytes(&newer));
        assert!(
            matches!(action, Action::End(Some(_), EndReason::Version)),
            "{action:?}"
        );
    }

    #[test]
    fn handle__malformed_ends_without_an_answer() {
        let mut session = ready();
        let (_, action) = session.handle(&[1, 2, 3]);
        assert!(matches!(action, Action::End(None, EndReason::Protocol(_))));
    }

    #[test]
    fn handle__map_checks_name_rights_and_bounds() {
        let mut session = ready();
        let rw = Access::READ | Access::WRITE;
        assert_eq!(
            refused(&mut session, &map("x", rw, 0, 1)),
            ErrorCode::NoSuchRegion
        );
        assert_eq!(
            refused(&mut session, &map("constant", rw, 0, 1)),
            ErrorCode::ReadOnly
        );
        assert_eq!(
            refused(&mut session, &map("a", Access::empty(), 0, 1)),
            ErrorCode::Protocol
        );
        for (offset, length) in [
            (0, 1001),
            (1000, 0),
            (1000, 1),
            (u64::MAX, 2),
            (1, u64::MAX),
            (2000, 0),
        ] {
            let code = refused(&mut session, &map("a", rw, offset, length));
            assert_eq!(code, ErrorCode::OutOfRange, "{offset} {length}");
        }
        let (_, action) = session.handle(&bytes(&map("a", rw, 10, 0)));
        let Action::Map(map) = action else { panic!() };
        assert_eq!((map.offset, map.length), (10, 990));
    }

    #[test]
    fn handle__map_up_to_the_limit_and_again_after_unmap() {
        let mut session = ready();
        let message = map("a", Access::READ, 0, 10);
        let extent = Extent {
            offset: 0,
            length: 10,
            va: 0,
            rkey: RKey(1),
        };
        let mut ids = Vec::new();
        for _ in 0..2 {
            let Action::Map(map) = session.handle(&bytes(&message)).1 else {
                panic!()
            };
            assert!(matches!(session.mapped(&map, Ok(extent)), Message::Mapped { .. }));
            ids.push(map.mapping);
        }
        assert_ne!(ids[0], ids[1]);
        assert_eq!(refused(&mut session, &message), ErrorCode::Busy);
        let unmap = Message::Unmap { mapping: ids[0] };
        assert!(matches!(session.handle(&bytes(&unmap)).1, Action::Unmap(id) if id == ids[0]));
        assert_eq!(refused(&mut session, &unmap), ErrorCode::Protocol);
        let Action::Map(map) = session.handle(&bytes(&message)).1 else {
            panic!()
        };
        // One that could not be made does not count.
        session.mapped(&map, Err((ErrorCode::Busy, String::new())));
        assert!(matches!(session.handle(&bytes(&message)).1, Action::Map(_)));
    }

    #[test]
    fn handle__stat_list_checksum_goodbye() {
        let mut session = ready();
        let name = |name: &str| Name::new(name).unwrap();
        let stat = |region| Message::Stat { region, transfer: 0 };
        let (_, action) = session.handle(&bytes(&stat(name("b"))));
        assert!(matches!(action, Action::Send(Message::Region(region)) if region.bytes == 1000));
        assert_eq!(refused(&mut session, &stat(name("x"))), ErrorCode::NoSuchRegion);
        let (_, action) = session.handle(&bytes(&Message::List));
        assert!(matches!(action, Action::Send(Message::Regions { total: 3, .. })));
        let checksum = |region, length| Message::Checksum {
            region,
            offset: 1,
            length,
        };
        assert_eq!(
            refused(&mut session, &checksum(name("x"), 1)),
            ErrorCode::NoSuchRegion
        );
        assert_eq!(
            refused(&mut session, &checksum(name("a"), 1000)),
            ErrorCode::OutOfRange
        );
        let (_, action) = session.handle(&bytes(&checksum(name("a"), 999)));
        assert!(matches!(action, Action::Checksum { .. }));
        let (_, action) = session.handle(&bytes(&Message::Goodbye));
        assert!(matches!(action, Action::End(None, EndReason::Goodbye)));
    }
}
