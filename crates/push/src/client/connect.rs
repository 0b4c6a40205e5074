//! The way to a server: the connection, then the handshake.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rdmux_runtime::{Completed, EstablishError, MessageConnection, PendingConnection};
use rdmux_verbs::{
    Access, CompletionQueue, ConnectError, ConnectParams, Device, EventQueue, GetError, ProtectionDomain,
    RejReason, WorkCompletion,
};
use rdmux_wire::push::{ErrorCode, Message};

use super::{
    Client, Error, Failure, Handshake, MESSAGES_MAX, Next, Options, SIZES, ServerConnection, Wait, failed,
    lost, parse, protocol, wait_until,
};
use crate::target::local_address_towards;
use rdmux_key::{Key, random_nonce};

/// Time for each answer of the handshake, by a server that may be busy with others.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// What a client is made of besides the connection.
#[derive(Debug)]
pub(super) struct ClientParts {
    pub(super) pd: ProtectionDomain,
    pub(super) peer: SocketAddr,
    pub(super) key: Key,
    pub(super) options: Options,
    pub(super) id: [u8; 16],
}

impl ClientParts {
    pub(super) fn new(peer: SocketAddr, key: &Key, options: &Options) -> Result<ClientParts, Error> {
        let device = match &options.device {
            Some(device) => device.clone(),
            None => {
                let from = match options.from {
                    Some(from) => from,
                    None => local_address_towards(peer.ip())?,
                };
                Device::open(from)?
            }
        };
        let id = match options.client {
            Some(id) => id,
            None => {
                let [id @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = random_nonce()?;
                id
            }
        };
        Ok(ClientParts {
            pd: device.alloc_pd()?,
            peer,
            key: key.clone(),
            options: options.clone(),
            id,
        })
    }

    pub(super) fn establish(&self) -> Result<Establishing, Error> {
        Establishing::start(&self.pd, self.peer, &self.key, self.id)
    }
}

/// An attempt to connect to a server and to prove that the client has the key. Dropping it ends the connection at once.
#[derive(Debug)]
pub struct PendingClient {
    establishing: Establishing,
    /// Reports that the listener has answered.
    events: EventQueue,
    /// `None` once it has given its result.
    parts: Option<ClientParts>,
}

impl PendingClient {
    pub(super) fn start(parts: ClientParts) -> Result<PendingClient, Error> {
        let (establishing, events) = (parts.establish()?, EventQueue::new()?);
        if let Stage::Connecting(pending) = &establishing.stage {
            pending.notify(&events, 0);
        }
        Ok(PendingClient {
            establishing,
            events,
            parts: Some(parts),
        })
    }

    /// Moves the attempt on. Returns the result, once, and `None` before and after that. After `None` before the result, the
    /// descriptor becomes readable when there is something to do; and this is to be called at [`PendingClient::due`]. Both change with
    /// the steps of the attempt: ask for them after each call.
    pub fn poll(&mut self) -> Option<Result<Client, Error>> {
        self.parts.as_ref()?;
        while self.events.poll().is_some() {}
        let link = self.establishing.poll().transpose()?;
        // After a failure, nothing of the connection stays for as long as this is not dropped.
        self.establishing.stage = Stage::Over;
        let parts = self.parts.take()?;
        Some(link.and_then(|link| Client::new(parts, link)))
    }

    /// Returns the time at which the server's silence ends the attempt, once it has accepted the connection. Before that, the device
    /// limits the time.
    pub fn due(&self) -> Option<Instant> {
        self.establishing.due()
    }
}

impl AsFd for PendingClient {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.establishing.stage {
            Stage::Handshake { .. } => self.establishing.cq.as_fd(),
            Stage::Connecting(_) | Stage::Over => self.events.as_fd(),
        }
    }
}

/// The steps to a connection that may be used.
#[derive(Debug)]
pub(super) struct Establishing {
    peer: SocketAddr,
    handshake: Handshake,
    // Dropped before its completion queue.
    stage: Stage,
    cq: CompletionQueue,
}

#[derive(Debug)]
enum Stage {
    /// The listener is to answer.
    Connecting(PendingConnection),
    /// The server is to answer the last request by this time.
    Handshake {
        link: Box<ServerConnection>,
        until: Instant,
    },
    Over,
}

impl Establishing {
    pub(super) fn start(
        pd: &ProtectionDomain,
        peer: SocketAddr,
        key: &Key,
        id: [u8; 16],
    ) -> Result<Establishing, Error> {
        let cq = pd.device().create_cq(SIZES.completions() as u32)?;
        let params = ConnectParams {
            // The server writes nothing here, but its probe, a WRITE of no bytes, needs the right.
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            ..ConnectParams::default()
        };
        let pending = MessageConnection::start(pd, &cq, peer, &params, &SIZES);
        Ok(Establishing {
            peer,
            handshake: Handshake::new(key.clone(), random_nonce()?, id),
            stage: Stage::Connecting(pending.map_err(|error| refused(peer, error))?),
            cq,
        })
    }

