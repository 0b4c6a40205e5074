//! Places of nodes: sockets in folders, one for each address and network namespace.
//!
//! A node that serves its own user has its socket in the user's runtime folder. One that serves others has it in the host's folder, where each
//! address has a folder of its own, which belongs to the node's user: `/run/rdmux/10.0.0.1`. So a service manager can make and remove the folder of one node,
//! and nodes of several users do not need to trust each other.

use std::fmt::{self, Display};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rdmux_verbs::provider::folder::{check_host_folder, check_node_folder, host_path, runtime_folder, uid};
use rdmux_verbs::provider::user::ROOT;
use rdmux_verbs::resources::places::unix_socket;
use rustix::fs::{Mode, chmod, mkdir};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketType, bind, connect, listen};

/// Applications that wait to be accepted.
const BACKLOG: i32 = 64;

/// Prefixes of the names of sockets: those for applications, and those for programs that watch nodes.
const PREFIX: &str = "node-";
const WATCH_PREFIX: &str = "watch-";

/// Users that a node serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Its own user.
    User,
    /// Other users of the host too.
    Host,
}

impl Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Scope::User => "of this user",
            Scope::Host => "for the host",
        })
    }
}

impl Scope {
    /// Scopes in the order in which an application looks for a node.
    const ALL: [Scope; 2] = [Scope::User, Scope::Host];

    /// Returns the folder with the socket of an address.
    fn folder(self, address: IpAddr) -> io::Result<PathBuf> {
        match self {
            Scope::User => runtime_folder(),
            Scope::Host => {
                let host = host_path();
                check_host_folder(&host)?;
                Ok(host.join(address.to_string()))
            }
        }
    }

    /// Returns the socket of the node of an address. The folders are shared by the network namespaces of the host, and an address is not.
    fn path(self, address: IpAddr) -> io::Result<PathBuf> {
        self.path_of(PREFIX, address)
    }

    fn path_of(self, prefix: &str, address: IpAddr) -> io::Result<PathBuf> {
        let folder = self.folder(address)?;
        Ok(folder.join(format!("{prefix}{}-{address}", namespace())))
    }

    /// Returns the addresses that have a folder or a socket.
    fn addresses(self) -> io::Result<Vec<IpAddr>> {
        let prefix = format!("{PREFIX}{}-", namespace());
        let (folder, prefix) = match self {
            Scope::User => (runtime_folder()?, prefix.as_str()),
            Scope::Host => (host_path(), ""),
        };
        let entries = std::fs::read_dir(folder)?.flatten();
        Ok(entries
            .filter_map(|entry| entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok())
            .collect())
    }

    /// Connects to the node of an address.
    fn attach(self, address: IpAddr) -> io::Result<OwnedFd> {
        let socket = unix_socket(SocketType::SEQPACKET)?;
        connect(&socket, &SocketAddrUnix::new(self.path(address)?)?)?;
        Ok(socket)
    }
}

/// Returns the number of this process's network namespace.
fn namespace() -> u64 {
    rustix::fs::stat("/proc/self/ns/net").map_or(0, |found| found.st_ino)
}

/// Returns the addresses of this network namespace that have a node for this user or for the host.
pub(crate) fn addresses() -> io::Result<Vec<IpAddr>> {
    let mut found = Scope::User.addresses()?;
    // A host without nodes for all has no folder for them.
    found.extend(Scope::Host.addresses().unwrap_or_default());
    found.sort_unstable();
    found.dedup();
    found.retain(|address| attach(*address).is_ok());
    Ok(found)
}

/// Connects to the node of an address: to that of this user, or else to that for the host.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] or [`io::ErrorKind::ConnectionRefused`] if there is none.
pub(crate) fn attach(address: IpAddr) -> io::Result<OwnedFd> {
    let mut why = io::Error::from(io::ErrorKind::NotFound);
    for scope in Scope::ALL {
        match scope.attach(address) {
            Ok(socket) => return Ok(socket),
            Err(error) if is_none(&error) => {}
            // An error in the user's folder says nothing about the host's.
            Err(error) => why = error,
        }
    }
    Err(why)
}

/// Returns the nodes of this network namespace that this user may watch, by address, with their sockets for that: those of this user and for the
/// host, and for root, those of all users.
pub(crate) fn watched() -> Vec<(IpAddr, PathBuf)> {
    // The folders may also have sockets of nodes that were killed.
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let mut found = watched_of(&sockets, namespace());
    let is_own = |address, path: &Path| {
        let mut own = Scope::ALL
            .iter()
            .filter_map(|scope| scope.path_of(WATCH_PREFIX, address).ok());
        own.any(|own| own == path)
    };
    found.retain(|(address, path)| uid() == ROOT || is_own(*address, path));
    found
}

/// Parses the system's list of Unix sockets, each with some numbers and a name if there is one.
fn watched_of(sockets: &str, namespace: u64) -> Vec<(IpAddr, PathBuf)> {
    let prefix = format!("{WATCH_PREFIX}{namespace}-");
    let place = |line: &str| {
        let path = Path::new(line.get(line.find(" /")? + 1..)?);
        let address = path.file_name()?.to_str()?.strip_prefix(&prefix)?;
        Some((address.parse().ok()?, path.to_owned()))
    };
    let mut found: Vec<_> = sockets.lines().filter_map(place).collect();
    found.sort();
    found.dedup();
    found
}

