//! Datagrams: address handles, and queue pairs that are not connected.

use std::io;
use std::net::IpAddr;

use rdmux_rnic::{ECN_MARKED, McastError, ModifyError, Path, Qpn, Target};
use rdmux_wire::roce::grh::{GRH_LEN, source};

use crate::device::{Device, QueuePair};

/// Reason why a queue pair was not attached to a multicast group.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The device refuses to attach it.
    #[error(transparent)]
    Refused(#[from] McastError),
    /// The system did not let the device join the group.
    #[error("joining {group}: {source}")]
    Join {
        /// The group.
        group: IpAddr,
        /// Error that the system returned.
        source: io::Error,
    },
}

/// Address of a host or a multicast group. IBTA Vol 1, 11.2.2.1.
#[derive(Clone, Debug)]
pub struct AddressHandle {
    device: Device,
    address: IpAddr,
    traffic_class: u8,
}

impl Device {
    /// Makes an address handle. `traffic_class` is the IPv4 TOS or the IPv6 traffic class of the datagrams that are sent by it.
    pub fn create_ah(&self, address: IpAddr, traffic_class: u8) -> AddressHandle {
        AddressHandle {
            device: self.clone(),
            address: address.to_canonical(),
            traffic_class,
        }
    }

    /// Makes an address handle of the sender of a datagram that this device received. `grh` is the first bytes of the receive, and
    /// gives the traffic class too; [`WorkCompletion::src_qpn`] is the sender's queue pair. `None` if the bytes are no such header.
    /// IBTA Vol 1, 11.2.2.1, and `ibv_create_ah_from_wc(3)`.
    ///
    /// [`WorkCompletion::src_qpn`]: rdmux_rnic::WorkCompletion::src_qpn
    pub fn create_ah_from_grh(&self, grh: &[u8; GRH_LEN]) -> Option<AddressHandle> {
        let (address, traffic_class) = source(grh)?;
        // The other bits are marks of the way that the datagram took.
        Some(self.create_ah(address, traffic_class & !ECN_MARKED))
    }
}

impl AddressHandle {
    /// Returns the target of a send request on a UD queue pair: the queue pair `qpn` at this address, which demands `qkey`.
    ///
    /// # Errors
    /// Errors of creating a socket.
    pub fn to(&self, qpn: Qpn, qkey: u32) -> io::Result<Target> {
        let path = Path {
            src: self.device.address(),
            dst: self.address,
            src_port: self.device.source_port(qpn)?,
            traffic_class: self.traffic_class,
        };
        Ok(Target::Datagram { path, qpn, qkey })
    }

    /// Returns the same target for all queue pairs that are attached to the multicast group at this address.
    ///
    /// # Errors
    /// Errors of creating a socket.
    pub fn to_group(&self, qkey: u32) -> io::Result<Target> {
        self.to(Qpn::MULTICAST, qkey)
    }
}

impl QueuePair {
    /// Makes a UD queue pair ready to receive and send; the datagrams that it receives must carry `qkey`.
    pub fn ready_datagram(&self, qkey: u32) -> Result<(), ModifyError> {
        self.provided().ready_datagram(qkey)
    }

    /// Attaches a UD queue pair to a multicast group: it then also receives what is sent to the group, including what it sends
    /// itself. IPv6 groups of link-local scope are those of the link that has the device's address.
    pub fn attach_mcast(&self, group: IpAddr) -> Result<(), AttachError> {
        self.provided().attach_mcast(group)
    }

    /// Detaches a UD queue pair from a multicast group.
    pub fn detach_mcast(&self, group: IpAddr) -> Result<(), McastError> {
        self.provided().detach_mcast(group)
    }
}
