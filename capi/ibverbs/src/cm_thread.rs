//! The thread that handles the events of all connections of the process: those of ids, and of sockets over RDMA.

use std::collections::{BTreeSet, HashMap};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use rdmux_verbs::EventQueue;
use rdmux_verbs::sync::{Mutex, MutexGuard};

/// Owner of objects whose events the thread handles.
pub(crate) trait Handler: Send + Sync {
    /// Handles what has happened, if anything has, and does not wait. Returns the time at which to call it again without an event.
    fn handle(self: Arc<Self>) -> Option<Instant>;
}

struct CmThread {
    events: EventQueue,
    handlers: Mutex<HashMap<u64, Weak<dyn Handler>>>,
    process: u32,
}

/// A handler's registration with the thread, from its first use until it is dropped.
#[derive(Default)]
pub(crate) struct Handled(OnceLock<Registration>);

struct Registration {
    thread: Arc<CmThread>,
    token: u64,
}

impl CmThread {
    /// Returns the thread of this process, which is started at the first call. A child of a fork has its own.
    fn get() -> Result<Arc<CmThread>, c_int> {
        static THREAD: Mutex<Option<Arc<CmThread>>> = Mutex::new(None);
        let mut thread = THREAD.lock();
        let process = std::process::id();
        if let Some(thread) = thread.as_ref().filter(|thread| thread.process == process) {
            return Ok(thread.clone());
        }
        let events = EventQueue::new().map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
        let made = Arc::new(CmThread {
            events,
            handlers: Mutex::default(),
            process,
        });
        let runs = made.clone();
        crate::spawn("rdmux-cm", move || runs.run())?;
        *thread = Some(made.clone());
        Ok(made)
    }

    fn handlers(&self) -> MutexGuard<'_, HashMap<u64, Weak<dyn Handler>>> {
        self.handlers.lock()
    }

    fn run(&self) {
        // A handler that was called before its time returns that time again.
        let mut times = BTreeSet::new();
        loop {
            let left = times.first().map_or(Duration::MAX, |(at, _): &(Instant, u64)| {
                at.saturating_duration_since(Instant::now())
            });
            let due = || times.pop_first().map(|(_, token)| token);
            let Some(token) = self.events.wait(left).or_else(due) else {
                continue;
            };
            let handler = self.handlers().get(&token).and_then(Weak::upgrade);
            if let Some(at) = handler.and_then(Handler::handle) {
                times.insert((at, token));
            }
        }
    }
}

impl Handled {
    /// Returns the queue, and the token, to which the objects of the handler report.
    ///
    /// # Errors
    /// The system refuses the thread, or a descriptor.
    pub(crate) fn queue(
        &self,
        handler: impl FnOnce() -> Weak<dyn Handler>,
    ) -> Result<(&EventQueue, u64), c_int> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let registration = match self.0.get() {
            Some(registration) => registration,
            None => {
                let (thread, token) = (CmThread::get()?, NEXT.fetch_add(1, Ordering::Relaxed));
                thread.handlers().insert(token, handler());
                let made = Registration { thread, token };
                // Another thread may have registered it meanwhile: then that registration stays.
                self.0.get_or_init(|| made)
            }
        };
        Ok((&registration.thread.events, registration.token))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // In a child of a fork, what it registered with is the parent's.
        if self.thread.process == std::process::id() {
            self.thread.handlers().remove(&self.token);
        }
    }
}
