//! The invariant CRC of RoCEv2, and how a receiver checks it without knowing the IPv4 identification. IBTA Vol 1, A17.5.1.
//!
//! The ICRC is a CRC-32 (IEEE 802.3, as in zlib) over eight bytes of ones in place of the LRH, the IP and UDP headers and
//! the packet, with the fields that a router may change replaced by ones. The IPv4 identification is *not* among those, yet
//! a UDP socket never shows it to the receiver. The CRC is linear, though: flipping a bit of the identification changes it by
//! a value that depends on the packet's length alone. So a receiver can solve for the identification that makes the ICRC
//! right ([`IdBasis`]); of the 32 check bits 16 remain against an unknown peer, and 25 against one that is known to number
//! the packets of a GSO train from 0 to 127.

use std::net::IpAddr;

use crc32fast::Hasher;

/// CRC-32 of eight 0xff bytes: the masked LRH with which every ICRC begins.
const LRH_CRC: u32 = 0x2144_df1c;
const IPV4_HEADER: usize = 20;
const UDP_HEADER: usize = 8;

/// Addresses and ports of a packet, as far as its ICRC covers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Flow {
    /// Sender's address.
    pub src: IpAddr,
    /// Receiver's address, of the same family.
    pub dst: IpAddr,
    /// UDP source port.
    pub src_port: u16,
    /// UDP destination port, 4791 except in tests.
    pub dst_port: u16,
}

impl Flow {
    /// Returns the CRC state after the LRH, IP and UDP headers of a packet with `udp_payload` bytes. `ip_id` is the IPv4
    /// identification; IPv6 has neither an identification nor a DF bit.
    fn prefix(&self, udp_payload: usize, ip_id: u16, dont_fragment: bool) -> Hasher {
        let mut hasher = Hasher::new_with_initial(LRH_CRC);
        let udp_len = (udp_payload + UDP_HEADER) as u16;
        let mut head = [0u8; 48];
        let at = match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                head[0] = 0x45;
                head[1] = 0xff; // TOS
                head[2..4].copy_from_slice(&((udp_payload + UDP_HEADER + IPV4_HEADER) as u16).to_be_bytes());
                head[4..6].copy_from_slice(&ip_id.to_be_bytes());
                head[6] = u8::from(dont_fragment) << 6;
                head[8] = 0xff; // TTL
                head[9] = 17;
                head[10..12].copy_from_slice(&[0xff, 0xff]); // header checksum
                head[12..16].copy_from_slice(&src.octets());
                head[16..20].copy_from_slice(&dst.octets());
                IPV4_HEADER
            }
            (src, dst) => {
                let v6 = |a| match a {
                    IpAddr::V6(a) => a,
                    IpAddr::V4(a) => a.to_ipv6_mapped(),
                };
                head[0..4].copy_from_slice(&[0x6f, 0xff, 0xff, 0xff]); // traffic class, flow label
                head[4..6].copy_from_slice(&udp_len.to_be_bytes());
                head[6] = 17;
                head[7] = 0xff; // hop limit
                head[8..24].copy_from_slice(&v6(src).octets());
                head[24..40].copy_from_slice(&v6(dst).octets());
                40
            }
        };
        head[at..at + 2].copy_from_slice(&self.src_port.to_be_bytes());
        head[at + 2..at + 4].copy_from_slice(&self.dst_port.to_be_bytes());
        head[at + 4..at + 6].copy_from_slice(&udp_len.to_be_bytes());
        head[at + 6..at + 8].copy_from_slice(&[0xff, 0xff]); // UDP checksum
        hasher.update(&head[..at + UDP_HEADER]);
        hasher
    }

    /// Returns the ICRC of `packet`, which is a UDP payload *without* its last four bytes, the ICRC itself. Assumes that DF is set:
    /// RoCEv2 is never fragmented (IBTA Vol 1, A17.4.4), and a UDP receiver could not see DF.
    pub fn icrc(&self, packet: &[u8], ip_id: u16) -> u32 {
        self.icrc_as_captured(packet, ip_id, true)
    }

    /// Like [`Flow::icrc`], for a packet whose IPv4 header is known.
    pub fn icrc_as_captured(&self, packet: &[u8], ip_id: u16, dont_fragment: bool) -> u32 {
        self.covered(packet, ip_id, dont_fragment).finalize()
    }

    /// Returns the ICRC that Linux's rxe, up to 6.12 at least, computes for a FLUSH: it covers the packet's headers a second time, with
    /// nothing masked. rxe's table of opcodes has no payload offset for FLUSH, so rxe treats the headers as payload too.
    pub fn rxe_flush_icrc(&self, packet: &[u8], ip_id: u16) -> u32 {
        self.rxe_flush_icrc_as_captured(packet, ip_id, true)
    }

    /// Like [`Flow::rxe_flush_icrc`], for a packet whose IPv4 header is known.
    pub fn rxe_flush_icrc_as_captured(&self, packet: &[u8], ip_id: u16, dont_fragment: bool) -> u32 {
        let mut hasher = self.covered(packet, ip_id, dont_fragment);
        hasher.update(packet);
        hasher.finalize()
    }

    fn covered(&self, packet: &[u8], ip_id: u16, dont_fragment: bool) -> Hasher {
        debug_assert!(packet.len() >= crate::roce::Bth::LEN);
        let mut hasher = self.prefix(packet.len() + crate::roce::ICRC_LEN, ip_id, dont_fragment);
        let (bth, rest) = packet.split_at(crate::roce::Bth::LEN.min(packet.len()));
        let mut masked = [0u8; crate::roce::Bth::LEN];
        masked[..bth.len()].copy_from_slice(bth);
        masked[4] = 0xff; // FECN, BECN and reserved bits
        hasher.update(&masked[..bth.len()]);
        hasher.update(rest);
        hasher
    }
}

