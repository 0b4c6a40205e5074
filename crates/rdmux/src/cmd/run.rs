//! `rdmux run`: runs an unmodified program for RDMA on the RNIC in user space.

mod shared;
mod sysfs;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, Metadata};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, UdpSocket};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use anyhow::{Context, Result, anyhow, bail};
use rdmux_verbs::faults::Spec;
use rdmux_verbs::provider::folder::runtime_folder;
use rdmux_verbs::resources::visible_addresses;

use super::push::folder_of;
use crate::output;

/// The environment variable that names the devices' addresses.
const DEVICES: &str = "RDMUX_DEVICES";

/// Exit statuses where there is no such program, and where it could not be started: POSIX, env.
const NO_PROGRAM: i32 = 127;
const NOT_STARTED: i32 = 126;

/// The library that is preloaded.
const REDIRECT: &str = "librdmux_sysfs.so";

/// Libraries, by their files in the build and their names for the loader: two that replace those of a program, and the preloaded one.
const LIBRARIES: [(&str, &str); 3] = [
    ("libibverbs.so", "libibverbs.so.1"),
    ("libibverbs.so", "librdmacm.so.1"),
    (REDIRECT, REDIRECT),
];

/// How a program finds the devices where the kernel shows them.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Sysfs {
    /// A preloaded library.
    Preload,
    /// A mount namespace for the program.
    Namespace,
    /// The program does not see them.
    None,
}

#[derive(clap::Args, Debug)]
#[command(after_long_help = "\
Exit status: that of the program; 127 if there is no such program, 126 if it cannot be started, 2 for a wrong option, 1 for another error.

Environment variables that the program's devices heed, among them RDMUX_SHM, RDMUX_WAIT and RDMUX_TRACE: docs/commands.md.")]
pub(crate) struct Args {
    /// Local addresses of the devices rdmux0, rdmux1, ... in this order: separated by commas, or the option repeated [default: the addresses
    /// of all interfaces that are up, loopback last].
    #[arg(long, value_name = "ADDRESS,...", value_delimiter = ',')]
    device: Vec<IpAddr>,
    /// Put the program on the nodes of its devices' addresses (docs/node.md), which it shares with other programs [default of --device with
    /// this: the addresses that have a node]. Starts a node where there is none: it ends 10 seconds after its last program.
    #[arg(long, conflicts_with_all = ["fault", "capture"])]
    shared: bool,
    /// How the program sees its devices in /sys/class/infiniband and /dev/infiniband [default: preload].
    #[arg(long, value_name = "HOW", value_enum)]
    sysfs: Option<Sysfs>,
    /// Start a shell with this environment for all its programs.
    #[arg(long, conflicts_with = "command")]
    shell: bool,
    /// Print the environment for a shell to evaluate: eval "$(rdmux run --env)".
    #[arg(long, conflicts_with_all = ["command", "shell"])]
    env: bool,
    /// The program and its arguments.
    #[arg(
        trailing_var_arg = true,
        required_unless_present_any = ["shell", "env"]
    )]
    command: Vec<OsString>,
    /// Inject faults at the devices' ports, in both directions, such as loss=1%,delay=5ms,seed=7 (docs/bad-network.md).
    #[arg(long, value_name = "SPEC")]
    fault: Option<Spec>,
    /// Capture the packets of its devices, sent and received, to a pcapng file; %p stands for the process id (docs/capture.md).
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
}

