//! Peers of nodes on real devices: in this process, and in others that are stopped, killed and started again.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rdmux_memory::AnonymousMemory;
use rdmux_rnic::{Operation, SendRequest};
use rdmux_verbs::{Memory, Options, Status};
use rdmux_wire::node::peer::TenantName;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};

use super::machine::NONE_TIME;
use super::session::ANSWER_TIME;
use super::shared::RECEIVE;
use super::*;

mod lines;

const LONG: Duration = Duration::from_secs(30);

fn ip(host: u8) -> IpAddr {
    [127, 0, 54, host].into()
}

/// The peer that is the only engine of a host.
fn peer_id(host: u8) -> PeerId {
    PeerId {
        address: ip(host),
        engine: 0,
    }
}

fn qpn(number: u32) -> Qpn {
    Qpn::new(number)
}

fn tenant(host: u8) -> TenantName {
    TenantName::new(&format!("t{host}")).unwrap()
}

fn device(host: u8) -> Device {
    rdmux_soft::register();
    let options = Options {
        provider: Some("soft"),
        ..Options::default()
    };
    Device::open_with(ip(host), options).unwrap()
}

/// The part of a node that this module is.
struct Host {
    number: u8,
    device: Device,
    events: EventQueue,
    peers: Peers,
    seen: Vec<PeerEvent>,
    /// The queue whose events a test waits for besides.
    watched: Option<EventQueue>,
}

impl Host {
    fn new(number: u8, key: u8) -> Host {
        Host::within(number, key, 8)
    }

    /// Returns a host with at most so many shared queue pairs.
    fn within(number: u8, key: u8, shared_max: usize) -> Host {
        Host::engines(number, key, shared_max, 1).remove(0)
    }

    /// Returns the engines of a host.
    fn engines(number: u8, key: u8, shared_max: usize, count: usize) -> Vec<Host> {
        let mut devices = vec![device(number)];
        for _ in 1..count {
            devices.push(devices[0].open_engine().unwrap());
        }
        let shares = Shares::of_engines(&devices, &Key::new([key; 32]), (shared_max, true)).unwrap();
        let host = |(device, shares)| {
            let events = EventQueue::new().unwrap();
            Host {
                number,
                device,
                peers: Peers::open(&events, shares).unwrap(),
                events,
                seen: Vec::new(),
                watched: None,
            }
        };
        devices.into_iter().zip(shares).map(host).collect()
    }

    fn add(&mut self, number: u32) {
        self.peers.add_qp(qpn(number), 1, tenant(self.number));
    }

    fn bind(&mut self, number: u32, peer: u8, dest: u32) {
        self.bind_at(Instant::now(), number, peer, dest);
    }

    fn bind_at(&mut self, now: Instant, number: u32, peer: u8, dest: u32) {
        let far = (ip(peer), qpn(dest), 0);
        self.peers.bind(now, qpn(number), far, Access::REMOTE_WRITE);
    }

    fn turn(&mut self) {
        let now = Instant::now();
        while let Some(token) = self.events.poll() {
            assert!(is_token(token));
            self.peers.happened(now, token);
        }
        self.peers.look(now);
        while let Some(event) = self.peers.next_event() {
            self.seen.push(event);
        }
    }

    /// Takes the first event for which there is a result.
    fn find<T>(&mut self, mut f: impl FnMut(&PeerEvent) -> Option<T>) -> Option<T> {
        let (at, found) = self
            .seen
            .iter()
            .enumerate()
            .find_map(|(at, event)| Some((at, f(event)?)))?;
        self.seen.remove(at);
        Some(found)
    }
}

