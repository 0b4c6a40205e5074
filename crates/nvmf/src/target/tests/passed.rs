//! Commands that pass to a drive's controller, by queues of a host.

use rdmux_runtime::Direction;

use super::*;
use crate::passthrough::Allow;
use crate::passthrough::tests::{ALL, DATA_MAX, FakeDrive, controller};

/// A target whose subsystem is a drive with namespaces 1 and 3.
fn target_of(allow: Allow) -> (Arc<Target>, Arc<FakeDrive>) {
    let drive = FakeDrive::new(5, false);
    let subsystem = Subsystem::new(
        Nqn::new(SUBSYSTEM).unwrap(),
        "serial",
        Hosts::any(Terms::default()),
    );
    let subsystem = subsystem.with_drive(controller(&drive, allow));
    let target = Target::default();
    target.add_subsystem(Arc::new(subsystem)).unwrap();
    (Arc::new(target), drive)
}

/// Runs an admin command as a transport does. Data that it returns take the place of `data`.
fn admin_of(host: &mut Host, sqe: &Sqe, data: &mut Vec<u8>) -> (Status, u64) {
    match host.admin.admit(sqe, data.len() as u32, Instant::now()) {
        Ok(Admitted::Io(io)) => {
            assert!(io.may_wait(), "not on a reactor's thread");
            let mut pages = Pages::new(data.len());
            pages.copy_from_slice(data);
            let length = if io.operation.has_data() { data.len() } else { 0 };
            let status = io.execute(&mut pages[..length]);
            data.copy_from_slice(&pages);
            let cqe = host.admin.complete(sqe.cid(), status, io.result());
            (cqe.status, cqe.result)
        }
        Ok(Admitted::Command { receives }) => {
            let received = data[..receives as usize].to_vec();
            match host.admin.execute(sqe, &received, Instant::now()) {
                Step::Complete(cqe) => (cqe.status, cqe.result),
                Step::Send(sent, cqe) => {
                    *data = sent;
                    (cqe.status, cqe.result)
                }
                Step::Wait => panic!("{sqe:?} waits"),
            }
        }
        Err(cqe) => (cqe.status, cqe.result),
    }
}

fn admin_command(opcode: Opcode, dword10: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, Cid(3), NsId(1));
    sqe.set_dword(10, dword10);
    sqe
}

#[test]
fn passed__a_host_sees_the_drive_by_a_controller_of_the_target() {
    let (target, _) = target_of(Allow::default());
    let mut host = Host::new(&target, 1, Instant::now());
    let mut bytes = vec![0; IDENTIFY_LEN];
    let identify = admin_command(Opcode::IDENTIFY, 1);
    assert_eq!(admin_of(&mut host, &identify, &mut bytes), (Status::SUCCESS, 7));
    let seen = IdentifyController::parse(&bytes).unwrap();
    assert_eq!((seen.serial.as_str(), seen.cntlid), ("fake serial", host.cntlid));
    assert_eq!(seen.subsystem.as_str(), SUBSYSTEM);
    assert_eq!(4096 << seen.mdts, DATA_MAX);
    assert_eq!((seen.fused, seen.version, seen.namespaces), (0, 0x1_0400, 8));
    let version = Property {
        register: Register::VERSION,
        is_wide: false,
        value: 0,
    };
    let sqe = version.command(FabricsType::PROPERTY_GET, Cid(1));
    assert_eq!(
        completed(run(&mut host.admin, &sqe, &[], Instant::now())).result,
        0x1_0400
    );
    let mut list = vec![0; IDENTIFY_LEN];
    let mut active = admin_command(Opcode::IDENTIFY, 2);
    active.set_dword(1, 0);
    admin_of(&mut host, &active, &mut list);
    assert_eq!(
        parse_namespace_list(&list).collect::<Vec<_>>(),
        [NsId(1), NsId(3)]
    );
}

#[test]
fn passed__reads_and_writes_reach_the_drive_as_they_are() {
    let (target, drive) = target_of(Allow::default());
    let mut host = Host::new(&target, 1, Instant::now());
    let mut data = vec![9; 4096];
    assert_eq!(host.blocks(Opcode::WRITE, 3, 8, &mut data), Status::SUCCESS);
    assert_eq!(host.read(3, 8, 8), [9; 4096]);
    assert_eq!(host.read(1, 8, 8), [0; 4096]);
    let mut other = vec![8; 4096];
    assert_eq!(
        host.blocks(Opcode::COMPARE, 3, 8, &mut other),
        Status::COMPARE_FAILURE.do_not_retry()
    );
    assert_eq!(drive.take_seen(Opcode::COMPARE, false), 1);
    let (_, subsystem) = (&target, target.subsystem(&Nqn::new(SUBSYSTEM).unwrap()).unwrap());
    let counts = subsystem.counts();
    assert_eq!((counts.writes, counts.written_bytes), (1, 4096));
    assert_eq!((counts.reads, counts.read_bytes), (3, 3 * 4096));
    drive.fail(Status::READ_ERROR.do_not_retry());
    assert_eq!(
        host.blocks(Opcode::READ, 3, 8, &mut data),
        Status::READ_ERROR.do_not_retry()
    );
    assert_eq!(subsystem.counts().media_errors, 1);
}

