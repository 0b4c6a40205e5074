//! Connections of both transports, as a run drives them.

use std::io::IoSlice;
use std::time::Instant;

use rdmux_nvmf::host::queue::{Command, Completion};
use rdmux_nvmf::host::tcp::Connection as HostTcp;
use rdmux_nvmf::rdma;
use rdmux_nvmf::target::Io;
use rdmux_nvmf::tcp::{self, Buffers, Connection as TargetTcp};
use rdmux_runtime::{FileAccess, Pages};
use rdmux_wire::nvme::Status;

use super::rdma::{HostQp, TargetQp};
use super::stream::Pipe;
use crate::dice::Dice;

const SLICES_MAX: usize = 64;

/// A host's end of a connection.
#[derive(Debug)]
pub(super) enum HostConnection {
    Tcp(Box<HostTcp>),
    Rdma(Box<HostQp>),
}

/// Does the same with a connection of each transport.
macro_rules! of_both {
    ($connection:expr, $own:ident => $do:expr) => {
        match $connection {
            Self::Tcp($own) => $do,
            Self::Rdma(qp) => {
                let $own = qp.connection();
                $do
            }
        }
    };
    (mut $connection:expr, $own:ident => $do:expr) => {
        match $connection {
            Self::Tcp($own) => $do,
            Self::Rdma(qp) => {
                let $own = qp.connection_mut();
                $do
            }
        }
    };
}

impl HostConnection {
    /// Returns true if its beginning is over.
    pub(super) fn is_ready(&self) -> bool {
        match self {
            HostConnection::Tcp(own) => own.is_ready(),
            HostConnection::Rdma(_) => true,
        }
    }

    pub(super) fn end(&self) -> Option<String> {
        match self {
            HostConnection::Tcp(own) => own.end().map(|end| end.to_string()),
            HostConnection::Rdma(own) => own.end(),
        }
    }

    pub(super) fn room(&self) -> usize {
        of_both!(self, own => own.room())
    }

    pub(super) fn in_flight(&self) -> usize {
        of_both!(self, own => own.in_flight())
    }

    pub(super) fn has_expired(&self, now: Instant) -> bool {
        of_both!(self, own => own.has_expired(now))
    }

    pub(super) fn has_completions(&self) -> bool {
        of_both!(self, own => own.has_completions())
    }

    pub(super) fn poll(&mut self) -> Option<Completion> {
        of_both!(mut self, own => own.poll())
    }

    pub(super) fn take_commands(&mut self) -> Vec<Command> {
        of_both!(mut self, own => own.take_commands())
    }

    pub(super) fn submit(&mut self, command: Command, deadline: Option<Instant>) {
        match self {
            HostConnection::Tcp(own) => own.submit(command, deadline),
            HostConnection::Rdma(own) => own.submit(command, deadline),
        }
    }

    pub(super) fn receive(&mut self, pipe: &mut Pipe, dice: &mut Dice) {
        match self {
            HostConnection::Tcp(own) => {
                let bytes = pipe.receive(own.space(), dice);
                if bytes > 0 {
                    own.received(bytes);
                }
            }
            HostConnection::Rdma(own) => drop(own.receive(pipe, dice)),
        }
    }

    /// Sends what the stream takes.
    pub(super) fn send(&mut self, pipe: &mut Pipe) {
        loop {
            let sent = match self {
                HostConnection::Tcp(own) => {
                    let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                    let number = own.slices(&mut slices);
                    let sent = pipe.send(&slices[..number]);
                    if sent > 0 {
                        own.sent(sent);
                    }
                    sent
                }
                HostConnection::Rdma(own) => own.send(pipe),
            };
            if sent == 0 {
                return;
            }
        }
    }
}

/// The target's end of a connection.
#[derive(Debug)]
pub(super) enum TargetConnection {
    Tcp(Box<TargetTcp>),
    Rdma(Box<TargetQp>),
}

/// Reason for which the target has ended a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Silent,
    ControllerOver,
    /// None that a run has.
    Wrong(String),
}

impl TargetConnection {
    pub(super) fn is_idle(&self) -> bool {
        match self {
            TargetConnection::Tcp(own) => own.is_idle(),
            TargetConnection::Rdma(own) => own.is_idle(),
        }
    }

    pub(super) fn has_io_queues(&self) -> bool {
        of_both!(self, own => own.has_io_queues())
    }

