//! Accelerators as namespaces: windows of hosts, and the commands that reach them.

use std::sync::atomic::{AtomicUsize, Ordering};

use rdmux_wire::accel::{
    AcceleratorInfo, Algorithm, DATA_OFFSET, Header, Job, JobCommand, JobKind, JobStatus, Outcome,
};

use super::*;
use crate::accelerator::{Accelerator, PANICS};

const WINDOW: u64 = 1 << 18;
const BLOCKS: u64 = WINDOW / 512;

/// Returns a target with the accelerators 2 (null, for 2 hosts at a time) and 3 (zstd), beside namespace 1.
fn accelerators() -> (Arc<Target>, Arc<Subsystem>, Arc<Accelerator>) {
    let (target, subsystem) = target();
    let make = |algorithm, hosts| {
        let info = AcceleratorInfo {
            algorithm,
            level: u8::from(algorithm == Algorithm::Zstd),
            windows: 3,
            window_bytes: WINDOW,
        };
        Arc::new(Accelerator::new(info, hosts))
    };
    let null = make(Algorithm::Null, 2);
    for (nsid, backend) in [(2, null.clone()), (3, make(Algorithm::Zstd, 8))] {
        let namespace = Namespace {
            backend,
            ..memory(nsid, 512)
        };
        subsystem.add_namespace(namespace).unwrap();
    }
    (target, subsystem, null)
}

fn job(algorithm: Algorithm, kind: JobKind, length: usize) -> Job {
    Job {
        kind,
        algorithm,
        level: 0,
        id: 7,
        length: length as u32,
        align: 0,
    }
}

fn image(job: Job, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; DATA_OFFSET as usize];
    Header { job, outcome: None }.emit(&mut bytes);
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn rw(opcode: Opcode, nsid: u32, slba: u64, bytes: usize) -> Sqe {
    blocks(opcode, nsid, slba, (bytes / 512) as u32)
}

fn write(host: &mut Host, nsid: u32, slba: u64, mut bytes: Vec<u8>) -> Status {
    host.blocks(Opcode::WRITE, nsid, slba, &mut bytes)
}

fn read(host: &mut Host, nsid: u32, slba: u64, bytes: usize) -> Vec<u8> {
    host.read(nsid, slba, bytes / 512)
}

fn outcome(window: &[u8]) -> Option<Outcome> {
    Header::parse(window).ok()?.outcome
}

#[test]
fn accelerator__passes_what_a_host_writes() {
    let (target, ..) = accelerators();
    let mut host = Host::new(&target, 1, Instant::now());
    let data: Vec<u8> = (0..10_000u32).map(|at| at as u8).collect();
    let bytes = image(job(Algorithm::Null, JobKind::Pass, data.len()), &data);
    // The header comes last, and not to the first window.
    assert!(write(&mut host, 2, BLOCKS + 8, bytes[4096..].to_vec()).is_success());
    let early = read(&mut host, 2, BLOCKS, 16384);
    assert!(early.iter().all(|byte| *byte == 0));
    assert!(write(&mut host, 2, BLOCKS, bytes[..4096].to_vec()).is_success());
    let window = read(&mut host, 2, BLOCKS, 16384);
    let done = outcome(&window).unwrap();
    assert_eq!((done.status, done.length), (JobStatus::Done, 10_000));
    assert_eq!(window[4096..14_096], data);
    assert!(window[14_096..].iter().all(|byte| *byte == 0));
}

#[test]
fn core__that_panics_fails_its_job_and_nothing_else() {
    let (target, ..) = accelerators();
    let [mut host, mut other] = [1, 2].map(|cntlid| Host::new(&target, cntlid, Instant::now()));
    let data = vec![b'a'; 10_000];
    let bytes = image(job(Algorithm::Zstd, JobKind::Compress, data.len()), &data);
    assert!(write(&mut other, 3, 0, bytes.clone()).is_success());
    let own = read(&mut other, 3, 0, 4096);
    PANICS.set(true);
    let failed = write(&mut host, 3, 0, bytes.clone());
    assert_eq!(failed, Status::INTERNAL_ERROR.do_not_retry());
    let done = outcome(&read(&mut host, 3, 0, 4096)).unwrap();
    assert_eq!((done.status, done.length), (JobStatus::Failed, 0));
    assert_eq!(read(&mut other, 3, 0, 4096), own);
    // Other namespaces, and the same core, go on.
    assert!(write(&mut host, 1, 0, vec![1; 512]).is_success());
    assert!(write(&mut host, 3, 0, bytes).is_success());
    let again = read(&mut host, 3, 0, 4096);
    assert_eq!(outcome(&again).unwrap().status, JobStatus::Done);
    assert_eq!(again, own);
}