#[test]
fn passed__pairs_and_reservations_are_refused_before_the_drive() {
    let (target, drive) = target_of(ALL);
    let mut host = Host::new(&target, 1, Instant::now());
    for fuse in [1, 2, 3] {
        let mut bytes = *blocks(Opcode::COMPARE, 1, 0, 1).as_bytes();
        bytes[1] |= fuse;
        let sqe = Sqe::parse(&bytes).unwrap();
        assert_eq!(
            host.run(&sqe, &mut vec![0; 512]),
            Status::INVALID_FIELD.do_not_retry()
        );
    }
    for opcode in [
        Opcode::RESERVATION_REGISTER,
        Opcode::RESERVATION_REPORT,
        Opcode::RESERVATION_ACQUIRE,
        Opcode::RESERVATION_RELEASE,
    ] {
        let sqe = Sqe::new(opcode, Cid(4), NsId(1));
        assert_eq!(
            host.run(&sqe, &mut vec![0; 64]),
            Status::INVALID_OPCODE.do_not_retry()
        );
        assert_eq!(drive.take_seen(opcode, false), 0);
    }
    assert_eq!(drive.take_seen(Opcode::COMPARE, false), 0);
}

#[test]
fn passed__what_is_the_fabrics_stays_the_targets() {
    let (target, drive) = target_of(ALL);
    let mut host = Host::new(&target, 1, Instant::now());
    host.request_event(20);
    let keep_alive = admin_command(Opcode::KEEP_ALIVE, 0);
    assert_eq!(
        admin_of(&mut host, &keep_alive, &mut Vec::new()).0,
        Status::SUCCESS
    );
    let mut id = vec![0; 16];
    assert_eq!(
        admin_of(&mut host, &admin_command(Opcode::GET_FEATURES, 0x81), &mut id).0,
        Status::SUCCESS
    );
    assert_eq!(id, [1; 16]);
    let queues = completed(host.set_features(0x07, NsId::NONE, 0x00ff_00ff, &[]));
    assert_eq!(queues.result, 0x007f_007f);
    for opcode in [
        Opcode::ASYNC_EVENT_REQUEST,
        Opcode::KEEP_ALIVE,
        Opcode::GET_FEATURES,
        Opcode::SET_FEATURES,
        Opcode::ABORT,
    ] {
        assert_eq!(drive.take_seen(opcode, true), 0, "{opcode:?}");
    }
    // The drive's.
    let cache = admin_command(Opcode::GET_FEATURES, 0x06);
    assert_eq!(admin_of(&mut host, &cache, &mut Vec::new()), (Status::SUCCESS, 7));
    assert_eq!(drive.take_seen(Opcode::GET_FEATURES, true), 1);
}

#[test]
fn passed__a_format_is_refused_unless_it_is_allowed_and_hosts_learn_of_it() {
    let format = admin_command(Opcode(0x80), 1);
    let (target, _) = target_of(Allow::default());
    let mut host = Host::new(&target, 1, Instant::now());
    let refused = Status::INVALID_OPCODE.do_not_retry();
    assert_eq!(admin_of(&mut host, &format, &mut Vec::new()).0, refused);

    let (target, drive) = target_of(ALL);
    let (mut host, mut other) = (
        Host::new(&target, 1, Instant::now()),
        Host::new(&target, 2, Instant::now()),
    );
    completed(other.set_features(0x0b, NsId::NONE, IdentifyController::NAMESPACE_EVENTS, &[]));
    other.request_event(9);
    assert!(other.admin.poll_event().is_none());
    assert_eq!(admin_of(&mut host, &format, &mut Vec::new()).0, Status::SUCCESS);
    assert_eq!(drive.take_seen(Opcode(0x80), true), 1);
    assert!(host.admin.take_reset(), "the driver tells other reactors");
    let event = other.admin.poll_event().expect("an event of the namespaces");
    assert_eq!(event.result, u64::from(AsyncEvent::NamespacesChanged.result()));
    let mut block = vec![5; 4096];
    assert_eq!(
        host.run(&blocks(Opcode::WRITE, 1, 0, 1), &mut block),
        Status::SUCCESS
    );
    let eight = host.run(&blocks(Opcode::WRITE, 1, 0, 8), &mut block);
    assert_eq!(eight, Status::SGL_LENGTH_INVALID.do_not_retry());
}