    /// Waits for the connection.
    pub(super) fn wait(mut self, wait: Wait) -> Result<ServerConnection, Error> {
        if let Stage::Connecting(pending) = std::mem::replace(&mut self.stage, Stage::Over) {
            self.connected(pending.wait())?;
        }
        loop {
            let until = self.due().unwrap_or_else(Instant::now);
            match wait_until(&self.cq, until, wait)? {
                None => self.check_time()?,
                Some(wc) => {
                    if let Some(link) = self.handle(&wc)? {
                        return Ok(link);
                    }
                }
            }
        }
    }

    /// Takes the steps that need no waiting. After `None` the completion queue is armed, if there is a connection.
    fn poll(&mut self) -> Result<Option<ServerConnection>, Error> {
        if let Stage::Connecting(pending) = &mut self.stage {
            let Some(result) = pending.poll() else {
                return Ok(None);
            };
            self.connected(result)?;
        }
        while let Some(wc) = self.cq.wait(Duration::ZERO)? {
            if let Some(link) = self.handle(&wc)? {
                return Ok(Some(link));
            }
        }
        self.check_time().map(|()| None)
    }

    /// Returns the time by which the server is to answer.
    fn due(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Handshake { until, .. } => Some(*until),
            Stage::Connecting(_) | Stage::Over => None,
        }
    }

    fn check_time(&self) -> Result<(), Error> {
        match self.due() {
            Some(until) if Instant::now() < until => Ok(()),
            _ => Err(lost(self.peer, "no answer within the timeout")),
        }
    }

    fn connected(&mut self, result: Result<MessageConnection, EstablishError>) -> Result<(), Error> {
        let connection = result.map_err(|error| refused(self.peer, error))?;
        let link = ServerConnection::new(connection, self.cq.clone(), HANDSHAKE_TIMEOUT);
        self.send(Box::new(link), &self.handshake.hello())
    }

    /// Sends a message of the handshake, whose answer has its time.
    fn send(&mut self, mut link: Box<ServerConnection>, message: &Message) -> Result<(), Error> {
        link.last_request += 1;
        link.send(link.last_request, message)?;
        let until = Instant::now() + HANDSHAKE_TIMEOUT;
        self.stage = Stage::Handshake { link, until };
        Ok(())
    }

    /// Handles a completion. Returns the connection when the handshake is done.
    fn handle(&mut self, wc: &WorkCompletion) -> Result<Option<ServerConnection>, Error> {
        let Stage::Handshake { link, .. } = &mut self.stage else {
            return Ok(None);
        };
        let completed = link.connection.handle(wc);
        let Completed::Message { bytes, .. } = completed.map_err(|status| failed(self.peer, status))? else {
            return Ok(None);
        };
        let (request, message) = parse(self.peer, &bytes)?;
        if request != link.last_request {
            return Err(protocol(self.peer, "an answer without a request"));
        }
        let next = self.handshake.handle(message).map_err(|failure| match failure {
            Failure::WrongKey => Error::WrongKey(self.peer),
            Failure::Refused(code, text) => Error::Refused { code, text },
            Failure::Protocol => protocol(self.peer, "unexpected handshake message"),
        })?;
        let Stage::Handshake { mut link, .. } = std::mem::replace(&mut self.stage, Stage::Over) else {
            return Ok(None);
        };
        match next {
            Next::Send(message) => self.send(link, &message).map(|()| None),
            Next::Welcome {
                keepalive_ms,
                messages_max,
                ..
            } => {
                link.keepalive = Duration::from_millis(keepalive_ms.into()).max(Duration::from_millis(100));
                link.probe_at = Instant::now() + link.keepalive;
                link.messages_max = usize::from(messages_max).clamp(1, MESSAGES_MAX);
                Ok(Some(*link))
            }
        }
    }
}

/// Returns the error of a connection that was not established.
fn refused(peer: SocketAddr, error: EstablishError) -> Error {
    match error {
        EstablishError::Connect(ConnectError::Rejected {
            reason: RejReason::INVALID_SERVICE_ID,
            ..
        }) => Error::NobodyListens(peer),
        EstablishError::Connect(ConnectError::Rejected { private_data, .. })
            if private_data.first().is_some_and(|b| *b != 0) =>
        {
            let end = private_data
                .iter()
                .position(|b| *b == 0)
                .unwrap_or(private_data.len());
            let text: String = String::from_utf8_lossy(&private_data[..end])
                .chars()
                .filter(|c| !c.is_control())
                .collect();
            Error::Refused {
                code: ErrorCode::Busy,
                text: format!("{peer} refused the connection: {text}"),
            }
        }
        EstablishError::Connect(source) => Error::Connect { peer, source },
        EstablishError::Create(error) => error.into(),
        EstablishError::Register(error) => error.into(),
        EstablishError::Post(error) => error.into(),
        EstablishError::Queue(GetError::Create(error)) => error.into(),
        EstablishError::Queue(error) => std::io::Error::other(error).into(),
        EstablishError::Io(error) => error.into(),
    }
}
