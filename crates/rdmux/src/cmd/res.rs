//! `rdmux res`: what the devices of this user's processes have, with the words of rdma(8).

use std::fs;
use std::io::IsTerminal;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::Result;
use rdmux_verbs::soft::resources::{AskError, DeviceAt, QpResource, Resources, ask, devices};
use rdmux_verbs::{Carrier, QpState, QpType};
use serde_json::{Value, json};

use crate::output::{self, Align};

/// How long all devices together have for their answers.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Show how many resources each device has, or each queue pair.
    ///
    /// Devices are those of this user's processes in this network namespace, named ADDRESS/SLOT: the slot is the top byte of a
    /// process's QPNs. On a terminal queue pairs are columns; elsewhere a line each, of names and values as rdma(8) prints
    /// them. `carrier` is `shm` or `udp` with the reason, `direct` how many regions of the peer are reached without packets,
    /// mapped or by calls into its process, with the reason for the last one that is not.
    #[command(after_help = "\
JSON: an array of objects: ifname, port, pid, comm, and cq, qp, mr; of qp instead lqpn, rqpn, type, state, peer, path-mtu, carrier, carrier-why,
direct (mapped, process, why-not); or error, where a device does not answer.")]
    Show {
        /// What to show of each device [default: how many there are of all].
        object: Option<Object>,
        /// Print JSON, with the keys of rdma(8): a list of objects.
        #[arg(long)]
        json: bool,
    },
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Object {
    /// Queue pairs.
    Qp,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let Command::Show { object, json } = &args.command;
    let (found, hidden) = answers();
    let text = match (object, json) {
        (None, true) => pretty(found.iter().map(Answer::counts_json).collect()),
        (None, false) => lines(found.iter().map(Answer::counts_line)),
        (Some(Object::Qp), true) => pretty(found.iter().flat_map(Answer::qps_json).collect()),
        (Some(Object::Qp), false) if std::io::stdout().is_terminal() => qp_table(&found),
        (Some(Object::Qp), false) => lines(found.iter().flat_map(Answer::qp_lines)),
    };
    if !text.is_empty() {
        output::say(&text);
    }
    for note in hidden {
        output::error(&note);
    }
    Ok(())
}

/// What a device of this user answered.
struct Answer {
    at: DeviceAt,
    pid: Option<u32>,
    comm: Option<String>,
    resources: Result<Resources, String>,
}

/// What the devices answered, and a note for each that keeps its resources to itself.
fn answers() -> (Vec<Answer>, Vec<anyhow::Error>) {
    let (mut found, mut hidden) = (Vec::new(), Vec::new());
    for (at, answer) in ask(&devices(), PATIENCE) {
        let (pid, resources) = match answer {
            Ok(resources) => (resources.pid, Ok(resources)),
            Err(AskError::NotThere) => continue,
            Err(error @ (AskError::OtherUser { .. } | AskError::UnknownUser)) => {
                hidden.push(anyhow::Error::new(error).context(format!("{at} is not shown")));
                continue;
            }
            Err(error @ (AskError::NoAnswer { pid } | AskError::Ended { pid })) => {
                (pid, Err(error.to_string()))
            }
            Err(error) => (None, Err(error.to_string())),
        };
        found.push(Answer {
            at,
            pid,
            comm: pid.and_then(comm),
            resources,
        });
    }
    (found, hidden)
}

/// The name of a process.
fn comm(pid: u32) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    // A process names itself as it likes.
    Some(
        name.trim_end()
            .replace(|c: char| c.is_control() || c.is_whitespace(), "?"),
    )
}

fn lines(lines: impl Iterator<Item = String>) -> String {
    lines.collect::<Vec<_>>().join("\n")
}

fn pretty(list: Vec<Value>) -> String {
    format!("{:#}", Value::Array(list))
}

impl Answer {
    fn pid_and_comm(&self) -> String {
        let pid = self.pid.map(|pid| format!(" pid {pid}"));
        let comm = self.comm.as_ref().map(|comm| format!(" comm {comm}"));
        pid.unwrap_or_default() + &comm.unwrap_or_default()
    }

    /// An object with what names the device, and more.
    fn object(&self, more: Value) -> Value {
        let mut object = json!({ "ifname": self.at.address, "port": self.at.slot });
        let processes = json!({ "pid": self.pid, "comm": self.comm });
        for part in [more, processes] {
            if let (Value::Object(object), Value::Object(part)) = (&mut object, part) {
                object.extend(part);
            }
        }
        object
    }

