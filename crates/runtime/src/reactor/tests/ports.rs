//! Ports that come, change and go while a reactor runs.

use super::*;
use crate::{PortId, PreparedPort};

/// Adds a port, prepared on another thread, to the server.
fn add(both: &mut Both, address: &str) -> (PortId, SocketAddr) {
    let address: SocketAddr = address.parse().unwrap();
    let recipient = both.server.recipient();
    let prepare = move || {
        let device = open(address.ip()).unwrap();
        PreparedPort::listen(&[recipient], &device, address.port(), &SIZES)
    };
    let mut prepared = std::thread::spawn(prepare).join().unwrap().unwrap();
    let prepared = prepared.remove(0);
    let id = prepared.id();
    both.server.add_port(prepared);
    (id, address)
}

/// Has each side hear the other.
#[track_caller]
fn talk(both: &mut Both, [there, here]: [ConnectionId; 2], message: &[u8]) {
    both.send(here, message);
    let slot = both.receive(there, message);
    both.server
        .connection(there)
        .unwrap()
        .send(slot, message)
        .unwrap();
    match next(&mut both.client) {
        ReactorEvent::Completed(of, Completed::Message { bytes, .. }) => {
            assert_eq!((of, &*bytes), (here, message));
        }
        other => panic!("{other:?}"),
    }
}

/// Waits until an attempt has failed, while the servers are polled.
fn is_refused(
    both: &mut Both,
    here: ConnectionId,
    mut poll: impl FnMut(&mut Reactor<()>) -> Option<ReactorEvent<()>>,
) {
    let began = Instant::now();
    let event = loop {
        assert!(began.elapsed() < LONG, "no answer");
        assert!(poll(&mut both.server).is_none());
        if let Some(event) = both.client.poll() {
            break event;
        }
    };
    assert!(
        matches!(event, ReactorEvent::Connected(of, Err(_)) if of == here),
        "{event:?}"
    );
}

/// Ends a connection, and waits until the server has no place for it any more.
fn end(both: &mut Both, [there, here]: [ConnectionId; 2]) {
    both.client.close(here, None);
    both.wait_ended(there);
    both.server.close(there, None);
    let of_ports = |both: &Both| {
        both.server
            .ports
            .iter()
            .map(|port| port.connections)
            .sum::<usize>()
    };
    let began = Instant::now();
    while of_ports(both) > both.server.connections() {
        assert!(began.elapsed() < LONG, "its place is not free");
        assert!(both.server.poll().is_none());
    }
    both.server.handle_timers(Instant::now());
}

#[test]
fn add_port__is_served_beside_the_others() {
    let mut both = Both::new("127.0.12.60:7174", SIZES, 2);
    let first = both.connect();
    let (_, address) = add(&mut both, "127.0.12.61:7174");
    let of_first = std::mem::replace(&mut both.address, address);
    let second = both.connect();
    both.address = of_first;
    let third = both.connect();
    for connection in [first, second, third] {
        talk(&mut both, connection, b"beside");
    }
    assert_eq!(both.server.devices().count(), 2);
}

#[test]
fn add_port__a_request_that_came_before_is_reported() {
    let mut both = Both::new("127.0.12.62:7174", SIZES, 2);
    let address: SocketAddr = "127.0.12.63:7174".parse().unwrap();
    let device = open(address.ip()).unwrap();
    let recipient = both.server.recipient();
    let prepared =
        PreparedPort::listen(std::slice::from_ref(&recipient), &device, address.port(), &SIZES).unwrap();
    let taken = PreparedPort::listen(&[recipient], &open(address.ip()).unwrap(), address.port(), &SIZES);
    assert!(taken.is_err());
    let params = ConnectParams::default();
    let here = both.client.connect(&both.device, address, &params).unwrap();
    let listener = prepared[0].0.listener.as_ref().unwrap();
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    let timeout = Timespec::try_from(LONG).unwrap();
    let come = rustix::event::poll(&mut fds, Some(&timeout));
    assert_eq!(come, Ok(1), "the request has come");
    for prepared in prepared {
        both.server.add_port(prepared);
    }
    let ReactorEvent::Request(request) = next(&mut both.server) else {
        panic!("no request");
    };
    let there = both.server.accept(request, &params).unwrap();
    assert!(matches!(next(&mut both.client), ReactorEvent::Connected(of, Ok(())) if of == here));
    talk(&mut both, [there, here], b"early");
}

