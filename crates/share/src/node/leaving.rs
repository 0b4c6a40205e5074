//! The end of an application: everything that it has goes, an object at a time, since others do not wait for thousands of them.

use std::time::Instant;

use rdmux_rnic::Time;
use rustix::net::{Shutdown, shutdown};

use super::application::{Application, Shared};

/// An application that has ended, and what is left of it.
#[derive(Debug)]
pub(super) struct Leaving {
    application: Application,
    /// Objects that take time to destroy, in the reverse order.
    left: Vec<Object>,
}

#[derive(Clone, Copy, Debug)]
enum Object {
    Listener(u32),
    Connection(u32),
    Request(u32),
    Qp(u32),
    Srq(u32),
    Region(u32),
}

impl Leaving {
    /// Has an application leave. Nobody looks at its rings any more.
    pub(super) fn new(application: Application) -> Leaving {
        // It learns at once that the node serves it no more.
        let _ = shutdown(&application.channel, Shutdown::Both);
        // Listeners end first: whoever takes the place of the application listens for the same. Then queue pairs, by which peers learn it, and
        // before their memory.
        let regions = application.regions.ids().map(Object::Region);
        let srqs = application.srqs.ids().map(Object::Srq);
        let qps = application.qps.ids().map(Object::Qp);
        let requests = application.requests.ids().map(Object::Request);
        let connections = application.connections.ids().map(Object::Connection);
        let listeners = application.listeners.ids().map(Object::Listener);
        let later = regions.chain(srqs).chain(requests).chain(connections);
        let left = later.chain(qps).chain(listeners).collect();
        Leaving { application, left }
    }

    /// Returns its slot.
    pub(super) fn slot(&self) -> u32 {
        self.application.slot
    }

    /// Destroys an object; `None` if there was none left, and the application is to be dropped.
    pub(super) fn step(&mut self, shared: &mut Shared, now: Time) -> Option<()> {
        let application = &mut self.application;
        match self.left.pop() {
            Some(Object::Listener(id)) => drop(application.listeners.remove(id)),
            Some(Object::Connection(id)) => drop(application.connections.remove(id)),
            Some(Object::Request(id)) => drop(application.requests.remove(id)),
            Some(Object::Qp(id)) => {
                application.remove_qp(shared, now, id);
            }
            Some(Object::Srq(id)) => drop(application.srqs.remove(id)),
            Some(Object::Region(id)) => {
                if let (Some(removed), Some(sharing)) = (application.regions.remove(id), &mut shared.sharing)
                {
                    sharing.remove_region(Instant::now(), removed.region, removed.charges);
                }
            }
            None => {
                if let Some(sharing) = &mut shared.sharing {
                    sharing.forget_application(application.slot);
                }
                if application.is_tenant {
                    shared.egress.remove_tenant(application.tenant);
                }
                return None;
            }
        }
        Some(())
    }
}