/// Dependence of the ICRC on the IPv4 identification, for packets of one length: 16 values, one for each bit, in echelon form.
#[derive(Clone, Debug)]
pub struct IdBasis {
    /// Reduced rows: the highest set bit of each differs, `(crc difference, identification bits that cause it)`.
    rows: [(u32, u16); 16],
}

impl IdBasis {
    /// Returns the basis for packets with `udp_payload` bytes, ICRC included.
    pub fn new(udp_payload: usize) -> IdBasis {
        IdBasis::with_covered(udp_payload.saturating_sub(crate::roce::ICRC_LEN))
    }

    /// Returns the basis for FLUSHes with `udp_payload` bytes whose ICRC is that of [`Flow::rxe_flush_icrc`].
    pub fn of_rxe_flush(udp_payload: usize) -> IdBasis {
        IdBasis::with_covered(2 * udp_payload.saturating_sub(crate::roce::ICRC_LEN))
    }

    fn with_covered(packet: usize) -> IdBasis {
        // Bytes that the CRC covers after the identification: the rest of the IP and UDP headers, and the packet.
        let tail = IPV4_HEADER - 6 + UDP_HEADER + packet;
        let zeros = vec![0u8; tail];
        let crc = |id: u16| {
            let mut hasher = Hasher::new();
            hasher.update(&id.to_be_bytes());
            hasher.update(&zeros);
            hasher.finalize()
        };
        let zero = crc(0);
        let mut rows = [(0u32, 0u16); 16];
        for bit in 0..16 {
            let mut row = (crc(1 << bit) ^ zero, 1u16 << bit);
            for done in &rows[..bit] {
                if row.0 & top_bit(done.0) != 0 {
                    row = (row.0 ^ done.0, row.1 ^ done.1);
                }
            }
            rows[bit] = row;
        }
        IdBasis { rows }
    }

    /// Returns the identification that explains `difference`, which is the received ICRC XOR the ICRC computed with identification 0.
    /// `None` if no identification explains it: the packet is corrupt.
    pub fn solve(&self, difference: u32) -> Option<u16> {
        let (mut left, mut id) = (difference, 0);
        for row in &self.rows {
            if left & top_bit(row.0) != 0 {
                left ^= row.0;
                id ^= row.1;
            }
        }
        (left == 0).then_some(id)
    }
}

