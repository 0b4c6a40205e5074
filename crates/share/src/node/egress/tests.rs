//! The scheduler on send queues that complete what the tests say.

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU16;

use rdmux_rnic::sched::{CLASSES, PIECE_BYTES_MAX, Policy};

use super::*;

const MTU: u32 = 4096;

/// A body is the number of its request.
type Body = u64;

/// A device whose send queues complete what they are told to.
struct Bench {
    egress: Egress<Body>,
    now: Time,
    /// Pieces that are posted, for each send queue.
    posted: HashMap<GroupId, VecDeque<Piece>>,
    /// Bytes that were posted, for each flow.
    bytes: HashMap<FlowId, u64>,
    tenant: TenantId,
    owners: u32,
}

impl Bench {
    /// Returns a device whose windows are `window_bytes`.
    fn new(window_bytes: u32) -> Bench {
        let windows = WindowLimits {
            bytes_min: window_bytes,
            bytes_max: window_bytes,
            bytes_initial: window_bytes,
            ..WindowLimits::default()
        };
        let device = DeviceLimits {
            bytes_min: u32::MAX,
            bytes_max: u32::MAX,
            ..DeviceLimits::default()
        };
        Bench::with(windows, device)
    }

    fn with(windows: WindowLimits, device: DeviceLimits) -> Bench {
        let limits = Limits {
            windows,
            device,
            ..Limits::default()
        };
        let mut egress = Egress::new(Time(1_000_000), limits);
        let tenant = egress.add_tenant(&Entitlement::default());
        Bench {
            egress,
            now: Time(1_000_000),
            posted: HashMap::new(),
            bytes: HashMap::new(),
            tenant,
            owners: 0,
        }
    }

    fn group(&mut self, class: usize) -> GroupId {
        self.group_of(self.tenant, &options(class))
    }

    fn group_of(&mut self, tenant: TenantId, options: &GroupOptions) -> GroupId {
        let group = self.egress.add_group(self.now, tenant, options).unwrap();
        self.posted.insert(group, VecDeque::new());
        group
    }

    /// Adds a flow to a group.
    fn flow_in(&mut self, group: GroupId) -> FlowId {
        self.owners += 1;
        let owner = Owner {
            application: self.owners % 3,
            qp: self.owners,
        };
        let flow = self.egress.add_flow(owner, 64).unwrap();
        self.egress.bind(self.now, flow, group);
        flow
    }

    /// Adds a flow with a send queue of its own.
    fn flow(&mut self) -> (FlowId, GroupId) {
        let group = self.group(0);
        (self.flow_in(group), group)
    }

    fn submit(&mut self, flow: FlowId, request: Request) {
        let accepted = self.egress.submit(self.now, flow, request, request.number);
        assert_eq!(accepted, Ok(()));
    }

    fn next_by(&mut self, gate: &mut impl Gate<Body>) -> Option<Piece> {
        let piece = self.egress.next(self.now, gate)?;
        self.posted.get_mut(&piece.group).unwrap().push_back(piece);
        *self.bytes.entry(piece.flow).or_default() += u64::from(piece.length);
        Some(piece)
    }

    fn next(&mut self) -> Option<Piece> {
        self.next_by(&mut Open)
    }

    /// Posts a piece, which there is.
    fn post_one(&mut self) -> Piece {
        self.next().expect("a piece")
    }

    /// Posts all that may be posted; returns the pieces.
    fn post(&mut self) -> Vec<Piece> {
        std::iter::from_fn(|| self.next()).collect()
    }

    /// Completes what is posted to a send queue, up to the next signaled piece. Returns false if there is none.
    fn complete(&mut self, group: GroupId) -> bool {
        let posted = self.posted.get_mut(&group).unwrap();
        let Some(at) = posted.iter().position(|piece| piece.signaled) else {
            return false;
        };
        let piece = posted[at];
        posted.drain(..=at);
        self.egress.completed(self.now, piece.id);
        true
    }

    /// Fails the first piece that is posted to a send queue, and flushes the others.
    fn fail(&mut self, group: GroupId, status: Status) {
        let posted = std::mem::take(self.posted.get_mut(&group).unwrap());
        for (at, piece) in posted.iter().enumerate() {
            let status = if at == 0 { status } else { Status::Flushed };
            self.egress.failed(self.now, piece.id, status);
        }
    }

    /// Returns what is over: number, status and length.
    fn done(&mut self) -> Vec<(u64, Status, u32)> {
        let done = std::iter::from_fn(|| self.egress.poll_done());
        done.map(|done| (done.number, done.status, done.length)).collect()
    }

