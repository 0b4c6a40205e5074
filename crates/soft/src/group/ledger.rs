//! Connections of each process, recorded where the records outlive the process.
//!
//! A file in memory that every process of the group holds, as it holds all sockets. So the file lasts as long as one of them lives. Each
//! slot has a region, written only by its process. If no process has a slot and the slot's region has records, its process ended without
//! ending its connections: the holder ends them in its place.
//!
//! ```text
//! region   0  records that may be in use (4 bytes, the host's order) | zero
//!         32  records, 32 bytes each
//! record   0  peer's address, IPv4 mapped | 16 communication id | 20 QPN | 24 peer's communication id
//!         28  1 << 24 | peer's QPN; 0: not in use
//! ```
//!
//! All accesses are reads and writes of the file, not of a mapping, so that no process can take the file away under another.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rdmux_rnic::Qpn;
use rdmux_rnic::cm::{CmId, Peering};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

use super::SLOTS;

/// Most connections of one process that are recorded; beyond that, peers find out by retries.
const RECORDS_MAX: u32 = 8_192;
const RECORD_BYTES: u64 = 32;
const REGION_BYTES: u64 = (RECORDS_MAX as u64 + 1) * RECORD_BYTES;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
const IN_USE: u32 = 1 << 24;

/// The file.
#[derive(Debug)]
pub(super) struct Ledger(File);

impl Ledger {
    pub(super) fn create() -> io::Result<Ledger> {
        let fd = memfd_create(
            "rdmux-connections",
            MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
        )?;
        let file = File::from(fd);
        file.set_len(SLOTS as u64 * REGION_BYTES)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(Ledger(file))
    }

