//! Connection management as a table of each state with each event. IBTA Vol 1, 12.9.6 and 12.9.7 (connections), 12.11 (resolutions);
//! the last column has the section of the event.
//!
//! A cell shows the effect on the connection: its next state (`=` unchanged, `gone` forgotten), the messages that are sent and the
//! events that the user gets (`-` none); `.` stands for `= - -`. A number after REJ is the reason, after SIDR_REP and APR the status.
//! `!` is an error that the user's call returns.

use std::net::IpAddr;

use rand_chacha::ChaCha12Rng;
use rand_core::SeedableRng;
use rdmux_wire::cm::{
    Answered, Apr, AprStatus, CmMessage, Drep, Dreq, Lap, MAD_LEN, Mra, PrivateData, Rej, RejReason, Rep,
    Req, Rtu, ServiceId, SidrRep, SidrReq, SidrStatus, to_gid,
};
use rdmux_wire::roce::{PathMtu, Transport};
use rdmux_wire::{Psn, Qpn};

use super::table::{check, parse};
use crate::cm::{Cm, CmError, CmEvent, CmId, ConnectionState, Endpoint, Peering};
use crate::{Config, Time};

/// The active side, from the request on. EstablishedA: established by its reply.
const ACTIVE: &str = "
event                  | ReqSent                   | MraReqReceived          | RepReceived                | MraRepSent                 | EstablishedA               | section
REQ                    | = - Request               | = - Request             | DreqSent REJ10+DREQ -      | DreqSent REJ10+DREQ -      | DreqSent REJ10+DREQ -      | 12.6.5
REQ same QP            | = - Request               | = - Request             | DreqSent REJ10+DREQ -      | DreqSent REJ10+DREQ -      | DreqSent REJ10+DREQ -      | 12.9.8.3.1
REQ other service      | = REJ8 -                  | = REJ8 -                | = REJ8 -                   | = REJ8 -                   | = REJ8 -                   | 12.6.7
REQ other GID          | = REJ12 -                 | = REJ12 -               | = REJ12 -                  | = REJ12 -                  | = REJ12 -                  | 12.6.7.2
MRA of REQ             | MraReqReceived - -        | .                       | .                          | .                          | .                          | 12.6.6
MRA of REP             | .                         | .                       | .                          | .                          | .                          | 12.6.6
MRA of LAP             | .                         | .                       | .                          | .                          | .                          | 12.6.6
REJ                    | TimeWait - Rejected28     | TimeWait - Rejected28   | TimeWait - Rejected28      | TimeWait - Rejected28      | TimeWait - Disconnected    | 12.6.7
REJ other id           | TimeWait - Rejected28     | TimeWait - Rejected28   | .                          | .                          | .                          | 12.6.7
REJ by GUID            | .                         | .                       | .                          | .                          | .                          | 12.6.7.2
REP                    | RepReceived - Reply       | RepReceived - Reply     | MraRepSent MRA -           | = MRA -                    | = RTU -                    | 12.6.8
REP other id           | RepReceived - Reply       | RepReceived - Reply     | .                          | .                          | .                          | 12.6.8
RTU                    | = REJ6 -                  | .                       | .                          | .                          | .                          | 12.6.9
RTU other id           | = REJ6 -                  | = REJ6 -                | = REJ6 -                   | = REJ6 -                   | = REJ6 -                   | 12.6.9
DREQ                   | = DREP -                  | = DREP -                | TimeWait DREP Disconnected | TimeWait DREP Disconnected | TimeWait DREP Disconnected | 12.6.10
DREQ other QP          | = DREP -                  | .                       | .                          | .                          | .                          | 12.6.10
DREQ other id          | = DREP -                  | = DREP -                | = DREP -                   | = DREP -                   | = DREP -                   | 12.6.10
DREP                   | .                         | .                       | .                          | .                          | .                          | 12.6.11
DREP other id          | .                         | .                       | .                          | .                          | .                          | 12.6.11
LAP                    | = APR1 -                  | .                       | .                          | .                          | = APR2 -                   | 12.8.1
APR                    | .                         | .                       | .                          | .                          | .                          | 12.8.2
SIDR_REQ               | = - SidrRequest           | = - SidrRequest         | = - SidrRequest            | = - SidrRequest            | = - SidrRequest            | 12.11.1
SIDR_REQ other service | = SIDR_REP1 -             | = SIDR_REP1 -           | = SIDR_REP1 -              | = SIDR_REP1 -              | = SIDR_REP1 -              | 12.11.2
SIDR_REP               | .                         | .                       | .                          | .                          | .                          | 12.11.2
SIDR_REP other id      | .                         | .                       | .                          | .                          | .                          | 12.11.2
timeout                | = REQ -                   | ReqSent REQ -           | MraRepSent MRA -           | TimeWait REJ4 Disconnected | .                          | 12.9.7
timeouts to end        | TimeWait REJ4 Unreachable | ReqSent REQ -           | MraRepSent MRA -           | TimeWait REJ4 Disconnected | .                          | 12.9.7
accept                 | = - !NoSuchRequest        | = - !NoSuchRequest      | = - !NoSuchRequest         | = - !NoSuchRequest         | = - !NoSuchRequest         | 12.9.7
accept, too much       | = - !NoSuchRequest        | = - !NoSuchRequest      | = - !NoSuchRequest         | = - !NoSuchRequest         | = - !NoSuchRequest         | 12.6.8
reject                 | .                         | .                       | TimeWait REJ28 -           | TimeWait REJ28 -           | .                          | 12.6.7
establish              | .                         | .                       | Established RTU -          | Established RTU -          | .                          | 12.9.7
disconnect             | TimeWait REJ4 -           | TimeWait REJ4 -         | DreqSent DREQ -            | DreqSent DREQ -            | DreqSent DREQ -            | 12.9.8
answer                 | = - !NoSuchRequest        | = - !NoSuchRequest      | = - !NoSuchRequest         | = - !NoSuchRequest         | = - !NoSuchRequest         | 12.11.2
answer, too much       | = - !NoSuchRequest        | = - !NoSuchRequest      | = - !NoSuchRequest         | = - !NoSuchRequest         | = - !NoSuchRequest         | 12.11.2
unlisten               | .                         | .                       | .                          | .                          | .                          | 12.6.7
release                | .                         | .                       | .                          | .                          | .                          | -
orphan                 | .                         | .                       | .                          | .                          | .                          | 12.9.8
destroy                | gone - -                  | gone - -                | gone - -                   | gone - -                   | gone - -                   | -
";