/// Runs hosts until there is a result.
fn run<T, const N: usize>(
    mut hosts: [&mut Host; N],
    mut done: impl FnMut(&mut [&mut Host; N]) -> Option<T>,
) -> T {
    let end = Instant::now() + LONG;
    loop {
        hosts.iter_mut().for_each(|host| host.turn());
        if let Some(result) = done(&mut hosts) {
            return result;
        }
        let now = Instant::now();
        if now >= end {
            for host in &hosts {
                eprintln!("host {}: {:?}", host.number, host.seen);
            }
            panic!("nothing has come of it");
        }
        let mut sleeps = true;
        let mut until = end;
        for host in &mut hosts {
            host.peers.shared_cq().arm(rdmux_verbs::Arm::Next);
            sleeps &= host.peers.prepare_sleep(now, None);
            until = host.peers.deadline().map_or(until, |at| at.min(until));
        }
        if !sleeps {
            continue;
        }
        let mut fds = Vec::new();
        for host in &hosts {
            for fd in [
                host.events.as_fd(),
                host.peers.control_cq().as_fd(),
                host.peers.shared_cq().as_fd(),
            ] {
                fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
            }
            if let Some(watched) = &host.watched {
                fds.push(PollFd::new(watched, PollFlags::IN));
            }
        }
        let timeout = Timespec::try_from(until.saturating_duration_since(now)).unwrap();
        poll(&mut fds, Some(&timeout)).unwrap();
    }
}

fn bound(number: u32) -> impl FnMut(&PeerEvent) -> Option<(PeerId, Qpn, Binding)> {
    move |event| match event {
        PeerEvent::Bound {
            qpn: one,
            peer,
            dest,
            binding,
        } if *one == qpn(number) => Some((*peer, *dest, binding.clone())),
        _ => None,
    }
}

fn own(number: u32) -> impl FnMut(&PeerEvent) -> Option<Why> {
    move |event| match event {
        PeerEvent::Own { qpn: one, why } if *one == qpn(number) => Some(why.clone()),
        _ => None,
    }
}

fn gone(peer: u8) -> impl FnMut(&PeerEvent) -> Option<()> {
    move |event| (*event == PeerEvent::Gone { peer: peer_id(peer) }).then_some(())
}

fn ready(event: &PeerEvent) -> Option<SharedId> {
    match event {
        PeerEvent::QpReady { id } => Some(*id),
        _ => None,
    }
}

/// Two hosts with a connection between queue pairs 11 and 22.
fn connected(first: u8, second: u8) -> (Host, Host) {
    connected_within((first, 8), second)
}

/// Two such hosts, of which the first one has at most so many shared queue pairs.
fn connected_within((first, shared_max): (u8, usize), second: u8) -> (Host, Host) {
    let (mut a, mut b) = (Host::within(first, 7, shared_max), Host::new(second, 7));
    a.add(11);
    b.add(22);
    a.bind(11, second, 22);
    b.bind(22, first, 11);
    let found = run([&mut a, &mut b], |[a, b]| {
        let found = a.seen.iter().find_map(bound(11));
        found.filter(|_| b.seen.iter().find_map(bound(22)).is_some())
    });
    let binding = Binding {
        domain: 1,
        access: Access::REMOTE_WRITE.bits(),
        tenant: tenant(second),
    };
    assert_eq!(found, (peer_id(second), qpn(22), binding));
    a.seen.clear();
    b.seen.clear();
    (a, b)
}

fn shared_by(peer: &Host, own: &Host) -> SharedBy {
    SharedBy {
        peer: peer_id(peer.number),
        here: tenant(own.number),
        there: tenant(peer.number),
        class: 0,
    }
}

