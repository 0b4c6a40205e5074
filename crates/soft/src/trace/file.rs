//! Writes the file in which a device keeps its notes, and reads the files of other devices.
//!
//! The file lies in the user's runtime folder, which nobody else can enter. The device writes to it at each note, so the notes are there
//! however the process ends. A header of [`HEADER_BYTES`] precedes two rings of [`RING`] records: one for rare notes, and one for notes
//! that may be as frequent as packets and would overwrite the rare ones. A lock on the file shows that its process lives.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use rdmux_rnic::trace::{Note, Tracer};
use rdmux_rnic::{Qpn, Time};
use rdmux_verbs::provider::folder::{open_folder, own_folder, own_path, uid};
use rdmux_verbs::provider::user::outer_number;
use rdmux_verbs::resources::DeviceAt;
use rustix::fs::{AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, flock, fstat, openat, unlinkat};
use rustix::io::{Errno, pwrite};

use super::record::{RECORD_BYTES, TraceEntry, seal};

/// Number of traces of ended processes that are kept: the newest. The others are removed when a device is opened.
pub const KEPT_MAX: usize = 16;
/// Largest number of traces that are read at once: the newest.
pub const TRACES_MAX: usize = 256;
/// Largest number of files of a folder that are looked at.
const FILES_MAX: usize = 1024;

const HEADER_BYTES: usize = 128;
/// Number of records in a ring.
const RING: u64 = 4096;
/// Size of a trace in bytes.
const FILE_BYTES: usize = HEADER_BYTES + 2 * RING as usize * RECORD_BYTES;
const MAGIC: [u8; 8] = *b"rdmuxtrc";
const VERSION: u64 = 1;
const SUFFIX: &str = ".trace";

/// Limit for notes that may come with every packet: so many at once ...
const BURST: u64 = 512;
/// ... and one more in this time. Notes beyond that are only counted.
const NOTE_NS: u64 = 20_000;

/// The trace of a device of this process.
#[derive(Debug)]
pub(crate) struct TraceFile {
    folder: OwnedFd,
    name: String,
    file: OwnedFd,
    /// Time from 1970 to the zero of the engine's clock, in ns.
    base_ns: u64,
    last: Time,
    number: u64,
    /// Records written to each ring.
    written: [u64; 2],
    /// Number of frequent notes that may be made now, and the time up to which it was calculated.
    tokens: u64,
    reckoned: Time,
    skipped: u64,
    /// Set when a note reports trouble that somebody may ask about: the file stays when the device is closed.
    trouble: bool,
    /// Set when every packet is noted, however many there are.
    packets: bool,
    /// Set when the file can no longer be written.
    broken: bool,
}

impl TraceFile {
    /// Creates a trace, and removes the surplus traces of ended processes.
    pub(super) fn create(device: DeviceAt, now: Time, packets: bool) -> io::Result<TraceFile> {
        // Read the clock at once, close to `now`: readers compare the times of two devices, and the next steps take time.
        let clocks = (now, unix_ns());
        TraceFile::create_in(own_folder()?, device, clocks, packets)
    }

    fn create_in(
        folder: OwnedFd,
        device: DeviceAt,
        (now, opened_ns): (Time, u64),
        packets: bool,
    ) -> io::Result<TraceFile> {
        clean(&folder);
        let pid = std::process::id();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let (file, name) = (0..100)
            .find_map(|n| {
                let name = format!("{:020}-{pid}{SUFFIX}", opened_ns + n);
                match openat(&folder, &name, flags, Mode::RUSR | Mode::WUSR) {
                    Err(Errno::EXIST) => None,
                    other => Some(other.map(|file| (file, name))),
                }
            })
            .ok_or(Errno::EXIST)??;
        lock(&file)?;
        let trace = TraceFile {
            folder,
            name,
            file,
            base_ns: opened_ns.saturating_sub(now.0),
            last: now,
            number: 0,
            written: [0; 2],
            tokens: BURST,
            reckoned: now,
            skipped: 0,
            trouble: false,
            packets,
            broken: false,
        };
        let header = Header {
            device,
            pid,
            comm: comm(),
            opened_ns,
        };
        pwrite(&trace.file, &header.encode(), 0)?;
        Ok(trace)
    }

