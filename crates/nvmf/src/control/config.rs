//! Description of a target by its user: in a file (TOML), on a command line, or in a request (JSON).

mod listen;
mod namespace;
mod pcie;

use std::fmt;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use rdmux_wire::nvme::{AnaState, Nqn};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

pub use self::listen::{DEFAULT_PORT, parse_in_capsule, parse_listener};
pub(super) use self::listen::{check_listener, check_place, discovery, in_capsule};
use self::listen::{loopback, optional_listener, referrals};
use self::namespace::positive_size;
pub use self::namespace::{AcceleratorConfig, NamespaceConfig, Storage, parse_accelerators};
pub(super) use self::namespace::{group, optional_group};
pub use self::pcie::PcieStorage;
use crate::passthrough::ControllerConfig;
use crate::server::Listen;
use crate::target::{AnaRule, CNTLID_MAX, Listener, Rates, Referral};
/// Most reactors of a target.
pub const REACTORS_MAX: u16 = 64;

/// A target.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetConfig {
    /// Ways to it.
    #[serde(default = "loopback")]
    pub listen: Vec<Listen>,
    /// Threads that serve connections.
    #[serde(default = "one_reactor", deserialize_with = "reactors")]
    pub reactors: u16,
    /// Its discovery service is announced by mDNS.
    #[serde(default)]
    pub mdns: bool,
    /// A thread of its own, the offload engine, serves hosts by RDMA, and has a queue pair of each drive that the target drives itself.
    #[serde(default)]
    pub offload: bool,
    /// It counts the bytes that RNICs and drives move at its side.
    #[serde(default)]
    pub ledger: bool,
    /// Other discovery services, to which it refers hosts.
    #[serde(default, rename = "referral", deserialize_with = "referrals")]
    pub referrals: Vec<Referral>,
    /// Its subsystems.
    #[serde(rename = "subsystem")]
    pub subsystems: Vec<SubsystemConfig>,
}

/// A subsystem.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubsystemConfig {
    /// Its name; `None`: one of this host and user.
    #[serde(default, deserialize_with = "optional_nqn")]
    pub nqn: Option<Nqn>,
    /// File with the secret of hosts that have none of their own; `None`: the user's own.
    pub secret: Option<PathBuf>,
    /// File with the key of TLS of hosts that have none of their own; `None`: the user's own, if a listener requires TLS.
    pub psk: Option<PathBuf>,
    /// Hosts that are not among [`SubsystemConfig::hosts`].
    #[serde(default)]
    pub other_hosts: OtherHosts,
    /// Ids of its controllers, within 1 to 0xffef; `None`: all. Nodes that serve one name need ranges of their own.
    #[serde(default, deserialize_with = "cntlids")]
    pub cntlids: Option<RangeInclusive<u16>>,
    /// Hosts on terms of their own.
    #[serde(default, rename = "host")]
    pub hosts: Vec<HostConfig>,
    /// Its namespaces.
    #[serde(default, rename = "namespace")]
    pub namespaces: Vec<NamespaceConfig>,
    /// The drive's controller that commands pass to, whose namespaces are all that it has.
    #[serde(default, deserialize_with = "controller")]
    pub controller: Option<ControllerConfig>,
    /// States of access to the namespaces, one set after the other. Their listeners are among [`TargetConfig::listen`].
    #[serde(default, rename = "ana", deserialize_with = "ana_rules")]
    pub ana: Vec<AnaRule>,
}

/// Treatment of hosts that are not named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OtherHosts {
    /// They may use the subsystem with its secret.
    #[default]
    Secret,
    /// They may use it without a secret.
    Any,
    /// They are refused.
    None,
}

