//! Memory that nodes allocate at each other: who asks, and who hands out.

use std::collections::BTreeMap;

use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::heap::{Body, Heap};

use super::Driver;

/// A request of this node that has not ended, or whose answer has not been taken.
#[derive(Clone, Copy, Debug)]
struct Request {
    to: u32,
    answer: Option<Body>,
}

/// Requests of this node's threads, by their tickets.
#[derive(Debug, Default)]
pub(super) struct Requests {
    begun: u64,
    open: BTreeMap<u64, Request>,
}

impl Driver {
    /// Asks a node to allocate or free units of a region. Returns the request's ticket.
    pub(crate) fn ask_for_memory(&mut self, to: NodeId, region: u32, body: Body) -> u64 {
        let ticket = self.requests.begun;
        self.requests.begun += 1;
        let is_own = to == self.own;
        // Heaps ask for what can be handed out.
        let answer = is_own.then(|| self.hand_out(region, body).unwrap_or(Body::NoRoom));
        let to = to.number();
        self.requests.open.insert(ticket, Request { to, answer });
        if !is_own {
            let message = Heap { region, ticket, body };
            self.send(to, message.emit());
        }
        ticket
    }

    /// Takes the answer to a request, if it has come.
    pub(crate) fn take_memory(&mut self, ticket: u64) -> Option<Body> {
        let answer = self.requests.open.get(&ticket)?.answer?;
        self.requests.open.remove(&ticket);
        Some(answer)
    }

    /// Ends a request whose answer nobody waits for any more.
    pub(crate) fn give_up_memory(&mut self, ticket: u64) {
        self.requests.open.remove(&ticket);
    }

    /// Takes a message about the memory of a heap. Returns false if no correct node sends it.
    pub(super) fn heap_message(&mut self, from: u32, message: Heap) -> bool {
        let Heap { region, ticket, body } = message;
        match body {
            Body::Allocate { .. } | Body::Free { .. } => {
                let Some(answer) = self.hand_out(region, body) else {
                    return false;
                };
                let message = Heap {
                    region,
                    ticket,
                    body: answer,
                };
                self.send(from, message.emit());
                true
            }
            Body::Done { .. } | Body::NoRoom | Body::NotAllocated => {
                let is_begun = ticket < self.requests.begun;
                let Some(request) = self.requests.open.get_mut(&ticket) else {
                    // The thread that has asked may not wait any more.
                    return is_begun;
                };
                if request.to != from || request.answer.is_some() {
                    return false;
                }
                request.answer = Some(body);
                self.changes += 1;
                true
            }
        }
    }

    /// Carries out a request for memory that is at home here. Returns none if the region has no such memory.
    fn hand_out(&mut self, region: u32, body: Body) -> Option<Body> {
        let arena = self.region(region)?.arena.as_mut()?;
        match body {
            Body::Allocate { units: 0 } => None,
            Body::Allocate { units } => {
                let units = u32::try_from(units).unwrap_or(u32::MAX);
                Some(match arena.allocate(units) {
                    Some(unit) => Body::Done { unit: unit.into() },
                    None => Body::NoRoom,
                })
            }
            Body::Free { unit } => {
                let is_freed = u32::try_from(unit).is_ok_and(|unit| arena.free(unit));
                Some(match is_freed {
                    true => Body::Done { unit },
                    false => Body::NotAllocated,
                })
            }
            Body::Done { .. } | Body::NoRoom | Body::NotAllocated => None,
        }
    }
}
