//! Dataset Management, Copy, Identify, logs, features, Abort and asymmetric access.

use super::*;

fn manage(nsid: u32, ranges: &[DatasetRange], deallocates: bool) -> (Sqe, Vec<u8>) {
    let mut sqe = Sqe::new(Opcode::DATASET_MANAGEMENT, Cid(7), NsId(nsid));
    sqe.set_dword(10, ranges.len() as u32 - 1);
    sqe.set_dword(11, if deallocates { DatasetRange::DEALLOCATE } else { 1 });
    let mut data = vec![0; ranges.len() * DatasetRange::LEN];
    for (bytes, range) in data.chunks_mut(DatasetRange::LEN).zip(ranges) {
        range.emit(bytes);
    }
    (sqe, data)
}

#[test]
fn deallocate__zeroes_all_ranges_or_none() {
    let (target, _) = target();
    let mut host = Host::new(&target, 1, Instant::now());
    let mut ones = vec![1; 64 * 512];
    assert_eq!(host.blocks(Opcode::WRITE, 1, 0, &mut ones), Status::SUCCESS);
    let range = |slba, blocks| DatasetRange { slba, blocks };
    let (sqe, mut data) = manage(1, &[range(1, 2), range(8, 1), range(2048, 1)], true);
    assert!(host.run(&sqe, &mut data).is(Status::LBA_OUT_OF_RANGE));
    assert_eq!(host.read(1, 0, 64), ones, "nothing of a command that is refused");
    let (sqe, mut data) = manage(1, &[range(1, 2), range(8, 1), range(9, 0)], false);
    assert_eq!(host.run(&sqe, &mut data), Status::SUCCESS);
    assert_eq!(host.read(1, 0, 64), ones, "hints alone");
    let (sqe, data) = manage(1, &[range(1, 2), range(8, 1), range(9, 0)], true);
    // Linux sends a page, whatever the number of ranges.
    let mut data = [data, vec![0xff; 4096 - 48]].concat();
    assert_eq!(host.run(&sqe, &mut data), Status::SUCCESS);
    let read = host.read(1, 0, 64);
    let is_zero: Vec<_> = read
        .chunks(512)
        .map(|block| block.iter().all(|byte| *byte == 0))
        .collect();
    assert!(
        is_zero
            .iter()
            .enumerate()
            .all(|(at, zero)| *zero == [1, 2, 8].contains(&at))
    );
    let (sqe, mut data) = manage(1, &[range(0, 1); 3], true);
    data.truncate(32);
    assert!(host.run(&sqe, &mut data).is(Status::SGL_LENGTH_INVALID));
    let (sqe, mut data) = manage(9, &[range(0, 1)], true);
    assert!(host.run(&sqe, &mut data).is(Status::INVALID_NAMESPACE));
}

pub(super) fn copy(nsid: u32, slba: u64, format: CopyFormat, ranges: &[CopyRange]) -> (Sqe, Vec<u8>) {
    let mut sqe = Sqe::new(Opcode::COPY, Cid(7), NsId(nsid));
    Copy {
        slba,
        ranges: ranges.len() as u16,
        format: format as u8,
        fua: true,
    }
    .emit(&mut sqe);
    let mut data = vec![0; ranges.len() * CopyRange::LEN];
    for (bytes, range) in data.chunks_mut(CopyRange::LEN).zip(ranges) {
        range.emit(bytes);
    }
    (sqe, data)
}

const fn from(nsid: u32, slba: u64, blocks: u32) -> CopyRange {
    CopyRange {
        nsid: NsId(nsid),
        slba,
        blocks,
        fast_only: false,
    }
}

