//! A client's leases: the server's notices about them, and their release.

use std::time::{Duration, Instant};

use rdmux_wire::push::{Change, ChangeKind, Message};

use super::{Asked, Client, Error, Fallback, Mapping, OnBreak};

/// A mapping's lease, and the requests in flight through it.
#[derive(Debug)]
pub(super) struct Leased {
    state: LeasedState,
    /// Number of RDMA requests that are not done.
    pub(super) in_flight: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeasedState {
    Held,
    /// Somebody else needs the range by this time.
    Breaking(Instant),
    /// The client has told the server that it releases the mapping.
    Releasing,
    /// The server has made the keys invalid.
    Over,
}

/// A mapping that somebody else needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Number of the mapping ([`Mapping::id`]).
    pub mapping: u64,
    /// Time at which the server revokes it.
    pub until: Instant,
}

/// Path of a request through a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    Rdma,
    Message,
}

impl Client {
    pub(super) fn leased_now(&mut self, mapping: u64) {
        let leased = Leased {
            state: LeasedState::Held,
            in_flight: 0,
        };
        self.leased.insert(mapping, leased);
    }

    /// Returns the mappings that others need and that are not released. With [`OnBreak::Release`], these are the mappings that
    /// still have requests in flight.
    pub fn broken(&self) -> impl Iterator<Item = Broken> {
        self.leased.iter().filter_map(|(id, leased)| match leased.state {
            LeasedState::Breaking(until) => Some(Broken { mapping: *id, until }),
            _ => None,
        })
    }

    /// Returns whether requests can be posted through a mapping.
    pub fn is_held(&self, mapping: &Mapping) -> bool {
        matches!(self.lease_path(mapping), Ok(Path::Rdma))
    }

    /// Waits for the requests in flight through a mapping, and gives up its keys and its lease. Bytes written through it can
    /// still be flushed, until [`Client::unmap`] forgets the mapping.
    pub fn release(&mut self, mapping: &Mapping) -> Result<(), Error> {
        while self
            .leased
            .get(&mapping.id)
            .is_some_and(|leased| mapping.connection == self.connection && leased.state != LeasedState::Over)
        {
            self.begin_release(mapping.id)?;
            self.handle_next()?;
        }
        Ok(())
    }

    /// Returns the path that a request through a mapping takes now.
    pub(super) fn path(&self, mapping: &Mapping) -> Result<Path, Error> {
        match self.lease_path(mapping) {
            Ok(Path::Rdma) if !mapping.direct => Ok(Path::Message),
            path => path,
        }
    }

    /// Returns the path that the lease allows, whatever the server's device reaches.
    fn lease_path(&self, mapping: &Mapping) -> Result<Path, Error> {
        if mapping.connection != self.connection {
            return Err(Error::MappingEnded {
                region: mapping.region.clone(),
            });
        }
        match self.leased.get(&mapping.id).map(|leased| leased.state) {
            Some(LeasedState::Held) => Ok(Path::Rdma),
            Some(LeasedState::Breaking(_)) if self.options.on_break == OnBreak::Tell => Ok(Path::Rdma),
            Some(_) if self.options.fallback == Fallback::Automatic => Ok(Path::Message),
            _ => Err(Error::LeaseBroken {
                region: mapping.region.clone(),
            }),
        }
    }

    pub(super) fn is_over(&self, mapping: &Mapping) -> bool {
        let leased = self.leased.get(&mapping.id);
        leased.is_none_or(|leased| leased.state == LeasedState::Over)
    }

    /// Handles the server's notice about a mapping.
    pub(super) fn changed(&mut self, change: &Change) -> Result<(), Error> {
        let Some(leased) = self.leased.get_mut(&change.mapping) else {
            // The mapping was unmapped meanwhile.
            return Ok(());
        };
        match change.kind {
            ChangeKind::Revoked => leased.state = LeasedState::Over,
            ChangeKind::Break if leased.state == LeasedState::Held => {
                let within = Duration::from_millis(change.ms.into());
                leased.state = LeasedState::Breaking(Instant::now() + within);
                if self.options.on_break == OnBreak::Release {
                    self.begin_release(change.mapping)?;
                }
            }
            ChangeKind::Break => {}
        }
        Ok(())
    }

    /// Releases a mapping, unless requests through it are in flight: then a later call does.
    fn begin_release(&mut self, id: u64) -> Result<(), Error> {
        let Some(leased) = self.leased.get_mut(&id) else {
            return Ok(());
        };
        if leased.in_flight > 0 || matches!(leased.state, LeasedState::Releasing | LeasedState::Over) {
            return Ok(());
        }
        leased.state = LeasedState::Releasing;
        self.tell(Message::Release { mapping: id }, Asked::Release(id))
    }

    /// Handles the completion of a request through a mapping.
    pub(super) fn one_less(&mut self, id: u64) -> Result<(), Error> {
        let Some(leased) = self.leased.get_mut(&id) else {
            return Ok(());
        };
        leased.in_flight = leased.in_flight.saturating_sub(1);
        let breaking = matches!(leased.state, LeasedState::Breaking(_));
        if breaking && self.options.on_break == OnBreak::Release {
            self.begin_release(id)?;
        }
        Ok(())
    }

    pub(super) fn released(&mut self, id: u64) {
        if let Some(leased) = self.leased.get_mut(&id) {
            leased.state = LeasedState::Over;
        }
    }
}
