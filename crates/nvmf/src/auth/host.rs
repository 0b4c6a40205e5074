//! The host's side of an exchange.

use rdmux_wire::nvme::{AuthFailure, AuthMessage, DhGroup, HashId, SecureChannel};
use subtle::ConstantTimeEq;

use super::chap::{Challenge, Side, generated_psk, session_key};
use super::dh::{EXPONENT_LEN, KeyPair};
use super::{Parties, Random, random_bytes};
use crate::tls::psk::Psk;

/// Reason for which host and controller do not authenticate each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The controller has refused the host.
    #[error("the target refused this host: {0}")]
    Refused(AuthFailure),
    /// The controller's message is malformed, or not what comes next.
    #[error("the target sent a malformed or unexpected authentication message")]
    Message,
    /// The controller has chosen a hash function or group that the host did not offer, or its value is one of which the secret is known.
    #[error("the target chose a hash function, group or value that this host did not offer")]
    NotOffered,
    /// The controller has not proved that it has its secret.
    #[error(
        "the target did not prove that it has its secret: the second line of the secret's file is not the target's"
    )]
    ControllerFailed,
    /// The system has no random bytes.
    #[error("the system has no random bytes")]
    NoRandom,
}

/// Next part of an exchange.
#[derive(Debug, PartialEq, Eq)]
pub enum HostStep {
    /// An Authentication Send of these bytes.
    Send(Vec<u8>),
    /// An Authentication Receive, whose data go to [`HostAuthenticator::handle`].
    Receive,
    /// Both are authenticated as far as asked for.
    Done,
}

/// Hash functions and groups that a host offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Hash functions.
    pub hashes: Vec<HashId>,
    /// DH groups.
    pub groups: Vec<DhGroup>,
}

impl Default for Offer {
    fn default() -> Offer {
        Offer {
            hashes: HashId::ALL.to_vec(),
            groups: DhGroup::ALL.to_vec(),
        }
    }
}

/// The host's side of the authentication of one queue. With a controller's secret among the secrets, the controller has to prove that it has it.
///
/// The caller carries out [`HostAuthenticator::next`] until that is [`HostStep::Done`].
pub struct HostAuthenticator {
    parties: Parties,
    offer: Offer,
    random: Random,
    transaction: u16,
    channel: SecureChannel,
    state: State,
}

enum State {
    Negotiates,
    AwaitsChallenge,
    Replies(Vec<u8>, Expected),
    AwaitsSuccess(Expected),
    /// Says that the controller is authenticated, or not.
    Concludes(Result<Option<Psk>, AuthError>),
    Done(Result<Option<Psk>, AuthError>),
}

/// The hash function of an exchange, and the response that the controller owes.
struct Expected {
    hash: HashId,
    response: Option<Vec<u8>>,
    /// The key of TLS that they have agreed on then.
    psk: Option<Psk>,
}

impl std::fmt::Debug for HostAuthenticator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostAuthenticator")
            .field("parties", &self.parties)
            .finish_non_exhaustive()
    }
}

impl HostAuthenticator {
    /// Begins an exchange. `transaction` is its number, which no other exchange of the association has at the same time.
    pub fn new(parties: Parties, offer: Offer, random: Random, transaction: u16) -> HostAuthenticator {
        HostAuthenticator {
            parties,
            offer,
            random,
            transaction,
            channel: SecureChannel::None,
            state: State::Negotiates,
        }
    }

    /// Has host and controller agree on a key of TLS as well. Only functions and groups are offered from which one follows.
    #[must_use]
    pub fn with_channel(mut self, channel: SecureChannel) -> HostAuthenticator {
        self.channel = channel;
        if channel != SecureChannel::None {
            self.offer.hashes.retain(|hash| *hash != HashId::Sha512);
            self.offer.groups.retain(|group| *group != DhGroup::Null);
        }
        self
    }

    /// Returns once the key of TLS that host and controller have agreed on, if the exchange is [`HostStep::Done`].
    pub fn take_psk(&mut self) -> Option<Psk> {
        match &mut self.state {
            State::Done(Ok(psk)) => psk.take(),
            _ => None,
        }
    }

