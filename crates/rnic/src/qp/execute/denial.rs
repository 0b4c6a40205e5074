//! Reasons of refused requests. They are found by a second check after the refusal: a request that is refused is in no hurry.

use rdmux_wire::roce::{Operation as Op, Packet};

use super::{Execution, Incoming, Refusal, Scope};
use crate::memory::Access;
use crate::qp::{Env, Head};
use crate::trace::{Denial, Refused};

impl Execution {
    /// Returns the request of a packet, and the reason for which it was refused.
    pub(crate) fn denial(
        &self,
        env: &Env<'_>,
        head: &Head,
        packet: &Packet<'_>,
        refusal: Refusal,
    ) -> Refused {
        let operation = packet.bth.opcode.operation;
        let (va, key, length) = match (packet.reth(), packet.atomic(), &self.message) {
            (Some(reth), ..) => (reth.va, reth.rkey.0, reth.length),
            (None, Some(eth), _) => (eth.va, eth.rkey.0, 8),
            (None, None, Some(Incoming::Write { va, rkey, .. })) => {
                (*va, rkey.0, packet.payload().len() as u32)
            }
            _ => (0, 0, packet.payload().len() as u32),
        };
        let needs = match operation {
            Op::ReadRequest => Access::REMOTE_READ,
            Op::CompareSwap | Op::FetchAdd => Access::REMOTE_ATOMIC,
            Op::Flush => packet
                .feth()
                .map_or(Access::empty(), |feth| Access::for_flush(feth.placement)),
            operation if operation.is_write() || operation == Op::AtomicWrite => Access::REMOTE_WRITE,
            _ => Access::empty(),
        };
        let why = match refusal {
            Refusal::TooLong => Denial::TooLong,
            Refusal::Receive(status) => Denial::Receive(status),
            Refusal::Invalidation => Denial::Invalidation,
            Refusal::RemoteOperation => Denial::Memory,
            Refusal::RemoteAccess => {
                let pd = Scope::of(env, head, packet.xrc_srqn()).map_or(head.init.pd, |scope| scope.pd);
                env.regions.denial(key, pd, head.qpn, (va, length.into()), needs)
            }
            Refusal::InvalidRequest if !head.access.contains(needs) => Denial::NoRightOnQp {
                needs,
                has: head.access,
            },
            Refusal::InvalidRequest | Refusal::NotReady | Refusal::Waits(_) | Refusal::SourceEnded => {
                Denial::Invalid
            }
        };
        Refused {
            psn: packet.bth.psn,
            operation,
            key,
            va,
            length,
            why,
        }
    }
}
