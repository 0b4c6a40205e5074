use super::*;

fn data(bytes: &[u8]) -> PrivateData {
    PrivateData::new(bytes).unwrap()
}

/// Returns one message of each type, in the order of their codes.
fn each() -> Vec<Message> {
    let address = IpAddr::from([127, 0, 0, 1]);
    let remote = Endpoint {
        transport: Transport::Rc,
        qpn: Qpn::new(0x01_0203),
        starting_psn: Psn::new(0xff_ffff),
        responder_resources: 16,
        initiator_depth: 8,
        rnr_retry_count: 7,
        retry_count: 6,
        srq: false,
        ack_timeout: 14,
        path_mtu: PathMtu::Bytes4096,
        traffic_class: 0x20,
    };
    let params = ConnectParams {
        access: 15,
        initiator_depth: 16,
        responder_resources: 15,
        ack_timeout: Some(18),
        retry_count: 7,
        rnr_retry: 6,
        min_rnr_timer: 12,
        path_mtu_max: PathMtu::Bytes1024,
        traffic_class: 3,
        service: Some(ServiceId::tcp(7174)),
        source_port: 40_000,
    };
    let path = Path {
        src: address,
        dst: "fd00::2".parse().unwrap(),
        src_port: 0xc001,
        traffic_class: 1,
    };
    vec![
        Message::Attach {
            version_min: 1,
            version_max: 2,
            name: "rdmux perf".into(),
        },
        Message::Attached {
            version: 1,
            address,
            features: 0x15,
            limits: Limits {
                queue_pairs: 1024,
                memory_regions: 4096,
                work_requests: 8192,
                sges: 32,
                inline_bytes: 1024,
                message_bytes: 1 << 31,
            },
            active_mtu: PathMtu::Bytes4096,
            vectors: 2,
            submission_slots: 4096,
            completion_slots: 2048,
        },
        Message::Made { id: 7 },
        Message::Done {},
        Message::Error {
            code: ErrorCode::InUse,
            number: 98,
            text: "port 18515 is in use".into(),
        },
        Message::AllocPd {},
        Message::Register {
            pd: 1,
            offset: 4096,
            length: 1 << 33,
            iova: 0x7f00_0000_0000,
            access: 7,
        },
        Message::Registered {
            id: 3,
            lkey: LKey(0x0102_0304),
            rkey: RKey(0x0506_0708),
        },
        Message::CreateQp {
            pd: 1,
            qp_type: QpType::Uc,
            max_send_wr: 128,
            max_recv_wr: 64,
            srq: Some(0x1_0002),
            replays_writes: true,
        },
        Message::QpMade {
            id: 9,
            qpn: Qpn::new(0xab_cdef),
        },
        Message::Modify {
            qp: 9,
            to: QpState::Rtr,
            attributes: Attributes {
                access: Some(3),
                path: Some(path),
                path_mtu: Some(1024),
                dest_qpn: Some(Qpn::new(5)),
                rq_psn: Some(Psn::new(6)),
                rate_limit_bps: Some(1 << 40),
                qkey: Some(0x1111_1111),
                ..Attributes::default()
            },
        },
        Message::Query { qp: 9 },
        Message::QpInfo {
            state: QpState::Rts,
            dest_qpn: Qpn::new(5),
            path: None,
            path_mtu: 2048,
            qkey: 0x0123_4567,
            send_outstanding: 4,
            recv_posted: 3,
            carrier: Some("shared memory".into()),
        },
        Message::Retire { qp: 9 },
        Message::Destroy {
            kind: Kind::Region,
            id: 3,
        },
        Message::Listen {
            service: ServiceId::tcp(18515),
            unreliable: true,
        },
        Message::Connect {
            qp: 9,
            peer: "127.0.0.2:7174".parse().unwrap(),
            params,
            private_data: data(b"hello"),
        },
        Message::Accept {
            request: 2,
            qp: 9,
            params: ConnectParams {
                ack_timeout: None,
                service: None,
                ..params
            },
            private_data: data(&[0xff; 255]),
        },
        Message::Reject {
            request: 2,
            private_data: data(b""),
        },
        Message::Disconnect { connection: 4 },
        Message::Count {},
        Message::Counts {
            values: vec![1, u64::MAX],
        },
        Message::AskMtu { peer: address },
        Message::Mtu {
            mtu: PathMtu::Bytes256,
        },
        Message::CountObjects {},
        Message::Objects { qps: 1, regions: 2 },
        Message::Requested {
            listener: 1,
            request: 2,
            peer: "fd00::1".parse().unwrap(),
            peer_port: 50_000,
            remote,
            private_data: data(b"RDPF"),
        },
        Message::Connected {
            connection: 4,
            remote: Some(remote),
            private_data: data(b"x"),
        },
        Message::Refused {
            connection: 4,
            reason: Some(RejReason::CONSUMER),
            private_data: data(b"no"),
            code: ErrorCode::Unreachable,
            text: "no answer".into(),
        },
        Message::Progressed {
            connection: 4,
            established: true,
            ended: false,
        },
        Message::Failed { qp: 9, status: 12 },
        Message::Event {
            kind: EventKind::QpAccessError,
            object: 9,
        },
        Message::OfferMemory {},
        Message::RegisterOffered {
            pd: 1,
            address: 0x7f00_0000_0100,
            length: 0x3000,
            iova: 0x7f00_0000_0100,
            access: 15,
            pages: Some(Pages {
                address: 0x7f00_0000_1000,
                length: 0x2000,
            }),
        },
        Message::CreateSrq { pd: 1, max_wr: 512 },
        Message::SrqMade { id: 4, number: 77 },
        Message::ModifySrq {
            srq: 4,
            max_wr: None,
            limit: Some(16),
        },
        Message::QuerySrq { srq: 4 },
        Message::SrqInfo {
            max_wr: 512,
            posted: 17,
            limit: None,
        },
        Message::CreateAddressHandle {
            address: "fd00::2".parse().unwrap(),
            traffic_class: 2,
        },
    ]
}

