//! The server's own operations on a region, which break leases as a client's do.

use std::sync::mpsc;

use rdmux_memory::Wanted;
use rdmux_runtime::Mailbox;
use rdmux_wire::push::{Access, Name};

use super::Mail;
use super::id::{OperationId, RegionId};

/// A request from the program that runs the server.
#[derive(Debug)]
pub(super) enum Local {
    Begin {
        region: Name,
        access: Access,
        share: Access,
        /// Receives the operation's number once it may begin; nothing if there is no such region.
        reply: mpsc::Sender<OperationId>,
    },
    End(OperationId),
    /// A program outside of the server wants the file of the region with this number.
    Wanted(RegionId, Wanted),
}

/// The server has ended, or never had that region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the server has ended, or has no region of that name")]
pub struct ServerEnded;

/// A handle for operations on a server's regions from another thread: to truncate a file, rename it, copy it.
#[derive(Clone, Debug)]
pub struct Control(pub(super) Mailbox<Mail>);

impl Control {
    /// Waits until no lease on the region conflicts with `access` and `share`: with [`Access::WRITE`] and nothing shared, until
    /// the region is the caller's alone. Conflicting leases are broken: this takes as long as their holders need, and the break
    /// timeout at most for each.
    pub fn exclusive(&self, region: &Name, access: Access, share: Access) -> Result<Exclusive, ServerEnded> {
        let (reply, granted) = mpsc::channel();
        self.0.send(Mail::Local(Local::Begin {
            region: region.clone(),
            access,
            share,
            reply,
        }));
        let number = granted.recv().map_err(|_| ServerEnded)?;
        Ok(Exclusive {
            control: self.clone(),
            number,
        })
    }
}

/// Reserves a region for the caller until it is dropped. Clients that need the region meanwhile wait.
#[derive(Debug)]
pub struct Exclusive {
    control: Control,
    number: OperationId,
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        self.control.0.send(Mail::Local(Local::End(self.number)));
    }
}
