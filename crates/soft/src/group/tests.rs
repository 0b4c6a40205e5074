#![allow(non_snake_case, reason = "names of tests are function__case")]

use super::*;

const REQ: u8 = 0x10;
const REJ: u8 = 0x12;
const REP: u8 = 0x13;
const SIDR_REQ: u8 = 0x17;
const SIDR_REP: u8 = 0x18;

/// Returns a datagram to QPN 1 with attribute `attribute`, whose message begins with `body`.
fn datagram(attribute: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 12 + 8 + 256 + 4];
    bytes[..4].copy_from_slice(&[0x64, 0, 0xff, 0xff]);
    bytes[7] = 1;
    bytes[20..24].copy_from_slice(&[1, 0x07, 2, 3]);
    bytes[37] = attribute;
    bytes[44..][..body.len()].copy_from_slice(body);
    bytes
}

#[test]
fn route__request_goes_by_service() {
    let service = ServiceId::tcp(7174);
    let body: Vec<u8> = [[0x0b; 8], service.0.to_be_bytes()].concat();
    for attribute in [REQ, SIDR_REQ] {
        assert_eq!(route(&datagram(attribute, &body)), Some(Route::Service(service)));
    }
}

#[test]
fn route__the_rest_goes_by_the_slot_in_the_remote_id() {
    for attribute in (0x11..=0x16).chain([0x19, 0x1a]) {
        let bytes = datagram(attribute, &[1, 2, 3, 4, 9, 6, 7, 8]);
        assert_eq!(route(&bytes), Some(Route::Slot(9)), "attribute {attribute:#x}");
    }
    assert_eq!(
        route(&datagram(SIDR_REP, &[7, 2, 3, 4, 9, 6, 7, 8])),
        Some(Route::Slot(7))
    );
}

#[test]
fn route__of_a_rejection_without_the_remote_id_is_everyone() {
    assert_eq!(route(&datagram(REJ, &[1, 2, 3, 4])), Some(Route::Everyone));
    assert_eq!(route(&datagram(REP, &[1, 2, 3, 4])), Some(Route::Slot(0)));
}

#[test]
fn route__what_is_no_message_of_connection_management() {
    let good = datagram(REJ, &[0; 8]);
    assert!(route(&good).is_some());
    for len in [0, 1, 11, 12, 20, 43, 52, good.len() - 1] {
        assert_eq!(route(&good[..len]), None, "length {len}");
    }
    // Opcode (RC, with immediate, unknown), version, QPN, class, class version, method, attribute.
    let breaks = [
        (0, 0x04),
        (0, 0x65),
        (0, 0xff),
        (1, 1),
        (7, 2),
        (5, 1),
        (21, 3),
        (22, 1),
        (23, 1),
        (37, 0x0f),
        (36, 1),
    ];
    for (at, value) in breaks {
        let mut bad = good.clone();
        bad[at] = value;
        assert_eq!(route(&bad), None, "byte {at} = {value:#x}");
    }
    assert_eq!(route(&datagram(REP + 0x10, &[0; 8])), None);
}

/// A process that joins takes the slot of one that has died, before the holder knows of the death.
#[test]
fn join__ends_the_connections_of_the_former_process_first() {
    let addr = IpAddr::from([127, 0, 0, 78]);
    let (tell, told) = std::sync::mpsc::channel();
    let calls = Calls {
        deliver: Box::new(|_| {}),
        disconnect_orphans: Box::new(move |peerings| tell.send(peerings).unwrap()),
        aside: None,
    };
    let holder = PortGroup::join_with(addr, calls).unwrap();
    let names = Names::new(addr);
    let link = names.connect_holder().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let next = || {
        assert!(message::wait_readable(link.as_fd(), deadline).unwrap());
        let mut buffer = [0; message::LEN_MAX];
        let (len, descriptors) = receive_with_descriptors(&link, &mut buffer).unwrap();
        (buffer[..len].to_vec(), descriptors)
    };
    let (_, mut descriptors) = next();
    let ledger = Arc::new(Ledger::from_fd(descriptors.pop().unwrap()).unwrap());
    let slot = holder.slot() % (BLOCK - 1) + 1;
    let _claim = names.claim_slot(slot).unwrap();
    let left = Peering {
        id: rdmux_rnic::cm::CmId(u32::from(slot) << 24 | 1),
        local_qpn: Qpn::new(2),
        peer: [10, 0, 0, 1].into(),
        remote_id: 3,
        remote_qpn: Qpn::new(4),
    };
    let records = Arc::new(OwnRecords::new(ledger, slot));
    std::mem::forget(records.record(&left).unwrap());
    message::send(&link, &GroupMessage::Want { slot, block: 0 }).unwrap();
    let (bytes, descriptors) = next();
    assert_eq!(GroupMessage::decode(&bytes), Some(GroupMessage::Block(0)));
    assert_eq!(descriptors.len(), usize::from(BLOCK));
    assert_eq!(told.try_recv(), Ok(vec![left]));
}