    /// Returns whether to make a note that may come with every packet.
    fn may_note(&mut self, now: Time) -> bool {
        if self.packets {
            return true;
        }
        let earned = now.since_ns(self.reckoned) / NOTE_NS;
        if earned > 0 {
            self.tokens = (self.tokens + earned).min(BURST);
            self.reckoned = now;
        }
        let may = self.tokens > 0;
        self.tokens = self.tokens.saturating_sub(1);
        may
    }

    fn write(&mut self, qpn: Qpn, note: Note) {
        self.number += 1;
        let entry = TraceEntry {
            number: self.number,
            time_ns: self.base_ns + self.last.0,
            qpn,
            note,
        };
        let ring = usize::from(note.is_frequent());
        let place = self.written[ring] % RING + ring as u64 * RING;
        self.written[ring] += 1;
        let at = HEADER_BYTES as u64 + place * RECORD_BYTES as u64;
        // A full disk is no reason to fail.
        self.broken |= pwrite(&self.file, &entry.encode(), at).is_err();
    }
}

impl Tracer for TraceFile {
    fn note(&mut self, now: Time, qpn: Qpn, note: &Note) {
        if self.broken {
            return;
        }
        self.last = self.last.max(now);
        if note.is_frequent() && !self.may_note(self.last) {
            self.skipped += 1;
            return;
        }
        if self.skipped > 0 {
            let notes = std::mem::take(&mut self.skipped);
            self.write(Qpn::new(0), Note::Skipped { notes });
        }
        self.trouble |= note.is_trouble();
        self.write(qpn, *note);
    }
}

impl Drop for TraceFile {
    /// Removes a trace that nobody will ask about: the device is closed in good order.
    fn drop(&mut self) {
        if !self.trouble {
            let _ = unlinkat(&self.folder, &self.name, AtFlags::empty());
        }
    }
}

/// Returns the name of this process.
fn comm() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    clean_name(name.trim_end())
}

/// Replaces control characters and white space in a process name: a process chooses its name freely.
fn clean_name(name: &str) -> String {
    name.replace(|c: char| c.is_control() || c.is_whitespace(), "?")
}

/// Returns the time in nanoseconds since 1970, UTC.
fn unix_ns() -> u64 {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    unix.as_nanos() as u64
}

/// Returns the names of the traces in a folder, newest first.
fn names(folder: &OwnedFd) -> Vec<String> {
    let Ok(dir) = Dir::read_from(folder) else {
        return Vec::new();
    };
    let names = dir
        .flatten()
        .filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned));
    let mut names: Vec<String> = names
        .filter(|name| name.ends_with(SUFFIX))
        .take(FILES_MAX)
        .collect();
    names.sort_unstable_by(|a, b| b.cmp(a));
    names
}

/// Opens a trace, if it is a regular file, so that neither opening nor reading can block.
fn open_trace(folder: &OwnedFd, name: &str) -> io::Result<(OwnedFd, u32)> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(folder, name, flags, Mode::empty())?;
    let stat = fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok((file, stat.st_uid))
}

/// Locks a trace for as long as this process lives. A process that tests whether it is locked holds a lock of its own for a moment.
fn lock(file: &OwnedFd) -> Result<(), Errno> {
    for _ in 0..1_000 {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => std::thread::yield_now(),
            other => return other,
        }
    }
    Err(Errno::WOULDBLOCK)
}

/// Returns whether the process of a trace lives.
fn is_alive(file: &OwnedFd) -> bool {
    flock(file, FlockOperation::NonBlockingLockShared) == Err(Errno::WOULDBLOCK)
}

