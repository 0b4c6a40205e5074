//! Listeners, and services elsewhere to which hosts are referred.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use rdmux_verbs::parse_size;
use rdmux_wire::nvme::{DISCOVERY_NQN, Nqn, TransportKind};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Sizes, nqn};
use crate::server::{IN_CAPSULE_BYTES_MAX, Listen};
use crate::target::{Listener, Referral};

/// Port of NVMe/TCP and NVMe/RDMA, as IANA has it.
pub const DEFAULT_PORT: u16 = 4420;

/// Parses a way to a target: `tcp:ADDR[:PORT]` or `rdma:ADDR[:PORT]`.
///
/// # Errors
/// One line that says what is wrong.
pub fn parse_listener(text: &str) -> Result<Listener, String> {
    let form = "give tcp:ADDR[:PORT] or rdma:ADDR[:PORT], an IPv6 address with a port in brackets";
    let (transport, address) = text.split_once(':').ok_or(form)?;
    let transport = match transport {
        "tcp" => TransportKind::Tcp,
        "rdma" => TransportKind::Rdma,
        _ => return Err(form.into()),
    };
    let bare = address.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let address = match bare.unwrap_or(address).parse::<IpAddr>() {
        Ok(ip) => SocketAddr::new(ip, DEFAULT_PORT),
        Err(_) => address
            .parse()
            .map_err(|_| format!("'{address}' is not an address of this host: {form}"))?,
    };
    let listener = Listener { transport, address };
    check_listener(&listener)?;
    Ok(listener)
}

/// Parses the most bytes of data in the capsule of an I/O command.
///
/// # Errors
/// One line that says which there are.
pub fn parse_in_capsule(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text).and_then(|bytes| u32::try_from(bytes).ok());
    // Identify counts units of 16 bytes (IOCCSZ): NVMe Base 2.0, 5.17.2.1.
    let is_valid = |bytes: &u32| *bytes <= IN_CAPSULE_BYTES_MAX && bytes.is_multiple_of(16);
    bytes.filter(is_valid).ok_or_else(|| {
        format!("'{text}' is no size of data in capsules: give a multiple of 16, from 0 to 16K")
    })
}

/// Checks that a host could be told the address.
pub(in crate::control) fn check_listener(listener: &Listener) -> Result<(), String> {
    let ip = listener.address.ip();
    if ip.is_unspecified() || ip.is_multicast() {
        return Err(format!(
            "{ip} is not one address: listen on each address by itself"
        ));
    }
    Ok(())
}

pub(in crate::control) fn in_capsule<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u32>, D::Error> {
    deserializer.deserialize_any(Sizes(parse_in_capsule)).map(Some)
}

/// A listener as a file has it, if it is more than its address.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListenTable {
    #[serde(deserialize_with = "listener")]
    address: Listener,
    #[serde(default, deserialize_with = "in_capsule")]
    in_capsule_bytes: Option<u32>,
    tls: Option<Tls>,
}

/// The use of TLS, of which there is one.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Tls {
    Required,
}

impl<'de> Deserialize<'de> for Listen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Listen, D::Error> {
        struct Listens;

        impl<'de> Visitor<'de> for Listens {
            type Value = Listen;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an address such as \"tcp:192.0.2.1\", or a table with one")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Listen, E> {
                let parsed = parse_listener(text).map_err(E::custom)?;
                Ok(parsed.into())
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Listen, A::Error> {
                let table = ListenTable::deserialize(MapAccessDeserializer::new(map))?;
                let listen = Listen::from(table.address);
                Ok(Listen {
                    in_capsule_bytes: table.in_capsule_bytes.unwrap_or(listen.in_capsule_bytes),
                    tls: matches!(table.tls, Some(Tls::Required)),
                    ..listen
                })
            }
        }

        deserializer.deserialize_any(Listens)
    }
}

/// A referral as a file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReferralTable {
    #[serde(deserialize_with = "place")]
    address: Listener,
    #[serde(default = "discovery", deserialize_with = "nqn")]
    subnqn: Nqn,
    #[serde(default)]
    secure: bool,
}

pub(super) fn referrals<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Referral>, D::Error> {
    let tables = Vec::<ReferralTable>::deserialize(deserializer)?;
    let referrals = tables.into_iter().map(|table| Referral {
        at: table.address,
        nqn: table.subnqn,
        is_secure: table.secure,
    });
    Ok(referrals.collect())
}

fn place<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Listener, D::Error> {
    let listener = listener(deserializer)?;
    check_place(&listener).map_err(de::Error::custom)?;
    Ok(listener)
}

/// Checks that a host could connect there.
pub(in crate::control) fn check_place(listener: &Listener) -> Result<(), String> {
    match listener.address.port() {
        0 => Err(format!(
            "{listener} has no port: give that of the discovery service"
        )),
        _ => Ok(()),
    }
}

/// Returns the name that discovery services have unless they have one of their own.
pub(in crate::control) fn discovery() -> Nqn {
    Nqn::new(DISCOVERY_NQN).expect("the name is valid")
}

pub(super) fn loopback() -> Vec<Listen> {
    let listener = Listener {
        transport: TransportKind::Tcp,
        address: SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)),
    };
    vec![listener.into()]
}

fn listener<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Listener, D::Error> {
    parse_listener(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}

pub(super) fn optional_listener<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Listener>, D::Error> {
    listener(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_listener__names_the_transport() {
        let tcp = |address: &str| {
            Ok(Listener {
                transport: TransportKind::Tcp,
                address: address.parse().unwrap(),
            })
        };
        assert_eq!(parse_listener("tcp:127.0.0.1"), tcp("127.0.0.1:4420"));
        assert_eq!(parse_listener("tcp:[::1]:5000"), tcp("[::1]:5000"));
        assert_eq!(parse_listener("tcp:::1"), tcp("[::1]:4420"));
        for text in [
            "127.0.0.1",
            "tcp:0.0.0.0",
            "tcp:host",
            "tcp:127.0.0.1:x",
            "udp:127.0.0.1",
        ] {
            assert!(parse_listener(text).is_err(), "{text}");
        }
    }
}
