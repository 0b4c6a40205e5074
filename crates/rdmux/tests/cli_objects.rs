//! `rdmux dev`, `link`, `res` and `stat`: their output about running devices, and the users who may see it.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{AS_NOBODY, text};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{
    Access, Arm, CompletionQueue, Device, MemoryRegion, Moderation, ModerationPolicy, Options, QpAttributes,
    QpOptions, QpState, QpType, QueuePair, RecvRequest, SgeList, SharedReceiveQueue,
};
use serde_json::Value;
use skip::skip;

const RDMUX: &str = env!("CARGO_BIN_EXE_rdmux");
const LONG: Duration = Duration::from_secs(60);
fn rdmux_by(runner: &[&str], args: &[&str]) -> Output {
    let line: Vec<&str> = runner.iter().copied().chain([RDMUX]).collect();
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).args(args).stdin(Stdio::null());
    command.output().unwrap()
}

fn lines(args: &[&str]) -> Vec<String> {
    let output = rdmux_by(&[], args);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(str::to_owned).collect()
}

fn list(args: &[&str]) -> Vec<Value> {
    let output = rdmux_by(&[], &[args, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// A device of this process with an object of each kind.
struct Populated {
    device: Device,
    cq: CompletionQueue,
    qps: Vec<QueuePair>,
    mr: MemoryRegion,
    srq: SharedReceiveQueue,
    name: String,
}

impl Populated {
    fn at(address: &str) -> Populated {
        rdmux_soft::register();
        let device = Device::open(address.parse().unwrap()).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
        let srq = pd.create_srq(32).unwrap();
        let qp = |qp_type, srq| {
            let options = QpOptions {
                qp_type,
                srq,
                ..QpOptions::new(&cq)
            };
            pd.create_qp(&options).unwrap()
        };
        let qps = vec![
            qp(QpType::Rc, None),
            qp(QpType::Ud, None),
            qp(QpType::Rc, Some(srq.clone())),
        ];
        let memory = Arc::new(AnonymousMemory::new(8192).unwrap());
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let mr = pd.reg_mr_all(memory.clone(), memory.address(), access).unwrap();
        let shown = list(&["dev", "show", address]);
        assert_eq!(shown.len(), 1, "{shown:?}");
        let name = format!("{address}/{}", shown[0]["port"]);
        Populated {
            device,
            cq,
            qps,
            mr,
            srq,
            name,
        }
    }

    fn res(&self, object: &str, filter: &str) -> Vec<Value> {
        let mut args = vec!["res", "show", object, "link", &self.name];
        args.extend(filter.split_whitespace());
        list(&args)
    }
}

#[test]
fn dev_and_link__of_a_device() {
    let at = Populated::at("127.0.7.1");
    let pid = std::process::id();
    let dev = &list(&["dev", "show", &at.name])[0];
    for (key, expected) in [
        ("ifname", "127.0.7.1"),
        ("node_type", "ca"),
        ("fw", env!("CARGO_PKG_VERSION")),
    ] {
        assert_eq!(dev[key], expected, "{dev}");
    }
    assert_eq!(dev["pid"], pid);
    assert_eq!(dev["node_guid"], dev["sys_image_guid"]);
    assert_eq!(
        dev["node_guid"].as_str().map(str::len),
        Some("0123:4567:89ab:cdef".len())
    );
    assert!(dev["caps"].as_array().unwrap().contains(&"MEM_WINDOW".into()));
    let link = &list(&["link", "show", &at.name])[0];
    for (key, expected) in [
        ("state", "ACTIVE"),
        ("physical_state", "LINK_UP"),
        ("netdev", "lo"),
    ] {
        assert_eq!(link[key], expected, "{link}");
    }
    assert!(link["netdev_index"].as_u64().is_some());
    // The same output, as a person sees it.
    let line = &lines(&["link", "show", "127.0.7.1/-"])[0];
    let expected = format!(
        "link {} state ACTIVE physical_state LINK_UP active_mtu 4096 netdev lo pid {pid}",
        at.name
    );
    assert!(line.starts_with(&expected), "{line}");
    let line = &lines(&["dev", "show", "127.0.7.1"])[0];
    assert!(line.contains(&format!("{}: node_type ca fw", at.name)), "{line}");
    assert!(!line.contains("caps"), "{line}");
    assert!(lines(&["dev", "show", "-d", "127.0.7.1"])[0].contains("caps <BAD_PKEY_CNTR"));
}

#[test]
fn link__port_that_is_down() {
    let options = Options {
        faults: Some("down=0s..".parse().unwrap()),
        ..Options::default()
    };
    rdmux_soft::register();
    let device = Device::open_with("127.0.7.2".parse().unwrap(), options).unwrap();
    // The port is down once the device's thread has checked it.
    assert!(device.wait_async_event(LONG).is_some());
    let link = &list(&["link", "show", "127.0.7.2"])[0];
    assert_eq!(
        (&link["state"], &link["physical_state"]),
        (&"DOWN".into(), &"DISABLED".into())
    );
}

#[test]
fn res__objects_of_each_kind() {
    let at = Populated::at("127.0.7.3");
    let listener = at.device.listen(7174).unwrap();
    let counts = &at.res("ctx", "")[0];
    assert_eq!(counts["ctxn"], 0);
    let counts = &list(&["res", "show"])
        .into_iter()
        .find(|one| one["ifname"] == "127.0.7.3")
        .unwrap();
    for (key, expected) in [
        ("pd", 1),
        ("cq", 1),
        ("qp", 3),
        ("cm_id", 1),
        ("mr", 1),
        ("ctx", 1),
        ("srq", 1),
    ] {
        assert_eq!(counts[key], expected, "{counts}");
    }
    let qps = at.res("qp", "");
    let mut numbers: Vec<u32> = at.qps.iter().map(|qp| qp.qpn().value()).collect();
    numbers.sort_unstable();
    assert_eq!(
        qps.iter()
            .map(|qp| qp["lqpn"].as_u64().unwrap() as u32)
            .collect::<Vec<_>>(),
        numbers
    );
    let qp = qps.iter().find(|qp| qp["type"] == "UD").unwrap();
    for (key, expected) in [("state", "RESET"), ("path-mig-state", "MIGRATED")] {
        assert_eq!(qp[key], expected, "{qp}");
    }
    let mr = &at.res("mr", "")[0];
    assert_eq!(mr["rkey"], format!("{:#010x}", at.mr.rkey().0));
    assert_eq!(
        (&mr["mrlen"], &mr["iova"]),
        (&8192.into(), &format!("{:#x}", at.mr.iova()).into())
    );
    assert_eq!(mr["access"], serde_json::json!(["local-write", "remote-read"]));
    let cq = &at.res("cq", "")[0];
    assert_eq!((&cq["cqe"], &cq["users"]), (&64.into(), &3.into()));
    assert_eq!(cq["cqn"], at.cq.cqn().0);
    let pd = &at.res("pd", "")[0];
    assert_eq!((&pd["users"], &pd["pdn"]), (&5.into(), &mr["pdn"]));
    let srq = &at.res("srq", "")[0];
    assert_eq!(
        (&srq["srqn"], &srq["type"]),
        (&at.srq.srqn().0.into(), &"BASIC".into())
    );
    assert_eq!(srq["lqpn"], serde_json::json!([at.qps[2].qpn().value()]));
    let cm = &at.res("cm_id", "")[0];
    assert_eq!(
        (&cm["state"], &cm["ps"], &cm["src-addr"]),
        (&"LISTEN".into(), &"TCP".into(), &":7174".into())
    );
    drop(listener);
    assert_eq!(at.res("cm_id", ""), Vec::<Value>::new());
    // Lines for a person, where no terminal asks for columns.
    let line = &lines(&["res", "show", "mr", "link", &at.name])[0];
    assert!(line.starts_with(&format!("dev {} mrn ", at.name)), "{line}");
    assert!(line.contains(" access local-write,remote-read "), "{line}");
    assert!(line.contains(" shared "), "{line}");
    let none = rdmux_by(&[], &["res", "show", "mr", "rkey", "0x1", "link", &at.name]);
    let said = text(&none.stderr);
    assert!(none.status.success() && none.stdout.is_empty(), "{said}");
    assert!(said.contains("nothing to show"), "{said}");
}

#[test]
fn res_cq__wake_ups_and_what_each_was_for() {
    let at = Populated::at("127.0.7.11");
    at.cq
        .moderate(ModerationPolicy::Fixed(Moderation {
            count: 2,
            period_us: 60_000,
        }))
        .unwrap();
    at.cq.arm(Arm::Next);
    let qp = &at.qps[0];
    qp.init().unwrap();
    for wr_id in 0..3 {
        let sges = SgeList::EMPTY;
        qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    while at.cq.poll().is_some() {}
    let cq = &at.res("cq", "moderation fixed adaptive-moderation off")[0];
    for (key, expected) in [
        ("count", 2),
        ("period-us", 60_000),
        ("changes", 0),
        ("events", 1),
        ("taken", 3),
    ] {
        assert_eq!(cq[key], expected, "{key} of {cq}");
    }
    let line = &lines(&["res", "show", "cq", "link", &at.name])[0];
    let expected =
        "comp-vector 0 adaptive-moderation off moderation fixed count 2 period-us 60000 events 1 taken 3";
    assert!(line.contains(expected), "{line}");
    let last = at.device.completion_vectors() - 1;
    let other = at.device.create_cq_on(4, last).unwrap();
    let shown = &at.res("cq", &format!("cqn {} comp-vector {last}", other.cqn().0))[0];
    assert_eq!(
        (&cq["comp-vector"], &shown["comp-vector"]),
        (&0.into(), &last.into())
    );
    at.cq.moderate(ModerationPolicy::Dim).unwrap();
    let cq = &at.res("cq", "moderation dim adaptive-moderation on")[0];
    assert_eq!((&cq["count"], &cq["period-us"]), (&1.into(), &1.into()), "{cq}");
    at.cq.moderate(ModerationPolicy::Rate).unwrap();
    let cq = &at.res("cq", "")[0];
    assert_eq!(cq["moderation"], "rate");
    assert_eq!(cq["count"], Value::Null);
}

/// Runs a command that prints nothing when it succeeds.
fn quiet(args: &[&str]) {
    assert_eq!(lines(args), Vec::<String>::new(), "{args:?}");
}

#[test]
fn dev_set__moderation_of_a_running_device() {
    let at = Populated::at("127.0.7.12");
    let own = at.device.create_cq(4).unwrap();
    own.moderate(ModerationPolicy::Off).unwrap();
    let engine = at.device.open_engine().unwrap();
    let shown = |key| list(&["dev", "show", &at.name])[0][key].clone();
    assert_eq!(
        (shown("adaptive-moderation"), shown("moderation")),
        ("off".into(), "off".into())
    );
    quiet(&["dev", "set", &at.name, "adaptive-moderation", "on"]);
    assert_eq!(
        (shown("adaptive-moderation"), shown("moderation")),
        ("on".into(), "rate".into())
    );
    let line = &lines(&["-d", "dev", "show", &at.name])[0];
    assert!(
        line.contains(" adaptive-moderation on moderation rate "),
        "{line}"
    );
    // A queue that was there follows when it is armed; one with a policy of its own keeps that.
    at.cq.arm(Arm::Next);
    own.arm(Arm::Next);
    let policy = |cq: &CompletionQueue| cq.moderation().0;
    assert_eq!(
        (policy(&at.cq), policy(&own)),
        (ModerationPolicy::ADAPTIVE, ModerationPolicy::Off)
    );
    let cqs = at.res("cq", "adaptive-moderation on");
    assert_eq!((cqs.len(), &cqs[0]["cqn"]), (1, &at.cq.cqn().0.into()));
    let of_engine = engine.create_cq(4).unwrap();
    for cq in [at.device.create_cq(4).unwrap(), of_engine.clone()] {
        assert_eq!(policy(&cq), ModerationPolicy::ADAPTIVE);
    }
    // All devices of an address.
    quiet(&["dev", "set", "127.0.7.12", "moderation", "16,32us"]);
    assert_eq!(
        (shown("adaptive-moderation"), shown("moderation")),
        ("off".into(), "16,32us".into())
    );
    for cq in [&at.cq, &of_engine] {
        assert_eq!(policy(cq).to_string(), "16,32us");
    }
    for device in [&at.device, &engine] {
        assert_eq!(device.moderation_policy().to_string(), "16,32us");
    }
    let cqs = at.res("cq", "moderation fixed");
    assert_eq!((&cqs[0]["count"], &cqs[0]["period-us"]), (&16.into(), &32.into()));
    quiet(&["dev", "set", &at.name, "adaptive-moderation", "off"]);
    at.cq.arm(Arm::Next);
    assert_eq!(policy(&at.cq), ModerationPolicy::Off);
    assert_eq!(at.res("cq", "moderation off cqe 64").len(), 1);
}

#[test]
fn res__filters() {
    let at = Populated::at("127.0.7.4");
    let qpn = at.qps[0].qpn().value();
    let found = |filter: &str| at.res("qp", filter).len();
    assert_eq!(found(""), 3);
    assert_eq!(found("type RC"), 2);
    assert_eq!(found("type rc,ud state RESET"), 3);
    assert_eq!(found("state RTS,ERR"), 0);
    assert_eq!(found(&format!("lqpn {qpn}")), 1);
    assert_eq!(found(&format!("lqpn {}-{},7", qpn, qpn)), 1);
    assert_eq!(found(&format!("lqpn {qpn:#x}")), 1);
    assert_eq!(found(&format!("lqpn 7 lqpn {qpn:#x}-{qpn:#X}")), 1);
    assert_eq!(found("type UD type UC"), 1, "either");
    assert_eq!(found("lqpn 0-65535"), 0, "those are of slot 0");
    assert_eq!(found(&format!("pid {}", std::process::id())), 3);
    assert_eq!(found("pid 1"), 0);
    assert_eq!(found(&format!("srqn {}", at.srq.srqn().0)), 1);
    let key = at.mr.rkey().0;
    for key in [format!("rkey {key:#x}"), format!("lkey {key}")] {
        assert_eq!(at.res("mr", &key).len(), 1, "{key}");
    }
    assert_eq!(at.res("mr", "rkey 0x1").len(), 0);
    let listener = at.device.listen(7175).unwrap();
    assert_eq!(at.res("cm_id", "src-port 7000-7175").len(), 1);
    assert_eq!(at.res("cm_id", "dst-port 7175").len(), 0);
    drop(listener);
    // All devices of the address.
    let of = |link: &str| list(&["res", "show", "qp", "link", link]).len();
    assert_eq!((of("127.0.7.4/-"), of("127.0.7.4")), (3, 3));
}

/// Checks the forms of rdma(8).
#[test]
fn usage__as_with_rdma() {
    let at = Populated::at("127.0.7.10");
    let same = |forms: &[&[&str]]| {
        let said = forms.iter().map(|args| {
            let all = lines(args);
            // The index among all devices changes whenever others come and go.
            let own = all
                .iter()
                .filter_map(|line| line.find(&at.name).map(|from| line[from..].to_owned()));
            own.collect::<Vec<_>>()
        });
        let said: Vec<_> = said.collect();
        assert!(!said[0].is_empty(), "{forms:?}");
        assert!(said.iter().all(|one| *one == said[0]), "{forms:?}: {said:?}");
    };
    same(&[
        &["dev", "show"],
        &["dev"],
        &["dev", "list"],
        &["-p", "dev", "-p"],
        &["dev", "show", &at.name],
    ]);
    same(&[&["dev", "show", "-d"], &["-d", "dev"], &["dev", "-dd", "show"]]);
    same(&[&["link", "show"], &["link"]]);
    same(&[
        &["stat", "show", "link", &at.name],
        &["stat"],
        &["statistic", "show", &at.name],
        &["stat", "show", "dev", "127.0.7.10"],
    ]);
    same(&[
        &["res", "show"],
        &["resource"],
        &["res", "show", &at.name],
        &["res", "show", "link", &at.name],
    ]);
    same(&[
        &["res", "show", "qp", "link", &at.name],
        &["res", "show", "qp", "dev", "127.0.7.10"],
        &["res", "show", "qp", "127.0.7.10/-"],
        &["res", "show", "qp"],
    ]);
    let json = |args: &[&str]| -> Value {
        let all: Vec<Value> = serde_json::from_str(&lines(args).concat()).expect("JSON");
        all.into_iter()
            .filter(|one| one["ifname"] == "127.0.7.10")
            .collect()
    };
    let expected = json(&["res", "show", "qp", "127.0.7.10", "--json"]);
    assert_eq!(expected.as_array().map(Vec::len), Some(3));
    for args in [
        &["-j", "res", "show", "qp"][..],
        &["-jp", "res", "show", "qp"],
        &["-p", "res", "-j", "show", "qp", "-d"],
    ] {
        assert_eq!(json(args), expected, "{args:?}");
    }
    // With details, a line has what JSON has in any case.
    let line = &lines(&["-d", "res", "show", "qp", &at.name])[0];
    assert!(line.contains(" scqn ") && line.contains(" sends 0 "), "{line}");
}

#[test]
fn stat__counters() {
    let at = Populated::at("127.0.7.5");
    let stat = &list(&["stat", "show", "link", &at.name])[0];
    for (name, _, _) in at.device.counters().iter() {
        assert!(stat[name].as_u64().is_some(), "{name} of {stat}");
    }
    let options = Options {
        faults: Some("loss=1%".parse().unwrap()),
        ..Options::default()
    };
    rdmux_soft::register();
    let _faulty = Device::open_with("127.0.7.6".parse().unwrap(), options).unwrap();
    let stat = &list(&["stat", "show", "link", "127.0.7.6"])[0];
    assert_eq!(stat["fault_packets"], 0);
}

#[test]
fn json__of_one_line_unless_it_is_to_be_pretty() {
    let _at = Populated::at("127.0.7.7");
    let said = |more: &[&str]| {
        let args = [&["dev", "show", "127.0.7.7"], more].concat();
        lines(&args).len()
    };
    assert_eq!(said(&["-j"]), 1);
    assert!(said(&["-j", "-p"]) > 10);
    assert_eq!(said(&["-p"]), 1, "JSON alone is made pretty");
}

#[test]
fn usage__what_is_wrong_is_said() {
    for (args, expected) in [
        (&["res", "show", "qp", "lqpn"][..], "has no value"),
        (&["res", "show", "qp", "qpn", "3"], "filters are link, dev, lqpn"),
        (&["res", "show", "qp", "lqpn", "x"], "takes numbers"),
        (&["res", "show", "qp", "link", "eth0"], "ADDRESS/SLOT"),
        (
            &["res", "show", "xyz"],
            "objects are qp, cq, mr, pd, cm_id, srq, ctx",
        ),
        (&["res", "show", "qp", "state", "FOO"], "state takes RESET, INIT"),
        (
            &["res", "show", "qp", "127.0.0.1", "link", "127.0.0.2"],
            "more than one device",
        ),
        (&["-j", "perf", "read-lat"], "put --json after"),
        (&["stat", "show", "qp", "3"], "filters are link, dev"),
        (&["dev", "show", "eth0"], "ADDRESS/SLOT"),
        (&["dev", "set", "eth0", "moderation", "dim"], "ADDRESS/SLOT"),
        (
            &["dev", "set", "127.0.0.1", "name", "x"],
            "adaptive-moderation, moderation",
        ),
        (
            &["dev", "set", "127.0.0.1", "adaptive-moderation", "dim"],
            "takes on or off, not \"dim\"",
        ),
        (
            &["dev", "set", "127.0.0.1", "moderation", "on"],
            "use off, dim, rate, or COUNT,PERIOD",
        ),
    ] {
        let output = rdmux_by(&[], args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let said = text(&output.stderr);
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    for args in [
        &["link", "show", "127.9.9.9/3"][..],
        &["dev", "set", "127.9.9.9/3", "moderation", "off"],
    ] {
        let output = rdmux_by(&[], args);
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(
            said.contains("no device 127.9.9.9/3") && said.contains("rdmux dev show"),
            "{said}"
        );
    }
}

/// A child that is killed when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn res__root_sees_everybodys_and_others_their_own() {
    let nobody = rdmux_by(&AS_NOBODY, &["--version"]);
    if !nobody.status.success() {
        return skip(format!(
            "this user may not be another one, or another user may not run {RDMUX}"
        ));
    }
    let roots = Populated::at("127.0.7.8");
    let line: Vec<&str> = AS_NOBODY.iter().copied().chain([RDMUX]).collect();
    let serve = ["perf", "read-lat", "--bind", "127.0.7.9"];
    let mut command = Command::new(line[0]);
    command
        .args(&line[1..])
        .args(serve)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let serving = Running(command.spawn().unwrap());
    // Root sees the device and all its objects.
    let deadline = Instant::now() + LONG;
    let theirs = loop {
        let output = rdmux_by(&[], &["res", "show", "cm_id", "dev", "127.0.7.9", "--json"]);
        let found: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if let [listening] = &found[..] {
            break listening.clone();
        }
        assert!(Instant::now() < deadline, "{}", text(&output.stderr));
    };
    assert_eq!(theirs["state"], "LISTEN", "{theirs}");
    assert_eq!(theirs["pid"], serving.0.id());
    assert_eq!(
        list(&["res", "show", "cq", "link", "127.0.7.9"]).len(),
        0,
        "nobody has connected"
    );
    // Root also changes it; the user changes only devices of their own.
    let set = |by: &[&str], device: &str| rdmux_by(by, &["dev", "set", device, "adaptive-moderation", "on"]);
    let shown = |device| list(&["dev", "show", device])[0]["adaptive-moderation"].clone();
    let output = set(&[], "127.0.7.9");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(shown("127.0.7.9"), "on");
    let output = set(&AS_NOBODY, &roots.name);
    let expected = format!("rdmux: cannot set {}: it belongs to user 0\n", roots.name);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(1), expected));
    assert_eq!(shown(&roots.name), "off");
    // The other way round, the user sees only the name of the device and its owner.
    let key = format!("{:08x}", roots.mr.rkey().0);
    let guid = list(&["dev", "show", &roots.name])[0]["node_guid"]
        .as_str()
        .unwrap()
        .to_owned();
    for args in [
        &["dev", "show"][..],
        &["link", "show"],
        &["stat", "show"],
        &["res", "show"],
        &["res", "show", "mr"],
        &["res", "show", "qp", "link", &roots.name],
    ] {
        let output = rdmux_by(&AS_NOBODY, args);
        let (shown, notes) = (text(&output.stdout), text(&output.stderr));
        let expected = format!("rdmux: cannot show {}: it belongs to user 0\n", roots.name);
        assert!(notes.contains(&expected), "{args:?}: {notes}");
        for secret in [&roots.name, &key, &guid] {
            assert!(!shown.contains(secret.as_str()), "{args:?}: {shown}");
        }
    }
}