    /// Posts and completes until a flow has posted so many bytes.
    fn run(&mut self, until: u64, messages: &mut [(FlowId, GroupId, Request)]) {
        let mut groups: Vec<GroupId> = messages.iter().map(|(_, group, _)| *group).collect();
        groups.dedup();
        while self.bytes.values().all(|bytes| *bytes < until) {
            for (flow, _, request) in &mut *messages {
                while self
                    .egress
                    .submit(self.now, *flow, *request, request.number)
                    .is_ok()
                {}
            }
            self.post();
            self.now = self.now + 1_000;
            for group in &groups {
                self.complete(*group);
            }
            self.done();
        }
    }
}

fn options(class: usize) -> GroupOptions {
    GroupOptions {
        class,
        path_mtu: MTU,
        depth: 64,
        slots: None,
        may_be_quiet: true,
    }
}

fn write(number: u64, length: u32) -> Request {
    Request {
        number,
        opcode: WcOpcode::Write,
        length,
        kept_bytes: 0,
        asks: true,
        cuts: true,
        takes_slot: false,
        refused: None,
    }
}

fn send(number: u64, length: u32) -> Request {
    Request {
        opcode: WcOpcode::Send,
        cuts: false,
        ..write(number, length)
    }
}

const WIDE: u32 = 16 << 20;
/// Longest piece while flows begin.
const PIECE: u32 = 16 << 10;
const OK: Status = Status::Success;

#[test]
fn of_wr_id__each_piece_and_no_other() {
    for (group, place) in [(0, 0), (u32::MAX, 0), (5, (1 << PLACE_BITS) - 1)] {
        let piece = PieceId {
            group: GroupId(group),
            place,
        };
        assert_eq!(PieceId::of_wr_id(piece.wr_id()), Some(piece));
    }
    assert_eq!(PieceId::of_wr_id(u64::MAX >> 1), None);
}

#[test]
fn next__pieces_in_order() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    bench.submit(flow, send(1, 50_000));
    bench.submit(flow, write(2, 2 * PIECE + 1));
    bench.submit(flow, write(3, 0));
    let pieces = bench.post();
    let seen: Vec<_> = pieces
        .iter()
        .map(|piece| (piece.offset, piece.length, piece.last))
        .collect();
    let expected = [
        (0, 50_000, true),
        (0, PIECE, false),
        (PIECE, PIECE, false),
        (2 * PIECE, 1, true),
        (0, 0, true),
    ];
    assert_eq!(seen, expected);
    assert!(pieces[0].is_whole() && pieces[4].is_whole() && !pieces[3].is_whole());
    assert!(bench.done().is_empty());
    while bench.complete(group) {}
    assert_eq!(
        bench.done(),
        [(1, OK, 50_000), (2, OK, 2 * PIECE + 1), (3, OK, 0)]
    );
}

/// Pieces of a flow that may have little to send cost a device in software as little as requests of its own would.
#[test]
fn next__short_pieces_of_who_sends_much_beside_who_does_not() {
    let mut bench = Bench::new(WIDE);
    bench.egress.long_pieces = true;
    let ((bulk, _), (sparse, _)) = (bench.flow(), bench.flow());
    // Alone it has long pieces, however it began.
    bench.submit(bulk, write(1, 1 << 20));
    assert!(bench.post().iter().all(|piece| piece.length == PIECE_BYTES_MAX));
    bench.submit(bulk, write(2, 1 << 20));
    let _ = bench.post_one();
    for number in 3..10 {
        bench.submit(sparse, write(number, PIECE_BYTES_MAX));
        let of_sparse = loop {
            let piece = bench.post_one();
            match piece.flow == sparse {
                true => break piece,
                false => assert_eq!(piece.length, PIECE),
            }
        };
        assert_eq!(of_sparse.length, PIECE_BYTES_MAX);
    }
}

#[test]
fn next__long_pieces_while_nobody_has_little_to_send() {
    let mut bench = Bench::new(WIDE);
    let (flow, _) = bench.flow();
    bench.submit(flow, write(1, 1 << 20));
    bench.now = bench.now + 20_000_000;
    let lengths: Vec<u32> = bench.post().iter().map(|piece| piece.length).collect();
    assert_eq!(lengths, [PIECE_BYTES_MAX; 16]);
}

#[test]
fn completed__what_asks_for_nothing_completes_with_what_asks() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    for number in 0..4 {
        let asks = number == 3;
        bench.submit(
            flow,
            Request {
                asks,
                ..send(number, 8)
            },
        );
    }
    let signaled: Vec<bool> = bench.post().iter().map(|piece| piece.signaled).collect();
    assert_eq!(signaled, [false, false, false, true]);
    assert!(bench.complete(group));
    assert_eq!(bench.done(), [(3, OK, 8)]);
    // All of them have left the flow.
    (0..64).for_each(|number| bench.submit(flow, send(number, 8)));
    assert_eq!(bench.egress.submit(bench.now, flow, send(64, 8), 64), Err(Full));
}

