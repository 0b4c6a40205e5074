use super::*;
use crate::accel::{AcceleratorInfo, Algorithm};
use crate::{Malformed, RKey};

#[test]
fn sqe__has_the_fields_of_linux_connect() {
    // nvmf_connect_command of Linux: opcode, flags SGL_METABUF, fctype; qid 1, sqsize 127, cattr 4, kato 5 s.
    let connect = Connect {
        record_format: 0,
        qid: 1,
        sq_size: 127,
        no_flow_control: true,
        keep_alive_ms: 5000,
    };
    let mut sqe = connect.command(Cid(0x1234));
    sqe.set_sgl(Sgl::InCapsule {
        offset: 0,
        length: 1024,
    });
    let bytes = sqe.as_bytes();
    assert_eq!(bytes[..8], [0x7f, 0x40, 0x34, 0x12, 0x01, 0, 0, 0]);
    assert_eq!(bytes[24..40], [0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0x01]);
    assert_eq!(bytes[40..52], [0, 0, 1, 0, 127, 0, 4, 0, 0x88, 0x13, 0, 0]);
    let parsed = Sqe::parse(bytes).unwrap();
    assert_eq!(Connect::parse(&parsed), connect);
    assert_eq!(FabricsType::of(&parsed), FabricsType::CONNECT);
    assert!(parsed.is_to_controller() && parsed.is_plain());
    assert!(Sqe::parse(&bytes[..63]).is_err());
}

#[test]
fn sgl__keyed_holds_24_bits_of_length() {
    let sgl = Sgl::Keyed {
        address: 0x1122_3344_5566_7788,
        length: 0xa0_b0c0,
        rkey: RKey(0xdead_beef),
        invalidate: true,
    };
    let mut bytes = [0xff; 16];
    sgl.emit(&mut bytes);
    assert_eq!(
        bytes,
        [
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xc0, 0xb0, 0xa0, 0xef, 0xbe, 0xad, 0xde, 0x4f
        ]
    );
    assert_eq!(Sgl::parse(&bytes), Ok(sgl));
    bytes[15] = 0x00;
    assert_eq!(Sgl::parse(&bytes), Err(Status::SGL_TYPE_INVALID.do_not_retry()));
}

#[test]
fn cqe__status_stands_above_the_phase_bit() {
    let cqe = Cqe {
        result: 0x0102_0304_0506_0708,
        sq_head: 9,
        cid: Cid(0xabcd),
        status: Status::CONNECT_INVALID.do_not_retry(),
    };
    let mut bytes = [0xff; CQE_LEN];
    cqe.emit(&mut bytes);
    assert_eq!(bytes[8..], [9, 0, 0, 0, 0xcd, 0xab, 0x04, 0x83]);
    assert_eq!(Cqe::parse(&bytes), Ok(cqe));
    assert_eq!(
        cqe.status.to_string(),
        "connect invalid parameters (do not retry)"
    );
    assert_eq!(Status(0x2c1).to_string(), "status 0x2c1");
}

#[test]
fn of_drive__keeps_what_is_about_the_medium() {
    let fault = Status::WRITE_FAULT.do_not_retry();
    assert_eq!(fault.of_drive(), fault);
    assert_eq!(Status(0x281 | 1 << 13).of_drive(), Status::READ_ERROR);
    let path = Status::ANA_INACCESSIBLE.do_not_retry();
    assert_eq!(path.of_drive(), Status::INTERNAL_ERROR);
}

#[test]
fn command_set__is_that_of_its_descriptor() {
    let mut bytes = vec![0; IDENTIFY_LEN];
    assert_eq!(NamespaceIdentifiers::command_set(&bytes), 0);
    let ids = NamespaceIdentifiers {
        nguid: [1; 16],
        uuid: [2; 16],
    };
    ids.emit(&mut bytes);
    assert_eq!(NamespaceIdentifiers::command_set(&bytes), 0);
    // The zoned one; then a descriptor that ends behind the data.
    bytes[44] = 2;
    assert_eq!(NamespaceIdentifiers::command_set(&bytes), 2);
    assert_eq!(NamespaceIdentifiers::command_set(&bytes[..44]), 0);
}

#[test]
fn rw__counts_blocks_from_zero_on_the_wire() {
    let rw = Rw {
        slba: 0x1_0000_0002,
        blocks: 0x1_0000,
        fua: true,
    };
    let mut sqe = Sqe::new(Opcode::WRITE, Cid(1), NsId(7));
    rw.emit(&mut sqe);
    assert_eq!((sqe.dword(10), sqe.dword(11), sqe.dword(12)), (2, 1, 0x4000_ffff));
    assert_eq!(Rw::parse(&sqe), rw);
    assert!(sqe.is_to_controller() && !Sqe::new(Opcode::READ, Cid(1), NsId(1)).is_to_controller());
}

