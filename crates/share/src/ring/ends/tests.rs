use std::time::Duration;

use rdmux_wire::node::Descriptor;
use rustix::fs::{FallocateFlags, fallocate, fcntl_get_seals};
use rustix::io::{Errno, pwrite};

use super::*;
use crate::ring::{PushError, SLOTS_MIN};

const LONG: Duration = Duration::from_secs(60);

fn layout() -> Layout {
    Layout::new(2, 64, 1, SLOTS_MIN).unwrap()
}

fn ends(layout: Layout) -> (NodeEnd, ApplicationEnd) {
    let (node, files) = NodeEnd::create(layout).unwrap();
    (node, ApplicationEnd::attach(layout, files).unwrap())
}

fn duplicate(files: &Files) -> Files {
    Files::from_fds(files.as_fds().map(|fd| fd.try_clone_to_owned().unwrap()))
}

fn memory(bytes: u64, seals: SealFlags, flags: MemfdFlags) -> Option<OwnedFd> {
    let file = memfd_create("forged", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
    ftruncate(&file, bytes).ok()?;
    fcntl_add_seals(&file, seals).unwrap();
    Some(file)
}

#[test]
fn create__nobody_can_change_the_size_or_map_the_nodes_file_to_write() {
    let (_node, files) = NodeEnd::create(layout()).unwrap();
    for file in [&files.node, &files.application] {
        let seals = fcntl_get_seals(file).unwrap();
        assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
        assert_eq!(ftruncate(file, 0), Err(Errno::PERM));
        assert_eq!(ftruncate(file, 1 << 30), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(file, SealFlags::WRITE), Err(Errno::PERM));
    }
    let bytes = layout().node_bytes();
    assert!(Mapping::of_sealed_file(&files.node, 0, bytes, true).is_err());
    assert!(Mapping::of_sealed_file(&files.node, 0, bytes, false).is_ok());
    assert_eq!(pwrite(&files.node, &[1; 64], 0), Err(Errno::PERM));
    let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(&files.node, holes, 0, 4096), Err(Errno::PERM));
}

#[test]
fn attach__both_directions_with_doorbells() {
    let (node, application) = ends(layout());
    let (mut to_node, mut from_application) = (application.submission(1), node.submission(1));
    let (mut to_application, mut from_node) = (node.completion(0), application.completion(0));
    let (mut news, mut results) = (node.ready(), application.ready());
    let mut out = [[0; 64]; 4];
    for round in 1..20u8 {
        let sent: Vec<Descriptor> = (0..3).map(|i| [round + i; 64]).collect();
        // The node sleeps.
        assert_eq!(from_application.prepare_sleep(), Ok(true));
        assert!(news.prepare_sleep());
        to_node.push(&sent).unwrap();
        let told = to_node.publish();
        application.tell(1, told);
        assert!(node.waiter().wait(LONG).unwrap());
        news.awake();
        news.take(|ring| assert_eq!(ring, 1)).unwrap();
        from_application.awake();
        assert_eq!(from_application.take(&mut out), Ok(3));
        assert_eq!(out[..3], sent[..]);
        for _ in 0..2 {
            let told = from_application.release();
            node.tell(1, told);
        }
        // The application polls.
        to_application.push(&sent[..1]).unwrap();
        let told = to_application.publish();
        node.tell(node.layout().completion_ring(0), told);
        assert_eq!(from_node.take(&mut out), Ok(1));
        assert_eq!(out[0], sent[0]);
        let _ = from_node.release();
        results.take(|ring| panic!("ring {ring} was announced")).unwrap();
    }
    // The node waits for room for completions.
    while to_application.push(&[[7; 64]]).is_ok() {}
    let _ = to_application.publish();
    assert_eq!(to_application.push(&[[7; 64]]), Err(PushError::Full));
    assert_eq!(to_application.wants_room(), Ok(true));
    assert!(news.prepare_sleep());
    let mut all = vec![[0; 64]; SLOTS_MIN as usize];
    assert_eq!(from_node.take(&mut all), Ok(all.len()));
    let ring = application.layout().completion_ring(0);
    let told = from_node.release();
    application.tell(ring, told);
    assert!(node.waiter().wait(LONG).unwrap());
    news.take(|announced| assert_eq!(announced, ring)).unwrap();
    assert_eq!(to_application.has_room(all.len()), Ok(true));
}

