//! Protection domains, regions and windows: what may be made and changed, and what tools see of it.

use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex};

use rand_core::RngCore;

use super::util::*;
use crate::region::{NumberHasher, Regions};
use crate::trace::{Denial, Note, Tracer};
use crate::*;

fn spec(memory: Arc<dyn Memory>, access: Access) -> RegionSpec {
    RegionSpec {
        memory_offset: 0,
        length: memory.len(),
        memory,
        iova: 0x5_0000,
        access,
    }
}

fn small(access: Access) -> RegionSpec {
    spec(Arc::new(HeapMemory::new(0x1000)), access)
}

/// Executes an operation on a QP of side 1; returns its status.
fn execute_at(pair: &mut Pair, qpn: Qpn, operation: Operation) -> Status {
    let request = SendRequest {
        wr_id: 5,
        operation,
        sges: SgeList::EMPTY,
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    };
    pair.sides[1].rnic.post_send(pair.now, qpn, request).unwrap();
    pair.run();
    let completed = pair.sides[1].completed();
    let &[(5, status)] = &completed[..] else {
        panic!("{completed:?}");
    };
    status
}

fn execute(pair: &mut Pair, operation: Operation) -> Status {
    execute_at(pair, pair.sides[1].qpn, operation)
}

/// Writes 8 bytes from side 0; returns the status of the request.
fn write(pair: &mut Pair, va: u64, rkey: RKey) -> Status {
    let sges = pair.sides[0].sge(0, 8);
    pair.post(0, Operation::Write { va, rkey, imm: None }, sges);
    pair.run();
    pair.sides[0].completed()[0].1
}

/// Binds a window of this type to the first 64 bytes of a region of side 1; returns the window's key.
fn bound(pair: &mut Pair, qpn: Qpn, kind: WindowType, region: LKey, access: Access) -> RKey {
    let (pd, now) = (pair.sides[1].pd, pair.now);
    let window = pair.sides[1].rnic.alloc_mw(pd, kind).unwrap();
    let bind = Bind {
        window: window.next(),
        region,
        va: 0x5_0000,
        length: 64,
        access,
    };
    if kind == WindowType::Two {
        assert_eq!(execute_at(pair, qpn, Operation::Bind(bind)), Status::Success);
    } else {
        let (bind, flags) = (Bind { window, ..bind }, SendFlags::empty());
        let key = pair.sides[1].rnic.bind_mw(now, qpn, 0, bind, flags);
        assert_eq!(key, Ok(window.next()));
        pair.run();
    }
    window.next()
}

fn register(pair: &mut Pair, access: Access) -> (LKey, RKey) {
    let side = &mut pair.sides[1];
    side.rnic.reg_mr(side.pd, small(access)).unwrap()
}

/// Random numbers that a test determines.
struct Numbers(std::vec::IntoIter<u32>);

impl RngCore for Numbers {
    fn next_u32(&mut self) -> u32 {
        self.0.next().expect("more numbers than the test foresees")
    }

    fn next_u64(&mut self) -> u64 {
        unreachable!("keys have 32 bits")
    }

    fn fill_bytes(&mut self, _: &mut [u8]) {
        unreachable!("keys have 32 bits")
    }
}

#[test]
fn alloc_mw__gives_a_key_whose_high_24_bits_are_neither_0_nor_taken() {
    let mut regions = Regions::default();
    let pd = regions.alloc_pd();
    let mut numbers = Numbers(vec![0xab, 0x1234_5601, 0x1234_5602, 0x1234_5703].into_iter());
    let mut alloc = || regions.alloc_window(&mut numbers, pd, WindowType::One);
    assert_eq!(
        [alloc(), alloc()],
        [0x1234_5601, 0x1234_5703].map(|key| Ok(RKey(key)))
    );
}

#[test]
fn number_hasher__spreads_numbers_over_the_buckets_and_the_tags_of_a_map() {
    let hash = |n: u32| {
        let mut hasher = NumberHasher::default();
        n.hash(&mut hasher);
        hasher.finish()
    };
    let buckets: BTreeSet<u64> = (0..128).map(|n| hash(n) % 128).collect();
    let tags: BTreeSet<u64> = (0..128).map(|n| hash(n) >> 57).collect();
    assert_eq!(buckets.len(), 128);
    assert!(tags.len() > 64, "{tags:?}");
}

