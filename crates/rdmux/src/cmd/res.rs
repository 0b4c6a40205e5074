//! `rdmux res`: objects of the devices of this user's processes, with the words of rdma(8).

use std::collections::BTreeMap;
use std::ffi::OsStr;

use anyhow::Result;
use clap::ValueEnum;
use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use rdmux_verbs::resources::{Item, Object as Asked, QpResource};
use rdmux_verbs::{Access, Carrier, CmDetail, CmState, CqDetail, QpState, QpType, RegionKind, WindowType};
use serde_json::json;

use super::objects::{self, Answer, Filter, Kind, Named, Options, Row, answers};
use crate::output::Align;

const JSON: &str = "\
JSON: an array of objects: ifname, port, provider (hw; only for an RNIC), pid, comm, and for
  (none)  pd, cq, qp, cm_id, mr, ctx, srq: the number of each
  qp      lqpn, rqpn, type, state, rq-psn, sq-psn, path-mig-state, peer, path-mtu, carrier, carrier-why, direct (mapped, process,
          why-not, by-packets), pdn, scqn, rcqn, srqn, sends, receives
  cq      cqn, cqe, users, waiting, overrun, comp-vector, adaptive-moderation, moderation, count, period-us, changes, events, taken,
          pool-vector, pool-used, pool-users, ctxn
  mr      mrn, type, rkey, lkey, iova, mrlen, access, pdn, shared
  pd      pdn, users, ctxn
  cm_id   cm-idn, lqpn, rqpn, state, phase, ps, src-addr, src-port, dst-addr, dst-port, service
  srq     srqn, type, lqpn, pdn, cqn, max-wr, posted, limit, users
  ctx     ctxn
or error for a device that does not answer.";

#[derive(clap::Args, Debug)]
#[command(mut_args(|arg| arg.global(true)), after_help = JSON)]
pub(crate) struct Args {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Show how many objects each device has (the default), or each object of a kind.
    ///
    /// The command shows the devices of this user's processes in this network namespace; root sees those of all users. A device is named
    /// ADDRESS/SLOT, where the slot is the top byte of the process's QPNs. Name a device alone, or after `link` or `dev`. A filter is a
    /// name and a value: `pid 7`, `state RTS,RTR`, `lqpn 3,7-9`, `rkey 0x2a`. An object must match all filters; of a filter that is given
    /// twice, it must match one value. An unknown filter name prints the list of names. On a terminal the command prints objects as a
    /// table; elsewhere, and with --details, it prints a line for each, with names and values as rdma(8) prints them. `shared` says whether
    /// peers on this host can map a region, or why not, between quotes in a line (docs/shared-memory.md). `carrier` is `shm` or
    /// `udp`, with the reason. `direct` is the number of regions of the peer that are reached without packets, mapped or by system calls
    /// into its process; the reason for the last region that is not; and the number of WRITEs and READs that went as packets all the same.
    #[command(visible_alias = "list", after_help = JSON)]
    Show {
        /// Kind of object to show [default: the number of objects of each kind].
        #[arg(value_parser = ObjectWord)]
        object: Option<String>,
        /// A device, and pairs of filter name and value.
        #[arg(value_name = "FILTER VALUE")]
        filter: Vec<String>,
    },
}

/// The first word behind `show`: an object, whose names completions and help list, or already a device or filter.
#[derive(Clone)]
struct ObjectWord;

impl TypedValueParser for ObjectWord {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let objects = Object::value_variants().iter();
        Some(Box::new(objects.filter_map(Object::to_possible_value)))
    }
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Object {
    /// Queue pairs.
    Qp,
    /// Completion queues.
    Cq,
    /// Memory regions and windows.
    Mr,
    /// Protection domains.
    Pd,
    /// Connections and listeners.
    #[value(name = "cm_id")]
    CmId,
    /// Shared receive queues.
    Srq,
    /// Contexts: one for each device.
    Ctx,
}

pub(crate) fn run(args: &Args, before: Options) -> Result<()> {
    let mut words = Vec::new();
    if let Some(Command::Show { object, filter }) = &args.command {
        words.extend(object.iter().chain(filter).cloned());
    }
    let (object, filter) = object_and_filter(&words).unwrap_or_else(|why| objects::wrong_usage(&why));
    let (found, hidden) = answers(filter.named, asked(object))?;
    let mut rows: Vec<Row> = found.iter().flat_map(|answer| rows(answer, object)).collect();
    rows.retain(|row| filter.takes(row));
    objects::print(&rows, args.options.and(before), columns(object), hidden);
    Ok(())
}

