//! The vocabulary's types as messages have them.

use crate::node::SRQS_MAX;
use rdmux_rnic::{
    Access, Counters, ModifyError, Path, QpAttributes, QpState, QpType, RegisterError, SrqError, Srqn,
    Status, WcOpcode, WorkCompletion,
};
use rdmux_verbs::{AsyncEvent, ConnectParams, CreateError, Endpoint, Limits, ListenError, Qpn};
use rdmux_wire::node::control::{self as node, ErrorCode, EventKind, Message};
use rdmux_wire::node::{Completion, CompletionOpcode, CompletionStatus, QueueId};

/// Why a node refuses a request: the fields of [`Message::Error`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Refusal {
    /// Reason, for programs.
    pub(crate) code: ErrorCode,
    /// The system's number of the error; 0: there is none.
    pub(crate) number: u32,
    /// Reason, for people.
    pub(crate) text: String,
}

impl Refusal {
    pub(crate) fn new(code: ErrorCode, text: impl Into<String>) -> Refusal {
        let text = text.into();
        Refusal {
            code,
            number: 0,
            text,
        }
    }

    /// Refuses a process altogether.
    pub(crate) fn no_access(text: String) -> Refusal {
        Refusal {
            code: ErrorCode::System,
            number: rustix::io::Errno::ACCESS.raw_os_error() as u32,
            text,
        }
    }

    /// Returns the message.
    pub(crate) fn message(self) -> Message {
        let Refusal { code, number, text } = self;
        Message::Error { code, number, text }
    }

    /// Returns the error as one of the system's.
    pub(crate) fn to_io(&self) -> std::io::Error {
        use std::io::{Error, ErrorKind};
        match self.code {
            ErrorCode::System if self.number > 0 => Error::from_raw_os_error(self.number as i32),
            ErrorCode::Unsupported => Error::new(ErrorKind::Unsupported, self.text.clone()),
            ErrorCode::InUse => Error::new(ErrorKind::AddrInUse, self.text.clone()),
            _ => Error::other(self.clone()),
        }
    }

    /// Returns the system's number that says most about the error.
    pub(crate) fn number(&self) -> i32 {
        use rustix::io::Errno;
        let errno = match self.code {
            ErrorCode::System if self.number > 0 => return self.number as i32,
            ErrorCode::Limit => Errno::NOMEM,
            ErrorCode::Unsupported => Errno::OPNOTSUPP,
            ErrorCode::InUse => Errno::ADDRINUSE,
            ErrorCode::Unreachable => Errno::HOSTUNREACH,
            ErrorCode::NoObject => Errno::NOENT,
            _ => Errno::INVAL,
        };
        errno.raw_os_error()
    }
}

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Refusal {
        let code = match error.kind() {
            std::io::ErrorKind::Unsupported => ErrorCode::Unsupported,
            _ => ErrorCode::System,
        };
        Refusal {
            code,
            number: error
                .raw_os_error()
                .and_then(|number| u32::try_from(number).ok())
                .unwrap_or(0),
            text: error.to_string(),
        }
    }
}

impl From<CreateError> for Refusal {
    fn from(error: CreateError) -> Refusal {
        match error {
            CreateError::Io(error) => error.into(),
            other => Refusal::new(ErrorCode::Limit, other.to_string()),
        }
    }
}

impl From<RegisterError> for Refusal {
    fn from(error: RegisterError) -> Refusal {
        let code = match error {
            RegisterError::OutOfRange => ErrorCode::OutOfRange,
            RegisterError::FlushNotSupported => ErrorCode::FlushNotSupported,
            RegisterError::NeedsLocalWrite => ErrorCode::NeedsLocalWrite,
            RegisterError::NoPd | RegisterError::NoRegion => ErrorCode::NoObject,
            RegisterError::NoResources | RegisterError::Limit(_) => ErrorCode::Limit,
            RegisterError::Unsupported(_) => ErrorCode::Unsupported,
            RegisterError::WindowsBound => ErrorCode::State,
            RegisterError::NotMapped => ErrorCode::Memory,
            RegisterError::Refused(number) => return std::io::Error::from_raw_os_error(number).into(),
        };
        Refusal::new(code, error.to_string())
    }
}

