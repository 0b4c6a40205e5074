//! `rdmux dsm run`: the nodes' environment, exit statuses, signals and wrong input; `rdmux dsm stat`.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod dsm_node;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rdmux_dsm::Consistency;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const LONG: Duration = Duration::from_secs(60);

fn dsm(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
    command.args(["dsm", "run"]).args(args);
    command
}

fn run(args: &[&str]) -> Output {
    dsm(args).output().unwrap()
}

/// Starts nodes of [`dsm_node`]. Returns their launcher, and the lines that they print.
fn start_nodes(options: &[&str], consistency: Consistency) -> (Child, impl Iterator<Item = String> + use<>) {
    let mut launcher = dsm(options)
        .args(dsm_node::command(consistency))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let out = BufReader::new(launcher.stdout.take().unwrap());
    (launcher, out.lines().map_while(Result::ok))
}

fn lines(bytes: &[u8]) -> Vec<String> {
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn run__each_node_has_its_number_and_the_same_cluster() {
    let print = "echo $RDMUX_DSM_NODE $RDMUX_DSM_MEMBERS $RDMUX_DSM_SESSION $RDMUX_DSM_FAULTS";
    let output = run(&["-n", "3", "--faults", "inline", "--", "sh", "-c", print]);
    assert!(output.status.success());
    let mut lines = lines(&output.stdout);
    lines.sort();
    let (numbers, rest): (Vec<&str>, Vec<&str>) =
        lines.iter().filter_map(|line| line.split_once(' ')).unzip();
    assert_eq!(numbers, ["0", "1", "2"]);
    assert!(rest.iter().all(|it| *it == rest[0]), "{rest:?}");
    assert_eq!(rest[0].matches("127.0.0.1:").count(), 3);
    assert!(rest[0].ends_with(" inline"));
}

#[test]
fn run__gives_faults_to_all_nodes() {
    let fault = "loss=1%,delay=100us..1ms,seed=7";
    let print = "echo $RDMUX_FAULT";
    let output = run(&["-n", "2", "--fault", fault, "--", "sh", "-c", print]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        lines(&output.stdout),
        ["loss=1%,delay=100000ns..1000000ns,seed=7"; 2]
    );
    let (mut launcher, mut said) = start_nodes(&["-n", "2", "--fault", fault, "--"], Consistency::Sequential);
    assert!(said.any(|line| line.contains("READY ")));
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    launcher.wait().unwrap();
}

#[test]
fn run__ends_as_the_first_node_that_fails() {
    let exit = "exit $((RDMUX_DSM_NODE * 3))";
    assert_eq!(run(&["-n", "3", "--", "sh", "-c", exit]).status.code(), Some(3));
    let kill = "test $RDMUX_DSM_NODE = 1 && kill -9 $$; exit 0";
    let output = run(&["-n", "2", "--", "sh", "-c", kill]);
    assert_eq!(output.status.code(), Some(128 + 9));
    assert_eq!(lines(&output.stderr), ["rdmux: node 1: ended by signal 9"]);
}

#[test]
fn run__of_a_program_that_is_missing() {
    let output = run(&["-n", "2", "--", "/does/not/exist"]);
    assert_eq!(output.status.code(), Some(127));
    assert_eq!(
        lines(&output.stderr),
        ["rdmux: /does/not/exist: program not found"]
    );
}

#[test]
fn run__passes_a_signal_on_to_all_nodes() {
    let mut launcher = dsm(&["-n", "2", "--", "sh", "-c", "echo begins; exec sleep 60"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let stdout = BufReader::new(launcher.stdout.take().unwrap());
    let begun = stdout.lines().take(2).collect::<Result<Vec<_>, _>>().unwrap();
    assert_eq!(begun, ["begins", "begins"]);
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(128 + 15));
}

#[test]
fn run__wrong_input_has_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let one = file("one", "nodes = ['127.0.0.1:7180']");
    let wrong = file("wrong", "nodes = ['127.0.0.1:7180']\nlease = 'long'");
    let missing = folder.path().join("missing").to_str().unwrap().to_owned();
    let key = folder.path().join("key").to_str().unwrap().to_owned();
    rdmux_key::Key::load_or_create_at(key.as_ref()).unwrap();
    let cases: [(&[&str], &str); 6] = [
        (&["-n", "0", "--", "true"], "-n 0"),
        (&["-n", "5000", "--", "true"], "-n 5000"),
        (
            &["-n", "1", "--device", "203.0.113.1", "--", "true"],
            "203.0.113.1",
        ),
        (
            &["--cluster", &one, "--node", "1", "--key", &key, "--", "true"],
            "node 1 of 1",
        ),
        (
            &["--cluster", &wrong, "--node", "0", "--key", &key, "--", "true"],
            "lease",
        ),
        (
            &["--cluster", &missing, "--node", "0", "--key", &key, "--", "true"],
            "missing",
        ),
    ];
    for (args, word) in cases {
        let output = run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        let lines = lines(&output.stderr);
        assert!(lines[0].contains(word), "{args:?}: {lines:?}");
    }
    for args in [
        &["--", "true"][..],
        &["-n", "1"],
        &["-n", "1", "--node", "0", "--", "true"],
        &["-n", "1", "--fault", "loss=much", "--", "true"],
    ] {
        assert_eq!(run(args).status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn node() {
    dsm_node::run();
}

fn stat(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
    command.args(["dsm", "stat"]).args(args).output().unwrap()
}

fn stat_json(cluster: &str) -> Vec<Value> {
    let output = stat(&[cluster, "--json"]);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Shows nodes, one that is killed no more, and no run that has ended.
#[test]
fn stat__shows_the_nodes_that_run() {
    let (mut launcher, mut said) = start_nodes(&["-n", "2", "--"], Consistency::Sequential);
    let cluster = said.find_map(|line| Some(line.rsplit_once("READY ")?.1.to_owned()));
    let cluster = cluster.unwrap();
    let nodes = stat_json(&cluster);
    let [zero, one] = &nodes[..] else {
        panic!("{nodes:?}")
    };
    for (number, node) in nodes.iter().enumerate() {
        assert_eq!((&node["node"], &node["nodes"]), (&number.into(), &2.into()));
        assert_eq!(node["cluster"], cluster);
        assert_eq!(node["epoch"], 0);
        assert_eq!(node["regions"][0]["bytes"], 65536);
        assert_eq!(node["peers"][0]["node"], 1 - number);
        assert_eq!(node["peers"][0]["gone"], false);
        assert!(node["stage_1_events"].as_u64().unwrap() > 0, "{node}");
    }
    assert_eq!(zero["address"], cluster);
    assert_eq!(one["regions"][0]["fetched_bytes"], 4096);
    let text = stat(&[&cluster]);
    let shown = lines(&text.stdout);
    let title = format!("cluster {cluster}: 2 of 2 nodes on this host");
    assert_eq!((shown[0].as_str(), shown.len()), (&*title, 10), "{shown:?}");
    let killed = Pid::from_raw(one["pid"].as_i64().unwrap() as i32).unwrap();
    kill_process(killed, Signal::KILL).unwrap();
    let deadline = Instant::now() + LONG;
    loop {
        let nodes = stat_json(&cluster);
        if nodes.len() == 1 && nodes[0]["peers"][0]["gone"] == true {
            break;
        }
        assert!(Instant::now() < deadline, "{nodes:?}");
    }
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    launcher.wait().unwrap();
    let output = stat(&[&cluster]);
    assert_eq!(output.status.code(), Some(1));
    let told = lines(&output.stderr);
    assert!(told.len() == 1 && told[0].contains(&cluster), "{told:?}");
}

/// Node 0 writes a page at home there, and node 1 reads it: between two barriers, each has acquired twice.
#[test]
fn stat__of_a_region_with_release_consistency_has_a_table_of_its_own() {
    let (mut launcher, mut said) = start_nodes(&["-n", "2", "--"], Consistency::Release);
    let cluster = said.find_map(|line| Some(line.rsplit_once("READY ")?.1.to_owned()));
    let cluster = cluster.unwrap();
    let deadline = Instant::now() + LONG;
    let text = loop {
        // Node 0 is ready before node 1 has acquired for the last time.
        let nodes = stat_json(&cluster);
        let counts = |node: usize, names: &[&str]| -> Vec<u64> {
            let region = &nodes[node]["regions"][0];
            let count = |name: &&str| region[*name].as_u64().unwrap();
            names.iter().map(count).collect()
        };
        let rounds = |node| counts(node, &["releases", "acquires"]);
        if counts(1, &["log_reads"]) == [4] {
            assert_eq!((rounds(0), rounds(1)), (vec![1, 2], vec![0, 2]), "{nodes:?}");
            let of_flushes = ["twins", "flushes_sent", "flushes", "flush_read_bytes"];
            assert_eq!(counts(0, &of_flushes), [0; 4], "{nodes:?}");
            assert_eq!(counts(1, &["fetches", "invalidations"]), [1, 0], "{nodes:?}");
            assert_eq!(nodes[0]["regions"][0]["consistency"], "release");
            break stat(&[&cluster]).stdout;
        }
        assert!(Instant::now() < deadline, "{nodes:?}");
    };
    let shown = lines(&text);
    assert_eq!(shown.len(), 13, "{shown:?}");
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let titles = "node region releases ms acquires ms twins flushes out in landed merged KiB log reads KiB";
    assert_eq!(words(&shown[7]), words(titles));
    assert_eq!(words(&shown[9])[..3], ["1", "0", "0"], "{shown:?}");
    kill_process(Pid::from_child(&launcher), Signal::TERM).unwrap();
    launcher.wait().unwrap();
}

#[test]
fn stat__of_damaged_counts_has_one_line() {
    let content = b"no counts at all";
    let file = rdmux_memory::mapping::sealed_file("rdmux-dsm-stat", content.len() as u64).unwrap();
    File::from(file.try_clone().unwrap()).write_all(content).unwrap();
    for args in [&[][..], &["--json"]] {
        let output = stat(args);
        assert!(output.status.success(), "{output:?}");
        let own = format!("rdmux: process {}: ", std::process::id());
        let told = lines(&output.stderr);
        let mut of_this = told.iter().filter(|line| line.starts_with(&own));
        assert!(
            of_this.next().is_some_and(|line| line.contains("damaged")),
            "{told:?}"
        );
        assert_eq!(of_this.next(), None, "{told:?}");
    }
}
