//! `rdmux node --config`: tenants of one node, in processes of several users. Only root can be several users; the other tests need one.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::is_alone;
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::{Access, ConnectParams, Device, Options, QpOptions, SendRequest, Status};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, kill_process, pidfd_open, prlimit};
use serde_json::Value;
use skip::skip;
use tempfile::TempDir;

const RDMUX: &str = env!("CARGO_BIN_EXE_rdmux");
const LONG: Duration = Duration::from_secs(60);
/// Variable with the address of the node, in processes that are applications.
const APPLICATION: &str = "RDMUX_TENANTS_APPLICATION";
const HOST_FOLDER: &str = "RDMUX_HOST_FOLDER";
/// The node's user, those of two tenants, and one of none.
const OWNER: u32 = 65_534;
const ONE: u32 = 65_533;
const THREE: u32 = 65_532;
const NONE: u32 = 65_531;

/// Returns a command that runs as another user, or as this one.
fn command_of(user: Option<u32>, program: &Path) -> Command {
    let mut command = match user {
        None => Command::new(program),
        Some(user) => {
            let user = user.to_string();
            let mut command = Command::new("setpriv");
            command
                .args(["--reuid", &user, "--regid", &user, "--clear-groups"])
                .arg(program);
            command
        }
    };
    command
        .current_dir("/")
        .env_remove("RDMUX_PROVIDER")
        .env_remove("XDG_RUNTIME_DIR")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Returns whether other users may run a program; says so when not.
fn others_may_run(program: &Path) -> bool {
    let ran = command_of(Some(NONE), program).arg("--help").output();
    let may = ran.is_ok_and(|output| output.status.success());
    if !may {
        skip(format!("another user may not run {}", program.display()));
    }
    may
}

/// A host: the folder of its nodes, and a configuration.
struct Host {
    folder: TempDir,
}

impl Host {
    fn new() -> Host {
        let folder = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
        let set = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        set(folder.path(), 0o755);
        fs::create_dir(folder.path().join("run")).unwrap();
        set(&folder.path().join("run"), 0o755);
        Host { folder }
    }

    fn run(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("node.toml")
    }

    fn configure(&self, text: &str) {
        fs::write(self.config(), text).unwrap();
        fs::set_permissions(self.config(), fs::Permissions::from_mode(0o644)).unwrap();
    }

    fn rdmux(&self, user: Option<u32>, args: &[&str]) -> Command {
        let mut command = command_of(user, Path::new(RDMUX));
        command.args(args).env(HOST_FOLDER, self.run());
        command
    }

    /// Starts a node with the configuration, and returns once it is ready.
    fn node(&self, user: Option<u32>, address: &str) -> Node {
        self.node_with(user, address, 1)
    }

    /// Does the same, with so many engines.
    fn node_with(&self, user: Option<u32>, address: &str, engines: u32) -> Node {
        let config = self.config();
        let engines = engines.to_string();
        let mut args = vec!["node", "--device", address, "--engines", &engines];
        args.extend(["--config", config.to_str().unwrap()]);
        let mut process = self.rdmux(user, &args).spawn().unwrap();
        let out = BufReader::new(process.stdout.take().unwrap());
        let errors = BufReader::new(process.stderr.take().unwrap());
        let mut node = Node {
            process: Running(process),
            out,
            errors,
        };
        let line = node.line();
        assert!(line.contains("ready for applications"), "{line}{}", node.error());
        node
    }

    /// Starts an application of a user that writes for ever.
    fn application(&self, user: Option<u32>, address: &str) -> Application {
        let counter = tempfile::tempfile().unwrap();
        counter.set_len(8).unwrap();
        let process = command_of(user, &std::env::current_exe().unwrap())
            .args(["--exact", "application", "--nocapture"])
            .env(APPLICATION, address)
            .env(HOST_FOLDER, self.run())
            .stdin(counter.try_clone().unwrap())
            .spawn()
            .unwrap();
        Application {
            process: Running(process),
            counter,
        }
    }

    /// Runs a client of a test that ends before it reaches a server, if it does not get the device.
    fn refused(&self, user: Option<u32>, address: &str) -> String {
        let args = [
            "perf",
            "write-lat",
            address,
            "--bind",
            address,
            "--provider",
            "shared",
        ];
        let output: Output = self.rdmux(user, &args).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(text.lines().count(), 1, "not one line: {text}");
        text
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

struct Node {
    process: Running,
    out: BufReader<ChildStdout>,
    errors: BufReader<ChildStderr>,
}

impl Node {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        line
    }

    fn error(&mut self) -> String {
        let mut line = String::new();
        self.errors.read_line(&mut line).unwrap();
        line
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process.0), signal).unwrap();
    }

    /// Has it read its file again, which it takes.
    fn reload(&mut self) {
        self.signal(Signal::HUP);
        let line = self.line();
        assert!(line.contains("is in force"), "{line}");
    }
}

