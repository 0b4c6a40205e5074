//! Controllers that the kernel's driver has, and commands to them by its ioctls.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rdmux_wire::nvme::{Cid, Cns, IDENTIFY_LEN, NsId, Opcode, Sqe, Status, parse_namespace_list};
use rustix::fs::{OFlags, major, minor};

use crate::memory::PAGE;
use crate::passthru::{self, Queue};

/// Time for a command by which a controller tells of itself.
const IDENTIFY_TIMEOUT: Duration = Duration::from_secs(60);

/// Way of commands to a drive's controller.
pub trait CommandPath: fmt::Debug + Send + Sync {
    /// Carries out a command of the controller, and waits for its end, at most about as long as `timeout` and what an abort and a reset take. `data`
    /// are all that the drive may read or write, in the direction that the opcode has. Returns the result.
    ///
    /// # Errors
    /// The status with which the drive or its driver has ended the command.
    fn admin(&self, command: &Sqe, data: &mut [u8], timeout: Duration) -> Result<u64, Status>;

    /// As [`CommandPath::admin`], a command of a namespace.
    ///
    /// # Errors
    /// As there, or the path does not have the namespace.
    fn io(&self, command: &Sqe, data: &mut [u8], timeout: Duration) -> Result<u64, Status>;

    /// Returns the block device of a namespace, open for direct I/O, by which an io_uring reads and writes its blocks.
    fn file(&self, _: NsId) -> Option<&Arc<File>> {
        None
    }
}

/// Reason for which a controller is not opened.
#[derive(Debug, thiserror::Error)]
pub enum KernelOpenError {
    /// There is no such file.
    #[error("there is no {}: give the controller of an NVMe drive, as /dev/nvme0; `rdmux doctor drives` lists drives", .0.display())]
    Missing(PathBuf),
    /// The user may not open it, or may not send commands.
    #[error("no right to send commands to {}: run as root", .0.display())]
    Denied(PathBuf),
    /// It is something else.
    #[error("{} is no controller of an NVMe drive: give one as /dev/nvme0; --ns takes files and block devices", .0.display())]
    Kind(PathBuf),
    /// It is a controller over fabrics.
    #[error("{path} is a controller over {transport}, not a drive: export its namespaces with --ns")]
    Transport {
        /// The controller.
        path: PathBuf,
        /// Its transport.
        transport: String,
    },
    /// It has no namespace.
    #[error("{} has no namespace to export", .0.display())]
    Empty(PathBuf),
    /// The kernel shows no block device for a namespace.
    #[error(
        "namespace {nsid} of {path} has no block device: the kernel does not take its format or its command set"
    )]
    NoBlockDevice {
        /// The controller.
        path: PathBuf,
        /// The namespace.
        nsid: NsId,
    },
    /// Somebody uses a namespace.
    #[error("{} is in use: unmount it, or end what uses it", .0.display())]
    InUse(PathBuf),
    /// The system refuses something else.
    #[error("cannot use {}: {source}", path.display())]
    System {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The controller does not tell of itself.
    #[error("{} does not answer Identify: {status}", path.display())]
    Identify {
        /// The controller.
        path: PathBuf,
        /// The status of the command.
        status: Status,
    },
}

/// A controller that the kernel's driver has, with all of its namespaces, which nobody else uses.
#[derive(Debug)]
pub struct KernelController {
    path: PathBuf,
    device: File,
    namespaces: BTreeMap<NsId, KernelNamespace>,
    data_max: u32,
}

