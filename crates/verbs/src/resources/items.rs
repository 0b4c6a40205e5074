//! Contents of each kind of object in an answer, and their encoding: the words of a [`Record`], in the order in which they stand here.

use std::net::{IpAddr, Ipv6Addr};

use rdmux_rnic::cm::CmState;
use rdmux_rnic::{
    Access, ByPackets, CmDetail, CqDetail, CqModeration, Cqn, Moderation, ModerationKind, NotShared, Pd,
    PdDetail, PoolUse, QpDetail, QpState, QpType, Qpn, RegionDetail, RegionKind, Sharing, SrqDetail, SrqInfo,
    Srqn, WindowType, Xrcd,
};
use rdmux_wire::cm::ServiceId;
use strum::VariantArray;

use super::report::{Object, Record};
use crate::Carrier;
use crate::moderation::ModerationPolicy;
use crate::why::{NotDirect, Why};

/// An object of a device, as the device reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// The device itself.
    Device(DeviceResource),
    /// A queue pair.
    Qp(QpResource),
    /// A completion queue.
    Cq(CqDetail),
    /// A memory region or window.
    Mr(RegionDetail),
    /// A protection domain.
    Pd(PdDetail),
    /// A connection, or a listener.
    CmId(CmDetail),
    /// A shared receive queue.
    Srq(SrqDetail),
    /// A counter.
    Counter(CounterResource),
}

/// Properties of a device that are visible from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceResource {
    /// GUID of its address: [`super::node_guid`].
    pub guid: u64,
    /// Bytes of payload that a packet on its link carries.
    pub mtu: u32,
    /// Set while the network accepts its packets.
    pub active: bool,
    /// Version of rdmux.
    pub version: String,
    /// Policy of the completion queues that have none of their own; `None` if the device does not moderate any.
    pub moderation: Option<ModerationPolicy>,
    /// Numbers of its objects.
    pub counts: Counts,
}

/// Numbers of objects that a device has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Queue pairs.
    pub qps: u32,
    /// Memory regions and windows.
    pub mrs: u32,
    /// Completion queues.
    pub cqs: u32,
    /// Protection domains.
    pub pds: u32,
    /// Shared receive queues.
    pub srqs: u32,
    /// Connections, and listeners.
    pub cm_ids: u32,
}

/// Properties of a queue pair that are visible from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QpResource {
    /// Its number.
    pub qpn: Qpn,
    /// Transport service.
    pub qp_type: QpType,
    /// State.
    pub state: QpState,
    /// Its peer, once it has one: address and number.
    pub peer: Option<(IpAddr, Qpn)>,
    /// Path MTU in bytes.
    pub path_mtu: u32,
    /// Carrier of its packets; `None` while it has no peer, or more than one.
    pub carrier: Option<Carrier>,
    /// Memory of its peer that it reaches without packets.
    pub direct: Direct,
    /// Protection domain.
    pub pdn: u32,
    /// Completion queue of its sends.
    pub send_cqn: u32,
    /// Completion queue of its receives.
    pub recv_cqn: u32,
    /// Shared receive queue that it takes its receives from, if it has one.
    pub srqn: Option<u32>,
    /// First PSN of its next send request.
    pub sq_psn: u32,
    /// PSN of the next request that it expects.
    pub rq_psn: u32,
    /// Send requests posted and not complete.
    pub sends: u32,
    /// Receives posted and not used.
    pub receives: u32,
}

/// Regions of a peer on the same host that a queue pair reaches without packets, by WRITE and READ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Direct {
    /// Regions that are mapped.
    pub mapped: u32,
    /// Regions that the kernel copies to and from (`process_vm_writev`).
    pub by_calls: u32,
    /// Reason why the last region that is reached by packets is not one of those.
    pub why_not: Option<String>,
    /// WRITEs and READs that went by packets nevertheless.
    pub by_packets: ByPackets,
}

