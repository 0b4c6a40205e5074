//! Requests that a ring of the host carries: what acknowledges them, and how packets go on where the ring does not.

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::util::*;
use crate::sync::{Mutex, MutexGuard};
use crate::*;

/// Requests of side 0 that side 1 has not taken.
#[derive(Debug, Default)]
pub(super) struct Ring {
    pub(super) requests: Vec<(Ticket, Record)>,
    pub(super) is_full: bool,
    /// Memory that requests name, and what may be done with it.
    lent: Option<Lent>,
    /// Set when a lane may put requests into it too.
    lanes: bool,
    /// Set when lanes may no longer put requests into it from the next loan on.
    pub(super) is_closed: bool,
    /// Set when a lane is to hear that others have ended.
    pub(super) tells_ended: bool,
}

/// A ring as the device and the lanes have it.
#[derive(Clone, Debug)]
pub(super) struct Shared(pub(super) Arc<Mutex<Ring>>);

/// Memory in which side 0's region begins, as side 1 reads it.
#[derive(Clone, Debug)]
struct Lent {
    memory: Arc<dyn Memory>,
    bytes_min: usize,
    /// Cleared when the loan has ended.
    open: Arc<AtomicBool>,
}

impl PeerRing for Shared {
    fn put(&self, ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> Put {
        let mut ring = self.0.lock();
        let record = Record::of(vec![0; bytes]);
        if ring.is_full || !fill(&record) {
            return Put::Not;
        }
        ring.requests.push((ticket, record));
        if ring.tells_ended {
            Put::DoneAndEnded
        } else {
            Put::Done
        }
    }
}

impl Rings for Shared {
    fn reach(&mut self, _: (IpAddr, Qpn)) -> bool {
        true
    }

    fn put(&mut self, _: (IpAddr, Qpn), ticket: Ticket, bytes: usize, fill: &mut Fill<'_>) -> bool {
        PeerRing::put(self, ticket, bytes, fill) != Put::Not
    }

    fn ring_to(&mut self, _: (IpAddr, Qpn)) -> Option<Arc<dyn PeerRing>> {
        let ring = self.0.lock();
        let lanes = ring.lanes && !ring.is_closed;
        drop(ring);
        lanes.then(|| Arc::new(self.clone()) as Arc<dyn PeerRing>)
    }

    fn named_bytes_min(&self) -> usize {
        let ring = self.0.lock();
        ring.lent.as_ref().map_or(usize::MAX, |lent| lent.bytes_min)
    }

    fn put_named(&mut self, _: (IpAddr, Qpn), ticket: Ticket, heads: &[u8], parts: &[Part]) -> bool {
        let mut ring = self.0.lock();
        let Some(lent) = ring.lent.clone().filter(|_| !ring.is_full) else {
            return false;
        };
        let mut record = Record::of(heads.to_vec());
        record.named = Some((lent, parts.to_vec()));
        ring.requests.push((ticket, record));
        true
    }
}

#[derive(Debug)]
pub(super) struct Record {
    pub(super) bytes: RefCell<Vec<u8>>,
    named: Option<(Lent, Vec<Part>)>,
}

impl Record {
    pub(super) fn of(bytes: Vec<u8>) -> Record {
        Record {
            bytes: RefCell::new(bytes),
            named: None,
        }
    }
}

impl Room for Record {
    fn write(&self, at: usize, bytes: &[u8]) {
        self.bytes.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn write_from(&self, at: usize, from: &dyn Memory, offset: u64, len: usize) -> Result<(), Fault> {
        from.read(offset, &mut self.bytes.borrow_mut()[at..at + len])
    }
}

impl RingBytes for Record {
    fn bytes(&self) -> usize {
        let parts = self.named.iter().flat_map(|(_, parts)| parts);
        self.held() + parts.map(|part| part.len as usize).sum::<usize>()
    }

    fn held(&self) -> usize {
        self.bytes.borrow().len()
    }

