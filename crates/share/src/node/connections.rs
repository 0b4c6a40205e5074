//! Tells an application what happens to its listeners, attempts and connections, and to the device.

use std::time::Duration;

use rdmux_rnic::{QpState, Time};
use rdmux_verbs::{AsyncEvent, ConnectError};
use rdmux_wire::node::control::{EventKind, Kind, Message, PrivateData};

use super::application::{Application, Detached, Link, Linked, Shared, Token};
use super::requests::refused;
use crate::control::convert::{EventOf, Refusal, endpoint_to_wire, event_to_wire};

/// Requests of peers that are passed on at once.
const REQUESTS_PER_EVENT: usize = 64;

impl Application {
    /// Looks at the object of a token.
    pub(super) fn happened(&mut self, shared: &mut Shared, now: Time, token: Token) -> Result<(), Detached> {
        match token.kind {
            Kind::Listener => self.listener_has_news(shared, token.id),
            _ => self.connection_has_news(shared, now, token.id),
        }
    }

    fn listener_has_news(&mut self, shared: &Shared, listener: u32) -> Result<(), Detached> {
        for _ in 0..REQUESTS_PER_EVENT {
            let Some((listening, _)) = self.listeners.get(listener) else {
                return Ok(());
            };
            let Some(request) = listening.accept(Duration::ZERO) else {
                return Ok(());
            };
            let event = |id| Message::Requested {
                listener,
                request: id,
                peer: request.peer(),
                peer_port: request.peer_port(),
                remote: endpoint_to_wire(request.remote()),
                private_data: PrivateData::new(request.private_data()).unwrap_or_default(),
            };
            let event = event(0);
            // Without room it is dropped, and so refused: the peer of an application that decides nothing learns that.
            if let Some(id) = self.requests.insert(request) {
                let mut event = event;
                if let Message::Requested { request, .. } = &mut event {
                    *request = id;
                }
                self.tell(&event)?;
            }
        }
        // There may be more, and peers decide how many. A listener that is registered again reports at once.
        if let Some((listening, _)) = self.listeners.get(listener) {
            listening.notify(&shared.events, self.token(Kind::Listener, listener));
        }
        Ok(())
    }

    fn connection_has_news(&mut self, shared: &mut Shared, now: Time, id: u32) -> Result<(), Detached> {
        let Some(linked) = self.connections.get_mut(id) else {
            return Ok(());
        };
        let qp = linked.qp;
        if let Link::Attempt(attempt) = &mut linked.link {
            match attempt.poll() {
                None => return Ok(()),
                Some(Ok(connection)) => {
                    let event = Message::Connected {
                        connection: id,
                        remote: connection.remote().map(endpoint_to_wire),
                        private_data: PrivateData::new(connection.private_data()).unwrap_or_default(),
                    };
                    let states = [QpState::Init, QpState::Rtr, QpState::Rts];
                    // The device has brought up a queue pair of its own.
                    let is_external = connection.qp().is_none();
                    let states =
                        states.map(|to| Some((to, connection.attributes(to).filter(|_| is_external)?)));
                    let known = (true, false);
                    linked.link = Link::Made { connection, known };
                    for (to, attributes) in states.into_iter().flatten() {
                        if self.modify(shared, now, qp, to, &attributes).is_err()
                            && let Some(qp) = self.qps.get(qp)
                        {
                            qp.fail(shared);
                        }
                    }
                    if let Some(Linked {
                        link: Link::Made { connection, .. },
                        ..
                    }) = self.connections.get(id)
                    {
                        connection.establish();
                    }
                    self.tell(&event)?;
                }
                Some(Err(error)) => {
                    self.connections.remove(id);
                    return self.tell(&attempt_failed(id, error));
                }
            }
        }
        self.tell_failure(shared, now, qp)?;
        self.tell_progress(shared, now, id)
    }

    fn tell_progress(&mut self, shared: &mut Shared, now: Time, id: u32) -> Result<(), Detached> {
        let Some(linked) = self.connections.get_mut(id) else {
            return Ok(());
        };
        let Link::Made { connection, known } = &mut linked.link else {
            return Ok(());
        };
        let progress = connection.progress();
        let known_now = (
            progress.established.is_some() || known.0,
            progress.ended.is_some() || known.1,
        );
        if std::mem::replace(known, known_now) == known_now {
            return Ok(());
        }
        let (established, ended) = known_now;
        if ended && let Some(qp) = self.qps.get_mut(linked.qp) {
            // The device has put it in Error. If it was in SQD, no piece of it finds that out.
            shared.egress.fail(now, qp.flow);
            qp.end_external(shared);
        }
        self.tell(&Message::Progressed {
            connection: id,
            established,
            ended,
        })
    }

    /// Passes on an event of the device, if it concerns this application.
    pub(super) fn device_has_news(
        &mut self,
        shared: &mut Shared,
        now: Time,
        event: AsyncEvent,
    ) -> Result<(), Detached> {
        if let AsyncEvent::CqError(cqn) = event {
            // Only an application that posts more than it reserved room for can do that to its queue.
            return match cqn == self.cq.cqn() {
                true => Err(Detached::Protocol(
                    "it has more requests in flight than its queue pairs hold".into(),
                )),
                false => Ok(()),
            };
        }
        let Some((kind, of)) = event_to_wire(event) else {
            return Ok(());
        };
        let object = match of {
            EventOf::Port => Some(0),
            EventOf::Qp(qpn) => self.by_qpn.get(&qpn).copied(),
            EventOf::Srq(srqn) => self.by_srqn.get(&srqn.0).copied(),
        };
        let Some(object) = object else { return Ok(()) };
        if kind == EventKind::LastWqeReached {
            self.drained.insert(object);
            self.has_all = false;
            return Ok(());
        }
        if let EventOf::Qp(_) = of {
            self.tell_failure(shared, now, object)?;
        }
        if self.rings.is_none() {
            return Ok(());
        }
        self.tell(&Message::Event { kind, object })
    }

    /// Tells of queue pairs that consume no further receives, once all completions of earlier ones are in the ring.
    pub(super) fn tell_drained(&mut self, shared: &mut Shared, now: Time) -> Result<(), Detached> {
        while let Some(object) = self.drained.pop_first() {
            self.tell_failure(shared, now, object)?;
            let kind = EventKind::LastWqeReached;
            self.tell(&Message::Event { kind, object })?;
        }
        Ok(())
    }
}

fn attempt_failed(connection: u32, error: ConnectError) -> Message {
    let (reason, data) = match &error {
        ConnectError::Rejected { reason, private_data } => (Some(*reason), PrivateData::new(private_data)),
        _ => (None, None),
    };
    let Refusal { code, text, .. } = refused(error);
    Message::Refused {
        connection,
        reason,
        private_data: data.unwrap_or_default(),
        code,
        text,
    }
}
