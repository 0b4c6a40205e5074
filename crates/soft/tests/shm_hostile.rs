//! A process of the same user that claims to be another one. `src/shm/link/tests.rs` checks its other attempts.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::time::Instant;

use common::{LONG, connect};
use rdmux_verbs::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags as MsgFlags,
    SocketAddrUnix, SocketFlags, SocketType, sendmsg, socket_with, socketpair,
};

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
/// Protocol version of shared memory between processes, which this test speaks itself.
const VERSION: u16 = rdmux_soft::LOCAL_PROTOCOLS[1].1;
/// More than a link's segment has.
const SEGMENT_BYTES: u64 = 1 << 20;

const VICTIM: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 151);
const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 152);
const OWN: Ipv4Addr = Ipv4Addr::new(127, 0, 1, 153);
const OWN_SLOT: u8 = 3;

fn name(address: Ipv4Addr, slot: u8) -> SocketAddrUnix {
    SocketAddrUnix::new_abstract_name(format!("rdmux-4791-{address}-slot-{slot}").as_bytes()).unwrap()
}

fn unix_socket() -> OwnedFd {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap()
}

/// Asks the process of a slot for a link, in the name of `somebody`. Returns the socket, and the first byte of the answer.
fn ask(victim: (Ipv4Addr, u8), somebody: (Ipv4Addr, u8)) -> (OwnedFd, Option<u8>) {
    let socket = unix_socket();
    rustix::net::connect(&socket, &name(victim.0, victim.1)).unwrap();
    let segment = memfd_create("segment", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&segment, SEGMENT_BYTES).unwrap();
    fcntl_add_seals(&segment, SealFlags::SHRINK).unwrap();
    let (_doorbell, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .unwrap();
    let mut hello = vec![HELLO];
    hello.extend(VERSION.to_ne_bytes());
    hello.extend([somebody.1, 4]);
    hello.extend(somebody.0.to_ipv6_mapped().octets());
    let files = [segment.as_fd(), theirs.as_fd()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(
        &socket,
        &[std::io::IoSlice::new(&hello)],
        &mut control,
        MsgFlags::NOSIGNAL,
    )
    .unwrap();
    let mut answer = [0; 64];
    let first = match rustix::net::recv(&socket, &mut answer, RecvFlags::empty()) {
        Ok((_, 0)) | Err(Errno::CONNRESET) => None,
        Ok(_) => Some(answer[0]),
        Err(error) => panic!("{error}"),
    };
    (socket, first)
}

/// Body of the other process.
#[test]
fn impostor() {
    let Ok(slots) = std::env::var("RDMUX_HOSTILE_SLOTS") else {
        return;
    };
    let slots: Vec<u8> = slots.split(' ').map(|slot| slot.parse().unwrap()).collect();
    let listener = unix_socket();
    rustix::net::bind(&listener, &name(OWN, OWN_SLOT)).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    let victim = (VICTIM, slots[0]);
    let (_as_itself, answer) = ask(victim, (OWN, OWN_SLOT));
    assert_eq!(answer, Some(WELCOME), "this test speaks as links do");
    let (_as_other, answer) = ask(victim, (OTHER, slots[1]));
    assert_ne!(answer, Some(WELCOME));
    // It dies under the other name.
    std::process::exit(0);
}

#[test]
fn link__of_somebody_who_says_it_is_somebody_else() {
    let devices = [VICTIM, OTHER].map(|address| common::open(address.into()).unwrap());
    let cqs = [0, 1].map(|i: usize| devices[i].create_cq(16).unwrap());
    let qps = [0, 1].map(|i: usize| {
        let pd = devices[i].alloc_pd().unwrap();
        pd.create_qp(&QpOptions::new(&cqs[i])).unwrap()
    });
    let connections = connect(&qps[0], &qps[1], &ConnectParams::default());
    let is_linked = || qps.iter().all(|qp| qp.carrier() == Some(Carrier::SharedMemory));
    let deadline = Instant::now() + LONG;
    while !is_linked() {
        assert!(Instant::now() < deadline, "there is no link");
        std::thread::yield_now();
    }
    let [victim, other] = [0, 1].map(|i: usize| qps[i].qpn().value() >> 16);
    let status = Command::new("/proc/self/exe")
        .args(["--exact", "impostor", "--nocapture", "--test-threads=1"])
        .env("RDMUX_HOSTILE_SLOTS", format!("{victim} {other}"))
        .status()
        .unwrap();
    assert!(status.success());
    for _ in 0..100 {
        let operation = Operation::Send { imm: None };
        let receive = RecvRequest {
            wr_id: 1,
            sges: SgeList::EMPTY,
        };
        qps[1].post_recv(receive).unwrap();
        let send = SendRequest {
            wr_id: 2,
            operation,
            sges: SgeList::EMPTY,
            flags: SendFlags::SIGNALED,
            to: Target::Connected,
        };
        qps[0].post_send(send).unwrap();
        for cq in &cqs {
            let wc = cq.wait(LONG).unwrap().expect("a completion");
            assert_eq!(wc.status, Status::Success);
        }
    }
    assert!(is_linked() && connections.iter().all(|connection| !connection.is_ended()));
}
