//! Memories that the device is done with.

use std::sync::{Arc, Mutex, PoisonError};

use crate::memory::Memory;
use crate::work::Operation;

/// Handles of memories that work requests, packets or errors ended. Dropping the last handle unmaps, closes, or runs its owner's
/// code, which may ask the device: so the engine drops none of them itself, but keeps them for its caller.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graveyard(Arc<Mutex<Vec<Arc<dyn Memory>>>>);

impl Graveyard {
    pub(crate) fn bury(&self, memory: Arc<dyn Memory>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    }

    pub(crate) fn take(&self) -> Vec<Arc<dyn Memory>> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
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
