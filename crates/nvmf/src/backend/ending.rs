//! Drives that end, on threads of their own: a shutdown takes its time, and the last user of a drive may be a reactor.

use std::thread::{Builder, JoinHandle};

use rdmux_verbs::sync::Mutex;

/// Threads that shut drives down, with the addresses of these.
#[derive(Debug, Default)]
pub struct Endings(Mutex<Vec<(String, JoinHandle<()>)>>);

impl Endings {
    /// Drops a drive on a thread of its own.
    pub(super) fn end(&self, address: String, drive: impl Send + 'static) {
        // It is dropped here if there is no thread to be had.
        let thread = Builder::new()
            .name("drive-end".to_owned())
            .spawn(move || drop(drive));
        let mut threads = self.0.lock();
        threads.retain(|(_, thread)| !thread.is_finished());
        threads.extend(thread.ok().map(|thread| (address, thread)));
    }

    /// Waits until the drive with an address has ended, if it is about to.
    pub fn wait_for(&self, address: &str) {
        self.wait(|ending| ending == address);
    }

    /// Waits until all have ended that are about to.
    pub fn wait_for_all(&self) {
        self.wait(|_| true);
    }

    fn wait(&self, is_meant: impl Fn(&str) -> bool) {
        let meant: Vec<_> = self
            .0
            .lock()
            .extract_if(.., |(address, _)| is_meant(address))
            .collect();
        for (_, thread) in meant {
            // Its own end counts, however it comes.
            let _ = thread.join();
        }
    }
}

/// A process that ends early, as one whose start has failed, does not leave a drive in the middle of its shutdown.
impl Drop for Endings {
    fn drop(&mut self) {
        self.wait_for_all();
    }
}