/// A program may never ask, and its requests have to leave the window and the send queue all the same.
#[test]
fn completed__of_a_flow_that_never_asks() {
    for (length, depth) in [(8, 64), (8, 1), (8, 2), (8, 3), (100_000, 64), (0, 64)] {
        let mut bench = Bench::new(WIDE);
        let group = bench.group_of(bench.tenant, &GroupOptions { depth, ..options(0) });
        let flow = bench.flow_in(group);
        for number in 0..1000 {
            let request = Request {
                asks: false,
                ..write(number, length)
            };
            while bench.egress.submit(bench.now, flow, request, number).is_err() {
                bench.post();
                assert!(bench.posted[&group].len() <= depth as usize);
                assert!(bench.complete(group), "{length} {depth}: nothing is signaled");
            }
        }
        assert!(bench.done().is_empty());
    }
}

#[test]
fn failed__status_once_then_flushes_in_order() {
    let mut bench = Bench::new(WIDE);
    let group = bench.group_of(
        bench.tenant,
        &GroupOptions {
            depth: 4,
            ..options(0)
        },
    );
    let flow = bench.flow_in(group);
    bench.submit(flow, send(1, 8));
    bench.submit(flow, write(2, 6 * PIECE));
    bench.submit(
        flow,
        Request {
            asks: false,
            ..send(3, 8)
        },
    );
    bench.submit(flow, send(4, 8));
    assert_eq!(bench.post().len(), 4, "the send queue holds no more");
    bench.complete(group);
    assert_eq!(bench.done(), [(1, OK, 8)]);
    // The second one is in flight in part, and the others are not.
    bench.fail(group, Status::RemoteAccess);
    let expected = [
        (2, Status::RemoteAccess, 0),
        (3, Status::Flushed, 0),
        (4, Status::Flushed, 0),
    ];
    assert_eq!(bench.done(), expected);
    // So are those that come later, until it is reset.
    bench.submit(
        flow,
        Request {
            asks: false,
            ..send(5, 8)
        },
    );
    assert_eq!(bench.done(), [(5, Status::Flushed, 0)]);
    assert!(bench.next().is_none());
}

#[test]
fn failed__the_device_completes_first_what_it_has() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    (0..3).for_each(|number| bench.submit(flow, send(number, 8)));
    bench.post();
    bench.submit(flow, send(3, 8));
    bench.egress.fail(bench.now, flow);
    assert!(bench.done().is_empty() && bench.next().is_none());
    bench.complete(group);
    bench.fail(group, Status::Flushed);
    let flushed = |number| (number, Status::Flushed, 0);
    assert_eq!(bench.done(), [(0, OK, 8), flushed(1), flushed(2), flushed(3)]);
}

#[test]
fn refused__fails_in_its_place() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    (0..4).for_each(|number| bench.submit(flow, send(number, 8)));
    let _ = bench.post_one();
    let second = bench.egress.next(bench.now, &mut Open).unwrap();
    bench
        .egress
        .refused(bench.now, &[second], Status::LocalQpOperation);
    assert!(bench.done().is_empty());
    bench.complete(group);
    let expected = [
        (0, OK, 8),
        (1, Status::LocalQpOperation, 0),
        (2, Status::Flushed, 0),
        (3, Status::Flushed, 0),
    ];
    assert_eq!(bench.done(), expected);
}

/// The device refuses one of a list: none of those behind it is posted.
#[test]
fn refused__a_list() {
    let mut bench = Bench::new(2 * PIECE);
    let (flow, group) = bench.flow();
    bench.submit(flow, send(0, 8));
    bench.submit(flow, write(1, PIECE + 8));
    bench.submit(flow, send(2, 8));
    let _ = bench.post_one();
    let list: Vec<Piece> = std::iter::from_fn(|| bench.egress.next(bench.now, &mut Open)).collect();
    assert_eq!(list.len(), 3);
    bench.egress.refused(bench.now, &list, Status::LocalQpOperation);
    assert!(bench.done().is_empty());
    bench.complete(group);
    let expected = [
        (0, OK, 8),
        (1, Status::LocalQpOperation, 0),
        (2, Status::Flushed, 0),
    ];
    assert_eq!(bench.done(), expected);
    // Nothing of them is in flight: the window takes as much as before.
    let other = bench.flow_in(group);
    bench.submit(other, write(3, 2 * PIECE));
    assert_eq!(bench.post().len(), 2);
}

