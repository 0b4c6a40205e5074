//! Leases, as a client has them: what the server says of them, and letting go.

use std::time::{Duration, Instant};

use rdmux_wire::push::{Change, ChangeKind, Message};

use super::{Asked, Client, Error, Fallback, Mapping, OnBreak};

/// A mapping's lease, and what is under way through it.
#[derive(Debug)]
pub(super) struct Leased {
    state: State,
    /// RDMA requests that are not done.
    pub(super) in_flight: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Held,
    /// Somebody else needs it by then.
    Breaking(Instant),
    /// The server was told that it is released.
    Releasing,
    /// The server has made the keys invalid.
    Over,
}

/// A mapping that somebody else needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken {
    /// [`Mapping::id`].
    pub mapping: u64,
    /// When the server revokes it.
    pub until: Instant,
}

/// How a request through a mapping is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    Rdma,
    Message,
}

impl Client {
    pub(super) fn leased_now(&mut self, mapping: &Mapping) {
        let leased = Leased {
            state: State::Held,
            in_flight: 0,
        };
        self.leased.insert(mapping.id, leased);
    }

    /// The mappings that others need and that are not released. With [`OnBreak::Release`] those through which something is
    /// still under way.
    pub fn broken(&self) -> impl Iterator<Item = Broken> {
        self.leased.iter().filter_map(|(id, leased)| match leased.state {
            State::Breaking(until) => Some(Broken { mapping: *id, until }),
            _ => None,
        })
    }

    /// Whether requests can be posted through a mapping.
    pub fn is_held(&self, mapping: &Mapping) -> bool {
        matches!(self.lease_path(mapping), Ok(Path::Rdma))
    }

    /// Waits for what is under way through a mapping, and gives up its keys and its lease. What was written through it can
    /// still be flushed; it is for [`Client::unmap`] to forget it.
    pub fn release(&mut self, mapping: &Mapping) -> Result<(), Error> {
        while self
            .leased
            .get(&mapping.id)
            .is_some_and(|leased| mapping.connection == self.connection && leased.state != State::Over)
        {
            self.begin_release(mapping.id)?;
            self.turn()?;
        }
        Ok(())
    }

    /// How a request through a mapping is to be done now.
    pub(super) fn path(&self, mapping: &Mapping) -> Result<Path, Error> {
        match self.lease_path(mapping) {
            Ok(Path::Rdma) if !mapping.direct => Ok(Path::Message),
            path => path,
        }
    }

    /// What the lease allows, whatever the server's device reaches.
    fn lease_path(&self, mapping: &Mapping) -> Result<Path, Error> {
        if mapping.connection != self.connection {
            return Err(Error::MappingEnded {
                region: mapping.region.clone(),
            });
        }
        match self.leased.get(&mapping.id).map(|leased| leased.state) {
            Some(State::Held) => Ok(Path::Rdma),
            Some(State::Breaking(_)) if self.options.on_break == OnBreak::Tell => Ok(Path::Rdma),
            Some(_) if self.options.fallback == Fallback::Automatic => Ok(Path::Message),
            _ => Err(Error::LeaseBroken {
                region: mapping.region.clone(),
            }),
        }
    }

    pub(super) fn is_over(&self, mapping: &Mapping) -> bool {
        let leased = self.leased.get(&mapping.id);
        leased.is_none_or(|leased| leased.state == State::Over)
    }

    /// The server says what has become of a mapping.
    pub(super) fn changed(&mut self, change: &Change) -> Result<(), Error> {
        let Some(leased) = self.leased.get_mut(&change.mapping) else {
            // It was unmapped meanwhile.
            return Ok(());
        };
        match change.kind {
            ChangeKind::Revoked => leased.state = State::Over,
            ChangeKind::Break if leased.state == State::Held => {
                let within = Duration::from_millis(change.ms.into());
                leased.state = State::Breaking(Instant::now() + within);
                if self.options.on_break == OnBreak::Release {
                    self.begin_release(change.mapping)?;
                }
            }
            ChangeKind::Break => {}
        }
        Ok(())
    }

    /// Releases a mapping, unless something is under way through it: then later.
    fn begin_release(&mut self, id: u64) -> Result<(), Error> {
        let Some(leased) = self.leased.get_mut(&id) else {
            return Ok(());
        };
        if leased.in_flight > 0 || matches!(leased.state, State::Releasing | State::Over) {
            return Ok(());
        }
        leased.state = State::Releasing;
        self.tell(Message::Release { mapping: id }, Asked::Release(id))
    }

    /// A request through a mapping is done.
    pub(super) fn one_less(&mut self, id: u64) -> Result<(), Error> {
        let Some(leased) = self.leased.get_mut(&id) else {
            return Ok(());
        };
        leased.in_flight = leased.in_flight.saturating_sub(1);
        let breaking = matches!(leased.state, State::Breaking(_));
        if breaking && self.options.on_break == OnBreak::Release {
            self.begin_release(id)?;
        }
        Ok(())
    }

    pub(super) fn released(&mut self, id: u64) {
        if let Some(leased) = self.leased.get_mut(&id) {
            leased.state = State::Over;
        }
    }
}
