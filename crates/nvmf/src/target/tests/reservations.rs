//! Reservations: who may do what, and how that changes.

use super::*;
use crate::reservations::ReservationFolder;
use crate::target::namespace::Medium;
use crate::target::reservation::Reservations;
use crate::target::subsystem::NamespaceError;

fn command(opcode: Opcode, action: ReservationAction) -> Sqe {
    let mut sqe = Sqe::new(opcode, Cid(7), NsId(1));
    let command = ReservationCommand {
        action,
        ignores_key: false,
        persists: None,
    };
    sqe.set_dword(10, command.dword());
    sqe
}

impl Host {
    fn reserve(&mut self, action: ReservationAction, current: u64, other: u64) -> Status {
        self.reserve_with(action, (current, other), |_| {})
    }

    fn reserve_with(
        &mut self,
        action: ReservationAction,
        (current, other): (u64, u64),
        change: impl FnOnce(&mut Sqe),
    ) -> Status {
        let (opcode, bytes) = match action {
            ReservationAction::Register | ReservationAction::Unregister | ReservationAction::Replace => {
                (Opcode::RESERVATION_REGISTER, 16)
            }
            ReservationAction::Acquire(_) | ReservationAction::Preempt { .. } => {
                (Opcode::RESERVATION_ACQUIRE, 16)
            }
            ReservationAction::Release(_) | ReservationAction::Clear => (Opcode::RESERVATION_RELEASE, 8),
        };
        let mut sqe = command(opcode, action);
        change(&mut sqe);
        let mut data = ReservationKeys { current, other }.emit()[..bytes].to_vec();
        Status(self.run(&sqe, &mut data).code())
    }

    /// Registers with a key that is the host's id.
    fn register(&mut self) {
        let key = self.id.into();
        assert_eq!(self.reserve(ReservationAction::Register, 0, key), Status::SUCCESS);
    }

    fn acquire(&mut self, kind: ReservationType) -> Status {
        self.reserve(ReservationAction::Acquire(kind), self.id.into(), 0)
    }

    fn release(&mut self, kind: ReservationType) -> Status {
        self.reserve(ReservationAction::Release(kind), self.id.into(), 0)
    }

    fn preempt(&mut self, kind: ReservationType, key: u64, aborts: bool) -> Status {
        self.reserve(ReservationAction::Preempt { kind, aborts }, self.id.into(), key)
    }

    fn report(&mut self) -> ReservationReport {
        let mut sqe = Sqe::new(Opcode::RESERVATION_REPORT, Cid(8), NsId(1));
        sqe.set_dword(10, 1023);
        sqe.set_dword(11, 1);
        let mut data = vec![0; 4096];
        // The transport tells of bytes that it can send.
        match self.io.admit(&sqe, 4096, Instant::now()) {
            Ok(Admitted::Command { receives: 0 }) => data = sent(self.io.execute(&sqe, &[], Instant::now())),
            other => panic!("{other:?}"),
        }
        ReservationReport::parse(&data).unwrap()
    }

    /// Returns registrants and their keys, and who holds.
    fn registrants(&mut self) -> Vec<(u8, u64, bool)> {
        let report = self.report();
        let shown = report.controllers.iter();
        shown
            .map(|entry| (entry.host.0[0], entry.key, entry.is_holder))
            .collect()
    }

    /// Returns the notifications that wait, and namespaces.
    fn notices(&mut self) -> Vec<(u8, u32)> {
        std::iter::from_fn(|| {
            let log = self.log(LogId::RESERVATIONS, NsId::NONE, 64);
            (log[8] != 0).then(|| (log[8], u32::from(log[12])))
        })
        .collect()
    }
}

fn hosts<const N: usize>(target: &Arc<Target>) -> [Host; N] {
    std::array::from_fn(|at| Host::new(target, at as u8 + 1, Instant::now()))
}

