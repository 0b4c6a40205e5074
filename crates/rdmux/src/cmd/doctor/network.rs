//! Checks of the network: the port, interfaces, socket buffers.

use std::fs;
use std::path::Path;

use rdmux_soft::udp::SOCKET_BUFFER_BYTES;
use rdmux_verbs::{PathMtu, interface};
use serde_json::json;

use super::{Finding, Verdict, number, text};

/// UDP port of RoCEv2. IBTA Vol 1, A17.
const PORT: u16 = 4791;
/// Checks who holds UDP port 4791.
pub(super) fn port(root: &Path) -> Vec<Finding> {
    let mut found = Vec::new();
    for table in ["proc/net/udp", "proc/net/udp6"] {
        for line in text(root, table).unwrap_or_default().lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let (Some(local), Some(uid), Some(inode)) = (words.get(1), words.get(7), words.get(9)) else {
                continue;
            };
            let Some((address, number)) = local.split_once(':') else {
                continue;
            };
            if u16::from_str_radix(number, 16) != Ok(PORT) {
                continue;
            }
            let socket = Socket {
                everywhere: address.bytes().all(|digit| digit == b'0'),
                uid: uid.parse().unwrap_or(0),
                inode: inode.parse().unwrap_or(0),
            };
            if !found.contains(&socket) {
                found.push(socket);
            }
        }
    }
    // A group of rdmux processes has many sockets on one address: a line for each holder is enough.
    found.sort_by_key(|socket| (socket.uid, socket.everywhere));
    found.dedup_by_key(|socket| (socket.uid, socket.everywhere));
    if found.is_empty() {
        return vec![Finding::new(
            "4791",
            Verdict::Ok,
            "UDP port 4791 is free".to_owned(),
        )];
    }
    let own = text(root, "proc/self/status").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        line.split_whitespace().next()?.parse::<u32>().ok()
    });
    found
        .iter()
        .map(|socket| {
            let holder = socket.holder(root);
            let details = json!({
                "uid": socket.uid,
                "everywhere": socket.everywhere,
                "process": holder.as_ref().map(|(_, name)| name),
                "pid": holder.as_ref().map(|(pid, _)| pid),
            });
            let finding = match (&holder, socket) {
                // The kernel's own sockets belong to no file.
                (_, Socket { inode: 0, .. }) => Finding::new(
                    "4791",
                    Verdict::Blocked,
                    "the kernel's rxe holds UDP port 4791 on all addresses of this network namespace"
                        .to_owned(),
                )
                .with_advice("rdma link delete NAME, or run rdmux in another network namespace".to_owned()),
                (Some((pid, name)), socket) if socket.everywhere && name != "rdmux" => Finding::new(
                    "4791",
                    Verdict::Blocked,
                    format!("{name} (process {pid}) holds UDP port 4791 on all addresses"),
                )
                .with_advice(format!("end process {pid}, or bind it to one address")),
                (_, socket) if Some(socket.uid) == own => Finding::new(
                    "4791",
                    Verdict::Ok,
                    "held by processes of this user, which share it with other processes of this user"
                        .to_owned(),
                ),
                (_, socket) => Finding::new(
                    "4791",
                    Verdict::Limit,
                    format!(
                        "held by user {} on at least one address, which no other user can use",
                        socket.uid
                    ),
                )
                .with_advice("use another address, such as 127.0.0.2 on this host".to_owned()),
            };
            finding.with_details(details)
        })
        .collect()
}

#[derive(Debug, PartialEq, Eq)]
struct Socket {
    everywhere: bool,
    uid: u32,
    inode: u64,
}

impl Socket {
    /// Returns the process that holds the socket, if this user may see its files.
    fn holder(&self, root: &Path) -> Option<(u32, String)> {
        let link = format!("socket:[{}]", self.inode);
        fs::read_dir(root.join("proc")).ok()?.find_map(|entry| {
            let entry = entry.ok()?;
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let holds = fs::read_dir(entry.path().join("fd"))
                .ok()?
                .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok())
                .any(|target| target.as_os_str() == link.as_str());
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            holds.then(|| (pid, name.trim().to_owned()))
        })
    }
}

