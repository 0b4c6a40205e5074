//! The controller's side of an exchange.

use rdmux_wire::nvme::{AuthFailure, AuthMessage, DhGroup, HashId, Nqn, SecureChannel};
use subtle::ConstantTimeEq;

use super::chap::{Challenge, Side, generated_psk, session_key};
use super::dh::{EXPONENT_LEN, KeyPair};
use super::{Random, Secrets, random_bytes};
use crate::tls::psk::Psk;

/// DH groups in the order in which the controller takes them: first the smallest with 128 bits of strength, since the largest takes the time
/// of some ten thousand I/Os.
const GROUPS: [DhGroup; 6] = [
    DhGroup::Ffdhe3072,
    DhGroup::Ffdhe2048,
    DhGroup::Ffdhe4096,
    DhGroup::Ffdhe6144,
    DhGroup::Ffdhe8192,
    DhGroup::Null,
];

/// Hash functions of TLS in the order in which the controller takes them for a key: handshakes of Linux's hosts, by tlshd 1.0.0, fail with the other
/// one.
const HASHES_OF_TLS: [HashId; 2] = [HashId::Sha256, HashId::Sha384];

/// The host and the controller that authenticate each other.
#[derive(Clone, Debug)]
pub struct Parties {
    /// The host.
    pub host: Nqn,
    /// The subsystem of the controller.
    pub subsystem: Nqn,
    /// Their secrets.
    pub secrets: Secrets,
}

/// The controller's side of the authentication of one queue.
pub struct Authenticator {
    parties: Parties,
    random: Random,
    /// Secure channels that the host may ask for.
    channels: &'static [SecureChannel],
    is_authenticated: bool,
    state: State,
    generated: Option<Psk>,
}

enum State {
    /// The host negotiates next.
    Idle,
    /// This message waits for the host to receive it.
    Sends {
        transaction: u16,
        message: AuthMessage,
        then: Box<State>,
    },
    /// The host replies to this challenge next.
    Challenged {
        transaction: u16,
        channel: SecureChannel,
        hash: HashId,
        challenge: Vec<u8>,
        sequence: u32,
        pair: Option<KeyPair>,
    },
    /// The host says next whether the controller's response is right. If so, the key is agreed on.
    Responded { transaction: u16, psk: Option<Psk> },
}

impl std::fmt::Debug for Authenticator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authenticator")
            .field("parties", &self.parties)
            .field("is_authenticated", &self.is_authenticated)
            .finish_non_exhaustive()
    }
}

impl Authenticator {
    /// Makes one for a host that has proved nothing.
    pub fn new(parties: Parties, random: Random) -> Authenticator {
        Authenticator {
            parties,
            random,
            channels: &[SecureChannel::None],
            is_authenticated: false,
            state: State::Idle,
            generated: None,
        }
    }

    /// Has the host ask for a key of TLS with each authentication.
    #[must_use]
    pub fn with_new_psk(mut self) -> Authenticator {
        self.channels = &[SecureChannel::NewTlsPsk];
        self
    }

    /// Takes the host for authenticated, by a key of TLS that an authentication has led to. On an admin queue it may have another key agreed on in
    /// place of that one.
    #[must_use]
    pub fn with_psk(mut self, qid: u16) -> Authenticator {
        if qid == 0 {
            self.channels = &[SecureChannel::None, SecureChannel::ReplaceTlsPsk];
        }
        self.is_authenticated = true;
        self
    }

    /// Returns once the key of TLS that host and controller have agreed on.
    pub fn take_psk(&mut self) -> Option<Psk> {
        self.generated.take()
    }

    /// Returns true once the host has proved that it has the secret.
    pub fn is_authenticated(&self) -> bool {
        self.is_authenticated
    }

