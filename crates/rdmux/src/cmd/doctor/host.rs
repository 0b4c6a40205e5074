//! Checks of the host itself: processor, limits, and the rights that the kernel gives an ordinary user.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use rdmux_memory::{Convertible, allows_calls_into_processes, convertible};
use serde_json::json;

use super::{Finding, Verdict, number, text};

/// Checks for the features of the processor that rdmux uses.
pub(super) fn cpu(root: &Path) -> Vec<Finding> {
    let info = text(root, "proc/cpuinfo").unwrap_or_default();
    let Some(flags) = info.lines().find_map(|line| line.strip_prefix("flags")) else {
        let what = "no x86 processor: rdmux is untested on other processors, and treats persistent memory as a plain file";
        return vec![Finding::new("-", Verdict::Limit, what.to_owned())];
    };
    let has = |flag: &str| flags.split_whitespace().any(|word| word == flag);
    let flush = ["clwb", "clflushopt", "clflush"]
        .into_iter()
        .find(|flag| has(flag));
    let crc = has("pclmulqdq");
    let details = json!({ "flush": flush, "pclmulqdq": crc, "avx512f": has("avx512f") });
    let finding = match flush {
        Some(flush @ ("clwb" | "clflushopt")) if crc => Finding::new(
            "-",
            Verdict::Ok,
            format!("{flush} for persistent memory, pclmulqdq for checksums"),
        ),
        _ if !crc => Finding::new(
            "-",
            Verdict::Limit,
            "no pclmulqdq: each packet's checksum takes several times as long".to_owned(),
        )
        .with_advice("in a virtual machine, expose the host's processor (qemu: -cpu host)".to_owned()),
        _ => Finding::new(
            "-",
            Verdict::Limit,
            "neither clwb nor clflushopt: a flush of persistent memory waits for each cache line".to_owned(),
        )
        .with_advice("in a virtual machine, expose the host's processor (qemu: -cpu host)".to_owned()),
    };
    vec![finding.with_details(details)]
}

/// Checks how much memory may be locked.
pub(super) fn memlock(root: &Path) -> Vec<Finding> {
    let limits = text(root, "proc/self/limits").unwrap_or_default();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max locked memory"));
    let Some(soft) = line.and_then(|line| line.split_whitespace().next()) else {
        return vec![Finding::new("-", Verdict::Unknown, "cannot find out".to_owned())];
    };
    let finding = match soft.parse::<u64>() {
        Err(_) => Finding::new("-", Verdict::Ok, "unlimited".to_owned()),
        Ok(bytes) => {
            let size = crate::output::bytes(bytes);
            // An RNIC locks registered memory; the soft one locks nothing.
            if devices(root).is_empty() {
                Finding::new(
                    "-",
                    Verdict::Ok,
                    format!("{size}; rdmux needs none: its soft RNIC locks no memory"),
                )
            } else {
                Finding::new(
                    "-",
                    Verdict::Limit,
                    format!("at most {size} can be registered with an RNIC"),
                )
                .with_advice("ulimit -l unlimited, or LimitMEMLOCK=infinity in a systemd unit".to_owned())
            }
        }
    };
    vec![finding.with_details(json!({ "bytes": soft.parse::<u64>().ok() }))]
}

/// Checks huge pages.
pub(super) fn huge_pages(root: &Path) -> Vec<Finding> {
    let enabled = text(root, "sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = enabled
        .as_deref()
        .and_then(|text| text.split('[').nth(1)?.split(']').next());
    let reserved = text(root, "proc/meminfo").and_then(|text| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("HugePages_Total:"))?;
        line.trim().parse::<u64>().ok()
    });
    let details = json!({ "transparent": chosen, "reserved": reserved });
    let finding = match chosen {
        Some(mode @ ("always" | "madvise")) => {
            Finding::new("-", Verdict::Ok, format!("transparent huge pages: {mode}"))
        }
        _ => Finding::new(
            "-",
            Verdict::Limit,
            "no transparent huge pages: large regions cost more TLB misses".to_owned(),
        )
        .with_advice("echo madvise >/sys/kernel/mm/transparent_hugepage/enabled".to_owned()),
    };
    vec![finding.with_details(details)]
}