#[test]
fn connect_data__names_the_offset_of_what_is_invalid() {
    let data = ConnectData {
        host_id: HostId([7; 16]),
        cntlid: ConnectData::ANY_CONTROLLER,
        subsystem: Nqn::new("nqn.2014-08.org.example:subsystem").unwrap(),
        host: Nqn::new(&"h".repeat(Nqn::LEN_MAX)).unwrap(),
    };
    let mut bytes = vec![0xff; CONNECT_DATA_LEN];
    data.emit(&mut bytes);
    assert_eq!(ConnectData::parse(&bytes), Ok(data));
    assert!(ConnectData::parse(&bytes[..1023]).is_err());
    // 224 characters.
    bytes[512 + 223] = b'h';
    assert_eq!(ConnectData::parse(&bytes).unwrap_err().1, 512);
    bytes[256] = 0;
    let (error, at) = ConnectData::parse(&bytes).unwrap_err();
    let undefined = Malformed::Undefined {
        what: "name of a subsystem",
        value: 0,
    };
    assert_eq!((error, at), (undefined, 256));
}

#[test]
fn property__of_eight_bytes_says_so() {
    let property = Property {
        register: Register::CAPABILITIES,
        is_wide: true,
        value: 0,
    };
    let sqe = property.command(FabricsType::PROPERTY_GET, Cid(3));
    assert_eq!(Property::parse(&sqe), property);
    assert!(!sqe.is_to_controller());
    let capabilities = Capabilities {
        queue_entries: 1024,
        timeout: 15,
    };
    assert_eq!(capabilities.register(), 0x0800_0820_0f01_03ff);
    assert_eq!(Capabilities::parse(capabilities.register()), capabilities);
}

#[test]
fn configuration__takes_what_nvmet_takes() {
    assert!(Configuration::enabled().is_supported() && Configuration::enabled().is_enabled());
    // Linux: CSS 6 (all command sets), pages of 4 KiB, IOSQES 6, IOCQES 4.
    assert!(Configuration(0x0046_0061).is_supported());
    for wrong in [0x0056_0001, 0x0046_0011, 0x0046_0081, 0x0046_0801] {
        assert!(!Configuration(wrong).is_supported(), "{wrong:#x}");
    }
    assert!(Configuration(0x0046_4001).is_shutting_down());
}

#[test]
fn identify_controller__survives_the_wire() {
    let identify = IdentifyController {
        serial: "0123456789abcdef0123".to_owned(),
        model: "rdmux".to_owned(),
        firmware: "0.1.0".to_owned(),
        multipath: IdentifyController::MULTIPLE_CONTROLLERS,
        mdts: 5,
        cntlid: 0x1234,
        version: VERSION_1_4,
        events: IdentifyController::NAMESPACE_EVENTS,
        attributes: IdentifyController::WIDE_HOST_ID,
        kind: ControllerKind::Io,
        aborts: 4,
        event_requests: 4,
        log_attributes: IdentifyController::EXTENDED_LOGS,
        keep_alive: 10,
        commands: 128,
        namespaces: 1024,
        optional_commands: IdentifyController::WRITE_ZEROES,
        fused: 0,
        has_write_cache: true,
        copy_formats: CopyFormat::Same.bit() | CopyFormat::Any.bit(),
        sgls: IdentifyController::SGLS | IdentifyController::SGLS_OFFSET,
        ana: AnaLimits {
            transition_s: 10,
            capabilities: AnaLimits::ALL_STATES,
            group_max: 128,
            groups: 64,
            namespaces: 1024,
        },
        subsystem: Nqn::new("nqn.2014-08.org.example:subsystem").unwrap(),
        capsule_bytes: 64 + 16384,
    };
    let mut bytes = vec![0xff; IDENTIFY_LEN];
    identify.emit(&mut bytes);
    assert_eq!(IdentifyController::parse(&bytes), Ok(identify));
    assert_eq!(bytes[24..32], *b"rdmux   ");
    assert_eq!(bytes[512..514], [0x66, 0x44]);
    // 1,028 units of 16 bytes; a response of one.
    assert_eq!(bytes[1792..1800], [0x04, 0x04, 0, 0, 1, 0, 0, 0]);
    assert!(IdentifyController::parse(&bytes[..4095]).is_err());
    bytes[111] = 3;
    assert!(IdentifyController::parse(&bytes).is_err());
}