/// Parses `[OBJECT] [DEVICE] [FILTER VALUE]...`
fn object_and_filter(words: &[String]) -> Result<(Option<Object>, Filter), String> {
    let first = words.first();
    let object = first.and_then(|word| Object::from_str(word, false).ok());
    let filters = &words[usize::from(object.is_some())..];
    let keys = keys(object);
    if let Some(word) = first.filter(|_| object.is_none()) {
        let is_filter = keys.iter().any(|(key, _)| key == word) || ["link", "dev"].contains(&word.as_str());
        if !is_filter && word.parse::<Named>().is_err() {
            let all = Object::value_variants()
                .iter()
                .filter_map(Object::to_possible_value);
            let all: Vec<String> = all.map(|value| value.get_name().to_owned()).collect();
            return Err(format!(
                "{word:?} is not an object, device or filter: objects are {}, a device is ADDRESS/SLOT or ADDRESS, filters are {}",
                all.join(", "),
                objects::names(keys)
            ));
        }
    }
    Ok((object, Filter::parse(filters, keys)?))
}

fn asked(object: Option<Object>) -> Asked {
    match object {
        None | Some(Object::Ctx) => Asked::Device,
        Some(Object::Qp) => Asked::Qp,
        Some(Object::Cq) => Asked::Cq,
        Some(Object::Mr) => Asked::Mr,
        Some(Object::Pd) => Asked::Pd,
        Some(Object::CmId) => Asked::CmId,
        Some(Object::Srq) => Asked::Srq,
    }
}

/// Returns the keys by which objects of a kind can be chosen.
fn keys(object: Option<Object>) -> &'static [(&'static str, Kind)] {
    use Kind::{Address, Number, OneOf, Word};
    const TYPES: Kind = OneOf(&["RC", "UC", "UD", "XRC_INI", "XRC_TGT"]);
    const STATES: Kind = OneOf(&["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"]);
    match object {
        None => &[("pid", Number), ("comm", Word)],
        Some(Object::Ctx) => &[("ctxn", Number), ("pid", Number), ("comm", Word)],
        Some(Object::Qp) => &[
            ("lqpn", Number),
            ("rqpn", Number),
            ("type", TYPES),
            ("state", STATES),
            ("rq-psn", Number),
            ("sq-psn", Number),
            ("path-mig-state", Word),
            ("peer", Address),
            ("carrier", OneOf(&["shm", "udp", "rnic"])),
            ("pdn", Number),
            ("scqn", Number),
            ("rcqn", Number),
            ("srqn", Number),
            ("pid", Number),
            ("comm", Word),
        ],
        Some(Object::Cq) => &[
            ("cqn", Number),
            ("cqe", Number),
            ("users", Number),
            ("comp-vector", Number),
            ("adaptive-moderation", OneOf(&["on", "off"])),
            ("moderation", OneOf(&["off", "fixed", "dim", "rate"])),
            ("ctxn", Number),
            ("pid", Number),
            ("comm", Word),
        ],
        Some(Object::Mr) => &[
            ("mrn", Number),
            ("type", OneOf(&["memory", "fast", "window-1", "window-2"])),
            ("rkey", Number),
            ("lkey", Number),
            ("iova", Number),
            ("mrlen", Number),
            ("pdn", Number),
            ("pid", Number),
            ("comm", Word),
        ],
        Some(Object::Pd) => &[
            ("pdn", Number),
            ("users", Number),
            ("ctxn", Number),
            ("pid", Number),
            ("comm", Word),
        ],
        Some(Object::CmId) => &[
            ("cm-idn", Number),
            ("lqpn", Number),
            ("rqpn", Number),
            ("state", OneOf(&["LISTEN", "CONNECT", "DISCONNECT"])),
            ("phase", Word),
            ("ps", OneOf(&["TCP", "UDP", "IB"])),
            ("src-addr", Address),
            ("src-port", Number),
            ("dst-addr", Address),
            ("dst-port", Number),
            ("pid", Number),
            ("comm", Word),
        ],
        Some(Object::Srq) => &[
            ("srqn", Number),
            ("type", OneOf(&["BASIC", "XRC"])),
            ("lqpn", Number),
            ("pdn", Number),
            ("cqn", Number),
            ("pid", Number),
            ("comm", Word),
        ],
    }
}