    fn read(&self, at: usize, out: &mut [u8]) -> Result<(), PeerFault> {
        let mut all = self.bytes.borrow().clone();
        if let Some((lent, parts)) = self.named.as_ref().filter(|_| at + out.len() > all.len()) {
            for part in parts {
                let from = all.len();
                all.resize(from + part.len as usize, 0);
                lent.memory.read(part.offset, &mut all[from..]).unwrap();
            }
            if !lent.open.load(Ordering::Relaxed) {
                return Err(PeerFault::Ended);
            }
        }
        out.copy_from_slice(&all[at..at + out.len()]);
        Ok(())
    }

    fn read_to(&self, at: usize, to: &dyn Memory, offset: u64, len: usize) -> Result<(), PeerFault> {
        let mut bytes = vec![0; len];
        self.read(at, &mut bytes)?;
        to.write(offset, &bytes).map_err(PeerFault::Own)
    }
}

/// Every kind of retransmission, without lanes and with them.
const MODES: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];
/// Where the SEND that lends a host's lanes begins, in both memories.
const WARM: u64 = MEMORY as u64 - 8;

/// A pair on one host, with a ring from side 0 to side 1.
pub(super) struct Host {
    pub(super) pair: Pair,
    pub(super) shared: Shared,
    /// Set when side 0 posts to its lane first, and both sides take and end requests by theirs.
    pub(super) lanes: bool,
    /// Requests that were posted, taken and ended without the device.
    pub(super) by_lane: [u64; 3],
    /// Set when the lanes cover none of the test's requests.
    pub(super) by_device: bool,
    /// Packets that each side had sent before the test.
    sent_before: [u64; 2],
}

/// A test with lanes shows nothing of them if none of its requests went by a lane, unless it shows that none may.
impl Drop for Host {
    fn drop(&mut self) {
        if self.lanes && !std::thread::panicking() {
            let none = self.by_lane == [0; 3];
            assert_eq!(none, self.by_device, "{:?} went by lanes", self.by_lane);
        }
    }
}

impl Host {
    pub(super) fn new(selective: bool, lanes: bool) -> Host {
        Host::with(lanes, |rtr, _| rtr.selective = Some(selective))
    }

    /// Returns a host whose attributes to RTR and to RTS are changed by `change`.
    pub(super) fn with(lanes: bool, change: impl Fn(&mut QpAttributes, &mut QpAttributes)) -> Host {
        let mut pair = Pair::with(|rtr, rts| {
            (rts.timeout, rts.retry_count) = (Some(10), Some(7));
            change(rtr, rts);
        });
        pair.set_local(true);
        let ring = Ring {
            lanes,
            ..Ring::default()
        };
        let mut host = Host {
            pair,
            shared: Shared(Arc::new(Mutex::new(ring))),
            lanes,
            by_lane: [0; 3],
            by_device: false,
            sent_before: [0; 2],
        };
        if lanes {
            // A queue pair has a lane once its user has asked for it.
            drop([0, 1].map(|i| host.lane(i)));
            host.warm();
        }
        host
    }

    /// Makes the device lend the lanes what they need, and teach them the regions, by requests that it posts and takes itself.
    pub(super) fn warm(&mut self) {
        for _ in 0..2 {
            self.pair.recv(1, 0, WARM, 8);
        }
        for _ in 0..2 {
            let sges = self.pair.sides[0].sge(WARM, 8);
            self.post(send(0, Operation::Send { imm: None }, sges));
            assert_eq!(self.take(true), Taken::Done);
        }
        for side in &mut self.pair.sides {
            assert_eq!(side.completed(), [(0, Status::Success); 2]);
        }
        self.by_lane = [0; 3];
        self.sent_before = [0, 1].map(|i| self.pair.sides[i].rnic.counters().sent_pkts);
    }

    pub(super) fn ring(&self) -> MutexGuard<'_, Ring> {
        self.shared.0.lock()
    }

    pub(super) fn lane(&mut self, i: usize) -> DirectLane {
        let side = &mut self.pair.sides[i];
        side.rnic.direct_lane(side.qpn).unwrap()
    }

    /// Posts a request on side 0, whose packets go to side 1 at once.
    pub(super) fn post(&mut self, request: SendRequest) {
        self.try_post(request).unwrap();
    }