/// The passive side. EstablishedP: established by the RTU, or by data.
const PASSIVE: &str = "
event                  | ReqReceived                       | MraReqSent                        | RepSent                    | MraRepReceived             | EstablishedP               | section
REQ                    | MraReqSent MRA -                  | = MRA -                           | = REP -                    | .                          | .                          | 12.6.5
REQ same QP            | TimeWait REJ10+REJ10 Disconnected | TimeWait REJ10+REJ10 Disconnected | DreqSent REJ10+DREQ -      | DreqSent REJ10+DREQ -      | DreqSent REJ10+DREQ -      | 12.9.8.3.1
REQ other service      | = REJ8 -                          | = REJ8 -                          | = REJ8 -                   | = REJ8 -                   | = REJ8 -                   | 12.6.7
REQ other GID          | = REJ12 -                         | = REJ12 -                         | = REJ12 -                  | = REJ12 -                  | = REJ12 -                  | 12.6.7.2
MRA of REQ             | .                                 | .                                 | .                          | .                          | .                          | 12.6.6
MRA of REP             | .                                 | .                                 | MraRepReceived - -         | .                          | .                          | 12.6.6
MRA of LAP             | .                                 | .                                 | .                          | .                          | .                          | 12.6.6
REJ                    | TimeWait - Rejected28             | TimeWait - Rejected28             | TimeWait - Rejected28      | TimeWait - Rejected28      | TimeWait - Disconnected    | 12.6.7
REJ other id           | .                                 | .                                 | .                          | .                          | .                          | 12.6.7
REJ by GUID            | TimeWait - Rejected4              | TimeWait - Rejected4              | TimeWait - Rejected4       | TimeWait - Rejected4       | TimeWait - Disconnected    | 12.6.7.2
REP                    | .                                 | .                                 | .                          | .                          | .                          | 12.6.8
REP other id           | .                                 | .                                 | .                          | .                          | .                          | 12.6.8
RTU                    | .                                 | .                                 | Established - Established  | Established - Established  | .                          | 12.6.9
RTU other id           | = REJ6 -                          | = REJ6 -                          | = REJ6 -                   | = REJ6 -                   | = REJ6 -                   | 12.6.9
DREQ                   | = DREP -                          | = DREP -                          | TimeWait DREP Disconnected | TimeWait DREP Disconnected | TimeWait DREP Disconnected | 12.6.10
DREQ other QP          | = DREP -                          | = DREP -                          | .                          | .                          | .                          | 12.6.10
DREQ other id          | = DREP -                          | = DREP -                          | = DREP -                   | = DREP -                   | = DREP -                   | 12.6.10
DREP                   | .                                 | .                                 | .                          | .                          | .                          | 12.6.11
DREP other id          | .                                 | .                                 | .                          | .                          | .                          | 12.6.11
LAP                    | .                                 | .                                 | .                          | .                          | = APR2 -                   | 12.8.1
APR                    | .                                 | .                                 | .                          | .                          | .                          | 12.8.2
SIDR_REQ               | = - SidrRequest                   | = - SidrRequest                   | = - SidrRequest            | = - SidrRequest            | = - SidrRequest            | 12.11.1
SIDR_REQ other service | = SIDR_REP1 -                     | = SIDR_REP1 -                     | = SIDR_REP1 -              | = SIDR_REP1 -              | = SIDR_REP1 -              | 12.11.2
SIDR_REP               | .                                 | .                                 | .                          | .                          | .                          | 12.11.2
SIDR_REP other id      | .                                 | .                                 | .                          | .                          | .                          | 12.11.2
timeout                | MraReqSent MRA -                  | TimeWait REJ4 Disconnected        | = REP -                    | RepSent REP -              | .                          | 12.9.7
timeouts to end        | MraReqSent MRA -                  | TimeWait REJ4 Disconnected        | TimeWait REJ4 Unreachable  | RepSent REP -              | .                          | 12.9.7
accept                 | RepSent REP -                     | RepSent REP -                     | = - !NoSuchRequest         | = - !NoSuchRequest         | = - !NoSuchRequest         | 12.9.7
accept, too much       | = - !PrivateDataTooLong           | = - !PrivateDataTooLong           | = - !NoSuchRequest         | = - !NoSuchRequest         | = - !NoSuchRequest         | 12.6.8
reject                 | TimeWait REJ28 -                  | TimeWait REJ28 -                  | .                          | .                          | .                          | 12.6.7
establish              | .                                 | .                                 | Established - Established  | Established - Established  | .                          | 12.9.7
disconnect             | TimeWait REJ28 -                  | TimeWait REJ28 -                  | DreqSent DREQ -            | DreqSent DREQ -            | DreqSent DREQ -            | 12.9.8
answer                 | = - !NoSuchRequest                | = - !NoSuchRequest                | = - !NoSuchRequest         | = - !NoSuchRequest         | = - !NoSuchRequest         | 12.11.2
answer, too much       | = - !NoSuchRequest                | = - !NoSuchRequest                | = - !NoSuchRequest         | = - !NoSuchRequest         | = - !NoSuchRequest         | 12.11.2
unlisten               | TimeWait REJ8 -                   | TimeWait REJ8 -                   | .                          | .                          | .                          | 12.6.7
release                | gone - -                          | gone - -                          | .                          | .                          | .                          | -
orphan                 | .                                 | .                                 | .                          | .                          | .                          | 12.9.8
destroy                | gone - -                          | gone - -                          | gone - -                   | gone - -                   | gone - -                   | -
";

