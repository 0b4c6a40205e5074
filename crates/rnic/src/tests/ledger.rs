//! Tests of the ledger of an RNIC's memory.

use std::sync::Arc;

use super::util::*;
use crate::ledger::{Booked, Class, Ledger, Link, Location};
use crate::*;

/// Memory that says that it is in a drive.
#[derive(Debug)]
struct InDrive(HeapMemory);

impl Memory for InDrive {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.0.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.0.write(offset, bytes)
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::NotSupported)
    }

    fn location(&self) -> Location {
        Location::Drive
    }

    fn placement(&self) -> Placement {
        self.0.placement()
    }

    fn flush_is_immediate(&self, placement: Placement) -> bool {
        self.0.flush_is_immediate(placement)
    }

    fn flush(&self, offset: u64, length: u64, placement: Placement) -> Result<(), Fault> {
        self.0.flush(offset, length, placement)
    }
}

/// Returns a ledger, and the key of a region of the second side over memory whose accesses it books.
fn booked(pair: &mut Pair, memory: Arc<dyn Memory>) -> (Arc<Ledger>, RKey) {
    let ledger = Arc::new(Ledger::default());
    let length = memory.len();
    let spec = RegionSpec {
        memory: Booked::wrap(memory, Some(&ledger), Class::Data),
        memory_offset: 0,
        length,
        iova: IOVA,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
    };
    let side = &mut pair.sides[1];
    let (_, rkey) = side.rnic.reg_mr(side.pd, spec).unwrap();
    (ledger, rkey)
}

/// Writes 10,000 bytes and reads 6,000.
fn write_and_read(pair: &mut Pair, rkey: RKey) {
    let (va, imm) = (IOVA, None);
    let sges = pair.sides[0].sge(0, 10_000);
    pair.post(0, Operation::Write { va, rkey, imm }, sges);
    let sges = pair.sides[0].sge(0, 6_000);
    pair.post(0, Operation::Read { va, rkey }, sges);
    pair.run();
}

#[test]
fn ledger__has_what_an_rnic_moves_in_dram() {
    let mut pair = Pair::new();
    let (ledger, rkey) = booked(&mut pair, Arc::new(HeapMemory::new(MEMORY)));
    write_and_read(&mut pair, rkey);
    let entries = ledger.entries();
    for link in [Link::Wire, Link::NicRoot, Link::RootDram] {
        assert_eq!(entries.get(link, Class::Data), 16_000, "{link:?}");
    }
    assert_eq!(entries.of_link(Link::NicDrive), 0);
    // All that the wire has carried is there, too: a little more than the data.
    let counters = pair.sides[1].rnic.counters();
    let counted = counters.sent_bytes + counters.rcvd_bytes;
    let entries = entries.on_wire(counted);
    assert_eq!(entries.of_link(Link::Wire), counted);
    assert!(
        (1..1000).contains(&entries.get(Link::Wire, Class::Command)),
        "{entries:?}"
    );
}

#[test]
fn ledger__has_what_an_rnic_moves_in_a_drive() {
    let mut pair = Pair::new();
    let (ledger, rkey) = booked(&mut pair, Arc::new(InDrive(HeapMemory::new(MEMORY))));
    write_and_read(&mut pair, rkey);
    let entries = ledger.entries();
    assert_eq!(entries.get(Link::NicDrive, Class::Data), 16_000);
    assert_eq!(entries.get(Link::Wire, Class::Data), 16_000);
    assert_eq!(
        entries.of_link(Link::NicRoot) + entries.of_link(Link::RootDram),
        0
    );
}

/// Requests without a right move nothing in the memory.
#[test]
fn ledger__has_nothing_of_what_is_refused() {
    let mut pair = Pair::new();
    let (ledger, rkey) = booked(&mut pair, Arc::new(HeapMemory::new(MEMORY)));
    let va = IOVA + MEMORY as u64 - 10;
    let sges = pair.sides[0].sge(0, 20);
    pair.post(0, Operation::Read { va, rkey }, sges);
    pair.run();
    assert_eq!(ledger.entries(), Ledger::default().entries());
}

#[test]
fn booked__without_a_ledger_is_the_memory_itself() {
    let memory: Arc<dyn Memory> = Arc::new(HeapMemory::new(64));
    let same = Booked::wrap(memory.clone(), None, Class::Data);
    assert!(Arc::ptr_eq(&memory, &same));
}