/// A counter of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterResource {
    /// Its name, as in [`rdmux_rnic::Counters`].
    pub name: String,
    /// Its value since the device was opened.
    pub value: u64,
}

/// Carrier of packets, as the engine itself knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// There is not exactly one peer.
    Nowhere,
    /// Shared memory.
    Shared,
    /// UDP, for this reason.
    Udp(Why),
}

/// Regions that a queue pair reaches without packets, as the engine itself knows them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reached {
    /// Regions that are mapped.
    pub mapped: u32,
    /// Regions that the kernel copies to and from.
    pub by_calls: u32,
    /// Last reason why a region was not reached without packets.
    pub not_direct: Option<NotDirect>,
}

const KINDS: [RegionKind; 4] = [
    RegionKind::Memory,
    RegionKind::Fast,
    RegionKind::Window(WindowType::One),
    RegionKind::Window(WindowType::Two),
];
const SHARED: u8 = 0;
const NOWHERE: u8 = 255;
const RNIC: u8 = 254;
/// Word that stands for an absent number; the numbers themselves have 32 bits at most.
const NONE: u64 = u64::MAX;

fn place<T: PartialEq>(all: &[T], one: &T) -> u64 {
    all.iter()
        .position(|known| known == one)
        .map_or(NONE, |i| i as u64)
}

fn at<T: Copy>(all: &[T], place: u64) -> Option<T> {
    all.get(usize::try_from(place).ok()?).copied()
}

fn maybe(number: Option<u32>) -> u64 {
    number.map_or(NONE, u64::from)
}

fn maybe_back(word: u64) -> Option<Option<u32>> {
    match word {
        NONE => Some(None),
        word => u32::try_from(word).ok().map(Some),
    }
}

fn qpn(word: u64) -> Option<Qpn> {
    let number = u32::try_from(word).ok()?;
    (number < 1 << 24).then_some(Qpn::new(number))
}

fn address(address: Option<IpAddr>) -> [u64; 3] {
    let (family, v6) = match address {
        None => (0, Ipv6Addr::UNSPECIFIED),
        Some(IpAddr::V4(v4)) => (4, v4.to_ipv6_mapped()),
        Some(IpAddr::V6(v6)) => (6, v6),
    };
    let bits = v6.to_bits();
    [family, (bits >> 64) as u64, bits as u64]
}

fn address_back(words: [u64; 3]) -> Option<Option<IpAddr>> {
    let v6 = Ipv6Addr::from_bits(u128::from(words[1]) << 64 | u128::from(words[2]));
    match words[0] {
        0 => Some(None),
        4 => Some(Some(v6.to_ipv4_mapped()?.into())),
        6 => Some(Some(v6.into())),
        _ => None,
    }
}

fn code(word: u64, value: u64) -> Option<(u8, u32)> {
    Some((u8::try_from(word).ok()?, u32::try_from(value).ok()?))
}

/// Returns the record of a queue pair of an engine.
pub fn qp_record(qpn: Qpn, detail: &QpDetail, carried: Carried, reached: Reached) -> Record {
    let info = &detail.info;
    let peer = address(info.path.map(|path| path.dst));
    let (carrier, carrier_value) = match carried {
        Carried::Shared => (SHARED, 0),
        Carried::Nowhere => (NOWHERE, 0),
        Carried::Udp(why) => why.to_code(),
    };
    let (why, why_value) = reached.not_direct.map_or((0, 0), NotDirect::to_code);
    let words = vec![
        place(QpType::VARIANTS, &info.qp_type),
        place(QpState::VARIANTS, &info.state),
        peer[0],
        peer[1],
        peer[2],
        info.dest_qpn.value().into(),
        info.path_mtu.into(),
        carrier.into(),
        carrier_value.into(),
        reached.mapped.into(),
        reached.by_calls.into(),
        why.into(),
        why_value.into(),
        detail.pd.0.into(),
        detail.send_cq.0.into(),
        detail.recv_cq.0.into(),
        maybe(detail.srq.map(|srqn| srqn.0)),
        detail.sq_psn.value().into(),
        detail.rq_psn.value().into(),
        info.send_outstanding as u64,
        info.recv_posted as u64,
        detail.by_packets.immediate,
        detail.by_packets.rate_limited,
        detail.by_packets.not_granted,
        detail.by_packets.behind_others,
    ];
    Record {
        number: qpn.value().into(),
        name: String::new(),
        words,
    }
}

