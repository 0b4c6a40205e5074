//! The client's side of the handshake. No I/O.

use rdmux_key::Key;
use rdmux_wire::push::{ErrorCode, Message, VERSION};

use crate::proof::{Role, Transcript};

/// Failure of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The keys differ.
    WrongKey,
    /// The server refused.
    Refused(ErrorCode, String),
    /// A message that a server does not send at this point.
    Protocol,
}

/// The next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Send this message and pass the answer to [`Handshake::handle`].
    Send(Message),
    /// The handshake is done.
    Welcome {
        /// Time of silence after which the server takes a client for dead.
        keepalive_ms: u32,
        /// Mappings that one connection may hold.
        mappings_max: u32,
        /// Messages that may be unanswered at a time.
        messages_max: u16,
        /// Mappings of earlier connections of this client that were revoked.
        revoked: u32,
    },
}

/// The handshake: the caller sends [`Handshake::hello`], then follows [`Handshake::handle`].
#[derive(Debug)]
pub struct Handshake {
    key: Key,
    nonce: [u8; 32],
    client: [u8; 16],
    proved: bool,
}

impl Handshake {
    /// Creates a handshake; `nonce` is random, `client` the name that this client has on all its connections, or zeros.
    pub fn new(key: Key, nonce: [u8; 32], client: [u8; 16]) -> Handshake {
        Handshake {
            key,
            nonce,
            client,
            proved: false,
        }
    }

    /// Returns the first message.
    pub fn hello(&self) -> Message {
        Message::Hello {
            version_min: VERSION,
            version_max: VERSION,
            client_nonce: self.nonce,
        }
    }

    /// Handles a message from the server.
    pub fn handle(&mut self, message: Message) -> Result<Next, Failure> {
        match (message, self.proved) {
            (
                Message::Challenge {
                    version,
                    server_nonce,
                    server_proof,
                },
                false,
            ) => {
                if version != VERSION {
                    return Err(Failure::Protocol);
                }
                let transcript = Transcript {
                    version_min: VERSION,
                    version_max: VERSION,
                    version,
                    client_nonce: self.nonce,
                    server_nonce,
                    client: [0; 16],
                };
                // A server that cannot prove that it has the key gets no proof from this client.
                if !transcript.verify(&self.key, Role::Server, &server_proof) {
                    return Err(Failure::WrongKey);
                }
                self.proved = true;
                let transcript = Transcript {
                    client: self.client,
                    ..transcript
                };
                Ok(Next::Send(Message::Proof {
                    client_proof: transcript.proof(&self.key, Role::Client),
                    client: self.client,
                }))
            }
            (
                Message::Welcome {
                    keepalive_ms,
                    mappings_max,
                    messages_max,
                    revoked,
                },
                true,
            ) => Ok(Next::Welcome {
                keepalive_ms,
                mappings_max,
                messages_max,
                revoked,
            }),
            (
                Message::Error {
                    code: ErrorCode::BadKey,
                    ..
                },
                _,
            ) => Err(Failure::WrongKey),
            (Message::Error { code, text }, _) => Err(Failure::Refused(code, text)),
            _ => Err(Failure::Protocol),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::server::{Action, Session, Shared};

    fn run(client_key: u8, server_key: u8) -> Result<Next, Failure> {
        let shared = Arc::new(Shared {
            key: Key::new([server_key; 32]),
            regions: Vec::new(),
            keepalive_ms: 5,
            mappings_max: 6,
            messages_max: 7,
        });
        let mut server = Session::new(shared, [2; 32]);
        let mut client = Handshake::new(Key::new([client_key; 32]), [3; 32], [4; 16]);
        let mut message = client.hello();
        loop {
            let mut bytes = Vec::new();
            message.emit(1, &mut bytes);
            let answer = match server.handle(&bytes).1 {
                Action::Send(answer) | Action::End(Some(answer), _) => answer,
                Action::Welcome { client } => {
                    assert_eq!(client, [4; 16]);
                    server.welcome(8)
                }
                other => panic!("{other:?}"),
            };
            match client.handle(answer)? {
                Next::Send(next) => message = next,
                welcome => return Ok(welcome),
            }
        }
    }

    #[test]
    fn handle__one_key_is_welcome_and_two_are_not() {
        let welcome = Next::Welcome {
            keepalive_ms: 5,
            mappings_max: 6,
            messages_max: 7,
            revoked: 8,
        };
        assert_eq!(run(1, 1), Ok(welcome));
        assert_eq!(run(1, 2), Err(Failure::WrongKey));
    }

    #[test]
    fn handle__welcome_without_proof_of_the_server() {
        let mut client = Handshake::new(Key::new([1; 32]), [3; 32], [4; 16]);
        let welcome = Message::Welcome {
            keepalive_ms: 5,
            mappings_max: 6,
            messages_max: 7,
            revoked: 8,
        };
        assert_eq!(client.handle(welcome), Err(Failure::Protocol));
    }

    #[test]
    fn handle__a_proof_that_is_a_reflection_of_ones_own() {
        let key = Key::new([1; 32]);
        let mut client = Handshake::new(key.clone(), [3; 32], [4; 16]);
        let transcript = Transcript {
            version_min: VERSION,
            version_max: VERSION,
            version: VERSION,
            client_nonce: [3; 32],
            server_nonce: [3; 32],
            client: [4; 16],
        };
        let challenge = Message::Challenge {
            version: VERSION,
            server_nonce: [3; 32],
            server_proof: transcript.proof(&key, Role::Client),
        };
        assert_eq!(client.handle(challenge), Err(Failure::WrongKey));
    }
}
