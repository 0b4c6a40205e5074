//! The target of a push: `rdmux://HOST[:PORT]/REGION[@OFFSET]`.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use rdmux_wire::push::Name;

use rdmux_verbs::parse_size;

/// The port of the push service.
pub const DEFAULT_PORT: u16 = 7174;

/// Reason why an address is invalid.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The text does not have the form.
    #[error("'{text}' is not of the form rdmux://HOST[:PORT]/REGION[@OFFSET]: {why}")]
    Malformed {
        /// The text.
        text: String,
        /// The error in it.
        why: &'static str,
    },
    /// The name has no address.
    #[error("{host}: {source}")]
    Resolve {
        /// The name.
        host: String,
        /// The cause.
        source: io::Error,
    },
    /// There is no route.
    #[error(
        "no route to {peer}: {source}; check the address, and the routes of this host (`ip route get {peer}`)"
    )]
    Route {
        /// The peer.
        peer: IpAddr,
        /// The cause.
        source: io::Error,
    },
}

/// A region of a server, and an offset in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Name or address of the server.
    pub host: String,
    /// Port.
    pub port: u16,
    /// The region.
    pub region: Name,
    /// First byte in it.
    pub offset: u64,
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let brackets = self.host.contains(':');
        let host = if brackets {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        };
        write!(f, "rdmux://{host}:{}/{}", self.port, self.region)?;
        if self.offset != 0 {
            write!(f, "@{}", self.offset)?;
        }
        Ok(())
    }
}

impl std::str::FromStr for Target {
    type Err = TargetError;

    fn from_str(text: &str) -> Result<Target, TargetError> {
        let malformed = |why| TargetError::Malformed {
            text: text.into(),
            why,
        };
        let rest = text
            .strip_prefix("rdmux://")
            .ok_or_else(|| malformed("it does not begin with rdmux://"))?;
        let (authority, path) = rest
            .split_once('/')
            .ok_or_else(|| malformed("the region is missing"))?;
        let (host, port) = split_port(authority).ok_or_else(|| malformed("the host or port is invalid"))?;
        if is_malformed_ipv4(host) {
            return Err(malformed(
                "the host is not an IPv4 address: each of its numbers is at most 255",
            ));
        }
        // A region may have an @ in its name: only a number after the last @ is an offset.
        let (region, offset) = match path.rsplit_once('@').map(|(name, at)| (name, parse_size(at))) {
            Some((name, Some(offset))) => (name, offset),
            _ => (path, 0),
        };
        Ok(Target {
            host: host.into(),
            port: port.unwrap_or(DEFAULT_PORT),
            region: Name::new(region).ok_or_else(|| malformed("the region's name is empty or too long"))?,
            offset,
        })
    }
}

impl Target {
    /// Returns the address if the host is one: then there is no name to resolve.
    pub fn address(&self) -> Option<SocketAddr> {
        let ip = self.host.parse().ok()?;
        Some(SocketAddr::new(ip, self.port))
    }

    /// Returns the addresses of the host. Blocks while a name is resolved.
    pub fn resolve(&self) -> Result<Vec<SocketAddr>, TargetError> {
        let failed = |source| TargetError::Resolve {
            host: self.host.clone(),
            source,
        };
        let all: Vec<_> = (self.host.as_str(), self.port)
            .to_socket_addrs()
            .map_err(failed)?
            .collect();
        if all.is_empty() {
            return Err(failed(io::ErrorKind::NotFound.into()));
        }
        Ok(all)
    }
}

/// Returns host and port of `HOST`, `HOST:PORT`, `[V6]` or `[V6]:PORT`; accepts a bare IPv6 address too.
pub fn split_port(text: &str) -> Option<(&str, Option<u16>)> {
    if let Some(rest) = text.strip_prefix('[') {
        let (host, after) = rest.split_once(']')?;
        host.parse::<Ipv6Addr>().ok()?;
        return match after.strip_prefix(':') {
            Some(port) => Some((host, Some(parse_port(port)?))),
            None => after.is_empty().then_some((host, None)),
        };
    }
    if text.parse::<Ipv6Addr>().is_ok() {
        return Some((text, None));
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, Some(parse_port(port)?)),
        None => (text, None),
    };
    (!host.is_empty() && !host.contains([':', '@', '[', ']'])).then_some((host, port))
}

