//! Constructors of requests, remote buffers, polling into a slice, the list of addresses, and limits.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::Instant;

use common::{END_BYTES, End, LONG, RIGHTS, connected};
use rdmux_memory::AnonymousMemory;
use rdmux_verbs::*;

const BYTES: u64 = END_BYTES as u64;

impl End {
    /// Posts a request and returns its completion.
    fn does_request(&self, request: SendRequest) -> WorkCompletion {
        self.qp.post_send(request.wr_id(7).signaled()).unwrap();
        let wc = self.wait();
        assert_eq!(wc.wr_id, 7);
        wc
    }
}

#[test]
fn send_request__each_constructor_on_a_peers_memory() {
    let (client, server, _held) = connected([127, 0, 34, 1]);
    let sent = server.mr.remote(64..128).unwrap().to_bytes();
    let remote = RemoteBuffer::from_bytes(&sent);
    let local = client.mr.slice(8..16).unwrap();
    client.memory.write(8, &5u64.to_ne_bytes()).unwrap();

    assert_eq!(
        client.does_request(SendRequest::write(local, remote)).status,
        Status::Success
    );
    assert_eq!(server.word(64), 5);
    let second = remote.slice(8..).unwrap();
    let inline = SgeList::inline(&6u64.to_ne_bytes());
    assert_eq!(
        client.does_request(SendRequest::write(inline, second)).status,
        Status::Success
    );
    assert_eq!(server.word(72), 6);

    assert_eq!(
        client
            .does_request(SendRequest::fetch_add(local, remote, 10))
            .status,
        Status::Success
    );
    assert_eq!((client.word(8), server.word(64)), (5, 15));
    let swap = SendRequest::compare_swap(local, remote, 15, 20);
    assert_eq!(client.does_request(swap).status, Status::Success);
    assert_eq!((client.word(8), server.word(64)), (15, 20));
    assert_eq!(
        client
            .does_request(SendRequest::atomic_write(local, second))
            .status,
        Status::Success
    );
    assert_eq!(server.word(72), 15);
    assert_eq!(
        client.does_request(SendRequest::read(local, remote)).status,
        Status::Success
    );
    assert_eq!(client.word(8), 20);
    let flush = client.does_request(SendRequest::flush(remote, Placement::GLOBAL));
    assert_eq!((flush.status, flush.opcode), (Status::Success, WcOpcode::Flush));

    let receive = RecvRequest::new(3, server.mr.slice(1024..2048).unwrap());
    server.qp.post_recv(receive).unwrap();
    assert_eq!(
        client.does_request(SendRequest::send(local).imm(9)).status,
        Status::Success
    );
    let wc = server.wait();
    assert_eq!(
        (wc.wr_id, wc.imm, wc.byte_len, server.word(1024)),
        (3, Some(9), 8, 20)
    );
}

/// Checks that the peer, not the requester, guards its memory: a forged buffer ends in an error completion.
#[test]
fn send_request__of_a_forged_buffer_is_an_error() {
    for (address, forged) in [([127, 0, 34, 2], u64::MAX - 3), ([127, 0, 34, 3], 0)] {
        let (client, server, _held) = connected(address);
        let whole = server.mr.remote(..).unwrap();
        let remote = RemoteBuffer {
            address: forged,
            ..whole
        };
        let local = client.mr.slice(..).unwrap();
        let status = client.does_request(SendRequest::read(local, remote)).status;
        assert_eq!(status, Status::RemoteAccess, "{remote:?}");
    }
}

#[test]
fn slice__of_a_region() {
    let end = End::new([127, 0, 34, 4]);
    let (base, lkey) = (end.mr.iova(), end.mr.lkey());
    assert_eq!(end.mr.slice(10..30), Some(Sge::new(base + 10, 20, lkey)));
    assert_eq!(end.mr.slice(..), Some(end.mr.sge(0, BYTES as u32)));
    assert_eq!(end.mr.slice(BYTES..), Some(end.mr.sge(BYTES, 0)));
    assert_eq!(end.mr.slice(1..=BYTES), None);
    assert_eq!(end.mr.remote(BYTES - 1..BYTES + 1), None);
    let remote = end.mr.remote(BYTES - 1..).unwrap();
    assert_eq!(
        (remote.address, remote.length, remote.rkey),
        (base + BYTES - 1, 1, end.mr.rkey())
    );
    let empty = end.pd.alloc_mr(BYTES).unwrap();
    assert_eq!((empty.slice(0..1), empty.remote(0..1)), (None, None));
}

/// A scatter/gather element holds less than 4 GiB; a remote buffer has no such limit.
#[test]
fn slice__of_more_than_an_element_holds() {
    let end = End::new([127, 0, 34, 5]);
    let bytes = 1u64 << 32;
    // No page is touched.
    let memory = Arc::new(AnonymousMemory::new(bytes as usize).unwrap());
    let mr = end.pd.reg_mr_all(memory, 0, Access::LOCAL_WRITE).unwrap();
    assert_eq!(mr.slice(..), None);
    assert_eq!(mr.slice(1..), Some(mr.sge(1, u32::MAX)));
    assert_eq!(mr.remote(..).map(|remote| remote.length), Some(bytes));
}

