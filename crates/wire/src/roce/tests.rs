use super::*;
use crate::vectors::{self, packet};
use crate::{Malformed, Psn, Qpn, RKey};

const VA: u64 = 0x7f12_3456_7000;
const RKEY: RKey = RKey(0xcafe_0102);

/// Returns the BTH of every test packet that requests an acknowledgement and has `pad` bytes of padding.
fn bth(operation: Operation, pad: u8) -> Bth {
    Bth {
        pad,
        ack_req: true,
        ..Bth::new(Opcode::rc(operation), Qpn::new(0x12_abcd), Psn::new(0xfe_dcba))
    }
}

fn parse(bytes: &[u8]) -> Packet<'_> {
    Packet::parse(bytes).unwrap()
}

#[test]
fn from_code__inverts_code_for_all_256() {
    let mut defined = 0;
    for code in 0..=u8::MAX {
        if let Some(opcode) = Opcode::from_code(code) {
            assert_eq!(opcode.code(), code);
            defined += 1;
        }
    }
    // RC and XRC have all 25 operations, UC the 12 of SEND and WRITE, UD two.
    assert_eq!(defined, 25 + 25 + 12 + 2);
    for operation in Operation::ALL {
        assert_eq!(Opcode::from_code(operation as u8), Some(Opcode::rc(operation)));
    }
}

#[test]
fn from_code__codes_with_no_meaning_here() {
    // Holes, UC READ, reliable datagram, UD SEND First, CNP: none of them is defined.
    for code in [0x15, 0x18, 0x1b, 0x1e, 0x1f, 0x2c, 0x40, 0x60, 0x81, 0xff] {
        assert_eq!(Opcode::from_code(code), None, "{code:#x}");
    }
}

#[test]
fn ext__lengths_by_opcode() {
    for (code, len) in [
        (0x00, 0),
        (0x03, 4),
        (0x06, 16),
        (0x07, 0),
        (0x0b, 20),
        (0x0c, 16),
        (0x0d, 4),
        (0x0e, 0),
        (0x11, 4),
        (0x12, 12),
        (0x13, 28),
        (0x17, 4),
        (0x1c, 20),
        (0x1d, 16),
        (0x64, 8),
        (0x65, 12),
        (0xa0, 4),
        (0xad, 4),
    ] {
        assert_eq!(Opcode::from_code(code).unwrap().ext().len(), len, "{code:#x}");
    }
}

#[test]
fn position__by_operation() {
    use Position::*;
    for (operation, position) in [
        (Operation::SendFirst, First),
        (Operation::SendLastInvalidate, Last),
        (Operation::WriteMiddle, Middle),
        (Operation::WriteLastImm, Last),
        (Operation::ReadResponseMiddle, Middle),
        (Operation::ReadRequest, Only),
        (Operation::Flush, Only),
        (Operation::AtomicAcknowledge, Only),
    ] {
        assert_eq!(operation.position(), position, "{operation:?}");
    }
}

#[test]
fn parse__send_only_imm() {
    let bytes = packet("SEND only imm");
    let packet = parse(&bytes);
    assert_eq!(
        packet.bth,
        Bth {
            solicited: true,
            ..bth(Operation::SendOnlyImm, 3)
        }
    );
    assert_eq!(packet.imm(), Some(0xdead_beef));
    assert_eq!(packet.payload(), b"01234");
    assert_eq!(packet.icrc(), u32::from_le_bytes([0xbe, 0xea, 0x52, 0x13]));
    assert_eq!(
        (packet.reth(), packet.aeth(), packet.deth(), packet.feth()),
        (None, None, None, None)
    );
}

#[test]
fn parse__send_only_without_payload() {
    let bytes = packet("SEND only, FECN and BECN");
    let packet = parse(&bytes);
    assert!(packet.bth.fecn && packet.bth.becn && !packet.bth.ack_req && packet.payload().is_empty());
}

#[test]
fn parse__send_last_invalidate() {
    let bytes = packet("SEND last invalidate");
    assert_eq!(parse(&bytes).invalidate(), Some(RKey(0x1122_3344)));
    assert_eq!(parse(&bytes).payload(), b"0123");
}

#[test]
fn parse__write() {
    let bytes = packet("WRITE only");
    assert_eq!(parse(&bytes).bth, bth(Operation::WriteOnly, 1));
    assert_eq!(
        parse(&bytes).reth(),
        Some(Reth {
            va: VA,
            rkey: RKEY,
            length: 4096
        })
    );
    assert_eq!(parse(&bytes).payload(), b"0123456789:");
    let bytes = packet("WRITE only imm");
    assert_eq!(
        parse(&bytes).reth(),
        Some(Reth {
            va: VA,
            rkey: RKEY,
            length: 4096
        })
    );
    assert_eq!(
        (parse(&bytes).imm(), parse(&bytes).payload()),
        (Some(0x0102_0304), &b"01234567"[..])
    );
}