impl Item {
    /// Returns the record of an object; `None` for queue pairs of engines, which have [`qp_record`].
    pub fn record(&self) -> Option<Record> {
        let record = |number: u64, words: &[u64]| Record {
            number,
            name: String::new(),
            words: words.to_vec(),
        };
        Some(match self {
            Item::Device(device) => {
                let counts = &device.counts;
                let words = [
                    device.guid,
                    device.mtu.into(),
                    device.active.into(),
                    counts.qps.into(),
                    counts.mrs.into(),
                    counts.cqs.into(),
                    counts.pds.into(),
                    counts.srqs.into(),
                    counts.cm_ids.into(),
                    device.moderation.map_or(NONE, ModerationPolicy::to_word),
                ];
                Record {
                    name: device.version.clone(),
                    ..record(0, &words)
                }
            }
            Item::Qp(qp) => qp.record()?,
            Item::Cq(cq) => {
                let mut words = vec![
                    cq.depth.into(),
                    cq.waiting.into(),
                    cq.overrun.into(),
                    cq.users.into(),
                ];
                words.extend(moderation_words(&cq.moderation));
                words.push(cq.vector.into());
                words.push(maybe(cq.pool.map(|pool| pool.vector)));
                words.push(cq.pool.map_or(0, |pool| pool.used.into()));
                words.push(cq.pool.map_or(0, |pool| pool.users.into()));
                record(cq.cqn.0.into(), &words)
            }
            Item::Mr(mr) => record(
                mr.mrn.into(),
                &[
                    place(&KINDS, &mr.kind),
                    mr.rkey.into(),
                    mr.pd.0.into(),
                    mr.iova,
                    mr.length,
                    mr.access.bits().into(),
                    sharing_code(mr.sharing),
                ],
            ),
            Item::Pd(pd) => record(pd.pd.0.into(), &[pd.users.into()]),
            Item::CmId(cm) => {
                let peer = address(cm.peer);
                let (own, theirs) = cm.qpns;
                record(
                    cm.number,
                    &[
                        place(CmState::VARIANTS, &cm.state),
                        cm.service.0,
                        peer[0],
                        peer[1],
                        peer[2],
                        maybe(own.map(Qpn::value)),
                        maybe(theirs.map(Qpn::value)),
                    ],
                )
            }
            Item::Srq(srq) => {
                let (xrcd, cqn) = srq.xrc.unzip();
                let mut words = vec![
                    srq.pd.0.into(),
                    maybe(xrcd.map(|xrcd| xrcd.0)),
                    maybe(cqn.map(|cqn| cqn.0)),
                    srq.info.max_wr.into(),
                    srq.info.posted as u64,
                    maybe(srq.info.limit),
                    srq.users.into(),
                ];
                words.extend(srq.qpns.iter().map(|qpn| u64::from(qpn.value())));
                record(srq.srqn.0.into(), &words)
            }
            // The number of a counter is its place among the counters, which the caller sets.
            Item::Counter(counter) => Record {
                name: counter.name.clone(),
                ..record(0, &[counter.value])
            },
        })
    }

