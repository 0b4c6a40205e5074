//! The server's side of one client: the meaning of its messages. No I/O.

use std::collections::HashMap;
use std::sync::Arc;

use rdmux_key::Key;
use rdmux_verbs::Placement;
use rdmux_wire::push::{Access, Conflict, ErrorCode, Message, Name, VERSION};

use crate::proof::{Role, Transcript};
use crate::region::Region;
use crate::server::id::{MappingId, RegionId};
use crate::server::service::Registered;

/// State that all sessions of a server share.
#[derive(Debug)]
pub struct Shared {
    /// The key that clients need.
    pub key: Key,
    /// The regions that the server offers.
    pub regions: Vec<Arc<Region>>,
    /// Time of silence after which a client is taken for dead.
    pub keepalive_ms: u32,
    /// Mappings that one client may hold.
    pub mappings_max: u32,
    /// Messages of one client that may be unanswered at a time.
    pub messages_max: u16,
}

impl Shared {
    fn region(&self, name: &Name) -> Option<(RegionId, &Arc<Region>)> {
        let mut known = self.regions.iter().enumerate();
        let (at, region) = known.find(|(_, region)| region.name() == name)?;
        Some((RegionId(at), region))
    }
}

/// The action that a message requires.
#[derive(Debug)]
pub enum Action {
    /// Answer it.
    Send(Message),
    /// Revoke all mappings of earlier connections of this client, then answer with [`Session::welcome`].
    Welcome {
        /// The client; zeros for one that has no name.
        client: [u8; 16],
    },
    /// Register this, then call [`Session::mapped`] and answer with what it returns.
    Map(Map),
    /// End the mapping, then answer with [`Message::Unmapped`].
    Unmap(MappingId),
    /// Make the mapping's keys invalid, then answer with [`Message::Released`].
    Release(MappingId),
    /// Flush a range of the mapping, then answer with [`Message::Flushed`].
    Flush {
        /// The mapping, whose keys may be invalid.
        mapping: MappingId,
        /// First byte, in the region.
        offset: u64,
        /// Bytes.
        length: u64,
        /// The kind of flush.
        placement: Placement,
    },
    /// Write, then answer with [`Message::Written`].
    Write(Ordinary, Vec<u8>, Placement),
    /// Read, then answer with [`Message::Bytes`].
    Read(Ordinary),
    /// The client has taken the notice of this number; there is no answer.
    Noticed(u64),
    /// Compute the checksum, then answer with [`Message::Checksummed`].
    Checksum {
        /// The region.
        region: Arc<Region>,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Send this, if anything, and end the connection.
    End(Option<Message>, EndReason),
}

/// An ordinary read or write, checked.
#[derive(Debug)]
pub struct Ordinary {
    /// Number of the region.
    pub number: RegionId,
    /// The region.
    pub region: Arc<Region>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Treatment of a conflicting lease.
    pub conflict: Conflict,
}

/// A mapping to make, checked.
#[derive(Debug)]
pub struct Map {
    /// Number of the mapping.
    pub mapping: MappingId,
    /// Number of the region.
    pub number: RegionId,
    /// The region.
    pub region: Arc<Region>,
    /// Access of the mapping.
    pub access: Access,
    /// Access that others may have there meanwhile.
    pub share: Access,
    /// Treatment of a conflicting lease.
    pub conflict: Conflict,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The upload it serves, or 0.
    pub transfer: u64,
}

/// Reason why a connection ended.
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
    /// A message that is malformed, or out of order.
    Protocol(String),
    /// The handshake took too long.
    HandshakeTimeout,
    /// The client disconnected without a goodbye, or those that share its address disconnected it when it died.
    Disconnected,
    /// The client's NIC no longer answers.
    Dead,
    /// The connection failed: an access outside of a mapping, or memory that failed.
    Failed(String),
    /// Another connection continues its upload.
    TakenOver,
    /// The client connected again.
    ConnectedAgain,
    /// The server ends.
    Shutdown,
}

impl std::fmt::Display for EndReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EndReason::Goodbye => f.write_str("goodbye"),
            EndReason::LeftHandshake => {
                f.write_str("the client disconnected during the handshake: it may have another key")
            }
            EndReason::WrongKey => f.write_str("wrong key"),
            EndReason::Version => f.write_str("no common protocol version"),
            EndReason::Protocol(why) => write!(f, "protocol error: {why}"),
            EndReason::HandshakeTimeout => f.write_str("handshake not finished in time"),
            EndReason::Disconnected => f.write_str("client disconnected without a goodbye, or died"),
            EndReason::Dead => f.write_str("client is dead: no answer within the keep-alive time"),
            EndReason::Failed(why) => f.write_str(why),
            EndReason::TakenOver => f.write_str("another connection continues its upload"),
            EndReason::ConnectedAgain => f.write_str("the client reconnected"),
            EndReason::Shutdown => f.write_str("the server is shutting down"),
        }
    }
}

