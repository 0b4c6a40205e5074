//! A program's bytes: one buffer or many, gone through once.

use std::ffi::c_int;
use std::slice;

/// What is left of a list of buffers of the program's.
pub(super) struct Buffers<'a> {
    list: &'a [libc::iovec],
    /// Of the first in the list.
    offset: usize,
    left: usize,
}

impl<'a> Buffers<'a> {
    /// All of the list.
    ///
    /// # Safety
    /// Each stands for as many bytes as it says, which nobody else uses until this is dropped; they can be written if they are to be.
    ///
    /// # Errors
    /// `EINVAL`: more than can be counted.
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

    /// Bytes.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// The same from here, to be gone through without moving on.
    pub(super) fn peek(&self) -> Buffers<'a> {
        Buffers { ..*self }
    }

    /// Goes through the next `length` bytes, piece by piece; less where less is left. `with` is given each and where it begins.
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