#[test]
fn submit__of_what_cannot_be_posted() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    bench.submit(flow, send(0, 8));
    let refused = Some(Status::LocalLength);
    bench.submit(
        flow,
        Request {
            refused,
            ..send(1, 8)
        },
    );
    bench.submit(flow, send(2, 8));
    assert_eq!(bench.post().len(), 1);
    bench.complete(group);
    let expected = [(0, OK, 8), (1, Status::LocalLength, 0), (2, Status::Flushed, 0)];
    assert_eq!(bench.done(), expected);
}

#[test]
fn kept_bytes__until_they_are_posted_or_gone() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    let inline = |number| Request {
        kept_bytes: 100,
        ..send(number, 100)
    };
    (0..4).for_each(|number| bench.submit(flow, inline(number)));
    assert_eq!(bench.egress.kept_bytes(1), 400);
    let piece = bench.post_one();
    assert_eq!(bench.egress.body(&piece), Some(&0));
    assert_eq!(bench.egress.take_body(&piece), Some(0));
    assert_eq!(
        (bench.egress.kept_bytes(1), bench.egress.body(&piece)),
        (300, None)
    );
    let _ = bench.post_one();
    bench.fail(group, Status::RemoteAccess);
    assert_eq!(bench.egress.kept_bytes(1), 0);
    bench.egress.reset(bench.now, flow);
    bench.egress.bind(bench.now, flow, group);
    bench.submit(flow, inline(9));
    bench.egress.remove_flow(bench.now, flow);
    assert_eq!(bench.egress.kept_bytes(1), 0);
    assert_eq!(bench.egress.kept_bytes(77), 0);
}

#[test]
fn pause__begins_nothing_until_it_is_resumed() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    bench.submit(flow, write(0, 3 * PIECE));
    let _ = bench.post_one();
    bench.egress.pause(bench.now, flow);
    assert!(bench.next().is_none());
    bench.submit(flow, write(1, 8));
    assert!(bench.next().is_none());
    bench.egress.resume(bench.now, flow);
    assert_eq!(bench.post().len(), 3);
    while bench.complete(group) {}
    assert_eq!(bench.done(), [(0, OK, 3 * PIECE), (1, OK, 8)]);
    // One that is paused fails without a piece.
    bench.egress.pause(bench.now, flow);
    bench.submit(flow, write(2, 8));
    bench.egress.fail(bench.now, flow);
    assert_eq!(bench.done(), [(2, Status::Flushed, 0)]);
}

#[test]
fn reset__forgets_and_begins_again() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    bench.submit(flow, write(0, 8));
    let before = bench.post_one();
    bench.submit(flow, write(1, 8));
    bench.egress.reset(bench.now, flow);
    bench.egress.remove_group(group);
    let group = bench.group(0);
    bench.submit(flow, write(2, 8));
    assert!(bench.next().is_none(), "it is bound to no send queue");
    bench.egress.bind(bench.now, flow, group);
    let after = bench.post_one();
    assert_ne!(before.id, after.id);
    // A late completion of the send queue before concerns nobody.
    bench.egress.completed(bench.now, before.id);
    bench.egress.failed(bench.now, before.id, Status::RemoteAccess);
    assert!(bench.done().is_empty());
    bench.complete(group);
    assert_eq!(bench.done(), [(2, OK, 8)]);
}

#[test]
fn completed__of_pieces_that_are_not_there() {
    let mut bench = Bench::new(WIDE);
    let (flow, group) = bench.flow();
    bench.submit(flow, write(0, 8));
    let piece = bench.post_one().id;
    for place in [piece.place + 1, piece.place.wrapping_sub(1), u32::MAX] {
        bench.egress.completed(bench.now, PieceId { place, ..piece });
    }
    let group_of = |group| PieceId { group, ..piece };
    for group in [GroupId(7), GroupId(u32::MAX)] {
        bench.egress.completed(bench.now, group_of(group));
    }
    assert!(bench.done().is_empty());
    bench.complete(group);
    bench.egress.completed(bench.now, piece);
    assert_eq!(bench.done(), [(0, OK, 8)]);
}