/// The specification's table: for each type whether a registrant that does not hold it reads and writes, and another host.
const TABLE: [(ReservationType, [bool; 2], [bool; 2]); 6] = [
    (ReservationType::WriteExclusive, [true, false], [true, false]),
    (ReservationType::ExclusiveAccess, [false, false], [false, false]),
    (
        ReservationType::WriteExclusiveRegistrants,
        [true, true],
        [true, false],
    ),
    (
        ReservationType::ExclusiveAccessRegistrants,
        [true, true],
        [false, false],
    ),
    (ReservationType::WriteExclusiveAll, [true, true], [true, false]),
    (ReservationType::ExclusiveAccessAll, [true, true], [false, false]),
];

/// Runs each I/O command there is.
fn check(host: &mut Host, [reads, writes]: [bool; 2], what: &str) {
    let status = |is_let: bool| match is_let {
        true => Status::SUCCESS,
        false => Status::RESERVATION_CONFLICT,
    };
    let mut ran = 0;
    let mut expect = |host: &mut Host, sqe: &Sqe, mut data: Vec<u8>, is_let| {
        let got = Status(host.run(sqe, &mut data).code());
        assert_eq!(got, status(is_let), "{what}: {sqe:?}");
        ran += 1;
    };
    let block = |opcode| blocks(opcode, 1, 0, 1);
    expect(host, &block(Opcode::READ), vec![0; 512], reads);
    expect(host, &block(Opcode::COMPARE), vec![0; 512], reads);
    expect(host, &block(Opcode::VERIFY), vec![], reads);
    expect(host, &block(Opcode::WRITE), vec![0; 512], writes);
    expect(host, &block(Opcode::WRITE_ZEROES), vec![], writes);
    expect(host, &Sqe::new(Opcode::FLUSH, Cid(7), NsId(1)), vec![], writes);
    let mut manage = Sqe::new(Opcode::DATASET_MANAGEMENT, Cid(7), NsId(1));
    manage.set_dword(11, DatasetRange::DEALLOCATE);
    expect(host, &manage, vec![0; 16], writes);
    let mut copy = Sqe::new(Opcode::COPY, Cid(7), NsId(1));
    let (slba, ranges, format, fua) = (5, 1, 0, false);
    Copy {
        slba,
        ranges,
        format,
        fua,
    }
    .emit(&mut copy);
    expect(host, &copy, vec![0; 32], writes);
    assert_eq!(
        ran + 4,
        io::SUPPORTED.len(),
        "the four others change reservations"
    );
}

#[test]
fn io__follows_the_table_of_types_and_hosts() {
    for (kind, registrant_may, other_may) in TABLE {
        let (target, _) = target();
        let [mut holder, mut registrant, mut other] = hosts(&target);
        for host in [&mut holder, &mut registrant, &mut other] {
            check(host, [true, true], "no reservation");
        }
        holder.register();
        registrant.register();
        for host in [&mut holder, &mut registrant, &mut other] {
            check(host, [true, true], "registrants alone");
        }
        assert_eq!(holder.acquire(kind), Status::SUCCESS);
        check(&mut holder, [true, true], &format!("{kind:?}, holder"));
        check(&mut registrant, registrant_may, &format!("{kind:?}, registrant"));
        check(&mut other, other_may, &format!("{kind:?}, other"));
        // Also by another controller of the host.
        let mut again = Host::new(&target, 3, Instant::now());
        check(&mut again, other_may, &format!("{kind:?}, other again"));
        assert_eq!(holder.release(kind), Status::SUCCESS);
        for host in [&mut holder, &mut registrant, &mut other] {
            check(host, [true, true], "released");
        }
    }
}

