//! A folder that stands for a host: its sysfs, configuration spaces, processor.
#![allow(dead_code, reason = "not every test needs all of it")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

pub(crate) const SKYLAKE: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\n\
                       model name\t: Intel(R) Xeon(R) Gold 6154\nstepping\t: 4\n";
/// The root port above the RNIC.
pub(crate) const ROOT_PORT: &str = "0000:16:00.0";

pub(crate) struct Host {
    pub(crate) root: tempfile::TempDir,
}

impl Host {
    /// Makes a host with this processor, and an RNIC of two functions behind a switch behind a root port.
    pub(crate) fn new(cpuinfo: &str, port: (&str, &str), byte: u8) -> Host {
        let root = tempfile::tempdir().unwrap();
        let host = Host { root };
        fs::create_dir_all(host.at("proc")).unwrap();
        fs::write(host.at("proc/cpuinfo"), cpuinfo).unwrap();
        let bus = "sys/devices/pci0000:16";
        let mut config = vec![0x5a; 4096];
        config[0x180] = byte;
        host.add(&format!("{bus}/{ROOT_PORT}"), port, "0x060400", &config);
        let switch = format!("{bus}/{ROOT_PORT}/0000:17:00.0/0000:18:01.0");
        host.add(
            &format!("{bus}/{ROOT_PORT}/0000:17:00.0"),
            ("0x15b3", "0x1979"),
            "0x060400",
            &[0; 4096],
        );
        host.add(&switch, ("0x15b3", "0x1979"), "0x060400", &[0; 4096]);
        for function in 0..2 {
            let name = format!("0000:19:00.{function}");
            host.add(
                &format!("{switch}/{name}"),
                ("0x15b3", "0x1017"),
                "0x020700",
                &[0; 4096],
            );
            host.rdma(&format!("mlx5_{function}"), &format!("{switch}/{name}"));
        }
        host
    }

    pub(crate) fn at(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    pub(crate) fn add(&self, folder: &str, (vendor, device): (&str, &str), class: &str, config: &[u8]) {
        let folder = self.at(folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("vendor"), format!("{vendor}\n")).unwrap();
        fs::write(folder.join("device"), format!("{device}\n")).unwrap();
        fs::write(folder.join("class"), format!("{class}\n")).unwrap();
        fs::write(folder.join("config"), config).unwrap();
        let name = folder.file_name().unwrap();
        let devices = self.at("sys/bus/pci/devices");
        fs::create_dir_all(&devices).unwrap();
        symlink(&folder, devices.join(name)).unwrap();
    }

    /// Adds the RDMA device of a PCI device, linked as the kernel links it.
    pub(crate) fn rdma(&self, name: &str, device: &str) {
        let own = format!("{device}/infiniband/{name}");
        fs::create_dir_all(self.at(&own)).unwrap();
        symlink("../..", self.at(&own).join("device")).unwrap();
        let class = self.at("sys/class/infiniband");
        fs::create_dir_all(&class).unwrap();
        symlink(Path::new("../../..").join(&own), class.join(name)).unwrap();
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.at(&format!("sys/devices/pci0000:16/{ROOT_PORT}/config"))
    }

    /// Returns byte 0x180 of the root port's configuration space, and all other bytes that are not as they were made.
    pub(crate) fn changed(&self) -> Vec<(usize, u8)> {
        let config = fs::read(self.config()).unwrap();
        let other = config
            .into_iter()
            .enumerate()
            .filter(|(at, byte)| *byte != 0x5a || *at == 0x180);
        other.collect()
    }

    pub(crate) fn rdmux(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rdmux"));
        command.args(args).arg("--root").arg(self.root.path());
        command.output().unwrap()
    }
}

/// Makes a host whose root port is known.
pub(crate) fn skylake(byte: u8) -> Host {
    Host::new(SKYLAKE, ("0x8086", "0x2030"), byte)
}