#[test]
fn next__as_much_as_the_window_holds() {
    let mut bench = Bench::new(4 * PIECE);
    let (flow, group) = bench.flow();
    let (other, _) = bench.flow();
    bench.submit(flow, write(0, 1 << 20));
    let bytes = |pieces: Vec<Piece>| pieces.iter().map(|piece| piece.length).sum::<u32>();
    assert_eq!(bytes(bench.post()), 4 * PIECE);
    // Another one has a window of its own.
    bench.submit(other, write(1, 8));
    assert_eq!(bench.post().len(), 1);
    assert!(bench.complete(group));
    assert_eq!(bytes(bench.post()), PIECE);
    while bench.complete(group) {}
    assert_eq!(bytes(bench.post()), 4 * PIECE);
}

/// Bytes, not messages or pieces, are shared.
#[test]
fn next__flows_share_bytes_whatever_their_messages_are() {
    for lengths in [[2 << 10, 1 << 20], [1 << 20, 1 << 20], [100, 50_000]] {
        for shared in [false, true] {
            let mut bench = Bench::new(WIDE);
            // The send queue takes one piece at a time, as if the device was slower than anything here.
            let narrow = GroupOptions {
                depth: 1,
                ..options(0)
            };
            let group = bench.group_of(bench.tenant, &narrow);
            let mut messages: Vec<_> = lengths
                .iter()
                .map(|length| {
                    if shared {
                        (bench.flow_in(group), group, write(0, *length))
                    } else {
                        let group = bench.group_of(bench.tenant, &options(0));
                        (bench.flow_in(group), group, write(0, *length))
                    }
                })
                .collect();
            if !shared {
                // Each has a send queue of its own, so that nothing but the order of picking limits it.
                let turns = (0..4000).map(|turn| {
                    for (flow, group, request) in &messages {
                        let _ = bench.egress.submit(bench.now, *flow, *request, 0);
                        while turn % 16 == 0 && bench.complete(*group) {}
                    }
                    bench.next()
                });
                assert_eq!(turns.flatten().count(), 4000);
            } else {
                bench.run(10 << 20, &mut messages);
            }
            let bytes: Vec<u64> = messages.iter().map(|(flow, ..)| bench.bytes[flow]).collect();
            // A turn, a piece, and what a flow may be ahead as a new one.
            let apart = u64::from(PIECE + PIECE_BYTES_MAX + 2 * (64 << 10));
            let charged = |bytes: u64, length: u32| match length {
                0..CHARGE_MIN => bytes * u64::from(CHARGE_MIN) / u64::from(length.max(1)),
                _ => bytes,
            };
            let charged = [charged(bytes[0], lengths[0]), charged(bytes[1], lengths[1])];
            assert!(
                charged[0].abs_diff(charged[1]) <= apart,
                "{lengths:?}, shared: {shared}: {charged:?}"
            );
        }
    }
}

/// Each flow has a send queue of its own, whose window would let it send as much as it likes.
#[test]
fn next__the_window_of_the_device_has_the_hierarchy_decide() {
    let windows = WindowLimits {
        bytes_min: WIDE,
        bytes_max: WIDE,
        bytes_initial: WIDE,
        ..WindowLimits::default()
    };
    let device = DeviceLimits {
        bytes_min: 8 * PIECE,
        bytes_max: 8 * PIECE,
        ..DeviceLimits::default()
    };
    let mut bench = Bench::with(windows, device);
    let other = bench.egress.add_tenant(&Entitlement {
        weight: NonZeroU16::new(4).unwrap(),
        ..Entitlement::default()
    });
    let groups = [bench.tenant, other].map(|tenant| bench.group_of(tenant, &options(0)));
    let flows = groups.map(|group| bench.flow_in(group));
    // The device sends one piece after another, in the order in which they were posted.
    let mut sent = VecDeque::new();
    for turn in 0..20_000 {
        for flow in flows {
            while bench.egress.submit(bench.now, flow, write(0, 1 << 20), 0).is_ok() {}
        }
        let pieces = bench.post();
        sent.extend(pieces.iter().map(|piece| piece.group));
        let in_flight: usize = bench.posted.values().map(VecDeque::len).sum();
        // Pieces of a send queue count once one of it has completed.
        assert!(turn < 200 || in_flight <= 9, "{in_flight} pieces");
        bench.now = bench.now + 1_000;
        if let Some(group) = sent.pop_front() {
            bench.complete(group);
        }
        bench.done();
    }
    let [one, four] = flows.map(|flow| bench.bytes[&flow] as f64);
    assert!((3.9..4.1).contains(&(four / one)), "{}", four / one);
    // Peers that do not answer any longer shut the device for nobody.
    bench.post();
    let third = bench.flow().0;
    bench.submit(third, write(0, 8));
    assert!(bench.next().is_none());
    while bench.next().is_none() {
        let at = bench.egress.next_time(bench.now).expect("the device is full");
        assert!(at > bench.now && at < bench.now + 100_000_000);
        bench.now = at;
    }
}

