use serde_json::json;

use super::*;

const OWN: u32 = 1000;

fn counts(requests: u64, waiting_requests: u64) -> Counts {
    let mut counts = Counts {
        requests,
        bytes: requests * 64,
        errors: 1,
        receives: 2,
        received_bytes: 128,
        waiting_requests,
        waiting_bytes: waiting_requests * 64,
        latency: Histogram::default(),
    };
    (0..requests).for_each(|_| counts.latency.record(1000));
    counts
}

/// Two users in a tenant, the second of whom has another process in a tenant of its own.
fn snapshot() -> Snapshot {
    let tenant = |name: &str, applications, counts| Tenant {
        name: name.into(),
        applications,
        weight: Some(3),
        rate_bps: None,
        ceiling_bps: Some(1_000_000),
        counts,
    };
    let application = |id, uid, tenant: &str| Application {
        id,
        pid: Some(7),
        uid: Some(uid),
        name: "perf".into(),
        tenant: tenant.into(),
        queue_pairs: 2,
        counts: counts(id, 1),
    };
    let connection = |application, qpn| Connection {
        application,
        qpn,
        peer: Some([10, 0, 0, 2].into()),
        class: Some(3),
        route: Route::Shared,
        shared_qp: Some(5),
        counts: counts(1, 1),
    };
    Snapshot {
        node: NodeState {
            address: [10, 0, 0, 1].into(),
            provider: "soft".into(),
            time_ns: 42,
            waiting: "running".into(),
            retransmitted_packets: 3,
            is_whole: true,
        },
        tenants: vec![tenant("a", 2, counts(90, 2)), tenant("b", 1, counts(3, 1))],
        applications: vec![
            application(1, OWN + 1, "a"),
            application(2, OWN + 2, "a"),
            application(3, OWN + 2, "b"),
        ],
        connections: vec![
            connection(1, 10),
            connection(1, 11),
            connection(2, 20),
            connection(3, 30),
        ],
        connections_left_out: 2,
        shared_qps: vec![SharedQp {
            id: 5,
            peer: [10, 0, 0, 2].into(),
            tenant: "a".into(),
            peer_tenant: "default".into(),
            class: 3,
            connections: 4,
            window_bytes: 65_536,
            in_flight_bytes: 4096,
        }],
    }
}

#[test]
fn json__shape() {
    let snapshot = snapshot();
    let value = serde_json::to_value(&snapshot).unwrap();
    assert_eq!(
        value["connections"][2],
        json!({
            "application": 2,
            "qpn": 20,
            "peer": "10.0.0.2",
            "class": 3,
            "route": "shared",
            "shared_qp": 5,
            "counts": {
                "requests": 1,
                "bytes": 64,
                "errors": 1,
                "receives": 2,
                "received_bytes": 128,
                "waiting_requests": 1,
                "waiting_bytes": 64,
                "latency": { "sum_ns": 1000, "buckets": [0, 0, 1] }
            }
        })
    );
    assert_eq!(serde_json::from_value::<Snapshot>(value).unwrap(), snapshot);
    let bad = json!({ "sum_ns": 1, "buckets": vec![0; 30] });
    assert!(latency::deserialize(bad).is_err());
}

#[test]
fn visible_to__own_applications() {
    let all = snapshot();
    for uid in [0, OWN] {
        assert_eq!(all.visible_to(uid, OWN), all);
    }
    let seen = all.visible_to(OWN + 2, OWN);
    assert!(!seen.node.is_whole);
    assert_eq!(seen.applications, all.applications[1..]);
    assert_eq!(seen.connections, all.connections[2..]);
    assert_eq!(seen.connections_left_out, 2);
    let tenants: Vec<_> = seen.tenants.iter().map(|tenant| &*tenant.name).collect();
    assert_eq!(tenants, ["a", "b"]);
    // Bytes that others have moved are not among them.
    assert_eq!(seen.tenants[0].counts, all.applications[1].counts);
    assert!(seen.shared_qps.is_empty());
    let seen = all.visible_to(OWN + 1, OWN);
    assert_eq!((seen.applications.len(), seen.tenants.len()), (1, 1));
    let seen = all.visible_to(OWN + 3, OWN);
    assert!(seen.applications.is_empty() && seen.tenants.is_empty() && seen.connections.is_empty());
}

#[test]
fn since__what_was_added() {
    let (earlier, later) = (counts(10, 7), counts(13, 2));
    let since = later.since(&earlier);
    assert_eq!((since.requests, since.bytes, since.errors), (3, 192, 0));
    assert_eq!((since.waiting_requests, since.waiting_bytes), (2, 128));
    assert_eq!(since.latency.count(), 3);
    let mut sum = earlier;
    sum.add(&since);
    assert_eq!(
        (sum.requests, sum.latency.count(), sum.waiting_requests),
        (13, 13, 9)
    );
    // Something else has its name by now.
    assert_eq!(earlier.since(&later).requests, 0);
}
