//! Mistakes of nodes and programs, and lacks of a host: one clear line each.
#![allow(non_snake_case, reason = "tests are named function__case")]
#![allow(unsafe_code, reason = "system calls on memory that is away, and fork(2)")]

mod common;
mod played;
#[path = "../../skip.rs"]
mod skip;

use std::fs::File;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;
use std::time::Duration;

use common::{LONG, MODES, Node, clusters, command, run, run_as_node, succeed};
use played::{hello, params};
use rdmux_dsm::memory::userfault::{Abilities, Catches};
use rdmux_dsm::{Access, Cluster, Error, FaultMode, Region, RegionOptions, Session};
use rdmux_verbs::{ConnectError, Device, QpOptions};
use rdmux_wire::dsm::NodeId;
use rdmux_wire::dsm::joining::{Hello, VERSION};
use rustix::process::{Resource, Rlimit, setrlimit};
use skip::skip;

const PAGE: u64 = 4096;

/// Nodes that never come are not waited for longer.
const SHORT: Duration = Duration::from_secs(2);

#[test]
fn node() {
    run_as_node(&[
        ("limited", limited),
        ("without_descriptors", without_descriptors),
        ("refused", refused),
        ("calls", calls),
        ("forks", forks),
        ("differs", differs),
    ]);
}

/// Returns the line that an error is.
fn line(error: &Error) -> String {
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    println!("{text}");
    text
}

fn region<'a>(session: &'a Session, pages: u64) -> Result<Region<'a>, Error> {
    session.region(&RegionOptions::new(pages * PAGE).unwrap())
}

fn address(cluster: &Cluster, node: u32) -> SocketAddr {
    cluster.address(NodeId::new(node).unwrap()).unwrap()
}

#[test]
fn join__at_an_address_that_is_taken() {
    let cluster = clusters(1, LONG).remove(0);
    let at = address(&cluster, 0);
    let _other = Device::open(at.ip()).unwrap().listen(at.port()).unwrap();
    let error = line(&Session::join(cluster, SHORT).unwrap_err());
    assert!(
        error.starts_with(&format!("node 0 cannot listen at {at}: ")),
        "{error}"
    );
}

#[test]
fn join__at_an_address_that_this_host_lacks() {
    let cluster = Cluster::new(0, vec!["203.0.113.1:7180".parse().unwrap()], [1; 16]).unwrap();
    rdmux_soft::register();
    let error = line(&Session::join(cluster, SHORT).unwrap_err());
    assert!(error.contains("203.0.113.1"), "{error}");
}

#[test]
fn join__without_another_node() {
    let [first, second] = clusters(2, LONG).try_into().unwrap();
    let error = line(&Session::join(first, SHORT).unwrap_err());
    assert_eq!(error, "nodes 1 have not joined within 2 seconds");
    let at = address(&second, 0);
    let error = line(&Session::join(second, SHORT).unwrap_err());
    let words = format!("node 0 at {at} has not joined within 2 seconds: ");
    assert!(error.starts_with(&words), "{error}");
}

