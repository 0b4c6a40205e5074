//! Recording of a node's trace: in memory, and to its file when the session ends.

use std::cell::Cell;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::time::{ClockId, clock_gettime};

use super::{Event, Step, Trace, TraceError, VARIABLE};
use crate::cluster::Cluster;

thread_local! {
    /// CPU time of this thread, in nanoseconds, at the end of its last event.
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// The trace of this node, as far as it has come.
///
/// A handler of faults records, too, and may allocate: see `signal`. Nobody who holds the steps touches a view.
#[derive(Debug)]
pub(crate) struct Recorder {
    file: File,
    trace: Mutex<Trace>,
    is_given_up: AtomicBool,
}

impl Recorder {
    /// Begins the trace of a node, if the environment names a folder for it.
    ///
    /// # Errors
    /// The file cannot be made.
    pub(crate) fn of_environment(cluster: &Cluster) -> Result<Option<Recorder>, TraceError> {
        let Some(folder) = std::env::var_os(VARIABLE).map(PathBuf::from) else {
            return Ok(None);
        };
        let node = cluster.own().number();
        let path = folder.join(Trace::file_name(node));
        let made = std::fs::create_dir_all(&folder).and_then(|()| File::create(&path));
        let file = made.map_err(|error| TraceError::new(&path, error))?;
        SEEN.set(cpu_ns());
        let trace = Mutex::new(Trace {
            node,
            nodes: cluster.nodes().count() as u32,
            steps: Vec::new(),
        });
        Ok(Some(Recorder {
            file,
            trace,
            is_given_up: AtomicBool::new(false),
        }))
    }

    /// Records an event, and carries it out.
    pub(crate) fn around<R>(&self, event: Event, f: impl FnOnce() -> R) -> R {
        let cpu_ns_now = cpu_ns();
        let cpu_ns_before = SEEN.try_with(|seen| seen.replace(cpu_ns_now));
        let step = Step {
            cpu_ns: cpu_ns_now.saturating_sub(cpu_ns_before.unwrap_or(cpu_ns_now)),
            event,
        };
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        trace.steps.push(step);
        drop(trace);
        let result = f();
        let _ = SEEN.try_with(|seen| seen.set(cpu_ns()));
        result
    }

    /// Leaves the file empty, as the trace would lack what cannot be recorded.
    pub(crate) fn give_up(&self) {
        self.is_given_up.store(true, Ordering::Relaxed);
    }

    /// Writes the file. One that could not be written has no end, as its reader notices.
    pub(crate) fn write(&self) {
        if self.is_given_up.load(Ordering::Relaxed) {
            return;
        }
        let trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        let mut file = BufWriter::new(&self.file);
        let _ = write!(file, "{trace}").and_then(|()| file.flush());
    }
}

/// Returns the CPU time of this thread, in nanoseconds.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