impl KernelController {
    /// Opens a controller by its character device, and each of its namespaces, which nobody may have open for himself alone.
    ///
    /// # Errors
    /// It is no controller of a drive, or somebody uses a namespace.
    pub fn open(path: &Path) -> Result<KernelController, KernelOpenError> {
        let system = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => KernelOpenError::Missing(path.to_owned()),
            io::ErrorKind::PermissionDenied => KernelOpenError::Denied(path.to_owned()),
            _ => KernelOpenError::System {
                path: path.to_owned(),
                source,
            },
        };
        let class = class(path, Path::new("/")).map_err(system)?;
        let class = class.ok_or_else(|| KernelOpenError::Kind(path.to_owned()))?;
        let transport = attribute(&class, "transport").map_err(system)?;
        if transport != "pcie" {
            return Err(KernelOpenError::Transport {
                path: path.to_owned(),
                transport,
            });
        }
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(system)?;
        let mut controller = KernelController {
            path: path.to_owned(),
            device,
            namespaces: BTreeMap::new(),
            data_max: u32::MAX,
        };
        let disks = disks(&class).map_err(system)?;
        for nsid in controller.active()? {
            let disk = disks.get(&nsid);
            let disk = disk.ok_or_else(|| KernelOpenError::NoBlockDevice {
                path: path.to_owned(),
                nsid,
            })?;
            let namespace = KernelNamespace::open(&disk.device())?;
            controller.namespaces.insert(nsid, namespace);
            controller.data_max = controller.data_max.min(disk.data_max().map_err(system)?);
        }
        match controller.namespaces.is_empty() {
            true => Err(KernelOpenError::Empty(path.to_owned())),
            false => Ok(controller),
        }
    }

    /// Returns the namespaces that the controller says it has.
    fn active(&self) -> Result<Vec<NsId>, KernelOpenError> {
        let mut bytes = vec![0; IDENTIFY_LEN];
        let mut sqe = Sqe::new(Opcode::IDENTIFY, Cid(0), NsId::NONE);
        sqe.set_dword(10, Cns::ACTIVE_NAMESPACES.0.into());
        let submitted = passthru::submit(&self.device, Queue::Admin, &sqe, &mut bytes, IDENTIFY_TIMEOUT);
        match submitted {
            Ok((status, _)) if status.is_success() => Ok(parse_namespace_list(&bytes).collect()),
            Ok((status, _)) => Err(KernelOpenError::Identify {
                path: self.path.clone(),
                status,
            }),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                Err(KernelOpenError::Denied(self.path.clone()))
            }
            Err(source) => Err(KernelOpenError::System {
                path: self.path.clone(),
                source,
            }),
        }
    }

    /// Returns its namespaces, in ascending order.
    pub fn namespaces(&self) -> impl Iterator<Item = NsId> + '_ {
        self.namespaces.keys().copied()
    }

    /// Returns the most bytes of one command's data that the kernel takes, which is no more than the drive takes. Its buffer begins at a page.
    pub fn data_max(&self) -> u32 {
        self.data_max
    }
}

impl CommandPath for KernelController {
    fn admin(&self, command: &Sqe, data: &mut [u8], timeout: Duration) -> Result<u64, Status> {
        ended(passthru::submit(
            &self.device,
            Queue::Admin,
            command,
            data,
            timeout,
        ))
    }

    fn io(&self, command: &Sqe, data: &mut [u8], timeout: Duration) -> Result<u64, Status> {
        let namespace = self.namespaces.get(&command.nsid());
        let namespace = namespace.ok_or(Status::INVALID_NAMESPACE.do_not_retry())?;
        ended(passthru::submit(
            &namespace.alone,
            Queue::Io,
            command,
            data,
            timeout,
        ))
    }

    fn file(&self, nsid: NsId) -> Option<&Arc<File>> {
        self.namespaces.get(&nsid)?.direct.as_ref()
    }
}

/// Returns the end of a command as its host is to see it.
fn ended(submitted: io::Result<(Status, u64)>) -> Result<u64, Status> {
    match submitted {
        Ok((status, result)) if status.is_success() => Ok(result),
        Ok((status, _)) => Err(status.of_drive()),
        Err(error) => Err(match error.raw_os_error() {
            // The drive has gone, or its driver has.
            Some(libc::ENODEV | libc::ENXIO | libc::ENOENT) => Status::NAMESPACE_NOT_READY.do_not_retry(),
            // The kernel has aborted it, or there is no room: the host tries again.
            Some(libc::EINTR | libc::EAGAIN | libc::ENOMEM) => Status::INTERNAL_ERROR,
            Some(libc::EACCES | libc::EPERM) => Status::ACCESS_DENIED.do_not_retry(),
            _ => Status::INTERNAL_ERROR.do_not_retry(),
        }),
    }
}

/// Returns the folder in sysfs of a controller, by its character device; `None` if it is something else.
fn class(path: &Path, root: &Path) -> io::Result<Option<PathBuf>> {
    let metadata = fs::metadata(path)?;
    if !metadata.file_type().is_char_device() {
        return Ok(None);
    }
    let (major, minor) = (major(metadata.rdev()), minor(metadata.rdev()));
    let folder = root.join(format!("sys/dev/char/{major}:{minor}"));
    let Ok(folder) = folder.canonicalize() else {
        return Ok(None);
    };
    let subsystem = folder.join("subsystem").canonicalize()?;
    Ok(subsystem.ends_with("class/nvme").then_some(folder))
}

fn attribute(folder: &Path, name: &str) -> io::Result<String> {
    Ok(fs::read_to_string(folder.join(name))?.trim().to_owned())
}

/// A block device of a namespace.
#[derive(Debug, PartialEq, Eq)]
struct Disk {
    name: String,
    /// Its folder in sysfs.
    folder: PathBuf,
}

/// Returns the block devices of a controller's namespaces. `nvme0c1n2` is a path to the device `nvme0n2`, which several controllers share.
fn disks(class: &Path) -> io::Result<BTreeMap<NsId, Disk>> {
    let mut disks = BTreeMap::new();
    for entry in fs::read_dir(class)? {
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().and_then(disk_name) else {
            continue;
        };
        let folder = entry.path();
        let Ok(nsid) = attribute(&folder, "nsid").and_then(|nsid| nsid.parse().map_err(io::Error::other))
        else {
            continue;
        };
        disks.insert(NsId(nsid), Disk { name, folder });
    }
    Ok(disks)
}

