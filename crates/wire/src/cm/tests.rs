use super::*;
use crate::roce::{PathMtu, Transport};

fn req() -> Req {
    let mut private = [0; IpAddressing::LEN + 3];
    addressing().emit(&mut private);
    private[IpAddressing::LEN..].copy_from_slice(b"abc");
    Req {
        local_comm_id: 0x0102_0304,
        ece: Some(Ece {
            vendor: 0xa1_b2c3,
            options: 0xd4e5_f607,
        }),
        service_id: ServiceId::tcp(7174),
        ca_guid: 0x1122_3344_5566_7788,
        qkey: 0x0bad_cafe,
        qpn: Qpn::new(0x45_6789),
        responder_resources: 16,
        initiator_depth: 17,
        remote_response_timeout: 20,
        transport: Transport::Rc,
        flow_control: true,
        starting_psn: Psn::new(0xfe_dcba),
        local_response_timeout: 21,
        retry_count: 7,
        pkey: 0xffff,
        path_mtu: PathMtu::Bytes4096,
        rnr_retry_count: 6,
        max_cm_retries: 15,
        srq: true,
        src_gid: to_gid([10, 9, 0, 1].into()),
        dst_gid: to_gid([10, 9, 0, 2].into()),
        flow_label: 0xa_bcde,
        packet_rate: 0x3f,
        traffic_class: 0x5a,
        hop_limit: 64,
        service_level: 9,
        local_ack_timeout: 17,
        private_data: PrivateData::new(&private).unwrap(),
    }
}

fn addressing() -> IpAddressing {
    IpAddressing {
        src_port: 0x8001,
        src: [10, 9, 0, 1].into(),
        dst: [10, 9, 0, 2].into(),
    }
}

fn private<const N: usize>() -> PrivateData<N> {
    let bytes: Vec<u8> = (1..=N).map(|i| i as u8).collect();
    PrivateData::new(&bytes).unwrap()
}

/// Returns one message of each kind, in which no two fields have the same value.
fn each() -> Vec<CmMessage> {
    let (local_comm_id, remote_comm_id) = (0x0102_0304, 0x0506_0708);
    vec![
        CmMessage::Req(req()),
        CmMessage::Req(Req {
            transport: Transport::Uc,
            ece: None,
            ..req()
        }),
        CmMessage::Req(Req {
            transport: Transport::Xrc,
            hop_limit: 1,
            ..req()
        }),
        CmMessage::Mra(Mra {
            local_comm_id,
            remote_comm_id,
            answered: Answered::Rep,
            service_timeout: 19,
            private_data: private(),
        }),
        CmMessage::Rej(Rej {
            local_comm_id,
            remote_comm_id,
            answered: Answered::Other,
            reason: RejReason::CONSUMER,
            ari_len: 72,
            ari: *private::<72>().bytes(),
            private_data: private(),
        }),
        CmMessage::Rep(Rep {
            local_comm_id,
            remote_comm_id,
            ece: Some(
                Extensions {
                    version: 1,
                    receive_window_log2: 17,
                    selective: true,
                    carried_acks: false,
                }
                .to_ece(),
            ),
            qkey: 0x0bad_cafe,
            qpn: Qpn::new(0x45_6789),
            eecn: 0x11_2233,
            starting_psn: Psn::new(0xfe_dcba),
            responder_resources: 16,
            initiator_depth: 17,
            target_ack_delay: 15,
            failover: 1,
            flow_control: true,
            rnr_retry_count: 7,
            srq: true,
            ca_guid: 0x1122_3344_5566_7788,
            private_data: private(),
        }),
        CmMessage::Rtu(Rtu {
            local_comm_id,
            remote_comm_id,
            private_data: private(),
        }),
        CmMessage::Dreq(Dreq {
            local_comm_id,
            remote_comm_id,
            remote_qpn: Qpn::new(0x45_6789),
            private_data: private(),
        }),
        CmMessage::Drep(Drep {
            local_comm_id,
            remote_comm_id,
            private_data: private(),
        }),
        CmMessage::SidrReq(SidrReq {
            request_id: local_comm_id,
            pkey: 0x8001,
            service_id: ServiceId::udp(9),
            private_data: private(),
        }),
        CmMessage::SidrRep(SidrRep {
            request_id: local_comm_id,
            status: SidrStatus::REJECT,
            qpn: Qpn::new(0x45_6789),
            service_id: ServiceId::udp(9),
            qkey: 0x0123_4567,
            private_data: private(),
        }),
        CmMessage::Lap(Lap {
            local_comm_id,
            remote_comm_id,
        }),
        CmMessage::Apr(Apr {
            local_comm_id,
            remote_comm_id,
            status: AprStatus::UNSUPPORTED,
            private_data: private(),
        }),
    ]
}

