//! Lists of pages: PRP entries. NVMe Base 2.0, 4.1.1.

use crate::memory::{Buffer, PAGE};

/// Entries of a list of one page.
pub(crate) const LIST_ENTRIES: usize = PAGE / 8;
/// Most bytes of a command's data: the first page is in the command, the others in a list of one page, which so has no link to another.
pub(crate) const DATA_BYTES_MAX: usize = LIST_ENTRIES * PAGE;

/// Returns PRP entries 1 and 2 of a command with so many bytes of data at the beginning of its buffers, and the list if there are more pages than
/// two; `list` is the list's address then. `None` if the buffers do not hold the bytes, or a list not their pages.
///
/// Buffers are whole pages, so each begins and ends where a page does.
pub(crate) fn entries(data: &[Buffer], bytes: usize, list: u64) -> Option<([u64; 2], Vec<u64>)> {
    let number = bytes.div_ceil(PAGE);
    let pages = data
        .iter()
        .flat_map(|buffer| (0..buffer.bytes() / PAGE).map(|page| buffer.address(page)));
    let pages: Vec<u64> = pages.take(number).collect();
    if pages.len() < number || bytes > DATA_BYTES_MAX {
        return None;
    }
    Some(match pages[..] {
        [] => ([0, 0], Vec::new()),
        [only] => ([only, 0], Vec::new()),
        [first, second] => ([first, second], Vec::new()),
        [first, ..] if mutant!(ListFromFirst) => ([first, list], pages[..number - 1].to_vec()),
        [first, ref rest @ ..] => ([first, list], rest.to_vec()),
    })
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use rdmux_memory::AnonymousMemory;

    use super::*;
    use crate::memory::Pool;
    use crate::{Bar, DmaMemory, Function};

    /// Has memory alone, whose pages lie in descending order.
    #[derive(Debug)]
    struct Host;

    impl Function for Host {
        fn address(&self) -> &str {
            "none"
        }
        fn register_bytes(&self) -> u64 {
            0
        }
        fn read_u32(&self, _: u32) -> u32 {
            u32::MAX
        }
        fn read_u64(&self, _: u32) -> u64 {
            u64::MAX
        }
        fn write_u32(&self, _: u32, _: u32) {}
        fn write_u64(&self, _: u32, _: u64) {}
        fn bar(&self, _: u8) -> io::Result<Bar> {
            Err(io::ErrorKind::NotFound.into())
        }
        fn dma(&self, bytes: usize) -> io::Result<DmaMemory> {
            let pages = (0..bytes.div_ceil(PAGE)).rev();
            Ok(DmaMemory {
                memory: Arc::new(AnonymousMemory::new(bytes)?),
                pages: pages.map(|page| (page * PAGE) as u64).collect(),
            })
        }
    }

    fn page(nr: u64) -> u64 {
        nr * PAGE as u64
    }

    #[test]
    fn entries__are_in_the_command_up_to_two_pages() {
        let pool = Pool::dram(&Host, 8 * PAGE).unwrap();
        let data = [pool.allocate(2 * PAGE).unwrap()];
        assert_eq!(entries(&data, 0, 7), Some(([0, 0], vec![])));
        assert_eq!(entries(&data, 512, 7), Some(([page(7), 0], vec![])));
        assert_eq!(entries(&data, PAGE + 1, 7), Some(([page(7), page(6)], vec![])));
    }

    #[test]
    fn entries__are_in_a_list_beyond_two_pages() {
        let pool = Pool::dram(&Host, 8 * PAGE).unwrap();
        let data = [pool.allocate(PAGE).unwrap(), pool.allocate(3 * PAGE).unwrap()];
        let list = vec![page(6), page(5)];
        assert_eq!(entries(&data, 2 * PAGE + 512, 99), Some(([page(7), 99], list)));
    }

    #[test]
    fn entries__do_not_go_beyond_the_buffers() {
        let pool = Pool::dram(&Host, 2 * DATA_BYTES_MAX).unwrap();
        let data = [pool.allocate(PAGE).unwrap()];
        assert_eq!(entries(&data, PAGE + 1, 0), None);
        let data = [pool.allocate(DATA_BYTES_MAX + PAGE).unwrap()];
        let (_, list) = entries(&data, DATA_BYTES_MAX, 0).unwrap();
        assert_eq!(list.len(), LIST_ENTRIES - 1);
        assert_eq!(entries(&data, DATA_BYTES_MAX + 1, 0), None);
    }
}
