//! Nodes of one user, and programs on them.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Nodes of one user, and what runs on them.
pub(crate) struct Host {
    pub(crate) runtime: TempDir,
    /// The key of nodes that share queue pairs; `None`: they do not.
    key: Option<String>,
    /// The `RDMUX_SHM` of programs.
    shared_memory: &'static str,
    /// Engines of a node.
    pub(crate) engines: u32,
}

/// A child that is killed when the value is dropped.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Returns its stdout, once.
    pub(crate) fn lines(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.0.stdout.take().unwrap())
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// Asks the child to end.
    pub(crate) fn stop(&self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
    }

    /// Waits for the end of the child; returns its status and what it printed to stderr.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        let pidfd = pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty()).unwrap();
        let timeout = LONG.try_into().unwrap();
        let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)).unwrap();
        assert!(ended > 0, "the process does not end");
        let status = self.0.wait().unwrap();
        let mut text = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (status.code(), text)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Descriptors, mappings and kilobytes in memory of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) descriptors: usize,
    pub(crate) mappings: usize,
    pub(crate) resident_kib: usize,
}

impl Held {
    /// Returns what a process has once it has no more descriptors than before, as far as they are a matter of time.
    pub(crate) fn by_at_most(process: &Running, descriptors: usize) -> Held {
        let deadline = Instant::now() + LONG;
        loop {
            let held = Held::by(process);
            if held.descriptors <= descriptors {
                return held;
            }
            assert!(
                Instant::now() < deadline,
                "{held:?}, {descriptors} descriptors before"
            );
        }
    }

    pub(crate) fn by(process: &Running) -> Held {
        let folder = format!("/proc/{}", process.0.id());
        let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}")).unwrap();
        let status = read("status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.unwrap().trim().trim_end_matches(" kB");
        Held {
            descriptors: std::fs::read_dir(format!("{folder}/fd")).unwrap().count(),
            mappings: read("maps").lines().count(),
            resident_kib: kib.parse().unwrap(),
        }
    }
}

impl Host {
    pub(crate) fn new() -> Host {
        Host {
            runtime: tempfile::tempdir().unwrap(),
            key: None,
            shared_memory: "on",
            engines: 1,
        }
    }

    /// Returns one whose nodes share queue pairs.
    pub(crate) fn sharing() -> Host {
        let host = Host::new();
        let path = host.runtime.path().join("key");
        std::fs::write(&path, "5a".repeat(32)).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        Host {
            key: Some(path.to_str().unwrap().to_owned()),
            ..host
        }
    }

    /// Returns the same host, whose nodes reach each other as those of several hosts do.
    pub(crate) fn over_udp(self) -> Host {
        Host {
            shared_memory: "off",
            ..self
        }
    }

