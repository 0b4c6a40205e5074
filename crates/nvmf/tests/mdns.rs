//! A target that is announced by mDNS, as a resolver on the same link sees it: it asks with DNS packets of its own.
#![allow(non_snake_case, reason = "tests are named function__case")]

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use rdmux_nvmf::control::Control;
use rdmux_nvmf::control::config::TargetConfig;
use rdmux_nvmf::control::rpc::respond;
use rdmux_wire::nvme::DISCOVERY_NQN;
use serde_json::{Value, json};

#[path = "../../netns.rs"]
mod netns;
#[path = "../../skip.rs"]
mod skip;

/// For what a correct target does in two seconds: it first asks three times whether its name is free (RFC 6762, 8.1).
const LONG: Duration = Duration::from_secs(60);
/// Time after which a question is asked again.
const AGAIN: Duration = Duration::from_millis(200);
const LINK: &str = "ip link add v0 type veth peer name v1 && ip addr add 10.34.0.1/24 dev v0 && ip addr add 10.34.0.2/24 dev v0 && \
     ip addr add fd34::1/64 dev v0 nodad && ip link set v1 up && ip link set v0 up && ip link set lo up && ip route add 224.0.0.0/4 dev v0";

/// Types of records. RFC 1035, 3.2.2; RFC 2782.
const A: u16 = 1;
const AAAA: u16 = 28;
const PTR: u16 = 12;
const TXT: u16 = 16;
const SRV: u16 = 33;

/// Returns the position behind a name. RFC 1035, 4.1.4.
fn skip_name(packet: &[u8], mut at: usize) -> usize {
    loop {
        match packet[at] {
            0 => return at + 1,
            length if length & 0xc0 != 0 => return at + 2,
            length => at += 1 + usize::from(length),
        }
    }
}

/// A resolver.
struct Resolver {
    socket: UdpSocket,
    /// Label of the service's transport.
    transport: &'static str,
    /// The group of responders. RFC 6762, 3.
    group: SocketAddr,
}

impl Resolver {
    fn new(address: &str, group: SocketAddr, transport: &'static str) -> Resolver {
        let socket = UdpSocket::bind(address).unwrap();
        socket.set_read_timeout(Some(AGAIN)).unwrap();
        Resolver {
            socket,
            transport,
            group,
        }
    }

    /// Asks until the services are at these ports.
    fn ports_are(&self, expected: &[u16]) -> Vec<(u16, Vec<u8>)> {
        let deadline = Instant::now() + LONG;
        let mut last = None;
        while Instant::now() < deadline {
            let Some(records) = self.ask() else { continue };
            let services = records.iter().filter(|(kind, _)| *kind == SRV);
            let ports: BTreeSet<u16> = services
                .map(|(_, data)| u16::from_be_bytes([data[4], data[5]]))
                .collect();
            if ports.iter().eq(expected) {
                return records;
            }
            last = Some(ports);
        }
        panic!("{last:?} in place of {expected:?}");
    }

