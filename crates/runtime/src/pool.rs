//! Registered memory that is used again.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::ledger::{Class, Ledger};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{Access, MemoryRegion, ProtectionDomain, RKey, RegisterError, Sge};

/// The least size of a buffer of the pool.
const BYTES_MIN: usize = 4096;

/// Buffers of registered memory for requests of this side, by size: powers of two. Making one takes system calls and a registration,
/// so one that is no longer used waits here for the next request of its size.
#[derive(Clone, Debug)]
pub struct BufferPool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    idle: Mutex<Idle>,
    idle_bytes_max: usize,
    pd: ProtectionDomain,
}

#[derive(Debug, Default)]
struct Idle {
    buffers: BTreeMap<usize, Vec<Arc<Registered>>>,
    bytes: usize,
}

// The fields are in the order in which they must be dropped.
#[derive(Debug)]
struct Registered {
    mr: MemoryRegion,
    memory: Arc<AnonymousMemory>,
}

/// Why there is no buffer.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// The memory could not be allocated.
    #[error(transparent)]
    Allocate(#[from] std::io::Error),
    /// The memory could not be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
}

/// A buffer. It must live until the requests that use it are done.
#[derive(Debug)]
pub struct Buffer {
    registered: Arc<Registered>,
    /// The pool and the size under which it keeps this; `None`: it belongs to no pool.
    home: Option<(BufferPool, usize)>,
}

impl Registered {
    fn new(
        pd: &ProtectionDomain,
        bytes: usize,
        access: Access,
        ledger: Option<&Arc<Ledger>>,
    ) -> Result<Arc<Registered>, BufferError> {
        let memory = Arc::new(AnonymousMemory::new(bytes)?);
        let booked = pd.device().booked(memory.clone(), ledger, Class::Data);
        let mr = pd.reg_mr_all(booked, 0, access)?;
        Ok(Arc::new(Registered { mr, memory }))
    }
}

impl BufferPool {
    /// Makes an empty pool of a protection domain. Of the buffers that are not used it keeps up to `idle_bytes_max` bytes.
    pub fn new(pd: &ProtectionDomain, idle_bytes_max: usize) -> BufferPool {
        BufferPool(Arc::new(Shared {
            idle: Mutex::default(),
            idle_bytes_max,
            pd: pd.clone(),
        }))
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.0.idle.lock()
    }

    /// Returns a buffer of at least so many bytes, which have any values. It comes back when it is dropped, unless the pool keeps none of
    /// that size.
    pub fn take(&self, bytes: usize) -> Result<Buffer, BufferError> {
        let size = bytes.max(BYTES_MIN).checked_next_power_of_two().unwrap_or(bytes);
        if size > self.0.idle_bytes_max {
            return Buffer::new(&self.0.pd, bytes);
        }
        let mut idle = self.idle();
        let known = idle.buffers.get_mut(&size).and_then(Vec::pop);
        if known.is_some() {
            idle.bytes -= size;
        }
        drop(idle);
        let registered = match known {
            Some(registered) => registered,
            None => Registered::new(&self.0.pd, size, Access::LOCAL_WRITE, None)?,
        };
        let home = Some((self.clone(), size));
        Ok(Buffer { registered, home })
    }
}

impl Buffer {
    /// Makes a buffer of exactly so many bytes, all zero, that belongs to no pool.
    pub fn new(pd: &ProtectionDomain, bytes: usize) -> Result<Buffer, BufferError> {
        Buffer::with_access(pd, bytes, Access::LOCAL_WRITE, None)
    }

    /// Makes such a buffer with these rights, which may be those of peers ([`Buffer::rkey`]). What the device moves is booked in the ledger, if there
    /// is one, as data.
    pub fn with_access(
        pd: &ProtectionDomain,
        bytes: usize,
        access: Access,
        ledger: Option<&Arc<Ledger>>,
    ) -> Result<Buffer, BufferError> {
        let registered = Registered::new(pd, bytes, access, ledger)?;
        let home = None;
        Ok(Buffer { registered, home })
    }

    /// Returns the memory.
    pub fn memory(&self) -> &AnonymousMemory {
        &self.registered.memory
    }

    /// Returns the key by which peers reach it, if it was made with rights for them: from address 0 on.
    pub fn rkey(&self) -> RKey {
        self.registered.mr.rkey()
    }

    /// Returns a piece of it, for a request.
    pub fn sge(&self, at: u64, length: u32) -> Sge {
        self.registered.mr.sge(at, length)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some((pool, size)) = &self.home else {
            return;
        };
        let mut idle = pool.idle();
        if idle.bytes + size <= pool.0.idle_bytes_max {
            idle.bytes += size;
            let same = idle.buffers.entry(*size).or_default();
            same.push(self.registered.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use rdmux_verbs::{Device, Memory};

    use super::*;

    fn pool(address: &str, idle_bytes_max: usize) -> (Device, BufferPool) {
        rdmux_soft::register();
        let device = Device::open(address.parse().unwrap()).unwrap();
        let pool = BufferPool::new(&device.alloc_pd().unwrap(), idle_bytes_max);
        (device, pool)
    }

    fn regions(device: &Device) -> usize {
        device.object_counts().1
    }

    #[test]
    fn take__a_buffer_that_came_back_is_used_again() {
        let (device, pool) = pool("127.0.12.21", 1 << 20);
        let first = pool.take(5000).unwrap();
        let address = first.memory().address();
        drop(first);
        let [again, other] = [pool.take(8192).unwrap(), pool.take(4097).unwrap()];
        assert_eq!(again.memory().address(), address);
        assert_ne!(other.memory().address(), address, "it is in use");
        assert_eq!(regions(&device), 2);
        let larger = pool.take(8193).unwrap();
        assert_eq!(regions(&device), 3);
        drop((again, other, larger));
        drop(pool);
        assert_eq!(regions(&device), 0);
    }

    #[test]
    fn drop__the_pool_keeps_no_more_than_allowed() {
        let (device, pool) = pool("127.0.12.22", 3 * 4096);
        let buffers: Vec<_> = (0..10).map(|_| pool.take(1).unwrap()).collect();
        assert_eq!(regions(&device), 10);
        drop(buffers);
        assert_eq!(regions(&device), 3);
        drop(pool.take(3 * 4096).unwrap());
        assert_eq!(regions(&device), 3, "16 KiB would be too much");
        let large = pool.take(5 * 4096).unwrap();
        assert_eq!(large.memory().len(), 5 * 4096, "it is not rounded up for others");
        drop(large);
        assert_eq!(regions(&device), 3);
        let buffers: Vec<_> = (0..3).map(|_| pool.take(1).unwrap()).collect();
        assert_eq!(regions(&device), 3);
        drop(buffers);
        assert_eq!(regions(&device), 3);
    }

    #[test]
    fn drop__a_buffer_may_outlive_its_pool() {
        let (device, pool) = pool("127.0.12.23", 1 << 20);
        let buffer = pool.take(1).unwrap();
        drop(pool);
        assert_eq!(regions(&device), 1);
        drop(buffer);
        assert_eq!(regions(&device), 0);
    }

    #[test]
    fn take__more_than_there_is() {
        let (device, pool) = pool("127.0.12.24", 1 << 20);
        assert!(matches!(pool.take(1 << 62), Err(BufferError::Allocate(_))));
        assert_eq!(regions(&device), 0);
    }
}
