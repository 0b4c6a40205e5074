//! `rdmux perf` and `rdmux sim` as a person or a script sees them.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

fn rdmux(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
    command.args(args).stdin(Stdio::null());
    command
}

/// A child that is killed when the value is dropped.
struct Server(Child);

impl Server {
    fn perf(test: &str, address: &str, more: &[&str]) -> Server {
        Server::perf_with(test, address, more, &[])
    }

    fn perf_with(test: &str, address: &str, more: &[&str], environment: &[(&str, &str)]) -> Server {
        let mut command = rdmux(&["perf", test, "--bind", address]);
        Server(
            command
                .args(more)
                .envs(environment.iter().copied())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a client, again and again while nothing listens yet.
fn client(args: &[&str]) -> Output {
    let deadline = Instant::now() + LONG;
    loop {
        let output = rdmux(args).output().unwrap();
        let early = String::from_utf8_lossy(&output.stderr).contains("nothing listens")
            || String::from_utf8_lossy(&output.stderr).contains("no answer");
        if !early || Instant::now() > deadline {
            return output;
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn perf__every_test_ends_with_figures_that_are_possible() {
    let tests = [
        "write-lat",
        "read-lat",
        "send-lat",
        "flush-lat",
        "write-bw",
        "read-bw",
        "send-bw",
        "flush-bw",
    ];
    for (i, test) in tests.into_iter().enumerate() {
        let address = format!("127.0.1.{}", i + 1);
        let _server = Server::perf(test, &address, &[]);
        let output = client(&["perf", test, &address, "-s", "4000", "-n", "50", "--json", "-F"]);
        assert!(output.status.success(), "{test}: {}", text(&output.stderr));
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let row = &value["results"][0];
        assert_eq!(row["MsgSize"], 4000, "{test}");
        assert_eq!(row["n_iterations"], 50, "{test}");
        let key = if test.ends_with("lat") {
            "t_typical"
        } else {
            "BW_average"
        };
        assert!(row[key].as_f64().unwrap() > 0.0, "{test}: {row}");
        if test.ends_with("lat") {
            let [min, typical, max] = ["t_min", "t_typical", "t_max"].map(|key| row[key].as_f64().unwrap());
            assert!(min <= typical && typical <= max, "{test}: {row}");
        }
    }
}

#[test]
fn perf__prints_the_columns_of_perftest() {
    let _server = Server::perf("write-lat", "127.0.1.20", &[]);
    let output = client(&["perf", "write-lat", "127.0.1.20", "-n", "10"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let columns = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]";
    assert!(text(&output.stdout).contains(columns), "{}", text(&output.stdout));
    let _server = Server::perf("write-bw", "127.0.1.21", &[]);
    let output = client(&[
        "perf",
        "write-bw",
        "127.0.1.21",
        "-n",
        "10",
        "-q",
        "3",
        "-s",
        "64k",
    ]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let columns = " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]";
    assert!(text(&output.stdout).contains(columns), "{}", text(&output.stdout));
    assert!(
        text(&output.stdout).contains(" 65536      30 "),
        "three queue pairs of ten: {}",
        text(&output.stdout)
    );
}

#[test]
fn perf__runs_for_a_duration() {
    let _server = Server::perf("read-bw", "127.0.1.22", &[]);
    let output = client(&["perf", "read-bw", "127.0.1.22", "-s", "1024", "-D", "1", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(value["results"][0]["n_iterations"].as_u64().unwrap() > 0);
}

#[test]
fn perf__all_sizes_go_from_2_bytes_to_8_mib() {
    let _server = Server::perf("write-bw", "127.0.1.23", &["-a"]);
    let output = client(&["perf", "write-bw", "127.0.1.23", "-a", "-n", "5", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let sizes: Vec<u64> = value["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["MsgSize"].as_u64().unwrap())
        .collect();
    assert_eq!(sizes, (1..=23).map(|n| 1 << n).collect::<Vec<u64>>());
}

#[test]
fn perf__without_a_server_is_one_line_and_status_1() {
    // Another process of the address answers that nothing listens on the port; until that process is up, nobody answers.
    let _other = Server::perf("write-lat", "127.0.1.24", &["-p", "18000"]);
    let deadline = Instant::now() + Duration::from_secs(30);
    let output = loop {
        let output = rdmux(&["perf", "write-lat", "127.0.1.24", "-p", "18001", "-n", "10"])
            .output()
            .unwrap();
        if text(&output.stderr).contains("nothing listens") || Instant::now() > deadline {
            break output;
        }
    };
    assert_eq!(output.status.code(), Some(1));
    assert!(
        output.stdout.is_empty() || !text(&output.stdout).contains("usec]\n 2"),
        "no figures"
    );
    assert_eq!(
        text(&output.stderr).lines().count(),
        1,
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn perf__tests_that_differ_are_refused_and_both_sides_say_so() {
    let mut server = Server::perf("write-lat", "127.0.1.25", &[]);
    let output = client(&["perf", "read-lat", "127.0.1.25", "-n", "10"]);
    assert_eq!(output.status.code(), Some(1));
    let why = "the client measures read-lat, the server write-lat: start both with the same test";
    assert!(
        text(&output.stderr).contains(why) && !text(&output.stderr).contains("no server"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(server.0.wait().unwrap().code(), Some(1));
    let mut said = String::new();
    std::io::Read::read_to_string(server.0.stderr.as_mut().unwrap(), &mut said).unwrap();
    assert!(said.contains(why), "{said}");
}

#[test]
fn perf__sleeps_on_events_where_there_are_some() {
    let tests = [
        "read-lat",
        "send-lat",
        "flush-lat",
        "write-bw",
        "read-bw",
        "send-bw",
        "flush-bw",
    ];
    for (i, test) in tests.into_iter().enumerate() {
        let address = format!("127.0.1.{}", 30 + i);
        // The client's option decides for both sides.
        let mut server = Server::perf(test, &address, &[]);
        let output = client(&["perf", test, &address, "-e", "-s", "1k", "-n", "50", "--json"]);
        assert!(output.status.success(), "{test}: {}", text(&output.stderr));
        let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(value["results"][0]["MsgSize"], 1024, "{test}");
        assert_eq!(value["results"][0]["n_iterations"], 50, "{test}");
        assert!(
            server.0.wait().unwrap().success(),
            "{test}: the server sees the end"
        );
    }
    let output = rdmux(&["perf", "write-lat", "127.0.1.40", "-e"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("write-lat does not support -e"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn usage__errors_have_status_2() {
    for args in [
        &["perf"][..],
        &["perf", "write-lat", "--size", "x"],
        &["perf", "write-lat", "--size", "0"],
        &["perf", "write-lat", "--size", "2G"],
        &["perf", "write-lat", "--events"],
        &["sim", "--loss", "90%"],
        &["nothing"],
        &[],
    ] {
        assert_eq!(rdmux(args).output().unwrap().status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn sim__is_a_function_of_its_seed() {
    let run = |seed| {
        let output = rdmux(&[
            "sim",
            "--seed",
            seed,
            "--loss",
            "3%",
            "--dup",
            "1%",
            "--reorder",
            "2",
            "--operations",
            "300",
        ])
        .output()
        .unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    assert_eq!(run("5"), run("5"));
    assert_ne!(run("5"), run("6"));
}

#[test]
fn sim__json_says_what_the_links_did() {
    let output = rdmux(&["sim", "--seed", "9", "--loss", "5%", "--json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["seed"], 9);
    assert!(value["lost"].as_u64().unwrap() > 0);
    assert!(value["violation"].is_null());
}

#[test]
fn perf__misspelt_environment() {
    for (name, takes) in [
        ("RDMUX_SHM", "on or off"),
        ("RDMUX_WAIT", "blocked, interrupted or running"),
    ] {
        let output = rdmux(&["perf", "write-lat"]).env(name, "fast").output().unwrap();
        assert!(!output.status.success());
        let why = text(&output.stderr);
        assert!(
            why.ends_with(&format!("{name}=fast: it takes {takes}\n")),
            "{why}"
        );
        assert_eq!(why.lines().count(), 1, "{why}");
    }
}

/// Kills a server's client in the middle of a test; returns the exit status of the server.
fn end_of_a_server_whose_client_is_killed(shared_memory: &str, addresses: [&str; 2]) -> Option<i32> {
    let mut server = Server::perf_with("write-lat", addresses[0], &[], &[("RDMUX_SHM", shared_memory)]);
    // Returns the next PSN of the client's queue pair, once it is connected, and whether it writes the server's memory without packets.
    let sent = || -> Option<(serde_json::Value, bool)> {
        let output = rdmux(&["res", "show", "qp", "--json"]).output().unwrap();
        let qps: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let qp = qps
            .iter()
            .find(|qp| qp["ifname"] == addresses[1] && qp["state"] == "RTS")?;
        let direct = qp["direct"]["mapped"] == 1 || qp["direct"]["process"] == 1;
        Some((qp["sq-psn"].clone(), direct))
    };
    let deadline = Instant::now() + LONG;
    loop {
        // The client has an address of its own, where no process is left to disconnect in its place.
        let mut busy = rdmux(&["perf", "write-lat", addresses[0], "-n", "100000000"])
            .args(["--bind", addresses[1]])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // The client either ends at once, since nothing listens yet, or is killed in the middle, when it has sent something.
        let mut first = None;
        let mut writes = false;
        while !writes && busy.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "no client writes");
            let seen = sent();
            writes = seen
                .as_ref()
                .is_some_and(|seen| seen.1 || first.as_ref().is_some_and(|first| first != seen));
            first = first.or(seen);
        }
        let _ = busy.kill();
        busy.wait().unwrap();
        if writes {
            break;
        }
    }
    server.0.wait().unwrap().code()
}

#[test]
fn perf__server_ends_when_its_client_is_killed() {
    let code = end_of_a_server_whose_client_is_killed("off", ["127.0.1.26", "127.0.1.126"]);
    assert_eq!(code, Some(1), "its last WRITE is never acknowledged");
}

#[test]
fn perf__server_that_shares_memory_is_told_that_its_client_was_killed() {
    let code = end_of_a_server_whose_client_is_killed("on", ["127.0.1.27", "127.0.1.127"]);
    assert_eq!(code, Some(0), "the connection ends as if the client had ended it");
}

#[test]
fn fault__is_one_syntax_and_one_line_when_wrong() {
    let wrong = [
        (
            ["perf", "read-lat", "--fault", "delay=5"],
            "'delay=5': give a time, or two: delay=5ms, delay=1ms..20ms",
        ),
        (
            ["pull", "rdmux://h/r", "--fault", "lose=1%"],
            "'lose=1%': unknown kind; kinds are loss, dup",
        ),
        (
            ["sim", "--runs=1", "--fault", "rate=1Mbit"],
            "the simulation takes loss, dup, reorder, corrupt and seed",
        ),
        (
            ["sim", "--runs=1", "--fault", "loss=90%"],
            "loss=90%: give 0% to 50%",
        ),
    ];
    for (args, line) in wrong {
        let output = rdmux(&args).output().unwrap();
        let stderr = text(&output.stderr);
        assert!(!output.status.success());
        assert!(stderr.lines().next().unwrap().contains(line), "{stderr}");
    }
    let run = |args: &[&str]| {
        rdmux(&[&["sim", "--operations", "50"], args].concat())
            .output()
            .unwrap()
    };
    let (long, short) = (
        run(&["--fault", "loss=5%,dup=1%,seed=3"]),
        run(&["--loss", "5%", "--dup", "1%", "--seed", "3"]),
    );
    assert!(long.status.success() && !long.stdout.is_empty());
    assert_eq!(long.stdout, short.stdout);
}

#[test]
fn fault__delay_of_one_side_shows_in_its_latency() {
    for shm in ["on", "off"] {
        let environment = [("RDMUX_SHM", shm), ("RDMUX_FAULT", "delay=2ms")];
        let _server = Server::perf_with("read-lat", "127.0.0.1", &["-p", "18577"], &environment);
        let args = [
            "perf",
            "read-lat",
            "127.0.0.1",
            "-p",
            "18577",
            "-n",
            "20",
            "--fault",
            "delay=1ms",
            "--json",
        ];
        let output = client(&args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let typical = found["results"][0]["t_typical"]
            .as_f64()
            .unwrap_or_else(|| panic!("{found:#}"));
        // A round trip passes both ports, twice each: 6 ms. A delay counts from the moment at which a device began to receive the packet's
        // batch, so a few round trips are shorter; without one of the four delays all are, by 1 ms or more.
        assert!(typical >= 5500.0, "{typical} us");
    }
}
