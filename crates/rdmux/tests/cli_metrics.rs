//! `--metrics`: metrics that a scraper gets from running commands, checked by a strict reader of the format, and by promtool where it is
//! installed.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
mod dsm_node;
#[path = "../../skip.rs"]
mod skip;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use common::nodes::Host;
use skip::skip;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(60);

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

fn ok(home: &TempDir, args: &[&str]) -> Output {
    let output = rdmux(home, args).output().unwrap();
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Returns the path of a file to pull into.
fn into(home: &TempDir) -> String {
    home.path().join("pulled").to_str().unwrap().to_owned()
}

/// A child that is killed when the value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A command that offers metrics.
struct Measured {
    child: Running,
    /// `ADDR:PORT`.
    at: String,
    errors: mpsc::Receiver<String>,
}

impl Measured {
    /// Starts the command and waits until it has printed the address of its metrics.
    fn start(mut command: Command) -> Measured {
        command.args(["--metrics", "127.0.0.1:0"]);
        Measured::of(command)
    }

    /// Does so with a command that has the option.
    fn of(mut command: Command) -> Measured {
        let mut child = Running(command.spawn().unwrap());
        let (tx, errors) = mpsc::channel();
        let stderr = child.0.stderr.take().unwrap();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = tx.send(line);
            }
        });
        let mut before = Vec::new();
        loop {
            let line = errors
                .recv_timeout(LONG)
                .unwrap_or_else(|why| panic!("{why}: {before:?}"));
            if let Some(url) = line.strip_prefix("rdmux: metrics at http://") {
                let at = url.strip_suffix("/metrics").unwrap().to_owned();
                return Measured { child, at, errors };
            }
            before.push(line);
        }
    }

    fn serve(home: &TempDir, args: &[&str]) -> Measured {
        let mut serving = Measured::start(rdmux(home, &[&["serve", "--json"], args].concat()));
        let mut line = String::new();
        let mut out = BufReader::new(serving.child.0.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        let errors: Vec<String> = serving.errors.try_iter().collect();
        assert!(line.starts_with('{'), "{line:?} {errors:?}");
        serving
    }

    fn text(&self) -> String {
        let mut stream = TcpStream::connect(&self.at).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(
            head.contains("\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
            "{head}"
        );
        assert!(
            head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())),
            "{head}"
        );
        body.to_owned()
    }

    fn scrape(&self) -> Exposition {
        Exposition::read(&self.text())
    }
}

/// Names and values of a series' labels.
type Labels = Vec<(String, String)>;

/// Metrics in the text format, read strictly: each line conforms to the format, each family appears once and in one piece, no series
/// appears twice, and histograms add up.
#[derive(Default)]
struct Exposition {
    /// Type of each family.
    families: BTreeMap<String, String>,
    /// Value of each series: name and labels as written.
    samples: BTreeMap<String, f64>,
}

fn is_name(name: &str) -> bool {
    let rest = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(rest)
}

/// Parses the labels between braces.
fn labels(text: &str) -> Labels {
    let mut found = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (name, value) = rest.split_once("=\"").expect("a label's value is in quotes");
        assert!(is_name(name), "{text}");
        let mut end = None;
        let mut escaped = false;
        for (at, c) in value.char_indices() {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => {
                    end = Some(at);
                    break;
                }
                _ => {}
            }
        }
        let end = end.expect("a quote that ends it");
        found.push((name.to_owned(), value[..end].to_owned()));
        rest = &value[end + 1..];
        if let Some(after) = rest.strip_prefix(',') {
            assert!(!after.is_empty(), "{text}");
            rest = after;
        } else {
            assert!(rest.is_empty(), "{text}");
        }
    }
    let names: HashSet<&String> = found.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), found.len(), "a label twice: {text}");
    found
}

