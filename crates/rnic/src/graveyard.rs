//! Memories that the device is done with.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::memory::Memory;
use crate::work::Operation;

/// Handles of memories that work requests, packets or errors ended. Dropping the last handle unmaps, closes, or runs its owner's
/// code, which may ask the device: so the engine drops none of them itself, but keeps them for its caller.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graveyard(Arc<Graves>);

#[derive(Debug, Default)]
struct Graves {
    memories: Mutex<Vec<Arc<dyn Memory>>>,
    /// There may be some: it is asked after every call of the device.
    any: AtomicBool,
}

impl Graveyard {
    pub(crate) fn bury(&self, memory: Arc<dyn Memory>) {
        let mut memories = self.0.memories.lock().unwrap_or_else(PoisonError::into_inner);
        memories.push(memory);
        self.0.any.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn take(&self) -> Vec<Arc<dyn Memory>> {
        if !self.0.any.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut memories = self.0.memories.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.any.store(false, Ordering::Relaxed);
        std::mem::take(&mut memories)
    }

    /// Keeps the memory that a request holds past the request itself, however that ends.
    pub(crate) fn hold(&self, operation: &Operation) -> Option<Box<Held>> {
        match operation {
            Operation::Register(registration) => Some(Box::new(Held {
                memory: registration.spec.memory.clone(),
                graveyard: self.clone(),
            })),
            _ => None,
        }
    }
}

/// A memory that is buried when this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    memory: Arc<dyn Memory>,
    graveyard: Graveyard,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.graveyard.bury(self.memory.clone());
    }
}
