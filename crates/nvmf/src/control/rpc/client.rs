//! Requests to a target that runs, and the sockets where targets of this user take them.

use std::fs::Metadata;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rdmux_verbs::provider::folder::runtime_folder;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SocketAddrUnix, connect};
use serde_json::{Value, json};

use super::{PREFIX, SUFFIX, receive};
use crate::identity::unix_socket;

/// Time in which a target answers: one that is stopped, or whose file system hangs, does not.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Age from which a socket without a listener is one that a target has left: another one may be about to listen on it.
const STALE_AGE: Duration = Duration::from_secs(10);

/// Reason for which a request has no result.
#[derive(Debug, thiserror::Error)]
pub enum RpcError {
    /// There is no target at the socket.
    #[error("no target at {}: {source} (start one with rdmux nvme target, or give its socket with --socket PATH)", path.display())]
    NoTarget {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The target is there, and does nothing.
    #[error(
        "the target at {} did not answer within {} s: is it stopped, or does its storage hang? what was asked for may be done later",
        path.display(),
        within.as_secs_f64()
    )]
    TimedOut {
        /// The socket.
        path: PathBuf,
        /// The time that it had.
        within: Duration,
    },
    /// The connection to the target failed.
    #[error("the target at {} did not answer: {source}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The target refuses.
    #[error("{0}")]
    Refused(String),
}

/// Has the target at a socket carry a method out within a time, and returns the result.
///
/// # Errors
/// There is no target, it does not answer, or it refuses.
pub fn call(path: &Path, method: &str, params: Value, within: Duration) -> Result<Value, RpcError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => RpcError::TimedOut {
            path: path.to_owned(),
            within,
        },
        _ => RpcError::Io {
            path: path.to_owned(),
            source,
        },
    };
    let mut stream = connect_within(path, within).map_err(|source| match source.kind() {
        io::ErrorKind::WouldBlock => failed(source),
        _ => RpcError::NoTarget {
            path: path.to_owned(),
            source,
        },
    })?;
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    let sent = stream
        .set_read_timeout(Some(within))
        .and_then(|()| stream.write_all(request.to_string().as_bytes()));
    let response = sent.and_then(|()| receive(&mut stream, &mut Vec::new()));
    let response = response.and_then(|response| response.ok_or(io::ErrorKind::UnexpectedEof.into()));
    let mut response = response.map_err(failed)?;
    match response.get_mut("result").map(Value::take) {
        Some(result) => Ok(result),
        None => {
            let message = response["error"]["message"]
                .as_str()
                .unwrap_or("it gives no reason");
            Err(RpcError::Refused(message.to_owned()))
        }
    }
}

/// Connects to a socket, whose listener may have no room for so long. What is sent has the same time.
fn connect_within(path: &Path, within: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = unix_socket()?;
    set_socket_timeout(&socket, Timeout::Send, Some(within))?;
    connect(&socket, &address)?;
    Ok(socket.into())
}

/// Returns the names of the subsystems of the target at a socket.
///
/// # Errors
/// As [`call`].
pub fn names(path: &Path, within: Duration) -> Result<Vec<String>, RpcError> {
    let listed = call(path, "nvmf_get_subsystems", json!({}), within)?;
    let names = listed.as_array().into_iter().flatten();
    Ok(names
        .filter_map(|subsystem| subsystem["nqn"].as_str().map(str::to_owned))
        .collect())
}

/// Returns the sockets of targets of this user that run.
///
/// # Errors
/// There is no folder for them.
pub fn sockets() -> io::Result<Vec<PathBuf>> {
    let mut found = candidates(&runtime_folder()?)?;
    found.retain(|path| is_listened_on(path));
    found.sort();
    Ok(found)
}

/// Removes the sockets that targets of this user have left which are gone.
///
/// # Errors
/// There is no folder for them.
pub fn remove_stale() -> io::Result<()> {
    remove_stale_in(&runtime_folder()?, STALE_AGE)
}

fn remove_stale_in(folder: &Path, age: Duration) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    let is_old = |metadata: &Metadata| {
        let made = metadata.modified().ok();
        made.and_then(|made| SystemTime::now().duration_since(made).ok())
            .is_some_and(|since| since >= age)
    };
    for path in candidates(folder)? {
        let is_left = path.symlink_metadata().is_ok_and(|metadata| {
            metadata.file_type().is_socket() && metadata.uid() == own && is_old(&metadata)
        });
        if is_left && !is_listened_on(&path) {
            // Another target may have removed it.
            let _ = std::fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Returns what has the name of a target's socket in a folder.
fn candidates(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.flatten();
    let is_socket = |name: &str| name.starts_with(PREFIX) && name.ends_with(SUFFIX);
    let named = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_socket));
    Ok(named.map(|entry| entry.path()).collect())
}

/// Returns true if a process listens on a socket, whether or not it has room for a connection.
fn is_listened_on(path: &Path) -> bool {
    match connect_within(path, Duration::from_millis(10)) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn call__ends_when_a_target_that_is_stopped_does_not_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nvme-x.sock");
        // The kernel takes connections for it, and nobody reads what they bring.
        let listener = UnixListener::bind(&path).unwrap();
        let within = Duration::from_millis(20);
        let mut open = Vec::new();
        let ask = || call(&path, "nvmf_get_subsystems", json!({}), within);
        let error = ask().unwrap_err();
        assert!(matches!(error, RpcError::TimedOut { .. }), "{error}");
        let parts = [&*path.to_string_lossy(), "did not answer within 0.02 s"];
        assert!(
            parts.iter().all(|part| error.to_string().contains(part)),
            "{error}"
        );
        // Nor is there room for another connection.
        rustix::net::listen(&listener, 1).unwrap();
        while let Ok(stream) = connect_within(&path, within) {
            open.push(stream);
        }
        assert!(matches!(ask(), Err(RpcError::TimedOut { .. })));
        assert!(is_listened_on(&path));
    }

    #[test]
    fn remove_stale__leaves_what_is_in_use_or_new() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for name in ["nvme-gone.sock", "other.sock"] {
            drop(UnixListener::bind(path(name)).unwrap());
        }
        let _used = UnixListener::bind(path("nvme-used.sock")).unwrap();
        std::fs::write(path("nvme-file.sock"), "").unwrap();
        let left = |age: u64| {
            remove_stale_in(folder.path(), Duration::from_secs(age)).unwrap();
            std::fs::read_dir(folder.path()).unwrap().count()
        };
        assert_eq!((left(3600), left(0)), (4, 3));
        assert!(!path("nvme-gone.sock").exists());
    }
}