/// From a bound connection to bytes in the memory of the peer's application: a key is resolved, a shared queue pair opened, and both are used.
#[test]
fn peers__write_and_send_over_a_shared_queue_pair() {
    let (mut a, mut b) = connected(1, 2);
    let memory = Arc::new(AnonymousMemory::new(8192).unwrap());
    let spec = RegionSpec {
        memory: memory.clone(),
        memory_offset: 4096,
        length: 4096,
        iova: 0x10_0000,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
    };
    let application = b.device.alloc_pd().unwrap();
    let region = application
        .reg_mr(spec.memory.clone(), 4096, 4096, spec.iova, spec.access)
        .unwrap();
    let rkey = region.rkey();
    b.peers.add_region(1, (region.lkey(), rkey), spec);
    let now = Instant::now();
    for (domain, ticket) in [(1, 5), (2, 6)] {
        a.peers.resolve_key(now, peer_id(2), (domain, rkey), ticket);
    }
    let key = |wanted| {
        move |event: &PeerEvent| match event {
            PeerEvent::Key { ticket, key } if *ticket == wanted => Some(*key),
            _ => None,
        }
    };
    let of_another_domain = run([&mut a, &mut b], |[a, _]| a.find(key(6)));
    assert_eq!(of_another_domain, None);
    let there = a.find(key(5)).flatten().unwrap();
    assert_eq!((there.start, there.length), (0x10_0000, 4096));
    assert_ne!(there.rkey, rkey);

    let by = shared_by(&b, &a);
    assert_eq!(a.peers.want_qp(now, &by), None);
    let id = run([&mut a, &mut b], |[a, _]| a.find(ready));
    let id_there = run([&mut a, &mut b], |[_, b]| b.find(ready));
    assert_eq!(a.peers.want_qp(now, &by), Some(id));
    let by_there = shared_by(&a, &b);
    assert_eq!(b.peers.want_qp(now, &by_there), Some(id_there));
    let qp = a.peers.shared_qp(id).unwrap();
    assert_eq!((qp.slots_there(), qp.rd_atomic()), (64, 16));
    let write = Operation::Write {
        va: there.start + 8,
        rkey: there.rkey,
        imm: None,
    };
    let inline = |bytes: &[u8]| rdmux_verbs::SgeList::inline(bytes);
    let write = SendRequest::new(write, inline(b"written")).wr_id(1).signaled();
    qp.qp().post_send(write).unwrap();
    let send = Operation::Send { imm: None };
    let send = SendRequest::new(send, inline(b"sent")).wr_id(2).signaled();
    qp.qp().post_send(send).unwrap();
    let received = run([&mut a, &mut b], |[_, b]| b.peers.shared_cq().poll());
    let outcome = (received.status, received.byte_len);
    assert_eq!(outcome, (Status::Success, 4), "{received:?}");
    assert_eq!(b.peers.shared_qp(id_there).unwrap().by(), &by_there);

    assert_eq!(b.peers.shared_by_qpn(received.qpn), Some(id_there));
    assert_ne!(received.wr_id & RECEIVE, 0);
    let mut bytes = [0; 4];
    let qp_there = b.peers.shared_qp(id_there).unwrap();
    let slot = received.wr_id as u16;
    qp_there.read_slot(slot, 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"sent");
    qp_there.post_slot(slot).unwrap();
    let mut bytes = [0; 7];
    memory.read(4096 + 8, &mut bytes).unwrap();
    assert_eq!(&bytes, b"written");
    for wr_id in [1, 2] {
        let completion = run([&mut a, &mut b], |[a, _]| a.peers.shared_cq().poll());
        assert_eq!((completion.wr_id, completion.status), (wr_id, Status::Success));
    }

    let shadow = b.peers.shadow(1, region.lkey()).unwrap();
    assert_eq!(shadow.rkey(), there.rkey);
    assert!(b.peers.shadow(2, region.lkey()).is_none());
    // The region stays until the peer has let go.
    assert!(b.peers.region_goes(Instant::now(), region));
    let asked = run([&mut a, &mut b], |[a, _]| {
        a.find(|event| match event {
            PeerEvent::KeyGone { asked, rkey: key, .. } if *key == rkey => Some(*asked),
            _ => None,
        })
    });
    let is_gone = |event: &PeerEvent| (*event == PeerEvent::RegionReleased { rkey }).then_some(());
    assert_eq!(b.find(is_gone), None);
    a.peers.key_unused(Instant::now(), asked);
    run([&mut a, &mut b], |[_, b]| b.find(is_gone));
    a.peers.resolve_key(Instant::now(), peer_id(2), (1, rkey), 7);
    assert_eq!(run([&mut a, &mut b], |[a, _]| a.find(key(7))), None);

    // It goes at both ends.
    a.peers.fail_qp(Instant::now(), id);
    let is_over = |wanted: SharedId| {
        move |event: &PeerEvent| (*event == PeerEvent::QpGone { id: wanted }).then_some(())
    };
    run([&mut a, &mut b], |[a, _]| a.find(is_over(id)));
    run([&mut a, &mut b], |[_, b]| b.find(is_over(id_there)));
}