    /// Asks for the services, and returns types and data of the records of an answer; `None` if none comes soon.
    fn ask(&self) -> Option<Vec<(u16, Vec<u8>)>> {
        let mut question = vec![0, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in ["_nvme-disc", self.transport, "local"] {
            question.push(label.len() as u8);
            question.extend_from_slice(label.as_bytes());
        }
        question.extend_from_slice(&[0, 0, PTR as u8, 0, 1]);
        self.socket.send_to(&question, self.group).unwrap();
        let mut packet = [0; 9000];
        let length = self.socket.recv(&mut packet).ok()?;
        let packet = &packet[..length];
        let word = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
        let mut at = 12;
        for _ in 0..word(4) {
            at = skip_name(packet, at) + 4;
        }
        let mut records = Vec::new();
        for _ in 0..word(6) + word(8) + word(10) {
            at = skip_name(packet, at);
            let length = usize::from(word(at + 8));
            records.push((word(at), packet[at + 10..at + 10 + length].to_vec()));
            at += 10 + length;
        }
        Some(records)
    }
}

/// Returns true if the link receives packets of mDNS by a family of addresses.
fn is_received(family: &str) -> bool {
    let group = if family == "inet" {
        "224.0.0.251"
    } else {
        "ff02::fb"
    };
    let listed = Command::new("ip").args(["maddr", "show", "dev", "v0"]).output();
    let listed = String::from_utf8(listed.unwrap().stdout).unwrap();
    let mut groups = listed.lines().map(str::trim);
    groups.any(|line| line.starts_with(&format!("{family} ")) && line.split(' ').any(|word| word == group))
}

#[test]
fn namespace() {
    if !netns::is_inside() {
        return;
    }
    rdmux_soft::register();
    let described = "mdns = true\nlisten = [\"tcp:10.34.0.1:4420\", \"tcp:127.0.0.1:4499\"]\n\
        [[subsystem]]\nnqn = \"nqn.2014-08.org.example:mdns\"\nother_hosts = \"any\"\n";
    let config = |text: &str| TargetConfig::parse(text).unwrap();
    let (control, server) = Control::start(config(described)).unwrap();
    let handle = server.handle();
    let thread = std::thread::spawn(move || server.run().unwrap());
    let request_of = |transport: &str, method: &str, ip: &str, port: u16| {
        let address = json!({ "trtype": transport, "traddr": ip, "trsvcid": port.to_string() });
        let params = json!({ "listen_address": address });
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        assert_eq!(respond(&control, &request).unwrap()["error"], Value::Null);
    };
    let request = |method: &str, ip: &str, port: u16| request_of("tcp", method, ip, port);
    let announced = control.announced().unwrap();
    assert_eq!(announced.len(), 1, "not the one on loopback");

    let fourth = (Ipv4Addr::new(224, 0, 0, 251), 5353).into();
    let resolver = Resolver::new("10.34.0.1:0", fourth, "_tcp");
    let is_of = |protocol: &str, records: &[(u16, Vec<u8>)]| {
        let of_type = |kind: u16| {
            let records = records.iter().filter(move |record| record.0 == kind);
            records.map(|(_, data)| data.clone()).collect::<Vec<_>>()
        };
        assert_eq!(of_type(A), [[10, 34, 0, 1]]);
        assert_eq!(of_type(PTR).len(), 1);
        let mut texts = Vec::new();
        for text in [format!("p={protocol}"), format!("nqn={DISCOVERY_NQN}")] {
            texts.push(text.len() as u8);
            texts.extend_from_slice(text.as_bytes());
        }
        assert_eq!(of_type(TXT), [texts]);
    };
    is_of("tcp", &resolver.ports_are(&[4420]));
    // The same address and port by RDMA.
    let of_roce = Resolver::new("10.34.0.1:0", fourth, "_udp");
    request_of("rdma", "nvmf_target_add_listener", "10.34.0.1", 4420);
    is_of("roce", &of_roce.ports_are(&[4420]));
    request_of("rdma", "nvmf_target_add_listener", "10.34.0.1", 4421);
    of_roce.ports_are(&[4420, 4421]);
    request_of("rdma", "nvmf_target_remove_listener", "10.34.0.1", 4420);
    of_roce.ports_are(&[4421]);
    is_of("tcp", &resolver.ports_are(&[4420]));

    request("nvmf_target_add_listener", "10.34.0.1", 4421);
    resolver.ports_are(&[4420, 4421]);
    request("nvmf_target_remove_listener", "10.34.0.1", 4420);
    resolver.ports_are(&[4421]);
    request("nvmf_target_add_listener", "fd34::1", 4422);
    // /sys shows the links of another namespace.
    let link = Command::new("ip")
        .args(["-o", "link", "show", "v0"])
        .output()
        .unwrap();
    let link = String::from_utf8(link.stdout).unwrap();
    let index = link.split_once(':').unwrap().0.parse().unwrap();
    let group = SocketAddrV6::new(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb), 5353, 0, index);
    let sixth = Resolver::new("[fd34::1]:0", group.into(), "_tcp");
    let records = sixth.ports_are(&[4422]);
    let address = records.iter().find(|(kind, _)| *kind == AAAA).unwrap();
    assert_eq!(address.1, "fd34::1".parse::<Ipv6Addr>().unwrap().octets());
    // The interface of an address that goes is that of another one, too.
    request("nvmf_target_add_listener", "10.34.0.2", 4423);
    resolver.ports_are(&[4421, 4423]);
    request("nvmf_target_remove_listener", "10.34.0.2", 4423);
    resolver.ports_are(&[4421]);
    of_roce.ports_are(&[4421]);
    // Without a listener of IPv6 no packets of mDNS are received by that.
    assert!(is_received("inet6"));
    request("nvmf_target_remove_listener", "fd34::1", 4422);
    resolver.ports_are(&[4421]);
    let deadline = Instant::now() + LONG;
    while is_received("inet6") {
        assert!(Instant::now() < deadline, "the interface is still used");
        std::thread::yield_now();
    }
    assert!(is_received("inet"));
    // The file is in force again; then it asks for mDNS no more.
    control.reload(config(described)).unwrap();
    resolver.ports_are(&[4420]);
    control
        .reload(config(&described.replace("true", "false")))
        .unwrap();
    assert_eq!(control.announced(), None);
    control.reload(config(described)).unwrap();
    resolver.ports_are(&[4420]);
    control.withdraw();
    // The thread closes its sockets when it has said that it ends.
    let deadline = Instant::now() + LONG;
    let _alone = loop {
        match UdpSocket::bind("0.0.0.0:5353") {
            Ok(socket) => break socket,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::yield_now();
    };
    control
        .reload(config(&described.replace("true", "false")))
        .unwrap();
    let error = control.reload(config(described)).unwrap_err().to_string();
    assert!(
        error.contains("cannot announce the target by mDNS: UDP port 5353: Address already in use"),
        "{error}"
    );
    handle.stop();
    thread.join().unwrap();
}

#[test]
fn mdns__announces_listeners_that_other_hosts_reach() {
    netns::run_inside(LINK);
}