#[test]
fn copy__moves_ranges_in_order_or_nothing() {
    let (target, subsystem) = target();
    let large = Namespace {
        backend: Arc::new(NullBackend(1 << 40)),
        ..memory(2, 512)
    };
    subsystem.add_namespace(large).unwrap();
    let mut host = Host::new(&target, 1, Instant::now());
    let mut bytes: Vec<u8> = (0..1024 * 512).map(|at| (at / 512) as u8).collect();
    assert_eq!(host.blocks(Opcode::WRITE, 1, 0, &mut bytes), Status::SUCCESS);
    let (sqe, mut data) = copy(1, 1500, CopyFormat::Same, &[from(0, 7, 3), from(0, 200, 300)]);
    assert_eq!(host.run(&sqe, &mut data), Status::SUCCESS);
    let expected = [&bytes[7 * 512..10 * 512], &bytes[200 * 512..500 * 512]].concat();
    assert_eq!(host.read(1, 1500, 303), expected);
    let before = host.read(1, 0, 2048);
    let mut status = |nsid, slba, ranges: &[CopyRange]| {
        let (sqe, mut data) = copy(nsid, slba, CopyFormat::Same, ranges);
        Status(host.run(&sqe, &mut data).code())
    };
    let one = from(0, 0, 1);
    assert_eq!(status(1, 2048, &[one]), Status::LBA_OUT_OF_RANGE);
    assert_eq!(status(1, 2047, &[from(0, 0, 2)]), Status::LBA_OUT_OF_RANGE);
    assert_eq!(
        status(1, 1500, &[from(0, 0, 4), from(0, 2047, 2)]),
        Status::LBA_OUT_OF_RANGE
    );
    assert_eq!(status(1, 100, &[from(0, 98, 3)]), Status::COPY_OVERLAPS);
    assert_eq!(status(1, 100, &[from(0, 103, 3)]), Status::SUCCESS);
    assert_eq!(status(2, 1 << 20, &[one; 129]), Status::COPY_TOO_LONG);
    assert_eq!(status(2, 1 << 20, &[one; 128]), Status::SUCCESS);
    assert_eq!(status(2, 1 << 20, &[from(0, 0, 16385)]), Status::COPY_TOO_LONG);
    assert_eq!(status(2, 1 << 20, &[from(0, 0, 8192); 2]), Status::SUCCESS);
    let (mut before, mut after) = (before, host.read(1, 0, 2048));
    before.drain(100 * 512..103 * 512);
    after.drain(100 * 512..103 * 512);
    assert!(before == after, "nothing of a command that is refused");
}

#[test]
fn copy__of_other_namespaces_is_enabled_by_the_host() {
    let (target, subsystem) = target();
    subsystem.add_namespace(memory(2, 1 << 20)).unwrap();
    let coarse = Namespace {
        block_shift: 12,
        ..memory(3, 1 << 20)
    };
    subsystem.add_namespace(coarse).unwrap();
    let mut host = Host::new(&target, 1, Instant::now());
    let mut bytes = vec![5; 4096];
    assert_eq!(host.blocks(Opcode::WRITE, 1, 0, &mut bytes), Status::SUCCESS);
    let status = |host: &mut Host, ranges: &[CopyRange]| {
        let (sqe, mut data) = copy(2, 0, CopyFormat::Any, ranges);
        Status(host.run(&sqe, &mut data).code())
    };
    assert_eq!(status(&mut host, &[from(1, 0, 8)]), Status::INVALID_FIELD);
    let mut behavior = vec![0; 512];
    behavior[4] = 1 << 3;
    let refused = completed(host.set_features(0x16, NsId::NONE, 0, &behavior));
    assert!(refused.status.is(Status::INVALID_FIELD), "format 3");
    behavior[4] = 1 << 2;
    let enabled = completed(host.set_features(0x16, NsId::NONE, 0, &behavior));
    assert!(enabled.status.is_success());
    assert_eq!(sent(host.get_features(0x16, NsId::NONE, 0)), behavior);
    assert_eq!(
        status(&mut host, &[from(1, 0, 8), from(2, 100, 1)]),
        Status::SUCCESS
    );
    assert_eq!(host.read(2, 0, 8), bytes);
    assert_eq!(status(&mut host, &[from(9, 0, 8)]), Status::INVALID_NAMESPACE);
    assert_eq!(status(&mut host, &[from(3, 0, 1)]), Status::COPY_INCOMPATIBLE);
    let fast = CopyRange {
        fast_only: true,
        ..from(1, 0, 1)
    };
    assert_eq!(status(&mut host, &[fast]), Status::COPY_NOT_FAST);
}

