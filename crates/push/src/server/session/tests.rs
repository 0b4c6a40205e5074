use rdmux_wire::RKey;
use rdmux_wire::push::Extent;

use super::*;

fn shared() -> Arc<Shared> {
    let region = |name: &str| Arc::new(Region::anonymous(Name::new(name).unwrap(), 1000).unwrap());
    let constant = Region::anonymous(Name::new("constant").unwrap(), 10).unwrap();
    let constant = Region::new(
        constant.name().clone(),
        constant.memory().clone(),
        constant.domain(),
        true,
    );
    Arc::new(Shared {
        key: Key::new([1; 32]),
        regions: vec![region("a"), region("b"), Arc::new(constant)],
        keepalive_ms: 5_000,
        mappings_max: 2,
        messages_max: 3,
    })
}

pub(in crate::server) fn bytes(message: &Message) -> Vec<u8> {
    let mut out = Vec::new();
    message.emit(9, &mut out);
    out
}

pub(in crate::server) fn hello() -> Message {
    Message::Hello {
        version_min: VERSION,
        version_max: VERSION,
        client_nonce: [5; 32],
    }
}

fn proof(key: u8) -> Message {
    proof_of(key, [7; 16])
}

pub(in crate::server) fn proof_of(key: u8, client: [u8; 16]) -> Message {
    let transcript = Transcript {
        version_min: VERSION,
        version_max: VERSION,
        version: VERSION,
        client_nonce: [5; 32],
        server_nonce: [6; 32],
        client,
    };
    Message::Proof {
        client_proof: transcript.proof(&Key::new([key; 32]), Role::Client),
        client,
    }
}

fn ready() -> Session {
    let mut session = Session::new(shared(), [6; 32]);
    assert!(matches!(
        session.handle(&bytes(&hello())),
        (9, Action::Send(Message::Challenge { .. }))
    ));
    let (_, action) = session.handle(&bytes(&proof(1)));
    assert!(matches!(action, Action::Welcome { client } if client == [7; 16]));
    assert!(session.is_ready());
    session
}

fn map(region: &str, access: Access, offset: u64, length: u64) -> Message {
    Message::Map {
        region: Name::new(region).unwrap(),
        access,
        share: Access::empty(),
        conflict: Conflict::Break,
        offset,
        length,
        transfer: 0,
    }
}

fn flush(mapping: u64, offset: u64, length: u64, placement: Placement) -> Message {
    Message::Flush {
        mapping,
        offset,
        length,
        placement,
    }
}

fn write(region: &str, offset: u64, bytes: usize, placement: Placement) -> Message {
    Message::Write {
        region: Name::new(region).unwrap(),
        offset,
        placement,
        conflict: Conflict::Break,
        bytes: vec![1; bytes],
    }
}

fn read(region: &str, offset: u64, length: u32) -> Message {
    Message::Read {
        region: Name::new(region).unwrap(),
        offset,
        length,
        conflict: Conflict::Break,
    }
}

