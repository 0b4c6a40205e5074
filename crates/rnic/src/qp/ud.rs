//! The receiving half of a UD QP: each packet is a message, from any sender that knows the Q_Key. IBTA Vol 1, 9.8.3.

use rdmux_wire::roce::Packet;
use rdmux_wire::roce::grh::grh;

use crate::cq::Status;
use crate::device::Arrival;
use crate::qp::execute::{Execution, Refusal, Request, Scope};
use crate::qp::{Env, Head};
use crate::trace::Note;

#[derive(Debug)]
pub(crate) struct UdReceiver {
    pub(crate) execution: Execution,
}

impl UdReceiver {
    /// Handles a datagram. `Some`: a receive completed with this status, with which the caller fails the QP.
    pub(crate) fn handle_request(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        arrival: &Arrival<'_>,
        packet: &Packet<'_>,
    ) -> Option<Status> {
        let Some(deth) = packet
            .deth()
            .filter(|_| packet.payload().len() <= head.mtu as usize)
        else {
            env.counters.malformed += 1;
            return None;
        };
        if deth.qkey != head.qkey {
            env.counters.bad_qkey += 1;
            return None;
        }
        let request = Request::Datagram {
            grh: grh(&arrival.flow(), arrival.traffic_class, packet.bytes().len()),
            payload: packet.payload(),
            imm: packet.imm(),
            src_qpn: deth.src_qpn,
            solicited: packet.bth.solicited,
        };
        let scope = Scope::of(env, head, None).ok()?;
        match self.execution.execute(env, head, scope, request) {
            Ok(_) => None,
            Err(refusal @ Refusal::Receive(status)) => {
                let refused = self.execution.denial(env, head, packet, refusal);
                env.note(head.qpn, Note::Refused(refused));
                Some(status)
            }
            // The message is at fault, and its sender may be anybody: class D of 9.9.3.
            Err(Refusal::TooLong) => {
                env.counters.dropped_messages += 1;
                None
            }
            Err(_) => {
                env.counters.resources_dropped += 1;
                None
            }
        }
    }
}
