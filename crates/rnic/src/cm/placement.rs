//! Placement of requests. Several devices of one address may listen for a service; their user then decides which of them handles a request.

use std::net::IpAddr;

use rdmux_wire::cm::{CmMessage, Req, ServiceId, SidrReq};

use super::{BACKLOG_MAX, Cm, CmId, Connection, ConnectionState, RequestKey};
use crate::time::Time;

/// A peer's request for a connection, or for the QP of a datagram service.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    peer: IpAddr,
    tid: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Connect(Req),
    Resolve(SidrReq),
}

impl Request {
    pub(super) fn connect(peer: IpAddr, tid: u64, req: Req) -> Request {
        let kind = Kind::Connect(req);
        Request { peer, tid, kind }
    }

    pub(super) fn resolve(peer: IpAddr, tid: u64, req: SidrReq) -> Request {
        let kind = Kind::Resolve(req);
        Request { peer, tid, kind }
    }

    /// The requested service.
    pub fn service(&self) -> ServiceId {
        match &self.kind {
            Kind::Connect(req) => req.service_id,
            Kind::Resolve(req) => req.service_id,
        }
    }

    fn key(&self) -> RequestKey {
        match &self.kind {
            Kind::Connect(req) => (self.peer, Some(req.ca_guid), req.local_comm_id),
            Kind::Resolve(req) => (self.peer, None, req.request_id),
        }
    }
}

/// Work that a listener has; of two listeners, the lesser one has less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListenerLoad {
    /// Requests that the user has not decided on.
    pub undecided: usize,
    /// Connections and resolutions of the device, in any state but TimeWait.
    pub connections: usize,
    /// Requests for the service since the user began to listen.
    pub requests: u64,
}

impl Cm {
    /// Leaves the placement of requests to the user: from now on they come out of [`Cm::take_deferred`].
    pub fn defer_requests(&mut self) {
        self.defers = true;
    }

    /// Takes the requests that have arrived. The user gives each to [`Cm::handle_request`] of the device that it chooses, and a repeated
    /// request to the same device as before, which [`Cm::knows`] it.
    pub fn take_deferred(&mut self) -> Vec<Request> {
        std::mem::take(&mut self.deferred)
    }

    /// Returns whether [`Cm::take_deferred`] has something to return.
    pub(crate) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    pub(super) fn receive_request(&mut self, now: Time, request: Request) {
        if !self.defers {
            self.handle_request(now, &request);
        } else if self.deferred.len() < BACKLOG_MAX {
            // The peer repeats a dropped one.
            self.deferred.push(request);
        }
    }

    /// Handles a request as if it had just arrived here.
    pub fn handle_request(&mut self, now: Time, request: &Request) {
        match &request.kind {
            Kind::Connect(req) => self.handle_req(now, request.peer, request.tid, req),
            Kind::Resolve(req) => self.handle_sidr_req(now, request.peer, request.tid, req),
        }
    }

    /// Returns whether a request is for this device whatever its load: the device has handled the request before, or it listens for the
    /// service and has a connection of the peer's QP, which the peer has forgotten. 12.9.8.3.1.
    pub fn knows(&self, request: &Request) -> bool {
        let known = self.by_request.get(&request.key());
        let known = known.and_then(|id| self.connections.get(id));
        let is_repeated = known.is_some_and(|c| c.is_of(request.tid));
        let is_stale = match &request.kind {
            Kind::Connect(req) => self.by_qp.contains_key(&(request.peer, req.ca_guid, req.qpn)),
            Kind::Resolve(_) => false,
        };
        is_repeated || is_stale && self.listeners.contains_key(&request.service())
    }

    /// Returns the load of the listener for a service; `None` if there is no listener.
    pub fn listener_load(&self, service: ServiceId) -> Option<ListenerLoad> {
        let listener = self.listeners.get(&service)?;
        Some(ListenerLoad {
            undecided: listener.undecided,
            connections: self.len(),
            requests: listener.requests,
        })
    }

    /// Forgets a request that the user has not decided on, for another device to handle it. Returns `None` if there is no such request.
    pub fn release(&mut self, id: CmId) -> Option<Request> {
        let c = self.connections.get(&id.0).filter(|c| c.state.is_undecided())?;
        let request = match CmMessage::parse(&c.message[..]) {
            Ok((tid, CmMessage::Req(req))) => Request::connect(c.peer, tid, req),
            Ok((tid, CmMessage::SidrReq(req))) => Request::resolve(c.peer, tid, req),
            _ => return None,
        };
        self.forget(id.0);
        Some(request)
    }

    /// Releases all requests for a service that the user has not decided on.
    pub fn release_all(&mut self, service: ServiceId) -> Vec<Request> {
        let ids = self.undecided(service);
        ids.into_iter().filter_map(|id| self.release(CmId(id))).collect()
    }

    /// Returns the requests for a service that the user has not decided on.
    pub(super) fn undecided(&self, service: ServiceId) -> Vec<u32> {
        let undecided = |c: &Connection| c.state.is_undecided() && c.service == service;
        let mut ids: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, c)| undecided(c))
            .map(|(id, _)| *id)
            .collect();
        // The outcome must not depend on the order of a hash map.
        ids.sort_unstable();
        ids
    }
}

impl Connection {
    /// Passive: returns whether a message with the id of its request is a repetition. A peer draws its communication ids at random, so another
    /// request may have the id of one whose answer is still kept: its transaction id tells them apart. 13.4.6.4.
    pub(super) fn is_of(&self, tid: u64) -> bool {
        self.state != ConnectionState::TimeWait || self.request_tid == tid
    }
}
