//! Announces the discovery service by mDNS (RFC 6762) as a service of DNS-SD (RFC 6763), in the form that hosts look for: NVMe TP 8009.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use mdns_sd::{IfKind, MDNS_PORT, ServiceDaemon, ServiceInfo};
use rdmux_wire::nvme::{DISCOVERY_NQN, TransportKind};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};

use crate::target::Listener;

/// The service, in the domain of mDNS.
const SERVICE: &str = "_nvme-disc._tcp.local.";
/// Time for the last messages, which withdraw the announcements.
const END_MAX: Duration = Duration::from_secs(1);

/// Returns true if other hosts can reach a listener, and find it by mDNS.
pub(crate) fn is_announced(listener: &Listener) -> bool {
    listener.transport == TransportKind::Tcp && !listener.address.ip().is_loopback()
}

/// Announces listeners, on a thread of its own, as long as it lives. It receives and answers on the interfaces of these listeners alone.
pub(crate) struct Announcer {
    daemon: ServiceDaemon,
    /// Full names of the services, by the listeners' addresses.
    announced: BTreeMap<SocketAddr, String>,
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
            announced: BTreeMap::new(),
        })
    }

    /// Announces these listeners, and no others.
    ///
    /// # Errors
    /// The thread has ended, or is too busy for more.
    pub(crate) fn set(&mut self, listeners: &[Listener]) -> Result<(), mdns_sd::Error> {
        let wanted = listeners.iter().filter(|listener| is_announced(listener));
        let wanted: Vec<SocketAddr> = wanted.map(|listener| listener.address).collect();
        let gone: Vec<SocketAddr> = self.announced.keys().copied().collect();
        for address in gone.into_iter().filter(|address| !wanted.contains(address)) {
            if let Some(name) = self.announced.get(&address) {
                self.daemon.unregister(name)?;
                self.announced.remove(&address);
            }
        }
        for address in wanted {
            if !self.announced.contains_key(&address) {
                let service = service(address)?;
                let name = service.get_fullname().to_owned();
                self.daemon.enable_interface(address.ip())?;
                self.daemon.register(service)?;
                self.announced.insert(address, name);
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

/// Returns the service at an address. Its names follow from the address, since nobody else on the link has that; the name of the host is
/// left to the host's own responder.
fn service(address: SocketAddr) -> Result<ServiceInfo, mdns_sd::Error> {
    let ip = address.ip();
    // One that goes withdraws the address of its host's name with it.
    let instance = format!(
        "rdmux-{}-{}",
        ip.to_string().replace(['.', ':'], "-"),
        address.port()
    );
    let properties = [("p", "tcp"), ("nqn", DISCOVERY_NQN)];
    let mut service = ServiceInfo::new(
        SERVICE,
        &instance,
        &format!("{instance}.local."),
        ip,
        address.port(),
        &properties[..],
    )?;
    service.set_interfaces(vec![ip.into()]);
    Ok(service)
}
