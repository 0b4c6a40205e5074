//! Addresses, ports, files and network namespaces, of which a run shares some with all others on this host and has the rest for itself.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::process::{ChildStdin, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::process::{Job, Signals, output};

/// An address as `/proc/net` writes it.
fn hexadecimal(address: Ipv4Addr) -> String {
    format!("{:08X}", u32::from_ne_bytes(address.octets()))
}

/// Returns a loopback address whose RoCEv2 port nobody has.
pub(crate) fn free_address() -> Result<Ipv4Addr> {
    let taken = fs::read_to_string("/proc/net/udp")?;
    loop {
        let address = Ipv4Addr::new(
            127,
            fastrand::u8(64..192),
            fastrand::u8(1..255),
            fastrand::u8(1..255),
        );
        if !taken.contains(&format!(" {}:12B7 ", hexadecimal(address))) {
            return Ok(address);
        }
    }
}

/// Returns whether somebody has joined a multicast group.
pub(super) fn joined(group: Ipv4Addr) -> Result<bool> {
    Ok(fs::read_to_string("/proc/net/igmp")?.contains(&hexadecimal(group)))
}

/// Returns whether somebody listens at a port of TCP, at `address` if there is one. `process` is a process whose network is meant.
pub(super) fn listens(process: &str, address: Option<Ipv4Addr>, port: u16) -> Result<bool> {
    let port = format!("{port:04X}");
    let address = address.map(hexadecimal);
    for table in ["tcp", "tcp6"] {
        // A host without IPv6 has no second table.
        let Ok(table) = fs::read_to_string(format!("/proc/{process}/net/{table}")) else {
            continue;
        };
        let found = table.lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().take(4).collect();
            let [_, local, _, "0A"] = fields[..] else {
                return false;
            };
            local.rsplit_once(':').is_some_and(|(at, number)| {
                number == port && address.as_deref().is_none_or(|address| address == at)
            })
        });
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The lock, until it is dropped, on what all runs on this host share: ports of TCP, and the files of XRC.
pub(super) struct Claim {
    _locked: File,
    pub(super) port: u16,
}

impl Claim {
    /// Waits for the lock, and picks a free port.
    pub(super) fn wait(signals: &Signals) -> Result<Self> {
        let locked = File::open("/tmp")?;
        let free = signals.until(None, Duration::from_secs(120), || {
            match flock(&locked, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => Ok(false),
                result => Ok(result.map(|()| true)?),
            }
        })?;
        if !free {
            bail!("another run has had /tmp locked for 2 minutes");
        }
        loop {
            let port = fastrand::u16(10_000..30_000);
            if !listens("self", None, port)? {
                return Ok(Self {
                    _locked: locked,
                    port,
                });
            }
        }
    }
}

/// The files by which programs name XRC domains, which are removed when this is dropped.
pub(super) struct XrcFiles;

impl XrcFiles {
    const PATHS: [&str; 3] = [
        "/tmp/xrc_domain",
        "/tmp/xrc_domain_client",
        "/tmp/xrc_domain_server",
    ];

    /// Takes the files, or returns why that is not possible.
    pub(super) fn take() -> Result<Self, String> {
        let user = rustix::process::geteuid().as_raw();
        for path in Self::PATHS {
            let foreign = fs::symlink_metadata(path).is_ok_and(|metadata| metadata.uid() != user);
            if foreign && fs::remove_file(path).is_err() {
                return Err(format!("{path} is another user's"));
            }
        }
        Ok(Self)
    }
}

impl Drop for XrcFiles {
    fn drop(&mut self) {
        for path in Self::PATHS {
            // No program makes all of them.
            let _absent = fs::remove_file(path);
        }
    }
}

/// A network namespace, in a user namespace where this user is root. It lives until this is dropped.
pub(super) struct Network {
    holder: Job,
    /// The holder reads from it until it is closed.
    _input: ChildStdin,
}

impl Network {
    /// Makes a namespace with a user namespace of its own.
    pub(super) fn new() -> Result<Self> {
        Self::held_by(Command::new("unshare").args(["--user", "--map-root-user", "--net", "cat"]))
    }

    /// Makes another one in the same user namespace.
    pub(super) fn beside(&self) -> Result<Self> {
        Self::held_by(self.command("unshare").args(["--net", "cat"]))
    }

    /// Starts a command that enters a namespace and then is `cat`.
    fn held_by(command: &mut Command) -> Result<Self> {
        let (holder, mut input, mut output) = Job::start_piped(command)?;
        // The answer comes once the namespace is there.
        input
            .write_all(b"\n")
            .and_then(|()| output.read_exact(&mut [0]))
            .context("cannot make a network namespace")?;
        Ok(Self {
            holder,
            _input: input,
        })
    }

    /// Returns the number of a process in the namespace.
    pub(super) fn process(&self) -> u32 {
        self.holder.id()
    }

    /// Returns a command in the namespace.
    pub(super) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.process().to_string()]);
        command
            .args(["--user", "--preserve-credentials", "--net"])
            .arg(program);
        command
    }

    /// Runs `ip` with each of some lines of arguments.
    pub(super) fn ip(&self, lines: &[String], signals: &Signals) -> Result<()> {
        for line in lines {
            let output = output(self.command("ip").args(line.split_whitespace()), signals)?;
            if !output.end.success() {
                bail!("ip {line}: {} ({})", output.stderr.trim(), output.end);
            }
        }
        Ok(())
    }
}

/// Returns what a program says about its options: nothing where it is not installed.
pub(super) fn usage(program: &str, signals: &Signals) -> Result<String> {
    let output = output(Command::new(program).arg("-h"), signals)?;
    Ok(output.stdout + &output.stderr)
}
