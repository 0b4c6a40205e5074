//! The UDP sockets that a device sends from.

use std::io;
use std::net::IpAddr;

use rdmux_rnic::Qpn;

use crate::group::CM_SLOT;
use crate::shm::link::slot_of;
use crate::udp::TxSocket;

/// One socket for each slot of destinations, so that the receiving kernel never merges trains for different sockets of a group. A
/// socket exists once the device sends to its slot; that of slot 0, which CM messages leave by too, exists from the start.
#[derive(Debug)]
pub(super) struct TxSockets {
    address: IpAddr,
    /// In the order in which they were bound: the first is that of slot 0.
    sockets: Vec<(u8, TxSocket)>,
}

impl TxSockets {
    /// `gsi`: the socket of slot 0.
    pub(super) fn new(address: IpAddr, gsi: TxSocket) -> TxSockets {
        let sockets = vec![(CM_SLOT, gsi)];
        TxSockets { address, sockets }
    }

    /// Returns the source port of packets to a QPN. Binds the socket of its slot when there is none.
    ///
    /// # Errors
    /// Those of [`TxSocket::bind`].
    pub(super) fn port_to(&mut self, dest_qpn: Qpn) -> io::Result<u16> {
        let slot = slot_of(dest_qpn);
        let known = self.sockets.iter().find(|(of, _)| *of == slot);
        if let Some((_, socket)) = known {
            return Ok(socket.local_addr().port());
        }
        let socket = TxSocket::bind(self.address)?;
        let port = socket.local_addr().port();
        self.sockets.push((slot, socket));
        Ok(port)
    }

    /// Returns the socket with a source port.
    pub(super) fn by_port(&self, port: u16) -> Option<&TxSocket> {
        self.entry(port).map(|(_, socket)| socket)
    }

    /// Returns the slot of the processes that packets from a source port go to; none for CM messages.
    pub(super) fn slot_of_port(&self, port: u16) -> Option<u8> {
        self.entry(port)
            .map(|(slot, _)| *slot)
            .filter(|slot| *slot != CM_SLOT)
    }

    /// Returns whether CM messages leave from a source port.
    pub(super) fn carries_cm(&self, port: u16) -> bool {
        self.entry(port).is_some_and(|(slot, _)| *slot == CM_SLOT)
    }

    fn entry(&self, port: u16) -> Option<&(u8, TxSocket)> {
        self.sockets
            .iter()
            .find(|(_, socket)| socket.local_addr().port() == port)
    }
}