#[test]
fn want_qp__of_both_nodes_at_once_is_one() {
    let (mut a, mut b) = connected(3, 4);
    let (by, by_there) = (shared_by(&b, &a), shared_by(&a, &b));
    let now = Instant::now();
    assert_eq!(a.peers.want_qp(now, &by), None);
    assert_eq!(b.peers.want_qp(now, &by_there), None);
    let ids = run([&mut a, &mut b], |[a, b]| {
        let id = a.peers.want_qp(now, &by)?;
        Some((id, b.peers.want_qp(now, &by_there)?))
    });
    let end = |host: &Host, id| host.peers.shared_qp(id).unwrap().qp().query().unwrap();
    let (here, there) = (end(&a, ids.0), end(&b, ids.1));
    let number = |host: &Host, id| host.peers.shared_qp(id).unwrap().qp().qpn();
    assert_eq!(here.dest_qpn, number(&b, ids.1));
    assert_eq!(there.dest_qpn, number(&a, ids.0));
    assert_eq!((a.peers.shared_count(), b.peers.shared_count()), (1, 1));
}

#[test]
fn bind__a_node_is_its_own_peer() {
    let mut a = Host::new(7, 7);
    a.add(11);
    a.add(12);
    a.bind(11, 7, 12);
    a.bind(12, 7, 11);
    for number in [11, 12] {
        let (peer, ..) = run([&mut a], |[a]| a.find(bound(number)));
        assert_eq!(peer, peer_id(7));
    }
    // It has nothing to share with itself.
    let by = shared_by(&a, &a);
    assert_eq!(a.peers.want_qp(Instant::now(), &by), None);
    let refused = PeerEvent::QpRefused { by };
    run([&mut a], |[a]| a.find(|event| (*event == refused).then_some(())));
    assert_eq!(a.peers.shared_count(), 0);
}

/// Requests for control connections arrive at any engine of a node, and reach the one that is wanted.
#[test]
fn bind__to_each_engine_of_a_node() {
    let mut a = Host::new(23, 7);
    let mut engines = Host::engines(24, 7, 8, 3);
    let mut numbers = Vec::new();
    for host in &engines {
        let bits = upper_bits(std::slice::from_ref(&host.device)).unwrap()[0];
        numbers.push(u32::from(bits) << 16 | 22);
    }
    let wanted = [(11, 2), (12, 0), (13, 1)];
    for (own, engine) in wanted {
        let number = numbers[engine];
        engines[engine].add(number);
        engines[engine].bind(number, 23, own);
        a.add(own);
        a.bind(own, 24, number);
    }
    let [first, second, third] = &mut engines[..] else {
        panic!("not all engines");
    };
    for (own, engine) in wanted {
        let hosts = [&mut a, &mut *first, &mut *second, &mut *third];
        let (peer, dest, _) = run(hosts, |[a, ..]| a.find(bound(own)));
        let expected = PeerId {
            address: ip(24),
            engine: engine as u8,
        };
        assert_eq!((peer, dest), (expected, qpn(numbers[engine])));
    }
}

