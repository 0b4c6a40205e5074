//! The ends of an application's rings: the node's, which creates their memory, and the application's.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rdmux_memory::mapping::{Mapping, Unmappable, check_sealed_file, sealed_file};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::area::{Area, Layout, ReadyArea, RingArea};
use super::doorbell::{Bell, BellWaiter};
use super::ready::{Announcer, ReadySet};
use super::{Consumer, Producer, Tell};

/// The descriptors that the node gives the application, to which they belong from then on.
#[derive(Debug)]
pub struct Files {
    /// The file that only the node writes.
    node: OwnedFd,
    /// The file that both write.
    application: OwnedFd,
    /// By which the application rings the node.
    rings: OwnedFd,
    /// By which the node rings the application.
    is_rung: OwnedFd,
}

impl Files {
    /// Number of the descriptors.
    pub const COUNT: usize = 4;

    /// Returns the descriptors in the order that [`Files::from_fds`] takes, to send them.
    pub fn as_fds(&self) -> [BorrowedFd<'_>; Files::COUNT] {
        [&self.node, &self.application, &self.rings, &self.is_rung].map(|fd| fd.as_fd())
    }

    /// Returns the descriptors that another process sent. [`ApplicationEnd::attach`] checks them.
    pub fn from_fds(fds: [OwnedFd; Files::COUNT]) -> Files {
        let [node, application, rings, is_rung] = fds;
        Files {
            node,
            application,
            rings,
            is_rung,
        }
    }
}

