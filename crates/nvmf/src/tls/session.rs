//! Sessions of s2n-tls.
#![expect(unsafe_code, reason = "the library calls back for the bytes of a socket")]

use std::ffi::c_void;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::task::{Poll, Waker};

use rdmux_wire::nvme::{HashId, Nqn};
use rustix::io::Errno;
use s2n_tls::callbacks::{ClientHelloCallback, ConnectionFuture};
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, PskHmac};
use s2n_tls::error::{Error, ErrorType};
use s2n_tls::psk;
use s2n_tls::security::DEFAULT_TLS13;

use super::hello::identities;
use super::psk::{Credentials, Derivation, Identity, Psk, Version};
use super::{Keys, Proof, TlsError};

/// Bytes that become a record: the most that one holds (RFC 8446, 5.1).
const RECORD_MAX: usize = 16 << 10;
/// Types of records. RFC 8446, 5.1.
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

impl From<Error> for TlsError {
    fn from(error: Error) -> TlsError {
        TlsError::Library(error.message().to_owned())
    }
}

/// The target's part of sessions.
#[derive(Debug)]
pub(crate) struct Server(Config);

impl Server {
    pub(crate) fn new(keys: Keys) -> Result<Server, TlsError> {
        let mut config = Config::builder();
        config.set_security_policy(&DEFAULT_TLS13)?;
        config.with_system_certs(false)?;
        config.set_client_hello_callback(Chooser(keys))?;
        Ok(Server(config.build()?))
    }

    /// Makes a session with a host that has connected.
    pub(crate) fn accept(&self) -> Result<Session, TlsError> {
        Session::new(Connection::new_server(), self.0.clone())
    }
}

/// Chooses the key that a host offers.
struct Chooser(Keys);

impl ClientHelloCallback for Chooser {
    fn on_client_hello(
        &self,
        connection: &mut Connection,
    ) -> Result<Option<std::pin::Pin<Box<dyn ConnectionFuture>>>, Error> {
        let hello = connection.client_hello()?.raw_message()?;
        for offered in identities(&hello) {
            let Some(Identity {
                version,
                host,
                subsystem,
            }) = Identity::parse(offered)
            else {
                continue;
            };
            for psk in self.0.0(&host, &subsystem) {
                let derivations = [Derivation::Standard, Derivation::OldLibnvme].into_iter();
                let mut credentials = derivations
                    .filter_map(|derivation| psk.credentials((version, derivation), &host, &subsystem));
                if let Some(credentials) = credentials.find(|own| own.identity.as_bytes() == offered) {
                    connection.append_psk(&key(&credentials)?)?;
                    connection.set_application_context(Some(Proof { host, subsystem, psk }));
                    return Ok(None);
                }
            }
        }
        // Without a key the library finds nothing by which it could go on, and ends the handshake.
        Ok(None)
    }
}

fn key(credentials: &Credentials) -> Result<psk::Psk, Error> {
    let mut builder = psk::Psk::builder()?;
    builder.set_identity(credentials.identity.as_bytes())?;
    builder.set_secret(&credentials.key)?;
    builder.set_hmac(match credentials.hash {
        HashId::Sha384 => PskHmac::SHA384,
        _ => PskHmac::SHA256,
    })?;
    builder.build()
}

/// The socket of a session, as long as a call lasts.
#[derive(Debug)]
struct Socket {
    descriptor: AtomicI32,
    /// It has not taken all bytes.
    is_blocked: AtomicBool,
    /// The peer has sent something.
    has_begun: AtomicBool,
}

const NO_SOCKET: RawFd = -1;

/// A session. Its connection keeps up to a record of each direction, and the bytes that become the next one.
#[derive(Debug)]
pub(crate) struct Session {
    // Gone before what its callbacks use.
    connection: Connection,
    socket: Arc<Socket>,
    is_ready: bool,
    record: Vec<u8>,
    failure: Option<String>,
}

impl Session {
    /// Makes a session with a target that was connected to.
    pub(crate) fn connect(psk: &Psk, host: &Nqn, subsystem: &Nqn) -> Result<Session, TlsError> {
        let mut config = Config::builder();
        config.set_security_policy(&DEFAULT_TLS13)?;
        // Nobody but who has the key is believed.
        config.with_system_certs(false)?;
        let mut session = Session::new(Connection::new_client(), config.build()?)?;
        let form = (Version::V1, Derivation::Standard);
        let credentials = psk.credentials(form, host, subsystem).ok_or(TlsError::Names)?;
        session.connection.append_psk(&key(&credentials)?)?;
        Ok(session)
    }

    fn new(mut connection: Connection, config: Config) -> Result<Session, TlsError> {
        let socket = Arc::new(Socket {
            descriptor: AtomicI32::new(NO_SOCKET),
            is_blocked: AtomicBool::new(false),
            has_begun: AtomicBool::new(false),
        });
        connection.set_config(config)?;
        // After an error the library would sleep for seconds, to hide at what time it has found it: a host could hold up all others so. It is
        // meant for ciphers older than those of TLS 1.3.
        connection.set_blinding(Blinding::SelfService)?;
        connection.prefer_throughput()?;
        // The library wants one for callbacks that take their time, which ours do not.
        connection.set_waker(Some(Waker::noop()))?;
        connection.set_receive_callback(Some(receive))?;
        connection.set_send_callback(Some(send))?;
        let context = Arc::as_ptr(&socket).cast_mut().cast::<c_void>();
        // SAFETY: a session drops its connection before the Arc that keeps the context; where this function fails, the connection makes no call any
        // more.
        unsafe {
            connection.set_receive_context(context)?;
            connection.set_send_context(context)?;
        }
        Ok(Session {
            connection,
            socket,
            is_ready: false,
            record: Vec::new(),
            failure: None,
        })
    }

