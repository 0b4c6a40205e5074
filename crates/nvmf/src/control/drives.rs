//! Files that this process exports, each opened once, whatever the number of subsystems that it is in.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use rdmux_verbs::sync::Mutex;

use super::config::NamespaceConfig;
use crate::backend::{Backend, FileBackend, OpenError};
use crate::target::{Medium, SharedNamespace};

static DRIVES: Mutex<Vec<Drive>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Drive {
    path: PathBuf,
    is_read_only: bool,
    block_shift: u8,
    backend: Weak<dyn Backend>,
    medium: Weak<Medium>,
}

/// A storage, and what its namespace shares with that of another subsystem.
pub(super) type Opened = (Arc<dyn Backend>, Option<Arc<Medium>>);

/// Opens a file. Another subsystem of this process may have it, for the same access and with the same blocks: then the second value is what their
/// namespaces share.
pub(super) fn open(path: &Path, config: &NamespaceConfig) -> Result<Opened, OpenError> {
    let mut drives = DRIVES.lock();
    drives.retain(|drive| drive.medium.strong_count() > 0);
    for drive in drives.iter().filter(|drive| drive.path == path) {
        let (Some(backend), Some(medium)) = (drive.backend.upgrade(), drive.medium.upgrade()) else {
            continue;
        };
        let is_same = drive.is_read_only == config.read_only && drive.block_shift == config.block_shift;
        return match is_same {
            true => Ok((backend, Some(medium))),
            false => Err(OpenError::InUse(path.to_owned())),
        };
    }
    let backend = FileBackend::open(path, config.read_only, 1 << config.block_shift)?;
    Ok((Arc::new(backend), None))
}

/// Takes note of a namespace whose file others may have as well.
pub(super) fn add(path: &Path, namespace: &SharedNamespace) {
    DRIVES.lock().push(Drive {
        path: path.to_owned(),
        is_read_only: namespace.is_protected,
        block_shift: namespace.block_shift,
        backend: Arc::downgrade(&namespace.backend),
        medium: Arc::downgrade(namespace.medium()),
    });
}
