//! Changes of `rdmux nvme target` while it runs: by requests, and by its file.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// A user with a folder of their own.
struct User(TempDir);

impl User {
    fn new() -> User {
        User(tempfile::tempdir().unwrap())
    }

    fn rdmux(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        command
            .args(args)
            .env("XDG_CONFIG_HOME", self.0.path())
            .env("XDG_RUNTIME_DIR", self.0.path())
            .current_dir(self.0.path())
            .stdin(Stdio::null());
        command
    }

    fn output(&self, args: &[&str]) -> Output {
        self.rdmux(args).output().unwrap()
    }

    /// Returns what a command prints, which must succeed.
    fn run(&self, args: &[&str]) -> String {
        let output = self.output(args);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {errors}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.run(args)).unwrap()
    }

    /// Returns the one line with which a command fails.
    fn error(&self, args: &[&str]) -> String {
        let output = self.output(args);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(1) && errors.lines().count() == 1,
            "{args:?}: {errors}"
        );
        errors
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// Starts a target, and returns it with the description that it prints.
    fn target(&self, args: &[&str]) -> (Target, Value) {
        let mut command = self.rdmux(&[&["nvme", "target", "--json"], args].concat());
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let mut target = Target { child, out };
        let said = target.line();
        let described = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{args:?}: {said}"));
        (target, described)
    }
}

/// A target, which is killed when this is dropped.
struct Target {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Target {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line
    }

