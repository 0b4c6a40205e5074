use super::*;
use crate::node::WORK_DESCRIPTORS_MAX;

const REMOTE: Remote = Remote {
    va: 0x7000_1122_3344_5566,
    rkey: RKey(0x8899_aabb),
};

fn work(operation: WorkOperation, data: WorkData) -> Work {
    Work {
        queue: QueueId(0x0102_0304),
        wr_id: 0x1122_3344_5566_7788,
        flags: WorkFlags::empty(),
        operation,
        data,
    }
}

fn element(number: u32) -> Element {
    Element {
        addr: 0xa000_0000 + u64::from(number),
        lkey: LKey(0xb000 + number),
        length: 8,
    }
}

/// Returns the bytes of all of a request's descriptors, with elements by number or bytes 1, 2, ...
fn bytes(work: &Work) -> Vec<u8> {
    let mut bytes = vec![0xee; work.descriptors() * DESCRIPTOR_BYTES];
    work.emit(bytes.first_chunk_mut().unwrap());
    match work.data {
        WorkData::Elements(count) => {
            let elements: Vec<_> = (0..count.into()).map(element).collect();
            work.put_elements(&mut bytes, &elements);
        }
        WorkData::Inline(count) => {
            let inline: Vec<_> = (1..=count).map(|i| i as u8).collect();
            work.put_inline(&mut bytes, &inline);
        }
    }
    bytes
}

fn parse(bytes: &[u8]) -> Result<Work, Malformed> {
    Work::parse(bytes.first_chunk().unwrap())
}

/// Each operation with the most data that it can have in one descriptor.
fn all() -> Vec<Work> {
    let flush = WorkOperation::Flush {
        remote: REMOTE,
        length: 0xdead_beef,
        placement: Placement::PERSISTENT,
        selectivity: Selectivity::MemoryRegion,
    };
    let compare_swap = WorkOperation::CompareSwap {
        remote: REMOTE,
        compare: 0x0102_0304_0506_0708,
        swap: u64::MAX,
    };
    let fetch_add = WorkOperation::FetchAdd {
        remote: REMOTE,
        add: 5,
    };
    let to = Destination {
        handle: 0x0304_0506,
        qpn: Qpn::new(0xab_cdef),
        qkey: 0x8000_0001,
    };
    let datagram = |imm| WorkOperation::Datagram { to, imm };
    let write = |imm| WorkOperation::Write { remote: REMOTE, imm };
    [
        (WorkOperation::Send { imm: None }, WorkData::Inline(32)),
        (WorkOperation::Send { imm: Some(9) }, WorkData::Elements(2)),
        (
            WorkOperation::SendInvalidate { rkey: RKey(7) },
            WorkData::Elements(1),
        ),
        (write(None), WorkData::Inline(0)),
        (write(Some(u32::MAX)), WorkData::Elements(2)),
        (WorkOperation::Read { remote: REMOTE }, WorkData::Elements(2)),
        (compare_swap, WorkData::Elements(1)),
        (fetch_add, WorkData::Elements(1)),
        (WorkOperation::AtomicWrite { remote: REMOTE }, WorkData::Inline(8)),
        (flush, WorkData::Elements(0)),
        (WorkOperation::Recv, WorkData::Elements(2)),
        (WorkOperation::SharedRecv, WorkData::Elements(0)),
        (datagram(None), WorkData::Inline(32)),
        (datagram(Some(3)), WorkData::Elements(2)),
    ]
    .map(|(operation, data)| work(operation, data))
    .into()
}

#[test]
fn work__bytes_of_a_write() {
    let mut write = work(
        WorkOperation::Write {
            remote: REMOTE,
            imm: Some(0x0a0b_0c0d),
        },
        WorkData::Elements(2),
    );
    write.flags = WorkFlags::SIGNALED | WorkFlags::FENCE;
    let expected = [
        5, 3, 2, 0, 4, 3, 2, 1, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x66, 0x55, 0x44, 0x33, 0x22,
        0x11, 0, 0x70, 0xbb, 0xaa, 0x99, 0x88, 0x0d, 0x0c, 0x0b, 0x0a, 0, 0, 0, 0xa0, 0, 0, 0, 0, 0, 0xb0, 0,
        0, 8, 0, 0, 0, 1, 0, 0, 0xa0, 0, 0, 0, 0, 1, 0xb0, 0, 0, 8, 0, 0, 0,
    ];
    assert_eq!(bytes(&write), expected);
    assert_eq!(parse(&expected), Ok(write));
}

