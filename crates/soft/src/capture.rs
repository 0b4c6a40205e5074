//! Captures written inside of a device: whole RoCEv2 packets as they would be on Ethernet, including those that go by shared memory, in
//! pcapng files for Wireshark and for `rdmux capture check`.
//!
//! A device is captured from the moment it is opened ([`rdmux_verbs::set_process_capture`], the environment variable `RDMUX_CAPTURE`), or while a
//! program of its user asks for it ([`start`]). The engine never waits for the file: packets that find no room in a bounded queue are
//! dropped and counted.
//!
//! While a device is captured all data goes by packets: WRITEs and READs that would be done in shared memory, without a trace at either
//! end, are carried by packets, from the device and to it.

mod filter;
mod remote;
mod writer;

use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path as FilePath, PathBuf};
use std::time::SystemTime;

use rdmux_rnic::faults::Fate;
use rdmux_rnic::{Arrival, Cause, Path, Qpn, Rnic, Status};
use rdmux_verbs::OpenError;
use rdmux_verbs::provider::capture_file;
use rdmux_verbs::sync::Mutex;
use rustix::fs::{FileType, FlockOperation, flock};
use rustix::io::Errno;

pub use self::filter::{Filter, FilterError, PacketKind};
pub use self::remote::{CaptureCounts, Capturing, start};
use self::writer::{CaptureRecord, Carried, Input, Writer, flow};

/// The file that devices of this process are captured to, and its writer.
static WRITER: Mutex<Option<(PathBuf, Writer)>> = Mutex::new(None);

impl From<CaptureError> for OpenError {
    fn from(error: CaptureError) -> OpenError {
        OpenError::Provider(error.into())
    }
}

/// Reason why a device that is to be captured was not opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot capture to {}: {source}", file.display())]
pub struct CaptureError {
    file: PathBuf,
    source: io::Error,
}

/// Returns the capture that this process or its environment asks for, for a device of this name.
pub(super) fn of_process(device: String) -> Result<Option<Capture>, CaptureError> {
    let Some(file) = capture_file() else {
        return Ok(None);
    };
    let mut of_process = WRITER.lock();
    let writer = match of_process.take() {
        Some((captured, writer)) if captured == file => writer,
        _ => begin(&file)?,
    };
    let (_, writer) = of_process.insert((file, writer));
    Ok(Some(Capture::new(writer, device, Filter::default())))
}

/// Begins to write to a file.
fn begin(file: &FilePath) -> Result<Writer, CaptureError> {
    let name = file
        .to_string_lossy()
        .replace("%p", &std::process::id().to_string());
    let opened = create(FilePath::new(&name)).and_then(|file| Writer::new(file, None));
    opened.map_err(|source| CaptureError {
        file: name.into(),
        source,
    })
}

/// Creates a file, or empties one, unless another process captures to it.
fn create(name: &FilePath) -> io::Result<File> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(name)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => {
            let what = "another process captures to it: put %p, the process id, in the name";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, what));
        }
        // Anything but a regular file may not support locks.
        _ if file.metadata()?.is_file() => file.set_len(0)?,
        _ => {}
    }
    Ok(file)
}

/// The capture of a device.
#[derive(Debug)]
pub(super) struct Capture {
    input: Input,
    filter: Filter,
}

impl Capture {
    fn new(writer: &Writer, device: String, filter: Filter) -> Capture {
        let input = writer.input(device);
        Capture { input, filter }
    }