    pub(crate) fn rdmux(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .env_remove("RDMUX_PROVIDER")
            .env("RDMUX_SHM", self.shared_memory)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn start(&self, args: &[&str]) -> Running {
        Running(self.rdmux(args).spawn().unwrap())
    }

    /// Starts the node of an address, and returns once it is ready.
    pub(crate) fn node(&self, address: &str) -> Running {
        let engines = self.engines.to_string();
        let mut command = self.rdmux(&["node", "--device", address, "--engines", &engines]);
        if let Some(key) = &self.key {
            command.args(["--share", "--key", key]);
        }
        let mut node = Running(command.spawn().unwrap());
        let mut line = String::new();
        node.lines().read_line(&mut line).unwrap();
        assert!(line.contains("ready"), "{line}");
        node
    }

    /// Starts a server of `rdmux perf` on the node of an address.
    pub(crate) fn server(&self, test: &str, address: &str) -> Running {
        let mut command = self.rdmux(&["perf", test, "--bind", address]);
        Running(command.env("RDMUX_PROVIDER", "shared").spawn().unwrap())
    }

    /// Returns the command of a client on the node of one address with a server on that of another.
    pub(crate) fn client(&self, test: &str, address: &str, server: &str, more: &[&str]) -> Command {
        let args = [&["perf", test, server, "--bind", address, "--json"], more].concat();
        let mut command = self.rdmux(&args);
        command.env("RDMUX_PROVIDER", "shared");
        command
    }

    /// Runs a client, again and again while nothing listens yet.
    pub(crate) fn run_client(&self, test: &str, address: &str, server: &str, more: &[&str]) -> Output {
        let deadline = Instant::now() + LONG;
        loop {
            let output = self.client(test, address, server, more).output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            let early = text.contains("nothing listens") || text.contains("no answer");
            if !early || Instant::now() > deadline {
                return output;
            }
        }
    }

    /// Returns the numbers of queue pairs, regions and protection domains of the device of an address.
    pub(crate) fn objects(&self, address: &str) -> [u64; 3] {
        let output = self.rdmux(&["res", "show", "--json"]).output().unwrap();
        let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let devices = all.as_array().cloned().unwrap_or_default();
        let is_ours = |device: &&Value| {
            let name = device["ifname"].as_str().unwrap_or_default();
            name.split('/').next() == Some(address)
        };
        let device = devices
            .iter()
            .find(is_ours)
            .unwrap_or_else(|| panic!("{address}: {all}"));
        ["qp", "mr", "pd"].map(|kind| device[kind].as_u64().unwrap_or_else(|| panic!("{all}")))
    }

    /// Returns the number of queue pairs of the device of an address that are connected.
    pub(crate) fn connected(&self, address: &str) -> usize {
        let output = self.rdmux(&["res", "show", "qp", "--json"]).output().unwrap();
        let all: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let is_connected = |qp: &&Value| {
            let name = qp["ifname"].as_str().unwrap_or_default();
            name.split('/').next() == Some(address) && qp["state"] == "RTS"
        };
        all.as_array().into_iter().flatten().filter(is_connected).count()
    }

    /// Returns the last of so many frames of `rdmux top`, 50 ms apart.
    pub(crate) fn frame(&self, address: &str, count: &str) -> Value {
        let args = [
            "top",
            "--json",
            "--count",
            count,
            "--interval",
            "0.05",
            "--device",
            address,
        ];
        let output = self.rdmux(&args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        serde_json::from_str(text.lines().last().unwrap_or_default()).unwrap_or_default()
    }

    /// Returns how many connections of applications of a node have sent something within 50 ms.
    pub(crate) fn sending(&self, address: &str) -> usize {
        let frame = self.frame(address, "2");
        let connections = frame["connections"].as_array().into_iter().flatten();
        connections
            .filter(|one| one["requests_per_s"].as_f64() > Some(0.0))
            .count()
    }

    /// Returns the numbers of the applications of a node.
    pub(crate) fn applications(&self, address: &str) -> Vec<u64> {
        let frame = self.frame(address, "1");
        let applications = frame["applications"].as_array();
        let applications = applications.unwrap_or_else(|| panic!("{frame}"));
        applications
            .iter()
            .map(|one| one["id"].as_u64().unwrap_or_else(|| panic!("{frame}")))
            .collect()
    }

    /// Waits until the device of an address has no more objects than these.
    pub(crate) fn wait_for_objects_at_most(&self, address: &str, most: [u64; 3]) {
        let deadline = Instant::now() + LONG;
        loop {
            let objects = self.objects(address);
            if objects.iter().zip(most).all(|(is, most)| *is <= most) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{address} has {objects:?}, more than {most:?}"
            );
        }
    }

    /// Waits until the device of an address has so many objects.
    pub(crate) fn wait_for_objects(&self, address: &str, expected: [u64; 3]) {
        let deadline = Instant::now() + LONG;
        loop {
            let objects = self.objects(address);
            if objects == expected {
                return;
            }
            assert!(Instant::now() < deadline, "{address} has {objects:?}");
        }
    }
}