/// A host that may use a subsystem.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostConfig {
    /// Its name.
    #[serde(deserialize_with = "nqn")]
    pub nqn: Nqn,
    /// File with its secret; `None`: that of the subsystem, if it has one.
    pub secret: Option<PathBuf>,
    /// File with its key of TLS; `None`: that of the subsystem, if it has one.
    pub psk: Option<PathBuf>,
    /// Maximum number of I/O queues of each of its controllers, at least 1.
    #[serde(default, deserialize_with = "queues")]
    pub queues: Option<u16>,
    /// I/O commands a second, at least [`Rates::IOS_MIN`].
    #[serde(default, deserialize_with = "iops")]
    pub iops: Option<NonZeroU64>,
    /// Bytes a second, at least [`Rates::BYTES_MIN`].
    #[serde(default, deserialize_with = "bandwidth")]
    pub bandwidth: Option<NonZeroU64>,
}

/// The states of access, by the names that Linux has for them. SPDK's have another hyphen.
const ANA_STATES: [(&str, AnaState); 5] = [
    ("optimized", AnaState::Optimized),
    ("non-optimized", AnaState::NonOptimized),
    ("inaccessible", AnaState::Inaccessible),
    ("persistent-loss", AnaState::PersistentLoss),
    ("change", AnaState::Change),
];

/// Returns the name of a state of access.
pub fn ana_state_name(state: AnaState) -> &'static str {
    let known = ANA_STATES.iter().find(|(_, known)| *known == state);
    known.map_or("unknown", |(name, _)| name)
}

/// Parses the name of a state of access (ANA), in the form of Linux or of SPDK.
///
/// # Errors
/// One line that lists the states.
pub fn parse_ana_state(text: &str) -> Result<AnaState, String> {
    let name = text.replace('_', "-");
    let known = ANA_STATES.iter().find(|(known, _)| *known == name);
    known.map(|(_, state)| *state).ok_or_else(|| {
        let names = ANA_STATES.map(|(name, _)| name).join(", ");
        format!("'{text}' is no state of access: give one of {names}")
    })
}

/// Parses a range of ids of controllers: `FIRST-LAST`.
///
/// # Errors
/// One line that says what a range is.
pub fn parse_cntlids(text: &str) -> Result<RangeInclusive<u16>, String> {
    let range = text.split_once('-').and_then(|(first, last)| {
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (1 <= first && first <= last && last <= CNTLID_MAX).then_some(first..=last)
    });
    range.ok_or_else(|| {
        format!("'{text}' is no range of controller ids: give FIRST-LAST within 1 to {CNTLID_MAX}")
    })
}

/// Parses the name of a subsystem or a host.
///
/// # Errors
/// One line that says what an NQN is.
pub fn parse_nqn(text: &str) -> Result<Nqn, String> {
    Nqn::new(text)
        .filter(|nqn| nqn.as_str().starts_with("nqn."))
        .ok_or_else(|| {
            format!(
                "'{text}' is no NQN: give nqn.YYYY-MM.DOMAIN:NAME, at most {} characters",
                Nqn::LEN_MAX
            )
        })
}

/// Bytes, as a number or with a unit.
struct Size(u64);

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        deserializer.deserialize_any(Sizes(positive_size)).map(Size)
    }
}

/// Takes a size in each form that has one.
struct Sizes<T>(fn(&str) -> Result<T, String>);

impl<T> Visitor<'_> for Sizes<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes, or a size such as \"64M\"")
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<T, E> {
        self.visit_str(&bytes.to_string())
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<T, E> {
        self.visit_str(&bytes.to_string())
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.0)(text).map_err(E::custom)
    }
}

fn one_reactor() -> u16 {
    1
}

fn reactors<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u16, D::Error> {
    let number = u16::deserialize(deserializer)?;
    if !(1..=REACTORS_MAX).contains(&number) {
        let error = format!("{number} is no number of reactors: give 1 to {REACTORS_MAX}");
        return Err(de::Error::custom(error));
    }
    Ok(number)
}

pub(super) fn queues<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u16>, D::Error> {
    match Option::<u16>::deserialize(deserializer)? {
        Some(0) => Err(de::Error::custom("0 is no number of queues: give at least 1")),
        number => Ok(number),
    }
}

pub(super) fn iops<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NonZeroU64>, D::Error> {
    let number = Option::<u64>::deserialize(deserializer)?;
    if let Some(number) = number.filter(|number| *number < Rates::IOS_MIN) {
        let error = format!(
            "{number} I/Os a second are too few: give at least {}",
            Rates::IOS_MIN
        );
        return Err(de::Error::custom(error));
    }
    Ok(number.and_then(NonZeroU64::new))
}

