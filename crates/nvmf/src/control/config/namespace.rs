//! Namespaces.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use rdmux_accel::level_range;
use rdmux_drive::MemoryKind;
use rdmux_verbs::parse_size;
use rdmux_wire::accel::{AcceleratorInfo, Algorithm, WINDOW_BYTES};
use rdmux_wire::nvme::NsId;
use serde::de;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::{PcieStorage, Size};
use crate::backend::peer::PeerToPeer;
use crate::identity;
use crate::target::ANA_GROUP_MAX;

/// The storage of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Storage {
    /// A file or a block device.
    File(PathBuf),
    /// So many bytes of memory of the target.
    Memory(u64),
    /// So many bytes that are not stored.
    Null(u64),
    /// Windows of an accelerator.
    Accelerator(AcceleratorConfig),
    /// A drive that the target drives itself.
    Pcie(PcieStorage),
    /// A namespace of the controller that commands of its subsystem pass to; it is not described by itself.
    Controller(PathBuf),
}

/// An accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceleratorConfig {
    /// Work of its core, level of compressions and windows.
    pub info: AcceleratorInfo,
    /// Hosts that have windows at a time.
    pub hosts_max: u32,
}

/// Bytes of all windows that one accelerator may have in memory.
const WINDOWS_BYTES_MAX: u64 = 64 << 30;

type SetOption = fn(&mut AcceleratorConfig, u64) -> Result<(), String>;

impl AcceleratorConfig {
    /// Level, bytes of a window, windows, and hosts.
    const OPTIONS: [SetOption; 4] = [
        AcceleratorConfig::set_level,
        AcceleratorConfig::set_window,
        AcceleratorConfig::set_windows,
        AcceleratorConfig::set_hosts,
    ];

    /// Returns that of an algorithm, with 8 windows of 4 MiB for each of 16 hosts.
    ///
    /// # Errors
    /// One line: there is no such algorithm.
    pub fn named(algorithm: &str) -> Result<AcceleratorConfig, String> {
        let names = || {
            Algorithm::ALL
                .iter()
                .map(|known| known.name())
                .collect::<Vec<_>>()
                .join(", ")
        };
        let named = Algorithm::named(algorithm)
            .ok_or_else(|| format!("'{algorithm}' is no accelerator: give one of {}", names()))?;
        Ok(AcceleratorConfig {
            info: AcceleratorInfo {
                algorithm: named,
                level: level_range(named).map_or(0, |(_, level)| level),
                windows: 8,
                window_bytes: 4 << 20,
            },
            hosts_max: 16,
        })
    }

    /// Sets the level of compressions.
    fn set_level(&mut self, level: u64) -> Result<(), String> {
        let name = self.info.algorithm.name();
        let (levels, _) = level_range(self.info.algorithm)
            .ok_or_else(|| format!("{name} has no levels: leave level= out"))?;
        let is_one = u8::try_from(level).ok().filter(|level| levels.contains(level));
        self.info.level = is_one.ok_or_else(|| {
            let (first, last) = (levels.start(), levels.end());
            format!("{level} is no level of {name}: give {first} to {last}")
        })?;
        Ok(())
    }

    fn set_window(&mut self, bytes: u64) -> Result<(), String> {
        let is_valid = bytes.is_power_of_two() && WINDOW_BYTES.contains(&bytes);
        if !is_valid {
            return Err(format!(
                "{bytes} is no size of a window: give a power of two, 256K to 1G"
            ));
        }
        self.info.window_bytes = bytes;
        Ok(())
    }

    fn set_windows(&mut self, number: u64) -> Result<(), String> {
        let number = u32::try_from(number)
            .ok()
            .filter(|number| (1..=1024).contains(number));
        self.info.windows = number.ok_or("an accelerator has 1 to 1024 windows for each host")?;
        Ok(())
    }

    fn set_hosts(&mut self, number: u64) -> Result<(), String> {
        let number = u32::try_from(number)
            .ok()
            .filter(|number| (1..=65_536).contains(number));
        self.hosts_max = number.ok_or("an accelerator has windows for 1 to 65536 hosts")?;
        Ok(())
    }

