//! Reports to tools about the objects that this process has on an RNIC.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use rdmux_rnic::{Access, CqDetail, Cqn, Pd, PdDetail, QpState, QpType, Qpn, RegionDetail, RegionKind};
use rdmux_verbs::Carrier;
use rdmux_verbs::abi::qp_attr;
use rdmux_verbs::resources::report::{Answer, RECORDS_MAX, Setting};
use rdmux_verbs::resources::{CounterResource, Counts, DeviceResource, Direct, Item, Object, QpResource};
use rdmux_wire::cm::from_gid;
use rdmux_wire::roce::PathMtu;

use super::answer::{Answering, Asked, Told};
use super::cq::CqCounts;
use super::device::{Device, DeviceInner};
use super::metrics::counters_of;
use super::objects::Qp;
use super::qp::state_of;

/// Record of an object that lives.
#[derive(Clone, Debug)]
pub(super) enum ObjectEntry {
    /// A protection domain, known by the number of its entry.
    Pd,
    Cq {
        number: u32,
        depth: u32,
        vector: u32,
        counts: Arc<CqCounts>,
    },
    Mr {
        pdn: u32,
        rkey: u32,
        iova: u64,
        length: u64,
        access: Access,
    },
    Qp {
        number: u32,
        qp: Weak<Qp>,
        qp_type: QpType,
        pdn: u32,
        send_cqn: u32,
        recv_cqn: u32,
        srqn: Option<u32>,
    },
}

/// Begins to answer tools that ask.
pub(super) fn answer(device: &Arc<DeviceInner>) -> io::Result<Answering> {
    Answering::begin(device.address, Arc::downgrade(device))
}

impl Asked for Weak<DeviceInner> {
    fn items(&self, object: Object, from: u64) -> Told {
        match self.upgrade() {
            Some(device) => items(&device, object, from),
            None => all(Vec::new()),
        }
    }

    fn set(&self, Setting::Moderation(policy): Setting) -> Answer {
        match self.upgrade().map(Device) {
            Some(device) if device.moderates() => {
                device.0.moderation.set(policy);
                Answer::Done
            }
            _ => Answer::NotOffered,
        }
    }
}

/// Returns how many objects there are.
pub(super) fn counts(device: &DeviceInner) -> Counts {
    let mut counts = Counts::default();
    for entry in device.entries().values() {
        let count = match entry {
            ObjectEntry::Pd => &mut counts.pds,
            ObjectEntry::Cq { .. } => &mut counts.cqs,
            ObjectEntry::Mr { .. } => &mut counts.mrs,
            ObjectEntry::Qp { .. } => &mut counts.qps,
        };
        *count += 1;
    }
    counts
}

fn all(items: Vec<Item>) -> Told {
    Told { items, more: false }
}

fn items(device: &Arc<DeviceInner>, object: Object, from: u64) -> Told {
    match object {
        Object::Device => all(vec![Item::Device(of_device(device))]),
        Object::Counter => {
            let counters = counters_of(device).into_iter();
            let item = |(name, value)| Item::Counter(CounterResource { name, value });
            all(counters.map(item).collect())
        }
        _ => objects(device, object, from),
    }
}

/// Returns the objects of a kind from a number on, as many as a page has room for.
fn objects(device: &DeviceInner, object: Object, from: u64) -> Told {
    let entries = device.entries();
    let mut chosen = BTreeMap::new();
    for (entry_number, entry) in entries.iter() {
        let number = match (object, entry) {
            (Object::Pd, ObjectEntry::Pd) => *entry_number,
            (Object::Cq, ObjectEntry::Cq { number, .. }) | (Object::Qp, ObjectEntry::Qp { number, .. }) => {
                *number
            }
            (Object::Mr, ObjectEntry::Mr { rkey, .. }) => region_number(*rkey),
            _ => continue,
        };
        if u64::from(number) >= from {
            chosen.insert(number, entry);
        }
        // One object more than there is room for shows that there are more.
        if chosen.len() > RECORDS_MAX + 1 {
            chosen.pop_last();
        }
    }
    let more = chosen.len() > RECORDS_MAX;
    let chosen = chosen.into_iter().take(RECORDS_MAX);
    let chosen: Vec<(u32, ObjectEntry)> = chosen.map(|(number, entry)| (number, entry.clone())).collect();
    let users = users(object, entries.values());
    // To query each queue pair's state, the device takes its time.
    drop(entries);
    let items = chosen.iter().filter_map(|(number, entry)| {
        let users = users.get(number).copied().unwrap_or_default();
        item(*number, entry, users)
    });
    Told {
        items: items.collect(),
        more,
    }
}

/// Returns how many others use each object of a kind.
fn users<'a>(object: Object, entries: impl Iterator<Item = &'a ObjectEntry>) -> HashMap<u32, u32> {
    let mut users = HashMap::new();
    let mut count = |number: u32| *users.entry(number).or_default() += 1;
    for entry in entries {
        match (object, entry) {
            (Object::Pd, ObjectEntry::Mr { pdn, .. } | ObjectEntry::Qp { pdn, .. }) => count(*pdn),
            (
                Object::Cq,
                ObjectEntry::Qp {
                    send_cqn, recv_cqn, ..
                },
            ) => {
                count(*send_cqn);
                if recv_cqn != send_cqn {
                    count(*recv_cqn);
                }
            }
            _ => {}
        }
    }
    users
}

fn region_number(rkey: u32) -> u32 {
    rkey >> 8
}

fn item(number: u32, entry: &ObjectEntry, users: u32) -> Option<Item> {
    Some(match entry {
        ObjectEntry::Pd => Item::Pd(PdDetail {
            pd: Pd(number),
            users,
        }),
        ObjectEntry::Cq {
            depth,
            vector,
            counts,
            ..
        } => Item::Cq(CqDetail {
            cqn: Cqn(number),
            depth: *depth,
            // Devices do not report these.
            waiting: 0,
            overrun: false,
            users,
            pool: None,
            vector: *vector,
            moderation: counts.told(),
        }),
        ObjectEntry::Mr {
            pdn,
            rkey,
            iova,
            length,
            access,
        } => Item::Mr(RegionDetail {
            mrn: number,
            kind: RegionKind::Memory,
            rkey: *rkey,
            pd: Pd(*pdn),
            iova: *iova,
            length: *length,
            access: *access,
            sharing: None,
        }),
        ObjectEntry::Qp { .. } => Item::Qp(queue_pair(entry)?),
    })
}

fn of_device(device: &Arc<DeviceInner>) -> DeviceResource {
    const PORT_ACTIVE: u32 = 4;
    let port = device.context.query_port(device.port).unwrap_or_default();
    let mtu = PathMtu::from_code(port.active_mtu as u8);
    DeviceResource {
        guid: u64::from_be(device.attr.orig_attr.node_guid),
        mtu: mtu.map_or(0, PathMtu::bytes),
        active: port.state == PORT_ACTIVE,
        version: env!("CARGO_PKG_VERSION").into(),
        moderation: Device(device.clone())
            .moderates()
            .then(|| device.moderation.policy()),
        counts: counts(device),
    }
}

fn queue_pair(entry: &ObjectEntry) -> Option<QpResource> {
    let ObjectEntry::Qp {
        number,
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
        qpn: Qpn::new(*number),
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
