//! Processes that die: the processes that survive on the address notify their peers.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

use common::{ChildProcess, LONG};
use rdmux_verbs::*;

/// A process that accepts connections.
struct Server {
    process: ChildProcess,
    at: SocketAddr,
}

impl Server {
    fn start(address: IpAddr, port: u16) -> Server {
        let at = SocketAddr::new(address, port);
        let process = ChildProcess::start(|command| {
            command.env("RDMUX_DEATH_AT", at.to_string());
        });
        process.expect("ready");
        Server { process, at }
    }
}

/// Body of the processes: accepts every request, and keeps the connections until standard input ends.
#[test]
fn child() {
    let Ok(at) = std::env::var("RDMUX_DEATH_AT") else {
        return;
    };
    let at: SocketAddr = at.parse().unwrap();
    let device = common::open(at.ip()).unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(256).unwrap());
    let listener = device.listen(at.port()).unwrap();
    println!("@ ready");
    thread::spawn(move || {
        let mut kept = Vec::new();
        while let Some(request) = listener.accept(Duration::from_secs(3_600)) {
            let qp = pd.create_qp(&QpOptions::new(&cq)).unwrap();
            let connection = request.accept(&qp, &ConnectParams::default(), &[]).unwrap();
            assert!(connection.wait_established());
            println!("@ accepted");
            kept.push((qp, connection));
        }
    });
    let _ = std::io::stdin().lines().map_while(Result::ok).count();
    std::process::exit(0);
}

/// The peers of those processes, on an address of their own.
struct Client {
    device: Device,
    pd: ProtectionDomain,
    cq: CompletionQueue,
}

impl Client {
    fn new(address: IpAddr) -> Client {
        let device = common::open(address).unwrap();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(256).unwrap());
        Client { device, pd, cq }
    }

    fn connect(&self, server: &Server) -> Connection {
        let qp = self.pd.create_qp(&QpOptions::new(&self.cq)).unwrap();
        let connection = self
            .device
            .connect(&qp, server.at, &ConnectParams::default(), &[])
            .unwrap();
        server.process.expect("accepted");
        connection
    }

    /// Checks that the peer lives: it then acknowledges a write of nothing.
    fn check(&self, connection: &Connection) {
        let operation = Operation::Write {
            va: 0,
            rkey: RKey(0),
            imm: None,
        };
        let write = SendRequest {
            wr_id: 7,
            operation,
            sges: SgeList::EMPTY,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        connection.qp().unwrap().post_send(write).unwrap();
        let wc = self.cq.wait(LONG).unwrap().expect("a completion");
        assert_eq!((wc.wr_id, wc.status), (7, Status::Success));
        assert!(!connection.is_ended());
    }
}

fn slot(connection: &Connection) -> u32 {
    connection.remote().unwrap().qpn.value() >> 16
}

/// Kills a process with connections: the first of its address, which holds the address, or another one. The connections are idle:
/// only a DREQ can notify their peers.
fn peers_are_told(address: IpAddr, client: IpAddr, victim: usize) {
    let client = Client::new(client);
    let mut servers: Vec<Server> = [7001, 7002, 7003]
        .into_iter()
        .map(|port| Server::start(address, port))
        .collect();
    let mut victim = servers.remove(victim);
    let lost: Vec<Connection> = (0..20).map(|_| client.connect(&victim)).collect();
    let kept: Vec<Connection> = servers.iter().map(|server| client.connect(server)).collect();
    victim.process.kill();
    for connection in &lost {
        assert!(connection.wait_ended(LONG), "a peer was not told");
    }
    for (connection, server) in kept.iter().zip(&servers) {
        client.check(connection);
        client.check(&client.connect(server));
    }
    // The slot of the dead process is not reused yet, but its port is.
    let next = Server::start(address, victim.at.port());
    let connection = client.connect(&next);
    assert_ne!(slot(&connection), slot(&lost[0]));
    client.check(&connection);
}

#[test]
fn death__of_a_member() {
    peers_are_told([127, 0, 1, 91].into(), [127, 0, 1, 92].into(), 1);
}

#[test]
fn death__of_the_holder() {
    peers_are_told([127, 0, 1, 93].into(), [127, 0, 1, 94].into(), 0);
}

#[test]
fn death__of_one_after_the_other() {
    let client = Client::new([127, 0, 1, 96].into());
    let address = [127, 0, 1, 95].into();
    let mut servers: Vec<Server> = (7001..7005).map(|port| Server::start(address, port)).collect();
    let connections: Vec<Connection> = servers.iter().map(|server| client.connect(server)).collect();
    // The new holder dies while it ends the connections of the first process.
    servers[0].process.kill();
    servers[1].process.kill();
    servers[2].process.kill();
    for connection in &connections[..3] {
        assert!(connection.wait_ended(LONG), "a peer was not told");
    }
    client.check(&connections[3]);
}