/// Checks whether an ordinary user may make user namespaces, as the tests and `netns` set-ups without root do.
pub(super) fn user_namespaces(root: &Path) -> Vec<Finding> {
    let refusals = [
        (
            "proc/sys/user/max_user_namespaces",
            0,
            "user.max_user_namespaces=15000",
        ),
        (
            "proc/sys/kernel/unprivileged_userns_clone",
            0,
            "kernel.unprivileged_userns_clone=1",
        ),
        (
            "proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            1,
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ];
    let refused = refusals
        .iter()
        .find(|(file, refused, _)| number(root, file) == Some(*refused));
    vec![match refused {
        None => Finding::new("-", Verdict::Ok, "an ordinary user can create them".to_owned()),
        Some((_, _, advice)) => Finding::new(
            "-",
            Verdict::Limit,
            "only root can create them: an ordinary user has no network namespaces for tests".to_owned(),
        )
        .with_advice(format!("sysctl -w {advice}")),
    }]
}

/// Checks whether a process may reach another one's memory by system calls.
pub(super) fn ptrace(root: &Path) -> Vec<Finding> {
    let scope = number(root, "proc/sys/kernel/yama/ptrace_scope");
    let refused = root == Path::new("/") && !allows_calls_into_processes();
    let finding = match scope {
        _ if refused => Finding::new(
            "-",
            Verdict::Limit,
            "a seccomp filter denies process_vm calls: rdmux copies a program's private memory twice, and reaches that of a peer on this \
             host by packets through a ring"
                .to_owned(),
        )
        .with_advice("allow process_vm_readv and process_vm_writev in the container's seccomp profile".to_owned()),
        None | Some(0) => Finding::new(
            "-",
            Verdict::Ok,
            "processes of one user can access each other's private memory by process_vm calls".to_owned(),
        ),
        Some(_) => Finding::new(
            "-",
            Verdict::Limit,
            "rdmux reaches private memory of a peer on this host by packets through a ring; shareable memory is not affected".to_owned(),
        )
        .with_advice("sysctl -w kernel.yama.ptrace_scope=0".to_owned()),
    };
    vec![finding.with_details(json!({ "yama_scope": scope, "process_vm_refused": refused }))]
}

/// Checks the setting of io_uring, through which the soft RNIC reads files; where it is not allowed, its threads read one at a time.
pub(super) fn io_uring(root: &Path) -> Vec<Finding> {
    let disabled = number(root, "proc/sys/kernel/io_uring_disabled");
    let what = match disabled {
        None | Some(0) => "allowed by the kernel's setting; rdmux does not rely on it",
        Some(1) => "for root only; rdmux does not rely on it",
        Some(_) => "switched off; rdmux does not rely on it",
    };
    vec![Finding::new("-", Verdict::Ok, what.to_owned()).with_details(json!({ "disabled": disabled }))]
}

/// Checks userfaultfd, by which memory of unmodified programs moves into files that peers map.
pub(super) fn userfaultfd(root: &Path) -> Vec<Finding> {
    let everyone = number(root, "proc/sys/vm/unprivileged_userfaultfd");
    let convertible = if root == Path::new("/") {
        convertible()
    } else {
        match everyone {
            None => Convertible::None,
            Some(0) => Convertible::OneThread,
            Some(_) => Convertible::All,
        }
    };
    let finding = match convertible {
        Convertible::All => Finding::new(
            "-",
            Verdict::Ok,
            "peers on this host can map the memory of unmodified programs".to_owned(),
        ),
        Convertible::OneThread => Finding::new(
            "-",
            Verdict::Limit,
            "no full rights: peers on this host can map the memory of an unmodified program only if it has one thread, which calls the \
             library; that of others is reached by system calls"
                .to_owned(),
        )
        .with_advice(
            "sysctl -w vm.unprivileged_userfaultfd=1, give the user access to /dev/userfaultfd, or CAP_SYS_PTRACE to the program; or set \
             RDMUX_CONVERT=user-mode, at the price that docs/shared-memory.md names"
                .to_owned(),
        ),
        Convertible::None => Finding::new(
            "-",
            Verdict::Limit,
            "not available: the memory of unmodified programs is reached by system calls".to_owned(),
        )
        .with_advice("allow userfaultfd in the container's seccomp profile; it needs Linux 5.19".to_owned()),
    };
    vec![finding.with_details(json!({ "unprivileged": everyone }))]
}

/// Reports the RDMA devices that the kernel knows.
pub(super) fn rnic(root: &Path) -> Vec<Finding> {
    let names = devices(root);
    if names.is_empty() {
        return vec![Finding::new(
            "-",
            Verdict::Ok,
            "none: rdmux uses its soft RNIC".to_owned(),
        )];
    }
    names
        .iter()
        .map(|name| {
            let of = |file: &str| text(root, &format!("sys/class/infiniband/{name}/{file}"));
            let port = of("ports/1/state").unwrap_or_default();
            // "4: ACTIVE"
            let state = port
                .split(':')
                .next_back()
                .unwrap_or_default()
                .trim()
                .to_lowercase();
            let state = if state.is_empty() {
                "in an unknown state"
            } else {
                state.as_str()
            };
            let addresses = addresses(root, name);
            let use_it = match addresses.as_slice() {
                [] => "it has no address of this host".to_owned(),
                list => format!("use it with --provider hw on {}", list.join(", ")),
            };
            let what = format!("port 1 is {state}; {use_it}");
            Finding::new(name, Verdict::Ok, what).with_details(json!({
                "state": state,
                "firmware": of("fw_ver").map(|text| text.trim().to_owned()),
                "addresses": addresses,
            }))
        })
        .collect()
}

/// Returns the addresses of a device's first port, from its GIDs. Each address has a GID for each version of RoCE; link-local ones are of
/// no use.
fn addresses(root: &Path, name: &str) -> Vec<String> {
    let folder = format!("sys/class/infiniband/{name}/ports/1/gids");
    let gids = entries(root, &folder).into_iter();
    let addresses = gids.filter_map(|index| {
        let gid: Ipv6Addr = text(root, &format!("{folder}/{index}"))?.trim().parse().ok()?;
        let is_address = !gid.is_unspecified() && !gid.is_unicast_link_local();
        is_address.then(|| IpAddr::V6(gid).to_canonical().to_string())
    });
    let mut addresses: Vec<String> = addresses.collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

fn devices(root: &Path) -> Vec<String> {
    entries(root, "sys/class/infiniband")
}

/// Returns the names in a folder, sorted; none where it cannot be read.
pub(super) fn entries(root: &Path, folder: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(root.join(folder)) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}
