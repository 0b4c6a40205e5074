//! The place of a subsystem: `nvme+tcp://HOST[:PORT]/NQN` or `nvme+rdma://HOST[:PORT]/NQN`.

use std::fmt;
use std::io;
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use rdmux_wire::nvme::Nqn;

/// Port of NVMe/TCP and NVMe/RDMA, as IANA has it.
const DEFAULT_PORT: u16 = 4420;

/// Transport of a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// NVMe/TCP.
    Tcp,
    /// NVMe/RDMA.
    Rdma,
}

/// A place at which a target listens, and a subsystem of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// The transport.
    pub transport: Transport,
    /// Name or address of the target's host.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The subsystem; `None`: the discovery service, where that is asked for.
    pub subsystem: Option<Nqn>,
}

/// Reason for which a text is no [`Url`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not of the form nvme+tcp://HOST[:PORT]/NQN or nvme+rdma://...: {why}")]
pub struct UrlError {
    text: String,
    why: &'static str,
}

impl FromStr for Url {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Url, UrlError> {
        let fail = |why| UrlError {
            text: text.to_owned(),
            why,
        };
        let (transport, rest) = match text.split_once("://") {
            Some(("nvme+tcp", rest)) => (Transport::Tcp, rest),
            Some(("nvme+rdma", rest)) => (Transport::Rdma, rest),
            _ => return Err(fail("it begins with nvme+tcp:// or nvme+rdma://")),
        };
        let (authority, subsystem) = match rest.split_once('/') {
            Some((authority, "")) => (authority, None),
            Some((authority, nqn)) => {
                let name = Nqn::new(nqn).filter(|nqn| nqn.as_str().starts_with("nqn."));
                (
                    authority,
                    Some(name.ok_or(fail("the subsystem's name is an NQN"))?),
                )
            }
            None => (rest, None),
        };
        let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, port)) => {
                host.parse::<Ipv6Addr>()
                    .map_err(|_| fail("brackets are for an IPv6 address"))?;
                let port = match port {
                    "" => None,
                    _ => Some(port.strip_prefix(':').ok_or(fail("a port follows a colon"))?),
                };
                (host, port)
            }
            None => match authority.split_once(':') {
                Some((_, port)) if port.contains(':') => {
                    return Err(fail("an IPv6 address needs brackets"));
                }
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        if host.is_empty() {
            return Err(fail("no host is given"));
        }
        let port = match port {
            None => DEFAULT_PORT,
            Some(port) => {
                let number = port
                    .bytes()
                    .all(|byte| byte.is_ascii_digit())
                    .then(|| port.parse());
                let number = number.and_then(Result::ok).filter(|port| *port > 0);
                number.ok_or(fail("the port is a number from 1 to 65535"))?
            }
        };
        Ok(Url {
            transport,
            host: host.to_owned(),
            port,
            subsystem,
        })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transport = match self.transport {
            Transport::Tcp => "tcp",
            Transport::Rdma => "rdma",
        };
        match self.host.contains(':') {
            true => write!(f, "nvme+{transport}://[{}]:{}", self.host, self.port)?,
            false => write!(f, "nvme+{transport}://{}:{}", self.host, self.port)?,
        }
        match &self.subsystem {
            Some(nqn) => write!(f, "/{nqn}"),
            None => Ok(()),
        }
    }
}

impl Url {
    /// Returns the addresses of the host. Blocks while a name is resolved.
    ///
    /// # Errors
    /// The name has no address.
    pub fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let all: Vec<_> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        match all.is_empty() {
            true => Err(io::ErrorKind::NotFound.into()),
            false => Ok(all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse__takes_names_addresses_and_ports() {
        let url = |text: &str| text.parse::<Url>().unwrap();
        let full = url("nvme+tcp://a.example:5000/nqn.2014-08.org.example:a");
        assert_eq!((full.host.as_str(), full.port), ("a.example", 5000));
        assert_eq!(full.subsystem, Nqn::new("nqn.2014-08.org.example:a"));
        assert_eq!(
            full.to_string(),
            "nvme+tcp://a.example:5000/nqn.2014-08.org.example:a"
        );
        assert_eq!(url("nvme+tcp://10.0.0.1").port, 4420);
        assert_eq!(url("nvme+tcp://10.0.0.1/").subsystem, None);
        assert_eq!(url("nvme+rdma://h").transport, Transport::Rdma);
        let v6 = url("nvme+tcp://[::1]:8009");
        assert_eq!((v6.host.as_str(), v6.port), ("::1", 8009));
        assert_eq!(v6.to_string().parse(), Ok(v6));
    }

    #[test]
    fn parse__says_what_is_wrong() {
        for (text, part) in [
            ("tcp://h", "begins with"),
            ("nvme+tcp://", "no host"),
            ("nvme+tcp://:1/nqn.x", "no host"),
            ("nvme+tcp://h:0", "port"),
            ("nvme+tcp://h:+1", "port"),
            ("nvme+tcp://h:99999", "port"),
            ("nvme+tcp://::1", "brackets"),
            ("nvme+tcp://[x]", "brackets"),
            ("nvme+tcp://[::1]x", "colon"),
            ("nvme+tcp://h/x", "NQN"),
        ] {
            let error = text.parse::<Url>().unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(text), "{text}: {error}");
        }
    }
}
