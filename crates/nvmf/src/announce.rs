//! Announces the discovery service by mDNS (RFC 6762) as a service of DNS-SD (RFC 6763), in the form that hosts look for: NVMe TP 8009.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use mdns_sd::{IfKind, MDNS_PORT, ServiceDaemon, ServiceInfo};
use rdmux_wire::nvme::{DISCOVERY_NQN, TransportKind};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use crate::target::Listener;

/// Time for the last messages, which withdraw the announcements.
const END_MAX: Duration = Duration::from_secs(1);

/// Returns true if other hosts can reach a listener, and find it by mDNS.
pub(crate) fn is_announced(listener: &Listener) -> bool {
    !listener.address.ip().is_loopback()
}

/// Announces listeners, on a thread of its own, as long as it lives. It receives and answers on the interfaces of these listeners alone.
pub(crate) struct Announcer {
    daemon: ServiceDaemon,
    /// Full names of the services, with the listeners.
    announced: Vec<(Listener, String)>,
    /// Addresses whose interfaces the thread uses: also that of a listener that has gone, until the thread has been told.
    used: BTreeSet<IpAddr>,
}

impl Announcer {
    /// Makes one that announces nothing yet.
    ///
    /// # Errors
    /// The system refuses a thread or a descriptor, or another program has the port for itself.
    pub(crate) fn new() -> Result<Announcer, mdns_sd::Error> {
        check_port().map_err(|error| {
            let why =
                format!("UDP port {MDNS_PORT}: {error} (end the program that has it, or leave mDNS out)");
            mdns_sd::Error::Msg(why)
        })?;
        let daemon = ServiceDaemon::new()?;
        daemon.disable_interface(IfKind::All)?;
        Ok(Announcer {
            daemon,
            announced: Vec::new(),
            used: BTreeSet::new(),
        })
    }

    /// Announces these listeners, and no others.
    ///
    /// # Errors
    /// The thread has ended, or is too busy for more.
    pub(crate) fn set(&mut self, listeners: &[Listener]) -> Result<(), mdns_sd::Error> {
        let stays = |listener: &Listener| listeners.contains(listener) && is_announced(listener);
        while let Some(at) = self.announced.iter().position(|(known, _)| !stays(known)) {
            self.daemon.unregister(&self.announced[at].1)?;
            self.announced.swap_remove(at);
        }
        let left: BTreeSet<_> = self
            .announced
            .iter()
            .map(|(listener, _)| listener.address.ip())
            .collect();
        let gone: Vec<IpAddr> = self.used.difference(&left).copied().collect();
        if !gone.is_empty() {
            // It stands for the address's interface, which others that stay may have too.
            self.daemon.disable_interface(gone)?;
            self.daemon
                .enable_interface(left.iter().copied().collect::<Vec<_>>())?;
            self.used = left;
        }
        for listener in listeners.iter().filter(|listener| is_announced(listener)) {
            if !self.announced.iter().any(|(known, _)| known == listener) {
                let service = service(listener)?;
                let name = service.get_fullname().to_owned();
                self.daemon.enable_interface(listener.address.ip())?;
                self.used.insert(listener.address.ip());
                self.daemon.register(service)?;
                self.announced.push((*listener, name));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Announcer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let announced = &self.announced;
        f.debug_struct("Announcer")
            .field("announced", announced)
            .finish_non_exhaustive()
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        if let Ok(ended) = self.daemon.shutdown() {
            let _ = ended.recv_timeout(END_MAX);
        }
    }
}

/// Checks that the port can be shared: the thread would say so to nobody.
fn check_port() -> rustix::io::Result<()> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, MDNS_PORT)))
}

/// Returns the service at a listener: its type and its protocol say by which transport (TP 8009; NVMe Base 2.4, 8.3.1.1.1), RDMA being RoCE, by UDP.
/// Its names follow from the address, since nobody else on the link has that; the name of the host is left to the host's own responder.
fn service(listener: &Listener) -> Result<ServiceInfo, mdns_sd::Error> {
    let (kind, prefix, protocol) = match listener.transport {
        TransportKind::Tcp => ("_nvme-disc._tcp.local.", "rdmux", "tcp"),
        TransportKind::Rdma => ("_nvme-disc._udp.local.", "rdmux-rdma", "roce"),
    };
    let (ip, port) = (listener.address.ip(), listener.address.port());
    // One that goes withdraws the address of its host's name with it.
    let instance = format!("{prefix}-{}-{port}", ip.to_string().replace(['.', ':'], "-"));
    let properties = [("p", protocol), ("nqn", DISCOVERY_NQN)];
    let mut service = ServiceInfo::new(
        kind,
        &instance,
        &format!("{instance}.local."),
        ip,
        port,
        &properties[..],
    )?;
    service.set_interfaces(vec![ip.into()]);
    Ok(service)
}
