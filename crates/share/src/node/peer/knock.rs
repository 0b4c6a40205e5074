//! Asks the kernel of a peer's host whether a process has the port of the peer's device.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, UdpSocket};

use rdmux_wire::roce::UDP_PORT;

/// Empty datagrams to the port of a peer's device in software, which drops them as malformed. If no process has the port, the peer's kernel says so (ICMP, port
/// unreachable): the process has ended, for its sockets are closed by its end alone. A firewall that rejects them says the same.
#[derive(Debug)]
pub(super) struct Knock(UdpSocket);

impl Knock {
    pub(super) fn new(own: IpAddr, peer: IpAddr) -> io::Result<Knock> {
        Knock::at(own, peer, UDP_PORT)
    }

    fn at(own: IpAddr, peer: IpAddr, port: u16) -> io::Result<Knock> {
        // Only a connected socket learns of it.
        let socket = UdpSocket::bind((own, 0))?;
        socket.set_nonblocking(true)?;
        socket.connect((peer, port))?;
        Ok(Knock(socket))
    }

    /// Sends a datagram. Returns whether the kernel has refused it, or an earlier one: the refusal may come later, and not each time.
    pub(super) fn is_refused(&self) -> bool {
        let before = self.0.take_error().ok().flatten();
        let sent = self.0.send(&[]).err();
        let after = self.0.take_error().ok().flatten();
        let mut errors = [before, sent, after].into_iter().flatten();
        errors.any(|error| error.kind() == ErrorKind::ConnectionRefused)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn is_refused__once_nobody_has_the_port() {
        let address = IpAddr::from([127, 0, 54, 99]);
        let other = UdpSocket::bind((address, 0)).unwrap();
        let port = other.local_addr().unwrap().port();
        let knock = Knock::at(IpAddr::from([127, 0, 54, 98]), address, port).unwrap();
        for _ in 0..3 {
            assert!(!knock.is_refused());
            assert_eq!(other.recv(&mut [0; 8]).unwrap(), 0);
        }
        drop(other);
        // On one host it comes as the datagram is sent, unless the kernel is busy.
        let deadline = Instant::now() + Duration::from_secs(30);
        while !knock.is_refused() {
            assert!(Instant::now() < deadline, "no refusal");
        }
    }
}
