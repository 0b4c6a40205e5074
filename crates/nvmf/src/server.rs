//! Serves a [`Target`]: reactors, each with connections of its own, which stay with it.

mod handle;
mod media;
mod offload;
mod peers;
mod rdma;
mod tcp;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdmux_runtime::{Limits, ListenAtError, Mailbox, Queues, Reactor, ReactorEvent, Recipient};
use rdmux_verbs::OpenError;
use rdmux_verbs::waiting::WaitMode;
use rdmux_wire::nvme::TransportKind;

use self::handle::Ask;
pub use self::handle::{Handle, Settings};
use self::media::{Job, Media};
use self::offload::Offload;
use self::rdma::Rdma;
use self::tcp::Tcp;
use crate::target::{Listener, Target};
use crate::tls::{self, TlsError};

/// Time between two looks at the deadlines of connections.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Name of the thread of the offload engine.
pub const OFFLOAD_THREAD: &str = "offload";

/// Settings of a server.
#[derive(Debug)]
pub struct Config {
    /// Subsystems that it serves.
    pub target: Arc<Target>,
    /// Transports, addresses and ports to listen on; port 0 has the system choose one for TCP.
    pub listen: Vec<Listen>,
    /// Number of reactors, each a thread.
    pub reactors: usize,
    /// Has one more reactor, on a thread of its own, which is the offload engine and has all connections by RDMA.
    pub offload: bool,
    /// Pins how reactors wait.
    pub waiting: Option<WaitMode>,
}

/// Most bytes of data that the capsule of an I/O command may have.
pub const IN_CAPSULE_BYTES_MAX: u32 = 16 << 10;

/// A listener, with its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// Transport, address and port.
    pub listener: Listener,
    /// Bytes of data that the capsule of an I/O command may have: a multiple of 16, at most [`IN_CAPSULE_BYTES_MAX`]. With 0 the data of each write are fetched, into memory that the target chooses.
    pub in_capsule_bytes: u32,
    /// Its connections begin with TLS, but for those on which a host and the target agree on a key.
    pub tls: bool,
}

impl From<Listener> for Listen {
    /// Returns a listener with the settings that fit most uses.
    fn from(listener: Listener) -> Listen {
        let in_capsule_bytes = match listener.transport {
            TransportKind::Tcp => IN_CAPSULE_BYTES_MAX,
            TransportKind::Rdma => rdma::IN_CAPSULE_DEFAULT,
        };
        Listen {
            listener,
            in_capsule_bytes,
            tls: false,
        }
    }
}

impl Listen {
    /// Checks that connections of such a listener can be served.
    pub(crate) fn check(&self) -> Result<(), ServeError> {
        let listener = self.listener;
        match self.tls {
            true if listener.transport != TransportKind::Tcp => Err(ServeError::TlsTransport(listener)),
            true if !tls::is_present() => Err(ServeError::Tls {
                listener,
                source: TlsError::Absent,
            }),
            _ => Ok(()),
        }
    }
}

/// Reason for which a server could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// An address or port is not free.
    #[error("cannot listen on {address}: {}", no_place(address, source))]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// There is no RDMA device with an address.
    #[error("cannot listen on {address} by RDMA: {source}")]
    Open {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: OpenError,
    },
    /// A port of an RDMA device is not free, or the device lacks something.
    #[error(
        "cannot listen on {address} by RDMA: {source} (choose another with --listen rdma:ADDR:PORT, or end the other server)"
    )]
    ListenRdma {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: ListenAtError,
    },
    /// A listener requires TLS, which there is not.
    #[error("cannot listen on {listener} with TLS: {source}")]
    Tls {
        /// The listener.
        listener: Listener,
        /// The cause.
        source: TlsError,
    },
    /// A listener requires TLS by a transport that has none.
    #[error("cannot listen on {0} with TLS: TLS is for tcp alone")]
    TlsTransport(Listener),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Returns the reason for which an address of TCP cannot be listened on, and what helps.
fn no_place(address: &SocketAddr, source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::AddrNotAvailable => format!(
            "{} is no address of this host: `ip address` lists those there are, in each network namespace its own",
            address.ip()
        ),
        _ => format!("{source} (choose another with --listen tcp:ADDR:PORT, or end the other server)"),
    }
}