pub(crate) fn run(mut args: Args) -> Result<()> {
    for (i, address) in args.device.iter().enumerate() {
        if args.device[..i].contains(address) {
            bail!("--device {address} is given twice");
        }
        // Otherwise the program would see no device, or fail when it opens one.
        if let Err(why) = UdpSocket::bind((*address, 0)) {
            bail!("--device {address}: not an address of this host (`ip address` lists them): {why}");
        }
    }
    if let Some(file) = &args.capture
        && let folder = folder_of(file)
        && !folder.is_dir()
    {
        bail!(
            "--capture {}: folder {} does not exist",
            file.display(),
            folder.display()
        );
    }
    // Otherwise the program would fail at its first device.
    rdmux_verbs::check_environment()?;
    if args.shared {
        let devices = devices(&args.device)?;
        args.device = shared::hold_nodes(devices, is_chosen(&args.device))?;
    }
    let (environment, tree) = environment(&args)?;
    if args.env {
        for (name, value) in environment {
            println!("export {name}={}", quoted(&value)?);
        }
        return Ok(());
    }
    let shell = || env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into());
    let command = if args.shell { vec![shell()] } else { args.command };
    let Some((program, arguments)) = command.split_first() else {
        bail!("no program given: use rdmux run -- COMMAND")
    };
    if let Some(tree) = tree {
        sysfs::enter(&tree)?;
    }
    let mut starting = Command::new(program);
    starting.args(arguments).envs(environment);
    // The program replaces this process, so that nothing has to pass on signals and its exit status.
    let error = starting.exec();
    let is_missing = error.kind() == ErrorKind::NotFound;
    output::error(&match is_missing && !Path::new(program).exists() {
        true => anyhow!("{}: program not found", program.to_string_lossy()),
        // A script may exist while its interpreter does not.
        false => anyhow::Error::new(error).context(format!("starting {}", program.to_string_lossy())),
    });
    process::exit(if is_missing { NO_PROGRAM } else { NOT_STARTED })
}

/// Environment variables.
type Variables = Vec<(&'static str, OsString)>;

/// Returns the variables that make a program run on rdmux, and the folder to be shown in a mount namespace of its own, if any.
fn environment(args: &Args) -> Result<(Variables, Option<PathBuf>)> {
    let folder = libraries()?;
    let mut variables = vec![("LD_LIBRARY_PATH", in_front(&folder, "LD_LIBRARY_PATH")?)];
    if !args.device.is_empty() {
        let list: Vec<String> = args.device.iter().map(IpAddr::to_string).collect();
        variables.push((DEVICES, list.join(",").into()));
    }
    if args.shared {
        variables.push(("RDMUX_PROVIDER", "shared".into()));
    }
    if let Some(spec) = &args.fault {
        variables.push(("RDMUX_FAULT", spec.to_string().into()));
    }
    if let Some(file) = &args.capture {
        variables.push(("RDMUX_CAPTURE", file.into()));
    }
    let how = args.sysfs.unwrap_or(Sysfs::Preload);
    if how == Sysfs::None {
        return Ok((variables, None));
    }
    let devices = devices(&args.device)?;
    let tree = runtime_folder()
        .context("no private folder of this user: set XDG_RUNTIME_DIR to one")
        .and_then(|runtime| sysfs::folder(&runtime, &devices))
        .and_then(|tree| {
            let is_preloaded = how == Sysfs::Preload;
            let list = is_preloaded
                .then(|| preloaded(&folder.join(REDIRECT)))
                .transpose()?;
            Ok((tree, list))
        });
    match tree {
        Ok(_) if how == Sysfs::Namespace && args.env => {
            bail!("--env cannot describe a mount namespace: use --sysfs preload or --sysfs none")
        }
        Ok((tree, None)) => return Ok((variables, Some(tree))),
        Ok((tree, Some(list))) => {
            variables.push(("LD_PRELOAD", list));
            variables.push(("RDMUX_SYSFS", tree.into()));
        }
        // Most programs do not need it.
        Err(error) if args.sysfs.is_none() => {
            eprintln!("rdmux: /sys/class/infiniband will not show the devices: {error:#}");
        }
        Err(error) => return Err(error),
    }
    Ok((variables, None))
}

/// Quotes a word for a shell.
fn quoted(value: &OsStr) -> Result<String> {
    let value = value
        .to_str()
        .with_context(|| format!("{} is not valid UTF-8", value.display()))?;
    Ok(format!("'{}'", value.replace('\'', r"'\''")))
}

/// Returns whether the user has chosen the addresses of the devices.
fn is_chosen(wanted: &[IpAddr]) -> bool {
    !wanted.is_empty() || env::var_os(DEVICES).is_some()
}

/// Returns the addresses that the program sees devices for.
fn devices(wanted: &[IpAddr]) -> Result<Vec<IpAddr>> {
    if !wanted.is_empty() {
        return Ok(wanted.to_vec());
    }
    let list = env::var(DEVICES).ok();
    visible_addresses(list.as_deref())
        .map_err(|word| anyhow!("{DEVICES}: {word} is not an IPv4 or IPv6 address"))
}

/// Returns a variable's search path with a folder in front.
fn in_front(folder: &Path, variable: &str) -> Result<OsString> {
    let before = env::var_os(variable).unwrap_or_default();
    let rest = env::split_paths(&before).filter(|path| !path.as_os_str().is_empty() && path != folder);
    let all: Vec<PathBuf> = std::iter::once(folder.to_owned()).chain(rest).collect();
    env::join_paths(all).with_context(|| format!("{} cannot be part of {variable}", folder.display()))
}

/// Returns the list of preloaded libraries with a library in front.
fn preloaded(library: &Path) -> Result<OsString> {
    // ld.so(8) has no way to quote these: the loader would look for the pieces, and report for each program that it found none.
    if library
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| byte.is_ascii_whitespace() || *byte == b':')
    {
        bail!(
            "cannot preload {}: its name has a space or a colon; --sysfs namespace needs no preloading",
            library.display()
        );
    }
    in_front(library, "LD_PRELOAD")
}

