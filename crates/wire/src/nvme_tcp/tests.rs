use super::*;
use crate::nvme::{NsId, Opcode, Status};

fn emit(header: &Header, layout: DataLayout) -> (Common, Vec<u8>) {
    let mut bytes = vec![0xff; 512];
    let common = header.emit(Flags::empty(), layout, &mut bytes);
    bytes.truncate(common.pdu_len.max(header.kind().header_len()));
    (common, bytes)
}

fn headers() -> [Header; 9] {
    let initialize = Initialize {
        alignment: 128,
        digests: Digests::DATA,
        limit: 0x2_0000,
    };
    let transfer = Transfer {
        cid: Cid(0x1122),
        tag: 0x3344,
        offset: 0x5566_7788,
        length: 0x99aa_bbcc,
    };
    let cqe = Cqe {
        result: 3,
        sq_head: 4,
        cid: Cid(5),
        status: Status::INVALID_FIELD,
    };
    [
        Header::IcReq(initialize),
        Header::IcResp(initialize),
        Header::H2cTermReq(Fatal::InvalidField(0x0102_0304)),
        Header::C2hTermReq(Fatal::Limit),
        Header::CapsuleCmd(Sqe::new(Opcode::READ, Cid(9), NsId(1))),
        Header::CapsuleResp(cqe),
        Header::H2cData(transfer),
        Header::C2hData(transfer),
        Header::R2t(transfer),
    ]
}

#[test]
fn header__survives_the_wire() {
    for header in headers() {
        for digests in [Digests::empty(), Digests::HEADER, Digests::all()] {
            let layout = DataLayout {
                digests,
                ..DataLayout::default()
            };
            let (common, bytes) = emit(&header, layout);
            assert_eq!(Common::parse(&bytes, digests), Ok(common), "{header:?}");
            assert_eq!(Header::parse(common.kind, &bytes), Ok(header));
        }
    }
}

#[test]
fn data__stand_where_the_receiver_wants_them() {
    let header = headers()[6];
    let layout = DataLayout {
        len: 1000,
        digests: Digests::all(),
        alignment: 128,
    };
    let (common, bytes) = emit(&header, layout);
    assert_eq!((common.data_offset, common.pdu_len), (128, 128 + 1000 + 4));
    assert_eq!(bytes[..4], [6, 3, 24, 128]);
    assert_eq!(Common::parse(&bytes, Digests::all()).unwrap().data_len, 1000);
}

#[test]
fn ic_req__as_linux_sends_it() {
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&[0, 0, 128, 0, 128, 0, 0, 0]);
    bytes[11] = 3;
    let common = Common::parse(&bytes, Digests::empty()).unwrap();
    let expected = Initialize {
        alignment: 4,
        digests: Digests::all(),
        limit: 1,
    };
    assert_eq!(Header::parse(common.kind, &bytes), Ok(Header::IcReq(expected)));
    for (at, wrong) in [
        (8, Fatal::Unsupported(8)),
        (10, Fatal::InvalidField(10)),
        (11, Fatal::InvalidField(11)),
    ] {
        let mut bytes = bytes;
        bytes[at] = 0x80;
        assert_eq!(Header::parse(common.kind, &bytes), Err(wrong));
    }
}

#[test]
fn common__refuses_lengths_that_do_not_agree() {
    let (_, good) = emit(
        &headers()[6],
        DataLayout {
            len: 64,
            ..DataLayout::default()
        },
    );
    assert!(Common::parse(&good, Digests::empty()).is_ok());
    let refused = |at: usize, value: u8, digests| {
        let mut bytes = good.clone();
        bytes[at] = value;
        Common::parse(&bytes, digests).unwrap_err()
    };
    assert_eq!(
        refused(0, 8, Digests::empty()),
        Fatal::InvalidField(0),
        "an unknown type"
    );
    assert_eq!(
        refused(2, 23, Digests::empty()),
        Fatal::InvalidField(2),
        "another header"
    );
    assert_eq!(
        refused(4, 23, Digests::empty()),
        Fatal::InvalidField(4),
        "shorter than its header"
    );
    assert_eq!(
        refused(3, 20, Digests::empty()),
        Fatal::InvalidField(3),
        "data in the header"
    );
    assert_eq!(
        refused(3, 100, Digests::empty()),
        Fatal::InvalidField(4),
        "data beyond the end"
    );
    assert_eq!(
        refused(1, 0, Digests::HEADER),
        Fatal::InvalidField(1),
        "no header digest"
    );
    assert_eq!(
        refused(1, 0, Digests::DATA),
        Fatal::InvalidField(1),
        "no data digest"
    );
    // A response has no data.
    let (_, mut response) = emit(&headers()[5], DataLayout::default());
    response[4] = 25;
    assert_eq!(
        Common::parse(&response, Digests::empty()),
        Err(Fatal::InvalidField(4))
    );
    // A request to end has a part of a header at most.
    let (_, mut request) = emit(&headers()[3], DataLayout::default());
    request[4] = 152;
    assert!(Common::parse(&request, Digests::all()).is_ok());
    request[4] = 153;
    assert_eq!(
        Common::parse(&request, Digests::all()),
        Err(Fatal::InvalidField(4))
    );
}

#[test]
fn ic_resp__of_a_limit_below_4096_is_refused() {
    let small = Initialize {
        alignment: 4,
        digests: Digests::empty(),
        limit: 4095,
    };
    let (common, bytes) = emit(&Header::IcResp(small), DataLayout::default());
    assert_eq!(Header::parse(common.kind, &bytes), Err(Fatal::Unsupported(12)));
}
