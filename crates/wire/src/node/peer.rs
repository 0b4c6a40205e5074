//! Messages between the nodes of two hosts, by which they find each other and agree on what goes over queue pairs that they share.
//!
//! They travel as SENDs of a reliable connection to the service [`SERVICE`] of a node's device, which whoever asks establishes. A device may have
//! several engines, each with queue pairs of its own, and a connection is between two of them: a pair of engines has up to two connections, one for
//! the questions of each. The request for a connection has in its private data a queue pair of the engine that is wanted ([`emit_wanted`]). A message is
//! one SEND, big endian throughout, of at most [`MESSAGE_LEN_MAX`] bytes:
//!
//! ```text
//! 0  type u16 | version u16
//! 4  request u32: an answer repeats that of its question
//! 8  body: the fields of the type, in their order
//! ```
//!
//! The fields are as in [`super::control`]; a nonce, a proof and a [`NodeId`] are their bytes, the name of a tenant has a length of one byte.
//!
//! The node that connects begins: [`Message::Hello`], [`Message::Challenge`], [`Message::Proof`], [`Message::Agreed`]. With them both nodes prove that they
//! have the same key, over all that was said; any of them may be answered by [`Message::Refused`]. These five keep version [`VERSION_FOREVER`], so that
//! any two versions can agree; all others have the version that was agreed. Then each tells its engines, by [`Message::Engine`]; all messages so far
//! have request number 0. After that either node asks, with request numbers of its own, at most
//! [`QUESTIONS_MAX`] questions that are not answered yet. So [`RECEIVES`] receives suffice at each end: a node posts the receive of a message again before it
//! sends another one. Who asks more, or answers what was not asked, is disconnected.

use strum::VariantArray;

use super::CompletionStatus;
use super::codec::{Field, Reader, codes, messages, record, undefined};
use crate::cm::ServiceId;
use crate::roce::PathMtu;
use crate::{Malformed, Psn, Qpn, RKey};

#[cfg(test)]
mod tests;

/// Port of RDMA_PS_TCP on which the node of a device takes connections of other nodes: what provider `hw` can listen on too.
pub const PORT: u16 = 7173;
/// The service of that port.
pub const SERVICE: ServiceId = ServiceId::tcp(PORT);
/// Maximum length of a message in bytes.
pub const MESSAGE_LEN_MAX: usize = 256;
/// Questions of one end that may be unanswered at a time.
pub const QUESTIONS_MAX: usize = 64;
/// Messages of one end that may arrive before they are handled: its questions, and its answers.
pub const RECEIVES: usize = 2 * QUESTIONS_MAX;
/// Requests of which [`Executed`] has the response at most: as many as a shared queue pair answers at a time.
pub const ANSWERS_MAX: usize = 16;
/// Engines of a node.
pub const ENGINES_MAX: usize = 64;
/// Version of the protocol.
pub const VERSION: u16 = 4;
/// Version of the messages by which two versions agree.
pub const VERSION_FOREVER: u16 = 1;

/// Names one run of a node: random, so that a node that was started again has another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub [u8; 16]);

impl std::fmt::Debug for NodeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NodeId({:032x})", u128::from_be_bytes(self.0))
    }
}

impl Field for NodeId {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }

    fn take(from: &mut Reader<'_>) -> Result<NodeId, Malformed> {
        Field::take(from).map(NodeId)
    }
}

/// The engines of a node's device, as one of them tells: it is in [`Engines::own`]. The upper 8 bits of a queue pair's number tell whose it is, if there
/// is more than one. On the wire: its own number, how many there are, and those bits of each, a byte each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Engines {
    own: u8,
    upper_bits: Vec<u8>,
}

impl Engines {
    /// Returns the engines with these upper 8 bits, as the one with number `own` tells them. `None`: there are none, or more than [`ENGINES_MAX`]; there
    /// is no such engine; or two of them have the same bits.
    pub fn new(own: u8, upper_bits: &[u8]) -> Option<Engines> {
        let is_other = |(at, bits): (usize, &u8)| !upper_bits[..at].contains(bits);
        let fits = upper_bits.len() <= ENGINES_MAX
            && usize::from(own) < upper_bits.len()
            && upper_bits.iter().enumerate().all(is_other);
        fits.then(|| Engines {
            own,
            upper_bits: upper_bits.to_vec(),
        })
    }