#[test]
fn accelerator__says_what_it_is() {
    let (target, subsystem, _) = accelerators();
    let (mut admin, _) = admin(&target, SUBSYSTEM, Instant::now());
    let mut identify = |cns: Cns, nsid| {
        let mut sqe = Sqe::new(Opcode::IDENTIFY, Cid(3), NsId(nsid));
        sqe.set_dword(10, cns.0.into());
        match admin.admit(&sqe, IDENTIFY_LEN as u32, Instant::now()).unwrap() {
            Admitted::Command { .. } => sent(admin.execute(&sqe, &[], Instant::now())),
            Admitted::Io(_) => unreachable!(),
        }
    };
    let namespace = IdentifyNamespace::parse(&identify(Cns::NAMESPACE, 3)).unwrap();
    let info = namespace.accelerator.unwrap();
    assert_eq!((info.algorithm, info.windows), (Algorithm::Zstd, 3));
    assert_eq!(namespace.blocks, 3 * BLOCKS);
    let storage = IdentifyNamespace::parse(&identify(Cns::NAMESPACE, 1)).unwrap();
    assert_eq!(storage.accelerator, None);
    let model = |bytes: Vec<u8>| IdentifyController::parse(&bytes).unwrap().model;
    assert_eq!(model(identify(Cns::CONTROLLER, 0)), "rdmux accelerator");
    for nsid in [2, 3] {
        subsystem.remove_namespace(NsId(nsid)).unwrap();
    }
    assert_eq!(model(identify(Cns::CONTROLLER, 0)), "rdmux");
}

#[test]
fn accelerator__shows_a_host_its_own_windows_alone() {
    let (target, _, null) = accelerators();
    let now = Instant::now();
    let mut hosts = [1, 2].map(|id| Host::new(&target, id, now));
    // A probe starts nothing.
    assert!(read(&mut hosts[0], 2, 0, 65536).iter().all(|byte| *byte == 0));
    assert_eq!(null.hosts(), 0);
    for (number, host) in hosts.iter_mut().enumerate() {
        let data = vec![number as u8 + 1; 1000];
        let bytes = image(job(Algorithm::Null, JobKind::Pass, 1000), &data);
        assert!(write(host, 2, 0, bytes).is_success());
    }
    for (number, host) in hosts.iter_mut().enumerate() {
        assert_eq!(read(host, 2, 0, 8192)[4096..5096], vec![number as u8 + 1; 1000]);
        assert!(read(host, 2, BLOCKS, 8192).iter().all(|byte| *byte == 0));
    }
    // The windows of two hosts are all that it has; a third one sees none.
    let mut third = Host::new(&target, 3, now);
    let bytes = image(job(Algorithm::Null, JobKind::Pass, 1000), &[9; 1000]);
    assert!(write(&mut third, 2, 0, bytes.clone()).is(Status::CAPACITY_EXCEEDED));
    assert!(read(&mut third, 2, 0, 8192).iter().all(|byte| *byte == 0));
    // One that leaves makes room, and finds nothing when it comes back.
    let [first, mut second] = hosts;
    drop(first);
    assert_eq!(null.hosts(), 1);
    assert!(write(&mut third, 2, 0, bytes).is_success());
    assert_eq!(read(&mut second, 2, 0, 8192)[4096..5096], [2; 1000]);
    drop((second, third));
    let mut first = Host::new(&target, 1, now);
    assert!(read(&mut first, 2, 0, 8192).iter().all(|byte| *byte == 0));
}

