//! The namespaces of a subsystem as a queue sees them, looked up anew when they have changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdmux_wire::nvme::{AnaState, NsId, Status};

use super::namespace::{Seat, User};

/// See the module.
#[derive(Debug)]
pub(super) struct View {
    user: User,
    generation: u64,
    seats: BTreeMap<NsId, (Arc<Seat>, AnaState)>,
}

impl View {
    pub(super) fn new(user: User) -> View {
        let mut view = View {
            user,
            generation: 0,
            seats: BTreeMap::new(),
        };
        view.look();
        view
    }

    pub(super) fn user(&self) -> &User {
        &self.user
    }

    /// Looks whether the namespaces, or the access to them, have changed.
    pub(super) fn update(&mut self) {
        if self.generation != self.user.subsystem.generation() {
            self.look();
        }
    }

    fn look(&mut self) {
        let (generation, namespaces, states) = self.user.subsystem.snapshot(self.user.local);
        let mut old = std::mem::take(&mut self.seats);
        for (nsid, shared) in namespaces.iter() {
            let seat = old.remove(nsid).map(|(seat, _)| seat);
            let seat = seat.filter(|seat| seat.is_of(shared));
            let seat = seat.unwrap_or_else(|| Arc::new(Seat::new(shared.clone(), Some(self.user.clone()))));
            let state = states.get(&shared.ana_group()).copied().unwrap_or_default();
            self.seats.insert(*nsid, (seat, state));
        }
        self.generation = generation;
    }

    /// Returns a namespace that the host can reach by this queue.
    pub(super) fn seat(&self, nsid: NsId) -> Result<&Arc<Seat>, Status> {
        let (seat, state) = self
            .seats
            .get(&nsid)
            .ok_or(Status::INVALID_NAMESPACE.do_not_retry())?;
        match state.refusal() {
            Some(status) if !mutant!(AccessIgnored) => Err(status),
            _ => Ok(seat),
        }
    }
}
