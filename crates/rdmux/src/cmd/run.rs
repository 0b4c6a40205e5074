//! `rdmux run`: a program for RDMA, unmodified, on the RNIC in user space.

use std::env;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, UdpSocket};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use rdmux_verbs::faults::Spec;
use rdmux_verbs::soft::trace::runtime_folder;

use super::push::folder_of;

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
    for address in &args.device {
        // Else its program would see no device, or fail when it opens one.
        if let Err(why) = UdpSocket::bind((*address, 0)) {
            bail!("--device {address}: no address of this host, `ip address` lists those there are: {why}");
        }
    }
    if let Some(file) = &args.capture
        && let folder = folder_of(file)
        && !folder.is_dir()
    {
        bail!(
            "--capture {}: there is no folder {}",
            file.display(),
            folder.display()
        );
    }
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
    links(folder)
}

/// A folder with links to the libraries of a build: beside them, or, where this user may not write, in the user's runtime folder.
fn links(built: &Path) -> Result<PathBuf> {
    let beside = built.join("rdmux-run");
    if make_links(Path::new(".."), &beside).is_ok() {
        return Ok(beside);
    }
    let make = || {
        let mut hasher = DefaultHasher::new();
        built.hash(&mut hasher);
        let folder = runtime_folder()?.join(format!("run-{:016x}", hasher.finish()));
        make_links(built, &folder)?;
        Ok(folder)
    };
    make().map_err(|why: io::Error| {
        anyhow!(
            "no folder for links to the libraries can be made, neither {} nor one in XDG_RUNTIME_DIR or /tmp: {why}",
            beside.display()
        )
    })
}

/// Sees to it that a folder has a link for each library. Programs load what it leads to, so it must be root's or this user's, and nobody
/// else may write there.
fn make_links(to: &Path, folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o755).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(folder)?;
    let is_trusted = found.uid() == 0 || found.uid() == rustix::process::geteuid().as_raw();
    if !found.is_dir() || !is_trusted || found.mode() & 0o022 != 0 {
        return Err(ErrorKind::PermissionDenied.into());
    }
    for (built, name) in LIBRARIES {
        let link = folder.join(name);
        match symlink(to.join(built), &link) {
            // It is there, or another one has just made it.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            // In a folder that this user cannot write it may be there all the same.
            Err(_) if link.exists() => {}
            made => made?,
        }
    }
    Ok(())
}
