//! `rdmux ddio`: switches whether writes of devices go to the processor's cache first, by the register of the PCI root port above them.
//!
//! perfctrlsts_0, byte 0x180 of a root port's configuration space: bit 7 use_allocating_flow_wr, bit 3 nosnoopopwren. Intel Xeon
//! Scalable datasheet, volume 2. Without both, writes go to the memory controller's write pending queue.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use super::doctor::{Finding, Verdict};
use crate::output;

/// Offset of the register's byte.
const REGISTER: u64 = 0x180;
/// Vendor and device IDs of the root ports whose register is known, and the processors that have them.
const INTEL: u16 = 0x8086;
const ROOT_PORTS: std::ops::RangeInclusive<u16> = 0x2030..=0x2033;
const KNOWN: &str = "Skylake-SP and Cascade Lake";

/// JSON that both subcommands print.
const JSON: &str = "\
JSON: one object: device, root_port (address, vendor, device), generation (of the processor, or null), before and after (the byte of the
register), ddio (on or off), behind (array of PCI addresses).";

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Let the writes of a device bypass the cache. Needs root; lasts until the next boot.
    ///
    /// Then a READ after a WRITE proves that the WRITE is durable, on a platform with ADR and persistent memory. The setting applies to
    /// every device behind the same PCI root port, and slows down devices that benefit from the cache. `rdmux doctor ddio` shows the
    /// setting.
    #[command(after_help = JSON)]
    Off(Target),
    /// Let the writes of a device go to the cache again.
    #[command(after_help = JSON)]
    On(Target),
}

#[derive(clap::Args, Debug)]
struct Target {
    /// RDMA device, such as mlx5_0, or PCI address, such as 0000:17:00.0.
    device: String,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Root of the host's file system.
    #[arg(long, hide = true, default_value = "/")]
    root: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (target, on) = match &args.command {
        Command::Off(target) => (target, false),
        Command::On(target) => (target, true),
    };
    let host = Host::new(&target.root);
    let device = host.device(&target.device)?;
    let port = host.root_port(&device)?;
    let cpu = host.cpu();
    port.check_known(&cpu)
        .with_context(|| format!("the DDIO setting of {} is unchanged", port.address))?;
    let change = host.change(&port, on)?;
    let behind = port.behind();
    if target.json {
        let value = json!({
            "device": target.device,
            "root_port": port.to_json(),
            "generation": cpu.generation(),
            "before": change.before.0,
            "after": change.after.0,
            "ddio": change.after.word(),
            "behind": behind,
        });
        output::say(&format!("{value:#}"));
    } else {
        output::say(&change.describe(&target.device, &port, &cpu));
        output::say(&format!("behind this port   {}", behind.join(", ")));
    }
    if change.before != change.after {
        output::error(&anyhow!(
            "warning: the register is verified only on {KNOWN}, this is {}; the setting applies to every device behind {} until the next \
             boot",
            cpu.generation().unwrap_or("unknown"),
            port.address
        ));
    }
    Ok(())
}

/// Returns the findings of `rdmux doctor ddio`.
pub(crate) fn findings(root: &Path) -> Vec<Finding> {
    let host = Host::new(root);
    let names = match host.rdma_devices() {
        Ok(names) => names,
        Err(error) => {
            return vec![Finding::new(
                "-",
                Verdict::Unknown,
                format!("cannot list RDMA devices: {error}"),
            )];
        }
    };
    if names.is_empty() {
        let what = "no RDMA device: rdmux places data with the processor, which does not use DDIO";
        return vec![Finding::new("-", Verdict::Ok, what.to_owned())];
    }
    names.iter().map(|name| host.finding(name)).collect()
}

/// Value of the register's byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Register(u8);

impl Register {
    const ALLOCATES: u8 = 1 << 7;
    const NO_SNOOP: u8 = 1 << 3;

    /// Returns whether writes go to the cache.
    fn is_on(self) -> bool {
        self.0 & Register::ALLOCATES != 0
    }

    fn word(self) -> &'static str {
        if self.is_on() { "on" } else { "off" }
    }

    fn off(self) -> Register {
        Register(self.0 & !(Register::ALLOCATES | Register::NO_SNOOP))
    }

    /// Returns the value that switches it back on, with nosnoopopwren as it was before it was switched off, if that is known.
    fn on(self, before: Option<Register>) -> Register {
        let no_snoop = before.unwrap_or(self).0 & Register::NO_SNOOP;
        Register(self.off().0 | Register::ALLOCATES | no_snoop)
    }

    fn describe(self) -> String {
        format!(
            "byte {REGISTER:#x} is {:#04x}: use_allocating_flow_wr {}, nosnoopopwren {}",
            self.0,
            u8::from(self.is_on()),
            u8::from(self.0 & Register::NO_SNOOP != 0),
        )
    }
}