/// Removes the traces of ended processes except the newest [`KEPT_MAX`].
fn clean(folder: &OwnedFd) {
    let mut ended = 0;
    for name in names(folder) {
        let dead = open_trace(folder, &name).is_ok_and(|(file, _)| !is_alive(&file));
        ended += usize::from(dead);
        if dead && ended > KEPT_MAX {
            let _ = unlinkat(folder, &name, AtFlags::empty());
        }
    }
}

/// Header before the records.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Header {
    device: DeviceAt,
    pid: u32,
    comm: String,
    opened_ns: u64,
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let (family, v6) = match self.device.address {
            IpAddr::V4(v4) => (4u64, v4.to_ipv6_mapped()),
            IpAddr::V6(v6) => (6, v6),
        };
        let bits = v6.to_bits();
        let words = [
            u64::from_ne_bytes(MAGIC),
            VERSION,
            self.pid.into(),
            self.device.slot.into(),
            family,
            (bits >> 64) as u64,
            bits as u64,
            self.opened_ns,
        ];
        let mut out = [0; HEADER_BYTES];
        for (place, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *place = word.to_ne_bytes();
        }
        let comm = self.comm.as_bytes();
        let comm = &comm[..comm.len().min(15)];
        out[64..64 + comm.len()].copy_from_slice(comm);
        out
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let words = bytes.as_chunks::<8>().0;
        let word = |i: usize| words.get(i).map_or(0, |word| u64::from_ne_bytes(*word));
        if words[0] != MAGIC || word(1) != VERSION {
            return None;
        }
        let v6 = Ipv6Addr::from_bits(u128::from(word(5)) << 64 | u128::from(word(6)));
        let address = match word(4) {
            4 => v6.to_ipv4_mapped()?.into(),
            6 => v6.into(),
            _ => return None,
        };
        let comm = bytes[64..80].split(|byte| *byte == 0).next().unwrap_or_default();
        Some(Header {
            device: DeviceAt {
                address,
                slot: u8::try_from(word(3)).ok()?,
            },
            pid: u32::try_from(word(2)).ok()?,
            comm: clean_name(&String::from_utf8_lossy(comm)),
            opened_ns: word(7),
        })
    }
}

/// The trace of a device, whose process may have ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The device.
    pub device: DeviceAt,
    /// Its process ID.
    pub pid: u32,
    /// Name of its process.
    pub comm: String,
    /// User of its process.
    pub uid: u32,
    /// Time when it was opened: nanoseconds since 1970, UTC.
    pub opened_ns: u64,
    /// Set while its process lives.
    pub alive: bool,
    /// Notes, oldest first.
    pub entries: Vec<TraceEntry>,
}

/// Parses header and records of a trace, whoever has written it.
fn parse(bytes: &[u8]) -> Option<(Header, Vec<TraceEntry>)> {
    let (header, records) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let header = Header::decode(header)?;
    let records = records.as_chunks::<RECORD_BYTES>().0.iter();
    let mut entries: Vec<TraceEntry> = records
        .take(2 * RING as usize)
        .filter_map(TraceEntry::decode)
        .collect();
    entries.sort_by_key(|entry| entry.number);
    entries.dedup_by_key(|entry| entry.number);
    Some((header, entries))
}

/// Parses a trace, as it is and with corrected checksums, so that the checks behind the checksum run too. [`crate::fuzz`] calls it.
pub(crate) fn fuzz(input: &[u8]) {
    let mut sealed = input.to_vec();
    if let Some(records) = sealed.get_mut(HEADER_BYTES..) {
        records
            .as_chunks_mut::<RECORD_BYTES>()
            .0
            .iter_mut()
            .for_each(seal);
    }
    for bytes in [input, &sealed] {
        let Some((header, entries)) = parse(bytes) else {
            continue;
        };
        let again = Header::decode(&header.encode()).expect("a header that was read");
        assert_eq!(
            (again.device, again.pid, again.opened_ns),
            (header.device, header.pid, header.opened_ns)
        );
        assert!(!header.comm.contains(char::is_control), "{:?}", header.comm);
        assert!(entries.is_sorted_by(|a, b| a.number < b.number));
        for entry in entries {
            assert_eq!(TraceEntry::decode(&entry.encode()), Some(entry));
        }
    }
}

