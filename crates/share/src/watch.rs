//! Programs that watch a node: a Unix socket beside that for applications, with lines of JSON.
//!
//! A program sends a [`Request`] and gets a [`Snapshot`] a line, at the interval that it has asked for. The kernel tells the node whose process
//! it is, and so what it may see ([`Snapshot::visible_to`]). A thread of its own serves these programs ([`Watchers`]): the node's workers only
//! make a snapshot when one is due. A program that does not read its lines gets fewer of them.

mod server;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use serde::{Deserialize, Serialize};

pub(crate) use server::Watchers;

use crate::node::snapshot::Snapshot;
use crate::place;

/// Shortest time between two snapshots of a node.
pub const INTERVAL_MIN: Duration = Duration::from_millis(50);
/// Longest request of a program, in bytes.
const REQUEST_MAX: usize = 256;
/// Longest line that is believed to be a node's: several times what the largest snapshot takes.
const LINE_MAX: usize = 64 << 20;

/// The request of a program to a node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// Time between two snapshots, in ms.
    interval_ms: u64,
}

/// A node that this user may watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watched {
    /// Address of its device.
    pub address: IpAddr,
    path: PathBuf,
}

/// Returns the nodes of this network namespace that this user may watch: its own and those for the host; for root, all.
pub fn watched() -> Vec<Watched> {
    let all = place::watched().into_iter();
    all.map(|(address, path)| Watched { address, path }).collect()
}

/// Why a node shows nothing more.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The node has ended, or does not want so many programs to watch it.
    #[error("the node has ended, or as many programs watch it as may")]
    Ended,
    /// The node sends something else than snapshots.
    #[error("the node is of another version: {0}")]
    Version(String),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<Errno> for WatchError {
    fn from(error: Errno) -> WatchError {
        match error {
            Errno::PIPE | Errno::CONNRESET => WatchError::Ended,
            other => WatchError::Io(other.into()),
        }
    }
}

/// The snapshots of a node, as they come.
#[derive(Debug)]
pub struct Watch {
    socket: OwnedFd,
    /// The part of the next line that has come, and how much of it has no end of line.
    line: Vec<u8>,
    searched: usize,
}

impl Watched {
    /// Begins to watch the node. `interval`: the time between two snapshots, at least [`INTERVAL_MIN`].
    ///
    /// # Errors
    /// The node has ended, or a system call failed.
    pub fn watch(&self, interval: Duration) -> Result<Watch, WatchError> {
        let socket = place::watch(&self.path)?;
        let interval_ms = interval.as_millis().try_into().unwrap_or(u64::MAX);
        let mut request = serde_json::to_vec(&Request { interval_ms }).map_err(io::Error::from)?;
        request.push(b'\n');
        // A new socket has room for it.
        send(&socket, &request, SendFlags::NOSIGNAL)?;
        Ok(Watch {
            socket,
            line: Vec::new(),
            searched: 0,
        })
    }
}

impl Watch {
    /// Waits for the next snapshot, at most so long; `None`: none has come. Text in it has no control characters.
    ///
    /// # Errors
    /// There will be none.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Snapshot>, WatchError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(snapshot) = self.take()? {
                return Ok(Some(snapshot));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let wait = Timespec::try_from(left).ok();
            match poll(
                &mut [PollFd::new(&self.socket.as_fd(), PollFlags::IN)],
                wait.as_ref(),
            ) {
                Ok(0) => return Ok(None),
                Err(error) if error != Errno::INTR => return Err(error.into()),
                _ => {}
            }
            let mut bytes = [0; 1 << 16];
            match recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                Ok((_, 0)) => return Err(WatchError::Ended),
                Ok((_, count)) => self.line.extend_from_slice(&bytes[..count]),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn take(&mut self) -> Result<Option<Snapshot>, WatchError> {
        let new = self.line.get(self.searched..).unwrap_or_default();
        let Some(end) = new.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.line.len();
            return match self.searched > LINE_MAX {
                true => Err(WatchError::Version("a line without end".into())),
                false => Ok(None),
            };
        };
        let line: Vec<u8> = self.line.drain(..=self.searched + end).collect();
        self.searched = 0;
        let mut snapshot: Snapshot =
            serde_json::from_slice(&line).map_err(|error| WatchError::Version(error.to_string()))?;
        // Root watches nodes that it does not trust.
        snapshot.remove_control_characters();
        Ok(Some(snapshot))
    }
}