/// Returns whether a host is four numbers with dots between them, as an IPv4 address is, but none. No host has such a name.
pub fn is_malformed_ipv4(host: &str) -> bool {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    host.split('.').count() == 4 && host.split('.').all(is_number) && host.parse::<Ipv4Addr>().is_err()
}

fn parse_port(text: &str) -> Option<u16> {
    text.bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| text.parse().ok())
        .flatten()
        .filter(|port| *port != 0)
}

/// Returns the address of this host from which packets to `peer` leave. Sends nothing.
pub fn local_address_towards(peer: IpAddr) -> Result<IpAddr, TargetError> {
    let route = || -> io::Result<IpAddr> {
        let any: IpAddr = match peer {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((peer, DEFAULT_PORT))?;
        Ok(socket.local_addr()?.ip())
    };
    route().map_err(|source| TargetError::Route { peer, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_str__each_form() {
        for (text, host, port, region, offset) in [
            ("rdmux://h/a", "h", 7174, "a", 0),
            ("rdmux://10.1.2.3.example/a", "10.1.2.3.example", 7174, "a", 0),
            ("rdmux://127.1/a", "127.1", 7174, "a", 0),
            ("rdmux://127.0.0.1:99/a b", "127.0.0.1", 99, "a b", 0),
            ("rdmux://[::1]/x@64K", "::1", 7174, "x", 65536),
            ("rdmux://[fe80::1]:8/x/y@z@1", "fe80::1", 8, "x/y@z", 1),
            ("rdmux://::1/a@b", "::1", 7174, "a@b", 0),
        ] {
            let target: Target = text.parse().unwrap();
            let got = (
                target.host.as_str(),
                target.port,
                target.region.as_str(),
                target.offset,
            );
            assert_eq!(got, (host, port, region, offset), "{text}");
            assert_eq!(target.to_string().parse::<Target>().unwrap(), target);
        }
    }

    #[test]
    fn address__of_a_name_is_unknown() {
        let address = |text: &str| text.parse::<Target>().unwrap().address();
        assert_eq!(address("rdmux://127.0.0.1:99/a"), "127.0.0.1:99".parse().ok());
        assert_eq!(address("rdmux://[::1]/a"), "[::1]:7174".parse().ok());
        assert_eq!(address("rdmux://localhost/a"), None);
    }

    #[test]
    fn from_str__malformed() {
        for text in [
            "",
            "h/a",
            "http://h/a",
            "rdmux://h",
            "rdmux:///a",
            "rdmux://h/",
            "rdmux://h:0/a",
            "rdmux://h:70000/a",
            "rdmux://h:+1/a",
            "rdmux://[::1/a",
            "rdmux://[::1]x/a",
            "rdmux://h/a\u{1b}",
            "rdmux://127.0.0.300/a",
            "rdmux://1.2.3.4000000000:80/a",
        ] {
            assert!(text.parse::<Target>().is_err(), "{text}");
        }
    }

    #[test]
    fn from_str__an_address_that_is_none_is_told() {
        let error = "rdmux://127.0.0.300/a".parse::<Target>().unwrap_err().to_string();
        assert!(error.contains("not an IPv4 address"), "{error}");
    }

    #[test]
    fn route__tells_what_to_do() {
        let source = io::ErrorKind::NetworkUnreachable.into();
        let peer = "10.99.0.1".parse().unwrap();
        let error = TargetError::Route { peer, source }.to_string();
        assert!(
            error.contains("check the address") && error.contains("ip route get 10.99.0.1"),
            "{error}"
        );
    }

    #[test]
    fn local_address_towards__loopback_is_loopback() {
        let peer = "127.0.0.9".parse().unwrap();
        assert!(local_address_towards(peer).unwrap().is_loopback());
    }
}