pub(super) fn bandwidth<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<NonZeroU64>, D::Error> {
    let bytes = Option::<Size>::deserialize(deserializer)?.map(|size| size.0);
    if let Some(bytes) = bytes.filter(|bytes| *bytes < Rates::BYTES_MIN) {
        let error = format!("{bytes} bytes a second are too few: give at least 1M");
        return Err(de::Error::custom(error));
    }
    Ok(bytes.and_then(NonZeroU64::new))
}

fn cntlids<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<RangeInclusive<u16>>, D::Error> {
    let range = parse_cntlids(&String::deserialize(deserializer)?);
    range.map(Some).map_err(de::Error::custom)
}

pub(super) fn ana_state<'de, D: Deserializer<'de>>(deserializer: D) -> Result<AnaState, D::Error> {
    parse_ana_state(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}

/// A state of access as a file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AnaTable {
    #[serde(default, deserialize_with = "optional_group")]
    group: Option<u32>,
    #[serde(default, deserialize_with = "optional_listener")]
    listener: Option<Listener>,
    #[serde(deserialize_with = "ana_state")]
    state: AnaState,
}

fn ana_rules<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<AnaRule>, D::Error> {
    let tables = Vec::<AnaTable>::deserialize(deserializer)?;
    let rules = tables.into_iter().map(|table| AnaRule {
        group: table.group,
        at: table.listener,
        state: table.state,
    });
    Ok(rules.collect())
}

fn controller<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<ControllerConfig>, D::Error> {
    let controller = String::deserialize(deserializer)?.parse();
    controller.map(Some).map_err(de::Error::custom)
}

pub(super) fn nqn<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Nqn, D::Error> {
    parse_nqn(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}

fn optional_nqn<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Nqn>, D::Error> {
    nqn(deserializer).map(Some)
}

/// Reason for which a file describes no target.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// It says something that is wrong.
    #[error("{}:{line}: {what}", path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The error.
        what: String,
    },
}

impl TargetConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// It is not there, or is wrong.
    pub fn load(path: &Path) -> Result<TargetConfig, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })?;
        TargetConfig::parse(&text).map_err(|(line, what)| ConfigError::Wrong {
            path: path.to_owned(),
            line,
            what,
        })
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// The line, from 1, and what is wrong with it.
    pub fn parse(text: &str) -> Result<TargetConfig, (usize, String)> {
        toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start.min(text.len()));
            let line = text.as_bytes()[..at]
                .iter()
                .filter(|byte| **byte == b'\n')
                .count()
                + 1;
            (line, error.message().replace('\n', " "))
        })
    }
}
#[cfg(test)]
mod tests {
    use rdmux_wire::nvme::{DISCOVERY_NQN, NsId};

    use super::*;