    /// Returns the next part.
    ///
    /// # Errors
    /// The exchange has failed.
    #[expect(
        clippy::should_implement_trait,
        reason = "it is no iterator: the caller answers each step"
    )]
    pub fn next(&mut self) -> Result<HostStep, AuthError> {
        let state = std::mem::replace(&mut self.state, State::Done(Err(AuthError::Message)));
        let (state, step) = match state {
            State::Negotiates => {
                let message = AuthMessage::Negotiate {
                    secure_channel: self.channel as u8,
                    hashes: self.offer.hashes.clone(),
                    groups: self.offer.groups.clone(),
                };
                (State::AwaitsChallenge, self.send(&message))
            }
            State::Replies(bytes, expected) => (State::AwaitsSuccess(expected), HostStep::Send(bytes)),
            State::Concludes(result) => {
                let message = match &result {
                    Ok(_) => AuthMessage::Success2,
                    Err(_) => AuthMessage::Failure2(AuthFailure::Failed),
                };
                (State::Done(result), self.send(&message))
            }
            State::Done(result) => {
                let step = result.as_ref().map(|_| HostStep::Done).map_err(|error| *error);
                self.state = State::Done(result);
                return step;
            }
            waiting @ (State::AwaitsChallenge | State::AwaitsSuccess(_)) => (waiting, HostStep::Receive),
        };
        self.state = state;
        Ok(step)
    }

    fn send(&self, message: &AuthMessage) -> HostStep {
        HostStep::Send(message.emit(self.transaction))
    }

    /// Takes the data of an Authentication Receive.
    ///
    /// # Errors
    /// The exchange has failed. A wrong proof of the controller is no error yet: [`HostAuthenticator::next`] first tells the controller.
    pub fn handle(&mut self, bytes: &[u8]) -> Result<(), AuthError> {
        let state = std::mem::replace(&mut self.state, State::Done(Err(AuthError::Message)));
        let result = self.handle_in(state, bytes);
        match result {
            Ok(state) => {
                self.state = state;
                Ok(())
            }
            Err(error) => {
                self.state = State::Done(Err(error));
                Err(error)
            }
        }
    }

    fn handle_in(&self, state: State, bytes: &[u8]) -> Result<State, AuthError> {
        let (transaction, message) = AuthMessage::parse(bytes).map_err(|_| AuthError::Message)?;
        if let AuthMessage::Failure1(failure) = message {
            return Err(AuthError::Refused(failure));
        }
        if transaction != self.transaction {
            return Err(AuthError::Message);
        }
        match (state, message) {
            (
                State::AwaitsChallenge,
                AuthMessage::Challenge {
                    hash,
                    group,
                    sequence,
                    challenge,
                    dh_value,
                },
            ) => self.reply(hash, group, sequence, &challenge, &dh_value),
            (State::AwaitsSuccess(expected), AuthMessage::Success1 { hash, response }) => {
                if hash != expected.hash {
                    return Err(AuthError::Message);
                }
                let psk = expected.psk;
                // A host that has challenged nobody takes no response for a proof.
                let Some(expected) = expected.response else {
                    return Ok(State::Done(Ok(psk)));
                };
                let is_right = response.is_some_and(|response| bool::from(expected.ct_eq(&response)));
                Ok(State::Concludes(
                    is_right.then_some(psk).ok_or(AuthError::ControllerFailed),
                ))
            }
            _ => Err(AuthError::Message),
        }
    }

    fn reply(
        &self,
        hash: HashId,
        group: DhGroup,
        sequence: u32,
        challenge: &[u8],
        dh_value: &[u8],
    ) -> Result<State, AuthError> {
        if !self.offer.hashes.contains(&hash) || !self.offer.groups.contains(&group) {
            return Err(AuthError::NotOffered);
        }
        let random = |len| random_bytes(self.random, len).ok_or(AuthError::NoRandom);
        let pair = KeyPair::new(group, &random(EXPONENT_LEN)?);
        let shared = match &pair {
            Some(pair) => Some(pair.agree(dh_value).ok_or(AuthError::NotOffered)?),
            None => None,
        };
        let of_host = Challenge {
            hash,
            challenge,
            shared: shared.as_deref(),
            sequence,
            transaction: self.transaction,
            channel: self.channel,
            host: &self.parties.host,
            subsystem: &self.parties.subsystem,
        };
        let secrets = &self.parties.secrets;
        let response = of_host.response(Side::Host, &secrets.host.transformed(&self.parties.host));
        let is_secure = self.channel != SecureChannel::None;
        let has_challenge = secrets.controller.is_some() || is_secure;
        let own_challenge = has_challenge.then(|| random(hash.digest_len())).transpose()?;
        let mut expected = Expected {
            hash,
            response: None,
            psk: None,
        };
        // 0 says that the controller is not challenged.
        let mut own_sequence = 0;
        if let (Some(secret), Some(own)) = (&secrets.controller, &own_challenge) {
            let number = random(4)?.into_iter();
            own_sequence = number.fold(0, |all, byte| all << 8 | u32::from(byte)).max(1);
            let of_controller = Challenge {
                challenge: own,
                sequence: own_sequence,
                ..of_host
            };
            let key = secret.transformed(&self.parties.subsystem);
            expected.response = Some(of_controller.response(Side::Controller, &key));
        }
        if let (true, Some(shared), Some(own)) = (is_secure, &shared, &own_challenge) {
            let key = session_key(hash, shared);
            expected.psk = generated_psk(hash, &key, [challenge, own]);
        }
        let message = AuthMessage::Reply {
            sequence: own_sequence,
            response,
            challenge: own_challenge,
            dh_value: pair.as_ref().map_or(Vec::new(), |pair| pair.public().to_vec()),
        };
        Ok(State::Replies(message.emit(self.transaction), expected))
    }
}
