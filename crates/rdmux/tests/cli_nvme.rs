//! `rdmux nvme` and `rdmux accel`: the initiator's commands against `rdmux nvme target`.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

fn rdmux(home: &TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
    command
        .args(args)
        .env("XDG_CONFIG_HOME", home.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn output(home: &TempDir, args: &[&str], input: &[u8]) -> Output {
    let mut child = rdmux(home, args).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || {
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

/// Returns what a command prints, which must succeed.
fn run(home: &TempDir, args: &[&str], input: &[u8]) -> Vec<u8> {
    let output = output(home, args, input);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    output.stdout
}

fn json(home: &TempDir, args: &[&str]) -> Value {
    serde_json::from_slice(&run(home, args, &[])).unwrap()
}

/// Returns the one line that a command which fails writes to stderr.
fn error(home: &TempDir, args: &[&str], input: &[u8]) -> String {
    let output = output(home, args, input);
    assert!(!output.status.success(), "{args:?}");
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(errors.lines().count(), 1, "{args:?}: {errors}");
    errors
}

/// A target of this run's own, which is killed when the value is dropped.
struct Target {
    child: Child,
    address: String,
    url: String,
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Target {
    fn start(home: &TempDir, transport: &str, last: u8, more: &[&str]) -> Target {
        let [low, high, ..] = std::process::id().to_le_bytes();
        let address = format!("127.{}.{low}.{last}:4420", high | 0x80);
        let nqn = format!("nqn.2014-08.org.example:cli-{}-{last}", std::process::id());
        let listen = format!("{transport}:{address}");
        let args = ["nvme", "target", "--json", "--nqn", &nqn, "--listen", &listen];
        let mut child = rdmux(home, &[&args, more].concat())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let target = Target {
            child,
            url: format!("nvme+{transport}://{address}/{nqn}"),
            address,
        };
        assert!(line.contains(&nqn), "{more:?}: {line}");
        target
    }
}

/// Returns bytes that no block has twice.
fn pattern(len: usize, salt: u64) -> Vec<u8> {
    let words =
        (0..len as u64 / 8).flat_map(|word| (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt).to_le_bytes());
    words.collect()
}

#[test]
fn commands__use_the_own_secret_and_both_digests() {
    commands("tcp", 1, &["--header-digest", "--data-digest"]);
}

#[test]
fn tls__needs_the_key_of_the_target_or_is_refused() {
    let home = TempDir::new().unwrap();
    let psk = home.path().join("rdmux/nvme-psk");
    if !cfg!(feature = "tls") {
        let target = [
            "nvme",
            "target",
            "--tls",
            "--ns",
            "null:1M",
            "--listen",
            "tcp:127.0.0.1:0",
        ];
        let line = error(&home, &target, &[]);
        assert!(line.contains("without TLS"), "{line}");
        assert!(!psk.exists(), "nothing half done");
        let list = [
            "nvme",
            "list",
            "--concat",
            "nvme+tcp://127.0.0.1/nqn.2014-08.org.example:x",
        ];
        let line = error(&home, &list, &[]);
        assert!(line.contains("without TLS"), "{line}");
        return;
    }
    let target = Target::start(&home, "tcp", 9, &["--tls", "--ns", "null:1M"]);
    assert_eq!(fs::metadata(&psk).unwrap().mode() & 0o777, 0o600);
    assert_eq!(
        json(&home, &["nvme", "list", "--json", "--tls", &target.url])["namespaces"][0]["nsid"],
        1
    );
    let other = home.path().join("other");
    fs::copy(&psk, &other).unwrap();
    fs::remove_file(&psk).unwrap();
    let line = error(&home, &["nvme", "list", "--tls", &target.url], &[]);
    assert!(line.contains("nvme-psk"), "{line}");
    // The secret stands for the key, but not for TLS.
    let list = json(&home, &["nvme", "list", "--json", "--concat", &target.url]);
    assert_eq!(list["namespaces"][0]["nsid"], 1);
    let line = error(&home, &["nvme", "list", &target.url], &[]);
    assert!(line.contains("--concat"), "{line}");
    let discover = format!("nvme+tcp://{}", target.address);
    let line = error(&home, &["nvme", "discover", "--concat", &discover], &[]);
    assert!(line.contains("use --tls"), "{line}");
    run(
        &home,
        &[
            "nvme",
            "list",
            "--tls",
            "--psk",
            other.to_str().unwrap(),
            &target.url,
        ],
        &[],
    );
}

#[test]
fn commands__by_rdma() {
    commands("rdma", 6, &[]);
}

/// Runs each command against a target, with options that change nothing.
fn commands(transport: &str, last: u8, more: &[&str]) {
    let home = tempfile::tempdir().unwrap();
    let target = Target::start(
        &home,
        transport,
        last,
        &["--ns", "mem:16M,block=4096", "--ns", "null:1G,ro"],
    );
    let url = target.url.as_str();
    let discover = format!("nvme+{transport}://{}", target.address);
    let found = json(&home, &["nvme", "discover", &discover, "--json"]);
    assert_eq!(found["entries"][1]["transport"], transport);
    assert_eq!(found["entries"][1]["kind"], "subsystem");
    assert!(url.ends_with(found["entries"][1]["subsystem"].as_str().unwrap()));
    // The secret is for the subsystem: the discovery service asks for none.
    let secret = home.path().join("rdmux/nvme-secret");
    let given = ["--secret", secret.to_str().unwrap()];
    run(
        &home,
        &[&["nvme", "discover", &discover], &given[..]].concat(),
        &[],
    );
    run(&home, &[&["nvme", "list", url], &given[..]].concat(), &[]);
    let listed = json(&home, &["nvme", "list", url, "--json"]);
    assert_eq!(listed["namespaces"][0]["bytes"], 16 << 20);
    assert_eq!(listed["namespaces"][1]["read_only"], true);
    let ioccsz = match transport {
        "tcp" => (64 + 16384) / 16,
        _ => (64 + 4096) / 16,
    };
    let controller = json(&home, &["nvme", "id-ctrl", url, "--json"]);
    assert_eq!(
        (&controller["mdts"], &controller["ioccsz"]),
        (&8.into(), &ioccsz.into())
    );
    let namespace = json(&home, &["nvme", "id-ns", url, "--json", "--nsid", "1"]);
    assert_eq!(
        (&namespace["nsze"], &namespace["lbafs"][0]["lbads"]),
        (&4096.into(), &12.into())
    );

    let bytes = pattern(5 << 20, 1);
    let file = home.path().join("file");
    fs::write(&file, &bytes).unwrap();
    let write = ["nvme", "write", url, file.to_str().unwrap(), "--offset", "4K"];
    let said = run(&home, &[&write[..], more].concat(), &[]);
    assert!(String::from_utf8_lossy(&said).starts_with("wrote 5242880 bytes"));
    let read = ["nvme", "read", url, "--offset", "4K", "--length", "5M"];
    assert!(run(&home, &[&read[..], more].concat(), &[]) == bytes);
    // From a pipe, and into a file.
    let bytes = pattern(1 << 20, 2);
    run(
        &home,
        &["nvme", "write", url, "--offset", "8M", "--quiet"],
        &bytes,
    );
    let copy = home.path().join("copy");
    let into = [
        "nvme",
        "read",
        url,
        "--offset",
        "8M",
        "--length",
        "1M",
        "--output",
        copy.to_str().unwrap(),
        "--json",
    ];
    assert_eq!(json(&home, &into)["bytes"], 1 << 20);
    assert!(fs::read(copy).unwrap() == bytes);
    for rw in ["randread", "randwrite", "read", "write", "randrw"] {
        let perf = [
            "nvme", "perf", url, "--rw", rw, "--depth", "8", "--queues", "2", "--time", "0.2", "--warmup",
            "0", "--json",
        ];
        let measured = json(&home, &perf);
        let (reads, writes) = (
            measured["reads"].as_u64().unwrap(),
            measured["writes"].as_u64().unwrap(),
        );
        assert_eq!(
            (reads > 0, writes > 0),
            (
                rw != "randwrite" && rw != "write",
                rw.ends_with("write") || rw == "randrw"
            )
        );
        assert!(measured["cpu_us_per_io"].as_f64().unwrap() > 0.0);
    }
    let paced = json(
        &home,
        &[
            "nvme", "perf", url, "--rate", "500", "--depth", "64", "--queues", "2", "--time", "0.4",
            "--warmup", "0", "--json",
        ],
    );
    // Time is meant: 200 commands are due. A slow machine may do some of them later.
    let ios = paced["ios"].as_u64().unwrap();
    assert!((1..=200).contains(&ios), "{paced}");
}

#[test]
fn target__shows_how_each_host_of_a_list_connects() {
    let home = TempDir::new().unwrap();
    let [config, own] = ["c.toml", "own"].map(|name| home.path().join(name));
    let _listening = Target::start(&home, "tcp", 11, &["--ns", "null:1M"]);
    // A secret of the host's alone.
    let made = fs::read_to_string(home.path().join("rdmux/nvme-secret")).unwrap();
    fs::write(&own, made.lines().next().unwrap()).unwrap();
    fs::set_permissions(&own, fs::Permissions::from_mode(0o600)).unwrap();
    let nqn = format!("nqn.2014-08.org.example:cli-{}-list", std::process::id());
    let hosts = ["a", "b"].map(|name| format!("nqn.2014-08.org.example:{name}"));
    let text = format!(
        "listen = [\"tcp:127.0.0.1:0\"]\n[[subsystem]]\nnqn = {nqn:?}\nother_hosts = \"none\"\n\
         [[subsystem.host]]\nnqn = {:?}\nsecret = {own:?}\n[[subsystem.host]]\nnqn = {:?}\n",
        hosts[0], hosts[1]
    );
    fs::write(&config, text).unwrap();
    let args = ["nvme", "target", "--json", "--config", config.to_str().unwrap()];
    let mut child = rdmux(&home, &args).stderr(Stdio::inherit()).spawn().unwrap();
    let mut line = String::new();
    let read = BufReader::new(child.stdout.take().unwrap()).read_line(&mut line);
    child.kill().unwrap();
    child.wait().unwrap();
    read.unwrap();
    let shown: Value = serde_json::from_str(&line).unwrap();
    let connect = shown["subsystems"][0]["connect"].as_array().unwrap();
    let [first, second] = &connect[..] else {
        panic!("one of each: {connect:?}");
    };
    let (first, second) = (first.as_str().unwrap(), second.as_str().unwrap());
    assert!(first.contains(&format!("--hostnqn {} ", hosts[0])), "{first}");
    assert!(
        first.contains("/own)") && !first.contains("--dhchap-ctrl-secret"),
        "{first}"
    );
    assert!(second.contains(&format!("--hostnqn {} ", hosts[1])), "{second}");
    assert!(
        second.contains("nvme-secret)") && second.contains("--dhchap-ctrl-secret"),
        "{second}"
    );
}

#[test]
fn errors__are_one_line_that_says_what_and_where() {
    let home = tempfile::tempdir().unwrap();
    let target = Target::start(
        &home,
        "tcp",
        2,
        &["--ns", "mem:1M,block=4096", "--ns", "null:1M,ro"],
    );
    let url = target.url.as_str();
    let stranger = tempfile::tempdir().unwrap();
    let fails = |home: &TempDir, args: &[&str], input: &[u8], part: &str| {
        let error = error(home, args, input);
        assert!(error.contains(part), "{args:?}: {error}");
    };
    let list = ["nvme", "list", url];
    fails(&stranger, &list, &[], "--secret FILE");
    // Its own secret, which the target does not know.
    Target::start(&stranger, "tcp", 3, &["--ns", "null:1M"]);
    fails(&stranger, &list, &[], "wrong secret");
    let missing = ["nvme", "list", url, "--secret", "/nonexistent/secret"];
    fails(
        &home,
        &missing,
        &[],
        "secret file /nonexistent/secret does not exist",
    );
    fails(&home, &missing, &[], "nvme gen-dhchap-key");
    let file = stranger.path().join("rdmux/nvme-secret");
    fails(&stranger, &list, &[], file.to_str().unwrap());
    // Nothing listens there by RDMA.
    let rdma = url.replace("nvme+tcp", "nvme+rdma");
    fails(&home, &["nvme", "list", &rdma], &[], "cannot connect to");
    let digest = ["nvme", "list", &rdma, "--data-digest"];
    fails(&home, &digest, &[], "digests are for nvme+tcp://");
    let from = ["nvme", "list", url, "--from", "127.0.0.1"];
    fails(&home, &from, &[], "--from is for nvme+rdma://");
    let from = ["nvme", "list", &rdma, "--from", "192.0.2.1"];
    fails(&home, &from, &[], "192.0.2.1");
    fails(
        &home,
        &["nvme", "list", &format!("{url}x")],
        &[],
        "no subsystem of this name",
    );
    fails(
        &home,
        &["nvme", "list", &format!("nvme+tcp://{}", target.address)],
        &[],
        "names no subsystem",
    );
    fails(&home, &["nvme", "discover", url], &[], "without a subsystem");
    let (port, _) = url.split_once(":4420").unwrap();
    fails(
        &home,
        &["nvme", "discover", &format!("{port}:4421")],
        &[],
        "does a target listen there?",
    );
    let read = ["nvme", "read", url];
    for (more, part) in [
        (["--offset", "1"], "no multiple of the blocks"),
        (["--length", "100"], "no multiple of the blocks"),
        (["--offset", "1M"], "ends at byte 1048576"),
        (["--length", "2M"], "ends at byte 1048576"),
        (["--nsid", "9"], "no namespace 9"),
    ] {
        fails(&home, &[&read[..], &more].concat(), &[], part);
    }
    let write = ["nvme", "write", url];
    fails(
        &home,
        &[&write[..], &["--nsid", "2"]].concat(),
        &[0; 512],
        "read-only",
    );
    fails(&home, &write, &[0; 5000], "in the middle of a block");
    fails(
        &home,
        &write,
        &vec![0; (1 << 20) + 4096],
        "more bytes than namespace 1",
    );
    fails(
        &home,
        &[&write[..], &["--length", "8K"]].concat(),
        &[0; 4096],
        "too early",
    );
    fails(
        &home,
        &[&write[..], &["/nowhere"]].concat(),
        &[],
        "cannot read /nowhere: No such file",
    );
    fails(
        &home,
        &[&read[..], &["-o", "/nowhere/x"]].concat(),
        &[],
        "cannot write /nowhere/x: No such file",
    );
    fails(&home, &["nvme", "perf", url, "--bs", "512"], &[], "--bs 512");
    fails(
        &home,
        &["nvme", "perf", url, "--depth", "500"],
        &[],
        "commands of a queue at a time",
    );
    fails(
        &home,
        &["nvme", "perf", url, "--nsid", "2", "--rw", "randwrite"],
        &[],
        "read-only",
    );
}

fn disk(home: &TempDir) -> String {
    let path = home.path().join("disk");
    fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    format!("{},block=4096", path.display())
}

/// Returns the number of bytes of a file that hold something.
fn written(path: &Path) -> usize {
    fs::read(path)
        .unwrap()
        .chunks(4096)
        .filter(|block| block.iter().any(|byte| *byte != 0))
        .count()
        * 4096
}

#[test]
fn write__survives_a_target_that_is_killed() {
    write_over_a_kill("tcp", 4);
}

#[test]
fn write__survives_a_target_that_is_killed_by_rdma() {
    write_over_a_kill("rdma", 7);
}

fn write_over_a_kill(transport: &str, last: u8) {
    let home = tempfile::tempdir().unwrap();
    let namespace = disk(&home);
    let disk = home.path().join("disk");
    let mut target = Some(Target::start(&home, transport, last, &["--ns", &namespace]));
    let url = target.as_ref().unwrap().url.clone();
    let bytes = pattern(48 << 20, 3);
    let file = home.path().join("file");
    fs::write(&file, &bytes).unwrap();
    let args = ["nvme", "write", &url, file.to_str().unwrap(), "--json"];
    let writer = rdmux(&home, &args).spawn().unwrap();
    while written(&disk) < 1 << 20 {
        // Blocks of a file come without an event.
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(target.take());
    let _again = Target::start(&home, transport, last, &["--ns", &namespace]);
    let output = writer.wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("{report}");
    assert_eq!(report["bytes"], 48 << 20);
    assert!(fs::read(&disk).unwrap()[..48 << 20] == bytes);
}

#[test]
fn perf__ends_when_the_target_does_not_come_back() {
    let home = tempfile::tempdir().unwrap();
    let disk = home.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let target = Target::start(&home, "tcp", 5, &["--ns", disk.to_str().unwrap()]);
    let url = target.url.clone();
    let load = [
        "--rw",
        "randwrite",
        "--time",
        "60",
        "--warmup",
        "0",
        "--ctrl-loss-tmo",
        "1",
    ];
    let args = [&["nvme", "perf", &url][..], &load].concat();
    let mut writer = rdmux(&home, &args).spawn().unwrap();
    let (_, nqn) = url.rsplit_once('/').unwrap();
    let stat = ["nvme", "stat", "--json", "--nqn", nqn];
    // More writes than are in flight at a time: the host has seen that one is done.
    while json(&home, &stat)[0]["counts"]["writes"].as_u64().unwrap() <= 32 {
        assert!(writer.try_wait().unwrap().is_none(), "it ended early");
    }
    drop(target);
    let output = writer.wait_with_output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(1) && errors.contains("could not be made again within 1 s"),
        "{errors}"
    );
    let told = errors.lines().filter(|line| line.contains("tries again for 1 s"));
    assert_eq!(told.count(), 1, "{errors}");
    // Its measurements before that are not lost.
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(
        said.contains("randwrite: namespace 1") && said.contains("IOPS"),
        "{said}"
    );
}

#[test]
fn stat__shows_the_bytes_that_an_rnic_has_moved() {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("socket");
    let socket = ["--socket", socket.to_str().unwrap()];
    let stat = [&["nvme", "stat", "--ledger"], &socket[..]].concat();
    let options = [&["--ns", "mem:1M", "--ledger"], &socket[..]].concat();
    let target = Target::start(&home, "rdma", 40, &options);
    let booked = || json(&home, &[&stat[..], &["--json"]].concat());
    let moved = |bytes: usize| {
        let before = booked();
        run(
            &home,
            &["nvme", "write", &target.url, "--nsid", "1"],
            &pattern(bytes, 3),
        );
        let after = booked();
        ["wire", "nic-root", "root-dram", "root-drive"].map(|link| {
            let of = |ledger: &Value| ledger[link]["data"].as_u64().unwrap();
            of(&after) - of(&before)
        })
    };
    // Identify has data as well.
    let (less, more) = (moved(64 << 10), moved(320 << 10));
    let data: Vec<u64> = more.iter().zip(less).map(|(more, less)| more - less).collect();
    assert_eq!(data, [256 << 10, 256 << 10, 256 << 10, 0]);
    let table = String::from_utf8(run(&home, &stat, &[])).unwrap();
    let all = booked()["root-dram"]["data"].to_string();
    assert!(
        table.contains("root-dram") && table.contains(&all),
        "{all} in: {table}"
    );
    drop(target);
    let _target = Target::start(&home, "tcp", 41, &[&["--ns", "null:1M"], &socket[..]].concat());
    let error = error(&home, &stat, &[]);
    assert!(error.contains("start it with --ledger"), "{error}");
}

#[test]
fn stat__says_that_an_offload_engine_needs_a_drive() {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("socket");
    let socket = ["--socket", socket.to_str().unwrap()];
    let options = [&["--ns", "mem:1M", "--offload"], &socket[..]].concat();
    let target = Target::start(&home, "rdma", 42, &options);
    // It serves what is no drive, too.
    let data = pattern(64 << 10, 3);
    run(&home, &["nvme", "write", &target.url, "--nsid", "1"], &data);
    let error = error(
        &home,
        &[&["nvme", "stat", "--offload"], &socket[..]].concat(),
        &[],
    );
    assert!(error.contains("--offload and --ns pcie:ADDR"), "{error}");
}

#[test]
fn perf__warns_of_a_path_that_leads_nowhere() {
    let home = tempfile::tempdir().unwrap();
    let target = Target::start(&home, "tcp", 8, &["--ns", "null:1M"]);
    let nowhere = target.url.replace(":4420", ":4421");
    let load = ["--time", "0.1", "--warmup", "0", "--path", &nowhere];
    let output = output(&home, &[&["nvme", "perf", &target.url][..], &load].concat(), &[]);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{errors}");
    assert!(
        errors.lines().count() == 1 && errors.contains("warning") && errors.contains(&nowhere),
        "{errors}"
    );
}

/// Returns text of so many bytes, which compresses.
fn text(len: usize) -> Vec<u8> {
    let words = pattern(4096, 7);
    let text: Vec<u8> = (0u64..)
        .flat_map(|word| words[(word * word % 509 * 8) as usize..][..7].to_vec())
        .take(len)
        .collect();
    assert_eq!(text.len(), len);
    text
}

#[test]
fn accel__makes_files_that_gzip_reads_and_takes_them_back() {
    let home = TempDir::new().unwrap();
    let accelerators = [
        "--accel",
        "deflate:2",
        "--accel",
        "zstd,window=256K",
        "--accel",
        "lz4",
        "--accel",
        "crc64nvme",
    ];
    for (transport, last) in [("tcp", 30), ("rdma", 31)] {
        let target = Target::start(&home, transport, last, &accelerators);
        let via = &format!("{}:accel", target.url);
        // More than one window, and nothing at all.
        for len in [10_000_000, 1, 0] {
            let file = home.path().join("file");
            fs::write(&file, text(len)).unwrap();
            let file = file.to_str().unwrap();
            for (algorithm, ending) in [("deflate", "gz"), ("zstd", "zst"), ("lz4", "lz4")] {
                let packed = &format!("{file}.{ending}");
                let compress = [
                    "accel",
                    "compress",
                    file,
                    "--via",
                    via,
                    "--algorithm",
                    algorithm,
                    "--force",
                ];
                run(&home, &compress, &[]);
                if ending == "gz" && len > 0 {
                    let unpacked = Command::new("gzip").args(["-dc", packed]).output().unwrap();
                    assert!(
                        unpacked.status.success() && unpacked.stdout == text(len),
                        "{len} bytes"
                    );
                }
                if len > 0 {
                    let back = run(
                        &home,
                        &["accel", "decompress", packed, "--via", via, "--output", "-"],
                        &[],
                    );
                    assert!(back == text(len), "{algorithm}, {len} bytes");
                }
                fs::remove_file(packed).unwrap();
            }
            let sums = run(&home, &["accel", "checksum", file, "--via", via], &[]);
            let piped = run(&home, &["accel", "checksum", "-", "--via", via], &text(len));
            let words = |line: &[u8]| {
                String::from_utf8_lossy(line)
                    .split_once("  ")
                    .map(|(sum, _)| sum.to_owned())
            };
            assert_eq!(words(&sums), words(&piped));
        }
    }
}

#[test]
fn accel__copies_results_to_a_drive_of_the_target() {
    let home = TempDir::new().unwrap();
    let disk = home.path().join("disk");
    fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    let disk = disk.to_str().unwrap();
    // The drive is in both subsystems.
    let target = Target::start(
        &home,
        "tcp",
        32,
        &["--ns", disk, "--accel", "deflate", "--accel-ns", disk],
    );
    let via = &format!("{}:accel", target.url);
    let file = home.path().join("file");
    fs::write(&file, text(10_000_000)).unwrap();
    let file = file.to_str().unwrap();
    let compress = [
        "accel", "compress", file, "--via", via, "--to", "2", "--offset", "1M", "--json",
    ];
    let report = json(&home, &compress);
    assert_eq!(
        (&report["nsid"], &report["offset"]),
        (&2.into(), &(1 << 20).into())
    );
    let length = report["result_bytes"].as_u64().unwrap();
    assert!(length.is_multiple_of(512) && length < 10_000_000, "{report}");
    // Hosts of the other subsystem have it.
    let (length, packed) = (length.to_string(), home.path().join("packed"));
    let packed = packed.to_str().unwrap();
    let read = [
        "nvme",
        "read",
        &target.url,
        "--offset",
        "1M",
        "--length",
        &length,
        "--output",
        packed,
    ];
    run(&home, &read, &[]);
    let unpacked = Command::new("gzip")
        .arg("-dc")
        .stdin(fs::File::open(packed).unwrap())
        .output()
        .unwrap();
    assert!(unpacked.status.success() && unpacked.stdout == text(10_000_000));
    let decompress = ["accel", "decompress", packed, "--via", via, "--to", "2"];
    run(&home, &decompress, &[]);
    let read = run(&home, &["nvme", "read", &target.url, "--length", "512"], &[]);
    assert_eq!(read, text(512));
}

#[test]
fn accel__says_what_is_wrong_in_one_line() {
    let home = TempDir::new().unwrap();
    let target = Target::start(
        &home,
        "tcp",
        33,
        &[
            "--ns",
            "mem:64K",
            "--accel",
            "zstd,window=256K",
            "--accel",
            "lz4",
            "--accel-ns",
            "mem:64K,block=4096",
            "--accel-ns",
            "mem:64K",
        ],
    );
    let (drives, via) = (&target.url, &format!("{}:accel", target.url));
    let file = home.path().join("file");
    fs::write(&file, text(1_000_000)).unwrap();
    let file = file.to_str().unwrap();
    let packed = &format!("{file}.zst");
    fs::write(packed, "here").unwrap();
    let compress = |more: &[&str]| {
        error(
            &home,
            &[&["accel", "compress", file, "--via", via][..], more].concat(),
            &[],
        )
    };
    for (line, part) in [
        (compress(&[]), "choose one with --algorithm"),
        (
            compress(&["--algorithm", "deflate"]),
            "no accelerator for deflate, only for zstd, lz4",
        ),
        (
            compress(&["--algorithm", "zstd"]),
            "exists: replace it with --force",
        ),
        (
            compress(&["--algorithm", "zstd", "--level", "2"]),
            "export them with level=2",
        ),
        (
            compress(&["--algorithm", "lz4", "--level", "1"]),
            "lz4 has no levels",
        ),
        (
            compress(&["--algorithm", "zstd", "--to", "1"]),
            "is an accelerator: give one that stores",
        ),
        (
            compress(&["--algorithm", "zstd", "--to", "9"]),
            "has no namespace 9",
        ),
        (compress(&["--algorithm", "zstd", "--to", "3"]), "incompatible"),
        (
            compress(&["--algorithm", "zstd", "--to", "4", "--offset", "65024"]),
            "namespace 4 has no room",
        ),
        (
            compress(&["--algorithm", "zstd", "--to", "4", "--offset", "100"]),
            "no multiple of the blocks",
        ),
        (
            compress(&["--algorithm", "zstd", "--output", "-", "--json"]),
            "give --output FILE",
        ),
        (
            error(&home, &["accel", "checksum", file, "--via", via], &[]),
            "no accelerator to checksum",
        ),
        (
            error(&home, &["accel", "compress", file, "--via", drives], &[]),
            "has no accelerators",
        ),
        (
            error(&home, &["accel", "decompress", packed, "--via", via], &[]),
            "is not of zstd, lz4 or gzip",
        ),
        (
            error(&home, &["accel", "compress", "/none", "--via", via], &[]),
            "cannot read /none",
        ),
        (
            error(
                &home,
                &["accel", "header", "checksum", "zstd", "--length", "1"],
                &[],
            ),
            "an accelerator would refuse this",
        ),
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert_eq!(fs::read(packed).unwrap(), b"here", "what was there stays");
    // A file whose frame has more than a window, and one that ends too early.
    run(
        &home,
        &["accel", "compress", file, "--via", via, "--algorithm", "lz4"],
        &[],
    );
    let lz4 = &format!("{file}.lz4");
    let whole = fs::read(lz4).unwrap();
    fs::write(lz4, &whole[..whole.len() - 5]).unwrap();
    let line = error(&home, &["accel", "decompress", lz4, "--via", via, "--force"], &[]);
    assert!(line.contains("the file is not complete"), "{line}");
    assert!(!Path::new(file).exists(), "half a result is removed");
}