/// Returns the name of the block device for an entry of a controller's folder; `None` if the entry is something else.
fn disk_name(entry: &str) -> Option<String> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (controller, namespace) = entry.strip_prefix("nvme")?.split_once('n')?;
    let instance = match controller.split_once('c') {
        Some((subsystem, path)) => is_number(path).then_some(subsystem)?,
        None => controller,
    };
    (is_number(instance) && is_number(namespace)).then(|| format!("nvme{instance}n{namespace}"))
}

impl Disk {
    fn device(&self) -> PathBuf {
        Path::new("/dev").join(&self.name)
    }

    /// Returns the most bytes of a command's data. The pages of a buffer may lie anywhere, so each is a segment.
    fn data_max(&self) -> io::Result<u32> {
        let number = |name: &str| {
            let value = attribute(&self.folder.join("queue"), name)?;
            value.parse::<u32>().map_err(io::Error::other)
        };
        let bytes = number("max_hw_sectors_kb")?.saturating_mul(1024);
        let segments = number("max_segments")?.saturating_mul(PAGE as u32);
        Ok(bytes.min(segments))
    }
}

/// The block device of a namespace, which nobody else has mounted or open for himself alone.
#[derive(Debug)]
struct KernelNamespace {
    alone: File,
    /// Once more, for direct I/O.
    direct: Option<Arc<File>>,
}

impl KernelNamespace {
    fn open(path: &Path) -> Result<KernelNamespace, KernelOpenError> {
        let open = |path: &Path, flags: OFlags| {
            let mut options = OpenOptions::new();
            options.read(true).write(true);
            options.custom_flags(flags.bits() as i32).open(path)
        };
        let alone = open(path, OFlags::EXCL).map_err(|source| match source.kind() {
            io::ErrorKind::ResourceBusy => KernelOpenError::InUse(path.to_owned()),
            io::ErrorKind::PermissionDenied => KernelOpenError::Denied(path.to_owned()),
            _ => KernelOpenError::System {
                path: path.to_owned(),
                source,
            },
        })?;
        // The path may name another device by now.
        let again = format!("/proc/self/fd/{}", alone.as_raw_fd());
        let direct = open(Path::new(&again), OFlags::DIRECT).ok().map(Arc::new);
        Ok(KernelNamespace { alone, direct })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_name__is_that_of_the_device_for_paths_too() {
        assert_eq!(disk_name("nvme0n1").as_deref(), Some("nvme0n1"));
        assert_eq!(disk_name("nvme3c12n7").as_deref(), Some("nvme3n7"));
        for other in [
            "ng0n1",
            "nvme0",
            "nvme0n",
            "nvmen1",
            "nvme0n1p1",
            "nvme0cn1",
            "hwmon0",
        ] {
            assert_eq!(disk_name(other), None, "{other}");
        }
    }

    #[test]
    fn disks__are_found_by_the_ids_of_namespaces() {
        let class = tempfile::tempdir().unwrap();
        let queue = class.path().join("nvme0c1n1/queue");
        fs::create_dir_all(&queue).unwrap();
        fs::create_dir_all(class.path().join("power")).unwrap();
        for (name, value) in [
            ("../nsid", "5\n"),
            ("max_hw_sectors_kb", "1024\n"),
            ("max_segments", "33\n"),
        ] {
            fs::write(queue.join(name), value).unwrap();
        }
        let disks = disks(class.path()).unwrap();
        assert_eq!(disks.len(), 1);
        let disk = &disks[&NsId(5)];
        assert_eq!(disk.device(), Path::new("/dev/nvme0n1"));
        assert_eq!(disk.data_max().unwrap(), 33 * 4096);
    }

    #[test]
    fn open__says_what_is_no_controller() {
        let error = |path: &str| KernelController::open(Path::new(path)).unwrap_err();
        assert!(matches!(error("/dev/nvme-none"), KernelOpenError::Missing(_)));
        assert!(matches!(error("/dev/null"), KernelOpenError::Kind(_)));
        assert!(matches!(error("/etc"), KernelOpenError::Kind(_)));
    }

    #[test]
    fn ended__keeps_the_status_of_a_drive() {
        let status = |submitted| ended(submitted).unwrap_err();
        let refused = Status::INVALID_OPCODE.do_not_retry();
        assert_eq!(status(Ok((refused, 0))), refused);
        assert_eq!(ended(Ok((Status::SUCCESS, 7))), Ok(7));
        let gone = io::Error::from_raw_os_error(libc::ENODEV);
        assert_eq!(status(Err(gone)), Status::NAMESPACE_NOT_READY.do_not_retry());
        // Host Path Error: that of the target's own host.
        assert_eq!(status(Ok((Status(0x370), 0))), Status::INTERNAL_ERROR);
    }
}
