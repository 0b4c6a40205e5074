//! Buffers for the data of commands, which all connections of a reactor share.

use rdmux_runtime::Pages;

/// The least size of a buffer.
const BYTES_MIN: usize = 4096;
/// Bytes of buffers that are kept for the next command.
const IDLE_MAX: usize = 16 << 20;

/// Buffers by size: powers of two.
#[derive(Debug, Default)]
pub struct Buffers {
    /// By the power of two, less that of [`BYTES_MIN`].
    idle: Vec<Vec<Pages>>,
    idle_bytes: usize,
}

impl Buffers {
    /// Returns the size of a buffer for so many bytes.
    pub(crate) fn size(bytes: usize) -> usize {
        bytes.next_power_of_two().max(BYTES_MIN)
    }

    /// Returns a buffer of at least so many bytes, which have any values.
    pub(crate) fn take(&mut self, bytes: usize) -> Pages {
        let size = Buffers::size(bytes);
        match self.idle.get_mut(class(size)).and_then(Vec::pop) {
            Some(buffer) => {
                self.idle_bytes -= size;
                buffer
            }
            None => Pages::new(size),
        }
    }

    /// Takes a buffer back, unless enough are kept.
    pub(crate) fn give(&mut self, buffer: Pages) {
        let size = buffer.len();
        if size < BYTES_MIN || self.idle_bytes + size > IDLE_MAX {
            return;
        }
        let class = class(size);
        if self.idle.len() <= class {
            self.idle.resize_with(class + 1, Vec::new);
        }
        self.idle_bytes += size;
        self.idle[class].push(buffer);
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
        assert_eq!(buffers.idle_bytes, IDLE_MAX);
        // That of a command without data.
        buffers.give(Pages::default());
        assert_eq!(buffers.idle_bytes, IDLE_MAX);
    }
}