    /// Checks that its windows may be in memory at a time.
    fn check(&self) -> Result<(), String> {
        let bytes = u64::from(self.hosts_max) * u64::from(self.info.windows) * self.info.window_bytes;
        if bytes > WINDOWS_BYTES_MAX {
            return Err(format!(
                "{} hosts with {} windows of {} bytes each could take {} GiB, more than {}: choose fewer or smaller ones",
                self.hosts_max,
                self.info.windows,
                self.info.window_bytes,
                bytes >> 30,
                WINDOWS_BYTES_MAX >> 30
            ));
        }
        Ok(())
    }
}

/// Parses accelerators as a command line has them: `ALGORITHM[:NUMBER]`, and behind it `,level=N`, `,window=SIZE`, `,windows=N` and `,hosts=N`.
/// Returns a namespace for each core.
///
/// # Errors
/// One line that says what is wrong.
pub fn parse_accelerators(text: &str) -> Result<Vec<NamespaceConfig>, String> {
    let mut options = text.split(',');
    let name = options.next().unwrap_or("");
    let (name, cores) = match name.split_once(':') {
        Some((name, cores)) => {
            let number = cores.parse().ok().filter(|number| (1..=256).contains(number));
            let number = number.ok_or_else(|| format!("'{cores}' is no number of cores: give 1 to 256"))?;
            (name, number)
        }
        None => (name, 1),
    };
    let mut config = AcceleratorConfig::named(name)?;
    for option in options {
        let number = |value: &str| {
            value
                .parse::<u64>()
                .map_err(|_| format!("'{value}' in {option} is no number"))
        };
        match option.split_once('=') {
            Some(("level", value)) => config.set_level(number(value)?)?,
            Some(("window", value)) => config.set_window(positive_size(value)?)?,
            Some(("windows", value)) => config.set_windows(number(value)?)?,
            Some(("hosts", value)) => config.set_hosts(number(value)?)?,
            _ => {
                return Err(format!(
                    "'{option}' is none of level=N, window=SIZE, windows=N and hosts=N"
                ));
            }
        }
    }
    config.check()?;
    let namespace = NamespaceConfig {
        nsid: None,
        storage: Storage::Accelerator(config),
        block_shift: 9,
        read_only: false,
        uuid: None,
        ana_group: first_group(),
    };
    Ok(vec![namespace; cores])
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Storage::File(path) => path.display().fmt(f),
            Storage::Memory(_) => f.write_str("memory"),
            Storage::Null(_) => f.write_str("null"),
            Storage::Accelerator(AcceleratorConfig { info, .. }) => {
                write!(f, "accelerator: {}", info.algorithm.name())?;
                match info.level {
                    0 => Ok(()),
                    level => write!(f, ", level {level}"),
                }
            }
            Storage::Pcie(pcie) => write!(f, "pcie:{}", pcie.place),
            Storage::Controller(path) => path.display().fmt(f),
        }
    }
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "NamespaceTable")]
pub struct NamespaceConfig {
    /// Its id; `None`: the lowest that is free.
    pub nsid: Option<NsId>,
    /// The storage of its blocks.
    pub storage: Storage,
    /// Bytes of a block, as a power of two.
    pub block_shift: u8,
    /// It takes no writes.
    pub read_only: bool,
    /// Its UUID; `None`: one that follows from its name and its storage.
    pub uuid: Option<[u8; 16]>,
    /// Its group of those that share a state of access (ANA).
    pub ana_group: u32,
}

/// A namespace as a file or a request has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamespaceTable {
    nsid: Option<u32>,
    path: Option<PathBuf>,
    memory: Option<Size>,
    null: Option<Size>,
    accel: Option<String>,
    level: Option<u64>,
    window: Option<Size>,
    windows: Option<u64>,
    hosts: Option<u64>,
    pcie: Option<String>,
    buffers: Option<String>,
    p2p: Option<String>,
    #[serde(default)]
    unbind: bool,
    block: Option<Size>,
    #[serde(default)]
    read_only: bool,
    uuid: Option<String>,
    #[serde(default = "first_group", deserialize_with = "group")]
    ana_group: u32,
}

impl TryFrom<NamespaceTable> for NamespaceConfig {
    type Error = String;