/// Values of the register before and after `ddio on` or `off`.
#[derive(Clone, Copy, Debug)]
struct Change {
    before: Register,
    after: Register,
}

impl Change {
    fn describe(self, device: &str, port: &RootPort, cpu: &Cpu) -> String {
        let Change { before, after } = self;
        let what = if before == after {
            format!("{:#04x}, unchanged", before.0)
        } else {
            format!("{:#04x} -> {:#04x}, read back", before.0, after.0)
        };
        [
            format!("{:<18} {device}", "device"),
            format!("{:<18} {port}, {cpu}", "root port"),
            format!("{:<18} {what}", format!("byte {REGISTER:#x}")),
            format!("{:<18} {}", "DDIO", after.word()),
        ]
        .join("\n")
    }
}

/// A processor, as /proc/cpuinfo describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Cpu {
    vendor: String,
    family: u32,
    model: u32,
    stepping: u32,
    name: String,
}

impl Cpu {
    fn parse(cpuinfo: &str) -> Cpu {
        let mut cpu = Cpu::default();
        // The entry of the first processor stands for all.
        for line in cpuinfo.lines().take_while(|line| !line.trim().is_empty()) {
            let Some((key, value)) = line.split_once(':') else {
                continue;
            };
            let (key, value) = (key.trim(), value.trim());
            let number = || value.parse().unwrap_or(0);
            match key {
                "vendor_id" => cpu.vendor = value.to_owned(),
                "cpu family" => cpu.family = number(),
                "model" => cpu.model = number(),
                "stepping" => cpu.stepping = number(),
                "model name" => cpu.name = value.to_owned(),
                _ => {}
            }
        }
        cpu
    }

    /// Returns the generation of a processor whose register is known.
    fn generation(&self) -> Option<&'static str> {
        match (self.vendor.as_str(), self.family, self.model, self.stepping) {
            ("GenuineIntel", 6, 85, 0..=4) => Some("Skylake-SP"),
            ("GenuineIntel", 6, 85, 5..=7) => Some("Cascade Lake"),
            _ => None,
        }
    }
}

impl std::fmt::Display for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.generation() {
            Some(generation) => f.write_str(generation),
            None if self.name.is_empty() => f.write_str("an unknown processor"),
            None => f.write_str(&self.name),
        }
    }
}

/// A PCI root port.
#[derive(Clone, Debug)]
struct RootPort {
    address: String,
    vendor: u16,
    device: u16,
    folder: PathBuf,
}

impl std::fmt::Display for RootPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({:04x}:{:04x})", self.address, self.vendor, self.device)
    }
}

impl RootPort {
    fn check_known(&self, cpu: &Cpu) -> Result<()> {
        if self.vendor != INTEL || !ROOT_PORTS.contains(&self.device) {
            bail!("the DDIO register of root port {self} is unknown; rdmux knows those of {KNOWN}");
        }
        if cpu.generation().is_none() {
            bail!("the DDIO register of root port {self} is known on {KNOWN}, not on {cpu}");
        }
        Ok(())
    }

    fn read(&self) -> Result<Register> {
        let path = self.folder.join("config");
        let file = fs::File::open(&path).with_context(|| path.display().to_string())?;
        self.read_from(&file)
    }

    fn read_from(&self, file: &fs::File) -> Result<Register> {
        let mut byte = [0];
        // Ordinary users see only the first 64 bytes of a configuration space.
        match file.read_at(&mut byte, REGISTER) {
            Ok(0) if rustix::process::geteuid().is_root() => {
                bail!("{self} has no extended configuration space, so no byte {REGISTER:#x}")
            }
            Ok(0) => bail!("only root may read byte {REGISTER:#x} of {self}: use sudo"),
            Ok(_) if byte[0] == 0xff => bail!("{self} does not answer (byte {REGISTER:#x} reads 0xff)"),
            Ok(_) => Ok(Register(byte[0])),
            Err(error) => Err(error).with_context(|| format!("byte {REGISTER:#x} of {self}")),
        }
    }

    fn open_to_write(&self) -> Result<fs::File> {
        let path = self.folder.join("config");
        let opened = fs::OpenOptions::new().read(true).write(true).open(&path);
        opened.map_err(|error| match error.kind() {
            ErrorKind::PermissionDenied => anyhow!("only root may change {self}: use sudo"),
            _ => anyhow!("{}: {error}", path.display()),
        })
    }

