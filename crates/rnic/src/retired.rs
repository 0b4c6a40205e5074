//! Memories that the device no longer uses.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::memory::Memory;
use crate::sync::Mutex;
use crate::work::Operation;

/// Handles of memories that work requests, packets or errors ended. Dropping the last handle of a memory unmaps or closes it, or
/// runs its owner's code, which may call the device. So the engine drops none of them itself, but keeps them for its caller.
#[derive(Clone, Debug, Default)]
pub(crate) struct RetiredMemories(Arc<Retired>);

#[derive(Debug, Default)]
struct Retired {
    memories: Mutex<Vec<Arc<dyn Memory>>>,
    /// Set when `memories` may hold some: the driver asks after every call of the device.
    any: AtomicBool,
}

impl RetiredMemories {
    pub(crate) fn retire(&self, memory: Arc<dyn Memory>) {
        let mut memories = self.0.memories.lock();
        memories.push(memory);
        self.0.any.store(true, Ordering::Relaxed);
    }

    /// Returns whether there may be some.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.0.any.load(Ordering::Relaxed)
    }

    pub(crate) fn take(&self) -> Vec<Arc<dyn Memory>> {
        if !self.any() {
            return Vec::new();
        }
        let mut memories = self.0.memories.lock();
        self.0.any.store(false, Ordering::Relaxed);
        std::mem::take(&mut memories)
    }

    /// Returns a guard that keeps the memory of a registration alive beyond the request, however the request ends.
    pub(crate) fn hold(&self, operation: &Operation) -> Option<Box<Held>> {
        match operation {
            Operation::Register(registration) => Some(Box::new(Held {
                memory: registration.spec.memory.clone(),
                retired: self.clone(),
            })),
            _ => None,
        }
    }
}

/// A memory that is retired when this guard is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    memory: Arc<dyn Memory>,
    retired: RetiredMemories,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.retired.retire(self.memory.clone());
    }
}
