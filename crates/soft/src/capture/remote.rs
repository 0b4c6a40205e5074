//! Captures a device of another process of this user, with a request over the socket of the device's slot. That process writes the file,
//! which this one opens; the capture lasts as long as the connection.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rdmux_verbs::provider::Refusal;
use rdmux_verbs::provider::seqpacket::{receive_with_descriptors, send_bytes};
use rdmux_verbs::provider::user::check_user;
use rdmux_verbs::resources::places::connect_slot;
use rdmux_verbs::resources::{AskError, DeviceAt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, socketpair};

use super::Filter;
use crate::shm::message::{self, LinkMessage};

/// Time that the device has for its answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// A running capture. Dropping it ends the capture.
#[derive(Debug)]
pub struct Capturing {
    socket: OwnedFd,
    /// Readable when everything has been written.
    done: OwnedFd,
    pid: Option<u32>,
}

/// Packet counts of a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureCounts {
    /// Packets that the filter took.
    pub packets: u64,
    /// Those of them that are not in the file: the disk was too slow, or full.
    pub dropped: u64,
}

/// Captures a device of this user to a file.
///
/// # Errors
/// Those of [`rdmux_verbs::resources::ask`]; `AddrInUse` while somebody else captures it.
pub fn start(device: DeviceAt, file: &File, filter: &Filter) -> Result<Capturing, AskError> {
    let socket = connect_slot(device.address, device.slot).map_err(|errno| match errno {
        Errno::CONNREFUSED => AskError::NotThere,
        errno => AskError::Io(errno.into()),
    })?;
    let pid = check_user(&socket)?;
    let pid = u32::try_from(pid).ok().filter(|pid| *pid > 0);
    let pair = socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    );
    let (done, theirs) = pair.map_err(io::Error::from)?;
    let ask = LinkMessage::Capture { filter: *filter }.encode();
    send_bytes(&socket, &ask, &[file.as_fd(), theirs.as_fd()]).map_err(|_| AskError::Ended { pid })?;
    drop(theirs);
    if !readable(&socket, PATIENCE)? {
        return Err(AskError::NoAnswer { pid });
    }
    let mut buffer = [0; message::LEN_MAX];
    let answer = receive_with_descriptors(&socket, &mut buffer);
    match answer
        .ok()
        .and_then(|(len, _)| LinkMessage::decode(&buffer[..len]))
    {
        Some(LinkMessage::Welcome) => Ok(Capturing { socket, done, pid }),
        Some(LinkMessage::Refused(Refusal::Full)) => {
            let busy = "another capture of it is running";
            Err(AskError::Io(io::Error::new(io::ErrorKind::AddrInUse, busy)))
        }
        _ => Err(AskError::Ended { pid }),
    }
}

impl Capturing {
    /// Waits up to `at_most` for the end of the device; returns whether the device still exists.
    ///
    /// # Errors
    /// Those of `poll`.
    pub fn wait(&self, at_most: Duration) -> io::Result<bool> {
        Ok(!readable(&self.socket, at_most)?)
    }

    /// Ends the capture, and waits until its file is complete.
    ///
    /// # Errors
    /// [`AskError::Ended`] when the process ended first: the file holds what it had written.
    pub fn stop(self) -> Result<CaptureCounts, AskError> {
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        let ended = AskError::Ended { pid: self.pid };
        let deadline = Instant::now() + 2 * PATIENCE;
        if !readable(&self.done, deadline.saturating_duration_since(Instant::now()))? {
            return Err(AskError::NoAnswer { pid: self.pid });
        }
        let mut buffer = [0; 16];
        let counts = match rustix::io::read(&self.done, &mut buffer) {
            Ok(16) => buffer.as_chunks::<8>().0.iter().map(|n| u64::from_ne_bytes(*n)),
            _ => return Err(ended),
        };
        match counts.collect::<Vec<_>>()[..] {
            [packets, dropped] => Ok(CaptureCounts { packets, dropped }),
            _ => Err(ended),
        }
    }
}

/// Waits up to `at_most`; returns whether there is something to read, or the other end is closed.
fn readable(fd: &OwnedFd, at_most: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + at_most;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)) {
            Ok(n) => return Ok(n > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