    fn reload(&self) {
        kill_process(Pid::from_child(&self.child), Signal::HUP).unwrap();
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns a listener and a name that no other test has.
fn place(last: u8) -> (String, String) {
    let [low, high, ..] = std::process::id().to_le_bytes();
    let listen = format!("tcp:127.{}.{low}.{last}:4420", high | 0x80);
    let nqn = format!("nqn.2014-08.org.example:change-{}-{last}", std::process::id());
    (listen, nqn)
}

#[test]
fn requests__are_seen_by_hosts() {
    let user = User::new();
    let (listen, nqn) = place(1);
    let (_target, described) = user.target(&["--ns", "mem:1M", "--listen", &listen, "--nqn", &nqn]);
    let socket = described["socket"].as_str().unwrap();
    assert!(fs::exists(socket).unwrap());
    let url = format!("nvme+{}/{nqn}", listen.replace("tcp:", "tcp://"));
    let disk = user.file("disk", "");
    fs::File::options()
        .write(true)
        .open(&disk)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    assert_eq!(
        user.json(&["nvme", "ns", "add", "disk,block=4096", "--json"])["result"],
        2
    );
    fs::File::options()
        .write(true)
        .open(&disk)
        .unwrap()
        .set_len(2 << 20)
        .unwrap();
    assert_eq!(
        user.json(&["nvme", "ns", "resize", "2", "--json"])["result"],
        true
    );
    let namespaces = user.json(&["nvme", "ns", "list", "--json"])[0]["namespaces"].clone();
    assert_eq!(namespaces[1]["name"], disk.to_str().unwrap());
    assert_eq!(namespaces[1]["bytes"], 2 << 20);
    // A host finds the same.
    let listed = user.json(&["nvme", "list", &url, "--json"]).to_string();
    assert!(
        listed.contains(namespaces[1]["uuid"].as_str().unwrap()),
        "{listed}"
    );
    user.run(&["nvme", "ns", "remove", "2"]);
    let error = user.error(&["nvme", "ns", "remove", "2"]);
    assert!(error.contains("there is no namespace 2"), "{error}");
    let error = user.error(&["nvme", "ns", "add", "nothing"]);
    assert!(
        error.contains("cannot open") && error.contains("/nothing"),
        "{error}"
    );

    let (other, _) = place(2);
    let error = user.output(&["nvme", "listener", "add", &other, "--in-capsule-bytes", "100"]);
    let error = String::from_utf8(error.stderr).unwrap();
    assert!(
        error.contains("'100' is no size of data in capsules: give a multiple of 16"),
        "{error}"
    );
    user.run(&["nvme", "listener", "add", &other, "--in-capsule-bytes", "4K"]);
    let listed = user.json(&["nvme", "listener", "list", "--json"]);
    assert_eq!(listed[1]["in_capsule_data_size"], 4096);
    let elsewhere = url.replace(&listen[4..], &other[4..]);
    assert!(user.run(&["nvme", "list", &elsewhere]).contains("1 MiB"));
    let by_rdma = other.replace("tcp:", "rdma:");
    user.run(&["nvme", "listener", "add", &by_rdma]);
    let listed = user.run(&["nvme", "list", &elsewhere.replace("nvme+tcp", "nvme+rdma")]);
    assert!(listed.contains("1 MiB"), "{listed}");
    let error = user.error(&["nvme", "listener", "add", "rdma:192.0.2.1"]);
    assert!(
        error.contains("cannot listen on 192.0.2.1:4420 by RDMA"),
        "{error}"
    );
    user.run(&["nvme", "listener", "remove", &by_rdma]);
    user.run(&["nvme", "listener", "remove", &listen]);
    assert!(!user.output(&["nvme", "list", &url]).status.success());
    // One more host may use it, and this one as before.
    user.run(&[
        "nvme",
        "host",
        "add",
        "nqn.2014-08.org.example:other",
        "--queues",
        "2",
    ]);
    let hosts = user.json(&["nvme", "host", "list", "--json"]);
    assert_eq!(hosts[0]["hosts"][0]["queues"], 2);
    assert!(user.run(&["nvme", "list", &elsewhere]).contains("1 MiB"));
    user.run(&["nvme", "host", "others", "none"]);
    assert!(!user.output(&["nvme", "list", &elsewhere]).status.success());
    user.run(&["nvme", "host", "others", "any"]);
    assert!(user.run(&["nvme", "list", &elsewhere]).contains("1 MiB"));
}

#[test]
fn referrals__lead_to_other_targets() {
    let user = User::new();
    let ((listen, nqn), (other, second)) = (place(20), place(21));
    let (_one, described) = user.target(&["--ns", "null:1M", "--listen", &listen, "--nqn", &nqn]);
    let _two = user.target(&["--ns", "null:2M", "--listen", &other, "--nqn", &second]);
    let socket = described["socket"].as_str().unwrap();
    let referral = |args: &[&str]| {
        let args = [&["nvme", "referral"], args, &["--socket", socket]].concat();
        user.run(&args)
    };
    assert_eq!(
        referral(&["add", &other]),
        format!("hosts are referred to {other}\n")
    );
    // One that is not there, and the asked one itself.
    let nobody = place(22).0;
    referral(&[
        "add",
        &nobody,
        "--subnqn",
        "nqn.2014-08.org.example:theirs",
        "--secure",
    ]);
    referral(&["add", &listen]);
    let listed: Value = serde_json::from_str(&referral(&["list", "--json"])).unwrap();
    assert_eq!(listed[0]["secure_channel"], false);
    assert_eq!(listed[1]["subnqn"], "nqn.2014-08.org.example:theirs");
    assert_eq!(listed[1]["secure_channel"], true);
    assert_eq!(referral(&["list"]).lines().count(), 4);

    let url = format!("nvme+{}", listen.replace("tcp:", "tcp://"));
    let said = user.run(&["nvme", "discover", &url]);
    let referrals = said.lines().filter(|line| line.starts_with("referral"));
    assert_eq!(referrals.count(), 3, "{said}");
    assert!(!said.contains(&second));
    let output = user.output(&["nvme", "discover", &url, "--follow"]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && said.contains(&second), "{said}");
    let errors = String::from_utf8(output.stderr).unwrap();
    let place = nobody.replace("tcp:", "");
    assert!(errors.lines().count() == 1 && errors.contains(&place), "{errors}");
    assert_eq!(errors.matches("refused").count(), 1, "the reason once: {errors}");
    let found = user.json(&["nvme", "discover", &url, "--follow", "--json"]);
    let referred = found["referred"].as_array().unwrap();
    assert_eq!(referred.len(), 2, "not the asked one: {found}");
    assert_eq!(
        referred[0]["url"],
        format!("nvme+{}", other.replace("tcp:", "tcp://"))
    );
    assert_eq!(referred[0]["entries"][1]["subsystem"], second.as_str());
    let why = referred[1]["unreachable"].as_str().unwrap();
    assert!(!why.contains('\n') && referred[1]["entries"].is_null(), "{why}");

    referral(&["remove", &nobody, "--subnqn", "nqn.2014-08.org.example:theirs"]);
    let remove = ["nvme", "referral", "remove", &nobody, "--socket", socket];
    let error = user.error(&remove);
    assert!(
        error.contains(&format!("the target refers no host to {nobody}")),
        "{error}"
    );
    let error = user.error(&[&remove[..], &["--nqn", &nqn]].concat());
    assert!(error.contains("leave --nqn out"), "{error}");
}

#[test]
fn mdns__says_what_is_announced() {
    let user = User::new();
    let (listen, nqn) = place(23);
    let mut args = vec!["nvme", "target", "--mdns", "--ns", "null:1M", "--nqn", &nqn];
    args.extend(["--listen", &listen]);
    let mut command = user.rdmux(&args);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let mut target = Target { child, out };
    let mut said = Vec::new();
    while said
        .last()
        .is_none_or(|line: &String| !line.starts_with("listening"))
    {
        said.push(target.line());
        assert!(said.len() < 20, "{said:?}");
    }
    let nothing = "mDNS announces nothing: listen on an address that other hosts reach\n";
    assert_eq!(said.iter().filter(|line| *line == nothing).count(), 1, "{said:?}");
}

#[test]
fn limits__hold_a_host_to_its_rate_and_no_other() {
    let user = User::new();
    let (listen, nqn) = place(7);
    let (_target, _) = user.target(&[
        "--ns",
        "null:1G",
        "--listen",
        &listen,
        "--nqn",
        &nqn,
        "--allow-any-host",
    ]);
    let url = format!("nvme+{}/{nqn}", listen.replace("tcp:", "tcp://"));
    let (slow, free) = ("nqn.2014-08.org.example:slow", "nqn.2014-08.org.example:free");
    let perf = |host: &str| {
        let args = [
            "nvme",
            "perf",
            &url,
            "--hostnqn",
            host,
            "--time",
            "1",
            "--warmup",
            "0",
            "--queues",
            "2",
            "--json",
        ];
        user.json(&args)["ios"].as_u64().unwrap()
    };
    user.run(&["nvme", "host", "add", slow, "--iops", "1000"]);
    // A limit is a time to wait: a slow machine does not go beyond it. The end of the run takes some time as well.
    let done = perf(slow);
    assert!((100..1100).contains(&done), "{done}");
    let free_done = perf(free);
    assert!(free_done > 2 * done, "{free_done} beside {done}");
    user.run(&["nvme", "host", "add", slow, "--bandwidth", "2M"]);
    let done = perf(slow);
    assert!((50..600).contains(&done), "{done}");
    let stat = user.json(&["nvme", "stat", "--json"]);
    assert!(
        stat[0]["counts"]["reads"].as_u64().unwrap() >= free_done,
        "{stat}"
    );
    assert_eq!(stat[0]["controllers"].as_array().unwrap().len(), 0);
    assert!(user.run(&["nvme", "stat"]).contains("all"));
    let error = user.output(&["nvme", "host", "add", slow, "--iops", "99"]);
    assert!(!error.status.success());
    let hosts = user.json(&["nvme", "host", "list", "--json"]);
    assert_eq!(hosts[0]["hosts"][0]["bandwidth"], 2 << 20);
}

#[test]
fn requests__need_a_target() {
    let user = User::new();
    let error = user.error(&["nvme", "ns", "list"]);
    assert!(error.contains("no target of this user runs"), "{error}");
    let error = user.error(&["nvme", "ns", "list", "--socket", "/nonexistent"]);
    assert!(error.contains("no target at /nonexistent"), "{error}");
    let ((listen, nqn), (other, second)) = (place(3), place(4));
    let _one = user.target(&["--ns", "null:1M", "--listen", &listen, "--nqn", &nqn]);
    let (two, described) = user.target(&["--ns", "null:2M", "--listen", &other, "--nqn", &second]);
    let error = user.error(&["nvme", "ns", "list"]);
    assert!(error.contains("several targets run"), "{error}");
    let socket = described["socket"].as_str().unwrap();
    let named = [format!("({nqn})"), format!("{socket} ({second})")];
    assert!(named.iter().all(|part| error.contains(part)), "{error}");
    // The name of a subsystem chooses the target.
    let of_second = user.run(&["nvme", "ns", "list", "--nqn", &second]);
    assert!(of_second.contains("2 MiB"), "{of_second}");
    user.run(&["nvme", "ns", "remove", "1", "--nqn", &nqn]);
    user.run(&["nvme", "ns", "add", "null:1M", "--nqn", &nqn]);
    let error = user.error(&["nvme", "ns", "list", "--nqn", "nqn.2014-08.org.example:none"]);
    assert!(
        error.contains("no target that answers serves nqn.2014-08.org.example:none"),
        "{error}"
    );
    let (third, another) = place(30);
    let more = ["--listen", &third, "--nqn", &another, "--socket", socket];
    let error = user.error(&[&["nvme", "target", "--ns", "null:1M"], &more[..]].concat());
    let taken = format!("{socket}: the target of {second} has it");
    assert!(error.contains(&taken), "{error}");
    assert!(
        user.run(&["nvme", "ns", "list", "--socket", socket])
            .contains("2 MiB")
    );
    // The socket that a killed one has left is nobody's.
    drop(two);
    assert!(user.run(&["nvme", "ns", "list"]).contains("1 MiB"));
}

#[test]
fn requests__that_are_refused_say_what_helps() {
    let user = User::new();
    let (listen, nqn) = place(31);
    fs::write(user.0.path().join("disk"), [0; 8192]).unwrap();
    let (_target, _) = user.target(&[
        "--ns", "disk", "--ns", "mem:1M", "--listen", &listen, "--nqn", &nqn,
    ]);
    for (args, part) in [
        (
            &["listener", "add", "tcp:192.0.2.1"][..],
            "192.0.2.1 is no address of this host".to_owned(),
        ),
        (
            &["listener", "add", &listen],
            format!("this target listens on {listen} already"),
        ),
        (
            &["ns", "add", "disk"],
            format!("disk is namespace 1 of {nqn} already"),
        ),
        (&["ns", "resize", "2"], "namespace 2 is memory".to_owned()),
    ] {
        let error = user.error(&[&["nvme"], args].concat());
        assert!(error.contains(&part), "{args:?}: {error}");
    }
    for (args, part) in [
        (&["ns", "remove", "abc"][..], "'abc' is no namespace id"),
        (
            &["ns", "add", "mem:100"],
            "100 bytes are no multiple of the block",
        ),
        (
            &["host", "add", "nqn.2014-08.org.example:a", "--iops", "10"],
            "at least 100",
        ),
    ] {
        let errors = user.output(&[&["nvme"], args].concat()).stderr;
        let errors = String::from_utf8(errors).unwrap();
        assert!(errors.contains(part), "{args:?}: {errors}");
    }
    let resize = ["nvme", "ns", "resize", "1"];
    assert_eq!(user.run(&resize), "namespace 1 had the size of its file, 8 KiB\n");
    fs::write(user.0.path().join("disk"), [0; 16384]).unwrap();
    assert_eq!(
        user.run(&resize),
        "namespace 1 has the size of its file, 16 KiB\n"
    );
    // No host has so much, and the target may refuse it or not.
    let errors = String::from_utf8(user.output(&["nvme", "ns", "add", "mem:64T"]).stderr).unwrap();
    assert!(errors.contains("is more than this host has"), "{errors}");
}

#[test]
fn target__says_in_which_line_a_file_is_that_does_not_open() {
    let user = User::new();
    let (listen, nqn) = place(33);
    let text = format!(
        "listen = [\"{listen}\"]\n[[subsystem]]\nnqn = \"{nqn}\"\n[[subsystem.namespace]]\npath = \"/nonexistent/disk\"\n"
    );
    let file = user.file("target.toml", &text);
    let error = user.error(&["nvme", "target", "--config", file.to_str().unwrap()]);
    let place = format!("{}:5: cannot open /nonexistent/disk", file.display());
    assert!(error.contains(&place), "{error}");
}

#[test]
fn perf__reports_what_it_did_before_the_namespace_was_removed() {
    let user = User::new();
    let (listen, nqn) = place(34);
    let (_target, _) = user.target(&["--ns", "null:1M", "--listen", &listen, "--nqn", &nqn]);
    let url = format!("nvme+{}/{nqn}", listen.replace("tcp:", "tcp://"));
    let mut perf = user.rdmux(&["nvme", "perf", &url, "--time", "60", "--warmup", "0", "--json"]);
    let perf = perf.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let reads = || user.json(&["nvme", "stat", "--json"])[0]["counts"]["reads"].as_u64();
    while reads().is_none_or(|reads| reads == 0) {}
    user.run(&["nvme", "ns", "remove", "1"]);
    let output = perf.unwrap().wait_with_output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("was the namespace removed?"), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["reads"].as_u64().unwrap() > 0, "{report}");
    assert!(report["runtime_s"].as_f64().unwrap() < 60.0, "{report}");
}

#[test]
fn host_list__shows_how_all_hosts_are_treated() {
    let user = User::new();
    let (listen, nqn) = place(32);
    let (_target, _) = user.target(&["--ns", "null:1M", "--listen", &listen, "--nqn", &nqn]);
    user.run(&["nvme", "host", "add", "nqn.2014-08.org.example:one"]);
    let list = ["nvme", "host", "list"];
    let listed = user.run(&list);
    let row = listed.lines().find(|line| line.contains("example:one")).unwrap();
    assert!(row.contains("common"), "{listed}");
    for (others, said) in [
        ("secret", "need the secret"),
        ("any", "any may use it, without a secret"),
        ("none", "refused"),
    ] {
        user.run(&["nvme", "host", "others", others]);
        let listed = user.run(&list);
        assert_eq!(listed.lines().last(), Some(&*format!("others: {said}")));
        let json = user.json(&[&list[..], &["--json"]].concat());
        assert_eq!(json[0]["other_hosts"], others);
    }
}

#[test]
fn ana__decides_by_which_ways_hosts_reach_namespaces() {
    let user = User::new();
    let ((listen, nqn), (other, _)) = (place(16), place(17));
    let text = format!(
        "listen = [\"{listen}\", \"{other}\"]\n[[subsystem]]\nnqn = \"{nqn}\"\nother_hosts = \"any\"\n\
         [[subsystem.namespace]]\nmemory = \"1M\"\n[[subsystem.namespace]]\nmemory = \"1M\"\nana_group = 2\n\
         [[subsystem.ana]]\nlistener = \"{other}\"\nstate = \"inaccessible\"\n"
    );
    let file = user.file("target.toml", &text);
    let (mut target, _) = user.target(&["--config", file.to_str().unwrap()]);
    let url = |listen: &str| format!("nvme+{}/{nqn}", listen.replace("tcp:", "tcp://"));
    let (here, there) = (url(&listen), url(&other));
    let read = |url: &str, nsid: &str| {
        let args = [
            "nvme", "read", url, "--nsid", nsid, "--length", "512", "--output", "read",
        ];
        user.output(&[&args[..], &["--ctrl-loss-tmo", "0"]].concat())
            .status
            .success()
    };
    assert!(read(&here, "1") && read(&here, "2"));
    assert!(!read(&there, "1") && !read(&there, "2"));
    let error = user.error(&["nvme", "read", &there, "--ctrl-loss-tmo", "0"]);
    assert!(
        error.contains("no path gives access to the namespace within 0 s (Inaccessible)"),
        "{error}"
    );
    // With both ways a host takes the one that works.
    let by_both = [
        "nvme", "read", &there, "--path", &here, "--length", "512", "--output", "read",
    ];
    user.run(&by_both);
    let listed = user.run(&["nvme", "ana", "list"]);
    let row = |last: &str| listed.lines().filter(|line| line.ends_with(last)).count();
    assert_eq!(
        (row("optimized     1"), row("inaccessible  2")),
        (1, 1),
        "{listed}"
    );

    let set = ["nvme", "ana", "set", "--listener", &other, "non-optimized"];
    let said = user.run(&[&set[..], &["--group", "2"]].concat());
    assert_eq!(said, format!("group 2 by {other}: non-optimized\n"));
    assert!(!read(&there, "1") && read(&there, "2"));
    user.run(&["nvme", "ana", "group", "1", "2"]);
    assert!(read(&there, "1"));
    assert_eq!(
        user.json(&["nvme", "ana", "set", "persistent-loss", "--group", "2", "--json"])["result"],
        true
    );
    assert!(!read(&here, "1") && !read(&there, "2"));
    let listed = user.json(&["nvme", "ana", "list", "--json"]);
    assert_eq!(listed[0]["nqn"], nqn.as_str());
    let states = &listed[0]["listeners"][1]["ana_states"];
    assert_eq!(states.as_array().unwrap().len(), 1, "group 1 is empty");
    assert_eq!(states[0]["ana_state"], "persistent_loss");
    assert_eq!(states[0]["namespaces"].as_array().unwrap().len(), 2);
    for (args, part) in [
        (
            &["set", "change", "--group", "129"][..],
            "'129' is no group of namespaces",
        ),
        (&["group", "7", "1"], "there is no namespace 7"),
        (
            &["set", "change", "--listener", "tcp:127.0.0.99"],
            "the target does not listen on tcp:127.0.0.99:4420",
        ),
    ] {
        let error = user.error(&[&["nvme", "ana"], args].concat());
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(
        user.json(&["nvme", "ana", "list", "--json"]),
        listed,
        "nothing half done"
    );
    // The file is in force again.
    user.file("target.toml", &text.replace("inaccessible", "optimized"));
    target.reload();
    assert!(target.line().ends_with("is in force\n"));
    assert!(read(&here, "1") && read(&there, "2"));
}

#[test]
fn cntlids__let_two_targets_serve_one_name() {
    let user = User::new();
    let ((listen, nqn), (other, _)) = (place(18), place(19));
    let namespace = "null:1M,uuid=01234567-89ab-8def-8123-456789abcdef";
    let sockets = [user.0.path().join("one"), user.0.path().join("two")];
    let sockets = sockets.map(|path| path.display().to_string());
    let node = |listen, cntlids, socket| {
        let first = [
            "--allow-any-host",
            "--ns",
            namespace,
            "--nqn",
            &nqn,
            "--listen",
            listen,
        ];
        [&first[..], &["--cntlids", cntlids, "--socket", socket]].concat()
    };
    let first = user.target(&node(&listen, "1-127", &sockets[0]));
    let overlaps = [&["nvme", "target"], &node(&other, "127-255", &sockets[1])[..]].concat();
    let error = user.error(&overlaps);
    assert!(
        error.contains(&format!("another target of this host serves {nqn}")) && error.contains("--cntlids"),
        "{error}"
    );
    let _two = user.target(&node(&other, "128-255", &sockets[1]));
    let controller = |listen: &str| {
        let url = format!("nvme+{}/{nqn}", listen.replace("tcp:", "tcp://"));
        let listed = user.json(&["nvme", "list", &url, "--json"]);
        let id = user.json(&["nvme", "id-ctrl", &url, "--json"]);
        (
            id["cntlid"].as_u64().unwrap(),
            id["sn"].clone(),
            listed["namespaces"].clone(),
        )
    };
    let (one, two) = (controller(&listen), controller(&other));
    assert!(
        (1..=127).contains(&one.0) && (128..=255).contains(&two.0),
        "{one:?} {two:?}"
    );
    // Hosts take the controllers for ways to the same.
    assert_eq!((one.1, one.2), (two.1, two.2));
    let url = |listen: &str| format!("nvme+{}", listen.replace("tcp:", "tcp://"));
    let (one, two) = (format!("{}/{nqn}", url(&listen)), url(&other));
    let load = [
        "nvme", "perf", &one, "--path", &two, "--time", "0.2", "--warmup", "0", "--json",
    ];
    assert_eq!(user.json(&load)["reconnects"], 0);
    drop(first);
    assert!(user.json(&load)["reads"].as_u64().unwrap() > 0);
    let another = format!("{two}/{nqn}-2");
    let error = user.error(&["nvme", "read", &one, "--path", &another]);
    assert!(error.contains("names another subsystem than"), "{error}");
    let error = user.output(&["nvme", "target", "--ns", "null:1M", "--cntlids", "0-5"]);
    let error = String::from_utf8(error.stderr).unwrap();
    assert!(
        error.contains("'0-5' is no range of controller ids: give FIRST-LAST"),
        "{error}"
    );
}

#[test]
fn config__is_read_again() {
    let user = User::new();
    let (listen, nqn) = place(5);
    let text = format!(
        "listen = [\"{listen}\"]\n[[subsystem]]\nnqn = \"{nqn}\"\n[[subsystem.namespace]]\nmemory = \"1M\"\n"
    );
    let file = user.file("target.toml", &text);
    let path = file.to_str().unwrap();
    let (mut target, described) = user.target(&["--config", path]);
    assert_eq!(described["subsystems"][0]["nqn"], nqn.as_str());
    user.file("target.toml", &format!("{text}size = 1\n"));
    target.reload();
    let mut errors = BufReader::new(target.child.stderr.take().unwrap());
    let mut error = String::new();
    errors.read_line(&mut error).unwrap();
    let expected = format!("{path}:6: unknown field `size`");
    assert!(
        error.contains("stays as it was") && error.contains(&expected),
        "{error}"
    );
    user.file(
        "target.toml",
        &format!("{text}[[subsystem.namespace]]\nnull = \"3M\"\n"),
    );
    target.reload();
    assert_eq!(target.line(), format!("{path} is in force\n"));
    assert!(user.run(&["nvme", "ns", "list"]).contains("3 MiB"));

    let wrong = user.file("wrong.toml", "reactors = 0\n");
    let error = user.error(&["nvme", "target", "--config", wrong.to_str().unwrap()]);
    assert!(
        error.contains("wrong.toml:1: 0 is no number of reactors"),
        "{error}"
    );
}
