//! The group that owns port 4791, with real processes. Each test has a loopback address of its own.
#![allow(non_snake_case, reason = "names of tests are function__case")]

mod common;
#[path = "../../skip.rs"]
mod skip;

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rdmux_soft::group::{GroupError, MadDatagram, PortGroup, SLOTS};
use rdmux_soft::udp::{ROCE_PORT, RxBatch, RxSocket};
use rdmux_wire::cm::ServiceId;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, prlimit, setrlimit};
use skip::skip;

const DEADLINE: Duration = Duration::from_secs(60);
const NOBODY: u32 = 65_534;

/// A process with a place on the port: this test binary, started again to run `child` alone.
struct Member {
    process: std::process::Child,
    stdin: Option<ChildStdin>,
    events: Receiver<String>,
    slot: u8,
}

impl Member {
    /// Starts a process, as an ordinary user in any case, and waits until it has joined or failed.
    fn start(addr: IpAddr, uid: u32) -> Result<Member, String> {
        // A user who cannot reach the build folder can follow the link to this process's own program.
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
        command.env("RDMUX_GROUP_ADDR", addr.to_string()).current_dir("/");
        if can_change_user() {
            command.uid(uid).gid(uid);
        }
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let events = common::told(process.stdout.take().unwrap());
        let stdin = process.stdin.take();
        let mut member = Member {
            process,
            stdin,
            events,
            slot: 0,
        };
        let event = member.next().expect("an answer of the process");
        match event.strip_prefix("joined ") {
            Some(slot) => {
                member.slot = slot.parse().unwrap();
                Ok(member)
            }
            None => Err(event),
        }
    }

    fn next(&self) -> Option<String> {
        match self.events.recv_timeout(DEADLINE) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("process in slot {}: no event", self.slot),
        }
    }

    #[track_caller]
    fn expect(&self, event: &str) {
        assert_eq!(
            self.next().as_deref(),
            Some(event),
            "process in slot {}",
            self.slot
        );
    }

    /// Checks that nothing has arrived so far, as the answer to a later command shows.
    #[track_caller]
    fn expect_nothing_before_an_answer(&mut self) {
        self.tell("ping");
        self.expect("pong");
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    #[track_caller]
    fn register(&mut self, service: ServiceId) {
        self.tell(&format!("register {}", service.0));
        self.expect("registered");
    }

    fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    fn signal(&self, signal: Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops all of its threads.
    fn stop(&self) {
        self.signal(Signal::STOP);
        let pid = rustix::process::Pid::from_raw(self.pid());
        let told = rustix::process::waitpid(pid, rustix::process::WaitOptions::UNTRACED).unwrap();
        assert!(told.is_some_and(|(_, status)| status.stopped()));
    }

    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Makes the process leave the group and end.
    fn leave(mut self) {
        self.stdin = None;
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns whether this process is root, and not only in a user namespace with a single user.
fn can_change_user() -> bool {
    let maps_nobody = |line: &str| {
        let mut fields = line.split_whitespace().map(|f| f.parse::<u32>().unwrap());
        let (first, _, count) = (fields.next().unwrap(), fields.next(), fields.next().unwrap());
        (first..=first.saturating_add(count - 1)).contains(&NOBODY)
    };
    rustix::process::geteuid().is_root()
        && std::fs::read_to_string("/proc/self/uid_map")
            .unwrap()
            .lines()
            .any(maps_nobody)
}

/// Body of the processes. It reports events, one line each.
#[test]
fn child() {
    let Ok(addr) = std::env::var("RDMUX_GROUP_ADDR") else {
        return;
    };
    let group = match PortGroup::join(
        addr.parse().unwrap(),
        Box::new(|mad| println!("@ mad {}", describe(&mad))),
    ) {
        Ok(group) => group,
        Err(e) => return println!("@ {e:?}"),
    };
    println!("@ joined {}", group.slot());
    let socket = group.socket().unwrap();
    thread::spawn(move || {
        let mut batch = RxBatch::new();
        loop {
            poll(&mut [PollFd::new(&socket, PollFlags::IN)], None).unwrap();
            socket.recv_batch(&mut batch).unwrap();
            // But for what a growing group sends to find out where it arrives.
            let packets = batch.iter().flat_map(|d| d.segments().collect::<Vec<_>>());
            for bytes in packets.filter(|bytes| bytes[0] != 0xff) {
                println!("@ data {} {}", bytes[5], String::from_utf8_lossy(&bytes[12..]));
            }
        }
    });
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("register", id)) => match group.register_service(ServiceId(id.parse().unwrap())) {
                Ok(()) => println!("@ registered"),
                Err(e) => println!("@ {e:?}"),
            },
            Some(("unregister", id)) => {
                group.unregister_service(ServiceId(id.parse().unwrap()));
                println!("@ unregistered");
            }
            _ => println!("@ pong"),
        }
    }
}