    fn try_from(table: NamespaceTable) -> Result<NamespaceConfig, String> {
        let is_of_drive = table.buffers.is_some() || table.p2p.is_some() || table.unbind;
        if table.pcie.is_none() && is_of_drive {
            return Err("buffers, p2p and unbind are for drives: name one with pcie".into());
        }
        let window = table.window.map(|Size(bytes)| bytes);
        let options = [table.level, window, table.windows, table.hosts];
        let storage = match (table.path, table.memory, table.null, table.accel, table.pcie) {
            (Some(path), None, None, None, None) => Storage::File(path),
            (None, Some(Size(bytes)), None, None, None) => Storage::Memory(bytes),
            (None, None, Some(Size(bytes)), None, None) => Storage::Null(bytes),
            (None, None, None, Some(name), None) => {
                let mut config = AcceleratorConfig::named(&name)?;
                for (value, set) in options.into_iter().zip(AcceleratorConfig::OPTIONS) {
                    value.map_or(Ok(()), |value| set(&mut config, value))?;
                }
                config.check()?;
                if table.read_only {
                    return Err("an accelerator without writes does nothing: leave read_only out".into());
                }
                Storage::Accelerator(config)
            }
            (None, None, None, None, Some(place)) => Storage::Pcie(PcieStorage::new(
                place.parse()?,
                table.buffers.as_deref().unwrap_or("dram").parse()?,
                table.p2p.as_deref().unwrap_or("off").parse()?,
                table.unbind,
            )?),
            _ => return Err("a namespace has one of path, memory, null, accel and pcie".into()),
        };
        if !matches!(storage, Storage::Accelerator(_)) && options.iter().any(Option::is_some) {
            return Err("level, window, windows and hosts are for accelerators: name one with accel".into());
        }
        let block_shift = table.block.map_or(Ok(9), |Size(bytes)| block_shift(bytes))?;
        check_size(&storage, block_shift)?;
        Ok(NamespaceConfig {
            nsid: table.nsid.map(NsId),
            storage,
            block_shift,
            read_only: table.read_only,
            uuid: table.uuid.as_deref().map(uuid).transpose()?,
            ana_group: table.ana_group,
        })
    }
}

impl NamespaceConfig {
    /// Returns that of a drive's controller.
    pub(crate) fn of_controller(path: PathBuf, nsid: NsId, block_shift: u8) -> NamespaceConfig {
        NamespaceConfig {
            nsid: Some(nsid),
            storage: Storage::Controller(path),
            block_shift,
            read_only: false,
            uuid: None,
            ana_group: first_group(),
        }
    }

    /// Returns the form that a request has.
    pub fn to_json(&self) -> Value {
        let mut table = json!({
            "block": 1u64 << self.block_shift,
            "read_only": self.read_only,
            "ana_group": self.ana_group,
        });
        match &self.storage {
            Storage::File(path) => table["path"] = json!(path),
            Storage::Memory(bytes) => table["memory"] = (*bytes).into(),
            Storage::Null(bytes) => table["null"] = (*bytes).into(),
            Storage::Accelerator(AcceleratorConfig { info, hosts_max }) => {
                table["accel"] = info.algorithm.name().into();
                if info.level > 0 {
                    table["level"] = info.level.into();
                }
                table["window"] = info.window_bytes.into();
                table["windows"] = info.windows.into();
                table["hosts"] = (*hosts_max).into();
            }
            Storage::Pcie(pcie) => {
                table["pcie"] = pcie.place.to_string().into();
                table["buffers"] = pcie.buffers.to_string().into();
                table["p2p"] = pcie.p2p.name().into();
                table["unbind"] = pcie.unbind.into();
            }
            Storage::Controller(path) => table["controller"] = json!(path),
        }
        if let Some(nsid) = self.nsid {
            table["nsid"] = nsid.0.into();
        }
        if let Some(uuid) = &self.uuid {
            table["uuid"] = identity::uuid_text(uuid).into();
        }
        table
    }
}

impl FromStr for NamespaceConfig {
    type Err = String;

