//! What tools are told of the objects that this process has on an RNIC.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use rdmux_rnic::{Access, CqDetail, Cqn, Pd, PdDetail, QpState, QpType, Qpn, RegionDetail, RegionKind};
use rdmux_wire::cm::from_gid;
use rdmux_wire::roce::PathMtu;

use super::device::Inner;
use super::metrics::counters_of;
use super::objects::Qp;
use super::qp::state_of;
use crate::abi::qp_attr;
use crate::device::Carrier;
use crate::soft::resources::answer::Answering;
use crate::soft::resources::{CounterResource, Counts, DeviceResource, Direct, Item, Object, QpResource};

/// What is kept of an object that lives.
#[derive(Debug)]
pub(super) enum Entry {
    /// A protection domain, known by the number of its entry.
    Pd,
    Cq {
        number: u32,
        depth: u32,
    },
    Mr {
        pdn: u32,
        rkey: u32,
        iova: u64,
        length: u64,
        access: Access,
    },
    Qp {
        qp: Weak<Qp>,
        qp_type: QpType,
        pdn: u32,
        send_cqn: u32,
        recv_cqn: u32,
        srqn: Option<u32>,
    },
}

/// Tells whoever asks, from now on.
pub(super) fn answer(device: &Arc<Inner>) -> io::Result<Answering> {
    let weak = Arc::downgrade(device);
    Answering::begin(device.address, move |object| {
        weak.upgrade()
            .map_or_else(Vec::new, |device| items(&device, object))
    })
}

/// How many objects there are.
pub(super) fn counts(device: &Inner) -> Counts {
    let mut counts = Counts::default();
    for entry in device.entries().values() {
        let count = match entry {
            Entry::Pd => &mut counts.pds,
            Entry::Cq { .. } => &mut counts.cqs,
            Entry::Mr { .. } => &mut counts.mrs,
            Entry::Qp { .. } => &mut counts.qps,
        };
        *count += 1;
    }
    counts
}

fn items(device: &Inner, object: Object) -> Vec<Item> {
    let entries = device.entries();
    let users =
        |is_used: &dyn Fn(&Entry) -> bool| entries.values().filter(|entry| is_used(entry)).count() as u32;
    let item = |(entry_number, entry): (&u32, &Entry)| match (object, entry) {
        (Object::Pd, Entry::Pd) => Some(Item::Pd(PdDetail {
            pd: Pd(*entry_number),
            users: users(&|other| match other {
                Entry::Mr { pdn, .. } | Entry::Qp { pdn, .. } => pdn == entry_number,
                Entry::Pd | Entry::Cq { .. } => false,
            }),
        })),
        (Object::Cq, Entry::Cq { number, depth }) => Some(Item::Cq(CqDetail {
            cqn: Cqn(*number),
            depth: *depth,
            // Devices do not tell these.
            waiting: 0,
            overrun: false,
            users: users(
                &|other| matches!(other, Entry::Qp { send_cqn, recv_cqn, .. } if send_cqn == number || recv_cqn == number),
            ),
        })),
        (
            Object::Mr,
            Entry::Mr {
                pdn,
                rkey,
                iova,
                length,
                access,
            },
        ) => Some(Item::Mr(RegionDetail {
            mrn: rkey >> 8,
            kind: RegionKind::Memory,
            rkey: *rkey,
            pd: Pd(*pdn),
            iova: *iova,
            length: *length,
            access: *access,
        })),
        (Object::Qp, Entry::Qp { .. }) => queue_pair(entry).map(Item::Qp),
        _ => None,
    };
    match object {
        Object::Device => {
            drop(entries);
            vec![Item::Device(of_device(device))]
        }
        Object::Counter => {
            let counters = counters_of(device).into_iter();
            counters
                .map(|(name, value)| Item::Counter(CounterResource { name, value }))
                .collect()
        }
        _ => entries.iter().filter_map(item).collect(),
    }
}

fn of_device(device: &Inner) -> DeviceResource {
    const PORT_ACTIVE: u32 = 4;
    let port = device.context.query_port(device.port).unwrap_or_default();
    let mtu = PathMtu::from_code(port.active_mtu as u8);
    DeviceResource {
        guid: u64::from_be(device.attr.orig_attr.node_guid),
        mtu: mtu.map_or(0, PathMtu::bytes),
        active: port.state == PORT_ACTIVE,
        version: env!("CARGO_PKG_VERSION").into(),
        counts: counts(device),
    }
}

fn queue_pair(entry: &Entry) -> Option<QpResource> {
    let Entry::Qp {
        qp,
        qp_type,
        pdn,
        send_cqn,
        recv_cqn,
        srqn,
    } = entry
    else {
        return None;
    };
    let qp = qp.upgrade()?;
    let asked = qp_attr::STATE | qp_attr::DEST_QPN | qp_attr::AV | qp_attr::PATH_MTU;
    let attr = qp.query(asked | qp_attr::SQ_PSN | qp_attr::RQ_PSN).ok()?;
    let state = state_of(attr.qp_state);
    let gid = attr.ah_attr.grh.dgid.0;
    let has_peer = attr.ah_attr.is_global != 0
        && gid != [0; 16]
        && *qp_type != QpType::Ud
        && !matches!(state, QpState::Reset | QpState::Init);
    let peer: Option<(IpAddr, Qpn)> = has_peer.then(|| (from_gid(gid.into()), Qpn::new(attr.dest_qp_num)));
    Some(QpResource {
        qpn: Qpn::new(qp.number()),
        qp_type: *qp_type,
        state,
        carrier: peer.map(|_| Carrier::Rnic),
        peer,
        path_mtu: PathMtu::from_code(attr.path_mtu as u8).map_or(0, PathMtu::bytes),
        direct: Direct::default(),
        pdn: *pdn,
        send_cqn: *send_cqn,
        recv_cqn: *recv_cqn,
        srqn: *srqn,
        sq_psn: attr.sq_psn & 0xff_ffff,
        rq_psn: attr.rq_psn & 0xff_ffff,
        sends: 0,
        receives: 0,
    })
}