/// One doorbell and one bitmap serve thousands of rings, and memory is taken only for those that are used.
#[test]
fn attach__many_rings_and_one_doorbell() {
    const RINGS: u32 = 10_000;
    let (node, application) = ends(Layout::new(RINGS, SLOTS_MIN, 1, SLOTS_MIN).unwrap());
    let mut consumers: Vec<_> = (0..RINGS).map(|ring| node.submission(ring)).collect();
    for consumer in &mut consumers {
        assert_eq!(consumer.prepare_sleep(), Ok(true));
    }
    let mut ready = node.ready();
    assert!(ready.prepare_sleep());
    let used = [0, 63, 64, 4999, RINGS - 1];
    for ring in used {
        let mut producer = application.submission(ring);
        producer.push(&[[ring as u8; 64]]).unwrap();
        let told = producer.publish();
        assert_eq!(told, Tell::Ring);
        application.tell(ring, told);
    }
    assert!(node.waiter().wait(LONG).unwrap());
    ready.awake();
    let mut announced = Vec::new();
    ready.take(|ring| announced.push(ring)).unwrap();
    assert_eq!(announced, used);
    for ring in announced {
        let mut out = [[0; 64]];
        assert_eq!(consumers[ring as usize].take(&mut out), Ok(1));
        assert_eq!(out[0], [ring as u8; 64]);
    }
}

#[test]
fn attach__refuses_what_could_raise_a_signal() {
    let layout = layout();
    let (node, application) = (layout.node_bytes() as u64, layout.application_bytes() as u64);
    let (_end, good) = NodeEnd::create(layout).unwrap();
    let plain = MemfdFlags::empty();
    let (pipe, _writes) = rustix::pipe::pipe().unwrap();
    let [event] = [&good.rings].map(|fd| fd.try_clone().unwrap());
    let regular = OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
    let mut refused = vec![
        (
            memory(node, SealFlags::empty(), plain).unwrap(),
            Unmappable::NotSealed,
        ),
        (
            memory(node, SealFlags::GROW, plain).unwrap(),
            Unmappable::NotSealed,
        ),
        (pipe, Unmappable::NotSealed),
        (event, Unmappable::NotSealed),
        (regular, Unmappable::NotSealed),
        (
            memory(node - 1, SealFlags::SHRINK, plain).unwrap(),
            Unmappable::TooShort {
                bytes: node - 1,
                needed: node,
            },
        ),
    ];
    // Huge pages: the system may have none left when one is touched.
    if let Some(huge) = memory(2 << 20, SealFlags::SHRINK, MemfdFlags::HUGETLB) {
        refused.push((huge, Unmappable::NotOrdinary));
    }
    for (file, why) in refused {
        let files = Files {
            node: file,
            ..duplicate(&good)
        };
        match ApplicationEnd::attach(layout, files) {
            Err(AttachError::Unmappable(error)) => assert_eq!(error, why),
            other => panic!("{why}: {other:?}"),
        }
    }
    let short = Files {
        application: memory(application - 1, SealFlags::SHRINK, plain).unwrap(),
        ..duplicate(&good)
    };
    assert!(matches!(
        ApplicationEnd::attach(layout, short),
        Err(AttachError::Unmappable(Unmappable::TooShort { .. }))
    ));
    // Memory that can be mapped, but not to write.
    let sealed = Files {
        application: memory(application, SealFlags::SHRINK | SealFlags::WRITE, plain).unwrap(),
        ..duplicate(&good)
    };
    assert!(matches!(
        ApplicationEnd::attach(layout, sealed),
        Err(AttachError::Map(_))
    ));
    assert!(ApplicationEnd::attach(layout, duplicate(&good)).is_ok());
}

/// A file is checked again by nobody: an application cannot make it unsafe later.
#[test]
fn check_sealed_file__holds_for_ever() {
    let file = memory(8192, SealFlags::SHRINK, MemfdFlags::empty()).unwrap();
    assert_eq!(check_sealed_file(&file, 8192), Ok(()));
    let mapping = Mapping::of_sealed_file(&file, 0, 8192, false).unwrap();
    assert_eq!(ftruncate(&file, 0), Err(Errno::PERM));
    let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, holes, 0, 8192).unwrap();
    assert_eq!(mapping.load(8188), 0);
}
