//! Services for which the applications of a node listen. Engines of a device listen together, so the device would not refuse a second application on
//! another engine, and give it connections of the first one.

use std::collections::HashSet;
use std::sync::Arc;

use rdmux_verbs::ServiceId;
use rdmux_verbs::sync::Mutex;
use rdmux_wire::node::control::ErrorCode;

use crate::control::convert::Refusal;

/// See the module. Clones are one: all workers of a node have it.
#[derive(Clone, Debug, Default)]
pub(super) struct Services(Arc<Mutex<HashSet<ServiceId>>>);

/// The right to listen for a service, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    services: Services,
    service: ServiceId,
}

impl Services {
    /// Claims a service for an application, unless another one has it.
    pub(super) fn claim(&self, service: ServiceId) -> Result<Claim, Refusal> {
        if !self.0.lock().insert(service) {
            let name = service
                .port()
                .map_or_else(|| format!("{service:?}"), |port| format!("port {port}"));
            let text = format!("{name} is in use by an application of the node");
            return Err(Refusal::new(ErrorCode::InUse, text));
        }
        let services = self.clone();
        Ok(Claim { services, service })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.services.0.lock().remove(&self.service);
    }
}
