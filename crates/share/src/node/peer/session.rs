//! One control connection of two nodes: the handshake, and the questions of both. No I/O and no clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rdmux_key::Key;
use rdmux_wire::Malformed;
use rdmux_wire::node::peer::{Engines, Message, NodeId, QUESTIONS_MAX, Reason, VERSION};

/// Time for the handshake, and for the answer to a question.
pub(super) const ANSWER_TIME: Duration = Duration::from_millis(500);
/// Time for the answer to [`Message::KeyGone`], which waits for accesses in flight.
pub(crate) const RELEASE_TIME: Duration = Duration::from_secs(5);
/// Questions that wait until others are answered.
const WAITING_MAX: usize = 1 << 16;

/// A node as it shows itself to another one.
#[derive(Debug)]
pub(super) struct Identity {
    /// The key of all nodes that may talk to each other.
    pub(super) key: Key,
    /// This run of the node.
    pub(super) node: NodeId,
    /// The address of its device.
    pub(super) address: IpAddr,
    /// The engines of that.
    pub(super) engines: Engines,
}

/// Which node has connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// This one.
    Connects,
    /// The other one.
    Accepts,
}

/// Why a session is over.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    /// The other node has sent what is no message.
    #[error("it sent no valid message: {0}")]
    Malformed(#[from] Malformed),
    /// A message that is not sent at this point.
    #[error("{0} was not expected")]
    Unexpected(&'static str),
    /// The other node does not have the key.
    #[error("its key is another one")]
    Key,
    /// The versions have none in common.
    #[error("its version is another one")]
    Version,
    /// The other node does not answer.
    #[error("it does not answer")]
    Silent,
    /// It is the run that was known before ([`Session::only_asks_for`]).
    #[error("it is the same run of the node")]
    Same,
    /// It is another one.
    #[error("it is another run of the node")]
    Other,
    /// More questions than it may ask, or than this node wants to keep.
    #[error("there are too many questions")]
    TooMany,
}

/// Outcome of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard<T> {
    /// Nothing for the owner.
    Nothing,
    /// Both nodes have the same key. The other node, with its engine.
    Agreed(NodeId, Engines),
    /// A question, to be answered by [`Session::answer`].
    Question { request: u32, message: Message },
    /// The answer to a question of this node.
    Answer { tag: T, message: Message },
}

/// The bytes that the proofs cover, besides their label: all that both have said.
#[derive(Clone, Copy, Debug)]
struct Transcript {
    versions: (u16, u16, u16),
    nonces: ([u8; 32], [u8; 32]),
    nodes: (NodeId, NodeId),
    /// As each end knows them. A third node that passes the messages of two others on has another address.
    addresses: (IpAddr, IpAddr),
}

impl Transcript {
    fn parts<R>(&self, prover: Role, f: impl FnOnce(&[&[u8]]) -> R) -> R {
        let label: &[u8] = match prover {
            Role::Connects => b"rdmux node: proof of the one that connects\0",
            Role::Accepts => b"rdmux node: proof of the one that accepts\0",
        };
        let (min, max, version) = self.versions;
        let octets = |address| match address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        };
        f(&[
            label,
            &min.to_be_bytes(),
            &max.to_be_bytes(),
            &version.to_be_bytes(),
            &self.nonces.0,
            &self.nonces.1,
            &self.nodes.0.0,
            &self.nodes.1.0,
            &octets(self.addresses.0),
            &octets(self.addresses.1),
        ])
    }

    fn proof(&self, key: &Key, prover: Role) -> [u8; 32] {
        self.parts(prover, |parts| key.proof(parts))
    }

    fn verify(&self, key: &Key, prover: Role, proof: &[u8; 32]) -> bool {
        self.parts(prover, |parts| key.verify(parts, proof))
    }
}

#[derive(Debug)]
enum Stage {
    /// The one that connects has sent Hello; the other one waits for it.
    Hello,
    /// The one that accepts waits for the proof.
    Challenged(Transcript),
    /// The one that connects has sent its proof.
    Proved(NodeId),
    /// Both have the same key, and the other node has not told its engine.
    Trusted(NodeId),
    Agreed,
    Over,
}

#[derive(Debug)]
struct Asked<T> {
    tag: T,
    deadline: Instant,
}

/// A session. The caller passes each message to [`Session::handle`], in order, does what comes of it, and then sends what [`Session::next_message`]
/// returns, until there is no more. After [`Broken`] it disconnects. `T` tells the caller which question an answer belongs to.
#[derive(Debug)]
pub(super) struct Session<T> {
    role: Role,
    peer: IpAddr,
    nonce: [u8; 32],
    /// The run of the other node for which it only asks.
    former: Option<NodeId>,
    stage: Stage,
    /// Time at which the handshake has failed.
    handshake: Instant,
    out: VecDeque<(u32, Message)>,
    waiting: VecDeque<(Message, T)>,
    asked: BTreeMap<u32, Asked<T>>,
    request: u32,
    /// Questions of the other node without an answer.
    theirs: BTreeSet<u32>,
}

