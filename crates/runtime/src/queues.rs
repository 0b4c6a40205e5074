//! The completion queues of the connections of one port.

use std::io;
use std::time::Duration;

use rdmux_verbs::{CompletionQueue, CqPool, Device, EngineWatch, GetError, WorkCompletion};

/// Completion queues of a reactor's connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Queues {
    /// The connections of a listener, or those that begin at one device, share one queue of a pool ([`CqPool`]), which has room for as many
    /// as the limits allow: the thread polls and arms one queue, however many connections it has.
    #[default]
    Pool,
    /// Each connection has a queue of its own, as in a server on plain verbs: the thread polls and arms them all, and sleeps until one raises an
    /// event. The device's thread drives meanwhile, and moderates the events.
    Private,
}

/// The place of a port in a pool that several reactors share.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    pub(crate) pool: CqPool,
    pub(crate) vector: u32,
}

#[derive(Debug)]
enum Source {
    Pool(Seat),
    /// `common`: the number of receives that the connections share.
    Private {
        device: Device,
        common: u32,
    },
}

/// The queues of a port's connections, each of which is polled in turn.
#[derive(Debug)]
pub(crate) struct PortQueues {
    source: Source,
    polled: Vec<Polled>,
    /// The queue to poll next.
    next: usize,
}

#[derive(Debug)]
struct Polled {
    cq: CompletionQueue,
    /// So many completions, or all that there are, are polled before the next probes.
    before_probes: usize,
}

impl PortQueues {
    /// Queues of a pool, in which the connections have what they share in common. Each of them has `nr` completions at a time.
    pub(crate) fn of_pool(seat: Seat, nr: u32) -> Result<PortQueues, GetError> {
        // The room for a connection is given back. A device without room refuses the listener, and not its clients.
        let queue = seat.pool.get(nr, Some(seat.vector))?.pool_queue();
        let mut queues = PortQueues::new(Source::Pool(seat));
        queues.add(queue);
        Ok(queues)
    }

    /// Queues that each connection has for itself.
    pub(crate) fn private(device: &Device, common: u32) -> PortQueues {
        PortQueues::new(Source::Private {
            device: device.clone(),
            common,
        })
    }

    fn new(source: Source) -> PortQueues {
        PortQueues {
            source,
            polled: Vec::new(),
            next: 0,
        }
    }

    fn add(&mut self, cq: CompletionQueue) {
        if !self.polled.iter().any(|polled| polled.cq.is(&cq)) {
            self.polled.push(Polled { cq, before_probes: 0 });
        }
    }

    /// Returns the queue for a connection that has `nr` completions at a time, beside those of shared receives.
    pub(crate) fn join(&mut self, nr: u32) -> Result<CompletionQueue, GetError> {
        let (cq, polled) = match &self.source {
            Source::Pool(seat) => {
                let share = seat.pool.get(nr, Some(seat.vector))?;
                (share.queue(), share.pool_queue())
            }
            Source::Private { device, common } => {
                let cq = device.create_cq(nr + common)?;
                (cq.clone(), cq)
            }
        };
        self.add(polled);
        Ok(cq)
    }

    /// Notes that a connection is gone, or was not established. Returns whether its queue is polled no more.
    pub(crate) fn leave(&mut self, queue: &CompletionQueue) -> bool {
        let is_private = matches!(self.source, Source::Private { .. });
        if is_private {
            self.polled.retain(|polled| !polled.cq.is(queue));
        }
        is_private
    }

    /// Returns whether the thread is to sleep in the place of the device's engine.
    pub(crate) fn are_of_pool(&self) -> bool {
        matches!(self.source, Source::Pool(_))
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &CompletionQueue> {
        self.polled.iter().map(|polled| &polled.cq)
    }

    /// Returns the pool, if the queues are of one.
    #[cfg(test)]
    pub(crate) fn pool(&self) -> Option<&CqPool> {
        match &self.source {
            Source::Pool(seat) => Some(&seat.pool),
            Source::Private { .. } => None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.polled.len()
    }

    /// Returns the queue to poll next.
    pub(crate) fn turn(&mut self) -> usize {
        let at = self.next % self.polled.len().max(1);
        self.next = at + 1;
        at
    }

    /// Takes the oldest completion of a queue.
    pub(crate) fn poll(&mut self, at: usize) -> Option<WorkCompletion> {
        let polled = self.polled.get_mut(at)?;
        let found = polled.cq.poll();
        polled.note(found.is_some());
        found
    }

    /// Has a queue's descriptor report the next completion, and takes its oldest one. `watch`: the place of the device's engine, if this
    /// thread has it.
    pub(crate) fn arm(
        &mut self,
        at: usize,
        watch: Option<&mut EngineWatch>,
    ) -> io::Result<Option<WorkCompletion>> {
        let Some(polled) = self.polled.get_mut(at) else {
            return Ok(None);
        };
        let found = match watch {
            Some(watch) => {
                watch.report(&polled.cq);
                polled.cq.poll()
            }
            // A wait of zero time arms the queue and polls it.
            None => polled.cq.wait(Duration::ZERO)?,
        };
        polled.note(found.is_some());
        Ok(found)
    }

    /// Has so many completions of each queue polled before the next probes, or all that there are.
    pub(crate) fn poll_before_probes(&mut self, completions: usize) {
        for polled in &mut self.polled {
            polled.before_probes = completions;
        }
    }

    /// Returns whether [`PortQueues::poll_before_probes`] is done.
    pub(crate) fn may_probe(&self) -> bool {
        self.polled.iter().all(|polled| polled.before_probes == 0)
    }
}

impl Polled {
    fn note(&mut self, found: bool) {
        self.before_probes = match found {
            true => self.before_probes.saturating_sub(1),
            false => 0,
        };
    }
}
