//! Messages between a node, the process that owns a device, and the applications of the host that use the device through it.
//!
//! They travel as packets of a Unix socket of type SEQPACKET; descriptors (files in memory, doorbells) go with the packet that names them. The
//! work requests and completions themselves travel in rings.
//!
//! Each message is one packet, big endian throughout, of at most [`MESSAGE_LEN_MAX`] bytes:
//!
//! ```text
//! 0  type u16 | version u16
//! 4  request u32: an answer repeats that of its request; 0 in an event of the node, which nobody has asked for
//! 8  body: the fields of the type, in their order
//! ```
//!
//! [`Message`] lists the types and fields. A number has its own length; a `bool` and the mark before an optional field are one byte, 0 or 1; an
//! address is the byte 4 or 6 and as many bits as it has; a text has a length of two bytes and is UTF-8 without control characters; private
//! data have a length of one byte; a list has a count of two bytes.
//!
//! The application begins with [`Message::Attach`], and the node answers [`Message::Attached`] or [`Message::Error`]. These three keep version
//! [`VERSION_FOREVER`], so that any two versions can agree; all others have the version that was agreed.

use std::net::{IpAddr, SocketAddr};

use crate::cm::{RejReason, ServiceId};
use crate::roce::{PathMtu, Transport};
use crate::{LKey, Malformed, Psn, Qpn, RKey};

#[cfg(test)]
mod tests;

use super::codec::{codes, messages, record};

/// Maximum length of a message in bytes.
pub const MESSAGE_LEN_MAX: usize = 2048;
/// Maximum length of a text in bytes.
pub const TEXT_LEN_MAX: usize = 512;
/// Maximum number of values in a list.
pub const VALUES_MAX: usize = 192;
/// Version of the protocol.
pub const VERSION: u16 = 3;
/// Version of the messages by which two versions agree.
pub const VERSION_FOREVER: u16 = 1;

/// Private data of connection management: at most 255 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrivateData(Vec<u8>);

impl PrivateData {
    /// Maximum length in bytes.
    pub const LEN_MAX: usize = 255;

