//! Reading a log without disturbing its writer.

use super::Epoch;
use super::format::{AREA_AT, FRAME_LEN, Found, Frame, Header, Point, Scan};
use super::link::Devices;
use rdmux_push::{Access, Client, Domain, Error, Key, MapRequest, Target};

/// Bytes read at a time.
const READ: usize = 1 << 20;
/// Maximum number of attempts to read a replica whose writer drops records faster than they are read.
const AGAIN: u32 = 8;

/// Contents of one replica.
#[derive(Clone, Debug)]
pub struct View {
    /// Number of replicas of the log.
    pub replicas: u16,
    /// The log's random number.
    pub log: u64,
    /// The replica's random number.
    pub replica: u64,
    /// True while the replica lacks records that were acknowledged before it joined.
    pub joining: bool,
    /// Epoch of the writer to which the replica is promised.
    pub promise: Epoch,
    /// Size of the ring in bytes.
    pub area: u64,
    /// Bytes of the ring in use.
    pub used: u64,
    /// Position of the first byte in use: the number of bytes dropped so far. Its offset in the ring is `position` modulo
    /// `area`.
    pub position: u64,
    /// Sequence number of the first record.
    pub first: u64,
    /// Sequence number of the last record; `first - 1` when there is none.
    pub last: u64,
    /// The epoch of the last frame.
    pub epoch: Epoch,
    /// Sequence number of the last record that this replica knows to be acknowledged.
    pub acknowledged: u64,
    /// Persistence domain of the region: it decides what survives a loss of power.
    pub domain: Domain,
    /// The records, if the caller asked for them.
    pub records: Vec<(u64, Vec<u8>)>,
    /// False if part of the contents was missed because the writer drops records faster than they are read.
    pub whole: bool,
    chain: u64,
}

/// Reads a replica; returns `None` if it holds no log. With `records`, the view contains the records.
pub fn look(target: &Target, key: &Key, records: bool) -> Result<Option<View>, Error> {
    let address = target.resolve()?[0];
    let options = rdmux_push::Options {
        device: Some(Devices::default().towards(address.ip(), None)?),
        ..rdmux_push::Options::default()
    };
    let mut client = Client::connect(address, key, &options)?;
    let request = MapRequest {
        share: Access::READ | Access::WRITE,
        ..MapRequest::new(Access::READ)
    };
    let mapping = client.map_as(&target.region, &request)?;
    let mut read = |at: u64, bytes: &mut [u8]| client.read(&mapping, at, bytes);
    let mut view = None;
    for _ in 0..AGAIN {
        view = scan(mapping.region_bytes(), mapping.domain(), records, &mut read)?;
        if view.as_ref().is_none_or(|view| view.whole) {
            break;
        }
    }
    client.close();
    Ok(view)
}

/// Scans a region of `region_bytes` bytes through `read_at`; `domain` is only copied into the view. With `records`, the view
/// contains the records. Returns `None` if there is no log.
pub fn scan(
    region_bytes: u64,
    domain: Domain,
    records: bool,
    read_at: &mut impl FnMut(u64, &mut [u8]) -> Result<(), Error>,
) -> Result<Option<View>, Error> {
    let mut header = vec![0; AREA_AT.min(region_bytes) as usize];
    read_at(0, &mut header)?;
    let Found::Log(header) = Header::find(&header) else {
        return Ok(None);
    };
    let area = header.area.min(region_bytes.saturating_sub(AREA_AT));
    let mut view = View {
        replicas: header.replicas,
        log: header.log,
        replica: header.replica,
        joining: header.joining,
        promise: header.promise,
        area,
        used: 0,
        position: header.head.position,
        first: header.head.sequence + 1,
        last: header.head.sequence,
        epoch: header.head.epoch,
        acknowledged: header.acknowledged,
        domain,
        records: Vec::new(),
        whole: true,
        chain: header.head.chain,
    };
    let mut after: Point = header.head;
    // The bytes from `after` on.
    let mut bytes: Vec<u8> = Vec::new();
    let mut read = 0;
    loop {
        match Frame::scan(&after, &bytes, area - view.used) {
            Scan::Frame(frame) => {
                let whole = (frame.end.position - after.position) as usize;
                if records && frame.is_record {
                    let payload = bytes[FRAME_LEN..FRAME_LEN + frame.length as usize].to_vec();
                    view.records.push((frame.end.sequence, payload));
                }
                // The padding may be missing here; nothing reads it.
                bytes.drain(..whole.min(bytes.len()));
                view.used += whole as u64;
                view.acknowledged = view.acknowledged.max(frame.acknowledged);
                after = frame.end;
                read = read.max(view.used);
            }
            Scan::Need(need) if view.used + need as u64 <= area => {
                while bytes.len() < need {
                    let at = (header.head.position + read) % area;
                    let length = (area - at).min(area - read).min(READ as u64) as usize;
                    let mut piece = vec![0; length];
                    read_at(AREA_AT + at, &mut piece)?;
                    bytes.extend_from_slice(&piece);
                    read += length as u64;
                }
            }
            _ => break,
        }
    }
    view.last = after.sequence;
    view.epoch = after.epoch;
    view.chain = after.chain;
    // The writer reuses space only after the header says that the frames there are dropped. So if the log does not begin behind
    // the position at which the scan ended, the log did end there.
    let mut now = vec![0; AREA_AT as usize];
    read_at(0, &mut now)?;
    view.whole = matches!(Header::find(&now), Found::Log(now) if now.log == header.log
        && (header.head.position..=after.position).contains(&now.head.position));
    Ok(Some(view))
}