    /// Creates a capture for a process that asked for it, to a file of that process.
    pub(super) fn to(file: OwnedFd, done: OwnedFd, device: String, filter: Filter) -> io::Result<Capture> {
        // Writing to anything else may end the process by a signal, or block for ever.
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::CharacterDevice) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let writer = Writer::new(file.into(), Some(done))?;
        Ok(Capture::new(&writer, device, filter))
    }

    /// Waits, for a limited time, until everything that was captured is in the file.
    pub(super) fn sync(&self) {
        self.input.sync();
    }

    /// Captures a train that is sent.
    pub(super) fn sent(
        &self,
        rnic: &Rnic,
        path: &Path,
        shared: bool,
        bytes: &[u8],
        segment_bytes: usize,
        fate: Option<&Fate>,
    ) {
        let record = |bytes: &[u8]| CaptureRecord {
            at: SystemTime::now(),
            carried: if shared {
                Carried::SharedMemory
            } else {
                Carried::Udp
            },
            sent: true,
            flow: flow(path.src, path.src_port, path.dst),
            traffic_class: path.traffic_class,
            segment_bytes,
            bytes: bytes.into(),
            note: fate.and_then(note),
        };
        // The packets of a train are all of one queue pair, but not of one kind.
        if self.filter.opcode.is_none() {
            if self.filter.takes(rnic, path.dst, true, bytes) {
                self.input.put(record(bytes));
            }
            return;
        }
        for packet in bytes.chunks(segment_bytes.max(1)) {
            if self.filter.takes(rnic, path.dst, true, packet) {
                self.input.put(CaptureRecord {
                    sent: false,
                    ..record(packet)
                });
            }
        }
    }

    /// Captures packets that have arrived.
    pub(super) fn arrived(&self, rnic: &Rnic, arrival: &Arrival<'_>, fate: Option<&Fate>) {
        for packet in arrival.bytes.chunks(arrival.segment_bytes.max(1)) {
            if self.filter.takes(rnic, arrival.src, false, packet) {
                self.input.put(CaptureRecord {
                    at: SystemTime::now(),
                    carried: if arrival.local {
                        Carried::SharedMemory
                    } else {
                        Carried::Udp
                    },
                    sent: false,
                    flow: flow(arrival.src, arrival.src_port, arrival.dst),
                    traffic_class: arrival.traffic_class,
                    segment_bytes: packet.len(),
                    bytes: packet.into(),
                    note: fate.and_then(note),
                });
            }
        }
    }

    /// Captures the event that a queue pair went to error.
    pub(super) fn failed(&self, own: IpAddr, qpn: Qpn, status: Status, cause: Cause) {
        if self.filter.qp.is_some_and(|wanted| wanted != qpn) {
            return;
        }
        let because = match cause {
            Cause::OwnRequest => "of a local request",
            Cause::PeerRequest => "of a request of the peer",
            Cause::QueueOverrun => "a completion queue overran",
            Cause::ShareOverrun => "its share of a completion queue overran",
            Cause::Injected => "of an injected fault",
        };
        let text = format!(
            "queue pair {} (0x{:06x}) goes to error: completion with status {status:?}, because {because}",
            qpn.value(),
            qpn.value()
        );
        self.input.put(CaptureRecord {
            at: SystemTime::now(),
            carried: Carried::Event,
            sent: true,
            flow: flow(own, 0, own),
            traffic_class: 0,
            segment_bytes: 1,
            bytes: Box::default(),
            note: Some(text),
        });
    }
}

/// Describes the faults that were injected into a packet.
fn note(fate: &Fate) -> Option<String> {
    let kinds = [
        (fate.lost, "lost"),
        (fate.corrupted.is_some(), "corrupted"),
        (fate.duplicated.is_some(), "duplicated"),
        (fate.reordered.is_some(), "reordered"),
    ];
    let kinds: Vec<_> = kinds
        .iter()
        .filter(|(is_so, _)| *is_so)
        .map(|(_, kind)| *kind)
        .collect();
    (!kinds.is_empty()).then(|| format!("fault: {}", kinds.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn create__a_file_that_another_captures_to_stays_theirs() {
        let folder = tempfile::tempdir().unwrap();
        let name = folder.path().join("x.pcapng");
        std::fs::write(&name, "of before").unwrap();
        let first = create(&name).unwrap();
        assert_eq!(first.metadata().unwrap().len(), 0);
        rustix::io::write(&first, b"theirs").unwrap();
        let refused = create(&name).unwrap_err();
        assert!(
            refused.to_string().contains("another process captures to it"),
            "{refused}"
        );
        assert_eq!(std::fs::read(&name).unwrap(), b"theirs");
        drop(first);
        assert_eq!(create(&name).unwrap().metadata().unwrap().len(), 0);
        // A device is not truncated.
        create(FilePath::new("/dev/null")).unwrap();
    }
}