    /// Returns the bits of a queue pair's number that tell its engine.
    pub const fn upper_bits(qpn: Qpn) -> u8 {
        (qpn.value() >> 16) as u8
    }

    /// The number of the engine that tells this.
    pub fn own(&self) -> u8 {
        self.own
    }

    /// Returns the number of the engine that has a queue pair, or would answer that there is none.
    pub fn of(&self, qpn: Qpn) -> u8 {
        let bits = Engines::upper_bits(qpn);
        let found = self.upper_bits.iter().position(|other| *other == bits);
        found.unwrap_or(0) as u8
    }

    /// Returns a number that a queue pair of an engine may have.
    pub fn first_qpn(&self, engine: u8) -> Qpn {
        let bits = self.upper_bits.get(usize::from(engine));
        Qpn::new(bits.map_or(0, |bits| u32::from(*bits) << 16))
    }

    /// Returns whether another engine of the same node can have told the other ones.
    pub fn are_those_of(&self, other: &Engines) -> bool {
        self.upper_bits == other.upper_bits
    }
}

impl Field for Engines {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend([self.own, self.upper_bits.len() as u8]);
        out.extend_from_slice(&self.upper_bits);
    }

    fn take(from: &mut Reader<'_>) -> Result<Engines, Malformed> {
        let [own, count] = Field::take(from)?;
        let upper_bits = from.bytes(usize::from(count))?;
        Engines::new(own, upper_bits).ok_or(undefined("number of an engine", own.into()))
    }
}

/// Returns the private data of a request for a connection to the engine that has a queue pair: its number, 32 bits, big endian.
pub fn emit_wanted(qpn: Qpn) -> [u8; 4] {
    qpn.value().to_be_bytes()
}

/// Returns the queue pair in the private data of a request for a connection; 0 if there is none.
pub fn parse_wanted(private_data: &[u8]) -> Qpn {
    let bytes = private_data.first_chunk().copied();
    Qpn::new(bytes.map_or(0, u32::from_be_bytes))
}

/// Name of a tenant: up to [`TenantName::LEN_MAX`] bytes of UTF-8 without control characters. The empty one is that of applications without one.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantName(String);

impl TenantName {
    /// Maximum length in bytes.
    pub const LEN_MAX: usize = 64;

    /// Returns the name with these characters; `None` if it is too long or has control characters.
    pub fn new(name: &str) -> Option<TenantName> {
        let fits = name.len() <= TenantName::LEN_MAX && !name.contains(char::is_control);
        fits.then(|| TenantName(name.to_owned()))
    }

    /// Returns its characters.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for TenantName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Field for TenantName {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(self.0.len() as u8);
        out.extend_from_slice(self.0.as_bytes());
    }

    fn take(from: &mut Reader<'_>) -> Result<TenantName, Malformed> {
        let len = usize::from(u8::take(from)?);
        let name = str::from_utf8(from.bytes(len)?).ok().and_then(TenantName::new);
        name.ok_or(undefined("name of a tenant", len as u64))
    }
}

codes! {
    /// Reason why a node does not do what it was asked.
    Reason: u16 {
        /// The versions have none in common.
        Version = 1,
        /// The keys differ.
        Key = 2,
        /// The node has no such queue pair.
        NoQp = 3,
        /// The queue pair has another peer.
        OtherPeer = 4,
        /// The queue pair is used by itself, and on no shared one.
        Own = 5,
        /// The node has no such region in this domain.
        NoKey = 6,
        /// The node has as many objects as it may have. It may have room later.
        Limit = 7,
        /// Both nodes have asked for the same shared queue pair, and the one with the lower id goes on.
        Collides = 8,
        /// The shared queue pair is in use.
        Busy = 9,
        /// The device refuses it.
        Device = 10,
    }
}