    pub(super) fn try_post(&mut self, request: SendRequest) -> Result<(), PostError> {
        let mut request = Some(request);
        let now = self.pair.now;
        if self.lanes {
            let lane = self.lane(0);
            let posted = lane.post(&mut request, || now);
            if !matches!(posted, Directly::Not) {
                self.by_lane[0] += 1;
                if let Directly::DoneAndTell(delivery) = posted {
                    self.pair.sides[0].rnic.deliver(now, delivery);
                }
                return Ok(());
            }
        }
        self.post_to_device(request.unwrap())
    }

    pub(super) fn post_to_device(&mut self, request: SendRequest) -> Result<(), PostError> {
        let mut buf = TransmitBuf::new(1 << 18, true);
        let (now, side) = (self.pair.now, &mut self.pair.sides[0]);
        let qpn = side.qpn;
        side.rnic
            .post_send_into(now, qpn, request, &mut buf, &mut self.shared)?;
        self.carry(&buf);
        self.transmit();
        Ok(())
    }

    /// Sends what side 0 has to send.
    pub(super) fn transmit(&mut self) {
        let mut buf = TransmitBuf::new(1 << 18, true);
        loop {
            buf.clear();
            let (now, rnic) = (self.pair.now, &mut self.pair.sides[0].rnic);
            let more = rnic.poll_transmit_with(now, &mut buf, &mut self.shared, false);
            self.carry(&buf);
            if !more {
                return;
            }
        }
    }

    pub(super) fn carry(&mut self, buf: &TransmitBuf) {
        for train in buf.trains() {
            let bytes = buf.bytes()[train.range.clone()].to_vec();
            let packet = (train.path, bytes, train.segment_bytes, train.local);
            self.pair.sides[1].inbox.push_back(packet);
        }
    }

    pub(super) fn send(&mut self, wr_id: u64, offset: u64, length: u32) {
        let sges = self.pair.sides[0].sge(offset, length);
        self.post(send(wr_id, Operation::Send { imm: None }, sges));
    }

    /// Side 1 takes the oldest request out of the ring, and side 0 hears of it if `tells`.
    pub(super) fn take(&mut self, tells: bool) -> Taken {
        let (ticket, record) = self.ring().requests.remove(0);
        let taken = self.take_record(&record);
        if tells {
            self.hear(ticket, taken);
        }
        taken
    }

    /// Side 1 takes a request, by its lane if that takes it.
    pub(super) fn take_record(&mut self, record: &Record) -> Taken {
        let src = self.pair.sides[0].address;
        let (now, rnic) = (self.pair.now, &mut self.pair.sides[1].rnic);
        if self.lanes {
            let mut deliveries = Vec::new();
            let mut recent = Recent::default();
            if rnic
                .lanes()
                .take(src, record, &mut recent, || now, &mut deliveries)
            {
                self.by_lane[1] += 1;
                for delivery in deliveries {
                    rnic.deliver(now, delivery);
                }
                return Taken::Done;
            }
            assert!(deliveries.is_empty());
        }
        let outcome = rnic.handle_request(now, src, record);
        let mut bytes = vec![0; RingBytes::bytes(record)];
        let is_there = record.read(0, &mut bytes).is_ok();
        if outcome.is_none() && is_there {
            end_packet(&mut bytes);
            let (path, length) = (self.pair.path(0, self.pair.sides[1].address), bytes.len());
            self.pair.sides[1].inbox.push_back((path, bytes, length, true));
        }
        outcome.unwrap_or(if is_there { Taken::Deferred } else { Taken::Again })
    }

    /// Side 0 hears how side 1 has taken a request, by its lane if that can handle the news.
    pub(super) fn hear(&mut self, ticket: Ticket, taken: Taken) {
        let (now, rnic) = (self.pair.now, &mut self.pair.sides[0].rnic);
        if self.lanes && taken == Taken::Done {
            let (lanes, mut recent) = (rnic.lanes(), Recent::default());
            let mut deliveries = Vec::new();
            let has = lanes.has(&ticket, &mut recent);
            let ended = lanes.end(ticket, &mut recent, || now, &mut deliveries);
            assert!(has || !ended);
            self.by_lane[2] += u64::from(ended);
            for delivery in deliveries {
                rnic.deliver(now, delivery);
            }
            if ended {
                return;
            }
        }
        rnic.handle_taken(now, ticket, taken);
    }