/// Combined contents of several replicas.
#[derive(Clone, Debug)]
pub struct Read {
    /// The records, oldest first.
    pub records: Vec<(u64, Vec<u8>)>,
    /// Records up to this one are known to be acknowledged; later ones may be acknowledged too, or the next writer may discard
    /// them.
    pub acknowledged: u64,
    /// Number of replicas of the log.
    pub replicas: u16,
    /// Number of these that were read.
    pub seen: usize,
    /// True if a majority was read whole: then no acknowledged record is missing at the end.
    pub complete: bool,
}

/// Chooses, among the replicas that were read, the log that a writer would choose.
pub fn agree(views: &[View]) -> Option<Read> {
    let has_say: Vec<&View> = views.iter().filter(|view| !view.joining).collect();
    let best = has_say
        .iter()
        .max_by_key(|view| (view.whole, view.epoch, view.last, view.used))?;
    let same: Vec<&&View> = has_say.iter().filter(|view| view.log == best.log).collect();
    let majority = usize::from(best.replicas) / 2 + 1;
    let told = same.iter().map(|view| view.acknowledged).max().unwrap_or(0);
    Some(Read {
        records: best.records.clone(),
        acknowledged: told.min(best.last),
        replicas: best.replicas,
        seen: views.iter().filter(|view| view.log == best.log).count(),
        complete: same.iter().filter(|view| view.whole).count() >= majority,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Settings, What, Writer};

    /// A writer with one replica, whose memory is here.
    struct One {
        writer: Writer,
        memory: Vec<u8>,
    }

    impl One {
        fn new() -> One {
            let settings = Settings {
                replicas: 1,
                writer: 1,
                log: 2,
                replica_ids: vec![3],
                create: true,
                drop_oldest: true,
                trim: None,
            };
            let mut one = One {
                writer: Writer::new(settings),
                memory: vec![0; AREA_AT as usize + 8192],
            };
            one.serve();
            one
        }

        fn serve(&mut self) {
            let now = std::time::Duration::ZERO;
            while let Some(action) = self.writer.poll_action() {
                let (session, mut read) = (action.session, None);
                match action.what {
                    What::Connect => {
                        let bytes = self.memory.len() as u64;
                        self.writer.handle_connected(0, session, bytes);
                        continue;
                    }
                    What::Acquire => {
                        self.writer.handle_acquired(0, session);
                        continue;
                    }
                    What::Disconnect => continue,
                    What::Read { offset, length } => {
                        read = Some(self.memory[offset as usize..(offset + length) as usize].to_vec());
                    }
                    What::Write { offset, bytes } => {
                        self.memory[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
                    }
                    What::Flush { .. } => {}
                }
                self.writer.handle_done(0, session, read, now);
            }
        }

        fn append(&mut self, records: u64) {
            for _ in 0..records {
                self.writer.append(&[7; 200]).unwrap();
                self.serve();
            }
        }

        fn read(&self, at: u64, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.memory[at as usize..at as usize + bytes.len()]);
        }
    }

    /// Reads the log while the writer appends `records` records after the first read of the header.
    fn look_beside(records: u64) -> Read {
        let mut one = One::new();
        one.append(20);
        let (bytes, mut reads) = (one.memory.len() as u64, 0);
        let mut read = |at: u64, bytes: &mut [u8]| {
            one.read(at, bytes);
            reads += 1;
            if reads == 1 {
                one.append(records);
            }
            Ok(())
        };
        let view = scan(bytes, Domain::None, true, &mut read).unwrap().unwrap();
        agree(&[view]).unwrap()
    }

    #[test]
    fn scan__sees_when_the_writer_drops_what_is_being_read() {
        let read = look_beside(3);
        assert!(read.complete);
        assert!(read.acknowledged >= 20);
        let read = look_beside(100);
        assert!(!read.complete, "{} records", read.records.len());
    }
}