    /// Returns the devices behind the port.
    fn behind(&self) -> Vec<String> {
        let mut found = Vec::new();
        let mut folders = vec![(self.folder.clone(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            for entry in entries.filter(|entry| is_pci_address(&entry.file_name().to_string_lossy())) {
                let name = entry.file_name().to_string_lossy().into_owned();
                if !is_bridge(&entry.path()) {
                    found.push(name);
                } else if depth < 16 {
                    folders.push((entry.path(), depth + 1));
                }
            }
        }
        found.sort();
        found
    }

    fn to_json(&self) -> Value {
        json!({
            "address": self.address,
            "vendor": format!("{:04x}", self.vendor),
            "device": format!("{:04x}", self.device),
        })
    }
}

/// Returns whether a folder of sysfs is that of a PCI bridge.
fn is_bridge(folder: &Path) -> bool {
    let class = hex(&folder.join("class"));
    class.is_ok_and(|class| class >> 8 == 0x0604)
}

/// Returns whether `name` has the form of a PCI address, such as `0000:17:00.0`.
fn is_pci_address(name: &str) -> bool {
    let is_hex = |part: &str, len: std::ops::RangeInclusive<usize>| {
        len.contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit())
    };
    let parts: Vec<&str> = name.split(':').collect();
    let [domain, bus, slot] = parts[..] else {
        return false;
    };
    let Some((device, function)) = slot.split_once('.') else {
        return false;
    };
    is_hex(domain, 4..=8) && is_hex(bus, 2..=2) && is_hex(device, 2..=2) && is_hex(function, 1..=1)
}

/// Reads a number of sysfs, such as `0x8086`.
fn hex(path: &Path) -> Result<u32> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let digits = text.trim().trim_start_matches("0x");
    u32::from_str_radix(digits, 16).with_context(|| format!("{}: {digits:?} is not a number", path.display()))
}

/// A host's files, below a folder that stands for `/`.
#[derive(Debug)]
struct Host {
    root: PathBuf,
}

impl Host {
    fn new(root: &Path) -> Host {
        Host {
            root: root.to_owned(),
        }
    }

    fn rdma_devices(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(self.root.join("sys/class/infiniband")) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let mut names: Vec<String> = names.collect::<io::Result<_>>()?;
        names.sort();
        Ok(names)
    }

    fn cpu(&self) -> Cpu {
        let cpuinfo = fs::read_to_string(self.root.join("proc/cpuinfo"));
        Cpu::parse(&cpuinfo.unwrap_or_default())
    }

    /// Returns the folder of a device that the user has named.
    fn device(&self, name: &str) -> Result<PathBuf> {
        let path = if is_pci_address(name) {
            self.root.join("sys/bus/pci/devices").join(name)
        } else if Path::new(name)
            .components()
            .eq([Component::Normal(name.as_ref())])
        {
            self.root.join("sys/class/infiniband").join(name)
        } else {
            bail!("{name:?} is neither an RDMA device nor a PCI address");
        };
        if !path.exists() {
            let known = self.rdma_devices().unwrap_or_default().join(", ");
            let known = if known.is_empty() { "none" } else { &known };
            bail!("no device {name}; RDMA devices: {known}");
        }
        if is_pci_address(name) {
            return path.canonicalize().with_context(|| path.display().to_string());
        }
        let device = path.join("device");
        device.canonicalize().map_err(|error| match error.kind() {
            ErrorKind::NotFound => anyhow!("{name} is a software device without a PCI device"),
            _ => anyhow!("{}: {error}", device.display()),
        })
    }

    /// Returns the root port above a device, or the device itself: the last part of its path that stands on a root bus.
    fn root_port(&self, device: &Path) -> Result<RootPort> {
        let names: Vec<&str> = device.iter().filter_map(|part| part.to_str()).collect();
        let root_bus = |name: &&str| name.starts_with("pci") && name.contains(':');
        let none = || anyhow!("{} is not a PCI device", device.display());
        let at = names.iter().rposition(root_bus).ok_or_else(none)? + 1;
        let address = *names
            .get(at)
            .filter(|name| is_pci_address(name))
            .ok_or_else(none)?;
        let folder: PathBuf = device.iter().take(at + 1).collect();
        if !is_bridge(&folder) {
            bail!(
                "there is no root port above {address}: in a virtual machine, run this command on the host"
            );
        }
        Ok(RootPort {
            address: address.to_owned(),
            vendor: hex(&folder.join("vendor"))? as u16,
            device: hex(&folder.join("device"))? as u16,
            folder,
        })
    }

    /// Returns the path of the file that keeps the byte's earlier value until the next boot.
    fn saved(&self, port: &RootPort) -> PathBuf {
        self.root.join("run/rdmux/ddio").join(&port.address)
    }

