//! WRITEs. Their bytes are written at once or gathered, or the driver writes them to a medium. IBTA Vol 1, 9.7.4.

use rdmux_wire::RKey;
use rdmux_wire::roce::{MESSAGE_BYTES_MAX, Position, Reth};

use super::{
    Awaited, ENOUGH_BYTES, Effect, Execution, Found, GatheredPlace, Incoming, Refusal, Scope, region,
};
use crate::access::{Accesses, What};
use crate::cq::{Status, WcOpcode, WorkCompletion};
use crate::memory::Access;
use crate::qp::message::Payload;
use crate::qp::{Env, Head, bare_completion};
use crate::region::Regions;

/// A packet of a WRITE.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WritePacket<'a> {
    pub(crate) position: Position,
    pub(crate) reth: Option<Reth>,
    pub(crate) payload: Payload<'a>,
    pub(crate) imm: Option<u32>,
    pub(crate) solicited: bool,
}

impl Execution {
    /// Carries out a packet of a WRITE.
    pub(super) fn write(
        &mut self,
        env: &mut Env<'_>,
        head: &Head,
        scope: Scope,
        packet: WritePacket<'_>,
    ) -> Result<Effect, Refusal> {
        let found = match packet.reth {
            Some(reth) => self.begin_write(env.regions, head, scope, reth)?,
            None => None,
        };
        let Some(Incoming::Write {
            va,
            rkey,
            left,
            total,
            scope,
        }) = self.message
        else {
            return Err(Refusal::InvalidRequest);
        };
        // A message must have the length that it announced: no more bytes, and no fewer at its end. 9.7.4.1.6.
        let (length, ends) = (packet.payload.len() as u32, packet.position.ends());
        if length > left || (ends && length != left) {
            return Err(Refusal::InvalidRequest);
        }
        // A receive must be posted before the last packet takes effect, since the peer sends only that packet again.
        if packet.imm.is_some() && !self.has_recv(env, scope.srq) {
            self.expect_again(packet.position);
            return Err(Refusal::NotReady);
        }
        let mut places = false;
        if length > 0 && !mutant!(AckBeforePlacement) {
            let reth = Reth { va, rkey, length };
            let target = match found {
                Some(found) => found,
                None => region(env.regions, scope.pd, scope.qpn, reth, Access::REMOTE_WRITE)?,
            };
            places = self.take_payload(env.accesses, scope, (va, rkey), target, packet)?;
        }
        if let Some(Incoming::Write { va, left, .. }) = &mut self.message {
            *va = va.wrapping_add(u64::from(length));
            *left -= length;
        }
        if places {
            self.place_gathered(env)?;
        }
        if !ends {
            return Ok(Effect::Partial);
        }
        self.message = None;
        if packet.imm.is_some()
            && let Some(recv) = self.take_recv(env, scope.srq)
        {
            let wc = WorkCompletion {
                byte_len: total,
                imm: packet.imm,
                ..bare_completion(scope.qpn, recv.wr_id, Status::Success, WcOpcode::RecvRdmaWithImm)
            };
            env.complete(scope.recv_cq, wc, packet.solicited);
        }
        Ok(Effect::Complete)
    }

    /// Begins a WRITE. Returns the memory that all of it goes to, unless it has no bytes.
    fn begin_write<'a>(
        &mut self,
        regions: &'a Regions,
        head: &Head,
        scope: Scope,
        reth: Reth,
    ) -> Result<Option<Found<'a>>, Refusal> {
        self.begins(true)?;
        if !head.access.contains(Access::REMOTE_WRITE) || reth.length > MESSAGE_BYTES_MAX {
            return Err(Refusal::InvalidRequest);
        }
        let mut found = None;
        if reth.length > 0 {
            found = Some(region(regions, scope.pd, scope.qpn, reth, Access::REMOTE_WRITE)?);
        }
        self.message = Some(Incoming::Write {
            va: reth.va,
            rkey: reth.rkey,
            left: reth.length,
            total: reth.length,
            scope,
        });
        Ok(found)
    }

    /// Prepares for a packet that is handled again later: the only packet of a message begins it again.
    fn expect_again(&mut self, position: Position) {
        if position == Position::Only {
            self.message = None;
        }
    }

    /// Writes the bytes of a packet, gathers them, or has the driver write them to a medium. Returns whether the gathered bytes are to
    /// be placed now.
    fn take_payload(
        &mut self,
        accesses: &mut Accesses,
        scope: Scope,
        (va, rkey): (u64, RKey),
        (memory, offset): Found<'_>,
        packet: WritePacket<'_>,
    ) -> Result<bool, Refusal> {
        let ends = packet.position.ends();
        let medium = memory.medium().filter(|_| self.defers);
        if let Some(done) = Awaited::result_of(&mut self.awaited, va, rkey) {
            done?;
            return Ok(false);
        }
        let enough = medium.is_none() && packet.payload.len() >= ENOUGH_BYTES;
        if let Payload::Packet(payload) = packet.payload
            && memory.gathers()
            && (!ends && !enough || !self.gathered.bytes.is_empty())
        {
            if let Some(medium) = medium
                && self.gathered.bytes.is_empty()
            {
                let id = accesses.announce();
                self.gathered.access = Some((id, medium));
                self.announced = self.gathered.access;
            }
            let pd = scope.pd;
            let place = GatheredPlace::Region { va, rkey, pd };
            return Ok(self.gathered.push(place, payload) || ends);
        }
        let Some(medium) = medium else {
            packet.payload.write_to(&**memory, offset)?;
            return Ok(false);
        };
        let of = (memory.clone(), medium);
        let what = What::Write(packet.payload.to_vec()?);
        let id = accesses.announce();
        accesses.start(id, scope.qpn, of, offset, what);
        if packet.imm.is_some() {
            // The receive completes when the bytes are there: the packet is handled again then.
            self.expect_again(packet.position);
            self.awaits(va, rkey);
            return Err(Refusal::Waits(id));
        }
        self.announced = Some((id, medium));
        Ok(false)
    }
}
