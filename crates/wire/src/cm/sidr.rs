//! Messages that resolve a service id to a queue pair of datagrams.

use std::fmt;

use crate::Qpn;

use super::fields::{PrivateData, ServiceId};

/// Request for the QP of a datagram service. IBTA Vol 1, 12.11.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrReq {
    /// Id of the request.
    pub request_id: u32,
    /// Partition key.
    pub pkey: u16,
    /// Requested service.
    pub service_id: ServiceId,
    /// Private data; begins with [`IpAddressing`](super::IpAddressing) if the service is named by an IP port.
    pub private_data: PrivateData<216>,
}

/// Outcome of a service id resolution. IBTA Vol 1, 12.11.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SidrStatus(
    /// The code.
    pub u8,
);

impl SidrStatus {
    /// The QPN and Q_Key are valid.
    pub const VALID: SidrStatus = SidrStatus(0);
    /// No such service.
    pub const UNSUPPORTED: SidrStatus = SidrStatus(1);
    /// The application refused.
    pub const REJECT: SidrStatus = SidrStatus(2);
    /// No QP is available.
    pub const NO_QP: SidrStatus = SidrStatus(3);
    /// The service is elsewhere.
    pub const REDIRECT: SidrStatus = SidrStatus(4);
    /// The class version is not supported.
    pub const UNSUPPORTED_VERSION: SidrStatus = SidrStatus(5);
}

impl fmt::Display for SidrStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match *self {
            SidrStatus::VALID => "it is served",
            SidrStatus::UNSUPPORTED => "no such service",
            SidrStatus::REJECT => "the program refused",
            SidrStatus::NO_QP => "no queue pair is available",
            SidrStatus::REDIRECT => "the service is elsewhere",
            SidrStatus::UNSUPPORTED_VERSION => "it needs another version of the message",
            SidrStatus(_) => "resolution refused",
        };
        write!(f, "{text} (status {})", self.0)
    }
}

/// Answer to a [`SidrReq`]. IBTA Vol 1, 12.11.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SidrRep {
    /// Id of the answered request.
    pub request_id: u32,
    /// Outcome.
    pub status: SidrStatus,
    /// QP that serves the datagrams.
    pub qpn: Qpn,
    /// Requested service.
    pub service_id: ServiceId,
    /// Q_Key of the QP.
    pub qkey: u32,
    /// Private data.
    pub private_data: PrivateData<136>,
}