    /// Returns true once the handshake is over.
    pub(crate) fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Takes the handshake further, and returns true once it is over.
    pub(crate) fn handshake(&mut self, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        match self.call(socket, |connection, _| connection.poll_negotiate().map_ok(|_| 0)) {
            Ok(_) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(error) => return Err(error),
        }
        // The library may as well agree on other proofs than a key.
        if self.connection.negotiated_psk_identity_length().unwrap_or(0) == 0 {
            self.failure = Some("the peer has not proved that it has the key".to_owned());
            return Err(Errno::PROTO);
        }
        self.is_ready = true;
        Ok(true)
    }

    /// Returns true if the last call wanted the socket to take more bytes.
    pub(crate) fn is_blocked(&self) -> bool {
        self.socket.is_blocked.load(Ordering::Relaxed)
    }

    /// Returns once, after the handshake, what the host has proved by it.
    pub(crate) fn take_proof(&mut self) -> Option<Proof> {
        match self.is_ready {
            true => self.connection.application_context_mut::<Option<Proof>>()?.take(),
            false => None,
        }
    }

    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>, space: &mut [u8]) -> Result<usize, Errno> {
        self.call(socket, |connection, _| connection.poll_recv(space))
    }

    /// Returns true if a part of a record was received that nobody has taken.
    pub(crate) fn has_bytes(&self) -> bool {
        self.connection.peek_len() > 0
    }

    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> Result<usize, Errno> {
        // A record of its own for each slice would cost more than the copy.
        self.record.clear();
        for slice in slices {
            let room = RECORD_MAX - self.record.len();
            self.record.extend_from_slice(&slice[..slice.len().min(room)]);
        }
        self.call(socket, |connection, record| connection.poll_send(record))
    }

    /// Returns what has ended the session.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Has the library do something with the socket.
    fn call(
        &mut self,
        socket: BorrowedFd<'_>,
        what: impl FnOnce(&mut Connection, &[u8]) -> Poll<Result<usize, Error>>,
    ) -> Result<usize, Errno> {
        let descriptor = &self.socket.descriptor;
        descriptor.store(socket.as_raw_fd(), Ordering::Relaxed);
        self.socket.is_blocked.store(false, Ordering::Relaxed);
        let result = what(&mut self.connection, &self.record);
        descriptor.store(NO_SOCKET, Ordering::Relaxed);
        match result {
            Poll::Ready(Ok(bytes)) => Ok(bytes),
            Poll::Pending => Err(Errno::AGAIN),
            // The peer has not said that it is about to close.
            Poll::Ready(Err(error)) if error.kind() == ErrorType::ConnectionClosed && self.is_ready => Ok(0),
            Poll::Ready(Err(error)) if error.kind() == ErrorType::IOError => {
                let error = Errno::from_io_error(&io::Error::last_os_error());
                let error = error.unwrap_or(Errno::PROTO);
                if error == Errno::PROTO {
                    self.failure = Some("the peer does not speak TLS".to_owned());
                }
                Err(error)
            }
            Poll::Ready(Err(error)) => {
                self.failure = Some(error.message().to_owned());
                Err(Errno::PROTO)
            }
        }
    }
}

/// Receives from the socket of a session, as recv(2): -1 and `errno` if there is nothing.
unsafe extern "C" fn receive(context: *mut c_void, bytes: *mut u8, len: u32) -> i32 {
    // SAFETY: the context is that of `Session::new`, and lives as long as the connection.
    let socket = unsafe { &*context.cast::<Socket>() };
    let descriptor = socket.descriptor.load(Ordering::Relaxed);
    // SAFETY: the library has room for so many bytes.
    let received = unsafe { libc::recv(descriptor, bytes.cast(), len as usize, libc::MSG_DONTWAIT) };
    if received > 0 && !socket.has_begun.swap(true, Ordering::Relaxed) {
        // The library would take any bytes for the header of a record, and wait for as many as that says.
        // SAFETY: at least one byte is there.
        if !matches!(unsafe { bytes.read() }, ALERT | HANDSHAKE) {
            // SAFETY: it is this thread's own.
            unsafe { libc::__errno_location().write(libc::EPROTO) };
            return -1;
        }
    }
    received as i32
}

/// Sends to the socket of a session, as send(2): -1 and `errno` if it takes nothing.
unsafe extern "C" fn send(context: *mut c_void, bytes: *const u8, len: u32) -> i32 {
    // SAFETY: the context is that of `Session::new`, and lives as long as the connection.
    let socket = unsafe { &*context.cast::<Socket>() };
    let descriptor = socket.descriptor.load(Ordering::Relaxed);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the library has so many bytes there.
    let sent = unsafe { libc::send(descriptor, bytes.cast(), len as usize, flags) };
    if sent < 0 {
        socket.is_blocked.store(true, Ordering::Relaxed);
    }
    sent as i32
}
