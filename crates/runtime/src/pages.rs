//! Memory for direct I/O, which begins at a page.
#![allow(unsafe_code, reason = "the allocator's only call for an alignment")]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of [`Pages`], in bytes: enough for direct I/O to every device (open(2), `O_DIRECT`).
const ALIGNMENT: usize = 4096;

/// Bytes whose address is a multiple of 4,096, and stays as this is moved.
pub struct Pages {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its bytes as a `Box<[u8]>` does.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates so many zero bytes.
    pub fn new(len: usize) -> Pages {
        if len == 0 {
            return Pages::default();
        }
        let layout = layout(len);
        // SAFETY: the layout has at least one byte.
        let address = unsafe { alloc_zeroed(layout) };
        let Some(address) = NonNull::new(address) else {
            handle_alloc_error(layout)
        };
        Pages { address, len }
    }
}

impl Default for Pages {
    /// Makes none: no byte, no allocation.
    fn default() -> Pages {
        Pages {
            address: NonNull::dangling(),
            len: 0,
        }
    }
}

fn layout(len: usize) -> Layout {
    Layout::from_size_align(len, ALIGNMENT).expect("a length of at most isize::MAX")
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes at `address` are this value's own and initialized; if `len` is 0, any address does that is not null.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").field("len", &self.len).finish()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: `new` has allocated it with this layout.
            unsafe { dealloc(self.address.as_ptr(), layout(self.len)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new__is_aligned_and_zero() {
        for len in [1, 512, 4096, 1 << 20] {
            let mut pages = Pages::new(len);
            assert!(pages.as_ptr().addr().is_multiple_of(ALIGNMENT));
            assert!(pages.len() == len && pages.iter().all(|byte| *byte == 0));
            pages.fill(1);
        }
        assert!(Pages::new(0).is_empty() && Pages::default().is_empty());
    }
}
