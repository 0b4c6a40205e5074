//! Listings of a device's objects for tools that inspect it: in pages, so that each call returns a bounded amount.
//!
//! Objects of each kind are listed in the order of their numbers: a call takes the number to begin with and the size of the page,
//! and also returns whether there are more objects. A call goes once over all objects of the kind, and once over all objects that
//! use them.

use super::Rnic;
use crate::cm::{CmId, CmState};
use crate::cq::{CompletionQueue, CqModeration, Cqn, PoolUse};
use crate::memory::{Access, Sharing};
use crate::qp::requester::direct::ByPackets;
use crate::region::{Pd, RegionKind};
use crate::srq::{SrqInfo, Srqn, Xrcd};
use crate::{Psn, QpInfo, Qpn};
use rdmux_wire::cm::ServiceId;
use std::net::IpAddr;

/// Most QPs of a shared receive queue that are listed by number.
pub const SRQ_QPS_MAX: usize = 16;

/// A page: its entries, and whether more follow.
pub type Paged<T> = (Vec<T>, bool);

/// Parameters and state of a QP, in addition to [`QpInfo`].
#[derive(Clone, Copy, Debug)]
pub struct QpDetail {
    /// Attributes that programs can query too.
    pub info: QpInfo,
    /// Protection domain.
    pub pd: Pd,
    /// Completion queue of its send requests.
    pub send_cq: Cqn,
    /// Completion queue of its receive requests.
    pub recv_cq: Cqn,
    /// Shared receive queue from which it takes its receives; `None` for its own queue.
    pub srq: Option<Srqn>,
    /// PSN of the next send request's first packet.
    pub sq_psn: Psn,
    /// PSN of the next request that the responder expects.
    pub rq_psn: Psn,
    /// Its WRITEs and READs that were sent in packets although the peer is on this host.
    pub by_packets: ByPackets,
}

/// A completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqDetail {
    /// Its number.
    pub cqn: Cqn,
    /// Most completions that it holds.
    pub depth: u32,
    /// Completions that wait to be polled.
    pub waiting: u32,
    /// Set when it overran, and so takes no more completions.
    pub overrun: bool,
    /// QPs that complete to it.
    pub users: u32,
    /// Its use by a pool, if it is one of a pool.
    pub pool: Option<PoolUse>,
    /// Its completion vector.
    pub vector: u32,
    /// How its wake-ups are moderated.
    pub moderation: CqModeration,
}

/// A protection domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PdDetail {
    /// Its number.
    pub pd: Pd,
    /// QPs, regions, windows and shared receive queues in it.
    pub users: u32,
}

/// A memory region or window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionDetail {
    /// The high 24 bits of its keys.
    pub mrn: u32,
    /// Kind of the entry.
    pub kind: RegionKind,
    /// The key by which peers access it, and for a region its owner too.
    pub rkey: u32,
    /// Protection domain.
    pub pd: Pd,
    /// Address of its first byte; 0 while it has no memory.
    pub iova: u64,
    /// Bytes; 0 while it has no memory.
    pub length: u64,
    /// Rights that it grants.
    pub access: Access,
    /// Whether peers on the host can map its memory; `None` for a window, and for memory that they never map.
    pub sharing: Option<Sharing>,
}

/// A shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrqDetail {
    /// Its number.
    pub srqn: Srqn,
    /// Protection domain of its receives.
    pub pd: Pd,
    /// For XRC: the domain, and the completion queue of its receives.
    pub xrc: Option<(Xrcd, Cqn)>,
    /// Attributes that programs can query too.
    pub info: SrqInfo,
    /// The first [`SRQ_QPS_MAX`] QPs that take their receives from it.
    pub qpns: Vec<Qpn>,
    /// Number of QPs that take their receives from it.
    pub users: u32,
}

/// A connection, or a service that is listened on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmDetail {
    /// Its communication id; for a service that is listened on, the number by which it is listed.
    pub number: u64,
    /// Its state.
    pub state: CmState,
    /// The service.
    pub service: ServiceId,
    /// The peer's address; `None` for a service that is listened on.
    pub peer: Option<IpAddr>,
    /// Own QPN and the peer's, each `None` while there is none.
    pub qpns: (Option<Qpn>, Option<Qpn>),
}

/// Returns the first `max` numbers that are not below `from`, in order, and whether there are more.
pub(crate) fn first(numbers: impl Iterator<Item = u64>, from: u64, max: usize) -> Paged<u64> {
    let mut found: Vec<u64> = numbers.filter(|number| *number >= from).collect();
    let more = found.len() > max;
    if more {
        found.select_nth_unstable(max);
        found.truncate(max);
    }
    found.sort_unstable();
    (found, more)
}

/// Counts how often `named` contains each of `numbers`, which are in order.
fn count(numbers: &[u64], named: impl Iterator<Item = u64>) -> Vec<u32> {
    let mut counts = vec![0u32; numbers.len()];
    for name in named {
        if let Ok(at) = numbers.binary_search(&name) {
            counts[at] += 1;
        }
    }
    counts
}

impl Rnic {
    /// Lists QPs in the order of their numbers.
    pub fn list_qps(&self, from: u64, max: usize) -> Paged<Qpn> {
        let (numbers, more) = first(self.qps.keys().map(|qpn| u64::from(*qpn)), from, max);
        (numbers.iter().map(|qpn| Qpn::new(*qpn as u32)).collect(), more)
    }

    /// Returns the parameters and the state of a QP.
    pub fn qp_detail(&self, qpn: Qpn) -> Option<QpDetail> {
        let info = self.query_qp(qpn)?;
        let qp = self.qps.get(&qpn.value())?;
        let (sq_psn, rq_psn) = qp.next_psns();
        let init = &qp.head.init;
        Some(QpDetail {
            info,
            pd: init.pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            sq_psn,
            rq_psn,
            by_packets: qp.by_packets(),
        })
    }