#[test]
fn dealloc_pd__nothing_more_is_made_in_it() {
    let mut pair = Pair::new();
    let Side { rnic, lkey, cq, .. } = &mut pair.sides[0];
    let pd = rnic.alloc_pd();
    rnic.dealloc_pd(pd);
    let none = || RegisterError::NoPd;
    assert_eq!(rnic.reg_mr(pd, small(ALL_ACCESS)), Err(none()));
    assert_eq!(rnic.alloc_mr(pd, 64), Err(none()));
    assert_eq!(rnic.alloc_mw(pd, WindowType::One), Err(none()));
    assert_eq!(rnic.rereg_mr(*lkey, Some(pd), |_| {}).unwrap_err(), none());
    assert_eq!(rnic.create_qp(QpInit::new(pd, *cq)), None);
    let init = SrqInit {
        pd,
        max_wr: 1,
        xrc: None,
    };
    assert_eq!(rnic.create_srq(init), None);
    assert_eq!(rnic.object_counts().1, 1);
}

#[test]
fn reg_mr__remote_writes_and_atomics_need_local_write() {
    let mut pair = Pair::new();
    let side = &mut pair.sides[0];
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        let made = side.rnic.reg_mr(side.pd, small(access));
        assert_eq!(made, Err(RegisterError::NeedsLocalWrite), "{access:?}");
        let with = small(access | Access::LOCAL_WRITE);
        assert!(side.rnic.reg_mr(side.pd, with).is_ok(), "{access:?}");
    }
    assert!(side.rnic.reg_mr(side.pd, small(Access::REMOTE_READ)).is_ok());
}

#[test]
fn rereg_mr__moves_a_region_to_another_domain() {
    let mut pair = Pair::new();
    let (lkey, rkey) = (pair.sides[1].lkey, pair.sides[1].rkey);
    let rnic = &mut pair.sides[1].rnic;
    let (here, there) = (pair.sides[1].pd, rnic.alloc_pd());
    rnic.rereg_mr(lkey, Some(there), |_| {}).unwrap();
    rnic.rereg_mr(lkey, Some(here), |_| {}).unwrap();
    assert_eq!(write(&mut pair, IOVA, rkey), Status::Success);
    pair.sides[1].rnic.rereg_mr(lkey, Some(there), |_| {}).unwrap();
    assert_eq!(write(&mut pair, IOVA, rkey), Status::RemoteAccess);
}

#[test]
fn register__of_no_more_bytes_than_the_region_was_made_for() {
    for (length, expected) in [
        (0xfff, Status::Success),
        (0x1000, Status::Success),
        (0x1001, Status::LocalQpOperation),
    ] {
        let mut pair = Pair::new();
        let pd = pair.sides[1].pd;
        let (_, key) = pair.sides[1].rnic.alloc_mr(pd, 0x1000).unwrap();
        let spec = spec(Arc::new(HeapMemory::new(length)), ALL_ACCESS);
        let register = Operation::Register(Box::new(Registration { key, spec }));
        assert_eq!(execute(&mut pair, register), expected, "{length}");
    }
}

#[test]
fn invalidate__of_a_window_only_on_the_qp_that_bound_it() {
    let mut pair = Pair::new();
    let (lkey, _) = register(&mut pair, ALL_ACCESS);
    let (_, other) = pair.second_qps();
    let qpn = pair.sides[1].qpn;
    let rkey = bound(&mut pair, qpn, WindowType::Two, lkey, Access::REMOTE_WRITE);
    let invalidate = Operation::LocalInvalidate { rkey };
    assert_eq!(
        execute_at(&mut pair, other, invalidate.clone()),
        Status::LocalQpOperation
    );
    assert_eq!(write(&mut pair, 0x5_0000, rkey), Status::Success, "still bound");
    assert_eq!(execute(&mut pair, invalidate), Status::Success);
}

#[test]
fn bind_mw__of_no_bytes_unbinds_and_needs_no_region() {
    let mut pair = Pair::new();
    let (lkey, _) = register(&mut pair, ALL_ACCESS);
    let (now, qpn) = (pair.now, pair.sides[1].qpn);
    assert!(!pair.sides[1].rnic.has_mws(lkey));
    let window = bound(&mut pair, qpn, WindowType::One, lkey, Access::REMOTE_WRITE);
    assert!(pair.sides[1].rnic.has_mws(lkey));
    let nothing = Bind {
        window,
        region: LKey(0),
        va: 0,
        length: 0,
        access: Access::empty(),
    };
    let side = &mut pair.sides[1];
    let key = side.rnic.bind_mw(now, qpn, 3, nothing, SendFlags::SIGNALED);
    pair.run();
    assert_eq!(pair.sides[1].completed(), [(3, Status::Success)]);
    assert!(!pair.sides[1].rnic.has_mws(lkey));
    assert_eq!(write(&mut pair, 0x5_0000, key.unwrap()), Status::RemoteAccess);
}

