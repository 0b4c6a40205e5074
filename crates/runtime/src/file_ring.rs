//! Reads and writes of files that the kernel carries out for a thread which does not wait for them.
#![allow(
    unsafe_code,
    reason = "the kernel reads and writes buffers that it is told of"
)]

use std::fmt;
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, types};

use crate::pages::Pages;

/// Accesses that one system call may pass to the kernel.
const SUBMISSIONS: u32 = 256;
/// Accesses that the kernel works on at the same time.
const ACCESSES_MAX: u32 = 4096;
/// Threads of the kernel for accesses that would block it, such as reads through its page cache. It makes them as they are needed, and has by
/// itself so few that a file which hangs would hold up others.
const KERNEL_THREADS_MAX: u32 = 2048;

/// Direction of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file into the buffer.
    Read,
    /// From the buffer into the file.
    Write,
}

/// An access to a file, and what its owner knows it by.
#[derive(Debug)]
pub struct FileAccess<T> {
    /// The file. It may be open for direct I/O; then offset and length are multiples of its device's block.
    pub file: Arc<File>,
    /// The direction.
    pub direction: Direction,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// The buffer, from its begin on.
    pub buffer: Pages,
    /// Bytes to move, at most the buffer's.
    pub length: u32,
    /// The owner's name for it.
    pub token: T,
}

/// An io_uring: accesses to files that the kernel works on. Its descriptor is readable when some have ended, so a reactor can
/// sleep on it.
pub struct FileRing<T> {
    uring: IoUring,
    /// By their number. Nothing touches an access's buffer before the kernel has reported its end.
    accesses: Vec<Option<FileAccess<T>>>,
    free: Vec<u32>,
    /// Numbers of those that the kernel gets by the next system call, the oldest first.
    added: Vec<u32>,
    /// The kernel has refused some. Their entries stay in the submission queue and name buffers that were given back, so nothing is
    /// submitted any more.
    is_refused: bool,
}

impl<T> fmt::Debug for FileRing<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileRing")
            .field("accesses", &self.open())
            .finish()
    }
}

impl<T> FileRing<T> {
    /// Makes a ring for the calling thread.
    ///
    /// # Errors
    /// The system has no io_uring with reads and writes (Linux 5.6), or does not allow this process to use it.
    pub fn new() -> io::Result<FileRing<T>> {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_cqsize(ACCESSES_MAX);
        // Without an interrupt of this thread for each end (Linux 5.19).
        let cooperative = builder.clone().setup_coop_taskrun().build(SUBMISSIONS);
        let uring = cooperative.or_else(|_| builder.build(SUBMISSIONS))?;
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // Linux 5.15; before it the kernel's own limits hold.
        let _ = uring
            .submitter()
            .register_iowq_max_workers(&mut [KERNEL_THREADS_MAX, 0]);
        Ok(FileRing {
            uring,
            accesses: Vec::new(),
            free: Vec::new(),
            added: Vec::new(),
            is_refused: false,
        })
    }

    /// Returns a descriptor that is readable while ended accesses wait to be taken.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn descriptor(&self) -> io::Result<OwnedFd> {
        // SAFETY: `uring` owns the descriptor, and the borrow ends with this call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(self.uring.as_raw_fd()) };
        borrowed.try_clone_to_owned()
    }

    /// Adds an access, which [`FileRing::submit`] starts.
    ///
    /// # Errors
    /// The access, if the ring is full, the kernel has refused some, or the buffer is shorter than the length.
    pub fn add(&mut self, access: FileAccess<T>) -> Result<(), FileAccess<T>> {
        if self.is_refused || access.length as usize > access.buffer.len() {
            return Err(access);
        }
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.accesses.len() < ACCESSES_MAX as usize => {
                self.accesses.push(None);
                self.accesses.len() as u32 - 1
            }
            None => return Err(access),
        };
        let place = &mut self.accesses[number as usize];
        let access = place.insert(access);
        let fd = types::Fd(access.file.as_raw_fd());
        let entry = match access.direction {
            Direction::Read => opcode::Read::new(fd, access.buffer.as_mut_ptr(), access.length)
                .offset(access.offset)
                .build(),
            Direction::Write => opcode::Write::new(fd, access.buffer.as_ptr(), access.length)
                .offset(access.offset)
                .build(),
        };
        // SAFETY: the buffer has `length` bytes at an address that stays, and is in `accesses`, where nothing touches it, until the completion of this access has
        // been taken; `drop` leaks it if that never happens. The kernel takes its own reference to the file when the access is
        // submitted, and until then `access` keeps the file open.
        let pushed = unsafe { self.uring.submission().push(&entry.user_data(number.into())) };
        if pushed.is_err() {
            self.free.push(number);
            return place.take().map_or(Ok(()), Err);
        }
        self.added.push(number);
        Ok(())
    }

    /// Starts the accesses that were added. Returns those that the kernel did not take, as when it has no memory; then the ring takes no more.
    pub fn submit(&mut self) -> Vec<FileAccess<T>> {
        if self.added.is_empty() {
            return Vec::new();
        }
        let mut taken = 0;
        while taken < self.added.len() {
            match self.uring.submit() {
                Ok(more) if more > 0 => taken += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // It lacks memory or room for completions at the moment. The next of those that it has brings the owner here again.
                Err(error) if is_temporary(&error) && self.open() > self.added.len() => {
                    self.added.drain(..taken);
                    return Vec::new();
                }
                _ => break,
            }
        }
        let refused: Vec<u32> = self.added.drain(..).skip(taken).collect();
        self.is_refused |= !refused.is_empty();
        refused
            .into_iter()
            .filter_map(|number| self.accesses[number as usize].take())
            .collect()
    }

    /// Returns the number of accesses that were added and have not ended.
    fn open(&self) -> usize {
        self.accesses.iter().flatten().count()
    }

    /// Takes an access that has ended, with the bytes that were moved or the error.
    pub fn pop(&mut self) -> Option<(FileAccess<T>, io::Result<u32>)> {
        loop {
            let completion = self.uring.completion().next()?;
            let number = completion.user_data() as u32;
            let place = self.accesses.get_mut(number as usize);
            let Some(access) = place.and_then(Option::take) else {
                continue;
            };
            self.free.push(number);
            let result = completion.result();
            let result = u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            return Some((access, result));
        }
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy
    )
}