impl<T> Session<T> {
    /// Begins a session with the node at an address; `nonce` is random.
    pub(super) fn new(
        role: Role,
        identity: &Identity,
        peer: IpAddr,
        nonce: [u8; 32],
        now: Instant,
    ) -> Session<T> {
        let mut session = Session {
            role,
            peer,
            nonce,
            former: None,
            stage: Stage::Hello,
            handshake: now + ANSWER_TIME,
            out: VecDeque::new(),
            waiting: VecDeque::new(),
            asked: BTreeMap::new(),
            request: 0,
            theirs: BTreeSet::new(),
        };
        if role == Role::Connects {
            let hello = Message::Hello {
                version_min: VERSION,
                version_max: VERSION,
                nonce,
                node: identity.node,
            };
            session.out.push_back((0, hello));
        }
        session
    }

    /// Has it end with [`Broken::Same`] or [`Broken::Other`] once the other node has shown that it has the key, and whether it is this run. This end
    /// connects.
    pub(super) fn only_asks_for(&mut self, former: NodeId) {
        self.former = Some(former);
    }

    /// Returns whether both nodes have the same key, and know each other's engine.
    pub(super) fn is_agreed(&self) -> bool {
        matches!(self.stage, Stage::Agreed)
    }

    /// Asks a question, before the agreement too: then it waits for that.
    ///
    /// # Errors
    /// [`Broken::TooMany`]: the other node answers more slowly than this one asks.
    pub(super) fn ask(&mut self, message: Message, tag: T) -> Result<(), Broken> {
        debug_assert!(message.is_question());
        if self.waiting.len() >= WAITING_MAX {
            return Err(Broken::TooMany);
        }
        self.waiting.push_back((message, tag));
        Ok(())
    }

    /// Answers a question. Does nothing if it was answered.
    pub(super) fn answer(&mut self, request: u32, message: Message) {
        if self.theirs.remove(&request) {
            self.out.push_back((request, message));
        }
    }

    /// Puts the next message to be sent into `bytes`. Returns false if there is none.
    pub(super) fn next_message(&mut self, now: Instant, bytes: &mut Vec<u8>) -> bool {
        if let Some((request, message)) = self.out.pop_front() {
            message.emit(request, bytes);
            return true;
        }
        if !self.is_agreed() || self.asked.len() >= QUESTIONS_MAX {
            return false;
        }
        let Some((message, tag)) = self.waiting.pop_front() else {
            return false;
        };
        let time = match message {
            Message::KeyGone { .. } => RELEASE_TIME,
            _ => ANSWER_TIME,
        };
        // 0 is that of the handshake. One that is not answered yet has another number: there are far fewer of them.
        self.request = self.request.wrapping_add(1).max(1);
        message.emit(self.request, bytes);
        let deadline = now + time;
        self.asked.insert(self.request, Asked { tag, deadline });
        true
    }

    /// Returns the questions without an answer.
    pub(super) fn into_unanswered(self) -> impl Iterator<Item = T> {
        let asked = self.asked.into_values().map(|asked| asked.tag);
        asked.chain(self.waiting.into_iter().map(|(_, tag)| tag))
    }

