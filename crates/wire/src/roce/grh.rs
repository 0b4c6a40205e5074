//! The 40 bytes before a received datagram: the global route header, which on RoCEv2 is the IP header. IBTA Vol 1, 11.4.2.1 and
//! A17.4.5. The 20 bytes of an IPv4 header are the last ones, and the bytes before them are zero.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::roce::icrc::Flow;

/// Bytes before the payload in the receive buffer of a UD QP.
pub const GRH_LEN: usize = 40;
/// Hop limit in the header: a UDP socket does not show the hop limit of a received packet.
const HOP_LIMIT: u8 = 64;
const UDP_HEADER: usize = 8;
const IPV4_HEADER: usize = 20;

/// Returns the header of a packet with `udp_payload` bytes. Fields that a UDP socket does not show have the values that rdmux sends:
/// IPv4 identification 0, do not fragment, flow label 0, hop limit 64.
pub fn grh(flow: &Flow, traffic_class: u8, udp_payload: usize) -> [u8; GRH_LEN] {
    let mut grh = [0; GRH_LEN];
    let udp_len = (udp_payload + UDP_HEADER) as u16;
    match (flow.src, flow.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let head = &mut grh[GRH_LEN - IPV4_HEADER..];
            head[0] = 0x45;
            head[1] = traffic_class;
            head[2..4].copy_from_slice(&(udp_len + IPV4_HEADER as u16).to_be_bytes());
            head[6] = 0x40;
            head[8] = HOP_LIMIT;
            head[9] = 17;
            head[12..16].copy_from_slice(&src.octets());
            head[16..20].copy_from_slice(&dst.octets());
            // Programs distinguish IPv4 from IPv6 by the correctness of this checksum.
            let checksum = checksum(head);
            head[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        (src, dst) => {
            let v6 = |a| match a {
                IpAddr::V6(a) => a,
                IpAddr::V4(a) => a.to_ipv6_mapped(),
            };
            let word = 6 << 28 | u32::from(traffic_class) << 20;
            grh[0..4].copy_from_slice(&word.to_be_bytes());
            grh[4..6].copy_from_slice(&udp_len.to_be_bytes());
            grh[6] = 17;
            grh[7] = HOP_LIMIT;
            grh[8..24].copy_from_slice(&v6(src).octets());
            grh[24..40].copy_from_slice(&v6(dst).octets());
        }
    }
    grh
}

/// Returns the source address and the traffic class of a header; `None` if it is neither IPv4 nor IPv6. The bytes before an IPv4 header
/// may have any value, so a correct IPv4 checksum decides.
pub fn source(grh: &[u8; GRH_LEN]) -> Option<(IpAddr, u8)> {
    let head = &grh[GRH_LEN - IPV4_HEADER..];
    // The checksum of a header together with its own checksum is 0.
    if head[0] == 0x45 && checksum(head) == 0 {
        return Some((Ipv4Addr::from(*head[12..].first_chunk::<4>()?).into(), head[1]));
    }
    let is_ipv6 = grh[0] >> 4 == 6;
    let source = Ipv6Addr::from(*grh[8..].first_chunk::<16>()?);
    is_ipv6.then_some((source.into(), grh[0] << 4 | grh[1] >> 4))
}

/// Returns the Internet checksum of a header whose checksum field is zero. RFC 1071.
fn checksum(head: &[u8]) -> u16 {
    let words = head
        .chunks_exact(2)
        .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let sum = words.sum::<u32>();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(src: &str, dst: &str) -> Flow {
        Flow {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            src_port: 0xc000,
            dst_port: 4791,
        }
    }

    #[test]
    fn source__of_each_family() {
        for (src, dst) in [("192.0.2.1", "192.0.2.9"), ("2001:db8::1", "2001:db8::9")] {
            for traffic_class in [0, 0xb8, 0xff] {
                let mut header = grh(&flow(src, dst), traffic_class, 100);
                let expected = Some((src.parse().unwrap(), traffic_class));
                assert_eq!(source(&header), expected);
                if src.contains('.') {
                    // An RNIC may leave anything there.
                    header[..20].fill(0x60);
                    assert_eq!(source(&header), expected);
                }
            }
        }
    }

    #[test]
    fn source__of_something_else_is_none() {
        assert_eq!(source(&[0; GRH_LEN]), None);
        let mut header = grh(&flow("192.0.2.1", "192.0.2.9"), 0, 100);
        header[39] ^= 1;
        assert_eq!(source(&header), None, "the checksum is wrong");
    }

    #[test]
    fn grh__ipv4_stands_behind_20_zero_bytes() {
        let grh = grh(&flow("10.0.0.1", "10.0.0.2"), 0, 64);
        assert_eq!(grh[..20], [0; 20]);
        assert_eq!(
            grh[20..],
            [
                0x45, 0, 0, 92, 0, 0, 0x40, 0, 64, 17, 0x26, 0x8f, 10, 0, 0, 1, 10, 0, 0, 2
            ]
        );
        // RFC 1071: the sum over a correct header is all ones.
        assert_eq!(checksum(&grh[20..]), 0);
    }

    #[test]
    fn grh__ipv6_is_the_header() {
        let grh = grh(&flow("fd00::1", "ff0e::7"), 0xa5, 300);
        assert_eq!(grh[..8], [0x6a, 0x50, 0, 0, 1, 52, 17, 64]);
        assert_eq!(grh[8], 0xfd);
        assert_eq!(grh[23..26], [1, 0xff, 0x0e]);
        assert_eq!(grh[39], 7);
    }
}