impl Exposition {
    fn read(text: &str) -> Exposition {
        assert!(text.ends_with('\n'));
        let mut read = Exposition::default();
        let (mut family, mut helped) = (String::new(), String::new());
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                assert!(is_name(name) && !help.is_empty(), "{line}");
                helped = name.to_owned();
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert_eq!(name, helped, "its help stands before it");
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                let before = read.families.insert(name.to_owned(), kind.to_owned());
                assert_eq!(before, None, "twice: {line}");
                family = name.to_owned();
            } else {
                read.sample(line, &family);
            }
        }
        read.check_histograms();
        read
    }

    fn sample(&mut self, line: &str, family: &str) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let name = match series.split_once('{') {
            Some((name, rest)) => {
                labels(rest.strip_suffix('}').unwrap());
                name
            }
            None => series,
        };
        let suffix = name
            .strip_prefix(family)
            .unwrap_or_else(|| panic!("{line} is none of {family}"));
        let suffixes: &[&str] = match self.families[family].as_str() {
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        assert!(suffixes.contains(&suffix), "{line}");
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(value >= 0.0 && value.is_finite(), "{line}");
        assert_eq!(
            self.samples.insert(series.to_owned(), value),
            None,
            "twice: {line}"
        );
    }

    fn check_histograms(&self) {
        for (family, _) in self.families.iter().filter(|(_, kind)| *kind == "histogram") {
            let mut buckets: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
            for (series, n) in &self.samples {
                if let Some(rest) = series.strip_prefix(&format!("{family}_bucket{{")) {
                    let mut labels = labels(rest.strip_suffix('}').unwrap());
                    let (name, le) = labels.pop().unwrap();
                    assert_eq!(name, "le");
                    let bound = if le == "+Inf" {
                        f64::INFINITY
                    } else {
                        le.parse().unwrap()
                    };
                    buckets.entry(labels).or_default().push((bound, *n));
                }
            }
            for (labels, mut buckets) in buckets {
                buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
                assert!(
                    buckets.windows(2).all(|two| two[0].1 <= two[1].1),
                    "{family} {labels:?}"
                );
                let labels: Vec<String> = labels
                    .iter()
                    .map(|(name, value)| format!("{name}=\"{value}\""))
                    .collect();
                let of = |suffix: &str| match labels.join(",") {
                    none if none.is_empty() => format!("{family}{suffix}"),
                    labels => format!("{family}{suffix}{{{labels}}}"),
                };
                let (bound, all) = *buckets.last().unwrap();
                assert_eq!(
                    (bound, Some(&all)),
                    (f64::INFINITY, self.samples.get(&of("_count"))),
                    "{family}"
                );
                assert!(self.samples.contains_key(&of("_sum")), "{family}");
            }
        }
    }

    /// Returns the sum of all series of a name whose labels hold these words.
    fn sum(&self, name: &str, with: &str) -> f64 {
        let of = |series: &str| series.split('{').next() == Some(name) && series.contains(with);
        let found: Vec<f64> = self
            .samples
            .iter()
            .filter(|(s, _)| of(s))
            .map(|(_, v)| *v)
            .collect();
        assert!(
            !found.is_empty(),
            "no {name} with {with}: {:?}",
            self.samples.keys()
        );
        found.iter().sum()
    }
}

#[test]
fn node() {
    dsm_node::run();
}

#[test]
fn dsm_run__counts_of_its_nodes() {
    let home = tempfile::tempdir().unwrap();
    let of_nodes = [
        "dsm",
        "run",
        "-n",
        "2",
        "--device",
        "127.0.20.11",
        "--metrics",
        "127.0.0.1:0",
        "--",
    ];
    let mut command = rdmux(&home, &of_nodes);
    command.args(dsm_node::command(rdmux_dsm::Consistency::Sequential));
    let mut serving = Measured::of(command);
    let out = BufReader::new(serving.child.0.stdout.take().unwrap());
    let mut lines = out.lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("READY ")));
    let deadline = Instant::now() + LONG;
    let text = loop {
        let text = serving.text();
        // Node 1 may not have left its last barrier yet.
        if Exposition::read(&text).sum("rdmux_dsm_barrier_waits_total", "") == 4.0 {
            break text;
        }
        assert!(Instant::now() < deadline, "{text}");
    };
    let found = Exposition::read(&text);
    for node in ["node=\"0\"", "node=\"1\""] {
        assert!(found.sum("rdmux_dsm_stage_1_events_total", node) > 0.0, "{text}");
        assert!(
            found.sum("rdmux_dsm_barrier_wait_seconds_total", node) > 0.0,
            "{text}"
        );
        assert_eq!(found.sum("rdmux_dsm_region_bytes", node), 65536.0);
    }
    let fetched = "node=\"1\",region=\"0\"";
    assert_eq!(found.sum("rdmux_dsm_read_faults_total", fetched), 1.0);
    assert_eq!(found.sum("rdmux_dsm_fetched_bytes_total", fetched), 4096.0);
    let fetched = "node=\"1\",peer=\"0\"";
    assert_eq!(found.sum("rdmux_dsm_peer_fetches_total", fetched), 1.0);
    // Anybody who reaches the address may read it.
    assert!(!text.contains("127.0.20.11"), "{text}");
}