fn read(folder: &OwnedFd, name: &str) -> Option<Trace> {
    let (file, uid) = open_trace(folder, name).ok()?;
    let mut bytes = vec![0; FILE_BYTES];
    let mut len = 0;
    while len < FILE_BYTES {
        match rustix::io::pread(&file, &mut bytes[len..], len as u64) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    let (header, entries) = parse(&bytes[..len])?;
    Some(Trace {
        device: header.device,
        pid: header.pid,
        comm: header.comm,
        uid,
        opened_ns: header.opened_ns,
        alive: is_alive(&file),
        entries,
    })
}

/// Returns the folders below `folder` whose names are `prefix` and a uid, each with that uid.
fn named_after_users(folder: &str, prefix: &str) -> Vec<(PathBuf, u32)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let user = |name: &str| {
        let text = name.strip_prefix(prefix)?;
        let user = text.parse::<u32>().ok()?;
        // Each user has one folder here: +1 and 01 name nobody.
        (user.to_string() == text).then_some(user)
    };
    entries
        .filter_map(|entry| Some((entry.path(), user(entry.file_name().to_str()?)?)))
        .collect()
}

/// Chooses the files to read among those of all users, each with its user, its name and its place: first the newest of each user, then the
/// second newest of each, and so on.
fn ranked(mut files: Vec<(u32, String, usize)>) -> Vec<(String, usize)> {
    files.sort_unstable_by(|(user_a, a, _), (user_b, b, _)| user_a.cmp(user_b).then(b.cmp(a)));
    let of_each = files.chunk_by(|(user_a, ..), (user_b, ..)| user_a == user_b);
    let mut ranked: Vec<(usize, &String, usize)> = of_each
        .flat_map(|own| own.iter().take(TRACES_MAX).enumerate())
        .map(|(rank, (_, name, place))| (rank, name, *place))
        .collect();
    ranked.sort_unstable_by(|(rank_a, a, _), (rank_b, b, _)| rank_a.cmp(rank_b).then(b.cmp(a)));
    let chosen = ranked.into_iter().take(TRACES_MAX);
    chosen.map(|(_, name, place)| (name.clone(), place)).collect()
}

/// Reads the traces in folders that are their users' alone: the newest [`TRACES_MAX`], taken from the users in turn, so that no user's
/// traces hide another's.
fn traces_in(places: &[(PathBuf, u32)]) -> Vec<Trace> {
    let mut files: Vec<(u32, String, usize)> = Vec::new();
    for (place, (path, owner)) in places.iter().enumerate() {
        if let Ok(folder) = open_folder(path, Some(*owner)) {
            files.extend(names(&folder).into_iter().map(|name| (*owner, name, place)));
        }
    }
    let read = |(name, place): &(String, usize)| {
        let (path, owner) = places.get(*place)?;
        let folder = open_folder(path, Some(*owner)).ok()?;
        read(&folder, name).filter(|trace| trace.uid == *owner)
    };
    let files = ranked(files);
    let mut found: Vec<Trace> = files.iter().filter_map(read).collect();
    found.sort_by_key(|trace| std::cmp::Reverse(trace.opened_ns));
    found
}

/// Returns the folders in which [`traces`] looks for traces of this user: that of this process's environment, and the default ones. Traces
/// of a process with another `XDG_RUNTIME_DIR` are in none of these.
pub fn folders() -> Vec<PathBuf> {
    let uid = uid();
    let usual = [
        format!("/run/user/{uid}/rdmux"),
        format!("/tmp/rdmux-{}", outer_number(uid)),
    ]
    .map(PathBuf::from);
    let own = own_path();
    let others = usual.into_iter().filter(|path| *path != own);
    std::iter::once(own.clone()).chain(others).collect()
}