    /// Parses a record. `None` for a record that no engine sends.
    pub fn parse(object: Object, record: &Record) -> Option<Item> {
        let word = |at| record.word(at);
        let short = |at| u32::try_from(record.word(at)).ok();
        let flag = |at| match record.word(at) {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        };
        let number = u32::try_from(record.number);
        Some(match object {
            Object::Device => Item::Device(DeviceResource {
                guid: word(0),
                mtu: short(1)?,
                active: flag(2)?,
                version: record.name.clone(),
                moderation: match word(9) {
                    NONE => None,
                    word => Some(ModerationPolicy::from_word(word)?),
                },
                counts: Counts {
                    qps: short(3)?,
                    mrs: short(4)?,
                    cqs: short(5)?,
                    pds: short(6)?,
                    srqs: short(7)?,
                    cm_ids: short(8)?,
                },
            }),
            Object::Qp => Item::Qp(QpResource::parse(record)?),
            Object::Cq => Item::Cq(CqDetail {
                cqn: Cqn(number.ok()?),
                depth: short(0)?,
                waiting: short(1)?,
                overrun: flag(2)?,
                users: short(3)?,
                vector: short(9)?,
                moderation: moderation_of([word(4), word(5), word(6), word(7), word(8)])?,
                pool: match maybe_back(word(10))? {
                    // An engine that knows no pools reports no words of them.
                    Some(vector) if record.words.len() > 10 => Some(PoolUse {
                        vector,
                        used: short(11)?,
                        users: short(12)?,
                    }),
                    _ => None,
                },
            }),
            Object::Mr => Item::Mr(RegionDetail {
                mrn: number.ok()?,
                kind: at(&KINDS, word(0))?,
                rkey: short(1)?,
                pd: Pd(short(2)?),
                iova: word(3),
                length: word(4),
                access: Access::from_bits(short(5)?)?,
                sharing: sharing_of(word(6))?,
            }),
            Object::Pd => Item::Pd(PdDetail {
                pd: Pd(number.ok()?),
                users: short(0)?,
            }),
            Object::CmId => {
                let qpn = |at| match record.word(at) {
                    NONE => Some(None),
                    word => qpn(word).map(Some),
                };
                Item::CmId(CmDetail {
                    number: record.number,
                    state: at(CmState::VARIANTS, word(0))?,
                    service: ServiceId(word(1)),
                    peer: address_back([word(2), word(3), word(4)])?,
                    qpns: (qpn(5)?, qpn(6)?),
                })
            }
            Object::Srq => {
                let xrc = match (maybe_back(word(1))?, maybe_back(word(2))?) {
                    (Some(xrcd), Some(cqn)) => Some((Xrcd(xrcd), Cqn(cqn))),
                    (None, None) => None,
                    _ => return None,
                };
                let qpns = record.words.get(7..).unwrap_or_default();
                Item::Srq(SrqDetail {
                    srqn: Srqn(number.ok()?),
                    pd: Pd(short(0)?),
                    xrc,
                    info: SrqInfo {
                        max_wr: short(3)?,
                        posted: short(4)? as usize,
                        limit: maybe_back(word(5))?,
                    },
                    users: short(6)?,
                    qpns: qpns.iter().map(|word| qpn(*word)).collect::<Option<_>>()?,
                })
            }
            Object::Counter => Item::Counter(CounterResource {
                name: record.name.clone(),
                value: word(0),
            }),
        })
    }
}

impl QpResource {
    /// Returns the record of a queue pair of an RNIC, which is carried by the RNIC's link, or by nothing yet, and sends everything there.
    /// `None` for any other.
    fn record(&self) -> Option<Record> {
        let is_rnics = matches!(self.carrier, None | Some(Carrier::Rnic)) && self.direct == Direct::default();
        if !is_rnics {
            return None;
        }
        let peer = address(self.peer.map(|(address, _)| address));
        let carrier = if self.carrier.is_some() { RNIC } else { NOWHERE };
        let words = vec![
            place(QpType::VARIANTS, &self.qp_type),
            place(QpState::VARIANTS, &self.state),
            peer[0],
            peer[1],
            peer[2],
            self.peer.map_or(0, |(_, qpn)| qpn.value().into()),
            self.path_mtu.into(),
            carrier.into(),
            0,
            0,
            0,
            0,
            0,
            self.pdn.into(),
            self.send_cqn.into(),
            self.recv_cqn.into(),
            maybe(self.srqn),
            self.sq_psn.into(),
            self.rq_psn.into(),
            self.sends.into(),
            self.receives.into(),
        ];
        Some(Record {
            number: self.qpn.value().into(),
            name: String::new(),
            words,
        })
    }