fn refused(session: &mut Session, message: &Message) -> ErrorCode {
    match session.handle(&bytes(message)).1 {
        Action::Send(Message::Error { code, .. }) => code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn handle__nothing_but_the_handshake_before_welcome() {
    let all = [
        map("a", Access::READ, 0, 0),
        Message::Unmap { mapping: 1 },
        Message::Stat {
            region: Name::new("a").unwrap(),
            transfer: 0,
        },
        Message::List,
        Message::Checksum {
            region: Name::new("a").unwrap(),
            offset: 0,
            length: 1,
        },
        Message::Goodbye,
        Message::Unmapped,
        Message::Noticed,
        Message::Release { mapping: 1 },
        flush(1, 0, 1, Placement::GLOBAL),
        write("a", 0, 1, Placement::empty()),
        read("a", 0, 1),
    ];
    for greeted in [false, true] {
        for message in &all {
            let mut session = Session::new(shared(), [6; 32]);
            if greeted {
                session.handle(&bytes(&hello()));
            }
            let (_, action) = session.handle(&bytes(message));
            assert!(
                matches!(
                    action,
                    Action::End(
                        Some(Message::Error {
                            code: ErrorCode::Protocol,
                            ..
                        }),
                        _
                    )
                ),
                "{message:?}: {action:?}"
            );
            let (_, action) = session.handle(&bytes(&hello()));
            assert!(matches!(action, Action::End(None, _)), "it stays ended");
        }
    }
    let mut session = Session::new(shared(), [6; 32]);
    assert!(matches!(
        session.handle(&bytes(&proof(1))).1,
        Action::End(Some(_), _)
    ));
}

#[test]
fn handle__wrong_proof_or_version_ends() {
    let mut session = Session::new(shared(), [6; 32]);
    session.handle(&bytes(&hello()));
    let (_, action) = session.handle(&bytes(&proof(2)));
    assert!(
        matches!(action, Action::End(Some(_), EndReason::WrongKey)),
        "{action:?}"
    );
    assert!(!session.is_ready());

    let mut session = Session::new(shared(), [6; 32]);
    let newer = Message::Hello {
        version_min: VERSION + 1,
        version_max: VERSION + 2,
        client_nonce: [0; 32],
    };
    let (_, action) = session.handle(&bytes(&newer));
    assert!(
        matches!(action, Action::End(Some(_), EndReason::Version)),
        "{action:?}"
    );
}

#[test]
fn handle__malformed_ends_without_an_answer() {
    let mut session = ready();
    let (_, action) = session.handle(&[1, 2, 3]);
    assert!(matches!(action, Action::End(None, EndReason::Protocol(_))));
}

#[test]
fn handle__map_checks_name_rights_and_bounds() {
    let mut session = ready();
    let rw = Access::READ | Access::WRITE;
    assert_eq!(
        refused(&mut session, &map("x", rw, 0, 1)),
        ErrorCode::NoSuchRegion
    );
    assert_eq!(
        refused(&mut session, &map("constant", rw, 0, 1)),
        ErrorCode::ReadOnly
    );
    assert_eq!(
        refused(&mut session, &map("a", Access::empty(), 0, 1)),
        ErrorCode::Protocol
    );
    for (offset, length) in [
        (0, 1001),
        (1000, 0),
        (1000, 1),
        (u64::MAX, 2),
        (1, u64::MAX),
        (2000, 0),
    ] {
        let code = refused(&mut session, &map("a", rw, offset, length));
        assert_eq!(code, ErrorCode::OutOfRange, "{offset} {length}");
    }
    let (_, action) = session.handle(&bytes(&map("a", rw, 10, 0)));
    let Action::Map(map) = action else { panic!() };
    assert_eq!((map.offset, map.length), (10, 990));
}

#[test]
fn handle__map_up_to_the_limit_and_again_after_unmap() {
    let mut session = ready();
    let message = map("a", Access::READ, 0, 10);
    let extent = Extent {
        offset: 0,
        length: 10,
        va: 0,
        rkey: RKey(1),
    };
    let mut ids = Vec::new();
    for _ in 0..2 {
        let Action::Map(map) = session.handle(&bytes(&message)).1 else {
            panic!()
        };
        let made = Registered {
            extent: Some(extent),
            ways: map.region.ways(),
        };
        assert!(matches!(session.mapped(&map, Ok(made)), Message::Mapped { .. }));
        ids.push(map.mapping);
    }
    assert_ne!(ids[0], ids[1]);
    assert_eq!(refused(&mut session, &message), ErrorCode::Busy);
    let unmap = Message::Unmap { mapping: ids[0].0 };
    assert!(matches!(session.handle(&bytes(&unmap)).1, Action::Unmap(id) if id == ids[0]));
    assert_eq!(refused(&mut session, &unmap), ErrorCode::Protocol);
    let Action::Map(map) = session.handle(&bytes(&message)).1 else {
        panic!()
    };
    // A mapping that could not be made does not count.
    session.mapped(&map, Err((ErrorCode::Busy, String::new())));
    assert!(matches!(session.handle(&bytes(&message)).1, Action::Map(_)));
}

#[test]
fn handle__stat_list_checksum_goodbye() {
    let mut session = ready();
    let name = |name: &str| Name::new(name).unwrap();
    let stat = |region| Message::Stat { region, transfer: 0 };
    let (_, action) = session.handle(&bytes(&stat(name("b"))));
    assert!(matches!(action, Action::Send(Message::Region(region)) if region.bytes == 1000));
    assert_eq!(refused(&mut session, &stat(name("x"))), ErrorCode::NoSuchRegion);
    let (_, action) = session.handle(&bytes(&Message::List));
    assert!(matches!(action, Action::Send(Message::Regions { total: 3, .. })));
    let checksum = |region, length| Message::Checksum {
        region,
        offset: 1,
        length,
    };
    assert_eq!(
        refused(&mut session, &checksum(name("x"), 1)),
        ErrorCode::NoSuchRegion
    );
    assert_eq!(
        refused(&mut session, &checksum(name("a"), 1000)),
        ErrorCode::OutOfRange
    );
    let (_, action) = session.handle(&bytes(&checksum(name("a"), 999)));
    assert!(matches!(action, Action::Checksum { .. }));
    let (_, action) = session.handle(&bytes(&Message::Goodbye));
    assert!(matches!(action, Action::End(None, EndReason::Goodbye)));
}

#[test]
fn handle__proof_for_another_client_is_wrong() {
    let mut session = Session::new(shared(), [6; 32]);
    session.handle(&bytes(&hello()));
    let Message::Proof { client_proof, .. } = proof(1) else {
        panic!()
    };
    let stolen = Message::Proof {
        client_proof,
        client: [8; 16],
    };
    let (_, action) = session.handle(&bytes(&stolen));
    assert!(
        matches!(action, Action::End(Some(_), EndReason::WrongKey)),
        "{action:?}"
    );
}

#[test]
fn handle__flush_checks_mapping_range_right_and_domain() {
    let mut session = ready();
    let Action::Map(_) = session.handle(&bytes(&map("a", Access::WRITE, 100, 200))).1 else {
        panic!()
    };
    let Action::Map(_) = session.handle(&bytes(&map("b", Access::READ, 0, 0))).1 else {
        panic!()
    };
    for (message, code) in [
        (flush(3, 100, 1, Placement::GLOBAL), ErrorCode::Protocol),
        (flush(2, 0, 1, Placement::GLOBAL), ErrorCode::ReadOnly),
        (flush(1, 99, 2, Placement::GLOBAL), ErrorCode::OutOfRange),
        (flush(1, 100, 201, Placement::GLOBAL), ErrorCode::OutOfRange),
        (flush(1, u64::MAX, 2, Placement::GLOBAL), ErrorCode::OutOfRange),
        (flush(1, 100, 1, Placement::PERSISTENT), ErrorCode::NotSupported),
        (flush(1, 100, 1, Placement::empty()), ErrorCode::NotSupported),
    ] {
        assert_eq!(refused(&mut session, &message), code, "{message:?}");
    }
    let good = bytes(&flush(1, 100, 200, Placement::GLOBAL));
    assert!(matches!(
        session.handle(&good).1,
        Action::Flush {
            mapping: MappingId(1),
            ..
        }
    ));
    // Bytes written through a mapping may still be flushed when it is over.
    let release = bytes(&Message::Release { mapping: 1 });
    assert!(matches!(
        session.handle(&release).1,
        Action::Release(MappingId(1))
    ));
    assert!(!session.is_live(MappingId(1)));
    assert!(matches!(
        session.handle(&good).1,
        Action::Flush {
            mapping: MappingId(1),
            ..
        }
    ));
    assert!(matches!(
        session.handle(&release).1,
        Action::Release(MappingId(1))
    ));
    let unmap = bytes(&Message::Unmap { mapping: 1 });
    assert!(matches!(session.handle(&unmap).1, Action::Unmap(MappingId(1))));
    assert!(matches!(
        session.handle(&good).1,
        Action::Send(Message::Error { .. })
    ));
}

#[test]
fn handle__ordinary_reads_and_writes_are_checked() {
    let mut session = ready();
    for (message, code) in [
        (write("x", 0, 1, Placement::empty()), ErrorCode::NoSuchRegion),
        (write("constant", 0, 1, Placement::empty()), ErrorCode::ReadOnly),
        (write("a", 1000, 1, Placement::empty()), ErrorCode::OutOfRange),
        (write("a", u64::MAX, 2, Placement::empty()), ErrorCode::OutOfRange),
        (write("a", 0, 1, Placement::PERSISTENT), ErrorCode::NotSupported),
        (read("x", 0, 1), ErrorCode::NoSuchRegion),
        (read("a", 999, 2), ErrorCode::OutOfRange),
    ] {
        assert_eq!(refused(&mut session, &message), code, "{message:?}");
    }
    let (_, action) = session.handle(&bytes(&write("b", 998, 2, Placement::GLOBAL)));
    assert!(
        matches!(action, Action::Write(ordinary, bytes, _) if ordinary.number == RegionId(1) && bytes == [1, 1])
    );
    let (_, action) = session.handle(&bytes(&read("constant", 0, 10)));
    assert!(matches!(action, Action::Read(ordinary) if ordinary.length == 10));
    let (_, action) = session.handle(&bytes(&Message::Noticed));
    assert!(matches!(action, Action::Noticed(9)));
}