#[test]
fn io__is_checked_again_when_it_runs() {
    let now = Instant::now();
    let (target, _) = target();
    let [mut holder, mut other] = hosts(&target);
    let Ok(Admitted::Io(write)) = other.io.admit(&blocks(Opcode::WRITE, 1, 0, 1), 512, now) else {
        panic!("it is no I/O");
    };
    holder.register();
    assert_eq!(holder.acquire(ReservationType::WriteExclusive), Status::SUCCESS);
    assert!(write.execute(&mut [1; 512]).is(Status::RESERVATION_CONFLICT));
    assert_eq!(holder.read(1, 0, 1), [0; 512]);
}

#[test]
fn file__is_left_alone_by_the_ring_of_who_lost_it() {
    let now = Instant::now();
    let (target, subsystem) = target();
    subsystem.remove_namespace(NsId(1)).unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let on_file = Namespace {
        backend: Arc::new(FileBackend::open(file.path(), false, 512).unwrap()),
        ..memory(1, 512)
    };
    subsystem.add_namespace(on_file).unwrap();
    let [mut holder, mut other] = hosts(&target);
    let Ok(Admitted::Io(write)) = other.io.admit(&blocks(Opcode::WRITE, 1, 0, 1), 512, now) else {
        panic!("it is no I/O");
    };
    holder.register();
    let running = write.start().expect("every host may write");
    std::thread::scope(|scope| {
        // The reservation is there when what the ring carries out is over.
        let holder = &mut holder;
        let acquires = scope.spawn(|| holder.acquire(ReservationType::WriteExclusive));
        while write.namespace.fence().try_enter(0) {
            write.namespace.fence().leave(0);
            std::thread::yield_now();
        }
        assert!(write.start().is_none() && !acquires.is_finished());
        drop(running);
        assert_eq!(acquires.join().unwrap(), Status::SUCCESS);
    });
    assert!(write.start().is_none());
    assert!(
        write
            .execute(&mut Pages::new(512))
            .is(Status::RESERVATION_CONFLICT)
    );
    // Another size makes it another object, with the same reservation.
    file.as_file().set_len(2 << 20).unwrap();
    assert_eq!(subsystem.resize_namespace(NsId(1)), Ok(true));
    assert_eq!(holder.registrants(), [(1, 1, true)]);
    check(&mut other, [true, false], "resized");
}

#[test]
fn commands__check_keys() {
    use ReservationAction::*;
    let kind = ReservationType::WriteExclusive;
    let (target, _) = target();
    let [mut one, mut two] = hosts(&target);
    let conflict = Status::RESERVATION_CONFLICT;
    assert_eq!(one.reserve(Register, 0, 0), Status::INVALID_FIELD, "no key");
    for action in [
        Unregister,
        Replace,
        Acquire(kind),
        Preempt { kind, aborts: false },
        Release(kind),
        Clear,
    ] {
        assert_eq!(one.reserve(action, 1, 1), conflict, "no registrant: {action:?}");
    }
    one.register();
    one.register();
    assert_eq!(one.reserve(Register, 0, 5), conflict, "another key");
    for action in [
        Unregister,
        Replace,
        Acquire(kind),
        Preempt { kind, aborts: true },
        Release(kind),
        Clear,
    ] {
        assert_eq!(one.reserve(action, 9, 1), conflict, "a wrong key: {action:?}");
    }
    assert_eq!(one.reserve(Replace, 1, 0), Status::INVALID_FIELD);
    assert_eq!(one.reserve(Replace, 1, 11), Status::SUCCESS);
    let ignores_key = |sqe: &mut Sqe| sqe.set_dword(10, sqe.dword(10) | 1 << 3);
    assert_eq!(one.reserve_with(Replace, (99, 12), ignores_key), Status::SUCCESS);
    assert_eq!(
        two.reserve_with(Replace, (99, 12), ignores_key),
        conflict,
        "no registrant"
    );
    assert_eq!(one.registrants(), [(1, 12, false)]);
    assert_eq!(one.report().generation, 3);
    assert_eq!(one.reserve(Acquire(kind), 12, 0), Status::SUCCESS);
    assert_eq!(one.reserve(Acquire(kind), 12, 0), Status::SUCCESS, "it holds it");
    let other = ReservationType::ExclusiveAccess;
    assert_eq!(one.reserve(Acquire(other), 12, 0), conflict);
    assert_eq!(one.reserve(Release(other), 12, 0), Status::INVALID_FIELD);
    two.register();
    assert_eq!(two.acquire(kind), conflict);
    assert_eq!(two.release(kind), Status::SUCCESS, "nothing of it to release");
    assert_eq!(two.registrants(), [(1, 12, true), (2, 2, false)]);
    assert_eq!(
        one.reserve_with(Unregister, (99, 0), ignores_key),
        Status::SUCCESS
    );
    assert_eq!(two.registrants(), [(2, 2, false)]);
    assert_eq!(two.report().kind, None, "its holder has gone");
    let mut short = vec![0; 15];
    let sqe = command(Opcode::RESERVATION_REGISTER, Register);
    assert!(two.run(&sqe, &mut short).is(Status::SGL_LENGTH_INVALID));
}