    /// Opens the file of an existing group; `None` if it is not such a file.
    pub(super) fn from_fd(fd: OwnedFd) -> Option<Ledger> {
        let file = File::from(fd);
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        let len = file.metadata().ok()?.len();
        (sealed && len == SLOTS as u64 * REGION_BYTES).then_some(Ledger(file))
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Returns whether a slot has records.
    pub(super) fn is_dirty(&self, slot: u8) -> bool {
        self.used(slot) > 0
    }

    fn used(&self, slot: u8) -> u32 {
        let mut used = [0; 4];
        match self.0.read_exact_at(&mut used, region(slot)) {
            Ok(()) => u32::from_ne_bytes(used).min(RECORDS_MAX),
            Err(_) => 0,
        }
    }

    /// Returns the records of a slot.
    pub(super) fn read(&self, slot: u8) -> Vec<Peering> {
        let mut bytes = vec![0; self.used(slot) as usize * RECORD_BYTES as usize];
        if self
            .0
            .read_exact_at(&mut bytes, region(slot) + RECORD_BYTES)
            .is_err()
        {
            return Vec::new();
        }
        let (records, _) = bytes.as_chunks();
        let of_slot = |p: &Peering| p.id.0 >> 24 == u32::from(slot);
        records.iter().filter_map(decode).filter(of_slot).collect()
    }

    /// Clears the region of a slot whose process has gone.
    pub(super) fn clear(&self, slot: u8) {
        let zeros = vec![0; (self.used(slot) as usize + 1) * RECORD_BYTES as usize];
        // Cannot fail: the file has its full size and stays in memory.
        let _ = self.0.write_all_at(&zeros, region(slot));
    }
}

fn region(slot: u8) -> u64 {
    u64::from(slot) * REGION_BYTES
}

fn encode(p: &Peering) -> [u8; RECORD_BYTES as usize] {
    let address = match p.peer {
        IpAddr::V4(a) => a.to_ipv6_mapped(),
        IpAddr::V6(a) => a,
    };
    let mut record = [0; RECORD_BYTES as usize];
    record[..16].copy_from_slice(&address.octets());
    let numbers = [
        p.id.0,
        p.local_qpn.value(),
        p.remote_id,
        IN_USE | p.remote_qpn.value(),
    ];
    for (field, number) in record[16..].chunks_exact_mut(4).zip(numbers) {
        field.copy_from_slice(&number.to_ne_bytes());
    }
    record
}

fn decode(record: &[u8; RECORD_BYTES as usize]) -> Option<Peering> {
    let (address, numbers) = record.split_first_chunk::<16>()?;
    let (numbers, _) = numbers.as_chunks();
    let [id, local_qpn, remote_id, last] = [0, 1, 2, 3].map(|i: usize| u32::from_ne_bytes(numbers[i]));
    (last & IN_USE != 0).then(|| Peering {
        id: CmId(id),
        local_qpn: Qpn::new(local_qpn),
        peer: Ipv6Addr::from(*address).to_canonical(),
        remote_id,
        remote_qpn: Qpn::new(last),
    })
}

/// Region of this process.
#[derive(Debug)]
pub(crate) struct OwnRecords {
    ledger: Arc<Ledger>,
    slot: u8,
    places: Mutex<Places>,
    abandoned: AtomicBool,
}

/// The records in use.
#[derive(Debug, Default)]
struct Places {
    free: Vec<u32>,
    /// Number of records used since the region was last empty.
    used: u32,
}

impl OwnRecords {
    /// Clears and takes the region of a slot that this process has just got.
    pub(super) fn new(ledger: Arc<Ledger>, slot: u8) -> OwnRecords {
        ledger.clear(slot);
        OwnRecords {
            ledger,
            slot,
            places: Mutex::default(),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Gives up the slot of this process: its records stay as they are.
    pub(super) fn abandon(&self) {
        let _places = self.places();
        self.abandoned.store(true, Relaxed);
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock()
    }

    fn write_used(&self, used: u32) {
        let _ = self.ledger.0.write_all_at(&used.to_ne_bytes(), region(self.slot));
    }

    fn write(&self, index: u32, record: &[u8; RECORD_BYTES as usize]) {
        let at = region(self.slot) + u64::from(index + 1) * RECORD_BYTES;
        let _ = self.ledger.0.write_all_at(record, at);
    }

    /// Records a connection for as long as the result lives; `None` if there is no room.
    pub(crate) fn record(self: &Arc<Self>, peering: &Peering) -> Option<LedgerRecord> {
        let mut places = self.places();
        if self.abandoned.load(Relaxed) {
            return None;
        }
        let index = match places.free.pop() {
            Some(index) => index,
            None if places.used < RECORDS_MAX => {
                places.used += 1;
                places.used - 1
            }
            None => return None,
        };
        self.write(index, &encode(peering));
        self.write_used(places.used);
        drop(places);
        Some(LedgerRecord {
            records: self.clone(),
            index,
        })
    }
}

/// Record of a connection.
#[derive(Debug)]
pub(crate) struct LedgerRecord {
    records: Arc<OwnRecords>,
    index: u32,
}

impl Drop for LedgerRecord {
    fn drop(&mut self) {
        let mut places = self.records.places();
        if self.records.abandoned.load(Relaxed) {
            return;
        }
        self.records.write(self.index, &[0; RECORD_BYTES as usize]);
        places.free.push(self.index);
        if places.free.len() == places.used as usize {
            *places = Places::default();
            self.records.write_used(0);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case, reason = "names of tests are function__case")]

    use super::*;

    fn peering(slot: u8, n: u32) -> Peering {
        let peer: IpAddr = if n.is_multiple_of(2) {
            [10, 0, 0, 1].into()
        } else {
            Ipv6Addr::LOCALHOST.into()
        };
        Peering {
            id: CmId(u32::from(slot) << 24 | n),
            local_qpn: Qpn::new(u32::from(slot) << 16 | n),
            peer,
            remote_id: n + 7,
            remote_qpn: Qpn::new(n + 9),
        }
    }

    #[test]
    fn record__stays_until_it_is_dropped() {
        let ledger = Arc::new(Ledger::create().unwrap());
        let own = Arc::new(OwnRecords::new(ledger.clone(), 3));
        let mut records: Vec<LedgerRecord> = (0..5).filter_map(|n| own.record(&peering(3, n))).collect();
        let seen = Ledger::from_fd(ledger.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(seen.read(3), [0, 1, 2, 3, 4].map(|n| peering(3, n)));
        assert!(seen.is_dirty(3) && !seen.is_dirty(2) && !seen.is_dirty(4));
        records.remove(1);
        records.remove(2);
        assert_eq!(seen.read(3), [0, 2, 4].map(|n| peering(3, n)));
        records.extend(own.record(&peering(3, 9)));
        assert_eq!(seen.read(3).len(), 4);
        drop(records);
        assert!(!seen.is_dirty(3) && seen.read(3).is_empty());
        let _again = own.record(&peering(3, 1));
        assert_eq!(seen.read(3), [peering(3, 1)]);
    }

    #[test]
    fn record__no_more_than_there_is_room_for() {
        let ledger = Arc::new(Ledger::create().unwrap());
        let (own, next) = (
            Arc::new(OwnRecords::new(ledger.clone(), 1)),
            Arc::new(OwnRecords::new(ledger.clone(), 2)),
        );
        let _others = next.record(&peering(2, 1));
        let records: Vec<LedgerRecord> = (0..RECORDS_MAX)
            .filter_map(|n| own.record(&peering(1, n)))
            .collect();
        assert_eq!(records.len(), RECORDS_MAX as usize);
        assert!(own.record(&peering(1, 1)).is_none());
        assert_eq!(ledger.read(1).len(), RECORDS_MAX as usize);
        assert_eq!(ledger.read(2), [peering(2, 1)]);
        ledger.clear(1);
        assert!(ledger.read(1).is_empty());
        assert_eq!(ledger.read(2), [peering(2, 1)]);
    }

    #[test]
    fn from_fd__refuses_what_could_shrink_or_is_shorter() {
        let open = memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(Ledger::from_fd(open.try_clone().unwrap()).is_none());
        File::from(open.try_clone().unwrap())
            .set_len(SLOTS as u64 * REGION_BYTES)
            .unwrap();
        assert!(Ledger::from_fd(open).is_none());
        let short = memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        fcntl_add_seals(&short, SEALS).unwrap();
        assert!(Ledger::from_fd(short).is_none());
    }
}