    /// Parses the form of a command line: `PATH`, `mem:SIZE`, `null:SIZE` or `pcie:ADDR`, and behind it `,block=N`, `,ro`, `,uuid=UUID` and
    /// `,ana=GROUP`; behind a drive also `,buffers=dram|cmb|pmr`, `,p2p=prefer|require|off` and `,unbind`.
    fn from_str(text: &str) -> Result<NamespaceConfig, String> {
        let mut config = NamespaceConfig {
            nsid: None,
            storage: Storage::Null(0),
            block_shift: 9,
            read_only: false,
            uuid: None,
            ana_group: first_group(),
        };
        let mut place = text;
        let is_drive = text.starts_with("pcie:");
        let (mut buffers, mut p2p, mut unbind) = (MemoryKind::Dram, PeerToPeer::Off, false);
        // Options are taken off the end, so that a path may hold commas.
        while let Some((rest, option)) = place.rsplit_once(',') {
            if let Some(value) = option.strip_prefix("block=") {
                let bytes = parse_size(value).ok_or_else(|| no_block(value))?;
                config.block_shift = block_shift(bytes)?;
            } else if let Some(value) = option.strip_prefix("uuid=") {
                config.uuid = Some(uuid(value)?);
            } else if let Some(value) = option.strip_prefix("ana=") {
                let group = value.parse().map_err(|_| no_group(value))?;
                config.ana_group = check_group(group)?;
            } else if option == "ro" {
                config.read_only = true;
            } else if let Some(value) = option.strip_prefix("buffers=").filter(|_| is_drive) {
                buffers = value.parse()?;
            } else if let Some(value) = option.strip_prefix("p2p=").filter(|_| is_drive) {
                p2p = value.parse()?;
            } else if option == "unbind" && is_drive {
                unbind = true;
            } else if is_drive {
                return Err(format!(
                    "'{option}' is none of buffers=dram|cmb|pmr, p2p=prefer|require|off, unbind, block=N, ro, uuid=UUID and ana=GROUP"
                ));
            } else if place.starts_with("mem:") || place.starts_with("null:") {
                return Err(format!(
                    "'{option}' is none of block=N, ro, uuid=UUID and ana=GROUP"
                ));
            } else {
                break;
            }
            place = rest;
        }
        config.storage = if let Some(text) = place.strip_prefix("mem:") {
            Storage::Memory(positive_size(text)?)
        } else if let Some(text) = place.strip_prefix("null:") {
            Storage::Null(positive_size(text)?)
        } else if let Some(place) = place.strip_prefix("pcie:") {
            Storage::Pcie(PcieStorage::new(place.parse()?, buffers, p2p, unbind)?)
        } else if place.is_empty() {
            return Err("no file given: use PATH, mem:SIZE, null:SIZE or pcie:ADDR".into());
        } else {
            Storage::File(place.into())
        };
        check_size(&config.storage, config.block_shift)?;
        Ok(config)
    }
}

/// Checks that what is made for a namespace consists of its blocks. A file is as it is: what is behind its last whole block is not exported.
fn check_size(storage: &Storage, block_shift: u8) -> Result<(), String> {
    let block = 1u64 << block_shift;
    match storage {
        Storage::Memory(bytes) | Storage::Null(bytes) if !bytes.is_multiple_of(block) => Err(format!(
            "{bytes} bytes are no multiple of the block, {block} bytes: give such a size"
        )),
        _ => Ok(()),
    }
}

fn block_shift(bytes: u64) -> Result<u8, String> {
    let is_valid = bytes.is_power_of_two() && (512..=65536).contains(&bytes);
    is_valid
        .then(|| bytes.ilog2() as u8)
        .ok_or_else(|| no_block(&bytes.to_string()))
}

fn no_block(text: &str) -> String {
    format!("'{text}' is no size of a block: give a power of two, 512 to 65536")
}

pub(super) fn positive_size(text: &str) -> Result<u64, String> {
    parse_size(text).filter(|bytes| *bytes > 0).ok_or_else(|| {
        format!("'{text}' is not a size: give bytes, at least 1, or a number with K, M, G or T")
    })
}

fn uuid(text: &str) -> Result<[u8; 16], String> {
    identity::parse_uuid(text).ok_or_else(|| format!("'{text}' is no UUID"))
}

const fn first_group() -> u32 {
    1
}

fn check_group(group: u32) -> Result<u32, String> {
    let is_valid = (1..=ANA_GROUP_MAX).contains(&group);
    is_valid
        .then_some(group)
        .ok_or_else(|| no_group(&group.to_string()))
}