struct Application {
    process: Running,
    /// Bytes that it has written.
    counter: File,
}

impl Application {
    fn count(&self) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::pread(&self.counter, &mut bytes, 0).unwrap();
        u64::from_ne_bytes(bytes)
    }

    /// Returns the bytes that it has written; it has not ended.
    fn bytes(&mut self) -> u64 {
        if let Some(status) = self.process.0.try_wait().unwrap() {
            panic!("the application has ended: {status}: {}", self.said());
        }
        self.count()
    }

    fn said(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut errors) = self.process.0.stderr.take() {
            errors.read_to_string(&mut text).unwrap();
        }
        text
    }

    /// Waits until it ends; returns what it said.
    fn end(mut self) -> String {
        let pidfd = pidfd_open(Pid::from_child(&self.process.0), PidfdFlags::empty()).unwrap();
        let timeout = LONG.try_into().unwrap();
        let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout)).unwrap();
        assert!(ended > 0, "the application does not end");
        self.said()
    }
}

/// Waits until applications have written so many bytes more together; returns how many each of them has.
fn written<const N: usize>(applications: [&mut Application; N], more: u64) -> [u64; N] {
    let mut applications = applications;
    let mut now = || applications.each_mut().map(|application| application.bytes());
    let before = now();
    let deadline = Instant::now() + LONG;
    loop {
        let bytes = now();
        let parts: [u64; N] = std::array::from_fn(|at| bytes[at] - before[at]);
        if parts.iter().sum::<u64>() >= more {
            return parts;
        }
        assert!(Instant::now() < deadline, "{parts:?} of {more} bytes");
        std::thread::yield_now();
    }
}

#[track_caller]
fn assert_share(parts: [u64; 2], expected: f64) {
    let ratio = parts[1] as f64 / parts[0] as f64;
    let allowed = expected * 0.9..expected * 1.1;
    assert!(allowed.contains(&ratio), "{parts:?}: {ratio}, not {expected}");
}

/// The part of a process that is an application; nothing in a run of the tests.
#[test]
fn application() {
    const MESSAGE: u64 = 64 << 10;
    // So many that something waits in the node also when this process has not had a CPU for some time.
    const REQUESTS: u32 = 128;
    let Ok(address) = std::env::var(APPLICATION) else {
        return;
    };
    let address: IpAddr = address.parse().unwrap();
    rdmux_share::register();
    let options = Options {
        provider: Some("shared"),
        ..Options::default()
    };
    let device = Device::open_with(address, options).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(256).unwrap();
    let options = QpOptions {
        max_send_wr: REQUESTS,
        ..QpOptions::new(&cq)
    };
    let [client, server] = [(); 2].map(|()| pd.create_qp(&options).unwrap());
    let memory = Arc::new(AnonymousMemory::shareable(2 * MESSAGE as usize).unwrap());
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = pd.reg_mr_all(memory.clone(), memory.address(), access).unwrap();
    for qp in [&client, &server] {
        qp.init().unwrap();
    }
    // Each application of the node has one of its own.
    let port = 7000 + (std::process::id() % 50_000) as u16;
    let listener = device.listen(port).unwrap();
    let params = ConnectParams::default();
    let _connections = std::thread::scope(|scope| {
        let accepted = scope.spawn(|| {
            listener
                .accept(LONG)
                .unwrap()
                .accept(&server, &params, b"")
                .unwrap()
        });
        let connected = device.connect(&client, SocketAddr::new(address, port), &params, b"");
        (connected.unwrap(), accepted.join().unwrap())
    });
    let post = |client: &rdmux_verbs::QueuePair| {
        let (from, to) = (
            region.slice(0..MESSAGE).unwrap(),
            region.remote(MESSAGE..2 * MESSAGE).unwrap(),
        );
        client.post_send(SendRequest::write(from, to).signaled()).unwrap();
    };
    (0..REQUESTS).for_each(|_| post(&client));
    let mut written: u64 = 0;
    let counter = std::io::stdin();
    loop {
        let completion = cq.wait(LONG).unwrap().expect("a completion");
        assert_eq!(completion.status, Status::Success);
        written += MESSAGE;
        rustix::io::pwrite(counter.as_fd(), &written.to_ne_bytes(), 0).unwrap();
        post(&client);
    }
}