#[test]
fn parse__read() {
    let bytes = packet("READ request");
    assert_eq!(
        parse(&bytes).reth(),
        Some(Reth {
            va: VA,
            rkey: RKEY,
            length: 4096
        })
    );
    assert!(parse(&bytes).payload().is_empty());
    let bytes = packet("READ response first");
    assert_eq!(
        parse(&bytes).aeth(),
        Some(Aeth {
            syndrome: Syndrome::ACK,
            msn: 9
        })
    );
    assert_eq!(parse(&bytes).payload(), b"01234567");
}

#[test]
fn parse__acknowledge() {
    let bytes = packet("ACK");
    assert_eq!(
        parse(&bytes).aeth(),
        Some(Aeth {
            syndrome: Syndrome::ACK,
            msn: 42
        })
    );
    let bytes = packet("RNR NAK, v6");
    assert_eq!(
        parse(&bytes).aeth(),
        Some(Aeth {
            syndrome: Syndrome::RnrNak { timer: 14 },
            msn: 42
        })
    );
}

#[test]
fn parse__atomic() {
    let bytes = packet("CAS");
    let atomic = AtomicEth {
        va: VA + 8,
        rkey: RKEY,
        swap_or_add: 0x1111,
        compare: 0x2222,
    };
    assert_eq!(parse(&bytes).atomic(), Some(atomic));
    let bytes = packet("ATOMIC ACK");
    assert_eq!(
        parse(&bytes).aeth(),
        Some(Aeth {
            syndrome: Syndrome::ACK,
            msn: 256
        })
    );
    assert_eq!(parse(&bytes).atomic_ack(), Some(0x8877_6655_4433_2211));
}

#[test]
fn parse__flush() {
    let bytes = packet("FLUSH");
    let feth = Feth {
        placement: Placement::PERSISTENT,
        selectivity: Selectivity::MemoryRegion,
    };
    assert_eq!(parse(&bytes).bth, bth(Operation::Flush, 0));
    assert_eq!(parse(&bytes).feth(), Some(feth));
    assert_eq!(
        parse(&bytes).reth(),
        Some(Reth {
            va: VA,
            rkey: RKEY,
            length: 4096
        })
    );
}