#[test]
fn report__lists_controllers_and_wants_long_host_ids() {
    let now = Instant::now();
    let (target, _) = target();
    let [mut one, mut two] = hosts(&target);
    one.register();
    two.register();
    assert_eq!(one.acquire(ReservationType::ExclusiveAccessAll), Status::SUCCESS);
    let second = Host::new(&target, 1, now);
    drop(two);
    let report = one.report();
    let shown: Vec<_> = report
        .controllers
        .iter()
        .map(|entry| (entry.cntlid, entry.host.0[0], entry.is_holder))
        .collect();
    assert_eq!(
        shown,
        [(one.cntlid, 1, true), (second.cntlid, 1, true), (0xffff, 2, true)]
    );
    let mut sqe = Sqe::new(Opcode::RESERVATION_REPORT, Cid(8), NsId(1));
    let refused = match one.io.admit(&sqe, 4096, now) {
        Ok(_) => completed(one.io.execute(&sqe, &[], now)).status,
        Err(cqe) => cqe.status,
    };
    assert!(refused.is(Status::HOST_ID_FORMAT));
    sqe.set_dword(11, 1);
    sqe.set_dword(10, 1);
    one.io.admit(&sqe, 8, now).unwrap();
    assert_eq!(sent(one.io.execute(&sqe, &[], now)).len(), 8);
}

#[test]
fn preempt__takes_registrations_and_the_reservation() {
    use ReservationType::*;
    // Without a reservation it takes registrations alone.
    let (free, _) = target();
    let [mut one, mut two, mut three] = hosts(&free);
    for host in [&mut one, &mut two, &mut three] {
        host.register();
    }
    assert_eq!(
        one.preempt(WriteExclusive, 9, false),
        Status::RESERVATION_CONFLICT
    );
    assert_eq!(one.preempt(WriteExclusive, 0, false), Status::INVALID_FIELD);
    assert_eq!(one.preempt(WriteExclusive, 2, false), Status::SUCCESS);
    assert_eq!(one.registrants(), [(1, 1, false), (3, 3, false)]);
    assert_eq!((two.notices(), three.notices()), (vec![(1, 1)], vec![]));
    // The holder's key takes the reservation, with another type.
    for aborts in [false, true] {
        let (target, _) = target();
        let [mut one, mut two, mut three] = hosts(&target);
        for host in [&mut one, &mut two, &mut three] {
            host.register();
        }
        assert_eq!(two.acquire(WriteExclusiveRegistrants), Status::SUCCESS);
        assert_eq!(one.preempt(ExclusiveAccess, 3, aborts), Status::SUCCESS);
        assert_eq!(
            one.registrants(),
            [(1, 1, false), (2, 2, true)],
            "no holder's key"
        );
        three.register();
        assert_eq!(three.notices(), [(1, 1)]);
        assert_eq!(one.preempt(ExclusiveAccess, 2, aborts), Status::SUCCESS);
        assert_eq!(one.registrants(), [(1, 1, true), (3, 3, false)]);
        assert_eq!(one.report().kind, Some(ExclusiveAccess));
        assert_eq!(two.notices(), [(1, 1), (3, 1)]);
        assert_eq!(
            three.notices(),
            [(2, 1)],
            "the type that let registrants in is over"
        );
        assert_eq!(one.notices(), []);
        check(&mut two, [false, false], "preempted");
        // It preempts itself, to another type.
        assert_eq!(one.preempt(WriteExclusiveAll, 1, aborts), Status::SUCCESS);
        assert_eq!(one.registrants(), [(1, 1, true), (3, 3, true)]);
        // Key 0 takes the registrations of all others.
        assert_eq!(three.preempt(WriteExclusive, 0, aborts), Status::SUCCESS);
        assert_eq!(three.registrants(), [(3, 3, true)]);
        assert_eq!(one.notices(), [(1, 1), (3, 1)]);
    }
}