#[test]
fn next__tenants_share_by_weight() {
    let mut bench = Bench::new(WIDE);
    let heavy = Entitlement {
        weight: NonZeroU16::new(3).unwrap(),
        ..Entitlement::default()
    };
    let other = bench.egress.add_tenant(&Entitlement::default());
    bench.egress.set_tenant(bench.now, other, &heavy);
    let [one, two] = [bench.tenant, other].map(|tenant| {
        let group = bench.group_of(
            tenant,
            &GroupOptions {
                depth: 1 << 14,
                ..options(0)
            },
        );
        bench.flow_in(group)
    });
    for number in 0..32 {
        bench.submit(one, write(number, 1 << 20));
        bench.submit(two, write(number, 1 << 20));
    }
    assert_eq!((0..800).filter_map(|_| bench.next()).count(), 800);
    let ratio = bench.bytes[&two] as f64 / bench.bytes[&one] as f64;
    assert!((2.8..3.2).contains(&ratio), "{ratio}");
    // The first one is in the other tenant as well from now on, with what is in flight, and so they share equally.
    let first = *bench
        .posted
        .keys()
        .find(|group| bench.posted[group].front().is_some_and(|piece| piece.flow == one))
        .unwrap();
    bench.egress.move_group(bench.now, first, one, other);
    assert!(!bench.egress.has_groups(bench.tenant) && bench.egress.has_groups(other));
    bench.bytes.clear();
    assert_eq!((0..400).filter_map(|_| bench.next()).count(), 400);
    let ratio = bench.bytes[&two] as f64 / bench.bytes[&one] as f64;
    assert!((0.9..1.1).contains(&ratio), "{ratio}");
    while bench.complete(first) {}
    let whole = |(_, status, length): &(u64, Status, u32)| (*status, *length) == (OK, 1 << 20);
    let done = bench.done();
    assert!(!done.is_empty() && done.iter().all(whole), "{done:?}");
    // A tenant goes after its groups.
    for flow in [one, two] {
        bench.egress.remove_flow(bench.now, flow);
    }
    let groups: Vec<GroupId> = bench.posted.keys().copied().collect();
    groups
        .into_iter()
        .for_each(|group| bench.egress.remove_group(group));
    bench.egress.remove_tenant(other);
    assert_eq!(bench.egress.add_group(bench.now, other, &options(0)), None);
}

#[test]
fn next_time__of_a_tenant_at_its_ceiling() {
    let mut bench = Bench::new(WIDE);
    let slow = Entitlement {
        ceiling_bps: Some(8_000_000),
        ..Entitlement::default()
    };
    bench.egress.set_tenant(bench.now, bench.tenant, &slow);
    let (flow, _) = bench.flow();
    bench.submit(flow, write(0, 1 << 20));
    assert!(!bench.post().is_empty());
    let at = bench.egress.next_time(bench.now).unwrap();
    assert!(at > bench.now);
    bench.now = at;
    assert_eq!(bench.post().len(), 1);
}

#[test]
fn next__a_strict_class_comes_first() {
    let mut bench = Bench::new(WIDE);
    let mut classes = [Policy::default(); CLASSES];
    classes[CLASSES - 1] = Policy::Strict;
    let entitlement = Entitlement {
        classes,
        ..Entitlement::default()
    };
    bench.egress.set_tenant(bench.now, bench.tenant, &entitlement);
    let (bulk, _) = bench.flow();
    let group = bench.group(CLASSES - 1);
    let urgent = bench.flow_in(group);
    (0..8).for_each(|number| bench.submit(bulk, write(number, 1 << 20)));
    (0..4).for_each(|_| assert_eq!(bench.post_one().flow, bulk));
    (0..8).for_each(|number| bench.submit(urgent, write(number, 8)));
    (0..8).for_each(|_| assert_eq!(bench.post_one().flow, urgent));
    assert_eq!(bench.post_one().flow, bulk);
}

/// Lets a request of a flow be posted as far as its credits go, and refuses those of a certain number.
struct Credits {
    of: FlowId,
    left: u32,
    refuses: u64,
}

impl Gate<Body> for Credits {
    fn admit(&mut self, flow: FlowId, request: &Request, body: &Body, _offset: u32) -> Admission {
        assert_eq!(request.number, *body);
        if request.number == self.refuses {
            return Admission::Refuse(Status::RemoteAccess);
        }
        if flow != self.of {
            return Admission::Post(u32::MAX);
        }
        match self.left {
            0 => Admission::Hold,
            left => {
                self.left -= 1;
                Admission::Post(left * 1000)
            }
        }
    }
}