    pub(super) fn received(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.pair.sides[1].memory.read(offset, &mut bytes).unwrap();
        bytes
    }

    pub(super) fn packets(&self) -> [u64; 2] {
        [0, 1].map(|i| self.pair.sides[i].rnic.counters().sent_pkts - self.sent_before[i])
    }
}

pub(super) fn send(wr_id: u64, operation: Operation, sges: SgeList) -> SendRequest {
    SendRequest {
        wr_id,
        operation,
        sges,
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    }
}

#[test]
fn send__is_acknowledged_by_being_taken() {
    for lanes in [false, true] {
        for (selective, length) in [
            (false, 8),
            (true, 8),
            (false, 0),
            (false, 300),
            (true, 5_000),
            (false, 32 << 10),
        ] {
            let mut host = Host::new(selective, lanes);
            let bytes = pattern(length);
            host.pair.sides[0].memory.write(64, &bytes).unwrap();
            host.pair.recv(1, 1, 0, 64 << 10);
            host.send(7, 64, length as u32);
            assert_eq!(host.ring().requests.len(), 1);
            assert_eq!(host.pair.sides[0].completed(), [], "not taken");
            assert_eq!(host.take(true), Taken::Done);
            assert_eq!(host.pair.sides[0].completed(), [(7, Status::Success)]);
            assert_eq!(host.pair.sides[1].completed(), [(1, Status::Success)]);
            assert!(host.received(0, length) == bytes);
            host.pair.run();
            let sent = (length as u64).div_ceil(1024).max(1);
            assert_eq!(host.packets(), [sent, 0], "no acknowledgement");
        }
    }
}

#[test]
fn write__with_immediate_data_and_a_long_message_go_in_order() {
    for (selective, lanes) in MODES {
        let mut host = Host::new(selective, lanes);
        let bytes = pattern(100_000);
        host.pair.sides[0].memory.write(0, &bytes).unwrap();
        host.pair.recv(1, 1, 0, 0);
        host.pair.recv(1, 2, 1 << 20, 8);
        let rkey = host.pair.sides[1].rkey;
        let operation = Operation::Write {
            va: IOVA + 512,
            rkey,
            imm: Some(9),
        };
        let sges = host.pair.sides[0].sge(0, 100_000);
        host.post(send(7, operation, sges));
        host.send(8, 0, 8);
        // The window lets more into the ring as the peer takes it.
        while !host.ring().requests.is_empty() {
            assert_eq!(host.take(true), Taken::Done);
            host.transmit();
        }
        let done = [(7, Status::Success), (8, Status::Success)];
        assert_eq!(host.pair.sides[0].completed(), done);
        assert_eq!(
            host.pair.sides[1].completed(),
            [(1, Status::Success), (2, Status::Success)]
        );
        assert!(host.received(512, 100_000) == bytes);
    }
}

#[test]
fn send__without_a_receive_goes_on_by_packets() {
    for (selective, lanes) in MODES {
        let mut host = Host::new(selective, lanes);
        for wr_id in 0..3 {
            host.send(wr_id, 0, 8);
        }
        for _ in 0..3 {
            assert_eq!(host.take(true), Taken::Deferred);
        }
        while host.pair.step() {}
        assert_eq!(host.pair.sides[0].completed(), []);
        assert_eq!(host.pair.sides[0].rnic.counters().rcvd_rnr_err, 1);
        for wr_id in 0..4 {
            host.pair.recv(1, wr_id, 0, 8);
        }
        host.pair.run();
        let all = [0, 1, 2].map(|wr_id| (wr_id, Status::Success));
        assert_eq!(host.pair.sides[0].completed(), all);
        assert_eq!(host.pair.sides[1].completed(), all);
        // The ring carries requests again.
        host.send(3, 0, 8);
        assert_eq!(host.take(true), Taken::Done);
        assert_eq!(host.pair.sides[0].completed(), [(3, Status::Success)]);
    }
}