/// Returns the error of a registration that a node has refused.
pub(crate) fn register_error(refusal: &Refusal) -> RegisterError {
    match refusal.code {
        ErrorCode::OutOfRange => RegisterError::OutOfRange,
        ErrorCode::FlushNotSupported => RegisterError::FlushNotSupported,
        ErrorCode::NeedsLocalWrite => RegisterError::NeedsLocalWrite,
        ErrorCode::NoObject => RegisterError::NoPd,
        ErrorCode::Limit => RegisterError::Limit(refusal.text.as_str().into()),
        _ => RegisterError::Refused(refusal.number()),
    }
}

/// Returns the error of a creation that a node has refused.
pub(crate) fn create_error(refusal: &Refusal) -> CreateError {
    match refusal.code {
        ErrorCode::Limit => CreateError::Limit(refusal.text.as_str().into()),
        _ => CreateError::Io(refusal.to_io()),
    }
}

impl From<ModifyError> for Refusal {
    fn from(error: ModifyError) -> Refusal {
        match error {
            ModifyError::Refused(number) => std::io::Error::from_raw_os_error(number).into(),
            other => Refusal::new(ErrorCode::State, other.to_string()),
        }
    }
}

impl From<SrqError> for Refusal {
    fn from(error: SrqError) -> Refusal {
        match error {
            SrqError::Refused(number) => std::io::Error::from_raw_os_error(number).into(),
            SrqError::NoSrq => Refusal::new(ErrorCode::NoObject, error.to_string()),
            other => Refusal::new(ErrorCode::State, other.to_string()),
        }
    }
}

impl From<ListenError> for Refusal {
    fn from(error: ListenError) -> Refusal {
        match error {
            ListenError::InUse(error) => Refusal::new(ErrorCode::InUse, error.to_string()),
            ListenError::Provider(error) => Refusal::new(ErrorCode::System, error.to_string()),
            ListenError::Io(error) => error.into(),
        }
    }
}

/// Declares both directions of a conversion between two enums with items of the same names.
macro_rules! same {
    ($wire:ident, $vocabulary:ident, $to_wire:ident, $from_wire:ident, $($item:ident)*) => {
        pub(crate) fn $from_wire(value: node::$wire) -> $vocabulary {
            match value {
                $(node::$wire::$item => $vocabulary::$item,)*
            }
        }

        pub(crate) fn $to_wire(value: $vocabulary) -> node::$wire {
            match value {
                $($vocabulary::$item => node::$wire::$item,)*
            }
        }
    };
}

same! { QpState, QpState, state_to_wire, state_of, Reset Init Rtr Rts Sqd Sqe Error }

/// Returns a transport service as messages have it; `None` if nodes do not offer it.
pub(crate) fn qp_type_to_wire(qp_type: QpType) -> Option<node::QpType> {
    match qp_type {
        QpType::Rc => Some(node::QpType::Rc),
        QpType::Uc => Some(node::QpType::Uc),
        QpType::Ud => Some(node::QpType::Ud),
        QpType::XrcSend | QpType::XrcRecv => None,
    }
}

pub(crate) fn qp_type_of(qp_type: node::QpType) -> QpType {
    match qp_type {
        node::QpType::Rc => QpType::Rc,
        node::QpType::Uc => QpType::Uc,
        node::QpType::Ud => QpType::Ud,
    }
}