/// The end of a connection: DreqSent and TimeWait of the passive side; Unknown is an id that does not exist.
const END: &str = "
event                  | DreqSent                   | TimeWait                | Unknown                 | section
REQ                    | .                          | = REJ10 -               | = - Request             | 12.6.5
REQ same QP            | = REJ10 -                  | = - Request             | = - Request             | 12.9.8.3.1
REQ other service      | = REJ8 -                   | = REJ8 -                | = REJ8 -                | 12.6.7
REQ other GID          | = REJ12 -                  | = REJ12 -               | = REJ12 -               | 12.6.7.2
MRA of REQ             | .                          | .                       | .                       | 12.6.6
MRA of REP             | .                          | .                       | .                       | 12.6.6
MRA of LAP             | .                          | .                       | .                       | 12.6.6
REJ                    | TimeWait - Disconnected    | .                       | .                       | 12.6.7
REJ other id           | .                          | .                       | .                       | 12.6.7
REJ by GUID            | TimeWait - Disconnected    | .                       | .                       | 12.6.7.2
REP                    | .                          | = REJ6 -                | = REJ6 -                | 12.6.8
REP other id           | .                          | = REJ6 -                | = REJ6 -                | 12.6.8
RTU                    | .                          | = REJ6 -                | = REJ6 -                | 12.6.9
RTU other id           | = REJ6 -                   | = REJ6 -                | = REJ6 -                | 12.6.9
DREQ                   | TimeWait DREP Disconnected | = DREP -                | = DREP -                | 12.6.10
DREQ other QP          | .                          | = DREP -                | = DREP -                | 12.6.10
DREQ other id          | = DREP -                   | = DREP -                | = DREP -                | 12.6.10
DREP                   | TimeWait - Disconnected    | .                       | .                       | 12.6.11
DREP other id          | .                          | .                       | .                       | 12.6.11
LAP                    | .                          | = APR1 -                | = APR1 -                | 12.8.1
APR                    | .                          | .                       | .                       | 12.8.2
SIDR_REQ               | = - SidrRequest            | = - SidrRequest         | = - SidrRequest         | 12.11.1
SIDR_REQ other service | = SIDR_REP1 -              | = SIDR_REP1 -           | = SIDR_REP1 -           | 12.11.2
SIDR_REP               | .                          | .                       | .                       | 12.11.2
SIDR_REP other id      | .                          | .                       | .                       | 12.11.2
timeout                | = DREQ -                   | gone - -                | .                       | 12.9.7
timeouts to end        | TimeWait - Disconnected    | gone - -                | .                       | 12.9.7
accept                 | = - !NoSuchRequest         | = - !NoSuchRequest      | = - !NoSuchRequest      | 12.9.7
accept, too much       | = - !NoSuchRequest         | = - !NoSuchRequest      | = - !NoSuchRequest      | 12.6.8
reject                 | .                          | .                       | .                       | 12.6.7
establish              | .                          | .                       | .                       | 12.9.7
disconnect             | .                          | .                       | .                       | 12.9.8
answer                 | = - !NoSuchRequest         | = - !NoSuchRequest      | = - !NoSuchRequest      | 12.11.2
answer, too much       | = - !NoSuchRequest         | = - !NoSuchRequest      | = - !NoSuchRequest      | 12.11.2
unlisten               | .                          | .                       | .                       | 12.6.7
release                | .                          | .                       | .                       | -
orphan                 | .                          | .                       | DreqSent DREQ -         | 12.9.8
destroy                | gone - -                   | gone - -                | .                       | -
";