    #[test]
    fn parse__reads_all_keys() {
        let config = TargetConfig::parse(
            r#"
            listen = ["tcp:127.0.0.1", "rdma:[::1]:5000", { address = "tcp:127.0.0.2", in_capsule_bytes = "8K", tls = "required" }]
            reactors = 2
            mdns = true

            [[referral]]
            address = "tcp:192.0.2.1:8009"
            [[referral]]
            address = "rdma:192.0.2.2"
            subnqn = "nqn.2014-08.org.example:discovery"
            secure = true

            [[subsystem]]
            nqn = "nqn.2014-08.org.example:disks"
            secret = "/etc/rdmux/secret"
            psk = "/etc/rdmux/psk"
            cntlids = "1-127"
            [[subsystem.namespace]]
            path = "/srv/a,b"
            block = 4096
            read_only = true
            nsid = 7
            uuid = "00010203-0405-8607-8809-0a0b0c0d0e0f"
            ana_group = 2
            [[subsystem.namespace]]
            memory = "64M"
            [[subsystem.host]]
            nqn = "nqn.2014-08.org.example:host"
            secret = "/etc/rdmux/host"
            psk = "/etc/rdmux/host-psk"
            queues = 4
            iops = 20000
            bandwidth = "100M"
            [[subsystem.ana]]
            listener = "tcp:127.0.0.1"
            state = "non-optimized"
            [[subsystem.ana]]
            group = 2
            state = "inaccessible"

            [[subsystem]]
            other_hosts = "any"
            [[subsystem.namespace]]
            null = 1048576

            [[subsystem]]
            controller = "/dev/nvme0,allow=format"
            "#,
        );
        let config = config.unwrap();
        let listen = |text: &str, in_capsule_bytes, tls| Listen {
            listener: parse_listener(text).unwrap(),
            in_capsule_bytes,
            tls,
        };
        let expected = [
            listen("tcp:127.0.0.1:4420", 16 << 10, false),
            listen("rdma:[::1]:5000", 4 << 10, false),
            listen("tcp:127.0.0.2", 8 << 10, true),
        ];
        assert_eq!(config.listen, expected);
        assert!(config.mdns);
        let referral = |at: &str, nqn: &str, is_secure| Referral {
            at: parse_listener(at).unwrap(),
            nqn: Nqn::new(nqn).unwrap(),
            is_secure,
        };
        let expected = [
            referral("tcp:192.0.2.1:8009", DISCOVERY_NQN, false),
            referral("rdma:192.0.2.2:4420", "nqn.2014-08.org.example:discovery", true),
        ];
        assert_eq!(config.referrals, expected);
        let [disks, null, drive] = &config.subsystems[..] else {
            panic!("three subsystems")
        };
        let controller = drive.controller.as_ref().unwrap();
        assert_eq!(controller.to_string(), "/dev/nvme0,allow=format");
        assert_eq!(disks.namespaces[0].nsid, Some(NsId(7)));
        assert_eq!(disks.namespaces[0].storage, Storage::File("/srv/a,b".into()));
        assert_eq!(disks.namespaces[0].block_shift, 12);
        assert_eq!(disks.namespaces[0].uuid.unwrap()[15], 15);
        assert_eq!(disks.namespaces[1].storage, Storage::Memory(64 << 20));
        assert_eq!(disks.psk, Some("/etc/rdmux/psk".into()));
        assert_eq!(disks.hosts[0].psk, Some("/etc/rdmux/host-psk".into()));
        assert_eq!(disks.hosts[0].queues, Some(4));
        assert_eq!(disks.hosts[0].iops.unwrap().get(), 20_000);
        assert_eq!(disks.hosts[0].bandwidth.unwrap().get(), 100 << 20);
        assert_eq!((&disks.cntlids, &null.cntlids), (&Some(1..=127), &None));
        let groups = disks.namespaces.iter().map(|namespace| namespace.ana_group);
        assert_eq!(groups.collect::<Vec<_>>(), [2, 1]);
        let rule = |group, at, state| AnaRule { group, at, state };
        let rules = [
            rule(None, Some(config.listen[0].listener), AnaState::NonOptimized),
            rule(Some(2), None, AnaState::Inaccessible),
        ];
        assert_eq!(disks.ana, rules);
        assert!(null.other_hosts == OtherHosts::Any && null.nqn.is_none());
        assert_eq!(null.namespaces[0].storage, Storage::Null(1 << 20));
    }