/// Returns the tag at the end of the message.
fn describe(mad: &MadDatagram) -> String {
    assert_eq!(mad.bytes.len(), 280);
    String::from_utf8_lossy(&mad.bytes[240..276])
        .trim_end_matches('\0')
        .to_owned()
}

/// Sends to port 4791 of one address.
struct Sender {
    socket: UdpSocket,
    dst: SocketAddr,
}

impl Sender {
    fn new(addr: IpAddr) -> Self {
        Self {
            socket: UdpSocket::bind((addr, 0)).unwrap(),
            dst: SocketAddr::new(addr, ROCE_PORT),
        }
    }

    /// Sends an RC SEND Only to a QPN of `slot`.
    fn data(&self, slot: u8, text: &str) {
        let bytes = [
            &[0x04, 0, 0xff, 0xff, 0, slot, 0x12, 0x34, 0, 0, 0, 1],
            text.as_bytes(),
        ]
        .concat();
        self.socket.send_to(&bytes, self.dst).unwrap();
    }

    fn mad(&self, attribute: u8, body: &[u8], tag: &str) {
        let mut bytes = vec![0; 280];
        bytes[..4].copy_from_slice(&[0x64, 0, 0xff, 0xff]);
        bytes[7] = 1;
        bytes[20..24].copy_from_slice(&[1, 0x07, 2, 3]);
        bytes[37] = attribute;
        bytes[44..][..body.len()].copy_from_slice(body);
        bytes[240..][..tag.len()].copy_from_slice(tag.as_bytes());
        self.socket.send_to(&bytes, self.dst).unwrap();
    }

    fn req(&self, service: ServiceId, tag: &str) {
        self.mad(0x10, &[[0; 8], service.0.to_be_bytes()].concat(), tag);
    }

    fn rtu(&self, slot: u8, tag: &str) {
        self.mad(0x14, &[0, 0, 0, 0, slot, 1, 2, 3], tag);
    }
}

/// Returns the service that the process in `slot` offers.
fn service_of(slot: u8) -> ServiceId {
    ServiceId::tcp(5000 + u16::from(slot))
}

/// Checks that each process gets what is for its slot and its service, and nothing else.
fn check_all(sender: &Sender, members: &mut [Member], round: &str) {
    for member in members.iter() {
        let slot = member.slot;
        sender.data(slot, round);
        member.expect(&format!("data {slot} {round}"));
        sender.rtu(slot, &format!("rtu {slot} {round}"));
        member.expect(&format!("mad rtu {slot} {round}"));
        sender.req(service_of(slot), &format!("req {slot} {round}"));
        member.expect(&format!("mad req {slot} {round}"));
    }
    for member in members {
        member.expect_nothing_before_an_answer();
    }
}

fn holder_name(addr: IpAddr) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(format!("rdmux-4791-{addr}").as_bytes()).unwrap()
}

fn connect_to_holder(addr: IpAddr) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&fd, &holder_name(addr))?;
    Ok(fd)
}

/// Takes the process that holds the address out of `members`. Waits until there is one.
fn take_holder(addr: IpAddr, members: &mut Vec<Member>) -> Member {
    let start = Instant::now();
    let pid = loop {
        match connect_to_holder(addr) {
            Ok(fd) => {
                break rustix::net::sockopt::socket_peercred(fd)
                    .unwrap()
                    .pid
                    .as_raw_nonzero()
                    .get();
            }
            Err(e) => assert!(start.elapsed() < DEADLINE, "no holder: {e}"),
        }
        thread::yield_now();
    };
    members.remove(members.iter().position(|m| m.pid() == pid).unwrap())
}

