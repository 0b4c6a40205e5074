//! A hundred processes of one user on one address, or many on several addresses; each exchanges messages with three others. Some are killed
//! at random times: the rest goes on.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io::stdin;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use rdmux_memory::AnonymousMemory;
use rdmux_verbs::*;

use common::{ChildProcess, LONG};

const FIRST_PORT: u16 = 20_000;
const BYTES: usize = 64;

/// The killed ones die within this time.
const KILL_TIME: Duration = Duration::from_secs(2);

/// In the environment of [`child`]: the address, the count of processes there, and its index.
const CHILD: &str = "RDMUX_MANY";

/// The processes of `count` that a process connects to.
fn peers_of(index: usize, count: usize) -> [usize; 3] {
    [1, 7, 13].map(|step| (index + step) % count)
}

fn port_of(index: usize) -> u16 {
    FIRST_PORT + index as u16
}

/// A queue pair with room for a message each way.
struct MessageEnd {
    qp: QueuePair,
    mr: MemoryRegion,
    memory: Arc<AnonymousMemory>,
}

impl MessageEnd {
    fn new(pd: &ProtectionDomain, cq: &CompletionQueue) -> MessageEnd {
        let memory = Arc::new(AnonymousMemory::new(2 * BYTES).unwrap());
        let mr = pd.reg_mr_all(memory.clone(), 0, Access::LOCAL_WRITE).unwrap();
        let qp = pd.create_qp(&QpOptions::new(cq)).unwrap();
        qp.init().unwrap();
        let end = MessageEnd { qp, mr, memory };
        end.receive().unwrap();
        end
    }

    fn receive(&self) -> Result<(), PostError> {
        let sges = self.mr.sge(0, BYTES as u32).into();
        self.qp.post_recv(RecvRequest { wr_id: 0, sges })
    }

    fn received(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        self.memory.read(0, &mut bytes).unwrap();
        bytes
    }

    fn send(&self, bytes: &[u8; BYTES]) -> Result<(), PostError> {
        self.memory.write(BYTES as u64, bytes).unwrap();
        self.qp.post_send(SendRequest {
            wr_id: 0,
            operation: Operation::Send { imm: None },
            sges: self.mr.sge(BYTES as u64, BYTES as u32).into(),
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        })
    }
}

/// Accepts every connection and sends each message back.
fn serve(device: &Device, pd: &ProtectionDomain, port: u16) {
    let cq = device.create_cq(1024).unwrap();
    let listener = device.listen(port).unwrap();
    println!("@ ready");
    let ends: Arc<Mutex<HashMap<Qpn, MessageEnd>>> = Arc::default();
    let (served, completed) = (ends.clone(), cq.clone());
    thread::spawn(move || {
        while let Ok(wc) = completed.wait(Duration::MAX) {
            let Some(wc) = wc.filter(|wc| (wc.status, wc.opcode) == (Status::Success, WcOpcode::Recv)) else {
                continue;
            };
            let ends = served.lock().unwrap();
            let end = &ends[&wc.qpn];
            let bytes = end.received();
            // A peer that has died meanwhile gets no answer.
            let _ = end.receive().and_then(|()| end.send(&bytes));
        }
    });
    let pd = pd.clone();
    thread::spawn(move || {
        let mut connections = Vec::new();
        while let Some(request) = listener.accept(Duration::MAX) {
            let end = MessageEnd::new(&pd, &cq);
            let qpn = end.qp.qpn();
            let mut ends = ends.lock().unwrap();
            let accepted = request.accept(&end.qp, &ConnectParams::default(), b"");
            ends.insert(qpn, end);
            // One whose peer has died meanwhile fails.
            connections.extend(accepted.ok());
        }
    });
}

