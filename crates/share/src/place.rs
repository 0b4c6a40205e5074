//! Places of nodes: the sockets in the user's runtime folder, one for each address and network namespace.

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rdmux_verbs::provider::folder::runtime_folder;
use rdmux_verbs::resources::places::unix_socket;
use rustix::fs::{Mode, chmod};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType, bind, connect, listen};

/// Applications that wait to be accepted.
const BACKLOG: i32 = 64;

/// Prefix of the names of sockets.
const PREFIX: &str = "node-";

/// Returns the socket of the node of an address. The folder is shared by the network namespaces of the host, and an address is not.
pub(crate) fn path(address: IpAddr) -> io::Result<PathBuf> {
    Ok(runtime_folder()?.join(format!("{PREFIX}{}-{address}", namespace())))
}

/// Returns the number of this process's network namespace.
fn namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/net").map_or(0, |found| found.st_ino)
}

/// Returns the addresses of this network namespace that have had a node.
pub(crate) fn addresses() -> io::Result<Vec<IpAddr>> {
    let prefix = format!("{PREFIX}{}-", namespace());
    let mut found: Vec<IpAddr> = std::fs::read_dir(runtime_folder()?)?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix(&prefix)?.parse().ok())
        .filter(|address| attach(*address).is_ok())
        .collect();
    found.sort_unstable();
    Ok(found)
}

fn name(address: IpAddr) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(path(address)?)?)
}

/// Connects to the node of an address.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] or [`io::ErrorKind::ConnectionRefused`] if there is none.
pub(crate) fn attach(address: IpAddr) -> io::Result<OwnedFd> {
    let socket = unix_socket(SocketType::SEQPACKET)?;
    connect(&socket, &name(address)?)?;
    Ok(socket)
}

/// The socket on which a node waits for applications; its name ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    pub(crate) socket: OwnedFd,
}

impl Place {
    /// Takes the place of the node of an address, also that of a node that was killed.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if there is a node.
    pub(crate) fn take(address: IpAddr) -> io::Result<Place> {
        let path = path(address)?;
        // The engine's place, which the caller has by then, lets no two nodes of an address come here at once.
        if attach(address).is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = unix_socket(SocketType::SEQPACKET)?;
        bind(&socket, &name(address)?)?;
        chmod(&path, Mode::RUSR | Mode::WUSR)?;
        listen(&socket, BACKLOG)?;
        Ok(Place { path, socket })
    }

    /// Accepts an application; `None` if none waits.
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        use rustix::net::{SocketFlags, accept_with};
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
