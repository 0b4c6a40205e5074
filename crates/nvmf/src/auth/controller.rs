//! The controller's side of an exchange.

use rdmux_wire::nvme::{AuthFailure, AuthMessage, DhGroup, HashId, Nqn};
use subtle::ConstantTimeEq;

use super::chap::{Challenge, Side};
use super::dh::{EXPONENT_LEN, KeyPair};
use super::{Random, Secrets, random_bytes};

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
    is_authenticated: bool,
    state: State,
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
        hash: HashId,
        challenge: Vec<u8>,
        sequence: u32,
        pair: Option<KeyPair>,
    },
    /// The host says next whether the controller's response is right.
    Responded { transaction: u16 },
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
            is_authenticated: false,
            state: State::Idle,
        }
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
                let replied = shared.and_then(|shared| {
                    let of_host = Challenge {
                        hash,
                        challenge: &challenge,
                        shared: shared.as_deref(),
                        sequence,
                        transaction,
                        host: &self.parties.host,
                        subsystem: &self.parties.subsystem,
                    };
                    let of_controller = own_challenge.as_deref().map(|challenge| Challenge {
                        challenge,
                        sequence: own_sequence,
                        ..of_host
                    });
                    self.reply(transaction, &of_host, &response, of_controller)
                });
                replied.map(|(state, is_authenticated)| {
                    self.is_authenticated = is_authenticated;
                    state
                })
            }
            (
                State::Responded {
                    transaction: expected,
                },
                AuthMessage::Success2,
            ) if expected == transaction => {
                self.is_authenticated = true;
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
        if secure_channel != 0 {
            return Err(AuthFailure::Concatenation);
        }
        let hash = HashId::ALL.into_iter().find(|hash| hashes.contains(hash));
        let hash = hash.ok_or(AuthFailure::Hash)?;
        let group = GROUPS.into_iter().find(|group| groups.contains(group));
        let group = group.ok_or(AuthFailure::Group)?;
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
        transaction: u16,
        of_host: &Challenge<'_>,
        response: &[u8],
        of_controller: Option<Challenge<'_>>,
    ) -> Result<(State, bool), AuthFailure> {
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
        // A host that has challenged the controller goes on only when its response is right.
        let then = match own {
            Some(_) => State::Responded { transaction },
            None => State::Idle,
        };
        let is_authenticated = own.is_none();
        let message = AuthMessage::Success1 {
            hash: of_host.hash,
            response: own,
        };
        let state = State::Sends {
            transaction,
            message,
            then: Box::new(then),
        };
        Ok((state, is_authenticated))
    }
}