/// Exchanges messages with a peer; false when the connection has ended.
fn exchange(end: &MessageEnd, cq: &CompletionQueue, lost: &mut BTreeSet<Qpn>, bytes: [u8; BYTES]) -> bool {
    let qpn = end.qp.qpn();
    if lost.contains(&qpn) || end.send(&bytes).is_err() {
        return false;
    }
    let mut left = 2;
    while left > 0 {
        let wc = cq.wait(LONG).unwrap().expect("a completion");
        if wc.status != Status::Success {
            lost.insert(wc.qpn);
        }
        if lost.contains(&qpn) {
            return false;
        }
        left -= u32::from(wc.qpn == qpn);
    }
    assert_eq!(end.received(), bytes);
    end.receive().is_ok()
}

/// A process: does what it reads from standard input until that ends.
#[test]
fn child() {
    let Ok(who) = std::env::var(CHILD) else { return };
    let [address, count, index] = who.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let address: IpAddr = address.parse().unwrap();
    let [count, index] = [count, index].map(|number| number.parse::<usize>().unwrap());
    let device = common::open(address).unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(256).unwrap());
    serve(&device, &pd, port_of(index));
    let mut ends: BTreeMap<usize, (MessageEnd, Connection)> = BTreeMap::new();
    let mut lost = BTreeSet::new();
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        stdin()
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| tell.send(line))
    });
    let mut exchange_all = |ends: &BTreeMap<usize, (MessageEnd, Connection)>, round: usize| {
        for (peer, (end, _)) in ends {
            let mut bytes = [round as u8; BYTES];
            (bytes[0], bytes[1]) = (index as u8, *peer as u8);
            if !exchange(end, &cq, &mut lost, bytes) {
                lost.insert(end.qp.qpn());
            }
        }
        let ended = ends.iter().filter(|(_, (end, _))| lost.contains(&end.qp.qpn()));
        let ended: Vec<String> = ended.map(|(peer, _)| peer.to_string()).collect();
        ended.join(" ")
    };
    while let Ok(line) = told.recv() {
        match line.as_str() {
            "connect" => {
                for peer in peers_of(index, count) {
                    let end = MessageEnd::new(&pd, &cq);
                    let to = SocketAddr::new(address, port_of(peer));
                    let connection = device.connect(&end.qp, to, &ConnectParams::default(), b"");
                    ends.insert(peer, (end, connection.unwrap()));
                }
                println!("@ connected");
            }
            "exchange" => {
                exchange_all(&ends, 0);
                println!("@ runs");
                // Until it is told to stop.
                for round in 1.. {
                    let lost = exchange_all(&ends, round);
                    if told.try_recv().is_ok() {
                        println!("@ lost {lost}");
                        break;
                    }
                }
            }
            other => panic!("{other}"),
        }
    }
    std::process::exit(0);
}

/// A process of [`child`], with its index.
struct Process {
    index: usize,
    child: ChildProcess,
}

impl Process {
    fn start(address: IpAddr, count: usize, index: usize) -> Process {
        let child = ChildProcess::start(|command| {
            command.env(CHILD, format!("{address} {count} {index}"));
            // About half of the connections use shared memory, the others UDP.
            if index % 4 == 3 {
                command.env("RDMUX_SHM", "off");
            }
        });
        Process { index, child }
    }

    /// The peers that it has lost.
    fn lost(&self) -> BTreeSet<usize> {
        let event = self.child.next();
        let peers = event.strip_prefix("lost ").unwrap_or_else(|| panic!("{event}"));
        peers
            .split_whitespace()
            .map(|peer| peer.parse().unwrap())
            .collect()
    }
}

/// The processes of an address.
struct ProcessGroup {
    address: IpAddr,
    /// Their count, killed ones included.
    count: usize,
    processes: Vec<Process>,
    killed: BTreeSet<usize>,
}

impl ProcessGroup {
    /// Starts processes, which then listen.
    fn start(address: IpAddr, count: usize, indexes: impl Iterator<Item = usize>) -> ProcessGroup {
        let start = |index| Process::start(address, count, index);
        let processes: Vec<Process> = indexes.map(start).collect();
        ProcessGroup {
            address,
            count,
            processes,
            killed: BTreeSet::new(),
        }
    }