#[test]
fn serve__counts_what_clients_do() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("a-secret-path");
    fs::write(&file, [7; 100_000]).unwrap();
    let served = home.path().join("a-secret-file");
    let region = format!("{},size=1M,name=a-secret-region", served.display());
    let serving = Measured::serve(&home, &["--listen", "127.0.20.1", "--file", &region]);
    let before = serving.scrape();
    assert_eq!(before.sum("rdmux_push_connections", ""), 0.0);
    let url = "rdmux://127.0.20.1/a-secret-region";
    let from = file.to_str().unwrap();
    ok(&home, &["push", from, url, "--from", "127.0.21.1"]);
    let text = serving.text();
    let after = Exposition::read(&text);

    for name in ["rdmux_push_clients_total", "rdmux_push_mapped_total"] {
        assert_eq!((before.sum(name, ""), after.sum(name, "")), (0.0, 1.0), "{name}");
    }
    let took = "rdmux_push_request_duration_seconds";
    assert_eq!(after.sum(&format!("{took}_count"), "request=\"map\""), 1.0);
    let seconds = after.sum(&format!("{took}_sum"), "request=\"map\"");
    assert!(seconds > 0.0 && seconds < LONG.as_secs_f64(), "{seconds}");
    let labels = "device=\"127.0.20.1\",port=\"";
    for name in [
        "rdmux_port_packets_received_total",
        "rdmux_port_packets_transmitted_total",
        "rdmux_port_data_received_bytes_total",
        "rdmux_port_data_transmitted_bytes_total",
        "rdmux_cq_events_total",
        "rdmux_cq_completions_total",
    ] {
        let (before, after) = (before.sum(name, labels), after.sum(name, labels));
        assert!(before < after, "{name}: {before} {after}");
    }
    assert_eq!(after.sum("rdmux_state_id", labels), 4.0);
    assert_eq!(after.sum("rdmux_info", "hca_type=\"rdmux\""), 1.0);
    // Anybody who reaches the address may read it: it holds nothing but figures.
    for secret in ["secret", "127.0.21.1", home.path().to_str().unwrap()] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    // Counters never decrease.
    for (series, value) in &before.samples {
        let kind = &before.families.get(series.split('{').next().unwrap());
        if kind.is_some_and(|kind| kind == "counter") {
            assert!(after.samples[series] >= *value, "{series}");
        }
    }
}

