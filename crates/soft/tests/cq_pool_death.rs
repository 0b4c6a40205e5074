//! Users of a pool's queue whose peers are other processes, one of which is killed while messages go both ways.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::{Duration, Instant};

use common::{ChildProcess, END_BYTES, End, LONG, shareable};
use rdmux_verbs::*;

const PORT: u16 = 7174;
/// Messages of each side that are under way, and its receives.
const WINDOW: u64 = 4;
const RECEIVES: u64 = 8;
/// Completions that a user reserves: those of all these requests.
const NR: u32 = (WINDOW + RECEIVES) as u32;
const MESSAGE_BYTES: usize = 64;
/// Mark of the number of a receive.
const RECEIVE: u64 = 1 << 63;

/// One end of a connection, which sends as long as there is room in its window.
struct Stream {
    end: End,
    connection: Option<Connection>,
    sent: u64,
    receives: u64,
    /// Requests that have completed.
    sends_done: u64,
    receives_done: u64,
    /// Status of the first request that has failed.
    failed: Option<Status>,
}

fn message(number: u64) -> [u8; MESSAGE_BYTES] {
    [number.to_ne_bytes(); MESSAGE_BYTES / 8]
        .concat()
        .try_into()
        .unwrap()
}

impl Stream {
    fn new(device: &Device, cq: &CompletionQueue) -> Stream {
        let end = End::with(device, shareable(END_BYTES), |_, options| QpOptions {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            ..options
        });
        end.qp.init().unwrap();
        let mut stream = Stream {
            end,
            connection: None,
            sent: 0,
            receives: 0,
            sends_done: 0,
            receives_done: 0,
            failed: None,
        };
        (0..RECEIVES).for_each(|_| stream.receive());
        stream
    }

    fn begin(&mut self, connection: Connection) {
        self.connection = Some(connection);
        (0..WINDOW).for_each(|_| self.send());
    }

    fn receive(&mut self) {
        let at = self.receives % RECEIVES * MESSAGE_BYTES as u64;
        let request = RecvRequest {
            wr_id: RECEIVE | self.receives,
            sges: self.end.mr.sge(at, MESSAGE_BYTES as u32).into(),
        };
        self.end.qp.post_recv(request).unwrap();
        self.receives += 1;
    }

    fn send(&mut self) {
        let sges = SgeList::inline(&message(self.sent));
        let request = SendRequest::send(sges).wr_id(self.sent).signaled();
        self.end.qp.post_send(request).unwrap();
        self.sent += 1;
    }

    /// Takes a completion: each request has one, in order.
    fn take(&mut self, wc: &WorkCompletion) {
        let is_receive = wc.wr_id & RECEIVE != 0;
        let done = match is_receive {
            true => &mut self.receives_done,
            false => &mut self.sends_done,
        };
        let number = wc.wr_id & !RECEIVE;
        assert_eq!(number, *done, "{wc:?}");
        *done += 1;
        if wc.status != Status::Success {
            self.failed.get_or_insert(wc.status);
            return;
        }
        assert_eq!(self.failed, None, "{wc:?} after a failure");
        if !is_receive {
            return self.send();
        }
        let mut bytes = [0; MESSAGE_BYTES];
        let at = number % RECEIVES * MESSAGE_BYTES as u64;
        self.end.memory.read(at, &mut bytes).unwrap();
        assert_eq!(bytes, message(number), "message {number}");
        self.receive();
    }

    /// Returns whether a request has failed, and all others have completed.
    fn is_over(&self) -> bool {
        let all = (self.sends_done, self.receives_done) == (self.sent, self.receives);
        self.failed.is_some() && all
    }
}

fn open(address: IpAddr, shared_memory: bool) -> Device {
    let options = Options {
        shared_memory: match shared_memory {
            true => SharedMemory::Auto,
            false => SharedMemory::Off,
        },
        ..Options::default()
    };
    common::open_with(address, options).unwrap()
}

/// Body of the peers: accepts every request, and exchanges messages until standard input ends.
#[test]
fn child() {
    let Ok(at) = std::env::var("RDMUX_POOL_PEER_AT") else {
        return;
    };
    let shared_memory = std::env::var_os("RDMUX_POOL_PEER_SHM").is_some();
    let device = open(at.parse().unwrap(), shared_memory);
    let cq = device.create_cq(1024).unwrap();
    let listener = device.listen(PORT).unwrap();
    thread::spawn(|| {
        let _ = std::io::stdin().lines().map_while(Result::ok).count();
        std::process::exit(0);
    });
    println!("@ ready");
    let mut streams: Vec<Stream> = Vec::new();
    loop {
        if let Some(request) = listener.accept(Duration::ZERO) {
            let mut stream = Stream::new(&device, &cq);
            let connection = request
                .accept(&stream.end.qp, &ConnectParams::default(), &[])
                .unwrap();
            assert!(connection.wait_established());
            stream.begin(connection);
            streams.push(stream);
        }
        let mut found = cq.wait(Duration::from_millis(1)).unwrap();
        while let Some(wc) = found {
            let of = |stream: &&mut Stream| stream.end.qp.qpn() == wc.qpn;
            streams.iter_mut().find(of).unwrap().take(&wc);
            found = cq.poll();
        }
    }
}