#[test]
fn accelerator__refuses_what_is_no_job() {
    let (target, ..) = accelerators();
    let mut host = Host::new(&target, 1, Instant::now());
    let good = image(job(Algorithm::Zstd, JobKind::Compress, 1000), &[1; 1000]);
    // A job of another core, and bytes that are no header.
    assert!(write(&mut host, 2, 0, good.clone()).is(Status::INVALID_FIELD));
    assert!(write(&mut host, 3, 0, vec![0; 4096]).is(Status::INVALID_FIELD));
    // In two windows.
    assert!(write(&mut host, 3, BLOCKS - 1, vec![0; 1024]).is(Status::INVALID_FIELD));
    // Its blocks are not stored, so nothing is compared with them and written at once.
    let mut compare = *rw(Opcode::COMPARE, 3, 0, 512).as_bytes();
    compare[1] |= 1;
    let compare = Sqe::parse(&compare).unwrap();
    let refused = host.io.admit(&compare, 512, Instant::now());
    assert!(refused.unwrap_err().status.is(Status::INVALID_FIELD));
    assert!(write(&mut host, 3, 0, good).is_success());
    assert_eq!(
        outcome(&read(&mut host, 3, 0, 512)).unwrap().status,
        JobStatus::Done
    );
    // A job that cannot be done is no failure of the Write.
    let wrong = image(job(Algorithm::Zstd, JobKind::Decompress, 1000), &[1; 1000]);
    assert!(write(&mut host, 3, 0, wrong).is_success());
    assert_eq!(
        outcome(&read(&mut host, 3, 0, 512)).unwrap().status,
        JobStatus::Corrupt
    );
    let mut zeroes = Vec::new();
    assert!(
        host.run(&rw(Opcode::WRITE_ZEROES, 3, 1, 512), &mut zeroes)
            .is_success()
    );
    assert!(read(&mut host, 3, 0, 8192).iter().all(|byte| *byte == 0));
}

#[test]
fn accelerator__copies_a_result_to_a_drive() {
    let (target, ..) = accelerators();
    let mut host = Host::new(&target, 1, Instant::now());
    let data: Vec<u8> = (0..200_000u32).map(|at| (at / 100) as u8).collect();
    let compress = Job {
        align: 512,
        ..job(Algorithm::Zstd, JobKind::Compress, data.len())
    };
    assert!(write(&mut host, 3, 0, image(compress, &data)).is_success());
    let done = outcome(&read(&mut host, 3, 0, 512)).unwrap();
    let blocks = done.length / 512;
    assert_eq!(done.length % 512, 0);
    let mut behavior = [0; 512];
    behavior[4] = CopyFormat::Any.bit() as u8;
    assert!(
        completed(host.set_features(0x16, NsId::NONE, 0, &behavior))
            .status
            .is_success()
    );
    let copy = |nsid, slba, from, at| {
        let range = CopyRange {
            nsid: NsId(from),
            slba: at,
            blocks,
            fast_only: false,
        };
        commands::copy(nsid, slba, CopyFormat::Any, &[range])
    };
    let (sqe, mut ranges) = copy(1, 10, 3, DATA_OFFSET / 512);
    assert!(host.run(&sqe, &mut ranges).is_success());
    let on_drive = read(&mut host, 1, 10, done.length as usize);
    // The way back: the drive's blocks are the data of a job.
    let decompress = job(Algorithm::Zstd, JobKind::Decompress, on_drive.len());
    assert!(write(&mut host, 3, BLOCKS, image(decompress, &on_drive)).is_success());
    let window = read(&mut host, 3, BLOCKS, WINDOW as usize);
    assert_eq!(outcome(&window).unwrap().length as usize, data.len());
    assert!(window[4096..][..data.len()] == data);
    // The same by Copy alone: the header is written, the data come from the drive.
    let header = image(Job { id: 8, ..decompress }, &[]);
    assert!(write(&mut host, 3, 2 * BLOCKS, header).is_success());
    let (sqe, mut ranges) = copy(3, 2 * BLOCKS + 8, 1, 10);
    assert!(host.run(&sqe, &mut ranges).is_success());
    let window = read(&mut host, 3, 2 * BLOCKS, WINDOW as usize);
    assert_eq!(outcome(&window).unwrap().status, JobStatus::Done);
    assert!(window[4096..][..data.len()] == data);
}

fn submit(offset: u32, job: Job) -> Sqe {
    let mut sqe = Sqe::new(JobCommand::SUBMIT, Cid(9), NsId(3));
    let command = JobCommand::Submit {
        window: 1,
        offset,
        job,
    };
    command.emit(&mut sqe);
    sqe
}

fn fetch(offset: u32) -> Sqe {
    let mut sqe = Sqe::new(JobCommand::FETCH, Cid(9), NsId(3));
    JobCommand::Fetch { window: 1, offset }.emit(&mut sqe);
    sqe
}

/// Runs a vendor's command. Returns its completion.
fn command(host: &mut Host, sqe: &Sqe, data: &mut [u8]) -> Cqe {
    match host.io.admit(sqe, data.len() as u32, Instant::now()) {
        Ok(Admitted::Io(io)) => {
            let status = io.execute(data);
            host.io.complete(sqe.cid(), status, io.result())
        }
        Ok(Admitted::Command { .. }) => panic!("it is an I/O"),
        Err(cqe) => cqe,
    }
}