/// Greets a node as node 1 of its cluster, with something changed. Returns the errors of that node, and its answer.
fn greet(change: impl FnOnce(&mut Hello)) -> (Error, Hello) {
    let [first, second] = clusters(2, LONG).try_into().unwrap();
    let at = address(&first, 0);
    let joining = thread::spawn(move || Session::join(first, SHORT).unwrap_err());
    let device = Device::open(at.ip()).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(64).unwrap();
    let mut greeting = hello(&second, 1);
    change(&mut greeting);
    loop {
        let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
        match device.connect(&qp, at, &params(), &greeting.emit()) {
            // It does not listen yet if there is no greeting.
            Err(ConnectError::Rejected { private_data, .. }) if Hello::parse(&private_data).is_ok() => {
                let answer = Hello::parse(&private_data).unwrap();
                return (joining.join().unwrap(), answer);
            }
            Err(_) if !joining.is_finished() => {}
            outcome => panic!("{outcome:?}, {:?}", joining.join()),
        }
        // Time is meant: nothing tells when the node listens.
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn join__of_a_node_of_another_version() {
    let (error, answer) = greet(|hello| hello.version = VERSION + 1);
    assert_eq!(answer.version, VERSION);
    let words = format!(
        "node 1 speaks version {} of the shared memory, and this one version {VERSION}: ",
        VERSION + 1
    );
    assert!(line(&error).starts_with(&words), "{error}");
}

#[test]
fn join__of_a_node_with_pages_of_another_size() {
    let (error, _) = greet(|hello| hello.page_bytes = 65536);
    assert!(
        line(&error).starts_with("pages of node 1 have 65536 bytes, those of this one "),
        "{error}"
    );
}

#[test]
fn join__of_a_stranger_is_refused_without_the_session() {
    for change in [
        |hello: &mut Hello| hello.session = [9; 16],
        |hello: &mut Hello| (hello.session, hello.nodes) = ([9; 16], 5),
    ] {
        let (error, answer) = greet(change);
        assert_eq!(answer.session, [0; 16]);
        assert_eq!(line(&error), "nodes 1 have not joined within 2 seconds");
    }
}

#[test]
fn join__of_nodes_with_other_keys_or_cluster_files() {
    let [first, second] = clusters(2, LONG).try_into().unwrap();
    let nodes: Vec<SocketAddr> = (0..2).map(|node| address(&first, node)).collect();
    let more = [&nodes[..], &["127.0.0.1:9".parse().unwrap()]].concat();
    for other in [
        Cluster::new(1, nodes, [9; 16]).unwrap(),
        Cluster::new(1, more, second.session).unwrap(),
    ] {
        let first = first.clone();
        let at = address(&first, 0);
        let joining = thread::spawn(move || Session::join(first, SHORT).unwrap_err());
        let error = line(&Session::join(other, LONG).unwrap_err());
        assert_eq!(
            error,
            format!(
                "node 0 at {at} is of another cluster: give all nodes the same list and session, or cluster file and key"
            )
        );
        line(&joining.join().unwrap());
    }
}

/// Node 1 may not have the addresses of a region.
fn limited(session: &Session) {
    let statm = || std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = || statm().split(' ').next().unwrap().parse::<u64>().unwrap();
    // The two mappings of the region have far more than that together: a thread whose allocator has just mapped an arena, of 128 MiB for a moment, counts
    // among the pages.
    let pages_of_region = (512 << 20) / PAGE;
    lacks(session, pages_of_region, "no memory", || {
        limit(Resource::As, pages() * PAGE + (256 << 20));
    });
}

/// Node 1 may not have any more descriptors.
fn without_descriptors(session: &Session) {
    lacks(session, 1, "Too many open files", || limit(Resource::Nofile, 3));
}

fn limit(resource: Resource, most: u64) {
    let (current, maximum) = (Some(most), Some(most));
    setrlimit(resource, Rlimit { current, maximum }).unwrap();
}

/// Node 1 cannot have the second region, for a reason with this word; node 0 learns that.
fn lacks(session: &Session, pages: u64, reason: &str, limit: impl FnOnce()) {
    let small = region(session, 1).unwrap();
    if session.node() == 1 {
        limit();
    }
    let error = line(&region(session, pages).unwrap_err());
    match session.node() {
        1 => assert!(error.contains(reason), "{error}"),
        _ => assert!(error.starts_with("node 1 cannot make region 1"), "{error}"),
    }
    // A region that is there already goes on.
    write_in_turn(session, &small);
}

/// The two nodes write the first word of a region in turn, and read it.
fn write_in_turn(session: &Session, region: &Region<'_>) {
    let words = region.array::<u64>(0, 1);
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    for round in 0..4 {
        if u64::from(session.node()) == round % 2 {
            words.set(0, round);
        }
        thread.barrier(0, all).unwrap();
        assert_eq!(words.get(0), round);
        thread.barrier(0, all).unwrap();
    }
}

#[test]
fn region__for_which_a_node_lacks_memory_or_descriptors() {
    for mode in MODES {
        run("limited", 2, mode);
        run("without_descriptors", 2, mode);
    }
}

/// Both nodes want regions of different sizes, and ones that nobody can have.
fn differs(session: &Session) {
    let error = line(&region(session, 1 + u64::from(session.node())).unwrap_err());
    let expected = match session.node() {
        0 => "node 1 cannot make region 0, or makes it with other settings: ",
        _ => "node 0 makes region 0 of another size, or with other units, homes or consistency: ",
    };
    assert!(error.starts_with(expected), "{error}");
    for bytes in [0, u64::MAX, 1 << 60] {
        let error = line(&session.region(&RegionOptions::new(bytes).unwrap()).unwrap_err());
        assert!(
            error.contains("cannot make region") || error.contains(&bytes.to_string()),
            "{error}"
        );
    }
    let mut thread = session.thread(0).unwrap();
    thread
        .barrier(0, NonZeroU32::new(session.nodes()).unwrap())
        .unwrap();
}

#[test]
fn region__of_other_settings_at_each_node() {
    run("differs", 2, FaultMode::Thread);
}

/// The system refuses userfaultfd(2): the nodes share memory in the mode that is left, and have an error in the others.
fn refused(session: &Session) {
    assert_eq!(FaultMode::of_environment().unwrap(), FaultMode::Mprotect);
    let region = region(session, 1).unwrap();
    write_in_turn(session, &region);
    for mode in [FaultMode::Thread, FaultMode::Inline] {
        let error = line(&session.region(&RegionOptions::in_mode(PAGE, mode)).unwrap_err());
        match session.node() {
            0 => assert_eq!(
                error,
                "this user may not catch page faults: open /dev/userfaultfd to it by a udev rule, or set vm.unprivileged_userfaultfd=1"
            ),
            _ => assert!(error.starts_with("node 0 cannot make region "), "{error}"),
        }
    }
    write_in_turn(session, &region);
}

/// Words before a command to which the system then refuses userfaultfd(2).
const REFUSING: [&str; 10] = [
    "strace",
    "-f",
    "--seccomp-bpf",
    "-qq",
    "-o",
    "/dev/null",
    "-e",
    "trace=userfaultfd",
    "-e",
    "inject=userfaultfd:error=EPERM",
];

#[test]
fn region__where_the_system_refuses_userfaultfd() {
    let tried = Command::new(REFUSING[0])
        .args(&REFUSING[1..])
        .arg("true")
        .status();
    if !tried.is_ok_and(|status| status.success()) {
        return skip("strace is missing, or may not trace");
    }
    if File::open("/dev/userfaultfd").is_ok() {
        return skip("this user has /dev/userfaultfd, too");
    }
    let start = |cluster: &Cluster| {
        let mut command = command(&REFUSING, "refused", cluster, FaultMode::Mprotect);
        command.env_remove(FaultMode::VARIABLE);
        Node::start(command)
    };
    succeed(clusters(2, LONG).iter().map(start).collect());
}

/// System calls that read and write pages which node 0 has written, at node 1.
fn calls(session: &Session) {
    const PAGES: u64 = 6;
    let region = region(session, PAGES).unwrap();
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    if session.node() == 0 {
        (0..PAGES).for_each(|page| region.write(page * PAGE, &[7; 16]).unwrap());
    }
    thread.barrier(0, all).unwrap();
    if session.node() == 1 {
        let waits = FaultMode::of_environment().unwrap() == FaultMode::Thread
            && Abilities::probe().catches == Some(Catches::All);
        let (zeros, mut pipe) = (File::open("/dev/zero").unwrap(), std::io::pipe().unwrap());
        let call = |page: u64, is_read: bool| -> Result<isize, Option<i32>> {
            let at = (region.address() + page * PAGE) as *mut libc::c_void;
            let done = match is_read {
                // SAFETY: the bytes are in the region, to which no reference exists.
                true => unsafe { libc::read(zeros.as_raw_fd(), at, 8) },
                // SAFETY: as above.
                false => unsafe { libc::write(pipe.1.as_raw_fd(), at, 8) },
            };
            (done >= 0)
                .then_some(done)
                .ok_or_else(|| std::io::Error::last_os_error().raw_os_error())
        };
        let expected = if waits { Ok(8) } else { Err(Some(libc::EFAULT)) };
        assert_eq!(call(0, true), expected);
        assert_eq!(call(1, false), expected);
        println!("system calls wait: {waits}");
        // With a right they work in each mode, and the contents are right.
        region.acquire(2 * PAGE..2 * PAGE + 8, Access::Write).unwrap();
        assert_eq!(call(2, true), Ok(8));
        region.acquire(3 * PAGE..3 * PAGE + 8, Access::Read).unwrap();
        assert_eq!(call(3, false), Ok(8));
        let mut piped = [0; 8];
        std::io::Read::read_exact(&mut pipe.0, &mut piped).unwrap();
        assert_eq!(piped, [7; 8]);
    }
    thread.barrier(0, all).unwrap();
    let mut bytes = [0; 16];
    region.read(2 * PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, [[0; 8], [7; 8]].concat()[..]);
    region.read(0, &mut bytes).unwrap();
    assert!(bytes[..8] == [7; 8] || bytes[..8] == [0; 8]);
    thread.barrier(0, all).unwrap();
}

#[test]
fn system_call__on_a_page_that_is_away_waits_or_fails_with_efault() {
    for mode in MODES {
        let printed = run("calls", 2, mode);
        println!(
            "{mode}: {}",
            printed[1]
                .lines()
                .find(|line| line.contains("system calls"))
                .unwrap()
        );
    }
}

/// Forks children, one of which touches the region and one of which stays while this node goes on.
fn forks(session: &Session) {
    let region = region(session, 2).unwrap();
    let words = region.array::<u64>(0, 2 * PAGE as usize / 8);
    let mut thread = session.thread(0).unwrap();
    let all = NonZeroU32::new(session.nodes()).unwrap();
    words.set(session.node() as usize * PAGE as usize / 8, 5);
    thread.barrier(0, all).unwrap();
    // SAFETY: the children make only calls that are safe after fork(2) of a process with threads.
    let child = |touches: bool| match unsafe { libc::fork() } {
        0 if touches => {
            let word = region.mapping().double_word(0);
            let value = word.load(std::sync::atomic::Ordering::Relaxed);
            // SAFETY: ends the process.
            unsafe { libc::_exit(value as i32) }
        }
        0 => {
            // Time is meant: the child lives for some of the rounds below, which pass whenever it ends.
            // SAFETY: they use no memory of this process.
            unsafe {
                libc::usleep(200_000);
                libc::_exit(0)
            }
        }
        pid => pid,
    };
    let children = [true, false].map(child);
    for round in 0..100 {
        let at = round as usize % 2 * PAGE as usize / 8;
        if u64::from(session.node()) == round % 2 {
            words.set(at, round);
        }
        thread.barrier(0, all).unwrap();
        assert_eq!(words.get(at), round);
        thread.barrier(0, all).unwrap();
    }
    let ends = children.map(|pid| {
        let mut status = 0;
        // SAFETY: the status is written to a number that lives here.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        (libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status)), status)
    });
    assert_eq!(ends[0].0, Some(libc::SIGSEGV));
    assert_eq!(ends[1], (None, 0));
    words.set(0, 3);
    thread.barrier(0, all).unwrap();
}

#[test]
fn fork__child_has_no_region_and_disturbs_nobody() {
    for mode in MODES {
        run("forks", 2, mode);
    }
}