#[test]
fn send__that_is_refused_ends_both_as_in_packets() {
    for (selective, lanes) in MODES {
        let mut host = Host::new(selective, lanes);
        host.pair.recv(1, 1, 0, 8);
        host.pair.recv(1, 2, 0, 8);
        for (wr_id, length) in [(7, 8), (8, 9), (9, 8)] {
            host.send(wr_id, 0, length);
        }
        assert_eq!(host.take(true), Taken::Done);
        assert_eq!(host.take(true), Taken::Deferred);
        assert_eq!(host.take(true), Taken::Deferred);
        host.pair.run();
        let asked = [
            (7, Status::Success),
            (8, Status::RemoteInvalidRequest),
            (9, Status::Flushed),
        ];
        assert_eq!(host.pair.sides[0].completed(), asked);
        let received = [(1, Status::Success), (2, Status::LocalLength)];
        assert_eq!(host.pair.sides[1].completed(), received);
        assert_eq!(host.pair.sides[1].state(), QpState::Error);
    }
}

#[test]
fn link_broke__requests_go_on_by_packets_exactly_where_they_were() {
    // So many requests are taken before the link breaks, and side 0 hears of so many.
    for (selective, lanes) in MODES {
        for (taken, heard) in [(0, 0), (3, 0), (3, 2), (5, 1), (10, 0)] {
            let mut host = Host::new(selective, lanes);
            for wr_id in 0..10 {
                host.pair.recv(1, wr_id, wr_id * 2_000, 2_000);
                let bytes: Vec<u8> = pattern(1_500).iter().map(|byte| byte ^ wr_id as u8).collect();
                host.pair.sides[0].memory.write(wr_id * 2_000, &bytes).unwrap();
                host.send(wr_id, wr_id * 2_000, 1_500);
            }
            for n in 0..taken {
                assert_eq!(host.take(n < heard), Taken::Done);
            }
            host.ring().requests.clear();
            host.pair.set_local(false);
            host.pair.run();
            let all: Vec<_> = (0..10).map(|wr_id| (wr_id, Status::Success)).collect();
            assert_eq!(host.pair.sides[0].completed(), all);
            assert_eq!(host.pair.sides[1].completed(), all);
            for wr_id in 0..10 {
                let bytes: Vec<u8> = pattern(1_500).iter().map(|byte| byte ^ wr_id as u8).collect();
                assert!(host.received(wr_id * 2_000, 1_500) == bytes, "{wr_id}");
            }
        }
    }
}

#[test]
fn ring__that_is_full_lets_nothing_overtake() {
    for (selective, lanes) in MODES {
        let mut host = Host::new(selective, lanes);
        for wr_id in 0..6 {
            host.pair.recv(1, wr_id, 0, 64);
            host.ring().is_full = wr_id % 3 == 1;
            host.send(wr_id, 0, 8);
            // Requests in the ring and packets arrive in the order in which they were sent.
            while !host.ring().requests.is_empty() {
                host.take(true);
            }
            while host.pair.step() {}
        }
        let all: Vec<_> = (0..6).map(|wr_id| (wr_id, Status::Success)).collect();
        assert_eq!(host.pair.sides[1].completed(), all);
        assert_eq!(host.pair.sides[0].completed(), all);
        assert_eq!(host.pair.sides[0].rnic.counters().retransmitted_packets, 0);
    }
}

#[test]
fn send__behind_a_read_of_the_same_call_does_not_overtake_it() {
    for lanes in [false, true] {
        let mut host = Host::new(false, lanes);
        host.by_device = true;
        host.pair.recv(1, 1, 0, 64);
        let (rkey, qpn) = (host.pair.sides[1].rkey, host.pair.sides[0].qpn);
        let read = send(
            7,
            Operation::Read { va: IOVA, rkey },
            host.pair.sides[0].sge(0, 100),
        );
        let behind = send(8, Operation::Send { imm: None }, host.pair.sides[0].sge(0, 8));
        for request in [read, behind] {
            let now = host.pair.now;
            host.pair.sides[0].rnic.post_send(now, qpn, request).unwrap();
        }
        let mut buf = TransmitBuf::new(1 << 18, true);
        let now = host.pair.now;
        let rnic = &mut host.pair.sides[0].rnic;
        assert!(
            rnic.poll_transmit_with(now, &mut buf, &mut host.shared, true),
            "there is more"
        );
        assert_eq!((buf.trains().len(), host.ring().requests.len()), (1, 0));
        host.carry(&buf);
        host.transmit();
        assert_eq!(host.ring().requests.len(), 1);
        while host.pair.step() {}
        assert_eq!(host.take(true), Taken::Done);
        assert_eq!(host.pair.sides[1].rnic.counters().out_of_sequence, 0);
        host.pair.run();
        let done = [(7, Status::Success), (8, Status::Success)];
        assert_eq!(host.pair.sides[0].completed(), done);
    }
}