/// Reports the path MTU that each interface carries.
pub(super) fn mtu(root: &Path) -> Vec<Finding> {
    let links = if root == Path::new("/") {
        // The kernel lists those of this network namespace; /sys may be that of another one.
        interface::link_mtus().ok()
    } else {
        links_in(root)
    };
    let Some(links) = links else {
        return vec![Finding::new(
            "-",
            Verdict::Unknown,
            "cannot list the interfaces".to_owned(),
        )];
    };
    links
        .iter()
        .map(|(name, mtu)| {
            let mtu = *mtu;
            let details = json!({ "mtu": mtu, "path_mtu": PathMtu::of_link(mtu).map(PathMtu::bytes) });
            let finding = match PathMtu::of_link(mtu) {
                Some(PathMtu::Bytes4096) => {
                    Finding::new(name, Verdict::Ok, format!("MTU {mtu} carries path MTU 4096"))
                }
                Some(path) => Finding::new(
                    name,
                    Verdict::Limit,
                    format!(
                        "MTU {mtu} carries path MTU {}; the largest path MTU is 4096",
                        path.bytes()
                    ),
                )
                .with_advice(format!("ip link set {name} mtu 4200, if the network supports it")),
                None => Finding::new(
                    name,
                    Verdict::Blocked,
                    format!("MTU {mtu} is too small for RoCEv2, which needs 336"),
                )
                .with_advice(format!("ip link set {name} mtu 1500")),
            };
            finding.with_details(details)
        })
        .collect()
}

/// Returns name and MTU of each interface that is up in the `/sys` of a folder.
fn links_in(root: &Path) -> Option<Vec<(String, u32)>> {
    let entries = fs::read_dir(root.join("sys/class/net")).ok()?;
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    let of = |name: &str, file: &str| text(root, &format!("sys/class/net/{name}/{file}"));
    let link = |name: String| {
        let is_up = of(&name, "operstate").is_some_and(|state| matches!(state.trim(), "up" | "unknown"));
        let mtu = of(&name, "mtu")?.trim().parse().ok()?;
        is_up.then_some((name, mtu))
    };
    Some(names.into_iter().filter_map(link).collect())
}

/// Checks whether the kernel takes and gives UDP datagrams in trains.
pub(super) fn gso(root: &Path) -> Vec<Finding> {
    let release = text(root, "proc/sys/kernel/osrelease").unwrap_or_default();
    let mut parts = release
        .split(|c: char| !c.is_ascii_digit())
        .map(|part| part.parse().unwrap_or(0));
    let version: (u32, u32) = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let release = release.trim();
    vec![match version {
        (0, _) => Finding::new(
            "-",
            Verdict::Unknown,
            "cannot read the kernel's version".to_owned(),
        ),
        v if v >= (5, 0) => Finding::new("-", Verdict::Ok, format!("Linux {release} has UDP GSO and GRO")),
        _ => Finding::new(
            "-",
            Verdict::Limit,
            format!("Linux {release} has no UDP GSO: it sends datagrams one by one, at a fraction of the bandwidth"),
        )
        .with_advice("use Linux 5.0 or newer".to_owned()),
    }]
}

/// Checks the receive buffers, whose size limits the bursts that lose no datagrams.
pub(super) fn buffers(root: &Path) -> Vec<Finding> {
    let Some(max) = number(root, "proc/sys/net/core/rmem_max") else {
        return vec![Finding::new(
            "rmem_max",
            Verdict::Unknown,
            "cannot find out".to_owned(),
        )];
    };
    let size = crate::output::bytes(max);
    let finding = if max >= SOCKET_BUFFER_BYTES as u64 {
        Finding::new("rmem_max", Verdict::Ok, format!("receive buffers of {size}"))
    } else {
        Finding::new(
            "rmem_max",
            Verdict::Limit,
            format!("receive buffers of at most {size}: bursts overflow them and are retransmitted"),
        )
        .with_advice(format!("sysctl -w net.core.rmem_max={SOCKET_BUFFER_BYTES}"))
    };
    vec![finding.with_details(json!({ "bytes": max, "wanted": SOCKET_BUFFER_BYTES }))]
}
