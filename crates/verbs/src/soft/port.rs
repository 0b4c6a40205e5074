//! The engine behind its port. All that arrives is handed in here, and all timers are asked for here, so that faults can stand between
//! the engine and its carriers: UDP and shared memory alike. While nobody asks for any, that is one look at a pointer.

use std::net::IpAddr;
use std::ops::{Deref, DerefMut};

use rdmux_rnic::faults::Spec;
use rdmux_rnic::{Arrival, Rnic, Time, TransmitBuf};

use super::faults::{FaultCounts, Faults, Leaving};
use crate::event::AsyncEvent;

/// The engine, and what stands between it and its carriers.
#[derive(Debug)]
pub(crate) struct Port {
    rnic: Rnic,
    faults: Option<Box<Faults>>,
}

impl Deref for Port {
    type Target = Rnic;

    #[inline]
    fn deref(&self) -> &Rnic {
        &self.rnic
    }
}

impl DerefMut for Port {
    #[inline]
    fn deref_mut(&mut self) -> &mut Rnic {
        &mut self.rnic
    }
}

impl Port {
    pub(crate) fn new(mut rnic: Rnic, spec: Option<Spec>, now: Time) -> Port {
        if let Some(spec) = &spec {
            rnic.set_faults(spec);
        }
        Port {
            rnic,
            faults: spec.map(|spec| Box::new(Faults::new(spec, now))),
        }
    }

    /// Whether packets are looked at one by one, and nothing may go without.
    #[inline]
    pub(crate) fn has_faults(&self) -> bool {
        self.faults.is_some()
    }

    pub(crate) fn fault_counts(&self) -> Option<FaultCounts> {
        Some(self.faults.as_ref()?.counts)
    }

    /// As [`Rnic::handle_datagram`].
    pub(crate) fn handle_datagram(
        &mut self,
        now: Time,
        src: IpAddr,
        src_port: u16,
        bytes: &[u8],
        segment_bytes: usize,
    ) {
        let arrival = Arrival {
            src,
            src_port,
            dst: self.rnic.config().address,
            traffic_class: 0,
            bytes,
            segment_bytes,
            local: false,
        };
        self.handle_arrival(now, &arrival);
    }

    /// As [`Rnic::handle_arrival`]; what is held back arrives later, by [`Port::handle_timeout`].
    #[inline]
    pub(crate) fn handle_arrival(&mut self, now: Time, arrival: &Arrival<'_>) {
        if self.faults.is_none() {
            self.rnic.handle_arrival(now, arrival);
        } else {
            self.hold(now, arrival);
        }
    }

    #[cold]
    fn hold(&mut self, now: Time, arrival: &Arrival<'_>) {
        let Some(faults) = &mut self.faults else { return };
        for bytes in arrival.bytes.chunks(arrival.segment_bytes.max(1)) {
            let packet = Arrival {
                bytes,
                segment_bytes: bytes.len(),
                ..*arrival
            };
            faults.arrive(now, &packet);
        }
        self.hand_in(now);
    }

    /// Hands in what has been held back for long enough.
    fn hand_in(&mut self, now: Time) {
        while let Some(faults) = &mut self.faults
            && let Some(arriving) = faults.next_arriving(now)
        {
            let arrival = arriving.arrival();
            match faults.fails(arrival.bytes) {
                Some(qpn) => self.rnic.fail_qp(now, qpn),
                None => self.rnic.handle_arrival(now, &arrival),
            }
        }
    }

    /// As [`Rnic::poll_timeout`].
    #[inline]
    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let due = self.rnic.poll_timeout();
        match &self.faults {
            None => due,
            Some(faults) => [due, faults.due()].into_iter().flatten().min(),
        }
    }

    /// As [`Rnic::handle_timeout`].
    pub(crate) fn handle_timeout(&mut self, now: Time) {
        self.rnic.handle_timeout(now);
        self.hand_in(now);
    }

    /// The port went down or came up, because that was asked for.
    pub(crate) fn poll_port_event(&mut self, now: Time) -> Option<AsyncEvent> {
        self.faults.as_mut()?.port_event(now)
    }

    /// Whether packets are held back that are to leave.
    #[inline]
    pub(crate) fn has_leaving(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.has_leaving())
    }

    /// Takes the trains from a number on, each of one packet; [`Port::next_leaving`] gives them back in their time.
    pub(crate) fn take_trains(&mut self, now: Time, buf: &TransmitBuf, from: usize) {
        let Some(faults) = &mut self.faults else { return };
        for train in &buf.trains()[from..] {
            for packet in buf.bytes()[train.range.clone()].chunks(train.segment_bytes) {
                faults.leave(now, &train.path, train.local, packet);
            }
        }
    }

    pub(super) fn next_leaving(&mut self, now: Time) -> Option<Leaving> {
        self.faults.as_mut()?.next_leaving(now)
    }
}