record! {
    /// The attributes that a node tells of a queue pair of its own.
    Binding {
        /// Its protection domain, as [`Message::ResolveKey`] names it.
        domain: u64,
        /// Accesses that it allows, valued as `enum ibv_access_flags`.
        access: u32,
        /// The tenant of its application.
        tenant: TenantName,
    }
}

record! {
    /// One end of a shared queue pair.
    #[derive(Copy)]
    SharedEnd {
        /// Its number.
        qpn: Qpn,
        /// PSN of the first packet that it sends.
        psn: Psn,
        /// Messages that it can receive before it tells that there is room again.
        slots: u16,
        /// READs, atomics and FLUSHes that it answers at a time.
        rd_atomic: u8,
        /// Largest path MTU of its link.
        path_mtu: PathMtu,
    }
}

codes! {
    /// Outcome of a request that must not be executed again.
    Outcome: u8 {
        /// A FLUSH that failed.
        Failed = 0,
        /// A FLUSH or an ATOMIC WRITE that is done.
        Done = 1,
        /// An atomic operation, with the value that it found.
        Original = 2,
    }
}

record! {
    /// The response to a request that must not be executed again.
    #[derive(Copy)]
    Response {
        /// Its PSN.
        psn: Psn,
        /// Its outcome.
        outcome: Outcome,
        /// The value that an atomic operation found; else 0.
        original: u64,
    }
}

record! {
    /// A request that a queue pair refused.
    #[derive(Copy)]
    Refusal {
        /// One of its PSNs.
        psn: Psn,
        /// Status with which the request ends.
        status: CompletionStatus,
    }
}

record! {
    /// How far a queue pair that has ended had executed the requests of its peer.
    Executed {
        /// All before this PSN were executed, and none from here on.
        expected: Psn,
        /// The request for which it failed.
        refused: Option<Refusal>,
        /// The newest requests that must not be executed again, at most [`ANSWERS_MAX`].
        answers: Vec<Response>,
    }
}

impl Field for CompletionStatus {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }

    fn take(from: &mut Reader<'_>) -> Result<CompletionStatus, Malformed> {
        let code = u8::take(from)?;
        let mut all = CompletionStatus::VARIANTS.iter().copied();
        all.find(|status| *status as u8 == code)
            .ok_or(undefined("completion status", code.into()))
    }
}

impl Field for Vec<Response> {
    fn put(&self, out: &mut Vec<u8>) {
        assert!(self.len() <= ANSWERS_MAX, "{} responses", self.len());
        out.push(self.len() as u8);
        self.iter().for_each(|response| response.put(out));
    }

    fn take(from: &mut Reader<'_>) -> Result<Vec<Response>, Malformed> {
        let count = usize::from(u8::take(from)?);
        if count > ANSWERS_MAX {
            return Err(undefined("number of responses", count as u64));
        }
        (0..count).map(|_| Response::take(from)).collect()
    }
}

