//! Nodes that are started on demand: one for each address, however many start one at once.

use std::io;
use std::net::IpAddr;
use std::os::fd::{IntoRawFd, OwnedFd};

use rdmux_verbs::provider::folder::runtime_folder;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::{Errno, FdFlags, fcntl_setfd};

use crate::place;

/// Name of the file whose lock starters hold, and nodes that are about to end.
const LOCK: &str = "node-start.lock";

/// The lock on the start of nodes of this user, until it is dropped.
#[derive(Debug)]
pub struct StartLock {
    _file: OwnedFd,
}

fn lock_file() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(open(
        runtime_folder()?.join(LOCK),
        flags,
        Mode::RUSR | Mode::WUSR,
    )?)
}

impl StartLock {
    /// Waits for the lock. While it is held no node ends for lack of applications, so one that is there can be held ([`Held::new`]).
    ///
    /// # Errors
    /// There is no runtime folder, or a system call failed.
    pub fn wait() -> io::Result<StartLock> {
        let file = lock_file()?;
        loop {
            match flock(&file, FlockOperation::LockExclusive) {
                Err(Errno::INTR) => {}
                locked => {
                    locked?;
                    return Ok(StartLock { _file: file });
                }
            }
        }
    }

    /// Takes the lock; `None` while another process has it.
    pub(crate) fn take() -> io::Result<Option<StartLock>> {
        let file = lock_file()?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(StartLock { _file: file })),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// A connection with a node, for which the node waits as for an application: it does not end for lack of those.
#[derive(Debug)]
pub struct Held {
    socket: OwnedFd,
}

impl Held {
    /// Connects to the node of an address; `None` if there is none.
    ///
    /// # Errors
    /// A system call failed.
    pub fn new(address: IpAddr) -> io::Result<Option<Held>> {
        match place::attach(address) {
            Ok(socket) => Ok(Some(Held { socket })),
            Err(error) if place::is_none(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Has the connection last as long as the program that this process starts by exec, and its children.
    ///
    /// # Errors
    /// A system call failed.
    pub fn leave_open(self) -> io::Result<()> {
        fcntl_setfd(&self.socket, FdFlags::empty())?;
        // It stays open for whatever the process becomes.
        let _ = self.socket.into_raw_fd();
        Ok(())
    }
}

/// Returns the addresses whose nodes serve this user in this network namespace.
///
/// # Errors
/// There is no runtime folder, or it cannot be read.
pub fn node_addresses() -> io::Result<Vec<IpAddr>> {
    place::addresses()
}