/// Reason why an application cannot use the rings.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// A file could raise a signal when it is touched.
    #[error(transparent)]
    Unmappable(#[from] Unmappable),
    /// The system refuses to map a file.
    #[error("the rings cannot be mapped: {0}")]
    Map(#[from] io::Error),
}

/// The node's end of the rings of an application.
///
/// The node takes each of its rings once, and looks at those that it polls and at those that [`NodeEnd::ready`] names:
///
/// 1. Take descriptors from a ring in batches, and release each batch, until there are none.
/// 2. Then [`Consumer::prepare_sleep`], or poll the ring again later. If it returns false, continue with 1, as for a ring in the set, after
///    [`Consumer::awake`].
/// 3. With no ring left to poll: [`ReadySet::prepare_sleep`]. If that returns true, sleep on [`NodeEnd::waiter`], then
///    [`BellWaiter::answer`]. In any case [`ReadySet::awake`], and then [`ReadySet::take`].
///
/// The caller passes each [`Tell`] that a call returns to [`NodeEnd::tell`]. An error means that the application is to be detached. The
/// application's end is used in the same way.
#[derive(Debug)]
pub struct NodeEnd {
    area: Area,
    announcer: Announcer<ReadyArea>,
    bell: Bell,
    waiter: BellWaiter,
}

impl NodeEnd {
    /// Creates the memory of an application's rings, and both doorbells. Returns the node's end with the descriptors for the application.
    ///
    /// Seals forbid everybody to change the size of the files. Another one forbids to map the node's file for writing from now on,
    /// and to write it by calls: the mapping of this end is the only one ever (Linux 5.1).
    ///
    /// # Errors
    /// The system has no more memory or descriptors.
    pub fn create(layout: Layout) -> io::Result<(NodeEnd, Files)> {
        let bytes = layout.node_bytes();
        let node_file = memfd_create("rdmux-node", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&node_file, bytes as u64)?;
        fcntl_add_seals(&node_file, SealFlags::SHRINK | SealFlags::GROW)?;
        let node = Mapping::of_sealed_file(&node_file, 0, bytes, true)?;
        fcntl_add_seals(&node_file, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;

        let bytes = layout.application_bytes();
        let application_file = sealed_file("rdmux-application", bytes as u64)?;
        let application = Mapping::of_sealed_file(&application_file, 0, bytes, true)?;

        let (waiter, rings) = Bell::to_node()?;
        let (bell, is_rung) = Bell::to_application()?;
        let area = Area {
            layout,
            node: Arc::new(node),
            application: Arc::new(application),
        };
        let end = NodeEnd {
            announcer: Announcer::new(area.ready_for_application()),
            area,
            bell,
            waiter,
        };
        let files = Files {
            node: node_file,
            application: application_file,
            rings,
            is_rung,
        };
        Ok((end, files))
    }

    /// Returns the layout.
    pub fn layout(&self) -> &Layout {
        &self.area.layout
    }

    /// Returns a submission ring, of which there must be one consumer.
    ///
    /// # Panics
    /// If there is no such ring.
    pub fn submission(&self, index: u32) -> Consumer<RingArea> {
        Consumer::new(self.area.submission(index))
    }

    /// Returns a completion ring, of which there must be one producer.
    ///
    /// # Panics
    /// If there is no such ring.
    pub fn completion(&self, index: u32) -> Producer<RingArea> {
        Producer::new(self.area.completion(index))
    }

    /// Returns the set of the submission rings that have descriptors and the completion rings that have room, of which there must be one.
    pub fn ready(&self) -> ReadySet<ReadyArea> {
        ReadySet::new(self.area.ready_for_node())
    }

    /// Returns what becomes readable when the application has announced a ring and the node sleeps.
    pub fn waiter(&self) -> &BellWaiter {
        &self.waiter
    }

    /// Tells the application what a call for this ring said is to be told.
    #[inline]
    pub fn tell(&self, ring: u32, tell: Tell) {
        if tell == Tell::Ring && self.announcer.announce(ring) {
            self.bell.ring();
        }
    }
}

/// The application's end of its rings; [`NodeEnd`] describes how to use it. Threads may share it; each ring has one thread at a time.
#[derive(Debug)]
pub struct ApplicationEnd {
    area: Area,
    announcer: Announcer<ReadyArea>,
    bell: Bell,
    waiter: BellWaiter,
}

impl ApplicationEnd {
    /// Maps the rings that the node has created.
    ///
    /// # Errors
    /// They are too short for the layout, or cannot be mapped.
    pub fn attach(layout: Layout, files: Files) -> Result<ApplicationEnd, AttachError> {
        let map = |file: &OwnedFd, bytes: usize, writable| {
            check_sealed_file(file, bytes as u64)?;
            let mapping = Mapping::of_sealed_file(file, 0, bytes, writable)?;
            Ok::<_, AttachError>(Arc::new(mapping))
        };
        let area = Area {
            layout,
            node: map(&files.node, layout.node_bytes(), false)?,
            application: map(&files.application, layout.application_bytes(), true)?,
        };
        Ok(ApplicationEnd {
            announcer: Announcer::new(area.ready_for_node()),
            area,
            bell: Bell::of_application(files.rings),
            waiter: BellWaiter::of_application(files.is_rung),
        })
    }

    /// Returns the layout.
    pub fn layout(&self) -> &Layout {
        &self.area.layout
    }

    /// Returns a submission ring, of which there must be one producer.
    ///
    /// # Panics
    /// If there is no such ring.
    pub fn submission(&self, index: u32) -> Producer<RingArea> {
        Producer::new(self.area.submission(index))
    }

    /// Returns a completion ring, of which there must be one consumer.
    ///
    /// # Panics
    /// If there is no such ring.
    pub fn completion(&self, index: u32) -> Consumer<RingArea> {
        Consumer::new(self.area.completion(index))
    }

    /// Returns the set of the completion rings that have descriptors and the submission rings that have room, of which there must be one.
    pub fn ready(&self) -> ReadySet<ReadyArea> {
        ReadySet::new(self.area.ready_for_application())
    }

    /// Returns what becomes readable when the node has announced a ring and the application sleeps.
    pub fn waiter(&self) -> &BellWaiter {
        &self.waiter
    }

    /// Tells the node what a call for this ring said is to be told.
    #[inline]
    pub fn tell(&self, ring: u32, tell: Tell) {
        if tell == Tell::Ring && self.announcer.announce(ring) {
            self.bell.ring();
        }
    }
}

#[cfg(test)]
mod tests;