    /// Returns private data of these bytes; `None` if there are more than [`PrivateData::LEN_MAX`].
    pub fn new(bytes: &[u8]) -> Option<PrivateData> {
        (bytes.len() <= PrivateData::LEN_MAX).then(|| PrivateData(bytes.to_vec()))
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

codes! {
    /// Transport service of a queue pair that a node offers.
    QpType: u8 {
        /// Reliable connection.
        Rc = 1,
        /// Unreliable connection.
        Uc = 2,
        /// Unreliable datagram.
        Ud = 3,
    }
}

codes! {
    /// State of a queue pair. IBTA Vol 1, 10.3.1.
    QpState: u8 {
        /// Created.
        Reset = 0,
        /// Takes receives.
        Init = 1,
        /// Ready to receive.
        Rtr = 2,
        /// Ready to send.
        Rts = 3,
        /// Send queue drained.
        Sqd = 4,
        /// Send queue error.
        Sqe = 5,
        /// Error.
        Error = 6,
    }
}

codes! {
    /// Kind of an object that an application has in a node. Each kind has its own ids.
    Kind: u8 {
        /// Protection domain.
        Pd = 1,
        /// Memory region.
        Region = 2,
        /// Queue pair.
        Qp = 3,
        /// Listener.
        Listener = 4,
        /// Connection, or an attempt to connect.
        Connection = 5,
        /// Shared receive queue.
        Srq = 6,
        /// Address handle.
        AddressHandle = 7,
    }
}

codes! {
    /// Asynchronous event. The values are those of `enum ibv_event_type`.
    EventKind: u8 {
        /// A queue pair went to error for a reason of its own device.
        QpFatal = 1,
        /// A peer asked a queue pair for something invalid.
        QpRequestError = 2,
        /// A peer asked a queue pair for memory that it may not reach.
        QpAccessError = 3,
        /// Data came in on a queue pair that is still in RTR.
        CommunicationEstablished = 4,
        /// The send queue of a queue pair in SQD has drained.
        SqDrained = 5,
        /// The network takes packets again.
        PortActive = 9,
        /// The network takes no packets.
        PortError = 10,
        /// Fewer receives than the limit are left in a shared receive queue.
        SrqLimitReached = 15,
        /// A queue pair in error consumes no further receives of its shared receive queue. All completions of receives before it are in the
        /// ring.
        LastWqeReached = 16,
    }
}

codes! {
    /// Why a request was refused, for programs.
    ErrorCode: u16 {
        /// The message is malformed, or not expected now. The node ends the connection.
        Protocol = 1,
        /// The versions have none in common.
        Version = 2,
        /// The application has no object of this kind and id.
        NoObject = 3,
        /// The application, or the device, has as many objects as it may have.
        Limit = 4,
        /// The memory came without a descriptor, or as one that the node cannot map without risk.
        Memory = 5,
        /// A region exceeds its memory or the address space.
        OutOfRange = 6,
        /// The memory cannot be flushed as the region's rights ask.
        FlushNotSupported = 7,
        /// Remote write and atomic rights need local write rights.
        NeedsLocalWrite = 8,
        /// Another process offers the service.
        InUse = 9,
        /// The device does not support it.
        Unsupported = 10,
        /// The object is in another state.
        State = 11,
        /// The peer does not answer.
        Unreachable = 12,
        /// A system call, or the device, failed; the error has its number.
        System = 13,
    }
}

record! {
    /// Limits of a device, as `rdmux_verbs::Limits`.
    #[derive(Copy)]
    Limits {
        /// Queue pairs.
        queue_pairs: u32,
        /// Memory regions.
        memory_regions: u32,
        /// Requests that a queue of a queue pair can hold.
        work_requests: u32,
        /// Scatter/gather elements of a request.
        sges: u32,
        /// Bytes of inline data of a send request.
        inline_bytes: u32,
        /// Bytes of a message.
        message_bytes: u32,
    }
}

record! {
    /// One side of a connection. IBTA Vol 1, 12.6.5 and 12.6.8.
    #[derive(Copy)]
    Endpoint {
        /// Transport service.
        transport: Transport,
        /// QPN.
        qpn: Qpn,
        /// PSN at which the receiver of this starts sending.
        starting_psn: Psn,
        /// READs, atomics and FLUSHes that this side can answer at a time.
        responder_resources: u8,
        /// READs, atomics and FLUSHes that this side wants to have in flight.
        initiator_depth: u8,
        /// RNR retry count that the other side shall use.
        rnr_retry_count: u8,
        /// Retry count that the other side shall use.
        retry_count: u8,
        /// Set when the queue pair takes receives from a shared receive queue.
        srq: bool,
        /// Local ACK timeout code.
        ack_timeout: u8,
        /// Path MTU.
        path_mtu: PathMtu,
        /// Traffic class.
        traffic_class: u8,
    }
}

record! {
    /// Parameters of connection establishment, as `rdmux_verbs::ConnectParams`.
    #[derive(Copy)]
    ConnectParams {
        /// Rights of the peer on the queue pair, valued as `enum ibv_access_flags`.
        access: u32,
        /// READs, FLUSHes and atomics of this side in flight at a time.
        initiator_depth: u8,
        /// The peer's READs, FLUSHes and atomics that can be answered at a time.
        responder_resources: u8,
        /// Local ACK timeout code.
        ack_timeout: Option<u8>,
        /// Retries on timeout.
        retry_count: u8,
        /// Retries on RNR NAK.
        rnr_retry: u8,
        /// RNR timer code that the peer is asked to wait.
        min_rnr_timer: u8,
        /// Largest path MTU to use.
        path_mtu_max: PathMtu,
        /// IPv4 TOS or IPv6 traffic class.
        traffic_class: u8,
        /// Requested service; none: the port's service of RDMA_PS_TCP.
        service: Option<ServiceId>,
        /// Source port that the peer is shown.
        source_port: u16,
    }
}

record! {
    /// Pages of an application that are in a file in memory, which begins with the first of them.
    #[derive(Copy)]
    Pages {
        /// Address of the first one in the application.
        address: u64,
        /// Bytes.
        length: u64,
    }
}

record! {
    /// Addresses of a queue pair, as `rdmux_rnic::Path`.
    #[derive(Copy)]
    Path {
        /// Own address.
        src: IpAddr,
        /// The peer's address.
        dst: IpAddr,
        /// UDP source port.
        src_port: u16,
        /// Traffic class.
        traffic_class: u8,
    }
}

record! {
    /// Attributes that a modify sets, as `rdmux_rnic::QpAttributes`. Those that two ends agree on by CM are not among them.
    #[derive(Copy, Default)]
    Attributes {
        /// Rights of peers on the queue pair, valued as `enum ibv_access_flags`.
        access: Option<u32>,
        /// Addresses.
        path: Option<Path>,
        /// Path MTU in bytes.
        path_mtu: Option<u32>,
        /// The peer's QPN.
        dest_qpn: Option<Qpn>,
        /// First PSN to be received.
        rq_psn: Option<Psn>,
        /// READs, atomics and FLUSHes of the peer that are kept for replay.
        max_dest_rd_atomic: Option<u8>,
        /// RNR timer code.
        min_rnr_timer: Option<u8>,
        /// First PSN to be sent.
        sq_psn: Option<Psn>,
        /// Local ACK timeout code.
        timeout: Option<u8>,
        /// Retries on timeout.
        retry_count: Option<u8>,
        /// Retries on RNR NAK.
        rnr_retry: Option<u8>,
        /// READs, atomics and FLUSHes in flight.
        max_rd_atomic: Option<u8>,
        /// Highest sending rate in bits per second; 0 for none.
        rate_limit_bps: Option<u64>,
        /// Q_Key that it demands of datagrams.
        qkey: Option<u32>,
    }
}

messages! {
    up to MESSAGE_LEN_MAX, VERSION, VERSION_FOREVER for 1 | 2 | 5;
    /// Application: the first message.
    1 Attach {
        /// Lowest version that it understands.
        version_min: u16,
        /// Highest version that it understands.
        version_max: u16,
        /// Name of the program, for people.
        name: String,
    }
    /// Node: the application is attached. The descriptors of its rings and doorbells come with it.
    2 Attached {
        /// Version of all messages from now on.
        version: u16,
        /// Address of the device.
        address: IpAddr,
        /// Features of the device that the node passes on, valued as `rdmux_verbs::Features`.
        features: u32,
        /// Limits of the application.
        limits: Limits,
        /// Largest path MTU of the device's link.
        active_mtu: PathMtu,
        /// Number of completion vectors.
        vectors: u32,
        /// Slots of the ring of requests.
        submission_slots: u32,
        /// Slots of the ring of completions.
        completion_slots: u32,
    }
    /// Node: the object was made.
    3 Made {
        /// Its id, among the application's objects of its kind.
        id: u32,
    }
    /// Node: the request was carried out.
    4 Done {}
    /// Node: the request was refused.
    5 Error {
        /// Reason, for programs.
        code: ErrorCode,
        /// The system's number of the error; 0: there is none.
        number: u32,
        /// Reason, for people.
        text: String,
    }
    /// Application: make a protection domain. Answer: [`Message::Made`].
    6 AllocPd {}
    /// Application: register memory, whose file comes with the message. Answer: [`Message::Registered`].
    7 Register {
        /// The protection domain.
        pd: u32,
        /// Offset of the region in the file.
        offset: u64,
        /// Bytes of the region.
        length: u64,
        /// Address of its first byte in work requests.
        iova: u64,
        /// Rights, valued as `enum ibv_access_flags`.
        access: u32,
    }
    /// Node: the memory is registered.
    8 Registered {
        /// The region.
        id: u32,
        /// Its local key.
        lkey: LKey,
        /// Its remote key.
        rkey: RKey,
    }
    /// Application: make a queue pair. Answer: [`Message::QpMade`].
    9 CreateQp {
        /// The protection domain.
        pd: u32,
        /// Transport service.
        qp_type: QpType,
        /// Send requests that it holds.
        max_send_wr: u32,
        /// Receive requests that it holds.
        max_recv_wr: u32,
        /// The shared receive queue from which it takes its receives.
        srq: Option<u32>,
        /// Set if a WRITE of which nobody knows whether it took effect may take effect twice.
        replays_writes: bool,
    }
    /// Node: the queue pair was made.
    10 QpMade {
        /// Its id, by which the rings name it.
        id: u32,
        /// Its number on the network.
        qpn: Qpn,
    }
    /// Application: change state and attributes of a queue pair. Answer: [`Message::Done`].
    11 Modify {
        /// The queue pair.
        qp: u32,
        /// State to move to.
        to: QpState,
        /// Attributes.
        attributes: Attributes,
    }
    /// Application: what is known about a queue pair. Answer: [`Message::QpInfo`].
    12 Query {
        /// The queue pair.
        qp: u32,
    }
    /// Node: what is known about a queue pair.
    13 QpInfo {
        /// State.
        state: QpState,
        /// The peer's QPN.
        dest_qpn: Qpn,
        /// Addresses, once they are set.
        path: Option<Path>,
        /// Path MTU in bytes.
        path_mtu: u32,
        /// Q_Key that it demands of datagrams.
        qkey: u32,
        /// Send requests that the device has and that are not complete.
        send_outstanding: u32,
        /// Receive requests that the device has and that are not used up.
        recv_posted: u32,
        /// Carrier of its packets, once it has a peer.
        carrier: Option<String>,
    }
    /// Application: retire a queue pair. Answer: [`Message::Done`].
    14 Retire {
        /// The queue pair.
        qp: u32,
    }
    /// Application: destroy an object. Answer: [`Message::Done`]; from then on its id may name another object.
    15 Destroy {
        /// Kind of the object.
        kind: Kind,
        /// The object.
        id: u32,
    }
    /// Application: listen for connections to a service. Answer: [`Message::Made`]; requests come as [`Message::Requested`].
    16 Listen {
        /// The service.
        service: ServiceId,
        /// Set to take requests for UC as well as for RC.
        unreliable: bool,
    }
    /// Application: connect a queue pair. Answer: [`Message::Made`] with an attempt, whose result comes as [`Message::Connected`] or
    /// [`Message::Refused`].
    17 Connect {
        /// The queue pair.
        qp: u32,
        /// Address and port of the listener.
        peer: SocketAddr,
        /// Parameters.
        params: ConnectParams,
        /// Data for the listener.
        private_data: PrivateData,
    }
    /// Application: accept a request with a queue pair. Answer: [`Message::Made`] with the connection.
    18 Accept {
        /// The request.
        request: u32,
        /// The queue pair.
        qp: u32,
        /// Parameters.
        params: ConnectParams,
        /// Data for the peer.
        private_data: PrivateData,
    }
    /// Application: refuse a request. Answer: [`Message::Done`].
    19 Reject {
        /// The request.
        request: u32,
        /// Data for the peer.
        private_data: PrivateData,
    }
    /// Application: end a connection. Answer: [`Message::Done`].
    20 Disconnect {
        /// The connection.
        connection: u32,
    }
    /// Application: the counters of the device. Answer: [`Message::Counts`].
    21 Count {}
    /// Node: the counters of the device, in the order of `rdmux_rnic::Counters`.
    22 Counts {
        /// Values.
        values: Vec<u64>,
    }
    /// Application: the path MTU towards a peer. Answer: [`Message::Mtu`].
    23 AskMtu {
        /// The peer.
        peer: IpAddr,
    }
    /// Node: the path MTU.
    24 Mtu {
        /// The path MTU.
        mtu: PathMtu,
    }
    /// Application: the numbers of the application's objects. Answer: [`Message::Objects`].
    25 CountObjects {}
    /// Node: the numbers of the application's objects.
    26 Objects {
        /// Queue pairs.
        qps: u32,
        /// Memory regions.
        regions: u32,
    }
    /// Node, event: a peer wants to connect.
    27 Requested {
        /// The listener.
        listener: u32,
        /// The request.
        request: u32,
        /// The peer's address.
        peer: IpAddr,
        /// The source port that the peer sent.
        peer_port: u16,
        /// The peer's side.
        remote: Endpoint,
        /// Data from the peer.
        private_data: PrivateData,
    }
    /// Node, event: an attempt has become a connection, and its queue pair is ready.
    28 Connected {
        /// The connection, by the id of the attempt.
        connection: u32,
        /// The peer's side.
        remote: Option<Endpoint>,
        /// Data from the peer.
        private_data: PrivateData,
    }
    /// Node, event: an attempt has failed, and its id is free.
    29 Refused {
        /// The attempt.
        connection: u32,
        /// The peer's reason, if the peer refused it.
        reason: Option<RejReason>,
        /// Data from the peer.
        private_data: PrivateData,
        /// Reason, for programs.
        code: ErrorCode,
        /// Reason, for people.
        text: String,
    }
    /// Node, event: a connection has changed.
    30 Progressed {
        /// The connection.
        connection: u32,
        /// Set once both ends have established it.
        established: bool,
        /// Set once an end has ended it.
        ended: bool,
    }
    /// Node, event: a queue pair went to error on its own.
    31 Failed {
        /// The queue pair.
        qp: u32,
        /// Status, valued as `enum ibv_wc_status`.
        status: u8,
    }
    /// Node, event: an asynchronous event.
    32 Event {
        /// Kind.
        kind: EventKind,
        /// The queue pair, or the shared receive queue; 0 for events of the port.
        object: u32,
    }
    /// Application: it offers the memory of its process, whose descriptor (`/proc/self/mem`) comes with the message. Answer: [`Message::Done`].
    33 OfferMemory {}
    /// Application: register memory of its process, which it has offered. If some of its pages are in a file, that comes with the message.
    /// Answer: [`Message::Registered`].
    34 RegisterOffered {
        /// The protection domain.
        pd: u32,
        /// Address of the region in the application.
        address: u64,
        /// Bytes of the region.
        length: u64,
        /// Address of its first byte in work requests.
        iova: u64,
        /// Rights, valued as `enum ibv_access_flags`.
        access: u32,
        /// Its pages that are in a file.
        pages: Option<Pages>,
    }
    /// Application: make a shared receive queue. Answer: [`Message::SrqMade`].
    35 CreateSrq {
        /// The protection domain.
        pd: u32,
        /// Receives that it holds.
        max_wr: u32,
    }
    /// Node: the shared receive queue was made.
    36 SrqMade {
        /// Its id, by which the rings name it.
        id: u32,
        /// Its number in the device.
        number: u32,
    }
    /// Application: change the size or the limit of a shared receive queue. Answer: [`Message::Done`].
    37 ModifySrq {
        /// The shared receive queue.
        srq: u32,
        /// New size.
        max_wr: Option<u32>,
        /// Limit below which an event is raised; 0: none.
        limit: Option<u32>,
    }
    /// Application: what is known about a shared receive queue. Answer: [`Message::SrqInfo`].
    38 QuerySrq {
        /// The shared receive queue.
        srq: u32,
    }
    /// Node: what is known about a shared receive queue.
    39 SrqInfo {
        /// Receives that it holds.
        max_wr: u32,
        /// Receives that are posted and not used up.
        posted: u32,
        /// The limit, while it is armed.
        limit: Option<u32>,
    }
    /// Application: make an address handle, for datagrams to a device of an address. Answer: [`Message::Made`].
    40 CreateAddressHandle {
        /// Address of that device.
        address: IpAddr,
        /// IPv4 TOS or IPv6 traffic class.
        traffic_class: u8,
    }
}