    pub(super) fn end(&self) -> Option<End> {
        match self {
            TargetConnection::Tcp(own) => Some(match own.end()? {
                tcp::End::Silent => End::Silent,
                tcp::End::ControllerOver => End::ControllerOver,
                end => End::Wrong(end.to_string()),
            }),
            TargetConnection::Rdma(own) => match (own.fault(), own.connection().end()) {
                (Some(fault), _) => Some(End::Wrong(fault.clone())),
                (None, None) => None,
                (None, Some(rdma::End::Silent)) => Some(End::Silent),
                (None, Some(rdma::End::ControllerOver)) => Some(End::ControllerOver),
                (None, Some(end)) => Some(End::Wrong(end.to_string())),
            },
        }
    }

    /// Returns true if it sends what it has after its end, and waits for the host to close it.
    pub(super) fn lingers(&self) -> bool {
        matches!(self, TargetConnection::Tcp(_))
    }

    /// Returns when commands may go on that are held up.
    pub(super) fn held_until(&self, now: Instant) -> Option<Instant> {
        of_both!(self, own => own.held_until(now))
    }

    pub(super) fn take_reset(&mut self) -> bool {
        of_both!(mut self, own => own.take_reset())
    }

    pub(super) fn handle_change(&mut self) {
        of_both!(mut self, own => own.handle_change());
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        of_both!(mut self, own => own.handle_timeout(now));
    }

    /// Takes what the stream has, if it wants it. Returns the number of bytes.
    pub(super) fn receive(
        &mut self,
        pipe: &mut Pipe,
        buffers: &mut Buffers,
        dice: &mut Dice,
        now: Instant,
    ) -> usize {
        match self {
            TargetConnection::Tcp(own) if own.wants_bytes() => {
                let bytes = pipe.receive(own.space(), dice);
                if bytes > 0 {
                    own.received(bytes, buffers, now);
                }
                bytes
            }
            TargetConnection::Tcp(_) => 0,
            TargetConnection::Rdma(own) => own.receive(pipe, dice, now),
        }
    }

    pub(super) fn poll_io(&mut self, buffers: &mut Buffers, now: Instant) -> Option<Work> {
        match self {
            TargetConnection::Tcp(own) => own.poll_io(buffers, now).map(Work::Tcp),
            TargetConnection::Rdma(own) => own.poll(now).map(Work::Rdma),
        }
    }

    pub(super) fn complete(&mut self, work: Work, status: Status, buffers: &mut Buffers) {
        match (self, work) {
            (TargetConnection::Tcp(own), Work::Tcp(work)) => own.complete(work, status, buffers),
            (TargetConnection::Rdma(own), Work::Rdma(work)) => own.connection_mut().complete(work, status),
            _ => unreachable!("an I/O is of its connection"),
        }
    }

    /// Sends what the stream takes. Returns the number of bytes.
    pub(super) fn send(&mut self, pipe: &mut Pipe, buffers: &mut Buffers) -> usize {
        match self {
            TargetConnection::Tcp(own) => {
                let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                let number = own.slices(&mut slices);
                let sent = pipe.send(&slices[..number]);
                if sent > 0 {
                    own.sent(sent, buffers);
                }
                sent
            }
            TargetConnection::Rdma(own) => own.send(pipe),
        }
    }

    /// Returns true if it has bytes of TCP to send.
    pub(super) fn has_unsent(&self) -> bool {
        match self {
            TargetConnection::Tcp(own) => own.slices(&mut [IoSlice::new(&[])]) > 0,
            TargetConnection::Rdma(_) => false,
        }
    }
}

/// An I/O of the target.
#[derive(Debug)]
pub(super) enum Work {
    Tcp(tcp::Work),
    Rdma(rdma::Work),
}

impl Work {
    pub(super) fn io(&self) -> &Io {
        match self {
            Work::Tcp(work) => work.io(),
            Work::Rdma(work) => work.io(),
        }
    }

    pub(super) fn execute(&mut self) -> Status {
        match self {
            Work::Tcp(work) => work.execute(),
            Work::Rdma(work) => work.execute(),
        }
    }

    /// As that of its transport.
    pub(super) fn into_access(self) -> Result<FileAccess<Work>, Work> {
        match self {
            Work::Tcp(work) => work.into_access(Work::Tcp).map_err(Work::Tcp),
            Work::Rdma(work) => work.into_access(Work::Rdma).map_err(Work::Rdma),
        }
    }

    pub(super) fn end_access(&mut self, buffer: Pages) {
        match self {
            Work::Tcp(work) => work.end_access(buffer),
            Work::Rdma(work) => work.end_access(buffer),
        }
    }
}