#[test]
fn release_and_clear__tell_other_registrants() {
    use ReservationType::*;
    for kind in ReservationType::ALL {
        let (target, _) = target();
        let [mut one, mut two] = hosts(&target);
        one.register();
        two.register();
        assert_eq!(one.acquire(kind), Status::SUCCESS);
        two.request_event(9);
        assert_eq!(two.admin.poll_event(), None);
        assert_eq!(one.release(kind), Status::SUCCESS);
        let tells = !matches!(kind, WriteExclusive | ExclusiveAccess);
        assert_eq!(
            one.io.take_reset(),
            tells,
            "queues of the other host may be elsewhere"
        );
        let event = two.admin.poll_event();
        assert_eq!(
            event.map(|cqe| cqe.result),
            tells.then_some(0x80_0006),
            "{kind:?}"
        );
        assert_eq!(two.notices(), vec![(2, 1); usize::from(tells)]);
        assert_eq!(one.acquire(kind), Status::SUCCESS);
        assert_eq!(two.reserve(ReservationAction::Clear, 2, 0), Status::SUCCESS);
        assert_eq!(one.notices(), [(3, 1)]);
        assert_eq!(two.registrants(), []);
    }
}

#[test]
fn notices__can_be_masked_and_are_bounded() {
    let (target, _) = target();
    let [mut one, mut two] = hosts(&target);
    assert!(
        completed(two.set_features(0x82, NsId(1), 1 << 3, &[]))
            .status
            .is_success()
    );
    assert_eq!(completed(two.get_features(0x82, NsId(1), 0)).result, 1 << 3);
    one.register();
    for _ in 0..2 {
        two.register();
        assert_eq!(
            one.preempt(ReservationType::WriteExclusive, 2, false),
            Status::SUCCESS
        );
        two.register();
        assert_eq!(one.reserve(ReservationAction::Clear, 1, 0), Status::SUCCESS);
        one.register();
    }
    assert_eq!(two.notices(), [(1, 1), (1, 1)], "clear is masked");
    for _ in 0..300 {
        two.register();
        assert_eq!(
            one.preempt(ReservationType::WriteExclusive, 2, false),
            Status::SUCCESS
        );
    }
    let log = two.log(LogId::RESERVATIONS, NsId::NONE, 64);
    assert_eq!((log[0], log[8], log[9]), (3, 1, 254));
    assert_eq!(two.notices().len(), 254);
}