    #[test]
    fn parse__says_the_line_and_what_is_wrong() {
        let subsystem = "[[subsystem]]\n";
        let namespace = "[[subsystem]]\n[[subsystem.namespace]]\n";
        for (text, line, part) in [
            ("lisen = []", 1, "unknown field `lisen`"),
            ("listen = [\"tcp:0.0.0.0\"]", 1, "is not one address"),
            ("reactors = 65\n", 1, "give 1 to 64"),
            ("listen = [7]", 1, "expected an address such as"),
            (
                "[[listen]]\naddress = \"tcp:127.0.0.1\"\nin_capsule_bytes = 16400",
                3,
                "'16400' is no size of data in capsules: give a multiple of 16, from 0 to 16K",
            ),
            (
                "[[listen]]\naddress = \"tcp:127.0.0.1\"\nin_capsule_bytes = \"24\"",
                3,
                "'24' is no size of data in capsules",
            ),
            ("[[listen]]\nin_capsule_bytes = 0", 1, "missing field `address`"),
            ("[[referral]]\naddress = \"tcp:127.0.0.1:0\"", 2, "has no port"),
            (
                "[[referral]]\naddress = \"tcp:192.0.2.1\"\nsubnqn = \"x\"",
                3,
                "'x' is no NQN",
            ),
            ("", 1, "missing field `subsystem`"),
            (&format!("{subsystem}nqn = \"x\""), 2, "'x' is no NQN"),
            (
                &format!("{subsystem}other_hosts = \"all\""),
                2,
                "unknown variant `all`",
            ),
            (
                &format!("{subsystem}[[subsystem.host]]\nnqn = \"nqn.2014-08.org.example:a\"\nqueues = 0"),
                4,
                "0 is no number of queues",
            ),
            (
                &format!("{subsystem}[[subsystem.host]]\nnqn = \"nqn.2014-08.org.example:a\"\niops = 99"),
                4,
                "99 I/Os a second are too few",
            ),
            (
                &format!(
                    "{subsystem}[[subsystem.host]]\nnqn = \"nqn.2014-08.org.example:a\"\nbandwidth = \"1K\""
                ),
                4,
                "1024 bytes a second are too few",
            ),
            (
                &format!("{namespace}memory = \"1G\"\nnull = 1"),
                2,
                "one of path, memory, null",
            ),
            (
                &format!("{subsystem}controller = \"/dev/nvme0,allow=all\""),
                2,
                "'all' is nothing to allow",
            ),
            (&format!("{namespace}memory = 0"), 3, "'0' is not a size"),
            (
                &format!("{namespace}memory = 4096\nblock = 1000"),
                2,
                "'1000' is no size of a block",
            ),
            (&format!("{namespace}memory = 1G"), 3, ""),
            (
                &format!("{namespace}null = 512\nana_group = 129"),
                4,
                "'129' is no group of namespaces: give 1 to 128",
            ),
            (
                &format!("{subsystem}cntlids = \"0-9\""),
                2,
                "'0-9' is no range of controller ids",
            ),
            (
                &format!("{subsystem}[[subsystem.ana]]\ngroup = 1\nstate = \"fast\""),
                4,
                "'fast' is no state of access: give one of optimized, non-optimized,",
            ),
            (
                &format!("{subsystem}[[subsystem.ana]]\ngroup = 1"),
                2,
                "missing field `state`",
            ),
            (
                &format!("{subsystem}[[subsystem.ana]]\nlistener = \"tcp:x\"\nstate = \"change\""),
                3,
                "'x' is not an address",
            ),
        ] {
            let (at, what) = TargetConfig::parse(text).unwrap_err();
            assert!(
                at == line && what.contains(part) && !what.contains('\n'),
                "{text}: {at}: {what}"
            );
        }
    }

    #[test]
    fn parse_ana_state__knows_the_names_of_linux_and_spdk() {
        for (name, state) in ANA_STATES {
            assert_eq!(ana_state_name(state), name);
            assert_eq!(parse_ana_state(name), Ok(state));
            assert_eq!(parse_ana_state(&name.replace('-', "_")), Ok(state));
        }
        assert!(parse_ana_state("").is_err());
    }

    #[test]
    fn parse_nqn__asks_for_the_form() {
        assert!(parse_nqn("x").is_err() && parse_nqn("nqn.2014-08.org.example:a").is_ok());
    }

    #[test]
    fn parse_cntlids__is_within_the_ids_that_there_are() {
        assert_eq!(parse_cntlids("1-65519"), Ok(1..=65519));
        assert_eq!(parse_cntlids("128-128"), Ok(128..=128));
        for text in ["", "1", "0-1", "2-1", "1-65520", "1-70000", "-1-2", "a-b"] {
            let error = parse_cntlids(text).unwrap_err();
            assert!(error.contains("give FIRST-LAST within 1 to 65519"), "{error}");
        }
    }
}
