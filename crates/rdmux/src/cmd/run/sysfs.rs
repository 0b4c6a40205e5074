//! The kernel's files for RDMA devices in `/sys/class/infiniband` and its like, made for rdmux's devices: a folder below which they stand,
//! and a mount namespace in which they stand where programs look for them.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rdmux_verbs::resources::{netdev_of, node_guid};
use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount,
    open_tree,
};
use rustix::thread::UnshareFlags;

/// Folders in which programs look for devices.
const SHOWN: [&str; 3] = [
    "sys/class/infiniband",
    "sys/class/infiniband_verbs",
    "dev/infiniband",
];

/// Returns the folder of these devices in this user's runtime folder; makes it where there is none. Its name is a hash of its contents, so
/// that programs with the same devices share one, and none is ever changed.
pub(super) fn folder(runtime: &Path, devices: &[IpAddr]) -> Result<PathBuf> {
    let at = |path: &Path| format!("making {}", path.display());
    let files: Vec<(String, String)> = devices
        .iter()
        .enumerate()
        .flat_map(|(i, device)| files(i, *device))
        .collect();
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    let folder = runtime.join(format!("sysfs-{:016x}", hasher.finish()));
    // A program that removes old files from /tmp may leave folders behind.
    let is_whole = || {
        let first = files.first().map_or("", |(path, _)| path);
        folder.join(first).symlink_metadata().is_ok()
    };
    if is_whole() {
        return Ok(folder);
    }
    // Removed with all its contents, however this function ends.
    let building = tempfile::Builder::new()
        .prefix("sysfs-")
        .suffix(".new")
        .tempdir_in(runtime)
        .with_context(|| at(runtime))?;
    let made = building.path().join("made");
    for path in SHOWN {
        let path = made.join(path);
        fs::create_dir_all(&path).with_context(|| at(&path))?;
    }
    for (path, text) in &files {
        let path = made.join(path);
        let parent = path.parent().unwrap_or(&made);
        fs::create_dir_all(parent).with_context(|| at(parent))?;
        match text.strip_prefix("-> ") {
            Some(target) => symlink(target, &path),
            None => fs::write(&path, text),
        }
        .with_context(|| at(&path))?;
    }
    if folder.exists() && !is_whole() {
        fs::rename(&folder, building.path().join("remains")).with_context(|| at(&folder))?;
    }
    match fs::rename(&made, &folder) {
        // Another process has just made it.
        Err(_) if is_whole() => {}
        renamed => renamed.with_context(|| at(&folder))?,
    }
    Ok(folder)
}

/// Returns the files of a device, named as in the kernel's Documentation/ABI/stable/sysfs-class-infiniband, with their contents; contents
/// that begin with an arrow stand for links.
fn files(index: usize, address: IpAddr) -> Vec<(String, String)> {
    let (name, verbs) = (format!("rdmux{index}"), format!("uverbs{index}"));
    let gid = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let gid = gid.segments().map(|segment| format!("{segment:04x}")).join(":");
    let guid = node_guid(address);
    let guid = [48, 32, 16, 0]
        .map(|shift| format!("{:04x}", guid >> shift & 0xffff))
        .join(":");
    let mut files = Vec::new();
    let mut file = |path: String, text: &str| files.push((path, format!("{text}\n")));
    let device = format!("sys/class/infiniband/{name}");
    let port = format!("{device}/ports/1");
    for (path, text) in [
        ("node_type", "1: CA"),
        ("node_desc", "rdmux"),
        ("node_guid", &*guid),
        ("sys_image_guid", &*guid),
        ("fw_ver", env!("CARGO_PKG_VERSION")),
        ("hca_type", "rdmux"),
        ("hw_rev", "0"),
        ("device/vendor", "0x0000"),
        ("device/device", "0x0000"),
        ("device/numa_node", "-1"),
    ] {
        file(format!("{device}/{path}"), text);
    }
    // ibv_query_port returns the same values.
    for (path, text) in [
        ("state", "4: ACTIVE"),
        ("phys_state", "5: LinkUp"),
        ("link_layer", "Ethernet"),
        ("rate", "40 Gb/sec (4X QDR)"),
        ("cap_mask", "0x04010000"),
        ("lid", "0x0"),
        ("lid_mask_count", "0"),
        ("sm_lid", "0x0"),
        ("sm_sl", "0"),
        ("pkeys/0", "0xffff"),
        ("gids/0", &*gid),
        ("gids/1", "0000:0000:0000:0000:0000:0000:0000:0000"),
        ("gid_attrs/types/0", "RoCE v2"),
    ] {
        file(format!("{port}/{path}"), text);
    }
    if let Some((interface, _)) = netdev_of(address) {
        file(format!("{port}/gid_attrs/ndevs/0"), &interface);
        files.push((
            format!("{device}/device/net/{interface}"),
            format!("-> /sys/class/net/{interface}"),
        ));
    }
    let device = format!("sys/class/infiniband_verbs/{verbs}");
    files.push((format!("{device}/ibdev"), format!("{name}\n")));
    files.push((format!("{device}/abi_version"), "1\n".into()));
    // Programs send nothing through it, but some check whether it is a character device that they may open.
    files.push((format!("dev/infiniband/{verbs}"), "-> /dev/null".into()));
    files
}