#[test]
fn release__of_a_flow_without_credits() {
    let mut bench = Bench::new(WIDE);
    let group = bench.group(0);
    let (lacking, other) = (bench.flow_in(group), bench.flow_in(group));
    let mut gate = Credits {
        of: lacking,
        left: 2,
        refuses: 5,
    };
    bench.submit(lacking, write(0, 4000));
    bench.submit(other, write(1, 4000));
    let mut lengths = Vec::new();
    while let Some(piece) = bench.next_by(&mut gate) {
        lengths.push((piece.flow, piece.length));
    }
    assert_eq!(lengths, [(lacking, 2000), (lacking, 1000), (other, 4000)]);
    // Neither a request nor a completion has it go on.
    bench.submit(lacking, write(2, 10));
    while bench.complete(group) {}
    assert!(bench.next_by(&mut gate).is_none());
    gate.left = 100;
    bench.egress.release(bench.now, lacking);
    assert_eq!(bench.next_by(&mut gate).unwrap().length, 1000);
    assert_eq!(bench.next_by(&mut gate).unwrap().length, 10);
    while bench.complete(group) {}
    assert_eq!(bench.done(), [(1, OK, 4000), (0, OK, 4000), (2, OK, 10)]);
    // One that the gate refuses fails its flow alone.
    bench.submit(other, write(5, 10));
    bench.submit(other, write(6, 10));
    bench.submit(lacking, write(7, 10));
    while bench.next_by(&mut gate).is_some() {}
    while bench.complete(group) {}
    assert_eq!(
        bench.done(),
        [(5, Status::RemoteAccess, 0), (6, Status::Flushed, 0), (7, OK, 10)]
    );
}

#[test]
fn next__reads_of_a_shared_send_queue_wait_for_slots_and_nobody_else_does() {
    let mut bench = Bench::new(WIDE);
    let group = bench.group_of(
        bench.tenant,
        &GroupOptions {
            slots: Some(2),
            may_be_quiet: false,
            ..options(0)
        },
    );
    let flows = [(); 3].map(|()| bench.flow_in(group));
    let read = |number| Request {
        opcode: WcOpcode::Read,
        takes_slot: true,
        ..write(number, 8)
    };
    for number in 0..4 {
        bench.submit(flows[0], read(number));
        bench.submit(flows[1], read(10 + number));
        bench.submit(flows[2], write(20 + number, 8));
    }
    let pieces = bench.post();
    let of = |flow| pieces.iter().filter(|piece| piece.flow == flow).count();
    assert_eq!(of(flows[2]), 4);
    assert_eq!(of(flows[0]) + of(flows[1]), 2);
    assert!(pieces.iter().all(|piece| piece.signaled));
    // A flow that has failed keeps no slot from the others.
    bench.egress.fail(bench.now, flows[0]);
    for _ in 0..20 {
        bench.complete(group);
        bench.post();
    }
    let done = bench.done();
    for number in 10..14 {
        assert!(done.contains(&(number, OK, 8)), "{done:?}");
    }
    assert_eq!(done.len(), 12);
}

#[test]
fn remove_flow__with_pieces_in_flight_on_a_shared_send_queue() {
    let mut bench = Bench::new(WIDE);
    let group = bench.group(0);
    let (gone, other) = (bench.flow_in(group), bench.flow_in(group));
    bench.submit(gone, write(0, 8));
    bench.submit(other, write(1, 8));
    bench.post();
    bench.egress.remove_flow(bench.now, gone);
    while bench.complete(group) {}
    assert_eq!(bench.done(), [(1, OK, 8)]);
}

/// However many flows come and go meanwhile, none is taken for the one whose piece is still in flight.
#[test]
fn remove_flow__piece_comes_back_after_many_other_flows() {
    let mut bench = Bench::new(WIDE);
    let group = bench.group(0);
    let gone = bench.flow_in(group);
    bench.submit(gone, write(0, 8));
    bench.post();
    bench.egress.remove_flow(bench.now, gone);
    for _ in 0..5_000 {
        let next = bench.flow_in(group);
        assert_ne!(next, gone);
        bench.egress.remove_flow(bench.now, next);
    }
    let last = bench.flow_in(group);
    bench.submit(last, write(1, 8));
    bench.post();
    while bench.complete(group) {}
    assert_eq!(bench.done(), [(1, OK, 8)]);
}

/// A flow of the model below.
#[derive(Default)]
struct Seen {
    submitted: u64,
    /// Requests that are not over: number, length, and whether they ask.
    open: VecDeque<(u64, u32, bool)>,
    /// Bytes of the request of which pieces come now, and its number.
    piece: (u64, u32),
    failed: bool,
}

