//! Connects queue pairs by hand: connection management has its own runs.

use rdmux_rnic::{Access, Path, Psn, QpAttributes, QpState, Qpn};

use crate::dice::Dice;
use crate::tap::Agreed;
use crate::world::World;

/// Terms that both ends of a connection have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) mtu: u32,
    pub(crate) window_bytes: u32,
    pub(crate) src_port: u16,
}

/// Brings the QPs of hosts 0 and 1 to RTS, connected to each other.
pub(crate) fn bring_up(world: &mut World, dice: &mut Dice, qpns: [Qpn; 2], terms: Terms) {
    let (selective, carried_acks) = (dice.one_in(2), dice.one_in(2));
    let psns = [0, 1].map(|_| Psn::new(dice.next() as u32));
    let depth = dice.pick(&[1u8, 2, 4, 16]);
    for host in 0..2 {
        let (own, peer) = (qpns[host], qpns[1 - host]);
        let path = Path {
            src: world.hosts[host].address,
            dst: world.hosts[1 - host].address,
            src_port: terms.src_port,
            traffic_class: 0,
        };
        let agreed = Agreed {
            path,
            selective,
            carried_acks,
        };
        world.tap.agree(host, peer, agreed);
        let access = Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL
            | Access::FLUSH_PERSISTENT;
        let init = QpAttributes {
            access: Some(access),
            ..Default::default()
        };
        let to_receive = QpAttributes {
            path: Some(path),
            path_mtu: Some(terms.mtu),
            dest_qpn: Some(peer),
            rq_psn: Some(psns[1 - host]),
            max_dest_rd_atomic: Some(depth),
            min_rnr_timer: Some(1),
            window_bytes: Some(terms.window_bytes),
            peer_is_rdmux: Some(true),
            selective: Some(selective),
            carried_acks: Some(carried_acks),
            ..Default::default()
        };
        let to_send = QpAttributes {
            sq_psn: Some(psns[host]),
            timeout: Some(14),
            retry_count: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(depth),
            ..Default::default()
        };
        let steps = [
            (QpState::Init, init),
            (QpState::Rtr, to_receive),
            (QpState::Rts, to_send),
        ];
        for (to, attributes) in steps {
            let modified = world.with(host, |rnic, now| rnic.modify_qp(now, own, to, &attributes));
            modified.expect("the attributes are those that the transition asks for");
        }
    }
}