    /// Takes the data of an Authentication Send.
    pub fn handle(&mut self, bytes: &[u8]) {
        let state = std::mem::replace(&mut self.state, State::Idle);
        let Ok((transaction, message)) = AuthMessage::parse(bytes) else {
            return self.fail(0, AuthFailure::Payload);
        };
        let result = match (state, message) {
            (
                State::Idle,
                AuthMessage::Negotiate {
                    secure_channel,
                    hashes,
                    groups,
                },
            ) => self.challenge(transaction, secure_channel, &hashes, &groups),
            (
                State::Challenged {
                    transaction: expected,
                    channel,
                    hash,
                    challenge,
                    sequence,
                    pair,
                },
                AuthMessage::Reply {
                    sequence: own_sequence,
                    response,
                    challenge: own_challenge,
                    dh_value,
                },
            ) if expected == transaction => {
                let shared = match &pair {
                    None if dh_value.is_empty() => Ok(None),
                    None => Err(AuthFailure::Payload),
                    Some(pair) => pair.agree(&dh_value).map(Some).ok_or(AuthFailure::Payload),
                };
                // A controller that is not challenged may still have a challenge, for the key alone.
                let is_challenged = channel == SecureChannel::None || own_sequence != 0;
                let replied = shared.and_then(|shared| {
                    let psk = match channel {
                        SecureChannel::None => None,
                        SecureChannel::NewTlsPsk | SecureChannel::ReplaceTlsPsk => {
                            let shared = shared.as_deref().ok_or(AuthFailure::Concatenation)?;
                            let own = own_challenge.as_deref().ok_or(AuthFailure::Payload)?;
                            let key = session_key(hash, shared);
                            Some(generated_psk(hash, &key, [&challenge, own]).ok_or(AuthFailure::Hash)?)
                        }
                    };
                    let of_host = Challenge {
                        hash,
                        challenge: &challenge,
                        shared: shared.as_deref(),
                        sequence,
                        transaction,
                        channel,
                        host: &self.parties.host,
                        subsystem: &self.parties.subsystem,
                    };
                    let own_challenge = own_challenge.as_deref().filter(|_| is_challenged);
                    let of_controller = own_challenge.map(|challenge| Challenge {
                        challenge,
                        sequence: own_sequence,
                        ..of_host
                    });
                    self.reply(&of_host, &response, of_controller)
                        .map(|success| (success, psk))
                });
                replied.map(|((message, is_authenticated), psk)| {
                    // A host that was authenticated before stays so meanwhile.
                    self.is_authenticated |= is_authenticated;
                    // A host that has challenged the controller goes on only when its response is right.
                    let then = match is_authenticated {
                        false => State::Responded { transaction, psk },
                        true => {
                            self.generated = psk;
                            State::Idle
                        }
                    };
                    State::Sends {
                        transaction,
                        message,
                        then: Box::new(then),
                    }
                })
            }
            (
                State::Responded {
                    transaction: expected,
                    psk,
                },
                AuthMessage::Success2,
            ) if expected == transaction => {
                self.is_authenticated = true;
                self.generated = psk;
                Ok(State::Idle)
            }
            (_, AuthMessage::Failure2(_)) => {
                self.is_authenticated = false;
                Ok(State::Idle)
            }
            _ => Err(AuthFailure::Message),
        };
        match result {
            Ok(state) => self.state = state,
            Err(failure) => self.fail(transaction, failure),
        }
    }

    fn fail(&mut self, transaction: u16, failure: AuthFailure) {
        self.is_authenticated = false;
        self.generated = None;
        self.state = State::Sends {
            transaction,
            message: AuthMessage::Failure1(failure),
            then: Box::new(State::Idle),
        };
    }

    /// Returns the data of an Authentication Receive; `None` if no message waits.
    pub fn poll(&mut self) -> Option<Vec<u8>> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Sends {
                transaction,
                message,
                then,
            } => {
                self.state = *then;
                Some(message.emit(transaction))
            }
            other => {
                self.state = other;
                None
            }
        }
    }

    fn challenge(
        &mut self,
        transaction: u16,
        secure_channel: u8,
        hashes: &[HashId],
        groups: &[DhGroup],
    ) -> Result<State, AuthFailure> {
        let channel = SecureChannel::new(secure_channel).filter(|channel| self.channels.contains(channel));
        let channel = channel.ok_or(AuthFailure::Concatenation)?;
        let is_secure = channel != SecureChannel::None;
        let known: &[_] = match is_secure {
            false => &HashId::ALL,
            true => &HASHES_OF_TLS,
        };
        let hash = known.iter().copied().find(|hash| hashes.contains(hash));
        let hash = hash.ok_or(AuthFailure::Hash)?;
        let group = GROUPS.into_iter().find(|group| groups.contains(group));
        let group = group.ok_or(AuthFailure::Group)?;
        // It is the last of those that the controller takes: without a session key there is no key of TLS.
        if is_secure && group == DhGroup::Null {
            return Err(AuthFailure::Concatenation);
        }
        let random = |len| random_bytes(self.random, len).ok_or(AuthFailure::Failed);
        let challenge = random(hash.digest_len())?;
        let pair = KeyPair::new(group, &random(EXPONENT_LEN)?);
        let sequence = random(4)?
            .into_iter()
            .fold(0, |all, byte| all << 8 | u32::from(byte));
        // 0 is reserved: it says that there is no challenge.
        let sequence = sequence.max(1);
        let message = AuthMessage::Challenge {
            hash,
            group,
            sequence,
            challenge: challenge.clone(),
            dh_value: pair.as_ref().map_or(Vec::new(), |pair| pair.public().to_vec()),
        };
        let then = State::Challenged {
            transaction,
            channel,
            hash,
            challenge,
            sequence,
            pair,
        };
        Ok(State::Sends {
            transaction,
            message,
            then: Box::new(then),
        })
    }

    /// Returns what follows on a reply, and whether the host is authenticated.
    fn reply(
        &self,
        of_host: &Challenge<'_>,
        response: &[u8],
        of_controller: Option<Challenge<'_>>,
    ) -> Result<(AuthMessage, bool), AuthFailure> {
        let secrets = &self.parties.secrets;
        let expected = of_host.response(Side::Host, &secrets.host.transformed(&self.parties.host));
        if !bool::from(expected.ct_eq(response)) {
            return Err(AuthFailure::Failed);
        }
        let own = match of_controller {
            None => None,
            Some(challenge) => {
                let secret = secrets.controller.as_ref().ok_or(AuthFailure::Failed)?;
                let key = secret.transformed(&self.parties.subsystem);
                Some(challenge.response(Side::Controller, &key))
            }
        };
        let is_authenticated = own.is_none();
        let message = AuthMessage::Success1 {
            hash: of_host.hash,
            response: own,
        };
        Ok((message, is_authenticated))
    }
}
