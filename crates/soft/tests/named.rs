//! Long messages within a host, whose payload the receiver copies out of the sender's memory.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::IpAddr;
use std::thread;
use std::time::Instant;

use common::{End, LONG, connect_ends, open, private, shareable};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::*;

/// Bytes of a message: several requests in the ring, each of which names its part.
const MESSAGE_BYTES: usize = 1 << 20;

/// Makes two ends on devices of their own at an address, and connects them.
fn pair(address: [u8; 4], memory: fn(usize) -> AnonymousMemory) -> (End, End, [Connection; 2]) {
    let address = IpAddr::from(address);
    let end = || End::on(&open(address).unwrap(), memory(MESSAGE_BYTES));
    let (client, server) = (end(), end());
    let held = connect_ends(&client, &server);
    (client, server, held)
}

/// Fills the memory with a message that differs from the others in each of its words.
fn fill(end: &End, number: u64) {
    let words = (0..MESSAGE_BYTES as u64 / 8).flat_map(|i| (number << 32 | i).to_ne_bytes());
    end.memory.write(0, &words.collect::<Vec<u8>>()).unwrap();
}

/// Returns the number of the message in the memory.
fn number(end: &End) -> u64 {
    let mut bytes = vec![0; MESSAGE_BYTES];
    end.memory.read(0, &mut bytes).unwrap();
    let number = u64::from_ne_bytes(bytes[..8].try_into().unwrap()) >> 32;
    for (i, word) in bytes.chunks_exact(8).enumerate() {
        let word = u64::from_ne_bytes(word.try_into().unwrap());
        assert_eq!(word, number << 32 | i as u64, "word {i} of message {number}");
    }
    number
}

impl End {
    fn post_recv(&self) {
        let sges = self.mr.sge(0, MESSAGE_BYTES as u32).into();
        self.qp.post_recv(RecvRequest { wr_id: 0, sges }).unwrap();
    }

    fn post_message(&self) {
        let sges = self.mr.sge(0, MESSAGE_BYTES as u32);
        self.post(Operation::Send { imm: None }, sges);
    }

    /// Sends the message in the memory, and returns the number of the one that the peer receives.
    fn sends_to(&self, server: &End) -> u64 {
        server.post_recv();
        self.post_message();
        let received = server.recv_cq.wait(LONG).unwrap().expect("a message");
        assert_eq!(
            (received.status, received.byte_len),
            (Status::Success, MESSAGE_BYTES as u32)
        );
        assert_eq!(self.wait_success().opcode, WcOpcode::Send);
        number(server)
    }

    fn copied_once(&self) -> u64 {
        self.device.counters().rcvd_pkts_named
    }
}

/// Sends messages until the peer copies one out of this memory. Returns the number of the next message.
fn warm(client: &End, server: &End) -> u64 {
    let (before, deadline) = (server.copied_once(), Instant::now() + LONG);
    let mut next = 0;
    while server.copied_once() == before {
        assert!(Instant::now() < deadline, "the memory is not lent");
        fill(client, next);
        assert_eq!(client.sends_to(server), next);
        next += 1;
    }
    next
}

#[test]
fn send__copies_a_long_message_once() {
    for (host, memory) in [(1, shareable as fn(usize) -> _), (2, private)] {
        let (client, server, _held) = pair([127, 0, 83, host], memory);
        let next = warm(&client, &server);
        let before = server.copied_once();
        for message in next..next + 40 {
            fill(&client, message);
            assert_eq!(client.sends_to(&server), message);
        }
        let packets = 40 * MESSAGE_BYTES as u64 / 4096;
        assert!(
            server.copied_once() - before >= packets,
            "all packets of path MTU 4096 or less"
        );
    }
}

/// The region moves to other memory between messages: what is lent is the memory that a message is in.
#[test]
fn rereg__of_a_lent_region() {
    let (mut client, server, _held) = pair([127, 0, 83, 4], shareable);
    let mut next = warm(&client, &server);
    for _ in 0..20 {
        let memory = std::sync::Arc::new(shareable(MESSAGE_BYTES));
        let mr = client
            .pd
            .reg_mr_all(memory.clone(), memory.address(), common::RIGHTS);
        (client.memory, client.mr) = (memory, mr.unwrap());
        for _ in 0..3 {
            fill(&client, next);
            assert_eq!(client.sends_to(&server), next);
            next += 1;
        }
    }
}

/// Ends a message under way by `end`, after some time, and uses its memory for something else at once. The receiver has got all of it, or
/// nothing.
fn receives_all_or_nothing(host: u8, end: impl Fn(&mut End)) {
    let mut arrived = 0;
    for round in 0..40 {
        let (mut client, server, _held) = pair([127, 0, 83, host], shareable);
        let next = warm(&client, &server);
        fill(&client, next);
        thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                server.post_recv();
                let received = server.recv_cq.wait(LONG).unwrap().expect("an end");
                (received.status == Status::Success).then(|| number(&server))
            });
            client.post_message();
            for _ in 0..round * 400 {
                std::hint::spin_loop();
            }
            end(&mut client);
            client.memory.write(0, &vec![0xee; MESSAGE_BYTES]).unwrap();
            client.wait();
            // Ends the receiver's wait, if nothing has arrived.
            let failed = server.qp.modify(QpState::Error, &QpAttributes::default());
            failed.unwrap();
            let received = receiver.join().unwrap();
            assert!(received.is_none_or(|number| number == next), "{received:?}");
            arrived += u32::from(received.is_some());
        });
    }
    println!("{arrived} of 40 messages arrived");
}

#[test]
fn dereg__of_memory_that_a_peer_copies() {
    receives_all_or_nothing(5, |client| {
        let memory = client.memory.clone();
        let other = client
            .pd
            .reg_mr_all(memory.clone(), memory.address(), common::RIGHTS);
        drop(std::mem::replace(&mut client.mr, other.unwrap()));
    });
}

#[test]
fn fail__of_a_queue_pair_whose_message_a_peer_copies() {
    receives_all_or_nothing(6, |client| {
        let failed = client.qp.modify(QpState::Error, &QpAttributes::default());
        failed.unwrap();
    });
}