    /// Returns when [`Session::check_time`] is to be called.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Agreed => self.asked.values().map(|asked| asked.deadline).min(),
            Stage::Over => None,
            _ => Some(self.handshake),
        }
    }

    /// Checks that the other node has answered in time.
    pub(super) fn check_time(&mut self, now: Instant) -> Result<(), Broken> {
        match self.deadline() {
            Some(deadline) if deadline <= now => self.fail(Broken::Silent),
            _ => Ok(()),
        }
    }

    /// Handles a message.
    pub(super) fn handle(&mut self, identity: &Identity, bytes: &[u8]) -> Result<Heard<T>, Broken> {
        let (request, message) = match Message::parse(bytes) {
            Ok(parsed) => parsed,
            Err(error) => return self.fail(error.into()),
        };
        match (&self.stage, self.role) {
            (Stage::Agreed, _) if message.is_question() => self.question(request, message),
            (Stage::Agreed, _) => self.answered(request, message),
            (Stage::Over, _) => self.fail(Broken::Unexpected(message.name())),
            (Stage::Trusted(node), _) => self.introduced(*node, request, message),
            (_, Role::Connects) => self.challenged(identity, request, message),
            (_, Role::Accepts) => self.greeted(identity, request, message),
        }
    }

    fn fail<R>(&mut self, why: Broken) -> Result<R, Broken> {
        self.stage = Stage::Over;
        Err(why)
    }

    /// Refuses the handshake. The refusal is sent before the connection ends.
    fn refuse<R>(&mut self, reason: Reason, why: Broken) -> Result<R, Broken> {
        self.out.push_back((0, Message::Refused { reason }));
        self.fail(why)
    }

    /// The handshake of the one that accepts.
    fn greeted(&mut self, identity: &Identity, request: u32, message: Message) -> Result<Heard<T>, Broken> {
        match (&self.stage, message) {
            (
                Stage::Hello,
                Message::Hello {
                    version_min,
                    version_max,
                    nonce,
                    node,
                },
            ) if request == 0 => {
                if !(version_min..=version_max).contains(&VERSION) {
                    return self.refuse(Reason::Version, Broken::Version);
                }
                let transcript = Transcript {
                    versions: (version_min, version_max, VERSION),
                    nonces: (nonce, self.nonce),
                    nodes: (node, identity.node),
                    addresses: (self.peer, identity.address),
                };
                let challenge = Message::Challenge {
                    version: VERSION,
                    nonce: self.nonce,
                    node: identity.node,
                    proof: transcript.proof(&identity.key, Role::Accepts),
                };
                self.out.push_back((0, challenge));
                self.stage = Stage::Challenged(transcript);
                Ok(Heard::Nothing)
            }
            (Stage::Challenged(transcript), Message::Proof { proof }) if request == 0 => {
                if !transcript.verify(&identity.key, Role::Connects, &proof) {
                    return self.refuse(Reason::Key, Broken::Key);
                }
                let peer = transcript.nodes.0;
                self.out.push_back((0, Message::Agreed {}));
                self.introduce(identity, peer);
                Ok(Heard::Nothing)
            }
            (_, Message::Refused { reason }) => self.refused(reason),
            (_, other) => self.fail(Broken::Unexpected(other.name())),
        }
    }

    /// The handshake of the one that connects.
    fn challenged(
        &mut self,
        identity: &Identity,
        request: u32,
        message: Message,
    ) -> Result<Heard<T>, Broken> {
        match (&self.stage, message) {
            (
                Stage::Hello,
                Message::Challenge {
                    version,
                    nonce,
                    node,
                    proof,
                },
            ) if request == 0 => {
                if version != VERSION {
                    return self.refuse(Reason::Version, Broken::Version);
                }
                let transcript = Transcript {
                    versions: (VERSION, VERSION, version),
                    nonces: (self.nonce, nonce),
                    nodes: (identity.node, node),
                    addresses: (identity.address, self.peer),
                };
                // One that cannot prove that it has the key gets no proof of this one.
                if !transcript.verify(&identity.key, Role::Accepts, &proof) {
                    return self.refuse(Reason::Key, Broken::Key);
                }
                if let Some(former) = self.former {
                    return self.fail(match former == node {
                        true => Broken::Same,
                        false => Broken::Other,
                    });
                }
                let proof = transcript.proof(&identity.key, Role::Connects);
                self.out.push_back((0, Message::Proof { proof }));
                self.stage = Stage::Proved(node);
                Ok(Heard::Nothing)
            }
            (Stage::Proved(node), Message::Agreed {}) if request == 0 => {
                let node = *node;
                self.introduce(identity, node);
                Ok(Heard::Nothing)
            }
            (_, Message::Refused { reason }) => self.refused(reason),
            (_, other) => self.fail(Broken::Unexpected(other.name())),
        }
    }

    /// Tells a node that has the key the own engine.
    fn introduce(&mut self, identity: &Identity, node: NodeId) {
        let engines = identity.engines.clone();
        self.out.push_back((0, Message::Engine { engines }));
        self.stage = Stage::Trusted(node);
    }

    /// The end of the handshake, of both.
    fn introduced(&mut self, node: NodeId, request: u32, message: Message) -> Result<Heard<T>, Broken> {
        match message {
            Message::Engine { engines } if request == 0 => {
                self.stage = Stage::Agreed;
                Ok(Heard::Agreed(node, engines))
            }
            other => self.fail(Broken::Unexpected(other.name())),
        }
    }

    fn refused(&mut self, reason: Reason) -> Result<Heard<T>, Broken> {
        self.fail(match reason {
            Reason::Key => Broken::Key,
            Reason::Version => Broken::Version,
            _ => Broken::Unexpected("Refused"),
        })
    }

    fn question(&mut self, request: u32, message: Message) -> Result<Heard<T>, Broken> {
        if self.theirs.len() >= QUESTIONS_MAX {
            return self.fail(Broken::TooMany);
        }
        if !self.theirs.insert(request) {
            return self.fail(Broken::Unexpected("a second question of the same number"));
        }
        Ok(Heard::Question { request, message })
    }

    fn answered(&mut self, request: u32, message: Message) -> Result<Heard<T>, Broken> {
        match self.asked.remove(&request) {
            Some(Asked { tag, .. }) => Ok(Heard::Answer { tag, message }),
            None => self.fail(Broken::Unexpected(message.name())),
        }
    }
}

#[cfg(test)]
mod tests;