#[test]
fn dealloc_mw__leaves_nothing_of_the_window() {
    let mut pair = Pair::new();
    let (lkey, rkey) = register(&mut pair, ALL_ACCESS);
    let before = pair.sides[1].rnic.object_counts();
    let qpn = pair.sides[1].qpn;
    for kind in [WindowType::One, WindowType::Two] {
        let window = bound(&mut pair, qpn, kind, lkey, Access::REMOTE_WRITE);
        let rnic = &mut pair.sides[1].rnic;
        assert!(!rnic.dealloc_mw(rkey), "a region");
        assert!(rnic.dealloc_mw(window) && !rnic.dealloc_mw(window), "{kind:?}");
        assert_eq!(rnic.object_counts(), before, "{kind:?}");
        assert!(!rnic.has_mws(lkey), "{kind:?}");
    }
}

// Inspection.

#[test]
fn list_pds__counts_what_is_in_each() {
    let mut pair = Pair::new();
    let side = &mut pair.sides[1];
    let [gone, other] = [(); 2].map(|()| side.rnic.alloc_pd());
    side.rnic.reg_mr(other, small(ALL_ACCESS)).unwrap();
    side.rnic.dealloc_pd(gone);
    let init = SrqInit {
        pd: other,
        max_wr: 1,
        xrc: None,
    };
    side.rnic.create_srq(init).unwrap();
    let listed = [(side.pd, 2), (other, 2)].map(|(pd, users)| PdDetail { pd, users });
    assert_eq!(side.rnic.list_pds(0, 8), (listed.to_vec(), false));
    assert_eq!(side.rnic.all_counts(), [1, 2, 1, 2, 1, 0]);
}

#[test]
fn list_regions__tells_what_each_key_grants() {
    let mut pair = Pair::new();
    let (qpn, pd) = (pair.sides[1].qpn, pair.sides[1].pd);
    let zero_based = ALL_ACCESS | Access::ZERO_BASED;
    let (lkey, rkey) = register(&mut pair, zero_based);
    let rnic = &mut pair.sides[1].rnic;
    let unbound = rnic.alloc_mw(pd, WindowType::Two).unwrap();
    let [(_, empty), (filled, key)] = [(); 2].map(|()| rnic.alloc_mr(pd, 0x1000).unwrap());
    let registration = Registration {
        key,
        spec: small(ALL_ACCESS),
    };
    let operation = Operation::Register(Box::new(registration));
    assert_eq!(execute(&mut pair, operation), Status::Success);
    let window = bound(&mut pair, qpn, WindowType::One, filled, Access::REMOTE_READ);

    let none = Access::empty();
    let fast = RegionKind::Fast;
    let mut expected = [
        (
            pair.sides[1].rkey,
            RegionKind::Memory,
            IOVA,
            MEMORY as u64,
            ALL_ACCESS,
        ),
        (rkey, RegionKind::Memory, 0, 0x1000, zero_based),
        (unbound, RegionKind::Window(WindowType::Two), 0, 0, none),
        (empty, fast, 0, 0, none),
        (key, fast, 0x5_0000, 0x1000, ALL_ACCESS),
        (
            window,
            RegionKind::Window(WindowType::One),
            0x5_0000,
            64,
            Access::REMOTE_READ,
        ),
    ]
    .map(|(key, kind, iova, length, access)| RegionDetail {
        mrn: key.0 >> 8,
        kind,
        rkey: key.0,
        pd,
        iova,
        length,
        access,
        sharing: None,
    });
    expected.sort_unstable_by_key(|region| region.mrn);
    assert_eq!(lkey.0, rkey.0);
    let listed = pair.sides[1].rnic.list_regions(0, 8);
    assert_eq!(listed, (expected.to_vec(), false));
}

/// Collects the reasons of refusals.
#[derive(Clone, Debug, Default)]
struct Denials(Arc<Mutex<Vec<Denial>>>);

impl Tracer for Denials {
    fn note(&mut self, _: Time, _: Qpn, note: &Note) {
        if let Note::Refused(refused) = note {
            self.0.lock().unwrap().push(refused.why);
        }
    }
}

/// Memory that was unmapped after its registration.
#[derive(Debug)]
struct Unmapped(u64);

impl Memory for Unmapped {
    fn len(&self) -> u64 {
        self.0
    }

    fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Err(Fault::Unmapped)
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Err(Fault::Unmapped)
    }

    fn atomic(&self, _: u64, _: Atomic) -> Result<u64, Fault> {
        Err(Fault::Unmapped)
    }

    fn placement(&self) -> Placement {
        Placement::GLOBAL
    }

    fn flush_is_immediate(&self, _: Placement) -> bool {
        true
    }

    fn flush(&self, _: u64, _: u64, _: Placement) -> Result<(), Fault> {
        Err(Fault::Unmapped)
    }
}