fn emit(message: &CmMessage) -> [u8; MAD_LEN] {
    let mut mad = [0xee; MAD_LEN];
    message.emit(0x1020_3040_5060_7080, &mut mad);
    mad
}

#[test]
fn parse__inverts_emit() {
    for message in each() {
        assert_eq!(
            CmMessage::parse(&emit(&message)),
            Ok((0x1020_3040_5060_7080, message))
        );
    }
}

#[test]
fn emit__req_byte_by_byte() {
    let mad = emit(&CmMessage::Req(req()));
    let at = |offset: usize, bytes: &[u8]| {
        assert_eq!(mad[offset..offset + bytes.len()], *bytes, "offset {offset}")
    };
    at(
        0,
        &[
            1, 7, 2, 3, 0, 0, 0, 0, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80,
        ],
    );
    at(16, &[0x00, 0x10, 0, 0, 0xd4, 0xe5, 0xf6, 0x07]);
    at(
        24,
        &[
            1, 2, 3, 4, 0, 0xa1, 0xb2, 0xc3, 0, 0, 0, 0, 0x01, 0x06, 0x1c, 0x06,
        ],
    );
    at(
        40,
        &[
            0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0, 0, 0, 0, 0x0b, 0xad, 0xca, 0xfe,
        ],
    );
    at(56, &[0x45, 0x67, 0x89, 16, 0, 0, 0, 17, 0, 0, 0, 20 << 3 | 1]);
    at(
        68,
        &[
            0xfe,
            0xdc,
            0xba,
            21 << 3 | 7,
            0xff,
            0xff,
            5 << 4 | 6,
            15 << 4 | 8,
            0xff,
            0xff,
            0xff,
            0xff,
        ],
    );
    at(80, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 1]);
    at(96, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 2]);
    at(112, &[0xab, 0xcd, 0xe0, 0x3f, 0x5a, 64, 9 << 4, 17 << 3]);
    at(120, &[0; 44]);
    at(164, &[0, 0x40, 0x80, 0x01]);
    at(180, &[10, 9, 0, 1]);
    at(196, &[10, 9, 0, 2, b'a', b'b', b'c', 0]);
}

#[test]
fn emit__rep_spreads_the_vendor() {
    let ece = Some(Ece {
        vendor: 0xa1_b2c3,
        options: 5,
    });
    let Some(CmMessage::Rep(rep)) = each().into_iter().find(|m| matches!(m, CmMessage::Rep(_))) else {
        panic!()
    };
    let mad = emit(&CmMessage::Rep(Rep { ece, ..rep }));
    assert_eq!((mad[24 + 15], mad[24 + 19], mad[24 + 23]), (0xc3, 0xb2, 0xa1));
    assert_eq!(mad[20..24], [0, 0, 0, 5]);
    let (_, CmMessage::Rep(parsed)) = CmMessage::parse(&mad).unwrap() else {
        panic!()
    };
    assert_eq!((parsed.ece, parsed.eecn), (ece, rep.eecn));
}

#[test]
fn emit__req_of_one_hop_stays_in_its_subnet() {
    let mad = emit(&CmMessage::Req(Req {
        hop_limit: 1,
        ..req()
    }));
    assert_eq!((be32(&mad, 24 + 52), mad[24 + 94] & 8), (0, 8));
}

#[test]
fn parse__too_short() {
    for message in each() {
        let mad = emit(&message);
        for len in 0..MAD_LEN {
            assert!(matches!(
                CmMessage::parse(&mad[..len]),
                Err(Malformed::Truncated { .. })
            ));
            assert_eq!(destination(&mad[..len]), None);
        }
    }
}

#[test]
fn parse__values_not_defined() {
    let broken = |message: &CmMessage, at: usize, value: u8| {
        let mut mad = emit(message);
        mad[at] = value;
        let error = CmMessage::parse(&mad).unwrap_err();
        assert!(matches!(error, Malformed::Undefined { .. }), "{error}");
    };
    let req = CmMessage::Req(req());
    for (at, value) in [(0, 2), (1, 4), (2, 1), (3, 0x81), (17, 0x0f), (17, 0x1b), (16, 1)] {
        broken(&req, at, value);
    }
    broken(&req, 24 + 43, 2 << 1); // transport: reliable datagram
    broken(&req, 24 + 43, 3 << 1); // extended transport of no kind
    broken(&req, 24 + 50, 0); // path MTU
    broken(&req, 24 + 50, 6 << 4);
    for message in each() {
        if matches!(message, CmMessage::Mra(_) | CmMessage::Rej(_)) {
            broken(&message, 24 + 8, 3 << 6);
        }
    }
}

