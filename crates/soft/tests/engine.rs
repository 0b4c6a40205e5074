//! Guarantees to callers, whatever the engine is doing: a caller that waits is woken, and memory ends outside of the engine's lock.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use common::End;
use rdmux_verbs::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Returns whether a descriptor becomes readable in good time.
fn becomes_readable(fd: impl AsFd) -> bool {
    let deadline = Timespec {
        tv_sec: 5,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&deadline)) == Ok(1)
}

fn is_readable(fd: impl AsFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&now)) == Ok(1)
}

/// Makes an end whose queue pair is connected to itself.
fn looped(address: [u8; 4]) -> End {
    let end = End::new(address);
    end.bring_up(&end);
    end
}

#[test]
fn post_recv__on_a_queue_pair_in_error_wakes_who_waits() {
    let end = looped([127, 0, 14, 1]);
    end.qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    end.cq.arm(Arm::Next);
    let sges = SgeList::EMPTY;
    end.qp
        .post_recv(RecvRequest {
            wr_id: 3,
            sges: sges.clone(),
        })
        .unwrap();
    assert!(becomes_readable(&end.cq), "nobody is woken");
    let wc = end.cq.poll().expect("a completion");
    assert_eq!((wc.wr_id, wc.status), (3, Status::Flushed));
    end.cq.arm(Arm::Next);
    assert!(!is_readable(&end.cq), "arming resets it");
    end.qp.post_recv(RecvRequest { wr_id: 4, sges }).unwrap();
    assert!(becomes_readable(&end.cq), "the next completion is told of too");
}

#[test]
fn accept__resets_the_descriptor_when_there_is_no_request() {
    let server = End::new([127, 0, 14, 9]);
    let client = &End::new([127, 0, 14, 10]);
    let listener = server.device.listen(7174).unwrap();
    let address = (server.device.address(), 7174).into();
    for _ in 0..2 {
        std::thread::scope(|scope| {
            let params = ConnectParams::default();
            let connect = scope.spawn(move || client.device.connect(&client.qp, address, &params, b""));
            assert!(becomes_readable(&listener));
            listener
                .accept(Duration::ZERO)
                .expect("a request")
                .reject(b"not now");
            assert!(connect.join().unwrap().is_err());
        });
        assert!(listener.accept(Duration::ZERO).is_none());
        assert!(!is_readable(&listener));
    }
}

fn send(wr_id: u64, bytes: &[u8]) -> SendRequest {
    SendRequest {
        wr_id,
        operation: Operation::Send { imm: None },
        sges: SgeList::inline(bytes),
        flags: SendFlags::SIGNALED,
        to: Target::Connected,
    }
}

#[test]
fn post_send_list__says_which_request_was_not_taken() {
    let end = looped([127, 0, 14, 8]);
    let too_long = vec![0; INLINE_BYTES_MAX + 1];
    // The iterator that makes the requests may use the device.
    let lists = [&too_long[..1], &too_long[..2], &too_long, &too_long[..3]];
    let requests = lists.into_iter().map(|bytes| {
        assert!(end.qp.query().is_some());
        send(bytes.len() as u64, bytes)
    });
    let source = PostError::TooLong;
    assert_eq!(
        end.qp.post_send_list(requests),
        Err(PostListError { index: 2, source })
    );
    assert_eq!(end.qp.query().unwrap().send_outstanding, 2);
}

#[test]
fn async_event_fd__tells_which_completion_queue_overran() {
    let end = looped([127, 0, 14, 7]);
    let small = end.device.create_cq(1).unwrap();
    let options = QpOptions {
        recv_cq: small.clone(),
        ..QpOptions::new(&end.cq)
    };
    let qp = end.qp.pd().create_qp(&options).unwrap();
    let init = QpAttributes {
        access: Some(Access::empty()),
        ..Default::default()
    };
    qp.modify(QpState::Init, &init).unwrap();
    for wr_id in 0..2 {
        let sges = SgeList::EMPTY;
        qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    assert_eq!(end.device.poll_async_event(), None);
    qp.modify(QpState::Error, &QpAttributes::default()).unwrap();
    assert!(becomes_readable(end.device.async_event_fd()));
    assert_eq!(
        end.device.poll_async_event(),
        Some(AsyncEvent::CqError(small.cqn()))
    );
    assert_eq!(end.device.poll_async_event(), None);
    assert!(!is_readable(end.device.async_event_fd()));
}

/// Checks that users of this crate alone can name every type in its public signatures.
#[test]
fn exports__are_all_that_signatures_name() {
    fn attributes(error: ModifyError) -> Option<AttrMask> {
        match error {
            ModifyError::Missing { missing, .. } => Some(missing),
            _ => None,
        }
    }
    fn peer(endpoint: Endpoint) -> (Transport, PathMtu, Option<Extensions>) {
        (endpoint.transport, endpoint.path_mtu, endpoint.extensions)
    }
    let _ = (attributes, peer);
    assert_eq!((SGE_MAX, INLINE_BYTES_MAX, Cqn(1).0), (32, 1024, 1));
}

#[test]
fn open__takes_only_the_address_of_one_host() {
    for address in [
        "0.0.0.0",
        "::",
        "224.1.2.3",
        "ff02::1",
        "255.255.255.255",
        "127.255.255.255",
        "::ffff:0.0.0.0",
    ] {
        let address: IpAddr = address.parse().unwrap();
        let opened = common::open(address).map(|_| ());
        assert!(
            matches!(opened, Err(OpenError::NotOneHost(_))),
            "{address}: {opened:?}"
        );
    }
    let mapped = common::open("::ffff:127.0.14.5".parse().unwrap()).unwrap();
    assert_eq!(mapped.address(), IpAddr::from([127, 0, 14, 5]));
}
