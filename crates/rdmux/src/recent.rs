//! Snapshots of a node of this process, for whoever asks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdmux_share::node::snapshot::{Snapshot, Viewer};
use rdmux_verbs::sync::Mutex;

/// Time for which a snapshot is passed on, so that those who ask cost the node no more the more they are.
const FRESH: Duration = Duration::from_millis(250);

/// Asks a node for snapshots, a few a second at most.
#[derive(Debug)]
pub(crate) struct Recent {
    viewer: Viewer,
    last: Mutex<Option<(Instant, Arc<Snapshot>)>>,
}

impl Recent {
    pub(crate) fn new(viewer: Viewer) -> Recent {
        Recent {
            viewer,
            last: Mutex::new(None),
        }
    }

    /// Returns a snapshot; `None` once the node has ended.
    pub(crate) fn snapshot(&self) -> Option<Arc<Snapshot>> {
        let mut last = self.last.lock();
        if let Some((since, snapshot)) = &*last
            && since.elapsed() < FRESH
        {
            return Some(snapshot.clone());
        }
        let snapshot = Arc::new(self.viewer.snapshot().ok()?);
        *last = Some((Instant::now(), snapshot.clone()));
        Some(snapshot)
    }
}