    /// Switches, then reads the register back: fails if it did not take the value.
    fn change(&self, port: &RootPort, on: bool) -> Result<Change> {
        let file = port.open_to_write()?;
        let before = port.read_from(&file)?;
        let saved = self.saved(port);
        let after = if on {
            let text = fs::read_to_string(&saved).unwrap_or_default();
            let kept = u8::from_str_radix(text.trim(), 16).ok();
            before.on(kept.map(Register))
        } else {
            before.off()
        };
        if before.is_on() == on && (on || before == after) {
            return Ok(Change {
                before,
                after: before,
            });
        }
        if !on && (before.is_on() || !saved.exists()) {
            let folder = saved.parent().unwrap_or(&saved);
            fs::create_dir_all(folder)
                .and_then(|()| fs::write(&saved, format!("{:02x}\n", before.0)))
                .with_context(|| format!("cannot save the current setting to {}", saved.display()))?;
        }
        file.write_all_at(&[after.0], REGISTER)
            .with_context(|| format!("byte {REGISTER:#x} of {port}"))?;
        let found = port.read()?;
        if found != after {
            bail!(
                "{port} did not accept the setting: byte {REGISTER:#x} reads {:#04x} after a write of {:#04x} (locked by the firmware?)",
                found.0,
                after.0
            );
        }
        Ok(Change { before, after })
    }

    fn finding(&self, name: &str) -> Finding {
        let link = self.root.join("sys/class/infiniband").join(name).join("device");
        if link.symlink_metadata().is_err() {
            let what = "a software device without a PCI device: its writes go to the cache first";
            return Finding::new(name, Verdict::Ok, what.to_owned());
        }
        let unknown = |error: anyhow::Error| Finding::new(name, Verdict::Unknown, format!("{error:#}"));
        let port = match self.device(name).and_then(|device| self.root_port(&device)) {
            Ok(port) => port,
            Err(error) => return unknown(error),
        };
        let cpu = self.cpu();
        let details = json!({
            "root_port": port.to_json(),
            "cpu": cpu.name,
            "generation": cpu.generation(),
            "behind": port.behind(),
        });
        let read = port.check_known(&cpu).and_then(|()| port.read());
        let register = match read {
            Ok(register) => register,
            Err(error) => return unknown(error).with_details(details),
        };
        let mut details = details;
        details["byte"] = json!(register.0);
        details["use_allocating_flow_wr"] = json!(register.is_on());
        details["nosnoopopwren"] = json!(register.0 & Register::NO_SNOOP != 0);
        details["ddio"] = json!(register.word());
        let what = format!(
            "DDIO {}: root port {port}, {cpu}, {}",
            register.word(),
            register.describe()
        );
        let advice = if register.is_on() {
            format!(
                "a READ after a WRITE does not prove durability: use FLUSH or a software flush, or run rdmux ddio off {name}"
            )
        } else {
            "with ADR, a READ after a WRITE proves that the WRITE is durable".to_owned()
        };
        Finding::new(name, Verdict::Ok, what)
            .with_advice(advice)
            .with_details(details)
    }
}

#[cfg(test)]
mod tests {
    use super::{Cpu, Register, is_pci_address};

    #[test]
    fn register__off_and_on_change_two_bits() {
        for byte in 0..=255 {
            let before = Register(byte);
            let off = before.off();
            assert_eq!(off.0 & !0x88, byte & !0x88);
            assert_eq!(off.0 & 0x88, 0);
            let on = off.on(Some(before));
            assert!(on.is_on());
            assert_eq!(on.0 & !0x80, byte & !0x80, "as it was, but for bit 7");
        }
        assert_eq!(Register(0x99).off(), Register(0x11));
        assert_eq!(Register(0xd1).off(), Register(0x51));
    }

    #[test]
    fn register__on_without_a_saved_byte_leaves_bit_3() {
        assert_eq!(Register(0x11).on(None), Register(0x91));
        assert_eq!(Register(0x19).on(None), Register(0x99));
    }

    #[test]
    fn cpu__generation() {
        let of = |model: u32, stepping: u32| {
            let text = format!(
                "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: {model}\nmodel name\t: X\nstepping\t: {stepping}\n\nprocessor\t: 1\nmodel\t\t: 1\n"
            );
            Cpu::parse(&text).generation()
        };
        assert_eq!(of(85, 4), Some("Skylake-SP"));
        assert_eq!(of(85, 7), Some("Cascade Lake"));
        assert_eq!(of(85, 11), None, "Cooper Lake");
        assert_eq!(of(106, 6), None, "Ice Lake");
        assert_eq!(Cpu::parse("").generation(), None);
    }

    #[test]
    fn pci_address__form() {
        assert!(is_pci_address("0000:17:00.0"));
        assert!(is_pci_address("10000:e1:1f.7"));
        for not in [
            "mlx5_0",
            "17:00.0",
            "0000:17:00",
            "0000:17:0g.0",
            "../0:17:00.0",
            "0000.17:00:0.1",
            "",
        ] {
            assert!(!is_pci_address(not), "{not}");
        }
    }
}
