//! NVMe/RDMA: the private data of the messages of the connection manager.
//!
//! Sections are those of the NVMe over RDMA Transport Specification 1.0. Capsules have no header: a command is a SEND of an
//! [`Sqe`](crate::nvme::Sqe) and of data in its capsule, a response that of a [`Cqe`](crate::nvme::Cqe).

use std::fmt;

use crate::Malformed;
use crate::bytes::{le16, need, put};

/// Bytes of [`Request`]. 3.6.2.
pub const REQUEST_LEN: usize = 32;
/// Bytes of [`Accept`]. 3.6.3.
pub const ACCEPT_LEN: usize = 32;
/// Bytes of a reject's private data. 3.6.4.
pub const REJECT_LEN: usize = 4;

/// The only format of private data (RECFMT).
const RECORD_FORMAT: u16 = 0;

/// A host's request for a queue, in the REQ. 3.6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The queue's id; 0 is the admin queue.
    pub qid: u16,
    /// Receives that the host posts: responses that may be on their way (HRQSIZE), not less 1.
    pub receives: u16,
    /// Entries of the submission queue, less 1 (HSQSIZE).
    pub sends: u16,
    /// The controller; 0 for the admin queue.
    pub cntlid: u16,
}

impl Request {
    /// Parses the private data of a REQ, which may be padded.
    ///
    /// # Errors
    /// The status with which a controller rejects it.
    pub fn parse(bytes: &[u8]) -> Result<Request, Reject> {
        if bytes.len() < REQUEST_LEN {
            return Err(Reject::Length);
        }
        if le16(bytes, 0) != RECORD_FORMAT {
            return Err(Reject::RecordFormat);
        }
        Ok(Request {
            qid: le16(bytes, 2),
            receives: le16(bytes, 4),
            sends: le16(bytes, 6),
            cntlid: le16(bytes, 8),
        })
    }

    /// Returns the private data.
    pub fn emit(&self) -> [u8; REQUEST_LEN] {
        let mut bytes = [0; REQUEST_LEN];
        put(&mut bytes, 0, &RECORD_FORMAT.to_le_bytes());
        put(&mut bytes, 2, &self.qid.to_le_bytes());
        put(&mut bytes, 4, &self.receives.to_le_bytes());
        put(&mut bytes, 6, &self.sends.to_le_bytes());
        put(&mut bytes, 8, &self.cntlid.to_le_bytes());
        bytes
    }
}

/// A controller's answer that it has the queue, in the REP. 3.6.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accept {
    /// Receives that the controller posts: commands that may be on their way (CRQSIZE).
    pub receives: u16,
}

impl Accept {
    /// Parses the private data of a REP, which may be padded.
    ///
    /// # Errors
    /// It is too short or has another format.
    pub fn parse(bytes: &[u8]) -> Result<Accept, Malformed> {
        need("private data of an accepted queue", bytes, 4)?;
        check_format(bytes)?;
        Ok(Accept {
            receives: le16(bytes, 2),
        })
    }

    /// Returns the private data.
    pub fn emit(&self) -> [u8; ACCEPT_LEN] {
        let mut bytes = [0; ACCEPT_LEN];
        put(&mut bytes, 0, &RECORD_FORMAT.to_le_bytes());
        put(&mut bytes, 2, &self.receives.to_le_bytes());
        bytes
    }
}

fn check_format(bytes: &[u8]) -> Result<(), Malformed> {
    match le16(bytes, 0) {
        RECORD_FORMAT => Ok(()),
        value => Err(Malformed::Undefined {
            what: "format of private data",
            value: value.into(),
        }),
    }
}

/// A reason for which a controller does not make a queue (STS), in the REJ. 3.6.4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Reject {
    /// The private data are too short.
    Length = 1,
    /// Their format is unknown.
    RecordFormat = 2,
    /// The queue's id is invalid.
    Qid = 3,
    /// The submission queue's size is invalid.
    Sends = 4,
    /// The number of the host's receives is invalid.
    Receives = 5,
    /// The controller has no room for the queue.
    Resources = 6,
    /// The host answers no RDMA READ (its responder resources, IRD).
    ResponderResources = 7,
    /// The host's initiator depth is invalid (ORD).
    InitiatorDepth = 8,
    /// The controller's id is invalid.
    Cntlid = 9,
}