fn top_bit(value: u32) -> u32 {
    if value == 0 { 0 } else { 1 << value.ilog2() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow() -> Flow {
        Flow {
            src: [10, 9, 0, 1].into(),
            dst: [10, 9, 0, 2].into(),
            src_port: 0xc123,
            dst_port: 4791,
        }
    }

    #[test]
    fn lrh_crc__is_crc_of_eight_ones() {
        assert_eq!(crc32fast::hash(&[0xff; 8]), LRH_CRC);
    }

    #[test]
    fn icrc__ignores_fecn_and_becn_only() {
        let mut packet = [7u8; 64];
        let before = flow().icrc(&packet, 0);
        packet[4] ^= 0xc0;
        assert_eq!(flow().icrc(&packet, 0), before);
        packet[5] ^= 1;
        assert_ne!(flow().icrc(&packet, 0), before);
    }

    #[test]
    fn icrc__as_scapy_computes_it() {
        for vector in crate::vectors::all() {
            let (packet, icrc) = vector.packet.split_last_chunk::<4>().unwrap();
            let computed = vector.flow.icrc(packet, vector.ip_id);
            assert_eq!(computed.to_le_bytes(), *icrc, "{}", vector.name);
            if vector.flow.src.is_ipv4() {
                let difference = u32::from_le_bytes(*icrc) ^ vector.flow.icrc(packet, 0);
                let basis = IdBasis::new(vector.packet.len());
                assert_eq!(basis.solve(difference), Some(vector.ip_id), "{}", vector.name);
            }
        }
    }

    #[test]
    fn rxe_flush_icrc__as_rxe_sends_it() {
        // Captured from rxe0 of Linux 6.12.107.
        let flow = Flow {
            src_port: 0xe7ec,
            ..flow()
        };
        let packet = [
            0x1c, 0x00, 0xff, 0xff, 0x00, 0x07, 0x22, 0xf8, 0x80, 0x16, 0x6d, 0xd2, 0, 0, 0, 1, 0, 0, 0x7f,
            0xba, 0x7f, 0x58, 0x80, 0x00, 0xee, 0xaa, 0x84, 0x12, 0x00, 0x10, 0x00, 0x00,
        ];
        let icrc = 0xae0e_191a;
        assert_eq!(flow.rxe_flush_icrc(&packet, 60_930), icrc);
        assert_ne!(flow.icrc(&packet, 60_930), icrc);
        let basis = IdBasis::of_rxe_flush(packet.len() + 4);
        assert_eq!(basis.solve(icrc ^ flow.rxe_flush_icrc(&packet, 0)), Some(60_930));
    }

    #[test]
    fn solve__finds_every_identification() {
        for len in [16usize, 20, 60, 300, 1_040, 4_128] {
            let packet: Vec<u8> = (0..len - 4).map(|i| (i * 31 + len) as u8).collect();
            let basis = IdBasis::new(len);
            let zero = flow().icrc(&packet, 0);
            for id in (0..=u16::MAX).step_by(257).chain([1, 2, 127, 0x8000]) {
                assert_eq!(
                    basis.solve(zero ^ flow().icrc(&packet, id)),
                    Some(id),
                    "len {len} id {id}"
                );
            }
        }
    }

    #[test]
    fn solve__refuses_most_corruption() {
        let packet = [3u8; 256];
        let basis = IdBasis::new(260);
        let zero = flow().icrc(&packet, 0);
        let mut passed = 0;
        for bit in 0..256 * 8 {
            let mut bad = packet;
            bad[bit / 8] ^= 1 << (bit % 8);
            let masked = bit / 8 == 4;
            passed += usize::from(!masked && basis.solve(zero ^ flow().icrc(&bad, 0)).is_some());
        }
        assert_eq!(passed, 0, "a flipped bit passes with probability 2^-16 only");
    }
}
