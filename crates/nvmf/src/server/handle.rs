//! A server's handle for other threads, and what these ask about listeners.

use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::mpsc::{Sender, channel};

use rdmux_runtime::{Mailbox, Recipient};
use rdmux_verbs::Device;
use rdmux_verbs::waiting::WaitMode;
use rdmux_wire::nvme::TransportKind;

use super::rdma::{self, Part, Rdma};
use super::tcp::Tcp;
use super::{Core, Listen, Mail, ServeError, tell_of_change};
use crate::target::Listener;

/// Reaches a server from other threads.
#[derive(Clone, Debug)]
pub struct Handle {
    reactors: Vec<Mailbox<Mail>>,
    /// Those that have connections by RDMA, with what brings requests to them.
    with_rdma: Range<usize>,
    recipients: Vec<Recipient>,
    waiting: Option<WaitMode>,
}

/// Other settings of a listener, with all that they need ([`Handle::prepare`]).
#[derive(Debug)]
pub struct Settings {
    listen: Listen,
    /// Of a listener for RDMA, a part for each reactor.
    parts: Vec<Part>,
}

/// A question of another thread about listeners, with the way back. Whoever has asked may be gone.
#[derive(Debug)]
pub(super) enum Ask {
    /// Listen on an address of TCP, and answer with the port.
    Listen(Listen, Sender<io::Result<SocketAddr>>),
    /// Take connections that come to a listener for TCP with these settings.
    Set(Listen, Sender<()>),
    /// Listen for RDMA, or go on with other settings.
    ListenRdma(Box<Part>, Sender<()>),
    /// Listen no more; the answer is false if the reactor did not.
    StopListening(Listener, Sender<bool>),
    /// The device for another listener, if it is known.
    DeviceFor(SocketAddr, Sender<Result<Option<Device>, ServeError>>),
    /// The device, or engine of a device, that listens at an address.
    ListensOn(SocketAddr, Sender<Option<Device>>),
}

impl Ask {
    pub(super) fn answer(self, core: &mut Core, tcp: &mut Tcp, rdma: &mut Rdma) {
        match self {
            Ask::Listen(listen, reply) => drop(reply.send(tcp.listen(core, &listen))),
            Ask::Set(listen, reply) => {
                tcp.set(&listen);
                let _ = reply.send(());
            }
            Ask::ListenRdma(part, reply) => {
                rdma.listen(core, *part);
                let _ = reply.send(());
            }
            Ask::StopListening(listener, reply) => {
                let address = listener.address;
                let _ = reply.send(match listener.transport {
                    TransportKind::Tcp => tcp.stop_listening(core, address),
                    TransportKind::Rdma => rdma.stop_listening(core, address),
                });
            }
            Ask::DeviceFor(address, reply) => drop(reply.send(rdma.device_for(address))),
            Ask::ListensOn(address, reply) => drop(reply.send(rdma.listens_on(address))),
        }
    }
}

impl Handle {
    pub(super) fn new(
        reactors: Vec<Mailbox<Mail>>,
        with_rdma: Range<usize>,
        recipients: Vec<Recipient>,
        waiting: Option<WaitMode>,
    ) -> Handle {
        Handle {
            reactors,
            with_rdma,
            recipients,
            waiting,
        }
    }

    /// Makes [`Server::run`](super::Server::run) return.
    pub fn stop(&self) {
        for mailbox in &self.reactors {
            mailbox.send(Mail::Stop);
        }
    }

    /// Has all connections look at what has changed in their subsystems.
    pub fn tell_of_change(&self) {
        tell_of_change(&self.reactors);
    }

    /// Listens on another address while the server runs. Returns the listener, with the port that the system chose if it had none.
    ///
    /// # Errors
    /// The address is not free, there is no device with it, or the server is over.
    pub fn listen(&self, listen: Listen) -> Result<Listener, ServeError> {
        listen.check()?;
        let listener = listen.listener;
        let address = listener.address;
        match listener.transport {
            TransportKind::Tcp => self
                .ask_first(|reply| Ask::Listen(listen, reply))
                .unwrap_or_else(|| Err(is_over()))
                .map(|address| Listener { address, ..listener })
                .map_err(|source| ServeError::Listen { address, source }),
            TransportKind::Rdma => {
                let known = ask(self.first_with_rdma(), |reply| Ask::DeviceFor(address, reply));
                let parts = self.listen_rdma(known.ok_or_else(is_over)??, &listen)?;
                self.give(parts)?;
                Ok(listener)
            }
        }
    }