/// Declares both directions of a conversion of a work completion's enum.
macro_rules! of_completion {
    ($wire:ident, $vocabulary:ident, $to_wire:ident, $from_wire:ident, $($item:ident)*; $($local:ident)*) => {
        pub(crate) fn $to_wire(value: $vocabulary) -> Option<$wire> {
            match value {
                $($vocabulary::$item => Some($wire::$item),)*
                $($vocabulary::$local => None,)*
            }
        }

        pub(crate) fn $from_wire(value: $wire) -> $vocabulary {
            match value {
                $($wire::$item => $vocabulary::$item,)*
            }
        }
    };
}

of_completion! {
    CompletionOpcode, WcOpcode, opcode_to_wire, opcode_of,
    Send Write Read CompareSwap FetchAdd AtomicWrite Flush Recv RecvRdmaWithImm;
    BindWindow Register LocalInvalidate
}

of_completion! {
    CompletionStatus, Status, outcome_to_wire, outcome_of,
    Success LocalLength LocalProtection LocalQpOperation Flushed BadResponse RemoteInvalidRequest RemoteAccess RemoteOperation
    RetryExceeded RnrRetryExceeded;
    MemoryBind
}

/// Returns a completion as rings have it. What applications cannot ask for counts as a failure of their queue pair.
pub(crate) fn completion_to_wire(queue: QueueId, wc: &WorkCompletion) -> Completion {
    Completion {
        queue,
        wr_id: wc.wr_id,
        status: outcome_to_wire(wc.status).unwrap_or(CompletionStatus::LocalQpOperation),
        opcode: opcode_to_wire(wc.opcode).unwrap_or(CompletionOpcode::Send),
        bytes: wc.byte_len,
        imm: wc.imm,
        invalidated: wc.invalidated.filter(|_| wc.imm.is_none()),
        source: wc.src_qpn,
        is_solicited: false,
    }
}

/// Returns the completion of a queue pair with this number.
pub(crate) fn completion_of(completion: &Completion, qpn: Qpn) -> WorkCompletion {
    WorkCompletion {
        wr_id: completion.wr_id,
        status: outcome_of(completion.status),
        opcode: opcode_of(completion.opcode),
        byte_len: completion.bytes,
        imm: completion.imm,
        qpn,
        invalidated: completion.invalidated,
        src_qpn: completion.source,
    }
}

/// Statuses in the order of their codes in messages.
pub(crate) fn status_to_wire(status: Status) -> u8 {
    status as u8
}

/// Returns the status of a code; an unknown one is [`Status::LocalQpOperation`].
pub(crate) fn status_of(code: u8) -> Status {
    use strum::VariantArray as _;
    let known = Status::VARIANTS.get(usize::from(code)).copied();
    known.unwrap_or(Status::LocalQpOperation)
}

/// Object of an event of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventOf {
    Qp(Qpn),
    Srq(Srqn),
    Port,
}

/// Returns the event of a queue pair, of a shared receive queue or of the port; `None` if messages have none for it.
pub(crate) fn event_to_wire(event: AsyncEvent) -> Option<(EventKind, EventOf)> {
    Some(match event {
        AsyncEvent::QpFatal(qpn) => (EventKind::QpFatal, EventOf::Qp(qpn)),
        AsyncEvent::QpRequestError(qpn) => (EventKind::QpRequestError, EventOf::Qp(qpn)),
        AsyncEvent::QpAccessError(qpn) => (EventKind::QpAccessError, EventOf::Qp(qpn)),
        AsyncEvent::CommunicationEstablished(qpn) => (EventKind::CommunicationEstablished, EventOf::Qp(qpn)),
        AsyncEvent::SqDrained(qpn) => (EventKind::SqDrained, EventOf::Qp(qpn)),
        AsyncEvent::LastWqeReached(qpn) => (EventKind::LastWqeReached, EventOf::Qp(qpn)),
        AsyncEvent::SrqLimitReached(srqn) => (EventKind::SrqLimitReached, EventOf::Srq(srqn)),
        AsyncEvent::PortActive => (EventKind::PortActive, EventOf::Port),
        AsyncEvent::PortError => (EventKind::PortError, EventOf::Port),
        AsyncEvent::CqError(_) | AsyncEvent::DeviceFatal => return None,
    })
}