    /// Connects each process once all of them listen.
    fn connect(&mut self) {
        for process in &self.processes {
            process.child.expect("ready");
        }
        for process in &mut self.processes {
            process.child.tell("connect");
        }
        for process in &self.processes {
            process.child.expect("connected");
        }
    }

    /// Lets the processes exchange messages; returns once each has done so.
    fn run(&mut self) {
        for process in &mut self.processes {
            process.child.tell("exchange");
        }
        for process in &self.processes {
            process.child.expect("runs");
        }
    }

    /// Stops that; returns the peers that each process has lost.
    fn stop(&mut self) -> Vec<(usize, BTreeSet<usize>)> {
        for process in &mut self.processes {
            process.child.tell("stop");
        }
        let lost = self.processes.iter().map(|p| (p.index, p.lost()));
        lost.collect()
    }

    fn kill(&mut self, i: usize) {
        self.killed.insert(self.processes.swap_remove(i).index);
    }

    /// Checks that each process goes on with all peers that live, and with no other.
    fn check(&mut self) {
        self.run();
        for (index, lost) in self.stop() {
            let mut dead = BTreeSet::from(peers_of(index, self.count));
            dead.retain(|peer| self.killed.contains(peer));
            assert_eq!(lost, dead, "process {index}");
        }
    }
}

/// Random numbers.
struct Dice(u64);

impl Dice {
    fn new() -> Dice {
        let seed = RandomState::new().hash_one(0);
        println!("seed {seed}");
        Dice(seed)
    }

    fn below(&mut self, bound: usize) -> usize {
        // Knuth's MMIX generator.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// Kills `kills` of the processes on each address, at random times, while all exchange messages.
fn kill_some(addresses: &[IpAddr], count: usize, kills: usize) {
    let mut dice = Dice::new();
    let start = |address: &IpAddr| ProcessGroup::start(*address, count, 0..count);
    let mut groups: Vec<ProcessGroup> = addresses.iter().map(start).collect();
    groups.iter_mut().for_each(ProcessGroup::connect);
    groups.iter_mut().for_each(ProcessGroup::check);
    groups.iter_mut().for_each(ProcessGroup::run);
    let mut left = kills * groups.len();
    let pause_max = (KILL_TIME / left as u32).as_micros() as usize;
    while left > 0 {
        let group = dice.below(groups.len());
        let group = &mut groups[group];
        if group.killed.len() < kills {
            group.kill(dice.below(group.processes.len()));
            left -= 1;
            // Kills at random moments are what this tests; nothing below depends on the length of the pause.
            thread::sleep(Duration::from_micros(dice.below(2 * pause_max) as u64));
        }
    }
    for group in &mut groups {
        for (index, lost) in group.stop() {
            assert!(lost.is_subset(&group.killed), "process {index}: {lost:?}");
        }
    }
    groups.iter_mut().for_each(ProcessGroup::check);
    // Others take the ports of the killed ones.
    let start =
        |group: &ProcessGroup| ProcessGroup::start(group.address, count, group.killed.iter().copied());
    let mut newcomers: Vec<ProcessGroup> = groups.iter().map(start).collect();
    newcomers.iter_mut().for_each(ProcessGroup::connect);
    newcomers.iter_mut().for_each(ProcessGroup::check);
}

/// The tests have many processes each, so one runs at a time.
static ONE_AT_A_TIME: sync::Mutex<()> = sync::Mutex::new(());

#[test]
fn kill__of_some_of_a_hundred_on_one_address() {
    let _one = ONE_AT_A_TIME.lock();
    kill_some(&[[127, 0, 1, 171].into()], 100, 25);
}

#[test]
fn kill__of_some_on_each_of_several_addresses() {
    let _one = ONE_AT_A_TIME.lock();
    let addresses: [IpAddr; 6] = [1, 2, 3, 4, 5, 6].map(|host| [127, 0, 2, host].into());
    kill_some(&addresses, 20, 5);
}