#[test]
fn remove_port__its_connections_stay_and_it_goes_with_the_last() {
    let mut both = Both::new("127.0.12.64:7174", SIZES, 2);
    let (id, address) = add(&mut both, "127.0.12.65:7174");
    both.address = address;
    let connections = [both.connect(), both.connect()];
    assert!(both.server.remove_port(id));
    assert!(!both.server.remove_port(id), "it is none any more");
    assert_eq!(both.server.devices().count(), 1);
    // Nobody is listening.
    let params = ConnectParams::default();
    let refused = both.client.connect(&both.device, address, &params).unwrap();
    is_refused(&mut both, refused, |server| server.poll());
    // The address is free for another one.
    let (again, _) = add(&mut both, &address.to_string());
    let third = both.connect();
    for connection in connections.into_iter().chain([third]) {
        talk(&mut both, connection, b"stays");
    }
    end(&mut both, connections[0]);
    assert_eq!(both.server.ports.len(), 3);
    talk(&mut both, connections[1], b"the last");
    end(&mut both, connections[1]);
    assert_eq!(both.server.ports.len(), 2);
    talk(&mut both, third, b"beside");
    end(&mut both, third);
    assert!(both.server.remove_port(again));
    assert_eq!(both.server.ports.len(), 1, "one without connections goes at once");
}

#[test]
fn renew_port__connections_that_come_have_the_other_sizes() {
    let mut both = Both::new("127.0.12.66:7174", SIZES, 2);
    let old = both.connect();
    let longer = Sizes {
        message_bytes: 4096,
        ..SIZES
    };
    let mut gone = Vec::new();
    for round in 0..3_u8 {
        let id = both.server.ports.iter().find(|port| !port.leaves).unwrap().id;
        let devices: Vec<Device> = both.server.devices().cloned().collect();
        let mut prepared = PreparedPort::renewal(&[both.server.recipient()], &devices, &longer).unwrap();
        let prepared = prepared.remove(0);
        let (of_sizes, device) = (prepared.id(), prepared.device().clone());
        assert!(device.is(&devices[0]));
        assert!(both.server.renew_port(id, prepared));
        gone.push(id);
        assert_eq!(both.server.devices().count(), 1);
        // The first connection keeps its port, beside the one that accepts; none between these is left.
        assert_eq!(both.server.ports.len(), 2);
        let new = both.connect();
        let known = &both.server.connections[&new[0]];
        assert_eq!(known.port, of_sizes);
        talk(&mut both, new, &[round; 60]);
        talk(&mut both, old, &[round; 60]);
        end(&mut both, new);
    }
    for id in gone {
        let prepared = PreparedPort::renewal(&[both.server.recipient()], &[both.device.clone()], &SIZES);
        assert!(!both.server.renew_port(id, prepared.unwrap().remove(0)));
    }
    assert_eq!(both.server.ports.len(), 2);
    end(&mut both, old);
    assert_eq!(both.server.ports.len(), 1);
}

#[test]
fn remove_port__a_request_that_is_passed_on_to_it_is_refused() {
    let mut both = Both::new("127.0.12.67:7174", SIZES, 2);
    let mut taker = Reactor::<()>::new(SIZES, limits(4), None).unwrap();
    both.server.pass_to(&mut taker).unwrap();
    both.connect();
    assert!(taker.remove_port(taker.ports[0].id));
    // The next is the taker's.
    let params = ConnectParams::default();
    let here = both.client.connect(&both.device, both.address, &params).unwrap();
    is_refused(&mut both, here, |server| server.poll().or_else(|| taker.poll()));
    // This reactor's own are served.
    both.connect();
}