/// Returns the event of a message; `qpn` and `srqn` are those of its object.
pub(crate) fn event_of(kind: EventKind, qpn: Option<Qpn>, srqn: Option<Srqn>) -> Option<AsyncEvent> {
    Some(match kind {
        EventKind::QpFatal => AsyncEvent::QpFatal(qpn?),
        EventKind::QpRequestError => AsyncEvent::QpRequestError(qpn?),
        EventKind::QpAccessError => AsyncEvent::QpAccessError(qpn?),
        EventKind::CommunicationEstablished => AsyncEvent::CommunicationEstablished(qpn?),
        EventKind::SqDrained => AsyncEvent::SqDrained(qpn?),
        EventKind::LastWqeReached => AsyncEvent::LastWqeReached(qpn?),
        EventKind::SrqLimitReached => AsyncEvent::SrqLimitReached(srqn?),
        EventKind::PortActive => AsyncEvent::PortActive,
        EventKind::PortError => AsyncEvent::PortError,
    })
}

pub(crate) fn params_to_wire(params: &ConnectParams) -> node::ConnectParams {
    node::ConnectParams {
        access: params.access.bits(),
        initiator_depth: params.initiator_depth,
        responder_resources: params.responder_resources,
        ack_timeout: params.ack_timeout,
        retry_count: params.retry_count,
        rnr_retry: params.rnr_retry,
        min_rnr_timer: params.min_rnr_timer,
        path_mtu_max: params.path_mtu_max,
        traffic_class: params.traffic_class,
        service: params.service,
        source_port: params.source_port,
    }
}

pub(crate) fn params_of(params: &node::ConnectParams) -> ConnectParams {
    ConnectParams {
        access: Access::from_bits_truncate(params.access),
        initiator_depth: params.initiator_depth,
        responder_resources: params.responder_resources,
        ack_timeout: params.ack_timeout.map(|code| code.min(31)),
        retry_count: params.retry_count.min(7),
        rnr_retry: params.rnr_retry.min(7),
        rnr_retry_max: 7,
        min_rnr_timer: params.min_rnr_timer.min(31),
        path_mtu_max: params.path_mtu_max,
        traffic_class: params.traffic_class,
        service: params.service,
        source_port: params.source_port,
    }
}

pub(crate) fn endpoint_to_wire(endpoint: &Endpoint) -> node::Endpoint {
    node::Endpoint {
        transport: endpoint.transport,
        qpn: endpoint.qpn,
        starting_psn: endpoint.starting_psn,
        responder_resources: endpoint.responder_resources,
        initiator_depth: endpoint.initiator_depth,
        rnr_retry_count: endpoint.rnr_retry_count,
        retry_count: endpoint.retry_count,
        srq: endpoint.srq,
        ack_timeout: endpoint.ack_timeout,
        path_mtu: endpoint.path_mtu,
        traffic_class: endpoint.traffic_class,
    }
}

/// Returns the endpoint of a message. The extensions of rdmux peers are between the nodes.
pub(crate) fn endpoint_of(endpoint: &node::Endpoint) -> Endpoint {
    Endpoint {
        transport: endpoint.transport,
        qpn: endpoint.qpn,
        starting_psn: endpoint.starting_psn,
        responder_resources: endpoint.responder_resources,
        initiator_depth: endpoint.initiator_depth,
        rnr_retry_count: endpoint.rnr_retry_count,
        retry_count: endpoint.retry_count,
        srq: endpoint.srq,
        ack_timeout: endpoint.ack_timeout,
        path_mtu: endpoint.path_mtu,
        traffic_class: endpoint.traffic_class,
        extensions: None,
        plain: false,
    }
}

pub(crate) fn path_to_wire(path: &Path) -> node::Path {
    node::Path {
        src: path.src,
        dst: path.dst,
        src_port: path.src_port,
        traffic_class: path.traffic_class,
    }
}