/// Everything at random, against what a queue pair promises.
#[test]
fn random__one_completion_for_each_request_in_order() {
    let seed = std::env::var("RDMUX_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64 | 1);
    println!("RDMUX_SEED={seed}");
    let mut state = seed;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for _ in 0..60 {
        let mut bench = Bench::new([PIECE, 4 * PIECE, WIDE][random(3) as usize]);
        let groups: Vec<GroupId> = (0..3)
            .map(|at| {
                let options = GroupOptions {
                    depth: [1, 2, 16][random(3) as usize],
                    slots: (at > 0).then(|| random(3) as u32 + 1),
                    may_be_quiet: at == 0 || random(2) == 0,
                    ..options(random(CLASSES as u64) as usize)
                };
                bench.group_of(bench.tenant, &options)
            })
            .collect();
        let flows: Vec<FlowId> = (0..5).map(|at| bench.flow_in(groups[at % 3])).collect();
        let mut seen: Vec<Seen> = flows.iter().map(|_| Seen::default()).collect();
        for _ in 0..3000 {
            let at = random(5) as usize;
            let flow = flows[at];
            match random(16) {
                0..5 => {
                    let of = &mut seen[at];
                    let (asks, takes_slot) = (random(3) > 0, random(4) == 0);
                    let request = Request {
                        asks,
                        takes_slot,
                        cuts: random(2) == 0,
                        ..write(of.submitted, random(100_000) as u32)
                    };
                    let accepted = bench.egress.submit(bench.now, flow, request, request.number);
                    assert!(accepted.is_ok() || of.open.len() >= 64);
                    if accepted.is_ok() {
                        of.open.push_back((of.submitted, request.length, asks));
                        of.submitted += 1;
                    }
                }
                5..10 => {
                    if let Some(piece) = bench.next() {
                        let at = flows.iter().position(|flow| *flow == piece.flow).unwrap();
                        let of = &mut seen[at];
                        assert!(!of.failed);
                        let number = *bench.egress.body(&piece).unwrap();
                        assert_eq!((number, piece.offset), of.piece);
                        of.piece = match piece.last {
                            true => (number + 1, 0),
                            false => (number, piece.offset + piece.length),
                        };
                    }
                }
                10..14 => {
                    let group = groups[random(3) as usize];
                    bench.complete(group);
                }
                14 => match random(40) {
                    0 => {
                        // The send queue of all flows of a group fails.
                        let group = groups[at % 3];
                        bench.fail(group, Status::RetryExceeded);
                        for (other, of) in seen.iter_mut().enumerate() {
                            if other % 3 == at % 3 {
                                bench.egress.fail(bench.now, flows[other]);
                                of.failed = true;
                            }
                        }
                    }
                    1 if bench.posted[&groups[at % 3]].is_empty() => {
                        bench.egress.reset(bench.now, flow);
                        bench.egress.bind(bench.now, flow, groups[at % 3]);
                        let of = &mut seen[at];
                        of.open.clear();
                        (of.failed, of.piece) = (false, (of.submitted, 0));
                    }
                    2 => bench.egress.pause(bench.now, flow),
                    _ if !seen[at].failed => bench.egress.resume(bench.now, flow),
                    _ => {}
                },
                _ => bench.now = bench.now + random(200_000),
            }
            while let Some(done) = bench.egress.poll_done() {
                let of = &mut seen[done.owner.qp as usize - 1];
                loop {
                    let (number, length, asks) = of.open.pop_front().expect("an open request");
                    if number == done.number {
                        let succeeded = done.status == OK;
                        assert!(asks || !succeeded);
                        assert!(succeeded || of.failed);
                        assert_eq!(done.length, if succeeded { length } else { 0 });
                        break;
                    }
                    assert!(!asks, "{number} is lost");
                }
            }
        }
        // All that is left completes.
        for (at, flow) in flows.iter().enumerate() {
            if !seen[at].failed {
                bench.egress.resume(bench.now, *flow);
            }
        }
        for _ in 0..10_000 {
            let any = bench.next().is_some();
            let completed = groups.iter().filter(|group| bench.complete(**group)).count();
            if !any && completed == 0 {
                break;
            }
        }
        while let Some(done) = bench.egress.poll_done() {
            let of = &mut seen[done.owner.qp as usize - 1];
            while of
                .open
                .pop_front()
                .is_some_and(|(number, ..)| number != done.number)
            {}
        }
        for of in &seen {
            assert!(of.open.iter().all(|(_, _, asks)| !asks), "{:?}", of.open);
        }
    }
}
