//! A pair of a submission and a completion queue.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Instant;

use rdmux_verbs::Fault;
use rdmux_verbs::ledger::{Class, Ledger, Location, Route, book};
use rdmux_wire::nvme::{CQE_LEN, Cid, Cqe, Register, SQE_LEN, Sqe};

use crate::Function;
use crate::memory::{Buffer, PAGE};

/// Most entries of a queue: commands of a page, so that a queue is contiguous wherever the page is.
pub(crate) const ENTRIES_MAX: u16 = (PAGE / SQE_LEN) as u16;
/// Ids of commands in a slot, one after the other: a drive that completes a command twice does not complete the next one of its slot.
const GENERATIONS: u16 = u16::MAX / ENTRIES_MAX;

/// Id of the submission queue in a completion. NVMe Base 2.0, 3.3.3.2.
const SQ_ID: Range<usize> = 10..12;
/// Bytes of a doorbell.
const DOORBELL_LEN: usize = 4;

/// A command that the drive has.
#[derive(Debug)]
pub(crate) struct Outstanding<T> {
    pub(crate) token: T,
    pub(crate) data: Vec<Buffer>,
    pub(crate) deadline: Instant,
    /// An Abort names it.
    pub(crate) is_aborted: bool,
    cid: Cid,
}

impl<T> Outstanding<T> {
    pub(crate) fn cid(&self) -> Cid {
        self.cid
    }
}

/// A pair of queues, and the commands that the drive has by it.
///
/// The drive's word about its head is not needed: a command that is completed was fetched, and fewer are outstanding than the queue has entries.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    qid: u16,
    entries: u16,
    pub(crate) submission: Buffer,
    pub(crate) completion: Buffer,
    tail_doorbell: Register,
    head_doorbell: Register,
    tail: u16,
    head: u16,
    phase: bool,
    generation: u16,
    slots: Vec<Option<Outstanding<T>>>,
    ledger: Option<Arc<Ledger>>,
}

impl<T> Queue<T> {
    /// Makes one; each buffer has a page.
    pub(crate) fn new(
        qid: u16,
        entries: u16,
        stride: u32,
        submission: Buffer,
        completion: Buffer,
        ledger: Option<Arc<Ledger>>,
    ) -> Queue<T> {
        assert!(
            (2..=ENTRIES_MAX).contains(&entries),
            "{entries} entries of a queue"
        );
        Queue {
            qid,
            entries,
            submission,
            completion,
            tail_doorbell: Register::tail_doorbell(qid, stride),
            head_doorbell: Register::head_doorbell(qid, stride),
            tail: 0,
            head: 0,
            phase: true,
            generation: 0,
            slots: (1..entries).map(|_| None).collect(),
            ledger,
        }
    }

    pub(crate) fn entries(&self) -> u16 {
        self.entries
    }

    /// Returns a slot that is free.
    pub(crate) fn free_slot(&self) -> Option<usize> {
        self.slots.iter().position(Option::is_none)
    }

    pub(crate) fn outstanding(&self) -> impl Iterator<Item = &Outstanding<T>> {
        self.slots.iter().flatten()
    }

    pub(crate) fn outstanding_mut(&mut self) -> impl Iterator<Item = &mut Outstanding<T>> {
        self.slots.iter_mut().flatten()
    }

    /// Returns the id that the next command of a slot has.
    pub(crate) fn next_cid(&self, slot: usize) -> Cid {
        Cid(self.generation * ENTRIES_MAX + slot as u16)
    }

    /// Gives the drive a command in a free slot, whose id is [`Queue::next_cid`].
    ///
    /// # Errors
    /// The memory of the queue has gone; the drive has not got it.
    pub(crate) fn submit(
        &mut self,
        function: &dyn Function,
        slot: usize,
        sqe: &Sqe,
        (token, data, deadline): (T, Vec<Buffer>, Instant),
    ) -> Result<(), (Fault, Vec<Buffer>)> {
        let at = usize::from(self.tail) * SQE_LEN;
        if let Err(fault) = self.submission.write(at, sqe.as_bytes()) {
            return Err((fault, data));
        }
        self.slots[slot] = Some(Outstanding {
            token,
            data,
            deadline,
            is_aborted: false,
            cid: sqe.cid(),
        });
        self.generation = (self.generation + 1) % GENERATIONS;
        self.tail = (self.tail + 1) % self.entries;
        function.write_u32(self.tail_doorbell.0, self.tail.into());
        // Either the drive fetches it, or the processor has written it into the drive.
        let route = match self.submission.kind().location() {
            Location::Dram => Route::Drive(Location::Dram),
            Location::Drive => Route::Processor,
        };
        self.book(route, Class::Command, SQE_LEN);
        self.book(Route::Processor, Class::Doorbell, DOORBELL_LEN);
        Ok(())
    }