    fn counts_line(&self) -> String {
        let what = match &self.resources {
            Ok(found) => format!("cq {} qp {} mr {}", found.cqs, found.qps, found.mrs),
            Err(error) => format!("({error})"),
        };
        format!("{}: {what}{}", self.at, self.pid_and_comm())
    }

    fn counts_json(&self) -> Value {
        self.object(match &self.resources {
            Ok(found) => json!({ "cq": found.cqs, "qp": found.qps, "mr": found.mrs }),
            Err(error) => json!({ "error": error }),
        })
    }

    fn qps_json(&self) -> Vec<Value> {
        match &self.resources {
            Ok(found) => found
                .queue_pairs
                .iter()
                .map(|qp| self.object(qp_json(qp)))
                .collect(),
            Err(error) => vec![self.object(json!({ "error": error }))],
        }
    }

    fn qp_lines(&self) -> Vec<String> {
        let line = |what: &str| format!("link {} {what}{}", self.at, self.pid_and_comm());
        match &self.resources {
            Ok(found) => found.queue_pairs.iter().map(|qp| line(&qp_line(qp))).collect(),
            Err(error) => vec![line(&format!("({error})"))],
        }
    }

    fn qp_rows(&self) -> Vec<Vec<String>> {
        let row = |middle: Vec<String>, end: Vec<String>| {
            let pid = self.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
            let comm = self.comm.clone().unwrap_or_else(|| "-".to_owned());
            let mut row = vec![self.at.to_string()];
            row.extend(middle);
            row.extend([pid, comm]);
            row.extend(end);
            row
        };
        match &self.resources {
            Ok(found) => found
                .queue_pairs
                .iter()
                .map(|qp| row(middle_cells(qp), vec![carrier_words(qp), direct_words(qp)]))
                .collect(),
            Err(error) => vec![row(vec!["-".to_owned(); 6], vec![format!("({error})")])],
        }
    }
}

/// The names that rdma(8) has.
fn type_name(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::XrcSend => "XRC_INI",
        QpType::XrcRecv => "XRC_TGT",
    }
}

fn state_name(state: QpState) -> &'static str {
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

/// `shm`, `udp` and why, or `-`.
fn carrier_words(qp: &QpResource) -> String {
    match &qp.carrier {
        None => "-".into(),
        Some(Carrier::SharedMemory) => "shm".into(),
        Some(Carrier::Udp(why)) => format!("udp ({why})"),
    }
}

/// What is reached without packets, and why not more.
fn direct_words(qp: &QpResource) -> String {
    let direct = &qp.direct;
    let counts = [(direct.mapped, "mapped"), (direct.by_calls, "process")];
    let counts = counts
        .iter()
        .filter(|(n, _)| *n > 0)
        .map(|(n, kind)| format!("{kind} {n}"));
    let why_not = direct.why_not.iter().map(|why| format!("({why})"));
    let words: Vec<String> = counts.chain(why_not).collect();
    if words.is_empty() {
        "-".into()
    } else {
        words.join(" ")
    }
}

fn qp_line(qp: &QpResource) -> String {
    let peer_qpn = qp.peer.map(|(_, qpn)| format!(" rqpn {}", qpn.value()));
    let peer = qp
        .peer
        .map(|(address, _)| format!(" peer {address} path-mtu {}", qp.path_mtu));
    let named = |name: &str, words: String| {
        if words == "-" {
            String::new()
        } else {
            format!(" {name} {words}")
        }
    };
    [
        format!("lqpn {}", qp.qpn.value()),
        peer_qpn.unwrap_or_default(),
        format!(" type {} state {}", type_name(qp.qp_type), state_name(qp.state)),
        peer.unwrap_or_default(),
        named("carrier", carrier_words(qp)),
        named("direct", direct_words(qp)),
    ]
    .concat()
}

fn qp_json(qp: &QpResource) -> Value {
    let (carrier, why) = match &qp.carrier {
        None => (None, None),
        Some(Carrier::SharedMemory) => (Some("shm"), None),
        Some(Carrier::Udp(why)) => (Some("udp"), Some(why)),
    };
    json!({
        "lqpn": qp.qpn.value(),
        "rqpn": qp.peer.map(|(_, qpn)| qpn.value()),
        "type": type_name(qp.qp_type),
        "state": state_name(qp.state),
        "peer": qp.peer.map(|(address, _): (IpAddr, _)| address),
        "path-mtu": qp.peer.map(|_| qp.path_mtu),
        "carrier": carrier,
        "carrier-why": why,
        "direct": {
            "mapped": qp.direct.mapped,
            "process": qp.direct.by_calls,
            "why-not": qp.direct.why_not,
        },
    })
}

