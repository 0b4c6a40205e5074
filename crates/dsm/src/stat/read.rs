//! Reading the sheets of this host's nodes.

use std::fs::{self, File};
use std::io::Read;
use std::net::{Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rdmux_memory::mapping::sealed_file;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};
use rustix::io::Errno;

use super::{
    CONSISTENCY_AT, EPOCH_AT, GONE_AT, HEAD_WORDS, JOINED_AT, MAGIC, MODE_AT, NAME, NODE_AT, NODES_AT,
    NodeStat, PAGE_AT, PEER_COUNTS_AT, PORT_AT, PROCESS_AT, PeerStat, REGION_COUNTS_AT, SESSION_AT, Stat,
    VERSION, VERSION_AT, peer_at, region_at, words,
};
use crate::cluster::{Cluster, NODES_MAX};
use crate::driver::REGIONS_MAX;
use crate::session::{Consistency, FaultMode};

/// Sheets of a process that are read; more are ignored.
const SHEETS_MAX: usize = 64;

/// A node of a shared memory that runs on this host, with its counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its process.
    pub pid: u32,
    /// Its number.
    pub number: u32,
    /// Session of its cluster, which strangers must not learn.
    pub session: [u8; 16],
    /// Time at which it has joined, in ns since 1970.
    pub joined_ns: u64,
    /// Epoch of the membership: the number of nodes that are gone, as this node knows.
    pub epoch: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Counts of the node.
    pub counts: NodeStat,
    /// Its regions.
    pub regions: Vec<Region>,
    /// All nodes of the cluster by their numbers, this one among them.
    pub peers: Vec<Peer>,
}

/// A region of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its number.
    pub number: u32,
    /// Its bytes.
    pub bytes: u64,
    /// The way by which its faults are answered.
    pub mode: FaultMode,
    /// The order of accesses of different nodes.
    pub consistency: Consistency,
    /// Its counts.
    pub counts: Stat,
}

/// A node of a cluster, as another one knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its address.
    pub address: SocketAddr,
    /// It has left or failed.
    pub is_gone: bool,
    /// Counts of what went between the two.
    pub counts: PeerStat,
}

impl Node {
    /// Returns whether it is a node of a cluster.
    pub fn is_of(&self, cluster: &Cluster) -> bool {
        self.session == cluster.session
    }

    /// Returns the address of node 0, which no other cluster has now.
    pub fn cluster(&self) -> SocketAddr {
        self.peers[0].address
    }

    /// Returns its own address.
    pub fn address(&self) -> SocketAddr {
        self.peers[self.number as usize].address
    }

    /// Returns the time since it has joined.
    pub fn age(&self) -> Duration {
        let joined = SystemTime::UNIX_EPOCH + Duration::from_nanos(self.joined_ns);
        SystemTime::now().duration_since(joined).unwrap_or_default()
    }
}

/// Reason why the counts of a node cannot be shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// They are of another version.
    #[error(
        "process {pid}: its counts of a shared memory have version {version}, and this rdmux reads version {VERSION}: use the rdmux that it was built with"
    )]
    Version {
        /// The process.
        pid: u32,
        /// Its version.
        version: u64,
    },
    /// No node writes such counts.
    #[error("process {pid}: its counts of a shared memory are damaged: {what}")]
    Damaged {
        /// The process.
        pid: u32,
        /// The part that is wrong.
        what: &'static str,
    },
    /// They cannot be read.
    #[error("process {pid}: its counts of a shared memory cannot be read: {errno}")]
    Unreadable {
        /// The process.
        pid: u32,
        /// The system's reason.
        errno: Errno,
    },
}

/// Returns the nodes that run on this host, by cluster and number: those of this user, and of all users to root. Processes of other users, and those
/// with more rights than this one, are hidden.
pub fn nodes() -> Vec<Result<Node, ReadError>> {
    let Some(device) = device_of_sheets() else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for process in numbers_in(Path::new("/proc")) {
        let folder = PathBuf::from(format!("/proc/{process}/fd"));
        let sheets = numbers_in(&folder).filter_map(|fd| open_sheet(&folder.join(fd.to_string()), device));
        let read = |file| read_of(process, file).transpose();
        found.extend(sheets.take(SHEETS_MAX).filter_map(read));
    }
    let order = |one: &Result<Node, ReadError>| {
        let node = one.as_ref().ok()?;
        Some((node.cluster(), node.session, node.number, node.pid))
    };
    // Those that cannot be shown come last.
    found.sort_by_key(|one| (one.is_err(), order(one)));
    found
}

/// Returns the names in a folder that are numbers; none if it cannot be read, or its process has ended.
fn numbers_in(folder: &Path) -> impl Iterator<Item = u32> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// Returns the device of all files in memory, as its major and minor number.
fn device_of_sheets() -> Option<(u32, u32)> {
    device_of(sealed_file("rdmux-dsm-device", 0).ok()?)
}

