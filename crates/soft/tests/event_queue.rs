//! Many connections in one thread, in a process of its own: it counts its threads and descriptors.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use common::LONG;
use rdmux_verbs::*;

const PORT: u16 = 7174;
const LISTENER: u64 = 0;

/// Returns the number of threads of this process and that of its descriptors.
fn threads_and_descriptors() -> (usize, usize) {
    let entries = |path| std::fs::read_dir(path).unwrap().count();
    (entries("/proc/self/task"), entries("/proc/self/fd"))
}

struct Sides {
    /// Owns its objects; both sides are on it.
    device: Device,
    qps: ProtectionDomain,
    options: QpOptions,
    listener: Listener,
    events: EventQueue,
    /// By their tokens: the odd ones are of the side that asks.
    connecting: HashMap<u64, Connecting>,
    connections: HashMap<u64, Connection>,
}

impl Sides {
    fn new(address: IpAddr) -> Sides {
        let device = common::open(address).unwrap();
        let options = QpOptions::new(&device.create_cq(256).unwrap());
        let events = EventQueue::new().unwrap();
        let listener = device.listen(PORT).unwrap();
        listener.notify(&events, LISTENER);
        Sides {
            qps: device.alloc_pd().unwrap(),
            device,
            options,
            listener,
            events,
            connecting: HashMap::new(),
            connections: HashMap::new(),
        }
    }

    fn ask(&mut self, token: u64) {
        let qp = self.qps.create_qp(&self.options).unwrap();
        let (pair, peer) = (
            ConnectPair::Own(&qp),
            SocketAddr::new(self.device.address(), PORT),
        );
        let (params, data) = (ConnectParams::default(), token.to_ne_bytes());
        let connecting = self.device.start_connect(pair, peer, &params, &data).unwrap();
        connecting.notify(&self.events, token);
        self.connecting.insert(token, connecting);
    }

    fn accept(&mut self, request: ConnectionRequest) {
        let token = u64::from_ne_bytes(request.private_data()[..8].try_into().unwrap()) + 1;
        let qp = self.qps.create_qp(&self.options).unwrap();
        let connection = request.accept(&qp, &ConnectParams::default(), b"").unwrap();
        connection.notify(&self.events, token);
        self.connections.insert(token, connection);
    }

    /// Handles the next event.
    fn handle_next(&mut self) {
        let token = self.events.wait(LONG).expect("something happens");
        if token == LISTENER {
            while let Some(request) = self.listener.accept(Duration::ZERO) {
                self.accept(request);
            }
        } else if let Some(connecting) = self.connecting.get_mut(&token)
            && let Some(result) = connecting.poll()
        {
            self.connections.insert(token, result.unwrap());
            // The result was given: there is nothing to wait for.
            let over = self.connecting.remove(&token).map(Connecting::wait);
            assert!(matches!(over, Some(Err(ConnectError::Over))));
        }
    }

    /// Handles events until all connections are so.
    fn until_all(&mut self, count: usize, are: impl Fn(Progress) -> bool) {
        let is_so = |connection: &&Connection| are(connection.progress());
        while self.connections.values().filter(is_so).count() < count {
            self.handle_next();
        }
    }

    fn open(&mut self, count: u64) {
        (0..count).for_each(|n| self.ask(2 * n + 1));
        self.until_all(2 * count as usize, |progress| progress.established.is_some());
    }

    /// One side ends them, and the other one learns of it.
    fn end(&mut self) {
        for (token, connection) in &self.connections {
            if token % 2 == 1 {
                connection.disconnect();
            }
        }
        self.until_all(self.connections.len(), |progress| progress.ended.is_some());
        self.connections.clear();
    }
}

#[test]
fn event_queue__many_connections_in_one_thread() {
    let mut sides = Sides::new([127, 0, 14, 30].into());
    sides.open(1);
    let one = threads_and_descriptors();
    sides.end();
    sides.open(50);
    // Fewer where the measurement of a wake-up, which takes a thread for a moment, had not ended before.
    let all = threads_and_descriptors();
    assert!(
        all.0 <= one.0 && all.1 <= one.1,
        "one connection {one:?}, 50 {all:?}"
    );
    sides.end();
    while sides.events.poll().is_some() {}
}