/// Moves this process into a mount namespace in which the folder's contents stand where programs look for them. The other contents of these
/// folders of the system stay.
pub(super) fn enter(folder: &Path) -> Result<()> {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    unshare(UnshareFlags::NEWNS)
        .or_else(|errno| {
            if errno != Errno::PERM {
                return Err(errno.into());
            }
            unshare(UnshareFlags::NEWNS | UnshareFlags::NEWUSER)?;
            fs::write("/proc/self/setgroups", "deny")?;
            fs::write("/proc/self/uid_map", format!("{uid} {uid} 1", uid = uid.as_raw()))?;
            fs::write("/proc/self/gid_map", format!("{gid} {gid} 1", gid = gid.as_raw()))
        })
        .context("this system denies a private mount namespace: --sysfs preload needs none")?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .context("private mounts")?;
    for parent in ["/sys/class", "/dev"] {
        beside(Path::new(parent), folder)
            .with_context(|| format!("{parent} in a private mount namespace"))?;
    }
    Ok(())
}

#[allow(
    deprecated,
    reason = "what is unsafe is leaving a table of descriptors, which is not done here"
)]
fn unshare(flags: UnshareFlags) -> Result<(), Errno> {
    rustix::thread::unshare(flags)
}

/// Mounts a new folder in place of one of the system's: it has all other entries of that folder, and those of [`SHOWN`] from `folder`.
fn beside(parent: &Path, folder: &Path) -> Result<()> {
    let shown = SHOWN
        .iter()
        .map(|path| Path::new("/").join(path))
        .filter(|path| path.parent() == Some(parent));
    let shown: Vec<PathBuf> = shown.collect();
    let clone = |path: &Path| -> io::Result<OwnedFd> {
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_RECURSIVE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        Ok(open_tree(CWD, path, flags)?)
    };
    let mut mounted = Vec::new();
    let mut links = Vec::new();
    for entry in fs::read_dir(parent)? {
        let (entry, path) = entry.map(|entry| (entry.file_type(), entry.path()))?;
        if shown.contains(&path) {
            continue;
        }
        let entry = entry?;
        if entry.is_symlink() {
            links.push((fs::read_link(&path)?, path));
        } else {
            mounted.push((clone(&path)?, entry.is_dir(), path));
        }
    }
    for path in &shown {
        let own = folder.join(path.strip_prefix("/").unwrap_or(path));
        mounted.push((clone(&own)?, true, path.clone()));
    }
    mount(
        "tmpfs",
        parent,
        "tmpfs",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        c"mode=755",
    )?;
    for (target, path) in links {
        symlink(target, path)?;
    }
    for (tree, is_folder, path) in mounted {
        if is_folder {
            fs::create_dir(&path)
        } else {
            fs::write(&path, "")
        }?;
        move_mount(&tree, "", CWD, &path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder__is_made_anew_and_nothing_else_left() {
        let runtime = tempfile::tempdir().unwrap();
        let devices = ["127.0.0.1".parse().unwrap()];
        let one = folder(runtime.path(), &devices).unwrap();
        let known = one.join("sys/class/infiniband/rdmux0/node_type");
        assert_eq!(fs::read_to_string(&known).unwrap(), "1: CA\n");
        // The file is gone, as after somebody emptied the folder.
        fs::remove_file(&known).unwrap();
        assert_eq!(folder(runtime.path(), &devices).unwrap(), one);
        assert!(known.exists());
        let left: Vec<PathBuf> = fs::read_dir(runtime.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert_eq!(left, [one]);
    }

    #[test]
    fn folder__many_at_once() {
        let runtime = tempfile::tempdir().unwrap();
        let devices = ["127.0.0.1".parse().unwrap()];
        std::thread::scope(|scope| {
            let makers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| folder(runtime.path(), &devices).unwrap()))
                .collect();
            for maker in makers {
                assert!(maker.join().unwrap().join("dev/infiniband/uverbs0").is_symlink());
            }
        });
        assert_eq!(fs::read_dir(runtime.path()).unwrap().count(), 1);
    }
}