    /// Lists completion queues in the order of their numbers.
    pub fn list_cqs(&self, from: u64, max: usize) -> Paged<CqDetail> {
        let (numbers, more) = first(self.cqs.keys().map(|cqn| u64::from(*cqn)), from, max);
        let of_qp = self.qps.values().flat_map(|qp| {
            let (send, recv) = (qp.head.init.send_cq, qp.head.init.recv_cq);
            [Some(send), (recv != send).then_some(recv)]
        });
        let of_srq = self.srqs.values().map(|srq| srq.init.xrc.map(|(_, cqn)| cqn));
        let named = of_qp.chain(of_srq).flatten().map(|cqn| u64::from(cqn.0));
        let users = count(&numbers, named);
        let detail = |(number, users): (&u64, u32)| {
            let cqn = *number as u32;
            let queue = self.cqs.get(&cqn)?;
            let (waiting, overrun) = queue.state();
            Some(CqDetail {
                cqn: Cqn(cqn),
                depth: queue.depth() as u32,
                waiting: waiting as u32,
                overrun,
                users,
                pool: queue.pool(),
                vector: queue.vector(),
                moderation: queue.moderation(),
            })
        };
        (numbers.iter().zip(users).filter_map(detail).collect(), more)
    }

    /// Returns the depth of each completion queue of a pool, and its use.
    pub fn pooled_cqs(&self) -> impl Iterator<Item = (usize, PoolUse)> {
        let pooled = |queue: &CompletionQueue| Some((queue.depth(), queue.pool()?));
        self.cqs.values().filter_map(pooled)
    }

    /// Lists protection domains in the order of their numbers.
    pub fn list_pds(&self, from: u64, max: usize) -> Paged<PdDetail> {
        let (numbers, more) = first(self.regions.pds().map(|pd| u64::from(pd.0)), from, max);
        let named = self.qps.values().map(|qp| qp.head.init.pd);
        let named = named.chain(self.srqs.values().map(|srq| srq.init.pd));
        let named = named.chain(self.regions.domains());
        let users = count(&numbers, named.map(|pd| u64::from(pd.0)));
        let detail = |(number, users): (&u64, u32)| PdDetail {
            pd: Pd(*number as u32),
            users,
        };
        (numbers.iter().zip(users).map(detail).collect(), more)
    }

    /// Lists memory regions and windows in the order of the high 24 bits of their keys.
    pub fn list_regions(&self, from: u64, max: usize) -> Paged<RegionDetail> {
        let (numbers, more) = first(self.regions.numbers().map(u64::from), from, max);
        let detail = |number: &u64| self.regions.detail(*number as u32);
        (numbers.iter().filter_map(detail).collect(), more)
    }

    /// Lists shared receive queues in the order of their numbers.
    pub fn list_srqs(&self, from: u64, max: usize) -> Paged<SrqDetail> {
        let (numbers, more) = first(self.srqs.keys().map(|srqn| u64::from(*srqn)), from, max);
        let mut qpns = vec![Vec::new(); numbers.len()];
        for qp in self.qps.values() {
            let srqn = qp.head.init.srq.map(|srqn| u64::from(srqn.0));
            if let Some(at) = srqn.and_then(|srqn| numbers.binary_search(&srqn).ok()) {
                qpns[at].push(qp.head.qpn);
            }
        }
        let detail = |(number, mut qpns): (&u64, Vec<Qpn>)| {
            let srqn = *number as u32;
            let srq = self.srqs.get(&srqn)?;
            let users = qpns.len() as u32;
            qpns.sort_unstable_by_key(|qpn| qpn.value());
            qpns.truncate(SRQ_QPS_MAX);
            Some(SrqDetail {
                srqn: Srqn(srqn),
                pd: srq.init.pd,
                xrc: srq.init.xrc,
                info: srq.info(),
                qpns,
                users,
            })
        };
        (numbers.iter().zip(qpns).filter_map(detail).collect(), more)
    }

    /// Lists connections in the order of their communication ids, then services that are listened on in the order of their ids.
    pub fn list_connections(&self, from: u64, max: usize) -> Paged<CmDetail> {
        let (numbers, more) = first(self.cm.numbers(), from, max);
        let detail = |number: &u64| match u32::try_from(*number) {
            Ok(id) => self.cm.detail(CmId(id)),
            Err(_) => Some(CmDetail {
                number: *number,
                state: CmState::Listen,
                service: ServiceId(*number & !crate::cm::LISTENER),
                peer: None,
                qpns: (None, None),
            }),
        };
        (numbers.iter().filter_map(detail).collect(), more)
    }

    /// Returns the number of objects of each kind: QPs, regions and windows, completion queues, protection domains, shared receive
    /// queues, connections with services that are listened on.
    pub fn all_counts(&self) -> [usize; 6] {
        let (qps, regions, cqs) = self.object_counts();
        let (pds, cm_ids) = (self.regions.pds().count(), self.cm.numbers().count());
        [qps, regions, cqs, pds, self.srqs.len(), cm_ids]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first__so_many_in_order_and_whether_there_are_more() {
        let numbers = || [9, 3, 7, 1, 5].into_iter();
        assert_eq!(first(numbers(), 0, 3), (vec![1, 3, 5], true));
        assert_eq!(first(numbers(), 6, 3), (vec![7, 9], false));
        assert_eq!(first(numbers(), 5, 3), (vec![5, 7, 9], false));
        assert_eq!(first(numbers(), 10, 3), (vec![], false));
    }

    #[test]
    fn count__only_what_is_asked_for() {
        assert_eq!(count(&[2, 4], [4, 3, 4, 2].into_iter()), [1, 2]);
    }
}
