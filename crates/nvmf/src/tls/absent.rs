//! Stands in for sessions where there are none.

use std::convert::Infallible;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use rdmux_wire::nvme::Nqn;
use rustix::io::Errno;

use super::psk::Psk;
use super::{Keys, Proof, TlsError};

/// The target's part of sessions, which nobody can make.
#[derive(Debug)]
pub(crate) struct Server(Infallible);

impl Server {
    pub(crate) fn new(_keys: Keys) -> Result<Server, TlsError> {
        Err(TlsError::Absent)
    }

    pub(crate) fn accept(&self) -> Result<Session, TlsError> {
        match self.0 {}
    }
}

/// A session, which nobody can make.
#[derive(Debug)]
pub(crate) struct Session(Infallible);

impl Session {
    pub(crate) fn connect(_psk: &Psk, _host: &Nqn, _subsystem: &Nqn) -> Result<Session, TlsError> {
        Err(TlsError::Absent)
    }

    pub(crate) fn is_ready(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn handshake(&mut self, _socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        match self.0 {}
    }

    pub(crate) fn is_blocked(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn take_proof(&mut self) -> Option<Proof> {
        match self.0 {}
    }

    pub(crate) fn receive(&mut self, _socket: BorrowedFd<'_>, _space: &mut [u8]) -> Result<usize, Errno> {
        match self.0 {}
    }

    pub(crate) fn has_bytes(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn send(&mut self, _socket: BorrowedFd<'_>, _slices: &[IoSlice<'_>]) -> Result<usize, Errno> {
        match self.0 {}
    }

    pub(crate) fn failure(&self) -> Option<&str> {
        match self.0 {}
    }
}