#[test]
fn accelerator__takes_jobs_by_commands() {
    let (target, ..) = accelerators();
    let mut host = Host::new(&target, 1, Instant::now());
    let mut data: Vec<u8> = (0..5000u32).map(|at| (at / 64) as u8).collect();
    let compress = job(Algorithm::Zstd, JobKind::Compress, data.len());
    // There is no result, and then only a part of the data.
    let mut packed = vec![0; 8192];
    let early = command(&mut host, &fetch(0), &mut packed);
    assert!(early.status.is(Status::COMMAND_SEQUENCE_ERROR));
    let (head, tail) = data.split_at_mut(4096);
    let cqe = command(&mut host, &submit(4096, compress), tail);
    assert_eq!((cqe.status, cqe.result), (Status::SUCCESS, 0));
    let cqe = command(&mut host, &submit(0, compress), head);
    assert!(
        cqe.status.is_success() && (1..5000).contains(&cqe.result),
        "{cqe:?}"
    );
    let length = cqe.result as usize;
    let cqe = command(&mut host, &fetch(0), &mut packed);
    assert_eq!(cqe.result as usize, length);
    let decompress = job(Algorithm::Zstd, JobKind::Decompress, length);
    let cqe = command(&mut host, &submit(0, decompress), &mut packed[..length]);
    assert_eq!(cqe.result, 5000);
    let mut back = vec![0; 904];
    command(&mut host, &fetch(4096), &mut back);
    assert_eq!(back, data[4096..]);
    // A job that fails has its status.
    let cqe = command(&mut host, &submit(0, decompress), &mut data[..length]);
    assert_eq!(cqe.status, Status(0x781).do_not_retry());
    let cqe = command(&mut host, &fetch(0), &mut packed[..512]);
    assert_eq!(cqe.status, Status(0x781).do_not_retry());
    for (wrong, length) in [
        (submit(1, compress), 512),
        (submit(4096, compress), 4096),
        (submit(0, job(Algorithm::Lz4, JobKind::Compress, 512)), 512),
        (fetch(1 << 20), 512),
        // No transport moves data of no bytes.
        (submit(0, job(Algorithm::Zstd, JobKind::Compress, 0)), 0),
        (fetch(0), 0),
    ] {
        let cqe = command(&mut host, &wrong, &mut vec![0; length]);
        assert!(cqe.status.is(Status::INVALID_FIELD), "{wrong:?}");
    }
    // Storage has no such commands.
    let cqe = command(
        &mut host,
        &Sqe::new(JobCommand::FETCH, Cid(9), NsId(1)),
        &mut [0; 512],
    );
    assert!(cqe.status.is(Status::INVALID_OPCODE));
}

#[test]
fn accelerator__runs_the_last_part_of_a_job_elsewhere() {
    let (target, ..) = accelerators();
    let mut host = Host::new(&target, 1, Instant::now());
    let mut bytes = image(job(Algorithm::Zstd, JobKind::Compress, 4096), &[3; 4096]);
    let (header, data) = bytes.split_at_mut(4096);
    let admit = |host: &mut Host, sqe: Sqe, length| match host.io.admit(&sqe, length, Instant::now()) {
        Ok(Admitted::Io(io)) => io,
        other => panic!("{other:?}"),
    };
    let mut first = admit(&mut host, rw(Opcode::WRITE, 3, 0, 4096), 4096);
    assert_eq!(
        first.execute_quick(header),
        Some(Status::SUCCESS),
        "it takes no time"
    );
    let mut last = admit(&mut host, rw(Opcode::WRITE, 3, 8, 4096), 4096);
    assert_eq!(last.execute_quick(data), None);
    assert!(last.may_wait() && last.is_serial());
    assert_eq!(
        outcome(&read(&mut host, 3, 0, 512)).unwrap().status,
        JobStatus::Running
    );
    assert!(write(&mut host, 3, 8, vec![0; 512]).is(Status::COMMAND_SEQUENCE_ERROR));
    assert_eq!(last.execute(data), Status::SUCCESS);
    assert_eq!(
        outcome(&read(&mut host, 3, 0, 512)).unwrap().status,
        JobStatus::Done
    );
}

