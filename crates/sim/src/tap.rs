//! Checks of packets that need only the wire.

use std::collections::BTreeMap;

use rdmux_rnic::{Path, Psn, Qpn};
use rdmux_wire::roce::{Aeth, Bth, Deth, ICRC_LEN, carried};

use crate::seen::Seen;

/// Opcodes of an Acknowledge, on RC and on XRC, and of a congestion notification.
const ACKNOWLEDGE: [u8; 2] = [0x11, 0xb1];
const CNP: u8 = 0x81;
/// Bits of the opcode that name the operation, and the range of responses.
const OPERATION: u8 = 0x1f;
const ANSWERS: std::ops::RangeInclusive<u8> = 0x0d..=0x12;
/// UD SEND Only, and the offset at which a MAD that it carries names the message.
const DATAGRAM: u8 = 0x64;
const ATTRIBUTE_AT: usize = Bth::LEN + Deth::LEN + 16;
/// Bits of the traffic class that are ECN's.
const ECN: u8 = 3;

/// Terms on which a host may send to a QP of the other host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreed {
    pub(crate) path: Path,
    pub(crate) selective: bool,
    pub(crate) carried_acks: bool,
}

/// Looks at every packet that leaves a host.
#[derive(Debug, Default)]
pub(crate) struct Tap {
    /// By sending host and destination QPN: the terms that both ends agreed on. After a restart a QPN may belong to another QP,
    /// while the peer of the first has not given up yet.
    agreed: BTreeMap<(usize, u32), Vec<Agreed>>,
    /// By sending host and destination QPN: the PSN of the last request.
    requested: BTreeMap<(usize, u32), Psn>,
    /// Packets by opcode, and CM messages by attribute id.
    opcodes: BTreeMap<u8, u64>,
    messages: BTreeMap<u16, u64>,
    /// First packet that a host was not allowed to send.
    pub(crate) violation: Option<String>,
}

impl Tap {
    /// Records that from now on `host` sends to `qpn` as agreed.
    pub(crate) fn agree(&mut self, host: usize, qpn: Qpn, agreed: Agreed) {
        self.agreed.entry((host, qpn.value())).or_default().push(agreed);
    }

    /// Records that from now on `host` sends to `qpn` over `path`, instead of `before`.
    pub(crate) fn reroute(&mut self, host: usize, qpn: Qpn, before: Path, path: Path) {
        let all = self.agreed.entry((host, qpn.value())).or_default();
        let moved = |agreed: &&mut Agreed| without_ecn(agreed.path) == without_ecn(before);
        if let Some(agreed) = all.iter_mut().find(moved) {
            agreed.path = path;
        }
    }

    /// Returns the PSN of the last request that a host sent to a QP.
    pub(crate) fn requested(&self, host: usize, qpn: Qpn) -> Option<Psn> {
        self.requested.get(&(host, qpn.value())).copied()
    }

    pub(crate) fn count(&self, seen: &mut Seen) {
        for (code, times) in &self.opcodes {
            seen.packets(*code, *times);
        }
        for (attribute, times) in &self.messages {
            seen.messages(*attribute, *times);
        }
    }

    pub(crate) fn look(&mut self, host: usize, path: Option<&Path>, packet: &[u8]) {
        let &[
            opcode,
            _,
            _,
            _,
            _,
            high,
            middle,
            low,
            _,
            psn_high,
            psn_middle,
            psn_low,
            ..,
        ] = packet
        else {
            return;
        };
        let qpn = u32::from_be_bytes([0, high, middle, low]);
        *self.opcodes.entry(opcode).or_default() += 1;
        if (opcode, qpn) == (DATAGRAM, Qpn::GSI.value())
            && let Some([high, low]) = packet.get(ATTRIBUTE_AT..ATTRIBUTE_AT + 2)
        {
            let attribute = u16::from_be_bytes([*high, *low]);
            *self.messages.entry(attribute).or_default() += 1;
        }
        let Some(agreed) = self.agreed.get(&(host, qpn)).filter(|_| opcode != CNP) else {
            return;
        };
        if !ANSWERS.contains(&(opcode & OPERATION)) {
            let psn = Psn::new(u32::from_be_bytes([0, psn_high, psn_middle, psn_low]));
            self.requested.insert((host, qpn), psn);
        }
        let bare = Bth::LEN + Aeth::LEN + ICRC_LEN;
        let has_bitmap = ACKNOWLEDGE.contains(&opcode) && packet.len() > bare;
        let what = if has_bitmap && !agreed.iter().any(|agreed| agreed.selective) {
            "a bitmap to a peer that did not agree to it"
        } else if carried::is_in(packet) && !agreed.iter().any(|agreed| agreed.carried_acks) {
            "an acknowledgement in a request to a peer that did not agree to it"
        } else if path
            .is_some_and(|path| !(agreed.iter()).any(|agreed| without_ecn(*path) == without_ecn(agreed.path)))
        {
            "over another path than was set"
        } else {
            return;
        };
        self.violation
            .get_or_insert_with(|| format!("host {host} sent {what}, to {qpn:#x}: {path:?}"));
    }
}

fn without_ecn(path: Path) -> Path {
    Path {
        traffic_class: path.traffic_class & !ECN,
        ..path
    }
}
