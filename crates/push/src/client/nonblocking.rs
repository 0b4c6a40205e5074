//! For one thread that has several clients: it looks at each, and sleeps until one of them has something.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::{Client, Done, Entry, Error};

impl Client {
    /// As [`Client::next_done`], but `None` where that would wait.
    pub fn poll_done(&mut self) -> Result<Option<Done>, Error> {
        if !self.entries.front().is_some_and(Entry::is_over) {
            self.handle_notices()?;
        }
        if self.entries.front().is_some_and(Entry::is_over) {
            return self.next_done().map(Some);
        }
        Ok(None)
    }

    /// What arrives from now on makes the client's descriptor readable; until then it is not. What has arrived is taken in.
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