messages! {
    up to MESSAGE_LEN_MAX, VERSION, VERSION_FOREVER for 1 | 2 | 3 | 4 | 5;
    /// The node that connects: the first message.
    1 Hello {
        /// Lowest version that it understands.
        version_min: u16,
        /// Highest version that it understands.
        version_max: u16,
        /// Random bytes.
        nonce: [u8; 32],
        /// The node.
        node: NodeId,
    }
    /// The node that was asked: its part of the agreement.
    2 Challenge {
        /// Version of all messages after [`Message::Agreed`].
        version: u16,
        /// Random bytes.
        nonce: [u8; 32],
        /// The node.
        node: NodeId,
        /// Proof that it has the key.
        proof: [u8; 32],
    }
    /// The node that connects has the key as well.
    3 Proof {
        /// Proof that it has the key.
        proof: [u8; 32],
    }
    /// Both have the same key.
    4 Agreed {}
    /// Answer: no.
    5 Refused {
        /// Reason.
        reason: Reason,
    }
    /// Question: a queue pair of the sender that goes to RTR has one of the receiver as its peer. Answer: [`Message::Bound`], or [`Message::Waits`].
    6 Bind {
        /// The sender's queue pair.
        source: Qpn,
        /// The receiver's queue pair.
        dest: Qpn,
        /// Traffic class.
        class: u8,
        /// Attributes of the sender's queue pair.
        binding: Binding,
    }
    /// Answer: from now on, both send over a shared queue pair.
    7 Bound {
        /// Attributes of the queue pair.
        binding: Binding,
    }
    /// Answer: the queue pair has no peer yet. Once it has, [`Message::Settled`] follows.
    8 Waits {}
    /// Question, after [`Message::Waits`]: what has become of it. Answer: [`Message::Done`].
    9 Settled {
        /// The sender's queue pair.
        source: Qpn,
        /// The receiver's queue pair.
        dest: Qpn,
        /// Attributes of the sender's queue pair if it is bound. None: the receiver's is to be used by itself.
        binding: Option<Binding>,
    }
    /// Question: the sender's queue pair does not use a shared one, or no more. Answer: [`Message::Done`].
    10 Unbind {
        /// The sender's queue pair.
        source: Qpn,
        /// The receiver's queue pair.
        dest: Qpn,
    }
    /// Answer: it is so.
    11 Done {}
    /// Question: what a key of a region is on shared queue pairs. Answer: [`Message::Key`].
    12 ResolveKey {
        /// Protection domain of the receiver's queue pair.
        domain: u64,
        /// The key as applications know it.
        rkey: RKey,
    }
    /// Answer: the region, on shared queue pairs, until [`Message::KeyGone`].
    13 Key {
        /// The key on shared queue pairs.
        rkey: RKey,
        /// Address of the first byte.
        start: u64,
        /// Bytes.
        length: u64,
        /// Rights, valued as `enum ibv_access_flags`.
        access: u32,
    }
    /// Question: a region that was asked for ends. Answer: [`Message::Done`], once the receiver has no access to it in flight and makes no more.
    14 KeyGone {
        /// Protection domain.
        domain: u64,
        /// The key as applications know it.
        rkey: RKey,
    }
    /// Question: make the other end of a shared queue pair, the first one of a line or a further one. Answer: [`Message::QpOpened`]. The receiver sends
    /// over it after [`Message::QpReady`].
    15 OpenQp {
        /// Tenant of those at the sender who use it.
        here: TenantName,
        /// Tenant of those at the receiver who use it.
        there: TenantName,
        /// Traffic class.
        class: u8,
        /// The sender's number of the line, which it gives to no other one.
        line: u64,
        /// The sender's end.
        end: SharedEnd,
    }
    /// Answer: the receiver's end of a shared queue pair takes messages.
    16 QpOpened {
        /// The number of the line at the end that answers.
        line: u64,
        /// That end.
        end: SharedEnd,
    }
    /// Question: both ends are ready. Answer: [`Message::Done`].
    17 QpReady {
        /// The receiver's line.
        line: u64,
    }
    /// Question: end the queue pair of a line, if nothing is in flight at the receiver's end. Answer: [`Message::Done`]. [`Message::QpEnded`] of both
    /// follows.
    18 CloseQp {
        /// The receiver's line.
        line: u64,
        /// Set if the line itself is over, whatever is in flight.
        failed: bool,
    }
    /// Question: the queue pair of a line has ended at the sender, which takes nothing from it any more. The receiver ends its own, and tells this too;
    /// then either may open another one. Answer: [`Message::Done`].
    19 QpEnded {
        /// The receiver's line.
        line: u64,
        /// Number of messages that the sender has received on this queue pair.
        messages: u32,
        /// The requests that were executed; none if the sender's device does not tell.
        executed: Option<Executed>,
    }
    /// Both nodes, after [`Message::Agreed`] and before anything else: the engine of the connection, and the others of its device.
    20 Engine {
        /// The sender's engines.
        engines: Engines,
    }
}

impl Message {
    /// Returns whether an answer is due.
    pub const fn is_question(&self) -> bool {
        matches!(
            self,
            Message::Bind { .. }
                | Message::Settled { .. }
                | Message::Unbind { .. }
                | Message::ResolveKey { .. }
                | Message::KeyGone { .. }
                | Message::OpenQp { .. }
                | Message::QpReady { .. }
                | Message::CloseQp { .. }
                | Message::QpEnded { .. }
        )
    }
}