#[test]
fn identify_namespace__survives_the_wire() {
    let identify = IdentifyNamespace {
        blocks: 1 << 33,
        block_shift: 12,
        zeroes: true,
        is_shared: true,
        is_protected: true,
        reservations: IdentifyNamespace::RESERVATION_TYPES | 1,
        ana_group: 3,
        copy_blocks: (2048, 4096),
        copy_ranges: 128,
        fused_blocks: 8,
        nguid: [9; 16],
        accelerator: Some(AcceleratorInfo {
            algorithm: Algorithm::Lz4,
            level: 0,
            windows: 8,
            window_bytes: 1 << 20,
        }),
    };
    let mut bytes = vec![0xff; IDENTIFY_LEN];
    identify.emit(&mut bytes);
    assert_eq!(IdentifyNamespace::parse(&bytes), Ok(identify));
    bytes[130] = 8;
    assert!(IdentifyNamespace::parse(&bytes).is_err());
}

#[test]
fn namespace_identifiers__end_at_a_wrong_length() {
    let ids = NamespaceIdentifiers {
        nguid: [1; 16],
        uuid: [2; 16],
    };
    let mut bytes = vec![0xff; IDENTIFY_LEN];
    ids.emit(&mut bytes);
    assert_eq!(bytes[..4], [2, 16, 0, 0]);
    assert_eq!(bytes[20..24], [3, 16, 0, 0]);
    // The NVM command set, then the end.
    assert_eq!(bytes[40..46], [4, 1, 0, 0, 0, 0]);
    assert_eq!(NamespaceIdentifiers::parse(&bytes), ids);
    bytes[1] = 0;
    assert_eq!(NamespaceIdentifiers::parse(&bytes).uuid, [0; 16]);
    assert_eq!(NamespaceIdentifiers::parse(&[3, 16, 0, 0, 1]).uuid, [0; 16]);
}

#[test]
fn namespace_list__holds_1024() {
    let mut bytes = vec![0xff; IDENTIFY_LEN];
    emit_namespace_list((1..3000).map(NsId), &mut bytes);
    assert_eq!(parse_namespace_list(&bytes).count(), 1024);
    emit_namespace_list([NsId(2), NsId(5)].into_iter(), &mut bytes);
    assert_eq!(
        parse_namespace_list(&bytes).collect::<Vec<_>>(),
        [NsId(2), NsId(5)]
    );
}

#[test]
fn discovery_entry__survives_the_wire() {
    for (transport, address, kind) in [
        (TransportKind::Tcp, "127.0.0.1:4420", SubsystemKind::Nvm),
        (TransportKind::Rdma, "[fd00::1]:4420", SubsystemKind::Discovery),
    ] {
        let entry = DiscoveryEntry {
            transport,
            kind,
            is_secure: transport == TransportKind::Tcp,
            flags: match kind {
                SubsystemKind::Discovery => DiscoveryEntry::SAME_LOG | DiscoveryEntry::PERSISTENT,
                _ => 0,
            },
            port: 1,
            admin_queue_entries: 32,
            address: address.parse().unwrap(),
            subsystem: Nqn::new(DISCOVERY_NQN).unwrap(),
        };
        let mut bytes = vec![0xff; DISCOVERY_ENTRY_LEN];
        entry.emit(&mut bytes);
        assert_eq!(DiscoveryEntry::parse(&bytes), Ok(entry));
        assert_eq!(
            bytes[10..12],
            [if kind == SubsystemKind::Discovery { 3 } else { 0 }, 0]
        );
        if transport == TransportKind::Rdma {
            // Reliable connected, RoCEv2, RDMA_CM.
            assert_eq!(bytes[768..772], [1, 4, 1, 0]);
        }
        // Other targets pad with spaces.
        bytes[512..768]
            .iter_mut()
            .filter(|byte| **byte == 0)
            .for_each(|byte| *byte = b' ');
        assert!(DiscoveryEntry::parse(&bytes).is_ok());
        bytes[512] = b'x';
        assert!(DiscoveryEntry::parse(&bytes).is_err());
    }
}

#[test]
fn effects_log__has_an_entry_for_each_command() {
    let mut bytes = vec![0xff; 4096];
    let log = EffectsLog {
        admin: &[Opcode::IDENTIFY],
        io: &[(Opcode::READ, false), (Opcode::WRITE, true)],
    };
    log.emit(&mut bytes);
    // Bits 31:20: the scope is the controller, or a namespace.
    assert_eq!(bytes[4 * 6..4 * 7], [1, 0, 0x20, 0]);
    assert_eq!(bytes[1024 + 4..1024 + 12], [3, 0, 0x10, 0, 1, 0, 0x10, 0]);
    assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 6);
    assert_eq!(AsyncEvent::DiscoveryChanged.result(), 0x0070_f002);
    assert_eq!(AsyncEvent::NamespacesChanged.result(), 0x0004_0002);
}

