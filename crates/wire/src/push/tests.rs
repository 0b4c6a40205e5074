use super::*;
use crate::bytes::be16;

fn name(s: &str) -> Name {
    Name::new(s).unwrap()
}

fn region(s: &str) -> Region {
    Region {
        name: name(s),
        bytes: 1 << 40,
        domain: Domain::File,
        placement: Placement::GLOBAL | Placement::PERSISTENT,
        read_only: true,
        transfer: 77,
        durable: 4096,
    }
}

/// Returns one message of each type, in the order of their codes.
fn each() -> Vec<Message> {
    let extent = |n: u64| Extent {
        offset: n << 20,
        length: 1 << 20,
        va: 0x7f00_0000_0000 + n,
        rkey: RKey(0xabcd_ef01),
    };
    vec![
        Message::Hello {
            version_min: 1,
            version_max: 3,
            client_nonce: [7; 32],
        },
        Message::Challenge {
            version: 1,
            server_nonce: [8; 32],
            server_proof: [9; 32],
        },
        Message::Proof {
            client_proof: [10; 32],
            client: [11; 16],
        },
        Message::Welcome {
            keepalive_ms: 5_000,
            mappings_max: 64,
            messages_max: 16,
            revoked: 2,
        },
        Message::Map {
            region: name("Fotos 2024/März.tar"),
            access: Access::READ | Access::WRITE,
            share: Access::READ,
            conflict: Conflict::Fail,
            offset: 4096,
            length: 0,
            transfer: 5,
        },
        Message::Mapped {
            mapping: 3,
            region_bytes: 2 << 20,
            domain: Domain::WholeSystem,
            placement: Placement::GLOBAL,
            ways: Ways::SOFTWARE_FLUSH | Ways::READ_AFTER_WRITE,
            extents: vec![extent(0), extent(1)],
        },
        Message::Unmap { mapping: 3 },
        Message::Unmapped,
        Message::Stat {
            region: name("a"),
            transfer: 5,
        },
        Message::Region(region("database.img")),
        Message::List,
        Message::Regions {
            total: 9,
            regions: vec![region("one"), region("two")],
        },
        Message::Checksum {
            region: name("one"),
            offset: 1,
            length: 2,
        },
        Message::Checksummed {
            crc: 0x1122_3344_5566_7788,
        },
        Message::Goodbye,
        Message::Error {
            code: ErrorCode::NoSuchRegion,
            text: "no region 'x': the server has one, two".into(),
        },
        Message::Flush {
            mapping: 3,
            offset: 1 << 33,
            length: 4096,
            placement: Placement::PERSISTENT,
        },
        Message::Flushed,
        Message::Write {
            region: name("one"),
            offset: 7,
            placement: Placement::empty(),
            conflict: Conflict::Break,
            bytes: vec![1, 2, 3],
        },
        Message::Written,
        Message::Read {
            region: name("one"),
            offset: 7,
            length: 65536,
            conflict: Conflict::Fail,
        },
        Message::Bytes { bytes: vec![4; 9] },
        Message::Notice {
            changes: vec![
                Change {
                    mapping: 3,
                    kind: ChangeKind::Break,
                    ms: 35_000,
                },
                Change {
                    mapping: 4,
                    kind: ChangeKind::Revoked,
                    ms: 0,
                },
            ],
        },
        Message::Noticed,
        Message::Release { mapping: 3 },
        Message::Released,
    ]
}

#[test]
fn parse__inverts_emit() {
    for (at, message) in each().into_iter().enumerate() {
        let mut bytes = vec![0xee; 3];
        message.emit(at as u64 + 100, &mut bytes);
        assert_eq!(usize::from(be16(&bytes, 0)), at + 1, "every type occurs once");
        assert_eq!(Message::parse(&bytes), Ok((at as u64 + 100, message)));
    }
}

/// Checks that the fuzzer's seeds are these messages, byte for byte: changing a layout requires a new version.
/// `RDMUX_PUSH_SEEDS_WRITE=1` writes the seeds again.
#[test]
fn emit__as_the_seeds_of_the_fuzzer() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/push");
    for (at, message) in each().into_iter().enumerate() {
        let mut bytes = Vec::new();
        message.emit(at as u64 + 100, &mut bytes);
        let file = folder.join(format!("{:02}", at + 1));
        if std::env::var_os("RDMUX_PUSH_SEEDS_WRITE").is_some() {
            std::fs::write(&file, &bytes).unwrap();
        }
        let seed = std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert_eq!(seed, bytes, "{message:?}");
    }
}