#[test]
fn ticket__of_before_a_reset_ends_nothing() {
    for lanes in [false, true] {
        let mut host = Host::new(false, lanes);
        host.pair.recv(1, 1, 0, 8);
        host.send(7, 0, 8);
        let (ticket, _) = host.ring().requests.remove(0);
        let (asking, answering) = (host.pair.sides[0].qpn, host.pair.sides[1].qpn);
        host.pair.modify(0, QpState::Reset, &QpAttributes::default());
        // Where side 1 is.
        let psn = Psn::new(PSN).plus(2 * u32::from(lanes));
        let change = |_: &mut QpAttributes, rts: &mut QpAttributes| rts.sq_psn = Some(psn);
        host.pair.connect_qp(0, asking, answering, &change, QpState::Rts);
        host.pair.set_local(true);
        host.send(8, 0, 8);
        let now = host.pair.now;
        let rnic = &mut host.pair.sides[0].rnic;
        rnic.handle_taken(now, ticket, Taken::Done);
        assert_eq!(host.pair.sides[0].completed(), []);
        assert_eq!(host.take(true), Taken::Done);
        assert_eq!(host.pair.sides[0].completed(), [(8, Status::Success)]);
    }
}

#[test]
fn taken__what_a_peer_cannot_have_taken_ends_nothing() {
    for lanes in [false, true] {
        let mut host = Host::new(false, lanes);
        host.pair.recv(1, 1, 0, 8);
        host.send(7, 0, 8);
        let (ticket, _) = host.ring().requests[0];
        let now = host.pair.now;
        for end in [ticket.end.plus(1), ticket.end.minus(1), ticket.end.plus(1 << 23)] {
            let forged = Ticket { end, ..ticket };
            host.pair.sides[0].rnic.handle_taken(now, forged, Taken::Done);
        }
        let unknown = Qpn::new(0x77_0000);
        let forged = Ticket {
            qpn: unknown,
            ..ticket
        };
        host.pair.sides[0].rnic.handle_taken(now, forged, Taken::Done);
        assert_eq!(host.pair.sides[0].completed(), []);
        assert_eq!(host.take(true), Taken::Done);
        assert_eq!(host.pair.sides[0].completed(), [(7, Status::Success)]);
    }
}

#[test]
fn handle_request__of_anything_else_is_left_to_packets() {
    for lanes in [false, true] {
        let mut host = Host::new(false, lanes);
        host.pair.recv(1, 1, 0, 8);
        host.send(7, 0, 8);
        let bytes = host.ring().requests[0].1.bytes.borrow().clone();
        let src = host.pair.sides[0].address;
        let now = host.pair.now;
        let rnic = &mut host.pair.sides[1].rnic;
        let mut handle = |src, bytes: &[u8]| {
            let record = Record::of(bytes.to_vec());
            rnic.handle_request(now, src, &record)
        };
        assert_eq!(handle(IpAddr::from([10, 0, 0, 9]), &bytes), None, "another host");
        for len in 0..12 {
            assert_eq!(handle(src, &bytes[..len]), None, "{len} bytes");
        }
        // Opcode, version, P_Key, QPN, PSN.
        for (at, value) in [
            (0, 0xff),
            (0, 0x0c),
            (0, 0x11),
            (1, 0x01),
            (2, 0x12),
            (7, bytes[7] ^ 1),
            (11, bytes[11] ^ 1),
        ] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            assert_eq!(handle(src, &bytes), None, "byte {at} is {value:#x}");
        }
        let long = [&bytes[..12], &vec![0; 300 << 10]].concat();
        assert_eq!(handle(src, &long), None, "longer than any");
        assert_eq!(host.pair.sides[1].completed(), []);
        assert_eq!(host.take(true), Taken::Done);
    }
}