#[test]
fn reload__share_of_users_changes_while_they_write() {
    if is_alone("reload__share_of_users_changes_while_they_write", |why| skip(why)) {
        shares_of_users("127.0.42.1", 1);
    }
}

/// Each of the two applications has an engine and a scheduler of its own.
#[test]
fn reload__share_of_users_on_two_engines() {
    if is_alone("reload__share_of_users_on_two_engines", |why| skip(why)) {
        shares_of_users("127.0.42.6", 2);
    }
}

fn shares_of_users(address: &str, engines: u32) {
    const MORE: u64 = 48 << 20;
    if !others_may_run(Path::new(RDMUX)) || !others_may_run(&std::env::current_exe().unwrap()) {
        return;
    }
    let host = Host::new();
    // As a service manager does for the node's user.
    let folder = host.run().join(address);
    fs::create_dir(&folder).unwrap();
    chown(&folder, Some(OWNER), Some(OWNER)).unwrap();
    // So low that the node, and not the CPUs, decides who sends.
    let weights = |one: u32, three: u32| {
        format!(
            "rate = \"200Mbit\"\n[tenant.one]\nuid = [{ONE}]\nweight = {one}\n[tenant.three]\nuid = [{THREE}]\nweight = {three}\n"
        )
    };
    host.configure(&weights(1, 3));
    let mut node = host.node_with(Some(OWNER), address, engines);

    let refused = host.refused(Some(NONE), address);
    let expected = format!("the node of {address} refuses this process: this process, of uid {NONE}");
    assert!(refused.contains(&expected), "{refused}");
    assert!(
        refused.contains("is in none of its tenants, and it refuses others"),
        "{refused}"
    );

    let [mut one, mut three] = [ONE, THREE].map(|user| host.application(Some(user), address));
    written([&mut one], 1);
    written([&mut three], 1);
    assert_share(written([&mut one, &mut three], MORE), 3.0);

    host.configure(&weights(1, 1));
    node.reload();
    assert_share(written([&mut one, &mut three], MORE), 1.0);

    // A wrong file changes nothing, and the node says so in one line.
    host.configure(&format!("{}\nwieght = 7", weights(5, 1)));
    node.signal(Signal::HUP);
    let error = node.error();
    assert!(
        error.contains("is not in force, the tenants stay as they were"),
        "{error}"
    );
    assert!(
        error.contains(":9: no key wieght in [tenant.three]: did you mean weight?"),
        "{error}"
    );
    assert_share(written([&mut one, &mut three], MORE), 1.0);

    host.configure(&weights(2, 1));
    node.reload();
    assert_share(written([&mut three, &mut one], MORE), 2.0);

    // An application goes with its tenant; the other one has all that there is.
    host.configure(&format!("rate = \"200Mbit\"\n[tenant.one]\nuid = [{ONE}]\n"));
    node.reload();
    let said = three.end();
    assert!(said.contains("panicked"), "{said}");
    written([&mut one], MORE);
    node.signal(Signal::TERM);
    assert!(node.process.0.wait().unwrap().success());
    one.end();
}

/// Returns the control group of this process, which those that it starts have too.
fn own_cgroup() -> Option<String> {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap();
    let of = |beginning| text.lines().find_map(|line| line.split_once(beginning));
    let (_, path) = of("0::").or_else(|| of(":name=systemd:"))?;
    Some(path.to_owned())
}

#[test]
fn node__tenant_of_a_control_group() {
    const ADDRESS: &str = "127.0.42.2";
    let Some(cgroup) = own_cgroup() else {
        return skip("no control groups");
    };
    let host = Host::new();
    let uid = rustix::process::geteuid().as_raw();
    host.configure(&format!(
        "[tenant.user]\nuid = [{uid}]\n[tenant.group]\ncgroup = [\"{cgroup}\"]\nlimits.applications = 0\n"
    ));
    let config = host.config();
    let args = ["node", "--device", ADDRESS, "--config", config.to_str().unwrap()];
    if host_lacks_peer_groups() {
        let output = host.rdmux(None, &args).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            text.contains("tenants with cgroup need Linux 6.5 or later"),
            "{text}"
        );
        return skip("the kernel has no SO_PEERPIDFD");
    }
    let mut node = host.node(None, ADDRESS);
    assert!(host.run().join(ADDRESS).is_dir(), "a node for the host");
    // The control group comes before the user.
    let refused = host.refused(None, ADDRESS);
    let expected = format!(
        "the tenant group has 0 of at most 0 applications: raise limits.applications in [tenant.group] of {}",
        config.display()
    );
    assert!(refused.contains(&expected), "{refused}");
    host.configure(&format!(
        "[tenant.user]\nuid = [{uid}]\nlimits.regions = 0\n[tenant.group]\ncgroup = [\"/no/such\"]\n"
    ));
    node.reload();
    let refused = host.refused(None, ADDRESS);
    let expected = "the tenant user has 0 of at most 0 memory regions: raise limits.regions in [tenant.user]";
    assert!(refused.contains(expected), "{refused}");
    // A second one for the host, and one that would need another place.
    let second = host.rdmux(None, &args).output().unwrap();
    let text = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        text.contains("a node for the host serves 127.0.42.2 already"),
        "{text}"
    );
    host.configure("");
    node.signal(Signal::HUP);
    let error = node.error();
    assert!(
        error.contains("it names no other user than the node's"),
        "{error}"
    );
}