    fn parse(record: &Record) -> Option<QpResource> {
        let word = |at| record.word(at);
        let short = |at| u32::try_from(record.word(at)).ok();
        let psn = |at| short(at).filter(|psn| *psn < 1 << 24);
        let peer = match address_back([word(2), word(3), word(4)])? {
            Some(address) => Some((address, qpn(word(5))?)),
            None => None,
        };
        let carrier = match code(word(7), word(8))? {
            (SHARED, _) => Some(Carrier::SharedMemory),
            (NOWHERE, _) => None,
            (RNIC, _) => Some(Carrier::Rnic),
            code => Some(Carrier::Udp(Why::from_code(code)?.to_string())),
        };
        let why_not = match code(word(11), word(12))? {
            (0, _) => None,
            code => Some(NotDirect::from_code(code)?.to_string()),
        };
        Some(QpResource {
            qpn: qpn(record.number)?,
            qp_type: at(QpType::VARIANTS, word(0))?,
            state: at(QpState::VARIANTS, word(1))?,
            peer,
            path_mtu: short(6)?,
            carrier,
            direct: Direct {
                mapped: short(9)?,
                by_calls: short(10)?,
                why_not,
                by_packets: ByPackets {
                    immediate: word(21),
                    rate_limited: word(22),
                    not_granted: word(23),
                    behind_others: word(24),
                },
            },
            pdn: short(13)?,
            send_cqn: short(14)?,
            recv_cqn: short(15)?,
            srqn: maybe_back(word(16))?,
            sq_psn: psn(17)?,
            rq_psn: psn(18)?,
            sends: short(19)?,
            receives: short(20)?,
        })
    }
}

fn moderation_words(moderation: &CqModeration) -> [u64; 5] {
    let chosen = moderation.moderation;
    [
        place(ModerationKind::VARIANTS, &moderation.kind),
        maybe(chosen.map(|Moderation { count, period_us }| u32::from(count) << 16 | u32::from(period_us))),
        moderation.changes,
        moderation.events,
        moderation.taken,
    ]
}

/// Inverts [`moderation_words`].
fn moderation_of([kind, chosen, changes, events, taken]: [u64; 5]) -> Option<CqModeration> {
    Some(CqModeration {
        kind: at(ModerationKind::VARIANTS, kind)?,
        moderation: maybe_back(chosen)?.map(|both| Moderation {
            count: (both >> 16) as u16,
            period_us: both as u16,
        }),
        changes,
        events,
        taken,
    })
}

/// Encodes whether peers can map a memory; 0 stands for a memory that they never map.
fn sharing_code(sharing: Option<Sharing>) -> u64 {
    match sharing {
        None => 0,
        Some(Sharing::NotYet) => 1,
        Some(Sharing::Moving) => 2,
        Some(Sharing::Shared) => 3,
        Some(Sharing::Refused(reason)) => 4 + place(NotShared::VARIANTS, &reason),
    }
}

/// Inverts [`sharing_code`].
fn sharing_of(code: u64) -> Option<Option<Sharing>> {
    Some(match code {
        0 => None,
        1 => Some(Sharing::NotYet),
        2 => Some(Sharing::Moving),
        3 => Some(Sharing::Shared),
        code => Some(Sharing::Refused(at(NotShared::VARIANTS, code - 4)?)),
    })
}

#[cfg(test)]
mod tests {
    use rdmux_rnic::{Path, Psn, QpInfo};
    use rustix::io::Errno;

    use super::*;
    use crate::why::Refusal;