    /// Listens on an address for RDMA for all reactors, each of which gets a part; `known`: its device, if there is one.
    pub(super) fn listen_rdma(
        &self,
        known: Option<Device>,
        listen: &Listen,
    ) -> Result<Vec<Part>, ServeError> {
        let options = rdmux_verbs::Options {
            waiting: self.waiting,
            ..rdmux_verbs::Options::default()
        };
        rdma::listen(&self.recipients, known, listen, options)
    }

    /// Prepares other settings of a listener.
    ///
    /// # Errors
    /// Its transport has no such settings, there is not enough memory for them, the server does not listen there, or it is over.
    pub fn prepare(&self, listen: Listen) -> Result<Settings, ServeError> {
        listen.check()?;
        let mut parts = Vec::new();
        if listen.listener.transport == TransportKind::Rdma {
            let mut devices = Vec::new();
            for reactor in &self.reactors[self.with_rdma.clone()] {
                let listens_on = |reply| Ask::ListensOn(listen.listener.address, reply);
                let device = ask(reactor, listens_on).ok_or_else(is_over)?;
                devices.push(device.ok_or_else(|| is_missing(&listen.listener))?);
            }
            parts = rdma::renewal(&self.recipients, &devices, &listen)?;
        }
        Ok(Settings { listen, parts })
    }

    /// Has connections that come to a listener have other settings. Those that there are keep theirs.
    ///
    /// # Errors
    /// The server is over.
    pub fn set(&self, settings: Settings) -> Result<(), ServeError> {
        match settings.listen.listener.transport {
            TransportKind::Tcp => {
                let set = self.ask_first(|reply| Ask::Set(settings.listen, reply));
                Ok(set.ok_or_else(is_over)?)
            }
            TransportKind::Rdma => self.give(settings.parts),
        }
    }

    /// Gives the reactors their parts of a listener: the first one, which may pass requests on to the others, comes last.
    fn give(&self, parts: Vec<Part>) -> Result<(), ServeError> {
        let reactors = &self.reactors[self.with_rdma.clone()];
        for (reactor, part) in reactors.iter().zip(parts).rev() {
            ask(reactor, |reply| Ask::ListenRdma(Box::new(part), reply)).ok_or_else(is_over)?;
        }
        Ok(())
    }

    /// Listens no more on an address. Connections that were accepted stay. Returns false if it did not listen there.
    pub fn stop_listening(&self, listener: &Listener) -> bool {
        let mut has_stopped = false;
        // The first reactor has the listeners for TCP; the first with connections by RDMA has those that pass requests on to others.
        for reactor in &self.reactors {
            has_stopped |= ask(reactor, |reply| Ask::StopListening(*listener, reply)) == Some(true);
        }
        has_stopped
    }

    fn first_with_rdma(&self) -> &Mailbox<Mail> {
        &self.reactors[self.with_rdma.start]
    }

    fn ask_first<T>(&self, question: impl FnOnce(Sender<T>) -> Ask) -> Option<T> {
        ask(self.reactors.first()?, question)
    }
}

/// Asks a reactor, and waits for its answer; `None` if the server is over.
fn ask<T>(reactor: &Mailbox<Mail>, question: impl FnOnce(Sender<T>) -> Ask) -> Option<T> {
    let (reply, answer) = channel();
    reactor.send(Mail::Ask(question(reply)));
    answer.recv().ok()
}

fn is_missing(listener: &Listener) -> io::Error {
    let text = format!("the server does not listen on {listener}: remove the listener, and add it again");
    io::Error::new(io::ErrorKind::NotFound, text)
}

fn is_over() -> io::Error {
    io::Error::other("the server is over")
}
