//! The programs on distributed shared memory, with their nodes as processes of this host.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use rdmux_dsm::trace::{self, Trace};
use rdmux_dsm::{Cluster, FaultMode, WAIT_VARIABLE};
use rdmux_sim::dsm::{Costs, replay};
use serde_json::Value;

const MODES: [FaultMode; 3] = [FaultMode::Thread, FaultMode::Inline, FaultMode::Mprotect];

const PAGE: usize = 4096;

/// Returns the program of an example.
fn program(name: &str) -> &'static str {
    match name {
        "sor" => env!("CARGO_BIN_EXE_dsm_sor"),
        "matmul" => env!("CARGO_BIN_EXE_dsm_matmul"),
        "lu" => env!("CARGO_BIN_EXE_dsm_lu"),
        "kv" => env!("CARGO_BIN_EXE_dsm_kv"),
        _ => panic!("{name} is no program"),
    }
}

/// Returns an address of the loopback interface for one cluster: the processes that share an address are limited.
fn address() -> IpAddr {
    static CLUSTERS: AtomicU8 = AtomicU8::new(0);
    let cluster = CLUSTERS.fetch_add(1, Ordering::Relaxed);
    let pid = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | cluster & 0x3f, pid[2], pid[3]).into()
}

/// Runs a program on some nodes. Returns how each has ended.
fn run(name: &str, nodes: u32, mode: FaultMode, arguments: &[&str]) -> Vec<Output> {
    run_over(&[], name, nodes, mode, arguments)
}