/// Has all reactors look at their connections: I/O queues of a controller may be with any of them.
fn tell_of_change(mailboxes: &[Mailbox<Mail>]) {
    for mailbox in mailboxes {
        mailbox.send(Mail::Changed);
    }
}

/// Stops a server when it is dropped.
struct StopOnDrop(Handle);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[derive(Debug)]
enum Mail {
    Stop,
    /// A change of a subsystem or a controller, which queues of this reactor may share.
    Changed,
    /// About listeners.
    Ask(Ask),
    Tcp(tcp::Mail),
    Rdma(rdma::Mail),
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    reactors: Vec<ServerReactor>,
    listeners: Vec<Listener>,
    handle: Handle,
}

/// A reactor, and what the connections of all transports have in common.
#[derive(Debug)]
struct Core {
    reactor: Reactor<Mail>,
    target: Arc<Target>,
    /// All reactors of the server.
    mailboxes: Vec<Mailbox<Mail>>,
    /// Number of them that have connections by TCP, the first ones.
    tcp_reactors: usize,
    media: Media,
    next_look: Option<Instant>,
}

/// A reactor with its connections.
#[derive(Debug)]
struct ServerReactor {
    // The connections end before what they stand on.
    rdma: Rdma,
    tcp: Tcp,
    core: Core,
}

impl Drop for ServerReactor {
    fn drop(&mut self) {
        self.rdma.keep_peers(&mut self.core);
    }
}

impl Server {
    /// Listens.
    ///
    /// # Errors
    /// An address is not free, or the system refuses a descriptor.
    pub fn bind(config: Config) -> Result<Server, ServeError> {
        let limits = Limits {
            connections: rdma::CONNECTIONS_MAX,
            // Of hosts without a keep-alive of their own, and of I/O queues.
            keepalive: Duration::from_secs(30),
            shared_receives: Some(rdma::SHARED_RECEIVES),
            queues: Queues::Pool,
            ledger: config.target.ledger().cloned(),
        };
        let mut reactors = Vec::new();
        let others = config.reactors.max(1);
        for _ in 0..others + usize::from(config.offload) {
            let sizes = rdma::sizes_max(rdma::IN_CAPSULE_DEFAULT);
            reactors.push(Reactor::new(sizes, limits.clone(), config.waiting)?);
        }
        config.listen.iter().try_for_each(Listen::check)?;
        let mailboxes: Vec<_> = reactors.iter().map(Reactor::mailbox).collect();
        // The offload engine is the last.
        let with_rdma = if config.offload {
            others..others + 1
        } else {
            0..others
        };
        let recipients: Vec<Recipient> = reactors[with_rdma.clone()]
            .iter()
            .map(Reactor::recipient)
            .collect();
        let new = |(number, reactor)| {
            let offload = (number >= others).then(Offload::default);
            ServerReactor::new(reactor, config.target.clone(), mailboxes.clone(), others, offload)
        };
        let mut reactors: Vec<_> = reactors.into_iter().enumerate().map(new).collect();
        let handle = Handle::new(mailboxes, with_rdma.clone(), recipients, config.waiting);
        let mut listeners = Vec::new();
        for listen in config.listen {
            let mut listener = listen.listener;
            let address = listener.address;
            match listener.transport {
                TransportKind::Tcp => {
                    let first = &mut reactors[0];
                    let listened = first.tcp.listen(&mut first.core, &listen);
                    listener.address = listened.map_err(|source| ServeError::Listen { address, source })?;
                }
                TransportKind::Rdma => {
                    let reactors = &mut reactors[with_rdma.clone()];
                    let known = reactors[0].rdma.device_for(address)?;
                    let parts = handle.listen_rdma(known, &listen)?;
                    for (own, part) in reactors.iter_mut().zip(parts) {
                        own.rdma.listen(&mut own.core, part);
                    }
                }
            }
            config.target.add_way(listener, listen.tls);
            listeners.push(listener);
        }
        Ok(Server {
            reactors,
            listeners,
            handle,
        })
    }

    /// Returns what it listens on, with the ports that the system chose.
    pub fn listeners(&self) -> &[Listener] {
        &self.listeners
    }

