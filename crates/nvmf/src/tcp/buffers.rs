//! Buffers for the data of commands, which all connections of a reactor share.

use rdmux_runtime::Pages;

/// The least size of a buffer.
const BYTES_MIN: usize = 4096;
/// Bytes of buffers that are kept for the next command.
const IDLE_MAX: usize = 16 << 20;

/// Buffers that wait for the next command, by size: powers of two.
#[derive(Debug)]
pub(crate) struct Idle<T> {
    /// By the power of two, less that of [`BYTES_MIN`].
    classes: Vec<Vec<T>>,
    bytes: usize,
}

impl<T> Default for Idle<T> {
    fn default() -> Idle<T> {
        Idle {
            classes: Vec::new(),
            bytes: 0,
        }
    }
}

impl<T> Idle<T> {
    /// Returns one of a size that [`Buffers::size`] has returned.
    pub(crate) fn take(&mut self, size: usize) -> Option<T> {
        let buffer = self.classes.get_mut(class(size))?.pop()?;
        self.bytes -= size;
        Some(buffer)
    }

    /// Keeps one of such a size, unless enough are kept.
    pub(crate) fn give(&mut self, size: usize, buffer: T) {
        if self.bytes + size > IDLE_MAX {
            return;
        }
        let class = class(size);
        if self.classes.len() <= class {
            self.classes.resize_with(class + 1, Vec::new);
        }
        self.bytes += size;
        self.classes[class].push(buffer);
    }
}

/// Buffers of memory.
#[derive(Debug, Default)]
pub struct Buffers(Idle<Pages>);

impl Buffers {
    /// Returns the size of a buffer for so many bytes.
    pub(crate) fn size(bytes: usize) -> usize {
        bytes.next_power_of_two().max(BYTES_MIN)
    }

    /// Returns a buffer of at least so many bytes, which have any values.
    pub(crate) fn take(&mut self, bytes: usize) -> Pages {
        let size = Buffers::size(bytes);
        self.0.take(size).unwrap_or_else(|| Pages::new(size))
    }

    /// Takes a buffer back, unless enough are kept.
    pub(crate) fn give(&mut self, buffer: Pages) {
        let size = buffer.len();
        if size >= BYTES_MIN {
            self.0.give(size, buffer);
        }
    }
}

fn class(size: usize) -> usize {
    (size.ilog2() - BYTES_MIN.ilog2()) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn take__returns_what_was_given_of_that_size() {
        let mut buffers = Buffers::default();
        let mut buffer = buffers.take(5000);
        assert_eq!(buffer.len(), 8192);
        buffer[0] = 7;
        buffers.give(buffer);
        assert_eq!(buffers.take(1).len(), 4096);
        assert_eq!(buffers.take(8192)[0], 7);
    }

    #[test]
    fn give__keeps_no_more_than_the_limit() {
        let mut buffers = Buffers::default();
        let all: Vec<_> = (0..20).map(|_| buffers.take(1 << 20)).collect();
        all.into_iter().for_each(|buffer| buffers.give(buffer));
        assert_eq!(buffers.0.bytes, IDLE_MAX);
        // That of a command without data.
        buffers.give(Pages::default());
        assert_eq!(buffers.0.bytes, IDLE_MAX);
    }
}
