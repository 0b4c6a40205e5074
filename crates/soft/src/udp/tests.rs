#![allow(non_snake_case, reason = "names of tests are function__case")]

use super::*;
use crate::skip::skip;

fn v4() -> IpAddr {
    Ipv4Addr::LOCALHOST.into()
}

fn v6() -> IpAddr {
    Ipv6Addr::LOCALHOST.into()
}

/// Returns the loopback addresses of this host; some containers have no IPv6.
fn loopbacks() -> Vec<IpAddr> {
    let mut all = vec![v4(), v6()];
    all.retain(|ip| {
        let works = std::net::UdpSocket::bind((*ip, 0)).is_ok();
        if !works {
            skip(format!("{ip} is no address of this host"));
        }
        works
    });
    all
}

fn pair(ip: IpAddr) -> (RxSocket, TxSocket) {
    (
        RxSocket::bind(SocketAddr::new(ip, 0), false).unwrap(),
        TxSocket::bind(ip).unwrap(),
    )
}

/// Receives until `count` segments have arrived, for 60 s at most; returns source, TOS and payload of each, in order.
fn receive(rx: &RxSocket, count: usize) -> Vec<(SocketAddr, u8, Vec<u8>)> {
    let mut batch = RxBatch::new();
    let mut received = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while received.len() < count && Instant::now() < deadline {
        rx.recv_batch(&mut batch).unwrap();
        for d in batch.iter() {
            received.extend(d.segments().map(|s| (d.src, d.tos, s.to_vec())));
        }
    }
    received
}

#[test]
fn send_batch__one_datagram_in_parts() {
    for ip in loopbacks() {
        let (rx, tx) = pair(ip);
        let parts = [IoSlice::new(b"head"), IoSlice::new(b""), IoSlice::new(b"payload")];
        let one = Outgoing {
            dst: rx.local_addr(),
            segment_size: None,
            tos: 0x6a,
            parts: &parts,
        };
        assert_eq!(tx.send_batch(&[one]).unwrap(), 1);
        assert_eq!(
            receive(&rx, 1),
            [(tx.local_addr(), 0x6a, b"headpayload".to_vec())]
        );
    }
}

