//! `rdmux run`: a program for RDMA, unmodified, on the RNIC in user space.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use rdmux_verbs::faults::Spec;

/// The libraries of a program that are replaced, by their files in the build and their names for the loader.
const LIBRARIES: [(&str, &str); 2] = [
    ("libibverbs.so", "libibverbs.so.1"),
    ("libibverbs.so", "librdmacm.so.1"),
];

#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Local addresses that the program sees devices for, in this order: rdmux0, rdmux1, ... Else those of all interfaces that are up.
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    device: Vec<IpAddr>,
    /// Start a shell whose programs all run so.
    #[arg(long, conflicts_with = "command")]
    shell: bool,
    /// The program and its arguments.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required_unless_present = "shell"
    )]
    command: Vec<OsString>,
    /// Let the devices' ports misbehave, both ways, as loss=1%,delay=5ms,seed=7: docs/bad-network.md.
    #[arg(long, value_name = "SPEC")]
    fault: Option<Spec>,
    /// Capture what its devices send and receive to a pcapng file: docs/capture.md.
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
}

pub(crate) fn run(args: Args) -> Result<()> {
    let folder = libraries()?;
    let shell = || env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
    let command = if args.shell { vec![shell()] } else { args.command };
    let Some((program, arguments)) = command.split_first() else {
        bail!("no program to run: rdmux run -- COMMAND")
    };
    let mut process = Command::new(program);
    process
        .args(arguments)
        .env("LD_LIBRARY_PATH", in_front(&folder, "LD_LIBRARY_PATH")?);
    if !args.device.is_empty() {
        let list: Vec<String> = args.device.iter().map(IpAddr::to_string).collect();
        process.env("RDMUX_DEVICES", list.join(","));
    }
    if let Some(spec) = args.fault {
        process.env("RDMUX_FAULT", spec.to_string());
    }
    if let Some(file) = &args.capture {
        process.env("RDMUX_CAPTURE", file);
    }
    // The program takes this process's place: signals and its exit status need nobody in between.
    let error = process.exec();
    Err(match error.kind() {
        ErrorKind::NotFound => anyhow!("{}: there is no such program", program.to_string_lossy()),
        _ => anyhow::Error::new(error).context(format!("starting {}", program.to_string_lossy())),
    })
}

/// A search path with a folder before what is in it.
fn in_front(folder: &Path, variable: &str) -> Result<OsString> {
    let before = env::var_os(variable).unwrap_or_default();
    let rest = env::split_paths(&before).filter(|path| !path.as_os_str().is_empty() && path != folder);
    let all: Vec<PathBuf> = std::iter::once(folder.to_owned()).chain(rest).collect();
    env::join_paths(all).with_context(|| format!("{} cannot stand in {variable}", folder.display()))
}

/// The folder with the libraries: beside the program where it is installed, or made in the build's folder.
fn libraries() -> Result<PathBuf> {
    let program = env::current_exe().context("where this program is")?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let has_all = |folder: &Path| LIBRARIES.iter().all(|(_, name)| folder.join(name).exists());
    let installed = folder.join("../lib/rdmux");
    if has_all(&installed) {
        return installed.canonicalize().context("the folder of the libraries");
    }
    for (built, _) in LIBRARIES {
        if !folder.join(built).exists() {
            bail!(
                "{built} is neither in {} nor, of a build, in {}: reinstall rdmux, or cargo build --release -p rdmux-ibverbs",
                installed.display(),
                folder.display()
            );
        }
    }
    let links = folder.join("rdmux-run");
    for (built, name) in LIBRARIES {
        link(&Path::new("..").join(built), &links, name.as_ref())?;
    }
    Ok(links)
}

fn link(to: &Path, folder: &Path, name: &OsStr) -> Result<()> {
    let link = folder.join(name);
    if link.exists() {
        return Ok(());
    }
    let made = fs::create_dir_all(folder).and_then(|()| symlink(to, &link));
    match made {
        // Another one has just made it.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made.with_context(|| format!("making {}", link.display())),
    }
}