    fn items() -> Vec<(Object, Item)> {
        let srq = |xrc, limit, n| {
            Item::Srq(SrqDetail {
                srqn: Srqn(0x03_1234),
                pd: Pd(1),
                xrc,
                info: SrqInfo {
                    max_wr: 64,
                    posted: 3,
                    limit,
                },
                qpns: (1..=n).map(Qpn::new).collect(),
                users: 17,
            })
        };
        let cm = |state, peer: Option<IpAddr>, qpns| {
            Item::CmId(CmDetail {
                number: 0x0300_0007,
                state,
                service: ServiceId::tcp(7174),
                peer,
                qpns,
            })
        };
        let mut items = vec![
            (
                Object::Device,
                Item::Device(DeviceResource {
                    guid: u64::MAX - 1,
                    mtu: 4096,
                    active: true,
                    version: "0.1.0".into(),
                    moderation: Some(ModerationPolicy::Rate),
                    counts: Counts {
                        qps: 1,
                        mrs: 2,
                        cqs: 3,
                        pds: 4,
                        srqs: 5,
                        cm_ids: 6,
                    },
                }),
            ),
            (
                Object::Cq,
                Item::Cq(CqDetail {
                    cqn: Cqn(9),
                    depth: 1024,
                    waiting: 3,
                    overrun: true,
                    users: 2,
                    pool: None,
                    vector: u32::MAX,
                    moderation: CqModeration {
                        kind: ModerationKind::Rate,
                        moderation: Some(Moderation {
                            count: 0xfffe,
                            period_us: 0xfffd,
                        }),
                        changes: 1,
                        events: 1 << 40,
                        taken: u64::MAX,
                    },
                }),
            ),
            (
                Object::Cq,
                Item::Cq(CqDetail {
                    cqn: Cqn(10),
                    depth: 1,
                    waiting: 0,
                    overrun: false,
                    users: 0,
                    vector: 0,
                    moderation: CqModeration::default(),
                    pool: Some(PoolUse {
                        vector: 1,
                        used: 300,
                        users: 3,
                    }),
                }),
            ),
            (Object::Pd, Item::Pd(PdDetail { pd: Pd(0), users: 4 })),
            (Object::Srq, srq(None, None, 0)),
            (Object::Srq, srq(Some((Xrcd(2), Cqn(3))), Some(7), 16)),
            (
                Object::Counter,
                Item::Counter(CounterResource {
                    name: "sent_pkts".into(),
                    value: u64::MAX,
                }),
            ),
        ];
        for kind in KINDS {
            let region = RegionDetail {
                mrn: 0xff_ffff,
                kind,
                rkey: u32::MAX,
                pd: Pd(3),
                iova: u64::MAX,
                length: 1 << 40,
                access: Access::REMOTE_READ | Access::LOCAL_WRITE,
                sharing: None,
            };
            items.push((Object::Mr, Item::Mr(region)));
            let sharings = [Sharing::NotYet, Sharing::Moving, Sharing::Shared].into_iter();
            for sharing in sharings.chain(NotShared::VARIANTS.iter().copied().map(Sharing::Refused)) {
                let sharing = Some(sharing);
                items.push((Object::Mr, Item::Mr(RegionDetail { sharing, ..region })));
            }
        }
        let peers = [None, Some([10, 0, 0, 2].into()), Some(Ipv6Addr::LOCALHOST.into())];
        for (&state, peer) in CmState::VARIANTS.iter().zip(peers.into_iter().cycle()) {
            let qpns = (peer.map(|_| Qpn::new(17)), Some(Qpn::new(0xff_ffff)));
            items.push((Object::CmId, cm(state, peer, qpns)));
        }
        items
    }

    #[test]
    fn parse__inverts_record() {
        for (object, item) in items() {
            let record = item.record().unwrap();
            assert_eq!(Item::parse(object, &record), Some(item));
        }
    }

