//! Folders for files that last no longer than the host is up: that of a user, for traces and sockets of nodes, and that of the host, for
//! sockets of nodes that serve several users.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fstat, mkdir, open};
use rustix::io::Errno;

use super::user::{ROOT, outer_number};

/// Returns the effective uid of this process.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the path of the folder of this process's user, whether it exists or not.
pub fn own_path() -> PathBuf {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR");
    path_of(runtime.as_deref(), uid(), outer_number(uid()))
}

/// Returns the folder of a user: in the runtime folder, if that belongs to this user and nobody else may write there. In another
/// user's runtime folder, which root has after `su`, the owner could exchange the files, which would also be in the owner's way. In /tmp
/// the name has the uid that the user has outside of the user namespace: a process that is root in a user namespace of its own would
/// otherwise take root's folder.
fn path_of(runtime: Option<&OsStr>, user: u32, outer: u32) -> PathBuf {
    let is_own = |folder: &Path| {
        let found = std::fs::metadata(folder);
        found.is_ok_and(|found| found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0)
    };
    match runtime.map(Path::new).filter(|folder| is_own(folder)) {
        Some(folder) => folder.join("rdmux"),
        None => PathBuf::from(format!("/tmp/rdmux-{outer}")),
    }
}

/// Opens the folder of this user, and creates it if there is none.
///
/// # Errors
/// The folder belongs to another user, is open to others, or a system call failed. The error names the folder.
pub fn own_folder() -> io::Result<OwnedFd> {
    let path = own_path();
    match mkdir(&path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(at(&path, errno)),
    }
    open_folder(&path, Some(uid()))
}

/// Returns the folder of this user; creates it if there is none. The folder is the user's alone.
///
/// # Errors
/// Those of [`own_folder`].
pub fn runtime_folder() -> io::Result<PathBuf> {
    own_folder()?;
    Ok(own_path())
}

/// Folder of the host's nodes, unless [`HOST_VARIABLE`] names another one.
pub const HOST_PATH: &str = "/run/rdmux";
/// Environment variable with the folder of the host's nodes. It changes where a process looks for nodes, and so whom it trusts; the process's
/// own user sets it.
pub const HOST_VARIABLE: &str = "RDMUX_HOST_FOLDER";

/// Returns the path of the folder of the host's nodes, whether it exists or not.
pub fn host_path() -> PathBuf {
    let set = std::env::var_os(HOST_VARIABLE).filter(|path| !path.is_empty());
    set.map_or_else(|| HOST_PATH.into(), PathBuf::from)
}

/// Checks that root or this process's user owns the folder of the host's nodes, and that nobody else may change it: whose nodes are there, the
/// owner decides.
///
/// # Errors
/// It is not so, there is no such folder, or a system call failed. The error names the folder.
pub fn check_host_folder(path: &Path) -> io::Result<()> {
    let is_trusted = |owner| owner == ROOT || owner == uid();
    let why = "root, or this user, has to own it, and nobody else may write there";
    check_public(path, is_trusted, why)
}

/// Checks that this process's user owns the folder of a node for the host, and that nobody else may change it.
///
/// # Errors
/// Those of [`check_host_folder`].
pub fn check_node_folder(path: &Path) -> io::Result<()> {
    let why = "the node's user has to own it, and nobody else may write there";
    check_public(path, |owner| owner == uid(), why)
}

fn check_public(path: &Path, is_owner: impl Fn(u32) -> bool, why: &str) -> io::Result<()> {
    let stat = fstat(open_folder(path, None)?)?;
    let writable_by_others = Mode::WGRP | Mode::WOTH;
    if is_owner(stat.st_uid) && !Mode::from_raw_mode(stat.st_mode).intersects(writable_by_others) {
        return Ok(());
    }
    let what = format!("{}: {why}", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

fn at(path: &Path, errno: Errno) -> io::Error {
    let error = io::Error::from(errno);
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Opens a folder, if it belongs to `owner` and is closed to others.
///
/// # Errors
/// It is not, or a system call failed. The error names the folder.
pub fn open_folder(path: &Path, owner: Option<u32>) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = open(path, flags, Mode::empty()).map_err(|errno| at(path, errno))?;
    let stat = fstat(&folder)?;
    let others = Mode::RWXG | Mode::RWXO;
    let is_private = !Mode::from_raw_mode(stat.st_mode).intersects(others);
    if owner.is_some_and(|owner| stat.st_uid != owner || !is_private) {
        let what = format!("{} is not private to this user", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn check_public__each_folder() {
        let folder = std::env::temp_dir().join(format!("rdmux-verbs-public-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).unwrap();
        let set = |mode| std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
        let kind = |checked: io::Result<()>| checked.map_err(|error| error.kind());
        let denied = Err(io::ErrorKind::PermissionDenied);
        set(0o755);
        assert_eq!(kind(check_host_folder(&folder)), Ok(()));
        assert_eq!(kind(check_node_folder(&folder)), Ok(()));
        assert_eq!(kind(check_public(&folder, |owner| owner != uid(), "")), denied);
        for mode in [0o775, 0o757, 0o777, 0o1777] {
            set(mode);
            assert_eq!(kind(check_host_folder(&folder)), denied, "{mode:o}");
        }
        let link = folder.join("link");
        set(0o755);
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert!(check_host_folder(&link).is_err());
        let none = check_host_folder(&folder.join("none"));
        assert_eq!(kind(none), Err(io::ErrorKind::NotFound));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn path_of__runtime_folder_that_another_may_write_to() {
        let folder = std::env::temp_dir().join(format!("rdmux-verbs-runtime-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).unwrap();
        let set = |mode| std::fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
        set(0o700);
        let runtime = Some(folder.as_os_str());
        let outer = 123_456;
        assert_eq!(path_of(runtime, uid(), outer), folder.join("rdmux"));
        let named = PathBuf::from("/tmp/rdmux-123456");
        assert_eq!(path_of(runtime, uid() + 1, outer), named);
        set(0o770);
        for unfit in [runtime, Some(OsStr::new("/nonexistent")), None] {
            assert_eq!(path_of(unfit, uid(), outer), named);
        }
        std::fs::remove_dir(&folder).unwrap();
    }
}
