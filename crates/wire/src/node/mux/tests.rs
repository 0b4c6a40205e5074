use super::*;

fn message(kind: Kind) -> (Header, Vec<u8>) {
    let (length, extra, body) = match kind {
        Kind::Send => (3, Extra::Invalidate(RKey(0x0102_0304)), vec![7, 8, 9]),
        Kind::Placed => (1 << 20, Extra::None, vec![]),
        Kind::WriteImm => (5, Extra::Imm(0x5566_7788), vec![]),
        Kind::Receives => {
            let mut body = vec![];
            receives().iter().for_each(|receive| receive.emit(&mut body));
            (3, Extra::None, body)
        }
        Kind::Slots => (0, Extra::None, vec![]),
        Kind::Fail => (0, Extra::Status(CompletionStatus::LocalLength), vec![]),
        Kind::Withdraw => (0, Extra::Withdraw(RKey(0x0102_0304)), vec![]),
        Kind::Withdrawn => (0, Extra::Withdrawn(u32::MAX), vec![]),
    };
    let header = Header {
        kind,
        is_solicited: kind.takes_receive(),
        destination: Qpn::new(0x12_3456),
        source: Qpn::new(0xab_cdef),
        sequence: 0xffff_fffe,
        length,
        extra,
        emptied: 0x8000_0001,
    };
    (header, body)
}

fn receives() -> [Receive; 3] {
    let element = |va, length| ReceiveElement {
        va,
        rkey: RKey(0x0a0b_0c0d),
        length,
    };
    [
        Receive {
            capacity: 64,
            is_faulty: false,
            elements: vec![],
        },
        Receive {
            capacity: 9000,
            is_faulty: false,
            elements: vec![element(0x1_0000_0000, 1000), element(u64::MAX - 8000, 8000)],
        },
        Receive {
            capacity: 1 << 20,
            is_faulty: true,
            elements: vec![],
        },
    ]
}

fn emitted((header, body): &(Header, Vec<u8>)) -> Vec<u8> {
    let mut bytes = [0xee; HEADER_LEN];
    header.emit(&mut bytes);
    [&bytes[..], body].concat()
}

#[test]
fn header__bytes() {
    let bytes = emitted(&message(Kind::WriteImm));
    #[rustfmt::skip]
    let expected = [
        3, 0b101, 0, 0, 0x56, 0x34, 0x12, 0, 0xef, 0xcd, 0xab, 0, 0xfe, 0xff, 0xff, 0xff,
        5, 0, 0, 0, 0x88, 0x77, 0x66, 0x55, 1, 0, 0, 0x80, 0, 0, 0, 0,
    ];
    assert_eq!(bytes, expected);
}

#[test]
fn header__round_trip_of_each_kind() {
    for &kind in Kind::VARIANTS {
        let message = message(kind);
        let bytes = emitted(&message);
        let parsed = Header::parse(&bytes).unwrap();
        assert_eq!(parsed, (message.0, message.1.as_slice()));
    }
}

#[test]
fn receive__bytes() {
    let mut bytes = vec![];
    receives()[1].emit(&mut bytes);
    #[rustfmt::skip]
    let expected = [
        0x28, 0x23, 0, 0, 2, 0, 0, 0,
        0, 0, 0, 0, 1, 0, 0, 0, 0x0d, 0x0c, 0x0b, 0x0a, 0xe8, 3, 0, 0,
        0xbf, 0xe0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x0d, 0x0c, 0x0b, 0x0a, 0x40, 0x1f, 0, 0,
    ];
    assert_eq!(bytes, expected);
    assert_eq!(bytes.len(), receives()[1].emitted_len());
    assert_eq!(Receive::parse_all(1, &bytes), Ok(vec![receives()[1].clone()]));
}

#[test]
fn parse_all__each_receive() {
    let (header, body) = message(Kind::Receives);
    assert_eq!(Receive::parse_all(header.length, &body), Ok(receives().to_vec()));
    for count in [0, 2, 4, u32::MAX] {
        assert!(Receive::parse_all(count, &body).is_err(), "{count} receives");
    }
    for len in 0..body.len() {
        assert!(Receive::parse_all(3, &body[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn parse_all__refuses_what_is_not_defined() {
    let mut good = vec![];
    receives()[1].emit(&mut good);
    // The capacity, the number of elements, flags, the end of an element, the length of one.
    for (at, value) in [(0, 0x29), (4, 33), (4, 3), (6, 2), (7, 1), (24, 0xff), (20, 0xe9)] {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert!(Receive::parse_all(1, &bytes).is_err(), "byte {at}: {value}");
    }
    let mut long = vec![];
    let receive = Receive {
        capacity: MESSAGE_BYTES_MAX + 1,
        ..receives()[0].clone()
    };
    receive.emit(&mut long);
    assert!(Receive::parse_all(1, &long).is_err());
}

#[test]
fn parse__refuses_what_is_not_defined() {
    for &kind in Kind::VARIANTS {
        let good = emitted(&message(kind));
        for (at, value) in [
            (0, 0),
            (0, 9),
            (1, 0b1000),
            (1, 0b11),
            (2, 1),
            (3, 1),
            (7, 1),
            (11, 1),
            (19, 0x81),
            (28, 1),
            (31, 1),
        ] {
            let mut bytes = good.clone();
            bytes[at] = value;
            assert!(Header::parse(&bytes).is_err(), "{kind:?}, byte {at}: {value}");
        }
        for len in 0..HEADER_LEN {
            assert!(Header::parse(&good[..len]).is_err());
        }
        let mut more = good.clone();
        more.push(0);
        assert_eq!(Header::parse(&more).is_ok(), kind == Kind::Receives);
    }
}

#[test]
fn parse__refuses_what_a_kind_cannot_have() {
    let header = |kind, extra, is_solicited, length| Header {
        extra,
        is_solicited,
        length,
        ..message(kind).0
    };
    let status = Extra::Status(CompletionStatus::Success);
    for (header, body) in [
        (header(Kind::Send, Extra::None, false, 4097), 4097),
        (header(Kind::Send, Extra::None, false, 2), 3),
        (header(Kind::Placed, Extra::None, false, 2), 2),
        (header(Kind::Placed, Extra::None, false, MESSAGE_BYTES_MAX + 1), 0),
        (header(Kind::WriteImm, Extra::None, false, 2), 0),
        (header(Kind::WriteImm, Extra::Invalidate(RKey(1)), false, 2), 0),
        (header(Kind::Receives, Extra::None, false, 0), 0),
        (header(Kind::Receives, Extra::None, false, 2), 15),
        (header(Kind::Receives, Extra::None, true, 1), 8),
        (header(Kind::Receives, Extra::Imm(1), false, 1), 8),
        (header(Kind::Slots, Extra::Imm(1), false, 0), 0),
        (header(Kind::Slots, Extra::None, true, 0), 0),
        (header(Kind::Fail, status, false, 0), 0),
        (header(Kind::Fail, Extra::None, false, 0), 0),
        (header(Kind::Withdraw, Extra::Withdraw(RKey(1)), false, 1), 0),
        (header(Kind::Withdraw, Extra::Imm(1), false, 0), 0),
        (header(Kind::Withdrawn, Extra::Withdrawn(1), false, 1), 0),
        (header(Kind::Withdrawn, Extra::Withdrawn(1), true, 0), 0),
    ] {
        let bytes = emitted(&(header, vec![0; body]));
        assert!(Header::parse(&bytes).is_err(), "{header:?}");
    }
}
