//! `rdmux capture`, `--capture` and `RDMUX_CAPTURE`: `rdmux capture check` and, where it is installed, tshark find captures over UDP and
//! shared memory correct; only the own user captures.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::text;
use serde_json::Value;
use skip::skip;

const RDMUX: &str = env!("CARGO_BIN_EXE_rdmux");
const LONG: Duration = Duration::from_secs(60);

/// A child that is killed when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn rdmux(args: &[&str]) -> Command {
    let mut command = Command::new(RDMUX);
    command.args(args).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> String {
    let output = rdmux(args).output().unwrap();
    assert!(
        output.status.success(),
        "{args:?}: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Returns the result of `rdmux capture check` for a capture that has everything: no errors.
fn check(file: &Path) -> Value {
    let found = look(file);
    assert!(found["errors_total"] == 0 && found["passed"] == true, "{found:#}");
    found
}

/// Returns the result of `rdmux capture check`.
fn look(file: &Path) -> Value {
    let output = rdmux(&["capture", "check", "--json", file.to_str().unwrap()])
        .output()
        .unwrap();
    let found: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    found["files"][0].clone()
}

/// Returns tshark's lines with these fields of the packets that match a display filter; `None` where there is no tshark.
fn tshark(file: &Path, filter: &str, fields: &[&str]) -> Option<Vec<String>> {
    let mut command = Command::new("tshark");
    command
        .arg("-r")
        .arg(file)
        .args(["-o", "ip.check_checksum:TRUE", "-o", "udp.check_checksum:TRUE"]);
    command.args(["-Y", filter, "-T", "fields"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let Ok(output) = command.output() else {
        skip("there is no tshark to judge the captures");
        return None;
    };
    assert!(output.status.success(), "{}", text(&output.stderr));
    Some(text(&output.stdout).lines().map(str::to_owned).collect())
}

/// Checks that tshark finds nothing wrong with a capture; does nothing where there is no tshark.
fn judge(file: &Path, packets: u64) {
    let Some(all) = tshark(file, "infiniband", &["infiniband.bth.opcode"]) else {
        return;
    };
    assert_eq!(all.len() as u64, packets, "tshark takes each packet for RoCE");
    let wrong = "_ws.malformed || ip.checksum.status == 0 || udp.checksum.status == 0";
    // Version 4.0 does not know FLUSH and ATOMIC WRITE.
    // It also looks for Ethernet in every SEND, beyond the end of a short one.
    let short =
        "udp.length < 64 && infiniband.bth.opcode in {0x04, 0x05, 0x16, 0x17, 0x24, 0x25, 0x64, 0x65}";
    let wrong = format!("({wrong}) && !(infiniband.bth.opcode in {{0x1c, 0x1d}}) && !({short})");
    let wrong = tshark(file, &wrong, &["frame.number", "_ws.col.Info"]).unwrap();
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// Returns the names of a capture's interfaces.
fn interfaces(file: &Path) -> Vec<String> {
    let bytes = std::fs::read(file).unwrap();
    let mut names = Vec::new();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let mut at = 0;
    while at + 12 <= bytes.len() {
        if word(at) == 1 {
            let len = word(at + 16) >> 16;
            names.push(text(&bytes[at + 20..at + 20 + len]));
        }
        at += word(at + 4);
    }
    names
}

/// Returns the comments of a capture's packets.
fn comments(file: &Path) -> Vec<String> {
    let bytes = std::fs::read(file).unwrap();
    let packets = rdmux_capture::pcapng::Reader::new(&bytes).unwrap();
    let packets = packets.map(|packet| packet.unwrap());
    packets
        .filter_map(|packet| packet.comment.map(str::to_owned))
        .collect()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Scenarios of the lab's peers: all that need no persistent memory.
const SCENARIOS: [&str; 22] = [
    "send",
    "solicited",
    "not-ready",
    "write",
    "read",
    "atomics",
    "atomic-write",
    "flush",
    "window-1",
    "window-2",
    "send-invalidate",
    "srq",
    "refusals",
    "wrong-invalidate",
    "uc",
    "uc-many",
    "ud",
    "ud-many",
    "multicast",
    "cm-connect",
    "cm-reject",
    "cm-datagram",
];

/// Runs those scenarios between two processes that are captured; returns the captures.
fn lab_peers(environment: &[(&str, &str)], addresses: [&str; 2], port: &str) -> [PathBuf; 2] {
    // Every pair's scenario of multicast uses the same group, whose datagrams all devices of the network namespace receive.
    static ONE_PAIR: Mutex<()> = Mutex::new(());
    let _one = ONE_PAIR.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = folder().keep();
    let files = ["answer.pcapng", "ask.pcapng"].map(|name| folder.join(name));
    let start = |args: &[&str], file: &Path| {
        let program = Path::new(RDMUX).with_file_name("rdmux-lab-peer");
        assert!(
            program.is_file(),
            "no {}: cargo build -p rdmux-lab-peer",
            program.display()
        );
        let mut command = Command::new(program);
        command
            .args(args)
            .envs(environment.iter().copied())
            .env("RDMUX_CAPTURE", file);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Running(command.spawn().unwrap())
    };
    let mut answering = start(&["answer", addresses[0], port], &files[0]);
    let deadline = Instant::now() + LONG;
    loop {
        let asked = [&["ask", addresses[0], port, addresses[1]], &SCENARIOS[..]].concat();
        let mut asking = start(&asked, &files[1]);
        let status = asking.0.wait().unwrap();
        let said = said_by(&mut asking);
        let early = said.contains("refused");
        if !early || Instant::now() > deadline {
            if !status.success() {
                let _ = answering.0.kill();
                panic!("{said}\nthe other side:\n{}", said_by(&mut answering));
            }
            break;
        }
    }
    let _ = answering.0.wait();
    files
}

/// Returns what a process says until it ends.
fn said_by(process: &mut Running) -> String {
    let mut said = String::new();
    process
        .0
        .stdout
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    process
        .0
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    said
}

/// Checks that each capture of the scenarios has its opcodes and everything else that it must have.
fn check_lab_peers(files: &[PathBuf; 2], carrier: &str) {
    for file in files {
        let found = check(file);
        let opcodes = found["opcodes"].as_object().unwrap();
        for name in [
            "RC SendOnly",
            "RC SendFirst",
            "RC SendOnlyImm",
            "RC SendOnlyInvalidate",
            "RC WriteOnly",
            "RC WriteFirst",
            "RC WriteMiddle",
            "RC WriteLast",
            "RC WriteLastImm",
            "RC ReadRequest",
            "RC ReadResponseOnly",
            "RC Acknowledge",
            "RC AtomicAcknowledge",
            "RC CompareSwap",
            "RC FetchAdd",
            "RC Flush",
            "RC AtomicWrite",
            "UC SendOnlyImm",
            "UC WriteLast",
            "UD SendOnly",
            "UD SendOnlyImm",
        ] {
            assert!(
                opcodes.contains_key(name),
                "{name} is not in {}: {opcodes:?}",
                file.display()
            );
        }
        judge(file, found["roce"].as_u64().unwrap());
        let names = interfaces(file);
        assert!(names.iter().any(|name| name.ends_with(carrier)), "{names:?}");
        let comments = comments(file);
        for begin in ["NAK: PSN", "RNR NAK: PSN", "retransmission", "queue pair "] {
            assert!(
                comments.iter().any(|comment| comment.starts_with(begin)),
                "{begin}: {comments:?}"
            );
        }
        let _ = std::fs::remove_file(file);
    }
}

#[test]
fn capture__every_opcode_over_udp() {
    let files = lab_peers(&[("RDMUX_SHM", "off")], ["127.0.31.1", "127.0.31.2"], "18731");
    check_lab_peers(&files, " udp");
}

#[test]
fn capture__every_opcode_through_shared_memory() {
    let files = lab_peers(&[], ["127.0.32.1", "127.0.32.2"], "18732");
    check_lab_peers(&files, " shm");
}

/// Starts a server and a client of `rdmux perf read-lat`, which are connected until they are dropped.
fn perf(addresses: [&str; 2], port: &str) -> [Running; 2] {
    let serve = ["perf", "read-lat", "--bind", addresses[0], "-p", port];
    let quiet = |args: &[&str]| {
        let mut command = rdmux(args);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Running(command.spawn().unwrap())
    };
    let server = quiet(&serve);
    let deadline = Instant::now() + LONG;
    loop {
        let ask = [
            "perf",
            "read-lat",
            addresses[0],
            "--bind",
            addresses[1],
            "-p",
            port,
            "-s",
            "4096",
        ];
        let mut client = quiet(&[&ask[..], &["-D", "300"]].concat());
        while client.0.try_wait().unwrap().is_none() {
            if own_device(addresses[1]).is_some() {
                return [server, client];
            }
        }
        assert!(Instant::now() < deadline, "no connection");
    }
}

/// Returns the device at an address that has a connected queue pair, and that queue pair's number.
fn own_device(address: &str) -> Option<(String, u64)> {
    let shown: Value = serde_json::from_str(&run(&["res", "show", "qp", "--json"])).unwrap();
    let is_it = |qp: &&Value| qp["ifname"] == address && qp["state"] == "RTS";
    let qp = shown.as_array().unwrap().iter().find(is_it)?.clone();
    Some((format!("{address}/{}", qp["port"]), qp["lqpn"].as_u64()?))
}

#[test]
fn capture__of_a_running_device() {
    let [_server, mut client] = perf(["127.0.41.1", "127.0.41.2"], "18741");
    let folder = folder();
    let (device, qpn) = own_device("127.0.41.2").unwrap();
    let capture = |name: &str, filter: &[&str]| {
        let file = folder.path().join(name);
        let args = [
            "capture",
            "-w",
            file.to_str().unwrap(),
            "--device",
            &device,
            "--seconds",
            "1",
            "--json",
        ];
        let found: Value = serde_json::from_str(&run(&[&args, filter].concat())).unwrap();
        assert_eq!(found["device"], device.as_str());
        // Where the disk or the CPU was too slow for all packets, the check finds gaps.
        let checked = if found["dropped"] == 0 {
            check(&file)
        } else {
            look(&file)
        };
        let counted = found["packets"].as_u64().unwrap() - found["dropped"].as_u64().unwrap();
        assert_eq!(checked["roce"], counted, "what was not dropped is there");
        (file, checked)
    };
    // READs that need no packet otherwise need one during a capture, so they can be seen.
    let (file, found) = capture("all", &[]);
    assert!(found["opcodes"]["RC ReadRequest"].as_u64() > Some(0), "{found:#}");
    assert_eq!(interfaces(&file), [format!("{device} shm")]);
    let (_, found) = capture("read", &["opcode=read", &format!("qp={qpn}"), "peer=127.0.41.1"]);
    let opcodes: Vec<_> = found["opcodes"].as_object().unwrap().keys().collect();
    assert!(
        !opcodes.is_empty() && opcodes.iter().all(|name| name.contains("Read")),
        "{opcodes:?}"
    );
    let args = [
        "capture",
        "-w",
        "/dev/null",
        "--device",
        &device,
        "--seconds",
        "1",
        "qp=1",
    ];
    assert_eq!(run(&args), "0 packets, 0 dropped\n");
    assert!(client.0.try_wait().unwrap().is_none(), "it goes on");
}

#[test]
fn capture__with_faults_says_what_they_did() {
    let folder = folder();
    for (port, shm, address) in [("18742", "on", "127.0.42.1"), ("18743", "off", "127.0.43.1")] {
        let file = folder.path().join(shm);
        let path = file.to_str().unwrap();
        let own = address.replace("0.4", "0.5");
        let fault = [
            "-n",
            "500",
            "--fault",
            "loss=3%,dup=3%,reorder=3%,corrupt=3%,seed=4",
            "--capture",
            path,
        ];
        let mut server = rdmux(&["perf", "read-lat", "--bind", address, "-p", port]);
        let _server = Running(
            server
                .env("RDMUX_SHM", shm)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        );
        let deadline = Instant::now() + LONG;
        loop {
            let ask = [
                "perf", "read-lat", address, "--bind", &own, "-p", port, "-s", "4096",
            ];
            let output: Output = rdmux(&[&ask[..], &fault].concat())
                .env("RDMUX_SHM", shm)
                .output()
                .unwrap();
            if output.status.success() {
                break;
            }
            let said = text(&output.stderr);
            let early = said.contains("nothing listens") || said.contains("no answer");
            assert!(early && Instant::now() < deadline, "{said}");
        }
        let found = check(&file);
        assert!(found["retransmissions"].as_u64() > Some(0), "{found:#}");
        let comments = comments(&file);
        for note in [
            "fault: lost",
            "fault: corrupted",
            "fault: duplicated",
            "fault: reordered",
            "retransmission",
        ] {
            assert!(
                comments.iter().any(|comment| comment.contains(note)),
                "{note}: {comments:?}"
            );
        }
    }
}

#[test]
fn capture__errors_are_one_line() {
    let folder = folder();
    let file = folder.path().join("x.pcapng");
    let file = file.to_str().unwrap();
    for (args, line) in [
        (
            vec!["-w", file, "--device", "127.0.44.1/3"],
            "rdmux: cannot capture 127.0.44.1/3: there is no such device",
        ),
        (
            vec!["-w", "/nowhere/x", "--device", "127.0.44.1/3"],
            "rdmux: cannot write /nowhere/x: No such file",
        ),
        (
            vec!["-w", file, "--device", "127.0.44.1/3", "qp=x"],
            "rdmux: 'qp=x': give a queue pair number",
        ),
    ] {
        let output = rdmux(&[&["capture"], &args[..]].concat()).output().unwrap();
        assert!(text(&output.stderr).starts_with(line), "{}", text(&output.stderr));
        assert_eq!(
            (output.status.code(), text(&output.stderr).lines().count()),
            (Some(1), 1)
        );
    }
    let mut command = rdmux(&["perf", "read-lat", "--bind", "127.0.44.1"]);
    let output = command.env("RDMUX_CAPTURE", "/nowhere/x").output().unwrap();
    let line = "rdmux: cannot capture to /nowhere/x: No such file or directory (os error 2)\n";
    assert_eq!(text(&output.stderr), line);
}