/// Does that on a network that variables of the environment describe.
fn run_over(
    network: &[(&str, &str)],
    name: &str,
    nodes: u32,
    mode: FaultMode,
    arguments: &[&str],
) -> Vec<Output> {
    rdmux_soft::register();
    let clusters = Cluster::on_this_host(address(), nodes).unwrap();
    let start = |mut cluster: Cluster| {
        // A busy host does not decide the outcome.
        cluster.lease = Duration::from_secs(120);
        Command::new(program(name))
            .args(arguments)
            .envs(cluster.environment())
            .env(FaultMode::VARIABLE, mode.to_string())
            .envs(network.iter().copied())
            // Errors would have backtraces.
            .env("RUST_LIB_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let nodes: Vec<Child> = clusters.into_iter().map(start).collect();
    nodes
        .into_iter()
        .map(|node| node.wait_with_output().unwrap())
        .collect()
}

/// Runs a program on some nodes, which must succeed. Returns what each has printed.
fn printed(name: &str, nodes: u32, mode: FaultMode, arguments: &[&str]) -> Vec<String> {
    let outputs = run(name, nodes, mode, arguments);
    let all = format!("{name} {arguments:?} on {nodes} nodes, faults {mode}: {outputs:#?}");
    assert!(outputs.iter().all(|output| output.status.success()), "{all}");
    let text = |output: Output| String::from_utf8(output.stdout).unwrap();
    outputs.into_iter().map(text).collect()
}

/// Runs a program on some nodes. Returns their reports.
fn reports(name: &str, nodes: u32, mode: FaultMode, arguments: &[&str]) -> Vec<Value> {
    let printed = printed(name, nodes, mode, &[arguments, &["--json"]].concat());
    let parse = |text: &String| serde_json::from_str(text).expect(text);
    printed.iter().map(parse).collect()
}

/// Runs a program in all modes on 1 to 3 nodes, and on as many threads of one node. Each checks itself, and all have the same result.
fn check(name: &str, arguments: &[&str], result: &str) {
    for parties in 1..=3 {
        let threads = parties.to_string();
        let of_threads = [arguments, &["--threads", &threads]].concat();
        let expected = &reports(name, 1, FaultMode::Thread, &of_threads)[0][result];
        assert!(expected.as_f64().unwrap() > 0.0, "{expected}");
        for mode in MODES {
            let reports = reports(name, parties, mode, arguments);
            assert_eq!(reports.len() as u32, parties);
            for (node, report) in reports.iter().enumerate() {
                assert_eq!(report["node"], node, "{report}");
                assert_eq!(&report[result], expected, "{report}");
                let pages_read = report["pages_read"].as_u64().unwrap();
                assert_eq!(pages_read > 0, parties > 1, "{report}");
            }
        }
    }
}

#[test]
fn sor__is_right_on_nodes_and_threads_in_each_mode() {
    check("sor", &["62", "5"], "sum");
}

#[test]
fn matmul__is_right_on_nodes_and_threads_in_each_mode() {
    check("matmul", &["65"], "sum");
}

#[test]
fn lu__is_right_on_nodes_and_threads_in_each_mode() {
    check("lu", &["96", "16"], "sum");
}

#[test]
fn kv__is_right_on_nodes_and_threads_in_each_mode() {
    check("kv", &["500", "50"], "keys");
}

#[test]
fn programs__are_right_with_threads_on_each_of_two_nodes() {
    for mode in MODES {
        for line in ["sor 62 5", "matmul 65", "lu 96 16", "kv 300 50"] {
            let words: Vec<&str> = line.split(' ').chain(["--threads", "2"]).collect();
            for report in reports(words[0], 2, mode, &words[1..]) {
                assert_eq!(report["threads"], 2);
            }
        }
    }
}

#[test]
fn programs__are_right_with_release_consistency() {
    for mode in MODES {
        for line in ["sor 62 5", "matmul 65", "lu 96 16", "kv 300 50"] {
            for threads in ["1", "2"] {
                let options = ["--threads", threads, "--consistency", "release"];
                let words: Vec<&str> = line.split(' ').chain(options).collect();
                reports(words[0], 3, mode, &words[1..]);
            }
        }
    }
}

#[test]
fn programs__are_right_although_packets_are_lost_and_delayed() {
    for faults in [
        "loss=1%,dup=1%,reorder=1%,seed=3",
        "loss=1%,delay=100us..1ms,seed=4",
    ] {
        let network = [("RDMUX_SHM", "off"), ("RDMUX_FAULT", faults)];
        for mode in MODES {
            for line in ["sor 62 5", "kv 200 30"] {
                let words: Vec<&str> = line.split(' ').collect();
                let outputs = run_over(&network, words[0], 3, mode, &words[1..]);
                // Each compares its results with those of a run alone.
                let is_correct = |it: &Output| it.status.success() && it.stdout.ends_with(b": correct\n");
                assert!(
                    outputs.iter().all(is_correct),
                    "{line} {mode} {faults}: {outputs:#?}"
                );
            }
        }
    }
}

/// Returns the pages that hold a row of one colour, the `row`th of its node: rows of two nodes or two colours share no page.
fn pages_of_row(edge: usize, row: usize) -> usize {
    let bytes = (edge + 2).div_ceil(2) * 8;
    ((row + 1) * bytes).div_ceil(PAGE) - row * bytes / PAGE
}

#[test]
fn sor__reads_the_boundary_pages_alone() {
    const ITERATIONS: usize = 6;
    const COLOURS: usize = 2;
    let kinds = MODES
        .into_iter()
        .flat_map(|mode| ["sequential", "release"].map(|it| (mode, it)));
    for (mode, consistency) in kinds {
        // Rows of a part of a page, of a page, and of pages and a part.
        for edge in [62, 1022, 1100] {
            let arguments = [edge.to_string(), ITERATIONS.to_string()];
            let [edge_text, iterations] = arguments.each_ref().map(String::as_str);
            let arguments = [edge_text, iterations, "--consistency", consistency];
            let reports = reports("sor", 2, mode, &arguments);
            // The first row of node 0 is the border. Its last one is read by node 1, whose first one it reads.
            let boundaries = [pages_of_row(edge, 0), pages_of_row(edge, edge / 2)];
            for (report, pages) in reports.iter().zip(boundaries) {
                assert_eq!(report["pages_read"], pages * COLOURS * ITERATIONS, "{report}");
            }
        }
    }
}

#[test]
fn matmul__reads_each_page_of_the_other_node_once() {
    const EDGE: usize = 128;
    for report in reports("matmul", 2, FaultMode::Thread, &[&EDGE.to_string()]) {
        assert_eq!(report["pages_read"], EDGE / 2 * EDGE * 8 / PAGE, "{report}");
    }
}

/// Runs a program on some nodes with traces in a folder.
fn traced(folder: &Path, name: &str, nodes: u32, mode: FaultMode, arguments: &[&str]) -> Vec<Output> {
    let network = [(trace::VARIABLE, folder.to_str().unwrap())];
    run_over(&network, name, nodes, mode, arguments)
}

#[test]
fn replay__reads_the_pages_that_the_run_has_read() {
    // Marks of the parallel part.
    const BEGIN: u32 = 1;
    const END: u32 = 2;
    for mode in [FaultMode::Inline, FaultMode::Mprotect] {
        for line in [
            "sor 62 5",
            "sor 1022 3",
            "sor 62 5 --consistency release",
            "matmul 128",
            // Blocks that share a page would be read as often as time has it.
            "lu 128 32",
            "lu 128 32 --consistency release",
        ] {
            let folder = tempfile::tempdir().unwrap();
            let words: Vec<&str> = line.split(' ').chain(["--json"]).collect();
            let outputs = traced(folder.path(), words[0], 2, mode, &words[1..]);
            assert!(
                outputs.iter().all(|it| it.status.success()),
                "{line} {mode}: {outputs:#?}"
            );
            let traces = Trace::read_all(folder.path()).unwrap();
            let replayed = replay(&traces, Costs::default()).unwrap();
            assert_eq!(replayed.len(), outputs.len());
            for (output, replayed) in outputs.iter().zip(replayed) {
                let report: Value = serde_json::from_slice(&output.stdout).unwrap();
                let part = replayed.between(BEGIN, END).unwrap();
                assert_eq!(report["pages_read"], part.units_read, "{line} {mode}: {report}");
                assert!(part.units_read > 0 && part.at_ns > 0, "{line} {mode}: {part:?}");
            }
        }
    }
}

#[test]
fn trace__of_mode_thread_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let outputs = traced(folder.path(), "sor", 1, FaultMode::Thread, &["62", "1"]);
    let error = String::from_utf8_lossy(&outputs[0].stderr);
    let is_line = error.starts_with("Error: RDMUX_DSM_TRACE is set") && error.trim_end().lines().count() == 1;
    assert!(is_line && error.contains("RDMUX_DSM_FAULTS=inline"), "{error}");
    assert!(Trace::read_all(folder.path()).is_err());
}

#[test]
fn trace__that_cannot_be_written_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let outputs = traced(file.path(), "sor", 1, FaultMode::Inline, &["62", "1"]);
    let error = String::from_utf8_lossy(&outputs[0].stderr);
    assert!(
        error.starts_with("Error: trace ") && error.contains("node-0.trace: "),
        "{error}"
    );
}