/// A session's record of a mapping.
#[derive(Debug)]
struct Known {
    number: RegionId,
    access: Access,
    offset: u64,
    length: u64,
    /// Set while the keys are valid, or will be once the mapping is made.
    live: bool,
}

#[derive(Debug)]
enum SessionState {
    Start,
    Challenged(Transcript),
    Ready,
    Ended,
}

/// A client's session. The caller passes each message to [`Session::handle`], in order, and performs the action that it
/// returns. While an action takes time, the session may handle further messages.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    nonce: [u8; 32],
    state: SessionState,
    mappings: HashMap<MappingId, Known>,
    mappings_so_far: u64,
}

impl Session {
    /// Creates a session with an unknown client; `nonce` is random.
    pub fn new(shared: Arc<Shared>, nonce: [u8; 32]) -> Session {
        Session {
            shared,
            nonce,
            state: SessionState::Start,
            mappings: HashMap::new(),
            mappings_so_far: 0,
        }
    }

    /// Returns whether the client has proved that it has the key.
    pub fn is_ready(&self) -> bool {
        matches!(self.state, SessionState::Ready)
    }

    /// Handles a message; returns its request id and the action that it requires.
    pub fn handle(&mut self, bytes: &[u8]) -> (u64, Action) {
        let (request, message) = match Message::parse(bytes) {
            Ok(parsed) => parsed,
            Err(error) => {
                let why = error.to_string();
                self.state = SessionState::Ended;
                return (0, Action::End(None, EndReason::Protocol(why)));
            }
        };
        let action = match &self.state {
            SessionState::Ready if message == Message::Noticed => Action::Noticed(request),
            SessionState::Start => self.hello(message),
            SessionState::Challenged(transcript) => {
                let transcript = *transcript;
                self.proof(&transcript, message)
            }
            SessionState::Ready => self.request(message),
            SessionState::Ended => Action::End(None, EndReason::Goodbye),
        };
        if matches!(action, Action::End(..)) {
            self.state = SessionState::Ended;
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
            return out_of_order();
        };
        if !(version_min..=version_max).contains(&VERSION) {
            let text = format!("this server supports version {VERSION} of the push protocol");
            return Action::End(Some(error(ErrorCode::BadVersion, text)), EndReason::Version);
        }
        let transcript = Transcript {
            version_min,
            version_max,
            version: VERSION,
            client_nonce,
            server_nonce: self.nonce,
            client: [0; 16],
        };
        self.state = SessionState::Challenged(transcript);
        Action::Send(Message::Challenge {
            version: VERSION,
            server_nonce: self.nonce,
            server_proof: transcript.proof(&self.shared.key, Role::Server),
        })
    }

    fn proof(&mut self, transcript: &Transcript, message: Message) -> Action {
        let Message::Proof { client_proof, client } = message else {
            return out_of_order();
        };
        let transcript = Transcript {
            client,
            ..*transcript
        };
        if !transcript.verify(&self.shared.key, Role::Client, &client_proof) {
            let text = "the keys differ".to_owned();
            return Action::End(Some(error(ErrorCode::BadKey, text)), EndReason::WrongKey);
        }
        self.state = SessionState::Ready;
        Action::Welcome { client }
    }

    /// Returns the welcome for a known client of which no earlier mapping is left; `revoked` is the number of those revoked.
    pub fn welcome(&self, revoked: u32) -> Message {
        Message::Welcome {
            keepalive_ms: self.shared.keepalive_ms,
            mappings_max: self.shared.mappings_max,
            messages_max: self.shared.messages_max,
            revoked,
        }
    }