#[test]
fn node__without_a_descriptor_for_one_more() {
    const ADDRESS: &str = "127.0.42.5";
    const LIMIT: u64 = 128;
    let host = Host::new();
    // So that its applications leave the CPUs to others.
    host.configure("rate = \"50Mbit\"\n[default]");
    let mut node = host.node(None, ADDRESS);
    let pid = Pid::from_child(&node.process.0);
    let limit = Rlimit {
        current: Some(LIMIT),
        maximum: Some(LIMIT),
    };
    prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    let mut served = Vec::new();
    let refused = loop {
        assert!(served.len() < LIMIT as usize, "the limit limits nothing");
        let mut application = host.application(None, ADDRESS);
        let deadline = Instant::now() + LONG;
        while application.process.0.try_wait().unwrap().is_none() && application.count() == 0 {
            assert!(
                Instant::now() < deadline,
                "an application neither begins nor ends"
            );
            std::thread::yield_now();
        }
        match application.count() {
            0 => break application.said(),
            _ => served.push(application),
        }
    };
    assert!(refused.contains("open files"), "{refused}");
    // Those that are there go on, and there is room again when one has gone.
    assert!(served.len() > 1, "{refused}");
    served.pop();
    let mut first = served.swap_remove(0);
    written([&mut first], 1 << 20);
    served.clear();
    written([&mut host.application(None, ADDRESS)], 1);
    node.signal(Signal::TERM);
    assert!(node.process.0.wait().unwrap().success());
}

fn host_lacks_peer_groups() -> bool {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (one, _other) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
    matches!(rdmux_verbs::provider::user::peer_pidfd(&one), Ok(None))
}

#[test]
fn node__folder_that_another_may_change() {
    let host = Host::new();
    host.configure("[default]");
    let config = host.config();
    let args = [
        "node",
        "--device",
        "127.0.42.3",
        "--config",
        config.to_str().unwrap(),
    ];
    fs::set_permissions(host.run(), fs::Permissions::from_mode(0o777)).unwrap();
    let output = host.rdmux(None, &args).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("has to own it, and nobody else may write there"),
        "{text}"
    );
    // Neither does an application trust it.
    let refused = host.refused(None, "127.0.42.3");
    assert!(
        refused.contains("has to own it, and nobody else may write there"),
        "{refused}"
    );
}

#[test]
fn check__each_error_is_a_line_and_the_status_is_1() {
    let host = Host::new();
    host.configure("rate = 1\n[tenant.a]\nweight = 0\nuid = [1]\n[tenant.b]\nuid = [1]\n");
    let config = host.config();
    let config = config.to_str().unwrap();
    let output = host.rdmux(None, &["node", "check", config]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    for (line, number) in lines.iter().zip([1, 3, 6]) {
        assert!(line.starts_with(&format!("rdmux: {config}:{number}: ")), "{line}");
    }
    let output = host
        .rdmux(None, &["node", "check", config, "--json"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let numbers: Vec<u64> = value["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|error| error["line"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [1, 3, 6]);

    host.configure("rate = \"1Gbit\"\n[tenant.a]\nuid = [1]\nrate = \"2Gbit\"");
    let output = host.rdmux(None, &["node", "check", config]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "a warning is no error");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.starts_with(&format!("rdmux: warning: {config}:1: ")),
        "{text}"
    );
    let output = host
        .rdmux(None, &["node", "check", "/nonexistent"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    // A node does not start with a wrong file.
    host.configure("rate = 1\nrates = 2");
    let output = host
        .rdmux(None, &["node", "--device", "127.0.42.4", "--config", config])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("(1 more: `rdmux node check "), "{text}");
}
