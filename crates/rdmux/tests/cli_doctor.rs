//! `rdmux doctor` on a folder that stands for a host, and on this host.
#![allow(non_snake_case, reason = "tests are named function__case")]

#[path = "../../skip.rs"]
mod skip;

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output};

use serde_json::Value;
use skip::skip;

struct Host(tempfile::TempDir);

impl Host {
    /// Makes a host where nothing stands in the way.
    fn well() -> Host {
        let host = Host(tempfile::tempdir().unwrap());
        for (file, text) in [
            (
                "proc/cpuinfo",
                "processor\t: 0\nflags\t\t: fpu clflush pclmulqdq clflushopt clwb\n",
            ),
            (
                "proc/self/limits",
                "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  8388608  8388608  bytes\n",
            ),
            ("proc/self/status", "Name:\trdmux\nUid:\t1000\t1000\t1000\t1000\n"),
            ("proc/meminfo", "MemTotal: 1 kB\nHugePages_Total:       3\n"),
            ("proc/net/udp", UDP_TITLE),
            ("proc/sys/kernel/osrelease", "6.1.0-rc1\n"),
            ("proc/sys/net/core/rmem_max", "16777216\n"),
            ("proc/sys/user/max_user_namespaces", "15000\n"),
            ("proc/sys/kernel/io_uring_disabled", "2\n"),
            ("proc/sys/vm/unprivileged_userfaultfd", "1\n"),
            (
                "sys/kernel/mm/transparent_hugepage/enabled",
                "always [madvise] never\n",
            ),
            ("sys/class/net/lo/operstate", "unknown\n"),
            ("sys/class/net/lo/mtu", "65536\n"),
            ("sys/class/net/eth1/operstate", "down\n"),
            ("sys/class/net/eth1/mtu", "200\n"),
        ] {
            host.write(file, text);
        }
        host
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.0.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn doctor(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_rdmux"))
            .arg("doctor")
            .args(args)
            .arg("--root")
            .arg(self.0.path())
            .output()
            .unwrap()
    }

    /// Returns the findings of one check, as verdicts and as lines of text.
    fn check(&self, name: &str) -> (Vec<String>, String) {
        let json = self.doctor(&[name, "--json"]);
        let list: Vec<Value> = serde_json::from_slice(&json.stdout).unwrap();
        assert!(list.iter().all(|finding| finding["check"] == *name), "{list:?}");
        let verdicts = list
            .iter()
            .map(|finding| finding["verdict"].as_str().unwrap().to_owned())
            .collect();
        (verdicts, String::from_utf8(self.doctor(&[name]).stdout).unwrap())
    }
}

const UDP_TITLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n";

fn udp(address: &str, uid: u32, inode: u64) -> String {
    format!(
        "{UDP_TITLE}  1: {address}:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000 {uid:>5} 0 {inode} 2 0 0\n"
    )
}

#[test]
fn doctor__nothing_in_the_way() {
    let output = Host::well().doctor(&[]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let expected = "\
check        subject   verdict  what
cpu          -         ok       clwb for persistent memory, pclmulqdq for checksums
idle         -         ok       idle CPUs wake up at once
port         4791      ok       UDP port 4791 is free
mtu          lo        ok       MTU 65536 carries path MTU 4096
gso          -         ok       Linux 6.1.0-rc1 has UDP GSO and GRO
buffers      rmem_max  ok       receive buffers of 16 MiB
memlock      -         ok       8 MiB; rdmux needs none: its soft RNIC locks no memory
hugepages    -         ok       transparent huge pages: madvise
userns       -         ok       an ordinary user can create them
ptrace       -         ok       processes of one user can access each other's private memory by process_vm calls
io_uring     -         ok       switched off; rdmux does not rely on it
userfaultfd  -         ok       peers on this host can map the memory of unmodified programs
dsm          thread    ok       a service thread answers faults, and those of system calls; used without --faults
dsm          inline    ok       the thread that faults answers it, in a handler of SIGBUS
dsm          mprotect  ok       the thread that faults answers it by mprotect(2), in a handler of SIGSEGV
rnic         -         ok       none: rdmux uses its soft RNIC
ddio         -         ok       no RDMA device: rdmux places data with the processor, which does not use DDIO
drives       -         ok       no NVMe drive
";
    assert_eq!(text, expected);
}

#[test]
fn doctor__what_limits_says_what_to_do() {
    let cases = [
        ("cpu", "proc/cpuinfo", "flags\t: clflush pclmulqdq\n", "-cpu host"),
        ("cpu", "proc/cpuinfo", "flags\t: clwb\n", "-cpu host"),
        ("mtu", "sys/class/net/lo/mtu", "1500\n", "ip link set lo mtu 4200"),
        ("gso", "proc/sys/kernel/osrelease", "4.19.0\n", "5.0"),
        (
            "buffers",
            "proc/sys/net/core/rmem_max",
            "212992\n",
            "sysctl -w net.core.rmem_max=",
        ),
        (
            "hugepages",
            "sys/kernel/mm/transparent_hugepage/enabled",
            "always madvise [never]\n",
            "echo madvise",
        ),
        (
            "userfaultfd",
            "proc/sys/vm/unprivileged_userfaultfd",
            "0\n",
            "sysctl -w vm.unprivileged_userfaultfd=1",
        ),
        (
            "userns",
            "proc/sys/user/max_user_namespaces",
            "0\n",
            "user.max_user_namespaces=",
        ),
        (
            "userns",
            "proc/sys/kernel/unprivileged_userns_clone",
            "0\n",
            "unprivileged_userns_clone=1",
        ),
        (
            "userns",
            "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1\n",
            "apparmor_restrict",
        ),
        (
            "ptrace",
            "proc/sys/kernel/yama/ptrace_scope",
            "1\n",
            "ptrace_scope=0",
        ),
    ];
    for (check, file, text, advice) in cases {
        let host = Host::well();
        host.write(file, text);
        let (verdicts, shown) = host.check(check);
        assert_eq!(verdicts, ["limit"], "{file}: {shown}");
        assert!(shown.contains(advice), "{file}: {shown}");
        assert!(host.doctor(&[]).status.success(), "{file}: a limit is no failure");
    }
}

/// The library's own choice decides which modes of a shared memory a host allows.
#[test]
fn doctor__modes_of_faults_say_what_would_allow_more() {
    let host = Host::well();
    host.write("proc/sys/vm/unprivileged_userfaultfd", "0\n");
    let (verdicts, shown) = host.check("dsm");
    assert_eq!(verdicts, ["limit", "ok", "ok"], "{shown}");
    assert!(shown.contains("EFAULT; used without --faults"), "{shown}");
    assert!(
        shown.contains("sysctl -w vm.unprivileged_userfaultfd=1\n"),
        "{shown}"
    );
    host.write("dev/userfaultfd", "");
    let (_, shown) = host.check("dsm");
    assert!(shown.contains("chmod 0666 /dev/userfaultfd"), "{shown}");
    fs::remove_file(host.0.path().join("proc/sys/vm/unprivileged_userfaultfd")).unwrap();
    let (verdicts, shown) = host.check("dsm");
    assert_eq!(verdicts, ["limit", "limit", "ok"], "{shown}");
    assert!(shown.contains("SIGSEGV; used without --faults"), "{shown}");
    assert!(shown.contains("seccomp"), "{shown}");
}

#[test]
fn doctor__idle_states_cost_wake_ups() {
    const CPUIDLE: &str = "sys/devices/system/cpu/cpuidle";
    const CPU: &str = "sys/devices/system/cpu/cpu0/cpuidle";
    const POLL_NS: &str = "sys/module/haltpoll/parameters/guest_halt_poll_ns";
    let verdict = |host: &Host| {
        let (verdicts, shown) = host.check("idle");
        assert_eq!(verdicts.len(), 1, "{shown}");
        (verdicts[0].clone(), shown)
    };

    let machine = Host::well();
    machine.write(&format!("{CPUIDLE}/current_driver"), "intel_idle\n");
    for (i, name, latency) in [(0, "POLL", 0), (1, "C1E", 10), (2, "C6", 133)] {
        machine.write(&format!("{CPU}/state{i}/name"), &format!("{name}\n"));
        machine.write(&format!("{CPU}/state{i}/latency"), &format!("{latency}\n"));
    }
    let (word, shown) = verdict(&machine);
    assert_eq!(word, "limit");
    assert!(shown.contains("133 us to leave state C6") && shown.contains("cpu_dma_latency at 0"));
    machine.write(&format!("{CPU}/state2/disable"), "1\n");
    assert_eq!(verdict(&machine).0, "ok");
    machine.write(&format!("{CPU}/state2/disable"), "0\n");
    for (us, word) in [(2_000_000_000i32, "limit"), (0, "ok")] {
        let path = machine.0.path().join("dev");
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("cpu_dma_latency"), us.to_ne_bytes()).unwrap();
        assert_eq!(verdict(&machine).0, word, "{us}");
    }

    let guest = Host::well();
    guest.write("proc/cpuinfo", "flags\t: clwb pclmulqdq hypervisor\n");
    let (word, shown) = verdict(&guest);
    assert!(
        word == "limit" && shown.contains("modprobe cpuidle_haltpoll"),
        "{shown}"
    );
    guest.write(&format!("{CPUIDLE}/current_driver"), "haltpoll\n");
    guest.write(POLL_NS, "0\n");
    let (word, shown) = verdict(&guest);
    assert!(
        word == "limit" && shown.contains("echo 200000 >/sys/module/haltpoll"),
        "{shown}"
    );
    guest.write(POLL_NS, "200000\n");
    let (word, shown) = verdict(&guest);
    assert!(word == "ok" && shown.contains("up to 200 us"), "{shown}");
}

#[test]
fn doctor__memlock_matters_to_an_rnic() {
    let host = Host::well();
    host.write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
    let (verdicts, shown) = host.check("memlock");
    assert_eq!(verdicts, ["limit"], "{shown}");
    assert!(
        shown.contains("8 MiB") && shown.contains("ulimit -l unlimited"),
        "{shown}"
    );
    let (_, shown) = host.check("rnic");
    assert!(shown.contains("mlx5_0") && shown.contains("active"), "{shown}");
}

#[test]
fn doctor__who_holds_the_port() {
    let cases = [
        // The kernel's sockets have no inode.
        (udp("00000000", 0, 0), "blocked", "rdma link delete"),
        (udp("00000000", 1001, 77), "blocked", "wireguard (process 42)"),
        (udp("0100007F", 1000, 78), "ok", "processes of this user"),
        (udp("0100007F", 1001, 79), "limit", "user 1001"),
    ];
    for (table, verdict, says) in cases {
        let host = Host::well();
        host.write("proc/net/udp", &table);
        host.write("proc/42/comm", "wireguard\n");
        fs::create_dir_all(host.0.path().join("proc/42/fd")).unwrap();
        symlink("socket:[77]", host.0.path().join("proc/42/fd/5")).unwrap();
        let (verdicts, shown) = host.check("port");
        assert_eq!(verdicts, [verdict], "{shown}");
        assert!(shown.contains(says), "{shown}");
        let whole = host.doctor(&[]);
        assert_eq!(whole.status.success(), verdict != "blocked", "{whole:?}");
        if verdict == "blocked" {
            let why = String::from_utf8(whole.stderr).unwrap();
            assert_eq!(why, "rdmux: these checks found an obstacle: port 4791\n");
        }
    }
}

#[test]
fn doctor__mtu_too_small() {
    let host = Host::well();
    host.write("sys/class/net/eth1/operstate", "up\n");
    let (verdicts, shown) = host.check("mtu");
    assert_eq!(verdicts, ["blocked", "ok"], "{shown}");
    assert!(shown.contains("ip link set eth1 mtu 1500"), "{shown}");
}

#[test]
fn doctor__garbage_is_no_panic() {
    let host = Host::well();
    for file in [
        "proc/cpuinfo",
        "proc/self/limits",
        "proc/meminfo",
        "proc/net/udp",
        "proc/sys/kernel/osrelease",
        "proc/sys/net/core/rmem_max",
        "sys/class/net/lo/mtu",
        "sys/kernel/mm/transparent_hugepage/enabled",
    ] {
        host.write(file, "\n:\n[ : :12B7 x\n");
    }
    let output = host.doctor(&[]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let why = String::from_utf8(output.stderr).unwrap();
    assert!(
        why.starts_with("rdmux: these checks could not find out: "),
        "{why}"
    );
}

#[test]
fn doctor__this_host() {
    let output = Command::new(env!("CARGO_BIN_EXE_rdmux"))
        .args(["doctor", "--json"])
        .output()
        .unwrap();
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    for finding in &list {
        // A finding that is neither ok nor unknown comes with advice.
        let verdict = finding["verdict"].as_str().unwrap();
        assert!(
            matches!(verdict, "ok" | "unknown") || finding["advice"].is_string(),
            "{finding}"
        );
    }
    assert!(
        list.iter()
            .any(|finding| finding["check"] == "mtu" && finding["subject"] == "lo"),
        "{list:?}"
    );
}

#[test]
fn doctor__interfaces_are_those_of_its_network_namespace() {
    // /sys stays that of the other namespace.
    let script = "ip link set lo up mtu 1400 && exec \"$0\" doctor mtu --json";
    let output = Command::new("unshare")
        .args(["-rn", "sh", "-c", script, env!("CARGO_BIN_EXE_rdmux")])
        .output();
    let Some(output) = output.ok().filter(|output| !output.stdout.is_empty()) else {
        return skip("this user cannot make a network namespace");
    };
    let list: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let found: Vec<_> = list
        .iter()
        .map(|finding| (&finding["subject"], &finding["details"]["mtu"]))
        .collect();
    assert_eq!(found, [(&"lo".into(), &1400.into())]);
}