#[test]
fn stopped__a_peer_that_takes_nothing_ends_the_connection_when_the_user_said() {
    for lanes in [false, true] {
        let mut host = Host::new(false, lanes);
        host.send(7, 0, 8);
        host.pair.stopped[1] = true;
        host.pair.run();
        assert_eq!(host.pair.sides[0].completed(), [(7, Status::RetryExceeded)]);
    }
}

/// A pair whose requests name their memory from so many bytes on.
fn lending(selective: bool, bytes_min: usize, lanes: bool) -> Host {
    let mut host = Host::new(selective, lanes);
    host.ring().lent = Some(Lent {
        memory: host.pair.sides[0].memory.clone(),
        bytes_min,
        open: Arc::new(AtomicBool::new(true)),
    });
    if lanes {
        // The lanes learn from which length on a request may name its memory.
        host.pair.modify(0, QpState::Rts, &QpAttributes::default());
        host.warm();
    }
    host
}

impl Host {
    fn end_loan(&self) {
        let ring = self.ring();
        ring.lent.as_ref().unwrap().open.store(false, Ordering::Relaxed);
    }

    /// Side 1 takes all requests, as they come.
    pub(super) fn take_all(&mut self) -> Vec<Taken> {
        let mut taken = Vec::new();
        while !self.ring().requests.is_empty() {
            taken.push(self.take(true));
            self.transmit();
        }
        taken
    }
}

#[test]
fn send__that_names_its_memory_is_copied_once() {
    for (selective, lanes) in MODES {
        let mut host = lending(selective, 1_000, lanes);
        host.by_device = true;
        let bytes = pattern(200_000);
        host.pair.sides[0].memory.write(0, &bytes).unwrap();
        host.pair.recv(1, 1, 0, 200_000);
        let lkey = host.pair.sides[0].lkey;
        let parts = [(0, 10), (10, 99_990), (100_000, 100_000)];
        let sges = parts.map(|(at, length)| Sge::new(IOVA + at, length, lkey));
        host.post(send(7, Operation::Send { imm: Some(3) }, sges.as_slice().into()));
        let (held, bytes_of_first) = {
            let (_, first) = &host.ring().requests[0];
            (first.held(), RingBytes::bytes(first))
        };
        assert!(held < 64 && bytes_of_first > 32 << 10, "a record of {held}");
        assert_eq!(host.pair.sides[0].completed(), [], "the memory is in use");
        assert!(host.take_all().iter().all(|taken| *taken == Taken::Done));
        assert_eq!(host.pair.sides[0].completed(), [(7, Status::Success)]);
        assert_eq!(host.pair.sides[1].completed(), [(1, Status::Success)]);
        assert!(host.received(0, 200_000) == bytes);
    }
}

/// Somebody may look at the first bytes of a WRITE, which must not be placed twice.
#[test]
fn write__holds_its_payload() {
    for lanes in [false, true] {
        let mut host = lending(false, 1_000, lanes);
        host.by_device = true;
        let bytes = pattern(100_000);
        host.pair.sides[0].memory.write(0, &bytes).unwrap();
        let (va, rkey) = (IOVA + 512, host.pair.sides[1].rkey);
        let sges = host.pair.sides[0].sge(0, 100_000);
        host.post(send(7, Operation::Write { va, rkey, imm: None }, sges));
        assert!(host.ring().requests[0].1.named.is_none());
        assert!(host.take_all().iter().all(|taken| *taken == Taken::Done));
        assert_eq!(host.pair.sides[0].completed(), [(7, Status::Success)]);
        assert!(host.received(512, 100_000) == bytes);
    }
}

