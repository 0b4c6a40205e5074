//! Ways to a subsystem over time: when a controller is lost, another one takes over what was not done.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;

use rdmux_wire::nvme::NsId;

use super::controller::{Controller, NamespaceInfo};
use super::io_queue::IoQueue;
use super::paths::{Loss, Paths};
use super::{HostError, Options};

/// A host's ways to a subsystem, which survive the loss of controllers: a queue that loses its connection gets one of another path, or of a new
/// controller, and repeats on it the commands that were not done, as Linux's multipath does. Reads, writes and flushes may be repeated. I/O goes by
/// one path at a time, an optimized one if there is one, and waits while the subsystem gives no access to a namespace by any of them. Nothing is
/// written while a late copy of an earlier write could follow.
#[derive(Debug)]
pub struct Session {
    paths: Arc<Paths>,
    threads: Vec<JoinHandle<()>>,
}

impl Session {
    /// Connects by one path, and asks for so many I/O queues.
    ///
    /// # Errors
    /// As [`Controller::connect`]: the first connection is not tried again.
    pub fn connect(options: Options, queues: u16) -> Result<Arc<Session>, HostError> {
        Session::connect_by(vec![options], queues)
    }

    /// Connects by some paths to one subsystem, and asks for so many I/O queues. The times of the first one are those of the session.
    ///
    /// # Errors
    /// As [`Controller::connect`], if no path works, or one leads to something that this host cannot use.
    ///
    /// # Panics
    /// There is no path.
    pub fn connect_by(paths: Vec<Options>, queues: u16) -> Result<Arc<Session>, HostError> {
        assert!(!paths.is_empty(), "a session has a path");
        let mut session = Session {
            paths: Arc::new(Paths::new(paths, queues)),
            threads: Vec::new(),
        };
        for at in 0..session.paths.number() {
            let paths = session.paths.clone();
            let thread = std::thread::Builder::new().name("nvme-path".to_owned());
            session.threads.push(thread.spawn(move || paths.keep(at))?);
        }
        session.paths.begin()?;
        Ok(Arc::new(session))
    }

    pub(super) fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Returns the paths by which no connection could be made when they were last tried, by their numbers from 0, and the reasons.
    pub fn unreachable(&self) -> Vec<(usize, Arc<HostError>)> {
        self.paths.unreachable()
    }

    /// Returns a channel that tells of each controller that is lost, until the session is over. A later call replaces it.
    pub fn losses(&self) -> Receiver<Loss> {
        self.paths.losses()
    }

    /// Returns the controller to which I/O goes, or went last.
    pub fn controller(&self) -> Arc<Controller> {
        self.paths.controller()
    }

    /// Returns the maximum bytes of a command's data, by whatever path it goes.
    pub fn transfer_max(&self) -> u32 {
        self.paths.transfer_max()
    }

    /// Returns the number of controllers that have had I/O: what the last one held and had not flushed may be lost when it changes.
    pub fn generation(&self) -> u64 {
        self.paths.generation()
    }

    /// Looks a namespace up for use: all controllers have to have the same.
    ///
    /// # Errors
    /// As [`Controller::namespace`], or its blocks have metadata, or a path leads to another one.
    pub fn open_namespace(&self, nsid: NsId) -> Result<NamespaceInfo, HostError> {
        let namespace = self.controller().namespace(nsid)?;
        if namespace.metadata_bytes > 0 {
            return Err(HostError::Inconsistent {
                what: "namespace",
                why: format!(
                    "{nsid} has {} bytes of metadata with each block, which this host does not support",
                    namespace.metadata_bytes
                ),
            });
        }
        self.paths.add_namespace(namespace.clone())?;
        Ok(namespace)
    }

    /// Connects an I/O queue, 1 to the number asked for, on which so many commands may be in flight.
    ///
    /// # Errors
    /// The controller refuses it, or does not take so many commands.
    pub fn queue(self: &Arc<Session>, qid: u16, depth: u16) -> Result<IoQueue, HostError> {
        IoQueue::new(self.clone(), qid, depth)
    }

    /// Shuts the controllers down, so that they make durable what they have. The I/O queues are to be dropped before.
    pub fn close(self: Arc<Session>) {
        if let Some(mut session) = Arc::into_inner(self) {
            session.end(true);
        }
    }

    fn end(&mut self, closes: bool) {
        // A thread that is about to connect ends later.
        let live = self.paths.end(closes);
        for (thread, _) in self.threads.drain(..).zip(live).filter(|(_, is_live)| *is_live) {
            let _ = thread.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end(false);
    }
}