    /// Returns a handle for other threads.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Serves until it is stopped: the first reactor on this thread, the others on threads of their own.
    ///
    /// # Errors
    /// A system call of a reactor failed.
    pub fn run(self) -> io::Result<()> {
        let handle = self.handle();
        let mut reactors = self.reactors.into_iter();
        let first = reactors.next();
        let mut threads: Vec<JoinHandle<io::Result<()>>> = Vec::new();
        let mut result = Ok(());
        for mut own in reactors {
            let name = if own.core.media.has_offload() {
                OFFLOAD_THREAD
            } else {
                "nvmf"
            };
            let others = handle.clone();
            let run = move || {
                // Also if it panics: its controllers are gone then.
                let _stop = StopOnDrop(others);
                own.run()
            };
            match std::thread::Builder::new().name(name.to_owned()).spawn(run) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    result = Err(error);
                    handle.stop();
                }
            }
        }
        if let Some(mut first) = first {
            result = result.and(first.run());
        }
        handle.stop();
        for thread in threads {
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a reactor has panicked")));
            result = result.and(ended);
        }
        result
    }
}

impl ServerReactor {
    fn new(
        reactor: Reactor<Mail>,
        target: Arc<Target>,
        mailboxes: Vec<Mailbox<Mail>>,
        tcp_reactors: usize,
        offload: Option<Offload>,
    ) -> ServerReactor {
        let media = Media::new(reactor.mailbox(), offload);
        let core = Core {
            reactor,
            target,
            mailboxes,
            tcp_reactors,
            media,
            next_look: None,
        };
        ServerReactor {
            rdma: Rdma::default(),
            tcp: Tcp::default(),
            core,
        }
    }

    fn run(&mut self) -> io::Result<()> {
        let ServerReactor { core, tcp, rdma } = self;
        core.media.start(&mut core.reactor)?;
        loop {
            let event = match core.media.polls() {
                true => core.reactor.poll(),
                false => {
                    let looks = [
                        core.next_look,
                        tcp.accepts_again(),
                        core.media.next_look(Instant::now()),
                    ];
                    core.reactor.next(looks.into_iter().flatten().min())?
                }
            };
            let now = Instant::now();
            match event {
                Some(ReactorEvent::Readable(id)) if core.media.is_ring(id) => {}
                Some(ReactorEvent::Readable(id)) => tcp.handle_readable(core, id, now)?,
                Some(ReactorEvent::Writable(id)) => tcp.pump(core, id, now),
                Some(ReactorEvent::Mail(Mail::Stop)) => return Ok(()),
                Some(ReactorEvent::Mail(Mail::Tcp(mail))) => tcp.handle_mail(core, mail, now),
                Some(ReactorEvent::Mail(Mail::Rdma(mail))) => rdma.handle_mail(core, mail, now),
                Some(ReactorEvent::Mail(Mail::Changed)) => {
                    tcp.handle_change(core, now);
                    rdma.handle_change(core, now);
                    core.media.handle_change(&core.target);
                }
                Some(ReactorEvent::Mail(Mail::Ask(ask))) => ask.answer(core, tcp, rdma),
                Some(ReactorEvent::Request(request)) => rdma.handle_request(core, request, now),
                Some(ReactorEvent::Completed(id, completed)) => {
                    rdma.handle_completed(core, id, completed, now);
                }
                Some(ReactorEvent::Ended(id, end)) => rdma.handle_ended(core, id, end, now),
                // The target dials nobody.
                Some(ReactorEvent::Connected(..)) | None => {}
            }
            if core.next_look.is_some_and(|look| look <= now) {
                core.next_look = None;
                tcp.look_at_deadlines(core, now);
                rdma.look_at_deadlines(core, now);
            }
            tcp.accept_again(core, now)?;
            core.media.submit();
            core.media.poll();
            // Reads that the page cache has are done by now.
            while let Some(finished) = core.media.pop() {
                match finished {
                    Mail::Tcp(mail) => tcp.handle_mail(core, mail, now),
                    Mail::Rdma(mail) => rdma.handle_mail(core, mail, now),
                    _ => {}
                }
            }
            tcp.answer_finished(core, now);
            core.media.submit();
        }
    }
}

impl Core {
    /// Has the deadlines looked at, at this time or before.
    fn look_by(&mut self, time: Instant) {
        self.next_look = self.next_look.into_iter().chain([time]).min();
    }

    /// Has all reactors look at their connections: I/O queues of a controller may be with any of them.
    fn tell_of_change(&self) {
        tell_of_change(&self.mailboxes);
    }
}