#[test]
fn identify__has_the_forms_of_version_2() {
    let now = Instant::now();
    let (target, _) = target();
    let (mut queue, cntlid) = admin(&target, SUBSYSTEM, now);
    let mut form = |cns: u32, nsid: u32, command_set: u32| {
        let mut sqe = Sqe::new(Opcode::IDENTIFY, Cid(2), NsId(nsid));
        sqe.set_dword(10, cns);
        sqe.set_dword(11, command_set << 24);
        queue.admit(&sqe, 4096, now).unwrap();
        queue.execute(&sqe, &[], now)
    };
    let zero = vec![0; IDENTIFY_LEN];
    assert_eq!(sent(form(0x05, 1, 0)), zero);
    assert_eq!(sent(form(0x06, 0, 0)), zero);
    let list = sent(form(0x07, 0, 0));
    assert_eq!(parse_namespace_list(&list).collect::<Vec<_>>(), [NsId(1)]);
    let namespace = IndependentNamespace::parse(&sent(form(0x08, 1, 0))).unwrap();
    assert!(namespace.is_ready && namespace.is_shared && namespace.ana_group == 1);
    assert_eq!(sent(form(0x08, 2, 0)), zero, "an inactive namespace");
    let sets = sent(form(0x1c | 0xffff << 16, 0, 0));
    assert_eq!((sets[0], &sets[1..]), (1, &zero[1..]));
    assert_eq!(sent(form(0x1c | u32::from(cntlid) << 16, 0, 0)), sets);
    for (cns, nsid, command_set) in [
        (0x05, 1, 2),
        (0x06, 0, 1),
        (0x07, 0, 2),
        (0x08, 0, 0),
        (0x1c | 99 << 16, 0, 0),
    ] {
        let refused = completed(form(cns, nsid, command_set)).status;
        assert!(!refused.is_success(), "{cns:#x}");
    }
}

#[test]
fn logs__are_those_that_the_first_log_names() {
    let (target, _) = target();
    let mut host = Host::new(&target, 1, Instant::now());
    let mut bytes = vec![1; 4096];
    for _ in 0..3 {
        host.blocks(Opcode::WRITE, 1, 0, &mut bytes);
    }
    host.blocks(Opcode::READ, 1, 0, &mut bytes);
    let named = host.log(LogId::SUPPORTED, NsId::NONE, 1024);
    for log in 0..=255u8 {
        let mut sqe = Sqe::new(Opcode::GET_LOG_PAGE, Cid(2), NsId::ALL);
        sqe.set_dword(10, u32::from(log) | 3 << 16);
        host.admin.admit(&sqe, 16, Instant::now()).unwrap();
        let is_there = matches!(host.admin.execute(&sqe, &[], Instant::now()), Step::Send(..));
        assert_eq!(is_there, named[4 * usize::from(log)] == 1, "{log:#x}");
    }
    let health = host.log(LogId::HEALTH, NsId::ALL, 512);
    let number = |at: usize| u64::from_le_bytes(health[at..at + 8].try_into().unwrap());
    assert_eq!(
        [32, 48, 64, 80].map(number),
        [1, 1, 1, 3],
        "units read and written, commands read and written"
    );
    let effects = host.log(LogId::EFFECTS, NsId::NONE, 4096);
    assert_eq!(effects[1024 + 4 * 0x19], 3, "Copy changes blocks");
}