#[test]
fn programs__run_with_each_way_to_wait_and_refuse_others() {
    let run = |mode: &str| {
        run_over(
            &[(WAIT_VARIABLE, mode)],
            "sor",
            2,
            FaultMode::Inline,
            &["62", "5"],
        )
    };
    for mode in ["blocked", "interrupted", "running"] {
        let outputs = run(mode);
        assert!(
            outputs.iter().all(|it| it.status.success()),
            "{mode}: {outputs:#?}"
        );
    }
    for output in run("sometimes") {
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            error,
            "Error: RDMUX_DSM_WAIT=sometimes: give blocked, interrupted or running\n"
        );
    }
}

#[test]
fn report__of_each_node_is_a_line() {
    for (node, text) in printed("sor", 2, FaultMode::Thread, &["30", "2"])
        .iter()
        .enumerate()
    {
        let has_begin = text.starts_with(&format!("node {node}: "));
        assert!(has_begin && text.ends_with(": correct\n"), "{text}");
        assert!(
            text.contains(" s, alone ") && text.contains(" pages read, "),
            "{text}"
        );
    }
}

#[test]
fn programs__refuse_what_they_cannot_divide() {
    for (name, arguments, expected) in [
        ("sor", ["1", "1"], "Error: 1 rows for 2 threads\n"),
        ("matmul", ["1", "--json"], "Error: 1 rows for 2 threads\n"),
        (
            "lu",
            ["10", "4"],
            "Error: 10 rows are not divided into blocks of 4\n",
        ),
        ("kv", ["10", "0"], "Error: no keys\n"),
    ] {
        let outputs = run(name, 2, FaultMode::Thread, &arguments);
        assert!(outputs.iter().all(|output| !output.status.success()));
        // To a node that still joins, the other one may have left.
        let says = |output: &Output| String::from_utf8_lossy(&output.stderr) == expected;
        assert!(outputs.iter().any(says), "{outputs:#?}");
    }
}

#[test]
fn programs__name_the_command_that_starts_their_nodes() {
    for name in ["sor", "matmul", "lu", "kv"] {
        let mut command = Command::new(program(name));
        let output = command.env("RUST_LIB_BACKTRACE", "0").output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains("start the program by `rdmux dsm run`"), "{error}");
    }
}