fn no_group(text: &str) -> String {
    format!("'{text}' is no group of namespaces: give 1 to {ANA_GROUP_MAX}")
}

pub(in crate::control) fn group<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    check_group(u32::deserialize(deserializer)?).map_err(de::Error::custom)
}

pub(in crate::control) fn optional_group<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u32>, D::Error> {
    group(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accelerators__are_read_from_a_command_line_and_a_request() {
        let parse = |text: &str| parse_accelerators(text);
        let cores = parse("zstd:2,level=3,window=1M,windows=4,hosts=2").unwrap();
        let Storage::Accelerator(config) = &cores[0].storage else {
            panic!("{cores:?}")
        };
        assert_eq!(cores.len(), 2);
        assert_eq!(
            (
                config.info.level,
                config.info.window_bytes,
                config.info.windows,
                config.hosts_max
            ),
            (3, 1 << 20, 4, 2)
        );
        assert_eq!(cores[0].storage.to_string(), "accelerator: zstd, level 3");
        for cores in [cores, parse("crc64nvme").unwrap()] {
            let again = NamespaceConfig::deserialize(cores[0].to_json()).unwrap();
            assert_eq!(again, cores[0], "as a request");
        }
        for (text, part) in [
            ("gzip", "'gzip' is no accelerator: give one of null, deflate"),
            ("", "'' is no accelerator"),
            ("zstd:0", "'0' is no number of cores: give 1 to 256"),
            ("zstd,level=20", "20 is no level of zstd: give 1 to 19"),
            ("lz4,level=1", "lz4 has no levels"),
            ("lz4,window=5M", "5242880 is no size of a window"),
            ("lz4,windows=0", "1 to 1024 windows"),
            ("lz4,hosts=x", "'x' in hosts=x is no number"),
            ("lz4,speed=1", "'speed=1' is none of"),
            (
                "lz4,window=1G,windows=64,hosts=64",
                "choose fewer or smaller ones",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        let wrong = serde_json::json!({ "memory": 4096, "level": 1 });
        assert!(NamespaceConfig::deserialize(wrong).is_err());
    }

    #[test]
    fn namespace__takes_options_off_the_end() {
        let parse = |text: &str| text.parse::<NamespaceConfig>();
        let config = |text| parse(text).unwrap();
        assert_eq!(config("mem:1G,block=4096,ro").storage, Storage::Memory(1 << 30));
        assert_eq!(
            (
                config("null:1T,block=4K").block_shift,
                config("/a,b,ro").read_only
            ),
            (12, true)
        );
        assert_eq!(config("/a,b,ro").storage, Storage::File("/a,b".into()));
        let uuid = "00010203-0405-8607-8809-0a0b0c0d0e0f";
        assert_eq!(config("/a,b,ana=7").ana_group, 7);
        for text in [
            "mem:1G,ro,ana=2",
            "null:1M",
            "pcie:00:04.0",
            "pcie:0000:3b:00.0/2,unbind,ro,buffers=cmb",
            &format!("/a,b,block=4096,uuid={uuid}"),
        ] {
            let again = NamespaceConfig::deserialize(config(text).to_json()).unwrap();
            assert_eq!(again, config(text), "as a request");
        }
        for (text, part) in [
            ("mem:x", "'x' is not a size"),
            ("mem:0", "'0' is not a size"),
            ("mem:100", "100 bytes are no multiple of the block, 512 bytes"),
            (
                "null:6K,block=4K",
                "6144 bytes are no multiple of the block, 4096",
            ),
            ("mem:1G,block=1000", "'1000' is no size of a block"),
            ("null:1G,rw", "'rw' is none of"),
            (",ro", "no file given"),
            ("null:1G,ana=0", "'0' is no group of namespaces"),
            ("pcie:00:04.0,buffers=hbm", "'hbm' is no memory of a drive"),
            ("pcie:00:04.0,bind", "'bind' is none of buffers="),
            ("pcie:nvme0", "'nvme0' is no address of a PCIe function"),
            ("mem:1G,unbind", "'unbind' is none of"),
            ("null:1G,ana=x", "'x' is no group of namespaces"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