#[test]
fn of_engines__divides_the_limit_of_queue_pairs() {
    let one = device(25);
    let devices = [one.open_engine().unwrap(), one.open_engine().unwrap(), one];
    let key = Key::new([7; 32]);
    let shares = Shares::of_engines(&devices, &key, (8, true)).unwrap();
    let parts: Vec<_> = shares.iter().map(|one| one.queue_pairs_max).collect();
    assert_eq!(parts, [3, 3, 2]);
    let many = vec![devices[0].clone(); ENGINES_MAX + 1];
    assert!(matches!(
        Shares::of_engines(&many, &key, (8, true)),
        Err(PeersError::Engines)
    ));
}

#[test]
fn bind__to_a_node_with_another_key() {
    let (mut a, mut b) = (Host::new(8, 7), Host::new(9, 8));
    a.add(11);
    b.add(22);
    a.bind(11, 9, 22);
    assert_eq!(run([&mut a, &mut b], |[a, _]| a.find(own(11))), Why::Key);
    let warning = a.peers.take_warnings().concat();
    assert!(
        warning.contains("127.0.54.9") && warning.contains("--key"),
        "{warning}"
    );
    let told = run([&mut a, &mut b], |[_, b]| {
        let warnings = b.peers.take_warnings().concat();
        (!warnings.is_empty()).then_some(warnings)
    });
    assert!(told.contains("127.0.54.8"), "{told}");
    b.bind(22, 8, 11);
    assert_eq!(run([&mut a, &mut b], |[_, b]| b.find(own(22))), Why::Key);
}

#[test]
fn bind__to_a_host_without_a_node() {
    let mut a = Host::new(10, 7);
    let _device = device(11);
    for (number, peer) in [(11, 11), (12, 12)] {
        a.add(number);
        let began = Instant::now();
        a.bind(number, peer, 22);
        assert_eq!(run([&mut a], |[a]| a.find(own(number))), Why::NoNode);
        // The device refuses at once; of a host without one nothing comes.
        let least = if peer == 11 { Duration::ZERO } else { ANSWER_TIME };
        assert!(began.elapsed() >= least, "{:?}", began.elapsed());
        // It is not asked again now.
        a.add(number + 100);
        a.bind(number + 100, peer, 22);
        a.turn();
        assert_eq!(a.find(own(number + 100)), Some(Why::NoNode));
    }
}

#[test]
fn open__where_another_process_has_the_port() {
    let first = Host::new(13, 7);
    let again = device(13);
    let shares = Shares::of_engines(&[again], &Key::new([7; 32]), (8, true)).unwrap();
    let second = Peers::open(&first.events, shares.into_iter().next().unwrap());
    assert!(matches!(second, Err(PeersError::Listen(_))), "{second:?}");
}

/// A peer that has no key, and says what it likes.
#[test]
fn accept__anything_from_strangers() {
    use rdmux_runtime::{MessageConnection, Sizes};
    use rdmux_wire::node::peer::{MESSAGE_LEN_MAX, PORT};

    let mut a = Host::new(14, 7);
    let other = device(15);
    let (pd, cq) = (other.alloc_pd().unwrap(), other.create_cq(8192).unwrap());
    let sizes = Sizes {
        message_bytes: 2 * MESSAGE_LEN_MAX,
        sent_bytes: 2 * MESSAGE_LEN_MAX,
        receives: 8,
        answers: 0,
        own: 8,
        operations: 0,
    };
    for round in 0..40_u8 {
        let peer = std::net::SocketAddr::new(ip(14), PORT);
        let params = rdmux_verbs::ConnectParams::default();
        let mut attempt = MessageConnection::start(&pd, &cq, peer, &params, &sizes).unwrap();
        let events = EventQueue::new().unwrap();
        attempt.notify(&events, 0);
        a.watched = Some(events.clone());
        let mut connection = run([&mut a], |_| events.poll().and_then(|_| attempt.poll())).unwrap();
        // Some of them say nothing.
        if round % 4 > 0 {
            let slot = connection.take_slot().unwrap();
            let bytes = vec![round; [1, 8, MESSAGE_LEN_MAX + 1][usize::from(round % 3)]];
            connection.send(slot, &bytes).unwrap();
        }
        run([&mut a], |_| events.poll().and_then(|_| connection.end()));
    }
    a.watched = None;
    let mut b = Host::new(16, 7);
    a.add(11);
    b.add(22);
    a.bind(11, 16, 22);
    b.bind(22, 14, 11);
    run([&mut a, &mut b], |[a, _]| a.find(bound(11)));
}