#[test]
fn denial__names_what_the_key_lacks() {
    type Prepare = fn(&mut Pair) -> (RKey, u64);
    /// A QP of side 1 other than the one that serves the request.
    fn other_qp(pair: &mut Pair) -> Qpn {
        pair.second_qps().1
    }
    const AT: u64 = 0x5_0000;
    const ATOMIC: Access = Access::REMOTE_ATOMIC;
    let lacks = |has| Denial::NoRight { needs: ATOMIC, has };
    let outside = |begin, length| Denial::OutOfRange { begin, length };
    let few = ALL_ACCESS.difference(ATOMIC);
    let cases: [(&str, Prepare, Denial); 13] = [
        (
            "no key",
            |pair| (RKey(pair.sides[1].rkey.0 ^ 0x100), IOVA),
            Denial::NoKey,
        ),
        (
            "another tag",
            |pair| (pair.sides[1].rkey.next(), IOVA),
            Denial::NoKey,
        ),
        (
            "another domain",
            |pair| {
                let rnic = &mut pair.sides[1].rnic;
                let pd = rnic.alloc_pd();
                (rnic.reg_mr(pd, small(ALL_ACCESS)).unwrap().1, AT)
            },
            Denial::OtherDomain,
        ),
        (
            "right of a region",
            |pair| {
                let few = ALL_ACCESS.difference(ATOMIC);
                (register(pair, few).1, AT)
            },
            lacks(few),
        ),
        (
            "bytes of a region",
            |pair| (pair.sides[1].rkey, IOVA + MEMORY as u64),
            outside(IOVA, MEMORY as u64),
        ),
        (
            "memory",
            |pair| {
                let side = &mut pair.sides[1];
                let spec = spec(Arc::new(Unmapped(64)), ALL_ACCESS);
                (side.rnic.reg_mr(side.pd, spec).unwrap().1, AT)
            },
            Denial::Memory,
        ),
        (
            "registration",
            |pair| {
                let side = &mut pair.sides[1];
                (side.rnic.alloc_mr(side.pd, 64).unwrap().1, AT)
            },
            Denial::NoKey,
        ),
        (
            "right of a registration",
            |pair| {
                let side = &mut pair.sides[1];
                let (_, key) = side.rnic.alloc_mr(side.pd, 0x1000).unwrap();
                let spec = small(ALL_ACCESS.difference(ATOMIC));
                let register = Operation::Register(Box::new(Registration { key, spec }));
                assert_eq!(execute(pair, register), Status::Success);
                (key, AT)
            },
            lacks(few),
        ),
        (
            "binding",
            |pair| {
                let side = &mut pair.sides[1];
                (side.rnic.alloc_mw(side.pd, WindowType::One).unwrap(), AT)
            },
            Denial::NoKey,
        ),
        (
            "right of a window",
            |pair| {
                let (qpn, (lkey, _)) = (pair.sides[1].qpn, register(pair, ALL_ACCESS));
                (bound(pair, qpn, WindowType::Two, lkey, Access::REMOTE_READ), AT)
            },
            lacks(Access::REMOTE_READ),
        ),
        (
            "bytes of a window",
            |pair| {
                let (qpn, (lkey, _)) = (pair.sides[1].qpn, register(pair, ALL_ACCESS));
                (bound(pair, qpn, WindowType::Two, lkey, ATOMIC), AT + 64)
            },
            outside(AT, 64),
        ),
        (
            "a window of another QP",
            |pair| {
                let (qpn, (lkey, _)) = (other_qp(pair), register(pair, ALL_ACCESS));
                (bound(pair, qpn, WindowType::Two, lkey, ATOMIC), AT)
            },
            Denial::OtherWindow,
        ),
        (
            "bytes of a window that serves all QPs",
            |pair| {
                let (qpn, (lkey, _)) = (other_qp(pair), register(pair, ALL_ACCESS));
                (bound(pair, qpn, WindowType::One, lkey, ATOMIC), AT + 64)
            },
            outside(AT, 64),
        ),
    ];
    for (what, prepare, expected) in cases {
        let mut pair = Pair::new();
        let (rkey, va) = prepare(&mut pair);
        let denials = Denials::default();
        pair.sides[1].rnic.set_tracer(Some(Box::new(denials.clone())));
        let sges = pair.sides[0].sge(0, 8);
        pair.post(0, Operation::FetchAdd { va, rkey, add: 1 }, sges);
        pair.run();
        let status = pair.sides[0].completed()[0].1;
        assert_eq!(status, Status::RemoteAccess, "{what}");
        assert_eq!(*denials.0.lock().unwrap(), [expected], "{what}");
    }
}