/// Returns the folder with the libraries: beside the program where it is installed, or made in the build's folder.
fn libraries() -> Result<PathBuf> {
    let program = env::current_exe().context("the path of this program")?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let has_all = |folder: &Path| LIBRARIES.iter().all(|(_, name)| folder.join(name).exists());
    let installed = folder.join("../lib/rdmux");
    if has_all(&installed) {
        check_trust(&program, &installed, LIBRARIES.map(|(_, name)| name))?;
        return installed.canonicalize().context("the folder of the libraries");
    }
    for (built, _) in LIBRARIES {
        if !folder.join(built).exists() {
            bail!(
                "{built} is neither in {} nor in the build folder {}: reinstall rdmux, or run cargo build --release -p rdmux-ibverbs -p \
                 rdmux-sysfs",
                installed.display(),
                folder.display()
            );
        }
    }
    check_trust(&program, folder, LIBRARIES.map(|(built, _)| built))?;
    links(folder)
}

/// Checks that nobody else can change the libraries, which programs load. They and their folders must belong to root, to this user or to
/// the owner of this program; and nobody else may write there, but for a group that may write to this program too.
fn check_trust(program: &Path, folder: &Path, names: [&str; 3]) -> Result<()> {
    let look = |path: &Path| fs::metadata(path).with_context(|| path.display().to_string());
    let own = look(program)?;
    let users = [0, rustix::process::geteuid().as_raw(), own.uid()];
    for name in names {
        let file = folder.join(name);
        let file = file.canonicalize().with_context(|| file.display().to_string())?;
        for path in [folder, &file, file.parent().unwrap_or(&file)] {
            let found = look(path)?;
            let is_same_group = found.gid() == own.gid() && own.mode() & 0o020 != 0;
            let others = if is_same_group { 0o002 } else { 0o022 };
            if !is_theirs(&found, &users, others) {
                bail!(
                    "{} belongs to another user or is writable by others, who could replace the libraries that programs load: reinstall \
                     rdmux in a folder of root or of this user, or run chmod go-w",
                    path.display()
                );
            }
        }
    }
    Ok(())
}

/// Returns whether a file belongs to one of these users, and its mode has none of the write bits `others`.
fn is_theirs(found: &Metadata, users: &[u32], others: u32) -> bool {
    users.contains(&found.uid()) && found.mode() & others == 0
}

/// Returns a folder with links to the libraries of a build: beside them, or, where this user may not write, in the user's runtime folder.
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
            "cannot create a folder for links to the libraries, neither {} nor one in XDG_RUNTIME_DIR or /tmp: {why}",
            beside.display()
        )
    })
}

/// Makes sure that a folder has a link for each library. Programs load the files that the links lead to, so the folder must belong to root
/// or this user, and nobody else may write there.
fn make_links(to: &Path, folder: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o755).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(folder)?;
    let users = [0, rustix::process::geteuid().as_raw()];
    if !found.is_dir() || !is_theirs(&found, &users, 0o022) {
        return Err(ErrorKind::PermissionDenied.into());
    }
    for (built, name) in LIBRARIES {
        let link = folder.join(name);
        match symlink(to.join(built), &link) {
            // The link is there, or another process has just made it.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            // In a folder that this user cannot write, the link may exist all the same.
            Err(_) if link.exists() => {}
            made => made?,
        }
    }
    Ok(())
}