fn start_members(addr: IpAddr, count: usize) -> Vec<Member> {
    (0..count)
        .map(|_| {
            let mut member = Member::start(addr, NOBODY).unwrap();
            member.register(service_of(member.slot));
            member
        })
        .collect()
}

/// Holders and others are killed one after the other.
fn share_and_survive(addr: IpAddr, count: usize) {
    let sender = Sender::new(addr);
    let mut members = start_members(addr, count);
    let mut slots: Vec<u8> = members.iter().map(|m| m.slot).collect();
    slots.sort_unstable();
    slots.dedup();
    assert_eq!(slots.len(), count);
    assert!(slots.iter().all(|s| (1..SLOTS as u8).contains(s)));
    check_all(&sender, &mut members, "start");

    for round in ["first", "second", "third"] {
        let holder = take_holder(addr, &mut members);
        let service = service_of(holder.slot);
        holder.kill();
        check_all(&sender, &mut members, round);

        // Nobody has the service of the dead process: the holder's own connection management answers.
        sender.req(service, round);
        let holder = take_holder(addr, &mut members);
        holder.expect(&format!("mad {round}"));
        members.push(holder);
    }

    let holder = take_holder(addr, &mut members);
    members.remove(0).kill();
    members.push(holder);
    check_all(&sender, &mut members, "member");
    take_holder(addr, &mut members).leave();
    check_all(&sender, &mut members, "left");
}

#[test]
fn group__everyone_hears_of_a_rejection_without_an_id() {
    let addr = IpAddr::from([127, 0, 0, 51]);
    let (groups, mads): (Vec<_>, Vec<_>) = (0..3).map(|_| join(addr)).unzip();
    let sender = Sender::new(addr);
    // Each process has announced itself once it gets what is for it alone.
    for (group, mads) in groups.iter().zip(&mads) {
        while mads.recv_timeout(Duration::from_millis(100)).is_err() {
            sender.rtu(group.slot(), "there");
        }
    }
    sender.mad(0x12, &[2, 0, 0, 9, 0, 0, 0, 0], "withdrawn");
    for mads in &mads {
        let next = || describe(&mads.recv_timeout(DEADLINE).unwrap());
        let after = std::iter::repeat_with(next).find(|mad| mad != "there");
        assert_eq!(after.unwrap(), "withdrawn");
    }
}

#[test]
fn group__survives_its_holders_ipv4() {
    share_and_survive([127, 0, 0, 41].into(), 6);
}

#[test]
fn group__survives_its_holders_ipv6() {
    let addr = IpAddr::from(Ipv6Addr::LOCALHOST);
    if UdpSocket::bind((addr, 0)).is_err() {
        return skip("this host has no IPv6 loopback");
    }
    share_and_survive(addr, 20);
}

#[test]
fn group__newcomers_while_the_holder_dies() {
    let addr = IpAddr::from([127, 0, 0, 42]);
    let sender = Sender::new(addr);
    let mut members = start_members(addr, 3);
    for round in ["first", "second", "third", "fourth"] {
        let holder = take_holder(addr, &mut members);
        let newcomer = thread::spawn(move || Member::start(addr, NOBODY).unwrap());
        let other = thread::spawn(move || Member::start(addr, NOBODY).unwrap());
        holder.kill();
        for newcomer in [newcomer, other] {
            let mut newcomer = newcomer.join().unwrap();
            newcomer.register(service_of(newcomer.slot));
            members.push(newcomer);
        }
        check_all(&sender, &mut members, round);
    }
    assert_eq!(members.len(), 7);
}

/// Returns the sockets on the port of an address, as links in `/proc` name them.
///
/// A look at the table misses sockets if those of other tests come or go meanwhile, so several looks are taken.
fn sockets_on(addr: [u8; 4]) -> BTreeSet<String> {
    let local = format!("{:08X}:{ROCE_PORT:04X}", u32::from_ne_bytes(addr));
    let inode = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        (fields[1] == local).then(|| format!("socket:[{}]", fields[9]))
    };
    let look = || std::fs::read_to_string("/proc/self/net/udp").unwrap();
    let looks: Vec<String> = std::iter::repeat_with(look).take(10).collect();
    looks
        .iter()
        .flat_map(|sockets| sockets.lines())
        .filter_map(inode)
        .collect()
}

