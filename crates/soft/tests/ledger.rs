//! The ledger on devices that share memory: what peers do there is booked too.
#![allow(non_snake_case, reason = "tests are named function__case")]

mod common;

use std::sync::Arc;

use common::{End, RIGHTS, connect_ends, open, shareable};
use rdmux_verbs::ledger::{Booked, Class, Ledger, Link};
use rdmux_verbs::*;

const BYTES: usize = 1 << 20;

/// Checks that a peer on the host, which could write and read the memory itself, does it through the device, where it is booked.
#[test]
fn ledger__has_what_a_peer_on_the_host_writes_and_reads() {
    let address = [127, 0, 63, 1];
    let end = || End::on(&open(address.into()).unwrap(), shareable(BYTES));
    let (client, server) = (end(), end());
    let _held = connect_ends(&client, &server);
    let ledger = Arc::new(Ledger::default());
    let booked = Booked::wrap(server.memory.clone(), Some(&ledger), Class::Data);
    let mr = server
        .pd
        .reg_mr_all(booked, server.memory.address(), RIGHTS)
        .unwrap();
    let remote = mr.remote(..300_000).unwrap();
    let local = client.mr.slice(..300_000).unwrap();
    let before = server.device.counters();
    for request in [
        SendRequest::write(local, remote),
        SendRequest::read(local, remote),
    ] {
        client.qp.post_send(request.signaled()).unwrap();
        client.wait_success();
    }
    let counters = server.device.counters();
    assert_eq!(
        client.device.counters().direct_bytes,
        0,
        "nothing passes the ledger by"
    );
    let entries = ledger.entries();
    for link in [Link::Wire, Link::NicRoot, Link::RootDram] {
        assert_eq!(entries.get(link, Class::Data), 600_000, "{link:?}");
    }
    let counted = |counters: &Counters| counters.sent_bytes + counters.rcvd_bytes;
    let counted = counted(&counters) - counted(&before);
    let entries = entries.on_wire(counted);
    assert_eq!(entries.of_link(Link::Wire), counted);
    assert!(entries.get(Link::Wire, Class::Command) < 60_000, "{entries:?}");
}