    /// Takes what the drive has completed. A completion of a command that it does not have is skipped.
    pub(crate) fn complete(&mut self, function: &dyn Function) -> Result<Vec<(Outstanding<T>, Cqe)>, Fault> {
        let mut completed = Vec::new();
        let mut taken = 0;
        while taken < self.entries {
            let at = usize::from(self.head) * CQE_LEN;
            let mut bytes = [0; CQE_LEN];
            // The half with the phase is looked at first: the other one is there if it is.
            self.completion.read(at + 8, &mut bytes[8..])?;
            if (bytes[14] & 1 != 0) != self.phase && !mutant!(PhaseIgnored) {
                break;
            }
            fence(Ordering::Acquire);
            self.completion.read(at, &mut bytes[..8])?;
            taken += 1;
            self.head += 1;
            if self.head == self.entries {
                self.head = 0;
                self.phase = !self.phase;
            }
            let Ok(cqe) = Cqe::parse(&bytes) else { continue };
            // Each completion queue has one submission queue.
            if bytes[SQ_ID] != self.qid.to_le_bytes() {
                continue;
            }
            let slot = self.slots.get_mut(usize::from(cqe.cid.0 % ENTRIES_MAX));
            let Some(slot) = slot else { continue };
            if let Some(command) =
                slot.take_if(|command| command.cid == cqe.cid || mutant!(GenerationIgnored))
            {
                completed.push((command, cqe));
            }
        }
        if taken > 0 {
            if !mutant!(HeadNotTold) {
                function.write_u32(self.head_doorbell.0, self.head.into());
            }
            let route = Route::Drive(self.completion.kind().location());
            self.book(route, Class::Completion, usize::from(taken) * CQE_LEN);
            self.book(Route::Processor, Class::Doorbell, DOORBELL_LEN);
        }
        Ok(completed)
    }

    fn book(&self, route: Route, class: Class, bytes: usize) {
        let times = if mutant!(DoorbellBookedTwice) && class == Class::Doorbell {
            2
        } else {
            1
        };
        book(self.ledger.as_ref(), route, class, times * bytes as u64);
    }

    /// Begins anew, for a drive that was reset.
    pub(crate) fn reset(&mut self) -> Result<(), Fault> {
        (self.tail, self.head, self.phase) = (0, 0, true);
        self.completion.write(0, &[0; PAGE])
    }

    /// Takes all commands back.
    pub(crate) fn take_all(&mut self) -> Vec<Outstanding<T>> {
        self.slots.iter_mut().filter_map(Option::take).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::time::Duration;

    use rdmux_memory::AnonymousMemory;
    use rdmux_wire::nvme::{NsId, Opcode, Status};

    use super::*;
    use crate::memory::Pool;
    use crate::{Bar, DmaMemory};

    /// A function without a drive.
    #[derive(Debug)]
    struct NoDrive;

    impl Function for NoDrive {
        fn address(&self) -> &str {
            "0000:00:04.0"
        }
        fn register_bytes(&self) -> u64 {
            0
        }
        fn read_u32(&self, _: u32) -> u32 {
            0
        }
        fn read_u64(&self, _: u32) -> u64 {
            0
        }
        fn write_u32(&self, _: u32, _: u32) {}
        fn write_u64(&self, _: u32, _: u64) {}
        fn bar(&self, _: u8) -> io::Result<Bar> {
            Err(io::ErrorKind::NotFound.into())
        }
        fn dma(&self, bytes: usize) -> io::Result<DmaMemory> {
            Ok(DmaMemory {
                memory: Arc::new(AnonymousMemory::new(bytes)?),
                pages: (1..=bytes / PAGE).map(|page| (page * PAGE) as u64).collect(),
            })
        }
    }

    #[test]
    fn complete__takes_only_what_is_of_its_submission_queue() {
        let pool = Pool::dram(&NoDrive, 2 * PAGE).unwrap();
        let page = || pool.allocate(PAGE).unwrap();
        let mut queue = Queue::new(3, 4, 4, page(), page(), None);
        let slot = queue.free_slot().unwrap();
        let cid = queue.next_cid(slot);
        let sqe = Sqe::in_memory(Opcode::FLUSH, cid, NsId(1), [0; 2]);
        let deadline = Instant::now() + Duration::from_secs(1);
        queue
            .submit(&NoDrive, slot, &sqe, ((), Vec::new(), deadline))
            .unwrap();
        for (at, sq_id) in [(0, 0u16), (1, 2), (2, 3)] {
            let mut bytes = [0; CQE_LEN];
            let cqe = Cqe {
                result: 0,
                sq_head: 1,
                cid,
                status: Status::SUCCESS,
            };
            cqe.emit(&mut bytes);
            bytes[SQ_ID].copy_from_slice(&sq_id.to_le_bytes());
            // The phase of the first round.
            bytes[14] |= 1;
            queue.completion.write(at * CQE_LEN, &bytes).unwrap();
            let completed = queue.complete(&NoDrive).unwrap();
            assert_eq!(completed.len(), usize::from(sq_id == 3), "{sq_id}");
        }
    }
}