struct Peer {
    process: ChildProcess,
    at: SocketAddr,
}

impl Peer {
    fn start(address: IpAddr, shared_memory: bool) -> Peer {
        let process = ChildProcess::start(|command| {
            command.env("RDMUX_POOL_PEER_AT", address.to_string());
            if shared_memory {
                command.env("RDMUX_POOL_PEER_SHM", "1");
            }
        });
        process.expect("ready");
        let at = SocketAddr::new(address, PORT);
        Peer { process, at }
    }
}

/// A user of the pool.
struct User {
    stream: Stream,
    share: CqShare,
}

/// Users of one queue, for all of which this thread polls.
struct Users {
    device: Device,
    pool: CqPool,
    queue: CompletionQueue,
    users: Vec<User>,
}

impl Users {
    /// Makes a pool whose only queue has room for so many users.
    fn new(device: Device, room: u32) -> Users {
        let pool = CqPool::new(vec![device.clone()], room * NR);
        let queue = pool.get(0, None).unwrap().pool_queue();
        Users {
            device,
            pool,
            queue,
            users: Vec::new(),
        }
    }

    fn add(&mut self, peer: &Peer) {
        let share = self.pool.get(NR, None).unwrap();
        let mut stream = Stream::new(&self.device, &share);
        let params = ConnectParams::default();
        let connection = self.device.connect(&stream.end.qp, peer.at, &params, &[]);
        stream.begin(connection.unwrap());
        self.users.push(User { stream, share });
    }

    /// Handles completions until this holds.
    fn run(&mut self, what: &str, is_so: impl Fn(&[User]) -> bool) {
        let deadline = Instant::now() + LONG;
        while !is_so(&self.users) {
            assert!(Instant::now() < deadline, "not so: {what}");
            let Some(wc) = self.queue.wait(Duration::from_millis(100)).unwrap() else {
                continue;
            };
            let of = |user: &&mut User| user.stream.end.qp.qpn() == wc.qpn;
            self.users.iter_mut().find(of).unwrap().stream.take(&wc);
        }
    }

    /// Handles completions until so many more messages have come for each of these users, and as many of theirs have arrived.
    fn exchange(&mut self, users: std::ops::Range<usize>, messages: u64) {
        let counts = |user: &User| [user.stream.sends_done, user.stream.receives_done];
        let before: Vec<_> = self.users[users.clone()].iter().map(counts).collect();
        self.run("messages go both ways", |all| {
            let mut now = all[users.clone()].iter().map(counts).zip(&before);
            now.all(|(now, before)| now[0] >= before[0] + messages && now[1] >= before[1] + messages)
        });
    }

    fn reserved(&self) -> Vec<(u32, u32)> {
        let usage = self.pool.usage().into_iter();
        usage.map(|queue| (queue.used, queue.users)).collect()
    }
}

/// Two users have a peer that is killed, two others one that lives.
fn killed(net: u8, shared_memory: bool, failed: Status) {
    let address = |host| IpAddr::from([127, 58, net, host]);
    let mut users = Users::new(open(address(1), shared_memory), 4);
    let [lives, mut dies] = [2, 3].map(|host| Peer::start(address(host), shared_memory));
    for peer in [&lives, &dies, &lives, &dies] {
        users.add(peer);
    }
    // Those of the peer that lives come first.
    users.users.swap(1, 2);
    assert_eq!(users.reserved(), [(4 * NR, 4)], "the queue is full");
    let carrier = |user: &User| user.stream.end.qp.carrier();
    users.run("the carrier is in use", |all| {
        let by_link = |user| carrier(user) == Some(Carrier::SharedMemory);
        all.iter().all(|user| by_link(user) == shared_memory)
    });
    users.exchange(0..4, 200);
    dies.process.kill();
    // At once within a host; else by the retries, which take 3.4 s.
    let began = Instant::now();
    users.run("the connections to the dead process are over", |all| {
        all[2..].iter().all(|user| user.stream.is_over())
    });
    println!("over after {:?}", began.elapsed());
    for user in users.users.drain(2..) {
        assert_eq!(user.stream.failed, Some(failed));
        // Without a link nobody notifies of the death of a process that has its address for itself.
        let connection = user.stream.connection.as_ref().unwrap();
        assert!(match shared_memory {
            true => connection.wait_ended(LONG),
            false => !connection.is_ended(),
        });
        let qp = &user.stream.end.qp;
        assert_eq!(qp.error(), (!shared_memory).then_some(failed));
        assert!(!user.share.has_lost(qp));
    }
    assert_eq!(users.reserved(), [(2 * NR, 2)]);
    users.exchange(0..2, 200);
    // The room is there for other users, in the same queue.
    for _ in 0..2 {
        users.add(&lives);
    }
    assert_eq!(users.reserved(), [(4 * NR, 4)]);
    users.exchange(0..4, 200);
    for User { stream, share } in &users.users {
        assert_eq!(stream.failed, None);
        assert!(share.is(&users.queue) && !share.has_lost(&stream.end.qp));
    }
}

#[test]
fn killed__over_shared_memory() {
    killed(1, true, Status::Flushed);
}

#[test]
fn killed__over_udp() {
    killed(2, false, Status::RetryExceeded);
}