pub(crate) fn path_of(path: &node::Path) -> Path {
    Path {
        src: path.src,
        dst: path.dst,
        src_port: path.src_port,
        traffic_class: path.traffic_class,
    }
}

pub(crate) fn attributes_to_wire(attributes: &QpAttributes) -> node::Attributes {
    node::Attributes {
        access: attributes.access.map(|access| access.bits()),
        path: attributes.path.as_ref().map(path_to_wire),
        path_mtu: attributes.path_mtu,
        dest_qpn: attributes.dest_qpn,
        rq_psn: attributes.rq_psn,
        max_dest_rd_atomic: attributes.max_dest_rd_atomic,
        min_rnr_timer: attributes.min_rnr_timer,
        sq_psn: attributes.sq_psn,
        timeout: attributes.timeout,
        retry_count: attributes.retry_count,
        rnr_retry: attributes.rnr_retry,
        max_rd_atomic: attributes.max_rd_atomic,
        rate_limit_bps: attributes.rate_limit_bps,
        qkey: attributes.qkey,
    }
}

pub(crate) fn attributes_of(attributes: &node::Attributes) -> QpAttributes {
    QpAttributes {
        access: attributes.access.map(Access::from_bits_truncate),
        path: attributes.path.as_ref().map(path_of),
        path_mtu: attributes.path_mtu,
        dest_qpn: attributes.dest_qpn,
        rq_psn: attributes.rq_psn,
        max_dest_rd_atomic: attributes.max_dest_rd_atomic,
        min_rnr_timer: attributes.min_rnr_timer,
        sq_psn: attributes.sq_psn,
        timeout: attributes.timeout,
        retry_count: attributes.retry_count,
        rnr_retry: attributes.rnr_retry,
        max_rd_atomic: attributes.max_rd_atomic,
        rate_limit_bps: attributes.rate_limit_bps,
        qkey: attributes.qkey,
        ..QpAttributes::default()
    }
}

pub(crate) fn counters_to_wire(counters: &Counters) -> Vec<u64> {
    counters.iter().map(|(_, value, _)| value).collect()
}

pub(crate) fn counters_of(values: &[u64]) -> Counters {
    Counters::of_values(values)
}

/// Returns the limits of an application on a device with these limits.
pub(crate) fn limits_of(limits: &node::Limits) -> Limits {
    Limits {
        queue_pairs: limits.queue_pairs,
        shared_receive_queues: SRQS_MAX as u32,
        memory_regions: limits.memory_regions,
        work_requests: Some(limits.work_requests),
        completions: None,
        sges: limits.sges,
        inline_bytes: limits.inline_bytes,
        message_bytes: limits.message_bytes,
        mcast_groups: 0,
        mcast_queue_pairs: 0,
    }
}

#[cfg(test)]
mod tests {
    use strum::VariantArray as _;

    use super::*;

    #[test]
    fn status_of__each_status() {
        for status in Status::VARIANTS {
            assert_eq!(status_of(status_to_wire(*status)), *status);
        }
        assert_eq!(status_of(200), Status::LocalQpOperation);
    }

    #[test]
    fn attributes_of__what_was_sent() {
        let attributes = QpAttributes {
            access: Some(Access::REMOTE_WRITE),
            dest_qpn: Some(Qpn::new(5)),
            timeout: Some(14),
            ..QpAttributes::default()
        };
        let sent = attributes_to_wire(&attributes);
        assert_eq!(attributes_to_wire(&attributes_of(&sent)), sent);
    }

    #[test]
    fn counters_of__in_their_order_and_fewer() {
        let counters = Counters {
            rcvd_pkts: 1,
            sent_pkts: 2,
            icrc_residual_16: 3,
            ..Counters::default()
        };
        let values = counters_to_wire(&counters);
        assert_eq!(counters_of(&values), counters);
        assert_eq!(counters_of(&values[..1]).sent_pkts, 0);
    }
}
