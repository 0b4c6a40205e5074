use super::*;
use crate::bytes::be16;

fn response(psn: u32, outcome: Outcome) -> Response {
    Response {
        psn: Psn::new(psn),
        outcome,
        original: match outcome {
            Outcome::Original => 0x0102_0304_0506_0708,
            Outcome::Failed | Outcome::Done => 0,
        },
    }
}

/// Returns one message of each type, in the order of their codes.
fn each() -> Vec<Message> {
    let tenant = |name| TenantName::new(name).unwrap();
    let node = NodeId([7; 16]);
    let (source, dest) = (Qpn::new(0x01_0203), Qpn::new(0xab_cdef));
    let end = SharedEnd {
        qpn: source,
        psn: Psn::new(0xff_ffff),
        slots: 64,
        rd_atomic: 16,
        path_mtu: PathMtu::Bytes4096,
    };
    let binding = Binding {
        domain: 1 << 40,
        access: 15,
        tenant: tenant("db"),
    };
    vec![
        Message::Hello {
            version_min: 1,
            version_max: 2,
            nonce: [1; 32],
            node,
        },
        Message::Challenge {
            version: 1,
            nonce: [2; 32],
            node,
            proof: [3; 32],
        },
        Message::Proof { proof: [4; 32] },
        Message::Agreed {},
        Message::Refused { reason: Reason::Key },
        Message::Bind {
            source,
            dest,
            class: 3,
            binding: Binding {
                tenant: tenant("backup"),
                ..binding.clone()
            },
        },
        Message::Bound {
            binding: binding.clone(),
        },
        Message::Waits {},
        Message::Settled {
            source,
            dest,
            binding: Some(binding),
        },
        Message::Unbind { source, dest },
        Message::Done {},
        Message::ResolveKey {
            domain: 5,
            rkey: RKey(0x0102_0304),
        },
        Message::Key {
            rkey: RKey(6),
            start: 0x7f00_0000_0000,
            length: 1 << 33,
            access: 7,
        },
        Message::KeyGone {
            domain: 5,
            rkey: RKey(0x0102_0304),
        },
        Message::OpenQp {
            here: tenant(&"x".repeat(TenantName::LEN_MAX)),
            there: TenantName::default(),
            class: 255,
            line: 1 << 32 | 7,
            end,
        },
        Message::QpOpened { line: 8, end },
        Message::QpReady { line: 7 },
        Message::CloseQp {
            line: 7,
            failed: true,
        },
        Message::QpEnded {
            line: 7,
            messages: 12,
            executed: Some(Executed {
                expected: Psn::new(0x01_0203),
                refused: Some(Refusal {
                    psn: Psn::new(0x01_0202),
                    status: CompletionStatus::RemoteAccess,
                }),
                answers: vec![response(1, Outcome::Original), response(2, Outcome::Failed)],
            }),
        },
        Message::Engine {
            engines: Engines::new(1, &[0x2a, 0x07, 0xff]).unwrap(),
        },
    ]
}

#[test]
fn parse__what_was_emitted() {
    for (at, message) in each().into_iter().enumerate() {
        let mut bytes = vec![9];
        message.emit(at as u32 + 100, &mut bytes);
        assert_eq!(usize::from(be16(&bytes, 0)), at + 1, "{}", message.name());
        assert_eq!(Message::parse(&bytes), Ok((at as u32 + 100, message)));
    }
}

/// Checks that the fuzzer's seeds are these messages, byte for byte: changing a layout requires a new version.
/// `RDMUX_NODE_SEEDS_WRITE=1` writes the seeds again.
#[test]
fn emit__as_the_seeds_of_the_fuzzer() {
    crate::node::codec::check_seeds("node_peer", each().len(), |at, bytes| {
        each()[at].emit(at as u32 + 100, bytes);
    });
}

#[test]
fn emit__the_longest_message_fits() {
    let longest = TenantName::new(&"x".repeat(TenantName::LEN_MAX)).unwrap();
    for message in each() {
        let message = match message {
            Message::OpenQp { class, line, end, .. } => Message::OpenQp {
                here: longest.clone(),
                there: longest.clone(),
                class,
                line,
                end,
            },
            Message::QpEnded {
                line,
                messages,
                executed: Some(executed),
            } => Message::QpEnded {
                line,
                messages,
                executed: Some(Executed {
                    answers: vec![response(0, Outcome::Done); ANSWERS_MAX],
                    ..executed
                }),
            },
            Message::Engine { .. } => Message::Engine {
                engines: engines(0, ENGINES_MAX).unwrap(),
            },
            other => other,
        };
        message.emit(u32::MAX, &mut Vec::new());
    }
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
    Message::Refused { reason: Reason::Own }.emit(1, &mut bytes);
    for (at, value) in [(1, 0), (1, 99), (3, VERSION as u8 + 1), (9, 0), (9, 11)] {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        assert!(Message::parse(&bytes).is_err(), "byte {at} is {value}");
    }
    let tenant = TenantName::new("ab").unwrap();
    let binding = Binding {
        domain: 0,
        access: 0,
        tenant,
    };
    Message::Bound { binding }.emit(1, &mut bytes);
    assert_eq!(bytes[20..], [2, b'a', b'b']);
    for broken in [
        [2, b'\n', b'b'],
        [2, 0xff, b'b'],
        [3, b'a', b'b'],
        [1, b'a', b'b'],
    ] {
        bytes[20..].copy_from_slice(&broken);
        assert!(Message::parse(&bytes).is_err(), "{broken:?}");
    }
}

