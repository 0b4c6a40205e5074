//! `rdmux res show`, and by its output how two processes of one host reach each other: in the best way that the system allows, or why not.
//!
//! Most cases need namespaces. As root, each runs in a network namespace of its own; as an ordinary user, in a user namespace too, where
//! the user may make one. A case that cannot run says so and passes.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::fs;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{AS_NOBODY, text};
use serde_json::Value;
use skip::skip;

const RDMUX: &str = env!("CARGO_BIN_EXE_rdmux");
const LONG: Duration = Duration::from_secs(60);
/// Variable that is set in processes which [`is_inside`] starts.
const INSIDE: &str = "RDMUX_RES_INSIDE";

/// A child that is killed when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Place in which one side runs.
#[derive(Clone, Default)]
struct Place<'a> {
    address: &'a str,
    /// Command that runs it: a program with its first arguments, or nothing.
    by: &'a [&'a str],
    /// Command that runs `rdmux res` so that it sees this side.
    seen_by: &'a [&'a str],
    environment: &'a [(&'a str, &'a str)],
    /// Path of the binary, where it is another one.
    binary: Option<&'a str>,
}

impl<'a> Place<'a> {
    fn at(address: &'a str) -> Place<'a> {
        Place {
            address,
            ..Place::default()
        }
    }

    fn run_by(address: &'a str, by: &'a [&'a str]) -> Place<'a> {
        Place {
            address,
            by,
            ..Place::default()
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = by(self.by, self.binary.unwrap_or(RDMUX), args);
        command.envs(self.environment.iter().copied());
        command
    }

    /// Returns its one queue pair, if it is among those shown, or null.
    fn qp_of(&self, shown: &Value) -> Value {
        let mine = |qp: &&Value| qp["ifname"] == self.address && qp["state"] == "RTS";
        shown
            .as_array()
            .unwrap()
            .iter()
            .find(mine)
            .cloned()
            .unwrap_or_default()
    }
}

/// Returns the queue pairs of two sides.
fn look(sides: [&Place<'_>; 2]) -> [Value; 2] {
    let shown = show(sides[0].seen_by, &["qp"]);
    let also = (sides[0].seen_by != sides[1].seen_by).then(|| show(sides[1].seen_by, &["qp"]));
    [
        sides[0].qp_of(&shown),
        sides[1].qp_of(also.as_ref().unwrap_or(&shown)),
    ]
}

fn by(runner: &[&str], program: &str, args: &[&str]) -> Command {
    let line: Vec<&str> = runner.iter().copied().chain([program]).collect();
    let mut command = Command::new(line[0]);
    command.args(&line[1..]).args(args).stdin(Stdio::null());
    command
}

/// Returns the JSON that `rdmux res show` prints.
fn show(runner: &[&str], what: &[&str]) -> Value {
    let args = [&["res", "show"], what, &["--json"]].concat();
    let output = by(runner, RDMUX, &args).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Lets the client read the server's memory, until both queue pairs are as expected and the measurement has ended. `memory` is the kind of
/// the server's memory.
fn meet(server: &Place<'_>, memory: &str, client: &Place<'_>, expected: impl Fn(&Value, &Value) -> bool) {
    let serve = ["perf", "read-lat", "--bind", server.address, "--memory", memory];
    let mut serving = server.command(&serve);
    let _serving = Running(serving.stdout(Stdio::null()).spawn().unwrap());
    let measure = [
        "perf",
        "read-lat",
        server.address,
        "--bind",
        client.address,
        "-e",
        "-D",
        "2",
        "--json",
    ];
    let deadline = Instant::now() + LONG;
    let mut seen = None;
    while Instant::now() < deadline {
        let mut measuring = start_piped(client.command(&measure));
        let mut as_expected = false;
        while measuring.0.try_wait().unwrap().is_none() && Instant::now() < deadline {
            if !as_expected {
                let [theirs, own] = look([server, client]);
                as_expected = expected(&theirs, &own);
                // At the end the queue pairs disappear, one before the other.
                seen = seen.filter(|_| theirs.is_null()).or(Some([theirs, own]));
            }
        }
        let output = end(measuring);
        if output.status.success() {
            let figures: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert!(
                figures["results"][0]["n_iterations"].as_u64().unwrap() > 0,
                "{figures}"
            );
            // A look may take as long as the measurement: try again.
            if as_expected {
                return;
            }
            continue;
        }
        let why = text(&output.stderr);
        let early = why.contains("nothing listens") || why.contains("no answer");
        assert!(early, "{why}");
    }
    panic!("not within {LONG:?}; seen last, server and client: {seen:#?}");
}

fn start_piped(mut command: Command) -> Running {
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    Running(command.spawn().unwrap())
}

fn end(mut running: Running) -> Output {
    use std::io::Read;
    let status = running.0.wait().unwrap();
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    running.0.stdout.take().unwrap().read_to_end(&mut stdout).unwrap();
    running.0.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
    Output {
        status,
        stdout,
        stderr,
    }
}

fn is_shared(qp: &Value) -> bool {
    qp["carrier"] == "shm"
}

/// Returns whether UDP carries its packets, for a reason with these words.
fn is_udp_since(qp: &Value, why: &str) -> bool {
    qp["carrier"] == "udp"
        && qp["carrier-why"]
            .as_str()
            .is_some_and(|reason| reason.contains(why))
}

fn is_mapped(qp: &Value) -> bool {
    qp["direct"]["mapped"] == 1
}

fn is_called(qp: &Value) -> bool {
    qp["direct"]["process"] == 1
}

fn is_not_direct_since(qp: &Value, why: &str) -> bool {
    let direct = &qp["direct"];
    let reason = direct["why-not"]
        .as_str()
        .is_some_and(|reason| reason.contains(why));
    direct["mapped"] == 0 && direct["process"] == 0 && reason
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Returns whether this process may make namespaces, and is in a network namespace of its own. Otherwise starts a process that may and is,
/// which runs the test of this name alone; its failure is this one's.
fn is_inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let flags = if is_root() { "-n" } else { "-Urn" };
    let up = ["unshare", flags, "--fork", "--kill-child"];
    let possible = by(&up, "ip", &["link", "set", "lo", "up"]).output();
    if !possible.is_ok_and(|output| output.status.success()) {
        skip("this user may not make network namespaces here");
        return false;
    }
    let own = std::env::current_exe().unwrap();
    let script = "ip link set lo up && exec \"$@\"";
    let args = [
        "-c",
        script,
        "sh",
        own.to_str().unwrap(),
        "--exact",
        test,
        "--nocapture",
    ];
    let output = by(&up, "sh", &args).env(INSIDE, "1").output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| text(&bytes)).concat();
    println!("{said}");
    assert!(output.status.success(), "it failed in a namespace of its own");
    false
}

/// Returns whether the system lets a program be run in this way here; says so when it does not.
fn is_possible(runner: &[&str]) -> bool {
    let output = by(runner, "true", &[]).output();
    let possible = output.as_ref().is_ok_and(|output| output.status.success());
    if !possible {
        skip(format!("{} is not possible here", runner.join(" ")));
    }
    possible
}

/// Returns whether another user may run the binary; says so when not.
fn others_may_run_rdmux() -> bool {
    let output = by(&AS_NOBODY, RDMUX, &["--version"]).output();
    let may = output.is_ok_and(|output| output.status.success());
    if !may {
        skip(format!("another user may not run {RDMUX}"));
    }
    may
}

#[test]
fn res__one_user_shares_memory() {
    let [server, client] = ["127.0.3.1", "127.0.4.1"].map(Place::at);
    meet(&server, "shared", &client, |theirs, own| {
        let pids = [theirs, own].map(|qp| qp["pid"].as_u64());
        is_shared(theirs)
            && is_shared(own)
            && is_mapped(own)
            && theirs["rqpn"] == own["lqpn"]
            && own["peer"] == "127.0.3.1"
            && (own["type"] == "RC" && own["comm"] == "rdmux" && pids[0] != pids[1])
    });
    let [server, client] = ["127.0.3.2", "127.0.4.2"].map(Place::at);
    meet(&server, "private", &client, |theirs, own| {
        // The system may refuse calls by Yama.
        is_shared(theirs) && is_shared(own) && (is_called(own) || is_not_direct_since(own, "ptrace"))
    });
}

#[test]
fn res__switched_off_on_one_side() {
    let server = Place {
        environment: &[("RDMUX_SHM", "off")],
        ..Place::at("127.0.3.3")
    };
    let client = Place::at("127.0.4.3");
    meet(&server, "shared", &client, |theirs, own| {
        is_udp_since(theirs, "switched off") && is_udp_since(own, "switched off at the peer")
    });
    let server = Place::at("127.0.3.4");
    let client = Place {
        environment: &[("RDMUX_SHM", "off")],
        ..Place::at("127.0.4.4")
    };
    meet(&server, "shared", &client, |theirs, own| {
        is_udp_since(theirs, "switched off at the peer") && is_udp_since(own, "switched off")
    });
}

#[test]
fn res__other_users_are_named() {
    if !is_inside("res__other_users_are_named") {
        return;
    }
    if !is_possible(&AS_NOBODY) || !others_may_run_rdmux() {
        return;
    }
    let server = Place {
        seen_by: &AS_NOBODY,
        ..Place::run_by("127.0.3.5", &AS_NOBODY)
    };
    meet(&server, "shared", &Place::at("127.0.4.5"), |theirs, own| {
        is_udp_since(theirs, "user 0") && is_udp_since(own, "user 65534")
    });
}

#[test]
fn capture__another_user_is_refused() {
    if !is_inside("capture__another_user_is_refused") {
        return;
    }
    if !is_possible(&AS_NOBODY) || !others_may_run_rdmux() {
        return;
    }
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(folder.path(), open).unwrap();
    for (of, by_whom, address, uid) in [
        (&AS_NOBODY[..], &[][..], "127.0.3.15", "65534"),
        (&[], &AS_NOBODY, "127.0.3.16", "0"),
    ] {
        let serve = ["perf", "read-lat", "--bind", address];
        let _serving = Running(by(of, RDMUX, &serve).stdout(Stdio::null()).spawn().unwrap());
        // The device is listed, and nobody else may capture it: root may look at its objects, no more.
        let deadline = Instant::now() + LONG;
        let device = loop {
            let output = by(by_whom, RDMUX, &["res", "show"]).output().unwrap();
            let said = [output.stdout, output.stderr].map(|bytes| text(&bytes)).concat();
            let named = said
                .split_whitespace()
                .find(|word| word.starts_with(&format!("{address}/")));
            if let Some(device) = named {
                break device.trim_end_matches(':').to_owned();
            }
            assert!(Instant::now() < deadline, "{said}");
        };
        let file = folder.path().join(uid);
        let args = [
            "capture",
            "-w",
            file.to_str().unwrap(),
            "--seconds",
            "1",
            "--device",
            &device,
        ];
        let output = by(by_whom, RDMUX, &args).output().unwrap();
        let expected = format!("rdmux: cannot capture {device}: it belongs to user {uid}\n");
        assert_eq!(text(&output.stderr), expected);
        assert_eq!(output.status.code(), Some(1));
        assert_eq!(
            fs::metadata(&file).unwrap().len(),
            0,
            "nothing of it is in the file"
        );
    }
}

#[test]
fn res__no_common_file_system() {
    if !is_inside("res__no_common_file_system") {
        return;
    }
    // The binary is copied first, since it may be hidden too.
    let script =
        "exec 9<\"$0\"; for d in /tmp /var/tmp /dev/shm /run; do [ ! -d $d ] || mount -t tmpfs none $d; done
        cp /proc/self/fd/9 /run/rdmux && mount -t tmpfs none /proc && exec /run/rdmux \"$@\"";
    let apart = ["unshare", "-m", "sh", "-c", script];
    if !is_possible(&["unshare", "-m"]) {
        return;
    }
    let places = [
        (Place::run_by("127.0.3.6", &apart), Place::at("127.0.4.6")),
        (Place::at("127.0.3.7"), Place::run_by("127.0.4.7", &apart)),
    ];
    for (server, client) in places {
        meet(&server, "shared", &client, |theirs, own| {
            is_shared(theirs) && is_shared(own) && is_mapped(own)
        });
    }
}

#[test]
fn res__process_that_has_no_number_here() {
    if !is_inside("res__process_that_has_no_number_here") {
        return;
    }
    let below = ["unshare", "-p", "--fork", "--kill-child"];
    if !is_possible(&below) {
        return;
    }
    let [outside, inside] = [Place::at("127.0.3.8"), Place::run_by("127.0.4.8", &below)];
    meet(&outside, "shared", &inside, |theirs, own| {
        is_shared(theirs) && is_shared(own) && is_mapped(own)
    });
    // From the outer namespace, the inner process has a number; not the other way round.
    let [outside, inside] = [Place::at("127.0.3.9"), Place::run_by("127.0.4.9", &below)];
    meet(&outside, "private", &inside, |theirs, own| {
        is_shared(theirs) && is_shared(own) && is_not_direct_since(own, "another PID namespace")
    });
    let [outside, inside] = [Place::at("127.0.3.10"), Place::run_by("127.0.4.10", &below)];
    meet(&inside, "private", &outside, |theirs, own| {
        is_shared(theirs) && is_shared(own) && (is_called(own) || is_not_direct_since(own, "ptrace"))
    });
}

#[test]
fn res__user_namespace_of_the_same_user() {
    if !is_inside("res__user_namespace_of_the_same_user") {
        return;
    }
    let below = ["unshare", "-U", "--map-root-user"];
    if !is_possible(&below) {
        return;
    }
    let [outside, inside] = [Place::at("127.0.3.11"), Place::run_by("127.0.4.11", &below)];
    meet(&outside, "shared", &inside, |theirs, own| {
        is_shared(theirs) && is_shared(own) && is_mapped(own)
    });
    // From the inner namespace, no calls into an outer process are allowed.
    let [outside, inside] = [Place::at("127.0.3.12"), Place::run_by("127.0.4.12", &below)];
    meet(&outside, "private", &inside, |theirs, own| {
        is_shared(theirs) && is_shared(own) && is_not_direct_since(own, "ptrace")
    });
    let [outside, inside] = [Place::at("127.0.3.13"), Place::run_by("127.0.4.13", &below)];
    meet(&inside, "private", &outside, |theirs, own| {
        is_shared(theirs) && is_shared(own) && is_called(own)
    });
}

#[test]
fn res__user_namespace_that_does_not_tell_users_apart() {
    if !is_inside("res__user_namespace_that_does_not_tell_users_apart") {
        return;
    }
    // Without a map, all users are one in the namespace.
    let below = ["unshare", "-U"];
    if !is_possible(&below) {
        return;
    }
    let [outside, inside] = [Place::at("127.0.3.14"), Place::run_by("127.0.4.14", &below)];
    meet(&outside, "shared", &inside, |theirs, own| {
        is_udp_since(theirs, "user namespace and may be another one") && own.is_null()
    });
    // Such a process does not share the port with processes outside either.
    let serve = |place: &Place<'_>| place.command(&["perf", "read-lat", "--bind", place.address]);
    let holding = serve(&outside).stdout(Stdio::null()).spawn().unwrap();
    let _holding = Running(holding);
    let deadline = Instant::now() + LONG;
    while show(&[], &[]).as_array().unwrap().is_empty() {
        assert!(Instant::now() < deadline);
    }
    let second = serve(&Place::run_by(outside.address, &below));
    let output = end(start_piped(second));
    assert_eq!(output.status.code(), Some(1));
    let why = text(&output.stderr);
    assert!(why.contains("user namespace does not tell"), "{why}");
}

#[test]
fn res__process_that_may_not_be_traced() {
    if !is_inside("res__process_that_may_not_be_traced") {
        return;
    }
    // The sides are of the same user, but of different groups.
    let other_group = ["setpriv", "--reuid", "65534", "--regid", "1", "--clear-groups"];
    if !is_possible(&other_group) || !others_may_run_rdmux() {
        return;
    }
    for (memory, addresses) in [
        ("private", ["127.0.3.15", "127.0.4.15"]),
        ("shared", ["127.0.3.16", "127.0.4.16"]),
    ] {
        let [server, client] =
            [(addresses[0], &other_group), (addresses[1], &AS_NOBODY)].map(|(address, group)| Place {
                seen_by: &AS_NOBODY,
                ..Place::run_by(address, group)
            });
        meet(&server, memory, &client, |theirs, own| {
            let as_it_should = if memory == "shared" {
                is_mapped(own)
            } else {
                is_not_direct_since(own, "ptrace")
            };
            is_shared(theirs) && is_shared(own) && as_it_should
        });
    }
}

#[test]
fn res__two_network_namespaces() {
    if !is_inside("res__two_network_namespaces") {
        return;
    }
    let there = by(&["unshare", "-n"], "sleep", &["300"]).spawn().unwrap();
    let there = Running(there);
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    let theirs = format!("/proc/{}/ns/net", there.0.id());
    let deadline = Instant::now() + LONG;
    while fs::read_link(&theirs).is_ok_and(|link| link == own) {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
    let pid = there.0.id().to_string();
    let enter = ["nsenter", "-t", &pid, "-n"];
    let ip = |runner: &[&str], args: &str| {
        let args: Vec<&str> = args.split(' ').collect();
        by(runner, "ip", &args).output().unwrap().status.success()
    };
    if !ip(&[], &format!("link add v1 type veth peer name v2 netns {pid}")) {
        return skip("this system has no veth");
    }
    assert!(ip(&[], "addr add 10.9.2.1/24 dev v1") && ip(&[], "link set v1 up"));
    assert!(ip(&enter, "addr add 10.9.2.2/24 dev v2") && ip(&enter, "link set v2 up"));
    let server = Place {
        seen_by: &enter,
        ..Place::run_by("10.9.2.2", &enter)
    };
    meet(&server, "shared", &Place::at("10.9.2.1"), |theirs, own| {
        [theirs, own]
            .iter()
            .all(|qp| is_udp_since(qp, "no process of this network namespace answers"))
    });
}

#[test]
fn res__process_that_is_stopped() {
    // Any process that asks while this one is stopped waits for it.
    if !is_inside("res__process_that_is_stopped") {
        return;
    }
    let serve = |address| {
        let mut command = Place::at(address).command(&["perf", "read-lat", "--bind", address]);
        Running(command.stdout(Stdio::null()).spawn().unwrap())
    };
    let [stopped, running] = ["127.0.3.20", "127.0.3.21"].map(|address| (address, serve(address)));
    let line_of = |shown: &Value, address: &str| {
        let list = shown.as_array().unwrap();
        list.iter().find(|line| line["ifname"] == address).cloned()
    };
    let deadline = Instant::now() + LONG;
    while [&stopped, &running]
        .iter()
        .any(|(address, _)| line_of(&show(&[], &[]), address).is_none())
    {
        assert!(Instant::now() < deadline);
    }
    let pid = rustix::process::Pid::from_child(&stopped.1.0);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    // waitpid reports the stop once all threads are stopped.
    let told = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::UNTRACED).unwrap();
    assert!(told.is_some_and(|(_, status)| status.stopped()));
    let shown = show(&[], &[]);
    let line = line_of(&shown, stopped.0).unwrap();
    assert_eq!(line["error"], "it does not answer", "{line}");
    assert_eq!(line["pid"], stopped.1.0.id());
    assert_eq!(line_of(&shown, running.0).unwrap()["qp"], 0);
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    assert_eq!(line_of(&show(&[], &[]), stopped.0).unwrap()["qp"], 0);
}

#[test]
fn usage__errors_have_status_2() {
    for args in [&["res", "show", "nothing"][..], &["res", "hide"]] {
        let status = by(&[], RDMUX, args).output().unwrap().status;
        assert_eq!(status.code(), Some(2), "{args:?}");
    }
}