#[test]
fn work__each_operation() {
    for work in all() {
        let bytes = bytes(&work);
        assert_eq!(bytes.len(), DESCRIPTOR_BYTES, "{work:?}");
        assert_eq!(parse(&bytes), Ok(work));
        // Only a receive cannot have flags.
        let mut with_flags = work;
        with_flags.flags = WorkFlags::all();
        let mut bytes = bytes;
        bytes[FLAGS_AT] |= WorkFlags::all().bits();
        match work.operation {
            WorkOperation::Recv | WorkOperation::SharedRecv => assert!(parse(&bytes).is_err()),
            _ => assert_eq!(parse(&bytes), Ok(with_flags)),
        }
    }
}

#[test]
fn descriptors__of_each_amount_of_data() {
    let of = |data| work(WorkOperation::Send { imm: None }, data).descriptors();
    for (elements, descriptors) in [(0, 1), (2, 1), (3, 2), (6, 2), (7, 3), (32, 9)] {
        assert_eq!(of(WorkData::Elements(elements)), descriptors);
    }
    for (inline, descriptors) in [(0, 1), (32, 1), (33, 2), (96, 2), (97, 3), (1024, 17)] {
        assert_eq!(of(WorkData::Inline(inline)), descriptors);
    }
    assert_eq!(WORK_DESCRIPTORS_MAX, 17);
    assert_eq!(Work::INLINE_BYTES_ONE, 32);
}

#[test]
fn elements__over_several_descriptors() {
    for count in [0, 1, 2, 3, 6, 7, 32] {
        let recv = work(WorkOperation::Recv, WorkData::Elements(count));
        let bytes = bytes(&recv);
        let parsed = parse(&bytes).unwrap();
        assert!(parsed.elements(&bytes).eq((0..count.into()).map(element)));
        assert_eq!(parsed.inline(&bytes), b"");
        // With too few bytes there are none.
        assert_eq!(parsed.elements(&bytes[..40]).count(), 0);
    }
}

#[test]
fn inline__over_several_descriptors() {
    for count in [0, 1, 32, 33, 96, 97, 1024] {
        let send = work(WorkOperation::Send { imm: Some(1) }, WorkData::Inline(count));
        let bytes = bytes(&send);
        let parsed = parse(&bytes).unwrap();
        let inline: Vec<_> = (1..=count).map(|i| i as u8).collect();
        assert_eq!(parsed.inline(&bytes), inline);
        assert_eq!(parsed.elements(&bytes).count(), 0);
    }
}

#[test]
fn parse__refuses_what_is_not_defined() {
    for opcode in [0, DATAGRAM_IMM + 1, 255] {
        let mut bytes = bytes(&all()[0]);
        bytes[0] = opcode;
        assert!(parse(&bytes).is_err(), "opcode {opcode}");
    }
    for flags in [1 << 4, 1 << 7] {
        let mut bytes = bytes(&all()[0]);
        bytes[FLAGS_AT] |= flags;
        assert!(parse(&bytes).is_err(), "flags {flags}");
    }
    assert!(Work::parse(&[0; 64]).is_err());
    let mut datagram = bytes(all().last().unwrap());
    datagram[QPN_AT + 3] = 1;
    assert!(parse(&datagram).is_err(), "a QPN of 25 bits");
}

#[test]
fn parse__refuses_data_that_the_operation_cannot_have() {
    for work in all() {
        let bytes = bytes(&work);
        for inline in [0, INLINE] {
            for count in [0, 1, 2, 8, 32, 33, 1024, 1025, u16::MAX] {
                let mut bytes = bytes.clone();
                bytes[FLAGS_AT] = bytes[FLAGS_AT] & !INLINE | inline;
                put(&mut bytes, COUNT_AT, &count.to_le_bytes());
                let data = match inline {
                    0 => WorkData::Elements(count),
                    _ => WorkData::Inline(count),
                };
                let parsed = parse(&bytes).ok();
                let valid = Work { data, ..work }.has_valid_data();
                assert!(parsed.is_none() || valid && parsed.unwrap().data == data);
                assert!(count <= 1024 || parsed.is_none(), "{work:?}");
                assert!(inline != 0 || count <= 32 || parsed.is_none(), "{work:?}");
            }
        }
    }
}

#[test]
fn parse__refuses_an_atomic_of_another_size() {
    for work in all() {
        let is_atomic = matches!(
            work.operation,
            WorkOperation::CompareSwap { .. } | WorkOperation::FetchAdd { .. }
        );
        let mut bytes = bytes(&work);
        put(&mut bytes, 44, &4u32.to_le_bytes());
        assert_eq!(parse(&bytes).is_err(), is_atomic, "{work:?}");
    }
}

#[test]
fn parse__refuses_a_flush_without_placement() {
    let flush = all()
        .into_iter()
        .find(|work| matches!(work.operation, WorkOperation::Flush { .. }));
    let mut bytes = bytes(&flush.unwrap());
    put(&mut bytes, IMM_AT, &[0; 4]);
    assert!(parse(&bytes).is_err());
}