    fn request(&mut self, message: Message) -> Action {
        match message {
            map @ Message::Map { .. } => self.map(map).unwrap_or_else(Action::Send),
            Message::Unmap { mapping } => match self.mappings.remove(&MappingId(mapping)) {
                Some(_) => Action::Unmap(MappingId(mapping)),
                None => Action::Send(no_mapping(MappingId(mapping))),
            },
            Message::Release { mapping } => match self.mappings.get_mut(&MappingId(mapping)) {
                Some(known) => {
                    known.live = false;
                    Action::Release(MappingId(mapping))
                }
                None => Action::Send(no_mapping(MappingId(mapping))),
            },
            Message::Flush {
                mapping,
                offset,
                length,
                placement,
            } => self
                .flush(MappingId(mapping), offset, length, placement)
                .unwrap_or_else(Action::Send),
            Message::Write {
                region,
                offset,
                placement,
                conflict,
                bytes,
            } => {
                let length = bytes.len() as u64;
                match self.ordinary(&region, Access::WRITE, offset, length, conflict) {
                    Ok(ordinary) if ordinary.region.placement().contains(placement) => {
                        Action::Write(ordinary, bytes, placement)
                    }
                    Ok(_) => Action::Send(keeps_nothing(&region)),
                    Err(error) => Action::Send(error),
                }
            }
            Message::Read {
                region,
                offset,
                length,
                conflict,
            } => self
                .ordinary(&region, Access::READ, offset, length.into(), conflict)
                .map_or_else(Action::Send, Action::Read),
            Message::Stat { region, transfer } => Action::Send(match self.shared.region(&region) {
                Some((_, region)) => Message::Region(region.describe(transfer)),
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
                let Some((_, region)) = self.shared.region(&name) else {
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
            _ => out_of_order(),
        }
    }

    fn map(&mut self, map: Message) -> Result<Action, Message> {
        let Message::Map {
            region: name,
            access,
            share,
            conflict,
            offset,
            length,
            transfer,
        } = map
        else {
            return Ok(out_of_order());
        };
        if access.is_empty() {
            return Err(error(
                ErrorCode::Protocol,
                "a mapping without read or write access".into(),
            ));
        }
        let (number, region) = self.writable(&name, access)?;
        if self.mappings.len() >= self.shared.mappings_max as usize {
            let text = format!("a client may have at most {} mappings", self.shared.mappings_max);
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
        let region = region.clone();
        self.mappings_so_far += 1;
        let mapping = MappingId(self.mappings_so_far);
        let known = Known {
            number,
            access,
            offset,
            length,
            live: true,
        };
        self.mappings.insert(mapping, known);
        Ok(Action::Map(Map {
            mapping,
            number,
            region,
            access,
            share,
            conflict,
            offset,
            length,
            transfer,
        }))
    }

    /// Returns the region of that name, if it allows `access`.
    fn writable(&self, name: &Name, access: Access) -> Result<(RegionId, &Arc<Region>), Message> {
        let (number, region) = self
            .shared
            .region(name)
            .ok_or_else(|| self.no_such_region(name))?;
        if access.contains(Access::WRITE) {
            if region.read_only() {
                return Err(error(ErrorCode::ReadOnly, format!("region {name} is read-only")));
            }
            if let Some(fault) = region.failed() {
                let text =
                    format!("region {name}: its file failed before and accepts no more writes: {fault}");
                return Err(error(ErrorCode::Io, text));
            }
        }
        Ok((number, region))
    }

    fn flush(
        &self,
        mapping: MappingId,
        offset: u64,
        length: u64,
        placement: Placement,
    ) -> Result<Action, Message> {
        let known = self.mappings.get(&mapping).ok_or_else(|| no_mapping(mapping))?;
        let region = &self.shared.regions[known.number.0];
        if !known.access.contains(Access::WRITE) {
            let text = format!(
                "mapping {mapping} of region {} has no write access",
                region.name()
            );
            return Err(error(ErrorCode::ReadOnly, text));
        }
        let end = offset.checked_add(length);
        if offset < known.offset || end.is_none_or(|end| end > known.offset + known.length) {
            let text = format!(
                "{length} bytes at {offset} are outside mapping {mapping}, which has {} at {}",
                known.length, known.offset
            );
            return Err(error(ErrorCode::OutOfRange, text));
        }
        if placement.is_empty() || !region.placement().contains(placement) {
            return Err(keeps_nothing(region.name()));
        }
        Ok(Action::Flush {
            mapping,
            offset,
            length,
            placement,
        })
    }

    fn ordinary(
        &self,
        name: &Name,
        access: Access,
        offset: u64,
        length: u64,
        conflict: Conflict,
    ) -> Result<Ordinary, Message> {
        let (number, region) = self.writable(name, access)?;
        range(region, offset, length)?;
        Ok(Ordinary {
            number,
            region: region.clone(),
            offset,
            length,
            conflict,
        })
    }

    /// Notes that a mapping was revoked: it can still be flushed.
    pub fn revoked(&mut self, mapping: MappingId) {
        if let Some(known) = self.mappings.get_mut(&mapping) {
            known.live = false;
        }
    }

    /// Returns whether a mapping's keys are valid.
    pub fn is_live(&self, mapping: MappingId) -> bool {
        self.mappings.get(&mapping).is_some_and(|known| known.live)
    }

    /// Notes whether a mapping was made, and returns the answer to the client.
    pub fn mapped(&mut self, map: &Map, made: Result<Registered, (ErrorCode, String)>) -> Message {
        match made {
            Ok(registered) => Message::Mapped {
                mapping: map.mapping.0,
                region_bytes: map.region.bytes(),
                domain: map.region.domain(),
                placement: map.region.placement(),
                ways: registered.ways,
                extents: registered.extent.into_iter().collect(),
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

fn no_mapping(mapping: MappingId) -> Message {
    error(ErrorCode::Protocol, format!("no mapping {mapping}"))
}

fn keeps_nothing(region: &Name) -> Message {
    let text = format!(
        "region {region} does not survive a loss of power, so a persistent flush is refused: flush for visibility"
    );
    error(ErrorCode::NotSupported, text)
}

fn out_of_order() -> Action {
    let message = error(ErrorCode::Protocol, "unexpected message".into());
    Action::End(Some(message), EndReason::Protocol("unexpected message".into()))
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
pub(super) mod tests;
