//! Reading a log without disturbing who writes it.

use super::Epoch;
use super::driver::Devices;
use super::format::{AREA_AT, FRAME_LEN, Found, Frame, Header, Point, Scan};
use crate::client::MapRequest;
use crate::{Access, Client, Domain, Error, Key, Target};

/// Bytes read at a time.
const READ: usize = 1 << 20;
/// How often a replica is read anew when its writer dropped more than was read.
const AGAIN: u32 = 8;

/// What one replica holds.
#[derive(Clone, Debug)]
pub struct View {
    /// How many hold the log.
    pub replicas: u16,
    /// The log's random number.
    pub log: u64,
    /// The replica's.
    pub replica: u64,
    /// It has not got yet what was acknowledged before it joined.
    pub joining: bool,
    /// The writer that it is promised to.
    pub promise: Epoch,
    /// Bytes of the ring.
    pub area: u64,
    /// Of these, in use.
    pub used: u64,
    /// Where what is in use begins: bytes of all that was dropped. In the ring it is there modulo `area`.
    pub position: u64,
    /// Number of the first record, and of the last; `first - 1` when there is none.
    pub first: u64,
    /// See `first`.
    pub last: u64,
    /// The epoch of the last frame.
    pub epoch: Epoch,
    /// The last record of which this replica knows that it is acknowledged.
    pub acknowledged: u64,
    /// What of it survives a loss of power.
    pub domain: Domain,
    /// The records, if they were asked for.
    pub records: Vec<(u64, Vec<u8>)>,
    /// Whether all that it held was seen: not where its writer drops records faster than they are read.
    pub whole: bool,
    chain: u64,
}

/// Looks at a replica; `None` where there is no log. With `records` it takes them along.
pub fn look(target: &Target, key: &Key, records: bool) -> Result<Option<View>, Error> {
    let address = target.resolve()?[0];
    let options = crate::Options {
        device: Some(Devices::default().towards(address.ip(), None)?),
        ..crate::Options::default()
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

/// Goes through a region of so many bytes, which `read_at` reads; `domain` is only told. With `records` it takes them along.
/// `None` where there is no log.
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
                // The padding may not be here yet; nothing looks at it.
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
    // Space is used again after the header says that what stood there is dropped: as long as the log does not begin behind
    // the place where it seemed to end, it did end there.
    let mut now = vec![0; AREA_AT as usize];
    read_at(0, &mut now)?;
    view.whole = matches!(Header::find(&now), Found::Log(now) if now.log == header.log
        && (header.head.position..=after.position).contains(&now.head.position));
    Ok(Some(view))
}

/// What several replicas say together.
#[derive(Clone, Debug)]
pub struct Read {
    /// The records, oldest first.
    pub records: Vec<(u64, Vec<u8>)>,
    /// Records up to this one are known to be acknowledged; what follows may be, or may be gone with the next writer.
    pub acknowledged: u64,
    /// How many replicas the log has, and how many of them were seen.
    pub replicas: u16,
    /// See `replicas`.
    pub seen: usize,
    /// Whether a majority was seen, whole: then no acknowledged record is missing at the end.
    pub complete: bool,
}

/// Takes the log that a writer would take, of the replicas that were seen.
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
    use crate::log::{Settings, What, Writer};

    /// A writer of one replica, whose memory is at hand.
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

    /// Looks while the writer appends so many records after the first header was read.
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