/// Resolutions; SidrAnswered is the TimeWait of an answered one.
const SIDR: &str = "
event                  | SidrReqSent             | SidrReqReceived                 | SidrAnswered            | section
REQ                    | = - Request             | = - Request                     | = - Request             | 12.6.5
REQ same QP            | = - Request             | = - Request                     | = - Request             | 12.9.8.3.1
REQ other service      | = REJ8 -                | = REJ8 -                        | = REJ8 -                | 12.6.7
REQ other GID          | = REJ12 -               | = REJ12 -                       | = REJ12 -               | 12.6.7.2
MRA of REQ             | .                       | .                               | .                       | 12.6.6
MRA of REP             | .                       | .                               | .                       | 12.6.6
MRA of LAP             | .                       | .                               | .                       | 12.6.6
REJ                    | .                       | .                               | .                       | 12.6.7
REJ other id           | .                       | .                               | .                       | 12.6.7
REJ by GUID            | .                       | .                               | .                       | 12.6.7.2
REP                    | .                       | .                               | = REJ6 -                | 12.6.8
REP other id           | .                       | .                               | = REJ6 -                | 12.6.8
RTU                    | = REJ6 -                | .                               | = REJ6 -                | 12.6.9
RTU other id           | = REJ6 -                | = REJ6 -                        | = REJ6 -                | 12.6.9
DREQ                   | = DREP -                | = DREP -                        | = DREP -                | 12.6.10
DREQ other QP          | = DREP -                | = DREP -                        | = DREP -                | 12.6.10
DREQ other id          | = DREP -                | = DREP -                        | = DREP -                | 12.6.10
DREP                   | .                       | .                               | .                       | 12.6.11
DREP other id          | .                       | .                               | .                       | 12.6.11
LAP                    | = APR1 -                | .                               | = APR1 -                | 12.8.1
APR                    | .                       | .                               | .                       | 12.8.2
SIDR_REQ               | = - SidrRequest         | .                               | = SIDR_REP0 -           | 12.11.1
SIDR_REQ other service | = SIDR_REP1 -           | = SIDR_REP1 -                   | = SIDR_REP1 -           | 12.11.2
SIDR_REP               | TimeWait - SidrReply0   | .                               | .                       | 12.11.2
SIDR_REP other id      | .                       | .                               | .                       | 12.11.2
timeout                | = SIDR_REQ -            | TimeWait SIDR_REP2 Disconnected | gone - -                | 12.9.7
timeouts to end        | TimeWait - Unreachable  | TimeWait SIDR_REP2 Disconnected | gone - -                | 12.9.7
accept                 | = - !NoSuchRequest      | = - !NoSuchRequest              | = - !NoSuchRequest      | 12.9.7
accept, too much       | = - !NoSuchRequest      | = - !NoSuchRequest              | = - !NoSuchRequest      | 12.6.8
reject                 | .                       | TimeWait SIDR_REP2 -            | .                       | 12.6.7
establish              | .                       | .                               | .                       | 12.9.7
disconnect             | TimeWait - -            | TimeWait SIDR_REP2 -            | .                       | 12.9.8
answer                 | = - !NoSuchRequest      | TimeWait SIDR_REP0 -            | = - !NoSuchRequest      | 12.11.2
answer, too much       | = - !NoSuchRequest      | = - !PrivateDataTooLong         | = - !NoSuchRequest      | 12.11.2
unlisten               | .                       | TimeWait SIDR_REP1 -            | .                       | 12.6.7
release                | .                       | gone - -                        | .                       | -
orphan                 | .                       | .                               | .                       | 12.9.8
destroy                | gone - -                | gone - -                        | gone - -                | -
";

