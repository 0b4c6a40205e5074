//! Several clients on one thread: it polls each of them, and sleeps until one has something.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::{Client, Done, Entry, Error, Mapping, PendingMap};

impl Client {
    /// Like [`Client::next_done`], but returns `None` instead of waiting.
    pub fn poll_done(&mut self) -> Result<Option<Done>, Error> {
        if !self.entries.front().is_some_and(Entry::is_over) {
            self.handle_notices()?;
        }
        if self.entries.front().is_some_and(Entry::is_over) {
            return self.next_done().map(Some);
        }
        Ok(None)
    }

    /// Returns the mapping, once, when the server has answered the request. Probes a server that is silent, so that its death is
    /// noticed.
    pub fn poll_map(&mut self, pending: &PendingMap) -> Result<Option<Mapping>, Error> {
        self.handle_notices()?;
        let mapping = self.mapped(pending)?;
        if mapping.is_none() {
            self.probe_if_due()?;
        }
        Ok(mapping)
    }

    /// Arms the client's descriptor, which becomes readable when something arrives from now on, and not before. Handles what
    /// has already arrived, and probes a server that is silent, so that its death is noticed.
    pub fn arm(&mut self) -> Result<(), Error> {
        while let Some(wc) = self.link.cq.wait(Duration::ZERO)? {
            self.handle(&wc)?;
        }
        self.probe_if_due()
    }

    /// Returns the time of the next probe: [`Client::arm`] or [`Client::poll_map`] is to be called then, too.
    pub fn due(&self) -> Instant {
        self.link.probe_at
    }
}

impl AsFd for Client {
    /// Readable when something arrived after [`Client::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.cq.as_fd()
    }
}