/// Returns the traces of this user, newest first; root gets those of all users. There are [`TRACES_MAX`] at most. Files that are no trace,
/// or of another version, are left out, and so is a folder that is not its user's alone.
pub fn traces() -> Vec<Trace> {
    let uid = uid();
    let mut places: Vec<(PathBuf, u32)> = folders().into_iter().map(|path| (path, uid)).collect();
    if uid == 0 {
        let runtime = named_after_users("/run/user", "").into_iter();
        places.extend(runtime.map(|(path, user)| (path.join("rdmux"), user)));
        places.extend(named_after_users("/tmp", "rdmux-"));
    }
    places.sort();
    places.dedup();
    traces_in(&places)
}

#[cfg(test)]
mod tests {
    use rustix::fs::mkdir;

    use super::*;

    fn header() -> Header {
        Header {
            device: "10.0.0.1/3".parse().unwrap(),
            pid: 4711,
            comm: "fifteen letters".replace(' ', "_"),
            opened_ns: u64::MAX - 1,
        }
    }

    fn entry(number: u64) -> TraceEntry {
        TraceEntry {
            number,
            time_ns: number,
            qpn: Qpn::new(5),
            note: Note::PeerGone,
        }
    }

    /// A test's own folder. Dropping it removes the folder.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("rdmux-trace-test-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&path);
            mkdir(&path, Mode::RWXU).unwrap();
            Folder(path)
        }

        fn open(&self) -> OwnedFd {
            open_folder(&self.0, Some(uid())).unwrap()
        }

        fn trace(&self) -> TraceFile {
            TraceFile::create_in(self.open(), header().device, (Time(5), unix_ns()), false).unwrap()
        }

        fn read(&self) -> Vec<Trace> {
            let folder = self.open();
            names(&folder)
                .iter()
                .filter_map(|name| read(&folder, name))
                .collect()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    const FATAL: Note = Note::Overrun {
        cqn: rdmux_rnic::Cqn(3),
    };
    const GAP: Note = Note::Skipped { notes: 1 };

    #[test]
    fn note__is_in_the_file_at_once() {
        let folder = Folder::new("at-once");
        let mut trace = folder.trace();
        for (now, note) in [(7, FATAL), (0, Note::PeerGone), (9, FATAL)] {
            trace.note(Time(now), Qpn::new(5), &note);
        }
        let [found] = &folder.read()[..] else {
            panic!("one trace")
        };
        assert!(found.alive);
        assert_eq!((found.device, found.pid), (header().device, std::process::id()));
        let notes: Vec<Note> = found.entries.iter().map(|entry| entry.note).collect();
        assert_eq!(notes, [FATAL, Note::PeerGone, FATAL]);
        // A note without a time gets the time of the note before it.
        let times: Vec<u64> = found
            .entries
            .iter()
            .map(|entry| entry.time_ns - found.opened_ns)
            .collect();
        assert_eq!(times, [2, 2, 4]);
    }

    #[test]
    fn note__rings_keep_the_youngest_and_what_is_rare() {
        let folder = Folder::new("rings");
        let mut trace = folder.trace();
        trace.note(Time(6), Qpn::new(5), &FATAL);
        for i in 0..3 * RING {
            trace.note(Time(7 + i * NOTE_NS), Qpn::new(5), &GAP);
        }
        let found = folder.read().remove(0);
        assert_eq!(found.entries.len() as u64, RING + 1);
        assert_eq!(found.entries[0].note, FATAL);
        assert_eq!(found.entries[1].number, 2 * RING + 2);
        for _ in 0..2 * RING {
            trace.note(Time(u64::MAX >> 1), Qpn::new(5), &FATAL);
        }
        assert_eq!(folder.read()[0].entries.len() as u64, 2 * RING);
    }

    #[test]
    fn note__too_many_at_a_time_are_counted() {
        let folder = Folder::new("many");
        let mut trace = folder.trace();
        for _ in 0..BURST + 100 {
            trace.note(Time(10), Qpn::new(5), &GAP);
        }
        assert_eq!(folder.read()[0].entries.len() as u64, BURST);
        trace.note(Time(10 + NOTE_NS), Qpn::new(5), &GAP);
        let found = folder.read().remove(0);
        let told = found
            .entries
            .iter()
            .filter(|entry| entry.note == Note::Skipped { notes: 100 });
        assert_eq!(told.count(), 1);
    }

    #[test]
    fn drop__keeps_only_what_somebody_may_ask_about() {
        let folder = Folder::new("drop");
        let mut trace = folder.trace();
        trace.note(Time(6), Qpn::new(5), &GAP);
        drop(trace);
        assert_eq!(folder.read(), []);
        let mut trace = folder.trace();
        trace.note(Time(6), Qpn::new(5), &FATAL);
        drop(trace);
        let found = folder.read();
        assert_eq!(found.len(), 1);
        assert!(!found[0].alive);
    }

    #[test]
    fn create__removes_old_ones_of_ended_processes() {
        let folder = Folder::new("stale");
        let alive = folder.trace();
        for _ in 0..KEPT_MAX + 5 {
            let mut trace = folder.trace();
            trace.note(Time(6), Qpn::new(5), &FATAL);
        }
        let before: Vec<u64> = folder.read().iter().map(|trace| trace.opened_ns).collect();
        let _another = folder.trace();
        let found = folder.read();
        // Two traces that are alive, and the newest `KEPT_MAX` of the others.
        assert_eq!(found.len(), KEPT_MAX + 2);
        assert_eq!(found.iter().filter(|trace| trace.alive).count(), 2);
        let kept: Vec<u64> = found[1..=KEPT_MAX].iter().map(|trace| trace.opened_ns).collect();
        assert_eq!(kept, before[..KEPT_MAX]);
        drop(alive);
    }

    #[test]
    fn read__only_files_that_nothing_waits_for() {
        let folder = Folder::new("odd");
        let path = |name: &str| folder.0.join(name);
        std::fs::write(path("1.trace"), b"nonsense").unwrap();
        std::fs::create_dir(path("2.trace")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", path("3.trace")).unwrap();
        let fifo = rustix::fs::mknodat(rustix::fs::CWD, path("4.trace"), FileType::Fifo, Mode::RWXU, 0);
        fifo.unwrap();
        std::fs::File::create(path("5.trace"))
            .unwrap()
            .set_len(1 << 40)
            .unwrap();
        assert_eq!(folder.read(), []);
        // Nor do such files keep a device from being opened.
        let _trace = folder.trace();
        assert_eq!(folder.read().len(), 1);
    }

    #[test]
    fn open_folder__others_may_enter() {
        let folder = Folder::new("open");
        for mode in [0o701, 0o750, 0o777] {
            let open = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(&folder.0, open).unwrap();
            let refused = open_folder(&folder.0, Some(uid())).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        }
        let own = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(&folder.0, own).unwrap();
        assert!(open_folder(&folder.0, Some(uid() + 1)).is_err());
        let link = folder.0.with_extension("link");
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(&folder.0, &link).unwrap();
        assert!(open_folder(&link, Some(uid())).is_err());
        std::fs::remove_file(&link).unwrap();
    }

    #[test]
    fn ranked__newest_of_each_user_wherever_they_are() {
        let many = (0..2 * TRACES_MAX).map(|n| (1, format!("9{n:09}"), n % 2));
        let few = [(2, "0000000001".into(), 2), (3, "0000000002".into(), 3)];
        let found = ranked(many.chain(few).collect());
        assert_eq!(found.len(), TRACES_MAX);
        // However many folders one user has, the newest files of the other users are found.
        let places: Vec<usize> = found[..3].iter().map(|(_, place)| *place).collect();
        assert_eq!(places, [1, 3, 2]);
        let rest: Vec<&str> = found[3..].iter().map(|(name, _)| &**name).collect();
        let newest = (0..2 * TRACES_MAX).rev().map(|n| format!("9{n:09}"));
        assert_eq!(rest, newest.skip(1).take(TRACES_MAX - 3).collect::<Vec<_>>());
    }

    #[test]
    fn traces_in__newest_and_only_so_many() {
        let folder = Folder::new("much");
        let _old = folder.trace();
        let file = |n: u64| {
            let header = Header {
                opened_ns: n,
                ..header()
            };
            // The names are of a far future.
            let name = format!("{n:020}-1{SUFFIX}");
            std::fs::write(folder.0.join(name), header.encode()).unwrap();
        };
        let first = u64::MAX - 2 * TRACES_MAX as u64;
        (first..u64::MAX).for_each(file);
        let found = traces_in(&[(folder.0.clone(), uid())]);
        let newest: Vec<u64> = found.iter().map(|trace| trace.opened_ns).collect();
        let expected: Vec<u64> = (first..u64::MAX).rev().take(TRACES_MAX).collect();
        assert_eq!(newest, expected);
    }

    #[test]
    fn traces_in__folder_that_is_not_the_named_users() {
        let folder = Folder::new("whose");
        let _trace = folder.trace();
        assert_eq!(traces_in(&[(folder.0.clone(), uid())]).len(), 1);
        assert_eq!(traces_in(&[(folder.0.clone(), uid() + 1)]), []);
        let base = std::env::temp_dir();
        let prefix = folder.0.file_name().unwrap().to_str().unwrap();
        let (prefix, pid) = prefix.rsplit_once('-').unwrap();
        let below = |prefix: &str| named_after_users(base.to_str().unwrap(), prefix);
        let named = (folder.0.clone(), pid.parse().unwrap());
        assert!(below(&format!("{prefix}-")).contains(&named));
        for odd in ["+7", "07", "7 "] {
            let name = format!("{prefix}-odd-{odd}");
            std::fs::create_dir(base.join(&name)).unwrap();
            let found = below(&format!("{prefix}-odd-"));
            std::fs::remove_dir(base.join(&name)).unwrap();
            assert_eq!(found, [], "{name}");
        }
        // The rest of the name must be a number and no more.
        assert!(below("rdmux-").iter().all(|(path, _)| *path != folder.0));
    }

    #[test]
    fn parse__header_and_records_in_order() {
        assert_eq!(Header::decode(&header().encode()), Some(header()));
        let mut bytes = header().encode().to_vec();
        for number in [7, 3, 5] {
            bytes.extend(entry(number).encode());
            bytes.extend([0; RECORD_BYTES]);
        }
        let (found, entries) = parse(&bytes).unwrap();
        assert_eq!(found, header());
        assert_eq!(entries, [3, 5, 7].map(entry));
        // Cut anywhere, a trace parses as soon as it has a whole header.
        for len in 0..bytes.len() {
            let parsed = parse(&bytes[..len]);
            assert_eq!(parsed.is_some(), len >= HEADER_BYTES);
        }
    }

    #[test]
    fn parse__random_bytes() {
        let mut state = 3u64;
        let mut next = move || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 33) as u8
        };
        for round in 0..2_000 {
            let mut bytes: Vec<u8> = (0..usize::from(next()) * 8).map(|_| next()).collect();
            if round % 2 == 0 {
                // Every other round has a good header.
                bytes.splice(0..0, header().encode());
            }
            let _ = parse(&bytes);
        }
        let mut bytes = header().encode().to_vec();
        bytes.extend(entry(1).encode());
        for at in 0..bytes.len() {
            for value in 0..=255 {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = parse(&changed);
            }
        }
    }
}