#[test]
fn remote__of_a_zero_based_region() {
    let (client, server, _held) = connected([127, 0, 34, 6]);
    let memory = server.memory.clone();
    let access = RIGHTS | Access::ZERO_BASED;
    let mut mr = server
        .pd
        .reg_mr_all(memory.clone(), memory.address(), access)
        .unwrap();
    let remote = mr.remote(16..24).unwrap();
    assert_eq!(remote.address, 16);
    let write = SendRequest::write(SgeList::inline(&[7; 8]), remote);
    assert_eq!(client.does_request(write).status, Status::Success);
    assert_eq!(server.word(16), u64::from_ne_bytes([7; 8]));
    // Its own requests count from zero as well.
    let read = SendRequest::read(mr.slice(0..8).unwrap(), client.mr.remote(8..16).unwrap());
    client.memory.write(8, &[3; 8]).unwrap();
    assert_eq!(server.does_request(read).status, Status::Success);
    assert_eq!(server.word(0), u64::from_ne_bytes([3; 8]));
    mr.rereg(memory.clone(), 0, BYTES, memory.address(), RIGHTS)
        .unwrap();
    assert_eq!(mr.remote(16..24).unwrap().address, memory.address() + 16);
}

#[test]
fn poll_into__fills_no_more_than_the_slice() {
    let (client, server, _held) = connected([127, 0, 34, 7]);
    let mut taken = [WorkCompletion::default(); 3];
    assert_eq!(client.cq.poll_into(&mut taken), 0);
    for wr_id in 0..5 {
        server
            .qp
            .post_recv(RecvRequest::new(wr_id, SgeList::EMPTY))
            .unwrap();
        let request = SendRequest::send(SgeList::EMPTY).wr_id(wr_id).signaled();
        client.qp.post_send(request).unwrap();
    }
    let begin = Instant::now();
    let mut ids = Vec::new();
    while ids.len() < 5 {
        assert!(begin.elapsed() < LONG, "{ids:?}");
        let n = client.cq.poll_into(&mut taken);
        ids.extend(taken[..n].iter().map(|wc| (wc.wr_id, wc.status)));
    }
    let expected: Vec<_> = (0..5).map(|wr_id| (wr_id, Status::Success)).collect();
    assert_eq!(ids, expected);
    assert_eq!(client.cq.poll_into(&mut []), 0);
}

#[test]
fn addresses__are_local() {
    rdmux_soft::register();
    let addresses = Device::addresses().unwrap();
    assert!(addresses.contains(&[127, 0, 0, 1].into()), "{addresses:?}");
    for address in addresses {
        UdpSocket::bind((address, 0)).unwrap_or_else(|error| panic!("{address}: {error}"));
    }
}

/// Checks each limit by what is refused beyond it.
#[test]
fn limits__are_where_requests_are_refused() {
    let end = End::new([127, 0, 34, 8]);
    end.qp.init().unwrap();
    let limits = end.pd.device().limits();
    let sge = end.mr.slice(0..1).unwrap();
    let receive = |elements: u32| RecvRequest::new(0, &vec![sge; elements as usize][..]);
    end.qp.post_recv(receive(limits.sges)).unwrap();
    assert_eq!(
        end.qp.post_recv(receive(limits.sges + 1)),
        Err(PostError::TooManySges)
    );
    let inline = |bytes: u32| SendRequest::send(SgeList::inline(&vec![0; bytes as usize])).check();
    assert_eq!(inline(limits.inline_bytes), Ok(limits.inline_bytes));
    assert_eq!(inline(limits.inline_bytes + 1), Err(PostError::TooLong));
    let message = |bytes| SendRequest::send(Sge::new(0, bytes, end.mr.lkey())).check();
    assert_eq!(message(limits.message_bytes), Ok(limits.message_bytes));
    assert_eq!(message(limits.message_bytes + 1), Err(PostError::TooLong));
    assert_eq!((limits.work_requests, limits.completions), (None, None));

    let queues: Vec<_> = (0..limits.shared_receive_queues)
        .map(|_| end.pd.create_srq(1).unwrap())
        .collect();
    assert!(matches!(end.pd.create_srq(1), Err(CreateError::NoRoom)));
    drop(queues);
    let small = QpOptions {
        max_send_wr: 1,
        max_recv_wr: 1,
        ..QpOptions::new(&end.cq)
    };
    let pairs: Vec<_> = (1..limits.queue_pairs)
        .map(|_| end.pd.create_qp(&small).unwrap())
        .collect();
    assert!(matches!(end.pd.create_qp(&small), Err(CreateError::NoRoom)));
    drop(pairs);
}