/// The loan ends before some record of a message is taken: the first, one in the middle, the last.
#[test]
fn send__whose_loan_has_ended_goes_on_by_packets() {
    for (selective, lanes) in MODES {
        for before in 0..3 {
            let mut host = lending(selective, 1_000, lanes);
            host.by_device = true;
            let bytes = pattern(150_000);
            host.pair.sides[0].memory.write(0, &bytes).unwrap();
            host.pair.recv(1, 1, 0, 150_000);
            host.pair.recv(1, 2, 200_000, 8);
            host.send(7, 0, 150_000);
            host.send(8, 0, 8);
            for _ in 0..before {
                assert_eq!(host.take(true), Taken::Done);
                host.transmit();
            }
            host.end_loan();
            assert_eq!(host.take(true), Taken::Again);
            host.ring().lent = None;
            while !host.ring().requests.is_empty() {
                assert_ne!(host.take(true), Taken::Done);
            }
            host.pair.run();
            let done = [(7, Status::Success), (8, Status::Success)];
            assert_eq!(host.pair.sides[0].completed(), done);
            let received = [(1, Status::Success), (2, Status::Success)];
            assert_eq!(host.pair.sides[1].completed(), received);
            assert!(host.received(0, 150_000) == bytes);
            let counters = host.pair.sides[0].rnic.counters();
            assert_eq!(counters.local_ack_timeout_err, 0);
            // Reports of gaps use up retries where they are no routine.
            assert!(selective || counters.packet_seq_err == 0, "{before}: a retry");
        }
    }
}

#[test]
fn send__that_names_its_memory_without_a_receive() {
    for (selective, lanes) in MODES {
        let mut host = lending(selective, 1_000, lanes);
        host.by_device = true;
        let bytes = pattern(40_000);
        host.pair.sides[0].memory.write(0, &bytes).unwrap();
        host.send(7, 0, 40_000);
        // A request behind it is no gap.
        host.send(8, 0, 8);
        assert_eq!(host.take(true), Taken::Deferred);
        assert_eq!(host.take(true), Taken::Deferred);
        while host.pair.step() {}
        assert_eq!(host.pair.sides[0].rnic.counters().packet_seq_err, 0);
        assert_eq!(host.pair.sides[0].rnic.counters().rcvd_rnr_err, 1);
        host.pair.recv(1, 1, 0, 40_000);
        host.pair.recv(1, 2, 50_000, 8);
        host.take_all();
        host.pair.run();
        let done = [(7, Status::Success), (8, Status::Success)];
        assert_eq!(host.pair.sides[0].completed(), done);
        assert!(host.received(0, 40_000) == bytes);
    }
}

/// A loan that looks at the completions when it ends.
#[derive(Debug)]
struct Watched {
    cq: CompletionQueue,
    completed_before: AtomicBool,
    ended: AtomicBool,
}

impl Lending for Watched {
    fn end(&self) {
        let is_any = self.cq.state().0 > 0;
        if !self.ended.swap(true, Ordering::Relaxed) {
            self.completed_before.store(is_any, Ordering::Relaxed);
        }
    }
}

/// A program may use the memory of a request again as soon as it sees the completion.
#[test]
fn lending__ends_before_a_request_that_was_not_taken_completes() {
    for lanes in [false, true] {
        let mut host = lending(false, 1_000, lanes);
        host.by_device = true;
        let side = &mut host.pair.sides[0];
        let lending = Arc::new(Watched {
            cq: side.rnic.cq(side.cq).unwrap(),
            completed_before: AtomicBool::new(true),
            ended: AtomicBool::new(false),
        });
        let region = side.rnic.lendable(side.qpn, side.lkey, lending.clone());
        assert_eq!(region.unwrap().access, Access::REMOTE_READ);
        host.send(7, 0, 40_000);
        let (now, side) = (host.pair.now, &mut host.pair.sides[0]);
        let to = QpState::Error;
        let failed = side.rnic.modify_qp(now, side.qpn, to, &QpAttributes::default());
        failed.unwrap();
        assert_eq!(side.completed(), [(7, Status::Flushed)]);
        assert!(lending.ended.load(Ordering::Relaxed));
        assert!(!lending.completed_before.load(Ordering::Relaxed));
        assert_eq!(side.rnic.poll_revoked(), Some(side.qpn));
    }
}