/// An application of a node: its queue pair is known to other nodes, and its region stays until they have let go.
#[test]
fn node__answers_for_its_applications() {
    use rdmux_memory::mapping::sealed_file;
    use rdmux_wire::node::control::{Kind, Message};

    use crate::node::tests::{Served, create_qp};

    let served = Served::with_key(30, Key::new([7; 32]));
    let mut raw = served.attach();
    let pd = raw.made(&Message::AllocPd {});
    let Message::QpMade { qpn: dest, .. } = raw.ask(&create_qp(pd)) else {
        panic!("no queue pair");
    };
    let register = Message::Register {
        pd,
        offset: 0,
        length: 4096,
        iova: 0,
        access: 3,
    };
    let file = sealed_file("region", 4096).unwrap();
    let Message::Registered { id, rkey, .. } = raw.ask_with(&register, Some(&file)).message else {
        panic!("no region");
    };

    let mut a = Host::new(22, 7);
    a.add(11);
    let now = Instant::now();
    a.peers
        .bind(now, qpn(11), (served.address, dest, 0), Access::empty());
    let node = PeerId {
        address: served.address,
        engine: 0,
    };
    let mut ticket = 0;
    let there = run([&mut a], |[a]| {
        let answer = a.find(|event| match event {
            PeerEvent::Key { key, .. } => Some(*key),
            _ => None,
        });
        if ticket == 0 || answer == Some(None) {
            ticket += 1;
            a.peers.resolve_key(now, node, (1, rkey), ticket);
        }
        answer.flatten()
    });
    assert_eq!((there.start, there.length, there.access), (0, 4096, 3));
    assert_eq!(
        a.find(own(11)),
        None,
        "the application's queue pair has no peer yet"
    );

    let kind = Kind::Region;
    raw.channel.send(9, &Message::Destroy { kind, id }).unwrap();
    let asked = run([&mut a], |[a]| {
        a.find(|event| match event {
            PeerEvent::KeyGone { asked, .. } => Some(*asked),
            _ => None,
        })
    });
    // Other requests are answered meanwhile.
    assert_eq!(raw.ask(&Message::CountObjects {}).name(), "Objects");
    assert!(raw.channel.receive().unwrap().is_none());
    a.peers.key_unused(Instant::now(), asked);
    a.turn();
    let answer = raw.receive().unwrap();
    assert_eq!((answer.request, answer.message), (9, Message::Done {}));
    // The application goes, and with it its queue pair.
    drop(raw);
    assert_eq!(run([&mut a], |[a]| a.find(own(11))), Why::Refused(Reason::Own));
}

/// Kinds of peers in another process.
const PEER: &str = "RDMUX_TEST_PEER";