impl<T> Drop for FileRing<T> {
    fn drop(&mut self) {
        // The kernel may still access the buffers of those whose end it has not reported.
        for access in self.accesses.drain(..).flatten() {
            mem::forget(access.buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::time::{Duration, Instant};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::skip::skip;

    fn ring() -> Option<FileRing<u32>> {
        let ring = FileRing::new().ok();
        if ring.is_none() {
            skip("the system allows no io_uring");
        }
        ring
    }

    fn file() -> Arc<File> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        Arc::new(file)
    }

    fn access(file: &Arc<File>, direction: Direction, offset: u64, byte: u8, token: u32) -> FileAccess<u32> {
        let mut buffer = Pages::new(4096);
        buffer.fill(byte);
        FileAccess {
            file: file.clone(),
            direction,
            offset,
            buffer,
            length: 4096,
            token,
        }
    }

    fn wait(ring: &mut FileRing<u32>) -> (FileAccess<u32>, io::Result<u32>) {
        let descriptor = ring.descriptor().unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(ended) = ring.pop() {
                return ended;
            }
            assert!(Instant::now() < end, "the kernel reports the end");
            let second = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            let _ = poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&second));
        }
    }

    #[test]
    fn accesses__move_bytes_and_end_with_their_tokens() {
        let Some(mut ring) = ring() else { return };
        let file = file();
        for token in 0..200 {
            let offset = u64::from(token) * 4096;
            ring.add(access(&file, Direction::Write, offset, token as u8 + 1, token))
                .unwrap();
        }
        assert!(ring.submit().is_empty());
        let mut tokens: Vec<u32> = (0..200).map(|_| wait(&mut ring).0.token).collect();
        tokens.sort_unstable();
        assert!(tokens.into_iter().eq(0..200));
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, 7 * 4096).unwrap();
        assert_eq!(bytes, [8; 4096]);
        ring.add(access(&file, Direction::Read, 9 * 4096, 0, 9)).unwrap();
        assert!(ring.submit().is_empty());
        let (read, result) = wait(&mut ring);
        assert_eq!(result.unwrap(), 4096);
        assert!(read.buffer.iter().all(|byte| *byte == 10));
    }

    #[test]
    fn accesses__end_with_what_happened() {
        let Some(mut ring) = ring() else { return };
        let file = file();
        ring.add(access(&file, Direction::Read, (1 << 20) - 512, 0, 1))
            .unwrap();
        assert!(ring.submit().is_empty());
        assert_eq!(wait(&mut ring).1.unwrap(), 512);
        let (reader, _writer) = io::pipe().unwrap();
        let not_writable = Arc::new(File::from(OwnedFd::from(reader)));
        ring.add(access(&not_writable, Direction::Write, 0, 0, 2))
            .unwrap();
        assert!(ring.submit().is_empty());
        let error = wait(&mut ring).1.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::BADF.raw_os_error()));
    }

    #[test]
    fn add__refuses_a_short_buffer_and_more_than_fit() {
        let Some(mut ring) = ring() else { return };
        let file = file();
        let mut long = access(&file, Direction::Read, 0, 0, 0);
        long.length = 4097;
        assert!(ring.add(long).is_err());
        for token in 0..SUBMISSIONS {
            ring.add(access(&file, Direction::Read, 0, 0, token)).unwrap();
        }
        let refused = ring.add(access(&file, Direction::Read, 0, 0, SUBMISSIONS));
        assert_eq!(refused.unwrap_err().token, SUBMISSIONS);
        assert!(ring.submit().is_empty());
        (0..SUBMISSIONS).for_each(|_| drop(wait(&mut ring)));
        ring.add(access(&file, Direction::Read, 0, 0, 0)).unwrap();
    }

    #[test]
    fn drop__while_the_kernel_works_leaves_it_the_buffers() {
        let Some(mut ring) = ring() else { return };
        let (reader, mut writer) = io::pipe().unwrap();
        let reader = Arc::new(File::from(OwnedFd::from(reader)));
        ring.add(access(&reader, Direction::Read, u64::MAX, 0, 0))
            .unwrap();
        assert!(ring.submit().is_empty());
        assert!(ring.pop().is_none());
        // A buffer that was freed would be handed out again, and the kernel would write to it.
        drop(ring);
        let others: Vec<Pages> = (0..64).map(|_| Pages::new(4096)).collect();
        let _ = io::Write::write(&mut writer, &[1; 4096]);
        drop(reader);
        assert!(others.iter().all(|pages| pages.iter().all(|byte| *byte == 0)));
    }
}