    fn detail(qp_type: QpType, state: QpState, dst: Option<IpAddr>) -> QpDetail {
        QpDetail {
            info: QpInfo {
                qp_type,
                state,
                dest_qpn: Qpn::new(0x04_0001),
                path: dst.map(|dst| Path {
                    src: dst,
                    dst,
                    src_port: 50_000,
                    traffic_class: 0,
                }),
                path_mtu: 4096,
                qkey: 0,
                send_outstanding: 3,
                recv_posted: 4,
            },
            pd: Pd(2),
            send_cq: Cqn(5),
            recv_cq: Cqn(6),
            srq: Some(Srqn(7)),
            sq_psn: Psn::new(8),
            rq_psn: Psn::new(0xff_ffff),
            by_packets: BY_PACKETS,
        }
    }

    const BY_PACKETS: ByPackets = ByPackets {
        immediate: 1,
        rate_limited: 2,
        not_granted: 3,
        behind_others: 4,
    };

    #[test]
    fn parse__inverts_qp_record() {
        let whys = [
            Why::NotHere,
            Why::OtherUser(1000),
            Why::UnknownUser,
            Why::Off,
            Why::NotYet,
            Why::GivenUp,
            Why::Refused(Refusal::Full),
            Why::System(Errno::NOMEM),
        ];
        let not_direct = [
            None,
            Some(NotDirect::Denied(Refusal::NotShareable)),
            Some(NotDirect::OtherPidNamespace),
            Some(NotDirect::Calls(Errno::PERM)),
            Some(NotDirect::Unmappable),
            Some(NotDirect::KeptToPackets),
        ];
        let carried = [Carried::Nowhere, Carried::Shared]
            .into_iter()
            .chain(whys.map(Carried::Udp));
        let peers = [None, Some([10, 0, 0, 2].into()), Some(Ipv6Addr::LOCALHOST.into())];
        for (i, carried) in carried.enumerate() {
            let qp_type = QpType::VARIANTS[i % QpType::VARIANTS.len()];
            let state = QpState::VARIANTS[i % QpState::VARIANTS.len()];
            let not_direct = not_direct[i % not_direct.len()];
            let reached = Reached {
                mapped: 2,
                by_calls: 1,
                not_direct,
            };
            let peer = peers[i % peers.len()];
            let record = qp_record(Qpn::new(9), &detail(qp_type, state, peer), carried, reached);
            let Some(Item::Qp(qp)) = Item::parse(Object::Qp, &record) else {
                panic!("{record:?}");
            };
            assert_eq!((qp.qpn, qp.qp_type, qp.state), (Qpn::new(9), qp_type, state));
            assert_eq!(qp.peer, peer.map(|address| (address, Qpn::new(0x04_0001))));
            let expected = match carried {
                Carried::Nowhere => None,
                Carried::Shared => Some(Carrier::SharedMemory),
                Carried::Udp(why) => Some(Carrier::Udp(why.to_string())),
            };
            assert_eq!(qp.carrier, expected);
            assert_eq!((qp.direct.mapped, qp.direct.by_calls), (2, 1));
            assert_eq!(qp.direct.by_packets, BY_PACKETS);
            assert_eq!(qp.direct.why_not, not_direct.map(|why| why.to_string()));
            assert_eq!((qp.pdn, qp.send_cqn, qp.recv_cqn, qp.srqn), (2, 5, 6, Some(7)));
            assert_eq!(
                (qp.sq_psn, qp.rq_psn, qp.sends, qp.receives),
                (8, 0xff_ffff, 3, 4)
            );
            assert_eq!(Item::Qp(qp).record(), None, "an engine's");
        }
    }

    #[test]
    fn parse__any_words_are_refused_or_understood() {
        let mut state = 7u64;
        let mut next = move || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            state >> 20
        };
        let mut understood = 0;
        for round in 0..100_000 {
            let object = Object::VARIANTS[round % Object::VARIANTS.len()];
            // Small numbers are words that have a meaning.
            let words = (0..next() % 30).map(|_| next() % (1 << (next() % 44))).collect();
            let record = Record {
                number: next() % (1 << (next() % 44)),
                name: String::new(),
                words,
            };
            understood += u32::from(Item::parse(object, &record).is_some());
        }
        assert!(understood > 1_000);
    }
}