#[test]
fn parse__what_was_emitted() {
    for (at, message) in each().into_iter().enumerate() {
        let mut bytes = vec![9];
        message.emit(at as u32 + 100, &mut bytes);
        assert_eq!(usize::from(be_type(&bytes)), at + 1, "{}", message.name());
        assert_eq!(Message::parse(&bytes), Ok((at as u32 + 100, message)));
    }
}

fn be_type(bytes: &[u8]) -> u16 {
    crate::bytes::be16(bytes, 0)
}

/// Checks that the fuzzer's seeds are these messages, byte for byte: changing a layout requires a new version.
/// `RDMUX_NODE_SEEDS_WRITE=1` writes the seeds again.
#[test]
fn emit__as_the_seeds_of_the_fuzzer() {
    crate::node::codec::check_seeds("node_control", each().len(), |at, bytes| {
        each()[at].emit(at as u32 + 100, bytes);
    });
}

#[test]
fn emit__modify_as_documented() {
    let mut bytes = Vec::new();
    let message = Message::Modify {
        qp: 0x0102_0304,
        to: QpState::Init,
        attributes: Attributes {
            access: Some(5),
            ..Attributes::default()
        },
    };
    message.emit(0x0a0b_0c0d, &mut bytes);
    assert_eq!(bytes[..8], [0, 11, 0, VERSION as u8, 0x0a, 0x0b, 0x0c, 0x0d]);
    assert_eq!(bytes[8..18], [1, 2, 3, 4, 1, 1, 0, 0, 0, 5]);
    assert_eq!(bytes[18..], [0; 13]);
}

#[test]
fn emit__text_is_cut_and_has_no_control_characters() {
    let message = Message::Error {
        code: ErrorCode::System,
        number: 0,
        text: format!("a\nb{}", "ä".repeat(TEXT_LEN_MAX)),
    };
    let mut bytes = Vec::new();
    message.emit(1, &mut bytes);
    let Ok((1, Message::Error { text, .. })) = Message::parse(&bytes) else {
        panic!("{bytes:?}");
    };
    assert!(text.starts_with("a bä"), "{text}");
    assert_eq!(text.len(), TEXT_LEN_MAX - 1);
}

#[test]
fn parse__truncated_at_every_byte_or_too_long() {
    for message in each() {
        let mut bytes = Vec::new();
        message.emit(1, &mut bytes);
        for len in 0..bytes.len() {
            assert!(Message::parse(&bytes[..len]).is_err(), "{message:?} cut to {len}");
        }
        bytes.push(0);
        assert!(
            Message::parse(&bytes).is_err(),
            "{message:?} with a byte too many"
        );
    }
}

#[test]
fn parse__undefined_values() {
    let mut bytes = Vec::new();
    Message::Destroy {
        kind: Kind::Qp,
        id: 1,
    }
    .emit(1, &mut bytes);
    for (at, value) in [(1, 0), (1, 99), (3, VERSION as u8 + 1), (8, 0), (8, 8)] {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        assert!(Message::parse(&bytes).is_err(), "byte {at} is {value}");
    }
    Message::QpMade {
        id: 1,
        qpn: Qpn::new(1),
    }
    .emit(1, &mut bytes);
    bytes[12] = 1;
    assert!(Message::parse(&bytes).is_err(), "a QPN of 25 bits");
}