/// Returns the count of those of them that a process has.
fn sockets_of(member: &Member, addr: [u8; 4]) -> usize {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", member.pid())).unwrap();
    let links = fds.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let links: BTreeSet<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    links.intersection(&sockets_on(addr)).count()
}

#[test]
fn group__grows_as_processes_join() {
    let octets = [127, 0, 0, 55];
    let addr = IpAddr::from(octets);
    let sender = Sender::new(addr);
    let mut members = start_members(addr, 1);
    assert_eq!(sockets_of(&members[0], octets), 16);
    members.extend(start_members(addr, 39));
    // Low slots are taken first, and a process other than the holder has the sockets of its own block and of the lower ones.
    for (i, member) in members.iter().enumerate().skip(1) {
        let block = usize::from(member.slot / 16);
        assert_eq!(block, (i + 1) / 16);
        let sockets = sockets_of(member, octets);
        assert_eq!(sockets, (block + 1) * 16, "slot {}", member.slot);
    }
    check_all(&sender, &mut members, "start");
    for round in ["first", "second", "third"] {
        take_holder(addr, &mut members).kill();
        check_all(&sender, &mut members, round);
        // The new holder gets the higher blocks from those who have them, or binds them when none is left.
        members.extend(start_members(addr, 10));
        assert!(members.iter().any(|member| member.slot / 16 == 2));
        check_all(&sender, &mut members, "more");
        let holder = take_holder(addr, &mut members);
        members.sort_by_key(|member| member.slot);
        members.drain(28..).for_each(Member::kill);
        check_all(&sender, &mut members, "fewer");
        members.push(holder);
    }
}

#[test]
fn join__as_many_as_there_are_slots() {
    let addr = IpAddr::from([127, 0, 0, 56]);
    let sender = Sender::new(addr);
    let mut members = start_members(addr, SLOTS - 1);
    for round in ["start", "holder killed"] {
        let Err(full) = Member::start(addr, NOBODY) else {
            panic!("there was room for one more")
        };
        assert!(full.starts_with("Full"), "{full}");
        check_all(&sender, &mut members, round);
        let freed = take_holder(addr, &mut members);
        let slot = freed.slot;
        freed.kill();
        let mut member = Member::start(addr, NOBODY).unwrap();
        assert_eq!(member.slot, slot);
        member.register(service_of(slot));
        members.push(member);
    }
    check_all(&sender, &mut members, "end");
}

#[test]
fn join__holder_that_may_have_no_more_descriptors() {
    let addr = IpAddr::from([127, 0, 0, 59]);
    let sender = Sender::new(addr);
    let mut members = start_members(addr, 15);
    let holder = take_holder(addr, &mut members);
    let pid = rustix::process::Pid::from_raw(holder.pid());
    let fds = std::fs::read_dir(format!("/proc/{}/fd", holder.pid())).unwrap();
    let number = |fd: std::fs::DirEntry| fd.file_name().to_string_lossy().parse::<u64>().unwrap();
    let numbers: BTreeSet<u64> = fds.flatten().map(number).collect();
    let limit = getrlimit(Resource::Nofile);
    // Room for some of the sockets of a block.
    let current = (0..).filter(|number| !numbers.contains(number)).nth(8);
    match prlimit(pid, Resource::Nofile, Rlimit { current, ..limit }) {
        // The members are another user's when this is root, which may not have the capability.
        Err(Errno::PERM) => {
            return skip("the limits of another user's process cannot be set here (CAP_SYS_RESOURCE)");
        }
        set => drop(set.unwrap()),
    }
    let Err(refused) = Member::start(addr, NOBODY) else {
        panic!("the holder had room for 16 sockets")
    };
    assert!(
        refused.starts_with("NotGrown") && refused.contains("open files"),
        "{refused}"
    );
    members.push(holder);
    check_all(&sender, &mut members, "refused");
    prlimit(pid, Resource::Nofile, limit).unwrap();
    members.extend(start_members(addr, 2));
    check_all(&sender, &mut members, "grown");
}

