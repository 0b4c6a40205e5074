//! Asynchronous events that no other test here waits for.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;
#[path = "../../netns.rs"]
mod netns;
#[path = "../../skip.rs"]
mod skip;

use std::net::IpAddr;
use std::process::Command;

use common::{End, LONG, connect_ends, private};
use rdmux_verbs::*;

/// Makes an end with a queue of its own for the completions of receives, which has room for `recv_depth`.
fn end(address: impl Into<IpAddr>, qp_type: QpType, recv_depth: u32) -> End {
    let device = common::open(address.into()).unwrap();
    End::with(&device, private(4096), |_, options| QpOptions {
        qp_type,
        recv_cq: device.create_cq(recv_depth).unwrap(),
        ..options
    })
}

impl End {
    fn send(&self, operation: Operation, to: Target) -> WorkCompletion {
        let sges = match operation {
            Operation::FetchAdd { .. } => self.mr.sge(0, 8).into(),
            _ => SgeList::EMPTY,
        };
        self.try_post(operation, sges, to).unwrap();
        self.wait()
    }

    /// Returns the next event, except that data came before the last message of the connection, which may happen or not.
    fn event(&self) -> Option<AsyncEvent> {
        let events = std::iter::from_fn(|| self.device.wait_async_event(LONG));
        events
            .into_iter()
            .find(|event| !matches!(event, AsyncEvent::CommunicationEstablished(_)))
    }
}

fn connected(address: [u8; 4], recv_depth: u32) -> (End, End, [Connection; 2]) {
    let [client, server] = [16, recv_depth].map(|depth| end(address, QpType::Rc, depth));
    let connections = connect_ends(&client, &server);
    (client, server, connections)
}

#[test]
fn event__qp_request_error() {
    let (client, server, _held) = connected([127, 0, 33, 1], 16);
    let (va, rkey) = (server.mr.iova() + 4, server.mr.rkey());
    let misaligned = Operation::FetchAdd { va, rkey, add: 1 };
    let wc = client.send(misaligned, Target::Connected);
    assert_eq!(wc.status, Status::RemoteInvalidRequest);
    let qpn = server.qp.qpn();
    assert_eq!(server.event(), Some(AsyncEvent::QpRequestError(qpn)));
    assert_eq!(server.qp.error(), Some(Status::RemoteInvalidRequest));
    // The requester learns it from the completion alone.
    assert_eq!(client.device.poll_async_event(), None);
}

#[test]
fn event__cq_error_and_qp_fatal() {
    let (client, server, _held) = connected([127, 0, 33, 2], 1);
    for wr_id in 0..3 {
        let sges = SgeList::EMPTY;
        server.qp.post_recv(RecvRequest { wr_id, sges }).unwrap();
    }
    // Nobody polls, and there is room for one completion.
    for _ in 0..2 {
        client.send(Operation::Send { imm: None }, Target::Connected);
    }
    assert!(matches!(server.event(), Some(AsyncEvent::CqError(_))));
    assert_eq!(server.event(), Some(AsyncEvent::QpFatal(server.qp.qpn())));
}

#[test]
fn event__sq_drained() {
    let (client, _server, _held) = connected([127, 0, 33, 3], 16);
    client.qp.modify(QpState::Sqd, &QpAttributes::default()).unwrap();
    assert_eq!(client.event(), Some(AsyncEvent::SqDrained(client.qp.qpn())));
}

/// Runs in a network namespace of its own, whose link goes down and comes back.
#[test]
fn namespace() {
    if !netns::is_inside() {
        return;
    }
    let link = |state| {
        let status = Command::new("ip").args(["link", "set", "v0", state]).status();
        assert!(status.unwrap().success());
    };
    let end = end([10, 33, 0, 1], QpType::Ud, 16);
    end.qp.ready_datagram(RDMA_UDP_QKEY).unwrap();
    let to = end.device.create_ah([10, 33, 0, 2].into(), 0);
    let to = to.to(end.qp.qpn(), RDMA_UDP_QKEY).unwrap();
    let send = || {
        assert_eq!(
            end.send(Operation::Send { imm: None }, to).status,
            Status::Success
        )
    };
    send();
    assert_eq!(end.device.poll_async_event(), None);
    link("down");
    send();
    assert_eq!(end.event(), Some(AsyncEvent::PortError));
    send();
    assert_eq!(end.device.poll_async_event(), None, "told once");
    link("up");
    send();
    assert_eq!(end.event(), Some(AsyncEvent::PortActive));
}

const LINK: &str = "ip link add v0 type veth peer name v1 && ip addr add 10.33.0.1/24 dev v0 && ip link set v1 up && ip link set v0 up";

#[test]
fn event__port_error_and_port_active() {
    netns::run_inside(LINK);
}
