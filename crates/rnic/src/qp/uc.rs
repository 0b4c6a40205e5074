//! The receiving half of a UC QP: a message arrives whole, or is dropped without a word. IBTA Vol 1, 9.8.2.2.

use rdmux_wire::Psn;
use rdmux_wire::roce::Packet;

use crate::cq::Status;
use crate::qp::execute::{Effect, Execution, Refusal, Request, Scope};
use crate::qp::message::fits;
use crate::qp::{Env, Head, QpAttributes};
use crate::trace::Note;

/// A packet that lies up to this many before the one expected is a copy, or late. The specification takes any first packet for
/// a new message, since its links neither copy nor reorder; Ethernet and IP may. What lies further behind is taken for a
/// sender that went on through a long outage.
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

    /// Handles a packet. `Some`: a receive ended with this status, and the QP is to fail with it.
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
        let gap = psn != self.expected && !mutant!(UcGapAccepted);
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
            // The rest of a message that was dropped.
            return None;
        }
        match self.execute(env, head, packet) {
            Ok(_) => None,
            // Of the receive's own making. 9.9.3.
            Err(refusal @ Refusal::Receive(status)) => {
                let refused = self.execution.denial(env, head, packet, refusal);
                env.note(head.qpn, Note::Refused(refused));
                Some(status)
            }
            // Of the peer's making, who is not told.
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

    /// Drops the message under way, if any. What it wrote by then stays written.
    fn drop_message(&mut self, env: &mut Env<'_>) {
        // Before the next message begins another run of bytes. What fails here was dropped anyway.
        let _ = self.execution.place_gathered(env);
        self.execution.give_up_message();
    }

    /// The datagram has ended: places what waits. The message that it belongs to is over or goes on; nobody is told.
    pub(crate) fn place_gathered(&mut self, env: &mut Env<'_>) {
        if self.execution.place_gathered(env).is_err() {
            env.counters.dropped_messages += 1;
            self.execution.give_up_message();
        }
    }

    fn execute(&mut self, env: &mut Env<'_>, head: &Head, packet: &Packet<'_>) -> Result<Effect, Refusal> {
        let operation = packet.bth.opcode.operation;
        let (position, payload) = (operation.position(), packet.payload());
        if !fits(packet, head.mtu) {
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
            Request::Write {
                position,
                reth: packet.reth(),
                payload,
                imm,
                solicited,
            }
        };
        let scope = Scope::of(env, head, None)?;
        self.execution.execute(env, head, scope, request)
    }
}