/// The cells between the device and its process.
fn middle_cells(qp: &QpResource) -> Vec<String> {
    let of_peer = |cell: fn(&QpResource, IpAddr, u32) -> String| match qp.peer {
        Some((address, qpn)) => cell(qp, address, qpn.value()),
        None => "-".into(),
    };
    vec![
        qp.qpn.value().to_string(),
        of_peer(|_, _, qpn| qpn.to_string()),
        type_name(qp.qp_type).into(),
        state_name(qp.state).into(),
        of_peer(|_, address, _| address.to_string()),
        of_peer(|qp, _, _| qp.path_mtu.to_string()),
    ]
}

fn qp_table(found: &[Answer]) -> String {
    const COLUMNS: [(&str, Align); 11] = [
        ("link", Align::Left),
        ("lqpn", Align::Right),
        ("rqpn", Align::Right),
        ("type", Align::Left),
        ("state", Align::Left),
        ("peer", Align::Left),
        ("path-mtu", Align::Right),
        ("pid", Align::Right),
        ("comm", Align::Left),
        ("carrier", Align::Left),
        ("direct", Align::Left),
    ];
    let rows: Vec<Vec<String>> = found.iter().flat_map(Answer::qp_rows).collect();
    if rows.is_empty() {
        return String::new();
    }
    output::table(&COLUMNS, &rows)
}

#[cfg(test)]
mod tests {
    use rdmux_verbs::Qpn;
    use rdmux_verbs::soft::resources::Direct;

    use super::*;

    fn answers() -> [Answer; 2] {
        let at = DeviceAt {
            address: IpAddr::from([127, 0, 0, 1]),
            slot: 3,
        };
        let connected = QpResource {
            qpn: Qpn::new(0x03_0011),
            qp_type: QpType::Rc,
            state: QpState::Rts,
            peer: Some((IpAddr::from([127, 0, 0, 2]), Qpn::new(0x04_0012))),
            path_mtu: 4096,
            carrier: Some(Carrier::Udp("switched off".into())),
            direct: Direct {
                mapped: 2,
                by_calls: 0,
                why_not: Some("not shareable".into()),
            },
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
        let resources = Resources {
            pid: Some(7),
            qps: 2,
            mrs: 1,
            cqs: 4,
            queue_pairs: vec![connected, fresh],
        };
        let answer = |slot, pid, resources| Answer {
            at: DeviceAt { slot, ..at },
            pid,
            comm: pid.map(|_| "perf".into()),
            resources,
        };
        [
            answer(3, Some(7), Ok(resources)),
            answer(4, None, Err("it does not answer".into())),
        ]
    }

    #[test]
    fn qp_lines__names_and_values() {
        let found: Vec<String> = answers().iter().flat_map(Answer::qp_lines).collect();
        let expected = [
            "link 127.0.0.1/3 lqpn 196625 rqpn 262162 type RC state RTS peer 127.0.0.2 path-mtu 4096 carrier udp (switched \
             off) direct mapped 2 (not shareable) pid 7 comm perf",
            "link 127.0.0.1/3 lqpn 196626 type UD state INIT pid 7 comm perf",
            "link 127.0.0.1/4 (it does not answer)",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn counts_line__of_each_device() {
        let found: Vec<String> = answers().iter().map(Answer::counts_line).collect();
        let expected = [
            "127.0.0.1/3: cq 4 qp 2 mr 1 pid 7 comm perf",
            "127.0.0.1/4: (it does not answer)",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn qp_table__aligned() {
        let expected = "\
link           lqpn    rqpn  type  state  peer       path-mtu  pid  comm  carrier               direct
127.0.0.1/3  196625  262162  RC    RTS    127.0.0.2      4096    7  perf  udp (switched off)    mapped 2 (not shareable)
127.0.0.1/3  196626       -  UD    INIT   -                 -    7  perf  -                     -
127.0.0.1/4       -       -  -     -      -                 -    -  -     (it does not answer)";
        assert_eq!(qp_table(&answers()), expected);
    }

    #[test]
    fn qps_json__keys() {
        let found: Vec<Value> = answers().iter().flat_map(Answer::qps_json).collect();
        assert_eq!(found[0]["ifname"], "127.0.0.1");
        assert_eq!(found[0]["carrier-why"], "switched off");
        assert_eq!(found[0]["direct"]["mapped"], 2);
        assert_eq!(found[1]["peer"], Value::Null);
        assert_eq!(found[2]["error"], "it does not answer");
    }
}