#[test]
fn passed__a_vendors_command_reaches_the_drive_and_its_refusal_comes_back() {
    let (target, drive) = target_of(Allow::default());
    let mut host = Host::new(&target, 1, Instant::now());
    let refused = Status::INVALID_OPCODE.do_not_retry();
    assert_eq!(
        admin_of(&mut host, &admin_command(Opcode(0xc0), 0), &mut Vec::new()).0,
        refused
    );
    assert_eq!(drive.take_seen(Opcode(0xc0), true), 1);
    let mut data = vec![0xee; 512];
    let answer = admin_of(&mut host, &admin_command(Opcode(0xc2), 0), &mut data);
    assert_eq!(answer, (Status::SUCCESS, 0x1234_5678_9abc));
    assert_eq!(data, [0xcc; 512]);
    let sqe = Sqe::new(Opcode(0x81), Cid(5), NsId(1));
    assert_eq!(host.run(&sqe, &mut vec![0; 512]), Status(0x1c0).do_not_retry());
    assert_eq!(drive.take_seen(Opcode(0x81), false), 1);
}

#[test]
fn passed__a_controller_that_is_over_has_the_drive_do_nothing() {
    let (target, drive) = target_of(ALL);
    let mut host = Host::new(&target, 1, Instant::now());
    let format = admin_command(Opcode(0x80), 1);
    let Ok(Admitted::Io(late)) = host.admin.admit(&format, 0, Instant::now()) else {
        panic!("it passes");
    };
    configure(&mut host.admin, 0, Instant::now());
    assert_eq!(late.execute(&mut []), Status::SQ_DELETED);
    assert_eq!(drive.take_seen(Opcode(0x80), true), 0);
}

#[test]
fn passed__plain_reads_and_writes_are_for_an_io_uring() {
    let (target, _) = target_of(ALL);
    let mut host = Host::new(&target, 1, Instant::now());
    let mut admit = |sqe: &Sqe| match host.io.admit(sqe, 4096, Instant::now()) {
        Ok(Admitted::Io(io)) => io,
        other => panic!("{other:?}"),
    };
    for (opcode, direction) in [(Opcode::READ, Direction::Read), (Opcode::WRITE, Direction::Write)] {
        let plain = blocks(opcode, 1, 8, 8);
        let io = admit(&plain);
        assert_eq!((io.offset, io.length), (4096, 4096));
        let (_, started, _running) = io.start().expect("it is plain");
        assert_eq!(started, direction);
        // FUA, an access pattern, an expected tag.
        for (nr, value) in [(12, 7 | 1 << 30), (13, 1), (14, 1)] {
            let mut other = plain;
            other.set_dword(nr, value);
            assert!(admit(&other).start().is_none(), "{other:?}");
        }
    }
    assert!(admit(&blocks(Opcode::COMPARE, 1, 8, 8)).start().is_none());
}

#[test]
fn passed__a_format_waits_for_an_io_uring() {
    let (target, drive) = target_of(ALL);
    let mut host = Host::new(&target, 1, Instant::now());
    let Ok(Admitted::Io(io)) = host
        .io
        .admit(&blocks(Opcode::READ, 1, 8, 8), 4096, Instant::now())
    else {
        panic!("it passes");
    };
    let (_, _, running) = io.start().expect("it is plain");
    let format = admin_command(Opcode(0x80), 1);
    let Ok(Admitted::Io(formats)) = host.admin.admit(&format, 0, Instant::now()) else {
        panic!("it passes");
    };
    assert!(formats.is_long() && !io.is_long());
    std::thread::scope(|scope| {
        let formatting = scope.spawn(move || formats.execute(&mut []));
        // Commands that come from then on do not begin.
        while io.start().is_some() {
            std::thread::yield_now();
        }
        assert_eq!(drive.take_seen(Opcode(0x80), true), 0);
        drop(running);
        assert_eq!(formatting.join().unwrap(), Status::SUCCESS);
    });
    assert_eq!(drive.take_seen(Opcode(0x80), true), 1);
    assert!(io.start().is_none(), "its blocks are no more");
    assert_eq!(
        io.execute(&mut Pages::new(4096)),
        Status::SGL_LENGTH_INVALID.do_not_retry()
    );
}