#[test]
fn emit__stat_as_documented() {
    let mut bytes = Vec::new();
    let stat = Message::Stat {
        region: name("ab"),
        transfer: 0x1112,
    };
    stat.emit(0x0102_0304_0506_0708, &mut bytes);
    let (header, body) = bytes.split_at(HEADER_LEN);
    assert_eq!(header, [0, 9, 0, 2, 0, 0, 0, 27, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(body, [2, b'a', b'b', 0, 0, 0, 0, 0, 0, 0x11, 0x12]);
}

#[test]
fn parse__truncated_at_every_byte() {
    for message in each() {
        let mut bytes = Vec::new();
        message.emit(1, &mut bytes);
        for len in 0..bytes.len() {
            assert!(Message::parse(&bytes[..len]).is_err(), "{message:?} cut to {len}");
            if len >= HEADER_LEN {
                // The same with a matching length field, so that the parser reaches the checks of the body.
                let mut cut = bytes[..len].to_vec();
                cut[4..8].copy_from_slice(&(len as u32).to_be_bytes());
                assert!(
                    Message::parse(&cut).is_err(),
                    "{message:?} cut to {len}, length field too"
                );
            }
        }
    }
}

#[test]
fn parse__bytes_after_the_end() {
    for message in each() {
        let mut bytes = Vec::new();
        message.emit(1, &mut bytes);
        bytes.push(0);
        assert!(Message::parse(&bytes).is_err());
        let len = bytes.len() as u32;
        bytes[4..8].copy_from_slice(&len.to_be_bytes());
        assert!(Message::parse(&bytes).is_err(), "{message:?}");
    }
}

#[test]
fn parse__values_not_defined() {
    let broken = |message: &Message, at: usize, value: u8| {
        let mut bytes = Vec::new();
        message.emit(1, &mut bytes);
        bytes[at] = value;
        assert!(
            Message::parse(&bytes).is_err(),
            "{message:?} with {value:#x} at {at}"
        );
    };
    broken(&Message::Goodbye, 1, 27); // type
    broken(&Message::Goodbye, 1, 0);
    broken(&Message::Goodbye, 3, 1); // version
    broken(&Message::Goodbye, 3, 3);
    let hello = Message::Hello {
        version_min: 1,
        version_max: 9,
        client_nonce: [0; 32],
    };
    broken(&hello, 3, VERSION as u8);
    let stat = Message::Stat {
        region: name("ab"),
        transfer: 0,
    };
    broken(&stat, 16, 0); // empty name
    broken(&stat, 17, 0xff); // not UTF-8
    broken(&stat, 17, 0x1b); // control character
    let map = Message::Map {
        region: name("a"),
        access: Access::READ,
        share: Access::empty(),
        conflict: Conflict::Break,
        offset: 0,
        length: 0,
        transfer: 0,
    };
    broken(&map, 21, 4); // access
    broken(&map, 25, 4); // share
    broken(&map, 26, 2); // conflict
    let write = Message::Write {
        region: name("a"),
        offset: 0,
        placement: Placement::empty(),
        conflict: Conflict::Break,
        bytes: vec![1],
    };
    broken(&write, 26, 4); // placement
    broken(&write, 27, 2); // conflict
    broken(&write, 31, 0); // no data
    broken(&write, 29, 1); // more than there may be
    let read = Message::Read {
        region: name("a"),
        offset: 0,
        length: 65536,
        conflict: Conflict::Break,
    };
    broken(&read, 29, 1); // a byte more than there may be
    broken(&read, 27, 0); // none
    let changes = vec![Change {
        mapping: 1,
        kind: ChangeKind::Break,
        ms: 1,
    }];
    broken(
        &Message::Notice {
            changes: changes.clone(),
        },
        26,
        3,
    ); // kind
    broken(&Message::Notice { changes }, 17, 2); // count
    let region = Message::Region(region("a"));
    broken(&region, 26, 5); // domain
    broken(&region, 27, 4); // placement
    broken(&region, 28, 2); // read-only mark
    broken(
        &Message::Error {
            code: ErrorCode::Io,
            text: String::new(),
        },
        17,
        11,
    );
}

#[test]
fn mapped__at_most_extents_max() {
    let extent = Extent {
        offset: 0,
        length: 1,
        va: 2,
        rkey: RKey(3),
    };
    let message = Message::Mapped {
        mapping: 0,
        region_bytes: 0,
        domain: Domain::None,
        placement: Placement::empty(),
        ways: Ways::empty(),
        extents: vec![extent; EXTENTS_MAX],
    };
    let mut bytes = Vec::new();
    message.emit(0, &mut bytes);
    assert!(bytes.len() <= CONTROL_LEN_MAX && bytes.len() + Extent::LEN > CONTROL_LEN_MAX);
    assert_eq!(Message::parse(&bytes), Ok((0, message)));
}

#[test]
fn regions__takes_what_fits() {
    let long = "n".repeat(255);
    let message = Message::regions((0..40).map(|_| region(&long)));
    let mut bytes = Vec::new();
    message.emit(0, &mut bytes);
    let (_, Message::Regions { total, regions }) = Message::parse(&bytes).unwrap() else {
        panic!()
    };
    assert_eq!((total, regions.len()), (40, (4096 - 22) / 283));
}

#[test]
fn error__text_is_cut_at_a_character() {
    let mut bytes = Vec::new();
    Message::Error {
        code: ErrorCode::Io,
        text: format!("a\n{}", "ü".repeat(4096)),
    }
    .emit(0, &mut bytes);
    let (_, Message::Error { text, .. }) = Message::parse(&bytes).unwrap() else {
        panic!()
    };
    assert!(
        text.starts_with("a ü") && bytes.len() == CONTROL_LEN_MAX,
        "{}",
        bytes.len()
    );
}

#[test]
fn name__limits() {
    assert!(
        Name::new("").is_none() && Name::new("a\u{7}").is_none() && Name::new(&"x".repeat(256)).is_none()
    );
    assert!(Name::new(&"x".repeat(255)).is_some());
}

#[test]
fn write__as_much_as_there_may_be() {
    let message = Message::Write {
        region: name(&"n".repeat(255)),
        offset: 1,
        placement: Placement::PERSISTENT,
        conflict: Conflict::Fail,
        bytes: vec![5; DATA_LEN_MAX],
    };
    let mut bytes = Vec::new();
    message.emit(3, &mut bytes);
    assert_eq!(Message::parse(&bytes), Ok((3, message)));
    // Only messages that carry data may be this long.
    bytes[1] = 7;
    assert!(Message::parse(&bytes).is_err());
}

#[test]
fn notice__at_most_changes_max() {
    let change = Change {
        mapping: 1,
        kind: ChangeKind::Revoked,
        ms: 2,
    };
    let message = Message::Notice {
        changes: vec![change; CHANGES_MAX],
    };
    let mut bytes = Vec::new();
    message.emit(3, &mut bytes);
    assert!(bytes.len() + Change::LEN > CONTROL_LEN_MAX);
    assert_eq!(Message::parse(&bytes), Ok((3, message)));
}

#[test]
fn emit__new_messages_as_documented() {
    let golden = |message: Message, hex: &str| {
        let mut bytes = Vec::new();
        message.emit(5, &mut bytes);
        let written: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(written, hex.replace(' ', ""), "{message:?}");
    };
    golden(
        Message::Map {
            region: name("ab"),
            access: Access::WRITE,
            share: Access::READ,
            conflict: Conflict::Fail,
            offset: 0x10,
            length: 0x20,
            transfer: 0x30,
        },
        "0005 0002 00000034 0000000000000005 02 6162 00000002 00000001 01 0000000000000010 0000000000000020 0000000000000030",
    );
    golden(
        Message::Flush {
            mapping: 1,
            offset: 2,
            length: 3,
            placement: Placement::PERSISTENT,
        },
        "0011 0002 00000029 0000000000000005 0000000000000001 0000000000000002 0000000000000003 02",
    );
    golden(
        Message::Write {
            region: name("a"),
            offset: 2,
            placement: Placement::PERSISTENT,
            conflict: Conflict::Break,
            bytes: vec![0xaa, 0xbb],
        },
        "0013 0002 00000022 0000000000000005 01 61 0000000000000002 02 00 00000002 aabb",
    );
    golden(
        Message::Notice {
            changes: vec![Change {
                mapping: 9,
                kind: ChangeKind::Break,
                ms: 35_000,
            }],
        },
        "0017 0002 0000001f 0000000000000005 0001 0000000000000009 01 000088b8",
    );
}