#[test]
fn accelerator__has_one_set_of_windows_for_queues_of_a_host_that_begin_at_once() {
    let (host, id) = (Nqn::new(HOST).unwrap(), HostId([1; 16]));
    let bytes = image(job(Algorithm::Null, JobKind::Pass, 512), &[5; 512]);
    let info = AcceleratorInfo {
        algorithm: Algorithm::Null,
        level: 0,
        windows: 2,
        window_bytes: 2 * DATA_OFFSET,
    };
    let accelerators: Vec<_> = (0..3000).map(|_| Accelerator::new(info, 8)).collect();
    let arrived = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for window in 0..2 {
            let (accelerators, arrived, host, bytes) = (&accelerators, &arrived, &host, &bytes);
            scope.spawn(move || {
                for (round, accelerator) in accelerators.iter().enumerate() {
                    // Both begin at once.
                    arrived.fetch_add(1, Ordering::SeqCst);
                    while arrived.load(Ordering::SeqCst) < 2 * (round + 1) {
                        std::thread::yield_now();
                    }
                    let offset = window * info.window_bytes;
                    let job = accelerator.write_of((host, &id), offset, bytes).unwrap();
                    accelerator.run(&job.unwrap()).unwrap();
                }
            });
        }
    });
    for (round, accelerator) in accelerators.iter().enumerate() {
        assert_eq!(accelerator.hosts(), 1, "round {round}");
        for window in 0..2 {
            let mut header = [0; 64];
            accelerator.read_of((&host, &id), window * info.window_bytes, &mut header);
            assert_eq!(outcome(&header).unwrap().status, JobStatus::Done, "round {round}");
        }
    }
}

#[test]
fn accelerator__counts_the_bytes_of_commands_for_limits() {
    let (target, ..) = accelerators();
    let mut host = Host::new(&target, 1, Instant::now());
    for sqe in [submit(0, job(Algorithm::Zstd, JobKind::Compress, 4096)), fetch(0)] {
        match host.io.admit(&sqe, 4096, Instant::now()) {
            Ok(Admitted::Io(io)) => assert_eq!(io.moves(), 4096),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn accelerator__keeps_no_data_of_a_job_that_waits_after_it_was_cleared() {
    let (target, ..) = accelerators();
    let mut host = Host::new(&target, 1, Instant::now());
    let mut bytes = image(job(Algorithm::Zstd, JobKind::Compress, 4096), &[3; 4096]);
    let mut io = match host.io.admit(
        &rw(Opcode::WRITE, 3, 0, bytes.len()),
        bytes.len() as u32,
        Instant::now(),
    ) {
        Ok(Admitted::Io(io)) => io,
        other => panic!("{other:?}"),
    };
    assert_eq!(io.execute_quick(&mut bytes), None);
    let mut zeroes = Vec::new();
    assert!(
        host.run(&rw(Opcode::WRITE_ZEROES, 3, 0, 512), &mut zeroes)
            .is_success()
    );
    // The window takes another job while the first one waits, which does not run then.
    assert!(write(&mut host, 3, 0, bytes[..4096].to_vec()).is_success());
    assert_eq!(io.execute(&mut bytes), Status::SUCCESS);
    let status = outcome(&read(&mut host, 3, 0, 512)).unwrap().status;
    assert_eq!(status, JobStatus::Receiving);
}

#[test]
fn accelerator__has_its_commands_in_the_log_of_effects() {
    let (target, subsystem, _) = accelerators();
    let (mut admin, _) = admin(&target, SUBSYSTEM, Instant::now());
    let mut effects = |opcode: Opcode| {
        let mut sqe = Sqe::new(Opcode::GET_LOG_PAGE, Cid(3), NsId::ALL);
        sqe.set_dword(10, u32::from(LogId::EFFECTS.0) | 1023 << 16);
        let log = match admin.admit(&sqe, 4096, Instant::now()).unwrap() {
            Admitted::Command { .. } => sent(admin.execute(&sqe, &[], Instant::now())),
            Admitted::Io(_) => unreachable!(),
        };
        let at = 1024 + 4 * usize::from(opcode.0);
        u32::from_le_bytes(log[at..at + 4].try_into().unwrap())
    };
    // Supported, and changes blocks.
    assert_eq!(effects(JobCommand::SUBMIT) & 3, 3);
    assert_eq!(effects(JobCommand::FETCH) & 3, 1);
    for nsid in [2, 3] {
        subsystem.remove_namespace(NsId(nsid)).unwrap();
    }
    assert_eq!(effects(JobCommand::SUBMIT), 0);
}