#[test]
fn features__are_those_that_their_log_names() {
    let (target, _) = target();
    let mut host = Host::new(&target, 1, Instant::now());
    let named = host.log(LogId::FEATURES, NsId::NONE, 1024);
    for feature in 0..=255u8 {
        let step = host.get_features(feature, NsId(1), 0);
        let is_there = match step {
            Step::Complete(cqe) => cqe.status.is_success(),
            _ => true,
        };
        let expected = named[4 * usize::from(feature)] & 1 == 1;
        assert_eq!(is_there, expected, "{feature:#x}");
    }
    let mut value = |feature, value| completed(host.get_features(feature, NsId::NONE, value)).result;
    assert_eq!(value(0x01, 0), 7);
    assert_eq!((value(0x04, 0), value(0x04, 1 << 20)), (0xffff, 0));
    let mut set = |feature, value| completed(host.set_features(feature, NsId::NONE, value, &[])).status;
    assert!(set(0x01, 0x0102_0303).is_success() && set(0x04, 1 << 20 | 300).is_success());
    assert!(set(0x02, 1).is(Status::INVALID_FIELD), "one power state");
    assert!(set(0x04, 3 << 16).is(Status::INVALID_FIELD), "no sensor");
    assert!(set(0x06, 0).is(Status::FEATURE_NOT_CHANGEABLE));
    assert!(set(0x81, 0).is(Status::COMMAND_SEQUENCE_ERROR));
    assert!(set(0x83, 1).is(Status::INVALID_NAMESPACE));
    let mut value = |feature, value| completed(host.get_features(feature, NsId::NONE, value)).result;
    assert_eq!((value(0x01, 0), value(0x04, 1 << 20)), (0x0102_0303, 300));
    let set = host.set_features(0x0e, NsId::NONE, 0, &1_000_000u64.to_le_bytes());
    assert!(completed(set).status.is_success());
    let time = sent(host.get_features(0x0e, NsId::NONE, 0));
    let time = u64::from_le_bytes(time.try_into().unwrap());
    assert!(
        (1_000_000..1_100_000).contains(&(time & 0xffff_ffff_ffff)) && time >> 48 == 2,
        "{time:#x}"
    );
    let short = completed(host.set_features(0x0e, NsId::NONE, 0, &[1, 2, 3]));
    assert!(short.status.is(Status::SGL_LENGTH_INVALID));
}

fn abort(qid: u16, cid: u16, own: u16) -> Sqe {
    let mut sqe = Sqe::new(Opcode::ABORT, Cid(own), NsId::NONE);
    sqe.set_dword(10, u32::from(qid) | u32::from(cid) << 16);
    sqe
}

#[test]
fn abort__ends_requests_for_events_before_itself() {
    let now = Instant::now();
    let (target, _) = target();
    let mut host = Host::new(&target, 1, now);
    host.request_event(40);
    assert!(matches!(
        run(&mut host.admin, &abort(0, 40, 50), &[], now),
        Step::Wait
    ));
    let events: Vec<_> = std::iter::from_fn(|| host.admin.poll_event()).collect();
    let shown = events.iter().map(|cqe| (cqe.cid.0, cqe.status, cqe.result));
    assert_eq!(
        shown.collect::<Vec<_>>(),
        [(40, Status::ABORT_REQUESTED, 0), (50, Status::SUCCESS, 0)]
    );
    for (qid, cid) in [(0, 40), (2, 1)] {
        let cqe = completed(run(&mut host.admin, &abort(qid, cid, 51), &[], now));
        assert_eq!((cqe.status, cqe.result), (Status::SUCCESS, 1), "{qid}");
    }
}

