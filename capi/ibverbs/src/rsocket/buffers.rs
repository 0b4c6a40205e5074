//! A program's bytes, in one buffer or many, gone through once.

use std::ffi::c_int;
use std::slice;

/// Remaining part of a list of a program's buffers.
pub(super) struct Buffers<'a> {
    list: &'a [libc::iovec],
    /// Offset in the first buffer of the list.
    offset: usize,
    left: usize,
}

impl<'a> Buffers<'a> {
    /// Starts with all of the list.
    ///
    /// # Safety
    /// Each buffer has as many bytes as it says, which nothing else uses until this is dropped; the bytes are writable if they
    /// will be written.
    ///
    /// # Errors
    /// `EINVAL`: the sum of the lengths overflows.
    pub(super) unsafe fn new(list: &'a [libc::iovec]) -> Result<Buffers<'a>, c_int> {
        let add = |sum: usize, buffer: &libc::iovec| sum.checked_add(buffer.iov_len);
        let left = list
            .iter()
            .try_fold(0, add)
            .filter(|left| isize::try_from(*left).is_ok());
        Ok(Buffers {
            list,
            offset: 0,
            left: left.ok_or(libc::EINVAL)?,
        })
    }

    /// Returns the number of bytes left.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Returns a copy of the rest, to be gone through without moving on.
    pub(super) fn peek(&self) -> Buffers<'a> {
        Buffers { ..*self }
    }

    /// Goes through the next `length` bytes, piece by piece, or fewer if fewer are left. Calls `with` for each piece, with the
    /// offset at which it begins.
    pub(super) fn take(&mut self, length: usize, mut with: impl FnMut(usize, &mut [u8])) {
        let length = length.min(self.left);
        let mut done = 0;
        while done < length {
            let (first, rest) = self.list.split_first().expect("what is left is in the list");
            let n = (first.iov_len - self.offset).min(length - done);
            if n > 0 {
                // SAFETY: inside of a buffer of the program's that is this value's alone, as its maker said.
                let piece =
                    unsafe { slice::from_raw_parts_mut(first.iov_base.cast::<u8>().add(self.offset), n) };
                with(done, piece);
            }
            done += n;
            self.offset += n;
            if self.offset == first.iov_len {
                (self.list, self.offset) = (rest, 0);
            }
        }
        self.left -= length;
    }
}
