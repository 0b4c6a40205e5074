//! The engines of a device. Each has a slot, a lock and objects of its own, so that they share nothing on the path of data. They share services:
//! if several of them listen for one, each request for it goes to one of them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use rdmux_rnic::cm::{CmId, Request};
use rdmux_verbs::sync::{Mutex, MutexGuard};
use rdmux_verbs::{DeviceModeration, ModerationPolicy};
use rdmux_wire::cm::ServiceId;

use super::engine::Engine;
use super::group::{GroupError, ServiceClaim};

/// The engines of a device. A thread that holds the lock of an engine never calls it, and the drop of a memory begins and ends no service: a memory
/// that has ended may be dropped while this is locked.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    members: Mutex<Members>,
    /// Policy of the completion queues that have none of their own.
    pub(super) moderation: Arc<DeviceModeration>,
}

#[derive(Debug, Default)]
struct Members {
    /// In the order in which they were opened.
    engines: Vec<Weak<Engine>>,
    /// Reservations of services; the flag is set for a service of datagrams.
    claims: HashMap<(ServiceId, bool), Weak<ServiceClaim>>,
}

impl Engines {
    pub(super) fn new(moderation: ModerationPolicy) -> Engines {
        Engines {
            moderation: Arc::new(DeviceModeration::new(moderation)),
            ..Engines::default()
        }
    }

    /// Locked while a request is placed, so that a repetition finds it placed.
    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock()
    }

    /// Adds an engine. From the second one on, the requests that arrive at any of them are placed.
    pub(super) fn add(&self, engine: &Arc<Engine>) {
        let mut members = self.members();
        members.engines.retain(|known| known.strong_count() > 0);
        members.engines.push(Arc::downgrade(engine));
        let engines = members.open();
        if engines.len() > 1 {
            for engine in engines {
                engine.lock().rnic.cm().defer_requests();
            }
        }
    }

    /// Reserves a service for an engine, or lets it share the reservation of another engine of the device.
    pub(super) fn register(
        &self,
        engine: &Engine,
        service: ServiceId,
        datagrams: bool,
    ) -> Result<(), GroupError> {
        let mut members = self.members();
        members.claims.retain(|_, claim| claim.strong_count() > 0);
        let shared = members.claims.get(&(service, datagrams)).and_then(Weak::upgrade);
        if let Some(claim) = engine.register_service(service, shared)? {
            let claim = Arc::downgrade(&claim);
            members.claims.insert((service, datagrams), claim);
        }
        Ok(())
    }

    /// Ends the service of an engine. The requests that its user has not decided on go to another engine that listens, or are refused.
    pub(super) fn unregister(&self, engine: &Engine, service: ServiceId) {
        let members = self.members();
        let mut others = members.open();
        others.retain(|other| !std::ptr::eq(&**other, engine));
        let listens = |other: &Arc<Engine>| other.lock().rnic.cm().listener_load(service).is_some();
        let is_shared = others.iter().any(listens);
        let released = engine.with(|core, now| {
            core.listeners.remove(&service);
            let cm = core.rnic.cm();
            let released = if is_shared {
                cm.release_all(service)
            } else {
                Vec::new()
            };
            cm.unlisten(now, service);
            released
        });
        engine.unregister_service(service);
        for request in &released {
            members.place(engine, request);
        }
    }

    /// Places requests that have arrived at an engine.
    pub(super) fn place(&self, arrived_at: &Engine, requests: &[Request]) {
        let members = self.members();
        for request in requests {
            members.place(arrived_at, request);
        }
    }

    /// Moves a request that nobody has decided on to another engine.
    pub(super) fn pass(&self, from: &Engine, id: CmId, to: &Engine) {
        let _members = self.members();
        let released = from.with(|core, _| core.rnic.cm().release(id));
        if let Some(request) = released {
            to.handle_request(&request);
        }
    }
}

impl Members {
    fn open(&self) -> Vec<Arc<Engine>> {
        let engines = self.engines.iter().filter_map(Weak::upgrade);
        engines.filter(|engine| engine.is_open()).collect()
    }

    /// Hands a request to the engine that knows it, or else to the listener with the least load, or else to the engine at which it has arrived,
    /// which refuses it.
    fn place(&self, arrived_at: &Engine, request: &Request) {
        let mut least = None;
        for engine in self.open() {
            let (knows, load) = {
                let mut core = engine.lock();
                let cm = core.rnic.cm();
                (cm.knows(request), cm.listener_load(request.service()))
            };
            if knows {
                return engine.handle_request(request);
            }
            if let Some(load) = load
                && least.as_ref().is_none_or(|(other, _)| load < *other)
            {
                least = Some((load, engine));
            }
        }
        match least {
            Some((_, engine)) => engine.handle_request(request),
            None => arrived_at.handle_request(request),
        }
    }
}