const OURS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
const STRANGER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 3));
const SERVICE: ServiceId = ServiceId::udp(7174);
/// A service without a listener.
const OTHER_SERVICE: ServiceId = ServiceId::udp(7175);
const OUR_QPN: Qpn = Qpn::new(0x01_0005);
const THEIR_QPN: Qpn = Qpn::new(0x02_0007);
const THEIR_ID: u32 = 0x0200_0009;
const THEIR_GUID: u64 = 77;
const TID: u64 = 5;

fn local() -> Endpoint {
    Endpoint {
        transport: Transport::Rc,
        qpn: OUR_QPN,
        starting_psn: Psn::new(1),
        responder_resources: 1,
        initiator_depth: 1,
        rnr_retry_count: 7,
        retry_count: 7,
        srq: false,
        ack_timeout: 14,
        path_mtu: PathMtu::Bytes1024,
        traffic_class: 0,
        extensions: None,
        plain: false,
    }
}

fn req(local_comm_id: u32) -> CmMessage {
    CmMessage::Req(Req {
        local_comm_id,
        ece: None,
        service_id: SERVICE,
        ca_guid: THEIR_GUID,
        qkey: 0,
        qpn: THEIR_QPN,
        responder_resources: 1,
        initiator_depth: 1,
        remote_response_timeout: 20,
        transport: Transport::Rc,
        flow_control: false,
        starting_psn: Psn::new(2),
        local_response_timeout: 20,
        retry_count: 7,
        pkey: 0xffff,
        path_mtu: PathMtu::Bytes1024,
        rnr_retry_count: 7,
        max_cm_retries: 15,
        srq: false,
        src_gid: to_gid(PEER),
        dst_gid: to_gid(OURS),
        flow_label: 0,
        packet_rate: 0,
        traffic_class: 0,
        hop_limit: 64,
        service_level: 0,
        local_ack_timeout: 14,
        private_data: PrivateData::default(),
    })
}

/// Returns a request of another QP of the peer, changed by `change`.
fn req_with(change: impl FnOnce(&mut Req)) -> CmMessage {
    let CmMessage::Req(mut req) = req(THEIR_ID + 2) else {
        unreachable!("a REQ")
    };
    req.qpn = Qpn::new(0x02_0008);
    change(&mut req);
    CmMessage::Req(req)
}

fn mra(to: CmId, answered: Answered) -> CmMessage {
    CmMessage::Mra(Mra {
        local_comm_id: THEIR_ID,
        remote_comm_id: to.0,
        answered,
        service_timeout: 20,
        private_data: PrivateData::default(),
    })
}

fn rej(from: u32, to: u32, answered: Answered, reason: RejReason) -> CmMessage {
    let mut ari = [0; 72];
    ari[..8].copy_from_slice(&THEIR_GUID.to_be_bytes());
    CmMessage::Rej(Rej {
        local_comm_id: from,
        remote_comm_id: to,
        answered,
        reason,
        ari_len: 8,
        ari,
        private_data: PrivateData::default(),
    })
}

fn rep(to: CmId, local_comm_id: u32) -> CmMessage {
    CmMessage::Rep(Rep {
        local_comm_id,
        remote_comm_id: to.0,
        ece: None,
        qkey: 0,
        qpn: THEIR_QPN,
        eecn: 0,
        starting_psn: Psn::new(2),
        responder_resources: 1,
        initiator_depth: 1,
        target_ack_delay: 15,
        failover: 0,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        ca_guid: THEIR_GUID,
        private_data: PrivateData::default(),
    })
}

fn rtu(to: CmId, local_comm_id: u32) -> CmMessage {
    CmMessage::Rtu(Rtu {
        local_comm_id,
        remote_comm_id: to.0,
        private_data: PrivateData::default(),
    })
}

fn drep(to: CmId, local_comm_id: u32) -> CmMessage {
    CmMessage::Drep(Drep {
        local_comm_id,
        remote_comm_id: to.0,
        private_data: PrivateData::default(),
    })
}