#[test]
fn abort__keeps_a_command_from_running_at_the_medium() {
    let now = Instant::now();
    let (target, subsystem) = target();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let slow = Namespace {
        backend: Arc::new(FileBackend::open(file.path(), false, 512).unwrap()),
        ..memory(2, 512)
    };
    subsystem.add_namespace(slow).unwrap();
    let mut host = Host::new(&target, 1, now);
    let write = blocks(Opcode::WRITE, 2, 0, 8);
    let Ok(Admitted::Io(io)) = host.io.admit(&write, 4096, now) else {
        panic!("it is no I/O");
    };
    assert!(matches!(
        run(&mut host.admin, &abort(1, 7, 50), &[], now),
        Step::Wait
    ));
    assert!(host.admin.take_reset() && !host.admin.take_reset());
    assert_eq!(host.admin.poll_event(), None, "the command is not over");
    assert_eq!((host.io.poll_abort(), host.io.poll_abort()), (Some(Cid(7)), None));
    let mut ones = Pages::new(4096);
    ones.fill(1);
    let status = io.execute(&mut ones);
    assert_eq!(status, Status::ABORT_REQUESTED);
    assert!(!host.io.take_reset());
    host.io.complete(Cid(7), status, 0);
    assert!(host.io.take_reset(), "the admin queue may be with another thread");
    let cqe = host.admin.poll_event().unwrap();
    assert_eq!((cqe.cid, cqe.result), (Cid(50), 0));
    assert_eq!(host.read(2, 0, 8), vec![0; 4096]);
    // One that is done meanwhile, and one that is none.
    for cid in [7, 99] {
        assert!(matches!(
            run(&mut host.admin, &abort(1, cid, 51), &[], now),
            Step::Wait
        ));
        assert_eq!(host.io.poll_abort(), Some(Cid(cid)));
        match cid {
            7 => drop(host.io.complete(Cid(7), Status::SUCCESS, 0)),
            _ => host.io.abort_missed(Cid(cid)),
        }
        assert_eq!(host.admin.poll_event().unwrap().result, 1);
    }
    // There are four at a time, and the end of their queue is theirs.
    for own in 60..64 {
        run(&mut host.admin, &abort(1, 1, own), &[], now);
    }
    let beyond = completed(run(&mut host.admin, &abort(1, 1, 64), &[], now));
    assert!(beyond.status.is(Status::ABORT_LIMIT));
    assert!(host.io.has_io_queues());
    let Host { io, mut admin, .. } = host;
    drop(io);
    let over: Vec<_> = std::iter::from_fn(|| admin.poll_event()).collect();
    assert!(over.len() == 4 && over.iter().all(|cqe| cqe.result == 1));
}

