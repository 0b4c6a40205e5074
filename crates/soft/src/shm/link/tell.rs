//! The objects of the device, reported to clients that ask.

use rdmux_rnic::Qpn;
use rdmux_shm::Granted;
use rdmux_verbs::resources::report::{Carried, Object, Page, RECORDS_MAX, Reached, Record, qp_record};
use rdmux_verbs::resources::{CounterResource, Counts, DeviceResource, Item, node_guid};

use super::Links;
use crate::port::RnicPort;

impl Links {
    /// Returns the objects of a kind from a number on.
    pub(super) fn page(&self, rnic: &RnicPort, object: Object, from: u64) -> Page {
        fn records<T>((list, more): (Vec<T>, bool), item: impl Fn(T) -> Item) -> (Vec<Record>, bool) {
            (
                list.into_iter().filter_map(|one| item(one).record()).collect(),
                more,
            )
        }
        const MAX: usize = RECORDS_MAX;
        let (records, more) = match object {
            Object::Device => (self.device(rnic).record().into_iter().collect(), false),
            Object::Qp => {
                let (qpns, more) = rnic.list_qps(from, MAX);
                (qpns.iter().filter_map(|qpn| self.qp(rnic, *qpn)).collect(), more)
            }
            Object::Cq => records(rnic.list_cqs(from, MAX), Item::Cq),
            Object::Mr => records(rnic.list_regions(from, MAX), Item::Mr),
            Object::Pd => records(rnic.list_pds(from, MAX), Item::Pd),
            Object::CmId => records(rnic.list_connections(from, MAX), Item::CmId),
            Object::Srq => records(rnic.list_srqs(from, MAX), Item::Srq),
            Object::Counter => (counters(rnic, from), false),
        };
        Page {
            object,
            more,
            records,
        }
    }

    fn device(&self, rnic: &RnicPort) -> Item {
        let [qps, mrs, cqs, pds, srqs, cm_ids] = rnic
            .all_counts()
            .map(|count| count.try_into().unwrap_or(u32::MAX));
        Item::Device(DeviceResource {
            guid: node_guid(rnic.config().address),
            mtu: rnic.config().mtu,
            active: !rnic.is_down(),
            version: env!("CARGO_PKG_VERSION").into(),
            moderation: Some(self.moderation.policy()),
            counts: Counts {
                qps,
                mrs,
                cqs,
                pds,
                srqs,
                cm_ids,
            },
        })
    }

    fn qp(&self, rnic: &RnicPort, qpn: Qpn) -> Option<Record> {
        let detail = rnic.qp_detail(qpn)?;
        let carried = match (detail.info.path, self.why_not(&detail.info)) {
            (None, _) => Carried::Nowhere,
            (Some(_), None) => Carried::Shared,
            (Some(_), Some(why)) => Carried::Udp(why),
        };
        let mut reached = Reached {
            not_direct: self.not_direct.get(&qpn).copied(),
            ..Reached::default()
        };
        for grant in rnic.grants(qpn) {
            let granted = grant
                .memory
                .as_any()
                .and_then(|any| any.downcast_ref::<Granted>());
            match granted.filter(|granted| granted.holds()) {
                Some(granted) if granted.is_mapped() => reached.mapped += 1,
                Some(_) => reached.by_calls += 1,
                None => {}
            }
        }
        Some(qp_record(qpn, &detail, carried, reached))
    }
}

/// Returns the counters of the engine, then those of the faults at its port, if it has any.
fn counters(rnic: &RnicPort, from: u64) -> Vec<Record> {
    let counters = rnic.counters();
    let own = counters.iter().map(|(name, value, _)| (name, value));
    let faults = rnic.fault_counts().map(|counts| {
        [
            ("fault_packets", counts.packets),
            ("fault_lost", counts.lost),
            ("fault_corrupted", counts.corrupted),
            ("fault_duplicated", counts.duplicated),
            ("fault_reordered", counts.reordered),
            ("fault_qp_errors", counts.qp_errors),
        ]
    });
    let record = |(number, (name, value)): (usize, (&str, u64))| {
        let item = Item::Counter(CounterResource {
            name: name.to_owned(),
            value,
        });
        let number = number as u64;
        (number >= from).then_some(Record {
            number,
            ..item.record()?
        })
    };
    let all = own.chain(faults.into_iter().flatten()).enumerate();
    all.filter_map(record).take(RECORDS_MAX).collect()
}