#[test]
fn auth_message__survives_the_wire() {
    let messages = [
        AuthMessage::Negotiate {
            secure_channel: 0,
            hashes: vec![HashId::Sha256, HashId::Sha512],
            groups: DhGroup::ALL.to_vec(),
        },
        AuthMessage::Challenge {
            hash: HashId::Sha384,
            group: DhGroup::Ffdhe2048,
            sequence: 0x0102_0304,
            challenge: vec![1; 48],
            dh_value: vec![2; 256],
        },
        AuthMessage::Reply {
            sequence: 5,
            response: vec![3; 64],
            challenge: Some(vec![4; 64]),
            dh_value: vec![5; 1024],
        },
        AuthMessage::Reply {
            sequence: 0,
            response: vec![3; 32],
            challenge: None,
            dh_value: Vec::new(),
        },
        AuthMessage::Success1 {
            hash: HashId::Sha256,
            response: Some(vec![6; 32]),
        },
        AuthMessage::Success2,
        AuthMessage::Failure1(AuthFailure::Hash),
        AuthMessage::Failure2(AuthFailure::Failed),
    ];
    for message in messages {
        let bytes = message.emit(0x1234);
        assert!(bytes.len() <= AUTH_LEN_MAX);
        assert_eq!(AuthMessage::parse(&bytes), Ok((0x1234, message.clone())));
        // A message that is cut, as far as it has a length.
        for len in 0..bytes.len() {
            if let Ok((_, parsed)) = AuthMessage::parse(&bytes[..len]) {
                assert!(parsed == message || len < 16, "{message:?} {len}");
            }
        }
    }
}

#[test]
fn auth_negotiate__as_linux_sends_it() {
    // nvme_auth_set_dhchap_negotiate_data: one protocol, three hashes, six groups.
    let mut bytes = vec![0; 72];
    bytes[4] = 7;
    bytes[7] = 1;
    bytes[8..12].copy_from_slice(&[1, 0, 3, 6]);
    bytes[12..15].copy_from_slice(&[1, 2, 3]);
    bytes[42..48].copy_from_slice(&[0, 1, 2, 3, 4, 5]);
    let expected = AuthMessage::Negotiate {
        secure_channel: 0,
        hashes: vec![HashId::Sha256, HashId::Sha384, HashId::Sha512],
        groups: DhGroup::ALL.to_vec(),
    };
    assert_eq!(AuthMessage::parse(&bytes), Ok((7, expected)));
    bytes[10..12].copy_from_slice(&[255, 255]);
    assert!(AuthMessage::parse(&bytes).is_ok(), "no more ids than there are");
    bytes[8] = 2;
    assert!(AuthMessage::parse(&bytes).is_err(), "another protocol");
    let sqe = authentication(FabricsType::AUTHENTICATION_SEND, Cid(1), 72);
    assert_eq!(sqe.as_bytes()[40..48], [0, 1, 1, 0xe9, 72, 0, 0, 0]);
    assert!(is_nvme_authentication(&sqe) && authentication_len(&sqe) == 72);
}

#[test]
fn ranges__survive_the_wire() {
    let range = DatasetRange {
        slba: 1 << 40,
        blocks: 7,
    };
    let mut bytes = [0xff; 40];
    range.emit(&mut bytes);
    range.emit(&mut bytes[16..]);
    assert_eq!(
        DatasetRange::parse(&bytes).collect::<Vec<_>>(),
        [range; 2],
        "a part is none"
    );
    let range = CopyRange {
        nsid: NsId(3),
        slba: 9,
        blocks: 1 << 16,
        fast_only: true,
    };
    let mut bytes = [0xff; 32];
    range.emit(&mut bytes);
    assert_eq!((bytes[0], bytes[8], bytes[16], bytes[17]), (3, 9, 0xff, 0xff));
    assert_eq!(CopyRange::parse(&bytes).collect::<Vec<_>>(), [range]);
    let copy = Copy {
        slba: 1 << 33,
        ranges: 128,
        format: CopyFormat::Any as u8,
        fua: true,
    };
    let mut sqe = Sqe::new(Opcode::COPY, Cid(1), NsId(1));
    copy.emit(&mut sqe);
    assert_eq!(sqe.dword(12), 0x4000_027f);
    assert_eq!(Copy::parse(&sqe), copy);
}