fn dreq(to: CmId, local_comm_id: u32, remote_qpn: Qpn) -> CmMessage {
    CmMessage::Dreq(Dreq {
        local_comm_id,
        remote_comm_id: to.0,
        remote_qpn,
        private_data: PrivateData::default(),
    })
}

fn sidr_req(request_id: u32, service_id: ServiceId) -> CmMessage {
    CmMessage::SidrReq(SidrReq {
        request_id,
        pkey: 0xffff,
        service_id,
        private_data: PrivateData::default(),
    })
}

/// Returns the message of a table row.
fn message(event: &str, id: CmId) -> Option<CmMessage> {
    Some(match event {
        "REQ" => req(THEIR_ID),
        "REQ same QP" => req(THEIR_ID + 1),
        "REQ other service" => req_with(|req| req.service_id = OTHER_SERVICE),
        "REQ other GID" => req_with(|req| req.dst_gid = to_gid(STRANGER)),
        "MRA of LAP" => mra(id, Answered::Other),
        "MRA of REQ" => mra(id, Answered::Req),
        "MRA of REP" => mra(id, Answered::Rep),
        "REJ" => rej(THEIR_ID, id.0, Answered::Other, RejReason::CONSUMER),
        "REJ other id" => rej(THEIR_ID + 1, id.0, Answered::Other, RejReason::CONSUMER),
        "REJ by GUID" => rej(THEIR_ID, 0, Answered::Other, RejReason::TIMEOUT),
        "REP" => rep(id, THEIR_ID),
        "REP other id" => rep(id, THEIR_ID + 1),
        "RTU" => rtu(id, THEIR_ID),
        "RTU other id" => rtu(id, THEIR_ID + 1),
        "DREQ" => dreq(id, THEIR_ID, OUR_QPN),
        "DREQ other QP" => dreq(id, THEIR_ID, Qpn::new(9)),
        "DREQ other id" => dreq(id, THEIR_ID + 1, OUR_QPN),
        "DREP" => drep(id, THEIR_ID),
        "DREP other id" => drep(id, THEIR_ID + 1),
        "LAP" => CmMessage::Lap(Lap {
            local_comm_id: THEIR_ID,
            remote_comm_id: id.0,
        }),
        "APR" => CmMessage::Apr(Apr {
            local_comm_id: THEIR_ID,
            remote_comm_id: id.0,
            status: AprStatus::UNSUPPORTED,
            private_data: PrivateData::default(),
        }),
        "SIDR_REQ" => sidr_req(THEIR_ID, SERVICE),
        "SIDR_REQ other service" => sidr_req(THEIR_ID + 1, OTHER_SERVICE),
        "SIDR_REP" | "SIDR_REP other id" => CmMessage::SidrRep(SidrRep {
            request_id: id.0 ^ u32::from(event.ends_with("other id")),
            status: SidrStatus::VALID,
            qpn: THEIR_QPN,
            service_id: SERVICE,
            qkey: 1,
            private_data: PrivateData::default(),
        }),
        _ => return None,
    })
}

/// A connection manager with one connection in some state.
struct Bench {
    cm: Cm,
    now: Time,
    id: CmId,
}

impl Bench {
    /// Drives a connection into the state of a column.
    fn in_state(column: &str) -> Bench {
        let config = Config {
            address: OURS,
            slot: 1,
            seed: [1; 32],
            guid: 1,
            gsi_src_port: 0xc000,
            receive_window_bytes: 1 << 18,
            traffic: crate::Traffic::default(),
            mtu: 1024,
        };
        let mut bench = Bench {
            cm: Cm::new(&config, ChaCha12Rng::from_seed([1; 32])),
            now: Time(1),
            id: CmId(0x0100_0001),
        };
        bench.cm.listen(SERVICE);
        match column {
            "Unknown" => {}
            "ReqSent" => bench.connect(),
            "MraReqReceived" => bench.connected(&["MRA of REQ"]),
            "RepReceived" => bench.connected(&["REP"]),
            "MraRepSent" => bench.connected(&["REP", "REP"]),
            "EstablishedA" => bench.connected(&["REP", "establish"]),
            "ReqReceived" => bench.requested(&[]),
            "MraReqSent" => bench.requested(&["REQ"]),
            "RepSent" => bench.requested(&["accept"]),
            "MraRepReceived" => bench.requested(&["accept", "MRA of REP"]),
            "EstablishedP" => bench.requested(&["accept", "RTU"]),
            "DreqSent" => bench.requested(&["accept", "RTU", "disconnect"]),
            "TimeWait" => bench.requested(&["accept", "RTU", "disconnect", "DREP"]),
            "SidrReqSent" => {
                bench.id = bench
                    .cm
                    .resolve(bench.now, PEER, SERVICE, None, &[])
                    .expect("there are ids");
            }
            "SidrReqReceived" => bench.asked(&[]),
            "SidrAnswered" => bench.asked(&["answer"]),
            other => panic!("no state {other}"),
        }
        bench.outcome();
        let state = bench.state();
        let expected = column.trim_end_matches(['A', 'P']);
        let expected = if column == "SidrAnswered" {
            "TimeWait"
        } else {
            expected
        };
        assert!(state == expected || column == "Unknown" && state == "gone");
        bench
    }