/// Returns the columns on a terminal.
fn columns(object: Option<Object>) -> &'static [(&'static str, Align)] {
    use Align::{Left, Right};
    match object {
        Some(Object::Qp) => &[
            ("lqpn", Right),
            ("rqpn", Right),
            ("type", Left),
            ("state", Left),
            ("peer", Left),
            ("path-mtu", Right),
            ("pid", Right),
            ("comm", Left),
            ("carrier", Left),
            ("direct", Left),
        ],
        Some(Object::Cq) => &[
            ("cqn", Right),
            ("cqe", Right),
            ("users", Right),
            ("waiting", Right),
            ("pool-vector", Right),
            ("pool-used", Right),
            ("pool-users", Right),
            ("events", Right),
            ("taken", Right),
            ("moderation", Left),
            ("count", Right),
            ("period-us", Right),
            ("pid", Right),
            ("comm", Left),
            ("overrun", Left),
        ],
        Some(Object::Mr) => &[
            ("mrn", Right),
            ("type", Left),
            ("rkey", Left),
            ("iova", Left),
            ("mrlen", Right),
            ("pdn", Right),
            ("pid", Right),
            ("comm", Left),
            ("access", Left),
            ("shared", Left),
        ],
        Some(Object::Pd) => &[("pdn", Right), ("users", Right), ("pid", Right), ("comm", Left)],
        Some(Object::CmId) => &[
            ("cm-idn", Right),
            ("lqpn", Right),
            ("rqpn", Right),
            ("state", Left),
            ("phase", Left),
            ("ps", Left),
            ("src-addr", Left),
            ("dst-addr", Left),
            ("pid", Right),
            ("comm", Left),
        ],
        Some(Object::Srq) => &[
            ("srqn", Right),
            ("type", Left),
            ("pdn", Right),
            ("cqn", Right),
            ("max-wr", Right),
            ("posted", Right),
            ("limit", Right),
            ("users", Right),
            ("pid", Right),
            ("comm", Left),
            ("lqpn", Left),
        ],
        Some(Object::Ctx) => &[("ctxn", Right), ("pid", Right), ("comm", Left)],
        // The line of a device says how many objects it has, as rdma(8) does.
        None => &[],
    }
}

fn rows(answer: &Answer, object: Option<Object>) -> Vec<Row> {
    let dev = || match object {
        None => format!("{}: {}:", answer.index, answer.at),
        Some(Object::Qp | Object::CmId) => format!("link {}", answer.at),
        Some(_) => format!("dev {}", answer.at),
    };
    match &answer.items {
        Err(why) => vec![Row::error(answer, dev(), why)],
        Ok(items) => items
            .iter()
            .map(|item| row(Row::of(answer, dev()), item, object).with_process(answer))
            .collect(),
    }
}

fn row(row: Row, item: &Item, object: Option<Object>) -> Row {
    match item {
        Item::Device(_) if object == Some(Object::Ctx) => row.with("ctxn", 0),
        Item::Device(device) => {
            let counts = &device.counts;
            row.with("pd", counts.pds)
                .with("cq", counts.cqs)
                .with("qp", counts.qps)
                .with("cm_id", counts.cm_ids)
                .with("mr", counts.mrs)
                .with("ctx", 1)
                .with("srq", counts.srqs)
        }
        Item::Qp(qp) => qp_row(row, qp),
        Item::Cq(cq) => cq_row(row, cq)
            .with("pool-vector", cq.pool.map(|pool| pool.vector))
            .with("pool-used", cq.pool.map(|pool| pool.used))
            .with("pool-users", cq.pool.map(|pool| pool.users))
            .with("ctxn", 0),
        Item::Mr(mr) => row
            .with("mrn", mr.mrn)
            .with("type", region_kind(mr.kind))
            .with("rkey", format!("{:#010x}", mr.rkey))
            // Only peers use a window.
            .detail(
                "lkey",
                (!matches!(mr.kind, RegionKind::Window(_))).then(|| format!("{:#010x}", mr.rkey)),
            )
            .with("iova", format!("{:#x}", mr.iova))
            .with("mrlen", mr.length)
            .with("access", access_words(mr.access))
            .with("pdn", mr.pd.0)
            .quoted("shared", mr.sharing.map(|sharing| sharing.to_string())),
        Item::Pd(pd) => row.with("pdn", pd.pd.0).with("users", pd.users).with("ctxn", 0),
        Item::CmId(cm) => cm_row(row, cm),
        Item::Srq(srq) => {
            let (kind, cqn) = match srq.xrc {
                Some((_, cqn)) => ("XRC", Some(cqn.0)),
                None => ("BASIC", None),
            };
            let qpns: Vec<u32> = srq.qpns.iter().map(|qpn| qpn.value()).collect();
            row.with("srqn", srq.srqn.0)
                .with("type", kind)
                .with("lqpn", qpns)
                .with("pdn", srq.pd.0)
                .with("cqn", cqn)
                .with("max-wr", srq.info.max_wr)
                .with("posted", srq.info.posted)
                .with("limit", srq.info.limit)
                .with("users", srq.users)
        }
        Item::Counter(_) => row,
    }
}

