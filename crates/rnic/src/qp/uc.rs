//! The receiving half of a UC QP: it receives a message completely, or drops it silently. IBTA Vol 1, 9.8.2.2.

use rdmux_wire::Psn;
use rdmux_wire::roce::Packet;

use crate::cq::Status;
use crate::qp::execute::{Effect, Execution, Refusal, Request, Scope, WritePacket};
use crate::qp::message::{Payload, fits};
use crate::qp::{Env, Head, QpAttributes};
use crate::trace::Note;

/// A packet whose PSN lies up to this many before the expected one is a copy, or late. The specification takes any first packet for
/// a new message, since its links neither copy nor reorder; Ethernet and IP may. A packet further behind means that the sender
/// continued through a long outage.
const LATE_PACKETS_MAX: i32 = 1 << 15;

#[derive(Debug)]
pub(crate) struct UcReceiver {
    pub(crate) execution: Execution,
    expected: Psn,
    established: bool,
}

impl UcReceiver {
    pub(crate) fn new(execution: Execution) -> UcReceiver {
        UcReceiver {
            execution,
            expected: Psn::new(0),
            established: false,
        }
    }

    pub(crate) fn set(&mut self, attr: &QpAttributes) {
        self.expected = attr.rq_psn.unwrap_or(self.expected);
    }

    pub(crate) fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// Handles a packet. `Some`: a receive completed with this status, with which the caller fails the QP.
    pub(crate) fn handle_request(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
    ) -> Option<Status> {
        let psn = packet.bth.psn;
        let late = (1..=LATE_PACKETS_MAX).contains(&self.expected.since(psn));
        if late && !mutant!(UcLateAccepted) {
            env.counters.duplicate_request += 1;
            return None;
        }
        let begins = packet.bth.opcode.operation.position().begins();
        let gap = psn != self.expected;
        env.counters.out_of_sequence += u64::from(gap);
        if (gap || begins) && self.execution.is_inside_message() {
            env.counters.dropped_messages += 1;
            self.drop_message(env);
        }
        self.expected = psn.plus(1);
        if !self.established {
            self.established = true;
            env.tell_first_request(head);
        }
        if !begins && !self.execution.is_inside_message() {
            // The packet belongs to a message that was dropped.
            return None;
        }
        match self.execute(env, head, packet) {
            Ok(_) => None,
            // The receive's own memory failed. 9.9.3.
            Err(refusal @ Refusal::Receive(status)) => {
                let refused = self.execution.denial(env, head, packet, refusal);
                env.note(head.qpn, Note::Refused(refused));
                Some(status)
            }
            // The peer's request is at fault; the peer is not notified.
            Err(refusal) => {
                match refusal {
                    Refusal::NotReady => env.counters.resources_dropped += 1,
                    _ => env.counters.dropped_messages += 1,
                }
                self.drop_message(env);
                None
            }
        }
    }

    /// Drops the message in progress, if any. Bytes that it wrote before stay written.
    fn drop_message(&mut self, env: &mut Env<'_>) {
        // Gathered bytes are placed before the next message adds bytes for another place. An error is ignored, since the message is
        // dropped anyway.
        let _ = self.execution.place_gathered(env);
        self.execution.give_up_message();
    }

    /// Places the gathered bytes at the end of the datagram. Their message is over or continues; nobody is notified of an error.
    pub(crate) fn place_gathered(&mut self, env: &mut Env<'_>) {
        if self.execution.place_gathered(env).is_err() {
            env.counters.dropped_messages += 1;
            self.execution.give_up_message();
        }
    }

    fn execute(&mut self, env: &mut Env<'_>, head: &Head, packet: &Packet<'_>) -> Result<Effect, Refusal> {
        let operation = packet.bth.opcode.operation;
        let (position, payload) = (operation.position(), Payload::Packet(packet.payload()));
        if !fits(packet, payload.len(), head.mtu) {
            return Err(Refusal::InvalidRequest);
        }
        let (imm, solicited) = (packet.imm(), packet.bth.solicited);
        let request = if operation.is_send() {
            Request::Send {
                position,
                payload,
                imm,
                invalidate: None,
                solicited,
            }
        } else {
            Request::Write(WritePacket {
                position,
                reth: packet.reth(),
                payload,
                imm,
                solicited,
            })
        };
        let scope = Scope::of(env, head, None)?;
        self.execution.execute(env, head, scope, request)
    }
}