#[test]
fn parse__undefined_values_of_what_was_executed() {
    let mut bytes = Vec::new();
    let executed = Executed {
        expected: Psn::new(1),
        refused: Some(Refusal {
            psn: Psn::new(2),
            status: CompletionStatus::RemoteAccess,
        }),
        answers: vec![response(3, Outcome::Done)],
    };
    let message = Message::QpEnded {
        line: 1,
        messages: 2,
        executed: Some(executed),
    };
    message.emit(1, &mut bytes);
    // The status, the number of responses, the outcome.
    for (at, is, value) in [(30, 10, 3), (31, 1, ANSWERS_MAX as u8 + 1), (36, 1, 3)] {
        let mut bytes = bytes.clone();
        assert_eq!(bytes[at], is, "byte {at}");
        bytes[at] = value;
        assert!(Message::parse(&bytes).is_err(), "byte {at} is {value}");
    }
}

fn engines(own: u8, count: usize) -> Option<Engines> {
    let bits: Vec<u8> = (0..count).map(|bits| bits as u8).collect();
    Engines::new(own, &bits)
}

#[test]
fn new__engines() {
    let known = Engines::new(1, &[0x2a, 0x07]).unwrap();
    assert_eq!(known.own(), 1);
    let found = [0x2a_0001, 0x07_ffff, 0x08_0000].map(|number| known.of(Qpn::new(number)));
    assert_eq!(found, [0, 1, 0], "the first one answers for what nobody has");
    assert!(known.are_those_of(&Engines::new(0, &[0x2a, 0x07]).unwrap()));
    assert!(!known.are_those_of(&Engines::new(1, &[0x2a, 0x08]).unwrap()));
    assert!(engines(0, 1).is_some() && engines(63, ENGINES_MAX).is_some());
    let refused = [engines(0, 0), engines(1, 1), engines(0, ENGINES_MAX + 1)];
    assert_eq!(refused, [None, None, None]);
    assert_eq!(Engines::new(0, &[1, 2, 1]), None);
}

/// A number that none of the engines has, more engines than a node can have, fewer than it says, and two that are the same.
#[test]
fn parse__undefined_engines() {
    let mut bytes = Vec::new();
    let engines = Engines::new(1, &[0x2a, 0x07]).unwrap();
    Message::Engine { engines }.emit(0, &mut bytes);
    assert_eq!(bytes[8..], [1, 2, 0x2a, 0x07]);
    for (at, value) in [
        (8, 2),
        (8, 255),
        (9, 0),
        (9, 1),
        (9, 3),
        (9, 65),
        (9, 255),
        (11, 0x2a),
    ] {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        assert!(Message::parse(&bytes).is_err(), "byte {at} is {value}");
    }
}

#[test]
fn parse__the_engine_that_is_wanted() {
    let qpn = Qpn::new(0x2a_0102);
    let padded = [&emit_wanted(qpn)[..], &[0; 52]].concat();
    assert_eq!(parse_wanted(&padded), qpn);
    assert_eq!(parse_wanted(&[0x2a, 1, 2]), Qpn::new(0));
    assert_eq!(parse_wanted(&[0xff; 56]), Qpn::new(0xff_ffff));
}

#[test]
fn new__names_of_tenants() {
    assert_eq!(TenantName::default(), TenantName::new("").unwrap());
    assert!(TenantName::new(&"ä".repeat(32)).is_some());
    for name in ["a\tb".to_owned(), "x".repeat(TenantName::LEN_MAX + 1)] {
        assert_eq!(TenantName::new(&name), None);
    }
}

#[test]
fn is_question__those_that_others_answer() {
    let questions: Vec<_> = each()
        .iter()
        .filter(|message| message.is_question())
        .map(Message::name)
        .collect();
    let expected = "Bind Settled Unbind ResolveKey KeyGone OpenQp QpReady CloseQp QpEnded";
    assert_eq!(questions.join(" "), expected);
}