#[test]
fn parse__atomic_write() {
    let bytes = packet("ATOMIC WRITE");
    assert_eq!(
        parse(&bytes).reth(),
        Some(Reth {
            va: VA + 8,
            rkey: RKEY,
            length: 8
        })
    );
    assert_eq!(parse(&bytes).payload(), [0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn parse__other_transports() {
    let bytes = packet("UD SEND only");
    assert_eq!(
        parse(&bytes).deth(),
        Some(Deth {
            qkey: GSI_QKEY,
            src_qpn: Qpn::GSI
        })
    );
    assert_eq!(
        (parse(&bytes).bth.dest_qpn, parse(&bytes).payload()),
        (Qpn::GSI, &b"0123"[..])
    );
    let bytes = packet("XRC WRITE only");
    assert_eq!(parse(&bytes).xrc_srqn(), Some(0x777));
    assert_eq!(
        parse(&bytes).reth(),
        Some(Reth {
            va: VA,
            rkey: RKEY,
            length: 4096
        })
    );
    let bytes = packet("UC SEND only, id 0xbeef");
    assert_eq!(
        parse(&bytes).bth.opcode,
        Opcode {
            transport: Transport::Uc,
            operation: Operation::SendOnly
        }
    );
}

#[test]
fn parse__truncated_at_every_byte() {
    for vector in vectors::all() {
        let whole = parse(&vector.packet);
        let min = vector.packet.len() - whole.payload().len();
        for len in 0..vector.packet.len() {
            // The payload has no length field: the parser notices only a cut into headers, pad or ICRC.
            assert_eq!(
                Packet::parse(&vector.packet[..len]).is_err(),
                len < min,
                "{} cut to {len}",
                vector.name
            );
        }
    }
}

#[test]
fn parse__values_not_defined() {
    let broken = |name: &str, at: usize, value: u8| {
        let mut bytes = packet(name);
        bytes[at] = value;
        let error = Packet::parse(&bytes).unwrap_err();
        assert!(matches!(error, Malformed::Undefined { .. }), "{name}: {error}");
    };
    broken("ACK", 0, 0x15); // opcode
    broken("ACK", 1, 0x41); // transport version
    broken("ACK", 12, 0x40); // syndrome class
    broken("ACK", 12, 0x64); // NAK code of reliable datagram
    broken("FLUSH", 15, 0x22); // selectivity
    broken("FLUSH", 15, 0x10); // placement: none
    broken("FLUSH", 15, 0x14); // placement: reserved bit
}

/// Writes the headers over stale bytes and compares everything except the ICRC, which [`crate::roce::icrc`] tests.
fn emitted(name: &str, bth: Bth, ext: impl FnOnce(&mut [u8]), payload: &[u8]) {
    let expected = packet(name);
    let mut bytes = vec![0xee; expected.len() - ICRC_LEN];
    let at = Bth::LEN + bth.opcode.ext().len();
    bth.emit(&mut bytes);
    ext(&mut bytes[Bth::LEN..at]);
    bytes[at..at + payload.len()].copy_from_slice(payload);
    bytes[at + payload.len()..].fill(0);
    assert_eq!(bytes, expected[..bytes.len()], "{name}");
}

#[test]
fn emit__headers() {
    let reth = Reth {
        va: VA,
        rkey: RKEY,
        length: 4096,
    };
    emitted(
        "WRITE only",
        bth(Operation::WriteOnly, 1),
        |b| reth.emit(b),
        b"0123456789:",
    );
    emitted(
        "READ request",
        bth(Operation::ReadRequest, 0),
        |b| reth.emit(b),
        b"",
    );
    let feth = Feth {
        placement: Placement::PERSISTENT,
        selectivity: Selectivity::MemoryRegion,
    };
    let flush = |b: &mut [u8]| {
        feth.emit(b);
        reth.emit(&mut b[Feth::LEN..]);
    };
    emitted("FLUSH", bth(Operation::Flush, 0), flush, b"");
    let quiet = |operation| Bth {
        ack_req: false,
        ..bth(operation, 0)
    };
    let aeth = Aeth {
        syndrome: Syndrome::RnrNak { timer: 14 },
        msn: 42,
    };
    emitted(
        "RNR NAK, v6",
        quiet(Operation::Acknowledge),
        |b| aeth.emit(b),
        b"",
    );
    let atomic = AtomicEth {
        va: VA + 8,
        rkey: RKEY,
        swap_or_add: 0x1111,
        compare: 0x2222,
    };
    emitted("CAS", quiet(Operation::CompareSwap), |b| atomic.emit(b), b"");
    let ud = Opcode {
        transport: Transport::Ud,
        operation: Operation::SendOnly,
    };
    let deth = Deth {
        qkey: GSI_QKEY,
        src_qpn: Qpn::GSI,
    };
    let gsi = Bth {
        opcode: ud,
        dest_qpn: Qpn::GSI,
        ..quiet(Operation::SendOnly)
    };
    emitted("UD SEND only", gsi, |b| deth.emit(b), b"0123");
    let congested = Bth {
        fecn: true,
        becn: true,
        ..quiet(Operation::SendOnly)
    };
    emitted("SEND only, FECN and BECN", congested, |_| {}, b"");
}

#[test]
fn syndrome__code_inverts_parse() {
    let defined = (0..=u8::MAX)
        .filter(|code| Syndrome::parse(*code).is_ok_and(|s| s.code() == *code))
        .count();
    assert_eq!(defined, 32 + 32 + 4);
}

#[test]
fn path_mtu__of_link() {
    assert_eq!(PathMtu::of_link(1500), Some(PathMtu::Bytes1024));
    assert_eq!(PathMtu::of_link(4175), Some(PathMtu::Bytes2048));
    assert_eq!(PathMtu::of_link(4176), Some(PathMtu::Bytes4096));
    assert_eq!(PathMtu::of_link(65_536), Some(PathMtu::Bytes4096));
    assert_eq!(
        (PathMtu::of_link(335), PathMtu::of_link(336)),
        (None, Some(PathMtu::Bytes256))
    );
    assert_eq!(PathMtu::from_code(3).map(PathMtu::bytes), Some(1024));
    assert_eq!(
        (
            PathMtu::from_code(0),
            PathMtu::from_code(6),
            PathMtu::from_bytes(1000)
        ),
        (None, None, None)
    );
}

#[test]
fn timers__codes() {
    assert_eq!(
        (rnr_timer_ns(0), rnr_timer_ns(1), rnr_timer_ns(31)),
        (655_360_000, 10_000, 491_520_000)
    );
    assert_eq!((ack_timeout_ns(0), ack_timeout_ns(14)), (None, Some(67_108_864)));
}
