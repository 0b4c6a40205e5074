//! Blocks copies that a peer makes by calls into this process after their grant was revoked.
//!
//! A peer checks its grant and then calls `process_vm_writev`. A debugger, a freezer or Ctrl-Z may stop the peer between the two for any
//! length of time, so the call itself has to fail once the grant has ended. The kernel copies the vectors of a call in their order and
//! stops at the first that it cannot copy. The first vector of each such call goes to a *gate*, a page of this process that can be closed,
//! and the last one to a word that shows that the call is over. All of them are parts of one system call, in which no signal stops a
//! process. (The process may lose its CPU there, and ends the call when it gets one again.)
//!
//! ```text
//! process_vm_writev: entry -> gate | the bytes -> region | entry -> Segment::left
//! ```
//!
//! Several threads of a peer may make such calls at a time, each by a *place* of its own, which has a word of the gate and of the segment.
//!
//! Closing takes the page away, so later calls fail before they copy anything. Some calls have the page already (the kernel holds it while
//! it copies). The contents of the page tell about those. They are final once the file of the page can be sealed against writing, which
//! the kernel permits when no mapping and no call holds the page. Then the gate names the last entry of each place that passed it: if that is
//! the entry to wait for, its call is over when [`crate::Segment::left`] holds the entry too.

#![allow(
    unsafe_code,
    reason = "the page is taken away from calls that the compiler does not see"
)]

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rdmux_memory::mapping::Mapping;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{Errno, pread};

use crate::segment::PLACES;

/// Distance between the words of two places in a gate.
pub(crate) const PLACE_BYTES: u64 = 64;

const _: () = assert!(PLACE_BYTES * PLACES as u64 <= 4096);

/// A page that each call of one peer writes first.
#[derive(Debug)]
pub(crate) struct Gate {
    /// A closed gate keeps its addresses, so that nothing else is mapped where a late call writes.
    page: Mapping,
    file: OwnedFd,
    closed: AtomicBool,
    sealed: AtomicBool,
}

impl Gate {
    pub(crate) fn new() -> Result<Gate, Errno> {
        let file = memfd_create("rdmux-gate", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let bytes = rustix::param::page_size();
        ftruncate(&file, bytes as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        let errno_of = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
        let page = Mapping::of_sealed_file(&file, 0, bytes, true).map_err(errno_of)?;
        // A child's mapping would keep the file from being sealed.
        page.keep_from_children().map_err(errno_of)?;
        Ok(Gate {
            page,
            file,
            closed: AtomicBool::new(false),
            sealed: AtomicBool::new(false),
        })
    }

    pub(crate) fn address(&self) -> u64 {
        self.page.address()
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Closes the gate: no further call passes it. Calls that have passed it may go on.
    pub(crate) fn close(&self) {
        // If the system refuses, somebody calls this again; `last_through` returns `None` until then.
        // SAFETY: only calls of peers access the page; this process reads its file.
        if !self.is_closed() && unsafe { self.page.take_away() }.is_ok() {
            self.closed.store(true, Ordering::Release);
        }
    }

    /// Returns the last entry of a place that passed a closed gate, 0 if none did; `None` while that may still change.
    pub(crate) fn last_through(&self, place: u32) -> Option<u32> {
        if !self.is_closed() {
            return None;
        }
        if !self.sealed.load(Ordering::Acquire) {
            fcntl_add_seals(&self.file, SealFlags::WRITE).ok()?;
            self.sealed.store(true, Ordering::Release);
        }
        let mut entry = [0; 4];
        match pread(&self.file, &mut entry, u64::from(place) * PLACE_BYTES) {
            Ok(4) => Some(u32::from_ne_bytes(entry)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use rdmux_memory::mapping::{Order, Passage, allows_calls_into_processes};
    use rdmux_rnic::Fault;

    use super::*;
    use crate::skip::skip;

    /// Writes by a call into this process.
    fn write(at: u64, bytes: &[u8], gate: &Gate, words: &Mapping, entry: u32) -> Result<(), Fault> {
        let passage = Passage {
            gate: gate.address(),
            left: words.address(),
            entry,
        };
        let pid = std::process::id().cast_signed();
        // SAFETY: the tests' own mappings, into which there are no references but to atomic words.
        unsafe { Mapping::write_process(pid, at, bytes, Order::LastWordLast, Some(passage)) }
    }

    /// Returns a region of this process, and the mapping with the word for the end of calls.
    fn region() -> (Mapping, Mapping) {
        (
            Mapping::anonymous(8192).unwrap(),
            Mapping::anonymous(4096).unwrap(),
        )
    }

    #[test]
    fn close__keeps_late_calls_out() {
        if !allows_calls_into_processes() {
            return skip("calls into processes are refused");
        }
        let gate = Gate::new().unwrap();
        let (memory, words) = region();
        let write = |entry, bytes: &[u8]| write(memory.address() + 5, bytes, &gate, &words, entry);
        let seen = || {
            let mut bytes = [0; 5000];
            memory.read(5, &mut bytes).unwrap();
            bytes
        };
        write(7, &[1; 5000]).unwrap();
        assert!(seen() == [1; 5000]);
        assert_eq!(words.word(0).load(Ordering::Acquire), 7);
        assert_eq!(gate.last_through(0), None, "it is open");
        gate.close();
        assert_eq!(gate.last_through(0), Some(7));
        for bytes in [1, 8, 9, 5000] {
            assert_eq!(write(9, &vec![2; bytes]), Err(Fault::Unmapped));
        }
        assert!(seen() == [1; 5000]);
        assert_eq!(words.word(0).load(Ordering::Acquire), 7);
        assert_eq!(gate.last_through(0), Some(7));
    }

    #[test]
    fn last_through__of_a_gate_that_nothing_went_through() {
        let gate = Gate::new().unwrap();
        gate.close();
        assert_eq!(gate.last_through(0), Some(0));
    }

    /// A call that fails behind the gate has passed it, and does not signal its end.
    #[test]
    fn last_through__of_a_call_that_fails() {
        if !allows_calls_into_processes() {
            return skip("calls into processes are refused");
        }
        let gate = Gate::new().unwrap();
        let (memory, words) = region();
        // SAFETY: only the call below accesses it.
        unsafe { memory.take_away() }.unwrap();
        let written = write(memory.address(), &[1; 100], &gate, &words, 3);
        assert_eq!(written, Err(Fault::Unmapped));
        gate.close();
        assert_eq!(gate.last_through(0), Some(3));
        assert_eq!(words.word(0).load(Ordering::Acquire), 0);
    }

    /// A forked child holds no mapping of the file, which would keep the file from being sealed.
    #[test]
    fn new__is_not_copied_to_children() {
        let gate = Gate::new().unwrap();
        let begin = format!("{:x}-", gate.address());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&begin));
        let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
    }
}