fn device_of(file: impl AsFd) -> Option<(u32, u32)> {
    // The file system is not asked: that of a file with a sheet's name may never answer.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = statx(file, "", flags, StatxFlags::BASIC_STATS).ok()?;
    Some((stat.stx_dev_major, stat.stx_dev_minor))
}

/// Opens a descriptor of a process, if it is a sheet.
fn open_sheet(path: &Path, device: (u32, u32)) -> Option<Result<OwnedFd, Errno>> {
    let name = fs::read_link(path).ok()?;
    if name.to_str()? != format!("/memfd:{NAME} (deleted)") {
        return None;
    }
    // The process may close it at any time, and open another file under its number.
    let file = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    if device_of(&file)? != device {
        return None;
    }
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some(open(again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()))
}

/// Reads a sheet. Returns `None` if its node runs in another process, or has not joined yet.
fn read_of(pid: u32, file: Result<OwnedFd, Errno>) -> Result<Option<Node>, ReadError> {
    const BYTES_MAX: u64 = (words(NODES_MAX) as u64 * 8).next_multiple_of(1 << 16);
    let unreadable = |errno| ReadError::Unreadable { pid, errno };
    let mut bytes = Vec::new();
    let read = File::from(file.map_err(unreadable)?)
        .take(BYTES_MAX)
        .read_to_end(&mut bytes);
    read.map_err(|error| unreadable(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    let own_number = || own_number_of(pid).unwrap_or(pid);
    parse(pid, &bytes, own_number)
}

/// Returns the number of a process in its own PID namespace.
fn own_number_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}

/// Parses the words of a sheet, which may have any content.
pub(super) fn parse(
    pid: u32,
    bytes: &[u8],
    own_number: impl FnOnce() -> u32,
) -> Result<Option<Node>, ReadError> {
    let damaged = |what| ReadError::Damaged { pid, what };
    let (words_of_it, _) = bytes.as_chunks::<8>();
    let word = |index: usize| {
        words_of_it
            .get(index)
            .map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    };
    match word(0) {
        MAGIC => {}
        0 => return Ok(None),
        _ => return Err(damaged("it has another beginning")),
    }
    if word(VERSION_AT) != VERSION {
        let version = word(VERSION_AT);
        return Err(ReadError::Version { pid, version });
    }
    // The child of a node has the sheet too.
    if word(PROCESS_AT) != u64::from(own_number()) {
        return Ok(None);
    }
    let nodes = usize::try_from(word(NODES_AT))
        .ok()
        .filter(|it| (1..=NODES_MAX).contains(it));
    let nodes = nodes.ok_or_else(|| damaged("the number of nodes"))?;
    let number = u32::try_from(word(NODE_AT))
        .ok()
        .filter(|it| (*it as usize) < nodes);
    let number = number.ok_or_else(|| damaged("the number of the node"))?;
    if words_of_it.len() < words(nodes) {
        return Err(damaged("its length"));
    }
    let peers = (0..nodes).map(|peer| {
        let at = peer_at(peer);
        Ok(Peer {
            address: address(word(at), word(at + 1), word(at + PORT_AT))?,
            is_gone: flag(word(at + GONE_AT))?,
            counts: PeerStat::of(|counter| word(at + PEER_COUNTS_AT + counter)),
        })
    });
    let peers: Result<Vec<Peer>, &str> = peers.collect();
    let regions = (0..REGIONS_MAX).filter_map(|region| {
        let at = region_at(nodes, region);
        let bytes = word(at);
        let mode = FaultMode::of_number(word(at + MODE_AT)).ok_or("a mode of faults");
        let consistency = Consistency::of_number(word(at + CONSISTENCY_AT)).ok_or("a consistency");
        (bytes > 0).then(|| {
            Ok(Region {
                number: region as u32,
                bytes,
                mode: mode?,
                consistency: consistency?,
                counts: Stat::of(|counter| word(at + REGION_COUNTS_AT + counter)),
            })
        })
    });
    let regions: Result<Vec<Region>, &str> = regions.collect();
    let mut session = [0; 16];
    for (part, at) in session.as_chunks_mut::<8>().0.iter_mut().zip(SESSION_AT..) {
        *part = word(at).to_le_bytes();
    }
    Ok(Some(Node {
        pid,
        number,
        session,
        joined_ns: word(JOINED_AT),
        epoch: word(EPOCH_AT),
        page_bytes: word(PAGE_AT),
        counts: NodeStat::of(|counter| word(HEAD_WORDS + counter)),
        regions: regions.map_err(damaged)?,
        peers: peers.map_err(damaged)?,
    }))
}

fn address(high: u64, low: u64, port: u64) -> Result<SocketAddr, &'static str> {
    let ip = Ipv6Addr::from(u128::from(high) << 64 | u128::from(low));
    let port = u16::try_from(port).map_err(|_| "the port of a node")?;
    Ok(SocketAddr::new(ip.to_canonical(), port))
}

fn flag(word: u64) -> Result<bool, &'static str> {
    match word {
        0 | 1 => Ok(word == 1),
        _ => Err("the state of a node"),
    }
}