#[test]
fn reservations__are_kept_where_a_host_asks_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        let subsystem = Subsystem::new(
            Nqn::new(SUBSYSTEM).unwrap(),
            "serial",
            Hosts::any(Terms::default()),
        );
        let store = Arc::new(ReservationFolder::new(folder.path()));
        let subsystem = Arc::new(subsystem.with_reservations(store));
        subsystem.add_namespace(memory(1, 1 << 20)).unwrap();
        let target = Target::default();
        target.add_subsystem(subsystem).unwrap();
        Arc::new(target)
    };
    let kind = ReservationType::ExclusiveAccess;
    let persist = |value: u32| move |sqe: &mut Sqe| sqe.set_dword(10, sqe.dword(10) | value << 30);
    let target = start();
    let [mut one, mut two] = hosts(&target);
    let bytes = sent(identify(&mut one.admin, Cns::NAMESPACE, 1, Instant::now()));
    assert_eq!(IdentifyNamespace::parse(&bytes).unwrap().reservations, 0xff);
    one.register();
    assert_eq!(one.acquire(kind), Status::SUCCESS);
    let target = start();
    let [mut again, mut other] = hosts(&target);
    assert_eq!(again.registrants(), [], "nobody has asked for it");
    assert_eq!(
        again.reserve_with(ReservationAction::Register, (0, 1), persist(3)),
        Status::SUCCESS
    );
    assert_eq!(again.acquire(kind), Status::SUCCESS);
    assert!(again.report().persists && !two.report().persists);
    check(&mut other, [false, false], "before the restart");
    let target = start();
    let [mut again, mut other] = hosts(&target);
    check(&mut other, [false, false], "after the restart");
    check(&mut again, [true, true], "after the restart");
    assert_eq!(again.report().generation, 1);
    assert_eq!(completed(again.get_features(0x83, NsId(1), 0)).result, 1);
    // The feature turns it off, which waits for the medium.
    assert!(matches!(again.set_features(0x83, NsId(1), 0, &[]), Step::Wait));
    assert!(again.admin.poll_event().is_none());
    let io = again.admin.poll_flush().unwrap();
    assert!(io.may_wait());
    let status = io.execute(&mut []);
    again.admin.flushed(status);
    assert!(again.admin.poll_event().unwrap().status.is_success());
    let target = start();
    let [mut again, _other] = hosts(&target);
    assert_eq!(again.registrants(), []);
    // Without a place for it.
    let (bare, _) = super::target();
    let mut host = Host::new(&bare, 1, Instant::now());
    assert_eq!(
        host.reserve_with(ReservationAction::Register, (0, 1), persist(3)),
        Status::INVALID_FIELD
    );
    assert_eq!(host.registrants(), []);
    // A file that cannot be read keeps the namespace from being served.
    std::fs::write(folder.path().join("01010101-0101-0101-0101-010101010101"), "x").unwrap();
    let subsystem = Subsystem::new(
        Nqn::new(SUBSYSTEM).unwrap(),
        "serial",
        Hosts::any(Terms::default()),
    );
    let subsystem = subsystem.with_reservations(Arc::new(ReservationFolder::new(folder.path())));
    let refused = subsystem.add_namespace(memory(1, 1 << 20));
    assert!(matches!(refused, Err(NamespaceError::Reservations(NsId(1), _))));
}

/// Starts subsystems, each of a target of its own, whose namespace 1 is one storage. The storage and each namespace have UUIDs.
fn sharing(
    folder: &std::path::Path,
    storage: [u8; 16],
    uuids: &[[u8; 16]],
) -> Vec<(Arc<Target>, Arc<Subsystem>)> {
    let mut medium = None;
    let start = |uuid: &[u8; 16]| {
        let hosts = Hosts::any(Terms::default());
        let subsystem = Subsystem::new(Nqn::new(SUBSYSTEM).unwrap(), "serial", hosts);
        let subsystem = Arc::new(subsystem.with_reservations(Arc::new(ReservationFolder::new(folder))));
        let namespace = Namespace {
            uuid: *uuid,
            ..memory(1, 1 << 20)
        };
        let namespace = subsystem
            .prepare_namespace(namespace, 1, storage, medium.take())
            .unwrap();
        namespace.medium().add_subsystem(&subsystem);
        medium = Some(namespace.medium().clone());
        subsystem.add_prepared(namespace).unwrap();
        let target = Target::default();
        target.add_subsystem(subsystem.clone()).unwrap();
        (Arc::new(target), subsystem)
    };
    uuids.iter().map(start).collect()
}

