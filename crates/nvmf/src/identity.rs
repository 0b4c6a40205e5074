//! Names and identifiers that stay the same over restarts, so that hosts find again what they have used.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::Path;

use rdmux_wire::nvme::{HostId, Nqn, NsId};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use sha2::{Digest, Sha256};

/// Returns the name of this host's subsystem: the form for who owns no domain (NVMe Base 2.0, 4.5), from what identifies the machine.
pub fn default_nqn() -> Nqn {
    let uuid = uuid_text(&uuid(&[b"subsystem", &machine(), &user()]));
    Nqn::new(&format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")).expect("a UUID is a valid name")
}

/// Returns the name and the identifier of this host and user, for controllers that they connect to. They hold the same UUID, as hosts of Linux have it.
pub fn default_host() -> (Nqn, HostId) {
    let uuid = uuid(&[b"host", &machine(), &user()]);
    let nqn = format!("nqn.2014-08.org.nvmexpress:uuid:{}", uuid_text(&uuid));
    (Nqn::new(&nqn).expect("a UUID is a valid name"), HostId(uuid))
}

/// Returns what identifies the machine.
fn machine() -> Vec<u8> {
    let machine = std::fs::read("/etc/machine-id").ok().filter(|id| id.len() >= 32);
    machine.unwrap_or_else(|| rustix::system::uname().nodename().to_bytes().to_vec())
}

fn user() -> [u8; 4] {
    rustix::process::getuid().as_raw().to_le_bytes()
}

/// Returns the serial number of a subsystem: 20 characters.
pub fn serial(subsystem: &Nqn) -> String {
    let uuid = uuid(&[b"serial", subsystem.as_str().as_bytes()]);
    uuid[..10].iter().map(|byte| format!("{byte:02X}")).collect()
}

/// Returns the UUID of a namespace, which changes with what stores its blocks: a host takes namespaces of one UUID for the same.
pub fn namespace_uuid(subsystem: &Nqn, nsid: NsId, storage: &[u8]) -> [u8; 16] {
    let nqn = subsystem.as_str().as_bytes();
    uuid(&[b"namespace", nqn, &nsid.0.to_le_bytes(), storage])
}

/// Returns the UUID of a file by its path, whatever namespaces it is.
pub(crate) fn file_uuid(path: &Path) -> [u8; 16] {
    uuid(&[b"file", path.as_os_str().as_encoded_bytes()])
}

/// Returns a name of a subsystem that fits into those of sockets: a UUID.
pub fn short_name(subsystem: &Nqn) -> String {
    uuid_text(&uuid(&[b"claim", subsystem.as_str().as_bytes()]))
}

/// Returns a Unix socket, neither bound nor connected.
pub(crate) fn unix_socket() -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    );
    Ok(socket?)
}

/// Claims the ids of controllers of a subsystem for this process: hosts refuse two controllers of one id.
///
/// # Errors
/// Another process of this host, or of this network namespace, has claimed some of them ([`io::ErrorKind::AddrInUse`]).
pub fn claim(subsystem: &Nqn, cntlids: &RangeInclusive<u16>) -> io::Result<OwnedFd> {
    let all = format!("rdmux-nvme-{}-", short_name(subsystem));
    let own = format!("{}-{}", cntlids.start(), cntlids.end());
    let name = format!("{all}{own}");
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let socket = unix_socket()?;
    bind(&socket, &address)?;
    // Of two that claim at the same time, at least one finds the other.
    // Names of other programs' sockets are any bytes.
    for line in String::from_utf8_lossy(&std::fs::read("/proc/net/unix")?).lines() {
        let claimed = line
            .rsplit_once('@')
            .and_then(|(_, name)| name.strip_prefix(&all));
        if let Some((first, last)) = claimed.and_then(|range| range.split_once('-'))
            && claimed != Some(&own)
            && first.parse().is_ok_and(|first: u16| first <= *cntlids.end())
            && last.parse().is_ok_and(|last: u16| last >= *cntlids.start())
        {
            return Err(io::ErrorKind::AddrInUse.into());
        }
    }
    Ok(socket)
}

/// Returns a UUID of version 8 (RFC 9562, 5.8): a hash of the parts.
fn uuid(parts: &[&[u8]]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for part in parts {
        // Their lengths keep parts apart.
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let hash = hash.finalize();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&hash[..16]);
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// Reads a UUID in its usual form.
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let lengths = text.split('-').map(str::len);
    let hex = lengths.eq([8, 4, 4, 4, 12]).then(|| text.replace('-', ""))?;
    let is_hex = hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u128::from_str_radix(&hex, 16).ok().map(u128::to_be_bytes))?
}

/// Returns a UUID in its usual form.
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity__is_the_same_each_time_and_another_for_others() {
        let [a, b] =
            ["nqn.2014-08.org.example:a", "nqn.2014-08.org.example:b"].map(|nqn| Nqn::new(nqn).unwrap());
        assert_eq!(default_nqn(), default_nqn());
        assert_eq!(default_host(), default_host());
        assert_ne!(default_host().0, default_nqn());
        assert_eq!(serial(&a), serial(&a));
        assert_eq!(serial(&a).len(), 20);
        assert_ne!(serial(&a), serial(&b));
        let namespace = |nqn, nsid, storage: &str| namespace_uuid(nqn, NsId(nsid), storage.as_bytes());
        assert_eq!(namespace(&a, 1, "/x"), namespace(&a, 1, "/x"));
        for other in [
            namespace(&a, 2, "/x"),
            namespace(&b, 1, "/x"),
            namespace(&a, 1, "/y"),
        ] {
            assert_ne!(namespace(&a, 1, "/x"), other);
        }
    }

    #[test]
    fn claim__is_of_one_process_at_a_time() {
        let [name, other] = ["claimed", "claimed-too"]
            .map(|name| Nqn::new(&format!("nqn.2014-08.org.example:{name}-{}", std::process::id())).unwrap());
        let claimed = claim(&name, &(100..=200)).unwrap();
        for range in [100..=200, 1..=100, 200..=200, 150..=160, 1..=0xffef] {
            let error = claim(&name, &range).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{range:?}");
        }
        // Nodes split the ids; other names have nothing to do with it.
        let beside = [(&name, 1..=99), (&name, 201..=300), (&other, 100..=200)];
        let beside = beside.map(|(name, range)| claim(name, &range).unwrap());
        drop(claimed);
        assert!(claim(&name, &(100..=200)).is_ok());
        drop(beside);
        assert!(claim(&name, &(1..=0xffef)).is_ok());
    }

    #[test]
    fn uuid_text__has_version_and_variant() {
        let text = uuid_text(&uuid(&[b"x"]));
        let parts: Vec<_> = text.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12]);
        assert_eq!(text.as_bytes()[14], b'8');
        assert!(b"89ab".contains(&text.as_bytes()[19]));
        assert_eq!(parse_uuid(&text), Some(uuid(&[b"x"])));
        for wrong in [&text[1..], "", &text.replace('8', "+")] {
            assert_eq!(parse_uuid(wrong), None, "{wrong}");
        }
    }
}
