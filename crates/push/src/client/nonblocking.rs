//! Several clients on one thread: it polls each of them, and sleeps until one has something.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::{Client, Done, Entry, Error};

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

    /// Arms the client's descriptor, which becomes readable when something arrives from now on, and not before. Handles what
    /// has already arrived.
    pub fn arm(&mut self) -> Result<(), Error> {
        while let Some(wc) = self.link.cq.wait(Duration::ZERO)? {
            self.handle(&wc)?;
        }
        Ok(())
    }
}

impl AsFd for Client {
    /// Readable when something arrived after [`Client::arm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.link.cq.as_fd()
    }
}