#[test]
fn serve__says_which_clients_were_refused() {
    let home = tempfile::tempdir().unwrap();
    let serving = Measured::serve(&home, &["--listen", "127.0.20.2", "--mem", "m,size=64K"]);
    let other = tempfile::tempdir().unwrap();
    let output = rdmux(&other, &["pull", "rdmux://127.0.20.2/m", &into(&other)])
        .output()
        .unwrap();
    assert!(!output.status.success());
    // The connection ends by itself, a moment after the client.
    let deadline = Instant::now() + LONG;
    loop {
        let metrics = serving.scrape();
        assert_eq!(metrics.sum("rdmux_push_clients_total", ""), 0.0);
        if metrics.sum("rdmux_push_ended_connections_total", "") == 1.0 {
            assert_eq!(metrics.sum("rdmux_push_connections", ""), 0.0);
            break;
        }
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn perf__shows_latencies_while_it_runs() {
    let home = tempfile::tempdir().unwrap();
    let serve = ["perf", "write-lat", "--bind", "127.0.20.3"];
    let server = Running(rdmux(&home, &serve).spawn().unwrap());
    let deadline = Instant::now() + LONG;
    // A client that starts before its server listens ends at once; the next one tries again.
    let (client, metrics) = 'found: loop {
        assert!(Instant::now() < deadline);
        let args = [
            "perf",
            "write-lat",
            "127.0.20.3",
            "--bind",
            "127.0.21.3",
            "-D",
            "30",
        ];
        let mut command = rdmux(&home, &args);
        command.env("RDMUX_SHM", "off");
        let mut client = Measured::start(command);
        while client.child.0.try_wait().unwrap().is_none() && Instant::now() < deadline {
            let metrics = client.scrape();
            let count = "rdmux_wr_latency_seconds_count";
            let written =
                |series: &&String| series.starts_with(count) && series.contains("operation=\"write\"");
            if metrics.samples.keys().any(|series| written(&series)) && metrics.sum(count, "\"write\"") > 10.0
            {
                break 'found (client, metrics);
            }
        }
    };
    drop((client, server));
    let (n, seconds) = (
        metrics.sum("rdmux_wr_latency_seconds_count", "\"write\""),
        metrics.sum("rdmux_wr_latency_seconds_sum", "\"write\""),
    );
    assert!(seconds / n > 1e-7 && seconds / n < 1.0, "{seconds} {n}");
}

#[test]
fn node__shows_each_tenant() {
    const ADDRESS: &str = "127.0.20.8";
    let host = Host::new();
    let file = host.runtime.path().join("tenants.toml");
    let uid = rustix::process::getuid().as_raw();
    let text = format!("[tenant.mine]\nuid = [{uid}]\nrate = \"1Gbit\"\nceiling = \"80Gbit\"\n");
    fs::write(&file, text).unwrap();
    let config = file.to_str().unwrap();
    let mut node = Measured::start(host.rdmux(&["node", "--device", ADDRESS, "--config", config]));
    let mut line = String::new();
    let mut out = BufReader::new(node.child.0.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    assert!(line.contains("ready"), "{line}");
    let before = node.scrape();
    let tenant = "tenant=\"mine\"";
    assert_eq!(before.sum("rdmux_node_tenant_applications", tenant), 0.0);
    let server = host.server("write-lat", ADDRESS);
    let ran = host.run_client("write-lat", ADDRESS, ADDRESS, &["-n", "1000", "-s", "64"]);
    assert!(ran.status.success(), "{ran:?}");
    server.end();
    // Both sides write, and those that have ended count too. A snapshot is passed on for a while.
    let deadline = Instant::now() + LONG;
    let (text, after) = loop {
        let text = node.text();
        let after = Exposition::read(&text);
        let moved = |name: &str| after.sum(name, tenant) - before.sum(name, tenant);
        if moved("rdmux_node_tenant_requests_total") >= 2000.0
            && moved("rdmux_node_tenant_bytes_total") >= 2000.0 * 64.0
            && moved("rdmux_node_tenant_request_latency_seconds_count") > 0.0
        {
            break (text, after);
        }
        assert!(Instant::now() < deadline, "{text}");
    };
    for (name, value) in [
        ("rate_bytes_per_second", 1.25e8),
        ("ceiling_bytes_per_second", 1e10),
        ("weight", 1.0),
    ] {
        assert_eq!(after.sum(&format!("rdmux_node_tenant_{name}"), tenant), value);
    }
    assert!(!text.contains("rdmux_node_shared"), "{text}");
}

#[test]
fn nvme_target__counts_what_hosts_do() {
    let home = tempfile::tempdir().unwrap();
    let nqn = "nqn.2014-08.org.example:secret";
    let target = [
        "nvme",
        "target",
        "--ns",
        "mem:1M",
        "--nqn",
        nqn,
        "--listen",
        "tcp:127.0.20.7",
        "--allow-any-host",
        "--json",
    ];
    let mut serving = Measured::start(rdmux(&home, &target));
    let mut out = BufReader::new(serving.child.0.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    let url = format!("nvme+tcp://127.0.20.7/{nqn}");
    let file = home.path().join("data");
    fs::write(&file, [7; 8192]).unwrap();
    ok(&home, &["nvme", "write", &url, file.to_str().unwrap()]);
    ok(&home, &["nvme", "read", &url, "--length", "4096"]);
    let text = serving.text();
    let metrics = Exposition::read(&text);
    assert_eq!(
        metrics.sum("rdmux_nvme_bytes_total", "operation=\"write\""),
        8192.0
    );
    assert_eq!(
        metrics.sum("rdmux_nvme_bytes_total", "operation=\"read\""),
        4096.0
    );
    assert!(metrics.sum("rdmux_nvme_commands_total", "") >= 2.0);
    assert_eq!(metrics.sum("rdmux_nvme_namespaces", ""), 1.0);
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn log__shows_what_its_writer_does() {
    let home = tempfile::tempdir().unwrap();
    let _serving = Measured::serve(&home, &["--listen", "127.0.20.8", "--mem", "l,size=1M"]);
    let mut command = rdmux(
        &home,
        &["log", "append", "rdmux://127.0.20.8/l", "--from", "127.0.21.8"],
    );
    command.stdin(Stdio::piped());
    let mut writing = Measured::start(command);
    let mut input = writing.child.0.stdin.take().unwrap();
    writeln!(input, "a record").unwrap();
    let mut acknowledged = String::new();
    let mut out = BufReader::new(writing.child.0.stdout.take().unwrap());
    out.read_line(&mut acknowledged).unwrap();
    assert_eq!(acknowledged, "1\n");
    let metrics = writing.scrape();
    let device = "device=\"127.0.21.8\"";
    assert!(metrics.sum("rdmux_queue_pairs", device) >= 1.0);
    assert!(metrics.sum("rdmux_port_packets_transmitted_total", device) > 0.0);
    drop(input);
}

#[test]
fn serve__is_not_held_up_by_clients_of_its_metrics() {
    let home = tempfile::tempdir().unwrap();
    let serving = Measured::serve(&home, &["--listen", "127.0.20.4", "--mem", "m,size=64K"]);
    let descriptors = || {
        fs::read_dir(format!("/proc/{}/fd", serving.child.0.id()))
            .unwrap()
            .count()
    };
    let before = descriptors();
    let slow: Vec<TcpStream> = (0..300)
        .map(|_| {
            let mut stream = TcpStream::connect(&serving.at).unwrap();
            // A connection that the server has already closed takes nothing.
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ");
            stream
        })
        .collect();
    serving.scrape();
    assert!(descriptors() <= before + 16, "{before} {}", descriptors());
    ok(&home, &["pull", "rdmux://127.0.20.4/m", &into(&home)]);
    drop(slow);
    serving.scrape();
}

#[test]
fn metrics__an_address_that_is_taken_is_said() {
    let home = tempfile::tempdir().unwrap();
    let serving = Measured::serve(&home, &["--listen", "127.0.20.5", "--mem", "m,size=64K"]);
    let args = [
        "serve",
        "--mem",
        "m,size=64K",
        "--listen",
        "127.0.20.6",
        "--metrics",
        &serving.at,
    ];
    let output = rdmux(&home, &args).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let expected = format!(
        "rdmux: cannot serve metrics at {} (choose another port with --metrics ADDR:PORT): Address already in use (os error 98)\n",
        serving.at
    );
    assert_eq!(said, expected);
}

#[test]
fn promtool__finds_nothing_to_say() {
    let promtool = std::env::var("RDMUX_PROMTOOL").unwrap_or_else(|_| "promtool".into());
    if Command::new(&promtool).arg("--version").output().is_err() {
        return skip("there is no promtool (Debian's package prometheus has it)");
    }
    let home = tempfile::tempdir().unwrap();
    let args = [
        "--listen",
        "127.0.20.7",
        "--mem",
        "m,size=64K",
        "--fault",
        "dup=1%",
    ];
    let serving = Measured::serve(&home, &args);
    ok(&home, &["pull", "rdmux://127.0.20.7/m", &into(&home)]);
    let mut checking = Command::new(&promtool);
    let checking = checking
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = checking.stderr(Stdio::piped()).spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(serving.text().as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success() && said.is_empty(), "{said}");
}