/// Connects to the socket of a node for programs that watch it.
pub(crate) fn watch(path: &Path) -> io::Result<OwnedFd> {
    let socket = unix_socket(SocketType::STREAM)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Returns whether an error of [`attach`] says that there is no node.
pub(crate) fn is_none(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// A socket on which a node waits for applications, or for programs that watch it; its name ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    path: PathBuf,
    scope: Scope,
    pub(crate) socket: OwnedFd,
    /// Set once the name has ended: it may be that of another node by then.
    is_closed: bool,
}

impl Place {
    /// Takes the place of the node of an address, also that of a node that was killed.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] if there is a node.
    pub(crate) fn take(address: IpAddr, scope: Scope) -> io::Result<Place> {
        if scope == Scope::Host {
            make_node_folder(address)?;
        }
        // The engine's place, which the caller has by then, lets no two nodes of an address come here at once.
        if scope.attach(address).is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        Place::bind(scope.path(address)?, scope, SocketType::SEQPACKET)
    }

    /// Makes the place beside it for programs that watch the node.
    pub(crate) fn for_watchers(&self, address: IpAddr) -> io::Result<Place> {
        Place::bind(
            self.scope.path_of(WATCH_PREFIX, address)?,
            self.scope,
            SocketType::STREAM,
        )
    }

    fn bind(path: PathBuf, scope: Scope, kind: SocketType) -> io::Result<Place> {
        let mut mode = Mode::RUSR | Mode::WUSR;
        if scope == Scope::Host {
            // The node decides about everybody who reaches its socket.
            mode |= Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        }
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let socket = unix_socket(kind)?;
        bind(&socket, &SocketAddrUnix::new(&path)?)?;
        chmod(&path, mode)?;
        listen(&socket, BACKLOG)?;
        Ok(Place {
            path,
            scope,
            socket,
            is_closed: false,
        })
    }

    /// Returns whom the node serves.
    pub(crate) fn scope(&self) -> Scope {
        self.scope
    }

    /// Ends the name: nobody finds the node from now on.
    pub(crate) fn close(&mut self) {
        if !std::mem::replace(&mut self.is_closed, true) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Accepts who has come; `None` if nobody waits.
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        use rustix::net::{SocketFlags, accept_with};
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Makes the folder of the node of an address, and the host's, where this user may and there are none.
fn make_node_folder(address: IpAddr) -> io::Result<()> {
    let host = host_path();
    let folder = host.join(address.to_string());
    let made = make_public(&host).and_then(|()| make_public(&folder));
    if let Err(error) = made {
        let (error, folder) = (io::Error::from(error), folder.display());
        let advice = format!(
            "{folder}: {error}: run the node as a service, or make the folder as root: install -d -m 755 -o USER {folder}"
        );
        return Err(io::Error::new(error.kind(), advice));
    }
    check_host_folder(&host)?;
    check_node_folder(&folder)
}

/// Makes a folder that everybody may enter and nobody else may change, unless there is one.
fn make_public(path: &Path) -> Result<(), Errno> {
    let mode = Mode::RWXU | Mode::RGRP | Mode::XGRP | Mode::ROTH | Mode::XOTH;
    match mkdir(path, mode) {
        // Independent of the process's umask.
        Ok(()) => chmod(path, mode),
        Err(Errno::EXIST) => Ok(()),
        // Nobody may make one here, but there is one.
        Err(_) if path.is_dir() => Ok(()),
        Err(error) => Err(error),
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watched_of__names_of_this_namespace() {
        let sockets = "Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 20001 /tmp/rdmux-7/watch-42-10.0.0.1
0000000000000000: 00000003 00000000 00000000 0001 03 20002 /tmp/rdmux-7/watch-42-10.0.0.1
0000000000000000: 00000002 00000000 00010000 0001 01 20003 /tmp/rdmux 7/watch-43-10.0.0.2
0000000000000000: 00000002 00000000 00010000 0005 01 20004 /tmp/rdmux-7/node-42-10.0.0.3
0000000000000000: 00000002 00000000 00010000 0001 01 20005 @watch-42-10.0.0.4
0000000000000000: 00000002 00000000 00010000 0001 01 20006 watch-42-10.0.0.5
0000000000000000: 00000002 00000000 00010000 0001 01 20007
0000000000000000: 00000002 00000000 00010000 0001 01 20008 /run/user of 7/rdmux/watch-42-fe80::1
";
        let expected = [
            ("10.0.0.1", "/tmp/rdmux-7/watch-42-10.0.0.1"),
            ("fe80::1", "/run/user of 7/rdmux/watch-42-fe80::1"),
        ];
        let expected = expected.map(|(address, path)| (address.parse().unwrap(), PathBuf::from(path)));
        assert_eq!(watched_of(sockets, 42), expected);
    }
}