    fn connect(&mut self) {
        let connected = self.cm.connect(self.now, PEER, SERVICE, None, &local(), &[]);
        self.id = connected.expect("there are ids");
    }

    fn connected(&mut self, events: &[&str]) {
        self.connect();
        events.iter().for_each(|event| self.happen(event, PEER));
    }

    fn requested(&mut self, events: &[&str]) {
        self.arrive(&req(THEIR_ID), PEER);
        let Some(CmEvent::Request { id, .. }) = self.cm.poll_event() else {
            panic!("no request")
        };
        self.id = id;
        events.iter().for_each(|event| self.happen(event, PEER));
    }

    fn asked(&mut self, events: &[&str]) {
        self.arrive(&sidr_req(THEIR_ID, SERVICE), PEER);
        let Some(CmEvent::SidrRequest { id, .. }) = self.cm.poll_event() else {
            panic!("no request")
        };
        self.id = id;
        events.iter().for_each(|event| self.happen(event, PEER));
    }

    fn arrive(&mut self, message: &CmMessage, from: IpAddr) {
        let mut mad = [0; MAD_LEN];
        message.emit(TID, &mut mad);
        self.cm.handle_mad(self.now, from, &mad);
    }

    fn happen(&mut self, event: &str, from: IpAddr) {
        let refused = self.apply(event, from);
        assert_eq!(refused, None, "{event}");
    }

    /// Applies an event of the table; returns the error of a user's call.
    fn apply(&mut self, event: &str, from: IpAddr) -> Option<CmError> {
        if let Some(message) = message(event, self.id) {
            self.arrive(&message, from);
            return None;
        }
        let (now, id) = (self.now, self.id);
        match event {
            "timeout" => self.time_out(),
            "timeouts to end" => {
                // The cell shows the last timeout, or the first one that changes the state.
                let before = self.state();
                for _ in 0..20 {
                    self.outcome();
                    self.time_out();
                    if self.state() != before {
                        break;
                    }
                }
            }
            "accept" => return self.cm.accept(now, id, &local(), &[]).err(),
            "accept, too much" => return self.cm.accept(now, id, &local(), &[0; MAD_LEN]).err(),
            "reject" => self.cm.reject(now, id, RejReason::CONSUMER, &[]),
            "establish" => self.cm.establish(id),
            "disconnect" => self.cm.disconnect(now, id),
            "answer" => {
                return self.cm.answer(now, id, SidrStatus::VALID, OUR_QPN, 1, &[]).err();
            }
            "answer, too much" => {
                let status = SidrStatus::VALID;
                let answered = self.cm.answer(now, id, status, OUR_QPN, 1, &[0; MAD_LEN]);
                return answered.err();
            }
            "orphan" => {
                let peering = Peering {
                    id,
                    local_qpn: OUR_QPN,
                    peer: PEER,
                    remote_id: THEIR_ID,
                    remote_qpn: THEIR_QPN,
                };
                self.cm.disconnect_orphan(now, &peering);
            }
            "unlisten" => self.cm.unlisten(now, SERVICE),
            "release" => drop(self.cm.release_all(SERVICE)),
            "destroy" => self.cm.destroy(id),
            other => panic!("no event {other}"),
        }
        None
    }

    fn time_out(&mut self) {
        if let Some(at) = self.cm.poll_timeout() {
            self.now = at;
            self.cm.handle_timeout(at);
        }
    }

    fn state(&self) -> String {
        self.cm
            .state(self.id)
            .map_or_else(|| "gone".to_owned(), |state| format!("{state:?}"))
    }

    /// Returns the messages sent and the events for the user.
    fn outcome(&mut self) -> (String, String) {
        let sent = std::iter::from_fn(|| self.cm.poll_transmit())
            .map(|(_, _, mad)| sent_name(&mad[..]))
            .collect::<Vec<_>>();
        let told = std::iter::from_fn(|| self.cm.poll_event())
            .map(|event| told_name(&event))
            .collect::<Vec<_>>();
        let or_nothing = |all: Vec<String>| match all.is_empty() {
            true => "-".to_owned(),
            false => all.join("+"),
        };
        (or_nothing(sent), or_nothing(told))
    }
}