#[test]
fn reservation_commands__survive_the_wire() {
    let with = |action, ignores_key, persists| ReservationCommand {
        action,
        ignores_key,
        persists,
    };
    for action in [
        ReservationAction::Register,
        ReservationAction::Unregister,
        ReservationAction::Replace,
    ] {
        for (ignores_key, persists) in [(false, None), (true, Some(true)), (false, Some(false))] {
            let command = with(action, ignores_key, persists);
            let mut sqe = Sqe::new(Opcode::RESERVATION_REGISTER, Cid(1), NsId(1));
            sqe.set_dword(10, command.dword());
            assert_eq!(ReservationCommand::register(&sqe), Some(command));
        }
    }
    for kind in ReservationType::ALL {
        for action in [
            ReservationAction::Acquire(kind),
            ReservationAction::Preempt { kind, aborts: false },
            ReservationAction::Preempt { kind, aborts: true },
        ] {
            let command = with(action, false, None);
            let mut sqe = Sqe::new(Opcode::RESERVATION_ACQUIRE, Cid(1), NsId(1));
            sqe.set_dword(10, command.dword());
            assert_eq!(ReservationCommand::acquire(&sqe), Some(command));
            sqe.set_dword(10, command.dword() | 1 << 3);
            assert_eq!(
                ReservationCommand::acquire(&sqe),
                None,
                "the key is always checked"
            );
        }
    }
    let mut sqe = Sqe::new(Opcode::RESERVATION_RELEASE, Cid(1), NsId(1));
    sqe.set_dword(10, 0x0301);
    assert_eq!(
        ReservationCommand::release(&sqe),
        Some(with(ReservationAction::Clear, false, None))
    );
    sqe.set_dword(10, 0x0700);
    assert_eq!(ReservationCommand::release(&sqe), None, "there are six types");
    let keys = ReservationKeys {
        current: 1,
        other: u64::MAX,
    };
    assert_eq!(ReservationKeys::parse(&keys.emit()), keys);
    assert_eq!(ReservationKeys::parse(&keys.emit()[..8]).other, 0);
    let report = ReservationReport {
        generation: 7,
        kind: Some(ReservationType::ExclusiveAccessAll),
        persists: true,
        controllers: vec![
            ReservationController {
                cntlid: 5,
                is_holder: true,
                key: 9,
                host: HostId([3; 16]),
            };
            2
        ],
    };
    assert_eq!(ReservationReport::parse(&report.emit()), Some(report));
}

#[test]
fn ana_log__survives_the_wire_and_any_bytes() {
    let log = AnaLog {
        changes: 3,
        groups: vec![
            AnaGroup {
                id: 1,
                changes: 2,
                state: AnaState::Optimized,
                namespaces: vec![NsId(1), NsId(9)],
            },
            AnaGroup {
                id: 4,
                changes: 3,
                state: AnaState::Inaccessible,
                namespaces: vec![],
            },
        ],
    };
    let bytes = log.emit(false);
    assert_eq!(AnaLog::parse(&bytes), Ok(log.clone()));
    for len in 0..bytes.len() {
        assert!(AnaLog::parse(&bytes[..len]).is_err(), "{len}");
    }
    assert_eq!(log.emit(true).len(), 16 + 2 * 32);
    assert_eq!(AsyncEvent::AnaChanged.result(), 0x0c_0302);
    assert_eq!(AsyncEvent::ReservationChanged.result(), 0x80_0006);
}

#[test]
fn secure_channel__has_the_codes_of_libnvme() {
    // enum nvmf_auth_sc_c; 1 is obsolete.
    use SecureChannel::{NewTlsPsk, ReplaceTlsPsk};
    let known = [0, 1, 2, 3, 4, 255].map(SecureChannel::new);
    let none = Some(SecureChannel::None);
    assert_eq!(
        known,
        [none, None, Some(NewTlsPsk), Some(ReplaceTlsPsk), None, None]
    );
    let negotiate = AuthMessage::Negotiate {
        secure_channel: NewTlsPsk as u8,
        hashes: vec![HashId::Sha384],
        groups: vec![DhGroup::Ffdhe3072],
    };
    let bytes = negotiate.emit(7);
    assert_eq!(bytes[..12], [0, 0, 0, 0, 7, 0, 2, 1, 1, 0, 1, 1]);
    assert_eq!(AuthMessage::parse(&bytes), Ok((7, negotiate)));
}