#[test]
fn reservations__of_a_storage_of_several_subsystems_are_kept_in_any_order() {
    let (storage, first, second) = ([0xaa; 16], [1; 16], [2; 16]);
    let kind = ReservationType::ExclusiveAccess;
    let persist = |sqe: &mut Sqe| sqe.set_dword(10, sqe.dword(10) | 3 << 30);
    let register = (ReservationAction::Register, (0, 1));
    let holder = [(1, 1, true)];
    // Kept under the UUID of the storage, or by an earlier version under that of a namespace.
    for kept_as in [storage, first, second] {
        let folder = tempfile::tempdir().unwrap();
        let targets = sharing(folder.path(), kept_as, &[first, second]);
        let mut one = Host::new(&targets[0].0, 1, Instant::now());
        assert_eq!(one.reserve_with(register.0, register.1, persist), Status::SUCCESS);
        assert_eq!(one.acquire(kind), Status::SUCCESS);
        drop((one, targets));
        for order in [[first, second], [second, first], [second, second], [first, first]] {
            let targets = sharing(folder.path(), storage, &order);
            for (target, _) in &targets {
                let [mut one, mut two] = hosts(target);
                assert_eq!(one.registrants(), holder, "{kept_as:?}, {order:?}");
                check(&mut two, [false, false], "after the restart");
            }
        }
        // Nothing is found again once a host does not want it any more.
        let targets = sharing(folder.path(), storage, &[first, second]);
        let reservations = |at: usize| targets[at].1.list()[0].medium().clone();
        reservations(0).reservations().set_persists(false).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

#[test]
fn reservations__of_a_storage_with_several_names_are_kept_under_each() {
    let folder = tempfile::tempdir().unwrap();
    let (storage, named) = ([0xaa; 16], [1; 16]);
    let reservations = |uuids: &[[u8; 16]]| {
        let medium = Arc::new(Medium::new(Reservations::in_store(Arc::new(
            ReservationFolder::new(folder.path()),
        ))));
        for uuid in uuids {
            medium.reservations().add_name(*uuid).unwrap();
        }
        medium
    };
    let medium = reservations(&[storage]);
    medium.reservations().set_persists(true).unwrap();
    medium.reservations().add_name(named).unwrap();
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files(), 2);
    for order in [[storage, named], [named, storage]] {
        assert!(reservations(&order).reservations().state().1);
    }
    medium.reservations().set_persists(false).unwrap();
    assert_eq!(files(), 0);
}

#[test]
fn notices__come_to_hosts_of_other_subsystems_of_a_storage() {
    let folder = tempfile::tempdir().unwrap();
    let targets = sharing(folder.path(), [0xaa; 16], &[[1; 16], [2; 16]]);
    let mut one = Host::new(&targets[0].0, 1, Instant::now());
    let mut two = Host::new(&targets[1].0, 2, Instant::now());
    one.register();
    two.register();
    let kind = ReservationType::WriteExclusiveRegistrants;
    assert_eq!(one.acquire(kind), Status::SUCCESS);
    assert_eq!(one.release(kind), Status::SUCCESS);
    assert_eq!((one.notices(), two.notices()), (vec![], vec![(2, 1)]));
    // A host that has come to another subsystem is a registrant without a controller.
    let controllers = one.report().controllers;
    assert_eq!(controllers[0].cntlid, one.cntlid);
    assert_eq!((controllers[1].host.0[0], controllers[1].cntlid), (2, u16::MAX));
    // A namespace that was removed is none of the storage.
    targets[1].1.remove_namespace(NsId(1)).unwrap();
    assert_eq!(one.acquire(kind), Status::SUCCESS);
    assert_eq!(one.release(kind), Status::SUCCESS);
    assert_eq!(two.notices(), []);
}