#[test]
fn parse__rej_claims_more_information_than_fits() {
    let Some(rej) = each().into_iter().find(|m| matches!(m, CmMessage::Rej(_))) else {
        panic!()
    };
    let mut mad = emit(&rej);
    mad[24 + 9] = 0xff;
    let (_, CmMessage::Rej(parsed)) = CmMessage::parse(&mad).unwrap() else {
        panic!()
    };
    assert_eq!(parsed.ari_len, 72);
}

#[test]
fn destination__by_message() {
    for message in each() {
        let expected = match &message {
            CmMessage::Req(_) => Destination::Service(ServiceId::tcp(7174)),
            CmMessage::SidrReq(_) => Destination::Service(ServiceId::udp(9)),
            CmMessage::SidrRep(m) => Destination::CommId(m.request_id),
            _ => Destination::CommId(0x0506_0708),
        };
        assert_eq!(destination(&emit(&message)), Some(expected), "{message:?}");
    }
    for message in each() {
        let mut mad = emit(&message);
        mad[HEADER_LEN + 4..][..4].fill(0);
        let is_rej = matches!(message, CmMessage::Rej(_));
        assert_eq!(destination(&mad) == Some(Destination::Everyone), is_rej);
    }
    let mut lap = emit(&each()[6]);
    lap[17] = 0x19;
    assert_eq!(destination(&lap), Some(Destination::CommId(0x0506_0708)));
    lap[17] = 0x1b;
    assert_eq!(destination(&lap), None);
    lap[1] = 4;
    assert_eq!(destination(&lap), None);
}

#[test]
fn service_id__ports() {
    assert_eq!(ServiceId::tcp(7174).0, 0x0106_1c06);
    assert_eq!(ServiceId::udp(7174).0, 0x0111_1c06);
    assert_eq!(ServiceId::tcp(7174).port(), Some(7174));
    assert_eq!(ServiceId(0x1_0106_1c06).port(), None);
}

#[test]
fn ip_addressing__both_families() {
    let v6 = IpAddressing {
        src_port: 1,
        src: "fd00::1".parse().unwrap(),
        dst: "fd00::2".parse().unwrap(),
    };
    for addressing in [addressing(), v6] {
        let mut bytes = [0xee; 40];
        addressing.emit(&mut bytes);
        assert_eq!(IpAddressing::parse(&bytes), Ok(addressing));
        assert_eq!(bytes[36..], [0xee; 4]);
        assert!(IpAddressing::parse(&bytes[..35]).is_err());
        for (at, value) in [(0, 1), (1, 5 << 4)] {
            let mut bad = bytes;
            bad[at] = value;
            assert!(IpAddressing::parse(&bad).is_err());
        }
    }
}

#[test]
fn extensions__fields_and_foreign_vendors() {
    let ours = Extensions {
        version: 1,
        receive_window_log2: 17,
        selective: false,
        carried_acks: false,
    };
    assert_eq!(
        ours.to_ece(),
        Ece {
            vendor: 0x52_444d,
            options: 0x1000_0011
        }
    );
    assert_eq!(
        Extensions::from_ece(Ece {
            vendor: 0x52_444d,
            options: 0x1fff_ff91
        }),
        Some(ours)
    );
    let selective = Extensions {
        selective: true,
        ..ours
    };
    assert_eq!(selective.to_ece().options, 0x1000_0031);
    assert_eq!(Extensions::from_ece(selective.to_ece()), Some(selective));
    let carried = Extensions {
        carried_acks: true,
        ..ours
    };
    assert_eq!(carried.to_ece().options, 0x1000_0051);
    assert_eq!(Extensions::from_ece(carried.to_ece()), Some(carried));
    assert_eq!(
        Extensions::from_ece(Ece {
            vendor: 0x15b3,
            options: 0x1000_0011
        }),
        None
    );
    assert_eq!(
        Extensions::from_ece(Ece {
            vendor: 0x52_444d,
            options: 0x11
        }),
        None
    );
}

#[test]
fn private_data__limits() {
    assert!(PrivateData::<4>::new(b"abcde").is_none());
    let data = PrivateData::<4>::new(b"ab").unwrap();
    assert_eq!(
        (data.bytes(), format!("{data:?}").as_str()),
        (b"ab\0\0", "6162(2 of 4)")
    );
}

#[test]
fn rej_reason__text() {
    assert_eq!(
        RejReason(8).to_string(),
        "nothing listens on that port (service id) (reason 8)"
    );
    assert_eq!(RejReason(34).to_string(), "connection refused, reason 34");
    assert_eq!(format!("{:?}", RejReason(10)), "STALE_CONNECTION");
}
