//! Fabrics commands. 6.

use std::fmt;

use super::{Cid, Nqn, NsId, Opcode, Register, Sqe};
use crate::Malformed;
use crate::bytes::{le16, le32, le64, need, put};

/// Bytes of the data of Connect.
pub const CONNECT_DATA_LEN: usize = 1024;

/// Type of a fabrics command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FabricsType(pub u8);

impl FabricsType {
    /// Property Set. 6.6.
    pub const PROPERTY_SET: FabricsType = FabricsType(0x00);
    /// Connect. 6.3.
    pub const CONNECT: FabricsType = FabricsType(0x01);
    /// Property Get. 6.5.
    pub const PROPERTY_GET: FabricsType = FabricsType(0x04);
    /// Authentication Send. 6.2.
    pub const AUTHENTICATION_SEND: FabricsType = FabricsType(0x05);
    /// Authentication Receive. 6.1.
    pub const AUTHENTICATION_RECEIVE: FabricsType = FabricsType(0x06);

    /// Returns the type of a fabrics command.
    pub fn of(sqe: &Sqe) -> FabricsType {
        FabricsType(sqe.byte(4))
    }

    pub(super) fn command(self, cid: Cid) -> Sqe {
        Sqe::new(Opcode::FABRICS, cid, NsId(self.0.into()))
    }
}

/// Connect: the first command of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// Record format, 0.
    pub record_format: u16,
    /// The queue; 0 is the admin queue.
    pub qid: u16,
    /// Entries of the submission queue, less 1.
    pub sq_size: u16,
    /// The host turns the flow control of the submission queue off.
    pub no_flow_control: bool,
    /// Keep-alive timeout in milliseconds; 0 is none.
    pub keep_alive_ms: u32,
}

impl Connect {
    const NO_FLOW_CONTROL: u8 = 1 << 2;

    /// Reads the command.
    pub fn parse(sqe: &Sqe) -> Connect {
        let bytes = sqe.as_bytes();
        Connect {
            record_format: le16(bytes, 40),
            qid: le16(bytes, 42),
            sq_size: le16(bytes, 44),
            no_flow_control: bytes[46] & Connect::NO_FLOW_CONTROL != 0,
            keep_alive_ms: le32(bytes, 48),
        }
    }

    /// Returns the command, without a place for its data.
    pub fn command(&self, cid: Cid) -> Sqe {
        let mut sqe = FabricsType::CONNECT.command(cid);
        let bytes = sqe.bytes_mut();
        put(bytes, 40, &self.record_format.to_le_bytes());
        put(bytes, 42, &self.qid.to_le_bytes());
        put(bytes, 44, &self.sq_size.to_le_bytes());
        bytes[46] = if self.no_flow_control {
            Connect::NO_FLOW_CONTROL
        } else {
            0
        };
        put(bytes, 48, &self.keep_alive_ms.to_le_bytes());
        sqe
    }
}

/// Host identifier: the same for all controllers of a host.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostId(pub [u8; 16]);

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostId({:032x})", u128::from_be_bytes(self.0))
    }
}

/// Data of Connect: who connects to what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    /// The host.
    pub host_id: HostId,
    /// The controller; 0xffff on an admin queue: any.
    pub cntlid: u16,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The host's name.
    pub host: Nqn,
}

impl ConnectData {
    /// Any controller.
    pub const ANY_CONTROLLER: u16 = 0xffff;
    /// Offset of the controller's id.
    pub const CNTLID_AT: u16 = 16;
    /// Offset of the subsystem's name.
    pub const SUBSYSTEM_AT: u16 = 256;
    /// Offset of the host's name.
    pub const HOST_AT: u16 = 512;

    /// Parses the data.
    ///
    /// # Errors
    /// A name is invalid, or there are fewer than [`CONNECT_DATA_LEN`] bytes. The offset of the invalid name is the second part of the error.
    pub fn parse(bytes: &[u8]) -> Result<ConnectData, (Malformed, u16)> {
        need("Connect data", bytes, CONNECT_DATA_LEN).map_err(|error| (error, 0))?;
        let name = |what, at| Nqn::parse(what, &bytes[usize::from(at)..]).map_err(|error| (error, at));
        let mut host_id = [0; 16];
        host_id.copy_from_slice(&bytes[..16]);
        Ok(ConnectData {
            host_id: HostId(host_id),
            cntlid: le16(bytes, 16),
            subsystem: name("name of a subsystem", ConnectData::SUBSYSTEM_AT)?,
            host: name("name of a host", ConnectData::HOST_AT)?,
        })
    }

    /// Writes [`CONNECT_DATA_LEN`] bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        bytes[..CONNECT_DATA_LEN].fill(0);
        put(bytes, 0, &self.host_id.0);
        put(bytes, 16, &self.cntlid.to_le_bytes());
        self.subsystem.emit(&mut bytes[256..]);
        self.host.emit(&mut bytes[512..]);
    }
}

/// Property Get, or Property Set with a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Property {
    /// The register.
    pub register: Register,
    /// It has 8 bytes, not 4.
    pub is_wide: bool,
    /// Value to set.
    pub value: u64,
}

impl Property {
    /// Reads the command.
    pub fn parse(sqe: &Sqe) -> Property {
        let bytes = sqe.as_bytes();
        Property {
            is_wide: bytes[40] & 7 == 1,
            register: Register(le32(bytes, 44)),
            value: le64(bytes, 48),
        }
    }

    /// Returns the command that gets or sets the property.
    pub fn command(&self, kind: FabricsType, cid: Cid) -> Sqe {
        let mut sqe = kind.command(cid);
        let bytes = sqe.bytes_mut();
        bytes[40] = self.is_wide.into();
        put(bytes, 44, &self.register.0.to_le_bytes());
        put(bytes, 48, &self.value.to_le_bytes());
        sqe
    }
}