/// Returns the name that rdma(8) uses.
pub(crate) fn type_name(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::XrcSend => "XRC_INI",
        QpType::XrcRecv => "XRC_TGT",
    }
}

pub(crate) fn state_name(state: QpState) -> &'static str {
    match state {
        QpState::Reset => "RESET",
        QpState::Init => "INIT",
        QpState::Rtr => "RTR",
        QpState::Rts => "RTS",
        QpState::Sqd => "SQD",
        QpState::Sqe => "SQE",
        QpState::Error => "ERR",
    }
}

fn region_kind(kind: RegionKind) -> &'static str {
    match kind {
        RegionKind::Memory => "memory",
        RegionKind::Fast => "fast",
        RegionKind::Window(WindowType::One) => "window-1",
        RegionKind::Window(WindowType::Two) => "window-2",
    }
}

pub(crate) fn access_words(access: Access) -> Vec<String> {
    let words = access
        .iter_names()
        .map(|(name, _)| name.to_lowercase().replace('_', "-"));
    words.collect()
}

/// Describes the regions reached without packets, and the reason why not more are.
fn direct_words(qp: &QpResource) -> String {
    let direct = &qp.direct;
    let counts = [(direct.mapped, "mapped"), (direct.by_calls, "process")];
    let counts = counts
        .iter()
        .filter(|(n, _)| *n > 0)
        .map(|(n, kind)| format!("{kind} {n}"));
    let why_not = direct.why_not.iter().map(|why| format!("({why})"));
    let by_packets = by_packets(qp).into_iter().filter(|(_, n)| *n > 0);
    let by_packets = by_packets.map(|(why, n)| format!("{why} {n}"));
    counts
        .chain(why_not)
        .chain(by_packets)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns the numbers of requests that went by packets although the peer is on this host, by reason.
fn by_packets(qp: &QpResource) -> [(&'static str, u64); 4] {
    let by_packets = &qp.direct.by_packets;
    [
        ("immediate", by_packets.immediate),
        ("rate-limited", by_packets.rate_limited),
        ("not-granted", by_packets.not_granted),
        ("behind-others", by_packets.behind_others),
    ]
}

fn qp_row(row: Row, qp: &QpResource) -> Row {
    let (carrier, why) = match &qp.carrier {
        None => (None, None),
        Some(Carrier::SharedMemory) => (Some("shm"), None),
        Some(Carrier::Rnic) => (Some("rnic"), None),
        Some(Carrier::Udp(why)) => (Some("udp"), Some(why.as_str())),
    };
    let carrier_words = match (carrier, why) {
        (Some(carrier), Some(why)) => format!("{carrier} ({why})"),
        (carrier, _) => carrier.unwrap_or_default().to_owned(),
    };
    let direct = json!({
        "mapped": qp.direct.mapped,
        "process": qp.direct.by_calls,
        "why-not": qp.direct.why_not,
        "by-packets": by_packets(qp).into_iter().collect::<BTreeMap<_, _>>(),
    });
    let peer = qp.peer.map(|(address, _)| address.to_string());
    row.with("lqpn", qp.qpn.value())
        .with("rqpn", qp.peer.map(|(_, qpn)| qpn.value()))
        .with("type", type_name(qp.qp_type))
        .with("state", state_name(qp.state))
        .with("rq-psn", qp.rq_psn)
        .with("sq-psn", qp.sq_psn)
        // There is no alternate path.
        .with("path-mig-state", "MIGRATED")
        .with("peer", peer)
        .with("path-mtu", qp.peer.map(|_| qp.path_mtu))
        .shown_as("carrier", carrier, carrier_words)
        .hidden("carrier-why", why)
        .shown_as("direct", direct, direct_words(qp))
        .with("pdn", qp.pdn)
        .detail("scqn", qp.send_cqn)
        .detail("rcqn", qp.recv_cqn)
        .with("srqn", qp.srqn)
        .detail("sends", qp.sends)
        .detail("receives", qp.receives)
}

fn cq_row(row: Row, cq: &CqDetail) -> Row {
    let wakes = &cq.moderation;
    row.with("cqn", cq.cqn.0)
        .with("cqe", cq.depth)
        .with("users", cq.users)
        .with("waiting", cq.waiting)
        .shown_as(
            "overrun",
            cq.overrun,
            if cq.overrun { "yes".into() } else { String::new() },
        )
        .with("comp-vector", cq.vector)
        .with("adaptive-moderation", on_off(wakes.kind.is_adaptive()))
        .with("moderation", wakes.kind.word())
        .with("count", wakes.moderation.map(|moderation| moderation.count))
        .with(
            "period-us",
            wakes.moderation.map(|moderation| moderation.period_us),
        )
        .detail("changes", wakes.changes)
        .with("events", wakes.events)
        .with("taken", wakes.taken)
}

/// Returns the word that rdma(8) uses.
pub(crate) fn on_off(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}

fn cm_row(row: Row, cm: &CmDetail) -> Row {
    // rdma(8) has only the states of librdmacm's ids, none finer.
    let (state, phase) = match cm.state {
        CmState::Listen => ("LISTEN", "listening"),
        CmState::Connect => ("CONNECT", "asking"),
        CmState::Accept => ("CONNECT", "asked"),
        CmState::Established => ("CONNECT", "established"),
        CmState::Disconnect => ("DISCONNECT", "ending"),
        CmState::TimeWait => ("DISCONNECT", "time-wait"),
        CmState::Resolve => ("CONNECT", "resolving"),
    };
    let listens = cm.state == CmState::Listen;
    let port = cm.service.port();
    let is_datagrams = cm.service == rdmux_verbs::ServiceId::udp(port.unwrap_or(0));
    let space = port.map_or("IB", |_| if is_datagrams { "UDP" } else { "TCP" });
    // The port of a service is the listener's.
    let with_port = |address: String| match port {
        Some(port) => format!("{address}:{port}"),
        None => address,
    };
    let peer = cm.peer.map(|peer| match peer {
        std::net::IpAddr::V6(v6) => format!("[{v6}]"),
        v4 => v4.to_string(),
    });
    row.with("cm-idn", (!listens).then_some(cm.number))
        .with("lqpn", cm.qpns.0.map(|qpn| qpn.value()))
        .with("rqpn", cm.qpns.1.map(|qpn| qpn.value()))
        .with("state", state)
        .with("phase", phase)
        .with("ps", space)
        .with(
            "src-addr",
            listens.then(|| port.map(|port| format!(":{port}"))).flatten(),
        )
        .hidden("src-port", port.filter(|_| listens))
        .with("dst-addr", peer.map(with_port))
        .hidden("dst-port", port.filter(|_| !listens))
        .detail("service", format!("{:#018x}", cm.service.0))
}

#[cfg(test)]
mod tests {
    use rdmux_verbs::resources::{Counts, DeviceResource, Direct};
    use rdmux_verbs::{ByPackets, CqModeration, Cqn, Moderation, ModerationKind, Qpn};

    use super::*;

    fn found() -> [Answer; 2] {
        let connected = QpResource {
            qpn: Qpn::new(0x03_0011),
            qp_type: QpType::Rc,
            state: QpState::Rts,
            peer: Some(([127, 0, 0, 2].into(), Qpn::new(0x04_0012))),
            path_mtu: 4096,
            carrier: Some(Carrier::Udp("switched off".into())),
            direct: Direct {
                mapped: 2,
                by_calls: 0,
                why_not: Some("not shareable".into()),
                by_packets: ByPackets {
                    behind_others: 4,
                    ..ByPackets::default()
                },
            },
            pdn: 1,
            send_cqn: 2,
            recv_cqn: 3,
            srqn: None,
            sq_psn: 4,
            rq_psn: 5,
            sends: 6,
            receives: 7,
        };
        let fresh = QpResource {
            qpn: Qpn::new(0x03_0012),
            qp_type: QpType::Ud,
            state: QpState::Init,
            peer: None,
            carrier: None,
            direct: Direct::default(),
            ..connected.clone()
        };
        let answer = |slot, pid: Option<u32>, items| Answer {
            index: slot,
            at: format!("127.0.0.1/{slot}").parse().unwrap(),
            pid,
            comm: pid.map(|_| "perf".into()),
            items,
        };
        [
            answer(3, Some(7), Ok(vec![Item::Qp(connected), Item::Qp(fresh)])),
            answer(4, None, Err("it does not answer".into())),
        ]
    }

    fn shown(object: Option<Object>) -> Vec<Row> {
        found().iter().flat_map(|answer| rows(answer, object)).collect()
    }

    #[test]
    fn qp__columns() {
        let expected = "\
link           lqpn    rqpn  type  state  peer       path-mtu  pid  comm  carrier             direct
127.0.0.1/3  196625  262162  RC    RTS    127.0.0.2      4096    7  perf  udp (switched off)  mapped 2 (not shareable) behind-others 4
127.0.0.1/3  196626       -  UD    INIT   -                 -    7  perf  -                   -
127.0.0.1/4       -       -  -     -      -                 -    -  -     -                   (it does not answer)";
        let object = Some(Object::Qp);
        assert_eq!(objects::table(&shown(object), columns(object)), expected);
    }

    #[test]
    fn cq__lines_and_columns() {
        let fixed = CqDetail {
            cqn: Cqn(1),
            depth: 64,
            waiting: 2,
            overrun: false,
            users: 3,
            vector: 1,
            pool: None,
            moderation: CqModeration {
                kind: ModerationKind::Dim,
                moderation: Some(Moderation {
                    count: 16,
                    period_us: 32,
                }),
                changes: 7,
                events: 10,
                taken: 155,
            },
        };
        let off = CqDetail {
            cqn: Cqn(2),
            overrun: true,
            moderation: CqModeration::default(),
            ..fixed
        };
        let object = Some(Object::Cq);
        let [answer, _] = found();
        let items = Ok(vec![Item::Cq(fixed), Item::Cq(off)]);
        let rows = rows(&Answer { items, ..answer }, object);
        let expected = "\
dev          cqn  cqe  users  waiting  pool-vector  pool-used  pool-users  events  taken  moderation  count  period-us  pid  comm  overrun
127.0.0.1/3    1   64      3        2            -          -           -      10    155  dim            16         32    7  perf  -
127.0.0.1/3    2   64      3        2            -          -           -       0      0  off             -          -    7  perf  yes";
        assert_eq!(objects::table(&rows, columns(object)), expected);
        for (key, _) in keys(object) {
            assert!(rows[0].has(key), "no {key}");
        }
    }

    #[test]
    fn columns__are_values_of_the_objects() {
        for object in Object::value_variants() {
            let (name, columns) = (object.to_possible_value().unwrap(), columns(Some(*object)));
            let start = JSON.find(&format!("\n  {} ", name.get_name())).unwrap();
            // The line that lists the values of such an object, and the next one, where a long list goes on.
            let listed: Vec<&str> = JSON[start + 1..].lines().take(2).collect();
            assert!(!columns.is_empty(), "{object:?}");
            for (column, _) in columns {
                // A column that no object has would stay empty.
                let is_of_all = ["pid", "comm"].contains(column);
                assert!(
                    is_of_all || listed.concat().contains(column),
                    "{object:?} has no {column}"
                );
            }
        }
    }

    #[test]
    fn keys__are_those_of_the_objects() {
        let device = Item::Device(DeviceResource {
            guid: 1,
            mtu: 4096,
            active: true,
            version: "0.1.0".into(),
            moderation: None,
            counts: Counts::default(),
        });
        let answer = &found()[0];
        let has = |row: &Row, object| {
            for (key, _) in keys(object) {
                // A filter on a key that no object has would never hold.
                assert!(row.has(key) || object.is_none(), "{object:?} has no {key}");
            }
        };
        let ctx = Some(Object::Ctx);
        has(
            &row(Row::of(answer, String::new()), &device, ctx).with_process(answer),
            ctx,
        );
        let qp = Some(Object::Qp);
        has(&shown(qp)[0], qp);
    }
}
