//! What a device has, for those who look from outside: in pages, so that each look is bounded.
//!
//! Each kind has its numbers, in whose order it is told of: from one number on, so many at most, and whether there are more. One
//! look goes over all objects of that kind, and over all that use them, once.

use super::Rnic;
use crate::cm::{CmId, CmState};
use crate::cq::Cqn;
use crate::memory::Access;
use crate::qp::requester::direct::ByPackets;
use crate::region::{Pd, RegionKind};
use crate::srq::{SrqInfo, Srqn, Xrcd};
use crate::{Psn, QpInfo, Qpn};
use rdmux_wire::cm::ServiceId;
use std::net::IpAddr;

/// QPs of a shared receive queue that are told of by their numbers.
pub const SRQ_QPS_MAX: usize = 16;

/// A page: what it holds, and whether there is more behind it.
pub type Paged<T> = (Vec<T>, bool);

/// What a QP was made with and where it stands, beside [`QpInfo`].
#[derive(Clone, Copy, Debug)]
pub struct QpDetail {
    /// What programs see too.
    pub info: QpInfo,
    /// Protection domain.
    pub pd: Pd,
    /// Where its send completions go.
    pub send_cq: Cqn,
    /// Where its receive completions go.
    pub recv_cq: Cqn,
    /// Where it takes its receives from, when not its own queue.
    pub srq: Option<Srqn>,
    /// PSN that the next send request begins with.
    pub sq_psn: Psn,
    /// PSN of the next request that is expected.
    pub rq_psn: Psn,
    /// Its WRITEs and READs that went by packets although the peer is on this host.
    pub by_packets: ByPackets,
}

/// A completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqDetail {
    /// Its number.
    pub cqn: Cqn,
    /// Completions that it holds at most.
    pub depth: u32,
    /// Completions that wait to be polled.
    pub waiting: u32,
    /// It overran, and takes no more.
    pub overrun: bool,
    /// QPs that complete to it.
    pub users: u32,
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
    /// What it is.
    pub kind: RegionKind,
    /// The key by which peers reach it, and of a region its owner too.
    pub rkey: u32,
    /// Protection domain.
    pub pd: Pd,
    /// Address of its first byte; 0 while it has no memory.
    pub iova: u64,
    /// Bytes; 0 while it has no memory.
    pub length: u64,
    /// What it grants.
    pub access: Access,
}

/// A shared receive queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SrqDetail {
    /// Its number.
    pub srqn: Srqn,
    /// Protection domain of its receives.
    pub pd: Pd,
    /// For XRC: the domain, and where its completions go.
    pub xrc: Option<(Xrcd, Cqn)>,
    /// What programs see too.
    pub info: SrqInfo,
    /// The first [`SRQ_QPS_MAX`] QPs that take their receives from it.
    pub qpns: Vec<Qpn>,
    /// QPs that do.
    pub users: u32,
}

/// A connection, or who listens for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmDetail {
    /// Its communication id; of who listens the service.
    pub number: u64,
    /// Where it stands.
    pub state: CmState,
    /// The service.
    pub service: ServiceId,
    /// The peer, where there is one.
    pub peer: Option<IpAddr>,
    /// Own QPN and the peer's, as far as there are any yet.
    pub qpns: (Option<Qpn>, Option<Qpn>),
}

/// The first `max` numbers that are not below `from`, in order, and whether there are more.
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

/// Counts how often each of `numbers`, which are in order, is named.
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
    /// QPs by their numbers.
    pub fn list_qps(&self, from: u64, max: usize) -> Paged<Qpn> {
        let (numbers, more) = first(self.qps.keys().map(|qpn| u64::from(*qpn)), from, max);
        (numbers.iter().map(|qpn| Qpn::new(*qpn as u32)).collect(), more)
    }

    /// What a QP was made with, and where it stands.
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

    /// Completion queues by their numbers.
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
            })
        };
        (numbers.iter().zip(users).filter_map(detail).collect(), more)
    }

    /// Protection domains by their numbers.
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

    /// Memory regions and windows by the high 24 bits of their keys.
    pub fn list_regions(&self, from: u64, max: usize) -> Paged<RegionDetail> {
        let (numbers, more) = first(self.regions.numbers().map(u64::from), from, max);
        let detail = |number: &u64| self.regions.detail(*number as u32);
        (numbers.iter().filter_map(detail).collect(), more)
    }

    /// Shared receive queues by their numbers.
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

    /// Connections by their communication ids, then who listens by services.
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

    /// How many objects there are of each kind: QPs, regions and windows, completion queues, protection domains, shared receive
    /// queues, connections with who listens for them.
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