impl Reject {
    /// All of them, in the order of their numbers.
    pub const ALL: [Reject; 9] = [
        Reject::Length,
        Reject::RecordFormat,
        Reject::Qid,
        Reject::Sends,
        Reject::Receives,
        Reject::Resources,
        Reject::ResponderResources,
        Reject::InitiatorDepth,
        Reject::Cntlid,
    ];

    /// Parses the private data of a REJ, which may be padded.
    ///
    /// # Errors
    /// They are too short, have another format, or a status without a meaning.
    pub fn parse(bytes: &[u8]) -> Result<Reject, Malformed> {
        need("private data of a rejected queue", bytes, REJECT_LEN)?;
        check_format(bytes)?;
        let status = le16(bytes, 2);
        let known = Reject::ALL.into_iter().find(|known| *known as u16 == status);
        known.ok_or(Malformed::Undefined {
            what: "status of a rejected queue",
            value: status.into(),
        })
    }

    /// Returns the private data.
    pub fn emit(self) -> [u8; REJECT_LEN] {
        let mut bytes = [0; REJECT_LEN];
        put(&mut bytes, 0, &RECORD_FORMAT.to_le_bytes());
        put(&mut bytes, 2, &(self as u16).to_le_bytes());
        bytes
    }
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reject::Length => "the private data are too short",
            Reject::RecordFormat => "the private data have an unknown format",
            Reject::Qid => "the queue's id is invalid",
            Reject::Sends => "the size of the submission queue is invalid",
            Reject::Receives => "the number of the host's receives is invalid",
            Reject::Resources => "the controller has no room for the queue",
            Reject::ResponderResources => "the host answers no RDMA READ",
            Reject::InitiatorDepth => "the host's initiator depth is invalid",
            Reject::Cntlid => "the controller's id is invalid",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request {
        qid: 3,
        receives: 128,
        sends: 127,
        cntlid: 0x1234,
    };

    #[test]
    fn request__has_the_fields_of_the_specification() {
        let mut expected = [0; REQUEST_LEN];
        expected[..10].copy_from_slice(&[0, 0, 3, 0, 128, 0, 127, 0, 0x34, 0x12]);
        assert_eq!(REQUEST.emit(), expected);
        assert_eq!(Request::parse(&expected), Ok(REQUEST));
        // The field of a REQ is longer.
        let mut padded = [0; 56];
        padded[..REQUEST_LEN].copy_from_slice(&expected);
        assert_eq!(Request::parse(&padded), Ok(REQUEST));
    }

    #[test]
    fn request__is_rejected_with_the_status_of_what_is_wrong() {
        let mut bytes = REQUEST.emit();
        assert_eq!(Request::parse(&bytes[..31]), Err(Reject::Length));
        assert_eq!(Request::parse(&[]), Err(Reject::Length));
        bytes[1] = 1;
        assert_eq!(Request::parse(&bytes), Err(Reject::RecordFormat));
    }

    #[test]
    fn accept__round_trips() {
        let accept = Accept { receives: 0x0180 };
        let bytes = accept.emit();
        assert_eq!(bytes[..4], [0, 0, 0x80, 1]);
        assert!(bytes[4..].iter().all(|byte| *byte == 0));
        assert_eq!(Accept::parse(&bytes), Ok(accept));
        assert!(Accept::parse(&bytes[..3]).is_err());
        assert!(Accept::parse(&[1, 0, 2, 0]).is_err());
    }

    #[test]
    fn reject__has_the_numbers_of_the_specification() {
        for (status, number) in Reject::ALL.into_iter().zip(1u8..) {
            assert_eq!(status.emit(), [0, 0, number, 0]);
            assert_eq!(Reject::parse(&status.emit()), Ok(status));
        }
        for bytes in [&[0, 0, 0, 0][..], &[0, 0, 10, 0], &[1, 0, 1, 0], &[0, 0, 1]] {
            assert!(Reject::parse(bytes).is_err(), "{bytes:?}");
        }
    }
}
