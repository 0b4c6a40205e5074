//! Multicast groups and the QPs attached to them. IBTA Vol 1, 10.5.

use std::collections::BTreeMap;
use std::net::IpAddr;

use rdmux_wire::Qpn;

/// Maximum number of groups of a device; the same limit as rxe has.
pub const MCAST_GROUPS_MAX: usize = 8192;
/// Maximum number of QPs attached to one group; the same limit as rxe has.
pub const MCAST_QPS_MAX: usize = 56;

/// Error of attaching a QP to a multicast group, or of detaching it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum McastError {
    /// No such QP.
    #[error("no such QP")]
    NoQp,
    /// Only UD QPs can be attached. IBTA Vol 1, 10.5.2.
    #[error("only UD QPs can be attached to a multicast group")]
    NotUd,
    /// The address is no multicast address of the device's own family.
    #[error("the address is not a multicast address of the device's address family")]
    BadAddress,
    /// The device already has [`MCAST_GROUPS_MAX`] groups.
    #[error("the device has no room for another multicast group")]
    TooManyGroups,
    /// The group already has [`MCAST_QPS_MAX`] QPs.
    #[error("the multicast group has no room for another QP")]
    TooManyQps,
    /// The QP is not attached to this group.
    #[error("the QP is not attached to this multicast group")]
    NotAttached,
}

/// The groups of a device.
#[derive(Debug, Default)]
pub(crate) struct Groups(BTreeMap<IpAddr, Vec<Qpn>>);

impl Groups {
    /// Attaches a QP to a group. A second attach of the same QP changes nothing. IBTA Vol 1, 11.3.1.
    pub(crate) fn attach(&mut self, group: IpAddr, qpn: Qpn) -> Result<(), McastError> {
        if self.0.len() >= MCAST_GROUPS_MAX && !self.0.contains_key(&group) {
            return Err(McastError::TooManyGroups);
        }
        let attached = self.0.entry(group).or_default();
        if attached.contains(&qpn) {
            return Ok(());
        }
        if attached.len() >= MCAST_QPS_MAX {
            return Err(McastError::TooManyQps);
        }
        attached.push(qpn);
        Ok(())
    }

    pub(crate) fn detach(&mut self, group: IpAddr, qpn: Qpn) -> Result<(), McastError> {
        let attached = self.0.get_mut(&group).ok_or(McastError::NotAttached)?;
        let at = attached.iter().position(|other| *other == qpn);
        attached.remove(at.ok_or(McastError::NotAttached)?);
        if attached.is_empty() {
            self.0.remove(&group);
        }
        Ok(())
    }

    /// Detaches a QP from every group.
    pub(crate) fn forget(&mut self, qpn: Qpn) {
        self.0.retain(|_, attached| {
            attached.retain(|other| *other != qpn);
            !attached.is_empty()
        });
    }

    /// The QPs attached to a group.
    pub(crate) fn attached(&self, group: IpAddr) -> &[Qpn] {
        self.0.get(&group).map_or(&[], Vec::as_slice)
    }
}