#[test]
fn ana__states_decide_who_reaches_a_group() {
    let now = Instant::now();
    let (target, subsystem) = target();
    subsystem.add_namespace(memory(2, 4096)).unwrap();
    subsystem.set_ana_group(NsId(2), 5).unwrap();
    let other = Listener {
        address: "127.0.0.1:4421".parse().unwrap(),
        ..LOCAL
    };
    let rule = |at, state| AnaRule {
        group: Some(5),
        at,
        state,
    };
    let (mut here, mut there) = (Host::new(&target, 1, now), Host::at(&target, 1, other, now));
    for host in [&mut here, &mut there] {
        let value = IdentifyController::ANA_EVENTS;
        assert!(
            completed(host.set_features(0x0b, NsId::NONE, value, &[]))
                .status
                .is_success()
        );
        host.log(LogId::ANA, NsId::NONE, 128);
        host.request_event(9);
        assert_eq!(host.admin.poll_event(), None);
    }
    let states = [
        (AnaState::NonOptimized, Status::SUCCESS),
        (AnaState::Inaccessible, Status::ANA_INACCESSIBLE),
        (AnaState::Change, Status::ANA_TRANSITION),
        (AnaState::PersistentLoss, Status::ANA_PERSISTENT_LOSS),
    ];
    for (state, expected) in states {
        assert_eq!(subsystem.set_ana_state(rule(Some(LOCAL), state)), Ok(true));
        let mut data = vec![0; 512];
        assert_eq!(here.blocks(Opcode::READ, 2, 0, &mut data), expected);
        assert_eq!(here.blocks(Opcode::READ, 1, 0, &mut data), Status::SUCCESS);
        assert_eq!(there.blocks(Opcode::WRITE, 2, 0, &mut data), Status::SUCCESS);
        let event = here.admin.poll_event().unwrap();
        assert_eq!((event.cid, event.result), (Cid(9), 0x0c_0302));
        let log = AnaLog::parse(&here.log(LogId::ANA, NsId::NONE, 128)).unwrap();
        let groups = log
            .groups
            .iter()
            .map(|group| (group.id, group.state, &group.namespaces[..]));
        assert_eq!(
            groups.collect::<Vec<_>>(),
            [
                (1, AnaState::Optimized, &[NsId(1)][..]),
                (5, state, &[NsId(2)][..])
            ]
        );
        assert_eq!(log.changes, log.groups[1].changes);
        here.request_event(9);
        assert_eq!(here.admin.poll_event(), None);
    }
    let all = rule(None, AnaState::Inaccessible);
    subsystem.set_ana_state(all).unwrap();
    let mut data = vec![0; 512];
    assert_eq!(
        there.blocks(Opcode::READ, 2, 0, &mut data),
        Status::ANA_INACCESSIBLE
    );
    // Nobody is told of what is as it was.
    assert!(here.admin.poll_event().is_some());
    here.log(LogId::ANA, NsId::NONE, 128);
    here.request_event(9);
    assert_eq!(subsystem.set_ana_state(all), Ok(false));
    assert_eq!(subsystem.set_ana_group(NsId(2), 5), Ok(false));
    assert_eq!(here.admin.poll_event(), None);
    // A namespace takes the state of the group to which it moves.
    assert_eq!(subsystem.set_ana_group(NsId(2), 6), Ok(true));
    assert!(here.admin.poll_event().is_some());
    assert_eq!(here.blocks(Opcode::READ, 2, 0, &mut data), Status::SUCCESS);
    let wrong = AnaRule {
        group: Some(129),
        ..all
    };
    assert!(subsystem.set_ana_state(wrong).is_err());
    assert!(subsystem.set_ana_group(NsId(7), 1).is_err());
}

#[test]
fn cntlids__stay_in_the_range_of_the_node() {
    let now = Instant::now();
    let subsystem = Subsystem::new(
        Nqn::new(SUBSYSTEM).unwrap(),
        "serial",
        Hosts::any(Terms::default()),
    )
    .with_cntlids(100..=101);
    let target = Target::default();
    target.add_subsystem(Arc::new(subsystem)).unwrap();
    let target = Arc::new(target);
    let (first, second) = (admin(&target, SUBSYSTEM, now), admin(&target, SUBSYSTEM, now));
    assert_eq!((first.1, second.1), (100, 101));
    let mut queue = Queue::new(target.clone(), PORT, LOCAL, now);
    let data = emitted(&connect_data(SUBSYSTEM, ConnectData::ANY_CONTROLLER));
    let cqe = completed(run(&mut queue, &connect(0).command(Cid(0)), &data, now));
    assert!(cqe.status.is(Status::CONNECT_BUSY));
    drop(first);
    assert_eq!(admin(&target, SUBSYSTEM, now).1, 100);
}

#[test]
fn cntlids__begin_at_any_place_of_the_range() {
    let now = Instant::now();
    for (place, expected) in [
        (0, [100, 101, 102]),
        (2, [102, 100, 101]),
        (u16::MAX, [100, 101, 102]),
    ] {
        let hosts = Hosts::any(Terms::default());
        let subsystem = Subsystem::new(Nqn::new(SUBSYSTEM).unwrap(), "serial", hosts);
        let subsystem = subsystem.with_cntlids(100..=102).with_first_cntlid(place);
        let target = Target::default();
        target.add_subsystem(Arc::new(subsystem)).unwrap();
        let target = Arc::new(target);
        let admins = [(); 3].map(|()| admin(&target, SUBSYSTEM, now));
        assert_eq!(admins.map(|(_, cntlid)| cntlid), expected, "{place}");
    }
}
