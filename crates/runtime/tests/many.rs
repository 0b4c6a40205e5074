//! Many connections, all of one process: neither threads nor descriptors grow with their number.
#![allow(non_snake_case, reason = "names of tests are function__case")]

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdmux_runtime::{ConnectionId, Limits, Queues, Reactor, ReactorEvent, Sizes};
use rdmux_verbs::{ConnectParams, Device};

const CONNECTIONS: usize = 1000;
/// Descriptors that two devices open for each other, however many connections there are.
const FEW: usize = 4;
/// Time for what happens at once unless something is wrong.
const LONG: Duration = Duration::from_secs(60);
const SIZES: Sizes = Sizes {
    message_bytes: 64,
    sent_bytes: 64,
    receives: 1,
    answers: 0,
    own: 1,
    operations: 0,
};

fn reactor() -> Reactor<()> {
    let limits = Limits {
        connections: CONNECTIONS,
        keepalive: 2 * LONG,
        shared_receives: Some(0),
        queues: Queues::Pool,
        ledger: None,
    };
    Reactor::new(SIZES, limits, None).unwrap()
}

/// Returns the number of this process's threads, and of its descriptors (one of which reads the directory).
fn counts() -> (usize, usize) {
    let entries = |path| std::fs::read_dir(path).unwrap().count();
    (entries("/proc/self/task"), entries("/proc/self/fd"))
}

/// Connects once more, and accepts on the same thread.
fn add(server: &mut Reactor<()>, client: &mut Reactor<()>, device: &Device, to: SocketAddr) -> ConnectionId {
    let params = ConnectParams::default();
    let id = client.connect(device, to, &params).unwrap();
    let deadline = Instant::now() + LONG;
    loop {
        assert!(Instant::now() < deadline, "the connection is not established");
        if let Some(ReactorEvent::Request(request)) = server.poll() {
            server.accept(request, &params).unwrap();
        }
        match client.poll() {
            Some(ReactorEvent::Connected(of, result)) => {
                result.unwrap();
                assert_eq!(of, id);
                return id;
            }
            Some(other) => panic!("{other:?}"),
            None => {}
        }
    }
}

#[test]
fn connect__a_thousand_connections_need_hardly_more_threads_or_descriptors_than_one() {
    rdmux_soft::register();
    let to: SocketAddr = "127.0.12.20:7174".parse().unwrap();
    let (mut server, mut client) = (reactor(), reactor());
    server.listen(&Device::open(to.ip()).unwrap(), to.port()).unwrap();
    let device = Device::open("127.0.12.21".parse().unwrap()).unwrap();
    let mut ids = vec![add(&mut server, &mut client, &device, to)];
    let one = counts();
    ids.extend((1..CONNECTIONS).map(|_| add(&mut server, &mut client, &device, to)));
    println!(
        "1 connection: {one:?} threads and descriptors; {CONNECTIONS}: {:?}",
        counts()
    );
    // The devices open some when they meet, of which a few may come after the first connection, and some close again.
    let deadline = Instant::now() + LONG;
    while counts().0 > one.0 || counts().1 > one.1 + FEW {
        assert!(Instant::now() < deadline, "{:?} instead of {one:?}", counts());
        std::thread::yield_now();
    }
    // Each of them works: the end of each is noticed.
    ids.into_iter().for_each(|id| client.close(id, None));
    let mut ended = 0;
    let deadline = Instant::now() + LONG;
    while ended < CONNECTIONS {
        if let Some(event) = server.next(Some(deadline)).unwrap() {
            let ReactorEvent::Ended(id, _) = event else {
                panic!("{event:?}")
            };
            server.close(id, None);
            ended += 1;
        }
        assert!(Instant::now() < deadline, "{ended} of {CONNECTIONS} have ended");
    }
    assert_eq!((server.connections(), client.connections()), (0, 0));
}