#[test]
fn send_batch__more_entries_than_one_call_takes() {
    for ip in loopbacks() {
        let (rx, tx) = pair(ip);
        let payloads: Vec<[u8; 2]> = (0..TX_BATCH as u16 * 2 + 3).map(u16::to_be_bytes).collect();
        let parts: Vec<[IoSlice<'_>; 1]> = payloads.iter().map(|p| [IoSlice::new(p)]).collect();
        let entries: Vec<_> = parts
            .iter()
            .map(|parts| Outgoing {
                dst: rx.local_addr(),
                segment_size: None,
                tos: 0,
                parts,
            })
            .collect();
        assert_eq!(tx.send_batch(&entries).unwrap(), entries.len());
        let received: Vec<_> = receive(&rx, entries.len())
            .into_iter()
            .map(|(_, _, p)| p)
            .collect();
        assert_eq!(received, payloads.iter().map(|p| p.to_vec()).collect::<Vec<_>>());
    }
}

#[test]
fn send_batch__train_is_cut_into_segments() {
    for ip in loopbacks() {
        let (rx, tx) = pair(ip);
        let bytes: Vec<u8> = (0..10_000_u32).map(|i| (i % 251) as u8).collect();
        let parts = [IoSlice::new(&bytes[..17]), IoSlice::new(&bytes[17..])];
        let train = Outgoing {
            dst: rx.local_addr(),
            segment_size: Some(1084),
            tos: 2,
            parts: &parts,
        };
        let single = Outgoing {
            segment_size: None,
            ..train
        };
        assert_eq!(tx.send_batch(&[single, train, single]).unwrap(), 3);
        let received: Vec<_> = receive(&rx, 12).into_iter().map(|(_, _, p)| p).collect();
        let mut expected = vec![bytes.clone()];
        expected.extend(bytes.chunks(1084).map(<[u8]>::to_vec));
        expected.push(bytes.clone());
        assert_eq!(received, expected);
        assert!(tx.gso());
    }
}

#[test]
fn send_batch__largest_train() {
    let (rx, tx) = pair(v4());
    let bytes = vec![7; GSO_BYTES_MAX];
    let parts = [IoSlice::new(&bytes)];
    let train = Outgoing {
        dst: rx.local_addr(),
        segment_size: Some(1024),
        tos: 0,
        parts: &parts,
    };
    assert_eq!(tx.send_batch(&[train]).unwrap(), 1);
    let lengths: Vec<_> = receive(&rx, 64).into_iter().map(|(_, _, p)| p.len()).collect();
    assert_eq!(lengths.len(), GSO_BYTES_MAX.div_ceil(1024));
    assert_eq!(lengths.iter().sum::<usize>(), GSO_BYTES_MAX);
}

#[test]
fn send_batch__too_large_reports_its_index() {
    let (rx, tx) = pair(v4());
    let bytes = vec![1; GSO_BYTES_MAX + 1];
    let good = [IoSlice::new(&bytes[..10])];
    let bad = [IoSlice::new(&bytes)];
    let good = Outgoing {
        dst: rx.local_addr(),
        segment_size: None,
        tos: 0,
        parts: &good,
    };
    let bad = Outgoing { parts: &bad, ..good };
    let error = tx.send_batch(&[good, good, bad, good]).unwrap_err();
    assert_eq!(error.index, 2);
    assert!(error.is_too_large());
    assert_eq!(tx.send_batch(&[good]).unwrap(), 1);
    assert_eq!(receive(&rx, 3).len(), 3);
    assert!(tx.gso(), "a wrong size is no lack of GSO");
}

#[test]
fn send_batch__too_many_segments_is_refused_and_keeps_gso() {
    let (rx, tx) = pair(v4());
    let parts = [IoSlice::new(&[0; 65])];
    let train = Outgoing {
        dst: rx.local_addr(),
        segment_size: Some(1),
        tos: 0,
        parts: &parts,
    };
    assert_eq!(tx.send_batch(&[train]).unwrap_err().index, 0);
    assert_eq!(
        tx.send_batch(&[Outgoing {
            segment_size: Some(0),
            ..train
        }])
        .unwrap_err()
        .index,
        0
    );
    assert!(tx.gso());
}

#[test]
fn send_batch__refused_train_is_sent_in_pieces() {
    let (rx, tx) = pair(v4());
    // The kernel segments nothing for a socket without checksums, as for a device without checksum offload.
    set_int(&tx.fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    let bytes: Vec<u8> = (0..250).collect();
    let parts = [IoSlice::new(&bytes)];
    let train = Outgoing {
        dst: rx.local_addr(),
        segment_size: Some(100),
        tos: 0,
        parts: &parts,
    };
    let single = Outgoing {
        segment_size: None,
        ..train
    };
    assert_eq!(tx.send_batch(&[single, train, single, train]).unwrap(), 4);
    assert!(!tx.gso());
    assert_eq!(tx.gso_refused(), 1);
    let lengths: Vec<_> = receive(&rx, 8).into_iter().map(|(_, _, p)| p.len()).collect();
    assert_eq!(lengths, [250, 100, 100, 50, 250, 100, 100, 50]);
}

#[test]
fn send_batch__no_route_names_the_entry() {
    let (rx, tx) = pair(v4());
    let parts = [IoSlice::new(b"x")];
    let good = Outgoing {
        dst: rx.local_addr(),
        segment_size: None,
        tos: 0,
        parts: &parts,
    };
    let bad = Outgoing {
        dst: SocketAddr::new(v6(), 9),
        ..good
    };
    assert_eq!(tx.send_batch(&[good, bad]).unwrap_err().index, 1);
}

#[test]
fn self_test__works_on_loopback() {
    for ip in loopbacks() {
        assert!(TxSocket::bind(ip).unwrap().self_test().unwrap());
    }
}

#[test]
fn self_test__turns_gso_off_where_it_fails() {
    let tx = TxSocket::bind(v4()).unwrap();
    set_int(&tx.fd, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    assert!(!tx.self_test().unwrap());
}

#[test]
fn recv_batch__empty_queue_clears_the_batch() {
    let (rx, tx) = pair(v4());
    let mut batch = RxBatch::new();
    assert_eq!(rx.recv_batch(&mut batch).unwrap(), 0);
    let parts = [IoSlice::new(b"")];
    let one = Outgoing {
        dst: rx.local_addr(),
        segment_size: None,
        tos: 0,
        parts: &parts,
    };
    assert_eq!(tx.send_batch(&[one]).unwrap(), 1);
    while rx.recv_batch(&mut batch).unwrap() == 0 {}
    let datagram = batch.iter().next().unwrap();
    assert_eq!(
        (
            datagram.segment_size,
            datagram.bytes.len(),
            datagram.segments().len()
        ),
        (1, 0, 0)
    );
    assert_eq!(rx.recv_batch(&mut batch).unwrap(), 0);
    assert_eq!(batch.iter().len(), 0);
}

#[test]
fn recv_batch__takes_many_after_the_first() {
    let (rx, tx) = pair(v4());
    let parts = [IoSlice::new(b"x")];
    let one = Outgoing {
        dst: rx.local_addr(),
        segment_size: None,
        tos: 0,
        parts: &parts,
    };
    assert_eq!(tx.send_batch(&[one; 12]).unwrap(), 12);
    let mut batch = RxBatch::new();
    let counts: Vec<_> = (0..4).map(|_| rx.recv_batch(&mut batch).unwrap()).collect();
    assert_eq!(counts, [1, RX_BATCH, 3, 0]);
}

#[test]
fn from_fd__rejects_what_is_no_udp_socket() {
    let (a, _b) = std::os::unix::net::UnixDatagram::pair().unwrap();
    assert!(RxSocket::from_fd(a.into()).is_err());
    let listener = std::net::TcpListener::bind((v4(), 0)).unwrap();
    assert!(RxSocket::from_fd(listener.into()).is_err());
}

#[test]
fn for_each__broken_ancillary_data_is_left_out() {
    let mut control = Control::new();
    let end = control.push(0, 1, 2, &[3, 4, 5]);
    let mut items = Vec::new();
    let mut collect = |control: &Control, len| {
        items.clear();
        control.for_each(len, |l, k, d| items.push((l, k, d.to_vec())));
        items.len()
    };
    assert_eq!(collect(&control, end), 1);
    assert_eq!(collect(&control, 5), 0);
    for len in [
        0,
        1,
        Control::HEADER - 1,
        CONTROL_BYTES + 1,
        usize::MAX,
        usize::MAX - 2,
    ] {
        control.0[..Control::WORD].copy_from_slice(&len.to_ne_bytes());
        assert_eq!(collect(&control, CONTROL_BYTES), 0, "length {len}");
    }
}