#[test]
fn join__block_that_only_a_stopped_process_has() {
    let addr = IpAddr::from([127, 0, 0, 58]);
    let sender = Sender::new(addr);
    let mut members = start_members(addr, 16);
    let above = members.iter().position(|member| member.slot >= 16).unwrap();
    let above = members.remove(above);
    above.stop();
    take_holder(addr, &mut members).kill();
    // The first takes the killed one's slot. The second needs a block that the new holder lacks and cannot bind.
    members.extend(start_members(addr, 1));
    let Err(refused) = Member::start(addr, NOBODY) else {
        panic!("a block without its sockets")
    };
    assert!(refused.starts_with("NotGrown"), "{refused}");
    check_all(&sender, &mut members, "stopped");
    above.signal(Signal::CONT);
    members.push(above);
    let start = Instant::now();
    let mut member = loop {
        match Member::start(addr, NOBODY) {
            Ok(member) => break member,
            Err(e) => assert!(start.elapsed() < DEADLINE, "{e}"),
        }
    };
    assert!(member.slot >= 16);
    member.register(service_of(member.slot));
    members.push(member);
    check_all(&sender, &mut members, "continued");
}

#[test]
fn group__holder_is_killed_while_it_grows() {
    let octets = [127, 0, 0, 57];
    let addr = IpAddr::from(octets);
    let sender = Sender::new(addr);
    let seed = RandomState::new().hash_one(0);
    println!("seed {seed}");
    let mut members = start_members(addr, 15);
    for round in 0..20 {
        // The first block is full, and no process has a second one.
        let newcomers = [(); 2].map(|()| thread::spawn(move || Member::start(addr, NOBODY).unwrap()));
        let holder = take_holder(addr, &mut members);
        let random = (seed ^ round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if round % 2 == 0 {
            // It is killed at any moment from before they ask until they have joined: a random pause, whose length decides nothing.
            thread::sleep(Duration::from_micros(random >> 50));
        } else {
            // It is killed when it has bound some of the sockets, or all of them a moment ago.
            let bound = 17 + (random >> 60) as usize;
            let start = Instant::now();
            while sockets_on(octets).len() < bound {
                assert!(start.elapsed() < DEADLINE, "the group does not grow");
            }
        }
        holder.kill();
        for newcomer in newcomers {
            let mut newcomer = newcomer.join().unwrap();
            newcomer.register(service_of(newcomer.slot));
            members.push(newcomer);
        }
        check_all(&sender, &mut members, &format!("round {round}"));
        let holder = take_holder(addr, &mut members);
        let above = members.extract_if(.., |member| member.slot >= 16);
        above.for_each(Member::kill);
        holder.kill();
        check_all(&sender, &mut members, &format!("survivors of round {round}"));
        members.extend(start_members(addr, 15 - members.len()));
        assert!(members.iter().all(|member| member.slot < 16));
    }
}

#[test]
fn register_service__one_process_at_a_time() {
    let addr = IpAddr::from([127, 0, 0, 43]);
    let sender = Sender::new(addr);
    let mut members = start_members(addr, 2);
    let service = ServiceId::tcp(7174);
    members[1].register(service);
    members[0].tell(&format!("register {}", service.0));
    let refused = members[0].next().unwrap();
    assert!(refused.starts_with("ServiceInUse"), "{refused}");
    members[1].tell(&format!("register {}", service.0));
    assert!(members[1].next().unwrap().starts_with("ServiceInUse"));

    members[1].tell(&format!("unregister {}", service.0));
    members[1].expect("unregistered");
    members[0].register(service);
    sender.req(service, "moved");
    members[0].expect("mad moved");

    // A dead process offers nothing.
    let taken = service_of(members[0].slot);
    members.remove(0).kill();
    members[0].register(taken);
    sender.req(taken, "inherited");
    members[0].expect("mad inherited");
}

#[test]
fn join__freed_slot_is_not_the_next_to_be_used() {
    let addr = IpAddr::from([127, 0, 0, 44]);
    let mut members = start_members(addr, 3);
    for _ in 0..4 {
        let freed = members.pop().unwrap();
        let slot = freed.slot;
        freed.kill();
        members.push(Member::start(addr, NOBODY).unwrap());
        assert_ne!(members.last().unwrap().slot, slot);
    }
}

#[test]
fn join__another_user_is_refused() {
    if !can_change_user() {
        return skip("needs root, to start a process of another user");
    }
    let addr = IpAddr::from([127, 0, 0, 45]);
    let sender = Sender::new(addr);
    let mut members = start_members(addr, 1);
    let Err(refused) = Member::start(addr, NOBODY - 1) else {
        panic!("another user joined")
    };
    assert!(
        refused.starts_with("OtherUser") && refused.contains("uid: 65534"),
        "{refused}"
    );
    let refused = PortGroup::join(addr, Box::new(|_| {})).unwrap_err();
    assert!(refused.to_string().contains("in use by process"), "{refused}");
    check_all(&sender, &mut members, "after");
}

#[test]
fn join__foreign_socket_on_the_port() {
    let addr = IpAddr::from([127, 0, 0, 46]);
    let foreign = UdpSocket::bind((addr, ROCE_PORT)).unwrap();
    let refused = PortGroup::join(addr, Box::new(|_| {})).unwrap_err();
    assert!(matches!(refused, GroupError::PortInUse { .. }), "{refused:?}");
    drop(foreign);
    // A program that would share the port shifts all slots, so it is foreign too.
    let mut sharing = None;
    until_forks_are_over(|| {
        sharing = RxSocket::bind(SocketAddr::new(addr, ROCE_PORT), true).ok();
        sharing.is_some()
    });
    let refused = PortGroup::join(addr, Box::new(|_| {})).unwrap_err();
    assert!(matches!(refused, GroupError::PortInUse { .. }), "{refused:?}");
    drop(sharing);
    drop(PortGroup::join(addr, Box::new(|_| {})).unwrap());
}

#[test]
fn join__address_of_another_host() {
    let refused = PortGroup::join(IpAddr::from([192, 0, 2, 1]), Box::new(|_| {})).unwrap_err();
    assert!(matches!(refused, GroupError::NotLocal { .. }), "{refused:?}");
    assert!(
        refused
            .to_string()
            .contains("192.0.2.1 is no address of this host"),
        "{refused}"
    );
}

/// Repeats `attempt` until it succeeds: other tests of this process start programs, and between fork and exec those have
/// our descriptors too.
fn until_forks_are_over(mut attempt: impl FnMut() -> bool) {
    let start = Instant::now();
    while !attempt() {
        assert!(start.elapsed() < DEADLINE);
        thread::yield_now();
    }
}

/// Joins a group in this process. Returns it, and the messages that it receives.
fn join(addr: IpAddr) -> (PortGroup, Receiver<MadDatagram>) {
    let (tx, rx) = mpsc::channel();
    let group = PortGroup::join(addr, Box::new(move |mad| drop(tx.send(mad)))).unwrap();
    (group, rx)
}

#[test]
fn join__many_times_in_one_process() {
    // Each of the groups holds the sockets of up to three blocks: more descriptors than many systems let a process have at first.
    let limit = getrlimit(Resource::Nofile);
    if limit.maximum.is_some_and(|maximum| maximum < 4096) {
        return skip("this process may not have 4,096 descriptors");
    }
    let current = limit.current.map(|current| current.max(4096));
    setrlimit(Resource::Nofile, Rlimit { current, ..limit }).unwrap();
    let addr = IpAddr::from([127, 0, 0, 47]);
    let sender = Sender::new(addr);
    // Three full blocks: only a slot that is left is free.
    let mut groups: Vec<_> = (1..48).map(|_| join(addr)).collect();
    // The holder leaves first: the others have to find the new one.
    for _ in 0..3 {
        let (left, _) = groups.remove(0);
        let slot = left.slot();
        drop(left);
        until_forks_are_over(|| {
            let (tx, rx) = mpsc::channel();
            let group = PortGroup::join(addr, Box::new(move |mad| drop(tx.send(mad))));
            group.map(|group| groups.push((group, rx))).is_ok()
        });
        assert_eq!(groups.last().unwrap().0.slot(), slot);
        for (group, mads) in &groups {
            sender.rtu(group.slot(), "x");
            assert_eq!(describe(&mads.recv_timeout(DEADLINE).unwrap()), "x");
        }
    }
    let sum = |f: fn(&PortGroup) -> u64| groups.iter().map(|(g, _)| f(g)).sum::<u64>();
    assert_eq!(sum(|g| g.counters().undeliverable + g.counters().malformed), 0);
}

#[test]
fn holder__unread_and_broken_connections_do_no_harm() {
    let addr = IpAddr::from([127, 0, 0, 48]);
    let sender = Sender::new(addr);
    let (holder, holder_mads) = join(addr);
    let (member, member_mads) = join(addr);

    // The holder's socket may be full for a moment.
    let connect_when_there_is_room = || {
        let start = Instant::now();
        loop {
            match connect_to_holder(addr) {
                Ok(fd) => break fd,
                Err(e) => assert!(start.elapsed() < DEADLINE, "{e}"),
            }
            thread::yield_now();
        }
    };
    let mut broken = Vec::new();
    for i in 0..300 {
        let fd = connect_when_there_is_room();
        let junk = vec![i as u8; i * 13];
        let _ = rustix::net::send(&fd, &junk, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        broken.push(fd);
    }
    // One connection takes a slot and never reads what is sent there.
    let slot = (1..SLOTS as u8)
        .find(|s| ![holder.slot(), member.slot()].contains(s))
        .unwrap();
    let claim = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None).unwrap();
    let name = format!("rdmux-4791-{addr}-slot-{slot}");
    rustix::net::bind(
        &claim,
        &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap(),
    )
    .unwrap();
    let stuck = connect_when_there_is_room();
    rustix::net::send(&stuck, &[2, slot], SendFlags::NOSIGNAL).unwrap();
    for _ in 0..1000 {
        sender.rtu(slot, "stuck");
    }
    for bytes in [&b""[..], b"x", &[0x64; 11], &[0xff; 2000]] {
        sender.socket.send_to(bytes, sender.dst).unwrap();
    }

    sender.rtu(member.slot(), "member");
    assert_eq!(describe(&member_mads.recv_timeout(DEADLINE).unwrap()), "member");
    sender.rtu(holder.slot(), "holder");
    assert_eq!(describe(&holder_mads.recv_timeout(DEADLINE).unwrap()), "holder");
    let (third, third_mads) = join(addr);
    sender.rtu(third.slot(), "third");
    assert_eq!(describe(&third_mads.recv_timeout(DEADLINE).unwrap()), "third");
    assert!(holder.counters().undeliverable > 0);
    assert!(holder.counters().malformed > 0);
}

#[test]
fn join__holder_that_does_not_answer() {
    let addr = IpAddr::from([127, 0, 0, 49]);
    let flags = SocketFlags::CLOEXEC;
    let silent = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::bind(&silent, &holder_name(addr)).unwrap();
    rustix::net::listen(&silent, 4).unwrap();
    let refused = PortGroup::join(addr, Box::new(|_| {})).unwrap_err();
    assert!(
        matches!(refused, GroupError::NoAnswer { pid, .. } if pid == std::process::id() as i32),
        "{refused:?}"
    );

    let answering = thread::spawn(move || {
        // The connection of the first attempt still waits to be accepted.
        for _ in 0..2 {
            let fd = rustix::net::accept(silent.as_fd()).unwrap();
            let _ = rustix::net::send(&fd, &[1, 1, 77, 77], SendFlags::NOSIGNAL);
        }
    });
    let refused = PortGroup::join(addr, Box::new(|_| {})).unwrap_err();
    assert!(matches!(refused, GroupError::OtherVersion { .. }), "{refused:?}");
    answering.join().unwrap();
}

#[test]
fn join__waits_for_a_holder_that_gets_no_cpu() {
    let addr = IpAddr::from([127, 0, 0, 54]);
    for dies in [false, true] {
        let holder = Member::start(addr, NOBODY).unwrap();
        holder.stop();
        thread::scope(|scope| {
            let joining = scope.spawn(|| Member::start(addr, NOBODY));
            // The test needs time to pass, not a condition: a joiner that gives up on a stopped holder does so within 3 s.
            thread::sleep(Duration::from_secs(3));
            assert!(!joining.is_finished());
            holder.signal(if dies { Signal::KILL } else { Signal::CONT });
            joining.join().unwrap().unwrap();
        });
    }
}

#[test]
fn drop__leaves_nothing_behind() {
    let addr = IpAddr::from([127, 0, 0, 50]);
    for _ in 0..20 {
        let (group, _mads) = join(addr);
        group.register_service(ServiceId::tcp(1)).unwrap();
        drop(group);
        until_forks_are_over(|| UdpSocket::bind((addr, ROCE_PORT)).is_ok());
    }
}
