//! A whole packet.

use crate::bytes::{be24, be32, be64, need};
use crate::{Malformed, Psn, RKey};

use super::ICRC_LEN;
use super::headers::{Aeth, AtomicEth, Bth, Deth, Feth, Reth};
use super::opcode::Ext;
use super::{carried, coalesced};

/// One RoCEv2 packet: the bytes of a UDP payload, checked to have the length that the opcode requires.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Base header.
    pub bth: Bth,
    ext: Ext,
    bytes: &'a [u8],
    count: u32,
    carried: Option<Psn>,
}

impl<'a> Packet<'a> {
    /// Checks lengths, opcode, version, and those extension headers that can be invalid by themselves.
    pub fn parse(bytes: &'a [u8]) -> Result<Packet<'a>, Malformed> {
        let bth = Bth::parse(bytes)?;
        let ext = bth.opcode.ext();
        let packet = Packet {
            bth,
            ext,
            bytes,
            count: 1,
            carried: None,
        };
        need(
            "packet",
            bytes,
            Bth::LEN + ext.len() + usize::from(bth.pad) + ICRC_LEN,
        )?;
        if ext.contains(Ext::AETH) {
            Aeth::parse(packet.ext_bytes(Ext::AETH))?;
        }
        if ext.contains(Ext::FETH) {
            Feth::parse(packet.ext_bytes(Ext::FETH))?;
        }
        Ok(packet)
    }

    /// Like [`Packet::parse`], for a packet that came through memory of the host and may be coalesced.
    pub fn parse_local(bytes: &'a [u8]) -> Result<Packet<'a>, Malformed> {
        let packet = Packet::parse(bytes)?;
        let count = coalesced::count(bytes);
        if count > 1 && !coalesced::may_be(packet.bth.opcode) {
            return Err(Malformed::Undefined {
                what: "coalesced packet's opcode",
                value: packet.bth.opcode.code().into(),
            });
        }
        Ok(Packet { count, ..packet })
    }

    /// Returns the number of packets that this one stands for: 1 unless it is coalesced.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Takes the acknowledgement that the packet carries, if it carries one, out of the payload. Only for a packet of an endpoint that
    /// agreed to [`carried`] acknowledgements: for others the bit that announces them is reserved.
    pub fn take_carried(&mut self) -> Result<(), Malformed> {
        if self.carried.is_none() && carried::is_in(self.bytes) {
            let before = Bth::LEN + self.ext.len() + usize::from(self.bth.pad);
            self.carried = Some(carried::parse(self.bytes, self.bth.opcode, before)?);
        }
        Ok(())
    }

    /// Returns the PSN of the acknowledgement that [`Packet::take_carried`] took.
    pub fn carried(&self) -> Option<Psn> {
        self.carried
    }

    /// Returns a copy that [`Packet::parse_local`] parses to the same packet, but for the acknowledgement that was taken.
    pub fn to_local(&self) -> Box<[u8]> {
        let end = self.bytes.len() - ICRC_LEN;
        let (whole, icrc) = self.bytes.split_at(end);
        let kept = &whole[..end - self.carried.map_or(0, |_| carried::LEN)];
        let mut copy: Box<[u8]> = [kept, icrc].concat().into();
        coalesced::set_count(&mut copy, self.count);
        copy
    }

    pub(super) fn ext_bytes(&self, ext: Ext) -> &'a [u8] {
        &self.bytes[Bth::LEN + self.ext.offset(ext)..]
    }

    /// Returns the payload without pad, ICRC and the acknowledgement that was taken.
    pub fn payload(&self) -> &'a [u8] {
        let carried = self.carried.map_or(0, |_| carried::LEN);
        let end = self.bytes.len() - ICRC_LEN - carried - usize::from(self.bth.pad);
        &self.bytes[Bth::LEN + self.ext.len()..end]
    }

    /// Returns the ICRC in the packet (little endian on the wire).
    pub fn icrc(&self) -> u32 {
        let at = self.bytes.len() - ICRC_LEN;
        u32::from_le_bytes([
            self.bytes[at],
            self.bytes[at + 1],
            self.bytes[at + 2],
            self.bytes[at + 3],
        ])
    }

    /// Returns all bytes of the UDP payload, ICRC included.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the RDMA header, if the opcode has one.
    pub fn reth(&self) -> Option<Reth> {
        self.ext
            .contains(Ext::RETH)
            .then(|| Reth::parse(self.ext_bytes(Ext::RETH)))
    }

    /// Returns the datagram header, if the opcode has one.
    pub fn deth(&self) -> Option<Deth> {
        self.ext
            .contains(Ext::DETH)
            .then(|| Deth::parse(self.ext_bytes(Ext::DETH)))
    }

    /// Returns the acknowledge header, if the opcode has one.
    pub fn aeth(&self) -> Option<Aeth> {
        if !self.ext.contains(Ext::AETH) {
            return None;
        }
        Aeth::parse(self.ext_bytes(Ext::AETH)).ok()
    }

    /// Returns the FLUSH header, if the opcode has one.
    pub fn feth(&self) -> Option<Feth> {
        if !self.ext.contains(Ext::FETH) {
            return None;
        }
        Feth::parse(self.ext_bytes(Ext::FETH)).ok()
    }

    /// Returns the atomic header, if the opcode has one.
    pub fn atomic(&self) -> Option<AtomicEth> {
        self.ext
            .contains(Ext::ATOMIC)
            .then(|| AtomicEth::parse(self.ext_bytes(Ext::ATOMIC)))
    }

    /// Returns the original value in an atomic acknowledgement.
    pub fn atomic_ack(&self) -> Option<u64> {
        self.ext
            .contains(Ext::ATOMIC_ACK)
            .then(|| be64(self.ext_bytes(Ext::ATOMIC_ACK), 0))
    }

    /// Returns the immediate data, if the opcode has it.
    pub fn imm(&self) -> Option<u32> {
        self.ext
            .contains(Ext::IMM)
            .then(|| be32(self.ext_bytes(Ext::IMM), 0))
    }

    /// Returns the key to invalidate, if the opcode has it.
    pub fn invalidate(&self) -> Option<RKey> {
        self.ext
            .contains(Ext::IETH)
            .then(|| RKey(be32(self.ext_bytes(Ext::IETH), 0)))
    }

    /// Returns the XRC SRQ number, if the opcode has it.
    pub fn xrc_srqn(&self) -> Option<u32> {
        self.ext
            .contains(Ext::XRCETH)
            .then(|| be24(self.ext_bytes(Ext::XRCETH), 1))
    }
}
