//! Joining and leaving.

use std::ffi::{CStr, OsStr, c_char, c_int, c_uint};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use rdmux_dsm::{Cluster, Session};
use rdmux_key::Key;

use crate::failure::{Failure, status};
use crate::objects::{claim_process, find, give, remove_session};

/// Returns a session for an object that is kept together with a count of it.
///
/// # Safety
/// All that is made with the reference is dropped before the count is.
pub(crate) unsafe fn outlived(session: &Arc<Session>) -> &'static Session {
    // SAFETY: a session stays where it is as long as there is a count, and what uses the reference ends before, says the caller.
    unsafe { &*Arc::as_ptr(session) }
}

/// Joins a cluster.
///
/// # Safety
/// `session` is null, or the program may write through it.
unsafe fn join(
    timeout_ms: c_uint,
    session: *mut *mut Session,
    cluster: impl FnOnce() -> Result<Cluster, Failure>,
) -> c_int {
    let make = || {
        claim_process()?;
        static PROVIDERS: Once = Once::new();
        PROVIDERS.call_once(|| {
            rdmux_soft::register();
            rdmux_hw::register();
        });
        let timeout = Duration::from_millis(timeout_ms.into());
        Ok(Session::join(cluster()?, timeout)?)
    };
    // SAFETY: the caller says so.
    status(|| unsafe { give(session, make) }.map(|()| 0))
}

/// Returns the path that the program gives, or none for a null pointer.
///
/// # Safety
/// The pointer is null or a string of C.
unsafe fn path<'a>(path: *const c_char) -> Option<&'a Path> {
    let is_there = !path.is_null();
    is_there.then(|| {
        // SAFETY: not null, so a string of C, says the caller.
        let path = unsafe { CStr::from_ptr(path) };
        Path::new(OsStr::from_bytes(path.to_bytes()))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_join(timeout_ms: c_uint, session: *mut *mut Session) -> c_int {
    // SAFETY: the program gives a null pointer, or one for a pointer.
    unsafe { join(timeout_ms, session, || Ok(Cluster::of_environment()?)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn rdmux_dsm_join_file(
    file: *const c_char,
    node: u32,
    key_file: *const c_char,
    timeout_ms: c_uint,
    session: *mut *mut Session,
) -> c_int {
    // SAFETY: the program gives null pointers or strings.
    let (file, key_file) = unsafe { (path(file), path(key_file)) };
    let cluster = || {
        let file = file.ok_or_else(|| Failure::invalid("no cluster file"))?;
        let key = match key_file {
            Some(file) => Key::load(file)?,
            None => Key::load_or_create()?,
        };
        Ok(Cluster::of_file(file, node, &key)?)
    };
    // SAFETY: the program gives a null pointer, or one for a pointer.
    unsafe { join(timeout_ms, session, cluster) }
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_leave(session: *mut Session) -> c_int {
    status(|| {
        // The tables are free again while this waits for others.
        drop(remove_session(session)?);
        Ok(0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_node(session: *mut Session) -> c_int {
    status(|| number(find(session)?.node()))
}

#[unsafe(no_mangle)]
extern "C" fn rdmux_dsm_nodes(session: *mut Session) -> c_int {
    status(|| number(find(session)?.nodes()))
}

fn number(number: u32) -> Result<c_int, Failure> {
    c_int::try_from(number).map_err(|_| Failure::new(libc::EOVERFLOW, format!("{number} is no int")))
}