fn sent_name(mad: &[u8]) -> String {
    match CmMessage::parse(mad).expect("what is sent can be read").1 {
        CmMessage::Req(_) => "REQ".into(),
        CmMessage::Mra(_) => "MRA".into(),
        CmMessage::Rej(rej) => format!("REJ{}", rej.reason.0),
        CmMessage::Rep(_) => "REP".into(),
        CmMessage::Rtu(_) => "RTU".into(),
        CmMessage::Dreq(_) => "DREQ".into(),
        CmMessage::Drep(_) => "DREP".into(),
        CmMessage::SidrReq(_) => "SIDR_REQ".into(),
        CmMessage::SidrRep(rep) => format!("SIDR_REP{}", rep.status.0),
        CmMessage::Lap(_) => "LAP".into(),
        CmMessage::Apr(apr) => format!("APR{}", apr.status.0),
    }
}

fn told_name(event: &CmEvent) -> String {
    match event {
        CmEvent::Request { .. } => "Request".into(),
        CmEvent::Reply { .. } => "Reply".into(),
        CmEvent::Established { .. } => "Established".into(),
        CmEvent::Rejected { reason, .. } => format!("Rejected{}", reason.0),
        CmEvent::Unreachable { .. } => "Unreachable".into(),
        CmEvent::Disconnected { .. } => "Disconnected".into(),
        CmEvent::SidrRequest { .. } => "SidrRequest".into(),
        CmEvent::SidrReply { status, .. } => format!("SidrReply{}", status.0),
    }
}

/// Returns the correct cell of the table.
fn observed(column: &str, event: &str) -> String {
    let mut bench = Bench::in_state(column);
    let before = bench.state();
    let refused = bench.apply(event, PEER);
    let after = bench.state();
    let next = if after == before { "=".to_owned() } else { after };
    let (sent, mut told) = bench.outcome();
    if let Some(error) = refused {
        told = format!("!{error:?}");
    }
    match format!("{next} {sent} {told}") {
        cell if cell == "= - -" => ".".to_owned(),
        cell => cell,
    }
}

/// Every event, in the order of the rows.
const EVENTS: [&str; 38] = [
    "REQ",
    "REQ same QP",
    "REQ other service",
    "REQ other GID",
    "MRA of REQ",
    "MRA of REP",
    "MRA of LAP",
    "REJ",
    "REJ other id",
    "REJ by GUID",
    "REP",
    "REP other id",
    "RTU",
    "RTU other id",
    "DREQ",
    "DREQ other QP",
    "DREQ other id",
    "DREP",
    "DREP other id",
    "LAP",
    "APR",
    "SIDR_REQ",
    "SIDR_REQ other service",
    "SIDR_REP",
    "SIDR_REP other id",
    "timeout",
    "timeouts to end",
    "accept",
    "accept, too much",
    "reject",
    "establish",
    "disconnect",
    "answer",
    "answer, too much",
    "unlisten",
    "release",
    "orphan",
    "destroy",
];

#[test]
fn table__active() {
    check(ACTIVE, &EVENTS, observed);
}

#[test]
fn table__passive() {
    check(PASSIVE, &EVENTS, observed);
}

#[test]
fn table__end() {
    check(END, &EVENTS, observed);
}

#[test]
fn table__sidr() {
    check(SIDR, &EVENTS, observed);
}

#[test]
fn table__has_every_state() {
    let columns: Vec<&str> = [ACTIVE, PASSIVE, END, SIDR]
        .iter()
        .flat_map(|table| parse(table).0)
        .collect();
    let states: std::collections::BTreeSet<String> = columns
        .into_iter()
        .map(|column| Bench::in_state(column).state())
        .collect();
    assert_eq!(states.len(), ConnectionState::COUNT + 1, "{states:?}");
}

#[test]
fn message__from_another_address_changes_nothing() {
    for table in [ACTIVE, PASSIVE, END, SIDR] {
        for column in parse(table).0 {
            for event in EVENTS {
                let mut bench = Bench::in_state(column);
                let before = bench.state();
                if message(event, bench.id).is_some() {
                    bench.apply(event, STRANGER);
                    assert_eq!(bench.state(), before, "{column}, {event}");
                    let told = bench.outcome().1;
                    assert!(
                        ["-", "Request", "SidrRequest"].contains(&told.as_str()),
                        "{column}, {event}: {told}"
                    );
                }
            }
        }
    }
}