/// Runs as the peer, if this is that process: binds its queue pair 22 to 11 of the address that it reads, and prints what happens.
#[test]
fn peer__in_a_process_of_its_own() {
    let Ok(number) = std::env::var(PEER) else {
        return;
    };
    let mut host = Host::new(number.parse().unwrap(), 7);
    host.add(22);
    println!("peer ready");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    host.bind(22, line.trim().parse().unwrap(), 11);
    loop {
        host.turn();
        for event in host.seen.drain(..) {
            println!("peer {event:?}");
        }
        std::io::stdout().flush().unwrap();
        if host.peers.prepare_sleep(Instant::now(), None) {
            let left = host
                .peers
                .deadline()
                .map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = Timespec::try_from(left.unwrap_or(LONG)).unwrap();
            let mut fds = [
                PollFd::new(&host.events, PollFlags::IN),
                PollFd::from_borrowed_fd(host.peers.control_cq().as_fd(), PollFlags::IN),
            ];
            poll(&mut fds, Some(&timeout)).unwrap();
        }
    }
}

struct Other(Child);

impl Other {
    fn start(number: u8, peer: u8) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "node::peer::tests::peer__in_a_process_of_its_own",
                "--nocapture",
            ])
            .env(PEER, number.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("peer ready") {
            line.clear();
            assert_ne!(out.read_line(&mut line).unwrap(), 0, "the peer has ended");
        }
        std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
        let mut stdin = child.stdin.take().unwrap();
        writeln!(stdin, "{peer}").unwrap();
        Other(child)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a peer whose queue pair 22 is connected to 11 of a host. A peer that waits for a CPU longer than a node waits for its answer is started
/// again.
fn connected_to_other(a: &mut Host, peer: u8) -> Other {
    for tries in 0..3 {
        a.add(11);
        let other = Other::start(peer, a.number);
        // Its address is not asked again before.
        a.bind_at(Instant::now() + tries * NONE_TIME, 11, peer, 22);
        let is_bound = run([&mut *a], |[a]| {
            let is_bound = a.find(bound(11)).map(|_| true);
            is_bound.or_else(|| {
                let why = a.find(own(11))?;
                assert_eq!(why, Why::NoNode);
                Some(false)
            })
        });
        if is_bound {
            return other;
        }
        drop(other);
        a.peers.remove_qp(Instant::now(), qpn(11));
    }
    panic!("the peer does not answer");
}

#[test]
fn peers__one_that_is_killed_or_stopped_and_started_again() {
    let mut a = Host::new(17, 7);
    for signal in [Signal::KILL, Signal::STOP] {
        let other = connected_to_other(&mut a, 18);
        let began = Instant::now();
        other.signal(signal);
        run([&mut a], |[a]| a.find(gone(18)));
        assert!(began.elapsed() < Duration::from_secs(10), "{signal:?}");
        assert!(a.seen.contains(&PeerEvent::Unbound { qpn: qpn(11) }));
        a.seen.clear();
        a.peers.remove_qp(Instant::now(), qpn(11));
        drop(other);
    }
}

/// A peer that is only slow is asked who it is, and whether its port is there. Nothing else happens.
#[test]
fn doubt__of_a_node_that_lives() {
    let (mut a, mut b) = connected(60, 61);
    let links = |host: &Host| host.peers.machine.counts().0;
    let before = [links(&a), links(&b)];
    let now = Instant::now();
    for _ in 0..3 {
        a.peers.doubt(now, ip(61));
        b.peers.doubt(now, ip(60));
    }
    assert_eq!([links(&a), links(&b)], before.map(|count| count + 1));
    assert_eq!([a.peers.links.knocks(), b.peers.links.knocks()], [1, 1]);
    run([&mut a, &mut b], |[a, b]| {
        ([links(a), links(b)] == before).then_some(())
    });
    let is_over = |event: &PeerEvent| matches!(event, PeerEvent::Gone { .. } | PeerEvent::Unbound { .. });
    assert!(![&a, &b].iter().any(|host| host.seen.iter().any(is_over)));
}

#[test]
fn bind__to_a_peer_that_is_stopped() {
    let mut a = Host::new(19, 7);
    let other = Other::start(20, 19);
    other.signal(Signal::STOP);
    a.add(12);
    a.bind(12, 20, 22);
    assert_eq!(run([&mut a], |[a]| a.find(own(12))), Why::NoNode);
}
